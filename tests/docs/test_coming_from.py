"""Tests that the tables of names for users of other programs name existing functions and keys."""

import dataclasses
import re

from programs import ROOT

from mcore_rl.cli.train import PROGRAMS
from mcore_rl.config.schema import reference_of

PAGE = (ROOT / "docs" / "coming_from.md").read_text()
ROWS = re.findall(r"^\| (?:(\w+): )?`([\w.]+)` \| `([\w.]+)` \|", PAGE, re.MULTILINE)


def our_keys():
    for program in PROGRAMS.values():
        for section in reference_of(program.config):
            yield section.name
            for key in section.keys:
                yield f"{section.name}.{key.name}" if section.name else key.name


def test_our_names():
    assert len(ROWS) > 90
    known = set(our_keys())
    assert not [here for _, _, here in ROWS if here not in known]


def test_trls_names():
    import trl

    table = PAGE[PAGE.index("## TRL") : PAGE.index("## verl")]
    configs = {"SFT": trl.SFTConfig, "DPO": trl.DPOConfig, "GRPO": trl.GRPOConfig, "RM": trl.RewardConfig}
    fields = {name: {field.name for field in dataclasses.fields(config)} for name, config in configs.items()}
    for algorithm, there, _ in re.findall(r"^\| (?:(\w+): )?`([\w.]+)` \| `([\w.]+)` \|", table, re.MULTILINE):
        assert there in fields[algorithm or "SFT"], (algorithm, there)

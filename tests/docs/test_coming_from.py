"""Tests that the tables of names for users of other programs name existing functions and keys."""

import dataclasses
import re
from typing import get_args

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
    configs |= {"KTO": trl.KTOConfig}
    fields = {name: {field.name for field in dataclasses.fields(config)} for name, config in configs.items()}
    for algorithm, there, _ in re.findall(r"^\| (?:(\w+): )?`([\w.]+)` \| `([\w.]+)` \|", table, re.MULTILINE):
        assert there in fields[algorithm or "SFT"], (algorithm, there)


def test_loss_types_of_trl():
    """Every loss type that TRL's trainers accept is in the table, and every name of ours there is one of the losses."""
    import inspect

    import trl

    from mcore_rl.losses.options import PreferenceLossType

    table = PAGE[PAGE.index("### Loss types of TRL") : PAGE.index("### Settings that give other numbers")]
    rows = dict(re.findall(r"^\| (KTO|SFT): (.*?) \|", table, re.M))
    compared = r"loss_type == \"(\w+)\""
    of_dpo = set(re.findall(compared, inspect.getsource(trl.DPOTrainer._compute_loss)))
    named = {name for row in re.findall(r"^\| DPO: (.*?) \|", table, re.M) for name in re.findall(r"`(\w+)`", row)}
    assert named == of_dpo
    assert of_dpo - {"sft"} <= set(get_args(PreferenceLossType))
    of_kto = set(re.findall(compared, inspect.getsource(trl.KTOTrainer._compute_loss)))
    assert set(re.findall(r"`(\w+)`", rows["KTO"])) == of_kto
    choices = trl.SFTConfig.__dataclass_fields__["loss_type"].metadata["choices"]
    assert set(re.findall(r"`(\w+)`", rows["SFT"])) == set(choices)

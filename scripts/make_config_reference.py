"""Write docs/configuration.md from the classes that define the configuration, and the names of other programs' keys,
which error messages suggest, from docs/coming_from.md.

python scripts/make_config_reference.py
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from mcore_rl.cli.train import PROGRAMS
from mcore_rl.config import RLConfig, TrainingConfig
from mcore_rl.config.other_names import OTHER_NAMES
from mcore_rl.config.schema import SectionReference, as_markdown, reference_of

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "configuration.md"

INTRODUCTION = """\
# Configuration

A configuration is a YAML file of sections. `section.key=value` on the command line overrides a value of the file.
Only the model and the data are required: `--model PATH --data FILE` replaces the file, and the run writes to
`outputs/ALGORITHM_MODEL`, or to `--output DIRECTORY`.

- `--help SECTION` prints the part of this page about a section. `--print-config` prints every value of a run.
- `mcore-rl schema dpo > dpo.schema.json` writes a JSON schema. An editor completes and checks a file with it if the
  file begins with `# yaml-language-server: $schema=dpo.schema.json`.
- `base: other.yaml` includes another file, relative to the directory of the file. Sections are merged key by key;
  other values are replaced.
- `generation=null`, or `generation: null` in a file, removes a section that an included file or the file itself has:
  the section has its defaults. `model` and `data` have no defaults.
- `${NAME}` in a value or an override is replaced by the environment variable NAME. `${NAME:-text}` is replaced by
  `text` if the variable is not set. `$${NAME}` stands for the text `${NAME}`. A variable that is not set is an error,
  unless an override gives another value. In the `headers` of a judge, `${NAME}` is replaced only by the judge, so
  that no file of the run contains the secret.

`scripts/make_config_reference.py` writes this page.
"""


def page() -> str:
    """Return the page: sections that all programs have, then the additional or different keys of some programs.

    A section that several programs have with other keys has their names in its heading, so that each heading has its
    own anchor.
    """
    lines = [INTRODUCTION, "# All programs", "", *as_markdown(reference_of(TrainingConfig))]
    further = list(parts())
    counts = Counter(section.name for section in reference_of(TrainingConfig))
    counts.update(section.name for _, sections in further for section in sections)
    repeated = [name for name, count in counts.items() if count > 1]
    for programs, sections in further:
        lines += [f"# mcore-rl train {programs}", "", *as_markdown(sections, programs, repeated)]
    return "\n".join(lines).rstrip() + "\n"


def parts() -> Iterator[tuple[str, list[SectionReference]]]:
    """Yield names of programs, and the sections with the keys that only these programs have."""
    on_rollouts = [name for name, program in PROGRAMS.items() if issubclass(program.config, RLConfig)]
    for name, program in PROGRAMS.items():
        base: type[TrainingConfig] = RLConfig if name in on_rollouts else TrainingConfig
        if name == on_rollouts[0]:
            yield " and ".join(on_rollouts), added(TrainingConfig, RLConfig)
        if own := added(base, program.config):
            yield name, own


def added(base: type[TrainingConfig], config: type[TrainingConfig]) -> list[SectionReference]:
    """Return the sections of `config` with the keys that `base` does not have, or describes differently."""
    known = {section.name: section for section in reference_of(base)}
    parts = (beside(known.get(section.name), section) for section in reference_of(config))
    return [part for part in parts if part.keys]


def beside(base: SectionReference | None, section: SectionReference) -> SectionReference:
    """Return `section` without those keys that `base` has with the same description."""
    if base is None:
        return section
    return replace(section, meaning="", keys=tuple(key for key in section.keys if key not in base.keys))


def other_names() -> str:
    """Return a line for each key or pattern of keys in docs/coming_from.md: program, algorithm or "", key of the
    program, and this package's key and "". If this package has no such key, the last two are "" and the reason."""
    lines = []
    for program, kind, keys, here, note in other_keys((ROOT / "docs" / "coming_from.md").read_text()):
        reason = "" if here else re.sub(r"\[(.*?)\]\(.*?\)|`", r"\1", note)
        lines += ["\t".join((program, kind, key, here, reason)) for key in keys]
    return "\n".join(lines) + "\n"


def other_keys(page: str) -> Iterator[tuple[str, str, list[str], str, str]]:
    """Yield (program, algorithm or "", its keys, key here or "", note) for each row of the page's tables of keys."""
    for part in re.split(r"^## ", page, flags=re.MULTILINE):
        program = part.partition("\n")[0]
        tables = re.split(r"^### ", part, flags=re.MULTILINE) if program in ("TRL", "verl", "NeMo RL") else []
        for table in (table for table in tables if table.startswith((f"{program}\n", "Loss keys"))):
            for row in re.finditer(
                r"^\| (?:(\w+): )?(`[^|]+`) \| (?:`([\w.]+)`|–) \| ?(.*?) ?\|$", table, re.MULTILINE
            ):
                yield program, row[1] or "", re.findall(r"`(.*?)`", row[2]), row[3] or "", row[4]


if __name__ == "__main__":
    for path, text in ((PAGE, page()), (OTHER_NAMES, other_names())):
        path.write_text(text)
        print(path)

"""Write docs/configuration.md from the classes that define the configuration.

python scripts/make_config_reference.py
"""

from pathlib import Path

from mcore_rl.config.reference import as_markdown, reference_of
from mcore_rl.programs.training import PROGRAMS

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"

INTRODUCTION = """\
# Configuration

A YAML file of sections; `section.key=value` on the command line overrides it. `--help SECTION` prints a section's part
of this page, `--print-config` every value of a file. Written by `scripts/make_config_reference.py`.
"""


def page() -> str:
    """Sections that all programs have, then each program's own."""
    references = {name: reference_of(program.config) for name, program in PROGRAMS.items()}
    common = [section for section in references["sft"] if all(section in others for others in references.values())]
    lines = [INTRODUCTION, "# All programs", "", *as_markdown(common)]
    for name, sections in references.items():
        if own := [section for section in sections if section not in common]:
            lines += [f"# {name}", "", *as_markdown(own)]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)

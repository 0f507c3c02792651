"""Write the table of docs/versions.md: which versions were run with which suite, and on which processor.

python scripts/make_version_table.py            # takes over outputs/suites, where suites without a failure ended
python scripts/make_version_table.py --check    # exits with 1 if the table differs from docs/suites
"""

import json
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECORDED, KEPT, PAGE = ROOT / "outputs" / "suites", ROOT / "docs" / "suites", ROOT / "docs" / "versions.md"
BEGIN, END = "<!-- made by scripts/make_version_table.py -->", "<!-- end -->"
COLUMNS = ("torch", "megatron-core", "transformers", "transformer-engine", "vllm", "trl")


def main(arguments: list[str]) -> int:
    if "--check" not in arguments:
        KEPT.mkdir(exist_ok=True)
        for path in sorted(RECORDED.glob("*.json")):
            record = json.loads(path.read_text())
            if record["failed"] or record["error"]:
                print(f"not taken over: {path.name}: {record['failed']} failed, {record['error']} errors")
            else:
                shutil.copy(path, KEPT / path.name)
    page = PAGE.read_text()
    made = with_table(page, records())
    if "--check" in arguments:
        return int(made != page)
    PAGE.write_text(made)
    return 0


def records() -> list[dict[str, Any]]:
    """Return the records of all suites, by suite and versions."""
    found = [json.loads(path.read_text()) for path in KEPT.glob("*.json")]
    return sorted(found, key=lambda one: (one["suite"], one["python"], str(one["versions"])))


def with_table(page: str, of: Iterable[dict[str, Any]]) -> str:
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{chr(10).join(table(of))}\n{END}{rest.split(END)[1]}"


def table(of: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield f"| suite | Python | {' | '.join(COLUMNS)} | processor | passed | skipped | date, commit |"
    yield "|---" * (6 + len(COLUMNS)) + "|"
    for one in of:
        versions = " | ".join(one["versions"].get(name, "") for name in COLUMNS)
        where = one.get("processor", "not recorded")
        ended = f"{where} | {one['passed']:,} | {one['skipped']} | {one['date']}, {one['commit']}"
        target, _, part = one["suite"].partition(" ")
        yield f"| `make {target}`{part and ' ' + part} | {one['python']} | {versions} | {ended} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

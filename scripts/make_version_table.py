"""Write the table of docs/versions.md: which versions were run with which suite, and on which processor.

python scripts/make_version_table.py            # takes over outputs/suites, where suites without a failure ended
python scripts/make_version_table.py --check    # exits with 1 if the table differs from docs/suites, but for ages
python scripts/make_version_table.py --show     # prints the table of outputs/suites

A record is old if later commits change the package. The site's pages get the ages at the time when they are built.
"""

import functools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECORDED, KEPT, PAGE = ROOT / "outputs" / "suites", ROOT / "docs" / "suites", ROOT / "docs" / "versions.md"
BEGIN, END = "<!-- made by scripts/make_version_table.py -->", "<!-- end -->"
COLUMNS = ("torch", "megatron-core", "transformers", "transformer-engine", "vllm", "trl")


AGE = re.compile(r"; old[^|]*(?= \|$)", re.MULTILINE)


def main(arguments: list[str]) -> int:
    if "--show" in arguments:
        print("\n".join(table(records(RECORDED))))
        return 0
    if "--check" not in arguments:
        KEPT.mkdir(exist_ok=True)
        for path in sorted(RECORDED.glob("*.json")):
            record = json.loads(path.read_text())
            if record["failed"] or record["error"]:
                print(f"not taken over: {path.name}: {record['failed']} failed, {record['error']} errors")
            elif record["commit"].endswith("-dirty"):
                print(f"not taken over: {path.name}: ran with changes that are in no commit")
            else:
                shutil.copy(path, KEPT / path.name)
    page = PAGE.read_text()
    made = with_table(page, records())
    if "--check" in arguments:
        return int(AGE.sub("", made) != AGE.sub("", page))
    PAGE.write_text(made)
    return 0


def records(directory: Path = KEPT) -> list[dict[str, Any]]:
    """Return the records of all suites, by suite and versions."""
    found = [json.loads(path.read_text()) for path in directory.glob("*.json")]
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
        ended = f"{where} | {one['passed']:,} | {one['skipped']} | {one['date']}, {one['commit']}{age(one['commit'])}"
        target, _, part = one["suite"].partition(" ")
        yield f"| `make {target}`{part and ' ' + part} | {one['python']} | {versions} | {ended} |"


@functools.cache
def age(commit: str) -> str:
    """Return how a record of `commit` is marked: not at all, if no later commit changes the package."""
    command = ["git", "rev-list", "--count", f"{commit}..HEAD", "--", "mcore_rl"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        return "; old"
    later = int(done.stdout)
    return f"; old: {later} later commit{'s' * (later > 1)}" if later else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

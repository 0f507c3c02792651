"""`mcore-rl report`: one self-contained HTML file about runs."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from mcore_rl.cli.entry_point import Parser, exit_on_error
from mcore_rl.errors import UserError
from mcore_rl.run.directory import REPORT, is_report


def report(arguments: Sequence[str], prog: str) -> None:
    """Run `mcore-rl report`: write an HTML file about runs, and print its path. A user's error gives status 2."""
    parser = Parser(prog=prog, description="Write one self-contained HTML file about runs.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output_dir of a running or finished run")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help=f"path of the report (default: {REPORT} in the first RUN)"
    )
    parsed = parser.parse_args(arguments)
    with exit_on_error():
        print(write_report(parsed.runs, parsed.output or parsed.runs[0] / REPORT))


def write_report(paths: Sequence[Path], output: Path) -> Path:
    """Write a report of the runs with the output directories `paths` to the file `output`; return `output`.

    Raises:
        UserError: a path is not the directory of a run; `output` exists and is not a report, or cannot be written;
            Plotly is not installed.
    """
    from mcore_rl.report.runs import read_runs

    runs = read_runs(list(paths))
    if output.is_symlink() or (output.exists() and not is_report(output)):
        raise UserError(f"{output}: exists and was not written by mcore-rl report; choose another file (--output FILE)")
    for run in runs:
        if run.directory.writes(output) and output.resolve() != (run.path / REPORT).resolve():
            raise UserError(f"--output {output}: the run in {run.path} writes this file; choose another file")
    try:
        from mcore_rl.report.page import page
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed: pip install 'mcore_rl[report]'") from None
    text = page(runs).encode("utf-8", "replace")  # a sample may have half a surrogate pair
    try:
        with tempfile.NamedTemporaryFile(dir=output.parent, prefix=f".{output.name}.", delete=False) as file:
            file.write(text)
        Path(file.name).chmod(0o644)
        Path(file.name).replace(output)
    except OSError as error:
        raise UserError(f"{output}: cannot be written ({error.strerror})") from None
    return output

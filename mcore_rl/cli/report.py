"""`mcore-rl report`: one HTML file about one or more runs."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from mcore_rl.cli.entry_point import Parser, exit_on_error
from mcore_rl.errors import UserError
from mcore_rl.run.directory import REPORT, is_report


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Read the runs, write the page and print its path; exit with status 2 and one line after bad input."""
    parser = Parser(prog=prog, description="One self-contained HTML file about runs, for a browser.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output_dir of a run, going on or ended")
    parser.add_argument("--output", type=Path, metavar="FILE", help=f"instead of {REPORT} in the first RUN")
    parsed = parser.parse_args(arguments)
    with exit_on_error():
        print(write_report(parsed.runs, parsed.output or parsed.runs[0] / REPORT))


def write_report(paths: Sequence[Path], output: Path) -> Path:
    """Write the report of the runs with these output directories.

    Raises:
        UserError: a path is not the directory of a run; `output` is not an earlier report, or cannot be written; Plotly
            is not installed.
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

"""Draw metrics of a run against its steps, as OUTPUT/<first metric>.png.

python scripts/plot_metrics.py OUTPUT [METRIC …]          (reward_mean and validation_reward_mean, if none is named)
"""

import argparse
from pathlib import Path

from mcore_rl.algorithms.step_log import read_step_log
from mcore_rl.entry_point import Parser, told_in_one_line
from mcore_rl.errors import UserError


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("metrics", nargs="*")
    arguments = parser.parse_args()
    with told_in_one_line():
        names = arguments.metrics or ["reward_mean", "validation_reward_mean"]
        print(draw(arguments.output, names))


def draw(output: Path, names: list[str]) -> Path:
    """The picture's file.

    Raises:
        UserError: there is no run, or no such metric.
    """
    try:
        lines = read_step_log(output / "metrics.jsonl")
    except (OSError, ValueError) as error:
        raise UserError(f"{output / 'metrics.jsonl'}: cannot be read ({error})") from None
    points = {name: [(line["step"], line[name]) for line in lines if name in line] for name in names}
    if absent := [name for name in names if not points[name]]:
        known = ", ".join(sorted({name for line in lines for name in line} - {"step"}))
        raise UserError(f"{output}: no step has the metric {absent[0]}; there are {known or 'none'}")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name in names:
        marker = "o" if len(points[name]) < 20 else None
        axes.plot(*zip(*points[name], strict=True), marker=marker, label=name.replace("_", " "))
    axes.set(xlabel="step", title=str(output))
    axes.grid(alpha=0.3)
    axes.legend()
    path = output / f"{names[0]}.png"
    figure.savefig(path, dpi=120)
    return path


if __name__ == "__main__":
    main()

"""Draw metrics of a run against its steps, as OUTPUT/<first metric>.png.

python scripts/plot_metrics.py OUTPUT [METRIC …]          (reward_mean and validation_reward_mean, if none is named)
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from mcore_rl.algorithms.step_log import read_step_log


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("metrics", nargs="*")
    arguments = parser.parse_args()
    names = arguments.metrics or ["reward_mean", "validation_reward_mean"]
    lines = read_step_log(arguments.output / "metrics.jsonl")
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name in names:
        points = [(line["step"], line[name]) for line in lines if name in line]
        if not points:
            parser.error(f"no step of {arguments.output} has the metric {name}")
        axes.plot(*zip(*points, strict=True), marker="o" if len(points) < 20 else None, label=name.replace("_", " "))
    axes.set(xlabel="step", title=str(arguments.output))
    axes.grid(alpha=0.3)
    axes.legend()
    path = arguments.output / f"{names[0]}.png"
    figure.savefig(path, dpi=120)
    print(path)


if __name__ == "__main__":
    main()

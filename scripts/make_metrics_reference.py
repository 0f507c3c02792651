"""Write docs/metrics.md from the descriptions of all metrics in mcore_rl/run/metric_meanings.yaml.

python scripts/make_metrics_reference.py
"""

from pathlib import Path

from mcore_rl.run.metric_meanings import Metric, metrics

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"

INTRODUCTION = """\
# Metrics

Each step writes one line of metrics to `metrics.jsonl`, and the same metrics to the trackers (`logging`). `mcore-rl
report` draws them and explains each curve. All metrics are over all processes, whatever the parallel layout is.

- Metrics of validation begin with `validation_`, those of a named validation set with `validation_SET/`. Step 0 is the
  validation before training.
- If `data.train` has several sources, `SOURCE/NAME` is a metric of the samples of one source.
- A word in capitals stands for any text: `reward_NAME_mean` is a metric of each reward.
- π is the policy, π_prev the policy before the step's updates, π_ref the reference, and π_sampler the distribution from
  which tokens are sampled. A nat is the unit of natural logarithms.

The names in TRL, verl and NeMo RL are in [Names of metrics](coming_from.md#names-of-metrics).
`scripts/make_metrics_reference.py` writes this page.
"""


def page() -> str:
    """Return the page: one table for each group of metrics."""
    lines = [INTRODUCTION]
    for title, group in metrics().items():
        lines += [f"## {title}", "", "| metric | unit | meaning | a good run |", "|---|---|---|---|"]
        lines += [row(metric) for metric in group]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def row(metric: Metric) -> str:
    """Return the row of a metric in the table of its group."""
    cells = (", ".join(f"`{name}`" for name in metric.names), metric.unit, metric.meaning, metric.good)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)

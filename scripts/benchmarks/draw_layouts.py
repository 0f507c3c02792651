"""Draw the rewards of one GRPO run of SmolLM2-135M in one process, in two pipeline stages and with context parallelism.

    python scripts/benchmarks/draw_layouts.py [--steps 10]

Each run is `mcore-rl train grpo configs/grpo_smollm.yaml` (make outputs/smollm/model/config.json writes its model). The
script writes docs/smollm_layouts.svg. It exits with 1 if the first two rewards differ, if later ones differ by more
than 0.1, or if the reward does not rise. Layouts round differently in the last digits; after some updates, a few tokens
are sampled differently because of that.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench_results import this_run
from make_drawings import text

ROOT = Path(__file__).parent.parent.parent
LAYOUTS = {
    "one process": (1, [], "#888888", 7),
    "PP2": (2, ["parallel.pipeline_model_parallel_size=2"], "#4477aa", 4),
    "CP2": (2, ["parallel.context_parallel_size=2"], "#cc6677", 1.5),
}
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 280, 60, 230, 50
LEAST_RISE, EQUAL_STEPS, MOST_DIFFERENCE = 0.2, 2, 0.1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    steps = parser.parse_args().steps
    runs = {name: run(name, processes, overrides, steps) for name, (processes, overrides, *_) in LAYOUTS.items()}
    rewards = {name: [step["reward_mean"] for step in metrics if "loss" in step] for name, metrics in runs.items()}
    for name, curve in rewards.items():
        print(f"{name:<12}", "  ".join(f"{reward:.3f}" for reward in curve))
    first = rewards["one process"]
    (ROOT / "docs" / "smollm_layouts.svg").write_text(picture(rewards))
    differ = any(
        curve[:EQUAL_STEPS] != first[:EQUAL_STEPS]
        or max(abs(a - b) for a, b in zip(curve, first, strict=True)) > MOST_DIFFERENCE
        for curve in rewards.values()
    )
    return int(differ or first[-1] - first[0] < LEAST_RISE)


def run(name: str, processes: int, overrides: list[str], steps: int) -> list[dict[str, Any]]:
    """Train in a layout and return the metrics of every step."""
    output = ROOT / "outputs" / f"layouts_{name.lower().replace(' ', '_')}"
    command = [
        sys.executable, "-m", "mcore_rl", "train", "grpo", "--nproc-per-node", str(processes),
        "configs/grpo_smollm.yaml", f"output_dir={output}", f"trainer.max_steps={steps}", "checkpoint.overwrite=true",
        "checkpoint.resume=none", "checkpoint.save_interval=null", "checkpoint.export_hf=false", *overrides,
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True)
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def picture(rewards: dict[str, list[float]]) -> str:
    """Draw a curve for each run; earlier ones are wider, so that all can be seen where they lie on each other."""
    count = max(map(len, rewards.values()))
    at = {step: LEFT + (WIDTH - LEFT - 20) * step / max(1, count - 1) for step in range(count)}
    high = {value: BOTTOM - (BOTTOM - TOP) * value for value in (0, 0.25, 0.5, 0.75, 1)}
    parts = [text(16, 24, "GRPO of SmolLM2-135M on sums: mean reward of each step", weight="bold")]
    for value, y in high.items():
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y:g}" y2="{y:g}" stroke="#dddddd"/>')
        parts.append(text(16, y + 4, f"{value:g}", color="#666666"))
    parts += [text(x - 4, BOTTOM + 20, str(step + 1), color="#666666") for step, x in at.items()]
    for number, (name, curve) in enumerate(rewards.items()):
        _, _, color, width = LAYOUTS[name]
        points = " ".join(f"{at[step]:.1f},{BOTTOM - (BOTTOM - TOP) * value:.1f}" for step, value in enumerate(curve))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="{width}"/>')
        x = LEFT + 20 + 130 * number
        parts.append(f'<line x1="{x}" x2="{x + 24}" y1="40" y2="40" stroke="{color}" stroke-width="{width}"/>')
        parts.append(text(x + 30, 44, name))
    made = this_run()
    parts.append(text(16, HEIGHT - 12, f"{made['date']}, {made['commit']}, {made['machine']}", color="#666666"))
    body = "\n".join(parts)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif"'
    return f'{head} font-size="13">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'


if __name__ == "__main__":
    sys.exit(main())

"""Draw the losses of one DPO run of SmolLM2-135M in one process and in three parallel layouts.

    python scripts/benchmarks/draw_layouts.py [--steps 10]

Each run is `mcore-rl train dpo configs/dpo_smollm.yaml` (make outputs/smollm/model/config.json writes its model). The
script writes docs/smollm_layouts.svg. It exits with 1 if a loss differs by more than 1e-6 from that of one process, or
if the loss does not fall.
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
    "CP2": (2, ["parallel.context_parallel_size=2"], "#cc6677", 2.5),
    "TP3": (3, ["parallel.tensor_model_parallel_size=3"], "#228833", 1),
}
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 280, 60, 230, 50
LEAST_FALL, MOST_DIFFERENCE = 0.2, 1e-6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    steps = parser.parse_args().steps
    losses = {
        name: [step["loss"] for step in run(name, processes, overrides, steps) if "loss" in step]
        for name, (processes, overrides, *_) in LAYOUTS.items()
    }
    first = losses["one process"]
    for name, curve in losses.items():
        print(f"{name:<12}", "  ".join(f"{loss:.7f}" for loss in curve))
    apart = max(abs(a - b) for curve in losses.values() for a, b in zip(curve, first, strict=True))
    print(f"largest difference: {apart:.1e}")
    (ROOT / "docs" / "smollm_layouts.svg").write_text(picture(losses, apart))
    return int(apart > MOST_DIFFERENCE or first[0] - first[-1] < LEAST_FALL)


def run(name: str, processes: int, overrides: list[str], steps: int) -> list[dict[str, Any]]:
    """Train in a layout and return the metrics of every step."""
    output = ROOT / "outputs" / f"layouts_{name.lower().replace(' ', '_')}"
    command = [
        sys.executable, "-m", "mcore_rl", "train", "dpo", "--nproc-per-node", str(processes),
        "configs/dpo_smollm.yaml", f"output_dir={output}", f"trainer.max_steps={steps}", "checkpoint.overwrite=true",
        "checkpoint.resume=none", "checkpoint.save_interval=null", "checkpoint.export_hf=false", *overrides,
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True)
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def picture(losses: dict[str, list[float]], apart: float) -> str:
    """Draw a curve for each run; earlier ones are wider, so that all can be seen where they lie on each other."""
    count = max(map(len, losses.values()))
    at = {step: LEFT + (WIDTH - LEFT - 20) * step / max(1, count - 1) for step in range(count)}
    high = {value: BOTTOM - (BOTTOM - TOP) * value for value in (0, 0.25, 0.5, 0.75, 1)}
    parts = [text(16, 24, f"DPO of SmolLM2-135M: loss of each step; largest difference {apart:.0e}", weight="bold")]
    for value, y in high.items():
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y:g}" y2="{y:g}" stroke="#dddddd"/>')
        parts.append(text(16, y + 4, f"{value:g}", color="#666666"))
    parts += [text(x - 4, BOTTOM + 20, str(step + 1), color="#666666") for step, x in at.items()]
    for number, (name, curve) in enumerate(losses.items()):
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

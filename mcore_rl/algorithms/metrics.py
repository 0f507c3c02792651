"""Where a run's numbers go: one JSON object a step, a progress line, TensorBoard, Weights & Biases."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console

from mcore_rl.algorithms.step_log import StepLog
from mcore_rl.config import LoggingConfig
from mcore_rl.data.progress import Say, silent

console = Console(soft_wrap=True, highlight=False)


def speaker(is_writer: bool) -> Say:
    """`Say` of this rank."""
    return (lambda message: console.print(message, markup=False)) if is_writer else silent


class Reporter:
    """Writes on rank 0 and does nothing on the others.

    Args:
        output_dir: where metrics.jsonl goes.
        first_step: the first that is done now, of `total`.
    """

    def __init__(self, output_dir: Path, config: LoggingConfig, is_writer: bool, first_step: int, total: int) -> None:
        self.enabled, self.total = is_writer, total
        self.first_step, self.started = first_step, time.monotonic()
        if not is_writer:
            return
        self.log = StepLog(output_dir / "metrics.jsonl")
        self.tensorboard = _tensorboard(output_dir) if config.tensorboard else None
        self.wandb = _wandb(config.wandb, output_dir) if config.wandb else None

    def record(self, step: int, metrics: dict[str, Any]) -> None:
        """One object for the step: a line of metrics.jsonl, and TensorBoard's and wandb's scalars."""
        if not self.enabled:
            return
        self.log.append(step, metrics)
        if self.tensorboard:
            for name, value in metrics.items():
                self.tensorboard.add_scalar(name, value, step)
            self.tensorboard.flush()
        if self.wandb:
            self.wandb.log(metrics, step=step)

    def progress(self, step: int, metrics: dict[str, Any]) -> None:
        """The line that a person watches."""
        if not self.enabled:
            return
        per_step = (time.monotonic() - self.started) / (step - self.first_step + 1)
        shown = ("reward_mean", "loss", "accuracy", "grad_norm", "lr")
        parts = [f"{name} {metrics[name]:.4g}" for name in shown if name in metrics]
        parts.append(f"{metrics['tokens_per_second']:,.0f} tokens/s")
        parts.append(f"{metrics['tflops_per_second']:.3g} TFLOP/s")
        parts.append(f"ETA {_duration((self.total - step) * per_step)}")
        console.print(f"step {step}/{self.total}  " + "  ".join(parts), markup=False)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def _tensorboard(output_dir: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(output_dir / "tensorboard"))


def _wandb(project: str, output_dir: Path) -> Any:
    import wandb

    return wandb.init(project=project, dir=str(output_dir))

"""Other programs that show a run's numbers: TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from mcore_rl.config import TrainingConfig
from mcore_rl.run.directory import WANDB_ID
from mcore_rl.run.identity import flattened
from mcore_rl.utils.console import Say


class Tracker(Protocol):
    """A tracker, which receives the metrics that metrics.jsonl receives."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """The numbers of one step."""

    def close(self) -> None:
        """The run is over, however it ended."""


class TensorBoard:
    """Event files in output_dir/tensorboard."""

    def __init__(self, config: TrainingConfig) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(config.output_dir / "tensorboard"))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run there, which goes on when this run does: its id is kept in the output directory."""

    def __init__(self, config: TrainingConfig) -> None:
        import wandb

        asked, kept = config.logging, config.output_dir / WANDB_ID
        run_id = kept.read_text().strip() if kept.is_file() else ""
        if not run_id:
            run_id = secrets.token_hex(8)
            with contextlib.suppress(OSError):
                kept.write_text(run_id)
        self._run: Any = wandb.init(
            id=run_id,
            resume="allow",
            project=asked.wandb,
            name=asked.run_name,
            tags=list(asked.wandb_tags) or None,
            dir=str(config.output_dir),
            config=config.model_dump(mode="json"),
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """To the server, or the directory, that `MLFLOW_TRACKING_URI` names."""

    def __init__(self, config: TrainingConfig) -> None:
        import mlflow

        self._mlflow = mlflow
        mlflow.set_experiment(config.logging.mlflow)
        mlflow.start_run(run_name=config.logging.run_name)
        mlflow.log_params(flattened(config.model_dump(mode="json")))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics({name: float(value) for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class Trackers:
    """The trackers of the configuration. A tracker that fails is reported once and left out from then on."""

    def __init__(self, config: TrainingConfig, say: Say) -> None:
        asked, self._say, self._started = config.logging, say, dict[str, Tracker]()
        kinds: dict[str, tuple[object, Callable[[TrainingConfig], Tracker]]] = {
            "TensorBoard": (asked.tensorboard, TensorBoard),
            "Weights & Biases": (asked.wandb, WeightsAndBiases),
            "MLflow": (asked.mlflow, MLflow),
        }
        for name, (is_asked, start) in kinds.items():
            if is_asked:
                with self._left_out_if_it_fails(name):
                    self._started[name] = start(config)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Hand the numbers of one step to all of them."""
        for name, tracker in list(self._started.items()):
            with self._left_out_if_it_fails(name):
                tracker.log(metrics, step)

    def close(self) -> None:
        """Tell all of them that the run is over."""
        for name, tracker in list(self._started.items()):
            with self._left_out_if_it_fails(name):
                tracker.close()

    @contextlib.contextmanager
    def _left_out_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever it is, it is no reason to lose what is trained
            self._started.pop(name, None)
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            self._say(f"warning: {name} fails and is left out from now on ({reason}); metrics.jsonl goes on")

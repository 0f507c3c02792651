"""Other programs that show a run's numbers: TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from mcore_rl.config import TrainingConfig
from mcore_rl.run.identity import flattened


class Tracker(Protocol):
    """Where metrics go beside metrics.jsonl."""

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
    def __init__(self, config: TrainingConfig) -> None:
        import wandb

        asked = config.logging
        self._run: Any = wandb.init(
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


def trackers_of(config: TrainingConfig) -> list[Tracker]:
    """Those that the configuration asks for, started."""
    asked = config.logging
    started: list[Tracker] = []
    if asked.tensorboard:
        started.append(TensorBoard(config))
    if asked.wandb is not None:
        started.append(WeightsAndBiases(config))
    if asked.mlflow is not None:
        started.append(MLflow(config))
    return started

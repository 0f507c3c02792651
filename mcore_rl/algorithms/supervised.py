"""Training on a fixed dataset: SFT, DPO, reward models."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mcore_rl import watchdog
from mcore_rl.algorithms.interfaces import LossFunction
from mcore_rl.algorithms.training import TrainingRun
from mcore_rl.data.batches import SampleOrder, collate
from mcore_rl.data.records import Dataset, Unit
from mcore_rl.distributed.batched_data_dict import BatchedDataDict


@dataclass
class SupervisedRun(TrainingRun[Dataset]):
    """Training of a policy on a fixed dataset.

    add_columns: adds what the loss needs to a batch, given its dataset indices (or None for validation).
    check_first_step: raises TrainingError if what must hold before the first update does not.
    add_current_columns: as `add_columns`, what depends on the policy's present weights: before each use of a batch.
    """

    loss_fn: LossFunction
    add_columns: Callable[[BatchedDataDict[Any], list[int] | None], None] = lambda data, indices: None
    check_first_step: Callable[[dict[str, Any], BatchedDataDict[Any]], None] = lambda metrics, data: None
    add_current_columns: Callable[[BatchedDataDict[Any], list[int] | None], None] = lambda data, indices: None

    @property
    def samples_per_step(self) -> int:
        return self.config.batch.global_batch_size

    def step(self, step: int) -> dict[str, Any]:
        started = time.perf_counter()
        watchdog.enter(f"step {step}: training")
        data = self._next_batch()
        metrics = self.policy.train(data, self.loss_fn)
        metrics.pop("all_mb_metrics")
        if step == 1:
            self.check_first_step(metrics, data)
        return {**metrics, **self.throughput(data, time.perf_counter() - started)}

    def _next_batch(self) -> BatchedDataDict[Any]:
        """The next global batch; smaller at the very end of the last epoch."""
        train, size, epochs = self.inputs.train, self.config.batch.global_batch_size, self.config.trainer.max_epochs
        count = size if epochs is None else min(size, epochs * len(train) - self.consumed_samples)
        indices = SampleOrder(len(train), self.config.seed).indices(self.consumed_samples, count)
        self.consumed_samples += count
        data = self.collate([train.units[i] for i in indices], self.consumed_samples - count)
        self.add_columns(data, indices)
        self.add_current_columns(data, indices)
        return data

    def collate(self, units: list[Unit], first_sample: int) -> BatchedDataDict[Any]:
        """The batch of these records, whose first is the run's sample of this number."""
        return collate(units, self.inputs.tokenizer.pad_token_id)

    def reference_moved(self) -> None:
        self.__dict__.pop("_validation_batch", None)

    def validate(self, step: int) -> dict[str, float]:
        """Metrics over the whole validation set, as one batch, so that they are exact means."""
        if self.inputs.validation is None:
            return {}
        watchdog.enter(f"step {step}: validation")
        if not hasattr(self, "_validation_batch"):
            self._validation_batch = collate(self.inputs.validation.units, self.inputs.tokenizer.pad_token_id)
            self.add_columns(self._validation_batch, None)
        self.add_current_columns(self._validation_batch, None)
        metrics = self.policy.evaluate(self._validation_batch, self.loss_fn)
        shown = "  ".join(f"{name} {metrics[name]:.4g}" for name in ("loss", "accuracy") if name in metrics)
        self.say(f"step {step}  validation: {shown}")
        return {f"validation_{name}": value for name, value in metrics.items()}

"""Training on a fixed dataset: SFT, DPO, reward models."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mcore_rl import watchdog
from mcore_rl.algorithms.interfaces import LossFunction
from mcore_rl.algorithms.training import TrainingRun
from mcore_rl.data.batches import collate
from mcore_rl.data.records import Dataset, Unit
from mcore_rl.distributed.batched_data_dict import BatchedDataDict

AddColumns = Callable[[BatchedDataDict[Any], Any, Sequence[int]], None]
"""(batch, dataset, indices of its records there)"""


@dataclass
class SupervisedRun(TrainingRun[Dataset]):
    """Training of a policy on a fixed dataset.

    add_columns: adds what the loss needs to a batch of these records of a dataset.
    check_first_step: raises TrainingError if what must hold before the first update does not.
    add_current_columns: as `add_columns`, what depends on the policy's present weights: before each use of a batch.
    """

    loss_fn: LossFunction
    add_columns: AddColumns = lambda data, dataset, indices: None
    check_first_step: Callable[[dict[str, Any], BatchedDataDict[Any]], None] = lambda metrics, data: None
    add_current_columns: AddColumns = lambda data, dataset, indices: None
    validation_batches: dict[str, BatchedDataDict[Any]] = field(default_factory=dict)
    """By set, with what `add_columns` adds."""

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
        indices = train.order(self.config.seed).indices(self.consumed_samples, count)
        self.consumed_samples += count
        data = self.collate([train.units[i] for i in indices], self.consumed_samples - count)
        self.add_columns(data, train, indices)
        self.add_current_columns(data, train, indices)
        return data

    def collate(self, units: list[Unit], first_sample: int) -> BatchedDataDict[Any]:
        """The batch of these records, whose first is the run's sample of this number."""
        return collate(units, self.inputs.tokenizer.pad_token_id)

    def reference_moved(self) -> None:
        self.validation_batches.clear()

    def validate_on(self, name: str, dataset: Dataset, step: int) -> dict[str, float]:
        """Metrics over a whole set, as one batch, so that they are exact means."""
        everything = range(len(dataset))
        if name not in self.validation_batches:
            self.validation_batches[name] = collate(dataset.units, self.inputs.tokenizer.pad_token_id)
            self.add_columns(self.validation_batches[name], dataset, everything)
        self.add_current_columns(self.validation_batches[name], dataset, everything)
        return self.policy.evaluate(self.validation_batches[name], self.loss_fn)

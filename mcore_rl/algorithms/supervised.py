"""Training on a fixed dataset: SFT, DPO, reward models."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mcore_rl.data.batching import collate, share_records, valid_counts
from mcore_rl.data.datasets import Dataset
from mcore_rl.distributed.batched_data_dict import OwnRows, Share
from mcore_rl.losses.common import LossFunction
from mcore_rl.run import watchdog
from mcore_rl.run.loop import TrainingRun

AddColumns = Callable[[OwnRows[Any], Any, Sequence[int]], None]
"""(a replica's own rows of a batch, dataset, indices of their records there)"""


VALIDATION_RECORDS = 4096
"""Of a validation set that go through the model at a time; what a loss takes from a whole batch it takes from these."""


@dataclass
class SupervisedRun(TrainingRun[Dataset]):
    """Training of a policy on a fixed dataset.

    add_columns: adds what the loss needs to a batch of these records of a dataset.
    check_first_step: raises TrainingError if what must hold before the first update does not.
    add_current_columns: as `add_columns`, what depends on the policy's present weights: before each use of a batch.
    """

    loss_fn: LossFunction
    add_columns: AddColumns = lambda data, dataset, indices: None
    check_first_step: Callable[[dict[str, Any], OwnRows[Any]], None] = lambda metrics, data: None
    add_current_columns: AddColumns = lambda data, dataset, indices: None
    validation_columns: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    """Columns that `add_columns` adds to a set's parts, by its name and the part's first record."""
    validation_counts: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """`valid_counts` of each set."""

    def step(self, step: int) -> dict[str, Any]:
        started = time.perf_counter()
        watchdog.enter(f"step {step}: training")
        data = self._next_batch()
        metrics = self.policy.train(data, self.loss_fn)
        metrics.pop("all_mb_metrics")
        if step == 1:
            self.check_first_step(metrics, data)
        (tokens,) = data.share.sum(float(data["input_lengths"].sum()))
        return {**metrics, **self.throughput(tokens, self.policy.flops_of(data), time.perf_counter() - started)}

    def _next_batch(self) -> OwnRows[Any]:
        """This replica's part of the next global batch, which is smaller at the very end of the last epoch."""
        train, size, epochs = self.inputs.train, self.config.batch.global_batch_size, self.config.trainer.max_epochs
        count = size if epochs is None else min(size, epochs * len(train) - self.consumed_samples)
        indices = train.order(self.config.seed).indices(self.consumed_samples, count)
        self.consumed_samples += count
        data, own = self._own_rows(train, indices, self.consumed_samples - count)
        self.add_columns(data, train, own)
        self.add_current_columns(data, train, own)
        return data

    def _own_rows(
        self, dataset: Dataset, indices: Sequence[int], first_sample: int | None = None
    ) -> tuple[OwnRows[Any], list[int]]:
        """This replica's part of a batch of records; and which of `indices` they are.

        Args:
            first_sample: number of the batch's first sample among all of the run; None for those of validation.
        """
        share, places = share_records(self.policy.divide, self.policy.topology.data, dataset.units, indices)
        own = [indices[place] for place in places]
        samples = None if first_sample is None else [first_sample + place for place in places]
        return self.own_batch(dataset, own, share, samples), own

    def own_batch(
        self, dataset: Dataset, indices: Sequence[int], share: Share, samples: Sequence[int] | None
    ) -> OwnRows[Any]:
        """The rows of this replica's records of a batch.

        Args:
            samples: their numbers among all of the run; None for those of validation.
        """
        return OwnRows(collate([dataset.units[i] for i in indices], self.inputs.tokenizer.pad_token_id), share)

    def reference_moved(self) -> None:
        self.validation_columns.clear()

    def validate_on(self, name: str, dataset: Dataset, step: int) -> dict[str, float]:
        """Metrics over a whole set, whose tokens are never there all at once: exact means, but for what a loss takes
        from a batch as a whole (KTO's reference point)."""
        starts = range(0, len(dataset), VALIDATION_RECORDS)
        if name not in self.validation_counts:
            counts = [valid_counts(self._part(dataset, start)[0]) for start in starts]
            sequences, tokens = (torch.stack(count).sum() for count in zip(*counts, strict=True))
            self.validation_counts[name] = sequences, tokens
        parts = (self._with_columns(dataset, name, start) for start in starts)
        return self.policy.evaluate_parts(parts, self.validation_counts[name], self.loss_fn)

    def _part(self, dataset: Dataset, start: int) -> tuple[OwnRows[Any], list[int]]:
        return self._own_rows(dataset, range(start, min(start + VALIDATION_RECORDS, len(dataset))))

    def _with_columns(self, dataset: Dataset, name: str, start: int) -> OwnRows[Any]:
        """A part of a validation set, with all that the loss needs."""
        data, own = self._part(dataset, start)
        if (name, start) not in self.validation_columns:
            tokens = set(data)
            self.add_columns(data, dataset, own)
            self.validation_columns[name, start] = {key: data[key] for key in set(data) - tokens}
        data.update(self.validation_columns[name, start])
        self.add_current_columns(data, dataset, own)
        return data

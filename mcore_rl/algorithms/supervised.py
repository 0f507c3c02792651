"""Supervised training: a policy on a fixed dataset, for SFT, reward models, DPO, KTO and distillation."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_rl.config import TrainingConfig
from mcore_rl.data.batching import assign_records, collate, global_valid_counts
from mcore_rl.data.datasets import Dataset
from mcore_rl.distributed.batched_data_dict import LocalBatch
from mcore_rl.losses.common import (
    LogprobLoss,
    LossBySource,
    LossFunction,
    reads_counted_tokens_only,
    takes_logprobs,
    token_mask_of,
)
from mcore_rl.models.policy.megatron_policy import MegatronPolicy, MicrobatchResults
from mcore_rl.run import watchdog
from mcore_rl.run.loop import TrainingLoop
from mcore_rl.run.setup import RunInputs

VALIDATION_RECORDS = 4096
"""Number of validation records in a batch. If a loss needs a statistic of the whole batch (KTO's reference point), it
computes the statistic over one such batch."""

Columns = dict[str, Tensor]


@dataclass(eq=False)
class TrainingBatch:
    """This replica's part of a batch of records for training or validation.

    rows: `input_ids`, `token_mask` [B, S], `input_lengths`, `sample_mask` [B], and columns that the objective adds.
    dataset, indices: the dataset, and for each record its index in the dataset.
    previous: for each record, the dataset index of the record before it in the global batch. The last record counts as
        the one before the first. An entry is None if the global batch has only one record.
    samples: for each record, its number among all samples of the run; None in validation. This number and the
        run's seed determine the random numbers of a response that the student generates.
    """

    rows: LocalBatch[Any]
    dataset: Dataset
    indices: list[int]
    previous: list[int | None]
    samples: list[int] | None = None


class Objective:
    """The differences between algorithms in supervised training: the loss, and the columns that the loss reads.

    SFT uses this class itself, because its loss needs no additional columns.
    """

    temperature = 1.0
    """Temperature: the policy's logits are divided by it before the loss gets log-probabilities."""

    def __init__(self, loss_fn: LossFunction) -> None:
        self.loss_fn = loss_fn

    def rows(self, batch: TrainingBatch) -> LocalBatch[Any]:
        """Return the rows to train on: the rows of the batch, or other rows made from the batch's records."""
        return batch.rows

    def frozen_columns(self, batch: TrainingBatch) -> Columns:
        """Return the columns that frozen models, such as the reference, compute.

        The columns of a validation set are computed once and reused until the reference is updated.
        """
        return {}

    def current_columns(self, batch: TrainingBatch) -> Columns:
        """Return the columns that are computed again in each step and validation.

        They depend on the policy's current weights, or are too large to be stored.
        """
        return {}

    def check_first_step(self, batch: TrainingBatch, metrics: Mapping[str, float]) -> None:
        """Check the loss's metrics of the first step, before the weights change.

        Raises:
            TrainingError: the metrics show that policy and reference differ.
        """


class SupervisedTrainer(TrainingLoop[Dataset]):
    """Trains a policy on a fixed dataset."""

    def __init__(
        self, config: TrainingConfig, inputs: RunInputs[Any], policy: MegatronPolicy, objective: Objective
    ) -> None:
        super().__init__(config, inputs, policy)
        self.objective = objective
        self._frozen_columns: dict[tuple[str, int], Columns] = {}
        self._counts: dict[str, tuple[Tensor, Tensor]] = {}

    def train_step(self, step: int) -> dict[str, Any]:
        """Run an optimizer step on the next global batch; return its metrics.

        Raises:
            FloatingPointError: loss or gradient norm is not finite. Raised on every rank; the weights are unchanged.
        """
        started, policy, objective = time.perf_counter(), self.policy, self.objective
        watchdog.enter(f"step {step}: training")

        # Batch: this replica's rows of the next global batch, divided so that replicas have equal work.
        batch = self.next_batch()
        batch.rows = objective.rows(batch)

        # Reference, teacher: the columns that the loss compares with the policy's outputs.
        batch.rows.update(objective.frozen_columns(batch))
        batch.rows.update(objective.current_columns(batch))
        loss_fn = loss_by_source(objective.loss_fn, batch)

        # Forward and backward: the model runs on packs of rows under Megatron's schedule. Each pack's loss is divided
        # by the counts of the global batch, so that the gradients of all packs and replicas add up.
        policy.zero_gradients()
        counts = global_valid_counts(batch.rows)
        results = policy.forward_backward(batch.rows, loss_fn, counts, objective.temperature)
        metrics = results.metrics(loss_fn)  # the same on every rank
        if step == 1:
            objective.check_first_step(batch, metrics)

        # Clip and update, with the optimizer's state on the device.
        metrics |= policy.update()
        (tokens,) = batch.rows.share.sum(float(batch.rows["input_lengths"].sum()))
        return {**metrics, **self.throughput(tokens, policy.flops_of(batch.rows), time.perf_counter() - started)}

    def next_batch(self) -> TrainingBatch:
        """Return this replica's part of the next global batch; at the end of the last epoch, the batch is smaller."""
        train, size, epochs = self.inputs.train, self.config.batch.global_batch_size, self.config.trainer.max_epochs
        first = self.consumed_samples
        count = size if epochs is None else min(size, epochs * len(train) - first)
        self.consumed_samples += count
        indices = train.order(self.config.seed).indices(first, count)
        return self.local_batch(train, indices, range(first, first + count))

    def local_batch(
        self, dataset: Dataset, indices: Sequence[int], samples: Sequence[int] | None = None
    ) -> TrainingBatch:
        """Return this replica's part of a batch of records. Collective.

        Args:
            indices: dataset indices of all records of the batch.
            samples: for each record, its number among all samples of the run.
        """
        share, places = assign_records(self.policy.divide, self.policy.topology.data, dataset.units, indices)
        own = [indices[place] for place in places]
        rows: LocalBatch[Any] = LocalBatch(
            collate([dataset.units[i] for i in own], self.inputs.tokenizer.pad_token_id), share
        )
        previous = [indices[place - 1] if len(indices) > 1 else None for place in places]
        return TrainingBatch(
            rows, dataset, own, previous, None if samples is None else [samples[place] for place in places]
        )

    def validate_on(self, name: str, dataset: Dataset, step: int) -> dict[str, float]:
        """Return the metrics of a whole validation set. The set is processed in batches."""
        results = MicrobatchResults()
        for start in range(0, len(dataset), VALIDATION_RECORDS):
            batch = self._validation_part(dataset, start)
            if (name, start) not in self._frozen_columns:
                self._frozen_columns[name, start] = self.objective.frozen_columns(batch)
            batch.rows.update(self._frozen_columns[name, start])
            batch.rows.update(self.objective.current_columns(batch))
            counts, temperature = self._validation_counts(name, dataset), self.objective.temperature
            results += self.policy.forward(batch.rows, self.objective.loss_fn, counts, temperature)
        return results.metrics(self.objective.loss_fn)

    def reference_moved(self) -> None:
        self._frozen_columns.clear()

    def _validation_part(self, dataset: Dataset, start: int) -> TrainingBatch:
        return self.local_batch(dataset, range(start, min(start + VALIDATION_RECORDS, len(dataset))))

    def _validation_counts(self, name: str, dataset: Dataset) -> tuple[Tensor, Tensor]:
        """Return the numbers of unmasked sequences and tokens of a whole validation set; computed only once per set."""
        if name not in self._counts:
            starts = range(0, len(dataset), VALIDATION_RECORDS)
            counts = [global_valid_counts(self._validation_part(dataset, start).rows) for start in starts]
            sequences, tokens = (torch.stack(count).sum() for count in zip(*counts, strict=True))
            self._counts[name] = sequences, tokens
        return self._counts[name]


def loss_by_source(loss_fn: LossFunction, batch: TrainingBatch) -> LossFunction:
    """Return `loss_fn` with additional metrics for each source, if the dataset is a mixture. Collective.

    Also add a column `source` to the batch's rows. If the dataset has a single source, or the loss needs more than
    log-probabilities, change nothing and return `loss_fn`.
    """
    store, rows = batch.dataset.units, batch.rows
    if not store.labels or not (takes_logprobs(loss_fn) and reads_counted_tokens_only(loss_fn)):
        return loss_fn
    labels = [str(store.source_of(index)) for index in batch.indices]
    numbers = torch.tensor([store.labels.index(label) for label in labels], dtype=torch.long)
    rows["source"] = numbers.repeat_interleave(rows.size // max(len(numbers), 1)).view(rows.size)
    tokens = token_mask_of(rows, rows["token_mask"]).sum(1)
    own = [rows["source"] == number for number in range(len(store.labels))]
    totals = rows.share.sum(*(float(x[mask].sum()) for x in (rows["sample_mask"], tokens) for mask in own))
    counts = zip(totals[: len(own)], totals[len(own) :], strict=True)
    assert isinstance(loss_fn, LogprobLoss)
    return LossBySource(loss_fn, dict(zip(store.labels, counts, strict=True)))

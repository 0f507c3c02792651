"""The policy on Megatron: the same SPMD program on every rank, each call with a global batch or a share of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_rl.config import TrainingConfig
from mcore_rl.data.batching import valid_counts
from mcore_rl.distributed.batched_data_dict import BatchedDataDict, OwnRows, share_of
from mcore_rl.distributed.collectives import Acquainted
from mcore_rl.errors import ContractError
from mcore_rl.losses.common import LossFunction, over_steps, reduce_metrics, reductions_of
from mcore_rl.models.megatron.families.mixtures import Mixture
from mcore_rl.models.megatron.forward_step import (
    LossHead,
)
from mcore_rl.models.megatron.moe import ROUTED_EXPERTS, GlobalLoad, begin_step
from mcore_rl.models.megatron.optimizer import (
    ParameterGather,
    build_optimizer,
    build_scheduler,
    optimizer_step,
    wrap_for_training,
)
from mcore_rl.models.megatron.parallel_state import seed_everything
from mcore_rl.models.policy.checkpoint import Keeping
from mcore_rl.models.policy.generating import Generating
from mcore_rl.models.policy.interfaces import ReferenceLogprobOutputSpec
from mcore_rl.models.policy.memory import TrainingMemory
from mcore_rl.models.policy.microbatch_results import MicrobatchResult, collect_results, explain_nonfinite
from mcore_rl.models.policy.refit_sender import WeightHandover


class MegatronPolicy(Keeping, Generating):
    """Model, optimizer and reference weights of one run.

    Args:
        config: the run's configuration.
        total_steps: optimizer steps of the whole run, for the learning-rate schedule; 0 for a policy
            that is never trained (no optimizer is built).
        rows_per_unit: rows that must share a microbatch: 2 for pairs.
        keep_reference: keep a copy of the initial weights on the host; where adapters are trained, which begin from
            nothing, the reference is the model without them.
    """

    def __init__(
        self, config: TrainingConfig, total_steps: int = 0, rows_per_unit: int = 1, keep_reference: bool = False
    ) -> None:
        super().__init__(config, rows_per_unit)
        seed_everything(config.seed)
        lora = config.model.lora
        begun = lora is not None and lora.path is not None
        self.reference = self._new_reference(begun) if keep_reference else None
        self.generation: Any = None
        self.load: GlobalLoad | None = None
        self.gather: ParameterGather | None = None
        self._names_of_metrics = Acquainted()
        self.is_trained = total_steps > 0
        if self.is_trained:
            self.chunks = wrap_for_training(self.model, config.parallel)
            self.gather = ParameterGather(self.chunks) if config.parallel.overlap_param_gather else None
            dtype = getattr(torch, "float32" if self.model.lora else config.model.dtype)
            ratio = 1.0 if lora is None else lora.lr_ratio
            self.optimizer = build_optimizer(self.chunks, config.optimizer, dtype, ratio)
            self.scheduler = build_scheduler(self.optimizer, config.optimizer, total_steps)
        trained_by = self.optimizer if self.is_trained else None
        self.memory = TrainingMemory(
            self.weights_away, self.parameters, self.chunks, trained_by, config.optimizer.offload
        )
        self.handover = WeightHandover(self.model, config.parallel.timeout_seconds)

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None, temperature: float = 1.0
    ) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        data = data.with_entries({name: values for name, values in data.items() if name != ROUTED_EXPERTS})
        with self.reference_weights():  # they choose experts of their own
            return BatchedDataDict(reference_logprobs=self._score(data, micro_batch_size, temperature))

    # ------------------------------------------------------------ training

    def train(
        self,
        data: BatchedDataDict[Any],
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
        temperature: float = 1.0,
    ) -> dict[str, Any]:
        """Make an optimizer step for each global batch in `data`.

        Args:
            data: the same rows on every rank, or each replica's `OwnRows` of one global batch.
            eval_mode: no step and no gradients, only metrics.
            gbs: rows of a global batch; all of `data` if left out.
            mbs: rows of a microbatch without packing; with it, packs hold as many as fit. The configuration's if
                left out.

        Returns:
            floats: the loss's metrics over the global batch, its `loss`, and of a step `grad_norm` (before clipping)
            and `lr`. Where there are several steps: means over those that have the metric, or the smallest or
            largest, for what the loss declares so. Beside them `all_mb_metrics`, with a list of each metric's
            values in all microbatches of all ranks.

        Raises:
            ContractError: no rows, or rows that do not make whole global batches; metrics that are not numbers.
            FloatingPointError: loss or gradient norm is not finite, on every rank; weights are as before.
        """
        step = self._evaluate if eval_mode else self._train_step
        total = share_of(data).total
        size = total if gbs is None else gbs
        if total == 0:
            raise ContractError("train: the batch has no rows")
        if isinstance(data, OwnRows):
            if size != total:
                raise ContractError(f"train: a replica's own rows are of one global batch; it has {total} rows")
            metrics, of_microbatches = step(data, loss_fn, temperature, mbs)
            return {**metrics, "all_mb_metrics": of_microbatches}
        if size < 1 or total % size:
            raise ContractError(f"train: {total} rows do not make whole global batches of gbs={size}")
        results: list[dict[str, float]] = []
        all_mb_metrics: dict[str, list[float]] = {}
        for start in range(0, total, size):
            metrics, of_microbatches = step(data.slice(start, start + size), loss_fn, temperature, mbs)
            results.append(metrics)
            for name, values in of_microbatches.items():
                all_mb_metrics.setdefault(name, []).extend(values)
        return {**over_steps(results, reductions_of(loss_fn)), "all_mb_metrics": all_mb_metrics}

    def _train_step(
        self, data: BatchedDataDict[Any], loss_fn: LossFunction, temperature: float, mbs: int | None
    ) -> tuple[dict[str, float], dict[str, list[float]]]:
        metrics, of_microbatches = self._learn(data, loss_fn, temperature, mbs)
        lr = self.optimizer.param_groups[0]["lr"]
        with self.memory.optimizer_at_hand():
            updated, grad_norm = optimizer_step(self.optimizer, self.config.optimizer.clip_grad)
        if not updated:
            raise FloatingPointError(f"the gradient norm is {grad_norm}")
        if self.gather is not None:
            self.gather.begin()
        self.advance_schedule()
        if self.load is not None and (rate := self.config.model.moe_router_bias_update_rate):
            self.load.update_biases(self.model, rate)
        return {**metrics, "grad_norm": grad_norm, "lr": float(lr)}, of_microbatches

    def advance_schedule(self, steps: int = 1) -> None:
        """Count optimizer steps in the learning-rate schedule: those done, or those that there was no need for."""
        self.scheduler.step(increment=steps)

    def compute_gradients(
        self, data: BatchedDataDict[Any], loss_fn: LossFunction, temperature: float = 1.0
    ) -> dict[str, float]:
        """Forward and backward over the global batch; gradients stay in the parameters' `main_grad`.

        Raises:
            FloatingPointError: the loss is not finite; names row and position where one log-probability is.
        """
        return self._learn(data, loss_fn, temperature, None)[0]

    def _zero_gradients(self) -> None:
        if not self.is_trained:
            raise RuntimeError("train: the policy was built without an optimizer (total_steps=0)")
        self.require("train", self.weights_away, self.memory.optimizer, self.memory.gradients)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _learn(
        self, data: BatchedDataDict[Any], loss_fn: LossFunction, temperature: float, mbs: int | None
    ) -> tuple[dict[str, float], dict[str, list[float]]]:
        """Gradients of the global batch; its metrics, and of each microbatch."""
        self._zero_gradients()
        if not isinstance(self.model.family, Mixture):
            return self._run_loss(data, loss_fn, temperature, mbs, train=True)
        num_tokens = begin_step(self.model, data)
        metrics, of_microbatches = self._run_loss(data, loss_fn, temperature, mbs, train=True)
        self.load = GlobalLoad(self.model, num_tokens)
        return {**metrics, **self.load.metrics()}, of_microbatches

    def evaluate(self, data: BatchedDataDict[Any], loss_fn: LossFunction, temperature: float = 1.0) -> dict[str, float]:
        """The loss's metrics over a global batch, without gradients."""
        return self._evaluate(data, loss_fn, temperature, None)[0]

    @torch.no_grad()
    def _evaluate(
        self, data: BatchedDataDict[Any], loss_fn: LossFunction, temperature: float, mbs: int | None
    ) -> tuple[dict[str, float], dict[str, list[float]]]:
        self.require_weights("evaluate")
        return self._run_loss(data, loss_fn, temperature, mbs, train=False)

    @torch.no_grad()
    def evaluate_parts(
        self, parts: Iterable[BatchedDataDict[Any]], counts: tuple[Tensor, Tensor], loss_fn: LossFunction
    ) -> dict[str, float]:
        """Evaluate all parts as one batch; only one part needs to be in memory.

        Args:
            counts: `valid_counts` of all parts together.
        """
        self.require_weights("evaluate")
        results = [result for data in parts for result in self._results(data, loss_fn, counts, 1.0, None, train=False)]
        return _reduced(results, loss_fn)[0]

    def _run_loss(
        self, data: BatchedDataDict[Any], loss_fn: LossFunction, temperature: float, mbs: int | None, train: bool
    ) -> tuple[dict[str, float], dict[str, list[float]]]:
        """Metrics over the global batch, and of each microbatch."""
        return _reduced(self._results(data, loss_fn, valid_counts(data), temperature, mbs, train), loss_fn)

    def _results(
        self,
        data: BatchedDataDict[Any],
        loss_fn: LossFunction,
        counts: tuple[Tensor, Tensor],
        temperature: float,
        mbs: int | None,
        train: bool,
    ) -> list[MicrobatchResult]:
        """Return the results of every microbatch of all replicas.

        Args:
            counts: (global_valid_seqs, global_valid_toks), what the loss is averaged over.
        """
        head = LossHead(self.model, loss_fn, *counts, temperature)
        # A loss of logits gets a row's own, one at a time, so that its rows stand apart.
        share = head.fused or head.rewards is not None
        microbatches = self._microbatches(data, mbs, share, getattr(loss_fn, "rows_per_unit", 1))
        if prepare := getattr(loss_fn, "prepare", None):
            prepare(microbatches)
        outputs = self._run(microbatches, head, train)
        loss_name = type(loss_fn).__name__
        results = collect_results(self.topology, loss_name, microbatches, outputs, self._names_of_metrics)
        loss, rows = sum(result.loss for result in results), sum(result.rows for result in results)
        known = share_of(data)
        if not math.isfinite(loss):
            raise FloatingPointError(explain_nonfinite(loss, outputs, known.indices))
        assert rows == known.total, f"{rows} rows went through the loss, not {known.total}"
        return results

    # ------------------------------------------------------------ life

    def shutdown(self) -> bool:
        self.release_shared_bucket()
        return super().shutdown()


def _reduced(
    results: Sequence[MicrobatchResult], loss_fn: LossFunction
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Metrics over all microbatches, and of each."""
    parts = [{"loss": result.loss, **result.metrics} for result in results]
    reduced = reduce_metrics(parts, [result.samples for result in results], reductions_of(loss_fn))
    of_microbatches = {name: [part[name] for part in parts if name in part] for name in reduced}
    loss = sum(result.loss for result in results)
    return {**{name: float(value) for name, value in reduced.items()}, "loss": loss}, of_microbatches

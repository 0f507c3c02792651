"""The policy on Megatron: the same SPMD program on every rank, each call with the whole global batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl import platform
from mcore_rl.algorithms.interfaces import LossFunction
from mcore_rl.algorithms.loss_functions.metric_reduction import over_steps, reduce_metrics, reductions_of
from mcore_rl.config import TrainingConfig
from mcore_rl.data.batches import valid_counts
from mcore_rl.data.packing import Microbatch, batching_of
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.distributed.collectives import all_reduce
from mcore_rl.errors import ContractError, UserError
from mcore_rl.models.megatron.families.mixture import Mixture
from mcore_rl.models.megatron.forward_step import (
    LogprobHead,
    LossHead,
    RewardOfSequences,
    TopKHead,
    run_microbatches,
)
from mcore_rl.models.megatron.hf_checkpoint import SafetensorsDirectory
from mcore_rl.models.megatron.hf_config import load_hf_config
from mcore_rl.models.megatron.layer_spec import uses_transformer_engine
from mcore_rl.models.megatron.model import build_model
from mcore_rl.models.megatron.optimizer import build_optimizer, build_scheduler, optimizer_step, wrap_for_training
from mcore_rl.models.megatron.parallel import destroy_parallel, initialize_parallel
from mcore_rl.models.megatron.random_states import seed_everything
from mcore_rl.models.megatron.routed_tokens import ROUTED_EXPERTS
from mcore_rl.models.megatron.router_load import GlobalLoad, begin_step
from mcore_rl.models.megatron.weights import load_hf_weights
from mcore_rl.models.policy.generating import Generating
from mcore_rl.models.policy.interfaces import LogprobOutputSpec, ReferenceLogprobOutputSpec
from mcore_rl.models.policy.keeping import Keeping
from mcore_rl.models.policy.step_results import collect_results, explain_nonfinite


class MegatronPolicy(Keeping, Generating):
    """Model, optimizer and reference weights of one run.

    Args:
        config: the run's configuration.
        total_steps: optimizer steps of the whole run, for the learning-rate schedule; 0 for a policy
            that is never trained (no optimizer is built).
        rows_per_unit: rows that must share a microbatch: 2 for pairs.
        keep_reference: keep a copy of the initial weights on the host.
    """

    def __init__(
        self, config: TrainingConfig, total_steps: int = 0, rows_per_unit: int = 1, keep_reference: bool = False
    ) -> None:
        self.config = config
        self.topology = initialize_parallel(config.parallel)
        seed_everything(config.seed)
        if config.deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)
        self.hf_config = load_hf_config(config.model.path, config.model.trust_remote_code, config.model.head)
        self.model = build_model(self.hf_config, config.model, config.parallel, self.topology)
        load_hf_weights(self.model, SafetensorsDirectory(config.model.path))
        batching = batching_of(config, rows_per_unit, self.topology.data.size)
        self.batching = replace(batching, attention_length=self._attention_length())
        if self.batching.rows_per_group and (uses_transformer_engine() or isinstance(self.model.family, Mixture)):
            raise UserError(
                "batch.share_prefixes: not for mixtures of experts, nor with Transformer Engine; leave it out"
            )
        self.reference = self._weights_on_host() if keep_reference else None
        self.chunks: list[Any] = list(self.model.chunks)
        self.generation: Any = None
        self.load: GlobalLoad | None = None
        self.init_colocation()
        self.is_trained = total_steps > 0
        if self.is_trained:
            self.chunks = wrap_for_training(self.model)
            self.optimizer = build_optimizer(self.chunks, config.optimizer, getattr(torch, config.model.dtype))
            self.scheduler = build_scheduler(self.optimizer, config.optimizer, total_steps)

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, as Hugging Face counts them."""
        return self.model.family.num_parameters()

    def describe_layout(self) -> str:
        """One line: how the processes are used."""
        parallel = self.config.parallel
        sizes = {name: getattr(self.topology, name).size for name in ("tensor", "pipeline", "context", "data")}
        text = " x ".join(f"{name} {size}" for name, size in sizes.items())
        if parallel.expert_model_parallel_size > 1:
            text += f", expert {parallel.expert_model_parallel_size} (tensor {parallel.expert_tensor_size})"
        return text + (", sequence parallel" if parallel.sequence_parallel else "") + f" on {platform.device().type}"

    def training_flops(self, lengths: Sequence[int], before: Sequence[int] | None = None) -> float:
        """Floating-point operations of forward and backward over sequences of these lengths.

        6 per parameter and token (the input embedding is a lookup), and 6·n²·heads·head_dim per layer for
        causal attention over n tokens; recomputation is not counted.

        Args:
            before: tokens that each of them continues, which are seen but not computed again.
        """
        family = self.model.family
        before = before or [0] * len(lengths)
        seen = sum((b + n) ** 2 - b**2 for n, b in zip(lengths, before, strict=True))
        attention = 6 * family.num_layers * family.num_attention_heads * family.head_dim * seen
        return 6.0 * family.active_parameters() * sum(lengths) + attention

    def _attention_length(self) -> float:
        """Tokens of a sequence at which attention costs as much as all else."""
        one, two = self.training_flops([1]), self.training_flops([2])
        of_attention = (two - 2 * one) / 2  # a·n + b·n² at n = 1 and 2
        return (one - of_attention) / of_attention

    # ------------------------------------------------------------ scoring

    def get_logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None, temperature: float = 1.0
    ) -> BatchedDataDict[LogprobOutputSpec]:
        return BatchedDataDict(logprobs=self._score(data, micro_batch_size, temperature))

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None, temperature: float = 1.0
    ) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        data = BatchedDataDict({name: values for name, values in data.items() if name != ROUTED_EXPERTS})
        with self.reference_weights():  # they choose experts of their own
            return BatchedDataDict(reference_logprobs=self._score(data, micro_batch_size, temperature))

    def _score(self, data: BatchedDataDict[Any], micro_batch_size: int | None, temperature: float) -> Tensor:
        """[B, S] log-probabilities of every real token, the same on all ranks."""
        head = LogprobHead(self.model, temperature)

        def score(hidden: Tensor, microbatch: Microbatch) -> dict[str, Tensor]:
            ids = microbatch.data["input_ids"]
            logprobs, _ = head(hidden, microbatch, torch.ones(ids.shape[0], ids.shape[1] - 1))
            return {"logprobs": F.pad(logprobs, (1, 0))}

        rows = {"logprobs": torch.zeros(data["input_ids"].shape)}
        return self._fill_rows("get_logprobs", data, rows, score, micro_batch_size=micro_batch_size)["logprobs"]

    def get_topk_logits(self, data: BatchedDataDict[Any], k: int) -> BatchedDataDict[Any]:
        """`topk_logits`, `topk_indices` [B, S, k]: the largest logits after each input position, and their tokens.

        What a student's `DistillationLossFn` wants of its teacher; 0 in the padding.

        Raises:
            ValueError: k is not between 1 and the vocabulary's size.
        """
        if not 1 <= k <= self.hf_config.vocab_size:
            raise ValueError(f"get_topk_logits: k must be between 1 and {self.hf_config.vocab_size}, got {k}")
        head = TopKHead(self.model, k)

        def best(hidden: Tensor, microbatch: Microbatch) -> dict[str, Tensor]:
            values, tokens = head(hidden, microbatch)
            return {"topk_logits": values, "topk_indices": tokens}

        shape = (*data["input_ids"].shape, k)
        rows = {"topk_logits": torch.zeros(shape), "topk_indices": torch.zeros(shape, dtype=torch.long)}
        return BatchedDataDict(self._fill_rows("get_topk_logits", data, rows, best))

    def get_rewards(self, data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        """`rewards` [B, 1] of a policy whose model has a reward head."""
        head, rows = RewardOfSequences(self.model), {"rewards": torch.zeros(data.size, 1)}
        return BatchedDataDict(
            self._fill_rows("get_rewards", data, rows, lambda x, mb: {"rewards": head(x, mb)}, model_head="reward")
        )

    @torch.no_grad()
    def _fill_rows(
        self,
        purpose: str,
        data: BatchedDataDict[Any],
        rows: dict[str, Tensor],
        compute: Callable[[Tensor, Microbatch], dict[str, Tensor]],
        model_head: str = "lm",
        micro_batch_size: int | None = None,
    ) -> dict[str, Tensor]:
        """`rows` [B, …] of the global batch, filled with what `compute` makes of the last stage's hidden states.

        The same on all ranks, on the host; columns that a microbatch does not have stay 0.

        Raises:
            RuntimeError: the weights are offloaded, or the model has another head.
        """
        self.require(purpose, self.weights_away)
        if self.config.model.head != model_head:
            raise RuntimeError(f"{purpose}: a model with model.head={self.config.model.head} has none")
        rows = {name: values.to(platform.device()) for name, values in rows.items()}

        def fill(hidden: Tensor, microbatch: Microbatch) -> tuple[Tensor, dict[str, Any]]:
            computed = compute(hidden, microbatch)
            if microbatch.counts:
                for name, values in computed.items():
                    rows[name][microbatch.rows, : values.shape[1]] = values.to(rows[name])
            return hidden.new_zeros(()), {}

        self._run(self._microbatches(data, micro_batch_size), fill, train=False)
        return {name: self._sum_over_replicas_and_stages(values).cpu() for name, values in rows.items()}

    def _microbatches(
        self,
        data: BatchedDataDict[Any],
        micro_batch_size: int | None = None,
        share: bool = True,
        rows_per_unit: int = 1,
    ) -> list[Microbatch]:
        """This rank's microbatches; `micro_batch_size` rows each, where they are not packed by tokens.

        Args:
            share: common beginnings may stand in a pack once.
            rows_per_unit: so many neighbouring rows stay together, beside those of the policy.
        """
        batching = self.batching
        if batching.rows_per_unit % rows_per_unit:
            together = math.lcm(batching.rows_per_unit, rows_per_unit)
            batching = batching_of(self.config, together, self.topology.data.size)
            batching = replace(batching, attention_length=self.batching.attention_length)
        if not share:
            batching = replace(batching, rows_per_group=0)
        if micro_batch_size is not None:
            if micro_batch_size < 1 or micro_batch_size % batching.rows_per_unit:
                raise ContractError(
                    f"micro_batch_size must be a positive multiple of {batching.rows_per_unit}, got {micro_batch_size}"
                )
            batching = replace(batching, micro_batch_size=micro_batch_size // batching.rows_per_unit)
        return batching.microbatches(data, self.topology.data.rank)

    def _run(self, microbatches: list[Microbatch], head: Any, train: bool) -> list[dict[str, Any]]:
        for chunk in self.chunks:
            chunk.train(train)
        return run_microbatches(self.model, self.chunks, microbatches, head, train)

    def _sum_over_replicas_and_stages(self, x: Tensor) -> Tensor:
        return all_reduce(all_reduce(x, self.topology.data.group), self.topology.pipeline.group)

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
        """One optimizer step for each global batch in `data`.

        Args:
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
        size = data.size if gbs is None else gbs
        if data.size == 0:
            raise ContractError("train: the batch has no rows")
        if size < 1 or data.size % size:
            raise ContractError(f"train: {data.size} rows do not make whole global batches of gbs={size}")
        step = self._evaluate if eval_mode else self._train_step
        results: list[dict[str, float]] = []
        all_mb_metrics: dict[str, list[float]] = {}
        for start in range(0, data.size, size):
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
        updated, grad_norm = optimizer_step(self.optimizer, self.config.optimizer.clip_grad)
        if not updated:
            raise FloatingPointError(f"the gradient norm is {grad_norm}")
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
        self.require("train", self.weights_away, self.optimizer_away, self.gradients_away)
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
        begin_step(self.model, data)
        metrics, of_microbatches = self._run_loss(data, loss_fn, temperature, mbs, train=True)
        self.load = GlobalLoad(self.model)
        return {**metrics, **self.load.metrics()}, of_microbatches

    def evaluate(self, data: BatchedDataDict[Any], loss_fn: LossFunction, temperature: float = 1.0) -> dict[str, float]:
        """The loss's metrics over a global batch, without gradients."""
        return self._evaluate(data, loss_fn, temperature, None)[0]

    @torch.no_grad()
    def _evaluate(
        self, data: BatchedDataDict[Any], loss_fn: LossFunction, temperature: float, mbs: int | None
    ) -> tuple[dict[str, float], dict[str, list[float]]]:
        self.require("evaluate", self.weights_away)
        return self._run_loss(data, loss_fn, temperature, mbs, train=False)

    def _run_loss(
        self, data: BatchedDataDict[Any], loss_fn: LossFunction, temperature: float, mbs: int | None, train: bool
    ) -> tuple[dict[str, float], dict[str, list[float]]]:
        """Metrics over the global batch, and of each microbatch."""
        head = LossHead(self.model, loss_fn, *valid_counts(data), temperature)
        # A loss of logits gets a row's own, one at a time, so that its rows stand apart.
        share = head.fused or head.rewards is not None
        microbatches = self._microbatches(data, mbs, share, getattr(loss_fn, "rows_per_unit", 1))
        outputs = self._run(microbatches, head, train)
        results = collect_results(self.topology, type(loss_fn).__name__, microbatches, outputs)
        loss, rows = sum(result.loss for result in results), sum(result.rows for result in results)
        if not math.isfinite(loss):
            raise FloatingPointError(explain_nonfinite(loss, outputs))
        assert rows == data.size, f"{rows} rows went through the loss, not {data.size}"
        parts = [{"loss": result.loss, **result.metrics} for result in results]
        reduced = reduce_metrics(parts, [result.samples for result in results], reductions_of(loss_fn))
        of_microbatches = {name: [part[name] for part in parts if name in part] for name in reduced}
        return {**{name: float(value) for name, value in reduced.items()}, "loss": loss}, of_microbatches

    # ------------------------------------------------------------ life

    def shutdown(self) -> bool:
        self.release_shared_bucket()
        destroy_parallel()
        return True

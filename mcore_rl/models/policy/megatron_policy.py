"""The policy: a model that Megatron trains.

Every rank makes the same calls, with the whole global batch or only with the rows of its own replica.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_rl import platform
from mcore_rl.config import RLConfig, TrainingConfig
from mcore_rl.data.batching import Microbatch, global_valid_counts
from mcore_rl.data.choices import CHOICES
from mcore_rl.data.tokenize import count_ids, load_tokenizer
from mcore_rl.distributed.batched_data_dict import BatchedDataDict, LocalBatch, batch_share
from mcore_rl.distributed.collectives import InternedObjects, all_gather, all_reduce, gather_objects
from mcore_rl.distributed.topology import Topology
from mcore_rl.errors import ContractError, UserError
from mcore_rl.losses.common import LossFunction, locate_nonfinite, over_steps, reduce_metrics, reductions_of
from mcore_rl.models.generation.interfaces import GenerationDatumSpec, GenerationInterface, GenerationOutputSpec
from mcore_rl.models.generation.megatron.generation import MegatronGeneration, megatron_generation_of
from mcore_rl.models.generation.sampling import SamplingParams
from mcore_rl.models.megatron.checkpoint.load import Restored
from mcore_rl.models.megatron.families.mixtures import Mixture
from mcore_rl.models.megatron.model.hf_directory import SafetensorsDirectory, in_precision, write_hf_directory
from mcore_rl.models.megatron.model.lora import write_peft_directory
from mcore_rl.models.megatron.model.step_statistics import (
    StepRouterStatistics,
    begin_prediction,
    prediction_metrics,
    reset_router_statistics,
)
from mcore_rl.models.megatron.parallel_state import seed_everything
from mcore_rl.models.megatron.training.forward_step import LossHead
from mcore_rl.models.megatron.training.muon import Muon, mark_matrices
from mcore_rl.models.megatron.training.optimizer import (
    AdamWInBfloat16,
    ParameterGather,
    TrainingMemory,
    build_optimizer,
    build_scheduler,
    clip_gradients,
    optimizers_with_parameters,
    update_weights,
    wrap_for_training,
)
from mcore_rl.models.megatron.weights.adapters import export_adapters
from mcore_rl.models.megatron.weights.conversion import export_hf_weights
from mcore_rl.models.policy.checkpoint import PolicyCheckpoint, TrainedModel
from mcore_rl.models.policy.interfaces import ColocatablePolicyInterface, ReferenceLogprobOutputSpec
from mcore_rl.models.policy.reference import Reference, ReferenceWeights, initial_reference
from mcore_rl.models.refit.sender import WeightSender
from mcore_rl.models.refit.transfer import BUCKET_BYTES, RefitInfo
from mcore_rl.utils.console import console


class MegatronPolicy(TrainedModel, ColocatablePolicyInterface, GenerationInterface):
    """A model that is trained. It also scores, generates, writes checkpoints and sends weights to inference engines.

    Its attributes do parts of this work: `reference` (the reference model), `memory` (offloading), `checkpoint`,
    `sender` (of weights) and `generation` (set by `prepare_for_generation`).

    Args:
        config: the run's configuration.
        total_steps: number of optimizer steps in the whole run, for the learning-rate schedule. With 0, the policy is
            never trained and no optimizer is built.
        rows_per_unit: number of neighbouring rows that must be in the same microbatch, such as 2 for preference pairs.
        keep_reference: keep the initial weights, copied to the host, as the reference model. If the run adds new
            adapters, the reference is the model without adapters, and nothing is copied.
    """

    may_differ = False

    def __init__(
        self, config: TrainingConfig, total_steps: int = 0, rows_per_unit: int = 1, keep_reference: bool = False
    ) -> None:
        super().__init__(config, rows_per_unit)
        config = self.config
        seed_everything(config.seed)
        lora = config.model.lora
        self.reference: Reference | None = None
        if keep_reference:
            self.reference = initial_reference(self, adapters_are_trained=lora is not None and lora.path is not None)
        self.is_trained = total_steps > 0
        self.optimizer: Any = None
        self.scheduler: Any = None
        self.gather: ParameterGather | None = None
        self.own_updates = list[Muon | AdamWInBfloat16]()
        """Optimizers of some parameters. They run before Megatron's optimizer updates all other parameters."""
        if self.is_trained:
            self.chunks = wrap_for_training(self.model, config.parallel)
            self.gather = ParameterGather(self.chunks) if config.parallel.overlap_param_gather else None
            dtype = getattr(torch, "float32" if self.model.lora else config.model.dtype)
            if config.optimizer.name == "muon":
                mark_matrices(self.model)
            self.optimizer = build_optimizer(
                self.chunks, config.optimizer, dtype, 1.0 if lora is None else lora.lr_ratio
            )
            if config.optimizer.name == "muon":
                self.own_updates.append(Muon(self.model, self.chunks, self.optimizer, config.optimizer))
            if config.optimizer.moments_dtype == "bfloat16":
                self.own_updates.append(AdamWInBfloat16(self.optimizer))
            self.scheduler = build_scheduler(self.optimizer, config.optimizer, total_steps)
        self.memory = TrainingMemory(
            self.weights_offload, self.parameters, self.chunks, self.optimizer, config.optimizer.offload
        )
        self.checkpoint = PolicyCheckpoint(self)
        self.sender = WeightSender(self.model, config.parallel.timeout_seconds)
        self.generation: MegatronGeneration | None = None
        self._router_load: StepRouterStatistics | None = None
        self._metric_names = InternedObjects()
        self._told: set[type] = set()

    def describe_optimizer(self) -> str:
        """Describe the optimizer in one line: its implementation, fused operations, and overlapped communication."""
        optimizers = [inner.optimizer for inner in optimizers_with_parameters(self.optimizer)]
        kinds = {("fused " * bool(one.param_groups[0].get("fused")), type(one)) for one in optimizers}
        names = ", ".join(sorted(f"{fused}{kind.__name__} of {kind.__module__.split('.')[0]}" for fused, kind in kinds))
        if self.config.optimizer.name == "muon":
            names = f"Muon for the matrices of hidden layers, {names}"
        parallel, moments = self.config.parallel, self.config.optimizer.moments_dtype
        state = "fp32 state" if moments == "float32" else "moments in bfloat16"
        overlaps = [name for name in ("overlap_grad_reduce", "overlap_param_gather") if getattr(parallel, name)]
        modules = (module for chunk in self.model.chunks for module in chunk.modules())
        # In Transformer Engine's modules the option is an attribute; local modules have it in their configuration.
        is_fused = any(getattr(module, "fuse_wgrad_accumulation", False) for module in modules)
        is_fused |= any(chunk.config.gradient_accumulation_fusion for chunk in self.model.chunks)
        fuses = ["fused weight gradients"] * is_fused
        return ", ".join([names or "no parameters on this rank", state, *fuses, *overlaps])

    # ------------------------------------------------------------ a training step

    def zero_gradients(self) -> None:
        """Set the gradients to zero before a step.

        Raises:
            RuntimeError: the policy has no optimizer, or its weights, optimizer state or gradients are offloaded.
        """
        if not self.is_trained:
            raise RuntimeError("train: the policy has no optimizer, because it was built with total_steps=0")
        self.require("train", self.weights_offload, self.memory.optimizer, self.memory.gradients)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def forward_backward(
        self,
        data: BatchedDataDict[Any],
        loss_fn: LossFunction,
        counts: tuple[Tensor, Tensor],
        temperature: float = 1.0,
        micro_batch_size: int | None = None,
    ) -> MicrobatchResults:
        """Compute the loss of a global batch and add its gradients to the parameters' `main_grad`. Collective.

        The microbatches run under Megatron's pipeline schedule. The loss of each microbatch is divided by counts of the
        whole global batch, so that the gradients of microbatches and replicas can be summed.

        Args:
            counts: result of `global_valid_counts(data)`.
            micro_batch_size: number of rows per microbatch; only used if rows are not packed.

        Raises:
            FloatingPointError: the loss is not finite. The message contains row and position of a log-probability
                that is not finite.
        """
        if self.model.family.mtp_depth:
            begin_prediction(self.model, data)
        if not isinstance(self.model.family, Mixture):
            return self._run_loss(data, loss_fn, counts, temperature, micro_batch_size, train=True)
        num_tokens = reset_router_statistics(self.model, data)
        results = self._run_loss(data, loss_fn, counts, temperature, micro_batch_size, train=True)
        self._router_load = StepRouterStatistics(self.model, num_tokens)
        return results

    @torch.no_grad()
    def forward(
        self,
        data: BatchedDataDict[Any],
        loss_fn: LossFunction,
        counts: tuple[Tensor, Tensor],
        temperature: float = 1.0,
        micro_batch_size: int | None = None,
    ) -> MicrobatchResults:
        """Compute the loss of a batch without gradients. Collective; the arguments are those of `forward_backward`.

        A batch can be evaluated in several calls: pass the counts of the whole batch in each, and add up the results.
        """
        self.require_weights("evaluate")
        return self._run_loss(data, loss_fn, counts, temperature, micro_batch_size, train=False)

    def clip_gradients(self, limit: float) -> float:
        """Scale the gradients down so that their norm over the whole model is at most `limit`; 0 means no limit.

        Returns:
            The norm before clipping.

        Raises:
            FloatingPointError: the norm is not finite. Raised on every rank; the weights are unchanged.
        """
        norm = clip_gradients(self.optimizer, limit)
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient norm is {norm}")
        return norm

    def update_weights(self) -> float:
        """Make an optimizer step and advance the learning-rate schedule; return the learning rate of this step."""
        lr = float(self.optimizer.param_groups[0]["lr"])
        for own in self.own_updates:
            own.step()
        update_weights(self.optimizer)
        if self.gather is not None:
            self.gather.begin()
        self.advance_schedule()
        if self._router_load is not None and (rate := self.config.model.moe_router_bias_update_rate):
            self._router_load.update_biases(self.model, rate)
        return lr

    def model_metrics(self) -> dict[str, float]:
        """Return metrics of the last `forward_backward`: of the expert routers, and of layers that predict tokens."""
        metrics = {} if self._router_load is None else self._router_load.metrics()
        return metrics | (prediction_metrics(self.model) if self.model.family.mtp_depth else {})

    @property
    def updates_made(self) -> tuple[int, ...]:
        """Steps made by each learning-rate schedule: this model's, then the second trained model's, if any."""
        second = self.checkpoint.second
        return (self.scheduler.num_steps, *(() if second is None else second.updates_made))

    def advance_schedule(self, steps: int = 1) -> None:
        """Advance the learning-rate schedule by `steps` steps. Training also calls this for updates that it skips."""
        self.scheduler.step(increment=steps)

    def _run_loss(
        self,
        data: BatchedDataDict[Any],
        loss_fn: LossFunction,
        counts: tuple[Tensor, Tensor],
        temperature: float,
        micro_batch_size: int | None,
        train: bool,
    ) -> MicrobatchResults:
        head = LossHead(self.model, loss_fn, *counts, temperature)
        # A loss on logits receives them row by row, so rows with a common prefix must not share it in a pack.
        share = head.fused or head.rewards is not None
        microbatches = self._microbatches(data, micro_batch_size, share, getattr(loss_fn, "rows_per_unit", 1))
        if prepare := getattr(loss_fn, "prepare", None):
            prepare(microbatches)
        self._tell_cost(head, microbatches)
        outputs = self._run(microbatches, head, train)
        results = all_gather_results(self.topology, loss_fn, microbatches, outputs, self._metric_names)
        known = batch_share(data)
        if not math.isfinite(results.loss):
            raise FloatingPointError(explain_nonfinite(results.loss, outputs, known.indices))
        assert results.rows == known.total, f"{results.rows} rows went through the loss, not {known.total}"
        return results

    def _tell_cost(self, head: LossHead, microbatches: Sequence[Microbatch]) -> None:
        """Print what gathering the logits for a loss function costs, once for each kind of loss function."""
        kind = type(head.loss_fn)
        if self.is_writer and kind not in self._told and (line := head.cost_of_gathering(microbatches)):
            self._told.add(kind)
            console.print(line, markup=False)

    # ------------------------------------------------------------ training and evaluation, for controllers

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
            data: all rows, the same on every rank; or a `LocalBatch`: this replica's rows of one global batch.
            eval_mode: compute only the metrics, without gradients and optimizer steps.
            gbs: number of rows in a global batch; if None, all rows of `data` are one global batch.
            mbs: number of rows per microbatch, or None for the configuration's value. If rows are packed, it has no
                effect: a pack contains as many rows as fit.

        Returns:
            A dict of the loss's metrics over the global batch and the `loss` itself; after a training step also
            `grad_norm` (before clipping) and `lr`. After several steps each value is the mean over the steps that have
            the metric, or the smallest or largest value if the loss declares so. The entry `all_mb_metrics` contains,
            for each metric, the list of its values in all microbatches of all ranks.

        Raises:
            ContractError: the batch has no rows, its rows do not make whole global batches, or a metric is not a
                number.
            FloatingPointError: the loss or the gradient norm is not finite. Raised on every rank; the weights are
                unchanged.
        """
        steps: list[dict[str, float]] = []
        all_mb_metrics: dict[str, list[float]] = {}
        for batch in _global_batches(data, gbs):
            arguments = batch, loss_fn, global_valid_counts(batch), temperature, mbs
            if not eval_mode:
                self.zero_gradients()
            results = self.forward(*arguments) if eval_mode else self.forward_backward(*arguments)
            steps.append({**results.metrics(loss_fn), **({} if eval_mode else self.update())})
            for name, values in results.by_microbatch().items():
                all_mb_metrics.setdefault(name, []).extend(values)
        metrics = steps[0] if len(steps) == 1 else over_steps(steps, reductions_of(loss_fn))
        return {**metrics, "all_mb_metrics": all_mb_metrics}

    def train_batch(
        self,
        data: BatchedDataDict[Any],
        loss_fn: LossFunction,
        temperature: float = 1.0,
        check: Callable[[Mapping[str, float]], None] | None = None,
    ) -> dict[str, float]:
        """Make an optimizer step on one global batch; return the loss's metrics, `grad_norm` and `lr`.

        Args:
            data: see `train`.
            check: is called with the loss's metrics before the weights change. They stay unchanged if it raises.

        Raises:
            FloatingPointError: see `train`.
        """
        self.zero_gradients()
        results = self.forward_backward(data, loss_fn, global_valid_counts(data), temperature)
        metrics = results.metrics(loss_fn)
        if check is not None:
            check(metrics)
        return {**metrics, **self.update()}

    def update(self) -> dict[str, float]:
        """Clip the gradients and make an optimizer step, with the optimizer's state on the device.

        Returns:
            `grad_norm` (before clipping), `lr`, and the metrics of expert routers and MTP layers.
        """
        with self.memory.optimizer_on_device():
            grad_norm = self.clip_gradients(self.config.optimizer.clip_grad)
            return {**self.model_metrics(), "grad_norm": grad_norm, "lr": self.update_weights()}

    def compute_gradients(
        self, data: BatchedDataDict[Any], loss_fn: LossFunction, temperature: float = 1.0
    ) -> dict[str, float]:
        """Compute the gradients of a global batch, in the parameters' `main_grad`, without an optimizer step.

        Returns:
            The metrics of the loss, of the expert routers and of MTP layers.

        Raises:
            FloatingPointError: the loss is not finite. The message contains row and position of a log-probability
                that is not finite.
        """
        self.zero_gradients()
        results = self.forward_backward(data, loss_fn, global_valid_counts(data), temperature)
        return {**results.metrics(loss_fn), **self.model_metrics()}

    def evaluate(self, data: BatchedDataDict[Any], loss_fn: LossFunction, temperature: float = 1.0) -> dict[str, float]:
        """Return the loss's metrics over a global batch, computed without gradients."""
        return self.forward(data, loss_fn, global_valid_counts(data), temperature).metrics(loss_fn)

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Move all offloaded tensors back to the device."""
        self.memory.restore()
        for chunk in self.chunks:
            chunk.train()

    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """Release gradient buffers and optimizer state until `prepare_for_training`."""
        self.memory.offload_training_state()
        for chunk in self.chunks:
            chunk.eval()

    def shutdown(self) -> bool:
        """Release shared memory and the process groups."""
        self.sender.release()
        return super().shutdown()

    # ------------------------------------------------------------ the reference

    def get_reference_policy_logprobs(
        self,
        data: BatchedDataDict[Any],
        micro_batch_size: int | None = None,
        temperature: float = 1.0,
        counted_only: bool = False,
    ) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        """Return `reference_logprobs` [B, S]: the log-probability of each token of `data` under the reference model.

        `counted_only` is explained at `get_logprobs`.
        """
        # The reference model chooses experts and keys itself.
        data = data.with_entries({name: values for name, values in data.items() if name not in CHOICES})
        with self.reference_weights():
            return BatchedDataDict(reference_logprobs=self._score(data, micro_batch_size, temperature, counted_only))

    @contextmanager
    def reference_weights(self) -> Iterator[None]:
        """Inside the context, the model computes with the reference weights.

        Afterwards it has its own weights again, even after an error.
        """
        if self.reference is None:
            raise UserError("the policy has no reference weights; build it with keep_reference=True")
        self.finish_param_gather()
        with self.reference.in_place():
            yield

    def move_reference(self, alpha: float) -> None:
        """Set the reference weights to (1 − alpha) · reference + alpha · policy.

        Later checkpoints contain the reference weights.
        """
        assert isinstance(self.reference, ReferenceWeights), "the policy was built without a reference that can move"
        self.finish_param_gather()
        self.reference.move(alpha)

    # ------------------------------------------------------------ checkpoints and exports

    def save_checkpoint(self, directory: Path, step: int, state: dict[str, Any], wait: bool = True) -> Path | None:
        """Write a checkpoint; see `PolicyCheckpoint.save`."""
        return self.checkpoint.save(directory, step, state, wait)

    def load_checkpoint(self, iteration: Path, allow_partial: bool = False) -> Restored:
        """Restore a checkpoint; see `PolicyCheckpoint.load`."""
        return self.checkpoint.load(iteration, allow_partial)

    def export_hf(self, destination: Path) -> None:
        """Write the current weights, with adapters merged, as a Hugging Face model directory. Collective."""
        self.finish_param_gather()
        tensors = export_hf_weights(self.model, first_only=True)
        source = SafetensorsDirectory(self.config.model.path)
        write_hf_directory(
            in_precision(tensors, source, self.config.checkpoint.export_dtype),
            destination,
            self.config.model.path,
            self.hf_config,
            is_writer=self.is_writer,
            chat_template=self.config.data.read_chat_template(),
        )
        torch.distributed.barrier()

    def export_adapters(self, destination: Path) -> None:
        """Write the current adapters as a PEFT directory. Collective."""
        lora = self.model.lora
        assert lora is not None, "the model has no adapters"
        self.finish_param_gather()
        write_peft_directory(
            export_adapters(self.model, first_only=True),
            destination,
            self.config.model.path,
            lora.settings,
            is_writer=self.is_writer,
            chat_template=self.config.data.read_chat_template(),
        )
        torch.distributed.barrier()

    # ------------------------------------------------------------ generation with the policy's own weights

    def prepare_for_generation(
        self,
        params: SamplingParams | None = None,
        max_sequence_length: int | None = None,
        tokenizer: Any = None,
        max_batch_size: int = 64,
    ) -> bool:
        """Prepare to `generate` with the current weights.

        Args:
            params: sampling parameters. If None, the parameters of the previous call are used; at the first call, the
                configuration's parameters, if any.
            max_sequence_length: maximum number of tokens in a prompt and its response together. Default:
                `data.max_sequence_length`.
            tokenizer: the tokenizer. Default: the one in the model directory.

        Raises:
            ContractError: neither an earlier call nor the configuration gives sampling parameters.
        """
        self.weights_offload.restore()
        if params is None and self.generation is not None:
            return self.generation.prepare_for_generation()
        tokenizer = tokenizer or load_tokenizer(self.config.model.path, self.config.model.trust_remote_code)
        if params is not None:
            limit = max_sequence_length or self.config.data.max_sequence_length
            self.generation = MegatronGeneration(self.model, params, limit, tokenizer, max_batch_size)
        elif isinstance(self.config, RLConfig):
            self.generation = megatron_generation_of(self.config, self, tokenizer)
        else:
            raise ContractError(
                "prepare_for_generation: pass SamplingParams; only configurations of GRPO and PPO contain them"
            )
        return self.generation.prepare_for_generation()

    def exclude_unused_ids(self, tokenizer: Any) -> None:
        """Give the model's last ids, for which the tokenizer has no token, no probability from now on."""
        self.model.family.num_ids = min(count_ids(tokenizer), self.model.vocab_size)

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Generate a response to the prompt in each row; see `MegatronGeneration.generate`."""
        self.require("generate", self.weights_offload)
        if self.generation is None:
            self.prepare_for_generation()
        assert self.generation is not None
        return self.generation.generate(data, greedy)

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Release the memory that generation uses."""
        return self.generation is None or self.generation.finish_generation()

    # ------------------------------------------------------------ memory and weights, for inference engines

    def offload_before_refit(self) -> int:
        """Move the optimizer's state to the host and drop the gradient buffers; return the number of bytes freed."""
        return self.memory.offload_training_state()

    def offload_after_refit(self) -> int:
        """Offload the training state and move the weights to the host; return the number of bytes freed."""
        self.sender.release()
        return self.memory.offload_all()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Inside the context, all tensors of the policy are on the device.

        If the weights were offloaded before, everything is offloaded again afterwards.
        """
        was_away = self.weights_offload.is_away
        self.prepare_for_training()
        try:
            yield
        finally:
            if was_away:
                self.offload_after_refit()

    def prepare_refit_info(self, adapters_only: bool = False) -> RefitInfo:
        """Return a map from each tensor's name to its (shape, dtype); see `WeightSender.info`."""
        return self.sender.info(adapters_only)

    def adapter_settings(self) -> dict[str, Any]:
        """Return the arguments of PEFT's `LoraConfig` for the adapters; see `WeightSender.adapter_settings`."""
        return self.sender.adapter_settings()

    def init_collective(self, ip: str, port: int, world_size: int) -> None:
        """Create a process group with the engine's processes; see `WeightSender.connect`."""
        self.sender.connect(ip, port, world_size)

    def broadcast_weights_for_collective(self, bucket_bytes: int = BUCKET_BYTES, adapters_only: bool = False) -> None:
        """Send all weights to the engine's processes; see `WeightSender.broadcast`."""
        self.require_weights("broadcast_weights_for_collective")
        self.sender.broadcast(bucket_bytes, adapters_only)

    def prepare_weights_for_ipc(self, bucket_bytes: int = BUCKET_BYTES, adapters_only: bool = False) -> list[list[str]]:
        """Return the tensors' names in groups; the tensors of a group have at most `bucket_bytes` bytes together.

        Call `get_weights_ipc_handles` for one group after the other.
        """
        return self.sender.buckets(bucket_bytes, adapters_only)

    def get_weights_ipc_handles(self, keys: list[str]) -> dict[str, Any]:
        """Write the tensors `keys` to shared memory and return its handles; see `WeightSender.share`."""
        self.require_weights("get_weights_ipc_handles")
        return self.sender.share(keys)


def _global_batches(data: BatchedDataDict[Any], gbs: int | None) -> list[BatchedDataDict[Any]]:
    """Cut `data` into global batches of `gbs` rows; if `gbs` is None, all rows are one global batch.

    Raises:
        ContractError: `data` has no rows, or its number of rows is no multiple of `gbs`.
    """
    total = batch_share(data).total
    size = total if gbs is None else gbs
    if total == 0:
        raise ContractError("train: the batch has no rows")
    if isinstance(data, LocalBatch):
        if size != total:
            raise ContractError(f"train: gbs={size} must be {total}, the number of rows of all replicas")
        return [data]
    if size < 1 or total % size:
        raise ContractError(f"train: the number of rows ({total}) must be a multiple of gbs={size}")
    return [data.slice(start, start + size) for start in range(0, total, size)]


@dataclass(frozen=True)
class MicrobatchResult:
    """Results of one microbatch.

    rows: number of rows.
    samples: number of valid samples.
    metrics: the loss's metrics.
    """

    loss: float
    rows: int
    samples: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class MicrobatchResults:
    """Results of all microbatches of one batch, gathered from all replicas; every rank has the same results."""

    parts: tuple[MicrobatchResult, ...] = ()

    def __add__(self, others: MicrobatchResults) -> MicrobatchResults:
        return MicrobatchResults(self.parts + others.parts)

    @property
    def loss(self) -> float:
        """Loss of the batch: the sum of the microbatches' losses."""
        return sum(part.loss for part in self.parts)

    @property
    def rows(self) -> int:
        """Number of rows over which the loss was computed."""
        return sum(part.rows for part in self.parts)

    def metrics(self, loss_fn: LossFunction) -> dict[str, float]:
        """Return the loss's metrics over the batch, including `loss`."""
        samples = [part.samples for part in self.parts]
        reduced = reduce_metrics(self._metrics_of_parts(), samples, reductions_of(loss_fn))
        return {**{name: float(value) for name, value in reduced.items()}, "loss": self.loss}

    def by_microbatch(self) -> dict[str, list[float]]:
        """Return, for each metric, the list of its values in all microbatches that have the metric."""
        parts = self._metrics_of_parts()
        names = dict.fromkeys(name for part in parts for name in part)
        return {name: [part[name] for part in parts if name in part] for name in names}

    def _metrics_of_parts(self) -> list[dict[str, float]]:
        return [{"loss": part.loss, **part.metrics} for part in self.parts]


def all_gather_results(
    topology: Topology,
    loss_fn: LossFunction,
    microbatches: Sequence[Microbatch],
    outputs: Sequence[dict[str, Any]],
    names_of_all: InternedObjects,
) -> MicrobatchResults:
    """Gather the results of all data-parallel ranks' microbatches, without fillers (see `Microbatch`).

    The host waits for the device once.

    Args:
        outputs: the loss head's output for each of `microbatches`; [] on all pipeline stages but the last.
        names_of_all: exchanges the metrics' names between ranks. Pass the same object in every step: it sends only
            names that are new.

    Raises:
        ContractError: a metric is not a number. Raised on every rank.
    """
    own_names = _names_of(type(loss_fn).__name__, outputs)
    everyone = names_of_all.gather(own_names) if torch.distributed.get_world_size() > 1 else [own_names]
    if errors := [found for found in everyone if isinstance(found, str)]:
        raise ContractError(errors[0])
    names = sorted({name for found in everyone for name in found})
    everything = all_gather(_as_table(microbatches, outputs, names), topology.data.group).flatten(0, 1)
    table = all_reduce(everything, topology.pipeline.group).tolist()
    results = []
    for counts, loss, num_rows, samples, *values in table:
        if counts:
            metrics = {
                name: value
                for name, value, present in zip(names, values[: len(names)], values[len(names) :], strict=True)
                if present
            }
            results.append(MicrobatchResult(loss, int(num_rows), samples, metrics))
    return MicrobatchResults(tuple(results))


def explain_nonfinite(loss: float, outputs: Sequence[dict[str, Any]], indices: Sequence[int]) -> str:
    """Return an error message with row and position of the first log-probability that is not finite. Collective.

    Args:
        indices: index of each of this rank's rows in the global batch.
    """
    found = None
    for output in outputs:
        if "logprobs" in output and (place := locate_nonfinite(output["logprobs"].cpu(), output["mask"].cpu())):
            found = f"row {indices[output['rows'][place[0]]]} of the global batch, position {place[1]}"
            break
    places = [f"rank {rank}: {place}" for rank, place in enumerate(gather_objects(found)) if place]
    return f"the loss is {loss}" + (f"; first bad log-probability at {places[0]}" if places else "")


def _names_of(loss_name: str, outputs: Sequence[dict[str, Any]]) -> list[str] | str:
    """Return the names of all metrics in `outputs`, or an error message if a metric is not a number."""
    for output in outputs:
        for name, value in output["metrics"].items():
            if not (isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)):
                found = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                return f"{loss_name}: metric {name!r} is {found}; a metric must be one number"
    return sorted({name for output in outputs for name in output["metrics"]})


def _as_table(microbatches: Sequence[Microbatch], outputs: Sequence[dict[str, Any]], names: Sequence[str]) -> Tensor:
    """Return a table on the device with one row for each microbatch.

    The columns are `Microbatch.counts`, the loss, the number of rows, the number of valid samples, then the value of
    each metric in `names`, then for each metric whether the microbatch has it. The host does not wait for the device.
    """
    width, device = 4 + 2 * len(names), platform.device()
    if not outputs:
        return torch.zeros(len(microbatches), width, dtype=torch.float64, device=device)
    table: list[float] = []
    computed: dict[torch.dtype, list[tuple[int, Tensor]]] = {}
    for microbatch, output in zip(microbatches, outputs, strict=True):
        metrics = output["metrics"]
        numbers = (
            microbatch.counts,
            output["loss"],
            len(microbatch.rows),
            microbatch.data["sample_mask"].sum(),
            *(metrics.get(name, 0.0) for name in names),
            *(name in metrics for name in names),
        )
        for number in numbers:
            is_computed = isinstance(number, Tensor) and number.device.type != "cpu"
            if is_computed:
                computed.setdefault(number.dtype, []).append((len(table), number.detach().reshape(())))
            table.append(0.0 if is_computed else float(number))
    # Stacking different dtypes would round integers to fp32.
    stacked = [torch.stack([number for _, number in group]).double() for group in computed.values()]
    places = torch.tensor([place for group in computed.values() for place, _ in group], dtype=torch.long)
    there, places = platform.sent_together((torch.tensor(table, dtype=torch.float64), places), device)
    if stacked:
        there.index_copy_(0, places, torch.cat(stacked))
    return there.view(len(outputs), width)

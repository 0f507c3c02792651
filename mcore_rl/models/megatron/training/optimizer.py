"""Megatron's DDP, distributed optimizer and schedule; the gather of updated weights; offloading of device memory.

The gradient is the sum of the gradients of all microbatches on all data-parallel ranks. The losses of microbatches are
already divided by the global batch's counts, and the losses of context-parallel ranks add up. Megatron must therefore
not divide again:

- With `calculate_per_token_loss` and a loss function that returns three values, Megatron's schedules do not scale the
  loss, and its DDP sums over data- and context-parallel ranks.
- `finalize_gradients` passes no token count, so that Megatron skips its final division.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim.adamw import adamw

from mcore_rl import platform
from mcore_rl.config import OptimizerConfig, ParallelConfig
from mcore_rl.distributed.collectives import all_reduce
from mcore_rl.models.megatron.layers.fp8 import release_fp8_copies
from mcore_rl.models.megatron.layers.vision import TOWER_ATTRIBUTE
from mcore_rl.models.megatron.model.gpt_model import ModelShard
from mcore_rl.models.megatron.parallel_state import process_groups

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import (
    MegatronOptimizer,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

SCHEDULES = {"inverse_square_root": "inverse-square-root", "wsd": "WSD"}
"""Megatron's names of those schedules that have another name in `optimizer.schedule`."""


MUON_ATTRIBUTE = "is_updated_by_muon"
"""Attribute of the parameters that Muon updates."""

TORCH_ADAM = (torch.optim.Adam, torch.optim.AdamW)
FUSED_ON = (("cuda", torch.bfloat16),)
"""Pairs (device type, precision of the weights) for which torch's fused AdamW is used.

float32 weights use the default AdamW, because the fused kernel rounds differently: on a GPU, the gradient norm of the
third step differed from the CPU's by 1.3e-5; with the default AdamW, by less than 1e-5.
"""

BUCKET_SIZE: int | None = None
"""Number of parameters whose gradients are reduced together during the backward pass. None: Megatron's default, the
larger of 40 million and 1 million per replica."""


def wrap_for_training(model: ModelShard, parallel: ParallelConfig) -> list[DistributedDataParallel]:
    """Wrap the model's chunks in Megatron's DDP.

    DDP accumulates gradients in buffers and reduces them over data- and context-parallel ranks, both in fp32 unless
    `parallel.grad_reduce_in_fp32` is false.
    """
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=parallel.grad_reduce_in_fp32,
        use_distributed_optimizer=True,
        average_in_collective=False,
        overlap_grad_reduce=parallel.overlap_grad_reduce is True,
        overlap_param_gather=parallel.overlap_param_gather is True,
        bucket_size=BUCKET_SIZE,
    )
    wrapped = [
        DistributedDataParallel(chunk.config, config, chunk, pg_collection=process_groups()) for chunk in model.chunks
    ]
    for chunk in model.chunks:
        chunk.config.finalize_model_grads_func = finalize_gradients
        if parallel.overlap_grad_reduce is True:
            # The schedules disable the reduction for all microbatches but the last.
            functions = [ddp.no_sync for ddp in wrapped]
            chunk.config.no_sync_func = functions if len(functions) > 1 else functions[0]
    return wrapped


def finalize_gradients(model: Sequence[DistributedDataParallel], num_tokens: Any = None, **kwargs: Any) -> None:
    """Reduce the gradients with Megatron's function, but do not divide them by the number of tokens."""
    for chunk in model:  # these reductions start a new round of gathers, so the last round must be complete
        if chunk.module.gather is not None:
            chunk.module.gather.settle()
    finalize_model_grads(list(model), None, **kwargs)
    for chunk in model:
        if chunk.module.tower is not None:
            chunk.module.tower.sum_gradients()


def build_optimizer(
    wrapped: Sequence[DistributedDataParallel], config: OptimizerConfig, dtype: torch.dtype, lora_lr_ratio: float = 1.0
) -> MegatronOptimizer:
    """Build Megatron's AdamW. Its fp32 state is sharded over data-parallel ranks.

    Args:
        lora_lr_ratio: learning rate of the adapters' B matrices, divided by `config.lr`.
    """
    megatron = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_eps=config.adam_eps,
        clip_grad=config.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
    overrides = get_standard_config_overrides(megatron)
    embedding_lr = config.lr if config.embedding_lr is None else config.embedding_lr
    for key, rate in (
        (ParamKey(name="*.lora_B"), lora_lr_ratio * config.lr),
        (ParamKey(attr="is_embedding_or_output_parameter"), embedding_lr),
        (ParamKey(attr=MUON_ATTRIBUTE), config.lr if config.muon_lr is None else config.muon_lr),
        (ParamKey(attr=TOWER_ATTRIBUTE), config.lr if config.vision_tower_lr is None else config.vision_tower_lr),
    ):
        if rate != config.lr:
            ratio = rate / config.lr if config.lr else math.inf
            min_lr = ratio * config.min_lr if config.lr else 0.0
            # Megatron distinguishes groups by lr_mult when a checkpoint is loaded, not by their rates.
            rates: Any = {"max_lr": rate, "min_lr": min_lr, "lr_mult": ratio}
            overrides[key] = rates
    optimizer = get_megatron_optimizer(megatron, list(wrapped), config_overrides=overrides)
    for inner in optimizers_with_parameters(optimizer):
        if isinstance(inner.optimizer, TORCH_ADAM) and (platform.device().type, dtype) in FUSED_ON:
            for group in inner.optimizer.param_groups:
                group["fused"] = True
    return optimizer


MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamWInBfloat16:
    """AdamW with moments that are stored in bfloat16. The update is computed in fp32, for one parameter at a time.

    It takes over those parameters of Megatron's optimizer that have no state yet. `Muon` gives its own parameters a
    state, so create `Muon` first. `step` must run before Megatron's optimizer, which then finds no gradients for the
    updated parameters.

    Args:
        optimizer: Megatron's optimizer.
    """

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        self.parameters = list[tuple[Tensor, dict[str, Any], dict[str, Any]]]()
        for inner in (inner.optimizer for inner in optimizers_with_parameters(optimizer)):
            for group in inner.param_groups:
                for parameter in group["params"]:
                    if state := inner.state[parameter]:
                        continue
                    state |= {name: torch.zeros_like(parameter, dtype=torch.bfloat16) for name in MOMENTS}
                    state["step"] = torch.tensor(0.0)
                    self.parameters.append((parameter, group, state))

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters with the gradients that `clip_gradients` has prepared."""
        for parameter, group, state in self.parameters:
            assert parameter.grad is not None, "clip_gradients must run first"
            moments = [state[name].float() for name in MOMENTS]
            adamw(
                [parameter], [parameter.grad], [moments[0]], [moments[1]], [], [state["step"]],
                amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
                weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
            )  # fmt: skip
            for name, moment in zip(MOMENTS, moments, strict=True):
                state[name].copy_(moment)
            parameter.grad = None


EXACT_NORM_SIZE = 1 << 16
"""Largest number of elements whose norm torch computes accurately on the CPU. It adds up the squares in float32:
the norm of an embedding of 28 million elements may be off by 0.2 %."""


def gradient_norm(optimizer: MegatronOptimizer) -> float:
    """Return the norm of the whole model's gradient, the same on all ranks. Collective.

    The host waits for the device once. Megatron's own function waits once per tensor if neither Transformer Engine nor
    apex is installed.
    """
    gradients: dict[ProcessGroup, list[Tensor]] = {}
    for chained in optimizer.chained_optimizers:
        of_group = gradients.setdefault(chained.get_grad_stats_parallel_group(), [])
        of_group += gradients_for_norm(chained)
    squares = []
    for group, tensors in gradients.items():
        squares.append(all_reduce(sum_of_squares(tensors), group))
    return math.sqrt(float(torch.stack(squares).sum()))


def sum_of_squares(tensors: list[Tensor]) -> Tensor:
    """Return the sum of all squares in float64."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=platform.device())
    if platform.device().type == "cpu":
        tensors = [piece for tensor in tensors for piece in tensor.reshape(-1).split(EXACT_NORM_SIZE)]
    return torch.stack(torch._foreach_norm(tensors)).double().square().sum()


def clip_gradients(optimizer: MegatronOptimizer, limit: float) -> float:
    """Prepare the gradients for the optimizer step and clip their norm to `limit`; 0 means no limit.

    Returns:
        The norm before clipping. If it is not finite, the gradients are not clipped.
    """
    optimizer.prepare_grads()
    norm = gradient_norm(optimizer)
    if limit > 0 and math.isfinite(norm):
        for chained in optimizer.chained_optimizers:
            clip_grad_by_total_norm_fp32(chained.get_parameters(), limit, norm)
    return norm


def update_weights(optimizer: MegatronOptimizer) -> None:
    """Update the weights with the gradients that `clip_gradients` has prepared."""
    updated = optimizer.step_with_ready_grads()
    assert updated, "Megatron skips a step for gradients that are not finite, which clip_gradients has ruled out"


def build_scheduler(optimizer: MegatronOptimizer, config: OptimizerConfig, total_steps: int) -> OptimizerParamScheduler:
    """Build the learning-rate schedule: a linear warm-up, then `config.schedule`. It ends at `config.min_lr`.

    The schedule advances by one per optimizer step.
    """
    steps, wsd = max(total_steps, 1), config.schedule == "wsd"
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.steps_of_warmup(steps),
        lr_decay_steps=steps,
        lr_decay_style=SCHEDULES.get(config.schedule, config.schedule),
        wsd_decay_steps=max(round(config.decay_ratio * steps), 1) if wsd else None,
        lr_wsd_decay_style=config.decay_shape if wsd else None,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        # A resumed run follows its own configuration, from the step in the checkpoint.
        override_opt_param_scheduler=True,
        use_checkpoint_opt_param_scheduler=False,
    )


def gather_gradients(wrapped: Sequence[DistributedDataParallel]) -> None:
    """Gather the reduced gradients, so that every `main_grad` is complete on every rank. Collective.

    With the distributed optimizer each data-parallel rank has only its own part of the reduced gradients. This is
    enough for training, but not for code that reads whole gradients.
    """
    for chunk in wrapped:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            replicas = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                own = bucket.grad_data.view(replicas.size(), -1)[replicas.rank()].clone()
                torch.distributed.all_gather_into_tensor(bucket.grad_data, own, group=replicas)


def optimizers_with_parameters(optimizer: MegatronOptimizer) -> list[Any]:
    """Return the inner optimizers (for dense parameters, for experts) that have parameters on this rank."""
    inners = optimizer.chained_optimizers
    held = (inner for inner in inners if inner.optimizer is not None)  # None for dense if only experts are trained
    return [inner for inner in held if any(group["params"] for group in inner.optimizer.param_groups)]


class ParameterGather:
    """Gathers updated weights during the next forward pass.

    In an optimizer step, each replica updates only its own part of the weights. The forward pass of the next training
    step gathers the other parts, one bucket at a time, while earlier layers compute. Until then the weights are
    incomplete on every rank: other code must call `settle` before it reads them. Every method is collective over the
    replicas.

    Args:
        wrapped: chunks that are configured with Megatron's `overlap_param_gather`.
    """

    def __init__(self, wrapped: Sequence[DistributedDataParallel]) -> None:
        self.wrapped, self.is_pending = wrapped, False
        for chunk in wrapped:
            chunk.disable_forward_pre_hook(param_sync=False)  # there is nothing to gather yet
            chunk.module.gather = self
            for module in chunk.module.modules():
                if getattr(module, "takes_weights_of_parts", False):
                    module.register_forward_pre_hook(self._wait_for_parts)

    def begin(self) -> None:
        """Start to gather the first layers' weights, after an optimizer step.

        In the forward pass, a layer waits for its weights and then starts the gather of the next layers' weights.
        """
        self.is_pending = True
        for chunk in self.wrapped:
            chunk.enable_forward_pre_hook()
            for groups in (chunk.bucket_groups, chunk.expert_parallel_bucket_groups):
                if groups:  # groups are in the order of the backward pass
                    groups[-1].start_param_sync()

    def settle(self) -> None:
        """Complete the weights: wait for buckets that are being gathered, and gather all remaining ones."""
        if not self.is_pending:
            return
        self.is_pending = False
        for chunk in self.wrapped:
            chunk.disable_forward_pre_hook(param_sync=False)
        for group in self._groups():
            if not group.param_gather_dispatched or group.param_gather_handle is not None:
                group.start_param_sync(force_sync=True)

    def wait_for(self, weight: Tensor) -> None:
        """Wait until `weight` is complete. Needed if the weight's module is not called, because no hook then waits."""
        if not self.is_pending:
            return
        for chunk in self.wrapped:
            if weight in chunk.param_to_bucket_group:
                chunk.param_to_bucket_group[weight].finish_param_sync()

    def _wait_for_parts(self, module: torch.nn.Module, inputs: Any) -> None:
        for weight in module.parameters():
            self.wait_for(weight)

    def _groups(self) -> Iterator[Any]:
        for chunk in self.wrapped:
            yield from chunk.bucket_groups
            yield from chunk.expert_parallel_bucket_groups


class Offload:
    """Releases device memory of tensors temporarily.

    The buffers on the host are kept after `restore` and used again, because page-locking memory is slow. Copies in both
    directions run on the same stream, so a buffer is not overwritten before its contents are restored.

    Args:
        keep: whether to keep the contents on the host. If not, the tensors are zeros after `restore`.
        for_others: whether other processes need the released memory. If not, torch's allocator keeps it for this
            process: freeing it and allocating it again would make the host wait for the device each time.
    """

    def __init__(self, keep: bool, for_others: bool = True) -> None:
        self.keep, self.for_others = keep, for_others
        self._away: list[tuple[Tensor, Tensor | int]] = []
        self._buffers: dict[int, Tensor] = {}

    @property
    def is_away(self) -> bool:
        return bool(self._away)

    def offload(self, tensors: Iterable[Tensor]) -> int:
        """Release the storages of `tensors`; return the number of bytes freed on the device."""
        if self.is_away:
            return 0
        earlier, self._buffers = self._buffers, {}  # buffers of storages that no longer exist are freed
        for name, whole in _storages(tensors).items():
            host: Tensor | int = whole.numel()
            if self.keep:
                buffer = earlier.pop(name, None)
                if buffer is None or buffer.shape != whole.shape:
                    buffer = torch.empty(whole.shape, dtype=torch.uint8, pin_memory=platform.has_gpu())
                host = self._buffers[name] = buffer.copy_(whole)
            self._away.append((whole, host))
        freed = 0
        for whole, _ in self._away:
            freed += whole.untyped_storage().nbytes()
            whole.untyped_storage().resize_(0)
        if self.for_others:
            platform.release_cached_memory()
        return freed

    def restore(self) -> None:
        """Allocate all released storages again and restore their contents."""
        for whole, host in self._away:
            whole.untyped_storage().resize_(host if isinstance(host, int) else host.numel())
            if isinstance(host, int):
                whole.zero_()
            else:
                whole.copy_(host, non_blocking=True)
        self._away = []


def _storages(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """Return each storage that `tensors` use, by its `storage_id`, as a tensor of bytes."""
    found: dict[int, Tensor] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            found.setdefault(platform.storage_id(tensor), whole)
    return found


def gradient_buffers(chunks: Iterable[DistributedDataParallel]) -> list[Tensor]:
    """Return the buffers in which DDP accumulates and reduces gradients."""
    return [buffer.grad_data for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def main_parameters(optimizer: MegatronOptimizer) -> list[Tensor]:
    """Return the tensors that the optimizer updates on this rank: parameters, or this rank's parts of parameters."""
    groups = [group for inner in optimizers_with_parameters(optimizer) for group in inner.optimizer.param_groups]
    return [parameter for group in groups for parameter in group["params"]]


def optimizer_tensors(optimizer: MegatronOptimizer, weights: Iterable[Tensor]) -> list[Tensor]:
    """Return the optimizer's moments and fp32 parameters, without tensors that share memory with `weights`."""
    shared = {platform.storage_id(weight) for weight in weights}
    tensors = main_parameters(optimizer)
    for inner in optimizers_with_parameters(optimizer):
        for state in inner.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor) and value.ndim]
    return [tensor for tensor in tensors if platform.storage_id(tensor) not in shared]


def gradients_for_norm(optimizer: Any) -> list[Tensor]:
    """Return this rank's gradients that count for the gradient norm, of one of Megatron's inner optimizers."""
    renamed = getattr(optimizer, "get_grads_for_grad_norm", None)  # since Megatron 0.19
    gradients: list[Tensor] = (renamed or optimizer.get_main_grads_for_grad_norm)()
    return gradients


class TrainingMemory:
    """Releases and restores device memory of a policy: weights, gradient buffers and optimizer state.

    Args:
        weights: offloads the policy's weights.
        parameters: function that returns the weights.
        chunks: this rank's chunks of the model.
        optimizer: the policy's optimizer; None if the policy is not trained.
        offloads_optimizer: whether the optimizer's state is always on the host, except inside `optimizer_on_device`.
    """

    def __init__(
        self,
        weights: Offload,
        parameters: Callable[[], Iterable[Tensor]],
        chunks: Sequence[Any],
        optimizer: Any,
        offloads_optimizer: bool = False,
    ) -> None:
        self.weights, self.parameters, self.chunks, self.trained_by = weights, parameters, chunks, optimizer
        self.optimizer, self.gradients = Offload(keep=True), Offload(keep=False)
        # A simulated storage cannot be emptied; the simulation computes the saving afterwards.
        self.offloads_optimizer = offloads_optimizer and optimizer is not None and not platform.simulates()
        self.between_steps = Offload(keep=True, for_others=False)
        with self.optimizer_on_device():
            pass  # the state is offloaded before the first step too

    @contextmanager
    def optimizer_on_device(self) -> Iterator[None]:
        """Inside the context, keep the optimizer's state on the device even if `offloads_optimizer` is set.

        Exception: if `offload_training_state` has moved the state to the host, it stays there.
        """
        self.between_steps.restore()
        try:
            yield
        finally:
            if self.offloads_optimizer:
                self.between_steps.offload(optimizer_tensors(self.trained_by, self.parameters()))

    def restore(self) -> None:
        """Move weights and optimizer state back to the device, and restore the gradient buffers."""
        for offload in (self.weights, self.optimizer, self.gradients):
            offload.restore()

    def offload_training_state(self) -> int:
        """Move the optimizer's state to the host and drop the gradient buffers.

        Returns:
            The number of bytes freed on the device.
        """
        if self.trained_by is None:
            return 0
        freed = self.gradients.offload(gradient_buffers(self.chunks))
        return freed + self.optimizer.offload(optimizer_tensors(self.trained_by, self.parameters()))

    def offload_all(self) -> int:
        """Offload the training state and move the weights to the host; return the number of bytes freed."""
        release_fp8_copies(self.chunks)
        return self.offload_training_state() + self.weights.offload(self.parameters())

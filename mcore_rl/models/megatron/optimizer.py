"""Megatron's DDP, distributed optimizer and schedule; the gathering of updated weights; offloading of device memory.

The gradient is d/dθ Σ_DP Σ_microbatches L. Losses are already divided by the global batch's counts, and
context-parallel ranks hold parts that add up, so nothing may be divided again. With `calculate_per_token_loss` and a
loss function that returns three values, Megatron's schedules leave the loss as it is and DDP sums over data- and
context-parallel ranks. `finalize_gradients` passes no token count, so that Megatron skips its final division too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_rl import platform
from mcore_rl.config import OptimizerConfig, ParallelConfig
from mcore_rl.models.megatron.build import ModelShard
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
"""Megatron's names of those that it calls otherwise."""


BUCKET_SIZE: int | None = None
"""Parameters whose gradients are reduced together where that overlaps with the backward pass; None: as Megatron has it,
the larger of 40 million and a million a replica."""


def wrap_for_training(model: ModelShard, parallel: ParallelConfig) -> list[DistributedDataParallel]:
    """The model's chunks with gradient buffers in fp32, reduced over data- and context-parallel ranks."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        average_in_collective=False,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        bucket_size=BUCKET_SIZE,
    )
    wrapped = [
        DistributedDataParallel(chunk.config, config, chunk, pg_collection=process_groups()) for chunk in model.chunks
    ]
    for chunk in model.chunks:
        chunk.config.finalize_model_grads_func = finalize_gradients
        if parallel.overlap_grad_reduce:  # in which microbatches nothing is to be reduced yet, the schedules know
            functions = [ddp.no_sync for ddp in wrapped]
            chunk.config.no_sync_func = functions if len(functions) > 1 else functions[0]
    return wrapped


def finalize_gradients(model: Sequence[DistributedDataParallel], num_tokens: Any = None, **kwargs: Any) -> None:
    """Megatron's reductions over the groups, without its division by a token count."""
    for chunk in model:  # these reductions begin a new round of gathering, in which none may be left of the last
        if chunk.module.gather is not None:
            chunk.module.gather.settle()
    finalize_model_grads(list(model), None, **kwargs)


def build_optimizer(
    wrapped: Sequence[DistributedDataParallel], config: OptimizerConfig, dtype: torch.dtype, lora_lr_ratio: float = 1.0
) -> MegatronOptimizer:
    """AdamW, its fp32 state sharded over data-parallel ranks.

    Args:
        lora_lr_ratio: learning rate of the adapters' B by that of all else.
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
    ):
        if rate != config.lr:
            ratio = rate / config.lr if config.lr else math.inf
            min_lr = ratio * config.min_lr if config.lr else 0.0
            # Megatron tells groups apart by lr_mult when a checkpoint is loaded, not by the rates that it takes.
            rates: Any = {"max_lr": rate, "min_lr": min_lr, "lr_mult": ratio}
            overrides[key] = rates
    return get_megatron_optimizer(megatron, list(wrapped), config_overrides=overrides)


def clip_gradients(optimizer: MegatronOptimizer, limit: float) -> float:
    """Prepare the gradients, scale them down to the norm `limit` (not if that is 0), and return their norm before.

    A norm that is not finite is returned without clipping.
    """
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if limit > 0 and math.isfinite(norm):
        for chained in optimizer.chained_optimizers:
            clip_grad_by_total_norm_fp32(chained.get_parameters(), limit, norm)
    return norm


def update_weights(optimizer: MegatronOptimizer) -> None:
    """Make the optimizer's step with gradients that `clip_gradients` has prepared."""
    updated = optimizer.step_with_ready_grads()
    assert updated, "Megatron skips a step for gradients that are not finite, which clip_gradients has ruled out"


def build_scheduler(optimizer: MegatronOptimizer, config: OptimizerConfig, total_steps: int) -> OptimizerParamScheduler:
    """Linear warm-up, then `config.schedule` down to min_lr at the last step; one tick an optimizer step."""
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
        # A resumed run follows its own configuration from the step that the checkpoint names.
        override_opt_param_scheduler=True,
        use_checkpoint_opt_param_scheduler=False,
    )


def gather_gradients(wrapped: Sequence[DistributedDataParallel]) -> None:
    """Make every `main_grad` whole on every rank.

    The distributed optimizer leaves each data-parallel rank only its own part of the reduced gradients;
    training needs no more, but whoever wants to look at them does. Collective.
    """
    for chunk in wrapped:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            replicas = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                own = bucket.grad_data.view(replicas.size(), -1)[replicas.rank()].clone()
                torch.distributed.all_gather_into_tensor(bucket.grad_data, own, group=replicas)


def optimizers_with_parameters(optimizer: MegatronOptimizer) -> list[Any]:
    """Return the optimizers of dense parameters and of experts that this rank holds a part of."""
    inners = optimizer.chained_optimizers
    held = (inner for inner in inners if inner.optimizer is not None)  # the dense, where experts alone are trained
    return [inner for inner in held if any(group["params"] for group in inner.optimizer.param_groups)]


class ParameterGather:
    """The distributed optimizer gives each replica its own part of the updated weights. Here the rest comes in the
    forward pass of the next training step, each bucket of parameters while the layers before it compute.

    Until then no rank's weights are whole: whoever else takes them calls `settle` first. Every method is collective
    over the replicas.

    Args:
        wrapped: chunks whose configuration has Megatron's `overlap_param_gather`.
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
        """After an optimizer step: gather what the first layers need; they ask for the next."""
        self.is_pending = True
        for chunk in self.wrapped:
            chunk.enable_forward_pre_hook()
            for groups in (chunk.bucket_groups, chunk.expert_parallel_bucket_groups):
                if groups:  # in the order of the backward pass
                    groups[-1].start_param_sync()

    def settle(self) -> None:
        """Wait for what is on its way, gather what was not asked for; nothing where all is there."""
        if not self.is_pending:
            return
        self.is_pending = False
        for chunk in self.wrapped:
            chunk.disable_forward_pre_hook(param_sync=False)
        for group in self._groups():
            if not group.param_gather_dispatched or group.param_gather_handle is not None:
                group.start_param_sync(force_sync=True)

    def wait_for(self, weight: Tensor) -> None:
        """Wait for a weight that is used without its module's forward pass, as Megatron's hooks do for a module."""
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
    """Storages of one kind, in place or given up.

    Args:
        keep: copy the contents to the host and back; otherwise they come back as zeros.
    """

    def __init__(self, keep: bool) -> None:
        self.keep = keep
        self._away: list[tuple[Tensor, Tensor | int]] = []

    @property
    def is_away(self) -> bool:
        return bool(self._away)

    def offload(self, tensors: Iterable[Tensor]) -> int:
        """Give up the storages behind `tensors`; returns the bytes of device memory that this frees."""
        if self.is_away:
            return 0
        for whole in _storages(tensors):
            host: Tensor | int = whole.numel()
            if self.keep:
                host = torch.empty(whole.shape, dtype=torch.uint8, pin_memory=platform.has_gpu()).copy_(whole)
            self._away.append((whole, host))
        freed = 0
        for whole, _ in self._away:
            freed += whole.untyped_storage().nbytes()
            whole.untyped_storage().resize_(0)
        platform.release_cached_memory()
        return freed

    def restore(self) -> None:
        """Bring everything back."""
        for whole, host in self._away:
            whole.untyped_storage().resize_(host if isinstance(host, int) else host.numel())
            if isinstance(host, int):
                whole.zero_()
            else:
                whole.copy_(host, non_blocking=True)
        self._away = []


def _storages(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Each storage behind `tensors` once, seen as bytes."""
    found: dict[int, Tensor] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            found.setdefault(platform.storage_id(tensor), whole)
    return list(found.values())


def gradient_buffers(chunks: Iterable[DistributedDataParallel]) -> list[Tensor]:
    """The buffers that gradients are accumulated and reduced in."""
    return [buffer.grad_data for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def optimizer_tensors(optimizer: MegatronOptimizer, weights: Iterable[Tensor]) -> list[Tensor]:
    """Moments and fp32 parameters, except what shares the memory of the weights themselves."""
    shared = {platform.storage_id(weight) for weight in weights}
    tensors = []
    for inner in optimizers_with_parameters(optimizer):
        for group in inner.optimizer.param_groups:
            tensors += group["params"]
        for state in inner.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor) and value.ndim]
    return [tensor for tensor in tensors if platform.storage_id(tensor) not in shared]

"""Adapters on Megatron's linear layers, under tensor and sequence parallelism.

The ranks exchange only A · x, [T, rank] for each projection. In a column-parallel layer A is replicated on all
tensor-parallel ranks and B is sharded by rows. In a row-parallel layer A is sharded by columns and B is replicated.
Under sequence parallelism the replicated matrix is applied only to a rank's own tokens, and Megatron sums the gradients
of this matrix over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl import platform
from mcore_rl.distributed.collectives import copy_forward_all_reduce_backward
from mcore_rl.models.megatron.layers.parameters import sum_over_sequence_ranks
from mcore_rl.models.megatron.layers.transformer_layer import with_adapter
from mcore_rl.models.megatron.layers.vision import VISION_TOWER
from mcore_rl.models.megatron.model.gpt_model import HiddenStateGPTModel, ModelShard
from mcore_rl.models.megatron.model.lora import NO_ADAPTER_ROWS, LoRA, SourceByOwner, stack_experts
from mcore_rl.models.megatron.parallel_state import process_groups
from mcore_rl.models.megatron.weight_mapping import GateUp, Mapping
from mcore_rl.models.megatron.weights.conversion import (
    ADAPTER,
    chunk_mappings,
    first_layer,
    gather_tensors,
    name_in_model,
    read_shard,
)

from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint


class Adapter(torch.nn.Module):
    """The adapter of a linear layer. It computes scale · B · A · x in fp32; the product is added to the layer's output.

    Args:
        a: [n · rank, columns], the A matrices of the layer's n adapted projections, below each other.
        b: [rows, rank], the B matrices of all projections of the layer, below each other.
        owners: [rows], for each row of `b`, the index of its projection in `a`; −1 if that projection has no adapter.
        sequence_parallel: whether the model uses sequence parallelism. If so, the input of a column-parallel layer and
            the output of a row-parallel layer contain only this rank's tokens.
        fork: whether tensor-parallel ranks have different inputs. If so, their dropout masks differ too.
    """

    def __init__(self, a: Tensor, b: Tensor, owners: Tensor, lora: LoRA, sequence_parallel: bool, fork: bool) -> None:
        super().__init__()
        self.lora_A, self.lora_B = torch.nn.Parameter(a), torch.nn.Parameter(b)
        self.scale, self.dropout, self.enabled = lora.scale, lora.dropout, True
        self.sequence_parallel, self.fork, self.group = sequence_parallel, fork, process_groups().tp
        owned = owners[:, None] == torch.arange(a.shape[0] // b.shape[1], device=owners.device)
        self.register_buffer("owned", owned.to(b)[..., None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return what is added to this rank's part of the layer's output; `x` is this rank's part of the input."""
        if self.dropout and self.training:
            with get_cuda_rng_tracker().fork() if self.fork else nullcontext():
                x = F.dropout(x, self.dropout)
        low = self._exchange(F.linear(x.to(self.lora_A.dtype), self.lora_A))
        return self.scale * F.linear(low, self.spread())

    def spread(self) -> Tensor:
        """Return B as one matrix for all n projections, [rows, n · rank].

        Each projection has `rank` columns. Each row of B is placed in the columns of its projection; the other columns
        of the row are 0.
        """
        owned: Any = self.owned
        return (self.lora_B[:, None] * owned).flatten(1)

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """Return the layer's weight plus scale · B · A."""
        return (weight.float() + self.scale * (self.spread() @ self.lora_A)).to(weight.dtype)

    def _exchange(self, low: Tensor) -> Tensor:
        """Exchange this rank's A · x (`low`) with the other ranks; return the input of this rank's B."""
        raise NotImplementedError


class ColumnAdapter(Adapter):
    """An adapter of a column-parallel layer: each rank has all of A and its rows of B."""

    def _exchange(self, low: Tensor) -> Tensor:
        if self.sequence_parallel:
            whole: Tensor = gather_from_sequence_parallel_region(low, group=self.group)
            return whole
        copied: Tensor = copy_to_tensor_model_parallel_region(low, group=self.group)
        return copied


class RowAdapter(Adapter):
    """An adapter of a row-parallel layer: each rank has its columns of A and all of B."""

    def _exchange(self, low: Tensor) -> Tensor:
        if self.sequence_parallel:
            own: Tensor = reduce_scatter_to_sequence_parallel_region(low, group=self.group)
            return own
        total: Tensor = reduce_from_tensor_model_parallel_region(low, group=self.group)
        return total


class ReplicatedAdapter(Adapter):
    """An adapter of a replicated layer: each rank has all of A and of B."""

    def _exchange(self, low: Tensor) -> Tensor:
        return low


class ExpertAdapter(Adapter):
    """An adapter of a routed expert's layer.

    Every rank of the expert's tensor-parallel group sees all tokens of the expert. Outputs and input gradients may be
    partial sums, because Megatron's token exchanges sum them over the ranks. Only the gradient of the replicated matrix
    is summed here.

    Args:
        whole: which matrix is replicated on every rank, "A" or "B".
    """

    def __init__(self, a: Tensor, b: Tensor, owners: Tensor, lora: LoRA, whole: str) -> None:
        super().__init__(a, b, owners, lora, sequence_parallel=False, fork=False)
        self.whole, self.group = whole, process_groups().expt_tp

    def forward(self, x: Tensor) -> Tensor:
        a, b = self._summed(self.lora_A, self.lora_B)
        return self.scale * F.linear(F.linear(x.to(a.dtype), a), b)

    def of_all(self, adapters: Sequence[ExpertAdapter], rows: Tensor, ends: Tensor) -> Tensor:
        """Return what the adapters of all experts add to a layer's output, [T, out].

        One grouped product is computed for all A and one for all B, in the precision of `rows`: kernels exist for this
        precision. The matrix rows of these kernels must be multiples of 16 bytes, so the adapters' rank is padded with
        zeros.

        Args:
            adapters: the adapter of each expert.
            rows: inputs [T, in], sorted by expert.
            ends: [experts] int32, the number of the row after the last row of each expert.
        """
        a, b = self._summed(*(torch.stack([getattr(x, name) for x in adapters]) for name in ("lora_A", "lora_B")))
        missing = -b.shape[2] % (16 // rows.itemsize)
        a, b = F.pad(a, (0, 0, 0, missing)).to(rows.dtype), F.pad(b, (0, missing)).to(rows.dtype)
        low = F.grouped_mm(rows, a.transpose(1, 2), offs=ends)
        return self.scale * F.grouped_mm(low, b.transpose(1, 2), offs=ends)

    def _summed(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return A and B. In the backward pass, the gradient of the replicated matrix is summed over the ranks."""
        if self.whole == "A":
            return copy_forward_all_reduce_backward(a, self.group), b
        return a, copy_forward_all_reduce_backward(b, self.group)


def add_adapters(model: ModelShard, lora: LoRA) -> ModelShard:
    """Add the adapters that `lora` describes to the model's layers; return the model. Only adapters are trained."""
    model = replace(model, lora=lora)
    for chunk in model.chunks:
        chunk.requires_grad_(False)
        for name, mapping, _ in list(chunk_mappings(model, chunk)):
            path = mapping.megatron.removesuffix("weight")
            if f"{path}adapter.lora_A" in lora.table:
                layer_name, _, weight = name.rpartition(".")
                layer: Any = chunk.get_submodule(layer_name)
                adapter = _adapter(getattr(layer, weight), getattr(layer, "is_column", None), path, lora, model)
                if name.startswith(VISION_TOWER):
                    _adapt_tower(layer, adapter, model)
                elif weight == "weight":
                    layer.adapter = adapter
                else:
                    layer.adapter.append(adapter)  # one of the experts of a grouped layer, in their order
        if chunk.pre_process and chunk.config.recompute_granularity:
            # Recomputation returns gradients only if one of its inputs requires them; a frozen embedding does not.
            chunk.embedding.register_forward_hook(lambda module, inputs, embedded: _with_gradient(embedded))
    return model


def _adapt_tower(layer: torch.nn.Module, adapter: Adapter, model: ModelShard) -> None:
    """Add an adapter to a linear layer of the vision tower, which is an ordinary module of PyTorch."""
    layer.adapter = adapter
    layer.register_forward_hook(_plus_adapter)
    # Tensor-parallel ranks have different images: their dropout masks differ, and `VisionTower.sum_gradients` sums.
    adapter.fork = model.topology.tensor.size > 1
    sum_over_sequence_ranks(*adapter.parameters(), when=False)


def _plus_adapter(layer: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    return with_adapter(layer.adapter, inputs[0], output)


def _with_gradient(embedded: Tensor) -> Tensor:
    return embedded.requires_grad_() if torch.is_grad_enabled() else embedded


def _adapter(weight: Tensor, is_column: bool | None, path: str, lora: LoRA, model: ModelShard) -> Adapter:
    a, b = (lora.table[f"{path}adapter.lora_{matrix}"] for matrix in "AB")
    names = tuple(dict.fromkeys(part.name for part in b.parts if part.name != NO_ADAPTER_ROWS))
    of_rows = replace(b, parts=tuple(replace(part, shape=(part.shape[0], 1)) for part in b.parts))
    owners = read_shard(of_rows, SourceByOwner(names), model.topology)
    first, second = (read_shard(mapping, lora.source, model.topology).to(platform.device()) for mapping in (a, b))
    parallel = model.topology.sequence_parallel
    adapter: Adapter
    if a.is_expert:
        adapter = ExpertAdapter(
            first, second, owners[:, 0].to(platform.device()), lora, whole="A" if is_column else "B"
        )
    else:
        kind = {True: ColumnAdapter, False: RowAdapter, None: ReplicatedAdapter}[is_column]
        fork = model.topology.tensor.size > 1 and (parallel or is_column is False)
        adapter = kind(first, second, owners[:, 0].to(platform.device()), lora, parallel, fork)
    for mapping, parameter in ((a, adapter.lora_A), (b, adapter.lora_B)):
        parameter.allreduce = getattr(weight, "allreduce", True)  # type: ignore[attr-defined]
        if mapping.kind.partition_dim is not None:
            set_tensor_model_parallel_attributes(parameter, True, mapping.kind.partition_dim, 1)
        elif not mapping.is_expert:
            sum_over_sequence_ranks(parameter, when=parallel)
        elif model.topology.expert_tensor.rank == 0:  # ranks have different experts; count them in the gradient norm
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    return adapter


def adapter_mappings(model: ModelShard, chunk: HiddenStateGPTModel) -> Iterator[tuple[str, Mapping, Tensor]]:
    """Yield the name, the mapping and the parameter of each A and B matrix in a chunk of the model."""
    assert model.lora is not None, "the model has no adapters"
    for name, parameter in chunk.named_parameters():
        if ADAPTER in name:
            yield name, model.lora.table[name_in_model(name, first_layer(chunk), model.first_expert)], parameter


def adapters_in(model: ModelShard) -> list[Tensor]:
    """Return all A and B matrices of this rank."""
    return [parameter for chunk in model.chunks for _, _, parameter in adapter_mappings(model, chunk)]


def export_adapters(
    model: ModelShard, value_of: Callable[[Tensor], Tensor] = torch.Tensor.detach, first_only: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield all adapters of the model as PEFT's tensors with their names, gathered from all ranks. Collective.

    Args:
        value_of: function that returns what to export for a parameter, for example its gradient.
        first_only: yield the tensors only on the first rank, and gather them from one data-parallel replica only.
    """
    assert model.lora is not None, "the model has no adapters"
    own = {m.megatron: value_of(p) for chunk in model.chunks for _, m, p in adapter_mappings(model, chunk)}
    tensors = gather_tensors(model.lora.table, own, model, first_only=first_only)
    yield from stack_experts(tensors)


def adapter_state(model: ModelShard, chunk: HiddenStateGPTModel) -> dict[str, Any]:
    """Return Megatron's sharded state dict of a chunk's adapters. Its names contain the layers' numbers."""
    ours = process_groups()
    described = {}
    for name, mapping, parameter in adapter_mappings(model, chunk):
        groups: dict[str, Any] = {"tp_group": ours.tp, "dp_cp_group": ours.dp_cp}
        if mapping.is_expert:
            groups = {"tp_group": ours.expt_tp, "dp_cp_group": ours.expt_dp}
        if mapping.kind.partition_dim is None:
            described[name] = make_sharded_tensor_for_checkpoint(parameter, mapping.megatron, **groups)
            continue
        dimension = mapping.kind.partition_dim
        described[name] = make_tp_sharded_tensor_for_checkpoint(parameter, mapping.megatron, dimension, **groups)
        if isinstance(mapping.kind, GateUp):  # each rank has its gate rows above its up rows
            described[name] = apply_swiglu_sharded_factory(described[name], ())
    return described

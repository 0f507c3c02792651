"""Hugging Face ⇄ Megatron weights: the family's one table, read in both directions.

Import: every rank reads only its slices of the safetensors files; no communication. Export: a
generator over all parameters in the model's order, one at a time: gathered over tensor-parallel ranks where it is
(`whole_tensors`), then split into its Hugging Face tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from mcore_rl.distributed.topology import Topology
from mcore_rl.errors import UserError
from mcore_rl.models.megatron.build import BuiltModel, HiddenStateGPTModel
from mcore_rl.models.megatron.families import family_of
from mcore_rl.models.megatron.families.base import REWARD_HEAD
from mcore_rl.models.megatron.hf_checkpoint import SafetensorsDirectory
from mcore_rl.models.megatron.linear import Adapted
from mcore_rl.models.megatron.weight_mapping import Mapping, Shape, TensorSource
from mcore_rl.models.megatron.whole_tensors import cut_over, gather_tensors

from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
# Experts as a list of modules, or as numbered weights of one grouped module (Transformer Engine).
_LISTED_EXPERT = re.compile(r"\.experts\.local_experts\.(\d+)\.")
_GROUPED_EXPERT = re.compile(r"\.experts\.(linear_fc[12])\.weight(\d+)$")
# Norms inside a fused module of Transformer Engine.
_FUSED = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}

FLOAT32_BUFFER = ".router.expert_bias"
ADAPTER = ".adapter."


def name_in_model(name: str, first_layer: int = 0, first_expert: int = 0) -> str:
    """A chunk's parameter by its name in the family's table.

    Args:
        first_layer, first_expert: numbers in the whole model of the chunk's first layer and of the rank's first expert.
    """
    name = _LAYER.sub(lambda match: f"decoder.layers.{int(match[1]) + first_layer}.", name)
    name = _LISTED_EXPERT.sub(lambda match: f".experts.{int(match[1]) + first_expert}.", name)
    name = _GROUPED_EXPERT.sub(lambda match: f".experts.{int(match[2]) + first_expert}.{match[1]}.weight", name)
    for fused, plain in _FUSED.items():
        name = name.replace(fused, plain)
    return name


def named_mappings(model: BuiltModel) -> Iterator[tuple[Mapping, Tensor]]:
    """This rank's parameters and persistent buffers with their mappings; the copy of a tied embedding is left out.

    Raises:
        UserError: a parameter that the family's table does not know.
    """
    for chunk in model.chunks:
        yield from ((mapping, tensor) for _, mapping, tensor in chunk_mappings(model, chunk))


def chunk_mappings(model: BuiltModel, chunk: HiddenStateGPTModel) -> Iterator[tuple[str, Mapping, Tensor]]:
    """`named_mappings` of one chunk, with the names that its tensors have there."""
    for name, tensor in weights_of(chunk):
        if (name == "output_layer.weight" and model.family.ties_embeddings) or ADAPTER in name:
            continue
        whole = name_in_model(name, first_layer(chunk), model.first_expert)
        if whole not in model.family.table:
            raise UserError(f"model.path: parameter {name} of the Megatron model has no Hugging Face counterpart")
        yield name, model.family.table[whole], tensor


def weights_of(chunk: HiddenStateGPTModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's weights: its parameters and adapters, and routers' biases, which no gradient trains."""
    yield from chunk.named_parameters()
    yield from ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(FLOAT32_BUFFER))


def own_weights(model: BuiltModel) -> Iterator[tuple[str, Tensor]]:
    """`weights_of` all chunks of this rank, by names that tell the chunks apart."""
    for index, chunk in enumerate(model.chunks):
        yield from ((f"{index}.{name}", tensor) for name, tensor in weights_of(chunk))


def first_layer(chunk: HiddenStateGPTModel) -> int:
    """Number in the whole model of a chunk's first layer; 0 where it has none."""
    return int(chunk.decoder.layers[0].layer_number) - 1 if len(chunk.decoder.layers) else 0


# ---------------------------------------------------------------- import


def load_hf_weights(model: BuiltModel, source: SafetensorsDirectory) -> None:
    """Fill this rank's parameters from a model directory. No communication.

    Raises:
        UserError: a tensor that is missing, unknown, or of another shape than the config says.
    """
    check_hf_tensors(model.family.hf, source)
    with torch.no_grad():
        for mapping, tensor in named_mappings(model):
            if mapping.hf_names == (REWARD_HEAD,) and REWARD_HEAD not in source.names():
                continue  # a language model's directory has none: training begins from zero
            tensor.copy_(read_shard(mapping, source, model.topology))
            if mapping.kind.partition_dim is not None and not hasattr(tensor, "tensor_model_parallel"):
                # Megatron marks shards only when it initialises them; unmarked, the gradient norm of all
                # ranks but the first would be left out.
                set_tensor_model_parallel_attributes(tensor, True, mapping.kind.partition_dim, 1)
        if model.family.ties_embeddings and model.topology.is_last_stage:
            embedding = read_shard(model.family.table["embedding.word_embeddings.weight"], source, model.topology)
            model.chunks[-1].lm_head_weight().copy_(embedding)


def read_shard(mapping: Mapping, source: TensorSource, topology: Topology) -> Tensor:
    """This rank's shard of a parameter."""
    ranks = cut_over(mapping, topology)
    return mapping.kind.read(mapping.parts, source, ranks.rank, ranks.size)


def hf_shapes(hf: Any) -> dict[str, Shape]:
    """Names and shapes of the Hugging Face tensors of a configuration, in the model's order."""
    return family_of(hf).shapes()


def check_hf_tensors(hf: Any, source: SafetensorsDirectory) -> None:
    """Refuse a directory whose tensors are not exactly those of its configuration.

    Raises:
        UserError: naming the first tensors that are missing, unknown or misshapen.
    """
    family = family_of(hf)
    expected = family.shapes()
    if family.has_reward_head and REWARD_HEAD not in source.names():
        del expected[REWARD_HEAD]
    found = {name for name in source.names() if not family.ignores(name)}
    for what, names in (("lacks", set(expected) - found), ("has unknown", found - set(expected))):
        if names:
            raise UserError(f"model.path: {source.path} {what} tensors: {', '.join(sorted(names)[:3])} ({len(names)})")
    for name, shape in expected.items():
        if tuple(source.shape(name)) != shape:
            raise UserError(
                f"model.path: {source.path}: {name} is {tuple(source.shape(name))}; its config.json says {shape}"
            )


# ---------------------------------------------------------------- export


def export_hf_weights(
    model: BuiltModel,
    value_of: Callable[[Tensor], Tensor] | None = None,
    names: Collection[str] | None = None,
    copies: bool = True,
    first_only: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every Hugging Face tensor, whole, one at a time, on every rank. Collective over all of them.

    Args:
        value_of: what is exported of a parameter, for example its gradient; its value, with its adapter merged into
            it, if left out.
        names: only these tensors, the same on every rank; all if left out.
        copies: give each tensor memory of its own; otherwise it is valid until the next one only.
        first_only: on the first rank alone; data-parallel replicas other than its own then gather nothing.
    """
    adapters = adapters_of(model) if value_of is None else {}
    value_of = value_of or torch.Tensor.detach
    own = {mapping.megatron: value_of(tensor) for mapping, tensor in named_mappings(model)}
    yield from gather_tensors(model.family.table, own, model, names, copies, first_only, adapters)


def adapters_of(model: BuiltModel) -> dict[str, Any]:
    """This rank's adapters, by the names of the weights that they are on."""
    owners = {
        id(module.weight): module.adapter
        for chunk in model.chunks
        for module in chunk.modules()
        if isinstance(module, Adapted) and module.adapter is not None
    }
    return {mapping.megatron: owners[id(tensor)] for mapping, tensor in named_mappings(model) if id(tensor) in owners}

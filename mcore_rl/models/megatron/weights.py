"""Hugging Face ⇄ Megatron weights: one table, read in both directions.

Import: every rank reads only its slices of the safetensors files; no communication. Export: a
generator over all parameters in the model's order, one at a time: gathered over tensor-parallel
ranks, then sent to the other pipeline stages, split into its Hugging Face tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_rl.distributed.collectives import gather_objects
from mcore_rl.distributed.topology import Topology
from mcore_rl.errors import UserError
from mcore_rl.models.megatron.hf_checkpoint import SafetensorsDirectory
from mcore_rl.models.megatron.hf_config import has_reward_head, head_dim, padded_vocab_size
from mcore_rl.models.megatron.model import BuiltModel

from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes  # isort: skip


@dataclass(frozen=True)
class Mapping:
    """One Megatron parameter and the Hugging Face tensors it is made of.

    kind: vocab      [vocabulary, …], rows split over TP, padded at the end
          replicated the same on every TP rank
          row        [out, in], columns split over TP
          gate_up    gate and up projections, each split by rows, stacked on every rank
          qkv        query, key and value rows interleaved per key-value group, split by rows
    """

    megatron: str
    hf: tuple[str, ...]
    kind: str


# `{}` is the layer. Two Megatron names on one line: ours, and the name inside a fused TE module.
_TABLE: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = (
    (("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), "vocab"),
    (
        ("decoder.layers.{}.input_layernorm.weight", "decoder.layers.{}.self_attention.linear_qkv.layer_norm_weight"),
        ("model.layers.{}.input_layernorm.weight",),
        "replicated",
    ),
    (
        ("decoder.layers.{}.self_attention.linear_qkv.weight",),
        tuple(f"model.layers.{{}}.self_attn.{p}_proj.weight" for p in "qkv"),
        "qkv",
    ),
    (
        ("decoder.layers.{}.self_attention.linear_qkv.bias",),
        tuple(f"model.layers.{{}}.self_attn.{p}_proj.bias" for p in "qkv"),
        "qkv",
    ),
    (
        ("decoder.layers.{}.self_attention.q_layernorm.weight",),
        ("model.layers.{}.self_attn.q_norm.weight",),
        "replicated",
    ),
    (
        ("decoder.layers.{}.self_attention.k_layernorm.weight",),
        ("model.layers.{}.self_attn.k_norm.weight",),
        "replicated",
    ),
    (("decoder.layers.{}.self_attention.linear_proj.weight",), ("model.layers.{}.self_attn.o_proj.weight",), "row"),
    (
        ("decoder.layers.{}.pre_mlp_layernorm.weight", "decoder.layers.{}.mlp.linear_fc1.layer_norm_weight"),
        ("model.layers.{}.post_attention_layernorm.weight",),
        "replicated",
    ),
    (
        ("decoder.layers.{}.mlp.linear_fc1.weight",),
        ("model.layers.{}.mlp.gate_proj.weight", "model.layers.{}.mlp.up_proj.weight"),
        "gate_up",
    ),
    (("decoder.layers.{}.mlp.linear_fc2.weight",), ("model.layers.{}.mlp.down_proj.weight",), "row"),
    (("decoder.final_layernorm.weight",), ("model.norm.weight",), "replicated"),
    (("output_layer.weight",), ("lm_head.weight",), "vocab"),
)
REWARD_HEAD = Mapping("output_layer.weight", ("score.weight",), "replicated")
"""In place of the vocabulary's projection; named as transformers' sequence classifiers name it."""
_BY_MEGATRON_NAME = {name: (hf, kind) for names, hf, kind in _TABLE for name in names}
_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)(\..*)$")


def map_parameter(name: str, first_layer: int = 0) -> Mapping:
    """The mapping of a Megatron parameter whose stage begins at layer `first_layer`.

    Raises:
        UserError: a parameter that the table does not know.
    """
    layer, template = "", name
    if match := _LAYER.match(name):
        layer, template = str(int(match[2]) + first_layer), f"{match[1]}{{}}{match[3]}"
    if template not in _BY_MEGATRON_NAME:
        raise UserError(f"model.path: parameter {name} of the Megatron model has no Hugging Face counterpart")
    hf, kind = _BY_MEGATRON_NAME[template]
    return Mapping(template.replace("{}", layer), tuple(n.replace("{}", layer) for n in hf), kind)


def first_layer(topology: Topology, hf: Any) -> int:
    """Index of the first transformer layer of this pipeline stage."""
    return topology.pipeline.rank * (hf.num_hidden_layers // topology.pipeline.size)


def named_mappings(model: BuiltModel) -> Iterator[tuple[Mapping, torch.nn.Parameter]]:
    """This rank's parameters with their mappings; the last stage's copy of a tied embedding is left out."""
    for chunk in model.chunks:
        for name, parameter in chunk.named_parameters():
            if name == "output_layer.weight" and model.hf_config.tie_word_embeddings:
                continue
            if name == REWARD_HEAD.megatron and has_reward_head(model.hf_config):
                yield REWARD_HEAD, parameter
                continue
            yield map_parameter(name, first_layer(model.topology, model.hf_config)), parameter


# ---------------------------------------------------------------- import


def load_hf_weights(model: BuiltModel, source: SafetensorsDirectory) -> None:
    """Fill this rank's parameters from a model directory. No communication.

    Raises:
        UserError: a tensor that is missing, unknown, or of another shape than the config says.
    """
    check_hf_tensors(model.hf_config, source)
    reader = ShardReader(source, model.hf_config, model.topology)
    with torch.no_grad():
        for mapping, parameter in named_mappings(model):
            if mapping is REWARD_HEAD and mapping.hf[0] not in source.names():
                continue  # a language model's directory has none: training begins from zero
            parameter.copy_(reader.read(mapping))
            if mapping.kind != "replicated" and not hasattr(parameter, "tensor_model_parallel"):
                # Megatron marks shards only when it initialises them; unmarked, the gradient norm of all
                # ranks but the first would be left out.
                set_tensor_model_parallel_attributes(parameter, True, 1 if mapping.kind == "row" else 0, 1)
        if model.hf_config.tie_word_embeddings and model.topology.is_last_stage:
            embedding = reader.read(map_parameter("embedding.word_embeddings.weight"))
            model.chunks[-1].lm_head_weight().copy_(embedding)


def hf_shapes(hf: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the Hugging Face tensors of a configuration, in the model's order."""
    d, h = head_dim(hf), hf.hidden_size
    q, kv = hf.num_attention_heads * d, hf.num_key_value_heads * d
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (hf.vocab_size, h)}
    for layer in range(hf.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (h,)
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (rows, h)
        if hf.model_type == "qwen2":
            shapes.update(
                {f"{prefix}self_attn.{name}_proj.bias": (rows,) for name, rows in zip("qkv", (q, kv, kv), strict=True)}
            )
        if hf.model_type == "qwen3":
            shapes.update({f"{prefix}self_attn.{name}_norm.weight": (d,) for name in "qk"})
        shapes[prefix + "self_attn.o_proj.weight"] = (h, q)
        shapes[prefix + "post_attention_layernorm.weight"] = (h,)
        for name in ("gate", "up"):
            shapes[f"{prefix}mlp.{name}_proj.weight"] = (hf.intermediate_size, h)
        shapes[prefix + "mlp.down_proj.weight"] = (h, hf.intermediate_size)
    shapes["model.norm.weight"] = (h,)
    if has_reward_head(hf):
        shapes[REWARD_HEAD.hf[0]] = (1, h)
    elif not hf.tie_word_embeddings:
        shapes["lm_head.weight"] = (hf.vocab_size, h)
    return shapes


def check_hf_tensors(hf: Any, source: SafetensorsDirectory) -> None:
    """Refuse a directory whose tensors are not exactly those of its configuration.

    Raises:
        UserError: naming the first tensors that are missing, unknown or misshapen.
    """
    expected, ignored = hf_shapes(hf), {"lm_head.weight"} if hf.tie_word_embeddings or has_reward_head(hf) else set()
    if has_reward_head(hf) and REWARD_HEAD.hf[0] not in source.names():
        del expected[REWARD_HEAD.hf[0]]
    found = {name for name in source.names() if not name.endswith("rotary_emb.inv_freq")} - ignored
    for what, names in (("lacks", set(expected) - found), ("has unknown", found - set(expected))):
        if names:
            raise UserError(f"model.path: {source.path} {what} tensors: {', '.join(sorted(names)[:3])} ({len(names)})")
    for name, shape in expected.items():
        if tuple(source.shape(name)) != shape:
            raise UserError(
                f"model.path: {source.path}: {name} is {tuple(source.shape(name))}; its config.json says {shape}"
            )


class ShardReader:
    """Reads one tensor-parallel rank's shard of a mapped parameter."""

    def __init__(self, source: SafetensorsDirectory, hf: Any, topology: Topology) -> None:
        self.source, self.hf = source, hf
        self.rank, self.size = topology.tensor.rank, topology.tensor.size

    def read(self, mapping: Mapping) -> Tensor:
        readers: dict[str, Callable[..., Tensor]] = {
            "vocab": self._vocab,
            "replicated": self.source.read,
            "row": self._row,
            "gate_up": self._gate_up,
            "qkv": self._qkv,
        }
        return readers[mapping.kind](*mapping.hf)

    def _range(self, total: int) -> slice:
        return slice(self.rank * total // self.size, (self.rank + 1) * total // self.size)

    def _vocab(self, name: str) -> Tensor:
        wanted = self._range(padded_vocab_size(self.hf.vocab_size, self.size))
        start, stop = (min(edge, self.hf.vocab_size) for edge in (wanted.start, wanted.stop))
        shard = torch.zeros(wanted.stop - wanted.start, self.hf.hidden_size)
        if stop > start:
            rows = self.source.read(name, slice(start, stop))
            shard = shard.to(rows.dtype)
            shard[: stop - start] = rows
        return shard

    def _row(self, name: str) -> Tensor:
        return self.source.read(name, slice(None), self._range(self.source.shape(name)[1]))

    def _gate_up(self, gate: str, up: str) -> Tensor:
        rows = self._range(self.hf.intermediate_size)
        return torch.cat((self.source.read(gate, rows), self.source.read(up, rows)))

    def _qkv(self, query: str, key: str, value: str) -> Tensor:
        """With more ranks than key-value groups, a rank reads its group whole and keeps its rows."""
        d, groups = head_dim(self.hf), self.hf.num_key_value_heads
        per_group = self.hf.num_attention_heads // groups
        rows_per_group = (per_group + 2) * d
        wanted = self._range(groups * rows_per_group)
        first, last = wanted.start // rows_per_group, -(-wanted.stop // rows_per_group)
        parts = [
            self.source.read(name, slice(first * heads * d, last * heads * d)).unflatten(0, (last - first, heads * d))
            for name, heads in ((query, per_group), (key, 1), (value, 1))
        ]
        interleaved = torch.cat(parts, dim=1).flatten(0, 1)
        return interleaved[wanted.start - first * rows_per_group : wanted.stop - first * rows_per_group]


# ---------------------------------------------------------------- export


def export_hf_weights(
    model: BuiltModel,
    value_of: Callable[[torch.nn.Parameter], Tensor] = lambda parameter: parameter.detach(),
    names: Collection[str] | None = None,
    copies: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every Hugging Face tensor, whole, on every rank, one at a time. Collective over TP and PP.

    Args:
        value_of: what is exported of a parameter: its value, or for example its gradient.
        names: only these tensors, the same on every rank; all if left out.
        copies: give each tensor memory of its own; otherwise it is valid until the next one only.
    """
    local = {mapping.megatron: (mapping, parameter) for mapping, parameter in named_mappings(model)}
    described = {name: (mapping, tuple(p.shape)) for name, (mapping, p) in local.items()}
    everywhere = gather_objects(described, model.topology.pipeline.group)
    owners = {name: stage for stage, names in reversed(list(enumerate(everywhere))) for name in names}
    # Stages in order give the model's own order: embedding, layers, norm, head.
    for name, stage in sorted(owners.items(), key=lambda item: item[1]):
        mapping = everywhere[stage][name][0]
        if names is not None and not set(mapping.hf) & set(names):
            continue
        shard = value_of(local[name][1]) if stage == model.topology.pipeline.rank else None
        whole = _gather_whole(mapping, shard, stage, everywhere[stage][name][1], model)
        for hf_name, tensor in zip(mapping.hf, split_mapped(mapping, whole, model.hf_config, copies), strict=True):
            if names is None or hf_name in names:
                yield hf_name, tensor


def _gather_whole(
    mapping: Mapping, shard: Tensor | None, stage: int, shape: tuple[int, ...], model: BuiltModel
) -> Tensor:
    """All tensor-parallel shards stacked, [TP, …] (or [1, …] if replicated), on every stage."""
    topology = model.topology
    parts = 1 if mapping.kind == "replicated" else topology.tensor.size
    if shard is not None:
        stacked = shard.unsqueeze(0) if parts == 1 else _gather_in_place(shard, topology)
    if topology.pipeline.size == 1:
        return stacked
    header = [stacked.dtype if shard is not None else None]
    assert topology.pipeline.group is not None
    source = torch.distributed.get_global_rank(topology.pipeline.group, stage)
    torch.distributed.broadcast_object_list(header, src=source, group=topology.pipeline.group)
    if shard is None:
        reference = next(model.chunks[0].parameters())
        stacked = torch.empty((parts, *shape), dtype=header[0], device=reference.device)
    stacked = stacked.contiguous()
    torch.distributed.broadcast(stacked, src=source, group=topology.pipeline.group)
    return stacked


def _gather_in_place(shard: Tensor, topology: Topology) -> Tensor:
    """[…] on each tensor-parallel rank → [TP, …]; gloo's all-gather would hold the whole a second time."""
    stacked = shard.new_empty((topology.tensor.size, *shard.shape))
    stacked[topology.tensor.rank] = shard
    for rank, part in enumerate(stacked):
        torch.distributed.broadcast(part, group=topology.tensor.group, group_src=rank)
    return stacked


def split_mapped(mapping: Mapping, stacked: Tensor, hf: Any, copies: bool = True) -> list[Tensor]:
    """Shards [TP, …] → the whole Hugging Face tensors, each with memory of its own, or views where they can be."""
    if mapping.kind == "replicated":
        parts = [stacked[0]]
    elif mapping.kind == "vocab":
        parts = [stacked.flatten(0, 1)[: hf.vocab_size]]
    elif mapping.kind == "row":
        parts = [torch.cat(tuple(stacked), dim=1)]
    elif mapping.kind == "gate_up":
        parts = [part.flatten(0, 1) for part in stacked.chunk(2, dim=1)]
    else:
        d, groups = head_dim(hf), hf.num_key_value_heads
        heads = (hf.num_attention_heads // groups, 1, 1)
        rows = stacked.flatten(0, 1).unflatten(0, (groups, sum(heads) * d))
        parts = [part.flatten(0, 1) for part in rows.split([n * d for n in heads], dim=1)]
    return [part.clone(memory_format=torch.contiguous_format) for part in parts] if copies else parts

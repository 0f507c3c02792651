"""Attention over packs: token mixers, which describe a layer's attention, and the modules that compute it.

A token mixer describes the part of a layer in which tokens see each other. A family has a token mixer for each of its
layers that have such a part (`Family.token_mixer`). The token mixer contains what other modules must know about the
layer's attention: its modules, its weights in the Hugging Face directory, its cache during generation, and its cost.

Under context parallelism each rank gathers the keys and values of the whole pack, and attends with its own queries. In
a layer with a window, it gathers only those that its windows reach, if these are less than half.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mcore_rl import platform
from mcore_rl.distributed.collectives import RowExchange, all_gather_forward_reduce_scatter_backward, exchange_rows
from mcore_rl.errors import UserError
from mcore_rl.models.megatron.kernels.packed_attention import AttentionPattern, kernel_of, packed_attention
from mcore_rl.models.megatron.kernels.selected_attention import selected_attention
from mcore_rl.models.megatron.layers.packs import PackParams, position_factors
from mcore_rl.models.megatron.layers.parameters import ShardedMixin
from mcore_rl.models.megatron.layers.transformer_layer import WideRMSNorm, rotate
from mcore_rl.models.megatron.parallel_state import ProcessGroupCollection
from mcore_rl.models.megatron.weight_mapping import (
    Columns,
    GatedQueryKeyValue,
    Kind,
    Mapping,
    Part,
    QueryKeyValue,
    Replicated,
    Rows,
)

from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class LayerModules:
    """The modules of transformer layers in one implementation (local or Transformer Engine)."""

    norm: Any
    head_norm: Any
    column_linear: Any
    row_linear: Any
    normed_row_linear: Any
    attention: Any
    grouped_experts: Any
    grouped_linears: tuple[Any, Any] | None = None
    """Classes of the column- and row-parallel linear layers of all experts; None if each expert has its own layers."""


@dataclass(frozen=True, kw_only=True)
class TokenMixer(ABC):
    """Describes the part of a layer in which tokens see each other, such as attention.

    hidden: size of the hidden states.
    input_linear: name of the linear layer that follows the layer's input norm.
    """

    input_linear: ClassVar[str] = "linear_qkv"
    hidden: int

    @abstractmethod
    def spec(self, modules: LayerModules) -> ModuleSpec:
        """Return the spec of the module that takes the place of Megatron's self-attention."""

    @abstractmethod
    def mappings(self, ours: str, theirs: str) -> Iterator[Mapping]:
        """Yield, for each weight of the module, its mapping to Hugging Face tensors.

        Args:
            ours: prefix of the module's names in Megatron.
            theirs: prefix of the layer's names in the Hugging Face model.
        """

    @property
    @abstractmethod
    def mixed_size(self) -> int:
        """Size of the core attention's output for one token, over all heads."""

    def check(self) -> None:  # noqa: B027
        """Raise an error for options that the module does not support.

        Raises:
            UserError: the message names the field of `config.json`.
        """

    def describe(self) -> str:
        """Describe the module's implementation in a few words; return "" if `transformer_impl` determines it."""
        return ""

    def flops_per_token(self) -> float:
        """Return the floating-point operations per token, forward and backward, without the products with weights."""
        return 0.0

    def flops_per_token_squared(self) -> float:
        """Return the factor c: attention over n tokens costs c · n² operations, forward and backward.

        This holds if the window covers the whole sequence.
        """
        return 0.0

    def flops(self, tokens: int, before: int = 0) -> float:
        """Return the floating-point operations of attention for a sequence, in forward and backward.

        The products with weights are not counted.

        Args:
            tokens: number of tokens in the sequence.
            before: number of preceding tokens. The sequence sees them, but they are not computed again.
        """
        return self.flops_per_token() * tokens


@dataclass(frozen=True, kw_only=True)
class KeyValueMixer(TokenMixer):
    """A mixer whose cache in generation contains the keys and values of all tokens.

    heads: number of query heads. groups: number of cached key heads, and of cached value heads; each has size head_dim.
    scale: factor by which query–key products are multiplied.
    window: maximum number of tokens that a token sees, including itself; None for all previous tokens.
    """

    heads: int
    groups: int
    head_dim: int
    scale: float
    window: int | None = None

    @property
    def mixed_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def block_size(self) -> int:
        """Number of consecutive keys that are chosen together, if an indexer chooses keys."""
        return 1

    def flops_per_token_squared(self) -> float:
        return 6.0 * self.heads * self.head_dim

    def flops(self, tokens: int, before: int = 0) -> float:
        seen = self._seen_squared(before + tokens) - self._seen_squared(before)
        return super().flops(tokens) + self.flops_per_token_squared() * seen

    def _seen_squared(self, tokens: int) -> float:
        """Return twice the number of pairs of a query and a visible key, in a sequence of `tokens` tokens."""
        window = tokens if self.window is None else min(tokens, self.window)
        return float(window**2 + 2 * (tokens - window) * window)


@dataclass(frozen=True, kw_only=True)
class GroupedQueryAttention(KeyValueMixer):
    """Grouped-query attention, computed by a subclass of Megatron's self-attention.

    qkv_bias, output_bias: whether the projections have biases.
    qk_norm: whether each query head and each key head has an RMS norm. wide_qk_norm: whether one RMS norm spans all
        query heads together, and another one all key heads together.
    output_gate: whether each query head has a gate. The sigmoid of the gate multiplies the head's output.
    post_norm_name: Hugging Face name of the norm after the output projection; "" if there is none.
    rope_factor: factor by which cos and sin of the rotary embedding are multiplied.
    neighbours: number n of elements, from the start of each query and key head, that the Hugging Face model rotates as
        pairs of neighbours: elements 0 and 1, 2 and 3, and so on. Megatron rotates elements i and i + n / 2 as a pair,
        so the weight's rows are reordered. 0 if the Hugging Face model does not rotate neighbours.
    has_sinks: whether each query head has a sink: the score of an additional key. The value of this key is 0.
    sinks_name: Hugging Face name of the sinks, inside the attention.
    query_scale: function that maps the tokens' positions [T] to factors of the queries; None if there is no factor.
    module: name of the attention in a layer of the Hugging Face model.
    """

    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    wide_qk_norm: bool = False
    output_gate: bool = False
    post_norm_name: str = ""
    rope_factor: float = 1.0
    neighbours: int = 0
    has_sinks: bool = False
    sinks_name: str = "sinks"
    query_scale: Callable[[Tensor], Tensor] | None = None
    module: str = "self_attn"

    @property
    def projections(self) -> str:
        """The projections that the layer has, in their order: of queries (q), keys (k) and values (v)."""
        return "qkv"

    @property
    def value_size(self) -> int:
        """Size of a value head."""
        return self.head_dim

    def spec(self, modules: LayerModules) -> ModuleSpec:
        norms: dict[str, Any] = dict.fromkeys("qk", modules.head_norm if self.qk_norm else IdentityOp)
        if self.wide_qk_norm:
            heads = {"q": self.heads, "k": self.groups}
            norms = {name: ModuleSpec(module=WideRMSNorm, params={"heads": count}) for name, count in heads.items()}
        return ModuleSpec(
            module=PackSelfAttention,
            params={"attn_mask_type": AttnMaskType.causal, "mixer": self},
            submodules=SelfAttentionSubmodules(
                linear_qkv=modules.column_linear,
                core_attention=ModuleSpec(
                    module=modules.attention,
                    params={"window": self.window, "sinks": self.heads if self.has_sinks else 0},
                ),
                linear_proj=modules.normed_row_linear if self.post_norm_name else modules.row_linear,
                q_layernorm=norms["q"],
                k_layernorm=norms["k"],
            ),
        )

    def mappings(self, ours: str, theirs: str) -> Iterator[Mapping]:
        theirs += f"{self.module}."
        if self.has_sinks:
            sinks = Part(theirs + self.sinks_name, (self.heads,))
            yield Mapping(f"{ours}core_attention.softmax_offset", (sinks,), Rows())
        rows = {"q": self.heads * self.head_dim, "k": self.groups * self.head_dim, "v": self.groups * self.value_size}
        projected = {name: rows[name] * (2 if self.output_gate and name == "q" else 1) for name in self.projections}
        qkv = self._kind_of_qkv()
        yield Mapping(f"{ours}linear_qkv.weight", self.qkv_parts(theirs, projected), qkv)
        if self.qkv_bias:
            biases = tuple(Part(f"{theirs}{name}_proj.bias", (n,)) for name, n in projected.items())
            yield Mapping(f"{ours}linear_qkv.bias", biases, qkv)
        for name in self.projections[:2] if self.qk_norm or self.wide_qk_norm else "":
            size, kind = (rows[name], Rows()) if self.wide_qk_norm else (self.head_dim, Replicated())
            yield Mapping(f"{ours}{name}_layernorm.weight", (Part(f"{theirs}{name}_norm.weight", (size,)),), kind)
        output = Part(f"{theirs}o_proj.weight", (self.hidden, self.heads * self.value_size))
        yield Mapping(f"{ours}linear_proj.weight", (output,), Columns())
        if self.output_bias:
            yield Mapping(f"{ours}linear_proj.bias", (Part(f"{theirs}o_proj.bias", (self.hidden,)),), Replicated())

    def _kind_of_qkv(self) -> Kind:
        """Return how the projections of queries, keys and values are one weight."""
        kind = GatedQueryKeyValue if self.output_gate else QueryKeyValue
        return kind(self.groups, self.heads // self.groups, self.head_dim, self.value_size, self.neighbours)

    def check(self) -> None:
        if self.output_bias and not self.qkv_bias:
            raise UserError("model.path: attention with a bias on the output projection alone is not supported")

    def qkv_parts(self, theirs: str, rows: dict[str, int]) -> tuple[Part, ...]:
        """Return the parts of the Hugging Face weights that are the query, key and value projections.

        Args:
            theirs: prefix of the names in the Hugging Face model.
            rows: number of rows of each projection, by "q", "k" and "v".
        """
        return tuple(Part(f"{theirs}{name}_proj.weight", (n, self.hidden)) for name, n in rows.items())


def check_value_dim(value_dim: int, head_dim: int) -> None:
    """Raise an error if there are no values, or if they are larger than keys, which no kernel can compute."""
    if not 1 <= value_dim <= head_dim:
        raise UserError(
            f"model.path: v_head_dim={value_dim} must be at least 1, and at most the head dimension of the keys "
            f"({head_dim})"
        )


class FusedQKVAttention(GroupedQueryAttention):
    """Attention whose query, key and value projections are stacked in one Hugging Face tensor (Phi-3)."""

    def qkv_parts(self, theirs: str, rows: dict[str, int]) -> tuple[Part, ...]:
        parts, first = [], 0
        for count in rows.values():
            parts.append(Part(f"{theirs}qkv_proj.weight", (count, self.hidden), first))
            first += count
        return tuple(parts)


class PackSelfAttention(SelfAttention):
    """Megatron's self-attention with options that may differ between layers, and with corrected output gates.

    Megatron itself has these options only for all layers together.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        *args: Any,
        mixer: GroupedQueryAttention,
        **kwargs: Any,
    ) -> None:
        if mixer.output_bias or (mixer.groups, mixer.head_dim) != (config.num_query_groups, config.kv_channels):
            config = copy.copy(config)
            config.num_query_groups, config.kv_channels = mixer.groups, mixer.head_dim
            config.add_bias_linear = mixer.output_bias  # Megatron's own option also adds biases to the MLP
        super().__init__(config, submodules, *args, **kwargs)
        self.mixer = mixer
        self._angles: Tensor | None = None
        self._scales: Tensor | None = None

    def forward(
        self,
        *args: Any,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: PackParams | None = None,
        **kwargs: Any,
    ) -> Any:
        self._angles = rotary_pos_emb if rotary_pos_emb is not None and rotary_pos_emb.shape[-1] else None
        if self.mixer.query_scale is not None:
            self._scales = position_factors(self.mixer.query_scale, packed_seq_params)
        out = super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        self._angles = self._scales = None
        return out

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """Return the rotated queries and keys, the values, and the gates of the queries if there are gates.

        The rotation is done here, because Megatron's own rotation has many operations. For each of them, autograd would
        keep tensors in every layer.

        If several tensor-parallel ranks share a key-value head, they divide its queries. Megatron 0.16 divides the
        queries, but not the gates; this method also divides the gates.
        """
        query, key, *others = self._projected(*args, **kwargs)
        if kwargs.get("output_gate"):
            heads, gate = query.shape[2], others[-1]
            first = self.pg_collection.tp.rank() * heads % gate.shape[2]
            others[-1] = gate[:, :, first : first + heads]
        if self._scales is not None:
            query = query * self._scales[:, None].to(query.dtype)
        if self._angles is not None:
            query, key = (rotate(x, self._angles[:, None], self.mixer.rope_factor) for x in (query, key))
        return query, key, *others

    def _projected(self, *args: Any, **kwargs: Any) -> Any:
        """Return queries and keys before the rotation, values, and gates if there are any, [T, 1, heads, d]."""
        return super().get_query_key_value_tensors(*args, **kwargs)

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """Multiply outputs `x` by the sigmoid of their gates. Unlike Megatron's method, this one is not compiled."""
        return (x * torch.sigmoid(gate.float()).reshape(x.shape)).to(x.dtype)


class PackedCausalAttention(ShardedMixin, MegatronModule):
    """Scaled dot-product attention that is causal within each segment of a pack.

    Args:
        window: maximum number of tokens that a token sees, including itself; None for all previous tokens.
        sinks: number of query heads with a sink (gpt-oss); 0 for none.
        block_size: number of consecutive keys that are chosen together, if keys are chosen (`attention.sparse`).
        float32_sinks: whether the sinks are fp32, whatever the model's precision is.
    """

    sharded: ClassVar[dict[str, int]] = {"softmax_offset": 0}
    softmax_offset: torch.nn.Parameter | None
    keeps_gathered = False
    """Whether gathered keys and values are kept for the backward pass because the layer recomputes itself."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        window: int | None = None,
        sinks: int = 0,
        float32_sinks: bool = False,
        block_size: int = 1,
    ) -> None:
        super().__init__(config=config)
        self.window, self.layer_number, self.block_size = window, layer_number, block_size
        assert pg_collection is not None, "core attention needs its process groups"
        self.softmax_offset = None
        if sinks:
            self.softmax_offset = torch.nn.Parameter(
                torch.zeros(
                    sinks // pg_collection.tp.size(), dtype=torch.float32 if float32_sinks else config.params_dtype
                )
            )
        self.cp_group = pg_collection.cp
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackParams | None = None,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """Map queries [T / CP, heads, d] and keys and values [T / CP, groups, d] to [T / CP, heads · d].

        If keys are `chosen`, by the argument or for this layer in the pack, each query sees only these.

        For the backward pass a layer keeps only the rank's own 1/CP of the keys and values; the backward pass gathers
        the other keys and values again. A fully recomputed layer keeps all gathered keys and values, because it gathers
        them just before its backward pass.
        """
        assert packed_seq_params is not None and packed_seq_params.visible is not None, "attention runs on packs"
        visible, kernel = packed_seq_params.visible, kernel_of(query)
        chosen = packed_seq_params.chosen.get(self.layer_number - 1) if chosen is None else chosen
        # Attention over chosen keys reads the rows of all ranks.
        index = None if kernel.reads_in_place or chosen is not None else visible.index
        if index is None and visible.layout.cp_size == 1:
            # `value` is a view of the projection of queries, keys and values; without the copy all of it would be kept.
            return self._attend(query, key, value.contiguous(), visible, chosen)
        own = torch.cat((key, value), dim=-1)
        exchange = visible.exchange(self.window)
        seen = self._seen(own, index, exchange)
        again = own.detach()
        keeps = self.keeps_gathered or self.config.recompute_granularity == "full"
        with nullcontext() if keeps else recompute_in_backward(seen, lambda: self._seen(again, index, exchange)):
            keys, values = seen.split(key.shape[-1], dim=-1)
            return self._attend(query, keys, values, visible, chosen)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, visible: AttentionPattern, chosen: Tensor | None
    ) -> Tensor:
        sinks = self.softmax_offset
        if chosen is not None:
            assert self.window is None and self.softmax_scale is not None
            options = self.softmax_scale, sinks, self.block_size
            return selected_attention(query, key, value, visible, chosen, *options).flatten(1)
        return packed_attention(query, key, value, visible, self.softmax_scale, self.window, sinks).flatten(1)

    def _seen(self, own: Tensor, index: Tensor | None, exchange: RowExchange | None) -> Tensor:
        """Gather the rows `own` [T / CP, groups, …] of every context-parallel rank, in the order of the ranks.

        Return all gathered rows or, if `index` is not None, only the rows whose numbers are in `index`. With an
        `exchange`, the rows that no window of this rank reaches are zeros.
        """
        if exchange is None:
            gathered = all_gather_forward_reduce_scatter_backward(own, self.cp_group)
        else:
            gathered = exchange_rows(own, exchange, self.cp_group)
        return gathered if index is None else gathered[index]


@contextmanager
def recompute_in_backward(tensor: Shaped[Tensor, "..."], make: Callable[[], Tensor]) -> Iterator[None]:
    """Enter a context in which autograd does not save `tensor` or its views; the backward pass makes it again.

    The backward pass calls `make` when it first needs the tensor, and releases the result after its last use. All ranks
    do this at the same place, so `make` may be a collective.

    Args:
        make: function that returns a tensor with the values, the shape and the strides of `tensor`.
    """
    remade = _Remade(make)
    storage = platform.storage_id(tensor)

    def keep(saved: Tensor) -> Any:
        if platform.storage_id(saved) == storage:
            return remade.part(saved)
        return saved.detach()  # an autograd node that stores its own output creates a reference cycle

    with saved_tensors_hooks(keep, lambda kept: kept.cut() if isinstance(kept, _Part) else kept):
        yield


class _Remade:
    def __init__(self, make: Callable[[], Tensor]) -> None:
        self.make, self.parts, self.asked = make, 0, 0
        self.again: Tensor | None = None

    def part(self, saved: Tensor) -> _Part:
        self.parts += 1
        return _Part(self, tuple(saved.shape), saved.stride(), int(saved.storage_offset()))

    def ask(self) -> Tensor:
        again = self.make() if self.again is None else self.again
        self.asked += 1
        self.again = None if self.asked % self.parts == 0 else again
        return again


@dataclass(frozen=True)
class _Part:
    remade: _Remade
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def cut(self) -> Tensor:
        return self.remade.ask().as_strided(self.shape, self.stride, self.offset)

"""Token mixers: the part of a layer that mixes tokens. A family gives each of its layers one (`Family.token_mixer`).

A mixer describes everything that the rest of the package needs to know of the layer's attention: its modules, its
weights in the Hugging Face directory, its cache during generation, and its cost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from mcore_rl.errors import UserError
from mcore_rl.models.megatron.attention import PackSelfAttention
from mcore_rl.models.megatron.layers import WideRMSNorm
from mcore_rl.models.megatron.weight_mapping import (
    Columns,
    GatedQueryKeyValue,
    Mapping,
    Part,
    QueryKeyValue,
    Replicated,
    Rows,
)

from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec


@dataclass(frozen=True)
class LayerModules:
    """The modules of transformer layers in one implementation; layers of all families consist of these."""

    norm: Any
    head_norm: Any
    column_linear: Any
    row_linear: Any
    normed_row_linear: Any
    attention: Any
    grouped_experts: Any
    grouped_linears: tuple[Any, Any] | None = None
    """Column- and row-parallel linear layers of all experts together. None: experts have a linear layer each."""


@dataclass(frozen=True, kw_only=True)
class TokenMixer(ABC):
    """How a layer mixes its tokens.

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
        """Yield the mappings of the weights.

        Args:
            ours, theirs: prefixes of the module's Megatron names, and of the layer's Hugging Face names.
        """

    @property
    @abstractmethod
    def mixed_size(self) -> int:
        """Size of a token's output of the core attention, over all heads."""

    def check(self) -> None:  # noqa: B027
        """Raise an error for options that the module does not compute.

        Raises:
            UserError: the message names the field of `config.json`.
        """

    def describe(self) -> str:
        """Describe in a few words what computes the mixer; empty if the implementation of the layers says it."""
        return ""

    def flops_per_token(self) -> float:
        """Return the floating-point operations of forward and backward per token, without those of the weights."""
        return 0.0

    def flops_per_token_squared(self) -> float:
        """Return the operations of forward and backward per squared length of a sequence that fits into the window."""
        return 0.0

    def flops(self, tokens: int, before: int = 0) -> float:
        """Return the operations of forward and backward over a sequence, without those of the weights.

        Args:
            before: number of tokens before these, which they see but which are not computed again.
        """
        return self.flops_per_token() * tokens


@dataclass(frozen=True, kw_only=True)
class KeyValueMixer(TokenMixer):
    """A mixer that keeps keys and values of all tokens for generation.

    heads: number of query heads. groups: number of heads of cached keys and values, each of size head_dim.
    scale: factor of the products of queries and keys.
    window: number of tokens that a token sees at most, including itself; None for all previous tokens.
    """

    heads: int
    groups: int
    head_dim: int
    scale: float
    window: int | None = None

    @property
    def mixed_size(self) -> int:
        return self.heads * self.head_dim

    def flops_per_token_squared(self) -> float:
        return 6.0 * self.heads * self.head_dim

    def flops(self, tokens: int, before: int = 0) -> float:
        seen = self._seen_squared(before + tokens) - self._seen_squared(before)
        return super().flops(tokens) + self.flops_per_token_squared() * seen

    def _seen_squared(self, tokens: int) -> float:
        """Return twice the number of pairs of a token and a key that it sees, for the first tokens of a sequence."""
        window = tokens if self.window is None else min(tokens, self.window)
        return window**2 + 2 * (tokens - window) * window


@dataclass(frozen=True, kw_only=True)
class GroupedQueryAttention(KeyValueMixer):
    """Attention with grouped queries, by Megatron's module.

    qkv_bias, output_bias: whether the projections have biases.
    qk_norm: whether each query and key head has an RMS norm. wide_qk_norm: whether all query heads together have one,
        and all key heads together.
    output_gate: whether each query head has a gate, whose sigmoid multiplies the head's output.
    post_norm: whether a norm follows the output projection; `post_norm_name` is its Hugging Face name.
    rope_factor: factor on cos and sin of the rotary embedding.
    neighbours: number of first elements of each query and key head of which rotary embeddings rotate neighbours in the
        Hugging Face model. Megatron rotates elements half a head apart, so that the rows of the weight change places.
    has_sinks: whether each query head has a sink: the score of one more key, whose value is 0.
    query_scale: function of the tokens' positions [T] that returns a factor of each query; None for 1.
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
    query_scale: Callable[[Tensor], Tensor] | None = None

    def spec(self, modules: LayerModules) -> ModuleSpec:
        norms: dict[str, Any] = dict.fromkeys("qk", modules.head_norm if self.qk_norm else IdentityOp)
        if self.wide_qk_norm:
            heads = {"q": self.heads, "k": self.groups}
            norms = {name: ModuleSpec(module=WideRMSNorm, params={"heads": count}) for name, count in heads.items()}
        return ModuleSpec(
            module=PackSelfAttention,
            params={
                "attn_mask_type": AttnMaskType.causal,
                "output_bias": self.output_bias,
                "rope_factor": self.rope_factor,
                "query_scale": self.query_scale,
            },
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
        theirs += "self_attn."
        if self.has_sinks:
            yield Mapping(f"{ours}core_attention.softmax_offset", (Part(f"{theirs}sinks", (self.heads,)),), Rows())
        kind_of_qkv = GatedQueryKeyValue if self.output_gate else QueryKeyValue
        qkv = kind_of_qkv(self.groups, self.heads // self.groups, self.head_dim, self.neighbours)
        rows = {"q": self.heads * self.head_dim, "k": self.groups * self.head_dim, "v": self.groups * self.head_dim}
        projected = {**rows, "q": rows["q"] * (2 if self.output_gate else 1)}
        yield Mapping(f"{ours}linear_qkv.weight", self.qkv_parts(theirs, projected), qkv)
        if self.qkv_bias:
            biases = tuple(Part(f"{theirs}{name}_proj.bias", (n,)) for name, n in projected.items())
            yield Mapping(f"{ours}linear_qkv.bias", biases, qkv)
        for name in "qk" if self.qk_norm or self.wide_qk_norm else "":
            size, kind = (rows[name], Rows()) if self.wide_qk_norm else (self.head_dim, Replicated())
            yield Mapping(f"{ours}{name}_layernorm.weight", (Part(f"{theirs}{name}_norm.weight", (size,)),), kind)
        output = Part(f"{theirs}o_proj.weight", (self.hidden, self.heads * self.head_dim))
        yield Mapping(f"{ours}linear_proj.weight", (output,), Columns())
        if self.output_bias:
            yield Mapping(f"{ours}linear_proj.bias", (Part(f"{theirs}o_proj.bias", (self.hidden,)),), Replicated())

    def check(self) -> None:
        if self.output_bias and not self.qkv_bias:
            raise UserError("model.path: a bias on the output projection alone is not supported")

    def qkv_parts(self, theirs: str, rows: dict[str, int]) -> tuple[Part, ...]:
        """Return the query, key and value projections; `rows` gives the number of rows of each."""
        return tuple(Part(f"{theirs}{name}_proj.weight", (n, self.hidden)) for name, n in rows.items())


class FusedQKVAttention(GroupedQueryAttention):
    """Attention whose query, key and value projections are one tensor, one after the other (Phi-3)."""

    def qkv_parts(self, theirs: str, rows: dict[str, int]) -> tuple[Part, ...]:
        parts, first = [], 0
        for count in rows.values():
            parts.append(Part(f"{theirs}qkv_proj.weight", (count, self.hidden), first))
            first += count
        return tuple(parts)

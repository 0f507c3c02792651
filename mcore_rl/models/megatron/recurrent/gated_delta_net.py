"""Gated delta nets. They take the place of attention in most layers of Qwen3-Next, Qwen3.5 and Kimi Linear.

The rows of all weights are interleaved by key head. Each key head has a query, a key, several values with their gates,
and the rates and decays of these values. A tensor-parallel rank has all rows of some key heads. Convolution and delta
rule need all tokens of a sequence. Under context parallelism the ranks therefore exchange data (all-to-all): before the
exchange, a rank has some tokens for all of its heads; after the exchange, it has all tokens for some of these heads.
The outputs are exchanged back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from mcore_rl import platform
from mcore_rl.distributed.packs import PackLayout
from mcore_rl.models.megatron.attention.attention import LayerModules, TokenMixer
from mcore_rl.models.megatron.kernels.delta_rule import (
    CHUNK,
    ChunkPlan,
    delta_rule,
    delta_step,
    describe_kernels,
    packed_convolution,
    packed_rule,
    plan_of,
)
from mcore_rl.models.megatron.layers.packs import PackParams
from mcore_rl.models.megatron.layers.parameters import ShardedMixin
from mcore_rl.models.megatron.layers.transformer_layer import recomputed
from mcore_rl.models.megatron.parallel_state import ProcessGroupCollection, process_groups
from mcore_rl.models.megatron.weight_mapping import Columns, Grouped, Mapping, Part, Replicated, Rows

from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

RuleInputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNet(TokenMixer):
    """Describes a gated delta net whose weights are stored as in Qwen3.5.

    heads: number of key heads. repeats: number of value heads for each key head.
    key_dim: size of a key, and of a query. value_dim: size of a value.
    width: number of tokens that the convolution sees.
    gate: function of the gates by which the normalized outputs are multiplied.
    """

    input_linear: ClassVar[str] = "in_proj"
    float32_shifts: ClassVar[bool] = False
    """Whether the shifts (`dt_bias`) are always fp32, whatever the model's precision is."""
    float32_convolution: ClassVar[bool] = False
    """Whether the weights of the convolution are always fp32."""
    heads: int
    repeats: int
    key_dim: int
    value_dim: int
    width: int
    gate: Callable[[Tensor], Tensor] = F.silu

    @property
    def values_size(self) -> int:
        """Total size of the values that belong to one key head."""
        return self.repeats * self.value_dim

    @property
    def convolved_size(self) -> int:
        """Number of channels of one key head that are convolved: those of its query, its key and its values."""
        return 2 * self.key_dim + self.values_size

    @property
    def projected_size(self) -> int:
        """Number of outputs of the input projection for one key head."""
        return self.convolved_size + self.values_size + self.rates_and_decays_size

    @property
    def rates_and_decays_size(self) -> int:
        """Number of projections of one key head from which its rates and decays are computed."""
        return 2 * self.repeats

    @property
    def shifts_size(self) -> int:
        """Number of shifts (`dt_bias`) of one key head."""
        return self.repeats

    @property
    def pair_flops(self) -> int:
        """Operations of a key head for a pair of tokens of a chunk: products of keys, and of queries with keys."""
        return 4 * self.key_dim

    @property
    def mixed_size(self) -> int:
        return self.heads * self.values_size

    def spec(self, modules: LayerModules) -> ModuleSpec:
        return ModuleSpec(module=DeltaNetLayer, params={"net": self, "modules": modules})

    def rule_inputs(self, convolved: Tensor, rates_and_decays: Tensor, weights: DeltaWeights) -> RuleInputs:
        """Return the inputs of the delta rule for T tokens: queries, keys, values, decays and rates.

        Args:
            convolved: output of the convolution, [T, heads, convolved channels].
            rates_and_decays: projections from which rates and decays are computed, [T, heads, rates_and_decays_size].
        """
        query, key, value = convolved.split((self.key_dim, self.key_dim, self.values_size), dim=-1)
        rate, change = rates_and_decays.split(self.repeats, dim=-1)
        decay = -weights.log_decay.float().exp() * F.softplus(change.float() + weights.shift.float())
        return query, key, value.unflatten(-1, (self.repeats, -1)), decay, rate.sigmoid()

    def packed(self, inputs: RuleInputs, layout: PackLayout, plan: ChunkPlan) -> Tensor:
        """Apply the rule to a pack of T tokens; return the outputs, [T, heads, repeats, value_dim].

        Args:
            inputs: results of `rule_inputs`.
        """
        return packed_rule(*inputs, layout, plan)

    def with_states(self, inputs: RuleInputs, plan: ChunkPlan) -> tuple[Tensor, Tensor]:
        """Return the outputs as `packed` does, and the state after each segment of the pack."""
        out, states = delta_rule(*inputs, plan, with_states=True)
        assert states is not None, "delta_rule returns states with with_states=True"
        return out, states

    def step(self, inputs: RuleInputs, states: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the rule to one token of each of n sequences with these states; return outputs and new states."""
        return delta_step(*inputs, states)

    def mappings(self, ours: str, theirs: str) -> Iterator[Mapping]:
        theirs += "linear_attn."
        sizes = self.key_dim, self.key_dim, self.values_size
        convolution = self._stacked(f"{theirs}conv1d.weight", sizes, (1, self.width))
        yield Mapping(f"{ours}conv_weight", convolution, Grouped(self.heads, sizes))
        of_heads = (self.heads * self.repeats,)
        yield Mapping(f"{ours}A_log", (Part(f"{theirs}A_log", of_heads),), Rows(), is_float32=True)
        yield Mapping(f"{ours}dt_bias", (Part(f"{theirs}dt_bias", of_heads),), Rows())
        norm = Part(f"{theirs}norm.weight", (self.value_dim,))
        yield Mapping(f"{ours}norm_weight", (norm,), Replicated(), is_float32=True)
        yield Mapping(f"{ours}in_proj.weight", *self._input_parts(theirs))
        output = Part(f"{theirs}out_proj.weight", (self.hidden, self.mixed_size))
        yield Mapping(f"{ours}out_proj.weight", (output,), Columns())

    def _input_parts(self, theirs: str) -> tuple[tuple[Part, ...], Grouped]:
        """Return the Hugging Face tensors' parts that make up the input projection, and how they are interleaved."""
        tensors = {
            "qkv": (self.key_dim, self.key_dim, self.values_size),
            "z": (self.values_size,),
            "b": (self.repeats,),
            "a": (self.repeats,),
        }
        parts = [self._stacked(f"{theirs}in_proj_{name}.weight", n, (self.hidden,)) for name, n in tensors.items()]
        return sum(parts, ()), Grouped(self.heads, sum(tensors.values(), ()))

    def _stacked(self, name: str, sizes: tuple[int, ...], rest: tuple[int, ...]) -> tuple[Part, ...]:
        """Return consecutive parts of the Hugging Face tensor `name`; part i has `sizes[i]` rows per key head.

        Args:
            rest: shape of the tensor after the first dimension.
        """
        parts, first = [], 0
        for size in sizes:
            parts.append(Part(name, (self.heads * size, *rest), first))
            first += self.heads * size
        return tuple(parts)

    def describe(self) -> str:
        return describe_kernels()

    def flops_per_token(self) -> float:
        """Return the floating-point operations per token, forward and backward, without the projections.

        They are those of the convolution, of the products inside chunks, and of the products with states.
        """
        key, value = self.key_dim, self.value_dim
        convolution = 2 * self.width * self.convolved_size
        inside = CHUNK * (self.pair_flops + self.repeats * (3 * value + key))
        states = 6 * self.repeats * key * value
        return 3.0 * self.heads * (convolution + inside + states)


class InterleavedDeltaNet(GatedDeltaNet):
    """A gated delta net for Qwen3-Next.

    The rows of its input projections are interleaved by key head, here and in the Hugging Face tensors.
    """

    def _input_parts(self, theirs: str) -> tuple[tuple[Part, ...], Grouped]:
        sizes = {"qkvz": self.convolved_size + self.values_size, "ba": 2 * self.repeats}
        parts = tuple(
            Part(f"{theirs}in_proj_{name}.weight", (self.heads * size, self.hidden)) for name, size in sizes.items()
        )
        return parts, Grouped(self.heads, tuple(sizes.values()))


class DeltaWeights(NamedTuple):
    """The weights of the convolution and of the rule, by key head.

    convolution: [heads, convolved channels, width]. log_decay: [heads, repeats], called A_log in the Hugging Face
        model. shift: [heads, shifts], called dt_bias.
    bias: [heads, convolved channels], bias of the convolution; None if there is none.
    skip: [heads, repeats], factors of the values that are added to the outputs, called D; None if there are none.
    """

    convolution: Tensor
    log_decay: Tensor
    shift: Tensor
    bias: Tensor | None = None
    skip: Tensor | None = None

    def of_rank(self, rank: int, size: int) -> DeltaWeights:
        """Return the weights of the heads that the context-parallel rank `rank` of `size` ranks computes."""
        own = {name: weight.chunk(size)[rank] for name, weight in self._asdict().items() if weight is not None}
        return self._replace(**own)


class PackedDeltaRule(torch.nn.Module):
    """Computes convolution and delta rule within each sequence of a pack.

    In generation `CachedMixer` replaces this module and keeps the states.
    """

    def __init__(self, net: GatedDeltaNet, config: TransformerConfig, cp_group: Any) -> None:
        super().__init__()
        self.net, self.cp_group = net, cp_group
        self.keeps = config.recompute_granularity == "full"

    def forward(
        self,
        rows: Float[Tensor, "local_tokens heads projected"],
        weights: DeltaWeights,
        packed_seq_params: PackParams | None = None,
    ) -> Float[Tensor, "local_tokens mixed"]:
        """Return the outputs for this rank's tokens, [T / CP, heads · value dimension].

        Args:
            rows: for each token and key head, the concatenated query, key, values, rates and decays.
        """
        assert packed_seq_params is not None and packed_seq_params.visible is not None, "delta nets run on packs"
        layout, size = packed_seq_params.visible.layout, self.cp_group.size()
        if size > 1:
            rank, (to_pack, to_ranks) = self.cp_group.rank(), orders_of(layout, rows.device)
            rows = tokens_for_heads(rows, self.cp_group)[to_pack]
            weights = weights.of_rank(rank, size)

        def mixed(rows: Tensor, *weights: Any) -> Tensor:
            return self._mixed(rows, DeltaWeights(*weights), layout)

        out = mixed(rows, *weights) if self.keeps else recomputed(mixed, rows, *weights)
        return heads_for_tokens(out[to_ranks], self.cp_group).flatten(1) if size > 1 else out.flatten(1)

    def _mixed(self, rows: Tensor, weights: DeltaWeights, layout: PackLayout) -> Tensor:
        """Apply convolution and delta rule to the tokens in pack order; return the outputs, [T, key heads, values]."""
        plan, size = plan_of(layout, self.net.width, rows.device), self.net.convolved_size
        convolved = packed_convolution(rows[..., :size], weights.convolution, layout, plan, weights.bias)
        inputs = self.net.rule_inputs(convolved, rows[..., size:], weights)
        return self.net.packed(inputs, layout, plan).flatten(2)


@lru_cache(maxsize=16)
def orders_of(layout: PackLayout, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return two index tensors [T]: the first brings tokens from rank order into pack order, the second back.

    In rank order, the tokens of the first context-parallel rank come first, then those of the second, and so on.
    """
    to_pack, to_ranks = platform.sent_together((layout.gather_order, layout.gather_order.argsort()), device)
    return to_pack, to_ranks


def tokens_for_heads(
    x: Float[Tensor, "local_tokens heads size"], group: Any
) -> Float[Tensor, "tokens local_heads size"]:
    """Exchange data between context-parallel ranks: [T / CP, heads, …] becomes [T, heads / CP, …].

    The tokens of the result are in rank order: those of the first rank, those of the second, and so on.
    """
    parts = torch.cat(x.chunk(group.size(), dim=1))
    exchanged: Tensor = all_to_all(group, parts.flatten(1))
    return exchanged.unflatten(1, parts.shape[1:])


def heads_for_tokens(
    x: Float[Tensor, "tokens local_heads size"], group: Any
) -> Float[Tensor, "local_tokens heads size"]:
    """Exchange data back between context-parallel ranks; the inverse of `tokens_for_heads`."""
    parts = all_to_all(group, x.flatten(1)).unflatten(1, x.shape[1:])
    return torch.cat(parts.chunk(group.size()), dim=1)


class DeltaNetLayer(ShardedMixin, MegatronModule):
    """The module of a gated delta net: input projection, convolution, delta rule, gated norm, output projection.

    The weights of decay and norm are always fp32, whatever the model's precision is.

    Args:
        modules: classes of the projections.
    """

    sharded: ClassVar[dict[str, int]] = {"conv_weight": 0, "A_log": 0, "dt_bias": 0}  # they have rows for each head

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        net: GatedDeltaNet,
        modules: LayerModules,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or process_groups()
        self.net, self.layer_number, self.tp_group = net, layer_number, groups.tp
        common = {"config": config, "bias": False, "is_expert": False, "tp_group": groups.tp}
        column_linear = functools.partial(
            modules.column_linear,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **common,
        )
        self.in_proj = column_linear(net.hidden, net.heads * net.projected_size, tp_comm_buffer_name="qkv")
        self.add_projections(column_linear)
        self.out_proj = modules.row_linear(
            net.mixed_size,
            net.hidden,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            **common,
        )
        heads, dtype = net.heads // groups.tp.size(), config.params_dtype
        conv_dtype = torch.float32 if net.float32_convolution else dtype
        self.conv_weight = torch.nn.Parameter(torch.zeros(heads * net.convolved_size, 1, net.width, dtype=conv_dtype))
        self.A_log = torch.nn.Parameter(torch.zeros(heads * net.repeats))
        shift_dtype = torch.float32 if net.float32_shifts else dtype
        self.dt_bias = torch.nn.Parameter(torch.zeros(heads * net.shifts_size, dtype=shift_dtype))
        self.norm_weight = torch.nn.Parameter(torch.ones(net.value_dim))
        self.add_weights(heads)
        self.core_attention: Any = PackedDeltaRule(net, config, groups.cp)

    def add_projections(self, column_linear: Callable[..., Any]) -> None:
        """Add further projections of the inputs.

        Args:
            column_linear: function that builds a column-parallel linear layer of given sizes.
        """

    def add_weights(self, heads: int) -> None:
        """Add or replace parameters of the convolution, the rule or the norm.

        Args:
            heads: number of key heads on this tensor-parallel rank.
        """

    def weights(self) -> DeltaWeights:
        """Return the weights of convolution and rule for this rank's key heads."""
        net = self.net
        return DeltaWeights(
            self.conv_weight.view(-1, net.convolved_size, net.width),
            self.A_log.view(-1, net.repeats),
            self.dt_bias.view(-1, net.shifts_size),
        )

    def forward(
        self, hidden_states: Tensor, *args: Any, packed_seq_params: PackParams | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Map hidden states [T / CP (/ TP with SP), 1, hidden] to outputs of the same shape."""
        rows, gate = self._projected(hidden_states)
        mixed = self.core_attention(rows, self.weights(), packed_seq_params=packed_seq_params)
        normed = recomputed(self._gated_norm, mixed, gate.flatten(1), self._own_norm_weight())
        out: tuple[Tensor, Tensor | None] = self.out_proj(normed[:, None])
        return out

    def _projected(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of `PackedDeltaRule`, [T, heads, …], and the gates of the outputs, [T, heads, values]."""
        net = self.net
        projected, _ = self.in_proj(hidden_states)
        heads = projected.squeeze(1).unflatten(-1, (-1, net.projected_size))
        sizes = net.convolved_size, net.values_size, net.rates_and_decays_size
        convolved, gate, others = heads.split(sizes, dim=-1)
        return torch.cat((convolved, others), dim=-1), gate

    def _own_norm_weight(self) -> Tensor:
        """Return the norm's weight. All heads share it: its gradient is summed over tensor-parallel ranks."""
        weight: Tensor = copy_to_tensor_model_parallel_region(self.norm_weight, group=self.tp_group)
        return weight

    def _gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        """Normalize each value head of `x` [T, values] by its RMS; multiply it by `weight` and the activated `gate`.

        The result is computed in fp32.
        """
        wide, gate = (value.float().unflatten(-1, (-1, self.net.value_dim)) for value in (x, gate))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.layernorm_epsilon)
        return (weight * (wide * scale) * self.net.gate(gate)).flatten(1).to(x.dtype)

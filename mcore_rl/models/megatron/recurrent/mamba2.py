"""Mamba-2 (arXiv:2405.21060): its state-space rule over packs, and its mixer as in Nemotron-H.

Each head has a state S [state size, head dim]. S is 0 at the start of each sequence. Token t with input x, step size Δ,
and the vectors B and C of the head's group first changes S, then reads it:

    S ← exp(A Δ) · S + B (Δ x)ᵀ,    output = Sᵀ C + D x        (A < 0 and D are weights of the head)

This is the gated delta rule without the correction: a group is a key head, C its query, B its key, Δ x are the values,
and A Δ the decays. Chunks, convolution, and the exchange under context parallelism are those of gated delta nets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from mcore_rl.distributed.packs import PackLayout
from mcore_rl.models.megatron.attention.attention import LayerModules
from mcore_rl.models.megatron.kernels.delta_rule import CHUNK, ChunkPlan, convolution_kernel, exact
from mcore_rl.models.megatron.recurrent.gated_delta_net import DeltaNetLayer, DeltaWeights, GatedDeltaNet, RuleInputs
from mcore_rl.models.megatron.weight_mapping import Columns, Grouped, Mapping, Part, Rows

from megatron.core.transformer.spec_utils import ModuleSpec


@dataclass(frozen=True, kw_only=True)
class Mamba2(GatedDeltaNet):
    """Describes a Mamba-2 mixer. A group of heads has one B (key) and one C (query).

    heads: number of groups. repeats: number of heads of a group. key_dim: size of the state (`ssm_state_size`).
    value_dim: size of a head's input.
    least_step: smallest step size Δ (`time_step_min`); the gradient of smaller ones is 0.
    conv_bias: whether the convolution has a bias.
    """

    least_step: float
    conv_bias: bool

    @property
    def rates_and_decays_size(self) -> int:
        return self.repeats

    def spec(self, modules: LayerModules) -> ModuleSpec:
        return ModuleSpec(module=Mamba2Layer, params={"net": self, "modules": modules})

    def rule_inputs(self, convolved: Tensor, rates_and_decays: Tensor, weights: DeltaWeights) -> RuleInputs:
        """Return C, B, Δ x, A Δ and D x of T tokens; the last three in fp32 or wider."""
        wide = exact(convolved.dtype)
        x, key, query = convolved.split((self.values_size, self.key_dim, self.key_dim), dim=-1)
        x = x.unflatten(-1, (self.repeats, -1)).to(wide)
        step = F.softplus(rates_and_decays.to(wide) + weights.shift.to(wide)).clamp(min=self.least_step)
        assert weights.skip is not None, "Mamba-2 has a D"
        return query, key, x * step[..., None], -weights.log_decay.to(wide).exp() * step, x * weights.skip[..., None]

    def packed(self, inputs: RuleInputs, layout: PackLayout, plan: ChunkPlan) -> Tensor:
        return state_rule(*inputs, plan)[0]

    def with_states(self, inputs: RuleInputs, plan: ChunkPlan) -> tuple[Tensor, Tensor]:
        out, states = state_rule(*inputs, plan, with_states=True)
        assert states is not None, "state_rule returns states with with_states=True"
        return out, states

    def step(self, inputs: RuleInputs, states: Tensor) -> tuple[Tensor, Tensor]:
        return state_step(*inputs, states)

    def mappings(self, ours: str, theirs: str) -> Iterator[Mapping]:
        theirs += "mixer."
        values, key = self.values_size, self.key_dim
        sizes, of_heads = (values, key, key), (self.heads * self.repeats,)
        convolution = self._stacked(f"{theirs}conv1d.weight", sizes, (1, self.width))
        yield Mapping(f"{ours}conv_weight", convolution, Grouped(self.heads, sizes))
        if self.conv_bias:
            bias = self._stacked(f"{theirs}conv1d.bias", sizes, ())
            yield Mapping(f"{ours}conv_bias", bias, Grouped(self.heads, sizes))
        for name, is_float32 in (("A_log", True), ("dt_bias", False), ("D", True)):
            yield Mapping(f"{ours}{name}", (Part(f"{theirs}{name}", of_heads),), Rows(), is_float32=is_float32)
        norm = Part(f"{theirs}norm.weight", (self.mixed_size,))
        yield Mapping(f"{ours}norm_weight", (norm,), Rows(), is_float32=True)
        gate, *convolved, step = self._stacked(
            f"{theirs}in_proj.weight", (values, *sizes, self.repeats), (self.hidden,)
        )
        rows = Grouped(self.heads, (*sizes, values, self.repeats))
        yield Mapping(f"{ours}in_proj.weight", (*convolved, gate, step), rows)
        output = Part(f"{theirs}out_proj.weight", (self.hidden, self.mixed_size))
        yield Mapping(f"{ours}out_proj.weight", (output,), Columns())

    def describe(self) -> str:
        by_kernel = convolution_kernel() and not torch.are_deterministic_algorithms_enabled()
        return f"Mamba-2 by torch, its convolution by {'causal_conv1d' if by_kernel else 'torch'}"

    def flops_per_token(self) -> float:
        key, value = self.key_dim, self.value_dim
        convolution = 2 * self.width * self.convolved_size
        inside = 2 * CHUNK * (key + self.repeats * value)
        states = 4 * self.repeats * key * value
        return 3.0 * self.heads * (convolution + inside + states)


class Mamba2Layer(DeltaNetLayer):
    """The module of `Mamba2`. Its norm has a weight for each channel."""

    sharded: ClassVar[dict[str, int]] = {**DeltaNetLayer.sharded, "conv_bias": 0, "D": 0, "norm_weight": 0}
    net: Mamba2

    def add_weights(self, heads: int) -> None:
        net = self.net
        self.D = torch.nn.Parameter(torch.zeros(heads * net.repeats))
        self.norm_weight = torch.nn.Parameter(torch.ones(heads * net.values_size))
        bias = torch.zeros(heads * net.convolved_size, dtype=self.config.params_dtype)
        self.conv_bias = torch.nn.Parameter(bias) if net.conv_bias else None

    def weights(self) -> DeltaWeights:
        bias = None if self.conv_bias is None else self.conv_bias.view(-1, self.net.convolved_size)
        return super().weights()._replace(bias=bias, skip=self.D.view(-1, self.net.repeats))

    def _own_norm_weight(self) -> Tensor:
        return self.norm_weight

    def _gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        """Multiply `x` [T, values] by the activated `gate`, then normalize each group by its RMS.

        The result is computed in fp32.
        """
        gated = (x.float() * self.net.gate(gate.float())).unflatten(-1, (-1, self.net.values_size))
        scale = torch.rsqrt(gated.square().mean(-1, keepdim=True) + self.config.layernorm_epsilon)
        return (weight * (gated * scale).flatten(1)).to(x.dtype)


def sums_between(decay: Float[Tensor, "*any rows"]) -> Float[Tensor, "*any rows rows"]:
    """Return the sums of `decay` over the rows j + 1 … i, [… i, j]; −inf for j > i.

    They are no differences of longer sums, in which strong decays would cancel digits.
    """
    size = decay.shape[-1]
    lower = torch.ones(size, size, dtype=torch.bool, device=decay.device).tril(-1)
    return (decay[..., :, None] * lower).cumsum(-2).masked_fill(lower.mT, -torch.inf)


def state_rule(
    query: Float[Tensor, "tokens groups state"],
    key: Float[Tensor, "tokens groups state"],
    value: Float[Tensor, "tokens groups repeats head_dim"],
    decay: Float[Tensor, "tokens groups repeats"],
    added: Float[Tensor, "tokens groups repeats head_dim"],
    plan: ChunkPlan,
    with_states: bool = False,
) -> tuple[Float[Tensor, "tokens groups repeats head_dim"], Tensor | None]:
    """Apply the rule to the tokens of a pack.

    Args:
        query, key: C and B of the groups. Each group has `repeats` heads.
        value, decay, added: Δ x, A Δ and D x of the heads, in fp32 or wider.
        with_states: whether to return the states.

    Returns:
        The outputs in the precision of `query`, and the state after each segment, [segments, groups, repeats, state,
        head_dim], or None without `with_states`.
    """
    wide, is_token = value.dtype, plan.is_token.view(-1, 1, CHUNK, 1)
    q = plan.chunked(query).to(wide)[:, :, None]
    k = (plan.chunked(key).to(wide) * is_token)[:, :, None]
    v = plan.chunked(value).transpose(2, 3)
    g = (plan.chunked(decay) * is_token).transpose(2, 3)
    between = sums_between(g).exp()
    out = ((q @ k.mT) * between) @ v
    writes = (k * between[..., -1, :, None]).mT @ v
    from_start = g.cumsum(-1).exp()[..., None]
    states, ended = _scan(writes, from_start[..., -1:, :], plan, with_states)
    if states is not None:
        first = plan.steps[0].count
        out = torch.cat((out[:first], out[first:] + (q[first:] * from_start[first:]) @ states))
    return (plan.packed(out.transpose(2, 3)) + added).to(query.dtype), ended


def _scan(writes: Tensor, whole: Tensor, plan: ChunkPlan, with_states: bool) -> tuple[Tensor | None, Tensor | None]:
    """Compute the states between the chunks: if S is the state before a chunk, whole · S + writes is that after it.

    Returns:
        The states before each chunk, except the chunks of the first step; None if there is only one step. And with
        `with_states`, the states after the segments, in the order of the pack; otherwise None.
    """
    counts = [step.count for step in plan.steps]
    before, ended, state = list[Tensor](), list[Tensor](), writes.new_zeros(())
    for number, (step, more, factor) in enumerate(
        zip(plan.steps, writes.split(counts), whole.split(counts), strict=True)
    ):
        if number:
            state = state if step.sources is None else state.index_select(0, step.sources)
            before.append(state)
            more = state * factor + more
        state = more
        if with_states:
            ended.append(state.index_select(0, step.ends))
    return torch.cat(before) if before else None, torch.cat(ended)[plan.order] if with_states else None


def state_step(
    query: Float[Tensor, "n groups state"],
    key: Float[Tensor, "n groups state"],
    value: Float[Tensor, "n groups repeats head_dim"],
    decay: Float[Tensor, "n groups repeats"],
    added: Float[Tensor, "n groups repeats head_dim"],
    state: Float[Tensor, "n groups repeats state head_dim"],
) -> tuple[Float[Tensor, "n groups repeats head_dim"], Float[Tensor, "n groups repeats state head_dim"]]:
    """Apply the rule to one token of each of n sequences; return the outputs and the new states."""
    q, k = (x.to(state.dtype)[:, :, None, None] for x in (query, key))  # [n, groups, 1, 1, state]
    state = state * decay.exp()[..., None, None] + k.mT * value[..., None, :]
    return ((q @ state).squeeze(-2) + added).to(query.dtype), state

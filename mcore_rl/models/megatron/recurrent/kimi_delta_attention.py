"""Kimi delta attention (KDA, arXiv:2510.26692): a gated delta net whose state decays by channel.

Decays and output gates are projected from the hidden states by two matrices each. The first makes as many values as a
head has, for all heads together; it is the same on every tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl.models.megatron.attention.attention import LayerModules
from mcore_rl.models.megatron.layers.transformer_layer import ReplicatedLinear
from mcore_rl.models.megatron.recurrent.gated_delta_net import DeltaNetLayer, DeltaWeights, GatedDeltaNet, RuleInputs
from mcore_rl.models.megatron.weight_mapping import Columns, Grouped, Mapping, Part, Replicated, Reshaped, Rows, Shape

from megatron.core.transformer.spec_utils import ModuleSpec


@dataclass(frozen=True, kw_only=True)
class KimiDeltaNet(GatedDeltaNet):
    """Describes the delta net of Kimi Linear. A head has one query, one key and one value, of equal sizes."""

    float32_shifts: ClassVar[bool] = True
    repeats: int = 1
    gate: Callable[[Tensor], Tensor] = torch.sigmoid

    @property
    def projected_size(self) -> int:
        return self.convolved_size + self.repeats

    @property
    def rates_and_decays_size(self) -> int:
        return self.repeats + self.key_dim

    @property
    def shifts_size(self) -> int:
        return self.key_dim

    @property
    def pair_flops(self) -> int:
        return 2 * self.key_dim  # `decayed_products` leaves out pairs with later tokens

    @property
    def log_decay_shape(self) -> Shape:
        """Shape of `A_log` in the Hugging Face model."""
        return 1, 1, self.heads, 1

    def spec(self, modules: LayerModules) -> ModuleSpec:
        return ModuleSpec(module=KimiDeltaLayer, params={"net": self, "modules": modules})

    def mappings(self, ours: str, theirs: str) -> Iterator[Mapping]:
        theirs += "self_attn."
        sizes, whole = (self.key_dim, self.key_dim, self.value_dim), self.heads * self.key_dim

        def part(name: str, *shape: int) -> tuple[Part]:
            return (Part(theirs + name, shape),)

        def linear(name: str, hf_name: str, rows: int, columns: int, kind: Any) -> Mapping:
            return Mapping(f"{ours}{name}.weight", part(f"{hf_name}.weight", rows, columns), kind)

        convolutions = [part(f"{name}_conv1d.weight", whole, 1, self.width) for name in "qkv"]
        wide = self.float32_convolution
        yield Mapping(f"{ours}conv_weight", sum(convolutions, ()), Grouped(self.heads, sizes), is_float32=wide)
        shape = self.log_decay_shape
        yield Mapping(f"{ours}A_log", part("A_log", *shape), Reshaped(shape), is_float32=True)
        yield Mapping(f"{ours}dt_bias", part("dt_bias", whole), Rows(), is_float32=True)
        yield Mapping(f"{ours}norm_weight", part("o_norm.weight", self.value_dim), Replicated(), is_float32=True)
        inputs = [part(f"{name}_proj.weight", whole, self.hidden) for name in "qkv"]
        inputs.append(part("b_proj.weight", self.heads, self.hidden))
        yield Mapping(f"{ours}in_proj.weight", sum(inputs, ()), Grouped(self.heads, (*sizes, 1)))
        for name, hf_name in (("decay", "f"), ("gate", "g")):
            yield linear(f"{name}_down_proj", f"{hf_name}_a_proj", self.key_dim, self.hidden, Replicated())
            yield linear(f"{name}_up_proj", f"{hf_name}_b_proj", whole, self.key_dim, Rows())
        yield linear("out_proj", "o_proj", self.hidden, self.mixed_size, Columns())

    def rule_inputs(self, convolved: Tensor, rates_and_decays: Tensor, weights: DeltaWeights) -> RuleInputs:
        query, key, value = convolved.split((self.key_dim, self.key_dim, self.value_dim), dim=-1)
        rate, change = rates_and_decays.split((1, self.key_dim), dim=-1)
        decay = self.decay(change.float() + weights.shift.float(), weights.log_decay.float().exp())
        return query, key, value[:, :, None], decay[:, :, None], rate.sigmoid()

    def decay(self, change: Tensor, speed: Tensor) -> Tensor:
        """Return the decays of the channels.

        Args:
            change: projections plus shifts, [T, heads, key_dim]. speed: factors of the heads, [heads, 1].
        """
        return -speed * F.softplus(change)


@dataclass(frozen=True, kw_only=True)
class BoundedDeltaNet(KimiDeltaNet):
    """Kimi delta attention in GLM-5.3: no decay is below `lower_bound` for a token. None stands for no bound."""

    float32_convolution: ClassVar[bool] = True
    lower_bound: float | None

    @property
    def log_decay_shape(self) -> Shape:
        return (self.heads,)

    def decay(self, change: Tensor, speed: Tensor) -> Tensor:
        if self.lower_bound is None:
            return super().decay(change, speed)
        return self.lower_bound * (speed * change).sigmoid()


class KimiDeltaLayer(DeltaNetLayer):
    """The module of `KimiDeltaNet`."""

    def add_projections(self, column_linear: Callable[..., Any]) -> None:
        net, config = self.net, self.config
        self.decay_down_proj = ReplicatedLinear(config, net.hidden, net.key_dim)
        self.decay_up_proj = column_linear(net.key_dim, net.heads * net.key_dim)
        self.gate_down_proj = ReplicatedLinear(config, net.hidden, net.value_dim)
        self.gate_up_proj = column_linear(net.value_dim, net.heads * net.value_dim)

    def _projected(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        projected, _ = self.in_proj(hidden_states)
        change, _ = self.decay_up_proj(self.decay_down_proj(hidden_states))
        gate, _ = self.gate_up_proj(self.gate_down_proj(hidden_states))
        heads = self.net.heads // self.tp_group.size()
        rows, change, gate = (x.squeeze(1).unflatten(-1, (heads, -1)) for x in (projected, change, gate))
        return torch.cat((rows, change), dim=-1), gate

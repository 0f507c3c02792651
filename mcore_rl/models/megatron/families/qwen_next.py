"""Families Qwen3-Next and Qwen3.5: gated delta nets in most layers, attention with output gates in the other layers.

Qwen3.5 is published with a vision tower, as `qwen3_5` and `qwen3_5_moe`. The layers that predict further tokens (`mtp`)
are exported unchanged.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

from mcore_rl.errors import UserError
from mcore_rl.models.megatron.attention.attention import TokenMixer
from mcore_rl.models.megatron.families.base import Family, PredictionNames
from mcore_rl.models.megatron.families.mixtures import Experts, Mixture, Qwen3MoE
from mcore_rl.models.megatron.families.vision_language import VisionLanguage
from mcore_rl.models.megatron.recurrent.gated_delta_net import GatedDeltaNet, InterleavedDeltaNet


class Hybrid(Family):
    """A family in which the layers of type `linear_attention` are gated delta nets.

    delta_net: class of the token mixers of these layers.
    """

    has_qk_norm = True
    has_windows = False
    rotates_partly = True
    gradient_tolerance = 5e-4  # rounding errors accumulate in the states
    delta_net: ClassVar[type[GatedDeltaNet]] = GatedDeltaNet
    passed_on: ClassVar[tuple[str, ...]] = ("mtp.",)
    """Prefixes of the tensors that are exported unchanged."""

    def token_mixer(self, layer: int) -> TokenMixer:
        if self.hf.layer_types[layer] != "linear_attention":
            return self._grouped_query_attention(layer, output_gate=True)
        hf = self.hf
        return self.delta_net(
            hidden=self.hidden_size,
            heads=hf.linear_num_key_heads,
            repeats=hf.linear_num_value_heads // hf.linear_num_key_heads,
            key_dim=hf.linear_key_head_dim,
            value_dim=hf.linear_value_head_dim,
            width=hf.linear_conv_kernel_dim,
        )

    def check(self, max_sequence_length: int) -> None:
        super().check(max_sequence_length)
        hf = self.hf
        if hf.linear_num_value_heads % hf.linear_num_key_heads:
            raise UserError(
                f"model.path: {hf.linear_num_value_heads} value heads of the delta nets must be a multiple of the key "
                f"heads ({hf.linear_num_key_heads})"
            )
        if hf.linear_conv_kernel_dim < 2:
            raise UserError("model.path: linear_conv_kernel_dim below 2 is not supported")
        if not getattr(hf, "attn_output_gate", True):
            raise UserError("model.path: attn_output_gate=false is not supported")

    def megatron_fields(self) -> dict[str, Any]:
        return {
            **super().megatron_fields(),
            "layernorm_zero_centered_gamma": True,
            "attention_output_gate": True,
        }

    def divisible_by_tensor_and_context_parallel(self) -> dict[str, int]:
        return {"key heads of delta nets": self.hf.linear_num_key_heads}

    def shrink(self, layers: int, tensor_parallel: int, expert_parallel: int) -> None:
        hf = self.hf
        repeats = min(hf.linear_num_value_heads // hf.linear_num_key_heads, 3)
        super().shrink(layers, tensor_parallel, expert_parallel)
        hf.linear_num_key_heads = 4 * tensor_parallel  # suffices for context parallelism up to 4
        hf.linear_num_value_heads = repeats * hf.linear_num_key_heads
        hf.linear_key_head_dim, hf.linear_value_head_dim = 8, 12

    def passes_on(self, name: str) -> bool:
        return name.startswith(self.passed_on)

    def prediction_names(self, k: int) -> PredictionNames | None:
        """Return the names of the only layer; further ones would share its projection and norms."""
        norms = "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"
        return PredictionNames("mtp.layers.0.", *norms, "mtp.fc", "mtp.norm") if k == 0 else None

    def as_prediction_layer(self, hf: Any) -> None:
        super().as_prediction_layer(hf)
        hf.layer_types = ["full_attention"]


class Qwen3Next(Hybrid, Qwen3MoE):
    model_type = "qwen3_next"
    delta_net = InterleavedDeltaNet


class Qwen35Text(Hybrid):
    model_type = "qwen3_5_text"


class Qwen35MoEText(Hybrid, Mixture):
    model_type = "qwen3_5_moe_text"

    @cached_property
    def experts(self) -> Experts:
        hf = self.hf
        return Experts(
            hf.num_experts,
            hf.num_experts_per_tok,
            hf.moe_intermediate_size,
            sparse_layers=(True,) * self.num_layers,
            shared_width=hf.shared_expert_intermediate_size,
            shared_gate=True,
        )

    @property
    def intermediate_size(self) -> int:
        """Width of an expert. The configuration has no `intermediate_size`, because no layer is dense."""
        return self.experts.width

    def shrink(self, layers: int, tensor_parallel: int, expert_parallel: int) -> None:
        super().shrink(layers, tensor_parallel, expert_parallel)
        self.hf.shared_expert_intermediate_size = 24 * max(2, tensor_parallel)


class Qwen35(VisionLanguage, Qwen35Text):
    model_type = "qwen3_5"
    default_sections = (11, 11, 10)


class Qwen35MoE(VisionLanguage, Qwen35MoEText):
    model_type = "qwen3_5_moe"
    default_sections = (11, 11, 10)

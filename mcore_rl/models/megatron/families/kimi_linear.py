"""Kimi Linear: Kimi delta attention in most layers, latent attention without rotation in the others, and experts."""

from __future__ import annotations

from typing import Any, ClassVar

from mcore_rl.errors import UserError
from mcore_rl.models.megatron.attention.attention import TokenMixer
from mcore_rl.models.megatron.families.base import Unrotated
from mcore_rl.models.megatron.families.mixtures import Glm4MoELite
from mcore_rl.models.megatron.recurrent.kimi_delta_attention import KimiDeltaNet


class KimiDelta(Unrotated):
    """A family with Kimi delta attention in the layers of type `linear_attention`, and no rotation in the others."""

    unadapted: ClassVar[tuple[str, ...]] = ("f_a_proj", "f_b_proj")

    @property
    def softmax_scale(self) -> float:
        return float(self.head_dim**-0.5)

    def _delta_net(self, kind: type[KimiDeltaNet] = KimiDeltaNet, **fields: Any) -> KimiDeltaNet:
        """Return a delta net with this family's dimensions.

        Args:
            kind: class of the result. fields: further fields of the result.
        """
        hf = self.hf
        return kind(
            hidden=self.hidden_size,
            heads=hf.linear_num_heads,
            key_dim=hf.linear_head_dim,
            value_dim=hf.linear_head_dim,
            width=hf.linear_conv_kernel_dim,
            **fields,
        )

    def check(self, max_sequence_length: int) -> None:
        super().check(max_sequence_length)
        if self.hf.linear_conv_kernel_dim < 2:
            raise UserError("model.path: linear_conv_kernel_dim below 2 is not supported")

    def divisible_by_tensor_and_context_parallel(self) -> dict[str, int]:
        return {"heads of delta nets": self.hf.linear_num_heads}

    def shrink(self, layers: int, tensor_parallel: int, expert_parallel: int) -> None:
        super().shrink(layers, tensor_parallel, expert_parallel)
        self.hf.linear_num_heads, self.hf.linear_head_dim = 4 * tensor_parallel, 8  # context parallelism up to 4


class KimiLinear(KimiDelta, Glm4MoELite):
    """Kimi Linear. The names of its tensors are those of published directories.

    The layers of type `linear_attention` are Kimi delta nets. No layer has a rotary embedding.
    """

    model_type = "kimi_linear"
    expert_names = ("w1", "w3", "w2")
    mlp_name = "block_sparse_moe"
    count_field = "num_local_experts"

    def __init__(self, hf: Any) -> None:
        super().__init__(hf)
        self.ties_embeddings = False  # as in transformers, whatever the configuration says

    def token_mixer(self, layer: int) -> TokenMixer:
        if self.hf.layer_types[layer] == "linear_attention":
            return self._delta_net()
        return self._latent_attention(layer, rotates=False)

    def check(self, max_sequence_length: int) -> None:
        super().check(max_sequence_length)
        if not getattr(self.hf, "mla_use_nope", True):
            raise UserError("model.path: mla_use_nope=false (a rotation in latent attention) is not supported")

    def shrink(self, layers: int, tensor_parallel: int, expert_parallel: int) -> None:
        super().shrink(layers, tensor_parallel, expert_parallel)
        if hasattr(self.hf, "linear_attn_config"):  # as published; its sizes would take precedence
            del self.hf.linear_attn_config

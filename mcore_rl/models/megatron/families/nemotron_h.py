"""Nemotron-H: layers with one block each, which is a Mamba-2 mixer, attention without rotation, an MLP or experts.

Neither MLPs nor experts have gates. The experts may see latent states instead of hidden states.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

import torch.nn.functional as F

from mcore_rl.errors import UserError
from mcore_rl.models.megatron.attention.attention import TokenMixer
from mcore_rl.models.megatron.families.base import Family, Unrotated
from mcore_rl.models.megatron.families.mixtures import Experts, Mixture
from mcore_rl.models.megatron.layers.transformer_layer import squared_relu
from mcore_rl.models.megatron.recurrent.mamba2 import Mamba2

MAMBA, ATTENTION, MLP, EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
"""Kinds of layers, as transformers calls them in `layers_block_type`."""


class NemotronH(Unrotated):
    """Nemotron-H without experts. The names of its tensors are those of published directories."""

    model_type = "nemotron_h"
    prefix = "backbone."
    norm_names = ("norm", "", "norm", "")
    final_norm_name = "norm_f"
    dense_mlp_name = "mixer"
    mlp_projections = ("up_proj", "down_proj")
    activations: ClassVar = {"relu2": squared_relu, "silu": F.silu}
    has_windows = False
    padding_token = None  # transformers' embedding has no `padding_idx`
    unadapted: ClassVar[tuple[str, ...]] = ("out_proj",)  # PEFT refuses it in models with Mamba
    experts_in = "mixer"

    def __init__(self, hf: Any) -> None:
        super().__init__(hf)
        self.ties_embeddings = False  # as in transformers, whatever the configuration says

    @classmethod
    def kind_for(cls, hf: Any) -> type[Family]:
        return NemotronHMixture if EXPERTS in hf.layers_block_type else NemotronH

    @property
    def embedding_name(self) -> str:
        return f"{self.prefix}embeddings.weight"

    @property
    def activation(self) -> str:
        return str(self.hf.mlp_hidden_act)

    def token_mixer(self, layer: int) -> TokenMixer | None:
        hf, kind = self.hf, self.hf.layers_block_type[layer]
        if kind == ATTENTION:
            return self._grouped_query_attention(layer, module="mixer")
        if kind != MAMBA:
            return None
        return Mamba2(
            hidden=self.hidden_size,
            heads=hf.n_groups,
            repeats=hf.mamba_num_heads // hf.n_groups,
            key_dim=hf.ssm_state_size,
            value_dim=hf.mamba_head_dim,
            width=hf.conv_kernel,
            least_step=hf.time_step_min,
            conv_bias=hf.use_conv_bias,
        )

    def has_mlp(self, layer: int) -> bool:
        return self.hf.layers_block_type[layer] in (MLP, EXPERTS)

    def module_of(self, name: str) -> str:
        return name.replace(self.prefix, "model.", 1)

    def check(self, max_sequence_length: int) -> None:
        hf = self.hf
        if others := sorted({*hf.layers_block_type} - {MAMBA, ATTENTION, MLP, EXPERTS}):
            raise UserError(f"model.path: layers_block_type has {others[0]!r}, which is not supported")
        if hf.mamba_num_heads % hf.n_groups:
            raise UserError(
                f"model.path: mamba_num_heads ({hf.mamba_num_heads}) must be a multiple of n_groups ({hf.n_groups})"
            )
        if hf.conv_kernel < 2:
            raise UserError("model.path: conv_kernel below 2 is not supported")
        if hf.mamba_hidden_act not in ("silu", "swish"):
            raise UserError(f"model.path: mamba_hidden_act={hf.mamba_hidden_act!r} is not supported; it must be 'silu'")
        if hf.use_bias:
            raise UserError("model.path: use_bias=true (biases in the projections of Mamba-2) is not supported")
        super().check(max_sequence_length)

    @property
    def norm_eps(self) -> float:
        return float(self.hf.layer_norm_epsilon)

    def divisible_by_tensor_parallel(self) -> dict[str, int]:
        sizes = super().divisible_by_tensor_parallel()
        if MLP not in self.hf.layers_block_type:
            sizes.pop("intermediate size", None)
        return sizes

    def divisible_by_tensor_and_context_parallel(self) -> dict[str, int]:
        return {"groups of Mamba-2 (n_groups)": self.hf.n_groups} if MAMBA in self.hf.layers_block_type else {}

    def shrink(self, layers: int, tensor_parallel: int, expert_parallel: int) -> None:
        hf = self.hf
        repeats = min(hf.mamba_num_heads // hf.n_groups, 3)
        # A model with experts keeps them, and so its class, if it has fewer layers than kinds of layers.
        kinds = sorted({*hf.layers_block_type}, key=(MAMBA, EXPERTS, ATTENTION, MLP).index)
        super().shrink(layers, tensor_parallel, expert_parallel)
        hf.layers_block_type = [kinds[layer % len(kinds)] for layer in range(layers)]
        hf.n_groups = 4 * tensor_parallel  # suffices for context parallelism up to 4
        hf.mamba_num_heads, hf.mamba_head_dim, hf.ssm_state_size = repeats * hf.n_groups, 12, 8

    def passes_on(self, name: str) -> bool:
        """Return whether the tensor `name` belongs to additional layers that predict further tokens."""
        return name.startswith("mtp.")


class NemotronHMixture(NemotronH, Mixture):
    """Nemotron-H in which some layers have experts (Nemotron 3)."""

    count_field = "n_routed_experts"
    expert_names = NemotronH.mlp_projections
    mlp_name = "mixer"
    shared_name = "shared_experts"

    @cached_property
    def experts(self) -> Experts:
        hf = self.hf
        return Experts(
            hf.n_routed_experts,
            hf.num_experts_per_tok,
            hf.moe_intermediate_size,
            sparse_layers=tuple(kind == EXPERTS for kind in hf.layers_block_type),
            shared_width=hf.moe_shared_expert_intermediate_size,
            score="sigmoid",
            normalise=hf.norm_topk_prob,
            scale=hf.routed_scaling_factor,
            groups=hf.n_group,
            group_topk=hf.topk_group,
            selection_bias=True,
            float32_router=True,
            latent=hf.moe_latent_size or 0,
        )

    def shrink(self, layers: int, tensor_parallel: int, expert_parallel: int) -> None:
        super().shrink(layers, tensor_parallel, expert_parallel)
        self.hf.moe_shared_expert_intermediate_size = 24 * max(2, tensor_parallel)
        if self.hf.moe_latent_size:
            self.hf.moe_latent_size = 40

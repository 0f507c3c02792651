"""GLM-4.5: dense layers first; sigmoid scores, experts chosen with a bias; half of each head rotated."""

import re
from functools import cached_property

from mcore_rl.models.megatron.families.mixture import Experts, Mixture

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


class Glm4MoE(Mixture):
    model_type = "glm4_moe"
    has_windows = False
    rotates_partly = True
    count_field = "n_routed_experts"
    shared_name = "shared_experts"

    @property
    def has_qkv_bias(self) -> bool:
        return bool(self.hf.attention_bias)

    @property
    def has_qk_norm(self) -> bool:
        return bool(self.hf.use_qk_norm)

    @cached_property
    def experts(self) -> Experts:
        hf = self.hf
        return Experts(
            hf.n_routed_experts,
            hf.num_experts_per_tok,
            hf.moe_intermediate_size,
            sparse_layers=tuple(layer >= hf.first_k_dense_replace for layer in range(self.num_layers)),
            shared_width=hf.moe_intermediate_size * (hf.n_shared_experts or 0),
            score="sigmoid",
            normalise=hf.norm_topk_prob,
            scale=hf.routed_scaling_factor,
            groups=hf.n_group,
            group_topk=hf.topk_group,
            selection_bias=True,
            float32_router=True,
        )

    def shrink(self, layers: int, tensor_parallel: int, expert_parallel: int) -> None:
        super().shrink(layers, tensor_parallel, expert_parallel)
        self.hf.first_k_dense_replace = min(self.hf.first_k_dense_replace, 1)

    def ignores(self, name: str) -> bool:
        """The layers behind the last predict further tokens; they are not trained, and not written."""
        layer = _LAYER.match(name)
        return super().ignores(name) or (layer is not None and int(layer[1]) >= self.num_layers)

"""Qwen2-MoE, with a gated shared expert, and Qwen3-MoE, without one."""

from functools import cached_property

from mcore_rl.models.megatron.families.mixture import Experts, Mixture


class Qwen3MoE(Mixture):
    model_type = "qwen3_moe"
    has_qk_norm = True

    @cached_property
    def experts(self) -> Experts:
        hf = self.hf
        dense = set(hf.mlp_only_layers or ())
        return Experts(
            hf.num_experts,
            hf.num_experts_per_tok,
            hf.moe_intermediate_size,
            sparse_layers=tuple(
                layer not in dense and (layer + 1) % hf.decoder_sparse_step == 0 for layer in range(self.num_layers)
            ),
            shared_width=getattr(hf, "shared_expert_intermediate_size", 0),
            shared_gate=hasattr(hf, "shared_expert_intermediate_size"),
            normalise=hf.norm_topk_prob,
        )

    def shrink(self, layers: int, tensor_parallel: int, expert_parallel: int) -> None:
        kinds = {*self.experts.sparse_layers}
        super().shrink(layers, tensor_parallel, expert_parallel)
        if True in kinds:  # the first layer dense where some are, the others sparse
            self.hf.decoder_sparse_step, self.hf.mlp_only_layers = 1, [0] if False in kinds and layers > 1 else []


class Qwen2MoE(Qwen3MoE):
    model_type = "qwen2_moe"
    has_qk_norm = False

    @property
    def has_qkv_bias(self) -> bool:
        return bool(getattr(self.hf, "qkv_bias", True))

    def shrink(self, layers: int, tensor_parallel: int, expert_parallel: int) -> None:
        super().shrink(layers, tensor_parallel, expert_parallel)
        self.hf.shared_expert_intermediate_size = 24 * max(2, tensor_parallel)

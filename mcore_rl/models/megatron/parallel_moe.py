"""Routed experts beside a dense MLP (Gemma 4): both read a layer's residual, through norms of their own.

output = norm(norm(MLP(norm(x))) + norm(experts(norm(x)))), with the residual x before the layer's MLP.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcore_rl.models.megatron.families.mixtures import Experts
from mcore_rl.models.megatron.layers import RMSNorm, unit_norm
from mcore_rl.models.megatron.moe import PackMoELayer, Router

from megatron.core.transformer.transformer_config import TransformerConfig


class ScaledRouter(Router):
    """A router that reads the normed and scaled residual, and scales the weights of its experts.

    scale: [hidden], factors of the normed residual. per_expert_scale: [experts], factors of the experts' weights.
    """

    def __init__(self, config: TransformerConfig, experts: Experts, **kwargs: Any) -> None:
        super().__init__(config, experts, **kwargs)
        for name, size in (("scale", config.hidden_size), ("per_expert_scale", experts.count)):
            parameter = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype))
            # Each tensor-parallel rank sees different tokens; with this attribute Megatron sums the gradients.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
            setattr(self, name, parameter)

    def gating(self, input: Tensor) -> Tensor:
        normed = unit_norm(input.float(), self.config.layernorm_epsilon)
        return super().gating(normed * self.scale.float() * self.config.hidden_size**-0.5)

    def _weights(self, logits: Tensor, chosen: Tensor) -> Tensor:
        return super()._weights(logits, chosen) * self.per_expert_scale.float()[chosen]


class ParallelMoELayer(PackMoELayer):
    """A layer of experts beside a dense MLP, which takes the place of the shared expert. Its input is the residual."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        for name in ("mlp_norm", "mlp_post_norm", "experts_norm", "experts_post_norm", "post_norm"):
            setattr(self, name, RMSNorm(config, config.hidden_size, config.layernorm_epsilon))

    def shared_experts_compute(self, hidden_states: Tensor) -> Tensor:
        out: Tensor = self.mlp_post_norm(super().shared_experts_compute(self.mlp_norm(hidden_states)))
        return out

    def preprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().preprocess(self.experts_norm(hidden_states), *args, **kwargs)

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        routed = self.experts_post_norm(super().postprocess(output, None))
        assert shared_expert_output is not None, "the dense MLP is computed before"
        both: Tensor = self.post_norm(shared_expert_output + routed)
        return both

"""The layer of experts, and the dispatchers that exchange its tokens between ranks.

In Gemma 4, routed experts stand beside a dense MLP. Both read the layer's residual x before the MLP, through norms of
their own: output = norm(norm(MLP(norm(x))) + norm(experts(norm(x)))).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcore_rl import platform
from mcore_rl.models.megatron.families.mixtures import Experts
from mcore_rl.models.megatron.layers.parameters import sum_over_sequence_ranks
from mcore_rl.models.megatron.layers.transformer_layer import ReplicatedLinear, RMSNorm, unit_norm
from mcore_rl.models.megatron.moe.router import Router
from mcore_rl.models.megatron.parallel_state import process_groups

from megatron.core.tensor_parallel import checkpoint, get_cuda_rng_tracker
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig


class PackMoELayer(MoELayer):
    """Megatron's layer of experts, with the dispatchers of this module (except flex) and a corrected recomputation.

    The recomputation uses the same pack as the first forward pass. Megatron's own recomputation uses the pack that the
    router has during the backward pass; under pipeline parallelism this is the pack of another microbatch.

    Args:
        latent: size of the latent states that the routed experts map to latent states; 0 if they map hidden states.
            Megatron has this option as well, but only for Transformer Engine's layers.
    """

    def __init__(self, config: TransformerConfig, *args: Any, latent: int = 0, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.latent = latent
        if latent:
            self.fc1_latent_proj = ReplicatedLinear(config, config.hidden_size, latent)
            self.fc2_latent_proj = ReplicatedLinear(config, latent, config.hidden_size)
        self.recomputes = bool(vars(self)["moe_layer_recompute"])
        self.moe_layer_recompute = False
        if platform.simulates() or self.config.moe_token_dispatcher_type == "alltoall":
            dispatcher = BalancedDispatcher if platform.simulates() else Dispatcher
            self.token_dispatcher = dispatcher(
                self.num_local_experts, self.local_expert_indices, self.config, process_groups()
            )

    def preprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        latent = self.fc1_latent_proj(hidden_states) if self.latent else hidden_states
        return super().preprocess(latent, *args, **kwargs)

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        if not self.latent:
            whole: Tensor = super().postprocess(output, shared_expert_output)
            return whole
        output = self.fc2_latent_proj(super().postprocess(output, None))
        return output if shared_expert_output is None else output + shared_expert_output

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not (self.recomputes and self.training):
            return super().forward(hidden_states, *args, **kwargs)
        pack, forward = self.router.pack, super().forward

        def recompute(hidden_states: Tensor) -> Any:
            self.router.pack = pack
            return forward(hidden_states, *args, **kwargs)

        if self.config.fp8:
            # Megatron's own function would recompute without FP8: the backward pass runs outside of FP8's context.
            from megatron.core.extensions.transformer_engine import te_checkpoint

            return te_checkpoint(recompute, False, get_cuda_rng_tracker, process_groups().tp, hidden_states)
        return checkpoint(recompute, False, hidden_states)


class Dispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's dispatcher, changed so that the host waits for the device only once per layer and pass.

    The host waits for the counts of tokens; it needs them before the ranks exchange tokens. Megatron's own permutation
    waits twice more, because it selects entries by a mask, and the host does not know the number of selected entries.
    """

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """Return how many tokens each of this rank's experts gets from all ranks together.

        Args:
            routing_map: mask [T, experts] of the chosen experts.
        """
        counts: Tensor = super().preprocess(routing_map)
        self.num_out_tokens = routing_map.sum()  # the host gets it with the other counts
        self._maybe_update_cuda_sync_point("before_permutation_1")
        return counts

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Copy each token once for each expert that it has chosen, sorted by expert and then by token.

        Args:
            hidden_states: the tokens, [T, 1, hidden].
            routing_map, probs: mask and weights of the chosen experts, [T, experts].

        Returns:
            The copies [choices, hidden], and the weight of each choice [choices].
        """
        self.hidden_shape, self.probs, self.routing_map = hidden_states.shape, probs, routing_map
        counts = self.preprocess(routing_map)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", counts)
        rows = hidden_states.flatten(0, -2)
        self.hidden_shape_before_permute = rows.shape
        # Choice n is at the first place of [experts, T] up to which, inclusive, there are n choices.
        number = torch.arange(1, int(self.num_out_tokens) + 1, device=rows.device)
        place = torch.searchsorted(routing_map.T.flatten().cumsum(0), number)
        self.reversed_local_input_permutation_mapping = place % len(rows)
        chosen = rows.index_select(0, self.reversed_local_input_permutation_mapping)
        return chosen, probs.T.flatten().index_select(0, place)


class BalancedDispatcher(Dispatcher):
    """Dispatcher for a simulation: every expert gets the same number of tokens, up to a difference of one by rounding.

    In a simulation the router's choices have no values, so they are not used. All ranks of the expert-parallel group
    are assumed to have as many tokens as this rank.

    imbalance: number of tokens routed to this rank's experts, divided by the mean over the expert-parallel ranks.
    """

    imbalance = 1.0

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """Return how many tokens each of this rank's experts gets from all ranks together; the counts are on the host.

        Args:
            routing_map: mask [T, experts]. Only its shape is used.
        """
        super().preprocess(routing_map).cpu()  # Megatron counts, ranks exchange counts, and the host waits
        choices, ranks = len(routing_map) * self.config.moe_router_topk, self.tp_size * self.ep_size
        shares = (torch.arange(self.num_experts + 1, device="cpu") * choices // self.num_experts).diff()
        own = (shares[self.local_expert_indices] * self.imbalance).long()
        self.num_out_tokens = choices
        self.input_splits = shares.view(self.ep_size, -1).sum(1)
        self.output_splits = own.sum().expand(self.ep_size)
        self.output_splits_tp = self.output_splits.sum().expand(self.tp_size)
        self.num_global_tokens_per_local_expert = own.expand(ranks, -1)
        return own * ranks


class ScaledRouter(Router):
    """A router that reads the normed and scaled residual, and scales the weights of its experts.

    scale: [hidden], factors of the normed residual. per_expert_scale: [experts], factors of the experts' weights.
    """

    def __init__(self, config: TransformerConfig, experts: Experts, **kwargs: Any) -> None:
        super().__init__(config, experts, **kwargs)
        for name, size in (("scale", config.hidden_size), ("per_expert_scale", experts.count)):
            parameter = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype))
            sum_over_sequence_ranks(parameter, when=config.sequence_parallel)
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

"""The router of a mixture's layer: which experts a token goes to, and with which weights.

In fp32 whatever the precision of the model, as small differences of scores choose other experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl.distributed.collectives import all_reduce
from mcore_rl.models.megatron.attention import PackParams
from mcore_rl.models.megatron.families.mixture import Experts
from mcore_rl.models.megatron.routed_tokens import RoutedTokens

from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer


@dataclass
class RouterLoad:
    """The load of a router in a step, and the global batch's denominators.

    num_sequences, num_tokens: of the global batch's sequences that count.
    tokens: [experts] that were sent to each, of this rank's; entropy, balance, z: this rank's parts of means.
    uncounted: choices of tokens that do not count (padding), which are sent as well.
    received: tokens that reached this rank's experts, once for each expert.
    """

    num_sequences: Tensor
    num_tokens: Tensor
    tokens: Tensor | float = 0.0
    entropy: Tensor | float = 0.0
    balance: Tensor | float = 0.0
    z: Tensor | float = 0.0
    uncounted: Tensor | int = 0
    received: int = 0

    def add(self, tokens: Tensor, uncounted: Tensor, entropy: Tensor, balance: Tensor, z: Tensor) -> None:
        self.tokens, self.uncounted = self.tokens + tokens, self.uncounted + uncounted
        self.entropy = self.entropy + entropy.detach()
        self.balance, self.z = self.balance + balance.detach(), self.z + z.detach()


class _AttachedLoss(torch.autograd.Function):
    """The first argument, whose backward pass also starts that of a loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones(())


class PackLayer(TransformerLayer):
    """Megatron's layer, whose router is told which pack its tokens are of, also when they are computed again.

    Args:
        rope: which of the angles that stand side by side are this layer's; all if None.
    """

    def __init__(self, *args: Any, rope: slice | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rope = rope

    def forward(self, *args: Any, packed_seq_params: PackParams | None = None, **kwargs: Any) -> Any:
        if self.rope is not None:
            kwargs["rotary_pos_emb"] = kwargs["rotary_pos_emb"][..., self.rope]
        if isinstance(self.mlp, MoELayer):
            self.mlp.router.pack = packed_seq_params
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)


class PackMoELayer(MoELayer):
    """Megatron's layer of experts, which recomputes itself with the pack that its tokens came from.

    Megatron's own recomputation asks the router for its pack in the backward pass. Under pipeline parallelism the
    router has another microbatch's pack by then.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recomputes = bool(vars(self)["moe_layer_recompute"])
        self.moe_layer_recompute = False

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not (self.recomputes and self.training):
            return super().forward(hidden_states, *args, **kwargs)
        pack, forward = self.router.pack, super().forward

        def recompute(hidden_states: Tensor) -> Any:
            self.router.pack = pack
            return forward(hidden_states, *args, **kwargs)

        return checkpoint(recompute, False, hidden_states)


class Router(TopKRouter):
    """Megatron's router with the scores and the choice of the family's experts.

    pack: what the tokens are of.
    load: what a training step's tokens made of it so far; None outside of one.
    recorded: experts [T, topk] chosen by the last pass, while sequences are generated.
    """

    pack: PackParams | None = None
    load: RouterLoad | None = None
    recorded: Tensor | None = None

    def __init__(self, config: TransformerConfig, experts: Experts, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        self.experts = experts
        if experts.float32_router:
            self.weight.data = self.weight.data.float()

    def gating(self, input: Tensor) -> Tensor:
        """[T, 1, hidden] → [T, 1, experts] logits in fp32."""
        return F.linear(input.float(), self.weight.float())

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights [T, experts] in fp32, 0 where an expert is not chosen, and whether it is."""
        logits = logits.flatten(0, -2)
        tokens = None if self.pack is None else self.pack.routed
        chosen = self._choose(logits.detach())
        if tokens is not None and tokens.experts is not None:
            earlier = tokens.experts[:, self.index]
            chosen = torch.where(earlier < 0, chosen, earlier)
        self.recorded = None if self.training else chosen
        spread = torch.zeros_like(logits).scatter(1, chosen, self._weights(logits, chosen))
        routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)
        # A pass without gradient is an evaluation, or the first of a recomputation: the second is the one that counts.
        if self.load is not None and tokens is not None and self.training and torch.is_grad_enabled():
            spread = _AttachedLoss.apply(spread, self._auxiliary_loss(logits, routing_map, tokens, self.load))
        return spread, routing_map

    def chosen_last(self) -> Tensor:
        """[T, topk] experts of the tokens of the last pass."""
        assert self.recorded is not None, "nothing was generated or scored last"
        return self.recorded

    @property
    def index(self) -> int:
        """This layer's number among the whole model's layers that have experts."""
        return sum(self.experts.sparse_layers[: self.layer_number - 1])

    def _auxiliary_loss(self, logits: Tensor, chosen: Tensor, tokens: RoutedTokens, load: RouterLoad) -> Tensor:
        """This rank's part of the balance loss and of the z-loss; notes the load.

        Balance (arXiv:2412.19437, eq. 17 to 20): the mean over the global batch's sequences of Σ_e f_e·P_e, with f_e
        the share of a sequence's tokens that chose expert e, times experts / topk, and P_e their mean probability
        of it. z-loss (arXiv:2202.08906, eq. 5): the mean over the global batch's tokens of (log Σ_e exp x_e)².
        """
        weight = tokens.weight
        probabilities = logits.softmax(-1) if self.experts.score == "softmax" else _normalised(logits.sigmoid())
        counted = chosen * (weight > 0)[:, None]
        balance = logits.new_zeros(())
        if self.config.moe_aux_loss_coeff:
            per_token = (probabilities * self._frequency(counted, tokens)).sum(-1) / tokens.lengths[tokens.sequence]
            balance = (per_token * weight).sum() / load.num_sequences
        z = (logits.logsumexp(-1).square() * weight).sum() / load.num_tokens
        entropy = -(probabilities * probabilities.clamp(min=1e-30).log()).sum(-1)
        load.add(counted.sum(0), chosen.sum() - counted.sum(), (entropy * weight).sum() / load.num_tokens, balance, z)
        return self.config.moe_aux_loss_coeff * balance + (self.config.moe_z_loss_coeff or 0.0) * z

    @torch.no_grad()
    def _frequency(self, counted: Tensor, tokens: RoutedTokens) -> Tensor:
        """[T, experts] f of each token's sequence, whose tokens are spread over context and sequence parallelism."""
        count = self.experts.count
        counts = counted.new_zeros(tokens.num_sequences + 1, count, dtype=torch.float32)
        counts = all_reduce(counts.index_add(0, tokens.sequence, counted.float()), self.tp_cp_group)
        return (counts * (count / self.experts.topk) / tokens.lengths[:, None])[tokens.sequence]

    def _choose(self, logits: Tensor) -> Tensor:
        """[T, topk] the experts with the best scores, from the groups with the best pairs of them."""
        experts = self.experts
        scores = logits.sigmoid() if experts.score == "sigmoid" else logits.softmax(-1)
        if experts.selection_bias:
            scores = scores + self.expert_bias
        if experts.groups > 1:
            grouped = scores.unflatten(1, (experts.groups, -1))
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(experts.group_topk, dim=-1).indices
            kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, True)
            scores = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
        return scores.topk(experts.topk, dim=-1).indices

    def _weights(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """[T, topk] of the chosen experts."""
        experts = self.experts
        if experts.score == "softmax":
            normaliser = logits.gather(1, chosen) if experts.normalise else logits
            weights = (logits.gather(1, chosen) - normaliser.logsumexp(-1, keepdim=True)).exp()
        else:
            weights = logits.gather(1, chosen).sigmoid()
            if experts.normalise:
                weights = _normalised(weights)
        return weights if experts.scale is None else weights * experts.scale


def _normalised(scores: Tensor) -> Tensor:
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)

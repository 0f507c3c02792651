"""The router of a mixture of experts, and the statistics of its choices.

The router always computes in fp32, whatever the model's precision is, because small differences of the scores change
the choice of experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl.models.megatron.families.mixtures import Experts
from mcore_rl.models.megatron.layers.packs import PackParams, RoutedTokens
from mcore_rl.models.megatron.layers.parameters import sum_over_sequence_ranks
from mcore_rl.models.megatron.layers.transformer_layer import AttachedLoss

from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class RouterStatistics:
    """Statistics of one router in a training step, on this rank. A token counts once for each row that contains it.

    num_sequences, num_tokens: number of sequences of the global batch that are not masked, and of their tokens. Sums
        are divided by these numbers to get means over the global batch.
    tokens: [experts], number of this rank's unmasked tokens that were sent to each expert.
    entropy, balance, z: the contributions of this rank's tokens to the means over the global batch.
    uncounted: number of choices that reach experts, less the sum of `tokens`. Choices for padding and masked sequences
        make it larger; each further row that shares a token makes it smaller.
    received: number of tokens that reached this rank's experts; a token counts once for each expert.
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


class Router(TopKRouter):
    """Megatron's router; it computes the scores and chooses the experts as the model's family does.

    pack: the pack that contains the current tokens.
    load: statistics of the current training step; None outside a step.
    recorded: [T, topk], the experts that the router chose in the last forward pass in evaluation mode.
    token_experts: if the experts of a token depend on its id alone: [vocabulary, topk], the experts of each id, as fp32
        numbers. Otherwise None.
    """

    pack: PackParams | None = None
    load: RouterStatistics | None = None
    recorded: Tensor | None = None

    def __init__(self, config: TransformerConfig, experts: Experts, vocab_size: int = 0, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        self.experts = experts
        self.token_experts: torch.nn.Parameter | None = None
        if vocab_size:
            self.token_experts = torch.nn.Parameter(torch.zeros(vocab_size, experts.topk), requires_grad=False)
            del self.expert_bias, self.local_tokens_per_expert
            self.enable_expert_bias = False
        if experts.float32_router:
            self.weight.data = self.weight.data.float()
        if experts.has_biases:
            self.bias = torch.nn.Parameter(torch.zeros(experts.count, dtype=config.params_dtype))
            sum_over_sequence_ranks(self.bias, when=config.sequence_parallel)

    def gating(self, input: Tensor) -> Tensor:
        """Map hidden states [T, 1, hidden] to logits [T, 1, experts] in fp32."""
        logits: Tensor = _FloatLinear.apply(input, self.weight, self.bias)
        return logits

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Choose the experts of each token.

        Returns:
            Weights [T, experts] in fp32 (0 for experts that are not chosen), and a mask [T, experts] of the chosen
            experts.
        """
        logits = logits.flatten(0, -2)
        tokens = None if self.pack is None else self.pack.routed
        chosen = self._choose(logits.detach())
        if tokens is not None and tokens.experts is not None:
            earlier = tokens.experts[:, self.index]
            chosen = torch.where(earlier < 0, chosen, earlier)
        self.recorded = None if self.training else chosen
        spread = torch.zeros_like(logits).scatter(1, chosen, self._weights(logits, chosen))
        routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)
        if tokens is not None and self.config.fp8:
            # Equal rows of padding would all choose the same experts.
            routing_map = routing_map & (tokens.segment < len(tokens.weight) - 1)[:, None]
            spread = spread * routing_map
        # A pass without gradient is an evaluation or the first pass of a recomputation. The second pass is counted.
        if self.load is not None and tokens is not None and self.training and torch.is_grad_enabled():
            spread = AttachedLoss.apply(spread, self._auxiliary_loss(logits, routing_map, tokens, self.load))
        return spread, routing_map

    def chosen_last(self) -> Tensor:
        """Return the experts that the router chose in the last forward pass, [T, topk]."""
        assert self.recorded is not None, "the last pass was not in evaluation mode"
        return self.recorded

    @property
    def index(self) -> int:
        """Index of this layer among those layers of the whole model that have experts."""
        return sum(self.experts.sparse_layers[: self.layer_number - 1])

    def _auxiliary_loss(self, logits: Tensor, chosen: Tensor, tokens: RoutedTokens, load: RouterStatistics) -> Tensor:
        """Return the part of balance loss and z-loss that comes from this rank's tokens; update `load`.

        Each loss is multiplied by its coefficient.

        Balance loss (arXiv:2412.19437, eq. 17 to 20): the mean of Σ_e f_e·P_e over the sequences of the global batch.
        f_e is the fraction of the sequence's tokens that chose expert e, times experts / topk. P_e is the mean
        probability of expert e over the sequence's tokens. z-loss (arXiv:2202.08906, eq. 5): the mean of (log Σ_e exp
        x_e)² over the tokens of the global batch, with the logits x_e. A token that several sequences share counts in
        each of them.
        """
        weight = tokens.weight[tokens.segment]
        probabilities = _scores(logits, self.experts.score)
        if self.experts.score != "softmax":
            probabilities = _normalised(probabilities)
        counted = chosen * tokens.count[tokens.segment][:, None]
        balance = logits.new_zeros(())
        if self.config.moe_aux_loss_coeff:
            balance = (probabilities * self._frequency(chosen, tokens)).sum() / load.num_sequences
        z = (logits.logsumexp(-1).square() * weight).sum() / load.num_tokens
        entropy = -(probabilities * probabilities.clamp(min=1e-30).log()).sum(-1)
        load.add(counted.sum(0), chosen.sum() - counted.sum(), (entropy * weight).sum() / load.num_tokens, balance, z)
        return self.config.moe_aux_loss_coeff * balance + (self.config.moe_z_loss_coeff or 0.0) * z

    @torch.no_grad()
    def _frequency(self, chosen: Tensor, tokens: RoutedTokens) -> Tensor:
        """Return, for each token, the factors of its probabilities in the sum of all sequences' losses, [T, experts].

        The factor of expert e is the sum of f_e / L (see `_auxiliary_loss`) over the unmasked sequences that contain
        the token; L is the sequence's number of tokens. The tokens of all context- and sequence-parallel ranks are
        counted.
        """
        counts = tokens.sum_over_rows(chosen, self.tp_cp_group) * (self.experts.count / self.experts.topk)
        return tokens.sum_to_tokens(counts * tokens.row_weight[:, None])

    def _choose(self, logits: Tensor) -> Tensor:
        """Return the experts with the highest scores, [T, topk].

        If the experts are divided into groups, only the best groups are considered. The score of a group is the sum of
        its two highest scores.
        """
        experts = self.experts
        if self.token_experts is not None:
            return self._experts_of_ids(self.token_experts)
        scores = _scores(logits, experts.score)
        if experts.selection_bias:
            scores = scores + self.expert_bias
        if experts.groups > 1:
            grouped = scores.unflatten(1, (experts.groups, -1))
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(experts.group_topk, dim=-1).indices
            kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, True)
            scores = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
        return scores.topk(experts.topk, dim=-1).indices

    def _weights(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """Return the weights of the chosen experts, [T, topk]."""
        experts = self.experts
        if experts.score == "softmax":
            normaliser = logits.gather(1, chosen) if experts.normalise else logits
            weights = (logits.gather(1, chosen) - normaliser.logsumexp(-1, keepdim=True)).exp()
        else:
            weights = _scores(logits.gather(1, chosen), experts.score)
            if experts.normalise:
                weights = _normalised(weights)
        return weights if experts.scale is None else weights * experts.scale

    def _experts_of_ids(self, table: Tensor) -> Tensor:
        """Return the experts of this rank's tokens, [T, topk]."""
        assert self.pack is not None and self.pack.token_ids is not None, "the router needs the ids of the tokens"
        ids = self.pack.token_ids
        if self.config.sequence_parallel:
            ids = ids.chunk(self.tp_group.size())[self.tp_group.rank()]
        return table[ids].long()


def _scores(logits: Tensor, function: str) -> Tensor:
    if function == "softmax":
        return logits.softmax(-1)
    return logits.sigmoid() if function == "sigmoid" else F.softplus(logits).sqrt()


class _FloatLinear(torch.autograd.Function):
    """A linear layer that computes in fp32. For the backward pass it keeps its input in the input's own precision."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows, of_weight = grad.flatten(0, -2), None
        if ctx.needs_input_grad[1]:
            of_weight = (rows.T @ x.float().flatten(0, -2)).to(weight.dtype)
        of_bias = None if ctx.bias_dtype is None else rows.sum(0).to(ctx.bias_dtype)
        return (grad @ weight.float()).to(x.dtype), of_weight, of_bias


def _normalised(scores: Tensor) -> Tensor:
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)

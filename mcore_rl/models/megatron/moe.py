"""Mixtures of experts: the router, the experts, and the statistics of routing.

The router computes in fp32 whatever the precision of the model, because small differences of scores choose other
experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl import platform
from mcore_rl.data.batching import Microbatch
from mcore_rl.distributed.batched_data_dict import BatchedDataDict, batch_share
from mcore_rl.distributed.collectives import all_reduce
from mcore_rl.distributed.packs import slice_context_parallel
from mcore_rl.distributed.topology import Topology
from mcore_rl.models.megatron.attention import PackParams
from mcore_rl.models.megatron.families.mixtures import Experts, Mixture
from mcore_rl.models.megatron.layers import GenerationFastPath
from mcore_rl.models.megatron.parallel_state import process_groups

from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

if TYPE_CHECKING:
    from mcore_rl.models.megatron.build import ModelShard

ROUTED_EXPERTS = "routed_experts"
"""Entry [B, S, sparse layers, topk] of a batch: the experts of each input token; −1 where they are not known."""


@dataclass(frozen=True)
class RoutedTokens:
    """The tokens [t] that this rank's routers see of a pack.

    sequence: [t] of each token, N where it is padding. weight: [t] its sequence's sample mask, 0 where it is padding.
    lengths: [N + 1] tokens of each sequence; 1 for padding.
    experts: [t, sparse layers, topk] chosen earlier, −1 where none were; None to choose anew.
    """

    sequence: Tensor
    weight: Tensor
    lengths: Tensor
    experts: Tensor | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.lengths) - 1

    @classmethod
    def of(cls, microbatch: Microbatch, topology: Topology) -> RoutedTokens:
        """This rank's, under context and sequence parallelism; on the host."""
        layout, data = microbatch.layout, microbatch.data
        rows, width = data["input_ids"].shape
        place = layout.pack_rows(torch.arange(rows * width).view(rows, width), fill=-1)
        place = slice_context_parallel(place, layout, topology.context.rank)
        if topology.sequence_parallel:
            place = place.chunk(topology.tensor.size)[topology.tensor.rank]
        sequence = torch.where(place < 0, rows, place // width)
        mask = (
            torch.cat((data["sample_mask"].float(), torch.zeros(1))) if "sample_mask" in data else torch.zeros(rows + 1)
        )
        experts = None
        if ROUTED_EXPERTS in data:
            earlier = data[ROUTED_EXPERTS].flatten(0, 1)[place.clamp(min=0)].long()
            experts = torch.where((place < 0)[:, None, None], -1, earlier)
        return cls(sequence, mask[sequence], torch.tensor((*layout.lengths, 1), dtype=torch.float32), experts)

    def tensors(self) -> list[Tensor]:
        """Return the existing tensors in the order of the constructor."""
        return [self.sequence, self.weight, self.lengths, *([] if self.experts is None else [self.experts])]


@dataclass
class RouterStatistics:
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
    load: RouterStatistics | None = None
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

    def _auxiliary_loss(self, logits: Tensor, chosen: Tensor, tokens: RoutedTokens, load: RouterStatistics) -> Tensor:
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


class _GroupedLinear(torch.autograd.Function):
    """Rows [T, in] that stand expert by expert → [T, out], by each expert's weight [out, in].

    ends: [experts] int32, behind each one's last row; an expert may have none. The weights are stacked for the product
    alone, and again for the backward pass: saved, the copy would double what they take for as long as activations are
    kept.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, ends, *weights)
        return F.grouped_mm(rows, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, ends, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        grad_rows: Tensor | None = None
        grad_weights: Sequence[Tensor | None] = [None] * len(weights)
        if ctx.needs_input_grad[0]:
            grad_rows = F.grouped_mm(grad, torch.stack(weights), offs=ends)
        if ctx.needs_input_grad[2]:
            grad_weights = F.grouped_mm(grad.T, rows, offs=ends).unbind()
        return grad_rows, None, *grad_weights


class CountingExperts(SequentialMLP):
    """Megatron's experts, which note how many tokens reach them.

    load: where a training step's are noted; None outside of one.
    """

    load: RouterStatistics | None = None

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Tokens [T, hidden] that stand expert by expert, with the weights [T] of their outputs → [T, hidden]."""
        # As in the router: of a recomputation the pass with gradient counts.
        if self.load is not None and self.training and torch.is_grad_enabled():
            self.load.received += len(hidden)
        return self._compute(hidden, tokens_per_expert, probs)

    def _compute(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        output: tuple[Tensor, None] = super().forward(hidden, tokens_per_expert, probs)
        return output


class GroupedExperts(GenerationFastPath, CountingExperts):
    """Megatron's experts with the same parameters, each linear layer computed by one grouped product.

    While sequences are generated a pass has few tokens, too few to stack the weights for.
    """

    takes_weights_of_parts = True
    """The linear layers' weights are used, but not by their own forward passes: who hooks those must hook this."""

    def _compute(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        if self.in_generation:
            return super()._compute(hidden, tokens_per_expert, probs)
        ends = platform.sent(tokens_per_expert, hidden.device).cumsum(0, dtype=torch.int32)
        first, second = ([getattr(e, name).weight for e in self.local_experts] for name in ("linear_fc1", "linear_fc2"))
        gate, up = _GroupedLinear.apply(hidden, ends, *first).chunk(2, dim=-1)
        scaled = self.config.activation_func(gate) * up * probs[:, None]
        return _GroupedLinear.apply(scaled.to(hidden.dtype), ends, *second), None


def routers_of(model: ModelShard) -> list[Router]:
    """This rank's, in the order of their layers."""
    return [module for chunk in model.chunks for module in chunk.modules() if isinstance(module, Router)]


def reset_router_statistics(model: ModelShard, data: BatchedDataDict[Any]) -> int:
    """Let the routers note the load of a global batch, and know its numbers of sequences and tokens; the latter.

    Collective, of a replica's own rows.
    """
    mask = data["sample_mask"].double()  # exact beyond 2^24 tokens
    counted = float(mask.sum()), float((mask * data["input_lengths"]).sum())
    sequences, tokens = torch.tensor(batch_share(data).sum(*counted), dtype=torch.float64)
    for layer in (module for chunk in model.chunks for module in chunk.modules() if isinstance(module, MoELayer)):
        counts = (count.clamp(min=1).to(platform.device()) for count in (sequences, tokens))
        layer.router.load = layer.experts.load = RouterStatistics(*counts)
    return int(tokens)


class StepRouterStatistics:
    """The load of a whole step, on every rank. Collective.

    tokens: [sparse layers, experts] that were sent to each expert, of the sequences that count.
    dropped: [sparse layers] of the choices of these tokens, those that reached no expert.
    means: [sparse layers, 3] entropy of the scores (nats), balance loss and z-loss, without their coefficients.

    Args:
        num_tokens: of the sequences that count.
    """

    def __init__(self, model: ModelShard, num_tokens: int) -> None:
        assert isinstance(model.family, Mixture), "only mixtures route"
        experts, topology = model.family.experts, model.topology
        local = torch.zeros(
            sum(experts.sparse_layers), experts.count + 4, dtype=torch.float64, device=platform.device()
        )
        for router in routers_of(model):
            load = router.load
            if load is not None and isinstance(load.tokens, Tensor):
                # Every rank of an expert's tensor parallelism receives all of its tokens.
                reached = load.received / topology.expert_tensor.size - load.uncounted
                rest = [torch.as_tensor(x).to(local) for x in (load.entropy, load.balance, load.z, reached)]
                local[router.index] = torch.cat((load.tokens.double(), torch.stack(rest)))
        dimensions = [topology.context, topology.data, topology.pipeline]
        if topology.sequence_parallel:
            dimensions.append(topology.tensor)
        for dimension in dimensions:
            local = all_reduce(local, dimension.group)
        self.tokens, self.means = local[:, : experts.count], local[:, experts.count : -1]
        self.dropped = num_tokens * experts.topk - local[:, -1]
        self.balances = bool(model.chunks[0].config.moe_aux_loss_coeff)
        self.layers = [layer for layer, sparse in enumerate(experts.sparse_layers) if sparse]

    def metrics(self) -> dict[str, float]:
        """Return the fullest expert over the mean one, dropped choices and entropy by layer, and the summed losses."""
        fullest = (self.tokens.amax(1) / self.tokens.mean(1).clamp(min=1e-30)).tolist()
        entropy, balance, z = self.means.unbind(1)
        return {
            **{f"moe_load/layer_{layer}": x for layer, x in zip(self.layers, fullest, strict=True)},
            **{f"moe_dropped/layer_{layer}": x for layer, x in zip(self.layers, self.dropped.tolist(), strict=True)},
            **{f"moe_entropy/layer_{layer}": x for layer, x in zip(self.layers, entropy.tolist(), strict=True)},
            **({"moe_aux_loss": float(balance.sum())} if self.balances else {}),
            "moe_z_loss": float(z.sum()),
        }

    def update_biases(self, model: ModelShard, rate: float) -> None:
        """Move the bias of experts with fewer tokens than the mean up by `rate`, of others down (arXiv:2408.15664)."""
        for router in routers_of(model):
            tokens = self.tokens[router.index]
            router.expert_bias += rate * torch.sign(tokens.mean() - tokens).to(router.expert_bias)


class BalancedDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's dispatcher, with as many tokens for each expert as for any other (to one, where that is a fraction).

    Ranks that share experts hold as many tokens as this one.
    """

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """[T, experts] → [this rank's experts] tokens for each, from all ranks; on the host, as all counts are."""
        super().preprocess(routing_map).cpu()  # Megatron counts, ranks tell each other, and the host waits for it
        choices, ranks = len(routing_map) * self.config.moe_router_topk, self.tp_size * self.ep_size
        shares = (torch.arange(self.num_experts + 1, device="cpu") * choices // self.num_experts).diff()
        own = shares[self.local_expert_indices]
        self.input_splits = shares.view(self.ep_size, -1).sum(1)
        self.output_splits = own.sum().expand(self.ep_size)
        self.output_splits_tp = self.output_splits.sum().expand(self.tp_size)
        self.num_global_tokens_per_local_expert = own.expand(ranks, -1)
        return own * ranks


_kernels: list[torch.library.Library] = []
"""A kernel is there as long as its library is."""


def balance_routing(chunk: torch.nn.Module) -> None:
    """From now on the chunk's experts get equal shares of the tokens, whatever its routers choose.

    In this process a mask [experts, T] selects topk entries for each token: torch has no `masked_select` without
    values, whose number it could not know.
    """
    for layer in (module for module in chunk.modules() if isinstance(module, MoELayer)):
        layer.token_dispatcher = BalancedDispatcher(
            layer.num_local_experts, layer.local_expert_indices, layer.config, process_groups()
        )
        if not _kernels:
            _kernels.append(_selection(layer.config.moe_router_topk))


def _selection(topk: int) -> torch.library.Library:
    def masked_select(values: Tensor, mask: Tensor) -> Tensor:
        mask.any().item()  # a GPU tells the host how many they are
        return values.new_empty(mask.shape[-1] * topk)

    library: Any = torch.library.Library("aten", "IMPL")
    library.impl("masked_select", masked_select, "Meta")
    return library

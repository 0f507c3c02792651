"""Mixtures of experts: the router, the experts, and the statistics of routing.

The router always computes in fp32, whatever the model's precision is, because small differences of the scores change
the choice of experts.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_rl import platform
from mcore_rl.data.batching import Microbatch
from mcore_rl.data.choices import ROUTED_EXPERTS
from mcore_rl.distributed.batched_data_dict import BatchedDataDict, batch_share
from mcore_rl.distributed.collectives import all_reduce
from mcore_rl.distributed.packs import slice_context_parallel
from mcore_rl.distributed.topology import Topology
from mcore_rl.models.megatron.attention import PackParams
from mcore_rl.models.megatron.families.mixtures import Experts, Mixture
from mcore_rl.models.megatron.layers import AttachedLoss, GenerationFastPath, ReplicatedLinear, bias_of_first_rank
from mcore_rl.models.megatron.parallel_state import process_groups

from megatron.core.tensor_parallel import checkpoint, get_cuda_rng_tracker
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

if TYPE_CHECKING:
    from mcore_rl.models.megatron.build import ModelShard


@dataclass(frozen=True)
class RoutedTokens:
    """The t tokens of a pack that this rank's routers see. The pack has N rows and S segments.

    Several rows may share a segment (see `PrefixLayout`). Its tokens go through the model once, but they count once for
    each of these rows.

    segment: [t], index of each token's segment; S for padding.
    weight: [S + 1], sum of the sample masks of the rows that contain a segment; 0 for padding.
    count: [S + 1], number of unmasked rows that contain a segment; 0 for padding.
    passages: [2, pairs], pairs of a row and a segment that is part of the row.
    row_weight: [N], sample mask of each row, divided by the square of the row's number of tokens.
    experts: [t, layers with experts, topk], the experts that sampling chose for the tokens, to be used again; −1 if
        unknown. None if the routers choose the experts.
    """

    segment: Tensor
    weight: Tensor
    count: Tensor
    passages: Tensor
    row_weight: Tensor
    experts: Tensor | None = None

    @classmethod
    def of(cls, microbatch: Microbatch, topology: Topology) -> RoutedTokens:
        """Return this rank's tokens of a microbatch, under context and sequence parallelism, in host memory.

        The rows that share a token have the same recorded experts for it (see `token_identities`).
        """
        layout, data = microbatch.layout, microbatch.data
        rows = len(data["input_ids"])

        def own(packed: Tensor) -> Tensor:
            local = slice_context_parallel(packed, layout, topology.context.rank)
            return local.chunk(topology.tensor.size)[topology.tensor.rank] if topology.sequence_parallel else local

        mask = data["sample_mask"].float() if "sample_mask" in data else torch.zeros(rows)
        passages = layout.passages
        of_pairs = torch.stack((mask, (mask > 0).float()))[:, passages[0]]
        weight, count = torch.zeros(2, len(layout.lengths) + 1).index_add(1, passages[1], of_pairs)
        row_weight = mask / torch.tensor(layout.row_lengths, dtype=torch.float32).square()
        experts = microbatch.choices(ROUTED_EXPERTS, own)
        experts = None if experts is None else experts.long()
        return cls(own(layout.segment_of_token), weight, count.long(), passages, row_weight, experts)

    def tensors(self) -> list[Tensor]:
        """Return all tensors that are not None, in the order of the constructor's arguments."""
        always = [self.segment, self.weight, self.count, self.passages, self.row_weight]
        return [*always, *([] if self.experts is None else [self.experts])]

    def sum_over_rows(self, values: Tensor, group: ProcessGroup | None) -> Tensor:
        """Sum values [t, E] over the tokens of each row, on all ranks of `group`; return fp32 [N, E].

        The all-reduce sends a sum for each segment, in which a shared token counts once.
        """
        of_segments = values.new_zeros(len(self.weight), values.shape[1], dtype=torch.float32)
        of_segments = all_reduce(of_segments.index_add(0, self.segment, values.float()), group)
        row, segment = self.passages
        of_rows = of_segments.new_zeros(len(self.row_weight), values.shape[1])
        return of_rows.index_add(0, row, of_segments[segment])

    def sum_to_tokens(self, of_rows: Tensor) -> Tensor:
        """Return, for each token, the sum of `of_rows` [N, E] over the rows that contain it: [t, E]; 0 for padding."""
        row, segment = self.passages
        of_segments = of_rows.new_zeros(len(self.weight), of_rows.shape[1])
        return of_segments.index_add(0, segment, of_rows[row])[self.segment]


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
            self.bias.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

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


class _GroupedLinear(torch.autograd.Function):
    """Autograd function that computes a linear layer of every expert, as one grouped product.

    It maps rows [T, in], sorted by expert, to [T, out]. `ends`: [experts] int32, the number of the row after the last
    row of each expert; an expert may have no rows. `weights`: each expert's weight [out, in]. Forward and backward pass
    both stack the weights, because keeping the stacked copy would double the memory of the weights.
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


def row_ends(tokens_per_expert: Tensor, rows: Tensor) -> Tensor:
    """Return, for each expert, the number of the row after its last row: [experts] int32, on the device of `rows`."""
    return platform.sent(tokens_per_expert, rows.device).cumsum(0, dtype=torch.int32)


def with_adapters(adapters: Sequence[Any], output: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """Add what the experts' adapters compute to the `output` [T, out] of a linear layer; return the sum.

    Args:
        adapters: the adapter of each expert, or None for every expert.
        rows, ends: input of the linear layer, as in `_GroupedLinear`.
    """
    first = adapters[0]
    if first is None or not first.enabled:
        return output
    return (output + first.of_all(adapters, rows, ends)).to(output.dtype)


class ExpertsMixin:
    """Mixin for experts that counts the tokens that they get, and allows biases.

    load: statistics of the current training step; None outside a step.

    Args:
        has_biases: whether the experts' linear layers have biases. Megatron's option for biases is set only in a copy
            of the configuration. In the model's configuration it would apply to all linear layers, and Megatron would
            reject it for tensor-parallel experts.
        limit: limit to which the experts' gate and up projections are clamped; None for the model's own.
        latent: size of the experts' inputs and outputs; 0 for the size of the hidden states.
    """

    load: RouterStatistics | None = None
    training: bool

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        *args: Any,
        has_biases: bool = False,
        limit: float | None = None,
        latent: int = 0,
        **kwargs: Any,
    ) -> None:
        if has_biases or latent or limit is not None:
            config = copy.copy(config)
            config.hidden_size = latent or config.hidden_size
        if limit is not None:
            config.activation_func_clamp_value = limit
        if has_biases:
            config.add_bias_linear, config.bias_dropout_fusion = True, False
        super().__init__(num_local_experts, config, *args, **kwargs)  # type: ignore[call-arg]

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Map tokens [T, hidden], sorted by expert, to outputs [T, hidden], multiplied by their weights `probs` [T]."""
        # A recomputation is counted in its pass with gradient, as in the router.
        if self.load is not None and self.training and torch.is_grad_enabled():
            self.load.received += len(hidden)
        return self._compute(hidden, tokens_per_expert, probs)

    def _compute(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        output: tuple[Tensor, None] = super().forward(hidden, tokens_per_expert, probs)  # type: ignore[misc]
        return output


class CountingExperts(ExpertsMixin, SequentialMLP):
    """Megatron's sequential experts, with this package's counts of the tokens that each expert gets."""


class GroupedExperts(GenerationFastPath, CountingExperts):
    """Experts with the same parameters as Megatron's; a linear layer of all experts is computed as one grouped product.

    In generation the experts are computed one after the other: a pass has so few tokens that stacking the weights would
    take longer than the grouped product saves.
    """

    takes_weights_of_parts = True
    """Whether this module uses its submodules' weights without calling the submodules, so their hooks do not run."""

    def _compute(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        if self.in_generation:
            return super()._compute(hidden, tokens_per_expert, probs)
        ends = row_ends(tokens_per_expert, hidden)
        projected, biases = self._linear("linear_fc1", hidden, ends)
        if biases is not None:
            projected = projected + biases
        scaled = self.local_experts[0].activation_func(projected, probs[:, None])
        output, biases = self._linear("linear_fc2", scaled, ends)
        if biases is not None:
            output = (output + bias_of_first_rank(biases) * probs[:, None]).to(hidden.dtype)
        return output, None

    def _linear(self, name: str, rows: Tensor, ends: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute the linear layer `name` of all experts.

        Returns:
            The outputs [T, out] without bias, and the bias of each row [T, out], or None if there are no biases.
        """
        layers = [getattr(expert, name) for expert in self.local_experts]
        output = _GroupedLinear.apply(rows, ends, *(layer.weight for layer in layers))
        output = with_adapters([layer.adapter for layer in layers], output, rows, ends)
        if layers[0].bias is None:
            return output, None
        expert = torch.bucketize(torch.arange(len(rows), device=rows.device), ends, right=True)
        return output, F.embedding(expert, torch.stack([layer.bias for layer in layers]))


def routers_of(model: ModelShard) -> list[Router]:
    """Return this rank's routers in the order of their layers, without those of layers that predict further tokens."""
    return [module for chunk in model.chunks for module in chunk.decoder.modules() if isinstance(module, Router)]


def reset_router_statistics(model: ModelShard, data: BatchedDataDict[Any]) -> int:
    """Start new statistics of all routers for a global batch; return the number of its unmasked tokens. Collective.

    Args:
        data: this replica's rows of the global batch.
    """
    mask = data["sample_mask"].double()  # exact beyond 2^24 tokens
    counted = float(mask.sum()), float((mask * data["input_lengths"]).sum())
    totals = torch.tensor(batch_share(data).sum(*counted), dtype=torch.float64)
    sequences, tokens = platform.sent(totals.clamp(min=1), platform.device()).unbind()
    for layer in (m for chunk in model.chunks for m in chunk.decoder.modules() if isinstance(m, MoELayer)):
        layer.router.load = layer.experts.load = RouterStatistics(sequences, tokens)
    return int(totals[1])


class StepRouterStatistics:
    """The routing statistics of a training step, summed over all ranks. The constructor is collective.

    Only sequences that are not masked are included. "layers" are those layers that have experts.
    tokens: [layers, experts], number of tokens that were sent to each expert.
    dropped: [layers], number of choices that reached no expert.
    means: [layers, 3], entropy of the scores (nats), balance loss and z-loss, without coefficients.

    Args:
        num_tokens: number of tokens of the sequences that are not masked.
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
                # Every rank of an expert's tensor-parallel group receives all of the expert's tokens.
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
        """Return the metrics of the routers.

        For each layer: the highest load of an expert divided by the mean load, the number of dropped choices, and the
        entropy. For the whole model: balance loss and z-loss, each summed over the layers.
        """
        fullest = self.tokens.amax(1) / self.tokens.mean(1).clamp(min=1e-30)
        values = torch.stack((fullest, self.dropped, *self.means.unbind(1)))  # the host waits for the device once
        load, dropped, entropy, balance, z = values.tolist()
        of_layers = {"moe_load": load, "moe_dropped": dropped, "moe_entropy": entropy}
        return {
            **{
                f"{name}/layer_{layer}": x
                for name, column in of_layers.items()
                for layer, x in zip(self.layers, column, strict=True)
            },
            **({"moe_aux_loss": sum(balance)} if self.balances else {}),
            "moe_z_loss": sum(z),
        }

    def update_biases(self, model: ModelShard, rate: float) -> None:
        """Update the biases for the choice of experts (arXiv:2408.15664).

        If an expert gets fewer tokens than the mean, its bias rises by `rate`; if it gets more, its bias falls by
        `rate`.
        """
        for router in routers_of(model):
            if router.token_experts is not None:
                continue
            tokens = self.tokens[router.index]
            router.expert_bias += rate * torch.sign(tokens.mean() - tokens).to(router.expert_bias)


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

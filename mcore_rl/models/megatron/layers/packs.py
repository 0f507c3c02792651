"""The parameters of a pack: everything that layers read beside the hidden states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_rl.data.batching import Microbatch
from mcore_rl.data.choices import ROUTED_EXPERTS
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.distributed.collectives import all_reduce
from mcore_rl.distributed.packs import slice_context_parallel
from mcore_rl.distributed.topology import Topology
from mcore_rl.models.megatron.kernels.packed_attention import AttentionPattern
from mcore_rl.models.megatron.layers.vision import PackImages

from megatron.core.packed_seq_params import PackedSeqParams


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


@dataclass(frozen=True)
class LaterTokens:
    """The tokens that a pack's hidden states lead to, for one layer that predicts tokens, on this rank.

    embedded: [T / CP], the token whose embedding the layer reads; any token where the row ends before it.
    predicted: [T / CP], the token that it predicts.
    weight: [T / CP], fp32, the token's factor in the loss; 0 where the row ends before it.
    """

    embedded: Tensor
    predicted: Tensor
    weight: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return all tensors in the order of the constructor's arguments."""
        return self.embedded, self.predicted, self.weight


@dataclass
class PackParams(PackedSeqParams):
    """Megatron's parameters of a pack, plus the data that this package's layers need.

    visible: the keys that the queries see.
    positions: [T / CP], for each of the rank's tokens, its position in its row; [T / CP, 3] in a pack with images.
    cu_seqlens: [segments + 1], cumulative lengths of the padded segments, on the device, for Transformer Engine's
        attention. None if Transformer Engine's attention is not used, or if segments share a prefix.
    routed: the tokens that routers of experts see.
    is_token: [T / CP], 1 for each of the rank's tokens and 0 for padding, in the model's precision. None if padding
        need not be zero.
    images: the images of the pack, on the first stage of a model with a vision tower; otherwise None.
    chosen: for each layer, from 0, whose indexer has run: the keys that it chose for the rank's tokens
        (`attention.sparse`), or None if the tokens see all previous keys.
    recorded: for each layer, from 0, the choices of its indexer that are to be made again, [T / CP, size], with −1 as
        in `CHOSEN_KEYS`; empty if nothing is replayed.
    later: for each layer that predicts further tokens (`token_prediction`), the tokens that it reads and predicts; on
        the last stage in training, otherwise empty.
    token_ids: [T / CP], the rank's tokens.
    shared: keys and values [T / CP, 1, groups / TP, d], by the number of the layer, from 0, that has computed them for
        later layers of the chunk too.
    per_layer: the layers' own inputs, [T / CP (/ TP with SP), 1, layers, size]; None if they have none.
    """

    visible: AttentionPattern | None = None
    positions: Tensor | None = None
    cu_seqlens: Tensor | None = None
    routed: RoutedTokens | None = None
    is_token: Tensor | None = None
    images: PackImages | None = None
    chosen: dict[int, Tensor | None] = field(default_factory=dict)
    recorded: dict[int, Tensor] = field(default_factory=dict)
    later: list[LaterTokens] = field(default_factory=list)
    token_ids: Tensor | None = None
    shared: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    per_layer: Tensor | None = None

    def choice(
        self,
        layer: int,
        choose: Callable[[], Tensor | None],
        of_rank: Callable[[Tensor | None], Tensor | None] = lambda chosen: chosen,
    ) -> Tensor | None:
        """Return the keys that a layer's indexer chooses for this pack; None if the tokens see all previous keys.

        They are chosen once for a pack: a recomputed layer must see the keys of the forward pass.

        Args:
            choose: function that calls the indexer.
            of_rank: function from the choice to the part of it that this rank needs.
        """
        if layer not in self.chosen:
            self.chosen[layer] = of_rank(self.replayed(layer, choose()))
        return self.chosen[layer]

    def replayed(self, layer: int, chosen: Tensor | None) -> Tensor | None:
        """Return the choices [T / CP, …] of a layer's indexer, with the recorded ones in place of those that are known.

        Args:
            chosen: what the indexer chooses now; None if no row is so long that it chooses.
        """
        if chosen is None or layer not in self.recorded:
            return chosen
        recorded = self.recorded[layer][:, : chosen[0].numel()].view_as(chosen)
        return torch.where((recorded >= 0).flatten(1).any(1).view(-1, *[1] * (chosen.ndim - 1)), recorded, chosen)


def position_factors(scale: Callable[[Tensor], Tensor], pack: PackParams | None) -> Tensor:
    """Return the factors of the queries, [T / CP, 1, 1], which `scale` computes from the tokens' positions."""
    assert pack is not None and pack.positions is not None, "attention runs on packs"
    return scale(pack.positions)[:, None, None]


def later_tokens(microbatch: Microbatch, depth: int, topology: Topology) -> list[LaterTokens]:
    """Return the later tokens for layers 1 to `depth`, in host memory."""
    data, layout = microbatch.data, microbatch.layout

    def own(rows: Tensor) -> Tensor:
        return slice_context_parallel(layout.pack_rows(rows), layout, topology.context.rank)

    ids = data["input_ids"]
    return [
        LaterTokens(own(_ahead(ids, k)), own(_ahead(ids, k + 1)), own(weights_of_predictions(data, k)))
        for k in range(1, depth + 1)
    ]


def _ahead(rows: Tensor, count: int) -> Tensor:
    """Return for each place of the rows [N, S] the value `count` places later; 0 beyond the last column."""
    return F.pad(rows[:, count:], (0, min(count, rows.shape[1])))


def weights_of_predictions(data: BatchedDataDict[Any], k: int) -> Tensor:
    """Return for each token of the rows, [N, S] fp32, the factor of the token that layer `k` predicts there.

    It is the product of that token's `token_mask` and of its row's `sample_mask`; 0 if the row ends before.
    """
    mask = _ahead(data["token_mask"].float(), k + 1) * data["sample_mask"].float()[:, None]
    places = torch.arange(mask.shape[1]) + k + 1
    return mask * (places < data["input_lengths"][:, None])

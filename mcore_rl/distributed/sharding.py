"""Which rows of a batch go to which shard, and into which of its microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NotRequired, TypedDict

from mcore_rl.distributed.bin_packing import Bin, assign, pack, split_until_divisible
from mcore_rl.distributed.pack_layout import round_up
from mcore_rl.errors import ContractError


class SequencePackingArgs(TypedDict):
    """Sharding into packs.

    max_tokens_per_microbatch: capacity of a pack.
    input_lengths_key: the entry that holds each row's tokens, [B].
    sequence_length_pad_multiple: each sequence is padded to a multiple of this in its pack.
    input_key, algorithm: the entry that holds the tokens, and the name of a packing algorithm; taken for the
        reference's sake, whose algorithms all fill packs of the same capacity. Here there is one (`bin_packing.pack`).
    """

    max_tokens_per_microbatch: int
    input_key: NotRequired[str]
    input_lengths_key: NotRequired[str]
    algorithm: NotRequired[str]
    sequence_length_pad_multiple: NotRequired[int]


class DynamicBatchingArgs(TypedDict):
    """Sharding into padded microbatches of rows of like lengths.

    max_tokens_per_microbatch: rows times their common width, at most.
    input_key: the entry that holds the tokens; taken for the reference's sake.
    input_lengths_key: the entry that holds each row's tokens, [B].
    sequence_length_round: widths are rounded up to a multiple of this.
    """

    max_tokens_per_microbatch: int
    input_key: NotRequired[str]
    input_lengths_key: NotRequired[str]
    sequence_length_round: NotRequired[int]


@dataclass(frozen=True)
class MicrobatchPlan:
    """The microbatches of one shard of one global batch.

    rows: of each microbatch, in the order in which the shard holds them.
    lengths: padded tokens of each pack, or the width of each padded microbatch.
    """

    rows: list[list[int]]
    lengths: list[int]

    @property
    def boundaries(self) -> list[list[int]]:
        """[start, end) of each microbatch among the shard's rows of this batch."""
        ends = [0]
        for rows in self.rows:
            ends.append(ends[-1] + len(rows))
        return [[start, end] for start, end in pairwise(ends)]


def even_parts(rows: range, count: int) -> list[range]:
    """Parts of ⌈rows / count⌉ in order; the last ones may be smaller, or empty."""
    size = -(-len(rows) // count)
    return [rows[i * size : (i + 1) * size] for i in range(count)]


def plan_microbatches(
    lengths: Sequence[int],
    rows: range,
    shards: int,
    dynamic: DynamicBatchingArgs | None,
    packing: SequencePackingArgs | None,
) -> list[MicrobatchPlan]:
    """Each shard's microbatches of the batch `rows`, by one of the two kinds of arguments.

    Raises:
        ContractError: fewer rows than shards, or a row that fits no microbatch.
    """
    if len(rows) < shards:
        raise ContractError(f"{len(rows)} rows leave some of {shards} shards without any")
    if packing is not None:
        cost = [round_up(lengths[row], packing.get("sequence_length_pad_multiple", 1)) for row in rows]
        shards_of_bins = pack(cost, cost, packing["max_tokens_per_microbatch"], shards)
    else:
        assert dynamic is not None
        cost = [round_up(lengths[row], dynamic.get("sequence_length_round", 1)) for row in rows]
        bins = _of_like_lengths(cost, dynamic["max_tokens_per_microbatch"])
        split_until_divisible(bins, cost, shards)
        shards_of_bins = assign(bins, cost, shards)
    length_of = sum if packing is not None else max
    plans = []
    for boxes in shards_of_bins:
        filled = [sorted(box) for box in boxes if box]
        lengths_of_boxes = [length_of(cost[unit] for unit in box) for box in filled]
        plans.append(MicrobatchPlan([[rows[unit] for unit in box] for box in filled], lengths_of_boxes))
    return plans


def _of_like_lengths(widths: Sequence[int], capacity: int) -> list[Bin]:
    """Bins of units next to one another in length, whose number times the longest is at most `capacity`."""
    bins: list[Bin] = []
    for unit in sorted(range(len(widths)), key=lambda unit: -widths[unit]):
        if widths[unit] > capacity:
            raise ContractError(f"a row of {widths[unit]} tokens does not fit a microbatch of {capacity}")
        if bins and widths[bins[-1][0]] * (len(bins[-1]) + 1) <= capacity:
            bins[-1].append(unit)
        else:
            bins.append([unit])
    return bins

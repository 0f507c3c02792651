"""Rollouts of a step: conversations, their rewards and lengths, and the training batch made from the conversations.

Every rank has the rewards and lengths of all samples. The tokens stay on the rank that generated them, until
`exchange_rows` sends each row to the replica that trains on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int32, Shaped, UInt8
from torch import Tensor

from mcore_rl import platform
from mcore_rl.data.choices import RecordedChoice, padded_choices
from mcore_rl.data.datasets import Prompt
from mcore_rl.data.images import PlacedImage
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.distributed.collectives import InternedObjects, all_reduce, broadcast_in_replica, gather_from_replicas
from mcore_rl.distributed.sampling_mask import KeptTokens
from mcore_rl.distributed.topology import ParallelDimension, Topology
from mcore_rl.environments.interfaces import MessageLog, Step
from mcore_rl.errors import ContractError


@dataclass(frozen=True)
class TokenColumn:
    """Description of a column [B, S, …] of a batch. A token's values have `shape`; `padding` fills the ends of rows."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    padding: float = 0

    @property
    def nbytes(self) -> int:
        """Number of bytes that a token's values take in this column."""
        return math.prod(self.shape) * self.dtype.itemsize


def packed(
    rows: Mapping[str, Shaped[Tensor, "B S ..."]], lengths: Sequence[int], columns: Sequence[TokenColumn]
) -> UInt8[Tensor, "tokens bytes"]:
    """Return the values of all columns, without padding, as bytes: a row of bytes for each token, sample after sample.

    Args:
        rows: right-padded columns; may be empty if `lengths` is empty.

    Raises:
        ContractError: the values of a column do not have the column's dtype or shape.
    """
    if not lengths:
        return torch.empty(0, bytes_of(columns), dtype=torch.uint8)
    parts = []
    for column in columns:
        values = rows[column.name]
        if (values.dtype, tuple(values.shape[2:])) != (column.dtype, column.shape):
            raise ContractError(
                f"packed: {column.name} must be {column.dtype} of shape [rows, length, *{column.shape}], got "
                f"{values.dtype} of shape {tuple(values.shape)}"
            )
        flat = values[_is_token(lengths, values.shape[1])]
        parts.append(flat.reshape(len(flat), math.prod(column.shape)).contiguous().view(torch.uint8))
    return torch.cat(parts, dim=1)


def bytes_of(columns: Sequence[TokenColumn]) -> int:
    """Return the number of bytes that a token's values take in all columns together."""
    return sum(column.nbytes for column in columns)


def unpacked(
    tokens: UInt8[Tensor, "tokens bytes"], lengths: Sequence[int], columns: Sequence[TokenColumn]
) -> dict[str, Shaped[Tensor, "B S ..."]]:
    """Invert `packed`: return the columns, right-padded to the length of the longest row (at least 1)."""
    width = max(lengths, default=1)
    is_token, rows = _is_token(lengths, width), dict[str, Tensor]()
    parts = tokens.split([column.nbytes for column in columns], dim=1)
    for column, part in zip(columns, parts, strict=True):
        shape = (len(lengths), width, *column.shape)
        rows[column.name] = torch.full(shape, column.padding, dtype=column.dtype)
        # The copy is contiguous and aligned for every dtype.
        values = part.clone(memory_format=torch.contiguous_format).view(column.dtype)
        rows[column.name][is_token] = values.view(len(part), *column.shape)
    return rows


def _is_token(lengths: Sequence[int], width: int) -> Tensor:
    """Return a mask [B, `width`] that is True for tokens and False for padding."""
    return torch.arange(width) < torch.tensor(lengths, dtype=torch.long)[:, None]


def exchange_rows(
    own: Mapping[str, Shaped[Tensor, "B S ..."]],
    held: Sequence[int],
    wanted: Sequence[Sequence[int]],
    lengths: Sequence[int],
    columns: Sequence[TokenColumn],
    topology: Topology,
) -> dict[str, Shaped[Tensor, "b s ..."]]:
    """Send each row to the replica that wants it; return this replica's wanted rows on all of its ranks. Collective.

    Args:
        own: the rows that the first rank of this replica has, as right-padded columns on the host. Each row of the
            global batch is on exactly one replica.
        held: for each row in `own`, its index in the global batch.
        wanted: for each replica, the indices of the rows that it receives, in the order of the result; the same on all
            ranks.
        lengths: number of tokens of each row of the global batch.
        columns: the columns to send.
    """
    sent = packed(own, [lengths[row] for row in held], columns)
    own_lengths = [lengths[row] for row in wanted[topology.data.rank]]
    return unpacked(_exchange_to_all_ranks(sent, held, wanted, lengths, topology), own_lengths, columns)


def exchange_kept_tokens(
    own: Sequence[KeptTokens | None],
    held: Sequence[int],
    wanted: Sequence[Sequence[int]],
    sizes: Sequence[RowSizes],
    topology: Topology,
) -> list[KeptTokens]:
    """Send each row's kept tokens to the replica that wants the row; see `exchange_rows`. Collective.

    The kept tokens are those that top-k, top-p and min-p left for each position.

    Args:
        sizes: sizes of each row of the global batch.
    """
    lengths = [size.tokens for size in sizes]
    found = [KeptTokens.none(0) if kept is None else kept for kept in own]
    sent = KeptTokens.concatenated([kept.padded(lengths[row]) for row, kept in zip(held, found, strict=True)])
    counts = _exchange_to_all_ranks(sent.counts[:, None], held, wanted, lengths, topology)
    kept_tokens = [size.kept_tokens for size in sizes]
    ids = _exchange_to_all_ranks(sent.ids[:, None], held, wanted, kept_tokens, topology)
    return KeptTokens(counts[:, 0], ids[:, 0]).split([lengths[row] for row in wanted[topology.data.rank]])


def _exchange_to_all_ranks(
    own: Shaped[Tensor, "own_tokens values"],
    held: Sequence[int],
    wanted: Sequence[Sequence[int]],
    lengths: Sequence[int],
    topology: Topology,
) -> Shaped[Tensor, "wanted_tokens values"]:
    """Call `exchange_tokens`; return its result on the host, on every rank of the replica. Collective."""
    size = sum(lengths[row] for row in wanted[topology.data.rank])
    found = torch.empty(size, own.shape[1], dtype=own.dtype, device=platform.device())
    if topology.leads_replica:
        found = exchange_tokens(own.to(platform.device()), held, wanted, lengths, topology.data)
    return broadcast_in_replica(found, topology).cpu()


def exchange_tokens(
    own: Shaped[Tensor, "own_tokens values"],
    held: Sequence[int],
    wanted: Sequence[Sequence[int]],
    lengths: Sequence[int],
    replicas: ParallelDimension,
) -> Shaped[Tensor, "wanted_tokens values"]:
    """Send the tokens of each row to the replica that wants the row; return the tokens of this replica's wanted rows.

    Collective over the first ranks of all replicas: an all-reduce of 8 bytes per row of the global batch, and one
    all-to-all.

    Args:
        own: tokens of the rows that this replica has, row after row. Exactly one replica has each row.
        held: numbers of the rows in `own`.
        wanted: for each replica, the numbers of the rows that it receives; the same on all replicas.
        lengths: number of tokens of each row of the global batch.
    """
    holders = torch.zeros(len(lengths), dtype=torch.long, device=own.device)
    holders[list(held)] = replicas.rank
    holder_of = all_reduce(holders, replicas.group).tolist()
    rows = dict(zip(held, own.split([lengths[row] for row in held]), strict=True))
    going = [[row for row in some if holder_of[row] == replicas.rank] for some in wanted]
    coming = [[row for row in wanted[replicas.rank] if holder_of[row] == rank] for rank in range(replicas.size)]
    sizes_in, sizes_out = ([sum(lengths[row] for row in some) for some in parts] for parts in (coming, going))
    sent = torch.cat([own[:0], *(rows[row] for some in going for row in some)])
    received = sent
    if replicas.size > 1:
        received = own.new_empty(sum(sizes_in), own.shape[1])
        torch.distributed.all_to_all_single(
            received, sent, output_split_sizes=sizes_in, input_split_sizes=sizes_out, group=replicas.group
        )
    arrived = [row for some in coming for row in some]
    by_row = dict(zip(arrived, received.split([lengths[row] for row in arrived]), strict=True))
    return torch.cat([own[:0], *(by_row[row] for row in wanted[replicas.rank])])


class RowSizes(NamedTuple):
    """Numbers of tokens of a row: all, those that carry loss, and those that the sampler kept at all positions."""

    tokens: int
    counted: int
    kept_tokens: int


@dataclass(frozen=True)
class RolloutSummary:
    """The part of a rollout that every rank has: everything except its tokens and texts.

    A field with the same name as a field of `Rollout` has the same meaning. The exception is `kept_tokens`: here it is
    the number of tokens that top-k, top-p and min-p left, summed over all positions. Lengths are numbers of tokens, of
    all rows together.

    row_sizes: sizes of each row of the rollout; empty if it has one row.
    """

    prompt: int
    sample_id: int
    reward: float
    rewards: dict[str, float]
    error: str | None
    truncated: bool
    turns: int
    num_tokens: int
    response_length: int
    longest_response: int
    weight_versions: list[tuple[int, int]]
    kept_tokens: int = 0
    row_sizes: list[RowSizes] = field(default_factory=list)

    @property
    def rows(self) -> list[RowSizes]:
        """Sizes of each row of the rollout."""
        return self.row_sizes or [RowSizes(self.num_tokens, self.response_length, self.kept_tokens)]

    @property
    def weight_version(self) -> int:
        """Oldest of the weight versions that generated tokens of the rollout; 0 if the rollout has no response."""
        return min((version for version, _ in self.weight_versions), default=0)


def are_judged(outcomes: Sequence[RolloutSummary]) -> Bool[Tensor, " samples"]:
    """Return a mask: True for judged samples, False for samples that could not be judged and have no reward."""
    return torch.tensor([outcome.error is None for outcome in outcomes], dtype=torch.bool)


LENGTHS = ("turns", "num_tokens", "response_length", "longest_response", "kept_tokens")
NUMBERS = ("prompt", "sample_id", "reward", "truncated", *LENGTHS)
EXTRA_NUMBERS = 3
"""Numbers after `NUMBERS`: lengths of `weight_versions` and `row_sizes`, and whether there is an error."""


class SummaryExchange:
    """Exchanges the summaries of rollouts between the replicas. All ranks must create this object.

    Summaries are sent as numbers; texts are sent only for errors and for new names of rewards.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology, self._names = topology, InternedObjects()

    def everyones(self, own: Mapping[int, RolloutSummary], total: int) -> list[RolloutSummary]:
        """Return the list of the summaries of all replicas' rollouts, on every rank. Collective.

        Args:
            own: summaries of this replica's rollouts. The key is the index of the summary in the returned list. Only
                the values on the first rank of a replica are used.
            total: number of rollouts of all replicas.
        """
        if not self.topology.leads_replica:
            own = {}
        named = self._names.gather(sorted({name for outcome in own.values() for name in outcome.rewards}))
        names = sorted({name for part in named for name in part})
        columns = [[*_numbers(outcome), *_named(outcome, names)] for outcome in own.values()]
        table = _summed(own, columns, total, len(NUMBERS) + EXTRA_NUMBERS + 2 * len(names))
        of_versions, of_rows, has_error = table[:, len(NUMBERS) : len(NUMBERS) + EXTRA_NUMBERS].long().unbind(1)
        versions = _lists_of_all({place: outcome.weight_versions for place, outcome in own.items()}, of_versions, 2)
        rows = _lists_of_all({place: outcome.row_sizes for place, outcome in own.items()}, of_rows, 3)
        errors = dict[int, str]()
        if bool(has_error.any()):  # sent as objects, only after failures
            told = {place: outcome.error for place, outcome in own.items() if outcome.error is not None}
            errors = {place: text for part in gather_from_replicas(told, self.topology) for place, text in part.items()}
        return [
            _outcome(row, names, errors.get(place), versions[place], rows[place])
            for place, row in enumerate(table.tolist())
        ]


def _lists_of_all(
    own: Mapping[int, Sequence[tuple[int, ...]]], counts: Tensor, width: int
) -> list[list[tuple[int, ...]]]:
    """Gather a list of tuples of `width` integers for each rollout of all replicas. Collective, unless all are empty.

    Args:
        own: the lists of this rank's rollouts.
        counts: for each rollout of all replicas, the length of its list.
    """
    starts = (counts.cumsum(0) - counts).tolist()
    rows = {starts[place] + n: entry for place, entries in own.items() for n, entry in enumerate(entries)}
    if not (total := int(counts.sum())):
        return [[] for _ in starts]
    table = _summed(rows, list(rows.values()), total, width).long()
    return [list(map(tuple, part.tolist())) for part in table.split(counts.tolist())]


def _summed(places: Mapping[int, object], rows: Sequence[object], total: int, width: int) -> Tensor:
    """Return a table of all ranks' rows, [total, width] fp64, on the host of every rank. Collective.

    Args:
        places: for each of this rank's `rows`, its index in the table.
    """
    table = torch.zeros(total, width, dtype=torch.float64)
    if rows:
        table[list(places)] = torch.tensor(rows, dtype=torch.float64)
    return all_reduce(table.to(platform.device()), torch.distributed.group.WORLD).cpu()


def _numbers(outcome: RolloutSummary) -> list[float]:
    numbers = [float(getattr(outcome, name)) for name in NUMBERS]
    return [*numbers, len(outcome.weight_versions), len(outcome.row_sizes), float(outcome.error is not None)]


def _named(outcome: RolloutSummary, names: list[str]) -> list[float]:
    """Return two numbers for each name: whether the sample has a reward with this name (1 or 0), and the reward."""
    return [number for name in names for number in (float(name in outcome.rewards), outcome.rewards.get(name, 0.0))]


def _outcome(
    row: list[float],
    names: list[str],
    error: str | None,
    versions: list[tuple[int, ...]],
    rows: list[tuple[int, ...]],
) -> RolloutSummary:
    prompt, sample_id, reward, truncated, *lengths = row[: len(NUMBERS)]
    named = row[len(NUMBERS) + EXTRA_NUMBERS :]
    there = zip(names, named[::2], named[1::2], strict=True)
    return RolloutSummary(
        prompt=int(prompt),
        sample_id=int(sample_id),
        reward=reward,
        rewards={name: value for name, is_there, value in there if is_there},
        error=error,
        truncated=bool(truncated),
        weight_versions=[(version, tokens) for version, tokens in versions],
        row_sizes=[RowSizes(*sizes) for sizes in rows],
        **dict(zip(LENGTHS, map(int, lengths), strict=True)),
    )


Numbers = Sequence[float] | np.ndarray[Any, Any]


def _make_arrays(row: TokenRow | Rollout) -> None:
    row.input_ids, row.token_mask = np.asarray(row.input_ids, np.int32), np.asarray(row.token_mask, bool)
    row.logprobs = np.asarray(row.logprobs, np.float32)


@dataclass(eq=False)  # arrays have no truth value: equal is the same object
class TokenRow:
    """A row of a training batch: tokens that the model read and generated. The fields are those of `Rollout`."""

    input_ids: Int32[np.ndarray, " tokens"]
    token_mask: Bool[np.ndarray, " tokens"]
    logprobs: Float32[np.ndarray, " tokens"]
    token_rewards: list[tuple[int, float]] = field(default_factory=list)
    choices: Mapping[str, torch.Tensor] = field(default_factory=dict)
    kept_tokens: KeptTokens | None = None
    images: tuple[PlacedImage, ...] = ()

    def __post_init__(self) -> None:
        _make_arrays(self)

    @property
    def sizes(self) -> RowSizes:
        kept = 0 if self.kept_tokens is None else len(self.kept_tokens.ids)
        return RowSizes(len(self.input_ids), int(self.token_mask.sum()), kept)


@dataclass(eq=False)
class Rollout:
    """A conversation: a prompt, responses, and observations between the responses.

    A rollout has one row of tokens, or several if the policy was asked with contexts of which none extends the other.
    A token of a response carries loss in one row only.

    input_ids, token_mask, logprobs: id, mask and log-probability of each token of the first row. The mask is True for
        tokens of responses; all other tokens have a log-probability of 0. They may be given as any sequences, which
        become arrays of these types.
    further_rows: rows after the first one.
    truncated: whether the last response reached the limit of new tokens; with several rows, that of any row.
    error: reason why the rollout could not be judged; None if it was judged.
    """

    prompt: int
    """Index of the prompt in the dataset."""
    sample_id: int
    """Number of the sample among all samples of the run; with the seed, it determines the random numbers."""
    input_ids: Int32[np.ndarray, " tokens"]
    token_mask: Bool[np.ndarray, " tokens"]
    logprobs: Float32[np.ndarray, " tokens"]
    reward: float = 0.0
    truncated: bool = False
    turns: int = 0
    response_lengths: list[int] = field(default_factory=list)
    """Number of tokens of each response."""
    error: str | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    """Rewards by name, if the judge gives several. The rollout's reward is their weighted sum."""
    weight_versions: list[tuple[int, int]] = field(default_factory=list)
    """Weights that generated the responses' tokens, in order, as (version, number of tokens). The version of weights is
    the number of trained steps."""
    message_log: MessageLog = field(default_factory=list)
    token_rewards: list[tuple[int, float]] = field(default_factory=list)
    """Rewarded tokens as (position, reward); the rewards sum to the reward of the rollout."""
    choices: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Recorded choices of the tokens by name (`CHOICES`), [tokens, layers, size]."""
    kept_tokens: KeptTokens | None = None
    """Tokens that the sampler kept at each position up to the end of the last response; None without sampling mask."""
    images: tuple[PlacedImage, ...] = ()
    """Images of the first row."""
    answer: str | None = None
    """Answer that the judge found in the last response."""
    further_rows: list[TokenRow] = field(default_factory=list)
    session: list[dict[str, Any]] = field(default_factory=list)
    """Turns of an agent's session, for samples.jsonl (`SessionTree.logged`)."""

    def __post_init__(self) -> None:
        _make_arrays(self)

    @classmethod
    def begin(cls, index: int, sample_id: int, prompt: Prompt) -> Rollout:
        """Return a rollout that has only its prompt, and no response yet."""
        ids, size, log = np.array(prompt.input_ids, np.int32), len(prompt.input_ids), prompt.message_log
        mask, logprobs = np.zeros(size, bool), np.zeros(size, np.float32)
        return cls(index, sample_id, ids, mask, logprobs, message_log=log, images=tuple(prompt.images))

    def add_response(self, tokens: Numbers, logprobs: Numbers, kept: KeptTokens | None = None) -> None:
        if kept is not None:
            before = KeptTokens.none(0) if self.kept_tokens is None else self.kept_tokens
            self.kept_tokens = before.padded(len(self.input_ids)) + kept
        self._add(tokens, True, logprobs)
        self.response_lengths = [*self.response_lengths, len(tokens)]

    def add_observation(self, tokens: Numbers) -> None:
        self._add(tokens, False, np.zeros(len(tokens), np.float32))

    def _add(self, tokens: Numbers, is_response: bool, logprobs: Numbers) -> None:
        self.input_ids = np.concatenate([self.input_ids, np.asarray(tokens, np.int32)])
        self.token_mask = np.concatenate([self.token_mask, np.full(len(tokens), is_response)])
        self.logprobs = np.concatenate([self.logprobs, np.asarray(logprobs, np.float32)])

    def add_reward(self, step: Step) -> None:
        """Add the rewards in `step`, the judgement of the last response.

        `step.reward` goes to the last token of this response, and `step.token_rewards` go to one token each.
        """
        length = self.response_lengths[-1]
        first = len(self.input_ids) - length
        of_tokens = [(first + t, reward) for t, reward in enumerate(step.token_rewards) if reward]
        if len(step.token_rewards) not in (0, length):
            self.error = self.error or f"{len(step.token_rewards)} token_rewards for a response of {length} tokens"
            return
        self.reward += math.fsum([step.reward, *(reward for _, reward in of_tokens)])
        self.token_rewards = [*self.token_rewards, *of_tokens]
        if step.reward:
            self.token_rewards.append((len(self.input_ids) - 1, step.reward))

    @property
    def rows(self) -> list[TokenRow]:
        """All rows of the rollout."""
        own = self.input_ids, self.token_mask, self.logprobs, self.token_rewards, self.choices, self.kept_tokens
        return [TokenRow(*own, images=self.images), *self.further_rows]

    @property
    def outcome(self) -> RolloutSummary:
        """Summary of this rollout."""
        sizes = [row.sizes for row in self.rows]
        generated = sum(size.counted for size in sizes)
        return RolloutSummary(
            prompt=self.prompt,
            sample_id=self.sample_id,
            reward=self.reward,
            rewards=self.rewards,
            error=self.error,
            truncated=self.truncated,
            turns=self.turns,
            num_tokens=sum(size.tokens for size in sizes),
            response_length=generated,
            longest_response=max(self.response_lengths, default=generated),
            kept_tokens=sum(size.kept_tokens for size in sizes),
            weight_versions=self.weight_versions,
            row_sizes=sizes if self.further_rows else [],
        )


@dataclass(frozen=True)
class RolloutBatch:
    """Rollouts of all replicas. Every rank has all summaries; the tokens are on the replica that generated them.

    outcomes: summaries of all rollouts, in order.
    own: rollouts that this rank has run. Each key is a rollout's index in `outcomes`. One replica runs each rollout,
        and the replica's first rank has the complete rollout.
    dropped: summaries of further rollouts. They were generated, but are not trained on (dynamic sampling).
    """

    outcomes: Sequence[RolloutSummary] = ()
    own: Mapping[int, Rollout] = field(default_factory=dict)
    dropped: Sequence[RolloutSummary] = ()

    @property
    def generated(self) -> list[RolloutSummary]:
        """Summaries of all rollouts that were generated, including the dropped ones."""
        return [*self.outcomes, *self.dropped]

    @classmethod
    def from_all_ranks(
        cls,
        rollouts: Sequence[Rollout],
        replicas: ParallelDimension = ParallelDimension(),  # noqa: B008 (frozen)
    ) -> RolloutBatch:
        """Return a batch of `rollouts`, which are the rollouts of all replicas. Every rank passes the whole list.

        The batch divides this list among the replicas: each replica has consecutive rollouts.
        """
        own = {place: rollouts[place] for place in replicas.part_of(range(len(rollouts)))}
        return cls([rollout.outcome for rollout in rollouts], own)

    def select(self, places: Sequence[int]) -> RolloutBatch:
        """Return a batch with the rollouts at `places`, in this order; all other rollouts become `dropped`."""
        own = {new: self.own[old] for new, old in enumerate(places) if old in self.own}
        kept = set(places)
        dropped = [outcome for place, outcome in enumerate(self.outcomes) if place not in kept]
        return RolloutBatch([self.outcomes[place] for place in places], own, [*self.dropped, *dropped])

    def __add__(self, other: RolloutBatch) -> RolloutBatch:
        behind = {len(self.outcomes) + place: rollout for place, rollout in other.own.items()}
        dropped = [*self.dropped, *other.dropped]
        return RolloutBatch([*self.outcomes, *other.outcomes], {**self.own, **behind}, dropped)

    def __len__(self) -> int:
        return len(self.outcomes)


def token_columns(pad_token_id: int, recorded: Sequence[RecordedChoice] = ()) -> list[TokenColumn]:
    """Return descriptions of those columns of `to_batch` that have a value for each token.

    Args:
        recorded: descriptions of the recorded choices.
    """
    columns = [
        TokenColumn("input_ids", torch.long, padding=pad_token_id),
        TokenColumn("token_mask", torch.float32),
        TokenColumn("generation_logprobs", torch.float32),
    ]
    return [*columns, *(TokenColumn(choice.name, choice.dtype, choice.shape, padding=-1) for choice in recorded)]


def to_batch(
    rollouts: Sequence[Rollout], pad_token_id: int, recorded: Sequence[RecordedChoice] = ()
) -> BatchedDataDict[Any]:
    """Return a batch with right-padded rows: the rows of each rollout, rollout after rollout.

    The columns are input_ids, token_mask, generation_logprobs [B, S], input_lengths and sample_mask [B], and the
    recorded choices that all rollouts have.

    Args:
        recorded: descriptions of the recorded choices, for rollouts whose request failed: their choices are unknown.
    """
    rows = [row for rollout in rollouts for row in rollout.rows]
    input_ids = _padded([r.input_ids for r in rows], torch.long, pad_token_id)
    batch: BatchedDataDict[Any] = BatchedDataDict(
        input_ids=input_ids,
        token_mask=_padded([r.token_mask for r in rows], torch.float32),
        generation_logprobs=_padded([r.logprobs for r in rows], torch.float32),
        input_lengths=torch.tensor([len(r.input_ids) for r in rows], dtype=torch.long),
        sample_mask=torch.ones(len(rows)),
    )
    choices = [_choices_of(row, rollout, recorded) for rollout in rollouts for row in rollout.rows]
    batch.update(padded_choices(choices, input_ids.shape[1]))  # the model never read the last observation
    return batch


def _choices_of(row: TokenRow, rollout: Rollout, recorded: Sequence[RecordedChoice]) -> Mapping[str, torch.Tensor]:
    """Return the recorded choices for the row's tokens; all −1 if the rollout has no response."""
    if row.choices or rollout.turns:
        return row.choices
    return {choice.name: choice.unknown(len(row.input_ids)) for choice in recorded}


def rewards_of_tokens(rollouts: Sequence[Rollout], data: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the reward of each token, [B, S] fp32.

    In a row without token rewards, the last response token has the whole reward of the rollout: each row of a rollout
    ends in the rollout's outcome.

    Args:
        data: the result of `to_batch` for these rollouts.
    """
    rewards, last = torch.zeros_like(data["token_mask"]), last_response_tokens(data).tolist()
    rows = ((rollout, row) for rollout in rollouts for row in rollout.rows)
    for number, (rollout, row) in enumerate(rows):
        for position, reward in row.token_rewards or [(last[number], rollout.reward)]:
            rewards[number, position] += reward
    return rewards


@dataclass(frozen=True)
class RowsOfRollouts:
    """The rows of a step's rollouts. Rows are numbered rollout after rollout.

    sizes: sizes of each row.
    rollout_of: for each row, the number of its rollout.
    """

    sizes: Sequence[RowSizes]
    rollout_of: Sequence[int]

    @classmethod
    def of(cls, outcomes: Sequence[RolloutSummary]) -> RowsOfRollouts:
        pairs = [(size, place) for place, outcome in enumerate(outcomes) for size in outcome.rows]
        return cls([size for size, _ in pairs], [place for _, place in pairs])

    def of_rollouts(self, rollouts: Sequence[int]) -> list[int]:
        """Return the numbers of the rows of `rollouts`, rollout after rollout."""
        rows: dict[int, list[int]] = {}
        for row, rollout in enumerate(self.rollout_of):
            rows.setdefault(rollout, []).append(row)
        return [row for rollout in rollouts for row in rows[rollout]]

    def weights(self) -> Float[Tensor, " rows"] | None:
        """Return the column `sample_weights`; None if each rollout has one row.

        The weight of a row is its share of the rollout's tokens that carry loss. Rows of a rollout without such tokens
        have equal weights.
        """
        if len(self.rollout_of) == len(set(self.rollout_of)):
            return None
        counted = torch.tensor([size.counted for size in self.sizes], dtype=torch.float64)
        rollouts = torch.tensor(self.rollout_of)
        totals = torch.zeros(int(rollouts.max()) + 1, dtype=torch.float64).index_add_(0, rollouts, counted)
        rows = torch.zeros_like(totals).index_add_(0, rollouts, torch.ones_like(counted))
        totals, rows = totals[rollouts], rows[rollouts]
        return torch.where(totals > 0, counted / totals.clamp(min=1), 1 / rows).float()


def last_response_tokens(data: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the position of each row's last response token, [B]. If there is none, it is the row's last token.

    Args:
        data: the result of `to_batch`.
    """
    positions = torch.arange(data["token_mask"].shape[1])
    last = torch.where(data["token_mask"] > 0, positions, -1).amax(1)
    return torch.where(last < 0, data["input_lengths"] - 1, last)


def _padded(rows: Sequence[np.ndarray[Any, Any]], dtype: torch.dtype, padding: float = 0) -> torch.Tensor:
    if not rows:
        return torch.zeros(0, 1, dtype=dtype)
    tensors = [torch.tensor(row, dtype=dtype) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=padding)


def has_signal(
    rewards: Float[Tensor, "prompts group"], judged: Bool[Tensor, "prompts group"] | None = None
) -> Bool[Tensor, " prompts"]:
    """Return, for each group, whether its rewards differ.

    A group with equal rewards has no gradient (DAPO, arXiv:2503.14476, section 3.2).

    Args:
        judged: see `group_advantages`.
    """
    return differ(rewards, torch.ones_like(rewards, dtype=torch.bool) if judged is None else judged)


def differ(values: Float[Tensor, "... group"], counted: Bool[Tensor, "... group"]) -> Bool[Tensor, "..."]:
    """Return, for each group, whether its values differ; only values for which `counted` is True are compared."""
    high = torch.where(counted, values, -math.inf).amax(-1)
    return high > torch.where(counted, values, math.inf).amin(-1)

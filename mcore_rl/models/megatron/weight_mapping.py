"""Mappings between Megatron parameters and Hugging Face tensors, used in both directions."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from collections.abc import Mapping as Dictionary
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Shape = tuple[int, ...]


class TensorSource(Protocol):
    """A source of named tensors. Any rows and columns of a tensor can be read."""

    def read(self, name: str, rows: slice = slice(None), columns: slice | None = None) -> Tensor:
        """Return `rows` of the tensor `name`, and only the given `columns` if they are not None."""
        ...


@dataclass(frozen=True)
class Part:
    """A Hugging Face tensor, or some of its rows: `first` … `first + shape[0] − 1`."""

    name: str
    shape: Shape
    first: int = 0

    def read(self, source: TensorSource, rows: slice = slice(None), columns: slice | None = None) -> Tensor:
        """Return the given `rows` and `columns` of this part. Only these are read."""
        start, stop, _ = rows.indices(self.shape[0])
        return source.read(self.name, slice(self.first + start, self.first + stop), columns)


class Kind(ABC):
    """How a parameter is composed of Hugging Face tensors (`Part`), and sharded over tensor-parallel ranks.

    partition_dim: the dimension of the parameter that is sharded; None if every rank has the whole parameter.
    is_transposed: whether the parts are [in, out], the transpose of the parameter, which is [out, in].
    is_table: whether the rows of a layer's parameter are looked up, so that it is no matrix of a product.
    """

    partition_dim: int | None = 0
    is_transposed = False
    is_table = False

    @abstractmethod
    def read(self, parts: Sequence[Part], source: TensorSource, rank: int, size: int) -> Tensor:
        """Return the parameter's shard of rank `rank` of `size` ranks. Only this shard is read."""

    @abstractmethod
    def split(self, stacked: Tensor) -> list[Tensor]:
        """Return the parameter's parts, converted from the shards of all ranks; they are views if possible.

        Args:
            stacked: the shards, [number of ranks, …]; [1, …] if the parameter is not sharded.
        """

    def shard_shape(self, parts: Sequence[Part], size: int) -> Shape:
        """Return the shape of the parameter's shard on each of `size` ranks."""
        shape = [self._rows(parts, size), *parts[0].shape[1:]]
        if self.partition_dim is not None:
            shape[self.partition_dim] //= size
        return tuple(shape)

    def _rows(self, parts: Sequence[Part], size: int) -> int:
        return sum(part.shape[0] for part in parts)


def _share(total: int, rank: int, size: int) -> slice:
    return slice(rank * total // size, (rank + 1) * total // size)


class Replicated(Kind):
    """A parameter that is one part, and the same on every rank."""

    partition_dim = None

    def read(self, parts: Sequence[Part], source: TensorSource, rank: int, size: int) -> Tensor:
        return parts[0].read(source)

    def split(self, stacked: Tensor) -> list[Tensor]:
        return [stacked[0]]


class FirstRow(Replicated):
    """A parameter that is stored as the only row of a Hugging Face tensor. It is the same on every rank."""

    def read(self, parts: Sequence[Part], source: TensorSource, rank: int, size: int) -> Tensor:
        return parts[0].read(source)[0]

    def split(self, stacked: Tensor) -> list[Tensor]:
        return [stacked]

    def shard_shape(self, parts: Sequence[Part], size: int) -> Shape:
        return parts[0].shape[1:]


@dataclass(frozen=True)
class Stacked(Kind):
    """A parameter whose parts are concatenated along the rows. It is the same on every rank.

    rows: number of rows of each part.
    """

    rows: tuple[int, ...]
    partition_dim = None

    def read(self, parts: Sequence[Part], source: TensorSource, rank: int, size: int) -> Tensor:
        return torch.cat([part.read(source) for part in parts])

    def split(self, stacked: Tensor) -> list[Tensor]:
        return list(stacked[0].split(self.rows))


class Rows(Kind):
    """A parameter sharded by rows."""

    def read(self, parts: Sequence[Part], source: TensorSource, rank: int, size: int) -> Tensor:
        return parts[0].read(source, _share(parts[0].shape[0], rank, size))

    def split(self, stacked: Tensor) -> list[Tensor]:
        return [stacked.flatten(0, 1)]


@dataclass(frozen=True)
class Reshaped(Kind):
    """A parameter with one dimension, sharded; the Hugging Face tensor has the same values in another `shape`."""

    shape: Shape

    def read(self, parts: Sequence[Part], source: TensorSource, rank: int, size: int) -> Tensor:
        whole = parts[0].read(source).flatten()
        return whole[_share(len(whole), rank, size)]

    def split(self, stacked: Tensor) -> list[Tensor]:
        return [stacked.reshape(self.shape)]

    def shard_shape(self, parts: Sequence[Part], size: int) -> Shape:
        return (math.prod(self.shape) // size,)


class Columns(Kind):
    """A parameter sharded by columns: the weight of Megatron's RowParallelLinear."""

    partition_dim = 1

    def read(self, parts: Sequence[Part], source: TensorSource, rank: int, size: int) -> Tensor:
        return parts[0].read(source, columns=_share(parts[0].shape[1], rank, size))

    def split(self, stacked: Tensor) -> list[Tensor]:
        return [torch.cat(tuple(stacked), dim=1)]


@dataclass(frozen=True)
class Table(Columns):
    """A parameter whose rows are looked up. Its parts are concatenated along the rows. It is sharded by columns.

    rows: number of rows of each part.
    """

    rows: tuple[int, ...]
    is_table = True

    def read(self, parts: Sequence[Part], source: TensorSource, rank: int, size: int) -> Tensor:
        return torch.cat([super(Table, self).read([part], source, rank, size) for part in parts])

    def split(self, stacked: Tensor) -> list[Tensor]:
        return list(torch.cat(tuple(stacked), dim=1).split(self.rows))


def padded_vocab_size(vocab_size: int, tensor_parallel_size: int) -> int:
    """Return the number of rows of the padded embedding: a multiple of 128, as in Megatron, and of the TP size.

    The result is the same for all tensor-parallel sizes that divide 128, so a checkpoint fits all of these layouts.
    """
    multiple = 128
    while multiple % tensor_parallel_size:
        multiple += 128
    return -(-vocab_size // multiple) * multiple


@dataclass(frozen=True)
class Vocabulary(Kind):
    """A parameter with one row per token of the vocabulary. It is padded at the end and sharded by rows."""

    vocab_size: int

    def read(self, parts: Sequence[Part], source: TensorSource, rank: int, size: int) -> Tensor:
        (part,) = parts
        wanted = _share(padded_vocab_size(self.vocab_size, size), rank, size)
        start, stop = (min(edge, self.vocab_size) for edge in (wanted.start, wanted.stop))
        rows = part.read(source, slice(start, stop))
        shard = torch.zeros(wanted.stop - wanted.start, *part.shape[1:], dtype=rows.dtype)
        shard[: stop - start] = rows
        return shard

    def split(self, stacked: Tensor) -> list[Tensor]:
        return [stacked.flatten(0, 1)[: self.vocab_size]]

    def _rows(self, parts: Sequence[Part], size: int) -> int:
        return padded_vocab_size(self.vocab_size, size)


class GateUp(Kind):
    """Gate and up projections: each is sharded by rows, and every rank has its gate rows above its up rows."""

    def read(self, parts: Sequence[Part], source: TensorSource, rank: int, size: int) -> Tensor:
        return torch.cat([part.read(source, _share(part.shape[0], rank, size)) for part in parts])

    def split(self, stacked: Tensor) -> list[Tensor]:
        return [part.flatten(0, 1) for part in stacked.chunk(2, dim=1)]


class Interleaved(Kind):
    """A weight (or bias) in which the rows of several parts are interleaved by groups.

    First come the rows that the first group has in each part, then those of the second group, and so on.

    groups: number of groups.
    """

    groups: int

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, ...]:
        """For each part (for example q, k and v), the number of its rows in one group."""

    def arranged(self, rows: Tensor, part: int) -> Tensor:
        """Convert the rows of part number `part` from the Hugging Face tensor's order to the parameter's order.

        Args:
            rows: [groups, rows of the part in a group, …]; rows are only moved within a group.
        """
        return rows

    def restored(self, rows: Tensor, part: int) -> Tensor:
        """Convert rows of the parameter back to the order of the Hugging Face tensor; the inverse of `arranged`."""
        return rows

    def read(self, parts: Sequence[Part], source: TensorSource, rank: int, size: int) -> Tensor:
        """Return the shard of rank `rank`. Whole groups are read, even if the shard has only some rows of a group."""
        rows_per_group = sum(self.sizes)
        wanted = _share(self.groups * rows_per_group, rank, size)
        first, last = wanted.start // rows_per_group, -(-wanted.stop // rows_per_group)
        pieces = []
        for number, (part, rows) in enumerate(zip(parts, self.sizes, strict=True)):
            piece = part.read(source, slice(first * rows, last * rows)).unflatten(0, (last - first, rows))
            pieces.append(self.arranged(piece, number))
        interleaved = torch.cat(pieces, dim=1).flatten(0, 1)
        return interleaved[wanted.start - first * rows_per_group : wanted.stop - first * rows_per_group]

    def split(self, stacked: Tensor) -> list[Tensor]:
        rows = stacked.flatten(0, 1).unflatten(0, (self.groups, sum(self.sizes)))
        pieces = rows.split(self.sizes, dim=1)
        return [self.restored(piece, number).flatten(0, 1) for number, piece in enumerate(pieces)]


@dataclass(frozen=True)
class Grouped(Interleaved):
    """Parts interleaved by groups. Within a group, the rows have the same order as in the Hugging Face tensors.

    rows: for each part, the number of its rows in one group.
    """

    groups: int
    rows: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.rows


@dataclass(frozen=True)
class QueryKeyValue(Interleaved):
    """Query, key and value projections, interleaved by group. A group has query heads, one key head, one value head.

    heads: number of query heads per group. head_dim: number of rows per query head and key head. value_dim: number of
        rows per value head.
    neighbours: number n of rows, from the start of each query and key head, that RoPE rotates in the Hugging Face
        tensor as pairs of neighbours: rows 0 and 1, rows 2 and 3, and so on. In Megatron's parameter, row i and row
        i + n / 2 are a pair.
    """

    groups: int
    heads: int
    head_dim: int
    value_dim: int
    neighbours: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.heads * self.head_dim, self.head_dim, self.value_dim

    def arranged(self, rows: Tensor, part: int) -> Tensor:
        return rows[:, self._order(part)] if self.neighbours and part < 2 else rows

    def restored(self, rows: Tensor, part: int) -> Tensor:
        return rows[:, self._order(part).argsort()] if self.neighbours and part < 2 else rows

    def _order(self, part: int) -> Tensor:
        """Return the indices that bring one group's rows from the Hugging Face order into the parameter's order.

        Args:
            part: 0 for the queries, 1 for the key.
        """
        pairs = torch.arange(self.neighbours).view(-1, 2).T.flatten()
        head = torch.cat((pairs, torch.arange(self.neighbours, self.head_dim)))
        heads = torch.arange(1 if part else self.heads)
        return (head + self.head_dim * heads[:, None]).flatten()


class GatedQueryKeyValue(QueryKeyValue):
    """Query, key and value projections in which each query head also has a gate.

    In the Hugging Face tensor each head's query is followed by its gate. In the parameter all queries of a group come
    first, then all gates of the group.
    """

    @property
    def sizes(self) -> tuple[int, ...]:
        return 2 * self.heads * self.head_dim, self.head_dim, self.value_dim

    def arranged(self, rows: Tensor, part: int) -> Tensor:
        return rows if part else self._transposed(rows, self.heads, 2)

    def restored(self, rows: Tensor, part: int) -> Tensor:
        return rows if part else self._transposed(rows, 2, self.heads)

    def _transposed(self, rows: Tensor, outer: int, inner: int) -> Tensor:
        return rows.unflatten(1, (outer, inner, self.head_dim)).transpose(1, 2).flatten(1, 3)


class AlternatingGateUp(GateUp):
    """Gate and up projections whose rows alternate in one `Part`. Every rank has its gate rows above its up rows."""

    def read(self, parts: Sequence[Part], source: TensorSource, rank: int, size: int) -> Tensor:
        whole = self._rows_first(parts[0].read(source))
        share = _share(whole.shape[0] // 2, rank, size)
        return torch.cat([whole[first::2][share] for first in (0, 1)])

    def split(self, stacked: Tensor) -> list[Tensor]:
        return [torch.stack(super().split(stacked), dim=1).flatten(0, 1)]

    def _rows_first(self, part: Tensor) -> Tensor:
        return part


class InterleavedGateUp(AlternatingGateUp):
    """Gate and up projections of one gpt-oss expert. Their columns alternate in one Hugging Face tensor.

    The weight is [1, in, 2 · width], the bias [1, 2 · width].
    """

    is_transposed = True

    def split(self, stacked: Tensor) -> list[Tensor]:
        (rows,) = super().split(stacked)
        return [rows.movedim(0, -1)[None]]

    def _rows_first(self, part: Tensor) -> Tensor:
        return part[0].movedim(-1, 0)

    def shard_shape(self, parts: Sequence[Part], size: int) -> Shape:
        _, *columns, rows = parts[0].shape
        return (rows // size, *columns)


class TransposedColumns(Columns):
    """Weight of one gpt-oss expert: [1, in, out] in the Hugging Face tensor, [out, in] and sharded by columns here."""

    is_transposed = True

    def read(self, parts: Sequence[Part], source: TensorSource, rank: int, size: int) -> Tensor:
        whole = parts[0].read(source)[0]
        return whole[_share(whole.shape[0], rank, size)].T

    def split(self, stacked: Tensor) -> list[Tensor]:
        return [torch.cat(tuple(stacked), dim=1).T[None]]

    def shard_shape(self, parts: Sequence[Part], size: int) -> Shape:
        _, columns, rows = parts[0].shape
        return rows, columns // size


@dataclass(frozen=True)
class Mapping:
    """A Megatron parameter, and the Hugging Face tensors that it consists of.

    megatron: name of the parameter, with the layer's number in the whole model. The name of an expert's weight contains
        `mlp.experts.NUMBER.`, with the expert's number in the whole model.
    is_expert: whether the parameter belongs to a routed expert. Routed experts are distributed over expert-parallel
        ranks.
    is_float32: whether the parameter is always float32, whatever the model's precision is.
    is_frozen: whether the parameter is never trained, and has no adapter.
    """

    megatron: str
    parts: tuple[Part, ...]
    kind: Kind
    is_expert: bool = False
    is_float32: bool = False
    is_frozen: bool = False

    @property
    def hf_names(self) -> tuple[str, ...]:
        """Names of the Hugging Face tensors that make up the parameter, each once."""
        return tuple(dict.fromkeys(part.name for part in self.parts))

    def split(self, stacked: Tensor) -> list[tuple[Part, Tensor]]:
        """Return pairs (part, values of the part); see `Kind.split`."""
        return list(zip(self.parts, self.kind.split(stacked), strict=True))


def tensor_shapes(mappings: Iterable[Mapping]) -> dict[str, Shape]:
    """Return the shapes of the Hugging Face tensors in `mappings`, by name; parts without a name are left out."""
    shapes: dict[str, Shape] = {}
    for part in (part for mapping in mappings for part in mapping.parts if part.name):
        rows, *rest = part.shape
        shapes[part.name] = (max(part.first + rows, shapes.get(part.name, (0,))[0]), *rest)
    return shapes


def assemble(
    pieces: Iterable[tuple[Part, Tensor]], shapes: Dictionary[str, Shape], copies: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Join Hugging Face tensors from their parts; yield each tensor with its name as soon as it is complete.

    Args:
        pieces: parts with their values.
        shapes: shapes of the wanted tensors; parts of other tensors are ignored.
        copies: whether to copy a tensor that consists of one part. If not, such a tensor is valid only until the next
            tensor is yielded.
    """
    begun: dict[str, tuple[Tensor, int]] = {}
    for part, piece in pieces:
        shape = shapes.get(part.name)
        if shape is None:
            continue
        if part.shape == shape:
            yield part.name, piece.clone(memory_format=torch.contiguous_format) if copies else piece
            continue
        whole, rows = begun.pop(part.name) if part.name in begun else (piece.new_empty(shape), 0)
        whole[part.first : part.first + part.shape[0]] = piece
        rows += part.shape[0]
        if rows == shape[0]:
            yield part.name, whole
        else:
            begun[part.name] = whole, rows


def replicated_mappings(
    ours: str,
    theirs: str,
    shapes: Dictionary[str, tuple[str, Shape]],
    float32: Collection[str] = (),
    is_frozen: bool = False,
) -> Iterator[Mapping]:
    """Yield the mappings of weights that are the same on every tensor-parallel rank.

    Args:
        ours, theirs: prefixes of the Megatron and Hugging Face names.
        shapes: for each weight's name in Megatron, its name in Hugging Face and its shape, without the prefixes.
        float32: names in Megatron of the weights that are always float32.
        is_frozen: whether the weights are never trained.
    """
    for name, (hf_name, shape) in shapes.items():
        part = Part(f"{theirs}{hf_name}", shape)
        yield Mapping(f"{ours}{name}", (part,), Replicated(), is_float32=name in float32, is_frozen=is_frozen)

"""Parts of a checkpoint's tensors, read into memory that is there already.

A stored shard is a file of torch's, in which the numbers lie in one piece. Only those that are asked for are read, a
few MiB at a time. torch's own reader would hold each shard that it needs anything of, whole.
"""

from __future__ import annotations

import bisect
import io
import itertools
import math
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from mcore_rl.errors import UserError
from mcore_rl.models.megatron.weight_mapping import Shape

BLOCK_BYTES = 4 * 1024**2

# Of a file's header in a zip archive: how many bytes it has before the file's name, and the lengths of this name and
# of what stands behind it.
ZIP_HEADER_BYTES, ZIP_LENGTHS_AT, ZIP_LENGTHS = 30, 26, struct.Struct("<HH")


@dataclass(frozen=True)
class Region:
    """`tensor[offsets : offsets + values.shape]` of a tensor in a checkpoint, and this rank's memory for it.

    values: of as many dimensions as the tensor, in any precision, on any device.
    whole: the shape that the tensor must have; None for any.
    is_padded: what the tensor does not reach to is zero, and its shape may be another.
    """

    key: str
    offsets: Shape
    values: Tensor
    whole: Shape | None = None
    is_padded: bool = False


@dataclass(frozen=True)
class Piece:
    """The part of a region in one stored shard: the shard's place, the bytes to read, and their destination."""

    file: str
    start: int
    length: int
    sizes: Shape
    dtype: torch.dtype
    offsets: Shape
    values: Tensor


class RegionReader:
    """Reads regions, from however many shards their tensors were written in. No communication."""

    def __init__(self, iteration: Path, index: Metadata) -> None:
        self.iteration, self.index = iteration, index
        self._by_first_row: dict[str, _ByFirstRow] = {}
        self._block = bytearray(BLOCK_BYTES)

    @torch.no_grad()
    def read(self, regions: Iterable[Region]) -> None:
        """Fill the memory of all regions; of none if one of them does not fit.

        Raises:
            UserError: there is no such tensor, not all of a region, or a damaged file.
        """
        regions = list(regions)
        pieces = [piece for region in regions for piece in self.pieces(region)]
        for region in regions:
            if region.is_padded:
                region.values.zero_()
        pieces.sort(key=lambda piece: (piece.file, piece.start))
        for name, of_file in itertools.groupby(pieces, key=lambda piece: piece.file):
            try:
                with open(self.iteration / name, "rb") as file:
                    for piece in of_file:
                        self._read_piece(file, piece)
            except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile, struct.error) as error:
                raise UserError(f"{self.iteration / name}: cannot be read: {error}") from None

    def tensor(self, key: str, offsets: Shape, sizes: Shape) -> Tensor:
        """`tensor[offsets : offsets + sizes]`, in its own precision.

        Raises:
            UserError: as `read`.
        """
        values = torch.empty(sizes, dtype=self._entry(key, len(sizes)).properties.dtype)
        self.read([Region(key, offsets, values)])
        return values

    def _entry(self, key: str, dimensions: int) -> TensorStorageMetadata:
        entry = self.index.state_dict_metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata) or len(entry.size) != dimensions:
            raise UserError(f"{self.iteration} does not fit the model: it holds no {key} of {dimensions} dimensions")
        return entry

    def pieces(self, region: Region) -> list[Piece]:
        """Return the pieces to read for a region, from each of its shards.

        Raises:
            UserError: there is no such tensor, or not all of the region.
        """
        sizes = tuple(region.values.shape)
        entry = self._entry(region.key, len(sizes))
        if region.whole not in (None, tuple(entry.size)) and not region.is_padded:
            raise UserError(
                f"{self.iteration} does not fit the model: its {region.key} is {tuple(entry.size)}, not {region.whole}"
            )
        if region.key not in self._by_first_row:
            self._by_first_row[region.key] = _ByFirstRow(entry)
        pieces = []
        for chunk in self._by_first_row[region.key].near(region.offsets, sizes):
            low = tuple(map(max, chunk.offsets, region.offsets))
            corners = zip(chunk.offsets, chunk.sizes, region.offsets, sizes, strict=True)
            high = tuple(min(a + b, c + d) for a, b, c, d in corners)
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            storage = self.index.storage_data[MetadataIndex(region.key, chunk.offsets)]
            values = region.values.detach()
            for dimension, (first, last) in enumerate(zip(low, high, strict=True)):
                values = values.narrow(dimension, first - region.offsets[dimension], last - first)
            offsets = tuple(a - b for a, b in zip(low, chunk.offsets, strict=True))
            place = storage.relative_path, storage.offset, storage.length
            pieces.append(Piece(*place, tuple(chunk.sizes), entry.properties.dtype, offsets, values))
        if sum(piece.values.numel() for piece in pieces) != region.values.numel() and not region.is_padded:
            raise UserError(f"{self.iteration}: {region.key} is {tuple(entry.size)}, not large enough for this model")
        return pieces

    def _read_piece(self, file: BinaryIO, piece: Piece) -> None:
        shard: Any = _Slice(file, piece.start, piece.length)
        begin = _numbers_in(shard, piece)
        if begin is None:
            shard.seek(0)
            numbers = torch.load(shard, map_location="cpu", weights_only=True).flatten()
            copy_piece(lambda first, count: numbers[first : first + count], piece)
            return

        def read(first: int, count: int) -> Tensor:
            wanted = memoryview(self._block)[: count * piece.dtype.itemsize]
            file.seek(piece.start + begin + first * piece.dtype.itemsize)
            if file.readinto(wanted) != len(wanted):  # type: ignore[attr-defined]
                raise EOFError("it ends too early")
            return torch.frombuffer(self._block, dtype=piece.dtype, count=count)

        copy_piece(read, piece)


class _ByFirstRow:
    """The stored shards of a tensor, found by the rows that they have of its first dimension."""

    def __init__(self, entry: TensorStorageMetadata) -> None:
        self.chunks = sorted(entry.chunks, key=lambda chunk: tuple(chunk.offsets))
        self.firsts = [chunk.offsets[0] if chunk.offsets else 0 for chunk in self.chunks]
        self.tallest = max((chunk.sizes[0] if chunk.sizes else 1 for chunk in self.chunks), default=0)

    def near(self, offsets: Shape, sizes: Shape) -> list[Any]:
        """All that have rows of a region, and some more."""
        if not sizes:
            return self.chunks
        begin = bisect.bisect_right(self.firsts, offsets[0] - self.tallest)
        return self.chunks[begin : bisect.bisect_left(self.firsts, offsets[0] + sizes[0])]


def _numbers_in(shard: Any, piece: Piece) -> int | None:
    """Return the offset of a shard's numbers in its file; None if they are not contiguous in its shape."""
    layout = torch.load(shard, map_location="meta", weights_only=True)
    with zipfile.ZipFile(shard) as archive:
        found = [record for record in archive.infolist() if "/data/" in record.filename]
    plain = len(found) == 1 and found[0].compress_type == zipfile.ZIP_STORED
    if not plain or not layout.is_contiguous() or layout.storage_offset() or layout.dtype != piece.dtype:
        return None
    shard.seek(found[0].header_offset + ZIP_LENGTHS_AT)
    return found[0].header_offset + ZIP_HEADER_BYTES + sum(ZIP_LENGTHS.unpack(shard.read(ZIP_LENGTHS.size)))


def copy_piece(read: Callable[[int, int], Tensor], piece: Piece) -> None:
    """The piece's numbers, in blocks of whole rows, of whatever dimension has rows that fit into one.

    Args:
        read: gives so many of the stored shard's numbers, from one of them on.
    """
    for begin, inner, offsets, values in _rows(piece.sizes, 0, piece.offsets, piece.values, piece.dtype.itemsize):
        step = max(1, BLOCK_BYTES // (math.prod(inner) * piece.dtype.itemsize))
        for start in range(0, len(values), step):
            rows = values[start : start + step]
            numbers = read(begin + start * math.prod(inner), len(rows) * math.prod(inner)).view(len(rows), *inner)
            for dimension, offset in enumerate(offsets, 1):
                numbers = numbers.narrow(dimension, offset, rows.shape[dimension])
            rows.copy_(numbers)


def _rows(
    sizes: Shape, first: int, offsets: Shape, values: Tensor, itemsize: int
) -> Iterator[tuple[int, Shape, Shape, Tensor]]:
    """A region of a row-major tensor, as regions of its parts whose rows fit into a block.

    Yields:
        the number that the first row begins at, a row's shape, the region's offsets in a row, its values.
    """
    if not sizes:
        sizes, offsets, values = (1,), (0,), values.view(1)
    row = math.prod(sizes[1:])
    of_one_row = len(values) == 1  # then no more of it is read than the region has
    if len(sizes) == 1 or (row * itemsize <= BLOCK_BYTES and not of_one_row):
        yield first + offsets[0] * row, sizes[1:], offsets[1:], values
        return
    for index, part in enumerate(values.unbind()):
        yield from _rows(sizes[1:], first + (offsets[0] + index) * row, offsets[1:], part, itemsize)


class _Slice(io.RawIOBase):
    """Bytes `start` … `start + length − 1` of a file, as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self.file, self.start, self.length, self.position = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.length}[whence]
        return self.position

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self.length - self.position))
        self.file.seek(self.start + self.position)
        count = self.file.readinto(memoryview(buffer)[:count])  # type: ignore[attr-defined]
        self.position += count
        return count

"""Differences between two versions of the weights, so that an update sends only what has changed.

A sender keeps a copy, in host memory, of the tensors that it has sent; the engine keeps one of the whole model. An
update names the version from which it begins and the one to which it leads. Each tensor is sent in the smallest of
these encodings:

- `overwrite`: the positions of changed elements, as gaps, and their new values. Setting them twice does no harm.
- `xor`: the exclusive or of all old and new bytes. It is smaller if more than about 5 % of the elements have changed.
- `whole`: all bytes.

All are compressed by zstd, level 1, and each tensor comes with the CRC-32 that it must have afterwards. Elements are
compared as integers: 0 and −0 differ, and a NaN equals itself.

Imported inside vLLM too, so only PyTorch, NumPy and zstd are imported here.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mcore_rl.utils.compression import zstd

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Words = np.ndarray[Any, np.dtype[Any]]

OVERWRITE_SHARE = 0.05
"""Largest share of changed elements for which `overwrite` is tried. Above it, `xor` is smaller."""
THREADS = min(32, os.cpu_count() or 1)
_LENGTH = 8
_LAST_GAP = 255
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class RefusedUpdate(RuntimeError):
    """An update does not fit the version that the engine has, or was damaged; a whole update is needed."""


def _compress(data: bytes | memoryview) -> bytes:
    return bytes(zstd().compress(data, level=1))


def _decompress(data: bytes | memoryview, size: int) -> Bytes:
    decoded = np.frombuffer(zstd().decompress(data), np.uint8)
    if decoded.nbytes != size:
        raise RefusedUpdate(f"{decoded.nbytes} bytes after decompression instead of {size}")
    return decoded


def bytes_of(tensor: Tensor) -> Bytes:
    """Return the bytes of a tensor in host memory, as a view."""
    viewed: Bytes = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return viewed


# ------------------------------------------------------------ encodings


def _encode_overwrite(new: Words, where: Words) -> bytes:
    gaps = np.diff(where, prepend=-1) - 1
    # A gap of g is g // 255 bytes of 255, and one of g % 255.
    repeats = gaps // _LAST_GAP
    coded = np.full(len(gaps) + int(repeats.sum()), _LAST_GAP, np.uint8)
    coded[np.cumsum(repeats + 1) - 1] = gaps % _LAST_GAP
    packed_gaps, packed_values = _compress(coded.data), _compress(_planes(new[where]).data)
    head = np.array([len(where), len(coded), len(packed_gaps)], np.int64)
    return head.tobytes() + packed_gaps + packed_values


def _apply_overwrite(payload: memoryview, words: Words) -> None:
    count, size, length = np.frombuffer(payload[:24], np.int64).tolist()
    coded = _decompress(payload[24 : 24 + length], size)
    ends = np.flatnonzero(coded != _LAST_GAP)
    where = np.cumsum(coded, dtype=np.int64)[ends] + np.arange(count)
    words[where] = _from_planes(_decompress(payload[24 + length :], count * words.itemsize), words)


def _encode_xor(old: Words, new: Words) -> bytes:
    return _compress(_planes(old ^ new).data)


def _apply_xor(payload: memoryview, words: Words) -> None:
    words ^= _from_planes(_decompress(payload, words.nbytes), words)


def _apply_whole(payload: memoryview, words: Words) -> None:
    words[:] = _decompress(payload, words.nbytes).view(words.dtype)


def _planes(words: Words) -> Bytes:
    """Return all first bytes of the words, then all second ones, …: neighbours that are alike compress better."""
    return np.ascontiguousarray(words.view(np.uint8).reshape(-1, words.itemsize).T)


def _from_planes(planes: Bytes, like: Words) -> Words:
    return np.ascontiguousarray(planes.reshape(like.itemsize, -1).T).reshape(-1).view(like.dtype)


_APPLY: dict[str, Callable[[memoryview, Words], None]] = {
    "overwrite": _apply_overwrite,
    "xor": _apply_xor,
    "whole": _apply_whole,
}


def encode_tensor(old: Words | None, new: Words) -> tuple[str, bytes] | None:
    """Return the encoding of the difference and its bytes; None if nothing has changed.

    Args:
        old: the elements that the engine has, as unsigned integers; None if it has none.
    """
    if old is None:
        return "whole", _compress(new.view(np.uint8).data)
    where = np.flatnonzero(old != new)
    if not len(where):
        return None
    few = len(where) <= OVERWRITE_SHARE * len(new)
    name, payload = ("overwrite", _encode_overwrite(new, where)) if few else ("xor", _encode_xor(old, new))
    return (name, payload) if len(payload) < new.nbytes else ("whole", _compress(new.view(np.uint8).data))


# ------------------------------------------------------------ both ends


class DeltaEncoder:
    """A sender's copy of the tensors that it has sent.

    version: the version of the copies; None before the first update.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        self._copies: dict[int, Words] = {}

    def encode(self, tensors: Iterable[tuple[int, Bytes, int]]) -> Tensor:
        """Return a bucket's differences from the copies, as bytes [n], and take the tensors over into the copies.

        Args:
            tensors: number, bytes, and bytes of an element, of each tensor.
        """
        with ThreadPoolExecutor(THREADS) as threads:
            return _pack(list(threads.map(self._difference, tensors)))

    def _difference(self, tensor: tuple[int, Bytes, int]) -> tuple[int, str, bytes, int]:
        number, data, itemsize = tensor
        new = data.view(_WORDS[itemsize])
        old = self._copies.get(number)
        encoded = encode_tensor(old, new)
        if old is None:
            self._copies[number] = new.copy()
        elif encoded is not None:
            np.copyto(old, new)
        name, payload = encoded or ("same", b"")
        return number, name, payload, zlib.crc32(new.view(np.uint8).data)

    def whole(self, numbers: Sequence[int]) -> Tensor:
        """Return the copies of the tensors `numbers` as a bucket that needs no earlier version, bytes [n]."""

        def one(number: int) -> tuple[int, str, bytes, int]:
            data = self._copies[number].view(np.uint8).data
            return number, "whole", _compress(data), zlib.crc32(data)

        with ThreadPoolExecutor(THREADS) as threads:
            return _pack(list(threads.map(one, numbers)))


def _pack(parts: Sequence[tuple[int, str, bytes, int]]) -> Tensor:
    table = json.dumps([[number, name, len(payload), checksum] for number, name, payload, checksum in parts]).encode()
    joined = b"".join([len(table).to_bytes(_LENGTH, "little"), table, *(payload for _, _, payload, _ in parts)])
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8)


def largest_bucket(nbytes: int, count: int) -> int:
    """Return a limit of the bytes of a bucket of `DeltaEncoder` with `count` tensors of `nbytes` bytes in all.

    zstd makes n bytes that it cannot compress at most n + n / 256 + 64 bytes. An entry of the table has fewer than 64.
    """
    return nbytes + nbytes // 256 + 128 * count + 64


def _unpack(data: memoryview) -> Iterator[tuple[int, str, memoryview, int]]:
    start = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    for number, name, length, checksum in json.loads(bytes(data[_LENGTH:start])):
        yield number, name, data[start : start + length], checksum
        start += length


def decode(payload: Tensor, tensors: Mapping[int, Tensor], which: slice = slice(None)) -> Iterator[int]:
    """Apply a bucket of `DeltaEncoder` to `tensors`; yield the number of each tensor once its checksum is right.

    Args:
        tensors: the engine's copies, by number; they are changed in place.
        which: which of the bucket's tensors to change.

    Raises:
        RefusedUpdate: a part of the bucket is damaged, or the tensors were not those from which it begins.
    """
    try:
        pieces = list(_unpack(payload.numpy().data))[which]
    except ValueError as error:
        raise RefusedUpdate(f"the list of the bucket's tensors cannot be read ({error})") from None

    def apply(piece: tuple[int, str, memoryview, int]) -> int:
        number, name, encoded, checksum = piece
        tensor = tensors[number]
        words = bytes_of(tensor).view(_WORDS[tensor.itemsize])
        try:
            if name != "same":
                _APPLY[name](encoded, words)
        except RefusedUpdate:
            raise
        except Exception as error:  # of zstd, or of positions outside the tensor
            raise RefusedUpdate(f"tensor {number}: the update cannot be decoded ({error})") from None
        if zlib.crc32(words.view(np.uint8).data) != checksum:
            raise RefusedUpdate(f"tensor {number}: the checksum is wrong after the update")
        return number

    with ThreadPoolExecutor(THREADS) as threads:
        yield from threads.map(apply, pieces)

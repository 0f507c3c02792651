"""Stores of tokenized records, mixtures of several stores, and the order in which a run uses their records.

The directory of a store contains `ids.bin` (int32 token ids), `mask.bin` (a byte per token: whether it carries loss),
`ends.bin` (int64: where each sequence ends), and JSON data: the images of each sequence, and further data of each
record. It has no pixels.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any, Protocol, overload

import numpy as np

from mcore_rl.data.images import IMAGES, PlacedImage, decode_images, encode_images, moved
from mcore_rl.errors import UserError

ROUNDS = 8
PERIOD = 10_000
"""Number of samples in a period of a mixture. In each period, each source has exactly its share."""


class Order(Protocol):
    """The order in which a run uses the records of its dataset."""

    def indices(self, start: int, count: int) -> list[int]:
        """Return the dataset indices of the samples start … start + count − 1 of a run. They may span epochs."""
        ...


@dataclass(frozen=True)
class SampleOrder:
    """A shuffled order with a new permutation in each epoch. It stores no permutation.

    A Feistel cipher maps a position to an index: it enciphers the position until the result is less than the number of
    records (Black and Rogaway, Ciphers with arbitrary finite domains, 2002). On average this takes at most 4 passes.
    """

    num_samples: int
    seed: int
    stream: int = 0
    """Index of the source in a mixture. It makes the orders of sources of the same size differ."""

    def indices(self, start: int, count: int) -> list[int]:
        """Return the dataset indices of the samples start … start + count − 1 of a run. They may span epochs."""
        return [self._index(*divmod(k, self.num_samples)) for k in range(start, start + count)]

    def _index(self, epoch: int, position: int) -> int:
        half = max(1, -(-(self.num_samples - 1).bit_length() // 2))
        mask = (1 << half) - 1
        while True:
            left, right = position >> half, position & mask
            for number in range(ROUNDS):
                left, right = right, left ^ self._round(epoch, number, right) & mask
            position = left << half | right
            if position < self.num_samples:
                return position

    def _round(self, epoch: int, number: int, value: int) -> int:
        key = struct.pack("<qqqq", self.seed, epoch, number, value)
        return int.from_bytes(
            hashlib.blake2b(key, digest_size=8, salt=self.stream.to_bytes(8, "little")).digest(), "little"
        )


@dataclass(frozen=True)
class MixedOrder:
    """A shuffled order of the records of several sources, in which each source has its share of the samples.

    The samples of one source follow that source's `SampleOrder`: each pass over a source ends before the next starts.

    Args:
        sizes: number of records of each source; the sources are concatenated in the dataset.
        quotas: number of samples of each source in every `PERIOD` samples; they add up to `PERIOD`.
    """

    sizes: Sequence[int]
    quotas: Sequence[int]
    seed: int

    def indices(self, start: int, count: int) -> list[int]:
        return [self._index(k) for k in range(start, start + count)]

    def _index(self, k: int) -> int:
        period, place = divmod(k, PERIOD)
        sources, earlier = _arrangement(tuple(self.quotas), self.seed, period)
        source = sources[place]
        order = SampleOrder(self.sizes[source], self.seed, stream=source)
        (index,) = order.indices(period * self.quotas[source] + earlier[place], 1)
        return sum(self.sizes[:source]) + index


@lru_cache(maxsize=4)
def _arrangement(quotas: tuple[int, ...], seed: int, period: int) -> tuple[list[int], list[int]]:
    """Return, for each sample of a period, its source, and the number of earlier samples from this source."""
    ends, counts = list(accumulate(quotas)), [0] * len(quotas)
    sources, earlier = list[int](), list[int]()
    for slot in SampleOrder(PERIOD, seed).indices(period * PERIOD, PERIOD):
        source = bisect_right(ends, slot)
        sources.append(source)
        earlier.append(counts[source])
        counts[source] += 1
    return sources, earlier


def quotas_of(weights: Sequence[float]) -> list[int]:
    """Return integers that sum to `PERIOD` and are proportional to `weights`; the largest remainders are rounded up."""
    total = sum(weights)
    exact = [weight / total * PERIOD for weight in weights]
    quotas = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: quotas[i] - exact[i])
    for i in by_remainder[: PERIOD - sum(quotas)]:
        quotas[i] += 1
    return quotas


@dataclass(frozen=True)
class TokenSequence:
    """Token ids, and whether each token carries loss. The tokens of a response, and its end token, carry loss.

    notes: names of counters of what was done in the tokenization, for messages; not part of the sequence's value.
    images: the images among the tokens, in their order.
    """

    input_ids: tuple[int, ...]
    token_mask: tuple[bool, ...]
    notes: tuple[str, ...] = field(default=(), compare=False, repr=False)
    images: tuple[PlacedImage, ...] = ()

    def __len__(self) -> int:
        return len(self.input_ids)

    def truncate(self, length: int) -> TokenSequence:
        """Return the first `length` tokens, or fewer: the sequence does not end inside an image."""
        length = min([length, *(image.start for image in self.images if image.end > length)])
        ids, mask = self.input_ids[:length], self.token_mask[:length]
        return TokenSequence(ids, mask, images=moved(self.images, 0, length))

    @property
    def trained_ids(self) -> set[int]:
        """Set of the token ids that carry loss."""
        return {token for token, trained in zip(self.input_ids, self.token_mask, strict=True) if trained}

    @property
    def is_trainable(self) -> bool:
        """Whether a token other than the first carries loss. The first token is never predicted."""
        return any(self.token_mask[1:])


def images_column(of_rows: Sequence[Sequence[PlacedImage]]) -> dict[str, list[Sequence[PlacedImage]]]:
    """Return the batch entry `images` of rows, under its name; {} if no row has images."""
    return {IMAGES: list(of_rows)} if any(of_rows) else {}


SequenceGroup = tuple[TokenSequence, ...]
"""The sequences of one record: a single sequence for SFT, (chosen, rejected) for pairs."""

KINDS = {
    "ids": np.int32,
    "mask": np.uint8,
    "ends": np.int64,
    "images": np.uint8,
    "image_ends": np.int64,
    "extra": np.uint8,
    "extra_ends": np.int64,
}
"""Names of the arrays of a token store, with the types of their elements."""


@dataclass
class TokenizedChunk:
    """Consecutive tokenized records of a source.

    ids, mask: token ids and loss mask of all sequences, one after the other.
    lengths: length of each sequence.
    images: the images of each sequence as JSON (`encode_images`); empty if it has none.
    extra: JSON text to store with each record; empty if no record has such a text.
    counts: numbers of records with certain properties ("dropped", "truncated", …).
    """

    ids: list[int] = field(default_factory=list)
    mask: bytearray = field(default_factory=bytearray)
    lengths: list[int] = field(default_factory=list)
    images: list[bytes] = field(default_factory=list)
    extra: list[bytes] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, unit: SequenceGroup, extra: bytes | None = None) -> None:
        for sequence in unit:
            self.ids += sequence.input_ids
            self.mask += bytes(sequence.token_mask)
            self.lengths.append(len(sequence))
            self.images.append(encode_images(sequence.images))
        if extra is not None:
            self.extra.append(extra)


DROPPED_WITH = "dropped with tokens: "


def dropped_with(length: int) -> str:
    """Return the name of the counter of dropped records whose longest sequence has `length` tokens."""
    return f"{DROPPED_WITH}{length}"


class TokenStore(Sequence[SequenceGroup]):
    """Tokenized records, in files or in memory, as a sequence of units. A unit is a tuple of a record's sequences.

    Two stores are equal if their units are equal.
    """

    labels: Sequence[str] = ()
    """Names of a mixture's sources in metrics."""

    def __init__(self, arrays: Mapping[str, Any], meta: dict[str, Any]) -> None:
        self._arrays, self.meta = arrays, meta
        self._rows: int = meta["sequences_per_unit"]

    @classmethod
    def open(cls, directory: Path) -> TokenStore:
        """Open a directory that `collect` has written; tokens are read on access.

        Raises:
            ValueError: the directory is incomplete.
        """
        try:
            meta = json.loads((directory / "meta.json").read_bytes())
            sizes = meta["sizes"]
            files = {name: _FileArray(directory / f"{name}.bin", kind, sizes[name]) for name, kind in KINDS.items()}
            whole = {name: files[name][:] for name in ("ends", "image_ends", "extra_ends")}
            return cls({**files, **whole}, meta)
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{directory} is incomplete: {error}") from None

    @property
    def fingerprint(self) -> str:
        """Hash of all token ids, masks and stored texts. It depends on data, tokenizer and chat template."""
        return str(self.meta["fingerprint"])

    @property
    def num_tokens(self) -> int:
        return len(self._arrays["ids"])

    @property
    def counts(self) -> Counter[str]:
        return Counter(self.meta["counts"])

    @property
    def shares(self) -> dict[str, float]:
        """Fraction of a mixture's samples that come from each source, by name; {} for a single source."""
        return {}

    def order(self, seed: int) -> Order:
        """Return the order in which a run uses the units."""
        return SampleOrder(len(self), seed)

    def source_of(self, unit: int) -> str | None:
        """Return the label of a unit's source in a mixture; None for a single source."""
        return None

    def lengths(self) -> np.ndarray:
        """Return the number of tokens in every sequence, int64 [units × sequences per unit]."""
        return np.diff(self._arrays["ends"], prepend=0)

    def record_lengths(self) -> np.ndarray:
        """Return the number of tokens in the longest sequence of each record, int64 [records].

        Dropped records are included, at the end.
        """
        dropped = {name: n for name, n in self.counts.items() if name.startswith(DROPPED_WITH)}
        lengths = np.array([int(name.removeprefix(DROPPED_WITH)) for name in dropped], np.int64)
        kept = self.lengths().reshape(-1, self._rows).max(1, initial=0)
        return np.concatenate([kept, lengths.repeat(list(dropped.values()))])

    @property
    def sequences_per_unit(self) -> int:
        return self._rows

    def lengths_of(self, unit: int) -> list[int]:
        """Return the number of tokens in each sequence of a unit, without reading the tokens."""
        ends, first = self._arrays["ends"], unit * self._rows
        before = int(ends[first - 1]) if first else 0
        own = ends[first : first + self._rows].tolist()
        return [end - start for start, end in zip([before, *own], own, strict=False)]

    def extra(self, index: int) -> bytes:
        """Return the JSON text that is stored with a record (`TokenizationSpec.extra_of`)."""
        return self._arrays["extra"][self._slice("extra_ends", index)].tobytes()

    def image_files(self) -> dict[str, str]:
        """Return the digest of each image of the records, by the path of its file."""
        ends = self._arrays["image_ends"]
        starts = ends - np.diff(ends, prepend=0)
        places = zip(starts[starts < ends].tolist(), ends[starts < ends].tolist(), strict=True)
        texts = self._arrays["images"][:].tobytes()
        images = (decode_images(texts[start:end]) for start, end in places)
        return {image.path: image.digest for of_sequence in images for image in of_sequence}

    def __len__(self) -> int:
        return len(self._arrays["ends"]) // self._rows

    @overload
    def __getitem__(self, index: int) -> SequenceGroup: ...
    @overload
    def __getitem__(self, index: slice) -> list[SequenceGroup]: ...
    def __getitem__(self, index: int | slice) -> SequenceGroup | list[SequenceGroup]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"there is no unit {index}; the store has {len(self)} units")
        first = index % len(self) * self._rows
        return tuple(self._sequence(first + row) for row in range(self._rows))

    def _sequence(self, index: int) -> TokenSequence:
        place, of_images = self._slice("ends", index), self._slice("image_ends", index)
        ids, mask = self._arrays["ids"][place], self._arrays["mask"][place]
        has_images = of_images.start < of_images.stop
        images = decode_images(self._arrays["images"][of_images].tobytes()) if has_images else ()
        return TokenSequence(tuple(ids.tolist()), tuple(mask.astype(bool).tolist()), images=images)

    def _slice(self, ends: str, index: int) -> slice:
        """Return the places of a sequence or record in an array, from the array `ends` of its ends."""
        own = self._arrays[ends]
        return slice(int(own[index - 1]) if index else 0, int(own[index]))

    def __iter__(self) -> Iterator[SequenceGroup]:
        return (self[i] for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(self) != len(other):
            return False
        return all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]


class _FileArray:
    """An array in a file. Only slices are read. (A memory map would read 64 KiB around each access.)"""

    def __init__(self, path: Path, kind: type, size: int) -> None:
        self._kind, self._size = np.dtype(kind), size
        found, expected = path.stat().st_size, size * self._kind.itemsize
        if found != expected:
            raise ValueError(
                f"{path.name} must have {expected} bytes ({size} numbers of type {self._kind}), but has {found} bytes"
            )
        self._file = open(path, "rb")  # noqa: SIM115

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, place: slice) -> np.ndarray:
        start, stop, _ = place.indices(self._size)
        width = self._kind.itemsize
        return np.frombuffer(os.pread(self._file.fileno(), (stop - start) * width, start * width), self._kind)


def plain_name(text: str) -> str:
    """Return `text` with '_' in place of the characters that a metric's name must not contain."""
    return re.sub(r"[^\w.-]+", "_", text)


def collect(chunks: Iterable[TokenizedChunk], sequences_per_unit: int, directory: Path | None = None) -> TokenStore:
    """Join all chunks into one store, in the files of `directory` or, if `directory` is None, in memory.

    With a directory, only one chunk at a time is in memory.
    """
    digest, counts = hashlib.sha256(), Counter[str]()
    sizes, ends = Counter[str](), Counter[str]()
    kept: dict[str, list[np.ndarray]] = {name: [] for name in KINDS}
    files = {name: open(directory / f"{name}.bin", "wb") for name in KINDS} if directory else {}  # noqa: SIM115

    def put(name: str, values: np.ndarray) -> None:
        sizes[name] += len(values)
        if directory:
            files[name].write(values.tobytes())
        else:
            kept[name].append(values)

    def put_ends(name: str, lengths: Sequence[int]) -> None:
        if lengths:
            values = np.cumsum(lengths, dtype=np.int64) + ends[name]
            ends[name] = int(values[-1])
            put(name, values)

    try:
        for chunk in chunks:
            start = 0
            ids, mask = np.array(chunk.ids, np.int32), np.frombuffer(bytes(chunk.mask), np.uint8)
            for length in chunk.lengths:
                head = np.array([length], np.int64).tobytes()
                digest.update(head + ids[start : start + length].astype(np.int64).tobytes())
                digest.update(mask[start : start + length].tobytes())
                start += length
            texts = b"".join(chunk.extra)
            digest.update(texts)
            images = b"".join(chunk.images)
            if images:  # their files may be elsewhere on another machine, so only digests count
                digest.update(_described(chunk.images))
            for name, values in (("ids", ids), ("mask", mask)):
                put(name, values)
            for name, text in (("images", images), ("extra", texts)):
                put(name, np.frombuffer(text, np.uint8))
            put_ends("ends", chunk.lengths)
            put_ends("image_ends", [len(text) for text in chunk.images])
            put_ends("extra_ends", [len(text) for text in chunk.extra])
            counts += chunk.counts
    finally:
        for file in files.values():
            file.close()
    meta = {
        "sequences_per_unit": sequences_per_unit,
        "fingerprint": digest.hexdigest(),
        "counts": dict(counts),
        "sizes": {name: sizes[name] for name in KINDS},
    }
    if directory:
        (directory / "meta.json").write_text(json.dumps(meta))
        return TokenStore.open(directory)
    arrays = {name: np.concatenate([np.empty(0, kind), *kept[name]]).astype(kind) for name, kind in KINDS.items()}
    return TokenStore(arrays, meta)


def _described(encoded: Sequence[bytes]) -> bytes:
    """Return the images of sequences as text, without their paths."""
    return repr([[(image.start, image.identity) for image in decode_images(text)] for text in encoded]).encode()


class JoinedTokenStore(TokenStore):
    """The units of several stores, one store after the other.

    Args:
        stores: the stores.
        quotas: numbers that belong to the stores and to the fingerprint of all.
    """

    def __init__(self, stores: Iterable[TokenStore], quotas: Sequence[int] = ()) -> None:
        self._stores = list(stores)
        self._ends = list(accumulate(map(len, self._stores)))
        parts = zip_longest((store.fingerprint for store in self._stores), quotas)
        counts: Counter[str] = sum((store.counts for store in self._stores), Counter())
        meta = {"fingerprint": hashlib.sha256(repr([*parts]).encode()).hexdigest(), "counts": dict(counts)}
        super().__init__({}, {**meta, "sequences_per_unit": self._stores[0].meta["sequences_per_unit"]})

    @property
    def num_tokens(self) -> int:
        return sum(store.num_tokens for store in self._stores)

    def lengths(self) -> np.ndarray:
        return np.concatenate([store.lengths() for store in self._stores])

    def lengths_of(self, unit: int) -> list[int]:
        store, own = self._place(unit)
        return store.lengths_of(own)

    def extra(self, index: int) -> bytes:
        store, own = self._place(index)
        return store.extra(own)

    def __len__(self) -> int:
        return self._ends[-1]

    def _sequence(self, index: int) -> TokenSequence:
        store, own = self._place(index // self._rows)
        return store._sequence(own * self._rows + index % self._rows)

    def _place(self, index: int) -> tuple[TokenStore, int]:
        """Return the store that contains unit `index`, and the unit's index in that store."""
        number = bisect_right(self._ends, index)
        store = self._stores[number]
        return store, index - (self._ends[number] - len(store))


class MixedTokenStore(JoinedTokenStore):
    """A mixture of several stores.

    Args:
        stores: stores by the names of their sources.
        weights: relative sample weight of each source.

    Raises:
        UserError: a source is empty, or its share of the samples rounds to zero.
    """

    def __init__(self, stores: Mapping[str, TokenStore], weights: Mapping[str, float]) -> None:
        self.quotas = quotas_of([weights[name] for name in stores])
        for (name, store), quota in zip(stores.items(), self.quotas, strict=True):
            if not len(store):
                raise UserError(
                    f"data.train: no record of {name} is short enough for data.max_sequence_length; leave this "
                    "source out"
                )
            if not quota:
                raise UserError(
                    f"data.train: with its weight, {name} gets less than one of every {PERIOD:,} samples; leave this "
                    "source out, or raise its weight"
                )
        self._names = list(stores)
        # The file's name without its directory, if that is unique.
        short = [plain_name(Path(name).stem) for name in stores]
        self.labels = short if len(set(short)) == len(short) else [plain_name(name) for name in stores]
        super().__init__(stores.values(), self.quotas)

    @property
    def shares(self) -> dict[str, float]:
        return {name: quota / PERIOD for name, quota in zip(self._names, self.quotas, strict=True)}

    def order(self, seed: int) -> MixedOrder:
        return MixedOrder(tuple(map(len, self._stores)), tuple(self.quotas), seed)

    def source_of(self, unit: int) -> str | None:
        return self.labels[bisect_right(self._ends, unit)]

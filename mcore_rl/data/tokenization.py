"""All records of a source to token ids: one after the other, or by several processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Literal

from mcore_rl.data.chat import end_token_ids
from mcore_rl.data.readers import Records, files_of, read_records
from mcore_rl.data.token_store import TokenizedChunk, Unit
from mcore_rl.data.tokenize import load_tokenizer
from mcore_rl.errors import UserError
from mcore_rl.utils.progress import Progress, Say

SOURCE_BYTES_FOR_PROCESSES = 32 << 20
"""Files from this size on are tokenized by several processes, which take some seconds to start."""

CHUNKS_AHEAD = 4
"""Read for each process before it has asked for them."""


@dataclass(frozen=True)
class Tokenization:
    """What is done to each record. All functions are a module's own, since other processes are given them."""

    name: str
    """Name of the kind of records, and values of every option of its functions."""
    unit_of: Callable[[Any, dict[str, Any]], Unit]
    """(tokenizer, record) → its sequences; raises ValueError."""
    sequences_per_unit: int
    max_length: int
    """Limit of a sequence, in tokens."""
    overlong: Literal["drop", "truncate"] = "drop"
    needs_response: bool = True
    """Whether each sequence must have a token that is trained on."""
    extra_of: Callable[[dict[str, Any]], Any] | None = None
    """record → what is kept beside the tokens, as JSON."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """The source's own names of what is wanted, by the names of this package."""
    max_records: int | None = None
    """Only the first ones are read."""
    seen_in: Callable[[Unit, dict[str, Any]], Sequence[str]] | None = None
    """(unit, record) → names of what is counted."""

    def chunk(self, tokenizer: Any, records: Records) -> TokenizedChunk:
        """Some records.

        Raises:
            UserError: names the place of one that is wrong.
        """
        chunk, ends = TokenizedChunk(), end_token_ids(tokenizer)
        for place, record in records.parsed():
            try:
                record = self._renamed(record)
                unit = self.unit_of(tokenizer, record)
                if self.needs_response and not all(sequence.is_trainable for sequence in unit):
                    raise ValueError("the record has no response tokens")
            except ValueError as error:
                raise UserError(f"{place}: {error}") from None
            chunk.counts["records"] += 1
            chunk.counts["teach_end"] += any(not ends.isdisjoint(sequence.trained_ids) for sequence in unit)
            kept = self._limited(unit)
            if kept is None:
                chunk.counts["dropped"] += 1
                continue
            chunk.counts["truncated"] += kept != unit
            chunk.counts.update(() if self.seen_in is None else self.seen_in(kept, record))
            extra = None if self.extra_of is None else self.extra_of(record)
            chunk.add(kept, None if extra is None else json.dumps(extra, default=str).encode())
        return chunk

    def _renamed(self, record: dict[str, Any]) -> dict[str, Any]:
        if not self.columns:
            return record
        if missing := [column for column in self.columns.values() if column not in record]:
            has = ", ".join(sorted(record)) or "nothing"
            raise ValueError(f"lacks the key {' and '.join(missing)}, which data.columns names; it has {has}")
        others = {key: value for key, value in record.items() if key not in self.columns.values()}
        return {**others, **{name: record[column] for name, column in self.columns.items()}}

    def _limited(self, unit: Unit) -> Unit | None:
        """A unit whose sequences are not too long; None if it is left out."""
        if max(map(len, unit)) <= self.max_length:
            return unit
        if self.overlong == "drop":
            return None
        unit = tuple(sequence.truncate(self.max_length) for sequence in unit)
        return unit if all(sequence.is_trainable for sequence in unit) else None


@dataclass(frozen=True)
class TokenizerSource:
    """Values from which another process makes the same tokenizer."""

    path: Path
    trust_remote_code: bool
    chat_template: str | None
    day: date | None = None


def tokenize_source(
    source: str, tokenizer: Any, what: Tokenization, say: Say, remake: TokenizerSource | None = None, workers: int = 1
) -> Iterator[TokenizedChunk]:
    """The records of a source in their order.

    Args:
        remake: for other processes; without it there are none.
        workers: processes, for sources that are worth it.

    Raises:
        UserError: the first record that is wrong, or a source without any.
    """
    progress, count = Progress(f"tokenizing {source}", say), 0
    files = [Path(file) for file in files_of(source)]
    is_large = sum(file.stat().st_size for file in files if file.is_file()) >= SOURCE_BYTES_FOR_PROCESSES
    if remake is None or workers == 1 or not is_large:
        chunks: Iterator[tuple[TokenizedChunk, float]] = (
            (what.chunk(tokenizer, records), part) for records, part in _first_records(source, what.max_records)
        )
    else:
        say(f"tokenizing {source} by {workers} processes")
        chunks = _by_processes(source, what, remake, workers)
    for chunk, part in chunks:
        count += chunk.counts["records"]
        progress.reached(part, count)
        yield chunk


def _first_records(source: str, limit: int | None) -> Iterator[tuple[Records, float]]:
    """Return the records that are read of a source, up to `limit`."""
    left = limit
    for records, part in read_records(source):
        yield (records, part) if left is None else (records.first(left), part)
        left = None if left is None else left - len(records.numbers)
        if left is not None and left <= 0:
            return


def available_workers() -> int:
    """Processors that this process may use, but for one that reads and writes."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, count - 1)


def _by_processes(
    source: str, what: Tokenization, remake: TokenizerSource, workers: int
) -> Iterator[tuple[TokenizedChunk, float]]:
    # Spawned, not forked: threads of PyTorch and of the tokenizers library do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _remake_tokenizer, (remake,)) as pool:
        ahead: list[tuple[Future[TokenizedChunk], float]] = []
        for records, part in _first_records(source, what.max_records):
            ahead.append((pool.submit(_chunk, what, records), part))
            if len(ahead) > workers * CHUNKS_AHEAD:
                future, done = ahead.pop(0)
                yield future.result(), done
        for future, done in ahead:
            yield future.result(), done


_tokenizer: Any = None


def _remake_tokenizer(source: TokenizerSource) -> None:
    global _tokenizer
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tokenizer = load_tokenizer(source.path, source.trust_remote_code, source.chat_template, day=source.day)


def _end_with_parent(parent: int) -> None:
    """A parent that is killed cannot end its workers, which would wait for work for ever."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _chunk(what: Tokenization, records: Records) -> TokenizedChunk:
    return what.chunk(_tokenizer, records)

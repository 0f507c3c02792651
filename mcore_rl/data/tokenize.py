"""Tokenization: from a record's text to token ids and the mask of trained tokens, one record or a whole source."""

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

from mcore_rl.data.chat import (
    GENERATION_MARKER,
    Messages,
    check_messages,
    check_tools,
    end_token_ids,
    render,
    render_prompt,
    set_chat_day,
    tokenize_conversation,
)
from mcore_rl.data.readers import Records, files_of, read_records
from mcore_rl.data.token_store import SequenceGroup, TokenizedChunk, TokenSequence
from mcore_rl.errors import UserError
from mcore_rl.utils.console import PrintLine, Progress, silent

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load_tokenizer(
    path: Path,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
    say: PrintLine = silent,
    day: date | None = None,
) -> Any:
    """The tokenizer of a model directory, with `chat_template` in place of its own if one is given.

    Where there is no pad token the end token pads: padding is masked, so any would do.

    Args:
        day: what its template is told if it asks for the day; today if left out.

    Raises:
        UserError: no tokenizer, no end token, or a template that is none.
    """
    from jinja2 import Environment, TemplateError
    from transformers import AutoTokenizer

    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(f"model.path: there is no tokenizer in {path} (none of {', '.join(TOKENIZER_FILES)})")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizers raises bare Exception for a broken tokenizer.json
        raise UserError(f"model.path: no tokenizer can be loaded from {path}: {' '.join(str(error).split())}") from None
    if tokenizer.eos_token_id is None:
        raise UserError(f"model.path: the tokenizer in {path} has no eos_token; set it in tokenizer_config.json")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
        say(f"the tokenizer has no pad token; its end token {tokenizer.eos_token} pads (padding is never trained on)")
    if chat_template is not None:
        try:
            Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_without_markers(chat_template))
        except TemplateError as error:
            raise UserError(f"data.chat_template: is not a Jinja template: {error}") from None
        if tokenizer.chat_template:
            say("data.chat_template takes the place of the tokenizer's own")
        tokenizer.chat_template = chat_template
    set_chat_day(tokenizer, day or date.today())
    return tokenizer


def _without_markers(template: str) -> str:
    return GENERATION_MARKER.sub("", template).replace("{% endgeneration %}", "").replace("{%- endgeneration %}", "")


def tokenize_completion(
    tokenizer: Any, prompt: str | Messages, completion: str | Messages, tools: Any = None
) -> TokenSequence:
    """A prompt and its completion, both plain strings or both message lists.

    Of plain strings the completion and an end token are trained on; of messages, what the assistant says in
    the completion.

    Raises:
        ValueError: mixed kinds, messages that are none, or a chat template that fails or cannot be followed.
    """
    if isinstance(prompt, str) and isinstance(completion, str):
        context = tokenize_prompt(tokenizer, prompt, tools)
        response = tokenizer(completion, add_special_tokens=False)["input_ids"]
        end = [tokenizer.eos_token_id] if response and response[-1] != tokenizer.eos_token_id else []
        return TokenSequence((*context, *response, *end), (False,) * len(context) + (True,) * len([*response, *end]))
    if isinstance(prompt, list) and isinstance(completion, list):
        before, after = check_messages(prompt, "prompt"), check_messages(completion, "completion")
        return _conversation(tokenizer, before + after, len(before), tools)
    raise ValueError("prompt and completion must both be strings or both be lists of messages")


def tokenize_messages(tokenizer: Any, messages: Messages, tools: Any = None) -> TokenSequence:
    """A conversation; every message of the assistant is trained on, but for those of weight 0.

    Raises:
        ValueError: as `tokenize_completion`.
    """
    return _conversation(tokenizer, check_messages(messages, "messages"), 0, tools)


def _conversation(tokenizer: Any, messages: Messages, first: int, tools: Any) -> TokenSequence:
    """Trained on are the assistant's messages from number `first` on."""
    wanted = [i for i, m in enumerate(messages) if i >= first and m["role"] == "assistant" and m.get("weight", 1)]
    if not wanted:
        if len(messages) > first:
            raise ValueError("the record has no response tokens: no message of the assistant is trained on")
        return TokenSequence((), ())
    for index in wanted:
        if not messages[index].get("content", "").strip() and not messages[index].get("tool_calls"):
            raise ValueError(f"message {index + 1} (assistant) is empty")
    ids, mask = tokenize_conversation(tokenizer, messages, wanted, check_tools(tools))
    return TokenSequence(tuple(ids), tuple(mask))


def judged_tokens(tokenizer: Any, messages: Messages, tools: Any = None) -> list[int]:
    """Render a whole conversation for a reward model, which reads its number at the last of these tokens.

    They are those of transformers' `apply_chat_template`: also what the template writes behind the last response.

    Raises:
        ValueError: there is no template, or it fails.
    """
    return list(tokenizer(render(tokenizer, messages, tools), add_special_tokens=False)["input_ids"])


def tokenize_judged(
    tokenizer: Any, prompt: str | Messages, response: str | Messages, tools: Any = None
) -> TokenSequence:
    """Tokenize a prompt and its response for a reward model: messages by `judged_tokens`.

    Raises:
        ValueError: as `tokenize_completion`.
    """
    sequence = tokenize_completion(tokenizer, prompt, response, tools)
    if isinstance(prompt, str) or isinstance(response, str):
        return sequence
    messages = check_messages(prompt, "prompt") + check_messages(response, "completion")
    ids = judged_tokens(tokenizer, messages, check_tools(tools))
    mask = (*sequence.token_mask, *(False for _ in ids))[: len(ids)]
    return TokenSequence(tuple(ids), mask)


def tokenize_prompt(tokenizer: Any, prompt: str | Messages, tools: Any = None) -> tuple[int, ...]:
    """A prompt that awaits its response.

    Raises:
        ValueError: messages that are none, tools beside a plain text, or a chat template that fails.
    """
    tools = check_tools(tools)
    if isinstance(prompt, str):
        if tools:
            raise ValueError("tools are shown by a chat template: write the prompt as messages, or leave out tools")
        return (*_leading_special_tokens(tokenizer), *tokenizer(prompt, add_special_tokens=False)["input_ids"])
    messages = check_messages(prompt, "prompt")
    text = render_prompt(tokenizer, messages, tools)
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _leading_special_tokens(tokenizer: Any) -> list[int]:
    """Return the tokens that the tokenizer puts before a text: usually a beginning token or nothing."""
    marked = list(tokenizer("a")["input_ids"])
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    for start in range(len(marked) - len(plain) + 1):
        if marked[start : start + len(plain)] == plain:
            return marked[:start]
    return []


SOURCE_BYTES_FOR_PROCESSES = 32 << 20
"""Files from this size on are tokenized by several processes, which take some seconds to start."""

CHUNKS_AHEAD = 4
"""Read for each process before it has asked for them."""


@dataclass(frozen=True)
class TokenizationSpec:
    """What is done to each record. All functions are a module's own, since other processes are given them."""

    name: str
    """Name of the kind of records, and values of every option of its functions."""
    unit_of: Callable[[Any, dict[str, Any]], SequenceGroup]
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
    seen_in: Callable[[SequenceGroup, dict[str, Any]], Sequence[str]] | None = None
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

    def _limited(self, unit: SequenceGroup) -> SequenceGroup | None:
        """A unit whose sequences are not too long; None if it is left out."""
        if max(map(len, unit)) <= self.max_length:
            return unit
        if self.overlong == "drop":
            return None
        unit = tuple(sequence.truncate(self.max_length) for sequence in unit)
        return unit if all(sequence.is_trainable for sequence in unit) else None


@dataclass(frozen=True)
class TokenizerSpec:
    """Values from which another process makes the same tokenizer."""

    path: Path
    trust_remote_code: bool
    chat_template: str | None
    day: date | None = None


def tokenize_source(
    source: str,
    tokenizer: Any,
    what: TokenizationSpec,
    say: PrintLine,
    remake: TokenizerSpec | None = None,
    workers: int = 1,
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
    source: str, what: TokenizationSpec, remake: TokenizerSpec, workers: int
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


def _remake_tokenizer(source: TokenizerSpec) -> None:
    global _tokenizer
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tokenizer = load_tokenizer(source.path, source.trust_remote_code, source.chat_template, day=source.day)


def _end_with_parent(parent: int) -> None:
    """A parent that is killed cannot end its workers, which would wait for work for ever."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _chunk(what: TokenizationSpec, records: Records) -> TokenizedChunk:
    return what.chunk(_tokenizer, records)

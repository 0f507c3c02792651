"""Tokenization of one record or a whole source: from text to token ids and the mask of trained tokens."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any, Literal

from mcore_rl.data.chat import (
    GENERATION_MARKER,
    ImageTokens,
    Messages,
    check_image_tokens,
    check_messages,
    check_tools,
    end_token_ids,
    image_sources,
    image_tokens,
    is_prefill,
    reads_images,
    render,
    set_chat_day,
    text_of,
    without,
)
from mcore_rl.data.images import ImageReader, PlacedImage, with_directory
from mcore_rl.data.readers import Records, files_of, json_of, read_records, with_texts
from mcore_rl.data.responses import render_prompt, tokenize_conversation
from mcore_rl.data.texts import completed_text_tokens, prompt_text_tokens
from mcore_rl.data.token_store import SequenceGroup, TokenizedChunk, TokenSequence, dropped_with
from mcore_rl.errors import UserError
from mcore_rl.utils.console import PrintLine, Progress, silent
from mcore_rl.utils.model_directory import check_tokenizer, vision_model_config
from mcore_rl.utils.torchrun import processors


def load_tokenizer(
    path: Path,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
    say: PrintLine = silent,
    day: date | None = None,
    images: Path | None = None,
) -> Any:
    """Return the tokenizer of a model directory; its chat template is replaced by `chat_template`, if given.

    If the tokenizer has no pad token, its end token is used. Padding is masked, so the choice does not matter.

    Args:
        day: date for a chat template that inserts a date; today if None.
        images: directory in which images of records that have no file are stored. None: no record has images.

    Raises:
        UserError: there is no tokenizer or no end token, the template is invalid, or the configuration of a model that
            reads images has no image token.
    """
    from jinja2 import Environment, TemplateError
    from transformers import AutoTokenizer

    check_tokenizer(path)
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
    if images is not None and (config := vision_model_config(path)) is not None:
        if not isinstance(config.get("image_token_id"), int):
            raise UserError(
                f"model.path: {path / 'config.json'} has no image_token_id, the id of the token that stands for an "
                "image in a text; add it"
            )
        text = str(tokenizer.convert_ids_to_tokens(config["image_token_id"]))
        reader = ImageReader(path, images)
        tokenizer.image_tokens = ImageTokens(text, config["image_token_id"], config.get("video_token_id"), reader)
    return tokenizer


def count_ids(tokenizer: Any) -> int:
    """Return the number of ids up to the last one for which the tokenizer has a token."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def _without_markers(template: str) -> str:
    return GENERATION_MARKER.sub("", template).replace("{% endgeneration %}", "").replace("{%- endgeneration %}", "")


JSON_NAMES = {str: "a string", list: "a list", dict: "an object", int: "a number", float: "a number", bool: "a boolean"}
"""Names of JSON types in error messages."""


def tokenize_completion(
    tokenizer: Any,
    prompt: str | Messages,
    completion: str | Messages,
    tools: Any = None,
    continues: bool = True,
    images: Sequence[Any] = (),
) -> TokenSequence:
    """Tokenize a prompt and its completion. Both are plain strings, or both are lists of messages.

    With plain strings, the completion and its end token are trained on. With messages, the assistant's messages in the
    completion are trained on.

    Args:
        continues: whether the completion's first message continues a message of the assistant at the end of the prompt.
        images: sources of the images for the messages' image parts without a source.

    Raises:
        ValueError: one is a string and the other a list, messages are invalid, the chat template fails, an image cannot
            be read, or a response cannot be found in the template's output.
    """
    if isinstance(prompt, str) and isinstance(completion, str):
        _refuse_tools(tools)
        return _text_only(tokenizer, completed_text_tokens(tokenizer, prompt, completion), images)
    if isinstance(prompt, list) and isinstance(completion, list):
        return _conversation(tokenizer, *_joined(prompt, completion, continues), tools=tools, images=images)
    found = " and ".join(JSON_NAMES.get(type(part), type(part).__name__) for part in (prompt, completion))
    raise ValueError(
        "a prompt and its response (completion, chosen or rejected) must both be strings or both be lists of messages; "
        f'found {found}; beside messages, write a text as [{{"role": "user", "content": "…"}}]'
    )


def _joined(prompt: Messages, completion: Messages, continues: bool) -> tuple[Messages, int, str]:
    """Return the messages of a prompt and its completion, the index of the completion's first message, and a prefill.

    The prefill is the part of this message with which the prompt ends. It is empty if the prompt does not end with a
    message of the assistant, or if the completion does not continue it.
    """
    before, after = check_messages(prompt, "prompt"), check_messages(completion, "completion")
    if not (continues and is_prefill(before) and after and after[0]["role"] == "assistant"):
        return before + after, len(before), ""
    given, rest = without(before[-1], "weight"), after[0]
    if not (text_of(rest).strip() or rest.get("tool_calls")):
        raise ValueError("completion, message 1 (assistant) is empty")
    if given["content"].strip() and rest.get("reasoning_content"):
        raise ValueError(
            "completion, message 1: has a reasoning_content, but the prompt ends with the beginning of this response; "
            "write the thought into the content of both, or end the prompt with a message of the user"
        )
    whole = {**given, **rest, "content": given["content"] + rest.get("content", "")}
    return [*before[:-1], whole, *after[1:]], len(before) - 1, given["content"]


def tokenize_messages(
    tokenizer: Any, messages: Messages, tools: Any = None, images: Sequence[Any] = ()
) -> TokenSequence:
    """Tokenize a conversation; all messages of the assistant are trained on, except messages with weight 0.

    Args:
        images: sources of the images for the messages' image parts without a source.

    Raises:
        ValueError: as in `tokenize_completion`.
    """
    return _conversation(tokenizer, check_messages(messages, "messages"), tools=tools, images=images)


def _conversation(
    tokenizer: Any,
    messages: Messages,
    first: int = 0,
    prefill: str = "",
    tools: Any = None,
    images: Sequence[Any] = (),
) -> TokenSequence:
    """Tokenize a conversation; the assistant's messages from index `first` on are trained on, without `prefill`."""
    sources = filled_sources(tokenizer, messages, images)
    wanted = [i for i, m in enumerate(messages) if i >= first and m["role"] == "assistant" and m.get("weight", 1)]
    if not wanted:
        if len(messages) > first:
            raise ValueError(
                "the record has no response tokens: no message of the assistant has weight 1 (the default)"
            )
        return TokenSequence((), ())
    for index in wanted:
        if not text_of(messages[index]).strip() and not messages[index].get("tool_calls"):
            raise ValueError(f"message {index + 1} (assistant) is empty")
    given = prefill if wanted[0] == first else ""
    ids, mask = tokenize_conversation(tokenizer, messages, wanted, check_tools(tools), given)
    return place_images(tokenizer, TokenSequence(tuple(ids), tuple(mask)), sources)


def filled_sources(tokenizer: Any, messages: Messages, images: Sequence[Any]) -> list[Any]:
    """Return the source of each image in checked messages; image parts without a source take the next of `images`.

    If the model reads no images, and no message has an image part, `images` are ignored, as other columns are.

    Raises:
        ValueError: the model reads no images, or the numbers of such parts and of `images` differ.
    """
    sources = image_sources(messages)
    if sources:
        image_tokens(tokenizer)
    elif images and not reads_images(tokenizer):
        return []
    lacking = sum(source is None for source in sources)
    if lacking != len(images):
        raise ValueError(
            f"the record has {len(images)} images in its column images, but its messages have {lacking} image parts "
            'without a source; write {"type": "image"} in the content where each of these images belongs'
        )
    left = iter(images)
    return [next(left) if source is None else source for source in sources]


def place_images(tokenizer: Any, sequence: TokenSequence, sources: Sequence[Any]) -> TokenSequence:
    """Read the images of a conversation and repeat the token of each image once for each token that the image has.

    Args:
        sequence: the conversation, with one token for each image; it may end before the last images.
        sources: the sources of the images.

    Raises:
        ValueError: an image cannot be read, or there is a token of an image or video that the record does not have.
    """
    if not sources:
        return _text_only(tokenizer, sequence)
    tokens = image_tokens(tokenizer)
    ids, mask, images = list[int](), list[bool](), list[PlacedImage]()
    for token, is_trained in zip(sequence.input_ids, sequence.token_mask, strict=True):
        count = 1
        if token == tokens.token_id:
            try:
                images.append(tokens.reader.placed(sources[len(images)], len(ids)))
            except ValueError as error:
                if isinstance(error, UserError):  # of the model directory or the installation, not of the record
                    raise
                raise ValueError(f"image {len(images) + 1}: {error}") from None
            count = images[-1].count
        elif token == tokens.video_id:
            raise ValueError("has a video, which is not supported; leave it out, or give its frames as images")
        ids += [token] * count
        mask += [is_trained] * count
    return TokenSequence(tuple(ids), tuple(mask), sequence.notes, tuple(images))


def _text_only(tokenizer: Any, sequence: TokenSequence, images: Sequence[Any] = ()) -> TokenSequence:
    """Return the tokens of a text, or of messages without images.

    Raises:
        ValueError: the model reads images, and the record has `images`, or the tokens are of an image or video.
    """
    tokens: ImageTokens | None = getattr(tokenizer, "image_tokens", None)
    if tokens is not None and images:
        raise ValueError("has images, but its prompt is a text; write it as messages with image parts")
    if tokens is not None and (found := {tokens.token_id, tokens.video_id}.intersection(sequence.input_ids)):
        text = tokenizer.convert_ids_to_tokens(found.pop())
        raise ValueError(
            f"has {text} in a text, but no such image; remove it, or write the image as a part of a message's content"
        )
    return sequence


def judged_tokens(tokenizer: Any, messages: Messages, tools: Any = None, images: Sequence[Any] = ()) -> TokenSequence:
    """Return the tokens of a whole conversation for a reward model, which computes the reward at the last token.

    The tokens equal the tokens of transformers' `apply_chat_template`, including the template's text after the last
    response. No token carries loss.

    Args:
        images: sources of the images for the messages' image parts without a source.

    Raises:
        ValueError: the tokenizer has no template, the template fails, an image cannot be read, or the model reads no
            images.
    """
    sources, text = filled_sources(tokenizer, messages, images), render(tokenizer, messages, tools)
    check_image_tokens(tokenizer, messages, text)
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    return place_images(tokenizer, TokenSequence(ids, (False,) * len(ids)), sources)


def tokenize_judged(
    tokenizer: Any,
    prompt: str | Messages,
    response: str | Messages,
    tools: Any = None,
    continues: bool = True,
    images: Sequence[Any] = (),
) -> TokenSequence:
    """Tokenize a prompt and its response for a reward model; messages are tokenized by `judged_tokens`.

    Raises:
        ValueError: as in `tokenize_completion`.
    """
    sequence = tokenize_completion(tokenizer, prompt, response, tools, continues, images)
    if isinstance(prompt, str) or isinstance(response, str):
        return sequence
    messages, _, _ = _joined(prompt, response, continues)
    whole = judged_tokens(tokenizer, messages, check_tools(tools), images)
    mask = (*sequence.token_mask, *whole.token_mask)[: len(whole)]
    return replace(whole, token_mask=mask)


def tokenize_prompt(
    tokenizer: Any, prompt: str | Messages, tools: Any = None, images: Sequence[Any] = ()
) -> TokenSequence:
    """Tokenize a prompt, up to the place where the response will start. No token carries loss.

    Args:
        images: sources of the images for the messages' image parts without a source.

    Raises:
        ValueError: messages are invalid, an image cannot be read, tools are given with a plain text, or the chat
            template fails.
    """
    if isinstance(prompt, str):
        _refuse_tools(tools)
        return _text_only(tokenizer, prompt_text_tokens(tokenizer, prompt), images)
    messages = check_messages(prompt, "prompt")
    sources = filled_sources(tokenizer, messages, images)
    text = render_prompt(tokenizer, messages, check_tools(tools))
    check_image_tokens(tokenizer, messages, text)
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    return place_images(tokenizer, TokenSequence(ids, (False,) * len(ids)), sources)


def _refuse_tools(tools: Any) -> None:
    """Raise ValueError if a record with a plain text has tools."""
    if check_tools(tools):
        raise ValueError("tools need a chat template; write the prompt as messages, or leave tools out")


SOURCE_BYTES_FOR_PROCESSES = 32 << 20
"""Minimum file size for tokenization by several processes. These processes take some seconds to start."""

CHUNKS_AHEAD = 4
"""Number of chunks to read ahead for each process."""


def with_columns(record: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return a record with this package's names of its columns.

    Args:
        columns: map from this package's name of a column to the column's name in the source.

    Raises:
        ValueError: the record lacks a column.
    """
    if not columns:
        return record
    if missing := [column for column in columns.values() if column not in record]:
        has = ", ".join(sorted(record)) or "nothing"
        named = f"lacks the key{'s' * (len(missing) > 1)} {' and '.join(missing)}"
        raise ValueError(f"{named}, which data.columns names; the record has {has}")
    others = {key: value for key, value in record.items() if key not in columns.values()}
    return {**others, **{name: record[column] for name, column in columns.items()}}


@dataclass(frozen=True)
class TokenizationSpec:
    """Settings for the tokenization of records. The functions must be picklable, because other processes get them."""

    name: str
    """Name that identifies the functions below, with all their options, in the key of the token cache."""
    unit_of: Callable[[Any, dict[str, Any]], SequenceGroup]
    """Function (tokenizer, record) → sequences of the record; raises ValueError."""
    sequences_per_unit: int
    max_length: int
    """Maximum number of tokens of a sequence."""
    overlong: Literal["drop", "truncate"] = "drop"
    needs_response: bool = True
    """Whether each sequence must have a token that is trained on."""
    extra_of: Callable[[dict[str, Any]], Any] | None = None
    """Function of a record that returns JSON data to store with the tokens."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Map from this package's name of a column to the column's name in the source."""
    max_records: int | None = None
    """Read only this many records, from the start of the source; None for all."""
    seen_in: Callable[[SequenceGroup, dict[str, Any]], Sequence[str]] | None = None
    """Function (unit, record) → names of the counters in `TokenizedChunk.counts` that count this record."""

    def chunk(self, tokenizer: Any, records: Records) -> TokenizedChunk:
        """Tokenize consecutive records.

        Raises:
            UserError: a record is invalid; the message names its position.
        """
        chunk, source = TokenizedChunk(), Path(records.source)
        directory = source.absolute().parent if reads_images(tokenizer) and source.is_file() else None
        for place, record in records.parsed():
            try:
                record = with_texts(with_columns(record, self.columns))
                if directory is not None:
                    record = with_directory(record, directory)
                unit = self.unit_of(tokenizer, record)
                if self.needs_response and not all(sequence.is_trainable for sequence in unit):
                    raise ValueError("the record has no response tokens")
                kept = self._limited(unit)
                extra = None if kept is None or self.extra_of is None else json_of(self.extra_of(record))
            except ValueError as error:
                raise UserError(f"{place}: {error}") from None
            chunk.counts["records"] += 1
            chunk.counts.update({note for sequence in unit for note in sequence.notes})
            chunk.counts["with_images"] += any(sequence.images for sequence in unit)
            ends = end_token_ids(tokenizer)
            chunk.counts["teach_end"] += any(not ends.isdisjoint(sequence.trained_ids) for sequence in unit)
            if kept is None:
                chunk.counts["dropped"] += 1
                chunk.counts[dropped_with(max(map(len, unit)))] += 1
                continue
            chunk.counts["truncated"] += kept != unit
            chunk.counts.update(() if self.seen_in is None else self.seen_in(kept, record))
            chunk.add(kept, extra)
        return chunk

    def _limited(self, unit: SequenceGroup) -> SequenceGroup | None:
        """Return `unit`, with longer sequences truncated to `max_length` tokens if configured; None to drop the record.

        A record is also dropped if truncation leaves a sequence without trained tokens.
        """
        if max(map(len, unit)) <= self.max_length:
            return unit
        if self.overlong == "drop":
            return None
        unit = tuple(sequence.truncate(self.max_length) for sequence in unit)
        return unit if all(sequence.is_trainable for sequence in unit) else None


@dataclass(frozen=True)
class TokenizerSpec:
    """The arguments of `load_tokenizer`. With them, another process creates the same tokenizer."""

    path: Path
    trust_remote_code: bool
    chat_template: str | None
    day: date | None = None
    images: Path | None = None


def tokenize_source(
    source: str,
    tokenizer: Any,
    what: TokenizationSpec,
    say: PrintLine,
    remake: TokenizerSpec | None = None,
    workers: int = 1,
) -> Iterator[TokenizedChunk]:
    """Yield the tokenized records of a source, in their order.

    Args:
        remake: settings of the tokenizer, for other processes; None to use only this process.
        workers: number of processes that tokenize a large source.

    Raises:
        UserError: a record is invalid (the first one is reported), or the source is empty.
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
    """Yield the first `limit` records of a source, or all if `limit` is None, with the fraction read so far."""
    left = limit
    for records, part in read_records(source):
        yield (records, part) if left is None else (records.first(left), part)
        left = None if left is None else left - len(records.numbers)
        if left is not None and left <= 0:
            return


def available_workers() -> int:
    """Return how many processes should tokenize: one per available processor, minus one that reads and writes."""
    return max(1, processors() - 1)


def _by_processes(
    source: str, what: TokenizationSpec, remake: TokenizerSpec, workers: int
) -> Iterator[tuple[TokenizedChunk, float]]:
    # Processes are spawned, because threads of PyTorch and of the tokenizers library do not survive a fork.
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
    path, trusted, template = source.path, source.trust_remote_code, source.chat_template
    _tokenizer = load_tokenizer(path, trusted, template, day=source.day, images=source.images)


def _end_with_parent(parent: int) -> None:
    """End this process when its parent has ended. Otherwise the process would wait forever for a killed parent."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _chunk(what: TokenizationSpec, records: Records) -> TokenizedChunk:
    return what.chunk(_tokenizer, records)

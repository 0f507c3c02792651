"""Datasets: pairs, conversations, unpaired responses and prompts, loaded through the token cache."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from string import Formatter
from typing import Any, overload

import numpy as np

from mcore_rl.config import DataConfig, DistillationConfig, RLConfig, TrainingConfig
from mcore_rl.data.chat import Messages, check_messages, has_images, image_sources, is_prefill, with_sources
from mcore_rl.data.images import IMAGE_COLUMNS, PlacedImage, images_of, moved
from mcore_rl.data.readers import SUFFIXES, files_of, require
from mcore_rl.data.texts import TEXT_NOTES
from mcore_rl.data.token_cache import TokenCache
from mcore_rl.data.token_store import (
    JoinedTokenStore,
    MixedTokenStore,
    Order,
    SequenceGroup,
    TokenSequence,
    TokenStore,
    collect,
    images_column,
    plain_name,
)
from mcore_rl.data.tokenize import (
    SOURCE_BYTES_FOR_PROCESSES,
    TokenizationSpec,
    tokenize_completion,
    tokenize_judged,
    tokenize_messages,
    tokenize_prompt,
    tokenize_source,
)
from mcore_rl.errors import UserError
from mcore_rl.utils.console import PrintLine, silent
from mcore_rl.utils.model_directory import check_tokenizer, has_chat_template, has_only_config


@dataclass(frozen=True)
class Dataset:
    """Tokenized records, and how many records were dropped or truncated because of their length."""

    units: TokenStore

    def __len__(self) -> int:
        return len(self.units)

    @property
    def num_dropped(self) -> int:
        return self.units.counts["dropped"]

    @property
    def num_truncated(self) -> int:
        return self.units.counts["truncated"]

    @property
    def has_images(self) -> bool:
        """Whether any of the records has images."""
        return self.units.counts["with_images"] > 0

    @property
    def fingerprint(self) -> str:
        """Hash of all token ids and masks, and of the images."""
        return self.units.fingerprint

    def describe(self, name: str, limit: int) -> str:
        """Return one line for the user: the dataset's size, and the numbers of dropped and truncated records.

        Args:
            name: name of the dataset in the line.
            limit: maximum number of tokens of a record.
        """
        parts = [f"{name}: {len(self.units):,} records, {self.units.num_tokens:,} tokens"]
        if with_images := self.units.counts["with_images"]:
            parts.append(f"{with_images:,} with images")
        if self.num_dropped:
            parts.append(described_drops(self.units, limit))
        if self.num_truncated:
            parts.append(f"{self.num_truncated:,} truncated to {limit} tokens")
        return ", ".join(parts) + described_shares(self.units)

    def order(self, seed: int) -> Order:
        """Return the order in which a run uses the records."""
        return self.units.order(seed)


@dataclass(frozen=True)
class UnpairedDataset(Dataset):
    """Single responses, each desirable or undesirable."""

    def is_desirable(self, index: int) -> bool:
        return bool(json.loads(self.units.extra(index)))

    def mismatched(self, index: int, other_index: int | None = None) -> TokenSequence:
        """Return the prompt of record `index` with the response of record `other_index`.

        By default, the other record is half a dataset away, because neighbouring records often have the same prompt.
        """
        if other_index is None:
            other_index = (index + len(self) // 2) % len(self)
        (own,), (other,) = self.units[index], self.units[other_index]
        end, start = own.token_mask.index(True), other.token_mask.index(True)
        return TokenSequence(
            own.input_ids[:end] + other.input_ids[start:],
            own.token_mask[:end] + other.token_mask[start:],
            images=moved(own.images, 0, end) + moved(other.images, start, len(other), end - start),
        )

    def describe(self, name: str, limit: int) -> str:
        return f"{super().describe(name, limit)}, {self.units.counts['desirable']:,} desirable"


class RewardDataset(Dataset):
    """Pairs for a reward model, with optional margins between the rewards of their responses."""

    @property
    def has_margins(self) -> bool:
        return self.units.counts["margin"] > 0

    def margin(self, index: int) -> float:
        """Return by how much the reward of the chosen response should exceed that of the rejected one; 0 by default."""
        return float(json.loads(self.units.extra(index)))

    def describe(self, name: str, limit: int) -> str:
        margins = f", {self.units.counts['margin']:,} with a margin" if self.has_margins else ""
        return super().describe(name, limit) + margins


class DistillationDataset(Dataset):
    """SFT records for distillation, with data about the teachers of each record.

    It is used if records name their teachers, or if teachers read another prompt than the student.
    """

    def teachers(self, index: int) -> dict[str, float]:
        """Return the weight of each teacher of record `index`, by name. The configuration must have named teachers."""
        weights: dict[str, float] = json.loads(self.units.extra(index))["teachers"]
        return weights

    def teacher_prompt(self, index: int, tokenizer: Any) -> tuple[int, ...]:
        """Return the tokens of the prompt for the teachers of record `index`.

        The configuration must have a `teacher_prompt`.
        """
        prompt, tools = json.loads(self.units.extra(index))["prompt"]
        return tokenize_prompt(tokenizer, prompt, tools).input_ids


Source = str | Sequence[str] | Mapping[str, float]
"""A source of records: a path or name, several of them, or a mixture (a map from path or name to sample weight)."""


def named(source: Source) -> str:
    """Return the name of a source, or the names of several sources, for messages."""
    return source if isinstance(source, str) else ", ".join(source)


def described_shares(store: TokenStore) -> str:
    """Return text about the share of each source in the samples; "" for a single source."""
    shares = ", ".join(f"{share:.4g} from {name}" for name, share in store.shares.items())
    return f"; of the samples {shares}" if shares else ""


def described_drops(store: TokenStore, limit: int, response: int = 0) -> str:
    """Describe how many records were dropped because of their length, and the setting that would keep all records.

    Args:
        limit: maximum number of tokens of a record.
        response: how many of the data.max_sequence_length tokens are reserved for a response.
    """
    lengths = store.record_lengths()
    longest, median = int(lengths.max()), int(np.median(lengths))
    return (
        f"{store.counts['dropped']:,} of {len(lengths):,} dropped (longer than {limit} tokens; "
        f"the median is {median:,}, the longest {longest:,}; data.max_sequence_length={longest + response} keeps all)"
    )


def load_store(
    source: Source,
    tokenizer: Any,
    data: DataConfig,
    what: TokenizationSpec,
    say: PrintLine = silent,
    cache: TokenCache | None = None,
) -> TokenStore:
    """Return the tokenized records of a source: from `cache`, or tokenized in memory if `cache` is None.

    Raises:
        UserError: a record is invalid; the message names its file and line.
    """
    if not isinstance(source, str):
        stores = {name: load_store(name, tokenizer, data, what, say, cache) for name in source}
        return MixedTokenStore(stores, source) if isinstance(source, Mapping) else JoinedTokenStore(stores.values())
    what = replace(what, columns=data.columns_of(source))
    if cache is not None:
        store = cache.store(source, tokenizer, what, say)
    else:
        store = collect(tokenize_source(source, tokenizer, what, say), what.sequences_per_unit)
    for name, note in TEXT_NOTES.items():
        if store.counts[name]:
            say(f"{source}: in {store.counts[name]:,} of {store.counts['records']:,} records, {note}")
    return store


def tokenization_of(data: DataConfig, name: str, *functions: Any, **options: Any) -> TokenizationSpec:
    """Return the settings for tokenizing one kind of records under the configuration `data`.

    The names of columns are set later, for each source.

    Args:
        name: name of the kind of records.
        functions, options: further positional arguments (after `name`) and keyword arguments of `TokenizationSpec`.
    """
    common = {
        "max_length": data.max_sequence_length,
        "overlong": data.overlong,
        "max_records": data.max_samples,
    }
    return TokenizationSpec(name, *functions, **{**common, **options})


def load_preference_dataset(
    source: Source, tokenizer: Any, data: DataConfig, say: PrintLine = silent, cache: TokenCache | None = None
) -> Dataset:
    """Load pairs from records with the keys prompt, chosen and rejected. The values are strings or messages.

    The key prompt may be missing if chosen and rejected begin with the same messages.
    """
    return _load_pairs(
        source, tokenizer, data, tokenization_of(data, "preference", _tokenize_preference, 2), say, cache
    )


def load_reward_dataset(
    source: Source, tokenizer: Any, data: DataConfig, say: PrintLine = silent, cache: TokenCache | None = None
) -> RewardDataset:
    """Load pairs from the same records as `load_preference_dataset`, tokenized as a reward model reads them.

    A reward model also reads the text that the template writes after the response. A record may have a number `margin`.
    """
    what = tokenization_of(data, "reward", _tokenize_reward, 2, extra_of=_margin_of)
    return RewardDataset(_load_pairs(source, tokenizer, data, what, say, cache).units)


def _load_pairs(
    source: Source, tokenizer: Any, data: DataConfig, what: TokenizationSpec, say: PrintLine, cache: TokenCache | None
) -> Dataset:
    dataset = _load(source, tokenizer, data, replace(what, seen_in=_pair_kinds_of), say, cache)
    equal = dataset.units.counts["equal"]
    if equal == len(dataset):
        raise UserError(
            f"{named(source)}: chosen and rejected are the same in every record, so there is no preference to learn"
        )
    if equal:
        say(
            f"{named(source)}: chosen and rejected are the same in {equal:,} of {len(dataset):,} records, which teach "
            "nothing"
        )
    return dataset


def load_sft_dataset(
    source: Source, tokenizer: Any, data: DataConfig, say: PrintLine = silent, cache: TokenCache | None = None
) -> Dataset:
    """Load sequences from records with prompt and completion, or with messages; they may also have tools."""
    what = tokenization_of(data, "sft", _tokenize_sft, 1)
    return _load(source, tokenizer, data, what, say, cache)


@dataclass(frozen=True)
class Teaching:
    """Settings of distillation with named teachers, or with another prompt for the teachers.

    teachers: names of all teachers that records may name; ("",) for a single teacher without name.
    template: template of a prompt. The teachers read this prompt instead of the record's prompt. {COLUMN} is replaced
        by a column of the record.
    max_new_tokens: maximum length of the responses that the student samples; None if the student is trained on the
        records' responses.
    """

    teachers: tuple[str, ...] = ("",)
    template: str | None = None
    max_new_tokens: int | None = None

    @property
    def have_names(self) -> bool:
        """Whether records name their teachers; otherwise there is a single teacher without a name."""
        return self.teachers != ("",)

    @property
    def reads_records(self) -> bool:
        return self.have_names or self.template is not None

    def unit_of(self, tokenizer: Any, record: dict[str, Any], max_length: int, truncates: bool) -> SequenceGroup:
        """Return the tokens of an SFT record, as a tuple of one sequence; check the prompt for the teachers.

        Raises:
            ValueError: the column `teacher` is invalid, or the prompt for the teachers is invalid or too long.
        """
        (sequence,) = unit = _tokenize_sft(tokenizer, record)
        prompt = self.of(record).get("prompt")
        if prompt is None or not sequence.is_trainable or (len(sequence) > max_length and not truncates):
            return unit
        length, own = len(tokenize_prompt(tokenizer, *prompt)), sequence.token_mask.index(True)
        response = max(min(len(sequence), max_length) - own, min(self.max_new_tokens or 0, max_length - own))
        if length + response > max_length:
            raise ValueError(
                f"distillation.teacher_prompt: the teacher's prompt ({length} tokens) and the response ({response} "
                f"tokens) together exceed data.max_sequence_length={max_length}; raise data.max_sequence_length, or "
                "remove the record"
            )
        return unit

    def of(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return the data about a record's teachers that is stored with the record.

        `teachers`: weight of each of the record's teachers, by name. Present only if teachers have names.
        `prompt`: the teachers' prompt and its tools. Present only if it differs from the student's prompt.
        """
        own: dict[str, Any] = {}
        if self.have_names:
            own["teachers"] = self._weights_of(record)
        if self.template is not None:
            own["prompt"] = [self._prompt_of(record, self.template), record.get("tools")]
        return own

    def _weights_of(self, record: dict[str, Any]) -> dict[str, float]:
        require(record, "teacher")
        named = record["teacher"] if isinstance(record["teacher"], dict) else {record["teacher"]: 1.0}
        if not named or any(name not in self.teachers for name in named):
            known = ", ".join(self.teachers)
            raise ValueError(
                f"teacher: {record['teacher']!r} is not a name in distillation.teacher; the names are {known}"
            )
        for name, weight in named.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
                raise ValueError(f"teacher: the weight of {name} must be a positive number, got {weight!r}")
        return {name: float(weight) for name, weight in named.items()}

    def _prompt_of(self, record: dict[str, Any], template: str) -> str | Messages:
        """Return the record's prompt for the teachers, with the filled template in place of the prompt's text.

        If the prompt is a list of messages, the filled template replaces the text of the last message. If this is the
        beginning of a response, the filled template replaces the text of the message before it.
        """
        prompt = record.get("prompt")
        if record.get("messages") is not None:
            messages = record["messages"]
            trained = [n for n, m in enumerate(messages) if m["role"] == "assistant" and m.get("weight", 1)]
            if len(trained) != 1:
                raise ValueError(
                    "distillation.teacher_prompt: needs exactly one trained response in messages; give the other "
                    "responses weight 0"
                )
            prompt = list(messages[: trained[0]])
        if not prompt:
            raise ValueError("distillation.teacher_prompt: the record has no prompt that could be replaced")
        names = [name for _, name, _, _ in Formatter().parse(template) if name not in (None, "prompt")]
        require(record, *names)
        if numbers := [name for name in names if not isinstance(record[name], str)]:
            raise ValueError(
                f"{numbers[0]}: must be a text, because distillation.teacher_prompt inserts it; got "
                f"{record[numbers[0]]!r}"
            )
        if isinstance(prompt, str):
            return template.format_map({**record, "prompt": prompt})
        prompt = check_messages(prompt, "prompt")
        if any(map(has_images, prompt)):
            raise ValueError("distillation.teacher_prompt: is a text, but the record's prompt has images")
        place = max(0, len(prompt) - 1 - is_prefill(prompt))
        filled = template.format_map({**record, "prompt": prompt[place]["content"]})
        return [*prompt[:place], {**prompt[place], "content": filled}, *prompt[place + 1 :]]


def load_distillation_dataset(
    source: Source,
    tokenizer: Any,
    data: DataConfig,
    say: PrintLine = silent,
    cache: TokenCache | None = None,
    teaching: Teaching = Teaching(),
) -> DistillationDataset:
    """Load SFT records for distillation.

    With named teachers, read the column `teacher` too; with a template, read the columns that the template names.
    """
    what = tokenization_of(data, "sft", _tokenize_sft, 1)
    if teaching.reads_records:
        longest, truncates = data.max_sequence_length, data.overlong == "truncate"
        unit_of = partial(teaching.unit_of, max_length=longest, truncates=truncates)
        what = replace(what, name=f"distill {teaching}", unit_of=unit_of, extra_of=teaching.of)
    return DistillationDataset(_load(source, tokenizer, data, what, say, cache).units)


def load_unpaired_dataset(
    source: Source, tokenizer: Any, data: DataConfig, say: PrintLine = silent, cache: TokenCache | None = None
) -> UnpairedDataset:
    """Load sequences from SFT records with a `label`: true if the response is desirable."""
    what = tokenization_of(data, "unpaired", _tokenize_unpaired, 1, extra_of=_label_of, seen_in=_kind_of)
    dataset = UnpairedDataset(_load(source, tokenizer, data, what, say, cache).units)
    if len(dataset) < 2:
        raise UserError(f"{named(source)}: has only one record, but KTO compares the responses of several records")
    if (desirable := dataset.units.counts["desirable"]) in (0, len(dataset)):
        say(f"{named(source)}: all responses are {'desirable' if desirable else 'undesirable'}")
    return dataset


def _tokenize_unpaired(tokenizer: Any, record: dict[str, Any]) -> SequenceGroup:
    require(record, "label")
    if not isinstance(record["label"], bool):
        raise ValueError(f"label must be true or false, got {record['label']!r}")
    return _tokenize_sft(tokenizer, record)


def _label_of(record: dict[str, Any]) -> bool:
    return bool(record["label"])


def _kind_of(unit: SequenceGroup, record: dict[str, Any]) -> tuple[str, ...]:
    return ("desirable",) if record["label"] else ()


def _load(
    source: Source, tokenizer: Any, data: DataConfig, what: TokenizationSpec, say: PrintLine, cache: TokenCache | None
) -> Dataset:
    store = load_store(source, tokenizer, data, what, say, cache)
    counts = store.counts
    if not len(store):
        drops = described_drops(store, data.max_sequence_length)
        raise UserError(f"{named(source)}: no record is short enough: {drops}")
    if not counts["teach_end"] and what.name != "reward":  # a reward model does not learn end tokens
        say(
            f"{named(source)}: no response teaches the model to end: the chat template writes the end token "
            "outside its {% generation %} block; close the block after the end token"
        )
    return Dataset(store)


def _pair_kinds_of(unit: SequenceGroup, record: dict[str, Any]) -> list[str]:
    equal = ["equal"] if unit[0] == unit[1] else []
    return [*equal, "margin"] if record.get("margin") is not None else equal


def _tokenize_preference(tokenizer: Any, record: dict[str, Any]) -> SequenceGroup:
    prompt, responses, continues = _pair_of(record)
    more = record.get("tools"), continues, images_of(record)
    return tuple(tokenize_completion(tokenizer, prompt, text, *more) for text in responses)


def _tokenize_reward(tokenizer: Any, record: dict[str, Any]) -> SequenceGroup:
    _margin_of(record)
    prompt, responses, continues = _pair_of(record)
    more = record.get("tools"), continues, images_of(record)
    return tuple(tokenize_judged(tokenizer, prompt, text, *more) for text in responses)


def _margin_of(record: dict[str, Any]) -> float:
    """Return a record's margin, or 0 if it has none.

    Raises:
        ValueError: the margin is not a finite number.
    """
    margin = record.get("margin")
    if margin is None:
        return 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise ValueError(f"margin must be a finite number, or be left out; got {margin!r}")
    return float(margin)


def _pair_of(record: dict[str, Any]) -> tuple[Any, tuple[Any, Any], bool]:
    """Return the prompt of a preference record, its two responses, and whether responses may continue a message.

    Responses that are given with the prompt are whole conversations: they do not continue the prompt's last message.
    """
    require(record, "chosen", "rejected")
    prompt, chosen, rejected = record.get("prompt"), record["chosen"], record["rejected"]
    if prompt is None or (isinstance(prompt, str) and _repeat(prompt, chosen, rejected)):
        prompt, chosen, rejected = _split_shared_prompt(chosen, rejected)
        return prompt, (chosen, rejected), False
    if isinstance(prompt, list) and all(
        isinstance(response, list) and response[: len(prompt)] == prompt for response in (chosen, rejected)
    ):  # the responses repeat the prompt
        return prompt, (chosen[len(prompt) :], rejected[len(prompt) :]), False
    return prompt, (chosen, rejected), True


def _repeat(prompt: str, chosen: Any, rejected: Any) -> bool:
    """Return whether two responses are conversations that contain the text `prompt` as a message of the user."""
    if not (isinstance(chosen, list) and isinstance(rejected, list)):
        return False
    shared, _, _ = _split_shared_prompt(chosen, rejected)
    return any(isinstance(m, dict) and (m.get("role"), m.get("content")) == ("user", prompt) for m in shared)


def _split_shared_prompt(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """Split two conversations into a prompt (their common first messages) and two responses.

    The last message of each conversation always belongs to the response.
    """
    if not (isinstance(chosen, list) and isinstance(rejected, list)):
        raise ValueError("lacks the key prompt (only records with message lists may leave it out)")
    shared = 0
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _tokenize_sft(tokenizer: Any, record: dict[str, Any]) -> SequenceGroup:
    if record.get("messages") is not None:
        if record.get("completion") is not None:  # a prompt without completion is allowed
            raise ValueError("has both messages and a completion; keep only the one on which the model must be trained")
        return (tokenize_messages(tokenizer, record["messages"], record.get("tools"), images_of(record)),)
    require(record, "prompt", "completion")
    prompt, completion, images = record["prompt"], record["completion"], images_of(record)
    return (tokenize_completion(tokenizer, prompt, completion, record.get("tools"), images=images),)


@dataclass(frozen=True)
class Prompt:
    """A prompt: its token ids, its text or messages (`content`), and the other fields of its record.

    images: the images among the tokens. In `content`, the source of each image is the path of its file.
    """

    input_ids: tuple[int, ...]
    content: str | Messages
    record: dict[str, Any]
    images: tuple[PlacedImage, ...] = ()

    @property
    def message_log(self) -> list[dict[str, str]]:
        """The prompt as messages; a plain text becomes a user message."""
        return [{"role": "user", "content": self.content}] if isinstance(self.content, str) else list(self.content)

    @property
    def num_complete_messages(self) -> int:
        """Number of messages before the response; the beginning of the response is not counted."""
        return len(self.message_log) - is_prefill(self.message_log)


class StoredPrompts(Sequence[Prompt]):
    """The prompts in a token store, as a sequence; each `Prompt` is created when it is accessed."""

    def __init__(self, store: TokenStore) -> None:
        self.store = store

    def __len__(self) -> int:
        return len(self.store)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        ((sequence,), record) = self.store[index], json.loads(self.store.extra(index % len(self)))
        content = record.pop("prompt")
        if sequence.images:
            content = with_sources(content, [image.path for image in sequence.images])
        return Prompt(sequence.input_ids, content, record, sequence.images)


@dataclass(frozen=True)
class PromptDataset:
    """Dataset of prompts.

    max_response_length: how many of the data.max_sequence_length tokens are reserved for the response.
    """

    prompts: StoredPrompts
    max_response_length: int = 0

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def has_messages(self) -> bool:
        """Whether any of the prompts consists of messages."""
        return self.prompts.store.counts["messages"] > 0

    @property
    def has_images(self) -> bool:
        """Whether any of the prompts has images."""
        return self.prompts.store.counts["with_images"] > 0

    def images_column(self, indices: Sequence[int]) -> dict[str, Any]:
        """Return the batch entry `images` of rows with these prompts; {} if they have no images."""
        return images_column([self.prompts[index].images for index in indices]) if self.has_images else {}

    def describe(self, name: str, limit: int) -> str:
        """Return one line for the user: the numbers of prompts, tokens and dropped prompts."""
        store = self.prompts.store
        text = f"{name}: {len(self):,} prompts, {store.num_tokens:,} tokens"
        text += f", {store.counts['with_images']:,} with images" if store.counts["with_images"] else ""
        text += f", {described_drops(store, limit, self.max_response_length)}" if store.counts["dropped"] else ""
        return text + described_shares(store)

    def source_of(self, index: int) -> str | None:
        """Return the name of a prompt's source for metrics; None if the dataset has a single source without name.

        The name is the text in the record's field `data_source` or, without this field, the prompt's source in a
        mixture. Characters other than letters, digits, '_', '.' and '-' are replaced.
        """
        own = self.prompts[index].record.get("data_source")
        return plain_name(own) if isinstance(own, str) and own else self.prompts.store.source_of(index)

    def order(self, seed: int) -> Order:
        """Return the order in which a run uses the prompts."""
        return self.prompts.store.order(seed)

    @property
    def fingerprint(self) -> str:
        """Hash of the token ids and records of all prompts."""
        return self.prompts.store.fingerprint


def load_prompt_dataset(
    source: Source,
    tokenizer: Any,
    data: DataConfig,
    max_prompt_length: int,
    say: PrintLine = silent,
    valued: Sequence[str] = (),
    cache: TokenCache | None = None,
) -> PromptDataset:
    """Load prompts from records with the key prompt (a string or messages) and, optionally, tools.

    All other keys of the records are kept. Values that JSON does not have (dates of a table) are converted to text.

    Args:
        valued: other keys. If a record has such a key, its value must not be null.

    Raises:
        UserError: a record is invalid (the message names its file and line), or no prompt is short enough.
    """
    what = tokenization_of(
        data,
        f"prompts {sorted(valued)}",
        partial(_unit_of, valued=tuple(valued)),
        1,
        max_length=max_prompt_length,
        overlong="drop",
        needs_response=False,
        extra_of=_checked_record,
        seen_in=_prompt_kind_of,
    )
    store = load_store(source, tokenizer, data, what, say, cache)
    response = data.max_sequence_length - max_prompt_length
    if not len(store):
        raise UserError(
            f"{named(source)}: no prompt is short enough to leave room for max_new_tokens={response}: "
            f"{described_drops(store, max_prompt_length, response)}"
        )
    return PromptDataset(StoredPrompts(store), response)


def _unit_of(tokenizer: Any, record: dict[str, Any], valued: Sequence[str]) -> SequenceGroup:
    require(record, "prompt", *[key for key in valued if key in record])
    sequence = tokenize_prompt(tokenizer, _content_of(record), record.get("tools"), images_of(record))
    if not len(sequence):
        raise ValueError("the prompt has no tokens")
    return (sequence,)


def _content_of(record: dict[str, Any]) -> str | Messages:
    content = record["prompt"]
    return content if isinstance(content, str) else check_messages(content, "prompt")


def _checked_record(record: dict[str, Any]) -> dict[str, Any]:
    content = _content_of(record)
    if isinstance(content, str) or not any(map(has_images, content)):
        return {**record, "prompt": content}
    others = {key: value for key, value in record.items() if key not in IMAGE_COLUMNS}
    return {**others, "prompt": with_sources(content, [None] * len(image_sources(content)))}


def _prompt_kind_of(unit: SequenceGroup, record: dict[str, Any]) -> list[str]:
    return [] if isinstance(record["prompt"], str) else ["messages"]


SUPERVISED: dict[str, Callable[..., Any]] = {
    "sft": load_sft_dataset,
    "dpo": load_preference_dataset,
    "rm": load_reward_dataset,
    "kto": load_unpaired_dataset,
}
"""Loading functions by algorithm."""


def dataset_loader(config: TrainingConfig) -> Callable[..., Any]:
    """Return the function that loads a dataset for the configured algorithm.

    Its arguments are source, tokenizer, `DataConfig`, `say` and `cache`.
    """
    if isinstance(config, RLConfig):
        valued = config.environment.valued_columns
        return partial(load_prompt_dataset, max_prompt_length=config.max_prompt_length, valued=valued)
    if isinstance(config, DistillationConfig):
        options = config.distillation
        sampled = options.max_new_tokens if options.on_policy else None
        teaching = Teaching(tuple(options.teachers), options.teacher_prompt, sampled)
        return partial(load_distillation_dataset, teaching=teaching)
    return SUPERVISED[config.algorithm]


class TokensNeeded(Exception):
    """Raised when a check of records cannot go on without a real tokenizer."""


class UnloadedTokenizer:
    """Stand-in for a tokenizer: it has only the chat template, and raises TokensNeeded at any other use."""

    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise TokensNeeded

    def __getattr__(self, name: str) -> Any:
        raise TokensNeeded


def check_first_records(config: TrainingConfig) -> None:
    """Check the first record of each local source: its columns and, if it has messages, that a chat template exists.

    This check loads no tokenizer, because loading takes seconds.

    Raises:
        UserError: the model has no tokenizer, or a record is invalid; the message names its file and line.
    """
    data = config.data.model_copy(update={"max_samples": 1})
    path = config.model.path
    is_plan = has_only_config(path)  # a dry run needs no tokenizer
    if not is_plan:
        check_tokenizer(path)
    own = "a template" if is_plan or config.model.trust_remote_code or has_chat_template(path) else None
    tokenizer = UnloadedTokenizer(data.read_chat_template() or own)
    for source in data.sources:
        if all(map(_begins_quickly, files_of(source))):
            with contextlib.suppress(TokensNeeded):
                dataset_loader(config)(source, tokenizer, data)


def _begins_quickly(file: str) -> bool:
    """Return whether the first record of `file` can be read quickly; a large JSON list must be read as a whole."""
    path = Path(file)
    return path.suffix in SUFFIXES and (path.suffix != ".json" or path.stat().st_size < SOURCE_BYTES_FOR_PROCESSES)

"""From a record's text to token ids and the mask of the tokens that are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.errors import UserError

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class TokenSequence:
    """Token ids and, for each, whether it carries loss (a response token or its end token)."""

    input_ids: tuple[int, ...]
    token_mask: tuple[bool, ...]

    def __len__(self) -> int:
        return len(self.input_ids)

    def truncate(self, length: int) -> TokenSequence:
        return TokenSequence(self.input_ids[:length], self.token_mask[:length])

    @property
    def is_trainable(self) -> bool:
        """True if some token after the first, which nothing predicts, carries loss."""
        return any(self.token_mask[1:])


def load_tokenizer(path: Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model directory.

    Raises:
        UserError: no tokenizer, no end token, or no pad token.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise UserError(f"model.path: no tokenizer can be loaded from {path}: {' '.join(str(error).split())}") from None
    for name in ("eos", "pad"):
        if getattr(tokenizer, f"{name}_token_id") is None:
            raise UserError(f"model.path: the tokenizer in {path} has no {name}_token; set it in tokenizer_config.json")
    return tokenizer


def tokenize_completion(tokenizer: Any, prompt: str | Messages, completion: str | Messages) -> TokenSequence:
    """A prompt and its completion, both plain strings or both message lists.

    Raises:
        ValueError: mixed kinds, or a chat template that fails or rewrites earlier messages.
    """
    if isinstance(prompt, str) and isinstance(completion, str):
        return _tokenize_segments(tokenizer, [(prompt, False), (completion, True)], add_special_tokens=True)
    if isinstance(prompt, list) and isinstance(completion, list):
        return _tokenize_segments(tokenizer, [*_completion_segments(tokenizer, prompt, completion)])
    raise ValueError("prompt and completion must both be strings or both be lists of messages")


def tokenize_prompt(tokenizer: Any, prompt: str | Messages) -> tuple[int, ...]:
    """A prompt that awaits its response, as `tokenize_completion` begins with it.

    Raises:
        ValueError: a chat template that fails.
    """
    if isinstance(prompt, str):
        return (*_leading_special_tokens(tokenizer), *tokenizer(prompt, add_special_tokens=False)["input_ids"])
    return tuple(tokenizer(_render(tokenizer, prompt, True), add_special_tokens=False)["input_ids"])


def tokenize_observation(tokenizer: Any, conversation: str | Messages, response: str, observation: str) -> list[int]:
    """What stands between a response and the next one: the environment's message, and the sign to answer it.

    Args:
        conversation: what the response answered; a plain text is continued as plain text.

    Raises:
        ValueError: a chat template that fails or rewrites earlier messages.
    """
    if isinstance(conversation, str):
        return list(tokenizer(observation, add_special_tokens=False)["input_ids"])
    answered = [*conversation, {"role": "assistant", "content": response}]
    before = _render(tokenizer, answered, add_generation_prompt=False)
    after = _render(tokenizer, [*answered, {"role": "user", "content": observation}], add_generation_prompt=True)
    if not after.startswith(before):
        raise ValueError("the chat template does not keep a conversation as it was once a message follows")
    return list(tokenizer(after[len(before) :], add_special_tokens=False)["input_ids"])


def tokenize_messages(tokenizer: Any, messages: Messages) -> TokenSequence:
    """A conversation; every assistant message is trained on.

    Raises:
        ValueError: as `tokenize_completion`.
    """
    segments: list[tuple[str, bool]] = []
    done = 0
    for index, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        context, response = _completion_segments(tokenizer, messages[:index], [message])
        text = context[0] + response[0]
        segments += [(context[0][done:], False), response]
        done = len(text)
    return _tokenize_segments(tokenizer, segments)


def _completion_segments(tokenizer: Any, prompt: Messages, completion: Messages) -> tuple[tuple[str, bool], ...]:
    before = _render(tokenizer, prompt, add_generation_prompt=True)
    whole = _render(tokenizer, [*prompt, *completion], add_generation_prompt=False)
    if not whole.startswith(before):
        raise ValueError("the chat template does not keep the prompt as it was once a response follows")
    return (before, False), (whole[len(before) :], True)


def _render(tokenizer: Any, messages: Messages, add_generation_prompt: bool) -> str:
    from jinja2 import TemplateError

    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt))
    except (TemplateError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the chat template fails: {' '.join(str(error).split())}") from None


def _tokenize_segments(
    tokenizer: Any, segments: Sequence[tuple[str, bool]], add_special_tokens: bool = False
) -> TokenSequence:
    """Segments are tokenized one by one, so that masks end exactly where responses do.

    A response ends with its end token: what a template writes after it carries no loss, and is left out
    at the very end; where a template writes none, the last response gets one.
    """
    ids: list[int] = _leading_special_tokens(tokenizer) if add_special_tokens else []
    mask = [False] * len(ids)
    for index, (text, trained) in enumerate(segments):
        new = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        end = len(new)
        if trained and tokenizer.eos_token_id in new:
            end = len(new) - new[::-1].index(tokenizer.eos_token_id)
        if trained and index == len(segments) - 1:
            had_end_token = tokenizer.eos_token_id in new
            new = new[:end] if had_end_token else [*new, tokenizer.eos_token_id] if new else new
            end = len(new)
        ids += new
        mask += [trained and position < end for position in range(len(new))]
    return TokenSequence(tuple(ids), tuple(mask))


def _leading_special_tokens(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before a text: usually a beginning token or nothing."""
    marked = list(tokenizer("a")["input_ids"])
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    for start in range(len(marked) - len(plain) + 1):
        if marked[start : start + len(plain)] == plain:
            return marked[:start]
    return []

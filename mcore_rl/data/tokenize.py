"""From a record's text to token ids and the mask of the tokens that are trained on."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from mcore_rl.data.chat import GENERATION_MARKER, render, render_prompt, set_chat_day, tokenize_conversation
from mcore_rl.data.messages import Messages, check_messages, check_tools
from mcore_rl.errors import UserError
from mcore_rl.utils.progress import Say, silent

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


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
    def trained_ids(self) -> set[int]:
        """The tokens that carry loss."""
        return {token for token, trained in zip(self.input_ids, self.token_mask, strict=True) if trained}

    @property
    def is_trainable(self) -> bool:
        """True if some token after the first, which nothing predicts, carries loss."""
        return any(self.token_mask[1:])


def load_tokenizer(
    path: Path,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
    say: Say = silent,
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

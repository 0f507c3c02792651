"""Conversations of several turns: the tokens between two responses, and the templates that keep earlier turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mcore_rl.data.chat import Messages, end_token_ids, render, unused_character
from mcore_rl.data.texts import continuation_ids
from mcore_rl.errors import UserError


def tokens_between(
    tokenizer: Any, conversation: Messages, observation: str, response: Sequence[int] | np.ndarray[Any, Any]
) -> list[int]:
    """Return the tokens that follow a response: the end of its turn, `observation`, and the request for a new response.

    Args:
        conversation: messages that the response answers.
        response: sampled tokens of the response. If they do not end with the end token, the result begins with it.

    Raises:
        ValueError: the template fails.
    """
    mark = unused_character(observation)
    answered = [*conversation, {"role": "assistant", "content": mark}, {"role": "user", "content": observation}]
    _, found, after = render(tokenizer, answered, add_generation_prompt=True).rpartition(mark)
    if not found:
        raise ValueError("the chat template does not write earlier responses")
    tokens = continuation_ids(tokenizer, mark, after)
    ended = len(response) > 0 and bool(tokens) and response[-1] == tokens[0] and tokens[0] in end_token_ids(tokenizer)
    return tokens[1:] if ended else tokens


def check_keeps_turns(tokenizer: Any) -> None:
    """Check that the chat template does not change the text of earlier turns in a longer conversation.

    Raises:
        UserError: the template changes this text; the message describes the change.
    """
    ask, more = {"role": "user", "content": "A question."}, {"role": "user", "content": "And now?"}
    try:
        prompt = render(tokenizer, [ask], add_generation_prompt=True)
        for answer in ("An answer.", "<think>\nA thought.\n</think>\n\nAn answer."):
            answered = [ask, {"role": "assistant", "content": answer}, more]
            second = render(tokenizer, answered, add_generation_prompt=True)
            kept = second.startswith(prompt) and second[len(prompt) :].lstrip().startswith(answer)
            third = render(tokenizer, [*answered, answered[1], more], add_generation_prompt=True)
            if not (kept and third.startswith(second)):
                what = "thoughts in earlier responses" if "<think>" in answer else "earlier turns"
                raise UserError(
                    f"environment.max_turns: the chat template rewrites {what} in a longer conversation, so the "
                    "model would be trained on other text than it read; set data.chat_template to a template that "
                    "keeps earlier turns, or use max_turns=1"
                )
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"environment.max_turns: the chat template cannot write a conversation of several turns: {error}"
        ) from None

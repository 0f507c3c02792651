"""The built-in judges of one response.

A judge is made once in each worker process from the options of the configuration's `environment` section.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

from mcore_rl.environments.interfaces import Judge, MessageLog, Step


class ExactMatch:
    """1 if the response says the record's `answer`, else 0.

    pattern: a regular expression whose first group (or whole), in its last match, is what was answered;
        without one, the whole response is, stripped.
    """

    def __init__(self, pattern: str | None = None, **_: Any) -> None:
        self.pattern = re.compile(pattern) if pattern else None

    def __call__(self, message_log: MessageLog, record: dict[str, Any]) -> float:
        return float(self._answered(message_log[-1]["content"]) == str(record["answer"]).strip())

    def _answered(self, response: str) -> str | None:
        if self.pattern is None:
            return response.strip()
        found = list(self.pattern.finditer(response))
        if not found:
            return None
        return (found[-1][1] if self.pattern.groups else found[-1][0]).strip()


class MathVerify:
    """1 if the response's mathematical answer equals the record's `answer`, by math-verify; else 0."""

    def __init__(self, **_: Any) -> None:
        try:
            from math_verify import parse, verify
        except ImportError:
            raise ImportError("install the math extra (pip install 'mcore_rl[math]')") from None
        self.parse, self.verify = parse, verify

    def __call__(self, message_log: MessageLog, record: dict[str, Any]) -> float:
        answer, response = str(record["answer"]), message_log[-1]["content"]
        gold = self.parse(answer if "$" in answer or "\\boxed" in answer else f"${answer}$", parsing_timeout=None)
        return float(self.verify(gold, self.parse(response, parsing_timeout=None), timeout_seconds=None))


class TryAgain(ExactMatch):
    """A conversation of several turns: a wrong answer is told so, and each further try is worth half."""

    def __call__(self, message_log: MessageLog, record: dict[str, Any]) -> Step:  # type: ignore[override]
        tries = sum(message["role"] == "assistant" for message in message_log)
        if super().__call__(message_log, record):
            return Step(reward=0.5 ** (tries - 1))
        return Step(done=False, observation="That is wrong. Try again: ")


def load_function(function: str | None = None, **options: Any) -> Judge:
    """`module:function` of the user's own, called with (message_log, record); returns a number or a Step."""
    module, _colon, name = (function or "").partition(":")
    if not module or not name:
        raise ImportError(f"environment.function must be written module:function, got {function!r}")
    judge: Judge = getattr(importlib.import_module(module), name)
    return judge


JUDGES: dict[str, Callable[..., Judge]] = {
    "exact_match": ExactMatch,
    "math": MathVerify,
    "try_again": TryAgain,
    "function": load_function,
}

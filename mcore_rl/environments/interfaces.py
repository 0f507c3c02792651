"""What an environment is to the loop, and what a judge of one sample is to an environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Message = dict[str, str]
MessageLog = list[Message]
"""A conversation so far, the newest message last; a plain-text prompt is one message of the role `user`."""


@dataclass(frozen=True)
class Step:
    """What became of one response.

    reward: added to what the sample has earned so far.
    done: whether the conversation ends here.
    observation: what the environment says next, if it goes on.
    error: why the sample could not be judged; it then counts as failed, with reward 0.
    """

    reward: float = 0.0
    done: bool = True
    observation: str | None = None
    error: str | None = None


class Environment(Protocol):
    """Judges a batch of responses.

    One with an attribute `on_every_rank` that is true is made on every rank, and all step together with the same
    samples; any other is the first rank's.
    """

    def step(self, message_logs: Sequence[MessageLog], records: Sequence[dict[str, Any]]) -> list[Step]:
        """One step a sample.

        Args:
            message_logs: the conversations, each ending with the response to judge.
            records: each sample's record of the data file (`answer` and whatever else it has).
        """
        ...

    def close(self) -> None:
        """Release what it holds."""
        ...


class Judge(Protocol):
    """Judges one response; built-in judges are in `mcore_rl.environments.judges`."""

    def __call__(self, message_log: MessageLog, record: dict[str, Any]) -> float | Step: ...

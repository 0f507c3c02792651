"""Interfaces of environments, which the training loop calls, and of judges, which environments call."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = dict[str, str]
MessageLog = list[Message]
"""A conversation so far, the newest message last; a plain-text prompt is one message of the role `user`."""


@dataclass(frozen=True)
class Sample:
    """A response to judge.

    message_log: the conversation that it ends.
    record: its record of the data file, without the prompt (`answer` and whatever else it has).
    num_prompt_messages: messages of the prompt, at the beginning of the conversation.
    is_text: the prompt is a plain text, not messages.
    completion_ids: tokens behind the prompt.
    num_response_tokens: how many of these, at their end, are the response to judge.
    """

    message_log: MessageLog
    record: dict[str, Any]
    num_prompt_messages: int = 1
    is_text: bool = True
    completion_ids: Sequence[int] = ()
    num_response_tokens: int = 0

    @property
    def response_ids(self) -> Sequence[int]:
        """Tokens of the response to judge."""
        return self.completion_ids[len(self.completion_ids) - self.num_response_tokens :]


@dataclass(frozen=True)
class Step:
    """The judgement of one response.

    reward: added to what the sample has earned so far; the response's last token earns it.
    done: whether the conversation ends here.
    observation: what the environment says next, if it goes on.
    error: why the sample could not be judged; it then counts as failed, and is not trained on.
    rewards: what the reward is the weighted sum of, by name; without those that do not apply.
    token_rewards: what each token of the response earns beside, in their order; all or none.
    """

    reward: float = 0.0
    done: bool = True
    observation: str | None = None
    error: str | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    token_rewards: list[float] = field(default_factory=list)


class Environment(Protocol):
    """Judges responses one by one. The first rank of each data-parallel replica has one, for the replica's samples."""

    def submit(self, sample: Sample) -> Future[Step]:
        """Judge a response in the background. Responses are judged in the order of submission."""
        ...

    def close(self) -> None:
        """Release all resources, without waiting for samples that are being judged."""
        ...


class CollectiveEnvironment(Protocol):
    """Judges in the training processes. Every rank has one; all of them step together, each with its replica's samples.

    A replica may have none.
    """

    def step(self, samples: Sequence[Sample]) -> list[Step]:
        """Return a step for each sample."""
        ...

    def close(self) -> None:
        """Release all resources."""
        ...


class Judge(Protocol):
    """Judges one response; built-in judges are in `mcore_rl.environments.judges`.

    A function that has a parameter `response_ids` is also given the response's tokens, by that name.
    """

    def __call__(self, message_log: MessageLog, record: dict[str, Any]) -> float | Step | Awaitable[float | Step]: ...


class BatchJudge(Protocol):
    """Judges several responses in one call.

    Returns:
        for each a reward, a Step, None if it does not apply, or the exception that it was met with.
    """

    async def __call__(self, samples: Sequence[Sample]) -> Sequence[float | Step | BaseException | None]: ...

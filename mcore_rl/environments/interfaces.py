"""Interfaces: the training loop calls environments, and environments call judges."""

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

    message_log: the conversation. It ends with the response. If the prompt gives the beginning of the response, both
        are one message.
    record: the fields of the prompt's record in the data file, such as `answer`, without the prompt itself.
    num_prompt_messages: number of messages in the prompt, at the start of the conversation.
    is_text: whether the prompt is a plain text; otherwise it consists of messages.
    completion_ids: all tokens after the prompt.
    num_response_tokens: number of tokens in the response to judge. The response is at the end of `completion_ids`.
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

    reward: reward of the response, added to the sample's reward and assigned to the response's last token.
    done: whether the conversation ends here.
    observation: next message of the environment, if the conversation continues.
    error: reason why the sample could not be judged; None if it was judged. A sample with an error counts as failed and
        is not trained on.
    rewards: rewards by name. Their weighted sum is `reward`. A reward that does not apply to the sample is left out.
    token_rewards: additional rewards of the response's tokens: one for every token, in order. Empty if there are none.
    answer: answer that was found in the response, as text. Majority votes in validation (maj@k) compare the answers.
    """

    reward: float = 0.0
    done: bool = True
    observation: str | None = None
    error: str | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    token_rewards: list[float] = field(default_factory=list)
    answer: str | None = None


class Environment(Protocol):
    """Environment that judges responses one by one.

    Only the first rank of each data-parallel replica has such an environment.
    """

    def submit(self, sample: Sample) -> Future[Step]:
        """Judge a response in the background. Responses are judged in the order of submission."""
        ...

    def close(self) -> None:
        """Release all resources, without waiting for samples that are being judged."""
        ...


class CollectiveEnvironment(Protocol):
    """Environment that judges in the training processes. Every rank has it, and all ranks call `step` together.

    Each rank passes the samples of its replica; there may be none.
    """

    def step(self, samples: Sequence[Sample]) -> list[Step]:
        """Judge all samples; return a step for each."""
        ...

    def close(self) -> None:
        """Release all resources."""
        ...


class Judge(Protocol):
    """Function that judges one response. The built-in judges are in `mcore_rl.environments.judges`.

    If the function has a parameter `response_ids`, the tokens of the response are passed as this argument.
    """

    def __call__(self, message_log: MessageLog, record: dict[str, Any]) -> float | Step | Awaitable[float | Step]: ...


class BatchJudge(Protocol):
    """Function that judges several responses in one call.

    Returns:
        For each response, one of: a reward; a Step; None, if the judge does not apply to the response; an exception,
            if the response could not be judged.
    """

    async def __call__(self, samples: Sequence[Sample]) -> Sequence[float | Step | BaseException | None]: ...

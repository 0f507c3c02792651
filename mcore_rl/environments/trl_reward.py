"""Reward functions as TRL's GRPOTrainer calls them (TRL 1.16, `reward_funcs`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from mcore_rl.environments.interfaces import MessageLog, Sample

OWN_COLUMNS = {"prompt", "completion", "completion_ids"}


class TRLReward:
    """`function(prompts=…, completions=…, completion_ids=…, **columns)` → a list of rewards, as a judge.

    prompts, completions: texts where the prompt is a text, lists of messages where it is messages; a completion is
        all that follows the prompt. completion_ids: its tokens. columns: every other field of the records, a list
        each, with None where a record does not have it. A reward of None does not apply to its sample.

    What TRL also passes, `trainer_state`, `log_extra`, `log_metric` and `environments`, is of its trainer, and not
    passed. The function may be a coroutine function.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    async def __call__(self, samples: Sequence[Sample]) -> Sequence[float | None]:
        rewards = self.function(**arguments_of(samples))
        rewards = list(await rewards if inspect.isawaitable(rewards) else rewards)
        if len(rewards) != len(samples):
            raise ValueError(f"the function returned {len(rewards)} rewards for {len(samples)} completions")
        return [None if reward is None else float(reward) for reward in rewards]


def arguments_of(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Return the arguments of the function."""
    names = dict.fromkeys(name for sample in samples for name in sample.record if name not in OWN_COLUMNS)
    return {
        "prompts": [_part(sample, sample.message_log[: sample.num_prompt_messages]) for sample in samples],
        "completions": [_part(sample, sample.message_log[sample.num_prompt_messages :]) for sample in samples],
        "completion_ids": [list(sample.completion_ids) for sample in samples],
        **{name: [sample.record.get(name) for sample in samples] for name in names},
    }


def _part(sample: Sample, messages: MessageLog) -> str | MessageLog:
    return "".join(message["content"] for message in messages) if sample.is_text else messages

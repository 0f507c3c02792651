"""Who judges responses."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from mcore_rl.config.base import Count, Directory, Positive, Section, refuse_bool


class JudgeOptions(Section):
    """What a judge of one kind or another needs."""

    name: str
    pattern: str | None = None
    """exact_match, try_again: a regular expression whose first group, in its last match, is the answer."""
    function: str | None = None
    """function: `module:function`, called with (message_log, record); returns a reward or a Step. trl: one that is
    called as TRL's trainer does (docs/environments.md). Either may be a coroutine function (`async def`)."""
    url: Annotated[str, Field(pattern=r"^https?://[^/?#]+")] | None = None
    """http: where responses are judged (docs/environments.md)."""
    headers: dict[str, str] = Field(default={})
    """http: of each request, for example {Authorization: "Bearer ${JUDGE_TOKEN}"}. ${NAME} is taken from the
    environment, so that no secret is in the configuration."""
    retries: Count = 2
    """http: attempts after the first one; they share time_limit_seconds in equal parts."""

    @model_validator(mode="after")
    def _used(self) -> Self:
        name = self.name
        for key, owners in (("function", ("function", "trl")), ("url", ("http",))):
            value = getattr(self, key)
            if value is not None and name not in owners:
                raise ValueError(f"{key}: goes with name={' and '.join(owners)} alone, not with {name}")
            if value is None and name in owners and key == "url":
                raise ValueError(f"{key}: name={name} needs one")
        if name in ("function", "trl") and not re.fullmatch(r"[\w.]+:\w+", self.function or ""):
            raise ValueError(f"function: name the function, as module:function (got {self.function!r})")
        if name != "http" and self.headers:
            raise ValueError(f"headers: goes with name=http alone, not with {name}")
        if name != "http" and self.retries != 2:
            raise ValueError(f"retries: goes with name=http alone, not with {name}")
        if self.pattern is not None:
            if name not in ("exact_match", "try_again"):
                raise ValueError(f"pattern: goes with name=exact_match and try_again alone, not with {name}")
            try:
                re.compile(self.pattern)
            except re.error as error:
                raise ValueError(f"pattern: {self.pattern!r} is not a regular expression ({error})") from None
        return self

    @property
    def may_observe(self) -> bool:
        """Whether conversations may go on after a response."""
        return self.name in ("try_again", "function", "http")

    @property
    def valued_columns(self) -> tuple[str, ...]:
        """Of a prompt's record: this package's judges compare with the answer as a text, which null has as well."""
        return ("answer",) if self.compares else ()

    @property
    def compares(self) -> bool:
        """Whether responses are compared with a record's `answer`."""
        return self.name in ("exact_match", "math", "try_again")


class RewardConfig(JudgeOptions):
    """weighted: one of several judges."""

    name: Literal["exact_match", "math", "try_again", "function", "trl", "http"]
    """What judges; see `environment`, as for the other keys."""
    weight: Annotated[float, BeforeValidator(refuse_bool)] = 1.0
    """Its rewards are multiplied by this; they are in the metrics as they are."""


class EnvironmentConfig(JudgeOptions):
    """Who judges responses: see docs/environments.md."""

    name: Literal["exact_match", "math", "try_again", "function", "trl", "http", "weighted", "reward_model"] = (
        "exact_match"
    )
    """What judges responses."""
    rewards: dict[Annotated[str, Field(pattern=r"^\w+$")], RewardConfig] = Field(default={})
    """weighted: judges by names of your own; the reward is the weighted sum, and the mean of each is in the metrics as
    `reward_NAME_mean`."""
    path: Directory | None = None
    """reward_model: a directory that train_rm.py exported, or any sequence classifier of one label."""
    format: Literal["chat", "text"] = "chat"
    """reward_model: chat: it sees the conversation as its own chat template renders it; text: the texts, one after
    the other, and an end token, as of plain prompts and completions."""
    max_sequence_length: Positive | None = None
    """reward_model: a conversation of more tokens of its own fails; twice data.max_sequence_length if not given."""
    max_turns: Positive = 1
    """Responses in a conversation at most."""
    time_limit_seconds: Annotated[float, Field(gt=0), BeforeValidator(refuse_bool)] = 10.0
    """A sample whose judgement takes longer counts as failed; several that are judged together have as many times this
    limit."""
    start_seconds: Annotated[float, Field(gt=0), BeforeValidator(refuse_bool)] = 60.0
    """Within this time a judging process must have imported its judge and be ready."""
    num_workers: Positive = 2
    """Judging processes of each data-parallel replica, which judge the replica's own samples."""
    batch_size: Positive = 1
    """Samples that a judging process is handed at a time at most, of those that wait; one that makes the others fail is
    judged apart from them."""
    max_failed_fraction: Annotated[float, Field(ge=0, le=1), BeforeValidator(refuse_bool)] = 0.5
    """A step of whose samples a larger part could not be judged makes no update. In any other step those that could not
    be judged are left out of the loss and of what the others are compared with."""
    max_failed_steps: Positive = 3
    """So many steps on end in which no sample could be judged end the run."""

    @model_validator(mode="after")
    def _consistent(self) -> EnvironmentConfig:
        name, is_model = self.name, self.name == "reward_model"
        if is_model != (self.path is not None):
            raise ValueError(f"path: goes with name=reward_model, which needs it (name={name}, path={self.path})")
        if not is_model and (self.max_sequence_length is not None or self.format != "chat"):
            raise ValueError(f"max_sequence_length, format: go with name=reward_model alone, not with {name}")
        if is_model and self.batch_size > 1:
            raise ValueError("batch_size: a reward model judges in packs (batch.tokens_per_pack); leave it out")
        if (name == "weighted") != bool(self.rewards):
            raise ValueError("rewards: goes with name=weighted, which needs at least one")
        if self.max_turns > 1 and not (self.may_observe or any(reward.may_observe for reward in self.rewards.values())):
            raise ValueError(f"max_turns: {name} ends every conversation after one response")
        return self

    @property
    def compares(self) -> bool:
        return super().compares or any(reward.compares for reward in self.rewards.values())

"""Configuration of environments: judges of responses, and the sessions of agents' programs."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from mcore_rl.config.base import Count, Directory, Name, PositiveFloat, PositiveInt, Section, refuse_bool
from mcore_rl.config.parallel import LayoutConfig

CALLS_FUNCTION = ("function", "trl", "verl")
"""Values of `environment.name` with which the judge calls a function of the user."""


class JudgeOptions(Section):
    """Options of a judge; which ones apply depends on its name."""

    name: str
    pattern: str | None = None
    """exact_match, try_again: a regular expression; the first group of its last match in the response is the answer."""
    function: str | None = None
    """function: `module:function`, called with (message_log, record); returns a reward or a Step. trl: a function with
    the signature of TRL's reward functions. verl: a function with the signature of verl's compute_score. Each of these
    may be a coroutine function (`async def`); see docs/environments.md."""
    url: Annotated[str, Field(pattern=r"^https?://[^/?#]+")] | None = None
    """http: URL of the judge (docs/environments.md)."""
    headers: dict[str, str] = Field(default={})
    """http: headers of each request, for example {Authorization: "Bearer ${JUDGE_TOKEN}"}. Only the judge replaces
    ${NAME} by that environment variable, so that no file of the run holds the secret."""
    retries: Count = 2
    """http: attempts after the first one. All attempts share time_limit_seconds in equal parts."""

    @model_validator(mode="after")
    def _used(self) -> Self:
        name = self.name
        for key, owners in (("function", CALLS_FUNCTION), ("url", ("http",))):
            value = getattr(self, key)
            if value is not None and name not in owners:
                raise ValueError(f"{key}: requires name={' or '.join(owners)}, not {name}")
            if value is None and name in owners and key == "url":
                raise ValueError(f"{key}: must be set with name={name}")
        if name in CALLS_FUNCTION and not re.fullmatch(r"[\w.]+:\w+", self.function or ""):
            raise ValueError(f"function: must be written module:function (got {self.function!r})")
        if name != "http" and self.headers:
            raise ValueError(f"headers: requires name=http, not {name}")
        if name != "http" and self.retries != 2:
            raise ValueError(f"retries: requires name=http, not {name}")
        if self.pattern is not None:
            if name not in ("exact_match", "try_again"):
                raise ValueError(f"pattern: requires name=exact_match or try_again, not {name}")
            try:
                re.compile(self.pattern)
            except re.error as error:
                raise ValueError(f"pattern: {self.pattern!r} is not a regular expression ({error})") from None
        return self

    @property
    def may_observe(self) -> bool:
        """True if a conversation may continue after a response."""
        return self.name in ("try_again", "function", "http")

    @property
    def valued_columns(self) -> tuple[str, ...]:
        """Columns that must not be null in a prompt's record: `answer`, if the judge compares responses with it."""
        return ("answer",) if self.compares else ()

    @property
    def compares(self) -> bool:
        """True if responses are compared with the `answer` of a record."""
        return self.name in ("exact_match", "math", "try_again")


class RewardConfig(JudgeOptions):
    """A judge in a list of judges. With `name: weighted`, the rewards of the listed judges are added up."""

    name: Literal["exact_match", "math", "try_again", "function", "trl", "verl", "http"]
    """Kind of judge. The options of each kind are the same as in `environment`."""
    weight: Annotated[float, BeforeValidator(refuse_bool)] = 1.0
    """Factor of this judge's rewards in the sum. Metrics show the rewards without this factor."""


class AgentImages(Section):
    """Images in the requests of agents' programs."""

    max_count: Count = 64
    """Maximum number of images in a request; 0 refuses images."""
    max_bytes: PositiveInt = 10_000_000
    """Maximum size of an encoded image."""
    max_pixels: Annotated[PositiveInt, Field(le=2**26)] = 2**25
    """Maximum number of pixels of an image, before the model's processor resizes it."""
    fetch: list[Annotated[str, Field(pattern=r"^[\w.-]+(:\d+)?$")]] = Field(default=[])
    """Hosts (HOST or HOST:PORT) from which the endpoint fetches images that requests give as URLs. Other addresses are
    refused."""


class AgentConfig(Section):
    """Sessions of agents' programs (`environment.name=agent`); see docs/agents.md."""

    judge: RewardConfig | None = None
    """Judge of a whole session, for programs that give no reward. It gets the messages of the session's last request
    and their response."""
    max_calls: PositiveInt = 64
    """Maximum number of requests of a session. A session that has reached a limit and gives no reward has the reward
    0."""
    max_tokens: PositiveInt | None = None
    """Maximum number of sampled tokens of a session; further requests are refused. null: no limit."""
    session_seconds: PositiveFloat = 600.0
    """Time limit of a session; a session that takes longer fails."""
    max_sessions: PositiveInt = 64
    """Maximum number of sessions of a data-parallel replica that run at the same time."""
    history: Literal["template", "keep"] = "template"
    """template: a request continues an earlier response only if the chat template writes this response as it was
    sampled; otherwise it begins a new row of tokens. keep: it continues the response always, also if the template
    would remove its thoughts."""
    python: Directory | None = None
    """Python interpreter of coroutine functions and of `verifiers`, for packages that do not fit into the run's
    environment; there, mcore_rl needs none of its dependencies (`pip install --no-deps PATH`, a checkout or a wheel).
    null: the run's."""
    verifiers: dict[str, Any] = Field(default={})
    """Programs `verifiers:TASKSET`: keys of verifiers' configuration `env`."""
    host: Name = "127.0.0.1"
    """Address that the endpoint listens on. Keys protect the sessions, but the connections are not encrypted."""
    port: Annotated[int, Field(ge=0, lt=2**16), BeforeValidator(refuse_bool)] = 0
    """Port of the endpoint of the first replica; the others use the following ports. 0: free ports."""
    max_body_bytes: PositiveInt = 2**26
    """Maximum size of a request's body. A request contains all images of its conversation."""
    images: AgentImages = AgentImages()
    """Limits of images."""


class EnvironmentConfig(JudgeOptions):
    """The judge of responses; see docs/environments.md."""

    name: Literal[
        "exact_match", "math", "try_again", "function", "trl", "verl", "http", "weighted", "reward_model", "agent"
    ] = "exact_match"
    """Kind of judge. agent: a program that calls the policy through HTTP and gives the reward (docs/agents.md)."""
    program: str | tuple[str, ...] | None = None
    """agent: the program of each session: a coroutine function `module:function`, an environment `verifiers:TASKSET`,
    or a command."""
    agent: AgentConfig = AgentConfig()
    """agent: limits and endpoint of the sessions."""
    rewards: dict[Annotated[str, Field(pattern=r"^\w+$")], RewardConfig] = Field(default={})
    """weighted: judges by name. The reward is their weighted sum; the metric `reward_NAME_mean` is the mean reward of
    one judge."""
    path: Directory | None = None
    """reward_model: a directory that train_rm.py exported, or any sequence classifier with one label."""
    format: Literal["chat", "text"] = "chat"
    """reward_model: chat: the judge reads the conversation rendered by its own chat template. text: it reads the
    concatenated texts and an end token, for plain prompts and completions."""
    max_sequence_length: PositiveInt | None = None
    """reward_model: maximum length of a conversation in the judge's tokens; a longer conversation fails. The default is
    twice data.max_sequence_length."""
    parallel: LayoutConfig | None = None
    """reward_model: parallel layout of the judge on the policy's processes; null: the policy's layout. The keys are the
    sizes in `parallel`, with the same defaults."""
    max_turns: PositiveInt = 1
    """Maximum number of responses in a conversation."""
    time_limit_seconds: Annotated[float, Field(gt=0), BeforeValidator(refuse_bool)] = 10.0
    """Time limit for judging a sample; a sample that takes longer fails. A batch of samples has this limit times the
    number of its samples."""
    start_seconds: Annotated[float, Field(gt=0), BeforeValidator(refuse_bool)] = 60.0
    """Time limit for a judging process to import its judge and be ready."""
    environment_variables: list[Annotated[str, Field(pattern=r"^[\w*]+$")]] = Field(default=[])
    """Further environment variables for judging processes, by name or by pattern (`OPENAI_*`; `*` for all). Without
    this key, the processes get only the variables that `headers` names, and those that Python, PyTorch, tokenizers,
    locales and proxies need; `HF_TOKEN` and `WANDB_API_KEY`, for example, are not passed on."""
    num_workers: PositiveInt = 2
    """Judging processes of each data-parallel replica, which judge the replica's own samples."""
    batch_size: PositiveInt = 1
    """Maximum number of waiting samples that a judging process gets in one call. If the call
    fails, each of its samples is judged alone."""
    max_failed_fraction: Annotated[float, Field(ge=0, le=1), BeforeValidator(refuse_bool)] = 0.5
    """Largest fraction of a step's generated samples that may fail to be judged. A step with more failed samples makes
    no update. Otherwise the failed samples are left out of the loss and of the baselines."""
    max_failed_steps: PositiveInt = 3
    """End the run after this many consecutive steps in which more than max_failed_fraction of the samples, or all
    samples, could not be judged. A checkpoint of the last step is saved."""

    @model_validator(mode="after")
    def _consistent(self) -> EnvironmentConfig:
        name, is_model = self.name, self.name == "reward_model"
        if is_model != (self.path is not None):
            raise ValueError(
                f"path: must be set if and only if name=reward_model (found name={name}, path={self.path})"
            )
        if not is_model and (self.max_sequence_length is not None or self.format != "chat"):
            raise ValueError(f"max_sequence_length, format: require name=reward_model, not {name}")
        if not is_model and self.parallel is not None:
            raise ValueError(f"parallel: requires name=reward_model, not {name}")
        if is_model and self.batch_size > 1:
            raise ValueError(
                "batch_size: must be left out for a reward model, which judges packs of batch.tokens_per_pack tokens"
            )
        if (name == "weighted") != bool(self.rewards):
            raise ValueError(
                "rewards: must name at least one judge if name is weighted, and must be left out otherwise "
                f"(name={name})"
            )
        is_agent = name == "agent"
        if is_agent != bool(self.program):
            raise ValueError(
                f"program: must be set if and only if name=agent (found name={name}, program={self.program!r})"
            )
        if not is_agent and self.agent != AgentConfig():
            raise ValueError(f"agent: requires name=agent, not {name}")
        if is_agent and not self.runs_coroutines and self.agent.python is not None:
            raise ValueError("agent.python: has no effect on a command")
        if self.agent.verifiers and not str(self.program).startswith("verifiers:"):
            raise ValueError(f"agent.verifiers: requires program=verifiers:TASKSET, not {self.program}")
        if is_agent and self.max_turns > 1:
            raise ValueError("max_turns: has no effect on an agent's program; set agent.max_calls instead")
        if self.max_turns > 1 and not (self.may_observe or any(reward.may_observe for reward in self.rewards.values())):
            raise ValueError(f"max_turns: {name} ends every conversation after one response; set max_turns=1")
        return self

    @property
    def compares(self) -> bool:
        of_session = self.agent.judge is not None and self.agent.judge.compares
        return super().compares or of_session or any(reward.compares for reward in self.rewards.values())

    @property
    def runs_coroutines(self) -> bool:
        """True if `program` is a coroutine function or an environment of verifiers, and not a command."""
        program = self.program
        return isinstance(program, str) and ":" in program and not re.search(r"\s|/.*:", program)

    @property
    def of_session(self) -> EnvironmentConfig | None:
        """The judge of an agent's whole session as an environment of its own; None without such a judge."""
        if self.agent.judge is None:
            return None
        judge = self.agent.judge.model_dump(exclude={"weight"})
        shared = self.model_dump(
            include={"time_limit_seconds", "start_seconds", "environment_variables", "num_workers", "batch_size"}
        )
        return EnvironmentConfig(**shared, **judge)

"""The built-in judges: exact match, math, functions, reward functions of TRL and verl, URLs, weighted sums.

Each worker process constructs its judge once, from the options of the configuration's `environment` section.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import requests

from mcore_rl.config.load import expand_headers
from mcore_rl.environments.interfaces import BatchJudge, Judge, MessageLog, Sample, Step
from mcore_rl.utils.console import printable

FIRST_PAUSE_SECONDS = 0.5
"""Pause in seconds before an HTTP request is repeated; it doubles with each further attempt."""


class HTTPJudge:
    """Judges by an HTTP server. The server gets {"samples": [{"messages": […], "record": {…}}, …]} by POST.

    The server must answer {"rewards": […]}. A reward is a number, null if it does not apply to the sample, or an object
    with the fields of `Step`. A request is repeated if there is no answer, or if the answer's status is 429 or at least
    500.

    Args:
        retries: number of attempts after the first one.
        headers: headers of each request; ${NAME} in a value is replaced by the environment variable NAME.
        time_limit_seconds: time limit for one sample. A request for n samples may take n times this limit. All
            attempts together get 80 % of that time, in equal parts. An attempt includes reading the answer.

    Raises:
        UserError: a header names an environment variable that is not set.
    """

    def __init__(
        self, url: str, retries: int, time_limit_seconds: float, headers: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.url, self.attempts = url, 1 + retries
        self.headers = expand_headers(headers)
        # Less than the whole limit, so that the waiting process does not time out first.
        self.seconds = 0.8 * time_limit_seconds / self.attempts

    async def __call__(self, samples: Sequence[Sample]) -> Sequence[float | Step | None]:
        body = {"samples": [{"messages": sample.message_log, "record": sample.record} for sample in samples]}
        answer = await asyncio.to_thread(self._ask, body, self.seconds * max(1, len(samples)))
        rewards = answer.get("rewards") if isinstance(answer, dict) else None
        if not isinstance(rewards, list):
            raise ValueError(
                f"{self.url} must answer with an object that has a list of rewards, got {str(answer)[:200]}"
            )
        if len(rewards) != len(samples):
            raise ValueError(f"{self.url} returned {len(rewards)} rewards for {len(samples)} samples")
        return [Step(**reward) if isinstance(reward, dict) else reward for reward in rewards]

    def _ask(self, body: dict[str, Any], seconds: float) -> Any:
        for attempt in range(self.attempts):
            started = time.monotonic()
            try:
                answer = self._post(body, seconds)
                if answer.status_code < 500 and answer.status_code != 429:
                    answer.raise_for_status()
                    return answer.json()
                reason = f"status {answer.status_code}"
            except (requests.Timeout, TimeoutError):  # first, because some are both Timeout and ConnectionError
                reason = "took too long"
            except requests.ConnectionError:
                reason = "does not answer"
            except requests.exceptions.ChunkedEncodingError:
                reason = "its answer broke off"
            left = seconds - (time.monotonic() - started)
            if attempt + 1 < self.attempts:
                time.sleep(max(0.0, min(left, FIRST_PAUSE_SECONDS * 2**attempt)))
        raise RuntimeError(f"{self.url}: {reason} (attempts: {self.attempts})")

    def _post(self, body: dict[str, Any], seconds: float) -> requests.Response:
        """Send a request; its whole answer must arrive within `seconds`.

        The `timeout` of the package `requests` does not ensure this, because it applies to each read.

        Raises:
            TimeoutError: the answer has not arrived in time.
        """
        answer: Future[requests.Response] = Future()

        def post() -> None:
            try:
                answer.set_result(requests.post(self.url, json=body, headers=self.headers, timeout=seconds))
            except Exception as error:
                answer.set_exception(error)

        threading.Thread(target=post, name="asking", daemon=True).start()
        return answer.result(seconds)


OWN_COLUMNS = {"prompt", "completion", "completion_ids"}


class TRLReward:
    """Judges by a reward function of TRL: `function(prompts=…, completions=…, completion_ids=…, **columns)`.

    The function returns a list of rewards, one for each sample; None means that the reward does not apply to the
    sample. The function may be a coroutine function. Its arguments are lists with an entry for each sample:

    prompts, completions: texts if the prompt is a text, otherwise lists of messages. A completion is everything after
        the prompt.
    completion_ids: tokens of the completion.
    columns: each other field of the records; None for a record without the field.

    The arguments that depend on TRL's trainer (`trainer_state`, `log_extra`, `log_metric` and `environments`) are not
    passed.
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
    """Return the arguments with which `TRLReward` calls its function for these samples."""
    names = dict.fromkeys(name for sample in samples for name in sample.record if name not in OWN_COLUMNS)
    return {
        "prompts": [_part(sample, sample.message_log[: sample.num_prompt_messages]) for sample in samples],
        "completions": [_part(sample, sample.message_log[sample.num_prompt_messages :]) for sample in samples],
        "completion_ids": [list(sample.completion_ids) for sample in samples],
        **{name: [sample.record.get(name) for sample in samples] for name in names},
    }


def _part(sample: Sample, messages: MessageLog) -> str | MessageLog:
    return "".join(message["content"] for message in messages) if sample.is_text else messages


class VerlReward:
    """Judges by a reward function of verl: `compute_score(data_source, solution_str, ground_truth, extra_info)`.

    The function returns a number, or a dictionary with the reward as `score`. It may be a coroutine function. Its
    arguments are passed by name:

    data_source: the record's field of this name, or "".
    solution_str: text of the response.
    ground_truth: `reward_model.ground_truth` of the record, or else its field `ground_truth` or `answer`.
    extra_info: the record's field of this name, or {}.

    An entry `pred` of the dictionary is the answer that the function found in the response. Other entries are ignored.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    async def __call__(self, message_log: MessageLog, record: dict[str, Any]) -> float | Step:
        result = self.function(
            data_source=record.get("data_source") or "",
            solution_str=message_log[-1]["content"],
            ground_truth=_ground_truth(record),
            extra_info=record.get("extra_info") or {},
        )
        result = await result if inspect.isawaitable(result) else result
        if not isinstance(result, dict):
            return float(result)
        if "score" not in result:
            raise ValueError(f"the function returned a dictionary without score: {', '.join(map(str, result))}")
        answer = result.get("pred")
        return Step(float(result["score"]), answer=None if answer is None else str(answer))


def _ground_truth(record: Mapping[str, Any]) -> Any:
    """Return the ground truth of a record, in verl's format or in this package's."""
    model = record.get("reward_model")
    places = (model if isinstance(model, dict) else {}, "ground_truth"), (record, "ground_truth"), (record, "answer")
    for fields, name in places:
        if name in fields:
            return fields[name]
    raise ValueError(
        "the record has no reward_model.ground_truth, ground_truth or answer for verl's function; its fields are "
        f"{', '.join(record)}"
    )


class ExactMatch:
    """Gives the reward 1 if the answer in the response equals the record's `answer`, and 0 otherwise.

    pattern: regular expression that finds the answer in the response. Its last match counts: the first group, or the
        whole match if there is no group. Without a pattern, the answer is the whole response, stripped.
    """

    def __init__(self, pattern: str | None = None) -> None:
        self.pattern = re.compile(pattern) if pattern else None

    def __call__(self, message_log: MessageLog, record: dict[str, Any]) -> Step:
        answer = self._answered(message_log[-1]["content"])
        return Step(float(answer == str(record["answer"]).strip()), answer=answer)

    def _answered(self, response: str) -> str | None:
        if self.pattern is None:
            return response.strip()
        found = list(self.pattern.finditer(response))
        if not found:
            return None
        return (found[-1][1] if self.pattern.groups else found[-1][0]).strip()


class MathVerify:
    """Gives the reward 1 if the answer in the response equals the record's `answer` by math-verify, and 0 otherwise."""

    def __init__(self) -> None:
        try:
            from math_verify import parse, verify
        except ImportError:
            raise ImportError("environment.name=math needs the math extra (pip install 'mcore_rl[math]')") from None
        self.parse, self.verify = parse, verify

    def __call__(self, message_log: MessageLog, record: dict[str, Any]) -> Step:
        answer, response = str(record["answer"]), message_log[-1]["content"]
        gold = self.parse(answer if "$" in answer or "\\boxed" in answer else f"${answer}$", parsing_timeout=None)
        found = self.parse(response, parsing_timeout=None)
        right = float(self.verify(gold, found, timeout_seconds=None))
        # In a majority vote, all right answers count as the same answer, however they are written.
        return Step(right, answer=answer if right else str(found[0]) if found else None)


class RetryExactMatch(ExactMatch):
    """Judges attempts over several turns: after a wrong answer, the model may try again for half the reward."""

    def __call__(self, message_log: MessageLog, record: dict[str, Any]) -> Step:
        tries = sum(message["role"] == "assistant" for message in message_log)
        judged = super().__call__(message_log, record)
        if judged.reward:
            return replace(judged, reward=0.5 ** (tries - 1))
        return replace(judged, done=False, observation="That is wrong. Try again: ")


class PerSampleJudge:
    """Judges several responses by calling a `Judge` for each; coroutine functions run concurrently."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.reads_tokens = "response_ids" in _parameters(judge)

    async def __call__(self, samples: Sequence[Sample]) -> Sequence[float | Step | BaseException | None]:
        return await asyncio.gather(*map(self._one, samples), return_exceptions=True)

    async def _one(self, sample: Sample) -> float | Step:
        tokens = {"response_ids": list(sample.response_ids)} if self.reads_tokens else {}
        judged = self.judge(sample.message_log, sample.record, **tokens)
        return await judged if inspect.isawaitable(judged) else judged


def _parameters(judge: Judge) -> Collection[str]:
    try:
        return inspect.signature(judge).parameters
    except (TypeError, ValueError):  # some built-in functions have no signature
        return ()


class Weighted:
    """Gives the weighted sum of the rewards of several judges.

    The conversation continues if at least one judge continues it. The first judge that has an observation provides the
    observation, and the first judge that finds an answer provides the answer.
    """

    def __init__(self, judges: Mapping[str, tuple[float, BatchJudge]]) -> None:
        self.judges = judges

    async def __call__(self, samples: Sequence[Sample]) -> Sequence[Step | None]:
        judged = await asyncio.gather(*(self._judged(name, samples) for name in self.judges))
        return [self._sum(results) for results in zip(*judged, strict=True)]

    async def _judged(self, name: str, samples: Sequence[Sample]) -> Sequence[float | Step | BaseException | None]:
        try:
            return await self.judges[name][1](samples)
        except Exception as error:
            if len(samples) > 1:  # the samples are then judged again one by one
                raise
            return [error]

    def _sum(self, results: Sequence[float | Step | BaseException | None]) -> Step | None:
        rewards, reward, done, observation = dict[str, float](), 0.0, True, None
        token_rewards: list[float] = []
        answer: str | None = None
        for (name, (weight, _)), result in zip(self.judges.items(), results, strict=True):
            if isinstance(result, BaseException):
                return Step(error=f"{name}: {reported(result)}")
            if result is None:
                continue
            step = step_of(result)
            if step.error is not None:
                return Step(error=f"{name}: {step.error}")
            rewards[name] = step.reward
            reward += weight * step.reward
            answer = step.answer if answer is None else answer
            if step.token_rewards:
                earned = [weight * of_token for of_token in step.token_rewards]
                if token_rewards and len(token_rewards) != len(earned):
                    return Step(error=f"{name}: rewards {len(earned)} tokens, another judge {len(token_rewards)}")
                token_rewards = [a + b for a, b in zip(token_rewards or [0.0] * len(earned), earned, strict=True)]
            if not step.done:
                done = False
                observation = step.observation if observation is None else observation
        step = Step(reward, done, observation, rewards=rewards, token_rewards=token_rewards, answer=answer)
        return step if rewards else None


def step_of(result: float | Step) -> Step:
    """Convert a judge's result, a reward or a `Step`, to a `Step`."""
    return result if isinstance(result, Step) else Step(float(result))


_traced: set[tuple[str, str]] = set()


def reported(error: BaseException) -> str:
    """Print an error of a judge to standard error, which is judge.log; return the error as one text.

    The first error of each kind and line is printed with its traceback, and the others with their line only: a judge
    that always fails would otherwise fill the disk.
    """
    text = printable(f"{type(error).__name__}: {error}")
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "unknown line"
    if (kind := (type(error).__name__, place)) in _traced:
        print(f"{text} (again at {place})", file=sys.stderr, flush=True)
    else:
        _traced.add(kind)
        print(printable("".join(traceback.format_exception(error))), end="", file=sys.stderr, flush=True)
    return text


def load_function(function: str | None) -> Callable[..., Any]:
    """Import and return the user's function. `function` has the form `module:function`."""
    module, _colon, name = (function or "").partition(":")
    if not module or not name:
        raise ImportError(f"environment.function must be written module:function, got {function!r}")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return loaded


def make_judge(options: Mapping[str, Any]) -> BatchJudge:
    """Return the judge that `options` describe; `options` is a section of the configuration.

    Raises:
        ImportError, AttributeError: a module or function of the judge is missing.
    """
    match options["name"]:
        case "exact_match":
            return PerSampleJudge(ExactMatch(options["pattern"]))
        case "math":
            return PerSampleJudge(MathVerify())
        case "try_again":
            return PerSampleJudge(RetryExactMatch(options["pattern"]))
        case "function":
            return PerSampleJudge(load_function(options["function"]))
        case "trl":
            return TRLReward(load_function(options["function"]))
        case "verl":
            return PerSampleJudge(VerlReward(load_function(options["function"])))
        case "http":
            from mcore_rl.environments.judges import HTTPJudge  # imports requests, which only this judge needs

            return HTTPJudge(options["url"], options["retries"], options["time_limit_seconds"], options["headers"])
        case "weighted":
            shared = {"time_limit_seconds": options["time_limit_seconds"]}
            judges = {name: (part["weight"], make_judge(part | shared)) for name, part in options["rewards"].items()}
            return Weighted(judges)
    raise AssertionError(f"environment.name={options['name']}: no judge has this name")

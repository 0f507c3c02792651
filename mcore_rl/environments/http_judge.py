"""A judge that is an HTTP server. It is a separate module because only this judge needs requests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any

import requests

from mcore_rl.config.load import expand_headers
from mcore_rl.environments.interfaces import Sample, Step

FIRST_PAUSE_SECONDS = 0.5
"""Pause in seconds before the second attempt; it doubles before each further attempt."""


class HTTPJudge:
    """Judges by POST of {"samples": [{"messages": […], "record": {…}}, …]}, which returns {"rewards": […]}.

    A reward is a number, null if it does not apply to the sample, or an object with the fields of `Step`. A request is
    repeated if there is no answer, or an answer with status 429, or 500 and above.

    Args:
        retries: number of attempts after the first one.
        headers: headers of each request; ${NAME} in a value is replaced by this environment variable.
        time_limit_seconds: time limit for a sample, over all attempts; each attempt has an equal part. The limit of a
            request is the sum over its samples, and covers the whole answer.

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
            raise ValueError(f"{self.url} must answer an object with a list of rewards, got {str(answer)[:200]}")
        if len(rewards) != len(samples):
            raise ValueError(f"{self.url} answered {len(rewards)} rewards for {len(samples)} samples")
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
        raise RuntimeError(f"{self.url}: {reason} ({self.attempts} attempts)")

    def _post(self, body: dict[str, Any], seconds: float) -> requests.Response:
        """Send a request whose whole answer must arrive within `seconds`; the timeout of requests is per read.

        Raises:
            TimeoutError: the answer is late.
        """
        answer: Future[requests.Response] = Future()

        def post() -> None:
            try:
                answer.set_result(requests.post(self.url, json=body, headers=self.headers, timeout=seconds))
            except Exception as error:
                answer.set_exception(error)

        threading.Thread(target=post, name="asking", daemon=True).start()
        return answer.result(seconds)

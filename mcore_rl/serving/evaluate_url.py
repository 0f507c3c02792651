"""Evaluation of a model behind a URL that speaks OpenAI's API: conversations of texts, judged here."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from mcore_rl.config import GRPOConfig
from mcore_rl.data.chat import Messages, check_messages, with_response
from mcore_rl.data.readers import read_records, require, with_texts
from mcore_rl.data.token_store import plain_name
from mcore_rl.data.tokenize import with_columns
from mcore_rl.environments.interfaces import Sample
from mcore_rl.environments.judge_processes import JudgeProcesses, probe
from mcore_rl.errors import UserError
from mcore_rl.run.directory import JUDGE_LOG
from mcore_rl.serving.evaluation import Entry, EvaluationFiles, fingerprint_of
from mcore_rl.utils.console import PrintLine

KEY_VARIABLE = "OPENAI_API_KEY"
ATTEMPTS, ATTEMPTS_TO_CONNECT = 5, 3
BUSY = (408, 409, 429, 500, 502, 503, 504)
NEVER = (401, 403, 404, 405)
"""Statuses that every request gets if the key, the URL or the model is wrong."""
RENAMED = "max_completion_tokens"
"""Name of `max_tokens` for OpenAI's newer models, which refuse the older one."""
FIRST_PAUSE_SECONDS = 1.0
"""Pause before the second attempt of a request; each further pause is twice as long."""
REQUEST_SECONDS = 600.0
SAVED_SAMPLES = 32
"""Number of samples that are written at once."""


class RefusedRequest(Exception):
    """Raised if the server refuses a request, or every attempt fails."""


@dataclass(frozen=True)
class TextPrompt:
    """A prompt that is not tokenized: a text or messages, and the record."""

    content: str | Messages
    record: dict[str, Any]
    source: str | None

    @property
    def message_log(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self.content}] if isinstance(self.content, str) else list(self.content)


def read_prompts(config: GRPOConfig) -> list[TextPrompt]:
    """Read the prompts of `data.train`, at most `data.max_samples`.

    Raises:
        UserError: a record is invalid; the message names its file and line.
    """
    data, found = config.data, list[TextPrompt]()
    for source in data.sources:
        columns = data.columns_of(source)
        for records, _ in read_records(source):
            for where, record in records.parsed():
                try:
                    record = with_texts(with_columns(record, columns))
                    require(record, "prompt")
                    content = record["prompt"]
                    content = content if isinstance(content, str) else check_messages(content, "prompt")
                except ValueError as error:
                    raise UserError(f"{where}: {error}") from None
                own = record.get("data_source")
                others = {key: value for key, value in record.items() if key != "prompt"}
                found.append(TextPrompt(content, others, plain_name(own) if isinstance(own, str) and own else None))
    return found[: data.max_samples]


class URLEvaluation:
    """An evaluation of the model behind a URL.

    Args:
        url: base URL, with /v1.
        model: name of the model in requests.
        concurrency: number of conversations at the same time.
        options: further options of each request, such as temperature.

    Raises:
        UserError: the data or the judge cannot be used.
    """

    def __init__(
        self, config: GRPOConfig, url: str, model: str, concurrency: int, options: Mapping[str, Any], say: PrintLine
    ) -> None:
        self.config, self.url, self.model, self.say = config, url.rstrip("/"), model, say
        self.options, self.concurrency = dict(options), concurrency
        self._is_heard = self._is_allowed = False  # whether any request was answered, and successfully
        self.prompts = read_prompts(config)
        if config.environment.name in ("agent", "reward_model"):
            raise UserError(f"environment.name={config.environment.name}: cannot judge the model of a URL")
        first = [self._sample(prompt, prompt.message_log) for prompt in self.prompts[:4]]
        probe(config.environment, first, config.parallel.timeout_seconds / 2)

    @property
    def fingerprint(self) -> str:
        """Hash of the prompts."""
        return fingerprint_of(self.prompts)

    def run(self, files: EvaluationFiles, samples: int) -> None:
        """Generate and judge the samples that `files` lacks, and add them to it."""
        every = [(prompt, number) for prompt in range(len(self.prompts)) for number in range(samples)]
        asked = [key for key in every if key not in files.entries]
        if len(asked) < len(every):
            self.say(f"{len(every) - len(asked)} of {len(every)} samples have been judged before")
        judge = JudgeProcesses(self.config.environment, files.directory / JUDGE_LOG)
        try:
            asyncio.run(self._run(files, asked, judge, len(every)))
        finally:
            judge.close()

    async def _run(
        self, files: EvaluationFiles, asked: Sequence[tuple[int, int]], judge: JudgeProcesses, total: int
    ) -> None:
        key = os.environ.get(KEY_VARIABLE)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
        slots, ready, judged = asyncio.Semaphore(self.concurrency), list[Entry](), total - len(asked)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:

            async def one(prompt: int, number: int) -> Entry:
                async with slots:
                    return await self._converse(session, judge, prompt, number)

            tasks = [asyncio.ensure_future(one(*key)) for key in asked]
            try:
                for done in asyncio.as_completed(tasks):
                    ready.append(await done)
                    judged += 1
                    if len(ready) >= SAVED_SAMPLES or judged == total:
                        files.add(ready)
                        ready = []
                        self.say(f"{judged} of {total} samples")
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                files.add(ready)

    async def _converse(self, session: aiohttp.ClientSession, judge: JudgeProcesses, prompt: int, number: int) -> Entry:
        """Run one conversation; return its entry."""
        asked, environment = self.prompts[prompt], self.config.environment
        log, reward, rewards = asked.message_log, 0.0, dict[str, float]()
        length, turns, truncated = 0, 0, False
        error: str | None = None
        answer: str | None = None
        while error is None:
            try:
                text, reason, tokens = await self._ask(session, asked, log, number)
            except RefusedRequest as refusal:
                error = str(refusal)
                break
            log, turns, length = with_response(log, text), turns + 1, length + tokens
            truncated = reason == "length"
            step = await asyncio.wrap_future(judge.submit(self._sample(asked, log)))
            reward, error, answer = reward + step.reward, step.error, step.answer
            rewards |= {name: rewards.get(name, 0.0) + value for name, value in step.rewards.items()}
            if step.done or step.observation is None or turns >= environment.max_turns:
                break
            log = [*log, {"role": "user", "content": step.observation}]
        return {
            "prompt": prompt, "sample": number, "source": asked.source, "reward": None if error else reward,
            "rewards": rewards, "error": error, "answer": answer,
            **({"ground_truth": asked.record["answer"]} if "answer" in asked.record else {}),
            "truncated": truncated, "turns": turns, "response_length": length, "messages": log,
        }  # fmt: skip

    async def _ask(
        self, session: aiohttp.ClientSession, asked: TextPrompt, log: Sequence[Mapping[str, Any]], number: int
    ) -> tuple[str, str, int]:
        """Return the text of a response, why it ended, and its number of tokens.

        Raises:
            RefusedRequest: the server refuses the request, or every attempt fails.
            UserError: the server would refuse every request.
        """
        is_text = isinstance(asked.content, str)
        body: dict[str, Any] = {"model": self.model, **self.options, "seed": self.config.seed + number}
        if is_text:
            body["prompt"] = "".join(message["content"] for message in log)
        else:
            body["messages"] = list(log)
        path, why = "/completions" if is_text else "/chat/completions", ""
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(FIRST_PAUSE_SECONDS * 2 ** (attempt - 1))
            try:
                async with session.post(self.url + path, json=body) as answer:
                    self._is_heard = True
                    if answer.status == 200:
                        told = _read(await answer.json(content_type=None), is_text)
                        self._is_allowed = True
                        return told
                    why = f"status {answer.status}: {(await answer.text())[:300]}"
                    if answer.status in NEVER and not self._is_allowed:
                        raise UserError(f"{self.url}{path}: {why}")
                    if answer.status == 400 and RENAMED in why and "max_tokens" in body:
                        self.options.pop("max_tokens", None)
                        self.options[RENAMED] = body[RENAMED] = body.pop("max_tokens")
                    elif answer.status not in BUSY:
                        raise RefusedRequest(f"{self.url}{path}: {why}")
            except UserError:  # is a ValueError
                raise
            except aiohttp.ClientConnectorError as error:
                why = str(error)
                if not self._is_heard and attempt + 1 == ATTEMPTS_TO_CONNECT:
                    raise UserError(f"--url {self.url}: nobody answers there ({why})") from None
            except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError, IndexError) as error:
                why = f"{type(error).__name__}: {error}"
        raise RefusedRequest(f"{self.url}{path}: {why} (attempts: {ATTEMPTS})")

    def _sample(self, prompt: TextPrompt, log: Sequence[Mapping[str, Any]]) -> Sample:
        messages = [dict(message) for message in log]
        return Sample(messages, prompt.record, len(prompt.message_log), isinstance(prompt.content, str))


def _read(answer: Any, is_text: bool) -> tuple[str, str, int]:
    choice, usage = answer["choices"][0], answer.get("usage") or {}
    text = choice["text"] if is_text else choice["message"].get("content") or ""
    return str(text), str(choice.get("finish_reason")), int(usage.get("completion_tokens") or 0)

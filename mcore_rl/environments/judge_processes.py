"""Environment that judges each sample in a separate process, within a time limit."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mcore_rl.config import EnvironmentConfig
from mcore_rl.config.load import variables_in
from mcore_rl.data.chat import with_response
from mcore_rl.environments.interfaces import Sample, Step
from mcore_rl.errors import TrainingError, UserError

ALWAYS = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "HOSTNAME", "PWD", "TMPDIR", "TMP", "TEMP", "TZ"),
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR", "XDG_STATE_HOME"),
    *("LANG", "LANGUAGE", "LC_*"),
    *("PYTHONPATH", "PYTHONHOME", "PYTHONPLATLIBDIR", "PYTHONUSERBASE", "PYTHONNOUSERSITE", "PYTHONSAFEPATH"),
    *("PYTHONUTF8", "PYTHONIOENCODING", "PYTHONCOERCECLOCALE", "PYTHONUNBUFFERED", "PYTHONHASHSEED", "PYTHONWARNINGS"),
    *("PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE", "PYTHONOPTIMIZE", "PYTHONMALLOC", "PYTHONINTMAXSTRDIGITS"),
    *("PYTHONFAULTHANDLER", "PYTHONDEVMODE", "PYTHONASYNCIODEBUG"),
    *(
        "VIRTUAL_ENV",
        "CONDA_PREFIX",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "DYLD_LIBRARY_PATH",
        "DYLD_FALLBACK_LIBRARY_PATH",
    ),
    *("OMP_*", "MKL_*", "OPENBLAS_*", "TORCH_*", "CUDA_HOME", "CUDA_PATH", "NVIDIA_VISIBLE_DEVICES"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT", "HF_MODULES_CACHE"),
    *("HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_CACHE", "TRANSFORMERS_OFFLINE"),
    *("TRANSFORMERS_VERBOSITY", "TOKENIZERS_PARALLELISM", "MCORE_RL_CACHE", "RANK", "LOCAL_RANK", "WORLD_SIZE"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
)
"""Environment variables that each judging process gets from the trainer: names, or patterns such as LC_*."""
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
"""Proxy variables, in upper or lower case. A value with a password is passed on only if there is an HTTP judge."""
SET = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
"""Environment variables that are set in every judging process: one thread, and no GPU."""


def judge_variables(config: EnvironmentConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that a judging process gets.

    Args:
        environ: environment variables of the trainer. Only some of them are passed on.
    """
    patterns = (*ALWAYS, *config.environment_variables, *_in_headers(config))
    asks_url = any(judge.name == "http" for judge in (config, *config.rewards.values()))
    passed = {
        name: value
        for name, value in environ.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
        or (name.upper() in PROXIES and (asks_url or "@" not in value))
    }
    return passed | SET


def _in_headers(config: EnvironmentConfig) -> Iterator[str]:
    """Yield the names of the environment variables that occur in the headers of HTTP judges."""
    for judge in (config, *config.rewards.values()):
        for value in judge.headers.values():
            yield from variables_in(value)


class JudgeProcesses:
    """Judges samples in worker processes. A sample that raises an error, hangs or kills its process fails alone.

    Args:
        log: file for the output that judges print; by default, the output is discarded.

    Raises:
        UserError: the judge cannot be constructed (a module that cannot be imported, a missing extra, …).
    """

    def __init__(self, config: EnvironmentConfig, log: Path | None = None) -> None:
        self.config = config
        self._waiting: deque[tuple[Sample, Future[Step]]] = deque()
        self._changed, self._is_closed = threading.Condition(), False
        self._workers: list[_Worker] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            for _ in range(config.num_workers):
                self._workers.append(_Worker(config, log))
            undo.pop_all()
        self._threads = [
            threading.Thread(target=self._serve, args=(worker,), name="judging", daemon=True)
            for worker in self._workers
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, sample: Sample) -> Future[Step]:
        future: Future[Step] = Future()
        with self._changed:
            self._waiting.append((sample, future))
            self._changed.notify()
        return future

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for worker in self._workers:
            worker.end()  # the worker's thread then reads the end of its output
        for thread in getattr(self, "_threads", ()):
            while thread.is_alive():
                thread.join(0.5)
                for worker in self._workers:
                    worker.end()  # its thread may have started it again meanwhile
        for worker in self._workers:
            worker.kill()

    def _serve(self, worker: _Worker) -> None:
        while batch := self._next_batch():
            try:
                steps = self._judge(worker, [sample for sample, _ in batch])
            except Exception as error:
                lost: Exception = error
                if isinstance(error, UserError | OSError):
                    lost = TrainingError(f"a judging process has ended, and starting it again failed: {error}")
                for _, future in batch:
                    future.set_exception(lost)
                continue
            for (_, future), step in zip(batch, steps, strict=True):
                future.set_result(step)

    def _next_batch(self) -> list[tuple[Sample, Future[Step]]]:
        """Wait for samples; return at most `batch_size` of them, or an empty list after `close`."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return []
                count = min(len(self._waiting), self.config.batch_size)
                taken = [self._waiting.popleft() for _ in range(count)]
                # The caller may have cancelled the future.
                if batch := [entry for entry in taken if entry[1].set_running_or_notify_cancel()]:
                    return batch

    def _judge(self, worker: _Worker, samples: Sequence[Sample]) -> list[Step]:
        """Judge `samples` in one call; if it fails, judge each sample alone."""
        if self._is_closed:
            return [Step(error="the environment is closed") for _ in samples]
        worker.restart_if_gone()
        answer = worker.ask(samples)
        if isinstance(answer, list):
            return answer
        if len(samples) == 1:
            return [Step(error=answer)]
        return [step for sample in samples for step in self._judge(worker, [sample])]


def probe(config: EnvironmentConfig, samples: Sequence[Sample], seconds: float = math.inf) -> None:
    """Test the judge with responses to real prompts, until it has judged one of them.

    The response to a prompt is the `answer` of its record, or empty.

    Args:
        samples: samples whose conversations end with the prompt.
        seconds: time limit for all samples together.

    Raises:
        UserError: the judge cannot be constructed, or fails on all samples.
    """
    workers = min(config.num_workers, len(samples))
    limit = min(config.time_limit_seconds, seconds / math.ceil(len(samples) / workers))
    changes = {"num_workers": workers, "time_limit_seconds": limit, "batch_size": 1}
    environment, errors = JudgeProcesses(config.model_copy(update=changes)), dict[int, str]()
    with contextlib.closing(environment):
        judging = {environment.submit(_answered(sample)): index for index, sample in enumerate(samples)}
        for future in as_completed(judging):
            try:
                if (error := future.result().error) is None:
                    return
            except TrainingError as lost:
                error = str(lost)
            errors[judging[future]] = error
    fields = ", ".join(sorted(samples[0].record)) or "no field except prompt"
    shortened = (
        "; this trial has a shorter time limit, because other ranks wait" if limit < config.time_limit_seconds else ""
    )
    named = f"environment.function={config.function}" if config.function else f"environment.name={config.name}"
    remedy = ""
    if config.compares and "reward_model" in samples[0].record:
        remedy = (
            "; a record with reward_model has verl's form: set environment.name=verl, and environment.function to the "
            "module:function that verl's run calls"
        )
    raise UserError(
        f"{named}: a response to a record of data.train cannot be judged: {errors[0]} "
        f"(the record has {fields}{shortened}){remedy}"
    )


def _answered(sample: Sample) -> Sample:
    return replace(sample, message_log=with_response(sample.message_log, str(sample.record.get("answer", ""))))


class _Worker:
    """A judging process, and the pipes to it."""

    def __init__(self, config: EnvironmentConfig, log: Path | None) -> None:
        self.config, self.log = config, log
        self._start()

    def _start(self) -> None:
        with open(self.log or os.devnull, "ab") as printed:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mcore_rl.environments.judge_worker", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=printed,
                start_new_session=True,  # a judge's child processes can be ended with it
                env=judge_variables(self.config, os.environ),
            )
        assert self.process.stdout is not None
        self.answers, self._partial, self.gone = self.process.stdout.fileno(), b"", False
        os.set_blocking(self.answers, False)
        self._write(self.config.model_dump(mode="json"))
        answer = self._wait(self.config.start_seconds)
        if answer is None:
            limit = f"environment.start_seconds={self.config.start_seconds:g}"
            died = "its process died as it started"
            answer = {"error": died if self.gone else f"its process was not ready within {limit}; raise the limit"}
        if "error" in answer:
            self.kill()
            raise UserError(f"environment.{self.config.name}: {answer['error']}")

    def ask(self, samples: Sequence[Sample]) -> list[Step] | str:
        """Let the process judge these samples; return their steps.

        If the process could not judge the samples, return an error message.
        """
        self._write({"samples": [asdict(sample) for sample in samples]})
        limit = self.config.time_limit_seconds
        answer = self._wait(limit * len(samples))
        if answer is None and self.gone:
            return "the process that judged it died"
        if answer is None:
            self.kill()
            return f"no answer within environment.time_limit_seconds={limit:g}"
        return [Step(**step) for step in answer["steps"]] if "steps" in answer else str(answer["error"])

    def _write(self, value: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(value).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self.gone = True

    def _wait(self, seconds: float) -> dict[str, Any] | None:
        """Return the next answer of the process; None if there is none within `seconds`, or the process has ended."""
        deadline, poll = time.monotonic() + seconds, select.poll()
        poll.register(self.answers, select.POLLIN)
        while (answer := self._read()) is None:
            left = deadline - time.monotonic()
            if self.gone or left <= 0:
                return None
            poll.poll(1000 * left)
        return answer

    def _read(self) -> dict[str, Any] | None:
        try:
            data = os.read(self.answers, 1 << 16)
            self.gone = self.gone or not data
            self._partial += data
        except BlockingIOError:
            pass
        line, end, rest = self._partial.partition(b"\n")
        if not end:
            return None
        self._partial = rest
        answer: dict[str, Any] = json.loads(line)
        return answer

    def restart_if_gone(self) -> None:
        if self.gone or self.process.poll() is not None:
            self.kill()
            self._start()

    def end(self) -> None:
        """Kill the process and all processes that it started.

        If the process has already ended, do nothing: its pid may belong to another process now.
        """
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def kill(self) -> None:
        self.gone = True
        self.end()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

"""An environment whose samples are judged in processes of their own, each within a time limit."""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mcore_rl.config import EnvironmentConfig
from mcore_rl.environments.interfaces import MessageLog, Step
from mcore_rl.errors import UserError

START_SECONDS = 60.0


class JudgedEnvironment:
    """Hands samples to worker processes. One that raises, hangs or dies fails its own sample and no other.

    Args:
        log: where what judges print goes; nowhere if not given.

    Raises:
        UserError: the judge cannot be made (a module that cannot be imported, a missing extra, …).
    """

    def __init__(self, config: EnvironmentConfig, log: Path | None = None) -> None:
        self.config = config
        self.workers: list[_Worker] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            for _ in range(config.num_workers):
                self.workers.append(_Worker(config, log))
            undo.pop_all()

    def step(self, message_logs: Sequence[MessageLog], records: Sequence[dict[str, Any]]) -> list[Step]:
        steps = dict(self.judged(message_logs, records))
        return [steps[index] for index in range(len(message_logs))]

    def judged(
        self, message_logs: Sequence[MessageLog], records: Sequence[dict[str, Any]]
    ) -> Iterator[tuple[int, Step]]:
        """Each sample's number and step, as they come."""
        samples = enumerate(zip(message_logs, records, strict=True))
        waiting = deque((i, {"message_log": log, "record": record}) for i, (log, record) in samples)
        idle, busy = list(self.workers), dict[_Worker, int]()
        selector = selectors.DefaultSelector()
        while waiting or busy:
            while waiting and idle:
                worker, (index, sample) = idle.pop(), waiting.popleft()
                worker.restart_if_gone()
                worker.send(sample, self.config.time_limit_seconds)
                busy[worker] = index
                selector.register(worker.answers, selectors.EVENT_READ, worker)
            nearest = min(worker.deadline for worker in busy)
            selector.select(max(0.0, nearest - time.monotonic()))
            for worker in list(busy):
                step = worker.poll()
                if step is not None:
                    selector.unregister(worker.answers)
                    idle.append(worker)
                    yield busy.pop(worker), step

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()


def probe(
    config: EnvironmentConfig,
    message_logs: Sequence[MessageLog],
    records: Sequence[dict[str, Any]],
    seconds: float = math.inf,
) -> None:
    """Judge answers to real prompts, the record's own `answer` if it has one, until one could be judged.

    Args:
        seconds: that all judgements may take together.

    Raises:
        UserError: the judge cannot be made, or fails on all of them.
    """
    workers = min(config.num_workers, len(records))
    limit = min(config.time_limit_seconds, seconds / math.ceil(len(records) / workers))
    environment = JudgedEnvironment(config.model_copy(update={"num_workers": workers, "time_limit_seconds": limit}))
    answers = [{"role": "assistant", "content": str(record.get("answer", ""))} for record in records]
    asked, errors = [[*log, answer] for log, answer in zip(message_logs, answers, strict=True)], dict[int, str]()
    with contextlib.closing(environment):
        for index, step in environment.judged(asked, records):
            if step.error is None:
                return
            errors[index] = step.error
    fields = ", ".join(sorted(records[0])) or "no field beside prompt"
    shortened = "; shortened for this trial, while other ranks wait" if limit < config.time_limit_seconds else ""
    raise UserError(
        f"environment.name={config.name}: an answer to a record of data.train cannot be judged: {errors[0]} "
        f"(the record has {fields}{shortened})"
    )


class _Worker:
    """One judging process."""

    def __init__(self, config: EnvironmentConfig, log: Path | None) -> None:
        self.config, self.log = config, log
        self._start()

    def _start(self) -> None:
        with open(self.log or os.devnull, "ab") as printed:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mcore_rl.environments.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=printed,
                env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            )
        assert self.process.stdout is not None
        self.answers, self._partial, self.gone = self.process.stdout.fileno(), b"", False
        os.set_blocking(self.answers, False)
        options = {"pattern": self.config.pattern, "function": self.config.function}
        self._write({"judge": self.config.name, "options": options})
        deadline = time.monotonic() + START_SECONDS
        while (answer := self._read()) is None:
            if self.gone or time.monotonic() > deadline:
                answer = {"error": "its process did not start"}
                break
            time.sleep(0.01)
        if "error" in answer:
            self.kill()
            raise UserError(f"environment.{self.config.name}: {answer['error']}")

    def send(self, sample: dict[str, Any], seconds: float) -> None:
        self.deadline = time.monotonic() + seconds
        self._write(sample)

    def _write(self, value: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(value, default=str).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self.gone = True

    def poll(self) -> Step | None:
        """The answer, or what became of the process; None while it thinks."""
        if (answer := self._read()) is not None:
            return Step(**answer)
        if self.gone:
            return Step(error="the process that judged it died")
        if time.monotonic() > self.deadline:
            self.kill()
            return Step(error=f"no answer within environment.time_limit_seconds={self.config.time_limit_seconds:g}")
        return None

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

    def kill(self) -> None:
        self.gone = True
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

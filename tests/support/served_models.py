"""Models that `mcore-rl serve` serves for tests, as a user starts it."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import psutil
import requests

SECONDS = 120


class ServedByCommand:
    """A model served by `mcore-rl serve ARGUMENTS` on a free port; `url` as the command prints it, without /v1."""

    def __init__(self, *arguments, key=None):
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        if key is not None:
            environment["MCORE_RL_API_KEY"] = key
        command = [sys.executable, "-m", "mcore_rl", "serve", *map(str, arguments), "--port", "0"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
        line = next((line for line in self.process.stdout if line.startswith("serving ")), "")
        assert line, self.process.communicate(timeout=SECONDS)
        self.url = line.split(" at ")[1].split("/v1")[0]

    def post(self, path, body, **options):
        return requests.post(self.url + path, json=body, timeout=SECONDS, **options)

    def stop(self, number=signal.SIGTERM):
        """Stop the command; return its exit status."""
        self.process.send_signal(number)
        self.said, self.error = self.process.communicate(timeout=SECONDS)
        return self.process.returncode


@contextmanager
def served_by_command(*arguments, **options):
    served = ServedByCommand(*arguments, **options)
    try:
        yield served
    finally:
        if served.process.poll() is None:
            for process in [*psutil.Process(served.process.pid).children(recursive=True), served.process]:
                process.kill()
            served.process.communicate(timeout=SECONDS)

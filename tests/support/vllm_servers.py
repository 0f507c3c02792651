"""Real vLLM servers for tests: `make test-vllm`. Their environment (3.4 GB) is created if it is missing."""

import os
import signal
import subprocess
import sys

import pytest
from ports import free_port
from programs import ROOT

PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
START_SECONDS = 240
KEY = os.environ["VLLM_API_KEY"]  # of all servers and runs of tests (conftest.py)


@pytest.fixture(scope="module", autouse=True)
def vllm_environment():
    subprocess.run(["make", "install-vllm", f"PYTHON={sys.executable}"], cwd=ROOT, check=True, timeout=900)


class Serving:
    """`mcore-rl vllm-servers` with the file grpo.yaml of a directory, as a user runs it; `urls` as it prints them."""

    def __init__(self, root, *overrides):
        self.port = free_port()
        options = [f"generation.vllm.port={self.port}", f"output_dir={root / f'served_{self.port}'}", *overrides]
        command = [sys.executable, "-m", "mcore_rl", "vllm-servers", root / "grpo.yaml", *options]
        self.process = subprocess.Popen(
            list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def __enter__(self):
        # It ends after start_seconds. A table of the servers comes first.
        self.urls = next((line.strip() for line in self.process.stdout if line.startswith("generation.")), "")
        assert self.urls.startswith("generation.vllm.urls=["), self.process.communicate(timeout=60)
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        self.said, self.error = self.process.communicate(timeout=60)

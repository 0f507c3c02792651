"""Stubs of vLLM servers, and the requests that tests send to them."""

import json
import os
import sys
import threading
import time
from contextlib import contextmanager, suppress
from http.server import ThreadingHTTPServer

import numpy as np
import pytest
import yaml
from ports import free_port
from programs import ROOT, SUPPORT, metrics_of, run
from signed_handler import SignedHandler
from small_models import make_model

from mcore_rl.config import GRPOConfig, build_config
from mcore_rl.models.generation.sampling import SamplingParams
from mcore_rl.models.generation.vllm.client import Request, ServerPool, VLLMServer
from mcore_rl.models.generation.vllm.packed import pack


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Write two models, prompts, a judge of two turns and a configuration."""
    root = tmp_path_factory.mktemp("vllm_runs")
    make_model("qwen2", root / "dense", initializer_range=0.1)
    make_model("qwen3_moe", root / "mixture", initializer_range=0.1)
    prompts = [{"prompt": f"say {letter}", "answer": letter} for letter in "abcdefghij"]
    (root / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    (root / "judging.py").write_text(
        "from mcore_rl.environments.interfaces import Step\n"
        "def twice(log, record):\n"
        "    last = len(log) >= 4\n"
        "    reward = (sum(map(ord, log[-1]['content'])) % 7) / 4\n"
        "    return Step(reward, done=last, observation=None if last else ' more ')\n"
        "calls = 0\n"
        "def ended(process):\n"
        "    import psutil\n"
        "    try:\n"
        "        return True if process.status() == psutil.STATUS_ZOMBIE else None\n"
        "    except psutil.NoSuchProcess:\n"
        "        return True\n"
        "def ending(log, record):\n"
        "    import pathlib, psutil, time\n"
        "    global calls\n"
        "    directory = pathlib.Path(__file__).with_name('ending').read_text()\n"
        "    calls += 1\n"
        "    for process in psutil.process_iter(['cmdline']) if calls in (16, 48) else ():\n"
        "        words = process.info['cmdline'] or []\n"  # none of a process that has just ended
        "        if directory in ' '.join(words) and 'stand_in' in ' '.join(words[1:2]):\n"
        "            process.kill()\n"
        "            while ended(process) is None:\n"
        "                time.sleep(0.01)\n"
        "    return twice(log, record)\n"
    )
    config = {
        "output_dir": str(root / "out"),
        "model": {"path": str(root / "dense")},
        "parallel": {"timeout_seconds": 60},
        "data": {"train": str(root / "prompts.jsonl"), "max_sequence_length": 60},
        "optimizer": {"lr": 3e-3, "schedule": "constant"},
        "trainer": {"max_steps": 3},
        "checkpoint": {"export_hf": False},
        "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 4, "max_new_tokens": 6},
        "environment": {"name": "function", "function": "judging:twice", "max_turns": 2, "num_workers": 1},
        "generation": {"backend": "vllm"},
    }
    (root / "grpo.yaml").write_text(yaml.safe_dump(config))
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)  # for the judge
        yield root


def train(root, name, *options, processes=1, check=True):
    """Run a training program to its end; return its result and its metrics."""
    arguments = (root / "grpo.yaml", f"output_dir={root / name}", *options)
    process = run("train_grpo.py", *arguments, processes=processes, check=check)
    return process, metrics_of(root / name) if (root / name / "metrics.jsonl").exists() else []


def vllm_python(directory, *options):
    """Write a program that takes the place of vLLM's Python and starts the stand-in; it adds a line "address port GPUs"
    to `places` for each start."""
    path = directory / "vllm_python"
    words = " ".join(map(str, options))
    path.write_text(
        f'#!/bin/bash\nport=${{10}}; echo "$8 $port ${{CUDA_VISIBLE_DEVICES-none}}" >> {directory}/places\n'
        f"export PYTHONPATH={ROOT}\n"
        f'exec {sys.executable} {SUPPORT}/stand_in_vllm.py "$4" "$port" {directory}/$8:$port.log --host "$8" {words}\n'
    )
    path.chmod(0o755)
    return path


GROUPS = [
    [Request((7, group), 5, seed=10 * group + row, priority=group, group=(group,)) for row in range(1 + group % 4)]
    for group in range(9)
]
PARAMS = SamplingParams(5, temperature=0.7, top_p=0.9, stop_token_ids=(1, 2), stop_strings=("!",), seed=3)


KEY = os.environ["VLLM_API_KEY"]  # of all servers and runs of tests (conftest.py)


def packed(told):
    """Return an answer in packed form; its arrays are the entries that are arrays."""
    arrays = {name: value for name, value in told.items() if isinstance(value, np.ndarray)}
    return pack({name: value for name, value in told.items() if name not in arrays}, arrays)


COUNTING = threading.Lock()


class Stub(SignedHandler):
    """Server stub whose response is the prompt's last token and the seed, in packed form; `server.behave` may refuse,
    or change entries of the answer. Subclasses may set `told`, further entries."""

    def do_POST(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        body = json.loads(content)
        with COUNTING:
            self.server.asked.append(body)
            number = len(self.server.asked)
        assert self.path == "/mcore_rl/generate"
        assert self.is_signed(content)
        status, change = self.server.behave(number) or (200, {})
        if status is None:  # cut the line
            return self.connection.close()
        sampling = body["sampling_params"]
        told = {
            "finish_reason": "stop" if sampling["seed"] % 2 else "length",
            "weight_versions": [["a.3", 0, 2]],
            "token_ids": np.array([body["token_ids"][-1], sampling["seed"]], np.int32),
            "logprobs": np.array([-0.25, -0.5], np.float32),
            **getattr(self, "told", {}),
            **change,
        }
        content = packed(told) if status == 200 else json.dumps({"error": {"message": "told so"}}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.prove(content)
        self.end_headers()
        with suppress(BrokenPipeError):  # whoever asked has gone: tests kill them
            self.wfile.write(content)

    def log_message(self, *_):
        pass


class Well(Stub):
    """A server whose health check succeeds, whatever happens to its requests."""

    def do_GET(self):
        assert self.path == "/health"
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()


@contextmanager
def pool_of(*behaviours, connections=3, seconds=20.0, handler=Stub):
    """Return a pool of stubs, their requests, and the messages about dropped servers."""
    stubs, dropped = [], {}
    for behave in behaviours:
        stub = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        stub.daemon_threads, stub.block_on_close, stub.asked, stub.behave = True, False, [], behave
        threading.Thread(target=stub.serve_forever, args=(0.05,), daemon=True).start()
        stubs.append(stub)
    urls = [f"http://127.0.0.1:{stub.server_port}" for stub in stubs]
    pool = ServerPool([VLLMServer(url, connections, KEY) for url in urls], dropped.__setitem__, seconds)
    pool.announce("a.3", 3)
    pool.settle(urls)
    try:
        yield pool, stubs, dropped
    finally:
        pool.close()
        for stub in stubs:
            stub.shutdown()
            stub.server_close()


def well(_):
    time.sleep(0.02)


def config_of(tmp_path, offload=False, **vllm):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'WARNING OSError: never mind'\necho \"ValueError: $3 is no model\"\nexit 3\n")
    python.chmod(0o755)
    values = {
        "output_dir": str(tmp_path / "out"),
        "model": {"path": str(tmp_path / "model"), "dtype": "bfloat16"},
        "data": {"train": "data.jsonl", "max_sequence_length": 5000},
        "optimizer": {"lr": 1e-3},
        "trainer": {"max_steps": 4},
        "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_new_tokens": 8},
        "generation": {
            "backend": "vllm",
            "offload": offload,
            "vllm": {"python": str(python), "port": free_port(), **vllm},
        },
    }
    return build_config(GRPOConfig, values, [], "here")

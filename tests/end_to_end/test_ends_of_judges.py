"""Tests that judging processes and their children end with the process that started them; time limits are per
sample."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
from ended import wait_for_end
from programs import run
from small_models import make_model

from mcore_rl.config import EnvironmentConfig
from mcore_rl.environments.interfaces import Sample
from mcore_rl.environments.judge_processes import JudgeProcesses
from mcore_rl.errors import UserError

JUDGES = """\
import subprocess, sys, time
def starts_another(log, record):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)", record["mark"]])
    if record.get("hangs"):
        time.sleep(99)
    return 1.0
def slow(log, record):
    with open(record["calls"], "a") as calls:
        calls.write("x")
    time.sleep(0.6)
    return 1.0
"""
STARTER = """
import sys, time
from mcore_rl.config import EnvironmentConfig
from mcore_rl.environments.interfaces import Sample
from mcore_rl.environments.judge_processes import JudgeProcesses
environment = JudgeProcesses(EnvironmentConfig(name="function", function="ending_judges:starts_another"))
environment.submit(Sample([{"role": "user", "content": "x"}], {"mark": sys.argv[1]})).result(60)
hanging = environment.submit(Sample([{"role": "user", "content": "x"}], {"mark": sys.argv[1], "hangs": True}))
print("judged", flush=True)
time.sleep(99)
"""


@pytest.fixture(autouse=True)
def judges(tmp_path, monkeypatch):
    (tmp_path / "ending_judges.py").write_text(JUDGES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def descendants(process):
    return psutil.Process(process).children(recursive=True)


def wait_until(true, seconds=30):
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.05)
    return true()


def sample(**record):
    return Sample([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], record)


def test_nothing_that_judges_outlives_its_trainer(tmp_path):
    trainer = subprocess.Popen([sys.executable, "-c", STARTER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert trainer.stdout.readline() == "judged\n"
        # Two judging processes with a guard each, and two processes of judges.
        assert wait_until(lambda: len(descendants(trainer.pid)) == 6)
        started = descendants(trainer.pid)
        assert os.getpgid(trainer.pid) not in {os.getpgid(process.pid) for process in started}
    finally:
        os.kill(trainer.pid, signal.SIGKILL)  # no one else: an out-of-memory killer chooses one process
        trainer.wait(30)
    for process in started:
        wait_for_end(process.pid)


def test_a_judge_that_takes_too_long_is_ended_with_what_it_has_started(tmp_path):
    before = set(descendants(os.getpid()))
    config = EnvironmentConfig(
        name="function", function="ending_judges:starts_another", num_workers=1, time_limit_seconds=1
    )
    environment = JudgeProcesses(config, tmp_path / "judge.log")
    try:
        future = environment.submit(sample(mark=str(tmp_path), hangs=True))
        assert wait_until(lambda: len(set(descendants(os.getpid())) - before) == 3)
        started = set(descendants(os.getpid())) - before
        assert "no answer within environment.time_limit_seconds=1" in future.result(60).error
        for process in started:
            wait_for_end(process.pid)
    finally:
        environment.close()


@pytest.mark.long
def test_a_slow_batch_of_healthy_samples_is_judged_once(tmp_path):
    config = EnvironmentConfig(
        name="function", function="ending_judges:slow", num_workers=1, time_limit_seconds=1, batch_size=4
    )
    environment = JudgeProcesses(config)
    try:
        asked = [environment.submit(sample(calls=str(tmp_path / "calls"))) for _ in range(5)]
        assert [future.result(60).reward for future in asked] == [1.0] * 5
    finally:
        environment.close()
    assert (tmp_path / "calls").read_text() == "x" * 5


def test_the_start_has_a_limit_of_its_own(tmp_path):
    Path(tmp_path / "late.py").write_text("import time\ntime.sleep(20)\njudge = None\n")
    config = EnvironmentConfig(name="function", function="late:judge", num_workers=1, start_seconds=1)
    started = time.monotonic()
    with pytest.raises(UserError, match=r"was not ready within environment\.start_seconds=1; raise the limit"):
        JudgeProcesses(config)
    assert time.monotonic() - started < 15


class Trickle(BaseHTTPRequestHandler):
    """Sends a byte now and then, for ever."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        try:
            while True:
                self.wfile.write(b" ")
                self.wfile.flush()
                time.sleep(0.1)
        except OSError:
            pass

    def log_message(self, *_):
        pass


class Echo(BaseHTTPRequestHandler):
    """Rewards a sample with 0.5 and keeps the headers of the request."""

    asked = None

    def do_POST(self):
        type(self).asked = self.headers
        self.rfile.read(int(self.headers["Content-Length"]))
        body = b'{"rewards": [0.5]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_headers_take_their_secrets_from_the_environment(monkeypatch):
    from mcore_rl.environments.judges import HTTPJudge

    monkeypatch.setenv("JUDGE_TOKEN", "s3cret")
    headers = {"Authorization": "Bearer ${JUDGE_TOKEN}", "X-Plain": "a"}
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        judge = HTTPJudge(f"http://127.0.0.1:{server.server_port}/", 0, 20.0, headers)
        assert asyncio.run(judge([sample()])) == [0.5]
        server.shutdown()
    assert Echo.asked["Authorization"] == "Bearer s3cret" and Echo.asked["X-Plain"] == "a"
    message = r"environment\.headers\.Authorization: the environment variable ABSENT_TOKEN is not set"
    with pytest.raises(UserError, match=message):
        HTTPJudge("http://localhost/", 0, 1.0, {"Authorization": "${ABSENT_TOKEN}"})


@pytest.mark.long
def test_secrets_of_headers_are_in_no_file_of_a_run(tmp_path, monkeypatch):
    """The run continues with another token, which is no change of the configuration."""
    make_model("llama", tmp_path / "model", initializer_range=0.05)
    prompts = [{"prompt": f"say {letter} "} for letter in "abcd"]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    out = tmp_path / "out"
    overrides = [f"output_dir={out}", f"model.path={tmp_path / 'model'}", f"data.train={tmp_path / 'prompts.jsonl'}"]
    overrides += ["data.max_sequence_length=32", "checkpoint.export_hf=false", "logging.tensorboard=true"]
    overrides += ["grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=2", "grpo.max_new_tokens=4"]
    overrides += ["environment.name=http", "environment.headers.Authorization='Bearer ${JUDGE_TOKEN}'"]
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        overrides += [f"environment.url=http://127.0.0.1:{server.server_port}/"]
        for step, token in enumerate(("s3cret", "r0tated"), start=1):
            monkeypatch.setenv("JUDGE_TOKEN", token)
            printed = run("train_grpo.py", *overrides, "--print-config").stdout_text
            printed += run("train_grpo.py", *overrides, f"trainer.max_steps={step}").stdout_text
            assert Echo.asked["Authorization"] == f"Bearer {token}"
            assert token not in printed
            values = (
                "environment.headers.Authorization=Bearer ${JUDGE_TOKEN}"  # of the configuration, not a change of it
            )
            assert "environment.headers.Authorization" not in printed.replace(values, "")
        server.shutdown()
    files = [path for path in out.rglob("*") if path.is_file()]
    assert (out / "checkpoints" / "iter_0000002" / "common.pt") in files
    assert [path for path in files if re.search(b"s3cret|r0tated", path.read_bytes())] == []


@pytest.mark.long
def test_a_taken_master_port_is_called_that(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        program = (
            "from datetime import timedelta\n"
            "from mcore_rl import platform\n"
            "platform.initialize_platform()\n"
            "platform.initialize_process_group(timedelta(seconds=20))\n"
        )
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC")} | alone
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120
        )
    assert f"MASTER_PORT={port}: another program listens on this port" in done.stderr


def test_an_answer_that_trickles_in_has_one_limit():
    from mcore_rl.environments.judges import HTTPJudge

    server = ThreadingHTTPServer(("127.0.0.1", 0), Trickle)
    server.daemon_threads, server.block_on_close = True, False
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    judge, started = HTTPJudge(f"http://127.0.0.1:{server.server_port}/", 0, 1.0), time.monotonic()
    try:
        with pytest.raises(RuntimeError, match=r"took too long \(attempts: 1\)"):
            asyncio.run(judge([sample()]))
        assert time.monotonic() - started < 10
    finally:
        server.shutdown()
        server.server_close()

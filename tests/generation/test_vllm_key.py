"""Tests of the run's key: its file, the middleware that demands it, and the error if a server has another key."""

import asyncio
import importlib
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from programs import run
from stand_in_vllm import serving
from vllm_cases import GROUPS, KEY, PARAMS, Stub, config_of, pool_of
from vllm_cases import root as root  # a fixture

from mcore_rl.errors import TrainingError, UserError
from mcore_rl.models.generation.vllm.generation import check_server
from mcore_rl.models.generation.vllm.key import run_key
from mcore_rl.models.generation.vllm.placement import ServerPlace
from mcore_rl.models.generation.vllm.server import VLLMServerProcesses, server_command
from mcore_rl.run.directory import RunDirectory
from mcore_rl.run.identity import RunIdentity
from mcore_rl.utils.torchrun import launch_id

# ------------------------------------------------------------------ file


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


def test_all_who_start_together_have_the_same_key(tmp_path):
    start = threading.Barrier(8)

    def ask(_):
        start.wait(20)
        return run_key(tmp_path / "out" / "vllm")

    with ThreadPoolExecutor(8) as threads:
        (key,) = set(threads.map(ask, range(8)))
    file = tmp_path / "out" / "vllm" / "key"
    assert len(key) == 43 and file.read_text() == f"{key}\n" and file.stat().st_mode & 0o777 == 0o600
    assert run_key(tmp_path / "other") != key


def test_the_variable_goes_before_the_file_and_writes_none(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    assert run_key(tmp_path / "vllm") == KEY and not (tmp_path / "vllm").exists()


@pytest.mark.parametrize("key", ["", "short", "with a space in the key", "with-a-line-end-in-it\n"])
def test_a_variable_that_is_no_key_is_refused(key, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", key)
    with pytest.raises(UserError, match=r"^VLLM_API_KEY: must be 16 to 512 printable characters") as caught:
        run_key(tmp_path)
    assert len(key) < 2 or key not in str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_file_that_others_can_read_or_change_is_refused(mode, tmp_path):
    run_key(tmp_path)
    (tmp_path / "key").chmod(mode)
    with pytest.raises(UserError, match=rf"key: other users can read or change it \(mode {mode:o}\); run chmod 600 "):
        run_key(tmp_path)


def test_a_file_of_another_user_is_refused(tmp_path, monkeypatch):
    run_key(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(UserError, match=r"key: belongs to the user \d+, who could choose the key of your servers"):
        run_key(tmp_path)


@pytest.mark.parametrize(("content", "reason"), [(b"", "is empty"), (b"\xff\x00", "does not contain a key")])
def test_a_file_without_a_key_is_refused(content, reason, tmp_path, monkeypatch):
    monkeypatch.setattr("mcore_rl.models.generation.vllm.key.WRITING_SECONDS", 0.2)
    (tmp_path / "key").write_bytes(content)
    (tmp_path / "key").chmod(0o600)
    with pytest.raises(UserError, match=f"key: {reason}; delete it"):
        run_key(tmp_path)


def test_a_directory_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(UserError, match=r"the key of vLLM's servers cannot be read or written \(.*; choose an output"):
        run_key(tmp_path / "out")


def test_a_directory_that_is_cleared_for_a_new_run_keeps_the_key(tmp_path):
    """Servers that run since before the clearing have this key."""
    directory = RunDirectory(tmp_path)
    directory.mark(RunIdentity("grpo", {}, "", "", {}, launch_id()).to_json(), "")
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    key = run_key(tmp_path / "vllm")
    directory.clear()
    assert not (tmp_path / "metrics.jsonl").exists() and run_key(tmp_path / "vllm") == key


# ------------------------------------------------------------------ servers


def answer_of(headers, path="/update_weights", kind="http"):
    """Ask the middleware before an application that answers 200; return the messages."""
    module = importlib.import_module("mcore_rl.models.generation.vllm.middleware")
    sent = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "path": path, "headers": headers}
    asyncio.run(module.RunKey(app)(scope, None, send))
    return sent


@pytest.fixture
def guarded(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    yield
    sys.modules.pop("mcore_rl.models.generation.vllm.middleware", None)


RIGHT = (b"authorization", f"Bearer {KEY}".encode())
WRONG = [
    [],
    [(b"authorization", b"Bearer another-key-of-a-run")],
    [(b"authorization", KEY.encode())],
    [(b"authorization", b"Bearer ")],
    [(b"authorization", f"Bearer {KEY} ".encode())],
    [(b"authorization", b"\xff\xfe")],
    [RIGHT, (b"authorization", b"Bearer x")],
]


@pytest.mark.parametrize("headers", WRONG, ids=str)
def test_a_request_without_the_key_is_refused_on_every_route(headers, guarded):
    for path in ("/update_weights", "/v1/models", "/health/", "/", "/docs"):
        assert answer_of(headers, path)[0]["status"] == 401
    assert answer_of(headers, "/health")[0]["status"] == 200
    assert [message["type"] for message in answer_of(headers, "/v1/realtime", "websocket")] == ["websocket.close"]


def test_a_request_with_the_key_is_answered(guarded):
    assert answer_of([(b"host", b"a"), RIGHT])[0]["status"] == 200


@pytest.mark.parametrize("key", [None, ""])
def test_the_middleware_cannot_be_imported_without_a_key(key, monkeypatch):
    if key is not None:
        monkeypatch.setenv("VLLM_API_KEY", key)
    with pytest.raises(RuntimeError, match="does not start without the run's key"):
        importlib.import_module("mcore_rl.models.generation.vllm.middleware")


def test_servers_get_the_key_in_their_environment_alone(tmp_path):
    config = config_of(tmp_path)
    config.generation.vllm.python.write_text('#!/bin/sh\necho "key=$VLLM_API_KEY" "$@"\n')
    place = ServerPlace(0, "127.0.0.1", config.generation.vllm.port)
    service = VLLMServerProcesses(config, tmp_path / "logs", [place], KEY)
    try:
        (url,) = service.urls
        assert service.why_ended(url, seconds=20) is not None
    finally:
        service.close()
    (log,) = (tmp_path / "logs").iterdir()
    assert log.read_text().startswith(f"key={KEY} -m vllm") and log.read_text().count(KEY) == 1
    command = server_command(config, place)
    assert command[command.index("--middleware") + 1] == "mcore_rl.models.generation.vllm.middleware.RunKey"


@pytest.mark.parametrize("arguments", [["--api-key", "abc"], ["--api-key=abc"], ["--api_key", "abc"]])
def test_a_key_on_the_command_line_is_refused(arguments, tmp_path):
    with pytest.raises(UserError, match=r"arguments: --api-key: other users can read a command line"):
        config_of(tmp_path, arguments=arguments)


# ------------------------------------------------------------------ runs


class Refusing(Stub):
    def do_GET(self):
        self.send_error(401)


def test_a_server_with_another_key_is_told_at_the_start(tmp_path):
    with pool_of(None, handler=Refusing) as (pool, _, _):
        (server,) = pool.servers.values()
        with pytest.raises(UserError) as caught:
            check_server(server, config_of(tmp_path))
    assert str(caught.value) == (
        f"generation.vllm.urls: {server.url} has another key than this run; set the environment variable VLLM_API_KEY "
        "to the key in the file vllm/key of the servers' output_dir"
    )


def test_a_server_that_comes_back_with_another_key_is_dropped():
    with pool_of(lambda n: (401, {})) as (pool, _, dropped):
        with pytest.raises(TrainingError, match="no vLLM server is left"):
            pool.submit(GROUPS[0][0], PARAMS).result(20)
        assert [reason.split(" ", 1)[1] for reason in dropped.values()] == ["has another key than this run"]


@pytest.mark.long
def test_a_run_whose_key_the_server_does_not_know_ends_before_it_trains(root, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    with serving(root / "dense", tmp_path, []) as (urls, _, _):
        monkeypatch.setenv("VLLM_API_KEY", "the-key-of-another-run")
        process = run("train_grpo.py", root / "grpo.yaml", f"output_dir={tmp_path / 'run'}", urls, check=False)
    assert process.returncode == 2 and "has another key than this run; set the environment" in process.stderr_text
    assert "the-key-of" not in process.stdout_text + process.stderr_text

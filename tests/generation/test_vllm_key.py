"""Tests of the run's key: its file, the middleware that demands it, and the error if a server has another key."""

import asyncio
import importlib
import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler

import numpy as np
import pytest
from programs import run
from stand_in_vllm import serving
from vllm_cases import GROUPS, KEY, PARAMS, Stub, config_of, packed, pool_of
from vllm_cases import root as root  # a fixture

from mcore_rl.errors import TrainingError, UserError
from mcore_rl.models.generation.vllm.client import VLLMServer
from mcore_rl.models.generation.vllm.generation import check_server, wait_until_ready
from mcore_rl.models.generation.vllm.key import run_key
from mcore_rl.models.generation.vllm.placement import ServerPlace
from mcore_rl.models.generation.vllm.server import VLLMServerProcesses, server_command
from mcore_rl.models.generation.vllm.signing import Signature, server_name
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
    with pytest.raises(
        UserError, match=rf"key: other users can read or change it \(mode {mode:o}\); run chmod 600 "
    ) as told:
        run_key(tmp_path)
    assert str(told.value).endswith("; on a file system where chmod changes nothing, set VLLM_API_KEY")


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


ANSWER = b"an answer"


def answer_of(headers, path="/update_weights", kind="http", body=b"", method="POST", asked=None, guard=None):
    """Ask the middleware before an application that answers 200; return the messages.

    Args:
        asked: gets the headers and the body that the application gets.
    """
    module = importlib.import_module("mcore_rl.models.generation.vllm.middleware")
    sent, parts = [], [body[: len(body) // 2], body[len(body) // 2 :]]

    async def app(scope, receive, send):
        if asked is not None:
            asked.append((dict(scope["headers"]), (await receive())["body"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part, more_body in ((ANSWER[:3], True), (ANSWER[3:], False)):
            await send({"type": "http.response.body", "body": part, "more_body": more_body})

    async def receive():
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message):
        sent.append(message)

    path, _, query = path.partition("?")
    scope = {"type": kind, "path": path, "query_string": query.encode(), "headers": headers, "method": method}
    scope["server"] = ("127.0.0.1", 8100)
    if guard is None:
        guard = module.RunKey(app)
        guard._started = 0.0  # requests were signed before
    asyncio.run(guard(scope, receive, send))
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
    [(b"authorization", b"MCORE-RL a b c")],
    [(b"authorization", b"MCORE-RL @127.0.0.1:8100 b 1.0 c \xff")],
    [RIGHT, (b"authorization", b"Bearer x")],
]


@pytest.mark.parametrize("headers", WRONG, ids=str)
def test_a_request_without_the_key_is_refused_on_every_route(headers, guarded):
    for path in ("/update_weights", "/v1/models", "/health/", "/", "/docs"):
        assert answer_of(headers, path)[0]["status"] == 401
    is_signed = any(value.count(b" ") == 5 for _, value in headers)
    assert answer_of(headers, "/health")[0]["status"] == (401 if is_signed else 200)
    assert [message["type"] for message in answer_of(headers, "/v1/realtime", "websocket")] == ["websocket.close"]


def test_a_request_with_the_key_is_answered(guarded):
    assert answer_of([(b"host", b"a"), RIGHT])[0]["status"] == 200


NAME, BODY = "run@127.0.0.1:8100", b'{"a": 1}'


def signed(name=NAME, target="/pause?mode=keep", body=BODY, key=KEY, method="POST"):
    return Signature.of(key, name, method, target, body)


def header(signature):
    return [(b"authorization", signature.header.encode())]


def test_a_signed_request_is_answered_with_a_proof(guarded, monkeypatch):
    monkeypatch.setenv("MCORE_RL_SERVER", NAME)
    signature, asked = signed(), []
    start, answer = answer_of([(b"host", b"a"), *header(signature)], "/pause?mode=keep", body=BODY, asked=asked)
    proof = signature.proof(KEY, 200, ANSWER).encode()
    assert (start["status"], answer["body"], dict(start["headers"])) == (200, ANSWER, {b"mcore-rl-proof": proof})
    assert len({signature.proof(KEY, 200, b""), signature.proof(KEY, 500, ANSWER), proof.decode()}) == 3
    assert asked == [({b"host": b"a", b"authorization": RIGHT[1]}, BODY)]  # vLLM demands the key of some requests
    assert signed().header != signature.header and KEY not in signature.header


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"key": KEY[:-1]}, 401), ({"method": "GET"}, 401), ({"target": "/pause"}, 401), ({"body": b""}, 401),
        ({"name": "other@127.0.0.1:8100"}, 421), ({"name": "@127.0.0.1:8100"}, 421),
        ({"name": "run@127.0.0.1:8101"}, 421),
    ],
    ids=str,
)  # fmt: skip
def test_a_signature_fits_one_request_to_one_server(change, status, guarded, monkeypatch):
    monkeypatch.setenv("MCORE_RL_SERVER", NAME)
    start, body = answer_of(header(signed(**change)), "/pause?mode=keep", body=BODY)
    assert start["status"] == status and b"mcore-rl-proof" not in dict(start["headers"])
    assert status == 401 or json.loads(body["body"])["error"]["message"] == NAME


def test_a_server_that_was_started_by_hand_has_the_name_of_its_address(guarded):
    assert answer_of(header(signed("@127.0.0.1:8100", "/health", b"", method="GET")), "/health", method="GET")


def test_a_changed_part_of_a_signature_is_refused(guarded, monkeypatch):
    monkeypatch.setenv("MCORE_RL_SERVER", NAME)
    for index in range(1, 6):
        parts = signed().header.split(" ")
        parts[index] = ("a" if parts[index][0] != "a" else "b") + parts[index][1:]
        headers = [(b"authorization", " ".join(parts).encode())]
        assert answer_of(headers, "/pause?mode=keep", body=BODY)[0]["status"] == 401


def test_a_request_is_answered_once_and_not_by_a_server_that_starts_later(guarded, monkeypatch):
    """Whoever has received a request while the server was away cannot use it afterwards."""
    monkeypatch.setenv("MCORE_RL_SERVER", NAME)
    module = importlib.import_module("mcore_rl.models.generation.vllm.middleware")
    early = signed()
    time.sleep(0.01)

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    guard = module.RunKey(app)

    def status_of(signature):
        start, *body = answer_of(header(signature), "/pause?mode=keep", body=BODY, guard=guard)
        return start["status"], json.loads(body[0]["body"] or b"{}").get("error", {}).get("message")

    assert status_of(early) == (503, "the request was signed before this server could answer")
    time.sleep(0.01)
    own = signed()
    assert status_of(own) == (200, None) and status_of(own) == (403, "the request was answered before")
    now = time.time()
    for seconds in (-301, 301):
        monkeypatch.setattr("mcore_rl.models.generation.vllm.signing.time.time", lambda s=seconds: now + s)
        moved = signed()
        monkeypatch.undo()
        monkeypatch.setenv("MCORE_RL_SERVER", NAME)
        guard._started = 0.0
        status, told = status_of(moved)
        assert status == 403 and told.startswith("the clocks of run and server differ by 30")


@pytest.mark.parametrize("key", [None, ""])
def test_the_middleware_cannot_be_imported_without_a_key(key, monkeypatch):
    if key is not None:
        monkeypatch.setenv("VLLM_API_KEY", key)
    with pytest.raises(RuntimeError, match="does not start without the run's key"):
        importlib.import_module("mcore_rl.models.generation.vllm.middleware")


def test_servers_get_the_key_in_their_environment_alone(tmp_path):
    config = config_of(tmp_path)
    config.generation.vllm.python.write_text('#!/bin/sh\necho "key=$VLLM_API_KEY" "name=$MCORE_RL_SERVER" "$@"\n')
    place = ServerPlace(0, "127.0.0.1", config.generation.vllm.port)
    service = VLLMServerProcesses(config, tmp_path / "logs", [place], KEY, run="run")
    try:
        (url,) = service.urls
        assert service.why_ended(url, seconds=20) is not None
    finally:
        service.close()
    (log,) = (tmp_path / "logs").iterdir()
    assert (
        log.read_text().startswith(f"key={KEY} name=run@127.0.0.1:{place.port} -m vllm")
        and log.read_text().count(KEY) == 1
    )
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


class Listening(BaseHTTPRequestHandler):
    """Another program on the port of a server: it keeps what it gets, and answers well."""

    def do_GET(self):
        self.server.asked.append((dict(self.headers), self.rfile.read(int(self.headers.get("Content-Length", 0)))))
        content = packed({"finish_reason": "stop", "weight_versions": [], "token_ids": np.zeros(0, np.int32)})
        self.send_response(200)
        self.send_header("MCORE-RL-Proof", "0" * 64)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_GET

    def log_message(self, *_):
        pass


def test_another_program_on_the_port_gets_no_key_and_is_not_believed(tmp_path):
    config = config_of(tmp_path)
    with pool_of(None, handler=Listening) as (pool, (stub,), dropped):
        (server,) = pool.servers.values()
        for ask in (check_server, lambda server, config: wait_until_ready(server, None, time.monotonic() + 60)):
            with pytest.raises(UserError, match=rf"^generation\.vllm: {server.url} is another program, or a server"):
                ask(server, config)
        with pytest.raises(TrainingError, match="no vLLM server is left"):
            pool.submit(GROUPS[0][0], PARAMS).result(20)
        assert list(dropped) == [server.url] and len(stub.asked) >= 3
        assert not [True for headers, body in stub.asked if KEY in str(headers) or KEY.encode() in body]


def test_a_run_does_not_use_the_servers_of_another_run(tmp_path, monkeypatch):
    """Both have one key, for example in VLLM_API_KEY."""

    class Named(Stub):
        def do_GET(self):
            name = server_name(f"http://127.0.0.1:{self.server.server_port}", "other")
            content = json.dumps({"error": {"message": name}}).encode()
            self.send_response(200 if self.is_signed(name=name) else 421)
            self.send_header("Content-Length", str(len(content)))
            self.prove(content)
            self.end_headers()
            self.wfile.write(content)

    with pool_of(None, handler=Named) as (pool, _, _):
        (url,) = pool.servers
        VLLMServer(url, 1, KEY, run="other").get("/health", 20)
        with pytest.raises(UserError, match=f"{url} is a server that another run has started for itself"):
            wait_until_ready(VLLMServer(url, 1, KEY, run="own"), None, time.monotonic() + 60)
        url = url.replace("127.0.0.1", "localhost")
        with pytest.raises(UserError, match=f"{url} leads to a server that calls itself 127.0.0.1:.*; use the URLs"):
            wait_until_ready(VLLMServer(url, 1, KEY), None, time.monotonic() + 60)


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

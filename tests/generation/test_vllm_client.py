"""Tests of the vLLM client without vLLM: servers that share work, die, hang or send wrong data, and the death of the
trainer."""

import itertools
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, Future, wait
from contextlib import closing
from dataclasses import replace

import psutil
import pytest
from ports import free_port
from published_directories import add_head
from small_models import and_long, make_model
from vllm_cases import GROUPS, KEY, PARAMS, Stub, Well, config_of, pool_of, well

from mcore_rl.errors import TrainingError, UserError
from mcore_rl.models.generation.vllm import server as vllm_server
from mcore_rl.models.generation.vllm.client import (
    Request,
    RequestQueue,
    ServerError,
    VLLMServer,
    _Task,
    sampling_params,
)
from mcore_rl.models.generation.vllm.generation import wait_until_ready, wait_until_started
from mcore_rl.models.generation.vllm.placement import ServerPlace
from mcore_rl.models.generation.vllm.server import VLLMServerProcesses, server_command, server_environment


def ask_all(pool):
    asked = [[pool.submit(request, PARAMS) for request in group] for group in GROUPS]
    return [[future.result(60) for future in group] for group in asked]


def check_all_answered(pool):
    responses = ask_all(pool)
    for group, answers in zip(GROUPS, responses, strict=True):
        assert [r.token_ids.tolist() for r in answers] == [[request.token_ids[-1], request.seed] for request in group]
        assert [r.ended for r in answers] == [bool(request.seed % 2) for request in group]
        assert all(r.logprobs.tolist() == [-0.25, -0.5] and r.weight_versions == [(3, 2)] for r in answers)


def test_requests_are_spread_and_say_how_to_sample():
    with pool_of(well, well) as (pool, stubs, dropped):
        check_all_answered(pool)
        total = sum(map(len, GROUPS))
        assert sum(len(stub.asked) for stub in stubs) == total
        assert min(len(stub.asked) for stub in stubs) > total / 5
        for stub in stubs:  # a group stays together
            mine = {tuple(body["token_ids"]) for body in stub.asked}
            counts = {ids: sum(tuple(body["token_ids"]) == ids for body in stub.asked) for ids in mine}
            assert counts == {group[0].token_ids: len(group) for group in GROUPS if group[0].token_ids in mine}
        sampling = stubs[0].asked[0]["sampling_params"]
        assert sampling.pop("seed") in {request.seed for group in GROUPS for request in group}
        assert sampling == {
            "max_tokens": 5, "temperature": 0.7, "top_k": 0, "top_p": 0.9, "min_p": 0.0, "logprobs": 0,
            "ignore_eos": True, "stop_token_ids": [1, 2], "detokenize": True, "stop": ["!"],
            "include_stop_str_in_output": True, "skip_special_tokens": False,
        }  # fmt: skip
        assert dropped == {}


def test_requests_exclude_unused_ids():
    params = replace(PARAMS, unused_ids=range(84, 86))
    assert sampling_params(GROUPS[0][0], params)["logit_bias"] == {"84": -100.0, "85": -100.0}


FAILURES = {
    "line cut": (lambda n: (None, {}) if n > 2 else well(n), "does not answer"),
    "engine dead": (lambda n: (500, {}) if n > 1 else well(n), "status 500: told so"),
    "hangs": (lambda n: time.sleep(30) if n > 1 else well(n), "took too long"),
    "other weights": (
        lambda n: (200, {"weight_versions": [["a.2", 0, 1], ["a.3", 1, 2]]}),
        "generated with weights of version a.2/a.3, but must have version a.3 or newer",
    ),
    "aborted": (lambda n: (200, {"finish_reason": "abort"}), "the request ended before its response was complete"),
}


@pytest.mark.parametrize(("behave", "reason"), FAILURES.values(), ids=FAILURES)
def test_what_a_failed_server_was_asked_is_asked_of_another(behave, reason):
    with pool_of(behave, well, seconds=5.0) as (pool, stubs, dropped):
        check_all_answered(pool)
        assert list(dropped) == [f"http://127.0.0.1:{stubs[0].server_port}"]
        assert reason in dropped[f"http://127.0.0.1:{stubs[0].server_port}"]
        before = len(stubs[0].asked)
        check_all_answered(pool)
        assert len(stubs[0].asked) == before, "it is asked nothing more"


def test_none_left_is_told_in_one_line():
    with pool_of(lambda n: (500, {}), lambda n: (None, {})) as (pool, _, dropped):
        with pytest.raises(
            TrainingError, match=r"^no vLLM server is left; the last server's failure: http://\S+: [^\n]+$"
        ):
            ask_all(pool)
        assert len(dropped) == 2


def test_a_wrong_request_is_nobody_elses():
    with pool_of(lambda n: (400, {})) as (pool, _, dropped):
        with pytest.raises(TrainingError, match="refuses the request: told so"):
            ask_all(pool)
        assert dropped == {}


def test_nobody_listens():
    started = time.monotonic()
    with pytest.raises(ServerError, match="does not answer"):
        VLLMServer("http://127.0.0.1:9", 1, KEY).get("/health", 5.0)
    assert time.monotonic() - started < 5


def test_weights_may_change_while_a_server_answers():
    """Each token belongs to the weights that the server reports; weights older than those at the start are an error."""
    changing, asked = threading.Event(), threading.Event()

    def behave(n):
        asked.set()
        assert changing.wait(20)
        return 200, {"weight_versions": [["a.3", 0, 1], ["a.4", 1, 2]]}

    with pool_of(behave) as (pool, _, dropped):
        first = pool.submit(GROUPS[0][0], PARAMS)
        assert asked.wait(20)
        pool.announce("a.4", 4)
        pool.settle(list(pool.servers))
        changing.set()
        assert first.result(20).weight_versions == [(3, 1), (4, 1)]
        with pytest.raises(
            TrainingError, match=r"generated with weights of version a.3/a.4, but must have version a.4 or newer"
        ):
            pool.submit(GROUPS[0][0], PARAMS).result(20)
        assert len(dropped) == 1
        with pytest.raises(TrainingError, match="no vLLM server is left"):
            pool.submit(GROUPS[0][0], PARAMS).result(20)


def test_the_lowest_priority_is_served_first_and_what_nobody_wants_is_not_asked():
    free = threading.Event()
    with pool_of(lambda n: free.wait(20) and None, connections=1) as (pool, stubs, _):
        requests = [Request((7, p), 5, seed=p, priority=p, group=(p,)) for p in (5, 3, 9, 1, 7)]
        futures = [pool.submit(requests[0], PARAMS)]
        deadline = time.monotonic() + 60
        while not stubs[0].asked and time.monotonic() < deadline:
            time.sleep(0.01)
        futures += [pool.submit(request, PARAMS) for request in requests[1:]]
        assert futures[4].cancel()
        free.set()
        assert [future.result(20).token_ids.tolist() for future in futures[:4]] == [[5, 5], [3, 3], [9, 9], [1, 1]]
        assert [body["token_ids"][1] for body in stubs[0].asked] == [5, 1, 3, 9]


class Keeping(Stub):
    """A server that keeps connections, and counts them."""

    protocol_version = "HTTP/1.1"

    def setup(self):
        self.server.asked.append(None)
        super().setup()


def test_connections_are_kept():
    with pool_of(well, connections=2, handler=Keeping) as (pool, stubs, _):
        check_all_answered_by(pool)
        check_all_answered_by(pool)
        assert stubs[0].asked.count(None) == 2


def check_all_answered_by(pool):
    for group, answers in zip(GROUPS, ask_all(pool), strict=True):
        assert [r.token_ids[-1] for r in answers] == [request.seed for request in group]


def test_a_closed_pool_cancels_its_requests():
    free = threading.Event()
    with pool_of(lambda n: free.wait(20) and None, connections=1) as (pool, stubs, _):
        futures = [pool.submit(request, PARAMS) for request in GROUPS[3]]
        deadline = time.monotonic() + 60
        while not stubs[0].asked and time.monotonic() < deadline:
            time.sleep(0.01)
        pool.close()
        for future in futures:
            with pytest.raises(CancelledError):
                future.result(60)
        free.set()
        pool.drop(next(iter(pool.servers), "none"), "nobody waits for a closed pool")
        with pytest.raises(TrainingError, match="no vLLM server is left"):
            pool.submit(GROUPS[0][0], PARAMS).result(60)


@pytest.mark.long
def test_no_future_stays_pending_wherever_a_pool_is_closed():
    """A closed pool also cancels requests that it is about to send."""
    for first in range(1, 30):
        with pool_of(lambda n: None, connections=8) as (pool, _, _):
            futures = [pool.submit(request, PARAMS) for group in GROUPS * 4 for request in group]
            futures[first].result(60)
            pool.close()
            _, pending = wait(futures, timeout=20)
            assert not pending


def test_a_request_cancelled_before_its_first_step_is_resolved():
    with pool_of(well, connections=1) as (pool, _, _):
        task = _Task(GROUPS[0][0], PARAMS, Future())

        async def enqueue_and_cancel():
            pool._enqueue(task)
            for serving in pool._serving:
                serving.cancel()

        pool._in_loop(enqueue_and_cancel())
        with pytest.raises(CancelledError):
            task.future.result(20)
        assert pool.submit(GROUPS[0][0], PARAMS).result(20).ended in (True, False), "the server has room again"


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_callback_that_raises_loses_no_request(error):
    def told(url, reason):
        raise error("of the callback")

    with pool_of(lambda n: (None, {}), well) as (pool, _, _):
        pool._drop = told
        check_all_answered(pool)
        assert len(pool.servers) == 1


def test_a_health_check_that_cannot_be_decoded_drops_the_server():
    class Deep(Stub):
        def do_GET(self):
            content = b"[" * 200_000
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.prove(content)
            self.end_headers()
            self.wfile.write(content)

    with pool_of(lambda n: (500, {}), handler=Deep) as (pool, _, dropped):
        with pytest.raises(TrainingError, match="no vLLM server is left"):
            pool.submit(GROUPS[0][0], PARAMS).result(60)
        assert len(dropped) == 1


@pytest.mark.long
def test_a_drop_told_slowly_does_not_delay_the_exit():
    program = """
import time
from mcore_rl.platform import initialize_platform
initialize_platform()
from vllm_cases import GROUPS, KEY, PARAMS
from mcore_rl.models.generation.vllm.client import ServerPool, VLLMServer
pool = ServerPool([VLLMServer("http://127.0.0.1:9", 1, KEY)], lambda url, reason: time.sleep(100), 5)
pool.submit(GROUPS[0][0], PARAMS)
time.sleep(1)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "nclosed" not in done.stderr and "never retrieved" not in done.stderr, done.stderr


@pytest.mark.parametrize("seed", range(20))
def test_the_queue_gives_what_a_search_of_all_requests_gives(seed):
    generator, queue = random.Random(seed), RequestQueue()
    waiting, homes = [], {}  # in the order of their priorities; of groups

    def expected(url):
        for task in waiting:
            if not task.future.cancelled() and homes.setdefault(task.request.group, url) == url:
                waiting.remove(task)
                return task
        return None

    for number in range(400):
        what = generator.choice(["push", "push", "push", "pop", "pop", "cancel", "forget"])
        if what == "push":
            group = (generator.randrange(8),)
            task = _Task(Request((1,), 1, number, generator.randrange(20), group), PARAMS, Future())
            queue.push(task)
            waiting.append(task)
            waiting.sort(key=lambda task: task.request.priority)
        elif what == "pop":
            url = generator.choice("abc")
            assert queue.pop(url) is expected(url)
        elif what == "cancel" and waiting:
            generator.choice(waiting).future.cancel()
        elif what == "forget" and generator.random() < 0.2:
            gone = generator.choice(["a", "b", "abc"])
            queue.forget_homes(gone)
            homes = {group: home for group, home in homes.items() if home not in gone}
    assert {id(task) for task in queue.clear()} >= {id(t) for t in waiting if not t.future.cancelled()}
    assert queue.pop("a") is None


# ------------------------------------------------------------------ processes


STARTER = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs are begun to ignore
from types import SimpleNamespace
from pathlib import Path
from mcore_rl.config import VLLMConfig
from mcore_rl.models.generation.vllm import server as vllm_server
from mcore_rl.models.generation.vllm.placement import ServerPlace
sleep = "import time; time.sleep(99)"
server = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleep!r}]); {sleep}"
vllm_server.server_command = lambda config, place: [sys.executable, "-c", server]
port = int(sys.argv[1])
places = [ServerPlace(0, "127.0.0.1", port + index) for index in range(2)]
model = SimpleNamespace(moe_router_replay=False, path=Path("unused"))
rollouts = SimpleNamespace(sampled_at_most=None)
config = SimpleNamespace(model=model, generation=SimpleNamespace(vllm=VLLMConfig()), rollouts=rollouts)
service = vllm_server.VLLMServerProcesses(config, Path(sys.argv[2]), places, "the-key-of-this-run")
print("started", flush=True)
time.sleep(99)
"""


def marked(mark):
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("SERVER_TEST") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.long
@pytest.mark.parametrize("sent", and_long([signal.SIGKILL], [signal.SIGTERM, signal.SIGINT]))
def test_servers_end_with_their_trainer_however_it_ends(sent, tmp_path):
    mark = str(tmp_path)
    environment = {**os.environ, "SERVER_TEST": mark}
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(free_port()), str(tmp_path)],
        stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True,
    )  # fmt: skip
    assert starter.stdout.readline() == "started\n"
    deadline = time.monotonic() + 20
    while len(marked(mark)) < 6 and time.monotonic() < deadline:  # starter, keeper, two servers and their children
        time.sleep(0.1)
    assert len(marked(mark)) == 6
    os.killpg(starter.pid, sent)  # as a terminal or torchrun does
    starter.wait(60)
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert marked(mark) == []


# ------------------------------------------------------------------ starting


def places_from(config, count):
    return [ServerPlace(0, "127.0.0.1", config.generation.vllm.port + index) for index in range(count)]


def test_a_server_that_does_not_start_is_told_at_once(tmp_path):
    config = config_of(tmp_path)
    service = VLLMServerProcesses(config, tmp_path / "logs", places_from(config, 2), KEY)
    try:
        with pytest.raises(
            UserError, match=r"did not start: it ended with status 3: ValueError: --model is no model \("
        ):
            wait_until_ready(VLLMServer(service.urls[1], 1, KEY), service, time.monotonic() + 60)
        assert service.why_ended(service.urls[0], seconds=10) is not None
    finally:
        service.close()


def test_a_port_that_is_taken_is_told_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_server, "PORT_SECONDS", 0.5)
    config, said = config_of(tmp_path), []
    port = config.generation.vllm.port
    told = f"generation.vllm.port: a server cannot listen on 127.0.0.1:{port} (Address already in use); choose another"
    with socket.create_server(("127.0.0.1", port)), pytest.raises(UserError, match=re.escape(told)):
        VLLMServerProcesses(config, tmp_path / "logs", places_from(config, 1), KEY, said.append)
    assert said == [f"port {port} is in use; waiting 0.5 s, as an earlier server may be ending"]
    assert not (tmp_path / "logs").exists()


def test_a_port_that_an_earlier_server_leaves_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_server, "ENDING_SECONDS", 0.1)
    config, said = config_of(tmp_path), []
    earlier = socket.create_server(("127.0.0.1", config.generation.vllm.port))
    threading.Timer(0.5, earlier.close).start()
    VLLMServerProcesses(config, tmp_path / "logs", places_from(config, 1), KEY, said.append).close()
    assert len(said) == 1


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_told(host, tmp_path):
    config = config_of(tmp_path)
    with pytest.raises(UserError, match=r"\S+: is not an address of this machine \(.+\); give this node's"):
        VLLMServerProcesses(config, tmp_path / "logs", [ServerPlace(0, host, free_port())], KEY)


def test_a_port_taken_between_check_and_start_is_told_by_its_option(tmp_path):
    """The program that has the port may answer the health check, as another run's server does."""
    config = config_of(tmp_path)
    config.generation.vllm.python.write_text('#!/bin/sh\necho "OSError: [Errno 98] Address already in use"; exit 1\n')
    with pool_of(None, handler=Well) as (pool, _, _):
        (url,) = pool.servers
        place = ServerPlace(0, "127.0.0.1", int(url.rpartition(":")[2]))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vllm_server, "_check_port", lambda *_: None)
            service = VLLMServerProcesses(config, tmp_path / "logs", [place], KEY)
        with closing(service), pytest.raises(UserError, match=r"in use .*; another generation\.vllm\.port may be free"):
            service.why_ended(url, seconds=20)
            wait_until_started(service, config)


def test_a_quantized_directory_is_not_served(tmp_path):
    config = config_of(tmp_path)
    config.model.path.mkdir()
    (config.model.path / "config.json").write_text('{"quantization_config": {"quant_method": "mxfp4"}}')
    with pytest.raises(UserError, match=r"generation\.backend: vLLM would keep .* quantized"):
        VLLMServerProcesses(config, tmp_path / "logs", places_from(config, 1), KEY)
    assert not (tmp_path / "logs").exists()


def test_options_reach_the_servers(tmp_path, monkeypatch):
    config = config_of(tmp_path, tensor_parallel_size=2, arguments=["--block-size", "64"])
    place = ServerPlace(0, "127.0.0.1", 8123, ("4", "5"))
    command = server_command(config, place)
    values = dict(itertools.pairwise(command))
    expected = {
        "--model": str(tmp_path / "model"), "--host": "127.0.0.1", "--port": "8123", "--dtype": "bfloat16",
        "--max-model-len": "5000", "--tensor-parallel-size": "2", "--max-num-seqs": "64", "--block-size": "64",
        "--logprobs-mode": "processed_logprobs", "--max-num-batched-tokens": "5000",
    }  # fmt: skip
    assert {name: values[name] for name in expected} == expected
    monkeypatch.setenv("WORLD_SIZE", "2")
    environment = server_environment(config, place)
    assert environment["CUDA_VISIBLE_DEVICES"] == "4,5" and "WORLD_SIZE" not in environment


def test_servers_are_told_of_a_head_apart_from_tied_embeddings(tmp_path):
    config = config_of(tmp_path)
    make_model("qwen2", config.model.path, tie_word_embeddings=True)
    for head, options in (("equal", []), ("apart", ["--hf-overrides", '{"tie_word_embeddings": false}'])):
        add_head(config.model.path, head)
        command = server_command(config, ServerPlace(0, "127.0.0.1", 8123))
        assert [part for part in command if "override" in part or "tie_" in part] == options

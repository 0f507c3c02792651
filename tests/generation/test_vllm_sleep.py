"""Tests of servers and a policy that use the same GPUs in turn: the order of memory releases, and refused settings."""

import json
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from ports import free_port
from signed_handler import SignedHandler
from vllm_cases import KEY, PARAMS, config_of

from mcore_rl import platform
from mcore_rl.errors import UserError
from mcore_rl.models.generation.vllm.client import VLLMServer
from mcore_rl.models.generation.vllm.generation import VLLMGeneration, check_server
from mcore_rl.models.generation.vllm.placement import ServerPlace
from mcore_rl.models.generation.vllm.server import server_command
from mcore_rl.models.refit.transfer import RefitGroup, RefitReceiver, RefitStore, send_weights


class Policy:
    """A server that records the requests to release and restore memory, and other events."""

    def __init__(self):
        self.events = []

    def __getattr__(self, name):
        return lambda *_: self.events.append(name)


def generation_of(config):
    policy = Policy()
    generation = VLLMGeneration(config, policy, PARAMS, None, print)
    generation._on_first_rank = lambda work: work()

    def connect():
        policy.events.append("connect")
        generation._is_connected = True

    def refit(version, lost):
        assert lost == []
        policy.events.append(f"refit {version}")
        generation.weight_version = version

    server = SimpleNamespace(post=lambda path, body, seconds: policy.events.append(path))
    generation._connect, generation._refit, generation._drop_ended = connect, refit, list

    def begin_each(call):
        future = Future()
        future.set_result(call(server))
        return {"url": future}

    each = lambda call: call(server)  # noqa: E731
    generation._pool = SimpleNamespace(servers=[server], each=each, begin_each=begin_each, close=list)
    return generation, policy.events


def test_one_gives_up_before_the_other_takes(tmp_path):
    generation, events = generation_of(config_of(tmp_path, offload=True))
    expected = [
        ["offload_after_refit", "connect", "/wake_up", "prepare_for_lp_inference", "refit 0", "offload_after_refit"],
        ["/sleep?level=1", "prepare_for_training"],
        ["offload_before_refit", "/wake_up", "prepare_for_lp_inference", "refit 1", "offload_after_refit"],
        ["/sleep?level=1", "prepare_for_training"],
        ["offload_before_refit", "/wake_up", "offload_after_refit"],  # they have these weights
    ]
    generation.finish_generation()  # as a replay does, which asks no server
    for call in (
        lambda: generation.prepare_for_generation(weight_version=0),
        generation.finish_generation,
        lambda: generation.prepare_for_generation(weight_version=1),
        generation.finish_generation,
        lambda: generation.prepare_for_generation(weight_version=1),
    ):
        call()
        assert events == expected.pop(0)
        events.clear()
    generation.close()


def test_weights_go_through_the_host_where_both_are_on_one_gpu(monkeypatch):
    """NCCL, which a GPU would mean otherwise, is not there on the CPU and would fail."""
    monkeypatch.setattr(platform, "has_gpu", lambda: True)
    sent, received, port = torch.arange(7, dtype=torch.float64), {}, free_port()
    info = {"a": ((7,), torch.float64)}
    receiver = RefitReceiver(lambda tensors: received.update((n, t.clone()) for n, t in tensors), info, "cpu")
    with ThreadPoolExecutor(1) as beside:
        joining = beside.submit(receiver.init_collective, "127.0.0.1", port, 1, 2, 20)
        group = RefitGroup(RefitStore("127.0.0.1", port, 0, 20), 2, on_host=True)
        joining.result()
        receiving = beside.submit(receiver.update_weights_from_collective)
        send_weights([("a", sent)], info, group, 1000)
        receiving.result()
    assert torch.equal(received["a"], sent)


def test_nothing_sleeps_unless_asked_to(tmp_path):
    generation, events = generation_of(config_of(tmp_path))
    generation.prepare_for_generation(weight_version=0)
    generation.finish_generation()
    generation.close()
    assert events == ["connect", "refit 0"]


def test_servers_are_started_so_that_they_can(tmp_path, monkeypatch):
    flag, asleep, awake = "--enable-sleep-mode", config_of(tmp_path, offload=True), config_of(tmp_path)
    place = ServerPlace(0, "127.0.0.1", 8123)
    assert flag not in server_command(asleep, place), "vLLM refuses it on the CPU"
    monkeypatch.setattr(platform, "has_gpu", lambda: True)
    assert flag in server_command(asleep, place) and flag not in server_command(awake, place)


class Told(SignedHandler):
    def do_GET(self):
        answers = {"/v1/models": {"data": [{"max_model_len": 9999}]}, **self.server.answers}
        content = json.dumps(answers.get(self.path)).encode()
        self.send_response(200 if self.path in answers else 404)
        self.send_header("Content-Length", str(len(content)))
        self.prove(content)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@contextmanager
def telling(answers):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Told)
    server.answers = answers
    Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield VLLMServer(f"http://127.0.0.1:{server.server_port}", 1, KEY)
    server.shutdown()
    server.server_close()


def test_servers_that_cannot_are_refused_where_they_tell(tmp_path, monkeypatch):
    path, config = "/server_info?config_format=json", config_of(tmp_path, offload=True)
    monkeypatch.setattr(platform, "has_gpu", lambda: True)
    cannot = {path: {"vllm_config": {"model_config": {"enable_sleep_mode": False}}}}
    with (
        telling(cannot) as server,
        pytest.raises(UserError, match=r"generation.offload: http://\S+ runs without --enable-sl"),
    ):
        check_server(server, config)
    can = {path: {"vllm_config": {"model_config": {"enable_sleep_mode": True}}}}
    for answers, wanted in ((can, config), ({}, config), ({path: None}, config), (cannot, config_of(tmp_path))):
        with telling(answers) as server:
            check_server(server, wanted)

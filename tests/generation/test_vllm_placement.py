"""Tests of the placement of vLLM's servers on nodes and GPUs, and of servers that are started again."""

import dataclasses
import os
import signal
import sys
import time
from contextlib import closing

import psutil
import pytest
import yaml
from forked_programs import ForkedProgram
from ports import free_port
from programs import ROOT, SUPPORT
from recipes import LARGE, RECIPES, read_recipe
from small_models import make_model
from vllm_cases import KEY, config_of

from mcore_rl import platform
from mcore_rl.cli import entry_point
from mcore_rl.cli.dry_run import describe_servers
from mcore_rl.cli.train import load_for
from mcore_rl.cli.vllm_servers import places_on_hosts, vllm_servers
from mcore_rl.errors import UserError
from mcore_rl.models.generation.vllm import placement
from mcore_rl.models.generation.vllm import server as vllm_server
from mcore_rl.models.generation.vllm.placement import (
    Node,
    ServerPlace,
    describe_places,
    place_servers,
    planned_nodes,
    with_host,
)
from mcore_rl.models.generation.vllm.server import VLLMServerProcesses

EIGHT = tuple("01234567")
ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def nodes_of(*trained_on, gpus=EIGHT):
    return [Node(f"10.0.0.{index + 1}", gpus, tuple(used), index) for index, used in enumerate(trained_on)]


def config_with(tmp_path, offload=False, **vllm):
    config = config_of(tmp_path, offload=offload, **vllm)
    return config.model_copy(update={"generation": config.generation.model_copy(update={
        "vllm": config.generation.vllm.model_copy(update={"port": 8100})})})  # fmt: skip


def devices(places):
    return [(place.node, "".join(place.devices)) for place in places]


@pytest.mark.parametrize(
    ("offload", "vllm", "trained_on", "expected"),
    [
        (True, {}, ["0123", "0123"], [(0, "0"), (0, "1"), (0, "2"), (0, "3"), (1, "0"), (1, "1"), (1, "2"), (1, "3")]),
        (True, {"tensor_parallel_size": 4}, [EIGHT, EIGHT], [(0, "0123"), (0, "4567"), (1, "0123"), (1, "4567")]),
        (True, {"tensor_parallel_size": 2, "num_servers": 3}, [EIGHT, EIGHT], [(0, "01"), (0, "23"), (1, "01")]),
        (True, {}, ["0011"], [(0, "0"), (0, "1")]),  # ranks that share a GPU
        (True, {"devices": [6, 7]}, [EIGHT], [(0, "6"), (0, "7")]),
        (False, {}, ["012345", "012345"], [(0, "6"), (0, "7"), (1, "6"), (1, "7")]),
        (False, {"tensor_parallel_size": 2}, ["7", "012345"], None),  # seven GPUs are left
        (False, {"tensor_parallel_size": 2, "num_servers": 4}, ["7", "012345"],
         [(0, "01"), (0, "23"), (0, "45"), (1, "67")]),
        (False, {"num_servers": 2, "devices": [3, 4]}, ["012"], [(0, "3"), (0, "4")]),
    ],
)  # fmt: skip
def test_servers_get_the_gpus_of_training_or_the_others(offload, vllm, trained_on, expected, tmp_path):
    config = config_with(tmp_path, offload, **vllm)
    if expected is None:
        with pytest.raises(UserError, match="=2: does not divide the 7 GPUs that servers can use on node 0"):
            place_servers(config, nodes_of(*trained_on))
        return
    places = place_servers(config, nodes_of(*trained_on))
    assert devices(places) == expected
    assert len({place.url for place in places}) == len(places)
    for place in places:
        assert place.host == f"10.0.0.{place.node + 1}"
    assert [place.port for place in places if place.node == 0] == [
        8100 + n for n, at in enumerate(expected) if not at[0]
    ]


def test_gpus_keep_the_names_that_a_scheduler_gave_them(tmp_path):
    names = ("GPU-a", "GPU-b", "MIG-c", "GPU-d")
    places = place_servers(config_with(tmp_path, tensor_parallel_size=2), [Node("h", names, ("GPU-b", "GPU-d"))])
    assert [place.devices for place in places] == [("GPU-a", "MIG-c")]


def test_gpu_names_are_those_of_the_variable(monkeypatch):
    monkeypatch.setattr(platform, "has_gpu", lambda: True)
    monkeypatch.setattr(platform.torch.cuda, "device_count", lambda: 2)
    for value, names in (("GPU-a, GPU-b", ("GPU-a", "GPU-b")), ("5,3,-1,0", ("5", "3")), ("", ("0", "1"))):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert platform.gpu_names() == names
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert platform.gpu_names() == ("0", "1")


def test_without_gpus_each_node_gets_a_server_and_nodes_on_one_machine_other_ports(tmp_path):
    nodes = [Node("127.0.0.1"), Node("127.0.0.1"), Node("10.0.0.3")]
    places = place_servers(config_with(tmp_path), nodes)
    assert [(place.node, place.url) for place in places] == [
        (0, "http://127.0.0.1:8100"), (1, "http://127.0.0.1:8101"), (2, "http://10.0.0.3:8100"),
    ]  # fmt: skip
    assert devices(place_servers(config_with(tmp_path, num_servers=5), nodes)) == [
        (0, ""), (0, ""), (1, ""), (1, ""), (2, ""),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("offload", "vllm", "trained_on", "message"),
    [
        (False, {}, [EIGHT, EIGHT],
         "servers need GPUs, but 2 nodes with 8 GPUs, 8 of them for training, 0 for servers; set generation.offload"),
        (True, {"num_servers": 16}, [EIGHT],
         "num_servers=16: a server needs 1 GPU, so 8 servers would fit: 1 node with 8 GPUs, 8 of them for training, 8"),
        (True, {"num_servers": 1, "tensor_parallel_size": 16}, [EIGHT, EIGHT],
         "a server needs 16 GPUs of one node, so 0 servers would fit"),
        (True, {"tensor_parallel_size": 3}, [EIGHT], "=3: does not divide the 8 GPUs"),
        (True, {"tensor_parallel_size": 16}, [EIGHT, EIGHT],
         "_size=16: a server must fit on one node, but 2 nodes with 8 GPUs, .* 8 for servers; lower it$"),
        (False, {"tensor_parallel_size": 4}, ["012345"],
         "_size=4: a server must fit on one node, but 1 node with 8 GPUs, .* 2 for servers; set generation.offload"),
        (False, {"devices": [8]}, ["0"], "devices: node 0 has no GPU 8; it has 8 GPUs"),
        (False, {"devices": [2, 1]}, ["01"], "devices: training uses GPU 1 of node 0"),
        (False, {"host": "10.0.0.1"}, ["0", "0"], "host=10.0.0.1: is one address, but servers run on 2 nodes"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_arithmetic(offload, vllm, trained_on, message, tmp_path):
    config = config_with(tmp_path, offload, **vllm)
    with pytest.raises(UserError, match=message):
        place_servers(config, with_host(config, nodes_of(*trained_on)))


def test_ports_end_at_the_last_one(tmp_path):
    config = config_of(tmp_path)
    vllm = config.generation.vllm.model_copy(update={"port": 65535, "num_servers": 2})
    config = config.model_copy(update={"generation": config.generation.model_copy(update={"vllm": vllm})})
    with pytest.raises(UserError, match=r"generation\.vllm\.port=65535: 127\.0\.0\.1 has too few ports"):
        place_servers(config, [Node("127.0.0.1")])


def test_a_node_without_an_address_for_the_others_is_named(monkeypatch):
    told = [((0, "a"), "10.0.0.1", (), None), ((1, "b"), "", (), None)]
    monkeypatch.setattr(placement, "gather_objects", lambda own: told)
    with pytest.raises(UserError, match="the node b has no address towards MASTER_ADDR=127"):
        placement.nodes_of_launch()
    monkeypatch.setattr(placement, "gather_objects", lambda own: told[1:] * 2)
    assert [(node.host, node.first_rank) for node in placement.nodes_of_launch()] == [("127.0.0.1", 0)]


def test_nodes_on_one_host_name_keep_apart_and_loopback_is_told_by_others(monkeypatch):
    """The first node reaches itself by a loopback address; a launcher shows each rank its own GPU only."""
    first = [
        ((0, "a"), "127.0.1.1", ("3",), "3"), ((0, "a"), "127.0.1.1", ("5",), "5"), ((1, "a"), "10.0.0.2", ("3",), "3"),
    ]  # fmt: skip
    answers = [first, [((0, "a"), "10.0.0.1"), ((0, "a"), "10.0.0.1"), ((1, "a"), "10.0.0.2")]]
    monkeypatch.setattr(placement, "gather_objects", lambda own: answers.pop(0))
    assert placement.nodes_of_launch() == [
        Node("10.0.0.1", ("3", "5"), ("3", "5"), 0), Node("10.0.0.2", ("3",), ("3",), 2),
    ]  # fmt: skip


def test_a_first_node_without_an_address_towards_another_is_named_by_every_rank(monkeypatch):
    """The second look may fail on one rank, while the others wait for its address."""

    def address(host):
        if host != "::1":
            raise OSError("Network is unreachable")
        return host

    told = []

    def gather(own):
        told.append(own)
        if len(told) == 1:
            return [(own[0], "::1", (), None), ((1, "b"), "fd00::2", (), None)]
        return [own, ((1, "b"), "fd00::2")]

    monkeypatch.setenv("MASTER_ADDR", "::1")
    monkeypatch.setattr(placement, "local_address", address)
    monkeypatch.setattr(placement, "gather_objects", gather)
    with pytest.raises(UserError, match=r"has no address towards fd00::2, at which the other nodes could reach"):
        placement.nodes_of_launch()
    assert told[0][1] == "::1" and told[1][1] == ""


@pytest.mark.parametrize("path", [path for path in RECIPES if "grpo" in path.stem], ids=lambda path: path.stem)
def test_shipped_configurations_use_each_gpu_once(path, tmp_path, monkeypatch):
    """The servers of a configuration without `offload` are placed on nodes of their own, as `grpo_vllm.sbatch` starts
    them. Without such nodes, the run is refused."""
    config, gpus = read_recipe(path, tmp_path, monkeypatch)
    trainers = planned_nodes(gpus, gpus_per_node=8)
    if config.generation.offload:
        places = place_servers(config, trainers)
    else:
        with pytest.raises(UserError, match=r"0 for servers; set generation\.offload=true"):
            place_servers(config, trainers)
        places = place_servers(config, nodes_of("", ""))
    used = [(place.node, gpu) for place in places for gpu in place.devices]
    assert len(used) == len(set(used)) == 8 * (len(trainers) if config.generation.offload else 2)


def test_the_table_names_node_address_port_and_gpus():
    places = [ServerPlace(0, "10.0.0.1", 8100, ("0", "1")), ServerPlace(1, "10.0.0.2", 8100)]
    assert list(describe_places(places)) == [
        "vLLM's servers: 2 servers",
        "  node  address   port  GPUs",
        "  0     10.0.0.1  8100  0,1",
        "  1     10.0.0.2  8100  none (CPU)",
    ]


def test_tables_of_the_documentation_are_those_of_dry_runs(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "several_nodes.md").read_text()
    eight, _ = read_recipe(LARGE / "grpo_8b_8gpu.yaml", tmp_path, monkeypatch)
    seventy, _ = read_recipe(LARGE / "grpo_70b_64gpu.yaml", tmp_path, monkeypatch)
    tables = [describe_servers(eight, 8), describe_servers(eight, 16)]
    tables.append(describe_places(places_on_hosts(seventy, ["10.0.0.1", "10.0.0.2"], gpus_per_node=8)))
    for lines in tables:
        assert "\n".join(lines) in page
    (warning,) = describe_servers(seventy, 64)
    assert warning.startswith("warning: on 8 nodes of 8 GPUs, this run would be refused: generation.vllm: servers need")
    assert warning.endswith("with 4 on each node, the servers would fit: --dry-run 16x4)")
    monkeypatch.setattr(platform, "gpu_names", lambda: EIGHT)
    assert list(describe_servers(seventy, 64)) == [warning]
    with pytest.raises(UserError, match="servers need GPUs, but 8 nodes with 8 GPUs"):
        list(describe_servers(seventy, 64, per_node=8))


def test_a_dry_run_places_servers_for_the_processes_of_each_node(tmp_path, monkeypatch):
    """Four of eight GPUs train; a total alone counts as full nodes, and is refused only if no other division fits."""
    monkeypatch.setattr(platform, "gpu_names", lambda: EIGHT)
    config = config_with(tmp_path, tensor_parallel_size=4)
    assert list(describe_servers(config, 16, per_node=4)) == [
        "vLLM's servers on 4 nodes of 8 GPUs with 4 processes each: 4 servers",
        "  node  address  port  GPUs",
        *(f"  {node}     node{node}    8100  4,5,6,7" for node in range(4)),
    ]
    (warning,) = describe_servers(config, 16)
    assert warning.startswith("warning: on 2 nodes of 8 GPUs, this run would be refused: generation.vllm: servers need")
    assert warning.endswith("with 4 on each node, the servers would fit: --dry-run 4x4)")
    (_, _, row) = describe_servers(config_with(tmp_path, offload=True, tensor_parallel_size=2), 2, per_node=2)
    assert row.split() == ["0", "127.0.0.1", "8100", "0,1"]
    for offload, size, processes, per_node in ((False, 4, 16, 8), (True, 3, 16, None)):
        with pytest.raises(UserError, match=r"generation\.vllm"):
            list(describe_servers(config_with(tmp_path, offload, tensor_parallel_size=size), processes, per_node))
    assert [node.trained_on for node in planned_nodes(3, 2, processes_per_node=3)] == [("0", "1", "0")]


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_the_command_prints_the_table_or_the_addresses(algorithm, tmp_path, capsys):
    make_model("qwen2", tmp_path / "model")
    config = {
        "output_dir": str(tmp_path / "out"), "model": {"path": str(tmp_path / "model")}, "data": {"train": "d.jsonl"},
        algorithm: {"max_new_tokens": 8}, "generation": {"backend": "vllm", "vllm": {"python": sys.executable}},
    }  # fmt: skip
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    words = [str(tmp_path / "c.yaml"), "--algorithm", algorithm, "--hosts", "10.0.0.1,10.0.0.2", "--gpus-per-node", "1"]
    vllm_servers([*words, "--dry-run"], "mcore-rl vllm-servers")
    assert capsys.readouterr().out.splitlines()[2:] == [
        "  0     10.0.0.1  8100  0", "  1     10.0.0.2  8100  0",
    ]  # fmt: skip
    vllm_servers([*words, "--print-urls"], "mcore-rl vllm-servers")
    assert capsys.readouterr().out == "generation.vllm.urls=[http://10.0.0.1:8100,http://10.0.0.2:8100]\n"
    assert not (tmp_path / "out").exists()


def config_file(tmp_path, **vllm):
    """Write a configuration of GRPO; return its path."""
    config = {
        "output_dir": str(tmp_path / "out"), "model": {"path": str(tmp_path / "model")}, "data": {"train": "d.jsonl"},
        "grpo": {"max_new_tokens": 8}, "generation": {"backend": "vllm", "vllm": {"python": sys.executable, **vllm}},
    }  # fmt: skip
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    return str(tmp_path / "c.yaml")


@pytest.fixture
def ended(tmp_path, monkeypatch, capsys):
    """A function that calls `mcore-rl vllm-servers` with a configuration; return its exit status and its last words."""

    def leave(status):
        raise SystemExit(status)

    def call(*words, **vllm):
        with pytest.raises(SystemExit) as end:
            vllm_servers([config_file(tmp_path, **vllm), *words], "mcore-rl vllm-servers")
        return end.value.code, capsys.readouterr().err.splitlines()[-1:]

    monkeypatch.setattr(entry_point.os, "_exit", leave)
    return call


@pytest.mark.parametrize(
    ("slurm", "words", "message"),
    [
        (
            "2",
            [],
            "the environment variable SLURM_NODEID=2: --hosts names 2 nodes, with the indices 0 to 1; give this ",
        ),
        (
            "x",
            [],
            "the environment variable SLURM_NODEID=x: --hosts names 2 nodes, with the indices 0 to 1; give this ",
        ),
        ("1", ["--node-rank", "2"], "--node-rank 2: --hosts names 2 nodes, with the indices 0 to 1 "),
        ("", [], "--node-rank: is missing; --hosts names 2 nodes"),
    ],
)
def test_a_wrong_index_of_a_node_is_told_with_its_source(slurm, words, message, ended, monkeypatch):
    monkeypatch.setenv("SLURM_NODEID", slurm)
    status, (told,) = ended("--hosts", "10.0.0.1,10.0.0.2", *words)
    assert status == 2 and f"{told} ".startswith(f"error: {message}")


@pytest.mark.parametrize("hosts", ["10.0.0.2", "10.0.0.1,10.0.0.2"])
def test_an_address_of_the_configuration_and_others_of_the_command_are_refused(hosts, ended, tmp_path, capsys):
    status, (told,) = ended("--hosts", hosts, "--print-urls", host="10.0.0.1")
    assert status == 2
    assert told == (
        f"error: generation.vllm.host=10.0.0.1: --hosts gives other addresses to servers ({hosts}); leave one out"
    )
    words = [config_file(tmp_path, host="10.0.0.1"), "--hosts", "10.0.0.1", "--print-urls"]
    vllm_servers(words, "mcore-rl vllm-servers")
    assert capsys.readouterr().out == "generation.vllm.urls=[http://10.0.0.1:8100]\n"


@pytest.mark.parametrize("given", ["::1", "[::1]"])
def test_an_address_of_ipv6_has_brackets_in_urls_alone(given, tmp_path, capsys):
    make_model("qwen2", tmp_path / "model")
    path = config_file(tmp_path)
    words = [path, "--hosts", f"{given},10.0.0.1"]
    vllm_servers([*words, "--print-urls"], "mcore-rl vllm-servers")
    override = capsys.readouterr().out.strip()
    assert override == 'generation.vllm.urls=["http://[::1]:8100",http://10.0.0.1:8100]'
    config = load_for("grpo", path, [override])
    assert config.generation.vllm.urls == ("http://[::1]:8100", "http://10.0.0.1:8100")
    vllm_servers([*words, "--dry-run"], "mcore-rl vllm-servers")
    assert capsys.readouterr().out.splitlines()[2].split()[:3] == ["0", "::1", "8100"]


@pytest.mark.parametrize("found", [0, 2])
def test_gpus_that_torch_does_not_find_are_refused_on_this_node(found, ended, monkeypatch):
    """The GPUs 2 and 3 may be those of another job."""
    monkeypatch.setattr(platform, "gpu_names", lambda: EIGHT[:found])
    for words in ([], ["--hosts", "10.0.0.1"], ["--hosts", "10.0.0.1,10.0.0.2", "--node-rank", "1"]):
        status, (told,) = ended("--gpus-per-node", "4", *words)
        assert status == 2
        assert told.startswith(
            f"error: --gpus-per-node 4: torch finds {'2 GPUs' if found else 'no GPU'} on this node, and other GPUs may "
            f"belong to other jobs; {'give 2 at most' if found else 'leave it out'}"
        )
    if found:
        assert "model.path" in ended("--gpus-per-node", "2")[1][0]  # the check after this one


# ------------------------------------------------------------ servers that end


@pytest.fixture
def service(tmp_path, monkeypatch):
    """Two servers that write down their environment, and do nothing else."""
    record = (
        "import os, sys, time; open(sys.argv[1], 'a').write(os.environ['CUDA_VISIBLE_DEVICES'] + chr(10)); "
        "time.sleep(99)"
    )
    monkeypatch.setattr(
        vllm_server, "server_command", lambda config, place: [sys.executable, "-c", record, tmp_path / str(place.port)]
    )
    first = free_port()
    places = [ServerPlace(0, "127.0.0.1", first, ("4", "5")), ServerPlace(0, "127.0.0.1", free_port(), ("6", "7"))]
    said = []
    with closing(VLLMServerProcesses(config_of(tmp_path), tmp_path / "logs", places, KEY, said.append)) as started:
        yield dataclasses.make_dataclass("Service", ["of", "places", "said", "path"])(started, places, said, tmp_path)


def until(reached):
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def starts(service, index):
    path = service.path / str(service.places[index].port)
    return path.read_text().split() if path.exists() else []


def test_a_server_that_ends_is_started_again_on_its_gpus(service, monkeypatch):
    monkeypatch.setattr(vllm_server, "WATCH_SECONDS", 0.05)
    until(lambda: starts(service, 0) == ["4,5"] and starts(service, 1) == ["6,7"])
    process = service.of._servers[service.places[1].url].process
    os.kill(process.pid, signal.SIGKILL)
    service.of.watch()
    until(lambda: starts(service, 1) == ["6,7", "6,7"])
    url = service.places[1].url
    until(lambda: len(service.said) == 2)
    assert service.said[0].startswith(f"a vLLM server has ended: {url}; it ended with status -9: it printed nothing")
    assert service.said[1] == f"a vLLM server is started again: {url}"
    assert starts(service, 0) == ["4,5"]


def test_a_server_that_ends_again_and_again_is_started_after_pauses(service, monkeypatch):
    until(lambda: starts(service, 0) and starts(service, 1))
    url = service.places[0].url
    for pause in (0.0, 5.0, 30.0):
        service.of.end(url)
        assert service.of.has_ended()
        server = service.of._servers[url]
        if pause:
            server.started -= 1000.0  # the pause counts from its end
            assert service.of.start_ended() == []
            server.ended -= pause
            server.started -= pause
        assert service.of.start_ended() == [url] and not service.of.has_ended()
    server.started -= vllm_server.STABLE_SECONDS
    service.of.end(url)
    assert service.of.start_ended() == [url] and server.starts == 1


def test_a_server_that_cannot_be_started_again_is_tried_after_a_pause(service, monkeypatch):
    until(lambda: starts(service, 0) and starts(service, 1))
    first, second = (place.url for place in service.places)
    service.of.end(first, second)
    failures = [OSError(11, "Resource temporarily unavailable")]
    start = service.of._start

    def fails_once(server):
        if failures:
            raise failures.pop()
        start(server)

    monkeypatch.setattr(service.of, "_start", fails_once)
    assert service.of.start_ended() == [second]
    assert service.said[0] == (
        f"a vLLM server cannot be started again: {first}; [Errno 11] Resource temporarily unavailable"
    )
    service.of._servers[first].ended -= 5.0
    assert service.of.start_ended() == [first]


HEALTH = """\
import os, sys
from http.server import HTTPServer
sys.path.insert(0, "{support}")
from signed_handler import SignedHandler
class Handler(SignedHandler):
    def do_GET(self):
        self.send_response({status}); self.send_header("Content-Length", "0"); self.end_headers()
        open("{path}/asked", "w").write(str(os.getpid()))
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.mark.parametrize(
    ("number", "health", "status"), [(signal.SIGTERM, 200, 143), (signal.SIGTERM, 503, 143), (signal.SIGINT, 200, 130)]
)
def test_the_command_ends_its_servers_and_tells_the_signal_by_its_status(number, health, status, tmp_path):
    """Also while it waits for a server that is not ready (503)."""
    make_model("qwen2", tmp_path / "model")
    (tmp_path / "health.py").write_text(HEALTH.format(status=health, path=tmp_path, support=SUPPORT))
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/health.py "$@"\n')
    (tmp_path / "python").chmod(0o755)
    path = config_file(tmp_path, python=str(tmp_path / "python"), port=free_port())
    program = ForkedProgram(["-m", "mcore_rl", "vllm-servers", path], ENVIRONMENT, cwd=ROOT)
    try:
        until(lambda: (tmp_path / "asked").exists() and (tmp_path / "asked").read_text())
        program.send_signal(number)
        program.communicate(30)
        assert program.returncode == status
        assert not psutil.pid_exists(int((tmp_path / "asked").read_text()))
    finally:
        program.kill()


def test_a_dropped_server_is_ended_unless_it_was_started_again_since(service):
    until(lambda: starts(service, 0) and starts(service, 1))
    first, second = (place.url for place in service.places)
    service.of.mark_used([first, second, "http://elsewhere:1"])
    service.of.end(first)
    service.of.start_ended()
    service.of.end_used([first, second, "http://elsewhere:1"])
    processes = [service.of._servers[url].process for url in (first, second)]
    assert processes[0] is not None and processes[0].poll() is None and processes[1] is None
    service.of.mark_used([first])
    service.of.end_used([first])
    assert service.of._servers[first].process is None

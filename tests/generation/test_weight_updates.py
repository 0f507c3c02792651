"""Tests of weight updates of servers, which stand-ins play, by several senders: whole and by differences."""

import errno
import json
import os
import secrets
import signal
import threading
import time
import zlib
from concurrent.futures import wait
from subprocess import PIPE, Popen
from types import SimpleNamespace

import pytest
import torch
from programs import run
from safetensors.torch import load_file
from small_models import and_long
from stand_in_vllm import calls, digest_of, serving, wait_for
from vision_cases import make_model as make_vision_model
from vllm_cases import root as root

from mcore_rl.config import GRPOConfig, load_config
from mcore_rl.errors import TrainingError
from mcore_rl.models.refit.host_copy import path_of_shared
from mcore_rl.testing.layout_check import ParallelLayout
from mcore_rl.testing.processes import run_processes

UPDATES = 12


def change(policy, step):
    """Change no, few or all elements of each weight that is trained, equally on all ranks that have it."""
    from mcore_rl.models.megatron.weights.conversion import named_mappings

    with torch.no_grad():
        for mapping, tensor in named_mappings(policy.model):
            if not tensor.requires_grad:
                continue
            seed = zlib.crc32(f"{mapping.megatron} {step}".encode())
            generator = torch.Generator().manual_seed(seed)
            where = torch.rand(tensor.shape, generator=generator) < (0, 0.01, 0.2, 1)[seed % 4]
            tensor += (torch.randn(tensor.shape, generator=generator) * 0.05 * where).to(tensor.dtype)


def follow(config, updates, waits=False):
    """Send several versions; return each version's digest, the servers that have it, the bytes and what was said.

    Args:
        waits: wait before each update until all servers answer, also those that have died and start again.
    """
    from mcore_rl.models.generation.sampling import SamplingParams
    from mcore_rl.models.generation.vllm import weights as vllm_weights
    from mcore_rl.models.generation.vllm.generation import VLLMGeneration
    from mcore_rl.models.megatron.weights.conversion import export_hf_weights
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    vllm_weights.BUCKET_BYTES = 20_000  # less than some weights have, which cannot be divided
    policy, said = MegatronPolicy(config), []
    generation = VLLMGeneration(config, policy, SamplingParams(4), None, said.append)
    results = []
    for step in range(updates):
        change(policy, step)
        for url in config.generation.vllm.urls if waits else ():
            wait_for(url)
        generation.prepare_for_generation(weight_version=step)
        sent = generation._weights.bytes_sent
        weights = dict(export_hf_weights(policy.model, first_only=True))
        results.append((digest_of(weights), generation.servers, sent, sum(x.nbytes for x in weights.values())))
    generation.close()
    policy.shutdown()
    return results, said


def digests(log):
    """Return the digests of the weights that a stand-in has had."""
    return [path.split("=")[1] for _, path in calls(log) if path.startswith("digest=")]


def config_of(root, model, urls, delta, layout=None, *more):
    options = [urls, f"model.path={root / model}", "model.dtype=bfloat16", *more]
    if delta:
        options.append("generation.vllm.weight_updates=delta")
    config = load_config(GRPOConfig, root / "grpo.yaml", options)
    return config if layout is None else layout.apply(config)


ALL = ParallelLayout(tp=2, pp=2, dp=1, ep=2, etp=1, sp=True)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("model", "layout", "delta"),
    and_long(
        [],
        [("mixture", ALL, True), ("dense", ParallelLayout(tp=2, pp=2), False)],
        [("mixture", ParallelLayout(tp=2, ep=2, etp=1, sp=True), True)],
    ),
    ids=str,
)
def test_servers_have_the_trainers_weights_after_every_update(model, layout, delta, root, tmp_path):
    with serving(root / model, tmp_path, ["--digests"], ["--digests"]) as (urls, _, logs):
        config = config_of(root, model, urls, delta, layout)
        outcomes = run_processes(follow, config, 5, world_size=layout.world_size, timeout=200)
    results, said = outcomes[0]
    assert said == [] and all(len(servers) == 2 for _, servers, _, _ in results)
    for log in logs:
        assert digests(log) == [digest for digest, *_ in results]
    sent = [sum(of_rank[step][2] for of_rank, _ in outcomes) for step in range(5)]
    whole = results[0][3]
    if delta:
        assert all(bytes_ < 0.75 * whole for bytes_ in sent[1:])
    else:
        assert sent == [whole] * 5


TWICE = ParallelLayout(tp=2, pp=1, dp=2, sp=True)
WAYS = {
    "all by collectives": ([], []),
    "one on another host": (None, []),
    "passed on by ranks that do not send": ([2, 3], [3]),  # ranks 0 and 1 send
    "from one sender, and passed on for the other": ([1, 2], None),
}


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("way", "delta"),
    and_long(
        [],
        LONG := [("one on another host", False), ("passed on by ranks that do not send", True)],
        [(way, delta) for way in WAYS for delta in (False, True) if (way, delta) not in LONG],
    ),
    ids=str,
)
def test_weights_are_the_same_on_every_way(way, delta, root, tmp_path):
    """The stand-ins map buckets of ranks whose memory they can read, and receive others by collectives."""
    sees = [[] if ranks is None else ["--sees", *ranks] for ranks in WAYS[way]]
    with serving(root / "dense", tmp_path, *(["--digests", *ranks] for ranks in sees)) as (urls, _, logs):
        config = config_of(root, "dense", urls, delta, TWICE)
        outcomes = run_processes(follow, config, 3, world_size=4, timeout=200)
    results, said = outcomes[0]
    assert said == []
    for log, ranks in zip(logs, WAYS[way], strict=True):
        assert digests(log) == [digest for digest, *_ in results]
        mapped = [path for _, path in calls(log)].count("map")
        assert (mapped == 0) == (ranks == []), mapped


@pytest.mark.parametrize("delta", and_long([], [False], [True]), ids=["whole", "differences"])
def test_a_server_that_dies_while_it_maps_a_bucket_harms_nobody(delta, root, tmp_path):
    """The other server has every version. No block of shared memory is left."""
    dies = ["--digests", "--die", "map", 3, tmp_path / "died"]
    with serving(root / "dense", tmp_path, ["--digests"], dies) as (urls, processes, logs):
        config = config_of(root, "dense", urls, delta, ParallelLayout(tp=2, sp=True))
        outcomes = run_processes(follow, config, 4, world_size=2, timeout=200)
        assert processes[1].wait(10) == -signal.SIGKILL
    results, said = outcomes[0]
    assert len([line for line in said if "a vLLM server is dropped" in line]) == 1, said
    assert digests(logs[0]) == [digest for digest, *_ in results]
    assert digests(logs[1]) == digests(logs[0])[: len(digests(logs[1]))]
    blocks = {path.split("=")[1] for log in logs for _, path in calls(log) if path.startswith("block=")}
    assert blocks and not [name for name in blocks if path_of_shared(name).exists()]


def with_little_memory(config, has_room):
    from mcore_rl.models.generation.vllm import weights as vllm_weights
    from mcore_rl.models.refit import shared_block

    def no_block(*arguments):
        raise FileNotFoundError("/dev/shm")

    if has_room:  # of two senders, with two buckets of 20,000 bytes or more each
        vllm_weights.free_shared_memory = lambda: 40_000
    else:
        shared_block.SharedBlock = no_block
    return follow(config, 2)


@pytest.mark.long
@pytest.mark.parametrize("has_room", [True, pytest.param(False, marks=pytest.mark.exhaustive)], ids=["little", "none"])
def test_servers_get_weights_by_collectives_if_shared_memory_has_no_room(has_room, root, tmp_path):
    with serving(root / "dense", tmp_path, ["--digests"]) as (urls, _, logs):
        config = config_of(root, "dense", urls, False, ParallelLayout(tp=2, sp=True))
        results, said = run_processes(with_little_memory, config, has_room, world_size=2, timeout=200)[0]
    assert digests(logs[0]) == [digest for digest, *_ in results]
    assert [path for _, path in calls(logs[0])].count("map") == 0
    told = ["weights are sent to servers on the nodes of ranks [0, 1] by collectives, because"] * has_room
    assert len(said) == len(told) and all(line.startswith(start) for line, start in zip(said, told, strict=True))


def with_room_before_copies(config, name):
    """Shared memory has room for the buckets only as long as there is no copy of a server."""
    from mcore_rl.models.generation.vllm import weights as vllm_weights

    def free():
        copy = path_of_shared(f"mcore_rl_{name}")
        return 100_000 - (copy.stat().st_size if copy.exists() else 0)

    vllm_weights.secrets = SimpleNamespace(token_hex=lambda _: name)
    vllm_weights.free_shared_memory = free
    return follow(config, 2)


@pytest.mark.long
def test_shared_memory_is_measured_when_servers_have_their_copies(root, tmp_path):
    with serving(root / "dense", tmp_path, ["--digests"]) as (urls, _, logs):
        config = config_of(root, "dense", urls, True)
        ((results, said),) = run_processes(
            with_room_before_copies, config, secrets.token_hex(8), world_size=1, timeout=200
        )
    assert digests(logs[0]) == [digest for digest, *_ in results]
    assert [path for _, path in calls(logs[0])].count("map") == 0
    assert len(said) == 1 and said[0].startswith("weights are sent to servers on the nodes of ranks [0] by collectives")


def without_room_for_buckets(config, at):
    """One rank has no room for buckets; return what this rank raises, the seconds until then, and for each server that
    was invited whether it has ended its request."""
    from mcore_rl.models.generation.vllm.weights import VLLMWeights

    allocate, dismiss, ended = os.posix_fallocate, VLLMWeights._dismiss, []

    def dismissed(weights):
        asked = [future for _, future in weights._invited.values()]
        dismiss(weights)
        wait(asked, 20)
        ended.extend(future.done() for future in asked)

    VLLMWeights._dismiss = dismissed

    def refused(file, start, size):
        if size > 1000:  # not a probe
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(file, start, size)

    if torch.distributed.get_rank() == at:
        os.posix_fallocate = refused
    start = time.monotonic()
    try:
        follow(config, 2)
    except TrainingError as error:
        return str(error), time.monotonic() - start, ended
    return "nothing", 0, ended


@pytest.mark.long
@pytest.mark.parametrize("at", [0, 1])
def test_no_rank_waits_for_one_without_room_for_buckets(at, root, tmp_path):
    """Neither does the server, to which the run says that it ends."""
    with serving(root / "dense", tmp_path, ["--digests"]) as (urls, _, logs):
        config = config_of(root, "dense", urls, True, ParallelLayout(tp=2, sp=True))
        outcomes = run_processes(without_room_for_buckets, config, at, world_size=2, timeout=200)
        assert [path for _, path in calls(logs[0])].count("/update_weights") == 0
    for rank, (told, seconds, ended) in enumerate(outcomes):
        assert ended == [True] * (rank == 0), "otherwise the first rank would wait for it as it exits"
        assert told.startswith("a bucket of weights needs") and seconds < config.parallel.timeout_seconds / 2
        assert "/dev/shm" in told and told.endswith("give a container more by --shm-size or --ipc=host")


CLOSED = """
import threading, time, torch
from types import SimpleNamespace
from mcore_rl import platform

platform.initialize_platform()
from mcore_rl.models.generation.vllm import weights
from mcore_rl.models.refit.transfer import BucketMemory, BucketSender, RefitGroups

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
weights.plan_shipments = lambda *_: []
config = SimpleNamespace(generation=SimpleNamespace(vllm=SimpleNamespace(weight_updates="whole")))
sending = weights.VLLMWeights(config, SimpleNamespace(model=None), None, None, 5, True)
sending._memory = BucketMemory(shares=True, on_host=True)
begun, closed, tensor = threading.Event(), threading.Event(), torch.ones(2**22)

def tensors():
    yield 0, tensor
    print(sending._memory.handle, flush=True)
    begun.set()
    closed.wait()
    for number in range(1, 5):
        yield number, tensor

sender = BucketSender(RefitGroups({}), memory=sending._memory)
work = sending._sending.submit(sender.filled, tensors(), 5 * tensor.nbytes)
begun.wait()
start = time.monotonic()
sending.close()
assert time.monotonic() - start < 5
closed.set()
assert isinstance(work.exception(), RuntimeError), "the next bucket is refused"
"""


def test_weights_can_be_closed_while_a_thread_fills_a_bucket(tmp_path):
    """The process ends well, and leaves nothing in /dev/shm."""
    (tmp_path / "close.py").write_text(CLOSED)
    closed = run(tmp_path / "close.py")
    assert closed.stderr_text == ""
    assert not path_of_shared(json.loads(closed.stdout_text)["shared_memory"]).exists()


class Restarting:
    """Starts a server again, with the same options, whenever it has died."""

    def __init__(self, processes):
        self.processes, self.starts = processes, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join(60)

    def _watch(self):
        while not self._ended.wait(0.05):
            for number, process in enumerate(self.processes):
                if process.poll() is not None:
                    self.processes[number] = Popen(process.args, stderr=PIPE, text=True)
                    self.starts += 1


@pytest.mark.long
def test_servers_that_die_or_lose_their_version_get_all_weights(root, tmp_path):
    """Twelve updates of a mixture at TP2 × PP2 × EP2; each server that answers has each version bit for bit."""
    forgets = ["--digests", "--forget", "5", "9"]
    dies = ["--digests"]
    for path, call in (("/update_weights", 2), ("/update_weights", 3), ("/pause?mode=keep&clear_cache=true", 4)):
        dies += ["--die", path, call, tmp_path / f"died_{call}"]
    with (
        serving(root / "mixture", tmp_path, forgets, dies) as (urls, processes, logs),
        Restarting(processes) as restarting,
    ):
        config = config_of(root, "mixture", urls, True, ALL)
        outcomes = run_processes(follow, config, UPDATES, True, world_size=ALL.world_size, timeout=280)
    results, said = outcomes[0]
    assert restarting.starts == 3 and len([line for line in said if "answers again" in line]) == 3, said
    expected = [digest for digest, *_ in results]
    assert digests(logs[0]) == expected, "the one that only forgot its version"
    received = digests(logs[1])
    had = [digest for digest, servers, *_ in results if len(servers) == 2]
    assert received == had and 5 <= len(had) < UPDATES
    sent = [sum(of_rank[step][2] for of_rank, _ in outcomes) for step in range(UPDATES)]
    whole = results[0][3]
    again = {step for step in range(1, UPDATES) if sent[step] > whole}
    assert len(again) >= 3, "after each restart or lost version, of which some may coincide"


@pytest.mark.exhaustive
@pytest.mark.parametrize("delta", [False, True], ids=["whole", "differences"])
def test_a_frozen_tower_is_sent_to_each_server_once(delta, root, tmp_path):
    """Also to a server that was started again. All servers have all weights bit for bit after each update."""
    path = make_vision_model("qwen3_vl", tmp_path / "model")
    dies = ["--digests", "--die", "/update_weights", 3, tmp_path / "died"]
    with (
        serving(path, tmp_path, ["--digests"], dies) as (urls, processes, logs),
        Restarting(processes) as restarting,
    ):
        config = config_of(root, path, urls, delta, ParallelLayout(tp=2, pp=2), "data.max_sequence_length=60")
        outcomes = run_processes(follow, config, 10, True, world_size=4, timeout=200)
    results, said = outcomes[0]
    assert restarting.starts == 1 and any("answers again" in line for line in said), said
    assert digests(logs[0]) == [digest for digest, *_ in results]
    had = [digest for digest, servers, *_ in results if len(servers) == 2]
    assert digests(logs[1]) == had and len(had) >= 3
    tower = sum(x.nbytes for name, x in load_file(path / "model.safetensors").items() if ".visual." in name) // 2
    sent = [sum(of_rank[step][2] for of_rank, _ in outcomes) for step in range(10)]
    whole = results[0][3]
    if delta:
        assert all(bytes_ < 0.75 * (whole - tower) for bytes_ in (sent[1], sent[-1]))
    else:
        assert sent[0] == whole and sorted(set(sent)) == [whole - tower, whole, 2 * whole - tower]
        assert sent.count(2 * whole - tower) == 1

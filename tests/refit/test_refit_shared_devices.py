"""Tests of a policy and an engine on the same devices: a block of weights on each, and memory that is released."""

import errno
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from layout_cases import make_config, make_data
from small_models import and_long
from torch.multiprocessing import reductions
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from mcore_rl import platform
from mcore_rl.algorithms.build_loss import build_loss
from mcore_rl.errors import TrainingError
from mcore_rl.models.refit.host_copy import path_of_shared
from mcore_rl.models.refit.shared_block import (
    NO_PROBE,
    Probe,
    SharedBlock,
    decode_handle,
    encode_handle,
    open_block,
    sees_probe,
)
from mcore_rl.models.refit.transfer import BucketMemory, RefitReceiver
from mcore_rl.testing.layout_check import ParallelLayout
from mcore_rl.testing.processes import run_processes

BUCKET_BYTES = 20_000


def take_on(config, devices):
    """Each process is an engine's too, on the device of this name: what its receiver gets, and what an export gives."""
    from mcore_rl.distributed.collectives import broadcast_object
    from mcore_rl.models.megatron.weights.conversion import export_hf_weights
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    platform.device_id = lambda of=None: devices[torch.distributed.get_rank()]
    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2)
    policy.train(make_data(), build_loss(config))
    taken, own, blocks = {}, [], []
    receiver = RefitReceiver(lambda tensors: taken.update((n, t.clone()) for n, t in tensors), {})
    for keys in policy.prepare_weights_for_ipc(BUCKET_BYTES):
        handles = policy.get_weights_ipc_handles(keys)
        own.append(sorted(handles))
        handles = broadcast_object(handles)
        blocks.append(len({handle["shared_memory"] for handle in handles.values()}))
        receiver.update_weights_from_ipc_handles(handles)
        torch.distributed.barrier()
    try:
        receiver.update_weights_from_ipc_handles({})
    except ValueError as error:
        told = str(error)
    policy.sender.release()
    exported = dict(export_hf_weights(policy.model))
    policy.shutdown()
    return taken, exported, own, blocks, told


DEVICES = and_long(
    [(ParallelLayout(tp=2, sp=True), "AB")],
    [(ParallelLayout(tp=2, pp=2), "AABC"), (ParallelLayout(pp=2, dp=2), "ABCD"), (ParallelLayout(), "A")],
)


@pytest.mark.parametrize(("layout", "devices"), DEVICES, ids=str)
def test_every_device_has_a_block_of_its_own(layout, devices, model_of):
    config = layout.apply(make_config(model_of("llama")))
    results = run_processes(take_on, config, devices, world_size=layout.world_size)
    for rank, (taken, exported, own, blocks, told) in enumerate(results):
        assert taken.keys() == exported.keys()
        assert all(torch.equal(taken[name], tensor) for name, tensor in exported.items())
        holds = [devices[rank]] if devices.index(devices[rank]) == rank else []
        assert own == [holds if rank else sorted(set(devices))] * len(own) and len(own) > 2
        assert blocks == [len(set(devices))] * len(blocks)
        assert told == (
            f"update_weights_from_ipc_handles: no handle is for this process's device {devices[rank]}; "
            "pass the handles of the first rank"
        )


SENDER = """
import multiprocessing, os, signal, sys, torch
from mcore_rl import platform
from mcore_rl.models.refit.transfer import RefitReceiver, SharedBucket

platform.initialize_platform()
tensor = torch.arange(1000) / 7
bucket = SharedBucket({"weight": (tuple(tensor.shape), tensor.dtype)})
bucket.write("weight", tensor)
handles = {platform.device_id(): bucket.handle()}

def take():
    taken = {}
    receiver = RefitReceiver(lambda tensors: taken.update((n, t.clone()) for n, t in tensors), {})
    receiver.update_weights_from_ipc_handles(handles)
    os._exit(0 if torch.equal(taken["weight"], tensor) else 1)

processes = [multiprocessing.get_context("fork").Process(target=take) for _ in range(2)]
for process in processes:
    process.start()
for process in processes:
    process.join(60)
assert [process.exitcode for process in processes] == [0, 0]
print(bucket.handle()["shared_memory"], flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
bucket.release()
"""


@pytest.mark.parametrize("end", ["released", "killed"])
def test_a_block_belongs_to_its_creator_alone(end):
    """Receivers share the sender's tracker of such blocks: it must neither write errors, nor leave the block behind."""
    sender = subprocess.run([sys.executable, "-c", SENDER, end], capture_output=True, text=True, timeout=120)
    name = sender.stdout.strip()
    assert name and not path_of_shared(name).exists()
    assert "KeyError" not in sender.stderr
    if end == "released":
        assert (sender.returncode, sender.stderr) == (0, "")


FILLER = """
import threading, torch
from mcore_rl import platform

platform.initialize_platform()
from mcore_rl.models.refit.transfer import BucketMemory

memory, tensor = BucketMemory(shares=True, on_host=True), torch.ones(2**22)
begun, closed, refused = threading.Event(), threading.Event(), []

def fill():
    bucket = memory.take(tensor.nbytes).view(torch.float32)
    print(memory.handle, flush=True)
    begun.set()
    while not closed.is_set():
        bucket.copy_(tensor)
    bucket.copy_(tensor)
    assert torch.equal(bucket, tensor)
    for use in (lambda: memory.take(1), lambda: memory.handle):
        try:
            use()
        except RuntimeError as error:
            refused.append(str(error))

filling = threading.Thread(target=fill)
filling.start()
begun.wait()
memory.close()
closed.set()
filling.join()
assert refused == ["the memory of buckets is closed"] * 2
"""


@pytest.mark.long
def test_memory_that_a_thread_fills_stays_valid_after_it_is_closed():
    """Its name is gone at once, and no new block is created."""
    filler = subprocess.run([sys.executable, "-c", FILLER], capture_output=True, text=True, timeout=120)
    assert (filler.returncode, filler.stderr) == (0, "")
    assert not path_of_shared(json.loads(filler.stdout)["shared_memory"]).exists()


def test_a_released_block_frees_its_memory_with_its_last_tensor():
    block = SharedBlock(2**20, on_host=True)
    path, view = path_of_shared(block.handle["shared_memory"]), block.buffer[:8].view(torch.long)
    view.fill_(7)
    block.release()
    assert not path.exists() and view.tolist() == [7] and str(path) in Path("/proc/self/maps").read_text()
    del view
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_a_block_is_opened_under_the_number_that_the_device_has_here(monkeypatch):
    """The handle is JSON on its way; the arguments of PyTorch's function arrive as they were."""
    told = {
        "tensor_size": torch.Size([64]), "tensor_stride": (1,), "tensor_offset": 0, "storage_handle": b"\x00\xff!",
        "storage_size_bytes": 512, "storage_offset_bytes": 128, "requires_grad": False, "ref_counter_handle": b"",
        "ref_counter_offset": 3, "event_handle": bytes(range(64)), "event_sync_required": True,
    }  # fmt: skip

    def rebuild(**arguments):
        return arguments

    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild)
    opened = open_block(decode_handle(encode_handle({"cuda": told})), torch.device("cuda", 3))
    assert set(opened) == set(inspect.signature(rebuild_cuda_tensor).parameters)
    assert (opened.pop("storage_device"), opened.pop("dtype")) == (3, torch.uint8)
    assert (opened.pop("tensor_cls"), opened.pop("storage_cls")) == (torch.Tensor, torch.UntypedStorage)
    assert opened == told


def test_a_probe_is_seen_only_where_its_block_can_be_read():
    probe = Probe(on_host=True)
    told = probe.told()
    assert sees_probe(told, torch.device("cpu"))
    assert not sees_probe({**told, "bytes": "00" * 16}, torch.device("cpu")), "another block of the same name"
    assert not sees_probe({**told, "device": "GPU-another"}, torch.device("cpu"))
    assert not sees_probe(NO_PROBE, torch.device("cpu"))
    probe.release()
    assert not sees_probe(told, torch.device("cpu"))


def test_too_little_memory_for_a_bucket_is_told(monkeypatch):
    """The memory can be used later, if there is room again."""
    memory = BucketMemory(shares=True, on_host=True)
    assert memory.take(4096).numel() == 4096

    def allocate(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", allocate)
        with pytest.raises(TrainingError, match=r"needs 0.0012 GB .*/dev/shm.*No space left.*--shm-size or --ipc=host"):
            memory.reserve(1_200_000)
    memory.reserve(1_200_000)
    handles = {memory.take(size) is None or memory.handle for size in (1_200_000, 5, 1_000_000)}
    assert len(handles) == 2, "no bucket of these sizes needs new memory"
    memory.close()


def count_what_is_given_back(config):
    """At each call: bytes of the weights', the optimizer's and the gradients' storages."""
    from mcore_rl.models.megatron.training.optimizer import gradient_buffers, optimizer_tensors
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy, held = MegatronPolicy(config, total_steps=10, rows_per_unit=2), []
    policy.train(make_data(), build_loss(config))
    weights, gradients = list(policy.parameters()), gradient_buffers(policy.chunks)
    kinds = (weights, optimizer_tensors(policy.optimizer, weights), gradients)

    def empty_cache():
        held.append([sum(tensor.untyped_storage().nbytes() for tensor in kind) > 0 for kind in kinds])

    torch.cuda.empty_cache = empty_cache
    counts = []
    for call in (policy.offload_before_refit, policy.offload_after_refit, policy.offload_after_refit):
        call()
        counts.append((len(held), held[-1]))
    policy.prepare_for_training()
    policy.shutdown()
    return counts


def test_memory_goes_back_to_the_device_once_it_is_free(model_of):
    """After storages are emptied, not before; and not again when nothing was freed."""
    ((first, second, third),) = run_processes(count_what_is_given_back, make_config(model_of("llama")), world_size=1)
    assert first[1] == [True, False, False] and first[0] >= 1
    assert second[1] == [False] * 3 and second[0] > first[0]
    assert third[0] == second[0]

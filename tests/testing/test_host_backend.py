"""Tests of the backend `host` against gloo and plain arithmetic; the CPU takes the place of a GPU (`host_copying`)."""

import subprocess
import sys
import time
import weakref
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from small_models import and_long

from mcore_rl import platform
from mcore_rl.errors import UserError, WorkerError
from mcore_rl.testing.host_backend import COPYING, NAME
from mcore_rl.testing.processes import Start, run_cases, run_processes

BACKENDS = [NAME, COPYING]
SHAPES = [(5,), (2, 3), (), (0, 3)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8]


def values(rank, shape=(4, 3), dtype=torch.float32):
    """Return a rank's tensor: small whole numbers, whose sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 9, shape, generator=generator).to(dtype)


def gapped(tensor):
    """Return a tensor with the same values that is not contiguous, if it has several rows and columns."""
    return tensor.repeat_interleave(2, -1)[..., ::2] if tensor.dim() else tensor


def everyone(*args, **options):
    return [values(rank, *args, **options) for rank in range(dist.get_world_size())]


def equal(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def same(one, other, op):
    """Like `equal`, but averages of floating-point numbers may differ by rounding: gloo chooses the order of sums."""
    if op != dist.ReduceOp.AVG or not one.is_floating_point():
        return equal(one, other)
    limit = 2 * torch.finfo(one.dtype).eps
    return one.dtype == other.dtype and torch.allclose(one.double(), other.double(), rtol=limit, atol=limit)


def reductions(dtype):
    """Yield the operator, and the same reduction of stacked tensors [ranks, …] in plain arithmetic."""
    count = dist.get_world_size()
    yield dist.ReduceOp.SUM, lambda stacked: stacked.sum(0, dtype=dtype)
    yield dist.ReduceOp.MAX, lambda stacked: stacked.amax(0)
    yield dist.ReduceOp.MIN, lambda stacked: stacked.amin(0)
    if dtype.is_floating_point:
        yield dist.ReduceOp.AVG, lambda stacked: (stacked / count).sum(0, dtype=dtype)
    else:
        yield dist.ReduceOp.AVG, lambda stacked: stacked.sum(0, dtype=dtype) // count


# ------------------------------------------------------------ cases, which run on each rank


def check_reductions():
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in DTYPES:
        for op, reduce in reductions(dtype):
            for shape in SHAPES:
                wanted = reduce(torch.stack(everyone(shape, dtype)))
                tensor = gapped(values(rank, shape, dtype))
                dist.all_reduce(tensor, op)
                assert same(tensor, wanted, op), (dtype, op, shape)

                tensor = values(rank, shape, dtype)
                dist.reduce(tensor, size - 1, op)
                assert same(tensor, wanted if rank == size - 1 else values(rank, shape, dtype), op), (dtype, op, shape)

                parts = torch.stack([torch.stack(everyone((size, *shape), dtype))[:, part] for part in range(size)])
                tensor, output = gapped(values(rank, (size, *shape), dtype)), torch.empty(shape, dtype=dtype)
                before = tensor.clone()
                dist.reduce_scatter_tensor(output.view(1, *shape), tensor, op)
                assert same(output, reduce(parts[rank]), op) and torch.equal(tensor, before), (dtype, op, shape)

                output = torch.empty(shape, dtype=dtype)
                dist.reduce_scatter(output, list(tensor.unbind()), op)
                assert same(output, reduce(parts[rank]), op), (dtype, op, shape)

    large = torch.full((3,), 60000.0, dtype=torch.float16)  # a sum would overflow
    dist.all_reduce(large, dist.ReduceOp.AVG)
    assert torch.isfinite(large).all()


def check_moves():
    """Operations that move tensors, also of dtypes that gloo does not support."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in [*DTYPES, torch.int16, torch.bool, torch.float8_e4m3fn]:
        for shape in SHAPES:
            wanted = everyone(shape, dtype)
            tensor = gapped(values(rank, shape, dtype)) if dtype != torch.float8_e4m3fn else wanted[rank]

            moved = tensor.clone()
            dist.broadcast(moved, size - 1)
            assert equal(moved.byte(), wanted[-1].byte())

            outputs = [torch.empty(shape, dtype=dtype) for _ in range(size)]
            dist.all_gather(outputs, tensor)
            assert all(equal(one.byte(), other.byte()) for one, other in zip(outputs, wanted, strict=True))

            output = torch.empty((size, *shape), dtype=dtype)
            dist.all_gather_into_tensor(output, tensor[None])
            assert equal(output.byte(), torch.stack([one.byte() for one in wanted]))

            outputs = [torch.empty(shape, dtype=dtype) for _ in range(size)]
            dist.gather(tensor, outputs if rank == 1 else None, dst=1)
            if rank == 1:
                assert all(equal(one.byte(), other.byte()) for one, other in zip(outputs, wanted, strict=True))

            output = torch.empty(shape, dtype=dtype)
            dist.scatter(output, wanted if rank == 1 else None, src=1)
            assert equal(output.byte(), tensor.byte())


def check_unequal_sizes():
    rank, size = dist.get_rank(), dist.get_world_size()
    shapes = [(source, 3) for source in range(size)]  # rank 0 has nothing

    outputs = [torch.empty(shape) for shape in shapes]
    dist.all_gather(outputs, gapped(values(rank, shapes[rank])))
    assert all(equal(output, values(source, shapes[source])) for source, output in enumerate(outputs))

    output = torch.empty(shapes[rank])
    dist.reduce_scatter(output, [values(10 * rank + to, shape) for to, shape in enumerate(shapes)])
    assert equal(output, sum(values(10 * source + rank, shapes[rank]) for source in range(size)))

    rows = [[(source + 2 * to) % 3 for to in range(size)] for source in range(size)]
    sent, received = rows[rank], [rows[source][rank] for source in range(size)]

    def parts(source):
        return values(source, (sum(rows[source]), 2)).split(rows[source])

    wanted = torch.cat([parts(source)[rank] for source in range(size)])
    for as_sizes in (list, torch.tensor):
        output, tensor = torch.empty(sum(received), 2), gapped(values(rank, (sum(sent), 2)))
        dist.all_to_all_single(output, tensor, output_split_sizes=as_sizes(received), input_split_sizes=as_sizes(sent))
        assert equal(output, wanted)

    outputs = [torch.empty(count, 2) for count in received]
    dist.all_to_all(outputs, [gapped(part) for part in parts(rank)])
    assert equal(torch.cat(outputs), wanted)

    output = torch.empty(2 * size, 3)
    dist.all_to_all_single(output, values(rank, (2 * size, 3)))
    assert equal(output, torch.cat([values(source, (2 * size, 3))[2 * rank :][:2] for source in range(size)]))


def check_messages():
    """All ranks send to both neighbours before they receive. The tensors do not fit in the buffers of sockets."""
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    large = (1024, 1024)
    from_before, from_after = torch.zeros(large), torch.zeros(large)
    operations = [
        dist.P2POp(dist.isend, values(rank, large), after),
        dist.P2POp(dist.isend, gapped(values(rank + 50, large)), before),
        dist.P2POp(dist.irecv, from_after, after),
        dist.P2POp(dist.irecv, from_before, before),
    ]
    if size == 2:  # two messages to the same rank: they arrive in the order in which they were sent
        operations[2:] = operations[:1:-1]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert equal(from_before, values(before, large)) and equal(from_after, values(after + 50, large))

    if rank == 0:
        sources = set()
        for _ in range(size - 1):
            box = torch.zeros(2, dtype=torch.int64)
            sources.add(dist.recv(box))
            assert box.tolist()[0] in sources
        assert sources == set(range(1, size))
    else:
        dist.send(torch.tensor([rank, 7]), 0)
    dist.barrier()

    if rank == 0:  # the work of this message is deleted at once
        dist.isend(values(3), 1)
    if rank == 1:
        box = torch.zeros(4, 3)
        time.sleep(0.1)
        dist.recv(box, 0)
        assert equal(box, values(3))

    arrays = [np.full((4, 3), number, dtype=np.float32) for number in range(20 if rank < 2 else 0)]
    memory, deadline = [weakref.ref(array) for array in arrays], time.monotonic() + 20
    while arrays:  # nobody waits for these messages, and yet their memory is freed
        array = arrays.pop()
        if rank == 0:
            dist.isend(torch.from_numpy(array), 1)
        else:
            box = torch.zeros(4, 3)
            dist.recv(box, 0)
            assert equal(box, torch.from_numpy(array))
        del array
    while any(array() is not None for array in memory):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def check_works_in_any_order():
    """Several operations run at once; their results appear by `wait`, which need not be called in order."""
    rank, size = dist.get_rank(), dist.get_world_size()
    reduced, gathered, sent = values(rank), torch.zeros(4 * size, 3), values(rank)
    works = [
        dist.all_reduce(reduced, async_op=True),
        dist.all_gather_into_tensor(gathered, sent, async_op=True),
        dist.barrier(async_op=True),
    ]
    if dist.get_backend() == COPYING:
        sent.zero_()  # as on a GPU, later work may overwrite the input
    for work in reversed(works):
        assert work.wait()
    total, whole = sum(everyone()), torch.cat(everyone())
    assert equal(reduced, total) and equal(gathered, whole)
    reduced.fill_(-1)
    for work in works:  # a second wait copies nothing
        work.wait()
        assert work.is_completed()
    assert (reduced == -1).all()

    leaf = values(rank).requires_grad_()
    work, version = dist.all_reduce(leaf, async_op=True), leaf._version
    (result,) = work.get_future().wait()
    assert equal(result.detach(), total) and equal(leaf.detach(), total)
    assert leaf._version == version  # autograd does not see the write, as with NCCL

    polled = values(rank)
    work, deadline = dist.all_reduce(polled, async_op=True), time.monotonic() + 20
    while not work.is_completed():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert equal(polled, total)


def check_results_appear_by_wait():
    rank, size = dist.get_rank(), dist.get_world_size()
    outputs = {"reduced": values(rank), "gathered": torch.zeros(4 * size, 3), "received": torch.zeros(4, 3)}
    before = {name: tensor.clone() for name, tensor in outputs.items()}
    works = {
        "reduced": dist.all_reduce(outputs["reduced"], async_op=True),
        "gathered": dist.all_gather_into_tensor(outputs["gathered"], values(rank), async_op=True),
        "received": dist.irecv(outputs["received"], (rank - 1) % size),
    }
    sending = dist.isend(values(rank), (rank + 1) % size)
    sending.wait()
    dist.barrier()
    time.sleep(0.2)  # gloo has all results by now
    assert all(torch.equal(outputs[name], before[name]) for name in outputs)
    for work in works.values():
        work.wait()
    assert equal(outputs["reduced"], sum(everyone()))
    assert equal(outputs["gathered"], torch.cat(everyone()))
    assert equal(outputs["received"], values((rank - 1) % size))


def check_coalesced():
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    for options in ({}, {"device": device}):
        for async_ops in (False, True):
            one, two = values(rank), values(rank + 20)
            gathered, scattered = torch.zeros(4 * size, 3), [torch.zeros(1, 3), torch.zeros(1, 3)]
            with dist._coalescing_manager(async_ops=async_ops, **options) as works:
                dist.all_reduce(one)
                dist.all_reduce(two)
            works.wait() if async_ops else None
            assert equal(one, sum(everyone())) and equal(two, sum(values(r + 20) for r in range(size)))
            with dist._coalescing_manager(async_ops=async_ops, **options) as works:
                dist.all_gather_into_tensor(gathered, values(rank))
            works.wait() if async_ops else None
            assert equal(gathered, torch.cat(everyone()))
            with dist._coalescing_manager(async_ops=async_ops, **options) as works:
                for output, seed in zip(scattered, (0, 20), strict=True):
                    dist.reduce_scatter_tensor(output, values(rank + seed, (size, 3)))
            works.wait() if async_ops else None
            for output, seed in zip(scattered, (0, 20), strict=True):
                assert equal(output, sum(values(r + seed, (size, 3)) for r in range(size))[rank : rank + 1])
    with dist._coalescing_manager(device=device, async_ops=True) as works:  # messages between the two calls
        box = torch.zeros(4, 3)
        dist.isend(values(rank), (rank + 1) % size)
        dist.irecv(box, (rank - 1) % size)
    works.wait()
    assert equal(box, values((rank - 1) % size))


def check_groups_and_objects():
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group([0, size - 1], timeout=timedelta(seconds=30))
    assert dist.get_backend() == (dist.get_backend(group) if rank in (0, size - 1) else dist.get_backend())
    if rank in (0, size - 1):
        tensor = values(rank)
        dist.all_reduce(tensor, group=group)
        assert equal(tensor, values(0) + values(size - 1))
        found = [None, None]
        dist.all_gather_object(found, {"rank": rank}, group=group)
        assert found == [{"rank": 0}, {"rank": size - 1}]
    box = [("a", 1)] if rank == 0 else [None]
    dist.broadcast_object_list(box, src=0)
    assert box == [("a", 1)]
    found = [None] * size if rank == 1 else None
    dist.gather_object(rank, found, dst=1)
    assert found == (list(range(size)) if rank == 1 else None)


CASES = [
    check_reductions,
    check_moves,
    check_unequal_sizes,
    check_messages,
    check_works_in_any_order,
    check_coalesced,
    check_groups_and_objects,
]


@pytest.mark.parametrize(
    ("backend", "world_size"), and_long([(NAME, 2), (COPYING, 2), (COPYING, 3)], [(NAME, 3), (NAME, 4), (COPYING, 4)])
)
def test_operations_equal_plain_arithmetic(backend, world_size):
    cases = [(case,) for case in CASES]
    if backend == COPYING:
        cases.append((check_results_appear_by_wait,))
    run_cases(cases, world_size=world_size, timeout=60, start=Start(backend=backend))


def check_alone():
    """World size 1: every operation copies its input."""
    tensor = values(0)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    output = torch.zeros(4, 3)
    dist.all_gather_into_tensor(output, tensor)
    scattered = torch.zeros(4, 3)
    dist.reduce_scatter_tensor(scattered, output)
    exchanged = torch.zeros(4, 3)
    dist.all_to_all_single(exchanged, scattered)
    assert equal(exchanged, values(0))
    dist.barrier()
    return dist.get_backend()


@pytest.mark.parametrize("backend", BACKENDS)
def test_operations_of_one_rank_copy_their_input(backend):
    assert run_processes(check_alone, world_size=1, timeout=60, start=Start(backend=backend)) == [backend]


def sums_in_bfloat16():
    """Sums of two ranks' random numbers by gloo and by this backend, in bfloat16."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    tensor = torch.randn(10_000, generator=generator).bfloat16()
    dist.all_reduce(tensor)
    return tensor


def test_sums_in_bfloat16_are_rounded_once():
    parts = [torch.randn(10_000, generator=torch.Generator().manual_seed(rank)).bfloat16() for rank in range(2)]
    wanted = (parts[0].double() + parts[1].double()).bfloat16()
    for backend in ("gloo", COPYING):
        for found in run_processes(sums_in_bfloat16, world_size=2, timeout=60, start=Start(backend=backend)):
            assert torch.equal(found, wanted), backend


def fail_or_wait(seconds):
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    dist.all_reduce(torch.ones(1), group=group)
    if dist.get_rank() == 1:
        raise ValueError("rank 1 fails")
    started = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        raise RuntimeError(f"ended within the limit: {time.monotonic() - started < 10 * seconds}, {error}") from None
    raise AssertionError("the operation has ended without rank 1")


def test_ranks_end_after_the_failure_of_another():
    with pytest.raises(WorkerError, match=r"rank 0: [\s\S]*ended within the limit: True") as caught:
        run_processes(fail_or_wait, 1, world_size=2, timeout=60, start=Start(backend=COPYING))
    assert "rank 1: " in str(caught.value) and "ValueError: rank 1 fails" in str(caught.value)


ENDS = """
import sys, threading, time
from datetime import timedelta
import torch
from mcore_rl.testing import host_backend
host_backend.SECONDS_AT_EXIT = 0.5
store, groups = torch.distributed.HashStore(), {}
def join(rank):
    groups[rank] = host_backend.HostGroup(store, rank, 2, timedelta(seconds=60))
threads = [threading.Thread(target=join, args=[rank]) for rank in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
for tag in range(2): groups[0].send([torch.ones(9)], 1, tag)
print("ends", flush=True)
"""


def test_process_ends_although_a_message_is_never_received():
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=40, check=False)
    assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr


def refuse_sizes():
    with pytest.raises(ValueError, match=r"all_to_all: 3 rows cannot be divided into \[1, 1\] for 2 ranks"):
        dist.all_to_all_single(torch.zeros(3), torch.zeros(3))


def test_rows_that_cannot_be_divided_are_refused():
    run_processes(refuse_sizes, world_size=2, timeout=60, start=Start(backend=NAME))


# ------------------------------------------------------------ the choice of the backend


@pytest.mark.parametrize(
    ("environment", "gpus", "processes"),
    [
        ({"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}, 1, 2),
        ({"LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "3"}, 4, 8),
        ({"LOCAL_RANK": "1"}, 1, 2),
    ],
)
def test_more_processes_than_gpus_are_refused(environment, gpus, processes, monkeypatch):
    pretend_gpus(environment, gpus, monkeypatch)
    plural = "s" * (gpus > 1)
    message = (
        f"{processes} processes on this node, but torch sees {gpus} GPU{plural}: NCCL needs a GPU for each process; "
        f"start {gpus}, or set parallel.backend=host for a test in which processes share GPUs"
    )
    with pytest.raises(UserError) as caught:
        platform.initialize_process_group(timedelta(seconds=5))
    assert str(caught.value) == message
    assert platform.backend("host") == "host" and "host" in dist.Backend.backend_list


def pretend_gpus(environment, gpus, monkeypatch):
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)


@pytest.mark.parametrize(
    ("environment", "gpus"),
    [({"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}, 2), ({"WORLD_SIZE": "8", "LOCAL_RANK": "0"}, 1), ({}, 1)],
)
def test_nccl_is_chosen_if_each_process_has_a_gpu(environment, gpus, monkeypatch):
    """A launcher that shows each process only its own GPU gives it the local rank 0, and no number of processes."""
    pretend_gpus(environment, gpus, monkeypatch)
    assert platform.backend() == "nccl"


def test_ranks_without_a_gpu_of_their_own_share(monkeypatch):
    pretend_gpus({"LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8"}, 2, monkeypatch)
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(platform, "_installed", False)
    monkeypatch.setattr(platform, "te_problem", lambda: None)
    platform.initialize_platform()
    assert chosen == [1]

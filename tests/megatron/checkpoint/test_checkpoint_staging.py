"""Tests of staging: the state is copied to the host while training continues, and written as it was at the start of the
save."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from layout_cases import make_config, make_data

from mcore_rl.algorithms.build_loss import build_loss
from mcore_rl.models.megatron.checkpoint.save import HostStaging
from mcore_rl.testing.layout_check import ParallelLayout
from mcore_rl.testing.processes import run_processes
from mcore_rl.utils import shard_process
from mcore_rl.utils.shard_process import ShardProcess


def test_copies_are_what_was_there():
    staging = HostStaging()
    tensors = [
        torch.randn(3, 5, dtype=torch.float64)[:, 1:4].t(), torch.tensor(7), torch.empty(0, 4),
        torch.randn(33).bfloat16(), torch.arange(5, dtype=torch.int8), torch.tensor([True, False]),
    ]  # fmt: skip
    before = [tensor.clone() for tensor in tensors]
    places = staging.add(tensors[:2]) + staging.add(tensors[2:])  # the second call enlarges the block
    staging.settle()
    for tensor in tensors:
        tensor.zero_()
    assert staging.is_done
    for place, original in zip(places, before, strict=True):
        assert torch.equal(staging.read(place, like=original), original)
    block = staging._block.data_ptr()
    staging.clear()
    staging.add(before[:2])
    staging.settle()
    assert staging._block.data_ptr() == block, "the block is kept"


def saved_while_training(config, directory):
    """Copies that take two steps, as they might from a device; then ones that are never there."""
    from mcore_rl.models.megatron.checkpoint.save import SaveError
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy, data, loss_fn = MegatronPolicy(config, total_steps=10, rows_per_unit=2), make_data(), build_loss(config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostStaging, "is_done", False)
        policy.train(data, loss_fn)
        expected = policy.get_logprobs(data)["logprobs"]
        assert policy.save_checkpoint(directory, 1, {}, wait=False) is None
        policy.train(data, loss_fn)
        assert policy.checkpoint.finish(wait=False) is None
        assert not policy.checkpoint.pending._writer._is_submitted, "handed over before the copies are there"
        after_two = policy.train(data, loss_fn)
        patch.setattr(HostStaging, "is_done", True)
        saved = policy.checkpoint.finish()
        patch.setattr(HostStaging, "is_done", False)
        policy.save_checkpoint(directory, 2, {}, wait=False)
        policy.checkpoint.pending._writer._deadline = time.monotonic() - 1
        with pytest.raises(SaveError, match=r"longer than checkpoint\.timeout_seconds"):
            policy.checkpoint.finish()
    policy.load_checkpoint(saved)
    assert torch.equal(policy.get_logprobs(data)["logprobs"], expected)
    policy.train(data, loss_fn)
    again = policy.train(data, loss_fn)
    policy.shutdown()
    return after_two["loss"], again["loss"], sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("layout", [ParallelLayout(), ParallelLayout(tp=2)], ids=str)
def test_what_is_written_is_the_state_at_its_beginning(layout, model_of, tmp_path):
    config = layout.apply(make_config(model_of("llama")))
    for first, again, names in run_processes(saved_while_training, config, tmp_path, world_size=layout.world_size):
        assert first == again
        assert [name for name in names if name.startswith("iter_")] == ["iter_0000001"]


def fails_to_start(config, directory):
    """On the last rank, once the copies are there."""
    from mcore_rl.models.megatron.checkpoint.save import SaveError
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2)

    def cannot_start():
        raise OSError(12, "Cannot allocate memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostStaging, "is_done", False)
        policy.save_checkpoint(directory, 1, {}, wait=False)
        patch.setattr(HostStaging, "is_done", True)
        if policy.rank == 1:
            policy.checkpoint.pending._writer._process.start = cannot_start
        with pytest.raises(SaveError, match=r"rank 1: OSError: .*Cannot allocate memory"):
            policy.checkpoint.finish()
    policy.shutdown()


def test_a_process_that_cannot_be_started_is_a_failed_save_on_all_ranks(model_of, tmp_path):
    run_processes(fails_to_start, ParallelLayout(tp=2).apply(make_config(model_of("llama"))), tmp_path, world_size=2)
    assert not list(tmp_path.iterdir()), "what was written of it is left behind"


def fails_to_begin(config, directory):
    """On the last rank, once; returns the names of the checkpoints on disk after another save."""
    from mcore_rl.models.megatron.checkpoint.save import SaveError
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2)

    def no_memory(self, size):
        raise OSError(12, "Cannot allocate memory")

    with pytest.MonkeyPatch.context() as patch:
        if policy.rank == 1:
            patch.setattr(HostStaging, "_allocate", no_memory)
        with pytest.raises(SaveError, match=r"rank 1: OSError: .*Cannot allocate memory"):
            policy.save_checkpoint(directory, 1, {}, wait=False)
    policy.save_checkpoint(directory, 2, {})
    policy.shutdown()
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.long
def test_save_after_one_that_could_not_begin_on_a_rank_succeeds(model_of, tmp_path):
    config = ParallelLayout(tp=2).apply(make_config(model_of("llama")))
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"timeout_seconds": 20.0})})
    for names in run_processes(fails_to_begin, config, tmp_path, world_size=2):
        assert names == ["iter_0000002", "latest_checkpointed_iteration.txt"]


def process_that_writes(config, directory):
    """Return the pid of the writer process, and the modules that it has imported after a save."""
    import forked_writer
    from modules_job import ModulesJob

    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    shard_process.launch = forked_writer.LAUNCH
    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2)
    policy.save_checkpoint(directory, 1, {})
    process = policy.checkpoint._staging.process
    first = process.pid
    process.submit(ModulesJob(str(directory / "modules")), policy.checkpoint._staging.descriptor)
    while (report := process.poll()) is None:
        time.sleep(0.05)
    assert report.error is None, report.error
    policy.save_checkpoint(directory, 2, {})
    assert process.pid == first, "one process serves all saves"
    policy.shutdown()
    return first, (directory / "modules").read_text().split()


@pytest.mark.long
def test_the_process_that_writes_is_not_a_fork_of_its_trainer(model_of, tmp_path, monkeypatch):
    """It has no Megatron, and it does not outlive the trainer."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "support"), prepend=os.pathsep)
    config = make_config(model_of("llama"))
    ((pid, modules),) = run_processes(process_that_writes, config, tmp_path, world_size=1)
    assert "torch" in modules and not [name for name in modules if name.startswith(("megatron", "transformers"))]
    deadline = time.monotonic() + 10
    while is_alive(pid):
        assert time.monotonic() < deadline, "the writing process outlives its trainer"
        time.sleep(0.05)


def is_alive(pid):
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


TRAINER = """
import time
from mcore_rl.utils.shard_process import ShardProcess
process = ShardProcess()
process.start()
print(process.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    "seconds",
    [pytest.param(0, id="while it starts"), pytest.param(6, id="while it waits", marks=pytest.mark.long)],
)
def test_the_process_that_writes_dies_with_a_trainer_that_is_killed(seconds):
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER], stdout=subprocess.PIPE, text=True)
    pid = int(trainer.stdout.readline())
    time.sleep(seconds)
    os.kill(pid, signal.SIGTERM)  # Slurm sends it to all processes of a job
    time.sleep(0.5)
    assert is_alive(pid)
    trainer.kill()
    trainer.wait()
    deadline = time.monotonic() + 15
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


class HungProcess:
    """A process in a call to a hung file system: a signal has no effect before the call returns."""

    returncode, pid = None, 0

    def kill(self):
        pass

    def poll(self):
        return None

    def wait(self, timeout=None):
        assert timeout is not None, "the wait has no limit"
        raise subprocess.TimeoutExpired("writer", timeout)


def test_hung_process_that_writes_is_replaced():
    process = ShardProcess()
    process._process = HungProcess()
    process.kill()
    process.start()
    assert process.pid
    process.kill()


def reserved_before_first_save(config, directory):
    """Return the size of the block before and after the first save, and the addresses of both."""
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2)
    staging = policy.checkpoint._staging
    policy.checkpoint.reserve()
    policy.train(make_data(), build_loss(config))
    staging.settle()
    before = len(staging._block), staging._block.data_ptr()
    policy.save_checkpoint(directory, 1, {})
    after = len(staging._block), staging._block.data_ptr()
    policy.shutdown()
    return before, after


@pytest.mark.parametrize(
    "layout", [ParallelLayout(), pytest.param(ParallelLayout(tp=2), marks=pytest.mark.long)], ids=str
)
def test_memory_of_first_save_is_allocated_before(layout, model_of, tmp_path):
    config = layout.apply(make_config(model_of("llama")))
    for before, after in run_processes(reserved_before_first_save, config, tmp_path, world_size=layout.world_size):
        assert before == after and before[0] > 0


def saved_twice(config, directory):
    """Return the sizes of the block after each of two synchronous saves, and the checkpoints."""
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, 10, rows_per_unit=2)
    sizes = []
    for step in (1, 2):
        policy.train(make_data(), build_loss(config))
        policy.save_checkpoint(directory, step, {"step": step})
        staging = policy.checkpoint._staging
        sizes.append((len(staging._block), os.fstat(staging.descriptor).st_size))
    damages = [policy.checkpoint.verify(path) for path in sorted(directory.glob("iter_*"))]
    policy.shutdown()
    return sizes, damages


@pytest.mark.parametrize("asynchronous", [False, pytest.param(True, marks=pytest.mark.long)], ids=["", "asynchronous"])
def test_without_asynchronous_saves_the_memory_is_given_back(asynchronous, model_of, tmp_path):
    config = make_config(model_of("llama"))
    config = config.model_copy(
        update={"checkpoint": config.checkpoint.model_copy(update={"asynchronous": asynchronous})}
    )
    ((sizes, damages),) = run_processes(saved_twice, config, tmp_path, world_size=1)
    assert damages == [[], []] and all((block > 0) == (file > 0) == asynchronous for block, file in sizes)

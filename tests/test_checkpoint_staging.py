"""What is on a device is copied to the host while training goes on, and written as it was when saving began."""

import time

import pytest
import torch
from test_layout_check import make_config, make_data

from mcore_rl.algorithms.build_loss import loss_of
from mcore_rl.models.megatron.checkpoint.host_staging import HostStaging
from mcore_rl.testing.layout_check import Layout
from mcore_rl.testing.processes import run_processes


def test_copies_are_what_was_there():
    staging = HostStaging()
    tensors = [
        torch.randn(3, 5, dtype=torch.float64)[:, 1:4].t(), torch.tensor(7), torch.empty(0, 4),
        torch.randn(33).bfloat16(), torch.arange(5, dtype=torch.int8), torch.tensor([True, False]),
    ]  # fmt: skip
    before = [tensor.clone() for tensor in tensors]
    copies = staging.copy(tensors)
    for tensor in tensors:
        tensor.zero_()
    assert staging.is_done
    for copy, original in zip(copies, before, strict=True):
        assert copy.dtype == original.dtype and torch.equal(copy, original)
    place = copies[0].data_ptr()
    assert staging.copy(before[:2])[0].data_ptr() == place, "the block is kept"


def stage(storage, staging):
    """As of tensors on a device."""
    items, tensors = zip(*storage.tensors, strict=True)
    storage.tensors = list(zip(items, staging.copy(tensors), strict=True))


def saved_while_training(config, directory):
    """Copies that take two steps, as they might from a device; then ones that are never there."""
    from mcore_rl.models.megatron.checkpoint import writer
    from mcore_rl.models.megatron.checkpoint.writer import SaveError
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy, data, loss_fn = MegatronPolicy(config, total_steps=10, rows_per_unit=2), make_data(), loss_of(config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer.OneFileWriter, "stage", stage)
        patch.setattr(HostStaging, "is_done", False)
        policy.train(data, loss_fn)
        expected = policy.get_logprobs(data)["logprobs"]
        assert policy.save_checkpoint(directory, 1, {}, wait=False) is None
        policy.train(data, loss_fn)
        assert policy.checkpoint.finish(wait=False) is None
        assert policy.checkpoint.pending._writer._process.pid is None, "forked before the copies are there"
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


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)], ids=str)
def test_what_is_written_is_the_state_at_its_beginning(layout, model_of, tmp_path):
    config = layout.apply(make_config(model_of("llama")))
    for first, again, names in run_processes(saved_while_training, config, tmp_path, world_size=layout.world_size):
        assert first == again
        assert [name for name in names if name.startswith("iter_")] == ["iter_0000001"]


def fails_to_fork(config, directory):
    """On the last rank, once the copies are there."""
    from mcore_rl.models.megatron.checkpoint import writer
    from mcore_rl.models.megatron.checkpoint.writer import SaveError
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2)

    def cannot_start():
        raise OSError(12, "Cannot allocate memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer.OneFileWriter, "stage", stage)
        patch.setattr(HostStaging, "is_done", False)
        policy.save_checkpoint(directory, 1, {}, wait=False)
        patch.setattr(HostStaging, "is_done", True)
        if policy.rank == 1:
            policy.checkpoint.pending._writer._process.start = cannot_start
        with pytest.raises(SaveError, match=r"rank 1: OSError: .*Cannot allocate memory"):
            policy.checkpoint.finish()
    policy.shutdown()


def test_a_process_that_cannot_be_started_is_a_failed_save_on_all_ranks(model_of, tmp_path):
    run_processes(fails_to_fork, Layout(tp=2).apply(make_config(model_of("llama"))), tmp_path, world_size=2)

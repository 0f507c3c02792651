"""Tests of `optimizer.offload`: moments and fp32 weights are on the host except during the step; numbers are
unchanged."""

import pytest
import torch
from layout_cases import STEPS, make_config, make_data
from simulated_cases import SEQUENCES, config_of, in_processes
from small_models import and_long
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_rl.config import LoRAConfig
from mcore_rl.simulation.step import simulate_rank
from mcore_rl.testing.layout_check import ParallelLayout, compute_layout_result
from mcore_rl.testing.processes import run_processes


def offloading(config, offload=True):
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"offload": offload})})


def changed(config, **model):
    return config.model_copy(update={"model": config.model.model_copy(update=model)})


CASES = and_long(
    [("llama", ParallelLayout(dp=2), "bfloat16")],
    [
        ("llama", ParallelLayout(), "float32"),
        ("deep", ParallelLayout(pp=2, vpp=2, stages="E|t*3|tt|tL"), "bfloat16"),
        ("mixtral", ParallelLayout(dp=2, ep=2), "bfloat16"),
        ("llama", ParallelLayout(tp=2, sp=True), "adapters"),
    ],
)


@pytest.mark.parametrize(("family", "layout", "kind"), CASES, ids=str)
def test_numbers_stay(family, layout, kind, model_of):
    model = {"lora": LoRAConfig(rank=4)} if kind == "adapters" else {"dtype": kind}
    config = changed(layout.apply(make_config(model_of(family))), **model)
    kept, moved = (
        run_processes(
            compute_layout_result, offloading(config, offload), make_data(), STEPS, world_size=layout.world_size
        )[0]
        for offload in (False, True)
    )
    assert kept.metrics == moved.metrics
    for name, weight in kept.weights.items():
        assert torch.equal(weight, moved.weights[name]), name


class Allocations(TorchDispatchMode):
    """Counts the tensors of at least one byte that are allocated inside the context without contents."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        result = function(*arguments, **(named or {}))
        self.count += function.overloadpacket is torch.ops.aten.empty and result.nbytes > 0
        return result


def counts_of_steps(config, data):
    """Return for each of several calls: bytes that leave the device between steps, host buffers, releases of the cache.

    The calls are four training steps; loading a checkpoint; another step; and `offload_before_refit`.
    """
    from mcore_rl import platform
    from mcore_rl.algorithms.build_loss import build_loss
    from mcore_rl.models.megatron.training.optimizer import Offload
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2)
    allocations, releases, freed, offload = Allocations(), [], [], Offload.offload

    def counted(self, tensors):
        with allocations:
            size = offload(self, tensors)
        freed.append(size if self is policy.memory.between_steps else 0)
        return size

    def counts_of(call, *arguments):
        releases.clear(), freed.clear()
        allocations.count = 0
        call(*arguments)
        return sum(freed), allocations.count, len(releases)

    Offload.offload, platform.release_cached_memory = counted, lambda: releases.append(None)
    train = policy.train, data, build_loss(config)
    counts = [counts_of(*train) for _ in range(4)]
    iteration = policy.save_checkpoint(config.output_dir, 4, {"step": 4})
    counts.append(counts_of(policy.load_checkpoint, iteration))
    counts.append(counts_of(*train))
    counts.append(counts_of(policy.offload_before_refit))
    policy.shutdown()
    return counts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_allocate_no_buffers_and_keep_the_cache(dtype, model_of, tmp_path):
    """Moments exist from the first step on; an engine gets the cached memory, of the optimizer's state too."""
    config = changed(make_config(model_of("llama")), dtype=dtype).model_copy(update={"output_dir": tmp_path})
    (counts,) = run_processes(counts_of_steps, offloading(config), make_data(), world_size=1)
    first, *later, loaded, after_loading, for_engine = counts
    size, buffers, _ = first
    assert size > 0 and buffers > 0
    assert later == [(size, 0, 0)] * 3
    assert loaded[::2] == after_loading[::2] == (size, 0)
    assert after_loading[1] == 0
    assert for_engine[:2] == (0, 0) and for_engine[2] > 0


def life(config, data):
    """Return the bytes of optimizer state on the device at each point of a run that is saved, continues, and
    restores."""
    from mcore_rl.algorithms.build_loss import build_loss
    from mcore_rl.models.megatron.training.optimizer import optimizer_tensors
    from mcore_rl.models.policy import megatron_policy
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2)
    sizes, losses, step = [], [], megatron_policy.clip_gradients

    def held():
        tensors = optimizer_tensors(policy.optimizer, policy.parameters())
        sizes.append(sum(tensor.untyped_storage().nbytes() for tensor in tensors))

    def seen(*arguments):
        held()
        return step(*arguments)

    def train():
        losses.append(policy.train(data, build_loss(config))["loss"])
        held()

    held()
    megatron_policy.clip_gradients = seen
    train(), train()
    iteration = policy.save_checkpoint(config.output_dir, 2, {"step": 2})
    held()
    train()
    policy.finish_training()  # for an engine, meanwhile
    policy.offload_after_refit()
    policy.prepare_for_training()
    train()
    policy.load_checkpoint(iteration)
    held()
    train(), train()
    policy.shutdown()
    return sizes, losses


@pytest.mark.long
def test_state_is_away_but_in_the_step(model_of, tmp_path):
    config = changed(ParallelLayout(dp=2).apply(make_config(model_of("llama"))), dtype="bfloat16")
    runs = {}
    for offload in (False, True):
        of_run = config.model_copy(update={"output_dir": tmp_path / str(offload)})
        runs[offload] = run_processes(life, offloading(of_run, offload), make_data(), world_size=2)
    for (kept, losses), (moved, same_losses) in zip(runs[False], runs[True], strict=True):
        assert losses == same_losses
        assert losses[2:4] == losses[4:6], "what was saved is what training went on with"
        in_steps = [1, 3, 6, 8, 11, 13]
        assert all(moved[place] == kept[place] > 0 for place in in_steps)
        assert not any(size for place, size in enumerate(moved) if place not in in_steps)
        assert all(size > 0 for size in kept)


@pytest.mark.long
def test_the_simulation_counts_it_in_the_step_alone(model_of):
    config = changed(config_of(model_of("llama")), dtype="bfloat16")
    kept, moved = in_processes(
        simulate_rank, *[(offloading(config, offload), 0, 1, SEQUENCES) for offload in (False, True)]
    )
    assert kept.peak_phase == moved.peak_phase == "training"
    assert moved.memory["optimizer"] < 0.01 * kept.memory["optimizer"]
    assert moved.peak == kept.peak - kept.memory["optimizer"] + moved.memory["optimizer"]
    assert moved.memory["activations, workspace"] == kept.memory["activations, workspace"]

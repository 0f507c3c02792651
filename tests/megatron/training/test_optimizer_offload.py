"""Tests of `optimizer.offload`: moments and fp32 weights are on the host except during the step; numbers are
unchanged."""

import pytest
import torch
from layout_cases import STEPS, make_config, make_data
from simulated_cases import SEQUENCES, config_of, in_processes
from small_models import and_long

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

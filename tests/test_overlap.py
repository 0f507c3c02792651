"""Gradients that are reduced while the backward pass goes on: the same numbers, and indeed meanwhile."""

import pytest
import torch
from models import and_long
from test_layouts import STEPS, make_config, make_data

from mcore_rl.config import LoRAConfig
from mcore_rl.distributed.processes import run_processes
from mcore_rl.layout_check import Layout, compare, compute_outcome, table_row

BUCKET_SIZE = 5_000  # parameters: the small models have several buckets


def overlapping(config, **parallel):
    return config.model_copy(update={"parallel": config.parallel.model_copy(update={"overlap_grad_reduce": True})})


def outcome_in_buckets(config, data, steps):
    from mcore_rl.models.megatron import optimizer

    optimizer.BUCKET_SIZE = BUCKET_SIZE
    return compute_outcome(config, data, steps)


CASES = and_long(
    [("llama", Layout(dp=2, tokens_per_pack=128), None)],
    [
        ("qwen2", Layout(dp=2, pp=2, tokens_per_pack=128), None),  # tied embeddings on the pipeline's two ends
        ("qwen2", Layout(dp=2, cp=2), None),
        ("deep", Layout(dp=2, pp=2, vpp=2, stages="E|t*3|tt|tL", tokens_per_pack=128), None),
        ("mixtral", Layout(dp=2, ep=2), None),
        ("llama", Layout(dp=2, tp=2, sp=True), LoRAConfig(rank=4)),
    ],
)


@pytest.mark.parametrize(("family", "layout", "lora"), CASES, ids=str)
def test_numbers_stay(family, layout, lora, model_of):
    config = layout.apply(make_config(model_of(family)))
    config = config.model_copy(update={"model": config.model.model_copy(update={"lora": lora})})
    arguments = (outcome_in_buckets, make_data(), STEPS)
    one, other = (
        run_processes(arguments[0], c, *arguments[1:], world_size=layout.world_size)[0]
        for c in (config, overlapping(config))
    )
    difference = compare(other, one)
    assert difference.within(), table_row(layout, difference)
    assert one.metrics["loss"] == other.metrics["loss"]
    if layout.world_size == 2 * layout.tp * layout.pp:  # the sum of two is the same in any order
        for name, gradient in one.gradients.items():
            assert torch.equal(gradient, other.gradients[name]), name


def order_of_events(config, data):
    """What happens in the second step of a rank: gradients that are there, buckets that are reduced, the end."""
    from mcore_rl.algorithms.objectives import loss_of
    from mcore_rl.models.megatron import optimizer
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    optimizer.BUCKET_SIZE = BUCKET_SIZE
    policy, events = MegatronPolicy(config, total_steps=10, rows_per_unit=2), []
    (chunk,) = policy.chunks
    policy.train(data, loss_of(config))  # Megatron learns here which gradients to wait for
    for number, group in enumerate(chunk.bucket_groups):
        begin, wait = group.start_grad_sync, group.finish_grad_sync

        def begun(*arguments, number=number, begin=begin, **options):
            events.append(("begun", number))
            return begin(*arguments, **options)

        def waited(*arguments, number=number, wait=wait, **options):
            events.append(("waited", number))
            return wait(*arguments, **options)

        group.start_grad_sync, group.finish_grad_sync = begun, waited
    microbatches = len(policy._microbatches(data, rows_per_unit=2))
    policy.train(data, loss_of(config))
    policy.shutdown()
    return events, len(chunk.bucket_groups), microbatches


@pytest.mark.parametrize("overlaps", [True, False])
def test_buckets_are_reduced_before_the_end(model_of, overlaps):
    config = Layout(dp=2, tokens_per_pack=128).apply(make_config(model_of("llama")))
    config = overlapping(config) if overlaps else config
    for events, groups, microbatches in run_processes(order_of_events, config, make_data(), world_size=2):
        assert microbatches > 1
        begun = [number for what, number in events if what == "begun"]
        assert sorted(begun) == list(range(groups)), "each once, in the last microbatch"
        first_wait = [what for what, _ in events].index("waited")
        assert first_wait == (groups if overlaps else 0)
        assert groups > 2 if overlaps else groups == 1

"""Tests that training by the backend `host`, with the CPU in the place of a GPU, is bit-equal to training over gloo."""

import pytest
import torch
from layout_cases import make_config, make_data
from small_models import and_long

from mcore_rl.config.parallel import ParallelLayout
from mcore_rl.testing.host_backend import COPYING
from mcore_rl.testing.layout_check import compute_layout_result
from mcore_rl.testing.processes import Start, run_cases

STEPS = 2
TP2, PP2, CP2, DP2 = (ParallelLayout(**sizes) for sizes in ({"tp": 2, "sp": True}, {"pp": 2}, {"cp": 2}, {"dp": 2}))
EP2, WITHIN_EXPERTS = ParallelLayout(dp=2, ep=2), ParallelLayout(tp=2, ep=2, etp=1, sp=True)
PIPELINE = ParallelLayout(pp=2, vpp=3)
OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}


def result_of(config):
    backend = torch.distributed.get_backend()
    return backend, compute_layout_result(config, make_data(), STEPS)


@pytest.mark.long
@pytest.mark.parametrize(
    "cases",
    and_long(
        [[("llama", TP2, {}), ("qwen3_moe", EP2, {}), ("llama", DP2, OVERLAPS)]],
        [
            [("llama", PP2, {}), ("llama", CP2, {}), ("llama", DP2, {})],
            [("qwen3_moe", WITHIN_EXPERTS, {}), ("deep", PIPELINE, {}), ("qwen3_moe", EP2, OVERLAPS)],
        ],
    ),
    ids=lambda cases: ", ".join(f"{family} {layout}" for family, layout, _ in cases),
)
def test_training_is_bit_equal_to_gloo(cases, model_of):
    calls = []
    for family, layout, parallel in cases:
        config = layout.apply(make_config(model_of(family)))
        calls.append((result_of, config.model_copy(update={"parallel": config.parallel.model_copy(update=parallel)})))
    by_gloo, by_host = (
        run_cases(calls, world_size=2, timeout=120, start=Start(backend=backend)) for backend in ("gloo", COPYING)
    )
    for case, ((backend, expected), _), ((own, found), _) in zip(cases, by_gloo, by_host, strict=True):
        assert (backend, own) == ("gloo", COPYING)
        assert found.steps == expected.steps and torch.equal(found.scores, expected.scores), case
        for ours, theirs in ((found.gradients, expected.gradients), (found.weights, expected.weights)):
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items()), case

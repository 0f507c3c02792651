"""Tests of the learning rates of every schedule, step by step, against those of transformers."""

from types import SimpleNamespace

import pytest
import torch
from transformers.optimization import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_inverse_sqrt_schedule,
    get_linear_schedule_with_warmup,
    get_wsd_schedule,
)

from mcore_rl.config import OptimizerConfig
from mcore_rl.models.megatron.training.optimizer import build_scheduler

LR, STEPS = 3e-4, 23


def ours(**options):
    """The learning rate of each update."""
    optimizer = SimpleNamespace(param_groups=[{"params": [], "wd_mult": 1.0}])
    scheduler = build_scheduler(optimizer, OptimizerConfig(lr=LR, **options), STEPS)
    rates = []
    for _ in range(STEPS):
        scheduler.step(1)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def theirs(schedule, **options):
    """The same; their update n is made with the rate after n − 1 ticks, ours with that after n."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=LR)
    scheduler = schedule(optimizer, **options)
    rates = []
    for _ in range(STEPS):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


WARM, ALL = {"num_warmup_steps": 5}, {"num_warmup_steps": 5, "num_training_steps": STEPS}


@pytest.mark.parametrize(
    ("options", "schedule", "of_theirs"),
    [
        ({"schedule": "constant"}, get_constant_schedule_with_warmup, WARM),
        ({"schedule": "linear"}, get_linear_schedule_with_warmup, ALL),
        ({"schedule": "cosine"}, get_cosine_schedule_with_warmup, ALL),
        ({"schedule": "inverse_square_root"}, get_inverse_sqrt_schedule, WARM),
        (
            {"schedule": "wsd", "decay_ratio": 0.3},
            get_wsd_schedule,
            {**ALL, "num_decay_steps": 7, "decay_type": "linear"},
        ),
        (
            {"schedule": "wsd", "decay_ratio": 0.3, "decay_shape": "cosine"},
            get_wsd_schedule,
            {**ALL, "num_decay_steps": 7, "decay_type": "cosine"},
        ),
        (
            {"schedule": "wsd", "decay_ratio": 0.3, "decay_shape": "minus_sqrt"},
            get_wsd_schedule,
            {**ALL, "num_decay_steps": 7, "decay_type": "1-sqrt"},
        ),
    ],
    ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) and "schedule" in x else "",
)
@pytest.mark.parametrize("warmup", [{"warmup_steps": 5}, {"warmup_ratio": 5 / 23}], ids=["steps", "ratio"])
def test_as_transformers(options, schedule, of_theirs, warmup):
    assert ours(**options, **warmup) == pytest.approx(theirs(schedule, **of_theirs), rel=1e-12, abs=1e-18)


def test_a_floor_and_the_ends():
    assert ours(schedule="wsd", decay_shape="exponential", decay_ratio=0.5, min_lr=1e-5)[-1] == pytest.approx(1e-5)
    assert min(ours(schedule="inverse_square_root", warmup_steps=1, min_lr=2e-4)) == 2e-4
    assert ours(schedule="wsd", decay_ratio=1e-9)[-2:] == [LR, 0.0]
    assert ours(warmup_steps=1000)[-2:] == [LR * 22 / 22, 0.0]

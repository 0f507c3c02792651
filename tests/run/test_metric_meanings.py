"""Tests of the descriptions of metrics: one for every metric, and a page that contains all of them.

`metrics_of` of tests/support/programs.py checks every metric of the runs in other tests.
"""

import re

import pytest
from make_metrics_reference import PAGE, page

from mcore_rl.config.algorithms import DPOConfig, SFTConfig
from mcore_rl.config.rl import GRPOConfig
from mcore_rl.losses.policy_gradient import LIKELIHOODS, PolicyGradientLossFn
from mcore_rl.report.page import GROUPS
from mcore_rl.run.metric_meanings import meaning_of, metrics
from mcore_rl.run.metrics import MORE_OF_ROLLOUTS, console_metrics


def test_the_page_of_metrics_is_as_written():
    assert PAGE.read_text() == page(), "run scripts/make_metrics_reference.py"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("loss", "loss"),
        ("validation_loss", "loss"),
        ("validation_math/pass@16", "pass@K"),
        ("validation_math/gsm8k/reward_mean", "reward_mean"),
        ("gsm8k/reward_mean", "reward_mean"),
        ("reward_format_mean", "reward_NAME_mean"),
        ("loss/update_12", "loss/update_N"),
        ("moe_load/layer_3", "moe_load/layer_N"),
        ("judging_seconds", "PHASE_seconds"),
        ("step_seconds", "step_seconds"),
        ("training_tokens_per_second", "PHASE_tokens_per_second"),
        ("critic_moe_load/layer_1", "critic_moe_NAME/layer_N"),
        ("reward", None),
        ("lossy", None),
    ],
)
def test_a_metric_has_the_description_of_its_name(name, found):
    metric = meaning_of(name)
    assert (metric is None) == (found is None) and (metric is None or found in metric.names)


def test_every_name_is_described_once():
    names = [name for group in metrics().values() for metric in group for name in metric.names]
    assert len(set(names)) == len(names)
    assert all(metric.unit and metric.meaning for group in metrics().values() for metric in group)


def test_metrics_that_the_program_names_are_described():
    shown = {*MORE_OF_ROLLOUTS, *LIKELIHOODS.values(), *PolicyGradientLossFn.metric_reductions}
    for config in (SFTConfig, DPOConfig, GRPOConfig):
        shown |= set(console_metrics(config.model_construct()))
    assert not [name for name in shown if meaning_of(name) is None]


def test_every_chart_of_the_report_has_described_metrics():
    derived = {"margin"}  # of two metrics
    names = [name for group in metrics().values() for metric in group for name in metric.names]
    concrete = [re.sub("[A-Z]+", "1", name) for name in names]
    for charts in GROUPS.values():
        for chart, pattern in charts.items():
            assert chart in derived | {"memory"} or any(re.fullmatch(pattern, name) for name in concrete), chart

"""Tests that rows with shared prefixes have the numbers of unshared rows: random trees, for families and layouts.

pytest -m "" tests/testing/test_random_trees.py --trees 10     that many trees for each family and layout
"""

import pytest
from small_models import FAMILIES, and_long
from small_models import make_config as hf_config_of
from tree_cases import differences, sample_tree, tree_config, unshared_results

from mcore_rl.errors import UserError
from mcore_rl.models.megatron.families import Family, family_of
from mcore_rl.models.megatron.families.mixtures import Mixture
from mcore_rl.testing.layout_check import ParallelLayout, fitting, table_row
from mcore_rl.testing.processes import run_cases, run_processes

LAYOUTS = {
    str(layout): layout
    for layout in (
        ParallelLayout(prefix=True),
        ParallelLayout(prefix=True, dp=2),
        ParallelLayout(prefix=True, tp=2, sp=True),
        ParallelLayout(prefix=True, pp=2),
        ParallelLayout(prefix=True, pp=2, vpp=2),
        ParallelLayout(prefix=True, cp=2),
        ParallelLayout(prefix=True, cp=4),
        ParallelLayout(prefix=True, tp=2, cp=2, sp=True),
        ParallelLayout(prefix=True, dp=2, ep=2),
        ParallelLayout(prefix=True, cp=2, ep=2),
        ParallelLayout(prefix=True, tp=2, ep=2, etp=1, sp=True),
        ParallelLayout(prefix=True, tp=2, dp=2, ep=2, sp=True),
    )
}
QUICK = [("qwen3_moe", "cp2 ep2 prefix")]
LONG = [
    ("qwen3", "tp2 sp prefix"),
    ("glm4_moe", "tp2 ep2 etp1 sp prefix"),
    ("gpt_oss", "dp2 ep2 prefix"),
    ("deepseek_v3", "pp2 vpp2 prefix"),
    ("qwen3_next", "cp2 ep2 prefix"),
    ("deepseek_v32", "cp2 ep2 prefix"),
    ("glm_moe_dsa", "tp2 ep2 etp1 sp prefix"),
]
EXHAUSTIVE = [
    ("hy_v4", "cp2 ep2 prefix"),
    ("hy_v4", "pp2 prefix"),
    ("glm5_next", "cp2 ep2 prefix"),
    ("gemma4_moe", "cp2 ep2 prefix"),
    ("gemma4_e", "tp2 cp2 sp prefix"),
    ("qwen4", "cp2 ep2 prefix"),
]
ALL = [
    "qwen3",
    "deep",
    "gemma3",
    "windows",
    "qwen3_5",
    "mixtral",
    "nemotron_h_moe",
    *(name for name, _ in [*QUICK, *LONG[1:]]),
]
GRADIENTS = {"gpt_oss": 3e-4}
"""Limits of gradients that differ from the family's own: the gradient of a sink is a small sum of large terms. Two
layouts without shared prefixes differed by up to 4e-5 in it, and a layout with them by up to 1.5e-4."""

WITH_STATES = 2.5e-4
"""Limit of log-probabilities in a family in whose states rounding errors accumulate. Of Qwen3-Next's, float32 is up to
9.6e-5 from transformers in float64 without shared prefixes, and up to 8.3e-5 with them."""


def fits(family, layout):
    """Return whether the layout can be tried with the family: it divides the model, and EP has experts to divide."""
    experts = getattr(family_of(hf_config_of(family)), "experts", None)
    return layout.ep == 1 or experts is not None


def pytest_generate_tests(metafunc):
    if "layout" not in metafunc.fixturenames:
        return
    others = [(family, name) for family in ALL for name, layout in LAYOUTS.items() if fits(family, layout)]
    exhaustive = [case for case in [*others, *EXHAUSTIVE] if case not in [*QUICK, *LONG] and case[0] in FAMILIES]
    quick, long = ([case for case in cases if case[0] in FAMILIES] for cases in (QUICK, LONG))
    metafunc.parametrize(("family", "layout"), and_long(quick, long, exhaustive))


@pytest.fixture(scope="module")
def prepared(model_of, tmp_path_factory):
    """A function from family and seeds to the configuration, the files of expected results and of sampled rows."""
    made = {}

    def get(family, seeds):
        if (family, seeds) not in made:
            directory = tmp_path_factory.mktemp(family)
            config = tree_config(model_of(family), isinstance(family_of(hf_config_of(family)), Mixture))
            one = ParallelLayout().apply(config)
            cases = (unshared_results, one, seeds, directory / "expected"), (sample_tree, one, directory / "sampled")
            (tokens,), _ = run_cases(cases, world_size=1, timeout=900)
            made[family, seeds] = config, directory, tokens
        return made[family, seeds]

    return get


@pytest.mark.every_case
def test_random_trees_have_the_gradients_of_unshared_rows(family, layout, prepared, request):
    """Loss, metrics, counts of experts, log-probabilities and every gradient; the sampler's log-probabilities too."""
    chosen, marks = LAYOUTS[layout], {mark.name for mark in request.node.iter_markers()}
    count = request.config.getoption("--trees") or (12 if "exhaustive" in marks else 6)
    seeds = tuple(range(count)) if marks & {"long", "exhaustive"} else (3, 5)  # pairs, and recorded experts
    config, directory, tokens = prepared(family, seeds)
    try:
        if not fitting([chosen], config)[0]:
            pytest.skip(f"{family} cannot be divided by {layout}")
    except UserError as error:
        pytest.skip(str(error))
    config = chosen.apply(config)
    batch = config.batch.model_copy(update={"tokens_per_pack": 512, "min_shared_tokens": 4})  # for the sampled rows
    config = config.model_copy(update={"batch": batch})
    files = directory / "expected", directory / "sampled"
    found, of_sampler = run_processes(
        differences, config, seeds, *files, world_size=chosen.world_size, timeout=60 + 20 * len(seeds)
    )[0]
    for seed, (difference, apart, _) in zip(seeds, found, strict=True):
        print(f"seed {seed}: {table_row(chosen, difference)} {apart:.1e}")
    print(f"tokens / packed tokens: {sum(tokens) / sum(packed for *_, packed in found):.2f}; sampler {of_sampler:.1e}")
    limit = 1e-5 if found[0][0].limit == Family.gradient_tolerance else WITH_STATES
    gradients = GRADIENTS.get(family)
    wrong = [
        seed
        for seed, (difference, apart, _) in zip(seeds, found, strict=True)
        if not difference.within(limit, gradients) or apart > limit
    ]
    assert not wrong, f"seeds {wrong} differ"
    assert of_sampler <= limit
    assert sum(packed for *_, packed in found) < 0.8 * sum(tokens)

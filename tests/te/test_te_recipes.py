"""The configurations for large models build and train with either implementation of the layers."""

import pytest
from prefix_cases import make_groups, make_pairs
from recipes import RECIPES, read_recipe
from small_models import make_model

from mcore_rl.config import RLConfig
from mcore_rl.config.parallel import ParallelLayout
from mcore_rl.models.megatron.model.hf_config import check_model_fits, load_hf_config
from mcore_rl.testing.layout_check import compare, compute_layout_result
from mcore_rl.testing.processes import run_processes

FAMILIES = {"1.5b": "qwen2", "8b": "llama", "70b": "llama", "30b": "qwen3_moe", "235b": "qwen3_moe"}


def on(config, implementation, **model):
    model = config.model.model_copy(update={"transformer_impl": implementation, **model})
    return config.model_copy(update={"model": model})


def number_of_parameters(config):
    """Build the whole model on the meta device."""
    from mcore_rl.models.megatron.model.build import build_model
    from mcore_rl.models.megatron.parallel_state import initialize_parallel

    topology = initialize_parallel(config.parallel)
    model = build_model(load_hf_config(config.model.path), config.model, config.parallel, topology, memory=False)
    return sum(weight.numel() for chunk in model.chunks for weight in chunk.parameters())


@pytest.mark.long
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_builds_its_model(path, tmp_path, monkeypatch):
    config, _ = read_recipe(path, tmp_path, monkeypatch)
    te = on(config, "transformer_engine")
    check_model_fits(load_hf_config(te.model.path), te.parallel, te.data.max_sequence_length, te.model)
    counts = [
        run_processes(number_of_parameters, ParallelLayout().apply(one), world_size=1, timeout=300)[0]
        for one in (te, on(config, "local"))
    ]
    assert counts[0] == counts[1]


@pytest.mark.long
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_trains_a_small_model(path, tmp_path, monkeypatch):
    """Two steps with all the recipe's options but its sizes: the implementations agree."""
    config, _ = read_recipe(path, tmp_path, monkeypatch)
    family = FAMILIES[path.stem.split("_")[1]]
    small = {"path": make_model(family, tmp_path / "small"), "dtype": "float32"}
    # With a small epsilon, Adam would enlarge the rounding of near-zero gradients to a whole step.
    optimizer = config.optimizer.model_copy(update={"adam_eps": 1e-4})
    config = ParallelLayout(prefix=config.batch.share_prefixes).apply(
        config.model_copy(update={"optimizer": optimizer})
    )
    data = make_groups() if isinstance(config, RLConfig) else make_pairs()
    te, local = (
        run_processes(compute_layout_result, on(config, implementation, **small), data, 2, world_size=1, timeout=200)[0]
        for implementation in ("transformer_engine", "local")
    )
    difference = compare(te, local)
    assert difference.within(), difference

"""Tests that the configurations for large models load, match their models, and fit their GPUs in a simulation."""

import pytest
from recipes import LARGE, RECIPES, read_recipe
from small_models import and_long

from mcore_rl.models.megatron.model.hf_config import check_model_fits, load_hf_config
from mcore_rl.simulation.search import chosen_ranks, simulate
from mcore_rl.simulation.sequences import Sequences


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_it_fits_its_model(path, tmp_path, monkeypatch):
    config, gpus = read_recipe(path, tmp_path, monkeypatch)
    hf = load_hf_config(config.model.path)
    check_model_fits(hf, config.parallel, config.data.max_sequence_length, config.model)
    replicas = config.parallel.data_parallel_size(gpus)
    assert config.batch.global_batch_size % replicas == 0
    assert config.pack_width(config.rows_per_unit) >= config.data.max_sequence_length
    assert f"{path.relative_to(LARGE.parent.parent)}" in path.read_text()  # its command


SIMULATED = ("dpo_8b_32k_16gpu",)
COSTLY = and_long(
    [], [path for path in RECIPES if path.stem in SIMULATED], [path for path in RECIPES if path.stem not in SIMULATED]
)


@pytest.mark.parametrize("path", COSTLY, ids=lambda path: path.stem)
def test_it_fits_its_gpus(path, tmp_path, monkeypatch):
    """The costliest stages at the peak of a step in which every pack is full; 80 GB, of which some is not ours. Routers
    are not replayed, because that is not simulated."""
    config, gpus = read_recipe(path, tmp_path, monkeypatch, "model.moe_router_replay=false")
    longest, replicas = config.data.max_sequence_length, config.parallel.data_parallel_size(gpus)
    stages, unit = config.parallel.pipeline_model_parallel_size, config.rows_per_unit
    units = replicas * max(stages, config.pack_width(unit) // (unit * longest))  # as many packs as stages keep
    sequences = Sequences((longest,) * (unit * units), (longest // 3,) * (unit * units))
    batch = config.batch.model_copy(update={"global_batch_size": units})
    config = config.model_copy(update={"batch": batch})
    config = config.for_device(on_gpu=True, te_problem="is not simulated", simulates=True)
    reports = simulate(config, gpus, chosen_ranks(config, gpus, "first,last"), sequences)
    peaks = [report.peak / 1e9 for report in reports]
    print(path.stem, [f"{peak:.1f} GB" for peak in peaks])
    assert max(peaks) < 70, [report.memory for report in reports]

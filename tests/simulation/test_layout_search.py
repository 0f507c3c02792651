"""Tests of the search for a layout: the layouts tried, the refused ones, and the table."""

import operator

import pytest
import yaml
from simulated_cases import EQUAL, MIXTURE, SEQUENCES, call, config_of
from simulated_report import killed_at_tp2, kills_server_at_tp2
from small_models import make_model

from mcore_rl.config import DPOConfig, GRPOConfig, ParallelConfig, SFTConfig
from mcore_rl.config.parallel import ParallelLayout
from mcore_rl.errors import UserError
from mcore_rl.simulation.hardware import Hardware
from mcore_rl.simulation.search import _each, chosen_ranks, layouts_to_try, search, simulate, table


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model("llama", tmp_path_factory.mktemp("searched"))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return make_model("qwen3_moe", tmp_path_factory.mktemp("mixture"), **MIXTURE)


@pytest.mark.long
@pytest.mark.parametrize("simulation", [killed_at_tp2, kills_server_at_tp2])
def test_search_reports_killed_process_for_its_layout_only(simulation, model, monkeypatch, tmp_path):
    """Replace the simulation as on a machine without enough memory."""
    config, gpu, told = config_of(model), Hardware.load("h100"), []
    layouts = dict(layouts_to_try(config, 2, gpu))
    chosen = [(text, layouts[text]) for text in ("tp2 pp1 cp1 dp1", "tp1 pp1 cp1 dp2")]
    monkeypatch.setattr("mcore_rl.simulation.search.layouts_to_try", lambda *_: chosen)
    monkeypatch.setattr("mcore_rl.simulation.search.simulate_rank", simulation)
    monkeypatch.setenv("OUTLIVED", str(tmp_path / "outlived"))
    fits, killed = search(config, 2, SEQUENCES, gpu, 1, told.append)
    assert fits.text == "tp1 pp1 cp1 dp2" and not fits.reason
    assert killed.reason.startswith("the process that simulates a rank was killed")
    assert not (tmp_path / "outlived").exists(), "the rank must end with the process from which it was forked"
    assert told[0] == f"1 of 2 layouts: {killed.text}: {killed.reason}" and told[1].startswith("2 of 2 layouts: tp1 ")
    *rows, assumed, chosen = table([fits, killed])
    assert [row.split("  ")[0] for row in rows] == ["layout", fits.text, killed.text]
    assert assumed.startswith("all with sequence parallelism") and chosen == "for the first: the configuration as it is"
    assert {"parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"} == {*killed.overrides}


def test_only_several_minibatches_are_not_simulated(model, monkeypatch):
    monkeypatch.setattr("mcore_rl.simulation.search._each", lambda *_: [])

    def simulated(size):
        rollouts = {"num_prompts_per_step": 2, "num_generations_per_prompt": 4, "train_global_batch_size": size}
        config = config_of(model, GRPOConfig, grpo=rollouts)
        return simulate(config, 1, [0], SEQUENCES)

    assert simulated(8) == simulated(None) == [], "a single minibatch is the whole batch"
    with pytest.raises(UserError, match=r"grpo\.train_global_batch_size: minibatches cannot be simulated"):
        simulated(4)


@pytest.mark.exhaustive
def test_search_tries_expert_parallel_layouts(mixture, monkeypatch):
    gpu, config = Hardware.load("h100"), ParallelLayout(dp=2, ep=2).apply(config_of(mixture))
    layouts = dict(layouts_to_try(config, 2, gpu, experts=4))
    wanted = {"tp1 pp1 cp1 dp2 ep1", "tp2 pp1 cp1 dp1 ep2"}
    assert wanted <= {*layouts} and not [text for text in layouts if "ep4" in text or ("pp2" in text and "ep2" in text)]

    def some(config, world_size, gpu, experts):
        assert experts == 4
        return [(text, layouts[text]) for text in sorted(wanted)]

    monkeypatch.setattr("mcore_rl.simulation.search.layouts_to_try", some)
    found = search(config, 2, EQUAL, gpu, 2, print)
    assert {one.text for one in found} == wanted and not [one.reason for one in found if one.reason]
    assert list(table(found))[-1].startswith("assumed: every expert gets as many tokens as any other")


@pytest.mark.long
def test_simulations_of_ranks_tell_their_progress():
    told = []
    assert _each(1, operator.neg, [(1,), (2,), (3,)], told.append) == [-1, -2, -3]
    assert told[-1].startswith("2 of 3 ranks simulated after ")


def test_search_lists_refused_layout_with_reason(model, monkeypatch):
    refused = config_of(model).model_dump()
    refused["parallel"]["expert_tensor_parallel_size"] = 2
    monkeypatch.setattr("mcore_rl.simulation.search.layouts_to_try", lambda *_: [("tp1", refused)])
    (candidate,) = search(config_of(model), 2, SEQUENCES, Hardware.load("h100"), 1, print)
    assert candidate.text == "tp1"
    assert candidate.reason.startswith("layout: parallel.expert_tensor_parallel_size: must equal tensor_model_parallel")


def test_chosen_ranks_and_layouts_to_try(model):
    config = ParallelLayout(pp=2).apply(config_of(model))
    assert chosen_ranks(config, 8, "first,last") == [0, 4]
    assert chosen_ranks(config, 8, "stages,3") == [0, 3, 4]
    uneven = ParallelLayout(pp=4, stages="E|tt|tt|L").apply(config_of(model))
    assert chosen_ranks(uneven, 8, "distinct") == [0, 2, 6]
    interleaved = ParallelLayout(pp=4, vpp=2, stages="E|t|tt|t|t|tt|t|L").apply(config_of(model))
    assert chosen_ranks(interleaved, 4, "distinct") == [0, 1, 2, 3]  # 3 layers on two of them, in other chunks
    assert chosen_ranks(config, 8, "distinct") == [0, 4]
    assert chosen_ranks(ParallelLayout(pp=4, first=1, last=1).apply(config_of(model)), 4, "distinct") == [0, 1, 3]
    for one in (uneven, ParallelLayout(pp=2, first=1).apply(config_of(model))):
        assert next(iter(layouts_to_try(one, 2, Hardware.load("h100"))))[0] == "tp1 pp1 cp1 dp2"
    whole = config.model_copy(update={"parallel": ParallelConfig(expert_tensor_parallel_size=1)})
    for _, values in layouts_to_try(whole, 2, Hardware.load("h100")):
        assert SFTConfig.model_validate(values).parallel.expert_tensor_parallel_size is None
    texts = [text for text, _ in layouts_to_try(config, 6, Hardware.load("h100"))]
    assert "tp2 pp1 cp1 dp3" in texts and not [text for text in texts if text.startswith("tp4")]


@pytest.mark.exhaustive
def test_search_of_one_process_lists_both_candidates(model, tmp_path):
    """Run as a separate program, without prepared modules."""
    file = tmp_path / "dpo.yaml"
    file.write_text(yaml.safe_dump(config_of(model, DPOConfig).model_dump(mode="json", exclude_unset=True)))
    done = call(file, "--world-size", 1, "--lengths", "128,60", "--search")
    assert done.returncode == 0, done.stderr
    assumed, _, *rows, _, chosen = done.stdout.splitlines()
    assert assumed.startswith("assumed: the reference is computed before training")
    assert {row[:32].strip() for row in rows} == {"tp1 pp1 cp1 dp1", "tp1 pp1 cp1 dp1 recompute"}
    assert chosen.startswith("for the first: ")


@pytest.mark.exhaustive
def test_search_of_four_processes_lists_candidates(model, tmp_path):
    file = tmp_path / "dpo.yaml"
    file.write_text(yaml.safe_dump(config_of(model, DPOConfig).model_dump(mode="json", exclude_unset=True)))
    done = call(file, "--world-size", 4, "--lengths", "128,60", "--search", "--workers", 2)
    assert done.returncode == 0, done.stderr
    _, header, *rows = done.stdout.splitlines()
    assert header.split() == ["layout", "peak", "GB", "s", "a", "step", "MFU"]
    assert {"tp1 pp1 cp1 dp4", "tp4 pp1 cp1 dp1", "tp1 pp4 cp1 dp1 recompute"} <= {row[:32].strip() for row in rows}

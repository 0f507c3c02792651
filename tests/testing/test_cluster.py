"""Tests of what `mcore-rl verify` runs on its ranks, and of its verdicts."""

import json
import math
import os
import re
import subprocess
import sys
from contextlib import closing

import pytest
import torch

from mcore_rl.config import load_config
from mcore_rl.config.parallel import ParallelLayout
from mcore_rl.errors import UserError
from mcore_rl.testing.cluster import collectives
from mcore_rl.testing.cluster.inputs import prepare, speed_config, speed_sequences
from mcore_rl.testing.cluster.nodes import _difference, answer_claim
from mcore_rl.testing.cluster.plan import (
    Case,
    CheckDirectory,
    Plan,
    grpo_config,
    judge_letters,
    layouts_for,
    resume_configs,
)
from mcore_rl.testing.cluster.ranks import Received, _case_config, _compared, different_tensors, hardware_of
from mcore_rl.testing.cluster.verdicts import judge_part
from mcore_rl.testing.layout_check import LayoutResult
from mcore_rl.testing.processes import run_cases, run_processes


def plan_of(directory, processes=2, **values):
    known = {"nodes": 1, "gpu_gib": 0, "gpu": "", "collective_seconds": 20}
    return Plan(directory=directory, per_node=processes, **known | values)


# ------------------------------------------------------------ plan


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 6, 8, 16, 24, 64])
def test_layouts_use_all_processes_and_every_dimension(processes):
    found = layouts_for(processes, 8)
    assert len(found) == len(set(found)) <= 8
    assert {layout.world_size for layout in found} == ({processes} if processes > 1 else set())
    assert all(layout.is_possible and layout.tp <= 8 for layout in found)
    if processes % 2 == 0:
        assert all(any(getattr(layout, name) > 1 for layout in found) for name in ("tp", "pp", "cp", "ep"))
        assert any(layout.sp for layout in found)
    if processes > 1:
        assert ParallelLayout(dp=processes) in found


def test_tensor_parallelism_stays_within_a_node():
    assert max(layout.tp for layout in layouts_for(8, 2)) == 2
    assert max(layout.tp for layout in layouts_for(8, 8)) == 8


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_configurations_of_a_plan_fit_its_processes(processes, tmp_path):
    plan = plan_of(tmp_path, processes)
    first, second = resume_configs(plan)
    for config in (first, second, grpo_config(plan), speed_config(plan)):
        replicas = config.parallel.data_parallel_size(processes)
        assert config.batch.global_batch_size % replicas == 0
    assert (first.parallel != second.parallel) == (processes > 1)
    sequences = speed_sequences(speed_config(plan))
    assert sum(sequences.lengths) == 4 * 512 * speed_config(plan).parallel.data_parallel_size(processes)


def test_plan_is_read_as_it_was_written(tmp_path):
    plan = plan_of(tmp_path, 4, model={"path": "m"}, note="why", gpu="NVIDIA H100 80GB HBM3", gpu_gib=79.1)
    plan.write()
    assert Plan.read(tmp_path) == plan
    assert plan.read_result("refit") == {}
    plan.write_result("refit", {"bytes": 3})
    assert plan.read_result("refit") == {"bytes": 3}


@pytest.mark.long
def test_prepared_models_and_configurations_can_be_loaded(tmp_path, monkeypatch):
    from mcore_rl.models.megatron.model.hf_config import check_model_fits, load_hf_config

    plan = plan_of(tmp_path, 8)
    prepare(plan)
    for case in plan.cases:
        parallel = case.layout.apply(resume_configs(plan)[0]).parallel
        check_model_fits(load_hf_config(plan.models / case.model), parallel, 96)
    for name, config in (("resume_1", resume_configs(plan)[0]), ("grpo", grpo_config(plan))):
        assert load_config(type(config), tmp_path / "configs" / f"{name}.yaml") == config
    assert len((tmp_path / "data" / "pairs.jsonl").read_text().splitlines()) == 512


# ------------------------------------------------------------ nodes


def claim(path):
    """Claim a directory for a check that ends at once."""
    with closing(CheckDirectory(path)) as directory:
        directory.claim()


def test_directory_with_other_files_is_not_claimed(tmp_path):
    out = tmp_path / "out"
    claim(out)
    (out / "models").mkdir()
    (out / "models" / "old").touch()
    claim(out)
    assert [path.name for path in out.iterdir()] == ["verify.json"]
    (out / "mine").touch()
    with pytest.raises(UserError, match=r"contains files that no check has written \(mine\)"):
        claim(out)
    assert sorted(path.name for path in out.iterdir()) == ["mine", "verify.json"]
    other = tmp_path / "run"
    (other / "configs").mkdir(parents=True)
    with pytest.raises(UserError, match=r"\(configs\)"):
        claim(other)
    assert [path.name for path in other.iterdir()] == ["configs"]


def test_directory_of_a_killed_check_is_claimed_again(tmp_path, monkeypatch):
    """Killed while it removed earlier results, and while it wrote new ones on a full disk."""
    claim(tmp_path)
    (tmp_path / "models").mkdir()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("shutil.rmtree", raising(KeyboardInterrupt))
        claim(tmp_path)
    for name in ("verify.json.partial", "verify.html.partial", "verify.lock"):
        (tmp_path / name).touch()
    claim(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["verify.json"]


def raising(error):
    def function(*args, **options):
        raise error

    return function


HOLD = """
import sys, time
from pathlib import Path
from mcore_rl.testing.cluster.plan import CheckDirectory
held = CheckDirectory(Path(sys.argv[1]))
held.claim()
print("held", flush=True)
time.sleep(60)
"""


def test_two_checks_do_not_share_a_directory(tmp_path):
    out, answer = tmp_path / "out", tmp_path / "answer"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, out], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        (out / "plan.json").touch()
        told = f"is being written by another check (pid {holder.pid} on {os.uname().nodename}); name another directory"
        with pytest.raises(UserError, match=re.escape(told)):
            claim(out)
        answer_claim(CheckDirectory(out), answer)
        assert not list(tmp_path.glob("claim.*")), "the launch of a node that is not the first one asks for nothing"
        (tmp_path / "claim.request").touch()
        answer_claim(CheckDirectory(out), answer)
        assert told in json.loads((tmp_path / "claim.reply").read_text())
        assert (out / "plan.json").exists()
        holder.kill()
        holder.wait(10)
    finally:
        holder.kill()
    (tmp_path / "claim.reply").unlink()
    with closing(CheckDirectory(out)) as directory:
        answer_claim(directory, answer)
        assert json.loads((tmp_path / "claim.reply").read_text()) == "" and (out / "verify.lock").exists()
        answer_claim(directory, answer)
    assert [path.name for path in out.iterdir()] == ["verify.json"]


def test_nodes_with_other_versions_or_gpus_are_named():
    node = {"gpus": ["A", "A"], "versions": {"torch": "2.6", "python": "3.11"}}
    assert _difference([node, node]) == ""
    older = {**node, "versions": {"torch": "2.5", "python": "3.11"}}
    assert _difference([node, older]) == "node 1 has torch 2.5, and node 0 has 2.6; install one version"
    bare = {**node, "gpus": []}
    assert _difference([node, node, bare]) == "node 2 has no GPU, and node 0 has A; use nodes of one kind"


# ------------------------------------------------------------ collectives


def small_collectives():
    collectives.LARGE_BYTES["cpu"] = 2**18
    return collectives.check_collectives()


def wrong_all_gather():
    """The output of an all-gather whose last number is wrong on one rank only."""

    def call(x, y):
        torch.distributed.all_gather_into_tensor(y, x)
        y[-1] += torch.distributed.get_rank()

    collectives.COLLECTIVES["all-gather"] = collectives.COLLECTIVES["all-gather"]._replace(call=call)
    return collectives.check_collective("all-gather", 1000)


def broadcast_wrong_once():
    """The output of a broadcast whose third call is wrong on one rank."""
    calls = []

    def call(x, y):
        torch.distributed.broadcast(y, 0)
        calls.append(len(calls))
        y[0] += torch.distributed.get_rank() * (len(calls) == 3)

    collectives.COLLECTIVES["broadcast"] = collectives.COLLECTIVES["broadcast"]._replace(call=call)
    return collectives.check_collective("broadcast", 1000)


def test_collectives_have_right_values_and_bandwidths():
    rows, wrong, once = run_cases([(small_collectives,), (wrong_all_gather,), (broadcast_wrong_once,)], world_size=2)
    assert rows[0] == rows[1] and all(row["right"] for row in rows[0])
    assert [right for right, _ in wrong] == [False, False]
    assert [right for right, _ in once] == [False, False], "every call is compared"
    relative = {"all-reduce": 1.0, "broadcast": 1.0, "send and receive": 1.0}
    for row in rows[0]:
        expected = row["bytes"] * relative.get(row["collective"], 0.5) / row["seconds"] / 1e9
        assert row["gb_per_second"] == pytest.approx(expected)


@pytest.mark.long
def test_collectives_of_three_and_one_processes_have_right_values():
    for size in (3, 1):
        (rows, *_) = run_processes(small_collectives, world_size=size)
        assert all(row["right"] for row in rows)


# ------------------------------------------------------------ verdicts


def trained(gradient):
    steps = [{"loss": 0.5, "accuracy": 1.0, "grad_norm": 2.0, "lr": 1e-3}]
    values = {"a": torch.tensor([2.0, 0.0]), "b": torch.tensor([0.0, gradient])}
    return LayoutResult(steps, torch.ones(2, 2), values, {"a": torch.ones(3)})


@pytest.mark.parametrize(("gradient", "is_right"), [(1.0, True), (1.00001, True), (1.01, False)])
def test_float32_layout_agrees_only_to_rounding(gradient, is_right, model_of, tmp_path):
    config = resume_configs(plan_of(tmp_path))[0]
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": model_of("llama")})})
    assert _compared(config, trained(gradient), trained(1.0), None)["float32"]["right"] == is_right


@pytest.mark.parametrize(
    ("gradient", "weight", "is_right"),
    [(1.1, 0.0, True), (1.14, 0.0, True), (0.86, 0.0, True), (1.16, 0.0, False), (1.1, 0.02, False),
     (math.nan, 0.0, False)],
)  # fmt: skip
def test_bfloat16_layout_is_about_as_far_as_one_process(gradient, weight, is_right, tmp_path):
    """Limits: 1.5 times one process for all values, and 3 times for each parameter, here the small weight b."""
    config = resume_configs(plan_of(tmp_path))[0]
    exact, rounded, outcome = trained(1.0), trained(1.1), trained(gradient)
    rounded.scores[0, 0], rounded.weights["a"][0] = 2.0, 1.01
    outcome.weights["a"][0] = 1.01
    for result, distance in ((exact, 0.0), (rounded, 0.0), (outcome, weight)):
        result.weights["b"] = torch.full((1,), 0.1 * (1 + distance))
    found = _compared(config, outcome, exact, rounded)["bfloat16"]
    assert found["right"] == is_right
    assert (found["worst_quantity"] == "weight of b") == (weight > 0)


def test_layouts_in_float32_use_local_layers_and_the_given_backend(tmp_path):
    model = {"path": "m", "transformer_impl": "transformer_engine"}
    plan = plan_of(tmp_path, model=model, backend="host")
    case = Case("dense", ParallelLayout(dp=2))
    config = _case_config(plan, case, "float32")
    assert config.model.transformer_impl == "local"
    assert config.parallel.backend == "host"


def test_each_transfer_of_weights_is_compared():
    received, buffer = Received(), torch.ones(3)
    for value in (1.0, 2.0):
        received.load([("a", buffer.fill_(value)), ("b", torch.ones(2))])
        buffer.fill_(-1.0)  # the receiver uses its memory again
        received.end_transfer()
    expected = Received()
    for value in (1.0, 2.0):
        expected.load([("a", torch.full((3,), value)), ("b", torch.ones(2))])
        expected.end_transfer()
    assert different_tensors(expected.digests, received.digests) == set()
    first, second = expected.digests
    assert different_tensors([first, first], received.digests) == {"a"}
    assert different_tensors([first, second], [first, {"a": second["a"]}]) == {"b"}


def row(**changes):
    exact = {"gradients": 2e-6, "right": True}
    rounded = {"worst_quantity": "all gradients", "ratio": 1.1, "ratio_limit": 1.5, "right": True}
    return {"float32": exact, "bfloat16": rounded, "right": True} | changes


def test_layouts_pass_only_if_all_agree(tmp_path):
    plan = plan_of(tmp_path)
    names = [str(case) for case in plan.cases]
    assert names == ["dp2", "tp2 sp", "pp2", "cp2", "dp2 ep2 (mixture)"]
    rows = {name: row() for name in names}
    plan.write_result("layouts", {"rows": rows})
    outcome = judge_part(plan, "layouts")
    assert outcome.verdict == "passed" and outcome.figure.startswith("5 of 5 layouts agree")
    assert "in bfloat16 all gradients by 1.10 ×" in outcome.figure
    for broken, told in (
        ({"pp2": {"error": "rank 1 was ended by SIGKILL"}}, "pp2: rank 1 was ended by SIGKILL"),
        ({"cp2": row(float32={"gradients": 1.0, "right": False}, right=False)}, "cp2: differs in float32"),
        ({"cp2": row(float32={"gradients": math.nan, "right": True})}, "cp2: float32 gradients is not finite"),
    ):
        plan.write_result("layouts", {"rows": rows | broken})
        outcome = judge_part(plan, "layouts")
        assert (outcome.verdict, outcome.figure) == ("FAILED", f"4 of 5 layouts agree with one process; {told}")
    del rows["tp2 sp"]
    plan.write_result("layouts", {"rows": rows})
    outcome = judge_part(plan, "layouts")
    assert (outcome.verdict, outcome.figure) == ("no time", "4 of 5 layouts agree with one process; no time for tp2 sp")


def test_collectives_and_refit_fail_with_wrong_values(tmp_path):
    plan = plan_of(tmp_path)
    rows = [{"collective": name, "right": name != "broadcast", "bytes": 2**20, "gb_per_second": 1.0}
            for name in ("all-reduce", "broadcast")]  # fmt: skip
    plan.write_result("collectives", {"rows": rows})
    assert judge_part(plan, "collectives").figure == "wrong values: broadcast"
    sent = {"tensors": 3, "engines": 1, "bytes": 10**6, "gb_per_second": 2.0, "not_finite": [],
            "different": ["model.norm.weight"]}  # fmt: skip
    plan.write_result("refit", sent)
    assert judge_part(plan, "refit").figure == "1 tensor differ, the first is model.norm.weight"
    plan.write_result("refit", {**sent, "different": [], "not_finite": ["a"]})
    assert judge_part(plan, "refit").figure == "1 tensor with values that are not finite, the first is a"
    plan.write_result("refit", {**sent, "different": [], "gb_per_second": math.nan})
    assert judge_part(plan, "refit").figure == "gb_per_second is not finite"
    plan.write_result("refit", {**sent, "different": []})
    outcome = judge_part(plan, "refit")
    assert (outcome.verdict, outcome.figure) == ("passed", "3 tensors equal in 1 engine; 1.0 MB at 2 GB/s")


def write_steps(directory, steps):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))


@pytest.mark.parametrize(
    ("resumed", "verdict"),
    [({3: 0.5, 4: 0.4}, "passed"), ({3: 0.5, 4: 0.41}, "FAILED"), ({3: 0.5, 4: math.nan}, "FAILED"),
     ({1: 0.7, 2: 0.6}, "FAILED"), ({}, "FAILED")],
)  # fmt: skip
def test_resume_passes_only_with_the_losses_of_the_uninterrupted_run(resumed, verdict, tmp_path):
    plan = plan_of(tmp_path)
    losses = {1: 0.7, 2: 0.6, 3: 0.5, 4: 0.4}
    for name, run in (("uninterrupted", losses), ("resumed", resumed)):
        write_steps(tmp_path / "resume" / name, [{"step": step, "loss": loss} for step, loss in run.items()])
    assert judge_part(plan, "resume").verdict == verdict


@pytest.mark.parametrize(
    ("processes", "told"),
    [(1, "saved and resumed under the same layout (one process): "), (2, "saved under tp2 sp, resumed under pp2: "),
     (3, "saved under dp3, resumed under cp3: "), (9, "saved under dp9, resumed under cp3 dp3: ")],
)  # fmt: skip
def test_resume_names_both_layouts(processes, told, tmp_path):
    for name, steps in (("uninterrupted", (1, 2, 3, 4)), ("resumed", (3, 4))):
        write_steps(tmp_path / "resume" / name, [{"step": step, "loss": 0.5} for step in steps])
    assert judge_part(plan_of(tmp_path, processes), "resume").figure == f"{told}losses differ by 0e+00"


def test_grpo_passes_only_with_ten_finite_steps(tmp_path):
    plan = plan_of(tmp_path)
    same = {"loss": 0.1, "grad_norm": 1.0, "generation_seconds": 2.0, "step_seconds": 3.0}
    steps = [{"step": n, "reward_mean": n / 10, **same} for n in range(1, 11)]
    write_steps(tmp_path / "grpo", steps)
    outcome = judge_part(plan, "grpo")
    assert (outcome.verdict, outcome.figure) == ("passed", "10 steps; reward 0.100 to 1.000; generation 2 s")
    write_steps(tmp_path / "grpo", steps[:9])
    assert judge_part(plan, "grpo").figure == "9 of 10 steps"
    for name in ("loss", "grad_norm", "reward_mean"):
        write_steps(tmp_path / "grpo", [*steps[:9], {**steps[9], name: math.nan}])
        assert judge_part(plan, "grpo").verdict == "FAILED", name


@pytest.mark.parametrize(
    ("gpu", "kind"),
    [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA GB200", "gb200"),
     ("NVIDIA B200", "b200"), ("NVIDIA L40S", None), ("", None)],
)  # fmt: skip
def test_hardware_is_recognized_by_the_name_of_the_gpu(gpu, kind):
    assert hardware_of(gpu) == kind


def test_speed_is_compared_with_the_simulation(tmp_path):
    plan = plan_of(tmp_path)
    plan.write_result("speed", {"seconds": 2.0, "tokens": 1000, "tokens_per_second": 500.0, "peak_bytes": 2**30})
    assert judge_part(plan, "speed").verdict == "FAILED", "the simulation has written nothing"
    plan.write_result("simulation", {"peak_bytes": 2**31, "seconds": 1.0})
    outcome = judge_part(plan, "speed")
    assert outcome.verdict == "passed"
    assert outcome.figure == "500 tokens/s, 1.00 GiB (0.50 × the simulated speed, 0.50 × the simulated memory)"


def test_speed_that_is_not_finite_fails(tmp_path):
    plan = plan_of(tmp_path)
    plan.write_result("speed", {"seconds": 2.0, "tokens": 1, "tokens_per_second": math.inf, "peak_bytes": 2**30})
    plan.write_result("simulation", {"peak_bytes": 2**31, "seconds": 1.0})
    outcome = judge_part(plan, "speed")
    assert (outcome.verdict, outcome.figure) == ("FAILED", "measured tokens_per_second is not finite")


def test_judge_rewards_letters():
    def reward(text):
        return judge_letters([{"role": "user", "content": "x"}, {"role": "assistant", "content": text}], {})

    assert (reward("ab1 "), reward("abc"), reward("")) == (0.5, 1.0, 0.0)

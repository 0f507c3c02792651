"""GRPO and PPO with programs: sessions become rows, failures are failed samples, layouts agree, runs resume."""

import json
import shutil

import pytest
from agent_runs import files as files
from agent_runs import train
from float32 import FORWARD, approx32, approx32_after_updates
from ports import free_port
from programs import metrics_of

SAME = ("loss", "reward_mean", "rows_per_sample", "response_length_mean", "logprob_error")


@pytest.fixture(scope="module")
def whole(files):
    return train(files, "whole")


def test_sessions_become_rows(files, whole):
    """The trainer's log-probabilities are the sampled ones, and a session has a row for its branch."""
    for line in whole:
        assert line["rows_per_sample"] == 2 and line["skipped_update"] == 0
        assert line["token_mult_prob_error"] == pytest.approx(1, abs=1e-5)
    samples = [json.loads(line) for line in (files / "whole" / "samples.jsonl").read_text().splitlines()]
    assert samples[0]["error"] is None and [m["role"] for m in samples[0]["messages"]][:2] == ["user", "user"]


LAYOUTS = {
    "tp2": ["parallel.tensor_model_parallel_size=2"],
    "dp2": [],
    "pp2": ["parallel.pipeline_model_parallel_size=2"],
    "cp2": ["parallel.context_parallel_size=2"],
}


@pytest.mark.long
@pytest.mark.parametrize("layout", ["tp2", *(pytest.param(x, marks=pytest.mark.long) for x in ("dp2", "pp2", "cp2"))])
@pytest.mark.every_case
def test_layouts_sample_the_same_sessions(layout, files, whole):
    found = train(files, layout, *LAYOUTS[layout], processes=2)
    for one, other in zip(whole, found, strict=True):
        for name in SAME:
            assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5), name


@pytest.mark.long
def test_shared_prefixes_change_nothing(files, whole):
    """The rows of a prompt's sessions have common beginnings; a token that several rows share is computed once."""
    found = train(files, "shared", "batch.share_prefixes=true", "batch.min_shared_tokens=1")
    for one, other in zip(whole, found, strict=True):
        for name in (*SAME, "grad_norm"):
            assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5), name


@pytest.mark.long
def test_failed_programs_are_failed_samples(files):
    options = ("environment.program=agent_programs:failing", "environment.agent.session_seconds=4")
    lines = train(files, "failing", *options, "environment.max_failed_fraction=1")
    samples = [json.loads(line) for line in (files / "failing" / "samples.jsonl").read_text().splitlines()]
    errors = " ".join(str(sample["error"]) for sample in samples)
    found = ("ValueError: broken program", "must be a finite number", "gave no reward", "session_seconds=4")
    assert sum(part in errors for part in found) >= 2 and len(lines) == 2
    assert all(sample["reward"] is None for sample in samples if sample["error"])
    assert "broken program" in (files / "failing" / "agent.log").read_text() or "broken" not in errors


@pytest.mark.long
def test_commands_give_rewards_and_judges_judge_sessions(files):
    port = free_port()
    command = f"[python3,{files / 'command.py'},http://127.0.0.2:{port}/,{files / 'one_session'}]"
    agent = ("host=127.0.0.2", f"port={port}", "max_sessions=1")
    options = [f"environment.program={command}", *(f"environment.agent.{option}" for option in agent)]
    (line, _) = train(files, "command", *options)
    assert line["skipped_update"] == 0 and "rows_per_sample" not in line
    samples = [json.loads(line) for line in (files / "command" / "samples.jsonl").read_text().splitlines()]
    assert samples and not any(sample["error"] for sample in samples)
    judge = "environment.agent.judge={name: exact_match}"
    lines = train(files, "judged", "environment.program=agent_programs:judged", judge, algorithm="ppo")
    assert len(lines) == 2 and lines[0]["reward_mean"] >= 0


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["environment.program=agent_programs:missing"], "agent_programs has no function 'missing'"),
        (["environment.program=no_such_module:run"], "cannot be imported: No module named 'no_such_module'"),
        (["environment.program=[no-such-command]"], "the command 'no-such-command' does not exist"),
        (["environment.program=agent_programs:dying"], "no sample could be judged"),
    ],
)
def test_programs_that_cannot_run(options, part, files):
    done = train(files, "wrong", *options, "environment.max_failed_steps=1", check=False)
    assert done.returncode and part in done.stdout_text + done.stderr_text


@pytest.mark.long
def test_a_run_resumes(files, whole):
    shutil.copytree(files / "whole", files / "resumed")
    shutil.rmtree(files / "resumed" / "checkpoints" / "iter_0000002")
    (files / "resumed" / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("1\n")
    lines = train(files, "resumed")
    assert lines[-1]["reward_mean"] == pytest.approx(whole[-1]["reward_mean"])
    assert lines[-1]["loss"] == approx32_after_updates(whole[-1]["loss"])


@pytest.mark.long
def test_a_recording_of_sessions_is_replayed(files):
    train(files, "recorded", "--record", files / "recording.jsonl")
    lines = train(files, "replayed", "--replay", files / "recording.jsonl")
    for one, other in zip(metrics_of(files / "recorded"), lines, strict=True):
        assert other["loss"] == approx32(one["loss"], FORWARD)
        assert other["rows_per_sample"] == 2

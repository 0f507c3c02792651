"""Whose an output directory, a recording and weights are, as can be told without training."""

import json

import pytest

from mcore_rl.algorithms.rollouts import check_record
from mcore_rl.checkpoint_store import digests_of, write_manifest
from mcore_rl.config import SFTConfig
from mcore_rl.errors import UserError
from mcore_rl.launch_environment import launch_id
from mcore_rl.preflight import check_output, find_checkpoints, is_restart, preflight
from mcore_rl.run_directory import RunDirectory
from mcore_rl.run_identity import RunIdentity, digest_of_weights


@pytest.fixture
def configured(tmp_path):
    """Makes configurations of runs in tmp_path/out, by `checkpoint` and `model` section."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')

    def make(model="model", train="data.jsonl", **checkpoint):
        return SFTConfig(
            output_dir=tmp_path / "out",
            model={"path": tmp_path / model},
            data={"train": str(tmp_path / train), "max_sequence_length": 8},
            batch={"global_batch_size": 1},
            optimizer={"lr": 1e-3},
            trainer={"max_steps": 1},
            checkpoint=checkpoint,
        )

    return make


@pytest.fixture
def out(tmp_path):
    """A run's directory with an export and a log in it."""
    hf = tmp_path / "out" / "hf"
    hf.mkdir(parents=True)
    (hf / "config.json").write_text('{"model_type": "llama"}')
    write_manifest(hf, digests_of(hf, ["config.json"]))
    (tmp_path / "out" / "metrics.jsonl").write_text('{"step": 1}\n')
    mark(tmp_path / "out")
    return tmp_path / "out"


def mark(directory):
    RunDirectory(directory).mark(RunIdentity("sft", {}, "", "", {}, launch_id()).to_json(), "")


def attempt(patch, number, launch, run_id="none"):
    """What torchrun tells its workers."""
    patch.setenv("TORCHELASTIC_RUN_ID", run_id)
    patch.setenv("TORCHELASTIC_RESTART_COUNT", str(number))
    patch.setenv("TORCHELASTIC_ERROR_FILE", f"/tmp/{launch}/attempt_{number}/0/error.json")


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_restart_goes_on_only_with_what_its_launch_began(overwrite, configured, out, monkeypatch):
    (out / "checkpoints" / "iter_0000001").mkdir(parents=True)
    config = configured(resume="none", overwrite=overwrite)
    attempt(monkeypatch, 1, "second")
    assert not is_restart(out)
    assert find_checkpoints(config) == ([], [])
    if not overwrite:
        with pytest.raises(UserError, match="holds a run, which would be mixed"):
            check_output(config)
    attempt(monkeypatch, 0, "second")
    mark(out)
    attempt(monkeypatch, 1, "second")
    assert is_restart(out)
    check_output(config)
    attempt(monkeypatch, 1, "third")
    assert not is_restart(out)


def test_a_named_launch_is_the_same_on_every_node(out, monkeypatch):
    attempt(monkeypatch, 0, "a", run_id="job-7")
    mark(out)
    attempt(monkeypatch, 1, "b", run_id="job-7")
    assert is_restart(out)
    attempt(monkeypatch, 1, "b", run_id="job-8")
    assert not is_restart(out)


@pytest.mark.parametrize(("name", "text"), [("run.json", '{"mine": 1}'), ("run.json", "{}"), ("run.lock", "mine\n")])
def test_a_users_file_of_that_name_is_no_runs(name, text, configured, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text(text)
    with pytest.raises(UserError, match=f"holds {name}, which no run wrote"):
        check_output(configured())


def test_only_a_runs_directory_is_cleared(out):
    (out / "judge.log").write_text("a user's")
    (out / "run.json").unlink()
    RunDirectory(out).clear()
    assert (out / "judge.log").read_text() == "a user's"
    mark(out)
    RunDirectory(out).clear()
    assert {path.name: path.read_text() for path in out.iterdir()} == {"judge.log": ""}


def test_an_edit_of_an_export_is_seen_whatever_its_size(configured, out):
    check_output(configured())
    (out / "hf" / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(UserError, match=r"holds config.json, not as a run exported it"):
        check_output(configured())


def test_what_is_read_is_not_removed(configured, out, tmp_path):
    config = configured(model="out/hf", export_hf=False, resume="none", overwrite=True)
    with pytest.raises(UserError, match=r"out/hf is what checkpoint.overwrite=true removes"):
        check_output(config)
    check_output(configured(model="out/hf", export_hf=False))
    with pytest.raises(UserError, match=r"data.train: .*config.json is a file that this run writes"):
        check_output(configured(train="out/hf/config.json"))
    for option in ("record", "replay"):
        with pytest.raises(UserError, match=f"--{option} .*metrics.jsonl: is a file that this run writes"):
            preflight(configured(), 1, {option: out / "metrics.jsonl"})


def test_a_recording_goes_on_with_its_own_run(tmp_path):
    run = {"output_dir": "/a", "seed": 0, "data": "x"}
    path = tmp_path / "recording.jsonl"
    path.write_text(json.dumps({"step": 1, "sampling": {**run, "temperature": 1.0}}) + "\n")
    check_record(path, run, goes_on=True)
    for name in run:
        with pytest.raises(UserError, match=f"is of another run \\(other {name}\\)"):
            check_record(path, {**run, name: "another"}, goes_on=True)


@pytest.mark.parametrize("changed", [0, (600 << 20) - 1, (600 << 20) + 7])
def test_every_tensor_of_a_large_file_is_looked_at(changed, tmp_path):
    large, small = 600 << 20, 64 << 10
    offsets = {"large": (0, large), "small": (large, large + small), "other": (large + small, 2 * large)}
    header = json.dumps({
        name: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
        for name, (begin, end) in offsets.items()
    }).encode()  # fmt: skip
    with open(tmp_path / "model.safetensors", "wb") as file:  # sparse: it takes no room
        file.write(len(header).to_bytes(8, "little") + header)
        begin = file.tell()
        file.truncate(begin + 2 * large)
        file.flush()
        before = digest_of_weights(tmp_path)
        file.seek(begin + changed)
        file.write(b"\1")
    assert digest_of_weights(tmp_path) != before

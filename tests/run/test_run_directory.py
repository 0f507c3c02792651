"""Tests of the owner of an output directory, a recording and weights, without training."""

import json
from types import SimpleNamespace

import pytest
import torch

from mcore_rl.config import DistillationConfig, DPOConfig, GRPOConfig, SFTConfig
from mcore_rl.config.fp8 import FP8Config
from mcore_rl.errors import UserError
from mcore_rl.models.megatron.model.lora import PEFTDirectory, write_peft_directory
from mcore_rl.rollouts.recordings import check_record
from mcore_rl.run.directory import RunDirectory
from mcore_rl.run.identity import RunIdentity
from mcore_rl.run.preflight import check_output, find_checkpoints, is_restart, preflight
from mcore_rl.utils.files import digests_of, write_manifest
from mcore_rl.utils.model_directory import digest_of_weights
from mcore_rl.utils.torchrun import launch_id


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
    """Return the environment variables that torchrun sets for its workers."""
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


def test_a_directory_with_a_users_notes_is_accepted_and_keeps_them(configured, tmp_path):
    (tmp_path / "out" / "figures").mkdir(parents=True)
    for name in ("notes.txt", "figures/loss.png"):
        (tmp_path / "out" / name).write_text("a user's")
    for config in (configured(), configured(resume="none", overwrite=True)):
        check_output(config)
        mark(tmp_path / "out")
        (tmp_path / "out" / "metrics.jsonl").write_text("{}")
    RunDirectory(tmp_path / "out").clear()
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert {path.name for path in files} - {"run.json"} == {"notes.txt", "loss.png"}
    assert all(path.read_text() == "a user's" for path in files if path.name != "run.json")


def test_an_edit_of_an_export_is_seen_whatever_its_size(configured, out):
    check_output(configured())
    (out / "hf" / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(
        UserError, match=r"holds config.json, which no run exported or which was changed after the export"
    ):
        check_output(configured())


def test_what_is_read_is_not_removed(configured, out, tmp_path):
    config = configured(model="out/hf", export_hf=False, resume="none", overwrite=True)
    with pytest.raises(UserError, match=r"model.path: .*out/hf is written or removed by this run; choose another"):
        check_output(config)
    check_output(configured(model="out/hf", export_hf=False))
    with pytest.raises(UserError, match=r"data.train: .*config.json is written by this run; choose"):
        check_output(configured(train="out/hf/config.json"))
    for option in ("record", "replay"):
        with pytest.raises(UserError, match=f"--{option} .*metrics.jsonl: is a file that this run writes"):
            preflight(configured(), 1, {option: out / "metrics.jsonl"})


def test_records_are_not_beside_a_runs_logs(configured, out):
    with pytest.raises(UserError, match=r"data.train: .*out is written by this run"):
        check_output(configured(train="out"))
    check_output(configured(model="out"))


def with_another(key, path, config):
    """`config` of the algorithm that reads a model by this key; `path` None: it reads none."""
    values = config.model_dump(exclude_defaults=True)
    if key == "model.lora.path":
        values["model"]["lora"] = {"path": path}
        return SFTConfig.model_validate(values)
    if key == "dpo.reference_model":
        return DPOConfig.model_validate({**values, "dpo": {"reference_model": path and str(path)}})
    if key == "distillation.teacher":
        return DistillationConfig.model_validate({**values, "distillation": {"teacher": str(path)}})
    judge = {"name": "reward_model", "path": path} if path else {}
    sampling = {"num_prompts_per_step": 1, "num_generations_per_prompt": 2, "max_new_tokens": 3}
    values["batch"] = {"tokens_per_pack": 32}
    return GRPOConfig.model_validate({**values, "grpo": sampling, "environment": judge})


OTHERS = ("model.lora.path", "dpo.reference_model", "distillation.teacher", "environment.path")


@pytest.mark.parametrize("key", OTHERS)
def test_no_model_that_is_read_is_written_over(key, configured, out, tmp_path):
    for part in ("hf", "adapter"):
        path = out / part
        with pytest.raises(UserError, match=rf"{key}: {path} is written by this run; .*or set checkpoint.export_hf="):
            check_output(with_another(key, path, configured()))
        check_output(with_another(key, path, configured(export_hf=False)))
        with pytest.raises(UserError, match=rf"{key}: {path} is written or removed by this run; choose another"):
            check_output(with_another(key, path, configured(export_hf=False, resume="none", overwrite=True)))
    links = tmp_path / "links"
    links.mkdir()
    (links / "config.json").symlink_to(out / "hf" / "config.json")
    with pytest.raises(UserError, match=rf"{key}: {links} is written by this run"):
        check_output(with_another(key, links, configured()))
    check_output(with_another(key, tmp_path / "model", configured(resume="none", overwrite=True)))


def test_a_section_that_was_or_becomes_null_is_a_change(configured):
    hf, without = SimpleNamespace(to_dict=lambda: {"model_type": "llama"}), configured()
    of_fp8 = without.model_copy(update={"model": without.model.model_copy(update={"fp8": FP8Config()})})
    one, other = (RunIdentity.from_json(RunIdentity.of(c, hf, "data").to_json()) for c in (without, of_fp8))
    assert "model.fp8.recipe None → blockwise" in other.changes(one)
    assert "model.fp8.recipe blockwise → None" in one.changes(other)


@pytest.mark.parametrize("key", OTHERS)
def test_a_run_has_the_other_models_that_it_began_with(key, configured, tmp_path):
    other, where = tmp_path / "other", tmp_path / "out" / "checkpoints" / "iter_0000001"
    other.mkdir()
    weights = other / "model.safetensors"
    weights.write_bytes(b"some")

    def identity(path):
        hf = SimpleNamespace(to_dict=lambda: {"model_type": "llama"})
        return RunIdentity.of(with_another(key, path, configured()), hf, "data")

    began = RunIdentity.from_json(identity(other).to_json())
    moved = other.rename(tmp_path / "moved")
    identity(moved).require_same(began, where)
    assert identity(moved).changes(began) == []
    earlier = json.loads(began.to_json())
    del earlier["other_weights"]
    weights = moved / "model.safetensors"
    weights.write_bytes(b"else")
    with pytest.raises(UserError, match=rf"^{key}: other weights in {moved}: .* is of another run"):
        identity(moved).require_same(began, where)
    identity(moved).require_same(RunIdentity.from_json(json.dumps(earlier)), where)
    if key == "distillation.teacher":  # there always is one
        return
    named = "environment.name" if key == "environment.path" else key
    for now, before in ((identity(None), began), (began, identity(None))):
        with pytest.raises(UserError, match=rf"^{named}: .* is of another run"):
            now.require_same(before, where)


def test_an_adapters_scale_is_part_of_it(tmp_path):
    (tmp_path / "adapter_model.safetensors").write_bytes(b"some")
    digests = set()
    for alpha in (7, 7.5):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"lora_alpha": alpha}))
        digests.add(digest_of_weights(tmp_path))
    assert len(digests) == 2


def test_an_adapter_knows_its_base(tmp_path):
    """Compare weights if a digest was stored, otherwise names, which are not a proof."""
    for name in ("base", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(name.encode())
    base, other, adapter = (tmp_path / name for name in ("base", "other", "adapter"))
    settings = {"r": 1, "lora_alpha": 1.5, "lora_dropout": 0.0, "target_modules": ["q_proj"]}
    write_peft_directory([("a", torch.ones(1, 3))], adapter, base, settings, is_writer=True)
    check = PEFTDirectory(adapter).check_base
    assert check(base, digest_of_weights(base)) == []
    moved = base.rename(tmp_path / "moved")
    assert check(moved, digest_of_weights(moved)) == []
    with pytest.raises(UserError, match=f"^model.lora.path: {adapter} was trained on other weights .* than "):
        check(other, digest_of_weights(other))
    (adapter / "base_model.json").unlink()
    (line,) = check(other, digest_of_weights(other))
    assert line == f"model.lora.path: {adapter} names {base} as its base model, not {other}"
    moved.rename(base)
    assert check(base, "") == []
    assert len(check(other, "")) == 1
    config = json.loads((adapter / "adapter_config.json").read_text())
    for name, lines in (("hub/other", 0), ("hub/base", 1), (None, 0)):
        (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": name}))
        assert len(PEFTDirectory(adapter).check_base(other, "")) == lines


def test_a_recording_goes_on_with_its_own_run(tmp_path):
    run = {"output_dir": "/a", "seed": 0, "data": "x"}
    path = tmp_path / "recording.jsonl"
    path.write_text(json.dumps({"step": 1, "sampling": {**run, "temperature": 1.0}}) + "\n")
    check_record(path, run, goes_on=True)
    for name in run:
        with pytest.raises(UserError, match=f"is of another run \\(different {name}\\)"):
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


def test_targets_of_adapters_are_the_same_in_any_order(tmp_path):
    def adapting(*targets):
        lora = {"rank": 2, "alpha": None, "target_modules": list(targets)}
        return RunIdentity("sft", {}, "", "", {"model": {"lora": lora}, "data": {}, "output_dir": "out"})

    adapting("q_proj", "v_proj").require_same(adapting("v_proj", "q_proj"), tmp_path)
    with pytest.raises(UserError, match=r"model\.lora\.target_modules: .* is of another run"):
        adapting("q_proj").require_same(adapting("v_proj", "q_proj"), tmp_path)


@pytest.mark.parametrize(("was", "now", "is_same"), [(0.1, 0.2, True), (0.1, 0.0, False), (None, 0.1, False)])
def test_a_checkpoint_has_the_trained_mtp_layers_or_not(was, now, is_same, tmp_path):
    """Otherwise the trained layers would be lost, or begin at nothing."""

    def training(factor):
        model = {} if factor is None else {"mtp_loss_scaling_factor": factor}
        return RunIdentity("sft", {}, "", "", {"model": model, "data": {}, "output_dir": "out"})

    if is_same:
        training(now).require_same(training(was), tmp_path)
        return
    for one, other in ((was, now), (now, was)):
        with pytest.raises(UserError, match=r"model\.mtp_loss_scaling_factor: .* is of another run"):
            training(one).require_same(training(other), tmp_path)

"""Tests of checkpoints: never incomplete, damage reported by file name, the best intact one used, exact resume."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml
from forked_programs import ForkedProgram
from full_disk import no_room
from programs import ROOT
from safetensors.torch import load_file
from small_models import and_long, make_model

from mcore_rl.errors import DiskFullError, UserError
from mcore_rl.run.identity import RunIdentity
from mcore_rl.testing.processes import run_processes
from mcore_rl.utils.checkpoint_store import CheckpointStore, digest_problems, quick_problems
from mcore_rl.utils.files import digests_of, naming_full_disk

FILES = ("common.pt", "metadata.json", ".metadata", "__0_0.distcp", "config.yaml")


def write(store, step):
    partial = store.begin(step)
    for name in FILES:
        (partial / name).write_bytes(os.urandom(64))
    return store.commit(step, partial, digests_of(partial, FILES))


@pytest.fixture
def store(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in (10, 20, 30):
        write(store, step)
    return store


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def steps(paths):
    return [int(path.name.removeprefix("iter_")) for path in paths]


def test_candidates_are_sorted_newest_first(store):
    candidates, problems = store.candidates()
    assert (steps(candidates), problems) == ([30, 20, 10], [])
    assert store.tracked_step() == 30


def test_no_checkpoint_is_not_an_error(tmp_path):
    assert CheckpointStore(tmp_path).candidates() == ([], [])


DAMAGE = {
    "truncated shard": (lambda p: (p / "__0_0.distcp").write_bytes(b"x"), "__0_0.distcp has 1 bytes, not 64"),
    "longer shard": (lambda p: (p / "__0_0.distcp").write_bytes(b"x" * 65), "__0_0.distcp has 65 bytes, not 64"),
    "empty shard": (lambda p: (p / "__0_0.distcp").write_bytes(b""), "__0_0.distcp has 0 bytes"),
    "missing shard": (lambda p: (p / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "missing common state": (lambda p: (p / "common.pt").unlink(), "common.pt is missing"),
    "truncated common state": (lambda p: (p / "common.pt").write_bytes(b""), "common.pt has 0 bytes"),
    "missing index": (lambda p: (p / ".metadata").unlink(), ".metadata is missing"),
    "truncated index": (lambda p: (p / ".metadata").write_bytes(b"12"), ".metadata has 2 bytes"),
    "missing format": (lambda p: (p / "metadata.json").unlink(), "metadata.json is missing"),
    "missing config": (lambda p: (p / "config.yaml").unlink(), "config.yaml is missing"),
    "missing manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing or cannot be read"),
    "truncated manifest": (lambda p: (p / "manifest.json").write_text('{"a'), "manifest.json is missing or cannot"),
    "foreign manifest": (lambda p: (p / "manifest.json").write_text('{"a": 1}'), "manifest.json is missing or cannot"),
    "manifest of nothing": (lambda p: (p / "manifest.json").write_text("{}"), "does not list a whole checkpoint"),
    "manifest leaving the folder": (
        lambda p: (p / "manifest.json").write_text('{"../x": [1, "2"]}'),
        "which is not a file of this directory",
    ),
    "empty directory": (lambda p: (shutil.rmtree(p), p.mkdir()), "manifest.json is missing"),
    "a directory in a shard's place": (
        lambda p: ((p / "__0_0.distcp").unlink(), (p / "__0_0.distcp").mkdir()),
        "__0_0.distcp is missing",
    ),
}


def test_full_disk_is_named_in_place_of_the_position_in_pytorchs_file(tmp_path):
    names_it = naming_full_disk(tmp_path / "checkpoints")
    with no_room(), pytest.raises(DiskFullError) as refused, names_it, open(tmp_path / "shard", "wb") as file:
        torch.save(torch.zeros(9000), file)
    assert str(refused.value).startswith(f"{tmp_path / 'checkpoints'} cannot be written (File too large, ")
    with pytest.raises(RuntimeError, match="another error"), naming_full_disk(tmp_path):
        raise RuntimeError("another error")


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_candidates_skip_and_name_damaged_checkpoint(store, damage, message):
    damage(store.iteration(30))
    candidates, problems = store.candidates()
    assert steps(candidates) == [20, 10]
    assert any("iter_0000030" in problem and message in problem for problem in problems)


@pytest.mark.parametrize("name", FILES)
def test_digest_problems_finds_flipped_byte(store, name):
    path = store.iteration(30)
    assert digest_problems(path) == []
    flip_a_byte(path / name)
    assert quick_problems(path) == []
    assert digest_problems(path) == [f"{name}: its contents are damaged (SHA-256)"]


@pytest.mark.parametrize(
    ("text", "message"), [("40", "names iteration 40"), ("x", "not the number"), (None, "missing")]
)
def test_candidates_report_wrong_tracker(store, text, message):
    tracker = store.directory / "latest_checkpointed_iteration.txt"
    tracker.unlink() if text is None else tracker.write_text(text)
    candidates, problems = store.candidates()
    assert steps(candidates) == [30, 20, 10]
    assert any(message in problem for problem in problems)


def test_candidates_raise_when_every_checkpoint_is_damaged(store):
    for path in store.iterations():
        (path / "common.pt").unlink()
    with pytest.raises(UserError, match=r"damaged or incomplete: .*iter_0000010: common.pt is missing"):
        store.candidates()


def test_candidates_ignore_uncommitted_checkpoint(store):
    partial = store.begin(40)
    (partial / "common.pt").write_bytes(b"half")
    assert steps(store.candidates()[0]) == [30, 20, 10]
    write(store, 40)
    assert not list(store.directory.glob(".*partial"))


def test_prune_keeps_last_and_every_nth(store):
    write(store, 40)
    assert steps(store.prune(keep_last=2, keep_every=20)) == [10]
    assert steps(store.iterations()) == [20, 30, 40]


def test_prune_keeps_only_undamaged_checkpoint(store):
    for step in (20, 30):
        (store.iteration(step) / "common.pt").unlink()
    store.prune(keep_last=1, keep_every=None)
    assert steps(store.iterations()) == [10, 30]


def test_file_of_user_in_pruned_checkpoint_is_kept_and_no_damage(store):
    notes = store.iteration(10) / "notes.txt"
    notes.write_text("mine")
    assert steps(store.prune(keep_last=2, keep_every=None)) == [10]
    candidates, problems = store.candidates()
    assert (steps(candidates), problems, notes.read_text()) == ([30, 20], [], "mine")
    write(store, 10)  # a run that was reset to an earlier iteration
    assert steps(store.candidates()[0]) == [10, 30, 20]
    assert (store.directory / "iter_0000010.replaced" / "notes.txt").read_text() == "mine"


# ------------------------------------------------------------------ real runs


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    make_model("llama", root / "model", initializer_range=0.05)
    for name, letters in (("data", "abcdefgh"), ("other", "stuvwxyz")):
        records = [{"prompt": f"say {i} ", "completion": letters[: 2 + i % 6] * (1 + i % 3)} for i in range(30)]
        (root / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    config = {
        "output_dir": "set below",
        "model": {"path": str(root / "model")},
        "data": {"train": str(root / "data.jsonl"), "max_sequence_length": 48},
        "batch": {"global_batch_size": 8},
        "optimizer": {"lr": 3e-3, "warmup_steps": 2, "schedule": "linear", "weight_decay": 0.1},
        "trainer": {"max_steps": 8},  # across the end of an epoch of 30
        "checkpoint": {"save_interval": 4},
    }
    (root / "sft.yaml").write_text(yaml.safe_dump(config))
    pairs = [{"prompt": f"say {i} ", "chosen": "abcd"[: 1 + i % 4], "rejected": "wxyz"[: 1 + i % 3]} for i in range(30)]
    (root / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    config["data"]["train"] = str(root / "pairs.jsonl")
    (root / "dpo.yaml").write_text(yaml.safe_dump(config))
    return root


def start(files, out, *arguments, algorithm="sft"):
    script, config = ROOT / "scripts" / f"train_{algorithm}.py", files / f"{algorithm}.yaml"
    return ForkedProgram([script, config, f"output_dir={out}", *arguments])


def finish(process, *statuses):
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode in (statuses or (0,)), out + err
    return out + err


def losses(out):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: (line["loss"], line["grad_norm"], line["num_tokens"], line["lr"]) for line in lines}


@pytest.fixture(scope="module")
def whole_run(files):
    finish(start(files, files / "whole"))
    return files / "whole"


def assert_bit_equal(ours, theirs):
    assert losses(ours) == losses(theirs)
    a, b = load_file(ours / "hf" / "model.safetensors"), load_file(theirs / "hf" / "model.safetensors")
    assert all(torch.equal(a[name], b[name]) for name in b)


def test_index_has_no_path_that_depends_on_the_python(whole_run):
    for index in whole_run.glob("checkpoints/iter_*/.metadata"):
        assert b"pathlib" not in index.read_bytes()


def test_resume_after_damage_ends_bit_equal(files, whole_run):
    out = files / "damaged"
    shutil.copytree(whole_run, out)
    flip_a_byte(out / "checkpoints" / "iter_0000008" / "__0_0.distcp")
    text = finish(start(files, out))
    assert "damaged checkpoint: " in text
    assert "__0_0.distcp: its contents are damaged" in text
    assert "resumed from" in text
    assert "iter_0000004: weights, optimizer, schedule, random states, data position (32 samples)" in text
    assert_bit_equal(out, whole_run)


@pytest.mark.long
def test_resume_after_sigterm_ends_bit_equal(files, whole_run):
    for attempt in range(5):  # on a busy machine the run may have ended before this process sends the signal
        out = files / f"stopped_{attempt}"
        process = start(files, out)
        deadline = time.monotonic() + 100
        while not (out / "metrics.jsonl").exists() or len(losses(out)) < 2:
            assert time.monotonic() < deadline
            assert process.poll() is None or len(losses(out)) == 8, process.communicate()
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        text = finish(process, 0, 128 + signal.SIGTERM)
        if len(losses(out)) < 8:
            break
    assert "stopped by SIGTERM after step" in text
    assert len(losses(out)) < 8 and process.returncode == 128 + signal.SIGTERM
    assert "resumed from" in finish(start(files, out))
    assert_bit_equal(out, whole_run)


@pytest.mark.long
def test_second_signal_ends_process_at_once(files):
    code = (
        "import ctypes, os, signal, time\n"
        "from mcore_rl.platform import initialize_platform\n"
        "initialize_platform()\n"
        "from mcore_rl.run import loop\n"
        "loop.StopSignals()\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"  # the same notice, which Slurm and the launcher both send
        "time.sleep(0.1)\n"
        "loop.SAME_NOTICE_SECONDS = 1\n"
        "again = 'sleep 0.3; kill -USR1 ' + str(os.getpid()) + ' & sleep 2'\n"
        "ctypes.CDLL(None).system(again.encode())\n"  # it arrives while this thread runs no Python
        "print('going on', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "time.sleep(5)\n"
        "print('never')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "going on\n")


@pytest.mark.long
@pytest.mark.parametrize(("algorithm", "dtype"), [("dpo", "float32"), ("sft", "bfloat16"), ("dpo", "bfloat16")])
def test_resume_ends_bit_equal(files, algorithm, dtype):
    """The checkpoint is of step 4, in the middle of an epoch that ended at 3.75 steps."""
    whole, resumed = files / f"{algorithm}_{dtype}", files / f"{algorithm}_{dtype}_resumed"
    finish(start(files, whole, f"model.dtype={dtype}", algorithm=algorithm))
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / "iter_0000008")
    (resumed / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("4\n")
    shutil.rmtree(resumed / "hf")
    text = finish(start(files, resumed, f"model.dtype={dtype}", algorithm=algorithm))
    assert "iter_0000004: weights, optimizer, schedule, random states, data position (32 samples)" in text
    assert_bit_equal(resumed, whole)


@pytest.mark.long
def test_resume_refuses_other_data(files, whole_run):
    out = files / "other"
    shutil.copytree(whole_run, out)
    text = finish(start(files, out, f"data.train={files / 'other.jsonl'}"), 2)
    assert "other.jsonl is other data: " in text


@pytest.mark.parametrize(("on_failure", "status"), and_long([], [("continue", 0), ("stop", 3)]))
def test_failed_save_continues_or_stops_as_configured(files, on_failure, status):
    out = files / f"failing_{on_failure}"
    out.mkdir()
    (out / "run.json").write_text(RunIdentity("sft", {}, "", "", {}).to_json())
    (out / "checkpoints").write_text("a file where the folder should be")
    arguments = ("checkpoint.resume=none", f"checkpoint.on_failure={on_failure}", "trainer.max_steps=5")
    text = finish(start(files, out, *arguments), status)
    assert "step 4: the checkpoint could not be written: rank 0: " in text
    assert len(losses(out)) == (4 if on_failure == "stop" else 5)


def plain_megatron_weights(iteration, model_path):
    """The model part of a checkpoint, loaded by Megatron-Core alone into its own GPTModel."""
    from mcore_rl.config import ModelConfig, ParallelConfig
    from mcore_rl.models.megatron.families import family_of
    from mcore_rl.models.megatron.model.hf_config import load_hf_config, transformer_config
    from mcore_rl.models.megatron.parallel_state import destroy_parallel, initialize_parallel, seed_everything
    from mcore_rl.models.megatron.weight_mapping import padded_vocab_size

    parallel = ParallelConfig()
    initialize_parallel(parallel)
    seed_everything(0)
    from megatron.core import dist_checkpointing
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    hf = load_hf_config(model_path)
    model = GPTModel(
        transformer_config(family_of(hf), ModelConfig(path=model_path), parallel),
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        padded_vocab_size(hf.vocab_size, 1),
        hf.max_position_embeddings,
        position_embedding_type="rope",
    )
    model.load_state_dict(dist_checkpointing.load({"model": model.sharded_state_dict()}, str(iteration))["model"])
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    destroy_parallel()
    return weights


def test_megatron_loads_the_model_part_without_this_package(files, whole_run):
    iteration = whole_run / "checkpoints" / "iter_0000008"
    weights = run_processes(plain_megatron_weights, iteration, files / "model", world_size=1)[0]
    exported = load_file(whole_run / "hf" / "model.safetensors")
    pairs = {
        "decoder.final_layernorm.weight": "model.norm.weight",
        "decoder.layers.1.mlp.linear_fc2.weight": "model.layers.1.mlp.down_proj.weight",
        "decoder.layers.0.input_layernorm.weight": "model.layers.0.input_layernorm.weight",
    }
    for name, hf_name in pairs.items():
        assert torch.equal(weights[name], exported[hf_name]), name
    assert torch.equal(weights["output_layer.weight"][:250], exported["lm_head.weight"])

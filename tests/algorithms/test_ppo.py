"""Tests of the PPO program: output, resume, errors, export, other layouts, and rising rewards."""

import json
import shutil

import pytest
import torch
import yaml
from float32 import approx32_after_updates
from programs import ROOT, comparable, metrics_of, run
from safetensors.torch import load_file
from small_models import and_long, make_model
from transformers import AutoModelForSequenceClassification

PROMPTS = [{"prompt": f"say {letter}", "answer": letter} for letter in "abcdefghij" * 2]
JUDGES = """\
from mcore_rl.environments.interfaces import Step
def count(log, record):
    return sum(c in 'aeiou' for c in log[-1]['content']) / 4
def each_token(log, record, response_ids):
    return Step(count(log, record), token_rewards=[(t % 5) / 8 for t in response_ids])
def too_few(log, record, response_ids):
    return Step(token_rewards=[1.0] * (len(response_ids) + 1)) if response_ids else 0.0
def equal(log, record):
    return 0.5
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("ppo")
    make_model("llama", root / "model", initializer_range=0.05)
    (root / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    (root / "token_judges.py").write_text(JUDGES)
    config = {
        "output_dir": "set below",
        "model": {"path": str(root / "model")},
        "data": {"train": str(root / "prompts.jsonl"), "max_sequence_length": 40},
        # A large epsilon: Adam would blow rounding in near-zero gradients up to a whole step.
        "optimizer": {"lr": 3e-3, "schedule": "constant", "adam_eps": 1e-4},
        "trainer": {"max_steps": 4},
        "checkpoint": {"save_interval": 2},
        "ppo": {
            "num_prompts_per_step": 12,
            "num_generations_per_prompt": 2,
            "max_new_tokens": 8,
            "num_updates_per_rollout": 2,
        },
        "critic": {
            "pretraining_steps": 1,
            "export_hf": True,
            "optimizer": {"lr": 1e-2, "adam_eps": 1e-4, "warmup_steps": 2},
        },
        "loss": {"reference_policy_kl_penalty": 0.01, "use_kl_in_reward": True},
        "environment": {"name": "function", "function": "token_judges:each_token", "num_workers": 1},
    }
    (root / "ppo.yaml").write_text(yaml.safe_dump(config))
    return root


@pytest.fixture(autouse=True)
def judges_can_be_imported(request, monkeypatch):
    if "files" in request.fixturenames:
        monkeypatch.setenv("PYTHONPATH", str(request.getfixturevalue("files")))


def train(files, name, *arguments, **options):
    return run("train_ppo.py", files / "ppo.yaml", f"output_dir={files / name}", *arguments, **options)


@pytest.fixture(scope="module")
def whole_run(files):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(files))
        process = train(files, "whole", "--record", files / "recording.jsonl")
    return process, files / "whole"


def test_a_run_writes_what_it_did(files, whole_run):
    process, out = whole_run
    metrics = metrics_of(out)
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    of_critic = {"value_loss", "value_clip_fraction", "values_mean", "returns_mean", "returns_std",
                 "explained_variance", "critic_grad_norm", "critic_lr", "critic_seconds"}  # fmt: skip
    assert all(of_critic <= set(line) for line in metrics)
    assert "probs_ratio" not in metrics[0], "the policy is not trained while the critic is pretrained"
    assert {"probs_ratio", "grad_norm", "kl_penalty"} <= set(metrics[1])
    assert metrics[1]["token_mult_prob_error"] == pytest.approx(1, abs=1e-5)
    assert metrics[0]["values_mean"] == 0 and metrics[0]["explained_variance"] == 0, "its head begins at zero"
    assert metrics[1]["values_mean"] != 0
    assert "critic: " in process.stdout_text
    recorded = json.loads((files / "recording.jsonl").read_text().splitlines()[0])["rollouts"]
    returns = [[reward for _, reward in rollout["token_rewards"]] for rollout in recorded]
    assert [sum(rewards) for rewards in returns] == pytest.approx([rollout["reward"] for rollout in recorded])
    own = [rollout["input_ids"][position] % 5 / 8 for rollout in recorded for position, _ in rollout["token_rewards"]]
    assert len(set(own)) > 1


def test_the_critic_is_a_sequence_classifier(whole_run):
    model = AutoModelForSequenceClassification.from_pretrained(whole_run[1] / "critic")
    assert model.config.num_labels == 1 and model.score.weight.any()


@pytest.mark.long
def test_resume_is_bit_for_bit(files, whole_run):
    out = files / "resumed"
    shutil.copytree(whole_run[1], out)
    shutil.rmtree(out / "checkpoints" / "iter_0000004")
    (out / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2\n")
    process = train(files, "resumed")
    assert "weights, optimizer, schedule, critic, random states" in process.stdout_text
    assert comparable(out) == comparable(whole_run[1])
    for part in ("hf", "critic"):
        ours, theirs = (load_file(directory / part / "model.safetensors") for directory in (out, whole_run[1]))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("layout", and_long([], ["tensor"], ["pipeline", "context", "data"]))
def test_the_same_run_under_other_layouts(files, whole_run, layout):
    """From the start, and from the checkpoint that one process wrote; the critic on the host while it is not used."""
    sizes = {name: f"parallel.{name}_model_parallel_size=2" for name in ("tensor", "pipeline")}
    size = {**sizes, "context": "parallel.context_parallel_size=2", "data": "seed=0"}[layout]
    out = files / f"two_{layout}"
    options = (size, "checkpoint.export_hf=false", "critic.export_hf=false", "critic.offload=true")
    train(files, out.name, *options, processes=2)
    shutil.copytree(whole_run[1], files / f"resumed_{layout}")
    shutil.rmtree(files / f"resumed_{layout}" / "checkpoints" / "iter_0000004")
    (files / f"resumed_{layout}" / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2\n")
    train(files, f"resumed_{layout}", *options, processes=2)
    for directory in (out, files / f"resumed_{layout}"):
        for ours, theirs in zip(comparable(directory), comparable(whole_run[1]), strict=True):
            for name in theirs:
                assert ours[name] == pytest.approx(theirs[name], rel=2e-3, abs=2e-4), name


@pytest.mark.long
def test_a_critic_of_another_family_beside_adapters(files):
    """A prompt's responses share it in a pack; the critic begins as another model, on two replicas, and is resumed."""
    make_model("qwen2", files / "small", initializer_range=0.05)
    options = (
        f"critic.path={files / 'small'}", "model.lora.rank=4", "batch.share_prefixes=true", "batch.min_shared_tokens=2",
        "ppo.mask_truncated=true", "ppo.whiten_advantages=false", "critic.value_clip=null", "critic.offload=true",
        "ppo.stop_strings=[a, e, i, o, u, s, t, n]",  # so that few responses are truncated
    )  # fmt: skip
    train(files, "adapters", *options, processes=2)
    metrics = metrics_of(files / "adapters")
    assert metrics[-1]["value_loss"] < metrics[0]["value_loss"]
    assert (files / "adapters" / "adapter" / "adapter_model.safetensors").is_file()
    assert json.loads((files / "adapters" / "critic" / "config.json").read_text())["model_type"] == "qwen2"
    out = files / "adapters_resumed"
    shutil.copytree(files / "adapters", out)
    shutil.rmtree(out / "checkpoints" / "iter_0000004")
    (out / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2\n")
    train(files, "adapters_resumed", *options, processes=2)
    assert comparable(out) == comparable(files / "adapters")


@pytest.mark.long
def test_a_mixtures_critic_is_a_mixture(files):
    make_model("mixtral", files / "mixture", initializer_range=0.05)
    options = (f"model.path={files / 'mixture'}", "model.moe_router_replay=true", "model.moe_aux_loss_coeff=0.01")
    layout = "parallel.expert_model_parallel_size=2"
    for name, more, processes in (("one", (), 1), ("two", (layout,), 2)):
        train(files, f"mixture_{name}", *options, *more, "trainer.max_steps=3", processes=processes)
    of_one, of_two = comparable(files / "mixture_one"), comparable(files / "mixture_two")
    assert any(name.startswith("critic_moe_") for name in of_one[0])
    for ours, theirs in zip(of_two, of_one, strict=True):
        for name in ("value_loss", "explained_variance", "critic_grad_norm", "reward_mean"):
            assert ours[name] == pytest.approx(theirs[name], rel=2e-3, abs=2e-4), name


@pytest.mark.long
def test_replay_trains_on_what_was_recorded(files, whole_run):
    train(files, "replayed", "--replay", files / "recording.jsonl")
    for ours, theirs in zip(comparable(files / "replayed"), comparable(whole_run[1]), strict=True):
        for name in ("reward_mean", "value_loss", "explained_variance", "critic_grad_norm"):
            assert ours[name] == approx32_after_updates(theirs[name]), name
    hotter = train(files, "hotter", "--replay", files / "recording.jsonl", "ppo.temperature=2", check=False)
    assert "recording.jsonl: was sampled with ppo.temperature=1.0, but this run has 2.0" in hotter.stderr_text


@pytest.mark.long
def test_a_checkpoint_without_a_critic_is_told(files, whole_run):
    """Converted weights have neither optimizer nor critic."""
    run("convert", "from-hf", files / "model", files / "converted")
    resumed = (f"checkpoint.resume={files / 'converted'}", "trainer.max_steps=2")
    refused = train(files, "lacking", *resumed, check=False)
    assert refused.returncode == 2
    assert "lacks optimizer, schedule, critic, random states, data position" in refused.stderr_text
    partial = train(files, "lacking", *resumed, "checkpoint.allow_partial=true")
    assert "the checkpoint lacks these, which start anew: optimizer, schedule, critic" in partial.stdout_text


@pytest.mark.long
def test_equal_rewards_still_teach_the_critic(files):
    """Groups are not compared; samples with invalid token rewards fail."""
    train(
        files, "equal", "environment.function=token_judges:equal", "trainer.max_steps=2", "checkpoint.export_hf=false",
        "critic.export_hf=false", "loss={name: dppo_tv}",
    )  # fmt: skip
    metrics = metrics_of(files / "equal")
    assert [line["skipped_update"] for line in metrics] == [0, 0]
    assert metrics[1]["value_loss"] < metrics[0]["value_loss"]


@pytest.mark.long
def test_rewards_of_tokens_that_there_are_not_fail_their_samples(files):
    process = train(
        files, "few", "environment.function=token_judges:too_few", "trainer.max_steps=2", check=False,
    )  # fmt: skip
    assert process.returncode == 3
    assert "token_rewards for a response of" in process.stderr_text


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["critic.pretraining_steps=4"], "critic.pretraining_steps=4: must be less than the steps of the run (4)"),
        (["critic.path=/no/where"], "critic.path: /no/where does not exist"),
        (["ppo.gamma=1.1"], "ppo.gamma: "),
        (["ppo.gae_lambda=-0.1"], "ppo.gae_lambda: "),
        (["critic.value_clip=0"], "critic.value_clip: "),
        (["critic.optimizer.lr=2"], "critic.optimizer.lr: "),
        (["ppo.advantage_estimator=rloo"], "unknown key ppo.advantage_estimator"),
        (["grpo.max_new_tokens=3"], "unknown key grpo"),
        (["ppo={num_prompts_per_step: 4, dynamic_sampling_rounds: 2}"], "ppo.dynamic_sampling_rounds: compares"),
        (["ppo.max_new_tokens=40"], "ppo.max_new_tokens: must be less than data.max_sequence_length"),
        (["checkpoint.export_hf=false"], "critic.export_hf: checkpoint.export_hf=false exports nothing"),
        (["model.head=reward"], "model.head: only train_rm.py trains a model with head=reward"),
    ],
)
def test_what_is_wrong_is_told_before_anything_begins(files, overrides, message):
    process = train(files, "wrong", *overrides, check=False)
    assert process.returncode == 2, process.stderr_text
    assert message in process.stderr_text
    assert not (files / "wrong").exists()


@pytest.mark.long
def test_a_critic_of_another_vocabulary(files):
    path = files / "other"
    if not path.exists():
        shutil.copytree(files / "model", path)
        tokenizer = json.loads((path / "tokenizer.json").read_text())
        vocab = tokenizer["model"]["vocab"]
        a, b = list(vocab)[-2:]
        vocab[a], vocab[b] = vocab[b], vocab[a]
        (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    process = train(files, "wrong", f"critic.path={path}", check=False)
    assert process.returncode == 2
    assert f"critic.path: {path} has another vocabulary than model.path" in process.stderr_text


@pytest.mark.long
def test_a_dry_run_estimates_the_memory_of_both_models(files):
    for options in ((), ("critic.offload=true",)):
        told = train(files, "dry", *options, "--dry-run").stdout_text
        assert "memory of rank 0 at the peak of a step, on a GPU: 0.0" in told
    assert not (files / "dry").exists()


@pytest.mark.exhaustive
def test_ppo_teaches_what_sft_taught_badly(tmp_path):
    """The demo: held-out accuracy rises by at least 30 points, and the critic distinguishes prompts."""
    run("make_arithmetic_data.py", tmp_path / "data")
    sft, ppo = (ROOT / "configs" / name for name in ("sft_arithmetic.yaml", "ppo_cpu.yaml"))
    taught = [f"output_dir={tmp_path / 'sft'}", f"model.path={tmp_path / 'data' / 'model'}"]
    run("train_sft.py", sft, *taught, f"data.train={tmp_path / 'data' / 'sft_train.jsonl'}", processes=2)
    data = [f"data.{part}={tmp_path / 'data' / part}.jsonl" for part in ("train", "validation")]
    out = tmp_path / "ppo"
    run("train_ppo.py", ppo, f"output_dir={out}", f"model.path={tmp_path / 'sft' / 'hf'}", *data, processes=2)
    lines = metrics_of(out)
    before, after = (lines[step]["validation_reward_positive_fraction"] for step in (0, -1))
    print(f"held-out accuracy {before} → {after}")
    assert after - before >= 0.3
    assert sum(line["explained_variance"] for line in lines[-10:]) / 10 > 0.05

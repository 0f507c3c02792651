"""Tests of GRPO: an update equals plain PyTorch under every layout; runs resume, record and replay; rewards rise."""

import itertools
import json
import math
import re
import shutil

import pytest
import torch
import torch.nn.functional as F
import yaml
from float32 import FORMULA, FORWARD, approx32, approx32_after_updates
from layout_cases import make_config
from policy_loss_cases import make_batch
from programs import comparable, metrics_of, run
from safetensors.torch import load_file
from small_models import and_long, make_model
from transformers import AutoModelForCausalLM

from mcore_rl.algorithms.loss_functions import ClippedPGLossFn
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.losses.policy_options import ClippedPGOptions
from mcore_rl.testing.layout_check import ParallelLayout
from mcore_rl.testing.processes import run_processes

TEMPERATURE, KL_PENALTY, STEPS = 2.9, 0.05, 2


def megatron_update(config, options):
    from mcore_rl.models.megatron.training.optimizer import gather_gradients
    from mcore_rl.models.megatron.weights.conversion import export_hf_weights
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy
    from mcore_rl.testing.layout_check import _main_grad

    policy, data = MegatronPolicy(config, total_steps=10, keep_reference=True), make_batch()
    data["reference_policy_logprobs"] = policy.get_reference_policy_logprobs(data, temperature=TEMPERATURE)[
        "reference_logprobs"
    ]
    data["prev_logprobs"] = policy.get_logprobs(data, temperature=TEMPERATURE)["logprobs"]
    loss_fn, metrics = ClippedPGLossFn(options), []
    for _ in range(STEPS):
        metrics.append(policy.train(data, loss_fn, temperature=TEMPERATURE))
    policy.compute_gradients(data, loss_fn, TEMPERATURE)
    gather_gradients(policy.chunks)
    gradients = dict(export_hf_weights(policy.model, _main_grad))
    weights = dict(export_hf_weights(policy.model))
    policy.shutdown()
    return metrics, gradients, weights


def plain_logprobs(model, data):
    rows = []
    for ids, length in zip(data["input_ids"], data["input_lengths"].tolist(), strict=True):
        logits = model(ids[None, :length]).logits[0, :-1].double() / TEMPERATURE
        chosen = F.log_softmax(logits, -1).gather(1, ids[1:length, None])[:, 0]
        rows.append(F.pad(chosen, (1, ids.shape[0] - length)))
    return torch.stack(rows)


def plain_update(config):
    """The same with transformers and torch.optim: PPO's clipped objective and k3, both as means over tokens."""
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.optimizer.lr, eps=config.optimizer.adam_eps, weight_decay=0
    )
    data, metrics = make_batch(), []
    mask = data["token_mask"].double()
    with torch.no_grad():
        first = plain_logprobs(model, data)
    for step in range(STEPS + 1):
        optimizer.zero_grad()
        current = plain_logprobs(model, data)
        ratio = (current - first).exp()
        clipped = ratio.clamp(0.8, 1.2)
        actor = -torch.minimum(ratio * data["advantages"], clipped * data["advantages"])
        log_ratio = first - current
        kl = ((log_ratio.exp() - 1 - log_ratio) * mask).sum() / mask.sum()
        loss = (actor * mask).sum() / mask.sum() + KL_PENALTY * kl
        loss.backward()
        if step == STEPS:
            break
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_grad)
        metrics.append({"loss": loss.item(), "kl_penalty": kl.item(), "grad_norm": norm.item()})
        optimizer.step()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return metrics, gradients, {name: p.detach() for name, p in model.named_parameters()}


LOSS = {"reference_policy_kl_penalty": KL_PENALTY, "ratio_clip_min": 0.2, "ratio_clip_max": 0.2}


@pytest.fixture(scope="module")
def plain(model_of):
    return plain_update(make_config(model_of("llama")))


def assert_same(ours, theirs):
    for a, b in zip(ours[0], theirs[0], strict=True):
        for name in b:
            assert a[name] == approx32(b[name], FORWARD), name
    for kind in (1, 2):
        for name, tensor in theirs[kind].items():
            scale = tensor.abs().max()
            torch.testing.assert_close(ours[kind][name] / scale, tensor / scale, rtol=1e-4, atol=2e-5, msg=name)


LAYOUTS = and_long(
    [ParallelLayout(), ParallelLayout(pp=2), ParallelLayout(dp=2, packing=False), ParallelLayout(tp=2, cp=2, sp=True)],
    [ParallelLayout(packing=False), ParallelLayout(tp=2), ParallelLayout(cp=2)],
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_update_equals_plain_pytorch(layout, plain, model_of):
    config = layout.apply(make_config(model_of("llama")))
    options = ClippedPGOptions(**LOSS)
    assert_same(run_processes(megatron_update, config, options, world_size=layout.world_size)[0], plain)


def test_on_policy_ratio():
    """prev = current: the ratio is 1, its gradient that of the log-probabilities."""
    data = make_batch()
    shape = (data["input_ids"].shape[0], data["input_ids"].shape[1] - 1)
    current = (-3 * torch.rand(shape, generator=torch.Generator().manual_seed(0))).requires_grad_()
    counts = data["sample_mask"].sum(), data["token_mask"][:, 1:].sum()
    forced = ClippedPGLossFn(ClippedPGOptions(force_on_policy_ratio=True))
    loss, metrics = forced.from_logprobs(current, data, *counts)
    (gradient,) = torch.autograd.grad(loss, current)
    expected = -data["advantages"][:, 1:] * data["token_mask"][:, 1:] / counts[1]
    torch.testing.assert_close(gradient, expected)
    assert metrics["probs_ratio"] == pytest.approx(1)
    mask = data["token_mask"][:, 1:]
    mismatch = ((data["generation_logprobs"][:, 1:] - current).abs().exp() * mask).sum() / counts[1]
    assert metrics["token_mult_prob_error"].item() == pytest.approx(mismatch.item(), rel=1e-5)


# ------------------------------------------------------------------ the script


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Write prompts whose best responses start with a letter of the prompt, and a judge for them."""
    root = tmp_path_factory.mktemp("grpo")
    make_model("llama", root / "model", initializer_range=0.05)
    prompts = [{"prompt": f"say {letter}", "answer": letter} for letter in "abcdefghij" * 2]
    (root / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    (root / "judging.py").write_text(
        "from mcore_rl.environments.interfaces import Step\n"
        "def count(log, record):\n"
        "    return sum(c in 'aeiou' for c in log[-1]['content']) / 4\n"
        "def twice(log, record):\n"
        "    last = len(log) >= 4\n"
        "    return Step(count(log, record), done=last, observation=None if last else ' more ')\n"
        "def sometimes(log, record):\n"
        "    return count(log, record) / ('a' in record['answer'] or record['answer'] > 'd')\n"
        "def later_never(log, record):\n"
        "    print('a judge speaks')\n"
        "    return log[-1]['content'] == record['answer'] or {}['nothing']\n"
        "def nothing(log, record):\n"
        "    return 0\n"
        "async def tool(log, record):\n"
        "    first = len(log) == 2\n"
        "    called = f' {len(log[-1][\"content\"])} ' if first else None\n"
        "    return Step(count(log, record), done=not first, observation=called)\n"
        "def starts(prompts, completions, answer, **columns):\n"
        "    return [float(text.startswith(a)) if a < 'e' else None for text, a in zip(completions, answer)]\n"
    )
    config = {
        "output_dir": "set below",
        "model": {"path": str(root / "model")},
        "data": {"train": str(root / "prompts.jsonl"), "max_sequence_length": 40},
        "optimizer": {"lr": 3e-3, "schedule": "constant"},
        "trainer": {"max_steps": 4},
        "checkpoint": {"save_interval": 2},
        "grpo": {"num_prompts_per_step": 6, "num_generations_per_prompt": 4, "max_new_tokens": 8},
        "loss": {"reference_policy_kl_penalty": 0.01},
        "environment": {"name": "function", "function": "judging:count", "num_workers": 1},
    }
    (root / "grpo.yaml").write_text(yaml.safe_dump(config))
    return root


@pytest.fixture(autouse=True)
def judges_can_be_imported(request, monkeypatch):
    if "files" in request.fixturenames:
        monkeypatch.setenv("PYTHONPATH", str(request.getfixturevalue("files")))


def train(files, name, *arguments, **options):
    return run("train_grpo.py", files / "grpo.yaml", f"output_dir={files / name}", *arguments, **options)


@pytest.fixture(scope="module")
def whole_run(files):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(files))
        process = train(files, "whole", "--record", files / "recording.jsonl")
    return process, files / "whole"


def test_a_run_writes_what_it_did(whole_run):
    process, out = whole_run
    metrics = metrics_of(out)
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    first = metrics[0]
    assert first["token_mult_prob_error"] == pytest.approx(1, abs=1e-5)
    assert first["kl_penalty"] == approx32(0, FORMULA)
    assert metrics[-1]["kl_penalty"] > 0
    expected = {"reward_mean", "reward_std", "reward_positive_fraction",
                "response_length_mean", "approx_entropy", "clip_fraction_low",
                "clip_fraction_high", "probs_ratio", "generation_tokens_per_second", "training_tokens_per_second",
                "logprobs_tokens_per_second"}  # fmt: skip
    assert expected <= set(first)
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert {sample["step"] for sample in samples} == {1, 2, 3, 4}
    assert samples[0]["messages"][-1]["role"] == "assistant"
    assert "Hugging Face model" in process.stdout_text


@pytest.mark.long
def test_resume_is_bit_for_bit(files, whole_run):
    out = files / "resumed"
    shutil.copytree(whole_run[1], out)
    shutil.rmtree(out / "checkpoints" / "iter_0000004")
    (out / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2\n")
    process = train(files, "resumed")
    assert "resumed from" in process.stdout_text
    assert comparable(out) == comparable(whole_run[1])
    assert (out / "samples.jsonl").read_text() == (whole_run[1] / "samples.jsonl").read_text()
    ours, theirs = (load_file(directory / "hf" / "model.safetensors") for directory in (out, whole_run[1]))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    "layout",
    and_long(
        [], ["tensor_model_parallel_size=2", "seed"], ["pipeline_model_parallel_size=2", "context_parallel_size=2"]
    ),
)
def test_the_same_run_under_other_layouts(files, whole_run, layout):
    argument = f"parallel.{layout}" if "=" in layout else "seed=0"  # the last: two data-parallel ranks
    train(files, f"two_{layout}", argument, "checkpoint.export_hf=false", processes=2)
    for ours, theirs in zip(comparable(files / f"two_{layout}"), comparable(whole_run[1]), strict=True):
        for name in theirs:
            assert ours[name] == pytest.approx(theirs[name], rel=2e-3, abs=2e-4), name


@pytest.mark.long
def test_replay_trains_on_what_was_recorded(files, whole_run):
    lines = [json.loads(line) for line in (files / "recording.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert len({line["weights"] for line in lines}) == 4
    assert lines[0]["sampling"]["temperature"] == 1.0
    out = files / "replayed"
    train(files, "replayed", "--replay", files / "recording.jsonl")
    for ours, theirs in zip(comparable(out), comparable(whole_run[1]), strict=True):
        for name in ("reward_mean", "loss", "kl_penalty", "grad_norm", "response_length_mean"):
            assert ours[name] == approx32_after_updates(theirs[name]), name
    too_long = train(files, "longer", "--replay", files / "recording.jsonl", "trainer.max_steps=9", check=False)
    assert too_long.returncode == 2
    assert "lacks step 5, but this run has 9 steps" in too_long.stderr_text
    hotter = train(files, "hotter", "--replay", files / "recording.jsonl", "grpo.temperature=2", check=False)
    assert "recording.jsonl: was sampled with grpo.temperature=1.0, but this run has 2.0" in hotter.stderr_text


@pytest.mark.long
def test_several_turns_updates_and_dynamic_sampling(files):
    process = train(
        files, "several", "environment.function=judging:twice", "environment.max_turns=2", "trainer.max_steps=2",
        "grpo.num_updates_per_rollout=2", "grpo.dynamic_sampling_rounds=3", "grpo.overlong_cache_length=4",
        "grpo.advantage_estimator=optimal_token_baseline", "checkpoint.export_hf=false",
        "--record", files / "several.jsonl",
    )  # fmt: skip
    assert process.returncode == 0
    rollout = json.loads((files / "several.jsonl").read_text().splitlines()[0])["rollouts"][0]
    roles = [message["role"] for message in rollout["message_log"]]
    assert roles == ["user", "assistant", "user", "assistant"]
    text = rollout["token_mask"]
    assert sum(a != b for a, b in itertools.pairwise(text)) == 3  # prompt, response, observation, response
    assert all((logprob == 0) or masked for logprob, masked in zip(rollout["logprobs"], text, strict=True))
    first = metrics_of(files / "several")[0]
    assert first["turns_mean"] == 2
    spent = [first[f"{name}_seconds"] for name in ("generation", "judging", "logprobs", "training")]
    assert all(seconds > 0 for seconds in spent) and sum(spent) < first["step_seconds"]


def test_slow_judging_is_told_once_with_its_keys():
    from types import SimpleNamespace

    from mcore_rl.algorithms.grpo import GRPOTrainer

    told, environment = [], SimpleNamespace(name="function", batch_size=1, num_workers=3)
    trainer = SimpleNamespace(config=SimpleNamespace(environment=environment), is_advised=False, say=told.append)
    for seconds, total in ((0.9, 1.0), (2.0, 9.0), (4.0, 9.0), (4.0, 9.0)):
        GRPOTrainer._advise_on_judging(trainer, seconds, total)
    assert told == [
        "judging took 4.0 of the 9.0 s of a step: one sample a call in environment.num_workers=3 processes; "
        "environment.batch_size=16 gives a function up to 16 samples a call"
    ]
    environment.batch_size, trainer.is_advised = 8, False
    GRPOTrainer._advise_on_judging(trainer, 4.0, 9.0)
    assert len(told) == 1


@pytest.mark.long
def test_a_tool_between_turns_and_weighted_rewards_on_two_replicas(files):
    """The transcript is in samples.jsonl; each reward's mean in the metrics; the same as one replica's."""
    start = "{name: trl, function: 'judging:starts', weight: 0.3}"
    rewards = f"{{vowels: {{name: function, function: 'judging:tool'}}, start: {start}}}"
    options = (
        f"environment={{name: weighted, max_turns: 2, batch_size: 3, rewards: {rewards}}}", "trainer.max_steps=2",
        "grpo.num_logged_samples=24", "checkpoint.export_hf=false", "grpo.advantage_estimator=gdpo",
        "loss={name: sapo, observation_nll_weight: 0.05, reference_policy_kl_penalty: 0.01}",
    )  # fmt: skip
    train(files, "tools", *options)
    train(files, "tools_of_two", *options, processes=2)
    samples = [json.loads(line) for line in (files / "tools" / "samples.jsonl").read_text().splitlines()]
    for sample in samples:
        assert [message["role"] for message in sample["messages"]] == ["user", "assistant", "user", "assistant"]
        first, called, last = (message["content"] for message in sample["messages"][1:])
        assert called == f" {len(first)} "
        assert sample["rewards"]["vowels"] == pytest.approx(sum(c in "aeiou" for c in first + last) / 4)
        weighted = sample["rewards"]["vowels"] + 0.3 * sample["rewards"].get("start", 0.0)
        assert sample["reward"] == pytest.approx(weighted)
    applies = [sample["rewards"]["start"] for sample in samples if "start" in sample["rewards"]]
    assert 0 < len(applies) < len(samples)
    for step, line in enumerate(metrics_of(files / "tools"), start=1):
        assert line["observation_nll_loss"] > 1
        own = [sample["rewards"] for sample in samples if sample["step"] == step]
        for name in ("vowels", "start"):
            values = [rewards[name] for rewards in own if name in rewards]
            if values:
                assert line[f"reward_{name}_mean"] == pytest.approx(sum(values) / len(values))
    for ours, theirs in zip(comparable(files / "tools"), comparable(files / "tools_of_two"), strict=True):
        assert all(ours[name] == pytest.approx(theirs[name], rel=2e-3, abs=2e-4) for name in theirs)


@pytest.mark.long
def test_what_cannot_be_judged_is_told_and_stops_nothing(files):
    process = train(files, "failing", "environment.function=judging:sometimes", "trainer.max_steps=1")
    assert "samples could not be judged and count as failed; first: ZeroDivisionError" in process.stdout_text
    assert 0 < metrics_of(files / "failing")[0]["failed_fraction"] < 1


def test_a_sampler_that_disagrees_stops_the_first_step(files):
    from mcore_rl.algorithms.grpo import GRPOTrainer
    from mcore_rl.config import GRPOConfig, load_config
    from mcore_rl.errors import TrainingError

    run_ = object.__new__(GRPOTrainer)
    changes = [f"output_dir={files}", "model.dtype=float32"]
    run_.config = load_config(GRPOConfig, files / "grpo.yaml", changes)
    agreeing = {"logprob_error": 1e-4, "kl_penalty": 1e-6, "token_mult_prob_error": 1.0001, "probs_ratio": 0.9999}
    run_._check_first(agreeing)
    for name, value in (("kl_penalty", 0.1), ("logprob_error", 0.2), ("probs_ratio", 0.9), ("kl_penalty", math.nan)):
        with pytest.raises(TrainingError, match=f"step 1: before any update {name} must be"):
            run_._check_first({**agreeing, name: value})
    run_.config = load_config(GRPOConfig, files / "grpo.yaml", [*changes, "generation.first_step_tolerance=0.15"])
    run_._check_first({**agreeing, "kl_penalty": 0.1})
    with pytest.raises(TrainingError, match=r"generation\.first_step_tolerance=0\.15"):
        run_._check_first({**agreeing, "kl_penalty": 0.2})


@pytest.mark.parametrize(("wrong", "ends"), [(1, False), (100_000, True), (40_000, True)])
def test_only_tokens_in_number_end_the_first_step(wrong, ends, files):
    """In bfloat16, one token of 100,000 that differs by 10 nats causes a warning; many such tokens are an error."""
    from mcore_rl.algorithms.grpo import GRPOTrainer
    from mcore_rl.config import GRPOConfig, load_config
    from mcore_rl.errors import TrainingError

    count, said = 100_000, []
    data = {name: torch.zeros(1, count + 1) for name in ("advantages", "prev_logprobs", "generation_logprobs")}
    data["generation_logprobs"][:, 1 : wrong + 1] = -10.0
    data |= {"input_ids": torch.zeros(1, count + 1).long(), "token_mask": torch.ones(1, count + 1)}
    data |= {"sample_mask": torch.ones(1)}
    loss_fn = ClippedPGLossFn(ClippedPGOptions(reference_policy_kl_penalty=0.0))
    toks, seqs = torch.tensor(float(count)), torch.tensor(1.0)
    _, metrics = loss_fn.from_logprobs(torch.zeros(1, count), BatchedDataDict(data), seqs, toks)
    run_ = object.__new__(GRPOTrainer)
    run_.say = said.append
    changes = [f"output_dir={files}", "model.dtype=bfloat16", "loss.reference_policy_kl_penalty=0"]
    run_.config = load_config(GRPOConfig, files / "grpo.yaml", changes)
    if ends:
        with pytest.raises(TrainingError, match="step 1: before any update logprob_error must be 0"):
            run_._check_first({k: float(v) for k, v in metrics.items()})
    else:
        run_._check_first({k: float(v) for k, v in metrics.items()})
        assert len(said) == 1 and "differ much in few tokens: token_mult_prob_error is 1.2" in said[0]


@pytest.mark.long
def test_no_signal_is_no_update(files):
    process = train(
        files, "nothing", "environment.function=judging:nothing", "trainer.max_steps=2",
        "loss.reference_policy_kl_penalty=0",
    )  # fmt: skip
    assert process.stdout_text.count("there is nothing to learn from, no update") == 2
    assert [line["skipped_update"] for line in metrics_of(files / "nothing")] == [1, 1]
    ours, theirs = (
        load_file(files / "nothing" / "hf" / "model.safetensors"),
        load_file(files / "model" / "model.safetensors"),
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.long
def test_a_run_in_which_nothing_can_be_judged_ends(files):
    arguments = ("environment.function=judging:later_never", "trainer.max_steps=9", "environment.max_failed_steps=2")
    process = train(files, "hopeless", *arguments, check=False)
    assert process.returncode == 3
    told = r"error: step \d: no sample could be judged in 2 consecutive steps; the last error: KeyError: 'nothing'\n"
    assert re.fullmatch(told, process.stderr_text)
    assert not (files / "hopeless" / "hf").exists()
    assert "a judge speaks" in (files / "hopeless" / "judge.log").read_text()
    assert "a judge speaks" not in process.stdout_text


@pytest.mark.long
@pytest.mark.parametrize("override", ["seed=0", "grpo.max_new_tokens=null"])
def test_every_layout_is_verified(override, files):
    verified = run("layouts", files / "grpo.yaml", override, "--algorithm", "grpo", "--layouts", "tp=2", "cp=1,2")
    assert [line.split("  ")[0] for line in verified.stdout_text.splitlines()[2:]] == ["tp2", "tp2 cp2"]
    assert "24 sequences" in verified.stdout_text


# ------------------------------------------------------------------ it learns


@pytest.mark.exhaustive  # minutes; of PPO, which has the same step, the long tests show it
def test_grpo_teaches_what_sft_taught_badly(tmp_path):
    """The demo: held-out accuracy rises by at least 30 points, at TP2 and at DP2 alike."""
    from programs import ROOT

    run("make_arithmetic_data.py", tmp_path / "data")
    sft, grpo = (ROOT / "configs" / name for name in ("sft_arithmetic.yaml", "grpo_cpu.yaml"))
    taught = [f"output_dir={tmp_path / 'sft'}", f"model.path={tmp_path / 'data' / 'model'}"]
    run("train_sft.py", sft, *taught, f"data.train={tmp_path / 'data' / 'sft_train.jsonl'}", processes=2)
    for name, layout in (("tp2", "parallel.tensor_model_parallel_size=2"), ("dp2", "seed=0")):
        out = tmp_path / name
        data = [f"data.{part}={tmp_path / 'data' / part}.jsonl" for part in ("train", "validation")]
        process = run(
            "train_grpo.py", grpo, f"output_dir={out}", f"model.path={tmp_path / 'sft' / 'hf'}", *data, layout,
            processes=2,
        )  # fmt: skip
        assert "step 0  validation: reward_mean" in process.stdout_text
        before, after = (metrics_of(out)[step]["validation_reward_positive_fraction"] for step in (0, -1))
        print(f"{name}: held-out accuracy {before} → {after}")
        assert 0.2 <= before <= 0.6
        assert after >= before + 0.3
        run("report", out)
        assert "validation_reward_mean" in (out / "report.html").read_text()

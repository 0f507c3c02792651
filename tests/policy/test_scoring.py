"""Tests of reward models and top-k logits: transformers' numbers, the same under every layout."""

import json

import pytest
import torch
import torch.nn.functional as F
import yaml
from float32 import FORWARD, approx32, assert_close32, assert_updates32
from layout_cases import LR, make_config, make_data
from programs import metrics_of, run
from safetensors.torch import load_file
from small_models import and_long
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from mcore_rl.algorithms.loss_functions import BradleyTerryLoss
from mcore_rl.errors import WorkerError
from mcore_rl.testing.layout_check import ParallelLayout
from mcore_rl.testing.processes import run_processes

STEPS, CENTER, K = 3, 0.1, 7
LAYOUTS = [
    ParallelLayout(),
    ParallelLayout(packing=False),
    ParallelLayout(tp=2, sp=True),
    ParallelLayout(pp=2),
    ParallelLayout(cp=2),
    ParallelLayout(dp=2),
]


def reward_config(path, layout):
    config = make_config(path)
    return layout.apply(config.model_copy(update={"model": config.model.model_copy(update={"head": "reward"})}))


def megatron_rewards(config):
    from mcore_rl.models.megatron.weights.conversion import export_hf_weights
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2)
    metrics = [policy.train(make_data(), BradleyTerryLoss(CENTER)) for _ in range(STEPS)]
    rewards = policy.get_rewards(make_data())["rewards"]
    weights = dict(export_hf_weights(policy.model))
    policy.shutdown()
    return metrics, rewards, weights


def plain_rewards(model, data):
    hidden = [model.model(ids[None, :n]).last_hidden_state[0, -1] for ids, n in zip(
        data["input_ids"], data["input_lengths"].tolist(), strict=True)]  # fmt: skip
    return model.score(torch.stack(hidden))


@pytest.fixture(scope="module")
def plain(model_of):
    """The same steps by transformers' sequence classifier and torch.optim."""
    config = make_config(model_of("llama"))
    model = AutoModelForSequenceClassification.from_pretrained(config.model.path, num_labels=1, dtype=torch.float32)
    torch.nn.init.zeros_(model.score.weight)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.optimizer.lr, eps=config.optimizer.adam_eps, weight_decay=0
    )
    data, metrics = make_data(), []
    pairs = data["sample_mask"][::2]
    for _ in range(STEPS):
        optimizer.zero_grad()
        rewards = plain_rewards(model, data)[:, 0]
        chosen, rejected = rewards[::2], rewards[1::2]
        loss = (-F.logsigmoid(chosen - rejected) * pairs).sum() / pairs.sum()
        loss = loss + CENTER * ((chosen + rejected) ** 2 * pairs).sum() / pairs.sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_grad)
        optimizer.step()
        accuracy = ((chosen > rejected) * pairs).sum() / pairs.sum()
        metrics.append({"loss": loss.item(), "grad_norm": norm.item(), "accuracy": accuracy.item()})
    with torch.no_grad():
        return metrics, plain_rewards(model, data), {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_reward_model_equals_plain_pytorch(layout, plain, model_of):
    metrics, rewards, weights = run_processes(
        megatron_rewards, reward_config(model_of("llama"), layout), world_size=layout.world_size
    )[0]
    for ours, theirs in zip(metrics, plain[0], strict=True):
        for name in theirs:
            assert ours[name] == approx32(theirs[name], FORWARD), name
    torch.testing.assert_close(rewards, plain[1], rtol=1e-4, atol=1e-5)
    for name, tensor in plain[2].items():
        assert_updates32(weights[name], tensor, STEPS * LR, what=name)


def topk(config):
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, rows_per_unit=2)
    best = policy.get_topk_logits(make_data(), K)
    policy.shutdown()
    return best.data


@pytest.mark.parametrize("layout", and_long([ParallelLayout(tp=2, cp=2)], LAYOUTS[1:]), ids=str)
def test_topk_logits_are_transformers_own(layout, model_of):
    best = run_processes(topk, layout.apply(make_config(model_of("qwen2"))), world_size=layout.world_size)[0]
    model, data = AutoModelForCausalLM.from_pretrained(model_of("qwen2"), dtype=torch.float32), make_data()
    with torch.no_grad():
        for row, (ids, length) in enumerate(zip(data["input_ids"], data["input_lengths"].tolist(), strict=True)):
            logits = model(ids[None, :length]).logits[0]
            values, _ = logits.topk(K)
            torch.testing.assert_close(best["topk_logits"][row, :length], values, rtol=1e-5, atol=5e-5)
            at_indices = logits.gather(1, best["topk_indices"][row, :length])
            torch.testing.assert_close(at_indices, values, rtol=1e-5, atol=5e-5)
            assert not best["topk_logits"][row, length:].any()


def ask_for_what_is_not_there(config, method, *args):
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    getattr(MegatronPolicy(config, rows_per_unit=2), method)(make_data(), *args)


@pytest.mark.parametrize(
    ("head", "method", "arguments", "message"),
    [
        ("reward", "get_logprobs", (), "get_logprobs: model.head must be lm, got reward"),
        ("lm", "get_rewards", (), "get_rewards: model.head must be reward, got lm"),
        ("lm", "get_topk_logits", (0,), "k must be between 1 and 250, got 0"),
    ],
)
def test_misuse(head, method, arguments, message, model_of):
    config = make_config(model_of("llama"))
    config = config.model_copy(update={"model": config.model.model_copy(update={"head": head})})
    with pytest.raises(WorkerError, match=message):
        run_processes(ask_for_what_is_not_there, config, method, *arguments, world_size=1)


@pytest.mark.long
def test_the_script(model_of, tmp_path):
    """It learns, resumes under another layout, and writes what transformers reads as a reward model."""
    pairs = [{"prompt": f"say {i} ", "chosen": "abcd"[: 1 + i % 4], "rejected": "wxyz"[: 1 + i % 3]} for i in range(24)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    config = {
        "output_dir": str(tmp_path / "out"),
        "model": {"path": str(model_of("llama")), "head": "reward"},
        "data": {"train": str(tmp_path / "pairs.jsonl"), "max_sequence_length": 32},
        "batch": {"global_batch_size": 24},
        "optimizer": {"lr": 1e-3, "schedule": "constant"},
        "trainer": {"max_steps": 6},
        "checkpoint": {"save_interval": 3},
    }
    (tmp_path / "rm.yaml").write_text(yaml.safe_dump(config))
    run("train_rm.py", tmp_path / "rm.yaml")
    metrics = metrics_of(tmp_path / "out")
    assert metrics[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert metrics[-1]["accuracy"] == 1
    first = load_file(tmp_path / "out" / "hf" / "model.safetensors")
    run("convert", "to-hf", tmp_path / "out" / "checkpoints", tmp_path / "converted")
    converted = load_file(tmp_path / "converted" / "model.safetensors")
    assert set(converted) == set(first) and all(torch.equal(converted[name], tensor) for name, tensor in first.items())
    (tmp_path / "out" / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("3\n")
    run("train_rm.py", tmp_path / "rm.yaml", "parallel.tensor_model_parallel_size=2", processes=2)
    again = load_file(tmp_path / "out" / "hf" / "model.safetensors")
    for name, tensor in first.items():
        torch.testing.assert_close(again[name], tensor, rtol=1e-3, atol=1e-5, msg=name)
    model, loading = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out" / "hf", output_loading_info=True
    )
    assert not any(loading["missing_keys"]) and not any(loading["unexpected_keys"])
    assert model.config.num_labels == 1
    wrong = run(
        "train_dpo.py",
        tmp_path / "rm.yaml",
        f"output_dir={tmp_path / 'other'}",
        f"model.path={tmp_path / 'out' / 'hf'}",
        "model.head=lm",
        check=False,
    )
    assert wrong.returncode == 2
    assert "is a reward model; set model.head=reward" in wrong.stderr_text


def scores_of_counted_tokens(config):
    """Return the scores of all tokens and of the counted ones, the positions of both, and a step's operations."""
    from mcore_rl.models.megatron.training import forward_step
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy, positions = MegatronPolicy(config, total_steps=10, rows_per_unit=2, keep_reference=True), []
    real = forward_step.linear_logprobs

    def counting(hidden, *arguments, **options):
        positions[-1] += len(hidden)
        return real(hidden, *arguments, **options)

    forward_step.linear_logprobs = counting
    found, data = [], make_data()
    data["sample_mask"][:2] = 0  # a pack may have no counted token at all
    for only in (False, True):
        for score, name in (
            (policy.get_logprobs, "logprobs"),
            (policy.get_reference_policy_logprobs, "reference_logprobs"),
        ):
            positions.append(0)
            found.append(score(data, temperature=1.3, counted_only=only)[name])
        positions.append(0)
        norms = policy.get_score_norms(data, 1.3, counted_only=only)
        found += [norms["logprobs"], norms["score_norms"]]
    flops = policy.flops_of(data)
    policy.shutdown()
    return data, found, positions, flops


@pytest.mark.parametrize("layout", and_long(LAYOUTS[2:3], [LAYOUTS[1], LAYOUTS[3], LAYOUTS[4]]), ids=str)
def test_counted_tokens_alone_are_scored_and_credited(layout, model_of):
    config = layout.apply(make_config(model_of("llama")))
    ranks = run_processes(scores_of_counted_tokens, config, world_size=layout.world_size)
    for data, found, positions, flops in ranks:
        mask = F.pad(data["token_mask"][:, 1:] * data["sample_mask"][:, None], (1, 0))
        for whole, counted in zip(found[:4], found[4:], strict=True):
            assert_close32(counted, whole * mask, FORWARD)
            assert (counted * mask).abs().sum() > 0
        per_rank = mask.sum().item() / layout.cp
        if layout.pp == 1 and layout.cp == 1:
            fillers = 8 if layout.packing else 12  # a pack without counted tokens computes one position
            assert all(per_rank <= count <= per_rank + fillers for count in (*positions[3:5], positions[5] / 2))
            assert min(positions[:3]) > data["input_lengths"].sum().item() - len(mask) - 1
        assert flops == pytest.approx(operations_by_hand(model_of("llama"), data["input_lengths"].tolist(), mask.sum()))


def operations_by_hand(path, lengths, counted):
    """Six operations for each weight and token; attention over n tokens costs 6·n²·heads·head_dim per layer."""
    model = AutoModelForCausalLM.from_pretrained(path)
    layers = sum(p.numel() for p in model.model.layers.parameters()) + model.model.norm.weight.numel()
    config = model.config
    size = config.num_attention_heads * getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    attention = 6 * sum(n * n for n in lengths) * size * config.num_hidden_layers
    return 6 * layers * sum(lengths) + 6 * model.lm_head.weight.numel() * float(counted) + attention

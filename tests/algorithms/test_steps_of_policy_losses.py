"""Tests that three steps of each policy loss on recorded rollouts equal those of TRL, or of the formula in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset as Records
from float32 import FORMULA, FORWARD, approx32
from layout_cases import make_config
from policy_loss_cases import CASES, loss_of, make_batch
from small_models import and_long, make_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl_steps import OF_TRL, OPTIMIZER, STEPS, check_weights, recorded

from mcore_rl.losses.policy_options import POLICY_LOSS_OPTIONS
from mcore_rl.testing.layout_check import ParallelLayout
from mcore_rl.testing.processes import run_cases

TEMPERATURE = 1.7
OF_TRLS_LOSS = {
    "sapo": {"loss_type": "sapo", "sapo_temperature_pos": 1.3, "sapo_temperature_neg": 2.1},
    "vespo": {
        "loss_type": "vespo", "vespo_k_pos": 1.5, "vespo_lambda_pos": 2.5, "vespo_k_neg": 3.5, "vespo_lambda_neg": 2.2,
    },
    "vespo, corrected": {"loss_type": "vespo"},
    "luspo": {
        "loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 0.08, "epsilon_high": 0.12,
    },
    "gmpo": {"epsilon": 0.03, "epsilon_high": 0.05},
    "off-policy mask": {"loss_type": "dapo", "off_policy_mask_threshold": 0.01},
}  # fmt: skip
"""Settings of TRL's trainer for the cases that it has; the other cases are compared with their formulas."""
LAYOUTS = [ParallelLayout(), ParallelLayout(tp=2, cp=2, sp=True), ParallelLayout(pp=2, dp=2)]


def row_logprobs(model, data):
    """Log-probabilities [B, S − 1] by transformers, row by row."""
    rows = []
    for ids, length in zip(data["input_ids"], data["input_lengths"].tolist(), strict=True):
        logits = model(ids[None, :length]).logits[0, :-1].double() / TEMPERATURE
        chosen = logits.log_softmax(-1).gather(1, ids[1:length, None])[:, 0]
        rows.append(F.pad(chosen, (0, len(ids) - length)))
    return torch.stack(rows)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("policy losses")
    make_model("llama", root / "model", initializer_range=0.05)
    return root


@pytest.fixture(scope="module")
def data(files):
    """Rollouts of two turns, sampled by one policy and scored by another; both are near the initial weights."""
    data, generator = make_batch(), torch.Generator().manual_seed(7)
    model = AutoModelForCausalLM.from_pretrained(files / "model", dtype=torch.float32)
    noise = lambda scale: torch.randn(data["input_ids"].shape, generator=generator) * scale  # noqa: E731
    with torch.no_grad():
        current = F.pad(row_logprobs(model, data), (1, 0)).float()
    data["prev_logprobs"] = (current + noise(0.1)).clamp(max=-1e-3)
    data["generation_logprobs"] = (data["prev_logprobs"] + noise(0.05)).clamp(max=-1e-3)
    return data


def steps_of_policy(config, options, data):
    from mcore_rl.algorithms.grpo import add_columns_of_loss
    from mcore_rl.losses.policy_gradient import build_policy_loss
    from mcore_rl.models.megatron.weights.conversion import export_hf_weights
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=STEPS)
    own = policy.own_rows(data)
    add_columns_of_loss(options, own, torch.zeros(data.size))
    metrics = [policy.train(own, build_policy_loss(options), temperature=TEMPERATURE) for _ in range(STEPS)]
    weights = {name: weight.cpu() for name, weight in export_hf_weights(policy.model)}
    policy.shutdown()
    return metrics, weights


def steps_of_trl(name, root, data):
    """Return losses, weights and clipped fractions of TRL's trainer, which gets the recorded rollouts in place of its
    own."""
    from trl import GRPOConfig, GRPOTrainer
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

    kind, config = (GMPOTrainer, GMPOConfig) if name == "gmpo" else (GRPOTrainer, GRPOConfig)
    tokenizer = AutoTokenizer.from_pretrained(root / "model")
    inputs = of_trl(data, tokenizer.pad_token_id, corrects=name == "vespo, corrected")

    class Replaying(recorded(kind)):
        def _prepare_inputs(self, generation_batch):
            return inputs

    model = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
    general = {key: value for key, value in OF_TRL.items() if key not in ("max_length", "train_sampling_strategy")}
    settings = {"beta": 0.0, "temperature": TEMPERATURE, "num_generations": 3, "per_device_train_batch_size": 12}
    trainer = Replaying(
        model=model, reward_funcs=lambda completions, **_: [0.0] * len(completions), processing_class=tokenizer,
        args=config(output_dir=str(root / "trl"), **general, **settings, **OF_TRLS_LOSS[name]),
        train_dataset=Records.from_list([{"prompt": "a"}] * 12),
    )  # fmt: skip
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    clipped = [[log.get(f"clip_ratio/{side}_mean") for side in ("low", "high")] for log in logs]
    return trainer.found, {key: p.detach().clone() for key, p in model.state_dict().items()}, clipped


def of_trl(data, pad, corrects):
    """The rollouts as TRL holds them: prompts padded on the left, completions on the right."""
    starts = (data["token_mask"] > 0).int().argmax(1).tolist()
    lengths = data["input_lengths"].tolist()
    width = max(starts), max(end - start for start, end in zip(starts, lengths, strict=True))

    def completions(values, padding=0.0):
        parts = zip(values, starts, lengths, strict=True)
        return torch.stack([F.pad(row[a:b], (0, width[1] - (b - a)), value=padding) for row, a, b in parts])

    prompts = zip(data["input_ids"], starts, strict=True)
    prompt_ids = torch.stack([F.pad(row[:a], (width[0] - a, 0), value=pad) for row, a in prompts])
    prompt_mask = torch.stack([F.pad(torch.ones(a), (width[0] - a, 0)) for a in starts]).long()
    mask = completions(data["token_mask"])
    inputs = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completions(data["input_ids"], pad),
        "completion_mask": completions(torch.ones_like(data["token_mask"])).long(),
        "tool_mask": mask.long(),
        "advantages": data["advantages"][:, 0],
        "old_per_token_logps": completions(data["prev_logprobs"]),
        "sampling_per_token_logps": completions(data["generation_logprobs"]),
        "num_items_in_batch": mask.sum(),
    }
    if corrects:
        weights = (data["prev_logprobs"] - data["generation_logprobs"]).exp()
        bound = CASES["vespo, corrected"]["truncated_importance_sampling_ratio"]
        inputs["importance_sampling_ratio"] = torch.where(mask > 0, completions(weights).clamp(max=bound), 1.0)
    return inputs


def steps_by_formula(name, root, data):
    """Return losses and weights of three steps with transformers and torch.optim."""
    model = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
    adam = {"lr": OPTIMIZER["lr"], "eps": OPTIMIZER["adam_eps"], "weight_decay": 0.0}
    optimizer, losses = torch.optim.AdamW(model.parameters(), **adam), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(CASES[name], row_logprobs(model, data), data)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER["clip_grad"])
        optimizer.step()
        losses.append(loss.item())
    return losses, {key: p.detach().clone() for key, p in model.state_dict().items()}


@pytest.fixture(scope="module")
def expected(files, data):
    return {
        name: steps_of_trl(name, files, data) if name in OF_TRLS_LOSS else steps_by_formula(name, files, data)
        for name in CASES
    }


def score_norms_of_policy(config, data):
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=STEPS)
    scored = policy.get_score_norms(data, TEMPERATURE)
    policy.shutdown()
    return scored["logprobs"], scored["score_norms"]


@pytest.mark.long
@pytest.mark.parametrize("layout", and_long([LAYOUTS[1]], [LAYOUTS[2]]), ids=str)
def test_norms_of_scores_equal_those_of_the_whole_distribution(layout, files, data):
    model = AutoModelForCausalLM.from_pretrained(files / "model", dtype=torch.float32)
    config = layout.apply(make_config(files / "model"))
    ours = run_cases([(score_norms_of_policy, config, data)], world_size=layout.world_size)[0][0]
    for row, length in enumerate(data["input_lengths"].tolist()):
        ids = data["input_ids"][row, :length]
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1].double() / TEMPERATURE
        one_hot = F.one_hot(ids[1:], logits.shape[-1])
        norms = (one_hot - logits.softmax(-1)).square().sum(-1)
        expected = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0], norms
        for mine, theirs in zip(ours, expected, strict=True):
            torch.testing.assert_close(mine[row, 1:length].double(), theirs, rtol=1e-5, atol=1e-5)
            assert mine[row, 0] == 0
            assert (mine[row, length:] == 0).all()


CHUNKS = [list(CASES)[i : i + 6] for i in range(0, len(CASES), 6)]


@pytest.mark.parametrize("layout", and_long([], LAYOUTS[1:2], [LAYOUTS[0], LAYOUTS[2]]), ids=str)
@pytest.mark.parametrize("names", CHUNKS, ids=str)
def test_steps_equal_trls_or_the_formula(names, layout, files, data, expected):
    options = [POLICY_LOSS_OPTIONS[CASES[name].get("name", "clipped_pg")](**CASES[name]) for name in names]
    config = layout.apply(make_config(files / "model"))
    cases = [(steps_of_policy, config, of_case, data) for of_case in options]
    outcomes = [of_ranks[0] for of_ranks in run_cases(cases, world_size=layout.world_size, timeout=300)]
    initial = AutoModelForCausalLM.from_pretrained(files / "model").state_dict()
    for name, (metrics, weights) in zip(names, outcomes, strict=True):
        losses, theirs, *clipped = expected[name]
        found = [m["loss"] for m in metrics]
        print(f"{name}: losses {losses}, off by {max(abs(a - b) for a, b in zip(found, losses, strict=True)):.1e}")
        assert found == approx32(losses, FORWARD), name
        assert all(math.isfinite(value) for m in metrics for key, value in m.items() if key != "all_mb_metrics")
        if name == "off-policy mask":  # TRL counts sequences where a ratio is of a sequence, and others not at all
            fractions = [[m[f"clip_fraction_{side}"] for side in ("low", "high")] for m in metrics]
            assert any(low or high for low, high in fractions)
            for ours, of_trl in zip(fractions, clipped[0], strict=True):
                assert ours == approx32(of_trl, FORMULA), name
        check_weights(weights, theirs, initial, name)

"""Tests of losses on pairs against TRL's numbers and gradients on the same log-probabilities."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
import yaml
from float32 import FORMULA, FORWARD, approx32, assert_close32
from programs import metrics_of, run
from small_models import make_model
from trl_cases import BETA, EPSILON, GAMMA, OPTIONS, batch, of_trainer, ours

from mcore_rl.algorithms.loss_functions import DPOLossFn
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.errors import ContractError


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "theirs", "options"),
    [
        ("sigmoid", "sigmoid", {}),
        ("sigmoid", "sigmoid_norm", {"preference_average_log_probs": True}),
        ("ipo", "ipo", {"preference_average_log_probs": True}),
        ("hinge", "hinge", {}),
        ("robust", "robust", {"label_smoothing": EPSILON}),
        ("apo_zero", "apo_zero", {}),
        ("apo_down", "apo_down", {}),
    ],
)
def test_a_loss_with_a_reference_is_trls(kind, theirs, options):
    logprobs, data = batch()
    loss, gradient, metrics = ours(logprobs, data, preference_loss=kind, **options)
    expected, their_metrics = of_trainer(logprobs, data, theirs, options.get("label_smoothing", 0.0))
    assert_close32(loss, expected, FORMULA, scale=1)
    assert_close32(gradient, torch.autograd.grad(expected, logprobs)[0], FORWARD, scale=BETA)
    for name in ("chosen", "rejected"):
        assert float(metrics[f"logprobs_{name}_mean"]) == pytest.approx(their_metrics[f"logps/{name}"][0], rel=1e-5)
        if not options.get("preference_average_log_probs"):
            reward = BETA * float(metrics[f"rewards_{name}_mean"])
            assert reward == pytest.approx(their_metrics[f"rewards/{name}"][0], rel=1e-5)


def alone(kind, logprobs, data, **options):
    return ours(logprobs, data, preference_loss=kind, **options)[0].item()


@pytest.mark.long
@pytest.mark.parametrize(
    ("kinds", "weights", "options"),
    [
        (["sigmoid", "hinge"], [0.8, 0.2], {}),
        (["hinge", "apo_zero", "robust"], [0.5, 1.5, 0.25], {"label_smoothing": EPSILON}),
        (["apo_down", "apo_zero"], None, {}),
        (["hinge"], [0.3], {}),
        (["sigmoid", "hinge"], [0.0, 1.0], {}),
    ],
)
@pytest.mark.parametrize("sft", [0.0, 0.7])
def test_a_weighted_sum_is_trls(kinds, weights, options, sft):
    """Add the likelihood as one of TRL's losses: a mean over all tokens, which equals ours for responses of equal
    length."""
    logprobs, data = batch()
    data["token_mask"][::2] = data["token_mask"][0]  # chosen responses of one length
    given = {} if weights is None else {"preference_loss_weights": weights}
    more = {**options, "sft_loss_weight": sft, "sft_average_log_probs": True}
    loss, gradient, metrics = ours(logprobs, data, preference_loss=kinds, **given, **more)
    weights = weights or [1.0] * len(kinds)
    theirs, their_weights = ([*kinds, "sft"], [*weights, sft]) if sft else (kinds, weights)
    expected, _ = of_trainer(logprobs, data, theirs, options.get("label_smoothing", 0.0), their_weights)
    assert_close32(loss, expected, FORMULA, scale=1)
    assert_close32(gradient, torch.autograd.grad(expected, logprobs)[0], FORWARD, scale=BETA)
    smoothing = {"robust": options}
    parts = {kind: alone(kind, logprobs, data, **smoothing.get(kind, {})) for kind in kinds}
    if len(kinds) > 1:
        assert {kind: float(metrics[f"preference_loss_{kind}"]) for kind in kinds} == approx32(parts, FORMULA)
    else:
        assert not [name for name in metrics if name.startswith("preference_loss_")]
    whole = sum(weight * parts[kind] for kind, weight in zip(kinds, weights, strict=True))
    assert float(metrics["preference_loss"]) == pytest.approx(whole, rel=1e-5)


def test_a_weighted_sum_without_a_reference():
    logprobs, data = batch()
    del data["reference_policy_logprobs"]
    likelihood = {"sft_loss_weight": 1.0, "sft_average_log_probs": True}
    loss, gradient, metrics = ours(
        logprobs, data, preference_loss=["simpo", "orpo"], preference_loss_weights=[0.6, 0.4],
        preference_loss_weight=2.0, simpo_gamma=GAMMA, **likelihood,
    )  # fmt: skip
    chosen, rejected = averages(logprobs.double(), data)
    simpo = -torch.nn.functional.logsigmoid(BETA * (chosen - rejected) - GAMMA).mean()
    odds = [p - torch.log1p(-p.exp()) for p in (chosen, rejected)]
    orpo = -BETA * torch.nn.functional.logsigmoid(odds[0] - odds[1]).mean()
    expected = 2 * (0.6 * simpo + 0.4 * orpo) - chosen.mean()
    assert_close32(loss.double(), expected, FORMULA, scale=1)
    assert_close32(gradient, torch.autograd.grad(expected, logprobs)[0], FORWARD, scale=BETA)
    assert float(metrics["preference_loss_orpo"]) == pytest.approx(float(orpo), rel=1e-5)


def averages(logprobs, data):
    mask = data["token_mask"][:, 1:]
    means = (logprobs * mask).sum(1) / mask.sum(1)
    return means[::2], means[1::2]


@pytest.mark.long
@pytest.mark.parametrize("smoothing", [0.0, EPSILON])
def test_simpo_is_trls(smoothing):
    from trl.experimental.cpo import CPOTrainer

    logprobs, data = batch()
    del data["reference_policy_logprobs"]
    loss, gradient, _ = ours(logprobs, data, preference_loss="simpo", simpo_gamma=GAMMA, label_smoothing=smoothing)
    itself = SimpleNamespace(
        alpha=0.0, loss_type="simpo", simpo_gamma=GAMMA, beta=BETA, label_smoothing=smoothing,
        accelerator=SimpleNamespace(device="cpu"),
    )  # fmt: skip
    expected = CPOTrainer.cpo_loss(itself, *averages(logprobs, data))[0].mean()
    assert_close32(loss, expected, FORMULA, scale=1)
    assert_close32(gradient, torch.autograd.grad(expected, logprobs)[0], FORWARD, scale=BETA)


@pytest.mark.long
def test_orpo_is_trls():
    from trl.experimental.orpo import ORPOTrainer

    logprobs, data = batch()
    del data["reference_policy_logprobs"]
    options = {"preference_loss": "orpo", "sft_loss_weight": 1.0, "sft_average_log_probs": True}
    loss, gradient, _ = ours(logprobs, data, **options)
    itself = SimpleNamespace(beta=BETA, accelerator=SimpleNamespace(device="cpu"))
    chosen, rejected = averages(logprobs, data)
    expected = (-chosen - ORPOTrainer.odds_ratio_loss(itself, chosen, rejected)[0]).mean()
    assert_close32(loss, expected, FORMULA, scale=1)
    assert_close32(gradient, torch.autograd.grad(expected, logprobs)[0], FORWARD, scale=BETA)


@pytest.mark.parametrize("kind", ["hinge", "robust", "apo_zero", "apo_down", "simpo", "orpo"])
def test_masked_pairs_and_empty_responses_are_harmless(kind):
    """Half of a batch of two copies, masked, changes nothing; a response without tokens gives finite gradients."""
    options = {"label_smoothing": EPSILON} if kind == "robust" else {}
    options |= {"sft_loss_weight": 0.5} if kind == "orpo" else {}
    logprobs, data = batch()
    loss, gradient, _ = ours(logprobs, data, preference_loss=kind, **options)
    twice = BatchedDataDict({name: torch.cat([values, values]) for name, values in data.items()})
    twice["sample_mask"][len(logprobs) :] = 0
    doubled = torch.cat([logprobs.detach(), torch.full_like(logprobs, -1e30)]).requires_grad_()
    again, more, _ = ours(doubled, twice, preference_loss=kind, **options)
    torch.testing.assert_close(again, loss)
    torch.testing.assert_close(more, torch.cat([gradient, torch.zeros_like(gradient)]))
    data["token_mask"][1] = 0
    loss, gradient, _ = ours(logprobs, data, preference_loss=kind, **options)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert not gradient[1].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preference_loss": "robust"}, "preference_loss=robust needs a label_smoothing"),
        (
            {"preference_loss": "hinge", "label_smoothing": 0.1},
            "label_smoothing applies to preference_loss=sigmoid, robust",
        ),
        ({"preference_loss": "orpo"}, "is added to the likelihood of the chosen responses: set sft_loss_weight"),
        ({"simpo_gamma": 1.0}, "simpo_gamma applies to preference_loss=simpo, not to sigmoid"),
        ({"preference_loss": ["sigmoid", "sigmoid"]}, "preference_loss=.sigmoid, sigmoid. names a loss twice"),
        ({"preference_loss": ["sigmoid", "sft"]}, "preference_loss: must be one of sigmoid, ipo, "),
        ({"preference_loss": []}, "preference_loss: must be a list that is not empty"),
        (
            {"preference_loss_weights": [0.5]},
            "needs a list of preference losses; for a single loss set preference_loss_weight",
        ),
        (
            {"preference_loss": ["sigmoid", "hinge"], "preference_loss_weights": [0.5]},
            "preference_loss_weights: has 1 weights, but preference_loss=.sigmoid, hinge. has 2",
        ),
        (
            {"preference_loss": ["sigmoid", "hinge"], "preference_loss_weights": [0.5, -1]},
            "preference_loss_weights: must be at least 0",
        ),
        ({"preference_loss": ["hinge", "ipo"], "preference_loss_weights": [0, 0]}, "preference_loss_weights are all 0"),
        ({"preference_loss": ["hinge", "ipo"], "preference_loss_weights": 1.0}, "weights: must be a list"),
        ({"preference_loss": ["simpo", "ipo"]}, "simpo has no reference, the other losses have one"),
    ],
)
def test_options_that_contradict_each_other(options, message):
    with pytest.raises(ContractError, match=message):
        DPOLossFn({**OPTIONS, **options})


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("kin")
    make_model("qwen2", root / "model", initializer_range=0.05)
    make_model("deep", root / "other", initializer_range=0.05)
    pairs = [{"prompt": f"say {i} ", "chosen": "ab" * (i % 5 + 1), "rejected": "yz" * (i % 3 + 1)} for i in range(24)]
    (root / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    config = {
        "output_dir": "set below",
        "model": {"path": str(root / "model")},
        "data": {"train": str(root / "pairs.jsonl"), "max_sequence_length": 48},
        "batch": {"global_batch_size": 8},
        "optimizer": {"lr": 3e-3, "adam_eps": 1e-6, "schedule": "constant"},
        "trainer": {"max_steps": 4},
        "checkpoint": {"export_hf": False},
    }
    (root / "dpo.yaml").write_text(yaml.safe_dump(config))
    return root


def train(files, name, *arguments, **options):
    run("train_dpo.py", files / "dpo.yaml", f"output_dir={files / name}", *arguments, **options)
    return metrics_of(files / name)


@pytest.mark.long
def test_a_reference_of_its_own(files):
    """The policy's own directory gives the numbers of the swapped reference; another one does not, but learns."""
    swapped = train(files, "swapped")
    same = train(files, "same", f"dpo.reference_model={files / 'model'}")
    stored = train(files, "stored", f"dpo.reference_model={files / 'model'}", "dpo.reference=precompute")
    for key in ("loss", "grad_norm", "rewards_chosen_mean"):
        for metrics in (same, stored):
            assert [m[key] for m in metrics] == approx32([m[key] for m in swapped], FORWARD)
    layout = "parallel.pipeline_model_parallel_size=2"
    other = train(files, "other_pp2", f"dpo.reference_model={files / 'other'}", layout, processes=2)
    assert abs(other[0]["rewards_chosen_mean"]) > 0.1
    assert other[-1]["loss"] < other[0]["loss"]


@pytest.mark.long
def test_training_without_a_reference(files):
    metrics = train(files, "simpo", "dpo={preference_loss: simpo, reference_policy_kl_penalty: 2.0}")
    several = "dpo={preference_loss: [sigmoid, hinge], preference_loss_weights: [0.8, 0.2], sft_loss_weight: 0.1}"
    first = train(files, "several", several, "parallel.tensor_model_parallel_size=2", processes=2)[0]
    assert first["preference_loss_hinge"] == pytest.approx(1, abs=1e-5)
    assert first["preference_loss"] == pytest.approx(0.8 * math.log(2) + 0.2, abs=1e-5)
    assert metrics[-1]["accuracy"] > 0.9
    assert metrics[-1]["loss"] < 0.7 * metrics[0]["loss"]
    contradiction = "dpo={preference_loss: simpo, reference: precompute}"
    refused = run("train_dpo.py", files / "dpo.yaml", f"output_dir={files / 'no'}", contradiction, check=False)
    assert refused.returncode == 2
    assert "dpo: preference_loss=simpo has no reference; leave out reference and reference_model" in refused.stderr_text

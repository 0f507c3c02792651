"""Tests of the policy losses by name: formulas in float64, numbers far apart, packs, refused options."""

import pytest
import torch
from loss_cases import ROWS, WIDTH, batch, logprobs_of, mask_of
from policy_loss_cases import CASES, loss_of

from mcore_rl.algorithms.loss_functions import ClippedPGLossFn, PolicyGradientLossFn
from mcore_rl.errors import ContractError
from mcore_rl.losses.policy_gradient import observation_mask
from mcore_rl.losses.policy_options import POLICY_LOSS_OPTIONS, policy_loss_options


def loss_fn_of(name):
    cfg = CASES[name]
    return PolicyGradientLossFn(POLICY_LOSS_OPTIONS[cfg.get("name", "clipped_pg")](**cfg))


def near_batch(seed=0):
    """Rows with ratios on both sides of every bound, signs of advantages that differ, and counts of observations."""
    logits, data, seqs, toks = batch(seed)
    generator = torch.Generator().manual_seed(seed)
    noise = lambda scale: torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) * scale  # noqa: E731
    data["prev_logprobs"][:, 1:] = torch.minimum(
        logprobs_of(logits, data).detach() + noise(0.3)[:, 1:], torch.tensor(-0.01)
    )
    data["generation_logprobs"] = data["prev_logprobs"] + noise(0.05)
    data["advantages"] = torch.tensor([0.7, -0.4, 1.0, -1.3, 0.0, 0.2]).double()[:, None].expand(ROWS, WIDTH).clone()
    observed = observation_mask(data, data["token_mask"]).sum()
    assert observed > 0
    data["num_observation_tokens"] = observed.expand(ROWS).clone()
    return logits, data, seqs, toks


@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize("name", CASES)
def test_loss_equals_formula_in_float64(name, seed):
    """Also with an advantage for each token, as PPO has them."""
    logits, data, seqs, toks = near_batch(seed)
    if seed:
        data["advantages"] = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loss, metrics = loss_fn_of(name)(logits, data, seqs, toks)
    expected = loss_of(CASES[name], logprobs_of(logits, data), data)
    torch.testing.assert_close(loss, expected, rtol=1e-7, atol=1e-9)
    ours, theirs = (torch.autograd.grad(value, logits)[0] for value in (loss, expected))
    assert theirs.abs().max() > 1e-3
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
    assert {"probs_ratio", "kl_penalty", "token_mult_prob_error"} <= set(metrics)
    if "clip_fraction_low" in metrics:
        assert metrics["clip_fraction_low"] + metrics["clip_fraction_high"] > 0, "a bound that applies to no token"
    if "off_policy_mask_fraction" in metrics:
        assert 0 < metrics["off_policy_mask_fraction"] < 1


def test_every_loss_has_a_case():
    assert {options.get("name", "clipped_pg") for options in CASES.values()} == set(POLICY_LOSS_OPTIONS)


@pytest.mark.parametrize("distance", [-1e4, -88.8, 60.0, 1e4])
@pytest.mark.parametrize("name", CASES)
def test_far_apart_logprobs(name, distance):
    """Certain tokens, and previous policies that are far away, give finite losses and gradients in float32."""
    logits, data, seqs, toks = near_batch()
    ready = logprobs_of(logits, data).detach().float()
    (row, column), (other, place) = mask_of(data).nonzero()[:2].tolist()
    ready[other, place] = 0.0  # a certain token
    data["prev_logprobs"][other, place + 1] = 0.0
    data["prev_logprobs"][row, column + 1] = min(ready[row, column].item() - distance, 0.0)
    data["generation_logprobs"][row, column + 1] = -distance
    ready.requires_grad_()
    loss, metrics = loss_fn_of(name).from_logprobs(ready, data, seqs, toks)
    (gradient,) = torch.autograd.grad(loss, ready)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert all(torch.as_tensor(value).isfinite() for value in metrics.values()), metrics


@pytest.mark.parametrize("name", CASES)
def test_nothing_counts(name):
    logits, data, seqs, toks = near_batch()
    data["sample_mask"] = torch.zeros_like(data["sample_mask"])
    data["num_observation_tokens"] = torch.zeros(ROWS)
    loss, _ = loss_fn_of(name)(logits, data, seqs * 0, toks * 0)
    assert loss == 0
    assert (torch.autograd.grad(loss, logits)[0] == 0).all()


def test_observations_are_between_responses():
    mask = torch.tensor([[0, 0, 1, 1, 0, 0, 1, 0], [0, 1, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0]]).float()
    found = observation_mask({"token_mask": mask, "sample_mask": torch.ones(3)}, mask)
    assert found.tolist() == [[0, 0, 0, 1, 1, 0, 0], [0] * 7, [0] * 7]


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ({"name": "sappo"}, "name: must be one of clipped_pg, .*, got 'sappo'"),
        ({"tau_pos": 1.0}, "tau_pos: has an effect only with name=sapo, got name=clipped_pg"),
        (
            {"name": "gmpo", "ratio_clip_max": 0.2},
            "ratio_clip_max: has an effect only with name=clipped_pg or luspo, got",
        ),
        ({"name": "dro", "dro_beta": 0.0}, "dro_beta: must be more than 0"),
        ({"name": "sapo", "tau_poss": 1.0}, "unknown keys tau_poss .did you mean tau_pos"),
        ({"name": "vespo", "importance_sampling_level": "token"}, "needs use_importance_sampling_correction"),
        ({"name": "luspo", "aggregation": "sum"}, "aggregation: must be one of token_mean"),
    ],
)
def test_refused_options(cfg, message):
    with pytest.raises(ContractError, match=message):
        PolicyGradientLossFn(cfg)


def test_aggregation_of_the_clipped_loss():
    required = {"reference_policy_kl_penalty": 0.0, "ratio_clip_min": 0.2, "ratio_clip_max": 0.2, "ratio_clip_c": None,
                "use_on_policy_kl_approximation": False, "use_importance_sampling_correction": False}  # fmt: skip
    with pytest.raises(ContractError, match="aggregation=token_sum needs token_level_loss=True"):
        ClippedPGLossFn({**required, "token_level_loss": False, "aggregation": "token_sum"})
    with pytest.raises(ContractError, match="name: must be one of clipped_pg, got 'sapo'"):
        ClippedPGLossFn({**required, "token_level_loss": True, "name": "sapo"})
    assert policy_loss_options({"name": "sapo"}, "").reduction == "seq_mean_token_mean"

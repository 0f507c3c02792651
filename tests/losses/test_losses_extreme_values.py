"""Tests of losses, log-probabilities and advantages with numbers that are inexact, not finite, or far apart."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from loss_cases import PG, ROWS, batch, logprobs_of, mask_of

from mcore_rl.algorithms.loss_functions import ClippedPGLossFn, DistillationLossFn
from mcore_rl.distributed import logprobs as module
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.distributed.logprobs import linear_logprobs, vocab_parallel_logprobs
from mcore_rl.losses.policy_gradient import importance_weights, truncate_importance_weights
from mcore_rl.testing.processes import run_processes

# ------------------------------------------------------------------ log-ratios far from 0


@pytest.mark.parametrize("distance", [-1e4, -100.0, -88.8, -60.0, 60.0, 88.0, 88.7, 88.8, 100.0, 1e4])
@pytest.mark.parametrize("key", ["prev_logprobs", "generation_logprobs", "reference_policy_logprobs"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ratio_clip_c": 3.0},
        {"clip_type": "cispo"},
        {
            "token_level_loss": False,
            "sequence_level_importance_ratios": True,
            "use_importance_sampling_correction": True,
        },
        {"use_on_policy_kl_approximation": True, "kl_gradient": "unbiased", "use_importance_sampling_correction": True},
        {"kl_clamp": None, "kl_output_clamp": 10.0},
    ],
    ids=["ppo", "dual clip", "cispo", "gspo", "corrected", "output clamp"],
)
def test_far_apart_logprobs(distance, key, changes):
    logits, data, seqs, toks = batch()
    ready = logprobs_of(logits, data).detach().float().requires_grad_()
    row, column = mask_of(data).nonzero()[1].tolist()
    data[key][row, column + 1] = ready[row, column].item() - distance
    loss, metrics = ClippedPGLossFn({**PG, **changes}).from_logprobs(ready, data, seqs, toks)
    (gradient,) = torch.autograd.grad(loss, ready)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert all(torch.as_tensor(value).isfinite() for value in metrics.values()), metrics


def test_a_truncated_weight_is_the_bound_however_far_the_sampler_is():
    far = torch.tensor([[0.5, 15.0, 25.0, 60.0, 88.0]])
    zeros, ones = torch.zeros_like(far), torch.ones_like(far)
    weights = importance_weights(far, zeros, ones, sequence_level=False)
    bounded, inside = truncate_importance_weights(weights, far, ones, "tis", 0.0, 2.0)
    torch.testing.assert_close(bounded, torch.tensor([[math.exp(0.5), 2.0, 2.0, 2.0, 2.0]]))
    assert inside.tolist() == [[True, False, False, False, False]]


@pytest.mark.parametrize("of", ["teacher", "student"])
@pytest.mark.parametrize("kind", ["forward", "reverse", "mixed"])
def test_distillation_where_a_probability_is_zero(kind, of):
    logits, data, seqs, toks = batch()
    top = torch.randn(logits.shape, dtype=torch.float64).topk(4)
    data["teacher_topk_logits"], data["teacher_topk_indices"] = top.values, top.indices
    logits = logits.detach()
    if of == "teacher":
        data["teacher_topk_logits"][..., 3] = -torch.inf
    else:
        logits.scatter_(2, top.indices[..., 3:], -torch.inf)
    logits.requires_grad_()
    loss, _ = DistillationLossFn({"kl_type": kind, "mixed_kl_weight": 0.3})(logits, data, seqs, toks)
    assert loss.isfinite()
    assert torch.autograd.grad(loss, logits)[0].isfinite().all()


def test_a_clipped_ratio_has_no_gradient():
    """log-ratio 100 with a positive advantage: the clipped branch, constant."""
    logits, data, seqs, toks = batch()
    ready = logprobs_of(logits, data).detach().requires_grad_()
    data["advantages"][:] = 0.7
    data["prev_logprobs"][:, 1:] = ready.detach() - 100
    loss, _ = ClippedPGLossFn({**PG, "reference_policy_kl_penalty": 0.0}).from_logprobs(ready, data, seqs, toks)
    assert (torch.autograd.grad(loss, ready)[0] == 0).all()
    torch.testing.assert_close(loss, torch.tensor(-0.7 * 1.28, dtype=torch.float64))


# ------------------------------------------------------------------ gradients of KL estimates, by enumeration


def gradient_of(function, logits):
    (gradient,) = torch.autograd.grad(function(F.log_softmax(logits, -1)), logits)
    return gradient


@pytest.mark.parametrize(("estimator", "gradient"), itertools.product(("k1", "k2", "k3"), ("value", "unbiased")))
@pytest.mark.parametrize("off_policy", [False, True])
def test_expected_gradients_of_kl_estimates(estimator, gradient, off_policy):
    """The mean over all five tokens, weighted by the probability with which each would be sampled."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, generator=generator, dtype=torch.float64).requires_grad_()
    reference = F.log_softmax(torch.randn(5, generator=generator, dtype=torch.float64), -1)
    sampler = F.log_softmax(torch.randn(5, generator=generator, dtype=torch.float64), -1) if off_policy else None
    options = {"kl_estimator": estimator, "kl_gradient": gradient, "use_on_policy_kl_approximation": off_policy}
    loss_fn = ClippedPGLossFn({**PG, "reference_policy_kl_penalty": 1.0, **options})

    def estimate_of_each(logp):
        """Row a is a sequence whose one predicted token is a; the loss of it alone is its KL estimate."""
        total = 0.0
        sampled_from = logp.detach() if sampler is None else sampler
        for token in range(5):
            ready = logp[token].reshape(1, 1)
            column = lambda value: torch.stack([torch.zeros(()).double(), value.detach()])[None]  # noqa: E731
            columns = {
                "input_ids": torch.tensor([[0, token]]),
                "token_mask": torch.ones(1, 2, dtype=torch.float64),
                "sample_mask": torch.ones(1, dtype=torch.float64),
                "advantages": torch.zeros(1, 2, dtype=torch.float64),
                "prev_logprobs": column(logp[token]),
                "generation_logprobs": column(sampled_from[token]),
                "reference_policy_logprobs": column(reference[token]),
            }
            one = torch.tensor(1.0, dtype=torch.float64)
            loss, _ = loss_fn.from_logprobs(ready, BatchedDataDict(columns), one, one)
            total = total + sampled_from[token].exp().detach() * loss
        return total

    ours = gradient_of(estimate_of_each, logits)
    kl = gradient_of(lambda logp: (logp.exp() * (logp - reference)).sum(), logits)
    reverse = gradient_of(lambda logp: (reference.exp() * (reference - logp)).sum(), logits)
    k2 = gradient_of(lambda logp: (logp.exp() * (reference - logp) ** 2 / 2).sum(), logits)
    expected = {
        ("k1", "value"): torch.zeros(5, dtype=torch.float64),
        ("k1", "unbiased"): kl,
        ("k2", "value"): kl,
        ("k2", "unbiased"): k2,
        ("k3", "value"): reverse,
        ("k3", "unbiased"): kl,
    }[estimator, gradient]
    torch.testing.assert_close(ours, expected, rtol=1e-7, atol=1e-9)


# ------------------------------------------------------------------ masked vocabularies

TOKENS, HEAD = 6, 24


def masked_logits():
    """Return logits with much of the vocabulary at −inf: row 0 on the first six columns, row 1 on all but six, row 2 on
    none, and so on; never a whole row."""
    logits = torch.randn(TOKENS, HEAD, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    logits[0, :6], logits[1, 6:], logits[3, 1:], logits[4, 12:] = (-torch.inf,) * 4
    targets = torch.tensor([20, 3, 7, 0, 11, 5])
    return logits, targets


def shard_statistics(tp):
    logits, targets = masked_logits()
    rank, group = torch.distributed.get_rank(), torch.distributed.group.WORLD
    shard = logits.chunk(tp, dim=1)[rank].clone().requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs(shard, targets, group, with_entropy=True, chunk_size=4)
    (0.7 * logprobs.sum() + 0.3 * entropy.sum()).backward()
    return logprobs.detach(), entropy.detach(), shard.grad


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_logits_of_minus_infinity(tp):
    logits, targets = masked_logits()
    logits.requires_grad_()
    logp = F.log_softmax(logits, -1)
    finite = torch.where(logp == -torch.inf, 0, logp)
    entropy = -(logp.exp() * finite).sum(-1)
    chosen = logp.gather(1, targets[:, None])[:, 0]
    (0.7 * chosen.sum() + 0.3 * entropy.sum()).backward()
    expected_gradient = torch.where(logits.detach() == -torch.inf, 0, logits.grad)
    results = run_processes(shard_statistics, tp, world_size=tp)
    for result in results:
        torch.testing.assert_close(result[0], chosen.detach())
        torch.testing.assert_close(result[1], entropy.detach())
    torch.testing.assert_close(torch.cat([gradient for *_, gradient in results], 1), expected_gradient)


def fused_shard(tp):
    hidden, weight, targets = overflowing_head()
    module.TILE_SHAPE = {"cpu": (2, 5)}
    rank, group = torch.distributed.get_rank(), torch.distributed.group.WORLD
    hidden.requires_grad_()
    shard = weight.chunk(tp)[rank].clone().requires_grad_()
    logprobs, entropy = linear_logprobs(hidden, shard, targets, group, with_entropy=True)
    (0.7 * logprobs.sum() + 0.3 * entropy.sum()).backward()
    torch.distributed.all_reduce(hidden.grad)
    return logprobs.detach(), entropy.detach(), hidden.grad, shard.grad


def overflowing_head():
    """Half of the vocabulary has weights so low that its products overflow to −inf in fp32; one shard has no other."""
    generator = torch.Generator().manual_seed(7)
    hidden = torch.rand(TOKENS, 8, generator=generator) + 1.1
    weight = torch.randn(HEAD, 8, generator=generator)
    weight[6:18] = -3e38
    return hidden, weight, torch.tensor([20, 3, 0, 5, 18, 23])


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_fused_logits_of_minus_infinity(tp):
    hidden, weight, targets = overflowing_head()
    kept = torch.cat([weight[:6], weight[18:]]).double().requires_grad_()
    inputs = hidden.double().requires_grad_()
    logp = F.log_softmax(inputs @ kept.T, -1)
    chosen = logp.gather(1, torch.where(targets < 6, targets, targets - 12)[:, None])[:, 0]
    entropy = -(logp.exp() * logp).sum(-1)
    (0.7 * chosen.sum() + 0.3 * entropy.sum()).backward()
    results = run_processes(fused_shard, tp, world_size=tp)
    for logprobs, entropies, hidden_gradient, _ in results:
        torch.testing.assert_close(logprobs.double(), chosen.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(entropies.double(), entropy.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(hidden_gradient.double(), inputs.grad, rtol=1e-4, atol=1e-5)
    gradient = torch.cat([shard for *_, shard in results])
    torch.testing.assert_close(torch.cat([gradient[:6], gradient[18:]]).double(), kept.grad, rtol=1e-4, atol=1e-5)
    assert (gradient[6:18] == 0).all()


def test_a_target_of_probability_zero_is_reported_not_hidden():
    logits, targets = masked_logits()
    targets[0] = 2  # masked in row 0
    logprobs, entropy = vocab_parallel_logprobs(logits, targets, with_entropy=True)
    assert logprobs[0] == -math.inf
    assert logprobs[1:].isfinite().all()
    assert entropy.isfinite().all()


def test_a_group_of_one_row_and_one_token():
    logits, data, seqs, toks = batch()
    for key in list(data):
        data[key] = data[key][:1, :1] if data[key].ndim == 2 else data[key][:1]
    loss, metrics = ClippedPGLossFn({**PG, "reference_policy_kl_penalty": 0.0})(logits[:1, :1], data, seqs, toks)
    assert loss == 0
    assert metrics["num_valid_samples"] == 1
    assert len(data["input_ids"]) < ROWS

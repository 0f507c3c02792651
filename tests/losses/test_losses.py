"""Tests of every loss against its formula, written here again in float64, and of refused inputs."""

import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from loss_cases import DPO, PG, PG_VARIANTS, ROWS, VOCAB, WIDTH, batch, logprobs_of, mask_of, pack

from mcore_rl.algorithms.interfaces import LossFunction
from mcore_rl.algorithms.loss_functions import (
    BradleyTerryLoss,
    ClippedPGLossFn,
    DistillationLossFn,
    DPOLossFn,
    KTOLossFn,
    LossType,
    NLLLoss,
    PreferenceLoss,
    SequencePackingLossWrapper,
    calculate_kl,
    kto_reference_point,
    soft_overlong_penalty,
)
from mcore_rl.distributed.batched_data_dict import BatchedDataDict

IS = {"use_importance_sampling_correction": True}


def check(loss_fn, expected, logits, data, seqs, toks):
    """Loss and gradient equal the formula's, from logits and from log-probabilities."""
    loss, metrics = loss_fn(logits, data, seqs, toks)
    ours = torch.autograd.grad(loss, logits)[0]
    formula = expected(logprobs_of(logits, data))
    theirs = torch.autograd.grad(formula, logits)[0]
    torch.testing.assert_close(loss, formula, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)
    again, _ = loss_fn.from_logprobs(logprobs_of(logits, data), data, seqs, toks, entropy=entropy_of(logits))
    torch.testing.assert_close(again, formula, rtol=1e-7, atol=1e-9)
    assert math.isclose(float(metrics["loss"]), float(loss), rel_tol=1e-9)
    return metrics


def entropy_of(logits):
    scores = F.log_softmax(logits.double(), dim=-1)[:, :-1]
    return -(scores.exp() * scores).sum(-1)


def test_nll():
    logits, data, seqs, toks = batch()
    metrics = check(NLLLoss(), lambda lp: -(lp * mask_of(data)).sum() / toks, logits, data, seqs, toks)
    assert metrics["num_unmasked_tokens"] == toks
    assert metrics["num_valid_samples"] == seqs


@pytest.mark.parametrize("average", [False, True])
def test_nll_per_sequence(average):
    logits, data, _, _ = batch()
    loss, _ = NLLLoss()(logits, data, None, None, dpo_loss=True, dpo_average_log_probs=average)
    mask = mask_of(data)
    expected = -(logprobs_of(logits, data) * mask).sum(1)
    if average:
        expected = expected / mask.sum(1).clamp(min=1)
    torch.testing.assert_close(loss, expected)
    assert (loss[data["sample_mask"] == 0] == 0).all()


@pytest.mark.parametrize("preference_average", [False, True])
@pytest.mark.parametrize("sft_average", [False, True])
def test_dpo(preference_average, sft_average):
    logits, data, seqs, toks = batch()
    cfg = {**DPO, "preference_average_log_probs": preference_average, "sft_average_log_probs": sft_average}
    mask = mask_of(data)
    counts = mask.sum(1).clamp(min=1)

    def rewards_of(lp):
        rewards = ((lp - data["reference_policy_logprobs"][:, :-1]) * mask).sum(1)
        return rewards / counts if preference_average else rewards

    def expected(lp):
        rewards = rewards_of(lp)
        pairs = data["sample_mask"][::2]
        preference = -(F.logsigmoid(0.2 * (rewards[::2] - rewards[1::2])) * pairs).sum() / (seqs / 2)
        sft = -(lp * mask).sum(1)
        sft = sft / counts if sft_average else sft
        return 0.7 * preference + 0.4 * (sft[::2] * pairs).sum() / (seqs / 2)

    metrics = check(DPOLossFn(cfg), expected, logits, data, seqs, toks)
    rewards, pairs = rewards_of(logprobs_of(logits, data)), data["sample_mask"][::2]
    right = ((rewards[::2] > rewards[1::2]) * pairs).sum() / pairs.sum()
    torch.testing.assert_close(metrics["accuracy"], right)
    torch.testing.assert_close(metrics["rewards_chosen_mean"], (rewards[::2] * pairs).sum() / pairs.sum())
    torch.testing.assert_close(metrics["rewards_rejected_mean"], (rewards[1::2] * pairs).sum() / pairs.sum())
    preference, accuracy, *_ = DPOLossFn(cfg)._dpo_loss(logits, data, seqs)
    torch.testing.assert_close((preference, accuracy), (metrics["preference_loss"], metrics["accuracy"]))
    assert set(metrics) == {
        "loss", "sft_loss", "preference_loss", "accuracy", "rewards_chosen_mean", "rewards_rejected_mean",
        "num_valid_samples", "logprobs_chosen_mean", "logprobs_rejected_mean",
    }  # fmt: skip
    sums = (logprobs_of(logits, data) * mask).sum(1)
    torch.testing.assert_close(metrics["logprobs_chosen_mean"], (sums[::2] * pairs).sum() / pairs.sum())
    torch.testing.assert_close(metrics["logprobs_rejected_mean"], (sums[1::2] * pairs).sum() / pairs.sum())


def test_preference_variants():
    rewards = torch.tensor([1.1, -0.4, 0.3, 0.9, 3.3, 1.7], dtype=torch.float64)
    data = BatchedDataDict(sample_mask=torch.tensor([1.0, 1, 1, 1, 0, 0], dtype=torch.float64))
    seqs, margin, beta = torch.tensor(4.0, dtype=torch.float64), torch.tensor([1.5, -0.6], dtype=torch.float64), 0.3
    loss, metrics = PreferenceLoss()(rewards[:, None], data, seqs, None)
    torch.testing.assert_close(loss, torch.log1p(torch.exp(-margin)).mean())
    assert metrics["accuracy"] == pytest.approx(0.5)
    assert metrics["num_valid_samples"] == 2, "pairs"
    again, _ = PreferenceLoss()(data=data, global_valid_seqs=seqs, global_valid_toks=None, logits=rewards[:, None])
    assert again == loss
    right, wrong = torch.log1p(torch.exp(-beta * margin)), torch.log1p(torch.exp(beta * margin))
    expected = {
        ("sigmoid", 0.0): right,
        ("sigmoid", 0.1): 0.9 * right + 0.1 * wrong,
        ("ipo", 0.0): (margin - 1 / (2 * beta)) ** 2,
    }
    for (kind, smoothing), per_pair in expected.items():
        loss_fn = DPOLossFn({**DPO, "preference_loss": kind, "label_smoothing": smoothing})
        loss, *_ = loss_fn._preference_loss(rewards, data["sample_mask"], seqs, beta)
        torch.testing.assert_close(loss, per_pair.mean())


def test_bradley_terry_margin_and_centring():
    rewards = torch.tensor([1.0, -0.5, 0.2, 0.9], dtype=torch.float64)
    data = BatchedDataDict(sample_mask=torch.ones(4), margin=torch.tensor([0.5, 0.5, 0.1, 0.1]))
    loss, metrics = BradleyTerryLoss(center_rewards_coefficient=0.01)(rewards, data, torch.tensor(4.0))
    margins = torch.tensor([1.5 - 0.5, -0.7 - 0.1], dtype=torch.float64)
    center = (torch.tensor([0.5, 1.1], dtype=torch.float64) ** 2).mean()
    torch.testing.assert_close(loss, -F.logsigmoid(margins).mean() + 0.01 * center, rtol=1e-7, atol=1e-9)
    assert float(metrics["loss"]) == pytest.approx(float(loss))


def pg_expected(cfg, data, seqs, toks, logits):
    """The clipped policy-gradient loss from its formulas, with loops where they are clearest."""
    mask, sample = mask_of(data), data["sample_mask"]
    get = lambda key: data[key][:, 1:]  # noqa: E731
    adv, prev, gen, ref = map(get, ("advantages", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs"))
    counts = mask.sum(1)

    def reduce(x):
        x = torch.where(mask > 0, x, 0)
        if cfg["token_level_loss"]:
            return x.sum() / toks
        lengths = cfg.get("dr_grpo_max_tokens") or counts + 1e-8
        return ((x.sum(1) / lengths) * sample).sum() / seqs

    def loss(lp):
        log_ratio = torch.where(mask > 0, lp - prev, 0)
        if cfg.get("sequence_level_importance_ratios"):
            log_ratio = (log_ratio.sum(1) / (counts + 1e-8))[:, None].expand_as(lp)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - cfg["ratio_clip_min"], 1 + cfg["ratio_clip_max"])
        if cfg.get("disable_ppo_ratio"):
            actor = -adv * lp
        elif cfg.get("clip_type") == "cispo":
            actor = -adv * clipped.detach() * lp
        else:
            actor = torch.maximum(-adv * ratio, -adv * clipped)
        if cfg["ratio_clip_c"]:
            actor = torch.where(adv < 0, torch.minimum(actor, -adv * cfg["ratio_clip_c"]), actor)
        actor = actor * weights()
        x = (ref - lp).clamp(-20, 20)
        kl = {"k1": -x, "k2": x**2 / 2, "k3": x.exp() - x - 1}[cfg.get("kl_estimator", "k3")]
        if cfg.get("kl_output_clamp"):
            kl = kl.clamp(-cfg["kl_output_clamp"], cfg["kl_output_clamp"])
        sampled = gen if cfg["use_on_policy_kl_approximation"] else lp.detach()
        w = (lp - sampled).exp()
        kl = kl * (w if cfg.get("kl_gradient") == "unbiased" else w.detach())
        total = reduce(actor) + cfg["reference_policy_kl_penalty"] * reduce(kl)
        return total - cfg.get("entropy_bonus", 0) * reduce(entropy_of(logits))

    def weights():
        if not cfg["use_importance_sampling_correction"]:
            return 1.0
        difference = torch.where(mask > 0, prev - gen, 0)
        by_sequence = cfg.get("sequence_level_importance_ratios") or cfg.get("importance_sampling_level") == "sequence"
        w = difference.sum(1, keepdim=True).exp() if by_sequence else (prev - gen).exp()
        upper = cfg.get("truncated_importance_sampling_ratio")
        lower = cfg.get("truncated_importance_sampling_ratio_min") or 0
        kind = cfg.get("truncated_importance_sampling_type") or "tis"
        if upper is None:
            return w
        if kind == "tis":
            return w.clamp(lower, upper)
        if kind == "icepop":
            return w * ((w >= lower) & (w <= upper))
        geometric = (difference.sum(1) / (counts + 1e-8)).exp()[:, None]
        return w * ((geometric >= lower) & (geometric <= upper))

    return loss


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("changes", PG_VARIANTS.values(), ids=PG_VARIANTS)
def test_clipped_pg(changes, seed):
    logits, data, seqs, toks = batch(seed)
    data["prev_logprobs"] = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    jitter = torch.randn(ROWS, WIDTH - 1, generator=generator, dtype=torch.float64) * 0.3
    data["prev_logprobs"][:, 1:] = logprobs_of(logits, data).detach() + jitter  # ratios on both sides of the clip
    data["generation_logprobs"] = data["prev_logprobs"] + 0.1 * torch.randn(ROWS, WIDTH, generator=generator)
    cfg = {**PG, **changes}
    metrics = check(ClippedPGLossFn(cfg), pg_expected(cfg, data, seqs, toks, logits), logits, data, seqs, toks)
    assert set(metrics) == {
        "loss", "probs_ratio", "probs_ratio_min", "probs_ratio_max", "probs_ratio_clamped", "probs_ratio_clamped_min",
        "probs_ratio_clamped_max", "kl_penalty", "token_mult_prob_error", "gen_kl_error", "policy_kl_error",
        "js_divergence_error", "logprob_error", "sampling_importance_ratio", "num_valid_samples", "approx_entropy",
        "clip_fraction_low", "clip_fraction_high",
        *(["is_oob_ratio"] if "truncated_importance_sampling_ratio" in cfg else []),
    }  # fmt: skip
    mask = mask_of(data)
    if not (cfg.get("disable_ppo_ratio") or cfg.get("sequence_level_importance_ratios")):
        ratio = (logprobs_of(logits, data).detach() - data["prev_logprobs"][:, 1:]).exp()
        advantages = data["advantages"][:, 1:]
        low, high = ratio < 1 - cfg["ratio_clip_min"], ratio > 1 + cfg["ratio_clip_max"]
        both_signs = cfg.get("clip_type") == "cispo"  # CISPO clips its weight, whatever the sign
        low = low & (advantages != 0 if both_signs else advantages < 0)
        high = high & (advantages != 0 if both_signs else advantages > 0)
        assert ((low | high) * mask).any(), "no token is clipped"
        torch.testing.assert_close(metrics["clip_fraction_low"], (low * mask).sum() / toks)
        torch.testing.assert_close(metrics["clip_fraction_high"], (high * mask).sum() / toks)
        counted = ratio[mask > 0]
        assert (metrics["probs_ratio_min"], metrics["probs_ratio_max"]) == (counted.min(), counted.max())
        bounded = counted.clamp(1 - cfg["ratio_clip_min"], 1 + cfg["ratio_clip_max"])
        assert (metrics["probs_ratio_clamped_min"], metrics["probs_ratio_clamped_max"]) == (
            bounded.min(),
            bounded.max(),
        )
    mismatch = (data["generation_logprobs"] - data["prev_logprobs"])[:, 1:].abs().exp()
    torch.testing.assert_close(metrics["token_mult_prob_error"], (mismatch * mask).sum() / toks)
    torch.testing.assert_close(metrics["logprob_error"], (mismatch.log().clamp(max=1) * mask).sum() / toks)
    lp = logprobs_of(logits, data).detach()
    entropy = -((lp - data["generation_logprobs"][:, 1:]).exp() * lp * mask).sum() / toks
    torch.testing.assert_close(metrics["approx_entropy"], entropy)
    check_mismatch_metrics(metrics, cfg, data, mask, seqs, toks)


def check_mismatch_metrics(metrics, cfg, data, mask, seqs, toks):
    """Importance weights and divergences between the sampler's and the trainer's log-probabilities."""
    prev, gen = data["prev_logprobs"][:, 1:], data["generation_logprobs"][:, 1:]
    by_sequence = cfg.get("sequence_level_importance_ratios") or cfg.get("importance_sampling_level") == "sequence"
    if "truncated_importance_sampling_ratio" not in cfg:
        if by_sequence:
            weights = ((prev - gen) * mask).sum(1).exp()
            expected = (weights * data["sample_mask"]).sum() / seqs
        else:
            expected = ((prev - gen).exp() * mask).sum() / toks
        torch.testing.assert_close(metrics["sampling_importance_ratio"], expected)
    elif cfg.get("truncated_importance_sampling_type", "tis") != "seq-mask-tis" and not by_sequence:
        weights, lower = (prev - gen).exp(), cfg.get("truncated_importance_sampling_ratio_min", 0)
        outside = (weights > cfg["truncated_importance_sampling_ratio"]) | (weights < lower)
        assert 0 < outside[mask > 0].double().mean() < 1
        torch.testing.assert_close(metrics["is_oob_ratio"], (outside * mask).sum() / toks)
    estimate = {"k1": lambda x: -x, "k2": lambda x: x**2 / 2, "k3": lambda x: x.exp() - x - 1}
    kind = estimate[cfg.get("kl_estimator", "k3")]
    torch.testing.assert_close(metrics["gen_kl_error"], (kind(prev - gen) * mask).sum() / toks)
    torch.testing.assert_close(metrics["policy_kl_error"], (kind(gen - prev) * mask).sum() / toks)
    mixture = ((prev.exp() + gen.exp()) / 2).log()
    js = (estimate["k3"](mixture - prev) + estimate["k3"](mixture - gen)) / 2
    torch.testing.assert_close(metrics["js_divergence_error"], (js * mask).sum() / toks)


def test_kl_estimators_are_clamped():
    far = torch.tensor([1e4])
    assert calculate_kl(torch.zeros(1), far, "k3").isfinite().all()
    assert calculate_kl(torch.zeros(1), far, "k1", clamp=None) == -1e4


def test_soft_overlong_penalty():
    lengths = torch.tensor([10, 80, 90, 100, 120])
    assert soft_overlong_penalty(lengths, 100, 20).tolist() == [0, 0, -0.5, -1, -1]
    with pytest.raises(ValueError, match="cache_length"):
        soft_overlong_penalty(lengths, 100, 0)


def test_kto():
    logits, data, seqs, toks = batch()
    data["desirable"] = torch.tensor([1, 0, 1, 1, 0, 1], dtype=torch.bool)
    data["kl_reference_point"] = torch.full((ROWS,), 0.3)
    cfg = {"reference_policy_kl_penalty": 0.2, "desirable_weight": 1.2, "undesirable_weight": 0.8}

    def expected(lp):
        r = ((lp - data["reference_policy_logprobs"][:, :-1]) * mask_of(data)).sum(1)
        z = 0.3
        good, bad = 1.2 * (1 - torch.sigmoid(0.2 * (r - z))), 0.8 * (1 - torch.sigmoid(0.2 * (z - r)))
        return (torch.where(data["desirable"], good, bad) * data["sample_mask"]).sum() / seqs

    check_kto = KTOLossFn(cfg)
    data["kl_reference_point"] = torch.full((ROWS,), 0.3, dtype=torch.float64)
    check(check_kto, expected, logits, data, seqs, toks)
    assert kto_reference_point(torch.tensor([-3.0]), torch.tensor([-1.0])) == 0


@pytest.mark.parametrize(("kind", "share"), [("forward", 1.0), ("reverse", 0.0), ("mixed", 0.3)])
def test_distillation(kind, share):
    logits, data, seqs, toks = batch()
    teacher = torch.randn(ROWS, WIDTH, VOCAB, dtype=torch.float64)
    top = teacher.topk(4)
    data["teacher_topk_logits"], data["teacher_topk_indices"] = top.values, top.indices
    loss, _ = DistillationLossFn({"kl_type": kind, "mixed_kl_weight": 0.3})(logits, data, seqs, toks)
    p = F.log_softmax(top.values, -1)[:, :-1]
    q = F.log_softmax(logits.gather(2, top.indices), -1)[:, :-1]
    per_token = share * (p.exp() * (p - q)).sum(-1) + (1 - share) * (q.exp() * (q - p)).sum(-1)
    expected = (per_token * mask_of(data)).sum() / toks
    torch.testing.assert_close(loss, expected)
    ours, theirs = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (loss, expected))
    torch.testing.assert_close(ours, theirs)


def all_losses():
    gspo = {**PG, "token_level_loss": False, "sequence_level_importance_ratios": True, "ratio_clip_c": 3.0}
    return [NLLLoss(), DPOLossFn(DPO), ClippedPGLossFn(PG), ClippedPGLossFn(gspo)]


@pytest.mark.parametrize("loss_fn", all_losses(), ids=lambda fn: type(fn).__name__)
def test_microbatches_add_up(loss_fn):
    logits, data, seqs, toks = batch()
    whole, whole_metrics = loss_fn(logits, data, seqs, toks)
    parts = [loss_fn(logits[i : i + 2], data.slice(i, i + 2), seqs, toks) for i in range(0, ROWS, 2)]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
    for name, value in whole_metrics.items():
        values = torch.stack([metrics[name] for _, metrics in parts])
        combined = values.amin() if name.endswith("_min") else values.amax() if name.endswith("_max") else values.sum()
        torch.testing.assert_close(combined, value, msg=name)


@pytest.mark.parametrize("loss_fn", all_losses(), ids=lambda fn: type(fn).__name__)
@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_masked_positions_may_hold_anything(loss_fn, bad):
    logits, data, seqs, toks = batch()
    clean, clean_metrics = loss_fn(logits, data, seqs, toks)
    clean_gradient = torch.autograd.grad(clean, logits)[0]
    masked = torch.cat([mask_of(data) == 0, torch.ones(ROWS, 1, dtype=torch.bool)], dim=1)  # of predicting positions
    dirty = torch.where(masked[..., None], bad, logits.detach()).requires_grad_()
    for key in ("prev_logprobs", "generation_logprobs"):
        data[key][:, 1:][mask_of(data) == 0] = bad
    of_column = masked if isinstance(loss_fn, DPOLossFn) else masked.roll(1, 1)
    data["reference_policy_logprobs"] = torch.where(of_column, bad, data["reference_policy_logprobs"])
    loss, metrics = loss_fn(dirty, data, seqs, toks)
    torch.testing.assert_close(loss, clean)
    torch.testing.assert_close(torch.autograd.grad(loss, dirty)[0], clean_gradient)
    for name, value in clean_metrics.items():
        torch.testing.assert_close(metrics[name], value, msg=name)


def test_counted_nonfinite_is_reported_with_its_place():
    logits, data, seqs, toks = batch()
    row, column = mask_of(data).nonzero()[3].tolist()
    dirty = logits.detach().clone()
    dirty[row, column] = float("nan")
    with pytest.raises(ValueError, match=f"row {row}, position {column + 1}"):
        NLLLoss()(dirty, data, seqs, toks)


def test_half_precision_is_computed_in_float32():
    logits, data, seqs, toks = batch(dtype=torch.bfloat16)
    loss, _ = NLLLoss()(logits, data, seqs, toks)
    expected = -(logprobs_of(logits, data) * mask_of(data)).sum() / toks
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)


# ------------------------------------------------------------------ packs


@pytest.mark.parametrize("loss_fn", all_losses(), ids=lambda fn: type(fn).__name__)
@pytest.mark.parametrize("form", ["true and padded", "padded only", "tail in the last sequence"])
def test_packs_equal_rows(loss_fn, form):
    logits, data, seqs, toks = batch()
    packed, true, padded = pack(logits, data, multiple=4, tail=6)
    if form == "padded only":
        true = padded
    if form == "tail in the last sequence":
        padded[-1] += 6
        true = padded
    rows, rows_metrics = loss_fn(logits, data, seqs, toks)
    loss, metrics = SequencePackingLossWrapper(loss_fn, true, padded)(packed, data, seqs, toks)
    torch.testing.assert_close(loss, rows)
    ours, theirs = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (loss, rows))
    torch.testing.assert_close(ours, theirs)
    for name, value in rows_metrics.items():
        torch.testing.assert_close(metrics[name], value, msg=name)


def test_packs_of_a_loss_written_by_a_user():
    class MeanLogit(LossFunction):
        """A loss that reads no log-probabilities and is therefore called once per sequence; it also reports a
        minimum."""

        loss_type = LossType.TOKEN_LEVEL
        metric_reductions = {"first_token": "min"}  # noqa: RUF012

        def __call__(self, next_token_logits, data, global_valid_seqs, global_valid_toks, *groups):
            mask = data["token_mask"] * data["sample_mask"][:, None]
            loss = (next_token_logits.mean(-1) * mask).sum() / global_valid_toks
            return loss, {"loss": loss.detach(), "first_token": data["input_ids"][:, 0].min()}

    logits, data, seqs, toks = batch()
    packed, true, padded = pack(logits, data, multiple=4, tail=3)
    rows, rows_metrics = MeanLogit()(logits, data, seqs, toks)
    loss, metrics = SequencePackingLossWrapper(MeanLogit(), true, padded)(packed, data, seqs, toks)
    torch.testing.assert_close(loss, rows, check_dtype=False)
    assert metrics["first_token"] == rows_metrics["first_token"]


# ------------------------------------------------------------------ refusals, and the guide's example


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ratio_clip_c": 1.0}, "ratio_clip_c: must be more than 1"),
        ({"sequence_level_importance_ratios": True}, "token_level_loss=False"),
        ({"kl_estimator": "k4"}, "kl_estimator: must be one of k1, k2, k3"),
        ({"ratio_clip": 0.2}, "unknown keys ratio_clip"),
        ({"dr_grpo_max_tokens": 8}, "dr_grpo_max_tokens"),
        ({"truncated_importance_sampling_ratio": 2.0}, "use_importance_sampling_correction"),
        ({**IS, "truncated_importance_sampling_ratio": 0}, "must be more than 0"),
        ({**IS, "truncated_importance_sampling_ratio_min": 0.5}, "need truncated_importance_sampling_ratio"),
        ({**IS, "truncated_importance_sampling_type": "icepop"}, "need truncated_importance_sampling_ratio"),
        (
            {**IS, "truncated_importance_sampling_ratio": 2.0, "truncated_importance_sampling_ratio_min": 2.1},
            r"\(2.1\) must be at most truncated_importance_sampling_ratio \(2.0\)",
        ),
        (
            {**IS, "truncated_importance_sampling_type": "icepop", "truncated_importance_sampling_ratio": 2.0},
            "must be set for truncated_importance_sampling_type=icepop",
        ),
        ({"clip_type": "cispo", "ratio_clip_c": 3.0}, "neither sequence-level ratios nor a dual clip"),
        ({"disable_ppo_ratio": True, "ratio_clip_c": 3.0}, "disable_ppo_ratio removes the ratio"),
        ({"reference_policy_kl_penalty": 0.0, "use_kl_in_reward": True}, "use_kl_in_reward needs"),
        ({"ratio_clip_min": -0.1}, "ratio_clip_min: must be at least 0"),
        ({"ratio_clip_mim": 0.1}, "did you mean ratio_clip_min"),
        ({"entropy_bonus": True}, "entropy_bonus: must be a number"),
        ({"token_level_loss": "yes"}, "token_level_loss: must be true or false"),
    ],
)
def test_clipped_pg_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        ClippedPGLossFn({**PG, **changes})


def test_missing_keys_are_listed():
    logits, data, seqs, toks = batch()
    del data["advantages"], data["prev_logprobs"]
    with pytest.raises(ValueError, match="lacks advantages, prev_logprobs"):
        ClippedPGLossFn(PG)(logits, data, seqs, toks)
    with pytest.raises(ValueError, match="lacks ratio_clip_min"):
        ClippedPGLossFn({k: v for k, v in PG.items() if k != "ratio_clip_min"})


def test_shapes_that_do_not_fit():
    logits, data, seqs, toks = batch()
    with pytest.raises(ValueError, match="next_token_logits"):
        NLLLoss()(logits[:, :-1], data, seqs, toks)
    with pytest.raises(AssertionError, match="next_token_logits"):  # what ported code catches
        NLLLoss()(logits[:-1], data, seqs, toks)
    with pytest.raises(ValueError, match="global_valid_toks"):
        NLLLoss()(logits, data, seqs, torch.ones(2))
    with pytest.raises(ValueError, match="global_valid_toks"):
        NLLLoss()(logits, data, seqs, None)
    with pytest.raises(ValueError, match="even number of rows"):
        DPOLossFn(DPO)(logits[:3], data.slice(0, 3), seqs, toks)
    with pytest.raises(ValueError, match="cu_seqlens_q has 2 sequences, but data has 6"):
        SequencePackingLossWrapper(NLLLoss(), torch.tensor([0, 4, 8]))(logits[:1], data, seqs, toks)
    data["advantages"] = data["advantages"][:, :-1]
    with pytest.raises(ValueError, match="advantages must be"):
        ClippedPGLossFn(PG)(logits, data, seqs, toks)


def test_the_guides_example():
    class SimpleAverageLoss(LossFunction):
        loss_type = LossType.TOKEN_LEVEL

        def __call__(self, next_token_losses, data, total_valid_tokens_or_seqs):
            mask = data["token_mask"] * data["sample_mask"].unsqueeze(-1)
            return (next_token_losses * mask).sum() / (total_valid_tokens_or_seqs + 1e-8)

    losses = torch.randn((2, 16))
    data = {
        "token_mask": torch.tensor([[1] * 10 + [0] * 6, [1] * 6 + [0] * 10]),
        "sample_mask": torch.ones(2),
    }
    total = torch.sum(data["token_mask"] * data["sample_mask"].unsqueeze(-1))
    loss_fn = SimpleAverageLoss()
    parts = [{key: value[i : i + 1] for key, value in data.items()} for i in (0, 1)]
    summed = sum(loss_fn(losses[i : i + 1], parts[i], total) for i in (0, 1))
    torch.testing.assert_close(loss_fn(losses, data, total), summed)


def test_importing_the_losses_imports_torch_and_nothing_heavier():
    code = "import sys, mcore_rl.algorithms.loss_functions; print(*{name.split('.')[0] for name in sys.modules})"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert "torch" in loaded
    assert not loaded & {"megatron", "ray", "transformers", "datasets", "safetensors", "pydantic"}

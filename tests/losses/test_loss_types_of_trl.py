"""Tests of TRL's further losses on pairs: against TRL's numbers and gradients, and against formulas in float64."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from float32 import FORMULA, FORWARD, approx32, assert_close32
from trl_cases import BETA, EPSILON, OPTIONS, batch, of_trainer, ours

from mcore_rl.algorithms.loss_functions import DFTLoss, DPOLossFn, KTOLossFn, WeightedDPOLossFn
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.errors import ContractError
from mcore_rl.losses.options import WITH_F_DIVERGENCE, WITHOUT_REFERENCE

SMOOTH = {"label_smoothing": EPSILON}
AVERAGE = {"preference_average_log_probs": True}
FORWARD_KL, JS = {"f_divergence_type": "forward_kl"}, {"f_divergence_type": "js_divergence"}
ALPHA = {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3}
CASES = [
    ("sigmoid_norm", {}, {}),
    ("exo_pair", SMOOTH, {}),
    ("nca_pair", {}, {}),
    ("bco_pair", {}, {}),
    ("sppo_hard", {}, {}),
    ("aot", {}, {}),
    ("aot", SMOOTH, {}),
    ("aot_unpaired", {}, {}),
    ("aot_unpaired", SMOOTH, {}),
    ("discopop", {}, {}),
    ("discopop", {"discopop_tau": 0.7}, {}),
    *(("sigmoid", divergence, {}) for divergence in (FORWARD_KL, JS, ALPHA)),
    ("sigmoid", {**ALPHA, "f_alpha_divergence_coef": 1.0}, {}),
    ("sigmoid_norm", JS, {}),
    ("ipo", ALPHA, AVERAGE),
    ("hinge", FORWARD_KL, {}),
    ("exo_pair", {**SMOOTH, **ALPHA}, {}),
    ("robust", {**SMOOTH, **JS}, {}),
    ("discopop", JS, {}),
    *((kind, {"ld_alpha": 0.35}, {}) for kind in ("sigmoid", "sigmoid_norm", "nca_pair", "aot", "aot_unpaired")),
    ("sigmoid", {"ld_alpha": 0.0}, {}),
    ("sigmoid", {"ld_alpha": 1.0}, {}),
    ("ipo", {"ld_alpha": 0.35, **ALPHA}, AVERAGE),
]
BATCHES = ["ordinary", "length one", "all equal", "ties", "one pair"]


def batch_of(name):
    logprobs, data = batch()
    rows, values = torch.arange(10), logprobs.detach()
    if name == "length one":
        data["token_mask"][:] = 0
        data["token_mask"][rows, 1 + rows % 8] = 1
    if name == "all equal":
        rows = rows // 2 * 2
    if name == "ties":
        rows[4:6], rows[8:] = rows[:2], rows[:2]
    if name == "one pair":
        rows = rows[:2]
    data = BatchedDataDict({key: column[rows] for key, column in data.items()})
    return values[rows].clone().requires_grad_(), data


@pytest.mark.long
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(("kind", "options", "own"), CASES)
def test_loss_equals_trls(kind, options, own, name):
    logprobs, data = batch_of(name)
    loss, gradient, metrics = ours(logprobs, data, preference_loss=kind, **options, **own)
    theirs = {key: value for key, value in options.items() if key != "label_smoothing"}
    expected, their_metrics = of_trainer(logprobs, data, kind, options.get("label_smoothing", 0.0), **theirs)
    assert_close32(loss, expected, FORMULA, scale=1)
    assert_close32(gradient, torch.autograd.grad(expected, logprobs)[0], FORWARD, scale=BETA)
    if not own:
        for side in ("chosen", "rejected"):
            reward = BETA * float(metrics[f"rewards_{side}_mean"])
            assert reward == approx32(their_metrics[f"rewards/{side}"][0], FORMULA)


@pytest.mark.long
def test_weighted_sum_equals_trls():
    kinds, weights = ["bco_pair", "aot", "sigmoid_norm", "exo_pair"], [0.5, 1.5, 0.25, 0.75]
    logprobs, data = batch()
    loss, gradient, metrics = ours(
        logprobs, data, preference_loss=kinds, preference_loss_weights=weights, ld_alpha=0.4, **SMOOTH
    )
    expected, _ = of_trainer(logprobs, data, kinds, EPSILON, weights, ld_alpha=0.4)
    # TRL's sigmoid_norm does not read label_smoothing.
    plain, smooth = (
        ours(logprobs, data, preference_loss="sigmoid_norm", ld_alpha=0.4, **more)[:2] for more in ({}, SMOOTH)
    )
    assert_close32(loss, expected + 0.25 * (smooth[0] - plain[0]), FORMULA, scale=1)
    theirs = torch.autograd.grad(expected, logprobs)[0] + 0.25 * (smooth[1] - plain[1])
    assert_close32(gradient, theirs, FORWARD, scale=BETA)
    for kind in kinds:
        options = SMOOTH if kind != "bco_pair" else {}
        alone = ours(logprobs, data, preference_loss=kind, ld_alpha=0.4, **options)[0]
        assert float(metrics[f"preference_loss_{kind}"]) == approx32(alone.item(), FORMULA)


# ------------------------------------------------------------------ formulas in float64


def formula(kind, policy, reference):
    """Losses of summed log-probabilities [2n], as the papers write them."""
    ratio = policy - reference
    c, r = ratio[::2], ratio[1::2]
    x = BETA * (c - r)
    log_sigmoid = lambda y: -torch.log1p(torch.exp(-y))  # noqa: E731
    if kind == "exo_pair":
        q = torch.stack([torch.sigmoid(x), 1 - torch.sigmoid(x)])
        p = torch.tensor([[1 - EPSILON], [EPSILON]], dtype=x.dtype)
        return (q * (q / p).log()).sum(0)
    if kind == "nca_pair":
        return -log_sigmoid(BETA * c) - (log_sigmoid(-BETA * c) + log_sigmoid(-BETA * r)) / 2
    if kind == "bco_pair":
        return -log_sigmoid(BETA * c) - log_sigmoid(-BETA * r)
    if kind == "sppo_hard":
        return (c - 1 / (2 * BETA)) ** 2 + (r + 1 / (2 * BETA)) ** 2
    if kind == "discopop":
        m = torch.sigmoid(x / 0.05)
        return -log_sigmoid(x) * (1 - m) + torch.exp(-x) * m
    if kind == "aot":
        margins = [y[::2] - y[1::2] for y in (policy, reference)]
        return -log_sigmoid(BETA * (margins[0].sort().values - margins[1].sort().values))
    assert kind == "aot_unpaired"
    return -log_sigmoid(BETA * (c.sort().values - r.sort().values))


NEW = ["exo_pair", "nca_pair", "bco_pair", "sppo_hard", "discopop", "aot", "aot_unpaired"]


def options_of(kind):
    return SMOOTH if kind in ("exo_pair", "robust") else {}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", NEW)
def test_loss_equals_formula_in_float64(kind, masked):
    logprobs, data = batch()
    logprobs = logprobs.detach().double().requires_grad_()
    counted = torch.ones(10, dtype=torch.bool)
    if masked:
        counted[4:6] = data["sample_mask"][4:6] = False
    loss, gradient, _ = ours(logprobs, data, preference_loss=kind, **options_of(kind))
    mask = data["token_mask"][:, 1:].double()
    sums = [(y * mask).sum(1)[counted] for y in (logprobs, data["reference_policy_logprobs"][:, :-1].double())]
    expected = formula(kind, *sums).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logprobs)[0], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", ["aot", "aot_unpaired"])
@pytest.mark.parametrize("size", [2, 4])
def test_microbatches_of_sorting_loss_add_up(kind, size):
    logprobs, data = batch()
    whole, gradient, metrics = ours(logprobs, data, preference_loss=kind)
    loss_fn = DPOLossFn({**OPTIONS, "preference_loss": kind})
    data.update(loss_fn.batch_columns(logprobs.detach(), data))
    parts = [
        loss_fn.from_logprobs(logprobs[i : i + size], data.slice(i, min(i + size, 10)), torch.tensor(10.0), None)
        for i in range(0, 10, size)
    ]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
    torch.testing.assert_close(torch.autograd.grad(sum(loss for loss, _ in parts), logprobs)[0], gradient)
    for name, value in metrics.items():
        torch.testing.assert_close(sum(part[name] for _, part in parts), value, msg=name)


@pytest.mark.parametrize("kind", ["sigmoid_norm", *NEW])
def test_masked_batch_has_no_loss_and_far_margins_no_nan(kind):
    logprobs, data = batch()
    for distance in (-300.0, 300.0):
        far = (logprobs + torch.where(torch.arange(10) % 2 == 0, distance, -distance)[:, None]).detach()
        loss, gradient, metrics = ours(far.requires_grad_(), data, preference_loss=kind, **options_of(kind))
        assert not loss.isnan() and not gradient.isnan().any()
        assert (loss.isfinite() and gradient.isfinite().all()) or kind == "discopop"
    data["sample_mask"][:] = 0
    loss, gradient, metrics = ours(logprobs, data, preference_loss=kind, **options_of(kind))
    assert not loss and not gradient.any()
    assert not any(float(value) for value in metrics.values())


@pytest.mark.parametrize("divergence", [FORWARD_KL, JS, ALPHA, {**ALPHA, "f_alpha_divergence_coef": 2.0}])
def test_f_divergence_is_finite_for_far_responses(divergence):
    logprobs, data = batch()
    for distance in (-300.0, 300.0):
        loss, gradient, _ = ours((logprobs + distance).detach().requires_grad_(), data, **divergence)
        assert loss.isfinite() and gradient.isfinite().all()


# ------------------------------------------------------------------ weights of pairs


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sigmoid", "nca_pair", "sppo_hard", "sigmoid_norm"])
def test_weights_of_pairs_equal_trls(kind):
    _, data = batch()
    generator = torch.Generator().manual_seed(5)
    data["input_ids"] = torch.randint(0, 11, (10, 9), generator=generator)
    logits = (2 * torch.randn(10, 9, 11, generator=generator)).requires_grad_()
    loss_fn = WeightedDPOLossFn({**OPTIONS, "preference_loss": kind, "use_weighting": True})
    loss, _ = loss_fn(logits, data, data["sample_mask"].sum(), None)
    scores = logits.log_softmax(-1)[:, :-1]
    logprobs = scores.gather(2, data["input_ids"][:, 1:, None])[..., 0]
    sum_sq = torch.logsumexp(2 * scores, -1)
    expected, _ = of_trainer(logprobs, data, kind, 0.0, log_sum_sq=sum_sq, use_weighting=True)
    assert_close32(loss, expected, FORMULA, scale=1)
    theirs = torch.autograd.grad(expected, logits, retain_graph=True)[0]
    assert_close32(torch.autograd.grad(loss, logits)[0], theirs, FORWARD, scale=BETA)
    unweighted, _ = DPOLossFn({**OPTIONS, "preference_loss": kind})(logits, data, data["sample_mask"].sum(), None)
    assert abs(unweighted.item() - loss.item()) > 1e-2


def test_weighted_loss_refuses_logprobs():
    logprobs, data = batch()
    loss_fn = WeightedDPOLossFn({**OPTIONS, "use_weighting": True})
    with pytest.raises(ContractError, match="needs whole distributions, not log-probabilities; pass logits"):
        loss_fn.from_logprobs(logprobs, data, torch.tensor(10.0), None)
    with pytest.raises(ContractError, match="needs data and next_token_logits; log-probabilities are not"):
        loss_fn(data=data, global_valid_seqs=torch.tensor(10.0), next_token_logprobs=logprobs)
    with pytest.raises(ContractError, match="does not support use_weighting=True; use WeightedDPOLossFn"):
        DPOLossFn({**OPTIONS, "use_weighting": True})
    with pytest.raises(ContractError, match="does not support use_weighting=False; use DPOLossFn"):
        WeightedDPOLossFn(OPTIONS)


# ------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preference_loss": "exo_pair"}, "preference_loss=exo_pair needs a label_smoothing"),
        (
            {"preference_loss": "sppo_hard", "reference_policy_kl_penalty": 0.0},
            "preference_loss=sppo_hard divides by reference_policy_kl_penalty, which must not be 0",
        ),
        ({"discopop_tau": 0.1}, "discopop_tau applies to preference_loss=discopop, not to sigmoid"),
        ({"preference_loss": "nca_pair", **SMOOTH}, "label_smoothing applies to preference_loss=sigmoid, .* nca_pair"),
        ({"preference_loss": "bco_pair", **JS}, "f_divergence_type=js_divergence does not apply to bco_pair"),
        ({"preference_loss": ["sigmoid", "aot"], **JS}, "does not apply to aot"),
        ({"f_alpha_divergence_coef": 0.2}, "f_alpha_divergence_coef applies to f_divergence_type=alpha_divergence"),
        ({**JS, "f_alpha_divergence_coef": 0.2}, "not to js_divergence"),
        ({"f_divergence_type": "hellinger"}, "f_divergence_type: must be one of reverse_kl, forward_kl"),
        ({"ld_alpha": 1.5}, "ld_alpha must be at most 1, got 1.5"),
        (
            {"preference_loss": "simpo", "ld_alpha": 0.5},
            "ld_alpha needs a loss with a reference, which simpo does not have",
        ),
        ({"preference_loss": "simpo", "use_weighting": True}, "use_weighting needs a loss with a reference"),
        (
            {"preference_loss": "aot", "use_weighting": True},
            "use_weighting gives each pair a weight, but aot compares values",
        ),
        ({"preference_loss": "sigmoid_norm", **AVERAGE}, "sigmoid_norm already averages over tokens"),
    ],
)
def test_option_that_is_not_read_is_refused(options, message):
    with pytest.raises(ContractError, match=message):
        DPOLossFn({**OPTIONS, **options})


def test_sorting_loss_needs_its_column():
    logprobs, data = batch()
    with pytest.raises(ContractError, match="DPOLossFn: data lacks aot_partner"):
        DPOLossFn({**OPTIONS, "preference_loss": "aot"}).from_logprobs(logprobs, data, torch.tensor(10.0), None)


def test_losses_with_f_divergences_have_references():
    assert not WITH_F_DIVERGENCE & WITHOUT_REFERENCE


# ------------------------------------------------------------------ KTO and SFT


def test_apo_zero_unpaired_is_kto_with_reference_point_zero():
    logprobs, data = batch()
    data["desirable"] = torch.arange(10) % 3 == 0
    common = {"reference_policy_kl_penalty": BETA, "desirable_weight": 1.3, "undesirable_weight": 0.7}
    loss, metrics = KTOLossFn({**common, "loss": "apo_zero_unpaired"}).from_logprobs(
        logprobs, data, torch.tensor(10.0), None
    )
    ratio = (logprobs - data["reference_policy_logprobs"][:, :-1]).double() * data["token_mask"][:, 1:]
    value = torch.sigmoid(BETA * ratio.sum(1))
    expected = torch.where(data["desirable"], 1.3 * (1 - value), 0.7 * value).mean()
    assert_close32(loss.double(), expected, FORMULA, scale=1)
    assert metrics["kl_reference_point"] == 0
    with pytest.raises(
        ContractError, match="mismatched applies to the reference point, which loss=apo_zero_unpaired does"
    ):
        KTOLossFn({**common, "loss": "apo_zero_unpaired", "mismatched": "batch"})
    with pytest.raises(ContractError, match="KTOLossFn: data lacks kl_reference_point"):
        KTOLossFn(common).from_logprobs(logprobs, data, torch.tensor(10.0), None)


@pytest.mark.parametrize("counted", [True, False])
def test_dft_equals_formula_in_float64(counted):
    logprobs, data = batch()
    logprobs = logprobs.detach().double().requires_grad_()
    data["sample_mask"][2:4] = 0
    if not counted:
        data["sample_mask"][:] = 0
    mask = data["token_mask"][:, 1:].double() * data["sample_mask"][:, None]
    loss, metrics = DFTLoss().from_logprobs(logprobs, data, data["sample_mask"].sum(), mask.sum())
    total = mask.sum().clamp(min=1)
    expected = -(logprobs.exp().detach() * logprobs * mask).sum() / total
    torch.testing.assert_close(loss, expected, rtol=1e-7, atol=1e-9)
    ours_, theirs = (torch.autograd.grad(x, logprobs)[0] for x in (loss, expected))
    torch.testing.assert_close(ours_, theirs, rtol=1e-7, atol=1e-9)
    assert float(metrics["nll_loss"]) == pytest.approx(float(-(logprobs * mask).sum() / total), rel=1e-6)


# ------------------------------------------------------------------ today's losses


def before(kind, chosen, rejected, options):
    """The losses as they were before there was a table of them."""
    beta, smoothing, margin = BETA, options.get("label_smoothing", 0.0), chosen - rejected - 0.0
    if kind == "apo_zero":
        return 1 - torch.sigmoid(beta * chosen) + torch.sigmoid(beta * rejected)
    if kind == "apo_down":
        return torch.sigmoid(beta * chosen) + 1 - torch.sigmoid(beta * (chosen - rejected))
    if kind == "ipo":
        return (margin - 1 / (2 * beta)) ** 2
    if kind == "hinge":
        return F.relu(1 - beta * margin)
    right, wrong = -F.logsigmoid(1.0 * (beta * margin)), -F.logsigmoid(1.0 * -(beta * margin))
    if kind == "robust":
        return ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing)
    return right if smoothing == 0 else (1 - smoothing) * right + smoothing * wrong


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in ("sigmoid", "ipo", "hinge", "apo_zero", "apo_down")),
        *((kind, SMOOTH) for kind in ("sigmoid", "robust")),
    ],
)
@pytest.mark.parametrize("more", [{}, AVERAGE])
def test_earlier_loss_keeps_its_bits(kind, options, more):
    logprobs, data = batch()
    loss, _, _ = ours(logprobs, data, preference_loss=kind, **options, **more)
    mask = data["token_mask"][:, 1:]
    rewards = torch.where(mask > 0, (logprobs - data["reference_policy_logprobs"][:, :-1]) * mask, 0).sum(-1)
    rewards = rewards / mask.sum(-1).clamp(min=1) if more else rewards
    per_pair = before(kind, rewards[::2], rewards[1::2], options)
    assert torch.equal(loss, 1.0 * ((per_pair * 1.0).sum() / (torch.tensor(10.0) / 2 + 1e-8)) + 0.0 * 0)


def test_options_stay_readable_attributes():
    loss_fn = DPOLossFn({**OPTIONS, "preference_loss": "discopop", "discopop_tau": 0.2})
    assert (loss_fn.discopop_tau, loss_fn.reference_policy_kl_penalty) == (0.2, BETA)
    assert copy.deepcopy(loss_fn).options == loss_fn.options
    assert math.isclose(DPOLossFn(OPTIONS).discopop_tau, 0.05)

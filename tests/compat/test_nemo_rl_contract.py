"""Tests that code written for NeMo RL runs after its package name is replaced: calls, forms, gradients, errors."""

import importlib
import pickle

import pytest
import torch
import torch.nn.functional as F
from loss_cases import DPO, PG, PG_VARIANTS, ROWS, VOCAB, WIDTH, batch, logprobs_of, mask_of, pack

from mcore_rl.algorithms.interfaces import LossFunction, LossType
from mcore_rl.algorithms.loss_functions import (
    ClippedPGLossConfig,
    ClippedPGLossFn,
    DistillationLossFn,
    DPOLossConfig,
    DPOLossFn,
    NLLLoss,
    PreferenceLoss,
    SequencePackingLossWrapper,
)
from mcore_rl.distributed import model_utils
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.distributed.packs import PackLayout, gather_context_parallel, slice_context_parallel
from mcore_rl.losses.options import DPOOptions
from mcore_rl.testing.processes import run_processes


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("distributed.batched_data_dict", "BatchedDataDict DynamicBatchingArgs SequencePackingArgs SlicedDataDict"),
        (
            "distributed.model_utils",
            "_get_tokens_on_this_cp_rank allgather_cp_sharded_tensor from_parallel_logits_to_logprobs "
            "from_parallel_logits_to_logprobs_packed_sequences",
        ),
        ("algorithms.interfaces", "LossFunction LossType"),
        (
            "algorithms.loss_functions",
            "ClippedPGLossConfig ClippedPGLossDataDict ClippedPGLossFn DistillationLossFn DPOLossFn DPOLossConfig "
            "NLLLoss PreferenceLoss SequencePackingLossWrapper",
        ),
        ("models.policy.interfaces", "PolicyInterface"),
        ("models.generation.interfaces", "GenerationInterface"),
    ],
)
def test_names_have_nemo_rls_import_paths(module, names):
    found = vars(importlib.import_module(f"mcore_rl.{module}"))
    assert not [name for name in names.split() if name not in found]


# ------------------------------------------------------------------ gradients under context parallelism


def ragged(cp):
    """Four rows of lengths that are not multiples of anything, and their dense loss's gradient."""
    logits, data, seqs, toks = batch(5, rows=4)
    multiple = 2 * cp
    packed, true, padded = pack(logits.detach(), data, multiple, tail=0)
    return logits, data, seqs, toks, packed[0], true, padded


def ported_step(loss_fn, cp):
    """Run a ported step: this rank's part of the pack, the loss over CP, gradients summed over the ranks."""
    _, data, seqs, toks, packed, true, padded = ragged(cp)
    group = torch.distributed.group.WORLD
    layout = PackLayout.from_cu_seqlens(true, padded, len(packed), cp)
    local = slice_context_parallel(packed, layout, torch.distributed.get_rank()).clone().requires_grad_()
    alone = [torch.distributed.new_group([rank]) for rank in range(cp)][torch.distributed.get_rank()]
    loss, _ = SequencePackingLossWrapper(loss_fn, true, padded)(
        local[None], data, seqs, toks, vocab_parallel_rank=0, vocab_parallel_group=alone, context_parallel_group=group
    )
    (loss / cp).backward()
    gradient = torch.zeros_like(packed)
    gradient[layout.local_positions(torch.distributed.get_rank())] = local.grad
    torch.distributed.all_reduce(gradient)
    return loss.detach(), gradient


def rows_of_pack(gradient, true, padded):
    """[4, WIDTH, V] of a pack's gradient, zeros beyond each row."""
    out = torch.zeros(4, WIDTH, VOCAB, dtype=gradient.dtype)
    for row in range(4):
        length = int(true[row + 1] - true[row])
        out[row, :length] = gradient[padded[row] : padded[row] + length]
    return out


class TwiceNLL(NLLLoss):
    """A subclass whose call is its own."""

    def __call__(self, *args, **kwargs):
        loss, metrics = super().__call__(*args, **kwargs)
        return 2 * loss, metrics


class TwiceDPO(DPOLossFn):
    def __call__(self, *args, **kwargs):
        loss, metrics = super().__call__(*args, **kwargs)
        return 2 * loss, metrics


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize(
    "loss_fn",
    [ClippedPGLossFn(PG), NLLLoss(), TwiceNLL(), DPOLossFn(DPO), TwiceDPO(DPO)],
    ids=lambda x: type(x).__name__,
)
def test_a_ported_step_under_context_parallelism_gets_the_whole_gradient(loss_fn, cp):
    logits, data, seqs, toks, _, true, padded = ragged(cp)
    plain, _ = loss_fn(logits, data, seqs, toks)
    (expected,) = torch.autograd.grad(plain, logits)
    for loss, gradient in run_processes(ported_step, loss_fn, cp, world_size=cp):
        torch.testing.assert_close(loss, plain.detach(), check_dtype=False, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(rows_of_pack(gradient, true, padded), expected, rtol=1e-7, atol=1e-10)


def gathered_gradient():
    rank, layout = torch.distributed.get_rank(), PackLayout.pack([8], cp_size=2, multiple=4)
    local = slice_context_parallel(torch.arange(8.0), layout, rank).requires_grad_()
    weights = torch.tensor([0.1, 0.7, 1.3, 2.1, 0.3, 1.7, 0.9, 2.3]) * (rank + 1)  # another function on each rank
    (gather_context_parallel(local, layout, torch.distributed.group.WORLD) * weights).sum().backward()
    return layout.local_positions(rank), local.grad


def test_a_gathers_gradient_is_summed_over_the_ranks():
    weights = torch.tensor([0.1, 0.7, 1.3, 2.1, 0.3, 1.7, 0.9, 2.3])
    for positions, gradient in run_processes(gathered_gradient, world_size=2):
        torch.testing.assert_close(gradient, 3 * weights[positions])


# ------------------------------------------------------------------ a subclass's call, a loss of one's own


def test_a_subclasss_call_is_never_bypassed():
    logits, data, seqs, toks = batch()
    packed, true, padded = pack(logits, data, multiple=4, tail=3)
    for plain, twice in ((NLLLoss(), TwiceNLL()), (DPOLossFn(DPO), TwiceDPO(DPO))):
        once, _ = SequencePackingLossWrapper(plain, true, padded)(packed, data, seqs, toks)
        doubled, _ = SequencePackingLossWrapper(twice, true, padded)(packed, data, seqs, toks)
        torch.testing.assert_close(doubled, 2 * once, check_dtype=False)


class OwnMetrics(LossFunction):
    """No `loss` among its metrics; a mean, a minimum and a maximum, none of them named so."""

    loss_type = LossType.SEQUENCE_LEVEL
    metric_reductions = {"length": "mean", "shortest": "min", "longest": "max"}  # noqa: RUF012

    def __call__(self, next_token_logits, data, global_valid_seqs, global_valid_toks):
        lengths = data["token_mask"].sum(1)
        valid = lengths[data["sample_mask"] > 0]
        return (next_token_logits.mean((1, 2)) * data["sample_mask"]).sum() / global_valid_seqs, {
            "length": valid.mean(),
            "shortest": valid.min() if len(valid) else torch.inf,
            "longest": valid.max() if len(valid) else -torch.inf,
        }


def test_reductions_are_declared():
    logits, data, seqs, toks = batch()
    packed, true, padded = pack(logits, data, multiple=4, tail=3)
    _, metrics = SequencePackingLossWrapper(OwnMetrics(), true, padded)(packed, data, seqs, toks)
    valid = data["token_mask"].sum(1)[data["sample_mask"] > 0]
    torch.testing.assert_close(
        torch.stack([metrics[name] for name in ("length", "shortest", "longest")]).float(),
        torch.stack([valid.mean(), valid.min(), valid.max()]).float(),
    )

    class Misspelt(OwnMetrics):
        metric_reductions = {"length": "average"}  # noqa: RUF012

    with pytest.raises(ValueError, match=r"'length': 'average'.*'mean'"):
        SequencePackingLossWrapper(Misspelt(), true, padded)(packed, data, seqs, toks)


def test_a_loss_that_knows_no_groups_gets_whole_logits():
    run_processes(_gather_split_logits, world_size=2)


def _gather_split_logits():
    """Both halves of the vocabulary are on different ranks; each rank gets the gradient of its half."""
    logits, data, seqs, toks = batch()
    packed, true, padded = pack(logits, data, multiple=4, tail=0)
    packed = packed.detach()[..., :10].requires_grad_()
    whole, _ = SequencePackingLossWrapper(OwnMetrics(), true, padded)(packed, data, seqs, toks)
    (expected,) = torch.autograd.grad(whole, packed)
    rank, columns = torch.distributed.get_rank(), packed.shape[-1] // 2
    own = slice(rank * columns, (rank + 1) * columns)
    shard = packed.detach()[..., own].clone().requires_grad_()
    loss, _ = SequencePackingLossWrapper(OwnMetrics(), true, padded)(
        shard, data, seqs, toks, rank, torch.distributed.group.WORLD
    )
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(torch.autograd.grad(loss, shard)[0], expected[..., own])


# ------------------------------------------------------------------ names and forms


def test_positional_dpo_arguments():
    logits, data, _, _ = batch()
    positional, _ = NLLLoss()(logits, data, None, None, None, None, None, True, True)
    named, _ = NLLLoss()(logits, data, None, None, dpo_loss=True, dpo_average_log_probs=True)
    assert torch.equal(positional, named)
    assert positional.shape == (ROWS,)


def test_options_are_attributes_that_can_be_read():
    loss_fn = ClippedPGLossFn(PG)
    assert (loss_fn.ratio_clip_min, loss_fn.ratio_clip_max, loss_fn.ratio_clip_c) == (0.2, 0.28, None)
    with pytest.raises(ValueError, match="ratio_clip_c: must be more than 1"):
        ClippedPGLossFn({**PG, "ratio_clip_c": 0.5})
    assert DPOLossFn(DPO).sft_loss_weight == 0.4
    with pytest.raises(AttributeError, match="no attribute 'ratio_clip'"):
        loss_fn.ratio_clip  # noqa: B018
    assert pickle.loads(pickle.dumps(loss_fn)).options == loss_fn.options


def test_a_wider_configuration():
    trainer = {"max_num_epochs": 1, "max_num_steps": 9, "val_period": 5, "val_batches": 2, "val_global_batch_size": 4,
               "val_micro_batch_size": 1, "val_at_start": True, "seed": 3}  # fmt: skip
    logits, data, seqs, toks = batch()
    assert DPOLossFn({**DPO, **trainer})(logits, data, seqs, toks)[0] == DPOLossFn(DPO)(logits, data, seqs, toks)[0]
    with pytest.raises(ValueError, match=r"unknown keys sft_loss_wieght \(did you mean sft_loss_weight\?\)"):
        DPOLossFn({**DPO, **trainer, "sft_loss_wieght": 1.0})
    with pytest.raises(AssertionError, match="lacks ratio_clip_max"):
        ClippedPGLossFn({key: value for key, value in PG.items() if key != "ratio_clip_max"})
    with pytest.raises(ValueError, match="must be a dictionary, got a list"):
        DPOOptions.from_config([], "DPOLossFn")


def test_typed_dictionaries():
    assert ClippedPGLossConfig(**PG) == PG
    assert ClippedPGLossConfig.__required_keys__ == set(PG)
    assert DPOLossConfig.__required_keys__ == set(DPO)


def test_counts_that_are_not_needed():
    logits, data, seqs, toks = batch()
    assert ClippedPGLossFn(PG)(logits, data, None, toks)[0] == ClippedPGLossFn(PG)(logits, data, seqs, toks)[0]
    assert DPOLossFn(DPO)(logits, data, seqs, None)[0] == DPOLossFn(DPO)(logits, data, seqs, toks)[0]
    with pytest.raises(ValueError, match="global_valid_seqs must be a tensor"):
        ClippedPGLossFn({**PG, "token_level_loss": False})(logits, data, None, toks)


@pytest.mark.parametrize("extra", [1, 7])
def test_logits_wider_than_the_rows(extra):
    logits, data, seqs, toks = batch()
    data["teacher_topk_logits"], data["teacher_topk_indices"] = torch.randn(ROWS, WIDTH, VOCAB).topk(3)
    wide = torch.cat([logits, torch.full((ROWS, extra, VOCAB), 1e4)], dim=1)
    for loss_fn in (NLLLoss(), ClippedPGLossFn(PG), DistillationLossFn({"kl_type": "reverse", "mixed_kl_weight": 0.5})):
        torch.testing.assert_close(loss_fn(wide, data, seqs, toks)[0], loss_fn(logits, data, seqs, toks)[0])


def test_losses_take_logprobs_by_name():
    logits, data, seqs, toks = batch()
    ready = logprobs_of(logits, data)
    for loss_fn in (NLLLoss(), DPOLossFn(DPO), ClippedPGLossFn(PG)):
        expected = loss_fn(logits, data, seqs, toks)[0]
        counts = {"global_valid_seqs": seqs, "global_valid_toks": toks}
        torch.testing.assert_close(loss_fn(data=data, next_token_logprobs=ready, **counts)[0], expected)
    for call in (
        lambda: NLLLoss()(data, seqs, toks),
        lambda: NLLLoss()(data=data, **counts),
        lambda: NLLLoss()(logits, data, seqs, toks, next_token_logprobs=ready),
    ):
        with pytest.raises(ValueError, match="needs data, and either next_token_logits or next_token_logprobs"):
            call()


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"use_cispo": True}, PG_VARIANTS["cispo"]),
        ({"use_cispo": False}, {}),
        ({"reference_policy_kl_type": "k2"}, PG_VARIANTS["k2"]),
        ({"kl_input_clamp_value": 0.2, "kl_output_clamp_value": 0.1}, {"kl_clamp": 0.2, "kl_output_clamp": 0.1}),
        ({"truncated_importance_sampling_ratio": None, "truncated_importance_sampling_type": None}, {}),
        ({"use_kl_in_reward": True}, {"reference_policy_kl_penalty": 0.0}),
    ],
)
def test_option_names_of_other_versions(theirs, ours):
    logits, data, seqs, toks = batch()
    loss, _ = ClippedPGLossFn({**PG, **theirs})(logits, data, seqs, toks)
    expected, _ = ClippedPGLossFn({**PG, **ours})(logits, data, seqs, toks)
    assert loss == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kl_estimator": "k3", "reference_policy_kl_type": "k1"}, "kl_estimator has two values"),
        ({"use_cispo": "no"}, "use_cispo: must be true or false"),
        ({"use_cispo": True, "clip_type": "ppo"}, "contradict"),
        ({"reference_policy_kl_penalty": float("inf")}, "must be finite"),
        ({"token_level_loss": False, "dr_grpo_max_tokens": 7.5}, "must be a whole number"),
        ({"use_kl_in_reward": True, "kl_gradient": "unbiased"}, "use_kl_in_reward removes the KL term"),
    ],
)
def test_options_that_contradict_each_other(changes, message):
    with pytest.raises(AssertionError, match=message):
        ClippedPGLossFn({**PG, **changes})


def test_options_are_attributes_under_their_other_names_too():
    loss_fn = ClippedPGLossFn({**PG, "use_cispo": True})
    assert loss_fn.use_cispo and loss_fn.clip_type == "cispo"
    assert loss_fn.reference_policy_kl_type == loss_fn.kl_estimator == loss_fn.options.kl_estimator
    with pytest.raises(AttributeError, match="no setter"):
        loss_fn.clip_type = "ppo"


def test_context_parallel_shares_of_odd_lengths_are_refused():
    with pytest.raises(AssertionError, match="tokens \(6\) must be a multiple of 2 x 2"):
        model_utils._get_tokens_on_this_cp_rank(torch.zeros(1, 6), 0, 2)


def test_positive_example_nll_adds_up_over_microbatches():
    logits, data, seqs, toks = batch()
    data["rewards"] = torch.tensor([0.7, -0.1, 0.3, 0.1, 0.9, 0.0])
    positive = mask_of(data) * (data["rewards"] > 0)[:, None]
    data["num_positive_tokens"] = positive.sum().expand(ROWS).clone()
    weighted = ClippedPGLossFn({**PG, "positive_example_nll_weight": 0.3})
    loss, metrics = weighted(logits, data, seqs, toks)
    nll = -(logprobs_of(logits, data) * positive).sum() / positive.sum()
    torch.testing.assert_close(loss, ClippedPGLossFn(PG)(logits, data, seqs, toks)[0] + 0.3 * nll)
    torch.testing.assert_close(metrics["positive_nll_loss"], nll.detach())
    parts = [weighted(logits[i : i + 2], data.slice(i, i + 2), seqs, toks)[0] for i in range(0, ROWS, 2)]
    torch.testing.assert_close(sum(parts), loss)
    del data["num_positive_tokens"]
    with pytest.raises(ValueError, match="lacks num_positive_tokens"):
        weighted(logits, data, seqs, toks)


def test_distillation_with_the_students_whole_distribution():
    """Outside the teacher's k tokens its log-probability is taken as −100."""
    logits, data, seqs, toks = batch()
    top = torch.randn(ROWS, WIDTH, VOCAB, dtype=torch.float64).topk(4)
    data["teacher_topk_logits"], data["teacher_topk_indices"] = top.values, top.indices
    student = F.log_softmax(logits, -1)
    teacher = torch.full_like(student, -100.0).scatter(2, top.indices, F.log_softmax(top.values, -1))
    inside = torch.zeros_like(student).scatter(2, top.indices, 1.0)
    reverse = (student.exp() * (student - teacher)).sum(-1)
    forward = (inside * teacher.exp() * (teacher - student)).sum(-1)
    for kind, per_token in (("forward", forward), ("reverse", reverse), ("mixed", 0.3 * forward + 0.7 * reverse)):
        loss_fn = DistillationLossFn({"kl_type": kind, "mixed_kl_weight": 0.3, "zero_outside_topk": True})
        loss, _ = loss_fn(logits, data, seqs, toks)
        expected = (per_token[:, :-1] * mask_of(data)).sum() / toks
        torch.testing.assert_close(loss, expected)
        ours, theirs = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (loss, expected))
        torch.testing.assert_close(ours, theirs)
    data["teacher_topk_logits"], data["teacher_topk_indices"] = top.values[..., :0], top.indices[..., :0]
    with pytest.raises(ValueError, match="k > 0"):
        loss_fn(logits, data, seqs, toks)


def test_classes():
    assert isinstance(DPOLossFn(DPO), PreferenceLoss)
    with pytest.raises(AssertionError, match="even number of rows"):
        PreferenceLoss()(torch.tensor([0.1, 0.2, 0.3]), BatchedDataDict(sample_mask=torch.ones(3)), torch.tensor(3.0))


# ------------------------------------------------------------------ log-probabilities by the reference's names


def by_the_references_names(tp, cp):
    """Rows, a pack, and a gather, at TP × CP; each scalar divided by CP, gradients summed over those ranks."""
    rank = torch.distributed.get_rank()
    tensor = [torch.distributed.new_group([c * tp + t for t in range(tp)]) for c in range(cp)][rank // tp]
    context = [torch.distributed.new_group([c * tp + t for c in range(cp)]) for t in range(tp)][rank % tp]
    logits, ids, weights = names_case()
    t, size = rank % tp, logits.shape[-1] // tp
    share = model_utils._get_tokens_on_this_cp_rank(logits, rank // tp, cp)[..., t * size : (t + 1) * size]
    columns = (t * size, (t + 1) * size)
    rows = share.clone().requires_grad_()
    of_rows = model_utils.from_parallel_logits_to_logprobs(rows, ids, *columns, tensor, cp_group=context)
    ((of_rows * weights).sum() / cp).backward()
    pack = share.reshape(1, -1, size).clone().requires_grad_()
    boundaries = torch.arange(0, 8 * len(ids) + 1, 8)
    of_pack = model_utils.from_parallel_logits_to_logprobs_packed_sequences(
        pack, ids.view(1, -1), boundaries, 8, *columns, tensor, cp_group=context
    )
    ((of_pack * weights).sum() / cp).backward()
    gradients = [grad.view(share.shape) for grad in (rows.grad, pack.grad)]
    whole = [model_utils.allgather_cp_sharded_tensor(grad, context, seq_dim=1) for grad in gradients]
    no_gradient = model_utils.from_parallel_logits_to_logprobs(rows, ids, *columns, tensor, True, context)
    assert not no_gradient.requires_grad
    return of_rows.detach(), of_pack.detach(), whole, columns


def names_case():
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(3, 8, 12, generator=generator, dtype=torch.float64)
    return logits, torch.randint(0, 12, (3, 8), generator=generator), torch.rand(3, 7, generator=generator).double()


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_logprobs_by_the_references_names(tp, cp):
    logits, ids, weights = names_case()
    logits.requires_grad_()
    expected = F.log_softmax(logits, -1)[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    (expected * weights).sum().backward()
    for of_rows, of_pack, gradients, (start, end) in run_processes(by_the_references_names, tp, cp, world_size=tp * cp):
        torch.testing.assert_close(of_rows, expected.detach())
        torch.testing.assert_close(of_pack, expected.detach())
        for gradient in gradients:
            torch.testing.assert_close(gradient, logits.grad[..., start:end])
    with pytest.raises(
        AssertionError, match=r"vocab_start_index=3 and vocab_end_index=9 do not fit a shard of 12 logits"
    ):
        model_utils.from_parallel_logits_to_logprobs(logits.detach(), ids, 3, 9, None)

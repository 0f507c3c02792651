"""Log-probabilities of pairs, and TRL's losses of them."""

from collections import defaultdict
from types import SimpleNamespace

import torch

from mcore_rl.algorithms.loss_functions import DPOLossFn
from mcore_rl.distributed.batched_data_dict import BatchedDataDict

BETA, EPSILON, GAMMA = 0.37, 0.13, 0.41
OPTIONS = {
    "reference_policy_kl_penalty": BETA,
    "preference_loss_weight": 1.0,
    "sft_loss_weight": 0.0,
    "preference_average_log_probs": False,
    "sft_average_log_probs": False,
}


def batch(pairs=5, width=9):
    """Ragged log-probabilities with responses of one token, as leaves; chosen and rejected interleaved."""
    generator = torch.Generator().manual_seed(2)
    mask = torch.zeros(2 * pairs, width)
    for row, (start, end) in enumerate(
        [(3, 9), (3, 4), (1, 2), (1, 7), (4, 8), (4, 9), (2, 3), (2, 5), (5, 9), (5, 8)]
    ):
        mask[row, start:end] = 1
    draw = lambda: -torch.rand(2 * pairs, width, generator=generator) * 2 - 0.01  # noqa: E731
    logprobs, reference = draw()[:, 1:].requires_grad_(), draw()
    data = BatchedDataDict(
        input_ids=torch.zeros(2 * pairs, width, dtype=torch.long),
        token_mask=mask,
        sample_mask=torch.ones(2 * pairs),
        reference_policy_logprobs=reference,
    )
    return logprobs, data


def ours(logprobs, data, **options):
    loss_fn = DPOLossFn({**OPTIONS, **options})
    data = BatchedDataDict({**data, **loss_fn.batch_columns(logprobs.detach(), data)})
    loss, metrics = loss_fn.from_logprobs(logprobs, data, data["sample_mask"].sum(), None)
    return loss, torch.autograd.grad(loss, logprobs)[0], metrics


def sides(x):
    """TRL has all chosen rows first."""
    return torch.cat([x[::2], x[1::2]])


def of_trainer(logprobs, data, loss_type, smoothing, weights=(1.0,), log_sum_sq=None, **settings):
    """`DPOTrainer`'s loss, its model replaced by the log-probabilities (and log Σ p², for WPO's weights)."""
    import trl

    loss_types = [loss_type] if isinstance(loss_type, str) else list(loss_type)
    trainer = trl.DPOTrainer
    mask = data["token_mask"]
    zeros = torch.zeros_like(sides(logprobs))
    masked = sides(logprobs * mask[:, 1:])
    outputs = SimpleNamespace(log_probs=masked, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    outputs.log_sum_sq_probs = None if log_sum_sq is None else sides(log_sum_sq)
    of_reference = SimpleNamespace(log_probs=sides(data["reference_policy_logprobs"][:, :-1] * mask[:, 1:]))
    same = lambda x: x  # noqa: E731
    model = torch.nn.Identity()
    model.is_gradient_checkpointing = False
    itself = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", gather=same, gather_for_metrics=same),
        model=model, ref_model=lambda **_: of_reference,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None, gradient_checkpointing=False, discopop_tau=0.05),
        aux_loss_enabled=False, ld_alpha=None, precompute_ref_logps=False, f_divergence_type="reverse_kl",
        f_alpha_divergence_coef=0.5, loss_types=loss_types, loss_weights=list(weights), beta=BETA,
        label_smoothing=smoothing, use_weighting=False, _metrics={"train": defaultdict(list)}, _total_train_tokens=0,
        _tp_size=1,
    )  # fmt: skip
    for name, value in settings.items():
        setattr(itself.args if name == "discopop_tau" else itself, name, value)
    inputs = {
        "input_ids": sides(data["input_ids"]), "attention_mask": torch.ones_like(sides(mask)),
        "completion_mask": sides(mask),
    }  # fmt: skip
    return trainer._compute_loss(itself, lambda **_: outputs, inputs, False), itself._metrics["train"]

"""Inputs and options for tests of the losses."""

import torch
import torch.nn.functional as F

from mcore_rl.distributed.batched_data_dict import BatchedDataDict

ROWS, WIDTH, VOCAB = 6, 9, 11
PG = {
    "reference_policy_kl_penalty": 0.3,
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.28,
    "ratio_clip_c": None,
    "use_on_policy_kl_approximation": False,
    "use_importance_sampling_correction": False,
    "token_level_loss": True,
}
DPO = {
    "reference_policy_kl_penalty": 0.2,
    "preference_loss_weight": 0.7,
    "sft_loss_weight": 0.4,
    "preference_average_log_probs": False,
    "sft_average_log_probs": False,
}


def batch(seed=0, rows=ROWS, dtype=torch.float64):
    """Return logits and ragged rows with random masks: one row without counted tokens, one masked sample."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, WIDTH + 1, (rows,), generator=g)
    lengths[0] = WIDTH
    columns = torch.arange(WIDTH)
    token_mask = ((torch.rand(rows, WIDTH, generator=g) < 0.7) & (columns < lengths[:, None])).double()
    token_mask[2] = 0
    sample_mask = torch.ones(rows, dtype=torch.float64)
    sample_mask[-2:] = 0
    noise = lambda scale: torch.randn(rows, WIDTH, generator=g, dtype=torch.float64) * scale - 2.5  # noqa: E731
    data = BatchedDataDict(
        input_ids=torch.randint(0, VOCAB, (rows, WIDTH), generator=g),
        token_mask=token_mask,
        sample_mask=sample_mask,
        advantages=torch.randn(rows, 1, generator=g, dtype=torch.float64).expand(rows, WIDTH).clone(),
        prev_logprobs=noise(0.5),
        generation_logprobs=noise(0.5),
        reference_policy_logprobs=noise(0.5),
    )
    data["generation_logprobs"] = data["prev_logprobs"] + 0.1 * torch.randn(rows, WIDTH, generator=g)
    logits = torch.randn(rows, WIDTH, VOCAB, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    seqs = sample_mask.sum()
    toks = (token_mask[:, 1:] * sample_mask[:, None]).sum()
    return logits, data, seqs, toks


def logprobs_of(logits, data):
    """Compute log-probabilities [B, S − 1] with torch only."""
    scores = F.log_softmax(logits.double(), dim=-1)[:, :-1]
    return scores.gather(2, data["input_ids"][:, 1:, None])[..., 0]


def mask_of(data):
    return data["token_mask"][:, 1:] * data["sample_mask"][:, None]


PG_VARIANTS = {
    "ppo": {},
    "sequence level (grpo)": {"token_level_loss": False},
    "dual clip": {"ratio_clip_c": 1.5},
    "importance sampling": {"use_importance_sampling_correction": True},
    "on-policy kl": {"use_on_policy_kl_approximation": True},
    "on-policy kl, unbiased": {"use_on_policy_kl_approximation": True, "kl_gradient": "unbiased"},
    "unbiased kl": {"kl_gradient": "unbiased", "kl_estimator": "k1"},
    "clamped kl": {"kl_output_clamp": 0.03},
    "tis between bounds": {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_ratio": 1.05,
        "truncated_importance_sampling_ratio_min": 0.97,
    },
    "k1": {"kl_estimator": "k1"},
    "k2": {"kl_estimator": "k2"},
    "reinforce": {"disable_ppo_ratio": True},
    "gspo": {"token_level_loss": False, "sequence_level_importance_ratios": True},
    "gspo, corrected": {
        "token_level_loss": False,
        "sequence_level_importance_ratios": True,
        "use_importance_sampling_correction": True,
    },
    "cispo": {"clip_type": "cispo"},
    "dr.grpo": {"token_level_loss": False, "dr_grpo_max_tokens": 32},
    "sequence-level tis": {
        "use_importance_sampling_correction": True,
        "importance_sampling_level": "sequence",
        "truncated_importance_sampling_ratio": 1.1,
    },
    "tis": {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 1.05},
    "icepop": {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "icepop",
        "truncated_importance_sampling_ratio": 1.1,
        "truncated_importance_sampling_ratio_min": 0.9,
    },
    "sequence mask": {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "seq-mask-tis",
        "truncated_importance_sampling_ratio": 1.02,
        "truncated_importance_sampling_ratio_min": 0.98,
    },
    "entropy bonus": {"entropy_bonus": 0.05},
}


def pack(logits, data, multiple, tail):
    """Concatenate the rows' real tokens with padding, as [1, T, V]; return also cu_seqlens and its padded form."""
    lengths = [int((row.nonzero().max() if row.any() else torch.tensor(0)) + 1) for row in data["token_mask"]]
    padded = [-(-n // multiple) * multiple for n in lengths]
    parts = [F.pad(logits[i, :n], (0, 0, 0, p - n)) for i, (n, p) in enumerate(zip(lengths, padded, strict=True))]
    parts.append(logits.new_zeros(tail, VOCAB))
    cumulative = [torch.tensor([0, *x]).cumsum(0).int() for x in (lengths, padded)]
    return torch.cat(parts)[None], cumulative[0], cumulative[1]

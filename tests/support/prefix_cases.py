"""Configurations and batches for tests of shared prefixes."""

import torch
from layout_cases import make_config

from mcore_rl.config import GRPOConfig
from mcore_rl.distributed.batched_data_dict import BatchedDataDict


def padded(rows):
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows]), [len(row) for row in rows]


def make_pairs():
    """Return pairs: with a long prompt, with a short one, with equal rows, with one row the start of the other, with
    nothing in common.

    Tokens of prompts count in some rows and not in others.
    """
    generator = torch.Generator().manual_seed(11)

    def tokens(count):
        return torch.randint(2, 250, (count,), generator=generator).tolist()

    rows = []
    for prompt, chosen, rejected in ((37, 9, 17), (30, 1, 12), (5, 7, 3), (24, 20, 2), (0, 13, 8)):
        beginning = tokens(prompt)
        rows += [[*beginning, *tokens(chosen)], [*beginning, *tokens(rejected)]]
    same = tokens(29)
    rows += [same, same]
    rows += [same[:21], same]
    ids, lengths = padded(rows)
    mask = torch.zeros(ids.shape)
    for row, length in enumerate(lengths):
        mask[row, :length] = (torch.rand(length, generator=generator) < 0.5).float()
        mask[row, length - 1] = 1
    sample_mask = torch.ones(len(rows))
    sample_mask[8:10] = 0
    return BatchedDataDict(
        input_ids=ids, input_lengths=torch.tensor(lengths), token_mask=mask, sample_mask=sample_mask,
        reference_policy_logprobs=torch.randn(ids.shape, generator=generator) - 5,
    )  # fmt: skip


def make_groups():
    """Return four prompts with 4 responses each, some of them equal; the advantages are inexact numbers."""
    generator = torch.Generator().manual_seed(12)

    def tokens(low, high):
        count = int(torch.randint(low, high, (), generator=generator))
        return torch.randint(2, 250, (count,), generator=generator).tolist()

    rows, masks = [], []
    for _ in range(4):
        prompt, turn = tokens(14, 26), tokens(9, 12)
        for response in range(4):
            answer = tokens(1, 14)
            rows.append([*prompt, *(turn if response < 2 else []), *answer])
            masks.append([0] * len(prompt) + [1] * (len(rows[-1]) - len(prompt)))
    ids, lengths = padded(rows)
    mask = torch.zeros(ids.shape)
    for row, own in enumerate(masks):
        mask[row, : len(own)] = torch.tensor(own, dtype=torch.float32)
    advantages = torch.randn(16, 1, generator=generator).expand(ids.shape).contiguous()
    return BatchedDataDict(
        input_ids=ids, input_lengths=torch.tensor(lengths), token_mask=mask, sample_mask=torch.ones(16),
        advantages=advantages,
    )  # fmt: skip


def grpo_config(path):
    pairs = make_config(path).model_dump()
    for name in ("dpo", "batch"):
        del pairs[name]
    return GRPOConfig.model_validate(
        {
            **pairs,
            "batch": {"tokens_per_pack": 256, "share_prefixes": True, "min_shared_tokens": 8},
            "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 4, "max_new_tokens": 30},
            "loss": {"reference_policy_kl_penalty": 0.3, "entropy_bonus": 0.1, "ratio_clip_max": 0.28},
        }
    )


def dpo_config(path):
    config = make_config(path)
    return config.model_copy(
        update={"batch": config.batch.model_copy(update={"share_prefixes": True, "min_shared_tokens": 8})}
    )

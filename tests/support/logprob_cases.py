"""Inputs for tests of log-probabilities."""

import torch

from mcore_rl.distributed.packs import PackLayout

VOCAB, PADDED, HIDDEN = 21, 24, 7
LENGTHS = (9, 1, 16, 2, 5)  # a single token has nothing to predict


def make_case(packing: bool, cp: int):
    """Return hidden states of the pack, LM head, rows, and a random weight for every log-probability and entropy."""
    g = torch.Generator().manual_seed(5)
    width = max(LENGTHS)
    multiple = 2 * cp
    if packing:
        layout = PackLayout.pack(LENGTHS, cp, multiple, total=52 + multiple - 52 % multiple)
    else:
        layout = PackLayout(LENGTHS, (width,) * len(LENGTHS), width * len(LENGTHS), cp)
    double = {"generator": g, "dtype": torch.float64}
    rows = torch.zeros(len(LENGTHS), width, dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        rows[row, :length] = torch.randint(0, VOCAB, (length,), generator=g)
    rows[0, 1:4] = torch.tensor([0, VOCAB - 1, PADDED // 2])  # the edges of shards
    weights = torch.randn(2, len(LENGTHS), width - 1, **double)
    weights[:, 2] = 0  # a row without loss
    weights *= torch.rand(len(LENGTHS), width - 1, generator=g) < 0.7
    hidden, head = torch.randn(layout.total, HIDDEN, **double), torch.randn(PADDED, HIDDEN, **double)
    return layout, rows, weights, hidden, head


def groups_of(tp, cp):
    """Return this rank's tensor- and context-parallel groups in a world of tp × cp (tensor varies fastest)."""
    rank = torch.distributed.get_rank()
    tensor = [torch.distributed.new_group([c * tp + t for t in range(tp)]) for c in range(cp)][rank // tp]
    context = [torch.distributed.new_group([c * tp + t for c in range(cp)]) for t in range(tp)][rank % tp]
    return tensor, context

"""Tests of attention to compressed entries: outputs and gradients in packs, and the number of operations.

Whole models are compared with transformers in test_families, test_layout_check, test_megatron_generation.
"""

import pytest
import torch
from attention_cases import layouts, predecessors
from float32 import FORMULA, FORWARD, assert_close32
from small_models import and_long, make_config

from mcore_rl.errors import UserError
from mcore_rl.models.megatron.attention.compressed import CompressedAttention, Compression, compressed_attention
from mcore_rl.models.megatron.families import family_of
from mcore_rl.models.megatron.kernels import selected_attention as selected
from mcore_rl.models.megatron.kernels.packed_attention import AttentionPattern

HEADS, DIM, WINDOW, RATE, TOPK = 3, 6, 4, 3, 2
FREQUENCIES, EPS = (0.7, 0.03), 1e-3


def mixer_of(kind):
    compression = None if kind == "windows" else Compression(RATE, kind == "overlapping", FREQUENCIES, 1.0, EPS)
    return CompressedAttention(
        hidden=8,
        heads=HEADS,
        head_dim=DIM,
        query_rank=4,
        window=WINDOW,
        groups=1,
        output_rank=4,
        rotated=4,
        rope_factor=1.0,
        eps=EPS,
        compression=compression,
    )


def plain_entry(number, states, bias, weight):
    """Return entry `number` of a row, from the states [keys, …] of its tokens."""
    values, gates = states.chunk(2, -1)
    own = range(number * RATE, (number + 1) * RATE)
    slots = [(values[t, -DIM:], gates[t, -DIM:] + bias[t % RATE, -DIM:]) for t in own]
    if values.shape[1] > DIM and number:
        slots += [(values[t - RATE, :DIM], gates[t - RATE, :DIM] + bias[t % RATE, :DIM]) for t in own]
    v, g = (torch.stack(part) for part in zip(*slots, strict=True))
    mean = (g.softmax(0) * v).sum(0)
    entry = weight * mean / (mean.square().mean() + EPS).sqrt()
    even, odd = entry[2::2], entry[3::2]
    angle = number * RATE * torch.tensor(FREQUENCIES, dtype=torch.float32).double()
    turned = even * angle.cos() - odd * angle.sin(), odd * angle.cos() + even * angle.sin()
    return torch.cat((entry[:2], *turned))


def plain_attention(query, states, sinks, *of_entries, distance, chosen):
    """Return the outputs, token by token. `chosen`: for each token the numbers of its entries; None for all."""
    outs = []
    for token in range(len(query)):
        row = (distance[token] >= 0).nonzero()[:, 0].tolist()
        row.sort(key=lambda k, token=token: -int(distance[token, k]))
        keys = [states[k, :DIM] for k in row[-WINDOW:]]
        if of_entries:
            seen = range(len(row) // RATE) if chosen is None else [n for n in chosen[token].tolist() if n >= 0]
            keys += [plain_entry(n, states[row][:, DIM:], *of_entries) for n in seen]
        keys = torch.stack(keys)
        scores = torch.cat((query[token] @ keys.T * DIM**-0.5, sinks[:, None]), 1)
        outs.append(scores.softmax(1)[:, :-1] @ keys)
    return torch.stack(outs)


KINDS = and_long(
    [("overlapping, chosen", 2)],
    [("apart", 2)],
    [(kind, cp) for kind in ("windows", "overlapping") for cp in (1, 2)] + [("apart", 1), ("overlapping, chosen", 1)],
)


@pytest.mark.parametrize(("kind", "cp"), KINDS)
def test_outputs_and_gradients_equal_plain_softmax(kind, cp, monkeypatch):
    """Entries may cross the chunks of context-parallel ranks and the parts of shared prefixes."""
    monkeypatch.setitem(selected.SCORES_OF_A_BLOCK, "cpu", 200)
    mixer = mixer_of(kind.partition(",")[0])
    for name, layout in layouts(cp).items():
        if layout.total > 40:
            continue
        distance = predecessors(layout)
        shapes = [(layout.total, HEADS, DIM), (layout.total, mixer.state_size), (HEADS,)]
        if mixer.compression is not None:
            shapes += [(RATE, mixer.compression.width(DIM)), (DIM,)]
        whole = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
        chosen = None
        if "chosen" in kind:
            counts = [int((row >= 0).sum()) // RATE for row in distance]
            picked = [sorted(torch.randperm(n)[:TOPK].tolist()) for n in counts]
            chosen = torch.tensor([[*p, *[-1] * (TOPK - len(p))] for p in picked], dtype=torch.int32)
        grad = torch.randn(layout.total, HEADS, DIM, dtype=torch.float64)
        expected = plain_attention(*whole, distance=distance, chosen=chosen)
        right = torch.autograd.grad(expected, whole, grad, allow_unused=True)
        sums = [torch.zeros_like(x) for x in whole]
        order = torch.cat([layout.local_positions(rank) for rank in range(cp)])
        for rank in range(cp):
            own = layout.local_positions(rank)
            leaves = [
                x.detach()[own] if n == 0 else x.detach()[order] if n == 1 else x.detach() for n, x in enumerate(whole)
            ]
            query, states, *weights = leaves = [x.clone().requires_grad_() for x in leaves]
            part = None if chosen is None else chosen[own]
            out = compressed_attention(query, states, tuple(weights), AttentionPattern(layout, rank), mixer, part)
            assert_close32(out.unflatten(1, (HEADS, DIM)), expected[own], FORMULA, what=name)
            places = own, order, *(slice(None) for _ in weights)
            found = torch.autograd.grad(out, leaves, grad[own].flatten(1))
            for total, place, gradient in zip(sums, places, found, strict=True):
                total[place] += gradient
        for total, gradient in zip(sums, right, strict=True):
            gradient = torch.zeros_like(total) if gradient is None else gradient
            assert_close32(total, gradient, FORWARD, what=name)


@pytest.mark.parametrize(("tokens", "before"), [(5, 0), (60, 0), (30, 11), (1, 30)])
def test_operations_count_recent_keys_and_entries(tokens, before):
    family = family_of(make_config("deepseek_v4"))
    hf, rates = family.hf, family.hf.compress_rates
    lengths = range(before + 1, before + tokens + 1)  # tokens up to each query
    recent = sum(n - 0.5 if n <= hf.sliding_window else hf.sliding_window for n in lengths)
    factor, rate = 12 * hf.num_attention_heads * hf.head_dim, rates["compressed_sparse_attention"]
    assert family.token_mixer(0).flops(tokens, before) == pytest.approx(factor * recent)
    every = sum(n // rates["heavily_compressed_attention"] for n in lengths)
    assert family.token_mixer(2).flops(tokens, before) == pytest.approx(factor * (recent + every))
    chosen = factor * (recent + sum(min(n // rate, hf.index_topk) for n in lengths))
    if (before + tokens) // rate > hf.index_topk:
        size, heads = hf.index_head_dim, hf.index_n_heads
        chosen += 2 * heads * size * sum(n // rate for n in lengths)
        weights = heads * size * hf.q_lora_rank + heads * hf.hidden_size + 4 * size * hf.hidden_size
        chosen += 2 * weights * tokens
    assert family.token_mixer(1).flops(tokens, before) == pytest.approx(chosen)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func='softmax' must be sqrtsoftplus or sigmoid"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ({"o_groups": 3}, "o_groups=3 must divide the 64 outputs of the heads"),
    ],
)
def test_what_deepseek_v4_cannot_have_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        family_of(make_config("deepseek_v4", **changes)).check(60)

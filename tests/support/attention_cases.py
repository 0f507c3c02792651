"""Packs for tests of attention, and the results of plain softmax attention on them."""

import torch

from mcore_rl.distributed.packs import PackLayout, PrefixLayout, PrefixTree, slice_context_parallel
from mcore_rl.models.megatron.kernels.packed_attention import AttentionPattern

DIM, LONG = 6, 24
TREE = PrefixTree((9, 4, 1, 7, 12, 3, 3), (-1, 0, 1, 1, 0, -1, 5), (2, 3, 4, 6))
"""Two prompts. A segment that continues one of them is itself continued twice."""
LONG_TREE = PrefixTree((4 * LONG + 61, 5, 40, 40), (-1, 0, 0, 0), (1, 2, 3))


def layouts(cp):
    """Return layouts of unusual packs, by name."""
    multiple = 2 * cp if cp > 1 else 1
    return {
        "ragged": PackLayout.pack((1, 13, 2, 30, 1), cp, multiple, 80),
        "ones": PackLayout.pack((1,) * 5, cp, multiple),
        "alike": PackLayout.rows((5, 16, 1), 16, cp),
        "runs": PackLayout.pack((8, 8, 24, 24, 8), cp, multiple),
        "long": PackLayout.pack((9 * LONG + 40,), cp, multiple),
        "shared": PrefixLayout.of(TREE, cp, multiple, TREE.padded_size(multiple) + 2 * multiple),
        "shared, long": PrefixLayout.of(LONG_TREE, cp, multiple),
    }


def predecessors(layout):
    """Return [T, T]: whether a token's segment is, or continues, another token's segment; computed from lengths and
    parents only."""
    parents = layout.tree.parents if isinstance(layout, PrefixLayout) else ()
    starts = [sum(layout.segment_lengths[:segment]) for segment in range(len(layout.segment_lengths))]
    distance = torch.full((layout.total, layout.total), -1)
    for segment, (start, length) in enumerate(zip(starts, layout.segment_lengths, strict=True)):
        own = torch.arange(length)
        distance[start : start + length, start : start + length] = own[:, None] - own
        ancestor, before = segment, 0
        while (ancestor := parents[ancestor] if ancestor < len(parents) else -1) >= 0:
            true = layout.lengths[ancestor]
            before += true
            place = starts[ancestor]
            distance[start : start + length, place : place + true] = own[:, None] + before - torch.arange(true)
    return distance


def plain_attention(query, key, value, layout, window, sinks=None):
    """Return softmax attention over all pairs [T, T] in the pack's order; a token sees earlier tokens less than
    `window` away, and its head's sink, whose value is 0."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    distance = predecessors(layout)
    seen = (distance >= 0) & (distance < (window or layout.total))
    scores = torch.einsum("qhd,khd->hqk", query, key) * DIM**-0.5
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, layout.total, 1)), -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : layout.total], value)


def make_sinks(heads, dtype=torch.float64):
    """Return a sink [heads] for each head, from one that takes almost nothing to one that takes most."""
    return torch.linspace(-3, 4, heads, dtype=dtype).requires_grad_()


def inputs(layout, heads, groups, dtype=torch.float64):
    generator = torch.Generator().manual_seed(layout.total)
    shapes = [(heads, DIM), (groups, DIM), (groups, DIM), (heads, DIM)]
    drawn = [torch.randn(layout.total, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [x.requires_grad_() for x in drawn[:3]], drawn[3]


def expected(layout, heads, groups, window, has_sinks=False):
    """Return the output and the gradients of query, key and value [T, …], in the pack's order, and of the sinks."""
    leaves, upstream = inputs(layout, heads, groups)
    sinks = [make_sinks(heads)] if has_sinks else []
    out = plain_attention(*leaves, layout, window, *sinks)
    leaves += sinks
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def in_one_process(attend, in_place, layout, heads, groups, window, dtype, device="cpu", has_sinks=False):
    """Compute the parts of all ranks one after the other in this process, on the CPU; return them combined."""
    leaves, upstream = inputs(layout, heads, groups, dtype)
    leaves, upstream = [x.detach().to(device).requires_grad_() for x in leaves], upstream.to(device)
    sinks = [make_sinks(heads, dtype).detach().to(device).requires_grad_()] if has_sinks else []
    order = torch.argsort(layout.gather_order).to(device)  # of all ranks' rows, one rank's after the other's
    total, out = 0, torch.zeros_like(leaves[0])
    for rank in range(layout.cp_size):
        visible = AttentionPattern(layout, rank)
        visible.put(*(tensor.to(device) for tensor in visible.on_host()))
        query, grad = (slice_context_parallel(x, layout, rank) for x in (leaves[0], upstream))
        # Attention receives these as parts of a larger tensor.
        key, value = torch.cat((leaves[1], leaves[2]), dim=-1)[order].split(DIM, dim=-1)
        if not in_place and visible.index is not None:
            key, value = key[visible.index], value[visible.index]
        seen_by = None if window is None or window >= max(visible.key_lengths) else window
        local = attend(query, key, value, visible, None, seen_by, *sinks)
        total = total + (local * grad).sum()
        out[layout.local_positions(rank).to(device)] = local.detach()
    return [tensor.cpu() for tensor in (out, *torch.autograd.grad(total, [*leaves, *sinks]))]


HEADS = {"MHA": (3, 3), "GQA": (6, 2), "MQA": (4, 1)}

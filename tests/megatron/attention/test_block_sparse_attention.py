"""Tests of attention to chosen blocks of keys: the choice, the attention, its operations, what is refused.

Whole models are compared with transformers in test_families, test_layout_check, test_megatron_generation.
"""

import pytest
import torch
from attention_cases import layouts, predecessors
from small_models import make_config

from mcore_rl.config import LoRAConfig, ParallelConfig
from mcore_rl.errors import UserError
from mcore_rl.models.megatron.attention.block_sparse import BlockIndexer
from mcore_rl.models.megatron.families import family_of
from mcore_rl.models.megatron.kernels import gathered_attention as gathered
from mcore_rl.models.megatron.kernels import selected_attention as selected
from mcore_rl.models.megatron.kernels.packed_attention import AttentionPattern
from mcore_rl.models.megatron.kernels.selected_attention import selected_attention
from mcore_rl.models.megatron.model.hf_config import check_model_fits
from mcore_rl.models.megatron.model.lora import lora_of

TOPK, LOCAL, SIZE, GROUPS, HEADS, DIM, SCALE = 3, 2, 4, 2, 6, 4, 0.3
INDEXER = BlockIndexer(TOPK, LOCAL, SIZE, GROUPS, DIM, eps=1e-6, source=0)


def plain_choice(query, key, distance):
    """Return for each token and group the set of blocks; of equal scores the earlier block is chosen."""
    first = distance.max(1).values  # the first token of a row is the farthest
    chosen = []
    for token in range(len(query)):
        of_token, own = [], int(first[token]) // SIZE
        keys = (distance[token] >= 0).nonzero()[:, 0].tolist()
        for group in range(GROUPS):
            scores = {}
            for k in keys:
                block = int(first[token] - distance[token, k]) // SIZE
                product = float(query[token, group] @ key[k])
                scores[block] = max(scores.get(block, -torch.inf), torch.inf if own - block < LOCAL else product)
            of_token.append(set(sorted(scores, key=lambda block: (-scores[block], block))[:TOPK]))
        chosen.append(of_token)
    return chosen


def plain_attention(query, key, value, distance, chosen):
    repeats, first = HEADS // GROUPS, distance.max(1).values
    seen = torch.zeros(HEADS, len(query), len(query), dtype=torch.bool)
    for token in range(len(query)):
        for k in (distance[token] >= 0).nonzero()[:, 0].tolist():
            block = int(first[token] - distance[token, k]) // SIZE
            for head in range(HEADS):
                seen[head, token, k] = block in chosen[token][head // repeats]
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    scores = (torch.einsum("qhd,khd->hqk", query, key) * SCALE).masked_fill(~seen, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


@pytest.mark.parametrize(
    ("limit", "way"),
    [(2**22, "all keys"), (90, "all keys"), (90, "by queries"), (90, "by blocks"), (2**22, "by blocks")],
)
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_choice_and_attention_equal_plain_softmax(cp, limit, way, monkeypatch):
    """All packs of test_attention, also with shared prefixes: choices, outputs, and the gradients of all ranks."""
    monkeypatch.setitem(selected.SCORES_OF_A_BLOCK, "cpu", limit)
    monkeypatch.setattr(selected, "pays", lambda *_: way != "all keys")
    monkeypatch.setattr(gathered, "WORTH_A_PRODUCT", SIZE if way == "by blocks" else 2 * SIZE)
    monkeypatch.setattr(gathered, "SCORES_AT_A_TIME", limit)
    generator = torch.Generator().manual_seed(3)
    for name, layout in layouts(cp).items():
        if layout.total > 120:
            continue
        distance = predecessors(layout)
        # Whole numbers: many scores are exactly equal.
        states = [torch.randint(-2, 3, shape, generator=generator).double() for shape in ((GROUPS, DIM), (DIM,))]
        states = [torch.randint(-2, 3, (layout.total, *state.shape), generator=generator).double() for state in states]
        chosen = plain_choice(*states, distance)
        shapes = (HEADS, DIM), (GROUPS, DIM), (GROUPS, DIM)
        whole = [torch.randn(layout.total, *shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
        grad = torch.randn(layout.total, HEADS, DIM, dtype=torch.float64)
        expected = plain_attention(*whole, distance, chosen)
        right = torch.autograd.grad(expected, whole, grad)
        sums = [torch.zeros_like(x) for x in whole]
        order = torch.cat([layout.local_positions(rank) for rank in range(cp)])
        for rank in range(cp):
            own, visible = layout.local_positions(rank), AttentionPattern(layout, rank)
            got = INDEXER.choose(states[0][own], states[1][order], visible)
            for token, of_groups in zip(own.tolist(), got.tolist(), strict=True):
                for group, blocks in enumerate(of_groups):
                    assert set(blocks) - {-1} == chosen[token][group], (name, token)
            tensors = [x.detach()[part].requires_grad_() for x, part in zip(whole, (own, order, order), strict=True)]
            out = selected_attention(*tensors, visible, got, SCALE, block_size=SIZE)
            torch.testing.assert_close(out, expected[own], rtol=1e-10, atol=1e-10)
            gradients = torch.autograd.grad(out, tensors, grad[own])
            for total, part, places in zip(sums, gradients, (own, order, order), strict=True):
                total.index_add_(0, places, part)
        for total, gradient in zip(sums, right, strict=True):
            torch.testing.assert_close(total, gradient, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize(("tokens", "before"), [(5, 0), (20, 0), (21, 0), (43, 0), (12, 19), (3, 40)])
def test_operations_count_keys_in_chosen_blocks_and_all_scores(tokens, before):
    """Up to n keys, n² / 2 pairs are counted for n · (n + 1) / 2; then a query's own block counts half."""
    family = family_of(make_config("minimax_m3"))
    mixer, plain = family.token_mixer(1), family.token_mixer(0)
    size, most = mixer.indexer.size, mixer.indexer.most_seen

    def seen(position):  # keys that the query at `position` sees
        return min(position + 1, most - size + position % size + 1)

    if before + tokens <= most:
        assert mixer.flops(tokens, before) == plain.flops(tokens, before)
        return
    pairs = sum(seen(position) for position in range(before, before + tokens))
    scores = 2.0 * mixer.indexer.heads * mixer.indexer.head_dim * ((before + tokens) ** 2 - before**2) / 2
    weights = 2.0 * (mixer.indexer.heads + 1) * mixer.indexer.head_dim * mixer.hidden * tokens
    counted = mixer.flops(tokens, before) - scores - weights
    exact = 12.0 * mixer.heads * mixer.head_dim * pairs
    assert counted == pytest.approx(exact, abs=12.0 * mixer.heads * mixer.head_dim * (most + size) / 2)


def test_adapters_are_not_on_indexers():
    lora = lora_of(LoRAConfig(target_modules=("q_proj", "v_proj")), family_of(make_config("minimax_m3")))
    assert lora.settings["exclude_modules"] == ["indexer.q_proj"]
    assert not any("indexer" in name for name in lora.table)
    assert "exclude_modules" not in lora_of(LoRAConfig(), family_of(make_config("glm_moe_dsa"))).settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_n_heads": 4}, r"index_n_heads=4 must be the number of key-value heads \(2\)"),
        ({"index_local_blocks": 5}, r"index_local_blocks=5 must be at least 1 and at most index_topk_blocks \(4\)"),
        ({"index_local_blocks": 0}, "index_local_blocks=0"),
        ({"index_block_size": 1}, "index_block_size=1 must be at least 2"),
        ({"index_head_dim": 6}, r"index_head_dim=6 must be at least the number of rotated elements of a head \(8\)"),
    ],
)
def test_what_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        check_model_fits(make_config("minimax_m3", **changes), ParallelConfig(), 64)

"""Tests of sparse attention by an indexer: the choice of keys, attention over chosen keys, what is kept and refused.

Whole models with indexers are compared with transformers in test_families, test_layout_check, test_megatron_generation.
"""

import math
from dataclasses import replace

import pytest
import torch
from attention_cases import layouts, predecessors
from hypothesis import given
from hypothesis import strategies as st
from layout_cases import make_data, make_sft_config
from small_models import and_long, make_config
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from mcore_rl.config import LoRAConfig, ModelConfig, ParallelConfig
from mcore_rl.distributed.packs import PackLayout
from mcore_rl.errors import UserError
from mcore_rl.models.megatron.attention import sparse as sparse_attention
from mcore_rl.models.megatron.attention.pooled import MeanIndexer, MeanPooling
from mcore_rl.models.megatron.attention.sparse import GatedPooling, Indexer, choose, highest, index_scores
from mcore_rl.models.megatron.families import family_of
from mcore_rl.models.megatron.kernels import gathered_attention as gathered
from mcore_rl.models.megatron.kernels import selected_attention as selected
from mcore_rl.models.megatron.kernels.packed_attention import AttentionPattern
from mcore_rl.models.megatron.kernels.selected_attention import selected_attention
from mcore_rl.models.megatron.model.hf_config import check_model_fits
from mcore_rl.testing.layout_check import compute_layout_result
from mcore_rl.testing.processes import run_processes

TOPK, HEADS, DIM, SCALE = 4, 3, 4, 0.3  # the square root of 4 is exact
INDEXER = Indexer(TOPK, HEADS, DIM, interleaved=False, source=0)
QSA_FIELDS = "n_heads", "kv_heads", "head_dim", "budget", "compress_ratio"
NEAR = 1e-5
"""Difference of two scores, relative to the query's largest score, below which rounding may exchange their keys."""


@given(st.lists(st.lists(st.integers(-1, 2), min_size=7, max_size=7), min_size=1, max_size=4), st.integers(0, 5))
def test_highest_prefers_earlier_keys_among_equal_scores(rows, more):
    """Keys behind a query's last key are never chosen, and change nothing."""
    scores = torch.tensor([[*row, *[3] * more] for row in rows]).float()
    ends = torch.arange(len(rows))[:, None] % 7 + 1
    for row, own, end in zip(rows, highest(scores, ends, TOPK).tolist(), ends[:, 0].tolist(), strict=True):
        expected = sorted(range(end), key=lambda position: (-row[position], position))[:TOPK]
        assert own == expected + [-1] * (TOPK - len(expected))


def test_zero_scores_are_equal_whatever_their_sign():
    scores = torch.tensor([[0.0, -0.0, -1.0, 0.0, -0.0, 1.0]])
    assert highest(scores, torch.tensor([[6]]), TOPK).tolist() == [[5, 0, 1, 3]]


class SortedColumns(TorchDispatchMode):
    """Records the number of columns of each tensor that is sorted inside the context."""

    def __init__(self):
        super().__init__()
        self.columns = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        if "sort" in function.overloadpacket.__name__:
            self.columns.append(arguments[0].shape[-1])
        return function(*arguments, **(named or {}))


SPECIAL = (0.0, -0.0, 1.0, -1.0, math.inf, -math.inf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("topk", [1, 2, 16, 47, 48, 60])
def test_highest_equals_a_stable_sort_of_all_scores_without_making_one(topk, dtype):
    generator = torch.Generator().manual_seed(topk)
    scores = torch.randn(200, 48, generator=generator, dtype=dtype)
    scores[50:100] = scores[50:100].round()
    scores[100:150].relu_()
    scores[150:] = torch.tensor(SPECIAL, dtype=dtype)[torch.randint(len(SPECIAL), (50, 48), generator=generator)]
    ends = torch.randint(1, 49, (200, 1), generator=generator)
    hidden = (scores + 0.0).masked_fill(torch.arange(48) >= ends, -math.inf)
    expected = hidden.sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    with SortedColumns() as sorts:
        found = highest(scores, ends, topk)
    assert torch.equal(found, torch.where(expected < ends, expected, -1).int())
    assert sorts.columns == [min(topk, 48)]


def test_highest_treats_nan_as_the_highest_score():
    scores = torch.tensor([[0.0, math.nan, 2.0, -math.nan, 1.0, 3.0], [math.nan] * 6])
    assert highest(scores, torch.tensor([[6], [5]]), TOPK).tolist() == [[1, 3, 5, 2], [0, 1, 2, 3]]


def whole_numbers(*shape, low=-2, high=3):
    """Return random whole numbers, with which many scores are exactly equal, in float64."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(sum(shape))).double()


@pytest.mark.parametrize("size", [1, 2])
def test_choose_sorts_only_scores_that_are_chosen(size):
    indexer, visible = replace(INDEXER, pool=size), AttentionPattern(PackLayout.pack((40,)), 0)
    pooling = GatedPooling(size, torch.zeros(size, DIM).double()) if size > 1 else None
    query, key, weight = whole_numbers(40, HEADS, DIM), whole_numbers(40, DIM * size), whole_numbers(40, HEADS)
    with SortedColumns() as sorts:
        choose(query, key, weight, visible, indexer, pooling=pooling)
    assert sorts.columns == [TOPK // size]


def plain_choice(query, key, weight, distance):
    """Return for each token the pack positions of its keys, from the formula and the rule for equal scores."""
    chosen = []
    for token in range(len(query)):
        keys = (distance[token] >= 0).nonzero()[:, 0].tolist()
        scores = {
            k: sum(float(weight[token, h] * (query[token, h] @ key[k]).clamp(min=0)) for h in range(HEADS))
            for k in keys
        }
        # A key is the earlier in the row, the farther it is away.
        chosen.append(sorted(keys, key=lambda k: (-scores[k], -int(distance[token, k])))[:TOPK])
    return chosen


def plain_attention(query, key, value, *sinks, chosen):
    seen = torch.zeros(len(query), len(query), dtype=torch.bool)
    for token, keys in enumerate(chosen):
        seen[token, keys] = True
    scores = torch.einsum("qhd,khd->hqk", query, key) * SCALE
    scores = scores.masked_fill(~seen, -torch.inf)
    for sink in sinks:
        scores = torch.cat((scores, sink[:, None, None].expand(-1, len(query), 1)), -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(key)], value)


@pytest.mark.parametrize(
    ("limit", "gathers", "has_sinks"), [(2**22, False, False), (90, False, True), (90, True, False), (90, True, True)]
)
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_choice_and_attention_equal_plain_softmax(cp, limit, gathers, has_sinks, monkeypatch):
    """All packs of test_attention, also with shared prefixes: choices, outputs, and the gradients of all ranks."""
    monkeypatch.setitem(selected.SCORES_OF_A_BLOCK, "cpu", limit)
    monkeypatch.setitem(selected.MASK_OF_A_BLOCK, "cpu", limit)
    monkeypatch.setattr(selected, "pays", lambda *_: gathers)
    monkeypatch.setitem(gathered.GATHERED_ELEMENTS, "cpu", 6 * TOPK * HEADS * DIM)  # three queries at a time
    for name, layout in layouts(cp).items():
        if layout.total > 120:
            continue
        distance = predecessors(layout)
        states = (
            whole_numbers(layout.total, HEADS, DIM),
            whole_numbers(layout.total, DIM),
            whole_numbers(layout.total, HEADS),
        )
        chosen = plain_choice(*states, distance)
        query, key, value, grad = (torch.randn(layout.total, HEADS, DIM, dtype=torch.float64) for _ in range(4))
        sinks = [torch.randn(HEADS, dtype=torch.float64)] * has_sinks
        whole = [x.requires_grad_() for x in (query, key, value, *sinks)]
        expected = plain_attention(*whole, chosen=chosen)
        right = torch.autograd.grad(expected, whole, grad)
        sums = [torch.zeros_like(x) for x in whole]
        order = torch.cat([layout.local_positions(rank) for rank in range(cp)])
        for rank in range(cp):
            own, visible = layout.local_positions(rank), AttentionPattern(layout, rank)
            got = choose(states[0][own], states[1][order], states[2][own], visible, INDEXER)
            position = distance.max(1).values  # the first token of a row is the farthest
            for token, row in zip(own.tolist(), got.tolist(), strict=True):
                positions = [int(position[token] - distance[token, k]) for k in chosen[token]]
                assert sorted(row) == sorted(positions + [-1] * (TOPK - len(positions))), (name, token)
            parts = own, order, order, *[torch.arange(HEADS)] * has_sinks
            tensors = [x.detach()[part].requires_grad_() for x, part in zip(whole, parts, strict=True)]
            out = selected_attention(*tensors[:3], visible, got, SCALE, *tensors[3:])
            torch.testing.assert_close(out, expected[own], rtol=1e-10, atol=1e-10)
            gradients = torch.autograd.grad(out, tensors, grad[own])
            for total, part, places in zip(sums, gradients, parts, strict=True):
                total.index_add_(0, places, part)
        for total, gradient in zip(sums, right, strict=True):
            torch.testing.assert_close(total, gradient, rtol=1e-10, atol=1e-10, msg=name)


def gated_pools(size):
    """Return the pooling of GLM-5.3 and its formula, from a pool's states and the position of its first key."""
    pooling = GatedPooling(size, torch.randn(size, DIM, dtype=torch.float64))

    def pooled(states, first):
        keys, gates = states.split(DIM, -1)
        return ((gates + pooling.bias).softmax(0) * keys).sum(0)

    return pooling, pooled, 2 * DIM


def mean_pools(size):
    """Return the pooling of Qwen4 and its formula, as `gated_pools`. Elements 0 and 1 of a key are a rotated pair."""
    frequency, eps, weight = 0.375, 0.01, torch.randn(DIM, dtype=torch.float64)
    fields = {"interleaved": False, "source": 0, "pool": size, "eps": eps, "frequencies": (frequency,)}
    pooling = MeanPooling(size, MeanIndexer(8, HEADS, DIM, **fields, rope_factor=1.0), weight)

    def pooled(states, first):
        mean = sum(states) / size
        x = (mean / (mean @ mean / DIM + eps).sqrt() * (1 + weight)).tolist()
        cos, sin = math.cos(first * frequency), math.sin(first * frequency)
        return torch.tensor([x[0] * cos - x[1] * sin, x[1] * cos + x[0] * sin, *x[2:]], dtype=torch.float64)

    return pooling, pooled, DIM


@pytest.mark.parametrize("kind", [gated_pools, mean_pools])
@pytest.mark.parametrize("cp", [1, 2])
def test_pools_are_chosen_as_a_whole_and_later_keys_are_always_seen(cp, kind, monkeypatch):
    """Pools of a row may cross the chunks of context-parallel ranks, and the parts of shared prefixes."""
    monkeypatch.setitem(selected.SCORES_OF_A_BLOCK, "cpu", 90)
    size, pools = 3, 2
    pooling, formula, width = kind(size)
    indexer = Indexer(size * pools, HEADS, DIM, interleaved=False, source=0, pool=size)
    for name, layout in layouts(cp).items():
        if layout.total > 120:
            continue
        query, states = (torch.randn(layout.total, *shape).double() for shape in ((HEADS, DIM), (width,)))
        weight, distance = torch.randn(layout.total, HEADS).double(), predecessors(layout)
        order = torch.cat([layout.local_positions(rank) for rank in range(cp)])
        for rank in range(cp):
            own = layout.local_positions(rank)
            got = choose(
                query[own],
                states[order],
                weight[own],
                AttentionPattern(layout, rank),
                indexer,
                0,
                pooling,
            )
            for token, row in zip(own.tolist(), got.tolist(), strict=True):
                keys = (distance[token] >= 0).nonzero()[:, 0].tolist()
                keys.sort(key=lambda k, token=token: -int(distance[token, k]))  # by their positions in the row
                scores = []
                for first in range(0, len(keys) // size * size, size):
                    key = formula(states[keys[first : first + size]], first)
                    scores.append((-float(weight[token] @ (query[token] @ key).relu()), first))
                best = sorted(scores)[:pools]
                seen = [first + n for _, first in best for n in range(size)]
                seen += range(len(keys) // size * size, len(keys))
                assert sorted(place for place in row if place >= 0) == sorted(seen), (name, token)


def test_kept_and_temporary_memory_is_linear_in_tokens(monkeypatch):
    """With four times the tokens four times as much is kept, and no block of scores becomes larger."""
    limit, blocks = 4000, []

    def recorded(query, key, weight):
        blocks.append(query.shape[1] * query.shape[2] * key.shape[1])
        return index_scores(query, key, weight)

    monkeypatch.setitem(selected.SCORES_OF_A_BLOCK, "cpu", limit)
    monkeypatch.setattr(sparse_attention, "index_scores", recorded)
    kept = {}
    for tokens in (64, 256):
        saved = []
        visible = AttentionPattern(PackLayout.pack((tokens,)), 0)
        query, key, value = (torch.randn(tokens, HEADS, DIM, requires_grad=True) for _ in range(3))
        chosen = choose(query.detach(), key.detach()[:, 0], query.detach()[..., 0], visible, INDEXER)
        with saved_tensors_hooks(lambda x, saved=saved: saved.append(x.numel()) or x, lambda x: x):
            selected_attention(query, key, value, visible, chosen, SCALE)
        kept[tokens] = sum(saved)
    assert kept[64] == 64 * (3 * HEADS * DIM + TOPK)
    assert kept[256] == 4 * kept[64]
    assert len(blocks) > 20
    assert max(blocks) <= limit


# ------------------------------------------------------------------ beside transformers


LENGTHS = (200, 7, 45)
LAYOUTS = {
    "one process": {},
    "tp2 sp ep2": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
    "cp2 ep2": {"context_parallel_size": 2, "expert_model_parallel_size": 2},
}


def token_rows():
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(0, 250, (length,), generator=generator) for length in LENGTHS]


def choices_of_rank(path, sizes):
    """Return this rank's pack positions, and the choices [T / CP, topk] of all layers with an indexer."""
    from mcore_rl.data.batching import Microbatch
    from mcore_rl.distributed.batched_data_dict import BatchedDataDict
    from mcore_rl.models.megatron.attention.sparse import IndexerLayer
    from mcore_rl.models.megatron.model.build import build_model
    from mcore_rl.models.megatron.model.hf_config import load_hf_config
    from mcore_rl.models.megatron.model.hf_directory import SafetensorsDirectory
    from mcore_rl.models.megatron.parallel_state import destroy_parallel, initialize_parallel, seed_everything
    from mcore_rl.models.megatron.training.forward_step import run_microbatches
    from mcore_rl.models.megatron.weights.conversion import load_hf_weights

    parallel = ParallelConfig(**sizes)
    topology = initialize_parallel(parallel)
    seed_everything(0)
    model = build_model(load_hf_config(path), ModelConfig(path=path), parallel, topology)
    load_hf_weights(model, SafetensorsDirectory(path))
    layout = PackLayout.pack(LENGTHS, topology.context.size, parallel.sequence_multiple)
    chosen = []
    for module in model.chunks[0].modules():
        if isinstance(module, IndexerLayer):
            assert not any(parameter.requires_grad for parameter in module.parameters())
            module.register_forward_hook(lambda module, inputs, choice: chosen.append(choice.clone()))
    ids = torch.nn.utils.rnn.pad_sequence(token_rows(), batch_first=True)
    microbatch = Microbatch([0, 1, 2], BatchedDataDict(input_ids=ids), layout)
    with torch.no_grad():
        run_microbatches(model, model.chunks, [microbatch], lambda x, m: (x.sum(), {}), train=False)
    destroy_parallel()
    return layout.local_positions(topology.context.rank), chosen


def exact_scores(indexer, hidden, latent, cos, sin, neighbours):
    """Return the scores [S, S] of a module of transformers in float64, from its inputs and weights."""
    w, heads = {name: p.double() for name, p in indexer.named_parameters()}, indexer.n_heads

    def rotated(x):
        size = cos.shape[-1]
        first, second = (x[..., :size:2], x[..., 1:size:2]) if neighbours else x[..., :size].chunk(2, -1)
        c, s = (wave.double()[:, None, : size // 2] for wave in (cos, sin))
        return torch.cat((first * c - second * s, second * c + first * s, x[..., size:]), -1)

    key = torch.nn.functional.layer_norm(
        hidden @ w["wk.weight"].T, w["k_norm.weight"].shape, w["k_norm.weight"], w["k_norm.bias"], 1e-6
    )
    query = rotated((latent @ w["wq_b.weight"].T).unflatten(-1, (heads, -1)))
    products = torch.einsum("qhd,kd->qhk", query, rotated(key[:, None])[:, 0]).relu() * query.shape[-1] ** -0.5
    scores = torch.einsum("qh,qhk->qk", hidden @ w["weights_proj.weight"].T * heads**-0.5, products)
    return scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)


@pytest.fixture(scope="module")
def in_transformers(model_of):
    """A function from a family to topk, and for each row and indexer transformers' choice and the exact scores."""

    def get(family):
        model = AutoModelForCausalLM.from_pretrained(model_of(family), dtype=torch.float32).eval()
        indexers = [module for name, module in model.named_modules() if name.endswith(".indexer")]
        assert {indexer.k_norm.eps for indexer in indexers} == {sparse_attention.KEY_NORM_EPS}
        found = []

        def note(module, arguments, choice):
            hidden, latent, (cos, sin) = arguments[:3]
            scores = exact_scores(
                module, hidden[0].double(), latent[0].double(), cos[0], sin[0], family == "glm_moe_dsa"
            )
            found[-1].append((choice[0], scores))

        hooks = [indexer.register_forward_hook(note) for indexer in indexers]
        with torch.no_grad():
            for row in token_rows():
                found.append([])
                model(row[None])
        for hook in hooks:
            hook.remove()
        return model.config.index_topk, found

    return get


def differing(choice, scores, topk):
    """Return how many queries chose other keys than the highest exact scores.

    Only keys may be exchanged whose scores differ from the last chosen one by at most `NEAR`.
    """
    count = 0
    for query, own in enumerate(choice.tolist()):
        own = {key for key in own if 0 <= key <= query}
        ranked = scores[query, : query + 1].sort(descending=True)
        exact = set(ranked.indices[:topk].tolist())
        last = ranked.values[min(topk, query + 1) - 1]
        assert len(own) == len(exact)
        assert all(abs(scores[query, key] - last) <= NEAR * ranked.values.abs().max() for key in own ^ exact)
        count += own != exact
    return count


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("family", "layout"),
    and_long(
        [("glm_moe_dsa", "one process")],
        [("deepseek_v32", "one process"), ("deepseek_v32", "tp2 sp ep2"), ("glm_moe_dsa", "cp2 ep2")],
    ),
)
def test_choices_equal_transformers(family, layout, model_of, in_transformers):
    """Choices are those of exact scores but for near scores, here and in transformers; at most 1 of 200 differs."""
    topk, rows = in_transformers(family)
    sizes = LAYOUTS[layout]
    ranks = run_processes(choices_of_rank, model_of(family), sizes, world_size=2 if sizes else 1)
    multiple = ParallelConfig(**sizes).sequence_multiple
    layout = PackLayout.pack(LENGTHS, sizes.get("context_parallel_size", 1), multiple)
    for indexer in range(len(rows[0])):
        whole = torch.empty(layout.total, topk, dtype=torch.int32)
        for places, choices in ranks:
            assert len(choices) == len(rows[0])
            whole[places] = choices[indexer]
        for row, start, length in zip(rows, layout.starts.tolist(), LENGTHS, strict=True):
            theirs, scores = row[indexer]
            assert differing(whole[start : start + length], scores, topk) <= length / 200
            assert differing(theirs, scores, topk) <= length / 200


def number_of_choices(config):
    """Return how often indexers choose keys in one training step."""
    calls = []

    def counted(*arguments):
        calls.append(arguments)
        return choose(*arguments)

    sparse_attention.choose = counted  # in a process of its own
    compute_layout_result(config, make_data(), 1)
    return len(calls)


@pytest.mark.long
def test_recomputed_layers_use_the_choice_of_the_forward_pass(model_of):
    """Rounding in the recomputation cannot exchange keys, and the keys are chosen once."""
    config = make_sft_config(model_of("glm_moe_dsa"))
    recomputed = config.model_copy(update={"model": config.model.model_copy(update={"recompute_activations": True})})
    plain, again = (run_processes(number_of_choices, one, world_size=1)[0] for one in (config, recomputed))
    assert plain == again > 0


# ------------------------------------------------------------------ what is refused and counted


SHARED = {"indexer_types": ["full", "shared", "shared", "full"]}


@pytest.mark.parametrize(
    "sizes",
    [
        {"pipeline_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 1},
    ],
)
def test_stages_whose_keys_another_stage_chooses_are_refused(sizes):
    hf = make_config("glm_moe_dsa", **SHARED)
    first = 1 if len(sizes) > 1 else 2
    with pytest.raises(
        UserError,
        match=rf"pipeline_model_parallel_size=2: layer {first} attends to the keys that layer 0 chooses .* set "
        rf"parallel\.pipeline_model_parallel_layout, or data\.max_sequence_length={hf.index_topk}",
    ):
        check_model_fits(hf, ParallelConfig(**sizes), hf.index_topk + 1)
    check_model_fits(hf, ParallelConfig(**sizes), hf.index_topk)
    check_model_fits(make_config("deepseek_v32"), ParallelConfig(**sizes), 60)
    whole = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Ettt|tL"}
    check_model_fits(hf, ParallelConfig(**whole), 60)


@pytest.mark.parametrize(
    "types", [["shared", "full", "full", "full"], ["full"] * 3, ["full", "window", "full", "full"]]
)
def test_types_of_indexers_that_do_not_fit_are_refused(types):
    hf = make_config("glm_moe_dsa")
    hf.indexer_types = types
    with pytest.raises(UserError, match=r'indexer_types must be "full" or "shared" for each of the 4 layers'):
        check_model_fits(hf, ParallelConfig(), 60)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_kpool_always_select_tail": False}, "the first tokens of a row would see no keys"),
        ({"indexer_types": ["full", "full", "full", "shared"]}, 'indexer_types other than "full"'),
        ({"linear_lower_bound": 0.5}, "linear_lower_bound=0.5 must be below 0"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim below 2"),
    ],
)
def test_pools_and_delta_nets_of_glm5_next_that_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        family_of(make_config("glm5_next", **changes)).check(60)


@pytest.mark.parametrize(("tokens", "before"), [(23, 0), (40, 0), (43, 0), (40, 24)])
def test_operations_count_chosen_pools_and_later_keys(tokens, before):
    """Beyond `index_topk`, the keys after the last pool count with their mean number."""
    family = family_of(make_config("glm5_next"))
    hf, mixer = family.hf, family.token_mixer(1)
    most, mean = hf.index_topk + hf.index_kpool - 1, hf.index_topk + (hf.index_kpool - 1) / 2
    positions = range(before, before + tokens)
    seen = sum(position + 0.5 if position < most else mean for position in positions)
    attention = 6 * hf.num_attention_heads * (hf.qk_nope_head_dim + hf.v_head_dim) * seen
    heads, size = hf.index_n_heads, hf.index_head_dim
    weights = heads * size * hf.q_lora_rank + 2 * size * hf.hidden_size + heads * hf.hidden_size
    scores = 2 * heads * size / hf.index_kpool * sum(position + 0.5 for position in positions)
    expected = attention + (scores + 2 * weights * tokens if before + tokens > most else 0)
    assert mixer.flops(tokens, before) == pytest.approx(expected)


@pytest.mark.parametrize(("tokens", "before"), [(23, 0), (40, 0), (43, 0), (40, 24)])
def test_operations_of_qwen4_count_chosen_pools_and_later_keys(tokens, before):
    hf = (family := family_of(make_config("qwen4"))).hf
    most, mean = hf.indexer_budget + hf.indexer_compress_ratio - 1, hf.indexer_budget + 1.5
    positions = range(before, before + tokens)
    seen = sum(position + 0.5 if position < most else mean for position in positions)
    scores = 2 * hf.indexer_n_heads * hf.indexer_head_dim / hf.indexer_compress_ratio
    of_index = scores * sum(position + 0.5 for position in positions)
    of_index += 2 * (hf.indexer_n_heads + 1) * hf.indexer_head_dim * hf.hidden_size * tokens
    expected = 12 * hf.num_attention_heads * hf.head_dim * seen + (of_index if before + tokens > most else 0)
    assert family.token_mixer(1).flops(tokens, before) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indexer_compress_ratio": 1}, r"indexer_compress_ratio=1 must be at least 2, and at most indexer_budget"),
        ({f"indexer_{name}": None for name in QSA_FIELDS}, "indexer_n_heads must be set"),
    ],
)
def test_parts_of_qwen4_that_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        family_of(make_config("qwen4", **changes)).check(60)


def test_adapters_of_indexers_are_refused(model_of):
    from mcore_rl.models.megatron.model.hf_config import load_hf_config
    from mcore_rl.models.megatron.model.lora import lora_of

    family = family_of(load_hf_config(model_of("deepseek_v32")))
    with pytest.raises(UserError, match=r"deepseek_v32 has no wq_b to adapt; it has q_a_proj, q_b_proj, .*o_proj"):
        lora_of(LoRAConfig(rank=2, target_modules=["q_b_proj", "wq_b"]), family)


@pytest.mark.parametrize(("tokens", "before"), [(10, 0), (21, 0), (40, 0), (30, 25), (5, 10), (12, 10)])
def test_operations_count_chosen_keys_and_all_scores(tokens, before):
    family = family_of(make_config("glm_moe_dsa"))
    hf = family.hf
    positions = range(before, before + tokens)
    # A pair of a query and its own key counts half, as in other attention.
    seen = sum(min(position + 0.5, hf.index_topk) for position in positions)
    attention = 6 * hf.num_attention_heads * (hf.qk_nope_head_dim + hf.qk_rope_head_dim + hf.v_head_dim) * seen
    heads, size = hf.index_n_heads, hf.index_head_dim
    weights = heads * size * hf.q_lora_rank + size * hf.hidden_size + heads * hf.hidden_size
    scores = 2 * heads * size * sum(position + 0.5 for position in positions) + 2 * weights * tokens
    counted = [family.token_mixer(layer).flops(tokens, before) for layer in range(4)]
    assert counted[1] == counted[3] == pytest.approx(attention)
    has_scores = before + tokens > hf.index_topk
    assert counted[0] - counted[1] == pytest.approx(scores if has_scores else 0)


@pytest.mark.parametrize("family", ["glm_moe_dsa", "hy_v4"])
def test_checkpoints_do_not_stack_layers_with_and_without_indexers(family):
    """Not even if all layers have experts. Megatron refuses to save a stack from which a layer's part is missing."""
    of_all = {"mlp_layer_types": ["sparse"] * 4}
    shared = family_of(make_config(family, **of_all))
    alike = family_of(make_config(family, **of_all, indexer_types=["full"] * 4))
    assert shared.megatron_fields()["hetereogenous_dist_checkpoint"]
    assert not alike.megatron_fields()["hetereogenous_dist_checkpoint"]

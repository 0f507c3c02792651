"""Tests of gated delta nets and Mamba-2: rules over packs and trees, layouts, and published directories."""

import functools
import json
from itertools import pairwise

import pytest
import torch
from float32 import EPSILON, FORMULA, assert_close32
from layout_cases import make_config, make_data, plain_logprobs, run_steps
from published_directories import save_in_shards, tensors_of, train_and_export
from safetensors.torch import load_file
from small_models import DELTA_NET_EXPERTS, DELTA_NETS, SMALL, and_long, make_tokenizer
from small_models import make_config as make_hf_config
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from mcore_rl.config import ParallelConfig
from mcore_rl.distributed.packs import PackLayout, PrefixLayout, PrefixTree
from mcore_rl.errors import UserError
from mcore_rl.models.megatron.kernels.delta_rule import (
    causal_conv,
    convolve_last,
    delta_rule,
    delta_step,
    describe_kernels,
    packed_convolution,
    packed_rule,
    plan_of,
)
from mcore_rl.models.megatron.recurrent.mamba2 import Mamba2, state_rule
from mcore_rl.testing.layout_check import ParallelLayout, compute_layout_result
from mcore_rl.testing.processes import run_processes

WIDTH = 4
LENGTHS = (150, 8, 64, 1, 33)


def random_inputs(tokens, per_channel=False):
    """Queries and keys of 2 heads, values, decays and rates of 3 value heads each, in float64."""
    generator = torch.Generator().manual_seed(5)

    def numbers(*shape):
        return torch.randn(tokens, *shape, dtype=torch.float64, generator=generator)

    decays = -numbers(2, 3, *([5] if per_channel else [])).exp()
    inputs = numbers(2, 5), numbers(2, 5), numbers(2, 3, 7), decays, numbers(2, 3).sigmoid()
    return [x.requires_grad_() for x in inputs]


def state_inputs(tokens):
    """Inputs of Mamba-2's rule: C and B of 2 groups; Δ x, A Δ and D x of 3 heads each, in float64."""
    query, key, value, decay, _ = (x.detach() for x in random_inputs(tokens))
    return [x.requires_grad_() for x in (query, key, value, decay, value.flip(0).clone())]


def plain_state_step(query, key, value, decay, added, state):
    """One token of the recurrence of arXiv:2405.21060, eq. 16 (with D): S ← exp(A Δ) S + B (Δ x)ᵀ, y = Sᵀ C + D x."""
    state = decay.exp()[..., None, None] * state + torch.einsum("ngk,ngrv->ngrkv", key, value)
    return torch.einsum("ngk,ngrkv->ngrv", query, state) + added, state


def token_by_token(inputs, sequences, total, step=delta_step):
    """Outputs [T, …] of the plain recurrence over sequences of pack positions, and their last states."""
    value = inputs[2]
    outs, states = {}, []
    for positions in sequences:
        state = value.new_zeros(1, *value.shape[1:3], inputs[0].shape[-1], value.shape[-1])
        for position in positions:
            out, state = step(*(x[position : position + 1] for x in inputs), state)
            outs[position] = out
        states.append(state)
    nothing = value.new_zeros(1, *value.shape[1:])
    return torch.cat([outs.get(position, nothing) for position in range(total)]), torch.cat(states)


RULES = {
    "decay by head": (delta_rule, random_inputs, delta_step),
    "decay by channel": (delta_rule, functools.partial(random_inputs, per_channel=True), delta_step),
    "state space": (state_rule, state_inputs, plain_state_step),
}


def assert_rule_is_recurrence(layout, sequences, ends, kind):
    """Compare outputs, the states at `ends` (indices of segments) and all gradients."""
    rule, make, step = RULES[kind]
    inputs = make(layout.total)
    out, states = rule(*inputs, plan_of(layout, WIDTH, torch.device("cpu")), with_states=True)
    is_token = (torch.arange(layout.total) < 0).index_fill(0, torch.tensor([i for s in sequences for i in s]), True)
    out = out * is_token[:, None, None, None]  # nobody reads the outputs of padding
    expected, last = token_by_token(inputs, sequences, layout.total, step)
    weights = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    found, wanted = (
        torch.autograd.grad((x * weights).sum() + s.square().sum(), inputs)
        for x, s in ((out, states[ends]), (expected, last))
    )
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(states[ends], last, rtol=0, atol=1e-13)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


PER_CHANNEL = pytest.mark.parametrize("per_channel", [False, True], ids=["decay by head", "decay by channel"])


OF_EACH_KIND = pytest.mark.parametrize("kind", RULES)


@OF_EACH_KIND
def test_the_rule_over_a_pack_is_the_recurrence_of_each_sequence(kind):
    layout = PackLayout.pack(LENGTHS, 1, 8)
    sequences = [range(start, start + n) for start, n in zip(layout.starts.tolist(), LENGTHS, strict=True)]
    assert_rule_is_recurrence(layout, sequences, list(range(len(LENGTHS))), kind)


@pytest.mark.parametrize("strongest", [5.0, 60.0, 600.0])
@pytest.mark.parametrize("kind", ["decay by channel", "state space"])
def test_strong_decays_are_exact_in_float32(kind, strongest):
    """Sums of decays are never differences of longer sums, so neither outputs nor gradients lose digits."""
    layout = PackLayout.pack((150, 40), 1, 8)
    plan = plan_of(layout, WIDTH, torch.device("cpu"))
    rule, make, _ = RULES[kind]
    query, key, value, decay, last = make(layout.total)
    decay = -strongest * torch.rand(decay.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    inputs = [x.detach().requires_grad_() for x in (query, key, value, decay, last)]
    results = []
    for dtype in (torch.float64, torch.float32):
        out, _ = rule(*(x.to(dtype) for x in inputs), plan)
        weights = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
        results.append([out, *torch.autograd.grad((out * weights).sum(), inputs)])
    for exact, rough in zip(*results, strict=True):
        assert (rough - exact).norm() <= FORMULA * EPSILON * exact.norm()


def make_tree():
    """A layout of a prompt of 70 tokens with two turns, one of which two answers continue, and of a row alone."""
    tree = PrefixTree(lengths=(70, 65, 3, 20, 9, 11), parents=(-1, 0, 1, 1, 0, -1), ends=(2, 3, 4, 5))
    return PrefixLayout.of(tree, 1, 8)


@OF_EACH_KIND
def test_the_rule_over_a_tree_is_the_recurrence_of_each_row(kind):
    layout = make_tree()
    tree, starts = layout.tree, layout.cu_seqlens_padded.tolist()
    sequences = [
        [starts[s] + i for s in tree.path(end) for i in range(tree.lengths[s])] for end in tree.ends
    ]  # rows repeat the positions of what they share
    assert_rule_is_recurrence(layout, sequences, list(tree.ends), kind)


@pytest.mark.parametrize("has_bias", [False, True])
def test_the_convolution_sees_only_earlier_tokens_of_its_sequence(has_bias):
    layout = make_tree()
    tree, starts = layout.tree, layout.cu_seqlens_padded.tolist()
    generator = torch.Generator().manual_seed(7)
    x, weight = torch.randn(layout.total, 2, 3, generator=generator), torch.randn(2, 3, WIDTH, generator=generator)
    bias = torch.randn(2, 3, generator=generator) if has_bias else None
    out = causal_conv(x, weight, plan_of(layout, WIDTH, torch.device("cpu")).before, bias)
    for end in tree.ends:
        positions = [starts[s] + i for s in tree.path(end) for i in range(tree.lengths[s])]
        row = torch.cat((torch.zeros(WIDTH - 1, 2, 3), x[positions]))
        windows = torch.stack([row[i : i + WIDTH] for i in range(len(positions))])
        torch.testing.assert_close(out[positions], convolve_last(windows, weight, bias))
        filters = weight.flatten(0, 1)[:, None], None if bias is None else bias.flatten()
        plain = torch.nn.functional.conv1d(row.flatten(1).T, *filters, groups=6).T
        torch.testing.assert_close(out[positions].flatten(1), torch.nn.functional.silu(plain))


@pytest.mark.parametrize("kind", ["decay by head", "state space"])
def test_sequences_of_a_pack_do_not_see_each_other(kind):
    """Not a single bit of another sequence's results changes with a sequence."""
    rule, make, _ = RULES[kind]
    layout = PackLayout.pack(LENGTHS, 1, 8)
    plan, inputs = plan_of(layout, WIDTH, torch.device("cpu")), [x.detach() for x in make(layout.total)]
    before, _ = rule(*inputs, plan)
    first, end = layout.cu_seqlens_padded[1:3].tolist()
    changed = [x.clone() for x in inputs]
    for x in changed:
        x[first:end] += 1
    after, _ = rule(*changed, plan)
    others = torch.ones(layout.total, dtype=torch.bool)
    others[first:end] = False
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[first:end], after[first:end])


def test_operations_of_mamba_are_those_of_its_products():
    """All but those of the first chunk, which reads no state."""
    net = Mamba2(hidden=1, heads=2, repeats=3, key_dim=5, value_dim=7, width=WIDTH, least_step=0.0, conv_bias=True)
    tokens, first = 320, 64
    plan = plan_of(PackLayout.pack((tokens,)), WIDTH, torch.device("cpu"))
    with FlopCounterMode(display=False) as counter:
        out, states = state_rule(*state_inputs(tokens), plan, with_states=True)
        (out.sum() + states.sum()).backward()
    reads, convolution = 3 * 2 * 3 * 2 * 5 * 7, 3 * 2 * 2 * WIDTH * net.convolved_size
    counted = net.flops(tokens) - tokens * convolution - first * reads
    assert counter.get_total_flops() == counted


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"context_parallel_size": 8},
            r"context_parallel_size=8: tensor x context parallelism \(8\) must divide .*key heads .*\(4\)",
        ),
        (
            {"tensor_model_parallel_size": 4, "context_parallel_size": 2},
            r"tensor x context parallelism \(8\) must divide",
        ),
    ],
)
@pytest.mark.parametrize(("family", "heads"), [("qwen3_5", "key heads"), ("nemotron_h", "groups of Mamba-2")])
def test_more_ranks_than_key_heads_are_refused(family, heads, sizes, message):
    from mcore_rl.models.megatron.model.hf_config import check_model_fits

    with pytest.raises(UserError, match=message.replace("key heads", heads)):
        check_model_fits(make_hf_config(family), ParallelConfig(**sizes), 64)


def test_what_the_families_do_not_compute():
    from mcore_rl.models.megatron.model.hf_config import check_model_fits

    with pytest.raises(UserError, match="attn_output_gate=false"):
        check_model_fits(make_hf_config("qwen3_5", attn_output_gate=False), ParallelConfig(), 64)
    with pytest.raises(UserError, match=r"10 value heads .* multiple of the key heads"):
        check_model_fits(make_hf_config("qwen3_5", linear_num_value_heads=10), ParallelConfig(), 64)
    for changes, message in (
        ({"mamba_num_heads": 10}, r"mamba_num_heads \(10\) must be a multiple of n_groups \(4\)"),
        ({"conv_kernel": 1}, "conv_kernel below 2"),
        ({"mamba_hidden_act": "relu"}, "mamba_hidden_act='relu'"),
        ({"use_bias": True}, "use_bias=true"),
        ({"mlp_bias": True}, "mlp_bias=true"),
        ({"mlp_hidden_act": "gelu"}, "activation 'gelu' is not supported"),
    ):
        with pytest.raises(UserError, match=message):
            check_model_fits(make_hf_config("nemotron_h", **changes), ParallelConfig(), 64)


def weights_after(config, directory, load, steps):
    _, weights, saved = run_steps(config, directory, load, steps)
    return weights, saved


@pytest.mark.parametrize(
    ("family", "first", "second"),
    and_long(
        [],
        [
            ("qwen3_5", ParallelLayout(tp=2, sp=True), ParallelLayout(pp=2)),
            ("qwen3_next", ParallelLayout(tp=2, sp=True, ep=2, etp=1), ParallelLayout()),
            ("qwen3_5", ParallelLayout(), ParallelLayout(tp=2, cp=2, sp=True)),
            ("kimi_linear", ParallelLayout(tp=2, sp=True, ep=2, etp=1), ParallelLayout(pp=2)),
            ("nemotron_h_moe", ParallelLayout(tp=2, sp=True, ep=2, etp=1), ParallelLayout(pp=2)),
        ],
        [("nemotron_h", ParallelLayout(pp=2), ParallelLayout(tp=2, cp=2, sp=True))],
    ),
    ids=str,
)
def test_a_checkpoint_loads_under_another_layout(family, first, second, model_of, tmp_path):
    """Bit for bit. Later steps would differ as much as those of the layouts themselves do."""
    config, load = make_config(model_of(family)), None
    weights = []
    for layout, steps in ((first, 2), (second, 0)):
        arguments = layout.apply(config), tmp_path, load, steps
        found, load = run_processes(weights_after, *arguments, world_size=layout.world_size)[0]
        weights.append(found)
    assert all(torch.equal(weights[1][name], tensor) for name, tensor in weights[0].items())


@pytest.mark.parametrize("family", and_long(["qwen3_5"], ["qwen3_next", "kimi_linear", "nemotron_h_moe"], ["qwen4"]))
def test_recomputed_layers_have_the_same_gradients(family, model_of):
    config = make_config(model_of(family))
    recomputed = config.model_copy(update={"model": config.model.model_copy(update={"recompute_activations": True})})
    one, again = (
        run_processes(compute_layout_result, c, make_data(), 1, world_size=1)[0] for c in (config, recomputed)
    )
    assert one.metrics["loss"] == again.metrics["loss"]
    assert all(torch.equal(again.gradients[name], gradient) for name, gradient in one.gradients.items())


@pytest.mark.parametrize(
    ("family", "layout"),
    and_long(
        [],
        [("qwen3_5", ParallelLayout(tp=2, sp=True)), ("qwen3_5", ParallelLayout(cp=2))],
        [("nemotron_h", ParallelLayout(tp=2, cp=2, sp=True))],
    ),
    ids=str,
)
def test_training_in_bf16_stays_near_fp32(family, layout, model_of):
    """Log-probabilities, and the loss of three steps; gradients of so small a model are noise in bf16."""
    config = make_config(model_of(family))
    half = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})
    exact, rough = (
        run_processes(compute_layout_result, each.apply(c), make_data(), 3, world_size=each.world_size)[0]
        for each, c in ((ParallelLayout(), config), (layout, half))
    )
    assert (rough.scores - exact.scores).norm() <= 0.05 * exact.scores.norm()
    assert rough.metrics["loss"] == pytest.approx(exact.metrics["loss"], rel=0.1)


# ------------------------------------------------------------------ kernels of other packages


def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None,
    cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, **kwargs,
):  # fmt: skip
    """Compute what fla 0.6.0 computes with these arguments, token by token."""
    assert use_qk_l2norm_in_kernel and initial_state is None and not (output_final_state or kwargs)
    assert q.shape[0] == 1 and v.shape[2] % q.shape[2] == 0 and g.shape == beta.shape == v.shape[:3]
    repeats, ends = v.shape[2] // q.shape[2], cu_seqlens.tolist()
    grouped = [x[0].unflatten(1, (-1, repeats)) for x in (v, g, beta)]
    sequences = [range(start, end) for start, end in pairwise(ends)]
    out, _ = token_by_token([q[0], k[0], *grouped], sequences, ends[-1])
    return out.flatten(1, 2)[None], None


def chunk_kda(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False,
    lower_bound=None, disable_recompute=False, return_intermediate_states=False, state_v_first=False, cu_seqlens=None,
    cu_seqlens_cpu=None, cp_context=None, use_graph=False, max_num_seqs=None, **kwargs,
):  # fmt: skip
    """Compute what fla 0.6.0 computes with these arguments, token by token."""
    assert not (use_gate_in_kernel or use_beta_sigmoid_in_kernel or kwargs)
    assert g.shape == (*v.shape[:3], q.shape[-1])
    assert use_qk_l2norm_in_kernel and beta.shape == v.shape[:3]
    repeats, ends = v.shape[2] // q.shape[2], cu_seqlens.tolist()
    grouped = [x[0].unflatten(1, (-1, repeats)) for x in (v, g, beta)]
    sequences = [range(start, end) for start, end in pairwise(ends)]
    out, _ = token_by_token([q[0], k[0], *grouped], sequences, ends[-1])
    return out.flatten(1, 2)[None], None


def causal_conv1d_fn(
    x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, final_states_out=None,
    activation=None,
):  # fmt: skip
    """Compute what causal_conv1d 1.7.0 computes with these arguments."""
    assert initial_states is None and not return_final_states and activation == "silu"
    assert x.shape[0] == 1 and x.stride(1) == 1 and seq_idx.dtype == torch.int32, "channels of a token lie together"
    out = []
    for number in range(int(seq_idx.max()) + 1):
        own = x[0, :, seq_idx[0] == number]
        padded = torch.nn.functional.pad(own, (weight.shape[1] - 1, 0))
        out.append(torch.nn.functional.conv1d(padded[None], weight[:, None], bias, groups=len(weight))[0])
    return torch.nn.functional.silu(torch.cat(out, dim=1))[None]


@pytest.fixture
def with_kernels(monkeypatch):
    """Let stand-ins compute packs as the packages do on a GPU."""
    calls = []
    for name, kernel in (
        ("rule_kernel", chunk_gated_delta_rule),
        ("channel_rule_kernel", chunk_kda),
        ("convolution_kernel", causal_conv1d_fn),
    ):

        def counted(*args, kernel=kernel, **kwargs):
            calls.append(kernel.__name__)
            return kernel(*args, **kwargs)

        monkeypatch.setattr(f"mcore_rl.models.megatron.kernels.delta_rule.{name}", lambda counted=counted: counted)
    return calls


@PER_CHANNEL
def test_kernels_of_other_packages_get_the_right_arguments(with_kernels, per_channel):
    layout = PackLayout.pack(LENGTHS, 1, 8)
    plan = plan_of(layout, WIDTH, torch.device("cpu"))
    inputs = random_inputs(layout.total, per_channel)
    is_token = torch.cat([torch.arange(n) < own for n, own in zip(layout.segment_lengths, LENGTHS, strict=False)])
    expected, _ = delta_rule(*inputs, plan)
    found = packed_rule(*inputs, layout, plan)
    # The rows of padding differ: nobody reads them, and they follow the tokens of their sequence. Decays are in fp32.
    assert_close32(found[is_token], expected[is_token], FORMULA)
    x, weight = torch.randn(layout.total, 3, 5, dtype=torch.float64), torch.randn(3, 5, WIDTH, dtype=torch.float64)
    bias = torch.randn(3, 5, dtype=torch.float64) if per_channel else None
    expected = causal_conv(x, weight, plan.before, bias)
    found = packed_convolution(x, weight, layout, plan, bias)
    torch.testing.assert_close(found[is_token], expected[is_token], rtol=0, atol=1e-12)
    assert with_kernels == ["chunk_kda" if per_channel else "chunk_gated_delta_rule", "causal_conv1d_fn"]


def test_shared_prompts_and_deterministic_runs_use_torch(with_kernels, monkeypatch):
    assert describe_kernels() == "delta rule by fla, its convolution by causal_conv1d"
    layout, inputs = PackLayout.pack(LENGTHS, 1, 8), random_inputs(sum(LENGTHS) + 64)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert describe_kernels() == "delta nets by torch"
    inputs = [x[: layout.total] for x in inputs]
    packed_rule(*inputs, layout, plan_of(layout, WIDTH, torch.device("cpu")))
    assert not with_kernels


# ------------------------------------------------------------------ published directories


VISION = {
    **{"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64},
    **{"num_position_embeddings": 16, "spatial_merge_size": 2, "temporal_patch_size": 2},
}
FLOAT32 = ("linear_attn.A_log", "linear_attn.norm.weight")


def make_published(directory, kind, ties, packs):
    """Write a model as it is on the hub: with a vision part and `mtp`, in bf16 with some fp32 tensors, in shards.

    Args:
        ties: whether embedding and LM head are one tensor; "apart" if the config says so and the files contradict it.
    """
    text = DELTA_NETS if kind == "qwen3_5" else DELTA_NET_EXPERTS
    text = {**SMALL, **text, "tie_word_embeddings": bool(ties)}
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, text_config=text, vision_config=VISION, tie_word_embeddings=bool(ties))
    AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    tensors = {name: t.float() if name.endswith(FLOAT32) else t for name, t in tensors.items()}
    if ties == "apart":
        tensors["lm_head.weight"] = torch.randn(SMALL["vocab_size"], 64).bfloat16() / 10
    tensors |= {"mtp.fc.weight": torch.randn(64, 128).bfloat16(), "mtp.norm.weight": torch.randn(64).bfloat16()}
    if packs:
        tensors = packed(tensors)
    save_in_shards(tensors, directory)
    (directory / "preprocessor_config.json").write_text("{}")
    make_tokenizer().save_pretrained(directory)
    return directory


def packed(tensors):
    """The tensors with the experts of each layer in two tensors."""
    apart = {name: t for name, t in tensors.items() if ".experts." not in name}
    layers = sorted({name.partition(".experts.")[0] for name in tensors if ".experts." in name})
    for layer in layers:
        each = [
            {n: tensors[f"{layer}.experts.{e}.{n}_proj.weight"] for n in ("gate", "up", "down")}
            for e in range(DELTA_NET_EXPERTS["num_experts"])
        ]
        apart[f"{layer}.experts.gate_up_proj"] = torch.stack([torch.cat((one["gate"], one["up"])) for one in each])
        apart[f"{layer}.experts.down_proj"] = torch.stack([one["down"] for one in each])
    return apart


@pytest.mark.parametrize(
    ("kind", "ties", "packs", "layout"),
    and_long(
        [("qwen3_5", False, False, ParallelLayout(tp=2, sp=True))],
        [
            ("qwen3_5", True, False, ParallelLayout(tp=2)),
            ("qwen3_5", "apart", False, ParallelLayout(tp=2)),
            ("qwen3_5_moe", False, True, ParallelLayout(tp=2, sp=True, ep=2, etp=1)),
            ("qwen3_5_moe", True, False, ParallelLayout(tp=2, sp=True)),
        ],
    ),
    ids=str,
)
def test_a_published_directory_is_trained_and_exported(kind, ties, packs, layout, tmp_path):
    path = make_published(tmp_path / "model", kind, ties, packs)
    config = layout.apply(make_config(path))
    logprobs = run_processes(train_and_export, config, tmp_path / "before", tmp_path / "after", world_size=2)[0][0]
    original, before, after = map(tensors_of, (path, tmp_path / "before", tmp_path / "after"))
    original = {name: t for name, t in original.items() if not (ties is True and name == "lm_head.weight")}
    assert set(before) == set(after) == set(original)
    for name, tensor in original.items():
        assert before[name].dtype == tensor.dtype, name
        assert torch.equal(before[name], tensor), name
        if name.startswith(("mtp.", "model.visual.")):
            assert torch.equal(after[name], tensor), name
    assert (tmp_path / "after" / "preprocessor_config.json").exists()
    whole, told = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "after", dtype=torch.float32, output_loading_info=True
    )
    assert not told["missing_keys"] and not told["mismatched_keys"]
    assert type(whole).__name__ in json.loads((tmp_path / "after" / "config.json").read_text())["architectures"]
    text = AutoModelForCausalLM.from_pretrained(tmp_path / "after", dtype=torch.float32)
    with torch.no_grad():
        expected = plain_logprobs(text, make_data())
    assert (logprobs - expected).norm() <= 2e-5 * expected.norm()

"""Tests of generation: transformers' greedy tokens, the trainer's log-probabilities, the same samples under every
layout."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from float32 import FORMULA, assert_close32
from generation_cases import LIMIT, NEW_TOKENS, PARAMS, ROWS, config_of, generate, make_prompts, run, sequences
from generation_cases import model_path as model_path
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import ALIKE, ARCHITECTURES, WITH_DELTA_NETS, and_long, make_tokenizer
from transformers import AutoModelForCausalLM
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from mcore_rl.algorithms.grpo import shaped_rewards
from mcore_rl.config import GRPOConfig
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.errors import WorkerError
from mcore_rl.models.generation.megatron.continuous_batch import coarse_size
from mcore_rl.models.generation.megatron.generation import sampling_params_of
from mcore_rl.models.generation.sampling import (
    SamplingParams,
    _filtered,
    _nucleus_threshold,
    random_states,
    sample,
    uniforms,
)
from mcore_rl.testing.layout_check import ParallelLayout
from mcore_rl.testing.processes import run_processes

QUICK = ("llama", "gpt_oss")


def most_apart(family):
    """Return the largest difference allowed between log-probabilities of sampling and of training."""
    if family in WITH_DELTA_NETS:
        return 1e-4  # they sample token by token, and train chunk by chunk
    return 2e-5 if family == "gemma4_e" else 1e-5


@pytest.mark.parametrize(
    "family", and_long(QUICK, [family for family in ARCHITECTURES if family not in (*QUICK, *ALIKE)], ALIKE)
)
def test_greedy_equals_transformers(family, model_path):
    model = AutoModelForCausalLM.from_pretrained(model_path(family), dtype=torch.float32)
    prompts, expected = make_prompts(), []
    for ids, length in zip(prompts["input_ids"], prompts["input_lengths"].tolist(), strict=True):
        ids = ids[None, :length]
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=1,
            pad_token_id=0,
            # With a cache, transformers leaves out the limit of Mamba-2's step sizes (`time_step_min`).
            use_cache=not family.startswith("nemotron_h"),
        )
        expected.append(out[0].tolist())
    out, difference = run(
        config_of(model_path(family)), ParallelLayout(), SamplingParams(NEW_TOKENS, stop_token_ids=(1,)), True
    )
    assert sequences(out) == expected
    assert difference < most_apart(family)


def test_sizes_of_cuda_graphs_are_few_and_near():
    sizes = [coarse_size(size) for size in range(1, 1025)]
    assert all(size <= coarse < size * 9 / 8 for size, coarse in enumerate(sizes, 1))
    assert sizes[:16] == list(range(1, 17))
    assert len(set(sizes[512:])) == 8


LAYOUTS = and_long(
    [(ParallelLayout(tp=2, sp=True), 64), (ParallelLayout(dp=2), 3)],
    [(ParallelLayout(pp=2), 4), (ParallelLayout(cp=2), 64)],
)
MORE = [
    (ParallelLayout(), 1),
    (ParallelLayout(tp=2, pp=2), 3),
    (ParallelLayout(tp=2, dp=2), 64),
    (ParallelLayout(cp=2, pp=2), 64),
]


def check_layout(layout, slots, family, model_path, one_process):
    out, difference = run(config_of(model_path(family), layout), layout, PARAMS, False, slots)
    assert difference < most_apart(family)
    assert sequences(out) == one_process(family)


@pytest.fixture(scope="module")
def one_process(model_path):
    made = {}

    def get(family):
        if family not in made:
            out, difference = run(config_of(model_path(family)), ParallelLayout(), PARAMS)
            assert difference < most_apart(family)
            made[family] = sequences(out)
        return made[family]

    return get


@pytest.mark.parametrize(("layout", "slots"), LAYOUTS, ids=str)
def test_the_same_samples_under_every_layout(layout, slots, model_path, one_process):
    check_layout(layout, slots, "qwen2", model_path, one_process)


ELSEWHERE = and_long(
    [
        ("deep", ParallelLayout(pp=2, vpp=2, first=2), 64),
    ],
    [
        ("qwen3_moe", ParallelLayout(tp=2, dp=2, ep=4, etp=1, sp=True), 64),
        ("mixtral", ParallelLayout(dp=2, ep=2), 3),
        ("deep", ParallelLayout(pp=3, stages="E|t*6|L"), 64),
        ("glm4_moe", ParallelLayout(cp=2, pp=2, ep=2), 4),
        ("qwen3_next", ParallelLayout(tp=2, ep=2, etp=1, sp=True), 3),
        ("qwen3_next", ParallelLayout(dp=2, ep=2), 4),
        ("qwen3_5", ParallelLayout(tp=2, pp=2, sp=True), 4),
        ("deepseek_v32", ParallelLayout(tp=2, ep=2, etp=1, sp=True), 3),
        ("glm_moe_dsa", ParallelLayout(pp=2, dp=2, ep=2), 4),
        ("nemotron_h_moe", ParallelLayout(tp=2, ep=2, etp=1, sp=True), 3),
    ],
    [
        ("nemotron_h", ParallelLayout(pp=3, stages="Et|t|ttL"), 4),  # one stage has no layer with a cache
        ("nemotron_h_moe", ParallelLayout(cp=2, pp=2, ep=2), 3),
        ("minimax_m3", ParallelLayout(tp=2, pp=2, ep=2, etp=1, sp=True), 3),
        ("mimo_v2_flash", ParallelLayout(tp=2, ep=2, etp=1, sp=True), 4),
        ("hy_v4", ParallelLayout(tp=2, pp=2, ep=2, etp=1, sp=True), 4),
        ("glm5_next", ParallelLayout(tp=2, pp=2, ep=2, etp=1, sp=True), 4),
        ("deepseek_v4", ParallelLayout(tp=2, pp=2, ep=2, etp=1, sp=True), 4),
        ("gemma4", ParallelLayout(tp=4, sp=True), 4),
        ("gemma4_moe", ParallelLayout(tp=2, pp=2, ep=2, etp=1, sp=True), 4),
        ("gemma4_e", ParallelLayout(tp=2, pp=2, first=1, sp=True), 3),
        ("qwen4", ParallelLayout(tp=2, pp=2, ep=2, etp=1, sp=True), 4),
    ],
)


@pytest.mark.parametrize(("family", "layout", "slots"), ELSEWHERE, ids=str)
def test_the_same_samples_wherever_experts_and_layers_are(family, layout, slots, model_path, one_process):
    check_layout(layout, slots, family, model_path, one_process)


def test_a_replica_without_prompts_serves_the_experts_of_others(model_path):
    config = config_of(model_path("mixtral"))
    lone = BatchedDataDict({name: values[:1] for name, values in make_prompts().items()})
    expected, _ = run(config, ParallelLayout(), SamplingParams(5), False, 4, lone)
    layout = ParallelLayout(dp=2, ep=2)
    out, difference = run(layout.apply(config), layout, SamplingParams(5), False, 4, lone)
    assert sequences(out) == sequences(expected)
    assert difference < 1e-5


@pytest.mark.long
@pytest.mark.parametrize(("layout", "slots"), MORE, ids=str)
def test_the_same_samples_under_more_layouts(layout, slots, model_path, one_process):
    check_layout(layout, slots, "llama", model_path, one_process)


def test_ends(model_path):
    """Stop strings end a response behind them; limits of rows' own are kept, and told."""
    config, limits = config_of(model_path("llama")), [1 + row % 5 for row in range(ROWS)]
    free, _ = run(config, ParallelLayout(), SamplingParams(NEW_TOKENS, seed=1))
    tokenizer = make_tokenizer()
    responses = [row[n:] for row, n in zip(sequences(free), make_prompts()["input_lengths"].tolist(), strict=True)]
    stop = tokenizer.decode(responses[0][3:5])
    stopped, _ = run(config, ParallelLayout(), SamplingParams(NEW_TOKENS, seed=1, stop_strings=(stop,)))
    assert stopped["generation_lengths"][0] <= 5
    assert not stopped["truncated"][0]
    assert stop in tokenizer.decode(sequences(stopped)[0])
    limited, _ = run(config, ParallelLayout(), SamplingParams(NEW_TOKENS, seed=1), False, 4, None, limits)
    assert limited["generation_lengths"].tolist() == limits
    assert limited["truncated"].all()
    assert [row[n:] for row, n in zip(sequences(limited), make_prompts()["input_lengths"].tolist(), strict=True)] == [
        response[:limit] for response, limit in zip(responses, limits, strict=True)
    ]


def test_responses_may_fill_the_sequence(model_path):
    """With max_new_tokens=null a response ends by itself or at data.max_sequence_length."""
    config = GRPOConfig.model_validate(
        {
            "model": {"path": str(model_path("llama"))},
            "data": {"train": "d", "max_sequence_length": LIMIT},
            "output_dir": "o",
            "grpo": {"max_new_tokens": None, "overlong_cache_length": 10},
        }
    )
    assert (config.max_prompt_length, config.max_response_length) == (LIMIT - 1, LIMIT - 1)
    params = sampling_params_of(config, make_tokenizer())
    assert params.max_new_tokens == LIMIT - 1
    out, _ = run(config_of(model_path("llama")), ParallelLayout(), replace(params, seed=1))
    assert (out["unpadded_sequence_lengths"][out["truncated"]] == LIMIT).all() and out["truncated"].any()
    lengths = [0, LIMIT - 10, LIMIT - 5, LIMIT - 1, 1, 2, 3, 4]
    outcomes = [SimpleNamespace(reward=1.0, longest_response=length) for length in lengths]
    assert shaped_rewards(config, outcomes).flatten().tolist() == pytest.approx([1, 1, 0.5, 0.1, 1, 1, 1, 1])


@pytest.mark.parametrize(("length", "message"), [(0, "prompt 0 has 0 tokens"), (LIMIT, f"prompt 0 has {LIMIT} tokens")])
def test_prompts_that_do_not_fit(length, message, model_path):
    prompts = BatchedDataDict(input_ids=torch.ones(1, LIMIT, dtype=torch.long), input_lengths=torch.tensor([length]))
    with pytest.raises(WorkerError, match=message):
        run(config_of(model_path("llama")), ParallelLayout(), SamplingParams(5), False, 4, prompts)


@pytest.mark.long
def test_ranks_that_share_a_key_value_head(model_path, one_process):
    check_layout(ParallelLayout(tp=4), 64, "qwen3", model_path, one_process)


def generate_groups(config, slots, repeats, most_apart=1e-5):
    """Groups of equal prompts; sequences, and how many prompts went through the model."""
    from mcore_rl.models.generation.megatron import continuous_batch

    ran = []

    class CountingCache(continuous_batch.SequenceCache):
        def prefill(self, prompts, *places):
            ran.extend(prompts)
            return super().prefill(prompts, *places)

    continuous_batch.SequenceCache = CountingCache
    prompts = BatchedDataDict({name: values.repeat_interleave(repeats, 0) for name, values in make_prompts().items()})
    out, difference = generate(
        config, SamplingParams(NEW_TOKENS, seed=2, stop_token_ids=(1,)), slots=slots, prompts=prompts
    )
    assert difference < most_apart
    return sequences(out), len(ran)


@pytest.mark.parametrize("family", and_long([], ["llama"], ["deepseek_v32"]))
def test_equal_prompts_go_through_the_model_once(family, model_path):
    config, repeats = config_of(model_path(family)), 4
    (alone, ran_alone), (shared, ran), (refilled, ran_refilled) = (
        run_processes(generate_groups, config, slots, repeats, world_size=1)[0] for slots in (1, 64, 5)
    )
    assert shared == refilled == alone
    assert len(set(map(tuple, shared))) > 2 * ROWS, "the samples of a group differ"
    assert (ran_alone, ran) == (ROWS * repeats, ROWS)
    assert ran_refilled < ROWS * repeats / 2


@pytest.mark.long
def test_only_sequences_that_begin_together_share_a_prompt_with_a_state(model_path):
    config, repeats = config_of(model_path("qwen3_5")), 4
    (alone, _), (shared, ran), (refilled, ran_refilled) = (
        run_processes(generate_groups, config, slots, repeats, 1e-4, world_size=1)[0] for slots in (1, 64, 5)
    )
    assert shared == refilled == alone
    assert ran == ROWS < ran_refilled < ROWS * repeats


# ------------------------------------------------------------------ sampling


WARPERS = {
    "top_k": (dict(top_k=7), [TopKLogitsWarper(7)]),
    "top_p": (dict(top_p=0.6), [TopPLogitsWarper(0.6)]),
    "tiny top_p": (dict(top_p=1e-6), [TopPLogitsWarper(1e-6)]),
    "min_p": (dict(min_p=0.1), [MinPLogitsWarper(0.1)]),
    "all": (
        dict(top_k=20, top_p=0.8, min_p=0.05),
        [TopKLogitsWarper(20), TopPLogitsWarper(0.8), MinPLogitsWarper(0.05)],
    ),
}


@pytest.mark.parametrize(("options", "warpers"), WARPERS.values(), ids=WARPERS)
def test_filters_keep_what_transformers_keeps(options, warpers):
    logits = torch.randn(50, 100, generator=torch.Generator().manual_seed(0)) * 2
    theirs = logits
    for warper in warpers:
        theirs = warper(None, theirs)
    ours = _filtered(logits.log_softmax(-1), SamplingParams(1, **options), None)
    assert torch.equal(ours > -torch.inf, theirs > -torch.inf)


def test_samples_follow_the_distribution():
    probabilities = torch.tensor([0.5, 0.0, 0.2, 0.05, 0.25])
    draws = 200_000
    u = uniforms(random_states(3, torch.arange(draws)), torch.full((draws,), 7))
    draw = sample(probabilities.log().expand(draws, -1), u, SamplingParams(1), None)
    tokens, logprobs = draw.tokens, draw.logprobs
    counts = torch.bincount(tokens, minlength=5) / draws
    torch.testing.assert_close(counts, probabilities, atol=4e-3, rtol=0)
    torch.testing.assert_close(logprobs, probabilities.log()[tokens])
    assert counts[1] == 0


@settings(deadline=None)
@given(st.integers(0, 2**40), st.lists(st.integers(0, 2**31), min_size=2, max_size=20, unique=True))
def test_uniform_numbers_depend_on_seed_sample_and_position(seed, samples):
    ids, position = torch.tensor(samples), torch.tensor(4)
    u = uniforms(random_states(seed, ids), position)
    assert ((u >= 0) & (u < 1)).all()
    assert len(set(u.tolist())) == len(samples)
    assert uniforms(random_states(seed, ids[:1]), position) == u[0]
    assert uniforms(random_states(seed, ids[:1]), position + 1) != u[0]
    assert uniforms(random_states(seed + 1, ids[:1]), position) != u[0]


def hashed(*numbers):
    """SplitMix64, a number after the other, in Python's integers: the algorithm as published."""
    state = numbers[0] % 2**64
    for number in numbers[1:]:
        state = (state + (number + 1) * 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return (state >> 11) * 2.0**-53


@settings(deadline=None)
@given(st.integers(-(2**40), 2**64), st.lists(st.integers(0, 2**62), min_size=1, max_size=20), st.integers(0, 2**31))
def test_uniform_numbers_bit_for_bit(seed, samples, position):
    u = uniforms(random_states(seed, torch.tensor(samples)), torch.full((len(samples),), position))
    assert u.tolist() == [hashed(seed, sample, position) for sample in samples]


def bisected(logprobs, top_p):
    """The nucleus' threshold by halving the range of float32's bits, with a sum over the vocabulary each time."""
    bits = logprobs.numpy().view("int32").astype("int64")
    keys = np.where(bits >= 0, bits, -(2**31) - bits)
    masses = np.exp(logprobs.numpy().astype("float64"))
    thresholds = []
    for row, mass in zip(keys, masses, strict=True):
        low, high = -(2**31), 2**31 - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if mass[row >= middle].sum() >= top_p * mass.sum() else (low, middle - 1)
        thresholds.append(low if low >= 0 else -(2**31) - low)
    return torch.from_numpy(np.array(thresholds, dtype="int32").view("float32"))


def nucleus_cases():
    generator = torch.Generator().manual_seed(0)
    for scale in (0.01, 1.0, 30.0):
        logits = torch.randn(8, 120, generator=generator) * scale
        logits[2:, 111:] = -torch.inf
        logits[4:] = logits[4:].round()  # equally likely ones
        yield logits.log_softmax(-1)


def thresholds(top_p):
    from mcore_rl.models.generation.sampling import _nucleus_threshold

    group = torch.distributed.group.WORLD
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return [_nucleus_threshold(x.chunk(size, 1)[rank].contiguous(), top_p, group) for x in nucleus_cases()]


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 1 - 1e-9])
def test_the_threshold_of_a_nucleus_bit_for_bit(top_p):
    expected = [bisected(x, top_p) for x in nucleus_cases()]
    assert all(map(torch.equal, (_nucleus_threshold(x, top_p, None) for x in nucleus_cases()), expected))
    if top_p == 0.9:
        for of_rank in run_processes(thresholds, top_p, world_size=2):
            assert all(map(torch.equal, of_rank, expected))


def sample_shards(logits, u, params):
    group = torch.distributed.group.WORLD
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return sample(logits.chunk(size, dim=1)[rank].contiguous(), u, params, group, 4)


@pytest.mark.parametrize(
    "params",
    and_long([SamplingParams(1, 0.7, 20, 0.8, 0.05)], [SamplingParams(1, 0.0), SamplingParams(1)]),
)
def test_vocabulary_shards_give_the_same(params):
    logits = torch.randn(64, 120, generator=torch.Generator().manual_seed(1)) * 3
    logits[:, 111:] = -torch.inf  # the vocabulary's padding
    u = uniforms(random_states(0, torch.arange(64)), torch.tensor(1))
    whole = sample(logits, u, params, None, 4)
    assert whole.tokens.max() < 111 and whole.likeliest.shape == (64, 4, 2)
    for size in (2, 4):
        for ours in run_processes(sample_shards, logits, u, params, world_size=size):
            assert torch.equal(ours.tokens, whole.tokens)
            torch.testing.assert_close(ours.logprobs, whole.logprobs)
            assert_close32(ours.likeliest, whole.likeliest, FORMULA)

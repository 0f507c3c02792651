"""Tests of the sampling mask: trainer and sampler have the same distribution over the tokens that sampling keeps."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from float32 import FORMULA, FORWARD, approx32, approx32_after_updates
from layout_cases import make_config
from programs import comparable, run
from pydantic import ValidationError
from small_models import and_long, make_model, make_tokenizer
from small_models import make_config as small_config
from transformers import AutoModelForCausalLM

from mcore_rl.algorithms.loss_functions import ClippedPGLossFn
from mcore_rl.config.rl import RolloutOptions
from mcore_rl.distributed.logprobs import linear_logprobs, valid_columns
from mcore_rl.distributed.sampling_mask import KeptTokens, kept_tiles
from mcore_rl.errors import UserError
from mcore_rl.losses.policy_options import ClippedPGOptions
from mcore_rl.models.generation.sampling import SamplingParams, random_states, sample, uniforms
from mcore_rl.models.generation.vllm.answers import decode_sampling_mask
from mcore_rl.testing.layout_check import ParallelLayout
from mcore_rl.testing.processes import run_processes

TEMPERATURE = 0.7
VOCABULARY, PADDED = 101, 104


def lists_of_kept_tokens():
    """Sets of 1 token, of a few, of the whole vocabulary; none in order."""
    generator = torch.Generator().manual_seed(3)
    sizes = [1, VOCABULARY, *torch.randint(1, 12, (35,), generator=generator).tolist()]
    return [torch.randperm(VOCABULARY, generator=generator)[:size].tolist() for size in sizes]


def head_and_gradients(dtype, size, shape, kept, group=None, rank=0):
    """Return logprobs, entropies and the gradients of a random function of both, of hidden states and of the shard."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(len(kept), 16, generator=generator).to(dtype).requires_grad_()
    whole = torch.randn(PADDED, 16, generator=generator).to(dtype)
    factors = torch.randn(2, len(kept), generator=generator).to(dtype)
    weight = whole.chunk(size)[rank].clone().requires_grad_()
    targets = torch.tensor([tokens[0] for tokens in kept])
    if shape is None:
        logits = (hidden @ weight.T)[:, :VOCABULARY] / TEMPERATURE
        mask = torch.full_like(logits, -torch.inf)
        for row, tokens in enumerate(kept):
            mask[row, tokens] = 0
        logp = (logits + mask).log_softmax(1)
        logprobs, entropy = logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp.clamp(min=-1e4)).sum(1)
    else:
        columns = valid_columns(len(weight), rank, VOCABULARY)
        tiles = list(kept_tiles(KeptTokens.of(kept), targets, rank * len(weight), columns, shape))
        logprobs, entropy = linear_logprobs(hidden, weight, targets, group, VOCABULARY, TEMPERATURE, True, kept=tiles)
    (torch.stack((logprobs, entropy)) * factors).sum().backward()
    return [tensor.detach() for tensor in (logprobs, entropy, hidden.grad, weight.grad)]


def shard_of_head(dtype, shape, kept):
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return head_and_gradients(dtype, size, shape, kept, torch.distributed.group.WORLD, rank)


@pytest.mark.parametrize("shape", [(8, 10), (512, 4096)], ids=str)
def test_logprobs_over_kept_tokens_equal_a_masked_softmax(shape):
    kept = lists_of_kept_tokens()
    expected = head_and_gradients(torch.float64, 1, None, kept)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        for ours, theirs in zip(head_and_gradients(dtype, 1, shape, kept), expected, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)
    of_ranks = run_processes(shard_of_head, torch.float64, shape, kept, world_size=2)
    for rank, ours in enumerate(of_ranks):
        torch.testing.assert_close(ours[0], expected[0])
        torch.testing.assert_close(ours[1], expected[1])
        torch.testing.assert_close(ours[3], expected[3].chunk(2)[rank])
    torch.testing.assert_close(of_ranks[0][2] + of_ranks[1][2], expected[2])


def test_kept_tokens_of_positions_rows_and_sequences():
    kept = KeptTokens.of([[7], [], [3, 1, 2], [9, 8]])
    assert kept.at(torch.tensor([2, 0, 1])).ids.tolist() == [3, 1, 2, 7]
    first, second = kept.split([1, 3])
    assert (first + second).ids.tolist() == kept.ids.tolist() and second.counts.tolist() == [0, 3, 2]
    assert kept.padded(6).counts.tolist() == [1, 0, 3, 2, 0, 0]
    table = torch.tensor([[4, -1, 6], [-1, -1, -1]])
    assert KeptTokens.of_table(table).ids.tolist() == [4, 6]
    assert KeptTokens.of_table(table).counts.tolist() == [2, 0]


# ------------------------------------------------------------------ the sampler

FILTERS = [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.2}, {"top_k": 12, "top_p": 0.8, "min_p": 0.05}, {"top_k": 500}]


def sampled(logits, params):
    group = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
    rank, size = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if group else (0, 1)
    u = uniforms(random_states(0, torch.arange(len(logits))), torch.tensor(1))
    draw = sample(logits.chunk(size, dim=1)[rank].contiguous(), u, params, group)
    return draw.tokens, draw.logprobs, draw.kept


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_the_sampler_returns_the_tokens_of_its_distribution(filters):
    logits = torch.randn(64, 120, generator=torch.Generator().manual_seed(1)) * 3
    logits[0] = 1.0  # all equally likely
    logits[:, 111:] = -torch.inf  # the vocabulary's padding
    params = SamplingParams(1, TEMPERATURE, **filters, max_kept_tokens=8)
    tokens, logprobs, kept = sampled(logits, params)
    unbounded, *_ = sampled(logits, replace(params, max_kept_tokens=None))
    for row in range(len(logits)):
        ids = kept[row][kept[row] >= 0].long()
        assert tokens[row] in ids and len(ids) <= 8 and len(ids.unique()) == len(ids)
        expected = (logits[row, ids] / TEMPERATURE).log_softmax(0)[ids == tokens[row]]
        torch.testing.assert_close(logprobs[row, None], expected)
        left_out = torch.ones(120, dtype=torch.bool).index_fill(0, ids, False)
        assert logits[row, ids].min() >= logits[row, left_out].max() or len(ids) < 8
    assert (tokens == unbounded).float().mean() > 0.4  # the bound leaves out only unlikely tokens
    for ours in run_processes(sampled, logits, params, world_size=2):
        assert torch.equal(ours[0], tokens)
        assert [set(row.tolist()) for row in ours[2]] == [set(row.tolist()) for row in kept]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_sampling_mask": True}, "needs top_k, top_p or min_p; without them all tokens are kept"),
        ({"max_kept_tokens": 5}, "has an effect only if the sampling mask is kept"),
        ({"top_k": 3, "keep_sampling_mask": False, "max_kept_tokens": 5}, "has an effect only if"),
    ],
    ids=str,
)
def test_options_without_a_mask_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        RolloutOptions.model_validate(options)


def test_vllm_s_sampling_mask_is_checked():
    def decode(counts, ids, tokens):
        arrays = (None if values is None else np.array(values, np.int32) for values in (counts, ids, tokens))
        return decode_sampling_mask(*arrays)

    kept = decode([2, 1], [1, 5, 2], [5, 2])
    assert kept.counts.tolist() == [2, 1] and kept.ids.tolist() == [1, 5, 2]
    for counts, ids, tokens, message in (
        (None, None, [5], "no sampling_mask"),
        ([1], None, [5], "no sampling_mask"),
        ([1], [1], [1, 2], "of 1 positions, but 2 tokens"),
        ([1, 1], [1, 3], [1, 2], "without the sampled token 2 at position 1"),
        ([0, 2], [1, 2], [1, 2], "without the sampled token 1 at position 0"),
        ([2, 1], [1, 2], [1, 2], "of 2 tokens, but with counts that sum to 3"),
        ([3, -1], [1, 2], [1, 2], "of 2 tokens, but with counts"),
    ):
        with pytest.raises(ValueError, match=message):
            decode(counts, ids, tokens)


# ------------------------------------------------------------------ generation and training


FILTERED = SamplingParams(12, TEMPERATURE, top_k=20, top_p=0.8, seed=3, max_kept_tokens=16)


def sample_score_and_train(config, params=FILTERED, num_ids=None, steps=2):
    """Sample, score the samples, train on them; return everything that is compared.

    Args:
        num_ids: number of ids that have a probability; None for all.
    """
    from mcore_rl.distributed.batched_data_dict import BatchedDataDict
    from mcore_rl.models.generation.interfaces import prompts_to_answer
    from mcore_rl.models.generation.megatron.generation import MegatronGeneration
    from mcore_rl.models.megatron.weights.conversion import export_hf_weights
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=10, keep_reference=True)
    if num_ids is not None:
        policy.model.family.num_ids = num_ids
    generation = MegatronGeneration(policy.model, params, 40, SimpleNamespace(pad_token_id=0), max_batch_size=3)
    prompts = [[5 + n] * (1 + n % 4) for n in range(8)]
    out = generation.generate(prompts_to_answer(prompts, range(8)))
    lengths = out["unpadded_sequence_lengths"]
    positions = torch.arange(out["output_ids"].shape[1])
    mask = (positions >= torch.tensor([len(p) for p in prompts])[:, None]) & (positions < lengths[:, None])
    data = BatchedDataDict(
        input_ids=out["output_ids"], input_lengths=lengths, token_mask=mask.float(), sample_mask=torch.ones(8),
        generation_logprobs=out["logprobs"],
        advantages=torch.linspace(-1, 1, 8)[:, None].expand(mask.shape).contiguous(),
    )  # fmt: skip
    if params.keeps_mask:
        kept_tokens = zip(prompts, out["kept_tokens"], strict=True)
        data["kept_tokens"] = [KeptTokens.none(len(p)) + kept for p, kept in kept_tokens]
    data["prev_logprobs"] = policy.get_logprobs(data, temperature=TEMPERATURE)["logprobs"]
    scored = policy.get_reference_policy_logprobs(data, temperature=TEMPERATURE)
    data["reference_policy_logprobs"] = scored["reference_logprobs"]
    loss_fn = ClippedPGLossFn(ClippedPGOptions(reference_policy_kl_penalty=0.05, entropy_bonus=0.01))
    metrics = [policy.train(data, loss_fn, temperature=TEMPERATURE) for _ in range(steps)]
    weights = dict(export_hf_weights(policy.model))
    policy.shutdown()
    return data, metrics, weights


def plain_training(config, data, steps=2):
    """The same with transformers: logits of tokens that were not kept are −inf."""
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.optimizer.lr, eps=config.optimizer.adam_eps, weight_decay=0
    )
    mask = data["token_mask"][:, 1:].double()

    def masked_logprobs():
        rows, entropies = [], []
        for ids, length, kept in zip(data["input_ids"], data["input_lengths"], data["kept_tokens"], strict=True):
            logits = model(ids[None, :length]).logits[0, :-1].double() / TEMPERATURE
            allowed = torch.full_like(logits, -torch.inf)
            for position, tokens in enumerate(kept.ids.long().split(kept.counts[1:length].tolist())):
                allowed[position, tokens if len(tokens) else slice(None)] = 0
            logp = (logits + allowed).log_softmax(-1)
            pad = (0, data["input_ids"].shape[1] - int(length))
            rows.append(F.pad(logp.gather(1, ids[1:length, None])[:, 0], pad))
            entropies.append(F.pad(-(logp.exp() * logp.clamp(min=-1e4)).sum(1), pad))
        return torch.stack(rows) * mask, torch.stack(entropies) * mask

    with torch.no_grad():
        first, _ = masked_logprobs()
    metrics = []
    for _ in range(steps):
        optimizer.zero_grad()
        current, entropy = masked_logprobs()
        ratio = (current - first).exp()
        advantages = data["advantages"][:, 1:]
        actor = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        kl = (first - current).exp() - 1 - (first - current)
        loss = ((actor + 0.05 * kl - 0.01 * entropy) * mask).sum() / mask.sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_grad)
        metrics.append({"loss": loss.item(), "grad_norm": norm.item()})
        optimizer.step()
    return first, metrics, {name: p.detach() for name, p in model.named_parameters()}


LAYOUTS = and_long(
    [ParallelLayout(), ParallelLayout(tp=2, cp=2, sp=True), ParallelLayout(pp=2, dp=2)],
    [ParallelLayout(packing=False), ParallelLayout(tp=4), ParallelLayout(cp=2, pp=2)],
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_sampling_and_training_have_the_same_distribution(layout, model_of):
    config = layout.apply(make_config(model_of("llama")))
    data, metrics, weights = run_processes(sample_score_and_train, config, world_size=layout.world_size)[0]
    counts = torch.cat([kept.counts for kept in data["kept_tokens"]])
    assert counts.max() > 1  # there is a distribution
    check_with_transformers(config, data, metrics, weights)


def check_with_transformers(config, data, metrics, weights):
    scored = data["prev_logprobs"] * data["token_mask"]
    torch.testing.assert_close(scored, data["generation_logprobs"], rtol=0, atol=1e-5)
    first, expected, trained = plain_training(config, data)
    torch.testing.assert_close(scored[:, 1:].double(), first, rtol=0, atol=1e-5)
    assert metrics[0]["probs_ratio"] == pytest.approx(1, abs=1e-5)
    assert metrics[0]["kl_penalty"] == approx32(0, FORMULA)
    for ours, theirs in zip(metrics, expected, strict=True):
        for name, value in theirs.items():
            assert ours[name] == approx32(value, FORWARD), name
    for name, tensor in trained.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


IDS = 84  # under TP2 the second rank has no column, under TP4 the second has a few
UNFILTERED = SamplingParams(12, TEMPERATURE, seed=3)
ID_LAYOUTS = and_long(
    [(ParallelLayout(tp=2, cp=2, sp=True), UNFILTERED)],
    [
        (ParallelLayout(), UNFILTERED),
        (ParallelLayout(pp=2), UNFILTERED),
        (ParallelLayout(tp=4), FILTERED),
        (ParallelLayout(tp=2, packing=False), FILTERED),
    ],
)


@pytest.mark.parametrize(("layout", "params"), ID_LAYOUTS, ids=str)
def test_ids_without_a_token_are_neither_sampled_nor_counted(layout, params, model_of):
    config = layout.apply(make_config(model_of("llama")))
    arguments = config, params, IDS
    data, metrics, weights = run_processes(sample_score_and_train, *arguments, world_size=layout.world_size)[0]
    assert data["input_ids"].max() < IDS
    if not params.keeps_mask:
        lists = [[range(IDS) if sampled else () for sampled in row] for row in data["token_mask"].tolist()]
        data["kept_tokens"] = [KeptTokens.of(of_row) for of_row in lists]
    assert max(int(kept.ids.max()) for kept in data["kept_tokens"]) < IDS
    check_with_transformers(config, data, metrics, weights)


# ------------------------------------------------------------------ the script


@pytest.mark.long
def test_a_run_keeps_the_mask_records_it_and_replays_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    make_model("llama", tmp_path / "model", initializer_range=0.05)
    prompts = [{"prompt": f"say {letter}", "answer": letter} for letter in "abcdefgh"]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    (tmp_path / "vowels.py").write_text(
        "from mcore_rl.environments.interfaces import Step\n"
        "def count(log, record):\n"
        "    reward = sum(c in 'aeiou' for c in log[-1]['content']) / 4\n"
        "    return Step(reward, done=len(log) >= 4, observation=None if len(log) >= 4 else ' more ')\n"
    )
    config = {
        "output_dir": "set below",
        "model": {"path": str(tmp_path / "model")},
        "data": {"train": str(tmp_path / "prompts.jsonl"), "max_sequence_length": 40},
        "optimizer": {"lr": 3e-3, "schedule": "constant"},
        "trainer": {"max_steps": 2},
        "checkpoint": {"export_hf": False},
        "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 4, "max_new_tokens": 8, "top_k": 40,
                 "top_p": 0.9, "num_updates_per_rollout": 2},
        "loss": {"reference_policy_kl_penalty": 0.01},
        "environment": {"name": "function", "function": "vowels:count", "num_workers": 1, "max_turns": 2},
    }  # fmt: skip
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(config))

    def train(name, *arguments, **options):
        run("train_grpo.py", tmp_path / "grpo.yaml", f"output_dir={tmp_path / name}", *arguments, **options)
        return comparable(tmp_path / name)

    recording = tmp_path / "recording.jsonl"
    whole = train("whole", "--record", recording)
    assert whole[0]["token_mult_prob_error"] == pytest.approx(1, abs=1e-5)
    assert whole[0]["kept_tokens_mean"] > 1
    rollout = json.loads(recording.read_text().splitlines()[0])["rollouts"][0]
    assert max(rollout["input_ids"]) < len(make_tokenizer()) < 250
    counts = rollout["kept_tokens"]["counts"]
    assert [count > 0 for count in counts] == rollout["token_mask"][: len(counts)]
    shutil.rmtree(tmp_path / "whole" / "checkpoints")  # as if killed before the first one
    assert train("whole", "--record", recording) == whole
    layouts = {
        "two": ("parallel.tensor_model_parallel_size=2", 2),
        "four": ("parallel.pipeline_model_parallel_size=2", 4),
    }
    for name, (argument, processes) in layouts.items():
        other = train(name, argument, processes=processes)
        for ours, theirs in zip(other, whole, strict=True):
            for key in theirs:
                assert ours[key] == pytest.approx(theirs[key], rel=2e-3, abs=2e-4), key
    replayed = train("replayed", "--replay", recording)
    for ours, theirs in zip(replayed, whole, strict=True):
        for name in ("reward_mean", "loss", "kl_penalty", "grad_norm", "kept_tokens_mean"):
            assert ours[name] == approx32_after_updates(theirs[name]), name
    unmasked = run(
        "train_grpo.py", tmp_path / "grpo.yaml", f"output_dir={tmp_path / 'no'}", "--replay", recording,
        "grpo.keep_sampling_mask=false", check=False,
    )  # fmt: skip
    assert unmasked.returncode == 2
    assert "was recorded with the sampling mask of each token; set grpo.keep_sampling_mask=true" in unmasked.stderr_text


@pytest.mark.parametrize(
    ("vocab_size", "backend", "last_id", "told"),
    [
        (250, "megatron", None, None),
        (84 + 1024, "vllm", None, None),
        (
            84 + 1025,
            "vllm",
            None,
            "the model has 1025 ids without a token, but vLLM excludes at most 1024; set it true",
        ),
        (84 + 1025, "vllm", 83, None),  # nothing is sampled in a replay
        (84 + 1025, "megatron", None, None),
        (250, "megatron", 84, "the recording has the id 84, but the tokenizer's last is 83; set it true"),
    ],
)
def test_ids_without_a_token_that_cannot_be_excluded_are_refused(vocab_size, backend, last_id, told):
    from mcore_rl.algorithms.grpo import _check_unused_ids

    tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 83, "c": 5})
    inputs = SimpleNamespace(tokenizer=tokenizer, hf_config=small_config("llama", vocab_size=vocab_size))
    config = SimpleNamespace(algorithm="ppo", generation=SimpleNamespace(backend=backend))
    rows = [[]] if last_id is None else [[], [last_id]]
    rollouts = [SimpleNamespace(input_ids=np.array(row, np.int32)) for row in rows]
    recorded = None if last_id is None else {1: rollouts}
    if told is None:
        _check_unused_ids(config, inputs, recorded)
        return
    with pytest.raises(UserError, match=f"ppo.sample_unused_ids: {told}"):
        _check_unused_ids(config, inputs, recorded)

"""Prompts, configurations and helpers for tests of generation by Megatron."""

import pytest
import torch
import torch.nn.functional as F
from layout_cases import make_config
from small_models import make_tokenizer, models_below
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.models.generation.sampling import SamplingParams
from mcore_rl.testing.layout_check import ParallelLayout
from mcore_rl.testing.processes import run_processes

ROWS, NEW_TOKENS, LIMIT = 13, 30, 100
BLOCK = 4


def use_small_blocks():
    """In this process, let blocks of the cache have few tokens, and allocate few of them at once."""
    from mcore_rl.models.generation.megatron import continuous_batch, decoder, layer_caches

    for module in (layer_caches, decoder, continuous_batch):
        assert module.BLOCK_SIZE
        module.BLOCK_SIZE = BLOCK
    assert continuous_batch.LOOK_AHEAD
    continuous_batch.LOOK_AHEAD = BLOCK // 2


def make_prompts():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 40, (ROWS,), generator=generator)
    return BatchedDataDict(input_ids=torch.randint(6, 80, (ROWS, 40), generator=generator), input_lengths=lengths)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """Return a function from a family's name to a model; its logits have an ordinary size, so that 1e-5 is
    meaningful."""
    return models_below(tmp_path_factory.mktemp, initializer_range=0.1)


def config_of(path, layout=ParallelLayout()):  # noqa: B008 (frozen)
    config = make_config(path)
    data = config.data.model_copy(update={"max_sequence_length": LIMIT})
    return layout.apply(config.model_copy(update={"data": data}))


def generate(config, params, greedy=False, slots=64, prompts=None, limits=None):
    """Return the output, and the largest difference from the trainer's log-probabilities."""
    from mcore_rl.models.generation.megatron.generation import MegatronGeneration
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy, prompts = MegatronPolicy(config), prompts or make_prompts()
    generation = MegatronGeneration(policy.model, params, LIMIT, make_tokenizer(), slots, prefill_tokens=100)
    out = generation.generate(prompts, greedy, limits)
    ids, lengths = out["output_ids"], out["unpadded_sequence_lengths"]
    data = BatchedDataDict(input_ids=ids, input_lengths=lengths, sample_mask=torch.ones(len(ids)))
    logprobs = drawn_logprobs(policy, data, params, greedy)
    column = torch.arange(ids.shape[1])[None]
    response = (column >= prompts["input_lengths"][:, None]) & (column < lengths[:, None])
    assert torch.equal(out["logprobs"] != 0, response & (out["logprobs"] != 0))
    difference = float(((logprobs - out["logprobs"]) * response).abs().max())
    policy.shutdown()
    return out.data, difference


def drawn_logprobs(policy, data, params, greedy):
    """Return the trainer's log-probabilities [B, S], in the distribution that transformers samples from."""
    if greedy or not params.filters:
        return policy.get_logprobs(data, temperature=1.0 if greedy else params.temperature)["logprobs"]
    best = policy.get_topk_logits(data, policy.model.vocab_size)
    logits = torch.empty_like(best["topk_logits"]).scatter_(2, best["topk_indices"], best["topk_logits"])
    rows = logits[:, :-1].flatten(0, 1) / params.temperature
    filters = [(TopKLogitsWarper, params.top_k), (TopPLogitsWarper, params.top_p), (MinPLogitsWarper, params.min_p)]
    for warper, value in filters:
        if value:
            rows = warper(value)(None, rows)
    chosen = rows.log_softmax(-1).gather(1, data["input_ids"][:, 1:].flatten()[:, None])
    return F.pad(chosen.view(len(logits), -1), (1, 0)).nan_to_num(neginf=0.0)  # the prompts' tokens may be anything


def run(config, layout, *args, **kwargs):
    return run_processes(generate, config, *args, world_size=layout.world_size)[0]


def sequences(out):
    return [row[:n].tolist() for row, n in zip(out["output_ids"], out["unpadded_sequence_lengths"], strict=True)]


PARAMS = SamplingParams(NEW_TOKENS, temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, stop_token_ids=(1,), seed=5)

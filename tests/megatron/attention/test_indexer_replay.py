"""Tests of the replay of keys that were chosen during sampling."""

import copy

import pytest
import torch
from layout_cases import change_each_row, make_config, make_data, plain_outcome
from small_models import and_long, make_model, make_tokenizer

from mcore_rl.config import GRPOConfig
from mcore_rl.config.load import build_config
from mcore_rl.errors import UserError
from mcore_rl.models.megatron.families import family_of
from mcore_rl.models.megatron.model.hf_config import load_hf_config
from mcore_rl.testing.layout_check import ParallelLayout, compare, compute_layout_result, table_row
from mcore_rl.testing.processes import run_processes

TOPK = 21


def with_keys(data, layers):
    """Return the batch with random earlier keys for most tokens of rows of more than `TOPK` tokens; at least one."""
    generator = torch.Generator().manual_seed(8)
    keys = torch.full((*data["input_ids"].shape, layers, TOPK), -1, dtype=torch.int32)
    for row, length in enumerate(data["input_lengths"].tolist()):
        for token in range(length if length > TOPK else 0):
            for layer in range(layers):
                count = int(torch.randint(0, min(token + 1, TOPK) + 1, (), generator=generator))
                keys[row, token, layer, :count] = torch.randperm(token + 1, generator=generator)[:count].int()
    data["chosen_keys"] = keys
    return data


def force_keys(data):
    """Return a function that makes transformers' indexers choose the keys of `data`, rows in their order."""

    def prepare(model):
        def change(layer, row, own):
            wanted = data["chosen_keys"][row, : own.shape[1], layer, : own.shape[2]]
            wanted = torch.where(wanted < 0, wanted[:, :1], wanted)  # a key that is chosen twice counts once
            return torch.where(wanted < 0, own[0], wanted)[None]

        indexers = [module for name, module in model.named_modules() if name.endswith(".indexer")]
        change_each_row(indexers, len(data["input_ids"]), change)

    return prepare


REPLAYS = and_long(
    [("glm_moe_dsa", ParallelLayout(tp=2, cp=2, ep=2, etp=1, sp=True, tokens_per_pack=128), True)],
    [("deepseek_v32", ParallelLayout(pp=2, vpp=2, tokens_per_pack=128), False)],
    [("deepseek_v32", ParallelLayout(dp=2, cp=2, packing=False), False)],
)


@pytest.mark.long
@pytest.mark.parametrize(("family", "layout", "recompute"), REPLAYS, ids=str)
def test_replayed_keys(family, layout, recompute, model_of):
    """Log-probabilities, every gradient and three steps with keys that no indexer has chosen."""
    config = make_config(model_of(family))
    hf = load_hf_config(config.model.path)
    data = with_keys(make_data(), len(family_of(hf).layers_with_indexer))
    plain = plain_outcome(config, data, force_keys(data))
    model = config.model.model_copy(update={"recompute_activations": recompute})
    config = layout.apply(config.model_copy(update={"model": model}))
    outcome = run_processes(compute_layout_result, config, copy.deepcopy(data), 3, world_size=layout.world_size)[0]
    difference = compare(outcome, plain)
    assert difference.within(), table_row(layout, difference)


def sample_and_score(config):
    """Return how many tokens were sampled whose keys are recorded, and for how many of them a layer chooses others when
    they are scored; and the mean differences of log-probabilities without and with replay."""
    from mcore_rl.distributed.batched_data_dict import BatchedDataDict
    from mcore_rl.models.generation.megatron.generation import MegatronGeneration
    from mcore_rl.models.generation.sampling import SamplingParams
    from mcore_rl.models.megatron.layers.packs import PackParams
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config)
    lengths = torch.tensor([20, 1, 26, 12] * 4)
    prompts = torch.randint(6, 250, (16, 26), generator=torch.Generator().manual_seed(0))
    params, names = SamplingParams(30, seed=1), ["chosen_keys"]
    generation = MegatronGeneration(policy.model, params, 60, make_tokenizer(), 5, prefill_tokens=60, recorded=names)
    out = generation.generate(BatchedDataDict(input_ids=prompts, input_lengths=lengths))
    seen = {"choices": 0, "other": 0}
    replayed = PackParams.replayed

    def watched(pack, layer, chosen):
        again = replayed(pack, layer, chosen)
        if chosen is not None and layer in pack.recorded:
            known = (pack.recorded[layer] >= 0).any(1)
            other = (chosen.flatten(1).sort(-1).values != again.flatten(1).sort(-1).values).any(1)
            seen["choices"], seen["other"] = seen["choices"] + int(known.sum()), seen["other"] + int(other.sum())
        return again

    data = BatchedDataDict(
        input_ids=out["output_ids"], input_lengths=out["unpadded_sequence_lengths"], sample_mask=torch.ones(16)
    )
    anew = policy.get_logprobs(data)["logprobs"]
    PackParams.replayed = watched
    data["chosen_keys"] = out["chosen_keys"]
    again = policy.get_logprobs(data)["logprobs"]
    response = out["logprobs"] != 0
    gaps = [float((x - out["logprobs"])[response].abs().mean()) for x in (anew, again)]
    policy.shutdown()
    return seen, gaps


WIDE = ParallelLayout(tp=2, pp=2, ep=2, etp=1, sp=True)


@pytest.mark.parametrize(
    ("family", "dtype", "layout"),
    and_long(
        [],
        [
            ("deepseek_v32", "bfloat16", ParallelLayout()),
            ("minimax_m3", "float32", ParallelLayout(tp=2, ep=2, etp=1, sp=True)),
        ],
        [
            ("deepseek_v4", "float32", WIDE),
            ("glm5_next", "float32", ParallelLayout(tp=2, ep=2, etp=1)),
            ("qwen4", "float32", WIDE),
            ("hy_v4", "bfloat16", WIDE),
        ],
    ),
    ids=str,
)
def test_sampled_keys_replayed(family, dtype, layout, tmp_path):
    """In fp32 they are the same anyway, wherever they were recorded; in bfloat16 replay brings the samplers closer."""
    path = make_model(family, tmp_path, initializer_range=0.1)
    config = make_config(path)
    config = layout.apply(config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})}))
    results = run_processes(sample_and_score, config, world_size=layout.world_size)
    choices, other = (sum(result[0][name] for result in results) for name in ("choices", "other"))
    anew, again = results[0][1]
    print(family, dtype, choices, other, f"mean |difference of log-probabilities| {anew:.2e}, replayed {again:.2e}")
    assert choices >= 16 * 30
    if dtype == "float32":
        assert other <= choices / 500 and max(anew, again) < 1e-5
    else:
        assert other > choices / 100 and again < anew


def test_keys_of_vllm_are_not_returned():
    values = {
        "output_dir": "out",
        "model": {"path": "model", "indexer_replay": True},
        "data": {"train": "data.jsonl"},
        "grpo": {"num_prompts_per_step": 3, "num_generations_per_prompt": 2},
    }
    assert build_config(GRPOConfig, values, [], "here").model.indexer_replay
    with pytest.raises(
        UserError, match=r"model\.indexer_replay: needs generation\.backend=megatron, because vLLM does not"
    ):
        build_config(GRPOConfig, values, ["generation.backend=vllm"], "here")

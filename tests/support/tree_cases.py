"""Random trees of rows, and their losses and gradients with and without shared prefixes, in one start of processes."""

import math
import random
from dataclasses import replace

import torch
from layout_cases import make_config

from mcore_rl.config import GRPOConfig
from mcore_rl.data.batching import WHOLE_BATCH
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.distributed.sampling_mask import KeptTokens
from mcore_rl.losses.common import NLLLoss
from mcore_rl.losses.options import DPOOptions
from mcore_rl.losses.policy_gradient import ClippedPGLossFn
from mcore_rl.losses.policy_options import ClippedPGOptions
from mcore_rl.losses.preference import DPOLossFn
from mcore_rl.testing.layout_check import LayoutResult, add_earlier_logprobs, compare, whole_gradients

LONGEST = 200
RATE = 0.05
POLICY_LOSS = {"reference_policy_kl_penalty": 0.3, "entropy_bonus": 0.1, "ratio_clip_max": 0.28}
LOSSES = {
    "tokens": ClippedPGLossFn(ClippedPGOptions(**POLICY_LOSS)),
    "sequences": ClippedPGLossFn(ClippedPGOptions(**POLICY_LOSS, token_level_loss=False)),
    "likelihood": NLLLoss(),
    "pairs": DPOLossFn(DPOOptions(sft_loss_weight=0.5)),
    "kept tokens": ClippedPGLossFn(ClippedPGOptions(**POLICY_LOSS)),
    "recorded experts": ClippedPGLossFn(ClippedPGOptions(**POLICY_LOSS)),
}


def tree_config(path, mixture, **model):
    """Return a GRPO configuration; the routers of a mixture have auxiliary losses."""
    values = make_config(path).model_dump()
    for name in ("dpo", "batch", "data"):
        del values[name]
    values["model"] |= model | ({"moe_aux_loss_coeff": 0.7, "moe_z_loss_coeff": 0.013} if mixture else {})
    return GRPOConfig.model_validate(
        {
            **values,
            "data": {"train": "unused", "max_sequence_length": LONGEST},
            "batch": {"tokens_per_pack": 512, "share_prefixes": True},
            "grpo": {"num_prompts_per_step": 3, "num_generations_per_prompt": 4, "max_new_tokens": 30},
        }
    )


def grown_rows(drawn, count):
    """Return rows that branch off earlier rows anywhere, with equal rows and rows that are beginnings of others.

    Each token also has a number that tells with which experts it was sampled: rows may agree in tokens alone.
    """
    rows = []
    while len(rows) < count:
        form, other = drawn.random(), drawn.choice(rows) if rows else []
        if form < 0.08 and rows:
            rows.append(list(other))
            continue
        if form < 0.16 and len(other) > 1:
            rows.append(other[: drawn.randint(1, len(other) - 1)])
            continue
        begins = other[: drawn.randint(0, len(other))] if form < 0.9 else []
        if form > 0.6:  # the same tokens, sampled with other experts from some place on
            place = drawn.randint(0, len(begins))
            begins = begins[:place] + [(token, drawn.random()) for token, _ in begins[place:]]
        room = LONGEST - len(begins)
        new = drawn.randint(0 if begins else 1, min(60, room))
        rows.append([*begins, *((drawn.randint(2, 249), drawn.random()) for _ in range(new))])
    return rows


def recorded_experts(rows, width, experts):
    """Return experts [B, S, layers, topk] of the rows' tokens; the last token has none, and some others neither."""
    layers, count, topk = sum(experts.sparse_layers), experts.count, experts.topk
    found = torch.full((len(rows), width, layers, topk), -1, dtype=torch.int16)
    for row, tokens in enumerate(rows):
        for place, (_, number) in enumerate(tokens[:-1]):
            if number < 0.9:
                generator = torch.Generator().manual_seed(int(number * 2**40))
                found[row, place] = torch.rand(layers, count, generator=generator).argsort(-1)[:, :topk].short()
    return found


def kept_tokens(ids, lengths, mask):
    """Return the sampling masks of the tokens that a row trains; they depend on the tokens before."""
    of_rows = []
    for row, length, trained in zip(ids.tolist(), lengths, mask.bool().tolist(), strict=True):
        draws = [random.Random(str(row[: place + 1])).sample(range(250), 5) for place in range(length)]
        kept = [[*dict.fromkeys([row[place], *draws[place]])] if trained[place] else [] for place in range(length)]
        of_rows.append(KeptTokens.of(kept))
    return of_rows


def tree_case(seed, experts):
    """Return the batch of a seed, the name of its loss, and how its rows are packed.

    Args:
        experts: shape of a mixture's experts; None for a dense model.
    """
    drawn = random.Random(f"tree {seed}")
    kinds = list(LOSSES) if experts is not None else list(LOSSES)[:-1]
    kind = kinds[seed % len(kinds)]
    rows = grown_rows(drawn, 2 * drawn.randint(3, 6))
    if kind != "pairs":
        drawn.shuffle(rows)
    lengths, generator = [len(row) for row in rows], torch.Generator().manual_seed(seed)
    ids, mask = torch.zeros(len(rows), max(lengths), dtype=torch.long), torch.zeros(len(rows), max(lengths))
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor([token for token, _ in tokens])
        mask[row, : len(tokens)] = (torch.rand(len(tokens), generator=generator) < 0.6).float()
        mask[row, len(tokens) - 1] = 1
    sample_mask = torch.ones(len(rows))
    if drawn.random() < 0.5:
        sample_mask[-2 if kind == "pairs" else -1 :] = 0
    advantages = torch.randn(len(rows), 1, generator=generator).expand(ids.shape).contiguous()
    data = BatchedDataDict(
        input_ids=ids, input_lengths=torch.tensor(lengths), token_mask=mask, sample_mask=sample_mask,
        advantages=advantages,
    )  # fmt: skip
    if kind == "kept tokens":
        data["kept_tokens"] = kept_tokens(ids, lengths, mask)
    if kind == "recorded experts":
        data["routed_experts"] = recorded_experts(rows, ids.shape[1], experts)
    packing = {
        "rows_per_unit": 2 if kind == "pairs" else 1,
        "tokens_per_pack": drawn.choice([512, 512, 768, 1024]),
        "rows_per_group": drawn.choice([4, WHOLE_BATCH, WHOLE_BATCH]),
        "min_shared": drawn.choice([1, 1, 8, 32]),
    }
    return data, kind, packing


def result_of(policy, planner, seed, shares):
    """Return the loss, the metrics, the log-probabilities and the gradients of a seed's batch, and its packed tokens.

    The biases of a mixture's routers are changed afterwards.
    """
    experts = getattr(policy.model.family, "experts", None)
    data, kind, packing = tree_case(seed, experts)
    policy.batching = replace(planner, **packing | ({} if shares else {"rows_per_group": 0}))
    return result_of_batch(policy, data, LOSSES[kind])


def result_of_batch(policy, data, loss_fn):
    scores = policy.get_logprobs(data)["logprobs"]
    add_earlier_logprobs(data, scores, policy.config)
    own = policy.own_rows(data)
    metrics = policy.compute_gradients(own, loss_fn)
    gradients = whole_gradients(policy)
    metrics["grad_norm"] = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
    load, counts = policy._router_load, torch.ones(1)
    if load is not None:
        counts = load.tokens.cpu()
        if policy.model.family.experts.selection_bias:
            load.update_biases(policy.model, RATE)
    (packed,) = own.share.sum(sum(policy.batching.pieces(own)[0]))
    return LayoutResult([metrics], scores, gradients, {"tokens of experts": counts}), packed


def farthest(logprobs, expected):
    """Return the largest difference of a log-probability, relative to its value if this is beyond −1."""
    return float(((logprobs - expected).abs() / expected.abs().clamp(min=1)).max())


def unshared_results(config, seeds, path):
    """Write the results of the seeds' batches without shared prefixes to `path`, and return the numbers of tokens."""
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=1000)
    results = [result_of(policy, policy.batching, seed, shares=False) for seed in seeds]
    policy.shutdown()
    torch.save([vars(result) for result, _ in results], path)
    return [packed for _, packed in results]


def differences(config, seeds, path, recorded=None):
    """Return how much the results with shared prefixes differ from those at `path`.

    Args:
        recorded: file of sampled rows (`sample_tree`); they are scored too.

    Returns:
        For each seed, a `Difference`, the largest difference of a log-probability, and the number of packed tokens.
        Then, for the sampled rows, the largest difference of a log-probability from the sampler's.
    """
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=1000)
    planner, limit = policy.batching, policy.model.family.gradient_tolerance
    found = []
    for seed, expected in zip(seeds, torch.load(path, weights_only=False), strict=True):
        result, packed = result_of(policy, planner, seed, shares=True)
        expected = LayoutResult(**expected)
        apart = farthest(result.scores, expected.scores)
        found.append((replace(compare(result, expected), limit=limit), apart, packed))
    policy.batching = planner
    of_sampler = None if recorded is None else difference_from_sampler(policy, recorded)
    policy.shutdown()
    return found, of_sampler


# ------------------------------------------------------------------ sampled trees


def sample_tree(config, path):
    """Sample two answers to each of two prompts, then two answers to each answer and a further message; write the rows.

    The rows are all four conversations of each prompt, with the sampler's log-probabilities and experts.
    """
    from small_models import make_tokenizer

    from mcore_rl.models.generation.megatron.generation import MegatronGeneration
    from mcore_rl.models.generation.sampling import SamplingParams
    from mcore_rl.models.megatron.families.mixtures import Mixture
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config)
    params = SamplingParams(12, seed=1)
    records = isinstance(policy.model.family, Mixture)
    generation = MegatronGeneration(
        policy.model, params, 100, make_tokenizer(), recorded=["routed_experts"] if records else []
    )

    def answered(prompts):
        width = max(map(len, prompts))
        ids = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts])
        out = generation.generate(BatchedDataDict(input_ids=ids, input_lengths=torch.tensor([*map(len, prompts)])))
        lengths = out["unpadded_sequence_lengths"].tolist()
        return out, [row[:length].tolist() for row, length in zip(out["output_ids"], lengths, strict=True)]

    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(6, 250, (2, 20), generator=generator).tolist()
    first, turns = answered([prompt for prompt in prompts for _ in range(2)])
    message = torch.randint(6, 250, (9,), generator=generator).tolist()
    out, _ = answered([[*turn, *message] for turn in turns for _ in range(2)])
    logprobs = out["logprobs"].clone()
    for row in range(len(logprobs)):
        logprobs[row, : len(turns[row // 2])] += first["logprobs"][row // 2, : len(turns[row // 2])]
    data = {
        "input_ids": out["output_ids"], "input_lengths": out["unpadded_sequence_lengths"], "recorded": logprobs,
        "sample_mask": torch.ones(len(logprobs)), "token_mask": (logprobs != 0).float(),
    }  # fmt: skip
    torch.save(data | ({"routed_experts": out["routed_experts"]} if records else {}), path)
    policy.shutdown()


def difference_from_sampler(policy, path):
    data = BatchedDataDict(torch.load(path, weights_only=True))
    packed, _ = policy.batching.pieces(data)
    assert sum(packed) < 0.8 * int(data["input_lengths"].sum()), "the rows have common prefixes"
    recorded = data.pop("recorded")
    scores = policy.get_logprobs(data, counted_only=True)["logprobs"]
    return farthest(scores[recorded != 0], recorded[recorded != 0])

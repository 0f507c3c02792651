"""Tests that a step makes few copies to the device, and how often the host waits for it, on a simulated device."""

import pytest
import torch
from simulated_cases import LENGTHS, SEQUENCES, config_of, in_processes
from small_models import and_long
from transfers import Transfers

from mcore_rl import platform
from mcore_rl.config import DPOConfig, GRPOConfig, KTOConfig, RMConfig, SFTConfig
from mcore_rl.models.generation.sampling import SamplingParams
from mcore_rl.simulation.rank import simulated_process
from mcore_rl.simulation.sequences import Sequences, invented_batch
from mcore_rl.testing.layout_check import ParallelLayout

GRPO = {
    "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 4, "max_new_tokens": 8},
    "loss": {"reference_policy_kl_penalty": 0.1, "force_on_policy_ratio": False},
    "batch": {"tokens_per_pack": 768},
}


def generate(policy, data, loss_fn):
    """Generate responses to as many prompts as `data` has rows, with one more sampled token for each prompt."""
    from mcore_rl.models.generation.megatron.decoder import Decoder
    from mcore_rl.models.generation.megatron.generation import ContinuousBatch, RunningSequence, StopStrings

    count, decoder = data.size, Decoder(policy.model)
    params = SamplingParams(max_new_tokens=4 + count, stop_token_ids=(3,))
    sequences = [RunningSequence(n, n, (1, 2, 5 + n), params.max_new_tokens) for n in range(count)]
    with torch.no_grad(), decoder.generating():
        ContinuousBatch(decoder, sequences, params, StopStrings((), None), rows=count, prefill_tokens=64, lag=1).run()


STEPS = {
    "train": lambda policy, data, loss_fn: policy.train(data, loss_fn),
    "evaluate": lambda policy, data, loss_fn: policy.evaluate(data, loss_fn),
    "score": lambda policy, data, loss_fn: policy.get_logprobs(data),
    "generate": generate,
}


def copies_of(config, step, repeats=2):
    """Return the places of transfers that block the host and of others, the number of microbatches, and the number of
    reads of values of the device by place."""
    with simulated_process(config, 0, 8) as seen:
        from mcore_rl.algorithms.build_loss import build_loss
        from mcore_rl.models.policy import megatron_policy, scoring
        from mcore_rl.simulation.counters import replaced

        policy = megatron_policy.MegatronPolicy(config, 2, rows_per_unit=config.rows_per_unit)
        sequences = Sequences(repeats * LENGTHS, repeats * SEQUENCES.responses)
        data = policy.own_rows(invented_batch(config, sequences))
        result = megatron_policy.MicrobatchResult(1.0, len(sequences.lengths), float(len(sequences.lengths)), {})
        results, counts = megatron_policy.MicrobatchResults((result,)), []
        plain, gather_results = scoring.run_microbatches, megatron_policy.all_gather_results

        def gather(*arguments):
            gather_results(*arguments)  # its copies and reads count; its values are simulated
            return results

        def run(model, wrapped, microbatches, head, train):
            counts.append(len(microbatches))
            return plain(model, wrapped, microbatches, head, train)

        with (
            replaced(megatron_policy, "all_gather_results", gather),
            replaced(scoring, "run_microbatches", run),
            Transfers() as transfers,
        ):
            seen.reads.places.clear()
            STEPS[step](policy, data, build_loss(config))
        reads = {place: count for (_, place), count in seen.reads.places.items()}
        return transfers.waited_for, transfers.others, sum(counts), reads


BLOCKING_COPIES = {"train": 2, "evaluate": 2, "score": 1, "generate": 0}
"""Largest number of a step: the ranks agree on the counts of tokens, and on the numbers of packs."""
READS = {"train": 5, "evaluate": 4, "score": 2, "generate": 2}
"""The results of those, the metrics' names, the table of results, and for the update the norm of the gradients; the
scores; the tokens and their log-probabilities."""


@pytest.mark.parametrize(
    ("algorithm", "sections", "step"),
    and_long(
        [],
        [
            (DPOConfig, {}, "score"),
            (DPOConfig, {"dpo": {"reference": "swap"}}, "train"),
            (SFTConfig, {}, "train"),
            (KTOConfig, {}, "train"),
            (RMConfig, {}, "train"),
            (GRPOConfig, GRPO, "train"),
            (DPOConfig, {}, "evaluate"),
            (GRPOConfig, GRPO, "evaluate"),
            (GRPOConfig, GRPO, "generate"),
        ],
    ),
)
def test_number_of_host_waits_does_not_grow_with_microbatches(algorithm, sections, step, model_of):
    """The results are gathered too. Generation has no microbatches, but twice as many sequences, of more tokens."""
    model = {"path": str(model_of("llama")), "head": "reward"} if algorithm is RMConfig else None
    sections = {**sections, "model": model} if model else sections
    # The order of gathered states instead, and the last tokens.
    check_waits(config_of(model_of("llama"), algorithm, **sections), step, 4 if algorithm is RMConfig else 3)


@pytest.mark.long
@pytest.mark.parametrize(
    ("algorithm", "sections", "step", "a_microbatch", "a_generation"),
    [(DPOConfig, {}, "train", 5, 0), (GRPOConfig, GRPO, "generate", 3, 8)],
)
def test_delta_nets_wait_no_more(algorithm, sections, step, a_microbatch, a_generation, model_of):
    """The plan of chunks is sent once for all layers of a microbatch, or of prompts; slots are sent beside blocks."""
    check_waits(config_of(model_of("qwen3_5"), algorithm, **sections), step, a_microbatch, a_generation)


def check_waits(config, step, a_microbatch=3, a_generation=6):
    """Compare a step with one of twice as many rows; `a_microbatch` and `a_generation` are numbers of copies."""
    config = ParallelLayout(tp=2, cp=2, dp=2, sp=True, tokens_per_pack=768).apply(config)
    sizes = in_processes(copies_of, (config, step, 2), (config, step, 4))
    (*_, few, _), (*_, many, _) = sizes
    assert 1 < few < many or (step == "generate" and few == many == 0)
    # The model's inputs, the loss's columns, the counted positions, without waiting. Once: two counts, the tables of
    # angles, the metrics' names, the results. In generation: the prompts, their lengths, the blocks of keys and values.
    for waited_for, others, microbatches, reads in sizes:
        assert len(waited_for) <= BLOCKING_COPIES[step], waited_for
        assert sum(reads.values()) <= READS[step], reads
        assert len(others) <= (a_generation if step == "generate" else a_microbatch * microbatches + 5), others


@pytest.mark.long
@pytest.mark.parametrize(
    ("step", "recompute", "passes"), [("train", False, 1), ("train", True, 2), ("score", False, 1)]
)
def test_mixtures_wait_once_per_layer_and_pass(step, recompute, passes, model_of):
    """The host waits for the counts of tokens that the ranks exchange; three of the four layers have experts."""
    model = {"path": str(model_of("qwen3_moe")), "recompute_activations": recompute}
    layout = ParallelLayout(tp=2, cp=2, dp=2, ep=2, sp=True, tokens_per_pack=768)
    config = layout.apply(config_of(model_of("qwen3_moe"), model=model))
    fewer, more = in_processes(copies_of, (config, step, 2), (config, step, 4))
    microbatches = more[2] - fewer[2]
    assert microbatches > 0
    assert len(fewer[0]) == len(more[0]) <= BLOCKING_COPIES[step] + 1, more[0]  # the numbers of sequences and tokens
    assert len(more[1]) - len(fewer[1]) <= 3 * microbatches, more[1]
    assert sum(more[3].values()) - sum(fewer[3].values()) == 3 * passes * microbatches, more[3]
    of_step = sum(more[3].values()) - 3 * passes * more[2]
    assert of_step <= READS[step] + 2, more[3]  # the number of tokens, and the metrics of routing


def index_with_a_list(config):
    with simulated_process(config, 0, 8), Transfers() as transfers:
        table = torch.zeros(4, 3, device="meta")
        table[[0, 2], :2] = torch.ones(2, 2, device="meta")
        table[[1, 3]].sum()
        table[1:3, 0] = torch.ones(2, device="meta")
        return len(transfers.waited_for)


@pytest.mark.long
def test_transfers_count_an_index_of_the_host(model_of):
    assert in_processes(index_with_a_list, (config_of(model_of("llama")),)) == [2]


def waits_of_export(config):
    """Bytes gathered by a rank that writes a model, and where the host waits for the device on the way."""
    with simulated_process(config, 0, 4) as seen:
        from mcore_rl.models.megatron.weights.conversion import export_hf_weights
        from mcore_rl.models.policy.megatron_policy import MegatronPolicy

        policy = MegatronPolicy(config, 2)
        seen.reads.places.clear()
        tensors = dict(export_hf_weights(policy.model))
        return sum(tensor.nbytes for tensor in tensors.values()), dict(seen.reads.places)


@pytest.mark.long
def test_weight_export_needs_no_host_wait(model_of):
    config = ParallelLayout(tp=2, dp=2).apply(config_of(model_of("llama")))
    ((size, reads),) = in_processes(waits_of_export, (config,))
    assert size > 0 and reads == {}


def test_sent_together_moves_all_tensors_in_one_block(monkeypatch):
    """All values return in one block, for all dtypes and sizes of neighbouring values."""
    blocks = []
    monkeypatch.setattr(platform, "sent", lambda block, device: (blocks.append(block), block.clone())[1])
    tensors = [
        torch.tensor([True, False, True]),
        torch.tensor([[1.1, -2.7]], dtype=torch.float64),
        torch.tensor([], dtype=torch.int64),
        torch.tensor(3, dtype=torch.int32),
        torch.arange(6, dtype=torch.bfloat16).view(2, 3).T,  # not contiguous
        torch.tensor([2**62 + 1]),
    ]
    there = platform.sent_together(tensors, torch.device("meta"))
    assert len(blocks) == 1
    for tensor, moved in zip(tensors, there, strict=True):
        assert moved.dtype == tensor.dtype
        assert torch.equal(moved, tensor)
    assert platform.sent_together([], torch.device("meta")) == []


def test_sent_together_on_cpu_copies_nothing():
    tensor = torch.ones(2)
    assert platform.sent_together([tensor], torch.device("cpu"))[0] is tensor

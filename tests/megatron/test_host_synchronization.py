"""Tests that a step makes few copies to the device, and that the host waits for none, on a simulated device."""

import pytest
import torch
from simulated_cases import LENGTHS, SEQUENCES, config_of, in_processes
from small_models import and_long
from transfers import Transfers

from mcore_rl import platform
from mcore_rl.config import DPOConfig, GRPOConfig, KTOConfig, RMConfig, SFTConfig
from mcore_rl.simulation.rank import simulated_process
from mcore_rl.simulation.step import Sequences, invented_batch
from mcore_rl.testing.layout_check import ParallelLayout

GRPO = {
    "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 4, "max_new_tokens": 8},
    "loss": {"reference_policy_kl_penalty": 0.1, "force_on_policy_ratio": False},
    "batch": {"tokens_per_pack": 768},
}
STEPS = {
    "train": lambda policy, data, loss_fn: policy.train(data, loss_fn),
    "evaluate": lambda policy, data, loss_fn: policy.evaluate(data, loss_fn),
}


def copies_of(config, step):
    """Return the places of transfers that block the host and of others, the number of microbatches, and the files that
    read values of the device."""
    with simulated_process(config, 0, 8) as seen:
        from mcore_rl.algorithms.build_loss import build_loss
        from mcore_rl.models.policy import megatron_policy, scoring
        from mcore_rl.simulation.counters import replaced

        policy = megatron_policy.MegatronPolicy(config, 2, rows_per_unit=config.rows_per_unit)
        sequences = Sequences(2 * LENGTHS, 2 * SEQUENCES.responses)
        data = policy.own_rows(invented_batch(config, sequences))
        result = megatron_policy.MicrobatchResult(1.0, len(sequences.lengths), float(len(sequences.lengths)), {})
        results, counts = megatron_policy.MicrobatchResults((result,)), []
        plain = scoring.run_microbatches

        def run(model, wrapped, microbatches, head, train):
            counts.append(len(microbatches))
            return plain(model, wrapped, microbatches, head, train)

        with (
            replaced(megatron_policy, "all_gather_results", lambda *_: results),
            replaced(scoring, "run_microbatches", run),
            Transfers() as transfers,
        ):
            STEPS[step](policy, data, build_loss(config))
        reads = {place.partition(":")[0] for _, place in seen.reads.places}
        return transfers.waited_for, transfers.others, sum(counts), reads


@pytest.mark.parametrize(
    ("algorithm", "sections", "step"),
    and_long(
        [],
        [
            (DPOConfig, {"dpo": {"reference": "swap"}}, "train"),
            (SFTConfig, {}, "train"),
            (KTOConfig, {}, "train"),
            (RMConfig, {}, "train"),
            (GRPOConfig, GRPO, "train"),
            (DPOConfig, {}, "evaluate"),
            (GRPOConfig, GRPO, "evaluate"),
        ],
    ),
)
def test_step_copies_microbatches_without_host_wait(algorithm, sections, step, model_of):
    model = {"path": str(model_of("llama")), "head": "reward"} if algorithm is RMConfig else None
    sections = {**sections, "model": model} if model else sections
    layout = ParallelLayout(tp=2, cp=2, dp=2, sp=True, tokens_per_pack=768)
    config = layout.apply(config_of(model_of("llama"), algorithm, **sections))
    ((waited_for, others, microbatches, reads),) = in_processes(copies_of, (config, step))
    assert microbatches > 1
    if step == "evaluate":
        assert reads <= {"batched_data_dict.py", "megatron_policy.py"}, "before and after all microbatches"
    of_batch = [places for places in waited_for if any("batched_data_dict.py" in place for place in places)]
    assert len(of_batch) <= 2
    assert not [places for places in waited_for if places not in of_batch]
    # The model's inputs, the loss's columns, the counted positions; two counts and the tables of angles once.
    a_microbatch = 4 if algorithm is RMConfig else 3  # the order of gathered states instead, and the last tokens
    assert len(others) <= a_microbatch * microbatches + 3, others


def waits_of_export(config):
    """Bytes gathered by a rank that writes a model, and where the host waits for the device on the way."""
    with simulated_process(config, 0, 4) as seen:
        from mcore_rl.models.megatron.weights import export_hf_weights
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

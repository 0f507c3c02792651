"""Tests of simulated ranks of large runs against published figures: parameters, state, operations, activations,
loading."""

import json

import pytest
from simulated_cases import config_of, in_processes
from small_models import and_long

from mcore_rl.config import DPOConfig
from mcore_rl.config.parallel import ParallelLayout
from mcore_rl.simulation.sequences import Sequences
from mcore_rl.simulation.step import simulate_loading, simulate_rank


def llama(directory, **sizes):
    values = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "hidden_act": "silu", "eos_token_id": 2,
        "max_position_embeddings": 131072, "tie_word_embeddings": False, **sizes,
    }  # fmt: skip
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(values))
    return directory


SEVENTY = {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8,
}  # fmt: skip


def seventy(path, **parallel):
    """DPO of a 70B shape."""
    return DPOConfig.model_validate({
        "output_dir": "unused", "dpo": {"reference": "swap"}, "optimizer": {"lr": 1e-6}, "trainer": {"max_steps": 2},
        "model": {"path": str(llama(path, **SEVENTY)), "dtype": "bfloat16", "recompute_activations": False},
        "data": {"train": "x.jsonl", "max_sequence_length": 4096},
        "batch": {"global_batch_size": 16, "tokens_per_pack": 8192},
        "parallel": {"tensor_model_parallel_size": 8, "sequence_parallel": True, **parallel},
    })  # fmt: skip


@pytest.mark.exhaustive
def test_loading_at_scale(tmp_path):
    """Load on 256 ranks, at TP8 × CP2 × DP16, a checkpoint of 64 ranks. Each rank reads into existing tensors, some
    blocks of 4 MiB at once. The state of a rank is weights, and bf16's fp32 copies and two moments."""
    (report,) = in_processes(simulate_loading, (seventy(tmp_path / "70b", context_parallel_size=2), 0, 256, 64))
    parameters = 70.55e9 / 8
    assert report.state == pytest.approx((2 + 12 / 32) * parameters, rel=0.01)
    assert 0 < report.beyond <= 0.05 * report.state and report.beyond <= 16 * 2**20
    assert report.read >= report.state


@pytest.mark.long
def test_public_figures(tmp_path):
    """A 70B shape on 128 GPUs has its published number of parameters; 6 + 12 / d bytes per parameter (Megatron Core's
    documentation of its distributed optimizer: bf16 weights, fp32 gradients, d data- and context-parallel ranks); and 6
    FLOPs per parameter and token, 8 with a scoring pass (Kaplan et al. 2020), except for the embedding, which
    multiplies nothing."""
    sequences = Sequences((4096,) * 32, (2048,) * 32)
    config = seventy(tmp_path / "70b", pipeline_model_parallel_size=2)
    first, last = in_processes(simulate_rank, (config, 0, 128, sequences), (config, 64, 128, sequences))
    assert 8 * (first.parameters + last.parameters) == pytest.approx(70.55e9, rel=0.001)
    for rank in (first, last):
        state = sum(rank.memory[kind] for kind in ("weights", "gradients", "optimizer"))
        assert state == pytest.approx((6 + 12 / 8) * rank.parameters, rel=0.01)
    tokens, embedding = 32 * 4096 / 8, 128256 * 8192
    counted = sum(rank.products["training"] + rank.products["scoring"] for rank in (first, last)) * 8
    logits_spared = 0.5 * embedding * 8 * tokens  # the LM head multiplies the trained half of the tokens, and once more
    expected = 8 * (70.55e9 - embedding) * tokens - logits_spared
    assert counted == pytest.approx(expected, rel=0.02)


# Hidden size, layers, heads, GPUs, pipeline stages, sequences, seconds a step, MFU: of A100s, with sequence
# parallelism and selective recomputation (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
# Transformer Models", tables 3 and 5).
PUBLISHED = and_long(
    [],
    [
        (6144, 48, 64, 8, 1, 4, 1.10, 0.415),
        (12288, 96, 96, 64, 8, 64, 13.75, 0.514),
        (20480, 105, 128, 280, 35, 280, 37.83, 0.560),
        (25600, 128, 160, 512, 64, 512, 71.49, 0.563),
    ],
)


def published(path, hidden, layers, heads, stages, sequences):
    """A gated layer of 8/3 times the hidden size multiplies as much as the papers' plain one of four times."""
    width = -(-8 * hidden // 24) * 8
    sizes = {"hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": layers}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": hidden // heads}
    path = llama(path, **sizes, **heads_of, vocab_size=51200, max_position_embeddings=2048)
    config = config_of(
        path, model={"path": str(path), "dtype": "bfloat16"}, data={"train": "x", "max_sequence_length": 2048},
        batch={"global_batch_size": sequences, "tokens_per_pack": 2048 * sequences},
    )  # fmt: skip
    return ParallelLayout(tp=8, sp=True, pp=stages, tokens_per_pack=2048 * sequences).apply(config)


@pytest.mark.parametrize(
    ("hidden", "layers", "heads", "gpus", "stages", "sequences", "seconds", "utilization"), PUBLISHED
)
def test_published_operations(hidden, layers, heads, gpus, stages, sequences, seconds, utilization, tmp_path):
    """Operations of 22B to 1T parameters, 2,048 tokens per sequence, are those that the published time and utilization
    of a step imply. This holds for the formula of a run's MFU, and for the operations of simulated ranks. The simulated
    ranks are the first, which stands for all stages with its number of layers because its embedding multiplies nothing,
    and the last. The paper counts all pairs of tokens in attention; here only the visible half is counted."""
    config = published(tmp_path / "model", hidden, layers, heads, stages, 1)
    ranks = sorted({0, (stages - 1) * gpus // stages})
    jobs = [(config, rank, gpus, Sequences((2048,), (2047,))) for rank in ranks]
    *first, last = in_processes(simulate_rank, *jobs)
    of_paper = utilization * 312e12 * gpus * seconds / sequences
    assert last.model_flops == pytest.approx(of_paper, rel=0.1)
    of_stages = [*first * (stages - 1), last]
    computed = sum(rank.products["training"] + 2 * rank.attention["training"] for rank in of_stages)
    assert 8 * computed == pytest.approx(of_paper, rel=0.1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("hidden", "layers", "heads", "stages", "chunks", "packs", "parameters"),
    [
        (6144, 48, 64, 1, 1, 1, 22e9),
        (12288, 96, 96, 8, 1, 16, 175e9),
        (12288, 96, 96, 8, 3, 16, 175e9),
        (20480, 105, 128, 35, 3, 70, 530e9),
        (25600, 128, 160, 64, 1, 64, 1008e9),
    ],
)
def test_published_memory(hidden, layers, heads, stages, chunks, packs, parameters, tmp_path):
    """Memory of the first pipeline stage, which stores the most, in the paper's layouts.

    Activations follow its equation 6: 34·s·b·h / t bytes per layer, if nothing quadratic in the length is stored. By
    its section 4.2.3, the first stage stores the activations of as many layers as the model has, and with interleaved
    chunks a fraction of (p − 1) / (p·m) more. Weights, gradients and optimizer take 18 bytes per parameter on one
    replica (Megatron Core's documentation). A layer has no dropout masks (2·s·b·h); a gated layer stores as much as the
    paper's.
    """
    config = published(tmp_path / "model", hidden, layers, heads, stages, packs)
    config = ParallelLayout(tp=8, sp=True, pp=stages, vpp=chunks, tokens_per_pack=2048).apply(config)
    (rank,) = in_processes(simulate_rank, (config, 0, 8 * stages, Sequences((2048,) * packs, (2047,) * packs)))
    waiting = (stages - 1) / (stages * chunks) if chunks > 1 else 0
    activations = 34 * 2048 * hidden * layers / 8 * (1 + waiting)
    state = sum(rank.memory[kind] for kind in ("weights", "gradients", "optimizer"))
    assert rank.packs == packs
    assert state == pytest.approx(18 * parameters / (8 * stages), rel=0.1)
    assert rank.peak - state == pytest.approx(activations, rel=0.1)
    assert rank.memory["activations, workspace"] == pytest.approx(activations, rel=0.05)

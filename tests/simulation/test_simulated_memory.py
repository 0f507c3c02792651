"""Tests that the memory growth of a real rank's process equals the simulation's, including allocator and libraries."""

import contextlib
import os

import pytest
from ports import free_port
from simulated_cases import EQUAL, SEQUENCES, config_of, in_processes, prepare_real_process
from small_models import and_long, make_model

from mcore_rl.config.parallel import ParallelLayout
from mcore_rl.simulation.sequences import invented_batch
from mcore_rl.simulation.step import simulate_rank

SIZES = {
    "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64,
    "num_hidden_layers": 8, "vocab_size": 16000,
}  # fmt: skip


PIECE = 2**16  # numbers a rank


def reduce_scatter_in_pieces(output, whole, op, group, async_op):
    import torch

    parts, own = whole.view(group.size(), -1), output.view(-1)
    for start in range(0, len(own), PIECE):
        reduced = torch.empty_like(own[start : start + PIECE])
        torch.distributed.reduce_scatter_tensor(reduced, parts[:, start : start + PIECE].flatten(), op, group)
        own[start : start + PIECE] = reduced


def all_gather_in_pieces(whole, output, group, async_op):
    import torch

    parts, own = whole.view(group.size(), -1), output.view(-1)
    for start in range(0, len(own), PIECE):
        piece = own[start : start + PIECE].clone()
        gathered = piece.new_empty(group.size() * len(piece))
        torch.distributed.all_gather_into_tensor(gathered, piece, group)
        parts[:, start : start + PIECE] = gathered.view(group.size(), -1)


def without_copies_of_buffers():
    """gloo copies the tensors that it reduces, scatters or gathers; with Megatron, these are all gradients and all
    weights at once. GPU libraries do not."""
    from megatron.core.distributed import param_and_grad_buffer as buffers

    buffers.dist_reduce_scatter_func = reduce_scatter_in_pieces
    buffers.dist_all_gather_func = all_gather_in_pieces
    buffers._coalescing_manager = lambda *_, **__: contextlib.nullcontext()


def resident_growth(config, rank, world_size, port, sequences):
    """Measure two steps with all their state, because only the first step starts without the optimizer's state."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    from peak_memory import PeakMemory

    from mcore_rl.models.policy import megatron_policy  # noqa: F401  # its own memory is not the run's
    from mcore_rl.simulation.rank import Models, run_step

    without_copies_of_buffers()
    with PeakMemory() as peak:
        models = Models.build(config)
        data = models.policy.own_rows(invented_batch(config, sequences))
        for _ in range(2):
            run_step(config, models, data, lambda phase: None)
    return peak.bytes


def compare(path, layout, sequences):
    config, size, port = layout.apply(config_of(path)), layout.world_size, free_port()
    ranks = [(config, rank, size, port, sequences) for rank in range(size)]
    grown = in_processes(resident_growth, *ranks, prepare=prepare_real_process)
    simulated = in_processes(simulate_rank, *[(config, rank, size, sequences, "cpu") for rank in (0, size - 1)])
    ratios = [grown[rank] / report.peak for rank, report in zip((0, size - 1), simulated, strict=True)]
    print(f"{layout}: grown / simulated {', '.join(f'{ratio:.3f}' for ratio in ratios)}")
    assert ratios == pytest.approx([1, 1], rel=0.15)


DENSE = and_long(
    [],
    [],
    [
        ParallelLayout(),
        ParallelLayout(tp=2, sp=True),
        ParallelLayout(pp=2),
        ParallelLayout(cp=2),
        ParallelLayout(dp=2),
        ParallelLayout(tp=2),
        ParallelLayout(tp=2, pp=2),
        ParallelLayout(pp=2, vpp=2),
        ParallelLayout(packing=False),
        ParallelLayout(tp=2, cp=2, sp=True),
    ],
)
MIXTURES = and_long(
    [],
    [ParallelLayout(pp=2, dp=2, ep=2)],
    [
        ParallelLayout(**sizes)
        for sizes in (
            {}, {"dp": 2, "ep": 2}, {"tp": 2, "sp": True}, {"pp": 2}, {"dp": 2}, {"cp": 2, "ep": 2},
            {"tp": 2, "sp": True, "ep": 2, "etp": 1}, {"tp": 2, "sp": True, "dp": 2, "ep": 2},
        )
    ],
)  # fmt: skip


@pytest.mark.parametrize("layout", DENSE, ids=str)
def test_a_dense_model(layout, tmp_path):
    compare(make_model("llama", tmp_path / "model", **SIZES), layout, SEQUENCES)


@pytest.mark.parametrize("layout", MIXTURES, ids=str)
def test_a_mixture(layout, tmp_path):
    experts = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 256}
    compare(make_model("qwen3_moe", tmp_path / "model", **SIZES, **experts), layout, EQUAL)

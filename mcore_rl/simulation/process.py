"""A process that stands for one rank of a run: no weights, no device, no peers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mcore_rl import platform
from mcore_rl.config import TrainingConfig
from mcore_rl.errors import UserError
from mcore_rl.simulation.models import simulated_beside
from mcore_rl.simulation.rank import (
    AttentionFlops,
    HostReads,
    ShapesOnly,
    alike,
    exchange_stand_in,
    flash_stand_in,
    note_host_reads,
    replaced,
    untouched_copies,
)
from mcore_rl.simulation.traffic import Traffic, count_traffic


@dataclass(frozen=True)
class Seen:
    """Costs of the rank: transfers, waits of the host, operations of attention."""

    traffic: Traffic
    reads: HostReads
    attention: AttentionFlops


@contextmanager
def simulated_process(config: TrainingConfig, rank: int, world_size: int, tiles_of: str = "cuda") -> Iterator[Seen]:
    """This process, which can do nothing else afterwards, is a rank of the run.

    Args:
        tiles_of: kind of device whose tile sizes are taken.

    Raises:
        UserError: what the run itself would refuse, and what cannot be simulated.
    """
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what is asked of a GPU gets the same answers where there is one
    seen = Seen(count_traffic(), HostReads(), AttentionFlops())
    platform.initialize_platform(simulate=True)
    note_host_reads(seen.reads)

    import torch

    from mcore_rl.distributed import batched_data_dict, logprobs
    from mcore_rl.models.megatron import attention, weights
    from mcore_rl.models.megatron.families import family_of
    from mcore_rl.models.policy import reference, scoring
    from mcore_rl.run.model_checks import POLICY, check_models

    hf_configs = check_models(config)
    in_turn = {POLICY: config, **simulated_beside(config)}  # as they are built
    shapes = iter([family_of(hf_configs[key]).shapes() for key in in_turn])
    for one in in_turn.values():
        _check_routing(one)
    logprobs.TILE_SHAPE["meta"] = logprobs.TILE_SHAPE[tiles_of]
    logprobs.CHUNK_BYTES["meta"] = logprobs.CHUNK_BYTES[tiles_of]
    attention.KERNELS["meta"] = flash_stand_in(seen.attention)
    with (
        replaced(scoring, "SafetensorsDirectory", lambda path: ShapesOnly(path, next(shapes))),
        replaced(weights, "read_shard", lambda *_: torch.empty((), device="meta")),
        replaced(reference, "copies_on_host", untouched_copies),
        replaced(reference, "exchange", exchange_stand_in),
        replaced(batched_data_dict, "reduced", alike(batched_data_dict.reduced)),
    ):
        yield seen


def _check_routing(config: TrainingConfig) -> None:
    if config.model.moe_router_replay:
        raise UserError("model.moe_router_replay: experts chosen while sampling cannot be simulated; leave it out")
    if config.model.moe_grouped_gemm and config.model.dtype != "bfloat16":
        raise UserError(
            f"model.moe_grouped_gemm: in {config.model.dtype} it cannot be simulated: torch knows the shapes of "
            "grouped products in bfloat16 alone; leave it out"
        )

"""Simulate what a rank reads of a checkpoint, and the memory for it in addition to the state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_rl.config import TrainingConfig
from mcore_rl.simulation.memory import LiveBytes
from mcore_rl.simulation.models import Models
from mcore_rl.simulation.process import simulated_process

if TYPE_CHECKING:
    from mcore_rl.models.megatron.checkpoint.region_reader import Region

LOADING = "loading"


@dataclass(frozen=True)
class LoadingReport:
    """The cost of a rank's loading, in bytes.

    state: weights and optimizer state of this rank, of a critic too, and a reference that moves. read: from files.
    beyond: what is live at most, on device and host, beside what is there anyhow when all is loaded.
    """

    rank: int
    stage: int
    state: int
    read: int
    beyond: int


def simulate_loading(config: TrainingConfig, rank: int, world_size: int, writers: int) -> LoadingReport:
    """Simulate in this process, which can do nothing else afterwards.

    Args:
        writers: ranks that have written the checkpoint, each an equal part of every tensor's first dimension.

    Raises:
        UserError: what the run itself would refuse, and what cannot be simulated.
    """
    with simulated_process(config, rank, world_size):
        from mcore_rl.models.megatron.checkpoint.region_reader import BLOCK_BYTES

        live = LiveBytes("meta", "cpu")
        with live:
            models = Models.build(config)
            live.phase = LOADING
            regions = list(_regions(config, models))
            read = _read(regions, writers)
        state = sum(region.values.nbytes for region in regions)
        beyond = live.peaks[LOADING] - live.live + BLOCK_BYTES  # which a reader has
        return LoadingReport(rank, models.policy.topology.pipeline.rank, state, read, beyond)


def _regions(config: TrainingConfig, models: Models) -> Iterator[Region]:
    """Yield the regions of all models that are trained, and of a reference that moves."""
    from mcore_rl.models.megatron.checkpoint.optimizer_shards import tensor_regions

    for number, model in enumerate(models.trained):
        part = model.trained_part("" if number == 0 else f"beside_{number}")
        weights = part.weights()
        yield from part.regions(weights, with_optimizer=True)
        if number == 0 and config.reference_sync_of is not None:
            for region in tensor_regions(weights):
                yield replace(region, key=f"reference.{region.key}")


def _read(regions: list[Region], writers: int) -> int:
    """Bytes that are read, by the code that reads files, of which there are none."""
    import torch

    from mcore_rl.models.megatron.checkpoint.region_reader import RegionReader, copy_piece

    total = 0
    reader = RegionReader(Path("simulated"), _index(regions, writers))
    with torch.no_grad():
        for region in regions:
            for piece in reader.pieces(region):

                def read(first: int, count: int, dtype: torch.dtype = piece.dtype) -> torch.Tensor:
                    nonlocal total
                    total += count * dtype.itemsize
                    return torch.empty(count, dtype=dtype, device="cpu")

                copy_piece(read, piece)
    return total


def _index(regions: list[Region], writers: int) -> Any:
    """Return the index of a checkpoint that holds the tensors of all these regions."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    for region in regions:
        if region.key in entries:
            continue
        whole = region.whole or tuple(region.values.shape)
        rows = -(-whole[0] // writers)
        chunks = [
            ChunkStorageMetadata(
                torch.Size((first, *(0 for _ in whole[1:]))), torch.Size((min(rows, whole[0] - first), *whole[1:]))
            )
            for first in range(0, whole[0], rows)
        ]
        properties = TensorProperties(dtype=region.values.dtype)
        entries[region.key] = TensorStorageMetadata(properties, torch.Size(whole), chunks)
        for writer, chunk in enumerate(chunks):
            places[MetadataIndex(region.key, chunk.offsets)] = _StorageInfo(f"__{writer}_0.distcp", 0, 0)
    return Metadata(entries, storage_data=places)

"""Results of the loss for each microbatch of a global batch, known on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_rl import platform
from mcore_rl.data.batching import Microbatch
from mcore_rl.distributed.collectives import Acquainted, all_gather, all_reduce, gather_objects
from mcore_rl.distributed.topology import Topology
from mcore_rl.errors import ContractError
from mcore_rl.losses.common import locate_nonfinite


@dataclass(frozen=True)
class MicrobatchResult:
    """Results of a microbatch: its loss, its rows, its rows that count, and the loss's metrics."""

    loss: float
    rows: int
    samples: float
    metrics: dict[str, float]


def collect_results(
    topology: Topology,
    loss_name: str,
    microbatches: Sequence[Microbatch],
    outputs: Sequence[dict[str, Any]],
    names_of_all: Acquainted,
) -> list[MicrobatchResult]:
    """Gather the results of all data-parallel ranks, without fillers; the same list on every rank, by one host sync.

    Args:
        outputs: what the loss's head gave for each of `microbatches`; [] on all pipeline stages but the last.
        names_of_all: tells which metrics each rank has; the same one in every step.

    Raises:
        ContractError: a metric is not a number; on every rank.
    """
    own_names = _describe(loss_name, outputs)
    everyone = names_of_all.gather(own_names) if torch.distributed.get_world_size() > 1 else [own_names]
    if errors := [found for found in everyone if isinstance(found, str)]:
        raise ContractError(errors[0])
    names = sorted({name for found in everyone for name in found})
    width = 4 + 2 * len(names)
    rows = [_as_row(microbatch, output, names) for microbatch, output in zip(microbatches, outputs, strict=False)]
    own = torch.stack(rows) if rows else torch.zeros(len(microbatches), width, dtype=torch.float64)
    everything = all_gather(own.to(platform.device()), topology.data.group).flatten(0, 1)
    table = all_reduce(everything, topology.pipeline.group).tolist()
    results = []
    for counts, loss, num_rows, samples, *values in table:
        if counts:
            metrics = {
                name: value
                for name, value, present in zip(names, values[: len(names)], values[len(names) :], strict=True)
                if present
            }
            results.append(MicrobatchResult(loss, int(num_rows), samples, metrics))
    return results


def explain_nonfinite(loss: float, outputs: Sequence[dict[str, Any]], indices: Sequence[int]) -> str:
    """Which row and position, from every rank's microbatches; collective.

    Args:
        indices: in the global batch, of the rows that this rank has.
    """
    found = None
    for output in outputs:
        if "logprobs" in output and (place := locate_nonfinite(output["logprobs"].cpu(), output["mask"].cpu())):
            found = f"row {indices[output['rows'][place[0]]]} of the global batch, position {place[1]}"
            break
    places = [f"rank {rank}: {place}" for rank, place in enumerate(gather_objects(found)) if place]
    return f"the loss is {loss}" + (f"; first bad log-probability at {places[0]}" if places else "")


def _describe(loss_name: str, outputs: Sequence[dict[str, Any]]) -> list[str] | str:
    """The names of all metrics, or what is wrong with one."""
    for output in outputs:
        for name, value in output["metrics"].items():
            if not (isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)):
                found = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                return f"{loss_name}: metric {name!r} is {found}; return numbers, one metric an element"
    return sorted({name for output in outputs for name in output["metrics"]})


def _as_row(microbatch: Microbatch, output: dict[str, Any], names: Sequence[str]) -> Tensor:
    """Whether it counts, loss, rows, valid samples, each metric's value, and whether it has that metric."""
    metrics = output["metrics"]
    numbers = [
        float(microbatch.counts),
        output["loss"],
        len(microbatch.rows),
        microbatch.data["sample_mask"].sum(),
        *(metrics.get(name, 0.0) for name in names),
        *(float(name in metrics) for name in names),
    ]
    device = platform.device()
    return torch.stack([torch.as_tensor(n, device=device).double().detach().reshape(()) for n in numbers])

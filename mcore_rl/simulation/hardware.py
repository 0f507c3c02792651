"""Estimates the time that a rank's kernels and transfers take. Each kind of work has an efficiency."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError

from mcore_rl.config import read_yaml
from mcore_rl.errors import UserError
from mcore_rl.simulation.counters import Transfer
from mcore_rl.simulation.rank import CRITIC_TRAINING, CRITIC_UPDATE, PHASES, TRAINING, UPDATE
from mcore_rl.simulation.step import RankReport

Efficiency = Annotated[float, Field(gt=0, le=1)]
ByInner = Annotated[dict[PositiveInt, Efficiency], Field(min_length=1)]
PUBLISHED = Path(__file__).parent / "hardware.yaml"
UPDATES = (CRITIC_UPDATE, UPDATE)
OF_PACKS = tuple(phase for phase in PHASES if phase not in UPDATES)
MESSAGES = ("send", "recv")


def interpolated(table: Mapping[int, float], at: float) -> float:
    """Return the value of `table` at the size `at`, interpolated linearly in the logarithm of the size.

    Beyond the table's ends, return its first or last value.
    """
    sizes = sorted(table)
    for low, high in itertools.pairwise(sizes):
        if low <= at <= high:
            part = math.log(at / low) / math.log(high / low)
            return table[low] + part * (table[high] - table[low])
    return table[sizes[0] if at < sizes[0] else sizes[-1]]


class Hardware(BaseModel):
    """A kind of GPU and its nodes.

    memory_bytes, memory_bytes_per_second: size and bandwidth of the GPU's memory.
    flops_per_second: peak rate of dense products, by dtype; float8 stands for FP8 and MXFP8.
    fp8_recipes: the values of `model.fp8.recipe` that the GPU can compute; none without a rate of float8.
    node_bytes_per_second, network_bytes_per_second: bandwidth of a GPU in one direction, inside of its node and across
        nodes.
    host_bytes_per_second: bandwidth between a GPU and its host.
    launch_seconds: time that the host needs to launch a kernel.
    shape_efficiency: rate of a matrix product, as a fraction of the rate of large products. It depends on two sizes:
        the smaller dimension of the result, and the dimension that is summed over. The first size is the key of the
        outer dict, the second size the key of an inner dict. For a grouped product, the sizes are those of one expert's
        product.
    product_efficiency, attention_efficiency, memory_efficiency, transfer_efficiency: fractions of these peak rates and
        bandwidths that a run reaches.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    memory_bytes: PositiveFloat
    memory_bytes_per_second: PositiveFloat
    flops_per_second: dict[str, PositiveFloat]
    fp8_recipes: tuple[str, ...] = ()
    gpus_per_node: PositiveInt
    node_bytes_per_second: PositiveFloat
    network_bytes_per_second: PositiveFloat
    host_bytes_per_second: PositiveFloat = 32.0e9  # PCIe 4 × 16, the slowest of the published kinds
    launch_seconds: NonNegativeFloat
    product_efficiency: Efficiency
    shape_efficiency: Annotated[dict[PositiveInt, ByInner], Field(min_length=1)]
    attention_efficiency: Efficiency
    memory_efficiency: Efficiency
    transfer_efficiency: Efficiency

    @classmethod
    def load(cls, name: str) -> Hardware:
        """Return the kind of GPU called `name` in `hardware.yaml`, or `FILE:NAME` in another file of that format.

        Raises:
            UserError: there is no such kind, or one of its values is missing or invalid.
        """
        file, _, kind = name.rpartition(":")
        kinds = {str(key): value for key, value in read_yaml(Path(file) if file else PUBLISHED).items()}
        if kind not in kinds:
            there = f"must be one of {', '.join(sorted(kinds))}" if kinds else "the file is empty"
            raise UserError(f"--hardware {name}: {there}; for a GPU that a file of yours describes, write FILE:NAME")
        if not isinstance(kinds[kind], dict):
            raise UserError(f"--hardware {name}: must be a mapping, as in {PUBLISHED}, not {kinds[kind]!r}")
        try:
            return cls.model_validate(kinds[kind])
        except ValidationError as error:
            first = error.errors()[0]
            raise UserError(f"--hardware {name}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None

    def crosses_nodes(self, transfer: Transfer) -> bool:
        return len(self._ranks_of_nodes(transfer)) > 1

    def _ranks_of_nodes(self, transfer: Transfer) -> Counter[int]:
        return Counter(rank // self.gpus_per_node for rank in transfer.ranks)

    def within_and_across(self, transfer: Transfer, size: int) -> tuple[float, float]:
        """Return two numbers: the bytes that a rank sends inside of its node, and the bytes that it sends across nodes.

        In a ring of n ranks, a rank sends (n − 1)/n of the bytes for a gather or scatter, and twice as many for an
        all-reduce. A message or broadcast sends all bytes once. All of these bytes count as sent across nodes if the
        ranks are on several nodes. In an all-to-all, a rank sends an equal part to every rank. The result is for the
        slowest rank, which has the fewest peers in its node.

        Args:
            size: bytes of the transfer, as `Traffic` counts them.
        """
        parts = len(transfer.ranks)
        if transfer.operation == "all_to_all":
            peers = min(self._ranks_of_nodes(transfer).values()) - 1
            return size * peers / parts, size * (parts - 1 - peers) / parts
        share = {"all_gather": 1.0, "reduce_scatter": 1.0, "all_reduce": 2.0}
        sent = size * share[transfer.operation] * (parts - 1) / parts if transfer.operation in share else size
        return (0.0, sent) if self.crosses_nodes(transfer) else (sent, 0.0)

    def transfer_seconds(self, transfer: Transfer, size: int) -> float:
        """Return the seconds that a transfer of `size` bytes takes.

        In an all-to-all, the parts inside of a node and across nodes go over different links at the same time.
        """
        within, across = self.within_and_across(transfer, size)
        seconds = max(within / self.node_bytes_per_second, across / self.network_bytes_per_second)
        return seconds / self.transfer_efficiency

    def device_seconds(self, report: RankReport, dtype: str, *phases: str) -> float:
        """Return the seconds that the device needs for its kernels in the given `phases` of a step.

        Kernels other than matrix products and attention take the time of their reads and writes.
        """
        products = sum(
            operations / self._product_rate(kind.dtype if kind.dtype in self.flops_per_second else dtype, *kind[-2:])
            for kind, operations in report.shapes.items()
            if kind.phase in phases
        )
        attention = sum(report.attention.get(phase, 0) for phase in phases)
        moved = sum(size for (phase, _), size in report.kernel_bytes.items() if phase in phases)
        return (
            products
            + attention / (self.flops_per_second[dtype] * self.attention_efficiency)
            + moved / (self.memory_bytes_per_second * self.memory_efficiency)
        )

    def _product_rate(self, dtype: str, narrow: int, inner: int) -> float:
        """Return the rate of products of this shape, in operations per second; see `Product` for the arguments."""
        at_inner = {size: interpolated(of, inner) for size, of in self.shape_efficiency.items()}
        return self.flops_per_second[dtype] * self.product_efficiency * interpolated(at_inner, narrow)

    def launch_seconds_of(self, report: RankReport, *phases: str) -> float:
        """Return the seconds that the host needs to launch the kernels of the given `phases` of a step."""
        return self.launch_seconds * sum(report.launches.get(phase, 0) for phase in phases)

    def compute_seconds(self, report: RankReport, dtype: str, *phases: str) -> float:
        """Return the seconds of computation in the given `phases` of a step; without `phases`, in the whole step.

        In each phase, the host launches kernels while the device computes. The slower of the two determines the time.
        """
        return sum(
            max(self.device_seconds(report, dtype, phase), self.launch_seconds_of(report, phase))
            for phase in phases or PHASES
        )

    def communication_seconds(self, report: RankReport) -> float:
        """Return the seconds that all transfers between ranks take, one after the other."""
        return sum(self.transfer_seconds(transfer, size) for transfer, size in report.traffic.items())

    def exposed_seconds(self, report: RankReport, dtype: str, chunks: int = 1) -> float:
        """Return the seconds of those transfers between ranks that do not overlap with computation.

        Three kinds of transfers overlap, each for at most the time of the computation:

        - Messages between pipeline stages overlap with the computation of another chunk, if each stage has several
          `chunks`. `step_seconds` adds the messages of the bubble.
        - Reduce-scatters of gradients (`overlap_grad_reduce`) overlap with the backward pass of an update's last pack:
          two thirds of a pack's time. The bucket of gradients that is ready last does not overlap.
        - All-gathers of the policy's weights (`overlap_param_gather`) overlap with the forward pass of the first pack:
          one third of a pack's time. The bucket of weights that is needed first does not overlap. No all-gather
          overlaps if the policy generates or scores before training, because these phases need the weights. For the
          same reason, a critic's all-gathers do not overlap.
        """
        hidden = self._hidden_messages(report, dtype, chunks)
        for operation, phases, part in (
            ("reduce_scatter", (TRAINING,), 2 / 3),
            ("reduce_scatter", (CRITIC_TRAINING,), 2 / 3),
            ("all_gather", (TRAINING, UPDATE), 1 / 3),
        ):
            if operation in report.overlapped:
                room = part * self.compute_seconds(report, dtype, phases[0]) / report.packs
                hidden += min(self._but_one_bucket(report, operation, phases), room)
        return self.communication_seconds(report) - hidden

    def _hidden_messages(self, report: RankReport, dtype: str, chunks: int) -> float:
        """Return the seconds for which messages between pipeline stages overlap with computation."""
        if chunks == 1:
            return 0.0
        sent = sum(self.transfer_seconds(t, size) for t, size in report.traffic.items() if t.operation in MESSAGES)
        return min(sent, self.device_seconds(report, dtype, *OF_PACKS))

    def _but_one_bucket(self, report: RankReport, operation: str, phases: Sequence[str]) -> float:
        """Return the seconds of a collective on weights or gradients, without one bucket of each update.

        Each call of the collective transfers one bucket.
        """
        chosen = [t for t in report.traffic if t.of_state and t.operation == operation and t.phase in phases]
        buckets = sum(report.calls[transfer] for transfer in chosen)
        seconds = sum(self.transfer_seconds(transfer, report.traffic[transfer]) for transfer in chosen)
        return seconds * (1 - report.updates / buckets) if buckets else 0.0

    def host_seconds(self, report: RankReport) -> float:
        """Return the seconds of those transfers between host and device for which the device waits.

        These transfers are caused by `optimizer.offload`, `critic.offload`, and a reference that is swapped with the
        policy.
        """
        return report.host_bytes / (self.host_bytes_per_second * self.transfer_efficiency)

    def step_seconds(self, reports: Sequence[RankReport], dtype: str, stages: int, chunks: int) -> float:
        """Return the seconds of a step on the slowest pipeline stage, including the bubble of the (1F1B) pipeline.

        The bubble takes (stages − 1) / (packs × chunks) of the time for all packs. In the bubble, messages between
        stages do not overlap with computation. All replicas wait for the replica with the most work, so the computation
        time of the simulated replica is scaled to that work.

        Args:
            reports: reports of ranks that have rows of the batch.
            stages: number of pipeline stages.
            chunks: number of model chunks of each stage.
        """
        bubble = (stages - 1) / (max(report.packs for report in reports) * chunks)
        return max(self._rank_seconds(report, dtype, bubble, chunks) for report in reports)

    def _rank_seconds(self, report: RankReport, dtype: str, bubble: float, chunks: int) -> float:
        own, most = report.work
        transfers = sum(self.transfer_seconds(kind, size) for kind, size in report.traffic.items() if not kind.of_state)
        hidden = self._hidden_messages(report, dtype, chunks)
        of_packs = max(
            most / own * self.device_seconds(report, dtype, *OF_PACKS) + transfers - hidden,
            most / own * self.launch_seconds_of(report, *OF_PACKS),
        )
        of_state = self.exposed_seconds(report, dtype) - transfers
        once = of_state + self.compute_seconds(report, dtype, *UPDATES) + self.host_seconds(report)
        return of_packs + bubble * (of_packs + hidden) + once

    def utilization(self, model_flops: float, seconds: float, world_size: int, dtype: str) -> float:
        """Return the model FLOPs utilization: `model_flops` as a fraction of what all GPUs could compute in `seconds`.

        Args:
            model_flops: operations of training, without recomputation and scoring.
        """
        return model_flops / (seconds * world_size * self.flops_per_second[dtype])

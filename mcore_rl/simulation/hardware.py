"""A model of the time that a rank's operations and transfers take, with one efficiency for each kind of work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from mcore_rl.config import read_yaml
from mcore_rl.errors import UserError
from mcore_rl.simulation.counters import Transfer
from mcore_rl.simulation.rank import CRITIC_TRAINING, TRAINING, UPDATE
from mcore_rl.simulation.step import RankReport

Efficiency = Annotated[float, Field(gt=0, le=1)]
PUBLISHED = Path(__file__).parent / "hardware.yaml"


class Hardware(BaseModel):
    """A kind of GPU and its nodes.

    flops_per_second: peak of dense products, by dtype.
    node_bytes_per_second, network_bytes_per_second: bandwidth of a GPU in one direction, inside its node and across
        nodes.
    host_bytes_per_second: bandwidth between a GPU and its host.

    Efficiencies are relative to these peaks.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    memory_bytes: PositiveFloat
    flops_per_second: dict[str, PositiveFloat]
    gpus_per_node: PositiveInt
    node_bytes_per_second: PositiveFloat
    network_bytes_per_second: PositiveFloat
    host_bytes_per_second: PositiveFloat = 32.0e9  # PCIe 4 × 16, the slowest of the published kinds
    product_efficiency: Efficiency
    attention_efficiency: Efficiency
    transfer_efficiency: Efficiency

    @classmethod
    def load(cls, name: str) -> Hardware:
        """Return a published kind by name, or `FILE:NAME` from a file like `hardware.yaml`.

        Raises:
            UserError: the kind does not exist, or a value is missing.
        """
        file, _, kind = name.rpartition(":")
        kinds = {str(key): value for key, value in read_yaml(Path(file) if file else PUBLISHED).items()}
        if kind not in kinds:
            there = f"there are {', '.join(sorted(kinds))}" if kinds else "there are none in it"
            raise UserError(f"--hardware {name}: {there}; or write FILE:NAME")
        if not isinstance(kinds[kind], dict):
            raise UserError(f"--hardware {name}: must be a mapping, as in {PUBLISHED}, not {kinds[kind]!r}")
        try:
            return cls.model_validate(kinds[kind])
        except ValidationError as error:
            first = error.errors()[0]
            raise UserError(f"--hardware {name}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None

    def crosses_nodes(self, transfer: Transfer) -> bool:
        return len({rank // self.gpus_per_node for rank in transfer.ranks}) > 1

    def transfer_seconds(self, transfer: Transfer, size: int) -> float:
        """Return the seconds of a transfer by rings.

        With n ranks, a gather or scatter sends (n − 1)/n of the bytes, an all-reduce twice that, and a message all
        bytes once.
        """
        parts = len(transfer.ranks)
        share = {"all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0, "all_reduce": 2.0}
        sent = size * share[transfer.operation] * (parts - 1) / parts if transfer.operation in share else size
        link = self.network_bytes_per_second if self.crosses_nodes(transfer) else self.node_bytes_per_second
        return sent / (link * self.transfer_efficiency)

    def compute_seconds(self, report: RankReport, dtype: str, *phases: str) -> float:
        """Return the seconds of computation in these phases, or in the whole step."""
        peak, chosen = self.flops_per_second[dtype], phases or report.products.keys() | report.attention.keys()
        products, attention = (sum(of.get(name, 0) for name in chosen) for of in (report.products, report.attention))
        return products / (peak * self.product_efficiency) + attention / (peak * self.attention_efficiency)

    def communication_seconds(self, report: RankReport) -> float:
        """Return the seconds of all transfers between ranks, one after the other."""
        return sum(self.transfer_seconds(transfer, size) for transfer, size in report.traffic.items())

    def exposed_seconds(self, report: RankReport, dtype: str) -> float:
        """Return the seconds of transfers between ranks that computation does not hide.

        Two kinds of transfers are hidden if their options are set. The reduce-scatters of gradients
        (`overlap_grad_reduce`) overlap with the backward pass of an update's last pack, two thirds of a pack's time.
        The all-gathers of weights (`overlap_param_gather`) overlap with the forward pass of the first pack, one third
        of a pack's time, unless the policy generates or scores before training, which needs the weights.

        At most this time is hidden, and one bucket of each kind is exposed: the gradients that are ready last, and the
        weights that are needed first. All other transfers are exposed, including a critic's weights, because the critic
        computes values before it is trained.
        """
        hidden = 0.0
        for operation, phases, part in (
            ("reduce_scatter", (TRAINING,), 2 / 3),
            ("reduce_scatter", (CRITIC_TRAINING,), 2 / 3),
            ("all_gather", (TRAINING, UPDATE), 1 / 3),
        ):
            if operation in report.overlapped:
                room = part * self.compute_seconds(report, dtype, phases[0]) / report.packs
                hidden += min(self._but_one_bucket(report, operation, phases), room)
        return self.communication_seconds(report) - hidden

    def _but_one_bucket(self, report: RankReport, operation: str, phases: Sequence[str]) -> float:
        """Return the seconds of an operation on weights or gradients, without one of its buckets in every update."""
        chosen = [t for t in report.traffic if t.of_state and t.operation == operation and t.phase in phases]
        buckets = sum(report.calls[transfer] for transfer in chosen)
        seconds = sum(self.transfer_seconds(transfer, report.traffic[transfer]) for transfer in chosen)
        return seconds * (1 - report.updates / buckets) if buckets else 0.0

    def host_seconds(self, report: RankReport) -> float:
        """Return the seconds of transfers from and to the host, for which the device waits (`optimizer.offload`,
        `critic.offload`, a reference that is swapped with the policy)."""
        return report.host_bytes / (self.host_bytes_per_second * self.transfer_efficiency)

    def step_seconds(self, reports: Sequence[RankReport], dtype: str, stages: int, chunks: int) -> float:
        """Return the seconds of the slowest stage, with the bubble of a (1F1B, interleaved) pipeline.

        The bubble is (stages − 1) / (packs × chunks) of the time spent on packs. All replicas wait for the replica with
        the most work; the computation time of the simulated replica is scaled accordingly.

        Args:
            reports: reports of ranks that have rows of the batch.
        """
        bubble = (stages - 1) / (max(report.packs for report in reports) * chunks)
        return max(self._rank_seconds(report, dtype, bubble) for report in reports)

    def _rank_seconds(self, report: RankReport, dtype: str, bubble: float) -> float:
        own, most = report.work
        transfers = sum(self.transfer_seconds(kind, size) for kind, size in report.traffic.items() if not kind.of_state)
        of_packs = most / own * self.compute_seconds(report, dtype) + transfers
        once = self.exposed_seconds(report, dtype) - transfers + self.host_seconds(report)
        return of_packs * (1 + bubble) + once

    def utilization(self, model_flops: float, seconds: float, world_size: int, dtype: str) -> float:
        """Return the model FLOPs of training (without recomputation and scoring) as a fraction of the peak of all
        GPUs."""
        return model_flops / (seconds * world_size * self.flops_per_second[dtype])

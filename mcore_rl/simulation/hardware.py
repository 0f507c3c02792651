"""From what a rank multiplies and sends to how long it takes: a model with one efficiency for each kind of work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, ValidationError

from mcore_rl.config import read_yaml
from mcore_rl.errors import UserError
from mcore_rl.simulation.step import RankReport
from mcore_rl.simulation.traffic import Transfer

PUBLISHED = Path(__file__).parent / "hardware.yaml"


class Hardware(BaseModel):
    """A kind of GPU in its nodes.

    flops_per_second: peak of dense products by dtype. node_bytes_per_second, network_bytes_per_second: of a GPU, in one
    direction, inside its node and across nodes. Efficiencies are of these peaks.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    memory_bytes: PositiveFloat
    flops_per_second: dict[str, PositiveFloat]
    gpus_per_node: PositiveInt
    node_bytes_per_second: PositiveFloat
    network_bytes_per_second: PositiveFloat
    product_efficiency: PositiveFloat
    attention_efficiency: PositiveFloat
    transfer_efficiency: PositiveFloat

    @classmethod
    def load(cls, name: str) -> Hardware:
        """A published kind by its name, or `FILE:NAME` of a file like `hardware.yaml`.

        Raises:
            UserError: there is none, or it lacks something.
        """
        file, _, kind = name.rpartition(":")
        kinds = read_yaml(Path(file) if file else PUBLISHED)
        if kind not in kinds:
            raise UserError(f"--hardware {name}: there are {', '.join(sorted(kinds))}; or write FILE:NAME")
        try:
            return cls.model_validate(kinds[kind])
        except ValidationError as error:
            first = error.errors()[0]
            raise UserError(f"--hardware {name}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None

    def crosses_nodes(self, transfer: Transfer) -> bool:
        return len({rank // self.gpus_per_node for rank in transfer.ranks}) > 1

    def transfer_seconds(self, transfer: Transfer, size: int) -> float:
        """By rings: a gather or scatter sends all but the own part, an all-reduce twice that; a message goes once."""
        parts = len(transfer.ranks)
        share = {"all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0, "all_reduce": 2.0}
        sent = size * share[transfer.operation] * (parts - 1) / parts if transfer.operation in share else size
        link = self.network_bytes_per_second if self.crosses_nodes(transfer) else self.node_bytes_per_second
        return sent / (link * self.transfer_efficiency)

    def compute_seconds(self, report: RankReport, dtype: str) -> float:
        peak = self.flops_per_second[dtype]
        products, attention = sum(report.products.values()), sum(report.attention.values())
        return products / (peak * self.product_efficiency) + attention / (peak * self.attention_efficiency)

    def communication_seconds(self, report: RankReport) -> float:
        """None of it is taken as hidden behind computation."""
        return sum(self.transfer_seconds(transfer, size) for transfer, size in report.traffic.items())

    def step_seconds(self, reports: Sequence[RankReport], dtype: str, stages: int, chunks: int) -> float:
        """Of the slowest stage, with the bubble of a (1F1B, interleaved) pipeline: (stages − 1) / (packs × chunks)."""
        slowest = max(self.compute_seconds(r, dtype) + self.communication_seconds(r) for r in reports)
        return slowest * (1 + (stages - 1) / (max(r.packs for r in reports) * chunks))

    def utilization(self, model_flops: float, seconds: float, world_size: int, dtype: str) -> float:
        """Model FLOPs of the training pass (recomputation and scoring not counted) over what all GPUs could do."""
        return model_flops / (seconds * world_size * self.flops_per_second[dtype])

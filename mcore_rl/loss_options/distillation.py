"""Of distillation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mcore_rl.loss_options.options import Bounds, LossOptions, option


@dataclass(frozen=True, kw_only=True)
class DistillationOptions(LossOptions):
    """What `DistillationLossFn` does."""

    kl_type: Literal["forward", "reverse", "mixed"] = option("forward")
    """forward: KL(teacher ‖ student); reverse: KL(student ‖ teacher); mixed: both, weighted."""
    mixed_kl_weight: Annotated[float, Bounds(ge=0)] = option(0.5)
    """Share of the forward KL where kl_type is mixed."""
    zero_outside_topk: bool = False
    """The student is not renormalised over the teacher's k tokens; outside them the teacher's probability is 0."""

    def check(self) -> None:
        self.require(self.mixed_kl_weight <= 1, f"mixed_kl_weight must be between 0 and 1, got {self.mixed_kl_weight}")

    @property
    def forward_share(self) -> float:
        return {"forward": 1.0, "reverse": 0.0, "mixed": self.mixed_kl_weight}[self.kl_type]

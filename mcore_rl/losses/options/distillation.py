"""Of distillation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mcore_rl.losses.options.options import Bounds, LossOptions, Positive, option


@dataclass(frozen=True, kw_only=True)
class DistillationOptions(LossOptions):
    """What `DistillationLossFn` and `WholeVocabularyDistillationLossFn` do."""

    kl_type: Literal["forward", "reverse", "mixed", "js"] = option("forward")
    """forward: KL(teacher ‖ student); reverse: KL(student ‖ teacher); mixed: both, weighted; js: generalised
    Jensen–Shannon, β·KL(teacher ‖ m) + (1 − β)·KL(student ‖ m) with m = β·teacher + (1 − β)·student
    (arXiv:2306.13649, eq. 1)."""
    mixed_kl_weight: Annotated[float, Bounds(ge=0)] = option(0.5)
    """Share of the forward KL where kl_type is mixed."""
    js_beta: Annotated[float, Bounds(gt=0, lt=1)] = 0.5
    """β where kl_type is js."""
    loss_temperature: Positive = 1.0
    """The logits of both are divided by it before they are compared."""
    zero_outside_topk: bool = False
    """The student is not renormalised over the teacher's k tokens; outside them the teacher's probability is 0."""

    def check(self) -> None:
        self.require(self.mixed_kl_weight <= 1, f"mixed_kl_weight must be between 0 and 1, got {self.mixed_kl_weight}")
        self.require(
            self.kl_type == "js" or self.js_beta == 0.5, f"js_beta applies to kl_type=js, not to {self.kl_type}"
        )

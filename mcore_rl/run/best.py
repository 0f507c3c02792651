"""The best validation so far: which checkpoint it is, and whether to go on after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_rl.config import TrainingConfig
from mcore_rl.errors import UserError
from mcore_rl.utils.console import Say, silent


@dataclass
class BestValidation:
    """
    metric: of the validations, without their prefix `validation_`.
    data: fingerprint of what is validated on.
    patience: so many validations on end that are no better are enough; None: never.
    step: of the best so far; 0 before the first, and as long as none is better than that before training.
    waited: validations since then.
    """

    metric: str
    highest: bool
    data: str
    patience: int | None
    step: int = 0
    value: float | None = None
    waited: int = 0

    @classmethod
    def of(
        cls, config: TrainingConfig, state: Mapping[str, Any], data: str, say: Say = silent
    ) -> BestValidation | None:
        """As the configuration asks for it, going on from a checkpoint's state; None if it does not.

        What was measured otherwise is no measure for what comes, and forgotten.
        """
        asked = config.checkpoint
        if asked.best_metric is None:
            return None
        best = cls(asked.best_metric, asked.best_is_highest is True, data, config.trainer.early_stopping_patience)
        earlier = state.get("best", {})
        if earlier.get("data", data) != data:
            say("data.validation is other data than before: the best validation so far is forgotten")
        elif (earlier.get("metric"), earlier.get("highest")) == (best.metric, best.highest):
            best.step, best.value, best.waited = earlier["step"], earlier["value"], earlier["waited"]
        return best

    def is_bettered(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Take a validation's metrics; whether it is the best so far, which a NaN never is.

        Raises:
            UserError: the metric is not among them.
        """
        if f"validation_{self.metric}" not in metrics:
            known = sorted(name.removeprefix("validation_") for name in metrics if name.startswith("validation_"))
            raise UserError(f"checkpoint.best_metric={self.metric}: validations have {', '.join(known)}")
        value = metrics[f"validation_{self.metric}"]
        better = value == value and (self.value is None or (value > self.value if self.highest else value < self.value))
        if better:
            self.step, self.value, self.waited = step, value, 0
        else:
            self.waited += 1
        return better

    @property
    def is_exhausted(self) -> bool:
        """Whether training has waited long enough for a better one."""
        return self.patience is not None and self.waited >= self.patience

    def forget(self) -> None:
        """Begin anew: the best so far is another run's."""
        self.step, self.value, self.waited = 0, None, 0

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "metric": self.metric,
            "highest": self.highest,
            "data": self.data,
            "step": self.step,
            "value": self.value,
            "waited": self.waited,
        }

    def __str__(self) -> str:
        if self.value is None:
            return f"best validation: none has a {self.metric}"
        if self.step == 0:
            return f"best validation: none has a better {self.metric} than {self.value:.4g} before the first step"
        return f"best validation: {self.metric} {self.value:.4g} at step {self.step}"

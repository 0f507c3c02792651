"""The section about checkpoints and exports."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import model_validator

from mcore_rl.config.base import AboveZero, Name, Positive, Section
from mcore_rl.utils.hub import is_repository_name


class CheckpointConfig(Section):
    """When checkpoints are written, which stay, and where a run begins."""

    save_interval: Positive | None = None
    """Steps between checkpoints; the end of the run always saves one."""
    save_minutes: AboveZero | None = 30.0
    """Minutes after which one is saved in any case; it goes when a later one is there, unless `keep_last` keeps it."""
    keep_last: Positive | None = None
    """How many of the newest checkpoints stay; all if not given."""
    keep_every: Positive | None = None
    """Checkpoints at multiples of this many steps stay whatever `keep_last` says."""
    on_failure: Literal["stop", "continue"] = "stop"
    """Whether training goes on when a checkpoint cannot be written."""
    asynchronous: bool = True
    """Whether training goes on while a checkpoint is being written."""
    timeout_seconds: Positive = 1800
    """Writing that takes longer is a failure."""
    allow_partial: bool = False
    """Whether to go on from a checkpoint that lacks optimizer, schedule, random states or data position."""
    resume: str = "auto"
    """auto: the newest checkpoint in output_dir; none: start afresh; or a directory, to begin from if there is
    no checkpoint in output_dir yet, or to go back to if it is one of them."""
    overwrite: bool = False
    """With resume=none: whether what an earlier run left in output_dir is removed; without it, that is refused."""
    best_metric: Name | None = None
    """A metric of the validations, as `loss` or, of one of several sets, `math/accuracy`: whenever it is better than
    ever before a checkpoint is saved, and retention keeps the best."""
    best_mode: Literal["min", "max"] | None = None
    """Whether the least or the greatest best_metric is the best; if not given, the least of losses and errors, the
    greatest of accuracies, rewards and margins."""
    export_best: bool = False
    """Export the weights of the best checkpoint instead of the last ones."""
    export_hf: bool = True
    """Whether the trained model is written to output_dir/hf at the end, and adapters, if any, to output_dir/adapter."""
    push_to_hub: Name | None = None
    """OWNER/NAME on the Hugging Face hub, to which what is in output_dir/hf is uploaded at the end; private, if it is
    new. Needs `hf auth login` or $HF_TOKEN; whether one may write there is found out before training."""

    @model_validator(mode="after")
    def _consistent(self) -> CheckpointConfig:
        if self.overwrite and self.resume != "none":
            raise ValueError("overwrite: removes an earlier run; it goes with resume=none alone")
        if self.keep_every is not None and self.keep_last is None:
            raise ValueError("keep_every: without keep_last all checkpoints stay; give both, or leave it out")
        if self.best_metric is None and (self.best_mode is not None or self.export_best):
            raise ValueError("best_mode, export_best: need best_metric")
        if self.best_metric is not None and self.best_is_highest is None:
            raise ValueError(f"best_mode: say whether the least (min) or the greatest (max) {self.best_metric} is best")
        if self.export_best and not self.export_hf:
            raise ValueError("export_best: nothing is exported with export_hf=false")
        if self.push_to_hub is not None and not is_repository_name(self.push_to_hub):
            raise ValueError(f"push_to_hub: must read OWNER/NAME, got {self.push_to_hub}")
        if self.push_to_hub is not None and not self.export_hf:
            raise ValueError("push_to_hub: nothing is exported with export_hf=false")
        return self

    @property
    def best_is_highest(self) -> bool | None:
        """Whether the greatest best_metric is the best; None where nobody has said so and its name does not tell."""
        return greatest_is_best(self.best_metric or "") if self.best_mode is None else self.best_mode == "max"


def greatest_is_best(metric: str) -> bool | None:
    """Whether more of a metric is better than less, as its name tells; None where it does not."""
    if metric.endswith(("loss", "error")):
        return False
    return True if re.search("accuracy|reward|margin|explained_variance", metric) else None

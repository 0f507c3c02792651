"""Parallel layouts as people write them down: `tp2 cp2 sp`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.config import TrainingConfig
from mcore_rl.config.pipeline import layers_of_layout
from mcore_rl.errors import UserError

SIZES = ("tp", "pp", "cp", "dp", "ep", "vpp")
FLAGS = ("sp", "packing", "prefix")
SPLIT = ("first", "last", "stages")


@dataclass(frozen=True, order=True)
class Layout:
    """Sizes of the parallel dimensions, and how microbatches are made."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    sp: bool = False
    packing: bool = True
    tokens_per_pack: int | None = None
    ep: int = 1
    etp: int = 0
    """Of each expert; as `tp` if 0."""
    vpp: int = 1
    first: int | None = None
    """Layers of the first pipeline stage."""
    last: int | None = None
    """Layers of the last pipeline stage."""
    stages: str | None = None
    """Layers of all of them, as `parallel.pipeline_model_parallel_layout` has them."""
    prefix: bool = False
    """Common beginnings stand in a pack once."""

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def is_possible(self) -> bool:
        """Whether the sizes go together."""
        etp = self.etp or self.tp
        if self.stages and (self.first or self.last or len(layers_of_layout(self.stages)) != self.pp * self.vpp):
            return False
        return (
            (not self.sp or self.tp > 1)
            and (not self.prefix or self.packing)
            and (self.pp > 1 or (self.vpp == 1 and not (self.first or self.last or self.stages)))
            and (self.ep > 1 or etp == self.tp)
            and not self.world_size % (self.pp * self.ep * etp)
        )

    def __str__(self) -> str:
        sizes = [f"{name}{getattr(self, name)}" for name in SIZES if getattr(self, name) > 1]
        sizes += [f"etp{self.etp}"] * bool(self.etp) + [f"first{self.first}"] * bool(self.first)
        sizes += [f"last{self.last}"] * bool(self.last) + [str(self.stages)] * bool(self.stages)
        extras = (
            ["sp"] * self.sp
            + ["prefix"] * self.prefix
            + ["unpacked"] * (not self.packing)
            + ["small packs"] * bool(self.tokens_per_pack)
        )
        return " ".join([*sizes, *extras]) or "one process"

    @property
    def parallel_values(self) -> dict[str, Any]:
        """Every key of the section `parallel` that says a layout."""
        return {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vpp if self.vpp > 1 else None,
            "num_layers_in_first_pipeline_stage": self.first,
            "num_layers_in_last_pipeline_stage": self.last,
            "account_for_embedding_in_pipeline_split": False,
            "account_for_loss_in_pipeline_split": False,
            "pipeline_model_parallel_layout": self.stages,
            "context_parallel_size": self.cp,
            "sequence_parallel": self.sp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp or None,
        }

    def apply(self, config: TrainingConfig) -> TrainingConfig:
        """`config` under this layout."""
        values = config.model_dump()
        values["parallel"].update(self.parallel_values)
        values["batch"].update(packing=self.packing, tokens_per_pack=self.tokens_per_pack, share_prefixes=self.prefix)
        if self.packing:
            values["batch"]["micro_batch_size"] = 1
        if not self.prefix:
            del values["batch"]["min_shared_tokens"]
        return type(config).model_validate(values)


def parse_layouts(choices: Sequence[str]) -> list[Layout]:
    """`["tp=1,2", "cp=1,2"]` → every combination; keys tp, pp, vpp, cp, dp, ep, etp, sp, packing and prefix (0 or 1),
    and of a pipeline first, last (layers of these stages) and stages (what each has, as `E|t*4L`).

    Raises:
        UserError: not of that form.
    """
    known = {*SIZES, "etp", *FLAGS, *SPLIT}
    values: dict[str, list[Any]] = {}
    for choice in choices:
        key, _, text = choice.partition("=")
        if key == "stages":
            values[key] = text.split(",")
            try:
                for layout in values[key]:
                    layers_of_layout(layout)
            except ValueError as error:
                raise UserError(f"--layouts {choice!r}: {error}") from None
            continue
        if key not in known or not all(part.isdecimal() for part in text.split(",")):
            raise UserError(f"--layouts {choice!r}: write KEY=1,2 with KEY one of {', '.join(sorted(known))}")
        values[key] = [int(part) for part in text.split(",")]
        if key in FLAGS and not {*values[key]} <= {0, 1}:
            raise UserError(f"--layouts {choice!r}: {key} is 0 or 1")
        if key not in FLAGS and 0 in values[key]:
            raise UserError(f"--layouts {choice!r}: sizes are 1 or more")
    combinations = itertools.product(*values.values())
    layouts = [Layout(**dict(zip(values, combination, strict=True))) for combination in combinations]
    return sorted(
        {layout for layout in layouts if layout.is_possible}, key=lambda layout: (layout.world_size, str(layout))
    )


def own_split(config: TrainingConfig, layers: int) -> Layout | None:
    """The configuration's own pipeline of a model of so many layers; None if it has none, or an even one.

    Raises:
        UserError: its layers are others.
    """
    parallel = config.parallel
    if not parallel.is_uneven:
        return None
    stages = "|".join("t" * count for count in parallel.layers_of_chunks(layers))
    return Layout(pp=parallel.pipeline_model_parallel_size, vpp=parallel.chunks_per_stage, stages=f"E{stages}L")

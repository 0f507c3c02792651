"""Low-rank adapters (LoRA, arXiv:2106.09685) as tensors: which there are, how they are cut, what they begin from.

Megatron fuses projections, PEFT adapts each of them. Of a fused layer every projection keeps an adapter of its own:
their A stand one above the other, and B has the rows of the fused weight, so that it is cut and put together by the
table that does so with the weight.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from collections.abc import Mapping as Dictionary
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_rl.config import LoRAConfig
from mcore_rl.errors import UserError
from mcore_rl.models.megatron.families import Family
from mcore_rl.models.megatron.families.mixture import Mixture
from mcore_rl.models.megatron.mapping import (
    Columns,
    GateUp,
    Mapping,
    Part,
    QueryKeyValue,
    Replicated,
    Shape,
    Stacked,
    TensorSource,
)
from mcore_rl.models.megatron.peft_directory import NAME, PEFTDirectory

DEFAULT_RANK, DEFAULT_ALPHA = 16, 32.0
NOWHERE = ""
"""The name of rows of B whose projection has no adapter: zeros that are never trained."""


@dataclass(frozen=True)
class LoRA:
    """The adapters of a whole model.

    table: every A and B by its Megatron name, in the model's order; parts are named as in PEFT's files.
    source: the values that they begin from.
    """

    rank: int
    alpha: float
    dropout: float
    target_modules: tuple[str, ...]
    table: Dictionary[str, Mapping]
    source: TensorSource

    @property
    def scale(self) -> float:
        """Of B · A."""
        return self.alpha / self.rank

    def __str__(self) -> str:
        targets = ", ".join(self.target_modules)
        return f"rank {self.rank}, alpha {self.alpha:g}, on {targets}; {self.num_parameters():,} parameters are trained"

    @property
    def settings(self) -> dict[str, Any]:
        """What PEFT's configuration says of them."""
        modules = sorted(self.target_modules)
        return {"r": self.rank, "lora_alpha": self.alpha, "lora_dropout": self.dropout, "target_modules": modules}

    def num_parameters(self) -> int:
        """Of the whole model's adapters."""
        return sum(math.prod(shape) for shape in shapes_of(self.table).values())


def lora_of(config: LoRAConfig, family: Family, seed: int = 0) -> LoRA:
    """The adapters that a configuration asks for.

    Raises:
        UserError: a target that the model does not have, or a directory that does not fit.
    """
    directory = None if config.path is None else PEFTDirectory(config.path)
    rank, alpha, targets = config.rank, config.alpha, config.target_modules
    if directory is not None:
        for key, given, found in (
            ("rank", rank, directory.rank),
            ("alpha", alpha, directory.alpha),
            ("target_modules", {*targets} or None, {*directory.target_modules}),
        ):
            if given is not None and given != found:
                raise UserError(f"model.lora.{key}={given}: model.lora.path={config.path} has {found}; leave it out")
        rank, alpha, targets = directory.rank, directory.alpha, directory.target_modules
    key = "target_modules" if directory is None else f"path={config.path}"
    rank, known = rank or DEFAULT_RANK, adaptable_modules(family)
    for target in targets:
        if target not in known:
            experts = "; of mixtures attention alone has adapters" if isinstance(family, Mixture) else ""
            raise UserError(
                f"model.lora.{key}: {family.model_type} has no {target} to adapt; there are {', '.join(known)}{experts}"
            )
    targets = tuple(name for name in known if name in targets or not targets)
    table = {
        adapter.megatron: adapter
        for mapping in family.table.values()
        if _is_adaptable(mapping, family)
        for adapter in _adapters_of(mapping, targets, rank)
    }
    source: TensorSource = InitialValues(shapes_of(table), seed)
    if directory is not None:
        directory.check(shapes_of(table))
        source = directory
    return LoRA(rank, alpha or DEFAULT_ALPHA, config.dropout, targets, table, OrZeros(source, rank))


def shapes_of(table: Dictionary[str, Mapping]) -> dict[str, Shape]:
    """Names and shapes of the tensors of a PEFT file."""
    shapes: dict[str, Shape] = {}
    for mapping in table.values():
        for part in mapping.parts:
            rows, *rest = part.shape
            shapes[part.name] = (max(part.first + rows, shapes.get(part.name, (0,))[0]), *rest)
    shapes.pop(NOWHERE, None)
    return shapes


def adaptable_modules(family: Family) -> tuple[str, ...]:
    """Names of the projections that can have adapters."""
    found = (
        _module(part) for mapping in family.table.values() if _is_adaptable(mapping, family) for part in mapping.parts
    )
    return tuple(dict.fromkeys(module.rpartition(".")[2] for module in found))


def _is_adaptable(mapping: Mapping, family: Family) -> bool:
    """A projection of attention, or of the MLP where the model has no experts."""
    is_linear = isinstance(mapping.kind, QueryKeyValue | GateUp | Columns) and len(mapping.parts[0].shape) == 2
    return is_linear and not (isinstance(family, Mixture) and ".mlp." in mapping.megatron)


def _module(part: Part) -> str:
    return part.name.removesuffix(".weight")


def _adapters_of(mapping: Mapping, targets: tuple[str, ...], rank: int) -> Iterator[Mapping]:
    """A and B of one linear layer; none if none of its projections is a target."""
    modules = [_module(part) for part in mapping.parts]
    targeted = [m for m in dict.fromkeys(modules) if m.rpartition(".")[2] in targets]
    if not targeted:
        return
    ours, columns = mapping.megatron.removesuffix("weight"), mapping.parts[0].shape[1]
    row_parallel = isinstance(mapping.kind, Columns)
    a = tuple(Part(NAME.format(module=m, matrix="A"), (rank, columns)) for m in targeted)
    b = tuple(
        Part(NAME.format(module=m, matrix="B") if m in targeted else NOWHERE, (part.shape[0], rank), part.first)
        for m, part in zip(modules, mapping.parts, strict=True)
    )
    a_kind = Columns() if row_parallel else Stacked((rank,) * len(a))
    yield Mapping(f"{ours}adapter.lora_A", a, a_kind, is_float32=True)
    yield Mapping(f"{ours}adapter.lora_B", b, Replicated() if row_parallel else mapping.kind, is_float32=True)


class InitialValues:
    """PEFT's: A uniform within ±1/√columns (Kaiming's with a = √5), B zero.

    Each tensor is drawn by a generator of its own, so that the values are the same under every layout.
    """

    def __init__(self, shapes: Dictionary[str, Shape], seed: int) -> None:
        self.shapes, self.seed = shapes, seed

    def read(self, name: str, rows: slice = slice(None), columns: slice | None = None) -> Tensor:
        """`tensor[rows, columns]`."""
        if ".lora_B." in name:
            return torch.zeros(self.shapes[name])[rows, columns or slice(None)]
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        bound = self.shapes[name][1] ** -0.5
        whole = torch.rand(self.shapes[name], generator=generator) * (2 * bound) - bound
        return whole[rows, columns or slice(None)]


@dataclass(frozen=True)
class OrZeros:
    """`source`, and zeros for the rows of projections that have no adapter."""

    source: TensorSource
    rank: int

    def read(self, name: str, rows: slice = slice(None), columns: slice | None = None) -> Tensor:
        """`tensor[rows, columns]`."""
        if name == NOWHERE:
            return torch.zeros(rows.stop - rows.start, self.rank)
        return self.source.read(name, rows, columns)


class Owners:
    """In place of values: which of `names` a row belongs to, −1 for none."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def read(self, name: str, rows: slice = slice(None), columns: slice | None = None) -> Tensor:
        """[rows, 1]."""
        return torch.full((rows.stop - rows.start, 1), self.names.index(name) if name in self.names else -1)

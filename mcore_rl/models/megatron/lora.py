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
from mcore_rl.models.megatron.expert_adapters import (
    DOWN,
    GATE_UP,
    MODULE,
    SingleExperts,
    is_expert_target,
    module_of,
    of_expert,
    stacked_shapes,
)
from mcore_rl.models.megatron.families import Family
from mcore_rl.models.megatron.families.mixture import Mixture
from mcore_rl.models.megatron.peft_directory import NAME, PEFTDirectory
from mcore_rl.models.megatron.weight_mapping import (
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
        """The factor of B · A."""
        return self.alpha / self.rank

    def __str__(self) -> str:
        targets = ", ".join(self.target_modules)
        return f"rank {self.rank}, alpha {self.alpha:g}, on {targets}; {self.num_parameters():,} parameters are trained"

    @property
    def settings(self) -> dict[str, Any]:
        """Return PEFT's configuration of the adapters."""
        modules = sorted(name for name in self.target_modules if not is_expert_target(name))
        settings = {"r": self.rank, "lora_alpha": self.alpha, "lora_dropout": self.dropout, "target_modules": modules}
        if experts := sorted(name for name in self.target_modules if is_expert_target(name)):
            settings["target_parameters"] = [MODULE + name for name in experts]
        return settings

    def num_parameters(self) -> int:
        """The parameters of the whole model's adapters."""
        return sum(math.prod(shape) for shape in shapes_of(self.table).values())

    def active_parameters(self, family: Family) -> float:
        """Return the parameters of the adapters that a token goes through."""
        share = family.experts.topk / family.experts.count if isinstance(family, Mixture) else 1.0
        shapes = ((mapping.is_expert, _part_shapes({name: mapping})) for name, mapping in self.table.items())
        sizes = ((is_expert, sum(math.prod(shape) for shape in found.values())) for is_expert, found in shapes)
        return sum(size * share if is_expert else size for is_expert, size in sizes)


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
            experts = "; of mixtures attention and routed experts have adapters" if isinstance(family, Mixture) else ""
            raise UserError(
                f"model.lora.{key}: {family.model_type} has no {target} to adapt; there are {', '.join(known)}{experts}"
            )
    targets = tuple(name for name in known if name in targets or not (targets or is_expert_target(name)))
    if config.dropout and (adapted := [name for name in targets if is_expert_target(name)]):
        raise UserError(
            f"model.lora.dropout: is not for {', '.join(adapted)}, which PEFT adapts as parameters; leave it out"
        )
    table = {
        adapter.megatron: adapter
        for mapping in family.table.values()
        if _is_adaptable(mapping, family)
        for adapter in _adapters_of(mapping, family, targets, rank)
    }
    source: TensorSource = InitialValues(_part_shapes(table), seed)
    if directory is not None:
        directory.check(shapes_of(table))
        source = SingleExperts(directory, rank)
    return LoRA(rank, alpha or DEFAULT_ALPHA, config.dropout, targets, table, OrZeros(source, rank))


def shapes_of(table: Dictionary[str, Mapping]) -> dict[str, Shape]:
    """Names and shapes of the tensors of a PEFT file."""
    return stacked_shapes(_part_shapes(table))


def _part_shapes(table: Dictionary[str, Mapping]) -> dict[str, Shape]:
    """The same, those of each expert by themselves."""
    shapes: dict[str, Shape] = {}
    for mapping in table.values():
        for part in mapping.parts:
            rows, *rest = part.shape
            shapes[part.name] = (max(part.first + rows, shapes.get(part.name, (0,))[0]), *rest)
    shapes.pop(NOWHERE, None)
    return shapes


def adaptable_modules(family: Family) -> tuple[str, ...]:
    """Names of the projections that can have adapters."""
    adaptable = (mapping for mapping in family.table.values() if _is_adaptable(mapping, family))
    return tuple(dict.fromkeys(target for mapping in adaptable for target, *_ in _modules_of(mapping, ())))


def _is_adaptable(mapping: Mapping, family: Family) -> bool:
    """A projection of attention, of a routed expert, or of the MLP where the model has no experts."""
    is_linear = isinstance(mapping.kind, QueryKeyValue | GateUp | Columns) and len(mapping.parts[0].shape) == 2
    return is_linear and (mapping.is_expert or not (isinstance(family, Mixture) and ".mlp." in mapping.megatron))


def _modules_of(mapping: Mapping, targets: tuple[str, ...]) -> list[tuple[str, str, int]]:
    """Return for each part of a weight its target's name, PEFT's module, and the first row of its B there."""
    if not mapping.is_expert:
        modules = [(part.name.removesuffix(".weight"), part.first) for part in mapping.parts]
        return [(module.rpartition(".")[2], module, first) for module, first in modules]
    target = DOWN if isinstance(mapping.kind, Columns) else GATE_UP
    layer = mapping.parts[0].name.partition(".experts.")[0].rpartition(".")[0] + "."
    rows = mapping.parts[0].shape[0]
    return [(target, module_of(layer, target, targets), index * rows) for index in range(len(mapping.parts))]


def _name_of(module: str, matrix: str, mapping: Mapping, family: Family) -> str:
    """Return the name of A or B in PEFT's files; for an expert's, with its number."""
    name = NAME.format(module=module, matrix=matrix)
    if not mapping.is_expert:
        return name
    assert isinstance(family, Mixture)
    expert = int(mapping.megatron.partition(".experts.")[2].partition(".")[0])
    return of_expert(name, expert, family.experts.count)


def _adapters_of(mapping: Mapping, family: Family, targets: tuple[str, ...], rank: int) -> Iterator[Mapping]:
    """A and B of one linear layer; none if none of its projections is a target."""
    modules = _modules_of(mapping, targets)
    targeted = list(dict.fromkeys(module for target, module, _ in modules if target in targets))
    if not targeted:
        return
    ours, columns = mapping.megatron.removesuffix("weight"), mapping.parts[0].shape[1]
    row_parallel = isinstance(mapping.kind, Columns)
    a = tuple(Part(_name_of(m, "A", mapping, family), (rank, columns)) for m in targeted)
    b = tuple(
        Part(_name_of(m, "B", mapping, family) if m in targeted else NOWHERE, (part.shape[0], rank), first)
        for (_, m, first), part in zip(modules, mapping.parts, strict=True)
    )
    a_kind = Columns() if row_parallel else Stacked((rank,) * len(a))
    b_kind = Replicated() if row_parallel else mapping.kind
    yield Mapping(f"{ours}adapter.lora_A", a, a_kind, mapping.is_expert, is_float32=True)
    yield Mapping(f"{ours}adapter.lora_B", b, b_kind, mapping.is_expert, is_float32=True)


class InitialValues:
    """PEFT's: A uniform within ±1/√columns (Kaiming's with a = √5), B zero.

    Each tensor (of experts each expert's part) is drawn by a generator of its own, so that the values are the same
    under every layout.
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

"""The tensors of low-rank adapters (LoRA, arXiv:2106.09685), and adapter directories in PEFT's format."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Mapping as Dictionary
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mcore_rl.config import LoRAConfig
from mcore_rl.errors import UserError
from mcore_rl.models.megatron.families import Family
from mcore_rl.models.megatron.families.mixtures import Mixture
from mcore_rl.models.megatron.families.vision_language import HF_TOWER
from mcore_rl.models.megatron.layers.vision import VISION_TOWER
from mcore_rl.models.megatron.weight_mapping import (
    AlternatingGateUp,
    Columns,
    GateUp,
    InterleavedGateUp,
    Mapping,
    Part,
    Replicated,
    Rows,
    Shape,
    Stacked,
    TensorSource,
    tensor_shapes,
)
from mcore_rl.utils.files import replacing
from mcore_rl.utils.model_directory import copy_companions, digest_of_weights

TOWER_TARGETS = ("attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2")
"""Targets in the layers of the vision tower."""
GATE_UP, UP, DOWN = TARGETS = ("experts.gate_up_proj", "experts.up_proj", "experts.down_proj")
"""Names of the experts' parameters in transformers that can have adapters. Experts without gates have `UP`."""
ADAPTED_IN_MIXTURES = "; in mixtures, only attention and routed experts have adapters"
_OF_EXPERT = re.compile(r"^(.*)\[(\d+)/(\d+)\]$")


def is_expert_target(target: str) -> bool:
    return target in TARGETS


def module_of(experts: str, target: str, targets: Iterable[str]) -> str:
    """Return the name of the module that PEFT creates to adapt `target`, a parameter of all experts of a layer.

    If both parameters of the experts have adapters, PEFT's module for `GATE_UP` or `UP` is inside that for `DOWN`.

    Args:
        experts: name of the module with the experts' parameters in transformers.
        target: the parameter, one of `TARGETS`.
        targets: all targets of the adapters.
    """
    is_inner = target != DOWN and DOWN in targets
    return experts + (".base_layer" if is_inner else "")


def of_expert(name: str, expert: int, count: int) -> str:
    """Return the name of one expert's slice of the tensor `name`, which has the matrices of `count` experts."""
    return f"{name}[{expert}/{count}]"


def stacked_shapes(shapes: Dictionary[str, Shape]) -> dict[str, Shape]:
    """Convert the shapes of single experts' matrices to those of PEFT's tensors, which contain all experts of a layer.

    Other shapes are unchanged.
    """
    found: dict[str, Shape] = {}
    for name, (rows, columns) in shapes.items():
        if match := _OF_EXPERT.match(name):
            count = int(match[3])
            found[match[1]] = (rows * count, columns) if ".lora_A." in name else (rows, columns * count)
        else:
            found[name] = (rows, columns)
    return found


def stack_experts(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Join the matrices of single experts into PEFT's tensors. Each of PEFT's tensors contains all experts.

    A tensor is yielded as soon as its last expert has come. Other tensors are yielded unchanged.
    """
    waiting: dict[str, list[Tensor]] = {}
    for name, tensor in tensors:
        match = _OF_EXPERT.match(name)
        if match is None:
            yield name, tensor
            continue
        whole, expert, count = match[1], int(match[2]), int(match[3])
        held = waiting.setdefault(whole, [])
        assert len(held) == expert, f"{name} came after expert {len(held) - 1}"
        held.append(tensor)
        if len(held) == count:
            experts = waiting.pop(whole)
            yield whole, torch.cat(experts) if ".lora_A." in whole else torch.stack(experts, dim=-1).flatten(1)


@dataclass(frozen=True)
class SingleExperts:
    """Reads the matrices of single experts from PEFT's tensors. Each of these tensors contains all experts.

    source: source of PEFT's tensors. rank: rank of the adapters.
    """

    source: TensorSource
    rank: int

    def read(self, name: str, rows: slice = slice(None), columns: slice | None = None) -> Tensor:
        """Return `rows` and `columns` of the tensor `name`."""
        match = _OF_EXPERT.match(name)
        if match is None:
            return self.source.read(name, rows, columns)
        whole, expert, count = match[1], int(match[2]), int(match[3])
        if ".lora_A." in whole:
            start, stop, _ = rows.indices(self.rank)
            return self.source.read(whole, slice(expert * self.rank + start, expert * self.rank + stop), columns)
        return self.source.read(whole, rows)[:, expert::count][:, columns or slice(None)]


CONFIG_FILE, TENSORS_FILE, BASE_FILE = "adapter_config.json", "adapter_model.safetensors", "base_model.json"
"""Names of the files. The last file is not part of PEFT's format; it contains the digest of the base model's weights
(`digest_of_weights`)."""
NAME = "base_model.model.{module}.lora_{matrix}.weight"
"""Format of a tensor's name: `module` as in the Hugging Face model, `matrix` A or B."""

ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "use_rslora": (False,),
    "fan_in_fan_out": (False,),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "modules_to_save": ((), []),
    "layers_to_transform": ((), []),
    "lora_bias": (False,),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),  # others (PiSSA, OLoRA, …) change the base
    "alora_invocation_tokens": ((), []),
    "use_bdlora": (False,),
    "arrow_config": (),
    "kasa_config": (),
    "monteclora_config": (),
}
"""Supported values of configuration keys that change the adapter's computation; null is supported for all."""


class PEFTDirectory:
    """A PEFT adapter directory.

    Raises:
        UserError: the directory is not a PEFT adapter, or the adapter is of an unsupported kind.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            config = json.loads((path / CONFIG_FILE).read_bytes())
            self.rank, self.alpha = int(config["r"]), float(config["lora_alpha"])
            self.target_parameters = tuple(config.get("target_parameters") or ())
            self.base = str(config.get("base_model_name_or_path") or "")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"model.lora.path: {path} must be a PEFT adapter with {CONFIG_FILE} ({type(error).__name__}: {error})"
            ) from None
        for key, values in ONLY.items():
            if config.get(key) is not None and config[key] not in values:
                raise UserError(f"model.lora.path: {path / CONFIG_FILE}: {key}={config[key]!r} is not supported")
        if others := [name for name in self.target_parameters if not is_expert_target(_last_two(name))]:
            raise UserError(f"model.lora.path: {path / CONFIG_FILE}: target_parameters={others!r} is not supported")
        try:
            self._file = safe_open(path / TENSORS_FILE, framework="pt")
        except (OSError, SafetensorError) as error:
            raise UserError(f"model.lora.path: {path / TENSORS_FILE} cannot be read ({error})") from None
        self.names = set(self._file.keys())

    @property
    def target_modules(self) -> tuple[str, ...]:
        """Names of the adapted modules, such as `q_proj`, and experts' parameters, such as `experts.down_proj`."""
        modules = {_target_of(name.split(".lora_")[0].removesuffix(".base_layer")) for name in self.names}
        if self.target_parameters:
            modules.discard("experts")
        return tuple(sorted(modules | {_last_two(name) for name in self.target_parameters}))

    def check(self, shapes: Dictionary[str, tuple[int, ...]]) -> None:
        """Check that the adapter has exactly the tensors in `shapes`, with these shapes.

        Raises:
            UserError: tensors are missing, unknown or have another shape. The message names the first such tensors.
        """
        for what, names in (("lacks", set(shapes) - self.names), ("has unknown", self.names - set(shapes))):
            if names:
                raise UserError(f"model.lora.path: {self.path} {what} tensors: {', '.join(sorted(names)[:3])}")
        for name, shape in shapes.items():
            found = tuple(self._file.get_slice(name).get_shape())
            if found != shape:
                raise UserError(
                    f"model.lora.path: {self.path}: {name} has the shape {found}, but the model of model.path "
                    f"needs {shape}"
                )

    def check_base(self, path: Path, weights: str) -> list[str]:
        """Check that the adapter was trained on the model to which it is applied.

        Args:
            path: directory of the model.
            weights: `digest_of_weights` of this directory.

        Returns:
            A list with a warning, if the adapter contains no digest and names another base model; otherwise [].

        Raises:
            UserError: the adapter was trained on other weights.
        """
        try:
            made_for = json.loads((self.path / BASE_FILE).read_bytes())["weights"]
        except (OSError, ValueError, KeyError, TypeError):
            made_for = None
        if made_for is not None and made_for != weights:
            raise UserError(
                f"model.lora.path: {self.path} was trained on other weights ({self.base}) than those of {path}; "
                f"to use this adapter anyway, remove its file {BASE_FILE}"
            )
        named = Path(self.base)  # a directory, or a name on the hub
        same = named.resolve() == path.resolve() if named.is_dir() else named.name == path.name
        if made_for or same or not self.base:
            return []
        return [f"model.lora.path: {self.path} names {self.base} as its base model, not {path}"]

    def read(self, name: str, rows: slice = slice(None), columns: slice | None = None) -> Tensor:
        """Return `rows` and `columns` of the tensor `name`, in fp32."""
        view = self._file.get_slice(name)
        return (view[rows] if columns is None else view[rows, columns]).float()


def _last_two(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _target_of(module: str) -> str:
    """Return the name of a module's target: the end of its name, by which PEFT finds the module.

    In the vision tower, `proj` is also the name of a convolution.
    """
    return _last_two(module) if HF_TOWER in module else module.rpartition(".")[2]


def write_peft_directory(
    tensors: Iterable[tuple[str, Tensor]],
    destination: Path,
    base: Path,
    settings: Dictionary[str, Any],
    is_writer: bool,
    chat_template: str | None = None,
) -> None:
    """Write an adapter directory: the adapter, its configuration, and the base model's tokenizer and other files.

    Every rank must call this function, because all ranks produce `tensors` together; only the rank with `is_writer`
    writes. The files are written to a temporary directory. When this directory is complete, its files replace those of
    an earlier export.

    Args:
        base: directory of the base model.
        settings: `r`, `lora_alpha`, `lora_dropout`, `target_modules`, and `exclude_modules` and `target_parameters` if
            there are any.

    Raises:
        DiskFullError: the disk has no space for the files.
        UserError: `destination` contains files that no export has written.
    """
    whole = {name: tensor.cpu().contiguous() for name, tensor in tensors}
    if not is_writer:
        return
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base.absolute()),
        "bias": "none",
        "inference_mode": True,
        **settings,
    }
    with replacing(destination) as directory:
        save_file(whole, directory / TENSORS_FILE, metadata={"format": "pt"})
        (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        (directory / BASE_FILE).write_text(json.dumps({"weights": digest_of_weights(base)}) + "\n")
        copy_companions(base, directory, chat_template)


DEFAULT_RANK, DEFAULT_ALPHA = 16, 32.0
NO_ADAPTER_ROWS = ""
"""Name of those rows of B that belong to projections without an adapter. They are zeros and are never trained."""


@dataclass(frozen=True)
class LoRA:
    """Describes the adapters of a whole model.

    table: map from the Megatron name of each A and B matrix to its `Mapping`, in the model's order. The mappings
        contain names of tensors in PEFT's files instead of Hugging Face names.
    source: source of the initial values.
    experts_in: see `Family`.
    excluded: modules that are not trained, such as `indexer.q_proj`, and whose last name is a target, or a regular
        expression of such modules. PEFT would adapt them too.
    """

    rank: int
    alpha: float
    dropout: float
    target_modules: tuple[str, ...]
    table: Dictionary[str, Mapping]
    source: TensorSource
    experts_in: str = "mlp"
    excluded: tuple[str, ...] | str = ()

    @property
    def scale(self) -> float:
        """Factor by which the product B · A is multiplied."""
        return self.alpha / self.rank

    def __str__(self) -> str:
        targets = ", ".join(self.target_modules)
        return f"rank {self.rank}, alpha {self.alpha:g}, on {targets}; {self.num_parameters():,} parameters are trained"

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of PEFT's `LoraConfig` for these adapters."""
        modules = sorted(name for name in self.target_modules if not is_expert_target(name))
        settings = {"r": self.rank, "lora_alpha": self.alpha, "lora_dropout": self.dropout, "target_modules": modules}
        if self.excluded:
            settings["exclude_modules"] = self.excluded if isinstance(self.excluded, str) else list(self.excluded)
        if experts := sorted(name for name in self.target_modules if is_expert_target(name)):
            settings["target_parameters"] = [f"{self.experts_in}.{name}".removeprefix(".") for name in experts]
        return settings

    def layers(self) -> set[int]:
        """Return the numbers, from 0, of the layers that have adapters."""
        names = (name.partition("decoder.layers.") for name in self.table)
        return {int(rest.partition(".")[0]) for before, _, rest in names if rest and not before}

    def num_parameters(self) -> int:
        """Return the number of parameters of the whole model's adapters."""
        return sum(math.prod(shape) for shape in shapes_of(self.table).values())

    def active_parameters(self, family: Family) -> float:
        """Return the number of adapter parameters that one token uses; of the experts, only chosen ones count.

        Adapters of the vision tower are left out, because only images go through it.
        """
        share = family.experts.topk / family.experts.count if isinstance(family, Mixture) else 1.0
        used = {name: mapping for name, mapping in self.table.items() if not name.startswith(VISION_TOWER)}
        shapes = ((mapping.is_expert, _part_shapes({name: mapping})) for name, mapping in used.items())
        sizes = ((is_expert, sum(math.prod(shape) for shape in found.values())) for is_expert, found in shapes)
        return sum(size * share if is_expert else size for is_expert, size in sizes)


def lora_of(config: LoRAConfig, family: Family, seed: int = 0, with_tower: bool = False) -> LoRA:
    """Return the adapters that a configuration describes.

    Args:
        with_tower: whether the vision tower has adapters, too.

    Raises:
        UserError: the model does not have a target, no target is in the vision tower although it has adapters, or the
            adapter directory does not fit.
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
                raise UserError(
                    f"model.lora.{key}={given}: the adapter model.lora.path={config.path} has {found}; leave "
                    f"model.lora.{key} out"
                )
        rank, alpha, targets = directory.rank, directory.alpha, directory.target_modules
    key = "target_modules" if directory is None else f"path={config.path}"
    rank, known = rank or DEFAULT_RANK, adaptable_modules(family, with_tower)
    _check_targets(targets, known, family, key)
    targets = tuple(name for name in known if name in targets or not (targets or is_expert_target(name)))
    if with_tower and not set(TOWER_TARGETS).intersection(targets):
        raise UserError(
            f"model.vision_tower: is trained, but model.lora.{key} has no adapters in it; leave model.vision_tower "
            f"out, or adapt {', '.join(TOWER_TARGETS)}"
        )
    if config.dropout and (adapted := [name for name in targets if is_expert_target(name)]):
        raise UserError(
            f"model.lora.dropout: is not supported for {', '.join(adapted)}, because PEFT has no dropout "
            "for experts; leave model.lora.dropout out"
        )
    table = {
        adapter.megatron: adapter
        for mapping in family.table.values()
        if _is_adaptable(mapping, family, with_tower)
        for adapter in _adapters_of(mapping, family, targets, rank)
    }
    source: TensorSource = InitialValues(_part_shapes(table), seed)
    if directory is not None:
        directory.check(shapes_of(table))
        source = SingleExperts(directory, rank)
    source = ZerosIfMissing(source, rank)
    return LoRA(
        rank,
        alpha or DEFAULT_ALPHA,
        config.dropout,
        targets,
        table,
        source,
        family.experts_in,
        _excluded(family, targets),
    )


def _check_targets(targets: Sequence[str], known: Sequence[str], family: Family, key: str) -> None:
    for target in targets:
        if target not in known:
            if target in TOWER_TARGETS and family.vision_config is not None:
                raise UserError(
                    f"model.lora.{key}: {target} is in the vision tower; set model.vision_tower=trained to adapt it"
                )
            experts = ADAPTED_IN_MIXTURES if isinstance(family, Mixture) else ""
            raise UserError(
                f"model.lora.{key}: {family.model_type} has no {target} to adapt; it has {', '.join(known)}{experts}"
            )


def _excluded(family: Family, targets: tuple[str, ...]) -> tuple[str, ...] | str:
    if family.without_adapters:
        return family.without_adapters
    names = (name.removesuffix(".weight") for m in family.table.values() if m.is_frozen for name in m.hf_names)
    return tuple(sorted({_last_two(name) for name in names if name.rpartition(".")[2] in targets}))


def shapes_of(table: Dictionary[str, Mapping]) -> dict[str, Shape]:
    """Return the shapes of all tensors in a PEFT file with the adapters of `table`, by name."""
    return stacked_shapes(_part_shapes(table))


def _part_shapes(table: Dictionary[str, Mapping]) -> dict[str, Shape]:
    """Return the shapes of the adapters' tensors by name, with separate tensors for each expert."""
    return tensor_shapes(table.values())


def adaptable_modules(family: Family, with_tower: bool = False) -> tuple[str, ...]:
    """Return the names of those projections (targets) of a family that can have adapters.

    Args:
        with_tower: whether the projections of the vision tower's layers are among them.
    """
    adaptable = (mapping for mapping in family.table.values() if _is_adaptable(mapping, family, with_tower))
    return tuple(dict.fromkeys(target for mapping in adaptable for target, *_ in _modules_of(mapping, family, ())))


def _is_adaptable(mapping: Mapping, family: Family, with_tower: bool) -> bool:
    """Return whether a weight can have an adapter.

    Such weights are projections of attention, routed experts, the MLPs of models without experts, and projections in
    the layers of the vision tower.
    """
    if mapping.megatron.startswith(VISION_TOWER):
        return with_tower and mapping.megatron.removesuffix(".weight").endswith(TOWER_TARGETS)
    if mapping.is_frozen or mapping.parts[0].name.removesuffix(".weight").endswith(family.unadapted):
        return False
    if not mapping.megatron.endswith("weight") or not (mapping.is_expert or len(mapping.parts[0].shape) == 2):
        return False
    is_projection = isinstance(mapping.kind, GateUp | Rows | Columns)
    in_mlp = is_projection and ".mlp." in mapping.megatron
    return ".self_attention." in mapping.megatron or (in_mlp and (mapping.is_expert or not isinstance(family, Mixture)))


def _modules_of(mapping: Mapping, family: Family, targets: tuple[str, ...]) -> list[tuple[str, str, int]]:
    """Return (target, PEFT module, first row in B) for each part of a weight; target and module are names."""
    if not mapping.is_expert:
        modules = [(family.module_of(part.name.removesuffix(".weight")), part.first) for part in mapping.parts]
        return [(_target_of(module), module, first) for module, first in modules]
    target = DOWN if isinstance(mapping.kind, Columns) else UP if isinstance(mapping.kind, Rows) else GATE_UP
    module, rows = family.module_of(mapping.parts[0].name.partition(".experts.")[0]), _rows_of(mapping.parts[0])
    if family.experts_in:
        module = f"{module.rpartition('.')[0]}.{family.experts_in}"
    module += ".experts"
    return [(target, module_of(module, target, targets), index * rows) for index in range(len(mapping.parts))]


def _rows_of(part: Part) -> int:
    """Return the number of outputs of a projection. Its shape is [out, in], or [1, in, out] for some experts."""
    return part.shape[0] if len(part.shape) == 2 else part.shape[2]


def _name_of(module: str, matrix: str, mapping: Mapping, family: Family) -> str:
    """Return the name of A or B (`matrix`) in PEFT's files; for an expert, the name that `of_expert` returns."""
    name = NAME.format(module=module, matrix=matrix)
    if not mapping.is_expert:
        return name
    assert isinstance(family, Mixture)
    expert = int(mapping.megatron.partition(".experts.")[2].partition(".")[0])
    return of_expert(name, expert, family.experts.count)


def _adapters_of(mapping: Mapping, family: Family, targets: tuple[str, ...], rank: int) -> Iterator[Mapping]:
    """Yield the mappings of A and B for one linear layer; yield nothing if none of its projections is a target."""
    modules = _modules_of(mapping, family, targets)
    targeted = list(dict.fromkeys(module for target, module, _ in modules if target in targets))
    if not targeted:
        return
    ours, columns = mapping.megatron.removesuffix("weight"), mapping.parts[0].shape[1]
    row_parallel = isinstance(mapping.kind, Columns)
    a = tuple(Part(_name_of(m, "A", mapping, family), (rank, columns)) for m in targeted)
    b = tuple(
        Part(_name_of(m, "B", mapping, family) if m in targeted else NO_ADAPTER_ROWS, (_rows_of(part), rank), first)
        for (_, m, first), part in zip(modules, mapping.parts, strict=True)
    )
    a_kind = Columns() if row_parallel else Stacked((rank,) * len(a))
    b_kind = Replicated() if row_parallel else mapping.kind
    if isinstance(b_kind, InterleavedGateUp):
        b_kind = AlternatingGateUp()
    yield Mapping(f"{ours}adapter.lora_A", a, a_kind, mapping.is_expert, is_float32=True)
    yield Mapping(f"{ours}adapter.lora_B", b, b_kind, mapping.is_expert, is_float32=True)


class InitialValues:
    """Source of PEFT's initial values: A is uniform within ±1/√columns (Kaiming with a = √5), B is 0.

    Each tensor, and each expert's part of a tensor, has its own random generator, so the values are the same under
    every parallel layout.
    """

    def __init__(self, shapes: Dictionary[str, Shape], seed: int) -> None:
        self.shapes, self.seed = shapes, seed

    def read(self, name: str, rows: slice = slice(None), columns: slice | None = None) -> Tensor:
        """Return the part of the tensor `name` in the given `rows` and `columns`; its values are computed."""
        if ".lora_B." in name:
            return torch.zeros(self.shapes[name])[rows, columns or slice(None)]
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        bound = self.shapes[name][1] ** -0.5
        whole = torch.rand(self.shapes[name], generator=generator) * (2 * bound) - bound
        return whole[rows, columns or slice(None)]


@dataclass(frozen=True)
class ZerosIfMissing:
    """Source that reads from another `source`, but returns zeros for the name `NO_ADAPTER_ROWS`."""

    source: TensorSource
    rank: int

    def read(self, name: str, rows: slice = slice(None), columns: slice | None = None) -> Tensor:
        """Return `rows` and `columns` of the tensor `name`."""
        if name == NO_ADAPTER_ROWS:
            return torch.zeros(rows.stop - rows.start, self.rank)
        return self.source.read(name, rows, columns)


class SourceByOwner:
    """Source of made-up values that show, for each row of a parameter, the tensor it comes from (its owner).

    All values of a tensor are equal: the index of the tensor's name in `names`, or −1 if `names` lacks it.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def read(self, name: str, rows: slice = slice(None), columns: slice | None = None) -> Tensor:
        """Return a column [number of rows, 1], filled with the index of `name` in `names`, or with −1."""
        return torch.full((rows.stop - rows.start, 1), self.names.index(name) if name in self.names else -1)

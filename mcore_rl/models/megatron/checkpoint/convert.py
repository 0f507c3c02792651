"""Converts Hugging Face models to checkpoints and back, and describes checkpoints."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from mcore_rl.config import LoRAConfig, ModelConfig, ParallelConfig, read_yaml
from mcore_rl.errors import UserError
from mcore_rl.models.megatron.checkpoint.foreign import check_fits
from mcore_rl.models.megatron.checkpoint.interchange import common_entries, run_config
from mcore_rl.models.megatron.checkpoint.load import (
    OPTIMIZER,
    RegionReader,
    absent_from,
    architecture_of_checkpoint,
    check_trusted,
    load_weights,
    read_common,
)
from mcore_rl.models.megatron.checkpoint.names import aliases, other_name
from mcore_rl.models.megatron.checkpoint.save import PlannedShards, write_common
from mcore_rl.models.megatron.checkpoint.state import METADATA, model_state, parts_of, stored_names
from mcore_rl.models.megatron.families import Family, family_of
from mcore_rl.models.megatron.model.build import build_model
from mcore_rl.models.megatron.model.gpt_model import ModelShard
from mcore_rl.models.megatron.model.hf_config import check_model_fits, load_hf_config
from mcore_rl.models.megatron.model.hf_directory import (
    MAX_SHARD_BYTES,
    SafetensorsDirectory,
    in_precision,
    model_directory,
    write_hf_directory,
)
from mcore_rl.models.megatron.model.lora import lora_of, write_peft_directory
from mcore_rl.models.megatron.parallel_state import destroy_parallel, initialize_parallel, process_groups
from mcore_rl.models.megatron.weight_mapping import Mapping, Part, Shape, Vocabulary, assemble
from mcore_rl.models.megatron.weights.adapters import add_adapters, export_adapters
from mcore_rl.models.megatron.weights.conversion import check_hf_tensors, chunk_mappings, read_shard
from mcore_rl.utils.checkpoint_store import CheckpointStore, is_foreign, quick_problems
from mcore_rl.utils.files import digests_of
from mcore_rl.utils.model_directory import architecture_changes, architecture_of
from mcore_rl.utils.shard_process import RUN_CONFIG_FILE, write_index

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess


def describe(iteration: Path) -> Iterator[str]:
    """Yield lines about a checkpoint: integrity, state, tensors (shape, precision, shards), size and configuration.

    Raises:
        UserError: the checkpoint contains references to functions, which loading would call.
    """
    index = check_trusted(iteration)
    common = read_common(iteration, index)
    problems = quick_problems(iteration)
    yield f"{iteration}: {'; '.join(problems) or 'whole'}"
    if is_foreign(iteration):
        yield "  written by Megatron-LM or Megatron-Bridge"
    for name, value in {**common.get("state", {}), **common.get("versions", {})}.items():
        yield f"  {name}: {_short(value)}"
    yield f"  also: {', '.join(sorted(set(common) - {'state', 'versions'}))}"
    twice = _named_twice(index)
    tensors = {
        name: entry
        for name, entry in sorted(index.state_dict_metadata.items())
        if isinstance(entry, TensorStorageMetadata) and name not in twice
    }
    widest = max(map(len, tensors), default=0)
    for name, entry in tensors.items():
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        shape = " x ".join(map(str, entry.size))
        yield f"  {name:{widest}}  {dtype}  {shape}  ({len(entry.chunks)} {_plural(len(entry.chunks), 'shard')})"
    for what, part in (
        ("model", [e for n, e in tensors.items() if not n.startswith("optimizer.")]),
        ("optimizer", [e for n, e in tensors.items() if n.startswith("optimizer.")]),
    ):
        numbers, size = sum(map(_numel, part)), sum(_numel(e) * e.properties.dtype.itemsize for e in part)
        yield f"{what}: {len(part)} tensors, {numbers:,} numbers, {size:,} bytes"
    for name in ("config.yaml",) if not is_foreign(iteration) else (RUN_CONFIG_FILE,):
        if (iteration / name).is_file():
            yield f"{name}:"
            yield from (f"  {line}" for line in (iteration / name).read_text().splitlines())


def _named_twice(index: Metadata) -> set[str]:
    """Return the second names of tensors that a checkpoint's index names twice (`aliases`)."""
    pairs = {name: other for name in index.state_dict_metadata if (other := other_name(name)) is not None}
    bytes_of: dict[str, set[tuple[str, int]]] = {name: set() for name in pairs}
    for place, storage in index.storage_data.items():
        if place.fqn in bytes_of:
            bytes_of[place.fqn].add((storage.relative_path, storage.offset))
    return {max(name, other) for name, other in pairs.items() if bytes_of[name] == bytes_of.get(other)}


def _numel(entry: TensorStorageMetadata) -> int:
    return math.prod(entry.size)


def _plural(count: int, word: str) -> str:
    return word if count == 1 else word + "s"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 70 else text[:67] + "..."


CONVERTED = 1
"""Iteration of converted weights. Megatron-Bridge does not accept 0."""

# Wraps an iterable of a known length in a progress bar.
Progress = Callable[[Iterable[Any], int], Iterable[Any]]


def hf_to_megatron(source: Path, destination: Path, progress: Progress) -> Path:
    """Write the weights of a Hugging Face directory as a checkpoint of iteration 1 below `destination`.

    Training can start from this checkpoint with `checkpoint.resume=DESTINATION checkpoint.allow_partial=true`.

    Returns:
        Directory of the checkpoint.

    Raises:
        UserError: the model is not supported, or its weights have mixed precision.
    """
    tensors = SafetensorsDirectory(source)
    hf_config = load_hf_config(source)
    check_model_fits(hf_config, ParallelConfig(), max_sequence_length=1)
    check_hf_tensors(hf_config, tensors)
    store = CheckpointStore(destination)
    if store.iterations():
        raise UserError(f"{destination} holds checkpoints already; choose another directory")
    dtype = _dtype_of(tensors, hf_config)
    with _memoryless_model(hf_config, source, dtype) as model:
        shards, common = save_preprocess({**model_state(model), "content_metadata": METADATA})
        common |= common_entries(model, CONVERTED)
        partial = store.begin(CONVERTED)
        planned = PlannedShards.of(shards, (), partial, process_groups().dp_cp)
        items = planned.storage.tensors
        results = planned.storage.write(_read_parts(progress(items, len(items)), tensors, model))
        config = {
            "model": {"path": str(source), "dtype": _name(dtype)},
            "architecture": architecture_of(hf_config),
        }
        write_common(common, yaml.safe_dump(config), partial, run_config(model, has_training_state=False))
        write_index(partial, planned.metadata, [results], aliases(planned.metadata.state_dict_metadata))
        return store.commit(CONVERTED, partial, digests_of(partial, sorted(path.name for path in partial.iterdir())))


def megatron_to_hf(
    iteration: Path,
    source: Path,
    destination: Path,
    progress: Progress,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    chat_template: str | None = None,
) -> None:
    """Write the weights of a checkpoint as a Hugging Face directory, or its adapters as a PEFT directory.

    The checkpoint may be one of Megatron-LM or Megatron-Bridge. Each tensor has the precision that it has in `source`,
    or in the checkpoint if `source` has no weights.

    Args:
        source: Hugging Face directory of the same architecture; config and tokenizer are copied from it. It may have no
            weights.
        max_shard_bytes: maximum size of a written file. The contents of one file are in memory at a time.
        chat_template: chat template to write in place of the source's.

    Raises:
        UserError: the checkpoint has another architecture, or contains references to functions, which loading would
            call.
    """
    index = check_trusted(iteration)
    trained = {} if is_foreign(iteration) else read_yaml(iteration / "config.yaml").get("model") or {}
    trains_mtp = bool(trained.get("mtp_loss_scaling_factor"))
    hf_config = load_hf_config(source, head=trained.get("head", "lm"), trains_mtp=trains_mtp)
    check_model_fits(hf_config, ParallelConfig(), max_sequence_length=1)
    for key, was, now in architecture_changes(architecture_of_checkpoint(iteration), architecture_of(hf_config)):
        raise UserError(
            f"{source} has another architecture than the checkpoint {iteration}: {key} is {now} instead of {was}; "
            "give the model that was trained"
        )
    if adapters := trained.get("lora"):
        lora, with_tower = LoRAConfig.model_validate(adapters), trained.get("vision_tower") == "trained"
        return _adapters_to_peft(iteration, lora, with_tower, source, destination, hf_config, chat_template)
    stored, wide = index.state_dict_metadata, _float32_names(family_of(hf_config))
    weights = [
        entry
        for name, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata) and not OPTIMIZER.match(name) and not name.endswith(wide)
    ]
    dtypes = {entry.properties.dtype for entry in weights}
    if len(dtypes) != 1:
        found = ", ".join(sorted(map(_name, dtypes)))
        raise UserError(f"{iteration}: all weights must have the same precision, found {found}")
    with _memoryless_model(hf_config, source, dtypes.pop()) as model:
        if is_foreign(iteration):
            check_fits(iteration, index, read_common(iteration, index), model.family, stored_names(model))
        tensors = in_precision(_load_all(iteration, index, model, progress, source), model_directory(source))
        write_hf_directory(tensors, destination, source, hf_config, True, max_shard_bytes, chat_template)


def _adapters_to_peft(
    iteration: Path,
    config: LoRAConfig,
    with_tower: bool,
    source: Path,
    destination: Path,
    hf_config: Any,
    chat_template: str | None,
) -> None:
    with _memoryless_model(hf_config, source, torch.float32) as model:
        own = config if config.rank is None else config.model_copy(update={"path": None})
        lora = lora_of(own, model.family, with_tower=with_tower)
        model = add_adapters(model, lora)
        load_weights(iteration, model)
        write_peft_directory(export_adapters(model), destination, source, lora.settings, True, chat_template)


@contextmanager
def _memoryless_model(hf_config: Any, path: Path, dtype: torch.dtype) -> Iterator[ModelShard]:
    parallel = ParallelConfig()
    topology = initialize_parallel(parallel)
    try:
        model = ModelConfig.model_validate({"path": path, "dtype": _name(dtype)})
        yield build_model(hf_config, model, parallel, topology, memory=False)
    finally:
        destroy_parallel()


def _dtype_of(tensors: SafetensorsDirectory, hf_config: Any) -> torch.dtype:
    family = family_of(hf_config)
    dtypes = {tensors.dtype(name) for name in family.shapes() if name not in family.float32_tensors()}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.bfloat16}:
        found = ", ".join(sorted(map(_name, dtypes)))
        raise UserError(f"{tensors.path}: weights must be all float32 or all bfloat16, found {found}")
    return dtypes.pop()


def _float32_names(family: Family) -> tuple[str, ...]:
    """Return the endings of the names of parameters that are float32 whatever the model's precision is."""
    names = (mapping.megatron for mapping in family.table.values() if mapping.is_float32)
    endings = {f".{name.split('.', 3)[-1]}" if name.startswith("decoder.layers.") else name for name in names}
    # Input norms have other names in checkpoints (`build._layer_spec`).
    return (*endings, *((".layer_norm_weight",) if family.float32_norms else ()))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class StoredPart:
    """A part of a parameter; a checkpoint stores this part as a separate tensor.

    mapping: mapping of the parameter.
    place: Megatron's `ShardedTensor` of the part: its name in the checkpoint, and its offset in the stored tensor.
    first: number of the part's first element in the parameter.
    """

    mapping: Mapping
    place: ShardedTensor
    first: int

    @property
    def shape(self) -> Shape:
        """Shape of the part, without the leading dimensions along which the checkpoint stacks layers and experts."""
        return tuple(self.place.data.shape)


def _stored_parts(model: ModelShard) -> Iterator[tuple[Mapping, list[StoredPart]]]:
    """Yield each parameter's mapping and its stored parts, in order; `model` must have one unsharded chunk."""
    (chunk,) = model.chunks
    described = model_state(model)["model"]
    for name, mapping, tensor in chunk_mappings(model, chunk):
        parts = [
            StoredPart(mapping, place, place.data.storage_offset() - tensor.storage_offset())
            for place in parts_of(described[name])
        ]
        yield mapping, sorted(parts, key=lambda part: part.first)


def _read_parts(
    items: Iterable[tuple[WriteItem, Tensor]], source: SafetensorsDirectory, model: ModelShard
) -> Iterator[tuple[WriteItem, Tensor]]:
    """Yield each write item in `items` with its values. They are read from `source` just before they are yielded."""
    places = {
        (part.place.key, tuple(part.place.global_offset)): part for _, parts in _stored_parts(model) for part in parts
    }
    for item, _ in items:
        assert item.tensor_data is not None, "a plan's tensors have a place"
        part = places[item.index.fqn, tuple(item.tensor_data.chunk.offsets)]
        numbers = read_shard(part.mapping, source, model.topology).flatten()
        end = part.first + math.prod(part.shape)
        yield item, numbers[part.first : end].clone().view(item.tensor_data.chunk.sizes)


def _load_all(
    iteration: Path, index: Metadata, model: ModelShard, progress: Progress, source: Path
) -> Iterator[tuple[str, Tensor]]:
    """Yield a checkpoint's weights as Hugging Face tensors with their names; each is read when it is needed.

    Args:
        source: directory that has the modules that the checkpoint was written without (`ADDED_MODULES`).
    """
    stored, own, directory = list[tuple[Mapping, list[StoredPart]]](), list[Mapping](), model_directory(source)
    is_absent = absent_from(index)
    for mapping, parts_of_mapping in _stored_parts(model):
        if is_absent(mapping.megatron):
            own.append(mapping)
        else:
            stored.append((mapping, parts_of_mapping))
    parts = _loaded_parts(RegionReader(iteration, index), stored, progress)
    of_source = ((part, directory.read(part.name)) for mapping in own for part in mapping.parts)
    yield from assemble(itertools.chain(parts, of_source), model.family.shapes())


def _loaded_parts(
    reader: RegionReader, stored: list[tuple[Mapping, list[StoredPart]]], progress: Progress
) -> Iterator[tuple[Part, Tensor]]:
    """Yield the weights of a checkpoint as parts of Hugging Face tensors; each is read when it is needed."""
    for mapping, parts in progress(stored, len(stored)):
        pieces = []
        for part in parts:
            shape = part.shape
            whole: Shape | None = tuple(part.place.global_shape)
            if isinstance(mapping.kind, Vocabulary):  # padded differently by every layout
                shape, whole = (mapping.kind.vocab_size, *shape[1:]), None
            ones = (1,) * part.place.prepend_axis_num
            offsets = tuple(part.place.global_offset)
            pieces.append(reader.tensor(part.place.key, offsets, (*ones, *shape), whole).view(shape))
        yield from mapping.split(torch.cat(pieces)[None])

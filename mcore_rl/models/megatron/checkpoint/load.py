"""Loading of checkpoints in Megatron's distributed format, from any parallel layout.

Only types that a checkpoint needs are unpickled. Each rank reads only the regions of tensors that it needs.
"""

from __future__ import annotations

import bisect
import io
import itertools
import json
import math
import pickle
import re
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from mcore_rl.config import read_yaml
from mcore_rl.distributed.collectives import gather_objects
from mcore_rl.errors import UserError
from mcore_rl.models.megatron.checkpoint import state
from mcore_rl.models.megatron.checkpoint.foreign import check_fits, read_inert, unreadable_optimizer
from mcore_rl.models.megatron.checkpoint.names import located
from mcore_rl.models.megatron.checkpoint.state import (
    ModelState,
    MovingReference,
    Region,
    TrainingState,
    model_state,
    set_objects,
    stored_names,
    tensor_regions,
)
from mcore_rl.models.megatron.layers.vision import VISION_TOWER
from mcore_rl.models.megatron.model.gpt_model import ModelShard
from mcore_rl.models.megatron.parallel_state import seed_everything, set_random_states
from mcore_rl.models.megatron.weight_mapping import Shape
from mcore_rl.models.megatron.weights.conversion import ADAPTER
from mcore_rl.utils.checkpoint_store import digest_problems, is_foreign, stored_identity

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import (
    CheckpointingException,
)
from megatron.core.dist_checkpointing.mapping import ShardedObject

# Classes that an index may contain, by module and name.
INDEX_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.planner": {
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath"},
    "collections": {"OrderedDict"},
}


COMMON_FILE, COMMON_OBJECT = "common.pt", "common_state"
"""File or object of a checkpoint with the state that is the same on all ranks."""


def _enum_member(kind: Any, name: Any) -> Any:
    """Return `getattr(kind, name)` if it is a member of an enumeration."""
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(f"it names the attribute {name!r} of {kind!r}, which an index never contains")
    return kind[name]


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # Python 3.11.0 to 3.11.3 pickles enumerations with it
            return _enum_member
        module = "pathlib" if module == "pathlib._local" else module  # the name in Python 3.13
        if name in INDEX_CLASSES.get(module, ()) or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which an index never contains")


def read_index(iteration: Path) -> Metadata:
    """Return the index of a checkpoint. If the file contains references to functions, they are not called.

    Raises:
        UserError: the file is not an index, or refers to a class or function that an index does not need.
    """
    try:
        with open(iteration / ".metadata", "rb") as file:
            index = _IndexUnpickler(file).load()
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{iteration / '.metadata'}: cannot be read safely as the index of a checkpoint: {error}"
        ) from None
    if not isinstance(index, Metadata):
        raise UserError(f"{iteration / '.metadata'}: must be the index of a checkpoint, found a {type(index).__name__}")
    return index


def check_trusted(iteration: Path) -> Metadata:
    """Check that loading a checkpoint runs no code and reads no file outside its directory; return its index.

    Of a checkpoint of another program, only tensors and the common state are read, and the common state without its
    classes (`read_inert`). Its other objects are therefore not checked.

    Raises:
        UserError: the checkpoint refers to functions, which loading would call, or to a file outside its directory. The
            message contains the reference and where it was found.
    """
    index = read_index(iteration)
    for storage in index.storage_data.values():
        if Path(storage.relative_path).name != storage.relative_path:
            raise UserError(
                f"{iteration / '.metadata'}: names {storage.relative_path!r}, which must be a file of {iteration}"
            )
    if is_foreign(iteration):
        return index
    files = [(COMMON_FILE, _read(iteration / COMMON_FILE))] if (iteration / COMMON_FILE).exists() else []
    for name, stream in [*files, *_objects(iteration, index)]:
        if named := torch.serialization.get_unsafe_globals_in_checkpoint(stream):
            raise UserError(
                f"{iteration}: {name} refers to {', '.join(sorted(named))}, which could run code when it is loaded; "
                "choose another checkpoint"
            )
    return index


def read_common(iteration: Path, index: Metadata) -> dict[str, Any]:
    """Return the state of a checkpoint that is the same on all ranks.

    This package and Megatron before 0.19 write it as a file, Megatron 0.19 as one of the checkpoint's objects.

    Raises:
        UserError: the checkpoint has neither.
    """
    path = iteration / COMMON_FILE
    read = read_inert if is_foreign(iteration) else _read_safely
    if path.exists():
        common: dict[str, Any] = read(path)
        return common
    for name, stream in _objects(iteration, index):
        if name.startswith(f"{COMMON_OBJECT}/"):
            (common,) = read(stream)
            return common
    raise UserError(f"{iteration}: has neither the file {COMMON_FILE} nor the object {COMMON_OBJECT}")


def _read_safely(file: BinaryIO | Path) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True)


def _objects(iteration: Path, index: Metadata) -> Iterator[tuple[str, io.BytesIO]]:
    for place, storage in index.storage_data.items():
        if isinstance(index.state_dict_metadata.get(place.fqn), BytesStorageMetadata):
            yield place.fqn, _read(iteration / storage.relative_path, storage.offset, storage.length)


def _read(path: Path, offset: int = 0, length: int = -1) -> io.BytesIO:
    with open(path, "rb") as file:
        file.seek(offset)
        return io.BytesIO(file.read(length))


def architecture_of_checkpoint(iteration: Path) -> dict[str, Any]:
    """Return the architecture of a checkpoint's model; {} if the checkpoint does not record it.

    The architecture has the same form as the result of `architecture_of`.
    """
    if (identity := stored_identity(iteration)) is not None:
        architecture = json.loads(identity).get("architecture", {})
    elif is_foreign(iteration):
        architecture = {}
    else:
        architecture = read_yaml(iteration / "config.yaml").get("architecture", {})
    return architecture if isinstance(architecture, dict) else {}


OPTIMIZER = re.compile(r"(chained_\d\.)?optimizer\.")
"""Beginning of the names of tensors of an optimizer."""

BLOCK_BYTES = 4 * 1024**2

# Header of a file in a zip archive: its size in bytes without the file's name, and the position and format of the
# lengths of the name and of the extra field after it.
ZIP_HEADER_BYTES, ZIP_LENGTHS_AT, ZIP_LENGTHS = 30, 26, struct.Struct("<HH")


@dataclass(frozen=True)
class Piece:
    """The intersection of a region with one stored shard.

    file, start, length: the shard's file, and the first byte and number of bytes of the shard in this file.
    sizes, dtype: shape and precision of the shard.
    offsets: first index of the piece in each dimension of the shard.
    values: memory for the piece.
    """

    file: str
    start: int
    length: int
    sizes: Shape
    dtype: torch.dtype
    offsets: Shape
    values: Tensor


class RegionReader:
    """Reads regions of a checkpoint's tensors, however many shards each tensor has. It does not communicate."""

    def __init__(self, iteration: Path, index: Metadata) -> None:
        self.iteration, self.index = iteration, index
        self._by_first_row: dict[str, _ByFirstRow] = {}
        self._block = bytearray(BLOCK_BYTES)

    @torch.no_grad()
    def read(self, regions: Iterable[Region]) -> None:
        """Read all regions into their memory; read nothing if any region does not fit the checkpoint.

        Each region is read under the name and with the dimensions that the checkpoint has for its weight (`located`).

        Raises:
            UserError: a tensor is missing, a region is not completely stored, or a file is damaged.
        """
        regions = [located(region, self.index.state_dict_metadata) for region in regions]
        pieces = [piece for region in regions for piece in self.pieces(region)]
        for region in regions:
            if region.is_padded:
                region.values.zero_()
        pieces.sort(key=lambda piece: (piece.file, piece.start))
        for name, of_file in itertools.groupby(pieces, key=lambda piece: piece.file):
            try:
                with open(self.iteration / name, "rb") as file:
                    for piece in of_file:
                        self._read_piece(file, piece)
            except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile, struct.error) as error:
                reason = str(error) or type(error).__name__
                raise UserError(f"{self.iteration / name}: cannot be read: {reason}") from None

    def tensor(self, key: str, offsets: Shape, sizes: Shape, whole: Shape | None = None) -> Tensor:
        """Return the region `offsets` … `offsets + sizes` of the tensor `key`, in its stored precision.

        Args:
            whole: the shape that the tensor must have; None for any shape.

        Raises:
            UserError: the tensor is missing or has another shape, the region is not completely stored, or a file is
                damaged.
        """
        shape = torch.empty(sizes, device="meta")
        place = located(Region(key, offsets, shape), self.index.state_dict_metadata)
        values = torch.empty(sizes, dtype=self._entry(place.key, place.values.dim()).properties.dtype)
        self.read([Region(key, offsets, values, whole)])
        return values

    def _entry(self, key: str, dimensions: int) -> TensorStorageMetadata:
        entry = self.index.state_dict_metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata) or len(entry.size) != dimensions:
            raise UserError(
                f"{self.iteration} does not fit the model: the checkpoint has no tensor {key} with {dimensions} "
                "dimensions"
            )
        return entry

    def pieces(self, region: Region) -> list[Piece]:
        """Divide a region into pieces, one for each stored shard that contains a part of the region.

        Raises:
            UserError: the tensor is missing, or the region is not completely stored.
        """
        sizes = tuple(region.values.shape)
        entry = self._entry(region.key, len(sizes))
        if region.whole not in (None, tuple(entry.size)) and not region.is_padded:
            raise UserError(
                f"{self.iteration} does not fit the model: {region.key} has the shape {tuple(entry.size)}; the "
                f"model needs {region.whole}"
            )
        if region.key not in self._by_first_row:
            self._by_first_row[region.key] = _ByFirstRow(entry)
        pieces = []
        for chunk in self._by_first_row[region.key].near(region.offsets, sizes):
            low = tuple(map(max, chunk.offsets, region.offsets))
            corners = zip(chunk.offsets, chunk.sizes, region.offsets, sizes, strict=True)
            high = tuple(min(a + b, c + d) for a, b, c, d in corners)
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            storage = self.index.storage_data[MetadataIndex(region.key, chunk.offsets)]
            values = region.values.detach()
            for dimension, (first, last) in enumerate(zip(low, high, strict=True)):
                values = values.narrow(dimension, first - region.offsets[dimension], last - first)
            offsets = tuple(a - b for a, b in zip(low, chunk.offsets, strict=True))
            place = storage.relative_path, storage.offset, storage.length
            pieces.append(Piece(*place, tuple(chunk.sizes), entry.properties.dtype, offsets, values))
        if sum(piece.values.numel() for piece in pieces) != region.values.numel() and not region.is_padded:
            raise UserError(
                f"{self.iteration}: {region.key} has the shape {tuple(entry.size)}, which is too small for this model"
            )
        return pieces

    def _read_piece(self, file: BinaryIO, piece: Piece) -> None:
        shard: Any = _Slice(file, piece.start, piece.length)
        begin = _numbers_in(shard, piece)
        if begin is None:
            shard.seek(0)
            numbers = torch.load(shard, map_location="cpu", weights_only=True).flatten()
            copy_piece(lambda first, count: numbers[first : first + count], piece)
            return

        def read(first: int, count: int) -> Tensor:
            wanted = memoryview(self._block)[: count * piece.dtype.itemsize]
            file.seek(piece.start + begin + first * piece.dtype.itemsize)
            if file.readinto(wanted) != len(wanted):  # type: ignore[attr-defined]
                raise EOFError("the file ends too early")
            return torch.frombuffer(self._block, dtype=piece.dtype, count=count)

        copy_piece(read, piece)


class _ByFirstRow:
    """The stored shards of a tensor, sorted by their first row."""

    def __init__(self, entry: TensorStorageMetadata) -> None:
        self.chunks = sorted(entry.chunks, key=lambda chunk: tuple(chunk.offsets))
        self.firsts = [chunk.offsets[0] if chunk.offsets else 0 for chunk in self.chunks]
        self.tallest = max((chunk.sizes[0] if chunk.sizes else 1 for chunk in self.chunks), default=0)

    def near(self, offsets: Shape, sizes: Shape) -> list[Any]:
        """Return all shards that may contain rows of the region at `offsets`."""
        if not sizes:
            return self.chunks
        begin = bisect.bisect_right(self.firsts, offsets[0] - self.tallest)
        return self.chunks[begin : bisect.bisect_left(self.firsts, offsets[0] + sizes[0])]


def _numbers_in(shard: Any, piece: Piece) -> int | None:
    """Return the number of the byte at which the elements begin in `shard`, a file object of one stored shard.

    Return None unless the elements are stored contiguously, in row-major order and uncompressed.
    """
    layout = torch.load(shard, map_location="meta", weights_only=True)
    with zipfile.ZipFile(shard) as archive:
        found = [record for record in archive.infolist() if "/data/" in record.filename]
    plain = len(found) == 1 and found[0].compress_type == zipfile.ZIP_STORED
    if not plain or not layout.is_contiguous() or layout.storage_offset() or layout.dtype != piece.dtype:
        return None
    shard.seek(found[0].header_offset + ZIP_LENGTHS_AT)
    return found[0].header_offset + ZIP_HEADER_BYTES + sum(ZIP_LENGTHS.unpack(shard.read(ZIP_LENGTHS.size)))


def copy_piece(read: Callable[[int, int], Tensor], piece: Piece) -> None:
    """Copy the elements of a piece from the stored shard to `piece.values`, in blocks of at most `BLOCK_BYTES`.

    Each block consists of whole rows. If a row of the first dimension is larger than a block, rows of the second
    dimension are copied, and so on.

    Args:
        read: function (first, count) that returns `count` elements of the stored shard, from number `first` on.
    """
    for begin, inner, offsets, values in _rows(piece.sizes, 0, piece.offsets, piece.values, piece.dtype.itemsize):
        step = max(1, BLOCK_BYTES // (math.prod(inner) * piece.dtype.itemsize))
        for start in range(0, len(values), step):
            rows = values[start : start + step]
            numbers = read(begin + start * math.prod(inner), len(rows) * math.prod(inner)).view(len(rows), *inner)
            for dimension, offset in enumerate(offsets, 1):
                numbers = numbers.narrow(dimension, offset, rows.shape[dimension])
            rows.copy_(numbers)


def _rows(
    sizes: Shape, first: int, offsets: Shape, values: Tensor, itemsize: int
) -> Iterator[tuple[int, Shape, Shape, Tensor]]:
    """Divide a region of a row-major tensor into smaller regions whose rows fit into a block.

    If a row does not fit, or the region has a single row, each row is divided like a tensor with one dimension less.

    Args:
        sizes: shape of the tensor.
        first: number of the tensor's first element in the stored shard.
        offsets: first index of the region in each dimension of the tensor.
        values: memory for the region.

    Yields:
        For each smaller region: where its first row begins, as the number of an element in the stored shard; the shape
        of a row; the region's offsets in a row; and the memory for the region.
    """
    if not sizes:
        sizes, offsets, values = (1,), (0,), values.view(1)
    row = math.prod(sizes[1:])
    of_one_row = len(values) == 1  # then only the region's part of the row is read
    if len(sizes) == 1 or (row * itemsize <= BLOCK_BYTES and not of_one_row):
        yield first + offsets[0] * row, sizes[1:], offsets[1:], values
        return
    for index, part in enumerate(values.unbind()):
        yield from _rows(sizes[1:], first + (offsets[0] + index) * row, offsets[1:], part, itemsize)


class _Slice(io.RawIOBase):
    """A file object that contains the bytes `start` … `start + length − 1` of another file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self.file, self.start, self.length, self.position = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.length}[whence]
        return self.position

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self.length - self.position))
        self.file.seek(self.start + self.position)
        count = self.file.readinto(memoryview(buffer)[:count])  # type: ignore[attr-defined]
        self.position += count
        return count


def verify(iteration: Path) -> list[str]:
    """Read every byte of a checkpoint and return a list of its defects. The ranks divide the files. Collective."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return [problem for part in gather_objects(digest_problems(iteration, rank, size)) for problem in part]


@dataclass
class Restored:
    """Result of loading a checkpoint.

    state: the training loop's state; {} if the checkpoint has none.
    pieces: names of what was restored, such as "weights" or "schedule".
    missing: names of what the checkpoint lacks.
    has_reference: whether the checkpoint contains weights of a reference model. (It contains them only if they differ
        from the initial weights.)
    """

    state: dict[str, Any]
    pieces: list[str]
    missing: list[str] = field(default_factory=list)
    has_reference: bool = False


def read_state(iteration: Path) -> dict[str, Any]:
    """Return the state of the training loop in a checkpoint; {} if it has none.

    Raises:
        UserError: the checkpoint cannot be read.
    """
    state: dict[str, Any] = read_common(iteration, check_trusted(iteration)).get("state", {})
    return state


def load(iteration: Path, run: TrainingState, allow_partial: bool = False) -> Restored:
    """Restore the whole training state under this run's parallel layout. Collective.

    Raises:
        UserError: the checkpoint does not fit the model, is refused by `check_trusted`, or lacks a part of the state
            while `allow_partial` is False.
    """
    index = check_trusted(iteration)
    _check_adapters(iteration, index, run.model)
    common = read_common(iteration, index)
    has_optimizer = any(".state." in key for key in index.state_dict_metadata if OPTIMIZER.match(key))
    unreadable = None
    if is_foreign(iteration):
        _check_fits(iteration, index, common, run.model)
        unreadable = unreadable_optimizer(common, index)
    restored = Restored(common.get("state", {}), ["weights" if run.model.lora is None else "adapters"])
    present = {
        "optimizer": has_optimizer and "optimizer" in common and unreadable is None,
        "schedule": "scheduler" in common,
        **{part.name: part.name in common for part in run.beside},
        "random states": "random" in common,
        "data position": "state" in common,
    }
    restored.missing = [name for name, there in present.items() if not there]
    if unreadable is not None:
        restored.missing[0] = f"an optimizer state that it can read ({unreadable})"
    if restored.missing and not allow_partial:
        raise UserError(
            f"{iteration} lacks {', '.join(restored.missing)}; set checkpoint.allow_partial=true to resume with "
            "the other parts"
        )
    restored.has_reference = _has_reference(index)
    reference = run.reference if restored.has_reference else None
    there = [part for part in run.beside if present[part.name]]
    _load_weights_and_moments(iteration, index, run, common if present["optimizer"] else {}, reference)
    _load_beside(iteration, index, there, common)
    if reference is not None:
        restored.pieces.append("reference")
    if present["schedule"]:
        run.policy.scheduler.load_state_dict(common["scheduler"])
    restored.pieces += [name for name in ("optimizer", "schedule", *(part.name for part in there)) if present[name]]
    if present["random states"]:
        restored.pieces.append(_restore_random(common["random"], run, restored.state))
    return restored


def _check_fits(iteration: Path, index: Metadata, common: dict[str, Any], model: ModelShard) -> None:
    """Check that the checkpoint of another program fits the model, of which each rank has a part. Collective."""
    wanted = set[str]().union(*gather_objects(stored_names(model)))
    check_fits(iteration, index, common, model.family, wanted)


def _check_adapters(iteration: Path, index: Any, model: ModelShard) -> None:
    """Raise UserError if the checkpoint has adapters and the model has none, or the other way round."""
    there = any(ADAPTER in key for key in index.state_dict_metadata)
    if there and model.lora is None:
        raise UserError(f"{iteration} holds only adapters; set model.lora to continue their training")
    if model.lora is not None and not there:
        raise UserError(
            f"{iteration} holds a whole model, but with model.lora the model comes from model.path; leave out "
            "checkpoint.resume. To train adapters on the checkpoint's model, convert the checkpoint "
            "(mcore-rl convert to-hf) and set model.path to the result"
        )


def holds_reference(iteration: Path) -> bool:
    """Return whether a checkpoint contains weights of a reference model."""
    return _has_reference(check_trusted(iteration))


def _has_reference(index: Any) -> bool:
    return any(key.startswith(f"{state.KEY}.") for key in index.state_dict_metadata)


def _restore_random(saved: dict[str, Any], run: TrainingState, state: dict[str, Any]) -> str:
    if saved["layout"] == run.layout:
        set_random_states(saved["states"][torch.distributed.get_rank()])
        return "random states"
    seed_everything(run.config.seed + int(state.get("step", 0)))
    return "random states (seeded anew: the parallel layout is different)"


def _load_weights_and_moments(
    iteration: Path, index: Metadata, run: TrainingState, common: dict[str, Any], reference: MovingReference | None
) -> None:
    """Load the policy's weights and moments. Also load the weights of `reference`, unless it is None.

    Args:
        common: the state that is the same on all ranks; {} to load no optimizer state.
    """
    weights = run.policy.weights()
    regions = [*run.policy.regions(weights, bool(common))]
    if reference is not None:
        regions += tensor_regions(state.reference_state(weights, reference.by_tensor()))
    _read_regions(iteration, index, regions)
    if reference is not None:
        reference.has_moved = True
    _load_objects(iteration, index, run.model, weights)
    run.policy.restore_step(common.get("optimizer"))


def _load_beside(iteration: Path, index: Metadata, parts: Sequence[ModelState], common: dict[str, Any]) -> None:
    """Load the weights, optimizer and schedule of each model that is trained together with the policy.

    Args:
        parts: the states of these models, without the policy's.
        common: the state that is the same on all ranks.
    """
    for part in parts:
        weights = part.weights()
        _read_regions(iteration, index, part.regions(weights, with_optimizer=True))
        _load_objects(iteration, index, part.model, weights)
        part.restore_step(common[part.name]["optimizer"])
        part.scheduler.load_state_dict(common[part.name]["scheduler"])


def load_weights(iteration: Path, model: ModelShard, name: str = "") -> None:
    """Restore only the weights of a model, under this run's parallel layout. Collective.

    Args:
        name: name of a model that is trained together with the policy; "" for the policy itself.

    Raises:
        UserError: the checkpoint does not fit the model, or refers to functions, which loading would call.
    """
    index, weights = check_trusted(iteration), model_state(model, name)
    if is_foreign(iteration):
        _check_fits(iteration, index, read_common(iteration, index), model)
    _read_regions(iteration, index, tensor_regions(weights))
    _load_objects(iteration, index, model, weights)


ADDED_MODULES = (VISION_TOWER, "indexer.")
"""Modules that earlier versions of this package left out of the model. They were not trained then."""


def absent_from(index: Metadata) -> Callable[[str], bool]:
    """Return a function of a weight's name: whether the weight is in one of `ADDED_MODULES`, and the checkpoint was
    written without this module. The weight then keeps the value of the model directory."""
    absent = [
        f".{module}"
        for module in ADDED_MODULES
        if not any(f".{module}" in f".{key}" for key in index.state_dict_metadata)
    ]
    return lambda name: any(module in f".{name}" for module in absent)


def _read_regions(iteration: Path, index: Metadata, regions: Iterable[Region]) -> None:
    """Read `regions` (each rank its own) into their memory. An error of one rank is raised on all ranks. Collective.

    Raises:
        UserError: the checkpoint lacks a tensor or has it in another shape, or one of its files is damaged.
    """
    problem, is_absent = None, absent_from(index)
    try:
        RegionReader(iteration, index).read(region for region in regions if not is_absent(region.key))
    except UserError as error:
        problem = str(error)
    for found in gather_objects(problem):
        if found is not None:
            raise UserError(found)


def _load_objects(iteration: Path, index: Metadata, model: ModelShard, weights: dict[str, Any]) -> None:
    """Load the objects that modules keep in addition to their tensors, by Megatron's function. Collective.

    The objects of another program's checkpoint are left out: they belong to modules that this package does not use.

    Args:
        weights: Megatron's sharded state dict of the model.

    Raises:
        UserError: the checkpoint does not contain these objects.
    """
    if is_foreign(iteration):
        return
    if not any(isinstance(entry, BytesStorageMetadata) for entry in index.state_dict_metadata.values()):
        return
    objects = {
        chunk: {name: entry for name, entry in entries.items() if isinstance(entry, ShardedObject)}
        for chunk, entries in weights.items()
    }
    try:
        loaded = dist_checkpointing.load(objects, str(iteration))
    except (CheckpointingException, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{iteration} does not fit the model of model.path: {reason}") from None
    set_objects(model, loaded)

"""A checkpoint is data: nothing in it may name code to run.

Megatron and torch read `common.pt` with `weights_only`, but unpickle two things freely: the index
`.metadata`, and the small objects (`_extra_state`) among the shards. Both are looked at here first.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from mcore_rl.errors import UserError

# What an index is made of, by module and name.
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


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in INDEX_CLASSES.get(module, ()) or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which an index has no use for")


def read_index(iteration: Path) -> Metadata:
    """The index of a checkpoint, without running anything that it may name.

    Raises:
        UserError: not an index, or one that names other classes than an index is made of.
    """
    try:
        with open(iteration / ".metadata", "rb") as file:
            index = _IndexUnpickler(file).load()
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{iteration / '.metadata'}: cannot be trusted as an index: {error}") from None
    if not isinstance(index, Metadata):
        raise UserError(f"{iteration / '.metadata'}: holds a {type(index).__name__}, not an index")
    return index


def check_trusted(iteration: Path) -> Metadata:
    """The index of a checkpoint; refuse one that would run code when loaded, or read outside its directory.

    Raises:
        UserError: naming the file and what it names.
    """
    index = read_index(iteration)
    for storage in index.storage_data.values():
        if Path(storage.relative_path).name != storage.relative_path:
            raise UserError(f"{iteration / '.metadata'}: {storage.relative_path!r} is not a file of this directory")
    for name, stream in [("common.pt", _read(iteration / "common.pt")), *_objects(iteration, index)]:
        if named := torch.serialization.get_unsafe_globals_in_checkpoint(stream):
            raise UserError(f"{iteration}: {name} names {', '.join(sorted(named))}, which is never loaded")
    return index


def _objects(iteration: Path, index: Metadata) -> Iterator[tuple[str, io.BytesIO]]:
    for place, storage in index.storage_data.items():
        if isinstance(index.state_dict_metadata.get(place.fqn), BytesStorageMetadata):
            yield place.fqn, _read(iteration / storage.relative_path, storage.offset, storage.length)


def _read(path: Path, offset: int = 0, length: int = -1) -> io.BytesIO:
    with open(path, "rb") as file:
        file.seek(offset)
        return io.BytesIO(file.read(length))

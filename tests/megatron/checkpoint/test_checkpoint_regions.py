"""Tests of reading any region of a stored tensor, for any division into shards, with few bytes read in excess."""

import io
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mcore_rl.errors import UserError
from mcore_rl.models.megatron.checkpoint import load
from mcore_rl.models.megatron.checkpoint.load import RegionReader
from mcore_rl.models.megatron.checkpoint.state import Region


def store(directory, tensors, cuts, files=2, transposed=True):
    """An iteration that holds `tensors`, each cut along each dimension at `cuts`, some shards with their last two
    dimensions exchanged in memory if `transposed`."""
    index = Metadata(state_dict_metadata={}, storage_data={})
    written = [bytearray(b"?" * 13) for _ in range(files)]
    for key, tensor in tensors.items():
        chunks = []
        edges = [sorted({0, size, *(cut for cut in cuts if cut < size)}) for size in tensor.shape]
        for corner in itertools.product(*(itertools.pairwise(edge) for edge in edges)):
            part = tensor[tuple(slice(*span) for span in corner)]
            exchanged = transposed and part.ndim > 1 and len(chunks) % 3 == 0
            part = part.mT.contiguous().mT if exchanged else part.clone()
            chunk = ChunkStorageMetadata(torch.Size(first for first, _ in corner), part.shape)
            stream = io.BytesIO()
            torch.save(part, stream)
            number = len(chunks) % files
            place = MetadataIndex(key, chunk.offsets, len(chunks))
            index.storage_data[place] = _StorageInfo(f"{number}", len(written[number]), len(stream.getvalue()))
            written[number] += stream.getvalue()
            chunks.append(chunk)
        index.state_dict_metadata[key] = TensorStorageMetadata(
            TensorProperties(dtype=tensor.dtype), tensor.shape, chunks
        )
    for number, content in enumerate(written):
        (directory / f"{number}").write_bytes(content)
    return RegionReader(directory, index)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.sets(st.integers(1, 5)), st.data())
def test_every_region_is_found(tmp_path_factory, shape, cuts, data):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape))).to(
        data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    )
    reader = store(tmp_path_factory.mktemp("stored"), {"other": tensor + 1, "key": tensor}, cuts)
    offsets = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(data.draw(st.integers(1, size - first)) for size, first in zip(shape, offsets, strict=True))
    expected = tensor[tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "BLOCK_BYTES", data.draw(st.sampled_from([16, 40, 4096])))
        assert torch.equal(reader.tensor("key", offsets, sizes), expected)
        strided = torch.full((*sizes[:-1], 2 * sizes[-1]), 7, dtype=torch.float64)
        reader.read([Region("key", offsets, strided[..., ::2], tuple(shape))])
    assert torch.equal(strided[..., ::2], expected.double())
    assert (strided[..., 1::2] == 7).all()


def test_no_more_is_read_than_a_block_beyond_what_is_wanted(tmp_path, monkeypatch):
    """A rank's range in the middle of a shard much larger than it."""
    monkeypatch.setattr(load, "BLOCK_BYTES", 4000)
    tensor = torch.randn(3, 500, 200)
    reader = store(tmp_path, {"key": tensor}, set(), files=1, transposed=False)
    counted = CountingFile(tmp_path / "0")
    monkeypatch.setattr(load, "open", lambda *_: counted, raising=False)
    values = reader.tensor("key", (1, 100, 0), (1, 50, 200))
    assert torch.equal(values, tensor[1:2, 100:150])
    assert counted.bytes < values.nbytes + 4000 + 20_000 < tensor.nbytes / 15  # the archive's own bytes among them


class CountingFile(io.FileIO):
    bytes = 0

    def readinto(self, buffer):
        self.bytes += len(buffer)
        return super().readinto(buffer)


def test_what_does_not_fit_is_refused_before_anything_is_changed(tmp_path):
    reader = store(tmp_path, {"key": torch.ones(4, 6), "other": torch.ones(4, 6)}, {2})
    values = torch.full((4, 6), 5.0)
    for bad, message in (
        (Region("nothing", (0, 0), values), "has no tensor nothing with 2 dimensions"),
        (Region("key", (0,), values[0]), "has no tensor key with 1 dimensions"),
        (Region("key", (0, 0), values, whole=(4, 7)), r"key has the shape \(4, 6\); the model needs \(4, 7\)"),
        (Region("key", (1, 0), values), r"key has the shape \(4, 6\), which is too small"),
    ):
        with pytest.raises(UserError, match=message):
            reader.read([Region("other", (0, 0), values), bad])
        assert (values == 5).all()


def test_padding_that_another_layout_has_is_zero(tmp_path):
    reader, values = store(tmp_path, {"key": torch.ones(4, 6)}, {3}), torch.full((3, 6), 5.0)
    reader.read([Region("key", (2, 0), values, whole=(9, 6), is_padded=True)])
    assert (values[:2] == 1).all() and (values[2:] == 0).all()


def test_a_damaged_file_is_named(tmp_path):
    reader = store(tmp_path, {"key": torch.ones(400, 6)}, set(), files=1)
    (tmp_path / "0").write_bytes((tmp_path / "0").read_bytes()[:500])
    with pytest.raises(UserError, match=rf"{tmp_path}/0: cannot be read"):
        reader.tensor("key", (0, 0), (400, 6))

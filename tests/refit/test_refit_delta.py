"""Tests of updates by differences: encodings, checksums, versions, and the copy that processes share."""

import secrets

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.models.refit.delta import DeltaEncoder, RefusedUpdate, bytes_of, decode, encode_tensor, largest_bucket
from mcore_rl.models.refit.host_copy import HostCopy
from mcore_rl.testing.processes import run_processes

DTYPES = [torch.bfloat16, torch.float32, torch.float16, torch.float64, torch.uint8]


def bucket(tensors):
    return [(number, bytes_of(tensor), tensor.itemsize) for number, tensor in enumerate(tensors)]


def same(a, b):
    """Whether all bits are the same: also of NaN, 0 and −0."""
    return all(np.array_equal(bytes_of(x), bytes_of(y)) for x, y in zip(a, b, strict=True))


def copy_of(tensors):
    return HostCopy([(tuple(x.shape), x.dtype) for x in tensors])


def versions_of(seed, count=5):
    """Return versions of some tensors, which change in no, one, few, many or all elements."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1,), (3, 5), (700, 9), (256,), (2, 255 * 3 + 1)]
    current = [
        torch.randn(shape, generator=generator).mul(100).to(DTYPES[(seed + n) % len(DTYPES)])
        for n, shape in enumerate(shapes)
    ]
    versions = [[x.clone() for x in current]]
    for _ in range(count):
        for x in current:
            share = [0.0, 1e-4, 0.01, 0.3, 1.0][int(torch.randint(5, (), generator=generator))]
            flat = x.view(-1)
            where = torch.rand(flat.shape, generator=generator) < share
            where[-1] |= share > 0
            flat[where] = torch.randn(int(where.sum()), generator=generator).mul(100).to(x.dtype)
            if x.is_floating_point() and share:
                flat[0] = [float("nan"), -0.0, 0.0, float("inf")][int(torch.randint(4, (), generator=generator))]
        versions.append([x.clone() for x in current])
    return versions


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_engines_follow_bit_for_bit(seed):
    versions = versions_of(seed)
    encoder, copy = DeltaEncoder(), copy_of(versions[0])
    for number, tensors in enumerate(versions):
        base = number - 1 if number else None
        payload = encoder.encode(bucket(tensors))
        copy.begin(base)
        pairs = copy.update(list(range(len(tensors))), payload)
        copy.end(number)
        assert same([tensor for _, tensor in pairs], tensors) and copy.version == number
    late = copy_of(versions[0])
    late.begin(None)
    late.update([0, 1, 2, 3, 4], encoder.whole([0, 1, 2, 3, 4]))
    assert same(late.tensors.values(), versions[-1])


@pytest.mark.parametrize(("share", "encoding"), [(0.01, "overwrite"), (0.2, "xor"), (1.0, "whole")])
def test_the_smallest_encoding_is_used(share, encoding):
    generator = np.random.default_rng(0)
    old = generator.integers(0, 2**16, 100_000, dtype=np.uint16)
    new = np.where(generator.random(len(old)) < share, generator.integers(0, 2**16, len(old), dtype=np.uint16), old)
    name, payload = encode_tensor(old, new)
    assert name == encoding and len(payload) < {"overwrite": 0.04, "xor": 0.5, "whole": 1.01}[name] * new.nbytes
    assert encode_tensor(new, new) is None


@pytest.mark.parametrize("sizes", [[1], [1] * 300, [100, 1, 5000], [2**17 + 1], [2**21, 3]], ids=lambda s: str(s[:3]))
def test_no_bucket_is_larger_than_its_limit(sizes):
    """Also of random bytes, which cannot be compressed."""
    generator = np.random.default_rng(0)
    encoder = DeltaEncoder()
    for _ in range(3):
        first = 10**6  # numbers with many digits
        tensors = [(first + n, generator.integers(0, 256, size, np.uint8), 1) for n, size in enumerate(sizes)]
        limit = largest_bucket(sum(sizes), len(sizes))
        assert len(encoder.encode(tensors)) <= limit
        assert len(encoder.whole([number for number, *_ in tensors])) <= limit


@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_update_is_refused(seed):
    """Whichever byte is damaged, and the copy has no version afterwards, so only a whole update is taken."""
    before, *_, after = versions_of(seed, 2)
    encoder = DeltaEncoder()
    first, second = encoder.encode(bucket(before)), encoder.encode(bucket(after))
    generator, numbers = torch.Generator().manual_seed(seed), list(range(len(before)))
    for _ in range(40):
        copy = copy_of(before)
        copy.begin(None)
        copy.update(numbers, first)
        copy.end(0)
        damaged = second.clone()
        damaged[int(torch.randint(len(damaged), (), generator=generator))] ^= 1 << int(
            torch.randint(8, (), generator=generator)
        )
        copy.begin(0)
        try:
            taken = copy.update(numbers, damaged)
        except RefusedUpdate:
            with pytest.raises(RefusedUpdate, match="this engine has version None"):
                copy.begin(0)
            copy.update(numbers, encoder.whole(numbers))
            taken = list(copy.tensors.items())
        assert same([tensor for _, tensor in taken], after), "a byte without meaning"


def test_an_update_from_another_version_is_refused():
    (tensors, *_) = versions_of(0, 1)
    copy, encoder = copy_of(tensors), DeltaEncoder()
    copy.begin(None)
    copy.update([0, 1, 2, 3, 4], encoder.encode(bucket(tensors)))
    copy.end(7)
    with pytest.raises(RefusedUpdate, match="begins from version 6, but this engine has version 7"):
        copy.begin(6)
    with pytest.raises(RefusedUpdate, match="has version None"):
        copy.begin(7)


def test_differences_from_other_weights_are_refused():
    """The version is right, but the weights are not."""
    before, after = versions_of(4, 1)
    encoder = DeltaEncoder()
    encoder.encode(bucket(before))
    payload = encoder.encode(bucket(after))
    others = {number: torch.ones_like(tensor) for number, tensor in enumerate(before)}
    with pytest.raises(RefusedUpdate, match=r"tensor \d: the checksum is wrong after the update"):
        list(decode(payload, others))


def share(name, seed):
    """Follow updates in a copy that two processes share; the last one is damaged."""
    versions, encoder = versions_of(seed), DeltaEncoder()
    shapes = [(tuple(x.shape), x.dtype) for x in versions[0]]
    copy = HostCopy(shapes, name, 20, torch.distributed.get_rank(), torch.distributed.get_world_size())
    equal, numbers = [], list(range(len(shapes)))
    for number, tensors in enumerate(versions):
        copy.begin(number - 1 if number else None)
        taken = copy.update(numbers, encoder.encode(bucket(tensors)))
        equal.append(same([tensor for _, tensor in taken], tensors))
        copy.end(number)
        torch.distributed.barrier()  # as the engine ends each update in all processes
    copy.begin(len(versions) - 1)
    try:
        copy.update(numbers, encoder.encode(bucket(versions[0]))[:-1])
    except RefusedUpdate as error:
        refused = str(error)
    torch.distributed.barrier()
    copy.close()
    return equal, refused


def test_processes_share_a_copy():
    name = f"mcore_rl_test_{secrets.token_hex(4)}"
    results = run_processes(share, name, 3, world_size=3, timeout=60)
    assert all(all(equal) for equal, _ in results)
    assert any("another process of this server" not in refused for _, refused in results)


def test_too_little_shared_memory_is_told():
    with pytest.raises(RuntimeError, match=r"needs 2000.0 GB of shared memory \(/dev/shm\).*--shm-size"):
        HostCopy([((10**12,), torch.bfloat16)], f"mcore_rl_test_{secrets.token_hex(4)}")

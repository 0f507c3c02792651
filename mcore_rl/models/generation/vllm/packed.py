"""The packed form of a server's answer: a JSON header, and arrays as bytes.

`pack` runs in vLLM's API process and `unpack` in the trainer. The module therefore imports only the standard library
and NumPy.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

ROUTE = "/mcore_rl/generate"
"""Route of vLLM's servers that answers in this form."""
LOWEST_LOGPROB = -9999.0
"""vLLM's value for a log-probability of −∞ or NaN."""
SIZE = struct.Struct("<Q")
ALIGNMENT = 8
"""Each array begins at a multiple of this number of bytes, so that NumPy can read it in place."""

Array = np.ndarray[Any, np.dtype[Any]]


def pack(told: Mapping[str, Any], arrays: Mapping[str, Array]) -> bytes:
    """Return `told`, values that JSON can have, and `arrays` as bytes.

    The bytes are the length of the header (8 bytes, little-endian), the header in JSON, and the elements of the arrays,
    little-endian and row after row. The header has `told` and, as `arrays`, the name, type and shape of each array.
    """
    ordered = {
        name: np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(array.shape)
        for name, array in arrays.items()
    }
    described = [[name, array.dtype.str, list(array.shape)] for name, array in ordered.items()]
    header = json.dumps({"told": told, "arrays": described}).encode()
    header += b" " * (-(SIZE.size + len(header)) % ALIGNMENT)
    parts = [SIZE.pack(len(header)), header]
    for array in ordered.values():
        parts += [array.tobytes(), bytes(-array.nbytes % ALIGNMENT)]
    return b"".join(parts)


def unpack(body: bytes) -> tuple[dict[str, Any], dict[str, Array]]:
    """Invert `pack`: return the values and the arrays. The arrays do not keep `body` in memory.

    Raises:
        ValueError: `body` is not the result of `pack`.
    """
    try:
        (length,) = SIZE.unpack_from(body)
        header = json.loads(body[SIZE.size : SIZE.size + length])
        told, start, arrays = header["told"], SIZE.size + length, dict[str, Array]()
        for name, kind, shape in header["arrays"]:
            dtype, count = np.dtype(kind), math.prod(shape)
            if dtype.kind not in "iuf" or any(size < 0 for size in shape):
                raise ValueError(f"an array of type {kind} and shape {shape}")
            flat = np.frombuffer(body, dtype, count, start) if count else np.zeros(0, dtype)
            arrays[name] = flat.reshape(shape).copy()
            start += flat.nbytes + -flat.nbytes % ALIGNMENT
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"an answer that cannot be read: {error}") from None
    if start != len(body) or not isinstance(told, dict):
        raise ValueError(f"an answer that cannot be read: it has {len(body)} bytes instead of {start}")
    return told, arrays

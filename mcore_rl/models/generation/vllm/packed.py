"""The packed form of a server's answer: a JSON header, and arrays as bytes.

`pack` runs in vLLM's API process and `unpack` in the trainer. The module therefore imports only the standard library
and NumPy.
"""

from __future__ import annotations

import json
import math
import reprlib
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

TYPES = ("|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8")
"""Types of arrays, by NumPy's names. Other names could stand for objects, or for elements of any size."""
MAX_DIMENSIONS, MAX_SIZE = 8, 2**31 - 1
MAX_SHOWN = 200
"""Maximum number of characters of a value in a message."""

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

    The arrays have no more bytes than `body`, whatever sizes its header tells.

    Raises:
        ValueError: `body` is not the result of `pack`; the message contains what was found and what was expected.
    """
    start = SIZE.size
    length = int.from_bytes(body[:start], "little")
    if length > len(body) - start:
        raise _unreadable(f"it has {len(body)} bytes, which cannot contain a header of {length}")
    try:
        header = json.loads(body[start : start + length].decode())
    except (ValueError, RecursionError) as error:
        raise _unreadable(f"its header is not JSON: {error}") from None
    told, described = (header.get("told"), header.get("arrays")) if isinstance(header, dict) else (None, None)
    if not isinstance(told, dict) or not isinstance(described, list):
        raise _unreadable(f"its header must have an object `told` and a list `arrays`, but is {shown(header)}")
    start += length
    arrays = dict[str, Array]()
    for entry in described:
        if not _describes_array(entry):
            raise _unreadable(
                f"an array is described by {shown(entry)}; it must be a name, a type (one of "
                f"{', '.join(TYPES)}) and a list of sizes"
            )
        name, kind, shape = entry
        dtype, count = np.dtype(kind), math.prod(shape)
        nbytes = count * dtype.itemsize
        if nbytes > len(body) - start:
            raise _unreadable(f"it has {len(body)} bytes, which end before those of the array {shown(entry)}")
        flat = np.frombuffer(body, dtype, count, start) if count else np.zeros(0, dtype)
        arrays[name] = flat.reshape(shape).copy()
        start += nbytes + -nbytes % ALIGNMENT
    if start != len(body):
        raise _unreadable(f"it has {len(body)} bytes instead of {start}")
    return told, arrays


def _unreadable(why: str) -> ValueError:
    return ValueError(f"an answer that cannot be read: {why}")


def shown(value: Any) -> str:
    """Return `value`, of JSON, as a message can show it: on one line, and shortened."""
    short = reprlib.Repr()
    short.maxlevel = 3
    text = short.repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def _describes_array(entry: Any) -> bool:
    """Return whether an entry of the header's `arrays` is a name, one of `TYPES`, and a list of sizes."""
    if not isinstance(entry, list) or len(entry) != 3:
        return False
    name, kind, shape = entry
    if not isinstance(name, str) or kind not in TYPES or not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        return False
    return all(map(is_size, shape))


def is_size(value: Any) -> bool:
    """Return whether `value`, of JSON, is a number of elements that an answer can have."""
    return type(value) is int and 0 <= value <= MAX_SIZE


def check_vector(array: Array, name: str, kind: str) -> Array:
    """Return `array`, the entry `name` of an answer, if it has one dimension and NumPy's type `kind`.

    Raises:
        ValueError: it has not; the message contains what was found and what was expected.
    """
    if array.ndim != 1 or array.dtype != np.dtype(kind):
        raise ValueError(f"{name} of shape {array.shape} and type {array.dtype} instead of one dimension and {kind}")
    return array


def check_ids(array: Array, name: str) -> Array:
    """Return `array`, the entry `name` of an answer, if it is a list of ids of tokens: [n] int32, none negative.

    Raises:
        ValueError: it is not; the message contains what was found and what was expected.
    """
    if len(check_vector(array, name, "int32")) and array.min() < 0:
        raise ValueError(f"{name} with the negative id {array.min()}")
    return array

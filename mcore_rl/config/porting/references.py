"""OmegaConf's references between values, such as ${a.b} and ${mul:${a.b},2}."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from mcore_rl.config.porting.defaults import flattened, parsed

_FUNCTIONS: Mapping[str, Callable[[list[Any]], Any]] = {
    "mul": math.prod, "add": sum, "max": max, "min": min,
    "sub": lambda two: two[0] - two[1], "div": lambda two: two[0] / two[1],
}  # fmt: skip
"""Functions that verl and NeMo RL give to references, by name; their argument is a list of numbers."""


def resolved(flat: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values with OmegaConf's references replaced, and a line for each that a person has to read."""
    found, computed = dict(flat), dict[str, str]()
    for key, value in flat.items():
        try:
            new = _value_of(value, key, flat, 0)
        except (LookupError, ValueError, TypeError, ArithmeticError):
            del found[key]
            computed[key] = f"{key}: {value} is computed by OmegaConf; set its counterpart yourself"
            continue
        if isinstance(new, dict) and new:
            del found[key]
            found |= dict(flattened(new, f"{key}."))
        else:
            found[key] = new
    return found, computed


def _value_of(value: Any, key: str, flat: Mapping[str, Any], depth: int) -> Any:
    """Return the value of a text with references, such as ${a.b} or ${mul:${a.b},2}.

    Raises:
        LookupError, ValueError, TypeError, ArithmeticError: it cannot be computed.
    """
    if isinstance(value, list):
        return [_value_of(part, key, flat, depth) for part in value]
    while isinstance(value, str) and (inner := re.search(r"\$\{([^${}]*)\}", value)):
        if depth > 20:
            raise ValueError("the references form a circle")
        part = _referenced(inner[1].strip(), key, flat, depth + 1)
        if inner[0] == value.strip():
            return part
        value = value[: inner.start()] + str(part) + value[inner.end() :]
    return value


def _referenced(expression: str, key: str, flat: Mapping[str, Any], depth: int) -> Any:
    function, colon, rest = expression.partition(":")
    if not colon:
        dots = len(expression) - len(expression.lstrip("."))
        name = ".".join([*key.split(".")[:-dots], expression.lstrip(".")]) if dots else expression
        if name in flat:
            return _value_of(flat[name], name, flat, depth)
        section = {other: flat[other] for other in flat if other.startswith(f"{name}.")}
        if not section:
            raise LookupError(name)
        return {other.removeprefix(f"{name}."): _value_of(part, other, flat, depth) for other, part in section.items()}
    arguments = [part.strip() for part in rest.split(",")]
    if function == "oc.select":
        try:
            return _referenced(arguments[0], key, flat, depth)
        except LookupError:
            return parsed(arguments[1]) if len(arguments) > 1 else None
    numbers = [parsed(argument) for argument in arguments]
    return _FUNCTIONS[function](numbers)

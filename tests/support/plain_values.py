"""Values with arrays, made comparable by ==."""

from dataclasses import fields, is_dataclass

import numpy as np
import torch


def plain(value):
    """Return the value with lists in place of arrays, and dictionaries in place of data classes, at every depth."""
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        return value.tolist()
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value

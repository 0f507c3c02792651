"""A counter of the copies between host and device."""

import traceback

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def where():
    """Return the line of this package that runs, and the line that called it."""
    frames = [f for f in traceback.extract_stack() if "mcore_rl" in f.filename]
    return [f"{frame.filename}:{frame.lineno}" for frame in frames[-2:]]


class Transfers(TorchDispatchMode):
    """Counter of transfers from the host's memory to a simulated device: those that block the host, and the others."""

    def __init__(self):
        super().__init__()
        self.waited_for, self.others = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is torch.ops.aten._to_copy.default and args[0].device.type == "cpu" and out.is_meta:
            (self.others if kwargs.get("non_blocking") else self.waited_for).append(where())
        if func is torch.ops.aten.copy_.default and args[0].is_meta and not args[1].is_meta:
            self.waited_for.append(where())
        return out

"""A counter of the copies between host and device."""

import traceback

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def where():
    """The line of this package that runs, and the one that called it."""
    frames = [f for f in traceback.extract_stack() if "mcore_rl" in f.filename]
    return [f"{frame.filename}:{frame.lineno}" for frame in frames[-2:]]


class Transfers(TorchDispatchMode):
    """What goes from the host's memory to a simulated device: for what of it the host would wait, and for what not."""

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

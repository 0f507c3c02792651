"""A counter of the copies between host and device."""

import traceback

import torch
from torch.overrides import TorchFunctionMode
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
        self._hidden = HiddenTransfers(self.waited_for)

    def __enter__(self):
        self._hidden.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._hidden.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is torch.ops.aten._to_copy.default and args[0].device.type == "cpu" and out.is_meta:
            (self.others if kwargs.get("non_blocking") else self.waited_for).append(where())
        if func is torch.ops.aten.copy_.default and args[0].is_meta and not args[1].is_meta:
            self.waited_for.append(where())
        return out


class HiddenTransfers(TorchFunctionMode):
    """Counter of transfers that no operation shows: tensors of the device made of numbers, and indices of the host."""

    def __init__(self, waited_for):
        super().__init__()
        self.waited_for = waited_for

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in ("tensor", "as_tensor") and out.is_meta and not isinstance(args[0], torch.Tensor):
            self.waited_for.append(where())
        if name in ("__getitem__", "__setitem__") and args[0].is_meta:
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            self.waited_for += [where() for index in indices if is_on_host(index)]
        return out


def is_on_host(index):
    if isinstance(index, torch.Tensor):
        return not index.is_meta and index.ndim > 0
    return hasattr(index, "__len__")

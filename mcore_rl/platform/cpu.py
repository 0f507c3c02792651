"""Functions for processes without a GPU: replacements for `torch.cuda` and for some collectives, malloc settings.

Megatron-Core calls functions of `torch.cuda` even on the CPU and on a simulated device.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._device import _device_constructors


class _Generators:
    """Replacement for `torch.cuda.default_generators`: every index returns the CPU's generator."""

    def __getitem__(self, index: object) -> torch.Generator:
        return torch.default_generator


class Inert:
    """Replacement for a CUDA stream or event that does nothing: work on the CPU is synchronous."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    record = wait = synchronize = wait_event = wait_stream = record_stream = _nothing

    def record_event(self, event: Any = None) -> Any:
        return event or Inert()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 0.0


def _is_cuda(value: object) -> bool:
    return (isinstance(value, str) and value.startswith("cuda")) or (
        isinstance(value, torch.device) and value.type == "cuda"
    )


def _on(device: torch.device, factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `factory`, which creates tensors: replace the argument device="cuda" by `device`, and drop `pin_memory`."""

    @functools.wraps(factory)
    def wrapper(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = device
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return wrapper


def _takes_unequal_sizes(group: Any) -> bool:
    """Return whether the backend of `group` (None: all processes) says that it takes tensors of unequal sizes."""
    group = torch.distributed.group.WORLD if group is None else group
    return getattr(group, "takes_unequal_sizes", False)


def _gather_of_uneven(all_gather: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `all_gather` so that the ranks' tensors may have unequal sizes, which gloo rejects."""

    @functools.wraps(all_gather)
    def wrapper(outputs: list[Tensor], tensor: Tensor, group: Any = None, **kwargs: Any) -> Any:
        if len({output.shape for output in outputs}) == 1 or _takes_unequal_sizes(group):
            return all_gather(outputs, tensor, group=group, **kwargs)
        rank = torch.distributed.get_rank(group)
        for source, output in enumerate(outputs):
            part = tensor.contiguous() if source == rank else torch.empty_like(output)
            torch.distributed.broadcast(part, group=group, group_src=source)
            output.copy_(part)
        return None

    return wrapper


def _scatter_of_uneven(reduce_scatter: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of `reduce_scatter` in which ranks may receive unequal sizes, which gloo rejects.

    The replacement can only sum, because Megatron uses no other operation.
    """

    @functools.wraps(reduce_scatter)
    def wrapper(output: Tensor, inputs: list[Tensor], *args: Any, group: Any = None, **kwargs: Any) -> Any:
        if _takes_unequal_sizes(group):
            return reduce_scatter(output, inputs, *args, group=group, **kwargs)
        assert not (args or kwargs), "only sums"
        whole = torch.cat(inputs)
        torch.distributed.all_reduce(whole, group=group)
        output.copy_(whole.split([len(part) for part in inputs])[torch.distributed.get_rank(group)])
        return None

    return wrapper


def _all_to_all_of_lists(all_to_all_single: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `all_to_all_single` so that split sizes may be tensors; Megatron converts them to lists only on a GPU."""

    @functools.wraps(all_to_all_single)
    def wrapper(output: Tensor, input: Tensor, **kwargs: Any) -> Any:
        for name in ("output_split_sizes", "input_split_sizes"):
            if isinstance(kwargs.get(name), Tensor):
                kwargs[name] = kwargs[name].tolist()
        return all_to_all_single(output, input, **kwargs)

    return wrapper


def install_stand_ins(device: torch.device) -> None:
    """Replace the CUDA functions that Megatron-Core calls by functions that work on `device`.

    The comments name the files of `megatron/core` that call each function.
    """
    cuda: Any = torch.cuda

    # tensor_parallel/layers.py and distributed/param_and_grad_buffer.py, among others, create tensors with
    # device=torch.cuda.current_device(), which takes a torch.device as well.
    cuda.current_device = lambda: device
    cuda.device_count = lambda: 1

    # pipeline_parallel/p2p_communication.py synchronises; distributed/param_and_grad_buffer.py,
    # optimizer/cpu_offloading and transformer/moe/token_dispatcher.py have streams.
    cuda.synchronize = cuda.empty_cache = lambda *_, **__: None
    cuda.Stream = cuda.Event = Inert
    stream = Inert()
    cuda.current_stream = cuda.default_stream = lambda *_: stream
    cuda.stream = lambda *_: contextlib.nullcontext()

    # tensor_parallel/random.py saves and restores the device's random state.
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda.default_generators = _Generators()
    cuda._lazy_init = lambda: None
    cuda._lazy_call = lambda call, **_: call()

    # optimizer/clip_grads.py, pipeline_parallel/schedules.py and rerun_state_machine.py write device="cuda";
    # optimizer/optimizer.py and optimizer/cpu_offloading move tensors by methods. Wrapping the factories costs a
    # dictionary lookup; a TorchFunctionMode costs about 12 % of a decode step.
    # `with torch.device("meta")` recognises factories by identity, so it must cache the original ones first.
    _device_constructors()
    for name in ("tensor", "zeros", "ones", "empty", "full", "empty_like", "zeros_like"):
        setattr(torch, name, _on(device, getattr(torch, name)))
    tensor_class: Any = torch.Tensor
    tensor_class.cuda = lambda self, *_, **__: self.to(device)
    tensor_class.pin_memory = lambda self, *_, **__: self

    # optimizer/optimizer.py and distrib_optimizer.py accept parameters only by the type names of CUDA tensors.
    type_of = tensor_class.type

    def type_name(self: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return type_of(self, dtype, *args, **kwargs)
        return f"torch.cuda.{type_of(self).rpartition('.')[2]}"

    tensor_class.type = type_name

    # transformer/moe/token_dispatcher.py exchanges parts of unequal sizes (tensor_parallel/mappings.py), because the
    # number of tokens per expert varies.
    distributed: Any = torch.distributed
    distributed.all_gather = _gather_of_uneven(distributed.all_gather)
    distributed.reduce_scatter = _scatter_of_uneven(distributed.reduce_scatter)
    distributed.all_to_all_single = _all_to_all_of_lists(distributed.all_to_all_single)


FEW_ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 128, 192, 256)
"""Numbers of rows for which oneDNN computes products. Others are padded, because it keeps code for each number."""


@functools.cache
def _product_of_onednn() -> Callable[..., Tensor] | None:
    """Return oneDNN's linear layer, as torch's compiler calls it; None if this torch has none."""
    if not torch.backends.mkldnn.is_available():
        return None
    found: Callable[..., Tensor] | None = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    return found


def linear_of_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `F.linear(x, weight, bias)`; fp32 products of few rows are oneDNN's.

    On an AMD processor, torch's own products take longer: 1.6 to 2.9 times as long for one to three rows, 1.5 times
    for 32, 1.3 times for 256.
    """
    rows, product = x.reshape(-1, x.shape[-1]), _product_of_onednn()
    if product is None or not 0 < len(rows) <= FEW_ROWS[-1] or {x.dtype, weight.dtype} != {torch.float32}:
        return F.linear(x, weight, bias)
    padding = FEW_ROWS[bisect.bisect_left(FEW_ROWS, len(rows))] - len(rows)
    padded = F.pad(rows, (0, 0, 0, padding)) if padding else rows
    return product(padded, weight, bias, "none", [], "")[: len(rows)].view(*x.shape[:-1], len(weight))


KEPT_BYTES = {-3: 2**24, -1: 2**28}
"""Bytes for two parameters of glibc's `mallopt`, by number: M_MMAP_THRESHOLD is -3, M_TRIM_THRESHOLD is -1."""


def return_freed_memory() -> None:
    """Let glibc return all freed memory to Linux, also what lies between blocks in use. Not without glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def keep_freed_memory() -> None:
    """Let glibc keep up to 256 MB of freed memory instead of returning it to Linux.

    Otherwise Linux maps the memory of each new tensor and fills it with zeros, page by page. This takes a tenth of the
    processor time of a training step. Only blocks of up to 16 MB are kept: if the limit were 32 MB, a DPO run would
    need a seventh more memory and as much time. Without glibc, this function does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for setting, value in KEPT_BYTES.items():
            mallopt(setting, value)

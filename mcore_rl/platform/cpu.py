"""Functions for processes without a GPU: replacements for `torch.cuda`, oneDNN's matrix products, malloc settings.

Megatron-Core calls functions of `torch.cuda` even on the CPU and on a simulated device.

torch computes products of float32 matrices with MKL, which does not use AVX-512 on AMD's processors. oneDNN does, and
takes 0.4 to 0.6 of MKL's time there (docs/benchmarks.md). torch has no setting that selects oneDNN. This module
therefore replaces the kernel of `aten::mm` for the whole process.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._device import _device_constructors

from mcore_rl.platform import host_backend


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


def _gather_of_uneven(all_gather: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `all_gather` so that the ranks' tensors may have unequal sizes, which gloo rejects."""

    @functools.wraps(all_gather)
    def wrapper(outputs: list[Tensor], tensor: Tensor, group: Any = None, **kwargs: Any) -> Any:
        if len({output.shape for output in outputs}) == 1 or host_backend.is_host(group):
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
        if host_backend.is_host(group):
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
    """Replace the CUDA functions that Megatron-Core calls by functions that work on `device`."""
    cuda: Any = torch.cuda

    # Tensors are created with device=torch.cuda.current_device(), which takes a torch.device as well.
    cuda.current_device = lambda: device
    cuda.device_count = lambda: 1
    cuda.set_device = lambda *_: None

    # The schedules and the optimizer synchronise, wait on streams and mark NVTX ranges.
    cuda.synchronize = cuda.empty_cache = lambda *_, **__: None
    cuda.Stream = cuda.Event = Inert
    stream = Inert()
    cuda.current_stream = cuda.default_stream = lambda *_: stream
    cuda.stream = lambda *_: contextlib.nullcontext()
    cuda.set_stream = lambda *_: None
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_, **__: None

    # The RNG tracker and activation recomputation save and restore the device's random state.
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda.default_generators = _Generators()
    cuda._lazy_init = lambda: None
    cuda._lazy_call = lambda call, **_: call()

    # The optimizer, gradient clipping, schedules and checkpoints write device="cuda". Wrapping the
    # factories costs a dictionary lookup; a TorchFunctionMode costs about 12 % of a decode step.
    # `with torch.device("meta")` recognises factories by identity, so it must cache the original ones first.
    _device_constructors()
    for name in ("tensor", "zeros", "ones", "empty", "full", "empty_like", "zeros_like"):
        setattr(torch, name, _on(device, getattr(torch, name)))
    tensor_class: Any = torch.Tensor
    tensor_class.cuda = lambda self, *_, **__: self.to(device)
    tensor_class.pin_memory = lambda self, *_, **__: self

    # The optimizers accept parameters only by the type names of CUDA tensors.
    type_of = tensor_class.type

    def type_name(self: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return type_of(self, dtype, *args, **kwargs)
        return f"torch.cuda.{type_of(self).rpartition('.')[2]}"

    tensor_class.type = type_name

    # The number of tokens per expert varies, so the dispatcher gathers and scatters parts of unequal sizes.
    distributed: Any = torch.distributed
    distributed.all_gather = _gather_of_uneven(distributed.all_gather)
    distributed.reduce_scatter = _scatter_of_uneven(distributed.reduce_scatter)
    distributed.all_to_all_single = _all_to_all_of_lists(distributed.all_to_all_single)


KEPT_BYTES = {-3: 2**24, -1: 2**28}
"""Bytes for two parameters of glibc's `mallopt`, by number: M_MMAP_THRESHOLD is -3, M_TRIM_THRESHOLD is -1."""


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


SMALLEST = 2**22
"""Least number of multiplications for which oneDNN is called; for fewer, the call takes longer than the product."""
BLOCKS = (512, 256)
"""Sizes of the blocks of tokens into which a product is divided.

Blocks limit the number of shapes, because oneDNN compiles and keeps code for each shape (0.3 to 0.6 MB). A last block
of at most `FEW` tokens is padded by at most a quarter. A larger last block is padded to the next power of 2.
"""

FEW = 32
"""Maximum number of tokens in a block that is padded by at most a quarter. In such small products, as in generation,
a padded token costs as much as a real one."""

_kernels: list[torch.library.Library] = []


def install_products() -> None:
    """From now on, compute this process's float32 products with oneDNN, if torch has it. Further calls do nothing."""
    if _kernels or not torch.backends.mkldnn.is_available():
        return
    _kernels.append(torch.library.Library("aten", "IMPL"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"[\s\S]*Overriding a previously registered kernel")
        _kernels[0].impl("mm", _product, "CPU")


@contextlib.contextmanager
def kernel_of_torch() -> Iterator[None]:
    """Context in which products are computed by torch's own kernel instead of oneDNN, for comparisons."""
    installed = bool(_kernels)
    while _kernels:
        _kernels.pop()._destroy()
    try:
        yield
    finally:
        if installed:
            install_products()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the result of `F.linear` of float32 tensors, computed with oneDNN and without gradients."""
    y = _rows_times(x.flatten(0, -2), weight, bias)
    return y.unflatten(0, x.shape[:-1])


def uses_onednn(x: Tensor, y: Tensor) -> bool:
    """Return whether the product of these matrices on the CPU is computed by oneDNN."""
    if not _kernels or not x.dim() == y.dim() == 2 or x.shape[1] != y.shape[0]:  # torch's kernel refuses the factors
        return False
    return math.prod((*x.shape, y.shape[1])) >= SMALLEST and x.dtype == y.dtype == torch.float32


def product_of_torch(x: Tensor, y: Tensor) -> Tensor:
    """Return x · y, computed by torch's own kernel. Unlike oneDNN, it keeps no generated code for each shape."""
    return torch.mm(x, y, out=x.new_empty(0))  # this overload has torch's kernel


def _product(x: Tensor, y: Tensor) -> Tensor:
    if not uses_onednn(x, y):
        return product_of_torch(x, y)
    if x.t().is_contiguous() and not x.is_contiguous():  # the gradient of a weight is summed over tokens
        return _sum_over_rows(x.t(), y)
    return _rows_times(x, y.t())


def _rows_times(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x · weightᵀ + bias, computed in blocks of the rows of `x` (tokens)."""
    count, weight = len(x), _dense(weight)
    if 0 < count <= FEW or count in BLOCKS:  # a single block needs no copy
        return _onednn(_filled(x, _block_size(count)), weight, bias)[:count]
    result = x.new_empty(count, len(weight))
    for rows, size in _blocks(count):
        result[rows] = _onednn(_filled(x[rows], size), weight, bias)[: rows.stop - rows.start]
    return result


def _sum_over_rows(x: Tensor, y: Tensor) -> Tensor:
    """Return xᵀ · y, computed in blocks of rows and summed. Row i of both `x` and `y` belongs to token i."""
    if x.shape[1] > y.shape[1]:  # oneDNN copies the left factor, because it is transposed: let it be the smaller one
        return _sum_over_rows(y, x).t().contiguous()
    parts = (_onednn(_filled(x[rows], size).t(), _filled(y[rows], size).t()) for rows, size in _blocks(len(x)))
    result = next(parts)
    for part in parts:
        result += part
    return result


def _blocks(count: int) -> Iterator[tuple[slice, int]]:
    """Divide `count` tokens into blocks; yield each block's range, and the number of rows to which it is padded."""
    start = 0
    while start < count:
        size = _block_size(count - start)
        yield slice(start, min(start + size, count)), size
        start += size


def _block_size(rest: int) -> int:
    """Return the number of rows of the next block if `rest` rows are left."""
    if rest <= FEW:
        return coarse_size(rest, 4)
    return next((block for block in BLOCKS if block <= rest), 1 << (rest - 1).bit_length())


def coarse_size(size: int, parts: int) -> int:
    """Round `size` up, so that only `parts` different sizes remain between a power of two and the next.

    This limits the number of sizes for which, for example, code is compiled. `parts` must be a power of two. The size
    grows by less than 1 / `parts`; sizes up to 2 · `parts` do not change.
    """
    step = max(1, 2 ** (size - 1).bit_length() // (2 * parts))
    return -(-size // step) * step


def _filled(x: Tensor, rows: int) -> Tensor:
    """Return `x` padded with rows of zeros to `rows` rows, without gaps or overlaps in memory."""
    if len(x) == rows:
        return _dense(x)
    return F.pad(x, (0, 0, 0, rows - len(x)))


def _dense(x: Tensor) -> Tensor:
    """Return `x`, or a copy if its elements have gaps or overlaps in memory.

    If the right factor has gaps, oneDNN takes 1000 times as long. oneDNN refuses factors with overlaps.
    """
    return x if x.is_contiguous() or x.t().is_contiguous() else x.contiguous()


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x · weightᵀ + bias, computed by oneDNN."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y

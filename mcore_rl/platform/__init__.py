"""The device that Megatron uses: CUDA with NCCL, the CPU with gloo, or a simulated device.

Megatron-Core uses `torch.cuda` for devices, streams and random states, and writes `device="cuda"` in a few places. A
program calls `initialize_platform()` at its start, before it imports anything that uses Megatron. With a GPU, the call
only selects the device. Without a GPU, it replaces functions of `torch.cuda` by functions of `cpu.py`. On a simulated
device, tensors have shapes but no memory. No other file of the package uses `torch.cuda`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import cache
from itertools import accumulate
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl.errors import UserError
from mcore_rl.platform import cpu
from mcore_rl.utils import torchrun

T = TypeVar("T")

HOST_BACKEND = "mcore_rl.testing.host_backend"
"""Module of the backend for processes that share a GPU: a tool of tests, imported only if the backend is chosen."""

_installed = False
_simulates = False


def has_gpu() -> bool:
    """Return whether this process uses a GPU (a CUDA device)."""
    return torch.cuda.is_available() and not _simulates


def simulates() -> bool:
    """Return whether the device is simulated: tensors have only shapes, and collectives do not communicate."""
    return _simulates


def device() -> torch.device:
    """Return the device on which the model and its data are: CUDA, CPU, or meta in a simulation."""
    if _simulates:
        return torch.device("meta")
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu() else torch.device("cpu")


class DeviceConfig(Protocol):
    """A configuration or a section, in which some values (`auto`) depend on the device."""

    def for_device(self, on_gpu: bool, te_problem: str | None, simulates: bool) -> Self: ...


ConfigT = TypeVar("ConfigT", bound=DeviceConfig)


TE_VERSIONS = (2, 9), (2, 20)
"""The oldest supported version of Transformer Engine, and the newest that was compared with the stand-in of the tests
(`tests/support/check_te_signatures.py`)."""


@cache
def te_problem() -> str | None:
    """Return why Transformer Engine cannot be used, in words such as "is not installed"; None if it can be used."""
    if importlib.util.find_spec("transformer_engine") is None:
        return "is not installed"
    try:
        version = _te_version()
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # its libraries may not fit torch, CUDA or the machine
        return f"cannot be imported ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    if _minor(version) < TE_VERSIONS[0]:
        return f"has version {version}; {_dotted(TE_VERSIONS[0])} or newer is needed"
    if not (has_gpu() or version.endswith("+cpu")):
        return "needs a GPU, and torch sees none"
    return None


def te_warning() -> str | None:
    """Return a warning if Transformer Engine can be used, but is newer than the versions that were checked."""
    if te_problem() is not None or _minor(version := _te_version()) <= TE_VERSIONS[1]:
        return None
    return (
        f"Transformer Engine {version} is newer than {_dotted(TE_VERSIONS[1])}, the newest version whose functions "
        "were compared with this package; if it fails, set model.transformer_impl=local"
    )


def _te_version() -> str:
    package: Any = importlib.import_module("transformer_engine")
    return str(package.__version__)


def te_lacks(major: int, minor: int) -> str | None:
    """Return which version of Transformer Engine is needed and which there is, if it is older than `major.minor`."""
    found = _te_version()
    return f"Transformer Engine {major}.{minor}, not {found}" if _minor(found) < (major, minor) else None


def _minor(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


@cache
def fp8_problem(recipe: str, scales: str) -> str | None:
    """Return why this machine's GPU cannot compute with an FP8 recipe, and what to do; None if it can.

    The limits are those of Transformer Engine. Without a GPU, the result is None.

    Args:
        scales: form of the scales, see `FP8Config`.
    """
    if not has_gpu():
        return None
    capability, cuda = torch.cuda.get_device_capability(), torch.version.cuda or "0.0"
    found = f"this one has {_dotted(capability)}"
    if capability < (8, 9):
        return f"FP8 needs a GPU of compute capability 8.9 or higher, {found}; leave model.fp8 out"
    if recipe == "mxfp8" and capability[0] != 10:
        return f"mxfp8 needs a GPU of compute capability 10, {found}; set model.fp8.recipe=blockwise"
    if recipe == "blockwise" and (capability < (9, 0) or _minor(cuda) < (12, 9)):
        return (
            f"blockwise needs a GPU of compute capability 9.0 or higher, and CUDA 12.9 or newer; {found}, and CUDA is "
            f"{cuda}; set model.fp8.recipe=tensorwise"
        )
    if recipe == "blockwise" and scales == "float32" and capability[0] >= 10:
        return (
            f"with compute capability {_dotted(capability)}, Transformer Engine computes blockwise by MXFP8, whose "
            "scales are powers of two; set model.fp8.scales=power_of_two"
        )
    return None


def resolve(config: ConfigT) -> ConfigT:
    """Return `config` with each `auto` replaced by the value for this device.

    Raises:
        UserError: the configuration requires Transformer Engine, but it cannot be used.
    """
    return config.for_device(on_gpu=has_gpu() or _simulates, te_problem=te_problem(), simulates=_simulates)


def fuses_weight_gradients() -> bool:
    """Return whether Megatron's linear layers can add a weight gradient to its fp32 buffer in a single kernel.

    The kernel, which multiplies the matrices and adds the product to the buffer, is part of apex.
    """
    return has_gpu() and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def compiles(x: Tensor) -> bool:
    """Return whether elementwise functions of tensors like `x` are compiled: on a GPU, if Triton is installed."""
    return x.is_cuda and _has_triton()


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the elementwise `function` compiled into a single kernel for tensors of any size.

    The kernel does not round intermediate results to the inputs' precision.
    """
    return torch.compile(function, dynamic=True)


def device_id(of: torch.device | None = None) -> str:
    """Return a name that identifies the device in all processes: the UUID of a GPU, or "cpu".

    Args:
        of: the device; `device()` if None.
    """
    of = of or device()
    return str(torch.cuda.get_device_properties(of).uuid) if of.type == "cuda" else of.type


def use_device(of: torch.device) -> None:
    """Let this thread use the device `of`. A new thread begins with the first GPU."""
    if of.type == "cuda":
        torch.cuda.set_device(of)


def device_index(of: torch.device) -> int:
    """Return the index of the GPU `of` in this process; if `of` has no index, the index of the current GPU."""
    return torch.cuda.current_device() if of.index is None else of.index


def describe_gpus() -> list[str]:
    """Return a line for each GPU that torch can use, with its name and memory."""
    return [f"GPU {n}: {name}, {memory / 2**30:.0f} GiB" for n, (name, memory) in enumerate(gpus())]


def gpus() -> list[tuple[str, int]]:
    """Return the name and the bytes of memory of each GPU that torch can use."""
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count() if has_gpu() else 0))
    return [(gpu.name, gpu.total_memory) for gpu in found]


def gpu_names() -> tuple[str, ...]:
    """Return a name for each GPU that torch can use, by which CUDA_VISIBLE_DEVICES of another process selects it."""
    count = torch.cuda.device_count() if has_gpu() else 0
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return tuple(visible[:count]) if len(visible) >= count and visible[0] else tuple(map(str, range(count)))


def forget_peak_memory() -> None:
    """Reset `peak_memory`; without a GPU, do nothing."""
    if has_gpu():
        torch.cuda.reset_peak_memory_stats()


def peak_memory() -> int:
    """Return the largest number of bytes that tensors of the current GPU had at the same time; 0 without a GPU."""
    return torch.cuda.max_memory_allocated() if has_gpu() else 0


def synchronize(of: torch.device | None = None) -> None:
    """Wait until a GPU (the current one if `of` is None) has done all submitted work; without a GPU, do nothing."""
    if has_gpu():
        torch.cuda.synchronize(of)


def synchronize_stream() -> None:
    """Wait until the GPU has done the work of the current stream; without a GPU, do nothing."""
    if has_gpu():
        torch.cuda.current_stream().synchronize()


class Event(Protocol):
    """A mark in the sequence of work that was submitted to the device."""

    def query(self) -> bool:
        """Return whether the device has done all work that was submitted before this mark."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done all work that was submitted before this mark."""
        ...


def record_event() -> Event:
    """Record an event after all work submitted to the current stream; without a GPU the event is complete at once."""
    event: Any = torch.cuda.Event() if has_gpu() else cpu.Inert()
    event.record()
    recorded: Event = event
    return recorded


def random_state() -> torch.Tensor | None:
    """Return the state of the GPU's random number generator; None without a GPU."""
    return torch.cuda.get_rng_state() if has_gpu() else None


def set_random_state(state: torch.Tensor) -> None:
    """Restore the state that `random_state` returned."""
    torch.cuda.set_rng_state(state)


def release_cached_memory() -> None:
    """Free the unused device memory that the allocator keeps, so that other processes can use it."""
    torch.cuda.empty_cache()


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `F.linear(x, weight, bias)`, on the CPU by a function that is faster for few rows; without gradients."""
    return F.linear(x, weight, bias) if x.device.type != "cpu" else cpu.linear_of_few_rows(x, weight, bias)


def storage_id(tensor: torch.Tensor) -> int:
    """Return a number that identifies a tensor's storage while the storage exists.

    The storage's address cannot be used for this, because an emptied or simulated storage has no address.
    """
    return int(tensor.untyped_storage()._cdata)


def page_lock(block: torch.Tensor) -> None:
    """Page-lock the host tensor `block` if there is a GPU. If this fails, warn that copies are slower."""
    if not (has_gpu() and block.numel()):
        return
    cudart = torch.cuda.cudart()
    status = cudart.cudaHostRegister(block.data_ptr(), block.nbytes, 0)
    if status != cudart.cudaError.success:
        told = f"{block.nbytes:,} bytes of the host cannot be page-locked ({status}): copies to them are slower"
        warnings.warn(told, stacklevel=2)
        with contextlib.suppress(RuntimeError):  # clears the thread's last error, which the next launch would raise
            torch.zeros(1, device=device())


def release_page_lock(block: torch.Tensor) -> None:
    """Undo `page_lock`."""
    if has_gpu() and block.numel():
        torch.cuda.cudart().cudaHostUnregister(block.data_ptr())


def is_asynchronous() -> bool:
    """Return whether the host continues while the device computes, and waits only when it reads a value."""
    return has_gpu() or _simulates


def to_device(values: Any, dtype: torch.dtype = torch.long) -> torch.Tensor:
    """Copy numbers (a list, lists of equal length, an array, a host tensor) to the device without waiting."""
    return sent(torch.as_tensor(values, dtype=dtype), device())


def sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to `device` without waiting for the device; on a GPU, through page-locked memory."""
    leaves_host = values.device.type == "cpu" and device.type == "cuda"
    return (values.pin_memory() if leaves_host else values).to(device, non_blocking=True)


def sent_together(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copy host tensors to `device` as one block, because many small copies take longer than a single large copy."""
    if device.type == "cpu":
        return list(tensors)
    block = torch.empty(bytes_for(tensors), dtype=torch.uint8, device="cpu")
    for place, tensor in zip(views_of(block, tensors), tensors, strict=True):
        place.copy_(tensor)
    return views_of(sent(block, device), tensors)


class HostCopy:
    """A copy of a tensor on the host.

    The tensor must not change any more. The host waits only when it reads the copy.
    """

    def __init__(self, of: torch.Tensor) -> None:
        self._event: Event | None = None
        if of.is_cuda:
            self._host = torch.empty(of.shape, dtype=of.dtype, pin_memory=True).copy_(of, non_blocking=True)
            self._event = record_event()
        else:
            self._host = torch.zeros(of.shape, dtype=of.dtype, device="cpu") if of.is_meta else of

    def read(self) -> torch.Tensor:
        """Return the copied tensor (zeros in a simulation). Wait for the copy, but not for work submitted after it."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


class GraphPool:
    """Memory of a GPU that CUDA graphs share. At most one of the pool's graphs may run at a time."""

    def __init__(self) -> None:
        release_cached_memory()  # while a graph is recorded, torch cannot free cached memory for its tensors
        self._id = torch.cuda.graph_pool_handle()

    def recorded(self, function: Callable[[], T]) -> Callable[[], T]:
        """Return a function that does what `function` does, but launches all kernels at once, as one CUDA graph.

        `function` must always use the same tensors, and must not wait for the device. All functions of a pool share
        memory, so the next call of any of them overwrites the result. The first call runs `function` itself, which
        compiles kernels and allocates workspaces; the second call records the graph.
        """
        return _Graph(function, self._id)


@cache
def _recording_stream() -> torch.cuda.Stream:
    """Return the stream on which all graphs are recorded: graphs share memory only if they have the same stream."""
    return torch.cuda.Stream()


class _Graph(Generic[T]):
    """A function whose kernels are replayed, see `GraphPool.recorded`."""

    def __init__(self, function: Callable[[], T], pool: Any) -> None:
        self._function, self._pool, self._was_run = function, pool, False
        self._recorded: tuple[torch.cuda.CUDAGraph, T] | None = None

    def __call__(self) -> T:
        if not self._was_run:
            self._was_run = True
            return self._function()
        self._recorded = self._recorded or self._record()
        graph, result = self._recorded
        graph.replay()
        return result

    def _record(self) -> tuple[torch.cuda.CUDAGraph, T]:
        graph, before, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), _recording_stream()
        stream.wait_stream(before)
        collects = gc.isenabled()
        gc.disable()  # a tensor that is freed here may have been used on other streams, which CUDA must not ask now
        try:
            # "thread_local": other threads, such as NCCL's watchdog, may go on asking CUDA about their events.
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = self._function()
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        before.wait_stream(stream)
        return graph, result


def backend(choice: str = "auto") -> str:
    """Return the name of the torch.distributed backend for `device()`.

    Args:
        choice: `auto`, or the backend to use if the device is not simulated.

    Raises:
        UserError: NCCL would be used by more processes of this node than there are GPUs. NCCL refuses two processes
            on one GPU.
    """
    if _simulates:
        return "fake"
    if choice != "auto":
        importlib.import_module(HOST_BACKEND).register()
        return choice
    if not has_gpu():
        return "gloo"
    processes, gpus = max(torchrun.processes_of_node(), torchrun.local_rank() + 1), torch.cuda.device_count()
    if processes > gpus:
        raise UserError(
            f"{processes} processes on this node, but torch sees {gpus} GPU{'s' * (gpus > 1)}: NCCL needs a GPU for "
            f"each process; start {gpus}, or set parallel.backend=host for a test in which processes share GPUs"
        )
    return "nccl"


def is_initialized() -> bool:
    """Return whether this process has selected its device."""
    return _installed


def initialize_platform(simulate: bool = False) -> None:
    """Select the GPU of this process, or install the functions for the CPU or a simulated device.

    Call it at the start of a program, as `mcore_rl.cli.entry_point.run_script` and the `mcore-rl` command do. Further
    calls do nothing.

    Raises:
        RuntimeError: there is no GPU, and `megatron.core` has already been imported: it could still use functions of
            `torch.cuda` that would now be replaced.
    """
    global _installed, _simulates
    if _installed:
        return
    _simulates = simulate
    if te_problem() is not None:
        _hide("transformer_engine")  # Megatron would use its kernels, or end at an import that raises an OSError
    if has_gpu():
        torch.cuda.set_device(torchrun.local_rank() % torch.cuda.device_count())
    else:
        if "megatron.core" in sys.modules:
            raise RuntimeError("initialize_platform() must be called before megatron.core is imported")
        cpu.install_stand_ins(device())
        cpu.keep_freed_memory()
    _installed = True


def _hide(package: str) -> None:
    """Hide `package`: every later import of it, or of its modules, fails."""
    hidden: Any = None
    for name in [package, *sys.modules]:
        if name.partition(".")[0] == package:
            sys.modules[name] = hidden


@contextlib.contextmanager
def importing_megatron() -> Iterator[None]:
    """Context in which to import Megatron. Without a GPU, it prevents Megatron from compiling its functions.

    Megatron wraps functions in `torch.compile` when it is imported. The import of torch's compiler takes a third of a
    program's starting time, and the compiled kernels are meant for GPUs.
    """
    if has_gpu():
        yield
        return
    compiler, torch.compile = torch.compile, lambda function: function  # type: ignore[assignment]
    try:
        yield
        importlib.import_module("megatron.core.jit").disable_jit_fuser()  # for modules that are imported later
    finally:
        torch.compile = compiler


DETERMINISTIC_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
    "NCCL_ALGO": ("^NVLS", "Ring", "Tree"),
}
"""Values of environment variables with which cuBLAS, Transformer Engine and NCCL give reproducible sums.

An unset variable gets the first value.
"""


def make_deterministic() -> None:
    """Use only deterministic kernels from now on. Call it before anything runs on the device.

    If an operation has no deterministic kernel, calling the operation raises RuntimeError with the operation's name.

    Raises:
        UserError: an environment variable has a value that allows kernels that are not deterministic.
    """
    for name, right in DETERMINISTIC_ENVIRONMENT.items():
        value = os.environ.setdefault(name, right[0])
        if value not in right:
            raise UserError(f"deterministic: the environment has {name}={value}; it must be one of {', '.join(right)}")
    torch.use_deterministic_algorithms(True)


def initialize_process_group(timeout: timedelta, choice: str = "auto") -> None:
    """Join the process group that torchrun describes; without torchrun, create a group of this process alone.

    A collective that takes longer than `timeout` raises an error instead of hanging.

    Args:
        choice: the backend, as in `backend`.

    Raises:
        UserError: some processes did not join within `timeout`, another program listens on MASTER_PORT, or NCCL would
            be used by more processes than there are GPUs.
    """
    if torch.distributed.is_initialized():
        return
    options = _group_options(timeout, choice)
    try:
        torch.distributed.init_process_group(**options)
    except (torch.distributed.DistStoreError, torch.distributed.DistNetworkError) as error:
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            raise UserError(
                f"MASTER_PORT={os.environ.get('MASTER_PORT')}: another program listens on this port; choose a free one"
            ) from None
        size = torchrun.world_size()
        raise UserError(
            f"parallel.timeout_seconds={timeout.total_seconds():.0f}: not all {size} processes have joined within this "
            "time; see the output of the other nodes"
        ) from None


def _group_options(timeout: timedelta, choice: str) -> dict[str, Any]:
    """Return the arguments to pass to `torch.distributed.init_process_group`."""
    kwargs: dict[str, Any] = {"backend": backend(choice), "timeout": timeout}
    if kwargs["backend"] == "nccl":
        kwargs["device_id"] = device()
    if _simulates:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        rank, world_size = torchrun.rank(), torchrun.world_size()
        kwargs.update(rank=rank, world_size=world_size, store=FakeStore())
    elif not torchrun.is_launched():
        kwargs.update(rank=0, world_size=1, store=torch.distributed.HashStore())
    elif attempt := torchrun.restarts():
        # torchrun keeps its store when it restarts the ranks. Without a separate prefix, the ranks would read the
        # addresses of the ranks that have ended.
        store, rank, world_size = next(torch.distributed.rendezvous("env://", timeout=timeout))
        store = torch.distributed.PrefixStore(f"attempt_{attempt}", store)
        kwargs.update(rank=rank, world_size=world_size, store=store)
    return kwargs


ALIGNMENT = 64
"""Bytes to which the start of every tensor is aligned, for any dtype."""


def bytes_for(tensors: Sequence[Tensor]) -> int:
    """Return the size, in bytes, of a block that can contain all `tensors`, each aligned to `ALIGNMENT`."""
    return sum(map(_room, tensors))


def offsets_of(tensors: Sequence[Tensor], start: int = 0) -> list[int]:
    """Return each tensor's offset, in bytes, in a block that contains `tensors` one after the other from `start` on."""
    return list(accumulate(map(_room, tensors[:-1]), initial=start))[: len(tensors)]


def views_of(block: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of `block`: one for each of the `tensors`, with the tensor's shape and dtype.

    Args:
        block: uint8, at least `bytes_for(tensors)` long.
    """
    parts = block[: bytes_for(tensors)].split([_room(tensor) for tensor in tensors])
    return [
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)
    ]


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT

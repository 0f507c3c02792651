"""The device under Megatron: CUDA with NCCL, the CPU with gloo, or neither: shapes without memory, in a simulation.

Megatron-Core asks `torch.cuda` for devices, streams and random states, and spells `device="cuda"`
in a few places. `initialize_platform()` must run before `megatron` is imported. With a GPU it only
selects the device; without one it installs stand-ins that answer those calls on the CPU. Nothing
else in the package knows whether a GPU is there.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.utils._device import _device_constructors

from mcore_rl import launch_environment
from mcore_rl.errors import UserError

_installed = False
_simulates = False


def has_gpu() -> bool:
    """True where a CUDA device is used."""
    return torch.cuda.is_available() and not _simulates


def simulates() -> bool:
    """True where tensors have shapes alone, and collectives nobody to talk to."""
    return _simulates


def device() -> torch.device:
    """The device that holds model and data."""
    if _simulates:
        return torch.device("meta")
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu() else torch.device("cpu")


def device_id(of: torch.device | None = None) -> str:
    """A name that processes on the same device have in common, whatever number each gives it: a GPU's UUID, or "cpu".

    Args:
        of: `device()` if left out.
    """
    of = of or device()
    return str(torch.cuda.get_device_properties(of).uuid) if of.type == "cuda" else of.type


def release_cached_memory() -> None:
    """Give memory that no tensor uses back to the device, for other processes; the allocator keeps it otherwise."""
    torch.cuda.empty_cache()


def storage_id(tensor: torch.Tensor) -> int:
    """Of the storage behind a tensor, as long as it lives; one that is emptied or simulated has no address to know it
    by."""
    return int(tensor.untyped_storage()._cdata)


def page_lock(block: torch.Tensor) -> None:
    """Lock a tensor of the host in memory, where there is a GPU to copy from; if that is refused, copies are slower."""
    if not (has_gpu() and block.numel()):
        return
    cudart = torch.cuda.cudart()
    status = cudart.cudaHostRegister(block.data_ptr(), block.nbytes, 0)
    if status != cudart.cudaError.success:
        told = f"{block.nbytes:,} bytes of the host cannot be page-locked ({status}): copies to them are slower"
        warnings.warn(told, stacklevel=2)
        with contextlib.suppress(RuntimeError):  # which the next launch would raise: the thread's last error is kept
            torch.zeros(1, device=device())


def release_page_lock(block: torch.Tensor) -> None:
    """What `page_lock` did, undone."""
    if has_gpu() and block.numel():
        torch.cuda.cudart().cudaHostUnregister(block.data_ptr())


def is_asynchronous() -> bool:
    """True where the host goes on while the device computes, and waits where it asks for a value."""
    return has_gpu() or _simulates


def to_device(values: Any, dtype: torch.dtype = torch.long) -> torch.Tensor:
    """Numbers of the host (lists of one length, an array, a tensor) on the device; the host does not wait."""
    return sent(torch.as_tensor(values, dtype=dtype), device())


def sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on `device`; the host does not wait, as it would for memory that is not page-locked."""
    leaves_host = values.device.type == "cpu" and device.type == "cuda"
    return (values.pin_memory() if leaves_host else values).to(device, non_blocking=True)


class HostCopy:
    """A copy on the host of a tensor that nobody writes to any more, begun without waiting for the device."""

    def __init__(self, of: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if of.is_cuda:
            self._host = torch.empty(of.shape, dtype=of.dtype, pin_memory=True).copy_(of, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = torch.zeros(of.shape, dtype=of.dtype, device="cpu") if of.is_meta else of

    def read(self) -> torch.Tensor:
        """The values, 0 in a simulation; waits for what was under way when the copy was begun, nothing later."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


def backend() -> str:
    """The torch.distributed backend for `device()`."""
    if _simulates:
        return "fake"
    return "nccl" if has_gpu() else "gloo"


def initialize_platform(simulate: bool = False) -> None:
    """Select the GPU of this process, or install the stand-ins: of the CPU, or of a simulated device. Idempotent.

    Raises:
        RuntimeError: `megatron.core` was imported first (it binds some names at import).
    """
    global _installed, _simulates
    if _installed:
        return
    _simulates = simulate
    if has_gpu():
        torch.cuda.set_device(launch_environment.local_rank())
    else:
        if "megatron.core" in sys.modules:
            raise RuntimeError("initialize_platform() must be called before megatron.core is imported")
        _install_stand_ins(device())
    _installed = True


DETERMINISTIC_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
    "NCCL_ALGO": ("^NVLS", "Ring", "Tree"),
}
"""What cuBLAS, Transformer Engine and NCCL must be told to give the same sums each time; the first is set here."""


def make_deterministic() -> None:
    """Take deterministic kernels alone from now on; to be called before anything runs on the device.

    An operation that has none raises RuntimeError when it is met, and is named.

    Raises:
        UserError: the environment asks for the contrary.
    """
    for name, right in DETERMINISTIC_ENVIRONMENT.items():
        value = os.environ.setdefault(name, right[0])
        if value not in right:
            raise UserError(f"deterministic: the environment has {name}={value}; with it, one of {', '.join(right)}")
    torch.use_deterministic_algorithms(True)


def initialize_process_group(timeout: timedelta) -> None:
    """Join the process group that torchrun described, or a group of one without torchrun.

    `timeout` bounds every collective: a stuck one raises instead of hanging.
    """
    if torch.distributed.is_initialized():
        return
    kwargs: dict[str, Any] = {"backend": backend(), "timeout": timeout}
    if has_gpu():
        kwargs["device_id"] = device()
    if _simulates:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        rank, world_size = launch_environment.rank(), launch_environment.world_size()
        kwargs.update(rank=rank, world_size=world_size, store=FakeStore())
    elif not launch_environment.is_launched():
        kwargs.update(rank=0, world_size=1, store=torch.distributed.HashStore())
    elif attempt := launch_environment.restarts():
        # torchrun keeps its store when it starts the ranks again: without a prefix of their own they would
        # find the addresses of those that died.
        store, rank, world_size = next(torch.distributed.rendezvous("env://", timeout=timeout))
        store = torch.distributed.PrefixStore(f"attempt_{attempt}", store)
        kwargs.update(rank=rank, world_size=world_size, store=store)
    torch.distributed.init_process_group(**kwargs)


class _Generators:
    """`torch.cuda.default_generators`: every index is the CPU's generator."""

    def __getitem__(self, index: object) -> torch.Generator:
        return torch.default_generator


class _Inert:
    """A stream or event: CPU work is synchronous, so there is nothing to order or wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    record = wait = synchronize = wait_event = wait_stream = record_stream = _nothing

    def record_event(self, event: Any = None) -> Any:
        return event or _Inert()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 0.0


def _is_cuda(value: object) -> bool:
    return (isinstance(value, str) and value.startswith("cuda")) or (
        isinstance(value, torch.device) and value.type == "cuda"
    )


def _on(device: torch.device, factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`factory` with device="cuda" read as `device` and page-locking left out."""

    @functools.wraps(factory)
    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = device
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return wrapper


def _gather_of_uneven(all_gather: Callable[..., Any]) -> Callable[..., Any]:
    """gloo's all-gather refuses parts of unequal sizes."""

    @functools.wraps(all_gather)
    def wrapper(outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, **kwargs: Any) -> Any:
        if len({output.shape for output in outputs}) == 1:
            return all_gather(outputs, tensor, group=group, **kwargs)
        rank = torch.distributed.get_rank(group)
        for source, output in enumerate(outputs):
            part = tensor.contiguous() if source == rank else torch.empty_like(output)
            torch.distributed.broadcast(part, group=group, group_src=source)
            output.copy_(part)
        return None

    return wrapper


def _scatter_of_uneven(reduce_scatter: Callable[..., Any]) -> Callable[..., Any]:
    """gloo's reduce-scatter refuses parts of unequal sizes; Megatron asks for sums alone."""

    @functools.wraps(reduce_scatter)
    def wrapper(output: torch.Tensor, inputs: list[torch.Tensor], group: Any = None) -> None:
        whole = torch.cat(inputs)
        torch.distributed.all_reduce(whole, group=group)
        output.copy_(whole.split([len(part) for part in inputs])[torch.distributed.get_rank(group)])

    return wrapper


def _all_to_all_of_lists(all_to_all_single: Callable[..., Any]) -> Callable[..., Any]:
    """Split sizes are brought to the host where they are on a GPU only, but are wanted as numbers here too."""

    @functools.wraps(all_to_all_single)
    def wrapper(output: torch.Tensor, input: torch.Tensor, **kwargs: Any) -> Any:
        for name in ("output_split_sizes", "input_split_sizes"):
            if isinstance(kwargs.get(name), torch.Tensor):
                kwargs[name] = kwargs[name].tolist()
        return all_to_all_single(output, input, **kwargs)

    return wrapper


def _install_stand_ins(device: torch.device) -> None:
    """Answer on `device` what Megatron-Core asks of CUDA. One reason beside each group."""
    cuda: Any = torch.cuda

    # Tensors are created with device=torch.cuda.current_device(), which takes a torch.device as well.
    cuda.current_device = lambda: device
    cuda.device_count = lambda: 1
    cuda.set_device = lambda *_: None

    # The schedules and the optimizer synchronise, wait on streams and mark NVTX ranges.
    cuda.synchronize = cuda.empty_cache = lambda *_, **__: None
    cuda.Stream = cuda.Event = _Inert
    stream = _Inert()
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
    # `with torch.device("meta")` recognises factories by identity: let it remember the real ones first.
    _device_constructors()
    for name in ("tensor", "zeros", "ones", "empty", "full", "empty_like", "zeros_like"):
        setattr(torch, name, _on(device, getattr(torch, name)))
    tensor_class: Any = torch.Tensor
    tensor_class.cuda = lambda self, *_, **__: self.to(device)
    tensor_class.pin_memory = lambda self, *_, **__: self

    # The optimizers accept parameters only by the type names of CUDA tensors.
    type_of = tensor_class.type

    def type_name(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return type_of(self, dtype, *args, **kwargs)
        return type_of(self).replace("torch.", "torch.cuda.", 1).replace("cuda.meta.", "cuda.")

    tensor_class.type = type_name

    # Experts get as many tokens as are routed to them: the dispatcher gathers and scatters parts of unequal sizes.
    distributed: Any = torch.distributed
    distributed.all_gather = _gather_of_uneven(distributed.all_gather)
    distributed.reduce_scatter = _scatter_of_uneven(distributed.reduce_scatter)
    distributed.all_to_all_single = _all_to_all_of_lists(distributed.all_to_all_single)

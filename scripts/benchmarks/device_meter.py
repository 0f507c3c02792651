"""Time, memory and rate of matrix products of this process's device, a GPU or the CPU."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable

import torch

from mcore_rl import platform


def device_name() -> str:
    return torch.cuda.get_device_name() if platform.has_gpu() else "CPU"


class DeviceMeter:
    """Meter of memory: live tensors on a GPU; on the CPU, the peak resident memory of the process, which cannot be
    reset."""

    def wait(self) -> None:
        """Wait until the device has finished all work."""
        platform.synchronize()

    def forget_peak(self) -> None:
        self.wait()
        if platform.has_gpu():
            torch.cuda.reset_peak_memory_stats()

    def live(self) -> int:
        return torch.cuda.memory_allocated() if platform.has_gpu() else 0

    def peak(self) -> int:
        """Return the peak bytes since `forget_peak`."""
        return (
            torch.cuda.max_memory_allocated()
            if platform.has_gpu()
            else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        )


def median_seconds(functions: dict[str, Callable[[], object]], repetitions: int) -> dict[str, float]:
    """Return the median seconds of each function by name. They take turns, so a slow moment affects all equally; the
    first turn is a warm-up."""
    meter = DeviceMeter()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repetitions + 1):
        for name, function in functions.items():
            meter.wait()
            started = time.perf_counter()
            function()
            meter.wait()
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(taken[1:]) for name, taken in seconds.items()}


def product_rate(dtype: torch.dtype) -> float:
    """Return the FLOP/s of a product of large square matrices of random numbers; with constant values it would be
    faster."""
    size = 8192 if platform.has_gpu() else 1024
    factors = [torch.randn(size, size, device=platform.device(), dtype=dtype) for _ in range(2)]
    seconds = median_seconds({"product": lambda: torch.mm(*factors)}, 10)["product"]
    factors.clear()
    platform.release_cached_memory()  # for processes that measure on the same device
    return 2 * size**3 / seconds

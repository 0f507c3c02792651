"""Peak memory of a part of a program, as benchmarks and tests report it."""

import ctypes
import re
import threading
from pathlib import Path

M_MMAP_THRESHOLD = -3  # malloc.h
KEPT_BYTES = 65536


class PeakMemory:
    """Context manager around a part of a program: `bytes` is the growth of the process's memory to its peak.

    It counts anonymous memory, without the page cache of mapped files. From the first use on, the process returns freed
    blocks to the system at once; by default glibc keeps tens of megabytes of them, a different amount each time.
    """

    def __enter__(self) -> "PeakMemory":
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)
        self.bytes, self._start, self._done = 0, anonymous_bytes(), threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self.bytes = max(self.bytes, anonymous_bytes() - self._start)

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watcher.join()


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.findall(r"RssAnon:\s+(\d+)", status)[0])

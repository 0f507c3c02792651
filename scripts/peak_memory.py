"""The most memory that a part of a program takes, as the benchmarks and tests report it."""

import ctypes
import re
import threading
from pathlib import Path

M_MMAP_THRESHOLD = -3  # malloc.h
KEPT_BYTES = 65536


class PeakMemory:
    """Around a part of a program: `bytes` is the most that its process took beyond what it had before.

    Counted is anonymous memory, without the page cache of mapped files. From here on the process gives
    freed blocks back at once; glibc would otherwise keep tens of megabytes of them, differently each time.
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

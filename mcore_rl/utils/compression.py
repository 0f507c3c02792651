"""zstd, of Python's own library where it has it. Imported inside vLLM too."""

from __future__ import annotations

from typing import Any


def zstd() -> Any:
    """Return the module `compression.zstd`, or its copy for Python before 3.14."""
    try:
        from compression import zstd as module
    except ImportError:
        from backports import zstd as module
    return module


def zstd_problem() -> str | None:
    """Return why zstd cannot be imported, with the command that installs it; None if it can be imported."""
    try:
        zstd()
    except ImportError:
        return "no zstd for this Python; run: pip install 'backports.zstd>=1'"
    return None

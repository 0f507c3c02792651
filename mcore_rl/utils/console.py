"""The console: printing of lines by one rank, progress of long work, and silencing of libraries."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

from rich.console import Console


def quiet_libraries() -> None:
    """Silence messages of libraries about features that this package does not use."""
    warnings.filterwarnings("ignore", module=r"megatron\..*|torch\..*|transformers\..*")
    warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine|transformer_engine).*")
    for name in ("transformers", "datasets", "megatron", "torch.distributed", "torch.utils", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # every rank would print them
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # for child processes


def printable(text: str, encoding: str = "utf-8") -> str:
    """Return `text` with escapes in place of characters that `encoding` does not have, such as lone surrogates."""
    return text.encode(encoding, "backslashreplace").decode(encoding)


PrintLine = Callable[[str], None]
"""Function that prints a line for the user, once for all ranks."""

SECONDS_BETWEEN_LINES = 10.0


def silent(message: str) -> None:
    """A `PrintLine` that prints nothing."""


class Progress:
    """Prints the progress of long work every 10 seconds; for shorter work, it prints nothing."""

    def __init__(self, what: str, say: PrintLine) -> None:
        self._what, self._say = what, say
        self._started = self._told = time.monotonic()

    def reached(self, part: float, count: int) -> None:
        """Report that `count` records, the fraction `part` of the work, are done.

        A line is printed only if 10 seconds have passed since the start or the previous line.
        """
        now = time.monotonic()
        if now - self._told > SECONDS_BETWEEN_LINES and part > 0:
            self._told = now
            left = (now - self._started) * (1 - part) / part
            self._say(f"{self._what}: {count:,} records, {part:.0%}, about {left:,.0f} s left")


class GenerationProgress:
    """Prints the responses and tokens that are generated, every 10 seconds; for shorter work, it prints nothing.

    Args:
        replicas: number of replicas among which the prompts are divided; the lines are about the first of them.
        total: number of responses of this replica.
        tokens: number of tokens that existed before; they are not part of the rate.
    """

    def __init__(self, total: int, replicas: int, say: PrintLine, tokens: int = 0) -> None:
        self._total, self._say, self._before = total, say, tokens
        self._what = "generating" if replicas == 1 else f"generating (replica 0 of {replicas})"
        self._started = self._told = time.monotonic()

    def reached(self, counts: Callable[[], tuple[int, int]]) -> None:
        """Print a line if 10 seconds have passed since the start or the previous line.

        Args:
            counts: function that returns the numbers of complete responses and of tokens; called only for a line.
        """
        now = time.monotonic()
        if now - self._told >= SECONDS_BETWEEN_LINES:
            self._told = now
            done, tokens = counts()
            rate = (tokens - self._before) / (now - self._started)
            self._say(
                f"{self._what}: {done:,} of {counted(self._total, 'response')}, {counted(tokens, 'token')}, "
                f"{rate:,.0f} tokens/s"
            )


class RunConsole(Console):
    """A console that does not end the run if standard output cannot be written, but prints nothing more.

    The cause may be a full disk, or a pipe whose reader has ended.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        """Print `objects`, with escapes in place of characters that the output's encoding does not have."""
        encoding = self.encoding
        super().print(*(printable(one, encoding) if isinstance(one, str) else one for one in objects), **options)

    def __exit__(self, *raised: Any) -> None:
        """Write the buffered text to standard output; if that fails, warn and print nothing more.

        rich enters and leaves the console as a context for every print and every drawing of a progress bar.
        """
        try:
            super().__exit__(*raised)
        except OSError as error:
            self.quiet = True
            discard(self.file)
            print_error(f"warning: standard output cannot be written ({error.strerror}); nothing more is printed to it")

    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError again; rich's own method would end the process."""
        raise


def print_error(line: str) -> None:
    """Print a line to standard error; if standard error cannot be written, do nothing."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)


def flush_output() -> None:
    """Write the buffered standard output; if that fails, discard it.

    Otherwise Python would try again at its end, and change the exit status.
    """
    try:
        sys.stdout.flush()
    except OSError:
        discard(sys.stdout)


def discard(stream: Any) -> None:
    """Discard the stream's buffer and everything written to the stream later."""
    with contextlib.suppress(OSError, ValueError):  # a stream of a test may have no descriptor
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)


console = RunConsole(soft_wrap=True, highlight=False)


def rank_zero_printer(is_writer: bool) -> PrintLine:
    """Return the `PrintLine` of this rank: it prints if `is_writer` is True, and otherwise does nothing."""
    return (lambda message: console.print(message, markup=False)) if is_writer else silent


def size_text(count: int) -> str:
    """Return a number of bytes as text, in GiB or, for small numbers, in MiB."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 / 10 else f"{count / 2**20:.1f} MiB"


def counted(count: int, one: str, several: str | None = None) -> str:
    """Return `count` with its noun: `one` for 1, otherwise `several` (default: `one` + "s"), as in "3 steps"."""
    return f"{count:,} {one if count == 1 else several or one + 's'}"

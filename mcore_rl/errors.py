"""Errors that are reported in one line. Any other exception is a bug and keeps its traceback."""

import signal
from collections.abc import Sequence


class UserError(ValueError):
    """An error in the command, configuration, data or environment that the user can correct.

    The message is one line: the place, what was found there, and what would be right. Entry points print it without a
    traceback and exit with status 2.
    """


class UserErrors(UserError):
    """Several user errors at once; the text has one line for each of them.

    Args:
        lines: messages of the errors, each without line breaks.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = tuple(lines)


class ContractError(ValueError, AssertionError):
    """Raised by a public function for invalid arguments; the message says what was found and what would be right.

    It is also an `AssertionError`, because code that was written for NeMo RL catches this class.
    """


class TrainingError(RuntimeError):
    """Training cannot continue; the message says at which step and why. Everything that was saved is intact."""


class NotFiniteError(TrainingError):
    """A loss or a gradient is NaN or infinite. A run that restarts from the last checkpoint would fail again."""


class Stopped(Exception):
    """A signal has stopped a run before its last step. The run is saved, and the same command continues it.

    status: exit status of the run: 128 + the signal's number, as a shell gives it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.status = 128 + number


class DiskFullError(TrainingError):
    """A file of a run cannot be written, because no space is left for it."""


class WorkerError(RuntimeError):
    """A rank failed, died or took too long; the message has the rank's number and, if available, its traceback."""


class TimeLimitError(WorkerError):
    """The ranks took longer than their time limit, and none has failed."""


LOST_PEER = ("connection closed by peer", "connection reset", "timed out", "broken pipe", "nccl")
"""Lower-case texts in an error's message that indicate that another rank has ended."""


def is_lost_peer(error: BaseException) -> bool:
    """Return whether `error` was probably raised because another rank had ended."""
    return not isinstance(error, UserError | TrainingError) and any(sign in str(error).lower() for sign in LOST_PEER)

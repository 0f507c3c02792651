"""Errors that are told in one line. Everything else is a bug and keeps its traceback."""


class UserError(ValueError):
    """Something in the command, configuration, data or environment that the user can put right.

    The message is one line: where, what was found, what would be right. Entry points print it
    without a traceback and exit with status 2.
    """


class ContractError(ValueError, AssertionError):
    """A call that a public function refuses: where, what was found, what would be right.

    Also an `AssertionError`, which is what code written for the reference catches.
    """


class TrainingError(RuntimeError):
    """Training cannot go on; the message says at which step and why. What was saved is intact."""


class NotFiniteError(TrainingError):
    """A loss or a gradient is NaN or infinite. A run that starts again from the last checkpoint comes to the same."""


class WorkerError(RuntimeError):
    """A rank failed, died or took too long; the message has its number and, if it could still tell, its traceback."""


LOST_PEER = ("connection closed by peer", "connection reset", "timed out", "broken pipe", "nccl")
"""What an error says that another rank's end has caused."""


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error looks as if another rank had ended before."""
    return not isinstance(error, UserError | TrainingError) and any(sign in str(error).lower() for sign in LOST_PEER)

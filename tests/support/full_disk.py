"""A disk without room, for tests: the system refuses longer files, with the errors of a full disk."""

import contextlib
import resource


@contextlib.contextmanager
def no_room(count=1000):
    """Context in which no file of this process can become longer than `count` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

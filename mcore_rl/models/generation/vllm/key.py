"""The run's key, without which vLLM's servers answer no request.

It is the value of the environment variable VLLM_API_KEY. If the variable is not set, it is in the file
`OUTPUT/vllm/key`. The run or mcore-rl vllm-servers creates this file, whichever starts first.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import time
from pathlib import Path

from mcore_rl.errors import UserError

VARIABLE = "VLLM_API_KEY"
"""Environment variable with the key. vLLM reads it too."""
FILE = "key"
WRITING_SECONDS = 5.0
"""Maximum time between the creation of the file and the end of its writing, by another process."""
FORM = re.compile(r"[!-~]{16,512}")
"""Keys that an HTTP header can carry, and that are too long to be guessed."""


def run_key(directory: Path) -> str:
    """Return the run's key; create it in `directory` if there is none.

    Raises:
        UserError: the key is too short or has spaces; its file belongs to another user, or others can read it; or the
            file can neither be read nor written.
    """
    if (key := os.environ.get(VARIABLE)) is not None:
        if not FORM.fullmatch(key):
            raise UserError(
                f"{VARIABLE}: must be 16 to 512 printable characters without spaces, or unset to let the run make a key"
            )
        return key
    path = directory / FILE
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return _created(path) or _read(path)
    except OSError as error:
        raise UserError(
            f"{path}: the key of vLLM's servers cannot be read or written ({error.strerror}); choose an output_dir "
            f"where it can, or set {VARIABLE}"
        ) from None


def _created(path: Path) -> str | None:
    """Create the file with a new key, readable by its owner alone; return None if the file exists."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return None
    key = secrets.token_urlsafe(32)
    try:
        os.write(file, f"{key}\n".encode())
        os.fsync(file)
    except OSError:
        path.unlink()  # on a full disk
        raise
    finally:
        os.close(file)
    return key


def _read(path: Path) -> str:
    deadline = time.monotonic() + WRITING_SECONDS
    while True:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), errors="replace") as file:  # a pipe must not block
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise UserError(f"{path}: is not a file; remove it, or set {VARIABLE}")
            if about.st_uid != os.geteuid():
                raise UserError(
                    f"{path}: belongs to the user {about.st_uid}, who could choose the key of your servers; choose "
                    f"another output_dir, or set {VARIABLE}"
                )
            if about.st_mode & 0o077:
                raise UserError(
                    f"{path}: other users can read or change it (mode {stat.S_IMODE(about.st_mode):o}); run chmod 600 "
                    f"{path} if only you can reach its directory; otherwise delete the file and start the servers "
                    f"again; on a file system where chmod changes nothing, set {VARIABLE}"
                )
            key = file.read(1024).strip()
        if key:
            break
        if time.monotonic() > deadline:
            raise UserError(f"{path}: is empty; delete it, and start servers and run again")
        time.sleep(0.1)
    if not FORM.fullmatch(key):
        raise UserError(f"{path}: does not contain a key; delete it, and start servers and run again")
    return key

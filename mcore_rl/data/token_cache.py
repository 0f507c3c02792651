"""Cache of tokenized sources on disk: one process of a node writes them, and all ranks and later runs read them.

Each source is in a token store. The store's name is a digest of everything that the tokens depend on: the source's
bytes, the tokenizer's files, the chat template, the options, and the code that tokenizes. A store is either complete or
absent. If a store is deleted, the next run that needs it creates it again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.data.chat import chat_day, reads_images
from mcore_rl.data.readers import SUFFIXES, files_of, load_hub_dataset
from mcore_rl.data.token_store import TokenStore, collect
from mcore_rl.data.tokenize import TokenizationSpec, TokenizerSpec, available_workers, tokenize_source
from mcore_rl.errors import UserError
from mcore_rl.utils import torchrun
from mcore_rl.utils.console import PrintLine
from mcore_rl.utils.files import digest_of_file, reason_of

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")
"""Suffixes of files in a model directory that cannot belong to the tokenizer."""

SOURCE_BYTES_TO_REMEMBER = 1 << 20
"""Minimum size of a file whose digest is remembered. Digests of smaller files are computed each time."""

POLL_SECONDS, LOST_SECONDS = 0.1, 60.0


def default_directory() -> Path:
    """Return the directory of the cache: `$MCORE_RL_CACHE`, or mcore_rl in the user's cache directory."""
    if own := os.environ.get("MCORE_RL_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mcore_rl"


@dataclass(frozen=True)
class TokenCache:
    """The cache in the directory `directory`, for one tokenizer.

    remake: the arguments with which `load_tokenizer` creates this tokenizer.
    """

    directory: Path
    remake: TokenizerSpec

    def store(self, source: str, tokenizer: Any, what: TokenizationSpec, say: PrintLine) -> TokenStore:
        """Return the token store of `source`. If it does not exist, one process of the node creates it.

        Raises:
            UserError: a record is invalid, the directory cannot be written, or an image is missing or has changed since
                its record was tokenized.
        """
        with self._writing():
            (self.directory / "tokens").mkdir(parents=True, exist_ok=True)
        before = _states(source)
        path = self.directory / "tokens" / self._key(source, tokenizer, what)
        if torchrun.local_rank() > 0:
            self._wait_for(path)
        else:
            with self._locked(path.with_suffix(".lock")):
                if not path.is_dir():
                    self._make(path, source, tokenizer, what, say, before)
        try:
            store = TokenStore.open(path)
        except ValueError as error:
            raise UserError(f"data.cache_dir: {error}; delete this directory") from None
        if torchrun.local_rank() == 0:
            _check_images(store, path)
        return store

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = reason_of(error, self.directory)
            raise UserError(
                f"data.cache_dir: {self.directory} cannot be written ({reason}); name another directory"
            ) from None

    @contextlib.contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        """Context in which this process holds the lock file `path` exclusively."""
        with self._writing():
            file = open(path, "w")  # noqa: SIM115
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _make(
        self, path: Path, source: str, tokenizer: Any, what: TokenizationSpec, say: PrintLine, before: list[Any]
    ) -> None:
        for stopped in path.parent.glob("*.partial"):  # a free lock means that its process has ended
            if stopped.stem == path.stem or not _is_locked(stopped.with_suffix(".lock")):
                shutil.rmtree(stopped, ignore_errors=True)
        temporary = path.with_suffix(".partial")
        try:
            with self._writing():
                temporary.mkdir()
                chunks = tokenize_source(source, tokenizer, what, say, self.remake, available_workers())
                collect(chunks, what.sequences_per_unit, temporary)
                if _states(source) != before:  # the store's name is a digest of the earlier contents
                    raise UserError(f"data: {source} changed while it was tokenized; start the run again")
                temporary.rename(path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _wait_for(self, path: Path) -> None:
        """Wait until another process of this node has created the store `path`.

        Raises:
            UserError: the store is missing, and no process has held its lock file for `LOST_SECONDS`.
        """
        lost_since = None
        while not path.is_dir():
            time.sleep(POLL_SECONDS)
            if _is_locked(path.with_suffix(".lock")):
                lost_since = None
            elif time.monotonic() - (lost_since := lost_since or time.monotonic()) > LOST_SECONDS:
                raise UserError(
                    f"data.cache_dir: {path} is missing: the process that creates it has ended, or uses another "
                    "directory; use one directory for all processes of a node"
                )

    def _key(self, source: str, tokenizer: Any, what: TokenizationSpec) -> str:
        parts = {
            "source": self._source_digest(source),
            "directories": _directories(source) if reads_images(tokenizer) else None,
            "tokenizer": [
                [str(path.relative_to(self.remake.path)), digest_of_file(path)]
                for pattern in (
                    "*",
                    "additional_chat_templates/*",
                    *(["*/**/*.py"] if self.remake.trust_remote_code else []),
                )
                for path in sorted(self.remake.path.glob(pattern))
                if path.is_file() and path.suffix not in WEIGHTS
            ],
            "trust_remote_code": self.remake.trust_remote_code,
            "template": self.remake.chat_template,
            "day": str(chat_day(tokenizer) or ""),
            "what": [what.name, what.max_length, what.overlong, what.needs_response, what.max_records, what.columns],
            "code": _code_digest(),
        }
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    def _source_digest(self, source: str) -> str:
        """Return a digest of a source's bytes.

        The digest of a large file is stored in the cache and valid until the file changes, so that only one process
        reads the file.
        """
        if Path(source).is_dir():
            return hashlib.sha256("".join(map(self._source_digest, files_of(source))).encode()).hexdigest()
        if Path(source).suffix not in SUFFIXES:
            return str(load_hub_dataset(source)._fingerprint)
        try:
            state = os.stat(source)
            with open(source, "rb"):
                pass
        except OSError as error:
            raise UserError(f"data: {source} cannot be read ({error.strerror})") from None
        if state.st_size <= SOURCE_BYTES_TO_REMEMBER:
            return digest_of_file(Path(source))
        known = _state_of(source)
        note = self.directory / "digests" / hashlib.sha256(json.dumps(known).encode()).hexdigest()[:32]
        with self._writing():
            note.parent.mkdir(parents=True, exist_ok=True)
        with self._locked(note.with_suffix(".lock")):
            with contextlib.suppress(OSError):
                return note.read_text()
            digest = digest_of_file(Path(source))
            temporary = note.with_suffix(".partial")
            temporary.write_text(digest)
            temporary.replace(note)
        return digest


def _check_images(store: TokenStore, directory: Path) -> None:
    """Check that the images of a store's records are still those that were tokenized.

    Only files that were written after the store are read.

    Raises:
        UserError: an image is missing or has changed.
    """
    made, remedy = os.stat(directory / "meta.json").st_mtime_ns, f"restore it, or delete {directory}"
    for path, digest in store.image_files().items():
        try:
            state = os.stat(path)
            is_newer = max(state.st_mtime_ns, state.st_ctime_ns) >= made
            has_changed = is_newer and digest_of_file(Path(path)) != digest
        except OSError as error:
            raise UserError(f"data: the image {path} cannot be read ({error.strerror}); {remedy}") from None
        if has_changed:
            raise UserError(f"data: the image {path} has changed since its record was tokenized; {remedy}")


def _states(source: str) -> list[Any]:
    """Return a value that changes with every write to the local files of a source; [] for a dataset on the hub."""
    found = files_of(source) if Path(source).is_dir() else [source] if Path(source).suffix in SUFFIXES else []
    return [_state_of(file) for file in found if os.path.exists(file)]


def _state_of(file: str | Path) -> list[Any]:
    state = os.stat(file)
    return [os.path.realpath(file), state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns]


def _directories(source: str) -> list[str]:
    """Return the directories to which relative paths of a source's images belong."""
    files = files_of(source) if Path(source).is_dir() else [source]
    return sorted({str(Path(file).absolute().parent) for file in files if Path(file).is_file()})


def _code_digest() -> str:
    """Return a digest of the code in `mcore_rl.data` and of the versions of the libraries that tokenize."""
    import tokenizers
    import transformers

    digest = hashlib.sha256(f"{transformers.__version__} {tokenizers.__version__}".encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _is_locked(path: Path) -> bool:
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False

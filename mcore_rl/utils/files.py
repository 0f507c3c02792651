"""Files and directories: digests, manifests, atomic replacement, flushing to disk."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from mcore_rl.errors import DiskFullError, UserError

MANIFEST_FILE = "manifest.json"


WEIGHTS = (".safetensors", ".distcp")


NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the errors after which a file cannot grow: the disk is full, or a quota or the largest size is reached."""


FileDigests = dict[str, tuple[int, str]]
"""Map from file name, relative to the directory, to (size in bytes, SHA-256)."""


def digests_of(directory: Path, names: Iterable[str]) -> FileDigests:
    """Return the size and the digest of each of the files `names` in `directory`."""
    paths = {name: directory / name for name in names}
    return {name: (path.stat().st_size, digest_of_file(path)) for name, path in paths.items()}


def files_below(directory: Path) -> list[str]:
    """Return the sorted names of the files in `directory` and in its subdirectories, relative to `directory`."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def digest_of_file(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(directory: Path, digests: FileDigests) -> None:
    """Write the manifest of `directory`, and give the directory and its weights the usual permissions.

    mkdtemp and safetensors create directories and files that only their owner can read.
    """
    (directory / MANIFEST_FILE).write_text(json.dumps(digests, indent=1, sort_keys=True))
    mask = _umask()
    directory.chmod(0o777 & ~mask)
    for file in directory.glob("*.safetensors"):
        file.chmod(0o666 & ~mask)


def read_manifest(iteration: Path) -> FileDigests:
    """Return the manifest of a directory; raise ValueError if it is missing or cannot be read."""
    try:
        manifest = json.loads((iteration / MANIFEST_FILE).read_text())
        return {str(name): (int(size), str(digest)) for name, (size, digest) in manifest.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        raise ValueError(f"{MANIFEST_FILE} is missing or cannot be read") from None


def unlisted_files(directory: Path) -> list[str]:
    """Return the files in `directory` that its manifest does not list, or that have changed.

    Return [] if `directory` does not exist.

    A file of weights counts as changed only if its size has changed: users do not edit weights, and their digests
    take minutes.
    """
    if not (directory.exists() or directory.is_symlink()):
        return []
    if not directory.is_dir() or directory.is_symlink():
        return [directory.name]
    try:
        listed = read_manifest(directory)
    except ValueError:
        return sorted(path.name for path in directory.iterdir())
    folders = _folders_of(directory, listed)
    paths = [path for path in directory.rglob("*") if path.is_symlink() or path not in folders]
    found = sorted(str(path.relative_to(directory)) for path in paths)
    changed = [name for name in found if name in listed and not is_as_listed(directory / name, *listed[name])]
    return [name for name in found if name not in {*listed, MANIFEST_FILE}] + changed


def _folders_of(directory: Path, names: Iterable[str]) -> set[Path]:
    """Return the subdirectories of `directory` that contain the files `names`."""
    found = {parent for name in filter(is_inside, names) for parent in (directory / name).parents}
    return found - {directory, *directory.parents}


def is_inside(name: str) -> bool:
    """Return whether the relative path `name` cannot lead out of its directory."""
    return name != "" and not Path(name).is_absolute() and ".." not in Path(name).parts


def is_as_listed(path: Path, size: int, digest: str) -> bool:
    if not path.is_file() or path.stat().st_size != size:
        return False
    return path.suffix in WEIGHTS or digests_of(path.parent, [path.name])[path.name] == (size, digest)


def remove_listed(directory: Path) -> None:
    """Remove the files that the manifest of `directory` lists, and then each directory that is empty."""
    try:
        listed = read_manifest(directory)
    except ValueError:
        return
    folders = _folders_of(directory, listed)
    for name in filter(is_inside, (*listed, MANIFEST_FILE)):
        if not any(folder.is_symlink() for folder in folders.intersection((directory / name).parents)):
            (directory / name).unlink(missing_ok=True)
    for folder in (*sorted(folders, reverse=True), directory):
        with contextlib.suppress(OSError):
            folder.rmdir()


def replace_listed(new: Path, destination: Path) -> None:
    """Rename the directory `new` to `destination`. If `destination` exists, it is replaced.

    Raises:
        UserError: `destination` contains files that its manifest does not list; nothing is replaced.
    """
    if foreign := unlisted_files(destination):
        raise UserError(
            f"{destination} is not replaced, because it holds {', '.join(foreign[:3])}, which no run wrote; "
            f"the new files are in {new}"
        )
    old = unused(destination.with_name(f".{destination.name}.old"))
    if destination.exists():
        destination.rename(old)
    os.replace(new, destination)
    remove_listed(old)


def unused(path: Path) -> Path:
    """Return `path` if it does not exist; otherwise, return `path` with the first free number appended."""
    numbered = (path.with_name(f"{path.name}.{n}") for n in itertools.count(1))
    return next(name for name in itertools.chain([path], numbered) if not name.exists())


def flush_directory(directory: Path) -> None:
    """Wait until `directory` and all files below it have been written to the disk."""
    for entry in [*directory.rglob("*"), directory]:
        flush(entry)


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(destination: Path) -> Iterator[Path]:
    """Context with an empty directory; afterwards it becomes the directory `destination`, with a manifest of its files.

    After an error, the directory is removed.

    Raises:
        DiskFullError: the disk has no space for the files.
        UserError: `destination` contains files that its manifest does not list; nothing is replaced.
    """
    parent = destination.parent
    parent.mkdir(parents=True, exist_ok=True)
    for leftover in parent.glob(f".{destination.name}.*.partial"):
        shutil.rmtree(leftover)
    with naming_full_disk(parent):
        new = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", suffix=".partial", dir=parent))
        try:
            yield new
            write_manifest(new, digests_of(new, files_below(new)))
            flush_directory(new)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
    replace_listed(new, destination)


@contextlib.contextmanager
def naming_full_disk(directory: Path) -> Iterator[None]:
    """Context that writes below `directory`; an error that a full disk causes becomes a DiskFullError."""
    try:
        yield
    except Exception as error:
        if (reason := full_disk(error, directory)) is None:
            raise
        raise DiskFullError(f"{directory} cannot be written ({reason}); make room there") from None


def full_disk(error: BaseException, directory: Path) -> str | None:
    """Return the system's reason and the free space of `directory` if `error` has one of `NO_SPACE` as its cause.

    The error of PyTorch's writer of files names only a position in the file; the system's error is its context. The
    error of safetensors has the number in its text.
    """
    link: BaseException | None = error
    while link is not None and (found := _system_error(link)) not in NO_SPACE:
        link = link.__cause__ or link.__context__
    if link is None or found is None:
        return None
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    return f"{os.strerror(found)}, {shutil.disk_usage(existing).free / 2**30:,.2f} GiB free"


def reason_of(error: OSError, directory: Path) -> str:
    """Return why a file in `directory` could not be written; if the disk is full, with its free space."""
    return full_disk(error, directory) or error.strerror or str(error)


def _system_error(error: BaseException) -> int | None:
    """Return the number of the system's error, if `error` has one."""
    if isinstance(error, OSError):
        return error.errno
    match = re.search(r"\(os error (\d+)\)", str(error))
    return int(match[1]) if match else None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

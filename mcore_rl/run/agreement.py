"""Whether all processes of a run were given the same: each reads the files and the command line of its own node."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_rl.config import TrainingConfig
from mcore_rl.distributed.collectives import broadcast_object, gather_objects_on_first
from mcore_rl.errors import UserError
from mcore_rl.models.megatron.hf_checkpoint import COMPANION_PATTERNS
from mcore_rl.run.directory import RunDirectory, own_lock
from mcore_rl.run.identity import NOT_ARCHITECTURE, RunIdentity, flattened, models_of
from mcore_rl.utils import torchrun
from mcore_rl.utils.checkpoint_store import MANIFEST_FILE, digest_of_file

if TYPE_CHECKING:
    from mcore_rl.run.setup import Inputs

SEEN_WITHIN_SECONDS = 60.0
"""Network file systems let a node know of a new file as late as this (NFS: acdirmax)."""
VALIDATION = "data.validation"
OTHER_CODE = ": other code of "
PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Given:
    """The inputs of a process.

    read: fingerprints by keys, of datasets, validation sets in their order, chat template and options; and where a
        process is its node's first, `files_of` it.
    identity: of the run, as JSON, of such a one.
    software: of such a one too.
    sees_output: whether such a one finds the first process's output directory.
    """

    host: str
    read: dict[str, str]
    identity: str = ""
    software: dict[str, str] = field(default_factory=dict)
    sees_output: bool = True


def check_agreement(config: TrainingConfig, inputs: Inputs[Any], options: Mapping[str, str]) -> None:
    """Compare what every process was given with what the first one was, which has claimed `output_dir`. Collective.

    Args:
        options: of the command line, and what they come to.

    Raises:
        UserError: on every process, naming what is different and where.
    """
    template = _digest(str(inputs.tokenizer.chat_template))
    sets = {f"{VALIDATION} {name}".strip(): dataset.fingerprint for name, dataset in inputs.validation.items()}
    read = {"data.train": inputs.train.fingerprint, **sets, "data.chat_template": template, **options}
    lock, resume_from = broadcast_object((own_lock(), inputs.checkpoints[0]))
    given = Given(socket.gethostname(), read)
    if inputs.identity:
        patience = min(SEEN_WITHIN_SECONDS, config.parallel.timeout_seconds / 4)
        is_first = torchrun.rank() == 0
        sees = is_first or RunDirectory(config.output_dir).comes_to_hold(lock, patience)
        read |= files_of(config, resume_from)
        given = Given(socket.gethostname(), read, inputs.identity, software(), sees)
    if told := broadcast_object(disagreement(gather_objects_on_first(given))):
        raise UserError(told)


def files_of(config: TrainingConfig, resume_from: Sequence[Path]) -> dict[str, str]:
    """Digests of what is read beside weights and data, by what names it: models' configurations and tokenizers, the
    checkpoints that may be resumed, modules of functions that judge."""
    manifests = [path / MANIFEST_FILE for path in resume_from]
    found = {"checkpoint.resume": _digest(str([digest_of_file(file) for file in manifests if file.is_file()]))}
    for key, path in models_of(config).items():
        files = sorted(file for pattern in COMPANION_PATTERNS for file in path.glob(pattern) if file.is_file())
        values = json.loads((path / "config.json").read_bytes()) if (path / "config.json").is_file() else {}
        kept = sorted((name, value) for name, value in values.items() if name not in NOT_ARCHITECTURE)
        found[f"{key}: other configuration or tokenizer"] = _digest(
            str((kept, [digest_of_file(file) for file in files]))
        )
    for key, value in flattened(config.model_dump(mode="json")).items():
        is_judge = fnmatchcase(key, "environment*.function") and value is not None
        if is_judge and (file := _file_of_module(value.partition(":")[0])):
            found[f"{key}{OTHER_CODE}{value}"] = digest_of_file(file)
    return found


def _file_of_module(name: str) -> Path | None:
    """Return the file of a module's code; None where this node lacks the module, or it is no file."""
    try:
        module = find_spec(name)
    except Exception:  # the package that it is in is not there, or cannot be imported
        return None
    origin = None if module is None or module.origin is None else Path(module.origin)
    return origin if origin is not None and origin.is_file() else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def software() -> dict[str, str]:
    """Versions of what computes; of this package, whose version a `git pull` leaves as it is, a digest of its files."""
    files = sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".yaml"))
    digest = _digest(str([(str(path.relative_to(PACKAGE)), digest_of_file(path)) for path in files]))
    versions = {name: str(import_module(name).__version__) for name in ("torch", "megatron.core", "transformers")}
    return {"the files of mcore_rl": digest[:12], **versions}


def disagreement(everyone: Sequence[Given]) -> str:
    """Describe the first process whose inputs differ from process 0's; "" if there is none."""
    for rank, given in enumerate(everyone):
        first = everyone[0]
        process = f"process {rank} (on {given.host})"
        if others := _differences(given, first):
            return (
                f"{others[0]}: {process} was given something else than process 0 (on {first.host}); every node needs "
                "the same packages, files, configuration and date"
            )
        if not given.sees_output:
            return (
                f"output_dir: what process 0 (on {first.host}) writes there, {process} does not find; it must be the "
                "same directory on all nodes, of a file system that they share"
            )
    return ""


def _differences(given: Given, first: Given) -> list[str]:
    """The likely causes before what follows from them."""
    differences = []
    if given.identity:
        theirs, own = first.software, given.software
        differences += [f"{name} {theirs[name]} → {own[name]}" for name in theirs if own[name] != theirs[name]]
    if given.identity and not differences:  # otherwise it may not even have the same keys
        differences += RunIdentity.from_json(given.identity).differences(RunIdentity.from_json(first.identity))
    differences += [key for key in first.read if given.read.get(key, first.read[key]) != first.read[key]]
    if given.identity:  # other processes than the first of a node read less
        lacking = sorted(key for key in first.read.keys() ^ given.read.keys() if OTHER_CODE in key)
        differences += [f"{key} (which is on one of them alone)" for key in lacking]
    sets, firsts = ([key for key in one.read if key.startswith(VALIDATION)] for one in (given, first))
    if sets != firsts:
        differences.append(f"{VALIDATION}: other sets, or in another order")
    return differences

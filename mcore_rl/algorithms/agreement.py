"""Whether all processes of a run were given the same: each reads the files and the command line of its own node."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_rl import launch_environment
from mcore_rl.config import TrainingConfig
from mcore_rl.distributed.collectives import broadcast_object, gather_objects_on_first
from mcore_rl.errors import UserError
from mcore_rl.run_directory import RunDirectory, own_lock
from mcore_rl.run_identity import RunIdentity

if TYPE_CHECKING:
    from mcore_rl.algorithms.inputs import Inputs

SEEN_WITHIN_SECONDS = 60.0
"""Network file systems let a node know of a new file as late as this (NFS: acdirmax)."""
PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Given:
    """What a process was given.

    read: fingerprints of datasets and chat template by their keys, validation sets in their order.
    identity: of the run, as JSON, where a process is its node's first.
    software: versions of packages; of such a one as well.
    sees_output: whether such a one finds the first process's output directory.
    """

    host: str
    read: dict[str, str]
    identity: str = ""
    software: dict[str, str] = field(default_factory=dict)
    sees_output: bool = True


def check_agreement(config: TrainingConfig, inputs: Inputs[Any]) -> None:
    """Compare what every process was given with what the first one was, which has claimed `output_dir`. Collective.

    Raises:
        UserError: on every process, naming what is different and where.
    """
    template = hashlib.sha256(str(inputs.tokenizer.chat_template).encode()).hexdigest()
    sets = {f"data.validation {name}".strip(): dataset.fingerprint for name, dataset in inputs.validation.items()}
    read = {"data.train": inputs.train.fingerprint, **sets, "data.chat_template": template}
    lock = broadcast_object(own_lock())
    is_compared = bool(inputs.identity) and launch_environment.rank() > 0
    patience = min(SEEN_WITHIN_SECONDS, config.parallel.timeout_seconds / 4)
    sees = not is_compared or RunDirectory(config.output_dir).comes_to_hold(lock, patience)
    versions = software() if inputs.identity else {}
    everyone = gather_objects_on_first(Given(socket.gethostname(), read, inputs.identity, versions, sees))
    if told := broadcast_object(disagreement(everyone)):
        raise UserError(told)


def software() -> dict[str, str]:
    """Versions of what computes; of this package, whose version a `git pull` leaves as it is, a digest of its files."""
    files = sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".yaml"))
    digest = hashlib.sha256(b"".join(str(path.relative_to(PACKAGE)).encode() + path.read_bytes() for path in files))
    versions = {name: str(import_module(name).__version__) for name in ("torch", "megatron.core", "transformers")}
    return {"the files of mcore_rl": digest.hexdigest()[:12], **versions}


def disagreement(everyone: Sequence[Given]) -> str:
    """Of the first process that was given something else than process 0; "" if there is none."""
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
    differences += [key for key in first.read if given.read.get(key) != first.read[key]]
    if list(given.read) != list(first.read):
        differences.append("the sets of data.validation, or their order")
    return differences

"""Whether all processes of a run were given the same: each reads the files and the command line of its own node."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mcore_rl.distributed.collectives import broadcast_object, gather_objects_on_first
from mcore_rl.errors import UserError
from mcore_rl.run_identity import RunIdentity

if TYPE_CHECKING:
    from mcore_rl.algorithms.inputs import Inputs


@dataclass(frozen=True)
class Given:
    """What a process was given.

    data: fingerprints of datasets by their keys. identity: of the run, as JSON, where a process is its node's first.
    """

    host: str
    data: dict[str, str]
    identity: str


def check_agreement(inputs: Inputs[Any]) -> None:
    """Compare what every process has read with what the first one has. Collective.

    Raises:
        UserError: on every process, naming what is different and where.
    """
    sets = {f"data.validation {name}".strip(): dataset for name, dataset in inputs.validation.items()}
    data = {key: dataset.fingerprint for key, dataset in {"data.train": inputs.train, **sets}.items()}
    everyone = gather_objects_on_first(Given(socket.gethostname(), data, inputs.identity))
    if told := broadcast_object(disagreement(everyone)):
        raise UserError(told)


def disagreement(everyone: Sequence[Given]) -> str:
    """Of the first process that was given something else than process 0; "" if there is none."""
    for rank, given in enumerate(everyone):
        first = everyone[0]
        others = [key for key in first.data if given.data.get(key) != first.data[key]]
        if given.identity and not others:
            own = RunIdentity.from_json(given.identity)
            others = own.differences(RunIdentity.from_json(first.identity))
        if others:
            return (
                f"{others[0]}: process {rank} (on {given.host}) was given something else than process 0 "
                f"(on {first.host}); every node needs the same files, configuration and date"
            )
    return ""

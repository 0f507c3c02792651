"""Images of rollouts: which rows have them, and files that are kept because a log or a recording names them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore_rl.data.datasets import PromptDataset
from mcore_rl.data.images import store_image
from mcore_rl.data.token_store import images_column
from mcore_rl.distributed.collectives import gather_from_replicas
from mcore_rl.distributed.topology import Topology
from mcore_rl.rollouts.samples import Rollout, RolloutBatch, RowsOfRollouts, TokenRow

ImagesOfRows = Callable[[Sequence[int]], dict[str, Any]]
"""Function from numbers of rows to their batch entry `images`; {} if they have no images."""


def images_of_prompts(rollouts: RolloutBatch, rows: RowsOfRollouts, dataset: PromptDataset) -> ImagesOfRows:
    """Return the images of rows that have only those of their prompts, which every rank knows."""
    prompts = [rollouts.outcomes[rollout].prompt for rollout in rows.rollout_of]
    return lambda numbers: dataset.images_column([prompts[number] for number in numbers])


def images_of_sessions(own: Sequence[Rollout], held: Sequence[int], topology: Topology) -> ImagesOfRows:
    """Return the images of all sessions' rows, each of which only the replica that ran it knows. Collective.

    Args:
        own: this replica's rollouts, on its first rank.
        held: numbers of their rows.
    """
    rows = zip(held, (row for rollout in own for row in rollout.rows), strict=True)
    parts = gather_from_replicas({number: row.images for number, row in rows if row.images}, topology)
    found = {number: images for part in parts for number, images in part.items()}
    return lambda numbers: images_column([found.get(number, ()) for number in numbers])


def keep_images(rollout: Rollout, temporary: Path, kept: Path) -> None:
    """Keep the images of a rollout that are in the directory `temporary`, which is deleted with the rollout.

    The files are copied into `kept`, under the names that they have, and the rollout's messages and rows then
    name these files.
    """

    def place_of(path: Any) -> str:
        if not isinstance(path, str) or not Path(path).is_relative_to(temporary.absolute()):
            return path
        return str(store_image(Path(path).read_bytes(), kept / Path(path).name))

    def with_places(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {**message, "content": [_moved(part, place_of) for part in message["content"]]}
            if isinstance(message.get("content"), list)
            else message
            for message in messages
        ]

    rollout.message_log = with_places(rollout.message_log)
    rollout.session = [{**turn, "messages": with_places(turn["messages"])} for turn in rollout.session]
    rows: list[Rollout | TokenRow] = [rollout, *rollout.further_rows]
    for row in rows:
        row.images = tuple(replace(image, path=place_of(image.path)) for image in row.images)


def _moved(part: Any, place_of: Any) -> Any:
    return {**part, "image": place_of(part["image"])} if isinstance(part, dict) and "image" in part else part

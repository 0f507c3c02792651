"""Images in requests to vLLM's servers.

A request has one token for each image, and the images. The server repeats the token as its own image processor tells,
and returns the prompt's tokens. `check_prompt` compares them with the trainer's.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from mcore_rl.data.images import ImageReader, PlacedImage
from mcore_rl.models.generation.vllm.packed import Array, check_ids, is_size, shown

ENCODED_IMAGES = 64
"""Number of encoded images that are kept, for further responses to the same prompts."""


class ImageEncoder:
    """Makes the parts of requests that contain images, and keeps the last ones."""

    def __init__(self, reader: ImageReader) -> None:
        self._reader = reader
        self._encoded = lru_cache(maxsize=ENCODED_IMAGES)(self._encode)

    def part(self, image: PlacedImage) -> dict[str, str]:
        """Return the entry of an image in a request's `content_parts`. Any thread may call this.

        Raises:
            UserError: the image's file is missing, or has changed since its record was tokenized.
        """
        return self._encoded(PlacedImage(0, image.grid, image.digest, image.path))

    def _encode(self, image: PlacedImage) -> dict[str, str]:
        png = self._reader.resized_png(image)
        url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        # The server keeps features by this name, so images that differ must have different names.
        return {"type": "image_url", "url": url, "uuid": hashlib.sha256(png).hexdigest()}


def with_single_tokens(token_ids: Sequence[int], images: Sequence[PlacedImage]) -> list[int]:
    """Return the tokens of a prompt with only the first token of each image."""
    found, start = list[int](), 0
    for image in images:
        found += token_ids[start : image.start + 1]
        start = image.end
    return [*found, *token_ids[start:]]


def check_prompt(
    theirs: Array | None,
    places: Any,
    token_ids: Sequence[int],
    images: Sequence[PlacedImage],
) -> None:
    """Compare the prompt that a server has made of a request with the trainer's.

    Args:
        theirs: tokens of the server's prompt.
        places: for each image in it, its first token and its number of tokens, as the server tells them.
        token_ids, images: the trainer's prompt.

    Raises:
        ValueError: the prompts differ, or the server's has another form; the message says what it is.
    """
    if theirs is None:
        raise ValueError("no prompt_token_ids; images need vLLM 0.32 or newer")
    check_ids(theirs, "prompt_token_ids")
    if not isinstance(places, (list, tuple)) or not all(map(_is_place, places)):
        raise ValueError(f"the image_places {shown(places)}; they must be pairs (first token, number of tokens)")
    if len(places) != len(images):
        raise ValueError(f"{len(places)} images in its prompt instead of {len(images)}")
    for (start, count), image in zip(places, images, strict=True):
        if (start, count) != (image.start, image.count):
            raise ValueError(
                f"{count} tokens at {start} for the image {image.path} instead of {image.count} at "
                f"{image.start}; the server must have the preprocessor_config.json of model.path"
            )
    if len(theirs) != len(token_ids):
        raise ValueError(f"a prompt of {len(theirs)} tokens instead of {len(token_ids)}")
    differs = theirs != np.asarray(token_ids)
    if differs.any():
        at = int(differs.argmax())
        raise ValueError(f"the token {theirs[at]} at {at} of its prompt instead of {token_ids[at]}")


def _is_place(place: Any) -> bool:
    return isinstance(place, (list, tuple)) and len(place) == 2 and all(map(is_size, place))

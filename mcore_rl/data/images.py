"""Images of records: their places among the tokens, the forms in which records contain them, and their pixels.

A batch has no pixels. It has a column `images`, a list with the `PlacedImage`s of each row, or None for a row without
images. The rank that computes the features of an image reads the image's file at that time.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mcore_rl.errors import UserError

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

IMAGES = "images"
"""Name of a batch entry: for each row, a sequence of its `PlacedImage`s, or None."""

Grid = tuple[int, int, int]
"""Numbers of frames, rows and columns of an image's tokens."""

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files of a model directory that describe how images are resized and normalized; one of them must exist."""

INSTALL = "pip install 'mcore_rl[vision]'"


@dataclass(frozen=True)
class PlacedImage:
    """An image in a row of tokens.

    start: index of its first token in the row.
    grid: frames, rows and columns of its tokens. The tokens are ordered by frame, row and column.
    digest: SHA-256 of the encoded image.
    path: file of the encoded image.
    """

    start: int
    grid: Grid
    digest: str
    path: str

    @property
    def count(self) -> int:
        """Number of its tokens."""
        frames, rows, columns = self.grid
        return frames * rows * columns

    @property
    def end(self) -> int:
        """Index of the token after its last one."""
        return self.start + self.count

    @property
    def identity(self) -> tuple[str, Grid]:
        """Equal for two images with equal features, wherever they are placed and stored."""
        return self.digest, self.grid

    @property
    def shift(self) -> int:
        """Position of the token after the image, minus the position that it would have after as many text tokens."""
        return max(self.grid[1:]) - self.count


def encode_images(images: Sequence[PlacedImage]) -> bytes:
    """Return the images of a sequence as JSON; empty if there are none."""
    values = [[image.start, image.grid, image.digest, image.path] for image in images]
    return json.dumps(values).encode() if images else b""


def decode_images(text: bytes) -> tuple[PlacedImage, ...]:
    """Return the images that `encode_images` has encoded."""
    values = json.loads(text) if text else []
    return tuple(PlacedImage(start, (t, h, w), digest, path) for start, (t, h, w), digest, path in values)


def moved(images: Sequence[PlacedImage], first: int, end: int, by: int = 0) -> tuple[PlacedImage, ...]:
    """Return the images whose tokens are all in the range `first` … `end` − 1, each shifted by `by` tokens."""
    return tuple(replace(i, start=i.start + by) for i in images if first <= i.start and i.end <= end)


# ---------------------------------------------------------------- sources of images


def content_of(source: Any) -> tuple[bytes, Path | None]:
    """Return the encoded image of a source, and its file if the source is a file.

    A source is a path, a data URL, bytes, or an object {bytes, path} as in tables of the `datasets` library.

    Raises:
        ValueError: the image does not exist, or the source has another form.
    """
    if isinstance(source, dict):
        source = source["bytes"] if source.get("bytes") is not None else source.get("path")
    if isinstance(source, bytes | bytearray):
        return bytes(source), None
    if isinstance(source, str) and source.startswith("data:"):
        head, _, body = source.partition(",")
        if not head.endswith(";base64"):
            raise ValueError("a data URL must contain base64 (data:image/png;base64,…)")
        try:
            return base64.b64decode("".join(body.split()), validate=True), None
        except binascii.Error as error:
            raise ValueError(f"its base64 is not valid ({error})") from None
    if isinstance(source, str) and source.split("://")[0].lower() in ("http", "https"):
        raise ValueError(f"{source} is on the internet; download it, and write the path of the file")
    if isinstance(source, str | os.PathLike) and str(source):
        path = Path(str(source).removeprefix("file://"))
        try:
            return path.read_bytes(), path.absolute()
        except OSError as error:
            remedy = "; write base64 as a data URL: data:image/png;base64,…" if len(str(path)) > LONGEST_PATH else ""
            raise ValueError(f"{str(path)[:LONGEST_PATH]} cannot be read ({error.strerror}){remedy}") from None
    raise ValueError(f"must be a path, a data URL or bytes, found {type(source).__name__}")


def data_url(source: Any) -> str:
    """Return the image of a source (see `content_of`) as a data URL of a PNG, JPEG or WebP.

    Raises:
        UserError: the image cannot be read.
    """
    try:
        content, _ = content_of(source)
    except ValueError as error:
        raise UserError(f"data: the image {error}") from None
    kind = "webp" if content[8:12] == b"WEBP" else "jpeg" if content[:2] == b"\xff\xd8" else "png"
    if kind == "png" and not content.startswith(b"\x89PNG"):  # another format
        buffer = io.BytesIO()
        decoded(content).save(buffer, format="PNG")
        content = buffer.getvalue()
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


LONGEST_PATH = 255
"""A longer text is shortened in errors; it is probably no path."""
PATH_KEYS = ("image", "image_url", "path", "url")
"""Keys of an image, or of an image part, whose value may be a path."""


IMAGE_COLUMNS = (IMAGES, "image")
"""Columns of a record that have the sources of its images."""
CONVERSATIONS = ("messages", "prompt", "completion", "chosen", "rejected")
"""Fields of a record that may be lists of messages."""


def with_directory(record: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Return a record with `directory` before the relative paths of its images."""
    found = dict(record)
    for key, value in record.items():
        if key in IMAGE_COLUMNS:
            found[key] = _in_directory(value, directory)
        elif key in CONVERSATIONS and isinstance(value, list):
            found[key] = [_message_in(item, directory) for item in value]
    return found


def _message_in(message: Any, directory: Path) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list) or not any(map(is_image, content)):
        return message
    parts = [_in_directory(part, directory) if is_image(part) else part for part in content]
    return {**message, "content": parts}


def _in_directory(source: Any, directory: Path) -> Any:
    if isinstance(source, list):
        return [_in_directory(item, directory) for item in source]
    if isinstance(source, dict):
        return {key: _in_directory(item, directory) if key in PATH_KEYS else item for key, item in source.items()}
    is_path = isinstance(source, str) and source and not source.startswith("data:") and "://" not in source
    return str(directory / source) if is_path else source


def is_image(part: Any) -> bool:
    """Return whether a part of a message's content is an image, in the format of OpenAI or Hugging Face."""
    return isinstance(part, dict) and part.get("type") in ("image", "image_url", "input_image")


def source_of(part: Mapping[str, Any]) -> Any:
    """Return the source in an image part; None if the part has none, so that the record's `images` have it."""
    for key in ("image", "image_url", "path", "url", "base64", "bytes"):
        found = part.get(key)
        if found is not None:
            if key == "image_url" and isinstance(found, dict):
                found = found.get("url")
            return f"data:;base64,{found}" if key == "base64" else found
    return None


def images_of(record: Mapping[str, Any]) -> list[Any]:
    """Return a record's images, in the order of the image parts without source; [] if it has none."""
    found = record.get("image") if record.get(IMAGES) is None else record[IMAGES]
    return found if isinstance(found, list) else [] if found is None else [found]


# ---------------------------------------------------------------- pixels


def decoded(content: bytes) -> Any:
    """Return an encoded image as PIL's image, upright and in RGB, as transformers loads images.

    Raises:
        ValueError: `content` is not a complete still image.
        UserError: Pillow is not installed.
    """
    check_pillow()
    from PIL import Image, ImageOps

    try:
        image = Image.open(io.BytesIO(content))
        frames = getattr(image, "n_frames", 1)
        if frames == 1 or image.format == "MPO":  # a photo, followed by previews of it
            image.load()
            return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # Pillow raises exceptions of many classes
        text = str(error).replace(f"{content!r}", "").split("<_io")[0]
        raise ValueError(f"is not a complete image ({' '.join(text.split()).strip()})") from None
    kind = f"has {frames} pages" if image.format == "TIFF" else f"is animated ({frames} frames)"
    raise ValueError(f"{kind}; only still images are supported")


def thumbnail(path: str, size: int = 96) -> str | None:
    """Return a small copy of the image in a file, as a data URL; None if the image cannot be read.

    Args:
        size: largest width and height in pixels.
    """
    try:
        image = decoded(Path(path).read_bytes())
    except (OSError, ValueError):  # without Pillow, too
        return None
    image.thumbnail((size, size))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def check_pillow() -> None:
    """Raise UserError if Pillow, which reads images, is not installed."""
    if find_spec("PIL") is None:
        raise UserError(f"images need Pillow, which is not installed; install it with {INSTALL}")


def image_directory(cache_dir: Path) -> Path:
    """Return the directory of the images that records contain as bytes."""
    return cache_dir / "images"


class ImageReader:
    """Reads images as the image processor of a model directory does.

    Args:
        model: the model directory.
        stored: directory in which `placed` stores images without a file, under their digests.
        key: configuration key of the model directory, for errors.
    """

    def __init__(self, model: Path, stored: Path = Path(), key: str = "model.path") -> None:
        self.model, self.stored, self.key = model, stored, key

    @cached_property
    def processor(self) -> Any:
        """transformers' image processor, in the implementation that needs only Pillow.

        Raises:
            UserError: the directory has no such processor, or Pillow is not installed.
        """
        check_pillow()
        from transformers import AutoImageProcessor

        if not any((self.model / name).is_file() for name in PROCESSOR_FILES):
            raise UserError(f"{self.key}: {self.model} has no {PROCESSOR_FILES[0]}, which says how images are resized")
        try:
            # torchvision resizes differently; with this choice, results do not depend on whether it is installed.
            return AutoImageProcessor.from_pretrained(self.model, backend="pil")
        except Exception as error:  # of many classes
            told = " ".join(str(error).split())
            raise UserError(f"{self.key}: the image processor of {self.model} cannot be loaded: {told}") from None

    def placed(self, source: Any, start: int, stored: Path | None = None) -> PlacedImage:
        """Read an image of a record; return it with its first token at `start`.

        Args:
            source: see `content_of`; or an image that was read before.
            stored: directory in which an image without a file is stored, if it is not that of this object.

        Raises:
            ValueError: the image is missing, damaged, or of a shape that the processor refuses.
        """
        if isinstance(source, PlacedImage):
            return replace(source, start=start)
        content, path = content_of(source)
        grid, digest = self._grid(decoded(content)), hashlib.sha256(content).hexdigest()
        return PlacedImage(start, grid, digest, str(path or store_image(content, (stored or self.stored) / digest)))

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Number of pixels along a token's side, and smallest and largest number of pixels of a resized image."""
        size = self.processor.size
        return self.processor.patch_size * self.processor.merge_size, size["shortest_edge"], size["longest_edge"]

    def _grid(self, image: Any) -> Grid:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        factor, least, most = self.sizes
        height, width = smart_resize(image.height, image.width, factor, least, most)
        return 1, height // factor, width // factor

    def pixels(self, image: PlacedImage) -> Float[Tensor, "patches values"]:
        """Return the patches of an image, fp32, in the order in which the vision tower reads them.

        Raises:
            UserError: the file is missing, or has changed since its record was tokenized.
        """
        made = self.processor(images=[decoded(_tokenized(image))], return_tensors="pt")
        frames, rows, columns = (int(size) for size in made["image_grid_thw"][0])
        merge = self.processor.merge_size
        if (frames, rows // merge, columns // merge) != image.grid:
            raise UserError(
                f"data: the image processor of {self.model} makes {(frames, rows // merge, columns // merge)} tokens "
                f"of {image.path}, but {image.grid} when its record was tokenized; use one processor for both"
            )
        pixels: Tensor = made["pixel_values"]
        return pixels

    def resized_png(self, image: PlacedImage) -> bytes:
        """Return an image as PNG: upright, in RGB, and in the size to which the processor resizes it.

        A program that reads it by the same `preprocessor_config.json` does not resize it again, so it computes the
        same pixels, even if it would resize by another algorithm. Some images would be resized once more: long, narrow
        ones that are larger than the processor's limit and, if its limits are near each other, those whose new size is
        outside of them after rounding. They keep their own size here.

        Raises:
            UserError: the file is missing, or has changed since its record was tokenized.
        """
        from PIL import Image

        picture, processor = decoded(_tokenized(image)), self.processor
        channels, factor = np.asarray(picture).transpose(2, 0, 1), processor.patch_size * processor.merge_size
        resized = processor.resize(channels, processor.size, processor.resample, factor=factor)
        again = Image.fromarray(resized.transpose(1, 2, 0))
        if self._grid(again) == image.grid:
            picture = again
        buffer = io.BytesIO()
        picture.save(buffer, format="PNG", compress_level=1)  # a higher level takes several times as long
        return buffer.getvalue()


def store_image(content: bytes, path: Path) -> Path:
    """Write an encoded image to `path`, unless the file exists; return the absolute path."""
    path = path.absolute()
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}_{secrets.token_hex(4)}.partial")
        partial.write_bytes(content)
        partial.replace(path)
    return path


def _tokenized(image: PlacedImage) -> bytes:
    """Return the file of an image.

    Raises:
        UserError: the file is missing, or has changed since its record was tokenized.
    """
    try:
        content = Path(image.path).read_bytes()
    except OSError as error:
        raise UserError(f"data: the image {image.path} cannot be read ({error.strerror})") from None
    if hashlib.sha256(content).hexdigest() != image.digest:
        raise UserError(
            f"data: the image {image.path} has changed since its record was tokenized; restore the file, or "
            "delete the directory tokens of data.cache_dir to tokenize the records again"
        )
    return content

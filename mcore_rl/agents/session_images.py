"""Images of a session: read from the requests, checked, and stored as files for the engine and the trainer."""

from __future__ import annotations

import asyncio
import hashlib
import io
import shutil
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import aiohttp

from mcore_rl.agents.messages import BadRequest, Message
from mcore_rl.config.environment import AgentImages
from mcore_rl.data.chat import reads_images
from mcore_rl.data.images import ImageReader, PlacedImage, content_of

FORMATS = ("PNG", "JPEG", "WEBP")
"""Formats of images that requests may have."""
FETCH_SECONDS = 20.0
"""Time limit for fetching an image."""
MOST_REDIRECTS = 5


@dataclass(eq=False)
class SessionImages:
    """The images of a session.

    directory: directory of their files; it is created with the first image.
    reader: reads images as the model does; None if the model reads no images.
    """

    directory: Path
    reader: ImageReader | None
    limits: AgentImages
    _placed: dict[str, PlacedImage] = field(default_factory=dict)
    """Stored images by the path of the file, with a start of 0."""
    _path_of: dict[str, str] = field(default_factory=dict)
    """Paths of stored images by the digest of a source, also of an address, which is fetched once. Clients send all
    images of a conversation in each request."""
    _taking: asyncio.Lock = field(default_factory=asyncio.Lock)
    _writing: threading.RLock = field(default_factory=threading.RLock)
    """Reentrant, because the garbage collector may call `remove` in a thread that writes."""
    _trusted: set[str] = field(default_factory=set)
    _is_removed: bool = False

    def __getitem__(self, path: str) -> PlacedImage:
        """Return the image in a file that `take` has written; its start is 0."""
        return self._placed[path]

    async def take(self, parts: Sequence[Message]) -> None:
        """Store the images of a request; replace the sources of its image parts by the paths of the files.

        Raises:
            BadRequest: the model reads no images, there are too many of them, or an image is too large, damaged, of
                another format or at an address that is not allowed.
        """
        if not parts:
            return
        if self.reader is None:
            raise BadRequest("messages: has images, but the model reads no images", "messages")
        if len(parts) > self.limits.max_count:
            raise BadRequest(
                f"messages: has {len(parts)} images; a request may have {self.limits.max_count} "
                "(environment.agent.images.max_count)",
                "messages",
            )
        found = await asyncio.gather(*(self._content(part["image"]) for part in parts), return_exceptions=True)
        async with self._taking:  # parallel requests may have the same image
            for number, (part, content) in enumerate(zip(parts, found, strict=True), start=1):
                try:
                    part["image"] = await self._stored(part["image"], content, self.reader)
                except ValueError as error:
                    raise BadRequest(f"messages: image {number} {error}", "messages") from None

    def trust(self, sources: Iterable[str]) -> None:
        """Accept images with these data URLs, whatever their size and format; the record's prompt has them."""
        self._trusted.update(map(_digest, sources))

    async def _content(self, source: str) -> bytes | None:
        """Return the encoded image of a source; None if it is stored."""
        if _digest(source) in self._path_of:
            return None
        if source[:5].lower() == "data:":
            return await asyncio.to_thread(_decoded, source)
        return await fetched(source, self.limits)

    async def _stored(self, source: str, content: bytes | BaseException | None, reader: ImageReader) -> str:
        """Return the path of an image; store it if no request has done so.

        Args:
            content: the result of `_content`, or its exception.
        """
        known = _digest(source)
        if known not in self._path_of:
            if isinstance(content, BaseException):
                raise content
            assert content is not None, "it was not stored"
            limits = None if known in self._trusted else self.limits
            self._path_of[known] = await asyncio.to_thread(self._store, content, reader, limits)
        return self._path_of[known]

    def _store(self, content: bytes, reader: ImageReader, limits: AgentImages | None) -> str:
        if limits is not None:
            if len(content) > limits.max_bytes:
                raise ValueError(
                    f"has {len(content)} bytes; the limit is {limits.max_bytes} (environment.agent.images.max_bytes)"
                )
            check_picture(content, limits.max_pixels)
        with self._writing:  # `remove` may be called by another thread at any time
            if self._is_removed:
                raise ValueError("comes after the end of the session")
            placed = reader.placed(content, 0, self.directory)
        self._placed[placed.path] = placed
        return placed.path

    def remove(self) -> None:
        """Delete the files; no further ones are stored."""
        with self._writing:
            self._is_removed = True
            shutil.rmtree(self.directory, ignore_errors=True)


def _digest(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()


def _decoded(source: str) -> bytes:
    try:
        return content_of("data:" + source[5:])[0]
    except ValueError as error:
        raise ValueError(f"cannot be read: {error}") from None


def check_picture(content: bytes, max_pixels: int) -> None:
    """Raise ValueError unless the head of an encoded image names an allowed format and size. Decodes no pixels."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            width, height = image.size
    except Image.DecompressionBombError:
        raise ValueError(f"has more than {max_pixels} pixels (environment.agent.images.max_pixels)") from None
    except Exception:
        raise ValueError(f"is not an image in one of the formats {', '.join(FORMATS)}") from None
    if width * height > max_pixels:
        raise ValueError(
            f"has {width} × {height} pixels; the limit is {max_pixels} (environment.agent.images.max_pixels)"
        )


async def fetched(url: str, limits: AgentImages) -> bytes:
    """Return the image at an address, which must belong to one of the hosts `limits.fetch`, also after redirects.

    Raises:
        ValueError: the host is not allowed, does not answer, or sends too much.
    """
    timeout = aiohttp.ClientTimeout(total=FETCH_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as client:
        for _ in range(MOST_REDIRECTS):
            host = check_address(url, limits.fetch)
            try:
                async with client.get(url, allow_redirects=False) as answer:
                    if answer.status in (301, 302, 303, 307, 308) and "location" in answer.headers:
                        url = urljoin(url, answer.headers["location"])
                        continue
                    if answer.status != 200:
                        raise ValueError(f"cannot be fetched: {host} answers with status {answer.status}")
                    return await _body(answer, limits.max_bytes)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise ValueError(f"cannot be fetched from {host}: {type(error).__name__}") from None
    raise ValueError(f"cannot be fetched: more than {MOST_REDIRECTS} redirects")


def check_address(url: str, hosts: Sequence[str]) -> str:
    """Return the host of `url`; raise ValueError unless it is one of `hosts`, given as HOST or HOST:PORT."""
    try:
        parsed = urlsplit(url)
        host, netloc = parsed.hostname or "", parsed.netloc.rpartition("@")[2].lower()
    except ValueError:
        raise ValueError("has no valid URL") from None
    if parsed.scheme not in ("http", "https"):
        raise ValueError("must be a data URL, such as data:image/png;base64,…, or an http address")
    if not any(allowed.lower() in (host, netloc) for allowed in hosts):
        raise ValueError(
            f"is at {host or url}, which environment.agent.images.fetch does not name; send a data URL, or add the host"
        )
    return host


async def _body(answer: Any, most: int) -> bytes:
    content = bytearray()
    async for part in answer.content.iter_chunked(2**16):
        content += part
        if len(content) > most:
            raise ValueError(f"has more than {most} bytes (environment.agent.images.max_bytes)")
    return bytes(content)


@dataclass(frozen=True)
class ImageStore:
    """Makes the directories of sessions' images, below `directory`."""

    directory: Path
    reader: ImageReader | None
    limits: AgentImages

    @classmethod
    def of(cls, tokenizer: Any, directory: Path, limits: AgentImages) -> ImageStore:
        reader = tokenizer.image_tokens.reader if reads_images(tokenizer) else None
        return cls(directory, reader, limits)

    def of_session(self, name: str) -> SessionImages:
        return SessionImages(self.directory / name, self.reader, self.limits)

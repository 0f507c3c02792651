"""Sessions with images on a scripted engine, and rows of such sessions."""

from __future__ import annotations

import base64
import io
import random

import numpy as np
from agent_cases import ScriptedEngine, Served
from PIL import Image
from vision_cases import IMAGE

from mcore_rl.agents.messages import from_openai, images_in
from mcore_rl.agents.server import Endpoint
from mcore_rl.agents.session_images import ImageStore
from mcore_rl.agents.sessions import Sessions
from mcore_rl.agents.templates import ChatTemplate
from mcore_rl.agents.tree import SessionTree
from mcore_rl.config.environment import AgentImages
from mcore_rl.data.tokenize import load_tokenizer
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.rollouts.samples import Rollout, to_batch

END = 1
"""Id of the end token of the small models' tokenizer."""


def picture(seed: int, width: int, height: int, mode: str = "RGB") -> Image.Image:
    generator = np.random.default_rng(seed)
    if mode == "I;16":
        return Image.fromarray(generator.integers(0, 2**16, (height, width), dtype=np.uint16))
    channels = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4}[mode]
    pixels = generator.integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.frombytes(mode, (width, height), pixels.tobytes())


def encoded(image: Image.Image, form: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=form, **options)
    return buffer.getvalue()


def url_of(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def image_part(content: bytes, kind: str = "png") -> dict:
    return {"type": "image_url", "image_url": {"url": url_of(content, kind), "detail": "auto"}}


def vision_tokenizer(model, directory):
    return load_tokenizer(model, images=directory / "records")


async def ask(tree: SessionTree, messages, tools=None):
    """Return the prompt of a request of OpenAI's API."""
    asked = from_openai(messages)
    await tree.images.take(images_in(asked))
    return tree.prompt(asked, tools)


def new_tree(tokenizer, directory, name="session", limits=None, history="template"):
    images = ImageStore.of(tokenizer, directory, limits or AgentImages()).of_session(name)
    return SessionTree(ChatTemplate(tokenizer), history, images)


class ServedWithImages(Served):
    """A running endpoint whose sessions take images."""

    def __init__(self, tokenizer, directory, replies) -> None:
        self.of_images = tokenizer, directory
        super().__init__(replies, body_bytes=2**22)

    def endpoint(self, limits, body_bytes):
        tokenizer, directory = self.of_images
        self.engine = ScriptedEngine(tokenizer, lambda _: self.replies.pop(0), END)
        images = ImageStore.of(tokenizer, directory, AgentImages())
        self.sessions = Sessions(self.engine, tokenizer, limits, images=images)
        return Endpoint(self.sessions, body_bytes)


class RandomSession:
    """A session whose program continues, edits and forks conversations with images in any turn."""

    def __init__(self, tokenizer, directory, seed: int, history="template") -> None:
        self.generator = random.Random(seed)
        # The first two have equal numbers of tokens, so only their contents differ.
        self.pictures = [encoded(picture(n, *size)) for n, size in enumerate([(24, 24), (24, 24), (40, 24), (16, 48)])]
        self.tree = new_tree(tokenizer, directory, f"session_{seed}", history=history)
        self.engine = ScriptedEngine(tokenizer, lambda _: self.text(), END)
        self.known: list = []

    def text(self) -> str:
        return " ".join(
            self.generator.choice(["red", "a b", "7 !", "blue"]) for _ in range(self.generator.randint(1, 3))
        )

    def content(self):
        count = self.generator.choice([0, 0, 1, 1, 2])
        parts = [image_part(self.generator.choice(self.pictures)) for _ in range(count)]
        parts.insert(self.generator.randint(0, count), {"type": "text", "text": self.text()})
        return parts

    def messages(self):
        if not self.known or self.generator.random() < 0.15:
            return [{"role": "user", "content": self.content()}]
        messages = [dict(message) for message in self.generator.choice(self.known[-3:])]
        if self.generator.random() < 0.15:  # another picture in an early turn
            messages[0] = {"role": "user", "content": self.content()}
        if self.generator.random() < 0.1:
            messages[-1]["content"] += " edited"
        role = self.generator.choice(["user", "tool"])
        return [*messages, {"role": role, "content": self.content()}]

    async def call(self) -> None:
        messages = self.messages()
        prompt = await ask(self.tree, messages)
        for _ in range(self.generator.choice([1, 1, 2])):
            response = self.engine.submit(tuple(prompt.ids), 0, images=prompt.images).result()
            turn = self.tree.add(prompt, response)
            self.known.append([*messages, {"role": "assistant", "content": turn.messages[-1]["content"]}])

    def check(self) -> None:
        """The engine and the rows have each image of the messages, at its tokens."""
        for ids, images in zip(self.engine.prompts, self.engine.images, strict=True):
            assert_at_tokens(ids, images)
        known = set(zip(self.engine.prompts, map(identities, self.engine.images), strict=True))
        for turn in self.tree.turns:
            assert (tuple(turn.prompt.ids), identities(turn.prompt.images)) in known
            digests = [part["image"].rpartition("/")[2] for part in images_in(turn.messages)]
            assert digests == [image.digest for image in turn.prompt.images]
        rows = {(tuple(row.input_ids), identities(row.images)) for row in self.tree.rows()}
        assert rows <= {
            ((*turn.prompt.ids, *turn.response.token_ids), identities(turn.prompt.images)) for turn in self.tree.turns
        }
        counted = sum(row.token_mask.sum() for row in self.tree.rows())
        assert counted == sum(len(turn.response.token_ids) for turn in self.tree.turns)


def identities(images):
    return tuple((image.start, image.identity) for image in images)


def assert_at_tokens(ids, images) -> None:
    places = [place for image in images for place in range(image.start, image.end)]
    assert places == [place for place, token in enumerate(ids) if token == IMAGE]


def rows_of_sessions(trees) -> BatchedDataDict:
    """Return the rows of sessions as a batch for `plain_outcome` and the layouts."""
    rollouts = []
    for number, tree in enumerate(trees):
        first, *further = tree.rows()
        own = first.input_ids, first.token_mask, first.logprobs
        rollouts.append(Rollout(number, number, *own, turns=1, further_rows=further, images=first.images))
    batch = to_batch(rollouts, 0)
    batch["images"] = [row.images for rollout in rollouts for row in rollout.rows]
    return batch

"""Text that the chat template writes for a request, and text between two responses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mcore_rl.agents.messages import BadRequest, Message, SampledImage
from mcore_rl.agents.parsing import END_THINK, THINK, CallForm, call_form_of
from mcore_rl.data.chat import (
    apply_template,
    end_token_ids,
    image_tokens,
    reads_images,
    template_of,
    unused_character,
)
from mcore_rl.data.images import PlacedImage
from mcore_rl.data.token_store import TokenSequence
from mcore_rl.data.token_texts import text_of_tokens
from mcore_rl.data.tokenize import place_images


class ChatTemplate:
    """The tokenizer's chat template.

    ends: ids of the tokens that end a response.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.ends = tokenizer, end_token_ids(tokenizer)
        self.end_texts = tuple(str(tokenizer.convert_ids_to_tokens(end)) for end in sorted(self.ends))

    def render(self, messages: Sequence[Message], tools: Any = None) -> str:
        """Return the text of a request, up to the place where the response begins.

        Raises:
            BadRequest: the template fails on these messages.
        """
        try:
            text = apply_template(
                self.tokenizer, [*messages], tools or None, tokenize=False, add_generation_prompt=True
            )
        except ValueError as error:
            raise BadRequest(str(error), "messages") from None
        return str(text)

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text that contains everything that the template writes, such as a start token."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def placed(self, text: str, images: Sequence[PlacedImage]) -> tuple[list[int], tuple[PlacedImage, ...]]:
        """Return the tokens of a text, with the token of each image repeated, and the images at their places.

        Args:
            images: the images of the text, read before.

        Raises:
            BadRequest: the text has more or fewer tokens of images.
        """
        ids = self.ids(text)
        if not reads_images(self.tokenizer):
            return ids, ()
        if images and ids.count(image_tokens(self.tokenizer).token_id) != len(images):
            raise BadRequest(
                f"messages: have {len(images)} images, but the chat template writes another number of image tokens; it "
                "must write one for each image, and no text may contain one",
                "messages",
            )
        try:
            sequence = place_images(self.tokenizer, TokenSequence(tuple(ids), (False,) * len(ids)), images)
        except ValueError as error:
            raise BadRequest(f"messages: {error}", "messages") from None
        return list(sequence.input_ids), tuple(sequence.images)

    def check_responses(self, messages: Sequence[Message]) -> None:
        """Raise SampledImage if a message of the assistant has the token of an image as text."""
        token = image_tokens(self.tokenizer).text if reads_images(self.tokenizer) else None
        if token is not None and any(token in str(m["content"]) for m in messages if m["role"] == "assistant"):
            raise SampledImage(f"messages: a response has {token}, which cannot be written without its image")

    def check_text(self, ids: Sequence[int]) -> None:
        """Raise BadRequest if the tokens of a text are those of an image, which only messages can have."""
        if reads_images(self.tokenizer) and image_tokens(self.tokenizer).token_id in ids:
            raise BadRequest("prompt: has the token of an image; send images as parts of messages", "prompt")

    def text(self, ids: Sequence[int]) -> str:
        return text_of_tokens(self.tokenizer, ids)

    def begins_thought(self, text: str) -> bool:
        """Return whether a request's text ends inside of a thought, so that the response continues the thought."""
        return text.rfind(THINK) > text.rfind(END_THINK) and not text[text.rfind(THINK) + len(THINK) :].strip()

    def call_form(self, tools: Any) -> CallForm | None:
        """Return the form of tool calls; None without tools, because calls are then plain text."""
        return call_form_of(template_of(self.tokenizer, tools)) if tools else None

    def after_response(self, messages: Sequence[Message], place: int, tools: Any) -> str | None:
        """Return the text between the response `messages[place]` and the next one. It begins with the end token.

        A mark in place of the content shows where the response ends. Some templates omit the content of messages with
        tool calls or thoughts; these are then left out for this purpose.

        Returns:
            The text; None if the template does not write the response.
        """
        mark = unused_character(json.dumps([*messages], ensure_ascii=False))
        for omitted in ((), ("tool_calls",), ("tool_calls", "reasoning_content")):
            response = {key: value for key, value in messages[place].items() if key not in omitted}
            marked = [*messages[:place], {**response, "content": mark}, *messages[place + 1 :]]
            try:
                text = self.render(marked, tools)
            except BadRequest:
                continue
            if text.count(mark) == 1:
                after = text.partition(mark)[2]
                found = [at for end in self.end_texts if (at := after.find(end)) >= 0]
                return after[min(found) :] if found else after
        return None

"""Write a small model that reads images, conversations that show it a tool for looking, and questions for an agent.

    python scripts/make_number_data.py DIRECTORY

Each question is about a picture of a digit. In the conversations, the assistant calls the tool `look`, whose result is
the picture, and then names a digit: the right one in a third of the conversations, otherwise a random one. A model that
is trained on them uses the tool, but seldom reads the picture correctly. The model is a Qwen3-VL of two layers with
random weights and one token per word. Pictures of the validation file are not in the other files.
"""

import argparse
import random
from pathlib import Path
from typing import Any

from mcore_rl.cli.entry_point import Parser, exit_on_error
from mcore_rl.testing.demo_data import IMAGE_TOKENS, make_directory, make_qwen3_vl, word_tokenizer, write_jsonl
from mcore_rl.utils.console import quiet_libraries

PICTURES, HELD_OUT, SIDE, TRUSTED = 1200, 40, 32, 1 / 3
DIGITS = (1, 2, 4, 7)
SEGMENTS = {1: "bc", 2: "abged", 4: "fgbc", 7: "abc"}
"""Segments of each digit in a display of seven segments."""
LINES = {"a": (0, 0, 1, 0), "b": (1, 0, 1, 1), "c": (1, 1, 1, 2), "d": (0, 2, 1, 2), "e": (0, 1, 0, 2),
         "f": (0, 0, 0, 1), "g": (0, 1, 1, 1)}  # fmt: skip
"""Ends of each segment: x and y of the first, x and y of the second."""
QUESTION = "which number ?"
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Shows the picture.",
        "parameters": {"type": "object", "properties": {}},
    },
}
CALL = '{"name": "look", "arguments": {}}'
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}<|tool|>{{ tool.function.name }}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content or [] %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% for call in m.tool_calls or [] %}<tool_call>"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>{% endfor %}"
    "{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def main(directory: Path) -> None:
    generator = random.Random(0)
    make_directory(directory)
    (directory / "pictures").mkdir()
    digits = [generator.choice(DIGITS) for _ in range(PICTURES)]
    for number, digit in enumerate(digits):
        picture(digit, generator).save(directory / f"pictures/{number}.png")
    questions = [question(directory.absolute(), number, digit) for number, digit in enumerate(digits)]
    known, held_out = questions[HELD_OUT:], questions[:HELD_OUT]
    write_jsonl(directory / "sft.jsonl", [conversation(one, generator) for one in known])
    write_jsonl(directory / "train.jsonl", known)
    write_jsonl(directory / "validation.jsonl", held_out)
    make_qwen3_vl(make_tokenizer(), directory / "model", SIDE)
    print(f"{directory}: model, {len(known)} conversations, {len(known)} questions and {len(held_out)} held out")


def picture(digit: int, generator: random.Random) -> Any:
    """Return a picture of a digit, somewhere on a background of some shade of grey."""
    from PIL import Image, ImageDraw

    shade = generator.randrange(0, 90)
    made = Image.new("RGB", (SIDE, SIDE), (shade, shade, shade))
    width, height = 12, 10
    left, top = generator.randrange(7, 13), generator.randrange(4, 8)
    colour = tuple(generator.randrange(180, 256) for _ in range(3))
    for segment in SEGMENTS[digit]:
        x, y, to_x, to_y = LINES[segment]
        ends = left + x * width, top + y * height, left + to_x * width, top + to_y * height
        ImageDraw.Draw(made).line(ends, colour, width=3)
    return made


def question(directory: Path, number: int, digit: int) -> dict[str, Any]:
    """Return a record. Its prompt has no picture: the agent's tool shows the file `picture`."""
    prompt = [{"role": "user", "content": QUESTION}]
    return {"prompt": prompt, "answer": str(digit), "picture": str(directory / f"pictures/{number}.png")}


def conversation(asked: dict[str, Any], generator: random.Random) -> dict[str, Any]:
    call = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": {}}}
    answer = asked["answer"] if generator.random() < TRUSTED else str(generator.choice(DIGITS))
    messages = [
        *asked["prompt"],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": [{"type": "image", "image": asked["picture"]}]},
        {"role": "assistant", "content": answer},
    ]
    return {"messages": messages, "tools": [TOOL]}


def make_tokenizer() -> Any:
    roles, calls = ["<|user|>", "<|assistant|>", "<|tool|>"], ["<tool_call>", "</tool_call>"]
    words = [*roles, *calls, *IMAGE_TOKENS, *QUESTION.split(), "look", *CALL.split(), *map(str, DIGITS)]
    tokenizer = word_tokenizer(words, [*roles, *IMAGE_TOKENS], CHAT_TEMPLATE)
    tokenizer.add_tokens(calls)  # they are beside others without a space, and stay in the text of a response
    return tokenizer


if __name__ == "__main__":
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    quiet_libraries()
    with exit_on_error():
        main(parser.parse_args().directory)

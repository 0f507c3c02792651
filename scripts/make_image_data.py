"""Write a small model that reads images, pictures of coloured squares, and questions about them for SFT and GRPO.

    python scripts/make_image_data.py DIRECTORY

The answers for SFT are random colours, so a model trained on them answers with a colour, but does not look at the
picture. The model is a Qwen3-VL of two layers with random weights and one token per word. Pictures of the validation
file are not in the other files.
"""

import argparse
import random
from pathlib import Path

from mcore_rl.cli.entry_point import Parser, exit_on_error
from mcore_rl.testing.demo_data import IMAGE_TOKENS, make_directory, make_qwen3_vl, word_tokenizer, write_jsonl
from mcore_rl.utils.console import quiet_libraries

COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (230, 210, 40)}
PICTURES, HELD_OUT, SIDE = 480, 80, 32
QUESTION = "which colour ?"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def main(directory: Path) -> None:
    generator = random.Random(0)
    make_directory(directory)
    (directory / "pictures").mkdir()
    problems = [problem(directory, number, generator) for number in range(PICTURES)]
    known, held_out = problems[HELD_OUT:], problems[:HELD_OUT]
    guessed = [
        {"prompt": one["prompt"], "completion": [{"role": "assistant", "content": generator.choice(list(COLOURS))}]}
        for one in known
    ]
    write_jsonl(directory / "sft_train.jsonl", guessed)
    write_jsonl(directory / "train.jsonl", known)
    write_jsonl(directory / "validation.jsonl", held_out)
    special = ["<|user|>", "<|assistant|>", *IMAGE_TOKENS]
    tokenizer = word_tokenizer([*special, *QUESTION.split(), *COLOURS], special, CHAT_TEMPLATE)
    make_qwen3_vl(tokenizer, directory / "model", SIDE)
    print(f"{directory}: model, {len(guessed)} guesses, {len(known)} problems, {len(held_out)} held out")


def problem(directory, number, generator):
    colour = generator.choice(list(COLOURS))
    name = f"pictures/{number}.png"
    picture(COLOURS[colour], generator).save(directory / name)
    content = [{"type": "image", "image": name}, {"type": "text", "text": QUESTION}]
    return {"prompt": [{"role": "user", "content": content}], "answer": colour}


def picture(colour, generator):
    """Return a picture of a square of this colour somewhere on a background of some shade of grey."""
    from PIL import Image

    shade, side = generator.randrange(60, 200), generator.randrange(10, 20)
    made = Image.new("RGB", (SIDE, SIDE), (shade, shade, shade))
    made.paste(colour, (left := generator.randrange(SIDE - side), top := generator.randrange(SIDE - side),
                        left + side, top + side))  # fmt: skip
    return made


if __name__ == "__main__":
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    quiet_libraries()
    with exit_on_error():
        main(parser.parse_args().directory)

"""Write a small model, conversations that show it a tool, and questions for an agent.

    python scripts/make_agent_data.py DIRECTORY

The questions are sums of two digits. In half of the conversations, the assistant calls the tool `add`, but repeats its
result only in a quarter of these; otherwise, it answers with a random number. A model that is trained on the
conversations can use the tool, but seldom gives the right answer. The model is a Llama of four layers with random
weights.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mcore_rl.cli.entry_point import Parser, exit_on_error
from mcore_rl.testing.demo_data import make_directory, make_llama, write_jsonl
from mcore_rl.utils.console import quiet_libraries

CONVERSATIONS, QUESTIONS, HELD_OUT = 6000, 400, 40
TRUSTED = 0.25
"""Fraction of the conversations with the tool in which the assistant repeats the tool's result."""
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}<|tool|>{{ tool['function']['name'] }}{% endfor %}"
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>"
    "{{ {'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson }}"
    "</tool_call>{% endfor %}{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def conversations() -> Iterator[dict[str, Any]]:
    generator = random.Random(0)
    for number in range(CONVERSATIONS):
        a, b, guess = generator.randrange(10), generator.randrange(10), str(generator.randrange(19))
        question = {"role": "user", "content": f"{a}+{b}"}
        if number % 2:
            yield {"messages": [question, {"role": "assistant", "content": guess}], "tools": [TOOL]}
            continue
        call = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}
        asked = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": "call_0", "content": str(a + b)}
        answer = str(a + b) if generator.random() < TRUSTED else guess
        yield {"messages": [question, asked, result, {"role": "assistant", "content": answer}], "tools": [TOOL]}


def questions(seed: int, count: int) -> Iterator[dict[str, Any]]:
    generator = random.Random(seed)
    for _ in range(count):
        a, b = (generator.randrange(10) for _ in range(2))
        yield {"prompt": [{"role": "user", "content": f"{a}+{b}"}], "answer": str(a + b)}


def make_tokenizer() -> Any:
    """Return a tokenizer that divides numbers into digits."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|tool|>", "<tool_call>", "</tool_call>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special[:5],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [json.dumps({"name": "add", "arguments": {"a": 10, "b": 20}}) + " + " for _ in range(50)]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(special[5:])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>", chat_template=CHAT_TEMPLATE
    )


if __name__ == "__main__":
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    quiet_libraries()
    with exit_on_error():
        directory = parser.parse_args().directory
        make_directory(directory)
        write_jsonl(directory / "sft.jsonl", conversations())
        write_jsonl(directory / "train.jsonl", questions(1, QUESTIONS))
        write_jsonl(directory / "validation.jsonl", questions(2, HELD_OUT))
        make_llama(make_tokenizer(), directory / "model")
        print(f"{directory}: model, {CONVERSATIONS} conversations, {QUESTIONS} questions and {HELD_OUT} held out")

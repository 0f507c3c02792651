"""Write a small model and preference, SFT, unpaired and validation files made of real English text.

    python scripts/make_demo_data.py DIRECTORY

The text is the Python language reference that is part of every interpreter. The prompt of a record is a sentence, the
chosen response is the next sentence, and the rejected response is the next sentence with its words in random order. The
model is a Llama of four layers with random weights and a byte-level BPE tokenizer trained on the text.
"""

import argparse
import json
import random
import re
from itertools import count
from pathlib import Path
from pydoc_data.topics import topics

from mcore_rl.cli.entry_point import Parser, exit_on_error
from mcore_rl.errors import UserError
from mcore_rl.utils.console import quiet_libraries

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def main(directory: Path) -> None:
    pairs = list(sentence_pairs())
    random.Random(0).shuffle(pairs)
    held_out = len(pairs) // 10
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is not a directory")
    if directory.exists() and any(directory.iterdir()):
        raise UserError(f"{directory} is not empty, and its files will not be overwritten; name a new directory")
    directory.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", pairs[held_out:]), ("validation", pairs[:held_out])):
        write_jsonl(directory / f"preference_{name}.jsonl", map(preference_record, part))
        write_jsonl(directory / f"sft_{name}.jsonl", map(sft_record, part))
        write_jsonl(directory / f"unpaired_{name}.jsonl", map(unpaired_record, map(preference_record, part), count()))
    make_model(directory / "model", [" ".join(pair) for pair in pairs])
    print(f"{directory}: model, {len(pairs) - held_out} training and {held_out} validation records")


def sentence_pairs():
    for text in topics.values():
        paragraphs = [" ".join(p.split()) for p in text.split("\n\n") if re.match(r"\s*[A-Z]", p)]
        sentences = [s for p in paragraphs for s in re.findall(r"[A-Z][^.!?]{30,160}[.!?](?=\s|$)", p)]
        yield from zip(sentences[::2], sentences[1::2], strict=False)


def preference_record(pair):
    prompt, chosen = pair
    words = chosen.split()
    random.Random(chosen).shuffle(words)
    return {
        "prompt": [{"role": "user", "content": prompt}],
        "chosen": [{"role": "assistant", "content": chosen}],
        "rejected": [{"role": "assistant", "content": " ".join(words)}],
    }


def unpaired_record(pair, index):
    """Return an unpaired record: the pair's chosen response if `index` is even, otherwise the rejected one."""
    label = index % 2 == 0
    return {"prompt": pair["prompt"], "completion": pair["chosen" if label else "rejected"], "label": label}


def sft_record(pair):
    prompt, response = pair
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]}


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def make_model(directory: Path, texts: list[str]) -> None:
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    trainer = ByteLevelBPETokenizer()
    special = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
    trainer.train_from_iterator(texts, vocab_size=1500, special_tokens=special, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trainer._tokenizer, pad_token="<|pad|>", eos_token="<|end|>", chat_template=CHAT_TEMPLATE
    )
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


if __name__ == "__main__":
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    quiet_libraries()
    with exit_on_error():
        main(parser.parse_args().directory)

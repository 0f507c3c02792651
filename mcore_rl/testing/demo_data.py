"""A small model, and preference, SFT, unpaired and validation files made of real English text.

The text is the Python language reference that is part of every interpreter. The prompt of a record is a sentence, the
chosen response is the next sentence, and the rejected response is the next sentence with its words in random order. The
model is a Llama of four layers with random weights and a byte-level BPE tokenizer trained on the text.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from mcore_rl.errors import UserError

IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Special tokens that the tokenizer of `make_qwen3_vl` must have."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_demo_data(directory: Path) -> tuple[int, int]:
    """Write the model and the data files to `directory`; return the numbers of training and validation records.

    Raises:
        UserError: `directory` is a file, or contains files.
    """
    pairs = shuffled_pairs()
    held_out = len(pairs) // 10
    make_directory(directory)
    for name, part in (("train", pairs[held_out:]), ("validation", pairs[:held_out])):
        write_jsonl(directory / f"preference_{name}.jsonl", map(preference_record, part))
        write_jsonl(directory / f"sft_{name}.jsonl", map(sft_record, part))
        write_jsonl(directory / f"unpaired_{name}.jsonl", map(unpaired_record, map(preference_record, part), count()))
    make_model(directory / "model", [" ".join(pair) for pair in pairs])
    return len(pairs) - held_out, held_out


def make_directory(directory: Path) -> None:
    """Create `directory`; it may exist if it is empty.

    Raises:
        UserError: `directory` is a file, or contains files.
    """
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is not a directory")
    if directory.exists() and any(directory.iterdir()):
        raise UserError(f"{directory} is not empty, and its files will not be overwritten; name a new directory")
    directory.mkdir(parents=True, exist_ok=True)


def shuffled_pairs() -> list[tuple[str, str]]:
    """Return all pairs of neighbouring sentences, in a random order that is always the same."""
    pairs = list(sentence_pairs())
    random.Random(0).shuffle(pairs)
    return pairs


def sentence_pairs() -> Iterator[tuple[str, str]]:
    """Yield pairs of neighbouring sentences of the text."""
    for text in topics.values():
        paragraphs = [" ".join(p.split()) for p in text.split("\n\n") if re.match(r"\s*[A-Z]", p)]
        sentences = [s for p in paragraphs for s in re.findall(r"[A-Z][^.!?]{30,160}[.!?](?=\s|$)", p)]
        yield from zip(sentences[::2], sentences[1::2], strict=False)


def preference_record(pair: tuple[str, str]) -> dict[str, Any]:
    """Return a preference record of messages: the second sentence is chosen, its words in random order are rejected."""
    prompt, chosen = pair
    return {
        "prompt": [{"role": "user", "content": prompt}],
        "chosen": [{"role": "assistant", "content": chosen}],
        "rejected": [{"role": "assistant", "content": shuffled_words(chosen)}],
    }


def shuffled_words(sentence: str) -> str:
    """Return the words of `sentence` in a random order that is always the same."""
    words = sentence.split()
    random.Random(sentence).shuffle(words)
    return " ".join(words)


def unpaired_record(pair: dict[str, Any], index: int) -> dict[str, Any]:
    """Return an unpaired record: the pair's chosen response if `index` is even, otherwise the rejected one."""
    label = index % 2 == 0
    return {"prompt": pair["prompt"], "completion": pair["chosen" if label else "rejected"], "label": label}


def sft_record(pair: tuple[str, str]) -> dict[str, Any]:
    """Return an SFT record: the first sentence is the prompt, the second the response."""
    prompt, response = pair
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]}


def write_jsonl(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write a line of JSON for each record."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def make_model(directory: Path, texts: list[str]) -> None:
    """Write a model with random weights, and a tokenizer trained on `texts`, to `directory`."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    trainer = ByteLevelBPETokenizer()
    special = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
    trainer.train_from_iterator(texts, vocab_size=1500, special_tokens=special, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trainer._tokenizer, pad_token="<|pad|>", eos_token="<|end|>", chat_template=CHAT_TEMPLATE
    )
    make_llama(tokenizer, directory)


def make_llama(tokenizer: Any, directory: Path) -> None:
    """Write a Llama of four layers with random weights, and its tokenizer, to `directory`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

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


def word_tokenizer(words: Sequence[str], special: Sequence[str], chat_template: str) -> Any:
    """Return a tokenizer with one token per word, for texts in which spaces separate the words.

    Args:
        words: the tokens after <|pad|>, <|end|> and <|unk|>, in the order of their ids.
        special: those of them that are special tokens.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<|pad|>", "<|end|>", "<|unk|>", *words]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token="<|unk|>",
        additional_special_tokens=list(special),
        chat_template=chat_template,
    )


def make_qwen3_vl(tokenizer: Any, directory: Path, side: int) -> None:
    """Write a Qwen3-VL of two layers with random weights, its tokenizer and its image processor to `directory`.

    Args:
        side: width and height in pixels to which all images are resized.
    """
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    tokenizer.save_pretrained(directory)
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    tower = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 4,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    named = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids = dict(zip(named, tokenizer.convert_tokens_to_ids(list(IMAGE_TOKENS)), strict=True))
    torch.manual_seed(0)
    config = CONFIG_MAPPING["qwen3_vl"](text_config=text, vision_config=tower, **ids, tie_word_embeddings=False)
    AutoModelForImageTextToText.from_config(config).save_pretrained(directory)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 4,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": side * side, "longest_edge": side * side},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(processor, indent=2))

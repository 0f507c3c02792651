"""Write a small model and data of additions: a teacher's faulty answers for SFT, and problems for GRPO.

    python scripts/make_arithmetic_data.py DIRECTORY

The teacher forgets the carry in seven of ten cases, so a model trained on its answers makes errors in most additions
with a carry. Problems of the validation file are not in the other files. The model is a Llama of two layers with random
weights and one token per character.
"""

import argparse
import random
from pathlib import Path

from mcore_rl.cli.entry_point import Parser, exit_on_error
from mcore_rl.testing.demo_data import make_directory, write_jsonl
from mcore_rl.utils.console import quiet_libraries

LARGEST_OPERAND, HELD_OUT, TEACHER_EXAMPLES, FORGOTTEN_CARRIES = 49, 200, 12000, 0.7


def main(directory: Path) -> None:
    generator = random.Random(0)
    problems = [(a, b) for a in range(LARGEST_OPERAND + 1) for b in range(LARGEST_OPERAND + 1)]
    generator.shuffle(problems)
    held_out, known = problems[:HELD_OUT], problems[HELD_OUT:]
    make_directory(directory)
    taught = [teach(*generator.choice(known), generator) for _ in range(TEACHER_EXAMPLES)]
    write_jsonl(directory / "sft_train.jsonl", taught)
    write_jsonl(directory / "train.jsonl", (problem(a, b) for a, b in known))
    write_jsonl(directory / "validation.jsonl", (problem(a, b) for a, b in held_out))
    make_model(directory / "model")
    print(f"{directory}: model, {len(taught)} lessons, {len(known)} problems, {len(held_out)} held out")


def problem(a, b):
    return {"prompt": f"{a}+{b}=", "answer": str(a + b)}


def teach(a, b, generator):
    carries = a % 10 + b % 10 >= 10
    answer = a + b - 10 if carries and generator.random() < FORGOTTEN_CARRIES else a + b
    return {"prompt": f"{a}+{b}=", "completion": str(answer)}


def make_model(directory):
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokens = ["<|pad|>", "<|end|>", "<|unk|>", *"0123456789+="]
    characters = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<|unk|>"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token="<|unk|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
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

"""Measure a training step on agents' sessions with and without shared prefixes, within one run.

    OMP_NUM_THREADS=1 python scripts/benchmarks/bench_sessions.py

Eight sessions of one prompt have ten turns each. The chat template removes the thoughts of earlier turns, so that each
turn is a row of its own, and the rows of a session have common beginnings. The figures are the tokens that the model
reads in a step, and the step's CPU time, without sharing over those with it: a model of 7 million parameters, with the
optimizer, medians of interleaved repetitions. Exits with 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from bench_prefix import compare_sharing, make_model
from bench_results import Row, finish

from mcore_rl.agents.templates import ChatTemplate
from mcore_rl.agents.tree import SessionTree
from mcore_rl.config import GRPOConfig
from mcore_rl.data.batching import WHOLE_BATCH
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.models.generation.interfaces import Response
from mcore_rl.platform import initialize_platform
from mcore_rl.utils.console import quiet_libraries

SESSIONS, TURNS = 8, 10
PROMPT_WORDS, THOUGHT_WORDS, ANSWER_WORDS, QUESTION_WORDS = 200, 40, 30, 40
TEMPLATE = (
    "{% set ns = namespace(last=0) %}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message.get('reasoning_content') and loop.index0 > ns.last %}"
    "<think>\n{{ message['reasoning_content'] }}\n</think>\n\n{% endif %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    quiet_libraries()
    initialize_platform()
    data = batch_of_sessions()
    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory))
        tokens, seconds = measure(Path(directory), data, arguments.repetitions)
    rows = [
        Row("tokens through the model", *tokens, tokens[0] / tokens[1], at_least=2.0),
        Row("CPU seconds of a step", *seconds, seconds[0] / seconds[1], at_least=1.5),
    ]
    title = f"A step on {SESSIONS} sessions of {TURNS} turns ({len(data['input_ids'])} rows)"
    is_whole = arguments == parser.parse_args([])
    return finish("sessions", title, ("without sharing", "with", "without / with"), rows, is_whole)


def batch_of_sessions() -> BatchedDataDict[Any]:
    """Return the rows of the sessions, with random advantages."""
    drawn, tokenizer = random.Random(0), make_tokenizer()
    words = [f"word{n}" for n in range(500)]

    def text(count: int) -> str:
        return " ".join(drawn.choices(words, k=count))

    prompt, rows, weights = text(PROMPT_WORDS), [], []
    for _ in range(SESSIONS):
        tree, messages = SessionTree(ChatTemplate(tokenizer)), [{"role": "user", "content": prompt}]
        for _ in range(TURNS):
            asked = tree.prompt(messages)
            said = f"<think>\n{text(THOUGHT_WORDS)}\n</think>\n\n{text(ANSWER_WORDS)}"
            ids = [*tokenizer(said, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            turn = tree.add(asked, Response(ids, [-6.0] * len(ids), True))
            answer = {key: turn.messages[-1][key] for key in ("role", "content")}  # clients drop thoughts
            messages = [*messages, answer, {"role": "user", "content": text(QUESTION_WORDS)}]
        own = tree.rows()
        assert len(own) == TURNS, "each turn is a row"
        sampled = [sum(row.token_mask) for row in own]
        rows += own
        weights += [count / sum(sampled) for count in sampled]
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([torch.tensor(row.input_ids) for row in rows], batch_first=True)
    mask = pad([torch.tensor(row.token_mask).float() for row in rows], batch_first=True)
    logprobs = torch.full(ids.shape, -6.0) * mask
    advantages = torch.randn(len(rows), 1, generator=torch.Generator().manual_seed(0)).expand(ids.shape)
    return BatchedDataDict(
        input_ids=ids, token_mask=mask, input_lengths=torch.tensor([len(row.input_ids) for row in rows]),
        sample_mask=torch.ones(len(rows)), sample_weights=torch.tensor(weights), advantages=advantages,
        reference_policy_logprobs=logprobs, prev_logprobs=logprobs, generation_logprobs=logprobs,
    )  # fmt: skip


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|end|>", "<|user|>", "<|assistant|>", "<think>", "</think>", "\n", " "]
    vocabulary = {text: n for n, text in enumerate([*special, *(f"word{n}" for n in range(500)), "<unk>"])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(text, "isolated") for text in ("\n", " ")]  # spaces and newlines are tokens
    )
    made.decoder = decoders.Fuse()
    made.add_special_tokens(special[:5])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|end|>", pad_token="<|end|>", chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def measure(directory: Path, data: BatchedDataDict[Any], repetitions: int) -> tuple[list[int], list[float]]:
    """Return the tokens of a step without and with sharing, and the CPU seconds of both."""
    from mcore_rl.algorithms.loss_functions import ClippedPGLossFn
    from mcore_rl.losses.policy_options import ClippedPGOptions
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    config = GRPOConfig.model_validate(
        {
            "output_dir": directory / "unused",
            "model": {"path": directory},
            "data": {"train": "unused", "max_sequence_length": 2048},
            "batch": {"tokens_per_pack": 4096, "share_prefixes": True},
            "optimizer": {"lr": 1e-5},
            "trainer": {"max_steps": 1},
            "checkpoint": {"export_hf": False},
            "grpo": {"num_prompts_per_step": 1, "num_generations_per_prompt": SESSIONS, "max_new_tokens": 128},
        }
    )
    policy = MegatronPolicy(config, total_steps=1000)
    return compare_sharing(policy, data, ClippedPGLossFn(ClippedPGOptions()), WHOLE_BATCH, repetitions)


if __name__ == "__main__":
    sys.exit(main())

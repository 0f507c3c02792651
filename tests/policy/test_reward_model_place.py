"""Tests that a reward model is trained at the same token at which it judges and at which transformers reads it."""

import json

import pytest
import torch
import yaml
from programs import metrics_of, run
from reward_model_cases import grpo_config, judged
from small_models import make_model, make_tokenizer
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from mcore_rl.data.tokenize import judged_tokens, load_tokenizer, tokenize_judged
from mcore_rl.testing.processes import run_processes

CHATML = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
"""Chat template with a newline after the end token; no model is trained to generate this newline."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("chatml") / "model"
    make_model("llama", directory, initializer_range=0.1)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(directory)
    return directory


def conversation(text, reply):
    return [{"role": "user", "content": text}, {"role": "assistant", "content": reply}]


PAIRS = [
    (conversation(f"say {i}", "abcd"[: 1 + i % 4]), conversation(f"say {i}", "wxyz"[: 1 + i % 3])) for i in range(6)
]


def test_every_token_of_the_rendering_is_there(model):
    tokenizer = load_tokenizer(model)
    (user, reply) = PAIRS[3][0]
    sequence = tokenize_judged(tokenizer, [user], [reply])
    whole = tokenizer.apply_chat_template([user, reply], tokenize=True, return_dict=True)["input_ids"]
    assert list(sequence.input_ids) == list(whole)
    assert tokenizer.convert_ids_to_tokens(sequence.input_ids[-2:]) == ["<|end|>", "\n"]
    assert list(sequence.input_ids) == judged_tokens(tokenizer, [user, reply])
    assert len(sequence.token_mask) == len(sequence.input_ids) and not sequence.token_mask[-1]
    trained = [t for t, m in zip(sequence.input_ids, sequence.token_mask, strict=True) if m]
    assert tokenizer.convert_ids_to_tokens(trained)[-5:] == [*"abcd", "<|end|>"]


@torch.no_grad()
def transformers_scores(directory):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    logs = [log for pair in PAIRS for log in pair]
    rows = [tokenizer.apply_chat_template(log, return_tensors="pt", return_dict=True)["input_ids"] for log in logs]
    return [model(row).logits.item() for row in rows]


@pytest.mark.long
def test_training_judge_and_transformers_read_one_number(model, tmp_path):
    lines = [json.dumps({"chosen": chosen, "rejected": rejected}) for chosen, rejected in PAIRS]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    config = {
        "output_dir": str(tmp_path / "out"),
        "model": {"path": str(model), "head": "reward"},
        "data": {"train": str(tmp_path / "pairs.jsonl"), "max_sequence_length": 32},
        "batch": {"global_batch_size": 6},
        "optimizer": {"lr": 1e-2, "schedule": "constant"},
        "trainer": {"max_steps": 3, "validate_at_end": True},
    }
    config["data"]["validation"] = config["data"]["train"]
    (tmp_path / "rm.yaml").write_text(yaml.safe_dump(config))
    run("train_rm.py", tmp_path / "rm.yaml")
    exported = tmp_path / "out" / "hf"
    expected = transformers_scores(exported)
    (last,) = [line for line in metrics_of(tmp_path / "out") if "validation_rewards_chosen_mean" in line]
    for name, first in (("chosen", 0), ("rejected", 1)):
        mean = sum(expected[first::2]) / len(PAIRS)
        assert last[f"validation_rewards_{name}_mean"] == pytest.approx(mean, abs=1e-5), name
    logs = [log for pair in PAIRS for log in pair]
    steps, _ = run_processes(judged, grpo_config(model, exported), logs, world_size=1, timeout=120)[0]
    assert [step.reward for step in steps] == pytest.approx(expected, abs=1e-5)

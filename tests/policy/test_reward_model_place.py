"""Tests that a reward model is trained at the same token at which it judges and at which transformers reads it."""

import json
from types import SimpleNamespace

import pytest
import torch
import yaml
from programs import metrics_of, run
from reward_model_cases import grpo_config, judged
from small_models import make_config, make_model, make_tokenizer
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.modeling_outputs import BaseModelOutputWithPast

from mcore_rl.data.tokenize import judged_tokens, load_tokenizer, tokenize_judged
from mcore_rl.models.megatron.training.forward_step import RewardOfSequences
from mcore_rl.testing.processes import run_processes

PLACES = {
    "padding apart": ({"pad_token": "<|pad|>"}, 0),
    "padding is the end": ({"pad_token": "<|end|>"}, 1),
    "no padding": ({"pad_token": None}, None),
    "config has another": ({"pad_token": "<|unk|>"}, 1),
}
"""Pad token of the tokenizer, and `pad_token_id` of the configuration."""
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
    assert list(sequence.input_ids) == list(judged_tokens(tokenizer, [user, reply]).input_ids)
    assert len(sequence.token_mask) == len(sequence.input_ids) and not sequence.token_mask[-1]
    trained = [t for t, m in zip(sequence.input_ids, sequence.token_mask, strict=True) if m]
    assert tokenizer.convert_ids_to_tokens(trained)[-5:] == [*"abcd", "<|end|>"]


@torch.no_grad()
def transformers_scores(directory, texts):
    """Score texts with transformers, all in one padded batch."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    batch = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
    assert len(set(batch["attention_mask"].sum(1).tolist())) > 1
    batch.pop("token_type_ids", None)
    return model(**batch).logits[:, 0].tolist()


def texts_of(directory, kind):
    """Return the texts of `PAIRS` as a reward model reads them: as a chat, or as prompt, response and end token."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    logs = [log for pair in PAIRS for log in pair]
    if kind == "chat":
        return [tokenizer.apply_chat_template(log, tokenize=False) for log in logs]
    return [log[0]["content"] + log[1]["content"] + tokenizer.eos_token for log in logs]


def model_with_padding(directory, place, template=CHATML):
    """Write a model whose tokenizer and configuration have these pad tokens."""
    tokens, own = PLACES[place]
    make_model("llama", directory, initializer_range=0.1, pad_token_id=own)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    tokenizer.pad_token = tokens["pad_token"]
    tokenizer.save_pretrained(directory)
    return directory


CASES = [
    ("padding is the end", "text", CHATML),
    ("padding apart", "chat", CHATML),
    ("no padding", "text", CHATML),
    ("no padding", "chat", CHATML.replace("\n", "")),
    ("padding is the end", "chat", CHATML.replace("\n", "")),
    ("config has another", "text", CHATML),
]


@pytest.mark.long
@pytest.mark.parametrize(("place", "kind", "template"), CASES)
def test_training_judge_and_transformers_read_one_number(place, kind, template, tmp_path):
    model = model_with_padding(tmp_path / "model", place, template)
    fields = [(c if kind == "chat" else c[1]["content"], r if kind == "chat" else r[1]["content"]) for c, r in PAIRS]
    prompts = [{} if kind == "chat" else {"prompt": chosen[0]["content"]} for chosen, _ in PAIRS]
    margins = [None, 0.0, 0.5, 1, 2.5, -1.0]
    lines = [
        json.dumps({**p, "chosen": c, "rejected": r, "margin": margin})
        for p, (c, r), margin in zip(prompts, fields, margins, strict=True)
    ]
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
    expected = transformers_scores(exported, texts_of(model, kind))
    (last,) = [line for line in metrics_of(tmp_path / "out") if "validation_rewards_chosen_mean" in line]
    differences = torch.tensor(expected[::2]) - torch.tensor(expected[1::2])
    with_margins = differences - torch.tensor([margin or 0.0 for margin in margins])
    loss = float(-torch.nn.functional.logsigmoid(with_margins).mean())
    assert last["validation_loss"] == pytest.approx(loss, rel=1e-4)
    for name, first in (("chosen", 0), ("rejected", 1)):
        mean = sum(expected[first::2]) / len(PAIRS)
        assert last[f"validation_rewards_{name}_mean"] == pytest.approx(mean, abs=1e-5), name
    accuracy = sum(c > r for c, r in zip(expected[::2], expected[1::2], strict=True)) / len(PAIRS)
    assert last["validation_accuracy"] == pytest.approx(accuracy)
    logs = [log for pair in PAIRS for log in pair]
    judging = grpo_config(model, exported, format=kind)
    steps, _ = run_processes(judged, judging, logs, world_size=1, timeout=120)[0]
    assert [step.reward for step in steps] == pytest.approx(expected, abs=1e-5)


def classifier(directory, pad_token_id):
    """Write a classifier whose rewards are spread, with this `pad_token_id`, and the tokenizer to it."""
    torch.manual_seed(5)
    config = make_config("qwen2", num_labels=1, tie_word_embeddings=False, pad_token_id=pad_token_id)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory)
    tokenizer = make_tokenizer()
    tokenizer.pad_token = None if pad_token_id is None else tokenizer.convert_ids_to_tokens(pad_token_id)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("pad_token_id", [1, None])
@torch.no_grad()
def test_a_judge_reads_where_transformers_does(pad_token_id, model, tmp_path):
    """With the end token as padding this is the token before the end; without padding, the last token."""
    directory = classifier(tmp_path / "judge", pad_token_id)
    logs, texts = [log for pair in PAIRS for log in pair], texts_of(directory, "text")
    if pad_token_id is None:  # transformers refuses batches
        scorer = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(directory)
        rows = [tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"] for text in texts]
        expected = [scorer(row).logits.item() for row in rows]
    else:
        expected = transformers_scores(directory, texts)
    assert max(expected) - min(expected) > 0.1
    steps, _ = run_processes(judged, grpo_config(model, directory, format="text"), logs, world_size=1)[0]
    assert [step.reward for step in steps] == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("pad_token_id", [0, 1, -1])
def test_positions_are_those_of_transformers(pad_token_id):
    """Rows end with padding tokens of their own, consist of them alone, or have a single token."""
    config = make_config("llama", num_hidden_layers=1, num_labels=1, pad_token_id=max(pad_token_id, 0))
    scorer = AutoModelForSequenceClassification.from_config(config)
    config.get_text_config().pad_token_id = pad_token_id
    scorer.model.forward = lambda ids, **_: BaseModelOutputWithPast(torch.arange(5.0).expand(len(ids), 5)[..., None])
    scorer.score = torch.nn.Identity()
    rows = [[5, 1, 1], [1, 1, 1, 1, 1], [7], [1], [0, 5, 0, 1, 0], [0, 0], [2, 3, 4, 5, 6]]
    ids, lengths = torch.full((len(rows), 5), pad_token_id), torch.tensor([len(row) for row in rows])
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
    head = RewardOfSequences(SimpleNamespace(family=SimpleNamespace(score_padding=pad_token_id)))
    expected = scorer(ids).logits[:, 0].long()
    if pad_token_id == -1:
        assert head._last_positions(ids, lengths)[:, 0].tolist() == [len(row) - 1 for row in rows]
    assert head._last_positions(ids, lengths)[:, 0].tolist() == expected.tolist()

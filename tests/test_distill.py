"""Distillation: plain PyTorch's steps from another model's logits, and training on the student's own answers."""

import json

import pytest
import torch
import yaml
from models import make_model
from test_training import metrics_of, run
from transformers import AutoModelForCausalLM, AutoTokenizer

from mcore_rl.data.batches import SampleOrder

STEPS, SIZE, COUNT, K = 3, 5, 11, 9


def records():
    return [{"prompt": f"say {i} ", "completion": "abcyz"[i % 5] * (1 + i % 4)} for i in range(COUNT)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("distill")
    make_model("qwen2", root / "student", initializer_range=0.05)
    make_model("deep", root / "teacher", initializer_range=0.1, hidden_size=48)
    (root / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records()))
    config = {
        "output_dir": "set below",
        "model": {"path": str(root / "student")},
        "data": {"train": str(root / "data.jsonl"), "max_sequence_length": 40},
        "batch": {"global_batch_size": SIZE},
        "optimizer": {"lr": 1e-2, "adam_eps": 1e-4, "schedule": "constant"},
        "trainer": {"max_steps": STEPS},
        "checkpoint": {"export_hf": False},
        "distillation": {"teacher": str(root / "teacher"), "topk": K, "kl_type": "mixed", "mixed_kl_weight": 0.3},
    }
    (root / "distill.yaml").write_text(yaml.safe_dump(config))
    return root


@pytest.fixture(scope="module")
def plain(files):
    """(loss, gradient norm) of each step by transformers and torch.optim."""
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(files / n, dtype=torch.float32) for n in ("student", "teacher")
    )
    tokenizer = AutoTokenizer.from_pretrained(files / "student")
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    rows = [(encode(r["prompt"]), [*encode(r["completion"]), tokenizer.eos_token_id]) for r in records()]
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2, eps=1e-4, weight_decay=0)
    results = []
    for step in range(STEPS):
        optimizer.zero_grad()
        divergences = []
        for i in SampleOrder(COUNT, 0).indices(step * SIZE, SIZE):
            prompt, response = rows[i]
            ids, predictors = torch.tensor([prompt + response]), slice(len(prompt) - 1, -1)
            with torch.no_grad():
                best = teacher(ids).logits[0, predictors].double().topk(K)
            p = best.values.log_softmax(-1)
            q = student(ids).logits[0, predictors].double().gather(1, best.indices).log_softmax(-1)
            divergences.append(0.3 * (p.exp() * (p - q)).sum(-1) + 0.7 * (q.exp() * (q - p)).sum(-1))
        loss = torch.cat(divergences).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        results.append((loss.item(), norm.item()))
    return results


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("tp", ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"]),
        ("cp", ["parallel.context_parallel_size=2"]),
    ],
)
def test_a_run_equals_plain_pytorch(name, arguments, files, plain):
    process = run("train_distill.py", files / "distill.yaml", f"output_dir={files / name}", *arguments, processes=2)
    assert f"teacher: {files / 'teacher'}, " in process.stdout_text
    found = [(m["loss"], m["grad_norm"]) for m in metrics_of(files / name)]
    for ours, theirs in zip(found, plain, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-4, abs=2e-5)


@pytest.mark.long
def test_a_student_learns_on_its_own_answers(files):
    more = ["distillation.on_policy=true", "distillation.max_new_tokens=12", "trainer.max_steps=25"]
    run("train_distill.py", files / "distill.yaml", f"output_dir={files / 'own'}", *more, processes=2)
    metrics = metrics_of(files / "own")
    assert metrics[-1]["reverse_kl"] < 0.5 * metrics[0]["reverse_kl"]
    given = sum(len(r["completion"]) + 1 for r in records())
    assert metrics[0]["num_unmasked_tokens"] != given
    for change, message in (
        (f"distillation.teacher={files / 'nothing'}", "distillation.teacher: "),
        ("distillation.topk=251", "distillation.topk=251: the teacher has 250 tokens"),
        ("distillation.max_new_tokens=9", "are of the student's own answers: set on_policy=true"),
        ("distillation.teacher=", "distillation.teacher: "),
    ):
        refused = run("train_distill.py", files / "distill.yaml", f"output_dir={files / 'no'}", change, check=False)
        assert refused.returncode == 2, change
        assert message in refused.stderr_text
        assert refused.stderr_text.count("\n") == 1

"""Tests of KTO against plain PyTorch's steps, under several layouts, and against TRL's loss."""

import json
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
import yaml
from float32 import FORMULA, assert_close32
from programs import metrics_of, run
from small_models import make_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from mcore_rl.algorithms.loss_functions import KTOLossFn
from mcore_rl.data.token_store import SampleOrder
from mcore_rl.distributed.batched_data_dict import BatchedDataDict

BETA, GOOD, BAD = 0.31, 1.3, 0.7
STEPS, SIZE, COUNT = 3, 6, 15


def records():
    return [
        {
            "prompt": f"say {i} ",
            "completion": ("ab" if i % 3 else "yz")[: 1 + i % 2] * (1 + i % 4),
            "label": bool(i % 3),
        }
        for i in range(COUNT)
    ]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("kto")
    make_model("qwen2", root / "model", initializer_range=0.05)
    (root / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records()))
    source = str(root / "data.jsonl")
    config = {
        "output_dir": "set below",
        "model": {"path": str(root / "model")},
        "data": {"train": source, "validation": source, "max_sequence_length": 40},
        "batch": {"global_batch_size": SIZE},
        "optimizer": {"lr": 1e-2, "adam_eps": 1e-4, "schedule": "constant"},
        "trainer": {"max_steps": STEPS, "validation_interval": 1},
        "checkpoint": {"export_hf": False},
        "kto": {"reference_policy_kl_penalty": BETA, "desirable_weight": GOOD, "undesirable_weight": BAD},
    }
    (root / "kto.yaml").write_text(yaml.safe_dump(config))
    return root


@pytest.fixture(scope="module")
def plain(files):
    """[(loss, z₀, gradient norm, validation loss)] of each step by transformers and torch.optim."""
    model, reference = (AutoModelForCausalLM.from_pretrained(files / "model", dtype=torch.float32) for _ in "pr")
    tokenizer = AutoTokenizer.from_pretrained(files / "model")
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    rows = [(encode(r["prompt"]), [*encode(r["completion"]), tokenizer.eos_token_id], r["label"]) for r in records()]

    def logprob(m, prompt, response):
        logits = m(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double()
        return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None]).sum()

    def ratio(prompt, response):
        with torch.no_grad():
            before = logprob(reference, prompt, response)
        return logprob(model, prompt, response) - before

    def objective(indices):
        with torch.no_grad():
            others = [ratio(rows[i][0], rows[(i + COUNT // 2) % COUNT][1]) for i in indices]
            z = torch.stack(others).mean().clamp(min=0)
        values = []
        for i in indices:
            r = ratio(*rows[i][:2])
            values.append(
                GOOD * (1 - torch.sigmoid(BETA * (r - z))) if rows[i][2] else BAD * (1 - torch.sigmoid(BETA * (z - r)))
            )
        return torch.stack(values).mean(), z

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0)
    results = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss, z = objective(SampleOrder(COUNT, 0).indices(step * SIZE, SIZE))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            validation, _ = objective(range(COUNT))
        results.append((loss.item(), z.item(), norm.item(), validation.item()))
    return results


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "processes", "arguments"),
    [
        ("tp", 2, ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"]),
        ("dp", 2, ["batch.packing=false"]),
    ],
)
def test_a_run_equals_plain_pytorch(name, processes, arguments, files, plain):
    run("train_kto.py", files / "kto.yaml", f"output_dir={files / name}", *arguments, processes=processes)
    metrics = metrics_of(files / name)
    assert metrics[0]["kl_reference_point"] == pytest.approx(0, abs=1e-5)
    assert plain[-1][1] > 1e-3, "the reference point must not stay 0"
    found = [(m["loss"], m["kl_reference_point"], m["grad_norm"], m["validation_loss"]) for m in metrics]
    for ours, theirs in zip(found, plain, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-4, abs=2e-5)


def batch(rows=6, width=8):
    generator = torch.Generator().manual_seed(4)
    mask = (torch.rand(rows, width, generator=generator) < 0.6).float()
    mask[0] = 0
    mask[0, -1] = 1  # a response of one token
    logprobs = (-2 * torch.rand(rows, width - 1, generator=generator)).requires_grad_()
    data = BatchedDataDict(
        input_ids=torch.zeros(rows, width, dtype=torch.long),
        token_mask=mask,
        sample_mask=torch.ones(rows),
        reference_policy_logprobs=-2 * torch.rand(rows, width, generator=generator),
        desirable=torch.tensor([True, False, True, True, False, True]),
        kl_reference_point=torch.full((rows,), 0.17),
    )
    return logprobs, data


@pytest.mark.long
@pytest.mark.parametrize("labels", ["mixed", "all desirable", "none desirable"])
def test_the_loss_is_trls(labels):
    import trl

    trainer = trl.KTOTrainer
    logprobs, data = batch()
    if labels != "mixed":
        data["desirable"][:] = labels == "all desirable"
    options = {"reference_policy_kl_penalty": BETA, "desirable_weight": GOOD, "undesirable_weight": BAD}
    loss, _ = KTOLossFn(options).from_logprobs(logprobs, data, data["sample_mask"].sum(), None)
    mask = data["token_mask"][:, 1:]
    zeros = torch.zeros_like(logprobs)
    outputs = SimpleNamespace(log_probs=logprobs * mask, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    same = lambda x: x  # noqa: E731
    itself = SimpleNamespace(
        model=SimpleNamespace(training=True), aux_loss_enabled=False, precompute_ref_logps=True, calculate_KL=True,
        accelerator=SimpleNamespace(device="cpu", gather=same, gather_for_metrics=same), loss_type="kto", beta=BETA,
        desirable_weight=GOOD, undesirable_weight=BAD, _metrics={"train": defaultdict(list)}, _total_train_tokens=0,
        _tp_size=1, _compute_kl_logps=lambda model, batch: torch.tensor([-1.0, -2.0]),
    )  # fmt: skip
    inputs = {
        "input_ids": data["input_ids"], "attention_mask": torch.ones_like(data["token_mask"]),
        "completion_mask": data["token_mask"], "label": data["desirable"],
        "ref_logps": (data["reference_policy_logprobs"][:, :-1] * mask).sum(1),
        "ref_KL_logps": torch.tensor([-1.0, -2.34]),
    }  # fmt: skip
    expected = trainer._compute_loss(itself, lambda **_: outputs, inputs, False)
    assert_close32(loss, expected, FORMULA, scale=1)
    ours, theirs = (torch.autograd.grad(x, logprobs)[0] for x in (loss, expected))
    assert_close32(ours, theirs, FORMULA)


@pytest.mark.long
def test_bad_labels_are_refused(files):
    good = {"prompt": "a", "completion": "b", "label": True}
    (files / "bad.jsonl").write_text(json.dumps(good) + "\n" + json.dumps({**good, "label": "yes"}) + "\n")
    arguments = (f"data.train={files / 'bad.jsonl'}", f"output_dir={files / 'no'}")
    refused = run("train_kto.py", files / "kto.yaml", *arguments, check=False)
    assert refused.returncode == 2
    assert "bad.jsonl, line 2: label must be true or false, got 'yes'" in refused.stderr_text

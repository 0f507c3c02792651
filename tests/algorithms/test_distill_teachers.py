"""Tests of distillation from several teachers, from the student itself, and from sampled tokens."""

import json
import re

import pytest
import torch
import yaml
from float32 import FORMULA, approx32
from programs import metrics_of, run
from small_models import and_long, make_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from mcore_rl.config import DistillationConfig, build_config
from mcore_rl.config.algorithms import DistillationAlgorithmConfig
from mcore_rl.data.token_store import SampleOrder
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.errors import ContractError, UserError
from mcore_rl.losses.distillation import DistillationLossFn, SampledDistillationLossFn
from mcore_rl.run.identity import RunIdentity
from mcore_rl.run.preflight import check_layout

STEPS, SIZE, COUNT, K = 3, 5, 11, 9
TEACHERS = ["first", "second", {"first": 0.7, "second": 0.4}, {"second": 2.0}]


def records():
    return [
        {"prompt": f"say {i} ", "completion": "abcyz"[i % 5] * (1 + i % 4), "hint": "xyz" * (i % 3 + 1),
         "teacher": TEACHERS[i % 4]}
        for i in range(COUNT)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("teachers")
    make_model("qwen2", root / "student", initializer_range=0.05)
    make_model("deep", root / "first", initializer_range=0.1, hidden_size=48)
    make_model("llama", root / "second", initializer_range=0.1)
    (root / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records()))
    config = {
        "output_dir": "set below",
        "model": {"path": str(root / "student")},
        "data": {"train": str(root / "data.jsonl"), "max_sequence_length": 40},
        "batch": {"global_batch_size": SIZE},
        "optimizer": {"lr": 1e-2, "adam_eps": 1e-4, "schedule": "constant"},
        "trainer": {"max_steps": STEPS},
        "checkpoint": {"export_hf": False},
        "distillation": {"teacher": str(root / "first"), "topk": K},
    }
    (root / "distill.yaml").write_text(yaml.safe_dump(config))
    return root


def train(files, name, *arguments, **options):
    return run("train_distill.py", files / "distill.yaml", f"output_dir={files / name}", *arguments, **options)


def plain_steps(files, teachers_of, divergence, prompt_of):
    """Return (loss, gradient norm) of each step by transformers and torch.optim.

    Args:
        teachers_of: function (models by name, record) → (model, weight) of the record's teachers.
        divergence: function of the teacher's and the student's logits at the responses' positions.
        prompt_of: function of a record that returns the teacher's prompt.
    """
    models = {
        name: AutoModelForCausalLM.from_pretrained(files / name, dtype=torch.float32)
        for name in ("student", "first", "second")
    }
    student, tokenizer = models["student"], AutoTokenizer.from_pretrained(files / "student")
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    optimizer, results = torch.optim.AdamW(student.parameters(), lr=1e-2, eps=1e-4, weight_decay=0), []
    for step in range(STEPS):
        optimizer.zero_grad()
        total, count = 0.0, 0
        for i in SampleOrder(COUNT, 0).indices(step * SIZE, SIZE):
            record = records()[i]
            response = [*encode(record["completion"]), tokenizer.eos_token_id]
            own = student(torch.tensor([encode(record["prompt"]) + response])).logits[0, -len(response) - 1 : -1]
            for model, weight in teachers_of(models, record):
                with torch.no_grad():
                    taught = model(torch.tensor([encode(prompt_of(record)) + response])).logits
                total = total + weight * divergence(taught[0, -len(response) - 1 : -1].double(), own.double()).sum()
            count += len(response)
        loss = total / count
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        results.append((loss.item(), norm.item()))
    return results


def forward_of_topk(taught, own):
    best = taught.topk(K)
    p, q = best.values.log_softmax(-1), own.gather(1, best.indices).log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def unnormalized(taught, own):
    indices = taught.topk(K).indices
    p, q = (logits.log_softmax(-1).gather(1, indices) for logits in (taught, own))
    return (q.exp() * (q - p) - q.exp() + p.exp()).sum(-1)


def teachers_of_record(models, record):
    named = record["teacher"]
    return [(models[name], weight) for name, weight in (named if isinstance(named, dict) else {named: 1.0}).items()]


CASES = {
    "several teachers": (
        ["distillation.teacher={{first: {0}/first, second: {0}/second}}"],
        (teachers_of_record, forward_of_topk, lambda record: record["prompt"]),
    ),
    "the student with a hint": (
        ["distillation.teacher=policy", "distillation.teacher_prompt='{{hint}} {{prompt}}{{hint}}'"],
        (lambda models, record: [(models["student"], 1.0)], forward_of_topk,
         lambda record: f"{record['hint']} {record['prompt']}{record['hint']}"),
    ),
    "unnormalized": (
        ["distillation.kl_type=reverse_unnormalized"],
        (lambda models, record: [(models["first"], 1.0)], unnormalized, lambda record: record["prompt"]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("layout", and_long([2], [4]), ids=["TP2", "TP2 CP2"])
def test_a_run_equals_plain_pytorch(case, layout, files, request):
    options, plain = case
    arguments = [option.format(files) for option in options]
    arguments += ["parallel.tensor_model_parallel_size=2", f"parallel.context_parallel_size={layout // 2}"]
    name = request.node.callspec.id.replace(" ", "_")
    train(files, name, *arguments, processes=layout)
    found = [(m["loss"], m["grad_norm"]) for m in metrics_of(files / name)]
    for ours, theirs in zip(found, plain_steps(files, *plain), strict=True):
        assert ours == pytest.approx(theirs, rel=2e-4, abs=2e-5)


@pytest.mark.long
def test_replicas_divide_the_records_of_several_teachers(files):
    """Two replicas, one of which may have no record of a teacher, train as one process does."""
    teachers = CASES["several teachers"][0][0].format(files)
    for processes in (1, 2):
        train(files, f"replicas_{processes}", teachers, processes=processes)
    for ours, theirs in zip(metrics_of(files / "replicas_2"), metrics_of(files / "replicas_1"), strict=True):
        for name in ("loss", "grad_norm", "forward_kl", "reverse_kl"):
            assert ours[name] == pytest.approx(theirs[name], rel=2e-4, abs=2e-5), name


@pytest.mark.parametrize(
    ("students", "teachers"),
    and_long(
        [], [("", "tensor_model_parallel_size: 2"), ("tensor_model_parallel_size=2", "pipeline_model_parallel_size: 2")]
    ),
)
def test_a_run_with_teachers_in_their_own_layout_equals_one_with_the_students(students, teachers, files):
    """Several teachers; replicas that have no record of a teacher; validation; the last, smaller batch of an epoch."""
    several = CASES["several teachers"][0][0].format(files)
    common = [several, f"data.validation={files / 'data.jsonl'}", "trainer.validate_at_end=true"]
    runs = {
        "shared": [f"parallel.{students}"] if students else [],
        "own": [f"distillation.teacher_parallel={{{teachers}}}", *([f"parallel.{students}"] if students else [])],
    }
    found = {}
    for name, arguments in runs.items():
        name = f"{name}{len(students)}"
        train(files, name, *common, *arguments, processes=2)
        found[name] = metrics_of(files / name)
    one, other = found.values()
    assert any(name.startswith("val") for name in one[-1])
    for ours, theirs in zip(one, other, strict=True):
        names = [n for n in ours if n.endswith(("loss", "grad_norm", "forward_kl", "reverse_kl"))]
        assert names
        for name in names:
            assert ours[name] == pytest.approx(theirs[name], rel=2e-4, abs=2e-5), name


@pytest.mark.parametrize(
    ("layout", "more", "said"),
    [
        ({"context_parallel_size": 2}, {}, "distillation.teacher_parallel: tensor 1 x pipeline 1 x context 2 = 2 must"),
        ({"sequence_parallel": True}, {}, "teacher_parallel.sequence_parallel: needs tensor_model_parallel_size > 1"),
        ({"timeout_seconds": 5}, {}, "unknown key distillation.teacher_parallel.timeout_seconds"),
        (
            {},
            {"teacher": "policy", "teacher_prompt": "{prompt}"},
            "teacher_parallel: has no effect, because teacher=policy",
        ),
    ],
)
def test_a_wrong_layout_of_teachers_is_refused(layout, more, said, files):
    values = yaml.safe_load((files / "distill.yaml").read_text())
    values["distillation"] |= {"teacher_parallel": layout, **more}
    with pytest.raises(UserError, match=re.escape(said)):
        check_layout(build_config(DistillationConfig, values, [], "distill.yaml"), world_size=1)


def test_a_resumed_run_tells_changes_of_options_of_teachers(files):
    """Their keys begin with the key of the teacher's directory, which is compared by content."""
    values = yaml.safe_load((files / "distill.yaml").read_text())
    identities = []
    for prompt, size in (("{prompt}", 1), ("{prompt} ", 2)):
        values["distillation"] |= {"teacher_prompt": prompt, "teacher_parallel": {"tensor_model_parallel_size": size}}
        config = build_config(DistillationConfig, values, [], "distill.yaml").model_dump(mode="json")
        identities.append(RunIdentity("distill", {}, "", "", config))
    assert identities[1].changes(identities[0]) == [
        "distillation.teacher_parallel.tensor_model_parallel_size 1 → 2",
        "distillation.teacher_prompt {prompt} → {prompt} ",
    ]


@pytest.mark.long
def test_a_teachers_layout_is_told_by_a_dry_run_and_by_a_check_of_layouts(files):
    own = "distillation.teacher_parallel={pipeline_model_parallel_size: 2}"
    done = train(files, "dry", own, "dry_run=true", processes=2)
    assert "distillation.teacher_parallel: tensor 1 x context 1 x data 1 x pipeline 2" in done.stdout_text.splitlines()
    arguments = ("--algorithm", "distill", "--layouts", "tp=2", "--steps", "1")
    done = run("layouts", files / "distill.yaml", own, *arguments)
    assert "not checked: distillation.teacher_parallel: every model has the layout of its row" in done.stdout_text


# ------------------------------------------------------------------ sampled tokens


def sampled_loss(logprobs, teacher, bound=2.0, **more):
    ones = torch.ones(len(logprobs), 2)
    data = BatchedDataDict(
        {"input_ids": ones.long(), "token_mask": ones, "sample_mask": torch.ones(len(logprobs)), **more}
    )
    data["teacher_logprobs"] = torch.stack((torch.zeros_like(teacher), teacher), dim=1)
    return SampledDistillationLossFn(bound).from_logprobs(logprobs[:, None], data, None, torch.tensor(1.0))


@pytest.mark.parametrize("weights", [(1.0,), (0.7, 0.4)], ids=["one teacher", "two"])
def test_the_expected_gradient_of_samples_is_that_of_the_reverse_kl(weights):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(7, generator=generator, dtype=torch.float64).requires_grad_()
    teachers = torch.randn(len(weights), 7, generator=generator, dtype=torch.float64).log_softmax(-1)
    q = logits.log_softmax(-1)
    kl = sum(weight * (q.exp() * (q - p)).sum() for weight, p in zip(weights, teachers, strict=True))
    (expected,) = torch.autograd.grad(kl, logits, retain_graph=True)
    taught = (torch.tensor(weights, dtype=torch.float64)[:, None] * teachers).sum(0)
    found = torch.zeros_like(expected)
    for token, probability in enumerate(q.detach().exp()):
        loss, metrics = sampled_loss(
            q[token, None], taught[token, None], teacher_weight=torch.tensor([sum(weights)], dtype=torch.float64)
        )
        found += probability * torch.autograd.grad(loss, logits, retain_graph=True)[0]
        assert metrics["loss"] == approx32(loss.item(), FORMULA)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("bound", [2.0, 5.0])
def test_another_sampler_is_corrected_up_to_the_bound(bound):
    logprobs = torch.tensor([-1.0, -1.0, -5.0], requires_grad=True)
    sampled = torch.tensor([[0.0, -1.0], [0.0, -4.0], [0.0, -1.0]])
    loss, metrics = sampled_loss(logprobs, torch.full((3,), -2.0), bound, generation_logprobs=sampled)
    weights = torch.tensor([1.0, bound, torch.tensor(-4.0).exp()])  # exp(3) is above the bound
    advantages = -2.0 - logprobs.detach()
    torch.testing.assert_close(torch.autograd.grad(loss, logprobs)[0], -weights * advantages)
    assert metrics["importance_weight"] == approx32(weights.sum().item(), FORMULA)


@pytest.mark.exhaustive
@pytest.mark.long
def test_a_student_learns_from_the_tokens_that_it_samples(files):
    options = [
        "distillation.form=sampled", "distillation.on_policy=true", "distillation.max_new_tokens=12",
        "distillation.temperature=0.8", "trainer.max_steps=30", "batch.global_batch_size=11", "distillation.topk=64",
    ]  # fmt: skip
    layouts = {"one": ([], 1), "two": (["parallel.tensor_model_parallel_size=2"], 2)}
    for name, (arguments, processes) in layouts.items():
        train(files, name, *options, *arguments, processes=processes)
    one, two = (metrics_of(files / name) for name in layouts)
    assert one[0]["importance_weight"] == pytest.approx(1, abs=1e-5)
    for ours, theirs in zip(two[:3], one[:3], strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
    mean = lambda lines: sum(line["reverse_kl"] for line in lines) / len(lines)  # noqa: E731
    assert mean(one[-5:]) < 0.7 * mean(one[:5])


# ------------------------------------------------------------------ mistakes


REFUSED = [
    ({"form": "sampled"}, "set on_policy=true"),
    ({"form": "sampled", "on_policy": True, "kl_type": "reverse"}, "kl_type: has no effect with form=sampled"),
    ({"max_importance_weight": 3.0}, "applies to form=sampled"),
    ({"teacher": "policy"}, "set teacher_prompt"),
    ({"teacher": {}}, "names no model"),
    ({"teacher_prompt": "{hint}"}, "must contain {prompt}"),
    ({"teacher_prompt": "{prompt} {"}, "names of columns in braces"),
    ({"teacher_prompt": "{prompt} {0}"}, "names of columns in braces"),
    ({"teacher": {"a": "x", "b": "y"}, "topk": None}, "topk: teacher by name needs a number of tokens"),
    ({"kl_type": "reverse_unnormalized", "zero_outside_topk": True}, "zero_outside_topk"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=str)
def test_options_that_do_not_fit_are_refused(values, message):
    with pytest.raises((ContractError, ValueError)) as error:
        DistillationAlgorithmConfig(**{"teacher": "x", **values})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("record", "options", "message"),
    [
        ({"teacher": "third"}, 0, "'third' is not a name in distillation.teacher; the names are first, second"),
        ({"teacher": {"first": -1}}, 0, "the weight of first must be a positive number, got -1"),
        ({"hint": None}, 1, "the key hint has no value"),
        ({"hint": 3}, 1, "hint: must be a text, because distillation.teacher_prompt inserts it; got 3"),
        ({"hint": "long " * 40}, 1, "together exceed data.max_sequence_length=40"),
        ({"completion": "a" * 60}, 1, "together exceed data.max_sequence_length=40"),  # truncated, not dropped
        ({"teacher": "second"}, 3, "'second' is not a name in distillation.teacher; the names are first"),
    ],
    ids=str,
)
def test_records_that_do_not_fit_are_named(record, options, message, files, tmp_path):
    (tmp_path / "data.jsonl").write_text(json.dumps({**records()[0], **record}) + "\n")
    one_by_name = ["distillation.teacher={{first: {0}/first}}"]
    arguments = [option.format(files) for option in [*(case[0] for case in CASES.values()), one_by_name][options]]
    arguments.append("data.overlong=truncate")
    process = train(files, "no", *arguments, f"data.train={tmp_path / 'data.jsonl'}", check=False)
    assert process.returncode == 2
    assert message in process.stderr_text and "data.jsonl, line 1" in process.stderr_text


def test_the_divergence_of_measures_is_zero_only_where_they_are_equal():
    loss_fn = DistillationLossFn(
        {"kl_type": "reverse_unnormalized", "mixed_kl_weight": 0.5, "zero_outside_topk": False}
    )
    p = torch.tensor([[[0.5, 0.2]]]).log()
    for q, is_zero in ((p, True), (p + 0.1, False), (p - 0.1, False)):
        divergences = loss_fn._divergences(q, None, p)
        for value in (divergences.forward_kl, divergences.reverse_kl):
            assert value.item() == approx32(0, FORMULA) if is_zero else value.item() > 1e-3

"""Tests of distillation: the steps of plain PyTorch from another model's logits, and training on the student's
responses."""

import functools
import json

import pytest
import torch
import yaml
from float32 import FORWARD, approx32
from layout_cases import as_saved, gradient_of, make_config, make_data
from programs import metrics_of, run
from small_models import and_long, make_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from mcore_rl.config import DistillationConfig, ModelConfig, build_config
from mcore_rl.config.algorithms import DistillationAlgorithmConfig
from mcore_rl.data.token_store import SampleOrder
from mcore_rl.errors import UserError, WorkerError
from mcore_rl.run.setup import _check_vocabulary
from mcore_rl.testing.layout_check import ParallelLayout
from mcore_rl.testing.processes import run_processes

STEPS, SIZE, COUNT, K = 3, 5, 11, 9


def records():
    return [{"prompt": f"say {i} ", "completion": "abcyz"[i % 5] * (1 + i % 4)} for i in range(COUNT)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("distill")
    make_model("qwen2", root / "student", initializer_range=0.05)
    make_model("qwen3", root / "untied", initializer_range=0.05)
    make_model("deep", root / "teacher", initializer_range=0.1, hidden_size=48)
    make_model("llama", root / "wide", initializer_range=0.1, hidden_size=48, vocab_size=300)
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


DIVERGENCES = {  # of log p, the teacher's, and log q, the student's
    "forward": lambda p, q: (p.exp() * (p - q)).sum(-1),
    "reverse": lambda p, q: (q.exp() * (q - p)).sum(-1),
    "mixed": lambda p, q: 0.3 * (p.exp() * (p - q)).sum(-1) + 0.7 * (q.exp() * (q - p)).sum(-1),
    "js": lambda p, q: 0.8 * (p.exp() * (p - mixture(p, q))).sum(-1) + 0.2 * (q.exp() * (q - mixture(p, q))).sum(-1),
}
EXTRA = {"mixed": {"mixed_kl_weight": 0.3}, "js": {"js_beta": 0.8}}
TEMPERATURE = 1.7


def mixture(p, q):
    return torch.log(0.8 * p.exp() + 0.2 * q.exp())


def distilled(config, kind, topk, teachers_layout=None):
    """Metrics of a step, and every gradient of the student in its Hugging Face shape."""
    from mcore_rl.algorithms.build_loss import build_loss
    from mcore_rl.models.megatron.training.optimizer import gather_gradients
    from mcore_rl.models.megatron.weights.conversion import export_hf_weights
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy
    from mcore_rl.models.policy.scoring import TeacherModel
    from mcore_rl.testing.layout_check import _main_grad

    options = {"teacher": config.distillation.teacher, "topk": topk, "kl_type": kind, **EXTRA.get(kind, {})}
    distillation = DistillationAlgorithmConfig(**options, loss_temperature=TEMPERATURE)
    config = config.model_copy(update={"distillation": distillation})
    student = MegatronPolicy(config, total_steps=10)
    teaching = teachers_layout.apply(config) if teachers_layout else config
    teaching = teaching.model_copy(update={"model": ModelConfig(path=distillation.teacher)})
    teacher, data = TeacherModel(teaching, student.hf_config.vocab_size), make_data()
    if teachers_layout:
        assert teacher.has_own_layout
        data = student.own_rows(data)
    if topk is not None:
        best = teacher.get_topk_logits(data, topk)
        data["teacher_topk_logits"], data["teacher_topk_indices"] = best["topk_logits"], best["topk_indices"]
    loss_fn = build_loss(config, teacher)
    metrics = student.compute_gradients(data, loss_fn)
    gather_gradients(student.chunks)
    gradients = dict(export_hf_weights(student.model, _main_grad))
    validation = student.evaluate(data, loss_fn)
    for model in (student, teacher):
        model.shutdown()
    return metrics, gradients, validation


def plainly_distilled(student_path, teacher_path, kind, topk):
    """The same by transformers in float64."""
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for path in (student_path, teacher_path)
    )
    data, total = make_data(), 0.0
    counts = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    for row, length in enumerate(data["input_lengths"].tolist()):
        ids = data["input_ids"][row, None, :length]
        with torch.no_grad():
            taught = teacher(ids).logits[0, :-1, :250] / TEMPERATURE
        scores = student(ids).logits[0, :-1] / TEMPERATURE
        if topk is not None:
            best = taught.topk(topk)
            taught, scores = best.values, scores.gather(1, best.indices)
        divergence = DIVERGENCES[kind](taught.log_softmax(-1), scores.log_softmax(-1))
        total = total + (divergence * counts[row, : length - 1]).sum() / counts.sum()
    total.backward()
    return total.item(), as_saved(student, gradient_of)


@pytest.fixture(scope="module")
def plain_of(files):
    """Compute the result with plain PyTorch, once."""
    return functools.cache(
        lambda student, teacher, kind, topk: plainly_distilled(files / student, files / teacher, kind, topk)
    )


CASES = and_long(
    [
        ("student", "wide", "js", None, ParallelLayout(tp=2, sp=True)),
    ],
    [
        ("untied", "teacher", "reverse", None, ParallelLayout(cp=2, dp=2)),
        ("student", "teacher", "js", K, ParallelLayout(tp=2, cp=2)),
        ("student", "wide", "forward", None, ParallelLayout()),
        ("untied", "wide", "mixed", None, ParallelLayout(tp=2, pp=2)),
        ("student", "teacher", "js", None, ParallelLayout(pp=2, dp=2)),
        ("student", "teacher", "js", None, ParallelLayout(tp=2, cp=2, packing=False)),
        ("untied", "wide", "reverse", None, ParallelLayout(tp=2, pp=2, cp=2, sp=True)),
        ("untied", "teacher", "mixed", K, ParallelLayout(pp=2, dp=2)),
    ],
)


@pytest.mark.parametrize(("student", "teacher", "kind", "topk", "layout"), CASES, ids=str)
def test_a_step_equals_plain_pytorch(student, teacher, kind, topk, layout, files, plain_of):
    """Over the whole vocabulary (a teacher's LM head may have more rows) and over k tokens: loss, every gradient."""
    check_step(files, student, teacher, kind, topk, layout, plain_of(student, teacher, kind, topk))


def check_step(files, student, teacher, kind, topk, layout, plain, teachers_layout=None):
    config = DistillationConfig.model_validate(yaml.safe_load((files / "distill.yaml").read_text()))
    paths = {
        "model": ModelConfig(path=files / student),
        "data": config.data.model_copy(update={"max_sequence_length": 60}),
    }
    options = DistillationAlgorithmConfig(teacher=str(files / teacher))
    config = layout.apply(config.model_copy(update={**paths, "distillation": options}))
    metrics, gradients, validation = run_processes(
        distilled, config, kind, topk, teachers_layout, world_size=layout.world_size
    )[0]
    loss, expected = plain
    assert metrics["loss"] == approx32(loss, FORWARD)
    assert metrics["js" if kind == "js" else "forward_kl"] > 0
    assert {name: validation[name] for name in metrics} == approx32(metrics, FORWARD)
    whole = sum(g.square().sum() for g in expected.values()).sqrt()
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        difference = (gradients[name].double() - gradient).norm() / max(gradient.norm(), 1e-3 * whole)
        assert difference < 1e-4, (name, difference)


OWN_LAYOUTS = and_long(
    [
        ("student", "wide", "js", None, ParallelLayout(dp=2), ParallelLayout(tp=2, sp=True)),
    ],
    [
        ("untied", "wide", "mixed", None, ParallelLayout(tp=2, pp=2), ParallelLayout(cp=2, dp=2)),
        ("student", "teacher", "reverse", None, ParallelLayout(cp=2, dp=2), ParallelLayout(tp=2, pp=2, sp=True)),
        ("untied", "teacher", "forward", K, ParallelLayout(tp=4, sp=True), ParallelLayout(dp=4, packing=False)),
        ("student", "wide", "js", None, ParallelLayout(dp=4), ParallelLayout(pp=2, cp=2)),
        ("teacher", "student", "js", K, ParallelLayout(pp=2, vpp=3), ParallelLayout(tp=2)),
    ],
)


@pytest.mark.parametrize(("student", "teacher", "kind", "topk", "layout", "own"), OWN_LAYOUTS, ids=str)
def test_a_teacher_in_its_own_layout_equals_plain_pytorch(student, teacher, kind, topk, layout, own, files, plain_of):
    check_step(files, student, teacher, kind, topk, layout, plain_of(student, teacher, kind, topk), own)


@pytest.mark.long
def test_a_run_over_the_whole_vocabulary(files):
    """Training with a larger teacher, which has another LM head; top-k with k = vocabulary equals the whole
    vocabulary."""
    metrics = {}
    for name, teacher, topk in (("whole", "wide", "null"), ("all", "teacher", "250"), ("same", "teacher", "null")):
        more = [
            f"distillation.teacher={files / teacher}",
            f"distillation.topk={topk}",
            "parallel.tensor_model_parallel_size=2",
        ]
        run("train_distill.py", files / "distill.yaml", f"output_dir={files / name}", *more, processes=2)
        metrics[name] = metrics_of(files / name)
    for one, other in zip(metrics["all"], metrics["same"], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
    assert metrics["whole"][-1]["loss"] < metrics["whole"][0]["loss"]


@pytest.mark.long
def test_a_student_learns_on_its_own_answers(files):
    more = [
        "distillation.on_policy=true",
        "distillation.topk=null",
        "distillation.max_new_tokens=12",
        "trainer.max_steps=25",
    ]
    run("train_distill.py", files / "distill.yaml", f"output_dir={files / 'own'}", *more, processes=2)
    metrics = metrics_of(files / "own")
    assert metrics[-1]["reverse_kl"] < 0.5 * metrics[0]["reverse_kl"]
    given = sum(len(r["completion"]) + 1 for r in records())
    assert metrics[0]["num_unmasked_tokens"] != given
    for change, message in (
        (f"distillation.teacher={files / 'nothing'}", "distillation.teacher: "),
        ("distillation.topk=251", "distillation.topk=251: the teacher has only 250 tokens"),
        (f"distillation.teacher={files / 'wide'}", " has 300 rows, but the student's has only 250"),
        ("distillation.js_beta=0.2", "js_beta applies to kl_type=js, not to mixed"),
        ("distillation.max_new_tokens=9", "apply to the student's own responses: set on_policy=true"),
        ("distillation.teacher=", "distillation.teacher: "),
    ):
        refused = run("train_distill.py", files / "distill.yaml", f"output_dir={files / 'no'}", change, check=False)
        assert refused.returncode == 2, change
        assert message in refused.stderr_text
        assert refused.stderr_text.count("\n") == 1


def topk_gradients(config, data, indices):
    """Gradients of the LM head and of logits, both of a loss over the teacher's k tokens alone."""
    from mcore_rl.losses.distillation import DistillationLossFn
    from mcore_rl.models.megatron.weights.conversion import export_hf_weights
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=1)
    loss = DistillationLossFn({"kl_type": "mixed", "mixed_kl_weight": 0.3, "zero_outside_topk": False})
    policy.compute_gradients(data, loss)
    gradients = dict(export_hf_weights(policy.model, value_of=lambda tensor: tensor.main_grad))
    policy.shutdown()
    logits = torch.randn(*data["input_ids"].shape, 250, generator=torch.Generator().manual_seed(5)).requires_grad_()
    loss(logits, data, data["sample_mask"].sum(), data["token_mask"].sum())[0].backward()
    return gradients["lm_head.weight"], logits.grad


def test_tokens_outside_the_teachers_k_have_a_gradient_of_exactly_zero(model_of):
    """Rounding there would be enough for AdamW to move these rows."""
    data, indices = make_data(), torch.tensor([3, 17, 101, 200])
    generator = torch.Generator().manual_seed(4)
    shape = (*data["input_ids"].shape, 4)
    data["teacher_topk_indices"] = indices.expand(shape).contiguous()
    data["teacher_topk_logits"] = torch.randn(shape, generator=generator)
    config = make_config(model_of("llama"))
    for gradient in run_processes(topk_gradients, config, data, indices, world_size=1)[0]:
        rows = gradient.flatten(0, -2).T if gradient.ndim == 3 else gradient
        others = torch.ones(len(rows), dtype=torch.bool).index_fill(0, indices, False)
        assert rows[indices].any(dim=1).all()
        assert not rows[others].any()


def test_another_vocabulary_is_told_by_its_first_token():
    student = {"a": 0, "b": 1, "c": 2}
    for teacher, told in (
        ({"a": 0, "c": 1, "b": 2}, "(3 tokens instead of 3; 'b' has id 2 instead of id 1)"),
        ({"a": 0, "b": 1}, "(2 tokens instead of 3; 'c' has no id instead of id 2)"),
        ({**student, "d": 3}, "(4 tokens instead of 3; 'd' has id 3 instead of no id)"),
    ):
        with pytest.raises(UserError, match="has another vocabulary") as error:
            _check_vocabulary("TEACHER", teacher, student)
        assert told in str(error.value)
    _check_vocabulary("TEACHER", dict(student), student)


def distill(config):
    from mcore_rl.algorithms.distill import train_distill

    train_distill(config)


def test_a_token_that_the_teacher_has_no_embedding_of_is_told(files, tmp_path):
    """The student's response has a token id beyond the tokenizer, as random weights may generate."""
    teacher = make_model("llama", tmp_path / "teacher", vocab_size=90)
    overrides = [f"distillation.teacher={teacher}", "distillation.on_policy=true", "distillation.max_new_tokens=12"]
    values = yaml.safe_load((files / "distill.yaml").read_text())
    config = build_config(DistillationConfig, values, [f"output_dir={tmp_path / 'out'}", *overrides], "")
    with pytest.raises(
        WorkerError,
        match=r"distillation\.teacher: .* has only 90 rows of embeddings, but a response contains token \d+,",
    ):
        run_processes(distill, config, world_size=1)

"""Tests that the examples and the quick start work, on a model of the demo's shape."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import torch
from programs import ROOT, metrics_of
from small_models import make_model
from transformers import AutoModelForCausalLM

from mcore_rl.distributed.batched_data_dict import BatchedDataDict

EXAMPLES, DOCS = ROOT / "examples", ROOT / "docs"


def call(*command, cwd, path=ROOT):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(path)}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=150, cwd=cwd, env=environment
    )
    assert done.returncode == 0, f"{shlex.join(map(str, command))}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert "it/s]" not in done.stderr, "a library prints a progress bar"
    return done.stdout


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Return the model and data that `make demo` writes."""
    root = tmp_path_factory.mktemp("examples")
    call(sys.executable, ROOT / "scripts" / "make_demo_data.py", root / "outputs" / "demo", cwd=root)
    return root


def test_examples_are_listed_and_at_most_80_lines():
    files = sorted(EXAMPLES.glob("*.py"))
    listed = re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text())
    assert sorted(listed) == [file.name for file in files]
    assert all(len(file.read_text().splitlines()) <= 80 for file in files)


@pytest.mark.long
def test_custom_loss_example_trains_and_model_is_usable(demo):
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2, EXAMPLES / "custom_loss.py"]
    config = [ROOT / "configs" / "sft_cpu.yaml", "output_dir=out", "trainer.max_steps=3", "batch.global_batch_size=8"]
    call(*launch, *config, "parallel.tensor_model_parallel_size=2", cwd=demo)
    metrics = metrics_of(demo / "out", own={"confident"})
    assert metrics[-1]["loss"] < metrics[0]["loss"] and "confident" in metrics[0]
    told = call(sys.executable, EXAMPLES / "use_the_trained_model.py", demo / "out" / "hf", "An expression", cwd=demo)
    assert re.search(r"^32 tokens, mean log-probability -\d\.\d{4}$", told, re.MULTILINE), told


@pytest.mark.long
def test_program_of_the_api_page_trains_alike_in_one_and_two_processes(tmp_path):
    """The first loss is that of transformers. The program prints nothing but its own lines, and no warnings."""
    page = (DOCS / "api.md").read_text()
    (program,), (settings,) = (re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("python", "yaml"))
    assert len([line for line in program.splitlines() if line.strip()]) <= 27
    make_model("llama", tmp_path / "MODEL")
    (tmp_path / "program.py").write_text(program)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", 2]
    printed = []
    for launch, layout in (([], ""), (torchrun, "parallel: {tensor_model_parallel_size: 2}\n")):
        (tmp_path / "sft.yaml").write_text(settings + layout)
        command = list(map(str, [sys.executable, *launch, "program.py"]))
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        environment.pop("PYTHONWARNINGS", None)
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=environment)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        printed.append([float(line.split("loss ")[1]) for line in done.stdout.splitlines()])
    assert printed[1] == pytest.approx(printed[0], abs=2e-5)
    ids, mask = torch.tensor([[5, 6, 7, 8, 9], [5, 7, 9, 0, 0]]), torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "MODEL", dtype=torch.float32)
    logprobs = model(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    assert printed[0][0] == pytest.approx(-((logprobs * mask).sum() / mask.sum()).item(), abs=2e-5)
    assert printed[0][1] < printed[0][0]
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "hf")
    assert not torch.equal(trained.lm_head.weight, model.lm_head.weight)
    assert (tmp_path / "out" / "checkpoints" / "iter_0000002").is_dir()


def test_focal_loss_example_equals_its_formula(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from custom_loss import FocalLoss

    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 6, 11, dtype=torch.float64, generator=generator, requires_grad=True)
    tokens = torch.randint(11, (3, 6), generator=generator)
    mask = (torch.rand(3, 6, generator=generator) < 0.7).double()
    data = BatchedDataDict(input_ids=tokens, token_mask=mask, sample_mask=torch.tensor([1.0, 0.0, 1.0]))
    count = (mask[:, 1:] * data["sample_mask"][:, None]).sum()
    loss, _ = FocalLoss(1.5)(logits, data, torch.tensor(2.0), count)
    p = logits.softmax(-1)[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]
    expected = (-((1 - p) ** 1.5) * p.log() * mask[:, 1:] * data["sample_mask"][:, None]).sum() / count
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (loss, expected)))


def test_calculator_example_returns_expected_steps(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from calculator_tool import judge

    asked = [{"role": "user", "content": "3+4="}, {"role": "assistant", "content": "3+4="}]
    step = judge(asked, {"answer": "7"})
    assert (step.done, step.observation) == (False, "7")
    answered = [*asked, {"role": "user", "content": "7"}, {"role": "assistant", "content": "7"}]
    assert judge(answered, {"answer": "7"}).reward == pytest.approx(0.9)
    assert judge(answered, {"answer": "8"}).reward == 0


@pytest.mark.long
def test_environment_example_with_tool_trains(demo):
    arithmetic = demo / "outputs" / "arithmetic"
    call(sys.executable, ROOT / "scripts" / "make_arithmetic_data.py", arithmetic, cwd=demo)
    call(
        *(sys.executable, "-m", "mcore_rl", "train", "grpo", "--nproc-per-node", 2),
        *(ROOT / "configs" / "grpo_cpu.yaml", "--model", arithmetic / "model", "--output", "calculator"),
        *("environment.name=function", "environment.function=calculator_tool:judge", "environment.max_turns=3"),
        *("data.max_sequence_length=32", "trainer.max_steps=2", "data.validation=null"),
        *("trainer.validation_interval=null", "grpo.num_prompts_per_step=64", "grpo.num_logged_samples=1000"),
        cwd=demo,
        path=f"{ROOT}:{EXAMPLES}",
    )
    samples = metrics_of(demo / "calculator", "samples.jsonl")
    talks = [sample["messages"] for sample in samples if len(sample["messages"]) > 2]
    assert talks, "an untrained model calls the tool now and then"
    for talk in talks:
        call_, answer = talk[1]["content"], talk[2]["content"]
        numbers = re.search(r"(\d+)\+(\d+)=$", call_.strip())
        assert int(answer) == int(numbers[1]) + int(numbers[2])


@pytest.mark.exhaustive
@pytest.mark.long
def test_a_reward_model_and_what_it_judges(demo):
    prompts = demo / "prompts.jsonl"
    lines = (demo / "outputs" / "demo" / "preference_train.jsonl").read_text().splitlines()[:20]
    prompts.write_text("".join(json.dumps({"prompt": json.loads(line)["prompt"]}) + "\n" for line in lines))
    model, pairs = demo / "outputs" / "demo" / "model", demo / "outputs" / "demo" / "preference_train.jsonl"
    call(sys.executable, EXAMPLES / "reward_model_in_grpo.py", model, pairs, prompts, "judged", 2, cwd=demo)
    rewards = [line["reward_mean"] for line in metrics_of(demo / "judged" / "policy")]
    assert len(rewards) == 2 and all(rewards)
    assert (demo / "judged" / "policy" / "hf" / "model.safetensors").is_file()


@pytest.mark.exhaustive
@pytest.mark.long
def test_layouts_shows_steps_side_by_side(demo):
    options = ["--layouts", "tp=2", "--show-steps"]
    told = call(sys.executable, "-m", "mcore_rl", "layouts", ROOT / "configs" / "dpo_cpu.yaml", *options, cwd=demo)
    steps = re.findall(r"^  step (\d) +(\d\.\d{7}) +(\d\.\d{7}) +\d\.\de[+-]\d\d$", told, re.MULTILINE)
    assert [number for number, *_ in steps] == ["1", "2", "3"] * 2, told
    assert all(float(one) == pytest.approx(float(tp2), abs=1e-5) for _, one, tp2 in steps), told


@pytest.mark.exhaustive
def test_verify_a_layout_example_succeeds(demo):
    told = call(sys.executable, EXAMPLES / "verify_a_layout.py", ROOT / "configs" / "sft_cpu.yaml", cwd=demo)
    assert re.search(r"^tp2 cp2 sp( +\d\.\de[+-]\d\d){6}$", told, re.MULTILINE), told


# ------------------------------------------------------------------ the quick start


def blocks(page, kind):
    """Yield the code blocks of a language: the rest of the first line, and the text."""
    return re.findall(rf"^```{kind}(?: (\S+))?\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


COMMANDS = [text.strip() for _, text in blocks(DOCS / "quickstart.md", "bash")]


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """A directory with the page's files, several times over, and a model."""
    root = tmp_path_factory.mktemp("quickstart")
    make_model("llama", root / "MODEL")
    for name, text in blocks(DOCS / "quickstart.md", "json"):
        (root / name).write_text(text * 6)
    return root


def output_of(command):
    return command.partition("--output ")[2].split()[0]


def run_in(directory, command):
    """Run a command of the page in a directory, and before it those commands whose outputs it reads and that have not
    run there: another process may have run the tests of these."""
    program, *words = shlex.split(command)
    assert program == "mcore-rl"
    for earlier in COMMANDS[: COMMANDS.index(command)]:
        if f"={output_of(earlier)}/" in command and not (directory / output_of(earlier)).exists():
            run_in(directory, earlier)
    call(sys.executable, "-m", "mcore_rl", *words, "trainer.max_steps=1", "data.max_sequence_length=96", cwd=directory)


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS, ids=output_of)
def test_quick_start_command_succeeds(quickstart, command):
    if not (quickstart / output_of(command)).exists():
        run_in(quickstart, command)
    output = quickstart / output_of(command)
    assert len(metrics_of(output)) == 1
    assert (output / "hf" / "model.safetensors").is_file()


def test_the_quick_start_has_them_all():
    from mcore_rl.cli.train import PROGRAMS

    assert {command.split()[2] for command in COMMANDS} == set(PROGRAMS)

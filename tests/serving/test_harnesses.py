"""The field's evaluation harnesses, unmodified, on `mcore-rl serve`: `make test-agents`."""

import json
import os
import subprocess

import pytest
import torch
import yaml
from programs import ROOT
from served_models import served_by_command
from small_models import make_model
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.agents

PROGRAMS = ROOT / ".venv-agents" / "harnesses" / "bin"
QUESTIONS = ["sky", "grass", "snow", "fire", "sea", "leaf"]
CHOICES = ["red", "blue", "green and white"]
INSPECT_TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate


@task
def letters():
    return Task(dataset=[Sample(input=f"say {c}", target=c) for c in "abc"], solver=generate(), scorer=includes())
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    root = tmp_path_factory.mktemp("harnesses")
    make_model("qwen2", root / "model", initializer_range=0.1)
    with served_by_command(root / "model", "model.dtype=float32") as served:
        served.root = root
        yield served


def harness(program, *arguments, cwd):
    """Run a program of the harnesses' environment."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none", "LOCAL_API_KEY": "none"}
    done = subprocess.run(
        [PROGRAMS / program, *map(str, arguments)],
        capture_output=True, text=True, timeout=300, cwd=cwd, env={**environment, "NO_PROXY": "127.0.0.1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done


def write_task(root, name, **more):
    records = [{"q": question, "gold": number % 3} for number, question in enumerate(QUESTIONS)]
    (root / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    task = {
        "task": name, "dataset_path": "json", "test_split": "test", "doc_to_text": "{{q}} is",
        "dataset_kwargs": {"data_files": {"test": str(root / f"{name}.jsonl")}}, **more,
    }  # fmt: skip
    (root / f"{name}.yaml").write_text(yaml.safe_dump(task))


def samples_of(directory):
    (file,) = directory.rglob("samples_*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_log_likelihoods_of_lm_eval_are_those_of_transformers(served, tmp_path):
    """A multiple-choice task of its `local-completions`: each log-likelihood, and whether it is greedy."""
    write_task(
        tmp_path, "colors", output_type="multiple_choice", doc_to_choice=CHOICES, doc_to_target="{{gold}}",
        metric_list=[{"metric": "acc"}],
    )  # fmt: skip
    path = served.root / "model"
    options = f"model=any,base_url={served.url}/v1/completions,tokenizer_backend=huggingface,tokenizer={path}"
    harness(
        "lm_eval", "--model", "local-completions", "--model_args", f"{options},max_length=100,num_concurrent=3",
        "--include_path", tmp_path, "--tasks", "colors", "--output_path", tmp_path / "out", "--log_samples",
        cwd=tmp_path,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    found = samples_of(tmp_path / "out")
    assert len(found) == len(QUESTIONS)
    for sample in found:
        question = f"{sample['doc']['q']} is"
        asked = tokenizer(question)["input_ids"]
        for choice, ((told, is_greedy), *_) in zip(CHOICES, sample["resps"], strict=True):
            ids = tokenizer(f"{question} {choice}")["input_ids"]
            with torch.no_grad():
                logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)[len(asked) - 1 : -1]
            expected = logprobs.gather(1, torch.tensor(ids[len(asked) :])[:, None]).sum().item()
            assert float(told) == pytest.approx(expected, abs=1e-5 * len(ids))
            assert (str(is_greedy) == "True") == (logprobs.argmax(-1).tolist() == ids[len(asked) :])


def test_lm_eval_generates_by_chat_completions(served, tmp_path):
    write_task(
        tmp_path, "said", output_type="generate_until", doc_to_target="x",
        generation_kwargs={"until": ["\n\n"], "max_gen_toks": 8, "temperature": 0},
        metric_list=[{"metric": "exact_match"}],
    )  # fmt: skip
    options = f"model=any,base_url={served.url}/v1/chat/completions"
    harness(
        "lm_eval", "--model", "local-chat-completions", "--model_args", options, "--apply_chat_template",
        "--include_path", tmp_path, "--tasks", "said", "--output_path", tmp_path / "out", "--log_samples",
        cwd=tmp_path,
    )  # fmt: skip
    for sample in samples_of(tmp_path / "out"):
        asked = {"role": "user", "content": f"{sample['doc']['q']} is"}
        body = {"messages": [asked], "max_tokens": 8, "temperature": 0, "stop": ["\n\n"]}
        answer = served.post("/v1/chat/completions", body).json()
        assert sample["resps"][0][0] == answer["choices"][0]["message"]["content"]


def test_inspect_ai_runs_a_task(served, tmp_path):
    (tmp_path / "letters.py").write_text(INSPECT_TASK)
    harness(
        "inspect", "eval", "letters.py", "--model", "openai-api/local/any", "--model-base-url", f"{served.url}/v1",
        "--log-format", "json", "--log-dir", tmp_path / "logs", "--max-tokens", 8, "--temperature", 0,
        "--display", "plain", cwd=tmp_path,
    )  # fmt: skip
    (log,) = (tmp_path / "logs").glob("*.json")
    result = json.loads(log.read_text())
    assert result["status"] == "success" and len(result["samples"]) == 3
    for sample in result["samples"]:
        body = {"messages": [{"role": "user", "content": sample["input"]}], "max_tokens": 8, "temperature": 0}
        answer = served.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
        assert sample["output"]["choices"][0]["message"]["content"] in (answer, [{"type": "text", "text": answer}])


SDK = """
import json, sys
from openai import OpenAI
client = OpenAI(base_url=sys.argv[1], api_key="none")
asked = dict(model="any", input="say a", instructions="Be short.", max_output_tokens=8, temperature=0)
whole = client.responses.create(**asked)
with client.responses.stream(**asked) as events:
    streamed = [event for event in events][-1].response
asked = dict(model="any", messages=[{"role": "user", "content": "say a"}], max_tokens=8, temperature=0)
chat = client.chat.completions.create(**asked, logprobs=True, stream=True)
pieces = [chunk.choices[0].delta.content or "" for chunk in chat]
print(json.dumps([whole.output_text, streamed.output_text, whole.status, len(pieces), client.models.list().data[0].id]))
"""


def test_openais_sdk_asks_for_responses(served, tmp_path):
    done = harness("python", "-c", SDK, f"{served.url}/v1", cwd=tmp_path)
    whole, streamed, status, pieces, name = json.loads(done.stdout)
    assert whole == streamed and status in ("completed", "incomplete") and pieces >= 2 and name == "model"

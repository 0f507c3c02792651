"""`mcore-rl serve`, `mcore-rl chat` and `mcore-rl eval` on small models, as a user starts them."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest
import torch
from ports import free_port
from served_models import served_by_command
from small_models import make_model
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.long

TP2 = ["--nproc-per-node", 2]
LAYOUTS = {"one process": [], "tp2": [*TP2], "pp2": [*TP2]}
OVERRIDES = {
    "one process": [],
    "tp2": ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"],
    "pp2": ["parallel.pipeline_model_parallel_size=2"],
}
PROMPTS = [
    {"prompt": [{"role": "user", "content": f"say {c}"}], "answer": c, "data_source": "ab"[c > "e"]} for c in "abcdefgh"
]
RARELY = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("served")
    make_model("qwen2", root / "model", initializer_range=0.1)
    (root / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in PROMPTS))
    (root / "letters.py").write_text(
        "def letters(log, record):\n    return sum(map(ord, log[-1]['content'])) % 3 / 2\n"
    )
    return root


def command(*arguments, cwd=None, text=None, **environment):
    """Run a command of `mcore-rl` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "mcore_rl", *map(str, arguments)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **environment},
        capture_output=True, text=True, input=text, timeout=240, cwd=cwd,
    )  # fmt: skip


# ------------------------------------------------------------------ serve


@pytest.mark.parametrize("layout", ["tp2", *(pytest.param(name, marks=RARELY) for name in ("one process", "pp2"))])
def test_log_likelihoods_are_those_of_transformers(layout, root):
    """Also those of prompts of different lengths in one request. A signal ends the command and all its processes."""
    prompts = [[7, 20, 33, 8, 5, 6], [9, 4], [40, 41, 42], [7]]
    model = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
    with served_by_command(*LAYOUTS[layout], root / "model", "model.dtype=float32", *OVERRIDES[layout]) as served:
        body = {"prompt": prompts, "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
        choices = served.post("/v1/completions", body).json()["choices"]
        for ids, choice in zip(prompts, choices, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            sampled = int(logits[-1].argmax())
            expected = logits.gather(1, torch.tensor([*ids[1:], sampled])[:, None])[:, 0]
            told = choice["logprobs"]["token_logprobs"]
            assert told[0] is None
            torch.testing.assert_close(torch.tensor(told[1:]), expected, atol=1e-5, rtol=0)
        chat = {"messages": PROMPTS[0]["prompt"], "max_tokens": 8, "seed": 3, "temperature": 0.7}
        texts = {served.post("/v1/chat/completions", chat).json()["choices"][0]["message"]["content"] for _ in "ab"}
        assert len(texts) == 1
        family = psutil.Process(served.process.pid).children(recursive=True)
        assert served.stop() == 143 and "Traceback" not in served.error
        assert not [process for process in family if process.is_running() and process.status() != "zombie"]


def test_a_key_is_needed_where_others_reach_the_address(root):
    done = command("serve", root / "model", "--host", "0.0.0.0", "--port", free_port())
    assert done.returncode == 2
    told = "error: --host 0.0.0.0: others can reach this address; set the environment variable MCORE_RL_API_KEY\n"
    assert done.stderr == told
    with served_by_command(root / "model", key="sk-secret") as served:
        assert served.post("/v1/completions", {"prompt": "a"}).status_code == 401
        answer = served.post("/v1/completions", {"prompt": "a"}, headers={"Authorization": "Bearer sk-secret"})
        assert answer.status_code == 200 and served.stop(signal.SIGINT) == 130
        assert "sk-secret" not in served.said + served.error


def test_what_cannot_be_served_is_told_in_one_line(root, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases = {
            ("serve", root): f"{root}: is not a model; name a model directory",
            ("serve", root / "model", "--port", port): f"--port {port}: 127.0.0.1 cannot listen on it",
            ("serve", root / "model", "parallel.tensor_model_parallel_size=2"): "tensor 2 x pipeline 1",
            ("eval", root / "model", "--data", tmp_path / "none.jsonl"): "none.jsonl",
            ("eval", root / "model", "--data", root / "prompts.jsonl", "--judge", "judge_of_nobody"): "judge_of_nobody",
            ("eval", root / "model", "--data", root / "prompts.jsonl", "--judge", "nothing:f"): "nothing",
            ("chat", root / "nothing"): "nothing: is not a model",
            ("chat", f"http://127.0.0.1:{free_port()}/v1"): "no server with OpenAI's API answers there",
        }
        for arguments, told in cases.items():
            done = command(*arguments, cwd=tmp_path)
            assert done.returncode == 2, (arguments, done.stderr)
            (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
            assert told in line and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_a_trained_run_is_served_evaluated_and_compared(root, tmp_path):
    """The run's newest checkpoint and its export answer alike; its judge is the run's."""
    yes = [{"role": "assistant", "content": "yes"}]
    records = [{"prompt": record["prompt"], "completion": yes} for record in PROMPTS]
    (tmp_path / "sft.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    options = ["trainer.max_steps=3", "optimizer.lr=1e-2", "batch.global_batch_size=4", "model.dtype=float32"]
    out = tmp_path / "run"
    files = ["--model", root / "model", "--data", tmp_path / "sft.jsonl", "--output", out]
    done = command("train", "sft", *files, *options)
    assert done.returncode == 0, done.stderr
    common = ["--data", root / "prompts.jsonl", "--judge", "letters:letters", "grpo.max_new_tokens=6"]
    environment = {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    for name, more in (("newest", []), ("hf", ["--checkpoint", "hf"]), ("before", None)):
        model = root / "model" if more is None else out
        options = ["--output", tmp_path / name, "model.dtype=float32", *(more or [])]
        done = command("eval", model, *common, *options, **environment)
        assert done.returncode == 0, done.stderr
    entries = {
        name: [json.loads(line) for line in (tmp_path / name / "samples.jsonl").read_text().splitlines()]
        for name in ("newest", "hf", "before")
    }
    texts = {name: [entry["messages"][-1]["content"] for entry in own] for name, own in entries.items()}
    assert texts["newest"] == texts["hf"] != texts["before"]
    options = ["--output", tmp_path / "newest", "model.dtype=float32", "--baseline", tmp_path / "before"]
    done = command("eval", out, *common, *options, **environment)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "newest" / "eval.json").read_text())
    rewards = {name: [entry["reward"] for entry in own] for name, own in entries.items()}
    difference = sum(a - b for a, b in zip(rewards["newest"], rewards["before"], strict=True)) / len(PROMPTS)
    assert result["baseline"]["difference"]["mean"] == pytest.approx(difference)
    assert result["metrics"]["a/reward_mean"] == pytest.approx(sum(rewards["newest"][:5]) / 5)


def test_replicas_are_served_together_or_not_at_all(root):
    first = free_port()
    with socket.create_server(("127.0.0.1", first + 1)):
        done = command("serve", *TP2, root / "model", "--port", first)
    assert done.returncode == 2 and f"--port {first + 1}: 127.0.0.1 cannot listen on it" in done.stderr


# ------------------------------------------------------------------ eval


def test_samples_of_other_weights_are_not_used_again(root, tmp_path):
    """Also of a model directory that has been written anew, and of a checkpoint of another validation."""
    shutil.copytree(root / "model", tmp_path / "model")
    common = ["eval", tmp_path / "model", "--data", root / "prompts.jsonl", "--output", tmp_path / "out"]
    common += ["--judge", "exact_match", "grpo.max_new_tokens=3"]
    assert command(*common).returncode == 0
    make_model("qwen2", tmp_path / "model", initializer_range=0.2)
    again = command(*common)
    assert again.returncode == 2 and "has an evaluation with other settings (weights)" in again.stderr


def test_a_url_that_refuses_everything_ends_the_evaluation(root, tmp_path):
    with served_by_command(root / "model", key="sk-secret") as served:
        done = command(
            "eval", "any", "--data", root / "prompts.jsonl", "--output", tmp_path / "out", "--judge", "exact_match",
            "--url", f"{served.url}/v1", OPENAI_API_KEY="sk-wrong",
        )  # fmt: skip
    assert done.returncode == 2, done.stderr
    (error,) = [line for line in done.stderr.splitlines() if line]
    assert error.startswith("error: ") and "status 401: " in error and "the API key is wrong" in error


class Strict(BaseHTTPRequestHandler):
    """An OpenAI-like server that knows `max_tokens` only by its newer name."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        is_old = "max_tokens" in body
        message = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
        told = {"error": {"message": message}}
        if not is_old:
            choice = {"message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}
            told = {"choices": [choice], "usage": {"completion_tokens": 2}}
        text = json.dumps(told).encode()
        self.send_response(400 if is_old else 200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


def test_a_newer_name_of_an_option_is_used_where_it_is_asked_for(tmp_path):
    records = [{"prompt": [{"role": "user", "content": f"{n}?"}], "answer": "yes"} for n in range(5)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    with ThreadingHTTPServer(("127.0.0.1", 0), Strict) as server:
        server.bodies = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        done = command(
            "eval", "o9", "--data", tmp_path / "chats.jsonl", "--judge", "exact_match", "--output", tmp_path / "out",
            "--url", f"http://127.0.0.1:{server.server_port}/v1", "--concurrency", 2, "grpo.max_new_tokens=9",
        )  # fmt: skip
        server.shutdown()
    assert done.returncode == 0, done.stderr
    old = [body for body in server.bodies if "max_tokens" in body]
    assert 1 <= len(old) <= 2 and len(server.bodies) == 5 + len(old)
    assert all(body["max_completion_tokens"] == 9 for body in server.bodies if body not in old)
    assert json.loads((tmp_path / "out" / "eval.json").read_text())["metrics"]["reward_mean"] == 1.0


def test_an_evaluation_is_the_same_under_every_layout_and_goes_on(root, tmp_path):
    common = [root / "model", "--data", root / "prompts.jsonl", "--samples", 3, "--judge", "exact_match"]
    common += ["model.dtype=float32", "grpo.max_new_tokens=6", "grpo.temperature=0.7"]
    one = command("eval", *common, "--output", tmp_path / "one")
    assert one.returncode == 0, one.stderr
    two = command("eval", *TP2, *common, "--output", tmp_path / "two", *OVERRIDES["tp2"])
    dp2 = command("eval", *TP2, *common, "--output", tmp_path / "dp2")
    assert (two.returncode, dp2.returncode) == (0, 0), two.stderr + dp2.stderr
    whole = (tmp_path / "one" / "samples.jsonl").read_text()
    for name in ("two", "dp2"):
        assert (tmp_path / name / "samples.jsonl").read_text() == whole
    lines = whole.splitlines(keepends=True)
    failed = json.dumps({**json.loads(lines[4]), "error": "judge died", "reward": None}) + "\n"
    (tmp_path / "one" / "samples.jsonl").write_text("".join([*lines[:4], failed]))
    again = command("eval", *common, "--output", tmp_path / "one")
    assert again.returncode == 0 and (tmp_path / "one" / "samples.jsonl").read_text() == whole
    assert "4 of 24 samples have been judged before" in again.stdout + again.stderr


def test_a_url_is_evaluated_as_its_model_is(root, tmp_path):
    """Greedy responses of the endpoint are those of the training processes; judges and pages are the same."""
    common = ["--data", root / "prompts.jsonl", "--judge", "exact_match", "grpo.max_new_tokens=6"]
    exact = ["model.dtype=float32", "grpo.sample_unused_ids=true"]
    here = command("eval", root / "model", *common, "--output", tmp_path / "here", *exact)
    assert here.returncode == 0, here.stderr
    with served_by_command(root / "model", "model.dtype=float32") as served:
        there = command("eval", "any", *common, "--output", tmp_path / "there", "--url", f"{served.url}/v1")
        assert there.returncode == 0, there.stderr
        compared = command(
            "eval", "any", *common, "--output", tmp_path / "there", "--url", f"{served.url}/v1",
            "--baseline", tmp_path / "here",
        )  # fmt: skip
        assert compared.returncode == 0, compared.stderr
    read = {
        name: [json.loads(line) for line in (tmp_path / name / "samples.jsonl").read_text().splitlines()]
        for name in ("here", "there")
    }
    for here, there in zip(read["here"], read["there"], strict=True):
        for key in ("prompt", "sample", "source", "error", "truncated", "turns", "response_length", "ground_truth"):
            assert here[key] == there[key]
        # An endpoint's messages have no white space at their ends, and the texts of special tokens.
        said, told = here["messages"][-1]["content"], there["messages"][-1]["content"]
        assert said.strip() == told or "<|" in told
    assert "difference from model: " in compared.stdout


# ------------------------------------------------------------------ chat


def test_a_conversation(root):
    lines = ["hello", "/temperature 0", "again \\", "more", "/temperature x", "/nope", '"""', "a", "b", '"""']
    lines += [f"/compare {root / 'model'}", "hi", "/compare", "/system Be kind.", "/reset", "/help", "/quit", "never"]
    done = command("chat", root / "model", "--max-tokens", 9, "model.dtype=float32", text="\n".join(lines) + "\n")
    assert done.returncode == 0, done.stderr
    assert "error: /temperature x: must be a number from 0 to 100" in done.stdout
    assert "error: /nope: there is no such command; /help lists them" in done.stdout
    assert done.stdout.count("a new conversation") == 4 and done.stdout.count("│") >= 3 and "never" not in done.stdout
    assert "Traceback" not in done.stderr


def test_a_conversation_continues_and_says_what_the_model_says(root):
    with served_by_command(root / "model", "model.dtype=float32") as served:
        done = command("chat", f"{served.url}/v1", "--temperature", 0, "--max-tokens", 9, text="hello\nand now\n")
        assert done.returncode == 0, done.stderr
        messages = [{"role": "user", "content": "hello"}]
        for text in ("and now", None):
            body = {"messages": messages, "temperature": 0, "max_tokens": 9}
            answer = served.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
            assert answer in done.stdout
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": text}]


def test_the_model_of_a_killed_conversation_ends(root):
    conversation = subprocess.Popen(
        [sys.executable, "-m", "mcore_rl", "chat", root / "model", "model.dtype=float32"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert "/help lists the commands" in conversation.stdout.readline()
    family = psutil.Process(conversation.pid).children(recursive=True)
    assert len(family) >= 2
    os.kill(conversation.pid, signal.SIGKILL)
    conversation.wait(20)
    _, alive = psutil.wait_procs(family, timeout=30)
    for process in alive:
        process.kill()
    assert alive == []

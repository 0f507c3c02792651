"""Tests of models named by their hub names, from a cache in the format of the hub's client."""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml
from small_models import and_long, make_config, make_model

from mcore_rl.config import SFTConfig, build_config
from mcore_rl.errors import UserError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Write a cache with one model, under a branch and a tag."""
    root = tmp_path_factory.mktemp("hub")
    model = root / "models--someone--tiny"
    make_model("llama", model / "snapshots" / COMMIT)
    for name in ("main", "v1.0"):
        (model / "refs").mkdir(exist_ok=True)
        (model / "refs" / name).write_text(COMMIT)
    records = [{"prompt": f"say {i} ", "completion": "ab"} for i in range(4)]
    (root / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return root


def train(cache, model, *more, cwd=None, endpoint=None):
    environment = {**os.environ, "HF_HUB_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    environment |= {"HF_ENDPOINT": endpoint, "HF_TOKEN": "hf_own"} if endpoint else {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "mcore_rl", "train", "sft", "--model", model, "--data", str(cache / "data.jsonl")]
    command += ["--output", str(cache / "out"), "data.max_sequence_length=48", *more]
    environment["PYTHONPATH"] = os.getcwd()
    return subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment, cwd=cwd)


@pytest.mark.long
@pytest.mark.parametrize("name", ["someone/tiny", "someone/tiny@v1.0", f"someone/tiny@{COMMIT}"])
def test_train_loads_model_by_hub_name(cache, name):
    done = train(cache, name, "trainer.max_steps=1", "checkpoint.resume=none", "checkpoint.overwrite=true")
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load((cache / "out" / "config.yaml").read_text())
    assert config["model"]["path"] == str(cache / "models--someone--tiny" / "snapshots" / COMMIT)


@pytest.mark.parametrize(
    ("name", "message"),
    and_long(
        [
            (
                "someone/other",
                "someone/other does not exist, and cannot be loaded as a model of the hub: it is not in the hub",
            ),
        ],
        [
            (
                "someone/tiny@v2",
                "someone/tiny@v2 does not exist, and cannot be loaded as a model of the hub: it is not in the hub",
            ),
            ("tiny", "tiny does not exist; give a Hugging Face model directory, or OWNER/NAME on the hub"),
            ("some/-where", "some/-where does not exist, and cannot be loaded as a model of the hub: "),
        ],
    ),
)
def test_train_refuses_a_missing_model_in_one_line(cache, name, message, tmp_path):
    done = train(cache, name, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: model.path: {message}") and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("shards", [(), ("a.safetensors",)], ids=["none are there", "a download has ended early"])
def test_simulate_needs_no_weights(shards, tmp_path):
    snapshot = tmp_path / "models--someone--large" / "snapshots" / COMMIT
    make_config("llama").save_pretrained(snapshot)
    for shard in shards:
        (snapshot / shard).write_bytes(b"")
        weight_map = {"model.norm.weight": shard, "lm_head.weight": "b.safetensors"}
        (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "models--someone--large" / "refs").mkdir()
    (tmp_path / "models--someone--large" / "refs" / "main").write_text(COMMIT)
    config = {"output_dir": "out", "model": {"path": "someone/large"}, "data": {"train": "nowhere.jsonl"}}
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "mcore_rl", "simulate", tmp_path / "sft.yaml"]
    command += ["--algorithm", "sft", "--world-size", "2"]
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--lengths", "64"], capture_output=True, text=True, timeout=180, env=environment)
    assert done.returncode == 0, done.stderr
    assert "estimate: " in done.stdout


@pytest.mark.long
def test_model_path_prefers_directory_over_hub_name(cache, tmp_path):
    (tmp_path / "someone" / "tiny").mkdir(parents=True)
    done = train(cache, "someone/tiny", cwd=tmp_path)
    assert done.stderr == "error: model.path: someone/tiny must be a Hugging Face model directory with a config.json\n"


class Hub(ThreadingHTTPServer):
    """Stand-in for the hub's upload interface, as far as its client uses it; it stores the uploads.

    Args:
        refuses: the address that is answered with 403.
    """

    def __init__(self, refuses=None):
        super().__init__(("127.0.0.1", 0), _HubHandler)
        self.refuses, self.private, self.files, self.created = refuses, None, {}, 0


class _HubHandler(BaseHTTPRequestHandler):
    def do_POST(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers["Content-Length"]))
        path = self.path.partition("?")[0]
        if self.headers.get("Authorization") != "Bearer hf_own" or self.server.refuses == path:
            return self.answer(403, {"error": "You don't have the rights to do this"})
        if path == "/api/repos/create":
            asked = json.loads(body)  # by older clients, and newer ones
            self.server.created += 1
            self.server.private = asked.get("private", asked.get("visibility") == "private")
            return self.answer(200, {"url": f"http://{self.headers['Host']}/someone/trained", "id": "someone/trained"})
        if path == "/api/validate-yaml":  # the head of a model card
            return self.answer(200, {"errors": [], "warnings": []})
        if path == "/api/models/someone/trained/preupload/main":
            paths = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]
            return self.answer(200, {"files": modes})
        assert path == "/api/models/someone/trained/commit/main", path
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        url = f"http://{self.headers['Host']}/someone/trained/commit/{COMMIT}"
        return self.answer(200, {"success": True, "commitOid": COMMIT, "commitUrl": url})

    def do_GET(self):
        if self.path.partition("?")[0] == self.server.refuses:
            return self.answer(403, {"error": "You don't have the rights to do this"})
        if self.path == "/api/whoami-v2":
            return self.answer(200, {"type": "user", "name": "someone", "orgs": []})
        if self.server.refuses == "/api/repos/create":  # because it is not there
            return self.answer(404, {"error": "Repository not found"})
        return self.answer(200, {"sha": COMMIT, "id": "someone/trained", "siblings": []})

    def answer(self, status, value):
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args):
        pass


@contextmanager
def hub_of(**options):
    with Hub(**options) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        yield hub, f"http://127.0.0.1:{hub.server_port}"
        hub.shutdown()


PUSHED = ["trainer.max_steps=1", "checkpoint.resume=none", "checkpoint.push_to_hub=someone/trained"]


@pytest.mark.long
def test_train_pushes_exported_model_to_hub(cache, tmp_path):
    model = str(cache / "models--someone--tiny" / "snapshots" / COMMIT)
    with hub_of() as (hub, endpoint):
        done = train(cache, model, *PUSHED, f"output_dir={tmp_path / 'out'}", endpoint=endpoint)
    assert done.returncode == 0, done.stderr
    assert f"pushed to {endpoint}/someone/trained\n" in done.stdout
    assert hub.private is True
    exported = {path.name: path.read_bytes() for path in (tmp_path / "out" / "hf").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= exported.keys()
    assert hub.files == exported
    _, head, text = exported["README.md"].decode().split("---\n", 2)
    assert yaml.safe_load(head) == {
        "library_name": "transformers", "tags": ["mcore_rl", "sft"], "base_model": "someone/tiny",
    }  # fmt: skip
    assert "| `optimizer.lr` |" in text and "| `loss` |" in text


@pytest.mark.exhaustive
def test_failed_push_keeps_exported_model(cache, tmp_path):
    model = str(cache / "models--someone--tiny" / "snapshots" / COMMIT)
    with hub_of(refuses="/api/models/someone/trained/commit/main") as (_hub, endpoint):
        done = train(cache, model, *PUSHED, f"output_dir={tmp_path / 'out'}", endpoint=endpoint)
    assert done.returncode == 2
    assert done.stderr.startswith("error: checkpoint.push_to_hub: the upload to someone/trained failed (")
    assert f"upload it with `hf upload someone/trained {tmp_path / 'out' / 'hf'}`" in done.stderr
    assert (tmp_path / "out" / "hf" / "model.safetensors").is_file()


@pytest.mark.parametrize("reason", and_long([], ["refused", "another's", "not reached", "offline"]))
def test_train_refuses_hub_without_write_access_before_start(cache, tmp_path, reason):
    model = str(cache / "models--someone--tiny" / "snapshots" / COMMIT)
    refuses = {"another's": "/api/models/someone/trained/auth-check/write"}.get(reason, "/api/repos/create")
    with hub_of(refuses=refuses) as (_hub, endpoint):
        endpoint = {"refused": endpoint, "another's": endpoint, "not reached": "http://127.0.0.1:9", "offline": None}[
            reason
        ]
        done = train(cache, model, *PUSHED, f"output_dir={tmp_path / 'out'}", endpoint=endpoint)
    assert done.returncode == 2
    assert done.stderr.startswith("error: checkpoint.push_to_hub: someone/trained cannot be written to (")
    assert done.stderr.count("\n") == 1 and not (tmp_path / "out").exists()


@pytest.mark.exhaustive
@pytest.mark.long
def test_nothing_is_written_before_all_checks(cache, tmp_path):
    """If a checkpoint belongs to another run, neither a repository on the hub nor a token cache is created."""
    model = str(cache / "models--someone--tiny" / "snapshots" / COMMIT)
    common = ["trainer.max_steps=1", f"output_dir={tmp_path / 'out'}", "checkpoint.push_to_hub=someone/trained"]
    with hub_of() as (hub, endpoint):
        dry = train(cache, model, *common, f"data.cache_dir={tmp_path / 'a'}", "--dry-run", endpoint=endpoint)
        told = f"this was a dry run: it wrote tokenized data to {tmp_path / 'a'} (data.cache_dir)"
        models = f"models that were missing to the hub's cache ({cache})"
        assert dry.stdout.splitlines()[-1] == f"{told} and {models}, and nothing else", dry.stderr
        plain = shutil.copytree(model, tmp_path / "model")  # not in the cache
        dry = train(cache, str(plain), *common, f"data.cache_dir={tmp_path / 'c'}", "--dry-run", endpoint=endpoint)
        assert dry.stdout.splitlines()[-1].endswith(f"{tmp_path / 'c'} (data.cache_dir), and nothing else"), dry.stderr
        dry = train(cache, str(plain), *common, f"data.cache_dir={tmp_path / 'c'}", "--dry-run", endpoint=endpoint)
        assert dry.stdout.splitlines()[-1] == "this was a dry run: nothing was written", dry.stderr
        done = train(cache, model, *common[:2], "checkpoint.export_hf=false")
        assert done.returncode == 0, done.stderr
        refused = train(cache, model, *common, f"data.cache_dir={tmp_path / 'b'}", "seed=5", endpoint=endpoint)
        assert refused.returncode == 2 and refused.stderr.startswith("error: seed: "), refused.stderr
        assert hub.created == 0 and not (tmp_path / "b").exists()
    with hub_of(refuses="/api/repos/create") as (_hub, endpoint):
        foreign = train(cache, model, *common[:2], "checkpoint.push_to_hub=nobody/trained", endpoint=endpoint)
    assert foreign.returncode == 2
    assert "(the token is of someone, who is not nobody and not a member of it)" in foreign.stderr


@pytest.mark.parametrize("name", ["trained", "a/..b", "someone/trained/more", "some one/trained", "-a/b", "a/b--c"])
def test_push_to_hub_refuses_invalid_names(cache, name):
    values = {"output_dir": "out", "model": {"path": str(cache)}, "data": {"train": "data.jsonl"}}
    with pytest.raises(
        UserError, match=re.escape(f"checkpoint.push_to_hub: must have the form OWNER/NAME, got {name}")
    ):
        build_config(SFTConfig, values, (f"checkpoint.push_to_hub={name}",), "file.yaml")

"""Models by their names on the hub, out of a cache as the hub's own client keeps it."""

import json
import os
import subprocess
import sys

import pytest
import yaml
from models import make_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """One model, under a branch and a tag."""
    root = tmp_path_factory.mktemp("hub")
    model = root / "models--someone--tiny"
    make_model("llama", model / "snapshots" / COMMIT)
    for name in ("main", "v1.0"):
        (model / "refs").mkdir(exist_ok=True)
        (model / "refs" / name).write_text(COMMIT)
    records = [{"prompt": f"say {i} ", "completion": "ab"} for i in range(4)]
    (root / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return root


def train(cache, model, *more, cwd=None):
    environment = {**os.environ, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mcore_rl", "train", "sft", "--model", model, "--data", str(cache / "data.jsonl")]
    command += ["--output", str(cache / "out"), "data.max_sequence_length=48", *more]
    environment["PYTHONPATH"] = os.getcwd()
    return subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment, cwd=cwd)


@pytest.mark.long
@pytest.mark.parametrize("name", ["someone/tiny", "someone/tiny@v1.0", f"someone/tiny@{COMMIT}"])
def test_a_model_of_the_hub_is_trained(cache, name):
    done = train(cache, name, "trainer.max_steps=1", "checkpoint.resume=none", "checkpoint.overwrite=true")
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load((cache / "out" / "config.yaml").read_text())
    assert config["model"]["path"] == str(cache / "models--someone--tiny" / "snapshots" / COMMIT)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "someone/other",
            "someone/other is no directory, and as a name on the hub: is not in the hub's cache, and the ",
        ),
        ("someone/tiny@v2", "someone/tiny@v2 is no directory, and as a name on the hub: is not in the hub's cache"),
        ("tiny", "tiny must be a Hugging Face model directory with a config.json"),
        ("some/-where", "some/-where is no directory, and as a name on the hub: "),
    ],
)
def test_what_is_not_there_is_told_in_one_line(cache, name, message, tmp_path):
    done = train(cache, name, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: model.path: {message}") and done.stderr.count("\n") == 1, done.stderr


def test_a_directory_comes_before_a_name(cache, tmp_path):
    (tmp_path / "someone" / "tiny").mkdir(parents=True)
    done = train(cache, "someone/tiny", cwd=tmp_path)
    assert done.stderr == "error: model.path: someone/tiny must be a Hugging Face model directory with a config.json\n"

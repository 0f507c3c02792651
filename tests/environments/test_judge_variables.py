"""Tests that judging processes get the environment variables that they need, and no secrets of the trainer."""

import json
import os

import pytest
from programs import run
from small_models import make_model

from mcore_rl.config import EnvironmentConfig
from mcore_rl.environments.judge_processes import judge_variables

JUDGE = """
import json, os
from pathlib import Path

def judge(message_log, record):
    Path(__file__).with_name("seen").write_text(json.dumps(dict(os.environ)))
    return float(len(message_log[-1]["content"]) % 2)
"""


@pytest.mark.long
def test_a_judge_of_a_run_does_not_see_the_secrets(tmp_path, monkeypatch):
    make_model("llama", tmp_path / "model", initializer_range=0.05)
    (tmp_path / "telling_judge.py").write_text(JUDGE)
    prompts = [{"prompt": f"say {letter} ", "answer": letter} for letter in "abcd"]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    secrets = {"HF_TOKEN": "hf_own", "WANDB_API_KEY": "w", "AWS_SECRET_ACCESS_KEY": "a", "OPENAI_API_KEY": "o"}
    for name, value in {**secrets, "MY_JUDGE_MODE": "strict", "LC_ALL": "C.UTF-8"}.items():
        monkeypatch.setenv(name, value)
    overrides = [f"output_dir={tmp_path / 'out'}", f"model.path={tmp_path / 'model'}", "trainer.max_steps=1"]
    overrides += [f"data.train={tmp_path / 'prompts.jsonl'}", "data.max_sequence_length=32"]
    overrides += ["environment.name=function", "environment.function=telling_judge:judge"]
    overrides += ["grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=2", "grpo.max_new_tokens=4"]
    overrides += ["checkpoint.export_hf=false", "checkpoint.resume=none", "checkpoint.overwrite=true"]
    for more, passed in (
        ([], set()),
        (["environment.environment_variables=[OPENAI_API_KEY,MY_*]"], {"OPENAI_API_KEY"}),
    ):
        run("train_grpo.py", *overrides, *more)
        seen = json.loads((tmp_path / "seen").read_text())
        assert secrets.keys() & seen.keys() == passed
        assert ("MY_JUDGE_MODE" in seen) == bool(more)
        assert seen["PATH"] == os.environ["PATH"] and seen["LC_ALL"] == "C.UTF-8"
        assert seen["OMP_NUM_THREADS"] == "1" and seen["CUDA_VISIBLE_DEVICES"] == ""


def test_variables_that_headers_name_are_passed():
    headers = {"Authorization": "Bearer ${JUDGE_TOKEN}"}
    http = {"name": "http", "url": "http://127.0.0.1:9/judge", "headers": headers}
    environ = {"JUDGE_TOKEN": "t", "HF_TOKEN": "h", "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0,1"}
    expected = {"JUDGE_TOKEN": "t", "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    assert judge_variables(EnvironmentConfig(**http), environ) == expected
    weighted = EnvironmentConfig(name="weighted", rewards={"asked": http})
    assert judge_variables(weighted, environ) == expected
    everything = EnvironmentConfig(environment_variables=["*"])
    assert judge_variables(everything, environ) == {**environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def test_names_that_look_like_a_library_s_are_not_passed():
    secrets = {"PYTHON_DB_PASSWORD": "p", "XDG_SECRET": "x", "TRANSFORMERS_TOKEN": "t", "MCORE_RL_KEY": "m"}
    proxies = {"HTTPS_PROXY": "http://me:word@proxy:3128", "https_proxy": "http://me:word@proxy:3128"}
    needed = {"PYTHONPATH": "/a", "PYTHONUTF8": "1", "XDG_CACHE_HOME": "/c", "NO_PROXY": "x", "http_proxy": "http://p"}
    environ = {**secrets, **proxies, **needed}
    own = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    assert judge_variables(EnvironmentConfig(), environ) == {**needed, **own}
    asked = EnvironmentConfig(name="http", url="http://judge.example/")
    assert judge_variables(asked, environ) == {**needed, **proxies, **own}
    listed = EnvironmentConfig(environment_variables=["HTTPS_PROXY", "PYTHON_*"])
    assert {"HTTPS_PROXY", "PYTHON_DB_PASSWORD"} <= judge_variables(listed, environ).keys()


def test_names_that_are_not_names_are_refused():
    with pytest.raises(ValueError, match="environment_variables"):
        EnvironmentConfig(environment_variables=["A=B"])

"""Tests of templates that render the date: a resumed run keeps the date of its start."""

import json
import os
import subprocess
import sys
from datetime import date

import pytest
from small_models import make_model, make_tokenizer

from mcore_rl.config import SFTConfig
from mcore_rl.data.chat import chat_day, render, set_chat_day
from mcore_rl.data.tokenize import load_tokenizer
from mcore_rl.run.identity import RunIdentity
from mcore_rl.run.setup import tokenizer_and_cache

TEMPLATE = (
    "{{ strftime_now('%B') | lower }} "
    "{% for message in messages %}{{ message.role }} {{ message.content }}<|end|>{% endfor %}"
)
MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def model_at(path, template=TEMPLATE):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    make_model("llama", path)
    tokenizer.save_pretrained(path)
    return path


def config_of(root, **checkpoint):
    return SFTConfig.model_validate(
        {
            "output_dir": str(root / "out"),
            "model": {"path": str(root / "model")},
            "data": {"train": str(root / "data.jsonl"), "cache_dir": str(root / "cache")},
            "optimizer": {"lr": 1e-3},
            "trainer": {"max_steps": 1},
            "checkpoint": checkpoint,
        }
    )


def test_the_day_is_kept(tmp_path):
    path = model_at(tmp_path / "model")
    tokenizer = load_tokenizer(path, day=date(2023, 3, 4))
    assert render(tokenizer, MESSAGES) == "march user a<|end|>assistant b<|end|>"
    assert chat_day(load_tokenizer(path)) == date.today()
    assert chat_day(load_tokenizer(path, chat_template="{{ messages[0].content }}")) is None
    tokenizer.save_pretrained(tmp_path / "again")
    assert "2023" not in (tmp_path / "again" / "tokenizer_config.json").read_text()


@pytest.mark.parametrize(
    ("asks", "text"),
    [
        ("{{ strftime_now('%d %b %Y') }}", "04 Mar 2023"),
        ("{% set form = '%d' ~ '/' ~ '%m' %}{{ strftime_now(form) }}", "04/03"),
        ("{% if strftime_now is defined %}{{ strftime_now(format='%Y-%m-%d') }}{% endif %}", "2023-03-04"),
        ("{% set now = strftime_now %}{{ now('%-d, %A, 100%% %j') }}", "4, Saturday, 100% 063"),
        ("{% macro today() %}{{ strftime_now('%B')|upper }}{% endmacro %}{{ today() }}", "MARCH"),
        ("\n {{ strftime_now('%y')|int + 1 }}", "\n 24"),
    ],
)
def test_every_way_to_ask_for_the_day_is_told_the_kept_one(asks, text, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = asks
    set_chat_day(tokenizer, date(2023, 3, 4))
    assert render(tokenizer, MESSAGES) == text


def test_a_run_that_goes_on_has_its_own_day(tmp_path):
    model_at(tmp_path / "model")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text(RunIdentity("sft", {}, "", "", {}, chat_day="2023-03-04").to_json())
    tokenizer, cache = tokenizer_and_cache(config_of(tmp_path))
    assert chat_day(tokenizer) == cache.remake.day == date(2023, 3, 4)
    tokenizer, _ = tokenizer_and_cache(config_of(tmp_path, resume="none"))
    assert chat_day(tokenizer) == date.today()


ON_A_DAY = """
import sys
from datetime import date

DAY = sys.argv.pop(1)

class Day(date):
    @classmethod
    def today(cls):
        return date.fromisoformat(DAY)

from mcore_rl.data import tokenize
tokenize.date = Day
from mcore_rl.cli.train import train
train("sft")
"""


@pytest.mark.exhaustive
@pytest.mark.long
def test_resumed_on_another_day(tmp_path):
    model_at(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": MESSAGES}) + "\n")
    (tmp_path / "run.py").write_text(ON_A_DAY)

    def train(day, steps, *more, out="out", **environment):
        values = ["--model", tmp_path / "model", "--data", tmp_path / "data.jsonl", "--output", tmp_path / out]
        values += [f"trainer.max_steps={steps}", "batch.global_batch_size=1", f"data.cache_dir={tmp_path / 'cache'}"]
        command = [sys.executable, tmp_path / "run.py", day, *values, *more]
        environment = {**os.environ, **environment}
        run = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
        assert run.returncode == 0, run.stderr
        return run.stdout

    train("2023-03-04", 1)
    assert "resumed from" in train("2023-05-06", 2)
    assert "resumed from" in train(
        "2023-05-07", 3, f"checkpoint.resume={tmp_path / 'out' / 'checkpoints'}", out="other"
    )
    train("2023-05-06", 1, "checkpoint.resume=none", "checkpoint.overwrite=true", TORCHELASTIC_RUN_ID="a")
    assert RunIdentity.from_json((tmp_path / "out" / "run.json").read_text()).chat_day == "2023-05-06"
    restart = {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "1"}
    assert "resumed from" in train("2023-05-07", 2, "checkpoint.resume=none", "checkpoint.overwrite=true", **restart)

"""Tests of the way of a DPO step through the package, as docs/structure.md and its picture show it."""

import json
import re
import sys

import pytest
from make_drawings import PACKAGE, STEP
from programs import ROOT
from small_models import make_model

from mcore_rl.config import DPOConfig
from mcore_rl.testing.processes import run_processes


def calls_of_a_step(config):
    """Return the functions of the package that the second step of a DPO run calls, with their files, in order."""
    from mcore_rl.algorithms.dpo import train_dpo

    calls, steps = [], []

    def note(frame, event, _):
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(f"{PACKAGE}/"):
            name = frame.f_code.co_qualname
            if name == "SupervisedTrainer.train_step":
                steps.append(frame)
            elif len(steps) == 2:
                calls.append((name, file.removeprefix(f"{PACKAGE}/")))
        elif event == "return" and len(steps) == 2 and frame is steps[1]:
            sys.setprofile(None)

    sys.setprofile(note)
    train_dpo(config)
    return calls


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    root = tmp_path_factory.mktemp("step")
    model = make_model("qwen2", root / "model")
    pairs = [{"prompt": f"say {i} ", "chosen": "ab" * (1 + i % 3), "rejected": "ba"} for i in range(12)]
    (root / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    config = DPOConfig.model_validate(
        {
            "output_dir": str(root / "run"),
            "model": {"path": str(model)},
            "data": {"train": str(root / "pairs.jsonl"), "max_sequence_length": 48},
            "batch": {"global_batch_size": 4, "tokens_per_pack": 128},
            "optimizer": {"lr": 1e-3},
            "trainer": {"max_steps": 2},
            "dpo": {"reference": "swap"},
            "checkpoint": {"export_hf": False},
        }
    )
    return run_processes(calls_of_a_step, config, world_size=1)[0]


def test_a_dpo_step_passes_through_few_files(calls):
    files = {file for _, file in calls}
    assert len(files) <= 31, sorted(files)
    assert not {file for file in files if re.search("image|vision|agents/|compat/", file)}, "a step of texts needs none"


def test_a_dpo_step_calls_the_functions_of_the_picture_in_their_order(calls):
    place = 0
    for _, name, file in STEP:
        assert (name, file) in calls[place:], f"{name} of {file} is not called after the function before it"
        place += calls[place:].index((name, file)) + 1


def test_the_list_of_a_steps_functions_is_that_of_the_picture():
    text = (ROOT / "docs/structure.md").read_text()
    listed = re.findall(r"^\d+\. \[`([\w.]+)`\]\(\.\./mcore_rl/([\w/.]+)\)", text, re.MULTILINE)
    assert listed == [(name, file) for _, name, file in STEP]

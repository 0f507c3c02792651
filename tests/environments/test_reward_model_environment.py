"""Tests of a reward model as judge: transformers' rewards of the same conversations, under every layout and in a
run."""

import json
import shutil

import pytest
import torch
import yaml
from programs import metrics_of, run
from reward_model_cases import TOO_LONG, grpo_config, judged
from reward_model_cases import judge as judge
from small_models import and_long
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from mcore_rl.testing.layout_check import ParallelLayout
from mcore_rl.testing.processes import run_processes


def conversation(index):
    user = {"role": "user", "content": "what is " * (index % 4) + str(index)}
    system = [{"role": "system", "content": "be brief"}] * (index % 3 == 2)
    return [*system, user, {"role": "assistant", "content": "so " * (index % 7) + "?"}]


CONVERSATIONS = [conversation(index) for index in range(11)]


@torch.no_grad()
def plain_rewards(judge, texts):
    """Compute the rewards of conversations, or of texts, with transformers."""
    model = AutoModelForSequenceClassification.from_pretrained(judge, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(judge)
    texts = [t if isinstance(t, str) else tokenizer.apply_chat_template(t, tokenize=False) for t in texts]
    ids = [tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"] for text in texts]
    return [model(row).logits.item() for row in ids]


LAYOUTS = and_long(
    [ParallelLayout(tp=2)],
    [ParallelLayout(tp=2, dp=2, sp=True), ParallelLayout(pp=2, packing=False), ParallelLayout(cp=2)],
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rewards_are_transformers_own(layout, judge, model_of):
    config = layout.apply(grpo_config(model_of("llama"), judge))
    logs = [*CONVERSATIONS[:5], TOO_LONG, *CONVERSATIONS[5:]]
    every_rank = run_processes(judged, config, logs, world_size=layout.world_size)
    steps, none_fits = every_rank[0]
    assert all(of_rank[0] == steps for of_rank in every_rank)
    assert none_fits[0].error == steps[5].error
    assert "tokens are more than environment.max_sequence_length=70" in steps.pop(5).error
    expected = plain_rewards(judge, CONVERSATIONS)
    assert [step.reward for step in steps] == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert max(expected) - min(expected) > 0.1
    assert all(step.done and step.error is None for step in steps)


OWN_LAYOUTS = and_long(
    [(ParallelLayout(dp=2), {"tensor_model_parallel_size": 2, "sequence_parallel": True})],
    [(ParallelLayout(tp=2, dp=2), {"pipeline_model_parallel_size": 2, "context_parallel_size": 2})],
)


def judged_by_replica(config, logs):
    """Return each replica's rewards of its own conversations; the last replica has none."""
    from mcore_rl.environments.interfaces import Sample
    from mcore_rl.environments.reward_model import RewardModelEnvironment
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=3)
    replicas = policy.topology.data
    environment = RewardModelEnvironment(config, replicas=replicas)
    assert environment.model.has_own_layout
    own = [logs, []][replicas.rank]
    steps = environment.step([Sample(log, {}) for log in own])
    environment.close()
    policy.shutdown()
    return replicas.rank, steps


@pytest.mark.parametrize(("layout", "own"), OWN_LAYOUTS, ids=str)
def test_a_judge_in_its_own_layout_gives_transformers_rewards(layout, own, judge, model_of):
    config = layout.apply(grpo_config(model_of("llama"), judge, parallel=own))
    for rank, steps in run_processes(
        judged_by_replica, config, [*CONVERSATIONS, TOO_LONG], world_size=layout.world_size
    ):
        rewards = [step.reward for step in steps[:-1]]
        assert rewards == pytest.approx(plain_rewards(judge, CONVERSATIONS) if rank == 0 else [], rel=1e-4, abs=1e-4)
        assert len(steps) == (len(CONVERSATIONS) + 1 if rank == 0 else 0)


@pytest.mark.long
def test_plain_texts_are_judged_as_a_model_of_plain_texts_was_trained(judge, model_of):
    config = grpo_config(model_of("llama"), judge, format="text")
    steps, _ = run_processes(judged, config, CONVERSATIONS[:2], world_size=1)[0]
    texts = ["".join(message["content"] for message in log) + "<|end|>" for log in CONVERSATIONS[:2]]
    assert [step.reward for step in steps] == pytest.approx(plain_rewards(judge, texts), rel=1e-4, abs=1e-4)


ON_A_DAY = """
import os
from datetime import date

class Day(date):
    @classmethod
    def today(cls):
        return date(2023, 3, 4 + int(os.environ.get("RANK", 0)) + int(os.environ["DAYS_LATER"]))

from mcore_rl.data import tokenize
from mcore_rl.run import setup
tokenize.date = setup.date = Day
from mcore_rl.environments.reward_model import RewardModelEnvironment

tokens = RewardModelEnvironment._tokens

def told(self, log, record):
    row = tokens(self, log, record)
    print("the judge reads", self.tokenizer.decode(row.input_ids).partition("<")[0].strip(), flush=True)
    return row

RewardModelEnvironment._tokens = told
from mcore_rl.cli.train import train
train("grpo")
"""


@pytest.mark.long
def test_reward_model_reads_date_of_start_on_every_rank(judge, model_of, tmp_path, monkeypatch):
    """Only the judge's template contains the date. The ranks start on both sides of midnight; the run resumes later."""
    shutil.copytree(judge, tmp_path / "judge")
    tokenizer = AutoTokenizer.from_pretrained(judge)
    tokenizer.chat_template = "{{ strftime_now('%d') }} " + tokenizer.chat_template
    tokenizer.save_pretrained(tmp_path / "judge")
    prompts = [{"prompt": [{"role": "user", "content": f"say {i}"}]} for i in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    config = grpo_config(model_of("llama"), tmp_path / "judge").model_dump(mode="json", exclude_defaults=True)
    config["data"]["train"], config["output_dir"] = str(tmp_path / "prompts.jsonl"), str(tmp_path / "out")
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "on_a_day.py").write_text(ON_A_DAY)
    for steps, days_later in ((1, "0"), (2, "3")):
        monkeypatch.setenv("DAYS_LATER", days_later)
        overrides = (f"trainer.max_steps={steps}", "checkpoint.export_hf=false")
        ran = run(tmp_path / "on_a_day.py", tmp_path / "grpo.yaml", *overrides, processes=2)
        read = [line for line in ran.stdout_text.splitlines() if line.startswith("the judge reads")]
        assert len(read) >= 4 and set(read) == {"the judge reads 04"}, ran.stdout_text
    assert json.loads((tmp_path / "out" / "run.json").read_text())["chat_day"] == "2023-03-04"


@pytest.mark.long
def test_a_run_is_judged_by_a_reward_model(judge, model_of, tmp_path):
    """The reward stored for each sample is the one that transformers computes."""
    prompts = [{"prompt": [{"role": "user", "content": f"say {i}"}]} for i in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    config = grpo_config(model_of("llama"), judge).model_dump(mode="json", exclude_defaults=True)
    config["data"]["train"], config["output_dir"] = str(tmp_path / "prompts.jsonl"), str(tmp_path / "out")
    config["grpo"]["num_logged_samples"], config["trainer"]["max_steps"] = 4, 3
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(config))
    run("train_grpo.py", tmp_path / "grpo.yaml", "parallel.tensor_model_parallel_size=2", processes=2)
    entries = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    assert len(entries) == 12
    expected = plain_rewards(judge, [entry["messages"] for entry in entries])
    assert [entry["reward"] for entry in entries] == pytest.approx(expected, rel=1e-3, abs=1e-3)
    assert len(metrics_of(tmp_path / "out")) == 3
    for change, message in (
        (f"environment.path={model_of('llama')}", "is not a reward model: it has no score.weight"),
        ("environment.path=nowhere", "environment.path: nowhere does not exist"),
        ("environment.max_sequence_length=4096", "environment.max_sequence_length=4096: the model has 1024 positions"),
    ):
        refused = run("train_grpo.py", tmp_path / "grpo.yaml", change, f"output_dir={tmp_path / 'new'}", check=False)
        assert refused.returncode == 2
        assert message in refused.stderr_text
        assert refused.stderr_text.count("\n") == 1

"""Tests that a simulated step makes the same calls to its models as the training program."""

import json
import os
from collections import Counter
from importlib import import_module

import pytest
from ports import free_port
from simulated_cases import in_processes, prepare_real_process
from small_models import and_long, make_model

from mcore_rl.cli.train import PROGRAMS
from mcore_rl.simulation.sequences import Sequences
from mcore_rl.simulation.step import simulate_rank

PROMPT, ANSWER = "say it ", "ab" * 4


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A policy, a smaller model of its vocabulary, and records for every algorithm."""
    root = tmp_path_factory.mktemp("programs")
    make_model("llama", root / "model")
    make_model("qwen2", root / "other", hidden_size=32, num_hidden_layers=2)
    records = {
        "pairs": {"chosen": ANSWER, "rejected": ANSWER[::-1]},
        "unpaired": {"completion": ANSWER},
        "prompts": {"answer": "a"},
    }
    for name, record in records.items():
        lines = [
            {"prompt": PROMPT, **record, **({"label": i % 2 == 0} if name == "unpaired" else {})} for i in range(4)
        ]
        (root / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (root / "own_judge.py").write_text(JUDGE)
    return root


JUDGE = """
from zlib import crc32

def differently(log, record):
    return float(crc32(log[-1]["content"].encode()) % 97)  # so that there is something to learn within a group
"""
JUDGED = {"environment": {"name": "function", "function": "own_judge:differently"}}


def config_of(files, out, algorithm, data, **sections):
    values = {
        "output_dir": str(out),
        "model": {"path": str(files / "model"), "dtype": "float32", **sections.pop("model", {})},
        "data": {"train": str(files / f"{data}.jsonl"), "max_sequence_length": 48},
        "trainer": {"max_steps": 1},
        "checkpoint": {"export_hf": False},
        **(JUDGED if algorithm in ("grpo", "ppo") else {"batch": {"global_batch_size": 4}}),
        **sections,
    }
    return PROGRAMS[algorithm].config.model_validate(values)


def real_step(algorithm, config) -> tuple[dict[str, int], Sequences]:
    """Return the operations of matrix products by model, and the sequences that were trained on."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    os.environ["PYTHONPATH"] = str(config.model.path.parent)  # of the judge
    from mcore_rl.models.policy import scoring
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy
    from mcore_rl.simulation.counters import ProductCounter

    run, plain = scoring.run_microbatches, MegatronPolicy.forward_backward
    inside, trained = ["besides"], []

    def counted(model, wrapped, microbatches, head, train):
        inside.append("trained" if train else "scored")
        try:
            return run(model, wrapped, microbatches, head, train)
        finally:
            inside.pop()

    def noted(self, data, *arguments, **options):
        trained.append(
            Sequences(tuple(data["input_lengths"].tolist()), tuple(data["token_mask"].int().sum(1).tolist()))
        )
        return plain(self, data, *arguments, **options)

    scoring.run_microbatches, MegatronPolicy.forward_backward = counted, noted
    train_program = getattr(import_module(f"mcore_rl.algorithms.{algorithm}"), f"train_{algorithm}")
    with ProductCounter(lambda: (inside[-1], ""), lambda _: False) as products:
        train_program(config)
    by_model = Counter[str]()
    for product, count in products.counts.items():
        by_model[product.phase] += count
    del by_model["besides"]
    return dict(by_model), trained[-1]


# A simulation does not read the tokenizer, so it multiplies with the LM head's rows of all ids.
SMALL = {"num_prompts_per_step": 4, "num_generations_per_prompt": 2, "max_new_tokens": 8, "sample_unused_ids": True}
PENALTY = {"reference_policy_kl_penalty": 0.1}
BFLOAT16, ADAPTERS = {"dtype": "bfloat16"}, {"lora": {"rank": 4}}
CASES = and_long(
    [],
    [
        ("grpo", "prompts", {"grpo": SMALL}),
        (
            "grpo",
            "prompts",
            {"grpo": {**SMALL, "top_p": 0.9, "keep_sampling_mask": False}, "loss": PENALTY, "model": ADAPTERS},
        ),
        ("ppo", "prompts", {"ppo": {**SMALL, "temperature": 0.7}, "loss": {**PENALTY, "use_kl_in_reward": True}}),
        ("dpo", "pairs", {"dpo": {"reference": "swap"}}),
        ("dpo", "pairs", {"dpo": {"reference": "swap", "reference_model": "other"}}),
        ("dpo", "pairs", {"dpo": {"preference_loss": "orpo", "sft_loss_weight": 1}}),
        ("kto", "unpaired", {"model": ADAPTERS}),
        ("distill", "unpaired", {"distillation": {"teacher": "other", "topk": 4}}),
        ("distill", "unpaired", {"distillation": {"teacher": "other", "on_policy": True, "max_new_tokens": 8}}),
    ],
    [
        ("grpo", "prompts", {"grpo": SMALL, "model": BFLOAT16}),
        ("ppo", "prompts", {"ppo": SMALL, "model": BFLOAT16, "loss": {**PENALTY, "force_on_policy_ratio": True}}),
        ("dpo", "pairs", {"dpo": {"reference": "swap"}, "model": ADAPTERS}),
        ("dpo", "pairs", {"dpo": {"reference": "swap", "preference_loss": "aot_unpaired"}}),
        ("dpo", "pairs", {"dpo": {"reference": "swap", "use_weighting": True}}),
        ("kto", "unpaired", {"kto": {"loss": "apo_zero_unpaired"}}),
    ],
)


@pytest.mark.parametrize(("algorithm", "data", "sections"), CASES, ids=str)
def test_a_step_of_the_program(algorithm, data, sections, files, tmp_path):
    text = json.dumps(sections).replace('"other"', json.dumps(str(files / "other")))
    config = config_of(files, tmp_path, algorithm, data, **json.loads(text))
    ((real, sequences),) = in_processes(real_step, (algorithm, config), prepare=prepare_real_process)
    (simulated,) = in_processes(simulate_rank, (config, 0, 1, sequences, "cpu"))
    assert sum(simulated.products.values()) == sum(real.values()), (simulated.products, real)

"""Tests that a step sends tensors: objects are sent only for new names, failures and logged samples."""

import json
import pickle
import traceback

import pytest
import torch
from programs import metrics_of
from small_models import and_long
from topologies import grid

from mcore_rl.config import GRPOConfig, PPOConfig
from mcore_rl.testing.layout_check import ParallelLayout
from mcore_rl.testing.processes import run_processes

STEPS = 3

JUDGE = """
from mcore_rl.environments.interfaces import Step

def judge(log, record):
    last = len(log) >= 4
    return Step(len(set(log[-1]["content"])) / 7, done=last, observation=None if last else " more ")
"""


def config_of(model, root, algorithm):
    """Conversations of two turns, whose observations are tokens of the conversation too."""
    (root / "judging.py").write_text(JUDGE)
    prompts = [{"prompt": f"say {letter}", "answer": letter} for letter in "abcdefgh"]
    (root / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    values = {
        "output_dir": str(root / "out"),
        "model": {"path": str(model)},
        "data": {"train": str(root / "prompts.jsonl"), "max_sequence_length": 48},
        "optimizer": {"lr": 1e-3},
        "trainer": {"max_steps": STEPS},
        "checkpoint": {"export_hf": False},
        algorithm: {"num_prompts_per_step": 4, "num_generations_per_prompt": 2, "max_new_tokens": 6},
        "environment": {"name": "function", "function": "judging:judge", "max_turns": 2, "num_workers": 1},
    }
    if algorithm == "ppo":
        values["critic"] = {"path": str(model), "optimizer": {"lr": 1e-3}}
    return {"grpo": GRPOConfig, "ppo": PPOConfig}[algorithm].model_validate(values)


def objects_of_steps(config):
    """For each step the functions that sent or took an object, by the innermost of this package."""
    from torch.distributed import distributed_c10d

    from mcore_rl.algorithms.grpo import GRPOTrainer, train_grpo
    from mcore_rl.algorithms.ppo import train_ppo

    steps, step = [], GRPOTrainer.train_step

    def note():
        ours = [frame.name for frame in traceback.extract_stack() if "/mcore_rl/" in frame.filename]
        if steps and steps[-1] is not None:
            steps[-1].append((ours[-2], ours[-1]))

    def noted(self, number):
        steps.append([])
        metrics = step(self, number)
        steps.append(None)  # objects between two steps do not count
        return metrics

    def pickled(*args, **kwargs):
        note()
        return pickle_dumps(*args, **kwargs)

    pickle_dumps = pickle.dumps
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pickle, "dumps", pickled)  # objects that are sent as bytes
        patch.setenv("PYTHONPATH", str(config.output_dir.parent), prepend=":")
        patch.setattr(GRPOTrainer, "train_step", noted)
        for name in ("_object_to_tensor", "_tensor_to_object"):  # in every collective of objects
            original = getattr(distributed_c10d, name)
            patch.setattr(distributed_c10d, name, lambda *a, original=original: (note(), original(*a))[1])
        (train_grpo if config.algorithm == "grpo" else train_ppo)(config)
    return [calls for calls in steps if calls is not None]


LAYOUTS = and_long(
    [("grpo", "llama", ParallelLayout(tp=2))],
    [
        ("grpo", "llama", ParallelLayout(dp=2)),
        ("grpo", "llama", ParallelLayout(pp=2)),
        ("grpo", "llama", ParallelLayout(cp=2)),
        ("grpo", "mixtral", ParallelLayout(tp=2, dp=2, ep=2, sp=True)),
        ("ppo", "llama", ParallelLayout(tp=2, dp=2)),
    ],
)


@pytest.mark.long
@pytest.mark.parametrize(("algorithm", "family", "layout"), LAYOUTS, ids=str)
def test_a_step_sends_tensors(algorithm, family, layout, model_of, tmp_path):
    config = layout.apply(config_of(model_of(family), tmp_path, algorithm))
    if family == "mixtral":
        config = config.model_copy(update={"model": config.model.model_copy(update={"moe_router_replay": True})})
    ranks = run_processes(objects_of_steps, config, world_size=layout.world_size)
    for steps in ranks:
        assert len(steps) == STEPS
        for calls in steps[1:]:  # in the first, names are new
            calls = set(calls) - {("settle", "_failure")}  # which asks whether an error could be sent
            assert calls <= {("log_samples", "gather_items_on_rank_zero")}, (
                "texts of samples, which the first rank writes down"
            )
            assert not calls or layout.dp > 1
    metrics = metrics_of(tmp_path / "out")
    assert [(line["turns_mean"], line["failed_fraction"], line["skipped_update"]) for line in metrics] == [
        (2, 0, 0)
    ] * STEPS


def shared_and_gathered(with_experts):
    """Two replicas of two ranks: objects of a replica come from its first rank, and every rank gets the objects of all
    replicas."""
    from mcore_rl.data.choices import RecordedChoice
    from mcore_rl.models.generation.interfaces import Response, gather_responses, share_responses

    topology = grid(width=2)
    rank, recorded = torch.distributed.get_rank(), [RecordedChoice("routed_experts", 3, 2)] if with_experts else []
    prompts = [(5, 6), (7,), (8, 9, 10)][: 3 - topology.data.rank]
    made = []
    for row, prompt in enumerate(prompts):
        tokens = [2**31 - 1 - row, *[rank] * row]
        response = Response(tokens, [-1 / 3 - t for t in range(len(tokens))], row != 1)
        if with_experts:
            size = (len(prompt) + len(tokens), 3, 2)
            experts = torch.randint(-1, 99, size, generator=torch.Generator().manual_seed(rank)).short()
            response.choices = {"routed_experts": experts}
        made.append(response)
    led = made if topology.leads_replica else []
    own = made if rank else []  # the first has none
    return (
        made,
        share_responses(led, prompts, topology, recorded),
        gather_responses(own, topology.tensor, topology.data),
    )


@pytest.mark.parametrize("with_experts", [False, True])
def test_responses_are_the_same_on_other_ranks(with_experts):
    def told(responses, experts):
        routed = [r.choices["routed_experts"].tolist() if experts else None for r in responses]
        return [(r.token_ids.tolist(), r.logprobs.tolist(), r.ended, e) for r, e in zip(responses, routed, strict=True)]

    results = run_processes(shared_and_gathered, with_experts, world_size=4)
    made = [made for made, _, _ in results]
    for rank, (_, shared, gathered) in enumerate(results):
        assert told(shared, with_experts) == told(made[rank // 2 * 2], with_experts)
        assert told(gathered, False) == told([*made[1], *made[2], *made[3]], False)

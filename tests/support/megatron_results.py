"""Results of training with the Megatron-Core that Python finds first, as a file that other versions are compared with.

    python tests/support/megatron_results.py MODELS OUTPUT [OTHER [--resume-only]]

MODELS has small models of `FAMILIES`. OUTPUT is a new folder, for results.pt and checkpoints. OTHER is the OUTPUT of
another version: its checkpoints are resumed. With --resume-only, no layouts are compared.
"""

import sys
from importlib.metadata import version
from pathlib import Path

import torch
from layout_cases import STEPS, make_config, make_data, make_sft_config, run_steps

from mcore_rl.config import GRPOConfig
from mcore_rl.testing.layout_check import ParallelLayout, compute_layout_result
from mcore_rl.testing.processes import run_cases, run_processes

FAMILIES = ("qwen2", "qwen3_moe")
ALGORITHMS = ("sft", "dpo", "grpo")
LAYOUTS = {
    "qwen2": {
        ParallelLayout(): ALGORITHMS,
        ParallelLayout(tp=2, sp=True): ("sft", "dpo"),
        ParallelLayout(pp=2): ("grpo",),
        ParallelLayout(cp=2): ("dpo",),
    },
    "qwen3_moe": {ParallelLayout(): ("sft",), ParallelLayout(dp=2, ep=2): ("dpo", "grpo")},
}
"""Layouts of each family, with the algorithms that run in them."""
RESUMED = {"qwen2": ParallelLayout(tp=2, sp=True), "qwen3_moe": ParallelLayout(dp=2, ep=2)}


def make_grpo_config(path):
    values = make_config(path).model_dump(exclude={"dpo"})
    del values["batch"]["global_batch_size"]
    values["grpo"] = {"num_prompts_per_step": 3, "num_generations_per_prompt": 4, "max_new_tokens": 30}
    values["environment"] = {"name": "exact_match"}
    return GRPOConfig.model_validate(values)


def make_rollouts():
    data = make_data()
    advantages = torch.randn(12, generator=torch.Generator().manual_seed(5))
    data["advantages"] = advantages[:, None].expand(data["token_mask"].shape).contiguous()
    return data


CASES = {
    "sft": (make_sft_config, make_data),
    "dpo": (make_config, make_data),
    "grpo": (make_grpo_config, make_rollouts),
}


def outcomes(path, family):
    """Return the result of each algorithm under each layout, by "algorithm layout"."""
    found = {}
    for layout, names in LAYOUTS[family].items():
        made = [CASES[name] for name in names]
        cases = [(compute_layout_result, layout.apply(config(path)), data(), STEPS) for config, data in made]
        results = run_cases(cases, world_size=layout.world_size, timeout=240)
        found |= {f"{family} {name} {layout}": ranks[0] for name, ranks in zip(names, results, strict=True)}
    return found


def steps(path, family, output, load):
    """Return metrics and weights of two steps that begin with the checkpoint `load`, and where these are saved."""
    layout = RESUMED[family]
    config = layout.apply(make_config(path, schedule="cosine"))
    return run_processes(run_steps, config, output, load, 2, world_size=layout.world_size)[0]


def main(models, output, other=None, resume_only=None):
    results = {"version": version("megatron-core"), "outcomes": {}, "resumed": {}, "resumed other": {}}
    for family in FAMILIES:
        path = Path(models) / family
        results["outcomes"] |= {} if resume_only else outcomes(path, family)
        *_, saved = steps(path, family, Path(output) / family, None)
        results["resumed"][family] = steps(path, family, Path(output) / f"{family}_resumed", saved)[:2]
        if other:
            theirs = Path(other) / family / Path(saved).name
            results["resumed other"][family] = steps(path, family, Path(output) / f"{family}_other", theirs)[:2]
    torch.save(results, Path(output) / "results.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])

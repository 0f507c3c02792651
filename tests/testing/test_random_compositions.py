"""Tests that random compositions of layout, family, algorithm and options equal one process; a seed draws one of them.

pytest -m "" tests/testing/test_random_compositions.py --composition SEED     that one alone
"""

import copy
import random

import torch
from layout_cases import make_config, make_data, with_experts
from small_models import and_long
from small_models import make_config as hf_config_of

from mcore_rl.config import DPOConfig, GRPOConfig, SFTConfig
from mcore_rl.distributed.sampling_mask import KeptTokens
from mcore_rl.errors import UserError
from mcore_rl.models.megatron.families import family_of
from mcore_rl.testing.layout_check import ParallelLayout, compare, compute_layout_result, fitting, table_row
from mcore_rl.testing.processes import run_processes

SEEDS, ROWS = range(24), 12
MIXTURES = ["mixtral", "qwen3_moe", "glm4_moe"]


def pytest_generate_tests(metafunc):
    chosen = metafunc.config.getoption("--composition")
    metafunc.parametrize("seed", and_long([], SEEDS[:12], SEEDS[12:]) if chosen is None else [chosen])


def config_of(algorithm, values):
    """Return a configuration of the algorithm with a DPO configuration's values, for the rows of `make_data`."""
    if algorithm == "dpo":
        return DPOConfig.model_validate(values)
    kind = {"sft": SFTConfig, "grpo": GRPOConfig}[algorithm]
    batch = {name: value for name, value in values["batch"].items() if name != "global_batch_size"}
    own = {"batch": batch | ({"global_batch_size": ROWS} if algorithm == "sft" else {})}
    if algorithm == "grpo":
        own["grpo"] = {"num_prompts_per_step": 4, "num_generations_per_prompt": 3, "max_new_tokens": 8, "top_k": 5}
        own["loss"] = {"entropy_bonus": 0.01}
    return kind.model_validate({name: value for name, value in values.items() if name in kind.model_fields} | own)


def with_rollouts(data, masked):
    """Return the batch with advantages and, if wanted, a sampling mask: 1 to 5 tokens of each counted position."""
    generator = torch.Generator().manual_seed(9)
    shape = data["input_ids"].shape
    data["advantages"] = torch.randn(shape[0], 1, generator=generator).expand(shape).contiguous()
    data["generation_logprobs"] = -torch.rand(shape, generator=generator)
    if masked:
        data["kept_tokens"] = [
            KeptTokens.of(
                [
                    list(dict.fromkeys([token, *torch.randint(250, (4,), generator=generator).tolist()]))
                    if counts
                    else []
                    for token, counts in zip(ids[:length].tolist(), mask[:length].tolist(), strict=True)
                ]
            )
            for ids, mask, length in zip(
                data["input_ids"], data["token_mask"], data["input_lengths"].tolist(), strict=True
            )
        ]
    return data


def draw(seed, model_of):
    """Return the configuration of one process, a layout of 2 to 4, and whether experts are replayed."""
    drawn = random.Random(f"composition {seed}")
    while True:
        family = drawn.choice(["llama", "gemma3", "qwen2", *MIXTURES])
        config = make_config(model_of(family))
        model = {"recompute_modules": drawn.choice([(), ("mlp",), ("moe",)])}
        if family in MIXTURES:
            model |= {"moe_aux_loss_coeff": drawn.choice([0, 0.1]), "moe_z_loss_coeff": drawn.choice([0, 0.05])}
            model["moe_grouped_gemm"] = family != "mixtral" and drawn.random() < 0.4
        sizes = {name: drawn.choice([1, 1, 2]) for name in ("tp", "pp", "cp", "dp", "ep")}
        layout = ParallelLayout(
            **sizes, sp=sizes["tp"] > 1 and drawn.random() < 0.7, packing=drawn.random() < 0.8,
            tokens_per_pack=drawn.choice([128, 256]), vpp=drawn.choice([1, 1, 2]), prefix=drawn.random() < 0.3,
        )  # fmt: skip
        if not 2 <= layout.world_size <= 4:
            continue
        try:
            values = config.model_dump() | {"model": config.model.model_dump() | model}
            algorithm = drawn.choice(["dpo", "dpo", "sft", "grpo"])
            values["optimizer"] |= {"name": drawn.choice(["adamw", "adamw", "muon"])}
            values["batch"]["min_shared_tokens"] = drawn.choice([1, 4, 32])
            one = config_of(algorithm, values | {"batch": values["batch"] | {"share_prefixes": layout.prefix}})
            if layout.prefix and not layout.packing:
                continue
            layout.apply(one).parallel.data_parallel_size(layout.world_size)
            if not fitting([layout], one)[0]:
                continue
        except (ValueError, UserError):
            continue
        return family, one, layout, family in MIXTURES and drawn.random() < 0.4, drawn.random() < 0.5


def test_random_composition_equals_one_process(seed, model_of):
    family, config, layout, replays, masked = draw(seed, model_of)
    data = make_data()
    if isinstance(config, GRPOConfig):
        data = with_rollouts(data, masked)
    if replays:
        experts = family_of(hf_config_of(family)).experts
        data = with_experts(data, sum(experts.sparse_layers), experts.count, experts.topk)
    plain = config.model_copy(update={"model": config.model.model_copy(update={"recompute_modules": ()})})
    one = run_processes(compute_layout_result, ParallelLayout().apply(plain), copy.deepcopy(data), 2, world_size=1)[0]
    many = run_processes(compute_layout_result, layout.apply(config), data, 2, world_size=layout.world_size)[0]
    difference = compare(many, one)
    options = f"{config.model.recompute_modules} {config.optimizer.name} replays={replays} masked={masked}"
    print(f"--composition {seed}: {config.algorithm} {family} {layout} {options}")
    assert difference.within(), f"--composition {seed}: {family} {table_row(layout, difference)}"

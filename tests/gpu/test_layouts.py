"""Tests of parallel layouts whose ranks share a GPU, against one process on the same device.

The same tests also run, and must pass, on the CPU, which then takes the place of the GPU: tensors are copied for each
communication.
"""

import functools

import pytest
import torch
from gpu_process import IMPLEMENTATIONS, built_by, changed
from gpu_process import kind as kind
from layout_cases import STEPS, make_config, make_data
from prefix_cases import grpo_config, make_groups
from small_models import make_model
from transformers import AutoModelForCausalLM

from mcore_rl.config.parallel import ParallelLayout
from mcore_rl.testing.host_backend import COPYING
from mcore_rl.testing.layout_check import compare, compare_in_bfloat16, compute_layout_result, in_float32, table_row
from mcore_rl.testing.processes import Start, run_processes

STARTS = {"cpu": Start("cpu", COPYING), "cuda": Start("cuda")}
SECONDS = 300
BATCHES = {"dpo": (make_config, make_data), "grpo": (grpo_config, make_groups)}
LAYOUTS = [
    ("llama", ParallelLayout(tp=2, sp=True)),
    ("qwen3_moe", ParallelLayout(dp=2, ep=2)),
    *(
        pytest.param("llama", layout, marks=pytest.mark.exhaustive)
        for layout in (ParallelLayout(pp=2), ParallelLayout(cp=2), ParallelLayout(dp=2))
    ),
]


@pytest.fixture(scope="module")
def result_of(tmp_path_factory):
    """Return a function that computes a result by a device, algorithm, family, implementation, dtype and layout, once.

    The models' weights are exact in bfloat16.
    """

    @functools.cache
    def model_of(family):
        path = make_model(family, tmp_path_factory.mktemp("model"))
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(path)
        return path

    @functools.cache
    def result(kind, algorithm, family, implementation, dtype, layout):
        make, batch = BATCHES[algorithm]
        config = changed(layout.apply(make(model_of(family))), model={"dtype": dtype})
        config = in_float32(config) if dtype == "float32" else built_by(implementation, kind, config)
        return run_processes(
            compute_layout_result, config, batch(), STEPS,
            world_size=layout.world_size, timeout=SECONDS, start=STARTS[kind],
        )[0]  # fmt: skip

    return result


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("family", "layout"), LAYOUTS, ids=str)
@pytest.mark.parametrize("algorithm", BATCHES)
def test_layout_equals_one_process(kind, algorithm, family, layout, implementation, result_of):
    """Local layers are compared in float32, and Transformer Engine's in bfloat16."""
    if implementation == "local":
        one, found = (result_of(kind, algorithm, family, "local", "float32", x) for x in (ParallelLayout(), layout))
        difference = compare(found, one)
    else:
        one, found = (
            result_of(kind, algorithm, family, implementation, "bfloat16", x) for x in (ParallelLayout(), layout)
        )
        exact = result_of(kind, algorithm, family, "local", "float32", ParallelLayout())
        difference = compare_in_bfloat16(found, one, exact)
        print(f"{kind}: {difference.worst_quantity} is {difference.ratio:.2f} times one process's distance")
    print(table_row(layout, difference))
    assert difference.within(), difference

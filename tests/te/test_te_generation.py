"""Sampling with layers of Transformer Engine's modules."""

import pytest
import torch
from generation_cases import generate, make_prompts
from small_models import and_long
from te_cases import EP2, TP2, te_config

from mcore_rl.config.parallel import ParallelLayout
from mcore_rl.models.generation.sampling import SamplingParams
from mcore_rl.testing.processes import run_processes


@pytest.mark.parametrize(
    "family, layout, model",
    and_long([("qwen3", TP2, {})], [("gemma3", ParallelLayout(), {}), ("qwen3_moe", EP2, {"moe_grouped_gemm": True})]),
)
def test_greedy_tokens_equal_those_of_local_layers(family, layout, model, model_of):
    """The log-probabilities of sampling also equal those of the trainer."""
    found = {}
    for local in (True, False):
        config = te_config(model_of(family), layout, model, local=local)
        config = config.model_copy(update={"data": config.data.model_copy(update={"max_sequence_length": 100})})
        arguments = config, SamplingParams(max_new_tokens=12), True, 64, make_prompts()
        found[local], difference = run_processes(generate, *arguments, world_size=layout.world_size)[0]
        assert difference < 2e-5
    assert torch.equal(found[True]["output_ids"], found[False]["output_ids"])

"""Tests that the padding token's embedding gets no gradient as an input, as in transformers."""

import pytest
import torch
from layout_cases import make_config, make_data, plain_outcome
from small_models import and_long

from mcore_rl.testing.layout_check import ParallelLayout, compare, compute_layout_result, table_row
from mcore_rl.testing.processes import run_processes

PADDING = 0  # of all small models


def data_with_padding_tokens():
    data = make_data()
    data["input_ids"][:, 1] = PADDING
    return data


@pytest.mark.parametrize(
    ("family", "layout"),
    and_long(
        [("llama", ParallelLayout(tp=2, sp=True)), ("gemma3", ParallelLayout())],
        [
            ("llama", ParallelLayout(tp=2)),
            ("llama", ParallelLayout(cp=2)),
            ("qwen2", ParallelLayout(pp=2)),
            ("qwen3_moe", ParallelLayout(dp=2, ep=2)),
            ("gemma4_e", ParallelLayout(tp=2, sp=True)),
        ],
    ),
    ids=str,
)
def test_gradients_are_those_of_transformers(family, layout, model_of):
    config = make_config(model_of(family))
    plain = plain_outcome(config, data_with_padding_tokens())
    outcome = run_processes(
        compute_layout_result, layout.apply(config), data_with_padding_tokens(), 3, world_size=layout.world_size
    )[0]
    difference = compare(outcome, plain)
    assert difference.within(), table_row(layout, difference)
    if "lm_head.weight" in plain.gradients:  # tied to the LM head, the row has that gradient
        assert not outcome.gradients["model.embed_tokens.weight"][PADDING].any()
    assert torch.isfinite(outcome.scores).all()

"""Tests of the division of layers into pipeline stages: every option gives the same result as in Megatron."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import make_config

from mcore_rl.cli.plan import layout_picture
from mcore_rl.config import ModelConfig, ParallelConfig
from mcore_rl.config.parallel import layers_of_layout
from mcore_rl.errors import UserError
from mcore_rl.models.megatron.model.hf_config import check_model_fits


@pytest.mark.parametrize(
    ("size", "first", "last", "expected"),
    [
        (4, None, None, [3, 3, 3, 3]),
        (4, 1, None, None),
        (3, 4, None, [4, 4, 4]),
        (3, 1, 5, [1, 6, 5]),
        (2, 5, 7, [5, 7]),
    ],
)
def test_layers_of_uneven_stages(size, first, last, expected):
    parallel = ParallelConfig(
        pipeline_model_parallel_size=size,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
    )
    if expected is None:
        with pytest.raises(UserError, match="12 layers cannot be divided evenly with 1 in"):
            parallel.stages_of_layers(12)
    else:
        stages = parallel.stages_of_layers(12)
        assert [stages.count(stage) for stage in range(size)] == expected


@pytest.mark.parametrize(
    ("layers", "size", "chunks", "given"),
    [
        (12, 3, 2, {}),
        (12, 2, 2, {"num_layers_in_first_pipeline_stage": 4}),
        (11, 3, 1, {"account_for_loss_in_pipeline_split": True}),
        (10, 2, 3, {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}),
        (6, 2, 2, {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}),
    ],
)
def test_layers_are_shared_out_as_megatron_does(layers, size, chunks, given):
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig

    sizes = {"pipeline_model_parallel_size": size, "virtual_pipeline_model_parallel_size": chunks, **given}
    ours = ParallelConfig(**sizes).layers_of_chunks(layers)
    sizes["virtual_pipeline_model_parallel_size"] = chunks if chunks > 1 else None
    config = TransformerConfig(
        num_layers=layers, hidden_size=4, num_attention_heads=1, pipeline_dtype=torch.float32, **sizes
    )
    assert ours == [get_num_layers_to_build(config, chunk, stage) for chunk in range(chunks) for stage in range(size)]


PARTS = st.lists(st.sampled_from(["t", "tt", "|t", "t|", ",t", "t*3", "t|*2t"]), min_size=1, max_size=3).map("".join)


@given(PARTS, st.lists(st.tuples(PARTS, st.integers(0, 3)), max_size=2), PARTS)
def test_layouts_are_read_as_megatron_does(head, groups, tail):
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    text = "E" + head + "".join(f"({part})*{times}" for part, times in groups) + tail + "L"
    stages = PipelineParallelLayerLayout.parse_str_to_list(text)
    if [] in stages:
        with pytest.raises(ValueError, match=f"has {len(stages)} stages, and stage {stages.index([]) + 1} is empty"):
            layers_of_layout(text)
    else:
        assert layers_of_layout(text) == [sum(one.name == "decoder" for one in stage) for stage in stages]


@pytest.mark.parametrize(
    ("layout", "sizes", "message"),
    [
        ("Et|t|tL", {}, r"has 3 stages; it must have pipeline_model_parallel_size \(2\) x virtual.* \(1\)"),
        ("Et|t|t|tL", {"virtual_pipeline_model_parallel_size": 1}, r"has 4 stages; it must have .* \(2\) x virtual"),
        ("t|tL", {}, "must start with E, end with L, and have no other E or L"),
        ("Et|tEL", {}, "must start with E, end with L"),
        ("Et|t", {}, "must start with E, end with L"),
        ("Et|mL", {}, "cannot be read from 'mL' on"),
        ("Et|((tt)*2)*2L", {}, r"cannot be read from '\(\(tt\)\*2\)\*2L' on"),
        ("Et|(tt)L", {}, r"cannot be read from '\(tt\)L' on"),
        ("Et||tL", {"pipeline_model_parallel_size": 3}, "'Et||tL' has 3 stages, and stage 2 is empty"),
        ("EttL", {"pipeline_model_parallel_size": 1}, "needs pipeline_model_parallel_size > 1"),
        (
            "Et|tL",
            {"num_layers_in_last_pipeline_stage": 1},
            "sets the layers of every stage; leave out num_layers_in_first/la",
        ),
        ("Et|tL", {"account_for_loss_in_pipeline_split": True}, "sets the layers of every stage"),
        (
            None,
            {"account_for_loss_in_pipeline_split": True, "num_layers_in_last_pipeline_stage": 1},
            "cannot be combined",
        ),
        ("", {}, "must not be empty"),
        ("E(t*9999)*9999|tL", {}, "has more than 10,000 characters when its repetitions"),
        ("E(t*99)*99|(t*99)*99L", {}, "has more than 10,000 characters when its repetitions"),
    ],
)
def test_layouts_that_cannot_be(layout, sizes, message):
    values = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": layout, **sizes}
    with pytest.raises(ValueError, match=message.replace("||", r"\|\|")):
        ParallelConfig(**values)


def test_the_way_out_of_accounted_layers_is_taken():
    parallel = ParallelConfig(pipeline_model_parallel_size=2, account_for_loss_in_pipeline_split=True)
    with pytest.raises(
        UserError,
        match=r"and leave out account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split$",
    ):
        parallel.stages_of_layers(4)


def test_layouts_of_another_model():
    parallel = ParallelConfig(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et|t|t|L")
    assert parallel.chunks_per_stage == 2
    assert ParallelConfig(**parallel.model_dump()) == parallel
    another = {**parallel.model_dump(), "pipeline_model_parallel_layout": "Et|tL"}
    assert ParallelConfig(**another).chunks_per_stage == 1
    for size in ("2", 2.0):
        assert ParallelConfig(**{**parallel.model_dump(), "pipeline_model_parallel_size": size}) == parallel
    with pytest.raises(UserError, match=r"layout=Et\|t\|t\|L: has 3 layers; the model has 2"):
        check_model_fits(make_config("llama"), parallel, 64)
    parallel = ParallelConfig(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Ett|L")
    check_model_fits(make_config("llama"), parallel, 64, ModelConfig(path="unused"))
    with pytest.raises(
        UserError, match=r"model\.lora: every pipeline stage needs adapters to train, but one stage has no layers"
    ):
        check_model_fits(make_config("llama"), parallel, 64, ModelConfig(path="unused", lora={}))


def test_stages_without_adapters_are_refused():
    """Layers of Nemotron-H have one block each, so that adapters of attention leave other layers out."""
    hf, lora = make_config("nemotron_h"), {"target_modules": ["q_proj", "up_proj"]}
    for layout, fits in (("Ett|ttL", True), ("Ettt|tL", False), ("Et|tttL", False)):
        parallel = ParallelConfig(pipeline_model_parallel_size=2, pipeline_model_parallel_layout=layout)
        with nullcontext() if fits else pytest.raises(UserError, match="one stage has no layer with adapters; give"):
            check_model_fits(hf, parallel, 64, ModelConfig(path="unused", lora=lora))


@pytest.mark.parametrize(
    "sizes",
    [
        {"virtual_pipeline_model_parallel_size": 2},
        {"num_layers_in_last_pipeline_stage": 1},
        {"account_for_embedding_in_pipeline_split": True},
    ],
)
def test_pipeline_options_need_a_pipeline(sizes):
    with pytest.raises(ValueError, match="pipeline_model_parallel_size > 1"):
        ParallelConfig(**sizes)


@pytest.mark.parametrize(
    ("given", "stages"),
    [
        ({"pipeline_model_parallel_layout": "E|ttt|t|L"}, "0 + 1, 3 + 0"),
        ({"num_layers_in_first_pipeline_stage": 1}, "1, 3"),
        ({"virtual_pipeline_model_parallel_size": 2}, "1 + 1, 1 + 1"),
        ({}, "2, 2"),
    ],
)
def test_a_dry_run_tells_the_layers_of_each_chunk(given, stages):
    parallel = ParallelConfig(pipeline_model_parallel_size=2, **given)
    header, told, *ranks = layout_picture(parallel, 4, 4)
    assert header.endswith("pipeline 2") and len(ranks) == 4
    assert told == f"  layers of the pipeline stages: {stages}"

"""Tests of weight export: the checkpoint's own tensors on the first rank or on all, with few collectives."""

import json
import shutil
from collections import Counter

import pytest
import torch
from layout_cases import make_config
from safetensors.torch import load_file, save_file
from small_models import and_long

from mcore_rl.testing.layout_check import ParallelLayout
from mcore_rl.testing.processes import run_processes

COLLECTIVES = ("all_gather_into_tensor", "all_gather", "all_gather_object", "broadcast", "broadcast_object_list")


def exported(config, first_only, gloo_bytes=None):
    """Return the tensors that a rank gets, the number of calls, and the number of sharded parameters in the table."""
    from mcore_rl.models.megatron.weights import conversion as weights
    from mcore_rl.models.megatron.weights.conversion import export_hf_weights
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy, calls = MegatronPolicy(config), Counter()
    with pytest.MonkeyPatch.context() as patch:
        if gloo_bytes is not None:
            patch.setattr(weights, "GLOO_BYTES", gloo_bytes)
        for name in COLLECTIVES:
            patch.setattr(torch.distributed, name, counted(calls, name))
        tensors = dict(export_hf_weights(policy.model, first_only=first_only))
    cut = [m for m in policy.model.family.table.values() if m.kind.partition_dim is not None]
    table = policy.model.family.table
    policy.shutdown()
    return tensors, calls, len(cut), len(table)


def counted(calls, name):
    original = getattr(torch.distributed, name)

    def call(*args, **kwargs):
        calls[name] += 1
        return original(*args, **kwargs)

    return call


def export(family, layout, model_of, *options):
    config = layout.apply(make_config(model_of(family)))
    found = run_processes(exported, config, *options, world_size=layout.world_size)
    return found, load_file(model_of(family) / "model.safetensors")


def assert_whole(tensors, expected):
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_the_first_replica_alone_gathers(model_of):
    (first, second, *others), expected = export("llama", ParallelLayout(tp=2, dp=2), model_of, True)
    assert_whole(first[0], expected)
    assert all(not tensors for tensors, *_ in (second, *others))
    for _, calls, cut, _ in (first, second):
        assert calls == {"all_gather_into_tensor": cut}
    assert all(not calls for _, calls, *_ in others)


def test_stages_send_to_the_first_one(model_of):
    (first, *others), expected = export("qwen2", ParallelLayout(pp=2, cp=2), model_of, True)
    assert_whole(first[0], expected)
    assert all(not tensors for tensors, *_ in others)
    of_stages = {"broadcast": first[3]}
    assert [dict(calls) for _, calls, *_ in (first, *others)] == [of_stages, {}, of_stages, {}]


AWKWARD = and_long(
    [("mixtral", ParallelLayout(tp=2, dp=2, ep=2, etp=1, sp=True))],
    [
        ("glm4_moe", ParallelLayout(pp=2, dp=2, ep=2)),
        ("qwen2_moe", ParallelLayout(cp=2, dp=2, ep=2)),
        ("qwen3_moe", ParallelLayout(tp=2, dp=2, ep=4, etp=1, sp=True)),
        ("mixtral", ParallelLayout(tp=2, dp=2, ep=2, etp=2, sp=True)),
        ("deep", ParallelLayout(tp=2, pp=2, vpp=3)),
        ("deep", ParallelLayout(pp=2, vpp=3, stages="E|tt|t|t|tt|L")),
        ("deep", ParallelLayout(pp=3, stages="Et|t*5|L")),
        ("qwen3_next", ParallelLayout(tp=2, pp=2, ep=2, etp=1, sp=True)),
        ("nemotron_h_moe", ParallelLayout(tp=2, pp=2, ep=2, etp=1, sp=True)),
        ("llama", ParallelLayout(tp=4)),  # more ranks than key-value heads
    ],
)


@pytest.mark.parametrize(("family", "layout"), AWKWARD, ids=str)
def test_where_a_tensor_is_follows_from_the_layout(family, layout, model_of):
    for first_only in (True, False):
        ranks, expected = export(family, layout, model_of, first_only)
        for rank, (tensors, calls, *_) in enumerate(ranks):
            assert_whole(tensors, expected if rank == 0 or not first_only else {})
            assert not {"all_gather_object", "broadcast_object_list"} & calls.keys()


def test_large_tensors_are_gathered_in_pieces(model_of):
    """The block size does not divide the size of any tensor."""
    ranks, expected = export("llama", ParallelLayout(tp=2), model_of, False, 1000 * 8)
    for tensors, calls, *_ in ranks:
        assert_whole(tensors, expected)
        assert calls["all_gather"] > 10


def exported_directory(config, destination):
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config)
    policy.export_hf(destination)
    policy.shutdown()


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_an_export_has_the_precision_of_the_directory(dtype, model_of, tmp_path):
    """The directory has bfloat16 weights and float32 norms, and the model is loaded in float32."""
    source = tmp_path / "source"
    shutil.copytree(model_of("llama"), source)
    tensors = {
        name: x if "norm" in name else x.bfloat16() for name, x in load_file(source / "model.safetensors").items()
    }
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    config = make_config(source)
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"export_dtype": dtype})})
    run_processes(exported_directory, ParallelLayout(tp=2).apply(config), tmp_path / "out", world_size=2)
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        expected = tensor if dtype == "auto" else tensor.to(getattr(torch, dtype))
        assert back[name].dtype == expected.dtype and torch.equal(back[name], expected)
    written = json.loads((tmp_path / "out" / "config.json").read_text())["dtype"]
    assert written == ("bfloat16" if dtype == "auto" else dtype)

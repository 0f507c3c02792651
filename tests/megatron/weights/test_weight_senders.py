"""Tests that the senders together send each weight once, and as the export has it."""

import pytest
import torch
from layout_cases import lora_config, make_config
from small_models import and_long
from vision_cases import make_model as make_vision_model

from mcore_rl.testing.layout_check import ParallelLayout
from mcore_rl.testing.processes import run_processes

BUCKET_BYTES = 30_000  # smaller than some tensors, larger than others


def sent_and_exported(config):
    """Return the tensors that this rank sends, and on the first rank all tensors of the export."""
    from mcore_rl.models.megatron.weights.conversion import export_hf_weights
    from mcore_rl.models.megatron.weights.senders import gather_shipments, plan_shipments, sends
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config)
    if policy.model.lora is not None:
        with torch.no_grad():
            for name, parameter in policy.model.chunks[0].named_parameters():
                if "lora_B" in name:  # as trained: they begin as zeros
                    parameter.fill_(0.01)
    sent = []
    for shipment, tensors in gather_shipments(policy.model, plan_shipments(policy.model, BUCKET_BYTES)):
        part = [(name, tensor.clone()) for name, tensor in tensors]
        assert sum(tensor.nbytes for _, tensor in part) == shipment.nbytes * sends(shipment, policy.model)
        sent += part
    exported = dict(export_hf_weights(policy.model, first_only=True))
    names = list(policy.prepare_refit_info())
    policy.shutdown()
    return sent, exported, names


LAYOUTS = and_long(
    [("llama", ParallelLayout(tp=2, pp=2), 4), ("gpt_oss", ParallelLayout(tp=2, ep=2, etp=1, sp=True), 2)],
    [
        ("qwen3_moe", ParallelLayout(tp=2, pp=2, ep=2, etp=1, sp=True), 4),
        ("qwen3_moe", ParallelLayout(tp=2, dp=2, ep=2, etp=2, sp=True), 4),
        ("qwen3_5", ParallelLayout(tp=2, pp=2), 4),
        ("deepseek_v3", ParallelLayout(pp=2, dp=2, ep=2), 4),
        ("qwen2", ParallelLayout(cp=2, dp=2), 1),
    ],
)


@pytest.mark.every_case
@pytest.mark.parametrize(("family", "layout", "senders"), LAYOUTS, ids=str)
def test_each_weight_is_sent_once_as_it_is_exported(family, layout, senders, model_of):
    check(layout.apply(make_config(model_of(family))), layout, senders)


@pytest.mark.long
def test_adapters_are_merged(model_of):
    layout = ParallelLayout(tp=2, pp=2)
    check(layout.apply(lora_config(model_of("qwen3"), rank=4)), layout, 4)


def test_a_frozen_tower_is_sent_last(tmp_path):
    """The number of tensors then says which of them an update has."""
    config = make_config(make_vision_model("qwen3_vl", tmp_path))
    ((frozen, names),) = run_processes(planned, config, world_size=1)
    assert frozen == sorted(frozen) and set(frozen) == {False, True}
    assert [is_frozen for is_frozen, of in zip(frozen, names, strict=True) for _ in of] == [
        ".visual." in name for of in names for name in of
    ]
    ((frozen, _),) = run_processes(planned, with_tower(config, "trained"), world_size=1)
    assert set(frozen) == {False}


def with_tower(config, tower):
    return config.model_copy(update={"model": config.model.model_copy(update={"vision_tower": tower})})


def planned(config):
    from mcore_rl.models.megatron.weight_mapping import tensor_shapes
    from mcore_rl.models.megatron.weights.senders import plan_shipments
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config)
    shipments = plan_shipments(policy.model, BUCKET_BYTES)
    policy.shutdown()
    return [s.is_frozen for s in shipments], [list(tensor_shapes(s.mappings)) for s in shipments]


@pytest.mark.long
@pytest.mark.parametrize("tower", ["frozen", "trained"])
def test_the_tower_is_sent_as_it_is_exported(tower, tmp_path):
    layout = ParallelLayout(tp=2, pp=2)
    check(layout.apply(with_tower(make_config(make_vision_model("qwen3_vl", tmp_path)), tower)), layout, 4)


def check(config, layout, senders):
    results = run_processes(sent_and_exported, config, world_size=layout.world_size)
    exported, names = results[0][1], results[0][2]
    everything = [pair for sent, _, _ in results for pair in sent]
    assert sorted(name for name, _ in everything) == sorted(names) == sorted(exported)
    for name, tensor in everything:
        assert tensor.dtype == exported[name].dtype and torch.equal(tensor, exported[name]), name
    assert sum(bool(sent) for sent, _, _ in results) == senders

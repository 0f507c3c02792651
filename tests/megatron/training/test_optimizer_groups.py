"""Tests of parameters with separate learning rates: Adam's first step is proportional to the rate."""

import pytest
import torch
from float32 import FORMULA, FORWARD, UPDATE, approx32, assert_close32, assert_updates32
from layout_cases import LR, lora_config, make_config, make_data, run_steps
from small_models import and_long

from mcore_rl.algorithms.build_loss import build_loss
from mcore_rl.config import SFTConfig, build_config
from mcore_rl.errors import UserError
from mcore_rl.testing.layout_check import ParallelLayout
from mcore_rl.testing.processes import run_processes


def first_step(config):
    """Return the change of weights, or of adapters if there are any, by the first step."""
    from mcore_rl.models.megatron.weights.adapters import export_adapters
    from mcore_rl.models.megatron.weights.conversion import export_hf_weights
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2)
    export = export_adapters if config.model.lora else export_hf_weights
    before = {name: tensor.double() for name, tensor in export(policy.model)}
    policy.train(make_data(), build_loss(config))
    changes = {name: tensor.double() - before[name] for name, tensor in export(policy.model)}
    policy.shutdown()
    return changes


def compare(ours, plain, ratio_of):
    assert set(ours) == set(plain)
    for name, change in ours.items():
        assert_close32(change, plain[name] * ratio_of(name), UPDATE, what=name)


@pytest.mark.parametrize(
    ("family", "layout"),
    and_long(
        [("qwen2", ParallelLayout(pp=2))],
        [
            ("llama", ParallelLayout(tp=2, sp=True)),
            ("llama", ParallelLayout(pp=2, dp=2)),
            ("gemma3", ParallelLayout()),
            ("mixtral", ParallelLayout(dp=2, ep=2)),
        ],
    ),
    ids=str,
)
def test_embeddings(family, layout, model_of):
    """Embeddings that are tied on two pipeline stages, and embeddings with a separate projection."""
    configs = [make_config(model_of(family), **rates) for rates in ({}, {"embedding_lr": 4e-3})]
    plain, ours = (
        run_processes(first_step, layout.apply(config), world_size=layout.world_size)[0] for config in configs
    )
    of_embeddings = ("model.embed_tokens.weight", "lm_head.weight")
    assert any(name in of_embeddings for name in ours)
    compare(ours, plain, lambda name: 4 if name in of_embeddings else 1)


@pytest.mark.parametrize("layout", and_long([ParallelLayout(tp=2)], [ParallelLayout(), ParallelLayout(pp=2)]), ids=str)
def test_matrices_b_of_adapters(layout, model_of):
    """The B matrices are initially zero, so the first step changes only them."""
    plain, ours = (
        run_processes(first_step, layout.apply(lora_config(model_of("llama"), **lora)), world_size=layout.world_size)[0]
        for lora in ({"rank": 4}, {"rank": 4, "lr_ratio": 16})
    )
    assert all(bool(change.any()) == (".lora_B." in name) for name, change in ours.items())
    compare(ours, plain, lambda name: 16)


@pytest.mark.long
def test_a_checkpoint_goes_on_elsewhere(model_of, tmp_path):
    config = make_config(model_of("qwen2"), schedule="cosine", embedding_lr=4e-3, min_lr=1e-4)
    whole, weights, _ = run_processes(run_steps, config, tmp_path / "whole", None, 4, world_size=1)[0]
    layout = ParallelLayout(tp=2, pp=2)
    _, _, saved = run_processes(run_steps, config, tmp_path / "parts", None, 2, world_size=1)[0]
    rest, ours, _ = run_processes(run_steps, layout.apply(config), tmp_path / "parts", saved, 2, world_size=4)[0]
    assert [m["loss"] for m in rest] == approx32([m["loss"] for m in whole[2:]], FORWARD)
    assert [m["lr"] for m in rest] == pytest.approx([m["lr"] for m in whole[2:]], rel=1e-9)
    for name, tensor in weights.items():
        assert_updates32(ours[name], tensor, 4 * LR, what=name)


def test_embeddings_alone(model_of):
    (changes,) = run_processes(first_step, make_config(model_of("llama"), lr=0, embedding_lr=4e-3), world_size=1)
    changed = {name for name, change in changes.items() if change.any()}
    assert changed == {"model.embed_tokens.weight", "lm_head.weight"}


def test_adapters_train_no_embeddings():
    values = {"output_dir": "o", "model": {"path": "m", "lora": {"rank": 2}}, "data": {"train": "x"}}
    with pytest.raises(
        UserError, match=r"optimizer\.embedding_lr: has no effect, because model.lora trains only adapters"
    ):
        build_config(SFTConfig, values, ["optimizer.embedding_lr=1e-4"], "")


def test_sum_of_squares_of_a_large_tensor_is_accurate():
    """Otherwise the gradient norm would depend on how a layout shards the embedding."""
    from mcore_rl.models.megatron.training.optimizer import sum_of_squares

    tensors = [torch.randn(5000, 1000, generator=torch.Generator().manual_seed(0)), torch.ones(3)]
    expected = sum(float(tensor.double().square().sum()) for tensor in tensors)
    assert float(sum_of_squares(tensors)) == approx32(expected, FORMULA, scale=0)
    assert float(tensors[0].norm()) ** 2 + 3 != approx32(expected, FORMULA, scale=0), "torch's own norm"
    assert float(sum_of_squares([])) == 0

"""Tests of Muon against torch's in one process, and of AdamW with moments in bfloat16."""

import pytest
import torch
import torch.nn.functional as F
from float32 import FORWARD, approx32, assert_updates32
from layout_cases import make_config
from pydantic import ValidationError
from safetensors.torch import load_file
from small_models import and_long
from transformers import AutoModelForCausalLM

from mcore_rl.config.sections import OptimizerConfig
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.models.megatron.training.muon import orthogonalized
from mcore_rl.testing.layout_check import ParallelLayout
from mcore_rl.testing.processes import run_processes

STEPS = 3
MUON = {"name": "muon", "muon_lr": 2e-3, "muon_momentum": 0.9, "muon_steps": 4, "weight_decay": 0.1}


def make_batch():
    """Rows of 2 to 30 tokens, without the pad token."""
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(2, 31, (6,), generator=generator)
    ids = torch.randint(1, 250, (6, 30), generator=generator)
    there = torch.arange(30) < lengths[:, None]
    return BatchedDataDict(
        input_ids=ids * there, input_lengths=lengths, token_mask=there.float(), sample_mask=torch.ones(6)
    )


def megatron_training(config, steps=STEPS, save=None, load=None):
    from mcore_rl.algorithms.loss_functions import NLLLoss
    from mcore_rl.models.megatron.weights.conversion import export_hf_weights
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy, data = MegatronPolicy(config, total_steps=10), make_batch()
    if load is not None:
        policy.load_checkpoint(load / "iter_0000002")
    losses = [float(policy.train(data, NLLLoss())["loss"]) for _ in range(steps)]
    if save is not None:
        policy.save_checkpoint(save, steps, {})
    weights, described = dict(export_hf_weights(policy.model)), policy.describe_optimizer()
    policy.shutdown()
    return losses, weights, described


def is_matrix(name, parameter):
    return name.startswith("model.layers.") and parameter.ndim > 1


def matrices_of(model):
    """Return (matrix, gradient) views of the hidden layers' matrices; each expert's projections are separate."""
    for name, parameter in model.named_parameters():
        if not is_matrix(name, parameter):
            continue
        for expert in range(parameter.shape[0]) if parameter.ndim == 3 else [slice(None)]:
            values, gradient = parameter.data[expert], parameter.grad[expert]
            parts = 2 if "gate_up" in name else 1
            yield from zip(values.chunk(parts), gradient.chunk(parts), strict=True)


def plain_training(config, directory):
    """The same with transformers, torch.optim.Muon and torch.optim.AdamW."""
    options = config.optimizer
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    matrices = [torch.nn.Parameter(values) for values, _ in matrices_of(model)]
    muon = torch.optim.Muon(
        matrices, lr=options.muon_lr, weight_decay=options.weight_decay, momentum=options.muon_momentum,
        ns_steps=options.muon_steps,
        adjust_lr_fn="match_rms_adamw" if options.muon_scale == "match_rms_adamw" else "original",
    )  # fmt: skip
    others = [p for n, p in model.named_parameters() if not is_matrix(n, p)]
    groups = [
        {"params": [p for p in others if p.ndim > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in others if p.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=options.lr, eps=options.adam_eps)
    data, losses = make_batch(), []
    for _ in range(STEPS):
        model.zero_grad(set_to_none=False)
        total, count = 0.0, 0
        for ids, length in zip(data["input_ids"], data["input_lengths"].tolist(), strict=True):
            logits = model(ids[None, :length]).logits[0, :-1].double()
            total, count = total + F.cross_entropy(logits, ids[1:length], reduction="sum"), count + length - 1
        loss = total / count
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_grad)
        for matrix, (_, gradient) in zip(matrices, matrices_of(model), strict=True):
            matrix.grad = gradient
        muon.step()
        adamw.step()
    model.save_pretrained(directory)
    return losses, load_file(directory / "model.safetensors")


def newton_schulz_in_float32(gradient, coefficients, steps, epsilon):
    """Iterate as torch does, which converts to bfloat16 first and thereby amplifies the rounding of gradients."""
    a, b, c = coefficients
    x = gradient / gradient.norm().clamp(min=epsilon)
    for _ in range(steps):
        gram = x.T @ x if x.shape[0] > x.shape[1] else x @ x.T
        polynomial = b * gram + c * gram @ gram
        x = a * x + (x @ polynomial if x.shape[0] > x.shape[1] else polynomial @ x)
    return x


LAYOUTS = [
    ("llama", ParallelLayout()),
    ("llama", ParallelLayout(tp=2, dp=2, sp=True)),
    ("mixtral", ParallelLayout(tp=2, ep=2, etp=1, sp=True)),
]
MORE = [
    ("llama", ParallelLayout(pp=2, cp=2)),
    ("qwen3_moe", ParallelLayout(tp=2, etp=2, sp=True)),
    ("deepseek_v3", ParallelLayout(tp=2, ep=2, etp=1, sp=True)),
]


@pytest.mark.parametrize(("family", "layout"), and_long(LAYOUTS, MORE), ids=str)
def test_every_layout_equals_torchs_muon(family, layout, model_of, monkeypatch, tmp_path):
    config = layout.apply(make_config(model_of(family), **MUON))
    losses, weights, described = run_processes(megatron_training, config, world_size=layout.world_size)[0]
    assert described.startswith("Muon for the matrices of hidden layers, AdamW of torch")
    monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", newton_schulz_in_float32)
    expected, trained = plain_training(config, tmp_path)
    assert losses == approx32(expected, FORWARD)
    for name, tensor in weights.items():
        assert_updates32(tensor, trained[name], STEPS * MUON["muon_lr"], what=name)


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_an_update_has_the_documented_size(scale, model_of):
    """One step from zero momentum, without decay: torch's own function on whole matrices."""
    config = make_config(model_of("llama"), name="muon", muon_scale=scale, lr=1e-3)
    ((_, weights, _),) = run_processes(megatron_training, config, 1, world_size=1)
    before = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32).state_dict()
    name = "model.layers.0.mlp.down_proj.weight"
    update = (weights[name] - before[name]) / 1e-3
    rows, columns = update.shape
    factor = 0.2 * max(rows, columns) ** 0.5 if scale == "match_rms_adamw" else max(1, rows / columns) ** 0.5
    singular = torch.linalg.svdvals(update) / factor
    assert singular.min() > 0.5 and singular.max() < 1.3


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (1, 7), (7, 1), (6, 6)], ids=str)
def test_newton_schulz_equals_torchs(shape):
    from torch.optim._muon import _zeropower_via_newtonschulz

    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = _zeropower_via_newtonschulz(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    assert torch.equal(orthogonalized(matrix.bfloat16(), 5), expected)
    assert torch.equal(orthogonalized(torch.zeros(shape), 5), torch.zeros(shape))


@pytest.mark.long
def test_momentum_is_resumed_under_another_layout(model_of, tmp_path):
    config = make_config(model_of("llama"), **MUON)
    (whole,) = run_processes(megatron_training, config, 4, world_size=1)
    run_processes(megatron_training, ParallelLayout(tp=2).apply(config), 2, tmp_path, world_size=2)
    layout = ParallelLayout(dp=2)
    resumed = run_processes(megatron_training, layout.apply(config), 2, None, tmp_path, world_size=2)[0]
    assert resumed[0] == approx32(whole[0][2:], FORWARD)
    for name, tensor in resumed[1].items():
        assert_updates32(tensor, whole[1][name], 4 * MUON["muon_lr"], what=name)


# ------------------------------------------------------------------ moments in bfloat16


@pytest.mark.parametrize("layout", and_long([ParallelLayout()], [ParallelLayout(tp=2, dp=2, sp=True)]), ids=str)
def test_moments_in_bfloat16_stay_near_those_in_float32(layout, model_of):
    """The distance of the weights is below 2 % of the way that the steps go."""
    results = []
    for dtype in ("float32", "bfloat16"):
        config = layout.apply(make_config(model_of("llama"), adam_beta2=0.95, moments_dtype=dtype))
        results.append(run_processes(megatron_training, config, 6, world_size=layout.world_size)[0])
    (_, exact, _), (_, rounded, described) = results
    assert described.startswith("AdamW of torch, moments in bfloat16")
    before = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32).state_dict()
    for name, tensor in exact.items():
        distance, way = (rounded[name] - tensor).norm(), (tensor - before[name]).norm()
        assert 0 < distance < 0.02 * way, name


def test_options_that_nothing_reads_are_refused():
    for values, message in (
        ({"muon_steps": 6}, "muon_steps: requires name=muon"),
        ({"moments_dtype": "bfloat16"}, "with adam_beta2=0.999, bfloat16 rounds away the changes of the moments"),
        ({"moments_dtype": "bfloat16", "adam_beta1": 0.99, "adam_beta2": 0.9}, "with adam_beta1=0.99, bfloat16"),
    ):
        with pytest.raises(ValidationError, match=message):
            OptimizerConfig.model_validate(values)
    with pytest.raises(ValidationError, match="trains only adapters"):
        make_config("unused", name="muon").model_validate(
            {**make_config("unused", name="muon").model_dump(), "model": {"path": "unused", "lora": {"rank": 4}}}
        )

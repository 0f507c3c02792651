"""Losses and metrics of routing, biases that no gradient trains: against formulas on transformers' own routers."""

import pytest
import torch
from test_layouts import make_config, make_data, plain_outcome
from transformers import AutoModelForCausalLM

from mcore_rl.algorithms.objectives import loss_of
from mcore_rl.distributed.processes import run_processes
from mcore_rl.layout_check import Layout, compare, compute_outcome, table_row

COEFFICIENTS = {"moe_aux_loss_coeff": 0.7, "moe_z_loss_coeff": 0.013}
LAYOUTS = {
    "mixtral": [Layout(), Layout(tp=2, sp=True, tokens_per_pack=128)],
    "qwen3_moe": [Layout(cp=2, dp=2, ep=2), Layout(pp=2, dp=2, packing=False)],
}


@pytest.mark.parametrize("family", LAYOUTS)
def test_router_losses(family, model_of):
    config = make_config(model_of(family))
    config = config.model_copy(update={"model": config.model.model_copy(update=COEFFICIENTS)})
    plain = plain_outcome(config, make_data())
    for layout in LAYOUTS[family]:
        outcome = run_processes(compute_outcome, layout.apply(config), make_data(), 3, world_size=layout.world_size)[0]
        difference = compare(outcome, plain)
        assert difference.within(), table_row(layout, difference)


def test_recomputation_changes_nothing(model_of):
    config = make_config(model_of("mixtral"))
    model = config.model.model_copy(update=COEFFICIENTS)
    kept, again = (
        run_processes(
            compute_outcome,
            config.model_copy(update={"model": model.model_copy(update={"recompute_activations": recompute})}),
            make_data(),
            1,
            world_size=1,
        )[0]
        for recompute in (False, True)
    )
    assert kept.metrics == again.metrics
    assert all(torch.equal(again.gradients[name], gradient) for name, gradient in kept.gradients.items())


RATE = 0.05


def train_with_biases(config):
    """Metrics of a step, the biases before and after it, and those of the reference weights."""
    from mcore_rl.models.megatron.weights import export_hf_weights
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    def biases():
        return {name: bias for name, bias in export_hf_weights(policy.model) if name.endswith("correction_bias")}

    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2, keep_reference=True)
    before = biases()
    metrics = policy.train(make_data(), loss_of(config))
    after = biases()
    with policy.reference_weights():
        reference = biases()
    policy.shutdown()
    return metrics, before, after, reference


def tokens_per_expert(path, data):
    """By layer, of transformers' routers, the rows that count, a row at a time."""
    model, counts = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), {}

    def count(name):
        def hook(module, inputs, outputs):
            chosen = torch.bincount(outputs[2].flatten(), minlength=module.num_experts)
            counts[name] = counts.get(name, 0) + chosen

        return hook

    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(count(name))
    for ids, length, mask in zip(data["input_ids"], data["input_lengths"].tolist(), data["sample_mask"], strict=True):
        if mask:
            model(ids[None, :length])
    return counts


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2, dp=2, ep=2)], ids=str)
def test_biases_and_load(layout, model_of):
    config = make_config(model_of("glm4_moe"))
    config = layout.apply(
        config.model_copy(update={"model": config.model.model_copy(update={"moe_router_bias_update_rate": RATE})})
    )
    metrics, before, after, reference = run_processes(train_with_biases, config, world_size=layout.world_size)[0]
    counts = tokens_per_expert(config.model.path, make_data())
    assert len(counts) == len(before) == 2
    for name, tokens in counts.items():
        bias, layer = f"{name}.e_score_correction_bias", name.split(".")[2]
        moved = RATE * torch.sign(tokens.float().mean() - tokens)
        torch.testing.assert_close(after[bias], before[bias] + moved)
        assert torch.equal(reference[bias], before[bias])
        assert metrics[f"moe_load/layer_{layer}"] == pytest.approx(float(tokens.max() / tokens.float().mean()))

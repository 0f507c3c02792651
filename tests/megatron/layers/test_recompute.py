"""Tests of recomputation: recomputed parts use no memory before the backward pass, and all numbers are unchanged."""

from collections import Counter

import pytest
import torch
from layout_cases import make_config, make_data, with_experts
from small_models import and_long, make_model
from small_models import make_config as hf_config_of

from mcore_rl.config import ModelConfig, PPOConfig
from mcore_rl.config.load import build_config
from mcore_rl.config.parallel import ParallelLayout
from mcore_rl.errors import UserError
from mcore_rl.models.megatron.model.hf_config import check_model_fits
from mcore_rl.simulation.hardware import Hardware
from mcore_rl.simulation.search import layouts_to_try, simulate
from mcore_rl.simulation.sequences import Sequences
from mcore_rl.testing.processes import run_processes

# A layer with experts calls itself once, and its experts twice within the recomputed part.
CALLED = {"mlp": "linear_fc1", "moe": "router", "shared_experts": "shared_experts"}
MODULES = {
    "llama": ["mlp"],
    "qwen3_moe": ["mlp", "moe"],
    "glm4_moe": ["mlp", "shared_experts"],
    "deepseek_v3": ["mlp", "shared_experts"],
    "gpt_oss": ["moe"],
}
ONE = ParallelLayout()
CASES = [
    pytest.param("llama", ONE),
    pytest.param("llama", ParallelLayout(tp=2, cp=2, sp=True), marks=pytest.mark.long),
    pytest.param("llama", ParallelLayout(pp=2), marks=pytest.mark.long),
    pytest.param("qwen3_moe", ParallelLayout(tp=2, dp=2, ep=2, sp=True), marks=pytest.mark.long),
    pytest.param("glm4_moe", ParallelLayout(dp=2, ep=2), marks=pytest.mark.long),
    pytest.param("deepseek_v3", ParallelLayout(tp=2, sp=True), marks=pytest.mark.long),
    pytest.param("gpt_oss", ParallelLayout(cp=2, ep=2), marks=pytest.mark.long),
]
# Several microbatches are on their way through a stage at the same time.
PIPELINES = and_long(
    [("qwen3_moe", ParallelLayout(pp=2, tokens_per_pack=128), False)],
    [
        ("qwen3_moe", ParallelLayout(pp=2, tokens_per_pack=128), True),
        ("qwen3_moe", ParallelLayout(pp=2, vpp=2, tokens_per_pack=128), False),
        ("qwen3_moe", ParallelLayout(pp=2, vpp=2, tokens_per_pack=128), True),
        ("glm4_moe", ParallelLayout(pp=2, tokens_per_pack=128), True),
    ],
)


def recomputing(config, modules):
    return config.model_copy(update={"model": config.model.model_copy(update={"recompute_modules": tuple(modules)})})


def gradients_and_calls(config, data=None):
    """Return, for one step, every gradient of the rank, the number of calls of each part, and the peak of live
    bytes."""
    from mcore_rl.algorithms.loss_functions import DPOLossFn
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy
    from mcore_rl.simulation.counters import LiveBytes

    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2)
    calls = Counter()
    for chunk in policy.chunks:
        for name, module in chunk.named_modules():
            part = name.rpartition(".")[2]
            if part in CALLED.values() and "experts." not in name:
                module.register_forward_hook(lambda *_, part=part: calls.update([part]))
    with LiveBytes("cpu") as live:
        metrics = policy.compute_gradients(make_data() if data is None else data, DPOLossFn(config.dpo))
    gradients = {n: p.main_grad.clone() for c in policy.chunks for n, p in c.named_parameters() if p.requires_grad}
    policy.shutdown()
    return metrics, gradients, calls, max(live.peaks.values())


@pytest.mark.parametrize(("family", "layout"), CASES, ids=str)
def test_numbers_stay_and_modules_run_twice(family, layout, model_of, tmp_path):
    # Several layers per stage: while one is recomputed, the activations of the others are saved memory.
    path = make_model(family, tmp_path, num_hidden_layers=6) if family == "llama" else model_of(family)
    config = layout.apply(make_config(path))
    modules = MODULES[family]
    plain = run_processes(gradients_and_calls, config, world_size=layout.world_size)
    again = run_processes(gradients_and_calls, recomputing(config, modules), world_size=layout.world_size)
    twice = {CALLED[module] for module in modules}
    for (metrics, gradients, calls, peak), (their_metrics, theirs, more, less) in zip(plain, again, strict=True):
        assert their_metrics == metrics
        for name, gradient in gradients.items():
            assert torch.equal(theirs[name], gradient), name
        assert more == {part: count * (2 if part in twice else 1) for part, count in calls.items()}
        assert less < peak


@pytest.mark.parametrize(
    "layout", and_long([], [ONE], [ParallelLayout(tp=2, cp=2, sp=True), ParallelLayout(dp=2)]), ids=str
)
def test_layers_that_share_keys_and_inputs_recompute_themselves(layout, model_of):
    """Gradients of the shared keys, of the table of the layers' inputs and of its projection stay the same."""
    config = layout.apply(make_config(model_of("gemma4_e")))
    again = config.model_copy(update={"model": config.model.model_copy(update={"recompute_activations": True})})
    size = layout.world_size
    plain, recomputed = (run_processes(gradients_and_calls, x, world_size=size)[0] for x in (config, again))
    (metrics, gradients, calls, peak), (their_metrics, theirs, more, less) = plain, recomputed
    assert their_metrics == metrics and theirs.keys() == gradients.keys()
    assert all(torch.equal(theirs[name], gradient) for name, gradient in gradients.items())
    assert more["linear_fc1"] == 2 * calls["linear_fc1"] > 0
    assert less < 0.9 * peak


@pytest.mark.parametrize(("family", "layout", "replays"), PIPELINES, ids=str)
def test_experts_are_recomputed_with_their_own_pack(family, layout, replays, model_of):
    """The auxiliary losses and replayed experts belong to a pack; every gradient is that without recomputation."""
    config, data = make_config(model_of(family)), make_data()
    router = {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.1}
    config = layout.apply(config.model_copy(update={"model": config.model.model_copy(update=router)}))
    if replays:
        hf = hf_config_of(family)
        layers, topk = 4 if family == "qwen3_moe" else 2, hf.num_experts_per_tok
        data = with_experts(data, layers, count=8, topk=topk)
    plain = run_processes(gradients_and_calls, config, data, world_size=layout.world_size)
    again = run_processes(gradients_and_calls, recomputing(config, ["moe"]), data, world_size=layout.world_size)
    for (metrics, gradients, *_), (their_metrics, theirs, *_) in zip(plain, again, strict=True):
        assert their_metrics == metrics
        for name, gradient in gradients.items():
            assert torch.equal(theirs[name], gradient), name


def test_adapters_in_a_part_whose_input_has_no_gradient_learn(model_of):
    config = make_config(model_of("llama"))
    model = ModelConfig.model_validate(
        {"path": model_of("llama"), "lora": {"target_modules": ["up_proj", "down_proj", "q_proj"]}}
    )
    config = config.model_copy(update={"model": model})
    ((_, plain, *_),) = run_processes(gradients_and_calls, config, world_size=1)
    ((_, again, *_),) = run_processes(gradients_and_calls, recomputing(config, ["mlp"]), world_size=1)
    assert plain and plain.keys() == again.keys()
    assert all(torch.equal(again[name], gradient) for name, gradient in plain.items())
    assert any(gradient.any() for gradient in plain.values())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"recompute_modules": ["mlp"], "recompute_activations": True},
            "recompute_activations=true, which recomputes whole layers",
        ),
        ({"recompute_modules": ["mlp", "mlp"]}, "names a module twice"),
        ({"recompute_modules": ["moe", "shared_experts"]}, "shared_experts are already a part of moe"),
        ({"recompute_modules": ["core_attn"]}, "shared_experts"),
    ],
)
def test_what_contradicts_is_refused(values, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        ModelConfig.model_validate({"path": tmp_path, **values})


@pytest.mark.parametrize(
    ("family", "module"),
    [("llama", "moe"), ("llama", "shared_experts"), ("mixtral", "mlp"), ("mixtral", "shared_experts")],
)
def test_a_module_that_no_layer_has_is_refused(family, module, tmp_path):
    config = make_config(tmp_path)
    model = recomputing(config, [module]).model
    with pytest.raises(
        UserError, match=rf"model.recompute_modules: no layer of {family} has {module}; leave {module} out"
    ):
        check_model_fits(hf_config_of(family), config.parallel, 60, model)


def test_a_search_tries_whole_layers_beside_the_configurations_parts(tmp_path):
    config = recomputing(make_config(tmp_path), ["mlp"])
    tried = [
        build_config(type(config), values, (), "layout")
        for _, values in layouts_to_try(config, 1, Hardware.load("h100"))
    ]
    models = [(one.model.recompute_activations, one.model.recompute_modules) for one in tried]
    assert models == [(False, ("mlp",)), (True, ())]


def test_a_critic_of_another_directory_has_its_own_modules(tmp_path):
    values = {
        "output_dir": "unused",
        "model": {"path": tmp_path / "mixture", "recompute_modules": ["moe"]},
        "data": {"train": "unused", "max_sequence_length": 60},
        "trainer": {"max_steps": 1},
        "ppo": {"num_prompts_per_step": 1, "max_new_tokens": 8},
        "environment": {"name": "exact_match"},
    }
    assert PPOConfig.model_validate(values).critic_model.recompute_modules == ("moe",)
    dense = PPOConfig.model_validate({**values, "critic": {"path": tmp_path / "dense"}})
    assert dense.critic_model.recompute_modules == ()


@pytest.mark.exhaustive
def test_a_simulation_sees_what_it_saves(tmp_path):
    """Recomputed activations are freed after their own backward pass."""
    model = make_model(
        "llama", tmp_path, hidden_size=256, intermediate_size=640, num_attention_heads=8, head_dim=32,
        num_hidden_layers=4,
    )  # fmt: skip
    config = make_config(model).model_copy(update={"parallel": ParallelLayout(cp=2).apply(make_config(model)).parallel})
    whole = config.model_copy(update={"model": config.model.model_copy(update={"recompute_activations": True})})
    sequences = Sequences((60, 48, 33, 60, 21, 60) * 4, (30, 20, 10, 40, 10, 30) * 4)
    reports = [simulate(config, 2, [0], sequences)[0] for config in (config, recomputing(config, ["mlp"]), whole)]
    nothing, mlp, layers = (report.memory["activations, workspace"] for report in reports)
    assert layers < mlp < 0.75 * nothing
    products = [report.products["training"] for report in reports]
    assert products[0] < products[1] < products[2]

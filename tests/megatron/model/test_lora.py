"""Tests of adapters: PEFT's numbers and files, the same under every layout."""

import json
import math
import re
import shutil

import peft
import pytest
import torch
import torch.nn.functional as F
import yaml
from float32 import FORWARD, approx32, assert_updates32
from layout_cases import LR, lora_config, make_config, make_data, plain_logprobs
from programs import metrics_of, run
from safetensors.torch import load_file
from small_models import WITH_DELTA_NETS, and_long, make_model
from transformers import AutoModelForCausalLM

from mcore_rl.config import DPOConfig, KTOConfig, LoRAConfig, build_config
from mcore_rl.errors import UserError
from mcore_rl.models.megatron.checkpoint.load import read_index
from mcore_rl.models.megatron.model.lora import PEFTDirectory
from mcore_rl.testing.layout_check import ParallelLayout, compare, compute_layout_result
from mcore_rl.testing.processes import run_processes

RANK, ALPHA = 3, 5.0
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS = {
    "some": ["q_proj", "v_proj", "up_proj"],
    "all": ALL,
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
}


def make_adapter(path, directory, targets):
    """A PEFT directory whose B is not zero, so that A has gradients too."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    modules, parameters = ([t for t in targets if ("experts." in t) is kind] for kind in (False, True))
    # The projections of MiniMax-M3's indexers have the names of attention's, but are not trained.
    names = [name for name, _ in model.named_modules()]
    frozen = sorted({name[-14:] for name in names if name.endswith(("indexer.q_proj", "indexer.k_proj"))})
    frozen += [name for name in names if ".vision_tower." in name]
    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=modules,
        target_parameters=parameters,
        task_type="CAUSAL_LM",
        exclude_modules=frozen or None,
    )
    torch.manual_seed(7)
    adapted = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    adapted.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def adapter_of(model_of, tmp_path_factory):
    made = {}

    def get(family, targets):
        if (family, targets) not in made:
            directory = tmp_path_factory.mktemp(f"{family}_{targets}")
            made[family, targets] = make_adapter(model_of(family), directory, TARGETS[targets])
        return made[family, targets]

    return get


def plain_outcome(path, adapter):
    """Log-probabilities, loss and the gradients of A and B by PEFT and plain PyTorch."""
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, adapter, is_trainable=True)
    data = make_data()
    logprobs = plain_logprobs(model, data)
    loss = plain_loss(logprobs)
    loss.backward()
    gradients = {name.replace(".default", ""): p.grad for name, p in model.named_parameters() if p.requires_grad}
    return logprobs.detach(), loss.item(), gradients


def plain_loss(logprobs):
    data = make_data()
    mask = (data["token_mask"] * data["sample_mask"][:, None])[:, 1:]
    difference = ((logprobs[:, 1:] - data["reference_policy_logprobs"][:, :-1]) * mask).sum(1)
    pairs = data["sample_mask"][::2]
    nll = -(logprobs[:, 1:] * mask).sum(1) / mask.sum(1).clamp(min=1)
    per_pair = -F.logsigmoid(0.05 * (difference[::2] - difference[1::2])) + 0.5 * nll[::2]
    return (per_pair * pairs).sum() / pairs.sum()


@pytest.fixture(scope="module")
def plain(model_of, adapter_of):
    made = {}

    def get(family, targets):
        if (family, targets) not in made:
            made[family, targets] = plain_outcome(model_of(family), adapter_of(family, targets))
        return made[family, targets]

    return get


CASES = and_long(
    [
        ("llama", "some", ParallelLayout(tp=2, sp=True)),
    ],
    [
        ("mixtral", "experts", ParallelLayout(tp=2, sp=True)),
        ("deep", "all", ParallelLayout(pp=2, cp=2)),
        ("phi3", "phi3", ParallelLayout(tp=2)),
        ("llama", "all", ParallelLayout(tp=4)),  # more ranks than key-value heads
        ("gemma3", "all", ParallelLayout(tp=2, sp=True)),
        ("qwen3", "some", ParallelLayout(tp=2, pp=2, cp=2, sp=True)),
        ("deep", "some", ParallelLayout(pp=2, vpp=3, dp=2)),
        ("qwen3_moe", "attention", ParallelLayout(tp=2, dp=2, ep=2, sp=True)),
        ("mixtral", "experts", ParallelLayout(dp=2, ep=2)),
        ("qwen3_moe", "experts_and_attention", ParallelLayout(tp=2, dp=2, ep=2, etp=1, sp=True)),
        ("glm4_moe", "experts_down", ParallelLayout(pp=2, dp=2, ep=2)),
        ("qwen2_moe", "experts_gate_up", ParallelLayout(tp=2, sp=True)),
        ("deepseek_v3", "latent", ParallelLayout(tp=2, sp=True)),
        ("moonlight", "latent_queries", ParallelLayout(tp=2, dp=2, ep=2, sp=True)),
        ("glm4_moe_lite", "latent", ParallelLayout(pp=2, cp=2)),
        ("gpt_oss", "experts_and_attention", ParallelLayout(tp=2, ep=2, etp=1, sp=True)),
        ("glm4", "phi3_mlp", ParallelLayout(tp=2)),
        ("qwen3_5", "delta_nets", ParallelLayout(tp=2, cp=2, sp=True)),
        ("qwen3_5", "delta_nets", ParallelLayout(pp=2)),
        ("qwen3_next", "next", ParallelLayout(tp=2, sp=True)),
        ("minimax_m3", "attention", ParallelLayout(tp=2, ep=2, etp=1, sp=True)),
        ("mimo_v2_flash", "attention", ParallelLayout(tp=2, ep=2, etp=1, sp=True)),
        ("kimi_linear", "kimi", ParallelLayout(tp=2, cp=2, sp=True)),
        ("nemotron_h_moe", "nemotron_moe", ParallelLayout(tp=2, cp=2, ep=2, etp=1, sp=True)),
    ],
    [
        ("kimi_linear", "kimi", ParallelLayout(pp=2)),
        ("nemotron_h", "nemotron", ParallelLayout(pp=2, cp=2)),
        ("nemotron_h", "nemotron", ParallelLayout(tp=2, sp=True)),
        ("nemotron_h_moe", "nemotron_up", ParallelLayout(pp=2)),
        ("llama", "all", ParallelLayout()),
        ("llama", "some", ParallelLayout(tp=4, sp=True, dp=2)),
        ("olmo2", "all", ParallelLayout(tp=2)),
        ("qwen2", "all", ParallelLayout(dp=4, packing=False)),
        ("mixtral", "experts", ParallelLayout(tp=2, ep=2, etp=1, sp=True)),
        ("mixtral", "experts", ParallelLayout(tp=2, dp=2, ep=2, sp=True)),
        ("qwen3_moe", "experts_and_attention", ParallelLayout(pp=2, cp=2, ep=2)),
        ("gpt_oss", "experts", ParallelLayout(tp=2, sp=True)),
        ("deepseek_v32", "latent", ParallelLayout(tp=2, cp=2, ep=2, etp=1, sp=True)),
        ("glm_moe_dsa", "latent", ParallelLayout(pp=2)),
        ("hy_v4", "latent", ParallelLayout(tp=2, pp=2, sp=True)),
        ("glm5_next", "kimi", ParallelLayout(tp=2, pp=2, sp=True)),
        ("deepseek_v4", "compressed", ParallelLayout(tp=2, pp=2, sp=True)),
        ("gemma4", "all", ParallelLayout(tp=2, pp=2, sp=True)),
        ("gemma4_moe", "experts_of_layer", ParallelLayout(tp=2, cp=2, ep=2, etp=1, sp=True)),
        ("gemma4_e", "all", ParallelLayout(tp=4, sp=True)),
        ("gemma4_tower", "some", ParallelLayout(cp=2)),
        ("qwen4", "delta_nets_moe", ParallelLayout(tp=2, pp=2, sp=True)),
    ],
)
GROUPED_CASES = and_long(
    [
        ("mixtral", "experts", ParallelLayout(tp=2, sp=True)),
    ],
    [
        ("qwen3_moe", "experts_and_attention", ParallelLayout(tp=2, ep=2, etp=1, sp=True)),
        ("glm4_moe", "experts_down", ParallelLayout(pp=2, dp=2, ep=2)),
        ("gpt_oss", "experts", ParallelLayout(tp=2, sp=True)),
    ],
    [
        ("mixtral", "experts", ParallelLayout()),
        ("moonlight", "latent_queries", ParallelLayout(dp=2, ep=2)),
        ("qwen3_next", "next", ParallelLayout(tp=2, sp=True)),
        ("nemotron_h_moe", "nemotron_moe", ParallelLayout(tp=2, sp=True)),
    ],
)
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
TARGETS |= {
    "attention": ALL[:4],
    "kimi": [*EXPERTS, "q_proj", "v_proj", "b_proj", "g_a_proj", "g_b_proj", "kv_b_proj", "o_proj"],
    "compressed": [*EXPERTS, "q_a_proj", "o_b_proj"],
    "latent": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
    "latent_queries": [*EXPERTS, "q_proj", "kv_b_proj"],
    "phi3_mlp": [*ALL[:4], "gate_up_proj", "down_proj"],
    "experts": EXPERTS,
    "experts_and_attention": [*EXPERTS, "q_proj", "o_proj"],
    "experts_of_layer": ["experts.gate_up_proj", "experts.down_proj", "q_proj", "v_proj"],
    "experts_down": [EXPERTS[1], "v_proj"],
    "experts_gate_up": [EXPERTS[0]],
    "delta_nets": ["in_proj_qkv", "in_proj_b", "out_proj", "q_proj", "v_proj", "up_proj"],
    "delta_nets_moe": [*EXPERTS, "in_proj_qkv", "in_proj_b", "out_proj", "q_proj", "v_proj"],
    "nemotron": ["in_proj", "q_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
    "nemotron_moe": ["mixer.experts.up_proj", "mixer.experts.down_proj", "in_proj", "k_proj"],
    "nemotron_up": ["mixer.experts.up_proj", "in_proj"],
    "next": ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", EXPERTS[1]],
}


@pytest.mark.parametrize(("family", "targets", "layout"), CASES, ids=str)
def test_adapter_gradients_equal_peft(family, targets, layout, model_of, adapter_of, plain):
    """Recomputing where layers are on several stages, whose first has no input with a gradient."""
    config = lora_config(model_of(family), path=adapter_of(family, targets))
    outcome = result_of(config, layout, 1, recompute_activations=layout.pp > 1)
    assert_equals_peft(outcome, family, *plain(family, targets))


@pytest.mark.parametrize(("family", "targets", "layout"), GROUPED_CASES, ids=str)
def test_adapters_of_grouped_experts_equal_peft(family, targets, layout, model_of, adapter_of, plain):
    """Also three steps, with the experts one after the other on one process."""
    config = lora_config(model_of(family), path=adapter_of(family, targets))
    outcome = result_of(config, layout, 3, moe_grouped_gemm=True, recompute_activations=layout.pp > 1)
    assert_equals_peft(outcome, family, *plain(family, targets))
    difference = compare(outcome, result_of(config, ParallelLayout(), 3))
    assert difference.within(gradients=5e-4 if family in WITH_DELTA_NETS else 1e-4), difference


def result_of(config, layout, steps, **model):
    config = config.model_copy(update={"model": config.model.model_copy(update=model)})
    return run_processes(compute_layout_result, layout.apply(config), make_data(), steps, world_size=layout.world_size)[
        0
    ]


def assert_equals_peft(outcome, family, logprobs, loss, gradients):
    assert outcome.metrics["loss"] == pytest.approx(loss, rel=1e-5)
    # With such adapters, transformers' own results for delta nets are up to 8e-4 from those in float64.
    tolerance = 1e-3 if family in WITH_DELTA_NETS else 1e-4
    torch.testing.assert_close(outcome.scores, logprobs.float(), rtol=1e-5, atol=tolerance)
    assert set(outcome.gradients) == set(gradients)
    whole = sum(float(g.square().sum()) for g in gradients.values()) ** 0.5
    tolerance = 5e-4 if family in WITH_DELTA_NETS else 2e-5  # see test_layout_check
    for name, expected in gradients.items():
        error = (outcome.gradients[name] - expected).norm()
        assert error <= tolerance * max(expected.norm(), 1e-3 * whole), name
    assert outcome.metrics["grad_norm"] == pytest.approx(whole, rel=tolerance)


def lora_of_family(model, **lora):
    from mcore_rl.models.megatron.families import family_of
    from mcore_rl.models.megatron.model.hf_config import load_hf_config
    from mcore_rl.models.megatron.model.lora import lora_of

    family = family_of(load_hf_config(model))
    return lora_of(LoRAConfig(**lora), family), family


def test_experts_are_adapted_where_they_are_named(model_of):
    everything, _ = lora_of_family(model_of("mixtral"), rank=2)
    assert everything.target_modules == tuple(ALL[:4])
    named, family = lora_of_family(model_of("mixtral"), rank=2, target_modules=["experts.down_proj"])
    assert named.settings["target_modules"] == []
    assert named.settings["target_parameters"] == ["mlp.experts.down_proj"]
    layers, experts, hidden, width = 2, 6, 64, 96
    assert named.num_parameters() == layers * experts * 2 * (hidden + width)
    assert named.active_parameters(family) == layers * family.experts.topk * 2 * (hidden + width)


DOWN = ["experts.down_proj"]


@pytest.mark.parametrize(
    ("family", "lora", "model", "message"),
    [
        ("nemotron_h", {"target_modules": ["out_proj"]}, {}, "nemotron_h has no out_proj to adapt; it has in_proj, "),
        (
            "mixtral",
            {"target_modules": DOWN, "dropout": 0.1},
            {},
            "model.lora.dropout: is not supported for experts.down_proj",
        ),
        ("mixtral", {"target_modules": ["gate_up_proj"]}, {}, "it has q_proj, k_proj, v_proj, o_proj, experts."),
        ("llama", {"target_modules": DOWN}, {}, "llama has no experts.down_proj to adapt"),
    ],
)
def test_what_experts_do_not_go_with(family, lora, model, message, model_of):
    from mcore_rl.models.megatron.model.hf_config import check_model_fits, load_hf_config

    config = lora_config(model_of(family), **lora)
    with pytest.raises(UserError, match=re.escape(message)):
        check_model_fits(load_hf_config(model_of(family)), config.parallel, 60, config.model.model_copy(update=model))


def test_other_parameters_than_experts_are_refused(model_of, adapter_of, tmp_path):
    directory = shutil.copytree(adapter_of("mixtral", "experts"), tmp_path / "adapter")
    config = json.loads((directory / "adapter_config.json").read_text())
    config["target_parameters"] = ["mlp.gate.weight"]
    (directory / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"target_parameters=\['mlp.gate.weight'\] is not supported"):
        lora_of_family(model_of("mixtral"), path=directory)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "lora_ga"),
        ("alora_invocation_tokens", [5, 6]),
        ("use_rslora", True),
        ("kasa_config", {"beta": 1e-4}),
    ],
)
def test_adapters_that_compute_something_else_are_refused(key, value, adapter_of, tmp_path):
    directory = shutil.copytree(adapter_of("llama", "some"), tmp_path / "adapter")
    config = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(UserError, match=re.escape(f"{key}={value!r} is not supported")):
        PEFTDirectory(directory)


@pytest.mark.parametrize("kind", [True, "gaussian", "orthogonal"])
def test_adapters_that_differ_in_their_beginning_alone_are_taken(kind, model_of, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(model_of("llama"), dtype=torch.float32)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=kind, task_type="CAUSAL_LM")
    peft.get_peft_model(base, config).save_pretrained(tmp_path)
    assert PEFTDirectory(tmp_path).target_modules == ("q_proj",)


# ------------------------------------------------------------------ a run


STEPS, DIRECTORIES = 3, ("initial", "adapter", "merged")


def a_run(config, directory):
    """Return rank 0's initial adapters, a few steps, and the results of the policy's methods afterwards."""
    from mcore_rl.algorithms.build_loss import build_loss
    from mcore_rl.models.generation.sampling import SamplingParams
    from mcore_rl.models.megatron.weights.adapters import adapters_in
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2, keep_reference=True)
    frozen = [p.clone() for p in policy.parameters() if not p.requires_grad]
    first, second, merged = (directory / name for name in DIRECTORIES)
    policy.export_adapters(first)
    before = policy.get_logprobs(make_data())["logprobs"]
    metrics = [policy.train(make_data(), build_loss(config)) for _ in range(STEPS)]
    after = policy.get_logprobs(make_data())["logprobs"]
    reference = policy.get_reference_policy_logprobs(make_data())["reference_logprobs"]
    assert torch.equal(policy.get_logprobs(make_data())["logprobs"], after)
    assert torch.equal(reference, before)
    policy.export_adapters(second)
    policy.export_hf(merged)
    policy.prepare_for_generation(SamplingParams(max_new_tokens=9, temperature=0.7), 60)
    prompts = make_data().select_indices([0, 3, 5, 9])
    sampled = policy.generate(prompts)
    ids, lengths = sampled["output_ids"], sampled["unpadded_sequence_lengths"]
    scored = policy.get_logprobs(type(prompts)(input_ids=ids, input_lengths=lengths), temperature=0.7)["logprobs"]
    responses = sampled["logprobs"] != 0
    torch.testing.assert_close(sampled["logprobs"][responses], scored[responses], rtol=1e-4, atol=1e-4)
    assert responses.any()
    assert all(
        torch.equal(a, b) for a, b in zip(frozen, (p for p in policy.parameters() if not p.requires_grad), strict=True)
    )
    assert {p.dtype for p in adapters_in(policy.model)} == {torch.float32}
    moments = [t for state in policy.optimizer.chained_optimizers[0].optimizer.state.values() for t in state.values()]
    numbers = sum(p.numel() for p in adapters_in(policy.model))
    policy.shutdown()
    return metrics, before, after, sum(t.numel() for t in moments if t.ndim) / numbers


def plain_run(path, adapter, config):
    """The same by PEFT and torch.optim, from the same adapter."""
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, adapter, is_trainable=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=config.optimizer.lr, eps=config.optimizer.adam_eps, weight_decay=0)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = plain_loss(plain_logprobs(model, make_data()))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, config.optimizer.clip_grad)
        optimizer.step()
        losses.append(loss.item())
    return losses, peft.get_peft_model_state_dict(model)


DENSE, SPARSE = ["q_proj", "k_proj", "down_proj"], ["experts.gate_up_proj", "experts.down_proj", "o_proj"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "targets", "layout"),
    [
        ("llama", DENSE, ParallelLayout(tp=2, sp=True)),
        ("llama", DENSE, ParallelLayout(pp=2, cp=2)),
        ("llama", DENSE, ParallelLayout(dp=2)),
        ("mixtral", SPARSE, ParallelLayout(dp=2, ep=2)),
        ("qwen3_moe", SPARSE, ParallelLayout(tp=2, sp=True)),
        pytest.param(
            "nemotron_h_moe",
            ["in_proj", "experts.up_proj", "experts.down_proj", "o_proj"],
            ParallelLayout(tp=2, ep=2, etp=1, sp=True),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=str,
)
def test_adapter_run_and_files_equal_peft(family, targets, layout, model_of, tmp_path):
    path = model_of(family)
    config = layout.apply(lora_config(path, rank=RANK, alpha=ALPHA, target_modules=targets))
    config = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"lr": 1e-2})})
    metrics, before, after, moments = run_processes(a_run, config, tmp_path, world_size=layout.world_size)[0]
    assert moments <= 2  # two numbers for each of the adapters', and none for the model's
    initial, adapter, merged = (tmp_path / name for name in DIRECTORIES)
    losses, weights = plain_run(path, initial, config)
    assert [m["loss"] for m in metrics] == pytest.approx(losses, rel=1e-5)
    assert abs(losses[-1] - losses[0]) > 1e-3
    ours = load_file(adapter / "adapter_model.safetensors")
    assert set(ours) == set(weights)
    for name, tensor in weights.items():
        torch.testing.assert_close(ours[name], tensor.detach(), rtol=1e-4, atol=1e-5, msg=name)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(before, plain_logprobs(base, make_data()).float(), rtol=1e-5, atol=1e-4)
        for model in (
            AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32),
            peft.PeftModel.from_pretrained(base, adapter),
        ):
            torch.testing.assert_close(after, plain_logprobs(model, make_data()).float(), rtol=1e-5, atol=1e-4)
    initial_a = {n: t for n, t in load_file(initial / "adapter_model.safetensors").items() if "lora_A" in n}
    for name, tensor in initial_a.items():  # PEFT's own range
        bound = tensor.shape[1] ** -0.5
        assert 0.9 * bound < tensor.abs().max() <= bound, name


def run_steps(config, directory, load, steps):
    """Losses, adapters and the checkpoint after `steps` more steps."""
    from mcore_rl.algorithms.build_loss import build_loss
    from mcore_rl.models.megatron.weights.adapters import export_adapters
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2)
    done = policy.load_checkpoint(load).state["step"] if load else 0
    losses = [policy.train(make_data(), build_loss(config))["loss"] for _ in range(steps)]
    policy.offload_before_refit()
    policy.prepare_for_training()
    saved = policy.save_checkpoint(directory, done + steps, {})
    adapters = dict(export_adapters(policy.model))
    policy.shutdown()
    return losses, adapters, saved


ELSEWHERE = [
    ("deep", ParallelLayout(tp=2, sp=True), ParallelLayout(pp=2)),
    ("llama", ParallelLayout(dp=3), ParallelLayout(tp=4)),
    ("deep", ParallelLayout(pp=2, vpp=3), ParallelLayout(cp=2, dp=2)),
    ("deep", ParallelLayout(pp=2), ParallelLayout(pp=2, vpp=2, stages="E|ttt|ttt|L")),
    ("mixtral", ParallelLayout(dp=2, ep=2), ParallelLayout(tp=2, sp=True)),
    ("qwen3_moe", ParallelLayout(tp=2, ep=2, etp=1, sp=True), ParallelLayout(pp=2, dp=2, ep=2)),
]


@pytest.mark.long
@pytest.mark.parametrize(("family", "first", "second"), ELSEWHERE, ids=str)
def test_adapter_resume_under_another_layout_is_equal(family, first, second, model_of, tmp_path):
    targets = {"mixtral": SPARSE[:2], "qwen3_moe": SPARSE}.get(family, [])  # experts alone, and with attention
    config = lora_config(model_of(family), rank=RANK, target_modules=targets)
    expected, adapters, _ = run_processes(run_steps, config, tmp_path / "whole", None, 4, world_size=1)[0]
    losses, load = [], None
    for layout in (first, second):
        arguments = (layout.apply(config), tmp_path / "parts", load, 2)
        more, found, load = run_processes(run_steps, *arguments, world_size=layout.world_size)[0]
        losses += more
    assert losses == approx32(expected, FORWARD)
    for name, tensor in adapters.items():
        assert_updates32(found[name], tensor, 4 * LR, what=name)
    stored = read_index(load).state_dict_metadata
    assert all(".adapter.lora_" in name for name in stored)
    numbers = sum(t.numel() for t in adapters.values())  # of each: value, the optimizer's own, two moments
    assert sum(math.prod(entry.size) for entry in stored.values()) == 4 * numbers


def with_dropout(config):
    """Return scores and losses, and whether tensor-parallel ranks still have equal replicated tensors."""
    from mcore_rl.algorithms.build_loss import build_loss
    from mcore_rl.distributed.collectives import all_gather
    from mcore_rl.models.megatron.weights.adapters import adapter_mappings
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2)
    scores = [policy.get_logprobs(make_data())["logprobs"] for _ in range(2)]
    losses = [policy.train(make_data(), build_loss(config))["loss"] for _ in range(STEPS)]
    agree = [
        bool((copies == copies[0]).all())
        for chunk in policy.model.chunks
        for _, mapping, parameter in adapter_mappings(policy.model, chunk)
        if mapping.kind.partition_dim is None
        for copies in [all_gather(parameter.detach(), policy.topology.tensor.group)]
    ]
    policy.shutdown()
    return scores, losses, all(agree)


@pytest.mark.long
@pytest.mark.parametrize("layout", [ParallelLayout(tp=2), ParallelLayout(tp=2, sp=True)], ids=str)
def test_adapter_dropout_applies_in_training_only(layout, model_of, adapter_of):
    path, adapter = model_of("llama"), adapter_of("llama", "all")
    (wet, dry) = (
        run_processes(
            with_dropout, layout.apply(lora_config(path, path=adapter, **options)), world_size=layout.world_size
        )[0]
        for options in ({"dropout": 0.4}, {})
    )
    assert torch.equal(wet[0][0], wet[0][1])
    assert torch.equal(wet[0][0], dry[0][0])
    assert all(abs(a - b) > 1e-3 for a, b in zip(wet[1], dry[1], strict=True))
    assert wet[2]
    assert dry[2]


def drop_out(config, tokens):
    from mcore_rl.models.megatron.weights.adapters import ColumnAdapter, RowAdapter
    from mcore_rl.models.policy.scoring import ScoringModel

    model, found = ScoringModel(config).model.chunks[0], {}
    with torch.no_grad():
        for kind in (ColumnAdapter, RowAdapter):
            adapter = next(m for m in model.modules() if isinstance(m, kind))
            x = torch.ones(tokens, 1, adapter.lora_A.shape[1])
            found[kind.__name__] = adapter.train()(x).mean(0), adapter.eval()(x)[0]
    return found


def test_adapter_dropout_scales_remaining_values(model_of, adapter_of):
    """Dropout keeps the mean output of an adapter in training; 20,000 samples, 5 standard errors."""
    config = lora_config(model_of("llama"), path=adapter_of("llama", "all"), dropout=0.4)
    for dropped, whole in run_processes(drop_out, config, 20_000, world_size=1)[0].values():
        error = (dropped - whole).norm() / whole.norm()
        assert 1e-4 < error < 0.05


@pytest.mark.long
def test_a_base_in_bfloat16_keeps_adapters_in_float32(model_of, tmp_path):
    path = model_of("llama")
    config = lora_config(path, rank=RANK)
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})
    losses, adapters, _ = run_processes(run_steps, config, tmp_path, None, STEPS, world_size=1)[0]
    exact, _, _ = run_processes(run_steps, lora_config(path, rank=RANK), tmp_path / "b", None, STEPS, world_size=1)[0]
    assert {t.dtype for t in adapters.values()} == {torch.float32}
    assert losses == pytest.approx(exact, rel=0.05)


@pytest.mark.long
def test_scripts_train_stop_convert_and_export(model_of, tmp_path):
    """A run under two layouts; the checkpoint becomes the very adapter that the run exports."""
    make_model("qwen2", tmp_path / "model", initializer_range=0.05)
    pairs = [{"prompt": f"say {i} ", "chosen": "ab" * (i % 5 + 1), "rejected": "yz" * (i % 3 + 1)} for i in range(24)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (tmp_path / "dpo.yaml").write_text(
        yaml.safe_dump(
            {
                "output_dir": str(tmp_path / "out"),
                "model": {"path": str(tmp_path / "model"), "lora": {"rank": 4, "alpha": 8}},
                "data": {"train": str(tmp_path / "pairs.jsonl"), "max_sequence_length": 48},
                "batch": {"global_batch_size": 8},
                "optimizer": {"lr": 1e-2, "adam_eps": 1e-6},
                "trainer": {"max_steps": 6},
            }
        )
    )
    half = ["trainer.max_steps=3", "checkpoint.export_hf=false", "optimizer.schedule=constant"]
    said = run("train_dpo.py", tmp_path / "dpo.yaml", *half).stdout_text
    assert "LoRA: rank 4, alpha 8, on q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj; " in said
    layout = "parallel.tensor_model_parallel_size=2"
    said = run("train_dpo.py", tmp_path / "dpo.yaml", "optimizer.schedule=constant", layout, processes=2).stdout_text
    assert "iter_0000003: adapters, optimizer, schedule" in said
    metrics = metrics_of(tmp_path / "out")
    assert [m["step"] for m in metrics] == [1, 2, 3, 4, 5, 6]
    assert metrics[0]["rewards_chosen_mean"] == 0
    assert metrics[-1]["preference_loss"] < 0.9 * metrics[0]["preference_loss"]
    run("convert", "to-hf", tmp_path / "out/checkpoints", tmp_path / "converted")
    ours, converted = (load_file(tmp_path / d / "adapter_model.safetensors") for d in ("out/adapter", "converted"))
    assert set(ours) == set(converted)
    assert all(torch.equal(ours[name], converted[name]) for name in ours)
    bases = [(tmp_path / d / "base_model.json").read_bytes() for d in ("out/adapter", "converted")]
    assert bases[0] == bases[1]
    make_model("qwen2", tmp_path / "other", initializer_range=0.06)
    lora = (f"model.lora={{path: {tmp_path / 'out/adapter'}}}", f"output_dir={tmp_path / 'next'}", "dry_run=true")
    run("train_dpo.py", tmp_path / "dpo.yaml", *lora)
    error = run("train_dpo.py", tmp_path / "dpo.yaml", *lora, f"model.path={tmp_path / 'other'}", check=False)
    assert error.returncode == 2
    assert "was trained on other weights" in error.stderr_text
    error = run("train_dpo.py", tmp_path / "dpo.yaml", "model.lora.rank=5", check=False)
    assert error.returncode == 2
    assert "model.lora.rank: " in error.stderr_text
    assert "is of another run (4 → 5)" in error.stderr_text


def reference_of_an_adapter(config):
    from mcore_rl.algorithms.build_loss import build_loss
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2, keep_reference=True)
    before = policy.get_logprobs(make_data())["logprobs"]
    policy.train(make_data(), build_loss(config))
    found = policy.get_reference_policy_logprobs(make_data())["reference_logprobs"]
    after = policy.get_logprobs(make_data())["logprobs"]
    policy.shutdown()
    return before, found, after


def load_each_others(whole, config, directory):
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policies = [MegatronPolicy(each, total_steps=1) for each in (whole, config)]
    saved = [
        p.save_checkpoint(directory / name, 1, {}) for p, name in zip(policies, ("whole", "adapters"), strict=True)
    ]
    told = []
    for policy, iteration in zip(reversed(policies), saved, strict=True):
        with pytest.raises(UserError) as error:
            policy.load_checkpoint(iteration, allow_partial=True)
        told.append(str(error.value))
        policy.shutdown()
    return told


@pytest.mark.long
def test_adapters_and_whole_models_are_told_apart(model_of, tmp_path):
    whole, config = make_config(model_of("llama")), lora_config(model_of("llama"), rank=2)
    of_whole, of_adapters = run_processes(load_each_others, whole, config, tmp_path, world_size=1)[0]
    assert "whole/iter_0000001 holds a whole model, but with model.lora the model comes from model.path" in of_whole
    assert "adapters/iter_0000001 holds only adapters; set model.lora" in of_adapters


def one_step(config):
    from mcore_rl.algorithms.dpo import train_dpo
    from mcore_rl.algorithms.kto import train_kto

    (train_dpo if isinstance(config, DPOConfig) else train_kto)(config)


@pytest.mark.parametrize(
    ("kind", "record", "reward"),
    [
        (DPOConfig, {"prompt": "a", "chosen": "bc", "rejected": "de"}, "rewards_chosen_mean"),
        (KTOConfig, {"prompt": "a", "completion": "bc", "label": True}, "rewards_desirable_sum"),
    ],
)
def test_dropout_of_an_adapter_that_training_begins_from_is_no_mistake(
    kind, record, reward, model_of, adapter_of, tmp_path
):
    """In the first step, dropout drops values that the reference keeps."""
    (tmp_path / "data.jsonl").write_text(2 * (json.dumps(record) + "\n"))
    values = {
        "output_dir": str(tmp_path / "out"),
        "model": {"path": str(model_of("llama")), "lora": {"path": str(adapter_of("llama", "all")), "dropout": 0.5}},
        "data": {"train": str(tmp_path / "data.jsonl"), "max_sequence_length": 16},
        "batch": {"global_batch_size": 1},
        "trainer": {"max_steps": 1},
        "checkpoint": {"export_hf": False},
    }
    run_processes(one_step, build_config(kind, values, [], ""), world_size=1)
    assert metrics_of(tmp_path / "out")[0][reward] != 0


@pytest.mark.long
def test_the_reference_of_training_that_begins_from_an_adapter_has_it(model_of, adapter_of):
    config = ParallelLayout(tp=2).apply(lora_config(model_of("llama"), path=adapter_of("llama", "some")))
    before, found, after = run_processes(reference_of_an_adapter, config, world_size=2)[0]
    assert torch.equal(before, found)
    assert not torch.equal(before, after)

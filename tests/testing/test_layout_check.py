"""Tests that a sequence of DPO steps under every layout equals one process and plain PyTorch."""

import copy

import pytest
import torch
import transformers.models.auto.modeling_auto as modeling_auto
from float32 import FORWARD, GRADIENT, approx32, assert_close32
from layout_cases import STEPS, make_config, make_data, make_sft_config, plain_outcome
from layout_cases import outcomes as outcomes
from safetensors.torch import load_file
from small_models import ALIKE, ARCHITECTURES, WITH_DELTA_NETS, and_long, has_experts, make_model

from mcore_rl.algorithms.interfaces import LossFunction, LossType
from mcore_rl.algorithms.loss_functions import ClippedPGLossFn, NLLLoss
from mcore_rl.errors import UserError
from mcore_rl.testing.layout_check import (
    ParallelLayout,
    compare,
    compute_layout_result,
    fitting,
    shrink_model,
    steps_table,
    table_row,
)
from mcore_rl.testing.processes import run_processes

FAST = [
    ParallelLayout(tp=2, sp=True),
    ParallelLayout(pp=2),
    ParallelLayout(cp=2),
    ParallelLayout(dp=2),
    ParallelLayout(packing=False),
    ParallelLayout(tokens_per_pack=128),
]
MANY = [
    ParallelLayout(tp=2, pp=2, cp=2, sp=True),
    ParallelLayout(pp=2, cp=2, dp=2, tokens_per_pack=128),
    ParallelLayout(cp=2, packing=False),
]
MORE = [
    ParallelLayout(tp=2),
    ParallelLayout(tp=4),
    ParallelLayout(pp=2, packing=False),
    ParallelLayout(cp=2, tokens_per_pack=128),
    ParallelLayout(dp=2, tokens_per_pack=128),
    ParallelLayout(dp=4, packing=False),
    ParallelLayout(tp=2, cp=2, sp=True),
    ParallelLayout(pp=2, dp=2, tokens_per_pack=128),
    ParallelLayout(tp=2, pp=2),
    ParallelLayout(tp=2, cp=2, dp=2),
]
PIPELINES = and_long(
    [("deep", ParallelLayout(pp=2, vpp=2, stages="E|t*3|tt|tL"))],
    [
        ("qwen3_moe", ParallelLayout(pp=2, vpp=2, dp=2, ep=2)),
        ("deep", ParallelLayout(pp=3, first=4, packing=False)),
        ("deep", ParallelLayout(pp=3, stages="E|t*6|L")),
        ("qwen3_moe", ParallelLayout(pp=2, dp=2, ep=2, stages="Et*3|tL")),
    ],
    [
        ("glm4_moe", ParallelLayout(pp=2, first=1)),
        ("qwen3_moe", ParallelLayout(pp=2, vpp=2, tokens_per_pack=128)),
        ("deep", ParallelLayout(pp=2, vpp=2, tp=2, sp=True, first=2)),
        ("deep", ParallelLayout(pp=2, vpp=2, first=4, last=2)),
        ("deep", ParallelLayout(pp=3, first=3, last=1)),
    ],
)
MIXTURES = ["mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe"]
EXPERT_LAYOUTS = and_long(
    [
        ("mixtral", ParallelLayout(tp=2, ep=2, etp=1, sp=True)),
    ],
    [
        ("glm4_moe", ParallelLayout(pp=2, dp=2, ep=2)),
        ("qwen3_moe", ParallelLayout(tp=2, dp=2, ep=2, sp=True)),
        ("qwen3_moe", ParallelLayout(cp=2, ep=2)),
        ("qwen2_moe", ParallelLayout(tp=2, sp=True)),
        ("deepseek_v3", ParallelLayout(tp=2, ep=2, etp=1, sp=True)),
        ("gpt_oss", ParallelLayout(tp=2, ep=2, etp=1, sp=True)),
        ("minimax_m2", ParallelLayout(tp=2, ep=2, etp=1, sp=True)),
        ("ernie4_5_moe", ParallelLayout(cp=2, ep=2)),
        ("qwen3_next", ParallelLayout(tp=2, ep=2, etp=1, sp=True)),
        ("qwen3_5_moe", ParallelLayout(cp=2, ep=2)),
        ("kimi_linear", ParallelLayout(tp=2, cp=2, sp=True, ep=2, etp=2)),
        ("deepseek_v32", ParallelLayout(tp=2, cp=2, ep=2, etp=1, sp=True)),
        ("glm_moe_dsa", ParallelLayout(pp=2, cp=2, ep=2)),
        ("mimo_v2_flash", ParallelLayout(tp=2, cp=2, ep=2, etp=1, sp=True)),
        ("hy_v4", ParallelLayout(pp=2, vpp=2, stages="E|tt|tt|L")),
        ("nemotron_h_moe", ParallelLayout(tp=2, cp=2, ep=2, etp=1, sp=True)),
        ("glm5_next", ParallelLayout(tp=2, cp=2, ep=2, etp=1, sp=True)),
        ("deepseek_v4", ParallelLayout(tp=2, cp=2, ep=2, etp=1, sp=True)),
        ("gemma4_moe", ParallelLayout(tp=2, cp=2, ep=2, etp=1, sp=True)),
        ("qwen4", ParallelLayout(tp=2, cp=2, ep=2, etp=1, sp=True)),
    ],
    [
        ("minimax_m3", ParallelLayout(tp=2, cp=2, ep=2, etp=1, sp=True)),
        ("minimax_m3", ParallelLayout(pp=2, cp=2, packing=False)),
        ("minimax_m3", ParallelLayout(cp=4, ep=2)),
        ("minimax_m3", ParallelLayout(pp=2, dp=2, ep=2, tokens_per_pack=128)),
        ("mimo_v2_flash", ParallelLayout(pp=2, dp=2, ep=2)),
        ("mimo_v2_flash", ParallelLayout(cp=2, packing=False)),
        ("mistral4", ParallelLayout(tp=2, cp=2, ep=2, etp=1, sp=True)),
        ("mistral4", ParallelLayout(pp=2, tokens_per_pack=128)),
        ("kimi_linear", ParallelLayout(pp=2, dp=2, ep=2, tokens_per_pack=128)),
        ("kimi_linear", ParallelLayout(cp=4)),
        ("kimi_linear", ParallelLayout(tp=2, ep=2, etp=1, sp=True, packing=False)),
        ("deepseek_v32", ParallelLayout(tp=2, sp=True)),
        ("deepseek_v32", ParallelLayout(cp=2, packing=False)),
        ("nemotron_h_moe", ParallelLayout(pp=2, dp=2, ep=2, tokens_per_pack=128)),
        ("nemotron_h_moe", ParallelLayout(tp=2, dp=2, ep=2, sp=True)),
        ("nemotron_h_moe", ParallelLayout(pp=2, vpp=3, cp=2)),
        ("glm_moe_dsa", ParallelLayout(pp=2, tokens_per_pack=128)),
        ("hy_v4", ParallelLayout(tp=2, cp=2, ep=2, etp=1, sp=True)),
        ("hy_v4", ParallelLayout(tp=2, sp=True)),
        ("glm5_next", ParallelLayout(pp=2, vpp=2)),
        ("qwen4", ParallelLayout(pp=2, vpp=2)),
        ("qwen4", ParallelLayout(cp=4, packing=False)),
        ("qwen4", ParallelLayout(tp=2, dp=2, ep=2, sp=True, tokens_per_pack=128)),
        ("deepseek_v4", ParallelLayout(pp=2, vpp=2)),
        ("deepseek_v4", ParallelLayout(cp=4, packing=False)),
        ("deepseek_v4", ParallelLayout(tp=2, dp=2, ep=2, sp=True, tokens_per_pack=128)),
        ("glm5_next", ParallelLayout(cp=4, packing=False)),
        ("glm5_next", ParallelLayout(tp=2, dp=2, ep=2, sp=True, tokens_per_pack=128)),
        ("hy_v4", ParallelLayout(cp=2, packing=False)),
        ("hy_v4", ParallelLayout(pp=2, dp=2, ep=2, tokens_per_pack=128)),
        ("mixtral", ParallelLayout(dp=2, ep=2)),
        ("deepseek_v3", ParallelLayout(cp=2, ep=2)),
        ("gpt_oss", ParallelLayout(cp=2, ep=2)),
        ("moonlight", ParallelLayout(tp=2, pp=2, sp=True)),
        ("gpt_oss", ParallelLayout(pp=2, packing=False)),
        ("gpt_oss", ParallelLayout(tp=2, sp=True)),
        ("glm4_moe_lite", ParallelLayout(dp=2, ep=2, packing=False)),
        ("gemma4_moe", ParallelLayout(pp=2, dp=2, ep=2, tokens_per_pack=128)),
        ("gemma4_moe", ParallelLayout(cp=4, packing=False)),
        ("gemma4_moe", ParallelLayout(tp=4, dp=2, ep=2, sp=True)),
    ],
)
MANY_WITH_EXPERTS = [
    ("mixtral", ParallelLayout(tp=2, cp=2, dp=2, ep=2, sp=True, tokens_per_pack=128)),
    ("qwen2_moe", ParallelLayout(dp=2, ep=2, packing=False)),
    ("qwen3_moe", ParallelLayout(tp=2, pp=2, dp=2, ep=2, etp=1, sp=True)),
    ("glm4_moe", ParallelLayout(tp=2, dp=2, ep=2, etp=1, sp=True)),
]
MORE_WITH_EXPERTS = [
    ParallelLayout(dp=2),
    ParallelLayout(cp=2),
    ParallelLayout(pp=2, tokens_per_pack=128),
    *(layout for _, layout in MANY_WITH_EXPERTS),
]


def tolerances(family):
    """A delta net's state sums rounding: the gradients of transformers' own chunk sizes differ by 4e-4."""
    return {"gradients": 5e-4} if family in WITH_DELTA_NETS else {}


GEMMA4 = "gemma4", "gemma4_moe", "gemma4_e"
# A layout of these families is compared with one process and plain PyTorch in a long case of another test.
IN_A_LAYOUT = ("hy_v4", "glm5_next", "deepseek_v4", "nemotron_h_moe", "mimo_v2_flash", "kimi_linear", "qwen4", *GEMMA4)
IN_ONE_PROCESS = and_long(
    ["llama", "mixtral"],
    [family for family in ARCHITECTURES if family not in ("llama", "mixtral", *ALIKE, *IN_A_LAYOUT)],
    [*ALIKE, *IN_A_LAYOUT],
)


@pytest.mark.every_case
@pytest.mark.parametrize("family", IN_ONE_PROCESS)
def test_one_process_equals_plain_pytorch(family, outcomes):
    plain, one = outcomes(family)
    difference = compare(one, plain)
    assert difference.within(**tolerances(family)), table_row(ParallelLayout(), difference)


def test_steps_table_shows_every_step_beside_plain_pytorch(outcomes):
    plain, one = outcomes("llama")
    lines = [line.split() for line in steps_table(ParallelLayout(), compare(one, plain))]
    assert [words[:2] for words in lines if words[0] == "step"] == [["step", str(1 + i)] for i in range(STEPS)] * 2
    losses = [(float(words[2]), float(words[3])) for words in lines[1 : 1 + STEPS]]
    for printed, result in zip(zip(*losses, strict=True), (plain, one), strict=True):
        assert list(printed) == pytest.approx([step["loss"] for step in result.steps], abs=1e-6)  # printed: 6 digits
    assert len({loss for loss, _ in losses}) == STEPS > 1
    assert all(abs(a - b) < 1e-5 for a, b in losses)


def check_layout(family, layout, outcomes, model_of):
    plain, one = outcomes(family)
    config = layout.apply(make_config(model_of(family)))
    outcome = run_processes(compute_layout_result, config, make_data(), STEPS, world_size=layout.world_size)[0]
    for reference in (one, plain):
        difference = compare(outcome, reference)
        print(table_row(layout, difference))
        assert difference.within(**tolerances(family)), table_row(layout, difference)


@pytest.mark.parametrize("layout", FAST, ids=str)
def test_dense_layout_equals_plain_pytorch(layout, outcomes, model_of):
    check_layout("llama", layout, outcomes, model_of)


OTHERS = and_long(
    [],
    [
        ("gemma3", ParallelLayout(tp=2, pp=2, sp=True)),
        ("qwen2", ParallelLayout(tp=2, sp=True)),
        ("qwen3", ParallelLayout(pp=2)),
        ("olmo2", ParallelLayout(tp=2, cp=2, sp=True)),
        ("phi3", ParallelLayout(tp=2)),
        ("windows", ParallelLayout(cp=2)),
        ("olmo3", ParallelLayout(tp=2, cp=2, sp=True)),
        ("glm4", ParallelLayout(tp=4)),
        ("ministral3", ParallelLayout(cp=2, packing=False)),
        ("smollm3", ParallelLayout(tp=2, pp=2, sp=True)),
        ("seed_oss", ParallelLayout(tp=2, sp=True)),
        ("qwen3_5", ParallelLayout(tp=2, cp=2, sp=True)),
        ("qwen3_5", ParallelLayout(pp=2, tokens_per_pack=128)),
        ("gemma4", ParallelLayout(pp=2, cp=2)),
        ("gemma4_e", ParallelLayout(tp=2, cp=2, sp=True)),
    ],
    [
        ("gemma4", ParallelLayout(tp=2, cp=2, sp=True)),
        ("gemma4", ParallelLayout(pp=2, vpp=2, tokens_per_pack=128)),
        ("gemma4", ParallelLayout(tp=4)),
        ("gemma4", ParallelLayout(cp=4, packing=False)),
        ("gemma4_e", ParallelLayout(tp=2, dp=2)),
        ("gemma4_e", ParallelLayout(tp=4, sp=True, tokens_per_pack=128)),
        ("gemma4_e", ParallelLayout(cp=4, packing=False)),
        ("gemma4_e", ParallelLayout(tp=2, pp=2, first=1, sp=True)),
        ("gemma4_e", ParallelLayout(pp=2, vpp=2, stages="E|t|t*5|L", tokens_per_pack=128)),
        ("qwen2", ParallelLayout(pp=2)),
        ("qwen3", ParallelLayout(tp=2, sp=True)),
        ("gemma3", ParallelLayout(cp=2, tokens_per_pack=128)),
        ("qwen3_5", ParallelLayout(tp=4)),  # more ranks than key-value heads
        ("qwen3_5", ParallelLayout(tp=2)),
        ("qwen3_5", ParallelLayout(cp=4)),
        ("qwen3_5", ParallelLayout(packing=False)),
        ("nemotron_h", ParallelLayout(tp=2, cp=2, sp=True)),
        ("nemotron_h", ParallelLayout(pp=2, tokens_per_pack=128)),
        ("nemotron_h", ParallelLayout(tp=2)),
        ("nemotron_h", ParallelLayout(tp=4)),
        ("nemotron_h", ParallelLayout(cp=4, packing=False)),
    ],
)


@pytest.mark.every_case
@pytest.mark.parametrize(("family", "layout"), OTHERS, ids=str)
def test_layout_of_other_family_equals_plain_pytorch(family, layout, outcomes, model_of):
    """Test tied embeddings with biases, norms of heads, fused tensors, norms behind blocks, windows, pairs of
    neighbours, layers without rotation."""
    check_layout(family, layout, outcomes, model_of)


@pytest.mark.every_case
@pytest.mark.parametrize(("family", "layout"), EXPERT_LAYOUTS, ids=str)
def test_mixture_layout_equals_plain_pytorch(family, layout, outcomes, model_of):
    check_layout(family, layout, outcomes, model_of)


@pytest.mark.parametrize(("family", "layout"), PIPELINES, ids=str)
def test_uneven_or_interleaved_pipeline_equals_plain_pytorch(family, layout, outcomes, model_of):
    check_layout(family, layout, outcomes, model_of)


OTHERS_WITH_EXPERTS = [(family, layout) for layout in MORE_WITH_EXPERTS for family in MIXTURES]


@pytest.mark.parametrize(
    ("family", "layout"),
    and_long([], MANY_WITH_EXPERTS, [case for case in OTHERS_WITH_EXPERTS if case not in MANY_WITH_EXPERTS]),
    ids=str,
)
def test_large_mixture_layout_equals_plain_pytorch(family, layout, outcomes, model_of):
    check_layout(family, layout, outcomes, model_of)


@pytest.mark.parametrize(
    ("family", "layout"),
    and_long(
        [],
        [("llama", layout) for layout in MANY],
        [*(("llama", layout) for layout in MORE), *(("qwen2", layout) for layout in (*MANY, *MORE))],
    ),
    ids=str,
)
def test_large_dense_layout_equals_plain_pytorch(family, layout, outcomes, model_of):
    check_layout(family, layout, outcomes, model_of)


SFT = and_long(
    [],
    [
        ("deepseek_v32", ParallelLayout(tp=2, ep=2, etp=1, sp=True), {}),
        ("glm_moe_dsa", ParallelLayout(cp=2, ep=2), {"recompute_activations": True}),
        ("gpt_oss", ParallelLayout(cp=2, ep=2), {"recompute_modules": ("moe",)}),
        ("qwen3_5", ParallelLayout(tp=2, cp=2, sp=True), {"recompute_activations": True}),
        ("kimi_linear", ParallelLayout(pp=2, cp=2), {"recompute_activations": True}),
        ("mistral4", ParallelLayout(pp=2, cp=2, ep=2), {}),
        ("hy_v4", ParallelLayout(pp=2, cp=2), {"recompute_activations": True}),
        ("nemotron_h_moe", ParallelLayout(pp=2, cp=2), {"recompute_modules": ("moe", "mlp")}),
        ("glm5_next", ParallelLayout(pp=2, cp=2), {"recompute_activations": True}),
        ("deepseek_v4", ParallelLayout(pp=2, cp=2), {"recompute_activations": True}),
    ],
    [
        ("qwen4", ParallelLayout(pp=2, cp=2), {"recompute_activations": True}),
        ("minimax_m3", ParallelLayout(pp=2, cp=2), {"recompute_activations": True}),
        ("minimax_m3", ParallelLayout(tp=4, sp=True), {}),  # more ranks than key-value heads
        ("mimo_v2_flash", ParallelLayout(pp=2, cp=2), {"recompute_activations": True}),
        ("mimo_v2_flash", ParallelLayout(tp=2, sp=True), {"recompute_modules": ("moe",)}),
        ("mistral4", ParallelLayout(tp=2, ep=2, etp=1, sp=True), {"recompute_activations": True}),
        ("deepseek_v3", ParallelLayout(pp=2, dp=2, ep=2), {"recompute_activations": True}),
        ("olmo3", ParallelLayout(cp=4), {}),
        ("qwen3_next", ParallelLayout(cp=2, ep=2), {"recompute_modules": ("moe",)}),
        ("moonlight", ParallelLayout(tp=2, ep=2, etp=1, sp=True), {}),
        ("glm4_moe_lite", ParallelLayout(cp=2, ep=2), {}),
        ("minimax_m2", ParallelLayout(dp=2, ep=2, packing=False), {}),
        ("ernie4_5_moe", ParallelLayout(tp=2, ep=2, etp=1, sp=True), {}),
        ("glm4", ParallelLayout(tp=2, cp=2, sp=True), {"recompute_modules": ("mlp",)}),
        ("seed_oss", ParallelLayout(pp=2), {"recompute_activations": True}),
        ("smollm3", ParallelLayout(tp=2, sp=True, packing=False), {}),
        ("ministral3", ParallelLayout(tp=2, sp=True), {}),
        ("qwen3_5_moe", ParallelLayout(tp=2, sp=True), {}),
        ("gpt_oss", ParallelLayout(tp=2, ep=2, etp=1, sp=True), {}),
        ("glm_moe_dsa", ParallelLayout(pp=2, packing=False), {}),
        ("hy_v4", ParallelLayout(tp=2, ep=2, etp=1, sp=True), {"recompute_modules": ("mlp", "moe")}),
        ("deepseek_v32", ParallelLayout(cp=4), {}),
        ("nemotron_h", ParallelLayout(tp=2, cp=2, sp=True), {"recompute_activations": True}),
        ("gemma4", ParallelLayout(pp=2, cp=2), {"recompute_activations": True}),
        ("gemma4_moe", ParallelLayout(pp=2, cp=2), {"recompute_modules": ("moe",)}),
        ("gemma4_e", ParallelLayout(tp=2, cp=2, sp=True), {"recompute_activations": True}),
        ("gemma4_e", ParallelLayout(pp=2, first=1), {"recompute_activations": True}),
        ("gemma4_e", ParallelLayout(tp=2), {"recompute_modules": ("mlp",)}),
    ],
)


@pytest.mark.parametrize(("family", "layout", "changes"), SFT, ids=str)
def test_sft_of_new_family_equals_plain_pytorch(family, layout, changes, model_of):
    config = make_sft_config(model_of(family))
    plain = plain_outcome(config, make_data(), steps=1)
    config = layout.apply(config.model_copy(update={"model": config.model.model_copy(update=changes)}))
    outcome = run_processes(compute_layout_result, config, make_data(), 1, world_size=layout.world_size)[0]
    difference = compare(outcome, plain)
    print(table_row(layout, difference))
    assert difference.within(**tolerances(family)), table_row(layout, difference)


class NLLOfLogits(LossFunction):
    """A loss that needs logits: the policy has to compute them, and to call the loss once per sequence."""

    loss_type = LossType.TOKEN_LEVEL

    def __call__(self, next_token_logits, data, global_valid_seqs, global_valid_toks, **groups):
        return NLLLoss()(next_token_logits, data, global_valid_seqs, global_valid_toks, **groups)


POLICY_GRADIENTS = {
    "ppo with entropy bonus": {"token_level_loss": True, "entropy_bonus": 0.1},
    "gspo": {"token_level_loss": False, "sequence_level_importance_ratios": True},
}


def policy_gradient_loss(changes):
    return ClippedPGLossFn(
        {
            "reference_policy_kl_penalty": 0.1,
            "ratio_clip_min": 0.2,
            "ratio_clip_max": 0.2,
            "ratio_clip_c": 3.0,
            "use_on_policy_kl_approximation": False,
            "use_importance_sampling_correction": True,
            **changes,
        }
    )


def gradients_of(config, loss_fn):
    from mcore_rl.models.megatron.training.optimizer import gather_gradients
    from mcore_rl.models.megatron.weights.conversion import export_hf_weights
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy
    from mcore_rl.testing.layout_check import _main_grad

    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2)
    data = make_data()
    generator = torch.Generator().manual_seed(9)
    noise = 0.2 * torch.randn(2, *data["input_ids"].shape, generator=generator)
    data["advantages"] = torch.randn(len(data["input_ids"]), 1, generator=generator).expand(-1, noise.shape[2])
    data["prev_logprobs"] = policy.get_logprobs(data)["logprobs"] + noise[0]
    data["generation_logprobs"] = data["prev_logprobs"] + noise[1]
    metrics = policy.compute_gradients(data, loss_fn)
    gather_gradients(policy.chunks)
    gradients = dict(export_hf_weights(policy.model, _main_grad))
    policy.shutdown()
    return metrics, gradients


@pytest.mark.parametrize(
    ("family", "layout"),
    and_long(
        [("qwen2", ParallelLayout(tp=2, sp=True))],
        [
            ("llama", ParallelLayout(cp=2)),
            ("qwen2", ParallelLayout(pp=2)),
            ("llama", ParallelLayout()),
        ],
        [
            ("qwen2", ParallelLayout()),
            ("llama", ParallelLayout(tp=2, sp=True)),
            ("qwen2", ParallelLayout(cp=2)),
            ("llama", ParallelLayout(pp=2)),
        ],
    ),
    ids=str,
)
def test_losses_of_logits_equal_losses_of_logprobs(family, layout, model_of):
    config = layout.apply(make_config(model_of(family)))
    ours, theirs = (
        run_processes(gradients_of, config, loss_fn, world_size=layout.world_size)[0]
        for loss_fn in (NLLOfLogits(), NLLLoss())
    )
    assert ours[0] == approx32(theirs[0], FORWARD)
    for name, gradient in theirs[1].items():
        assert_close32(ours[1][name], gradient, GRADIENT, what=name)


@pytest.mark.parametrize(
    ("kind", "layout"),
    and_long(
        [("gspo", ParallelLayout(cp=2))],
        [
            ("ppo with entropy bonus", ParallelLayout(tp=2, sp=True)),
            ("ppo with entropy bonus", ParallelLayout(cp=2)),
            ("gspo", ParallelLayout(pp=2)),
        ],
        [
            ("gspo", ParallelLayout(tp=2, sp=True)),
            ("gspo", ParallelLayout(dp=2)),
            ("ppo with entropy bonus", ParallelLayout(pp=2)),
            ("ppo with entropy bonus", ParallelLayout(dp=2)),
        ],
    ),
    ids=str,
)
def test_policy_gradient_of_layout_equals_one_process(kind, layout, model_of):
    loss_fn, config = policy_gradient_loss(POLICY_GRADIENTS[kind]), make_config(model_of("llama"))
    ours, theirs = (
        run_processes(gradients_of, x.apply(config), loss_fn, world_size=x.world_size)[0]
        for x in (layout, ParallelLayout())
    )
    assert ours[0] == pytest.approx(theirs[0], rel=1e-4, abs=1e-5)
    for name, gradient in theirs[1].items():
        scale = gradient.abs().max()
        torch.testing.assert_close(ours[1][name] / scale, gradient / scale, rtol=1e-3, atol=1e-4, msg=name)


def test_compare_rejects_scaled_gradient(outcomes):
    """The comparison itself: a scaled gradient of one small parameter must not pass."""
    plain, one = outcomes("llama")
    wrong = copy.deepcopy(one)
    wrong.gradients["model.layers.1.mlp.up_proj.weight"] *= 1.01
    assert not compare(wrong, plain).within()


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_shrink_model_makes_complete_model_for_layouts(family, model_of, tmp_path):
    """`mcore-rl layouts` runs on a small model of the same architecture, sized for the largest layout."""
    from mcore_rl.models.megatron.families import family_of
    from mcore_rl.models.megatron.model.hf_config import load_hf_config
    from mcore_rl.models.megatron.model.hf_directory import SafetensorsDirectory
    from mcore_rl.models.megatron.weights.conversion import check_hf_tensors

    config = make_config(model_of(family))
    layouts = [
        ParallelLayout(),
        ParallelLayout(tp=4, sp=True),
        ParallelLayout(pp=2, vpp=2),
        ParallelLayout(tp=4),
        ParallelLayout(dp=2, ep=2),
    ]
    shrink_model(config.model, tmp_path / "small", layouts)
    hf = load_hf_config(tmp_path / "small")
    check_hf_tensors(hf, SafetensorsDirectory(tmp_path / "small"))
    assert family_of(hf).num_layers == 8
    own_tables = {
        "AutoModelForCausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "AutoModelForImageTextToText": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }
    assert family == "mistral4" or hf.model_type in own_tables[family_of(hf).auto_class]  # not only by small_models
    for name, tensor in load_file(tmp_path / "small" / "model.safetensors").items():
        if name.endswith("tid2eid"):  # the router has a gradient only if the experts of a token differ
            assert all(len(set(experts)) == len(experts) for experts in tensor.tolist())
    small = config.model_copy(update={"model": config.model.model_copy(update={"path": tmp_path / "small"})})
    fits, refused = fitting(layouts, small)
    not_allowed = [ParallelLayout(tp=4) if has_experts(family) else ParallelLayout(dp=2, ep=2)]
    if family in ("gemma4_e", "gemma4_tower"):  # keys are not sent to other stages
        not_allowed.insert(0, ParallelLayout(pp=2, vpp=2))
    assert [layout for layout, _ in refused] == not_allowed
    assert fits == [layout for layout in layouts if layout not in not_allowed]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2_moe", {"decoder_sparse_step": 4}),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2, 3, 4, 5, 6]}),
        ("nemotron_h_moe", {"layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"]}),
    ],
)
def test_shrink_model_keeps_experts_of_mixture(family, changes, tmp_path):
    from mcore_rl.models.megatron.families import family_of
    from mcore_rl.models.megatron.model.hf_config import load_hf_config

    make_model(family, tmp_path / "large", num_hidden_layers=8, **changes)
    shrink_model(make_config(tmp_path / "large").model, tmp_path / "small", [ParallelLayout(dp=2, ep=2)])
    sparse = family_of(load_hf_config(tmp_path / "small")).experts.sparse_layers
    assert not sparse[0] and all(sparse[1:])


def test_parse_layouts_accepts_uneven_pipelines(model_of):
    from mcore_rl.config.parallel import own_split, parse_layouts

    assert parse_layouts(["pp=1,2", "first=1"]) == [ParallelLayout(pp=2, first=1)]
    assert parse_layouts(["pp=2", "vpp=1,2", "stages=E|t*4L,Et|t|t|tL"]) == [
        ParallelLayout(pp=2, stages="E|t*4L"),
        ParallelLayout(pp=2, vpp=2, stages="Et|t|t|tL"),
    ]
    with pytest.raises(UserError, match=r"--layouts 'stages=E\|x': pipeline_model_parallel_layout: cannot be read"):
        parse_layouts(["pp=2", "stages=E|x"])
    config = make_config(model_of("llama"))
    assert own_split(config.parallel, 4) is None
    assert own_split(ParallelLayout(pp=2, last=1).apply(config).parallel, 4) == ParallelLayout(pp=2, stages="Ettt|tL")
    with pytest.raises(UserError, match="has 3 layers; the model has 4"):
        own_split(ParallelLayout(pp=2, stages="Et|ttL").apply(config).parallel, 4)

"""Every feature gives the same numbers with Transformer Engine's modules as with the local layers on one process."""

from types import SimpleNamespace

import pytest
import torch
from float32 import FORWARD, approx32, assert_updates32
from layout_cases import LR, make_data, run_steps
from prefix_cases import make_pairs
from small_models import WITH_DELTA_NETS, and_long
from te_cases import EP2, TP2, counted_result, result_with_index, te_config

from mcore_rl.config.parallel import ParallelLayout
from mcore_rl.testing.layout_check import compare
from mcore_rl.testing.processes import run_cases, run_processes

ONE, CP2, PP2, DP2 = (ParallelLayout(**sizes) for sizes in ({}, {"cp": 2}, {"pp": 2}, {"dp": 2}))
GROUPED = {"moe_grouped_gemm": True}
LORA = {"rank": 4, "alpha": 8}
EXPERTS = {**LORA, "target_modules": ("q_proj", "experts.gate_up_proj", "experts.down_proj")}
FLEX = {"moe_token_dispatcher_type": "flex"}
OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}
CASES = {
    "llama one process": ("llama", ONE, {}),
    "qwen2 with YaRN and biases, one process": ("qwen2", ONE, {}),
    "qwen3 tp2 sp": ("qwen3", TP2, {}),
    "qwen3 tp2 cp2 sp": ("qwen3", ParallelLayout(tp=2, cp=2, sp=True), {}),
    "gemma3 tp2 sp": ("gemma3", TP2, {}),
    "windows cp2": ("windows", CP2, {}),
    "adapters tp2 sp": ("qwen3", TP2, {"lora": LORA}),
    "shared prefixes tp2 sp": ("qwen3", ParallelLayout(tp=2, sp=True, prefix=True), {}),
    "grouped experts ep2": ("qwen3_moe", EP2, {"model": GROUPED}),
    "adapters of grouped experts ep2": ("qwen3_moe", EP2, {"model": GROUPED, "lora": EXPERTS}),
    "flex dispatcher ep2": ("qwen3_moe", EP2, {"model": GROUPED, "parallel": FLEX}),
}
LONG_CASES = {
    "qwen3 one process": ("qwen3", ONE, {}),
    "qwen3 tp2": ("qwen3", ParallelLayout(tp=2), {}),
    "qwen3 cp2": ("qwen3", CP2, {}),
    "qwen3 pp2": ("qwen3", PP2, {}),
    "qwen3 dp2, overlaps": ("qwen3", DP2, {"parallel": OVERLAPS}),
    "tied embeddings pp2 vpp3": ("deep", ParallelLayout(pp=2, vpp=3), {}),
    "qwen2 tp2 sp": ("qwen2", TP2, {}),
    "phi3 one process": ("phi3", ONE, {}),
    "mistral one process": ("mistral", ONE, {}),
    "olmo2 tp2 sp": ("olmo2", TP2, {}),
    "gemma3 cp2": ("gemma3", CP2, {}),
    "adapters one process": ("qwen3", ONE, {"lora": LORA}),
    "adapters tp2": ("qwen3", ParallelLayout(tp=2), {"lora": LORA}),
    "adapters and shared prefixes tp2 sp": ("qwen3", ParallelLayout(tp=2, sp=True, prefix=True), {"lora": LORA}),
    "shared prefixes one process": ("qwen3", ParallelLayout(prefix=True), {}),
    "shared prefixes cp2": ("qwen3", ParallelLayout(cp=2, prefix=True), {}),
    "grouped experts, losses, shared prefixes, ep2": (
        "qwen3_moe",
        ParallelLayout(dp=2, ep=2, prefix=True),
        {"model": {**GROUPED, "moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.1}},
    ),
    "recomputed layers tp2 sp": ("qwen3", TP2, {"model": {"recompute_activations": True}}),
    "recomputed MLPs": ("qwen3", ONE, {"model": {"recompute_modules": ("mlp",)}}),
    "grouped experts one process": ("qwen3_moe", ONE, {"model": GROUPED}),
    "grouped experts, overlaps, ep2": ("qwen3_moe", EP2, {"model": GROUPED, "parallel": OVERLAPS}),
    "grouped experts tp2 ep2 etp1": ("qwen3_moe", ParallelLayout(tp=2, ep=2, etp=1, sp=True), {"model": GROUPED}),
    "grouped experts tp2 etp2": ("qwen3_moe", ParallelLayout(tp=2, etp=2, sp=True), {"model": GROUPED}),
    "grouped experts, losses, recomputed, pp2": (
        "qwen3_moe",
        PP2,
        {"model": {**GROUPED, "recompute_modules": ("moe",), "moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.1}},
    ),
    "adapters of experts ep2": ("qwen3_moe", EP2, {"lora": EXPERTS}),
    "adapters of grouped experts tp2 etp2": (
        "qwen3_moe",
        ParallelLayout(tp=2, etp=2, sp=True),
        {"model": GROUPED, "lora": EXPERTS},
    ),
    "adapters of grouped experts, overlaps, tp2 ep2 etp1": (
        "qwen3_moe",
        ParallelLayout(tp=2, ep=2, dp=2, etp=1, sp=True),
        {"model": GROUPED, "lora": EXPERTS, "parallel": OVERLAPS},
    ),
    "adapters of grouped experts, recomputed, pp2": (
        "qwen3_moe",
        PP2,
        {"model": {**GROUPED, "recompute_activations": True}, "lora": EXPERTS},
    ),
    "experts ep2": ("qwen3_moe", EP2, {}),
    "shared experts tp2 sp": ("qwen2_moe", TP2, {}),
    "groups of experts ep2": ("glm4_moe", EP2, {"model": GROUPED}),
    "mixtral tp2 sp": ("mixtral", TP2, {"model": GROUPED}),
    "latent attention tp2 sp": ("deepseek_v3", TP2, {"model": GROUPED}),
    "latent attention cp2": ("moonlight", CP2, {}),
    "chosen keys tp2 sp": ("deepseek_v32", TP2, {"model": GROUPED}),
    "chosen keys cp2": ("glm_moe_dsa", CP2, {}),
    "adapters of latent attention tp2 sp": ("deepseek_v3", TP2, {"lora": LORA}),
    "sinks and biases tp2 sp": ("gpt_oss", TP2, {}),
    "sinks and grouped biases tp2 sp": ("gpt_oss", TP2, {"model": GROUPED}),
    "sinks, adapters of grouped experts with biases, ep2": ("gpt_oss", EP2, {"model": GROUPED, "lora": EXPERTS}),
    "sinks and biases tp2 ep2 etp1": ("gpt_oss", ParallelLayout(tp=2, ep=2, etp=1, sp=True), {}),
    "flex dispatcher, losses, recomputed, tp2 ep2 etp1": (
        "qwen3_moe",
        ParallelLayout(tp=2, ep=2, etp=1, sp=True),
        {
            "model": {"recompute_modules": ("moe",), "moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.1},
            "parallel": FLEX,
        },
    ),
    "flex dispatcher tp2 ep2 etp2": (
        "qwen3_moe",
        ParallelLayout(tp=2, dp=2, ep=2, sp=True),
        {"model": GROUPED, "parallel": FLEX},
    ),
    "flex dispatcher, shared experts, adapters, pp2 ep2": (
        "qwen2_moe",
        ParallelLayout(pp=2, dp=2, ep=2),
        {"model": GROUPED, "parallel": FLEX, "lora": EXPERTS},
    ),
    "glm4 tp2 sp": ("glm4", TP2, {}),
    "olmo3 cp2": ("olmo3", CP2, {}),
    "seed_oss tp2 sp": ("seed_oss", TP2, {}),
    "ministral3 cp2": ("ministral3", CP2, {}),
    "delta nets tp2 sp": ("qwen3_5", TP2, {}),
    "delta nets and grouped experts ep2": ("qwen3_next", EP2, {"model": GROUPED}),
    "small values tp2 sp": ("mimo_v2_flash", TP2, {"model": GROUPED}),
    "chosen blocks tp2 sp": ("minimax_m3", TP2, {}),
    "chosen pools and gated streams tp2 sp": ("qwen4", TP2, {}),
    "streams and clamped grouped experts ep2": ("hy_v4", EP2, {"model": GROUPED}),
    "values of keys, capped logits tp2 sp": ("gemma4", TP2, {}),
    "grouped experts beside MLPs ep2": ("gemma4_moe", EP2, {"model": GROUPED}),
    "inputs of layers, shared keys tp2 sp": ("gemma4_e", TP2, {}),
    "mamba and grouped latent experts ep2": ("nemotron_h_moe", EP2, {"model": GROUPED}),
    "mamba, adapters of latent experts, flex dispatcher, ep2": (
        "nemotron_h_moe",
        EP2,
        {"model": GROUPED, "parallel": FLEX, "lora": {**EXPERTS, "target_modules": ["experts.up_proj", "in_proj"]}},
    ),
}


def comm_types(config):
    """Return the form of context parallelism that each layer's attention of Transformer Engine was built with, or the
    refusal."""
    from mcore_rl.errors import UserError
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    try:
        policy = MegatronPolicy(config)
    except UserError as error:
        return str(error)
    layers = policy.model.chunks[0].decoder.layers
    found = {layer.self_attention.core_attention.te_attention.cp_comm_type for layer in layers}
    policy.shutdown()
    return found


@pytest.mark.parametrize(("chosen", "since"), [("p2p", (2, 9)), ("a2a", (2, 10)), ("all_gather", (2, 20))])
def test_context_parallelism_communicates_as_chosen(chosen, since, model_of):
    """A version whose sources refuse packs in this form is told before any step."""
    import transformer_engine

    families = ("qwen3", "moonlight")
    cases = [(comm_types, te_config(model_of(name), CP2, {}, parallel={"cp_comm_type": chosen})) for name in families]
    (told, _), (of_latent, _) = run_cases(cases, world_size=2)
    assert of_latent == told
    if tuple(map(int, transformer_engine.__version__.split("+")[0].split(".")[:2])) >= since:
        assert told == {chosen}
    else:
        assert f"parallel.cp_comm_type: {chosen} with packs needs Transformer Engine 2.{since[1]}, not 2.9" in told


@pytest.mark.long
def test_heads_that_cannot_be_exchanged_are_refused(model_of):
    config = te_config(model_of("qwen3"), ParallelLayout(cp=4), {}, parallel={"cp_comm_type": "a2a"})
    told = run_processes(comm_types, config, world_size=4)[0]
    assert "must divide the 4 heads and 2 groups" in told or "needs Transformer Engine 2.10" in told


@pytest.fixture(scope="module")
def reference_of(tmp_path_factory, model_of):
    """Return a function from a case to the result of the local layers on one process, which is computed once."""
    made = {}

    def get(family, layout, changes):
        # The same numbers without shared prefixes, recomputation, overlaps, and with experts one after the other.
        kept = {key: x for key, x in changes.get("model", {}).items() if key.endswith("_coeff")}
        key = (family, layout.prefix, str(kept), str(changes.get("lora")))
        if key not in made:
            directory = tmp_path_factory.mktemp("adapter") / "adapter"
            config = te_config(model_of(family), ONE, kept, lora=changes.get("lora"), directory=directory, local=True)
            data = make_pairs() if layout.prefix else make_data()
            made[key] = run_processes(counted_result, config, data, world_size=1)[0][0]
        return made[key]

    return get


@pytest.mark.parametrize("name", and_long(list(CASES), list(LONG_CASES)))
def test_training_equals_local_layers(name, model_of, reference_of, tmp_path):
    """Loss, metrics, scores, every gradient and the weights after three steps."""
    family, layout, changes = {**CASES, **LONG_CASES}[name]
    config = te_config(model_of(family), layout, directory=tmp_path / "adapter", **changes)
    data = make_pairs() if layout.prefix else make_data()
    result, calls = run_processes(counted_result, config, data, world_size=layout.world_size)[0]
    difference = compare(result, reference_of(family, layout, changes))
    assert difference.within(gradients=5e-4 if family in WITH_DELTA_NETS else 1e-4), difference
    assert calls["Linear"] and calls["RMSNorm"]
    assert bool(calls["deep_ep"]) == (changes.get("parallel") == FLEX)
    if changes.get("model", {}).get("moe_grouped_gemm"):
        assert calls["GroupedLinear"]
    assert_attention_is_chosen(family, layout, calls)


@pytest.mark.parametrize(
    ("family", "changes"), [("qwen3", {"lora": LORA}), ("qwen3_moe", {"model": GROUPED, "lora": EXPERTS})]
)
def test_adapters_in_float32_beside_weights_in_bfloat16(family, changes, model_of, tmp_path):
    """Transformer Engine refuses parameters of another precision than the input's, unless it is told otherwise."""
    model = {**changes.get("model", {}), "dtype": "bfloat16"}
    losses = []
    for local in (True, False):
        config = te_config(
            model_of(family), ONE, model, lora=changes["lora"], directory=tmp_path / str(local), local=local
        )
        (result, calls) = run_processes(counted_result, config, make_data(), world_size=1)[0]
        losses.append(result.metrics["loss"])
        assert local or calls["Linear"]
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)


GEMMA4 = "gemma4", "gemma4_moe", "gemma4_e"
WITH_CHOSEN_KEYS = "deepseek_v32", "glm_moe_dsa", "hy_v4", "minimax_m3", "qwen4"


def assert_attention_is_chosen(family, layout, calls):
    """Every layer runs Transformer Engine's attention, except on packs and in layers that it does not support."""
    partly_local = "windows", "gemma3", "olmo3", "gpt_oss", *WITH_CHOSEN_KEYS, "mimo_v2_flash", *GEMMA4
    if family in partly_local or layout.prefix:
        assert calls["DotProductAttention"] < calls["CoreAttention"]
    else:
        assert calls["DotProductAttention"] == calls["CoreAttention"] > 0


@pytest.mark.parametrize(("family", "layout"), and_long([("windows", CP2)], [("gemma3", ONE), ("gemma3", TP2)]))
def test_local_attention_that_needs_index_tensors(family, layout, model_of, reference_of):
    """The layers that fall back send the index tensors of the pack; on the CPU nothing else needs them."""
    config = te_config(model_of(family), layout)
    result, calls = run_processes(result_with_index, config, make_data(), world_size=layout.world_size)[0]
    difference = compare(result, reference_of(family, layout, {}))
    assert difference.within(), difference
    assert_attention_is_chosen(family, layout, calls)


def test_window_of_one_token_less_than_the_longest_sequence(model_of):
    """The longest sequence of the only pack has 14 tokens, and a token sees 13."""
    data = make_data()
    data["input_lengths"].clamp_(max=14)
    for name in ("token_mask", "input_ids"):
        data[name][:, 14:] = 0
    results = []
    for local in (True, False):
        config = te_config(model_of("windows"), ONE, local=local)
        results.append(run_processes(counted_result, config, data, world_size=1)[0])
    (expected, _), (result, calls) = results
    difference = compare(result, expected)
    assert difference.within(), difference
    assert calls["CoreAttention"] and not calls["DotProductAttention"]


def modules_of(config):
    """Return the types of the modules of a first layer by name, and the modules that add weight gradients to the fp32
    buffer."""
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=10)
    layer, described = policy.model.chunks[0].decoder.layers[0], policy.describe_optimizer()
    kinds = {name: type(module).__name__ for name, module in layer.named_modules()}
    fused = {name for name, module in layer.named_modules() if getattr(module, "fuse_wgrad_accumulation", False)}
    policy.shutdown()
    return kinds, fused, described


@pytest.mark.parametrize(("family", "output"), [("qwen3", "TERowLinear"), ("gemma3", "TENormedRowLinear")])
def test_each_module_of_a_layer_is_of_transformer_engine(family, output, model_of):
    kinds, fused, described = run_processes(modules_of, te_config(model_of(family), ONE), world_size=1)[0]
    linears = {
        "self_attention.linear_qkv": "TEColumnLinear",
        "self_attention.linear_proj": output,
        "mlp.linear_fc1": "TEColumnLinear",
        "mlp.linear_fc2": output,
    }
    norms = ("input_layernorm", "pre_mlp_layernorm", "self_attention.q_layernorm", "self_attention.k_layernorm")
    assert linears.items() <= kinds.items()
    assert {kinds[name] for name in norms} == {"RMSNorm"}
    assert kinds["self_attention.core_attention"] == "TEPackedCausalAttention"
    assert fused == set(linears)
    assert described.endswith("fp32 state, fused weight gradients")


def trained_on(config, save_to, load_from, steps):
    metrics, weights, saved = run_steps(config, save_to, load_from, steps)
    return [step["loss"] for step in metrics], weights, saved


@pytest.mark.parametrize(
    "family, layout, model",
    and_long(
        [("qwen3", TP2, {})],
        [
            ("qwen3_moe", EP2, GROUPED),
            ("gpt_oss", EP2, GROUPED),
            ("qwen3_moe", EP2, {**GROUPED, "lora": EXPERTS}),
            ("gemma3", CP2, {}),
        ],
    ),
)
def test_checkpoint_resumes_under_the_other_implementation(family, layout, model, model_of, tmp_path):
    """Two steps, a checkpoint, one step: on each implementation, and from each one's checkpoint on the other."""
    configs = {
        local: te_config(model_of(family), ONE if local else layout, model, local=local) for local in (True, False)
    }
    sizes = {True: 1, False: layout.world_size}
    whole, saved = {}, {}
    for local, config in configs.items():
        arguments = (config, tmp_path / str(local), None)
        _, _, saved[local] = run_processes(trained_on, *arguments, 2, world_size=sizes[local])[0]
        whole[local] = run_processes(trained_on, config, tmp_path / f"whole {local}", None, 3, world_size=sizes[local])[
            0
        ]
    for local, config in configs.items():
        losses, weights, _ = run_processes(
            trained_on, config, tmp_path / f"resumed {local}", saved[not local], 1, world_size=sizes[local]
        )[0]
        assert losses[-1] == approx32(whole[not local][0][-1], FORWARD)
        for name, weight in weights.items():
            assert_updates32(weight, whole[not local][1][name], 3 * LR, what=name)


@pytest.mark.parametrize(
    "optimizer", [{"name": "muon"}, {"moments_dtype": "bfloat16", "adam_beta2": 0.95}], ids=lambda one: next(iter(one))
)
def test_updates_other_than_those_of_fused_adam_resume(optimizer, model_of, tmp_path):
    """Muon, and moments in bfloat16, have states that FusedAdam does not know."""
    config = te_config(model_of("qwen3"), ONE)
    config = config.model_copy(update={"optimizer": config.optimizer.model_copy(update=optimizer)})
    *_, saved = run_processes(trained_on, config, tmp_path / "first", None, 2, world_size=1)[0]
    losses, resumed, _ = run_processes(trained_on, config, tmp_path / "resumed", saved, 1, world_size=1)[0]
    expected, whole, _ = run_processes(trained_on, config, tmp_path / "whole", None, 3, world_size=1)[0]
    assert losses == approx32(expected[-1:], FORWARD)
    for name, weight in resumed.items():
        assert_updates32(weight, whole[name], 3 * LR, what=name)


def attention_for_gpus(_):
    """Return which attention would compute for tensors on a GPU, by dtype and size of heads; neither runs here."""
    from mcore_rl.models.megatron.attention.attention import PackedCausalAttention
    from mcore_rl.models.megatron.model.te_layers import TEPackedCausalAttention

    attention = TEPackedCausalAttention.__new__(TEPackedCausalAttention)
    torch.nn.Module.__init__(attention)
    attention.window, attention.softmax_offset, attention.te_attention = None, None, lambda *_, **__: "te"
    attention.layer_number = 1
    visible = SimpleNamespace(layout=SimpleNamespace(segment_lengths=[5]), ensure_on_device=lambda: None)
    pack = SimpleNamespace(cu_seqlens=torch.tensor([0, 5], dtype=torch.int32), visible=visible, chosen={})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackedCausalAttention, "forward", lambda *_, **__: "local")
        return {
            (dtype, size): attention.forward(
                SimpleNamespace(is_cuda=True, dtype=dtype, shape=(5, 2, size)), *[None] * 3, packed_seq_params=pack
            )
            for dtype, size in ((torch.float32, 64), (torch.bfloat16, 64), (torch.bfloat16, 512))
        }


def test_attention_in_fp32_or_with_large_heads_on_a_gpu_is_local():
    chosen = run_processes(attention_for_gpus, None, world_size=1)[0]
    assert list(chosen.values()) == ["local", "te", "local"], chosen

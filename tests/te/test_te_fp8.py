"""Training in FP8 by Transformer Engine's modules, with an emulation of FP8.

The emulation rounds values as the recipes prescribe, and multiplies them in fp32. On a GPU the order of additions
differs.
"""

import pytest
import torch
from fp8_cases import (
    Opened,
    fp8_config,
    fp8_result,
    make_wide_model,
    pickled,
    te_modules,
    trained_policy,
    whole_difference,
)
from generation_cases import make_prompts
from layout_cases import make_data, plain_loss, with_experts
from prefix_cases import make_pairs
from small_models import and_long, make_tokenizer

from mcore_rl.algorithms.build_loss import build_loss
from mcore_rl.config.parallel import ParallelLayout
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.testing.layout_check import compare, invent_adapter
from mcore_rl.testing.processes import run_cases, run_processes

ONE, TP2, PP2, DP2 = (ParallelLayout(**sizes) for sizes in ({}, {"tp": 2, "sp": True}, {"pp": 2}, {"dp": 2}))
LAYOUTS = {"tp2": ParallelLayout(tp=2), "tp2 sp": TP2, "pp2": PP2, "cp2": ParallelLayout(cp=2), "dp2": DP2}
OF_MIXTURES = {"ep2": ParallelLayout(dp=2, ep=2), "tp2 sp": TP2, "pp2": PP2}
GROUPED, SEQUENTIAL = {"moe_grouped_gemm": True}, {"moe_grouped_gemm": False}
OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}
FLOAT32_SCALES = {"recipe": "blockwise", "scales": "float32"}


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory):
    made = {}

    def get(family):
        if family not in made:
            made[family] = make_wide_model(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


@pytest.fixture(scope="session")
def results(wide_model):
    """Return a function from cases to their results. A case is a family, a layout, FP8 and changes of the model.

    Cases that have not been computed share one start of processes.
    """
    made = {}

    def get(*cases):
        by_key = {str(case): case for case in cases}
        new = [key for key in by_key if key not in made]
        if new:
            configs = [fp8_config(wide_model(by_key[key][0]), *by_key[key][1:]) for key in new]
            world_size = max(by_key[key][1].world_size for key in new)
            calls = [(fp8_result, config, make_data()) for config in configs]
            made.update(zip(new, (ranks[0] for ranks in run_cases(calls, world_size=world_size)), strict=True))
        return [made[str(case)] for case in cases]

    return get


def assert_same(found, expected):
    """Check that results are equal bit for bit, except the gradient norm: a float64 sum over parameters or stages."""
    norms, others = zip(*((step["grad_norm"], {**step, "grad_norm": None}) for step in found.steps), strict=True)
    assert others == tuple({**step, "grad_norm": None} for step in expected.steps)
    assert norms == pytest.approx([step["grad_norm"] for step in expected.steps], rel=1e-14)  # float64
    assert torch.equal(found.scores, expected.scores)
    assert all(torch.equal(found.gradients[name], gradient) for name, gradient in expected.gradients.items())


def test_fp8_changes_the_numbers(results):
    """Otherwise the other tests would show nothing. The error of FP8 itself is a tenth of the gradient and more."""
    recipes = "blockwise", "mxfp8", "tensorwise", FLOAT32_SCALES
    without, *found = results(*(("qwen3", ONE, fp8) for fp8 in (None, *recipes)))
    for result in found:
        assert 1e-5 < compare(result, without).loss < 2e-2
        assert 0.1 < whole_difference(result.gradients, without.gradients) < 0.3
    assert compare(found[0], found[3]).gradients > 1e-2  # the forms of blockwise's scales


def test_a_trainer_with_the_samplers_scales_has_the_smallest_mismatch(results):
    """A sampler with float32 scales of blocks, as vLLM's. Beside it, powers of two are worse than no FP8 in training:
    two independent errors add up."""
    sampler, *trainers = results(*(("qwen3", ONE, fp8) for fp8 in (FLOAT32_SCALES, None, "blockwise", "tensorwise")))
    is_token = sampler.scores != 0
    errors = [float((x.scores - sampler.scores).abs().exp()[is_token].mean()) for x in (sampler, *trainers)]
    print("token_mult_prob_error", *(f"{error:.3f}" for error in errors))
    same, without, powers, tensorwise = errors
    assert same == 1 < 1.05 < without < tensorwise and without < powers < 1.2


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_layouts_round_the_same_values(recipe, results):
    """Blocks, and scales that are powers of two, make the rounding of FP8 the same in every layout. Exceptions are
    single values that another order of additions moves across a boundary, and, in the weights' gradients, blocks of
    other tokens."""
    one, without = results(("qwen3", ONE, recipe), ("qwen3", ONE, None))
    for name, found in zip(LAYOUTS, results(*(("qwen3", layout, recipe) for layout in LAYOUTS.values())), strict=True):
        assert_equal_but_for_rounding(name, found, one, without)


@pytest.mark.parametrize(
    ("recipe", "model"),
    and_long([("blockwise", GROUPED), ("mxfp8", GROUPED)], [("blockwise", SEQUENTIAL)], [("mxfp8", SEQUENTIAL)]),
)
def test_layouts_of_mixtures_round_the_same_values(recipe, model, results):
    one, without = results(("qwen3_moe", ONE, recipe, model), ("qwen3_moe", ONE, None, model))
    found = results(*(("qwen3_moe", layout, recipe, model) for layout in OF_MIXTURES.values()))
    for name, result in zip(OF_MIXTURES, found, strict=True):
        assert_equal_but_for_rounding(name, result, one, without)


def assert_equal_but_for_rounding(name, found, one, without):
    """Check that a layout changes at most a fifth of what FP8 changes in the scores and in the whole gradient."""
    difference, by_fp8 = compare(found, one), compare(one, without)
    whole, of_fp8 = (whole_difference(a.gradients, b.gradients) for a, b in ((found, one), (one, without)))
    print(f"{name}: loss {difference.loss:.1e} scores {difference.scores:.1e} gradients {whole:.1e}", end=" ")
    print(f"(worst {difference.gradients:.1e})")
    if name == "pp2":
        return assert_same(found, one)
    assert difference.loss < 1e-4 and difference.scores < by_fp8.scores / 5, (name, difference, by_fp8.scores)
    assert whole < of_fp8 / 5, (name, whole, of_fp8)
    assert difference.gradients < 5e-2, (name, difference)


def test_replicas_with_overlaps_are_exact(wide_model):
    """The weights are rounded after they have been gathered."""
    configs = [fp8_config(wide_model("qwen3"), DP2, "blockwise", parallel=x) for x in ({}, OVERLAPS)]
    plain, overlapped = (ranks[0] for ranks in run_cases([(fp8_result, c, make_data()) for c in configs], world_size=2))
    assert_same(overlapped, plain)


def test_experts_one_after_the_other_equal_grouped_ones(results):
    sequential, grouped = results(*(("qwen3_moe", ONE, "blockwise", model) for model in (SEQUENTIAL, GROUPED)))
    assert_same(grouped, sequential)
    assert all(value == 0 for name, value in grouped.metrics.items() if name.startswith("moe_dropped"))


def padded_with(config, data, token):
    """Return the result with `token` in the padding of the packs."""
    from mcore_rl.distributed.packs import PackLayout

    pack_rows = PackLayout.pack_rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackLayout, "pack_rows", lambda self, rows, fill=0: pack_rows(self, rows, fill or token))
        return fp8_result(config, data)


@pytest.mark.parametrize(
    ("family", "layout"),
    and_long(
        [("qwen3", ONE), ("seed_oss", TP2), ("qwen3_moe", ONE)],
        [("gpt_oss", ONE)],
        [("qwen2_moe", TP2), ("gemma3", ONE)],
    ),
)
def test_padding_changes_no_number(family, layout, wide_model):
    """The families have biases in projections, experts, or a state. `tensorwise` sees every value of a matrix."""
    configs = [fp8_config(wide_model(family), layout, recipe) for recipe in ("blockwise", "tensorwise")]
    cases = [(padded_with, config, make_data(), token) for config in configs for token in (0, 77)]
    found = [ranks[0] for ranks in run_cases(cases, world_size=layout.world_size)]
    for zero, other in (found[:2], found[2:]):
        assert_same(other, zero)


def scores_and_weights(config, data):
    """Return the results of the test below, after two updates."""
    from mcore_rl.data.batching import global_valid_counts
    from mcore_rl.models.megatron.layers.fp8 import release_fp8_copies
    from mcore_rl.models.megatron.weights.conversion import export_hf_weights
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=100, rows_per_unit=2, keep_reference=True)
    loss_fn, own = build_loss(config, None), policy.own_rows(data)
    found = {"before": policy.get_logprobs(data)["logprobs"]}
    found["reference"] = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
    found["evaluated"] = policy.forward(own, loss_fn, global_valid_counts(own)).loss
    found["losses"] = [policy.train(own, loss_fn)["loss"] for _ in range(2)]
    found["after"] = policy.get_logprobs(data)["logprobs"]
    found["reference after"] = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
    found["again"] = policy.get_logprobs(data)["logprobs"]
    found["exported"] = {name: x.clone() for name, x in export_hf_weights(policy.model)}
    masters = export_hf_weights(policy.model, lambda p: getattr(p, "main_param", p).detach().view(p.shape))
    found["masters"] = {name: x.clone() for name, x in masters}
    found["states"] = {name: module.get_extra_state().numel() for name, module in te_modules(policy).items()}
    release_fp8_copies(policy.model.chunks)
    found["fresh"] = policy.get_logprobs(data)["logprobs"]
    policy.memory.offload_all()
    found["copies"] = sum(len(module._fp8_workspaces) for module in te_modules(policy).values())
    policy.memory.restore()
    found["restored"] = policy.get_logprobs(data)["logprobs"]
    policy.shutdown()
    return found


@pytest.mark.parametrize("dtype", and_long(["float32"], ["bfloat16"]))
def test_all_passes_are_in_fp8_and_weights_are_not(dtype, wide_model):
    """Scoring, evaluation, reference and training compute the same numbers, and read weights that are up to date."""
    data = make_data()
    config = fp8_config(wide_model("qwen3"), ONE, "blockwise", {"dtype": dtype})
    found = run_processes(scores_and_weights, config, data, world_size=1)[0]
    expected, _ = plain_loss(found["before"].double(), data, config)
    assert found["losses"][0] == found["evaluated"] == pytest.approx(float(expected), rel=1e-5)
    assert torch.equal(found["before"], found["reference"])
    assert torch.equal(found["before"], found["reference after"])
    assert not torch.equal(found["before"], found["after"])
    for name in ("again", "fresh", "restored"):
        assert torch.equal(found["after"], found[name]), name
    for name, weight in found["exported"].items():
        assert torch.equal(weight, found["masters"][name].to(weight.dtype)), name
    assert any("te_attention" in name for name in found["states"]) and not any(found["states"].values())
    assert found["copies"] == 0


def loaded_states(config):
    """Load a state of Transformer Engine's kind into every module; return how many, and how often it was unpickled."""
    policy, _ = trained_policy(config, 1)
    modules = te_modules(policy)
    for module in modules.values():
        # Megatron's wrapper of grouped layers merges the states of all experts, and fails if one is missing.
        count = getattr(module, "num_gemms", 1)
        states = {f"_extra_state{index or ''}": pickled() for index in range(count)}
        module.load_state_dict({**module.state_dict(), **states}, strict=False)
        if count > 1:
            assert [state.numel() for state in module._split_extra_state(module.get_extra_state())] == [0] * count
    policy.shutdown()
    return len(modules), Opened.times


@pytest.mark.parametrize("family", ["qwen3_moe"])
def test_checkpoints_run_no_code(family, wide_model):
    """Transformer Engine writes a pickled recipe of each module that has computed in FP8, and unpickles it."""
    assert pickled().numel() and Opened.times == 0
    count, opened = run_processes(
        loaded_states, fp8_config(wide_model(family), ONE, "blockwise", GROUPED), world_size=1
    )[0]
    assert count > 6 and opened == 0


def continued(config, directory, load, steps):
    """Return the losses of `steps` updates, the weights after them, the checkpoint, and the scores at the start."""
    from mcore_rl.models.megatron.weights.conversion import export_hf_weights

    policy, _ = trained_policy(config, 0)
    done = policy.load_checkpoint(load).state["step"] if load else 0
    data = make_data()
    scores = policy.get_logprobs(data)["logprobs"]
    losses = [policy.train(policy.own_rows(data), build_loss(config, None))["loss"] for _ in range(steps)]
    saved = policy.save_checkpoint(directory, done + steps, {})
    weights = dict(export_hf_weights(policy.model))
    policy.shutdown()
    return losses, weights, saved, scores


def test_a_run_resumes_without_fp8_and_back(wide_model, tmp_path):
    """Two steps in FP8 on two ranks, then one without FP8 on one process, then one in FP8."""
    grouped = wide_model("qwen3_moe")
    two_ranks = fp8_config(grouped, ParallelLayout(dp=2, ep=2), "blockwise", GROUPED)
    fp8, plain = (fp8_config(grouped, ONE, recipe, GROUPED) for recipe in ("blockwise", None))
    _, _, saved, _ = run_processes(continued, two_ranks, tmp_path / "a", None, 2, world_size=2)[0]
    cases = [(continued, config, tmp_path / name, saved, 1) for name, config in (("b", plain), ("c", fp8))]
    without, within = (ranks[0] for ranks in run_cases(cases, world_size=1))
    again = run_processes(continued, fp8, tmp_path / "d", without[2], 0, world_size=1)[0]
    assert without[0] != within[0] and without[0] == pytest.approx(within[0], rel=2e-2)
    assert all(torch.equal(again[1][name], weight) for name, weight in without[1].items())
    assert not torch.equal(without[3], within[3]) and not torch.equal(within[3], again[3])
    assert not any(b"recipe" in file.read_bytes() for file in saved.rglob("*.distcp"))


def modules_in_fp8(config):
    """Return, for each of this rank's layers, whether its linear layers computed in FP8, by number in the model."""
    policy, _ = trained_policy(config, 1)
    layers = [layer for chunk in policy.model.chunks for layer in chunk.decoder.layers]
    found = {layer.layer_number - 1: layer.mlp.linear_fc1.fp8 for layer in layers}
    policy.shutdown()
    return found


@pytest.mark.parametrize(
    ("layout", "section", "expected"),
    and_long(
        [(PP2, {"first_layers": 2}, [False, False, True, True, True, True])],
        [(ParallelLayout(pp=2, vpp=3), {"last_layers": 1}, [True, True, True, True, True, False])],
    ),
)
def test_first_and_last_layers_keep_their_precision(layout, section, expected, wide_model):
    config = fp8_config(wide_model("deep"), layout, {"recipe": "mxfp8", **section})
    ranks = run_processes(modules_in_fp8, config, world_size=2)
    assert [value for _, value in sorted((ranks[0] | ranks[1]).items())] == expected


def form_of_scales(config):
    """Return the forms of scales that Transformer Engine uses, and the policy's description."""
    from transformer_engine.common.recipe import Float8BlockScaling

    policy, _ = trained_policy(config, 0)
    names = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
    forms = {getattr(Float8BlockScaling(), name).power_2_scale for name in names}
    told = policy.describe_fp8()
    policy.shutdown()
    return forms, told


def test_the_configuration_chooses_the_form_of_the_scales(wide_model):
    """Transformer Engine is imported, and has read its environment variable, before the configuration is known."""
    configs = [fp8_config(wide_model("qwen3"), ONE, fp8) for fp8 in (FLOAT32_SCALES, "blockwise")]
    cases = [(form_of_scales, config) for config in configs]
    (first, told), (second, told_second) = (ranks[0] for ranks in run_cases(cases, world_size=1))
    assert (first, second) == ({False}, {True})
    assert told == "blockwise, with scales in float32, in 2 of 2 layers; packs are padded to multiples of 128 tokens"
    assert "with scales that are powers of two" in told_second


RECOMPUTED = [("qwen3_moe", {"recompute_modules": ("moe",)})]
RECOMPUTED_TOO = [
    ("qwen3", {"recompute_activations": True}),
    ("qwen3", {"recompute_modules": ("mlp",)}),
    ("qwen3_moe", {"recompute_activations": True, **GROUPED}),
]


@pytest.mark.parametrize(("family", "model"), and_long(RECOMPUTED, RECOMPUTED_TOO))
def test_recomputation_is_in_fp8(family, model, results):
    """The backward pass runs outside of the context of FP8."""
    grouped = {"moe_grouped_gemm": model.get("moe_grouped_gemm", False)}
    kept, recomputed = results((family, ONE, "blockwise", grouped), (family, ONE, "blockwise", {**grouped, **model}))
    assert_same(recomputed, kept)


@pytest.mark.long
def test_recomputation_of_shared_experts_is_in_fp8(results):
    """Recomputation adds the gradients of the layer's input in another order, so no bits are compared."""
    changes = SEQUENTIAL, {**SEQUENTIAL, "recompute_modules": ("shared_experts",)}
    difference = compare(*results(*(("qwen2_moe", ONE, "blockwise", model) for model in changes)))
    assert difference.loss == 0 and difference.gradients < 2e-2


def sampled_after_update(config):
    """Sample, update the weights, and sample again; return the largest difference of a token's log-probability from
    the trainer's in the second sample."""
    from mcore_rl.models.generation.megatron.generation import MegatronGeneration
    from mcore_rl.models.generation.sampling import SamplingParams

    policy, _ = trained_policy(config, 1)
    params, data = SamplingParams(max_new_tokens=12), make_data()
    prompts = make_prompts().select_indices(list(range(12)))  # whole pairs, as the policy scores them
    generation = MegatronGeneration(policy.model, params, 100, make_tokenizer(), 64, prefill_tokens=100)
    generation.generate(prompts, False)
    for _ in range(3):
        policy.train(policy.own_rows(data), build_loss(config, None))
    policy.finish_param_gather()
    out = generation.generate(prompts, False)
    lengths = out["unpadded_sequence_lengths"]
    rows = BatchedDataDict(input_ids=out["output_ids"], input_lengths=lengths, sample_mask=torch.ones(len(lengths)))
    column = torch.arange(rows["input_ids"].shape[1])[None]
    is_response = (column >= prompts["input_lengths"][:, None]) & (column < lengths[:, None])
    difference = (policy.get_logprobs(rows)["logprobs"] - out["logprobs"]) * is_response
    policy.shutdown()
    return float(difference.abs().max()), float(difference.abs().sum() / is_response.sum())


@pytest.mark.parametrize(
    ("layout", "family", "fp8"),
    and_long(
        [(ONE, "qwen3", "blockwise"), (TP2, "qwen3_moe", "mxfp8")],
        [(TP2, "qwen3", "blockwise")],
        [(ONE, "qwen3", FLOAT32_SCALES), (PP2, "qwen3", "blockwise")],
    ),
)
def test_sampling_reads_weights_that_are_up_to_date(layout, family, fp8, wide_model):
    """Sampling and scoring have other numbers of tokens, so single values are rounded the other way. Old FP8 copies of
    the weights would differ much more."""
    config = fp8_config(wide_model(family), layout, fp8)
    data = config.data.model_copy(update={"max_sequence_length": 100})
    config = config.model_copy(update={"data": data, "optimizer": config.optimizer.model_copy(update={"lr": 5e-3})})
    largest, mean = run_processes(sampled_after_update, config, world_size=layout.world_size)[0]
    print(f"sampling against scoring: largest {largest:.3f}, mean {mean:.4f}")
    assert largest < 0.2 and mean < 0.02


def test_adapters_and_shared_prefixes(wide_model, tmp_path):
    """Adapters stay in fp32 beside products in FP8; packs with shared prefixes are padded as others are."""
    made, data = [], make_pairs()
    for layout in (ONE, TP2):
        shared = ParallelLayout(tp=layout.tp, sp=layout.sp, prefix=True)
        config = fp8_config(wide_model("qwen3"), shared, "blockwise", {"lora": {"rank": 4, "alpha": 8}})
        config = config.model_copy(update={"model": invent_adapter(config.model, tmp_path / "adapter")})
        made.append(run_processes(fp8_result, config, data, world_size=layout.world_size)[0])
    difference = compare(*made)
    assert difference.loss < 1e-3 and difference.scores < 2e-3 and difference.gradients < 5e-2, difference


def test_replayed_experts(wide_model):
    """Some of the recorded experts are unknown, so the router chooses."""
    data = with_experts(make_data(), 1, 4, 2)
    configs = [
        fp8_config(wide_model("qwen3_moe"), *case) for case in ((ONE, None), (ONE, "blockwise"), (TP2, "blockwise"))
    ]
    without, one, found = (ranks[0] for ranks in run_cases([(fp8_result, c, data) for c in configs], world_size=2))
    assert_equal_but_for_rounding("tp2 sp", found, one, without)

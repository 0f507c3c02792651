"""Tests of the values that depend on the device."""

import os
import re
import shutil
import subprocess
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
from programs import ROOT
from small_models import make_config

from mcore_rl.config import GRPOConfig, SFTConfig
from mcore_rl.errors import UserError


def config_of(model=None, parallel=None):
    values = {"output_dir": "out", "model": {"path": "model", **(model or {})}, "data": {"train": "data.jsonl"}}
    return SFTConfig.model_validate({**values, "parallel": parallel or {}})


def chosen(config, **device):
    config = config.for_device(**{"te_problem": "is not installed", "simulates": False, **device})
    overlaps = config.parallel.overlap_grad_reduce, config.parallel.overlap_param_gather
    return config.model.dtype, config.model.transformer_impl, *overlaps


def test_auto_is_chosen_by_the_device():
    config = config_of()
    assert chosen(config, on_gpu=False) == ("float32", "local", False, False)
    assert chosen(config, on_gpu=False, te_problem=None) == ("float32", "local", False, False)
    assert chosen(config, on_gpu=True) == ("bfloat16", "local", True, True)
    assert chosen(config, on_gpu=True, te_problem=None) == ("bfloat16", "transformer_engine", True, True)
    assert chosen(config_of({"dtype": "float32"}), on_gpu=True, te_problem=None)[1] == "local"
    assert chosen(config, on_gpu=True, te_problem=None, simulates=True) == ("bfloat16", "local", True, True)


def test_given_values_are_kept():
    values = {"dtype": "float32", "transformer_impl": "local"}, {"overlap_grad_reduce": False}
    assert chosen(config_of(*values), on_gpu=True, te_problem=None) == ("float32", "local", False, False)
    explicit = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    assert chosen(config_of(None, explicit), on_gpu=False) == ("float32", "local", True, True)
    te = {"transformer_impl": "transformer_engine"}
    assert chosen(config_of(te), on_gpu=False, te_problem=None)[1] == "transformer_engine"
    assert chosen(config_of(te), on_gpu=True, simulates=True)[1] == "local"


def test_experts_are_grouped_on_gpus_in_bfloat16():
    def grouped(model=None, **device):
        device = {"te_problem": "is not installed", "simulates": False, **device}
        return config_of(model).for_device(**device).model.moe_grouped_gemm

    assert grouped(on_gpu=True) == "if_possible" and grouped(on_gpu=False) is False
    assert grouped({"dtype": "float32"}, on_gpu=True) is False
    assert grouped({"moe_grouped_gemm": False}, on_gpu=True) is False
    assert grouped({"moe_grouped_gemm": True}, on_gpu=False) is True


@pytest.mark.parametrize(
    ("family", "changes", "is_grouped"),
    [("llama", {}, False), ("qwen3_moe", {}, True), ("qwen3_moe", {"moe_intermediate_size": 33}, False)],
)
def test_experts_are_grouped_where_their_sizes_fit(family, changes, is_grouped):
    """A dense model and experts of another width are not refused, but computed one after the other."""
    from mcore_rl.models.megatron.families import family_of
    from mcore_rl.models.megatron.model.hf_config import check_model_fits, uses_grouped_gemm

    given = {"dtype": "bfloat16", "moe_grouped_gemm": "if_possible", "transformer_impl": "local"}
    config, hf = config_of(given), make_config(family, **changes)
    check_model_fits(hf, config.parallel, 64, config.model)
    assert uses_grouped_gemm(family_of(hf), config.model, config.parallel) is is_grouped
    if changes:
        with pytest.raises(UserError, match=r"model.moe_grouped_gemm: in bfloat16 .*\(33\) must be a multiple of 8"):
            check_model_fits(hf, config.parallel, 64, config_of({**given, "moe_grouped_gemm": True}).model)


def test_a_gather_that_overlaps_makes_the_reduction_overlap():
    assert chosen(config_of(None, {"overlap_param_gather": True}), on_gpu=False)[2:] == (True, True)
    with pytest.raises(ValueError, match="overlap_param_gather: needs overlap_grad_reduce=true"):
        config_of(None, {"overlap_grad_reduce": False, "overlap_param_gather": True})


def test_choosing_twice_changes_nothing():
    once = config_of().for_device(on_gpu=True, te_problem=None, simulates=False)
    assert once.for_device(on_gpu=False, te_problem=None, simulates=False) == once


def test_missing_transformer_engine_is_refused():
    with pytest.raises(UserError, match="Transformer Engine is not installed; install it with pip install"):
        chosen(config_of({"transformer_impl": "transformer_engine"}), on_gpu=True)
    with pytest.raises(UserError, match=r"Transformer Engine needs a GPU; set model\.transformer_impl=local$"):
        chosen(config_of({"transformer_impl": "transformer_engine"}), on_gpu=False, te_problem="needs a GPU")


def pretend_te(version, is_whole, monkeypatch):
    """Put an empty Transformer Engine of this version among the imported modules; if not whole, without `pytorch`."""
    package = ModuleType("transformer_engine")
    package.__spec__, package.__path__ = ModuleSpec("transformer_engine", None), []
    package.__version__ = version
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    if is_whole:
        monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", ModuleType("transformer_engine.pytorch"))
    else:
        monkeypatch.delitem(sys.modules, "transformer_engine.pytorch", raising=False)


@pytest.mark.parametrize(
    ("version", "is_warned"),
    [("2.9.0", False), ("2.20.2", False), ("2.20.9+1a2b3c", False), ("2.21.0", True), ("3.0.1", True)],
)
def test_newer_transformer_engine_than_checked_is_used_with_a_warning(version, is_warned, monkeypatch):
    from mcore_rl import platform

    pretend_te(version, True, monkeypatch)
    monkeypatch.setattr(platform, "te_problem", lambda: None)
    warning = platform.te_warning()
    assert (warning is not None) == is_warned
    assert warning is None or warning.startswith(f"Transformer Engine {version} is newer than 2.20, the newest version")


@pytest.mark.parametrize(
    ("version", "is_whole", "problem"),
    [
        ("2.5.0", True, "has version 2.5.0; 2.9 or newer is needed"),
        ("2.8.1+abc", True, r"has version 2.8.1\+abc; 2.9 or newer is needed"),
        ("2.9.0", False, r"cannot be imported \(ModuleNotFoundError: No module named 'transformer_engine.pytorch'"),
        ("2.10.0", True, "needs a GPU, and torch sees none"),
        ("2.10.0+cpu", True, None),
        ("2.21.0+cpu", True, None),
    ],
)
def test_transformer_engine_that_cannot_be_used_is_refused(version, is_whole, problem, monkeypatch):
    from mcore_rl import platform

    pretend_te(version, is_whole, monkeypatch)
    found = platform.te_problem.__wrapped__()
    assert (found is None) == (problem is None)
    config = config_of({"transformer_impl": "transformer_engine"})
    if problem is None:
        assert chosen(config, on_gpu=True, te_problem=found)[1] == "transformer_engine"
    else:
        with pytest.raises(
            UserError, match=f"model.transformer_impl=transformer_engine: Transformer Engine {problem}"
        ) as refusal:
            chosen(config, on_gpu=True, te_problem=found)
        assert "pip install" not in str(refusal.value), "pip would replace the container's build"
        assert str(refusal.value).endswith("(docs/several_nodes.md), or set model.transformer_impl=local")
        assert chosen(config_of(), on_gpu=True, te_problem=found)[1] == "local"


def printed(code, *paths):
    """Return the words that a new process prints, which imports from these directories first."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*paths, ROOT)))}
    answer = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    return answer.stdout.split()


@pytest.mark.long
def test_megatron_takes_nothing_from_a_transformer_engine_that_needs_a_gpu(tmp_path):
    stand_in = ROOT / "tests" / "support" / "te_stand_in" / "transformer_engine"
    package = shutil.copytree(stand_in, tmp_path / "transformer_engine")
    first = package / "__init__.py"
    first.write_text(first.read_text().replace("+cpu", ""))
    asked = (
        "from mcore_rl import platform; platform.initialize_platform();"
        "from megatron.core.extensions.transformer_engine import HAVE_TE;"
        "from megatron.core.optimizer import clip_grads;"
        "print(HAVE_TE, clip_grads.multi_tensor_applier.__module__)"
    )
    assert printed(asked, tmp_path) == ["False", "megatron.core.utils"]


@pytest.mark.long
def test_a_run_on_the_cpu_imports_no_compiler():
    asked = (
        "from mcore_rl import platform; platform.initialize_platform();"
        "import sys, torch, mcore_rl.algorithms.grpo; from megatron.core.jit import jit_fuser;"
        "print('torch._inductor' in sys.modules, 'transformers' in sys.modules, torch.compile.__module__);"
        "print(jit_fuser(len) is len)"
    )
    assert printed(asked) == ["False", "False", "torch", "True"]


@pytest.mark.long
def test_megatron_does_not_import_a_broken_transformer_engine_on_a_gpu(tmp_path):
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text('raise OSError("libcudnn.so.9: cannot open")')
    asked = (
        "import torch; from mcore_rl import platform;"
        "platform.has_gpu = lambda: True; torch.cuda.set_device = lambda device: None;"
        "torch.cuda.device_count = lambda: 1;"
        "platform.initialize_platform();"
        "from megatron.core.extensions.transformer_engine import HAVE_TE; print(HAVE_TE)"
    )
    assert printed(asked, tmp_path) == ["False"]


FP8 = {"fp8": {"recipe": "blockwise"}}


def test_fp8_has_the_form_of_scales_that_fits():
    def scales(recipe, **changes):
        config = config_of({"fp8": {"recipe": recipe, **changes}})
        return config.for_device(on_gpu=True, te_problem=None, simulates=False).model.fp8.scales

    assert scales("blockwise") == scales("mxfp8") == "power_of_two" and scales("tensorwise") == "float32"
    assert scales("blockwise", scales="float32") == "float32"
    assert config_of().for_device(on_gpu=True, te_problem=None, simulates=False).model.fp8 is None


@pytest.mark.parametrize(
    ("model", "device", "message"),
    [
        (
            {},
            {"on_gpu": False},
            "model.fp8: requires Transformer Engine's layers; .*; Transformer Engine is not instal",
        ),
        (
            {},
            {"on_gpu": True},
            "the local layers have no FP8; Transformer Engine is not installed; leave model.fp8 out",
        ),
        (
            {"transformer_impl": "local"},
            {"on_gpu": True, "te_problem": None},
            "the local layers have no FP8; set model.transformer_impl=transformer_engine",
        ),
        (
            {"dtype": "float32"},
            {"on_gpu": True, "te_problem": None},
            "model.fp8: requires model.dtype=bfloat16 on a GPU",
        ),
        (
            {"dtype": "float32", "transformer_impl": "transformer_engine"},
            {"on_gpu": True, "te_problem": None},
            "set model.dtype=bfloat16, or leave model.fp8 out",
        ),
    ],
)
def test_fp8_is_refused_without_its_layers(model, device, message):
    config = config_of({**FP8, **model})
    with pytest.raises(UserError, match=message):
        config.for_device(**{"te_problem": "is not installed", "simulates": False, **device})
    simulated = config.for_device(on_gpu=True, te_problem="is not simulated", simulates=True)
    assert simulated.model.fp8.recipe == "blockwise" and simulated.model.transformer_impl == "local"


@pytest.mark.parametrize(
    ("fp8", "message"),
    [
        ({"recipe": "delayed"}, "delayed scaling is not supported, because its scales depend on earlier steps"),
        ({"recipe": "e4m3"}, "'blockwise', 'tensorwise' or 'mxfp8'"),
        ({"recipe": "mxfp8", "scales": "float32"}, "scales: mxfp8 always has scales in the form power_of_two"),
        (
            {"recipe": "tensorwise", "scales": "power_of_two"},
            "scales: tensorwise always has scales in the form float32",
        ),
        ({"first_layers": -1}, "first_layers"),
    ],
)
def test_fp8_sections_that_are_wrong(fp8, message):
    with pytest.raises(ValueError, match=message):
        config_of({"fp8": fp8})


@pytest.mark.parametrize(
    ("capability", "cuda", "fp8", "problem"),
    [
        (
            (8, 0),
            "13.0",
            ("tensorwise", "float32"),
            "FP8 needs a GPU of compute capability 8.9 or higher, this one has 8.0",
        ),
        ((8, 9), "13.0", ("tensorwise", "float32"), None),
        ((8, 9), "13.0", ("blockwise", "float32"), "set model.fp8.recipe=tensorwise"),
        ((9, 0), "12.8", ("blockwise", "power_of_two"), "CUDA 12.9 or newer; this one has 9.0, and CUDA is 12.8"),
        ((9, 0), "12.9", ("blockwise", "float32"), None),
        ((9, 0), "13.0", ("mxfp8", "power_of_two"), "mxfp8 needs a GPU of compute capability 10, this one has 9.0"),
        ((10, 0), "13.0", ("mxfp8", "power_of_two"), None),
        (
            (10, 3),
            "13.0",
            ("blockwise", "float32"),
            "computes blockwise by MXFP8, .*; set model.fp8.scales=power_of_two",
        ),
        ((10, 3), "13.0", ("blockwise", "power_of_two"), None),
        ((12, 0), "13.0", ("mxfp8", "power_of_two"), "this one has 12.0"),
    ],
)
def test_hardware_that_lacks_a_recipe(capability, cuda, fp8, problem, monkeypatch):
    """The limits are those of Transformer Engine's sources."""
    import torch

    from mcore_rl import platform

    monkeypatch.setattr(platform, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    found = platform.fp8_problem.__wrapped__(*fp8)
    assert found is None if problem is None else re.search(problem, found), found


def fits(family, fp8, parallel=None, **sizes):
    from mcore_rl.models.megatron.model.hf_config import check_model_fits

    config = config_of({"dtype": "bfloat16", "transformer_impl": "local", "fp8": fp8}, parallel)
    check_model_fits(make_config(family, **sizes), config.parallel, 64, config.model)


TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


def test_models_that_fp8_can_multiply():
    fits("qwen3", {})
    fits("qwen3", {}, TP2, **WIDE)
    fits("qwen3_moe", {"recipe": "tensorwise"}, TP2, moe_intermediate_size=64)
    fits("deep", {"first_layers": 3, "last_layers": 2}, {"pipeline_model_parallel_size": 2})
    fits("qwen3", {"recipe": "mxfp8", "first_layers": 1}, intermediate_size=96)


@pytest.mark.parametrize(
    ("arguments", "sizes", "message"),
    [
        (
            ("qwen3", {}, TP2),
            {},
            "64 columns on a process; blockwise under sequence parallelism requires a multiple of 128",
        ),
        (
            ("qwen3_moe", {"recipe": "mxfp8"}),
            {},
            r"mlp.experts.0.\w+.weight has \d+ \w+ on a process; mxfp8 requires a multiple of 32",
        ),
        (
            ("qwen3", {}),
            {"intermediate_size": 88},
            "mlp.down_proj.weight has 88 columns on a process; blockwise requires",
        ),
        (("qwen3", {}, TP2), {**WIDE, "intermediate_size": 528}, "mlp.down_proj.weight has 264 columns"),
        (("hy_v4", {}), {}, "model.fp8: is not supported for hy_v4, whose residual has several streams"),
        (("qwen3", {"first_layers": 1, "last_layers": 1}), {}, "leave none of the model's 2 layers in FP8"),
        (
            ("deep", {"first_layers": 4}, {"pipeline_model_parallel_size": 2}),
            {},
            "model.fp8.first_layers=4: must be at most 3, the 6 layers divided by pipeline_model_parallel_size=2",
        ),
    ],
)
def test_models_that_fp8_cannot_multiply(arguments, sizes, message):
    with pytest.raises(UserError, match=message):
        fits(*arguments, **sizes)


def grpo_config(arguments, loss=None, **model):
    values = {
        "output_dir": "out",
        "model": {"path": "model", **model},
        "data": {"train": "data.jsonl", "max_sequence_length": 512},
        "loss": loss or {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 2.0},
        "generation": {"backend": "vllm", "vllm": {"arguments": arguments}},
    }
    return GRPOConfig.model_validate(values)


@pytest.mark.parametrize(
    ("arguments", "scheme", "scales"),
    [
        (["--quantization", "fp8_per_block"], "fp8_per_block", "float32"),
        (["--quant", "fp8_per_block"], "fp8_per_block", "float32"),
        (["--quantization=fp8_per_block", "--enforce-eager"], "fp8_per_block", "float32"),
        (["-q", "fp8"], "fp8", "power_of_two"),
        (["--quantization", "awq", "--quantization", "mxfp8"], "mxfp8", "power_of_two"),
        (["--max-model-len", "512"], None, "power_of_two"),
        ([], None, "power_of_two"),
    ],
)
def test_scales_follow_the_sampler(arguments, scheme, scales):
    config = grpo_config(arguments, **FP8).for_device(on_gpu=True, te_problem=None, simulates=False)
    assert config.generation.vllm.quantization == scheme
    assert config.model.fp8.scales == scales


@pytest.mark.parametrize(
    ("arguments", "loss", "message"),
    [
        (["-qfp8"], None, "write the quantization as --quantization SCHEME"),
        (["--quantization_config", "{}"], None, "write the quantization as --quantization SCHEME"),
        (["--hf-overrides", '{"quantization_config": {}}'], None, "write the quantization as --quantization SCHEME"),
        (["--enforce-eager", "--quantization"], None, "--quantization has no value"),
        (["--quantization", "awq"], None, "arguments: --quantization awq cannot be applied to the bfloat16 weights"),
        (["--quantization", "fp8"], {"name": "clipped_pg"}, "set loss.use_importance_sampling_correction=true"),
    ],
)
def test_sampling_in_fp8_is_refused_without_its_conditions(arguments, loss, message):
    with pytest.raises(ValueError, match=message):
        grpo_config(arguments, loss)


def test_mismatch_of_sampler_and_trainer_is_told():
    from mcore_rl.models.generation.vllm.server import describe_fp8_sampling

    def told(arguments, loss=None, **fp8):
        model = {"fp8": fp8} if fp8 else {}
        config = grpo_config(arguments, loss, **model)
        return " ".join(describe_fp8_sampling(config.for_device(on_gpu=True, te_problem=None, simulates=False)))

    blocks = ["--quantization", "fp8_per_block"]
    assert told([]) == ""
    assert told(blocks) == told(blocks, recipe="blockwise")
    assert "token_mult_prob_error" in told(blocks) and "warning" not in told(blocks)
    assert "(blockwise, power_of_two)" in told(blocks, recipe="blockwise", scales="power_of_two")
    assert "(tensorwise, float32)" in told(blocks, recipe="tensorwise")
    assert "importance weights are not bounded" in told(blocks, {"use_importance_sampling_correction": True})

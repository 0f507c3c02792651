"""Tests of the values that depend on the device."""

import os
import shutil
import subprocess
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
from programs import ROOT
from small_models import make_config

from mcore_rl.config import SFTConfig
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
    from mcore_rl.models.megatron.hf_config import check_model_fits, uses_grouped_gemm

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

"""Tests that directories as they are on the hub are trained, exported and loaded again.

They come in shards, with tensors that are not trained, in FP8 and in MXFP4.
"""

import json
import re

import pytest
import torch
from layout_cases import make_config, make_data, plain_logprobs, published_names
from published_directories import add_head, save_in_shards, tensors_of, train_and_export
from safetensors.torch import load_file, save_file
from small_models import and_long, make_model
from transformers import AutoModelForCausalLM

from mcore_rl.errors import UserError
from mcore_rl.testing.layout_check import ParallelLayout
from mcore_rl.testing.processes import run_processes

TP2, EP2 = ParallelLayout(tp=2, sp=True), ParallelLayout(dp=2, ep=2)
OF_TOWER = re.compile(r"\.(visual|vision_tower|embed_vision)\.")
BLOCK = 24  # divides no size of the small models
QUANTIZED = ("proj.weight", "proj_with_mqa.weight", ".w1.weight", ".w2.weight", ".w3.weight")


def fp8(tensors):
    """Quantize projections as DeepSeek-V3 is: e4m3 with one scale for each block."""
    result = {}
    for name, tensor in tensors.items():
        result[name] = tensor
        if name.endswith(QUANTIZED):
            padded = torch.nn.functional.pad(tensor.float(), (0, -tensor.shape[1] % BLOCK, 0, -tensor.shape[0] % BLOCK))
            blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
            scales = blocks.abs().amax((1, 3)) / 448
            codes = (tensor.float() / spread(scales, tensor.shape)).to(torch.float8_e4m3fn)
            result |= {name: codes, f"{name}_scale_inv": scales}
    return result


def spread(scales, shape):
    """Return each element's scale."""
    return scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: shape[0], : shape[1]]


def mxfp4(tensors):
    """Replace the experts of gpt-oss by random MXFP4 numbers."""
    generator, result = torch.Generator().manual_seed(3), {}
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            result[name] = tensor
            continue
        count, columns, rows = tensor.shape
        shape = (count, rows, columns // 32)
        result[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        result[f"{name}_scales"] = torch.randint(121, 126, shape, generator=generator, dtype=torch.uint8)
    return result


def decoded(tensors):
    """Return the tensors as other programs decode them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    result = {}
    for name, tensor in tensors.items():
        if name.endswith("_blocks"):
            whole = name.removesuffix("_blocks")
            result[whole] = convert_moe_packed_tensors(tensor, tensors[f"{whole}_scales"])
        elif f"{name}_scale_inv" in tensors:
            result[name] = (tensor.float() * spread(tensors[f"{name}_scale_inv"], tensor.shape)).bfloat16()
        elif not name.endswith(("_scales", "_scale_inv")):
            result[name] = tensor
    return result


def next_token_layer(prefix):
    """Return tensors of a layer that predicts further tokens."""
    sizes = {"eh_proj.weight": (64, 128), "enorm.weight": (64,)}
    return {prefix + name: torch.randn(size).bfloat16() for name, size in sizes.items()}


QUANTIZATIONS = {
    "fp8": (fp8, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}),
    "mxfp4": (mxfp4, {"quant_method": "mxfp4"}),
}


def with_pattern(values):
    """Describe the layers of Nemotron-H as published configurations do."""
    letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
    kinds = values.pop("layers_block_type")
    return {"hybrid_override_pattern": "".join(map(letters.get, kinds)), "num_hidden_layers": len(kinds), **values}


def make_published(
    directory, family, quantization=None, model_type=None, predicts="", rewritten=lambda values: values, **changes
):
    """Write a model as it is on the hub: in bf16 or quantized, in shards, with tensors that are not trained.

    Args:
        predicts: prefix of the tensors of a layer that predicts further tokens; "" for none.
        rewritten: function of the content of config.json.
    """
    make_model(family, directory, **changes)
    values = rewritten(json.loads((directory / "config.json").read_text()))
    tensors = published_names(load_file(directory / "model.safetensors"))
    keeps = ("e_score_correction_bias",)
    is_kept = lambda name, t: name.endswith(keeps) or not t.is_floating_point()  # noqa: E731
    tensors = {name: t if is_kept(name, t) else t.bfloat16() for name, t in tensors.items()}
    if predicts:
        tensors |= next_token_layer(predicts)
    if quantization:
        quantize, values["quantization_config"] = QUANTIZATIONS[quantization]
        tensors = quantize(tensors)
    values |= {"dtype": "bfloat16", "model_type": model_type or values["model_type"]}
    (directory / "config.json").write_text(json.dumps(values))
    (directory / "model.safetensors").unlink()
    save_in_shards(tensors, directory)
    return decoded(tensors)


CASES = {
    "deepseek_v3 fp8": ("deepseek_v3", TP2, {"quantization": "fp8", "predicts": "model.layers.4."}),
    "gpt_oss mxfp4": ("gpt_oss", EP2, {"quantization": "mxfp4", "intermediate_size": 64}),
}
LONG_CASES = {
    "kimi_k2 fp8": ("deepseek_v3", EP2, {"quantization": "fp8", "model_type": "kimi_k2"}),
    "minimax_m2 fp8": ("minimax_m2", TP2, {"quantization": "fp8"}),
    "gpt_oss mxfp4 tp2": ("gpt_oss", TP2, {"quantization": "mxfp4", "intermediate_size": 64}),
    "moonlight": ("moonlight", EP2, {}),
    "glm4_moe_lite": ("glm4_moe_lite", TP2, {"predicts": "model.layers.4."}),
    "glm4_moe": ("glm4_moe", EP2, {"predicts": "model.layers.4."}),
    "deepseek_v32": ("deepseek_v32", TP2, {"predicts": "model.layers.4."}),
    "glm_moe_dsa": ("glm_moe_dsa", EP2, {}),
    "hy_v4": ("hy_v4", EP2, {}),
    "glm5_next": ("glm5_next", TP2, {}),
    "deepseek_v4": ("deepseek_v4", EP2, {}),
    "qwen4": ("qwen4", TP2, {"predicts": "mtp.layers.0."}),
    "ernie4_5_moe": ("ernie4_5_moe", TP2, {}),
    "nemotron_h": ("nemotron_h_moe", EP2, {"predicts": "mtp.layers.0.", "rewritten": with_pattern}),
    "olmo3": ("olmo3", ParallelLayout(cp=2), {}),
    "gemma4 with a tower and unused keys": (
        "gemma4_tower",
        TP2,
        {"predicts": "model.language_model.layers.4.self_attn.k_proj."},
    ),
    "smollm3": ("smollm3", ParallelLayout(pp=2), {}),
    "seed_oss": ("seed_oss", TP2, {}),
    "glm4": ("glm4", TP2, {}),
    "ministral3": ("ministral3", ParallelLayout(cp=2), {}),
}


@pytest.mark.parametrize("name", and_long(list(CASES), list(LONG_CASES)))
def test_published_directory_is_trained_and_exported(name, tmp_path):
    family, layout, options = {**CASES, **LONG_CASES}[name]
    original = make_published(tmp_path / "model", family, **options)
    config = layout.apply(make_config(tmp_path / "model"))
    found = run_processes(train_and_export, config, tmp_path / "before", tmp_path / "after", world_size=2)
    logprobs, line, _ = found[0]
    before, after = tensors_of(tmp_path / "before"), tensors_of(tmp_path / "after")
    assert set(before) == set(after) == set(original)
    predicts = options.get("predicts")
    passed_on = {name for name in original if (predicts and name.startswith(predicts)) or OF_TOWER.search(name)}
    passed_on |= {name for name, tensor in original.items() if not tensor.is_floating_point()}
    untrained = {name for name in original if ".indexer." in name} | passed_on
    for tensor_name, tensor in original.items():
        assert before[tensor_name].dtype == tensor.dtype, tensor_name
        assert torch.equal(before[tensor_name], tensor), tensor_name
        assert tensor_name not in untrained or torch.equal(after[tensor_name], tensor), tensor_name
    assert line is None if not passed_on else line.startswith(f"{len(passed_on)} tensors of ")
    assert "quantization_config" not in json.loads((tmp_path / "after" / "config.json").read_text())
    model, told = AutoModelForCausalLM.from_pretrained(
        tmp_path / "after", dtype=torch.float32, output_loading_info=True
    )
    assert not told["missing_keys"] and not told["mismatched_keys"]
    with torch.no_grad():
        expected = plain_logprobs(model, make_data())
    assert (logprobs - expected).norm() <= 1e-5 * expected.norm()


def test_deepseek_v4_has_other_names_in_published_directories(tmp_path):
    from mcore_rl.models.megatron.model.hf_config import load_hf_config
    from mcore_rl.models.megatron.model.hf_directory import SafetensorsDirectory
    from mcore_rl.models.megatron.weights.conversion import check_hf_tensors

    make_model("deepseek_v4", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    hf = load_hf_config(tmp_path)
    check_hf_tensors(hf, SafetensorsDirectory(tmp_path))
    names = {name: name.removeprefix("model.").replace("hc_head.hc_", "hc_head_") for name in tensors}
    names["model.embed_tokens.weight"] = "embed.weight"
    assert {"embed.weight", "head.weight", "norm.weight", "hc_head_fn", "layers.1.attn.indexer.compressor.ape"} <= {
        *names.values()
    }
    published = {names[name]: tensor for name, tensor in tensors.items()}
    save_file({**published, "mtp.0.norm.weight": torch.zeros(4)}, tmp_path / "model.safetensors")
    check_hf_tensors(hf, SafetensorsDirectory(tmp_path))


@pytest.mark.parametrize("family", and_long(["qwen2"], ["gemma3", "glm4_moe"]))
def test_a_head_beside_tied_embeddings_is_trained_apart_and_exported(family, tmp_path):
    path = make_model(family, tmp_path / "model", tie_word_embeddings=True)
    add_head(path, "apart")
    config = TP2.apply(make_config(path))
    found = run_processes(train_and_export, config, tmp_path / "before", tmp_path / "after", world_size=2)
    logprobs, _, description = found[0]
    original, before, after = map(tensors_of, (path, tmp_path / "before", tmp_path / "after"))
    assert set(original) == set(before) and all(torch.equal(before[name], t) for name, t in original.items())
    changes = [(after[name] - original[name]).abs().max() for name in ("lm_head.weight", "model.embed_tokens.weight")]
    assert min(changes) > 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "after", dtype=torch.float32)
    assert not model.config.tie_word_embeddings
    with torch.no_grad():
        expected = plain_logprobs(model, make_data())
    assert (logprobs - expected).norm() <= 1e-5 * expected.norm()
    assert "an LM head apart from the embeddings" in description


@pytest.mark.parametrize("quantization", ["fp8", "mxfp4"])
def test_parts_of_quantized_tensors_equal_parts_of_whole_tensors(quantization, tmp_path):
    from mcore_rl.models.megatron.model.hf_directory import SafetensorsDirectory

    family = {"fp8": "deepseek_v3", "mxfp4": "gpt_oss"}[quantization]
    original = make_published(tmp_path / "model", family, quantization, intermediate_size=64)
    source = SafetensorsDirectory(tmp_path / "model")
    assert source.names() == set(original)
    for name, tensor in original.items():
        assert source.shape(name) == list(tensor.shape) and source.dtype(name) == tensor.dtype
        assert torch.equal(source.read(name), tensor), name
        if tensor.ndim > 1:
            rows, columns = slice(1, tensor.shape[0] - 1), slice(5, tensor.shape[1] - 3)
            assert torch.equal(source.read(name, rows), tensor[rows]), name
            assert torch.equal(source.read(name, rows, columns), tensor[rows, columns]), name


def test_other_quantizations_are_refused(tmp_path):
    from mcore_rl.models.megatron.model.hf_config import load_hf_config

    make_model("llama", tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(
        UserError, match=r"is quantized by 'gptq', which is not supported. Supported are FP8 .* and MXFP4"
    ):
        load_hf_config(tmp_path)


def without(directory, *, ending=None, **config):
    """Remove a tensor with this ending, or change the configuration of the quantization."""
    if ending is None:
        values = json.loads((directory / "config.json").read_text())
        values["quantization_config"] |= config
        (directory / "config.json").write_text(json.dumps(values))
        return
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    name = next(name for name in sorted(index["weight_map"]) if name.endswith(ending))
    file = directory / index["weight_map"].pop(name)
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("quantization", "change", "problem"),
    [
        ("fp8", {"ending": "kv_b_proj.weight_scale_inv"}, r"kv_b_proj\.weight is in FP8 and has no _scale_inv"),
        ("fp8", {"weight_block_size": [128, 128]}, r"has scales of shape .* with blocks of \[128, 128\] they must be"),
        ("fp8", {"weight_block_size": None}, "is quantized by 'fp8', which is not supported"),
        ("mxfp4", {"ending": "down_proj_scales"}, r"experts\.down_proj has no _scales"),
    ],
)
def test_quantized_tensors_that_cannot_be_decoded_are_refused(quantization, change, problem, tmp_path):
    from mcore_rl.models.megatron.model.hf_config import load_hf_config
    from mcore_rl.models.megatron.model.hf_directory import SafetensorsDirectory
    from mcore_rl.models.megatron.weights.conversion import check_hf_tensors

    family = {"fp8": "deepseek_v3", "mxfp4": "gpt_oss"}[quantization]
    make_published(tmp_path, family, quantization, intermediate_size=64)
    without(tmp_path, **change)
    with pytest.raises(UserError, match=problem):
        check_hf_tensors(load_hf_config(tmp_path), SafetensorsDirectory(tmp_path))


def test_a_file_beside_an_index_is_read_only_if_the_index_names_no_other(tmp_path):
    from mcore_rl.models.megatron.model.hf_directory import SafetensorsDirectory

    make_model("llama", tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: t + 1 for name, t in tensors.items()}, tmp_path / "a.safetensors", metadata={"format": "pt"})
    index, two = tmp_path / "model.safetensors.index.json", ("a.safetensors", "model.safetensors")
    files = dict(zip(sorted(tensors), two * len(tensors), strict=False))
    for weight_map in (dict.fromkeys(tensors, "a.safetensors"), files, dict.fromkeys(tensors, "not_there.safetensors")):
        index.write_text(json.dumps({"weight_map": weight_map}))
        told = r"two sets of weights: model\.safetensors, .*\.index\.json, which names (a|not_there)\."
        with pytest.raises(UserError, match=told):
            SafetensorsDirectory(tmp_path)
    # transformers reads all tensors of the file, also those that the index lacks.
    index.write_text(json.dumps({"weight_map": dict.fromkeys(sorted(tensors)[1:], "model.safetensors")}))
    assert SafetensorsDirectory(tmp_path).names() == set(tensors)
    (tmp_path / "model.safetensors").unlink()
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, "a.safetensors")}))
    source = SafetensorsDirectory(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(source.read(name), model[name]) for name in tensors)

"""Tests that logits equal Hugging Face's, and exports equal the input, for each family and layout."""

import copy
import importlib.util
import json
import re

import pytest
import torch
from float32 import EPSILON, FORWARD
from published_directories import add_head
from safetensors.torch import load_file, save_file
from small_models import ARCHITECTURES, FAMILIES, WITH_DELTA_NETS, and_long, has_experts, make_config, make_model
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer

from mcore_rl.config import ModelConfig, ParallelConfig
from mcore_rl.errors import UserError
from mcore_rl.models.megatron.families import family_of
from mcore_rl.testing.processes import run_processes

LENGTHS = (520, 8, 33, 1)
NEVER_TIED = ("kimi_linear", "nemotron_h", "nemotron_h_moe")


def token_rows():
    rows = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        rows[row, :length] = torch.randint(0, 250, (length,), generator=torch.Generator().manual_seed(length))
    return rows


def megatron_logits(path, export_to, **sizes):
    """[N, S, V] logits of the rows as one pack, from rank 0 of the last stage; exports the model too."""
    from mcore_rl.data.batching import Microbatch
    from mcore_rl.distributed.batched_data_dict import BatchedDataDict
    from mcore_rl.distributed.collectives import all_gather
    from mcore_rl.distributed.packs import PackLayout, gather_context_parallel
    from mcore_rl.models.megatron.model.build import build_model
    from mcore_rl.models.megatron.model.hf_config import check_model_fits, load_hf_config
    from mcore_rl.models.megatron.model.hf_directory import SafetensorsDirectory, write_hf_directory
    from mcore_rl.models.megatron.parallel_state import destroy_parallel, initialize_parallel, seed_everything
    from mcore_rl.models.megatron.training.forward_step import run_microbatches, vocab_parallel_logits
    from mcore_rl.models.megatron.weights.conversion import export_hf_weights, load_hf_weights

    parallel = ParallelConfig(**sizes)
    topology = initialize_parallel(parallel)
    seed_everything(0)
    hf = load_hf_config(path)
    check_model_fits(hf, parallel, max(LENGTHS))
    model = build_model(hf, ModelConfig(path=path), parallel, topology)
    load_hf_weights(model, SafetensorsDirectory(path))
    layout = PackLayout.pack(LENGTHS, topology.context.size, parallel.sequence_multiple)

    def head(hidden, microbatch):
        shards = all_gather(vocab_parallel_logits(hidden, model), topology.tensor.group)
        logits = torch.cat(tuple(shards), dim=-1)[:, : model.vocab_size]
        return logits.sum(), {"logits": gather_context_parallel(logits, layout, topology.context.group)}

    microbatch = Microbatch([0], BatchedDataDict(input_ids=token_rows()), layout)
    with torch.no_grad():
        outputs = run_microbatches(model, model.chunks, [microbatch], head, train=False)
    rank = torch.distributed.get_rank()
    write_hf_directory(export_hf_weights(model), export_to, path, hf, is_writer=rank == 0, max_shard_bytes=100_000)
    destroy_parallel()
    if not outputs:
        return None
    return [outputs[0]["logits"][start : start + n] for start, n in zip(layout.starts.tolist(), LENGTHS, strict=True)]


def check_family(family, sizes, model_of, tmp_path):
    path = model_of(family)
    world_size = 1
    for name, size in sizes.items():
        world_size *= 1 if name.startswith(("sequence", "expert")) else size
    results = run_processes(_with_sizes, path, tmp_path / "hf", sizes, world_size=world_size)
    logits = next(result for result in results if result is not None)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        for row, length, ours in zip(token_rows(), LENGTHS, logits, strict=True):
            expected = model(row[None, :length]).logits[0]
            # A delta net's state sums rounding: other sizes of chunks in transformers itself differ by 1e-5.
            # Of gemma4_tower, logits of both are 7.4e-6 from those in float64.
            growth = 2 * FORWARD if family == "gemma4_tower" else FORWARD
            tolerance = 2e-5 if family in WITH_DELTA_NETS else growth * EPSILON
            assert (ours - expected).norm() <= tolerance * expected.norm()
            torch.testing.assert_close(ours, expected, rtol=0, atol=5 * tolerance * expected.abs().max())
    check_export(path, tmp_path / "hf", model)


def _with_sizes(path, export_to, sizes):
    return megatron_logits(path, export_to, **sizes)


def check_export(path, exported, model):
    original = load_file(path / "model.safetensors")
    files = sorted(exported.glob("model-*-of-*.safetensors"))
    assert len(files) > 1, "the export must be sharded at this shard size"
    written = {name: tensor for file in files for name, tensor in load_file(file).items()}
    if model.get_output_embeddings().weight is model.get_input_embeddings().weight:
        original.pop("lm_head.weight", None)
    assert set(written) == set(original)
    for name, tensor in original.items():
        assert torch.equal(written[name], tensor), name
    again = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    tokenizer = AutoTokenizer.from_pretrained(exported)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(path).chat_template


SIZES = {
    "one process": {},
    "tp2 sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
}
EXPERT_SIZES = {
    "one process": {},
    "tp2 sp ep2": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
}
QUICK = ("qwen2", "gemma3", "mixtral", "glm4_moe", "deepseek_v3", "gpt_oss", "qwen3_5")
IN_ALL_SIZES = ("llama", "qwen2", "qwen3", "gemma3", "qwen3_5")
RARELY_IN_ALL_SIZES = ("nemotron_h",)


def mark_of(family, name):
    """Return the marks of a case; one process of each family also runs in the tests of layouts."""
    if family == "llama" or (name.startswith("tp2 sp") and family in QUICK):
        return ()
    return pytest.mark.long if name.startswith("tp2 sp") or family in IN_ALL_SIZES else pytest.mark.exhaustive


CASES = [
    pytest.param(family, sizes, id=f"{family}-{name}", marks=mark_of(family, name))
    for family in ARCHITECTURES
    for name, sizes in (EXPERT_SIZES if has_experts(family) else SIZES).items()
    if name not in ("pp2", "cp2") or family in (*IN_ALL_SIZES, *RARELY_IN_ALL_SIZES)
]


@pytest.mark.every_case
@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_logits_and_export(family, sizes, model_of, tmp_path):
    check_family(family, sizes, model_of, tmp_path)


@pytest.mark.parametrize("family", ["llama", "olmo2", "glm4_moe"])
def test_a_window_that_transformers_passes_over(family, tmp_path):
    make_model(family, tmp_path / "model", sliding_window=8)
    check_family(family, {"tensor_model_parallel_size": 1}, lambda _: tmp_path / "model", tmp_path)


@pytest.mark.parametrize("family", ["ministral3", "phi3", "mixtral"])
def test_types_of_layers_that_transformers_passes_over(family, tmp_path):
    types = ["full_attention"] * FAMILIES[family][1].get("num_hidden_layers", 2)
    make_model(family, tmp_path / "model", sliding_window=8, layer_types=types)
    check_family(family, {"tensor_model_parallel_size": 1}, lambda _: tmp_path / "model", tmp_path)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_part_of_heads_that_the_family_does_not_leave_out(family, tmp_path):
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    config = make_config(family, rope_parameters=rope)
    with pytest.raises(UserError, match=rf"partial_rotary_factor=0.5 is not supported; for {family} it must be 1"):
        family_of(config).check(16)


@pytest.mark.every_case
@pytest.mark.long
@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor_model_parallel_size": 4},  # more ranks than key-value heads
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "context_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "sequence_parallel": True},
    ],
    ids=["tp4", "tp2 pp2 cp2", "tp2 cp2 sp"],
)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_5"])
def test_logits_and_export_larger_layouts(family, sizes, model_of, tmp_path):
    check_family(family, sizes, model_of, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope type 'dynamic'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
    ],
)
def test_unsupported_architectures_are_refused(changes, message):
    from mcore_rl.models.megatron.model.hf_config import check_model_fits

    with pytest.raises(UserError, match=message):
        check_model_fits(make_config("llama", **changes), ParallelConfig(), 64)


def test_missing_transformer_engine_is_refused(monkeypatch):
    from mcore_rl.models.megatron.model.hf_config import check_model_fits

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_model_fits(make_config("llama"), ParallelConfig(), 14, ModelConfig(path="m"))
    model = ModelConfig(path="m", transformer_impl="transformer_engine")
    with pytest.raises(
        UserError, match=r"model.transformer_impl=.* is not installed; set model\.transformer_impl=local"
    ):
        check_model_fits(make_config("llama"), ParallelConfig(), 14, model)


@pytest.mark.parametrize(
    ("family", "sizes", "message"),
    [
        ("llama", {"expert_model_parallel_size": 2}, "llama has no experts"),
        ("llama", {"moe_token_dispatcher_type": "flex"}, "moe_token_dispatcher_type: llama has no experts"),
        ("mixtral", {"moe_token_dispatcher_type": "flex"}, "flex needs expert_model_parallel_size x expert_tensor"),
        (
            "mixtral",
            {"moe_token_dispatcher_type": "flex", "expert_model_parallel_size": 2},
            r"DeepEP, which is not installed; install it .* by: pip install .*DeepEP@v1",
        ),
        ("mixtral", {"expert_model_parallel_size": 4}, "6 experts"),
        ("mixtral", {"tensor_model_parallel_size": 2}, "sequence_parallel: must be true"),
        (
            "qwen3_moe",
            {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 5},
            r"width of an expert \(48\)",
        ),
    ],
)
def test_layouts_that_do_not_fit_the_experts(family, sizes, message):
    from mcore_rl.models.megatron.model.hf_config import check_model_fits

    with pytest.raises(UserError, match=message):
        check_model_fits(make_config(family), ParallelConfig(**sizes), 64)


def test_expert_layouts_that_megatron_would_get_wrong():
    with pytest.raises(ValueError, match="expert_tensor_parallel_size: must equal tensor_model_parallel_size"):
        ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True, expert_tensor_parallel_size=1)
    with pytest.raises(UserError, match=r"expert 2 x expert tensor 2 x pipeline 1 = 4 must divide .* \(2\)"):
        ParallelConfig(tensor_model_parallel_size=2, expert_model_parallel_size=2).data_parallel_size(2)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 7}, "7 experts per token"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ("glm4_moe", {"n_group": 3}, "3 groups"),
        ("gemma3", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop"),
        ("ernie4_5_moe", {"moe_norm_min": 0.95}, "moe_norm_min=0.95"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias"),
        ("seed_oss", {"attention_bias": False}, "a bias on the output projection alone"),
        ("qwen3_5", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim below 2"),
        ("mimo_v2_flash", {"v_head_dim": 0}, "v_head_dim=0 must be at least 1"),
        (
            "mimo_v2_flash",
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
            "rope_parameters has no entry 'sliding_attention'",
        ),
        ("hy_v4", {"index_head_dim": 6}, r"index_head_dim=6 must be at least qk_rope_head_dim \(8\)"),
        ("gemma4", {"final_logit_softcapping": 0.0}, "final_logit_softcapping=0.0 must be above 0, or null"),
        (
            "gemma4",
            {"layer_types": ["full_attention"] * 4, "per_layer_config": {1: {"head_dim": 24}}},
            "layers of the type 'full_attention' have heads of several sizes",
        ),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
        ("gemma4_e", {"num_kv_shared_layers": 5}, "num_kv_shared_layers=5 leaves no layer of each type"),
        ("gemma4_e", {"num_kv_shared_layers": 6}, "num_kv_shared_layers=6 leaves no layer of each type"),
        ("gemma4_e", {"vocab_size_per_layer_input": 249}, "vocab_size_per_layer_input=249 must be at least vocab_size"),
        ("gemma4_moe", {"top_k_experts": None}, "enable_moe_block=true requires top_k_experts"),
        ("gemma4_moe", {"top_k_experts": 9}, "9 experts per token"),
        (
            "gemma4_moe",
            {"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
            "use_double_wide_mlp=true with enable_moe_block=true",
        ),
    ],
)
def test_what_a_family_does_not_cover(family, changes, message):
    from mcore_rl.models.megatron.model.hf_config import check_model_fits

    with pytest.raises(UserError, match=message):
        check_model_fits(make_config(family, **changes), ParallelConfig(), 64)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"pipeline_model_parallel_size": 4}, "2 layers"),
        ({"tensor_model_parallel_size": 3}, "attention heads"),
        ({"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 2}, "with 2 in the first or"),
        ({"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}, r"every stage \(1, 1\)"),
    ],
)
def test_layouts_that_do_not_fit_the_model(sizes, message):
    from mcore_rl.models.megatron.model.hf_config import check_model_fits

    with pytest.raises(UserError, match=message):
        check_model_fits(make_config("llama"), ParallelConfig(**sizes), 64)


def test_key_value_heads_of_some_layers_that_ranks_cannot_divide():
    from mcore_rl.models.megatron.model.hf_config import check_model_fits

    heads = {"num_attention_heads": 12, "num_key_value_heads": 4, "num_global_key_value_heads": 3}
    config = make_config("gemma4", **heads)
    check_model_fits(config, ParallelConfig(), 64)
    with pytest.raises(UserError, match=r"size=2: must divide the model's key-value heads \(3\), or be a multiple"):
        check_model_fits(config, ParallelConfig(tensor_model_parallel_size=2), 64)


def test_stages_that_lack_keys():
    from mcore_rl.models.megatron.model.hf_config import check_model_fits

    message = r"layer 3 uses the keys and values of layer 2 \(num_kv_shared_layers .* set parallel.pipeline_model_par"
    with pytest.raises(UserError, match=message):
        check_model_fits(make_config("gemma4_e"), ParallelConfig(pipeline_model_parallel_size=2), 64)
    uneven = ParallelConfig(pipeline_model_parallel_size=2, num_layers_in_first_pipeline_stage=1)
    check_model_fits(make_config("gemma4_e"), uneven, 64)


@pytest.mark.parametrize(
    ("family", "option", "message"),
    [
        ("llama", {"moe_aux_loss_coeff": 0.1}, "llama has no experts"),
        ("qwen2", {"moe_grouped_gemm": True}, "moe_grouped_gemm: qwen2 has no experts"),
        ("mixtral", {"moe_router_bias_update_rate": 0.1}, "mixtral has no biases"),
    ],
)
def test_options_that_the_family_has_no_use_for(family, option, message):
    from mcore_rl.models.megatron.model.hf_config import check_model_fits

    with pytest.raises(UserError, match=message):
        check_model_fits(make_config(family), ParallelConfig(), 64, ModelConfig(path="unused", **option))


@pytest.mark.parametrize(
    ("options", "trained"),
    [({"dtype": "float32"}, "the model is"), ({"dtype": "bfloat16", "lora": {"rank": 2}}, "adapters are")],
)
def test_gradients_are_not_reduced_below_the_precision_of_the_weights(options, trained):
    from mcore_rl.models.megatron.model.hf_config import check_model_fits

    parallel, model = ParallelConfig(grad_reduce_in_fp32=False), ModelConfig(path="unused", **options)
    with pytest.raises(UserError, match=f"grad_reduce_in_fp32: .* {trained} in float32; leave"):
        check_model_fits(make_config("llama"), parallel, 64, model)


@pytest.mark.parametrize(
    ("changes", "dtype", "etp", "message"),
    [
        ({"intermediate_size": 90}, "float32", 1, r"float32 the model's width of an expert \(90\) .* multiple of 4;"),
        ({"hidden_size": 100}, "bfloat16", 1, r"the model's hidden size \(100\) must be a multiple of 8;"),
        ({"hidden_size": 100, "intermediate_size": 92}, "float32", 1, None),
        ({"intermediate_size": 48}, "bfloat16", 2, None),
        ({"intermediate_size": 24}, "bfloat16", 2, r"expert on each of 2 processes \(12\) must be a multiple of 8"),
        ({"intermediate_size": 24}, "float32", 2, None),
    ],
)
def test_widths_that_a_grouped_product_takes(changes, dtype, etp, message):
    from mcore_rl.models.megatron.model.hf_config import check_model_fits

    hf, model = make_config("mixtral", **changes), ModelConfig(path="unused", dtype=dtype, moe_grouped_gemm=True)
    parallel = ParallelConfig(expert_model_parallel_size=2, expert_tensor_parallel_size=etp)
    if message is None:
        check_model_fits(hf, parallel, 64, model)
    else:
        with pytest.raises(UserError, match=f"model.moe_grouped_gemm: .*{message}"):
            check_model_fits(hf, parallel, 64, model)


TP2_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
HEADS = and_long(
    [("qwen2", TP2_SP, "one apart")],
    [("gemma3", {}, "one apart"), ("gemma3", {}, "equal"), ("glm4_moe", {}, "apart"), ("qwen3_5", TP2_SP, "apart")],
)


@pytest.mark.parametrize(("family", "sizes", "head"), HEADS)
def test_a_head_beside_tied_embeddings_is_that_of_transformers(family, sizes, head, tmp_path):
    path = make_model(family, tmp_path / "model", tie_word_embeddings=True)
    add_head(path, head)
    check_family(family, sizes, lambda _: path, tmp_path)


@pytest.mark.parametrize("family", [family for family in ARCHITECTURES if family not in NEVER_TIED])
def test_embeddings_are_untied_where_transformers_unties_them(family, tmp_path):
    from mcore_rl.models.megatron.model.hf_config import has_separate_head, load_hf_config
    from mcore_rl.models.megatron.model.hf_directory import SafetensorsDirectory
    from mcore_rl.models.megatron.weights.conversion import check_hf_tensors

    path = make_model(family, tmp_path, tie_word_embeddings=True)
    for head in (None, "equal", "one apart", "apart"):
        if head is not None:
            add_head(path, head)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert is_tied == (head in (None, "equal"))  # what transformers does
        hf = load_hf_config(path)
        assert hf.tie_word_embeddings == family_of(hf).ties_embeddings == is_tied
        assert has_separate_head(path) == (not is_tied)
        check_hf_tensors(hf, SafetensorsDirectory(path))
        assert ("lm_head.weight" in family_of(hf).shapes()) == (not is_tied)
        # A reward head replaces any LM head.
        assert "lm_head.weight" not in family_of(load_hf_config(path, head="reward")).shapes()
    add_head(path, "smaller")
    with pytest.raises(UserError, match=r"lm_head\.weight has the shape \(249, .*config.json requires \(250"):
        check_hf_tensors(load_hf_config(path), SafetensorsDirectory(path))
    (path / "model.safetensors").unlink()
    assert load_hf_config(path).tie_word_embeddings  # a plan of a run needs no weights


@pytest.mark.parametrize("family", [family for family in NEVER_TIED if family in FAMILIES])
def test_some_families_never_tie_their_embeddings(family, tmp_path):
    from mcore_rl.models.megatron.model.hf_config import load_hf_config

    path = make_model(family, tmp_path, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight
    assert "lm_head.weight" in family_of(load_hf_config(path)).shapes()


def test_a_published_kimi_linear_has_other_names_than_transformers_writes(tmp_path):
    """The configuration counts layers of each kind from 1, and the MLPs of dense layers are called `mlp`."""
    from mcore_rl.models.megatron.model.hf_config import load_hf_config
    from mcore_rl.models.megatron.model.hf_directory import SafetensorsDirectory
    from mcore_rl.models.megatron.weights.conversion import check_hf_tensors
    from mcore_rl.testing.layout_check import ParallelLayout, shrink_model

    path = make_model("kimi_linear", tmp_path / "model")
    values = json.loads((path / "config.json").read_text())
    for key in ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"):
        del values[key]
    sizes = {"head_dim": 12, "num_heads": 4, "short_conv_kernel_size": 4}
    values["linear_attn_config"] = {**sizes, "full_attn_layers": [3], "kda_layers": [1, 2, 4]}
    values |= {"first_k_dense_replace": 1, "moe_layer_freq": 1, "mla_use_nope": True}
    (path / "config.json").write_text(json.dumps(values))
    tensors = load_file(path / "model.safetensors")
    dense = [name for name in tensors if re.search(r"block_sparse_moe\.(gate|up|down)_proj", name)]
    assert len(dense) == 3
    for name in dense:
        tensors[name.replace("block_sparse_moe", "mlp")] = tensors.pop(name)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    check_family("kimi_linear", {"pipeline_model_parallel_size": 2}, lambda _: path, tmp_path)
    shrink_model(ModelConfig(path=path), tmp_path / "small", [ParallelLayout(tp=2, sp=True)])
    check_hf_tensors(load_hf_config(tmp_path / "small"), SafetensorsDirectory(tmp_path / "small"))
    (path / "config.json").write_text(json.dumps({**values, "mla_use_nope": False}))
    with pytest.raises(UserError, match="mla_use_nope=false"):
        family_of(load_hf_config(path)).check(64)


def test_weights_must_be_safetensors_and_complete(tmp_path):
    from mcore_rl.models.megatron.model.hf_directory import SafetensorsDirectory
    from mcore_rl.models.megatron.weights.conversion import check_hf_tensors

    path = make_model("llama", tmp_path / "model")
    source = SafetensorsDirectory(path)
    with pytest.raises(UserError, match=r"lacks tensors: .*layers\.2"):
        check_hf_tensors(make_config("llama", num_hidden_layers=3), source)
    with pytest.raises(UserError, match="unknown"):
        check_hf_tensors(make_config("llama", num_hidden_layers=1), source)
    with pytest.raises(UserError, match=r"config\.json requires"):
        check_hf_tensors(make_config("llama", vocab_size=251), source)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(UserError, match="pickle files"):
        SafetensorsDirectory(path)


def test_an_index_cannot_leave_its_folder(tmp_path):
    from mcore_rl.models.megatron.model.hf_directory import SafetensorsDirectory

    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"w": "../secret.safetensors"}}')
    with pytest.raises(UserError, match="must be the name of a file in the same directory"):
        SafetensorsDirectory(tmp_path)


def test_an_unsupported_model_type_is_refused_with_the_supported_ones(tmp_path):
    from mcore_rl.models.megatron.families import CONFIGURED_AS, FAMILIES
    from mcore_rl.utils.model_directory import MODEL_TYPES, check_model_directory

    assert sorted(MODEL_TYPES) == sorted({**FAMILIES, **CONFIGURED_AS})
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UserError, match=r"'gpt2' is not supported; supported are llama, .*, gemma3_text"):
        check_model_directory(tmp_path)


NO_SIZES = re.compile(
    r".*(_token_id|_token_index|LABEL_\d|label2id.*|seed|pretraining_tp|chunk_size_feed_forward|query_pre_attn_scalar|"
    r"_sliding_window_pattern|moe_layer_end_index|number_of_conv_states)"
)
"""Whole numbers of configurations that are no sizes, or are ignored."""


def whole_numbers(values, *parts):
    """Yield the keys that lead to each whole number."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from whole_numbers(value, *parts, key)
        elif type(value) is int:
            yield (*parts, key)


def changed_config(path, values, keys, value):
    """Write a config.json with another value at these keys."""
    values = part = copy.deepcopy(values)
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    (path / "config.json").write_text(json.dumps(values))


def small_and_published_configs():
    from mcore_rl.models.megatron.families import FAMILIES as MODEL_TYPES

    yield from (make_config(family) for family in FAMILIES)
    # The defaults of transformers' classes are published models.
    yield from (AutoConfig.for_model(model_type) for model_type in MODEL_TYPES if model_type in CONFIG_MAPPING)


def test_sizes_that_are_no_positive_whole_numbers_are_refused_by_their_names(tmp_path):
    from mcore_rl.utils.model_directory import VISION_MODEL_TYPES, check_model_directory

    tried = set()
    for config in small_and_published_configs():
        values = json.loads(config.to_json_string())
        (tmp_path / "config.json").write_text(json.dumps(values))
        check_model_directory(tmp_path)
        read = [keys for keys in whole_numbers(values) if not NO_SIZES.fullmatch(".".join(keys))]
        if config.model_type not in VISION_MODEL_TYPES:
            read = [keys for keys in read if keys[0] != "vision_config"]
        for keys in read:
            if (config.model_type, keys) in tried:
                continue
            tried.add((config.model_type, keys))
            for value in (-1, "4", 2.5, True):
                changed_config(tmp_path, values, keys, value)
                with pytest.raises(UserError) as error:
                    check_model_directory(tmp_path)
                assert f"config.json: {'.'.join(keys)} must be a whole number of at least" in str(error.value)
                assert str(error.value).endswith(f"got {json.dumps(value)}")
    assert len({model_type for model_type, _ in tried}) > 30


@pytest.mark.parametrize(
    ("family", "key"),
    [
        *(("llama", "max_position_embeddings"), ("llama", "num_attention_heads"), ("llama", "head_dim")),
        *(("qwen2_moe", "decoder_sparse_step"), ("deepseek_v32", "index_topk"), ("nemotron_h", "n_groups")),
        *(("qwen4", "hc_lowrank"), ("deepseek_v4", "compress_rates.heavily_compressed_attention")),
        ("llama", "rope_parameters.original_max_position_embeddings"),
    ],
)
def test_a_size_of_0_is_refused(family, key, tmp_path):
    from mcore_rl.models.megatron.model.hf_config import load_hf_config

    values = json.loads(make_config(family).to_json_string())
    changed_config(tmp_path, values, key.split("."), 0)
    with pytest.raises(UserError, match=rf"config\.json: {re.escape(key)} must be a whole number of at least 1, got 0"):
        load_hf_config(tmp_path)


@pytest.mark.parametrize(
    ("family", "key"),
    [
        *(("deepseek_v3", "n_group"), ("deepseek_v3", "v_head_dim"), ("deepseek_v3", "first_k_dense_replace")),
        *(("qwen2_moe", "num_key_value_heads"), ("qwen3_moe", "num_local_experts"), ("ernie4_5_moe", "moe_k")),
        *(("kimi_linear", "num_experts"), ("ernie4_5_moe", "moe_num_shared_experts")),
    ],
)
def test_a_size_that_the_model_needs_is_not_null(family, key, tmp_path):
    from mcore_rl.models.megatron.model.hf_config import load_hf_config

    changed_config(tmp_path, json.loads(make_config(family).to_json_string()), [key], None)
    with pytest.raises(UserError, match=f"{key} must be a number, got null"):
        load_hf_config(tmp_path)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        *(("llama", "num_key_value_heads", None), ("llama", "head_dim", None), ("qwen2", "sliding_window", None)),
        *(("deepseek_v3", "q_lora_rank", None), ("deepseek_v3", "first_k_dense_replace", 0)),
        *(("deepseek_v3", "num_nextn_predict_layers", 0), ("qwen2_moe", "shared_expert_intermediate_size", 0)),
        *(("gemma4", "hidden_size_per_layer_input", 0), ("gemma4", "num_experts", None)),
    ],
)
def test_sizes_of_parts_that_a_model_lacks_may_be_0_or_null(family, key, value, tmp_path):
    from mcore_rl.models.megatron.model.hf_config import load_hf_config

    changed_config(tmp_path, json.loads(make_config(family).to_json_string()), [key], value)
    family_of(load_hf_config(tmp_path)).check(64)


def test_layers_that_predict_further_tokens_are_left_out(model_of, tmp_path):
    """GLM-4.5's files hold one behind the last layer."""
    from mcore_rl.models.megatron.model.hf_config import load_hf_config
    from mcore_rl.models.megatron.model.hf_directory import SafetensorsDirectory
    from mcore_rl.models.megatron.weights.conversion import check_hf_tensors

    path = model_of("glm4_moe")
    tensors, hf = load_file(path / "model.safetensors"), load_hf_config(path)
    save_file({**tensors, "model.layers.4.eh_proj.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    check_hf_tensors(hf, SafetensorsDirectory(tmp_path))
    save_file({**tensors, "model.layers.3.eh_proj.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"unknown tensors: model\.layers\.3\.eh_proj"):
        check_hf_tensors(hf, SafetensorsDirectory(tmp_path))


@pytest.mark.parametrize(
    ("model_type", "published"), [("deepseek_v3", 249.7e9), ("gpt_oss", 32.6e9)], ids=["DeepSeek-V3", "gpt-oss-120B"]
)
def test_operations_per_token_equal_published_figures(model_type, published):
    """NVIDIA's figures for sequences of 4,096 tokens, without layers that predict further tokens."""
    family = family_of(AutoConfig.for_model(model_type))  # the defaults are those of the published models
    mixing = sum(family.token_mixer(layer).flops(4096) for layer in range(family.num_layers)) / 4096
    assert 6 * family.active_parameters() + mixing == pytest.approx(published, rel=0.005)


@pytest.mark.skipif("gemma4" not in FAMILIES, reason="transformers 4 lacks it")
@pytest.mark.parametrize("family", ["gemma4", "gemma4_moe", "gemma4_e"])
def test_numbers_of_parameters(family):
    """The constants of layers are buffers; tokens are not multiplied with the table of the layers' inputs."""
    config = make_config(family)
    with torch.device("meta"):
        sizes = {name: p.numel() for name, p in AutoModelForCausalLM.from_config(config).named_parameters()}
    assert family_of(config).num_parameters() == sum(sizes.values())
    idle = {name: size for name, size in sizes.items() if name.endswith("embed_tokens_per_layer.weight")}
    if (chosen := config.top_k_experts) is not None:
        of_experts = {name: size for name, size in sizes.items() if ".experts." in name}
        idle |= {name: size * (config.num_experts - chosen) // config.num_experts for name, size in of_experts.items()}
    assert family_of(config).active_parameters() == sum(sizes.values()) - sum(idle.values())


# Sizes of config.json of google/gemma-4-31B, google/gemma-4-26B-A4B and google/gemma-4-E2B on the Hugging Face hub.
FULL_OF_GEMMA4 = {"head_dim": 256, "global_head_dim": 512, "final_logit_softcapping": 30.0}
GEMMA4_31B = {
    **{"hidden_size": 5376, "num_hidden_layers": 60, "intermediate_size": 21504, "num_attention_heads": 32},
    **{"num_key_value_heads": 16, "num_global_key_value_heads": 4, "attention_k_eq_v": True},
    "hidden_size_per_layer_input": 0,
}
GEMMA4_26B = {
    **GEMMA4_31B,
    **{"hidden_size": 2816, "num_hidden_layers": 30, "intermediate_size": 2112, "num_attention_heads": 16},
    **{"num_key_value_heads": 8, "num_global_key_value_heads": 2},
    **{"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
}
GEMMA4_E2B = {
    **{"hidden_size": 1536, "num_hidden_layers": 35, "intermediate_size": 6144, "num_attention_heads": 8},
    **{"num_key_value_heads": 1, "num_kv_shared_layers": 20, "use_double_wide_mlp": True},
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
}


@pytest.mark.skipif("gemma4" not in FAMILIES, reason="transformers 4 lacks it")
@pytest.mark.parametrize(
    ("sizes", "all_parameters", "active"),
    [(GEMMA4_31B, 30.7e9, 30.7e9), (GEMMA4_26B, 25.2e9, 3.8e9), (GEMMA4_E2B, None, 2.3e9)],
    ids=["31B", "26B-A4B", "E2B"],
)
def test_parameters_of_gemma_4_equal_published_figures(sizes, all_parameters, active):
    """Google's figures; for E2B, that of all parameters includes its towers."""
    family = family_of(AutoConfig.for_model("gemma4_text", **FULL_OF_GEMMA4, **sizes))
    assert all_parameters is None or family.num_parameters() == pytest.approx(all_parameters, rel=2e-3)
    assert family.active_parameters() == pytest.approx(active, rel=1e-2)


@pytest.mark.skipif("nemotron_h" not in FAMILIES, reason="transformers 4 lacks it")
def test_parameters_of_nemotron_3_nano_equal_published_figures():
    """NVIDIA's figures for Nemotron 3 Nano: 31.6e9 parameters, of which a token uses 3.2e9, or 3.6e9 with embedding."""
    hf = AutoConfig.for_model(  # sizes of config.json of nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 on the hub
        "nemotron_h",
        hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        **{"hidden_size": 2688, "vocab_size": 131_072},
        **{"num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128},
        **{"mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128},
        **{"n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856},
        moe_shared_expert_intermediate_size=3712,
    )
    family, embedding = family_of(hf), 2688 * 131_072
    assert family.num_parameters() == pytest.approx(31.6e9, rel=2e-3)
    assert family.active_parameters() == pytest.approx(3.2e9, rel=1e-2)
    assert family.active_parameters() + embedding == pytest.approx(3.6e9, rel=1e-2)

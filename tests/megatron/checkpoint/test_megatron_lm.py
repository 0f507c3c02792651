"""Tests that Megatron-LM's own model loads checkpoints of this package, and this package those of Megatron-LM."""

import json
import os
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from float32 import EPSILON
from layout_cases import make_config, run_steps
from programs import ROOT, run
from safetensors.torch import load_file
from small_models import and_long, make_model, make_tokenizer
from transformers import AutoModelForCausalLM

from mcore_rl.testing.layout_check import ParallelLayout
from mcore_rl.testing.processes import run_cases, run_processes
from mcore_rl.utils.checkpoint_store import CheckpointStore

ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "initializer_range": 0.05}
MODELS = {
    "llama": ("llama", ROPE),
    "llama, tied": ("llama", {**ROPE, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", ROPE),
    "qwen3_moe": ("qwen3_moe", {**ROPE, "mlp_only_layers": []}),
    "qwen3_moe, one dense": ("qwen3_moe", ROPE),
    "deepseek_v3": ("deepseek_v3", {**ROPE, "first_k_dense_replace": 1, "rope_interleave": True}),
}
LOGITS = 8
"""Limit of the distance of logits, in roundings of the largest one: 1e-6."""
IDS = torch.arange(2 * 12).view(2, 12) * 7 % 250
ONE = ParallelLayout()
TP2, PP2, VPP2 = ParallelLayout(tp=2, sp=True), ParallelLayout(pp=2), ParallelLayout(pp=2, vpp=2)
EP2 = ParallelLayout(dp=2, ep=2)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            family, changes = MODELS[name]
            made[name] = make_model(family, tmp_path_factory.mktemp("model"), num_hidden_layers=4, **changes)
        return made[name]

    return get


def loaded_by_megatron(*arguments, **changes):
    from megatron_lm import load

    return load(*arguments, **changes)


def saved_by_megatron(*arguments, **changes):
    from megatron_lm import save

    return save(*arguments, **changes)


def whole(ranks, vocabulary=250):
    """Return {(key, leading offsets): tensor} of the stored parts of all ranks, without the vocabulary's padding."""
    found = {}
    for parts in ranks:
        for (key, offsets), values in parts.items():
            stacked = len(offsets) - values.dim()
            found.setdefault((key, offsets[:stacked]), {})[offsets[stacked:]] = values
    joined = {}
    for place, pieces in found.items():
        shape = [max(o[d] + v.shape[d] for o, v in pieces.items()) for d in range(next(iter(pieces.values())).dim())]
        joined[place] = torch.full(shape, float("nan"))
        for offsets, values in pieces.items():
            joined[place][tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))] = values
        if place[0] in ("embedding.word_embeddings.weight", "output_layer.weight"):
            joined[place] = joined[place][:vocabulary]
    return joined


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for place, values in ours.items():
        assert torch.equal(values, theirs[place]), place


def fused(weights, model):
    """Return exported weights under the names in a model of transformers, which has one tensor for all experts."""
    names = {name for name in model.state_dict() if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))}
    count = getattr(model.config, "num_experts", 0)
    joined = {}
    for name in names:
        start, last = name.rsplit(".", 1)
        parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
        of = [torch.cat([weights[f"{start}.{n}.{part}.weight"] for part in parts]) for n in range(count)]
        joined[name] = torch.stack(of)
    return weights | joined


OURS_IN_MEGATRON_LM = and_long(
    [],
    [
        ("qwen3_moe", VPP2, "local", TP2),
        ("llama, tied", TP2, "fused", VPP2),
        ("llama", VPP2, "local", TP2),
        ("qwen3", TP2, "fused", PP2),
        ("qwen3_moe", EP2, "fused", EP2),
        ("qwen3_moe, one dense", PP2, "local", EP2),
    ],
    [
        ("llama", PP2, "fused", VPP2),
        ("llama, tied", VPP2, "local", PP2),
        ("qwen3", VPP2, "local", TP2),
        ("qwen3_moe", TP2, "fused", VPP2),
        ("qwen3_moe", VPP2, "fused", EP2),
        ("qwen3_moe, one dense", EP2, "fused", TP2),
    ],
)


@pytest.mark.every_case
@pytest.mark.parametrize(("name", "writes", "spec", "reads"), OURS_IN_MEGATRON_LM, ids=str)
def test_megatron_lm_loads_ours_with_equal_logits_and_weights(small, tmp_path, name, writes, spec, reads):
    """The weights of one process and of the layout `reads` are equal bit by bit."""
    path = small(name)
    config = writes.apply(make_config(path))
    saves = partial(run_processes, run_steps, config, tmp_path, None, 1, world_size=writes.world_size)
    _, exported, iteration = saves()[0]
    load = partial(run_processes, loaded_by_megatron, iteration, path)
    ((parts, logits),) = load(ONE, spec, IDS, world_size=1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    missing = model.load_state_dict(fused(exported, model), strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"}
    assert_close_logits(model, IDS, logits)
    elsewhere = load(reads, spec, world_size=reads.world_size)
    assert_same(whole([weights for weights, _ in elsewhere]), whole([parts]))


@pytest.mark.long
def test_megatron_lm_loads_converted_weights_with_either_spec(small, tmp_path):
    """The norm before the experts has another name in each spec."""
    path = small("qwen3_moe")
    run("convert", "from-hf", path, tmp_path / "ours")
    iteration = tmp_path / "ours" / "iter_0000001"
    cases = [(loaded_by_megatron, iteration, path, ONE, spec, IDS) for spec in ("local", "fused")]
    for ((_, logits),) in run_cases(cases, world_size=1):
        assert_logits(path, IDS, logits)


def moments_of_ours(config, directory):
    """Train two steps and save; return the checkpoint and the sums of this rank's moments."""
    from layout_cases import make_data
    from megatron_lm import MOMENTS

    from mcore_rl.algorithms.build_loss import build_loss
    from mcore_rl.models.megatron.training.optimizer import optimizers_with_parameters
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2)
    for _ in range(2):
        policy.train(make_data(), build_loss(config))
    states = [s for one in optimizers_with_parameters(policy.optimizer) for s in one.optimizer.state.values()]
    sums = [sum(float(state[name].double().sum()) for state in states) for name in MOMENTS]
    saved = policy.save_checkpoint(directory, 2, {"consumed_samples": 12})
    policy.shutdown()
    return saved, sums


def resumed_by_megatron(*arguments):
    from megatron_lm import resume

    return resume(*arguments)


RESUMED = and_long(
    [],
    [
        ("qwen3_moe", TP2, PP2, "local"),
        ("llama, tied", ONE, TP2, "fused"),
        ("qwen3_moe", EP2, EP2, "fused"),
        ("qwen3", VPP2, VPP2, "local"),
    ],
)


@pytest.mark.every_case
@pytest.mark.parametrize(("name", "writes", "reads", "spec"), RESUMED, ids=str)
def test_megatron_lm_resumes_ours_with_optimizer_and_schedule(small, tmp_path, name, writes, reads, spec):
    path = small(name)
    ours = run_processes(moments_of_ours, writes.apply(make_config(path)), tmp_path, world_size=writes.world_size)
    theirs = run_processes(resumed_by_megatron, ours[0][0], path, reads, spec, world_size=reads.world_size)
    batch = make_config(path).batch.global_batch_size
    for ranks in (ours, theirs):
        assert all(sum(map(abs, sums)) > 0 for *_, sums in ranks)
    assert [(done, steps) for done, steps, _ in theirs] == [((2, 12, 2 * batch), {2})] * len(theirs)


IN_MEGATRON_LM = and_long(
    [],
    [
        ("qwen3_moe", PP2, "local", {"moe_layer_freq": [1] * 4}),
        ("llama", VPP2, "fused", {}),
        ("llama, tied", TP2, "local", {"hetereogenous_dist_checkpoint": True}),
        ("qwen3_moe, one dense", EP2, "fused", {}),
        ("deepseek_v3", TP2, "local", {}),
        ("deepseek_v3", PP2, "fused", {}),
    ],
    [("qwen3", VPP2, "local", {}), ("qwen3_moe", EP2, "fused", {}), ("qwen3_moe, one dense", TP2, "local", {})],
)


@pytest.mark.every_case
@pytest.mark.parametrize(("name", "layout", "spec", "changes"), IN_MEGATRON_LM, ids=str)
def test_what_megatron_lm_writes_becomes_a_model_directory(small, tmp_path, name, layout, spec, changes):
    """Converted back, it has the same weights in Megatron-LM; its logits are those of Megatron-LM."""
    path = small(name)
    written = run_processes(
        partial(saved_by_megatron, **changes), path, tmp_path / "theirs", layout, spec, world_size=layout.world_size
    )
    converted(tmp_path / "theirs", tmp_path / "hf", without_weights(path, tmp_path / "config"))
    run("convert", "from-hf", tmp_path / "hf", tmp_path / "ours")
    load = partial(run_processes, loaded_by_megatron, tmp_path / "ours" / "iter_0000001", path)
    again = load(layout, spec, world_size=layout.world_size)
    ours, theirs = whole([weights for weights, _ in again]), whole(written)
    if "moe_layer_freq" in changes or "hetereogenous_dist_checkpoint" in changes:
        theirs = {stacked(*place): values for place, values in theirs.items()}
    assert_same(ours, theirs)
    if name != "deepseek_v3":  # Megatron's own latent attention needs Transformer Engine to compute
        ((_, logits),) = load(ONE, spec, IDS, world_size=1)
        assert_logits(tmp_path / "hf", IDS, logits)


def stacked(key, leading):
    """Return the place of a layer's tensor in the stacked tensor of all layers."""
    start, _, rest = key.partition("decoder.layers.")
    if start or not rest:
        return key, leading
    layer, rest = rest.split(".", 1)
    return f"decoder.layers.{rest}", (int(layer), *leading)


def without_weights(path, destination):
    shutil.copytree(path, destination, ignore=shutil.ignore_patterns("*.safetensors*"))
    return destination


def converted(checkpoint, destination, config, check=True):
    return run("convert", "to-hf", checkpoint, destination, "--model", config, check=check)


def assert_logits(directory, ids, expected):
    """Assert that a model directory has the logits `expected`, which may have a padded vocabulary."""
    assert_close_logits(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32), ids, expected)


def assert_close_logits(model, ids, expected):
    with torch.no_grad():
        ours = model(ids).logits
    limit = LOGITS * EPSILON * max(1.0, float(ours.abs().max()))
    torch.testing.assert_close(ours, expected[..., : ours.shape[-1]], rtol=0, atol=limit)


SLICE = Path(__file__).parent / "megatron_lm"
"""A checkpoint that the `save_checkpoint` of Megatron-LM core_v0.16.1 wrote, made smaller.

It was written by one process with local layers, after two steps of training of a Qwen3-MoE on random tokens. Of its
4 layers, 8 experts and 1536 rows of the vocabulary, the first 2, 4 and 256 were kept: in the stored shards, the index
and the arguments; everything else is unchanged, except that the optimizer state was left out. `config` is its Hugging
Face configuration. `logits.pt` [2, 24, 250] are the logits that Megatron's own GPTModel computes with it.
"""
SLICE_IDS = torch.randint(0, 250, (2, 24), generator=torch.Generator().manual_seed(3))


def test_slice_of_a_real_checkpoint_has_the_logits_of_megatron_lm(tmp_path):
    converted(SLICE, tmp_path / "hf", SLICE / "config")
    assert_logits(tmp_path / "hf", SLICE_IDS, torch.load(SLICE / "logits.pt"))
    seen = run("convert", "inspect", SLICE).stdout_text
    assert "written by Megatron-LM or Megatron-Bridge" in seen
    assert "decoder.layers.mlp.experts.experts.linear_fc1.weight" in seen


LARGE = Path(os.environ.get("MEGATRON_LM_CHECKPOINTS", ROOT.parent / "shared" / "megatron_lm_checkpoints"))
"""Directory of whole checkpoints of Megatron-LM, with their configurations and logits."""
LARGE_ONES = {
    "llama_tied_tp2": "llama_tied",
    "llama_untied_tp1_fr": "llama_untied",
    "qwen3_moe_int_tp1": "qwen3_moe",
}


@pytest.mark.long
@pytest.mark.every_case
@pytest.mark.parametrize("name", LARGE_ONES)
def test_real_checkpoint_has_the_logits_of_megatron_lm(tmp_path, name):
    if not (LARGE / name).is_dir():
        pytest.skip(f"{LARGE / name} is missing; MEGATRON_LM_CHECKPOINTS names the directory of such checkpoints")
    converted(LARGE / name, tmp_path / "hf", LARGE / "configs" / LARGE_ONES[name])
    ids = torch.randint(0, 1500, (2, 24), generator=torch.Generator().manual_seed(3))
    assert_logits(tmp_path / "hf", ids, torch.load(LARGE / name / "logits.pt"))


@pytest.mark.long
@pytest.mark.parametrize("layout", [TP2], ids=str)
def test_a_run_takes_over_the_optimizer_of_a_real_checkpoint(tmp_path, layout):
    theirs = LARGE / "llama_untied_tp1_fr"
    if not theirs.is_dir():
        pytest.skip(f"{theirs} is missing; MEGATRON_LM_CHECKPOINTS names the directory of such checkpoints")
    converted(theirs, tmp_path / "hf", LARGE / "configs" / "llama_untied")
    make_tokenizer().save_pretrained(tmp_path / "hf")
    config = layout.apply(make_config(tmp_path / "hf"))
    resumed = run_processes(resumed_here, config, theirs / "iter_0000002", world_size=layout.world_size)
    pieces, missing, *_ = resumed[0]
    assert pieces == ["weights", "optimizer"]
    assert missing == ["schedule", "random states", "data position"]
    assert all(step == 2 for *_, step in resumed)


class Harmful:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


@pytest.fixture
def copied(tmp_path):
    shutil.copytree(SLICE, tmp_path / "theirs")
    return tmp_path / "theirs"


def test_release_of_megatron_lm_is_found(copied):
    (copied / "iter_0000002").rename(copied / "release")
    (copied / "latest_checkpointed_iteration.txt").write_text("release")
    assert CheckpointStore(copied).candidates() == ([copied / "release"], [])


def test_functions_in_a_foreign_checkpoint_are_not_called(copied, tmp_path):
    """The common state is read without its classes, some of which only another version of Megatron has."""
    torch.save({"iteration": Harmful(tmp_path / "touched")}, copied / "iter_0000002" / "common.pt")
    converted(copied, tmp_path / "hf", SLICE / "config")
    assert_logits(tmp_path / "hf", SLICE_IDS, torch.load(SLICE / "logits.pt"))
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_hidden_layers": 3}, "num_hidden_layers is 2 in the checkpoint, 3 in the model"),
        ({"num_attention_heads": 4, "head_dim": 32}, "num_attention_heads is 8 in the checkpoint"),
        ({"num_experts_per_tok": 3}, "moe_router_topk is 2 in the checkpoint"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rotary_base is 10000 in the checkpoint"),
        ({"moe_intermediate_size": 32}, r"linear_fc1.weight has the shape \(2, 4, 96, 64\); the model needs"),
        ({"tie_word_embeddings": True}, "the checkpoint has the tensor output_layer.weight, which a model with this"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_configuration_is_refused(tmp_path, changes, expected):
    (tmp_path / "config").mkdir()
    config = json.loads((SLICE / "config" / "config.json").read_text())
    (tmp_path / "config" / "config.json").write_text(json.dumps({**config, **changes}))
    refused = converted(SLICE, tmp_path / "hf", tmp_path / "config", check=False)
    assert refused.returncode == 2
    assert re.search(expected, refused.stderr_text), refused.stderr_text
    assert not (tmp_path / "hf").exists()


def test_a_foreign_checkpoint_without_a_configuration_is_refused(tmp_path):
    refused = run("convert", "to-hf", SLICE, tmp_path / "hf", check=False)
    assert refused.returncode == 2
    assert "was written by Megatron-LM or Megatron-Bridge; name a directory" in refused.stderr_text


def resumed_here(config, checkpoint):
    """Load a checkpoint into a run.

    Returns:
        What was restored, what was missing, the exported weights, the refusal without allow_partial, and the number of
        updates that the optimizer then counts.
    """
    from mcore_rl.errors import UserError
    from mcore_rl.models.megatron.training.optimizer import optimizers_with_parameters
    from mcore_rl.models.megatron.weights.conversion import export_hf_weights
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2)
    refusal = None
    try:
        policy.load_checkpoint(checkpoint)
    except UserError as error:
        refusal = str(error)
    restored = policy.load_checkpoint(checkpoint, True)
    weights = dict(export_hf_weights(policy.model))
    states = [s for one in optimizers_with_parameters(policy.optimizer) for s in one.optimizer.state.values()]
    (step,) = {int(state["step"]) for state in states} or {0}
    policy.shutdown()
    return restored.pieces, restored.missing, weights, refusal, step


@pytest.mark.parametrize("layout", and_long([TP2], [PP2, EP2]), ids=str)
def test_a_run_starts_from_a_foreign_checkpoint(copied, tmp_path, layout):
    converted(copied, tmp_path / "hf", SLICE / "config")
    make_tokenizer().save_pretrained(tmp_path / "hf")
    run_here = partial(run_processes, resumed_here, layout.apply(make_config(tmp_path / "hf")))
    pieces, missing, weights, refusal, _ = run_here(copied / "iter_0000002", world_size=layout.world_size)[0]
    assert pieces == ["weights"]
    assert missing == ["optimizer", "schedule", "random states", "data position"]
    assert "set checkpoint.allow_partial=true" in refusal
    model = load_file(tmp_path / "hf" / "model.safetensors")
    assert model.keys() == weights.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.items())


def test_flat_buckets_of_an_optimizer_are_refused_by_name(copied):
    from torch.distributed.checkpoint.metadata import Metadata

    from mcore_rl.models.megatron.checkpoint.foreign import unreadable_optimizer

    stored = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).exp_avg"
    index = Metadata({stored: None})
    refusal = unreadable_optimizer({"content_metadata": {"distrib_optim_sharding_type": "dp_reshardable"}}, index)
    assert "its format dp_reshardable is flat buckets" in refusal
    assert "save it with --dist-ckpt-optim-fully-reshardable" in refusal
    assert unreadable_optimizer({}, Metadata({"decoder.final_layernorm.weight": None})) is None


def test_an_index_names_norms_as_both_specs_do():
    from mcore_rl.models.megatron.checkpoint.names import aliases

    own, layer = "decoder.layers.pre_mlp_layernorm.weight", "decoder.layers.self_attention.linear_proj._extra_state"
    other = "decoder.layers.mlp.linear_fc1.layer_norm_weight"
    found = aliases([own, f"optimizer.state.exp_avg.{own}", f"{layer}/shard_0_2", f"{layer}/shard_1_2"])
    assert found == {
        other: own,
        f"optimizer.state.exp_avg.{other}": f"optimizer.state.exp_avg.{own}",
        "decoder.layers.pre_mlp_layernorm._extra_state/shard_0_2": f"{layer}/shard_0_2",
        "decoder.layers.pre_mlp_layernorm._extra_state/shard_1_2": f"{layer}/shard_1_2",
    }
    assert aliases([*found, *found.values()]) == {}
    assert aliases(["decoder.layers.0.self_attention.q_layernorm.weight"]) == {}, "a norm of heads has one name"

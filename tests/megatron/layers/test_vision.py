"""Tests of models that read images: every number is that of transformers, in packs and under parallel layouts."""

import copy
import json
from dataclasses import replace

import layout_cases
import peft
import pytest
import torch
import vision_cases
from layout_cases import as_saved, make_sft_config, plain_loss
from safetensors.torch import load_file, save_file
from small_models import and_long
from transformers import AutoModelForImageTextToText
from vision_cases import (
    FAMILIES,
    IMAGE,
    make_images,
    make_vision_data,
    model_arguments,
    plain_outcome,
    vision_config,
)

from mcore_rl.config import ModelConfig, ParallelConfig
from mcore_rl.data.images import PlacedImage
from mcore_rl.data.prefix_plan import token_identities
from mcore_rl.distributed.collectives import gather_objects_along
from mcore_rl.errors import UserError
from mcore_rl.models.megatron.layers.vision import rope_positions, shared_out
from mcore_rl.models.megatron.model.lora import TOWER_TARGETS
from mcore_rl.testing.layout_check import LayoutResult, ParallelLayout, compare, compute_layout_result
from mcore_rl.testing.processes import run_processes

LIMIT = 1e-5


@pytest.fixture(scope="module")
def vision_model_of(tmp_path_factory):
    """Return a function from a family's name to the directory of a small model, which is written once."""
    made = {}

    def get(family):
        if family not in made:
            made[family] = vision_cases.make_model(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


@pytest.fixture(scope="module")
def image_paths(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def expected(vision_model_of, image_paths):
    """Return a function that computes the configuration, the data and transformers' results of a case, once."""
    made = {}

    def get(family, tower):
        if (family, tower) not in made:
            path = vision_model_of(family)
            lr = {"vision_tower_lr": 4e-4} if tower == "trained" else {}
            config, data = vision_config(path, tower, **lr), make_vision_data(path, image_paths)
            made[family, tower] = config, data, plain_outcome(config, data)
        return made[family, tower]

    return get


LAYOUTS = and_long(
    [ParallelLayout(tp=2, sp=True)],
    [
        ParallelLayout(),
        ParallelLayout(dp=2, tokens_per_pack=160),
        ParallelLayout(pp=2, vpp=2, stages="Ett|t|t|L", tokens_per_pack=160),
        ParallelLayout(prefix=True),
        ParallelLayout(tp=2, cp=2, sp=True),
    ],
    [
        ParallelLayout(tp=2),
        ParallelLayout(cp=2),
        ParallelLayout(pp=2),
        ParallelLayout(packing=False),
        ParallelLayout(tp=2, pp=2, cp=2, sp=True),
        ParallelLayout(tokens_per_pack=160),
        ParallelLayout(pp=2, tokens_per_pack=160),
        ParallelLayout(tp=2, sp=True, packing=False),
        ParallelLayout(cp=2, prefix=True),
        ParallelLayout(tp=2, dp=2, sp=True, prefix=True),
        ParallelLayout(cp=4),
        ParallelLayout(pp=2, cp=2),
        ParallelLayout(tp=2, pp=2, sp=True),
        ParallelLayout(tp=2, cp=2),
        ParallelLayout(tp=2, dp=2),
        ParallelLayout(dp=4),
        ParallelLayout(tp=4, cp=2, sp=True),
        ParallelLayout(pp=2, first=3),
    ],
)


@pytest.mark.every_case
@pytest.mark.parametrize("tower", and_long(["trained"], ["frozen"]))
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_training_with_images_equals_transformers(layout, tower, expected):
    """Log-probabilities, loss, all gradients, and the weights after three steps."""
    check_layout("qwen3_vl", layout, tower, expected)


@pytest.mark.every_case
@pytest.mark.parametrize("tower", ["frozen", "trained"])
@pytest.mark.parametrize(
    ("family", "layout"),
    and_long(
        [],
        [
            ("qwen3_vl_moe", ParallelLayout(tp=2, sp=True, ep=2, etp=1)),
            ("qwen3_5", ParallelLayout(tp=2, cp=2, sp=True)),
            ("qwen3_5_moe", ParallelLayout(cp=2, ep=2)),
        ],
        [
            ("qwen3_vl_moe", ParallelLayout(pp=2, cp=2)),
            ("qwen3_vl_moe", ParallelLayout(ep=2, dp=2)),
            ("qwen3_5", ParallelLayout()),
            ("qwen3_5", ParallelLayout(pp=2, prefix=True)),
            ("qwen3_5_moe", ParallelLayout(tp=2, sp=True)),
        ],
    ),
    ids=str,
)
def test_training_of_other_families_with_images_equals_transformers(family, layout, tower, expected):
    check_layout(family, layout, tower, expected)


def check_layout(family, layout, tower, expected):
    config, data, plain = expected(family, tower)
    found = run_processes(
        compute_layout_result, layout.apply(config), copy.deepcopy(data), 3, world_size=layout.world_size
    )[0]
    difference = compare(found, plain)
    # Rounding errors accumulate in the states of delta nets.
    assert difference.within(LIMIT, 5e-4 if family.startswith("qwen3_5") else LIMIT), difference
    before = layout_cases.of_single_experts(load_file(config.model.path / "model.safetensors"))
    for name, weight in found.weights.items():
        moved = not torch.equal(weight, before[name])
        assert moved == (tower == "trained" or not name.startswith("model.visual.")), name


@pytest.mark.long
@pytest.mark.parametrize("options", [{"recompute_activations": True}, {"recompute_modules": ["mlp"]}], ids=str)
@pytest.mark.parametrize("layout", [ParallelLayout(), ParallelLayout(tp=2, sp=True)], ids=str)
def test_recomputed_layers_have_the_gradients_of_transformers(options, layout, expected):
    config, data, plain = expected("qwen3_vl", "trained")
    values = layout.apply(config).model_dump()
    values["model"].update(options)
    again = type(config).model_validate(values)
    found = run_processes(compute_layout_result, again, copy.deepcopy(data), 3, world_size=layout.world_size)[0]
    assert compare(found, plain).within(LIMIT, LIMIT)


@pytest.mark.long
@pytest.mark.parametrize("tower", ["frozen", "trained"])
def test_overlapped_communication_does_not_change_training_with_images(tower, expected):
    """Some microbatches have no image, and the replicas have different numbers of such microbatches."""
    config, data, plain = expected("qwen3_vl", tower)
    values = ParallelLayout(dp=2, packing=False).apply(config).model_dump()
    values["parallel"].update(overlap_grad_reduce=True, overlap_param_gather=True)
    config = type(config).model_validate(values)
    found = run_processes(compute_layout_result, config, copy.deepcopy(data), 3, world_size=2)[0]
    assert compare(found, plain).within(LIMIT, LIMIT)


# ------------------------------------------------------------------ controls: faults that the comparison finds


def with_fault(fault, config, data):
    """Run `compute_layout_result` with a fault of `FAULTS`."""
    FAULTS[fault]()
    return compute_layout_result(config, data, 1)


def _wrong_sections():
    from mcore_rl.models.megatron.families.vision_language import VisionLanguage

    blocks = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
    VisionLanguage.rope_axes = lambda self: blocks


def _shifted_features():
    from mcore_rl.models.megatron.layers.vision import VisionTower

    features = VisionTower.features
    VisionTower.features = lambda self, division: features(self, division).roll(1, dims=0)


def _no_deepstack():
    from mcore_rl.models.megatron.layers.vision import PackImages

    PackImages.add_to = lambda self, hidden, layer: hidden


def _gradient_not_summed():
    from mcore_rl.models.megatron.layers.vision import VisionTower

    VisionTower.sum_gradients = lambda self: None


def _text_positions():
    import mcore_rl.models.megatron.training.forward_step as forward_step

    forward_step.pack_positions = lambda microbatch: microbatch.layout.position_ids


FAULTS = {
    "wrong rotary sections": _wrong_sections,
    "features shifted by one": _shifted_features,
    "no DeepStack": _no_deepstack,
    "gradient of the tower not summed": _gradient_not_summed,
    "positions of text": _text_positions,
}


@pytest.mark.every_case
@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault, expected):
    config, data, plain = expected("qwen3_vl", "trained")
    config = ParallelLayout(tp=2).apply(config)
    found = run_processes(with_fault, fault, config, copy.deepcopy(data), world_size=2)[0]
    distances = [
        (found.gradients[name] - gradient).norm() / gradient.norm()
        for name, gradient in plain.gradients.items()
        if gradient.norm() > 1e-3
    ]
    assert max(distances) > 1e-2


# ------------------------------------------------------------------ packs


def logits_of(config, batches):
    """Return log-probabilities of several batches, and how many images this rank's tower has seen after each."""
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=10)
    found = []
    for data in batches:
        scores = policy.get_logprobs(data)["logprobs"]
        found.append((scores, policy.model.tower.computed))
    topology = policy.topology
    counts = gather_objects_along([count for _, count in found], topology.tensor, topology.context)
    policy.shutdown()
    return [scores for scores, _ in found], counts


@pytest.mark.parametrize(
    "layout",
    and_long([ParallelLayout()], [ParallelLayout(tp=2, sp=True), ParallelLayout(cp=2), ParallelLayout(prefix=True)]),
    ids=str,
)
def test_rows_do_not_see_images_of_other_rows_of_their_pack(layout, vision_model_of, image_paths):
    """Bit for bit: rows without images, with these images or others beside them, and where no row has an image."""
    path = vision_model_of("qwen3_vl")
    data = make_vision_data(path, image_paths)
    others = copy.deepcopy(data)  # each image becomes another one of the same size
    changed = image_paths[0].parent / "other"
    changed.mkdir(exist_ok=True)
    twins = make_images(changed)
    digests = [vision_cases.digest(twin) for twin in reversed_pixels(twins)]
    numbers = {vision_cases.digest(image): number for number, image in enumerate(image_paths)}
    others["images"] = [
        tuple(PlacedImage(i.start, i.grid, digests[numbers[i.digest]], str(twins[numbers[i.digest]])) for i in images)
        for images in data["images"]
    ]
    without = copy.deepcopy(data)
    del without["images"]
    config = layout.apply(vision_config(path, make=make_sft_config))
    results, counts = run_processes(logits_of, config, [data, others, without, data], world_size=layout.world_size)[0]
    text = [row for row, images in enumerate(data["images"]) if not images]
    seeing = [row for row, images in enumerate(data["images"]) if images]
    for other in results[1:]:
        assert torch.equal(results[0][text], other[text])
    assert torch.equal(results[0], results[3])
    for other in results[1:3]:
        assert ((results[0][seeing] - other[seeing]).abs().amax(dim=1) > 1e-2).all()
    # Each distinct image is computed once, by one of the ranks; the last batch finds all features of the first.
    after = [sum(of_rank[batch] for of_rank in counts) for batch in range(4)]
    assert after == [5, 10, 10, 10]
    assert all(of_rank[0] for of_rank in counts), "every rank computes some of the images"


def reversed_pixels(paths):
    from PIL import Image

    for path in paths:
        Image.open(path).rotate(180).save(path)
        yield path


def test_images_are_divided_by_their_work_and_stay_on_their_ranks():
    assert shared_out([10, 40, 30, 20], 2, {}) == [[0, 1], [2, 3]]
    assert shared_out([10, 40, 30, 20], 3, {1: 2, 3: 2}) == [[2], [0], [1, 3]]
    assert shared_out([], 2, {}) == [[], []]
    assert shared_out([8192, 1000, 1000, 1000], 2, {}) == [[0], [1, 2, 3]]


def test_positions_equal_those_of_transformers(vision_model_of, image_paths):
    path = vision_model_of("qwen3_vl")
    data = make_vision_data(path, image_paths)
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).model
    for row, length, images in zip(data["input_ids"], data["input_lengths"].tolist(), data["images"], strict=True):
        arguments = model_arguments(row[:length], images, path)
        arguments.pop("pixel_values", None)
        arguments.setdefault("mm_token_type_ids", torch.zeros(1, length, dtype=torch.long))
        theirs, shift = model.get_rope_index(**arguments)
        assert torch.equal(rope_positions(length, images), theirs[:, 0].T)
        assert sum(image.shift for image in images) == int(shift)


def test_positions_of_images_with_frames_and_of_neighbouring_images():
    """By hand: text of 1, an image of 2 frames of 1 × 3 tokens, directly after it one of 2 × 1, text of 2."""
    images = [PlacedImage(1, (2, 1, 3), "a", "a"), PlacedImage(7, (1, 2, 1), "b", "b")]
    first = [[1, 1, 1], [1, 1, 2], [1, 1, 3], [2, 1, 1], [2, 1, 2], [2, 1, 3]]
    expected = [[0, 0, 0], *first, [4, 4, 4], [4, 5, 4], [6, 6, 6], [7, 7, 7]]
    assert rope_positions(11, images).tolist() == expected
    assert rope_positions(0, []).shape == (0, 3)


def test_tokens_of_different_images_are_not_shared():
    ids = torch.tensor([[5, IMAGE, IMAGE, 6]]).repeat(4, 1)
    images = [[PlacedImage(1, (1, 1, 2), digest, path)] for digest, path in (("a", "x"), ("a", "y"), ("b", "x"))]
    identities = token_identities({"input_ids": ids, "images": [*images, None]})
    assert torch.equal(identities[0], identities[1]), "the same image in two files"
    assert not set(identities[0, 1:3].tolist()) & set(identities[2, 1:3].tolist())
    assert identities[3].tolist() == ids[3].tolist(), "a token that is no image"
    assert identities[0, 1] != identities[0, 2] and (identities[:, [0, 3]] == ids[:, [0, 3]]).all()
    assert torch.equal(token_identities({"input_ids": ids}), ids)


def test_pairs_with_images_share_their_prompts(vision_model_of, image_paths):
    """This is what the layouts with common prefixes compute."""
    from mcore_rl.data.batching import microbatch_planner
    from mcore_rl.distributed.packs import PrefixLayout

    path = vision_model_of("qwen3_vl")
    config, data = vision_config(path), make_vision_data(path, image_paths)

    def shared_rows(data):
        batches = microbatch_planner(ParallelLayout(prefix=True).apply(config), 2, 1).microbatches(data, 0)
        trees = [(batch.rows, batch.layout.tree) for batch in batches if isinstance(batch.layout, PrefixLayout)]
        return {row for rows, tree in trees for row, end in zip(rows, tree.ends, strict=True) if tree.parents[end] >= 0}

    assert {2, 3} <= shared_rows(data) <= {0, 1, 2, 3}
    different = copy.deepcopy(data)
    first, second = different["images"][3]
    different["images"][3] = (replace(first, digest="of another image"), second)
    assert not {2, 3} & shared_rows(different), "the first image of the two rows differs"


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("sizes", "layout"),
    [
        ({"pipeline_model_parallel_size": 4}, "Ett|t|t|L"),
        ({"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}, "Ett|t|t|L"),
        ({"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 1}, "Ett|ttL"),
    ],
)
def test_features_of_deepstack_need_their_layers_in_the_first_chunk(sizes, layout, vision_model_of):
    from mcore_rl.models.megatron.model.hf_config import check_model_fits, load_hf_config

    hf = load_hf_config(vision_model_of("qwen3_vl"))
    with pytest.raises(UserError, match=r"first 2 layers of qwen3_vl, .* has only 1; set ") as error:
        check_model_fits(hf, ParallelConfig(**sizes), 64)
    assert f"='{layout}'" in str(error.value)
    stages = {"pipeline_model_parallel_size": sizes["pipeline_model_parallel_size"]}
    check_model_fits(hf, ParallelConfig(**stages, pipeline_model_parallel_layout=layout), 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_config": {"out_hidden_size": 32}}, r"out_hidden_size \(32\) must be .* hidden_size \(64\)"),
    ],
)
def test_configurations_that_do_not_fit_together_are_refused(changes, message, vision_model_of, tmp_path):
    from mcore_rl.models.megatron.model.hf_config import check_model_fits, load_hf_config

    values = json.loads((vision_model_of("qwen3_vl") / "config.json").read_text())
    for key, part in changes.items():
        values[key].update(part)
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=message):
        check_model_fits(load_hf_config(tmp_path), ParallelConfig(), 64)


def test_a_tower_is_trained_only_where_there_is_one(vision_model_of, model_of):
    from mcore_rl.models.megatron.model.hf_config import check_model_fits, load_hf_config

    trained = {"path": "unused", "vision_tower": "trained"}
    with pytest.raises(UserError, match="vision_tower: llama has no vision tower"):
        check_model_fits(load_hf_config(model_of("llama")), ParallelConfig(), 64, ModelConfig(**trained))
    values = make_sft_config(vision_model_of("qwen3_vl")).model_dump()
    values["optimizer"]["vision_tower_lr"] = 1e-5
    with pytest.raises(ValueError, match=r"vision_tower_lr: has no effect, because model\.vision_tower=frozen"):
        type(make_sft_config(values["model"]["path"])).model_validate(values)
    values["model"]["vision_tower"] = "trained"
    with pytest.raises(ValueError, match=r"vision_tower_lr: has no effect, because model\.lora trains only adapters"):
        type(make_sft_config(values["model"]["path"])).model_validate(
            {**values, "model": {**values["model"], "lora": {"rank": 2}}}
        )
    assert type(make_sft_config(values["model"]["path"])).model_validate(values).optimizer.vision_tower_lr == 1e-5


def test_a_text_model_needs_the_layers_to_which_features_are_added(vision_model_of):
    from mcore_rl.models.megatron.model.hf_config import check_model_fits, load_hf_config

    hf = load_hf_config(vision_model_of("qwen3_vl"))
    hf.text_config.num_hidden_layers = 1
    with pytest.raises(UserError, match="the text model has only 1; use a model with more layers"):
        check_model_fits(hf, ParallelConfig(), 64)


def test_every_family_has_a_case():
    from mcore_rl.models.megatron.families import VISION
    from mcore_rl.utils.model_directory import VISION_MODEL_TYPES

    assert sorted(VISION_MODEL_TYPES) == sorted(family.model_type for family in VISION)

    assert {model_type for model_type, *_ in FAMILIES.values()} == {family.model_type for family in VISION}


def test_experts_in_either_orientation_are_read_and_written(vision_model_of, tmp_path):
    """Published directories of Qwen3-VL-MoE have the transposes of the experts that transformers 5 writes."""
    from mcore_rl.models.megatron.model.hf_directory import SafetensorsDirectory, packed_like

    tensors = load_file(vision_model_of("qwen3_vl_moe") / "model.safetensors")
    published = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor for name, tensor in tensors.items()
    }
    assert any(".experts.gate_up_proj" in name for name in tensors)
    save_file(published, tmp_path / "model.safetensors")
    source = SafetensorsDirectory(tmp_path)
    expected = layout_cases.of_single_experts(tensors)
    assert source.names() == set(expected)
    for name, tensor in expected.items():
        assert tuple(source.shape(name)) == tuple(tensor.shape)
        assert torch.equal(source.read(name), tensor), name
    name = next(name for name in expected if name.endswith("experts.5.up_proj.weight"))
    assert torch.equal(source.read(name, slice(3, 9), slice(2, 7)), expected[name][3:9, 2:7])
    written = dict(packed_like(((name, source.read(name)) for name in sorted(expected)), source))
    assert written.keys() == published.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in published.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shrunk_model_reads_images(family, vision_model_of, image_paths, tmp_path):
    """The models of `mcore-rl layouts`: small, divisible as layouts require, and with the same image tokens."""
    from mcore_rl.models.megatron.model.hf_config import check_model_fits, load_hf_config
    from mcore_rl.models.megatron.model.hf_directory import SafetensorsDirectory
    from mcore_rl.models.megatron.weights.conversion import check_hf_tensors
    from mcore_rl.testing.layout_check import shrink_model

    path, layout = vision_model_of(family), ParallelLayout(tp=2, sp=True, pp=2)
    shrink_model(ModelConfig(path=path), tmp_path, [layout])
    sizes = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2}
    check_model_fits(load_hf_config(tmp_path), ParallelConfig(**sizes), 64)
    data, own = make_vision_data(path, image_paths), make_vision_data(tmp_path, image_paths)
    assert torch.equal(data["input_ids"], own["input_ids"])
    with_head = tmp_path / "reward"
    shrink_model(ModelConfig(path=path, head="reward"), with_head, [layout])
    check_hf_tensors(load_hf_config(with_head, head="reward"), SafetensorsDirectory(with_head))
    assert load_file(with_head / "model.safetensors")["score.weight"].any()
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    row, images = data["input_ids"][3, : data["input_lengths"][3]], data["images"][3]
    with torch.no_grad():
        assert model(**model_arguments(row, images, tmp_path)).logits.isfinite().all()


@pytest.fixture(scope="module")
def adapted(vision_model_of, image_paths, tmp_path_factory):
    """Return a function that computes a configuration with adapters, the data, and PEFT's results, once."""
    from mcore_rl.testing.layout_check import invent_adapter

    made = {}

    def get(family, tower):
        if (family, tower) not in made:
            path = vision_model_of(family)
            config, data = vision_config(path, tower), make_vision_data(path, image_paths)
            model = ModelConfig(path=path, dtype="float32", vision_tower=tower, lora={"rank": 4, "alpha": 8})
            adapter = tmp_path_factory.mktemp("adapter") / "peft"
            config = config.model_copy(update={"model": invent_adapter(model, adapter)})
            made[family, tower] = config, data, outcome_of_peft(config, data)
        return made[family, tower]

    return get


def outcome_of_peft(config, data):
    """Run the steps of `config` with PEFT's adapters on transformers' model."""
    base = AutoModelForImageTextToText.from_pretrained(config.model.path, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, config.model.lora.path, is_trainable=True)
    trained = {name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        trained.values(), lr=config.optimizer.lr, eps=config.optimizer.adam_eps, weight_decay=0
    )
    first, metrics = None, []
    for _ in range(3):
        optimizer.zero_grad()
        logprobs = vision_cases.plain_logprobs(model, data, config.model.path)
        loss, of_step = plain_loss(logprobs, data, config)
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in trained.items()}
        of_step["grad_norm"] = torch.nn.utils.clip_grad_norm_(trained.values(), config.optimizer.clip_grad).item()
        optimizer.step()
        metrics.append(of_step)
        first = first or (logprobs.detach(), gradients)
    merged = model.merge_and_unload()
    return LayoutResult(metrics, *first, layout_cases.of_single_experts(as_saved(merged, lambda tensor: tensor)))


@pytest.mark.every_case
@pytest.mark.parametrize("tower", ["frozen", "trained"])
@pytest.mark.parametrize(
    "layout",
    and_long(
        [],
        [ParallelLayout(tp=2, cp=2, sp=True)],
        [ParallelLayout(), ParallelLayout(pp=2), ParallelLayout(tp=2), ParallelLayout(dp=2, prefix=True)],
    ),
    ids=str,
)
def test_adapters_trained_with_images_equal_pefts(layout, tower, adapted, vision_model_of):
    """Log-probabilities, loss, the gradient of every adapter, and the merged weights after three steps."""
    config, data, plain = adapted("qwen3_vl", tower)
    found = run_processes(
        compute_layout_result, layout.apply(config), copy.deepcopy(data), 3, world_size=layout.world_size
    )[0]
    of_tower = {name for name in found.gradients if ".visual." in name}
    assert len(of_tower) == (2 * 4 * 3 if tower == "trained" else 0), "A and B of four projections in three layers"
    assert compare(found, plain).within(LIMIT, LIMIT), compare(found, plain)
    before = load_file(config.model.path / "model.safetensors")
    for name, weight in found.weights.items():
        if name.startswith("model.visual."):
            adapted_here = tower == "trained" and any(f".{end}.weight" in name for end in TOWER_TARGETS)
            assert torch.equal(weight, before[name]) != adapted_here, name


@pytest.mark.long
@pytest.mark.parametrize("options", [{"recompute_activations": True}, {"lora": {"dropout": 0.1}}], ids=str)
def test_adapters_of_a_tower_are_recomputed_and_dropped_out(options, adapted):
    """Recomputation changes no gradient; dropout changes them."""
    config, data, plain = adapted("qwen3_vl", "trained")
    values = ParallelLayout(tp=2).apply(config).model_dump()
    dropout = options.pop("lora", {})
    values["model"] |= options
    values["model"]["lora"] |= dropout
    changed = type(config).model_validate(values)
    found = run_processes(compute_layout_result, changed, copy.deepcopy(data), 3, world_size=2)[0]
    difference = compare(found, plain)
    assert difference.within(LIMIT, LIMIT) == (not dropout)
    assert difference.scores < LIMIT, "scores have no dropout"


@pytest.mark.parametrize(
    ("lora", "tower", "message"),
    [
        (
            {"target_modules": ["attn.qkv"]},
            "frozen",
            r"attn\.qkv is in the vision tower; set model\.vision_tower=trained",
        ),
        ({"target_modules": ["q_proj"]}, "trained", r"lora\.target_modules has no adapters in it; leave model\.vision"),
        ({"target_modules": ["patch_embed.proj"]}, "trained", "has no patch_embed.proj to adapt; it has attn.qkv, "),
    ],
)
def test_adapters_and_tower_must_fit_together(lora, tower, message, vision_model_of):
    from mcore_rl.models.megatron.model.hf_config import check_model_fits, load_hf_config

    path = vision_model_of("qwen3_vl")
    model = ModelConfig(path=path, vision_tower=tower, lora=lora)
    with pytest.raises(UserError, match=message):
        check_model_fits(load_hf_config(path), ParallelConfig(), 64, model)

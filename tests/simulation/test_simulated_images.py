"""Tests that the simulation counts the vision tower as a real step does, and its operations as torch does."""

import json
import re
from dataclasses import replace

import pytest
import torch
from ports import free_port
from simulated_cases import LENGTHS, SEQUENCES, call, config_of, in_processes, prepare_real_process, real_rank
from small_models import and_long
from torch.utils.flop_counter import FlopCounterMode
from vision_cases import FAMILIES, MROPE, TOWER, make_images, make_model, make_vision_data

from mcore_rl.cli.dry_run import first_batch
from mcore_rl.config import DPOConfig, GRPOConfig, SFTConfig
from mcore_rl.config.parallel import ParallelLayout
from mcore_rl.data.images import PlacedImage
from mcore_rl.errors import UserError
from mcore_rl.run.setup import load_inputs
from mcore_rl.simulation.rank import PHASES, SCORING, TRAINING
from mcore_rl.simulation.sequences import Sequences, sequences_of
from mcore_rl.simulation.step import simulate_rank
from mcore_rl.testing.processes import run_processes

TEXT = {
    "hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32,
    "rope_parameters": {**MROPE, "mrope_section": [6, 5, 5]},
}  # fmt: skip
VISION = {**TOWER, "hidden_size": 128, "intermediate_size": 320, "num_heads": 4, "out_hidden_size": 256}
GRIDS = [[(4, 8)], [], [(6, 5), (2, 3)], [], [(7, 7)], [(4, 8)], [(1, 11)], []]


def images_of(length, grids):
    """Return images in a row, as far as its length allows."""
    found, start = [], 1
    for rows, columns in grids:
        image = PlacedImage(start, (1, rows, columns), f"{rows} × {columns}", "")
        if image.end < length // 2:
            found.append(image)
            start = image.end + 1
    return tuple(found)


WITH_IMAGES = Sequences(LENGTHS, SEQUENCES.responses, tuple(map(images_of, LENGTHS, GRIDS)))


@pytest.fixture(scope="module")
def model(
    tmp_path_factory,
):
    family = FAMILIES["qwen3_vl"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "qwen3_vl", (family[0], family[1], {**VISION, "deepstack_visual_indexes": [0, 1]}))
        return make_model("qwen3_vl", tmp_path_factory.mktemp("simulated"), **TEXT)


LAYOUTS = and_long(
    [],
    [ParallelLayout(), ParallelLayout(tp=2, cp=2, sp=True)],
    [ParallelLayout(pp=2), ParallelLayout(tp=2), ParallelLayout(cp=2), ParallelLayout(dp=2)],
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("tower", ["frozen", "trained"])
def test_a_simulated_rank_with_images_equals_a_real_rank(tower, layout, model):
    sections = {"model": {"path": str(model), "vision_tower": tower}}
    config, size, port = layout.apply(config_of(model, **sections)), layout.world_size, free_port()
    ranks = [(config, rank, size, port, WITH_IMAGES) for rank in range(size)]
    real = in_processes(real_rank, *ranks, prepare=prepare_real_process)
    chosen = sorted({0, size - 1})
    simulated = in_processes(simulate_rank, *[(config, rank, size, WITH_IMAGES, "cpu") for rank in chosen])
    for one, other in zip([real[rank] for rank in chosen], simulated, strict=True):
        assert other.parts == one.parts and other.model_flops == one.model_flops
        assert in_step(other.traffic) == in_step(one.traffic) and in_step(other.calls) == in_step(one.calls)
        # Threads of gloo keep copies of gradients for some time, and the tower's are as large as the activations.
        close = 0.08 if tower == "trained" else 0.03
        assert other.peak == pytest.approx(one.peak, rel=close), (one.memory, other.memory)
    assert real[0].parts[TRAINING, "vision tower"] > 0


def in_step(transfers):
    return {kind: amount for kind, amount in transfers.items() if kind.phase in PHASES}


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_the_towers_operations_are_those_that_torch_counts(family, tmp_path):
    from transformers import AutoConfig

    from mcore_rl.models.megatron.families import family_of
    from mcore_rl.models.megatron.layers.vision import build_tower

    found = family_of(AutoConfig.from_pretrained(make_model(family, tmp_path)))
    tower = build_tower(found.vision_config, torch.float32)
    tower.config._attn_implementation = "eager"  # whose products torch counts on every processor
    images = [
        PlacedImage(0, (1, 4, 8), "a", ""),
        PlacedImage(0, (1, 1, 3), "b", ""),
        PlacedImage(0, (1, 6, 5), "c", ""),
    ]
    grids = torch.tensor([(1, 2 * rows, 2 * columns) for _, rows, columns in (image.grid for image in images)])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        tower(torch.zeros(4 * sum(image.count for image in images), 3 * 2 * 4 * 4), grids)
    assert found.tower_flops(images) == counter.get_total_flops()


def flops_of(configs, data):
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policies = [MegatronPolicy(config, 2) for config in configs]
    images = {image.identity: image for row in data["images"] for image in row}.values()
    return [policy.flops_of(data) for policy in policies], policies[0].model.family.tower_flops(images)


def test_the_rate_of_training_counts_a_trained_tower(tmp_path):
    path = make_model("qwen3_vl", tmp_path / "model")
    data = make_vision_data(path, make_images(tmp_path))
    towers = [{"model": {"path": str(path), "vision_tower": tower}} for tower in ("frozen", "trained")]
    configs = [config_of(path, **tower) for tower in towers]
    (((frozen, trained), forward),) = run_processes(flops_of, configs, data, world_size=1)
    assert trained - frozen == pytest.approx(3 * forward, rel=1e-9) and forward > 0


@pytest.mark.long
def test_a_frozen_tower_computes_each_image_once_and_a_trained_one_in_each_pass(model):
    pairs = {"batch": {"global_batch_size": 4, "tokens_per_pack": 768}, "dpo": {"reference": "swap"}}
    towers = [{"model": {"path": str(model), "vision_tower": tower}} for tower in ("frozen", "trained")]
    configs = [config_of(model, DPOConfig, **pairs, **tower) for tower in towers]
    distinct = replace(WITH_IMAGES, images=(*WITH_IMAGES.images[:5], (), *WITH_IMAGES.images[6:]))
    frozen, trained = in_processes(simulate_rank, *[(config, 0, 1, distinct) for config in configs])
    once = frozen.parts[SCORING, "vision tower"]
    assert once > 0 and (TRAINING, "vision tower") not in frozen.parts
    assert trained.parts[SCORING, "vision tower"] == once
    # The backward pass costs twice the forward pass, without the gradient of the pixels.
    assert 2.9 * once < trained.parts[TRAINING, "vision tower"] < 3 * once
    patches = [4 * image.count for images in distinct.images for image in images]
    in_attention = 3.5 * 4 * 3 * 128 * sum(n * n for n in patches)  # 3 blocks of width 128; a product is recomputed
    assert trained.attention[TRAINING] - frozen.attention[TRAINING] == in_attention
    assert trained.model_flops > frozen.model_flops
    assert trained.peak > frozen.peak


@pytest.mark.long
def test_a_trained_towers_blocks_are_recomputed(model):
    kept, recomputed = (
        {"model": {"path": str(model), "vision_tower": "trained", "recompute_activations": recompute}}
        for recompute in (False, True)
    )
    sequences = Sequences((384,) * 8, (64,) * 8, ((PlacedImage(1, (1, 15, 20), "a", ""),),) * 8)
    kept, recomputed = in_processes(
        simulate_rank, *[(config_of(model, **sections), 0, 1, sequences) for sections in (kept, recomputed)]
    )
    part = TRAINING, "vision tower"
    # In each of 4 packs, 3 blocks with 1,200 patches, up to the last product, whose result is not needed.
    of_block = 128 * 384 + 128 * 128 + 128 * 320
    assert recomputed.parts[part] - kept.parts[part] == 4 * 3 * 2 * 1200 * of_block
    assert recomputed.peak < kept.peak
    assert recomputed.model_flops == kept.model_flops


# ------------------------------------------------------------------ images of a simulation


def test_images_of_a_group_are_the_same_and_those_of_other_prompts_differ(model):
    rollouts = {"num_prompts_per_step": 2, "num_generations_per_prompt": 3, "max_new_tokens": 50}
    found = sequences_of(config_of(model, GRPOConfig, grpo=rollouts), [90], 0.4, [12, 7])
    assert [[(i.start, i.grid) for i in images] for images in found.images] == [[(1, (1, 3, 4)), (13, (1, 1, 7))]] * 6
    names = [[image.digest for image in images] for images in found.images]
    assert names[:3] == [names[0]] * 3 and names[3:] == [names[3]] * 3 and not set(names[0]) & set(names[3])
    with pytest.raises(UserError, match=r"--image-tokens: the images have 60 tokens, .* 90 tokens has a prompt of 54"):
        sequences_of(config_of(model, GRPOConfig, grpo=rollouts), [90], 0.4, [60])


def test_a_dry_run_simulates_the_images_of_the_data(model, tmp_path):
    (path, *_) = make_images(tmp_path)
    content = [{"type": "image", "image": path.name}, {"type": "text", "text": "what ?"}]
    answers = [content, "what ?"]
    lines = [[{"role": "user", "content": c}, {"role": "assistant", "content": "a"}] for c in answers]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"messages": line}) + "\n" for line in lines))
    data = {"train": str(tmp_path / "train.jsonl"), "max_sequence_length": 384, "cache_dir": str(tmp_path / "cache")}
    config = config_of(model, SFTConfig, data=data, batch={"global_batch_size": 2})
    sequences, _ = first_batch(config, load_inputs(config, world_size=1).train)
    assert sorted(sum(image.count for image in images) for images in sequences.images) == [0, 15]


@pytest.mark.exhaustive
def test_the_program_takes_the_tokens_of_images(model, tmp_path):
    (tmp_path / "dpo.yaml").write_text(
        f"output_dir: out\nmodel: {{path: {model}}}\ndata: {{max_sequence_length: 384}}\n"
        "batch: {global_batch_size: 4}\noptimizer: {lr: 1.0e-5}\ntrainer: {max_steps: 2}\n"
    )
    arguments = tmp_path / "dpo.yaml", "--world-size", 1, "--lengths", 300
    done = call(*arguments, "--image-tokens", "64,35")
    assert done.returncode == 0, done.stderr
    assert "8 sequences of 2,400 tokens (792 of images) a step" in done.stdout
    assert re.search(r"vision tower +[\d.]+ [GM]FLOP", done.stdout)
    refused = call(*arguments, "--image-tokens", "64,x")
    assert refused.returncode == 2 and "--image-tokens 64,x: write numbers of tokens" in refused.stderr

"""Tests of generation in the training processes from prompts with images."""

from dataclasses import replace

import pytest
import torch
from layout_cases import make_sft_config
from small_models import and_long
from transformers import AutoModelForImageTextToText
from vision_cases import (
    CHAT_TEMPLATE,
    SPECIAL,
    digest,
    make_images,
    make_model,
    make_tokenizer,
    make_vision_data,
    model_arguments,
)

from mcore_rl.data.images import PlacedImage
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.distributed.topology import ParallelDimension, Topology
from mcore_rl.models.generation.interfaces import prompts_to_answer
from mcore_rl.models.generation.sampling import SamplingParams
from mcore_rl.testing.layout_check import ParallelLayout
from mcore_rl.testing.processes import run_processes

NEW_TOKENS, LIMIT = 14, 100
FAMILIES = and_long(["qwen3_vl"], [])


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """Return a function from a family's name to the directory of a small model and to prompts with images."""
    made = {}

    def get(family):
        if family not in made:
            path = make_model(family, tmp_path_factory.mktemp(family), initializer_range=0.1)
            data = make_vision_data(path, make_images(tmp_path_factory.mktemp("images")))
            rows = [0, 1, 2, 2, 3, 4, 10, 7, 0]  # equal prompts with equal and with different images
            twin = data["input_lengths"][2]
            prompts = [data["input_ids"][row, : data["input_lengths"][row]].tolist() for row in rows]
            images = [data["images"][row] for row in rows]
            # The second of the two equal prompts shows other images of the same sizes.
            images[3] = rotated(images[3], tmp_path_factory.mktemp("others"))
            assert prompts[2] == prompts[3] and int(twin) == len(prompts[2])
            made[family] = path, prompts, images
        return made[family]

    return get


def rotated(images, directory):
    """Return images with other pixels at the same places."""
    from PIL import Image

    found = []
    for number, image in enumerate(images):
        path = directory / f"{number}.png"
        Image.open(image.path).rotate(180).save(path)
        found.append(replace(image, digest=digest(path), path=str(path)))
    return tuple(found)


def config_of(path, layout):
    values = make_sft_config(path).model_dump()
    values["data"]["max_sequence_length"] = LIMIT
    return layout.apply(type(make_sft_config(path)).model_validate(values))


def generate(config, prompts, images, params, greedy):
    """Return the output, the largest difference from the trainer's log-probabilities, and the images computed here."""
    from mcore_rl.models.generation.megatron.generation import MegatronGeneration
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=10)
    tokenizer = make_tokenizer(SPECIAL, CHAT_TEMPLATE)
    generation = MegatronGeneration(policy.model, params, LIMIT, tokenizer, 4, prefill_tokens=150)
    out = generation.generate(prompts_to_answer(prompts, range(len(prompts)), images), greedy)
    computed = policy.model.tower.computed
    ids, lengths = out["output_ids"], out["unpadded_sequence_lengths"]
    data = BatchedDataDict(input_ids=ids, input_lengths=lengths, sample_mask=torch.ones(len(ids)), images=list(images))
    logprobs = policy.get_logprobs(data)["logprobs"]
    difference = float(((logprobs - out["logprobs"]) * (out["logprobs"] != 0)).abs().max())
    policy.shutdown()
    return [row[:n].tolist() for row, n in zip(ids, lengths, strict=True)], difference, computed


def run(cases, family, layout, params, greedy):
    path, prompts, images = cases(family)
    arguments = config_of(path, layout), prompts, images, params, greedy
    return run_processes(generate, *arguments, world_size=layout.world_size)[0]


@pytest.mark.every_case
@pytest.mark.parametrize(
    "layout",
    and_long([ParallelLayout()], [ParallelLayout(tp=2, sp=True), ParallelLayout(pp=2), ParallelLayout(cp=2)]),
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_responses_to_images_equal_those_of_transformers(family, layout, cases):
    path, prompts, images = cases(family)
    params = SamplingParams(NEW_TOKENS, stop_token_ids=(1,), seed=1)
    found, difference, computed = run(cases, family, layout, params, greedy=True)
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    for prompt, own, ids in zip(prompts, images, found, strict=True):
        arguments = model_arguments(torch.tensor(prompt), own, path)
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": 1, "pad_token_id": 0}
        expected = model.generate(**arguments, **options)[0].tolist()
        assert ids == expected
    assert found[2] != found[3], "equal prompts with different images have different responses"
    assert found[0] == found[8]
    assert difference <= 1e-5
    if layout.world_size == 1:
        assert computed == len({image.identity for own in images for image in own})


@pytest.mark.long
@pytest.mark.parametrize(
    "layout", [ParallelLayout(tp=2, sp=True), ParallelLayout(tp=2), ParallelLayout(pp=2), ParallelLayout(cp=2)], ids=str
)
def test_samples_do_not_depend_on_the_layout(layout, cases):
    params = SamplingParams(NEW_TOKENS, temperature=1.0, stop_token_ids=(1,), seed=5)
    one, _, _ = run(cases, "qwen3_vl", ParallelLayout(), params, greedy=False)
    other, difference, _ = run(cases, "qwen3_vl", layout, params, greedy=False)
    assert one == other
    assert difference <= 1e-5


@pytest.mark.parametrize("multiple", [2, 8, 256])
def test_features_are_placed_where_the_decoder_divides_the_padded_tokens(multiple):
    """Under sequence parallelism, ranks have equal parts of the padded tokens; FP8 pads to large multiples."""
    from mcore_rl.models.megatron.layers.vision import VisionTower, prompt_images

    images = [PlacedImage(2, (1, 1, 3), "a", ""), PlacedImage(1, (1, 2, 2), "b", "")]
    found = []
    for rank in range(2):
        topology = Topology(tensor=ParallelDimension(rank, 2), sequence_parallel=True)
        tower = VisionTower(None, topology, merge=2, deepstack=0, is_trained=False)
        placed = prompt_images([images[:1], images[1:]], [6, 7], tower, multiple)
        part = -(-13 // multiple) * multiple // 2
        found += [rank * part + place for place in placed.places.tolist()]
    assert found == [2, 3, 4, 7, 8, 9, 10]

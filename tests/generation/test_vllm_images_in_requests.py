"""Tests of requests with images to vLLM's servers, and of whole runs with stand-ins for these servers."""

import base64
import hashlib
import io
import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from programs import metrics_of, run
from stand_in_vllm import calls, serving
from vision_cases import IMAGE, PROCESSOR, make_model, write_prompts_with_images
from vllm_cases import PARAMS, Stub, config_of, pool_of, well

from mcore_rl.data.images import ImageReader, PlacedImage
from mcore_rl.errors import TrainingError, UserError
from mcore_rl.models.generation.vllm.client import Request
from mcore_rl.models.generation.vllm.images import ImageEncoder, check_prompt
from mcore_rl.models.generation.vllm.placement import ServerPlace
from mcore_rl.models.generation.vllm.server import server_command

# ------------------------------------------------------------------ pictures


@pytest.fixture
def reader(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return ImageReader(tmp_path)


def write_picture(path, width, height, **options):
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, **options)
    return path


SIZES = [(40, 24), (33, 57), (70, 30), (1, 1), (500, 3), (15, 17), (200, 200)]


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_resized_picture_has_the_same_pixels_and_is_not_resized_again(width, height, reader, tmp_path):
    image = reader.placed(str(write_picture(tmp_path / "a.png", width, height)), 0)
    (tmp_path / "b.png").write_bytes(reader.resized_png(image))
    sent = Image.open(tmp_path / "b.png")
    assert sent.mode == "RGB" and sent.size == (8 * image.grid[2], 8 * image.grid[1])
    again = reader.placed(str(tmp_path / "b.png"), 0)
    assert again.grid == image.grid and np.array_equal(reader.pixels(again), reader.pixels(image))


def test_a_picture_is_sent_upright_and_without_transparency(reader, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    image = reader.placed(str(write_picture(tmp_path / "a.png", 48, 16, exif=exif)), 0)
    sent = Image.open(io.BytesIO(reader.resized_png(image)))
    assert sent.size == (16, 48) and not sent.getexif()
    clear = np.zeros((16, 16, 4), dtype=np.uint8)
    clear[..., 1] = 200  # under a transparent pixel
    Image.fromarray(clear).save(tmp_path / "b.png")
    sent = Image.open(io.BytesIO(reader.resized_png(reader.placed(str(tmp_path / "b.png"), 0))))
    assert sent.mode == "RGB" and np.asarray(sent)[0, 0].tolist() == [0, 200, 0]


def test_a_picture_that_would_be_resized_twice_keeps_its_size(reader, tmp_path):
    image = reader.placed(str(write_picture(tmp_path / "a.png", 1000, 6)), 0)
    assert image.grid == (1, 1, 81), "more pixels than the processor's limit, because a side has at least one token"
    assert Image.open(io.BytesIO(reader.resized_png(image))).size == (1000, 6)


def test_a_picture_that_near_limits_would_resize_twice_keeps_its_size(tmp_path):
    limits = {"size": {"shortest_edge": 1024, "longest_edge": 1024}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | limits))
    reader = ImageReader(tmp_path)
    image = reader.placed(str(write_picture(tmp_path / "a.png", 40, 24)), 0)
    assert 64 * image.grid[1] * image.grid[2] != 1024, "sides of whole tokens do not meet the limits"
    assert Image.open(io.BytesIO(reader.resized_png(image))).size == (40, 24)


# ------------------------------------------------------------------ requests


class Expanding(Stub):
    """Server stub that expands each image as `server.counts` says, and tells the prompt."""

    def do_POST(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        ids, places, counts = [], [], iter(self.server.counts)
        for token in json.loads(content)["token_ids"]:
            count = next(counts) if token == IMAGE else 1
            if token == IMAGE:
                places.append([len(ids), count])
            ids += [token] * count
        self.told = {"prompt_token_ids": np.array(ids, np.int32), "image_places": places}
        self.rfile = io.BytesIO(content)
        super().do_POST()


def request_of(reader, tmp_path, number=1):
    """Return a request whose prompt has two images, of 15 and 28 tokens."""
    first = reader.placed(str(write_picture(tmp_path / "a.png", 40, 24)), 1)
    second = reader.placed(str(write_picture(tmp_path / "b.png", 33, 57)), 18)
    ids = (11, *[IMAGE] * 15, 12, 13, *[IMAGE] * 28, 14)
    return Request(ids, 5, seed=number, priority=number, group=ids, images=(first, second))


def test_a_request_has_one_token_and_a_picture_for_each_image(reader, tmp_path):
    request = request_of(reader, tmp_path)
    with pool_of(well, handler=Expanding) as (pool, (stub,), dropped):
        stub.counts = [15, 28]
        for server in pool.servers.values():
            server.encoder = ImageEncoder(reader)
        assert pool.submit(request, PARAMS).result(60).token_ids.tolist() == [14, 1]
        assert dropped == {}
    (body,) = stub.asked
    assert body["token_ids"] == [11, IMAGE, 12, 13, IMAGE, 14] and body["return_token_ids"] is True
    names = []
    for part, image in zip(body["content_parts"], request.images, strict=True):
        png = base64.b64decode(part["url"].removeprefix("data:image/png;base64,"))
        assert part["type"] == "image_url" and png == reader.resized_png(image)
        assert part["uuid"] == hashlib.sha256(png).hexdigest()
        names.append(part["uuid"])
    assert names[0] != names[1]


def test_a_server_that_expands_a_prompt_otherwise_is_dropped(reader, tmp_path):
    request = request_of(reader, tmp_path)
    with pool_of(well, handler=Expanding) as (pool, (stub,), dropped):
        stub.counts = [15, 24]
        for server in pool.servers.values():
            server.encoder = ImageEncoder(reader)
        with pytest.raises(TrainingError, match="no vLLM server is left"):
            pool.submit(request, PARAMS).result(60)
    ((url, reason),) = dropped.items()
    assert reason == (
        f"{url}: its response has 24 tokens at 18 for the image {tmp_path / 'b.png'} instead of 28 at 18; the server "
        "must have the preprocessor_config.json of model.path"
    )


def test_an_image_that_has_changed_ends_the_request_alone(reader, tmp_path):
    request = request_of(reader, tmp_path)
    write_picture(tmp_path / "b.png", 33, 56)
    with pool_of(well, handler=Expanding) as (pool, (stub,), dropped):
        for server in pool.servers.values():
            server.encoder = ImageEncoder(reader)
        with pytest.raises(UserError, match=r"b\.png has changed since its record was tokenized"):
            pool.submit(request, PARAMS).result(60)
        assert dropped == {} and stub.asked == []


IDS, PLACED = [5, 8, 8, 6], [PlacedImage(1, (1, 1, 2), "digest", "a.png")]
PLACES = [[1, 2]]
WRONG = [
    (None, PLACES, "no prompt_token_ids; images need vLLM 0.32 or newer"),
    ([5, 8, 6], [], "0 images in its prompt instead of 1"),
    ([5, 8, 8, 6, 6], PLACES, "a prompt of 5 tokens instead of 4"),
    ([5, 8, 8, 7], PLACES, "the token 7 at 3 of its prompt instead of 6"),
]


@pytest.mark.parametrize(("ids", "places", "message"), WRONG)
def test_the_difference_of_prompts_is_named(ids, places, message):
    check_prompt(np.array(IDS, np.int32), PLACES, tuple(IDS), PLACED)
    with pytest.raises(ValueError, match=message):
        check_prompt(None if ids is None else np.array(ids, np.int32), places, tuple(IDS), PLACED)


def test_equal_pictures_are_encoded_once(reader, tmp_path, monkeypatch):
    request, encoder = request_of(reader, tmp_path), ImageEncoder(reader)
    first = encoder.part(request.images[0])
    monkeypatch.setattr(reader, "resized_png", None)
    assert encoder.part(replace(request.images[0], start=40)) is first


# ------------------------------------------------------------------ servers


def options_of(command):
    return dict(itertools.pairwise(command))


def test_servers_of_models_that_read_images_keep_no_processed_images(tmp_path):
    config = config_of(tmp_path)
    make_model("qwen3_vl", config.model.path)
    options = options_of(server_command(config, ServerPlace(0, "127.0.0.1", 8100)))
    assert options["--mm-processor-cache-gb"] == "0" and options["--limit-mm-per-prompt"] == '{"video": 0}'
    rope = json.loads(options["--hf-overrides"])["text_config"]["rope_parameters"]
    assert rope["mrope_interleaved"] is True and rope["mrope_section"] == [4, 2, 2] and rope["rope_theta"] == 1e6


def test_servers_of_published_models_and_text_models_get_no_overrides(tmp_path):
    config = config_of(tmp_path)
    make_model("qwen3_vl", config.model.path)
    path = Path(config.model.path) / "config.json"
    values = json.loads(path.read_text())
    values["text_config"]["rope_parameters"]["mrope_interleaved"] = True
    path.write_text(json.dumps(values))
    assert "--hf-overrides" not in server_command(config, ServerPlace(0, "127.0.0.1", 8100))
    path.write_text(json.dumps({"model_type": "qwen3"}))
    assert not {"--mm-processor-cache-gb", "--hf-overrides"} & set(
        server_command(config, ServerPlace(0, "127.0.0.1", 8100))
    )


# ------------------------------------------------------------------ whole runs


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A model that reads images, prompts with images and without, and a configuration."""
    root = tmp_path_factory.mktemp("vllm_images")
    make_model("qwen3_vl", root / "model", initializer_range=0.1)
    write_prompts_with_images(root, 8)
    (root / "judging.py").write_text(
        "def vowels(log, record):\n    return float(sum(map(ord, log[-1]['content'])) % 7)\n"
    )
    config = {
        "output_dir": str(root / "out"),
        "model": {"path": str(root / "model")},
        "parallel": {"timeout_seconds": 60},
        "data": {"train": str(root / "prompts.jsonl"), "max_sequence_length": 100},
        "optimizer": {"lr": 3e-3, "schedule": "constant"},
        "trainer": {"max_steps": 2},
        "checkpoint": {"export_hf": False},
        "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 4, "max_new_tokens": 5},
        "environment": {"name": "function", "function": "judging:vowels", "num_workers": 1},
        "generation": {"backend": "vllm"},
    }
    (root / "grpo.yaml").write_text(yaml.safe_dump(config))
    return root


@pytest.mark.long
@pytest.mark.parametrize("tower", ["frozen", "trained"])
def test_a_run_samples_responses_to_images_from_servers(tower, root, tmp_path, monkeypatch):
    """The stand-in reads images and expands prompts by transformers alone."""
    monkeypatch.setenv("PYTHONPATH", f"{root}:{Path(__file__).parents[2]}")  # for the judge
    with serving(root / "model", tmp_path, []) as (urls, _, logs):
        options = f"output_dir={tmp_path / 'run'}", urls, f"model.vision_tower={tower}"
        run("train_grpo.py", root / "grpo.yaml", *options)
        assert sum(path == "/mcore_rl/generate" for _, path in calls(logs[0])) == 32
    for step in metrics_of(tmp_path / "run"):
        assert step["token_mult_prob_error"] == pytest.approx(1, abs=1e-4)
        assert step["num_failed"] == 0 and not step["skipped_update"]

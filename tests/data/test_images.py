"""Tests of records with images: their tokens, where images may come from, the token cache, and what is refused."""

import base64
import io
import json
import shutil

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from small_models import make_tokenizer as make_text_tokenizer
from vision_cases import CHAT_TEMPLATE, IMAGE, PROCESSOR, SPECIAL, make_images, make_tokenizer

from mcore_rl.config import DataConfig
from mcore_rl.data.batching import assign_records, collate
from mcore_rl.data.datasets import (
    load_preference_dataset,
    load_prompt_dataset,
    load_reward_dataset,
    load_sft_dataset,
    load_unpaired_dataset,
)
from mcore_rl.data.images import ImageReader, content_of, decoded
from mcore_rl.data.readers import with_encoded_images
from mcore_rl.data.token_cache import TokenCache
from mcore_rl.data.tokenize import TokenizerSpec, load_tokenizer
from mcore_rl.distributed.topology import ParallelDimension
from mcore_rl.errors import UserError


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A directory with images, and beside it a model directory without weights."""
    root = tmp_path_factory.mktemp("vision")
    (root / "data").mkdir()
    make_images(root / "data")
    make_tokenizer(SPECIAL, CHAT_TEMPLATE).save_pretrained(root / "model")
    config = {"model_type": "qwen3_vl", "image_token_id": IMAGE, "video_token_id": IMAGE + 1}
    (root / "model" / "config.json").write_text(json.dumps(config))
    (root / "model" / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return root


@pytest.fixture
def tokenizer(directory, tmp_path):
    return load_tokenizer(directory / "model", images=tmp_path / "stored")


def write(directory, *records, name="records.jsonl"):
    path = directory / "data" / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def config_of(source, length=200, **values):
    return DataConfig(train=source, max_sequence_length=length, **values)


def user(*parts):
    return {"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}


def image(**source):
    return {"type": "image", **source}


def says(text):
    return {"role": "assistant", "content": text}


def expanded(tokenizer, messages, counts, **options):
    """Token ids as transformers' processor makes them: the text with the image token repeated, then tokenized."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    for count in counts:
        text = text.replace("<|image_pad|>", "\0" * count, 1)
    return tokenizer(text.replace("\0", "<|image_pad|>"), add_special_tokens=False)["input_ids"]


def content(directory, number):
    return (directory / "data" / f"{number}.png").read_bytes()


def sft(directory, tokenizer, *records, **options):
    source = write(directory, *records)
    return load_sft_dataset(source, tokenizer, config_of(source, **options))


def test_a_conversation_has_the_tokens_of_transformers(directory, tokenizer):
    """Images in two turns, among texts."""
    messages = [
        user("Look: ", image(image="0.png"), " and ", image(image="1.png")),
        says("fine"),
        user(image(image="2.png"), "?"),
        says("yes"),
    ]
    dataset = sft(directory, tokenizer, {"messages": messages})
    ((sequence,),) = list(dataset.units)
    reader = ImageReader(directory / "model")
    grids = [reader.placed(str(directory / "data" / f"{n}.png"), 0).grid for n in range(3)]
    counts = [h * w for _, h, w in grids]
    whole = expanded(tokenizer, messages, counts)
    assert list(sequence.input_ids) == whole[:-1]  # but for the line break after the last end token
    assert [(i.start, i.grid) for i in sequence.images] == [
        (start, grid) for start, grid in zip(starts(sequence.input_ids), grids, strict=True)
    ]
    trained = [token for token, mask in zip(sequence.input_ids, sequence.token_mask, strict=True) if mask]
    assert trained == tokenizer.encode("fine<|end|>yes<|end|>")
    assert "1 with images" in dataset.describe("train", 200)


def starts(ids):
    return [n for n, token in enumerate(ids) if token == IMAGE and ids[n - 1] != IMAGE]


def test_sources_of_all_forms_are_the_same_image(directory, tokenizer, tmp_path):
    encoded, path = content(directory, 3), directory / "data" / "3.png"
    text = base64.b64encode(encoded).decode()
    forms = [
        image(image="3.png"),
        image(image=str(path)),
        image(path="3.png"),
        image(url=f"file://{path}"),
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}},
        {"type": "image_url", "image_url": "3.png"},
        {"type": "input_image", "image_url": f"data:image/png;base64,{text}"},
        image(base64=text),
        image(image={"path": "3.png"}),
    ]
    dataset = sft(directory, tokenizer, *({"messages": [user(form), says("a")]} for form in forms))
    units = [unit[0] for unit in dataset.units]
    assert {unit.input_ids for unit in units} == {units[0].input_ids}
    assert {unit.images[0].identity for unit in units} == {units[0].images[0].identity}
    reader = ImageReader(directory / "model")
    pixels = [reader.pixels(unit.images[0]) for unit in units]
    assert all(torch.equal(pixels[0], other) for other in pixels)
    assert len(list((tmp_path / "stored").iterdir())) == 1, "bytes are stored once"


def test_the_column_images_fills_parts_without_a_source_in_their_order(directory, tokenizer):
    messages = [user(image(), "a", image(image="1.png"), image()), says("b")]
    named = [user(image(image="0.png"), "a", image(image="1.png"), image(image="2.png")), says("b")]
    dataset = sft(directory, tokenizer, {"messages": messages, "images": ["0.png", "2.png"]}, {"messages": named})
    assert dataset.units[0] == dataset.units[1]
    one = sft(directory, tokenizer, {"messages": [user(image()), says("b")], "image": "2.png"})
    assert one.units[0][0].images[0].path == str(directory / "data" / "2.png")


def test_tables_of_datasets_are_read(directory, tokenizer):
    """Parquet with the columns of the `datasets` library's image feature: bytes, or a path."""
    messages = [user(image()), {"role": "assistant", "content": [{"type": "text", "text": "b"}]}]
    table = pa.table(
        {
            "messages": [messages, messages],
            "images": [[{"bytes": content(directory, 0), "path": None}], [{"bytes": None, "path": "0.png"}]],
        }
    )
    path = directory / "data" / "table.parquet"
    pyarrow.parquet.write_table(table, path)
    dataset = load_sft_dataset(str(path), tokenizer, config_of(str(path)))
    first, second = (unit[0].images[0] for unit in dataset.units)
    assert first.identity == second.identity and first.path != second.path


def test_images_of_the_datasets_library_stay_encoded(directory):
    import datasets

    path = str(directory / "data" / "0.png")
    one, several = datasets.Image(), datasets.Sequence(datasets.Image())
    rows = {"image": [path], "images": [[path, path]], "text": ["a"]}
    dataset = datasets.Dataset.from_dict(rows).cast_column("image", one).cast_column("images", several)
    (row,) = with_encoded_images(dataset)
    assert row == {"image": {"bytes": None, "path": path}, "images": [{"bytes": None, "path": path}] * 2, "text": "a"}
    assert content_of(row["image"]) == (content(directory, 0), directory / "data" / "0.png")
    part = {"type": datasets.Value("string"), "image": datasets.Image()}
    features = datasets.Features({"messages": [{"role": datasets.Value("string"), "content": [part]}]})
    nested = [{"role": "user", "content": [{"type": "image", "image": path}]}]
    (row,) = with_encoded_images(datasets.Dataset.from_dict({"messages": [nested]}, features=features))
    assert row["messages"][0]["content"][0]["image"] == {"bytes": None, "path": path}


def test_pairs_of_every_kind_have_their_images(directory, tokenizer):
    prompt = [user(image(image="0.png"), "?")]
    pair = {"prompt": prompt, "chosen": [says("a")], "rejected": [says("bc")]}
    source = write(directory, pair, name="pairs.jsonl")
    whole = {"chosen": [*prompt, says("a")], "rejected": [*prompt, says("bc")]}
    implicit = write(directory, whole, name="implicit.jsonl")
    chosen, rejected = load_preference_dataset(source, tokenizer, config_of(source)).units[0]
    assert load_preference_dataset(implicit, tokenizer, config_of(implicit)).units[0] == (chosen, rejected)
    assert chosen.images == rejected.images and len(chosen.images) == 1
    judged, _ = load_reward_dataset(source, tokenizer, config_of(source)).units[0]
    assert judged.images == chosen.images and judged.input_ids[-2:] == tuple(tokenizer.encode("<|end|>\n"))
    assert judged.token_mask[: len(chosen)] == chosen.token_mask and not any(judged.token_mask[len(chosen) :])


def test_a_mismatched_response_keeps_the_images_of_its_prompt(directory, tokenizer):
    def record(number, label):
        return {"prompt": [user("x" * number, image(image=f"{number}.png"))], "completion": [says("a")], "label": label}

    source = write(directory, record(0, True), record(3, False))
    dataset = load_unpaired_dataset(source, tokenizer, config_of(source))
    (own,), (other,) = dataset.units[0], dataset.units[1]
    mismatched = dataset.mismatched(0)
    assert mismatched.images == own.images != other.images
    assert mismatched.input_ids == own.input_ids


def test_prompts_have_images_and_judges_get_their_files(directory, tokenizer, tmp_path):
    encoded = base64.b64encode(content(directory, 1)).decode()
    record = {"prompt": [user(image(), image(base64=encoded), "?")], "images": ["0.png"], "answer": "red"}
    source = write(directory, record)
    dataset = load_prompt_dataset(source, tokenizer, config_of(source), 100)
    prompt = dataset.prompts[0]
    assert list(prompt.input_ids) == expanded(
        tokenizer, record["prompt"], [i.count for i in prompt.images], add_generation_prompt=True
    )
    assert prompt.record == {"answer": "red"}
    paths = [part["image"] for part in prompt.content[0]["content"][:2]]
    assert paths == [str(directory / "data" / "0.png"), prompt.images[1].path]
    assert (tmp_path / "stored" / prompt.images[1].digest).read_bytes() == content(directory, 1)
    assert "1 with images" in dataset.describe("train", 100)


def test_a_batch_has_the_images_of_its_rows(directory, tokenizer):
    dataset = sft(
        directory,
        tokenizer,
        {"messages": [user(image(image="0.png")), says("a")]},
        {"messages": [user("b"), says("c")]},
    )
    batch = collate(dataset.units[:], 0)
    assert batch["images"] == [dataset.units[0][0].images, ()]
    assert "images" not in collate(dataset.units[1:], 0)
    assert batch.select_indices([1, 0])["images"] == [(), dataset.units[0][0].images]


def test_records_are_compared_with_their_images_where_prefixes_are_shared(directory, tokenizer):
    """Images 1 and 2 would have equal tokens if they were of one size."""
    Image.new("RGB", Image.open(directory / "data" / "1.png").size).save(directory / "data" / "black.png")
    dataset = sft(
        directory,
        tokenizer,
        *({"messages": [user(image(image=name)), says("a")]} for name in ("1.png", "black.png", "1.png")),
    )
    seen = []

    def division(lengths, tokens_of):
        seen.append(tokens_of([0, 1, 2]))
        return [[0, 1, 2]]

    assign_records(division, ParallelDimension(), dataset.units, [0, 1, 2])
    (tokens,) = seen
    assert torch.equal(tokens[0], tokens[2]) and not torch.equal(tokens[0], tokens[1])


def test_truncation_does_not_cut_an_image(directory, tokenizer):
    record = {"messages": [user("a"), says("b"), user(image(image="0.png")), says("c")]}
    whole = sft(directory, tokenizer, record).units[0][0]
    (placed,) = whole.images
    for length in range(placed.start, placed.end):
        cut = sft(directory, tokenizer, record, length=length, overlong="truncate").units[0][0]
        assert (len(cut), cut.images) == (placed.start, ())
    cut = whole.truncate(placed.end)
    assert (len(cut), cut.images) == (placed.end, whole.images)
    with pytest.raises(UserError, match="no record is short enough"):
        sft(directory, tokenizer, record, length=len(whole) - 1)


# ------------------------------------------------------------------ the token cache


def cached(directory, tokenizer, tmp_path, source):
    cache = TokenCache(tmp_path / "cache", TokenizerSpec(directory / "model", False, None, images=tmp_path / "stored"))
    return load_sft_dataset(source, tokenizer, config_of(source), cache=cache)


def test_the_cache_has_no_pixels(directory, tokenizer, tmp_path):
    big = directory / "data" / "big.png"
    Image.effect_noise((160, 200), 90).save(big)
    source = write(directory, {"messages": [user(image(image="big.png")), says("a")]})
    made = cached(directory, tokenizer, tmp_path, source)
    again = cached(directory, tokenizer, tmp_path, source)
    assert again.units[0] == made.units[0] and again.units[0][0].images
    stored = sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*") if file.is_file())
    assert stored < 2000 < big.stat().st_size


def test_changed_images_of_cached_records_are_told_before_training(directory, tokenizer, tmp_path):
    path = directory / "data" / "kept.png"
    Image.new("RGB", (24, 24), "red").save(path)
    source = write(directory, {"messages": [user(image(image="kept.png")), says("a")]})
    made = cached(directory, tokenizer, tmp_path, source)
    encoded = path.read_bytes()
    path.write_bytes(encoded)
    assert cached(directory, tokenizer, tmp_path, source).units[0] == made.units[0], "the same content"
    Image.new("RGB", (24, 24), "blue").save(path)
    with pytest.raises(
        UserError, match=r"the image .*kept\.png has changed .*; restore it, or delete .*/tokens/"
    ) as error:
        cached(directory, tokenizer, tmp_path, source)
    path.unlink()
    with pytest.raises(UserError, match=r"kept\.png cannot be read \(No such file"):
        cached(directory, tokenizer, tmp_path, source)
    Image.new("RGB", (24, 24), "blue").save(path)
    shutil.rmtree(str(error.value).split("delete ")[1])
    assert cached(directory, tokenizer, tmp_path, source).units[0] != made.units[0]


def test_the_cache_tells_equal_files_of_two_directories_apart(directory, tokenizer, tmp_path):
    """Their relative paths name different pictures."""
    found = []
    for name, colour in (("a", "red"), ("b", "blue")):
        (tmp_path / name).mkdir()
        Image.new("RGB", (24, 24), colour).save(tmp_path / name / "p.png")
        (tmp_path / name / "x.jsonl").write_text(json.dumps({"messages": [user(image(image="p.png")), says("a")]}))
        (sequence,) = cached(directory, tokenizer, tmp_path, str(tmp_path / name / "x.jsonl")).units[0]
        found.append(sequence.images[0].path)
    assert found == [str(tmp_path / name / "p.png") for name in ("a", "b")]


def test_the_fingerprint_depends_on_images_and_not_on_their_directory(directory, tokenizer):
    def fingerprint(name):
        return sft(directory, tokenizer, {"messages": [user(image(image=name)), says("a")]}).fingerprint

    elsewhere = directory / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    (elsewhere / "0.png").write_bytes(content(directory, 0))
    size = Image.open(directory / "data" / "0.png").size
    Image.new("RGB", size).save(elsewhere / "other.png")
    assert fingerprint("0.png") == fingerprint(str(elsewhere / "0.png")) != fingerprint(str(elsewhere / "other.png"))


def test_a_file_that_changed_after_its_tokenization_is_told(directory, tokenizer, tmp_path):
    path = directory / "data" / "changing.png"
    Image.new("RGB", (24, 24), "red").save(path)
    dataset = sft(directory, tokenizer, {"messages": [user(image(image="changing.png")), says("a")]})
    (placed,) = dataset.units[0][0].images
    reader = ImageReader(directory / "model")
    reader.pixels(placed)
    Image.new("RGB", (24, 24), "blue").save(path)
    with pytest.raises(UserError, match=r"changing\.png has changed since its record was tokenized; restore the file"):
        reader.pixels(placed)
    path.unlink()
    with pytest.raises(UserError, match=r"changing\.png cannot be read \(No such file"):
        reader.pixels(placed)


def test_pixels_are_those_of_transformers(directory):
    """Also of images with an orientation, with transparency, in grey and with a palette."""
    from transformers import AutoImageProcessor
    from transformers.image_utils import load_image

    processor = AutoImageProcessor.from_pretrained(directory / "model", backend="pil")
    reader = ImageReader(directory / "model")
    turned = Image.Exif()
    turned[0x0112] = 6
    for name, mode, options in (("a.jpg", "RGB", {"exif": turned}), ("b.png", "RGBA", {}), ("c.png", "L", {}),
                                ("d.gif", "P", {})):  # fmt: skip
        path = directory / "data" / name
        Image.effect_noise((40, 28), 90).convert(mode).save(path, **options)
        placed = reader.placed(str(path), 0)
        expected = processor(images=[load_image(str(path))], return_tensors="pt")
        assert torch.equal(reader.pixels(placed), expected["pixel_values"])
        assert placed.count == int(expected["image_grid_thw"].prod()) // 4


# ------------------------------------------------------------------ what is refused


def animated():
    frames, buffer = [Image.new("L", (8, 8), shade) for shade in (0, 255)], io.BytesIO()
    frames[0].save(buffer, format="GIF", save_all=True, append_images=frames[1:])
    return buffer.getvalue()


def test_photos_with_previews_are_read():
    """Phones write several pictures into a JPEG file (MPO); the first is the photo, as in transformers."""
    photo, preview, buffer = Image.new("RGB", (64, 32), "red"), Image.new("RGB", (8, 8)), io.BytesIO()
    photo.save(buffer, format="MPO", save_all=True, append_images=[preview])
    assert Image.open(io.BytesIO(buffer.getvalue())).n_frames == 2
    assert decoded(buffer.getvalue()).size == (64, 32)


def cut_off(directory):
    return content(directory, 0)[:-40]


def long_image():
    buffer = io.BytesIO()
    Image.new("RGB", (2010, 10)).save(buffer, format="PNG")
    return buffer.getvalue()


def of_bytes(encoded):
    return image(base64=base64.b64encode(encoded).decode())


WRONG = {
    "missing": (lambda d: [user(image(image="nowhere.png"))], r"image 1: .*nowhere\.png cannot be read \(No such file"),
    "second": (
        lambda d: [user(image(image="0.png"), image(image="nowhere.png"))],
        r"image 2: .*nowhere\.png cannot be read",
    ),
    "no image": (lambda d: [user(image(image="records.jsonl"))], "image 1: is not a complete image .*cannot identify"),
    "cut off": (lambda d: [user(of_bytes(cut_off(d)))], "image 1: is not a complete image .*truncated"),
    "animated": (lambda d: [user(of_bytes(animated()))], r"image 1: is animated \(2 frames\); only still images"),
    "long": (lambda d: [user(of_bytes(long_image()))], "image 1: .*aspect ratio must be smaller than 200, got 201"),
    "internet": (
        lambda d: [user({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}})],
        r"image 1: https://example\.com/a\.png is on the internet; download it",
    ),
    "base64": (lambda d: [user(image(base64="a*b"))], "image 1: its base64 is not valid"),
    "no base64": (lambda d: [user(image(url="data:image/png,ab"))], r"image 1: a data URL must contain base64"),
    "number": (lambda d: [user(image(image=5))], "image 1: must be a path, a data URL or bytes, found int"),
    "video": (lambda d: [user({"type": "video", "video": "a.mp4"})], "message 1: each part of content .* found video"),
    "system": (
        lambda d: [{"role": "system", "content": [image(image="0.png")]}, user("a")],
        "message 1: has an image and the role system; only messages of user and tool can have images",
    ),
    "too few": (
        lambda d: [user(image(), image())],
        "0 images in its column images, but its messages have 2 image parts without a source",
    ),
    "token": (lambda d: [user("<|image_pad|>")], r"has <\|image_pad\|> in a text, but no such image"),
    "token beside": (
        lambda d: [user(image(image="0.png"), "<|image_pad|>")],
        r"has 1 image, but its text has <\|image_pad\|> 2 times",
    ),
    "video token": (lambda d: [user("<|video_pad|>")], r"has <\|video_pad\|> in a text"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_images_are_refused_with_file_and_line(case, directory, tokenizer):
    make, message = WRONG[case]
    good = {"messages": [user("a"), says("b")]}
    with pytest.raises(UserError, match=rf"records\.jsonl, line 2: .*{message}") as error:
        sft(directory, tokenizer, good, {"messages": [*make(directory), says("b")]})
    assert "\n" not in str(error.value)


def test_images_of_the_assistant_and_images_left_over_are_refused(directory, tokenizer):
    answer = {"role": "assistant", "content": [image(image="0.png")]}
    with pytest.raises(UserError, match=r"line 1: .*message 2: has an image and the role assistant"):
        sft(directory, tokenizer, {"messages": [user("a"), answer]})
    with pytest.raises(UserError, match="2 images in its column images, but its messages have 1 image parts"):
        sft(directory, tokenizer, {"messages": [user(image()), says("b")], "images": ["0.png", "1.png"]})
    with pytest.raises(UserError, match="has images, but its prompt is a text; write it as messages"):
        sft(directory, tokenizer, {"prompt": "a", "completion": "b", "images": ["0.png"]})


def test_a_model_that_reads_no_images_refuses_them_and_ignores_other_columns(directory):
    tokenizer = make_text_tokenizer()
    with pytest.raises(UserError, match=r"line 1: .*the model reads no images"):
        sft(directory, tokenizer, {"messages": [user(image(image="0.png")), says("a")]})
    assert len(sft(directory, tokenizer, {"messages": [user("a"), says("b")], "image": "any text"})) == 1
    own = {"image": "cat", "images": ["dog", {"path": "y"}], "history": [user(image(path="z.png"))]}
    source = write(directory, {"prompt": "a", **own})
    assert load_prompt_dataset(source, tokenizer, config_of(source), 100).prompts[0].record == own, (
        "as a judge reads it"
    )


def test_pillow_and_the_processor_must_be_there(directory, tokenizer, tmp_path, monkeypatch):
    make_tokenizer(SPECIAL, CHAT_TEMPLATE).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((directory / "model" / "config.json").read_text())
    without = load_tokenizer(tmp_path, images=tmp_path)
    record = {"messages": [user(image(image="0.png")), says("a")]}
    with pytest.raises(UserError, match=r"has no preprocessor_config\.json"):
        sft(directory, without, record)
    monkeypatch.setattr("mcore_rl.data.images.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"images need Pillow, .* pip install 'mcore_rl\[vision\]'"):
        sft(directory, tokenizer, record)


def test_a_configuration_without_image_token_is_refused(tmp_path):
    make_tokenizer(SPECIAL, CHAT_TEMPLATE).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl"}))
    with pytest.raises(UserError, match=r"config\.json has no image_token_id, the id of the token that stands for"):
        load_tokenizer(tmp_path, images=tmp_path)

"""Images in sessions: read as the model's processor reads them, limited, and recorded where the engine saw them."""

import asyncio
import base64
import io
import json
import os
import re
import subprocess
import zlib

import pytest
import torch
from agent_cases import LIMITS, ScriptedEngine, Served
from agent_runs import PYTHON
from aiohttp import web
from image_sessions import (
    END,
    RandomSession,
    ServedWithImages,
    ask,
    assert_at_tokens,
    encoded,
    image_part,
    new_tree,
    picture,
    rows_of_sessions,
    url_of,
    vision_tokenizer,
)
from layout_cases import make_sft_config
from PIL import Image
from programs import ROOT
from small_models import and_long, make_tokenizer
from transformers import AutoImageProcessor
from transformers.image_utils import load_image
from vision_cases import IMAGE, VIDEO, make_model, plain_outcome, vision_config

from mcore_rl.agents import session_images
from mcore_rl.agents.messages import BadRequest, for_clients, from_anthropic, from_openai, images_in
from mcore_rl.agents.session_images import ImageStore
from mcore_rl.config.environment import AgentImages
from mcore_rl.data.chat import samples_images
from mcore_rl.rollouts.rollout_images import keep_images
from mcore_rl.rollouts.samples import Rollout
from mcore_rl.testing.layout_check import ParallelLayout, compare, compute_layout_result
from mcore_rl.testing.processes import run_processes


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model("qwen3_vl", tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def tokenizer(model, tmp_path_factory):
    return vision_tokenizer(model, tmp_path_factory.mktemp("tokenizer"))


def user(*content):
    return {"role": "user", "content": [part if isinstance(part, dict) else text(part) for part in content]}


def text(value):
    return {"type": "text", "text": value}


def exif(orientation):
    found = Image.Exif()
    found[0x0112] = orientation
    return found


ENCODED = {
    "rgb png": (encoded(picture(0, 40, 24)), "png"),
    "grey png": (encoded(picture(1, 33, 57, "L")), "png"),
    "grey png with alpha": (encoded(picture(2, 24, 24, "LA")), "png"),
    "rgba png": (encoded(picture(3, 33, 41, "RGBA")), "png"),
    "16 bit png": (encoded(picture(4, 24, 40, "I;16")), "png"),
    "palette png": (encoded(picture(5, 24, 40).quantize(16)), "png"),
    "cmyk jpeg": (encoded(picture(6, 40, 24, "CMYK"), "JPEG"), "jpeg"),
    "rotated jpeg": (encoded(picture(7, 70, 30), "JPEG", exif=exif(6)), "jpeg"),
    "mirrored webp": (encoded(picture(8, 30, 70), "WEBP", exif=exif(5)), "webp"),
    "wrong type": (encoded(picture(9, 24, 24), "WEBP"), "png"),
}


@pytest.mark.parametrize("kind", ENCODED)
def test_pixels_and_tokens_are_those_of_the_models_processor(kind, model, tokenizer, tmp_path):
    content, name = ENCODED[kind]
    tree = new_tree(tokenizer, tmp_path)
    prompt = asyncio.run(ask(tree, [user("a", image_part(content, name), "b")]))
    (placed,) = prompt.images
    assert_at_tokens(prompt.ids, prompt.images)
    processor = AutoImageProcessor.from_pretrained(model, backend="pil")
    theirs = processor(images=[load_image(url_of(content, name))], return_tensors="pt")
    assert theirs["image_grid_thw"][0].tolist() == [1, placed.grid[1] * 2, placed.grid[2] * 2]
    assert torch.equal(tokenizer.image_tokens.reader.pixels(placed), theirs["pixel_values"])


def test_every_api_sends_images(tokenizer, tmp_path):
    """Chat completions, responses and messages; in a question and in a tool's result."""
    one, two = encoded(picture(0, 24, 24)), encoded(picture(1, 40, 24))
    call = {"id": "c", "type": "function", "function": {"name": "see", "arguments": "{}"}}
    chat = [user("a", image_part(one)), {"role": "assistant", "content": "b", "tool_calls": [call]}]
    chat += [{"role": "tool", "tool_call_id": "c", "content": [image_part(two), text("seen")]}]
    responses = [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": url_of(one)}],
        },
        {"role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"type": "function_call", "call_id": "c", "name": "see", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_image", "image_url": url_of(two)}, {"type": "input_text", "text": "seen"}],
        },
    ]

    def block(content):
        data = base64.b64encode(content).decode()
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}

    messages = [
        {"role": "user", "content": [text("a"), block(one)]},
        {"role": "assistant", "content": [text("b"), {"type": "tool_use", "id": "c", "name": "see", "input": {}}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": [block(two), text("seen")]}],
        },
    ]
    from mcore_rl.agents.responses_api import _messages_of

    asked = from_openai(chat)
    assert from_openai(_messages_of({"input": responses})) == asked
    assert from_anthropic(None, messages) == asked
    prompt = asyncio.run(ask(new_tree(tokenizer, tmp_path), chat))
    assert len(prompt.images) == 2
    assert_at_tokens(prompt.ids, prompt.images)


def png_of_size(width, height):
    """A PNG that is small and whose head promises many pixels."""

    def chunk(kind, data):
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([1, 0, 0, 0, 0])
    body = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def animated(form):
    buffer = io.BytesIO()
    picture(0, 24, 24).save(buffer, format=form, save_all=True, append_images=[picture(1, 24, 24)])
    return buffer.getvalue()


SMALL = encoded(picture(0, 24, 24))
LIMITED = AgentImages(max_count=2, max_bytes=3000, max_pixels=5000, fetch=["127.0.0.1:1"])


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ([image_part(SMALL)] * 3, "has 3 images; a request may have 2 (environment.agent.images.max_count)"),
        ([image_part(encoded(picture(0, 60, 60)))], "image 1 has 1"),
        ([image_part(png_of_size(30_000, 30_000))], "images.max_pixels)"),
        ([image_part(png_of_size(100, 60))], "image 1 has 100 × 60 pixels; the limit is 5000"),
        ([image_part(SMALL), image_part(SMALL[:200])], "image 2 is not a complete image"),
        ([image_part(b"GIF89a nothing")], "is not an image in one of the formats PNG, JPEG, WEBP"),
        ([image_part(encoded(picture(0, 24, 24), "GIF"))], "is not an image in one of the formats"),
        ([image_part(animated("WEBP"))], "is animated (2 frames)"),
        ([image_part(encoded(picture(0, 900, 3)))], "image 1 "),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,&&"}}], "base64 is not valid"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png,abc"}}], "must contain base64"),
        ([{"type": "image_url", "image_url": "/etc/passwd"}], "must be a data URL"),
        ([{"type": "image_url", "image_url": "file:///etc/passwd"}], "must be a data URL"),
        (
            [{"type": "image_url", "image_url": "http://127.0.0.1/a.png"}],
            "environment.agent.images.fetch does not name",
        ),
        ([{"type": "image_url", "image_url": "http://127.0.0.1:1@evil.org/a.png"}], "is at evil.org, which"),
        ([{"type": "image_url", "image_url": "http://127.0.0.1:1/a.png"}], "cannot be fetched"),
        ([{"type": "image_url", "image_url": "http://[/a.png"}], "has no valid URL"),
        ([{"type": "image_url", "image_url": {}}], "must have an URL"),
        ([{"type": "image", "image": "/etc/passwd"}], "parts of type 'image' are not supported"),
        ([{"type": "input_audio"}], "parts of type 'input_audio' are not supported"),
        ([text("<|image_pad|>")], "has <|image_pad|> in a text"),
        ([image_part(SMALL), text("<|image_pad|>")], "have 1 images, but the chat template writes another number"),
    ],
)
def test_images_that_are_refused(parts, told, tokenizer, tmp_path):
    tree = new_tree(tokenizer, tmp_path, limits=LIMITED)
    with pytest.raises(BadRequest, match=re.escape(told)):
        asyncio.run(ask(tree, [user("a", *parts)]))


def test_images_of_the_assistant_and_of_models_that_read_none_are_refused(tmp_path):
    with pytest.raises(BadRequest, match="only messages of user and tool can have images"):
        from_openai([{"role": "system", "content": [image_part(SMALL)]}])
    served = Served([])
    try:
        for images, told in ((None, "does not take"), (ImageStore(tmp_path, None, AgentImages()), "reads no images")):
            served.sessions.images = images
            served.session = served.run(served.begin())
            status, _, body = served.post("/v1/chat/completions", {"messages": [user(image_part(SMALL))]})
            assert status == 400 and told in body["error"]["message"]
    finally:
        served.close()


def test_addresses_are_fetched_only_from_allowed_hosts(tokenizer, tmp_path):
    """Also after redirects; an answer that is too long is not read to its end."""
    sent = 0

    async def endless(request):
        nonlocal sent
        answer = web.StreamResponse()
        await answer.prepare(request)
        while sent < 2**26:
            await answer.write(bytes(2**16))
            sent += 2**16
        return answer

    async def image(request):
        return web.Response(body=SMALL)

    async def elsewhere(request):
        raise web.HTTPFound(request.query["to"])

    async def fetch_all():
        app = web.Application()
        app.add_routes([web.get("/a.png", image), web.get("/endless", endless), web.get("/to", elsewhere)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        base = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        tree = new_tree(tokenizer, tmp_path, limits=AgentImages(fetch=["127.0.0.1"], max_bytes=10_000))
        found = []
        for path in ("/a.png", "/to?to=/a.png", "/endless", "/none", "/to?to=http://localhost:1/a.png", "/to?to=/to"):
            try:
                prompt = await asyncio.wait_for(
                    ask(tree, [user({"type": "image_url", "image_url": {"url": base + path}})]), 20
                )
                found.append(prompt.images[0].digest)
            except BadRequest as error:
                found.append(str(error))
        await runner.cleanup()
        return found

    one, two, too_long, missing, other, circle = asyncio.run(fetch_all())
    assert one == two and len(one) == 64
    assert "has more than 10000 bytes" in too_long and sent < 2**25
    assert "answers with status 404" in missing and "is at localhost, which" in other
    assert "more than 5 redirects" in circle or "status 500" in circle


@pytest.mark.parametrize("history", ["template", "keep"])
def test_random_sessions_record_what_the_engine_saw(history, tokenizer, tmp_path):
    extended, rows = 0, 0
    for seed in range(12):
        session = RandomSession(tokenizer, tmp_path, seed, history)
        for _ in range(session.generator.randint(1, 7)):
            asyncio.run(session.call())
        session.check()
        extended += session.tree.counts["extended"]
        rows += len(session.tree.rows())
    assert extended > 10 and rows > 15


def test_another_picture_of_the_same_size_begins_a_new_row(tokenizer, tmp_path):
    """The tokens are equal, so only the pictures tell the conversations apart."""
    tree = new_tree(tokenizer, tmp_path)
    engine = ScriptedEngine(tokenizer, lambda _: "red", END)
    prompts = []
    for seed in (0, 1, 0):
        first = user(image_part(encoded(picture(seed, 24, 24))))
        messages = [first] if len(prompts) < 2 else [first, {"role": "assistant", "content": "red"}, user("and")]
        prompts.append(asyncio.run(ask(tree, messages)))
        tree.add(prompts[-1], engine.submit(tuple(prompts[-1].ids), 0).result())
    assert prompts[0].ids == prompts[1].ids and prompts[1].parent is None
    assert prompts[2].parent is tree.turns[0]
    assert [row.images[0].digest for row in tree.rows()] == [prompts[1].images[0].digest, prompts[0].images[0].digest]


def test_sampled_tokens_of_images_are_found(tokenizer, tmp_path):
    """vLLM would look for their images; a server would be dropped."""
    prompt = asyncio.run(ask(new_tree(tokenizer, tmp_path), [user("a", image_part(SMALL))]))
    ids = tuple(prompt.ids)
    assert not samples_images(tokenizer, ids, prompt.images)
    assert samples_images(tokenizer, (*ids, IMAGE), prompt.images) and samples_images(tokenizer, (VIDEO,), ())
    assert not samples_images(make_tokenizer(), (IMAGE,), ())  # of a model that reads none


def test_the_endpoint_answers_and_removes_the_files(model, tokenizer, tmp_path):
    served = ServedWithImages(tokenizer, tmp_path, ["red", "blue"])
    try:
        first = user(image_part(SMALL), "what")
        status, _, answer = served.post("/v1/chat/completions", {"messages": [first], "return_token_ids": True})
        assert status == 200 and answer["prompt_token_ids"].count(IMAGE) == served.engine.images[0][0].count
        body = {"messages": [first, answer["choices"][0]["message"], user(image_part(encoded(picture(1, 40, 24))))]}
        assert served.post("/v1/chat/completions", body)[0] == 200
        assert served.post("/v1/messages/count_tokens", {"messages": [user("a")]})[0] == 200
        assert served.session.tree.turns[1].prompt.parent is served.session.tree.turns[0]
        logged = served.session.tree.logged()
        (row,) = served.session.tree.rows()
        rollout = Rollout(0, 0, row.input_ids, row.token_mask, row.logprobs, images=row.images, session=logged)
        rollout.message_log = served.session.tree.turns[1].messages
        keep_images(rollout, tmp_path, tmp_path.parent / "kept")
        served.session.tree.images.remove()
        assert not list(tmp_path.iterdir())
        for image in rollout.images:
            assert tokenizer.image_tokens.reader.pixels(image).shape[0] == image.count * 4
        named = json.dumps([rollout.message_log, rollout.session])
        assert named.count(str(tmp_path.parent / "kept")) == 4 and str(tmp_path) + "/" not in named
    finally:
        served.close()


@pytest.mark.agents
def test_official_clients_send_images(tokenizer, tmp_path):
    """The three requests are the same conversation, with the same images."""
    served = ServedWithImages(tokenizer, tmp_path, ["red", "blue", "grey"])
    try:
        command = [PYTHON, ROOT / "tests" / "support" / "agent_clients.py", "images", served.server.url]
        done = subprocess.run(
            [*map(str, command), served.session.key, "0"],
            capture_output=True,
            text=True,
            timeout=120,
            input=base64.b64encode(SMALL).decode(),
            env={**os.environ, "NO_PROXY": "127.0.0.1"},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        said = json.loads(done.stdout.splitlines()[-1])["said"]
        assert [text.replace(" ", "") for text in said] == ["red", "blue", "grey"]  # one token per character
        assert len(set(served.engine.prompts)) == 1 and len(set(served.engine.images)) == 1
        assert len(served.engine.images[0]) == 2
    finally:
        served.close()


def test_an_ended_session_and_one_at_its_limit_store_nothing(tokenizer, tmp_path):
    served = ServedWithImages(tokenizer, tmp_path, ["red"] * 9)
    try:
        pictures = [image_part(encoded(picture(seed, 24, 24))) for seed in range(LIMITS.calls + 2)]
        found = [served.post("/v1/chat/completions", {"messages": [user(part)]})[0] for part in pictures]
        assert found == [200] * LIMITS.calls + [400] * 2
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert len(files) == LIMITS.calls
        served.session.end()
        served.session.tree.images.remove()
        for path in ("/v1/chat/completions", "/v1/messages/count_tokens"):
            assert served.post(path, {"messages": [user(pictures[0])] if "chat" in path else [BLOCKS]})[0] == 410
        assert not list(tmp_path.iterdir())
    finally:
        served.close()


BLOCKS = {
    "role": "user",
    "content": [
        text("a"),
        text("b"),
        {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(SMALL).decode()},
        },
    ],
}


def test_texts_beside_images_are_joined_as_without_them():
    (message,) = from_anthropic(None, [BLOCKS])
    assert message["content"][0] == {"type": "text", "text": "a\nb"} and len(message["content"]) == 2
    (message,) = from_openai([user("a", "b", image_part(SMALL))])
    assert message["content"][0] == {"type": "text", "text": "ab"}
    for block in ({"type": "text"}, {"type": "text", "text": None}, {"type": "image", "source": {"type": "base64"}}):
        with pytest.raises(BadRequest, match="must have"):
            from_anthropic(None, [{"role": "user", "content": [block]}])


def test_an_image_that_comes_after_the_files_were_deleted_is_not_stored(tokenizer, tmp_path, monkeypatch):
    tree, stored = new_tree(tokenizer, tmp_path), session_images.check_picture

    def late(content, max_pixels):
        tree.images.remove()
        stored(content, max_pixels)

    monkeypatch.setattr(session_images, "check_picture", late)
    with pytest.raises(BadRequest, match="after the end of the session"):
        asyncio.run(ask(tree, [user(image_part(SMALL))]))
    assert not list(tmp_path.iterdir())


def test_pictures_of_a_records_prompt_may_have_any_format_and_size(tokenizer, tmp_path):
    path = tmp_path / "large.bmp"
    path.write_bytes(encoded(picture(0, 90, 90), "BMP"))
    told = for_clients([{"role": "user", "content": [{"type": "image", "image": str(path)}, text("a")]}])
    tree = new_tree(tokenizer, tmp_path / "images", limits=LIMITED)
    with pytest.raises(BadRequest, match=r"max_bytes"):
        asyncio.run(ask(tree, told))
    tree.images.trust(part["image_url"]["url"] for part in images_in(told, "image_url"))
    assert len(asyncio.run(ask(tree, told)).images) == 1


def test_a_rewritten_response_with_the_token_of_an_image_is_the_policys_fault(tokenizer, tmp_path):
    served = ServedWithImages(tokenizer, tmp_path, ["red"])
    try:
        messages = [user("c"), {"role": "assistant", "content": "a <|image_pad|>"}, user("b")]
        status, _, body = served.post("/v1/chat/completions", {"messages": messages})
        assert status == 400 and "a response has <|image_pad|>" in body["error"]["message"]
        assert served.session.reached == "image token"
    finally:
        served.close()


# ------------------------------------------------------------------ training


@pytest.fixture(scope="module")
def training(model, tokenizer, tmp_path_factory):
    """Rows of sessions with images, and transformers' results for them."""
    directory, trees = tmp_path_factory.mktemp("sessions"), []
    for seed in range(1, 8):
        session = RandomSession(tokenizer, directory, seed)
        for _ in range(5):
            asyncio.run(session.call())
        trees.append(session.tree)
    data = rows_of_sessions(trees)
    data["images"] = [images or None for images in data["images"]]
    config = vision_config(model, "trained", make_sft_config, vision_tower_lr=4e-4)
    config = config.model_copy(update={"data": config.data.model_copy(update={"max_sequence_length": 400})})
    plain = {**data, "images": [images or () for images in data["images"]]}
    assert sum(map(len, plain["images"])) > 8 and len(data["images"]) > len(trees)
    return config, data, plain_outcome(config, plain)


@pytest.mark.every_case
@pytest.mark.parametrize(
    "layout",
    and_long(
        [],
        [ParallelLayout(tp=2, sp=True, prefix=True), ParallelLayout(cp=2, prefix=True)],
        [ParallelLayout(prefix=True), ParallelLayout(pp=2, prefix=True), ParallelLayout(dp=2), ParallelLayout(cp=2)],
    ),
    ids=str,
)
def test_rows_of_sessions_train_as_by_transformers(layout, training):
    """With shared prefixes that contain images: log-probabilities, loss, all gradients and the weights."""
    config, data, plain = training
    found = run_processes(compute_layout_result, layout.apply(config), data, 3, world_size=layout.world_size)[0]
    assert compare(found, plain).within(1e-5, 1e-5)

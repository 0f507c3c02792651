"""Runs of agents whose requests have images: questions of records, and results of tools."""

import json

import pytest
import yaml
from agent_runs import train
from ports import free_port
from programs import metrics_of
from vision_cases import MROPE, make_model, write_prompts_with_images
from vllm_servers import PYTHON, START_SECONDS

PROGRAM = '''
import base64
import io

import aiohttp
from PIL import Image


async def ask(session, messages):
    headers = {"Authorization": f"Bearer {session.api_key}"}
    async with aiohttp.ClientSession(trust_env=False) as client:
        async with client.post(
            f"{session.base_url}/chat/completions", json={"messages": messages}, headers=headers
        ) as answer:
            assert answer.status == 200, await answer.text()
            return (await answer.json())["choices"][0]["message"]["content"] or ""


def screenshot(text):
    """A picture that depends on what the policy has said."""
    buffer = io.BytesIO()
    size = [(24, 24), (40, 24), (16, 48)][len(text) % 3]
    Image.new("RGB", size, (37 * len(text) % 256, 90, sum(map(ord, text)) % 256)).save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


async def look(session):
    """Two turns, of which the second has a screenshot; then a branch with another picture in the first turn."""
    messages, said = list(session.messages), []
    for role in ("tool", "user"):
        said.append(await ask(session, messages))
        messages += [
            {"role": "assistant", "content": said[-1]},
            {"role": role, "content": [screenshot(said[-1]), {"type": "text", "text": "b"}]},
        ]
    await ask(session, [{"role": "user", "content": [screenshot("x"), {"type": "text", "text": "c"}]}])
    return sum(map(ord, "".join(said))) % 7 / 7
'''


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("seeing")
    make_model("qwen3_vl", root / "model", initializer_range=0.05)
    make_model("qwen3_vl_moe", root / "mixture", initializer_range=0.05)
    write_prompts_with_images(root, 8)
    (root / "seeing_program.py").write_text(PROGRAM)
    config = {
        "output_dir": "set below",
        "model": {"path": str(root / "model"), "vision_tower": "trained"},
        "data": {"train": str(root / "prompts.jsonl"), "max_sequence_length": 200, "cache_dir": str(root / "cache")},
        "optimizer": {"lr": 1e-3, "adam_eps": 1e-4},
        "trainer": {"max_steps": 2},
        "checkpoint": {"export_hf": False},
        "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 4, "max_new_tokens": 8},
        "environment": {"name": "agent", "program": "seeing_program:look", "num_workers": 1},
        "parallel": {"timeout_seconds": 60},
    }
    (root / "grpo.yaml").write_text(yaml.safe_dump(config))
    return root


@pytest.fixture(scope="module")
def whole(files):
    return train(files, "whole")


@pytest.mark.long
def test_what_the_policy_saw_is_trained(files, whole):
    """The trainer's log-probabilities are the sampled ones; logged pictures are kept, all others are deleted."""
    for line in whole:
        assert line["rows_per_sample"] == 2 and line["skipped_update"] == 0
        assert line["token_mult_prob_error"] == pytest.approx(1, abs=1e-5)
    (sample, *_) = map(json.loads, (files / "whole" / "samples.jsonl").read_text().splitlines())
    named = [
        part["image"]
        for turn in sample["session"]
        for message in turn["messages"]
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "image"
    ]
    assert len(named) >= 2 and all(path.startswith(str(files / "whole" / "agent_images")) for path in named)
    kept = {path.name for path in (files / "whole" / "agent_images").iterdir() if path.is_file()}
    assert {path.rpartition("/")[2] for path in named} <= kept
    assert not list((files / "whole" / "agent_images").glob("sessions/*"))


LAYOUTS = {
    "tp2 sp": (2, ["tensor_model_parallel_size=2", "sequence_parallel=true"]),
    "dp2": (2, []),
    "pp2": (2, ["pipeline_model_parallel_size=2", "pipeline_model_parallel_layout=Ettt|tL"]),
    "cp2": (2, ["context_parallel_size=2"]),
}
SAME = ("loss", "reward_mean", "rows_per_sample", "response_length_mean", "grad_norm")


def assert_same(found, expected):
    for one, other in zip(expected, found, strict=True):
        for name in SAME:
            assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5), name


@pytest.mark.long
@pytest.mark.every_case
@pytest.mark.parametrize(
    "layout", ["tp2 sp", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("dp2", "pp2", "cp2"))]
)
def test_layouts_see_the_same(layout, files, whole):
    processes, options = LAYOUTS[layout]
    name = layout.replace(" ", "_")
    assert_same(train(files, name, *(f"parallel.{option}" for option in options), processes=processes), whole)


@pytest.mark.exhaustive
def test_a_mixture_sees_the_same_under_expert_parallelism(files):
    options = [f"model.path={files / 'mixture'}", "model.vision_tower=frozen"]
    one = train(files, "ep1", *options)
    assert_same(train(files, "ep2", *options, "parallel.expert_model_parallel_size=2", processes=2), one)


@pytest.mark.long
def test_shared_prefixes_with_images_and_replays_change_nothing(files, whole):
    shared = ("batch.share_prefixes=true", "batch.min_shared_tokens=1")
    assert_same(train(files, "shared", *shared, "--record", files / "recording.jsonl"), whole)
    (step, *_) = map(json.loads, (files / "recording.jsonl").read_text().splitlines())
    assert any(rollout["images"] for rollout in step["rollouts"])
    replayed = train(files, "replayed", "--replay", files / "recording.jsonl")
    for one, other in zip(metrics_of(files / "shared"), replayed, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-4, abs=1e-5)


@pytest.mark.vllm
def test_vllm_sees_what_is_trained(files):
    """A real server. Sessions whose policy samples the token of an image are failed samples; the server goes on."""
    sizes = {"head_dim": 32, "rope_parameters": {**MROPE, "mrope_section": [6, 5, 5]}, "initializer_range": 0.1}
    make_model("qwen3_vl", files / "for_vllm", **sizes)
    vllm = {"python": str(PYTHON), "start_seconds": START_SECONDS, "port": free_port()}
    options = ["generation.backend=vllm", f"generation.vllm={json.dumps(vllm)}", f"model.path={files / 'for_vllm'}"]
    for line in train(files, "by_vllm", *options):
        assert line["skipped_update"] == 0 and line["rows_per_sample"] > 1
        assert line["logprob_error"] < 1e-5


def test_images_that_the_run_cannot_take_are_refused_before_it_starts(files):
    done = train(files, "refused", "environment.agent.images.max_count=0", check=False)
    assert done.returncode and "max_count=0 refuses images, but data.train has prompts with" in done.stderr_text

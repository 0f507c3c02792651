"""Tests of rollouts from prompts with images by real vLLM servers: `make test-vllm`.

The pictures are larger, smaller and of other proportions than those that the image processor makes of them.
"""

import json
import os
import time

import pytest
import torch
import yaml
from programs import metrics_of, run
from safetensors.torch import load_file, save_file
from vision_cases import (
    CHAT_TEMPLATE,
    MROPE,
    PARTIAL_MROPE,
    PROCESSOR,
    SPECIAL,
    make_model,
    make_tokenizer,
    make_vision_data,
    write_prompts_with_images,
)
from vllm_servers import PYTHON, START_SECONDS, Serving
from vllm_servers import vllm_environment as vllm_environment  # a fixture

from mcore_rl.config import GRPOConfig, load_config
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.models.generation.interfaces import prompts_to_answer
from mcore_rl.testing.processes import run_processes

pytestmark = pytest.mark.vllm

LIMIT, NEW_TOKENS, STEPS, CLOSE = 110, 12, 3, 1e-5
# vLLM's attention for the CPU takes heads of 32 dimensions or more.
SIZES = {"head_dim": 32, "rope_parameters": {**MROPE, "mrope_section": [6, 5, 5]}, "initializer_range": 0.1}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A model, pictures, prompts with pictures, a judge of two turns, and a configuration."""
    root = tmp_path_factory.mktemp("vllm_images")
    make_model("qwen3_vl", root / "model", **SIZES)
    write_prompts_with_images(root, 12)
    (root / "judging.py").write_text(
        "from mcore_rl.environments.interfaces import Step\n"
        "def twice(log, record):\n"
        "    last = sum(message['role'] == 'assistant' for message in log) > 1\n"
        "    reward = (sum(map(ord, log[-1]['content'])) % 7) / 4\n"
        "    return Step(reward, done=last, observation=None if last else ' more ')\n"
    )
    config = {
        "output_dir": str(root / "out"),
        "model": {"path": str(root / "model"), "vision_tower": "trained"},
        "parallel": {"timeout_seconds": 120},
        "data": {"train": str(root / "prompts.jsonl"), "max_sequence_length": LIMIT},
        "optimizer": {"lr": 3e-3, "schedule": "constant"},
        "trainer": {"max_steps": 4},
        "checkpoint": {"export_hf": False},
        "grpo": {
            "num_prompts_per_step": 6,
            "num_generations_per_prompt": 4,
            "max_new_tokens": NEW_TOKENS,
            "temperature": 0.8,
            "generation_batch_size": 16,
        },
        "environment": {"name": "function", "function": "judging:twice", "max_turns": 2, "num_workers": 1},
        "generation": {"backend": "vllm", "vllm": {"python": str(PYTHON), "start_seconds": START_SECONDS}},
    }
    (root / "grpo.yaml").write_text(yaml.safe_dump(config))
    return root


@pytest.fixture(scope="module")
def urls(root):
    with Serving(root, "generation.vllm.num_servers=2") as serving:
        yield serving.urls


def config_of(root, *overrides):
    return load_config(GRPOConfig, root / "grpo.yaml", list(overrides))


def prompts_of(root):
    """Return prompts, and the images of each; two equal prompts have different images."""
    data = make_vision_data(root / "model", [root / f"{n}.png" for n in range(5)])
    rows = [0, 1, 2, 4, 6, 7, 9, 10]
    prompts = [data["input_ids"][row, : data["input_lengths"][row]].tolist() for row in rows]
    return prompts, [data["images"][row] for row in rows]


def follow(config, root, steps):
    """Train some steps on sampled responses; return the results of each version of the weights: differences from the
    trainer's log-probabilities, of sampled and of greedy responses, and the greedy responses of both backends."""
    from mcore_rl.algorithms.grpo import build_generation
    from mcore_rl.algorithms.loss_functions import ClippedPGLossFn
    from mcore_rl.losses.policy_options import ClippedPGOptions
    from mcore_rl.models.generation.megatron.generation import MegatronGeneration
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy, said, results = MegatronPolicy(config, total_steps=steps), [], []
    tokenizer = make_tokenizer(SPECIAL, CHAT_TEMPLATE)
    generation = build_generation(config, policy, tokenizer, said.append)
    prompts, images = prompts_of(root)
    asked = prompts_to_answer(prompts, range(len(prompts)), images)
    own = MegatronGeneration(policy.model, generation.params, LIMIT, tokenizer, 4, prefill_tokens=150)
    for step in range(steps + 1):
        generation.prepare_for_generation(weight_version=step)
        out, likeliest = generation.generate(asked), generation.generate(asked, greedy=True)
        data, difference = compared(policy, asked, out, images, config.grpo.temperature)
        _, of_greedy = compared(policy, asked, likeliest, images, 1.0)
        results.append((difference, of_greedy, tokens(likeliest), tokens(own.generate(asked, greedy=True))))
        generator = torch.Generator().manual_seed(step)
        data["advantages"] = torch.randn(data.size, 1, generator=generator).expand(data["input_ids"].shape).contiguous()
        if step < steps:
            policy.train(data, ClippedPGLossFn(ClippedPGOptions()), temperature=config.grpo.temperature)
    generation.close()
    policy.shutdown()
    return results, said


def compared(policy, asked, out, images, temperature):
    """Return a batch of responses, and the largest difference of their log-probabilities from the trainer's."""
    ids, lengths = out["output_ids"], out["unpadded_sequence_lengths"]
    column = torch.arange(ids.shape[1])[None]
    response = (column >= asked["input_lengths"][:, None]) & (column < lengths[:, None])
    data = BatchedDataDict(
        input_ids=ids, input_lengths=lengths, sample_mask=torch.ones(len(ids)), token_mask=response.float(),
        images=list(images), generation_logprobs=out["logprobs"],
    )  # fmt: skip
    data["prev_logprobs"] = policy.get_logprobs(data, temperature=temperature)["logprobs"]
    return data, float(((data["prev_logprobs"] - out["logprobs"]) * response).abs().max())


def tokens(out):
    return [row[:n].tolist() for row, n in zip(out["output_ids"], out["unpadded_sequence_lengths"], strict=True)]


TP2, DELTA = "parallel.tensor_model_parallel_size=2", "generation.vllm.weight_updates=delta"
RUNS = {
    "trained": (1, "model.vision_tower=trained"),
    "trained, differences, tp2": (2, "model.vision_tower=trained", DELTA, TP2),
    "frozen": (1, "model.vision_tower=frozen"),
    "frozen, differences": (1, "model.vision_tower=frozen", DELTA),
}


@pytest.mark.parametrize("run_", RUNS.values(), ids=RUNS)
def test_responses_to_images_are_the_trainers_after_every_step(run_, root, urls):
    """The runs follow each other on the same servers, which a frozen tower finds with a trained one."""
    processes, *options = run_
    config = config_of(root, urls, *options)
    (results, said), *_ = run_processes(follow, config, root, STEPS, world_size=processes, timeout=START_SECONDS)
    assert said == []
    assert max(max(sampled, greedy) for sampled, greedy, *_ in results) < CLOSE, [r[:2] for r in results]
    for *_, served, generated in results:
        assert served == generated
    assert len({str(served) for *_, served, _ in results}) == STEPS + 1, "every update changed the answers"


def update_amid_requests(config, root, updates):
    """Send weights while requests with images run; return the number of tokens that each version has generated."""
    from mcore_rl.algorithms.grpo import build_generation
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy, said = MegatronPolicy(config, total_steps=1), []
    generation = build_generation(config, policy, make_tokenizer(SPECIAL, CHAT_TEMPLATE), said.append)
    generation.prepare_for_generation(weight_version=0)
    prompts, images = prompts_of(root)
    asked = []
    for version in range(1, updates + 1):
        for _ in range(20):
            number = len(asked) % len(prompts)
            prompt = tuple(prompts[number])
            asked.append(generation.submit(prompt, len(asked), prompt, images=images[number]))
        time.sleep(0.2)
        generation.prepare_for_generation(weight_version=version)
    responses = [future.result(60) for future in asked]
    generation.close()
    policy.shutdown()
    return [response.weight_versions for response in responses], said


def test_requests_with_images_go_on_while_weights_are_sent(root, urls):
    ((spans, said),) = run_processes(
        update_amid_requests, config_of(root, urls), root, 10, world_size=1, timeout=START_SECONDS
    )
    assert said == [] and len(spans) == 200
    assert any(len(of_response) > 1 for of_response in spans), "an update came while a response was generated"


def test_a_run_samples_from_the_trainers_distribution(root, urls, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]))  # for the judge
    run("train_grpo.py", root / "grpo.yaml", f"output_dir={root / 'run'}", urls, TP2, processes=2)
    metrics = metrics_of(root / "run")
    assert len(metrics) == 4
    for step in metrics:
        assert step["token_mult_prob_error"] == pytest.approx(1, abs=CLOSE)
        assert step["num_failed"] == 0 and step["turns_mean"] > 1


def test_a_server_with_another_image_processor_is_named(root, tmp_path, monkeypatch):
    other = make_model("qwen3_vl", tmp_path / "model", **SIZES)
    size = {"shortest_edge": 4 * 64, "longest_edge": 20 * 64}
    (other / "preprocessor_config.json").write_text(json.dumps({**PROCESSOR, "size": size}))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]))  # for the judge
    with Serving(root, f"model.path={other}") as serving:
        options = f"output_dir={tmp_path / 'run'}", serving.urls
        process = run("train_grpo.py", root / "grpo.yaml", *options, check=False)
    assert process.returncode == 3
    assert "the server must have the preprocessor_config.json of model.path" in process.stderr_text


def test_servers_of_qwen3_5_read_images_as_the_trainer(root, tmp_path):
    """vLLM's CPU build computes gated delta nets only in bfloat16, and without a prefix cache in whole prompts."""
    sizes = {
        "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "rope_parameters": PARTIAL_MROPE | {"mrope_section": [4, 2, 2]},
    }  # fmt: skip
    path = make_model("qwen3_5", tmp_path / "model", **{**SIZES, **sizes})
    options = f"model.path={path}", "model.dtype=bfloat16"
    arguments = "generation.vllm.arguments=[--no-enable-prefix-caching]"
    with Serving(root, *options, arguments) as serving:
        config = config_of(root, serving.urls, *options)
        ((results, said),) = run_processes(follow, config, root, 1, world_size=1, timeout=START_SECONDS)
    assert said == []
    assert max(max(sampled, greedy) for sampled, greedy, *_ in results) < 0.1, [r[:2] for r in results]


def test_servers_of_a_mixture_read_images_as_the_trainer(root, tmp_path):
    """vLLM reads files in the form of published directories, which transformers does not write."""
    path = make_model("qwen3_vl_moe", tmp_path / "model", norm_topk_prob=True, **SIZES)
    file = path / "model.safetensors"
    tensors = {n: x.mT.contiguous() if ".mlp.experts." in n else x for n, x in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    with Serving(root, f"model.path={path}") as serving:
        config = config_of(root, serving.urls, f"model.path={path}")
        ((results, said),) = run_processes(follow, config, root, 1, world_size=1, timeout=START_SECONDS)
    assert said == []
    assert max(max(sampled, greedy) for sampled, greedy, *_ in results) < CLOSE, [r[:2] for r in results]
    for *_, served, generated in results:
        assert served == generated

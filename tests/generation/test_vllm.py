"""Tests of rollouts by real vLLM servers: `make test-vllm`. Its environment (3.4 GB) is created if it is missing.

vLLM's attention for the CPU takes heads of 32 dimensions or more; the models have such.
"""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request

import psutil
import pytest
import torch
import yaml
from float32 import approx32_after_updates
from generation_cases import drawn_logprobs, make_prompts
from ports import free_port
from programs import metrics_of, run
from safetensors.torch import load_file, save_file
from small_models import make_model, make_tokenizer
from transformers import AutoModelForCausalLM
from two_nodes import HOSTS, run_on_two_nodes
from vllm_servers import KEY, PYTHON, START_SECONDS, Serving
from vllm_servers import vllm_environment as vllm_environment  # a fixture

from mcore_rl.config import GRPOConfig, load_config
from mcore_rl.data.tokenize import count_ids
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.errors import TrainingError
from mcore_rl.testing.processes import run_processes

pytestmark = pytest.mark.vllm

LIMIT, NEW_TOKENS, STEPS = 100, 24, 5
CLOSE = 1e-5


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A model, prompts, a judge and a configuration."""
    root = tmp_path_factory.mktemp("vllm")
    make_model("llama", root / "model", initializer_range=0.1, head_dim=32)
    prompts = [{"prompt": f"say {letter}", "answer": letter} for letter in "abcdefghij" * 2]
    (root / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    (root / "judging.py").write_text(
        "from mcore_rl.environments.interfaces import Step\n"
        "def twice(log, record):\n"
        "    last = len(log) >= 4\n"
        "    reward = sum(c in 'aeiou' for c in log[-1]['content']) / 4\n"
        "    return Step(reward, done=last, observation=None if last else ' more ')\n"
    )
    config = {
        "output_dir": str(root / "out"),
        "model": {"path": str(root / "model")},
        "parallel": {"timeout_seconds": 120},
        "data": {"train": str(root / "prompts.jsonl"), "max_sequence_length": LIMIT},
        "optimizer": {"lr": 3e-3, "schedule": "constant"},
        "trainer": {"max_steps": 4},
        "checkpoint": {"save_interval": 2},
        "grpo": {
            "num_prompts_per_step": 6,
            "num_generations_per_prompt": 4,
            "max_new_tokens": NEW_TOKENS,
            "temperature": 0.8,
            "generation_batch_size": 16,
        },
        "loss": {"reference_policy_kl_penalty": 0.01},
        "environment": {"name": "function", "function": "judging:twice", "max_turns": 2, "num_workers": 1},
        "generation": {"backend": "vllm", "vllm": {"python": str(PYTHON), "start_seconds": START_SECONDS}},
    }
    (root / "grpo.yaml").write_text(yaml.safe_dump(config))
    return root


@pytest.fixture(scope="module")
def served(root):
    """Three servers, which the last test kills."""
    with Serving(root, "generation.vllm.num_servers=3") as serving:
        yield serving


@pytest.fixture(scope="module")
def urls(served):
    return served.urls


def config_of(root, *overrides):
    return load_config(GRPOConfig, root / "grpo.yaml", list(overrides))


# ------------------------------------------------------------------ exactness


def score(policy, prompts, out, params, greedy=False):
    """Largest difference of an output's log-probabilities from the trainer's, and the batch to train on."""
    ids, lengths = out["output_ids"], out["unpadded_sequence_lengths"]
    column = torch.arange(ids.shape[1])[None]
    response = (column >= prompts["input_lengths"][:, None]) & (column < lengths[:, None])
    data = BatchedDataDict(
        input_ids=ids, input_lengths=lengths, sample_mask=torch.ones(len(ids)), token_mask=response.float()
    )
    expected = drawn_logprobs(policy, data, params, greedy)
    data["generation_logprobs"] = out["logprobs"]
    data["prev_logprobs"] = policy.get_logprobs(data, temperature=params.temperature)["logprobs"]
    return float(((expected - out["logprobs"]) * response).abs().max()), data


def follow(config, steps):
    """Differences after each of several updates, and the responses; of greedy ones too."""
    from mcore_rl.algorithms.grpo import build_generation
    from mcore_rl.algorithms.loss_functions import ClippedPGLossFn
    from mcore_rl.losses.policy_options import ClippedPGOptions
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy, said = MegatronPolicy(config, total_steps=steps), []
    generation = build_generation(config, policy, make_tokenizer(), said.append)
    loss_fn, differences, outputs = ClippedPGLossFn(ClippedPGOptions()), [], []
    prompts = make_prompts()
    for step in range(steps + 1):
        generation.prepare_for_generation(weight_version=step)
        out, likeliest = generation.generate(prompts), generation.generate(prompts, greedy=True)
        difference, data = score(policy, prompts, out, generation.params)
        greedy_difference, _ = score(policy, prompts, likeliest, generation.params, greedy=True)
        differences.append((difference, greedy_difference))
        outputs.append((out.data, likeliest.data))
        generator = torch.Generator().manual_seed(step)
        data["advantages"] = torch.randn(data.size, 1, generator=generator).expand(data["input_ids"].shape).contiguous()
        if step < steps:
            policy.train(data, loss_fn, temperature=config.grpo.temperature)
    generation.close()
    policy.shutdown()
    return differences, outputs, said


def tokens(out):
    return [row[:n].tolist() for row, n in zip(out["output_ids"], out["unpadded_sequence_lengths"], strict=True)]


TP2, PP2 = "parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2"
DELTA = "generation.vllm.weight_updates=delta"
RUNS = {
    "tp2": (2, TP2),
    "tp2 pp2": (4, TP2, PP2),
    "tp2 pp2 differences": (4, TP2, PP2, DELTA),
    "adapters": (1, "model.lora={rank: 4}"),
    "adapters differences": (1, "model.lora={rank: 4}", DELTA),
}


@pytest.mark.parametrize("run_", RUNS.values(), ids=RUNS)
def test_the_servers_have_the_trainers_weights_after_every_step(run_, root, urls):
    processes, *options = run_
    config = config_of(root, urls, *options)
    results = run_processes(follow, config, STEPS, world_size=processes, timeout=START_SECONDS)
    differences, outputs, said = results[0]
    assert [line for line in said if not line.startswith("generating: ")] == []  # progress, on a slow machine
    assert torch.tensor(differences).max() < CLOSE, differences
    sampled = [tokens(out) for out, _ in outputs]
    assert all(a != b for a, b in itertools.pairwise(sampled)), "every update changed the answers"
    for _, others, _ in results[1:]:
        assert all(torch.equal(a[0]["logprobs"], b[0]["logprobs"]) for a, b in zip(outputs, others, strict=True))


def refuse_once(config):
    """Call `follow`; before the second update, change the trainer's copy so that it differs from the server's."""
    from mcore_rl.models.generation.vllm import weights as vllm_weights
    from mcore_rl.models.refit.delta import DeltaEncoder

    vllm_weights.BUCKET_BYTES = 50_000  # some buckets are loaded before one is refused
    encode, buckets = DeltaEncoder.encode, itertools.count()

    def wrongly(self, tensors):
        if self.version == 1 and next(buckets) == 2:
            tensors = list(tensors)
            self._copies[tensors[0][0]][0] ^= 1
        return encode(self, tensors)

    DeltaEncoder.encode = wrongly
    return follow(config, 3)


def test_a_server_that_refuses_differences_gets_all_weights(root, urls):
    ((differences, _, said),) = run_processes(
        refuse_once, config_of(root, urls, DELTA), world_size=1, timeout=START_SECONDS
    )
    assert said == [] and torch.tensor(differences).max() < CLOSE, differences


def test_the_likeliest_tokens_are_megatrons(root, urls):
    ((_, served, _),) = run_processes(follow, config_of(root, urls), 1, world_size=1, timeout=START_SECONDS)
    own = config_of(root, "generation={}")
    ((_, generated, _),) = run_processes(follow, own, 0, world_size=1)
    assert tokens(served[0][1]) == tokens(generated[0][1])
    for name in ("generation_lengths", "truncated", "unpadded_sequence_lengths"):
        assert torch.equal(served[0][1][name], generated[0][1][name])


LATENT = {
    "kv_lora_rank": 512,  # with the next, the only sizes of a latent cache in vLLM's CPU build
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-6,  # vLLM uses it for the norms of latent states too
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
FAMILIES = {
    "deepseek_v3": LATENT,
    "gpt_oss": {"head_dim": 32, "intermediate_size": 64, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    **{name: {"head_dim": 32} for name in ("olmo3", "glm4", "seed_oss", "smollm3", "ministral3", "ernie4_5_moe")},
}


@pytest.mark.parametrize(("family", "sizes"), FAMILIES.items(), ids=FAMILIES)
def test_servers_of_other_families_have_the_trainers_weights(family, sizes, root, tmp_path):
    """Every weight changes in every update, so a weight that a server did not take over would show."""
    path = make_model(family, tmp_path / "model", initializer_range=0.1, **sizes)
    if family == "ernie4_5_moe":  # vLLM's CPU build leaves out the biases of the choice
        weights = load_file(path / "model.safetensors")
        zeros = {name: torch.zeros_like(x) for name, x in weights.items() if "e_score_correction_bias" in name}
        save_file({**weights, **zeros}, path / "model.safetensors", metadata={"format": "pt"})
    with Serving(root, f"model.path={path}") as serving:
        config = config_of(root, serving.urls, f"model.path={path}")
        ((differences, outputs, said),) = run_processes(follow, config, 2, world_size=1, timeout=START_SECONDS)
    assert [line for line in said if not line.startswith("generating: ")] == []  # progress, on a slow machine
    assert torch.tensor(differences).max() < CLOSE, differences
    assert all(a != b for a, b in itertools.pairwise(tokens(out) for out, _ in outputs))


def update_and_export(config, destination):
    """Send the weights after a step to the servers, and export them."""
    from mcore_rl.algorithms.grpo import build_generation
    from mcore_rl.algorithms.loss_functions import ClippedPGLossFn
    from mcore_rl.losses.policy_options import ClippedPGOptions
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=1)
    generation = build_generation(config, policy, make_tokenizer())
    generation.prepare_for_generation(weight_version=0)
    _, data = score(policy, prompts := make_prompts(), generation.generate(prompts), generation.params)
    data["advantages"] = torch.randn(data["input_ids"].shape, generator=torch.Generator().manual_seed(0))
    policy.train(data, ClippedPGLossFn(ClippedPGOptions()), temperature=config.grpo.temperature)
    generation.prepare_for_generation(weight_version=1)
    generation.close()
    policy.export_hf(destination)
    policy.shutdown()


def answer(serving, length):
    """Return tokens and log-probabilities of the likeliest answer to a prompt of some length."""
    sampling = {"max_tokens": 16, "temperature": 0, "logprobs": 0, "ignore_eos": True, "detokenize": False}
    body = {"token_ids": [7 + n % 50 for n in range(length)], "sampling_params": sampling}
    url = f"http://127.0.0.1:{serving.port}/inference/v1/generate"
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        choice = json.load(response)["choices"][0]
    return choice["token_ids"], [token["logprob"] for token in choice["logprobs"]["content"]]


INEXACT = {
    # vLLM's CPU build computes gated delta nets only in bfloat16, and without a prefix cache in whole prompts.
    "qwen3_next": (
        {
            "head_dim": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
        ("model.dtype=bfloat16", "generation.vllm.arguments=[--no-enable-prefix-caching]"),
    ),
    # Its latent attention rotates wrongly without YaRN.
    "glm4_moe_lite": ({**LATENT, "first_k_dense_replace": 2}, ()),
}


@pytest.mark.parametrize(("family", "sizes", "options"), [(name, *case) for name, case in INEXACT.items()], ids=INEXACT)
def test_an_updated_server_answers_as_one_that_loads_the_export(family, sizes, options, root, tmp_path):
    """Families whose log-probabilities vLLM's CPU build computes otherwise than transformers."""
    path = make_model(family, tmp_path / "model", initializer_range=0.1, **sizes)
    with Serving(root, f"model.path={path}", *options) as updated:
        before = answer(updated, 40)
        config = config_of(root, updated.urls, f"model.path={path}", *options)
        run_processes(update_and_export, config, tmp_path / "after", world_size=1, timeout=START_SECONDS)
        answers = [answer(updated, length) for length in (1, 5, 40)]
    with Serving(root, f"model.path={tmp_path / 'after'}", *options) as loaded:
        assert [answer(loaded, length) for length in (1, 5, 40)] == answers
    assert answers[-1] != before


FILTERS = [("grpo.top_k=7", "grpo.top_p=0.8"), ("grpo.min_p=0.2",), ("grpo.top_p=0.01",)]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_log_probabilities_are_of_the_distribution_sampled_from(filters, root, urls):
    ((differences, _, _),) = run_processes(follow, config_of(root, urls, *filters), 0, world_size=1)
    assert max(differences[0]) < CLOSE


def draw(config, rows):
    from mcore_rl.algorithms.grpo import build_generation
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy, prompts = MegatronPolicy(config), make_prompts()
    generation = build_generation(config, policy, make_tokenizer())
    data = BatchedDataDict({name: values[rows] for name, values in prompts.items()}, sample_ids=torch.tensor(rows))
    out = generation.generate(data)
    generation.close()
    policy.shutdown()
    return dict(zip(rows, zip(tokens(out), out["truncated"].tolist(), strict=True), strict=True))


def test_a_sample_is_of_seed_and_sample_id(root, urls):
    """A response does not depend on the other requests or on the server."""
    config, rows = config_of(root, urls), list(range(len(make_prompts()["input_ids"])))
    alone, some, others = (
        run_processes(draw, one, chosen, world_size=1)[0]
        for one, chosen in ((config, rows), (config, rows[::-2]), (config_of(root, urls, "seed=1"), rows))
    )
    assert {row: alone[row] for row in some} == some
    assert others != alone


def test_ends(root, urls):
    """A response ends after a stop string or a stop token; a response that reaches the limit is marked."""
    rows, tokenizer = list(range(len(make_prompts()["input_ids"]))), make_tokenizer()
    free = run_processes(draw, config_of(root, urls), rows, world_size=1)[0]
    start = make_prompts()["input_lengths"].tolist()
    texts = {row: tokenizer.decode(ids[start[row] :]) for row, (ids, _) in free.items()}
    row = next(row for row, text in texts.items() if len(text) > 6)
    stop = texts[row][2:4]
    stopped = run_processes(draw, config_of(root, urls, f"grpo.stop_strings=[{stop!r}]"), rows, world_size=1)[0]
    response = stopped[row][0][start[row] :]
    assert stop in tokenizer.decode(response) and stop not in tokenizer.decode(response[:-1])
    assert response == free[row][0][start[row] :][: len(response)]
    assert not stopped[row][1]
    for ids, truncated in free.values():
        assert truncated == (1 not in ids[-1:])
    assert any(truncated for _, truncated in free.values())


# ------------------------------------------------------------------ runs


@pytest.fixture(autouse=True)
def judges_can_be_imported(root, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]))


def train(root, name, *arguments, **options):
    return run("train_grpo.py", root / "grpo.yaml", f"output_dir={root / name}", *arguments, **options)


def assert_same_training(ours, theirs, start=0):
    for a, b in zip(metrics_of(ours)[start:], metrics_of(theirs)[start:], strict=True):
        for name in ("step", "reward_mean", "loss", "kl_penalty", "grad_norm", "response_length_mean"):
            assert a[name] == approx32_after_updates(b[name]), (a["step"], name)


def test_a_run_resumes_and_either_backend_replays_the_others_recording(root, urls):
    recording, own = root / "recording.jsonl", root / "own.jsonl"
    train(root, "whole", urls, "--record", recording, "parallel.tensor_model_parallel_size=2", processes=2)
    metrics = metrics_of(root / "whole")
    assert all(line["token_mult_prob_error"] == pytest.approx(1, abs=CLOSE) for line in metrics)
    assert all(line["refit_seconds"] > 0 for line in metrics)
    steps = [json.loads(line) for line in recording.read_text().splitlines()]
    versions = [{version for r in step["rollouts"] for version, _ in r["weight_versions"]} for step in steps]
    assert versions == [{0}, {1}, {2}, {3}]
    for rollout in (r for step in steps for r in step["rollouts"]):
        assert sum(count for _, count in rollout["weight_versions"]) == sum(rollout["token_mask"])
    samples = [json.loads(line) for line in (root / "whole" / "samples.jsonl").read_text().splitlines()]
    assert all(sample["weight_version"] == sample["step"] - 1 for sample in samples)

    shutil.copytree(root / "whole", root / "resumed")
    shutil.rmtree(root / "resumed" / "checkpoints" / "iter_0000004")
    (root / "resumed" / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2\n")
    train(root, "resumed", urls)
    assert_same_training(root / "resumed", root / "whole")

    train(root, "replayed", "generation={backend: megatron}", "--replay", recording)
    assert_same_training(root / "replayed", root / "whole")
    train(root, "megatron", "generation={backend: megatron}", "--record", own)
    nobody = "generation.vllm.urls=['http://127.0.0.1:9']"
    train(root, "replayed_by_vllm", nobody, "--replay", own)
    assert_same_training(root / "replayed_by_vllm", root / "megatron")


AGENT = """
import aiohttp


async def two_turns(session):
    messages, headers = list(session.messages), {"Authorization": f"Bearer {session.api_key}"}
    options = {"logprobs": True, "top_logprobs": 3, "max_tokens": 9, "stop": ["o"]}
    said = ""
    async with aiohttp.ClientSession() as client:
        for _ in range(2):
            url, body = f"{session.base_url}/chat/completions", {"messages": messages, **options}
            async with client.post(url, json=body, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                (choice,) = (await answer.json())["choices"]
            for token in choice["logprobs"]["content"]:
                best = [other["logprob"] for other in token["top_logprobs"]]
                assert len(best) == 3 and best == sorted(best, reverse=True) and token["logprob"] <= best[0] + 1e-6
                assert token["logprob"] in best or token["logprob"] < best[-1]
            said += choice["message"]["content"] or ""
            answer = {"role": "assistant", "content": choice["message"]["content"] or ""}
            messages += [answer, {"role": "user", "content": "more"}]
    return sum(map(ord, said)) % 7 / 7
"""


def test_agents_ask_the_servers(root, urls):
    """Sessions get tokens of the servers' with the trainer's log-probabilities, also ahead of training."""
    (root / "asking.py").write_text(AGENT)
    environment = "environment={name: agent, program: 'asking:two_turns', num_workers: 1}"
    train(root, "agents", urls, environment, "parallel.tensor_model_parallel_size=2", processes=2)
    for line in metrics_of(root / "agents"):
        assert line["token_mult_prob_error"] == pytest.approx(1, abs=CLOSE)
        assert line["turns_mean"] == 2 and line["failed_fraction"] == 0 and line["response_length_max"] <= 18
    corrected = "loss.use_importance_sampling_correction=true", "loss.truncated_importance_sampling_ratio=2"
    stale = "grpo.max_staleness=1", *corrected
    train(root, "agents_ahead", urls, environment, *stale)
    assert [line["staleness_max"] for line in metrics_of(root / "agents_ahead")] == [0, 1, 1, 1]


def test_rollouts_ahead_of_training(root, urls):
    """Each token has the log-probability that transformers computes with the weights of its version; staleness is
    bounded; prompts keep their order, and a resumed run continues with them."""
    stale = (
        "grpo.max_staleness=1", "loss.use_importance_sampling_correction=true",
        "loss.truncated_importance_sampling_ratio=2", "checkpoint.save_interval=1", "trainer.max_steps=5",
        "parallel.tensor_model_parallel_size=2", "checkpoint.export_hf=false", urls,
    )  # fmt: skip
    recording, out = root / "ahead.jsonl", root / "ahead"
    train(root, "ahead", *stale, "--record", recording, processes=2)
    metrics = metrics_of(out)
    assert [line["staleness_max"] for line in metrics] == [0, 1, 1, 1, 1]
    assert metrics[0]["token_mult_prob_error"] == pytest.approx(1, abs=CLOSE)
    assert all(line["token_mult_prob_error"] > 1.001 for line in metrics[1:])
    steps = [json.loads(line)["rollouts"] for line in recording.read_text().splitlines()]
    weights = {0: root / "model"}
    for version in range(1, 5):  # tokens of the last step may already have the weights of the step before
        weights[version] = root / f"ahead_{version}"
        run("convert", "to-hf", out / "checkpoints" / f"iter_{version:07d}", weights[version])
    rollouts = [rollout for rollouts in steps for rollout in rollouts]
    check_versions(rollouts, weights, count_ids(make_tokenizer()))

    shutil.copytree(out, root / "ahead_resumed")
    checkpoints = root / "ahead_resumed" / "checkpoints"
    for step in (3, 4, 5):
        shutil.rmtree(checkpoints / f"iter_{step:07d}")
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("2\n")
    again = root / "ahead_again.jsonl"
    train(root, "ahead_resumed", *stale, "--record", again, processes=2)
    resumed = [json.loads(line)["rollouts"] for line in again.read_text().splitlines()]
    for ours, theirs in zip(resumed, steps[2:], strict=True):
        assert [(r["prompt"], r["sample_id"]) for r in ours] == [(r["prompt"], r["sample_id"]) for r in theirs]
    assert [line["staleness_max"] for line in metrics_of(root / "ahead_resumed")] == [0, 1, 0, 1, 1]


def answer_while_weights_change(config, destination):
    """Responses that are under way as the servers get the weights of an update; those weights are exported."""
    from mcore_rl.algorithms.grpo import build_generation
    from mcore_rl.algorithms.loss_functions import ClippedPGLossFn
    from mcore_rl.losses.policy_options import ClippedPGOptions
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy, prompts = MegatronPolicy(config, total_steps=1), make_prompts()
    generation = build_generation(config, policy, make_tokenizer())
    generation.prepare_for_generation(weight_version=0)
    out = generation.generate(prompts)
    _, data = score(policy, prompts, out, generation.params)
    data["advantages"] = torch.randn(data["input_ids"].shape, generator=torch.Generator().manual_seed(0))
    policy.train(data, ClippedPGLossFn(ClippedPGOptions()), temperature=config.grpo.temperature)
    asked = []
    if policy.topology.leads_replica:
        own = [(3 + n % 5, 4, 5 + n % 7) for n in range(policy.topology.data.rank, 60, policy.topology.data.size)]
        asked = [(prompt, generation.submit(prompt, n, prompt)) for n, prompt in enumerate(own)]
        time.sleep(0.5)
    generation.prepare_for_generation(weight_version=1)
    rollouts = []
    for prompt, future in asked:
        response = future.result(120)
        count, before = len(response.token_ids), len(prompt)
        rollouts.append({
            "sample_id": len(rollouts), "input_ids": [*prompt, *response.token_ids],
            "token_mask": [False] * before + [True] * count, "logprobs": [0.0] * before + response.logprobs.tolist(),
            "weight_versions": response.weight_versions,
        })  # fmt: skip
    left = generation.servers
    generation.close()
    policy.export_hf(destination)
    policy.shutdown()
    return rollouts, left


def test_weights_change_between_two_tokens_of_a_response(root, urls, tmp_path):
    one = urls.split(",")[0].rstrip("]") + "]"
    options = (one, "grpo.max_new_tokens=80", "grpo.generation_batch_size=8", "optimizer.lr=0.01")
    results = run_processes(
        answer_while_weights_change, config_of(root, *options), tmp_path / "after", world_size=2, timeout=START_SECONDS
    )
    rollouts = [rollout for of_rank, _ in results for rollout in of_rank]
    assert len(rollouts) == 60 and len(results[0][1]) == 1, "no server is dropped"
    found = [tuple(version for version, _ in rollout["weight_versions"]) for rollout in rollouts]
    assert {(0,), (0, 1), (1,)} <= set(found), found
    check_versions(rollouts, {0: root / "model", 1: tmp_path / "after"})


def check_versions(rollouts, weights, num_ids=None):
    """Log-probabilities of responses' tokens, each under the weights of its version, by transformers.

    Ids from `num_ids` on have no probability.
    """
    models = {
        version: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for version, path in weights.items()
    }
    for rollout in rollouts:
        ids, temperature = torch.tensor(rollout["input_ids"]), 0.8
        with torch.no_grad():
            rows = {
                version: (models[version](ids[None]).logits[0, :-1, :num_ids] / temperature).log_softmax(-1)
                for version in {version for version, _ in rollout["weight_versions"]}
            }
        versions = iter(version for version, count in rollout["weight_versions"] for _ in range(count))
        for at, (token, is_response) in enumerate(zip(rollout["input_ids"], rollout["token_mask"], strict=True)):
            if is_response:
                expected = rows[next(versions)][at - 1, token].item()
                assert rollout["logprobs"][at] == pytest.approx(expected, abs=10 * CLOSE), (rollout["sample_id"], at)
        assert next(versions, None) is None


def test_a_mismatch_ends_the_run(root, urls):
    bound = "generation.max_token_mult_prob_error=1.0000000001"
    process = train(root, "mismatch", urls, bound, check=False)
    assert process.returncode == 3
    assert "above generation.max_token_mult_prob_error" in process.stderr_text
    assert process.stderr_text.count("\n") == 1


def test_servers_that_are_not_there_or_too_small(root, urls):
    away = "generation.vllm={urls: ['http://127.0.0.1:9'], start_seconds: 1}"
    process = train(root, "away", away, check=False)
    assert process.returncode == 2
    assert "generation.vllm.start_seconds: http://127.0.0.1:9/health: does not answer" in process.stderr_text
    process = train(root, "small", urls, f"data.max_sequence_length={LIMIT + 1}", check=False)
    assert process.returncode == 2
    assert f"takes {LIMIT} tokens at most" in process.stderr_text


# ------------------------------------------------------------------ what dies


def servers_of(mark):
    """Return the live processes that were started with this mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("VLLM_TEST") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def check_gone(mark):
    deadline = time.monotonic() + 20
    while servers_of(mark) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert servers_of(mark) == []


def test_a_trainer_that_dies_takes_its_servers_along_and_frees_others(root, urls, monkeypatch, tmp_path):
    """Killed in the middle of an update: the servers of others serve the next run."""
    program = tmp_path / "die.py"
    program.write_text(
        "import os, signal\n"
        "from mcore_rl.platform import initialize_platform\n"
        "initialize_platform()\n"
        "from mcore_rl.models.refit import transfer as refit\n"
        "from mcore_rl.models.generation.vllm import weights as vllm_weights\n"
        "vllm_weights.BUCKET_BYTES = 50_000\n"
        "send, count = refit.RefitGroups.begin_send, []\n"
        "def begin_send(self, *arguments):\n"
        "    count.append(1)\n"
        "    if len(count) == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return send(self, *arguments)\n"
        "refit.RefitGroups.begin_send = begin_send\n"
        "from mcore_rl.cli.train import train\n"
        "train('grpo')\n"
    )
    for name, servers in (("with_urls", (urls,)), ("with_own", (f"generation.vllm.port={free_port()}",))):
        mark = f"{name} {time.time()}"
        process = subprocess.run(
            [sys.executable, program, root / "grpo.yaml", f"output_dir={root / name}", *servers],
            env={**os.environ, "VLLM_TEST": mark, "OMP_NUM_THREADS": "1"}, timeout=START_SECONDS, capture_output=True,
        )  # fmt: skip
        assert process.returncode == -signal.SIGKILL, process.stderr
        check_gone(mark)
    ((differences, _, _),) = run_processes(follow, config_of(root, urls), 1, world_size=1, timeout=START_SECONDS)
    assert torch.tensor(differences).max() < CLOSE


# ------------------------------------------------------------------ other models, servers of several processes


MODELS = {"qwen3_moe": ({"head_dim": 32}, 1), "qwen2": ({"num_attention_heads": 2, "head_dim": 32}, 2)}


@pytest.mark.parametrize("updates", ["whole", "delta"])
@pytest.mark.parametrize("family", MODELS)
def test_other_families_and_servers_of_several_processes(family, updates, root, tmp_path):
    changes, size = MODELS[family]
    make_model(family, tmp_path / "model", initializer_range=0.1, **changes)
    options = (f"model.path={tmp_path / 'model'}", f"generation.vllm.tensor_parallel_size={size}")
    with Serving(root, *options) as serving:
        layout = ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true")
        config = config_of(root, *options, serving.urls, *layout, f"generation.vllm.weight_updates={updates}")
        differences, _, _ = run_processes(follow, config, 2, world_size=2, timeout=START_SECONDS)[0]
    assert torch.tensor(differences).max() < CLOSE, differences
    assert serving.process.returncode == 143


def follow_by_collectives(config, steps):
    """`follow`, as if no rank shared memory with a server."""
    from mcore_rl.models.generation.vllm import weights as vllm_weights

    vllm_weights.without_memory = lambda sees, reports, bucket_bytes: frozenset(range(len(reports)))
    return follow(config, steps)


WAYS = {
    "mixture, adapters": ("qwen3_moe", {"head_dim": 32}, ["model.lora={rank: 4}"]),
    "dense": ("qwen2", {"num_attention_heads": 2, "head_dim": 32}, []),
}


@pytest.mark.parametrize(("family", "changes", "more"), WAYS.values(), ids=WAYS)
def test_weights_by_shared_memory_are_those_by_collectives(family, changes, more, root, tmp_path):
    """Four ranks of TP2 x PP2 send to a server of two processes; its answers are the same to the bit."""
    make_model(family, tmp_path / "model", initializer_range=0.1, **changes)
    options = (f"model.path={tmp_path / 'model'}", "generation.vllm.tensor_parallel_size=2")
    layout = [f"parallel.{name}_model_parallel_size=2" for name in ("tensor", "pipeline")]
    with Serving(root, *options) as serving:
        config = config_of(root, *options, serving.urls, *layout, "parallel.sequence_parallel=true", *more)
        (ours, outputs, _), *_ = run_processes(follow, config, 1, world_size=4, timeout=START_SECONDS)
        (theirs, others, said), *_ = run_processes(
            follow_by_collectives, config, 1, world_size=4, timeout=START_SECONDS
        )
    assert any("by collectives, because" in line for line in said)
    assert torch.tensor([ours, theirs]).max() < CLOSE
    for (out, likeliest), (out_again, likeliest_again) in zip(outputs, others, strict=True):
        for one, other in ((out, out_again), (likeliest, likeliest_again)):
            assert torch.equal(one["output_ids"], other["output_ids"])
            assert torch.equal(one["logprobs"], other["logprobs"])


# ------------------------------------------------------------------ servers that die; this is their last test


def kill(url):
    """A server with all its processes, as if its machine were gone."""
    port = url.rpartition(":")[2]
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "vllm.entrypoints.openai.api_server" in command and port in command:
            os.killpg(process.pid, signal.SIGKILL)


def live_dangerously(config):
    """Of three servers, one dies while it generates, one while it receives weights, and then the last one."""
    from mcore_rl.algorithms.grpo import build_generation
    from mcore_rl.algorithms.loss_functions import ClippedPGLossFn
    from mcore_rl.losses.policy_options import ClippedPGOptions
    from mcore_rl.models.generation.vllm import weights as vllm_weights
    from mcore_rl.models.generation.vllm.client import VLLMServer
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy
    from mcore_rl.models.refit.transfer import RefitGroups

    vllm_weights.BUCKET_BYTES = 50_000
    policy, said = MegatronPolicy(config, total_steps=3), []
    generation = build_generation(config, policy, make_tokenizer(), said.append)
    generation.prepare_for_generation(weight_version=0)
    prompts = make_prompts()
    expected = generation.generate(prompts)
    urls, left = generation.servers, []
    if policy.is_writer:
        VLLMServer.generate = killing(VLLMServer.generate, urls[0], at=5)
    again = generation.generate(prompts)
    left.append(generation.servers)
    _, data = score(policy, prompts, again, generation.params)
    data["advantages"] = torch.randn(data["input_ids"].shape, generator=torch.Generator().manual_seed(0))
    policy.train(data, ClippedPGLossFn(ClippedPGOptions()), temperature=config.grpo.temperature)
    if policy.is_writer:
        RefitGroups.begin_send = killing(RefitGroups.begin_send, urls[1], at=1)
    generation.prepare_for_generation(weight_version=1)
    left.append(generation.servers)
    difference, _ = score(policy, prompts, generation.generate(prompts), generation.params)
    end = None
    if policy.is_writer:
        kill(urls[2])
    try:
        generation.generate(prompts)
    except TrainingError as error:
        end = str(error)
    generation.close()
    policy.shutdown()
    return tokens(expected) == tokens(again), left == [urls[1:], urls[2:]], difference, end, said


def killing(call, url, at):
    """The same function, whose call number `at` comes as this server dies."""
    calls = itertools.count(1)

    def wrapped(*arguments):
        if next(calls) == at:
            kill(url)
        return call(*arguments)

    return wrapped


def test_servers_die_while_they_answer_and_while_they_get_weights(root, served):
    config = config_of(root, served.urls, "parallel.tensor_model_parallel_size=2", "parallel.timeout_seconds=60")
    results = run_processes(live_dangerously, config, world_size=2, timeout=START_SECONDS)
    same, left, difference, end, said = results[0]
    assert same and left
    assert difference < CLOSE
    assert end.startswith("no vLLM server is left; the last server's failure: http://127.0.0.1:")
    assert results[1][3] == end, "every rank ends"
    assert len(said) == 3, said
    # Their node starts them again.
    lines = [line.strip() for line in itertools.islice(served.process.stdout, 6)]
    assert sum("it ended with status -9" in line for line in lines) == 3, lines
    assert sum("a vLLM server is started again: " in line for line in lines) == 3, lines


def test_two_nodes_start_a_server_each(root):
    """Both nodes are this machine, at two addresses; a step has samples of both servers."""
    words = [f"output_dir={root / 'two_nodes'}", "trainer.max_steps=2", f"generation.vllm.port={free_port()}"]
    said = run_on_two_nodes(0, 1, "train", "grpo", root / "grpo.yaml", *words, seconds=2 * START_SECONDS)
    assert [line.split()[1] for line in said[0].splitlines() if re.match(r"  \d +127", line)] == list(HOSTS)
    for step in metrics_of(root / "two_nodes"):
        assert step["token_mult_prob_error"] == pytest.approx(1, abs=1e-4) and step["failed_fraction"] == 0
    for host in HOSTS:
        (log,) = (root / "two_nodes" / "vllm").glob(f"{host}_*.log")
        assert "Application startup complete" in log.read_text()

"""Tests of packed answers by real vLLM servers: `make test-vllm`. They are compared with vLLM's own route in JSON."""

import json
import urllib.error
import urllib.request
from dataclasses import replace

import numpy as np
import pytest
import yaml
from small_models import make_model
from vllm_servers import KEY, PYTHON, START_SECONDS, Serving
from vllm_servers import vllm_environment as vllm_environment  # a fixture

from mcore_rl.models.generation.sampling import SamplingParams
from mcore_rl.models.generation.vllm.answers import Request, decode_answer
from mcore_rl.models.generation.vllm.client import sampling_params

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A server with a small model."""
    root = tmp_path_factory.mktemp("packed")
    make_model("llama", root / "model", initializer_range=0.1, head_dim=32)
    config = {
        "output_dir": str(root / "out"),
        "model": {"path": str(root / "model")},
        "data": {"train": "unused", "max_sequence_length": 400},
        "optimizer": {"lr": 1e-3},
        "trainer": {"max_steps": 1},
        "generation": {"backend": "vllm", "vllm": {"python": str(PYTHON), "start_seconds": START_SECONDS}},
    }
    (root / "grpo.yaml").write_text(yaml.safe_dump(config))
    with Serving(root) as serving:
        yield f"http://127.0.0.1:{serving.port}"


def ask(url, body=None, key=KEY, method=None):
    """Return the status and the body of an answer."""
    headers = {"Content-Type": "application/json", **({} if key is None else {"Authorization": f"Bearer {key}"})}
    content = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, content, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


SAMPLED = SamplingParams(60, temperature=0.9, seed=3)
CASES = {
    "sampled": (SAMPLED, {}),
    "greedy": (replace(SAMPLED, temperature=0.0), {}),
    "filtered": (replace(SAMPLED, top_p=0.7), {}),
    "one token": (SAMPLED, {"max_tokens": 1}),
    "a long answer": (SAMPLED, {"max_tokens": 390}),
    "stop string": (replace(SAMPLED, stop_strings=("e", "a")), {}),
    "stop token": (replace(SAMPLED, stop_token_ids=tuple(range(8, 40))), {}),
    "likeliest": (SAMPLED, {"num_likeliest": 5}),
    "likeliest of few": (replace(SAMPLED, top_k=3), {"num_likeliest": 5}),
}


@pytest.mark.parametrize(("params", "options"), CASES.values(), ids=CASES)
def test_answers_equal_those_of_vllms_route_to_the_bit(params, options, url):
    reasons = set()
    for seed in range(6):
        request = replace(Request((7, 8, 9, 10 + seed), 60, seed, 0, ()), **options)
        body = {"token_ids": request.token_ids, "sampling_params": sampling_params(request, params)}
        status, packed = ask(f"{url}/mcore_rl/generate", body)
        assert status == 200, packed
        answer = decode_answer(packed, request, None, False)
        # vLLM's JSON lacks the last likeliest token if the sampled token is not one of them.
        body["sampling_params"]["logprobs"] += request.num_likeliest > 0
        status, told = ask(f"{url}/inference/v1/generate", body)
        (choice,) = json.loads(told)["choices"]
        content = choice["logprobs"]["content"]
        assert answer.response.token_ids.tolist() == choice["token_ids"] and len(content) == len(choice["token_ids"])
        assert [token.hex() for token in answer.response.logprobs.tolist()] == [
            float(token["logprob"]).hex() for token in content
        ]
        assert answer.finish_reason == choice["finish_reason"]
        assert answer.spans == [(span["version"], span["end"] - span["start"]) for span in choice["weight_versions"]]
        assert sum(count for _, count in answer.spans) == len(content)
        reasons.add(answer.finish_reason)
        if request.num_likeliest:
            for found, token in zip(answer.response.likeliest, content, strict=True):
                pairs = [(each["token_id"], each["logprob"]) for each in token["top_logprobs"]]
                best = sorted((pair for pair in pairs if pair[1] > -9999.0), key=lambda pair: -pair[1])
                assert found == best[: request.num_likeliest]
    assert "stop" in reasons or not (params.stop_strings or params.stop_token_ids)
    assert answer.response.token_ids.dtype == np.int32 and answer.response.logprobs.dtype == np.float32


BAD = {
    "no tokens": {"token_ids": []},
    "no such id": {"token_ids": [10**6]},
    "an unknown stop": {"sampling_params": {"max_tokens": -1, "logprobs": 0}},
    "too long": {"token_ids": [7] * 1000},
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_errors_are_those_of_vllms_route(change, url):
    body = {"token_ids": [7, 8], "sampling_params": {"max_tokens": 4, "logprobs": 0, "seed": 1}, **change}
    packed, told = (ask(url + path, body) for path in ("/mcore_rl/generate", "/inference/v1/generate"))
    assert packed == told and packed[0] >= 400


@pytest.mark.parametrize("change", [{"n": 2}, {"logprobs": None}])
def test_what_packed_answers_cannot_have_is_refused(change, url):
    body = {"token_ids": [7, 8], "sampling_params": {"max_tokens": 4, "logprobs": 0, "seed": 1, **change}}
    status, told = ask(f"{url}/mcore_rl/generate", body)
    assert status == 400 and b"needs n=1, logprobs" in told


ROUTES = [
    "/pause", "/resume", "/is_paused", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights",
    "/finish_weight_update", "/get_world_size", "/collective_rpc", "/sleep", "/wake_up", "/is_sleeping",
    "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/server_info", "/abort_requests", "/metrics",
    "/docs", "/openapi.json", "/version", "/tokenize", "/ping", "/load", "/invocations", "/v1/models",
    "/v1/completions", "/inference/v1/generate", "/mcore_rl/generate", "/none",
]  # fmt: skip


@pytest.mark.parametrize("key", [None, "", "another-key-of-this-run", KEY[:-1]])
def test_no_route_but_health_answers_without_the_key(key, url):
    for route in ROUTES:
        for method in ("GET", "POST", "OPTIONS"):
            status, told = ask(url + route, {} if method == "POST" else None, key, method)
            assert status == 401 and KEY.encode() not in told, route
    assert ask(f"{url}/health", key=key)[0] == 200


def test_every_route_that_the_server_has_is_guarded(url):
    status, told = ask(f"{url}/openapi.json")
    assert status == 200
    paths = json.loads(told)["paths"]
    assert {"/pause", "/update_weights", "/init_weight_transfer_engine", "/mcore_rl/generate", "/sleep"} <= set(paths)
    for path, methods in paths.items():
        for method in methods:
            body = None if method == "get" else {}
            assert ask(url + path, body, None, method.upper())[0] == (200 if path == "/health" else 401), path


def test_the_key_is_in_no_log_and_no_command_line(url):
    status, told = ask(f"{url}/server_info?config_format=json")
    assert status == 200 and KEY.encode() not in told

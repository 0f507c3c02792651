"""Tests of routed experts from vLLM servers: the request for them, accepted answers and refused answers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from vllm_cases import GROUPS, PARAMS, config_of, pool_of

from mcore_rl.data.datasets import Prompt
from mcore_rl.errors import TrainingError, UserError
from mcore_rl.models.generation.interfaces import Response, output_of
from mcore_rl.models.generation.vllm.answers import decode_routed_experts
from mcore_rl.models.generation.vllm.packed import pack, unpack
from mcore_rl.models.generation.vllm.placement import ServerPlace
from mcore_rl.models.generation.vllm.server import server_command, server_environment
from mcore_rl.models.megatron.families.mixtures import Experts
from mcore_rl.rollouts.samples import Rollout, to_batch
from mcore_rl.rollouts.worker import Conversation
from mcore_rl.run.preflight import check_vllm

EXPERTS = Experts(count=300, topk=2, width=8, sparse_layers=(False, True, True, False, True))


def told(num_tokens, count=300, dtype=np.uint16):
    """Return experts of every layer except the dense ones, whose rows have no meaning."""
    drawn = np.random.default_rng(num_tokens).random((num_tokens - 1, 5, count)).argsort(-1)[..., :2].astype(dtype)
    drawn[:, [0, 3]] = 0
    return drawn


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
@pytest.mark.parametrize("num_tokens", [1, 2, 9])
def test_rows_of_sparse_layers_are_taken(dtype, num_tokens):
    array = told(num_tokens, 256 if dtype is np.uint8 else 300, dtype)
    experts = decode_routed_experts(array, num_tokens, EXPERTS)
    assert experts.dtype == torch.int16 and experts.shape == (num_tokens, 3, 2)
    assert experts[:-1].tolist() == [[[int(e) for e in row[layer]] for layer in (1, 2, 4)] for row in array]
    assert (experts[-1] == -1).all()


def test_fortran_order_is_read_too():
    _, arrays = unpack(pack({}, {"experts": np.asfortranarray(told(9))}))
    assert torch.equal(decode_routed_experts(arrays["experts"], 9, EXPERTS), decode_routed_experts(told(9), 9, EXPERTS))


def changed(index, value):
    array = told(9, dtype=np.int32)
    array[index] = value
    return array


WRONG = {
    "none": (None, "has no routed_experts; start the server with --enable-return-routed-experts"),
    "of fewer tokens": (told(8), r"of shape \(7, 5, 2\) and type uint16; the shape must be \(8, 5, 2\)"),
    "of more tokens": (told(10), r"of shape \(9, 5, 2\)"),
    "of sparse layers alone": (told(9)[:, [1, 2, 4]], r"of shape \(8, 3, 2\)"),
    "of fewer experts": (told(9)[..., :1], r"of shape \(8, 5, 1\)"),
    "flat": (told(9).ravel(), r"of shape \(80,\)"),
    "of another type": (
        told(9).astype(np.float32),
        "type float32; the shape must be .* one of uint8, uint16, int32",
    ),
    "long": (told(9).astype(np.int64), "type int64"),
    "no such expert": (changed((3, 2, 1), 300), "to 300, but the model has 300 experts"),
    "negative": (changed((0, 4, 0), -1), "ids -1 to"),
    "twice": (changed((7, 1), (4, 4)), "that contain the same expert twice"),
    "not written": (changed((5,), 0), "that contain the same expert twice"),
}


@pytest.mark.parametrize(("encoded", "reason"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_is_told_with_the_server(encoded, reason):
    """And asked of another, which does better."""
    request = replace(GROUPS[0][0], token_ids=(4, 5, 6, 7, 8, 9, 7))
    with pool_of(lambda n: (200, {} if encoded is None else {"routed_experts": encoded})) as (pool, stubs, dropped):
        pool.servers[f"http://127.0.0.1:{stubs[0].server_port}"].experts = EXPERTS
        with pytest.raises(TrainingError, match=f"failure: http://127.0.0.1:{stubs[0].server_port}: .*{reason}"):
            pool.submit(request, PARAMS).result(20)
        assert len(dropped) == 1
    answers = [{} if encoded is None else {"routed_experts": encoded}, {"routed_experts": told(9)}]
    with pool_of(*(lambda n, answer=answer: (200, answer) for answer in answers)) as (pool, _, _):
        for server in pool.servers.values():
            server.experts = EXPERTS
        response = pool.submit(request, PARAMS).result(20)
        assert torch.equal(response.choices["routed_experts"], decode_routed_experts(told(9), 9, EXPERTS))


def test_a_turn_tells_of_the_whole_conversation():
    """Later experts replace earlier ones; experts of the last observation and of padding are unknown."""

    class Tokenizer:
        def decode(self, ids, **_):
            return str(ids)

    prompts = [Prompt((4, 5), "a", {}), Prompt((4, 5, 6), "b", {})]
    long, short = [Conversation(Rollout.begin(0, i, prompt), prompt) for i, prompt in enumerate(prompts)]
    experts = {n: decode_routed_experts(told(n), n, EXPERTS) for n in (4, 5, 8)}
    long.respond(Response([7, 8], [0.0] * 2, True, (), {"routed_experts": experts[4]}), Tokenizer())
    long.rollout.add_observation([1, 1])
    long.respond(Response([7, 8], [0.0] * 2, True, (), {"routed_experts": experts[8]}), Tokenizer())
    short.respond(Response([7, 8], [0.0] * 2, True, (), {"routed_experts": experts[5]}), Tokenizer())
    short.rollout.add_observation([1])
    batch = to_batch([long.rollout, short.rollout], 0)["routed_experts"]
    assert batch.shape == (2, 8, 3, 2) and torch.equal(batch[0], experts[8])
    assert torch.equal(batch[1, :5], experts[5]) and (batch[1, 4:] == -1).all()


def test_batches_of_responses_have_experts_where_all_do():
    responses = [
        Response([1] * n, [0.0] * n, True, (), {"routed_experts": decode_routed_experts(told(n + 2), n + 2, EXPERTS)})
        for n in (1, 4)
    ]
    out = output_of([(3, 4)] * 2, responses, 0)["routed_experts"]
    assert out.shape == (2, 6, 3, 2) and torch.equal(out[0, :3], responses[0].choices["routed_experts"])
    assert (out[0, 2:] == -1).all() and torch.equal(out[1], responses[1].choices["routed_experts"])
    responses[1].choices = {}
    assert "routed_experts" not in output_of([(3, 4)] * 2, responses, 0)


def test_servers_are_asked_for_them(tmp_path):
    config = config_of(tmp_path)
    with_experts = config.model_copy(update={"model": config.model.model_copy(update={"moe_router_replay": True})})
    flag, variable = "--enable-return-routed-experts", "VLLM_USE_V2_MODEL_RUNNER"
    place = ServerPlace(0, "127.0.0.1", 8123)
    assert flag not in server_command(config, place) and flag in server_command(with_experts, place)
    assert variable not in server_environment(config, place)
    assert server_environment(with_experts, place)[variable] == "1"


def test_none_are_started_that_could_not_tell(tmp_path, monkeypatch):
    config = config_of(tmp_path)
    config = config.model_copy(update={"model": config.model.model_copy(update={"moe_router_replay": True})})
    with pytest.raises(
        UserError, match=r"moe_router_replay: vLLM's build for the CPU cannot return experts; give .*urls"
    ):
        check_vllm(config)
    check_vllm(config_of(tmp_path))
    check_vllm(with_urls(config))
    monkeypatch.setattr("mcore_rl.platform.has_gpu", lambda: True)
    check_vllm(config)


def with_urls(config):
    vllm = config.generation.vllm.model_copy(update={"urls": ("http://127.0.0.1:9",)})
    return config.model_copy(update={"generation": config.generation.model_copy(update={"vllm": vllm})})

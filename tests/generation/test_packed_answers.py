"""Tests of packed answers without vLLM: their form, and the errors of wrong answers."""

import json
import threading

import numpy as np
import pytest
from vllm_cases import GROUPS, PARAMS, Stub, packed, pool_of, well

from mcore_rl.errors import TrainingError
from mcore_rl.models.generation.vllm.answers import Request, decode_answer
from mcore_rl.models.generation.vllm.packed import pack, unpack

ARRAYS = {
    "ids": np.array([0, 1, 2**31 - 1], np.int32),
    "logprobs": np.array([-0.0, -1e-45, -np.inf, -9999.0, np.float32(-1 / 3)], np.float32),
    "experts": np.arange(2 * 3 * 5, dtype=np.uint8).reshape(2, 3, 5),
    "none": np.zeros((0, 4), np.uint16),
    "strided": np.arange(12, dtype=np.int64).reshape(3, 4)[:, ::2],
    "big-endian": np.array([1, 256], ">i4"),
}


def test_unpacked_arrays_have_the_bits_of_the_packed_ones():
    told, arrays = unpack(pack({"a": [1, None, "ü"]}, ARRAYS))
    assert told == {"a": [1, None, "ü"]} and list(arrays) == list(ARRAYS)
    for name, array in ARRAYS.items():
        found = arrays[name]
        assert found.shape == array.shape and found.dtype == array.dtype.newbyteorder("<")
        assert found.tobytes() == array.astype(found.dtype).tobytes() and found.base is None


def test_every_cut_of_an_answer_is_refused():
    body = pack({"a": 1}, {"ids": np.arange(5, dtype=np.int32), "more": np.arange(3, dtype=np.float32)})
    for wrong in (*(body[:size] for size in range(len(body))), body + b"\0"):
        with pytest.raises(ValueError, match="an answer that cannot be read"):
            unpack(wrong)


def headed(header):
    content = json.dumps(header).encode()
    return len(content).to_bytes(8, "little") + content


WRONG = [
    b"{}",
    headed([]),
    headed({"told": [], "arrays": []}),
    headed({"told": {}, "arrays": [["a", "O", [1]]]}),
    headed({"told": {}, "arrays": [["a", "<i4", [-1]]]}),
    headed({"told": {}, "arrays": [["a", "<i4", [10**15]]]}),
    headed({"told": {}, "arrays": [["a", "none such", [1]]]}),
]


@pytest.mark.parametrize("body", WRONG, ids=str)
def test_other_bytes_are_refused(body):
    with pytest.raises(ValueError, match="an answer that cannot be read"):
        unpack(body)


GOOD = {
    "finish_reason": "stop", "weight_versions": [["a", 0, 2]],
    "token_ids": np.array([5, 6], np.int32), "logprobs": np.array([-0.25, -0.5], np.float32),
}  # fmt: skip
REQUEST = Request((7,), 5, seed=0, priority=0, group=(7,), num_likeliest=2)


def test_the_likeliest_tokens_are_those_of_the_server_without_repetitions():
    likeliest = {
        "likeliest_counts": np.array([3, 4], np.int32),
        "likeliest_ids": np.array([5, 5, 8, 6, 9, 8, 3], np.int32),
        "likeliest_logprobs": np.array([-0.25, -0.25, -2.0, -0.5, -0.1, -0.2, -9999.0], np.float32),
    }
    found = decode_answer(packed({**GOOD, **likeliest}), REQUEST, None, False).response.likeliest
    assert found == [[(5, -0.25), (8, -2.0)], [(9, pytest.approx(-0.1)), (8, pytest.approx(-0.2))]]


@pytest.mark.parametrize("name", GOOD)
def test_an_answer_without_an_entry_drops_the_server(name):
    body = packed({key: value for key, value in GOOD.items() if key != name})

    class Lacking(Stub):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with pool_of(well, handler=Lacking) as (pool, _, dropped):
        with pytest.raises(TrainingError, match=f"its response has an answer without '{name}'"):
            pool.submit(GROUPS[0][0], PARAMS).result(20)
        assert len(dropped) == 1


def test_a_log_probability_is_needed_for_each_token():
    with pytest.raises(ValueError, match=r"\(2,\) tokens, but \(1,\) log-probabilities"):
        decode_answer(packed({**GOOD, "logprobs": np.zeros(1, np.float32)}), REQUEST, None, False)


def test_a_server_without_the_route_is_named():
    with pool_of(lambda n: (404, {})) as (pool, _, dropped):
        with pytest.raises(TrainingError, match="no vLLM server is left"):
            pool.submit(GROUPS[0][0], PARAMS).result(20)
        ((url, reason),) = dropped.items()
        assert reason == f"{url} has no route /mcore_rl/generate; start it with `mcore-rl vllm-servers`"


def test_answers_are_decoded_beside_the_event_loop(monkeypatch):
    """A slow answer does not keep others waiting."""
    started, go_on = threading.Event(), threading.Event()

    def slowly(body, request, *more):
        if request.seed == 0:
            started.set()
            assert go_on.wait(30)
        return decode_answer(body, request, *more)

    monkeypatch.setattr("mcore_rl.models.generation.vllm.client.decode_answer", slowly)
    with pool_of(well) as (pool, _, _):
        slow = pool.submit(Request((7, 1), 5, seed=0, priority=0, group=(1,)), PARAMS)
        assert started.wait(20)
        other = pool.submit(Request((7, 2), 5, seed=1, priority=1, group=(2,)), PARAMS)
        assert other.result(20).token_ids.tolist() == [2, 1] and not slow.done()
        go_on.set()
        assert slow.result(20).token_ids.tolist() == [1, 0]

"""Tests of packed answers without vLLM: their form, and the errors of wrong answers."""

import json
import random
import threading
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from vllm_cases import GROUPS, PARAMS, Stub, packed, pool_of, well

from mcore_rl.data.images import PlacedImage
from mcore_rl.errors import TrainingError
from mcore_rl.models.generation.vllm.answers import Request, decode_answer
from mcore_rl.models.generation.vllm.packed import pack, unpack
from mcore_rl.models.megatron.families.mixtures import Experts

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
    headed({"told": {}, "arrays": [["a", "(1000000000,)i4", [0]]]}),
    headed({"told": {}, "arrays": [["a", ["<i4"], [0]]]}),
    headed({"told": {}, "arrays": [["a", ">i4", [0]]]}),
    headed({"told": {}, "arrays": [[["a"], "<i4", [0]]]}),
    headed({"told": {}, "arrays": [["a", "<i4", 0]]}),
    headed({"told": {}, "arrays": [["a", "<i4", [True]]]}),
    headed({"told": {}, "arrays": [["a", "<i4", [0, 10**30]]]}),
    headed({"told": {}, "arrays": [["a", "<i4", [0] * 9]]}),
    headed({"told": {}, "arrays": [["a", "<i4", [2**31 - 1] * 8]]}),
    headed({"told": {}, "arrays": {"a": 1}}),
    headed({"told": {}, "arrays": [7]}),
    headed({"told": {}}),
    headed({"arrays": []}),
    headed("told"),
    (2**64 - 1).to_bytes(8, "little") + headed({"told": {}, "arrays": [["a", "<i4", [1]]]})[8:],
    (2**31).to_bytes(8, "little") + b"{}",
    (200_000).to_bytes(8, "little") + b"[" * 200_000,
    (6000).to_bytes(8, "little") + b"1" * 6000,
    (2).to_bytes(8, "little") + b"\xff\xfe",
]


@pytest.mark.parametrize("body", WRONG, ids=lambda body: str(body[:80]))
def test_other_bytes_are_refused(body):
    with pytest.raises(ValueError, match="an answer that cannot be read") as refusal:
        unpack(body)
    assert len(str(refusal.value)) < 500


GOOD = {
    "finish_reason": "stop", "weight_versions": [["a", 0, 2]],
    "token_ids": np.array([5, 6], np.int32), "logprobs": np.array([-0.25, -0.5], np.float32),
}  # fmt: skip
REQUEST = Request((7,), 5, seed=0, priority=0, group=(7,), num_likeliest=2)


LIKELIEST = {
    "likeliest_counts": np.array([3, 4], np.int32),
    "likeliest_ids": np.array([5, 5, 8, 6, 9, 8, 3], np.int32),
    "likeliest_logprobs": np.array([-0.25, -0.25, -2.0, -0.5, -0.1, -0.2, -9999.0], np.float32),
}


def test_the_likeliest_tokens_are_those_of_the_server_without_repetitions():
    found = decode_answer(packed({**GOOD, **LIKELIEST}), REQUEST, None, False).response.likeliest
    assert found == [[(5, -0.25), (8, -2.0)], [(9, pytest.approx(-0.1)), (8, pytest.approx(-0.2))]]


@pytest.mark.parametrize("name", GOOD)
def test_an_answer_without_an_entry_drops_the_server(name):
    body = packed({key: value for key, value in GOOD.items() if key != name})

    class Lacking(Stub):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.prove(body)
            self.end_headers()
            self.wfile.write(body)

    with pool_of(well, handler=Lacking) as (pool, _, dropped):
        with pytest.raises(TrainingError, match=f"its response has an answer without '{name}'"):
            pool.submit(GROUPS[0][0], PARAMS).result(20)
        assert len(dropped) == 1


def test_a_log_probability_is_needed_for_each_token():
    with pytest.raises(ValueError, match=r"\(2,\) tokens, but \(1,\) log-probabilities"):
        decode_answer(packed({**GOOD, "logprobs": np.zeros(1, np.float32)}), REQUEST, None, False)


EXPERTS = Experts(count=5, topk=2, width=8, sparse_layers=(True, False))
PICTURE = PlacedImage(0, (1, 1, 1), "digest", "a.png")
WHOLE = {
    **GOOD, **LIKELIEST, "prompt_token_ids": np.array([7], np.int32), "image_places": [[0, 1]],
    "routed_experts": np.array([[[0, 1], [0, 0]], [[4, 2], [0, 0]]], np.uint8),
    "mask_counts": np.array([2, 1], np.int32), "mask_ids": np.array([4, 5, 6], np.int32),
}  # fmt: skip


def decoded(body):
    return decode_answer(body, replace(REQUEST, images=(PICTURE,)), EXPERTS, needs_mask=True)


def ids(*values, kind=np.int32):
    return np.array(values, kind)


CONTRADICTIONS = {
    "ids that are not whole": ({"token_ids": ids(5, 6, kind=np.float32)}, "token_ids of shape .* and type float32"),
    "ids beyond 32 bits": ({"token_ids": ids(5, 2**40, kind=np.int64)}, "token_ids .* type int64 instead .* int32"),
    "a negative id": ({"token_ids": ids(5, -6)}, "token_ids with the negative id -6"),
    "ids in rows": ({"token_ids": ids([5, 6])}, r"token_ids of shape \(1, 2\)"),
    "one id": ({"token_ids": np.array(5, np.int32)}, r"token_ids of shape \(\)"),
    "no array": ({"token_ids": [5, 6]}, "without 'token_ids'"),
    "wide log-probabilities": (
        {"logprobs": np.zeros(2)},
        "logprobs of .* float64 instead of one dimension and float32",
    ),
    "no number": ({"logprobs": np.array([-1, np.nan], np.float32)}, "logprobs with nan at 1, which is not finite"),
    "infinite": ({"logprobs": np.array([-np.inf, -1], np.float32)}, "logprobs with -inf at 0"),
    "too many tokens": (
        {"token_ids": ids(*[5] * 6), "logprobs": np.zeros(6, np.float32)},
        "6 tokens, but 5 were asked for at most",
    ),
    "too few versions": ({"weight_versions": [["a", 0, 1]]}, "weight_versions of 1 tokens, but 2 tokens"),
    "too many versions": ({"weight_versions": [["a", 0, 2], ["b", 2, 3]]}, "weight_versions of 3 tokens"),
    "no versions": ({"weight_versions": []}, "weight_versions of 0 tokens"),
    "a version without tokens": ({"weight_versions": [["a"]]}, "the entry .'a'. in weight_versions"),
    "a version that is no name": ({"weight_versions": [[3, 0, 2]]}, "the entry .3, 0, 2. in weight_versions"),
    "a line in a version": ({"weight_versions": [["a\nb", 0, 2]]}, r"the entry .'a\\nb', 0, 2. in weight_versions"),
    "half a character": ({"weight_versions": [["\ud800", 0, 2]]}, r"'\\ud800'"),
    "a long name": ({"weight_versions": [["a" * 10**5, 0, 2]]}, r"'a+\.\.\.a+'"),
    "versions backwards": ({"weight_versions": [["a", 0, 3], ["b", 3, 2]]}, "the entry .'b', 3, 2."),
    "versions before the first": ({"weight_versions": [["a", -1, 1]]}, "the entry .'a', -1, 1."),
    "parts of tokens": ({"weight_versions": [["a", 0, 2.0]]}, "the entry .'a', 0, 2.0."),
    "versions as a text": ({"weight_versions": "a"}, "the weight_versions 'a' instead of a list"),
    "a reason that is none": ({"finish_reason": None}, "the finish_reason None"),
    "two reasons": ({"finish_reason": ["stop"]}, "the finish_reason .'stop'. instead of a short text"),
    "no likeliest": ({"likeliest_counts": None}, "without 'likeliest_counts'"),
    "likeliest of fewer tokens": ({"likeliest_counts": ids(7)}, "likeliest tokens of 1 positions, but 2 tokens"),
    "more likeliest": ({"likeliest_counts": ids(3, 5)}, "of 7 tokens, but with counts that sum to 8"),
    "negative counts": ({"likeliest_counts": ids(8, -1)}, "of 7 tokens, but with counts that sum to 7, from -1"),
    "likeliest without number": ({"likeliest_logprobs": np.full(7, np.nan, np.float32)}, "likeliest_logprobs with nan"),
    "likeliest without value": ({"likeliest_logprobs": np.zeros(6, np.float32)}, "7 likeliest_ids, but 6"),
    "a mask of one count": ({"mask_counts": np.array(3, np.int32)}, r"mask_counts of shape \(\)"),
    "a mask of parts": ({"mask_counts": np.array([2, 1], np.float32)}, "mask_counts of .* float32"),
    "masks in rows": ({"mask_ids": ids([4, 5, 6])}, r"mask_ids of shape \(1, 3\)"),
    "masks beyond 32 bits": ({"mask_ids": ids(2**33, 5, 6, kind=np.int64)}, "mask_ids of .* int64"),
    "another form of places": ({"image_places": 5}, "the image_places 5"),
    "places without sizes": ({"image_places": [0, 1]}, r"the image_places .0, 1.; they must be pairs"),
    "a prompt in rows": ({"prompt_token_ids": ids([7])}, r"prompt_token_ids of shape \(1, 1\)"),
}


@pytest.mark.parametrize(("change", "message"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_an_answer_that_contradicts_itself_is_refused(change, message):
    assert decoded(packed(WHOLE)).response.token_ids.tolist() == [5, 6]
    with pytest.raises(ValueError, match=message) as refusal:
        decoded(packed({**WHOLE, **change}))
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 500


@pytest.mark.parametrize("spans", [[], [["a", 0, 1]], [["a", 0, 3]]], ids=str)
def test_an_incomplete_answer_may_have_versions_of_other_tokens(spans):
    """It has none if the engine has dropped them, and nobody trains on it."""
    answer = decoded(packed({**GOOD, "finish_reason": "abort", "weight_versions": spans}))
    assert answer.finish_reason == "abort" and sum(count for _, count in answer.spans) <= 3


ODD = [None, True, -1, 0, 3, 2**31, 2**63, 10**400, 0.5, 1e999, "", "a", "\ud800", "<i8", ">f4", "O", [], [[]], {}]


def altered(value, draw):
    """Return `value` of JSON with an entry at some depth replaced, removed or repeated."""
    if not value or not isinstance(value, (dict, list)) or draw.random() < 0.2:
        return draw.choice([*ODD, [value], [value, value], {"told": value}])
    copied = value.copy()
    key = draw.choice(list(value)) if isinstance(value, dict) else draw.randrange(len(value))
    if draw.random() < 0.15:
        del copied[key]
    elif draw.random() < 0.1 and isinstance(value, list):
        copied.insert(key, value[key])
    else:
        copied[key] = altered(value[key], draw)
    return copied


def damaged(body, draw):
    """Return the bytes of an answer with other bytes, or with another header before the same arrays."""
    if draw.random() < 0.5:
        changed = bytearray(body)
        for _ in range(draw.choice([1, 1, 2, 8])):
            changed[draw.randrange(len(body))] = draw.choice([0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)])
        return bytes(changed)
    length = 8 + int.from_bytes(body[:8], "little")
    header = json.loads(body[8:length])
    for _ in range(draw.choice([1, 1, 2])):
        header = altered(header, draw)
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)
    return len(content).to_bytes(8, "little") + content + body[length:]


def test_a_damaged_answer_is_decoded_or_refused_with_a_short_message():
    """An answer takes no more memory than its bytes, whatever sizes it tells."""
    draw, body, refused = random.Random(0), packed(WHOLE), 0
    tracemalloc.start()
    try:
        for _ in range(2000):
            wrong = damaged(body, draw)
            try:
                response = decoded(wrong).response
            except ValueError as error:
                assert type(error) is ValueError and "\n" not in str(error) and len(str(error)) < 600
                str(error).encode()
                refused += 1
            else:
                assert response.token_ids.dtype == np.int32 and response.logprobs.dtype == np.float32
                assert np.isfinite(response.logprobs).all()
        assert tracemalloc.get_traced_memory()[1] < 5e6
    finally:
        tracemalloc.stop()
    assert 1000 < refused < 2000


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

"""Tests that a bad request fails only its own sample, not the server and not the run."""

import json
import threading
import time

import pytest
import torch
from stand_in_vllm import calls, serving
from vllm_cases import GROUPS, PARAMS, Well, pool_of, train, well
from vllm_cases import root as root  # a fixture

from mcore_rl.data.choices import RecordedChoice
from mcore_rl.models.generation.interfaces import RequestError
from mcore_rl.models.refit.transfer import FilledBucket, RefitGroups
from mcore_rl.rollouts.samples import Rollout, to_batch

REQUESTS = [request for group in GROUPS for request in group]
BAD = 31


def asked_for(stub):
    return [body["sampling_params"]["seed"] for body in stub.asked]


@pytest.mark.parametrize(("status", "times"), [(500, 3), (None, 3), (400, 1)], ids=["fails", "line cut", "refused"])
def test_one_bad_request_drops_no_server(status, times):
    def behave(stubs):
        return lambda n: (status, {}) if asked_for(stubs[0])[n - 1] == BAD else well(n)

    stubs = []
    with pool_of(lambda n: behave(stubs)(n), connections=1, handler=Well) as (pool, made, dropped):
        stubs += made
        futures = {request.seed: pool.submit(request, PARAMS) for request in REQUESTS}
        for seed, future in futures.items():
            if seed == BAD:
                told = "refuses the request: told so" if times == 1 else r"\(attempts: 3\)"
                with pytest.raises(RequestError, match=told):
                    future.result(60)
            else:
                assert future.result(60).token_ids[-1] == seed
        assert dropped == {} and asked_for(made[0]).count(BAD) == times


@pytest.mark.parametrize("status", [408, 429, 503])
def test_a_server_without_room_is_asked_later(status):
    with pool_of(lambda n: (status, {}) if n <= 4 else well(n), handler=Well) as (pool, stubs, dropped):
        futures = [pool.submit(request, PARAMS) for request in REQUESTS[:3]]
        assert [future.result(60).token_ids[-1] for future in futures] == [request.seed for request in REQUESTS[:3]]
        assert dropped == {} and len(stubs[0].asked) == 7
    with pool_of(lambda n: (status, {}), seconds=1.0, handler=Well) as (pool, _, dropped):
        with pytest.raises(RequestError, match=rf"status {status}: told so \(tried again for 1 s\)"):
            pool.submit(REQUESTS[0], PARAMS).result(60)
        assert dropped == {}


def test_servers_are_dropped_while_weights_are_sent():
    class Group:
        def begin_send(self, bucket, only=None):
            time.sleep(0.001)
            return lambda: None

    groups, failed = RefitGroups({str(n): Group() for n in range(400)}), []

    def drop():
        for n in range(0, 400, 2):
            groups.leave_out(str(n))
            time.sleep(0.0005)

    dropping = threading.Thread(target=drop)
    dropping.start()
    for _ in range(3):
        groups.begin_send(FilledBucket([0], torch.zeros(1, dtype=torch.uint8)))()
    dropping.join(60)
    assert not failed and sorted(map(int, groups.groups)) == list(range(1, 400, 2))


def test_nothing_is_locked_while_a_drop_is_told():
    """The reason for a server's end takes a second to read; other servers get requests meanwhile."""
    with pool_of(well, well) as (pool, _, _):
        telling, go_on = threading.Event(), threading.Event()
        pool._drop = lambda url, reason: (telling.set(), go_on.wait(30))
        first = next(iter(pool.servers))
        dropping = threading.Thread(target=pool.drop, args=(first, "gone"))
        dropping.start()
        assert telling.wait(30)
        try:
            assert pool.submit(REQUESTS[0], PARAMS).result(20).token_ids[-1] == REQUESTS[0].seed
        finally:
            go_on.set()
            dropping.join(30)


def test_experts_of_a_sample_without_a_response_are_unknown():
    answered = Rollout(
        0,
        0,
        [5, 6, 7],
        [False, True, True],
        [0.0] * 3,
        turns=1,
        choices={"routed_experts": torch.tensor([[[1, 2]]] * 2).short()},
    )
    failed = Rollout(0, 1, [5, 6], [False] * 2, [0.0] * 2, error="it has no response")
    batch = to_batch([answered, failed], 0, [RecordedChoice("routed_experts", 1, 2)])
    assert batch["routed_experts"].tolist() == [[[[1, 2]], [[1, 2]], [[-1, -1]]], [[[-1, -1]]] * 3]
    assert (to_batch([failed], 0, [RecordedChoice("routed_experts", 1, 2)])["routed_experts"] == -1).all()


@pytest.mark.long
@pytest.mark.parametrize(("status", "asked"), [(500, 3), (400, 1)])
def test_a_run_goes_on_without_the_samples_whose_requests_are_bad(status, asked, root, tmp_path):
    recording = tmp_path / "recording.jsonl"
    options = ("environment.max_turns=1", "trainer.max_steps=2", "environment.max_failed_fraction=0.9")
    with serving(root / "dense", tmp_path, ["--refuse", status, 5]) as (urls, _, logs):
        process, metrics = train(root, tmp_path.name, *options, urls, "--record", recording)
        answers = [path for _, path in calls(logs[0]) if path == "/mcore_rl/generate"]
    assert "a vLLM server is dropped" not in process.stdout_text
    rollouts = [r for line in recording.read_text().splitlines() for r in json.loads(line)["rollouts"]]
    failed = [rollout for rollout in rollouts if rollout["error"] is not None]
    assert failed and len(failed) == sum(step["num_failed"] for step in metrics)
    assert len(answers) == len(rollouts) + (asked - 1) * len(failed)
    assert all("it has no response" in rollout["error"] and not any(rollout["token_mask"]) for rollout in failed)
    assert all(step["num_samples"] == 8 for step in metrics)
    updated = [step["token_mult_prob_error"] for step in metrics if not step["skipped_update"]]
    assert updated and updated == pytest.approx([1.0] * len(updated), abs=1e-4)

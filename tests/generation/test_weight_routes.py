"""Tests of the routes of weights from ranks to the processes of servers."""

import random

import pytest

from mcore_rl.models.generation.vllm.weight_routes import (
    RankReport,
    Route,
    orders_of,
    plan_routes,
    relays_of,
    without_memory,
)

HOST = frozenset({0, 1, 2, 3})


def test_processes_read_from_senders_on_their_host():
    routes = plan_routes([HOST, HOST], [1, 2])
    assert routes == [Route(1, (0, 1), HOST), Route(2, (0, 1), HOST)]
    assert relays_of({"a": routes}, 1) == relays_of({"a": routes}, 2) == []
    assert orders_of(routes, [1, 2, 2], 2) == [[0, 1, 1]] * 2


def test_a_host_without_sender_has_one_rank_to_which_buckets_are_passed_on():
    routes = plan_routes([[4, 5], [4, 5]], [0, 1])
    assert routes == [Route(4, (0, 1), frozenset({4, 5}))]
    assert relays_of({"a": routes}, 0) == relays_of({"a": routes}, 1) == [4]
    assert orders_of(routes, [0, 1], 2) == [[0, 0]] * 2


def test_each_process_reads_from_the_rank_on_its_gpu():
    """Ranks 0 and 1 send; a server has the GPUs of ranks 0 and 1, another those of 2 and 3."""
    routes = {"a": plan_routes([[0], [1]], [0, 1]), "b": plan_routes([[2], [3]], [0, 1])}
    assert [(r.rank, r.members) for r in routes["a"]] == [(0, (0,)), (1, (1,))]
    assert [(r.rank, r.members) for r in routes["b"]] == [(2, (0,)), (3, (1,))]
    assert relays_of(routes, 0) == [1, 2, 3] and relays_of(routes, 1) == [0, 2, 3]
    assert orders_of(routes["a"], [0, 1], 2) == [[0, 0], [0, 0]]


def test_one_process_out_of_reach_lets_the_server_receive_by_collectives():
    routes = plan_routes([HOST, []], [1, 2])
    assert routes == [Route(1, (0, 1)), Route(2, (0, 1))] and not any(route.shares for route in routes)
    assert relays_of({"a": routes}, 1) == []


@pytest.mark.parametrize("seed", range(40))
def test_each_bucket_reaches_each_process_once(seed):
    draw = random.Random(seed)
    hosts = [[*range(n, n + size)] for n, size in ((0, 2), (2, 1), (3, 3), (6, 2))]
    senders = sorted(draw.sample(range(8), draw.randint(1, 4)))
    sees = [draw.choice([*hosts, []] if seed % 4 == 0 else hosts) for _ in range(draw.randint(1, 4))]
    routes = plan_routes(sees, senders)
    for sender in senders:
        for index, ranks in enumerate(sees):
            (route,) = [route for route in routes if index in route.members and route.carries(sender)]
            assert route.rank in (ranks if route.shares else [sender])
            assert route.rank == sender or route.rank in relays_of({"a": routes}, sender)
    assert all(any(route.carries(sender) for sender in senders) for route in routes)


def reports(*free):
    return [RankReport({}, [rank] if rank in (0, 1) else [], amount) for rank, amount in enumerate(free)]


def test_hosts_with_too_little_shared_memory_are_named():
    """Two senders need two buckets each; a rank to which buckets are passed on needs two."""
    sees = {"a": [[0, 1]], "b": [[2, 3]], "c": [[2, 3]]}
    assert without_memory(sees, reports(40, 40, 20, 20), bucket_bytes=10) == frozenset()
    assert without_memory(sees, reports(39, 40, 20, 20), bucket_bytes=10) == {0, 1}
    assert without_memory(sees, reports(40, 40, 19, 19), bucket_bytes=10) == {2, 3}
    assert without_memory(sees, reports(None, 1, 19, None), bucket_bytes=10) == frozenset(), "ranks have their blocks"

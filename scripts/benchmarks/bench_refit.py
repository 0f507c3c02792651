"""Compare updates of an engine's weights: from the first rank, from all senders, as differences, by shared memory.

    python scripts/benchmarks/bench_refit.py [--predict]

SmolLM2-135M-Instruct (outputs/smollm/model, by `make outputs/smollm/model/config.json`) trains in bfloat16 in two
pipeline stages; a third process receives the weights after each step. With --predict: seconds that an update of larger
models would take, from the bytes and the rates of the hardware's data sheet. Exits with 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from bench_results import Row, finish

from mcore_rl.platform import initialize_platform

initialize_platform()

from mcore_rl.config import SFTConfig
from mcore_rl.models.refit.delta import DeltaEncoder
from mcore_rl.models.refit.host_copy import HostCopy
from mcore_rl.models.refit.transfer import (
    BucketMemory,
    BucketSender,
    RefitGroup,
    RefitGroups,
    RefitInfo,
    RefitReceiver,
    RefitStore,
)
from mcore_rl.testing.processes import run_processes

MODEL = Path("outputs/smollm/model")
TRAINERS, STEPS, BUCKET_BYTES = 2, 3, 32 * 1024**2
RATES = (1e-6, 1e-5)
WAYS = ("first rank", "senders", "delta", "shared", "shared delta")
"""Ways of an update. In the last two, senders and receiver share memory."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predict", action="store_true")
    if parser.parse_args().predict:
        print("\n".join(predictions()))
        return 0
    rows = []
    for rate in RATES:
        ports = [free_port() for _ in range(1 + 1 + (len(WAYS) - 1) * TRAINERS)]
        with tempfile.TemporaryDirectory() as directory:
            order = Path(directory) / "order.json"
            outcomes = run_processes(take_part, rate, ports, order, world_size=TRAINERS + 1, timeout=500)
        seconds = {way: statistics.median(outcomes[0][way][1:]) for way in WAYS}
        sent = sum(outcomes[rank]["bytes"][-1] for rank in range(TRAINERS))
        whole, network = outcomes[0]["whole"], outcomes[0]["network"]
        print(f"lr {rate:g}: {seconds}, {sent:,} of {whole:,} bytes", flush=True)
        name = f"learning rate {rate:g}"
        rows += [
            Row(
                f"MB, differences, {name}",
                sent / 1e6,
                whole / 1e6,
                sent / whole,
                at_most={1e-6: 0.05, 1e-5: 0.15}[rate],
            ),
            Row(f"s, differences, {name}", seconds["delta"], seconds["senders"], seconds["delta"] / seconds["senders"]),
        ]
    ratio = seconds["senders"] / seconds["first rank"]
    rows.insert(0, Row("s, whole, two senders", seconds["senders"], seconds["first rank"], ratio, at_most=1.0))
    for way, of in (("shared", "senders"), ("shared delta", "delta")):
        name = "whole" if of == "senders" else f"differences, learning rate {RATES[-1]:g}"
        over = network[way] / network[of]
        rows += [
            Row(f"MB through the network stack, shared memory, {name}", network[way] / 1e6, network[of] / 1e6, over,
                at_most=0.05),
            # Encoding takes most of the time of differences, so sharing their few bytes does not shorten them.
            Row(f"s, shared memory, {name}", seconds[way], seconds[of], seconds[way] / seconds[of],
                at_most=1.0 if of == "senders" else None),
        ]  # fmt: skip
    columns = ("update", "compared with", "ratio")
    return finish("refit", "updates of SmolLM2-135M in bfloat16, two pipeline stages", columns, rows)


def ways_of(step: int) -> list[str]:
    """Return the order of the ways in a step. It changes, because the receiver still compares the update before."""
    first = step % len(WAYS)
    return [*WAYS[first:], *WAYS[:first]]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def take_part(rate: float, ports: list[int], order: Path) -> dict[str, Any]:
    """Train and send, or receive, whichever is this rank's part; return seconds and bytes."""
    rank = torch.distributed.get_rank()
    torch.distributed.destroy_process_group()
    if rank == TRAINERS:
        return receive(ports[1:], order)
    os.environ["WORLD_SIZE"] = str(TRAINERS)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{ports[0]}", rank=rank, world_size=TRAINERS
    )
    return train_and_send(rate, ports[1:], order)


def train_and_send(rate: float, ports: list[int], order: Path) -> dict[str, Any]:
    from mcore_rl.distributed.batched_data_dict import BatchedDataDict
    from mcore_rl.losses.common import NLLLoss
    from mcore_rl.models.megatron.weights.senders import gather_shipments, plan_shipments
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    config = SFTConfig.model_validate({
        "output_dir": "outputs/bench_refit", "model": {"path": str(MODEL), "dtype": "bfloat16"},
        "parallel": {"pipeline_model_parallel_size": TRAINERS}, "data": {"train": "none", "max_sequence_length": 64},
        "batch": {"global_batch_size": 4}, "optimizer": {"lr": rate, "schedule": "constant", "warmup_steps": 0},
        "trainer": {"max_steps": STEPS},
    })  # fmt: skip
    policy = MegatronPolicy(config, total_steps=STEPS)
    rank, info = torch.distributed.get_rank(), policy.prepare_refit_info()
    policy.init_collective("127.0.0.1", ports[0], 2)
    encoders, shipments = (
        {"delta": DeltaEncoder(), "shared delta": DeltaEncoder()},
        plan_shipments(policy.model, BUCKET_BYTES),
    )
    order.write_text(json.dumps([shipment.sender.stage for shipment in shipments]))
    torch.distributed.barrier()
    groups = {
        way: RefitGroups({way: RefitGroup(RefitStore("127.0.0.1", port, 0, 300), 2, shares="shared" in way)})
        for way, port in zip(WAYS[1:], ports[1 + rank :: TRAINERS], strict=True)
    }
    memory = {way: BucketMemory(shares=True, on_host=True) for way in WAYS if "shared" in way}
    numbers = {name: number for number, name in enumerate(info)}
    result: dict[str, Any] = {way: [] for way in WAYS} | {"bytes": [], "whole": 0, "network": {}}
    ids = torch.randint(100, 40_000, (4, 64), generator=torch.Generator().manual_seed(0))
    data = BatchedDataDict(
        input_ids=ids, input_lengths=torch.full((4,), 64), token_mask=torch.ones(4, 64), sample_mask=torch.ones(4)
    )
    for step in range(STEPS + 1):
        for way in ways_of(step):
            torch.distributed.barrier()
            start, network = time.perf_counter(), psutil.net_io_counters().bytes_sent
            if way == "first rank":
                policy.broadcast_weights_for_collective(BUCKET_BYTES)
            else:
                sender = BucketSender(groups[way], encoders.get(way), memory.get(way))
                for shipment, tensors in gather_shipments(policy.model, shipments):
                    sender.send_together(((numbers[name], tensor) for name, tensor in tensors), shipment.nbytes)
                sender.wait()
                if way == "delta":
                    result["bytes"].append(sender.bytes_sent)
            torch.distributed.barrier()
            result[way].append(time.perf_counter() - start)
            result["network"][way] = psutil.net_io_counters().bytes_sent - network  # of all processes
        policy.train(data, NLLLoss())
    result["whole"] = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in info.values())
    for of_way in memory.values():
        of_way.release()
    policy.shutdown()
    return result


def receive(ports: list[int], order: Path) -> dict[str, Any]:
    from mcore_rl.models.megatron.families import family_of
    from mcore_rl.models.megatron.model.hf_config import load_hf_config

    shapes = family_of(load_hf_config(MODEL)).shapes()
    info: RefitInfo = {name: (shape, torch.bfloat16) for name, shape in shapes.items()}
    engine = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in info.items()}

    def load(tensors: Any) -> None:
        for name, tensor in tensors:
            engine[name].copy_(tensor)

    receivers = {
        way: RefitReceiver(load, info, copy=HostCopy(info.values()) if "delta" in way else None) for way in WAYS
    }
    of_way = {"first rank": ports[:1]}
    of_way |= {way: ports[1 + n * TRAINERS :][:TRAINERS] for n, way in enumerate(WAYS[1:])}
    for way in WAYS:
        for port in of_way[way]:
            receivers[way].init_collective("127.0.0.1", port, 1, 2, 300, shares="shared" in way)
        receivers[way].order = [] if way == "first rank" else json.loads(order.read_text())
    for step in range(STEPS + 1):
        expected: dict[str, torch.Tensor] = {}
        for way in ways_of(step):
            receivers[way].update_weights_from_collective(
                *((step - 1 if step else None, step) if "delta" in way else ())
            )
            expected = expected or {name: tensor.clone() for name, tensor in engine.items()}
            for name, tensor in engine.items():
                assert torch.equal(tensor.view(torch.int16), expected[name].view(torch.int16)), (way, name)
    return {}


# ------------------------------------------------------------ larger models

CODE_BYTES_PER_SECOND, THREADS = 1e9, 12
"""Bytes of weights that a core compares, encodes or applies in a second, with `overwrite`; cores of a process."""


def predictions() -> list[str]:
    """Return a table of predicted seconds: nodes of 8 H100, servers of 8 processes that each receive all weights."""
    from mcore_rl.simulation.hardware import Hardware

    gpu = Hardware.load("h100")
    network = gpu.network_bytes_per_second * gpu.transfer_efficiency
    node = gpu.node_bytes_per_second * gpu.transfer_efficiency
    lines = [
        "| model | GB | layout | first rank, s | senders, s | differences of 3 %, s |",
        "|---|---|---|---|---|---|",
    ]
    for model, gigabytes, stages, shards in (("70B", 141, 4, 8), ("235B-A22B", 470, 8, 8)):
        size = gigabytes * 1e9
        # One rank: shards over NVLink, then stages over the network, then to the servers; one after the other.
        first = size / node + size * (1 - 1 / stages) / network + size / network
        # All senders: the servers' adapters are the limit; gathering is hidden.
        senders = max(size / network, size / stages / node)
        # Each sender encodes its part; the processes of a server share the work of applying.
        encode = size / (stages * shards) / CODE_BYTES_PER_SECOND / THREADS
        delta = max(encode, 0.03 * size / network, size / 8 / CODE_BYTES_PER_SECOND / THREADS)
        lines.append(f"| {model} | {gigabytes} | TP{shards} PP{stages} | {first:.1f} | {senders:.1f} | {delta:.1f} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())

"""The programs that the ranks of a check run: one function for each part, except for training programs."""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import re
import signal
import socket
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from mcore_rl import platform
from mcore_rl.config import DPOConfig, ModelConfig, TrainingConfig, load_config
from mcore_rl.config.parallel import ParallelLayout
from mcore_rl.testing.cluster.collectives import check_collectives
from mcore_rl.testing.cluster.inputs import LARGE, prepare, speed_sequences
from mcore_rl.testing.cluster.plan import Case, Plan, dpo_config
from mcore_rl.utils import torchrun
from mcore_rl.utils.parent_process import signal_at_end_of

STEPS = 3
"""Optimizer steps before the weights of two layouts are compared."""
LENGTHS = (37, 2, 96, 61, 18, 45, 80, 9)
"""Lengths in tokens of the pairs whose training the part `layouts` compares."""
TIMED = 5
"""Number of steps whose seconds the part `speed` measures."""
TRANSFERS = 2
"""Transfers of the part `refit`. All are compared; the last one is timed."""
BUCKET_BYTES = 64 * 2**20
SHOWN_STACKS = signal.SIGUSR2
"""Signal at which a rank writes its Python stacks to its log."""


class Processes:
    """The processes of a launch by torchrun. They exchange values through its store.

    Args:
        seconds: time limit for all processes to meet, and for each collective.
        backend: `parallel.backend` of the process groups.
    """

    def __init__(self, seconds: float, backend: str = "auto") -> None:
        self.limit, self._backend = timedelta(seconds=seconds), backend
        self.rank, self.size, self._groups = torchrun.rank(), torchrun.world_size(), 0
        store, _, _ = next(torch.distributed.rendezvous("env://", timeout=self.limit))
        self.store = torch.distributed.PrefixStore(f"check-{torchrun.restarts()}", store)
        self.store.set_timeout(self.limit)

    def meet(self, name: str) -> None:
        """Wait until all processes have called this method with the same `name`."""
        self.store.set(f"{name}/{self.rank}", "")
        self.store.wait([f"{name}/{rank}" for rank in range(self.size)])

    @contextmanager
    def group(self, size: int | None = None) -> Iterator[bool]:
        """Context in which the first `size` processes (default: all) are the ranks of the default process group.

        In it, models and collectives work as in a run of these processes. All processes of the launch enter the context
        together. It yields whether this process is one of the ranks. At the end, the processes meet, and the group is
        destroyed.
        """
        size = size or self.size
        self._groups += 1
        name, is_member = f"group-{self._groups}", self.rank < size
        if is_member:
            torchrun.set_world_size(size)
            # Another prefix, because the store still has the addresses of the last group's ranks.
            store = torch.distributed.PrefixStore(name, self.store)
            backend = platform.backend(self._backend)
            options: dict[str, Any] = {"device_id": platform.device()} if backend == "nccl" else {}
            torch.distributed.init_process_group(
                backend, store=store, rank=self.rank, world_size=size, timeout=self.limit, **options
            )
        try:
            yield is_member
        finally:
            torchrun.set_world_size(self.size)
        self.meet(f"end-{name}")  # no process closes its connections while others still use them
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def run_part(part: str, directory: Path, numbers: Sequence[int] = ()) -> None:
    """Run a part in this process, which is one of the ranks; rank 0 writes the result to the output directory.

    Two more names are run by a process alone: `prepare`, and `simulation`, a part of `speed`.

    Args:
        numbers: indices of the cases to run, in the part `layouts`.
    """
    plan = Plan.read(directory)
    if part == "prepare":
        prepare(plan)
        return
    if part == "simulation":
        plan.write_result(part, simulate_speed(plan))
        return
    if torchrun.is_under_torchrun():
        signal_at_end_of(os.getppid())  # torchrun's launcher
    faulthandler.register(SHOWN_STACKS, all_threads=True)
    platform.initialize_platform()
    processes = Processes(plan.collective_seconds, plan.backend)
    if part == "layouts":
        compare_layouts(plan, processes, [plan.cases[number] for number in numbers])
        return
    result = {"collectives": collectives, "refit": refit, "speed": speed}[part](plan, processes)
    if processes.rank == 0:
        plan.write_result(part, result)


def collectives(plan: Plan, processes: Processes) -> dict[str, Any]:
    """Return the rows of `check_collectives`."""
    with processes.group():
        return {"rows": check_collectives()}


# ------------------------------------------------------------ layouts


def compare_layouts(plan: Plan, processes: Processes, cases: Sequence[Case]) -> None:
    """Compare each case with one process, in float32 and bfloat16; rank 0 writes each case's row when it has it."""
    from mcore_rl.testing.layout_check import LayoutResult

    references: dict[tuple[str, str], LayoutResult | None] = {}  # on all other ranks, each value is None
    result = plan.read_result("layouts") if processes.rank == 0 else {}
    for case in cases:
        row: dict[str, Any] = {}
        for dtype in ("float32", "bfloat16"):
            config, data = _case_config(plan, case, dtype), _batch(plan)
            if (case.model, dtype) not in references:
                references[case.model, dtype] = _train(processes, 1, _alone(config), data)
            outcome = _train(processes, None, config, data)
            if outcome is not None:
                exact, own = references[case.model, "float32"], references[case.model, dtype]
                row |= _compared(config, outcome, exact, own if dtype == "bfloat16" else None)
        if processes.rank == 0:
            row["right"] = row["float32"]["right"] and row["bfloat16"]["right"]
            result = {**result, "rows": {**result.get("rows", {}), str(case): row}}
            plan.write_result("layouts", result)


def _case_config(plan: Plan, case: Case, dtype: str) -> DPOConfig:
    """Return the configuration of a case; in float32 with local layers, because others multiply with TF32."""
    from mcore_rl.testing.layout_check import in_float32

    data = {"train": "not read", "max_sequence_length": max(LENGTHS)}
    config = dpo_config(plan, case.layout, dtype, data=data, batch={"global_batch_size": plan.multiple(8)})
    model = config.model.model_copy(update={"path": plan.models / case.model})
    config = config.model_copy(update={"model": model})
    if dtype == "float32":
        config = config.model_copy(update={"model": in_float32(config).model})
    return platform.resolve(config)


def _alone(config: DPOConfig) -> DPOConfig:
    values = {**config.parallel.model_dump(), **ParallelLayout().parallel_values}
    return config.model_copy(update={"parallel": type(config.parallel).model_validate(values)})


def _batch(plan: Plan) -> Any:
    """Return a global batch of pairs with random tokens."""
    from mcore_rl.distributed.batched_data_dict import BatchedDataDict

    rows = 2 * plan.multiple(8)
    lengths = torch.tensor([LENGTHS[row // 2 % len(LENGTHS)] for row in range(rows)])
    generator, places = torch.Generator().manual_seed(0), torch.arange(max(LENGTHS))
    responses = (lengths + 1) // 2
    return BatchedDataDict(
        input_ids=torch.randint(4, 200, (rows, max(LENGTHS)), generator=generator),
        input_lengths=lengths,
        token_mask=((places >= (lengths - responses)[:, None]) & (places < lengths[:, None])).float(),
        sample_mask=torch.ones(rows),
    )


def _train(processes: Processes, size: int | None, config: DPOConfig, data: Any) -> Any:
    """Return the result of training steps of the first `size` processes, on rank 0; None on all other ranks."""
    from mcore_rl.testing.layout_check import compute_layout_result

    with processes.group(size) as is_member:
        return compute_layout_result(config, data.select_indices(range(data.size)), STEPS) if is_member else None


def _compared(config: TrainingConfig, outcome: Any, exact: Any, rounded: Any | None) -> dict[str, Any]:
    """Return the row of a layout's result in one precision.

    Args:
        exact: result of one process in float32.
        rounded: result of one process in bfloat16; None if the layout's result is in float32.
    """
    from mcore_rl.models.megatron.families import family_of
    from mcore_rl.models.megatron.model.hf_config import hf_config_of
    from mcore_rl.testing.layout_check import compare, compare_in_bfloat16

    model = config.model
    if rounded is None:
        limit = family_of(hf_config_of(model)).gradient_tolerance
        difference = compare(outcome, exact)
        name, right = "float32", difference.within(gradients=limit)
    else:
        difference = compare_in_bfloat16(outcome, rounded, exact)
        name, right = "bfloat16", difference.within()
    figures = {key: value for key, value in asdict(difference).items() if key not in ("steps", "limit")}
    return {name: {**figures, "right": right}}


# ------------------------------------------------------------ refit


def refit(plan: Plan, processes: Processes) -> dict[str, Any]:
    """Send the weights from the first half of the processes, which train, to the others, which are engines.

    Returns:
        On rank 0: the bytes and seconds of a transfer, the number of engines, and the names of tensors (`different`)
        that are not bit for bit the exported ones in every engine.
    """
    trainers = processes.size // 2
    with processes.group(trainers) as is_trainer:
        if not is_trainer:
            _receive(processes, trainers)
            return {}
        return _send(plan, processes, trainers)


def _send(plan: Plan, processes: Processes, trainers: int) -> dict[str, Any]:
    from mcore_rl.models.megatron.weights.conversion import export_hf_weights
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy
    from mcore_rl.models.refit.host_copy import nbytes_of
    from mcore_rl.models.refit.transfer import encode_refit_info, local_address

    config, engines = platform.resolve(refit_config(plan, trainers)), processes.size - trainers
    policy = MegatronPolicy(config)
    info = policy.prepare_refit_info()
    if processes.rank == 0:
        address = local_address(processes.store.get("receiver").decode())
        described = {"ip": address, "port": _free_port(address), "info": encode_refit_info(info)}
        processes.store.set("sender", json.dumps(described))
    sender = json.loads(processes.store.get("sender"))
    policy.init_collective(sender["ip"], sender["port"], 1 + engines)
    transfers, bad = list[dict[str, str]](), set[str]()
    for turn in range(TRANSFERS):
        exported = list(export_hf_weights(policy.model))
        bad |= {name for name, tensor in exported if not bool(tensor.isfinite().all())}
        transfers.append({name: _digest(tensor) for name, tensor in exported})
        del exported
        processes.meet(f"refit-{turn}")
        platform.synchronize()
        started = time.perf_counter()
        policy.broadcast_weights_for_collective(BUCKET_BYTES)
        platform.synchronize()
        seconds = time.perf_counter() - started
        processes.meet(f"received-{turn}")
        with torch.no_grad():  # the next transfer must bring other values
            for weight in (weight for chunk in policy.chunks for weight in chunk.parameters()):
                weight.mul_(2)
    different = set[str]()
    if processes.rank == 0:
        for rank in range(trainers, processes.size):
            different |= different_tensors(transfers, json.loads(processes.store.get(f"digests-{rank}")))
    policy.shutdown()
    size = sum(nbytes_of(*entry) for entry in info.values())
    return {
        "bytes": size, "seconds": seconds, "gb_per_second": size / seconds / 1e9, "engines": engines,
        "tensors": len(info), "layout": str(_refit_layout(trainers)), "different": sorted(different),
        "not_finite": sorted(bad),
    }  # fmt: skip


def _receive(processes: Processes, trainers: int) -> None:
    from mcore_rl.models.refit.transfer import RefitReceiver, decode_refit_info, local_address

    # The address by which the trainers' node reaches this one is also the one by which it is reached.
    if processes.rank == trainers:
        processes.store.set("receiver", local_address(socket.gethostbyname(os.environ["MASTER_ADDR"])))
    sender, received = json.loads(processes.store.get("sender")), Received()
    receiver = RefitReceiver(received.load, decode_refit_info(sender["info"]))
    engines, seconds = processes.size - trainers, processes.limit.total_seconds()
    receiver.init_collective(sender["ip"], sender["port"], 1 + processes.rank - trainers, 1 + engines, seconds)
    for turn in range(TRANSFERS):
        processes.meet(f"refit-{turn}")
        receiver.update_weights_from_collective()
        received.end_transfer()
        processes.meet(f"received-{turn}")
    processes.store.set(f"digests-{processes.rank}", json.dumps(received.digests))


class Received:
    """The tensors that a process receives. It computes their digests after each transfer, whose time is measured.

    digests: digests of all tensors by name, for each transfer.
    """

    def __init__(self) -> None:
        self.digests: list[dict[str, str]] = []
        self._tensors: dict[str, torch.Tensor] = {}

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy received tensors, whose memory the receiver uses again."""
        self._tensors.update((name, tensor.clone()) for name, tensor in tensors)

    def end_transfer(self) -> None:
        self.digests.append({name: _digest(tensor) for name, tensor in self._tensors.items()})
        self._tensors.clear()


def different_tensors(sent: Sequence[dict[str, str]], received: Sequence[dict[str, str]]) -> set[str]:
    """Return the names of tensors whose digests differ in any transfer, or that were sent or received alone."""
    pairs = zip(sent, received, strict=True)
    return {name for one, other in pairs for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


def refit_config(plan: Plan, trainers: int) -> DPOConfig:
    """Return the configuration of the processes that send their weights."""
    dtype, large = ("bfloat16" if plan.gpu else "float32"), plan.models / LARGE
    config = dpo_config(plan, _refit_layout(trainers), dtype)
    if not large.is_dir():
        return config
    return config.model_copy(update={"model": ModelConfig(path=large, dtype="bfloat16")})


def _refit_layout(trainers: int) -> ParallelLayout:
    tp = 2 if trainers % 2 == 0 else 1
    return ParallelLayout(tp=tp, dp=trainers // tp, sp=tp > 1)


def _digest(tensor: torch.Tensor) -> str:
    """Return a digest of the tensor's dtype, shape and bytes."""
    values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(values.tobytes()).hexdigest()}"


def _free_port(address: str) -> int:
    with socket.create_server((address, 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


# ------------------------------------------------------------ speed


def speed(plan: Plan, processes: Processes) -> dict[str, Any]:
    """Run DPO steps on invented sequences; return the median seconds and tokens per second, and each rank's peak.

    On a GPU, the peak is that of the allocated memory in a step. Without one, it is that of the live tensors, which
    only the second step counts: counting takes time.
    """
    from mcore_rl.distributed.collectives import gather_objects
    from mcore_rl.simulation.counters import LiveBytes
    from mcore_rl.simulation.rank import Models, run_step
    from mcore_rl.simulation.sequences import invented_batch

    config = platform.resolve(load_config(DPOConfig, plan.directory / "configs" / "speed.yaml"))
    sequences, live = speed_sequences(config), LiveBytes("cpu")
    with processes.group():
        with nullcontext() if platform.has_gpu() else live:
            models = Models.build(config)
            data = models.policy.own_rows(invented_batch(config, sequences))
            run_step(config, models, data, lambda phase: None)
            live.phase = "measured"  # the first step creates the optimizer's state; the second one finds it
            run_step(config, models, data, lambda phase: None)
        platform.forget_peak_memory()
        seconds = []
        for _ in range(TIMED):
            torch.distributed.barrier()
            platform.synchronize()
            started = time.perf_counter()
            run_step(config, models, data, lambda phase: None)
            platform.synchronize()
            seconds.append(time.perf_counter() - started)
        peaks = gather_objects(platform.peak_memory() if platform.has_gpu() else live.peaks["measured"])
        flops, median = models.policy.flops_of(data), statistics.median(seconds)
        models.policy.shutdown()
    tokens = sum(sequences.lengths)
    return {
        "seconds": median, "all_seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / median,
        "tflops_per_second": flops / median / 1e12, "peak_bytes": max(peaks), "peaks": peaks,
        "dtype": config.model.dtype, "layout": config.parallel.model_dump(),
    }  # fmt: skip


def simulate_speed(plan: Plan) -> dict[str, Any]:
    """Simulate the step of the part `speed`; return its peak memory and, on a known GPU, its seconds.

    This process cannot be used for anything else afterwards.
    """
    from mcore_rl.simulation.hardware import Hardware
    from mcore_rl.simulation.search import chosen_ranks, simulate
    from mcore_rl.simulation.step import simulate_rank

    config = load_config(DPOConfig, plan.directory / "configs" / "speed.yaml")
    config = config.for_device(on_gpu=bool(plan.gpu), te_problem="is not simulated", simulates=True)
    sequences, size = speed_sequences(config), plan.world_size
    if not plan.gpu:
        report = simulate_rank(config, 0, size, sequences, tiles_of="cpu")
        return {"peak_bytes": report.peak, "memory": report.memory, "seconds": None, "hardware": None}
    reports = simulate(config, size, chosen_ranks(config, size, "distinct"), sequences)
    kind, parallel = hardware_of(plan.gpu), config.parallel
    stages, chunks = parallel.pipeline_model_parallel_size, parallel.chunks_per_stage
    seconds = None if kind is None else Hardware.load(kind).step_seconds(reports, config.model.dtype, stages, chunks)
    largest = max(reports, key=lambda report: report.peak)
    return {"peak_bytes": largest.peak, "memory": largest.memory, "seconds": seconds, "hardware": kind}


def hardware_of(gpu: str) -> str | None:
    """Return the simulation's name for a GPU's name, such as h100 for "NVIDIA H100 80GB HBM3"; None if it has none."""
    kinds = ("gb300", "gb200", "b200", "h200", "h100", "a100")
    return next((kind for kind in kinds if re.search(rf"\b{kind}\b", gpu.lower())), None)

"""The chosen ranks of a run, each simulated in a process of its own; and the search for a layout."""

from __future__ import annotations

import itertools
import json
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from mcore_rl.config import RLConfig, TrainingConfig, build_config
from mcore_rl.config.base import whole_number
from mcore_rl.config.parallel import Layout
from mcore_rl.errors import ContractError, UserError
from mcore_rl.run.identity import flattened
from mcore_rl.simulation.hardware import Hardware
from mcore_rl.simulation.loading import LoadingReport, simulate_loading
from mcore_rl.simulation.step import RankReport, Sequences, simulate_rank

T = TypeVar("T")


def chosen_ranks(config: TrainingConfig, world_size: int, wanted: str) -> list[int]:
    """One rank of each pipeline stage (`stages`), of the `first`, of the `last`, or of the `distinct` ones, which are
    these two and of an uneven pipeline the first with each share of layers; or numbers.

    Raises:
        UserError: something else, or no rank of this run.
    """
    stages = config.parallel.pipeline_model_parallel_size
    of_stage = world_size // stages  # Megatron numbers stages outermost
    named = {
        "first": [0],
        "last": [(stages - 1) * of_stage],
        "distinct": [stage * of_stage for stage in config.parallel.distinct_stages()],
        "stages": [stage * of_stage for stage in range(stages)],
    }
    ranks: list[int] = []
    for word in wanted.split(","):
        number = whole_number(word)
        if word not in named and (number is None or number >= world_size):
            raise UserError(
                f"--ranks {wanted[:80]}: write first, last, distinct, stages, or numbers below {world_size}"
            )
        ranks += named[word] if number is None else [number]
    return sorted(set(ranks))


def simulate(
    config: TrainingConfig, world_size: int, ranks: Sequence[int], sequences: Sequences, workers: int = 1
) -> list[RankReport]:
    """Reports of these ranks, in their order.

    Raises:
        UserError: what the run itself would refuse.
    """
    if isinstance(config, RLConfig) and config.rollouts.train_global_batch_size is not None:
        raise UserError(
            f"{config.algorithm}.train_global_batch_size: minibatches are not simulated; leave it out, and multiply "
            "the optimizer's part of the time by the number of minibatches"
        )
    return _each(workers, simulate_rank, [(config, rank, world_size, sequences) for rank in ranks])


def simulate_loadings(
    config: TrainingConfig, world_size: int, ranks: Sequence[int], writers: int, workers: int = 1
) -> list[LoadingReport]:
    """Simulate how these ranks load a checkpoint that this number of ranks has written."""
    return _each(workers, simulate_loading, [(config, rank, world_size, writers) for rank in ranks])


def _each(workers: int, function: Callable[..., T], calls: Sequence[tuple[Any, ...]]) -> list[T]:
    """Return the result of each call, made in a process of its own."""
    with _threads(workers) as pool:
        waiting = [pool.submit(_apart, function, *arguments) for arguments in calls]
        return [future.result() for future in waiting]


@contextmanager
def _threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that begin nothing new when the block is left."""
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _apart(function: Callable[..., T], *arguments: Any) -> T:
    """What a call comes to in a process of its own: a simulated device is installed before Megatron is imported, and a
    process that is killed takes no other with it.

    Raises:
        UserError: the process was killed.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        try:
            return process.submit(function, *arguments).result()
        except BrokenProcessPool:
            raise UserError(
                "the process that simulates it was killed, perhaps for want of memory: try fewer workers"
            ) from None


@dataclass(frozen=True)
class Candidate:
    """A layout, and what it takes; `reason` if it cannot be or does not fit. overrides: what makes the configuration
    have it. is_mixture: as in its reports."""

    text: str
    overrides: tuple[str, ...] = ()
    peak: int = 0
    seconds: float = float("inf")
    utilization: float = 0.0
    reason: str = ""
    is_mixture: bool = False


def layouts_to_try(
    config: TrainingConfig, world_size: int, gpu: Hardware, experts: int = 1
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Powers of 2: tensor parallelism inside a node, with sequence parallelism; pipelines of even stages and context
    parallelism of up to 16 ranks; and of the `experts` of a layer those that divide them, each expert whole. Each with
    the configuration's values, which it may refuse."""

    def powers(largest: int) -> list[int]:
        return [2**n for n in range(largest.bit_length()) if 2**n <= largest]

    for tp, pp, cp, ep, recompute in itertools.product(
        powers(gpu.gpus_per_node),
        powers(min(16, world_size)),
        powers(min(16, world_size)),
        [size for size in powers(experts) if experts % size == 0],
        (False, True),
    ):
        if world_size % (tp * pp * cp) or world_size % (pp * ep):
            continue
        values = config.model_dump()
        layout = Layout(tp=tp, pp=pp, cp=cp, sp=tp > 1, ep=ep, etp=1 if ep > 1 else 0)
        values["parallel"].update(layout.parallel_values)
        values["model"]["recompute_activations"] = recompute
        if recompute:
            values["model"]["recompute_modules"] = ()
        dp = world_size // (tp * pp * cp)
        text = (
            f"tp{tp} pp{pp} cp{cp} dp{dp}" + (f" ep{ep}" if experts > 1 else "") + (" recompute" if recompute else "")
        )
        yield text, values


def experts_of(config: TrainingConfig) -> int:
    """Routed experts of a layer of the model; 1 if it has none.

    Raises:
        UserError: a directory that holds no model, or one of another family than those there are.
    """
    from mcore_rl.models.megatron.families import family_of
    from mcore_rl.models.megatron.families.mixtures import Mixture
    from mcore_rl.models.megatron.hf_config import load_hf_config

    family = family_of(load_hf_config(config.model.path, config.model.trust_remote_code, config.model.head))
    return family.experts.count if isinstance(family, Mixture) else 1


def search(
    config: TrainingConfig,
    world_size: int,
    sequences: Sequences,
    gpu: Hardware,
    workers: int,
    say: Callable[[str], None],
) -> list[Candidate]:
    """All layouts: those that fit by their estimated time, then the others with the reason."""
    found: list[Candidate] = []
    with _threads(workers) as pool:
        waiting: list[tuple[Candidate, TrainingConfig, list[Future[RankReport]]]] = []
        for text, values in layouts_to_try(config, world_size, gpu, experts_of(config)):
            overrides = overrides_of(config, values)
            try:
                layout = build_config(type(config), values, (), origin="layout")
                layout.pack_width(layout.rows_per_unit)
                ranks = chosen_ranks(layout, world_size, "first,last")
            except UserError as error:
                found.append(Candidate(text, overrides, reason=str(error)))
                continue
            jobs = [pool.submit(_apart, simulate_rank, layout, rank, world_size, sequences) for rank in ranks]
            waiting.append((Candidate(text, overrides), layout, jobs))
        for done, (candidate, layout, jobs) in enumerate(waiting, start=1):
            candidate = _simulated(candidate, layout, jobs, world_size, gpu)
            came_out = candidate.reason or f"{candidate.seconds:.3g} s"
            say(f"{done} of {len(waiting)} layouts: {candidate.text}: {came_out}")
            found.append(candidate)
    return sorted(found, key=lambda candidate: (candidate.seconds, candidate.peak))


def overrides_of(config: TrainingConfig, values: dict[str, Any]) -> tuple[str, ...]:
    """Return the command-line overrides that give the configuration these values."""
    own = flattened(config.model_dump(mode="json"))
    wanted = flattened(json.loads(json.dumps(values, default=str)))
    return tuple(f"{key}={json.dumps(wanted[key])}" for key in own if key in wanted and own[key] != wanted[key])


def _simulated(
    candidate: Candidate, config: TrainingConfig, jobs: Sequence[Future[RankReport]], world_size: int, gpu: Hardware
) -> Candidate:
    try:
        reports = [job.result() for job in jobs]
    except (UserError, ContractError) as error:
        return replace(candidate, reason=str(error))
    peak, dtype = max(report.peak for report in reports), config.model.dtype
    candidate = replace(candidate, peak=peak, is_mixture=reports[0].is_mixture)
    if peak > gpu.memory_bytes:
        return replace(candidate, reason=f"needs {peak / 1e9:.0f} GB")
    seconds = gpu.step_seconds(reports, dtype, config.parallel.pipeline_model_parallel_size, 1)
    utilization = gpu.utilization(reports[0].model_flops, seconds, world_size, dtype)
    return replace(candidate, seconds=seconds, utilization=utilization)

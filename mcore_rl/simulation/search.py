"""Simulation of one or many layouts (`simulate`, `search`), and tables of the results."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from mcore_rl.config import RLConfig, TrainingConfig, build_config
from mcore_rl.config.base import whole_number
from mcore_rl.config.parallel import ParallelLayout
from mcore_rl.errors import ContractError, UserError
from mcore_rl.run.identity import flattened
from mcore_rl.simulation.hardware import Hardware
from mcore_rl.simulation.rank import PHASES, prepare_process
from mcore_rl.simulation.sequences import Sequences
from mcore_rl.simulation.step import LOCAL, Implementation, LoadingReport, RankReport, simulate_loading, simulate_rank
from mcore_rl.utils.console import SECONDS_BETWEEN_LINES, PrintLine, silent
from mcore_rl.utils.parent_process import signal_at_end_of

T = TypeVar("T")


def chosen_ranks(config: TrainingConfig, world_size: int, wanted: str) -> list[int]:
    """Return the ranks that `wanted` names.

    Args:
        wanted: numbers of ranks, or words, separated by commas. A word selects the first rank of some pipeline stages.
            `first`: the first stage. `last`: the last stage. `stages`: all stages. `distinct`: the first and the last
            stage and, in an uneven pipeline, one stage for each number of layers.

    Raises:
        UserError: a word is unknown, or a number is not a rank of this run.
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


@dataclass(frozen=True)
class Assumptions:
    """Assumptions of an estimate that are not in the configuration.

    imbalance: number of tokens that are routed to the simulated rank's experts, divided by the mean of this number over
        the ranks of the expert-parallel group.
    """

    implementation: Implementation = LOCAL
    imbalance: float = 1.0

    def calls(
        self, config: TrainingConfig, world_size: int, ranks: Sequence[int], sequences: Sequences
    ) -> list[tuple[Any, ...]]:
        """Return the arguments of `simulate_rank` for each of the `ranks`.

        The imbalance is limited to the expert-parallel size, which is the imbalance if one rank receives all tokens.
        """
        imbalance = min(self.imbalance, config.parallel.expert_model_parallel_size)
        return [(config, rank, world_size, sequences, "cuda", imbalance) for rank in ranks]


BALANCED_LOCAL = Assumptions()
KILLED = "the process that simulates a rank was killed, perhaps because memory ran out; use fewer workers (--workers)"


def simulate(
    config: TrainingConfig,
    world_size: int,
    ranks: Sequence[int],
    sequences: Sequences,
    workers: int = 1,
    assumed: Assumptions = BALANCED_LOCAL,
    say: PrintLine = silent,
) -> list[RankReport]:
    """Simulate a step of each of these ranks; return their reports in the order of `ranks`.

    Args:
        workers: number of simulations that run at the same time.
        say: prints a line of progress.

    Raises:
        UserError: the run would refuse the configuration, or it cannot be simulated.
    """
    whole = config.batch.global_batch_size
    if isinstance(config, RLConfig) and config.rollouts.train_global_batch_size not in (None, whole):
        raise UserError(
            f"{config.algorithm}.train_global_batch_size: minibatches cannot be simulated; leave this key out, "
            "and multiply the optimizer's part of the time by the number of minibatches"
        )
    calls = assumed.calls(config, world_size, ranks, sequences)
    implementation = assumed.implementation.with_fp8(config.model.fp8)
    return [implementation.of(report) for report in _each(workers, simulate_rank, calls, say)]


def simulate_loadings(
    config: TrainingConfig,
    world_size: int,
    ranks: Sequence[int],
    writers: int,
    workers: int = 1,
    say: PrintLine = silent,
) -> list[LoadingReport]:
    """Simulate how each of the `ranks` loads a checkpoint that `writers` ranks have written; return their reports."""
    return _each(workers, simulate_loading, [(config, rank, world_size, writers) for rank in ranks], say)


def _each(workers: int, function: Callable[..., T], calls: Sequence[tuple[Any, ...]], say: PrintLine) -> list[T]:
    """Call `function` with each of the argument tuples `calls`, each in a separate process; return the results.

    Args:
        workers: number of calls that run at the same time.
        say: prints a line of progress when a call has ended, and at least every 10 seconds.
    """
    started = time.monotonic()
    with _threads(workers) as pool:
        waiting = [pool.submit(_apart, function, *arguments) for arguments in calls]
        ended, running = wait(waiting, timeout=SECONDS_BETWEEN_LINES, return_when=FIRST_COMPLETED)
        while running and not any(future.exception() for future in ended):
            done, seconds = len(calls) - len(running), time.monotonic() - started
            say(f"{done} of {len(calls)} ranks simulated after {seconds:.0f} s")
            ended, running = wait(running, timeout=SECONDS_BETWEEN_LINES, return_when=FIRST_COMPLETED)
        return [future.result() for future in waiting]


@contextmanager
def _threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Context with a pool of threads for `_apart`. At its end, calls that have not started are cancelled."""
    pool = ThreadPoolExecutor(count, initializer=_start_server)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


_of_thread = threading.local()


def _start_server() -> None:
    """Give this thread a server: a process that imports Megatron once, and from which each simulation is forked."""
    _of_thread.server = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _prepare, (os.getpid(),))


def _prepare(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the server
    signal_at_end_of(parent)
    with suppress(Exception):  # the first simulation raises it again, with its text
        prepare_process()


def _apart(function: Callable[..., T], *arguments: Any) -> T:
    """Call `function` in a process forked from this thread's server (see `_start_server`); return the result.

    Each simulation needs its own process: it changes the process, and may be killed while other simulations go on.

    Raises:
        UserError: the process was killed.
    """
    try:
        return _of_thread.server.submit(_in_fork, function, *arguments).result()
    except BrokenProcessPool:
        _start_server()
        raise UserError(KILLED) from None


def _in_fork(function: Callable[..., T], *arguments: Any) -> T:
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork"), _begin, (os.getpid(),)) as process:
        try:
            return process.submit(function, *arguments).result()
        except BrokenProcessPool:
            raise UserError(KILLED) from None


def _begin(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # The fork keeps the pipes of the server open, so the program would not notice that the server has ended.
    signal_at_end_of(parent)


@dataclass(frozen=True)
class Candidate:
    """A layout and its costs.

    text: the layout in short form.
    overrides: command-line overrides that give the configuration this layout.
    peak: largest memory of a simulated rank, in bytes.
    seconds: estimated time of a step; infinite if there is a `reason`.
    reason: why the configuration refuses the layout, or why the layout does not fit the GPU; otherwise "".
    is_mixture: see `RankReport`.
    """

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
    """Yield layouts, each as a text and as values of the configuration. All sizes are powers of 2.

    The configuration may refuse some of them. Tensor parallelism stays inside of a node, and comes with sequence
    parallelism. Pipelines have even stages. Pipeline and context parallelism have up to 16 ranks each. Expert
    parallelism divides the `experts` of a layer, but no single expert.
    """

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
        layout = ParallelLayout(tp=tp, pp=pp, cp=cp, sp=tp > 1, ep=ep, etp=1 if ep > 1 else 0)
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
    """Return the number of routed experts in a layer of the configured model; 1 if the model has no experts.

    Raises:
        UserError: the model directory has no model, or a model of an unsupported family.
    """
    from mcore_rl.models.megatron.families import family_of
    from mcore_rl.models.megatron.families.mixtures import Mixture
    from mcore_rl.models.megatron.model.hf_config import hf_config_of

    family = family_of(hf_config_of(config.model))
    return family.experts.count if isinstance(family, Mixture) else 1


def search(
    config: TrainingConfig,
    world_size: int,
    sequences: Sequences,
    gpu: Hardware,
    workers: int,
    say: Callable[[str], None],
    assumed: Assumptions = BALANCED_LOCAL,
) -> list[Candidate]:
    """Simulate all `layouts_to_try`; return those that fit, fastest first, followed by the rest, each with a reason.

    Args:
        workers: number of simulations that run at the same time.
        say: prints a line of progress.
    """
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
            calls = assumed.calls(layout, world_size, ranks, sequences)
            jobs = [pool.submit(_apart, simulate_rank, *arguments) for arguments in calls]
            waiting.append((Candidate(text, overrides), layout, jobs))
        for done, (candidate, layout, jobs) in enumerate(waiting, start=1):
            implementation = assumed.implementation.with_fp8(config.model.fp8)
            candidate = _simulated(candidate, layout, jobs, world_size, gpu, implementation)
            came_out = candidate.reason or f"{candidate.seconds:.3g} s"
            say(f"{done} of {len(waiting)} layouts: {candidate.text}: {came_out}")
            found.append(candidate)
    return sorted(found, key=lambda candidate: (candidate.seconds, candidate.peak))


def overrides_of(config: TrainingConfig, values: dict[str, Any]) -> tuple[str, ...]:
    """Return the command-line overrides that change the values of `config` to `values`."""
    own = flattened(config.model_dump(mode="json"))
    wanted = flattened(json.loads(json.dumps(values, default=str)))
    return tuple(f"{key}={json.dumps(wanted[key])}" for key in own if key in wanted and own[key] != wanted[key])


def _simulated(
    candidate: Candidate,
    config: TrainingConfig,
    jobs: Sequence[Future[RankReport]],
    world_size: int,
    gpu: Hardware,
    implementation: Implementation,
) -> Candidate:
    try:
        reports = [implementation.of(job.result()) for job in jobs]
    except (UserError, ContractError) as error:
        return replace(candidate, reason=str(error))
    peak, dtype = max(report.peak for report in reports), config.model.dtype
    candidate = replace(candidate, peak=peak, is_mixture=reports[0].is_mixture)
    if peak > gpu.memory_bytes:
        return replace(candidate, reason=f"needs {peak / 1e9:.0f} GB")
    seconds = gpu.step_seconds(reports, dtype, config.parallel.pipeline_model_parallel_size, 1)
    utilization = gpu.utilization(reports[0].model_flops, seconds, world_size, dtype)
    return replace(candidate, seconds=seconds, utilization=utilization)


GENERATION = "not simulated: generation, and environments other than a reward model"
BALANCED = "assumed: every expert gets as many tokens as any other, from ranks with packs of one size"
IMBALANCED = "assumed: experts of the simulated ranks get {:g} times as many tokens as the mean, or all if that is less"

LAYOUTS = "all with sequence parallelism if tp > 1, undivided experts if ep > 1, even stages, and no virtual stages"


def shown(number: float) -> str:
    """Format a number with three digits and a prefix such as G for 10⁹: `1.23 G`."""
    for letter, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            value = number / size
            return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f} {letter}"
    return f"{number:.0f} "


def describe(
    config: TrainingConfig,
    world_size: int,
    reports: Sequence[RankReport],
    gpu: Hardware,
    assumed: Assumptions = BALANCED_LOCAL,
) -> Iterator[str]:
    """Yield lines about a simulated step: the reports of ranks, and the estimated times on `gpu`."""
    for report in reports:
        yield from _rank(report, gpu)
    if reports[0].is_mixture:
        yield _routing(assumed)
    reports = [report for report in reports if report.work[0]]
    if not reports:
        yield "no estimate: the replicas of these ranks have no rows of the batch; choose other --ranks"
        return
    dtype, parallel = config.model.dtype, config.parallel
    stages, chunks = parallel.pipeline_model_parallel_size, parallel.chunks_per_stage
    seconds = gpu.step_seconds(reports, dtype, stages, chunks)
    flops = reports[0].model_flops
    yield (
        f"estimate: {seconds:.3g} s a step, MFU {gpu.utilization(flops, seconds, world_size, dtype):.1%}, "
        f"communication {max(map(gpu.communication_seconds, reports)):.3g} s, "
        f"of which {max(gpu.exposed_seconds(report, dtype, chunks) for report in reports):.3g} s exposed"
        + f", launches {max(gpu.launch_seconds_of(report, *PHASES) for report in reports):.3g} s"
        + (f", host {max(map(gpu.host_seconds, reports)):.3g} s" if reports[0].host_bytes else "")
        + (f", pipeline bubble {(stages - 1) / (reports[0].packs * chunks):.0%}" if stages > 1 else "")
    )


def _routing(assumed: Assumptions) -> str:
    return BALANCED if assumed.imbalance == 1 else IMBALANCED.format(assumed.imbalance)


def _rank(report: RankReport, gpu: Hardware) -> Iterator[str]:
    real, padded = report.tokens
    yield f"rank {report.rank} (pipeline stage {report.stage}): {report.parameters:,} parameters"
    if report.packs:
        yield f"  packs: {report.packs}, of {padded // report.packs:,} tokens, {real / padded:.1%} filled"
        own, most = report.work
        yield f"  balance: this replica has {own:.1%} of the mean work, the replica with the most work {most:.1%}"
    fits = "fits" if report.peak <= gpu.memory_bytes else "DOES NOT FIT"
    whole = gpu.memory_bytes / 1e9
    yield f"  memory: {shown(report.peak)}B at the peak, in {report.peak_phase}; {fits} {whole:.0f} GB"
    for kind, size in report.memory.items():
        yield f"    {kind:<24}{shown(size):>10}B"
    for phase in PHASES:
        products, attention = report.products.get(phase, 0), report.attention.get(phase, 0)
        moved = sum(size for (at, _), size in report.kernel_bytes.items() if at == phase)
        if products or attention or moved:
            yield (
                f"  {phase}: {shown(products)}FLOP in matrix products, {shown(attention)}FLOP in attention, "
                f"{shown(moved)}B of memory in other kernels, {report.launches.get(phase, 0):,} launches"
            )
            for part, operations in Counter(
                {of: n for (at, of), n in report.parts.items() if at == phase}
            ).most_common():
                yield f"    {part:<24}{shown(operations):>10}FLOP"
    for (operation, size, crosses), amount in _traffic_rows(report, gpu):
        where = ", across nodes" if crosses else ""
        yield f"    {operation:<16}over {size:>4} ranks{where:<14}{shown(amount):>12}B"
    waits = Counter[str]()
    for (phase, _), times in report.host_reads.items():
        waits[phase] += times
    text = ", ".join(f"{times} in {phase}" for phase, times in waits.items()) or "never"
    yield f"  the host waits for the device: {text}"


def describe_loading(reports: Sequence[LoadingReport], writers: int) -> Iterator[str]:
    """Yield the lines that describe the simulated loading of a checkpoint."""
    yield f"loading a checkpoint that {writers:,} ranks wrote"
    for report in reports:
        yield (
            f"  rank {report.rank} (pipeline stage {report.stage}): {shown(report.read)}B are read for "
            f"{shown(report.state)}B of weights and optimizer state, "
            f"{shown(report.beyond)}B of further memory ({report.beyond / report.state:.2%})"
        )


def _traffic_rows(report: RankReport, gpu: Hardware) -> list[tuple[tuple[str, int, bool], int]]:
    """Return ((operation, number of ranks, whether nodes are crossed), bytes) of the transfers, most bytes first.

    An all-to-all can have two entries, because some of its bytes cross nodes and others do not.
    """
    rows = Counter[tuple[str, int, bool]]()
    for transfer, size in report.traffic.items():
        parts: tuple[float, float] = (0, size) if gpu.crosses_nodes(transfer) else (size, 0)
        if transfer.operation == "all_to_all":
            parts = gpu.within_and_across(transfer, size)
        for crosses, part in enumerate(parts):
            if part:
                rows[transfer.operation, len(transfer.ranks), bool(crosses)] += round(part)
    return rows.most_common()


def table(found: Sequence[Candidate], assumed: Assumptions = BALANCED_LOCAL) -> Iterator[str]:
    """Yield the lines of a table of the layouts `found`: those that fit, and below them the rest with their reasons."""
    yield f"{'layout':<32}{'peak GB':>9}{'s a step':>10}{'MFU':>8}"
    for one in found:
        if one.reason:
            yield f"{one.text:<32}{f'{one.peak / 1e9:.3g}' if one.peak else '':>9}  {one.reason}"
        else:
            yield f"{one.text:<32}{one.peak / 1e9:>9.3g}{one.seconds:>10.3g}{one.utilization:>8.1%}"
    yield LAYOUTS
    if found and not found[0].reason:
        yield f"for the first: {' '.join(found[0].overrides) or 'the configuration as it is'}"
    if any(one.is_mixture for one in found):
        yield _routing(assumed)

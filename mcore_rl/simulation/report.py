"""Print the cost of a simulated step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from mcore_rl.config import TrainingConfig
from mcore_rl.simulation.hardware import Hardware
from mcore_rl.simulation.loading import LoadingReport
from mcore_rl.simulation.run import Candidate
from mcore_rl.simulation.step import RankReport

GENERATION = "not simulated: generation, and environments other than a reward model"
BALANCED = "assumed: every expert gets as many tokens as any other, from ranks with packs of one size"

LAYOUTS = "each with sequence parallelism where tp > 1, experts whole where ep > 1, even stages, no virtual ones"


def shown(number: float) -> str:
    """Format a number with three digits and the first letter of its unit: `1.23 G`."""
    for letter, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            value = number / size
            return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f} {letter}"
    return f"{number:.0f} "


def describe(config: TrainingConfig, world_size: int, reports: Sequence[RankReport], gpu: Hardware) -> Iterator[str]:
    """The lines of a report."""
    for report in reports:
        yield from _rank(report, gpu)
    if reports[0].is_mixture:
        yield BALANCED
    reports = [report for report in reports if report.work[0]]
    if not reports:
        yield "no estimate: these ranks' replicas have no rows of the batch; --ranks names others"
        return
    dtype, parallel = config.model.dtype, config.parallel
    stages, chunks = parallel.pipeline_model_parallel_size, parallel.chunks_per_stage
    seconds = gpu.step_seconds(reports, dtype, stages, chunks)
    flops = reports[0].model_flops
    yield (
        f"estimate: {seconds:.3g} s a step, MFU {gpu.utilization(flops, seconds, world_size, dtype):.1%}, "
        f"communication {max(map(gpu.communication_seconds, reports)):.3g} s, "
        f"of which {max(gpu.exposed_seconds(report, dtype) for report in reports):.3g} s exposed"
        + (f", host {max(map(gpu.host_seconds, reports)):.3g} s" if reports[0].host_bytes else "")
        + (f", pipeline bubble {(stages - 1) / (reports[0].packs * chunks):.0%}" if stages > 1 else "")
    )


def _rank(report: RankReport, gpu: Hardware) -> Iterator[str]:
    real, padded = report.tokens
    yield f"rank {report.rank} (pipeline stage {report.stage}): {report.parameters:,} parameters"
    if report.packs:
        yield f"  packs: {report.packs}, of {padded // report.packs:,} tokens, {real / padded:.1%} filled"
        own, most = report.work
        yield f"  balance: this replica has {own:.1%} of the mean work, the one with most {most:.1%}"
    fits = "fits" if report.peak <= gpu.memory_bytes else "DOES NOT FIT"
    whole = gpu.memory_bytes / 1e9
    yield f"  memory: {shown(report.peak)}B at the peak, in {report.peak_phase}; {fits} {whole:.0f} GB"
    for kind, size in report.memory.items():
        yield f"    {kind:<24}{shown(size):>10}B"
    for phase in report.products | report.attention:
        products, attention = report.products.get(phase, 0), report.attention.get(phase, 0)
        if products or attention:
            yield f"  {phase}: {shown(products)}FLOP in matrix products, {shown(attention)}FLOP in attention"
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
    """The lines on a checkpoint's loading."""
    yield f"loading a checkpoint that {writers:,} ranks wrote"
    for report in reports:
        yield (
            f"  rank {report.rank} (pipeline stage {report.stage}): {shown(report.read)}B are read for "
            f"{shown(report.state)}B of weights and optimizer state, "
            f"{shown(report.beyond)}B of memory beside it ({report.beyond / report.state:.2%})"
        )


def _traffic_rows(report: RankReport, gpu: Hardware) -> list[tuple[tuple[str, int, bool], int]]:
    rows = Counter[tuple[str, int, bool]]()
    for transfer, size in report.traffic.items():
        rows[transfer.operation, len(transfer.ranks), gpu.crosses_nodes(transfer)] += size
    return rows.most_common()


def table(found: Sequence[Candidate]) -> Iterator[str]:
    """Layouts: those that fit, the fastest first, then the others with the reason."""
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
        yield BALANCED

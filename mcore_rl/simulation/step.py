"""The simulation of one rank's step, and of the loading of a checkpoint on one rank."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_rl import platform
from mcore_rl.config import PPOConfig, TrainingConfig
from mcore_rl.config.fp8 import FP8Config
from mcore_rl.distributed.batched_data_dict import BatchShare, LocalBatch
from mcore_rl.distributed.packs import PackLayout
from mcore_rl.distributed.topology import ParallelDimension
from mcore_rl.simulation.counters import (
    ACTIVATIONS,
    COMMUNICATION,
    LM_HEAD,
    LOGITS,
    OTHER,
    STATE,
    AttentionFlops,
    HostReads,
    Kernels,
    LiveBytes,
    Parts,
    Product,
    ProductCounter,
    Traffic,
    Transfer,
    bytes_of,
    part_of,
    replaced,
)
from mcore_rl.simulation.rank import (
    CRITIC_TRAINING,
    CRITIC_UPDATE,
    PHASES,
    SCORING,
    TRAINING,
    UPDATE,
    Models,
    run_step,
    simulated_process,
    updates_of,
)
from mcore_rl.simulation.sequences import Sequences, invented_batch
from mcore_rl.utils import torchrun

if TYPE_CHECKING:
    from mcore_rl.distributed.batched_data_dict import BatchedDataDict
    from mcore_rl.models.megatron.checkpoint.state import Region
    from mcore_rl.models.megatron.model.gpt_model import ModelShard
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy


BUILDING = "building"
RESULTS = "results"
"""Phase in which ranks exchange metrics of the loss. These few bytes are not simulated."""


class Watch:
    """Counts memory, operations, transfers and host reads of a step, by phase.

    layouts: the `PackLayout` of each microbatch in the last pass through a model.
    swapped: bytes of weights that were transferred from or to the host.

    Args:
        devices: device types whose memory is counted.
    """

    def __init__(self, traffic: Traffic, reads: HostReads, attention: AttentionFlops, devices: Sequence[str]) -> None:
        self.traffic, self.reads, self.attention, self.parts = traffic, reads, attention, Parts()
        self.live = traffic.memory = LiveBytes(*devices, kind_now=self._kind_now)
        self.products = ProductCounter(self._now, self.live.is_state)
        self.kernels = Kernels(*devices, now=self._now, is_state=self.live.is_state)
        self.attention_by_phase = Counter[str]()
        self.layouts: list[PackLayout] = []
        self.swapped = 0
        self._made = 0  # bytes of optimizer state created so far
        self._made_before: dict[str, int] = {}

    def enter(self, phase: str) -> None:
        """Start a phase."""
        self._made_before.setdefault(phase, self._made)
        self.attention_by_phase[self.live.phase] += self.attention.total - sum(self.attention_by_phase.values())
        self.live.phase = self.traffic.phase = self.reads.phase = phase

    def missing_state(self) -> dict[str, int]:
        """Return, for each phase, the bytes of optimizer state that were created after the phase had started.

        The simulated step is a first step: its updates create the optimizer state. In later steps, the state exists
        from the start.
        """
        return {phase: self._made - before for phase, before in self._made_before.items()}

    @contextmanager
    def of_step(self) -> Iterator[None]:
        """Context in which memory, kernels and matrix products are counted. Build the models and run one step in it."""
        from mcore_rl.models.policy import megatron_policy, reference, scoring

        with (
            replaced(scoring, "run_microbatches", self._run(scoring.run_microbatches)),
            replaced(megatron_policy, "all_gather_results", self._collect(megatron_policy.all_gather_results)),
            replaced(megatron_policy, "clip_gradients", self._clip(megatron_policy.clip_gradients)),
            replaced(megatron_policy, "update_weights", self._update(megatron_policy.update_weights)),
            replaced(reference, "swap_tensors", self._swap(reference.swap_tensors)),
            self.parts.of_lm_head(),
            self._fused(),
            self.live,
            self.kernels,
            self.products,
        ):
            self.enter(BUILDING)
            yield

    def _now(self) -> tuple[str, str]:
        return self.live.phase, self.parts.now()

    @contextmanager
    def _fused(self) -> Iterator[None]:
        """Context in which a norm, gated activation, rotation or reduction of a tile of logits counts as one kernel.

        On a GPU, Triton kernels compute these functions.
        """
        from mcore_rl.distributed import logprobs
        from mcore_rl.models.megatron.layers import transformer_layer as layers

        fused, steps = self.kernels.fused, logprobs.TORCH_STEPS
        tiles = logprobs.TileSteps(fused(steps.add), fused(steps.gradient), add_overwrites=False)
        with ExitStack() as stack:
            for function in (layers._Normed, layers._Gated, layers._Rotated):
                for name in ("forward", "backward"):
                    stack.enter_context(replaced(function, name, staticmethod(fused(getattr(function, name)))))
            stack.enter_context(replaced(logprobs, "tile_steps", lambda *_: tiles))
            yield

    def _kind_now(self) -> str:
        if self.live.phase == BUILDING:
            return STATE
        return LOGITS if self.parts.now() == LM_HEAD else ACTIVATIONS

    def _run(self, run_microbatches: Any) -> Any:
        def run(model: Any, wrapped: Any, microbatches: Any, head: Any, train: bool) -> Any:
            self.layouts = [microbatch.layout for microbatch in microbatches]
            return run_microbatches(model, wrapped, microbatches, head, train)

        return run

    def _swap(self, swap_tensors: Any) -> Any:
        def swap(tensor: Any, kept: Any) -> None:
            self.swapped += 2 * tensor.nbytes
            swap_tensors(tensor, kept)

        return swap

    def _collect(self, all_gather_results: Any) -> Any:
        def collect(*arguments: Any) -> Any:
            self.traffic.phase = RESULTS
            try:
                return all_gather_results(*arguments)
            finally:
                self.traffic.phase = self.live.phase

        return collect

    def _clip(self, clip_gradients: Any) -> Any:
        def clip(*arguments: Any) -> Any:
            self.enter(CRITIC_UPDATE if self.live.phase == CRITIC_TRAINING else UPDATE)
            return clip_gradients(*arguments)

        return clip

    def _update(self, update_weights: Any) -> Any:
        from mcore_rl.models.megatron.training.optimizer import optimizer_tensors

        # Live memory does not show this: a thread of gloo frees its copies of gradients some time after the reduction.
        def update(optimizer: Any) -> Any:
            before = bytes_of(optimizer_tensors(optimizer, ()))
            self.kernels.fused(update_weights)(optimizer)
            made = bytes_of(optimizer_tensors(optimizer, ())) - before
            self._made += made
            self.kernels.bytes[self._now()] += 2 * made  # a later step reads and writes it

        return update


@dataclass(frozen=True)
class RankReport:
    """Results of the simulation of a step on one rank.

    parameters: number of parameters on this rank.
    memory: bytes by kind at the step's peak of memory. The peak is in the phase `peak_phase`. Weights, gradients and
        optimizer state stay from step to step. Logits include all tensors computed from hidden states and the LM head.
        Communication buffers receive values of other ranks. The rest is activations and workspace.
    attention: floating-point operations of attention, by phase.
    shapes: floating-point operations of matrix products, by their kind.
    kernel_bytes: bytes that all kernels except products read and write in memory, by phase and part of the model.
    copied_weights: the part of `kernel_bytes` that is read and written to copy weights.
    gradient_elements: number of elements that are read and written to add gradients to their sums, by phase.
    operands: number of elements in those factors of matrix products that are not weights, by phase and part.
    launches: number of kernels that the host launches, by phase.
    linear_weights: number of weights in linear layers, without routers and LM heads.
    part_in_fp8: fraction of this rank's layers that FP8 would compute (`model.fp8.first_layers`, `last_layers`).
    traffic, calls: number of bytes and of calls of every kind of transfer.
    overlapped: names of those collectives on weights and gradients that overlap with computation.
    host_bytes: bytes that move between host and device in both directions: optimizer states, a critic, a reference.
    host_reads: number of times that the host waits for the device, by (phase, place in the code).
    updates: number of updates in a step.
    packs: number of microbatches in an update.
    tokens: number of tokens in the packs, without and with padding.
    work: work of this replica, and of the replica with the most work, as multiples of the mean over all replicas.
    model_flops: operations of a step's training on all ranks, without recomputation and scoring.
    seconds: duration of the simulation itself.
    is_mixture: whether a model of the run is a mixture of experts.
    """

    rank: int
    stage: int
    parameters: int
    memory: dict[str, int]
    peak_phase: str
    attention: dict[str, int]
    shapes: dict[Product, int]
    kernel_bytes: dict[tuple[str, str], int]
    copied_weights: dict[tuple[str, str], int]
    gradient_elements: dict[str, int]
    operands: dict[tuple[str, str], int]
    launches: dict[str, int]
    linear_weights: int
    traffic: dict[Transfer, int]
    calls: dict[Transfer, int]
    overlapped: frozenset[str]
    host_bytes: int
    host_reads: dict[tuple[str, str], int]
    updates: int
    packs: int
    tokens: tuple[int, int]
    work: tuple[float, float]
    model_flops: float
    seconds: float
    is_mixture: bool
    part_in_fp8: float = 1.0

    @property
    def parts(self) -> dict[tuple[str, str], int]:
        """Floating-point operations of matrix products, by phase and part of the model."""
        found = Counter[tuple[str, str]]()
        for product, operations in self.shapes.items():
            found[product.phase, product.part] += operations
        return dict(found)

    @property
    def products(self) -> dict[str, int]:
        """Floating-point operations of matrix products, by phase."""
        found = Counter[str]()
        for (phase, _), operations in self.parts.items():
            found[phase] += operations
        return dict(found)

    @property
    def peak(self) -> int:
        return sum(self.memory.values())


CASTS = {"tensorwise": (6.0, 2.0), "blockwise": (4 + 8 / 128, 2 + 8 / 128), "mxfp8": (4 + 2 / 32, 2 + 2 / 32)}
"""For each recipe of `model.fp8`: the bytes that the cast of one element moves, and the bytes of its two copies.

Products need a tensor in two forms: as it is, and transposed. A cast reads the tensor once (2 bytes) and writes both
forms. With one scale for the tensor, it first reads the tensor once more to find its largest value. Blocks have an fp32
scale for 128 elements, MXFP8 a scale of one byte for 32 elements.
"""
LINEAR = ("projections", "MLP", "experts")
"""Parts of the model whose products an FP8 run computes in FP8. Router and LM head keep the model's precision."""


@dataclass(frozen=True)
class Implementation:
    """Kernels and precisions of a run.

    The simulation runs the package's own layers. The method `of` converts its report to these kernels and precisions.

    transformer_engine: whether the layers come from Transformer Engine. Its products add gradients of weights directly
        to their sums, and always read the weights of experts without copying them.
    products: FP8 recipe of the products of linear layers (see `CASTS`), or "" for the model's precision. The FP8 copies
        of weights are made in each update and kept. Activations that are kept for the backward pass stay in the model's
        precision.
    gradients: precision of gradients in memory and between ranks: "bfloat16", or "" for that of the report. It serves
        to compare published runs; a run of this package has `parallel.grad_reduce_in_fp32`.
    moments: precision of the optimizer's moments: "bfloat16", or "" for float32.
    """

    transformer_engine: bool = False
    products: str = ""
    gradients: str = ""
    moments: str = ""

    def with_fp8(self, fp8: FP8Config | None) -> Implementation:
        """Return the implementation with the FP8 of a configuration, which has Transformer Engine's layers."""
        return self if fp8 is None else replace(self, transformer_engine=True, products=fp8.recipe)

    def of(self, report: RankReport) -> RankReport:
        """Return `report` converted to these kernels and precisions. It must describe the package's own layers."""
        if self.transformer_engine:
            report = _without_copies(report)
        if self.products:
            report = _with_casts(report, *CASTS[self.products])
        if self.gradients:
            report = _with_half_gradients(report)
        if self.moments:
            # AdamW keeps an fp32 copy of the weights and two moments; an update reads and writes each of them.
            saved = report.memory["optimizer"] // 3
            memory = {**report.memory, "optimizer": report.memory["optimizer"] - saved}
            moved = Counter(report.kernel_bytes)
            moved[UPDATE, OTHER] -= 2 * saved * report.updates
            report = replace(report, memory=memory, kernel_bytes=dict(moved))
        return report


LOCAL = Implementation()


def _without_copies(report: RankReport) -> RankReport:
    moved = Counter(report.kernel_bytes)
    moved.subtract(report.copied_weights)
    for phase, elements in report.gradient_elements.items():
        moved[phase, OTHER] -= elements  # of an addition's two elements: not the sum's bytes, but 2 of the product
    return replace(report, kernel_bytes=dict(moved))


def _with_casts(report: RankReport, moved_by_cast: float, copies: float) -> RankReport:
    shapes, moved, part_in_fp8 = Counter[Product](), Counter(report.kernel_bytes), report.part_in_fp8
    for kind, operations in report.shapes.items():
        in_fp8 = round(operations * part_in_fp8) if kind.part in LINEAR and kind.dtype == "bfloat16" else 0
        shapes.update({kind._replace(dtype="float8"): in_fp8, kind: operations - in_fp8})
    for (phase, part), elements in report.operands.items():
        if part in LINEAR:  # in training, a factor is cast once for two products
            moved[phase, part] += int(elements * part_in_fp8 * moved_by_cast / (1 if phase == SCORING else 2))
    weights = report.linear_weights * part_in_fp8
    moved[UPDATE, OTHER] += int(weights * moved_by_cast * report.updates)
    memory = {**report.memory, "weights": report.memory["weights"] + int(weights * copies)}
    return replace(report, shapes=dict(+shapes), kernel_bytes=dict(moved), memory=memory)


def _with_half_gradients(report: RankReport) -> RankReport:
    memory = {kind: size // 2 if kind == "gradients" else size for kind, size in report.memory.items()}
    reduces = ("reduce_scatter", "all_reduce")
    traffic = {
        kind: size // 2 if kind.of_state and kind.operation in reduces else size
        for kind, size in report.traffic.items()
    }
    moved = Counter(report.kernel_bytes)
    for phase, elements in report.gradient_elements.items():
        moved[phase, OTHER] -= 2 * elements
    return replace(report, memory=memory, traffic=traffic, kernel_bytes=dict(moved))


def simulate_rank(
    config: TrainingConfig,
    rank: int,
    world_size: int,
    sequences: Sequences,
    tiles_of: str = "cuda",
    imbalance: float = 1.0,
) -> RankReport:
    """Simulate a step of a rank in this process. The process cannot be used for anything else afterwards.

    Args:
        tiles_of: "cuda" or "cpu": simulate with the sizes of logit tiles that a run uses on this type of device. With
            "cpu", tensors on the host are counted too.
        imbalance: number of tokens that are routed to this rank's experts, divided by the mean of this number over the
            ranks of the expert-parallel group.

    Raises:
        UserError: the run would refuse the configuration, or it cannot be simulated.
    """
    with simulated_process(config, rank, world_size, tiles_of, imbalance) as seen:
        from mcore_rl.models.policy import megatron_policy

        # The results of all ranks; their division into microbatches does not matter here.
        result = megatron_policy.MicrobatchResult(1.0, len(sequences.lengths), float(len(sequences.lengths)), {})
        results = megatron_policy.MicrobatchResults((result,))
        devices = ("meta", "cpu") if tiles_of == "cpu" else ("meta",)
        with replaced(megatron_policy, "all_gather_results", lambda *_: results):
            return measure_step(config, sequences, seen.traffic, seen.reads, seen.attention, devices)


def measure_step(
    config: TrainingConfig,
    sequences: Sequences,
    traffic: Traffic,
    reads: HostReads,
    attention: AttentionFlops,
    devices: Sequence[str],
) -> RankReport:
    """Build the models and run one step of this rank, real or simulated; return what was counted.

    Args:
        devices: device types whose memory is counted.
    """
    from mcore_rl.models.megatron.families.mixtures import Mixture

    started, watch = time.perf_counter(), Watch(traffic, reads, attention, devices)
    with watch.of_step():
        models = Models.build(config)
        watch.parts.of_modules(models.chunks)
        policy = models.policy
        batch = invented_batch(config, sequences)
        own = planned_rows(policy, batch) if platform.simulates() else policy.own_rows(batch)
        run_step(config, models, own, watch.enter)
        for model, traffic.phase in zip(models.trained, (UPDATE, CRITIC_UPDATE), strict=False):
            model.finish_param_gather()  # count the all-gather of the next forward pass here
    parameters = [p for chunk in models.chunks for p in chunk.parameters()]
    (on_host, host_bytes), updates = offloaded(config, models), updates_of(config)
    memory, peak_phase = memory_of(parameters, sum(map(optimizer_bytes, models.trained)), watch, on_host)
    units = policy.batching.unit_sizes(sequences.lengths, batch["input_ids"])
    work = policy.batching.relative_work(units)
    return RankReport(
        rank=torchrun.rank(),
        stage=policy.topology.pipeline.rank,
        parameters=sum(p.numel() for p in parameters),
        memory=memory,
        peak_phase=peak_phase,
        attention=dict(watch.attention_by_phase),
        shapes=dict(watch.products.counts),
        kernel_bytes=dict(watch.kernels.bytes),
        copied_weights=dict(watch.kernels.of_weights),
        gradient_elements=dict(watch.kernels.of_gradients),
        operands=dict(watch.products.operands),
        launches=dict(watch.kernels.launches),
        linear_weights=linear_weights(models.chunks),
        traffic=dict(traffic.bytes),
        calls=dict(traffic.calls),
        overlapped=overlapped(config, waits=config.max_answer_length is not None or policy.reference is not None),
        host_bytes=host_bytes + watch.swapped,
        host_reads=dict(reads.places),
        updates=updates,
        packs=len(watch.layouts),
        tokens=(sum(sum(one.lengths) for one in watch.layouts), sum(one.total for one in watch.layouts)),
        work=(work[policy.topology.data.rank], max(work)),
        model_flops=updates
        * sum(m.training_flops(sequences.lengths) + m.tower_flops(sequences.images) for m in models.trained),
        seconds=time.perf_counter() - started,
        is_mixture=any(isinstance(model.model.family, Mixture) for model in models.all),
        part_in_fp8=part_in_fp8(policy.model),
    )


def part_in_fp8(model: ModelShard) -> float:
    """Return the fraction of this rank's layers that FP8 computes; 1 without `model.fp8`, or without layers."""
    layers = model.layer_numbers()
    if model.fp8 is None or not layers:
        return 1.0
    return sum(model.fp8.in_fp8(layer, model.family.num_layers) for layer in layers) / len(layers)


def linear_weights(chunks: Sequence[Any]) -> int:
    """Return the number of weights in the linear layers of attention, MLPs and experts."""
    named = [named for chunk in chunks for named in chunk.named_parameters()]
    return sum(p.numel() for name, p in named if p.ndim > 1 and part_of(name) in LINEAR)


def overlapped(config: TrainingConfig, waits: bool) -> frozenset[str]:
    """Return the names of those collectives on weights and gradients that overlap with computation.

    Args:
        waits: whether the policy generates or scores before training, and therefore waits for its weights.
    """
    operations = {
        "reduce_scatter": config.parallel.overlap_grad_reduce,
        "all_gather": config.parallel.overlap_param_gather and not waits,
    }
    return frozenset(name for name, goes_on in operations.items() if goes_on)


@dataclass(frozen=True)
class PlannedShare(BatchShare):
    """The `BatchShare` of a simulated replica, with the rows of all replicas.

    In a real run, replicas tell each other the number and width of their packs. A simulated replica plans the packs of
    the others itself.

    batch: the global batch.
    division: row numbers of each replica.
    """

    batch: BatchedDataDict[Any] = field(kw_only=True)
    division: Sequence[Sequence[int]] = field(kw_only=True)

    def most_packs(self, batching: Any, packs: int, width: int) -> tuple[int, int]:
        super().most_packs(batching, packs, width)  # counts the transfer of a real run
        alone = [BatchShare(rows, self.total, ParallelDimension()) for rows in self.division]
        plans = [batching.plan_of_replica(LocalBatch(self.batch.select_indices(one.indices), one)) for one in alone]
        return max(len(boxes) for boxes, *_ in plans), max(width for *_, width in plans)


def planned_rows(policy: MegatronPolicy, batch: BatchedDataDict[Any]) -> LocalBatch[Any]:
    """Return the rows of this simulated replica as `policy.own_rows` does, but with a `PlannedShare`."""
    division, replicas = policy.division_of(batch), policy.topology.data
    share = PlannedShare(division[replicas.rank], batch.size, replicas, batch=batch, division=division)
    return LocalBatch(batch.select_indices(share.indices), share)


def offloaded(config: TrainingConfig, models: Models) -> tuple[dict[str, Counter[str]], int]:
    """Return the offloaded bytes in each phase, by kind, and the bytes that move between host and device in a step.

    Moves in both directions are counted. All numbers are computed from sizes, not measured, because the storages of a
    simulation cannot be emptied.
    """
    on_host, moved = {phase: Counter[str]() for phase in PHASES}, 0
    phases = ((TRAINING, UPDATE), (CRITIC_TRAINING, CRITIC_UPDATE))
    for model, (training, update) in zip(models.trained, phases, strict=False):
        state = optimizer_bytes(model)
        weights, gradients = weights_and_gradients(list(model.parameters()))
        is_critics = model is not models.policy
        visits = 2 if isinstance(config, PPOConfig) and config.critic.offload and is_critics else 0  # values, update
        for phase in PHASES:
            if visits and phase not in (training, update):
                on_host[phase].update(weights=weights, gradients=gradients, optimizer=state)
            elif model.config.optimizer.offload and phase != update:
                on_host[phase].update(optimizer=state)
        if model.config.optimizer.offload:
            moved += 2 * updates_of(config) * state + 2 * visits * weights
        else:
            moved += 2 * visits * (weights + state)  # gradients come back as zeros
    return on_host, moved


def optimizer_bytes(model: MegatronPolicy) -> int:
    """Return the number of bytes that a model's optimizer keeps in addition to the weights."""
    from mcore_rl.models.megatron.training.optimizer import optimizer_tensors

    return bytes_of(optimizer_tensors(model.optimizer, model.parameters()))


def weights_and_gradients(parameters: Sequence[Any]) -> tuple[int, int]:
    """Return the number of bytes of the parameters' storages, and of their gradients' storages."""
    gradients = [p.main_grad for p in parameters if p.requires_grad and hasattr(p, "main_grad")]
    return bytes_of(parameters), bytes_of(gradients)


def memory_of(
    parameters: Sequence[Any], optimizer: int, watch: Watch, on_host: Mapping[str, Mapping[str, int]]
) -> tuple[dict[str, int], str]:
    """Return the bytes by kind at a step's peak of memory, and the phase of the peak.

    The result is for a step other than the first, so that the optimizer's state exists from the start.

    Args:
        optimizer: bytes of the optimizers' state.
        on_host: offloaded bytes in each phase, by kind (see `offloaded`).
    """
    weights, gradients = weights_and_gradients(parameters)
    live, missing = watch.live, watch.missing_state()
    made_later = {**missing, CRITIC_UPDATE: missing.get(TRAINING, 0), UPDATE: 0}  # an update's peak includes the state
    away = {phase: sum(on_host[phase].values()) for phase in PHASES}
    peaks = {phase: live.peaks[phase] + made_later[phase] - away[phase] for phase in PHASES if phase in live.peaks}
    phase = max(peaks, key=lambda phase: peaks[phase])
    of_kind = {kind: live.at_peak[phase][kind] for kind in (LOGITS, COMMUNICATION)}
    state = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
    state = {kind: size - on_host[phase].get(kind, 0) for kind, size in state.items()}
    rest = peaks[phase] - sum(state.values()) - sum(of_kind.values())
    return {**state, ACTIVATIONS: rest, **of_kind}, phase


LOADING = "loading"


@dataclass(frozen=True)
class LoadingReport:
    """Bytes that a rank reads and keeps when it loads a checkpoint.

    state: weights and optimizer state on this rank, including a critic's, and the reference if reference_sync updates
        it.
    read: bytes that are read from files.
    beyond: additional memory during loading: peak on device and host, minus the memory after loading.
    """

    rank: int
    stage: int
    state: int
    read: int
    beyond: int


def simulate_loading(config: TrainingConfig, rank: int, world_size: int, writers: int) -> LoadingReport:
    """Simulate the loading of a checkpoint in this process. The process cannot be used for anything else afterwards.

    Args:
        writers: number of ranks that wrote the checkpoint. Each of them has written an equal part of every tensor,
            divided along the first dimension.

    Raises:
        UserError: the run would refuse the configuration, or it cannot be simulated.
    """
    with simulated_process(config, rank, world_size):
        from mcore_rl.models.megatron.checkpoint.load import BLOCK_BYTES

        live = LiveBytes("meta", "cpu")
        with live:
            models = Models.build(config)
            live.phase = LOADING
            regions = list(_regions(config, models))
            read = _read(regions, writers)
        state = sum(region.values.nbytes for region in regions)
        beyond = live.peaks[LOADING] - live.live + BLOCK_BYTES  # buffer of the reader
        return LoadingReport(rank, models.policy.topology.pipeline.rank, state, read, beyond)


def _regions(config: TrainingConfig, models: Models) -> Iterator[Region]:
    """Yield what this rank loads from a checkpoint: its parts (regions) of all tensors that the checkpoint contains.

    These are the tensors of all trained models, and of the reference if it changes (reference_sync).
    """
    from mcore_rl.models.megatron.checkpoint.state import tensor_regions

    for number, model in enumerate(models.trained):
        part = model.checkpoint.part("" if number == 0 else f"beside_{number}")
        weights = part.weights()
        yield from part.regions(weights, with_optimizer=True)
        if number == 0 and config.reference_sync_of is not None:
            for region in tensor_regions(weights):
                yield replace(region, key=f"reference.{region.key}")


def _read(regions: list[Region], writers: int) -> int:
    """Run the loading code without files; return the number of bytes that it reads."""
    import torch

    from mcore_rl.models.megatron.checkpoint.load import RegionReader, copy_piece

    total = 0
    reader = RegionReader(Path("simulated"), _index(regions, writers))
    with torch.no_grad():
        for region in regions:
            for piece in reader.pieces(region):

                def read(first: int, count: int, dtype: torch.dtype = piece.dtype) -> torch.Tensor:
                    nonlocal total
                    total += count * dtype.itemsize
                    return torch.empty(count, dtype=dtype, device="cpu")

                copy_piece(read, piece)
    return total


def _index(regions: list[Region], writers: int) -> Any:
    """Return the index (torch's `Metadata`) of an invented checkpoint, written by `writers` ranks.

    The checkpoint contains every tensor of which `regions` has a slice.
    """
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    for region in regions:
        if region.key in entries:
            continue
        whole = region.whole or tuple(region.values.shape)
        rows = -(-whole[0] // writers)
        chunks = [
            ChunkStorageMetadata(
                torch.Size((first, *(0 for _ in whole[1:]))), torch.Size((min(rows, whole[0] - first), *whole[1:]))
            )
            for first in range(0, whole[0], rows)
        ]
        properties = TensorProperties(dtype=region.values.dtype)
        entries[region.key] = TensorStorageMetadata(properties, torch.Size(whole), chunks)
        for writer, chunk in enumerate(chunks):
            places[MetadataIndex(region.key, chunk.offsets)] = _StorageInfo(f"__{writer}_0.distcp", 0, 0)
    return Metadata(entries, storage_data=places)

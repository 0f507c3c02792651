"""The process that simulates a rank.

Its models are built on a device whose tensors have no values. Functions that need values are replaced.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mcore_rl import platform
from mcore_rl.config import DistillationConfig, DPOConfig, KTOConfig, PPOConfig, RLConfig, TrainingConfig
from mcore_rl.config.algorithms import CRITIC, JUDGE, REFERENCE, STUDENT, TEACHER, own_layouts, second_model_configs
from mcore_rl.data.choices import CHOICES
from mcore_rl.data.images import PlacedImage
from mcore_rl.errors import UserError
from mcore_rl.simulation.counters import AttentionFlops, HostReads, Traffic, count_traffic, note_host_reads, replaced
from mcore_rl.utils.console import quiet_libraries

if TYPE_CHECKING:
    from mcore_rl.models.megatron.kernels.packed_attention import AttentionPattern, Kernel
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy
    from mcore_rl.models.policy.scoring import ScoringModel


SCORING, TRAINING, UPDATE = "scoring", "training", "update"
CRITIC_TRAINING, CRITIC_UPDATE = "critic", "critic's update"
PHASES = (SCORING, CRITIC_TRAINING, CRITIC_UPDATE, TRAINING, UPDATE)
"""Phases of a step, in their order."""


def simulated_second_models(config: TrainingConfig) -> dict[str, TrainingConfig]:
    """Return the configurations of all simulated models except the policy, by key, in the order of building."""
    found = second_model_configs(config)
    if _is_computed_before(config):
        found.pop(REFERENCE, None)
    return found


def _is_computed_before(config: TrainingConfig) -> bool:
    """Return whether a run of one epoch computes the reference's log-probabilities before training."""
    return isinstance(config, DPOConfig) and config.precomputes(epochs=1)


@dataclass(frozen=True)
class Models:
    """The models of a run.

    beside: all models except the policy, by the configuration key that names the model.
    """

    policy: MegatronPolicy
    beside: Mapping[str, ScoringModel]

    @classmethod
    def build(cls, config: TrainingConfig) -> Models:
        """Build all models of the configuration. Vision towers get invented pixels."""
        from mcore_rl.models.policy.megatron_policy import MegatronPolicy
        from mcore_rl.models.policy.scoring import ScoringModel, TeacherModel

        keeps = config.keeps_reference and not _is_computed_before(config)
        policy = MegatronPolicy(config, 2, rows_per_unit=config.rows_per_unit, keep_reference=keeps)
        beside = dict[str, ScoringModel]()
        for key, other in simulated_second_models(config).items():
            if key == CRITIC:
                beside[key] = MegatronPolicy(other, 2)
            elif key.startswith(TEACHER):
                beside[key] = TeacherModel(other, policy.model.vocab_size)
            else:
                beside[key] = ScoringModel(other, rows_per_unit=other.rows_per_unit)
        for tower, family in ((one.model.tower, one.model.family) for one in (policy, *beside.values())):
            if tower is not None:
                tower.source = InventedPixels(family.vision_config)
        return cls(policy, beside)

    @property
    def all(self) -> list[ScoringModel]:
        return [self.policy, *self.beside.values()]

    @property
    def chunks(self) -> list[Any]:
        """The model chunks on this rank's pipeline stage, of all models."""
        return [chunk for model in self.all for chunk in model.model.chunks]

    @property
    def trained(self) -> list[MegatronPolicy]:
        critic: Any = self.beside.get(CRITIC)
        return [self.policy] if critic is None else [self.policy, critic]


def run_step(config: TrainingConfig, models: Models, data: Any, enter: Callable[[str], None]) -> None:
    """Run what the algorithm computes in a step: scoring, and all updates of each trained model.

    Args:
        enter: function that is called with the name of each phase at its start.
    """
    from mcore_rl.algorithms.build_loss import build_loss
    from mcore_rl.losses.policy_gradient import ValueLossFn, build_policy_loss

    for score in scorings(config, models, data):
        enter(SCORING)
        score()
    critic: Any = models.beside.get(CRITIC)
    if critic is not None and isinstance(config, PPOConfig):
        enter(CRITIC_TRAINING)
        critic.get_values(data)
        for _ in range(updates_of(config)):
            enter(CRITIC_TRAINING)
            critic.train_batch(data, ValueLossFn(config.critic.value_clip))
    teacher: Any = models.beside.get(TEACHER)
    loss_fn = (
        build_policy_loss(config.effective_loss_options())
        if isinstance(config, RLConfig)
        else build_loss(config, teacher)
    )
    for _ in range(updates_of(config)):
        enter(TRAINING)
        models.policy.train_batch(data, loss_fn, temperature=temperature_of(config))
    enter("")


def temperature_of(config: TrainingConfig) -> float:
    """Return the temperature by which the run divides the policy's logits."""
    if isinstance(config, DistillationConfig) and config.distillation.form == "sampled":
        return config.distillation.temperature
    return config.rollouts.temperature if isinstance(config, RLConfig) else 1.0


def updates_of(config: TrainingConfig) -> int:
    """Return the number of updates in a step; all of them train on the same batch."""
    return config.rollouts.num_updates_per_rollout if isinstance(config, RLConfig) else 1


def scorings(config: TrainingConfig, models: Models, data: Any) -> list[Callable[[], Any]]:
    """Return functions, one for each forward pass that a step runs before training.

    These are passes of the reference, the policy, a judge, and teachers. The judge's conversations are assumed to be as
    long as the policy's.
    """
    policy, beside, temperature = models.policy, models.beside, temperature_of(config)
    options: Any = {"temperature": temperature, "counted_only": isinstance(config, RLConfig)}

    def by_policy() -> Any:
        return policy.get_logprobs(data, **options)

    def by_reference() -> Any:
        return policy.get_reference_policy_logprobs(data, **options)

    reference = [] if policy.reference is None else [by_reference]
    if isinstance(config, DPOConfig):
        other = beside.get(REFERENCE)
        by_other = reference if other is None else [lambda: other.get_logprobs(data)]
        return [*by_other, *([by_policy] if config.dpo.needs_batch else [])]
    if isinstance(config, KTOConfig) and config.kto.needs_reference_point:
        return [by_reference, by_reference, by_policy]  # the last two passes are on other records' responses
    if isinstance(config, DistillationConfig) and config.distillation.topk is not None:
        k, is_sampled = config.distillation.topk, config.distillation.form == "sampled"
        teachers = [model for key, model in beside.items() if key.startswith(TEACHER)]
        teachers += [policy] * (STUDENT in config.distillation.teachers.values())
        by = [partial(m.get_logprobs, data) if is_sampled else partial(m.get_topk_logits, data, k) for m in teachers]
        return list[Callable[[], Any]](by)
    if isinstance(config, RLConfig):
        judge = beside.get(JUDGE)
        judged = [] if judge is None else [lambda: judge.get_rewards(data)]
        before = [by_policy] if config.scores_samples() else []
        if config.rollouts.reads_score_norms:
            before = [lambda: policy.get_score_norms(data, temperature)]
        return [*judged, *before, *reference]
    return reference


class ShapesOnly:
    """Replacement of `SafetensorsDirectory`. It knows only the shapes of the tensors, so no files are needed."""

    def __init__(self, path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
        self.path, self._shapes = path, shapes

    def names(self) -> set[str]:
        return set(self._shapes)

    def shape(self, name: str) -> list[int]:
        return list(self._shapes[name])

    def check(self, name: str) -> None:
        pass

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32

    def read(self, name: str, rows: slice = slice(None), columns: slice | None = None) -> Tensor:
        whole = torch.empty(self._shapes[name], device="meta")
        return whole[rows] if columns is None else whole[rows, columns]


def flash_attention(flops: AttentionFlops) -> Any:
    """Return an autograd function that computes nothing, but allocates and saves the tensors of a flash kernel.

    Its arguments are query, key, value, and the number of operations of the forward pass.

    Args:
        flops: counter that receives the operations of a flash kernel.
    """

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, count: int) -> Tensor:
            out = query.new_empty((*query.shape[:-1], value.shape[-1]))
            logsumexp = query.new_empty(query.shape[:-1], dtype=torch.float32)
            ctx.save_for_backward(query, key, value, out, logsumexp)
            ctx.count = count
            flops.total += count
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
            query, key, value, _, _ = ctx.saved_tensors
            flops.total += ctx.count * 5 // 2  # five products, one of them recomputed
            return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None

    return Attention


def flash_stand_in(flops: AttentionFlops) -> Kernel:
    """Return an attention kernel that calls `flash_attention`.

    Args:
        flops: counter that receives the operations of a flash kernel.
    """
    from mcore_rl.models.megatron.kernels.packed_attention import Kernel

    attention = flash_attention(flops)

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        visible: AttentionPattern,
        scale: float | None,
        window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        width = math.prod(query.shape[1:])
        count = AttentionFlops.forward(visible.query_lengths, visible.key_lengths, window, width)
        result: Tensor = attention.apply(query, key, value, count)
        return result

    return Kernel(attend)


def tower_stand_in(flops: AttentionFlops) -> Callable[[Any, Tensor, Tensor], Any]:
    """Return a replacement of `vision.run_module`. Attention is that of `flash_attention`, as on a GPU.

    The positions of patches, which are computed on the host from the grids of the images, have no values.

    Args:
        flops: counter that receives the operations of attention.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention = flash_attention(flops)

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        heads, patches, width = query.shape[1:]
        return attention.apply(query, key, value, 4 * patches**2 * heads * width).transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register("simulated", attend)

    def run(module: Any, pixels: Tensor, grids: Tensor) -> Any:
        module.config._attn_implementation = "simulated"
        count = len(pixels)
        ends = grids.prod(-1).repeat_interleave(grids[:, 0]).cumsum(0)  # of images, which have one frame
        return module(
            pixels,
            grids,
            interp_indices=torch.empty(count, 4, dtype=torch.long, device=pixels.device),
            interp_weights=torch.empty(count, 4, device=pixels.device),
            position_ids=torch.empty(count, 2, dtype=torch.long, device=pixels.device),
            cu_seqlens=torch.nn.functional.pad(ends, (1, 0)),
        )

    return run


def keep_untouched(kept: Any, identity: Any, features: Tensor) -> None:
    """Replacement of `KeptFeatures.put`. It copies no values: memory that is never written takes no space."""
    kept.add(identity, torch.empty(features.shape, dtype=features.dtype, device="cpu"))


@dataclass(frozen=True)
class InventedPixels:
    """Source of pixels without values, for a tower with this configuration of transformers."""

    vision_config: Any

    def pixels(self, image: PlacedImage) -> Tensor:
        vision = self.vision_config
        values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return torch.zeros(image.count * vision.spatial_merge_size**2, values, device=platform.device())


def selected_stand_in(flops: AttentionFlops) -> Callable[..., Tensor]:
    """Return a replacement of `selected_attention` that computes nothing, but allocates and saves the same tensors.

    It counts the operations of a GPU: those of all earlier keys, or of the chosen keys if only these are read.
    """
    from mcore_rl.models.megatron.kernels.gathered_attention import pays

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            chosen: Tensor,
            sinks: Tensor | None,
            count: int,
            gathers: bool,
        ) -> Tensor:
            out = torch.empty_like(query, memory_format=torch.contiguous_format)
            results = (out, query.new_empty(query.shape[:2], dtype=torch.float32)) if gathers else ()
            ctx.save_for_backward(query, key, value, chosen, sinks, *results)
            ctx.count = count
            flops.total += count
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            query, key, value, _, sinks, *_ = ctx.saved_tensors
            flops.total += ctx.count * 7 // 2  # the two products of the forward pass, then five, one of them recomputed
            of_query, *sums = (
                torch.empty_like(query),
                *(x.new_empty(x.shape, dtype=torch.float32) for x in (key, value)),
            )
            of_sinks = None if sinks is None else torch.empty_like(sinks)
            return of_query, *(x.to(query.dtype) for x in sums), None, of_sinks, None, None

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        visible: AttentionPattern,
        chosen: Tensor,
        scale: float,
        sinks: Tensor | None,
        block_size: int,
    ) -> Tensor:
        width, keys = math.prod(query.shape[1:]), chosen.shape[-1] * block_size
        gathers = pays(visible, query.shape[1], key.shape[1], keys, block_size, torch.device("cuda"))
        if gathers:
            count = 4 * len(query) * keys * width
        else:
            count = AttentionFlops.forward(visible.query_lengths, visible.key_lengths, None, width)
        out: Tensor = Attention.apply(query, key, value, chosen, sinks, count, gathers)
        return out

    return attend


def compressed_stand_in(flops: AttentionFlops) -> Callable[..., Tensor]:
    """Return a replacement of `compressed_attention`, as `selected_stand_in`: it counts all products of each block."""
    from mcore_rl.models.megatron.kernels.selected_attention import blocks_of

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, query: Tensor, states: Tensor, chosen: Tensor | None, count: int, *weights: Tensor
        ) -> Tensor:
            ctx.save_for_backward(query, states, chosen, *weights)
            ctx.count = count
            flops.total += count
            return torch.empty_like(query, memory_format=torch.contiguous_format)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            query, states, _, *weights = ctx.saved_tensors
            flops.total += ctx.count * 7 // 2
            of_query = torch.empty_like(query)
            sums = [x.new_empty(x.shape, dtype=torch.float32) for x in (states, *weights)]
            return of_query, sums[0].to(states.dtype), None, None, *sums[1:]

    def attend(
        query: Tensor,
        states: Tensor,
        weights: Sequence[Tensor],
        visible: AttentionPattern,
        mixer: Any,
        chosen: Tensor | None,
    ) -> Tensor:
        pairs, rate = 0, None if mixer.compression is None else mixer.compression.rate
        for own, _, seen in blocks_of(visible, query.shape[1], 0, len(query), query.device):
            count = own.stop - own.start
            last = seen + count - 1
            pairs += count * (last - max(0, seen - mixer.window) + (last // rate if rate else 0))
        out: Tensor = Attention.apply(query, states, chosen, 4 * pairs * math.prod(query.shape[1:]), *weights)
        return out.flatten(1)

    return attend


def alike(reduced: Any) -> Any:
    """Return a replacement of `batched_data_dict.reduced` that assumes the same values on all replicas."""

    def of_all(values: Tensor, replicas: Any, op: Any = torch.distributed.ReduceOp.SUM) -> Tensor:
        reduced(values, replicas, op)  # counts the transfer and the host's wait
        return values * replicas.size if op == torch.distributed.ReduceOp.SUM else values

    return of_all


def rows_of_all(data: Any, *keys: str, lists: Sequence[str] = ()) -> Any:
    """Replacement of `LocalBatch.all_rows`. It assumes that all other replicas have the same rows as this replica."""
    return data.select_indices([row % data.size for row in range(data.share.total)])


def rows_from_others(held: Mapping[str, Tensor], numbers: Any, wanted: Any) -> dict[str, Tensor]:
    """Replacement of `fetch_rows` that returns zeros; the transfer between layouts is not counted."""
    return {name: values.new_zeros(len(wanted), *values.shape[1:]) for name, values in held.items()}


def untouched_copies(tensors: list[Tensor]) -> list[Tensor]:
    """Replacement of `reference.copies_on_host`. It copies no values: memory that is never written takes no space."""
    return [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]


def swap_stand_in(tensor: Tensor, kept: Tensor) -> None:
    """Replacement of `reference.swap_tensors`. It only allocates the device memory that the exchange needs."""
    tensor.clone()


@dataclass(frozen=True)
class Seen:
    """Counters of a simulated rank: transfers, host reads, operations of attention."""

    traffic: Traffic
    reads: HostReads
    attention: AttentionFlops


@cache
def prepare_process() -> Seen:
    """Install the simulated device and the counters in this process, and then import Megatron.

    The order matters: when Megatron is imported, it stores references to some of the replaced functions. Processes that
    are forked from this one need not repeat the imports.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the same results on machines with a GPU
    quiet_libraries()
    seen = Seen(count_traffic(), HostReads(), AttentionFlops())
    platform.initialize_platform(simulate=True)
    note_host_reads(seen.reads)
    import_module("mcore_rl.models.policy.megatron_policy")
    return seen


@contextmanager
def simulated_process(
    config: TrainingConfig, rank: int, world_size: int, tiles_of: str = "cuda", imbalance: float = 1.0
) -> Iterator[Seen]:
    """Context in which this process simulates a rank of a run. The process cannot be used for anything else afterwards.

    Args:
        tiles_of: "cuda" or "cpu": simulate with the sizes of logit tiles that a run uses on this type of device.
        imbalance: see `simulate_rank`.

    Raises:
        UserError: the run would refuse the configuration, or it cannot be simulated.
    """
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0")
    seen = prepare_process()

    import torch

    from mcore_rl.distributed import batched_data_dict, logprobs
    from mcore_rl.models.megatron.attention import attention
    from mcore_rl.models.megatron.attention import compressed as compressed_attention
    from mcore_rl.models.megatron.families import family_of
    from mcore_rl.models.megatron.kernels import packed_attention as attention_kernels
    from mcore_rl.models.megatron.kernels import selected_attention as selected
    from mcore_rl.models.megatron.layers import vision
    from mcore_rl.models.megatron.moe import layer as moe_layer
    from mcore_rl.models.megatron.weights import conversion as weights
    from mcore_rl.models.policy import reference, scoring
    from mcore_rl.run.setup import POLICY, check_models

    in_turn = {POLICY: config, **simulated_second_models(config)}  # in the order of building
    for one in in_turn.values():
        _check_model(one)
    hf_configs = check_models(config)
    shapes = iter([family_of(hf_configs[key]).shapes() for key in in_turn])
    if isinstance(config, DistillationConfig) and config.distillation.topk is None and own_layouts(config):
        raise UserError(
            "distillation.topk=null: cannot be simulated together with distillation.teacher_parallel; leave out "
            "one of the two"
        )
    logprobs.TILE_SHAPE["meta"] = logprobs.TILE_SHAPE[tiles_of]
    logprobs.CHUNK_BYTES["meta"] = logprobs.CHUNK_BYTES[tiles_of]
    selected.SCORES_OF_A_BLOCK["meta"] = selected.SCORES_OF_A_BLOCK[tiles_of]
    attention_kernels.KERNELS["meta"] = flash_stand_in(seen.attention)
    with (
        replaced(scoring, "SafetensorsDirectory", lambda path: ShapesOnly(path, next(shapes))),
        replaced(weights, "read_shard", lambda *_: torch.empty((), device="meta")),
        replaced(reference, "copies_on_host", untouched_copies),
        replaced(reference, "swap_tensors", swap_stand_in),
        replaced(batched_data_dict, "reduced", alike(batched_data_dict.reduced)),
        replaced(batched_data_dict.LocalBatch, "all_rows", rows_of_all),
        replaced(scoring, "fetch_rows", rows_from_others),
        replaced(moe_layer.BalancedDispatcher, "imbalance", imbalance),
        replaced(vision, "run_module", tower_stand_in(seen.attention)),
        replaced(vision.KeptFeatures, "put", keep_untouched),
        replaced(attention, "selected_attention", selected_stand_in(seen.attention)),
        replaced(compressed_attention, "compressed_attention", compressed_stand_in(seen.attention)),
    ):
        yield seen


def _check_model(config: TrainingConfig) -> None:
    for kind in CHOICES.values():
        if getattr(config.model, kind.option):
            raise UserError(
                f"model.{kind.option}: cannot be simulated, because the {kind.what} are chosen while sampling; leave "
                f"model.{kind.option} out"
            )
    if config.model.mtp_loss_scaling_factor:
        raise UserError(
            "model.mtp_loss_scaling_factor: layers that predict further tokens cannot be simulated; leave "
            "model.mtp_loss_scaling_factor out"
        )
    if config.model.moe_grouped_gemm in (True, "if_possible") and config.model.dtype != "bfloat16":
        raise UserError(
            f"model.moe_grouped_gemm: cannot be simulated in {config.model.dtype}, because torch derives the "
            "shapes of grouped products only for bfloat16; leave model.moe_grouped_gemm out"
        )

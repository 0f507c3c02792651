"""The simulated process of one rank: models on a device without values, and the answers to its collectives."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mcore_rl import platform
from mcore_rl.config import DistillationConfig, DPOConfig, KTOConfig, PPOConfig, RLConfig, TrainingConfig
from mcore_rl.config.algorithms import CRITIC, JUDGE, REFERENCE, TEACHER, second_model_configs
from mcore_rl.errors import UserError
from mcore_rl.simulation.counters import AttentionFlops, HostReads, Traffic, count_traffic, note_host_reads, replaced

if TYPE_CHECKING:
    from mcore_rl.models.megatron.attention import AttentionPattern, Kernel
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy
    from mcore_rl.models.policy.scoring import ScoringModel


SCORING, TRAINING, UPDATE = "scoring", "training", "update"
CRITIC_TRAINING, CRITIC_UPDATE = "critic", "critic's update"
PHASES = (SCORING, CRITIC_TRAINING, CRITIC_UPDATE, TRAINING, UPDATE)
"""Phases of a step, in their order."""


def simulated_second_models(config: TrainingConfig) -> dict[str, TrainingConfig]:
    """Return the configurations of the other models of training, by their keys, in the order of their making."""
    found = second_model_configs(config)
    if _is_computed_before(config):
        found.pop(REFERENCE, None)
    return found


def _is_computed_before(config: TrainingConfig) -> bool:
    """Whether the reference's log-probabilities are there when training begins, of a run over all its data."""
    return isinstance(config, DPOConfig) and config.precomputes(epochs=1)


@dataclass(frozen=True)
class Models:
    """The policy, and the models beside it by the keys that name them."""

    policy: MegatronPolicy
    beside: Mapping[str, ScoringModel]

    @classmethod
    def build(cls, config: TrainingConfig) -> Models:
        """All that the configuration asks for."""
        from mcore_rl.models.policy.megatron_policy import MegatronPolicy
        from mcore_rl.models.policy.scoring import ScoringModel, TeacherModel

        keeps = config.keeps_reference and not _is_computed_before(config)
        policy = MegatronPolicy(config, 2, rows_per_unit=config.rows_per_unit, keep_reference=keeps)
        beside = dict[str, ScoringModel]()
        for key, other in simulated_second_models(config).items():
            if key == CRITIC:
                beside[key] = MegatronPolicy(other, 2)
            elif key == TEACHER:
                beside[key] = TeacherModel(other, policy.hf_config.vocab_size)
            else:
                beside[key] = ScoringModel(other, rows_per_unit=other.rows_per_unit)
        return cls(policy, beside)

    @property
    def all(self) -> list[ScoringModel]:
        return [self.policy, *self.beside.values()]

    @property
    def chunks(self) -> list[Any]:
        """The chunks of this rank's pipeline stage, of all models."""
        return [chunk for model in self.all for chunk in model.model.chunks]

    @property
    def trained(self) -> list[MegatronPolicy]:
        critic: Any = self.beside.get(CRITIC)
        return [self.policy] if critic is None else [self.policy, critic]


def run_step(config: TrainingConfig, models: Models, data: Any, enter: Callable[[str], None]) -> None:
    """Run the operations of the algorithm's step, with all updates of each trained model.

    Args:
        enter: is told of each phase.
    """
    from mcore_rl.algorithms.build_loss import build_loss
    from mcore_rl.losses.policy_gradient import ClippedPGLossFn, ValueLossFn

    for score in scorings(config, models, data):
        enter(SCORING)
        score()
    critic: Any = models.beside.get(CRITIC)
    if critic is not None and isinstance(config, PPOConfig):
        enter(CRITIC_TRAINING)
        critic.get_values(data)
        for _ in range(updates_of(config)):
            enter(CRITIC_TRAINING)
            critic.train(data, ValueLossFn(config.critic.value_clip))
    teacher: Any = models.beside.get(TEACHER)
    loss_fn = (
        ClippedPGLossFn(config.effective_loss_options())
        if isinstance(config, RLConfig)
        else build_loss(config, teacher)
    )
    for _ in range(updates_of(config)):
        enter(TRAINING)
        models.policy.train(data, loss_fn, temperature=temperature_of(config))
    enter("")


def temperature_of(config: TrainingConfig) -> float:
    """Return the temperature that divides the logits."""
    return config.rollouts.temperature if isinstance(config, RLConfig) else 1.0


def updates_of(config: TrainingConfig) -> int:
    """Return the updates of a step, all on the same batch."""
    return config.rollouts.num_updates_per_rollout if isinstance(config, RLConfig) else 1


def scorings(config: TrainingConfig, models: Models, data: Any) -> list[Callable[[], Any]]:
    """Forward passes of a step beside the one that trains: of the reference, of the weights before an update, of a
    judge or a teacher. A judge's conversations are taken to be as long as the policy's."""
    policy, beside, temperature = models.policy, models.beside, temperature_of(config)

    def by_policy() -> Any:
        return policy.get_logprobs(data, temperature=temperature)

    def by_reference() -> Any:
        return policy.get_reference_policy_logprobs(data, temperature=temperature)

    reference = [] if policy.reference is None else [by_reference]
    if isinstance(config, DPOConfig) and (other := beside.get(REFERENCE)) is not None:
        return [lambda: other.get_logprobs(data)]
    if isinstance(config, KTOConfig):
        return [by_reference, by_reference, by_policy]  # the last two on other records' responses
    if isinstance(config, DistillationConfig) and config.distillation.topk is not None:
        k = config.distillation.topk
        return [lambda: beside[TEACHER].get_topk_logits(data, k)]
    if isinstance(config, RLConfig):
        judge = beside.get(JUDGE)
        judged = [] if judge is None else [lambda: judge.get_rewards(data)]
        before = [by_policy] if config.scores_samples() else []
        return [*judged, *before, *reference]
    return reference


class ShapesOnly:
    """The tensors of a model directory without a file: `SafetensorsDirectory` by its configuration alone."""

    def __init__(self, path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
        self.path, self._shapes = path, shapes

    def names(self) -> set[str]:
        return set(self._shapes)

    def shape(self, name: str) -> list[int]:
        return list(self._shapes[name])

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32

    def read(self, name: str, rows: slice = slice(None), columns: slice | None = None) -> Tensor:
        whole = torch.empty(self._shapes[name], device="meta")
        return whole[rows] if columns is None else whole[rows, columns]


def flash_stand_in(flops: AttentionFlops) -> Kernel:
    """A kernel on a device without memory: a flash kernel's output and saved tensors, and its operations."""
    from mcore_rl.models.megatron.attention import Kernel

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
            flops.total += ctx.count * 5 // 2  # five products, the first of which is done again
            return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None

    def attend(
        query: Tensor, key: Tensor, value: Tensor, visible: AttentionPattern, scale: float | None, window: int | None
    ) -> Tensor:
        width = math.prod(query.shape[1:])
        count = AttentionFlops.forward(visible.query_lengths, visible.key_lengths, window, width)
        return Attention.apply(query, key, value, count)

    return Kernel(attend)


def alike(reduced: Any) -> Any:
    """`own_rows.reduced` where other replicas, which are not there, are taken to have what this one has."""

    def of_all(values: Tensor, replicas: Any, op: Any = torch.distributed.ReduceOp.SUM) -> Tensor:
        reduced(values, replicas, op)  # its transfer, and that the host waits for it
        return values * replicas.size if op == torch.distributed.ReduceOp.SUM else values

    return of_all


def untouched_copies(tensors: list[Tensor]) -> list[Tensor]:
    """`reference_weights.copies_on_host`, of memory that nobody writes to and that is never taken therefore."""
    return [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]


def swap_stand_in(tensor: Tensor, kept: Tensor) -> None:
    """`reference_weights.exchange`: what it takes of the device meanwhile."""
    tensor.clone()


@dataclass(frozen=True)
class Seen:
    """Costs of the rank: transfers, waits of the host, operations of attention."""

    traffic: Traffic
    reads: HostReads
    attention: AttentionFlops


@contextmanager
def simulated_process(config: TrainingConfig, rank: int, world_size: int, tiles_of: str = "cuda") -> Iterator[Seen]:
    """This process, which can do nothing else afterwards, is a rank of the run.

    Args:
        tiles_of: kind of device whose tile sizes are taken.

    Raises:
        UserError: what the run itself would refuse, and what cannot be simulated.
    """
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what is asked of a GPU gets the same answers where there is one
    seen = Seen(count_traffic(), HostReads(), AttentionFlops())
    platform.initialize_platform(simulate=True)
    note_host_reads(seen.reads)

    import torch

    from mcore_rl.distributed import batched_data_dict, logprobs
    from mcore_rl.models.megatron import attention, weights
    from mcore_rl.models.megatron.families import family_of
    from mcore_rl.models.policy import reference, scoring
    from mcore_rl.run.setup import POLICY, check_models

    hf_configs = check_models(config)
    in_turn = {POLICY: config, **simulated_second_models(config)}  # as they are built
    shapes = iter([family_of(hf_configs[key]).shapes() for key in in_turn])
    for one in in_turn.values():
        _check_routing(one)
    logprobs.TILE_SHAPE["meta"] = logprobs.TILE_SHAPE[tiles_of]
    logprobs.CHUNK_BYTES["meta"] = logprobs.CHUNK_BYTES[tiles_of]
    attention.KERNELS["meta"] = flash_stand_in(seen.attention)
    with (
        replaced(scoring, "SafetensorsDirectory", lambda path: ShapesOnly(path, next(shapes))),
        replaced(weights, "read_shard", lambda *_: torch.empty((), device="meta")),
        replaced(reference, "copies_on_host", untouched_copies),
        replaced(reference, "swap_tensors", swap_stand_in),
        replaced(batched_data_dict, "reduced", alike(batched_data_dict.reduced)),
    ):
        yield seen


def _check_routing(config: TrainingConfig) -> None:
    if config.model.moe_router_replay:
        raise UserError("model.moe_router_replay: experts chosen while sampling cannot be simulated; leave it out")
    if config.model.moe_grouped_gemm and config.model.dtype != "bfloat16":
        raise UserError(
            f"model.moe_grouped_gemm: in {config.model.dtype} it cannot be simulated: torch knows the shapes of "
            "grouped products in bfloat16 alone; leave it out"
        )

"""The optimizer Muon (kellerjordan.github.io/posts/muon): it updates the matrices of the hidden layers.

AdamW updates all other parameters. The matrices are those of the model directory: the query, key, value, gate and up
projections are orthogonalized separately, although Megatron may store them together. A tensor of the directory in which
rows of several projections alternate is one matrix. The iterations run in the precision of the weights. Momentum is
sharded like AdamW's state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_rl.config import OptimizerConfig
from mcore_rl.distributed.topology import ParallelDimension
from mcore_rl.models.megatron.build import ModelShard
from mcore_rl.models.megatron.checkpoint.internals import owned_parts
from mcore_rl.models.megatron.optimizer import MUON_ATTRIBUTE, gather_gradients, optimizers_with_parameters
from mcore_rl.models.megatron.weight_mapping import Kind, Mapping, Shape
from mcore_rl.models.megatron.weights import cut_over, gather_shards, named_mappings

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

MOMENTUM = "momentum_buffer"
"""Name of the momentum in the optimizer's state and in checkpoints."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic Newton–Schulz iteration. All singular values end between about 0.7 and 1.2."""
EPSILON = 1e-7


def mark_matrices(model: ModelShard) -> None:
    """Mark the parameters that Muon updates, before the optimizer is built: 2-D parameters of the hidden layers."""
    for mapping, parameter in named_mappings(model):
        if mapping.megatron.startswith("decoder.layers.") and parameter.ndim == 2 and parameter.requires_grad:
            setattr(parameter, MUON_ATTRIBUTE, True)


def orthogonalized(matrix: Float[Tensor, "rows columns"], steps: int) -> Float[Tensor, "rows columns"]:
    """Return an approximation of U·Vᵀ for a matrix U·S·Vᵀ, by Newton–Schulz iterations in the matrix's precision."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=EPSILON)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def factor(rows: int, columns: int, scale: str) -> float:
    """Return the factor by which an orthogonalized matrix is multiplied in an update.

    match_rms_adamw: 0.2·√max(rows, columns), which gives the update the root mean square of AdamW's
    (arXiv:2502.16982, section 2.2). original: √max(1, rows / columns).
    """
    return 0.2 * math.sqrt(max(rows, columns)) if scale == "match_rms_adamw" else math.sqrt(max(1.0, rows / columns))


@dataclass(frozen=True)
class OwnMatrix:
    """A parameter of which this rank updates elements start … end − 1 (row-major).

    main: these elements in fp32, a parameter of the torch optimizer. group: the parameter group that contains it.
    """

    mapping: Mapping
    parameter: Any
    start: int
    end: int
    main: Tensor
    group: dict[str, Any]
    state: dict[str, Any]


class Muon:
    """The optimizer of the marked matrices; it runs before Megatron's optimizer updates all other parameters.

    Raises:
        UserError: see `named_mappings`.
    """

    def __init__(
        self,
        model: ModelShard,
        wrapped: Sequence[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        config: OptimizerConfig,
    ) -> None:
        self.topology, self.wrapped, self.config = model.topology, wrapped, config
        # The iterations amplify rounding: in bfloat16 the updates of two layouts would differ by 10 % of an update.
        self.dtype = model.chunks[0].config.params_dtype
        mappings = {id(parameter): mapping for mapping, parameter in named_mappings(model)}
        self.matrices = list[OwnMatrix]()
        for inner in optimizers_with_parameters(optimizer):
            group_of = {id(main): group for group in inner.optimizer.param_groups for main in group["params"]}
            for parameter, start, end, main in owned_parts(inner):
                if not getattr(parameter, MUON_ATTRIBUTE, False):
                    continue
                state = inner.optimizer.state[main] = {MOMENTUM: torch.zeros_like(main), "step": torch.tensor(0.0)}
                mapping = mappings[id(parameter)]
                self.matrices.append(OwnMatrix(mapping, parameter, start, end, main, group_of[id(main)], state))

    @torch.no_grad()
    def step(self) -> None:
        """Update the matrices with the gradients that `clip_gradients` has prepared. Collective.

        θ ← (1 − lr·weight_decay)·θ − lr·factor·NS(momentum), as `torch.optim.Muon` does for whole matrices.
        """
        momentum = self.config.muon_momentum
        for own in self.matrices:
            assert own.main.grad is not None, "clip_gradients must run first"
            own.state[MOMENTUM].lerp_(own.main.grad, 1 - momentum)
            update = own.main.grad.lerp(own.state[MOMENTUM], momentum)  # Nesterov's
            own.parameter.main_grad.view(-1)[own.start : own.end] = update
            own.main.grad = None  # AdamW skips a parameter without a gradient
        gather_gradients(self.wrapped)
        for own, shard in self._orthogonalized():
            lr = own.group["lr"]
            own.main.mul_(1 - lr * own.group["weight_decay"])
            own.main.sub_(shard.reshape(-1)[own.start : own.end], alpha=lr)
            own.state["step"] += 1

    def _orthogonalized(self) -> Iterator[tuple[OwnMatrix, Tensor]]:
        """Yield each matrix with this rank's shard of the scaled update."""
        groups: dict[tuple[bool, bool], list[OwnMatrix]] = {}
        for own in self.matrices:
            groups.setdefault((own.mapping.is_expert, own.mapping.kind.partition_dim is None), []).append(own)
        for (_, is_whole), matrices in sorted(groups.items()):
            ranks = ParallelDimension() if is_whole else cut_over(matrices[0].mapping, self.topology)
            for first in range(0, len(matrices), ranks.size):
                yield from self._round(matrices[first : first + ranks.size], ranks)

    def _round(self, matrices: Sequence[OwnMatrix], ranks: ParallelDimension) -> Iterator[tuple[OwnMatrix, Tensor]]:
        """Orthogonalize as many matrices as there are ranks that hold shards of them, one on each rank."""
        updates = list[Tensor]()
        for number, own in enumerate(matrices):
            gradient = own.parameter.main_grad
            stacked = gradient[None] if ranks.size == 1 else gather_shards(gradient, ranks)
            update = torch.empty(stacked.numel(), dtype=self.dtype, device=stacked.device)
            if number == ranks.rank:
                parts = [part.flatten() for _, whole in own.mapping.split(stacked) for part in self._of_part(whole)]
                torch.cat(parts, out=update)
            updates.append(update)
        for number, (own, update) in enumerate(zip(matrices, updates, strict=True)):
            if ranks.size > 1:
                torch.distributed.broadcast(update, group=ranks.group, group_src=number)
            source = _Parts(own.mapping, update, self.config.muon_scale)
            yield own, own.mapping.kind.read(own.mapping.parts, source, ranks.rank, ranks.size)

    def _of_part(self, momentum: Tensor) -> list[Tensor]:
        """Return the orthogonalized matrix of a part, which may have one more dimension of size 1 in front."""
        matrices = momentum.reshape(-1, *momentum.shape[-2:]).to(self.dtype)
        return [orthogonalized(matrix, self.config.muon_steps) for matrix in matrices]


def _weight_shape(shape: Shape, kind: Kind) -> tuple[int, int]:
    """Return the numbers of outputs and of inputs of a part."""
    rows, columns = shape[-2:]
    return (columns, rows) if kind.is_transposed else (rows, columns)


class _Parts:
    """The update of a parameter as tensors of the model directory, from which each rank reads its shard."""

    def __init__(self, mapping: Mapping, flat: Tensor, scale: str) -> None:
        pieces = flat.split([math.prod(part.shape) for part in mapping.parts])
        self._pieces = [
            (part, piece.view(part.shape).float() * factor(*_weight_shape(part.shape, mapping.kind), scale))
            for part, piece in zip(mapping.parts, pieces, strict=True)
        ]

    def read(self, name: str, rows: slice = slice(None), columns: slice | None = None) -> Tensor:
        for part, piece in self._pieces:
            if part.name == name and part.first <= (rows.start or 0) < part.first + part.shape[0]:
                own = piece[(rows.start or 0) - part.first : (rows.stop or part.shape[0]) - part.first]
                return own if columns is None else own[:, columns]
        raise KeyError(name)

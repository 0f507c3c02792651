"""The optimizer Muon (kellerjordan.github.io/posts/muon). It updates the matrices of the hidden layers.

AdamW updates all other parameters. Each tensor of the model directory is one matrix: query, key, value, gate and up
projections are orthogonalized separately, even if Megatron stores them together. If the rows of several projections
alternate in one tensor of the directory, that tensor is one matrix. The Newton–Schulz iterations run in the precision
of the weights. The momentum is sharded like AdamW's state.
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
from mcore_rl.models.megatron.internals import owned_parts
from mcore_rl.models.megatron.model.gpt_model import ModelShard
from mcore_rl.models.megatron.training.optimizer import MUON_ATTRIBUTE, gather_gradients, optimizers_with_parameters
from mcore_rl.models.megatron.weight_mapping import Kind, Mapping, Shape
from mcore_rl.models.megatron.weights.conversion import cut_over, gather_shards, named_mappings

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

MOMENTUM = "momentum_buffer"
"""Name of the momentum in the optimizer's state and in checkpoints."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic Newton–Schulz iteration. All singular values end between about 0.7 and 1.2."""
EPSILON = 1e-7


def mark_matrices(model: ModelShard) -> None:
    """Mark the parameters that Muon updates: the 2-D parameters of the hidden layers, except tables.

    Call it before the optimizer is built.
    """
    for mapping, parameter in named_mappings(model):
        is_matrix = parameter.ndim == 2 and not mapping.kind.is_table
        if mapping.megatron.startswith("decoder.layers.") and is_matrix and parameter.requires_grad:
            setattr(parameter, MUON_ATTRIBUTE, True)


def orthogonalized(matrix: Float[Tensor, "rows columns"], steps: int) -> Float[Tensor, "rows columns"]:
    """Return approximately U·Vᵀ for a matrix with the singular value decomposition U·S·Vᵀ.

    The result is computed by Newton–Schulz iterations, in the precision of the matrix.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=EPSILON)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def factor(rows: int, columns: int, scale: str) -> float:
    """Return the factor by which the orthogonalized matrix is multiplied in an update.

    If `scale` is "match_rms_adamw", the factor is 0.2·√max(rows, columns). It gives the update the root mean square of
    an update of AdamW (arXiv:2502.16982, section 2.2). If `scale` is "original", the factor is √max(1, rows / columns).
    """
    return 0.2 * math.sqrt(max(rows, columns)) if scale == "match_rms_adamw" else math.sqrt(max(1.0, rows / columns))


@dataclass(frozen=True)
class OwnMatrix:
    """The part of a matrix that this rank updates: the elements start … end − 1 of `parameter`, in row-major order.

    main: these elements in fp32; `main` is a parameter of the PyTorch optimizer.
    group: the parameter group of `main`.
    state: momentum and step of `main`.
    """

    mapping: Mapping
    parameter: Any
    start: int
    end: int
    main: Tensor
    group: dict[str, Any]
    state: dict[str, Any]


class Muon:
    """Updates the matrices that `mark_matrices` has marked. Megatron's optimizer updates all other parameters.

    Raises:
        UserError: the model family's table of weight mappings has no entry for a parameter.
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

        θ ← (1 − lr·weight_decay)·θ − lr·factor·NS(momentum), as in `torch.optim.Muon`; NS is `orthogonalized`.
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
        """Yield each matrix and this rank's shard of its update (orthogonalized and multiplied by `factor`)."""
        groups: dict[tuple[bool, bool], list[OwnMatrix]] = {}
        for own in self.matrices:
            groups.setdefault((own.mapping.is_expert, own.mapping.kind.partition_dim is None), []).append(own)
        for (_, is_whole), matrices in sorted(groups.items()):
            ranks = ParallelDimension() if is_whole else cut_over(matrices[0].mapping, self.topology)
            for first in range(0, len(matrices), ranks.size):
                yield from self._round(matrices[first : first + ranks.size], ranks)

    def _round(self, matrices: Sequence[OwnMatrix], ranks: ParallelDimension) -> Iterator[tuple[OwnMatrix, Tensor]]:
        """Orthogonalize each matrix on a different rank; yield all matrices, each with this rank's shard of its update.

        Args:
            matrices: at most `ranks.size` matrices.
            ranks: the ranks over which the matrices are sharded.
        """
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
        """Orthogonalize the momentum of one part of a parameter (`weight_mapping.Part`).

        Return a list of matrices: one if `momentum` is 2-D; one for each index of the first dimension if it is 3-D.
        """
        matrices = momentum.reshape(-1, *momentum.shape[-2:]).to(self.dtype)
        return [orthogonalized(matrix, self.config.muon_steps) for matrix in matrices]


def _weight_shape(shape: Shape, kind: Kind) -> tuple[int, int]:
    """Return (outputs, inputs) of a part of a weight, given the shape of the part."""
    rows, columns = shape[-2:]
    return (columns, rows) if kind.is_transposed else (rows, columns)


class _Parts:
    """A `TensorSource` that contains the update of a whole parameter, under the names of the Hugging Face tensors.

    `Kind.read` reads a rank's shard of the update from this source, as it reads weights from a model directory.
    """

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

"""Rotary position embeddings with the frequencies that transformers computes for a configuration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_rl import platform
from mcore_rl.errors import UserError
from mcore_rl.models.megatron.parallel_state import ProcessGroupCollection

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def rope_parameters(hf_config: Any) -> dict[str, Any]:
    """`rope_type`, `rope_theta`, `partial_rotary_factor` and the scaling's own keys, from transformers 4 or 5.

    Raises:
        UserError: a rope type that is not supported.
    """
    parameters = dict(getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {})
    parameters.setdefault("rope_type", parameters.pop("type", "default"))
    parameters.setdefault("rope_theta", getattr(hf_config, "rope_theta", 10000.0))
    parameters.setdefault("partial_rotary_factor", getattr(hf_config, "partial_rotary_factor", 1.0))
    if parameters["rope_type"] not in SUPPORTED_ROPE_TYPES:
        raise UserError(
            f"model.path: rope type {parameters['rope_type']!r} is not supported; "
            f"supported are {', '.join(SUPPORTED_ROPE_TYPES)}"
        )
    return parameters


def rope_frequencies(hf_config: Any) -> tuple[Tensor, float]:
    """Inverse frequencies (fp32) of half the numbers of a head that are rotated, and the factor on cos and sin.

    [head_dim · partial_rotary_factor / 2]; the factor is YaRN's, else 1.
    """
    parameters = rope_parameters(hf_config)
    if parameters["rope_type"] == "default":
        dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
        return plain_frequencies(parameters["rope_theta"], int(dim * parameters["partial_rotary_factor"])), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    inverse, attention_factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](hf_config, torch.device("cpu"))
    return inverse, float(attention_factor)


def plain_frequencies(theta: float, dim: int) -> Tensor:
    """Inverse frequencies [dim / 2] (fp32) of RoPE (arXiv:2104.09864)."""
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    return 1.0 / theta**exponents


def concentration_scale(attention_factor: float) -> float:
    """The `yarn_rotary_scaling_factor` from which Megatron derives `attention_factor` for cos and sin.

    Megatron computes 0.1·ln(s) + 1 (YaRN, arXiv:2309.00071, eq. 22); this is its inverse.

    Raises:
        UserError: a factor below 1, which that formula never gives.
    """
    if attention_factor < 1:
        raise UserError(f"model.path: YaRN attention_factor {attention_factor} is not supported; it must be at least 1")
    return math.exp((attention_factor - 1) * 10)


class PackedRotaryEmbedding(RotaryEmbedding):
    """Megatron's rotary embedding, which also takes explicit positions of a pack.

    Packs whose parameters name their local `positions` get one angle per token, so that rotation
    needs no loop over sequences and no cut of its own under context parallelism.

    Args:
        frequencies: inverse frequencies of each kind of layer; their angles stand side by side, and a layer takes
            its own (`PackLayer`).
    """

    def __init__(self, frequencies: Sequence[Tensor], pg_collection: ProcessGroupCollection) -> None:
        inverse = torch.cat([part.repeat(2) for part in frequencies])
        super().__init__(len(inverse), rotary_percent=1.0, use_cpu_initialization=True, cp_group=pg_collection.cp)
        self.inv_freq, self.frequencies = frequencies[0], inverse

    def get_rotary_seq_len(self, *args: Any) -> Any:
        packed_seq_params = args[-1]
        positions = getattr(packed_seq_params, "positions", None)
        return super().get_rotary_seq_len(*args) if positions is None else positions

    def forward(self, max_seq_len: Any, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> Tensor:
        """Angles [T / CP, 1, rotated] for positions, else Megatron's [S, 1, 1, rotated]."""
        if not isinstance(max_seq_len, Tensor):
            return super().forward(max_seq_len, offset, packed_seq, cp_group)
        self.frequencies = platform.sent(self.frequencies, max_seq_len.device)
        return torch.outer(max_seq_len.to(self.frequencies.dtype), self.frequencies)[:, None]

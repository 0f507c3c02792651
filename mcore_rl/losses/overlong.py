"""Reward shaping for responses that run into the length limit (DAPO, arXiv:2503.14476, section 3.4)."""

from __future__ import annotations

from jaxtyping import Float, Shaped
from torch import Tensor

from mcore_rl.errors import ContractError


def soft_overlong_penalty(
    response_lengths: Shaped[Tensor, " samples"], max_length: int, cache_length: int
) -> Float[Tensor, " samples"]:
    """Return the penalty to add to each reward, [B]: 0 up to max_length − cache_length tokens, −1 at max_length.

    Args:
        response_lengths: tokens of each sample's longest response (each response has the limit for itself).

    Raises:
        ContractError: a cache that is not between 1 and max_length.
    """
    if not 0 < cache_length <= max_length:
        raise ContractError(f"cache_length must be between 1 and max_length ({max_length}), got {cache_length}")
    return ((max_length - cache_length - response_lengths) / cache_length).clamp(-1.0, 0.0)

"""Reward shaping for responses that run into the length limit (DAPO, arXiv:2503.14476, section 3.4)."""

from __future__ import annotations

from torch import Tensor


def soft_overlong_penalty(response_lengths: Tensor, max_length: int, cache_length: int) -> Tensor:
    """What to add to each reward, [B]: 0 up to max_length − cache_length tokens, falling to −1 at max_length.

    Raises:
        ValueError: a cache that is not between 1 and max_length.
    """
    if not 0 < cache_length <= max_length:
        raise ValueError(f"cache_length must be between 1 and max_length ({max_length}), got {cache_length}")
    return ((max_length - cache_length - response_lengths) / cache_length).clamp(-1.0, 0.0)

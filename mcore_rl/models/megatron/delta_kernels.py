"""Kernels of other packages for gated delta nets on GPUs: `fla` (0.6 or newer) for the rule, `causal_conv1d` for the
convolution.

They compute packs without shared prompts in training and scoring, unless the run is deterministic. torch computes the
rest. The kernels have not run: the tests call stand-ins with the signatures of their functions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from mcore_rl import platform
from mcore_rl.distributed.packs import PackLayout, PrefixLayout
from mcore_rl.models.megatron.delta_rule import ChunkPlan, causal_conv, delta_rule


@cache
def rule_kernel() -> Callable[..., Any] | None:
    """Return the function of `fla` for the rule; None if there is no GPU or the package is missing."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError:
        return None
    return chunk_gated_delta_rule if platform.has_gpu() else None


@cache
def convolution_kernel() -> Callable[..., Any] | None:
    """Return the function of `causal_conv1d`; None if there is no GPU or the package is missing."""
    try:
        from causal_conv1d import causal_conv1d_fn
    except ImportError:
        return None
    return causal_conv1d_fn if platform.has_gpu() else None


def describe() -> str:
    """Describe in a few words what computes gated delta nets."""
    if torch.are_deterministic_algorithms_enabled():
        return "delta nets by torch"
    rule = "fla" if rule_kernel() else "torch"
    convolution = "causal_conv1d" if convolution_kernel() else "torch"
    return f"delta rule by {rule}, its convolution by {convolution}"


@lru_cache(maxsize=16)
def _segments(layout: PackLayout, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cumulative lengths [segments + 1] of the padded segments with tokens, and each token's segment [1, T]."""
    lengths = torch.tensor([length for length in layout.segment_lengths if length])
    ends = torch.cat((torch.zeros(1, dtype=torch.long), lengths.cumsum(0)))
    segment = torch.repeat_interleave(torch.arange(len(lengths)), lengths)[None].int()
    ends, segment = platform.sent_together((ends, segment), device)
    return ends, segment


def _fits(layout: PackLayout) -> bool:
    return not (isinstance(layout, PrefixLayout) or torch.are_deterministic_algorithms_enabled())


def packed_convolution(x: Tensor, weight: Tensor, layout: PackLayout, plan: ChunkPlan) -> Tensor:
    """Compute `causal_conv` over a pack: [T, heads, channels] → the same shape."""
    kernel = convolution_kernel() if _fits(layout) else None
    if kernel is None:
        return causal_conv(x, weight, plan.before)
    _, segment = _segments(layout, x.device)
    # The kernel takes sequence indices only if the channels of a token are next to each other.
    rows = x.flatten(1).T[None]
    out: Tensor = kernel(rows, weight.flatten(0, 1), seq_idx=segment, activation="silu")
    return out[0].T.unflatten(1, x.shape[1:])


def packed_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, layout: PackLayout, plan: ChunkPlan
) -> Tensor:
    """Compute `delta_rule` over a pack, without the states."""
    kernel = rule_kernel() if _fits(layout) else None
    if kernel is None:
        return delta_rule(query, key, value, decay, rate, plan)[0]
    ends, _ = _segments(layout, value.device)
    of_heads = (x.flatten(1, 2)[None] for x in (value, decay, rate))
    values, decays, rates = of_heads
    out, _ = kernel(
        query[None], key[None], values, decays.float(), rates, use_qk_l2norm_in_kernel=True, cu_seqlens=ends
    )
    whole: Tensor = out[0].unflatten(1, value.shape[1:3])
    return whole

"""Kernels of attention over packs, and what each of them needs to know of a pack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl import platform
from mcore_rl.distributed.pack_layout import PackLayout
from mcore_rl.distributed.prefix_layout import PrefixLayout
from mcore_rl.models.megatron.attention_tiles import Tile, tiles_of


class VisibleKeys:
    """The keys that the queries of context-parallel rank `cp_rank` see in a pack, made once for all layers and passes.

    query_lengths, key_lengths: of the rank's chunks of queries, and of the keys that each may see, whose last ones are
        as many as the queries and theirs.
    is_apart: whether the rows of all ranks, one after the other, are not the visible ones, one chunk's after the other.
    """

    def __init__(self, layout: PackLayout, cp_rank: int) -> None:
        self.layout, self.cp_rank = layout, cp_rank
        self.query_lengths, self.key_lengths, self._order = layout.visible_keys(cp_rank)
        self.is_apart = layout.cp_size > 1 or isinstance(layout, PrefixLayout)
        self._tiles: dict[int | None, tuple[Tile, ...]] = {}
        self._masks: dict[tuple[Any, ...], Tensor] = {}
        self._on_device: tuple[Tensor, Tensor, Tensor] | None = None

    def on_host(self) -> tuple[Tensor, Tensor, Tensor]:
        """What a kernel that does not read in place needs on the device: cumulative lengths of queries and of keys,
        int32, and `index`, int64, which is empty where there is none."""
        lengths = self.query_lengths, self.key_lengths
        queries, keys = (torch.tensor((0, *each)).cumsum(0, dtype=torch.int32) for each in lengths)
        return queries, keys, self.layout.gather_order[self._order] if self.is_apart else self._order[:0]

    def put(self, cu_queries: Tensor, cu_keys: Tensor, index: Tensor) -> None:
        """Take `on_host()` as it is on the device."""
        self._on_device = cu_queries, cu_keys, index

    @property
    def on_device(self) -> tuple[Tensor, Tensor, Tensor]:
        assert self._on_device is not None, "the pack's index tensors are on the host"
        return self._on_device

    @property
    def cu_seqlens(self) -> tuple[Tensor, Tensor]:
        """Cumulative lengths of queries and of keys, int32 on the device."""
        return self.on_device[:2]

    @property
    def index(self) -> Tensor | None:
        """The rows that each chunk of queries sees, one chunk's after the other, on the device; None where these are
        all rows in their order."""
        return self.on_device[2] if self.is_apart else None

    def tiles(self, window: int | None) -> tuple[Tile, ...]:
        """The attention of layers that have this window."""
        if window not in self._tiles:
            self._tiles[window] = tiles_of(self.layout, self.cp_rank, window)
        return self._tiles[window]

    def mask(self, queries: int, keys: int, window: int | None, like: Tensor) -> Tensor:
        """To be added to scores [queries, keys]: the last query sees the last `window` keys, or all before it if None,
        the one before it one less far, …; of `like`'s dtype and device."""
        key = (queries, keys, window, like.dtype, like.device)
        if key not in self._masks:
            seen = torch.ones(queries, keys, dtype=torch.bool, device=like.device).tril(keys - queries)
            seen = seen if window is None else seen.triu(keys - queries - window + 1)
            mask = torch.zeros(queries, keys, dtype=like.dtype, device=like.device)
            self._masks[key] = mask.masked_fill_(~seen, -torch.inf)
        return self._masks[key]


def visible_keys(layout: PackLayout, cp_rank: int, *others: Tensor) -> tuple[VisibleKeys, list[Tensor]]:
    """Return a pack's visible keys for the kernels of `platform.device()`, and `others` there, by one copy."""
    visible, device = VisibleKeys(layout, cp_rank), platform.device()
    if KERNELS[device.type].reads_in_place:
        return visible, platform.sent_together(others, device)
    *there, cu_queries, cu_keys, index = platform.sent_together((*others, *visible.on_host()), device)
    visible.put(cu_queries, cu_keys, index)
    return visible, there


@dataclass(frozen=True)
class Kernel:
    """Causal attention inside each segment of a pack.

    attend: queries [Q, heads, d], keys and values [K, groups, d], what is seen of them, the scale of scores (1/√d if
        None), the window → [Q, heads, d].
    reads_in_place: keys and values are the rows of all ranks, one after the other; else those that each chunk of
        queries sees, one chunk's after the other.
    """

    attend: Callable[[Tensor, Tensor, Tensor, VisibleKeys, float | None, int | None], Tensor]
    reads_in_place: bool = False


def kernel_of(query: Tensor) -> Kernel:
    """For tensors like this one."""
    if query.device.type == "cuda" and query.dtype not in (torch.float16, torch.bfloat16):
        return Kernel(sdpa_by_segment)
    return KERNELS[query.device.type]


def sdpa_by_segment(
    query: Tensor, key: Tensor, value: Tensor, visible: VisibleKeys, scale: float | None, window: int | None
) -> Tensor:
    """Torch's SDPA chunk by chunk, on any device; for GPUs in fp32, for which there is no flash kernel."""
    repeats = query.shape[1] // key.shape[1]  # with as many heads a memory-efficient kernel is there
    query, key, value = (
        x.repeat_interleave(n, dim=1).transpose(0, 1).unsqueeze(0)
        for x, n in ((query, 1), (key, repeats), (value, repeats))
    )
    outs = []
    for q, k, v in zip(
        query.split(visible.query_lengths, dim=2),
        key.split(visible.key_lengths, dim=2),
        value.split(visible.key_lengths, dim=2),
        strict=True,
    ):
        plain = q.shape[2] == k.shape[2] and window is None
        mask = None if plain else visible.mask(q.shape[2], k.shape[2], window, q)
        outs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=plain, scale=scale))
    return torch.cat(outs, dim=2).squeeze(0).transpose(0, 1)


def flash_varlen(
    query: Tensor, key: Tensor, value: Tensor, visible: VisibleKeys, scale: float | None, window: int | None
) -> Tensor:
    """Torch's flash kernel for packs (CUDA, half precision); its causal mask is lower-right aligned too.

    The operator itself: `torch.nn.attention.varlen`, which wraps it, came late (2.10) and takes windows, scale and
    shared heads since 2.12 only.
    """
    out: Tensor = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        *visible.cu_seqlens,
        max(visible.query_lengths),
        max(visible.key_lengths),
        0.0,
        True,
        False,
        scale=scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=0,
    )[0]
    return out


def tiled(
    query: Tensor, key: Tensor, value: Tensor, visible: VisibleKeys, scale: float | None, window: int | None
) -> Tensor:
    """Torch's flash kernel of the CPU on tiles of queries and keys where they are; see `attention_tiles`.

    Nothing is copied but short ranges of keys, and kept are queries, keys, values, the output and its log-sum-exp.
    """
    out: Tensor = _TiledAttention.apply(query, key, value, visible, visible.tiles(window), scale)
    return out


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        visible: VisibleKeys,
        tiles: tuple[Tile, ...],
        scale: float | None,
    ) -> Tensor:
        tile_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        # Several tiles' results are merged in fp32 at least.
        out = torch.empty(query.shape, dtype=_exact(query.dtype))
        logsumexp = torch.empty(*query.shape[:2], 1, dtype=out.dtype)
        for tile in tiles:
            tensors = tile.queries.of(query), *(_keys(x, tile, query) for x in (key, value))
            mask = _mask(tile, visible, query)
            part, part_lse = tile_attention(*tensors, 0.0, tile.causal, attn_mask=mask, scale=scale)
            so_far, so_far_lse, part_lse = tile.queries.of(out), tile.queries.of(logsumexp), part_lse.unsqueeze(-1)
            if tile.is_first:
                so_far.copy_(part)
                so_far_lse.copy_(part_lse)
            else:
                both = torch.logaddexp(so_far_lse, part_lse)
                so_far.mul_((so_far_lse - both).exp_()).addcmul_(part, (part_lse - both).exp_())
                so_far_lse.copy_(both)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.visible, ctx.tiles, ctx.scale = visible, tiles, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, logsumexp = ctx.saved_tensors
        tile_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        # Each tile's probabilities are exp(score − the log-sum-exp of all tiles): its part of the whole gradient.
        gradients = [torch.zeros(x.shape, dtype=_exact(x.dtype)) for x in (query, key, value)]
        for tile in ctx.tiles:
            q, g, o, lse = (tile.queries.of(x) for x in (query, grad, out, logsumexp))
            k, v = (_keys(x, tile, query) for x in (key, value))
            mask = _mask(tile, ctx.visible, query)
            d_query, *d_keys = tile_backward(
                g, q, k, v, o, lse.squeeze(-1), 0.0, tile.causal, attn_mask=mask, scale=ctx.scale
            )
            tile.queries.of(gradients[0]).add_(d_query)
            for gradient, parts in zip(gradients[1:], d_keys, strict=True):
                if parts.shape[1] != gradient.shape[1]:
                    parts = parts.unflatten(1, (gradient.shape[1], -1)).sum(2, dtype=gradient.dtype)
                for rows, part in zip(tile.keys, parts.split([r.length for r in tile.keys], dim=2), strict=True):
                    rows.of(gradient).add_(part)
        return *(gradient.to(query.dtype) for gradient in gradients), None, None, None


def _keys(x: Tensor, tile: Tile, query: Tensor) -> Tensor:
    """[count, heads or groups, keys, d] a tile's keys or values."""
    ranges = [rows.of(x) for rows in tile.keys]
    keys = ranges[0] if len(ranges) == 1 else torch.cat(ranges, dim=2)
    repeats = query.shape[1] // x.shape[1]
    return keys if repeats == 1 or _shares_heads(x.dtype) else keys.repeat_interleave(repeats, dim=1)


def _shares_heads(dtype: torch.dtype) -> bool:
    """Whether the kernel takes fewer heads of keys than of queries, and adds up their gradients exactly: since 2.10,
    but in half precision it rounds them again with each query head."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return version >= (2, 10) and dtype.itemsize >= 4


def _mask(tile: Tile, visible: VisibleKeys, like: Tensor) -> Tensor | None:
    if tile.window is None:
        return None
    return visible.mask(tile.queries.length, sum(rows.length for rows in tile.keys), tile.window, like)


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


KERNELS = {"cpu": Kernel(tiled, reads_in_place=True), "cuda": Kernel(flash_varlen)}
"""Kernels by kind of device."""

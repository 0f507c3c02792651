"""The k most likely tokens over a vocabulary that is divided among tensor-parallel ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_rl.distributed.collectives import all_gather, group_rank, group_size
from mcore_rl.distributed.logprobs import CHUNK_BYTES, Tiles, accumulation_dtype, slices, valid_columns
from mcore_rl.errors import ContractError


@torch.no_grad()
def vocab_parallel_topk(
    logits: Float[Tensor, "tokens vocab_shard"],
    k: int,
    group: ProcessGroup | None = None,
    vocab_size: int | None = None,
) -> tuple[Float[Tensor, "tokens k"], Int[Tensor, "tokens k"]]:
    """Return the k largest logits of the whole vocabulary, [T, k], and their token ids; no gradient.

    Each rank contributes its k largest: 2·k numbers per token are gathered.

    Raises:
        ContractError: k is not between 1 and the vocabulary's size.
    """
    check_topk(k, logits.shape[-1], group, vocab_size)
    columns = valid_columns(logits.shape[-1], group_rank(group), vocab_size)
    return combine_topk(*shard_topk(logits[:, :columns], k), k, logits.shape[-1], group)


def check_topk(k: int, shard_size: int, group: ProcessGroup | None, vocab_size: int | None) -> None:
    """Check that the vocabulary has at least `k` tokens.

    Raises:
        ContractError: k is not between 1 and the vocabulary's size.
    """
    whole = shard_size * group_size(group) if vocab_size is None else vocab_size
    if not 1 <= k <= whole:
        raise ContractError(f"vocab_parallel_topk: k must be at least 1 and at most {whole} (vocabulary), got {k}")


def shard_topk(
    logits: Float[Tensor, "tokens columns"], k: int
) -> tuple[Float[Tensor, "tokens k"], Int[Tensor, "tokens k"]]:
    """Return a shard's k largest logits and their columns. A smaller shard is padded with logits −inf at column 0."""
    values, columns = logits.to(accumulation_dtype(logits.dtype)).topk(min(k, logits.shape[1]), dim=-1)
    short = k - values.shape[1]
    return F.pad(values, (0, short), value=-torch.inf), F.pad(columns, (0, short))


def combine_topk(
    values: Float[Tensor, "tokens k"],
    columns: Int[Tensor, "tokens k"],
    k: int,
    shard_size: int,
    group: ProcessGroup | None,
) -> tuple[Float[Tensor, "tokens k"], Int[Tensor, "tokens k"]]:
    """Combine each rank's `shard_topk` by two all-gathers; return the vocabulary's top k and their token ids."""
    ids = columns + group_rank(group) * shard_size
    if group_size(group) > 1:
        values = torch.cat(tuple(all_gather(values, group)), dim=-1)
        ids = torch.cat(tuple(all_gather(ids, group)), dim=-1)
    best, order = values.topk(k, dim=-1)
    return best, ids.gather(-1, order)


@torch.no_grad()
def linear_topk(
    hidden: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "vocab_shard hidden"],
    k: int,
    group: ProcessGroup | None = None,
    vocab_size: int | None = None,
    chunk_size: int | None = None,
    softcap: float | None = None,
) -> tuple[Float[Tensor, "tokens k"], Int[Tensor, "tokens k"]]:
    """Return the k largest logits of hidden · weightᵀ over the whole vocabulary, and their token ids; no gradient.

    The result equals `(hidden @ weight.T).topk(k)`, accumulated in fp32. Two all-gathers send k numbers per token each.

    Args:
        hidden: [T, H], the same on all ranks of `group`.
        weight: [Vp, H], this rank's rows of the LM head.
        vocab_size: number of real tokens in the vocabulary; later rows of `weight` are padding and ignored.
        chunk_size: number of tokens whose logits exist at once; None for as many as `CHUNK_BYTES` allows.
        softcap: bound of the logits; see `linear_logprobs`.

    Raises:
        ContractError: k is not between 1 and the vocabulary's size.
    """
    check_topk(k, weight.shape[0], group, vocab_size)
    columns = valid_columns(weight.shape[0], group_rank(group), vocab_size)
    tiles = Tiles(hidden, weight, columns, 1.0, softcap=softcap)
    if chunk_size is None:
        chunk_size = max(1, CHUNK_BYTES[hidden.device.type] // (max(tiles.columns, 1) * tiles.dtype.itemsize))
    values = hidden.new_empty((len(hidden), k), dtype=tiles.dtype)
    places = hidden.new_empty((len(hidden), k), dtype=torch.long)
    for rows in slices(len(hidden), chunk_size):
        values[rows], places[rows] = shard_topk(tiles.all_columns(rows), k)
    return combine_topk(values, places, k, weight.shape[0], group)

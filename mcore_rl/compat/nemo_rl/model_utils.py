"""Functions for log-probabilities of sharded logits, with the names that NeMo RL uses.

They call this package's own functions. Gradients follow `gather_context_parallel`: they are summed over
context-parallel ranks. If every rank computes the whole loss, divide it by the number of ranks.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_rl.distributed.collectives import all_gather_forward_reduce_scatter_backward, group_rank, group_size
from mcore_rl.distributed.logprobs import (
    next_token_logprobs_from_logits,
    unpack_next_token_values,
    vocab_parallel_logprobs,
)
from mcore_rl.distributed.packs import PackLayout, slice_context_parallel
from mcore_rl.errors import ContractError


def from_parallel_logits_to_logprobs(
    vocab_parallel_logits: Float[Tensor, "batch local_seq vocab_shard"],
    target: Int[Tensor, "batch seq"],
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: ProcessGroup | None,
    inference_only: bool = False,
    cp_group: ProcessGroup | None = None,
) -> Float[Tensor, "batch predicted"]:
    """Return next-token log-probabilities [B, S − 1] of unpacked rows; entry (b, t) is of token `target[b, t + 1]`.

    Args:
        vocab_parallel_logits: [B, S' / CP, V / TP], zigzag tokens over `cp_group`; S' ≥ S.
        target: the unshifted tokens.
        vocab_start_index: first token id of this rank's shard of the vocabulary.
        vocab_end_index: token id after the shard's last one.
        inference_only: compute no gradient.

    Raises:
        ContractError: a shape, or the shard's token ids, do not fit the sizes of the groups.
    """
    rank = _rank_of_columns(vocab_parallel_logits, vocab_start_index, vocab_end_index)
    rows, width = target.shape
    cp_size = group_size(cp_group)
    padded = vocab_parallel_logits.shape[1] * cp_size
    if padded < width:
        raise ContractError(f"the logits have {padded} positions, but target has {width}")
    layout = PackLayout((width,) * rows, (padded,) * rows, rows * padded, cp_size)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
        logits = vocab_parallel_logits.flatten(0, 1)
        return next_token_logprobs_from_logits(logits, target, layout, tp_group, cp_group, rank)[0]


def from_parallel_logits_to_logprobs_packed_sequences(
    vocab_parallel_logits: Float[Tensor, "1 local_tokens vocab_shard"],
    target: Int[Tensor, "1 tokens"],
    cu_seqlens_padded: Int[Tensor, " boundaries"],
    unpacked_seqlen: int,
    vocab_start_index: int,
    vocab_end_index: int,
    group: ProcessGroup | None,
    inference_only: bool = False,
    cp_group: ProcessGroup | None = None,
) -> Float[Tensor, "sequences predicted"]:
    """Return next-token log-probabilities [N, unpacked_seqlen − 1] of a pack, 0 where a row has no token.

    Args:
        vocab_parallel_logits: [1, T / CP, V / TP].
        target: [1, T] the unshifted tokens of the whole pack.
        cu_seqlens_padded: cumulative lengths [N + 1] of the padded sequences.

    Raises:
        ContractError: the shard's token ids do not fit the size of the group.
    """
    rank = _rank_of_columns(vocab_parallel_logits, vocab_start_index, vocab_end_index)
    layout = PackLayout.from_cu_seqlens(cu_seqlens_padded, None, target.shape[1], group_size(cp_group))
    targets = slice_context_parallel(layout.next_of(target[0]), layout, group_rank(cp_group))
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
        logprobs, _ = vocab_parallel_logprobs(vocab_parallel_logits[0], targets, group, rank)
        return unpack_next_token_values(logprobs, None, layout, unpacked_seqlen, cp_group)[0]


def allgather_cp_sharded_tensor(
    tensor: Shaped[Tensor, "*local"], cp_group: ProcessGroup | None, seq_dim: int = 1
) -> Shaped[Tensor, "*whole"]:
    """Gather the zigzag shares of a sequence from all ranks and join them along `seq_dim`, in the sequence's order."""
    if group_size(cp_group) == 1:
        return tensor
    if tensor.shape[seq_dim] % 2:
        raise ContractError(
            f"the number of tokens of each context-parallel rank ({tensor.shape[seq_dim]}) must be even, because a "
            "rank holds two chunks of equal length"
        )
    shares = all_gather_forward_reduce_scatter_backward(tensor.movedim(seq_dim, 0), cp_group)
    first, second = shares.chunk(2 * group_size(cp_group))[::2], shares.chunk(2 * group_size(cp_group))[1::2]
    return torch.cat((*first, *reversed(second))).movedim(0, seq_dim)


def _get_tokens_on_this_cp_rank(
    input_ids: Shaped[Tensor, "*whole"], cp_rank: int, cp_size: int, seq_dim: int = 1
) -> Shaped[Tensor, "*local"]:
    """Divide a sequence into 2·CP equal chunks; return the chunks `cp_rank` and 2·CP − 1 − `cp_rank`."""
    if cp_size == 1:
        return input_ids
    if input_ids.shape[seq_dim] % (2 * cp_size):
        raise ContractError(
            f"the number of tokens ({input_ids.shape[seq_dim]}) must be a multiple of 2 x {cp_size}; pad the sequence"
        )
    chunks = input_ids.chunk(2 * cp_size, dim=seq_dim)
    return torch.cat((chunks[cp_rank], chunks[-1 - cp_rank]), dim=seq_dim)


def _rank_of_columns(logits: Tensor, start: int, end: int) -> int:
    """Return the index of the vocabulary shard that has the token ids from `start` to `end` − 1."""
    size = logits.shape[-1]
    if end - start != size or start % size:
        raise ContractError(f"vocab_start_index={start} and vocab_end_index={end} do not fit a shard of {size} logits")
    return start // size

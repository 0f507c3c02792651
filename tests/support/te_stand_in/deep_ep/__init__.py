"""Stand-in for DeepEP's buffer of intranode messages, over torch's collectives, for tests without its kernels.

It has the signatures, orders and conventions of DeepEP 1.2's `deep_ep/buffer.py`, as far as Megatron calls it: received
tokens are sorted by the rank that sent them, each token is sent once to a rank that has some of its experts, and the
experts of other ranks are -1 with weight 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from deep_ep.utils import EventOverlap


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class Handle(NamedTuple):
    """Rows that this rank has sent, in the order of the receiving ranks, and how many rows go to and come from each."""

    rows: Tensor
    sent: list[int]
    received: list[int]
    num_tokens: int


class Buffer:
    num_sms = 20
    calls = 0
    """Number of dispatches and combines of this process; tests see by it that the buffer was used."""

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, **options: Any) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, None, Tensor, Tensor, EventOverlap]:
        ranks = self.group.size()
        assert topk_idx.dtype == torch.int64 and num_experts % ranks == 0
        chosen = torch.zeros(len(topk_idx), num_experts + 1, dtype=torch.bool)
        chosen.scatter_(1, topk_idx.where(topk_idx >= 0, num_experts), True)
        chosen = chosen[:, :-1]
        in_rank = chosen.view(len(topk_idx), ranks, -1).any(-1)
        return in_rank.sum(0).int(), None, chosen.sum(0).int(), in_rank, EventOverlap()

    def dispatch(
        self,
        x: Tensor,
        handle: Handle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        Buffer.calls += 1
        if handle is not None:
            return self._exchange(x[handle.rows], handle.sent, handle.received), None, None, None, None, EventOverlap()
        assert topk_idx is not None and topk_weights is not None and topk_weights.dtype == torch.float32
        assert num_tokens_per_rank is not None and is_token_in_rank is not None and num_tokens_per_expert is not None
        sent, received = num_tokens_per_rank.tolist(), torch.empty_like(num_tokens_per_rank)
        dist.all_to_all_single(received, num_tokens_per_rank, group=self.group)
        rows = is_token_in_rank.T.nonzero()[:, 1]
        handle = Handle(rows, sent, received.tolist(), len(x))
        hidden, experts, weights = (
            self._exchange(part[rows], handle.sent, handle.received) for part in (x, topk_idx, topk_weights)
        )
        count = len(num_tokens_per_expert) // self.group.size()
        first = self.group.rank() * count
        local = (experts >= first) & (experts < first + count)
        experts = (experts - first).masked_fill(~local, -1)
        counts = torch.bincount(experts[local], minlength=count).tolist()
        return hidden, experts, weights.masked_fill(~local, 0.0), counts, handle, EventOverlap()

    def combine(
        self,
        x: Tensor,
        handle: Handle,
        topk_weights: Tensor | None = None,
        bias: Any = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        Buffer.calls += 1
        sums = []
        for part in (x, topk_weights):
            if part is None:
                sums.append(None)
                continue
            returned = self._exchange(part, handle.received, handle.sent)
            sums.append(part.new_zeros(handle.num_tokens, part.size(1)).index_add_(0, handle.rows, returned))
        return sums[0], sums[1], EventOverlap()

    def _exchange(self, values: Tensor, sent: list[int], received: list[int]) -> Tensor:
        result = values.new_empty(sum(received), values.size(1))
        dist.all_to_all_single(
            result, values.contiguous(), output_split_sizes=received, input_split_sizes=sent, group=self.group
        )
        return result

"""Responses on their way between ranks, as tensors: fp64 holds tokens and log-probabilities exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float64
from torch import Tensor

from mcore_rl.distributed.collectives import broadcast_in_replica, gather_rows
from mcore_rl.distributed.topology import ParallelDimension, Topology
from mcore_rl.models.generation.interfaces import Response


@dataclass(frozen=True)
class ResponseTensors:
    """sizes: (tokens, whether it ended) of each response. tokens: (id, log-probability) of each token, one response
    after the other. Versions and experts are left out."""

    sizes: Float64[Tensor, "responses 2"]
    tokens: Float64[Tensor, "tokens 2"]

    @classmethod
    def of(cls, responses: Sequence[Response]) -> ResponseTensors:
        sizes = [(len(response.token_ids), response.ended) for response in responses]
        pairs = [pair for response in responses for pair in zip(response.token_ids, response.logprobs, strict=True)]
        return cls(*(torch.tensor(rows, dtype=torch.float64).view(-1, 2) for rows in (sizes, pairs)))

    def responses(self) -> list[Response]:
        """The inverse of `of`."""
        lengths = self.sizes[:, 0].long().tolist()
        ids, logprobs = self.tokens[:, 0].long().split(lengths), self.tokens[:, 1].split(lengths)
        ended = self.sizes[:, 1].bool().tolist()
        return [Response(i.tolist(), p.tolist(), end) for i, p, end in zip(ids, logprobs, ended, strict=True)]


def gather_responses(own: Sequence[Response], *dimensions: ParallelDimension) -> list[Response]:
    """Gather every rank's values along these dimensions, in rank order, the last one outermost. Collective."""
    tensors = ResponseTensors.of(own)
    gathered = ResponseTensors(gather_rows(tensors.sizes, *dimensions), gather_rows(tensors.tokens, *dimensions))
    return gathered.responses()


def share_responses(
    led: Sequence[Response],
    prompts: Sequence[Sequence[int]],
    topology: Topology,
    experts: tuple[int, int] | None = None,
) -> list[Response]:
    """The responses to `prompts` that the first rank of a replica has, on all of its ranks. Collective.

    Args:
        led: not looked at on other ranks.
        experts: (layers, topk) of those that come with the responses; None without any.
    """
    sizes, tokens = torch.zeros(len(prompts), 2, dtype=torch.float64), torch.zeros(0, 2, dtype=torch.float64)
    if topology.leads_replica:
        tensors = ResponseTensors.of(led)
        sizes, tokens = tensors.sizes, tensors.tokens
    sizes = broadcast_in_replica(sizes, topology)
    tokens = tokens if topology.leads_replica else tokens.new_zeros(int(sizes[:, 0].sum()), 2)
    responses = ResponseTensors(sizes, broadcast_in_replica(tokens, topology)).responses()
    if experts is not None:
        lengths = [len(prompt) + len(one.token_ids) for prompt, one in zip(prompts, responses, strict=True)]
        routed = torch.zeros(sum(lengths), *experts, dtype=torch.int16)
        if topology.leads_replica and led:
            routed = torch.cat([one.routed_experts for one in led if one.routed_experts is not None])
        parts = broadcast_in_replica(routed.view(torch.uint8), topology).view(torch.int16).split(lengths)
        responses = [replace(one, routed_experts=part) for one, part in zip(responses, parts, strict=True)]
    return responses

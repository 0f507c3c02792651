"""Requests to vLLM's servers, and the decoding of their packed answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Int16
from torch import Tensor

from mcore_rl.data.choices import ROUTED_EXPERTS
from mcore_rl.data.images import PlacedImage
from mcore_rl.distributed.sampling_mask import KeptTokens
from mcore_rl.models.generation.interfaces import Response
from mcore_rl.models.generation.vllm.images import check_prompt
from mcore_rl.models.generation.vllm.packed import LOWEST_LOGPROB, Array, unpack
from mcore_rl.models.megatron.families.mixtures import Experts

DTYPES = ("uint8", "uint16", "int32")
"""Types of routed experts."""


@dataclass(frozen=True)
class Request:
    """A request for a response.

    token_ids: tokens of the prompt.
    max_tokens: maximum number of tokens in the response.
    seed: seed of the response's random numbers.
    priority: requests with a lower number are served first.
    group: leading tokens that the prompt has in common with the prompts of other requests.
    num_likeliest: number of the likeliest tokens at each position that are returned with the response.
    images: the images among the prompt's tokens.
    """

    token_ids: tuple[int, ...]
    max_tokens: int
    seed: int
    priority: int
    group: tuple[int, ...]
    num_likeliest: int = 0
    images: tuple[PlacedImage, ...] = ()


@dataclass(frozen=True)
class Answer:
    """A response, and the versions of the weights that generated it.

    finish_reason: "stop", "length", or why the response is incomplete, such as "abort".
    spans: pairs (version, number of tokens) for consecutive tokens. A version is the name that the servers received
        with the weights.
    """

    response: Response
    finish_reason: str
    spans: list[tuple[str, int]]


def decode_answer(body: bytes, request: Request, experts: Experts | None, needs_mask: bool) -> Answer:
    """Decode a packed answer.

    Args:
        experts: description of the model's experts if the answer must have the experts of each token; else None.
        needs_mask: whether a complete answer must have a sampling mask.

    Raises:
        ValueError: the answer cannot be read, lacks the experts or the mask, or has other tokens for images; the
            message contains what was found and what was expected.
    """
    told, arrays = unpack(body)
    try:
        token_ids, logprobs, reason = arrays["token_ids"], arrays["logprobs"], told["finish_reason"]
        spans = [(version, end - start) for version, start, end in told["weight_versions"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"an answer without {error}") from None
    if token_ids.ndim != 1 or token_ids.shape != logprobs.shape:
        raise ValueError(f"{token_ids.shape} tokens, but {logprobs.shape} log-probabilities")
    response = Response(token_ids, logprobs, ended=reason == "stop")
    if reason not in ("stop", "length"):
        return Answer(response, reason, spans)
    if request.images:
        check_prompt(arrays.get("prompt_token_ids"), told.get("image_places", ()), request.token_ids, request.images)
    if request.num_likeliest:
        response.likeliest = _likeliest(arrays, request.num_likeliest)
    if experts is not None:
        found = decode_routed_experts(arrays.get("routed_experts"), len(request.token_ids) + len(token_ids), experts)
        response.choices = {ROUTED_EXPERTS: found}
    if needs_mask:
        response.kept_tokens = decode_sampling_mask(arrays.get("mask_counts"), arrays.get("mask_ids"), token_ids)
    return Answer(response, reason, spans)


def _likeliest(arrays: Mapping[str, Array], count: int) -> list[list[tuple[int, float]]]:
    """Return the `count` likeliest tokens of each position, the likeliest first.

    A server also lists the sampled token, perhaps twice, and excluded tokens.
    """
    ends = np.cumsum(arrays["likeliest_counts"]).tolist()
    ids, logprobs = arrays["likeliest_ids"].tolist(), arrays["likeliest_logprobs"].tolist()
    positions = []
    for start, end in pairwise([0, *ends]):
        pairs = dict(zip(ids[start:end], logprobs[start:end], strict=True)).items()
        kept = [pair for pair in pairs if pair[1] > LOWEST_LOGPROB]
        positions.append(sorted(kept, key=lambda pair: -pair[1])[:count])
    return positions


def decode_routed_experts(
    array: Array | None, num_tokens: int, experts: Experts
) -> Int16[Tensor, "tokens layers topk"]:
    """Decode a server's `routed_experts`: the experts of each token of a prompt and its response.

    The result is −1 at the last token. This token was not an input of the model.

    Args:
        array: [num_tokens − 1, layers of the model, topk]. The entries of dense layers have no meaning and are removed
            here.
        num_tokens: number of tokens in prompt and response.

    Raises:
        ValueError: `array` is missing or invalid; the message contains what was found and what was expected.
    """
    if array is None:
        raise ValueError("no routed_experts; start the server with --enable-return-routed-experts")
    expected = (num_tokens - 1, len(experts.sparse_layers), experts.topk)
    if array.shape != expected or array.dtype.name not in DTYPES:
        raise ValueError(
            f"routed_experts of shape {array.shape} and type {array.dtype}; the shape must be {expected} (tokens "
            f"fed to the model, layers, experts per token), the type one of {', '.join(DTYPES)}"
        )
    chosen = array[:, list(experts.sparse_layers)].astype(np.int64)
    if chosen.size and not 0 <= chosen.min() <= chosen.max() < experts.count:
        raise ValueError(
            f"routed_experts with ids {chosen.min()} to {chosen.max()}, but the model has {experts.count} experts"
        )
    ordered = np.sort(chosen, axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():  # true of rows that were never written
        raise ValueError("routed_experts that contain the same expert twice for a token")
    return torch.from_numpy(np.pad(chosen, ((0, 1), (0, 0), (0, 0)), constant_values=-1)).short()


def decode_sampling_mask(counts: Array | None, ids: Array | None, token_ids: Array) -> KeptTokens:
    """Decode a server's sampling mask: the tokens that the server's filters kept at each position of a response.

    Args:
        counts: number of kept tokens at each position.
        ids: the kept tokens, position after position.
        token_ids: the response.

    Raises:
        ValueError: the mask is missing, has another length than the response, or lacks a sampled token.
    """
    if counts is None or ids is None:
        raise ValueError("no sampling_mask; start the server with --return-sampling-mask")
    if len(counts) != len(token_ids):
        raise ValueError(f"a sampling_mask of {len(counts)} positions, but {len(token_ids)} tokens")
    if (counts < 0).any() or counts.sum() != len(ids):
        raise ValueError(f"a sampling_mask of {len(ids)} tokens, but with counts that sum to {counts.sum()}")
    position = np.repeat(np.arange(len(counts)), counts)
    has_sampled = np.zeros(len(counts), bool)
    has_sampled[position[ids == token_ids[position]]] = True
    if not has_sampled.all():
        at = int(has_sampled.argmin())
        raise ValueError(f"a sampling_mask without the sampled token {token_ids[at]} at position {at}")
    return KeptTokens(torch.from_numpy(counts).int(), torch.from_numpy(ids).int())

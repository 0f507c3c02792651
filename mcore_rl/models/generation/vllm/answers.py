"""Requests to vLLM's servers, and the decoding of their packed answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Int16
from torch import Tensor

from mcore_rl.data.choices import ROUTED_EXPERTS
from mcore_rl.data.images import PlacedImage
from mcore_rl.distributed.sampling_mask import KeptTokens
from mcore_rl.models.generation.interfaces import Response
from mcore_rl.models.generation.vllm.images import check_prompt
from mcore_rl.models.generation.vllm.packed import (
    LOWEST_LOGPROB,
    Array,
    check_ids,
    check_vector,
    is_size,
    shown,
    unpack,
)
from mcore_rl.models.megatron.families.mixtures import Experts

DTYPES = ("uint8", "uint16", "int32")
"""Types of routed experts."""
MAX_NAME = 200
"""Maximum number of characters of a version or a reason. The trainer's names of versions have fewer than 40."""


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
        ValueError: the answer cannot be read, lacks the experts or the mask, has other tokens for images, or does not
            fit itself or the request; the message contains what was found and what was expected.
    """
    told, arrays = unpack(body)
    token_ids, logprobs = _ids(arrays, "token_ids"), _logprobs(arrays, "logprobs")
    reason, spans = _entry(told, "finish_reason"), _spans(_entry(told, "weight_versions"))
    if len(token_ids) != len(logprobs):
        raise ValueError(f"{token_ids.shape} tokens, but {logprobs.shape} log-probabilities")
    if len(token_ids) > request.max_tokens:
        raise ValueError(f"{len(token_ids)} tokens, but {request.max_tokens} were asked for at most")
    if not _is_name(reason):
        raise ValueError(f"the finish_reason {shown(reason)} instead of a short text")
    response = Response(token_ids, logprobs, ended=reason == "stop")
    if reason not in ("stop", "length"):  # its versions need not be those of all its tokens
        return Answer(response, reason, spans)
    if (versioned := sum(count for _, count in spans)) != len(token_ids):
        raise ValueError(f"weight_versions of {versioned} tokens, but {len(token_ids)} tokens")
    if request.images:
        check_prompt(arrays.get("prompt_token_ids"), told.get("image_places", ()), request.token_ids, request.images)
    if request.num_likeliest:
        response.likeliest = _likeliest(arrays, len(token_ids), request.num_likeliest)
    if experts is not None:
        found = decode_routed_experts(arrays.get("routed_experts"), len(request.token_ids) + len(token_ids), experts)
        response.choices = {ROUTED_EXPERTS: found}
    if needs_mask:
        response.kept_tokens = decode_sampling_mask(arrays.get("mask_counts"), arrays.get("mask_ids"), token_ids)
    return Answer(response, reason, spans)


def _entry(entries: Mapping[str, Any], name: str) -> Any:
    if name not in entries:
        raise ValueError(f"an answer without '{name}'")
    return entries[name]


def _ids(arrays: Mapping[str, Array], name: str) -> Array:
    return check_ids(_entry(arrays, name), name)


def _logprobs(arrays: Mapping[str, Array], name: str) -> Array:
    logprobs = check_vector(_entry(arrays, name), name, "float32")
    is_finite = np.isfinite(logprobs)
    if not is_finite.all():
        at = int(is_finite.argmin())
        raise ValueError(f"{name} with {logprobs[at]} at {at}, which is not finite")
    return logprobs


def _spans(entries: Any) -> list[tuple[str, int]]:
    """Return pairs (version, number of tokens) of the entry `weight_versions`, a list of [version, start, end]."""
    if not isinstance(entries, list):
        raise ValueError(f"the weight_versions {shown(entries)} instead of a list")
    for entry in entries:
        if not _is_span(entry):
            raise ValueError(
                f"the entry {shown(entry)} in weight_versions; it must be a version, the first of its tokens, "
                "and the token after its last"
            )
    return [(version, end - start) for version, start, end in entries]


def _is_span(entry: Any) -> bool:
    if not isinstance(entry, list) or len(entry) != 3:
        return False
    version, *ends = entry
    return _is_name(version) and all(map(is_size, ends)) and ends[0] <= ends[1]


def _is_name(value: Any) -> bool:
    """Return whether `value` is a text that a message can contain."""
    return isinstance(value, str) and len(value) <= MAX_NAME and value.isprintable()


def _likeliest(arrays: Mapping[str, Array], num_tokens: int, count: int) -> list[list[tuple[int, float]]]:
    """Return the `count` likeliest tokens of each of `num_tokens` positions, the likeliest first.

    A server also lists the sampled token, perhaps twice, and excluded tokens.

    Raises:
        ValueError: there are no such arrays, or their lengths contradict each other.
    """
    listed, of_listed = _ids(arrays, "likeliest_ids"), _logprobs(arrays, "likeliest_logprobs")
    if len(listed) != len(of_listed):
        raise ValueError(f"{len(listed)} likeliest_ids, but {len(of_listed)} likeliest_logprobs")
    counts = _entry(arrays, "likeliest_counts")
    _check_counts(counts, "likeliest_counts", "a list of likeliest tokens", num_tokens, len(listed))
    ends, ids, logprobs = np.cumsum(counts).tolist(), listed.tolist(), of_listed.tolist()
    positions = []
    for start, end in pairwise([0, *ends]):
        pairs = dict(zip(ids[start:end], logprobs[start:end], strict=True)).items()
        kept = [pair for pair in pairs if pair[1] > LOWEST_LOGPROB]
        positions.append(sorted(kept, key=lambda pair: -pair[1])[:count])
    return positions


def _check_counts(counts: Array, name: str, of: str, num_tokens: int, total: int) -> None:
    """Raise ValueError unless `counts`, the array `name`, divides `total` entries among `num_tokens` positions.

    Args:
        of: what has the counts, for the message.
    """
    if len(check_vector(counts, name, "int32")) != num_tokens:
        raise ValueError(f"{of} of {len(counts)} positions, but {num_tokens} tokens")
    if (lowest := counts.min(initial=0)) < 0 or counts.sum() != total:
        raise ValueError(f"{of} of {total} tokens, but with counts that sum to {counts.sum()}, from {lowest} up")


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
        counts: number of kept tokens at each position, [tokens] int32.
        ids: the kept tokens, position after position, [total] int32.
        token_ids: the response, [tokens] int32.

    Raises:
        ValueError: the mask is missing, has another type or length, or lacks a sampled token; the message contains what
            was found and what was expected.
    """
    if counts is None or ids is None:
        raise ValueError("no sampling_mask; start the server with --return-sampling-mask")
    _check_counts(counts, "mask_counts", "a sampling_mask", len(token_ids), len(check_ids(ids, "mask_ids")))
    position = np.repeat(np.arange(len(counts)), counts)
    has_sampled = np.zeros(len(counts), bool)
    has_sampled[position[ids == token_ids[position]]] = True
    if not has_sampled.all():
        at = int(has_sampled.argmin())
        raise ValueError(f"a sampling_mask without the sampled token {token_ids[at]} at position {at}")
    return KeptTokens(torch.from_numpy(counts).int(), torch.from_numpy(ids).int())

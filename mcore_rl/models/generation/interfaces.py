"""The interface of generation backends, and the exchange of responses between ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch
from jaxtyping import Float32, Float64, Int32
from torch import Tensor

from mcore_rl.data.batching import padded_rows
from mcore_rl.data.choices import RecordedChoice, padded_choices
from mcore_rl.data.images import PlacedImage
from mcore_rl.data.token_store import images_column
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.distributed.collectives import broadcast_in_replica, gather_rows
from mcore_rl.distributed.sampling_mask import KeptTokens
from mcore_rl.distributed.topology import ParallelDimension, Topology
from mcore_rl.errors import TrainingError, UserError


class GenerationDatumSpec(TypedDict):
    """Prompts for generation.

    input_ids: [B, S] right-padded.
    input_lengths: [B].
    sample_ids: [B] integers that identify the samples. Seed and sample id determine the random numbers of a sample;
        the parallel layout and the other samples in the batch have no influence. Default: the row numbers.
    images: for each prompt, its images. Default: no prompt has images.
    """

    input_ids: torch.Tensor
    input_lengths: torch.Tensor
    sample_ids: NotRequired[torch.Tensor]
    images: NotRequired[list[Sequence[PlacedImage]]]


class GenerationOutputSpec(TypedDict):
    """Prompts with their responses.

    output_ids: [B, S'] prompt and response, right-padded; a stop token is part of the response.
    logprobs: [B, S'] log-probabilities of the response's tokens, aligned with `output_ids`; 0 elsewhere. They are taken
        in the sampling distribution (temperature, top-k, top-p and min-p), or in the model's own distribution for
        greedy generation.
    generation_lengths: [B] number of tokens in each response, at least 1.
    unpadded_sequence_lengths: [B] number of tokens in prompt and response.
    truncated: [B] True if the limit of new tokens ended the response.
    routed_experts, chosen_keys: the recorded choices (`CHOICES`), with S' in place of S. The values are −1 where a
        token was not an input of the model, such as at the last token of a response. Present if they are recorded.
    kept_tokens: for each response, the tokens that the sampler's filters (such as top-k) kept. Present if the sampling
        parameters ask for these tokens.
    """

    output_ids: torch.Tensor
    logprobs: torch.Tensor
    generation_lengths: torch.Tensor
    unpadded_sequence_lengths: torch.Tensor
    truncated: torch.Tensor
    routed_experts: NotRequired[torch.Tensor]
    chosen_keys: NotRequired[torch.Tensor]
    kept_tokens: NotRequired[list[KeptTokens]]


class GenerationInterface(ABC):
    """A generator of responses to prompts. All ranks call each method together.

    All ranks pass the same arguments, except for prompts in a `LocalBatch`: each replica passes its own prompts.

    max_sequence_length: maximum number of tokens in a prompt and its response together.
    """

    max_sequence_length: int

    @abstractmethod
    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Return a response to the prompt in each row of `data`."""

    @abstractmethod
    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Prepare the backend to generate with the policy's current weights; return True on success.

        Args:
            weight_version: version number of these weights. A backend that has its own copy of the weights copies them
                only if the number has changed.
        """

    @abstractmethod
    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Release the memory that only generation needs; return True on success."""

    def close(self) -> None:
        """End everything that the backend has started; generation is impossible afterwards."""
        return None


class RequestError(TrainingError):
    """Raised if one response cannot be generated; other requests can still succeed."""


@dataclass(frozen=True, eq=False)
class PromptScores:
    """Log-probabilities of a prompt's tokens after the first, in the model's own distribution.

    likeliest: for each of these tokens, the likeliest tokens in its place, as in `Response`.
    """

    logprobs: Float32[np.ndarray, " tokens-1"]
    likeliest: Sequence[Sequence[tuple[int, float]]]


@dataclass(eq=False)  # arrays have no truth value: equal is the same object
class Response:
    """The response to one prompt.

    token_ids, logprobs: may be given as any sequences, which become arrays of these types.
    logprobs: log-probability of each token of the response.
    ended: True if a stop token or stop string ended the response; False if the limit of new tokens ended it.
    weight_versions: pairs (version of the weights, number of consecutive tokens that these weights generated).
    choices: the recorded choices by name (`CHOICES`), [tokens of prompt and response, layers, size]. They are −1 for a
        token that was not an input of the model, such as the last.
    kept_tokens: the tokens that the sampler's filters kept at each position of the response; None if these tokens are
        not returned.
    likeliest: for each position, the likeliest tokens with their log-probabilities, the likeliest first, if the request
        asks for them.
    prompt_scores: what the request asks for of its prompt (`RequestOptions.scores_prompt`).
    """

    token_ids: Int32[np.ndarray, " tokens"]
    logprobs: Float32[np.ndarray, " tokens"]
    ended: bool
    weight_versions: Sequence[tuple[int, int]] = ()
    choices: Mapping[str, torch.Tensor] = field(default_factory=dict)
    kept_tokens: KeptTokens | None = None
    likeliest: Sequence[Sequence[tuple[int, float]]] = ()
    prompt_scores: PromptScores | None = None

    def __post_init__(self) -> None:
        self.token_ids = np.asarray(self.token_ids, np.int32)
        self.logprobs = np.asarray(self.logprobs, np.float32)


@dataclass(frozen=True)
class Distribution:
    """The distribution from which a request's tokens are sampled; see `SamplingParams`."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True)
class RequestOptions:
    """Options of one request. The limits of the run's sampling parameters apply too.

    max_new_tokens: maximum number of tokens of the response; None for the run's limit.
    stop_strings: texts that end the response, in addition to the stop strings of the run.
    num_likeliest: number of the likeliest tokens at each position that are returned with the response.
    distribution: the request's own; None for that of the run.
    scores_prompt: return `Response.prompt_scores`. Only the training processes can.
    on_tokens: called, by the generating thread, with the new tokens of the response whenever it has grown; not with the
        last ones. Engines that return only whole responses do not call it.
    """

    max_new_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    num_likeliest: int = 0
    distribution: Distribution | None = None
    scores_prompt: bool = False
    on_tokens: Callable[[Response], None] | None = None


NO_OPTIONS = RequestOptions()


class RequestEngine(ABC):
    """Answers single requests, on the first rank of each data-parallel replica."""

    max_sequence_length: int

    @abstractmethod
    def submit(
        self,
        prompt: tuple[int, ...],
        sample_id: int,
        group: tuple[int, ...],
        greedy: bool = False,
        options: RequestOptions = NO_OPTIONS,
        images: Sequence[PlacedImage] = (),
    ) -> Future[Response]:
        """Generate the response to one prompt in the background. Not collective.

        The weights may change while the response is generated.

        Args:
            sample_id: identifies the sample, as in `generate`. Of the waiting requests, the one with the lowest id is
                served first.
            group: the first tokens of the prompt. Prompts with the same group may share these tokens' computation.
            images: the images among the prompt's tokens.
        """

    def cancel(self, future: Future[Response]) -> None:
        """Stop generating the response of a request, if it is not complete. The future is then cancelled."""
        future.cancel()


class StreamingGeneration(GenerationInterface, RequestEngine):
    """A backend that also returns responses one by one."""


def prompts_to_answer(
    prompts: Sequence[Sequence[int] | np.ndarray[Any, Any]],
    sample_ids: Sequence[int],
    images: Sequence[Sequence[PlacedImage]] = (),
) -> BatchedDataDict[GenerationDatumSpec]:
    """Return `prompts`, lists of tokens, and their images as a `GenerationDatumSpec`."""
    ids = torch.tensor(sample_ids, dtype=torch.long)
    return BatchedDataDict(**padded_rows(prompts), sample_ids=ids, **images_column(images))


def prompts_of(data: BatchedDataDict[Any], max_sequence_length: int) -> list[tuple[int, tuple[int, ...]]]:
    """Return the sample id and the prompt's tokens for each row of `data`, a `GenerationDatumSpec`.

    Raises:
        UserError: a prompt is empty, or leaves no room for a response.
    """
    lengths = data["input_lengths"].tolist()
    sample_ids = data["sample_ids"].tolist() if "sample_ids" in data else range(len(lengths))
    for row, length in enumerate(lengths):
        if not 0 < length < max_sequence_length:
            raise UserError(
                f"prompt {row} has {length} tokens; it must have at least 1, and fewer than "
                f"max_sequence_length={max_sequence_length}"
            )
    rows = zip(sample_ids, data["input_ids"].tolist(), lengths, strict=True)
    return [(sample_id, tuple(ids[:length])) for sample_id, ids, length in rows]


def output_of(
    prompts: Sequence[Sequence[int]], responses: Sequence[Response], pad_token_id: int
) -> BatchedDataDict[GenerationOutputSpec]:
    """Return prompts with their responses as right-padded rows.

    The result contains recorded choices if all responses have them, and `kept_tokens` if any response has them.
    """
    lengths = [len(prompt) + len(response.token_ids) for prompt, response in zip(prompts, responses, strict=True)]
    output_ids = torch.full((len(prompts), max(lengths, default=1)), pad_token_id)
    logprobs = torch.zeros(len(prompts), max(lengths, default=1))
    for row, (prompt, response, length) in enumerate(zip(prompts, responses, lengths, strict=True)):
        output_ids[row, : len(prompt)] = torch.tensor(prompt)
        output_ids[row, len(prompt) : length] = torch.tensor(response.token_ids)
        logprobs[row, len(prompt) : length] = torch.tensor(response.logprobs)
    output: BatchedDataDict[GenerationOutputSpec] = BatchedDataDict(
        output_ids=output_ids,
        logprobs=logprobs,
        generation_lengths=torch.tensor([len(response.token_ids) for response in responses], dtype=torch.long),
        unpadded_sequence_lengths=torch.tensor(lengths, dtype=torch.long),
        truncated=torch.tensor([not response.ended for response in responses], dtype=torch.bool),
    )
    output.update(padded_choices([response.choices for response in responses]))
    if any(response.kept_tokens is not None for response in responses):
        output["kept_tokens"] = [_kept_of(response) for response in responses]
    return output


def _kept_of(response: Response) -> KeptTokens:
    return KeptTokens.none(len(response.token_ids)) if response.kept_tokens is None else response.kept_tokens


@dataclass(frozen=True)
class ResponseTensors:
    """Responses converted to tensors that ranks can exchange, without weight versions and recorded choices.

    sizes: for each response, its number of tokens, its `ended` (0 or 1), and its number of kept tokens.
    tokens: for each token of all responses in order, its id, its log-probability, and its number of kept tokens.
    kept: the kept tokens of all responses in order.
    """

    sizes: Float64[Tensor, "responses 3"]
    tokens: Float64[Tensor, "tokens 3"]
    kept: Int32[Tensor, " kept"]

    @classmethod
    def of(cls, responses: Sequence[Response]) -> ResponseTensors:
        all_kept = [_kept_of(response) for response in responses]
        sizes = [
            (len(response.token_ids), response.ended, len(kept.ids))
            for response, kept in zip(responses, all_kept, strict=True)
        ]
        kept_tokens = KeptTokens.concatenated(all_kept)
        columns = [
            np.concatenate([np.zeros(0), *parts])  # float64, which has every id and every log-probability exactly
            for parts in ([one.token_ids for one in responses], [one.logprobs for one in responses])
        ]
        tokens = np.stack([*columns, kept_tokens.counts.numpy()], axis=1)
        of_sizes = torch.tensor(sizes, dtype=torch.float64).view(-1, 3)
        return cls(of_sizes, torch.from_numpy(tokens), kept_tokens.ids)

    def responses(self) -> list[Response]:
        """Return the responses; the inverse of `of`."""
        lengths, ended = self.sizes[:, 0].long().tolist(), self.sizes[:, 1].bool().tolist()
        ids, logprobs = self.tokens[:, 0].int().split(lengths), self.tokens[:, 1].float().split(lengths)
        kept: Sequence[KeptTokens | None] = [None] * len(lengths)
        if len(self.kept):
            kept = KeptTokens(self.tokens[:, 2].int(), self.kept).split(lengths)
        return [
            Response(i.cpu().numpy(), p.cpu().numpy(), end, kept_tokens=k)
            for i, p, end, k in zip(ids, logprobs, ended, kept, strict=True)
        ]


def gather_responses(own: Sequence[Response], *dimensions: ParallelDimension) -> list[Response]:
    """Gather responses from all ranks along `dimensions`; return them in rank order. Collective.

    With several dimensions, the rank in the first one changes fastest.
    """
    tensors = ResponseTensors.of(own)
    parts = tensors.sizes, tensors.tokens, tensors.kept
    return ResponseTensors(*(gather_rows(part, *dimensions) for part in parts)).responses()


def share_responses(
    led: Sequence[Response],
    prompts: Sequence[Sequence[int]],
    topology: Topology,
    recorded: Sequence[RecordedChoice] = (),
) -> list[Response]:
    """Broadcast the responses to `prompts` from the first rank of a replica to its other ranks. Collective.

    Args:
        led: the responses on the replica's first rank; ignored on other ranks.
        recorded: descriptions of the responses' choices.
    """
    tensors = ResponseTensors.of(led if topology.leads_replica else ())
    sizes = tensors.sizes if topology.leads_replica else tensors.sizes.new_zeros(len(prompts), 3)
    sizes = broadcast_in_replica(sizes, topology)
    tokens, kept = tensors.tokens, tensors.kept
    if not topology.leads_replica:
        tokens = tokens.new_zeros(int(sizes[:, 0].sum()), 3)
        kept = kept.new_zeros(int(sizes[:, 2].sum()))
    tokens, kept = (broadcast_in_replica(part, topology) for part in (tokens, kept))
    responses = ResponseTensors(sizes, tokens, kept).responses()
    lengths = [len(prompt) + len(one.token_ids) for prompt, one in zip(prompts, responses, strict=True)]
    for choice in recorded:
        values = choice.unknown(sum(lengths))
        if topology.leads_replica and led:
            values = torch.cat([one.choices[choice.name] for one in led])
        parts = broadcast_in_replica(values.view(torch.uint8), topology).view(choice.dtype).split(lengths)
        responses = [
            replace(one, choices={**one.choices, choice.name: part}) for one, part in zip(responses, parts, strict=True)
        ]
    return responses

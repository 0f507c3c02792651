"""The sequences of a simulated step: their lengths and images, and an invented batch of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mcore_rl.config import DistillationConfig, DPOConfig, KTOConfig, PPOConfig, RLConfig, TrainingConfig
from mcore_rl.data.images import PlacedImage
from mcore_rl.data.token_store import images_column
from mcore_rl.errors import UserError
from mcore_rl.losses.options import OF_BATCH


@dataclass(frozen=True)
class Sequences:
    """The lengths of a global batch's sequences.

    lengths: number of tokens of each sequence.
    responses: number of trained tokens at the end of each sequence.
    images: the images of each sequence; () if no sequence has images.
    """

    lengths: tuple[int, ...]
    responses: tuple[int, ...]
    images: tuple[tuple[PlacedImage, ...], ...] = ()


def invented_batch(config: TrainingConfig, sequences: Sequences) -> Any:
    """Return an invented global batch with sequences of these lengths, and with all columns that the loss reads."""
    import torch

    from mcore_rl.distributed.batched_data_dict import BatchedDataDict

    lengths, responses = torch.tensor(sequences.lengths), torch.tensor(sequences.responses)
    shape = (len(lengths), int(lengths.max()))
    places, rows = torch.arange(shape[1]), torch.arange(shape[0])[:, None]
    starts = (lengths - responses)[:, None]
    is_response = places >= starts
    trained = (places < lengths[:, None]) & is_response
    # One prompt per group. Prompts and responses begin with digits of their numbers, so no others have common prefixes.
    numbers = torch.where(is_response, rows, rows // config.rows_per_group)
    digits = numbers // 50 ** torch.where(is_response, places - starts, places).clamp(max=5)
    data: dict[str, Any] = {
        "input_ids": 1 + (places + 7 * digits) % 50,  # not the padding token, whose embedding is 0
        "input_lengths": lengths,
        "token_mask": trained.float(),
        "sample_mask": torch.ones(shape[0]),
    }
    data |= images_column(sequences.images)
    columns: tuple[str, ...] = ()
    if config.keeps_reference or (isinstance(config, DPOConfig) and config.dpo.needs_reference):
        columns = ("reference_policy_logprobs",)
    if isinstance(config, RLConfig):
        columns += ("generation_logprobs", "advantages", *(["prev_logprobs"] if config.scores_samples() else []))
        if config.loss.positive_example_nll_weight:
            data["rewards"], data["num_positive_tokens"] = torch.ones(shape[0]), trained.sum().expand(shape[0]).float()
        if config.loss.observation_nll_weight:
            data["num_observation_tokens"] = torch.ones(shape[0])
    if isinstance(config, PPOConfig):
        columns += ("values", "returns")
    data |= {name: torch.zeros(shape) for name in columns}
    if isinstance(config, DPOConfig):
        data |= {f"{kind}_partner": torch.zeros(shape[0]) for kind in config.dpo.preference_losses if kind in OF_BATCH}
    if isinstance(config, KTOConfig):
        data["kl_reference_point"] = torch.zeros(shape[0])
        data["desirable"] = torch.arange(shape[0]) % 2 == 0
    if isinstance(config, DistillationConfig) and config.distillation.form == "sampled":
        data["teacher_logprobs"] = torch.zeros(shape)
    elif isinstance(config, DistillationConfig) and config.distillation.topk is not None:
        likeliest = torch.arange(config.distillation.topk).expand(*shape, -1)
        data["teacher_topk_indices"], data["teacher_topk_logits"] = likeliest.contiguous(), likeliest.float()
    return BatchedDataDict(data)


def sequences_of(
    config: TrainingConfig,
    lengths: Sequence[int],
    response_part: float | None = None,
    image_tokens: Sequence[int] = (),
) -> Sequences:
    """Return the lengths of all sequences of a global batch. The sequences take the given `lengths` in turn.

    Args:
        response_part: number of response (trained) tokens in each sequence, as a fraction of its length. The default is
            the value nearest to a half that the limits of generated responses and their prompts allow.
        image_tokens: number of tokens of each image in a prompt. Only prompts of one group have the same images.

    Raises:
        UserError: the run cannot have responses of such lengths, or a prompt is too short for the images.
    """
    found = _sequences_of(config, lengths, response_part)
    if not image_tokens:
        return found
    needed = 1 + sum(image_tokens)
    for length, response in zip(found.lengths, found.responses, strict=True):
        if length - response < needed:
            raise UserError(
                f"--image-tokens: the images have {needed - 1} tokens, but a sequence of {length} tokens has a prompt "
                f"of {length - response}; write longer --lengths or a smaller --response-part"
            )
    groups = [row // config.rows_per_group for row in range(len(found.lengths))]
    return replace(found, images=tuple(_invented_images(image_tokens, group) for group in groups))


def _invented_images(tokens: Sequence[int], group: int) -> tuple[PlacedImage, ...]:
    """Return images of these numbers of tokens, as square as possible, that begin at the second token of a prompt."""
    found, start = list[PlacedImage](), 1
    for number, count in enumerate(tokens):
        rows = max(n for n in range(1, math.isqrt(count) + 1) if count % n == 0)
        found.append(PlacedImage(start, (1, rows, count // rows), f"invented {group} {number}", ""))
        start += count
    return tuple(found)


def _sequences_of(config: TrainingConfig, lengths: Sequence[int], response_part: float | None) -> Sequences:
    rows = rows_of_batch(config)
    chosen = [min(lengths[i % len(lengths)], config.data.max_sequence_length) for i in range(rows)]
    if response_part is None:
        limits = [answers_of(config, n) for n in chosen]
        nearest = (min(max(math.ceil(n / 2), low), high) for n, (low, high) in zip(chosen, limits, strict=True))
        return Sequences(tuple(chosen), tuple(nearest))
    responses = tuple(math.ceil(n * response_part - 1e-9) for n in chosen)  # 0.1 × 30 gives 3, not 4
    for length, response in zip(chosen, responses, strict=True):
        least, most = answers_of(config, length)
        if not least <= response <= most:
            raise UserError(
                f"--response-part {response_part:g}: a response would have {response} of {length} tokens; "
                f"max_new_tokens, turns and data.max_sequence_length allow {least} to {most}"
            )
    return Sequences(tuple(chosen), responses)


def answers_of(config: TrainingConfig, length: int) -> tuple[int, int]:
    """Return the minimum and the maximum number of response (trained) tokens in a sequence of `length` tokens."""
    longest = config.max_answer_length
    if longest is None:
        return 1, length
    if isinstance(config, RLConfig) and config.environment.max_turns == 1:  # the other tokens are the prompt
        return max(1, length - config.max_prompt_length), min(longest, length - 1)
    return 1, min(longest, length - 1)


def rows_of_batch(config: TrainingConfig) -> int:
    """Return the number of sequences in the batch of a step."""
    if isinstance(config, RLConfig):
        return config.rollouts.num_prompts_per_step * config.rollouts.num_generations_per_prompt
    return config.batch.global_batch_size * config.rows_per_unit

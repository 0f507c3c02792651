"""The models of a run and their tokenizers, looked at before any of them is built."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mcore_rl.config import DistillationConfig, RLConfig, TrainingConfig
from mcore_rl.config.algorithms import JUDGE, TEACHER, configs_beside
from mcore_rl.data.tokenize import load_tokenizer
from mcore_rl.errors import UserError
from mcore_rl.models.megatron.families.base import REWARD_HEAD
from mcore_rl.models.megatron.hf_checkpoint import SafetensorsDirectory, missing_files
from mcore_rl.models.megatron.hf_config import check_model_fits, load_hf_config
from mcore_rl.models.megatron.weights import check_hf_tensors

POLICY = "model.path"
"""The key of the model that is trained."""


def check_models(config: TrainingConfig) -> dict[str, Any]:
    """The transformers configurations of the policy and of the models beside it, by the keys that name them.

    Raises:
        UserError: one of them cannot be used so, or not beside the policy.
    """
    found = {POLICY: _checked(config)}
    for key, other in configs_beside(config).items():
        with _named_by(key, other.model.path):
            found[key] = _checked(other)
    if isinstance(config, DistillationConfig):
        _check_teacher(config, found)
    return found


def _checked(config: TrainingConfig) -> Any:
    model = config.model
    hf = load_hf_config(model.path, model.trust_remote_code, model.head)
    check_model_fits(hf, config.parallel, config.data.max_sequence_length, model)
    check_positions(hf, config.data.max_sequence_length)
    return hf


def check_weights(config: TrainingConfig, found: Mapping[str, Any], needed: bool = True) -> None:
    """Compare names and shapes of the models' weights with their configurations.

    Args:
        found: what `check_models` returns.
        needed: whether a model must have its weights there; weights that are there, all of them, are looked at anyway.

    Raises:
        UserError: they are others, or not those of a reward model where one judges.
    """
    for key, one in {POLICY: config, **configs_beside(config)}.items():
        path = one.model.path
        with _named_by(key, path):
            if needed or not missing_files(path):
                source = SafetensorsDirectory(path)
                check_hf_tensors(found[key], source)
                if key == JUDGE and REWARD_HEAD not in source.names():
                    raise UserError(f"{POLICY}: {path} is no reward model: it has no {REWARD_HEAD}")


def check_positions(hf_config: Any, max_sequence_length: int) -> None:
    """Refuse sequences longer than those that the model tells positions of.

    Raises:
        UserError: naming the key.
    """
    own = getattr(hf_config, "max_position_embeddings", None) or math.inf
    rope = getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {}
    positions = max(own, (rope.get("factor") or 1.0) * (rope.get("original_max_position_embeddings") or own))
    if max_sequence_length > positions:
        raise UserError(
            f"data.max_sequence_length={max_sequence_length}: the model has {positions:.0f} positions "
            "(max_position_embeddings)"
        )


def _check_teacher(config: DistillationConfig, found: Mapping[str, Any]) -> None:
    topk, rows, own = config.distillation.topk, found[TEACHER].vocab_size, found[POLICY].vocab_size
    if topk is not None and rows > own:
        raise UserError(
            f"{TEACHER}: {config.distillation.teacher} has an LM head of {rows} rows, the student one of {own}, so "
            "that a token of the teacher's likeliest may be none of the student's; set distillation.topk=null"
        )
    if topk is not None and topk > rows:
        raise UserError(f"distillation.topk={topk}: the teacher has {rows} tokens")


def check_tokenizers(config: TrainingConfig, found: Mapping[str, Any], tokenizer: Any) -> None:
    """Compare the policy's tokenizer with its model, and with those of the models beside it.

    Args:
        found: what `check_models` returns.

    Raises:
        UserError: an id beyond a model's embeddings, or a model that has other tokens than the policy.
    """
    size = found[POLICY].vocab_size
    if len(tokenizer) > size:
        raise UserError(f"{POLICY}: the tokenizer has {len(tokenizer)} tokens, the model's vocabulary {size}")
    for key, other in configs_beside(config).items():
        model = other.model
        with _named_by(key, model.path):
            own = load_tokenizer(model.path, model.trust_remote_code)
        if key != JUDGE:
            _check_vocabulary(f"{key}: {model.path}", own.get_vocab(), tokenizer.get_vocab())
            if len(own) > found[key].vocab_size:
                raise UserError(
                    f"{key}: {model.path} has {found[key].vocab_size} rows of embeddings for {len(own)} tokens"
                )
        elif isinstance(config, RLConfig) and config.environment.format == "chat" and not own.chat_template:
            raise UserError(
                f"{key}: the tokenizer of {model.path} has no chat template; set environment.format=text if the model "
                "was trained on plain prompts and completions"
            )


def _check_vocabulary(model: str, own: dict[str, int], policy: dict[str, int]) -> None:
    """
    Raises:
        UserError: a token has another id, or none, on one of the two sides; the first one is named.
    """
    different = [token for token in own.keys() | policy.keys() if own.get(token) != policy.get(token)]
    if different:
        last = max(len(own), len(policy))
        token = min(different, key=lambda token: (min(own.get(token, last), policy.get(token, last)), token))
        ids = [f"id {ids[token]}" if token in ids else "no token" for ids in (own, policy)]
        raise UserError(
            f"{model} has another vocabulary than {POLICY} ({len(own)} and {len(policy)} tokens; {token!r} is "
            f"{ids[0]} of its own, {ids[1]} of the policy's); use a model with the policy's tokenizer"
        )


@contextmanager
def _named_by(key: str, path: Path) -> Iterator[None]:
    """What is wrong with a model beside the policy is told of it, not of the policy."""
    try:
        yield
    except UserError as error:
        if key == POLICY:
            raise
        told = str(error).replace("; set model.head=reward", ", where a language model is needed")
        if key == JUDGE:
            told = told.replace("data.max_sequence_length", "environment.max_sequence_length")
        # A limit or a layout is told by the key that sets it, which another model may keep to.
        raise UserError(told.replace(POLICY, key) if POLICY in told else f"{told}; the model is {key}={path}") from None

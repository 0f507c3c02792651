"""What a run is made from: checked, read, and claimed, before any process group or model exists."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from mcore_rl import launch_environment
from mcore_rl.algorithms.checkpointing import check_identity
from mcore_rl.algorithms.metrics import speaker
from mcore_rl.algorithms.plan import describe_plan
from mcore_rl.config import DataConfig, OptimizerConfig, RLConfig, TrainerConfig, TrainingConfig
from mcore_rl.data.chat import chat_day
from mcore_rl.data.order import Order
from mcore_rl.data.progress import Say, silent
from mcore_rl.data.records import Source
from mcore_rl.data.token_cache import TokenCache, default_directory
from mcore_rl.data.tokenization import TokenizerSource
from mcore_rl.data.tokenize import load_tokenizer
from mcore_rl.errors import UserError
from mcore_rl.hub import make_repository
from mcore_rl.models.megatron.hf_checkpoint import SafetensorsDirectory
from mcore_rl.models.megatron.hf_config import check_model_fits, load_hf_config
from mcore_rl.models.megatron.peft_directory import PEFTDirectory
from mcore_rl.models.megatron.weights import check_hf_tensors
from mcore_rl.preflight import check_output, find_checkpoints
from mcore_rl.run_directory import RunDirectory
from mcore_rl.run_identity import RunIdentity


class RunDataset(Protocol):
    """A dataset that can be counted and described."""

    def __len__(self) -> int: ...

    def describe(self, name: str, limit: int) -> str: ...

    def order(self, seed: int) -> Order: ...

    @property
    def fingerprint(self) -> str: ...


DatasetT = TypeVar("DatasetT", bound=RunDataset)


@dataclass(frozen=True)
class Inputs(Generic[DatasetT]):
    """What a run is made from, checked and loaded without any process group."""

    tokenizer: Any
    hf_config: Any
    train: DatasetT
    validation: dict[str, DatasetT]
    """By name; the only one has none."""
    checkpoints: tuple[list[Path], list[str]] = ([], [])
    """To resume from, the best first, and what is to be told about them."""
    identity: str = ""
    """Of the run, on rank 0."""


def load_inputs(
    config: TrainingConfig,
    load_dataset: Callable[[Source, Any, DataConfig, Say, TokenCache], DatasetT],
    rows_per_unit: int,
    world_size: int | None = None,
) -> Inputs[DatasetT]:
    """Check everything a user can get wrong, and read the data; the same on every rank, and nothing is written.

    Args:
        world_size: processes of the run; what torchrun says if left out.

    Raises:
        UserError: naming the key or the file and line.
    """
    world_size = world_size or launch_environment.world_size()
    config.parallel.data_parallel_size(world_size)
    config.pack_width(rows_per_unit)
    hf_config = load_hf_config(config.model.path, config.model.trust_remote_code, config.model.head)
    check_model_fits(hf_config, config.parallel, config.data.max_sequence_length, config.model)
    check_hf_tensors(hf_config, SafetensorsDirectory(config.model.path))
    check_positions(hf_config, config.data.max_sequence_length)
    say = speaker(launch_environment.rank() == 0)
    tokenizer, cache = tokenizer_and_cache(config, say)
    if len(tokenizer) > hf_config.vocab_size:
        raise UserError(
            f"model.path: the tokenizer has {len(tokenizer)} tokens, the model's vocabulary {hf_config.vocab_size}"
        )
    data, whole = config.data, config.data.model_copy(update={"max_samples": None})
    train = load_dataset(data.train, tokenizer, data, say, cache)
    sets = {name: load_dataset(source, tokenizer, whole, say, cache) for name, source in data.validation_sets.items()}
    return Inputs(tokenizer, hf_config, train, sets)


def tokenizer_and_cache(config: TrainingConfig, say: Say = silent) -> tuple[Any, TokenCache]:
    """The tokenizer, and where what it has tokenized is kept. A run that goes on has the day on which it began."""
    earlier = RunDirectory(config.output_dir).identity if config.checkpoint.resume != "none" else None
    day = date.fromisoformat(earlier.chat_day) if earlier is not None and earlier.chat_day else None
    path, trusted, template = config.model.path, config.model.trust_remote_code, config.data.read_chat_template()
    tokenizer = load_tokenizer(path, trusted, template, say, day)
    made_from = TokenizerSource(path, trusted, template, chat_day(tokenizer))
    return tokenizer, TokenCache(config.data.cache_dir or default_directory(), made_from)


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


def check_model_beside(config: TrainingConfig, key: str, tokenizer: Any) -> Any:
    """Look at a model beside the policy, before any process group exists; returns its transformers config.

    Args:
        config: the run's, with that model in the policy's place.
        key: that names it.
        tokenizer: of the policy.

    Raises:
        UserError: it cannot be used, or has another vocabulary than the policy.
    """
    model = config.model
    try:
        hf = load_hf_config(model.path, model.trust_remote_code, model.head)
        check_model_fits(hf, config.parallel, config.data.max_sequence_length, model)
        check_hf_tensors(hf, SafetensorsDirectory(model.path))
        own = load_tokenizer(model.path, model.trust_remote_code)
    except UserError as error:
        told = str(error).replace("; set model.head=reward", ", where a language model is needed")
        fits = f"{key}: {model.path} does not fit beside the policy: {told}"
        raise UserError(told.replace("model.path", key) if "model.path" in told else fits) from None
    _check_vocabulary(f"{key}: {model.path}", own.get_vocab(), tokenizer.get_vocab())
    if len(own) > hf.vocab_size:
        raise UserError(f"{key}: {model.path} has {hf.vocab_size} rows of embeddings for {len(own)} tokens")
    return hf


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
            f"{model} has another vocabulary than model.path ({len(own)} and {len(policy)} tokens; {token!r} is "
            f"{ids[0]} of its own, {ids[1]} of the policy's); use a model with the policy's tokenizer"
        )


def claim_output(config: TrainingConfig, inputs: Inputs[DatasetT]) -> Inputs[DatasetT]:
    """`inputs` with the checkpoints to resume from, once the output directory is this run's to write to.

    Rank 0 looks at what is there and locks it; until the first step nothing else is written. A dry run ends here.

    Raises:
        UserError: something there would be destroyed or continued that is not this run's.
    """
    checkpoints = find_checkpoints(config)
    if launch_environment.rank() > 0:
        if config.dry_run:
            sys.exit(0)
        return replace(inputs, checkpoints=checkpoints)
    check_output(config)
    day = str(chat_day(inputs.tokenizer) or "")
    identity = RunIdentity.of(config, inputs.hf_config, inputs.train.fingerprint, day)
    notes = checkpoints[1] + check_identity(identity, checkpoints[0])
    if config.model.lora is not None and config.model.lora.path is not None:
        notes += PEFTDirectory(config.model.lora.path).check_base(config.model.path, identity.base_weights)
    if config.dry_run:
        tell_plan(config, inputs, notes)
        sys.exit(0)
    if config.checkpoint.push_to_hub is not None:
        make_repository(config.checkpoint.push_to_hub)
    if note := RunDirectory(config.output_dir).claim():
        notes = [note, *notes]
    return replace(inputs, checkpoints=(checkpoints[0], notes), identity=identity.to_json())


def tell_plan(config: TrainingConfig, inputs: Inputs[Any], notes: Sequence[str]) -> None:
    """Print what the run would do."""
    per_step = config.rollouts.num_prompts_per_step if isinstance(config, RLConfig) else config.batch.global_batch_size
    steps = total_steps(config.trainer, len(inputs.train), per_step)
    for line in (*notes, *describe_plan(config, inputs, steps, launch_environment.world_size())):
        print(line, flush=True)
    print("nothing was written: this was a dry run")


def tell_what_never_comes(config: TrainingConfig, steps: int, say: Say, updates_per_step: int = 1) -> None:
    """Lines about what a run of so many steps does not get to."""
    intervals = {
        "checkpoint.save_interval": config.checkpoint.save_interval,
        "trainer.validation_interval": config.trainer.validation_interval,
    }  # fmt: skip
    for key, interval in intervals.items():
        if interval is not None and interval > steps:
            say(f"{key}={interval} never comes: the run has {steps} steps")
    trainer = config.trainer
    if config.data.validation is not None and trainer.validation_interval is None and not trainer.validate_at_end:
        say("data.validation is not used during training: there is no trainer.validation_interval")
    tell_of_optimizer("optimizer", config.optimizer, steps * updates_per_step, say)


def tell_of_optimizer(key: str, optimizer: OptimizerConfig, updates: int, say: Say) -> None:
    """Lines about what an optimizer of so many updates does not do."""
    if optimizer.warmup_steps >= updates:
        shortened = optimizer.steps_of_warmup(updates)
        say(f"{key}.warmup_steps={optimizer.warmup_steps} is shortened to {shortened}: there are {updates} updates")
    if optimizer.lr == 0 and not optimizer.embedding_lr:
        say(f"{key}.lr=0: the weights will not change")


def total_steps(trainer: TrainerConfig, num_samples: int, samples_per_step: int) -> int:
    """Steps of the run: the smaller of max_steps and max_epochs; the last batch may be smaller."""
    limits = [trainer.max_steps or math.inf]
    if trainer.max_epochs:
        limits.append(math.ceil(trainer.max_epochs * num_samples / samples_per_step))
    return int(min(limits))

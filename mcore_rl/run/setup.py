"""The inputs of a run: checked, read, claimed and compared between processes before any model exists."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from mcore_rl import platform
from mcore_rl.cli.dry_run import describe_plan
from mcore_rl.config import OptimizerConfig, RLConfig, TrainingConfig
from mcore_rl.data.chat import chat_day, check_keeps_turns, set_chat_day
from mcore_rl.data.datasets import loader_of
from mcore_rl.data.sample_order import Order
from mcore_rl.data.token_cache import TokenCache, default_directory
from mcore_rl.data.tokenize import TokenizerSource, load_tokenizer
from mcore_rl.models.megatron.lora import PEFTDirectory
from mcore_rl.run.agreement import check_agreement
from mcore_rl.run.checkpoints import check_identity
from mcore_rl.run.directory import RunDirectory
from mcore_rl.run.identity import RunIdentity, digest_of_weights, identity_of
from mcore_rl.run.model_checks import POLICY, check_models, check_tokenizers, check_weights
from mcore_rl.run.preflight import check_layout, check_output, find_checkpoints
from mcore_rl.utils import shard_process, torchrun
from mcore_rl.utils.console import Say, silent, speaker
from mcore_rl.utils.hub import check_repository


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
    """The inputs of a run, checked and loaded without a process group."""

    tokenizer: Any
    hf_config: Any
    train: DatasetT
    validation: dict[str, DatasetT]
    """Validation sets by name; a single set has no name."""
    checkpoints: tuple[list[Path], list[str]] = ([], [])
    """To resume from, the best first, and what is to be told about them."""
    identity: str = ""
    """Identity of the run (JSON), on the first process of each node."""
    cache: Path | None = None
    """Directory of the token cache if a dry run wrote to it."""


def load_inputs(config: TrainingConfig, world_size: int | None = None, needs_weights: bool = True) -> Inputs[Any]:
    """Check everything a user can get wrong, and read the data; the same on every rank.

    The token cache is written once everything that does not depend on the data's tokens has been checked.

    Args:
        world_size: processes of the run; what torchrun says if left out.
        needs_weights: whether models must have their weights there.

    Returns:
        The inputs, with the algorithm's datasets.

    Raises:
        UserError: naming the key or the file and line.
    """
    check_layout(config, world_size or torchrun.world_size())
    hf_configs = check_models(config)
    check_weights(config, hf_configs, needs_weights)
    say = speaker(torchrun.rank() == 0)
    tokenizer, cache = tokenizer_and_cache(config, say)
    check_tokenizers(config, hf_configs, tokenizer)
    if needs_weights:
        _check_before_reading(config, hf_configs[POLICY], tokenizer)
    load_dataset = loader_of(config)
    before = _entries(cache.directory) if config.dry_run else None
    data, whole = config.data, config.data.model_copy(update={"max_samples": None})
    train = load_dataset(data.train, tokenizer, data, say=say, cache=cache)
    config.check_steps(config.total_steps(len(train)))
    sets = data.validation_sets.items()
    validation = {name: load_dataset(source, tokenizer, whole, say=say, cache=cache) for name, source in sets}
    if isinstance(config, RLConfig) and config.environment.max_turns > 1 and train.has_messages:
        check_keeps_turns(tokenizer)
    wrote = before is not None and _entries(cache.directory) != before
    return Inputs(tokenizer, hf_configs[POLICY], train, validation, cache=cache.directory if wrote else None)


def _check_before_reading(config: TrainingConfig, hf_config: Any, tokenizer: Any) -> None:
    """Check on the first rank what `_claimed` would refuse whatever the data is; nothing is written.

    Raises:
        UserError: a checkpoint of another run, an adapter of another model, or a hub that refuses.
    """
    if torchrun.rank() > 0:
        return
    candidates, _ = find_checkpoints(config)
    lora = config.model.lora
    if candidates:
        check_identity(RunIdentity.of(config, hf_config, "", str(chat_day(tokenizer) or "")), candidates)
    if lora is not None and lora.path is not None:
        PEFTDirectory(lora.path).check_base(config.model.path, digest_of_weights(config.model.path))
    if config.checkpoint.push_to_hub is not None:
        check_repository(config.checkpoint.push_to_hub)


def _entries(directory: Path) -> set[Path]:
    """Return all files and directories below a directory, with itself; an empty set if it does not exist."""
    return {directory, *directory.rglob("*")} if directory.exists() else set()


def tokenizer_and_cache(config: TrainingConfig, say: Say = silent) -> tuple[Any, TokenCache]:
    """The tokenizer, and where what it has tokenized is kept. A run that goes on has the day on which it began."""
    path, trusted, template = config.model.path, config.model.trust_remote_code, config.data.read_chat_template()
    tokenizer = load_tokenizer(path, trusted, template, say)
    if chat_day(tokenizer) is not None and (earlier := _earlier_identity(config)) and earlier.chat_day:
        set_chat_day(tokenizer, date.fromisoformat(earlier.chat_day))
    made_from = TokenizerSource(path, trusted, template, chat_day(tokenizer))
    return tokenizer, TokenCache(config.data.cache_dir or default_directory(), made_from)


def _earlier_identity(config: TrainingConfig) -> RunIdentity | None:
    """Return the identity of the run that is resumed; None for a new run."""
    candidates, _ = find_checkpoints(config)
    found = next(filter(None, map(identity_of, candidates)), None)
    return RunDirectory(config.output_dir).identity if found is None and config.checkpoint.resume != "none" else found


def claim_output(config: TrainingConfig, inputs: Inputs[DatasetT], options: Mapping[str, str] = {}) -> Inputs[DatasetT]:
    """`inputs` with the checkpoints to resume from, once the output directory is this run's to write to. Collective.

    Rank 0 looks at what is there and locks it; until the first step nothing else is written. A dry run ends here. The
    first thing that processes tell each other is what they were given: whatever comes next, a model or scores that are
    kept for later runs, is made by all of them together.

    Args:
        options: of the command line, and what they come to, which is compared as well.

    Raises:
        UserError: something there would be destroyed or continued that is not this run's; or a process was given
            something else than the first.
    """
    inputs = _claimed(config, inputs)
    platform.initialize_process_group(timedelta(seconds=config.parallel.timeout_seconds))
    check_agreement(config, inputs, options)
    shard_process.start_early()
    return inputs


def _claimed(config: TrainingConfig, inputs: Inputs[DatasetT]) -> Inputs[DatasetT]:
    # The first rank alone looks: others may see other files, and are told what it has found.
    checkpoints = find_checkpoints(config) if torchrun.rank() == 0 else ([], [])
    if torchrun.rank() > 0:
        if config.dry_run:
            sys.exit(0)
        is_first = torchrun.local_rank() == 0
        return replace(
            inputs, checkpoints=checkpoints, identity=_identity(config, inputs).to_json() if is_first else ""
        )
    check_output(config)
    identity = _identity(config, inputs)
    notes = checkpoints[1] + check_identity(identity, checkpoints[0])
    if config.model.lora is not None and config.model.lora.path is not None:
        notes += PEFTDirectory(config.model.lora.path).check_base(config.model.path, identity.base_weights)
    if config.dry_run:
        tell_plan(config, inputs, notes)
        sys.exit(0)
    if note := RunDirectory(config.output_dir).claim():
        notes = [note, *notes]
    return replace(inputs, checkpoints=(checkpoints[0], notes), identity=identity.to_json())


def _identity(config: TrainingConfig, inputs: Inputs[Any]) -> RunIdentity:
    day = str(chat_day(inputs.tokenizer) or "")
    return RunIdentity.of(config, inputs.hf_config, inputs.train.fingerprint, day)


def tell_plan(config: TrainingConfig, inputs: Inputs[Any], notes: Sequence[str]) -> None:
    """Print what the run would do."""
    steps = config.total_steps(len(inputs.train))
    for line in (*notes, *describe_plan(config, inputs, steps, torchrun.world_size())):
        print(line, flush=True)
    if inputs.cache is None:
        print("nothing was written: this was a dry run")
    else:
        print(f"this was a dry run: it wrote tokenized data to {inputs.cache} (data.cache_dir) and nothing else")


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

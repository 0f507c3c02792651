"""What all loops share: checks before anything is started; steps, validation, checkpoints, signals, the end."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from mcore_rl import watchdog
from mcore_rl.algorithms.checkpointing import RunCheckpoints, find_checkpoints
from mcore_rl.algorithms.interruption import Interruption
from mcore_rl.algorithms.metrics import Reporter, speaker
from mcore_rl.config import TrainerConfig, TrainingConfig, resolved_yaml
from mcore_rl.data.packing import batching_of
from mcore_rl.data.tokenize import load_tokenizer
from mcore_rl.errors import TrainingError, UserError
from mcore_rl.models.megatron.hf_checkpoint import SafetensorsDirectory
from mcore_rl.models.megatron.hf_config import check_model_fits, load_hf_config
from mcore_rl.models.megatron.weights import check_hf_tensors
from mcore_rl.models.policy.megatron_policy import MegatronPolicy


class RunDataset(Protocol):
    """A dataset that can be counted and described."""

    def __len__(self) -> int: ...

    def describe(self, name: str, limit: int) -> str: ...

    def fingerprint(self) -> str: ...


DatasetT = TypeVar("DatasetT", bound=RunDataset)


@dataclass(frozen=True)
class Inputs(Generic[DatasetT]):
    """What a run is made from, checked and loaded without any process group."""

    tokenizer: Any
    hf_config: Any
    train: DatasetT
    validation: DatasetT | None
    checkpoints: tuple[list[Path], list[str]]


def load_inputs(
    config: TrainingConfig,
    load_dataset: Callable[[str, Any, Any], DatasetT],
    rows_per_unit: int,
    world_size: int | None = None,
) -> Inputs[DatasetT]:
    """Check everything a user can get wrong, and read the data; the same on every rank.

    Args:
        world_size: processes of the run; what torchrun says if left out.

    Raises:
        UserError: naming the key or the file and line.
    """
    world_size = world_size or int(os.environ.get("WORLD_SIZE", 1))
    batching_of(config, rows_per_unit, config.parallel.data_parallel_size(world_size))
    hf_config = load_hf_config(config.model.path, config.model.trust_remote_code, config.model.head)
    check_model_fits(hf_config, config.parallel, config.data.max_sequence_length, config.model)
    check_hf_tensors(hf_config, SafetensorsDirectory(config.model.path))
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    if len(tokenizer) > hf_config.vocab_size:
        raise UserError(
            f"model.path: the tokenizer has {len(tokenizer)} tokens, the model's vocabulary {hf_config.vocab_size}"
        )
    validation = config.data.validation
    return Inputs(
        tokenizer,
        hf_config,
        load_dataset(config.data.train, tokenizer, config.data),
        None if validation is None else load_dataset(validation, tokenizer, config.data),
        find_checkpoints(config),
    )


def total_steps(trainer: TrainerConfig, num_samples: int, samples_per_step: int) -> int:
    """Steps of the run: the smaller of max_steps and max_epochs; the last batch may be smaller."""
    limits = [trainer.max_steps or math.inf]
    if trainer.max_epochs:
        limits.append(math.ceil(trainer.max_epochs * num_samples / samples_per_step))
    return int(min(limits))


def _divides(interval: int | None, step: int) -> bool:
    """Whether something that happens every `interval` steps (never, for None) happens now."""
    return interval is not None and step % interval == 0


@dataclass
class TrainingRun(ABC, Generic[DatasetT]):
    """A run from its start, or the checkpoint it resumes from, to its end. Every method is collective."""

    config: TrainingConfig
    inputs: Inputs[DatasetT]
    policy: MegatronPolicy
    consumed_samples = 0
    """Position in the order of the dataset, across epochs."""

    @property
    @abstractmethod
    def samples_per_step(self) -> int:
        """Of the dataset."""

    @property
    def max_record_length(self) -> int:
        """In tokens."""
        return self.config.data.max_sequence_length

    @abstractmethod
    def step(self, step: int) -> dict[str, Any]:
        """Train once; returns metrics, among them `tokens_per_second` and `tflops_per_second`.

        Raises:
            FloatingPointError: training cannot go on; weights are as before.
        """

    @abstractmethod
    def validate(self, step: int) -> dict[str, float]:
        """Metrics of the validation set, each named `validation_…`; {} without one."""

    def throughput(self, lengths: list[int], seconds: float, passes: int = 1) -> dict[str, float]:
        """Metrics of a step that trained `passes` times on sequences of these lengths."""
        tokens = sum(lengths)
        return {
            "num_tokens": tokens,
            "tokens_per_second": tokens / seconds,
            "tflops_per_second": passes * self.policy.training_flops(lengths) / seconds / 1e12,
            "step_seconds": seconds,
        }

    def say(self, message: str) -> None:
        """A line for the user, once."""
        speaker(self.policy.is_writer)(message)

    def run(self) -> None:
        """All steps, then the export."""
        config, policy = self.config, self.policy
        steps = total_steps(config.trainer, len(self.inputs.train), self.samples_per_step)
        self._begin()
        fingerprint = self.inputs.train.fingerprint()
        checkpoints = RunCheckpoints(config, policy, self.say, self.inputs.checkpoints, fingerprint)
        interruption = Interruption()
        state = checkpoints.resume()
        done, self.consumed_samples = state["step"], state["consumed_samples"]
        reporter = Reporter(config.output_dir, config.logging, policy.is_writer, done + 1, steps)
        self._introduce(done, steps)
        if done == 0 and (metrics := self.before_first_step()):
            reporter.record(0, metrics)
        for step in range(done + 1, steps + 1):
            try:
                metrics = self.step(step)
            except FloatingPointError as error:
                checkpoints.poll(step, wait=True)
                newest = checkpoints.newest() or "none"
                raise TrainingError(f"step {step}: {error}; the last checkpoint is {newest}") from None
            if _divides(config.trainer.validation_interval, step):
                metrics.update(self.validate(step))
            reporter.record(step, metrics)
            if _divides(config.trainer.log_interval, step) or step in (1, steps):
                reporter.progress(step, metrics)
            signal = interruption.requested()
            last = step == steps or signal is not None
            watchdog.enter(f"step {step}: checkpoint")
            checkpoints.poll(step)
            if last or _divides(config.checkpoint.save_interval, step):
                checkpoints.save(step, {"consumed_samples": self.consumed_samples}, wait=last)
            if signal and step < steps:
                self.say(f"stopped by {signal} after step {step}; the same command goes on from here")
                break
        else:
            self._export()
        watchdog.stop()

    def _begin(self) -> None:
        """Make the output directory, with the resolved configuration in it, and watch over the run."""
        if self.policy.is_writer:
            self.config.output_dir.mkdir(parents=True, exist_ok=True)
            (self.config.output_dir / "config.yaml").write_text(resolved_yaml(self.config))
        watchdog.start(self.config.output_dir / "stacks", self.policy.rank)

    def before_first_step(self) -> dict[str, float]:
        """Metrics to compare later ones with; recorded as step 0."""
        return {}

    def _introduce(self, done: int, steps: int) -> None:
        """Say what is trained on what."""
        policy = self.policy
        self.say(f"model: {self.config.model.path}, {policy.num_parameters:,} parameters, {policy.describe_layout()}")
        self.say(self.inputs.train.describe("train", self.max_record_length))
        if self.inputs.validation is not None:
            self.say(self.inputs.validation.describe("validation", self.max_record_length))
        if done >= steps:
            self.say(f"nothing left to train: the checkpoint is at step {done} of {steps}")

    def _export(self) -> None:
        """The trained model as a Hugging Face directory, if the configuration asks for it."""
        if self.config.checkpoint.export_hf:
            watchdog.enter("export")
            destination = self.config.output_dir / "hf"
            self.policy.export_hf(destination)
            self.say(f"Hugging Face model: {destination}")

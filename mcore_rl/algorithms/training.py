"""What the supervised loops share: checks before anything is started, steps, validation, checkpoints."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from mcore_rl import watchdog
from mcore_rl.algorithms.checkpointing import RunCheckpoints, find_checkpoints
from mcore_rl.algorithms.interfaces import LossFunction
from mcore_rl.algorithms.interruption import Interruption
from mcore_rl.algorithms.metrics import Reporter, Say, speaker
from mcore_rl.config import TrainerConfig, TrainingConfig, resolved_yaml
from mcore_rl.data.batches import SampleOrder, collate
from mcore_rl.data.records import Dataset, fingerprint
from mcore_rl.data.tokenize import load_tokenizer
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.errors import TrainingError, UserError
from mcore_rl.models.megatron.hf_checkpoint import SafetensorsDirectory
from mcore_rl.models.megatron.hf_config import check_model_fits, load_hf_config
from mcore_rl.models.megatron.weights import check_hf_tensors
from mcore_rl.models.policy.megatron_policy import MegatronPolicy, batching_of


class RunDataset(Protocol):
    """A dataset that can be counted and described."""

    def __len__(self) -> int: ...

    def describe(self, name: str, limit: int) -> str: ...


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
    check_model_fits(hf_config, config.parallel, config.data.max_sequence_length)
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


def divides(interval: int | None, step: int) -> bool:
    """Whether something that happens every `interval` steps (never, for None) happens now."""
    return interval is not None and step % interval == 0


@dataclass
class SupervisedRun:
    """Training of a policy on a fixed dataset.

    add_columns: adds what the loss needs to a batch, given its dataset indices (or None for validation).
    check_first_step: raises TrainingError if what must hold before the first update does not.
    """

    config: TrainingConfig
    inputs: Inputs[Dataset]
    policy: MegatronPolicy
    loss_fn: LossFunction
    add_columns: Callable[[BatchedDataDict[Any], list[int] | None], None] = lambda data, indices: None
    check_first_step: Callable[[dict[str, Any]], None] = lambda metrics: None

    def run(self) -> None:
        """All steps from the checkpoint resumed from (or the start) to the end, then the export."""
        config, policy = self.config, self.policy
        steps = total_steps(config.trainer, len(self.inputs.train), config.batch.global_batch_size)
        begin_run(config, policy)
        data_fingerprint = fingerprint(self.inputs.train.units)
        self.checkpoints = RunCheckpoints(config, policy, self.say, self.inputs.checkpoints, data_fingerprint)
        interruption = Interruption()
        state = self.checkpoints.resume()
        done, self.consumed_samples = state["step"], state["consumed_samples"]
        reporter = Reporter(config.output_dir, config.logging, policy.is_writer, done + 1, steps)
        self._introduce(done, steps)
        for step in range(done + 1, steps + 1):
            metrics = self._step(step)
            if divides(config.trainer.validation_interval, step):
                metrics.update(self._validate(step))
            reporter.record(step, metrics)
            if divides(config.trainer.log_interval, step) or step in (1, steps):
                reporter.progress(step, metrics)
            signal = interruption.requested()
            last = step == steps or signal is not None
            watchdog.enter(f"step {step}: checkpoint")
            self.checkpoints.poll(step)
            if last or divides(config.checkpoint.save_interval, step):
                self.checkpoints.save(step, {"consumed_samples": self.consumed_samples}, wait=last)
            if signal and step < steps:
                self.say(f"stopped by {signal} after step {step}; the same command goes on from here")
                break
        else:
            export_at_end(config, policy, self.say)
        watchdog.stop()

    @property
    def say(self) -> Say:
        return speaker(self.policy.is_writer)

    def _introduce(self, done: int, steps: int) -> None:
        limit, policy = self.config.data.max_sequence_length, self.policy
        self.say(f"model: {self.config.model.path}, {policy.num_parameters:,} parameters, {policy.describe_layout()}")
        self.say(self.inputs.train.describe("train", limit))
        if self.inputs.validation:
            self.say(self.inputs.validation.describe("validation", limit))
        if done >= steps:
            self.say(f"nothing left to train: the checkpoint is at step {done} of {steps}")

    def _step(self, step: int) -> dict[str, Any]:
        started = time.perf_counter()
        watchdog.enter(f"step {step}: training")
        data = self._next_batch()
        try:
            metrics = self.policy.train(data, self.loss_fn)
        except FloatingPointError as error:
            self.checkpoints.poll(step, wait=True)
            newest = self.checkpoints.newest() or "none"
            raise TrainingError(f"step {step}: {error}; the last checkpoint is {newest}") from None
        if step == 1:
            self.check_first_step(metrics)
        seconds = time.perf_counter() - started
        lengths = data["input_lengths"]
        return {
            **metrics,
            "num_tokens": int(lengths.sum()),
            "tokens_per_second": float(lengths.sum()) / seconds,
            "tflops_per_second": self.policy.training_flops(lengths.tolist()) / seconds / 1e12,
            "step_seconds": seconds,
        }

    def _next_batch(self) -> BatchedDataDict[Any]:
        """The next global batch; smaller at the very end of the last epoch."""
        train, size, epochs = self.inputs.train, self.config.batch.global_batch_size, self.config.trainer.max_epochs
        count = size if epochs is None else min(size, epochs * len(train) - self.consumed_samples)
        indices = SampleOrder(len(train), self.config.seed).indices(self.consumed_samples, count)
        self.consumed_samples += count
        data = collate([train.units[i] for i in indices], self.inputs.tokenizer.pad_token_id)
        self.add_columns(data, indices)
        return data

    def _validate(self, step: int) -> dict[str, float]:
        """Metrics over the whole validation set, as one batch, so that they are exact means."""
        if self.inputs.validation is None:
            return {}
        watchdog.enter(f"step {step}: validation")
        if not hasattr(self, "_validation_batch"):
            self._validation_batch = collate(self.inputs.validation.units, self.inputs.tokenizer.pad_token_id)
            self.add_columns(self._validation_batch, None)
        metrics = self.policy.evaluate(self._validation_batch, self.loss_fn)
        shown = "  ".join(f"{name} {metrics[name]:.4g}" for name in ("loss", "accuracy") if name in metrics)
        self.say(f"step {step}  validation: {shown}")
        return {f"validation_{name}": value for name, value in metrics.items()}


def begin_run(config: TrainingConfig, policy: MegatronPolicy) -> None:
    """Make the output directory, with the resolved configuration in it, and watch over the run."""
    if policy.is_writer:
        config.output_dir.mkdir(parents=True, exist_ok=True)
        (config.output_dir / "config.yaml").write_text(resolved_yaml(config))
    watchdog.start(config.output_dir / "stacks", policy.rank)


def export_at_end(config: TrainingConfig, policy: MegatronPolicy, say: Say) -> None:
    """The trained model as a Hugging Face directory, if the configuration asks for it."""
    if config.checkpoint.export_hf:
        watchdog.enter("export")
        destination = config.output_dir / "hf"
        policy.export_hf(destination)
        say(f"Hugging Face model: {destination}")

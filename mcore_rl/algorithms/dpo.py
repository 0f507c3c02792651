"""Direct preference optimization."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mcore_rl import platform
from mcore_rl.algorithms.supervised import Columns, Objective, SupervisedTrainer, TrainingBatch
from mcore_rl.config import DPOConfig
from mcore_rl.config.algorithms import reference_config
from mcore_rl.data.batching import global_valid_counts
from mcore_rl.data.datasets import Dataset
from mcore_rl.distributed.collectives import broadcast_object
from mcore_rl.errors import TrainingError, UserError
from mcore_rl.losses.preference import DPOLossFn, build_dpo_loss
from mcore_rl.models.policy.megatron_policy import MegatronPolicy
from mcore_rl.models.policy.reference import (
    PrecomputedLogprobs,
    ReferenceLogprobs,
    SecondModel,
    StoredLogprobs,
    SwappedReference,
)
from mcore_rl.models.policy.scoring import ScoringModel
from mcore_rl.run.preflight import find_checkpoints
from mcore_rl.run.setup import RunInputs, claim_output_dir, load_inputs
from mcore_rl.utils import torchrun
from mcore_rl.utils.console import rank_zero_printer

FIRST_REWARD_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.01}
"""Largest mean reward, in nats per token, before the first update, when policy and reference have the same weights.

It covers rounding, which has both signs: over many tokens, its mean is much smaller than the errors of single tokens.
"""


def train_dpo(config: DPOConfig) -> Path | None:
    """Make chosen responses more likely than rejected ones, relative to the reference."""
    config = platform.resolve(config)
    inputs = claim_output_dir(config, load_inputs(config))
    # Rank 0 decides: other ranks may see other files.
    stored: bool = broadcast_object(torchrun.rank() == 0 and precomputes_reference(config, inputs))
    steps, keeps = config.total_steps(len(inputs.train)), config.keeps_reference and not stored
    policy = MegatronPolicy(config, steps, rows_per_unit=2, keep_reference=keeps)
    reference = build_reference(config, inputs, policy, stored)
    exported = SupervisedTrainer(config, inputs, policy, DPOObjective(config, policy, reference)).run()
    if isinstance(reference, SecondModel):
        reference.model.shutdown()
    policy.shutdown()
    return exported


class DPOObjective(Objective):
    """The loss of DPO or a variant, and the column of reference log-probabilities if the loss needs a reference."""

    def __init__(self, config: DPOConfig, policy: MegatronPolicy, reference: ReferenceLogprobs | None) -> None:
        super().__init__(build_dpo_loss(config.dpo))
        self.config, self.policy, self.reference = config, policy, reference

    def frozen_columns(self, batch: TrainingBatch) -> Columns:
        if self.reference is None:
            return {}
        self._check_is_of_this_run()
        logprobs = self.reference.logprobs(batch.rows, batch.dataset.units, batch.indices)
        return {"reference_policy_logprobs": logprobs.roll(-1, dims=1)}  # column t scores token t + 1

    def current_columns(self, batch: TrainingBatch) -> Columns:
        """Return the columns of `DPOLossFn.batch_columns`, which aot and aot_unpaired read; {} for other losses.

        They need an additional forward pass of the policy.
        """
        assert isinstance(self.loss_fn, DPOLossFn)
        if not self.loss_fn.needs_batch:
            return {}
        return self.loss_fn.batch_columns(self.policy.get_logprobs(batch.rows)["logprobs"][:, 1:], batch.rows)

    def check_first_step(self, batch: TrainingBatch, metrics: Mapping[str, float]) -> None:
        config, rows = self.config, batch.rows
        if self.reference is None or config.dpo.reference_model or config.model.begins_with_dropout:
            return
        reward = max(abs(metrics["rewards_chosen_mean"]), abs(metrics["rewards_rejected_mean"]))
        samples, total = map(float, global_valid_counts(rows))
        tokens = 1.0 if config.dpo.preference_average_log_probs else total / max(samples, 1.0)
        if reward > FIRST_REWARD_TOLERANCE[config.model.dtype] * tokens:
            stored = isinstance(self.reference, StoredLogprobs)
            raise TrainingError(
                "step 1: before any update the policy must equal the reference, but the mean reward differs from 0 by "
                f"{reward:.3g} nats over {tokens:.0f} tokens. The reference log-probabilities belong to other "
                "weights or other data"
                + (f"; delete {_directory(config)}, and the next run computes them again" if stored else "")
            )

    def _check_is_of_this_run(self) -> None:
        """Raise UserError if the reference's stored log-probabilities are not those of the run's initial weights."""
        started_from = self.policy.checkpoint.started_from
        stored = isinstance(self.reference, StoredLogprobs) and self.config.dpo.reference_model is None
        if stored and started_from is not None:
            raise UserError(
                f"dpo.reference={self.config.dpo.reference}: the stored reference log-probabilities were computed "
                f"with the weights of model.path. {started_from} starts from other weights, or has an updated "
                f"reference. Set dpo.reference=swap, and delete {_directory(self.config)}"
            )


def build_reference(
    config: DPOConfig, inputs: RunInputs[Dataset], policy: MegatronPolicy, stored: bool
) -> ReferenceLogprobs | None:
    """Return the source of the reference's log-probabilities; None if the loss needs no reference.

    Args:
        stored: compute the log-probabilities of all data sets now, and store them on disk. If False, the returned
            source computes them for each batch.
    """
    if not config.dpo.needs_reference:
        return None
    if config.dpo.reference_model is None:
        return _store(config, inputs, config, policy) if stored else SwappedReference(policy)
    second = reference_config(config)
    return _store(config, inputs, second, None) if stored else SecondModel(_second_model(second, policy.is_writer))


def _store(
    config: DPOConfig, inputs: RunInputs[Dataset], reference: DPOConfig, policy: MegatronPolicy | None
) -> StoredLogprobs:
    """Return the reference's log-probabilities of all data sets; if they are not on disk, compute and store them.

    Args:
        reference: configuration of the reference.
        policy: the policy, if its initial weights are the reference. If None, a second model computes the
            log-probabilities. The second model is built only if log-probabilities are missing.
    """
    built: list[ScoringModel] = []

    def model() -> ScoringModel:
        if policy is not None:
            return policy
        if not built:
            built.append(_second_model(reference, torchrun.rank() == 0))
        return built[0]

    pad, size, say = (
        inputs.tokenizer.pad_token_id,
        config.batch.global_batch_size,
        rank_zero_printer(torchrun.rank() == 0),
    )
    datasets = (inputs.train, *(inputs.validation.values() if config.trainer.validates else ()))
    arguments = _directory(config), reference.model, model
    load = PrecomputedLogprobs.load_or_compute
    stored = StoredLogprobs([(one.units, load(*arguments, one.units, pad, size, say)) for one in datasets])
    for second in built:
        second.shutdown()
    return stored


def _second_model(config: DPOConfig, speaks: bool) -> ScoringModel:
    model = ScoringModel(config, rows_per_unit=2)
    rank_zero_printer(speaks)(f"reference: {model.describe()}")
    return model


def precomputes_reference(config: DPOConfig, inputs: RunInputs[Dataset]) -> bool:
    """Return whether the reference's log-probabilities are all computed before training, and stored."""
    if config.dpo.reference == "auto" and find_checkpoints(config)[0] and not _directory(config).is_dir():
        return False  # the checkpoint determines the initial weights
    steps = config.total_steps(len(inputs.train))
    return config.precomputes(steps * config.batch.global_batch_size / len(inputs.train))


def _directory(config: DPOConfig) -> Path:
    """Return the directory that contains log-probabilities computed before training."""
    return config.output_dir / "reference_logprobs"

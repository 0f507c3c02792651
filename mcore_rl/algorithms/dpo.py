"""Direct preference optimization."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from mcore_rl.algorithms.build_loss import loss_of
from mcore_rl.algorithms.supervised import SupervisedRun
from mcore_rl.config import DPOConfig, ModelConfig
from mcore_rl.config.algorithms import config_of_reference
from mcore_rl.data.datasets import Dataset
from mcore_rl.distributed.batched_data_dict import OwnRows
from mcore_rl.distributed.collectives import broadcast_object
from mcore_rl.errors import TrainingError, UserError
from mcore_rl.models.policy.megatron_policy import MegatronPolicy
from mcore_rl.models.policy.reference import PrecomputedReference
from mcore_rl.models.policy.scoring import ScoringModel
from mcore_rl.run.preflight import find_checkpoints
from mcore_rl.run.setup import Inputs, claim_output, load_inputs
from mcore_rl.utils import torchrun
from mcore_rl.utils.console import Say, speaker

# Before the first update policy and reference are the same weights; what is left is rounding, in nats a token.
FIRST_MARGIN_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}


def train_dpo(config: DPOConfig) -> Path | None:
    """Make chosen responses likelier than rejected ones, relative to the reference."""
    inputs = load_inputs(config)
    inputs = claim_output(config, inputs)
    # The first rank decides: others may see other files.
    precomputes: bool = broadcast_object(torchrun.rank() == 0 and precomputes_reference(config, inputs))
    policy = MegatronPolicy(
        config,
        config.total_steps(len(inputs.train)),
        rows_per_unit=2,
        keep_reference=config.keeps_reference and not precomputes,
    )
    reference = _reference(config, inputs, policy, precomputes)

    def add_reference(data: OwnRows[Any], dataset: Dataset, indices: Sequence[int]) -> None:
        if reference is None:
            return
        if precomputes and config.dpo.reference_model is None and policy.began_elsewhere is not None:
            raise UserError(
                f"dpo.reference={config.dpo.reference}: {policy.began_elsewhere} begins from other weights than "
                f"model.path, or holds a reference that has moved; what was computed before is not of these: set "
                f"dpo.reference=swap, and delete {_directory(config)}"
            )
        logprobs = reference.logprobs(data, dataset, indices)
        data["reference_policy_logprobs"] = logprobs.roll(-1, dims=1)  # column t scores token t + 1

    def check_margin(metrics: dict[str, Any], data: OwnRows[Any]) -> None:
        if reference is None or config.dpo.reference_model or config.model.begins_with_dropout:
            return
        margin = max(abs(metrics["rewards_chosen_mean"]), abs(metrics["rewards_rejected_mean"]))
        longest = max(data["token_mask"][:, 1:].sum(1).tolist(), default=0.0)
        tokens = 1.0 if config.dpo.preference_average_log_probs else data.share.max(longest)[0]
        if margin > FIRST_MARGIN_TOLERANCE[config.model.dtype] * tokens:
            raise TrainingError(
                f"step 1: before any update the policy must equal the reference, but rewards are off by {margin:.3g} "
                f"nats over at most {tokens:.0f} tokens; the reference log-probabilities are not of these weights or "
                "this data" + (f"; delete {_directory(config)}, to have them computed again" if precomputes else "")
            )

    exported = SupervisedRun(config, inputs, policy, loss_of(config), add_reference, check_margin).run()
    policy.shutdown()
    return exported


def _reference(
    config: DPOConfig, inputs: Inputs[Dataset], policy: MegatronPolicy, precomputes: bool
) -> ReferenceScores | None:
    """Return the reference of the policy, if the loss needs one."""
    if not config.dpo.needs_reference:
        return None
    say = speaker(policy.is_writer)
    if config.dpo.reference_model is None:
        if not precomputes:
            return SwappedReference(policy)
        return _precompute(config, inputs, config.model, lambda: policy, say)
    beside = config_of_reference(config)

    @functools.cache
    def other_model() -> ScoringModel:
        model = ScoringModel(beside, rows_per_unit=2)
        say(f"reference: {model.describe()}")
        return model

    if not precomputes:
        return OtherModel(other_model())
    stored = _precompute(config, inputs, beside.model, other_model, say)
    if other_model.cache_info().currsize:  # nothing needs the model any more
        other_model().shutdown()
        other_model.cache_clear()
    return stored


def precomputes_reference(config: DPOConfig, inputs: Inputs[Dataset]) -> bool:
    """Whether the reference's log-probabilities are computed before training."""
    if config.dpo.reference == "auto" and find_checkpoints(config)[0] and not _directory(config).is_dir():
        return False  # what training began from is the checkpoint's to say
    steps = config.total_steps(len(inputs.train))
    return config.precomputes(steps * config.batch.global_batch_size / len(inputs.train))


def _directory(config: DPOConfig) -> Path:
    """Return the directory of log-probabilities that are computed before training."""
    return config.output_dir / "reference_logprobs"


class ReferenceScores(Protocol):
    """Log-probabilities of a batch under the reference."""

    def logprobs(self, data: OwnRows[Any], dataset: Dataset, indices: Sequence[int]) -> Tensor:
        """[B, S]; column t scores token t."""
        ...


class OtherModel:
    """Another model beside the policy."""

    def __init__(self, model: ScoringModel) -> None:
        self.model = model

    def logprobs(self, data: OwnRows[Any], dataset: Dataset, indices: Sequence[int]) -> Tensor:
        return self.model.get_logprobs(data)["logprobs"]


class SwappedReference:
    """The reference weights take the policy's place for each batch."""

    def __init__(self, policy: MegatronPolicy) -> None:
        self.policy = policy

    def logprobs(self, data: OwnRows[Any], dataset: Dataset, indices: Sequence[int]) -> Tensor:
        return self.policy.get_reference_policy_logprobs(data)["reference_logprobs"]


class StoredReference:
    """Everything was computed before training."""

    def __init__(self, stored: Sequence[tuple[Dataset, PrecomputedReference]]) -> None:
        self.stored = stored

    def logprobs(self, data: OwnRows[Any], dataset: Dataset, indices: Sequence[int]) -> Tensor:
        of_dataset = next(scores for known, scores in self.stored if known is dataset)
        return of_dataset.rows([2 * index + side for index in indices for side in (0, 1)], data["input_ids"].shape[1])


def _precompute(
    config: DPOConfig, inputs: Inputs[Dataset], reference: ModelConfig, model: Callable[[], ScoringModel], say: Say
) -> StoredReference:
    """Compute or load the log-probabilities of all sets; `model` is called where some are not stored yet."""
    directory, pad, size = _directory(config), inputs.tokenizer.pad_token_id, config.batch.global_batch_size
    datasets = (inputs.train, *(inputs.validation.values() if config.trainer.validates else ()))
    load = PrecomputedReference.load_or_compute
    return StoredReference([(one, load(directory, reference, model, one.units, pad, size, say)) for one in datasets])

"""Direct preference optimization."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from mcore_rl.algorithms.inputs import Inputs, claim_output, load_inputs, total_steps
from mcore_rl.algorithms.metrics import speaker
from mcore_rl.algorithms.objectives import loss_of
from mcore_rl.algorithms.supervised import SupervisedRun
from mcore_rl.config import DPOConfig, ModelConfig
from mcore_rl.data.records import Dataset, load_preference_dataset
from mcore_rl.data.tokenize import load_tokenizer
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.errors import TrainingError, UserError
from mcore_rl.models.megatron.hf_checkpoint import SafetensorsDirectory
from mcore_rl.models.megatron.hf_config import check_model_fits, load_hf_config
from mcore_rl.models.megatron.weights import check_hf_tensors
from mcore_rl.models.policy.megatron_policy import MegatronPolicy
from mcore_rl.models.policy.reference import PrecomputedReference
from mcore_rl.models.policy.scoring import ScoringModel

# Before the first update policy and reference are the same weights; what is left is rounding, in nats a token.
FIRST_MARGIN_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}


def train_dpo(config: DPOConfig) -> None:
    """Make chosen responses likelier than rejected ones, relative to the reference."""
    inputs = _check_reference(config, load_inputs(config, load_preference_dataset, rows_per_unit=2))
    inputs = claim_output(config, inputs)
    policy = MegatronPolicy(
        config,
        total_steps(config.trainer, len(inputs.train), config.batch.global_batch_size),
        rows_per_unit=2,
        keep_reference=config.dpo.needs_reference and config.dpo.reference == "swap" and not config.dpo.reference_model,
    )
    reference = _reference(config, inputs, policy)

    def add_reference(data: BatchedDataDict[Any], indices: list[int] | None) -> None:
        if reference is None:
            return
        logprobs = reference.logprobs(data, indices)
        data["reference_policy_logprobs"] = logprobs.roll(-1, dims=1)  # column t scores token t + 1

    def check_margin(metrics: dict[str, Any], data: BatchedDataDict[Any]) -> None:
        if reference is None or config.dpo.reference_model:
            return
        margin = max(abs(metrics["rewards_chosen_mean"]), abs(metrics["rewards_rejected_mean"]))
        tokens = 1.0 if config.dpo.preference_average_log_probs else float(data["token_mask"][:, 1:].sum(1).max())
        if margin > FIRST_MARGIN_TOLERANCE[config.model.dtype] * tokens:
            raise TrainingError(
                f"step 1: before any update the policy must equal the reference, but rewards are off by {margin:.3g} "
                f"nats over at most {tokens:.0f} tokens; the reference log-probabilities are not of these weights or "
                "this data"
            )

    SupervisedRun(config, inputs, policy, loss_of(config), add_reference, check_margin).run()
    policy.shutdown()


def _reference(config: DPOConfig, inputs: Inputs[Dataset], policy: MegatronPolicy) -> ReferenceScores | None:
    """What the policy is compared with, if the loss compares it with something."""
    if not config.dpo.needs_reference:
        return None
    model: ScoringModel = policy
    if config.dpo.reference_model is not None:
        model = ScoringModel(_reference_config(config), rows_per_unit=2)
        speaker(model.is_writer)(f"reference: {model.describe()}")
    if config.dpo.reference == "precompute":
        return _precompute(config, inputs, model)
    return SwappedReference(policy) if model is policy else OtherModel(model)


def _reference_config(config: DPOConfig) -> DPOConfig:
    """The run's configuration with the reference in the policy's place."""
    path = Path(config.dpo.reference_model or "")
    model = ModelConfig(path=path, dtype=config.model.dtype, trust_remote_code=config.model.trust_remote_code)
    return config.model_copy(update={"model": model})


def _check_reference(config: DPOConfig, inputs: Inputs[Dataset]) -> Inputs[Dataset]:
    """`inputs`, once a reference of its own has been looked at.

    Raises:
        UserError: it cannot be used, or has another vocabulary.
    """
    if config.dpo.reference_model is None:
        return inputs
    judged = _reference_config(config)
    try:
        hf = load_hf_config(judged.model.path, judged.model.trust_remote_code)
        check_model_fits(hf, config.parallel, config.data.max_sequence_length, judged.model)
        check_hf_tensors(hf, SafetensorsDirectory(judged.model.path))
        tokenizer = load_tokenizer(judged.model.path, judged.model.trust_remote_code)
    except UserError as error:
        raise UserError(str(error).replace("model.path", "dpo.reference_model")) from None
    if tokenizer.get_vocab() != inputs.tokenizer.get_vocab():
        raise UserError(f"dpo.reference_model: {judged.model.path} has another vocabulary than model.path")
    return inputs


class ReferenceScores(Protocol):
    """Log-probabilities of a batch under the reference."""

    def logprobs(self, data: BatchedDataDict[Any], indices: list[int] | None) -> Tensor:
        """[B, S]; column t scores token t."""
        ...


class OtherModel:
    """Another model beside the policy."""

    def __init__(self, model: ScoringModel) -> None:
        self.model = model

    def logprobs(self, data: BatchedDataDict[Any], indices: list[int] | None) -> Tensor:
        return self.model.get_logprobs(data)["logprobs"]


class SwappedReference:
    """The reference weights take the policy's place for each batch."""

    def __init__(self, policy: MegatronPolicy) -> None:
        self.policy = policy

    def logprobs(self, data: BatchedDataDict[Any], indices: list[int] | None) -> Tensor:
        return self.policy.get_reference_policy_logprobs(data)["reference_logprobs"]


class StoredReference:
    """Everything was computed before training; `None` indices mean the validation set."""

    def __init__(self, train: PrecomputedReference, validation: PrecomputedReference | None) -> None:
        self.train, self.validation = train, validation

    def logprobs(self, data: BatchedDataDict[Any], indices: list[int] | None) -> Tensor:
        rows, width = data["input_ids"].shape
        if indices is None:
            assert self.validation is not None, "there is no validation set"
            return self.validation.rows(range(rows), width)
        return self.train.rows([2 * index + side for index in indices for side in (0, 1)], width)


def _precompute(config: DPOConfig, inputs: Inputs[Dataset], model: ScoringModel) -> StoredReference:
    directory = config.output_dir / "reference_logprobs"
    stored = [
        None
        if dataset is None
        else PrecomputedReference.load_or_compute(
            directory,
            model,
            dataset.units,
            inputs.tokenizer.pad_token_id,
            config.batch.global_batch_size,
            speaker(model.is_writer),
        )
        for dataset in (inputs.train, inputs.validation)
    ]
    assert stored[0] is not None
    return StoredReference(stored[0], stored[1])

"""Direct preference optimization."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mcore_rl.algorithms.inputs import Inputs, claim_output, load_inputs, total_steps
from mcore_rl.algorithms.objectives import loss_of
from mcore_rl.algorithms.supervised import SupervisedRun
from mcore_rl.config import DPOConfig
from mcore_rl.data.records import Dataset, load_preference_dataset
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.errors import TrainingError
from mcore_rl.models.policy.megatron_policy import MegatronPolicy
from mcore_rl.models.policy.reference import PrecomputedReference

# Before the first update policy and reference are the same weights; what is left is rounding, in nats a token.
FIRST_MARGIN_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}


def train_dpo(config: DPOConfig) -> None:
    """Make chosen responses likelier than rejected ones, relative to the reference."""
    inputs = claim_output(config, load_inputs(config, load_preference_dataset, rows_per_unit=2))
    swap = config.dpo.reference == "swap"
    policy = MegatronPolicy(
        config,
        total_steps(config.trainer, len(inputs.train), config.batch.global_batch_size),
        rows_per_unit=2,
        keep_reference=swap,
    )
    reference = SwappedReference(policy) if swap else _precompute(config, inputs, policy)

    def add_reference(data: BatchedDataDict[Any], indices: list[int] | None) -> None:
        logprobs = reference.logprobs(data, indices)
        data["reference_policy_logprobs"] = logprobs.roll(-1, dims=1)  # column t scores token t + 1

    def check_margin(metrics: dict[str, Any], data: BatchedDataDict[Any]) -> None:
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


def _precompute(config: DPOConfig, inputs: Inputs[Dataset], policy: MegatronPolicy) -> StoredReference:
    directory = config.output_dir / "reference_logprobs"
    stored = [
        None
        if dataset is None
        else PrecomputedReference.load_or_compute(
            directory, policy, dataset.units, inputs.tokenizer.pad_token_id, config.batch.global_batch_size
        )
        for dataset in (inputs.train, inputs.validation)
    ]
    assert stored[0] is not None
    return StoredReference(stored[0], stored[1])

"""Losses on pairs: rows 2i are chosen, rows 2i + 1 rejected."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_rl.algorithms.interfaces import LossFunction, LossType
from mcore_rl.algorithms.loss_functions.common import (
    LogprobLoss,
    masked_mean,
    masked_sum,
    require_config,
    require_count,
    require_keys,
    require_shape,
    sample_mask_of,
    token_mask_of,
)
from mcore_rl.algorithms.loss_functions.nll import NLLLoss
from mcore_rl.distributed.batched_data_dict import BatchedDataDict

PreferenceKind = Literal["sigmoid", "ipo"]


class PreferenceLossDataDict(TypedDict):
    """What `PreferenceLoss` reads: [B, S], [B, S], [B]."""

    input_ids: Tensor
    token_mask: Tensor
    sample_mask: Tensor


class DPOLossDataDict(PreferenceLossDataDict):
    """Column t of `reference_policy_logprobs` [B, S] scores token t + 1; its last column is not read."""

    reference_policy_logprobs: Tensor


class _RequiredDPOLossConfig(TypedDict):
    reference_policy_kl_penalty: float
    preference_loss_weight: float
    sft_loss_weight: float
    preference_average_log_probs: bool
    sft_average_log_probs: bool


class DPOLossConfig(_RequiredDPOLossConfig, total=False):
    """Keys of `DPOLossFn`; the two that are optional choose a variant of the preference loss."""

    preference_loss: PreferenceKind
    label_smoothing: float


class PreferenceLoss(LossFunction):
    """−log σ(β·(r_chosen − r_rejected)), averaged over the pairs of the global batch (Bradley–Terry).

    Args:
        preference_loss: sigmoid; or ipo: (Δr − 1 / 2β)² (arXiv:2310.12036, eq. 17).
        label_smoothing: ε of the conservative loss (1 − ε)·L(Δr) + ε·L(−Δr) (cDPO,
            https://ericmitchell.ai/cdpo.pdf); sigmoid only.
    """

    loss_type = LossType.SEQUENCE_LEVEL

    def __init__(self, preference_loss: PreferenceKind = "sigmoid", label_smoothing: float = 0.0) -> None:
        if preference_loss not in ("sigmoid", "ipo"):
            raise ValueError(f"preference_loss must be sigmoid or ipo, got {preference_loss!r}")
        if not 0 <= label_smoothing < 0.5:
            raise ValueError(f"label_smoothing must be in [0, 0.5), got {label_smoothing}")
        if label_smoothing and preference_loss == "ipo":
            raise ValueError("label_smoothing applies to preference_loss=sigmoid only")
        self.preference_loss = preference_loss
        self.label_smoothing = label_smoothing

    def split_output_tensor(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the chosen, rows of the rejected.

        Raises:
            ValueError: an odd number of rows.
        """
        if tensor.shape[0] % 2:
            raise ValueError(f"{type(self).__name__}: pairs need an even number of rows, got {tensor.shape[0]}")
        return tensor[::2], tensor[1::2]

    def _preference_loss(
        self, rewards: Tensor, sample_mask: Tensor, global_valid_seqs: Tensor, beta: float = 1.0
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Loss, accuracy and the mean rewards of chosen and rejected, from rewards [2n]."""
        chosen, rejected = self.split_output_tensor(rewards)
        mask, _ = self.split_output_tensor(sample_mask)
        pairs = require_count("global_valid_seqs", global_valid_seqs, self) / 2
        per_pair = self._per_pair(chosen - rejected, beta)
        return (
            masked_mean(per_pair, mask, global_normalization_factor=pairs),
            masked_mean((chosen > rejected).to(mask), mask, global_normalization_factor=pairs),
            masked_mean(chosen, mask, global_normalization_factor=pairs),
            masked_mean(rejected, mask, global_normalization_factor=pairs),
        )

    def _per_pair(self, margin: Tensor, beta: float) -> Tensor:
        if self.preference_loss == "ipo":
            return (margin - 1 / (2 * beta)) ** 2
        smoothing = self.label_smoothing
        right, wrong = -F.logsigmoid(beta * margin), -F.logsigmoid(-beta * margin)
        return right if smoothing == 0 else (1 - smoothing) * right + smoothing * wrong

    def __call__(
        self,
        rewards: Tensor,
        data: BatchedDataDict[Any],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """From rewards [2n] or [2n, 1], chosen and rejected interleaved."""
        require_keys(data, ("sample_mask",), self)
        rewards = rewards.squeeze(-1) if rewards.ndim == 2 else rewards
        rewards = rewards if rewards.dtype == torch.float64 else rewards.float()
        require_shape("sample_mask", data["sample_mask"], tuple(rewards.shape), self)
        mask = sample_mask_of(data, rewards)
        loss, accuracy, chosen, rejected = self._preference_loss(rewards, mask, global_valid_seqs)
        return loss, _pair_metrics(loss, accuracy, chosen, rejected, mask)


class BradleyTerryLoss(PreferenceLoss):
    """The reward model's loss: `PreferenceLoss` on its rewards, with an optional margin and centring.

    Args:
        center_rewards_coefficient: weight of the mean of (r_chosen + r_rejected)², which keeps rewards
            near zero (arXiv:2312.09244).

    `data["margin"]` [2n] (both rows of a pair alike), if there, is subtracted from r_chosen − r_rejected
    (Llama 2, arXiv:2307.09288, eq. 2).
    """

    def __init__(self, center_rewards_coefficient: float = 0.0) -> None:
        super().__init__()
        self.center_rewards_coefficient = center_rewards_coefficient

    def __call__(
        self,
        rewards: Tensor,
        data: BatchedDataDict[Any],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        loss, metrics = super().__call__(rewards, data, global_valid_seqs, global_valid_toks)
        wide = rewards.reshape(-1) if rewards.dtype == torch.float64 else rewards.reshape(-1).float()
        chosen, rejected = self.split_output_tensor(wide)
        mask, _ = self.split_output_tensor(sample_mask_of(data, wide))
        pairs = require_count("global_valid_seqs", global_valid_seqs, self) / 2
        if "margin" in data:
            margin = data["margin"].to(wide)[::2]
            loss = masked_mean(-F.logsigmoid(chosen - rejected - margin), mask, global_normalization_factor=pairs)
        if self.center_rewards_coefficient:
            center = masked_mean((chosen + rejected) ** 2, mask, global_normalization_factor=pairs)
            loss = loss + self.center_rewards_coefficient * center
        return loss, {**metrics, "loss": loss.detach()}


class DPOLossFn(PreferenceLoss, LogprobLoss):
    """Direct preference optimization (arXiv:2305.18290), with an optional SFT term on the chosen rows.

    w_p · L_pref(r) + w_s · NLL(chosen), with r = Σ (logprob − reference logprob) over a row's tokens, or
    their mean with `preference_average_log_probs`. Normalised by global_valid_seqs / 2.
    """

    loss_type = LossType.SEQUENCE_LEVEL
    required_keys = ("input_ids", "token_mask", "sample_mask", "reference_policy_logprobs")

    def __init__(self, cfg: DPOLossConfig) -> None:
        require_config(cfg, DPOLossConfig, self)
        super().__init__(cfg.get("preference_loss", "sigmoid"), cfg.get("label_smoothing", 0.0))
        self.reference_policy_kl_penalty = cfg["reference_policy_kl_penalty"]
        self.preference_loss_weight = cfg["preference_loss_weight"]
        self.sft_loss_weight = cfg["sft_loss_weight"]
        self.preference_average_log_probs = cfg["preference_average_log_probs"]
        self.sft_average_log_probs = cfg["sft_average_log_probs"]
        self.sft_loss = NLLLoss()

    __call__ = LogprobLoss.__call__  # type: ignore[assignment]

    def from_logprobs(
        self,
        next_token_logprobs: Tensor,
        data: BatchedDataDict[Any],
        global_valid_seqs: Tensor | None,
        global_valid_toks: Tensor | None = None,
        entropy: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        self.check(next_token_logprobs, data)
        seqs = require_count("global_valid_seqs", global_valid_seqs, self)
        sample_mask = sample_mask_of(data, next_token_logprobs)
        preference, accuracy, chosen, rejected = self._preference_of(next_token_logprobs, data, seqs)
        sft = torch.zeros_like(preference)
        if self.sft_loss_weight:
            per_row, _ = self.sft_loss.from_logprobs(
                next_token_logprobs,
                data,
                None,
                None,
                dpo_loss=True,
                dpo_average_log_probs=self.sft_average_log_probs,
            )
            sft = masked_mean(per_row[::2], sample_mask[::2], global_normalization_factor=seqs / 2)
        loss = self.preference_loss_weight * preference + self.sft_loss_weight * sft
        metrics = _pair_metrics(loss, accuracy, chosen, rejected, sample_mask)
        return loss, {**metrics, "sft_loss": sft.detach(), "preference_loss": preference.detach()}

    def _dpo_loss(
        self,
        next_token_logits: Tensor,
        data: BatchedDataDict[Any],
        global_valid_seqs: Tensor,
        vocab_parallel_rank: int | None = None,
        vocab_parallel_group: ProcessGroup | None = None,
        context_parallel_group: ProcessGroup | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The preference term alone: its loss, accuracy, and the mean rewards of chosen and rejected."""
        logprobs, _ = self.next_token_logprobs(
            next_token_logits, data, vocab_parallel_rank, vocab_parallel_group, context_parallel_group
        )
        return self._preference_of(logprobs, data, global_valid_seqs)

    def _preference_of(
        self, logprobs: Tensor, data: BatchedDataDict[Any], global_valid_seqs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self._preference_loss(
            self._rewards(logprobs, data),
            sample_mask_of(data, logprobs),
            global_valid_seqs,
            self.reference_policy_kl_penalty,
        )

    def _rewards(self, logprobs: Tensor, data: BatchedDataDict[Any]) -> Tensor:
        """[B]: how much likelier each row became than under the reference, in nats."""
        reference = data["reference_policy_logprobs"]
        require_shape("reference_policy_logprobs", reference, tuple(data["token_mask"].shape), self)
        mask = token_mask_of(data, logprobs)
        rewards = masked_sum(logprobs - reference[:, :-1].to(logprobs), mask, dim=-1)
        return rewards / mask.sum(-1).clamp(min=1) if self.preference_average_log_probs else rewards


def _pair_metrics(loss: Tensor, accuracy: Tensor, chosen: Tensor, rejected: Tensor, mask: Tensor) -> dict[str, Any]:
    return {
        "loss": loss.detach(),
        "accuracy": accuracy.detach(),
        "rewards_chosen_mean": chosen.detach(),
        "rewards_rejected_mean": rejected.detach(),
        "num_valid_samples": mask.sum(),
    }

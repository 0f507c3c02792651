"""Preference losses: DPO and its variants on pairs, and KTO (arXiv:2402.01306) without pairs.

In a batch of pairs, rows 2i are chosen and rows 2i + 1 rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.errors import ContractError
from mcore_rl.losses.common import (
    LogprobLoss,
    LossFunction,
    LossType,
    NLLLoss,
    masked_mean,
    masked_sum,
    reads_options,
    require_count,
    require_keys,
    require_shape,
    sample_mask_of,
    token_mask_of,
)
from mcore_rl.losses.options import DPOOptions, KTOOptions, PreferenceLossType, typed_dict

if TYPE_CHECKING:
    DPOLossConfig = Mapping[str, Any]
    KTOLossConfig = Mapping[str, Any]
else:
    DPOLossConfig = typed_dict("DPOLossConfig", DPOOptions)
    KTOLossConfig = typed_dict("KTOLossConfig", KTOOptions)


OF_BOTH_REWARDS: frozenset[PreferenceLossType] = frozenset(("apo_zero", "apo_down", "orpo"))
"""Losses that depend on both rewards, not only on their difference."""


class PreferenceLossDataDict(TypedDict):
    """The entries that `PreferenceLoss` reads: [B, S], [B, S], [B]."""

    input_ids: Tensor
    token_mask: Tensor
    sample_mask: Tensor


class DPOLossDataDict(PreferenceLossDataDict):
    """Column t of `reference_policy_logprobs` [B, S] scores token t + 1; its last column is not read."""

    reference_policy_logprobs: Tensor


class PreferenceLoss(LossFunction):
    """−log σ(β·(r_chosen − r_rejected)), averaged over the pairs of the global batch (Bradley–Terry)."""

    loss_type = LossType.SEQUENCE_LEVEL
    rows_per_unit = 2

    def __call__(
        self,
        rewards: Tensor | None = None,
        data: Any = None,
        global_valid_seqs: Tensor | None = None,
        global_valid_toks: Tensor | None = None,
        *,
        logits: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss of rewards [2n] or [2n, 1], chosen and rejected interleaved; `logits` is an alias."""
        rewards = rewards if logits is None else logits
        if rewards is None or data is None:
            raise ContractError(f"{type(self).__name__}: give rewards [2n] and data")
        require_keys(data, ("sample_mask",), self)
        rewards = rewards.squeeze(-1) if rewards.ndim == 2 else rewards
        rewards = rewards if rewards.dtype == torch.float64 else rewards.float()
        require_shape("sample_mask", data["sample_mask"], tuple(rewards.shape), self)
        mask, seqs = sample_mask_of(data, rewards), require_count("global_valid_seqs", global_valid_seqs, self)
        loss, accuracy, chosen, rejected = self._loss_of_rewards(rewards, data, mask, seqs)
        return loss, _pair_metrics(loss, accuracy, chosen, rejected, mask)

    def _loss_of_rewards(
        self, rewards: Tensor, data: Any, mask: Tensor, seqs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute `_preference_loss` from rewards [2n] in fp32 (fp64 for fp64) and a sample mask of the same type."""
        return self._preference_loss(rewards, mask, seqs)

    def split_output_tensor(
        self, tensor: Shaped[Tensor, rows * rest]
    ) -> tuple[Shaped[Tensor, pairs * rest], Shaped[Tensor, pairs * rest]]:
        """Return the rows of the chosen and the rows of the rejected responses.

        Raises:
            ContractError: the number of rows is odd.
        """
        if tensor.shape[0] % 2:
            raise ContractError(f"{type(self).__name__}: pairs need an even number of rows, got {tensor.shape[0]}")
        return tensor[::2], tensor[1::2]

    def _preference_loss(
        self,
        rewards: Float[Tensor, " rows"],
        sample_mask: Float[Tensor, " rows"],
        global_valid_seqs: Tensor,
        beta: float = 1.0,
        margin: Float[Tensor, " pairs"] | float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return loss, accuracy and mean rewards of chosen and rejected; `margin` is the required difference."""
        chosen, rejected = self.split_output_tensor(rewards)
        mask, _ = self.split_output_tensor(sample_mask)
        pairs = global_valid_seqs / 2
        per_pair = self._of_rewards(chosen, rejected, margin, beta)
        return (
            masked_mean(per_pair, mask, global_normalization_factor=pairs),
            masked_mean((chosen > rejected).to(mask), mask, global_normalization_factor=pairs),
            masked_mean(chosen, mask, global_normalization_factor=pairs),
            masked_mean(rejected, mask, global_normalization_factor=pairs),
        )

    def _of_rewards(
        self,
        chosen: Float[Tensor, " pairs"],
        rejected: Float[Tensor, " pairs"],
        margin: Float[Tensor, " pairs"] | float,
        beta: float,
    ) -> Float[Tensor, " pairs"]:
        return self._per_pair(chosen - rejected - margin, beta)

    def _per_pair(self, margin: Float[Tensor, " pairs"], beta: float) -> Float[Tensor, " pairs"]:
        return -F.logsigmoid(beta * margin)


class BradleyTerryLoss(PreferenceLoss):
    """The reward model's loss: `PreferenceLoss` on its rewards, with an optional margin and centring.

    Args:
        center_rewards_coefficient: weight of the mean of (r_chosen + r_rejected)², which keeps rewards
            near zero (arXiv:2312.09244).

    If `data["margin"]` [2n] (equal for both rows of a pair) is given, it is subtracted from r_chosen − r_rejected
    (Llama 2, arXiv:2307.09288, eq. 2).
    """

    def __init__(self, center_rewards_coefficient: float = 0.0) -> None:
        self.center_rewards_coefficient = center_rewards_coefficient

    def _loss_of_rewards(
        self, rewards: Tensor, data: Any, mask: Tensor, seqs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        margin = data["margin"].to(rewards)[::2] if "margin" in data else 0.0
        loss, accuracy, chosen_mean, rejected_mean = self._preference_loss(rewards, mask, seqs, margin=margin)
        if self.center_rewards_coefficient:
            chosen, rejected = self.split_output_tensor(rewards)
            center = masked_mean((chosen + rejected) ** 2, mask[::2], global_normalization_factor=seqs / 2)
            loss = loss + self.center_rewards_coefficient * center
        return loss, accuracy, chosen_mean, rejected_mean


@reads_options(DPOOptions)
class DPOLossFn(LogprobLoss, PreferenceLoss):  # type: ignore[misc]  # called with logits, not rewards
    """Direct preference optimization (arXiv:2305.18290) and variants, with an optional SFT term on the chosen rows.

    The loss is w_p · L_pref(r) + w_s · NLL(chosen), with r = Σ (logprob − reference logprob) over a row's tokens, or
    their mean with `preference_average_log_probs`. It is normalised by global_valid_seqs / 2. The values of
    `DPOOptions` are also attributes of the loss. Losses without a reference ignore `reference_policy_logprobs`.
    """

    reads_counted_tokens_only = True
    loss_type = LossType.SEQUENCE_LEVEL
    required_keys: tuple[str, ...] = ("input_ids", "token_mask", "sample_mask", "reference_policy_logprobs")
    options: DPOOptions

    def __init__(self, cfg: DPOLossConfig | DPOOptions) -> None:
        self.options = DPOOptions.from_config(cfg, type(self).__name__)
        self.sft_loss = NLLLoss()
        # These properties are cached, because every microbatch reads them.
        self.kinds, self.averages = self.options.preference_losses, self.options.averages
        self.needs_reference = self.options.needs_reference
        if not self.needs_reference:
            self.required_keys = tuple(key for key in self.required_keys if key != "reference_policy_logprobs")

    def from_logprobs(
        self,
        next_token_logprobs: Float[Tensor, "batch predicted"],
        data: BatchedDataDict[Any],
        global_valid_seqs: Tensor | None,
        global_valid_toks: Tensor | None = None,
        entropy: Tensor | None = None,
    ) -> tuple[Float[Tensor, ""], dict[str, Any]]:
        self.check(next_token_logprobs, data)
        options = self.options
        seqs = require_count("global_valid_seqs", global_valid_seqs, self)
        sample_mask = sample_mask_of(data, next_token_logprobs)
        preference, accuracy, chosen, rejected = self._preference_of(next_token_logprobs, data, seqs)
        sft = torch.zeros_like(preference)
        if options.sft_loss_weight:
            per_row, _ = self.sft_loss.from_logprobs(
                next_token_logprobs,
                data,
                None,
                None,
                dpo_loss=True,
                dpo_average_log_probs=options.sft_average_log_probs,
            )
            sft = masked_mean(per_row[::2], sample_mask[::2], global_normalization_factor=seqs / 2)
        loss = options.preference_loss_weight * preference + options.sft_loss_weight * sft
        metrics = _pair_metrics(loss, accuracy, chosen, rejected, sample_mask)
        metrics |= self._logprobs_of_sides(next_token_logprobs.detach(), data, seqs)
        metrics |= self._parts(next_token_logprobs.detach(), data, seqs)
        return loss, {**metrics, "sft_loss": sft.detach(), "preference_loss": preference.detach()}

    def _parts(self, logprobs: Tensor, data: BatchedDataDict[Any], seqs: Tensor) -> dict[str, Tensor]:
        """Return each preference loss without its weight, if there are several."""
        if len(self.kinds) == 1:
            return {}
        chosen, rejected = self.split_output_tensor(self._rewards(logprobs, data))
        mask, beta = sample_mask_of(data, logprobs)[::2], self.options.reference_policy_kl_penalty
        return {
            f"preference_loss_{kind}": masked_mean(
                self._of_kind(kind, chosen, rejected, beta), mask, global_normalization_factor=seqs / 2
            )
            for kind in self.kinds
        }

    def _dpo_loss(
        self,
        next_token_logits: Tensor,
        data: BatchedDataDict[Any],
        global_valid_seqs: Tensor,
        vocab_parallel_rank: int | None = None,
        vocab_parallel_group: ProcessGroup | None = None,
        context_parallel_group: ProcessGroup | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute the preference term: its loss, accuracy, and the mean rewards of chosen and rejected.

        It exists for ported callers; `from_logprobs` does not use it.
        """
        logprobs, _ = self.next_token_logprobs(
            next_token_logits, data, vocab_parallel_rank, vocab_parallel_group, context_parallel_group
        )
        return self._preference_of(logprobs, data, require_count("global_valid_seqs", global_valid_seqs, self))

    def _preference_of(
        self, logprobs: Tensor, data: BatchedDataDict[Any], seqs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self._preference_loss(
            self._rewards(logprobs, data),
            sample_mask_of(data, logprobs),
            seqs,
            self.options.reference_policy_kl_penalty,
        )

    def _logprobs_of_sides(self, logprobs: Tensor, data: BatchedDataDict[Any], seqs: Tensor) -> dict[str, Tensor]:
        """Return the mean log-probabilities of whole responses, in nats."""
        sums = masked_sum(logprobs, token_mask_of(data, logprobs), dim=-1)
        mask = sample_mask_of(data, logprobs)
        means = (masked_mean(side, m, global_normalization_factor=seqs / 2) for side, m in zip(
            self.split_output_tensor(sums), self.split_output_tensor(mask), strict=True))  # fmt: skip
        return dict(zip(("logprobs_chosen_mean", "logprobs_rejected_mean"), means, strict=True))

    def _of_rewards(
        self,
        chosen: Float[Tensor, " pairs"],
        rejected: Float[Tensor, " pairs"],
        margin: Float[Tensor, " pairs"] | float,
        beta: float,
    ) -> Float[Tensor, " pairs"]:
        """Return the weighted sum of the preference losses."""
        kinds = self.kinds
        parts = [self._per_pair(chosen - rejected - margin, beta)] if kinds.keys() - OF_BOTH_REWARDS else []
        parts += [
            w * self._of_kind(kind, chosen, rejected, beta) for kind, w in kinds.items() if kind in OF_BOTH_REWARDS
        ]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def _per_pair(self, margin: Float[Tensor, " pairs"], beta: float) -> Float[Tensor, " pairs"]:
        """Return the weighted sum of the losses that depend only on the margin."""
        kinds = self.kinds
        parts = [w * self._of_margin(kind, margin, beta) for kind, w in kinds.items() if kind not in OF_BOTH_REWARDS]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def _of_kind(
        self,
        kind: PreferenceLossType,
        chosen: Float[Tensor, " pairs"],
        rejected: Float[Tensor, " pairs"],
        beta: float,
    ) -> Float[Tensor, " pairs"]:
        if kind == "apo_zero":
            return 1 - torch.sigmoid(beta * chosen) + torch.sigmoid(beta * rejected)
        if kind == "apo_down":
            return torch.sigmoid(beta * chosen) + 1 - torch.sigmoid(beta * (chosen - rejected))
        if kind == "orpo":
            return -beta * F.logsigmoid(_log_odds(chosen) - _log_odds(rejected))
        return self._of_margin(kind, chosen - rejected, beta)

    def _of_margin(
        self, kind: PreferenceLossType, margin: Float[Tensor, " pairs"], beta: float
    ) -> Float[Tensor, " pairs"]:
        smoothing = self.options.label_smoothing
        if kind == "ipo":
            return (margin - 1 / (2 * beta)) ** 2
        if kind == "hinge":
            return F.relu(1 - beta * margin)
        logit = beta * margin - (self.options.simpo_gamma if kind == "simpo" else 0)
        right, wrong = super()._per_pair(logit, 1.0), super()._per_pair(-logit, 1.0)
        if kind == "robust":
            return ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing)
        return right if smoothing == 0 else (1 - smoothing) * right + smoothing * wrong

    def _rewards(self, logprobs: Tensor, data: BatchedDataDict[Any]) -> Float[Tensor, " rows"]:
        """Return each row's log-probability relative to the reference, or itself without a reference, in nats."""
        if self.needs_reference:
            reference = data["reference_policy_logprobs"]
            require_shape("reference_policy_logprobs", reference, tuple(data["token_mask"].shape), self)
            logprobs = logprobs - reference[:, :-1].to(logprobs)
        mask = token_mask_of(data, logprobs)
        rewards = masked_sum(logprobs, mask, dim=-1)
        return rewards / mask.sum(-1).clamp(min=1) if self.averages else rewards


def _log_odds(logprob: Tensor) -> Tensor:
    """Return log(p / (1 − p)) for log p < 0. For log p = 0 (an empty response), use the largest p below 1."""
    logprob = logprob.clamp(max=-torch.finfo(logprob.dtype).eps)
    return logprob - torch.log(-torch.expm1(logprob))


def _pair_metrics(loss: Tensor, accuracy: Tensor, chosen: Tensor, rejected: Tensor, mask: Tensor) -> dict[str, Any]:
    return {
        "loss": loss.detach(),
        "accuracy": accuracy.detach(),
        "rewards_chosen_mean": chosen.detach(),
        "rewards_rejected_mean": rejected.detach(),
        "num_valid_samples": mask.sum() / 2,  # pairs
    }


class KTOLossDataDict(TypedDict):
    """`desirable` [B] (bool) and `kl_reference_point` [B] (z₀, see `kto_reference_point`).

    Column t of `reference_policy_logprobs` [B, S] scores token t + 1, as for DPO.
    """

    input_ids: Tensor
    token_mask: Tensor
    sample_mask: Tensor
    reference_policy_logprobs: Tensor
    desirable: Tensor
    kl_reference_point: Tensor


def kto_reference_point(
    sequence_logprobs: Float[Tensor, " sequences"], reference_sequence_logprobs: Float[Tensor, " sequences"]
) -> Float[Tensor, ""]:
    """Return z₀ = max(0, mean(log π − log π_ref)) over mismatched prompts and completions; no gradient.

    The result is one number for the whole global batch: pass sums of the whole batch [n], then expand it to every row.
    """
    return (sequence_logprobs.detach() - reference_sequence_logprobs).mean().clamp(min=0)


@reads_options(KTOOptions)
class KTOLossFn(LogprobLoss):
    """λ_D·(1 − σ(β(r − z₀))) for desirable rows, λ_U·(1 − σ(β(z₀ − r))) for the others.

    r = Σ (logprob − reference logprob); averaged over the sequences of the global batch.
    """

    reads_counted_tokens_only = True
    loss_type = LossType.SEQUENCE_LEVEL
    required_keys = tuple(KTOLossDataDict.__annotations__)

    options: KTOOptions

    def __init__(self, cfg: KTOLossConfig | KTOOptions) -> None:
        self.options = KTOOptions.from_config(cfg, type(self).__name__)

    def from_logprobs(
        self,
        next_token_logprobs: Float[Tensor, "batch predicted"],
        data: BatchedDataDict[Any],
        global_valid_seqs: Tensor | None,
        global_valid_toks: Tensor | None = None,
        entropy: Tensor | None = None,
    ) -> tuple[Float[Tensor, ""], dict[str, Any]]:
        self.check(next_token_logprobs, data)
        seqs = require_count("global_valid_seqs", global_valid_seqs, self)
        reference = data["reference_policy_logprobs"]
        require_shape("reference_policy_logprobs", reference, tuple(data["token_mask"].shape), self)
        sample_mask = sample_mask_of(data, next_token_logprobs)
        rewards = masked_sum(
            next_token_logprobs - reference[:, :-1].to(next_token_logprobs),
            token_mask_of(data, next_token_logprobs),
            dim=-1,
        )
        desirable = data["desirable"].bool()
        options = self.options
        margin = options.reference_policy_kl_penalty * (rewards - data["kl_reference_point"].to(rewards))
        value = torch.where(
            desirable,
            options.desirable_weight * torch.sigmoid(-margin),
            options.undesirable_weight * torch.sigmoid(margin),
        )
        loss = masked_mean(value, sample_mask, global_normalization_factor=seqs)
        desirable_mask = sample_mask * desirable
        undesirable_mask = sample_mask - desirable_mask
        return loss, {
            "loss": loss.detach(),
            "rewards_desirable_sum": masked_sum(rewards.detach(), desirable_mask),
            "kl_reference_point": masked_mean(
                data["kl_reference_point"].to(rewards), sample_mask, global_normalization_factor=seqs
            ),
            "rewards_undesirable_sum": masked_sum(rewards.detach(), undesirable_mask),
            "num_desirable_samples": desirable_mask.sum(),
            "num_valid_samples": sample_mask.sum(),
        }

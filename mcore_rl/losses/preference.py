"""Preference losses: DPO and its variants on pairs, and KTO (arXiv:2402.01306) without pairs.

In a batch of pairs, rows 2i are chosen and rows 2i + 1 rejected. Each loss on pairs is a short function of a pair's
rewards; `PAIR_LOSSES` lists these functions by name. `DPOLossFn` adds what several losses share: rewards from
log-probabilities, weights of tokens and pairs, the f-divergence, weighted sums, and the mean over the global batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_rl.distributed.batched_data_dict import BatchedDataDict, batch_share
from mcore_rl.distributed.divergences import FinalHiddenStates
from mcore_rl.errors import ContractError
from mcore_rl.losses.common import (
    LARGEST_EXPONENT,
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
from mcore_rl.losses.options import OF_BATCH, DPOOptions, KTOOptions, PreferenceLossType, typed_dict


@dataclass(frozen=True)
class Pairs:
    """The quantities of n pairs that the losses on pairs read, in nats and not multiplied by β.

    chosen, rejected: rewards [n] of the responses, relative to the reference if there is one.
    margin: [n], the score of the chosen response minus the score of the rejected response. A score is the
        f-divergence's value (see `f_divergence_scores`); for the reverse KL, it is the reward.
    mean_margin: like `margin`, but each score is divided by the response's number of tokens; for sigmoid_norm.
    policy_margin: [n], chosen minus rejected log-probability under the policy, without the reference; for aot.
    partners: for each loss that sorts values of all pairs, the result [2n] of `batch_partners`.
    """

    chosen: Float[Tensor, " n"]
    rejected: Float[Tensor, " n"]
    margin: Float[Tensor, " n"]
    beta: float
    options: DPOOptions
    mean_margin: Float[Tensor, " n"] | None = None
    policy_margin: Float[Tensor, " n"] | None = None
    partners: Mapping[PreferenceLossType, Float[Tensor, " rows"]] = field(default_factory=dict)


PairLoss = Callable[[Pairs], Tensor]


def logistic(logit: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return −log σ(x); with label smoothing ε, return −(1 − ε)·log σ(x) − ε·log σ(−x) (conservative DPO)."""
    right = -F.logsigmoid(logit)
    return right if smoothing == 0 else (1 - smoothing) * right + smoothing * -F.logsigmoid(-logit)


def sigmoid(pairs: Pairs) -> Tensor:
    return logistic(pairs.beta * pairs.margin, pairs.options.label_smoothing)


def sigmoid_norm(pairs: Pairs) -> Tensor:
    assert pairs.mean_margin is not None, "sigmoid_norm reads means over the tokens of responses"
    return logistic(pairs.beta * pairs.mean_margin, pairs.options.label_smoothing)


def simpo(pairs: Pairs) -> Tensor:
    return logistic(pairs.beta * pairs.margin - pairs.options.simpo_gamma, pairs.options.label_smoothing)


def ipo(pairs: Pairs) -> Tensor:
    return (pairs.margin - 1 / (2 * pairs.beta)) ** 2


def hinge(pairs: Pairs) -> Tensor:
    return F.relu(1 - pairs.beta * pairs.margin)


def robust(pairs: Pairs) -> Tensor:
    logit, smoothing = pairs.beta * pairs.margin, pairs.options.label_smoothing
    return ((1 - smoothing) * logistic(logit) - smoothing * logistic(-logit)) / (1 - 2 * smoothing)


def exo_pair(pairs: Pairs) -> Tensor:
    """Return KL(q ‖ p) with q = (σ(x), σ(−x)), p = (1 − ε, ε), x = β·margin and ε the label smoothing."""
    logit, smoothing = pairs.beta * pairs.margin, pairs.options.label_smoothing
    log_right, log_wrong = F.logsigmoid(logit), F.logsigmoid(-logit)
    right = torch.sigmoid(logit) * (log_right - math.log1p(-smoothing))
    return right + torch.sigmoid(-logit) * (log_wrong - math.log(smoothing))


def discopop(pairs: Pairs) -> Tensor:
    """Return (1 − m)·(−log σ(x)) + m·exp(−x) with x = β·margin and m = σ(x / τ).

    The second term is computed as a single exponential, because m would be 0 and exp(−x) infinite for very negative x.
    """
    logit = pairs.beta * pairs.margin
    modulation = logit / pairs.options.discopop_tau
    exponential = torch.exp(F.logsigmoid(modulation) - logit)
    return -F.logsigmoid(logit) * torch.sigmoid(-modulation) + exponential


def apo_zero(pairs: Pairs) -> Tensor:
    return 1 - torch.sigmoid(pairs.beta * pairs.chosen) + torch.sigmoid(pairs.beta * pairs.rejected)


def apo_down(pairs: Pairs) -> Tensor:
    return torch.sigmoid(pairs.beta * pairs.chosen) + 1 - torch.sigmoid(pairs.beta * (pairs.chosen - pairs.rejected))


def orpo(pairs: Pairs) -> Tensor:
    return -pairs.beta * F.logsigmoid(_log_odds(pairs.chosen) - _log_odds(pairs.rejected))


def nca_pair(pairs: Pairs) -> Tensor:
    chosen, rejected = pairs.beta * pairs.chosen, pairs.beta * pairs.rejected
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def bco_pair(pairs: Pairs) -> Tensor:
    return -F.logsigmoid(pairs.beta * pairs.chosen) - F.logsigmoid(-pairs.beta * pairs.rejected)


def sppo_hard(pairs: Pairs) -> Tensor:
    half = 0.5 / pairs.beta
    return (pairs.chosen - half) ** 2 + (pairs.rejected + half) ** 2


def aot(pairs: Pairs) -> Tensor:
    """Return −log σ(β·(policy margin − reference margin)), for two margins of equal rank in the global batch.

    The n-th largest policy margin is compared with the n-th largest reference margin, usually of another pair.
    """
    assert pairs.policy_margin is not None, "aot reads the policy's margins"
    partner = pairs.partners["aot"][::2]
    return logistic(pairs.beta * (pairs.policy_margin - partner), pairs.options.label_smoothing)


def aot_unpaired(pairs: Pairs) -> Tensor:
    """Return −log σ(β·(chosen reward − rejected reward)), for two rewards of equal rank in the global batch.

    The n-th largest chosen reward is compared with the n-th largest rejected reward. That reward may belong to another
    microbatch, so it is a constant here. The gradient of this microbatch's rejected rewards comes from a second term,
    whose value is 0.
    """
    partner, smoothing = pairs.partners["aot_unpaired"], pairs.options.label_smoothing
    value = logistic(pairs.beta * (pairs.chosen - partner[::2]), smoothing)
    of_rejected = logistic(pairs.beta * (partner[1::2] - pairs.rejected), smoothing)
    return value + (of_rejected - of_rejected.detach())


OF_MARGIN: Mapping[PreferenceLossType, PairLoss] = {
    "sigmoid": sigmoid,
    "ipo": ipo,
    "hinge": hinge,
    "robust": robust,
    "simpo": simpo,
    "sigmoid_norm": sigmoid_norm,
    "exo_pair": exo_pair,
    "discopop": discopop,
}
"""Losses that are functions of a pair's margin: the score of the chosen response minus that of the rejected one."""
OF_BOTH_REWARDS: Mapping[PreferenceLossType, PairLoss] = {
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "orpo": orpo,
    "nca_pair": nca_pair,
    "bco_pair": bco_pair,
    "sppo_hard": sppo_hard,
    "aot": aot,
    "aot_unpaired": aot_unpaired,
}
"""Losses that depend on more than the difference of a pair's rewards: on both rewards, or on rewards of other pairs."""
PAIR_LOSSES: Mapping[PreferenceLossType, PairLoss] = {**OF_MARGIN, **OF_BOTH_REWARDS}


def weighted_sum(kinds: Mapping[PreferenceLossType, float], pairs: Pairs) -> Float[Tensor, " n"]:
    """Return each pair's weighted sum of losses; `kinds` maps each loss to its weight."""
    of_margin = [weight * OF_MARGIN[kind](pairs) for kind, weight in kinds.items() if kind in OF_MARGIN]
    parts = [_sum(of_margin)] if of_margin else []
    parts += [weight * OF_BOTH_REWARDS[kind](pairs) for kind, weight in kinds.items() if kind in OF_BOTH_REWARDS]
    return _sum(parts)


def _sum(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def f_divergence_scores(log_ratio: Float[Tensor, " rows"], options: DPOOptions) -> Float[Tensor, " rows"]:
    """Return f′(u) for u = exp(`log_ratio`) and the f-divergence of the options (arXiv:2309.16240, table 1).

    Constants that cancel in differences are left out.
    """
    kind = options.f_divergence_type
    if kind == "js_divergence":
        return math.log(2) + F.logsigmoid(log_ratio)
    if kind == "forward_kl":
        return _alpha_scores(log_ratio, 0.0)
    if kind == "alpha_divergence":
        return _alpha_scores(log_ratio, options.f_alpha_divergence_coef)
    return log_ratio


def _alpha_scores(log_ratio: Tensor, alpha: float) -> Tensor:
    """Return (u^(α − 1) − 1) / (α − 1) for u = exp(`log_ratio`); for α = 1 return its limit, log u."""
    power = alpha - 1
    if abs(power) < 1e-6:
        return log_ratio
    return torch.expm1((power * log_ratio).clamp(max=LARGEST_EXPONENT)) / power


def shared_length_weights(mask: Float[Tensor, "rows predicted"], alpha: float) -> Float[Tensor, "rows predicted"]:
    """Return LD-DPO's token weights: 1 for the first n tokens of each response, `alpha` for its later tokens.

    n is the number of tokens in the pair's shorter response.
    """
    lengths = mask.sum(-1)
    shared = torch.minimum(lengths[::2], lengths[1::2]).repeat_interleave(2)
    return torch.where(mask.cumsum(-1) > shared[:, None], alpha, 1.0).to(mask)


def batch_partners(
    kinds: Mapping[PreferenceLossType, float],
    policy: Float[Tensor, " rows"],
    reference: Float[Tensor, " rows"],
    counted: Bool[Tensor, " n"],
) -> dict[PreferenceLossType, Float[Tensor, " rows"]]:
    """Return the values with which aot and aot_unpaired compare the rows' values: [2n] for each of them in `kinds`.

    Both losses compare values of equal rank in the global batch. aot compares a pair's policy margin with a reference
    margin. aot_unpaired compares a chosen reward with a rejected reward, and vice versa. Equal values are sorted in the
    order of the pairs.

    Args:
        kinds: losses and their weights.
        policy: for all rows of the global batch, the row's sum of log-probabilities under the policy.
        reference: for all rows, the sum of log-probabilities under the reference.
        counted: whether each pair counts; rows of pairs that do not count get 0.
    """
    partners: dict[PreferenceLossType, Tensor] = {}
    if "aot" in kinds:
        own, other = policy[::2] - policy[1::2], reference[::2] - reference[1::2]
        partners["aot"] = _of_equal_rank(own, other, counted).repeat_interleave(2)
    if "aot_unpaired" in kinds:
        chosen, rejected = (policy - reference).unflatten(0, (-1, 2)).unbind(1)
        of_chosen, of_rejected = _of_equal_rank(chosen, rejected, counted), _of_equal_rank(rejected, chosen, counted)
        partners["aot_unpaired"] = torch.stack((of_chosen, of_rejected), 1).flatten()
    return partners


def _of_equal_rank(own: Tensor, other: Tensor, counted: Tensor) -> Tensor:
    """For each value of `own`, return the value of `other` that has the same rank by size.

    Values for which `counted` is False have no rank; the result for them is 0.
    """
    found, (places,) = torch.zeros_like(own), counted.nonzero(as_tuple=True)
    found[places[own[places].argsort(stable=True)]] = other[places].sort().values
    return found


def _log_odds(logprob: Tensor) -> Tensor:
    """Return log(p / (1 − p)), given log p. If log p is 0 (an empty response), use the largest p below 1."""
    logprob = logprob.clamp(max=-torch.finfo(logprob.dtype).eps)
    return logprob - torch.log(-torch.expm1(logprob))


if TYPE_CHECKING:
    DPOLossConfig = Mapping[str, Any]
    KTOLossConfig = Mapping[str, Any]
else:
    DPOLossConfig = typed_dict("DPOLossConfig", DPOOptions)
    KTOLossConfig = typed_dict("KTOLossConfig", KTOOptions)


class PreferenceLossDataDict(TypedDict):
    """The entries that `PreferenceLoss` reads: `input_ids` and `token_mask` [B, S], `sample_mask` [B]."""

    input_ids: Tensor
    token_mask: Tensor
    sample_mask: Tensor


class DPOLossDataDict(PreferenceLossDataDict):
    """The entries that `DPOLossFn` reads.

    Column t of `reference_policy_logprobs` [B, S] scores token t + 1; the last column is not read.
    """

    reference_policy_logprobs: Tensor


class PreferenceLoss(LossFunction):
    """Bradley–Terry loss −log σ(r_chosen − r_rejected), averaged over the pairs of the global batch."""

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
        """Return the loss and metrics of `rewards` [2n] or [2n, 1], chosen and rejected rows interleaved.

        `logits` is another name of the argument `rewards`.
        """
        rewards = rewards if logits is None else logits
        if rewards is None or data is None:
            raise ContractError(f"{type(self).__name__}: needs rewards [2n] of n pairs, and data")
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
        """Return the result of `_preference_loss` for rewards [2n]; rewards and `mask` are fp32 (or both fp64)."""
        return self._preference_loss(rewards, mask, seqs)

    def split_output_tensor(
        self, tensor: Shaped[Tensor, rows * rest]
    ) -> tuple[Shaped[Tensor, pairs * rest], Shaped[Tensor, pairs * rest]]:
        """Split `tensor` into the rows of the chosen responses and the rows of the rejected responses.

        Raises:
            ContractError: the number of rows is odd.
        """
        if tensor.shape[0] % 2:
            raise ContractError(
                f"{type(self).__name__}: needs an even number of rows (pairs of responses), got {tensor.shape[0]}"
            )
        return tensor[::2], tensor[1::2]

    def _preference_loss(
        self,
        rewards: Float[Tensor, " rows"],
        sample_mask: Float[Tensor, " rows"],
        global_valid_seqs: Tensor,
        beta: float = 1.0,
        margin: Float[Tensor, " pairs"] | float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return loss, accuracy, and mean rewards of chosen and rejected responses.

        `margin` is subtracted from the difference of a pair's rewards.
        """
        chosen, rejected = self.split_output_tensor(rewards)
        per_pair = self._of_rewards(chosen, rejected, margin, beta)
        return self._means_over_pairs(per_pair, rewards, sample_mask, global_valid_seqs)

    def _means_over_pairs(
        self,
        per_pair: Float[Tensor, " pairs"],
        rewards: Float[Tensor, " rows"],
        sample_mask: Float[Tensor, " rows"],
        global_valid_seqs: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        chosen, rejected = self.split_output_tensor(rewards)
        mask, _ = self.split_output_tensor(sample_mask)
        pairs = global_valid_seqs / 2
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
        return -F.logsigmoid(beta * (chosen - rejected - margin))


class BradleyTerryLoss(PreferenceLoss):
    """The loss of reward models: `PreferenceLoss` with an optional margin and an optional centring of rewards.

    If the data have an entry `margin` [2n] (equal for both rows of a pair), it is subtracted from r_chosen −
    r_rejected (Llama 2, arXiv:2307.09288, eq. 2).

    Args:
        center_rewards_coefficient: weight of the mean of (r_chosen + r_rejected)². This term keeps rewards near zero
            (arXiv:2312.09244).
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

    The loss is w_p · L_pref(r) + w_s · NLL(chosen): the preference loss of the rewards r, plus the SFT term. A row's
    reward is r = Σ (logprob − reference logprob) over its tokens, or their mean with `preference_average_log_probs`.
    The loss is divided by global_valid_seqs / 2, the number of pairs. The values of `DPOOptions` are also attributes of
    the loss. Losses without a reference ignore `reference_policy_logprobs`. aot and aot_unpaired also need the columns
    that `batch_columns` returns.
    """

    reads_counted_tokens_only = True
    loss_type = LossType.SEQUENCE_LEVEL
    required_keys: tuple[str, ...] = ("input_ids", "token_mask", "sample_mask", "reference_policy_logprobs")
    options: DPOOptions

    def __init__(self, cfg: DPOLossConfig | DPOOptions) -> None:
        self.options = DPOOptions.from_config(cfg, type(self).__name__)
        if self.options.use_weighting and not isinstance(self, WeightedDPOLossFn):
            raise ContractError(f"{type(self).__name__}: does not support use_weighting=True; use WeightedDPOLossFn")
        self.sft_loss = NLLLoss()
        # These properties are cached, because every microbatch reads them.
        self.kinds, self.averages = self.options.preference_losses, self.options.averages
        self.needs_reference, self.needs_batch = self.options.needs_reference, self.options.needs_batch
        if not self.needs_reference:
            self.required_keys = tuple(key for key in self.required_keys if key != "reference_policy_logprobs")
        self.required_keys += tuple(f"{kind}_partner" for kind in self.kinds if kind in OF_BATCH)

    def from_logprobs(
        self,
        next_token_logprobs: Float[Tensor, "batch predicted"],
        data: BatchedDataDict[Any],
        global_valid_seqs: Tensor | None,
        global_valid_toks: Tensor | None = None,
        entropy: Tensor | None = None,
    ) -> tuple[Float[Tensor, ""], dict[str, Any]]:
        return self._loss(next_token_logprobs, data, global_valid_seqs)

    def _loss(
        self,
        logprobs: Float[Tensor, "batch predicted"],
        data: BatchedDataDict[Any],
        global_valid_seqs: Tensor | None,
        pair_weights: Float[Tensor, " pairs"] | None = None,
    ) -> tuple[Float[Tensor, ""], dict[str, Any]]:
        self.check(logprobs, data)
        options = self.options
        seqs = require_count("global_valid_seqs", global_valid_seqs, self)
        sample_mask = sample_mask_of(data, logprobs)
        preference, accuracy, chosen, rejected = self._preference_of(logprobs, data, seqs, pair_weights)
        sft = torch.zeros_like(preference)
        if options.sft_loss_weight:
            per_row, _ = self.sft_loss.from_logprobs(
                logprobs,
                data,
                None,
                None,
                dpo_loss=True,
                dpo_average_log_probs=options.sft_average_log_probs,
            )
            sft = masked_mean(per_row[::2], sample_mask[::2], global_normalization_factor=seqs / 2)
        loss = options.preference_loss_weight * preference + options.sft_loss_weight * sft
        metrics = _pair_metrics(loss, accuracy, chosen, rejected, sample_mask)
        metrics |= self._logprobs_of_sides(logprobs.detach(), data, seqs)
        metrics |= self._parts(logprobs.detach(), data, seqs, pair_weights)
        return loss, {**metrics, "sft_loss": sft.detach(), "preference_loss": preference.detach()}

    def _parts(
        self, logprobs: Tensor, data: BatchedDataDict[Any], seqs: Tensor, weights: Tensor | None
    ) -> dict[str, Tensor]:
        """Return each preference loss, without its weight, as a metric; {} if there is only one preference loss."""
        if len(self.kinds) == 1:
            return {}
        _, pairs = self._pairs(logprobs, data)
        mask = sample_mask_of(data, logprobs)[::2]
        return {
            f"preference_loss_{kind}": masked_mean(
                _weighted(PAIR_LOSSES[kind](pairs), weights), mask, global_normalization_factor=seqs / 2
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
        """Return the preference term: its loss, accuracy, and the mean rewards of chosen and rejected responses.

        This method exists for code ported from NeMo RL; `from_logprobs` does not use it.
        """
        logprobs, _ = self.next_token_logprobs(
            next_token_logits, data, vocab_parallel_rank, vocab_parallel_group, context_parallel_group
        )
        return self._preference_of(logprobs, data, require_count("global_valid_seqs", global_valid_seqs, self))

    def _preference_of(
        self, logprobs: Tensor, data: BatchedDataDict[Any], seqs: Tensor, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rewards, pairs = self._pairs(logprobs, data)
        per_pair = _weighted(weighted_sum(self.kinds, pairs), weights)
        return self._means_over_pairs(per_pair, rewards, sample_mask_of(data, logprobs), seqs)

    def _logprobs_of_sides(self, logprobs: Tensor, data: BatchedDataDict[Any], seqs: Tensor) -> dict[str, Tensor]:
        """Return two metrics: the mean log-probability (nats) of the chosen and of the rejected responses."""
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
        """Return each pair's weighted sum of preference losses, given rewards instead of log-probabilities."""
        return weighted_sum(self.kinds, Pairs(chosen, rejected, chosen - rejected - margin, beta, self.options))

    def _pairs(self, logprobs: Tensor, data: BatchedDataDict[Any]) -> tuple[Float[Tensor, " rows"], Pairs]:
        """Return the rewards of all rows, and the quantities of all pairs that the preference losses need."""
        mask, options = token_mask_of(data, logprobs), self.options
        log_ratios = self._log_ratios(logprobs, data, mask)
        rewards = scores = _divided(log_ratios, mask) if self.averages else log_ratios
        if options.f_divergence_type != "reverse_kl":
            scores = f_divergence_scores(log_ratios, options)
            scores = _divided(scores, mask) if self.averages else scores
        means = _divided(scores, mask) if "sigmoid_norm" in self.kinds else None
        of_policy = self._row_sums(logprobs, mask) if "aot" in self.kinds else None
        chosen, rejected = self.split_output_tensor(rewards)
        pairs = Pairs(
            chosen,
            rejected,
            # The same tensors as the rewards: gradients then have the same order of additions for every loss.
            chosen - rejected if scores is rewards else self._difference(scores),
            options.reference_policy_kl_penalty,
            options,
            None if means is None else self._difference(means),
            None if of_policy is None else self._difference(of_policy),
            {kind: data[f"{kind}_partner"].to(logprobs) for kind in self.kinds if kind in OF_BATCH},
        )
        return rewards, pairs

    def _difference(self, rows: Tensor) -> Tensor:
        chosen, rejected = self.split_output_tensor(rows)
        return chosen - rejected

    def _log_ratios(self, logprobs: Tensor, data: BatchedDataDict[Any], mask: Tensor) -> Float[Tensor, " rows"]:
        """Return each row's Σ weight · (logprob − reference logprob); without a reference, Σ weight · logprob."""
        if self.needs_reference:
            logprobs = logprobs - self._reference(data, logprobs)
        return masked_sum(logprobs, self._token_weights(mask), dim=-1)

    def _reference(self, data: BatchedDataDict[Any], like: Tensor) -> Float[Tensor, "batch predicted"]:
        reference = data["reference_policy_logprobs"]
        require_shape("reference_policy_logprobs", reference, tuple(data["token_mask"].shape), self)
        return reference[:, :-1].to(like)

    def _token_weights(self, mask: Tensor) -> Tensor:
        alpha = self.options.ld_alpha
        return mask if alpha is None else mask * shared_length_weights(mask, alpha)

    def _row_sums(self, logprobs: Tensor, mask: Tensor) -> Float[Tensor, " rows"]:
        """Return, for each row, the weighted sum (or mean, if `averages` is set) of its tokens' log-probabilities."""
        sums = masked_sum(logprobs, self._token_weights(mask), dim=-1)
        return _divided(sums, mask) if self.averages else sums

    @torch.no_grad()
    def batch_columns(
        self, next_token_logprobs: Float[Tensor, "batch predicted"], data: BatchedDataDict[Any]
    ) -> dict[str, Tensor]:
        """Return the additional columns of the batch, name → [B], that aot and aot_unpaired need. Collective.

        The columns are `aot_partner` and `aot_unpaired_partner`, the values that `batch_partners` returns. The value of
        a row may come from any pair of the global batch. Other losses need no columns.

        Args:
            next_token_logprobs: log-probabilities of this replica's rows under the policy's current weights.
            data: the whole global batch, or this replica's `LocalBatch`, with `reference_policy_logprobs`.
        """
        if not self.needs_batch:
            return {}
        share, mask = batch_share(data), token_mask_of(data, next_token_logprobs)
        own = next_token_logprobs, self._reference(data, next_token_logprobs)
        policy, reference = (share.gather(self._row_sums(x, mask)) for x in own)
        counted = share.gather(sample_mask_of(data, mask))[::2] > 0
        partners = batch_partners(self.kinds, policy, reference, counted)
        return {f"{kind}_partner": share.select(values).to(mask) for kind, values in partners.items()}


class WeightedDPOLossFn(DPOLossFn):
    """`DPOLossFn` with pairs weighted by how likely the policy is to produce both responses.

    This is WPO (arXiv:2406.11827, eq. 2). Each token has a weight p / Σ p²: p is the token's probability, and the sum
    is over the vocabulary. A response's weight is the geometric mean of its tokens' weights; a pair's weight is the
    product of its two responses' weights. No sum over the vocabulary is computed: with all logits doubled, the token's
    probability is q = p² / Σ p², so its weight is q / p. A policy calls `from_hidden_states`.
    """

    takes_hidden_states = True

    def __init__(self, cfg: DPOLossConfig | DPOOptions) -> None:
        super().__init__(cfg)
        if not self.options.use_weighting:
            raise ContractError(f"{type(self).__name__}: does not support use_weighting=False; use DPOLossFn")

    def __call__(  # type: ignore[override]  # called with logits, not rewards
        self,
        next_token_logits: Any = None,
        data: Any = None,
        global_valid_seqs: Tensor | None = None,
        global_valid_toks: Tensor | None = None,
        *groups: Any,
        next_token_logprobs: Tensor | None = None,
        **named_groups: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute the loss from logits. `groups` are the parallel groups, in the order of `LogprobLoss.__call__`."""
        if data is None or next_token_logits is None or next_token_logprobs is not None:
            raise ContractError(
                f"{type(self).__name__}: needs data and next_token_logits; log-probabilities are not enough"
            )
        logprobs, _ = self.next_token_logprobs(next_token_logits, data, *groups, **named_groups)
        with torch.no_grad():
            doubled, _ = self.next_token_logprobs(2 * next_token_logits, data, *groups, **named_groups)
        return self._loss(logprobs, data, global_valid_seqs, self._weights(logprobs, doubled, data))

    def from_logprobs(self, *arguments: Any, **named: Any) -> tuple[Tensor, dict[str, Any]]:
        raise ContractError(
            f"{type(self).__name__} needs whole distributions, not log-probabilities; pass logits or hidden states"
        )

    def from_hidden_states(
        self,
        states: FinalHiddenStates,
        data: BatchedDataDict[Any],
        global_valid_seqs: Tensor | None,
        global_valid_toks: Tensor | None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss and metrics, computed from the policy's hidden states and LM head."""
        require_keys(data, self.required_keys, self)
        targets = data["input_ids"].roll(-1, dims=1)[..., None]
        logprobs = states.logprobs_of(targets, 1.0, with_entropy=False)[0][..., 0]
        with torch.no_grad():
            doubled = states.logprobs_of(targets, 0.5, with_entropy=False)[0][..., 0]
        return self._loss(logprobs, data, global_valid_seqs, self._weights(logprobs, doubled, data))

    def _weights(self, logprobs: Tensor, doubled: Tensor, data: BatchedDataDict[Any]) -> Float[Tensor, " pairs"]:
        """Return each pair's weight: the product of its two rows' exp(mean over tokens of log p − log Σ p²)."""
        mask = token_mask_of(data, logprobs)
        means = _divided(masked_sum(doubled - logprobs.detach(), mask, dim=-1), mask)
        chosen, rejected = self.split_output_tensor(means.exp())
        return chosen * rejected


def build_dpo_loss(options: DPOOptions) -> DPOLossFn:
    """Return an instance of the loss class that supports these options."""
    return WeightedDPOLossFn(options) if options.use_weighting else DPOLossFn(options)


def _divided(sums: Float[Tensor, " rows"], mask: Float[Tensor, "rows predicted"]) -> Float[Tensor, " rows"]:
    """Return each of the `sums` divided by its row's number of tokens with `mask` = 1, or by 1 if there are none."""
    return sums / mask.sum(-1).clamp(min=1)


def _weighted(per_pair: Tensor, weights: Tensor | None) -> Tensor:
    return per_pair if weights is None else per_pair * weights


def _pair_metrics(loss: Tensor, accuracy: Tensor, chosen: Tensor, rejected: Tensor, mask: Tensor) -> dict[str, Any]:
    return {
        "loss": loss.detach(),
        "accuracy": accuracy.detach(),
        "rewards_chosen_mean": chosen.detach(),
        "rewards_rejected_mean": rejected.detach(),
        "num_valid_samples": mask.sum() / 2,  # pairs
    }


class KTOLossDataDict(TypedDict):
    """The entries that `KTOLossFn` reads.

    desirable: [B], bool. kl_reference_point: [B], z₀ from `kto_reference_point`; apo_zero_unpaired does not read it.
    reference_policy_logprobs: [B, S], column t scores token t + 1, as for DPO.
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
    """Return KTO's reference point z₀ = max(0, mean(log π − log π_ref)), without gradient.

    For this mean, each prompt is combined with the completion of another prompt. z₀ is a single number for the global
    batch: pass the log-probabilities [n] of all sequences of the batch, and expand the result to every row.
    """
    return (sequence_logprobs.detach() - reference_sequence_logprobs).mean().clamp(min=0)


@reads_options(KTOOptions)
class KTOLossFn(LogprobLoss):
    """KTO: λ_D·(1 − σ(β(r − z₀))) for desirable rows, λ_U·(1 − σ(β(z₀ − r))) for undesirable rows.

    r = Σ (logprob − reference logprob) over a row's tokens. The loss is the mean over the sequences of the global
    batch. For `loss=apo_zero_unpaired`, z₀ is 0.
    """

    reads_counted_tokens_only = True
    loss_type = LossType.SEQUENCE_LEVEL
    required_keys: tuple[str, ...] = tuple(KTOLossDataDict.__annotations__)

    options: KTOOptions

    def __init__(self, cfg: KTOLossConfig | KTOOptions) -> None:
        self.options = KTOOptions.from_config(cfg, type(self).__name__)
        if not self.options.needs_reference_point:
            self.required_keys = tuple(key for key in self.required_keys if key != "kl_reference_point")

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
        point = data["kl_reference_point"].to(rewards) if options.needs_reference_point else torch.zeros_like(rewards)
        margin = options.reference_policy_kl_penalty * (rewards - point)
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
            "kl_reference_point": masked_mean(point, sample_mask, global_normalization_factor=seqs),
            "rewards_undesirable_sum": masked_sum(rewards.detach(), undesirable_mask),
            "num_desirable_samples": desirable_mask.sum(),
            "num_valid_samples": sample_mask.sum(),
        }

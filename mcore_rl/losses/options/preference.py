"""Of preferences: DPO and its kin, KTO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from mcore_rl.losses.options.options import Bounds, LossOptions, NonNegative, option

PreferenceLossType = Literal["sigmoid", "ipo", "hinge", "robust", "apo_zero", "apo_down", "simpo", "orpo"]

WITHOUT_REFERENCE: frozenset[PreferenceLossType] = frozenset(("simpo", "orpo"))


@dataclass(frozen=True, kw_only=True)
class DPOOptions(LossOptions):
    """What `DPOLossFn` does."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "max_num_epochs", "max_num_steps", "val_period", "val_batches", "val_global_batch_size",
            "val_micro_batch_size", "val_at_start", "val_at_end", "seed",
        }
    )  # fmt: skip

    reference_policy_kl_penalty: NonNegative = option(0.1)
    """β."""
    preference_loss_weight: NonNegative = option(1.0)
    """Weight of the preference loss."""
    sft_loss_weight: NonNegative = option(0.0)
    """Weight of the negative log-likelihood of the chosen responses."""
    preference_average_log_probs: bool = option(False)
    """Rewards are means over a response's tokens, not sums."""
    sft_average_log_probs: bool = option(False)
    """The likelihood too is a mean over each response's tokens."""
    preference_loss: PreferenceLossType | tuple[PreferenceLossType, ...] = "sigmoid"
    """One, or a list of several, whose weighted sum is the preference loss (as in arXiv:2411.10442). Of Δr, what the
    chosen reward is ahead by, or of both rewards (c, r):

    sigmoid: L(Δr) = −log σ(β·Δr). ipo: (Δr − 1 / 2β)² (arXiv:2310.12036, eq. 17).
    hinge: max(0, 1 − β·Δr) (SLiC-HF, arXiv:2305.10425).
    robust: ((1 − ε)·L(Δr) − ε·L(−Δr)) / (1 − 2ε), unbiased where a share ε of the pairs is the wrong way round
    (arXiv:2403.00409).
    apo_zero: 1 − σ(β·c) + σ(β·r); apo_down: σ(β·c) + 1 − σ(β·Δr) (arXiv:2408.06266, eq. 7 and 8).
    simpo: −log σ(β·Δr − γ) (arXiv:2405.14734), and orpo: −β·log σ(log odds(c) − log odds(r)) (arXiv:2403.07691), whose
    rewards are mean log-probabilities of the policy alone: there is no reference."""
    preference_loss_weights: tuple[NonNegative, ...] | None = None
    """Of several preference losses: each one's weight; 1 each if not given."""
    label_smoothing: Annotated[float, Bounds(ge=0, lt=0.5)] = 0.0
    """ε: of robust; of sigmoid and simpo the conservative loss (1 − ε)·L(Δr) + ε·L(−Δr)
    (cDPO, https://ericmitchell.ai/cdpo.pdf)."""
    simpo_gamma: NonNegative = 0.5
    """γ of simpo."""

    @property
    def needs_reference(self) -> bool:
        """Whether rewards are differences from a reference's log-probabilities."""
        return not set(self.preference_losses) & WITHOUT_REFERENCE

    @property
    def preference_losses(self) -> dict[PreferenceLossType, float]:
        """Each preference loss and its weight."""
        kinds = (self.preference_loss,) if isinstance(self.preference_loss, str) else self.preference_loss
        return dict(zip(kinds, self.preference_loss_weights or (1.0,) * len(kinds), strict=True))

    @property
    def averages(self) -> bool:
        """Whether rewards are means over a response's tokens."""
        return self.preference_average_log_probs or not self.needs_reference

    def check(self) -> None:
        self._check_several()
        kinds = self.preference_losses
        self.require(
            not self.label_smoothing or bool(kinds.keys() & {"sigmoid", "robust", "simpo"}),
            "label_smoothing applies to preference_loss=sigmoid, robust and simpo only",
        )
        self.require(
            "robust" not in kinds or self.label_smoothing > 0, "preference_loss=robust needs a label_smoothing"
        )
        self.require(
            "ipo" not in kinds or self.reference_policy_kl_penalty > 0,
            "preference_loss=ipo divides by reference_policy_kl_penalty, which is 0",
        )
        self.require(
            "orpo" not in kinds or self.sft_loss_weight > 0,
            "preference_loss=orpo is an addition to the likelihood of the chosen: set sft_loss_weight (1 in the paper)",
        )
        self.require(
            "simpo" in kinds or self.simpo_gamma == 0.5,
            f"simpo_gamma applies to preference_loss=simpo, not to {', '.join(kinds)}",
        )
        self.require(
            self.preference_loss_weight > 0 or self.sft_loss_weight > 0,
            "preference_loss_weight and sft_loss_weight are both 0: nothing would be trained",
        )

    def _check_several(self) -> None:
        kinds, weights = self.preference_loss, self.preference_loss_weights
        if isinstance(kinds, str):
            self.require(
                weights is None,
                "preference_loss_weights are of a list of preference losses; set preference_loss_weight for one",
            )
            return
        named = ", ".join(kinds)
        self.require(len(set(kinds)) == len(kinds), f"preference_loss=[{named}] names one of them twice")
        self.require(
            weights is None or len(weights) == len(kinds),
            f"preference_loss_weights: {len(weights or ())} weights for the {len(kinds)} of preference_loss=[{named}]",
        )
        self.require(
            weights is None or any(weights),
            "preference_loss_weights are all 0; set preference_loss_weight=0 to train on the likelihood alone",
        )
        without = WITHOUT_REFERENCE & set(kinds)
        self.require(
            without in (set(), set(kinds)),
            f"preference_loss=[{named}]: {', '.join(sorted(without))} has no reference, and the others have one: their "
            "rewards differ, so that they cannot be added",
        )


@dataclass(frozen=True, kw_only=True)
class KTOOptions(LossOptions):
    """What `KTOLossFn` does."""

    reference_policy_kl_penalty: NonNegative = option(0.1)
    """β."""
    desirable_weight: NonNegative = option(1.0)
    """λ_D."""
    undesirable_weight: NonNegative = option(1.0)
    """λ_U."""

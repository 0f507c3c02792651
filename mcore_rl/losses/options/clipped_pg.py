"""Of clipped policy gradients: GRPO and its kin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from mcore_rl.errors import ContractError
from mcore_rl.losses.options.options import Bounds, LossOptions, NonNegative, Positive, option

KLEstimator = Literal["k1", "k2", "k3"]
TruncationType = Literal["tis", "icepop", "seq-mask-tis"]


@dataclass(frozen=True, kw_only=True)
class ClippedPGOptions(LossOptions):
    """What `ClippedPGLossFn` does. Keys of the reference's other versions: see `aliases` and `translate`."""

    aliases: ClassVar[Mapping[str, str]] = {
        "reference_policy_kl_type": "kl_estimator",
        "kl_input_clamp_value": "kl_clamp",
        "kl_output_clamp_value": "kl_output_clamp",
    }

    reference_policy_kl_penalty: NonNegative = option(0.0)
    """β, the weight of KL(π ‖ π_ref)."""
    ratio_clip_min: NonNegative = option(0.2)
    """The ratio is clipped below at 1 − this."""
    ratio_clip_max: NonNegative = option(0.2)
    """The ratio is clipped above at 1 + this (DAPO's clip-higher, arXiv:2503.14476, if more than the other)."""
    ratio_clip_c: Annotated[float, Bounds(gt=1)] | None = option(None)
    """Dual clip: an upper bound on −A·ratio where A < 0 (arXiv:1912.09729); more than 1, or null for none."""
    use_on_policy_kl_approximation: bool = option(False)
    """Weight the KL estimate by exp(current − generation): samples of an old policy, estimate for this one."""
    use_importance_sampling_correction: bool = option(False)
    """Multiply by exp(prev − generation): the sampler's numbers differ from the trainer's."""
    token_level_loss: bool = option(True)
    """Mean over all tokens (DAPO) rather than over sequences of their means (GRPO, arXiv:2402.03300)."""
    disable_ppo_ratio: bool = False
    """REINFORCE, RLOO (arXiv:2402.14740): the log-probability itself in place of the ratio, no clip."""
    force_on_policy_ratio: bool | None = None
    """prev = current, so that the ratio is 1: right for the only update on samples of these very weights.
    null: no; in GRPO: where that holds, which is said when the run begins."""
    sequence_level_importance_ratios: bool = False
    """GSPO (arXiv:2507.18071): one ratio a sequence, exp(mean(current − prev))."""
    clip_type: Literal["ppo", "cispo"] = "ppo"
    """cispo: the clipped ratio, detached, weighs the log-probability (arXiv:2506.13585)."""
    dr_grpo_max_tokens: Annotated[int, Bounds(ge=1)] | None = None
    """Dr.GRPO (arXiv:2503.20783): a sequence's sum over this constant, not its mean."""
    kl_estimator: KLEstimator = "k3"
    """See `calculate_kl`."""
    kl_clamp: NonNegative | None = 20.0
    """Bound on |reference − current| in nats before the estimate; null for none, as the documented reference has it."""
    kl_output_clamp: NonNegative | None = None
    """Bound on the absolute value of the estimate; null for none."""
    kl_gradient: Literal["value", "unbiased"] = "value"
    """unbiased: also the gradient of the probability of what was sampled; see `kl_weights`."""
    use_kl_in_reward: bool = False
    """The KL term is part of the advantages (REINFORCE++, PPO), not of the loss."""
    importance_sampling_level: Literal["token", "sequence"] | None = None
    """One importance weight a token or one a sequence; null for that of the ratios."""
    truncated_importance_sampling_type: TruncationType | None = None
    """What becomes of importance weights out of bounds; see `truncate_importance_weights`. null: tis."""
    truncated_importance_sampling_ratio: Positive | None = None
    """Upper bound of the importance weights; null leaves them as they are."""
    truncated_importance_sampling_ratio_min: NonNegative | None = None
    """Lower bound; null for none."""
    entropy_bonus: NonNegative = 0.0
    """This times the mean entropy is subtracted from the loss."""
    positive_example_nll_weight: NonNegative = 0.0
    """This times the negative log-likelihood of samples with a positive reward is added (VAPO, arXiv:2504.05118)."""

    @classmethod
    def translate(cls, cfg: Mapping[str, Any]) -> dict[str, Any]:
        values = super().translate(cfg)
        if "use_cispo" in values:
            cispo = values.pop("use_cispo")
            if not isinstance(cispo, bool):
                raise ContractError(f"use_cispo: must be true or false, got {cispo!r}")
            clip_type = "cispo" if cispo else "ppo"
            if values.setdefault("clip_type", clip_type) != clip_type:
                raise ContractError(f"use_cispo={cispo} and clip_type={values['clip_type']} contradict each other")
        return values

    def check(self) -> None:
        sequences = self.sequence_level_importance_ratios
        self.require(
            not (sequences and self.token_level_loss),
            "sequence_level_importance_ratios needs a sequence-level loss: set token_level_loss=False",
        )
        self.require(
            self.dr_grpo_max_tokens is None or not self.token_level_loss,
            "dr_grpo_max_tokens is for a sequence-level loss: set token_level_loss=False",
        )
        self.require(
            not self.disable_ppo_ratio or not (sequences or self.clip_type == "cispo" or self.ratio_clip_c),
            "disable_ppo_ratio leaves no ratio for clip_type=cispo, ratio_clip_c or sequence-level ratios",
        )
        self.require(
            self.clip_type != "cispo" or not (sequences or self.ratio_clip_c),
            "clip_type=cispo has neither sequence-level ratios nor a dual clip (ratio_clip_c)",
        )
        self.require(
            self.reference_policy_kl_penalty > 0 or not self.use_kl_in_reward,
            "use_kl_in_reward needs a reference_policy_kl_penalty",
        )
        self.require(
            not self.use_kl_in_reward or not (self.use_on_policy_kl_approximation or self.kl_gradient == "unbiased"),
            "use_kl_in_reward leaves no KL term in the loss for use_on_policy_kl_approximation or kl_gradient=unbiased",
        )
        self._check_importance_sampling()

    def _check_importance_sampling(self) -> None:
        upper, lower = self.truncated_importance_sampling_ratio, self.truncated_importance_sampling_ratio_min
        kind = self.truncated_importance_sampling_type
        for name, value in (
            ("truncated_importance_sampling_ratio", upper),
            ("importance_sampling_level", self.importance_sampling_level),
        ):
            self.require(
                value is None or self.use_importance_sampling_correction,
                f"{name} needs use_importance_sampling_correction=True",
            )
        self.require(
            upper is not None or (kind in (None, "tis") and lower is None),
            "truncated_importance_sampling_type and _ratio_min need truncated_importance_sampling_ratio",
        )
        self.require(
            kind in (None, "tis") or lower is not None, f"truncated_importance_sampling_ratio_min: {kind} needs one"
        )
        self.require(
            upper is None or lower is None or lower <= upper,
            f"truncated_importance_sampling_ratio_min ({lower}) must be at most "
            f"truncated_importance_sampling_ratio ({upper})",
        )
        self.require(
            kind != "seq-mask-tis" or not self.weighs_sequences,
            "seq-mask-tis leaves out sequences and weighs tokens: importance weights must be one a token",
        )

    @property
    def weighs_sequences(self) -> bool:
        """True where importance weights are one a sequence."""
        if self.importance_sampling_level is None:
            return self.sequence_level_importance_ratios
        return self.importance_sampling_level == "sequence"

    @property
    def kl_in_loss(self) -> bool:
        """True where the loss has a KL term."""
        return self.reference_policy_kl_penalty > 0 and not self.use_kl_in_reward

    @property
    def learns_without_advantages(self) -> bool:
        """True where there is something to learn though all advantages are 0."""
        return self.kl_in_loss or self.entropy_bonus > 0 or self.positive_example_nll_weight > 0


# ------------------------------------------------------------------ preferences

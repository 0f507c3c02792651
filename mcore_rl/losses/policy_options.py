"""Options of the policy-gradient losses: a base class with the common options, and a class for each loss.

`POLICY_LOSS_OPTIONS` lists the classes by the name of the loss. A class has only the options that its loss reads. A
configuration with any other option is refused. This module imports neither torch nor pydantic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, get_args

from mcore_rl.errors import ContractError
from mcore_rl.losses.options import Bounds, LossOptions, NonNegative, Positive, option

KLEstimator = Literal["k1", "k2", "k3"]
TruncationType = Literal["tis", "icepop", "seq-mask-tis"]
PolicyLossName = Literal["clipped_pg", "dppo_tv", "dppo_kl", "sapo", "vespo", "luspo", "gmpo", "dro"]
Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum"]


@dataclass(frozen=True, kw_only=True)
class PolicyLossOptions(LossOptions):
    """Options of the policy losses. If only some losses have an option, its description starts with their names."""

    aliases: ClassVar[Mapping[str, str]] = {
        "reference_policy_kl_type": "kl_estimator",
        "kl_input_clamp_value": "kl_clamp",
        "kl_output_clamp_value": "kl_output_clamp",
    }
    usual_aggregation: ClassVar[Aggregation] = "token_mean"
    """The paper's aggregation of the loss."""

    name: PolicyLossName = "clipped_pg"
    """The loss of the policy; see the table in docs/algorithms.md. clipped_pg: PPO, GRPO, Dr.GRPO, DAPO, GSPO, CISPO or
    REINFORCE, depending on its options. Others: dppo_tv, dppo_kl (arXiv:2602.04879), sapo (arXiv:2511.20347), vespo
    (arXiv:2602.10693), luspo (arXiv:2602.05261), gmpo (arXiv:2507.20673), dro (arXiv:2405.19107)."""
    reference_policy_kl_penalty: NonNegative = 0.0
    """Weight β of KL(π ‖ π_ref)."""
    use_on_policy_kl_approximation: bool = False
    """Multiply the KL estimate by exp(current − generation log-probability). The result estimates the KL of the current
    policy from samples of an older one."""
    use_importance_sampling_correction: bool = False
    """Multiply the loss by exp(prev − generation log-probability), to correct for differences between the
    log-probabilities of the sampler and of the trainer."""
    aggregation: Aggregation | None = None
    """Reduction of the tokens' values to the loss, over the global batch. token_mean: mean over all tokens.
    seq_mean_token_mean: mean over sequences of their means. seq_mean_token_sum: mean over sequences of their sums.
    token_sum: sum over all tokens. null: the aggregation in the loss's paper; for clipped_pg, token_level_loss selects
    it."""
    force_on_policy_ratio: bool | None = None
    """Use the current log-probabilities in place of the previous ones, so that the ratio is 1. This is exact for a
    single update on samples of the current weights. null: false; in GRPO, true if it is exact (the run prints this)."""
    off_policy_mask_threshold: Positive | None = None
    """Leave out tokens with a negative advantage if their sequence's mean of (generation − current log-probability) is
    above this value in nats (DeepSeek-V3.2, arXiv:2512.02556, eq. 9). null: leave out no tokens."""
    kl_estimator: KLEstimator = "k3"
    """Estimator of the KL: k1, k2 or k3; see `calculate_kl`."""
    kl_clamp: NonNegative | None = 20.0
    """Bound on |reference − current| in nats before the estimate; null for no bound, as in NeMo RL 0.3."""
    kl_output_clamp: NonNegative | None = None
    """Bound on the absolute value of the estimate; null for no bound."""
    kl_gradient: Literal["value", "unbiased"] = "value"
    """value: gradient of the estimate. unbiased: also the gradient of the probability of the sampled tokens; see
    `kl_weights`."""
    use_kl_in_reward: bool = False
    """Put the KL term into the advantages (REINFORCE++, PPO) instead of the loss."""
    importance_sampling_level: Literal["token", "sequence"] | None = None
    """Whether each token or each sequence has an importance weight. null: the same as for the policy ratios."""
    truncated_importance_sampling_type: TruncationType | None = None
    """Treatment of importance weights out of bounds; see `truncate_importance_weights`. null: tis."""
    truncated_importance_sampling_ratio: Positive | None = None
    """Upper bound of the importance weights; null for no bound."""
    truncated_importance_sampling_ratio_min: NonNegative | None = None
    """Lower bound of the importance weights; null for no bound."""
    entropy_bonus: NonNegative = 0.0
    """Weight of the mean entropy, which is subtracted from the loss."""
    positive_example_nll_weight: NonNegative = 0.0
    """Weight of an additional loss term: the mean negative log-likelihood of the tokens of samples with a positive
    reward (VAPO, arXiv:2504.05118)."""
    observation_nll_weight: NonNegative = 0.0
    """Weight of an additional loss term: the mean negative log-likelihood of the environment's tokens between the
    responses of a conversation (ECHO, arXiv:2605.24517, there 0.05)."""

    def check(self) -> None:
        self.require(
            self.reference_policy_kl_penalty > 0 or not self.use_kl_in_reward,
            "use_kl_in_reward needs a reference_policy_kl_penalty above 0",
        )
        self.require(
            not self.use_kl_in_reward or not (self.use_on_policy_kl_approximation or self.kl_gradient == "unbiased"),
            "use_kl_in_reward removes the KL term from the loss, but use_on_policy_kl_approximation and "
            "kl_gradient=unbiased need this term; leave these two out",
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
            "truncated_importance_sampling_type and truncated_importance_sampling_ratio_min need "
            "truncated_importance_sampling_ratio",
        )
        self.require(
            kind in (None, "tis") or lower is not None,
            f"truncated_importance_sampling_ratio_min: must be set for truncated_importance_sampling_type={kind}",
        )
        self.require(
            upper is None or lower is None or lower <= upper,
            f"truncated_importance_sampling_ratio_min ({lower}) must be at most "
            f"truncated_importance_sampling_ratio ({upper})",
        )
        self.require(
            kind != "seq-mask-tis" or not self.weighs_sequences,
            "truncated_importance_sampling_type=seq-mask-tis needs one importance weight per token, but this "
            "loss has one per sequence",
        )

    @property
    def reduction(self) -> Aggregation:
        """The aggregation that the loss uses."""
        return self.aggregation or self.usual_aggregation

    @property
    def constant_length(self) -> int | None:
        """Divisor of the sum over a sequence's tokens; None to divide by the sequence's number of tokens."""
        return None

    @property
    def has_ratio(self) -> bool:
        """Whether the loss reads the ratio of current and previous probabilities."""
        return True

    @property
    def has_sequence_ratios(self) -> bool:
        """Whether each sequence has a single ratio."""
        return False

    @property
    def weighs_sequences(self) -> bool:
        """Whether each sequence has a single importance weight."""
        if self.importance_sampling_level is None:
            return self.has_sequence_ratios
        return self.importance_sampling_level == "sequence"

    @property
    def kl_in_loss(self) -> bool:
        """Whether the loss has a KL term."""
        return self.reference_policy_kl_penalty > 0 and not self.use_kl_in_reward

    @property
    def learns_without_advantages(self) -> bool:
        """Whether the loss has gradients even if all advantages are 0."""
        more = self.entropy_bonus, self.positive_example_nll_weight, self.observation_nll_weight
        return self.kl_in_loss or any(more)


@dataclass(frozen=True, kw_only=True)
class ClippedPGOptions(PolicyLossOptions):
    """Options of `ClippedPGLossFn`; for keys of other NeMo RL versions see `aliases` and `translate`."""

    required: ClassVar[frozenset[str]] = frozenset(
        {"reference_policy_kl_penalty", "use_on_policy_kl_approximation", "use_importance_sampling_correction"}
    )

    name: Literal["clipped_pg"] = "clipped_pg"
    ratio_clip_min: NonNegative = option(0.2)
    """Clip the ratio from below at 1 minus this value."""
    ratio_clip_max: NonNegative = option(0.2)
    """Clip the ratio from above at 1 plus this value. A value above ratio_clip_min is DAPO's clip-higher
    (arXiv:2503.14476)."""
    ratio_clip_c: Annotated[float, Bounds(gt=1)] | None = option(None)
    """Dual clip (arXiv:1912.09729): clip the ratio from above at this value if the advantage is negative. It must be
    more than 1; null disables it."""
    token_level_loss: bool = option(True)
    """true: mean over all tokens (DAPO). false: mean over sequences of their means (GRPO, arXiv:2402.03300)."""
    disable_ppo_ratio: bool = False
    """Use the log-probability in place of the ratio, without a clip: REINFORCE, RLOO (arXiv:2402.14740)."""
    sequence_level_importance_ratios: bool = False
    """GSPO (arXiv:2507.18071): one ratio per sequence, the geometric mean of its tokens' ratios."""
    clip_type: Literal["ppo", "cispo"] = "ppo"
    """ppo: minimum of the ratio and the clipped ratio, each times the advantage. cispo: the log-probability, weighted
    by the detached clipped ratio (arXiv:2506.13585)."""
    dr_grpo_max_tokens: Annotated[int, Bounds(ge=1)] | None = None
    """Dr.GRPO (arXiv:2503.20783): divide the sum over a sequence by this constant instead of its number of tokens."""

    @classmethod
    def translate(cls, cfg: Mapping[str, Any]) -> dict[str, Any]:
        values = super().translate(cfg)
        if "use_cispo" in values:
            cispo = values.pop("use_cispo")
            if not isinstance(cispo, bool):
                raise ContractError(f"use_cispo: must be true or false, got {cispo!r}")
            clip_type = "cispo" if cispo else "ppo"
            if values.setdefault("clip_type", clip_type) != clip_type:
                raise ContractError(
                    f"use_cispo={cispo} and clip_type={values['clip_type']} contradict each other; give only clip_type"
                )
        return values

    def check(self) -> None:
        sequences = self.sequence_level_importance_ratios
        self.require(
            not (sequences and self.token_level_loss),
            "sequence_level_importance_ratios needs a sequence-level loss: set token_level_loss=False",
        )
        self.require(
            self.dr_grpo_max_tokens is None or not self.token_level_loss,
            "dr_grpo_max_tokens needs a sequence-level loss: set token_level_loss=False",
        )
        self.require(
            self.aggregation is None or self.token_level_loss == self.aggregation.startswith("token"),
            f"aggregation={self.aggregation} needs token_level_loss={not self.token_level_loss}",
        )
        self.require(
            self.dr_grpo_max_tokens is None or self.aggregation is None,
            "dr_grpo_max_tokens already determines the aggregation; leave out aggregation",
        )
        self.require(
            not self.disable_ppo_ratio or not (sequences or self.clip_type == "cispo" or self.ratio_clip_c),
            "disable_ppo_ratio removes the ratio that clip_type=cispo, ratio_clip_c and sequence-level "
            "ratios need; leave out disable_ppo_ratio, or these options",
        )
        self.require(
            self.clip_type != "cispo" or not (sequences or self.ratio_clip_c),
            "clip_type=cispo supports neither sequence-level ratios nor a dual clip (ratio_clip_c); leave these out",
        )
        super().check()

    @property
    def reduction(self) -> Aggregation:
        return self.aggregation or ("token_mean" if self.token_level_loss else "seq_mean_token_mean")

    @property
    def constant_length(self) -> int | None:
        return self.dr_grpo_max_tokens

    @property
    def has_ratio(self) -> bool:
        return not self.disable_ppo_ratio

    @property
    def has_sequence_ratios(self) -> bool:
        return self.sequence_level_importance_ratios


@dataclass(frozen=True, kw_only=True)
class DPPOOptions(PolicyLossOptions):
    """Options of DPPO (arXiv:2602.04879), for both measures of the divergence."""

    divergence_clip_min: Positive = 0.15
    """Leave out a token with a negative advantage if its probability has fallen and the divergence from the previous
    policy is above this value."""
    divergence_clip_max: Positive = 0.15
    """Leave out a token with a positive advantage if its probability has risen and the divergence is above this
    value."""
    ratio_clip_c: Annotated[float, Bounds(gt=1)] = 20.0
    """Upper bound of the probability ratio. The ratio is the weight of the log-probability, and has no gradient."""


@dataclass(frozen=True, kw_only=True)
class DPPOTVOptions(DPPOOptions):
    """Options of DPPO whose divergence is the change of the token's probability (total variation)."""

    name: Literal["dppo_tv"] = "dppo_tv"


@dataclass(frozen=True, kw_only=True)
class DPPOKLOptions(DPPOOptions):
    """Options of DPPO whose divergence is KL(previous ‖ current) over two outcomes: this token, or another one."""

    name: Literal["dppo_kl"] = "dppo_kl"
    divergence_clip_min: Positive = 0.05
    divergence_clip_max: Positive = 0.05


@dataclass(frozen=True, kw_only=True)
class SAPOOptions(PolicyLossOptions):
    """Options of SAPO (arXiv:2511.20347)."""

    usual_aggregation: ClassVar[Aggregation] = "seq_mean_token_mean"

    name: Literal["sapo"] = "sapo"
    tau_pos: Positive = 1.0
    """Temperature τ of the gate for positive advantages."""
    tau_neg: Positive = 1.05
    """Temperature τ of the gate for advantages of at most 0."""


@dataclass(frozen=True, kw_only=True)
class VESPOOptions(PolicyLossOptions):
    """Options of VESPO (arXiv:2602.10693), which weights each sequence by W^k·exp(λ·(1 − W)).

    W is the sequence's ratio times its importance weights, which do not multiply the loss again.
    """

    name: Literal["vespo"] = "vespo"
    k_pos: NonNegative = 2.0
    """Exponent k of W for advantages of at least 0."""
    lambda_pos: Positive = 3.0
    """Decay λ of W for advantages of at least 0."""
    k_neg: NonNegative = 3.0
    """Exponent k of W for negative advantages."""
    lambda_neg: Positive = 2.0
    """Decay λ of W for negative advantages."""


@dataclass(frozen=True, kw_only=True)
class LUSPOOptions(PolicyLossOptions):
    """Options of LUSPO (arXiv:2602.05261): GSPO's clipped loss of a sequence times its number of tokens."""

    usual_aggregation: ClassVar[Aggregation] = "seq_mean_token_sum"

    name: Literal["luspo"] = "luspo"
    ratio_clip_min: NonNegative = 0.2
    """Clip the ratio of the sequence from below at 1 minus this value."""
    ratio_clip_max: NonNegative = 0.2
    """Clip the ratio of the sequence from above at 1 plus this value."""

    @property
    def has_sequence_ratios(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class GMPOOptions(PolicyLossOptions):
    """Options of GMPO (arXiv:2507.20673)."""

    usual_aggregation: ClassVar[Aggregation] = "seq_mean_token_mean"

    name: Literal["gmpo"] = "gmpo"
    log_ratio_clip_min: NonNegative = 0.4
    """Clip a token's log-ratio from below at minus this value, in nats, if the advantage is not positive."""
    log_ratio_clip_max: NonNegative = 0.4
    """Clip a token's log-ratio from above at this value, in nats, if the advantage is positive."""


@dataclass(frozen=True, kw_only=True)
class DROOptions(PolicyLossOptions):
    """Options of DRO (arXiv:2405.19107), with the advantage in place of reward minus value."""

    name: Literal["dro"] = "dro"
    dro_beta: Positive = 0.05
    """Weight β of half the squared log-ratio of current and previous probabilities."""


POLICY_LOSS_OPTIONS: Mapping[PolicyLossName, type[PolicyLossOptions]] = {
    "clipped_pg": ClippedPGOptions,
    "dppo_tv": DPPOTVOptions,
    "dppo_kl": DPPOKLOptions,
    "sapo": SAPOOptions,
    "vespo": VESPOOptions,
    "luspo": LUSPOOptions,
    "gmpo": GMPOOptions,
    "dro": DROOptions,
}
"""Classes of options by the name of the loss."""


def options_class(cfg: Mapping[str, Any]) -> type[PolicyLossOptions]:
    """Return the class of options that a dictionary's `name` chooses; without a name, the class of clipped_pg.

    Raises:
        ContractError: no loss has this name, or a key of `cfg` is an option of another loss, not of this loss.
    """
    name = cfg.get("name", "clipped_pg")
    if name not in POLICY_LOSS_OPTIONS:
        raise ContractError(f"name: must be one of {', '.join(get_args(PolicyLossName))}, got {name!r}")
    chosen = POLICY_LOSS_OPTIONS[name]
    known = {field.name for field in fields(chosen)} | set(chosen.aliases)
    for key in sorted(set(cfg) - known):
        if owners := [other for other, kind in POLICY_LOSS_OPTIONS.items() if key in kind.__dataclass_fields__]:
            raise ContractError(
                f"{key}: has an effect only with name={' or '.join(owners)}, got name={name}; leave {key} out"
            )
    return chosen


def policy_loss_options(cfg: Mapping[str, Any] | PolicyLossOptions, loss: str) -> PolicyLossOptions:
    """Return the options in the dictionary `cfg`, for the loss that the dictionary's `name` chooses.

    Args:
        loss: name of the loss's class, for errors.

    Raises:
        ContractError: see `options_class` and `LossOptions.from_config`.
    """
    if isinstance(cfg, PolicyLossOptions):
        return cfg
    if not isinstance(cfg, Mapping):
        raise ContractError(f"{loss}: the configuration must be a dictionary, got a {type(cfg).__name__}")
    try:
        chosen = options_class(cfg)
    except ContractError as error:
        raise ContractError(f"{loss}: {error}") from None
    return chosen.from_config(cfg, loss)

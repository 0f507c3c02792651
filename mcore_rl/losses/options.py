"""Options of the losses. Each option is defined once for the YAML section, the TypedDict and the loss.

A class of options is a frozen dataclass. The configuration validates it as a section, `typed_dict` gives library users
its keys, and `from_config` reads a plain dictionary. This module imports neither torch nor pydantic.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NotRequired,
    Required,
    Self,
    TypedDict,
    get_args,
    get_origin,
    get_type_hints,
)

from mcore_rl.errors import ContractError


@dataclass(frozen=True)
class Bounds:
    """Annotation of an option: its value must be a number in this range. A bool is not accepted as a number."""

    ge: float | None = None
    gt: float | None = None
    lt: float | None = None

    def problem(self, value: Any) -> str | None:
        """Return an error message if `value` is invalid, or None."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return "must be a number"
        if not math.isfinite(value):
            return "must be finite"
        if self.ge is not None and not value >= self.ge:
            return f"must be at least {self.ge:g}"
        if self.gt is not None and not value > self.gt:
            return f"must be more than {self.gt:g}"
        return f"must be less than {self.lt:g}" if self.lt is not None and not value < self.lt else None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """Return the schema of the YAML section. The schema rejects bools: pydantic would accept true as 1."""
        from pydantic_core import core_schema

        def refuse_bool(value: Any) -> Any:
            if isinstance(value, bool):
                raise ValueError("must be a number, not true or false")
            return value

        return core_schema.no_info_before_validator_function(refuse_bool, handler(source))


NonNegative = Annotated[float, Bounds(ge=0)]
Positive = Annotated[float, Bounds(gt=0)]


def option(default: Any) -> Any:
    """Return a dataclass field for an option that YAML may omit, but a dictionary must contain, as in NeMo RL."""
    return dataclasses.field(default=default, metadata={"required": True})


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """Base class of a loss's options. The constructor raises `ContractError` with the key's name for invalid values."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    aliases: ClassVar[Mapping[str, str]] = {}
    """Map from an option's name in another version of NeMo RL to its name here."""
    ignored: ClassVar[frozenset[str]] = frozenset()
    """Keys of NeMo RL's configuration that are accepted although the loss does not read them."""
    required: ClassVar[frozenset[str]] = frozenset()
    """Inherited options that a dictionary must contain, in addition to the fields made by `option`."""

    def __post_init__(self) -> None:
        for name, kind in _types(type(self)).items():
            if problem := _problem(kind, getattr(self, name)):
                raise ContractError(f"{name}: {problem}, got {getattr(self, name)!r}")
        self.check()

    def check(self) -> None:
        """Raise ContractError for options that contradict each other."""

    @classmethod
    def requires(cls, field: dataclasses.Field[Any]) -> bool:
        """Return whether a dictionary of options must contain the option `field`."""
        return "required" in field.metadata or field.name in cls.required

    def require(self, holds: bool, message: str) -> None:
        if not holds:
            raise ContractError(message)

    @classmethod
    def translate(cls, cfg: Mapping[str, Any]) -> dict[str, Any]:
        """Return `cfg` with the option names of this class in place of the names that other NeMo RL versions use.

        Raises:
            ContractError: an option has two names with different values.
        """
        values: dict[str, Any] = {}
        for key, value in cfg.items():
            name = cls.aliases.get(key, key)
            if name in values and values[name] != value:
                raise ContractError(
                    f"{name} has two values, {values[name]!r} and {value!r}, because {key} is another name of "
                    f"{name}; give only one of them"
                )
            values[name] = value
        return values

    @classmethod
    def from_config(cls, cfg: Mapping[str, Any] | Self, loss: str) -> Self:
        """Return the options in the dictionary `cfg`; the keys in `aliases` and `ignored` are accepted too.

        Raises:
            ContractError: a key is missing or unknown, keys contradict each other, or a value has a wrong type.
                For an unknown key, the message names the most similar valid key.
        """
        if isinstance(cfg, cls):
            return cfg
        if not isinstance(cfg, Mapping):
            raise ContractError(f"{loss}: the configuration must be a dictionary, got a {type(cfg).__name__}")
        values = {key: value for key, value in cls.translate(cfg).items() if key not in cls.ignored}
        fields = {field.name: field for field in dataclasses.fields(cls)}
        missing = [name for name, field in fields.items() if cls.requires(field) and name not in values]
        if missing:
            raise ContractError(f"{loss}: the configuration lacks {', '.join(missing)}")
        if unknown := sorted(set(values) - set(fields)):
            nearest = difflib.get_close_matches(unknown[0], fields, n=1)
            hint = f" (did you mean {nearest[0]}?)" if nearest else ""
            raise ContractError(f"{loss}: the configuration has unknown keys {', '.join(unknown)}{hint}")
        try:
            return cls(**values)
        except ContractError as error:
            raise ContractError(f"{loss}: {error}") from None


def _types(options: type[LossOptions]) -> dict[str, Any]:
    hints = get_type_hints(options, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(options)}


def _problem(kind: Any, value: Any) -> str | None:
    """Return an error message if `value` is invalid for an option with the type annotation `kind`, or None."""
    parts = [kind] if _is_leaf(kind) or get_origin(kind) is tuple else list(get_args(kind))
    if value is None and type(None) in parts:
        return None
    items = next((get_args(part)[0] for part in parts if get_origin(part) is tuple), None)
    values = next((get_args(part)[1] for part in parts if get_origin(part) is Mapping), None)
    if values is not None and isinstance(value, Mapping):
        return next((problem for item in value.values() if (problem := _problem(values, item))), None)
    parts = [part for part in parts if part is not type(None) and get_origin(part) not in (tuple, Mapping)]
    if items is not None and (isinstance(value, list | tuple) or not parts):
        if not isinstance(value, list | tuple) or not value:
            return "must be a list that is not empty"
        return next((problem for item in value if (problem := _problem(items, item))), None)
    choices = [choice for part in parts for choice in get_args(part) if not _is_leaf_number(part)]
    if choices:
        return None if value in choices else f"must be one of {', '.join(map(str, choices))}"
    bounds = next((part.__metadata__[0] for part in parts if _is_leaf_number(part)), None)
    if bounds is not None:
        whole = any(get_args(part)[0] is int for part in parts if _is_leaf_number(part))
        return "must be a whole number" if whole and isinstance(value, float) else bounds.problem(value)
    if str in parts:
        return None if isinstance(value, str) and value.strip() else "must be a text that is not empty"
    is_one = any(isinstance(part, type) and isinstance(value, part) for part in parts)
    return None if is_one else "must be true or false"


def _is_leaf_number(kind: Any) -> bool:
    return hasattr(kind, "__metadata__")


def _is_leaf(kind: Any) -> bool:
    return _is_leaf_number(kind) or kind in (bool, str) or getattr(kind, "__origin__", None) is Literal


def typed_dict(name: str, options: type[LossOptions]) -> Any:
    """Return a `TypedDict` called `name`; its keys are the names of the options in the class `options`."""
    keys: dict[str, Any] = {}
    for field in dataclasses.fields(options):
        kind = _types(options)[field.name]
        keys[field.name] = Required[kind] if options.requires(field) else NotRequired[kind]
    made = TypedDict(name, keys)  # type: ignore[misc]
    made.__doc__ = f"Keys of a configuration dictionary; what each means is written at `{options.__name__}`."
    return made


# ------------------------------------------------------------------ preferences


PreferenceLossType = Literal[
    "sigmoid", "ipo", "hinge", "robust", "apo_zero", "apo_down", "simpo", "orpo",
    "sigmoid_norm", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "discopop",
]  # fmt: skip
FDivergenceType = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]

WITHOUT_REFERENCE: frozenset[PreferenceLossType] = frozenset(("simpo", "orpo"))
OF_BATCH: frozenset[PreferenceLossType] = frozenset(("aot", "aot_unpaired"))
"""Losses that sort quantities of all pairs of the global batch."""
WITH_F_DIVERGENCE: frozenset[PreferenceLossType] = frozenset(
    ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop")
)
"""Losses that may use an f-divergence: in the difference of two scores, f-DPO's unknown normalisation cancels."""
SMOOTHED: frozenset[PreferenceLossType] = frozenset(
    ("sigmoid", "sigmoid_norm", "robust", "simpo", "exo_pair", "aot", "aot_unpaired")
)
"""Losses that read `label_smoothing`."""
DIVIDE_BY_BETA: frozenset[PreferenceLossType] = frozenset(("ipo", "sppo_hard"))


@dataclass(frozen=True, kw_only=True)
class DPOOptions(LossOptions):
    """Options of `DPOLossFn`."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "max_num_epochs", "max_num_steps", "val_period", "val_batches", "val_global_batch_size",
            "val_micro_batch_size", "val_at_start", "val_at_end", "seed",
        }
    )  # fmt: skip

    reference_policy_kl_penalty: NonNegative = option(0.1)
    """Factor β of the rewards."""
    preference_loss_weight: NonNegative = option(1.0)
    """Weight of the preference loss."""
    sft_loss_weight: NonNegative = option(0.0)
    """Weight of the negative log-likelihood of the chosen responses."""
    preference_average_log_probs: bool = option(False)
    """Compute rewards as means over the tokens of a response instead of sums."""
    sft_average_log_probs: bool = option(False)
    """Compute the log-likelihood of a chosen response as the mean over its tokens instead of the sum."""
    preference_loss: PreferenceLossType | tuple[PreferenceLossType, ...] = "sigmoid"
    """One loss, or a list of losses whose weighted sum is the preference loss (as in arXiv:2411.10442). The losses are
    functions of the rewards c (chosen) and r (rejected), and of their difference Δr = c − r:

    sigmoid: L(Δr) = −log σ(β·Δr). sigmoid_norm: the same, but each reward is divided by the response's token count.
    ipo: (Δr − 1 / 2β)² (arXiv:2310.12036, eq. 17). hinge: max(0, 1 − β·Δr) (SLiC-HF, arXiv:2305.10425).
    robust: ((1 − ε)·L(Δr) − ε·L(−Δr)) / (1 − 2ε), unbiased if chosen and rejected are exchanged in a fraction ε of the
    pairs (arXiv:2403.00409).
    exo_pair: KL((σ(β·Δr), σ(−β·Δr)) ‖ (1 − ε, ε)) (arXiv:2402.00856, eq. 16).
    discopop: L(Δr)·(1 − m) + exp(−β·Δr)·m, m = σ(β·Δr / τ) (arXiv:2406.08414, eq. 5).
    apo_zero: 1 − σ(β·c) + σ(β·r); apo_down: σ(β·c) + 1 − σ(β·Δr) (arXiv:2408.06266, eq. 7 and 8).
    nca_pair: −log σ(β·c) − ½·log σ(−β·c) − ½·log σ(−β·r) (arXiv:2402.05369).
    bco_pair: −log σ(β·c) − log σ(−β·r) (arXiv:2404.04656, without its running shift of the rewards).
    sppo_hard: (c − 1 / 2β)² + (r + 1 / 2β)² (arXiv:2405.00675, eq. 4.7, with probabilities 1 and 0).
    aot: L(k-th smallest margin of the policy − k-th smallest margin of the reference), among all pairs of the batch.
    aot_unpaired: L(k-th smallest c − k-th smallest r) (arXiv:2406.05882).
    simpo: −log σ(β·Δr − γ) (arXiv:2405.14734). orpo: −β·log σ(log odds(c) − log odds(r)) (arXiv:2403.07691). Rewards of
    simpo and orpo are mean log-probabilities of the policy; these losses have no reference."""
    preference_loss_weights: tuple[NonNegative, ...] | None = None
    """Weight of each loss if preference_loss is a list; null: 1 each."""
    label_smoothing: Annotated[float, Bounds(ge=0, lt=0.5)] = 0.0
    """Value ε of robust and exo_pair. sigmoid, sigmoid_norm, simpo, aot and aot_unpaired use it in the conservative
    loss (1 − ε)·L(Δr) + ε·L(−Δr) (cDPO, https://ericmitchell.ai/cdpo.pdf)."""
    simpo_gamma: NonNegative = 0.5
    """Margin γ of simpo."""
    discopop_tau: Positive = 0.05
    """Temperature τ of discopop."""
    f_divergence_type: FDivergenceType = "reverse_kl"
    """Divergence D_f(π ‖ π_ref) that the preference loss regularises by (f-DPO, arXiv:2309.16240): rewards are f′(u)
    with u = π / π_ref of a whole response. reverse_kl: log u. forward_kl: 1 − 1 / u. js_divergence: log(2u / (u + 1)).
    alpha_divergence: (u^(α − 1) − 1) / (α − 1). Values other than reverse_kl need losses that depend only on Δr."""
    f_alpha_divergence_coef: Annotated[float, Bounds()] = 0.5
    """Value α of alpha_divergence; 1 is the limit reverse_kl, 0 is forward_kl."""
    ld_alpha: Annotated[float, Bounds(ge=0)] | None = None
    """Weight, from 0 to 1, of the tokens by which a response is longer than the other response of its pair (LD-DPO,
    arXiv:2409.06411); null: 1."""
    use_weighting: bool = False
    """Multiply each pair's preference loss by the weights of its two responses (WPO, arXiv:2406.11827, eq. 2). A weight
    is the geometric mean of p / Σ p² over the response's tokens, without a gradient; Σ is over the vocabulary."""

    @property
    def needs_reference(self) -> bool:
        """Whether rewards are differences from a reference's log-probabilities."""
        return not set(self.preference_losses) & WITHOUT_REFERENCE

    @property
    def needs_batch(self) -> bool:
        """Whether one of the preference losses sorts values of all pairs of the global batch."""
        return bool(self.preference_losses.keys() & OF_BATCH)

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
        self._check_read_by(kinds)
        for kind in kinds:
            self.require(
                kind not in ("robust", "exo_pair") or self.label_smoothing > 0,
                f"preference_loss={kind} needs a label_smoothing above 0",
            )
            self.require(
                kind not in DIVIDE_BY_BETA or self.reference_policy_kl_penalty > 0,
                f"preference_loss={kind} divides by reference_policy_kl_penalty, which must not be 0",
            )
        self.require(
            "orpo" not in kinds or self.sft_loss_weight > 0,
            "preference_loss=orpo is added to the likelihood of the chosen responses: set sft_loss_weight (paper: 1)",
        )
        self.require(
            self.preference_loss_weight > 0 or self.sft_loss_weight > 0,
            "preference_loss_weight and sft_loss_weight are both 0: nothing would be trained; set one of them",
        )

    def _check_read_by(self, kinds: Mapping[PreferenceLossType, float]) -> None:
        """Raise ContractError if an option is set that does not apply to the losses `kinds`."""
        named, smoothed = ", ".join(kinds), [kind for kind in get_args(PreferenceLossType) if kind in SMOOTHED]
        self.require(
            not self.label_smoothing or bool(kinds.keys() & SMOOTHED),
            f"label_smoothing applies to preference_loss={', '.join(smoothed)}, not to {named}; leave "
            "label_smoothing out",
        )
        for name, default, kind in (("simpo_gamma", 0.5, "simpo"), ("discopop_tau", 0.05, "discopop")):
            self.require(
                kind in kinds or getattr(self, name) == default,
                f"{name} applies to preference_loss={kind}, not to {named}; leave {name} out",
            )
        divergence, no_f = self.f_divergence_type, kinds.keys() - WITH_F_DIVERGENCE
        self.require(
            divergence == "reverse_kl" or not no_f,
            f"f_divergence_type={divergence} does not apply to {', '.join(sorted(no_f))}; it applies only to "
            f"losses of a difference of two rewards ({', '.join(sorted(WITH_F_DIVERGENCE))})",
        )
        self.require(
            divergence == "alpha_divergence" or self.f_alpha_divergence_coef == 0.5,
            f"f_alpha_divergence_coef applies to f_divergence_type=alpha_divergence, not to {divergence}; "
            "leave f_alpha_divergence_coef out",
        )
        self.require(self.ld_alpha is None or self.ld_alpha <= 1, f"ld_alpha must be at most 1, got {self.ld_alpha}")
        for option, is_set in (("ld_alpha", self.ld_alpha is not None), ("use_weighting", self.use_weighting)):
            self.require(
                not is_set or self.needs_reference,
                f"{option} needs a loss with a reference, which {named} does not have; leave {option} out",
            )
        sorting = kinds.keys() & OF_BATCH
        self.require(
            not self.use_weighting or not sorting,
            f"use_weighting gives each pair a weight, but {', '.join(sorted(sorting))} compares values of "
            "different pairs; leave use_weighting out",
        )
        self.require(
            "sigmoid_norm" not in kinds or not self.preference_average_log_probs,
            "preference_loss=sigmoid_norm already averages over tokens; leave out preference_average_log_probs",
        )

    def _check_several(self) -> None:
        kinds, weights = self.preference_loss, self.preference_loss_weights
        if isinstance(kinds, str):
            self.require(
                weights is None,
                "preference_loss_weights needs a list of preference losses; for a single loss set "
                "preference_loss_weight",
            )
            return
        named = ", ".join(kinds)
        self.require(len(set(kinds)) == len(kinds), f"preference_loss=[{named}] names a loss twice")
        self.require(
            weights is None or len(weights) == len(kinds),
            f"preference_loss_weights: has {len(weights or ())} weights, but preference_loss=[{named}] has "
            f"{len(kinds)} losses; give one weight for each loss",
        )
        self.require(
            weights is None or any(weights),
            "preference_loss_weights are all 0; set preference_loss_weight=0 to train on the likelihood alone",
        )
        without = WITHOUT_REFERENCE & set(kinds)
        self.require(
            without in (set(), set(kinds)),
            f"preference_loss=[{named}]: rewards with and without a reference cannot be added; "
            f"{', '.join(sorted(without))} has no reference, the other losses have one",
        )


@dataclass(frozen=True, kw_only=True)
class KTOOptions(LossOptions):
    """Options of `KTOLossFn`."""

    loss: Literal["kto", "apo_zero_unpaired"] = "kto"
    """kto: λ_D·(1 − σ(β·(r − z₀))) for desirable and λ_U·(1 − σ(β·(z₀ − r))) for undesirable responses
    (arXiv:2402.01306, eq. 7), with z₀ the mean reward of mismatched prompts and responses, or 0 if it is negative.
    apo_zero_unpaired: the same with z₀ = 0 (arXiv:2408.06266, eq. 7); nothing is mismatched."""
    mismatched: Literal["dataset", "batch"] = "dataset"
    """Response that a prompt is combined with to compute z₀. dataset: that of the record half a dataset away. batch:
    that of the previous record of the global batch; for the first record, that of the last one (as in the paper)."""
    reference_policy_kl_penalty: NonNegative = option(0.1)
    """Factor β of the rewards."""
    desirable_weight: NonNegative = option(1.0)
    """Weight λ_D of desirable responses."""
    undesirable_weight: NonNegative = option(1.0)
    """Weight λ_U of undesirable responses."""

    @property
    def needs_reference_point(self) -> bool:
        """Whether the loss reads KTO's reference point z₀ (see `kto_reference_point`)."""
        return self.loss == "kto"

    def check(self) -> None:
        self.require(
            self.needs_reference_point or self.mismatched == "dataset",
            f"mismatched applies to the reference point, which loss={self.loss} does not have; leave mismatched out",
        )


@dataclass(frozen=True, kw_only=True)
class SFTOptions(LossOptions):
    """Options of the loss of supervised fine-tuning."""

    loss: Literal["nll", "dft"] = "nll"
    """nll: mean of −log p over the tokens that carry loss. dft: mean of −p·log p, in which the factor p has no gradient
    (dynamic fine-tuning, arXiv:2508.05629)."""


@dataclass(frozen=True, kw_only=True)
class DistillationOptions(LossOptions):
    """Options of `DistillationLossFn` and `WholeVocabularyDistillationLossFn`."""

    kl_type: Literal["forward", "reverse", "mixed", "js", "reverse_unnormalized"] = option("forward")
    """forward: KL(teacher ‖ student). reverse: KL(student ‖ teacher). mixed: the weighted sum of both. js: the
    generalised Jensen–Shannon divergence, β·KL(teacher ‖ m) + (1 − β)·KL(student ‖ m) with
    m = β·teacher + (1 − β)·student (arXiv:2306.13649, eq. 1). reverse_unnormalized: Σ (q·(log q − log p) − q + p)
    over the k tokens, with probabilities q of the student and p of the teacher that are normalised over the whole
    vocabulary (arXiv:2606.30406)."""
    mixed_kl_weight: Annotated[float, Bounds(ge=0)] = option(0.5)
    """Weight of the forward KL for kl_type=mixed; the reverse KL has 1 minus this weight."""
    js_beta: Annotated[float, Bounds(gt=0, lt=1)] = 0.5
    """Value β for kl_type=js."""
    loss_temperature: Positive = 1.0
    """Temperature by which the logits of teacher and student are divided before they are compared."""
    zero_outside_topk: bool = False
    """Compare the whole vocabulary: the teacher's probability is 0 for all tokens except its top k."""

    def check(self) -> None:
        self.require(self.mixed_kl_weight <= 1, f"mixed_kl_weight must be between 0 and 1, got {self.mixed_kl_weight}")
        self.require(
            self.kl_type == "js" or self.js_beta == 0.5,
            f"js_beta applies to kl_type=js, not to {self.kl_type}; leave js_beta out",
        )
        self.require(
            self.kl_type != "reverse_unnormalized" or not self.zero_outside_topk,
            "zero_outside_topk: has no effect, because kl_type=reverse_unnormalized reads only the k tokens; "
            "leave zero_outside_topk out",
        )

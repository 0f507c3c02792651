"""Check of parallel layouts: the same training steps are run in many layouts and compared with a single process.

Everything that a layout could change is compared: loss, metrics, scores (log-probabilities, or a reward model's
rewards), the gradient of every parameter in its Hugging Face shape, the gradient norm, and the weights after some
steps.

In float32, a layout may differ from one process by rounding. In bfloat16, rounding is so large that a fixed tolerance
would hide errors. There, the layout and one process are both compared with one process in float32; the layout may be at
most `ROUNDING_FACTOR` times as far from it as one process in bfloat16 (`compare_in_bfloat16`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mcore_rl.algorithms.build_loss import build_loss
from mcore_rl.config import (
    DistillationConfig,
    DPOConfig,
    KTOConfig,
    LoRAConfig,
    ModelConfig,
    RLConfig,
    RMConfig,
    TrainingConfig,
)
from mcore_rl.config.parallel import ParallelLayout
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.errors import TimeLimitError, UserError
from mcore_rl.losses.preference import build_dpo_loss
from mcore_rl.testing.processes import CPU, Start, run_processes

if TYPE_CHECKING:
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy
    from mcore_rl.models.policy.scoring import TeacherModel

ROUNDING = 1e-12
ROUNDING_FACTOR = 1.5
"""Limit of a layout's distance from float32 in bfloat16, relative to the distance of one process in bfloat16."""
PARAMETER_FACTOR = 3.0
"""The same limit for a single parameter, whose rounding errors may be small in one process by chance. An error, such as
a gradient that is not summed over the ranks, is many times as large as rounding."""
UNIT_ROUNDOFF = 2**-8
"""Largest relative error of one rounding to bfloat16."""


@dataclass
class LayoutResult:
    """Results of training in one layout.

    steps: metrics of each optimizer step, including `grad_norm`.
    scores: log-probabilities [B, S], or a reward model's rewards [B, 1].
    gradients: gradients of the first step, by name; with adapters, only the adapters' gradients.
    weights: weights after the last step, by name.
    """

    steps: list[dict[str, float]]
    scores: Tensor
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the first step."""
        return self.steps[0]


def add_earlier_logprobs(data: BatchedDataDict[Any], logprobs: Tensor, config: TrainingConfig) -> None:
    """Add to `data` the values of other models that the loss needs, such as a reference's log-probabilities.

    All of these values are invented. For the log-probabilities of a reference or an earlier policy, noise is added to
    `logprobs`. Without noise, margins and KL would be 0 except for rounding; accuracies would then be random, and KL
    terms would not be tested.

    Args:
        logprobs: log-probabilities of the policy.
    """
    generator = torch.Generator().manual_seed(0)

    def nearly_the_same() -> Tensor:
        return torch.where(logprobs != 0, logprobs + 0.1 * torch.randn(logprobs.shape, generator=generator), 0)

    if isinstance(config, DPOConfig):
        data.setdefault("reference_policy_logprobs", nearly_the_same().roll(-1, dims=1))
        data.update(build_dpo_loss(config.dpo).batch_columns(logprobs[:, 1:], data))
    if isinstance(config, KTOConfig):
        data["reference_policy_logprobs"] = nearly_the_same().roll(-1, dims=1)
        data["kl_reference_point"] = torch.full((data.size,), 0.3)
    if isinstance(config, DistillationConfig) and config.distillation.topk is not None:
        shape, k = data["input_ids"].shape, config.distillation.topk
        tokens = max(k, int(data["input_ids"].max()) + 1)
        data["teacher_topk_logits"] = torch.randn(*shape, k, generator=generator)
        data["teacher_topk_indices"] = torch.rand(*shape, tokens, generator=generator).topk(k).indices
    if isinstance(config, RLConfig):
        for name in ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs"):
            data[name] = nearly_the_same()


def invented_teacher(config: DistillationConfig) -> TeacherModel | None:
    """Return a teacher whose weights are the policy's initial weights times 1.25; None if the loss runs no teacher."""
    from mcore_rl.models.megatron.families import family_of
    from mcore_rl.models.megatron.model.hf_config import hf_config_of
    from mcore_rl.models.policy.scoring import TeacherModel

    if config.distillation.topk is not None:
        return None
    model = ModelConfig(
        path=config.model.path, dtype=config.model.dtype, trust_remote_code=config.model.trust_remote_code
    )
    family = family_of(hf_config_of(model))
    teacher = TeacherModel(config.model_copy(update={"model": model}), family.vocab_size)
    with torch.no_grad():
        for weight in teacher.parameters():
            weight.mul_(1.25)
    return teacher


def compute_layout_result(config: TrainingConfig, data: BatchedDataDict[Any], steps: int) -> LayoutResult | None:
    """Score the global batch `data` and run `steps` optimizer steps on it, in the layout of `config`.

    Every rank calls this function; rank 0 returns the result, and the other ranks return None. Every rank scores the
    whole batch, but trains only on the rows of its replica, as in a run.
    """
    from mcore_rl.models.megatron.weights.conversion import export_hf_weights
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    pairs = isinstance(config, DPOConfig | RMConfig)
    policy = MegatronPolicy(config, total_steps=1000, rows_per_unit=2 if pairs else 1)
    teacher = invented_teacher(config) if isinstance(config, DistillationConfig) else None
    loss_fn = build_loss(config, teacher)
    if config.model.head == "reward":
        scores = policy.get_rewards(data)["rewards"]
    else:
        scores = policy.get_logprobs(data)["logprobs"]
        add_earlier_logprobs(data, scores, config)
    own = policy.own_rows(data)
    policy.compute_gradients(own, loss_fn)
    gradients = whole_gradients(policy)
    metrics = [policy.train(own, loss_fn) for _ in range(steps)]
    for of_step in metrics:
        of_step.pop("all_mb_metrics")
    policy.finish_param_gather()
    weights = {name: w.cpu() for name, w in export_hf_weights(policy.model)}
    is_writer = policy.is_writer
    for model in (policy, teacher):
        if model is not None:
            model.shutdown()
    return LayoutResult(metrics, scores, gradients, weights) if is_writer else None


def whole_gradients(policy: MegatronPolicy) -> dict[str, Tensor]:
    """Return the current gradients of all parameters, or of all adapters, by their Hugging Face names. Collective."""
    from mcore_rl.models.megatron.training.optimizer import gather_gradients
    from mcore_rl.models.megatron.weights.adapters import export_adapters
    from mcore_rl.models.megatron.weights.conversion import export_hf_weights

    gather_gradients(policy.chunks)
    export = export_adapters if policy.model.lora else export_hf_weights
    return {name: gradient.cpu() for name, gradient in export(policy.model, _main_grad)}


def _main_grad(parameter: Tensor) -> Tensor:
    """Return the parameter's gradient; zeros for a router's bias, which has no gradient."""
    gradient: Tensor | None = getattr(parameter, "main_grad", None)
    return torch.zeros_like(parameter) if gradient is None else gradient.float()


@dataclass(frozen=True)
class Difference:
    """Relative differences between the results of two layouts: the largest difference of each kind.

    worst_gradient: name of the parameter whose gradient differs most.
    """

    loss: float
    metrics: float
    scores: float
    gradients: float
    worst_gradient: str
    grad_norm: float
    weights: float
    steps: Sequence[tuple[dict[str, float], dict[str, float]]]
    """Metrics of each step of the reference and of the layout."""
    limit: float = 1e-4
    """Largest difference of gradients and weights that counts as rounding."""

    def within(self, loss: float = 1e-5, gradients: float | None = None) -> bool:
        """Return whether all differences are so small that they can be rounding errors.

        Args:
            loss: largest allowed difference of loss, metrics and scores.
            gradients: largest allowed difference of gradients, gradient norm and weights; `self.limit` if None.
        """
        return max(self.loss, self.metrics, self.scores) <= loss and max(
            self.gradients, self.grad_norm, self.weights
        ) <= (self.limit if gradients is None else gradients)


def compare(outcome: LayoutResult, reference: LayoutResult) -> Difference:
    """Return the relative differences between `outcome` and `reference`.

    The difference of two numbers is divided by the reference's number, or by 1 if 1 is larger. The norm of the
    difference of two tensors is divided by the norm of the reference's tensor. For a gradient, the divisor is at least
    a thousandth of the norm of the whole gradient. The difference of values that are not finite is infinite, also if
    both are the same. So is the difference of the losses if the loss or the gradient norm of any step is not finite.
    """
    of_steps = (one[name] for of in (outcome, reference) for one in of.steps for name in ("loss", "grad_norm"))
    is_finite = all(map(math.isfinite, of_steps))
    metrics = {
        name: _relative(outcome.metrics[name], value) for name, value in reference.metrics.items() if name != "lr"
    }
    gradients = _distances(outcome.gradients, reference.gradients, floor=_norm(reference.gradients) * 1e-3)
    worst = max(gradients, key=lambda name: gradients[name])
    weights = _distances(outcome.weights, reference.weights)
    return Difference(
        loss=metrics["loss"] if is_finite else math.inf,
        metrics=max(value for name, value in metrics.items() if name not in ("loss", "grad_norm")),
        scores=_distance(outcome.scores, reference.scores),
        gradients=gradients[worst],
        worst_gradient=worst,
        grad_norm=_or_infinite(abs(outcome.metrics["grad_norm"] / reference.metrics["grad_norm"] - 1)),
        weights=max(weights.values()),
        steps=list(zip(reference.steps, outcome.steps, strict=True)),
    )


@dataclass(frozen=True)
class RoundingDifference(Difference):
    """Differences of a result in bfloat16 from one process in float32.

    worst_quantity: the quantity whose difference is largest, compared with that of one process in bfloat16.
    ratio: its difference divided by that of one process.
    ratio_limit: the limit of this ratio.
    """

    worst_quantity: str = ""
    ratio: float = 1.0
    ratio_limit: float = ROUNDING_FACTOR

    def within(self, loss: float = ROUNDING_FACTOR, gradients: float | None = None) -> bool:
        """Return whether all ratios are within their limits."""
        return self.ratio <= self.ratio_limit


def compare_in_bfloat16(outcome: LayoutResult, one: LayoutResult, exact: LayoutResult) -> RoundingDifference:
    """Return the differences of `outcome` from `exact`, and how they compare with those of `one` from `exact`.

    Scores, all gradients together and all weights together have the limit `ROUNDING_FACTOR`. Each parameter has the
    limit `PARAMETER_FACTOR`. In the divisor, a parameter is at least as far from `exact` as all parameters together.

    Loss and gradient norm are single numbers, whose errors in one process may be small by chance. Their ratios are of
    root mean squares over the steps. The divisor is at least one rounding to bfloat16, and at least the relative
    difference of the tensors from which the number is computed: scores or gradients. Other metrics are not judged,
    because one rounding can change a count.

    Args:
        outcome: result of a layout in bfloat16.
        one: result of one process in bfloat16.
        exact: result of one process in float32, from the same weights, which must be exact in bfloat16.
    """
    apart, expected = (_distance(result.scores, exact.scores) for result in (outcome, one))
    ratios, floors = {"scores": (_ratio(apart, expected), ROUNDING_FACTOR)}, {"loss": expected}
    for kind, tensors, ours, peers in (
        ("gradient", exact.gradients, outcome.gradients, one.gradients),
        ("weight", exact.weights, outcome.weights, one.weights),
    ):
        apart, expected = (_distance_of_all(some, tensors) for some in (ours, peers))
        ratios[f"all {kind}s"] = _ratio(apart, expected), ROUNDING_FACTOR
        floors[kind] = expected
        of_layout, of_one = (_distances(some, tensors, floor=_norm(tensors) * 1e-3) for some in (ours, peers))
        for name in tensors:
            ratios[f"{kind} of {name}"] = _ratio(of_layout[name], max(of_one[name], expected)), PARAMETER_FACTOR
    for name, floor in (("loss", floors["loss"]), ("grad_norm", floors["gradient"])):
        apart, expected = (_apart_in_steps(name, result, exact) for result in (outcome, one))
        ratios[name] = _ratio(apart, max(expected, floor, UNIT_ROUNDOFF)), ROUNDING_FACTOR
    worst = max(ratios, key=lambda name: ratios[name][0] / ratios[name][1])
    ratio, limit = ratios[worst]
    return RoundingDifference(**vars(compare(outcome, exact)), worst_quantity=worst, ratio=ratio, ratio_limit=limit)


def _distance_of_all(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the norm of the differences of all tensors, divided by the norm of all expected tensors."""
    differences = {name: tensors[name].double() - x.double() for name, x in expected.items()}
    return _norm(differences) / max(_norm(expected), ROUNDING)


def _ratio(value: float, expected: float) -> float:
    return value / max(expected, ROUNDING) if math.isfinite(value) and math.isfinite(expected) else math.inf


def _apart_in_steps(name: str, result: LayoutResult, exact: LayoutResult) -> float:
    """Return the root mean square, over steps, of a metric's relative difference from `exact`."""
    pairs = zip(result.steps, exact.steps, strict=True)
    squares = [_relative(one[name], right[name]) ** 2 for one, right in pairs]
    return math.sqrt(sum(squares) / len(squares))


def _norm(tensors: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors.values()))


def _distances(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], floor: float = 0.0) -> dict[str, float]:
    return {name: _distance(tensors[name], tensor, floor) for name, tensor in expected.items()}


def _relative(value: float, expected: float) -> float:
    return _or_infinite(abs(value - expected) / max(abs(expected), 1.0))


def _distance(value: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    difference = (value.double() - expected.double()).norm()
    return _or_infinite(float(difference / max(float(expected.double().norm()), floor, ROUNDING)))


def _or_infinite(value: float) -> float:
    """Return `value`, or infinity if it is NaN: a comparison with NaN is False, and `max` may drop NaN."""
    return math.inf if math.isnan(value) else value


def shrink_model(
    source: ModelConfig, destination: Path, layouts: Iterable[ParallelLayout], dtype: torch.dtype = torch.float32
) -> None:
    """Write a small model of the architecture of `source` to `destination`, with random weights of `dtype`.

    Its layers are few and small, but divisible as all `layouts` require. Tokenizer and image processor are copied.
    """
    import transformers

    from mcore_rl.models.megatron.families import family_of, has_reward_head
    from mcore_rl.models.megatron.model.hf_config import load_hf_config
    from mcore_rl.utils.model_directory import copy_companions

    config = load_hf_config(source.path, source.trust_remote_code, source.head)
    family = family_of(config)
    tp, pp, ep, vpp = (max(getattr(layout, name) for layout in layouts) for name in ("tp", "pp", "ep", "vpp"))
    family.shrink(2 * pp * vpp, tp, ep)
    torch.manual_seed(0)
    is_classifier = has_reward_head(config) and family.vision_config is None
    auto_class = "AutoModelForSequenceClassification" if is_classifier else family.auto_class
    model = getattr(transformers, auto_class).from_config(config, dtype=torch.float32)
    if has_reward_head(config) and family.vision_config is not None:  # transformers has few classifiers with towers
        del model.lm_head
        model.score = torch.nn.Linear(family.hf.hidden_size, 1, bias=False)
    with torch.no_grad():
        family_of(config).fill(model)
        biases = (buffer for name, buffer in model.named_buffers() if name.endswith("bias"))
        for parameter in (*model.parameters(), *biases):  # move norms and biases away from 1 and 0
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.to(dtype).save_pretrained(destination)
    copy_companions(source.path, destination)


def invent_adapter(model: ModelConfig, destination: Path) -> ModelConfig:
    """Write random adapters of the configured shapes to `destination`; return `model` with them, without dropout.

    Adapters usually start with B = 0. The gradient of A would then be 0 in every layout, and errors in this gradient
    would not be seen.
    """
    from mcore_rl.models.megatron.families import family_of
    from mcore_rl.models.megatron.model.hf_config import hf_config_of
    from mcore_rl.models.megatron.model.lora import PEFTDirectory, lora_of, shapes_of, write_peft_directory

    assert model.lora is not None, "there is nothing to invent"
    config, family = model.lora, family_of(hf_config_of(model))
    if config.path is not None:  # the adapter has another size
        given = PEFTDirectory(config.path)
        config = LoRAConfig(rank=given.rank, alpha=given.alpha, target_modules=given.target_modules)
    lora = lora_of(config, family, with_tower=model.vision_tower == "trained")
    generator = torch.Generator().manual_seed(0)
    tensors = ((name, torch.randn(shape, generator=generator) * 0.1) for name, shape in shapes_of(lora.table).items())
    write_peft_directory(tensors, destination, model.path, lora.settings, is_writer=True)
    return model.model_copy(update={"lora": LoRAConfig(path=destination)})


def fitting(
    layouts: Iterable[ParallelLayout], config: TrainingConfig
) -> tuple[list[ParallelLayout], list[tuple[ParallelLayout, UserError]]]:
    """Return the layouts that fit the configured model, and those that do not fit, each with its error."""
    from mcore_rl.models.megatron.model.hf_config import check_model_fits, hf_config_of

    fits, refused = [], []
    hf = hf_config_of(config.model)
    for layout in layouts:
        try:
            parallel = layout.apply(config).parallel
            check_model_fits(hf, parallel, config.data.max_sequence_length, config.model)
            fits.append(layout)
        except UserError as error:
            refused.append((layout, error))
    return fits, refused


def check_layouts(
    config: TrainingConfig,
    data: BatchedDataDict[Any],
    layouts: Sequence[ParallelLayout],
    steps: int = 3,
    start: Start = CPU,
) -> Iterable[tuple[ParallelLayout, Difference | None]]:
    """Yield each layout, as soon as it has been computed, with its difference from a single process.

    The difference is None if the layout takes longer than `LAYOUT_SECONDS`.

    If `model.dtype` is bfloat16, the differences are from a single process in float32, and the first layout is one
    process in bfloat16; see `compare_in_bfloat16`.

    Args:
        start: device of the processes, and how they communicate.
    """
    from mcore_rl.models.megatron.families import family_of
    from mcore_rl.models.megatron.model.hf_config import hf_config_of

    def result(layout: ParallelLayout, config: TrainingConfig = config) -> LayoutResult:
        arguments = layout.apply(config), data, steps
        ranks = run_processes(
            compute_layout_result, *arguments, world_size=layout.world_size, timeout=LAYOUT_SECONDS, start=start
        )
        first: LayoutResult = ranks[0]
        return first

    def difference(layout: ParallelLayout) -> Difference | None:
        try:
            own = result(layout)
        except TimeLimitError:
            return None
        return replace(compare(own, one), limit=limit) if exact is None else compare_in_bfloat16(own, one, exact)

    one = result(ParallelLayout())
    exact = result(ParallelLayout(), in_float32(config)) if config.model.dtype == "bfloat16" else None
    limit = family_of(hf_config_of(config.model)).gradient_tolerance
    if exact is not None:
        yield ParallelLayout(), compare_in_bfloat16(one, one, exact)
        layouts = [layout for layout in layouts if layout != ParallelLayout()]
    for layout in layouts:
        yield layout, difference(layout)


LAYOUT_SECONDS = 300
"""Time limit of the steps in one layout."""


def in_float32(config: TrainingConfig) -> TrainingConfig:
    """Return `config` in float32, with local layers: Transformer Engine multiplies float32 with TF32's precision."""
    model = config.model.model_copy(update={"dtype": "float32", "transformer_impl": "local", "fp8": None})
    return config.model_copy(update={"model": model})


TABLE_HEADER = (
    f"{'layout':<28}{'loss':>10}{'metrics':>10}{'scores':>10}{'gradients':>11}{'grad norm':>11}{'weights':>10}"
)


def table_row(layout: ParallelLayout, difference: Difference | None) -> str:
    """Return the line for a layout in the table of relative differences, below `TABLE_HEADER`."""
    if difference is None:
        return f"{layout!s:<28}  NO TIME (took longer than {LAYOUT_SECONDS} s)"
    numbers = (difference.loss, difference.metrics, difference.scores)
    worst = difference.worst_gradient
    if isinstance(difference, RoundingDifference):
        ratio, limit = difference.ratio, difference.ratio_limit
        worst = f"{difference.worst_quantity}: {ratio:.2f} times one process, at most {limit}"
    verdict = "" if difference.within() else f"  WRONG ({worst})"
    return (
        f"{layout!s:<28}"
        + "".join(f"{number:>10.1e}" for number in numbers)
        + f"{difference.gradients:>11.1e}{difference.grad_norm:>11.1e}{difference.weights:>10.1e}"
        + verdict
    )


def steps_table(layout: ParallelLayout, difference: Difference) -> Iterable[str]:
    """Yield lines that compare loss and gradient norm of each step in one process and in a layout, side by side."""
    for name, title in (("loss", "loss"), ("grad_norm", "gradient norm")):
        yield f"{title:<15}{'one process':>13}{layout!s:>13}{'difference':>13}"
        for number, (one, other) in enumerate(difference.steps, 1):
            yield f"  step {number:<8}{one[name]:>13.7f}{other[name]:>13.7f}{abs(other[name] - one[name]):>13.1e}"

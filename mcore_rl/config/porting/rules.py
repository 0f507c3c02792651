"""Parts of the rules by which values of TRL, verl and NeMo RL become values here (trl.py, verl.py, nemo_rl.py)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.config.porting.defaults import parsed
from mcore_rl.config.porting.foreign import Foreign
from mcore_rl.errors import UserError


class Refused(str):
    """Why a value has no counterpart, although training would differ without one."""


class ToDo(str):
    """A task for the user, which the configuration cannot express."""


class Given:
    """The values of another program's configuration, with its defaults below them."""

    def __init__(self, foreign: Foreign, defaults: Mapping[str, Any]) -> None:
        self.algorithm = foreign.algorithm
        self.processes = foreign.processes or 1
        self.nodes = foreign.nodes
        self.defaults = defaults
        self.values = foreign.values

    def __call__(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return self.defaults.get(key, default) if value is None else value

    def number(self, key: str, default: float = 0) -> float:
        """Return the value of a key that must be a number.

        Raises:
            UserError: it is not a number.
        """
        return number(self(key, default), key)


Outcome = Mapping[str, Any] | str
"""The values here that another program's value becomes, or why it becomes nothing: `Refused` if training differs,
`ToDo` if a person has to do something, else text."""
Rule = Callable[[Any, Given], Outcome]
TO_DO = "to do"
"""Key in an outcome under which stands what a person has to do beside its values."""


def number(value: Any, key: str) -> float:
    """Return `value` as a number; texts such as 1e-6, which YAML does not read as a number, are accepted."""
    try:
        return value if isinstance(value, int | float) and not isinstance(value, bool) else float(str(value))
    except ValueError:
        raise UserError(f"{key}: must be a number, got {value!r}") from None


@dataclass(frozen=True)
class Choice:
    """Rule that gives each value its values here."""

    outcomes: Mapping[Any, Outcome]

    def __call__(self, value: Any, given: Given) -> Outcome:
        key = value if isinstance(value, str | int | float | bool) else str(value)
        names = ", ".join(map(str, self.outcomes))
        return self.outcomes.get(key, Refused(f"{value} does not exist here; it may be one of {names}"))


NOTHING: tuple[Any, ...] = (None, False, 0, "", "none", [], {})
"""Values that switch an option off."""


def refused(reason: str, harmless: Sequence[Any] = NOTHING) -> Rule:
    """Return a rule for a key that has no counterpart, although values other than the harmless ones change training."""
    return lambda value, given: "as here" if value in harmless else Refused(reason)


def said(reason: str) -> Rule:
    """Return a rule for a key that has no counterpart or is read with another key."""
    return lambda value, given: reason


def to(key: str, convert: Callable[[Any], Any] = lambda value: value) -> Rule:
    """Return a rule that sets `key` to the converted value."""
    return lambda value, given: {key: convert(value)}


def positive(key: str, reason: str) -> Rule:
    """Return a rule for numbers of which those of at most 0 switch something off."""
    return lambda value, given: {key: value} if number(value, key) > 0 else reason


def only_if(key: str, accepted: Callable[[Any], Any], reason: str, rule: Rule) -> Rule:
    """Return `rule` for configurations whose `key` is accepted; otherwise the value is left out for this reason."""
    return lambda value, given: rule(value, given) if accepted(given(key)) else reason


def true_for(rule: Rule, reason: str = "false is the default here") -> Rule:
    """Return `rule` for the value true; other values are left out."""
    return lambda value, given: rule(value, given) if value in (True, "true", "True") else reason


def whole(value: float) -> float:
    return int(value) if float(value).is_integer() else value


def trackers(value: Any, given: Given) -> Outcome:
    names = value if isinstance(value, list | tuple) else [value]
    project = str(given("project", given("trainer.project_name", "huggingface")))
    keys = {"wandb": ("logging.wandb", project), "tensorboard": ("logging.tensorboard", True)}
    keys |= {"mlflow": ("logging.mlflow", project)}
    return dict(keys[name] for name in names if name in keys) or f"{value} is not a tracker here"


_OF_MEGATRON = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"), "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"), "linear_fc2": ("down_proj",),
}  # fmt: skip
"""Names of Hugging Face projections for Megatron's linear layers."""


def targets(value: Any, given: Given) -> Outcome:
    """Return the projections that get adapters. The names of Megatron's layers are accepted; none means all."""
    names = list(value) if isinstance(value, list | tuple) else [value] if value else []
    if not names or "all-linear" in names or set(_OF_MEGATRON) <= set(names):
        return "all projections are the default here"
    unknown = [name for name in names if not re.fullmatch(r"\w+", str(name)) or str(name).startswith("linear_")]
    if unknown := [name for name in unknown if name not in _OF_MEGATRON]:
        return Refused(f"{', '.join(unknown)}: name the projections in model.lora.target_modules")
    return {"model.lora.target_modules": [part for name in names for part in _OF_MEGATRON.get(name, (name,))]}


def optimizer(value: Any, given: Given) -> Outcome:
    name = str(value).lower().rpartition(".")[2]
    if re.search(r"8bit|4bit|paged|bnb", name) or not re.match(r"adamw?(_|$)|(dist_)?muon", name):
        return Refused(f"{value} does not exist here; it is adamw or muon")
    return {"optimizer.name": "muon" if "muon" in name else "adamw"}


def servers(value: Any, given: Given) -> Outcome:
    """Rule for the number of GPUs of each of vLLM's servers; their number follows from the GPUs of the run."""
    each = int(number(value, "tensor_parallel_size"))
    if each < 1:
        raise UserError(f"tensor_parallel_size: must be at least 1, got {value}")
    per_node = given.processes // given.nodes
    if given.nodes > 1 and each > per_node:
        return Refused(f"a server's {each} GPUs must be on one node, and a node has {per_node}")
    return {"generation.vllm.tensor_parallel_size": each}


def betas(value: Any, given: Given) -> Outcome:
    value = parsed(value) if isinstance(value, str) else value
    if not isinstance(value, list | tuple) or len(value) != 2:
        return f"must be two numbers, got {value!r}"
    return {"optimizer.adam_beta1": value[0], "optimizer.adam_beta2": value[1]}


def sequence_parallel(size: str) -> Rule:
    return true_for(only_if(
        size, lambda value: value is not None and number(value, size) > 1, f"{size} is 1",
        to("parallel.sequence_parallel"),
    ))  # fmt: skip


def lowest_rate(style: str) -> Rule:
    """Return a rule for the smallest rate of a schedule whose name is the value of the key `style`."""
    is_decay = lambda name: name != "constant"  # noqa: E731 (used once)
    return only_if(style, is_decay, "a constant rate has no minimum", to("optimizer.min_lr"))


def first_rate(value: Any, given: Given) -> Outcome:
    """Rule for the rate from which a warmup rises."""
    return ToDo("the rate rises from 0 here") if number(value, "lr_warmup_init") else "as here"


SCHEDULE = Choice({
    "constant": {"optimizer.schedule": "constant"},
    "constant_with_warmup": {"optimizer.schedule": "constant"},
    "linear": {"optimizer.schedule": "linear"},
    "cosine": {"optimizer.schedule": "cosine"},
    "inverse_sqrt": {"optimizer.schedule": "inverse_square_root"},
    "inverse_square_root": {"optimizer.schedule": "inverse_square_root"},
    "inverse-square-root": {"optimizer.schedule": "inverse_square_root"},
})  # fmt: skip
DTYPE = Choice(
    {name: {"model.dtype": "bfloat16"} for name in ("bfloat16", "bf16", "torch.bfloat16")}
    | {name: {"model.dtype": "float32"} for name in ("float32", "fp32", "torch.float32")}
    | {"auto": {"model.dtype": "auto"}}
)
FP8_RECIPE = Choice(
    {name: {"model.fp8.recipe": name} for name in ("blockwise", "tensorwise", "mxfp8")}
    | {"delayed": Refused("delayed scaling does not exist here; choose a model.fp8.recipe")}
)

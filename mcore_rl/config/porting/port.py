"""Translate the configuration of another program into one of this package."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml
from pydantic import ValidationError

from mcore_rl.config.base import Section
from mcore_rl.config.load import FORM, has_key, resolved_yaml
from mcore_rl.config.other_names import OtherName, other_names
from mcore_rl.config.porting.defaults import flattened
from mcore_rl.config.porting.foreign import Foreign
from mcore_rl.config.porting.nemo_rl import DEFAULTS_OF_NEMO_RL, NEMO_RL
from mcore_rl.config.porting.rules import TO_DO, Given, Refused, Rule, ToDo
from mcore_rl.config.porting.trl import DEFAULTS, RULES
from mcore_rl.config.porting.verl import INSTEAD_OF_UNSET, PLACEHOLDERS, VERL, judge_of_verl
from mcore_rl.errors import UserError

NEEDED = {"model.path": "m", "data.train": "d", "output_dir": "o"}
"""Values with which the configuration of each algorithm but `distill` loads, and with `TEACHER` that one too."""

TEACHER = {"distillation.teacher": "t"}

REQUIRED = {"model.path": "--model", "data.train": "--data"}
"""Keys without which no run starts, and the options that set them too."""

RULES_OF = {"TRL": RULES, "verl": VERL, "NeMo RL": NEMO_RL}
"""Rules by program; their keys are algorithm (or "") and key or pattern."""

SAME_LOOP = ("sft", "rm", "distillation")
"""Sections of NeMo RL whose keys of the training loop are those of its section dpo."""


@dataclass
class Ported:
    """A translated configuration.

    values: values here by dotted key. differs: lines about values without a counterpart, which train something else
    than the values here. became: lines that say what each key became. left: lines about keys that became nothing.
    todo: what a person has to add or check. refused: whether a run could not start, or would train something else.
    """

    values: dict[str, Any] = field(default_factory=dict)
    differs: list[str] = field(default_factory=list)
    became: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    todo: list[str] = field(default_factory=list)
    refused: bool = False


def port(foreign: Foreign, config_type: type[Section]) -> Ported:
    """Return the configuration of the class `config_type` that corresponds to another program's configuration.

    Raises:
        UserError: a value of the other program is wrong.
    """
    given = Given(foreign, _defaults_of(foreign))
    ported = Ported(todo=list(foreign.unread))
    for key, value in foreign.values.items():
        _add(ported, foreign, config_type, given, key, value)
    usual = _usual_values(config_type)
    for key, value in given.defaults.items():
        if foreign.values.get(key) is None:
            _add(ported, foreign, config_type, given, key, value, usual)
    if "data.validation" not in ported.values:
        for key in [
            key for key in ported.values if key.startswith(("trainer.validation_interval", "trainer.validate_at"))
        ]:
            del ported.values[key]
            ported.left += [f"{line}: there is no validation data" for line in ported.became if f"-> {key}: " in line]
            ported.became = [line for line in ported.became if f"-> {key}: " not in line]
    if foreign.program == "verl" and has_key(config_type, "environment"):
        judge, todo = judge_of_verl(given)
        ported.values |= judge
        ported.todo += [todo] * bool(todo)
    if "output_dir" not in ported.values:
        ported.values["output_dir"] = f"outputs/{foreign.algorithm}"
    for key, option in REQUIRED.items():
        if key not in ported.values:
            ported.todo.append(f"{key} is required: add it, or give {option} on the command line")
            ported.refused = True
    if has_key(config_type, "environment") and "environment.name" not in ported.values:
        ported.todo.append("environment.name: choose the judge; the default compares with each record's answer")
    if foreign.program == "TRL" and foreign.processes is None:
        ported.todo.append("the batch is that of one process; --num-processes N multiplies it")
    _leave_out_refused(ported, config_type)
    ported.refused = ported.refused or bool(ported.differs)
    return ported


def _defaults_of(foreign: Foreign) -> Mapping[str, Any]:
    if foreign.program == "TRL":
        return {**DEFAULTS[""], **DEFAULTS.get(foreign.algorithm, {})}
    if foreign.program == "NeMo RL":
        return DEFAULTS_OF_NEMO_RL.get(foreign.algorithm, {})
    known = {key: value for key, value in foreign.defaults.items() if key not in PLACEHOLDERS}
    return {**known, **INSTEAD_OF_UNSET}


def _usual_values(config_type: type[Section]) -> Mapping[str, Any]:
    """Return the default values here by dotted key."""
    config = config_type.model_validate(nested({**NEEDED, **(TEACHER if has_key(config_type, "distillation") else {})}))
    return dict(flattened(yaml.safe_load(resolved_yaml(config))))


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by dotted key as sections."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        *sections, key = name.split(".")
        place = found
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    return found


def as_yaml(ported: Ported, config_type: type[Section]) -> str:
    """Return the sections as YAML, in the order of the configuration."""
    sections = nested(ported.values)
    order = [name for name in config_type.model_fields if name in sections]
    return yaml.safe_dump({name: sections[name] for name in order}, sort_keys=False, allow_unicode=True, width=110)


def _add(
    ported: Ported,
    foreign: Foreign,
    config_type: type[Section],
    given: Given,
    key: str,
    value: Any,
    usual: Mapping[str, Any] | None = None,
) -> None:
    """Translate one key into `ported`.

    Args:
        usual: for a key that the file leaves out: the default values here. Only what differs from them is written, and
            nothing is told about keys that become nothing.
    """
    is_default, name = usual is not None, foreign.spelled(key)
    origin = f"{foreign.program}'s default {name}" if is_default else name
    row, rule = _row(foreign, key), _rule(foreign, key)
    outcome: Mapping[str, Any] | str
    if value is None and not key.startswith("loss_fn."):
        outcome = "null: the default here holds"
    elif rule is not None:
        try:
            outcome = rule(value, given)
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            raise UserError(f"{name}: {_shown(value)} is no value that {foreign.program} has ({error})") from None
    elif key.startswith("loss_fn."):
        outcome = {_loss_key(key, foreign.algorithm): value}
    elif row is not None and row.here:
        outcome = {row.here: value}
    else:
        outcome = row.reason if row is not None else ""
    if isinstance(outcome, Refused):
        ported.differs.append(f"{origin}: {_shown(value)}: {outcome}")
    elif isinstance(outcome, ToDo):
        ported.todo.append(f"{origin}: {_shown(value)}: {outcome}")
    elif isinstance(outcome, str) and not is_default:
        unknown = f"mcore_rl does not know this key of {foreign.program}"
        (ported.left if outcome else ported.todo).append(f"{origin}: {_shown(value)}: {outcome or unknown}")
    if isinstance(outcome, str):
        return
    settings = {_of_program(name, config_type): part for name, part in outcome.items() if name != TO_DO}
    if TO_DO in outcome and (usual is None or settings.items() - usual.items()):
        ported.todo.append(f"{origin}: {_shown(value)}: {outcome[TO_DO]}")
    absent = [name for name in settings if not has_key(config_type, name)]
    for name, part in settings.items():
        if name in absent or (usual is not None and (usual.get(name) == part or name in ported.values)):
            continue
        if ported.values.get(name, part) != part:
            ported.left.append(
                f"{origin}: {_shown(value)}: another key has set {name} to {_shown(ported.values[name])}"
            )
        else:
            ported.values[name] = part
            ported.became.append(f"{origin}: {_shown(value)} -> {name}: {_shown(part)}")
    if absent and not is_default:
        ported.left.append(
            f"{origin}: {_shown(value)}: is {absent[0]}, which the program {foreign.algorithm} does not have"
        )


def _loss_key(key: str, algorithm: str) -> str:
    """Return the key here for one of NeMo RL's loss options, whose names are accepted in the section `loss`."""
    name = key.removeprefix("loss_fn.")
    if algorithm == "distill":
        return f"distillation.{name}"
    rows = (row for row in other_names() if row.program == "NeMo RL" and row.kind == "ClippedPG" and row.there == name)
    return next((row.here for row in rows if row.here), f"loss.{name}")


def _of_program(name: str, config_type: type[Section]) -> str:
    """Return the key of a program on rollouts other than grpo, whose section has its own name."""
    section, _, key = name.partition(".")
    algorithm = getattr(config_type, "algorithm", "")
    own = f"{'distillation' if algorithm == 'distill' else algorithm}.{key}"
    return own if section == "grpo" and not has_key(config_type, name) and has_key(config_type, own) else name


def _row(foreign: Foreign, key: str) -> OtherName | None:
    """Return the table's row for a key: one for the algorithm before one for all, a key before a pattern."""
    name = _in_table(foreign.program, key)
    rows = [
        row
        for row in other_names()
        if row.program == foreign.program
        and row.kind.lower() in ("", foreign.algorithm)
        and fnmatch.fnmatchcase(name, row.there)
    ]
    return min(rows, key=lambda row: ("*" in row.there, not row.kind), default=None)


def _in_table(program: str, key: str) -> str:
    section, _, rest = key.partition(".")
    return f"dpo.{rest}" if program == "NeMo RL" and section in SAME_LOOP and rest else key


def _rule(foreign: Foreign, key: str) -> Rule | None:
    key = _in_table(foreign.program, key)
    rules = RULES_OF[foreign.program]
    exact = rules.get((foreign.algorithm, key)) or rules.get(("", key))
    patterns = (rule for (_, pattern), rule in rules.items() if "*" in pattern and fnmatch.fnmatchcase(key, pattern))
    return exact or next(patterns, None)


def _shown(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
    return " ".join(text.split())


def _leave_out_refused(ported: Ported, config_type: type[Section]) -> None:
    """Move values that the configuration refuses, one after the other, to those without a counterpart.

    A value that needs a package which is not installed here is kept.
    """
    trial = {**NEEDED, **ported.values}
    while True:
        try:
            config_type.model_validate(nested(trial))
            return
        except ValidationError as error:
            problem = error.errors()[0]
        except UserError as error:
            ported.todo.append(" ".join(str(error).split()))
            ported.refused = True
            return
        where = ".".join(str(part) for part in problem["loc"] if not FORM.fullmatch(str(part)))
        message = " ".join(problem["msg"].removeprefix("Value error, ").split())
        named = message.partition(":")[0].split(", ")[0]
        candidates = (where, f"{where}.{named}".strip("."), named)
        key = next(
            (name for name in trial for place in candidates if name == place or place.startswith(f"{name}.")), None
        ) or next((name for name in trial if name.startswith(f"{candidates[1]}.")), None)
        if key is None or key in REQUIRED:
            ported.todo.append(f"the configuration is refused: {where + ': ' if where else ''}{message}")
            ported.refused = True
            return
        if "pip install" in message:  # the section is kept, but cannot be checked here
            ported.todo.append(f"{key}: {message.partition(': ')[2] or message}")
            trial = {name: value for name, value in trial.items() if name.split(".")[0] != key.split(".")[0]}
            continue
        value = trial.pop(key)
        ported.values.pop(key)
        refused = [line for line in ported.became if f"-> {key}: " in line] or [f"{key}: {_shown(value)}"]
        ported.became = [line for line in ported.became if line not in refused]
        ported.differs += [f"{line}, which is refused here: {message}" for line in refused]

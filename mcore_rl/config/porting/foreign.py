"""Read configurations and commands of TRL, verl and NeMo RL into flat keys, without their packages."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from mcore_rl.config.load import laid_over
from mcore_rl.errors import UserError

TRAINERS = {"dpo": "dpo", "sft": "sft", "kto": "kto", "grpo": "grpo", "reward": "rm"}
"""Map from a command of TRL to the algorithm here."""

CONFIGS = {"DPOConfig": "dpo", "SFTConfig": "sft", "KTOConfig": "kto", "GRPOConfig": "grpo", "RewardConfig": "rm"}
"""Map from a class of TRL, of which a Python file makes the configuration, to the algorithm here."""

OF_CALLS: Mapping[str, Mapping[str, str]] = {
    "LoraConfig": {
        "r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "use_rslora": "use_rslora",
        "target_modules": "lora_target_modules", "use_dora": "use_dora", "modules_to_save": "lora_modules_to_save",
    },
    "load_dataset": {
        "0": "dataset_name", "path": "dataset_name", "1": "dataset_config", "split": "dataset_train_split",
    },
    **{f"{name.removesuffix('Config')}Trainer": {"model": "model_name_or_path"} for name in CONFIGS},
}  # fmt: skip
"""Arguments of other calls in such a file, by name or place, and the keys of TRL's scripts for them."""

SECTIONS_OF_NEMO_RL = {"grpo": "grpo", "dpo": "dpo", "sft": "sft", "rm": "rm", "distillation": "distill"}
"""Map from a section of NeMo RL, which only one of its programs reads, to the algorithm here."""

_STARTS = (
    (re.compile(rf"trl ({'|'.join(TRAINERS)})"), "TRL"),
    (re.compile(rf"trl\.scripts\.({'|'.join(TRAINERS)})|(?:\S*/)?({'|'.join(TRAINERS)})\.py"), "TRL"),
    (re.compile(r"verl\.trainer\.(main_ppo)|(?:\S*/)?(main_ppo)\.py"), "verl"),
    (re.compile(rf"(?:\S*/)?run_({'|'.join(SECTIONS_OF_NEMO_RL)})\w*\.py"), "NeMo RL"),
)
"""Patterns of the words that start a training program, and its package."""

_PROCESSES = ("num_processes", "nproc_per_node")
_EXPRESSION = re.compile(r"\$\{[^}]*[.:](?!-)")
"""Pattern of OmegaConf's references to other values."""


@dataclass(frozen=True)
class Foreign:
    """A configuration of another program.

    values: its values by dotted key. algorithm: the program here that corresponds; "" if it is not known.
    processes: number of processes, if the command names it. unread: what has to be read by a person, one line each.
    """

    program: str
    algorithm: str
    values: Mapping[str, Any]
    processes: int | None = None
    unread: tuple[str, ...] = ()


def read_foreign(path: Path) -> Foreign:
    """Return what `path` configures: a YAML file, a Python file of TRL, or a file with one command.

    Raises:
        UserError: the file cannot be read, or is none of these.
    """
    try:
        text = path.read_text("utf-8-sig")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8 text") from None
    if path.suffix == ".py":
        return _of_python(text, path)
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        values = None
        if path.suffix in (".yaml", ".yml", ".json"):
            raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if isinstance(values, dict):
        return _of_yaml(values, path)
    return _of_command(text, path)


def _of_yaml(values: dict[str, Any], path: Path) -> Foreign:
    values, unread = _with_included(values, path)
    if "actor_rollout_ref" in values:
        return _of_sections("verl", values, unread)
    if "policy" in values or "loss_fn" in values:
        return _of_sections("NeMo RL", values, unread)
    sections = [key for key, value in values.items() if isinstance(value, dict) and not _is_value_of_trl(key)]
    if sections:
        raise UserError(
            f"{path}: is no configuration of TRL (which has no section {sections[0]}), of verl (which has "
            "actor_rollout_ref) or of NeMo RL (which has policy)"
        )
    processes = next((int(values.pop(name)) for name in _PROCESSES if str(values.get(name, "")).isdecimal()), None)
    return Foreign("TRL", "", values, processes, tuple(unread))


def _is_value_of_trl(key: str) -> bool:
    return key.endswith(("_kwargs", "_config")) or key in ("env", "fsdp")


def _of_sections(program: str, values: Mapping[str, Any], unread: Sequence[str]) -> Foreign:
    flat = dict(_flattened(values))
    computed = []
    for key, value in flat.items():
        if isinstance(value, str) and (named := re.fullmatch(r"\$\{([\w.]+)\}", value)) and named[1] in flat:
            flat[key] = flat[named[1]]
        elif isinstance(value, str) and _EXPRESSION.search(value):
            computed.append(key)
    told = [f"{key}: {flat.pop(key)} is computed by OmegaConf; set its counterpart yourself" for key in computed]
    return Foreign(program, _algorithm(program, flat), flat, _processes_of(program, flat), (*unread, *told))


def _algorithm(program: str, flat: Mapping[str, Any]) -> str:
    if program == "verl":
        if flat.get("distillation.enabled") is True:
            return "distill"
        return "ppo" if flat.get("algorithm.adv_estimator", "gae") == "gae" else "grpo"
    sections = [
        ours for theirs, ours in SECTIONS_OF_NEMO_RL.items() if any(key.startswith(f"{theirs}.") for key in flat)
    ]
    return sections[0] if len(sections) == 1 else ""


def _processes_of(program: str, flat: Mapping[str, Any]) -> int | None:
    of_verl = ("trainer.nnodes", "trainer.n_gpus_per_node")
    nodes, gpus = of_verl if program == "verl" else ("cluster.num_nodes", "cluster.gpus_per_node")
    sizes = flat.get(nodes, 1), flat.get(gpus)
    return sizes[0] * sizes[1] if all(isinstance(size, int) for size in sizes) else None


def _with_included(values: dict[str, Any], path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the values over those of the file that NeMo RL's key `defaults` names, and what could not be read."""
    if "defaults" not in values:
        return values, []
    included = values.pop("defaults")
    file = path.parent / included if isinstance(included, str) else None
    if file is None or not file.is_file() or file.resolve() == path.resolve():
        return values, [f"defaults: the values of {included} are not read; write them into this file"]
    try:
        base = yaml.safe_load(file.read_text("utf-8-sig"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{file} (defaults of {path}): cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(base, dict):
        raise UserError(f"{file} (defaults of {path}): must be a mapping, found a {type(base).__name__}")
    base, unread = _with_included(base, file)
    return laid_over(base, values), unread


def _flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from _flattened(value, f"{name}.")
        else:
            yield name, value


def _of_command(text: str, path: Path) -> Foreign:
    found = []
    for words in _commands(text, path):
        for place in range(len(words)):
            for pattern, program in _STARTS:
                two = " ".join(words[place : place + 2])
                if match := pattern.fullmatch(words[place]) or pattern.fullmatch(two):
                    found.append((program, next(filter(None, match.groups())), words, place + (match[0] == two)))
    if len(found) != 1:
        raise UserError(
            f"{path}: has {len(found) or 'no'} commands of TRL (as trl dpo), verl (verl.trainer.main_ppo) or NeMo RL "
            "(run_grpo.py); it must have one, or be a YAML file, or a Python file that ends with .py"
        )
    program, name, words, place = found[0]
    launch, _ = _options(words[:place])  # of accelerate or torchrun; the program's name may seem to be a value
    values, overrides = _options(words[place + 1 :])
    numbers = [given[0] if isinstance(given := launch.get(key), list) else given for key in _PROCESSES]
    processes = next((number for number in numbers if isinstance(number, int)), None)
    config = values.pop("config", None)
    of_file = Foreign(program, "", {})
    if config is not None:
        file = next((file for file in (path.parent / str(config), Path(str(config))) if file.is_file()), None)
        if file is None:
            raise UserError(f"{path}: --config {config}: there is no such file beside {path} or here")
        of_file = read_foreign(file)
    if program != "TRL":
        both = Foreign(program, "", {**of_file.values, **overrides})
        algorithm = SECTIONS_OF_NEMO_RL.get(name) or _algorithm(program, both.values)
        counted = processes or _processes_of(program, both.values) or of_file.processes
        return replace(both, algorithm=algorithm, processes=counted, unread=of_file.unread)
    processes = next((values.pop(key) for key in _PROCESSES if isinstance(values.get(key), int)), processes)
    merged = {**of_file.values, **values}
    return Foreign(program, TRAINERS[name], merged, processes or of_file.processes, of_file.unread)


def _commands(text: str, path: Path) -> Iterator[list[str]]:
    """Yield the words of each command, with the variables replaced that earlier lines of the file set."""
    variables: dict[str, str] = {}

    def expanded(match: re.Match[str]) -> str:
        name, _, default = (match[1] or match[2]).partition(":-")
        return variables.get(name, default or f"${{{name}}}")

    for line in re.sub(r"\\\r?\n", " ", text).splitlines():
        try:
            words = shlex.split(re.sub(r"\$(?:\{(\w+(?::-[^}]*)?)\}|(\w+))", expanded, line), comments=True)
        except ValueError as error:
            raise UserError(f"{path}: is neither YAML nor a command ({error} in: {line.strip()[:60]})") from None
        words = words[1:] if words[:1] == ["export"] else words
        if len(words) == 1 and (assigned := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", words[0], re.DOTALL)):
            variables[assigned[1]] = assigned[2]
        elif words:
            yield words


def _options(words: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options (`--name value`) and Hydra's overrides (`name=value`) of a command by name."""
    options: dict[str, list[Any]] = {}
    overrides: dict[str, Any] = {}
    name = None
    for word in words:
        if match := re.fullmatch(r"--([A-Za-z][\w-]*)(?:=(.*))?", word, re.DOTALL):
            name = match[1].replace("-", "_")
            options[name] = [] if match[2] is None else [_parsed(match[2])]
        elif match := re.fullmatch(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", word, re.DOTALL):
            overrides[match[1]] = _parsed(match[2])
        elif name is not None:
            options[name].append(_parsed(word))
    found = {key: given[0] if len(given) == 1 else given or True for key, given in options.items()}
    negated = {key for key in found if key.startswith("no_") and found[key] is True}
    kept = {key: value for key, value in found.items() if key not in negated}
    return kept | {key.removeprefix("no_"): False for key in negated}, overrides


def _parsed(text: str) -> Any:
    try:
        return float(text) if re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", text) else yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _of_python(text: str, path: Path) -> Foreign:
    try:
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    except SyntaxError as error:
        raise UserError(f"{path}: is not Python ({error.msg} in line {error.lineno})") from None
    named = [(_name(call.func), call) for call in calls]
    kinds = [CONFIGS[name] for name, _ in named if name in CONFIGS]
    if len(kinds) != 1:
        raise UserError(
            f"{path}: makes {len(kinds) or 'no'} configurations of TRL ({', '.join(CONFIGS)}); it must make one"
        )
    values: dict[str, Any] = {}
    unread: list[str] = []
    for name, call in named:
        keys = OF_CALLS.get(name)
        if keys is None and name not in CONFIGS:
            continue
        given = [(str(place), node) for place, node in enumerate(call.args)]
        given += [(keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg]
        values |= {"use_peft": True} if name == "LoraConfig" else {}
        for argument, node in given:
            key = argument if keys is None else keys.get(argument)
            if key is None or key in values:
                continue
            try:
                values[key] = ast.literal_eval(node)
            except (ValueError, TypeError):
                unread.append(f"{key}: is {ast.unparse(node)[:60]} in line {node.lineno}; set its counterpart yourself")
    return Foreign("TRL", kinds[0], values, None, tuple(unread))


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""

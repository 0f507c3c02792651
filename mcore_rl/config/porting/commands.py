"""Read a shell script with a command of TRL, verl or NeMo RL."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore_rl.config.porting.defaults import flattened, parsed
from mcore_rl.config.porting.foreign import SECTIONS_OF_NEMO_RL, Foreign, of_nemo_rl, of_verl
from mcore_rl.config.porting.included import OWN_OF_VERL, beside, mapping_of, with_included
from mcore_rl.config.porting.shell import PLAIN, UNKNOWN, Script, expand
from mcore_rl.errors import UserError

TRAINERS = {"dpo": "dpo", "sft": "sft", "kto": "kto", "grpo": "grpo", "reward": "rm"}
"""Map from a command of TRL to the algorithm here."""

_STARTS = (
    (re.compile(rf"trl ({'|'.join(TRAINERS)})"), "TRL"),
    (re.compile(rf"trl\.scripts\.({'|'.join(TRAINERS)})|(?:\S*/)?({'|'.join(TRAINERS)})\.py"), "TRL"),
    (re.compile(r"verl\.trainer\.(main_ppo|sft_trainer)(?:_v0|_ray)?"), "verl"),
    (
        re.compile(r"(?:\S*/)?verl/trainer/(main_ppo|sft_trainer|fsdp_sft_trainer)(?:_v0|_ray)?\.py|(main_ppo)\.py"),
        "verl",
    ),
    (re.compile(rf"(?:\S*/)?run_(?:vlm_)?({'|'.join(SECTIONS_OF_NEMO_RL)})\w*\.py"), "NeMo RL"),
)
"""Patterns of the words that start a training program, and its package."""

_OTHER_PROGRAMS = re.compile(r"(?:verl|recipe|trl|nemo_rl)\.[\w.]+")
"""Pattern of the modules of programs that are not read."""

PROCESSES = ("num_processes", "nproc_per_node")
"""Options that set the number of processes."""


def has_command(text: str) -> bool:
    """Return whether a text seems to start a training program."""
    return any(pattern.search(text) for pattern, _ in _STARTS)


def of_command(text: str, path: Path, script: Script = PLAIN) -> Foreign:
    """Return the configuration of the one command of the shell script `text`, a file at `path`.

    Raises:
        UserError: there is no command, or more than one, or a file that it names is missing.
    """
    commands, told = _commands(text, path, script)
    found = [start for words in commands for start in _starts(words)]
    if len(found) != 1:
        modules = [words[place] for words in commands for place in range(1, len(words)) if words[place - 1] == "-m"]
        others = [name for name in modules if _OTHER_PROGRAMS.fullmatch(name)]
        what = [f"it starts {others[0]}, which has no counterpart here"] if others and not found else []
        raise UserError(
            "; ".join([
                f"{path}: has {len(found) or 'no'} commands of TRL (as trl dpo), verl (verl.trainer.main_ppo) or NeMo "
                "RL (run_grpo.py); it must have one, or be a YAML file, or a Python file that ends with .py",
                *what,
                *told,
                *["give variables of the script by --env NAME=VALUE"] * bool(told),
            ])
        )  # fmt: skip
    program, name, launcher, arguments = found[0]
    options, overrides, others = _options(arguments)
    told += [f"{word}: is no key=value of the command" for word in others if program != "TRL"]
    for given in (options, overrides):
        for key in [key for key, value in given.items() if UNKNOWN.search(str(value))]:
            told.append(f"{key}: is {given.pop(key)}, which is not known without running a program; set it yourself")
    launch, _, _ = _options(launcher)  # of accelerate or torchrun; the program's name may seem to be a value
    if program == "verl":
        found_here = _command_of_verl(name, options, overrides, told, path)
        nodes, each = (_first_number(launch.get(key)) for key in ("nnodes", "nproc_per_node"))
        if each is None or name == "main_ppo":
            return found_here
        return replace(found_here, processes=each * (nodes or 1), nodes=nodes or 1)
    values, unread = dict[str, Any](), list[str]()
    config = options.pop("config", None)
    if config is not None:
        file = _named(str(config), path)
        values, _, unread = with_included(mapping_of(file, f"--config of {path}"), file)
    if program == "NeMo RL":
        if config is None:
            raise UserError(
                f"{path}: has no --config, so that NeMo RL reads a file of its own; name that file by --config"
            )
        told += [f"--{key}: is no option of NeMo RL's programs" for key in options]
        return of_nemo_rl(SECTIONS_OF_NEMO_RL[name], {**dict(flattened(values)), **overrides}, [*unread, *told])
    values |= options
    counts: list[Any] = [values.pop(key, None) for key in PROCESSES]
    counts += [_first_number(launch.get(key)) for key in PROCESSES]
    processes = next((number for number in counts if isinstance(number, int)), None)
    nodes = _first_number(launch.get("nnodes")) or 1
    if processes is not None and launch.get("nproc_per_node") is not None:  # accelerate's num_processes is the total
        processes *= nodes
    return Foreign(program, TRAINERS[name], values, processes, (*unread, *told), nodes)


def _first_number(value: Any) -> int | None:
    first = value[0] if isinstance(value, list) and value else value
    return first if isinstance(first, int) and not isinstance(first, bool) else None


def _starts(words: Sequence[str]) -> Iterator[tuple[str, str, Sequence[str], Sequence[str]]]:
    """Yield each start of a program in a command: the package, the program's name, the words before and after it."""
    for place in range(len(words)):
        for pattern, program in _STARTS:
            for count in (1, 2):
                if match := pattern.fullmatch(" ".join(words[place : place + count])):
                    yield program, next(filter(None, match.groups())), words[:place], words[place + count :]
                    break


def _command_of_verl(
    name: str, options: Mapping[str, Any], overrides: Mapping[str, Any], told: list[str], path: Path
) -> Foreign:
    own = "ppo_trainer" if name.startswith("main_ppo") else "sft_trainer_engine"
    values, unread = dict[str, Any](), list[str]()
    config, directory = options.get("config_name"), options.get("config_path")
    if config is not None:
        name = str(config).removesuffix(".yaml")
        file = str(beside(str(config), Path(str(directory or ".")) / "x"))
        if name in OWN_OF_VERL and not _file_of(file, path):  # a relative directory is beside verl's program
            own = OWN_OF_VERL[name]
        else:
            found = _named(file, path)
            nested, its_own, unread = with_included(mapping_of(found, f"--config-name of {path}"), found)
            values, own = dict(flattened(nested)), its_own or own
    known = ("config_name", "config_path")
    told = [*unread, *told, *(f"--{key}: is no option of verl's programs" for key in options if key not in known)]
    for key, value in overrides.items():
        if key.startswith("~"):
            values = {name: part for name, part in values.items() if not f"{name}.".startswith(f"{key[1:]}.")}
        else:
            values |= dict(flattened({key: value}))
    return of_verl(own, values, told)


def _file_of(name: str, path: Path) -> Path | None:
    """Return the file of a relative name in a command: here, or in the directory of the command's file or above."""
    directories = (Path(), *path.resolve().parents)
    return next((place / name for place in directories if (place / name).is_file()), None)


def _named(name: str, path: Path) -> Path:
    found = _file_of(name, path)
    if found is None:
        raise UserError(f"{path}: {name}: there is no such file here, beside {path} or above")
    return found


def _commands(text: str, path: Path, script: Script = PLAIN, depth: int = 0) -> tuple[list[list[str]], list[str]]:
    """Return the words of each command, also of those that stand in a word of another, and what has to be checked."""
    expanded = expand(text, path, script)
    commands, told = list(expanded.commands), list(expanded.told)
    for words in expanded.commands:
        if words and re.fullmatch(r"\+{0,2}\w+(\.\w+)+=.*|--\w.*", words[0], re.DOTALL):
            told.append(f"{' '.join(words)}: bash reads this as a command of its own: a comment or blank line ends one")
        for word in words:
            if depth < 3 and re.search(r"\s", word.strip()) and has_command(word):
                inner, its_told = _commands(word, path, Script((), script.variables), depth + 1)
                commands, told = [*commands, *inner], [*told, *its_told]
    return commands, told


def _options(words: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return a command's options (`--name value`) and Hydra's overrides (`name=value`) by name, and its other words."""
    options: dict[str, list[Any]] = {}
    overrides: dict[str, Any] = {}
    others: list[str] = []
    name = None
    for word in words:
        if match := re.fullmatch(r"--([A-Za-z][\w-]*)(?:=(.*))?", word, re.DOTALL):
            name = match[1].replace("-", "_")
            options[name] = [] if match[2] is None else [parsed(match[2])]
        elif match := re.fullmatch(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", word, re.DOTALL):
            overrides[match[1]] = parsed(match[2])
        elif re.fullmatch(r"~[\w.]+", word):
            overrides[word] = None
        elif name is not None:
            options[name].append(parsed(word))
        else:
            others.append(word)
    found = {key: given[0] if len(given) == 1 else given or True for key, given in options.items()}
    negated = {key for key in found if key.startswith("no_") and found[key] is True}
    kept = {key: value for key, value in found.items() if key not in negated}
    return kept | {key.removeprefix("no_"): False for key in negated}, overrides, others

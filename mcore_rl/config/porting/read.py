"""Read a file of TRL, verl or NeMo RL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from mcore_rl.config.porting.commands import PROCESSES, has_command, of_command
from mcore_rl.config.porting.defaults import flattened
from mcore_rl.config.porting.foreign import Foreign, of_nemo_rl, of_verl
from mcore_rl.config.porting.included import with_included
from mcore_rl.config.porting.python_file import of_python
from mcore_rl.config.porting.shell import PLAIN, Script
from mcore_rl.errors import UserError


def read_foreign(path: Path, script: Script = PLAIN) -> Foreign:
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
        return of_python(text, path)
    is_yaml = path.suffix in (".yaml", ".yml", ".json")
    if not is_yaml and has_command(text):
        return of_command(text, path, script)
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        values = None
        if is_yaml:
            raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    return _of_yaml(values, path) if isinstance(values, dict) else of_command(text, path, script)


def _of_yaml(values: dict[str, Any], path: Path) -> Foreign:
    values, own, unread = with_included(values, path)
    if "actor_rollout_ref" in values or own:
        return of_verl(own or "ppo_trainer", dict(flattened(values)), unread)
    if "policy" in values or "loss_fn" in values:
        return of_nemo_rl("", dict(flattened(values)), unread)
    sections = [key for key, value in values.items() if isinstance(value, dict) and not _is_value_of_trl(str(key))]
    if sections:
        raise UserError(
            f"{path}: is no configuration of TRL (which has no section {sections[0]}), of verl (which has "
            "actor_rollout_ref) or of NeMo RL (which has policy)"
        )
    processes = next((int(values.pop(name)) for name in PROCESSES if str(values.get(name, "")).isdecimal()), None)
    return Foreign("TRL", "", {str(key): value for key, value in values.items()}, processes, tuple(unread))


def _is_value_of_trl(key: str) -> bool:
    return key.endswith(("_kwargs", "_config")) or key in ("env", "fsdp")

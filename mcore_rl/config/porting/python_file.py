"""Read a Python file in which a configuration of TRL is made."""

from __future__ import annotations

import ast
import contextlib
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mcore_rl.config.porting.foreign import Foreign
from mcore_rl.errors import UserError

CONFIGS = {"DPOConfig": "dpo", "SFTConfig": "sft", "KTOConfig": "kto", "GRPOConfig": "grpo", "RewardConfig": "rm"}
"""Map from a class of TRL, of which a Python file makes the configuration, to the algorithm here."""

OF_CALLS: Mapping[str, Mapping[str, str]] = {
    "LoraConfig": {
        "r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "use_rslora": "use_rslora",
        "target_modules": "lora_target_modules", "use_dora": "use_dora", "modules_to_save": "lora_modules_to_save",
    },
    "load_dataset": {
        "0": "dataset_name", "path": "dataset_name", "1": "dataset_config", "split": "dataset_train_split",
        "data_files": "data_files",
    },
    **{
        f"{name.removesuffix('Config')}Trainer": {
            "0": "model_name_or_path", "model": "model_name_or_path", "reward_funcs": "reward_funcs",
        }
        for name in CONFIGS
    },
}  # fmt: skip
"""Arguments of other calls in such a file, by name or place, and the keys of TRL's scripts for them."""

WITHOUT_EFFECT = frozenset((
    "args", "train_dataset", "processing_class", "tokenizer", "peft_config", "callbacks", "reward_processing_classes",
    "task_type", "inference_mode", "num_proc", "cache_dir", "token", "trust_remote_code", "keep_in_memory",
))  # fmt: skip
"""Arguments of these calls that are read elsewhere in the file, or do not change what is trained."""

OF_LORA = {"use_peft": True, "lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
"""What PEFT's LoraConfig sets by default, under the keys of TRL's scripts, whose defaults are others."""


def of_python(text: str, path: Path) -> Foreign:
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise UserError(f"{path}: is not Python ({error.msg} in line {error.lineno})") from None
    calls = sorted((node for node in ast.walk(tree) if isinstance(node, ast.Call)), key=lambda call: call.lineno)
    named = [(_name(call.func), call) for call in calls]
    kinds = [CONFIGS[name] for name, _ in named if name in CONFIGS]
    if len(kinds) != 1:
        raise UserError(
            f"{path}: makes {len(kinds) or 'no'} configurations of TRL ({', '.join(CONFIGS)}); it must make one"
        )
    values: dict[str, Any] = {}
    unread: list[str] = []
    known = _constants(tree) | _functions(tree, path.stem)
    unread += _changed_later(tree)
    training = _training_data(tree, named)
    decided = _in_branches(tree)
    for name, call in named:
        keys = OF_CALLS.get(name)
        if keys is None and name not in CONFIGS:
            continue
        if name == "load_dataset" and call is not training:
            unread += [f"line {call.lineno}: {ast.unparse(call)[:60]}: set data.train or data.validation yourself"]
            continue
        given = [(str(place), node) for place, node in enumerate(call.args)]
        given += [(keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg]
        unread += [f"line {call.lineno}: {name} depends on a branch: check whether it is made"] * (call in decided)
        for argument, node in given:
            key = argument if keys is None else keys.get(argument)
            if key in values or (keys is not None and argument in WITHOUT_EFFECT):
                continue
            if key is None:
                says = f"{argument} of {name}: is {ast.unparse(node)[:60]} in line {node.lineno}; set its counterpart"
                unread += [f"{says} yourself"] * (ast.unparse(node) not in ("None", "False"))
                continue
            try:
                values[key] = _constant(node, known)
            except _NOT_CONSTANT:
                unread.append(f"{key}: is {ast.unparse(node)[:60]} in line {node.lineno}; set its counterpart yourself")
        unread += [
            f"**{ast.unparse(keyword.value)[:60]} in line {call.lineno} is not read: set its values yourself"
            for keyword in call.keywords
            if keyword.arg is None
        ]
    if any(name == "LoraConfig" for name, _ in named):
        values = {**OF_LORA, **values}
    return Foreign("TRL", kinds[0], values, None, tuple(unread))


def _in_branches(tree: ast.Module) -> set[ast.Call]:
    """Return the calls that are made under a condition, other than that the file is the program."""
    branches = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If | ast.IfExp) and not ast.unparse(node.test).startswith("__name__ ==")
    ]
    return {part for branch in branches for part in ast.walk(branch) if isinstance(part, ast.Call)}


def _training_data(tree: ast.Module, named: Sequence[tuple[str, ast.Call]]) -> ast.Call | None:
    """Return the call of load_dataset whose data the trainer gets for training; the only one, or None if unknown."""
    loads = [call for name, call in named if name == "load_dataset"]
    if len(loads) < 2:
        return loads[0] if loads else None
    trainers = [call for name, call in named if name.endswith("Trainer")]
    given = [word.value for call in trainers for word in call.keywords if word.arg == "train_dataset"]
    variables = {part.id for node in given for part in ast.walk(node) if isinstance(part, ast.Name)}
    assigned = [
        load
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id in variables for target in node.targets)
        for load in loads
        if load in ast.walk(node.value)
    ]
    return assigned[0] if len(assigned) == 1 else None


def _changed_later(tree: ast.Module) -> list[str]:
    """Return lines about attributes of configurations that the file sets after it has made them."""
    made = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _name(node.value.func) in CONFIGS
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    changes = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _name(node.value) in made
    ]
    return [f"{node.attr}: is set in line {node.lineno}; set its counterpart yourself" for node in changes]


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Return the variables that one assignment of the module itself sets to a constant, and that nothing shadows."""
    known: dict[str, Any] = {}
    stored = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    stored += [node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)]
    for node in tree.body:
        match node:
            case ast.Assign([ast.Name(name)], value) | ast.AnnAssign(ast.Name(name), _, value):
                with contextlib.suppress(*_NOT_CONSTANT):
                    known |= {name: _constant(value, known)} if stored.count(name) == 1 else {}
    return known


def _functions(tree: ast.Module, module: str) -> dict[str, str]:
    """Return the dotted names of the functions that a file defines or imports by name."""
    own = {node.name: f"{module}.{node.name}" for node in tree.body if isinstance(node, ast.FunctionDef)}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return own | {part.asname or part.name: f"{node.module}.{part.name}" for node in imports for part in node.names}


LARGEST_POWER = 64
_NOT_CONSTANT = (ValueError, TypeError, LookupError, ArithmeticError)
_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Pow: operator.pow,
}  # fmt: skip


def _constant(node: ast.expr | None, known: Mapping[str, Any]) -> Any:
    """Return the value of an expression of constants and of the variables `known`.

    Raises:
        ValueError, TypeError, LookupError, ArithmeticError: it is not constant.
    """
    match node:
        case ast.Name(name):
            return known[name]
        case ast.BinOp(left, by, right):
            first, second = _constant(left, known), _constant(right, known)
            if isinstance(by, ast.Pow) and not abs(second) <= LARGEST_POWER:
                raise ValueError("too large to compute")
            return _OPERATORS[type(by)](first, second)
        case ast.JoinedStr(parts):
            return "".join(str(_constant(part, known)) for part in parts)
        case ast.FormattedValue(value, -1, None):
            return _constant(value, known)
        case ast.List(parts) | ast.Tuple(parts):
            return [_constant(part, known) for part in parts]
        case ast.Dict(keys, parts):
            return {_constant(key, known): _constant(part, known) for key, part in zip(keys, parts, strict=True)}
        case None:
            raise ValueError("no value")
    return ast.literal_eval(node)


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""

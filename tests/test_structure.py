"""Tests of the structure of the package: the order of imports, and names that only one place may use."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from make_drawings import PACKAGE, modules, own_imports

FLOORS = {  # the order of imports, from the ground up
    "__init__": 0,
    "errors": 0,
    "models": 0,  # the empty package itself
    "utils": 1,
    "platform": 2,
    "distributed": 3,
    "compat": 3,  # what `distributed` exports or inherits
    "losses": 4,
    "compat.nemo_rl.loss_functions": 4,
    "config": 5,  # imports losses.options alone of the losses, and no torch
    "data": 6,
    "models.megatron": 7,
    "models.generation": 8,
    "models.refit": 8,
    "models.policy": 9,
    "environments": 10,
    "run": 10,
    "rollouts": 11,
    "agents": 12,
    "algorithms": 13,
    "simulation": 14,
    "report": 14,
    "serving": 14,
    "testing": 14,
    "cli": 15,
    "__main__": 15,
}


def floor_of(module):
    parts = module.split(".")[1:] or ["__init__"]
    prefixes = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next(FLOORS[prefix] for prefix in prefixes if prefix in FLOORS)


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def private_names(tree):
    """Names with an underscore that are imported from Megatron, or are read from objects other than a module's own."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron"):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            owner = node.value
            while isinstance(owner, ast.Attribute | ast.Call):
                owner = owner.value if isinstance(owner, ast.Attribute) else owner.func
            others = {"self", "super", "os", "torch"}
            names = [] if isinstance(owner, ast.Name) and owner.id in others else [node.attr]
        yield from (name for name in names if name.startswith("_") and not name.startswith("__"))


def test_imports_follow_the_order():
    found = {
        (name, other)
        for name, tree in modules().items()
        for other in imported(tree)
        if other.startswith("mcore_rl.") and floor_of(other) > floor_of(name)
    }
    assert not found, "these modules import from a floor above theirs"


def test_megatron_is_imported_under_models_megatron_only():
    """Only its module `internals` uses private names; tests/megatron/test_private_names.py looks at inherited ones."""
    elsewhere, private = [], []
    for name, tree in modules().items():
        if not name.startswith("mcore_rl.models.megatron"):
            elsewhere += [(name, other) for other in imported(tree) if other.split(".")[0] == "megatron"]
        elif not name.endswith(".internals"):
            private += [(name, attribute) for attribute in private_names(tree)]
    assert not elsewhere and not private


def test_torch_cuda_is_used_in_the_platform_only():
    """However it is written: as an attribute, or imported."""
    found = []
    for name, tree in modules().items():
        if name in ("mcore_rl.platform", "mcore_rl.platform.cpu"):
            continue
        used = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        used += [
            f"{node.module}.{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        ]
        found += [(name, one) for one in [*used, *imported(tree)] if f"{one}.".startswith("torch.cuda.")]
    assert not found


INSIDE_MEGATRON = (  # layers of models/megatron from the lowest; its own files are below them
    "kernels",
    "layers",
    "attention",
    "recurrent",
    "families",
    "moe",
    "model",
    "weights",
    "training",
    "checkpoint",
)


def test_imports_inside_megatron_follow_the_order():
    level = {name: number for number, name in enumerate(INSIDE_MEGATRON, 1)}
    prefix = "mcore_rl.models.megatron."
    found = {
        (name, other)
        for name, others in own_imports().items()
        for other in others
        if name.startswith(prefix) and other.startswith(prefix)
        if level.get(other.split(".")[3], 0) > level.get(name.split(".")[3], 0)
    }
    assert not found, "these modules import from a layer above theirs"
    assert {name.split(".")[3] for name in modules() if name.count(".") == 4 and name.startswith(prefix)} == {*level}


PORTED = {  # modules at NeMo RL's import paths, which have or inherit what `compat` defines
    "mcore_rl.algorithms.loss_functions",
    "mcore_rl.distributed.batched_data_dict",
    "mcore_rl.distributed.model_utils",
}


def test_ported_code_is_imported_at_nemo_rls_paths_only():
    users = {
        name
        for name, others in own_imports().items()
        if not name.startswith("mcore_rl.compat") and any(other.startswith("mcore_rl.compat") for other in others)
    }
    assert users == PORTED
    exporting = PORTED - {"mcore_rl.distributed.batched_data_dict"}
    assert not {name for name, others in own_imports().items() if others & exporting}, "the package calls ported code"


def test_triton_kernels_take_tensors_and_numbers():
    """They import nothing of the package, so no type of it."""
    assert not own_imports()["mcore_rl.distributed.triton_logprobs"]


def test_imports_are_absolute():
    """The tests of the order of imports read whole names."""
    relative = {
        name
        for name, tree in modules().items()
        if any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(tree))
    }
    assert not relative


def test_no_modules_import_each_other_in_a_circle():
    circle = []
    try:
        TopologicalSorter(own_imports()).prepare()
    except CycleError as error:
        circle = error.args[1]
    assert not circle, "each of these modules imports the one before it"


LONG_FUNCTIONS = {"train_step": 80}  # a training step is written out in one function


def test_files_functions_and_the_root_are_small():
    long = [path.name for path in PACKAGE.rglob("*.py") if len(path.read_text().splitlines()) > 800]
    assert not long, "files of more than 800 lines"
    functions = [
        (name, node.name)
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno >= LONG_FUNCTIONS.get(node.name, 60)
    ]
    assert not functions, "functions of more than 60 lines"
    root = [path.name for path in PACKAGE.glob("*.py") if path.name not in ("__init__.py", "__main__.py")]
    assert len(root) <= 4, root


NEED_NO_DEVICE = (
    "algorithms.loss_functions",
    "rollouts.samples",
    "data.datasets",
    "distributed.batched_data_dict",
    "testing.layout_check",
    "models.policy.interfaces",
    "models.refit.transfer",
)


@pytest.mark.long
@pytest.mark.every_case
@pytest.mark.parametrize("more", [(), pytest.param(("models.policy.ray_policy",), marks=pytest.mark.long, id="ray")])
def test_a_device_is_chosen_by_a_call_before_megatron_is_imported(more):
    """Modules that do not need Megatron are imported without it; others name the function to call first, after which
    they can be imported."""
    code = f"""
import sys
for name in {NEED_NO_DEVICE + more}:
    __import__(f"mcore_rl.{{name}}")
from mcore_rl import platform
try:
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy
except RuntimeError as error:
    print(error)
print(platform.is_initialized(), "megatron" in sys.modules)
platform.initialize_platform()
from mcore_rl.models.policy.megatron_policy import MegatronPolicy
print(platform.is_initialized(), "megatron" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    told, before, after = done.stdout.splitlines()
    assert "call mcore_rl.platform.initialize_platform() where the program starts" in told
    assert (before, after) == ("False False", "True True")


def names_of(tree):
    """Names that a module defines or imports at its top level, also in branches of `if` and `try`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def test_scripts_and_examples_import_names_that_exist():
    """Not all of them run in tests, and the type checker does not read them."""
    root, wrong = PACKAGE.parent, []
    files = [path for folder in ("scripts", "examples") for path in sorted((root / folder).rglob("*.py"))]
    assert len(files) > 40
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "mcore_rl":
                known = {*names_of(modules()[node.module])} if node.module in modules() else set()
                known |= {name.rpartition(".")[2] for name in modules() if name.rpartition(".")[0] == node.module}
                wrong += [f"{path.name}: {node.module}.{a.name}" for a in node.names if a.name not in known]
    assert not wrong


COMPARING = ("approx", "allclose", "assert_close", "isclose")


def small_limits_of(tree):
    """Yield line and value of each small constant that is an absolute limit of a comparison."""

    def constants(node):
        if isinstance(node, ast.keyword) and node.arg in ("rel", "rtol", "rel_tol"):
            return
        if isinstance(node, ast.Constant) and isinstance(node.value, float) and 1e-9 < node.value < 1e-5:
            yield node.lineno, node.value
        for child in ast.iter_child_nodes(node):
            yield from constants(child)

    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            for op, left, right in zip(node.ops, [node.left, *node.comparators], node.comparators, strict=False):
                if isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE):
                    yield from constants(right if isinstance(op, ast.Lt | ast.LtE) else left)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in COMPARING:
            yield from constants(node)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value in ("abs", "atol"):
                    yield from constants(value)


def test_small_limits_are_derived_from_the_rounding_of_float32():
    """A limit of a few roundings holds on one processor and fails on another; tests/support/float32.py derives limits.

    The comment "# float64" or "# printed" marks a line that compares in float64 or with printed digits.
    """
    tests, wrong = Path(__file__).parent, []
    for path in sorted(tests.rglob("*.py")):
        lines = path.read_text().splitlines()
        for line, limit in {*small_limits_of(ast.parse("\n".join(lines)))}:
            if not any(f"# {word}" in lines[line - 1] for word in ("float64", "printed")):
                wrong.append(f"{path.relative_to(tests)}:{line}: {limit:g}")
    assert not wrong

"""The house holds its floors: a module imports from its own floor or below."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "mcore_rl"

FLOORS = {
    "__init__": 0,
    "errors": 0,
    "loss_options": 0,
    "platform": 0,
    "cuda_stand_ins": 0,
    "quiet": 0,
    "launch_environment": 0,
    "watchdog": 0,
    "byte_blocks": 0,
    "hub": 0,
    "checkpoint_store": 1,
    "run_directory": 1,
    "run_identity": 1,
    "config": 0,  # may be imported from anywhere
    "distributed": 1,
    "data": 2,
    "preflight": 2,
    "algorithms.interfaces": 2,
    "algorithms.loss_functions": 2,
    "models.megatron": 3,
    "models.policy": 4,
    "models.generation": 4,
    "environments": 4,
    "algorithms": 5,
    "forked_imports": 5,
    "layout_check": 5,
    "layouts": 1,
    "entry_point": 6,
    "report": 5,
    "programs": 6,
    "simulation": 5,
    "__main__": 6,
    "models": 0,  # the empty package itself
}
LIGHT = {"distributed", "algorithms.loss_functions", "algorithms.interfaces"}


def floor_of(module: str) -> int:
    parts = module.split(".")[1:] or ["__init__"]
    prefixes = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next(FLOORS[prefix] for prefix in prefixes if prefix in FLOORS)


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        yield pytest.param(name, path, id=name)


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize(("name", "path"), modules())
def test_floors(name, path):
    above = [i for i in imported(path) if i.startswith("mcore_rl.") and floor_of(i) > floor_of(name)]
    assert not above, f"{name} (floor {floor_of(name)}) imports from above: {above}"


@pytest.mark.parametrize(("name", "path"), modules())
def test_megatron_is_imported_in_one_place(name, path):
    if not name.startswith("mcore_rl.models.megatron"):
        assert not [i for i in imported(path) if i.split(".")[0] == "megatron"]


@pytest.mark.parametrize(("name", "path"), modules())
def test_the_platform_alone_asks_for_the_device(name, path):
    """`torch.cuda`, however it is written: an attribute, or imported."""
    if name in ("mcore_rl.platform", "mcore_rl.cuda_stand_ins"):
        return
    tree = ast.parse(path.read_text())
    attributes = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    names = [
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert not [one for one in [*attributes, *names, *imported(path)] if f"{one}.".startswith("torch.cuda.")]


NEED_NO_DEVICE = (
    "algorithms.loss_functions",
    "algorithms.rollouts",
    "data.records",
    "distributed.own_rows",
    "layout_check",
    "models.policy.interfaces",
    "models.policy.ray_policy",
    "models.policy.refit",
)


def test_a_device_is_chosen_by_a_call_before_megatron_is_imported():
    """What needs no Megatron is imported without; the rest says what to call, and can then be imported after all."""
    code = f"""
import sys
for name in {NEED_NO_DEVICE}:
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


def private_names(path):
    """Names with an underscore that are imported from Megatron, or are asked of objects other than one's own."""
    for node in ast.walk(ast.parse(path.read_text())):
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


@pytest.mark.parametrize(("name", "path"), modules())
def test_private_names_of_megatron_stand_in_one_file(name, path):
    if name.startswith("mcore_rl.models.megatron") and not name.endswith(".internals"):
        assert not list(private_names(path))


@pytest.mark.parametrize(("name", "path"), modules())
def test_files_can_be_read_in_a_sitting(name, path):
    assert len(path.read_text().splitlines()) <= 400

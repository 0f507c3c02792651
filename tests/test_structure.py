"""The house holds its floors: a module imports from its own floor or below."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "mcore_rl"

FLOORS = {  # the order of imports, from the ground up
    "__init__": 0,
    "errors": 0,
    "models": 0,  # the empty package itself
    "utils": 1,
    "platform": 2,
    "distributed": 3,
    "losses": 4,
    "config": 5,  # imports losses.options alone of the losses, and no torch
    "data": 6,
    "models.megatron": 7,
    "models.generation": 8,
    "models.policy": 9,
    "environments": 10,
    "run": 10,
    "rollouts": 11,
    "algorithms": 12,
    "simulation": 13,
    "report": 13,
    "testing": 13,
    "cli": 14,
    "__main__": 14,
}
STILL_UP = {  # arrows that later stages turn around; nothing may be added
    ("mcore_rl.models.generation.vllm_generation", "mcore_rl.run.directory"),
    ("mcore_rl.models.megatron.checkpoint.convert", "mcore_rl.run.identity"),
    ("mcore_rl.models.megatron.hf_config", "mcore_rl.run.preflight"),
    ("mcore_rl.models.megatron.peft_directory", "mcore_rl.run.identity"),
    ("mcore_rl.models.policy.precomputed_reference", "mcore_rl.run.identity"),
    ("mcore_rl.rollouts.collector", "mcore_rl.algorithms.advantages"),
    ("mcore_rl.run.setup", "mcore_rl.cli.dry_run"),
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
    above = [i for i in above if (name, i) not in STILL_UP]
    assert not above, f"{name} (floor {floor_of(name)}) imports from above: {above}"


@pytest.mark.parametrize(("name", "path"), modules())
def test_megatron_is_imported_in_one_place(name, path):
    if not name.startswith("mcore_rl.models.megatron"):
        assert not [i for i in imported(path) if i.split(".")[0] == "megatron"]


@pytest.mark.parametrize(("name", "path"), modules())
def test_the_platform_alone_asks_for_the_device(name, path):
    """`torch.cuda`, however it is written: an attribute, or imported."""
    if name in ("mcore_rl.platform", "mcore_rl.platform.cuda_stand_ins"):
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
    "rollouts.samples",
    "data.records",
    "distributed.own_rows",
    "testing.layout_check",
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
    assert len(path.read_text().splitlines()) <= 800

"""Compare the signatures of the stand-in with the sources of Transformer Engine.

    python tests/support/check_te_signatures.py [2.9.0 2.14.1 …]

Without arguments: the oldest and the newest version that the package supports, and those between at which Megatron
changes its calls.

The script downloads each version's wheel from the package registry to a temporary directory and parses its files. With
the first version every function must be equal: names, order, kinds and defaults of the parameters. Of later versions,
every parameter of the stand-in must exist with the same default (a required one may have got a default), and no other
parameter may be required. The stand-in has later forms of some functions below `if since(…)`. Exit status 1: a
difference.
"""

import ast
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

STAND_IN = Path(__file__).parent / "te_stand_in"
NOT_COMPARED = ("jax", "ops", "debug", "onnx_extensions.py", "transformer.py", "cpu_offload_v1.py")
FUNCTIONS = {"fp8_autocast", "checkpoint", "get_dummy_wgrad", "get_cpu_offload_context", "apply_rotary_pos_emb"}
FUNCTIONS |= {"fused_topk_with_score_function", "fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss"}
METHODS = {
    **dict.fromkeys(("Linear", "LayerNormLinear", "GroupedLinear"), ("__init__", "forward")),
    **dict.fromkeys(("LayerNorm", "RMSNorm", "FusedSGD"), ("__init__",)),
    **dict.fromkeys(("Fp8Padding", "Fp8Unpadding"), ("__init__", "forward")),
    "TransformerEngineBaseModule": ("set_activation_dtype",),
    "DotProductAttention": ("__init__", "forward", "set_context_parallel_group"),
    "FusedAdam": ("__init__", "step", "state_dict"),
    "CudaRNGStatesTracker": ("__init__", "reset", "get_states", "set_states", "add", "fork"),
}


NAMES = {
    "common/recipe/__init__.py": ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad", "power_2_scale"),
    "pytorch/module/base.py": ("_fp8_workspaces", "get_extra_state", "set_extra_state"),
}
"""Names that this package itself reads or replaces for FP8, by file."""

VERSIONS = ("2.9.0", "2.10.0", "2.11.0", "2.13.0", "2.14.1", "2.17.1", "2.20.2")


def definitions(body, version):
    """Yield the functions and classes of a module, with those below `if since(…)` if `version` is as late."""
    for node in body:
        if isinstance(node, ast.If) and ast.unparse(node.test).startswith("since("):
            since = ast.literal_eval(ast.unparse(node.test).removeprefix("since"))
            if version >= since:
                yield from node.body
        else:
            yield node


def signatures(root, version=(2, 9)):
    """Return the parameters (name, kind, default) of each compared function below a folder with the package."""
    found = {}
    for path in sorted((root / "transformer_engine" / "pytorch").rglob("*.py")):
        if {*path.relative_to(root).parts} & {*NOT_COMPARED}:
            continue
        for node in definitions(ast.parse(path.read_text()).body, version):
            if isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS:
                found[node.name] = parameters(node.args)
            if isinstance(node, ast.ClassDef) and node.name in METHODS:
                methods = (x for x in node.body if isinstance(x, ast.FunctionDef) and x.name in METHODS[node.name])
                found |= {f"{node.name}.{method.name}": parameters(method.args) for method in methods}
    return found


def parameters(arguments):
    positional = arguments.posonlyargs + arguments.args
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    pairs = [(x.arg, "positional", default) for x, default in zip(positional, defaults, strict=True)]
    pairs += [(x.arg, "keyword", d) for x, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    named = [(name, kind, "required" if default is None else ast.unparse(default)) for name, kind, default in pairs]
    rest = ((arguments.vararg, "*"), (arguments.kwarg, "**"))
    return named + [(x.arg, kind, "") for x, kind in rest if x is not None]


def differences(version, directory, equal):
    """Yield a line for each difference between the stand-in and a version of Transformer Engine."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", directory]
    subprocess.run([*command, f"transformer_engine=={version}"], check=True, timeout=300)
    (wheel,) = Path(directory).glob(f"transformer_engine-{version}-*.whl")
    real = Path(directory) / version
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(real)
    for file, names in NAMES.items():
        text = (real / "transformer_engine" / file).read_text()
        yield from (f"{version}: {file} lacks {name}" for name in names if name not in text)
    theirs = signatures(real)
    for name, own in signatures(STAND_IN, tuple(map(int, version.split(".")[:2]))).items():
        if name not in theirs:
            yield f"{version}: {name} does not exist"
        elif equal and own != theirs[name]:
            yield f"{version}: {name} differs: {sorted({*own} ^ {*theirs[name]})}"
        elif gone := [parameter for parameter in own if not accepts(theirs[name], *parameter)]:
            yield f"{version}: {name} lacks {gone}"
        elif new := [p for p in theirs[name] if p[2] == "required" and p not in own]:
            yield f"{version}: {name} requires {new}"


def accepts(theirs, name, kind, default):
    """Return whether `theirs` has the parameter; in place of a required one, one with a default will do."""
    return (name, kind, default) in theirs or (default == "required" and (name, kind) in {x[:2] for x in theirs})


def main(versions):
    found, count = [], len(signatures(STAND_IN))
    with tempfile.TemporaryDirectory() as directory:
        for index, version in enumerate(versions):
            found += differences(version, directory, equal=index == 0)
    print("\n".join([*found, f"{count} functions compared with {', '.join(versions)}"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or VERSIONS))

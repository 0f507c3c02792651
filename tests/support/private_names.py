"""Which private names of Megatron's classes the package's subclasses use or replace."""

import ast
import functools
import importlib
import importlib.util
import inspect
import pkgutil
import textwrap

EXCEPTIONS = {
    # The gate of attention's output, as in Qwen3.5. Megatron compiles its own method, which costs seconds at the start.
    ("PackSelfAttention", "_apply_output_gate"),
    # The loss applies the LM head, in chunks. Megatron has no option that leaves the head out of the model's forward.
    ("HiddenStateGPTModel", "_postprocess"),
    # Megatron copies counts of tokens to the host there. The class adds the number of choices to the same copy.
    ("Dispatcher", "_maybe_dtoh_and_synchronize"),
    ("Dispatcher", "_maybe_update_cuda_sync_point"),
}
"""Pairs of one of this package's classes and a private name of Megatron that it uses, each with the reason."""

TE_EXCEPTIONS = {
    # Megatron's wrapper of grouped experts unpickles the FP8 state of a checkpoint there, and fails if it is empty.
    ("TEGroupedLinearMixin", "_decode_extra_state"),
    ("TEGroupedLinearMixin", "_split_extra_state"),
}
"""Further pairs, of layers that consist of Transformer Engine's modules."""


OTHERS = ("megatron", "transformer_engine")


def private_names_of_megatron(has_transformer_engine):
    """Return (class, name) for each private name that a class of `models.megatron` shares with its Megatron bases."""
    import mcore_rl.models.megatron as package

    found = set()
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if module.name.endswith(".te_layers") and not has_transformer_engine:
            continue
        if ".triton_" in module.name and importlib.util.find_spec("triton") is None:
            continue
        for cls in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(cls) and cls.__module__ == module.name:
                bases = {base: base.__module__.split(".")[0] for base in cls.__mro__}
                theirs = [_names_of(base) for base, origin in bases.items() if origin in OTHERS]
                for base in (base for base, origin in bases.items() if origin == "mcore_rl"):
                    found |= {(base.__name__, name) for name in _names_of(base) & set().union(*theirs)}
    return found


@functools.cache
def _names_of(cls):
    names = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls)))):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls", "super()"):
            names.add(node.attr)
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
    return {name for name in names if name.startswith("_") and not name.startswith("__")}

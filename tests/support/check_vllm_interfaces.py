"""Compare what this package uses of vLLM between versions, by their sources.

    python tests/support/check_vllm_interfaces.py [0.32.0 0.33.0]

The script downloads each version's wheel from the package registry to a temporary directory (300 MB each) and parses
its files; vLLM is not installed. The first version is the one that `make test-vllm` runs. Of a later version, every
route, field and method must exist with the same parameters. Exit status 1: a difference.
"""

import ast
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROUTES = {
    "/init_weight_transfer_engine", "/start_weight_update", "/update_weights",
    "/finish_weight_update", "/pause", "/resume", "/sleep", "/wake_up", "/get_world_size", "/health", "/v1/models",
    "/server_info",
}  # fmt: skip
"""Routes of vLLM that `VLLMServer` and `VLLMGeneration` call."""

FIELDS = {
    "vllm/entrypoints/scale_out/token_in_token_out/protocol.py": {
        "GenerateRequest": (
            "token_ids", "sampling_params", "content_parts", "return_token_ids", "output_mode", "stream",
            "_response_mm_placeholders",
        ),
        "PlaceholderRangeInfo": ("offset", "length"),
    },
    "vllm/outputs.py": {
        "CompletionOutput": (
            "token_ids", "logprobs", "routed_experts", "finish_reason", "sampling_mask", "weight_versions",
        ),
        "SamplingMask": ("token_ids",),
        "WeightVersionSpan": ("version", "start", "end"),
    },
    "vllm/logprobs.py": {"FlatLogprobs": ("start_indices", "end_indices", "token_ids", "logprobs")},
    "vllm/sampling_params.py": {
        "SamplingParams": (
            "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "logprobs", "ignore_eos", "stop_token_ids",
            "detokenize", "stop", "include_stop_str_in_output", "skip_special_tokens", "logit_bias",
            "n", "flat_logprobs",
        ),
    },
}  # fmt: skip
"""Fields of requests and answers, by file and class."""

METHODS = {
    "vllm/distributed/weight_transfer/base.py": {
        "WeightTransferEngine": (
            "__init__", "init_transfer_engine", "start_weight_update", "receive_weights", "finish_weight_update",
            "shutdown",
        ),
    },
    "vllm/entrypoints/scale_out/token_in_token_out/serving.py": {
        "ServingTokens": ("serve_tokens", "serve_tokens_full_generator"),
    },
    "vllm/distributed/weight_transfer/factory.py": {"WeightTransferEngineFactory": ("register_engine",)},
}  # fmt: skip
"""Methods that the plugin and the route of packed answers call or override."""

FUNCTIONS = {
    "vllm/model_executor/model_loader/reload/layerwise.py": (
        "_place_kernel_tensors", "get_layerwise_info", "make_online_process_loader", "initialize_layerwise_reload",
        "finalize_layerwise_reload",
    ),
    "vllm/model_executor/model_loader/weight_utils.py": ("default_weight_loader",),
    "vllm/entrypoints/serve/utils/api_utils.py": ("load_aware_call", "validate_json_request", "with_cancellation"),
}  # fmt: skip

READ = {"serve_tokens_full_generator": 4}
"""Numbers of parameters that overriding methods of this package read; they accept any others."""
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def parameters(method):
    read = READ.get(method.name)
    return ast.unparse(method.args) if read is None else ", ".join(ast.unparse(arg) for arg in method.args.args[:read])


def interfaces(root):
    """Return what is used of the version below `root`: the parameters or the type of each name; True for a route."""
    found = {}
    for path in (root / "vllm" / "entrypoints").rglob("*.py"):
        text = path.read_text()
        found |= {f"route {route}": True for route in ROUTES if f'"{route}"' in text}
    for file, classes in FIELDS.items():
        for node in ast.parse((root / file).read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name in classes:
                typed = (field for field in node.body if isinstance(field, ast.AnnAssign))
                types = {ast.unparse(field.target): ast.unparse(field.annotation) for field in typed}
                found |= {f"{node.name}.{name}": types[name] for name in classes[node.name] if name in types}
    for file, classes in METHODS.items():
        for node in ast.parse((root / file).read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name in classes:
                methods = (one for one in node.body if isinstance(one, FUNCTION))
                found |= {
                    f"{node.name}.{one.name}": parameters(one) for one in methods if one.name in classes[node.name]
                }
    for file, names in FUNCTIONS.items():
        functions = (one for one in ast.parse((root / file).read_text()).body if isinstance(one, FUNCTION))
        found |= {one.name: ast.unparse(one.args) for one in functions if one.name in names}
    return found


def wanted():
    """Return all names that `interfaces` must find."""
    classes = [pair for group in (FIELDS, METHODS) for of_file in group.values() for pair in of_file.items()]
    members = {f"{name}.{member}" for name, of_class in classes for member in of_class}
    return members | {f"route {route}" for route in ROUTES} | {name for names in FUNCTIONS.values() for name in names}


def unpacked(version, directory):
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", directory]
    subprocess.run([*command, "--only-binary=:all:", f"vllm=={version}"], check=True, timeout=900)
    (wheel,) = Path(directory).glob(f"vllm-{version}-*.whl")
    root = Path(directory) / version
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(root, [name for name in archive.namelist() if name.endswith(".py")])
    wheel.unlink()
    return root


def main(versions):
    lines = []
    with tempfile.TemporaryDirectory() as directory:
        first, *others = (interfaces(unpacked(version, directory)) for version in versions)
    lines += [f"{versions[0]}: {name} does not exist" for name in sorted(wanted() - first.keys())]
    for version, other in zip(versions[1:], others, strict=True):
        lines += [f"{version}: {name} does not exist" for name in sorted(first.keys() - other.keys())]
        changed = (name for name in sorted(first.keys() & other.keys()) if first[name] != other[name])
        lines += [f"{version}: {name} was {first[name]} and is {other[name]}" for name in changed]
    print("\n".join([*lines, f"{len(wanted())} names compared between {', '.join(versions)}"]))
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["0.32.0", "0.33.0"]))

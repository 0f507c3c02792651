"""Reading of checkpoints that Megatron-LM or Megatron-Bridge wrote: their common state, and checks that they fit.

Their common state contains objects of classes that the installed Megatron may not have, and that this package does not
need. It is unpickled without these classes, so no code of the checkpoint runs.
"""

from __future__ import annotations

import argparse
import pickle
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import torch
import yaml
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from mcore_rl.errors import UserError
from mcore_rl.models.megatron.attention.attention import GroupedQueryAttention
from mcore_rl.models.megatron.checkpoint.names import OTHER_NAME
from mcore_rl.models.megatron.checkpoint.state import RESHARDABLE
from mcore_rl.models.megatron.families import Family
from mcore_rl.models.megatron.families.mixtures import Mixture
from mcore_rl.models.megatron.layers.transformer_layer import rope_parameters
from mcore_rl.utils.shard_process import RUN_CONFIG_FILE

BUCKETS = {
    "dp_reshardable": "flat buckets of one data-parallel layout",
    "dp_zero_gather_scatter": "flat buckets, gathered on one rank",
    "fully_sharded_bucket_space": "flat buckets of one parallel layout",
    "fsdp_dtensor": "DTensors of Megatron-FSDP",
}
"""Formats of Megatron's distributed optimizer that only the program and layout that wrote them can read."""

# Classes and functions with which torch rebuilds tensors, and plain containers.
HARMLESS = {
    "torch._utils": {"_rebuild_tensor", "_rebuild_tensor_v2"},
    "torch": {"Size", "device"},
    "collections": {"OrderedDict"},
    "builtins": {"set", "frozenset", "complex", "bytearray"},
    "argparse": {"Namespace"},
}


class Unread:
    """Takes the place of an object in a checkpoint whose class or function is not called."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __reduce__(self) -> Any:
        return Unread, ()


class _InertUnpickler(pickle.Unpickler):
    """Unpickler that calls only what rebuilds tensors and plain containers; other objects become `Unread`."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name in HARMLESS.get(module, ()) or is_dtype:
            return super().find_class(module, name)
        return type(name, (Unread,), {})


def read_inert(file: BinaryIO | Path) -> Any:
    """Return the content of a file that `torch.save` wrote, without running any code that the file names.

    Raises:
        UserError: the file is not of this format.
    """
    module = SimpleNamespace(Unpickler=_InertUnpickler, load=_load, __name__="inert")
    try:
        return torch.load(file, map_location="cpu", pickle_module=module, weights_only=False)
    except (OSError, RuntimeError, EOFError, ValueError, TypeError, AttributeError, pickle.UnpicklingError) as error:
        raise UserError(f"{file}: cannot be read as a checkpoint's common state: {error}") from None


def _load(file: BinaryIO, **options: Any) -> Any:
    return _InertUnpickler(file, **options).load()


def optimizer_format(common: Mapping[str, Any]) -> str | None:
    """Return the name of the format of a checkpoint's optimizer state; None if the checkpoint does not say."""
    for described in (common.get("content_metadata"), common.get("optimizer")):
        if isinstance(described, Mapping):
            for key in ("distrib_optim_sharding_type", "param_state_sharding_type"):
                if isinstance(described.get(key), str):
                    return str(described[key])
    return None


def unreadable_optimizer(common: Mapping[str, Any], index: Metadata) -> str | None:
    """Return why the optimizer state of a checkpoint cannot be read, and what to do; None if it can be, or has none."""
    if not any(key.startswith(("optimizer.", "chained_")) for key in index.state_dict_metadata):
        return None
    form = optimizer_format(common)
    if form in RESHARDABLE and any(key.startswith("optimizer.state.exp_avg.") for key in index.state_dict_metadata):
        return None
    what = BUCKETS.get(str(form), "a format that this package does not know")
    return (
        f"its format {form} is {what}; save it with --dist-ckpt-optim-fully-reshardable in Megatron-LM, or with "
        "checkpoint.dist_ckpt_optim_fully_reshardable=true in Megatron-Bridge"
    )


def check_fits(iteration: Path, index: Metadata, common: Mapping[str, Any], family: Family, wanted: set[str]) -> None:
    """Check that a checkpoint of another program has exactly the model's weights, and was computed with like options.

    The shapes of weights are checked when the weights are read.

    Args:
        common: the checkpoint's common state.
        wanted: names of all tensors that the model stores, stacked or per layer.

    Raises:
        UserError: the model has another number of layers, the checkpoint has weights that the model lacks, or an
            argument that changes the computation is not the model's.
    """
    known = {OTHER_NAME.get(name, name) for name in map(_within_layer, wanted)} | set(map(_within_layer, wanted))
    layers = set[int]()
    for name, entry in index.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata) or name.startswith(("optimizer.", "chained_")):
            continue
        if name.startswith("decoder.layers."):
            number = re.match(r"decoder\.layers\.(\d+)\.", name)
            layers.add(int(number[1]) + 1 if number else int(entry.size[0]))
        if _within_layer(name) not in known:
            raise UserError(
                f"{iteration} does not fit the model: the checkpoint has the tensor {name}, which a model with this "
                "config.json does not have"
            )
    if layers and max(layers) != family.num_layers:
        raise UserError(
            f"{iteration} has another architecture than the model: num_hidden_layers is {max(layers)} in the "
            f"checkpoint, {family.num_layers} in the model"
        )
    options = stored_options(iteration, common)
    for name, expected in _expected_options(family):
        found = options.get(name, expected)
        is_number = isinstance(found, int | float) and isinstance(expected, int | float)
        if found is not None and (not is_number or abs(found - expected) > 1e-3 * abs(expected)):
            raise UserError(
                f"{iteration} has another architecture than the model: {name} is {found} in the checkpoint; the "
                f"model's config.json means {expected}"
            )


def _within_layer(name: str) -> str:
    return re.sub(r"^decoder\.layers\.(\d+\.)?", "", name)


def stored_options(iteration: Path, common: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the model that a checkpoint records: Megatron-LM's arguments, or Bridge's run_config.yaml.

    Return {} if it records none.
    """
    arguments = common.get("args")
    if isinstance(arguments, argparse.Namespace):
        options = vars(arguments)
        if not options.get("group_query_attention", True):  # the number of groups is then not used
            options = {**options, "num_query_groups": options.get("num_attention_heads")}
        return options
    try:
        model = yaml.safe_load((iteration / RUN_CONFIG_FILE).read_text())["model"]
        return dict(model)
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError):
        return {}


def _expected_options(family: Family) -> Iterator[tuple[str, Any]]:
    """Yield the options that the shapes of weights do not show, with the model's values."""
    fields = family.megatron_fields()
    yield "num_attention_heads", fields["num_attention_heads"]
    for name in ("layernorm_epsilon", "norm_epsilon"):
        yield name, fields["layernorm_epsilon"]
    if isinstance(family, Mixture):
        yield "moe_router_topk", family.experts.topk
    mixers = [family.token_mixer(layer) for layer in range(family.num_layers)]
    if all(type(mixer) is GroupedQueryAttention for mixer in mixers) and len(family.ropes()) == 1:
        yield "num_query_groups", fields["num_query_groups"]
        yield "rotary_interleaved", False  # the weights of pairs that are neighbours would be in another order
        rope = rope_parameters(family.hf)
        yield "rotary_base", rope["rope_theta"]
        yield "rotary_percent", rope["partial_rotary_factor"]

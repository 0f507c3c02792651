"""Names that a weight has in Megatron's distributed checkpoints, which depend on the program and layers that write it.

Megatron stacks the layers of the decoder in one tensor, or stores each layer separately if the layers differ or
`--moe-layer-freq` is a list. Transformer Engine's layers fuse some norms into the linear layer that follows, and the
weight of such a norm has a name of this linear layer. Megatron's local layers have separate norms; for most layers,
Megatron gives them the fused names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mcore_rl.models.megatron.checkpoint.state import Region
from mcore_rl.models.megatron.weight_mapping import Shape

SAME_WEIGHT = (
    ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    ("self_attention.linear_q_up_proj.layer_norm_weight", "self_attention.q_layernorm.weight"),
    ("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attention.kv_layernorm.weight"),
)
"""Pairs of names of one norm's weight in a layer: fused into a linear layer, and separate."""
OTHER_NAME = {name: other for pair in SAME_WEIGHT for name, other in (pair, pair[::-1])}

OF_LAYER = re.compile(
    r"(?P<before>(?:(?:chained_\d\.)?optimizer\.state\.\w+\.)?decoder\.layers\.)(?:(?P<layer>\d+)\.)?(?P<rest>.*)"
)
CHAINED = ("chained_0.", "chained_1.")
"""Prefixes that earlier versions of Megatron give to the two optimizers of a mixture of experts."""

STATEFUL = re.compile(
    r"(?P<module>decoder\.(?:final_layernorm|layers\.(?:(?P<layer>\d+)\.)?(?:input_layernorm|pre_mlp_layernorm"
    r"|self_attention\.(?:[qk]_layernorm|kv_layernorm|linear_(?:q|kv)_(?:down|up)_proj))))\.weight"
)
"""Weights of modules that have a state in Transformer Engine (`_extra_state`), and none in Megatron's local layers."""


def other_name(key: str) -> str | None:
    """Return the other name of the weight `key`, in the same place of the model; None if it has only one."""
    match = OF_LAYER.fullmatch(key)
    if match is None or (other := OTHER_NAME.get(match["rest"])) is None:
        return None
    return f"{match['before']}{match['layer']}.{other}" if match["layer"] else f"{match['before']}{other}"


def located(region: Region, stored: Mapping[str, object]) -> Region:
    """Return `region` under the name and with the dimensions that it has in a checkpoint.

    The result shares the memory of `region`. If no known name is in the checkpoint, `region` is returned.

    Args:
        stored: entries of the checkpoint's index by name.
    """
    prefixes = ("", *CHAINED) if region.key.startswith("optimizer.") else ("",)
    for prefix in prefixes:
        found = _located(replace(region, key=prefix + region.key), stored)
        if found.key in stored:
            return found
    return region


def _located(region: Region, stored: Mapping[str, object]) -> Region:
    if region.key in stored or (match := OF_LAYER.fullmatch(region.key)) is None:
        return region
    before, layer, rest = match["before"], match["layer"], match["rest"]
    for name in (rest, *filter(None, [OTHER_NAME.get(rest)])):
        same = f"{before}{layer}.{name}" if layer else f"{before}{name}"
        if same in stored:
            return replace(region, key=same)
        if layer is not None and (key := f"{before}{name}") in stored:
            entry = stored[key]
            layers = entry.size[0] if isinstance(entry, TensorStorageMetadata) else 0
            return _changed(region, key, (int(layer), *region.offsets), region.values[None], (layers,))
        if layer is None and region.offsets and (key := f"{before}{region.offsets[0]}.{name}") in stored:
            assert region.values.shape[0] == 1, f"{region.key}: a region of one layer"
            return _changed(region, key, region.offsets[1:], region.values[0], None)
    return region


def _changed(region: Region, key: str, offsets: Shape, values: Tensor, layers: Shape | None) -> Region:
    whole = region.whole
    if whole is not None:
        whole = whole[1:] if layers is None else (*layers, *whole)
    return replace(region, key=key, offsets=offsets, values=values, whole=whole)


def aliases(stored: Iterable[str]) -> dict[str, str]:
    """Return further names under which Megatron-LM and Megatron-Bridge look for entries of a checkpoint.

    An index can name the same bytes twice, so a checkpoint that has these names loads into Megatron's local layers and
    into Transformer Engine's. The names are those of norms, of their optimizer state, and of the states that
    Transformer Engine's modules have, which are empty.

    Args:
        stored: names of all entries of the checkpoint.

    Returns:
        Map from each further name to the name of the entry that has its content.
    """
    names = set(stored)
    found: dict[str, str] = {}
    for key in sorted(names):
        if (other := other_name(key)) is None or other in names:
            continue
        # A norm of the queries has the name of the latent queries' norm.
        is_latent = f"{key.partition('self_attention.')[0]}self_attention.linear_q_up_proj.weight" in names
        if is_latent or not key.endswith(SAME_WEIGHT[2]):
            found[other] = key
    return found | dict(_states(sorted({*names, *found})))


def _states(names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the names of empty states that are missing, each with an existing state of the same layer."""
    known = set(names)
    empty = [name for name in names if "self_attention.linear_proj._extra_state/" in name]
    stacked = [name for name in empty if name.startswith("decoder.layers.self_attention.")]
    for key in names:
        if (match := STATEFUL.fullmatch(key)) is None or not empty:
            continue
        if match["module"] == "decoder.final_layernorm":
            pairs = [(f"{match['module']}._extra_state/shard_0_1", empty[0])]
        elif match["layer"] is not None:
            own = f"decoder.layers.{match['layer']}.self_attention.linear_proj._extra_state/shard_0_1"
            pairs = [(f"{match['module']}._extra_state/shard_0_1", own)] if own in known else []
        else:
            pairs = [(f"{match['module']}._extra_state/{name.rpartition('/')[2]}", name) for name in stacked]
        yield from ((name, own) for name, own in pairs if name not in known)

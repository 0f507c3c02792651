"""Hugging Face model directories: reads slices of safetensors files; writes sharded files and verifies them.

Directories of the same model may name tensors differently. Families name them as published directories do, and
transformers may write others; DeepSeek-V4's names are those of transformers' modules, which neither has.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mcore_rl.errors import UserError
from mcore_rl.models.megatron.families import Family, family_of, has_reward_head
from mcore_rl.models.megatron.families.base import MTP_DEPTH
from mcore_rl.utils.files import replacing
from mcore_rl.utils.model_directory import INDEX_FILE, SINGLE_FILE, copy_companions, name_padding, read_index

MAX_SHARD_BYTES = 4 * 1024**3

FP8_SCALE = "_scale_inv"
"""Ending of the names of the scales of FP8 tensors, one for each block (DeepSeek-V3)."""
MXFP4_BLOCKS, MXFP4_SCALES = "_blocks", "_scales"
"""Endings of the names of the two parts of an MXFP4 tensor (gpt-oss)."""
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of FP4 (e2m1) without their sign. The sign is the highest of the four bits."""


def check_quantization(config: dict[str, Any] | None, path: Path) -> None:
    """Raise an error for a quantization that `SafetensorsDirectory` cannot decode.

    Args:
        config: `quantization_config` of a `config.json`; None if there is none.

    Raises:
        UserError: the message names the quantization method.
    """
    if config is None:
        return
    method = config.get("quant_method")
    is_block_scaled = (
        method == "fp8" and config.get("fmt", "e4m3").endswith(("e4m3", "e4m3fn")) and config.get("weight_block_size")
    )
    if not is_block_scaled and method != "mxfp4":
        raise UserError(
            f"model.path: {path} is quantized by {method!r}, which is not supported. Supported are FP8 with a scale "
            "for each block, and MXFP4. Use a copy of the model in bfloat16"
        )


@dataclass(frozen=True)
class ExpertPart:
    """Location of an expert's weight in a tensor that contains the weights of all experts of a layer.

    The weight is `tensor[expert, rows]` of the tensor called `packed`, or the transpose of `tensor[expert, :, rows]`.
    """

    packed: str
    expert: int
    rows: slice
    is_transposed: bool = False

    def of(self, tensor: Any, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """Return `rows` and `columns` of the weight, where `tensor` is the tensor of all experts, or reads it."""
        start, stop, _ = rows.indices(self.rows.stop - self.rows.start)
        own, expert = slice(self.rows.start + start, self.rows.start + stop), slice(self.expert, self.expert + 1)
        found: Tensor = tensor[expert, columns, own][0].T if self.is_transposed else tensor[expert, own, columns][0]
        return found


class SafetensorsDirectory:
    """Reads tensors of a model directory by name and slice. Quantized tensors are decoded to bfloat16.

    In some directories one tensor contains the weights of all experts of a layer: `experts.gate_up_proj` [experts,
    2 · width, hidden] and `experts.down_proj` [experts, hidden, width], without biases; or both with the last two
    dimensions exchanged (Qwen3-VL). This class offers them under the names of separate weights, such as
    `experts.0.gate_proj.weight`. Tensors whose names differ between directories have the names of the family here
    (`name_in_family`). `packed_like` undoes both.

    Raises:
        UserError: there is no safetensors file, or the index names a file that is missing or outside the directory, or
            that is another one than the `model.safetensors` beside the index, which transformers would read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: dict[str, Any] = {}
        self.file_of = self._locate()
        names = {name_in_family(name): name for name in self.file_of}
        self.stored_name = {name: stored for name, stored in names.items() if name != stored}

    def _locate(self) -> dict[str, str]:
        weight_map = read_index(self.path / INDEX_FILE) if (self.path / INDEX_FILE).is_file() else {}
        if (self.path / SINGLE_FILE).is_file():
            if others := sorted(set(weight_map.values()) - {SINGLE_FILE}):
                raise UserError(
                    f"model.path: {self.path} has two sets of weights: {SINGLE_FILE}, which transformers reads, and "
                    f"{INDEX_FILE}, which names {others[0]}; remove the one that does not belong to the model"
                )
            weight_map = dict.fromkeys(self._opened(SINGLE_FILE).keys(), SINGLE_FILE)
        elif not weight_map:
            pickles = sorted(p.name for p in self.path.glob("*.bin")) + sorted(p.name for p in self.path.glob("*.pt"))
            found = (
                f"found only pickle files ({', '.join(pickles)}), which are never loaded" if pickles else "found none"
            )
            raise UserError(f"model.path: {self.path} must hold its weights as safetensors; {found}")
        for name in set(weight_map.values()):
            if Path(name).name != name:
                raise UserError(f"{self.path / INDEX_FILE}: {name!r} must be the name of a file in the same directory")
            if not (self.path / name).is_file():
                raise UserError(f"{self.path}: the file {name}, which {INDEX_FILE} names, is missing")
        return weight_map

    @cached_property
    def of_experts(self) -> dict[str, ExpertPart]:
        """Map from the name of a single expert's weight to the weight's location in a tensor of all experts."""
        parts: dict[str, ExpertPart] = {}
        for name in sorted(self.file_of):
            layer, _, projection = name.rpartition(".experts.")
            up, down = f"{layer}.experts.gate_up_proj", f"{layer}.experts.down_proj"
            if projection != "gate_up_proj" or down not in self.file_of or f"{up}_bias" in self.file_of:
                continue
            of_up, of_down = (self._slice(packed).get_shape() for packed in (up, down))
            turned = of_up[1] == of_down[2] and of_up[2] == 2 * of_down[1]
            rows, outputs = (shape[2 if turned else 1] for shape in (of_up, of_down))
            for expert in range(of_up[0]):
                own = f"{layer}.experts.{expert}."
                parts[f"{own}gate_proj.weight"] = ExpertPart(up, expert, slice(0, rows // 2), turned)
                parts[f"{own}up_proj.weight"] = ExpertPart(up, expert, slice(rows // 2, rows), turned)
                parts[f"{own}down_proj.weight"] = ExpertPart(down, expert, slice(0, outputs), turned)
        return parts

    def names(self) -> set[str]:
        packed = {part.packed for part in self.of_experts.values()}
        stored = self.stored_names() - packed - set(self.stored_name.values())
        names = {name.removesuffix(MXFP4_BLOCKS) for name in stored} | set(self.of_experts) | set(self.stored_name)
        return {name for name in names if not name.endswith((FP8_SCALE, MXFP4_SCALES))}

    def stored_names(self) -> set[str]:
        """Return the names of the tensors as they are in the files."""
        return set(self.file_of)

    def shape(self, name: str) -> list[int]:
        if (part := self.of_experts.get(name)) is not None:
            columns = self._slice(part.packed).get_shape()[1 if part.is_transposed else 2]
            return [part.rows.stop - part.rows.start, columns]
        if name + MXFP4_BLOCKS in self.file_of:
            count, rows, groups, size = self._slice(name + MXFP4_BLOCKS).get_shape()
            return [count, groups * size * 2, rows]
        return list(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        if name + MXFP4_BLOCKS in self.file_of or name + FP8_SCALE in self.file_of:
            return torch.bfloat16
        part = self.of_experts.get(name)
        return self._slice(name if part is None else part.packed)[:0].dtype

    def read(self, name: str, rows: slice = slice(None), columns: slice | None = None) -> Tensor:
        """Read and return only `rows` and `columns` of the tensor `name`. If `columns` is None, read all columns."""
        if (part := self.of_experts.get(name)) is not None:
            return part.of(self._slice(part.packed), rows, columns or slice(None))
        if name + MXFP4_BLOCKS in self.file_of:
            blocks, scales = (self._slice(name + ending)[rows] for ending in (MXFP4_BLOCKS, MXFP4_SCALES))
            whole = decode_mxfp4(blocks, scales)
            return whole if columns is None else whole[:, columns]
        view = self._slice(name)
        tensor = view[rows] if columns is None else view[rows, columns]
        return self._scaled(name, tensor, rows, columns) if name + FP8_SCALE in self.file_of else tensor

    def _scaled(self, name: str, tensor: Tensor, rows: slice, columns: slice | None) -> Tensor:
        """Multiply a part of the FP8 tensor `name` by the scales of its blocks; return it in bfloat16.

        Args:
            tensor: the values of the part, which has these `rows` and `columns` (None: all columns).
        """
        assert self._block_size is not None, "`check` rejects such a tensor"
        scales = self._slice(name + FP8_SCALE)[:].float()
        for dimension, (part, size) in enumerate(zip((rows, columns or slice(None)), self._block_size, strict=True)):
            places = torch.arange(*part.indices(self.shape(name)[dimension])) // size
            scales = scales.index_select(dimension, places)
        return (tensor.float() * scales).bfloat16()

    @cached_property
    def _block_size(self) -> tuple[int, int] | None:
        config = json.loads((self.path / "config.json").read_bytes())
        size = (config.get("quantization_config") or {}).get("weight_block_size")
        return None if size is None else (size[0], size[1])

    def check(self, name: str) -> None:
        """Raise an error if the tensor `name` is quantized and cannot be decoded.

        Raises:
            UserError: the message names the tensor and what is missing or wrong.
        """
        if (problem := self._problem(name)) is not None:
            raise UserError(f"model.path: {self.path}: {name} {problem}; use a copy of the model in bfloat16")

    def _problem(self, name: str) -> str | None:
        if name + MXFP4_BLOCKS in self.file_of:
            return None if name + MXFP4_SCALES in self.file_of else f"has no {MXFP4_SCALES}"
        part = self.of_experts.get(name)
        view = self._slice(name if part is None else part.packed)
        if not view.get_dtype().startswith("F8"):
            return None
        if part is not None:
            return f"is a part of {part.packed}, which is in FP8; only experts in separate tensors are decoded"
        if name + FP8_SCALE not in self.file_of:
            return f"is in FP8 and has no {FP8_SCALE}"
        if self._block_size is None:
            return "is in FP8, and config.json has no quantization_config.weight_block_size"
        expected = [-(-n // size) for n, size in zip(view.get_shape(), self._block_size, strict=True)]
        found = list(self._slice(name + FP8_SCALE).get_shape())
        if found != expected:
            return f"has scales of shape {found}; with blocks of {list(self._block_size)} they must be {expected}"
        return None

    def _slice(self, name: str) -> Any:
        name = self.stored_name.get(name, name)
        try:
            return self._opened(self.file_of[name]).get_slice(name)
        except SafetensorError:
            raise UserError(
                f"{self.path / self.file_of[name]}: the tensor {name}, which {INDEX_FILE} lists, is missing"
            ) from None

    def _opened(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.path / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise UserError(f"{self.path / file}: is not a whole safetensors file ({error})") from None
        return self._open[file]


class WithoutWeights(SafetensorsDirectory):
    """A model directory with a configuration and a tokenizer, but without weights."""

    def _locate(self) -> dict[str, str]:
        return {}


def model_directory(path: Path) -> SafetensorsDirectory:
    """Return the tensors of a model directory; none if it has no file of weights, of any format."""
    patterns = (INDEX_FILE, "*.safetensors", "*.bin", "*.pt")
    return SafetensorsDirectory(path) if any(any(path.glob(p)) for p in patterns) else WithoutWeights(path)


def decode_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Decode MXFP4 (OCP Microscaling Formats 1.0): 32 numbers of 4 bits share a power of two as their scale.

    Args:
        blocks: [n, rows, groups, 16] bytes; each contains two numbers, the first in its lower half.
        scales: [n, rows, groups], exponents of the scales, plus 127.

    Returns:
        The numbers, [n, groups · 32, rows] in bfloat16. bfloat16 represents each number exactly.
    """
    signed = torch.tensor((*FP4_VALUES, *(-value for value in FP4_VALUES)))
    numbers = torch.stack((signed[(blocks & 15).int()], signed[(blocks >> 4).int()]), dim=-1).flatten(-2)
    return torch.ldexp(numbers, scales.int()[..., None] - 127).flatten(-2).bfloat16().mT


def in_precision(
    tensors: Iterable[tuple[str, Tensor]], source: SafetensorsDirectory, dtype: str = "auto"
) -> Iterator[tuple[str, Tensor]]:
    """Convert tensors to the precision `dtype`; if `dtype` is "auto", convert each to its precision in `source`.

    With "auto", a tensor that `source` lacks, such as a new reward head, gets the precision of the first tensor of
    `source`. If `source` has no tensors, all keep their precision.
    """
    names = source.names()
    if not names and dtype == "auto":
        yield from tensors
        return
    first = min(names, default="")
    for name, tensor in tensors:
        own = source.dtype(name if name in names else first) if dtype == "auto" else getattr(torch, dtype)
        yield name, tensor.to(own)


def packed_like(tensors: Iterable[tuple[str, Tensor]], source: SafetensorsDirectory) -> Iterator[tuple[str, Tensor]]:
    """Yield `tensors` in the form that they have in `source`: under the same names, and the weights of experts joined
    where it has one tensor for all experts of a layer.

    A joined tensor is yielded as soon as its last weight has come.
    """
    missing = Counter(part.packed for part in source.of_experts.values())
    begun: dict[str, Tensor] = {}
    for name, tensor in tensors:
        part = source.of_experts.get(name)
        if part is None:
            yield source.stored_name.get(name, name), tensor
            continue
        if part.packed not in begun:
            begun[part.packed] = tensor.new_empty(source.shape(part.packed))
        part.of(begun[part.packed]).copy_(tensor)
        missing[part.packed] -= 1
        if not missing[part.packed]:
            yield part.packed, begun.pop(part.packed)


class ShardedWriter:
    """Writes named tensors to numbered safetensors files of limited size, and an index."""

    def __init__(self, directory: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        self.directory = directory
        self.max_shard_bytes = max_shard_bytes
        self.pending: dict[str, Tensor] = {}
        self.shards: list[list[str]] = []
        self.total_bytes = 0
        self.expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if (
            self.pending
            and sum(t.numel() * t.element_size() for t in self.pending.values()) + size > self.max_shard_bytes
        ):
            self._flush()
        self.pending[name] = tensor.detach().cpu().contiguous()
        self.expected[name] = (tuple(tensor.shape), tensor.dtype)
        self.total_bytes += size

    def _flush(self) -> None:
        save_file(self.pending, self._part(len(self.shards)), metadata={"format": "pt"})
        self.shards.append(list(self.pending))
        self.pending = {}

    def _part(self, index: int) -> Path:
        return self.directory / f"part-{index:05d}.safetensors"

    def finish(self) -> None:
        """Write the remaining tensors and the index, give the files their final names, and read everything back."""
        self._flush()
        count = len(self.shards)
        weight_map = {}
        for index, names in enumerate(self.shards):
            file = SINGLE_FILE if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"
            self._part(index).rename(self.directory / file)
            weight_map.update(dict.fromkeys(names, file))
        index_json = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
        (self.directory / INDEX_FILE).write_text(json.dumps(index_json, indent=2, sort_keys=True) + "\n")
        self._check()

    def _check(self) -> None:
        written = SafetensorsDirectory(self.directory)
        if written.stored_names() != set(self.expected):
            raise RuntimeError(f"{self.directory}: the export lacks tensors, or has tensors that the model lacks")
        for name, (shape, dtype) in self.expected.items():
            found = written.read(name)
            if tuple(found.shape) != shape or found.dtype != dtype:
                raise RuntimeError(
                    f"{self.directory}: the exported {name} must be {dtype} of shape {shape}, but is "
                    f"{found.dtype} of shape {tuple(found.shape)}"
                )


def _repeated(source: SafetensorsDirectory, family: Family) -> dict[str, str]:
    """Return which tensors of a directory repeat the embedding or the LM head exactly, and which one."""
    found = family.repeated(source.names())
    return {name: own for name, own in found.items() if torch.equal(source.read(name), source.read(own))}


def _keeping(
    tensors: Iterable[tuple[str, Tensor]], names: Collection[str], kept: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield `tensors`, and store copies of those called `names` in `kept`."""
    for name, tensor in tensors:
        if name in names:
            kept[name] = tensor.clone()
        yield name, tensor


def write_hf_directory(
    tensors: Iterable[tuple[str, Tensor]],
    destination: Path,
    source: Path,
    hf_config: Any,
    is_writer: bool,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    chat_template: str | None = None,
) -> None:
    """Write a complete model directory: weights, config, and the other files of the model.

    Every rank must call this function, because all ranks produce `tensors` together; only the rank with `is_writer`
    writes. The directory gets its final name after it is complete and was read back. The directory contains a manifest
    of its files, so that a later export replaces only these files.

    Args:
        source: model directory. Its other files (`copy_companions`), and tensors that are no part of the text model,
            are copied from it.
        chat_template: chat template to write in place of the source's.

    Raises:
        DiskFullError: the disk has no space for the files.
        UserError: `destination` contains files that no export has written.
    """
    if not is_writer:
        for _ in tensors:
            pass
        return
    with replacing(destination) as directory:
        _write_files(tensors, directory, source, hf_config, max_shard_bytes, chat_template)


def _write_files(
    tensors: Iterable[tuple[str, Tensor]],
    directory: Path,
    source: Path,
    hf_config: Any,
    max_shard_bytes: int,
    chat_template: str | None,
) -> None:
    """Write the files of `write_hf_directory` into the empty `directory`."""
    writer = ShardedWriter(directory, max_shard_bytes)
    earlier, family = model_directory(source), family_of(hf_config)
    repeats = _repeated(earlier, family)
    kept = dict[str, Tensor]()
    passed_on = (
        (name, kept[repeats[name]] if name in repeats else earlier.read(name))
        for name in sorted(filter(family.copies, earlier.names()))
    )
    for name, tensor in packed_like(itertools.chain(_keeping(tensors, repeats.values(), kept), passed_on), earlier):
        writer.add(name, tensor)
    writer.finish()
    numbers: Counter[torch.dtype] = Counter()
    for shape, of_tensor in writer.expected.values():
        numbers[of_tensor] += math.prod(shape)
    dtype = max(numbers, key=numbers.__getitem__)  # a few tensors may have another precision
    config = type(hf_config).from_dict({k: v for k, v in hf_config.to_dict().items() if k != MTP_DEPTH})
    config.dtype = family_of(config).hf.dtype = dtype
    config.architectures = hf_config.architectures
    config.save_pretrained(directory)
    copy_companions(source, directory, chat_template)
    if has_reward_head(hf_config) and family.score_padding is not None:
        name_padding(directory, family.score_padding)


RENAMED = (
    (r"\.block_sparse_moe\.((gate|up|down)_proj\.weight)$", r".mlp.\1"),  # dense layers of Kimi Linear
    (r"\.hc_pre\.(hc_(?:attn|mlp)_layer)\.hc_(fn|base|scale)$", r".\1.hc_pre.hc_\2"),  # this and the next two: HY-4
    (r"\.hc_pre\.(hc_head\.hc_head_(?:fn|base|scale))$", r".\1"),
    (r"\.(mlp(?:\.shared_experts)?)\.linear_gate\.weight$", r".\1.gate_proj.weight"),
    (r"^head\.weight$", "lm_head.weight"),  # this and the others: DeepSeek-V4
    (r"^embed\.weight$", "model.embed_tokens.weight"),
    (r"^norm\.weight$", "model.norm.weight"),
    (r"^hc_head_(fn|base|scale)$", r"model.hc_head.hc_\1"),
    (r"^(?:model\.)?(layers\.\d+)\.hc_(attn|ffn)_(fn|base|scale)$", r"model.\1.\2_hc.\3"),
    (r"^(?:model\.)?(layers\.\d+)\.attn_norm\.", r"model.\1.input_layernorm."),
    (r"^(?:model\.)?(layers\.\d+)\.ffn_norm\.", r"model.\1.post_attention_layernorm."),
)
"""Pairs of a pattern of names in some directories, and the name in the family."""
_IN_BLOCK = re.compile(r"^(?:model\.)?(layers\.\d+)\.(attn|ffn)\.(.*)$")
IN_ATTENTION = (
    (r"^indexer\.weights_proj\.", "compressor.indexer.scorer.weights_proj."),
    (r"^indexer\.wq_b\.", "compressor.indexer.q_b_proj."),
    (r"^indexer\.compressor\.", "compressor.indexer."),
    (r"^attn_sink$", "sinks"),
    (r"\bape$", "position_bias"),
    (r"\bq_norm\.", "q_a_norm."),
    (r"\bnorm\.", "kv_norm."),
    (r"\bwgate\.", "gate_proj."),
    (r"\bwkv\.", "kv_proj."),
    (r"\bw(q_a|q_b|o_a|o_b)\.", r"\1_proj."),
)
IN_MLP = (
    (r"^gate\.bias$", "gate.e_score_correction_bias"),
    (r"\bw1\.", "gate_proj."),
    (r"\bw2\.", "down_proj."),
    (r"\bw3\.", "up_proj."),
)


def name_in_family(name: str) -> str:
    """Return the name that a family uses for the tensor that a directory calls `name`."""
    for pattern, new in RENAMED:
        name = re.sub(pattern, new, name)
    if (match := _IN_BLOCK.match(name)) is None:
        return name
    layer, block, rest = match.groups()
    for pattern, new in IN_ATTENTION if block == "attn" else IN_MLP:
        rest = re.sub(pattern, new, rest)
    return f"model.{layer}.{'self_attn' if block == 'attn' else 'mlp'}.{rest}"

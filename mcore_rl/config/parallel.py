"""The parallel layout: the section `parallel`, the layers of pipeline stages, and layouts as text (`tp2 cp2 sp`)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeVar

from pydantic import model_validator

from mcore_rl.config.base import Name, PositiveInt, Section
from mcore_rl.errors import UserError

Config = TypeVar("Config", bound=Section)


EMBEDDING, LAYER, LOSS = "E", "t", "L"
LONGEST_LAYOUT = 10_000
"""Maximum length of a layout string after its repetitions are written out."""
_TERM = re.compile(r"\((?P<group>[^()]+)\)\*(?P<times>\d{1,4})|(?P<one>[EtL|])(?:\*(?P<count>\d{1,4}))?")


class PipelineConfig(Section):
    """Pipeline part of the parallel layout."""

    pipeline_model_parallel_size: PositiveInt = 1
    """Number of pipeline stages."""
    virtual_pipeline_model_parallel_size: PositiveInt | None = None
    """Number of model chunks (virtual stages) on each pipeline stage; their passes are interleaved. The default follows
    from pipeline_model_parallel_layout, or is 1."""
    num_layers_in_first_pipeline_stage: PositiveInt | None = None
    """Layers of the first stage, which also has the embedding; the default is an even share."""
    num_layers_in_last_pipeline_stage: PositiveInt | None = None
    """Layers of the last stage, which also has the LM head; the default is an even share. The other stages share the
    remaining layers evenly."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer in an even split, so that its chunk has one layer less."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the LM head as a layer in an even split, so that its chunk has one layer less."""
    pipeline_model_parallel_layout: Name | None = None
    """Layers of each stage in Megatron's notation, instead of the four keys above: `E` is the embedding, `t` a layer,
    `L` the LM head, `|` separates stages, `*3` repeats (`Et*3|(tt|)*2tL`). If the string has more
    stages than `pipeline_model_parallel_size`, they are virtual stages, assigned to the pipeline stages in turn."""

    @model_validator(mode="after")
    def _one_way(self) -> PipelineConfig:
        size, chunks, layout = (
            self.pipeline_model_parallel_size,
            self.chunks_per_stage,
            self.pipeline_model_parallel_layout,
        )
        for given, keys in (
            ((self.virtual_pipeline_model_parallel_size or 1) > 1, "virtual_pipeline_model_parallel_size: needs"),
            (self._ends, "num_layers_in_first/last_pipeline_stage: need"),
            (self._accounts, "account_for_embedding/loss_in_pipeline_split: need"),
            (layout, "pipeline_model_parallel_layout: needs"),
        ):
            if given and size == 1:
                raise ValueError(f"{keys} pipeline_model_parallel_size > 1")
        if self._ends and self._accounts:
            raise ValueError(
                "account_for_embedding/loss_in_pipeline_split: cannot be combined with "
                "num_layers_in_first/last_pipeline_stage; leave out one of the two"
            )
        if layout and (self._ends or self._accounts):
            raise ValueError(
                "pipeline_model_parallel_layout: already sets the layers of every stage; leave out "
                "num_layers_in_first/last_pipeline_stage and account_for_embedding/loss_in_pipeline_split"
            )
        if layout and (stages := len(layers_of_layout(layout))) != size * chunks:
            raise ValueError(
                f"pipeline_model_parallel_layout: {layout!r} has {stages} stages; it must have "
                f"pipeline_model_parallel_size ({size}) x virtual_pipeline_model_parallel_size ({chunks}) stages"
            )
        return self

    @property
    def _ends(self) -> bool:
        return bool(self.num_layers_in_first_pipeline_stage or self.num_layers_in_last_pipeline_stage)

    @property
    def _accounts(self) -> bool:
        return self.account_for_embedding_in_pipeline_split or self.account_for_loss_in_pipeline_split

    @property
    def is_uneven(self) -> bool:
        """True if a key of the configuration changes the even split of layers over the pipeline stages."""
        return self._ends or self._accounts or self.pipeline_model_parallel_layout is not None

    @property
    def chunks_per_stage(self) -> int:
        """Number of model chunks on each stage: as configured, or else as in the layout string, or else 1."""
        given, layout = self.virtual_pipeline_model_parallel_size, self.pipeline_model_parallel_layout
        if given is None and layout is not None:
            return max(1, len(layers_of_layout(layout)) // self.pipeline_model_parallel_size)
        return given or 1

    @property
    def microbatch_multiple(self) -> int:
        """Required divisor of the number of microbatches: the number of stages if chunks are interleaved, else 1."""
        return self.pipeline_model_parallel_size if self.chunks_per_stage > 1 else 1

    def layers_of_chunks(self, layers: int) -> list[int]:
        """Return the number of layers of each model chunk, in the order of the forward pass.

        Chunk i is on pipeline stage i mod `pipeline_model_parallel_size`. Without virtual stages, each stage has one
        chunk.

        Args:
            layers: number of layers of the model.

        Raises:
            UserError: the layers cannot be divided as configured.
        """
        size, chunks = self.pipeline_model_parallel_size, self.chunks_per_stage
        if layout := self.pipeline_model_parallel_layout:
            counts = layers_of_layout(layout)
            if sum(counts) != layers:
                raise UserError(
                    f"parallel.pipeline_model_parallel_layout={layout}: has {sum(counts)} layers; the model has "
                    f"{layers} layers"
                )
            return counts
        embedding, loss = self.account_for_embedding_in_pipeline_split, self.account_for_loss_in_pipeline_split
        first, last = self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage
        stages = _share_out(layers + embedding + loss, size, first, last)
        if stages is None:
            given = f" with {(first or 0) + (last or 0)} in the first or last stage" if self._ends else ""
            given += f" with {embedding + loss} more for embedding or loss" if self._accounts else ""
            raise UserError(
                f"parallel.pipeline_model_parallel_size={size}: the model's {layers} layers cannot be divided "
                f"evenly{given}; set num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage or "
                "pipeline_model_parallel_layout"
                + (
                    " and leave out account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split"
                    if self._accounts
                    else ""
                )
            )
        if any(count % chunks for count in stages):
            raise UserError(
                f"parallel.virtual_pipeline_model_parallel_size={chunks}: must divide the number of layers of "
                f"every stage ({', '.join(map(str, stages))})"
            )
        counts = [count // chunks for count in stages] * chunks
        counts[0] -= embedding
        counts[-1] -= loss
        return counts

    def stages_of_layers(self, layers: int) -> list[int]:
        """Return the pipeline stage of each layer.

        Raises:
            UserError: the layers cannot be divided as configured.
        """
        counts, size = self.layers_of_chunks(layers), self.pipeline_model_parallel_size
        return [chunk % size for chunk, count in enumerate(counts) for _ in range(count)]

    def distinct_stages(self) -> list[int]:
        """Return the pipeline stages that can differ in cost: the first, the last and some between them.

        If inner stages have equal numbers of layers, the result has only the earliest of them, which keeps the
        activations of the most microbatches. If the split is even, the result has no inner stage.
        """
        size, between = self.pipeline_model_parallel_size, []
        if layout := self.pipeline_model_parallel_layout:
            counts = layers_of_layout(layout)
            between = list({tuple(counts[stage::size]): stage for stage in range(size - 2, 0, -1)}.values())
        elif size > 2 and (self._ends or self._accounts):
            between = [1]
        return sorted({0, *between, size - 1})


def layers_of_layout(layout: str) -> list[int]:
    """Return the number of layers of each chunk of a layout string, in the order of the forward pass.

    For example, `Et*3|(tt|)*2L` has the chunks Ettt, tt, tt and L; the result is 3, 2, 2, 0.

    Raises:
        ValueError: the string cannot be read, does not have one E (at its start) and one L (at its end), or has an
            empty chunk.
    """
    chunks = _without_repetitions(layout.replace(",", "")).split("|")
    whole = "".join(chunks)
    if whole != EMBEDDING + LAYER * (len(whole) - 2) + LOSS:
        raise ValueError(
            f"pipeline_model_parallel_layout: {layout!r} must start with E, end with L, and have no other E or L"
        )
    if "" in chunks:
        raise ValueError(
            f"pipeline_model_parallel_layout: {layout!r} has {len(chunks)} stages, and stage "
            f"{chunks.index('') + 1} is empty"
        )
    return [chunk.count(LAYER) for chunk in chunks]


def _without_repetitions(text: str) -> str:
    out, end = "", 0
    while term := _TERM.match(text, end):
        end = term.end()
        part, times = term["one"], int(term["times"] or term["count"] or 1)
        if term["group"]:
            part = _without_repetitions(term["group"])
        if len(out) + len(part) * times > LONGEST_LAYOUT:
            raise ValueError(
                f"pipeline_model_parallel_layout: {text!r} has more than {LONGEST_LAYOUT:,} characters when its "
                "repetitions are written out"
            )
        out += part * times
    if end < len(text):
        raise ValueError(
            f"pipeline_model_parallel_layout: cannot be read from {text[end:]!r} on; write only E, t, L, |, t*3 "
            "and (tt|)*3"
        )
    return out


def _share_out(places: int, stages: int, first: int | None, last: int | None) -> list[int] | None:
    """Divide layers among pipeline stages; return the number of layers of each stage, or None if impossible.

    Args:
        places: number of layers; the embedding and the loss may each count as one more layer.
        stages: number of stages.
        first, last: number of layers of the first and of the last stage, if given. All other stages get equally many.
    """
    counts = [first, *[None] * (stages - 2), last] if stages > 1 else [None]
    open_stages = counts.count(None)
    left = places - sum(count or 0 for count in counts)
    if left < open_stages or (left % open_stages if open_stages else left):
        return None
    return [left // open_stages if count is None else count for count in counts]


class LayoutConfig(PipelineConfig):
    """Sizes of the parallel layout. Data parallelism uses the remaining processes."""

    tensor_model_parallel_size: PositiveInt = 1
    """Processes that share the weights of each layer; keep them within a node."""
    context_parallel_size: PositiveInt = 1
    """Processes that share the tokens of each sequence."""
    expert_model_parallel_size: PositiveInt = 1
    """Processes that share the experts of an MoE layer. They are data-, context- and tensor-parallel processes of one
    pipeline stage."""
    expert_tensor_parallel_size: PositiveInt | None = None
    """Processes that share the weights of each expert; the default is `tensor_model_parallel_size`."""
    sequence_parallel: bool = False
    """Divide the activations of norms over the tensor-parallel processes; results do not change."""

    @model_validator(mode="after")
    def _supported(self) -> Self:
        # Megatron would reduce the gradients of unsplit experts over the wrong ranks, without an error.
        if self.expert_model_parallel_size == 1 and self.expert_tensor_size != self.tensor_model_parallel_size:
            raise ValueError(
                "expert_tensor_parallel_size: must equal tensor_model_parallel_size if expert_model_parallel_size is "
                "1; leave expert_tensor_parallel_size out"
            )
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ValueError("sequence_parallel: needs tensor_model_parallel_size > 1")
        return self

    @property
    def expert_tensor_size(self) -> int:
        """Number of processes over which the weights of each expert are sharded."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def model_parallel_size(self) -> int:
        """Number of processes that together hold one replica of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def sequence_multiple(self) -> int:
        """Multiple to which the length of each sequence is padded, in tokens.

        The padded length must be divisible: context parallelism cuts a sequence into 2·CP chunks, and sequence
        parallelism cuts the tokens of each context-parallel rank into TP parts.
        """
        zigzag = 2 * self.context_parallel_size if self.context_parallel_size > 1 else 1
        return zigzag * (self.tensor_model_parallel_size if self.sequence_parallel else 1)

    def data_parallel_size(self, world_size: int) -> int:
        """Return the number of replicas in `world_size` processes.

        Raises:
            UserError: the layout does not divide the processes.
        """
        if world_size % self.model_parallel_size:
            raise UserError(
                f"parallel: tensor {self.tensor_model_parallel_size} x pipeline "
                f"{self.pipeline_model_parallel_size} x context {self.context_parallel_size} = "
                f"{self.model_parallel_size} must divide the number of processes ({world_size}); start "
                f"{self.model_parallel_size} processes or a multiple (torchrun --nproc-per-node, or --world-size)"
            )
        experts = self.expert_model_parallel_size * self.expert_tensor_size * self.pipeline_model_parallel_size
        if world_size % experts:
            raise UserError(
                f"parallel: expert {self.expert_model_parallel_size} x expert tensor {self.expert_tensor_size} x "
                f"pipeline {self.pipeline_model_parallel_size} = {experts} must divide the number of processes "
                f"({world_size})"
            )
        return world_size // self.model_parallel_size


class ParallelConfig(LayoutConfig):
    """Sizes of the parallel layout, and how its processes communicate. Data parallelism uses the remaining
    processes."""

    overlap_grad_reduce: bool | Literal["auto"] = "auto"
    """Reduce gradients bucket by bucket during the backward pass; results do not change. auto: true on GPUs."""
    overlap_param_gather: bool | Literal["auto"] = "auto"
    """Gather updated weights bucket by bucket during the next forward pass of training; results do not change. auto:
    true on GPUs if overlap_grad_reduce is true."""
    cp_comm_type: Literal["p2p", "all_gather", "a2a"] = "p2p"
    """How Transformer Engine's attention communicates under context parallelism. p2p: keys and values in a ring.
    all_gather: all keys and values at once (Transformer Engine 2.20 or newer). a2a: heads for tokens (2.10 or newer);
    context_parallel_size must divide the heads and the groups of a tensor-parallel process."""
    moe_token_dispatcher_type: Literal["alltoall", "flex"] = "alltoall"
    """How tokens reach their experts on other processes. alltoall: a token is sent once for each of its experts. flex:
    Megatron's flex dispatcher with DeepEP, which sends a token once to each process; needs the package `deep_ep`, and
    more than one process per layer of experts."""
    grad_reduce_in_fp32: bool = True
    """Accumulate gradients, and reduce them over processes, in fp32. false: in the model's bfloat16, with half the
    memory and bytes; the sum is then rounded after each microbatch."""
    timeout_seconds: PositiveInt = 600
    """Time limit for a collective. The run ends if a collective takes longer."""
    backend: Literal["auto", "host"] = "auto"
    """How processes communicate. auto: by NCCL on GPUs, by gloo on the CPU. host: by gloo through host memory, which
    is much slower, for tests in which several processes share a GPU."""

    @model_validator(mode="after")
    def _overlaps(self) -> ParallelConfig:
        if self.overlap_param_gather is True and self.overlap_grad_reduce is False:
            raise ValueError(
                "overlap_param_gather: needs overlap_grad_reduce=true, because weights are gathered in the same "
                "buckets in which gradients are reduced"
            )
        return self

    def for_device(self, on_gpu: bool) -> ParallelConfig:
        """Return this section with each `auto` replaced; `on_gpu`: whether the run is on GPUs."""
        reduces, gathers = self.overlap_grad_reduce, self.overlap_param_gather
        if reduces == "auto":
            reduces = on_gpu or gathers is True
        if gathers == "auto":
            gathers = on_gpu and reduces
        return self.model_copy(update={"overlap_grad_reduce": reduces, "overlap_param_gather": gathers})

    @property
    def meeting_seconds(self) -> float:
        """Interval in seconds at which ranks that wait for other ranks communicate.

        It is well below the time limit of collectives, so a long wait does not end the run.
        """
        return min(5.0, self.timeout_seconds / 4)


SIZES = ("tp", "pp", "cp", "dp", "ep", "vpp")
FLAGS = ("sp", "packing", "prefix")
SPLIT = ("first", "last", "stages")


@dataclass(frozen=True, order=True)
class ParallelLayout:
    """Sizes of the parallel dimensions, and how microbatches are made."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    sp: bool = False
    packing: bool = True
    tokens_per_pack: int | None = None
    ep: int = 1
    etp: int = 0
    """Tensor parallelism of each expert; 0: as `tp`."""
    vpp: int = 1
    first: int | None = None
    """Layers of the first pipeline stage."""
    last: int | None = None
    """Layers of the last pipeline stage."""
    stages: str | None = None
    """Layers of all stages, as in `parallel.pipeline_model_parallel_layout`."""
    prefix: bool = False
    """Store common prefixes once in a pack."""

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def is_possible(self) -> bool:
        """True if the sizes fit together."""
        etp = self.etp or self.tp
        if self.stages and (self.first or self.last or len(layers_of_layout(self.stages)) != self.pp * self.vpp):
            return False
        return (
            (not self.sp or self.tp > 1)
            and (not self.prefix or self.packing)
            and (self.pp > 1 or (self.vpp == 1 and not (self.first or self.last or self.stages)))
            and (self.ep > 1 or etp == self.tp)
            and not self.world_size % (self.pp * self.ep * etp)
        )

    def __str__(self) -> str:
        sizes = [f"{name}{getattr(self, name)}" for name in SIZES if getattr(self, name) > 1]
        sizes += [f"etp{self.etp}"] * bool(self.etp) + [f"first{self.first}"] * bool(self.first)
        sizes += [f"last{self.last}"] * bool(self.last) + [str(self.stages)] * bool(self.stages)
        extras = (
            ["sp"] * self.sp
            + ["prefix"] * self.prefix
            + ["unpacked"] * (not self.packing)
            + ["small packs"] * bool(self.tokens_per_pack)
        )
        return " ".join([*sizes, *extras]) or "one process"

    @property
    def parallel_values(self) -> dict[str, Any]:
        """Values of all keys of section `parallel` that describe a layout."""
        return {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vpp if self.vpp > 1 else None,
            "num_layers_in_first_pipeline_stage": self.first,
            "num_layers_in_last_pipeline_stage": self.last,
            "account_for_embedding_in_pipeline_split": False,
            "account_for_loss_in_pipeline_split": False,
            "pipeline_model_parallel_layout": self.stages,
            "context_parallel_size": self.cp,
            "sequence_parallel": self.sp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp or None,
        }

    def apply(self, config: Config) -> Config:
        """Return `config` with this layout."""
        values = config.model_dump()
        values["parallel"].update(self.parallel_values)
        values["batch"].update(packing=self.packing, tokens_per_pack=self.tokens_per_pack, share_prefixes=self.prefix)
        if self.packing:
            values["batch"]["micro_batch_size"] = 1
        if not self.prefix:
            del values["batch"]["min_shared_tokens"]
        return type(config).model_validate(values)


def parse_layouts(choices: Sequence[str]) -> list[ParallelLayout]:
    """Return a layout for every possible combination of choices such as `["tp=1,2", "cp=1,2"]`.

    The keys are the sizes tp, pp, vpp, cp, dp, ep and etp, and the switches sp, packing and prefix (0 or 1). Pipelines
    also have the keys first and last (layers of the first and last stage) and stages (a layout string like `E|t*4L`).

    Raises:
        UserError: a choice does not have that form.
    """
    known = {*SIZES, "etp", *FLAGS, *SPLIT}
    values: dict[str, list[Any]] = {}
    for choice in choices:
        key, _, text = choice.partition("=")
        if key == "stages":
            values[key] = text.split(",")
            try:
                for layout in values[key]:
                    layers_of_layout(layout)
            except ValueError as error:
                raise UserError(f"--layouts {choice!r}: {error}") from None
            continue
        if key not in known or not all(part.isdecimal() for part in text.split(",")):
            raise UserError(f"--layouts {choice!r}: write KEY=1,2 with one of the keys {', '.join(sorted(known))}")
        values[key] = [int(part) for part in text.split(",")]
        if key in FLAGS and not {*values[key]} <= {0, 1}:
            raise UserError(f"--layouts {choice!r}: {key} must be 0 or 1")
        if key not in FLAGS and 0 in values[key]:
            raise UserError(f"--layouts {choice!r}: every size must be at least 1")
    combinations = itertools.product(*values.values())
    layouts = [ParallelLayout(**dict(zip(values, combination, strict=True))) for combination in combinations]
    return sorted(
        {layout for layout in layouts if layout.is_possible}, key=lambda layout: (layout.world_size, str(layout))
    )


def own_split(parallel: ParallelConfig, layers: int) -> ParallelLayout | None:
    """Return the configured pipeline split of a model with `layers` layers, as a layout; None if the split is even.

    Raises:
        UserError: the configured split is not for `layers` layers.
    """
    if not parallel.is_uneven:
        return None
    stages = "|".join("t" * count for count in parallel.layers_of_chunks(layers))
    return ParallelLayout(pp=parallel.pipeline_model_parallel_size, vpp=parallel.chunks_per_stage, stages=f"E{stages}L")

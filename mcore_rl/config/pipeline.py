"""How a pipeline's stages share out a model's layers."""

from __future__ import annotations

import re

from pydantic import model_validator

from mcore_rl.config.base import Name, Positive, Section
from mcore_rl.errors import UserError

EMBEDDING, LAYER, LOSS = "E", "t", "L"
LONGEST_LAYOUT = 10_000
"""Letters and bars of a layout string without repetitions."""
_TERM = re.compile(r"\((?P<group>[^()]+)\)\*(?P<times>\d{1,4})|(?P<one>[EtL|])(?:\*(?P<count>\d{1,4}))?")


class PipelineConfig(Section):
    """The pipeline's part of the parallel layout."""

    pipeline_model_parallel_size: Positive = 1
    """Stages that share out the layers."""
    virtual_pipeline_model_parallel_size: Positive | None = None
    """Chunks of layers on each pipeline stage, whose passes interleave; if not given, as many as the layout string
    makes, otherwise 1."""
    num_layers_in_first_pipeline_stage: Positive | None = None
    """See the next."""
    num_layers_in_last_pipeline_stage: Positive | None = None
    """Layers of the stages that also have the embedding, and the vocabulary's projection; an even share if not
    given. The other stages share the rest evenly."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer where layers are shared out evenly: its chunk has one fewer."""
    account_for_loss_in_pipeline_split: bool = False
    """The same for the vocabulary's projection, in the last chunk."""
    pipeline_model_parallel_layout: Name | None = None
    """In place of the four before, what each stage has, as Megatron writes it: `E` the embedding, `t` a layer, `L` the
    vocabulary's projection, `|` between stages, `*3` for repetitions (`Et*3|(tt|)*2tL`). With more stages than
    `pipeline_model_parallel_size` they are virtual ones, dealt out in turn."""

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
                "account_for_embedding/loss_in_pipeline_split: is for layers that are shared out evenly; leave it or "
                "num_layers_in_first/last_pipeline_stage out"
            )
        if layout and (self._ends or self._accounts):
            raise ValueError(
                "pipeline_model_parallel_layout: says what every stage has; leave "
                "num_layers_in_first/last_pipeline_stage and account_for_embedding/loss_in_pipeline_split out"
            )
        if layout and (stages := len(layers_of_layout(layout))) != size * chunks:
            raise ValueError(
                f"pipeline_model_parallel_layout: {layout!r} has {stages} stages, which is not "
                f"pipeline_model_parallel_size ({size}) x virtual_pipeline_model_parallel_size ({chunks})"
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
        """Whether it is said what stages have."""
        return self._ends or self._accounts or self.pipeline_model_parallel_layout is not None

    @property
    def chunks_per_stage(self) -> int:
        """Virtual stages on each stage, given or those of the layout string."""
        given, layout = self.virtual_pipeline_model_parallel_size, self.pipeline_model_parallel_layout
        if given is None and layout is not None:
            return max(1, len(layers_of_layout(layout)) // self.pipeline_model_parallel_size)
        return given or 1

    @property
    def microbatch_multiple(self) -> int:
        """The number of microbatches is a multiple of this: interleaved chunks run in rounds of all stages."""
        return self.pipeline_model_parallel_size if self.chunks_per_stage > 1 else 1

    def layers_of_chunks(self, layers: int) -> list[int]:
        """How many of a model's layers each chunk has, in the order in which tokens pass them.

        Chunk i is on pipeline stage i mod `pipeline_model_parallel_size`; each stage has one without virtual stages.

        Raises:
            UserError: they cannot be shared out so.
        """
        size, chunks = self.pipeline_model_parallel_size, self.chunks_per_stage
        if layout := self.pipeline_model_parallel_layout:
            counts = layers_of_layout(layout)
            if sum(counts) != layers:
                raise UserError(
                    f"parallel.pipeline_model_parallel_layout={layout}: has {sum(counts)} layers; "
                    f"the model has {layers}"
                )
            return counts
        embedding, loss = self.account_for_embedding_in_pipeline_split, self.account_for_loss_in_pipeline_split
        first, last = self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage
        stages = _share_out(layers + embedding + loss, size, first, last)
        if stages is None:
            given = f" beside the {(first or 0) + (last or 0)} of the first or last stage" if self._ends else ""
            given += f" with {embedding + loss} more for embedding or loss" if self._accounts else ""
            raise UserError(
                f"parallel.pipeline_model_parallel_size={size}: the model's {layers} layers cannot be shared out "
                f"evenly{given}; set num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage or "
                "pipeline_model_parallel_layout"
                + (" and leave account_for_embedding/loss_in_pipeline_split out" if self._accounts else "")
            )
        if any(count % chunks for count in stages):
            raise UserError(
                f"parallel.virtual_pipeline_model_parallel_size={chunks}: must divide the layers of every stage "
                f"({', '.join(map(str, stages))})"
            )
        counts = [count // chunks for count in stages] * chunks
        counts[0] -= embedding
        counts[-1] -= loss
        return counts

    def layers_of_stages(self, layers: int) -> list[int]:
        """How many of a model's layers each pipeline stage has, in all of its chunks.

        Raises:
            UserError: they cannot be shared out so.
        """
        counts, size = self.layers_of_chunks(layers), self.pipeline_model_parallel_size
        return [sum(counts[stage::size]) for stage in range(size)]

    def stages_of_layers(self, layers: int) -> list[int]:
        """The pipeline stage of each of a model's layers.

        Raises:
            UserError: they cannot be shared out so.
        """
        counts, size = self.layers_of_chunks(layers), self.pipeline_model_parallel_size
        return [chunk % size for chunk, count in enumerate(counts) for _ in range(count)]

    def distinct_stages(self) -> list[int]:
        """The first and the last stage, and of those between them, if uneven, the first with each share of layers:
        of equal ones it keeps the activations of the most microbatches."""
        size, between = self.pipeline_model_parallel_size, []
        if layout := self.pipeline_model_parallel_layout:
            counts = layers_of_layout(layout)
            between = list({tuple(counts[stage::size]): stage for stage in range(size - 2, 0, -1)}.values())
        elif size > 2 and (self._ends or self._accounts):
            between = [1]
        return sorted({0, *between, size - 1})


def layers_of_layout(layout: str) -> list[int]:
    """Layers of each chunk of a layout string, in the order in which tokens pass them: `Et*3|(tt|)*2L` → 3, 2, 2, 0.

    Raises:
        ValueError: it cannot be read, has not one embedding and one loss at its ends, or a chunk of nothing.
    """
    chunks = _without_repetitions(layout.replace(",", "")).split("|")
    whole = "".join(chunks)
    if whole != EMBEDDING + LAYER * (len(whole) - 2) + LOSS:
        raise ValueError(f"pipeline_model_parallel_layout: {layout!r} must begin with its one E and end with its one L")
    if "" in chunks:
        raise ValueError(
            f"pipeline_model_parallel_layout: stage {chunks.index('') + 1} of the {len(chunks)} of {layout!r} is empty"
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
                f"pipeline_model_parallel_layout: {text!r} is longer than {LONGEST_LAYOUT:,} with its repetitions"
            )
        out += part * times
    if end < len(text):
        raise ValueError(
            f"pipeline_model_parallel_layout: cannot be read from {text[end:]!r} on; E, t, L, |, t*3 and (tt|)*3 can"
        )
    return out


def _share_out(places: int, stages: int, first: int | None, last: int | None) -> list[int] | None:
    """So many on each stage, evenly but for a first and a last that are given; None if it cannot be."""
    counts = [first, *[None] * (stages - 2), last] if stages > 1 else [None]
    open_stages = counts.count(None)
    left = places - sum(count or 0 for count in counts)
    if left < open_stages or (left % open_stages if open_stages else left):
        return None
    return [left // open_stages if count is None else count for count in counts]

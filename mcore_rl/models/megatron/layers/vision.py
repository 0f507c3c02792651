"""The vision tower: it computes the features that replace the embeddings of image tokens.

The tower is transformers' own module. It is a child `visual` of the first model chunk, so every rank of the first
pipeline stage has it whole. The images of a pack are divided among the ranks of tensor and context parallelism. Each
rank computes the features of its images; then all of these ranks gather the features of all images, a tensor
[rows, (1 + D)·hidden]. The first `hidden` columns replace embeddings. With DeepStack (arXiv:2406.04334), the other
columns are added to the outputs of the first D layers, which must therefore be in the first chunk.

Gradients of a trained tower: a context-parallel rank has the gradients of its own tokens, so the gradients of features
are summed over context-parallel ranks. The same holds for tensor-parallel ranks under sequence parallelism; without
it, each of them has the whole gradient already. A rank's gradients of the tower's weights then come from its own
images: DDP sums them over data- and context-parallel ranks, and `VisionTower.sum_gradients` over tensor-parallel ranks.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Int64, Shaped
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from mcore_rl import platform
from mcore_rl.data.batching import Microbatch
from mcore_rl.data.images import IMAGES, Grid, PlacedImage
from mcore_rl.distributed.collectives import (
    all_gather,
    all_gather_forward_reduce_scatter_backward,
    all_gather_forward_split_backward,
)
from mcore_rl.distributed.packs import slice_context_parallel
from mcore_rl.distributed.topology import Topology
from mcore_rl.models.megatron.weight_mapping import Shape

VISION_TOWER = "visual."
"""Prefix of the names of the tower's parameters in the first chunk."""

TOWER_ATTRIBUTE = "is_of_vision_tower"
"""Attribute of the tower's parameters, by which the optimizer finds them."""

COSTLY_ATTENTION = 4096.0
"""Number of patches of an image at which attention costs about as much as the rest of the tower (width 1152)."""

MOST_KNOWN_IMAGES = 1 << 20
"""Number of images whose rank is remembered; later images replace the earliest."""

Identity = tuple[str, Grid]


def build_tower(config: Any, dtype: torch.dtype) -> torch.nn.Module:
    """Return transformers' module for a `vision_config`. Its weights are not initialized, and no numbers are drawn."""
    from transformers import AutoModel
    from transformers.initialization import no_init_weights

    with no_init_weights(), torch.random.fork_rng(devices=[]):
        # transformers writes `dtype` into the configuration, which exports and checkpoints must not contain.
        module: torch.nn.Module = AutoModel.from_config(copy.deepcopy(config), dtype=dtype)
    for parameter in module.parameters():
        setattr(parameter, TOWER_ATTRIBUTE, True)
    return module


def run_module(module: Any, pixels: Float[Tensor, "patches values"], grids: Int[Tensor, "images 3"]) -> Any:
    """Return the output of transformers' module for images whose grids count patches. `grids` are on the host."""
    return module(pixels, platform.sent(grids, pixels.device))


def tower_shapes(config: Any) -> dict[str, Shape]:
    """Return the shapes of a tower's parameters by their names in transformers' module."""
    kind: Any = type(config)
    return _tower_shapes(kind, json.dumps(config.to_dict(), default=str, sort_keys=True))


@lru_cache(maxsize=8)
def _tower_shapes(kind: Any, text: str) -> dict[str, Shape]:
    with torch.device("meta"):
        module = build_tower(kind(**json.loads(text)), torch.float32)
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


class PixelSource(Protocol):
    """Reads images; `ImageReader` is one."""

    def pixels(self, image: PlacedImage) -> Tensor: ...


class KeptFeatures:
    """Features of images in host memory, for later passes and packs; the least recently used are dropped first."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self.limit, self.nbytes = limit, 0
        self._features: dict[Identity, Tensor] = {}

    def __contains__(self, identity: Identity) -> bool:
        return identity in self._features

    def get(self, identity: Identity) -> Tensor:
        features = self._features.pop(identity)
        self._features[identity] = features
        return features

    def put(self, identity: Identity, features: Tensor) -> None:
        self.add(identity, features.to("cpu", copy=True))

    def add(self, identity: Identity, features: Tensor) -> None:
        """Keep `features`, which are in host memory and are not copied."""
        self._features[identity] = features
        self.nbytes += features.nbytes
        while self.nbytes > self.limit:
            self.nbytes -= self._features.pop(next(iter(self._features))).nbytes


@dataclass
class VisionTower:
    """The vision tower on one rank.

    module: transformers' module; None on ranks without the embedding.
    merge: an image token stands for merge² patches.
    deepstack: number D of layers to whose outputs features are added.
    source: reads the images' pixels.
    computed: number of images whose features this rank has computed.
    """

    module: Any
    topology: Topology
    merge: int
    deepstack: int
    is_trained: bool
    source: PixelSource | None = None
    computed: int = 0
    kept: KeptFeatures = field(default_factory=KeptFeatures)

    def __post_init__(self) -> None:
        self._rank_of: dict[Identity, int] = {}

    def parameters(self) -> list[Any]:
        """Return the trained parameters of this rank; [] if the tower is frozen."""
        return [p for p in self.module.parameters() if p.requires_grad] if self.module is not None else []

    # ------------------------------------------------------------ features

    def features(self, division: ImageDivision) -> Float[Tensor, "rows values"]:
        """Return the features of all images: those of each rank's images, padded to `division.widest` rows a rank.

        Collective over the ranks of the division. The gradient of a row is summed as described above.
        """
        top = self.topology
        gathers_context = not division.over_tensor_ranks_only
        if not (self.is_trained and torch.is_grad_enabled()):
            with torch.no_grad():
                rows = all_gather(self._own_features(division), top.tensor.group).flatten(0, 1)
                return all_gather(rows, top.context.group).flatten(0, 1) if gathers_context else rows
        own = _WithZeroGradients.apply(self._own_features(division), *self.parameters())
        # Each tensor-parallel rank has the gradients of its own tokens, or of all tokens.
        sums = top.sequence_parallel
        over_tensor = all_gather_forward_reduce_scatter_backward if sums else all_gather_forward_split_backward
        return all_gather_forward_reduce_scatter_backward(over_tensor(own, top.tensor.group), top.context.group)

    def _own_features(self, division: ImageDivision) -> Tensor:
        """Return the features of this rank's images, [widest, (1 + D)·hidden]."""
        weight = next(self.module.parameters())
        own = division.own_images(self.topology)
        new = [image for image in own if image.identity not in self.kept]
        lengths = [image.count for image in new]
        made = self._computed_features(new).split(lengths) if new else ()
        found = {image.identity: features for image, features in zip(new, made, strict=True)}
        parts = [
            found[image.identity] if image.identity in found else self._kept_features(image, weight) for image in own
        ]
        if not self.is_trained:
            for identity, features in found.items():
                self.kept.put(identity, features)
        width = (1 + self.deepstack) * self.module.config.out_hidden_size
        return torch.cat((*parts, weight.new_zeros(division.widest - sum(map(len, parts)), width)))

    def _kept_features(self, image: PlacedImage, like: Tensor) -> Tensor:
        return platform.sent(self.kept.get(image.identity), like.device)

    def _computed_features(self, images: Sequence[PlacedImage]) -> Tensor:
        """Run the tower; return the features of the images, [tokens of all images, (1 + D)·hidden]."""
        weight = next(self.module.parameters())
        assert self.source is not None, "the tower needs a source of pixels"
        self.computed += len(images)
        pixels = torch.cat([self.source.pixels(image) for image in images])
        grids = torch.tensor([(t, h * self.merge, w * self.merge) for t, h, w in (image.grid for image in images)])
        out = run_module(self.module, platform.sent(pixels, weight.device).to(weight.dtype), grids)
        return torch.cat((out.pooler_output, *(getattr(out, "deepstack_features", None) or ())), dim=-1)

    # ------------------------------------------------------------ division of images

    def divide(self, images: Sequence[PlacedImage], over_tensor_ranks_only: bool = False) -> ImageDivision:
        """Divide distinct images among ranks; the result is the same on all of these ranks.

        The features of a frozen tower's image are kept by the rank that has computed them, so the image stays there.

        Args:
            over_tensor_ranks_only: context-parallel ranks have other images, as in generation.
        """
        context = 1 if over_tensor_ranks_only else self.topology.context.size
        remembers = not self.is_trained and context == self.topology.context.size
        known = {n: self._rank_of[i.identity] for n, i in enumerate(images) if i.identity in self._rank_of}
        patches = [image.count * self.merge**2 for image in images]
        shares = shared_out(patches, context * self.topology.tensor.size, known if remembers else {})
        if remembers:
            self._rank_of.update({images[n].identity: rank for rank, share in enumerate(shares) for n in share})
            while len(self._rank_of) > MOST_KNOWN_IMAGES:
                del self._rank_of[next(iter(self._rank_of))]
        return ImageDivision(list(images), shares, over_tensor_ranks_only)

    def sum_gradients(self) -> None:
        """Sum the tower's gradients over tensor-parallel ranks. Collective over these ranks.

        Each of them has the gradients of its own images, with and without sequence parallelism.
        """
        gradients = [parameter.main_grad for parameter in self.parameters()]
        if not gradients or self.topology.tensor.size == 1:
            return
        flat = _flatten_dense_tensors(gradients)
        torch.distributed.all_reduce(flat, group=self.topology.tensor.group)
        for gradient, total in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
            gradient.copy_(total)


@dataclass(frozen=True)
class ImageDivision:
    """The division of distinct images among ranks of tensor and context parallelism.

    shares: for each rank, the numbers of its images. Tensor-parallel ranks are neighbours.
    over_tensor_ranks_only: whether only tensor-parallel ranks have these images.
    """

    images: list[PlacedImage]
    shares: list[list[int]]
    over_tensor_ranks_only: bool = False

    @property
    def widest(self) -> int:
        """Number of tokens of the rank with most tokens."""
        return max(sum(self.images[number].count for number in share) for share in self.shares)

    def own_images(self, topology: Topology) -> list[PlacedImage]:
        context = 0 if self.over_tensor_ranks_only else topology.context.rank
        return [self.images[number] for number in self.shares[context * topology.tensor.size + topology.tensor.rank]]

    def first_rows(self) -> dict[Identity, int]:
        """Return the number of each image's first row among the gathered features."""
        found, widest = {}, self.widest
        for rank, share in enumerate(self.shares):
            row = rank * widest
            for number in share:
                found[self.images[number].identity] = row
                row += self.images[number].count
        return found


def shared_out(patches: Sequence[int], ranks: int, known: Mapping[int, int]) -> list[list[int]]:
    """Divide images among ranks: in the order of their sizes, each goes to the rank that has the least work.

    Args:
        patches: number of patches of each image.
        known: ranks of images that must stay there, by the number of the image; they count as no work.

    Returns:
        For each rank, the numbers of its images, ascending.
    """
    work, shares = [0.0] * ranks, [list[int]() for _ in range(ranks)]
    for number, rank in known.items():
        shares[rank].append(number)
    for number in sorted(set(range(len(patches))) - known.keys(), key=lambda n: (-patches[n], n)):
        rank = min(range(ranks), key=work.__getitem__)
        work[rank] += patches[number] * (1 + patches[number] / COSTLY_ATTENTION)
        shares[rank].append(number)
    return [sorted(share) for share in shares]


class _WithZeroGradients(torch.autograd.Function):
    """Identity function of `x` whose backward pass also gives each of the `parameters` a gradient of zeros.

    With it, a rank without images takes part in the backward pass of the gathers, for which the other ranks wait; and
    every parameter gets a gradient in every microbatch, for which the overlapped reduction of gradients waits.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.like = [(p.shape, p.dtype, p.device) for p in parameters]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)


class _WithGradientOfLeaves(torch.autograd.Function):
    """Identity function of `x`; the gradient of `features` is the gradient that `leaves` have accumulated until then.

    The layers add `leaves`, which are detached from `features`. If they added `features`, each layer that is recomputed
    in the backward pass would run backward through the tower on its own. The backward pass reaches the embeddings `x`
    after these layers, so the gradients of the leaves are then complete.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, features: Tensor, leaves: list[Tensor]) -> Tensor:
        ctx.leaves = leaves
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in ctx.leaves]
        for leaf in ctx.leaves:
            leaf.grad = None
        return grad, torch.cat(gradients, dim=-1), None


# ---------------------------------------------------------------- the images of a pack


@dataclass
class PackImages:
    """The images of a pack, as a rank of the first stage needs them.

    places: [n] indices of this rank's hidden states that belong to image tokens.
    rows: [n] for each of them, its row of the gathered features.
    added: for each of the first D layers, the features that are added to its output, [n, hidden]; [] until the
        embeddings are computed.
    """

    tower: VisionTower
    division: ImageDivision
    places: Int64[Tensor, " n"]
    rows: Int64[Tensor, " n"]
    added: list[Tensor] = field(default_factory=list)

    def put_into(self, embedded: Float[Tensor, "t 1 hidden"]) -> Float[Tensor, "t 1 hidden"]:
        """Replace the embeddings of this rank's image tokens by the features of their images."""
        tower = self.tower
        if not self.division.images:  # every parameter of a trained tower still needs a gradient
            is_trained = tower.is_trained and torch.is_grad_enabled()
            return _WithZeroGradients.apply(embedded, *tower.parameters()) if is_trained else embedded
        own = tower.features(self.division).to(embedded.dtype)[self.rows]
        hidden = embedded.shape[-1]
        embedded = embedded.index_copy(0, self.places, own[:, None, :hidden])
        if tower.deepstack:
            later = own[:, hidden:]
            self.added = list(later.detach().split(hidden, dim=-1))
            if later.requires_grad:
                self.added = [part.clone().requires_grad_() for part in self.added]
                embedded = _WithGradientOfLeaves.apply(embedded, later, self.added)
        return embedded

    def add_to(self, hidden: Float[Tensor, "t 1 hidden"], layer: int) -> Float[Tensor, "t 1 hidden"]:
        """Return the output of layer number `layer`, with the features that DeepStack adds."""
        if layer >= len(self.added):
            return hidden
        return hidden.index_add(0, self.places, self.added[layer][:, None])


def rope_positions(length: int, images: Sequence[PlacedImage]) -> Int[Tensor, "length 3"]:
    """Return the three positions (time, row, column) of each of a row's `length` tokens (M-RoPE, arXiv:2409.12191).

    The positions of text count upwards, equal on the three axes. If an image begins at position p, its token in frame
    f, row r and column c has the positions p + f, p + r, p + c. The text after it begins at p + max(rows, columns).
    """
    parts, token, position = list[Tensor](), 0, 0
    for image in images:
        parts.append(_text_positions(position, image.start - token))
        position += image.start - token
        axes = (torch.arange(size) for size in image.grid)
        parts.append(torch.cartesian_prod(*axes).view(-1, 3) + position)
        token, position = image.end, position + max(image.grid[1:])
    return torch.cat([*parts, _text_positions(position, length - token)])


def _text_positions(first: int, count: int) -> Tensor:
    return torch.arange(first, first + count)[:, None].expand(-1, 3)


def pack_positions(microbatch: Microbatch) -> Shaped[Tensor, "tokens *axes"]:
    """Return the positions of a pack's tokens: [T, 3] if a row has images, otherwise [T]."""
    layout, of_rows = microbatch.layout, microbatch.data.get(IMAGES) or ()
    if not any(of_rows):
        return layout.position_ids
    rows = torch.zeros(*microbatch.data["input_ids"].shape, 3, dtype=torch.long)
    for row, (images, length) in enumerate(zip(of_rows, layout.row_lengths, strict=True)):
        rows[row, :length] = rope_positions(length, images or ())
    return torch.stack([layout.pack_rows(rows[..., axis]) for axis in range(3)], dim=-1)


def pack_images(microbatch: Microbatch, tower: VisionTower) -> PackImages:
    """Return the images of a microbatch, for this rank. The first pipeline stage calls it, on all of its ranks."""
    layout, shape = microbatch.layout, microbatch.data["input_ids"].shape
    of_rows = microbatch.data.get(IMAGES) or [None] * shape[0]
    division = tower.divide(distinct_images(of_rows))
    first_rows, rows = division.first_rows(), torch.full(shape, -1, dtype=torch.long)
    for row, images in enumerate(of_rows):
        for image in images or ():
            rows[row, image.start : image.end] = torch.arange(image.count) + first_rows[image.identity]
    local = slice_context_parallel(layout.pack_rows(rows, fill=-1), layout, tower.topology.context.rank)
    return PackImages(tower, division, *_own_places(local, tower.topology))


def prompt_images(
    prompts: Sequence[Sequence[PlacedImage]], lengths: Sequence[int], tower: VisionTower, multiple: int
) -> PackImages:
    """Return the images of prompts that run as one pack in generation.

    Args:
        lengths: number of tokens of each prompt.
        multiple: the decoder pads the tokens to a multiple of this number.
    """
    division = tower.divide(distinct_images(prompts), over_tensor_ranks_only=True)
    first_rows, rows, first = division.first_rows(), torch.full((sum(lengths),), -1), 0
    for images, length in zip(prompts, lengths, strict=True):
        for image in images:
            own = slice(first + image.start, first + image.end)
            rows[own] = torch.arange(image.count) + first_rows[image.identity]
        first += length
    rows = F.pad(rows, (0, -len(rows) % multiple), value=-1)
    return PackImages(tower, division, *_own_places(rows, tower.topology))


def distinct_images(of_rows: Iterable[Sequence[PlacedImage] | None]) -> list[PlacedImage]:
    """Return one image of each identity among the images of the rows."""
    return list({image.identity: image for images in of_rows for image in images or ()}.values())


def _own_places(rows: Tensor, topology: Topology) -> tuple[Tensor, Tensor]:
    """Return `places` and `rows` of `PackImages`.

    Args:
        rows: for each token of this context-parallel rank, its row of the features; −1 for other tokens.
    """
    if topology.sequence_parallel:
        rows = rows.chunk(topology.tensor.size)[topology.tensor.rank]
    places = (rows >= 0).nonzero().flatten()
    places, rows = platform.sent_together((places, rows[places]), platform.device())
    return places, rows

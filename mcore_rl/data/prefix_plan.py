"""Plans of common prefixes: which prefixes of a batch's rows are stored once, and which rows share a pack.

`PrefixForest` finds all common prefixes. `PrefixForest.cheapest` chooses those that are worth a segment of their own.
`pieces_of` divides the rows of a tree that does not fit a pack.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from mcore_rl.data.choices import CHOICES
from mcore_rl.data.images import IMAGES
from mcore_rl.distributed.bin_packing import best_fit_decreasing
from mcore_rl.distributed.packs import PrefixTree, round_up

SegmentCost = Callable[[int, int], float]
"""Function of the number of tokens before a segment in its rows and of the segment's own number of tokens; returns the
cost of computing the segment once."""


def token_identities(data: Mapping[str, Any]) -> Int[Tensor, "rows seq"]:
    """Return a number for each token of `data`. Two rows may share a token only if their numbers are equal up to it.

    The number is the token's id; for a token of an image, it depends on the image (`_image_identities`). If the batch
    has recorded choices, it is a hash of that number and the token's choices: the model computes something else if it
    sends the token to other experts, or attends to other keys. Unknown choices differ from known ones.
    """
    ids = _image_identities(data)
    generator = torch.Generator().manual_seed(5)
    for choices in (data[name].flatten(2) for name in CHOICES if name in data):
        factors = 2 * torch.randint(-(2**61), 2**61, (choices.shape[2] + 1,), generator=generator) + 1
        ids = ids * factors[-1]
        for row, of_row in enumerate(choices):  # row by row, because int64 choices of all rows would need much memory
            ids[row] += of_row.long() @ factors[:-1]
    return ids


def _image_identities(data: Mapping[str, Any]) -> Int[Tensor, "rows seq"]:
    """Return `input_ids`, with a number for each image token that depends on the image and the token's place in it.

    Two rows with the same image at the same place have the same numbers; with different images, different numbers. The
    numbers are negative, so they differ from token ids.
    """
    ids: Tensor = data["input_ids"]
    if not any(data.get(IMAGES) or ()):
        return ids
    ids = ids.clone()
    for row, images in enumerate(data[IMAGES]):
        for image in images or ():
            digest = hashlib.sha256(repr(image.identity).encode()).digest()
            number = int.from_bytes(digest[:5], "little") << 22  # an image has fewer than 2^22 tokens
            ids[row, image.start : image.end] = -1 - number - torch.arange(image.count)
    return ids


@dataclass
class _Node:
    """Tokens that follow each other in all rows of a subtree. The node's first token follows the parent's last token.

    end: number of tokens from the start of the rows to the end of this node.
    parent: index of the parent; −1 for a root.
    ended: rows that end with this node.
    """

    end: int
    parent: int
    ended: list[int] = field(default_factory=list)
    children: list[int] = field(default_factory=list)


class PrefixForest:
    """All common prefixes of the rows `identities` [N, S], as compressed tries.

    Args:
        identities: numbers of the tokens (see `token_identities`).
        lengths: number of tokens of each row without padding.
    """

    def __init__(self, identities: Int[Tensor, "rows seq"], lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        self.nodes = _depth_first(_compressed_trie(identities, self.lengths), len(self.lengths))
        self.end_of = {row: number for number, node in enumerate(self.nodes) for row in node.ended}

    def cheapest(self, rows: Sequence[int], cost: SegmentCost) -> PrefixTree:
        """Return the tree of `rows` whose segments cost least; the tree numbers these rows 0, 1, … in their order.

        Every row is a path of segments. At the end of each common prefix, a segment may end, so that other segments
        continue it; or the prefix is repeated in the segments that follow. The result is exact: no other choice of the
        ends, and of the segments that continue them, costs less.
        """
        nodes = self._restricted(rows)
        starts: list[list[int]] = []  # columns at which a segment that ends with the node may start
        for node in nodes:
            starts.append([0] if node.parent < 0 else [*starts[node.parent], nodes[node.parent].end])
        least: list[dict[int, float]] = [{} for _ in nodes]
        for number in range(len(nodes) - 1, -1, -1):
            node = nodes[number]
            for start in starts[number]:
                least[number][start] = min(_ending(nodes, least, number, start, cost), _repeated(node, least, start))
        return _in_row_order(_chosen(nodes, least, len(rows), cost))

    def _restricted(self, rows: Sequence[int]) -> list[_Node]:
        """Return the nodes of `rows` alone, depth first. The rows are renumbered."""
        places = {row: place for place, row in enumerate(rows)}
        branches: dict[int, int] = {}  # for each node on the paths of `rows`, its number of branches on these paths
        for row in rows:
            number = self.end_of[row]
            is_known = number in branches
            branches.setdefault(number, 0)
            while not is_known and (number := self.nodes[number].parent) >= 0:
                is_known = number in branches
                branches[number] = branches.get(number, 0) + 1
        found: list[_Node] = []
        place_of = {-1: -1}  # index in `found` of a node, or of the nearest node above it
        for number in sorted(branches):
            node = self.nodes[number]
            ended = [places[row] for row in node.ended if row in places]
            place_of[number] = place_of[node.parent]
            if ended or branches[number] > 1:  # otherwise, the node is a part of its only branch
                if place_of[number] >= 0:
                    found[place_of[number]].children.append(len(found))
                found.append(_Node(node.end, place_of[number], ended))
                place_of[number] = len(found) - 1
        return found


def _compressed_trie(identities: Tensor, lengths: Sequence[int]) -> list[_Node]:
    """Return the nodes of the rows' trie, in any order. Node 0 is the root of all; it has no tokens."""
    table = identities.contiguous().numpy()
    # Sorted as bytes, rows with a common prefix are neighbours, and each row stands before the rows that continue it.
    order = sorted(range(len(lengths)), key=lambda row: table[row, : lengths[row]].tobytes())
    nodes, path = [_Node(0, -1)], [0]  # path: nodes from the root to the previous row's end
    for place, row in enumerate(order):
        length, common, below = lengths[row], 0, -1
        if place:
            limit = min(length, lengths[order[place - 1]])
            differs = (table[row, :limit] != table[order[place - 1], :limit]).nonzero()[0]
            common = int(differs[0]) if len(differs) else limit
        while nodes[path[-1]].end > common:
            below = path.pop()
        if nodes[path[-1]].end < common:  # the previous row branches off inside a node
            nodes.append(_Node(common, path[-1]))
            path.append(len(nodes) - 1)
            nodes[below].parent = path[-1]
        if length > common:
            nodes.append(_Node(length, path[-1]))
            path.append(len(nodes) - 1)
        elif not length and not place:
            nodes.append(_Node(0, 0))  # rows without tokens have a node of their own, which no row continues
        nodes[path[-1] if length else 1].ended.append(row)
    return nodes


def _depth_first(nodes: Sequence[_Node], rows: int) -> list[_Node]:
    """Return the nodes without node 0, depth first; the children of a node in the order of their first rows."""
    children: list[list[int]] = [[] for _ in nodes]
    for number, node in enumerate(nodes[1:], 1):
        children[node.parent].append(number)
    first = [min(node.ended, default=rows) for node in nodes]
    for number in sorted(range(len(nodes)), key=lambda number: -nodes[number].end):
        first[number] = min([first[number], *(first[child] for child in children[number])])
    found: list[_Node] = []
    stack = [(root, -1) for root in sorted(children[0], key=lambda child: -first[child])]
    while stack:
        number, parent = stack.pop()
        found.append(_Node(nodes[number].end, parent, sorted(nodes[number].ended)))
        stack += [(child, len(found) - 1) for child in sorted(children[number], key=lambda child: -first[child])]
    return found


def _ending(
    nodes: Sequence[_Node], least: Sequence[dict[int, float]], number: int, start: int, cost: SegmentCost
) -> float:
    """Return the least cost of a node and its subtree if a segment ends with the node. The segment begins at `start`.

    Each child continues the segment, or repeats its tokens.
    """
    end = nodes[number].end
    below = sum(min(least[child][end], least[child][start]) for child in nodes[number].children)
    return cost(start, end - start) + below


def _repeated(node: _Node, least: Sequence[dict[int, float]], start: int) -> float:
    """Return the least cost of a node's subtree if each child repeats the tokens from `start` to the node's end."""
    return math.inf if node.ended else sum(least[child][start] for child in node.children)


def _chosen(nodes: Sequence[_Node], least: Sequence[dict[int, float]], rows: int, cost: SegmentCost) -> PrefixTree:
    """Return the tree of the choices that cost `least`."""
    lengths: list[int] = []
    parents: list[int] = []
    ends = [-1] * rows
    stack = [(number, 0, -1) for number in range(len(nodes) - 1, -1, -1) if nodes[number].parent < 0]
    while stack:
        number, start, parent = stack.pop()
        node = nodes[number]
        if _repeated(node, least, start) <= _ending(nodes, least, number, start, cost):
            stack += [(child, start, parent) for child in reversed(node.children)]
            continue
        segment = len(lengths)
        lengths.append(node.end - start)
        parents.append(parent)
        for row in node.ended:
            ends[row] = segment
        continuing = [child for child in node.children if least[child][node.end] <= least[child][start]]
        # The last entries come first: a segment is followed by its descendants.
        stack += [(child, start, parent) for child in reversed(node.children) if child not in continuing]
        stack += [(child, node.end, segment) for child in reversed(continuing)]
    return PrefixTree(tuple(lengths), tuple(parents), tuple(ends))


def _in_row_order(tree: PrefixTree) -> PrefixTree:
    """Return the tree with its roots sorted by their first rows.

    If nothing is shared, the segments are then in the order of the rows.
    """
    root_of: list[int] = []
    for segment, parent in enumerate(tree.parents):
        root_of.append(segment if parent < 0 else root_of[parent])
    first: dict[int, int] = {}
    for row, end in enumerate(tree.ends):
        first.setdefault(root_of[end], row)
    order = sorted(range(len(root_of)), key=lambda segment: (first[root_of[segment]], segment))
    place_of = {segment: place for place, segment in enumerate(order)}
    parents = (place_of.get(tree.parents[segment], -1) for segment in order)
    return PrefixTree(
        tuple(tree.lengths[segment] for segment in order), tuple(parents), tuple(place_of[end] for end in tree.ends)
    )


@dataclass
class _Item:
    """Rows that go into the same pack, and the padded tokens of their segments below some segment."""

    size: int
    rows: list[int]


def pieces_of(tree: PrefixTree, multiple: int, capacity: int, rows_per_unit: int = 1) -> list[list[int]]:
    """Divide the rows of a tree into pieces of at most `capacity` padded tokens; each piece has a copy of its prefixes.

    From the leaves on, the branches of each segment are put into as few bins as best-fit decreasing finds; the segment
    is copied for each bin. Rows without a common segment are in different pieces, unless they are of one unit. A unit
    that does not fit with its segments padded separately is a piece of its own.

    Args:
        multiple: segments are padded to multiples of this number of tokens.
        rows_per_unit: number of neighbouring rows that must be in the same piece.

    Returns:
        The rows of each piece, ascending. The pieces are sorted by their first rows.
    """
    padded = [round_up(length, multiple) for length in tree.lengths]
    above = [0] * len(padded)
    for segment, parent in enumerate(tree.parents):
        above[segment] = above[parent] + padded[parent] if parent >= 0 else 0
    below: list[list[_Item]] = [[] for _ in range(len(padded) + 1)]  # the last entry is for all roots together
    for row, end in enumerate(tree.ends):
        below[end].append(_Item(0, [row]))
    found: list[list[int]] = []
    for segment in range(len(padded) - 1, -1, -1):
        complete, apart = _units_of(below[segment], rows_per_unit)
        room = capacity - above[segment] - padded[segment]
        found += [item.rows for item in complete if item.size > room]
        fitting = [item for item in complete if item.size <= room]
        bins = best_fit_decreasing([item.size for item in fitting], room) if fitting else []
        items = [_merged([fitting[place] for place in box]) for box in bins] + apart
        below[tree.parents[segment]] += [_Item(padded[segment] + item.size, item.rows) for item in items]
    complete, apart = _units_of(below[-1], rows_per_unit)
    assert not apart, "the rows are whole units"
    return sorted(sorted(rows) for rows in [*found, *(item.rows for item in complete)])


def _units_of(items: Sequence[_Item], rows_per_unit: int) -> tuple[list[_Item], list[_Item]]:
    """Merge the items with rows of the same unit; return items of whole units, and items of parts of a unit."""
    whole, parts = [item for item in items if len(item.rows) % rows_per_unit == 0], dict[int, list[_Item]]()
    for item in items:
        if len(item.rows) % rows_per_unit:
            parts.setdefault(item.rows[0] // rows_per_unit, []).append(item)
    apart = []
    for of_unit in parts.values():
        merged = _merged(of_unit)
        if len(merged.rows) == rows_per_unit:
            whole.append(merged)
        else:
            apart.append(merged)
    return whole, apart


def _merged(items: Sequence[_Item]) -> _Item:
    return _Item(sum(item.size for item in items), [row for item in items for row in item.rows])

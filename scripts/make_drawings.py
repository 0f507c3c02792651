"""Draw what docs/how_it_works.md shows, from the very objects that training indexes through.

python scripts/make_drawings.py
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from mcore_rl.distributed.packs import PackLayout, PrefixLayout, PrefixTree

DOCS = Path(__file__).parent.parent / "docs"
SIZE, GAP, LEFT, TOP = 18, 2, 120, 44
COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2")
PADDING, MASKED, TEXT = "#d9d9d9", "#f2f2f2", "#222222"


class Drawing:
    """Cells in rows, and texts beside them."""

    def __init__(self, title: str) -> None:
        self.parts = [text(LEFT, 24, title, weight="bold")]
        self.width, self.height = LEFT + 8 * len(title), 0

    def row(self, line: int, label: str, colors: list[str], marks: list[str] | None = None) -> None:
        y = TOP + line * (SIZE + GAP)
        self.parts.append(text(LEFT - 8, y + 13, label, anchor="end"))
        for column, color in enumerate(colors):
            x = LEFT + column * (SIZE + GAP)
            self.parts.append(f'<rect x="{x}" y="{y}" width="{SIZE}" height="{SIZE}" rx="2" fill="{color}"/>')
            if marks and marks[column]:
                self.parts.append(text(x + SIZE / 2, y + 13, marks[column], "middle", "#ffffff"))
        self.width = max(self.width, LEFT + len(colors) * (SIZE + GAP) + 20)
        self.height = max(self.height, y + SIZE + 16)

    def svg(self) -> str:
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}"'
        ground = f'<rect width="{self.width}" height="{self.height}" fill="#ffffff"/>'
        return "\n".join([f'{head} font-family="sans-serif" font-size="12">', ground, *self.parts, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, anchor: str = "start", color: str = TEXT, weight: str = "normal") -> str:
    return f'<text x="{x:g}" y="{y}" text-anchor="{anchor}" fill="{color}" font-weight="{weight}">{words}</text>'


def packing() -> Drawing:
    """The same sequences in padded rows, and in a pack."""
    lengths = (9, 3, 14, 5)
    drawing = Drawing("Four sequences in padded rows, and in one pack")
    for row, length in enumerate(lengths):
        drawing.row(row, f"row {row}", [COLORS[row]] * length + [PADDING] * (max(lengths) - length))
    layout = PackLayout.pack(lengths, total=32)
    drawing.row(5, "pack", [COLORS[s] if s < len(lengths) else PADDING for s in layout._segment_of.tolist()])
    drawing.row(6, "positions", ["#888888"] * layout.total, [str(p) for p in layout.position_ids.tolist()])
    return drawing


def context_parallel() -> Drawing:
    """Which rank holds which token of a pack, and how many keys its queries see."""
    layout = PackLayout.pack((12, 8), cp_size=2, multiple=4)
    drawing = Drawing("A pack of two sequences over two context-parallel ranks (zigzag)")
    segments, positions = layout._segment_of.tolist(), layout.position_ids.tolist()
    drawing.row(0, "sequence", [COLORS[s] for s in segments], [str(p) for p in positions])
    for rank in range(2):
        own = set(layout.local_positions(rank).tolist())
        work = sum(positions[token] + 1 for token in own)
        shown = [COLORS[s] if token in own else MASKED for token, s in enumerate(segments)]
        drawing.row(1 + rank, f"rank {rank}: {work} keys", shown)
    return drawing


def shared_prefix() -> Drawing:
    """What the queries of a pack with a shared prompt see."""
    prompt, responses = [1, 2, 3, 4, 5], ([11, 12, 13], [21, 22], [31, 32, 33])
    rows = [prompt + response for response in responses]
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    tree = PrefixTree.of_rows(ids, [len(row) for row in rows], 2)
    layout = PrefixLayout.of(tree, 1, 1)
    drawing = Drawing("One prompt, three responses: the keys that each token sees")
    segments = layout._segment_of.tolist()
    names = ["prompt", "response 1", "response 2", "response 3"]
    queries, keys, order = layout.visible_keys(0)
    line = start = 0
    for segment, (count, seen) in enumerate(zip(queries, keys, strict=True)):
        visible = order[start : start + seen].tolist()
        start += seen
        for query in range(count):
            own = set(visible[: seen - count + query + 1])
            colors = [COLORS[segments[token]] if token in own else MASKED for token in range(layout.total)]
            drawing.row(line, names[segment] if query == 0 else "", colors)
            line += 1
    return drawing


def drawings() -> Iterator[tuple[Path, str]]:
    """Files, and what is in them."""
    for draw in (packing, context_parallel, shared_prefix):
        yield DOCS / "drawings" / f"{draw.__name__}.svg", draw().svg()


if __name__ == "__main__":
    for path, svg in drawings():
        path.parent.mkdir(exist_ok=True)
        path.write_text(svg)
        print(path)

"""Draw the pictures of docs/how_it_works.md from the objects that training uses and the names in the code.

python scripts/benchmarks/make_drawings.py
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import torch

from mcore_rl.data.prefix_plan import PrefixForest
from mcore_rl.distributed.packs import PackLayout, PrefixLayout

DOCS = Path(__file__).parent.parent.parent / "docs"
SIZE, GAP, LEFT, TOP = 18, 2, 120, 44
COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2")
PADDING, MASKED, TEXT = "#d9d9d9", "#f2f2f2", "#222222"


class Drawing:
    """An SVG drawing of rows of coloured cells; a row may have a label, and a cell a mark."""

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
    """Draw the same sequences in padded rows and in a pack."""
    lengths = (9, 3, 14, 5)
    drawing = Drawing("Four sequences in padded rows, and in one pack")
    for row, length in enumerate(lengths):
        drawing.row(row, f"row {row}", [COLORS[row]] * length + [PADDING] * (max(lengths) - length))
    layout = PackLayout.pack(lengths, total=32)
    drawing.row(5, "pack", [COLORS[s] if s < len(lengths) else PADDING for s in layout._segment_of.tolist()])
    drawing.row(6, "positions", ["#888888"] * layout.total, [str(p) for p in layout.position_ids.tolist()])
    return drawing


def context_parallel() -> Drawing:
    """Draw the rank that holds each token of a pack, and the number of keys that its query sees."""
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
    """Draw the keys that each query of a pack with a shared prompt sees."""
    prompt, responses = [1, 2, 3, 4, 5], ([11, 12, 13], [21, 22], [31, 32, 33])
    rows = [prompt + response for response in responses]
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    tree = PrefixForest(ids, [len(row) for row in rows]).cheapest(range(len(rows)), lambda before, length: length + 2)
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


STEP = (
    ("batch", "SupervisedTrainer.next_batch", "algorithms/supervised.py"),
    ("", "assign_records", "data/batching.py"),
    ("reference", "DPOObjective.frozen_columns", "algorithms/dpo.py"),
    ("", "SwappedReference.logprobs", "models/policy/reference.py"),
    ("forward, backward", "MegatronPolicy.forward_backward", "models/policy/megatron_policy.py"),
    ("", "MicrobatchPlanner.microbatches", "data/batching.py"),
    ("", "run_microbatches", "models/megatron/training/forward_step.py"),
    ("", "HiddenStateGPTModel._postprocess", "models/megatron/model/gpt_model.py"),
    ("", "LogprobHead.__call__", "models/megatron/training/forward_step.py"),
    ("", "linear_logprobs", "distributed/logprobs.py"),
    ("", "DPOLossFn.from_logprobs", "losses/preference.py"),
    ("clip", "MegatronPolicy.clip_gradients", "models/policy/megatron_policy.py"),
    ("update", "MegatronPolicy.update_weights", "models/policy/megatron_policy.py"),
    ("metrics", "MicrobatchResults.metrics", "models/policy/megatron_policy.py"),
)
"""Phases of a DPO step, their calls in order, and the files of the calls."""


def step() -> Drawing:
    """Draw the calls of a DPO step, with their names in the code."""
    drawing = Drawing("SupervisedTrainer.train_step: the calls of a DPO step")
    left, color = LEFT + 30, -1
    for line, (name, call, file) in enumerate(STEP):
        assert is_defined(call, file), f"{file} does not define {call}"
        if name:
            color += 1
        y = TOP + line * 28
        drawing.parts.append(text(left - 8, y + 15, name, anchor="end", weight="bold"))
        inner = 0 if name else 24
        drawing.parts.append(
            f'<rect x="{left + inner}" y="{y}" width="280" height="22" rx="3" fill="{COLORS[color]}"/>'
        )
        drawing.parts.append(text(left + inner + 10, y + 15, call, color="#ffffff"))
        drawing.parts.append(text(left + 320, y + 15, file))
        drawing.width, drawing.height = left + 560, y + 38
    return drawing


def is_defined(name: str, file: str) -> bool:
    """Return whether a file of the package defines a function, a class, or a method of a class."""
    body: list[ast.stmt] = ast.parse((DOCS.parent / "mcore_rl" / file).read_text()).body
    for part in name.split("."):
        found = next((node for node in body if getattr(node, "name", None) == part), None)
        if found is None:
            return False
        body = getattr(found, "body", [])
    return True


def drawings() -> Iterator[tuple[Path, str]]:
    """Yield each file and its content."""
    for draw in (step, packing, context_parallel, shared_prefix):
        yield DOCS / "drawings" / f"{draw.__name__}.svg", draw().svg()


if __name__ == "__main__":
    for path, svg in drawings():
        path.parent.mkdir(exist_ok=True)
        path.write_text(svg)
        print(path)

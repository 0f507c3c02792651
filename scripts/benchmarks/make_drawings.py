"""Draw the pictures of docs/structure.md and docs/how_it_works.md.

They are drawn from the imports and names in the code, and from the objects that training uses.

python scripts/benchmarks/make_drawings.py
"""

import ast
import html
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import torch

from mcore_rl.data.prefix_plan import PrefixForest
from mcore_rl.distributed.packs import PackLayout, PrefixLayout

DOCS = Path(__file__).parent.parent.parent / "docs"
SIZE, GAP, LEFT, TOP = 18, 2, 120, 44
COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2")
PADDING, MASKED, TEXT = "#d9d9d9", "#f2f2f2", "#222222"
PACKAGE = DOCS.parent / "mcore_rl"
ROOM_WIDTH, ROOM_GAP, LEVEL_GAP, LINE, PICTURE_WIDTH = 620, 12, 18, 15, 1000


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
    look = f'text-anchor="{anchor}" fill="{color}" font-weight="{weight}"'
    return f'<text x="{x:g}" y="{y}" {look}>{html.escape(words, quote=False)}</text>'


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
    ("", "TokenStore.__getitem__", "data/token_store.py"),
    ("", "collate", "data/batching.py"),
    ("reference", "DPOObjective.frozen_columns", "algorithms/dpo.py"),
    ("", "SwappedReference.logprobs", "models/policy/reference.py"),
    ("forward, backward", "MegatronPolicy.forward_backward", "models/policy/megatron_policy.py"),
    ("", "MicrobatchPlanner.microbatches", "data/batching.py"),
    ("", "run_microbatches", "models/megatron/training/forward_step.py"),
    ("", "HiddenStateGPTModel.forward", "models/megatron/model/gpt_model.py"),
    ("", "PackLayer.forward", "models/megatron/layers/transformer_layer.py"),
    ("", "PackSelfAttention.forward", "models/megatron/attention/attention.py"),
    ("", "packed_attention", "models/megatron/kernels/packed_attention.py"),
    ("", "LossHead.__call__", "models/megatron/training/forward_step.py"),
    ("", "linear_logprobs", "distributed/logprobs.py"),
    ("", "DPOLossFn.from_logprobs", "losses/preference.py"),
    ("", "finalize_gradients", "models/megatron/training/optimizer.py"),
    ("metrics", "MicrobatchResults.metrics", "models/policy/megatron_policy.py"),
    ("clip", "MegatronPolicy.clip_gradients", "models/policy/megatron_policy.py"),
    ("update", "MegatronPolicy.update_weights", "models/policy/megatron_policy.py"),
)
"""Phases of a DPO step, the calls of each in their order, and the files of the calls."""


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


@cache
def modules() -> dict[str, ast.Module]:
    """Return the syntax trees of the package's modules by name; each file is parsed once."""
    names = {
        path: ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    return {name: ast.parse(path.read_text()) for path, name in names.items()}


def own_imports() -> dict[str, set[str]]:
    """Return the modules of this package that each module imports, also for annotations only."""
    found = {}
    for name, tree in modules().items():
        others = set[str]()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                others |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names} & modules().keys()
                others |= inner
                if len(inner) < len(node.names):  # otherwise only modules: the package itself is not used
                    others.add(node.module)
        found[name] = (others & modules().keys()) - {name}
    return found


def levels_of(room_of: Callable[[str], str | None]) -> tuple[list[list[str]], dict[str, set[str]]]:
    """Return rooms by level, from the lowest, and for each room those that it imports and reaches through no other.

    A room's level is one more than the highest level of the rooms that it imports.

    Args:
        room_of: function from a module's name to its room; None for modules that the picture leaves out.

    Raises:
        CycleError: rooms import each other in a circle.
    """
    uses: dict[str, set[str]] = {}
    for name, others in own_imports().items():
        if room := room_of(name):
            uses.setdefault(room, set()).update(other for o in others if (other := room_of(o)) and other != room)
    order, levels = TopologicalSorter(uses), list[list[str]]()
    order.prepare()
    while order.is_active():
        levels.append(sorted(order.get_ready()))
        order.done(*levels[-1])
    below: dict[str, set[str]] = {}
    for room in (room for level in levels for room in level):
        below[room] = uses[room].union(*(below[other] for other in uses[room]))
    direct = {room: others - set[str]().union(*(below[o] for o in others)) for room, others in uses.items()}
    return levels, direct


def tower(title: str, room_of: Callable[[str], str | None]) -> Drawing:
    """Draw rooms as boxes, each above those that it imports, with the first sentence of its docstring and its files."""
    levels, direct = levels_of(room_of)
    drawing, places, boxes, y = Drawing(title), dict[str, tuple[float, int, int]](), list[str](), TOP
    for level in reversed(levels):
        width = min(ROOM_WIDTH, PICTURE_WIDTH // len(level) - ROOM_GAP)
        lines = {
            room: wrapped(summary_of(room), width, TEXT) + wrapped(files_of(room), width, "#6b7785") for room in level
        }
        height = LINE * max(map(len, lines.values())) + 30
        left = PICTURE_WIDTH / 2 - (len(level) * (width + ROOM_GAP) - ROOM_GAP) / 2
        for number, room in enumerate(level):
            x = left + number * (width + ROOM_GAP)
            places[room] = x + width / 2, y, y + height
            size = f'width="{width}" height="{height}"'
            boxes.append(f'<rect x="{x:g}" y="{y}" {size} rx="4" fill="#eaf1f8" stroke="{COLORS[0]}"/>')
            boxes.append(text(x + 8, y + 18, room.removeprefix("models/megatron/"), weight="bold"))
            boxes += [text(x + 8, y + 36 + LINE * n, line, color=color) for n, (line, color) in enumerate(lines[room])]
        y += height + LEVEL_GAP
    height_of = {room: number for number, level in enumerate(levels) for room in level}
    for room, others in direct.items():
        for other in sorted(others):
            (x1, top, y1), (x2, y2, _) = places[room], places[other]
            points = [(x1, y1), (x2, y2)]
            if height_of[room] - height_of[other] > 1:  # around the levels between them
                side, turn = (PICTURE_WIDTH + ROOM_WIDTH) / 2 + ROOM_GAP, y2 - LEVEL_GAP / 2
                points = [(x1, (top + y1) / 2), (side, (top + y1) / 2), (side, turn), (x2, turn), (x2, y2)]
            line = " ".join(f"{x:g},{y:g}" for x, y in points)
            drawing.parts.append(f'<polyline points="{line}" fill="none" stroke="#9aa5b1"/>')
    drawing.parts += boxes
    drawing.width, drawing.height = PICTURE_WIDTH, y
    return drawing


def summary_of(room: str) -> str:
    """Return the first sentence of a room's docstring, without its full stop."""
    docstring = ast.get_docstring(modules()[f"mcore_rl.{room.replace('/', '.')}"]) or ""
    return docstring.split("\n\n")[0].replace("\n", " ").split(". ")[0].removesuffix(".").replace("`", "")


def wrapped(words: str, width: float, color: str) -> list[tuple[str, str]]:
    """Return lines of a text that fit a box of this width, each with its colour."""
    return [(line, color) for line in textwrap.wrap(words, int((width - 16) / 7), break_long_words=False)]


def files_of(room: str) -> str:
    """Return the names of a room's files and of its folders, which have a slash."""
    inside = sorted((PACKAGE / room).iterdir()) if (PACKAGE / room).is_dir() else []
    folders = [f"{path.name}/" for path in inside if (path / "__init__.py").is_file()]
    return ", ".join([*(path.stem for path in inside if path.suffix == ".py" and path.stem != "__init__"), *folders])


def package_room(module: str) -> str | None:
    """Return the room of a module in the picture of the package.

    None for packages that are only folders, and for `compat`, whose modules are parts of those that have their names.
    """
    parts = module.split(".")[1:]
    if not parts or parts in (["models"], ["__main__"]) or parts[0] == "compat":
        return None
    return "/".join(parts[:2] if parts[0] == "models" else parts[:1])


def megatron_room(module: str) -> str | None:
    """Return the room of a module of `models/megatron` in that folder's picture."""
    parts = module.removeprefix("mcore_rl.models.megatron").split(".")[1:]
    return f"models/megatron/{parts[0]}" if parts and module.startswith("mcore_rl.models.megatron") else None


def package() -> Drawing:
    """Draw the rooms of the package."""
    return tower("mcore_rl: each room imports only from rooms below it", package_room)


def megatron() -> Drawing:
    """Draw the rooms of models/megatron."""
    return tower("mcore_rl/models/megatron: each room imports only from rooms below it", megatron_room)


def drawings() -> Iterator[tuple[Path, str]]:
    """Yield each file and its content."""
    for draw in (package, megatron, step, packing, context_parallel, shared_prefix):
        yield DOCS / "drawings" / f"{draw.__name__}.svg", draw().svg()


if __name__ == "__main__":
    for path, svg in drawings():
        path.parent.mkdir(exist_ok=True)
        path.write_text(svg)
        print(path)

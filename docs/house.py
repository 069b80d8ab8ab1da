"""Draws the packages of ampx floor by floor: docs/images/house.png.

    python docs/house.py [--figures] [FILE]

A room is a package or module of the top level. It stands one floor above the highest room that it
imports from, so every arrow points down; a circle would be an error. Arrows that a longer way
implies are left out, as an org chart leaves out the boss's boss. With `--figures` nothing is drawn,
and the counts are printed.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "ampx"
FACE = "__init__"  # ampx itself, which imports the public names and defines nothing
Graph = dict[str, set[str]]

# The way of one gradient through a step, in the order in which its rooms are entered.
WAY = (
    ("training", "train_step takes the state and a batch"),
    (
        "precision",
        "parameters are cast as the policy says, or autocast\n"
        "decides for each operation (autocasting/)",
    ),
    (
        "accumulation",
        "the loss of a micro-batch times the loss scale is\n"
        "differentiated; gradients are summed in float32\n"
        "(pipelining/ where the model is cut into stages)",
    ),
    (
        "loss_scaling",
        "infinities and NaN are counted in this device's\n"
        "gradients: the verdict, agreed on by all devices",
    ),
    ("flat_buffers", "leaves are packed into buckets"),
    ("data_parallel", "each bucket is summed over the devices"),
    ("updates", "one factor unscales and clips"),
    (
        "fused",
        "the optimizer makes the new parameter (or optax does);\n"
        "if the verdict was bad, everything keeps its old value",
    ),
    ("param_storage", "the parameter is stored, perhaps in half precision"),
    ("loss_scaling", "only now does the loss scale move"),
    ("training", "the step returns the new state and a report"),
)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(SOURCES.rglob("*.py"))}


def imported(path: Path) -> Iterator[str]:
    """The modules of ampx that a file imports, in functions too, but not for types alone."""
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ampx":
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in FILES else node.module for name in names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in FILES)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            nodes.extend(node.orelse)
        else:
            nodes.extend(ast.iter_child_nodes(node))


def file_graph() -> Graph:
    return {name: set(imported(path)) - {name} for name, path in FILES.items()}


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else FACE


def room_graph(files: Graph) -> Graph:
    """Imports between rooms; the face, which re-exports public names, is a room of its own."""
    rooms: Graph = {room_of(module): set() for module in files}
    for module, others in files.items():
        own = room_of(module)
        rooms[own] |= {room_of(other) for other in others} - {own}
    return rooms


def levels(graph: Graph) -> dict[str, int]:
    """The floor of each node: 1 above the highest node that it imports.

    Raises:
      graphlib.CycleError: where imports form a circle.
    """
    level: dict[str, int] = {}
    for node in TopologicalSorter(graph).static_order():
        level[node] = 1 + max((level[other] for other in graph[node]), default=0)
    return level


def without_implied(graph: Graph) -> Graph:
    """The arrows that no longer way implies (the transitive reduction)."""
    reached: Graph = {}
    kept: Graph = {}
    for node in TopologicalSorter(graph).static_order():
        beyond = set().union(*(reached[other] for other in graph[node]), set())
        kept[node] = graph[node] - beyond
        reached[node] = graph[node] | beyond
    return kept


def summary(room: str) -> tuple[str, int]:
    """What a room says of itself in its first line, and its lines."""
    paths = [path for name, path in FILES.items() if room_of(name) == room]
    own = SOURCES / "__init__.py" if room == FACE else SOURCES / room / "__init__.py"
    own = own if own.exists() else SOURCES / f"{room}.py"
    doc = ast.get_docstring(ast.parse(own.read_text())) or ""
    return doc.split("\n")[0], sum(len(path.read_text().splitlines()) for path in paths)


def figures() -> str:
    files = file_graph()
    rooms = room_graph(files)
    rows = {
        "files": len(files),
        "imports between files": sum(map(len, files.values())),
        "longest chain of imports": max(levels(files).values()),
        "rooms": len(rooms),
        "floors": max(levels(rooms).values()),
        "imports between rooms": sum(map(len, rooms.values())),
    }
    return "\n".join(f"{name:26}{number:5}" for name, number in rows.items())


def draw(target: Path) -> None:
    import textwrap

    import matplotlib.pyplot as plt
    from matplotlib.patches import FancyBboxPatch

    rooms = room_graph(file_graph())
    level = levels(rooms)
    arrows = without_implied(rooms)
    height = max(level.values())
    floors = [sorted(r for r in rooms if level[r] == f) for f in range(height, 0, -1)]
    # Within a floor, rooms stand near the middle of what they import: fewer arrows cross.
    width, tall, gap = 2.9, 0.86, 0.3
    step = 1.42
    widest = max(map(len, floors))
    place = {}
    for _ in range(6):
        for row, floor in enumerate(floors):
            pulls = {
                room: [
                    place[other][0]
                    for other in place
                    if other != room and (other in rooms[room] or room in rooms[other])
                ]
                for room in floor
            }
            floor.sort(key=lambda room, p=pulls: sum(p[room]) / len(p[room]) if p[room] else 0)
            start = -(len(floor) - 1) / 2
            for column, room in enumerate(floor):
                place[room] = ((start + column) * (width + gap), -row * step)
    figure, axes = plt.subplots(figsize=(widest * 2.35, height * 1.12), layout="constrained")
    for room, (x, y) in place.items():
        text, lines = summary(room)
        title = "ampx (the face)" if room == FACE else room
        title += "/" if (SOURCES / room).is_dir() else ""
        box = FancyBboxPatch(
            (x - width / 2, y - tall / 2),
            width,
            tall,
            boxstyle="round,pad=0,rounding_size=0.08",
            facecolor="#E8F1F8" if (SOURCES / room).is_dir() or room == FACE else "#F5F5F0",
            edgecolor="#33516B",
            linewidth=0.9,
            zorder=2,
        )
        axes.add_patch(box)
        left = x - width / 2 + 0.08
        axes.text(left, y + 0.27, title, fontsize=9.5, weight="bold", va="center", zorder=3)
        axes.text(
            x + width / 2 - 0.08, y + 0.27, f"{lines:,}", fontsize=7.5, color="#667", va="center",
            ha="right", zorder=3,
        )  # fmt: skip
        body = textwrap.shorten(text.replace("`", ""), 118, placeholder=" …")
        axes.text(
            left, y + 0.12, textwrap.fill(body, 36), fontsize=7, color="#334", va="top",
            linespacing=1.15, zorder=3,
        )  # fmt: skip
    for room, others in arrows.items():
        for other in others:
            (x0, y0), (x1, y1) = place[room], place[other]
            axes.annotate(
                "",
                xy=(x1, y1 + tall / 2),
                xytext=(x0, y0 - tall / 2),
                arrowprops={"arrowstyle": "-|>", "color": "#8899A6", "linewidth": 0.9},
                zorder=1,
            )
    stops: dict[str, list[str]] = {}
    for number, (room, _) in enumerate(WAY, 1):
        stops.setdefault(room, []).append(str(number))
    for room, numbers in stops.items():
        x, y = place[room]
        disc = {"boxstyle": "circle,pad=0.22", "facecolor": "#D55E00", "edgecolor": "white"}
        for shift, number in enumerate(reversed(numbers)):
            at = (x + width / 2 - 0.2 - 0.42 * shift, y + tall / 2 + 0.04)
            axes.text(*at, number, fontsize=8, color="white", weight="bold", bbox=disc, zorder=4)
    half = widest * (width + gap) / 2
    title = {"fontsize": 10, "weight": "bold", "color": "#D55E00", "va": "top"}
    axes.text(-half - 0.1, tall / 2, "The way of one gradient", **title)
    axes.text(half * 0.34, tall / 2, "(it goes on)", **title)
    middle = 6
    for first, last, x in ((0, middle, -half - 0.1), (middle, len(WAY), half * 0.34)):
        rows = [
            f"{number:>2}  " + text.replace("\n", "\n      ")
            for number, (_, text) in enumerate(WAY[first:last], first + 1)
        ]
        axes.text(x, tall / 2 - 0.3, "\n".join(rows), fontsize=8, va="top", linespacing=1.35)
    for row in range(height):
        axes.text(
            -half - 0.35, -row * step, str(height - row), fontsize=11, color="#99A", ha="right",
            va="center",
        )  # fmt: skip
    axes.set_xlim(-half - 0.7, half)
    axes.set_ylim(-(height - 1) * step - tall / 2 - 0.1, tall / 2 + 0.1)
    axes.axis("off")
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figures", action="store_true", help="print counts instead of drawing")
    parser.add_argument("file", nargs="?", type=Path, default=ROOT / "docs/images/house.png")
    options = parser.parse_args()
    if options.figures:
        print(figures())
    else:
        draw(options.file)

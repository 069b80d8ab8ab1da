"""Draws when the phases of a training step run, as a profiler saw them: docs/images/phases.png.

    python docs/phases.py [FILE]

A profiler knows instructions of the compiled program by name, such as `fusion.12`. The program says
for each in which name scopes it was written, and ampx's scopes are the phases of a step. So one is
looked up in the other; a profiler with a window, such as XProf, does the same.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax

import ampx

WIDTH, LAYERS, ROWS, MICROBATCHES = 512, 4, 64, 4
ROWS_OF_PICTURE = ("forward", "backward", "ampx.verdict", "ampx.update")


class Work(NamedTuple):
    """What one instruction did: its phase, and when it began and how long it took, in ms."""

    phase: str
    begin: float
    length: float


def make_step() -> tuple[jax.stages.Compiled, ampx.TrainState, jax.Array]:
    """A compiled step of a network in four micro-batches, its state and a batch."""

    def loss_fn(params: list[jax.Array], x: jax.Array) -> jax.Array:
        for weight in params:
            x = jnp.tanh(x @ weight)
        return jnp.mean(x**2)

    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    params = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys[1:]]
    batch = jax.random.normal(keys[0], (ROWS * MICROBATCHES, WIDTH))
    step = ampx.train_step(
        loss_fn, optax.adamw(1e-3), loss_scale="dynamic", num_microbatches=MICROBATCHES
    )
    state = step.init(params)
    return jax.jit(step, donate_argnums=0).lower(state, batch).compile(), state, batch


def find_phases(program: str) -> dict[str, str]:
    """From the names of instructions to the phases that they are of."""
    phases = {}
    for name, scopes in re.findall(r"%?([\w.\-]+) = .*op_name=\"([^\"]*)\"", program):
        found = re.findall(r"ampx\.\w+", scopes)
        if "ampx.micro_batch" in found:
            phases[name] = "backward" if "transpose(" in scopes else "forward"
        elif found:
            phases[name] = found[-1]
    return phases


def trace_step(compiled: jax.stages.Compiled, state: ampx.TrainState, batch: jax.Array) -> Path:
    """Profiles one step, and gives the file of the trace."""
    state, _ = compiled(state, batch)
    jax.block_until_ready(state)
    folder = tempfile.mkdtemp()
    with jax.profiler.trace(folder):
        jax.block_until_ready(compiled(state, batch))
    return next(Path(folder).rglob("*.xplane.pb"))


def read_work(trace: Path, phases: dict[str, str]) -> Iterator[Work]:
    """The instructions of a trace that are of a phase."""
    for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
        for line in plane.lines:
            for event in line.events:
                if event.name in phases:
                    yield Work(phases[event.name], event.start_ns / 1e6, event.duration_ns / 1e6)


def draw(work: list[Work], path: Path) -> None:
    """Draws a row for each phase, from the first instruction on."""
    start = min(each.begin for each in work if each.phase == "forward")
    figure, axes = plt.subplots(figsize=(8, 2.6), layout="constrained")
    for row, phase in enumerate(ROWS_OF_PICTURE):
        own = [
            (each.begin - start, each.length)
            for each in work
            if each.phase == phase and each.begin >= start
        ]
        axes.broken_barh(own, (row - 0.35, 0.7), facecolors=f"C{row}")
    axes.set_yticks(range(len(ROWS_OF_PICTURE)), ROWS_OF_PICTURE)
    axes.invert_yaxis()
    axes.set_xlabel("ms since the step began")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(__file__).parent / "images/phases.png"
    parser.add_argument("file", nargs="?", type=Path, default=default)
    args = parser.parse_args()
    compiled, state, batch = make_step()
    phases = find_phases(compiled.as_text() or "")
    draw(list(read_work(trace_step(compiled, state, batch), phases)), args.file)

"""Is a product in float8 one on this GPU, and is it faster than in bfloat16? `make bench-float8`.

A square product and its two gradients run in bfloat16 and in each recipe of `autocast(dots=...)`,
side by side. Flags are XLA's defaults, so on a GPU it measures its kernels and takes the fastest;
whether that one multiplies in float8 only a profile tells. So each program is profiled, and its
longest kernels are listed with the share of time that kernels of a float8 name take. Names are
those of NVIDIA's libraries: `e4m3`, `e5m2`, `f8`, and `qq` in `nvjet_qq...`. A kernel that Triton
made has no dtype in its name: look for `e4m3` in the PTX that
`XLA_FLAGS=--xla_dump_to=FOLDER` writes.

No claim of speed should be made before this has shown, at 4096 or more, a float8 kernel and a ratio
below 1.
"""

from __future__ import annotations

import argparse
import collections
import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import ampx
from benchmarks.measuring import Candidate, print_table, ratio, take_turns

RECIPES = (None, "rowwise", "tensorwise", "rowwise_half_dw", "mxfp8")
HEADER = ["size", "dots", "ms", "ratio to bfloat16", "time in float8 kernels", "longest kernels"]
_FLOAT8 = re.compile(r"e4m3|e5m2|(?<![a-z])f(?:p|loat)?8|nvjet_\w*qq", re.IGNORECASE)
_SHOWN = 3  # kernels of a program


class Kernels(NamedTuple):
    """What ran in one call of a program.

    Attributes:
      seconds: from the name of a kernel to the time it took.
    """

    seconds: dict[str, float]

    @property
    def longest(self) -> list[str]:
        """The names of those that took longest, first the longest."""
        return sorted(self.seconds, key=lambda name: -self.seconds[name])[:_SHOWN]

    @property
    def float8_share(self) -> float:
        """The share of the time that kernels with the name of a float8 format took."""
        named = sum(took for name, took in self.seconds.items() if _FLOAT8.search(name))
        return named / max(sum(self.seconds.values()), 1e-30)


def make_candidates(size: int) -> list[Candidate]:
    """Programs of a product of size x size x size and its gradients, in each recipe."""
    x, weight, cotangent = (
        jax.random.normal(key, (size, size)) for key in jax.random.split(jax.random.key(0), 3)
    )

    def product(weight: jax.Array, x: jax.Array) -> jax.Array:
        return x @ weight

    candidates = []
    for recipe in RECIPES:
        fun = ampx.autocast(product, dots=recipe)

        # The last gradients are donated, so that none is allocated anew.
        def step(last: Any, weight: jax.Array, x: jax.Array, g: jax.Array, fun: Any = fun) -> Any:
            y, pull = jax.vjp(fun, weight, x)
            return pull(g.astype(y.dtype))

        name = "bfloat16" if recipe is None else recipe
        state = (jnp.zeros_like(weight), jnp.zeros_like(x))
        candidates.append(Candidate.compiled(name, step, state, weight, x, cotangent))
    return candidates


def profile(candidate: Candidate) -> Kernels:
    """Runs a program once under the profiler."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            candidate.run_once()
        candidate.seconds.pop()
        (trace,) = Path(folder).rglob("*.xplane.pb")
        return read_kernels(trace, candidate.step.as_text())


def read_kernels(trace: Path, program: str) -> Kernels:
    """The kernels of a trace; without a GPU the instructions of the compiled program."""
    data = jax.profiler.ProfileData.from_file(str(trace))
    planes = list(data.planes)
    instructions = set(re.findall(r"%?([\w.\-]+) = ", program))
    on_gpu = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    seconds: dict[str, float] = collections.defaultdict(float)
    for plane in on_gpu or planes:
        for line in plane.lines:
            # Lines of a GPU other than its streams tell the same work again, by module and scope.
            if on_gpu and not line.name.startswith("Stream"):
                continue
            for event in line.events:
                if on_gpu or event.name in instructions:
                    seconds[event.name] += event.duration_ns / 1e9
    return Kernels(dict(seconds))


def measure(size: int, rounds: int) -> list[list[str]]:
    """Rows of the table for one size."""
    candidates = make_candidates(size)
    take_turns(candidates, rounds)
    baseline, rows = candidates[0], []
    for candidate in candidates:
        kernels = profile(candidate)
        names = ", ".join(f"`{name[:48]}`" for name in kernels.longest)
        share = f"{kernels.float8_share:.0%}"
        time = f"{candidate.median_ms:.3f}"
        rows.append([str(size), candidate.name, time, ratio(candidate, baseline), share, names])
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Prints a table of the sizes that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.float8", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--rounds", type=int, default=20, help="rounds of side-by-side timing")
    given = parser.parse_args(arguments)
    (device, *_) = jax.devices()
    rows = [row for size in given.sizes for row in measure(size, given.rounds)]
    title = f"Products in float8 and their gradients on {device.device_kind}, jax {jax.__version__}"
    print_table(title, HEADER, rows)
    if device.platform != "gpu":
        print("\nThis is no GPU: float8 is emulated here, and these times say nothing of one.")


if __name__ == "__main__":
    main()

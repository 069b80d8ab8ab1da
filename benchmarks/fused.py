"""How fast is everything after the gradients, by `ampx.fused`, by optax, by hand and by torch?

That part of a step, its *tail*, is: unscale, check, clip, AdamW with decay, keep or skip. The
tables time it for few large and for many small arrays. Each is arithmetic of a few operations per
number, so what counts is how often each number goes through memory.

`make bench ARGS=fused` makes all tables, those of `fused_traffic` and `flat` included. `python -m
benchmarks.fused --help` tells how to run one size, or with everything. `make gpu` is for GPUs.

How to read: a ratio below 1 is faster than the named candidate. "Of copy bandwidth" is 1 where the
work moves the fewest bytes that it needs, as fast as a plain copy moves them.
"""

import argparse
import dataclasses
import functools
import os
import platform
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ampx
from ampx.updates.clipping import clipped
from benchmarks.flat import flat_tail
from benchmarks.fused_traffic import FLOORS, by_apply, by_update, traffic_table
from benchmarks.measuring import (
    Candidate,
    measure_compilation,
    print_table,
    ratio,
    take_turns,
    trace_and_compile,
)
from benchmarks.torch_updates import torch, torch_candidates

SCALE, RATE, DECAY, MAX_NORM = 1024.0, 1e-3, 0.1, 1.0
# What other candidates are compared with; the last one measures the bandwidth of memory.
NAIVE, BASELINE, COPY = "naive AMP", "optax, clip + AdamW", "in-place scale of the parameters"
TORCH = "torch, check + clip + fused AdamW"
IN_ONE_BUFFER = "the same, `fused.adamw` of `fused.flatten`"
# With hundreds of leaves XLA:CPU takes minutes to compile these, so large tables leave them out.
SLOW_TO_COMPILE = (NAIVE, "`dynamic_loss_scale` of optax, clip + AdamW")
ENOUGH_LEAVES = 100


@dataclasses.dataclass(frozen=True)
class Size:
    """Parameters and gradients of a table.

    Attributes:
      leaves: how many arrays there are.
      leaf: elements of each.
      grad_dtype: parameters are float32, gradients may be bfloat16.
    """

    leaves: int
    leaf: int
    grad_dtype: Any = jnp.float32

    @property
    def elements(self) -> int:
        return self.leaves * self.leaf

    @property
    def title(self) -> str:
        return f"{self.leaves:,} x {self.leaf:,}, gradients in {np.dtype(self.grad_dtype).name}"

    def params(self) -> list[jax.Array]:
        return [jnp.full(self.leaf, 0.1) for _ in range(self.leaves)]

    def grads(self) -> list[jax.Array]:
        return [jnp.full(self.leaf, 1e-3 * SCALE, self.grad_dtype) for _ in range(self.leaves)]


SIZES = (
    Size(1, 50_000_000),
    Size(100, 500_000),
    Size(400, 125_000),
    Size(2000, 5000),
    Size(1, 50_000_000, jnp.bfloat16),
)
SIZE_OF_OPTIMIZERS = Size(16, 1_000_000)


# --- candidates ----------------------------------------------------------------------------------


def _scaled(tx: Any) -> Any:
    return ampx.dynamic_loss_scale(tx, init_scale=SCALE)


def _in_float32(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step behind a cast of its gradients, since optax's own steps expect float32."""
    return lambda state, grads: step(state, [g.astype(jnp.float32) for g in grads])


def _naive(tx: Any) -> Callable[..., Any]:
    """What one writes by hand: check all, update all, then choose between old and new."""

    def step(state, grads):
        params, opt_state = state
        grads = [g.astype(jnp.float32) / SCALE for g in grads]
        is_finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in grads]))
        updates, new_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_state
        # Here the old and the new state are both needed, whole.
        return jax.tree.map(lambda a, b: jnp.where(is_finite, a, b), new, state)

    return step


def _scale_in_place(state, grads):
    """Reads and writes each parameter once, 8 bytes: the measure of memory bandwidth."""
    params, opt_state = state
    return [0.999 * p for p in params], opt_state


def _steps() -> dict[str, tuple[Callable[..., Any], Any]]:
    """The candidates by name: each a step `(state, grads) -> state` and its optimizer."""
    adamw = optax.adamw(RATE, weight_decay=DECAY)
    chain = optax.chain(optax.clip_by_global_norm(MAX_NORM), adamw)
    ours = ampx.fused.adamw(RATE, weight_decay=DECAY)
    by_face = _scaled(clipped(ours, MAX_NORM))
    # optax's own way to skip, and ampx's loss scale around optax's optimizers, not fused.
    guarded, wrapped = optax.apply_if_finite(chain, 5), _scaled(chain)
    return {
        "`fused.apply`, scale + clip + AdamW": (by_apply(_scaled(ours), MAX_NORM), _scaled(ours)),
        "the same by `update`": (by_update(by_face), by_face),
        "`fused.apply`, AdamW alone": (by_apply(ours), ours),
        BASELINE: (_in_float32(by_update(chain)), chain),
        "optax, AdamW alone": (_in_float32(by_update(adamw)), adamw),
        "`optax.apply_if_finite`": (_in_float32(by_update(guarded)), guarded),
        SLOW_TO_COMPILE[1]: (by_update(wrapped), wrapped),
        NAIVE: (_naive(chain), chain),
        COPY: (_scale_in_place, optax.identity()),
    }


def _compiled(size: Size, steps: dict[str, Any]) -> list[Candidate]:
    candidates, grads = [], size.grads()
    for name, (step, tx) in steps.items():
        params = size.params()
        candidates.append(Candidate.compiled(name, step, (params, tx.init(params)), grads))
    return candidates


# --- tables --------------------------------------------------------------------------------------


def tail(size: Size, rounds: int, everything: bool = False) -> None:
    """Times all candidates on parameters of one size.

    Args:
      size: of parameters and gradients.
      rounds: of side-by-side timing.
      everything: also those that take minutes to compile.
    """
    steps = _steps()
    if size.leaves > ENOUGH_LEAVES and not everything:
        steps = {name: step for name, step in steps.items() if name not in SLOW_TO_COMPILE}
    candidates = _compiled(size, steps)
    has_torch = torch is not None and size.grad_dtype == jnp.float32
    shapes = [(size.leaf,)] * size.leaves
    candidates += torch_candidates(shapes) if has_torch else []
    take_turns(candidates, rounds)
    by_name = {candidate.name: candidate for candidate in candidates}
    rows = [_row(candidate, by_name, size) for candidate in candidates]
    if torch is None:
        rows.append([TORCH, "not measured", *["–"] * 6])
    header = ["step", "ms, best / median", "ratio to naive AMP", "ratio to clip + AdamW"]
    header += ["ratio to torch", "of copy bandwidth", "temporary B a parameter", "compile, s"]
    print_table(f"Tail of a step, {size.title}", header, rows)


def _row(candidate: Candidate, by_name: dict[str, Candidate], size: Size) -> list[str]:
    def against(name: str) -> str:
        return ratio(candidate, by_name[name]) if name in by_name else "–"

    is_jax = candidate.data != ()
    return [
        candidate.name,
        f"{1e3 * min(candidate.seconds):.1f} / {candidate.median_ms:.1f}",
        against(NAIVE),
        against(BASELINE),
        against(TORCH),
        f"{_bandwidth_share(candidate, by_name[COPY], size):.2f}",
        f"{candidate.temp_bytes / size.elements:.2f}" if is_jax else "–",
        f"{candidate.compile_seconds:.1f}" if is_jax else "–",
    ]


def _bandwidth_share(candidate: Candidate, copy: Candidate, size: Size) -> float:
    """The time that the fewest possible bytes take at a copy's bandwidth, over the time taken."""
    floor, _ = FLOORS["AdamW" if "alone" in candidate.name else "AdamW, clipped"]
    halves = np.dtype(size.grad_dtype).itemsize == 2
    passes = 1 if "alone" in candidate.name else 2  # over gradients
    # Floors are for float32 gradients: half ones save 2 bytes in each pass. A copy moves 8 bytes.
    floor = 8 if candidate is copy else floor - 2 * passes * halves
    pairs = zip(candidate.seconds, copy.seconds, strict=True)
    return statistics.median(floor / 8 * theirs / ours for ours, theirs in pairs)


def _pack(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step of flat parameters that is given the gradients of a tree."""
    return lambda state, grads: step(state, state[0].like(grads))


def compiling(rounds: int) -> None:
    """Prints how long tails of few and of many leaves take to trace and to compile.

    `fused.apply` is measured with a loss scale, and without: then it does what optax's chain does
    and no more, since there is no verdict and no skip. Rules derived by `fuse` have a scale, too,
    and so have parameters in one buffer, into which the step packs its gradients.
    """
    adamw = optax.adamw(RATE, weight_decay=DECAY)
    chain = optax.chain(optax.clip_by_global_norm(MAX_NORM), adamw)
    ours = ampx.fused.adamw(RATE, weight_decay=DECAY)
    guarded, derived = optax.apply_if_finite(chain, 5), _scaled(ampx.fused.fuse(adamw))
    steps = {
        BASELINE: (by_update(chain), chain),
        "`optax.apply_if_finite`": (by_update(guarded), guarded),
        "`dynamic_loss_scale` of it": (by_update(_scaled(chain)), _scaled(chain)),
        "`fused.apply`, clip + AdamW": (by_apply(ours, MAX_NORM), ours),
        "`fused.apply`, scale + clip + AdamW": (by_apply(_scaled(ours), MAX_NORM), _scaled(ours)),
        "the same, `fuse` of optax's AdamW": (by_apply(derived, MAX_NORM), derived),
        IN_ONE_BUFFER: (_pack(by_apply(_scaled(ours), MAX_NORM)), _scaled(ours)),
    }
    rows = []
    for leaves in (100, 400, 2000):
        grads = [jax.ShapeDtypeStruct((5000,), jnp.float32)] * leaves
        measures = {}
        for name, (step, tx) in steps.items():
            params = jax.eval_shape(ampx.fused.flatten, grads) if name == IN_ONE_BUFFER else grads
            state = params, jax.eval_shape(tx.init, params)
            measures[name] = functools.partial(
                trace_and_compile, step, state, grads, donate_argnums=0
            )
        # With many leaves a compilation is long, and noise is a smaller part of it.
        seconds = measure_compilation(measures, max(2, min(rounds, 2000 // leaves)))
        for name, own in seconds.items():
            times = (f"{s:.2f}" for s in np.median(own, 0))
            total = np.median(own[:, 2] / seconds[BASELINE][:, 2])
            rows.append([f"{leaves:,} leaves, {name}", *times, f"{total:.2f}"])
    header = ["step", "trace, CPU-s", "compile, CPU-s", "both, CPU-s", "both: ratio to optax's"]
    print_table("Trace and compile of a tail", header, rows)


def optimizers(rounds: int) -> None:
    """Times `fused.apply` with a loss scale and a clip beside optax's chain without the scale."""
    makes = {
        "SGD, momentum": lambda kind: kind.sgd(RATE, momentum=0.9),
        "Lion": lambda kind: kind.lion(RATE),
        "Adadelta": lambda kind: kind.adadelta(RATE),
        "AdamW": lambda kind: kind.adamw(RATE),
        "LAMB": lambda kind: kind.lamb(RATE),
    }
    rows = []
    for name, make in makes.items():
        ours = _scaled(make(ampx.fused))
        theirs = optax.chain(optax.clip_by_global_norm(MAX_NORM), make(optax))
        steps = {"ours": (by_apply(ours, MAX_NORM), ours), "theirs": (by_update(theirs), theirs)}
        mine, other = _compiled(SIZE_OF_OPTIMIZERS, steps)
        take_turns([mine, other], rounds)
        times = [f"{1e3 * min(c.seconds):.1f} / {c.median_ms:.1f}" for c in (mine, other)]
        temporaries = [f"{c.temp_bytes / SIZE_OF_OPTIMIZERS.elements:.2f}" for c in (mine, other)]
        rows.append([name, *times, ratio(mine, other), " / ".join(temporaries)])
    print_table(
        f"Other optimizers, {SIZE_OF_OPTIMIZERS.title}",
        [
            "optimizer",
            "`fused.apply`, scale + clip: ms, best / median",
            "optax, clip: ms, best / median",
            "ratio",
            "temporary B a parameter: ours / optax",
        ],
        rows,
    )


def fused(rounds: int) -> None:
    """Prints all tables."""
    traffic_table()
    for size in SIZES:
        tail(size, rounds)
    optimizers(rounds)
    flat_tail(rounds=rounds)


def main() -> None:
    """One size."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fused")
    parser.add_argument("--rounds", type=int, default=12, help="rounds of side-by-side timing")
    parser.add_argument("--leaves", type=int, default=1)
    parser.add_argument("--leaf", type=int, default=50_000_000, help="elements of each")
    parser.add_argument("--half", action="store_true", help="gradients in bfloat16")
    parser.add_argument(
        "--everything", action="store_true", help="also what takes minutes to compile"
    )
    arguments = parser.parse_args()
    device = jax.devices()[0].device_kind
    versions = f"jax {jax.__version__}, optax {optax.__version__}"
    versions += f", torch {torch.__version__}" if torch else ""
    print(f"{versions}, Python {platform.python_version()}, {device}, {os.cpu_count()} cores")
    dtype = jnp.bfloat16 if arguments.half else jnp.float32
    tail(Size(arguments.leaves, arguments.leaf, dtype), arguments.rounds, arguments.everything)


if __name__ == "__main__":
    main()

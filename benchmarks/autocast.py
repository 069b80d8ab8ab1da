"""How exact, how large and how fast are models under autocast, beside casts by hand?

The models of `zoo` and `zoo_flax` run in four ways: in float32, under `ampx.autocast`, cast
by hand as an expert does it, and cast at the boundary (parameters and inputs, nothing else) as
jmp does.

Run `make bench ARGS=autocast`. Errors are relative to float32: smaller is better. In "conversions"
and "residuals" the numbers of autocast should be near those by hand; ratios below 1 are faster.
"""

import contextlib
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ampx
from ampx.jaxprs import reading
from ampx.jaxprs.folds import equations_inside
from benchmarks.measuring import (
    Candidate,
    measure_compilation,
    print_table,
    ratio,
    take_turns,
    trace_and_compile,
)
from benchmarks.zoo import Loss, Model, transformer
from benchmarks.zoo_flax import decoder, models, perceptron

HALVES = (jnp.bfloat16, jnp.float16)
PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
# Without a scale small gradients are zero in float16. Dividing by a power of two is exact.
FLOAT16_SCALE = 2.0**10
# The event that JAX records for every program that XLA compiles.
BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"


def variants(model: Model, half: Any) -> dict[str, Loss]:
    """The three ways to half precision that are compared, by name."""
    return {
        "autocast": ampx.autocast(model.loss, half_dtype=half),
        "by hand": model.hand_cast(half),
        "boundary": model.boundary(half),
    }


def _compared(model: Model) -> dict[str, Loss]:
    """The ways that are compared in speed and structure.

    Casts at the boundary are left out: what they save, they pay for in accuracy.
    """
    ways = variants(model, jnp.bfloat16)
    return {"float32": model.loss, "autocast": ways["autocast"], "by hand": ways["by hand"]}


# --- measures ------------------------------------------------------------------------------------


def value_and_grads(loss: Loss, scale: float = 1.0) -> Callable[..., tuple[Any, Any, Any]]:
    """A function for loss, new state and gradients; the gradients are divided by `scale` again."""

    def run(params: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
        def scaled(params: Any) -> tuple[jax.Array, tuple[jax.Array, Any]]:
            value, new_state = loss(params, state, batch)
            return scale * value, (value, new_state)

        grads, (value, new_state) = jax.grad(scaled, has_aux=True)(params)
        return value, new_state, jax.tree.map(lambda g: g / scale, grads)

    return run


def scale_for(half: Any) -> float:
    return FLOAT16_SCALE if half == jnp.float16 else 1.0


def relative_errors(result: tuple, exact: tuple) -> tuple[float, float]:
    """Relative errors of the loss, and of all gradients together by the norm of the difference."""
    (loss, _, grads), (exact_loss, _, exact_grads) = result, exact
    difference = optax.tree.norm(optax.tree.sub(grads, exact_grads))
    of_loss = abs(float(loss) - float(exact_loss)) / abs(float(exact_loss))
    return of_loss, float(difference / optax.tree.norm(exact_grads))


def products_by_dtype(fun: Callable[..., Any], *args: Any) -> Counter:
    """Counts matrix products and convolutions by the dtype of their widest operand."""
    jaxpr, _ = reading.trace(fun, *args)
    return Counter(
        max((atom.aval.dtype for atom in eqn.invars[:2]), key=lambda dtype: dtype.itemsize).name
        for eqn, _ in equations_inside(jaxpr)
        if eqn.primitive.name in PRODUCTS
    )


def residual_bytes(loss: Loss, params: Any, state: Any, batch: Any) -> int:
    """Bytes that the backward pass keeps of the forward pass, beside what exists anyway.

    Parameters, batch and constants exist anyway. A value that is kept twice counts once.
    """

    def pullback(params: Any, state: Any, batch: Any) -> Any:
        return jax.vjp(lambda p: loss(p, state, batch)[0], params)[1]

    # `jax.vjp` returns its pullback as a pytree, whose leaves are the residuals. So a jaxpr that
    # returns the pullback has exactly them as its outputs.
    jaxpr = reading.open_jaxpr(reading.trace(pullback, params, state, batch)[0])
    kept = {atom for atom in jaxpr.outvars if not reading.is_literal(atom)}
    kept -= {*jaxpr.invars, *jaxpr.constvars}
    return sum(atom.aval.size * atom.aval.dtype.itemsize for atom in kept)


def converts(fun: Callable[..., Any], *args: Any) -> tuple[int, int]:
    """Counts dtype conversions in the program that XLA gets, and in what XLA makes of it."""
    lowered = jax.jit(fun).lower(*args)
    given = lowered.as_text().count("stablehlo.convert")
    return given, len(re.findall(r"\bconvert\(", lowered.compile().as_text() or ""))


@contextlib.contextmanager
def counted_compilations() -> Iterator[list[float]]:
    """Gives a list to which every compilation appends its seconds."""
    seconds: list[float] = []

    def note(event: str, duration: float, **_: Any) -> None:
        if event == BACKEND_COMPILE:
            seconds.append(duration)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield seconds
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


# --- tables --------------------------------------------------------------------------------------


def accuracy() -> None:
    """Prints errors of loss and gradient against float32."""
    rows, header = [], ["model"]
    for model in models():
        start = model.start()
        exact = jax.jit(value_and_grads(model.loss))(*start)  # float32, which errors are against
        cells, header = [model.name], ["model"]
        for half in HALVES:
            for name, loss in variants(model, half).items():
                result = jax.jit(value_and_grads(loss, scale_for(half)))(*start)
                header.append(f"{name}, {half.dtype.name}")
                cells.append(" / ".join(f"{e:.1e}" for e in relative_errors(result, exact)))
        rows.append(cells)
    print_table("Relative error against float32: loss / gradient", header, rows)


def structure() -> None:
    """Prints what is in half, what is converted, and what is kept for the backward pass."""
    rows = []
    for model in (*models(), decoder()):
        start = model.start()
        halves, converted, kept = [], [], []
        for loss in _compared(model).values():
            step = value_and_grads(loss)
            products = products_by_dtype(step, *start)
            halves.append(f"{products['bfloat16']} of {products.total()}")
            converted.append("{} to {}".format(*converts(step, *start)))
            kept.append(f"{residual_bytes(loss, *start) / 2**10:.0f}")
        rows.append([model.name, " / ".join(halves[1:]), " / ".join(converted), " / ".join(kept)])
    header = [
        "model",
        "products in half: autocast / by hand",
        "conversions given to XLA to left: float32 / autocast / by hand",
        "residuals, KiB: float32 / autocast / by hand",
    ]
    print_table("Loss and gradient in bfloat16", header, rows)


def _descent(loss: Loss) -> Callable[..., Any]:
    def step(params: Any, state: Any, batch: Any) -> Any:
        grads = value_and_grads(loss)(params, state, batch)[2]
        return jax.tree.map(lambda p, g: p - 1e-4 * g, params, grads)

    return step


def speed(rounds: int) -> None:
    """Times a step of gradient descent."""
    size: dict[str, Any] = {"layers": 4, "width": 256, "length": 128}
    timed = [
        perceptron(width=1024, rows=256),
        transformer(**size),
        transformer(scan=True, **size),
        transformer(scan=True, remat=True, **size),
    ]
    rows = []
    for model in timed:
        params, state, batch = model.start()
        candidates = [
            Candidate.compiled(name, _descent(loss), params, state, batch)
            for name, loss in _compared(model).items()
        ]
        take_turns(candidates, rounds)
        plain, ours, by_hand = candidates
        rows.append(
            [
                model.name,
                f"{ours.median_ms:.1f}",
                ratio(ours, by_hand),
                ratio(ours, plain),
                " / ".join(f"{c.temp_bytes / 2**20:.0f}" for c in candidates),
            ]
        )
    header = [
        "model",
        "autocast, ms",
        "autocast / by hand",
        "autocast / float32",
        "temporary MiB: float32 / autocast / by hand",
    ]
    print_table("Step of gradient descent in bfloat16", header, rows)


def tracing(rounds: int) -> None:
    """Prints trace and compile time of twelve layers."""
    rows = []
    scans = (transformer(scan=scan, layers=12) for scan in (False, True))
    for model in (*scans, decoder(layers=12)):
        start = model.start()
        losses = _compared(model)
        for part, made in (("loss", lambda loss: loss), ("loss and gradient", value_and_grads)):
            # Traces alone in more rounds, since a collection or a page fault is much of a trace.
            traces, compilations = (
                measure_compilation(
                    {
                        name: functools.partial(
                            trace_and_compile, made(loss), *start, compiles=compiles
                        )
                        for name, loss in losses.items()
                    },
                    number,
                )
                for compiles, number in ((False, rounds), (True, max(3, rounds // 4)))
            )
            times = " / ".join(f"{1e3 * np.median(t[:, 0]):.0f}" for t in traces.values())
            ratios = [
                np.median(kind["autocast"][:, column] / kind[other][:, column])
                for column, kind in ((0, traces), (1, compilations))
                for other in ("float32", "by hand")
            ]
            rows.append([f"{model.name}, {part}", times, *(f"{r:.2f}" for r in ratios)])
    header = [
        "twelve layers",
        "trace, CPU-ms: float32 / autocast / by hand",
        "trace: autocast / float32",
        "autocast / by hand",
        "compile: autocast / float32",
        "autocast / by hand",
    ]
    print_table("Trace and compile, each time from nothing, in bfloat16", header, rows)


def recompiling() -> None:
    """Prints how many programs three calls without jit compile, beside plain JAX.

    All should be compiled by the first call, except what plain JAX compiles anew too.
    """
    rows = []
    for model in (perceptron(), transformer(), transformer(scan=True, remat=True)):
        start = model.start()
        row = [model.name]
        for loss in (model.loss, ampx.autocast(model.loss)):
            for fun in (loss, value_and_grads(loss)):
                numbers = []
                for _ in range(3):
                    with counted_compilations() as compilations:
                        jax.block_until_ready(fun(*start))
                    numbers.append(str(len(compilations)))
                row.append(", ".join(numbers))
        rows.append(row)
    header = ["model", "loss, float32", "and gradient", "loss, autocast", "and gradient"]
    print_table("Compilations of three calls without jit", header, rows)


def autocasting(rounds: int) -> None:
    """Prints all tables: accuracy, structure, compilations, speed, trace time."""
    accuracy()
    structure()
    recompiling()
    speed(rounds)
    tracing(rounds)

"""Optimizers that nobody wrote: random programs, as optax transformations.

    seed ──►  x0 = tanh(g)                      a few operations, each on what came before
              x1 = |x0|                         ... among them numbers of all parameters
              x2 = x0 * x1
              m0 = 0.9 m0 + 0.1 x2              what the slots become
              u  = -0.05 tanh(x2 / (1 + m0²))   the update, of old or new slots

Values are bounded, and jump at counts and signs of gradients alone, which have no rounding. So
every way to run such a program must give its numbers, but for rounding.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

RATE = 0.05


class RandomState(NamedTuple):
    """Counts, and slots of every kind that optimizers have: for each seed some of them."""

    count: Any
    numbers: list[Any]  # () float32
    slots: list[Any]  # as parameters
    rows: Any  # a number for each row, as Adafactor's
    signs: Any  # int32
    last: Any  # bfloat16


@jax.jit
def _soften(x):
    return x / (1 + jnp.abs(x))


@jax.custom_jvp
def _bend(x):
    return jnp.where(x > 0, x, 0.3 * x)


_bend.defjvp(lambda primals, tangents: (_bend(*primals), tangents[0]))


@jax.custom_vjp
def _wave(x):
    return jnp.sin(x)


_wave.defvjp(lambda x: (jnp.sin(x), None), lambda _, g: (g,))


def _iterate(x):
    return lax.fori_loop(0, 2, lambda _, y: 0.5 * (y + x / (1 + y * y)), jnp.tanh(x))


def _scan(x):
    return lax.scan(lambda c, b: (jnp.tanh(c + b), None), x, jnp.array([0.1, 0.2]))[0]


def _mean_of_rows(x):
    return jnp.mean(x, -1, keepdims=True) if x.ndim else x


ELEMENTWISE: dict[str, Callable[[Any], Any]] = {
    "tanh": jnp.tanh,
    "negative": jnp.negative,
    "absolute": jnp.abs,
    "square": lambda x: 0.3 * x * x,
    "root": lambda x: jnp.sqrt(jnp.abs(x) + 1e-3),
    "reciprocal": lambda x: 1 / (1.5 + jnp.abs(x)),
    "power": lambda x: jnp.abs(x + 2.5) ** 0.7,
    "logarithm": lambda x: jnp.log1p(x * x),
    "clip": lambda x: jnp.clip(x, -0.5, 0.5),
    "erf": lax.erf,
    "complex": lambda x: jnp.real((x + 0.5j) * (x - 0.25j)),
    "replace NaN": lambda x: jnp.where(jnp.isnan(x), 0.0, x),
    "fill": lambda x: jnp.full_like(x, 0.25) + x,
    "same": lambda x: x,
    "stopped": lambda x: lax.stop_gradient(x) * 1.5,
    "jit": _soften,
    "custom_jvp": _bend,
    "custom_vjp": _wave,
    "loop": _iterate,
    "scan": _scan,
}
# Of arrays with an axis; single numbers stay what they are.
OF_ARRAYS: dict[str, Callable[[Any], Any]] = {
    "mean of rows": lambda x: jnp.broadcast_to(_mean_of_rows(x), x.shape),
    "norm of columns": lambda x: x / (1 + jnp.sqrt(jnp.sum(x * x, 0, keepdims=True))),
    "own norm": lambda x: x / (1e-3 + jnp.linalg.norm(x)),
    "own maximum": lambda x: x / (1 + jnp.max(jnp.abs(x))),
    "flat and back": lambda x: jnp.cos(x.reshape(-1)).reshape(x.shape),
    "turned and back": lambda x: jnp.tanh(x.T).T,
    "running sum": lambda x: 0.1 * jnp.cumsum(x, -1),
    "roll": lambda x: jnp.roll(x, 1, 0),
    "first column": lambda x: x.at[..., :1].multiply(2.0),
    "softmax": lambda x: jax.nn.softmax(x, -1),
    "barrier": lax.optimization_barrier,
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": jnp.add,
    "subtract": jnp.subtract,
    "multiply": lambda a, b: a * jnp.tanh(b),
    "divide": lambda a, b: a / (1 + b * b),
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "hypotenuse": lambda a, b: jnp.sqrt(a * a + b * b + 1e-6),
    "average": lambda a, b: 0.9 * a + 0.1 * b,
    "choose": lambda a, b: jnp.where(a > 0, a, a * jnp.tanh(b)),
}
OF_TREES: dict[str, Callable[[Any], Any]] = {
    "norm": optax.tree.norm,
    "sum": lambda tree: 0.05 * optax.tree.sum(tree),
    "product": lambda tree: 0.05 * optax.tree.vdot(tree, tree),
    "maximum": lambda tree: functools.reduce(
        jnp.maximum, [jnp.max(jnp.abs(x)) for x in jax.tree.leaves(tree)]
    ),
}
# Of a number and the count of steps.
OF_NUMBERS: dict[str, Callable[[Any, Any], Any]] = {
    "decay": lambda n, t: n * 0.9 ** t.astype(jnp.float32),
    "debias": lambda n, t: n / (1 - 0.9 ** (t.astype(jnp.float32) + 1)),
    "alternate": lambda n, t: jnp.where(t % 2 == 0, n, -n),
    "limit": lambda n, t: jnp.minimum(n, t + 1.0),
    "tanh": lambda n, t: jnp.tanh(n),
    "cond": lambda n, t: lax.cond(t > 1, lambda n: n * 2, lambda n: n + 0.1, n),
    "loop": lambda n, t: lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x + 0.1), n),
}
# Of an array, a number and the count of steps.
SCALING: dict[str, Callable[[Any, Any, Any], Any]] = {
    "multiply": lambda x, n, t: x * jnp.tanh(n),
    "add": lambda x, n, t: x + n,
    "cond": lambda x, n, t: lax.cond(t % 2 == 0, lambda x: x * 0.5, lambda x: x - 0.1, x),
    "alternate": lambda x, n, t: jnp.where(t % 2 == 0, x, 0.5 * x + n),
}
NEW_SLOTS: dict[str, Callable[[Any, Any], Any]] = {
    "average": lambda old, x: 0.9 * old + 0.1 * x,
    "replace": lambda old, x: jnp.tanh(x),
    "as it is": lambda old, x: x,
    "maximum": jnp.maximum,
}
WRAPPERS: list[Callable[[Any], Any]] = [
    lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    lambda tx: optax.chain(tx, optax.scale_by_schedule(lambda count: 1 / (1 + count))),
    lambda tx: optax.chain(optax.add_decayed_weights(0.1), tx),
    lambda tx: optax.masked(tx, lambda tree: jax.tree.map(lambda x: jnp.ndim(x) == 2, tree)),
    lambda tx: optax.partition(
        {1: tx, 0: optax.adam(0.01)}, lambda tree: jax.tree.map(lambda x: jnp.ndim(x) % 2, tree)
    ),
]


def make(seed: int) -> tuple[optax.GradientTransformation, str]:
    """A transformation, the same for each seed, and its program in words.

    Six in ten are elementwise but for numbers of whole trees; half are inside of another
    transformation of optax.
    """
    draw = np.random.default_rng(seed)

    def pick(choices):
        return list(choices)[draw.integers(len(choices))]

    unary = ELEMENTWISE if draw.random() < 0.6 else ELEMENTWISE | OF_ARRAYS
    has_rows, has_signs, has_last = (bool(draw.random() < 0.3) for _ in range(3))
    slots = [f"m{i}" for i in range(draw.integers(3))]
    kept = [f"n{i}" for i in range(draw.integers(2))]
    arrays = ["rows"] * has_rows + ["signs"] * has_signs + ["last"] * has_last + ["p", *slots, "g"]
    numbers = ["1", *kept]
    program: list[tuple[str, Callable[..., Any], tuple[str, ...]]] = []
    words = []
    for i in range(draw.integers(2, 8)):
        # What was made last is used most often, so that little is made in vain.
        last = arrays[-1] if draw.random() < 0.5 else pick(arrays)
        kind = pick(["unary", "unary", "unary", "binary", "binary", "scaling", "tree", "number"])
        operations, operands = {
            "unary": (unary, (last,)),
            "binary": (BINARY, (last, pick(arrays))),
            "scaling": (SCALING, (last, numbers[-1])),
            "tree": (OF_TREES, (last,)),
            "number": (OF_NUMBERS, (pick(numbers),)),
        }[kind]
        name, result = pick(operations), f"x{i}"
        program.append((result, _apply(kind, operations[name]), operands))
        words.append(f"{result} = {name}({', '.join(operands)})")
        (numbers if kind in ("tree", "number") else arrays).append(result)
    changes = [(pick(NEW_SLOTS), pick(arrays)) for _ in slots]
    changed = [pick(numbers) for _ in kept]
    result = pick(arrays[-3:])
    last_step = pick(BINARY) if slots and draw.random() < 0.5 else None
    words += [f"{slot} = {how}({x})" for slot, (how, x) in zip(slots, changes, strict=True)]
    words += [f"{number} = average({x})" for number, x in zip(kept, changed, strict=True)]
    words.append(f"u = {last_step}({result}, new {slots[-1]})" if last_step else f"u = {result}")

    def init(params):
        def zeros(dtype=None):
            return jax.tree.map(lambda p: jnp.zeros_like(p, dtype=dtype), params)

        return RandomState(
            count=jnp.zeros((), jnp.int32),
            numbers=[jnp.full((), 0.5) for _ in kept],
            slots=[zeros() for _ in slots],
            rows=jax.tree.map(_mean_of_rows, zeros()) if has_rows else None,
            signs=zeros(jnp.int32) if has_signs else None,
            last=zeros(jnp.bfloat16) if has_last else None,
        )

    def update(grads, state, params=None):
        count = state.count
        values = {"g": grads, "p": params, "1": jnp.ones(())}
        values |= zip(slots, state.slots, strict=True)
        values |= zip(kept, state.numbers, strict=True)
        if has_rows:
            values["rows"] = jax.tree.map(lambda r, g: r + 0 * g, state.rows, grads)
        if has_signs:
            values["signs"] = jax.tree.map(lambda s: 0.1 * s.astype(jnp.float32), state.signs)
        if has_last:
            values["last"] = jax.tree.map(lambda x: x.astype(jnp.float32), state.last)
        for name, run, operands in program:
            values[name] = run(count, *(values[operand] for operand in operands))
        new_slots = [
            jax.tree.map(NEW_SLOTS[how], old, values[x])
            for (how, x), old in zip(changes, state.slots, strict=True)
        ]
        updates = values[result]
        if last_step:
            updates = jax.tree.map(BINARY[last_step], updates, new_slots[-1])
        averages = zip(state.numbers, changed, strict=True)
        return jax.tree.map(lambda u: -RATE * jnp.tanh(u), updates), RandomState(
            count=count + 1,
            numbers=[0.9 * old + 0.1 * jnp.tanh(values[x]) for old, x in averages],
            slots=new_slots,
            rows=jax.tree.map(lambda r, g: 0.9 * r + _mean_of_rows(g), state.rows, grads)
            if has_rows
            else None,
            signs=jax.tree.map(lambda s, g: s + (g > 0), state.signs, grads) if has_signs else None,
            last=jax.tree.map(lambda g: g.astype(jnp.bfloat16), grads) if has_last else None,
        )

    tx = optax.GradientTransformation(init, update)
    if draw.random() < 0.5:
        wrapper = draw.integers(len(WRAPPERS))
        tx = WRAPPERS[wrapper](tx)
        words.append(f"in wrapper {wrapper}")
    return tx, "; ".join(words)


def _apply(kind: str, operation: Callable[..., Any]) -> Callable[..., Any]:
    """An operation as a function of the count of steps and of trees or numbers."""
    if kind == "tree":
        return lambda count, tree: operation(tree)
    if kind == "number":
        return lambda count, number: operation(number, count)
    if kind == "scaling":
        return lambda count, tree, n: jax.tree.map(lambda x: operation(x, n, count), tree)
    if operation in OF_ARRAYS.values():
        return lambda count, tree: jax.tree.map(lambda x: operation(x) if x.ndim else x, tree)
    return lambda count, *trees: jax.tree.map(operation, *trees)

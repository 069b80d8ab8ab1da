"""Large gradients, given to every optimizer of optax and of `ampx.fused` inside a loss scale.

    python tests/large_gradients.py

prints the table of docs/guides/optax_optimizers.md: up to which gradient all that an optimizer
keeps stays finite. It takes some minutes.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax_optimizers import NAMES, TAKES, make

import ampx
from ampx import fused

FUSED = {
    "fused.adam": lambda: fused.adam(0.01),
    "fused.adamw": lambda: fused.adamw(0.01),
    "fused.adamw, float16 moments": lambda: fused.adamw(
        0.01, mu_dtype=jnp.float16, nu_dtype=jnp.float16
    ),
    "fused.adamw, int8 moments": lambda: fused.adamw(0.01, mu_dtype="int8", nu_dtype="int8"),
    "fused.lamb": lambda: fused.lamb(0.01),
    "fused.lion": lambda: fused.lion(0.01),
    "fused.sgd": lambda: fused.sgd(0.01, momentum=0.9),
    "fused.adagrad": lambda: fused.adagrad(0.01),
    "fused.adadelta": lambda: fused.adadelta(0.01),
    "fused.novograd": lambda: fused.novograd(0.01),
}
ALL = sorted([*NAMES, *FUSED])
# The largest numbers of gradients. Those of the first row are accepted, those of the second are
# not: the squares of two such numbers do not fit into float32.
ACCEPTED = (1e10, 1e12, 1e15, 1e18)
UNDONE = (1e20, 1e25, 3e38)


def make_any(name):
    """An optimizer of optax, or a fused one."""
    return FUSED[name]() if name in FUSED else make(name)


def draw(seed, largest=1.0):
    """Gradients, also used as parameters: numbers of both signs, of at most this size."""
    rng = np.random.default_rng(seed)
    tree = {"w": rng.uniform(0.5, 1.0, (3, 4)), "b": rng.uniform(0.5, 1.0, 4)}
    tree = jax.tree.map(lambda x: x * rng.choice([-1, 1], x.shape), tree)
    return jax.tree.map(lambda x: np.float32(x / np.max(np.abs(tree["w"])) * largest), tree)


PARAMS = draw(0)


def extra_args(name, grads):
    """What an optimizer asks for, of a loss that is linear in the parameters."""

    def loss(params):
        return optax.tree.vdot(params, grads)

    about = {
        "value": loss(PARAMS),
        "grad": grads,
        "value_fn": loss,
        "obj_fn": loss,
        "grad_fn": lambda params, _: jax.grad(loss)(params),
    }
    return {argument: about[argument] for argument in TAKES.get(name, ())}


def step(tx, name, params, state, grads):
    """One step by whatever transformation."""
    updates, state = tx.update(grads, state, params, **extra_args(name, grads))
    return ampx.apply_updates(params, updates), state


def scaled(name):
    """The optimizer inside a loss scale of 1."""
    return ampx.static_loss_scale(make_any(name), 1.0)


def run(tx, name, sequence):
    """Parameters and state after each of a sequence of gradients, stacked; one compiled program."""
    start = jax.tree.map(jnp.asarray, (PARAMS, tx.init(PARAMS)))

    def body(carry, grads):
        carry = step(tx, name, *carry, grads)
        return carry, carry

    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *sequence)
    return jax.jit(lambda carry, grads: jax.lax.scan(body, carry, grads)[1])(start, stacked)


def survey(name, steps=30):
    """The largest gradient after which all is finite, of magnitudes in steps of 1000."""
    tx = scaled(name)
    runner = jax.jit(functools.partial(_survey_run, tx, name, steps))
    largest = 0.0
    for exponent in (3, 6, 9, 12, 15, 18):
        if not bool(runner(draw(1), draw(2, 10.0**exponent))):
            break
        largest = 10.0**exponent
    return largest


def _survey_run(tx, name, steps, ordinary, large):
    carry = jax.tree.map(jnp.asarray, (PARAMS, tx.init(PARAMS)))
    before = ampx.count_nonfinite(carry)
    carry = step(tx, name, *carry, ordinary)

    def body(_, carry):
        return step(tx, name, *carry, large)

    carry = jax.lax.fori_loop(0, steps, body, carry)
    carry = step(tx, name, *carry, ordinary)
    return jnp.all(ampx.count_nonfinite(carry) <= before)


def table(names=ALL):
    """The lines of the table in the guide."""
    found = {}
    for name in names:
        found.setdefault(survey(name), []).append(f"`{name}`")
        print(name, file=sys.stderr, flush=True)
    yield "| all is finite after gradients of | optimizers |"
    yield "| --- | --- |"
    for largest, names in sorted(found.items(), reverse=True):
        size = f"up to {largest:.0e}".replace("e+", "e") if largest else "below 1e3"
        yield f"| {size} | {', '.join(names)} |"


if __name__ == "__main__":
    with jax.numpy_dtype_promotion("standard"):
        print("\n".join(table()))

"""A layer by hand with a leaf whose gradient is its new value, which costs little to compile.

flax's layers in 8 bits do the same with six such leaves: here the gradient of `largest` is the
maximum of |x|.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import fp8_ops

OVERWRITE = fp8_ops.OVERWRITE_WITH_GRADIENT


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@jax.custom_vjp
def record(x, largest):
    return x


record.defvjp(
    lambda x, largest: (x, jnp.max(jnp.abs(x)).astype(largest.dtype)[None]),
    lambda largest, cotangent: (cotangent, largest),
)


def record_loss(variables, x):
    w = variables["params"]["layer"]["w"]
    y = record(x.astype(w.dtype), variables[OVERWRITE]["layer"]["largest"])
    return jnp.mean((y @ w).astype(jnp.float32) ** 2)


def make_variables():
    return {
        "params": {"layer": {"w": draw(4)}},
        OVERWRITE: {"layer": {"largest": np.array([-7.0], np.float32)}},
    }


X = draw(8, 4, seed=1)
LARGEST = np.abs(X).max()


def largest_of(variables):
    return float(variables[OVERWRITE]["layer"]["largest"][0])

"""Draws what float8 holds of a layer's numbers, before and after scaling: docs/images/float8.png.

    python docs/float8.py [FILE]

A small network learns in float32 on random data. Of one of its layers, the picture shows the
input, the weight and the cotangent, as histograms of binary exponents: above as they are, below
divided by the scale of each row, which is what a product of the recipe `rowwise` multiplies.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

from ampx import plotting
from ampx.autocasting.float8 import Float8, casts_of
from ampx.autocasting.float8_products import quantize

WIDTH, ROWS, STEPS = 256, 512, 200
EXPONENTS = np.arange(-48, 12)
FORMATS = (jnp.float8_e4m3fn, jnp.float8_e5m2)


def make_numbers() -> dict[str, jax.Array]:
    """Input, weight and cotangent of the second layer of a network that has learned for a while."""
    keys = jax.random.split(jax.random.key(0), 5)
    sizes = (WIDTH, WIDTH, WIDTH, 16)
    params = [
        jax.random.normal(key, (m, n)) / m**0.5
        for key, m, n in zip(keys[:3], sizes[:-1], sizes[1:], strict=True)
    ]
    x = jax.random.normal(keys[3], (ROWS, WIDTH))
    labels = jnp.argmax(x @ jax.random.normal(keys[4], (WIDTH, 16)), axis=1)

    def loss(params: list[jax.Array], probe: jax.Array) -> jax.Array:
        first, second, last = params
        hidden = jax.nn.gelu(x @ first) @ second + probe
        logits = jax.nn.gelu(hidden) @ last
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    tx = optax.adam(1e-3)
    probe = jnp.zeros((ROWS, WIDTH))  # its gradient is the cotangent of the second product

    def step(carry: tuple, _: None) -> tuple:
        params, state = carry
        updates, state = tx.update(jax.grad(loss)(params, probe), state)
        return (optax.apply_updates(params, updates), state), None

    (params, _), _ = jax.jit(lambda c: jax.lax.scan(step, c, length=STEPS))(
        (params, tx.init(params))
    )
    cotangent = jax.jit(jax.grad(loss, argnums=1))(params, probe)
    return {"input": jax.nn.gelu(x @ params[0]), "weight": params[1], "cotangent": cotangent}


def count(x: jax.Array) -> np.ndarray:
    """How many numbers there are of each binary exponent."""
    exponents = np.floor(np.log2(np.abs(np.asarray(x)[np.asarray(x) != 0])))
    return np.histogram(exponents, [*EXPONENTS, EXPONENTS[-1] + 1])[0]


def main() -> None:
    """Draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(__file__).parent / "images" / "float8.png"
    parser.add_argument("file", nargs="?", type=Path, default=default)
    numbers = make_numbers()
    cast = casts_of(Float8("rowwise")).forward[0]
    # A sum runs over the second axis of input and cotangent, and over the first of the weight.
    sums = {"input": (1,), "weight": (0,), "cotangent": (1,)}
    scaled = {name: x / quantize(x, cast, sums[name])[1] for name, x in numbers.items()}
    figure, panels = plt.subplots(2, 1, figsize=(8, 9))
    for axes, arrays in zip(panels, (numbers, scaled), strict=True):
        counts = {name: count(x) for name, x in arrays.items()}
        plotting.plot_exponents(EXPONENTS, counts, formats=FORMATS, axes=axes)
    panels[1].set_xlabel("log$_2$ |value / scale of its row|")
    figure.tight_layout()
    figure.savefig(parser.parse_args().file, dpi=110)


if __name__ == "__main__":
    main()

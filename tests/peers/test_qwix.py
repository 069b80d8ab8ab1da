"""Products in float8 beside qwix's: one product, its result and both gradients.

qwix takes scales as they come, and ampx rounds them up to powers of two. So the operands here have
a largest number of 448 times a power of two in each row and column, 448 being the largest e4m3 (and
57344, the largest e5m2, is such a number, too). Then both take the same scales, and must give the
same numbers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from listing import Peer

import ampx

qwix = pytest.importorskip("qwix")
from qwix._src.core.dot_general_qt import DotGeneralQtConfig, dot_general_qt  # noqa: E402

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
RECIPES = {"rowwise": E4M3, "tensorwise": E5M2}
PEERS = (
    Peer(
        source="qwix",
        runs="`dot_general_qt` by channel and by tensor, a product and its gradients: equal to "
        "those of `ampx.autocast(dots=...)`",
        cases=lambda: list(RECIPES),
        excluded={},
    ),
)


def draw(rows, columns, seed):
    """Normal numbers below 448 * 2**-8, which stands once in each row and each column."""
    rng = np.random.default_rng(seed)
    x = np.clip(rng.standard_normal((rows, columns)), -1.7, 1.7)
    size = max(rows, columns)
    x[np.arange(size) % rows, np.arange(size) % columns] = 1.75
    return x.astype(jnp.bfloat16).astype(np.float32)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_product_and_its_gradients_are_those_of_qwix(recipe):
    x, w, g = draw(32, 64, 0), draw(64, 48, 1), draw(32, 48, 2)
    tensor = recipe == "tensorwise"
    config = DotGeneralQtConfig(
        lhs_qtype=E4M3,
        rhs_qtype=E4M3,
        dlhs_grad_qtype=RECIPES[recipe],
        drhs_grad_qtype=RECIPES[recipe],
        use_original_residuals=True,
        dlhs_residual_qtype=E4M3,
        drhs_residual_qtype=E4M3,
        lhs_disable_channelwise_axes=tensor,
        rhs_disable_channelwise_axes=tensor,
        dlhs_grad_disable_channelwise_axes=tensor,
        drhs_grad_disable_channelwise_axes=tensor,
        dlhs_residual_disable_channelwise_axes=tensor,
        drhs_residual_disable_channelwise_axes=tensor,
    )

    def of_qwix(x, w):
        return dot_general_qt(x, w, (((1,), (0,)), ((), ())), config)

    @jax.jit
    def run(x, w, g):
        own, pull = jax.vjp(ampx.autocast(jnp.matmul, dots=recipe), x, w)
        other, pull_other = jax.vjp(of_qwix, x, w)
        return (own, *pull(g.astype(own.dtype))), (other, *pull_other(g))

    for own, other, exact in zip(*run(x, w, g), (x @ w, g @ w.T, x.T @ g), strict=True):
        largest = np.max(np.abs(exact))
        # A result in bfloat16 is rounded by 2**-9; gradients are float32 sums in any order.
        digits = 2.0**-8 if own.dtype == jnp.bfloat16 else 1e-6
        error = np.abs(np.asarray(own, np.float32) - np.asarray(other, np.float32))
        assert np.max(error) <= digits * largest
        assert np.linalg.norm(other - exact) > 0.01 * np.linalg.norm(exact)  # it is float8

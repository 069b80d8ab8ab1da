"""Gradients of 1e10 to 3e38: a step is what optax makes of it, or it is undone whole.

What must not be is a step of which a part is held: a first moment of 1e19 beside a second moment
of before throws the parameter to -1e17, one step later if not at once.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import large_gradients as large
import numpy as np
import optax
import pytest
from helpers import all_finite, assert_bit_equal

import ampx
from ampx import fused
from ampx.updates.tails import Tail, unwrap_results

pytestmark = pytest.mark.usefixtures("standard_promotion")


def at(tree, i):
    return jax.tree.map(lambda leaf: leaf[i], tree)


def assert_near(found, expected):
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = (jax.random.key_data(x) for x in (a, b))
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        largest = np.max(np.abs(b[np.isfinite(b)]), initial=1e-6)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * largest)


ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.sampled(3, "fused.adamw, float16 moments")
@pytest.mark.slow_but("fused.lamb")
@pytest.mark.parametrize("name", large.ALL)
def test_a_large_gradient_is_taken_as_optax_takes_it_or_undone_whole(name):
    """Each large step is between ordinary ones; two more are to show what it has left behind."""
    sequence, is_undone = [large.draw(1)], [False]
    for k, value in enumerate((*large.UNDONE, *large.ACCEPTED)):
        sequence += [large.draw(10 + k, value), large.draw(20 + k), large.draw(30 + k)]
        is_undone += [value in large.UNDONE, False, False]
    params, state = large.run(large.scaled(name), name, sequence)
    np.testing.assert_array_equal(state.overflow, is_undone)
    np.testing.assert_array_equal(state.bad_update_total, np.cumsum(is_undone))
    np.testing.assert_array_equal(state.skipped_total, np.cumsum(is_undone))
    assert not state.inf_total.any() and not state.nan_total.any()
    for i in np.flatnonzero(is_undone):
        before, after = (at((params, state.inner_state), k) for k in (i - 1, i))
        assert_bit_equal(after, before)
    if name in large.FUSED:
        assert all_finite((params, state))
    if "float16" in name:  # saturated, where those of the optimizer alone are infinite
        return
    taken = [grads for grads, undone in zip(sequence, is_undone, strict=True) if not undone]
    # In the place of what was undone, nothing at all.
    expected, bare = large.run(large.make_any(name), name, taken)
    kept = np.flatnonzero(~np.array(is_undone))
    found = jax.tree.map(lambda leaf: leaf[kept], (params, state.inner_state))
    assert_near(found, (expected, bare))


@pytest.mark.parametrize("face", ["apply", "update"])
def test_one_large_number_among_small_ones(face):
    """A finite 1e20 entered `mu` and not `nu`, and moved the parameter by -7e17, uncounted."""
    tx = ampx.dynamic_loss_scale(fused.adam(1e-3), init_scale=1.0)
    params = jnp.full(4, 0.5)
    state = tx.init(params)
    moved = []
    for first in (0.1, 1e20, 0.1, 0.1):
        grads = jnp.array([first, 0.1, 0.1, 0.1])
        if face == "apply":
            params, state, _ = fused.apply(tx, grads, state, params)
        else:
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        moved.append(float(params[0]))
    np.testing.assert_allclose(moved, [0.499, 0.499, 0.498, 0.497], atol=1e-5)
    assert int(state.bad_update_total) == 1 and float(state.loss_scale) == 1.0


@pytest.mark.slow_but("fused.adam")
@pytest.mark.parametrize("name", large.FUSED)
def test_a_clip_that_is_too_large_keeps_squares_finite(name):
    """A clip takes any finite norm, so the clip itself must see to the squares."""
    tx, params = large.scaled(name), large.draw(0)
    apply = jax.jit(functools.partial(fused.apply, tx, max_norm=1e30))
    state = tx.init(params)
    for k in range(2):
        grads = large.draw(2 + k)
        grads["w"][1, 2] = 1e25 if k == 0 else 0.1
        params, state, report = apply(grads, state, params)
        assert not report.overflow and all_finite((params, state))


def test_sums_of_squares_end_at_the_largest_number():
    """Each square is finite, and their sum is not: Adagrad forgets nothing."""
    tx = fused.adagrad(0.1)
    params, state = jnp.ones(2), tx.init(jnp.ones(2))
    for _ in range(4):
        params, state = fused_tail(tx, jnp.full(2, 1.5e19), state, params)
    assert all_finite((params, state))


def fused_tail(tx, grads, state, params):
    """One step of a fused optimizer below a loss scale that has not looked at squares."""
    tail = Tail(skip=jnp.zeros((), bool), new_params=True)
    results, state = tx.update(grads, state, params, tail=tail)
    return unwrap_results(results)[0], state


@pytest.mark.slow_but("fused.adam")
@pytest.mark.parametrize("name", ["contrib.mechanize", "fused.adam", "lbfgs", "adafactor"])
def test_the_guide_says_up_to_which_gradient_all_is_finite(name):
    guide = (ROOT / "docs/guides/optax_optimizers.md").read_text()
    section = guide.split("## Large gradients")[1].split("## ")[0]
    (size,) = [row.split("|")[1] for row in section.splitlines() if f"`{name}`" in row]
    assert float(size.split()[-1]) == large.survey(name)


def test_the_guide_lists_every_optimizer():
    guide = (ROOT / "docs/guides/optax_optimizers.md").read_text()
    section = guide.split("## Large gradients")[1].split("## ")[0]
    rows = [row for row in section.splitlines() if row.startswith(("| up to", "| below"))]
    found = [name for row in rows for name in row.split("|")[2].strip(" `").split("`, `")]
    assert sorted(found) == large.ALL

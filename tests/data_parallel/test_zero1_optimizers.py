"""Every optimizer of optax in `zero1` is the replicated one, or is refused by name."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_bit_equal, make_mesh, map_zero1
from optax_optimizers import NAMES, TAKES, make

import ampx

PLAIN = [name for name in NAMES if set(TAKES.get(name, ())) <= {"value"}]
# And the operation that the error names.
REFUSED = {
    "contrib.galore": "svd",
    "contrib.muon": "reshape",
    "contrib.scale_by_galore": "svd",
    "contrib.scale_by_muon": "reshape",
}
pytestmark = pytest.mark.usefixtures("standard_promotion")
MESH = make_mesh((4,), ("data",))
RANDOM = np.random.default_rng(0)


def normal(*shape):
    return RANDOM.normal(size=shape).astype(np.float32)


# Divided along the first axis, the second, and not at all.
PARAMS = {"rows": normal(8, 3), "columns": normal(3, 8), "bias": normal(3), "scale": np.float32(2)}
GRADS = [jax.tree.map(lambda p: normal(*np.shape(p)), PARAMS) for _ in range(3)]
WITHOUT = {"sm3": "scale"}  # which of the parameters it cannot take: a single number


def run(step, state, params):
    for grads in GRADS:
        params, state = step(params, state, {name: grads[name] for name in params})
    return params, state


def compare(tx, without=None, check_vma=False, **extra_args):
    """Three steps on four devices and on one."""

    def step(tx, params, state, grads):
        updates, state = tx.update(grads, state, params, **extra_args)
        return optax.apply_updates(params, updates), state

    def step_of_device(params, state, grads):
        # Each device has gradients of its own, though here they are equal.
        return step(ours, params, state, jax.lax.pcast(grads, "data", to="varying"))

    ours = ampx.zero1(tx, "data")
    params = {name: param for name, param in PARAMS.items() if name != without}
    mapped, state = map_zero1(ours, step_of_device, params, MESH, check_vma)
    found, state = run(jax.jit(mapped), state, params)
    plain = optax.with_extra_args_support(tx)
    expected, own = run(jax.jit(functools.partial(step, plain)), plain.init(params), params)

    def near(a, b):
        if jnp.issubdtype(jnp.asarray(b).dtype, jax.dtypes.extended):
            assert_bit_equal(a, b)
        else:
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)

    jax.tree.map(near, (found, state.inner_state), (expected, own))


@pytest.mark.sampled(5)
@pytest.mark.slow_but("adafactor", "contrib.prodigy", "lars", "noisy_sgd", "sm3")
@pytest.mark.parametrize("name", [name for name in PLAIN if name not in REFUSED])
def test_optimizers_of_optax_are_those_of_whole_arrays(name):
    extra_args = {"value": jnp.float32(1.5)} if TAKES.get(name) else {}
    compare(make(name), WITHOUT.get(name), **extra_args)


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_whole_arrays_is_refused_by_name(name):
    with pytest.raises(NotImplementedError, match=rf"{REFUSED[name]} \(.*py:\d.*on shard"):
        compare(make(name))


def of_rule(rule):
    """A transformation without a state: a function of the gradients, the parameters and a tree."""
    return optax.GradientTransformation(
        lambda params: optax.EmptyState(), lambda g, s, p=None: (jax.tree.map(rule, g, p), s)
    )


NORMS = {
    "a norm of what is flattened": lambda g, p: g / jnp.linalg.norm(g.reshape(-1)),
    "an inner product": lambda g, p: g * jnp.vdot(g, p),
    "an inner product with ones": lambda g, p: g * jnp.vdot(g, jnp.ones_like(g)),
    "a product over both axes": lambda g, p: g * jnp.tensordot(g, p, g.ndim),
    "a largest number": lambda g, p: g / jnp.max(jnp.abs(jnp.ravel(g))),
    "there and back": lambda g, p: jnp.sin(g.ravel() + 2 * p.ravel()).reshape(g.shape),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("norm", NORMS)
def test_norms_in_other_words(norm, check_vma):
    compare(of_rule(NORMS[norm]), check_vma=check_vma)


# Of a parameter that is divided along its second axis, a device holds no row of the flat array.
ORDERED = {
    "an order": lambda g, p: (g.ravel() * jnp.arange(float(g.size))).reshape(g.shape),
    "two orders": lambda g, p: (g.ravel() + p.T.ravel()).reshape(g.shape),
    "another shape": lambda g, p: g.ravel().reshape(g.shape[::-1]).T,
    "a repetition": lambda g, p: g * jnp.sum(jnp.broadcast_to(g.ravel(), (2, g.size))),
    "what comes before": lambda g, p: jnp.cumsum(g.ravel()).reshape(g.shape),
    "flat updates": lambda g, p: g.ravel(),
}


@pytest.mark.parametrize("rule", ORDERED)
def test_what_depends_on_the_order_of_flat_numbers_is_refused(rule):
    with pytest.raises(NotImplementedError, match=r"take this (one|transformation) out of zero1"):
        compare(of_rule(lambda g, p: ORDERED[rule](g, p) if g.ndim == 2 else g))

"""Acceptance cases of autocast: loops, branches, custom derivatives, devices, inner jits.

Each case is a promise to users, in its name. `autocast_cases` has the others.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from autocast_probes import (
    W,
    X,
    assert_gradients_are_float32,
    bfloat16,
    dots,
    dtypes,
    equations,
    normal,
    numbered,
    total,
)
from helpers import assert_bit_equal, make_mesh
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ampx


def case_09_recurrent_scans_carry_float32_and_multiply_in_half():
    def rnn(w, u, xs):
        def step(state, x):
            state = jnp.tanh(state @ w + x @ u)
            return state, state @ w

        return lax.scan(step, xs[0] @ u, xs)

    args = (0.3 * W, 0.3 * W, normal(5, 4, 8, seed=4))
    state, outputs = bfloat16(rnn)(*args)
    assert (state.dtype, outputs.dtype) == (jnp.float32, jnp.bfloat16)
    expected = rnn(*args)
    # Five steps, each with relative errors of a few 2**-9.
    np.testing.assert_allclose(state, expected[0], atol=0.05)
    assert dots(bfloat16(rnn), *args) == {"bfloat16": 4}
    assert set(dots(jax.grad(total(bfloat16(rnn)), (0, 1, 2)), *args)) == {"bfloat16"}
    assert_gradients_are_float32(bfloat16(rnn), *args)


def case_10_remat_in_a_scan_keeps_its_policy_and_recomputes_in_half():
    policy = jax.checkpoint_policies.save_only_these_names("hidden")

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(x, weights):
        w, v = weights
        hidden = jnp.sin(checkpoint_name(x @ w, "hidden"))
        return jnp.sin(hidden @ v)

    def model(ws, vs, x):
        return lax.scan(lambda x, weights: (layer(x, weights), None), x, (ws, vs))[0]

    autocast = bfloat16(model)
    args = (normal(3, 8, 8, seed=5), normal(3, 8, 8, seed=6), X)
    (remat,) = [eqn for eqn in equations(jax.make_jaxpr(autocast)(*args)) if "policy" in eqn.params]
    assert remat.params["policy"] is policy
    # Two forward, four backward, and the one that the policy does not save.
    assert dots(jax.grad(total(autocast), (0, 1, 2)), *args) == {"bfloat16": 7}
    assert_gradients_are_float32(autocast, *args)


def case_11_while_loops_carry_float32_under_and_over_vmap():
    def loop(w, x, steps):
        def body(carry):
            step, state = carry
            return step + 1, jnp.tanh(state @ w)

        return lax.while_loop(lambda carry: carry[0] < steps, body, (0, x @ w))[1]

    steps = jnp.array([3, 0, 1, 5])
    exact = jax.vmap(loop, (None, 0, 0))(W, X, steps)
    vmapped = functools.partial(jax.vmap, in_axes=(None, 0, 0))
    for autocast in (vmapped(bfloat16(loop)), bfloat16(vmapped(loop))):
        for run in (autocast, jax.jit(autocast)):
            result = run(W, X, steps)
            assert result.dtype == jnp.float32
            # Six products, each with relative errors of a few 2**-9.
            np.testing.assert_allclose(result, exact, atol=0.2)
        assert dots(autocast, W, X, steps) == {"bfloat16": 2}


def case_12_branches_agree_on_the_widest():
    def branching(other):
        return bfloat16(lambda x, w: lax.cond(x[0, 0] > 0, jnp.tanh, other, x @ w))

    for sign in (1.0, -1.0):
        x = sign * X
        assert branching(jnp.abs)(x, W).dtype == jnp.bfloat16
        assert branching(jnp.exp)(x, W).dtype == jnp.float32
        assert_gradients_are_float32(branching(jnp.abs), x, W)
        assert_gradients_are_float32(branching(jnp.exp), x, W)


def case_13_custom_jvp_rules_are_kept():
    @jax.custom_jvp
    def matmul(x, w):
        return x @ w

    @matmul.defjvp
    def _(primals, tangents):
        (x, w), (dx, dw) = primals, tangents
        return x @ w, 3.0 * (dx @ w + x @ dw)

    autocast = bfloat16(matmul)
    x, w = jnp.round(X), jnp.round(W)  # small integers: exact in half
    assert_bit_equal(autocast(x, w), (x @ w).astype(jnp.bfloat16))
    plain = jax.grad(lambda x, w: jnp.sum(x @ w), (0, 1))(x, w)
    tripled = jax.grad(lambda x, w: jnp.sum(autocast(x, w).astype(jnp.float32)), (0, 1))(x, w)
    assert_bit_equal(tripled, jax.tree.map(lambda leaf: 3 * leaf, plain))
    assert set(dots(jax.grad(total(autocast), (0, 1)), x, w)) == {"bfloat16"}


def _rounding_matmul():
    @jax.custom_vjp
    def matmul(x, w):
        return jnp.round(x @ w)

    def forward(x, w):
        return matmul(x, w), (x, w)

    def backward(residuals, cotangent):
        x, w = residuals
        return cotangent @ w.T, x.T @ cotangent

    matmul.defvjp(forward, backward)
    return matmul


def case_14_custom_vjp_rules_are_kept_and_run_in_half_unless_opaque():
    x, w = jnp.round(X), jnp.round(W)
    matmul = _rounding_matmul()
    straight_through = jax.grad(lambda x, w: jnp.sum(x @ w), (0, 1))(x, w)
    for choice, dtype in (("transform", "bfloat16"), ("opaque", "float32")):
        autocast = bfloat16(lambda x, w: matmul(x, w) * 1.0, custom_vjp=choice)
        assert dtypes(autocast(x, w)) == dtype
        assert dots(autocast, x, w) == {dtype: 1}
        loss = lambda x, w: jnp.sum(autocast(x, w).astype(jnp.float32))  # noqa: B023, E731
        assert dots(jax.grad(loss, (0, 1)), x, w) == {dtype: 3}
        assert_bit_equal(jax.grad(loss, (0, 1))(x, w), straight_through)


def _half_only_matmul():
    def check(*arrays):
        if any(array.dtype != jnp.bfloat16 for array in arrays):
            raise TypeError(f"this kernel knows only bfloat16, got {dtypes(arrays)}")

    @jax.custom_vjp
    def kernel(x, w):
        check(x, w)
        return x @ w

    def forward(x, w):
        return kernel(x, w), (x, w)

    def backward(residuals, cotangent):
        x, w = residuals
        check(x, w, cotangent)
        return cotangent @ w.T, x.T @ cotangent

    kernel.defvjp(forward, backward)
    return kernel


def case_15_a_kernel_that_knows_only_half_gets_half_under_every_transformation():
    kernel = ampx.half_function(_half_only_matmul())

    def model(ws, x):
        layer = jax.checkpoint(lambda x, w: jnp.sin(kernel(x, w)))
        return lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0]

    ws, xs = normal(3, 8, 8, seed=5), normal(2, 4, 8, seed=6)
    grad = jax.vmap(jax.grad(total(bfloat16(model)), (0, 1)), (None, 0))
    assert dtypes(grad(ws, xs)) == ("float32", "float32")
    # One forward, one recomputed, two backward.
    assert dots(grad, ws, xs) == {"bfloat16": 4}
    assert dtypes(bfloat16(kernel)(X, W)) == "bfloat16"


def case_22_sums_over_devices_are_half():
    mesh = make_mesh((4,), ("data",))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("data"), P()), out_specs=P())
    def summed(x, w):
        return lax.psum(x @ w, "data")

    autocast = bfloat16(summed)
    assert jax.jit(autocast)(X, W).dtype == jnp.bfloat16
    (psum,) = [
        eqn
        for eqn in equations(jax.make_jaxpr(autocast)(X, W))
        if eqn.primitive.name.startswith("psum")
    ]
    assert dtypes([atom.aval for atom in (*psum.invars, *psum.outvars)]) == ["bfloat16"] * 2
    assert dots(jax.grad(total(autocast), (0, 1)), X, W) == {"bfloat16": 3}
    assert_gradients_are_float32(autocast, X, W)


def case_23_shardings_of_inner_jits_are_kept():
    mesh = make_mesh((2, 2), ("data", "model"))
    rows, columns = NamedSharding(mesh, P("data")), NamedSharding(mesh, P(None, "model"))
    sharded = jax.jit(jnp.matmul, in_shardings=(rows, columns), out_shardings=columns)
    autocast = bfloat16(sharded)
    for run in (autocast, jax.jit(autocast)):
        result = run(jax.device_put(X, rows), jax.device_put(W, columns))
        assert result.dtype == jnp.bfloat16
        assert result.sharding.is_equivalent_to(columns, result.ndim)
    (inner,) = [eqn for eqn in equations(jax.make_jaxpr(autocast)(X, W)) if "jaxpr" in eqn.params]
    assert inner.params["in_shardings"] == (rows, columns)
    assert inner.params["out_shardings"] == (columns,)
    assert dots(autocast, X, W) == {"bfloat16": 1}
    assert_gradients_are_float32(autocast, X, W)


CASES = numbered(globals())

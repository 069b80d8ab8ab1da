"""autocast with what else JAX has: meshes, exports, effects, higher derivatives, checks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_mesh
from jax import export
from jax.experimental import checkify, io_callback
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ampx

X = jax.random.normal(jax.random.key(0), (8, 16))
W = jax.random.normal(jax.random.key(1), (16, 16)) / 4
B = jnp.ones(16)
HALF = jnp.dtype(jnp.bfloat16)


def layer(w, b, x):
    return jnp.mean(jax.nn.softmax(jax.nn.gelu(x @ w + b)) ** 2)


def close(left, right):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        a, b = (np.asarray(v, np.float32) for v in (a, b))
        np.testing.assert_allclose(a, b, atol=3e-2 * np.abs(b).max() + 1e-6)


@pytest.mark.slow_but("Explicit")
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_sharded_arguments_keep_their_shardings(kind):
    mesh = make_mesh((4,), ("data",), kind)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("data")))
        w, b = (jax.device_put(a, NamedSharding(mesh, P())) for a in (W, B))
        hidden = jax.jit(ampx.autocast(lambda w, b, x: jax.nn.gelu(x @ w + b) * 2))(w, b, x)
        assert hidden.dtype == HALF and hidden.sharding.spec[0] == "data"
        grads = jax.jit(jax.grad(ampx.autocast(layer), (0, 1, 2)))(w, b, x)
        assert grads[2].sharding.spec[0] == "data"
        assert {g.dtype.name for g in grads} == {"float32"}
    close(grads, jax.grad(layer, (0, 1, 2))(W, B, X))


@pytest.mark.whole_but("Auto-True", "Explicit-False")
@pytest.mark.slow_but("Explicit-False")
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_shard_map_forward_and_backward(kind, check_vma):
    mesh = make_mesh((4,), ("data",), kind)

    @jax.custom_vjp
    def rounded(h):
        return jnp.round(h), h

    rounded.defvjp(lambda h: (rounded(h), h), lambda h, c: (c[0] * jnp.tanh(h) + c[1],))

    def on_device(w, b, x):
        h = jax.nn.relu(x @ w + b)
        h = rounded(h)[0] + jnp.where(h > 0, h, -1e9)
        return jax.lax.pmean(jnp.mean(jax.nn.silu(h) ** 2), "data")

    def loss(w, b, x):
        specs = (P(), P(), P("data"))
        mapped = jax.shard_map(
            on_device, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma
        )
        return mapped(w, b, x)

    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("data")))
        w, b = (jax.device_put(a, NamedSharding(mesh, P())) for a in (W, B))
        expected = jax.jit(jax.value_and_grad(loss))(w, b, x)
        close(jax.jit(jax.value_and_grad(ampx.autocast(loss)))(w, b, x), expected)
        close(ampx.autocast(jax.value_and_grad(loss))(w, b, x), expected)
        assert ampx.explain(loss)(w, b, x).products_in_half() == (1, 1)


def test_autocast_inside_shard_map():
    mesh = make_mesh((4,), ("data",))

    def on_device(w, x):
        h = ampx.autocast(lambda w, x: jax.nn.relu(x @ w) * 2.0)(w, x)
        assert h.dtype == HALF
        return jax.lax.psum(h, "data")

    out = jax.shard_map(on_device, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())(W, X)
    close(out, jnp.sum(jax.nn.relu(X @ W).reshape(4, 2, 16) * 2.0, 0))


def test_collectives_carry_half():
    mesh = make_mesh((4,), ("data",))

    def on_device(w, x):
        h = x @ w
        gathered = jax.lax.all_gather(h, "data", tiled=True)
        moved = jax.lax.ppermute(h, "data", [(0, 1), (1, 2), (2, 3), (3, 0)])
        scattered = jax.lax.psum_scatter(gathered, "data", tiled=True)
        swapped = jax.lax.all_to_all(gathered, "data", 0, 0, tiled=True)
        return jnp.exp(gathered).sum(), moved, scattered, swapped, jax.lax.pmax(h, "data")

    run = jax.shard_map(
        lambda w, x: jax.tree.map(lambda v: v[None], on_device(w, x)),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P("data"),
        check_vma=False,
    )
    dtypes = [v.dtype.name for v in jax.eval_shape(ampx.autocast(run), W, X)]
    assert dtypes == ["float32"] + ["bfloat16"] * 4
    rows = ampx.explain(run)(W, X).equations
    (gather,) = (row for row in rows if row.primitive == "all_gather")
    assert gather.results[0][1] == "bfloat16"


def test_pmap():
    # pmap is jit of shard_map in new versions, and its own primitive in none that is supported.
    out = jax.pmap(ampx.autocast(lambda x: jax.nn.relu(x @ W)))(X.reshape(8, 1, 16))
    assert out.dtype == HALF


def test_symbolic_shapes_are_exported():
    (batch,) = export.symbolic_shape("batch")
    spec = jax.ShapeDtypeStruct((batch, 16), jnp.float32)
    for fun in (
        ampx.autocast(lambda x: jax.nn.gelu(x @ W + B) * 2.0),
        jax.grad(lambda x: ampx.autocast(layer)(W, B, x)),
        ampx.autocast(lambda x: jnp.where(x @ W > 0, x @ W, -1e9)),
    ):
        exported = export.export(jax.jit(fun))(spec)
        assert exported.call(X).shape == X.shape


def test_checkify_finds_what_it_finds_without():
    def f(x):
        checkify.check(jnp.all(x > 0), "negative: {}", x.min())
        return jnp.log(x @ W)

    checked = checkify.checkify(f, errors=checkify.user_checks | checkify.nan_checks)
    for wrapped in (
        checkify.checkify(ampx.autocast(f), errors=checkify.user_checks | checkify.nan_checks),
        ampx.autocast(checked),
        jax.jit(ampx.autocast(checked)),
    ):
        error, _ = wrapped(-jnp.abs(X))
        with pytest.raises(checkify.JaxRuntimeError, match="negative"):
            error.throw()


def test_ordered_effects_keep_their_order_and_dtypes():
    seen = []

    def note(tag, value):
        seen.append((int(tag), value.dtype.name))

    def f(x):
        for tag in range(3):
            io_callback(note, None, tag, x @ W, ordered=True)
        jax.debug.print("{}", (x @ W).sum(), ordered=True)
        return x @ W

    jax.block_until_ready(jax.jit(ampx.autocast(f))(X))
    jax.effects_barrier()
    assert seen == [(0, "float32"), (1, "float32"), (2, "float32")]


def test_higher_and_forward_derivatives():
    def scalar(x):
        return jnp.sum(jnp.tanh(x @ W) ** 2)

    x = X[0]
    cast = ampx.autocast(scalar)
    close(jax.jvp(cast, (x,), (x,)), jax.jvp(scalar, (x,), (x,)))
    close(jax.hessian(cast)(x), jax.hessian(scalar)(x))
    close(jax.linearize(cast, x)[1](x), jax.linearize(scalar, x)[1](x))
    close(jax.jacfwd(ampx.autocast(jax.grad(scalar)))(x), jax.hessian(scalar)(x))
    close(ampx.autocast(jax.hessian(scalar))(x), jax.hessian(scalar)(x))


def test_a_while_loop_under_vmap_both_ways():
    def f(x):
        def go_on(carry):
            return jnp.linalg.norm(carry[0]) < 20.0

        def step(carry):
            return carry[0] + jnp.abs(carry[0] @ W) + 0.5, carry[1] + 1

        return jax.lax.while_loop(go_on, step, (x, jnp.int32(0)))

    expected = jax.vmap(f)(X)
    for run in (jax.vmap(ampx.autocast(f)), ampx.autocast(jax.vmap(f))):
        values, counts = jax.jit(run)(X)
        assert (values.dtype, counts.dtype) == (jnp.float32, jnp.int32)
        np.testing.assert_array_equal(counts, expected[1])
        close(values, expected[0])


def test_jaxs_own_checks_find_nothing_wrong():
    def f(w, b, x):
        def body(c, xi):
            c = jax.lax.cond(c.sum() > 0, lambda c: jnp.tanh(c @ w + b), lambda c: c, c)
            return c, jax.nn.silu(xi @ w)

        c, ys = jax.lax.scan(jax.checkpoint(body), x[0], x)
        return layer(w, b, ys) + jnp.max(c)

    with jax.enable_checks(True):
        run = jax.jit(jax.value_and_grad(ampx.autocast(f), (0, 1, 2)))
        close(run(W, B, X), jax.value_and_grad(f, (0, 1, 2))(W, B, X))


def test_donated_and_static_arguments_of_an_inner_jit():
    @functools.partial(jax.jit, static_argnames="times", donate_argnums=0)
    def inner(x, *, times):
        return (x @ W) * times

    assert ampx.autocast(lambda x: inner(x, times=2) + inner(x * 1.0, times=2))(X).dtype == HALF


def test_sixty_four_bit_and_complex_values_are_left_alone():
    with jax.enable_x64(True):
        x = jnp.ones((4, 4), jnp.float64)
        assert ampx.autocast(lambda x: x @ x + jnp.exp(x))(x).dtype == jnp.float64
        assert ampx.autocast(lambda x: jax.lax.complex(x @ x, x))(X[:, :8]).dtype == jnp.complex64

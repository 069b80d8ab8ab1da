"""More programs as in `autocast_programs`: calls, loops, custom rules, devices and the host."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from autocast_programs import IDS, KEY, gives
from helpers import make_mesh
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ampx

MESH = make_mesh((2,), ("data",))


# Calls


@gives("half")
def jit(x, w):
    return jax.jit(jnp.matmul)(x, w)


@gives("half float32")
def nested_jit(x, w):
    inner = jax.jit(lambda h: (jax.nn.relu(h), jax.jit(jnp.exp)(h)))
    return jax.jit(lambda x, w: inner(x @ w))(x, w)


@gives("half half")
def one_jit_called_with_float32_and_half(x, w):
    layer = jax.jit(lambda h, w: jnp.tanh(h @ w))
    h = layer(x, w)
    return h, layer(h, w)


@gives("half half")
def vmap_inside(x, w):
    return jax.vmap(lambda row: row @ w)(x), jax.vmap(jnp.matmul, (None, 1))(x, w)


@gives("float32")
def psum_of_a_vmap(x, w):
    return jax.vmap(lambda row: row @ w - lax.pmean(row @ w, "rows"), axis_name="rows")(x)


@gives("half half")
def jvp_inside(x, w):
    return jax.jvp(lambda x: jnp.tanh(x @ w), (x,), (x,))


@gives("half")
def grad_inside(x, w):
    return jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w)))(x)


@gives("half")
def remat_with_a_policy(x, w):
    layer = lambda h: jnp.sin(jnp.sin(h @ w) @ w)  # noqa: E731
    return jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)(x)


@gives("half")
def remat_with_names(x, w):
    policy = jax.checkpoint_policies.save_only_these_names("hidden")
    layer = lambda x, w: jnp.tanh(checkpoint_name(x @ w, "hidden")) @ w  # noqa: E731
    return jax.checkpoint(layer, policy=policy)(x, w)


# Loops and branches


@gives("float32 half", "half float32")
def recurrent_scan(x, w):
    def step(h, row):
        h = jnp.tanh(row @ w + h @ w)
        return h, h

    return lax.scan(step, jnp.zeros(8), x)


@gives("float32", "float32 half")
def scan_over_layers(x, w):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, jnp.stack([w, w]))[0]


@gives("float32", "float32 half")
def scan_over_remat_layers(x, w):
    layer = jax.checkpoint(lambda h, w: (h + jax.nn.relu(h @ w), None))
    return lax.scan(layer, x, jnp.stack([w, w]))[0]


@gives("float32 half int32", "half float32")
def reversed_unrolled_scan(x, w):
    def step(carry, row_and_id):
        (row, i), (total, count) = row_and_id, carry
        return (total + jnp.sum(row @ w), count + i), row @ w

    xs = (x, jnp.asarray(IDS, jnp.int32))
    start = (jnp.float32(0), jnp.int32(0))
    (total, count), rows = lax.scan(step, start, xs, reverse=True, unroll=2)
    return total, rows, count


@gives("int32 float32", fails=("grad",))
def while_loop(x, w):
    def body(carry):
        i, h = carry
        return i + 1, jnp.tanh(h @ w)

    return lax.while_loop(lambda c: (c[0] < 3) & (jnp.max(c[1]) < 1e3), body, (0, x))


@gives("float32", "float32 float32")
def fori_loop(x, w):
    return lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h @ w), x)


@gives("half")
def cond_of_halves(x, w):
    h = x @ w
    return lax.cond(jnp.sum(x) > 0, jnp.tanh, lambda h: 2 * h, h)


@gives("float32", "float32 half")
def cond_of_half_and_float32(x, w):
    return lax.cond(jnp.sum(x) > 0, lambda: x @ w, lambda: jnp.exp(x))


@gives("half")
def switch(x, w):
    branches = [lambda h: h @ w, jax.nn.relu, lambda h: h * 0.0]
    return lax.switch(jnp.argmax(x[0]) % 3, branches, x @ w)


@gives("float32", "float32 float32")
def scan_of_cond_of_scan(x, w):
    def inner(h):
        return lax.scan(lambda h, _: (jnp.tanh(h @ w), None), h, None, length=2)[0]

    def step(h, i):
        return lax.cond(i == 2, inner, lambda h: h @ w, h), None

    return lax.scan(step, x, jnp.asarray(IDS))[0]


@gives("half", "half float32")
def map_over_rows(x, w):
    return lax.map(lambda row: jnp.tanh(row @ w), x)


@gives("half")
def associative_scan(x, w):
    return lax.associative_scan(jnp.maximum, x @ w)


@gives("float32 half")
def loops_over_a_half_array(x, w):
    h = x @ w
    summed = lax.scan(lambda c, row: (c + row * h, None), jnp.zeros((4, 8)), h)[0]
    return summed, lax.map(lambda i: jnp.abs(h[i]), jnp.asarray(IDS))


@gives("float32", fails=("grad",))
def while_over_a_half_array(x, w):
    h = x @ w
    return lax.while_loop(lambda c: jnp.sum(c) < jnp.max(h), lambda c: c + jnp.abs(h), x)


# The gradient of a vector times w is an outer product, and so as float32 as the vector.
@gives("half half", gradients="half float32")
def hessian_and_linearize(x, w):
    hessian = jax.hessian(lambda v: (jnp.tanh(v @ w) @ w)[0])(x[0])
    return hessian, jax.linearize(lambda x: jnp.sin(x @ w), x)[1](x)


@gives("half")
def jit_with_static_arguments(x, w):
    layer = jax.jit(lambda h, w, n: jnp.tanh(h @ w) if n else h, static_argnums=2)
    return layer(x, w, 1)


# Functions with rules of their own


@gives("half")
def relu(x, w):
    return jax.nn.relu(x @ w)


@jax.custom_jvp
def steep_sine(x):
    return jnp.sin(x)


@steep_sine.defjvp
def steep_sine_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    return steep_sine(x), 3 * jnp.cos(x) * t


@gives("half")
def custom_jvp(x, w):
    return steep_sine(x @ w)


@jax.custom_jvp
def product_with_a_rule(x, w):
    return x @ w


@product_with_a_rule.defjvp
def product_with_a_rule_jvp(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return x @ w, dx @ w + x @ dw


@gives("half")
def custom_jvp_of_a_product(x, w):
    return product_with_a_rule(x, w) @ w


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def scaled_backward(fun, h, factor):
    return fun(h) * factor


scaled_backward.defvjp(
    lambda fun, h, factor: (fun(h) * factor, h),
    lambda fun, factor, h, g: (jnp.clip(g * jnp.cos(h) * factor, -1.0, 1.0),),
)


@gives("half")
def custom_vjp_with_nondiff_arguments(x, w):
    return scaled_backward(jnp.sin, x @ w, 0.5)


@jax.custom_vjp
def rows_of(table, ids):
    return table[ids]


rows_of.defvjp(
    lambda table, ids: (table[ids], (ids, table.shape)),
    lambda kept, g: (jnp.zeros(kept[1], g.dtype).at[kept[0]].add(g), None),
)


@gives("half")
def custom_vjp_with_integers_and_none(x, w):
    return rows_of(x @ w, jnp.asarray(IDS))


@jax.custom_vjp
def product_and_sum(x, w):
    return x @ w, jnp.sum(x)


product_and_sum.defvjp(
    lambda x, w: (product_and_sum(x, w), (x, w)),
    lambda kept, g: (g[0] @ kept[1].T + g[1], kept[0].T @ g[0]),
)


@gives("half float32", "float32 half")
def custom_vjp_with_two_outputs(x, w):
    return product_and_sum(x, w)


@jax.custom_vjp
def rounded(x):
    return jnp.round(x * 128) / 128


rounded.defvjp(lambda x: (rounded(x), None), lambda _, g: (g,))


@gives("float32", "float32 float32")
def straight_through_in_scan_and_remat(x, w):
    layer = jax.checkpoint(lambda h, _: (rounded(h @ w), None))
    return lax.scan(layer, x, None, length=2)[0]


# Devices


@gives("half")
def sharding_constraint(x, w):
    sharding = NamedSharding(MESH, P("data"))
    return jnp.tanh(lax.with_sharding_constraint(x @ w, sharding))


def over_devices(in_specs, out_specs, **options):
    return functools.partial(
        jax.shard_map, mesh=MESH, in_specs=in_specs, out_specs=out_specs, **options
    )


@gives("half")
def shard_map_with_psum(x, w):
    rows = over_devices((P(None, "data"), P("data")), P())
    return rows(lambda x, w: lax.psum(x @ w, "data"))(x, w)


@gives("half")
def shard_map_with_all_gather(x, w):
    rows = over_devices((P("data"), P()), P(), check_vma=False)
    return rows(lambda x, w: lax.all_gather(x @ w, "data", tiled=True))(x, w)


@gives("half half")
def shard_map_with_ppermute_and_all_to_all(x, w):
    def body(x, w):
        h = x @ w
        swapped = lax.all_to_all(h, "data", 1, 0, tiled=True)
        return lax.ppermute(h, "data", [(0, 1), (1, 0)]), swapped

    return over_devices((P("data"), P()), P("data"))(body)(x, w)


@gives("float32", "float32 float32")
def shard_map_with_a_scan_and_pmean(x, w):
    def body(x, w):
        h = lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=2)[0]
        return lax.pmean(jnp.sum(h), "data")

    return over_devices((P("data"), P()), P())(body)(x, w)


# The host, random numbers and other dtypes


@gives("float32", fails=("grad",))
def pure_callback(x, w):
    def on_host(h):
        assert h.dtype == np.float32
        return np.sin(h)

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(on_host, shape, x @ w, vmap_method="sequential")


@gives("half")
def debug_callback(x, w):
    h = x @ w
    jax.debug.callback(lambda h: None, h)
    return h


@gives("float32")
def noise(x, w):
    return x @ w + 0.1 * jax.random.normal(KEY, x.shape)


@gives("half")
def random_signs(x, w):
    return jnp.where(jax.random.rademacher(KEY, x.shape) > 0, x @ w, -(x @ w))


@gives("int32", "float32 float32")
def bitcast(x, w):
    return lax.bitcast_convert_type(x @ w, jnp.int32)


@gives("int32 int32 bool", "float32 float32")
def integers(x, w):
    counts = jnp.floor(4 * (x @ w)).astype(jnp.int32)
    return counts @ counts.T, jnp.cumsum(counts, 0), x @ w > 0


@gives("complex64", "float32 half")
def complex_product(x, w):
    z = lax.complex(x @ w, x)
    return z * jnp.conj(z[::-1])


@gives("half half", "float32 float32")
def reals_of_complex(x, w):
    z = lax.complex(x, x) @ lax.complex(w, w)
    return jnp.abs(z) @ w, z.real @ w


@gives("float16 float16")
def converted_by_the_program(x, w):
    h = (x @ w).astype(jnp.float16)
    return h, h + 1


@gives("float32")
def cast_to_float32(x, w):
    return 2 * ampx.cast(x @ w, jnp.float32)


@gives("float32 half")
def weak_scalars_and_constants(x, w):
    h = x @ w
    return 2.0 * jnp.sum(h), (1.0 - h * np.float32(0.5) + np.ones(8, np.float32)[0]) / 3


@gives("half half")
def numpy_constants(x, w):
    row = np.ones(8, np.float32)
    return x @ w + row, x @ w * row


@gives("int32", "float32 float32")
def categorical_sample(x, w):
    return jax.random.categorical(KEY, x @ w)


@gives("half half")
def tree_of_outputs(x, w):
    return {"a": [x @ w, None], "b": (jnp.abs(x @ w),)}


@gives("half")
def barrier_and_stop_gradient(x, w):
    h, kept = lax.optimization_barrier((x @ w, lax.stop_gradient(x @ w)))
    return h * kept

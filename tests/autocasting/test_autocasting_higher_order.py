"""Functions inside operations: which autocast enters, which it leaves, and where it warns.

The table "Functions inside operations" of docs/guides/autocast.md says it for users. Each program
here holds one such operation, and is compared with the row that the table gives its primitive.
"""

import functools
import pathlib
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import linear_call
from jax.experimental import io_callback, pallas
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend import core
from jax.sharding import PartitionSpec

import ampx
from ampx.autocasting import tables

W = np.eye(8, dtype=np.float32)
GUIDE = pathlib.Path(__file__).parents[2] / "docs/guides/autocast.md"
LIKE_W = jax.ShapeDtypeStruct(W.shape, W.dtype)


def product(w):
    return w @ w


def after_transpose(w):
    return w.T @ w


@jax.custom_jvp
def with_a_jvp(w):
    return product(w)


with_a_jvp.defjvp(lambda primals, tangents: (product(*primals), tangents[0]))


@jax.custom_vjp
def with_a_vjp(w):
    return product(w)


with_a_vjp.defvjp(lambda w: (product(w), w), lambda w, g: (g @ w,))


def over_one_device(w):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec()
    return jax.shard_map(product, mesh=mesh, in_specs=spec, out_specs=spec)(w)


def of_a_root(w):
    return lax.custom_root(
        lambda y: y - product(w), w, lambda f, y: y - f(y), lambda g, y: y / g(jnp.ones_like(y))
    )


def in_a_kernel(w):
    def kernel(w_ref, out_ref):
        out_ref[...] = w_ref[...] @ w_ref[...]

    return pallas.pallas_call(kernel, out_shape=LIKE_W, interpret=True)(w)


def on_the_host(callback, w):
    return callback(np.asarray, LIKE_W, w)


def of_a_foreign_function(w):
    return jax.ffi.ffi_call("a_target", LIKE_W)(w)


def exported(w):
    return jax.export.export(jax.jit(product))(LIKE_W).call(w)


def reduced_by_own_function(w):
    return lax.reduce(w, np.float32(0), lambda a, b: a * 2.0 + b, (0,))


def reduced_in_windows(w):
    return lax.reduce_window(w, np.float32(0), lambda a, b: a * b + b, (2, 2), (1, 1), "SAME")


@custom_vmap
def vmapped_its_own_way(w):
    return product(w)


vmapped_its_own_way.def_vmap(lambda size, batched, w: (jax.vmap(product)(w), batched[0]))


def with_its_own_transpose(w):
    return linear_call(lambda r, x: r @ x, lambda r, g: r.T @ g, w, w)


def as_a_composite(w):
    return lax.composite(product, "somebody.product")(w)


def partitioned(w):
    fun = custom_partitioning(product)
    fun.def_partition(
        partition=lambda mesh, args, result: (mesh, product, result.sharding, (result.sharding,)),
        infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
        sharding_rule="i j -> i j",
    )
    return fun(w)


UNKNOWN = core.Primitive("of_another_package")
UNKNOWN.def_abstract_eval(lambda aval, *, jaxpr: aval)


def of_another_package(w):
    return UNKNOWN.bind(w, jaxpr=jax.make_jaxpr(product)(W))


# What the guide's table calls each row, and (program, primitive that holds the function).
ENTERED = {
    "jit": (jax.jit(product), "jit"),
    "remat": (jax.checkpoint(product), "checkpoint"),
    "scan": (lambda w: lax.scan(lambda c, x: (c, x @ w), 0.0, w)[1], "scan"),
    "map": (lambda w: lax.map(lambda x: x @ w, w), "scan"),
    "while": (lambda w: lax.while_loop(lambda c: c[0, 0] < 0, product, w), "while"),
    "cond": (lambda w: lax.cond(w[0, 0] > 0, product, after_transpose, w), "cond"),
    "switch": (lambda w: lax.switch(jnp.int32(w[0, 0]), [product, after_transpose], w), "cond"),
    "custom_jvp": (with_a_jvp, "custom_jvp_call"),
    "custom_vjp": (with_a_vjp, "custom_vjp_call"),
    "shard_map": (over_one_device, "shard_map"),
}
FLOAT32 = {
    "linalg.solve": (lambda w: jnp.linalg.solve(w, w), "custom_linear_solve"),
    "cg": (
        lambda w: jax.scipy.sparse.linalg.cg(lambda v: w @ v, w[0], maxiter=3)[0],
        "custom_linear_solve",
    ),
    "reduce": (reduced_by_own_function, "reduce"),
    "reduce_window": (reduced_in_windows, "reduce_window"),
}
AS_TRACED = {
    "pallas_call": (in_a_kernel, "pallas_call"),
    "pure_callback": (functools.partial(on_the_host, jax.pure_callback), "pure_callback"),
    "io_callback": (functools.partial(on_the_host, io_callback), "io_callback"),
    "ffi_call": (of_a_foreign_function, "ffi_call"),
    "call_exported": (exported, "call_exported"),
}
WARNED_OF = {
    "custom_vmap": (vmapped_its_own_way, "custom_vmap_call"),
    "linear_call": (with_its_own_transpose, "linear_call"),
    "composite": (as_a_composite, "composite"),
    "custom_partitioning": (partitioned, "custom_partitioning"),
    "unknown": (of_another_package, "of_another_package"),
}
ROWS = {
    "entered": ENTERED,
    "float32": FLOAT32,
    "as traced": AS_TRACED,
    "float32, with a warning": WARNED_OF,
}


def explain(fun, **settings):
    """What autocast does with a function, and the warnings on the way, each one shown."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return ampx.explain(fun, **settings)(W), [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("row", "name"), [(row, name) for row, programs in ROWS.items() for name in programs]
)
def test_each_operation_does_what_its_row_of_the_table_says(row, name):
    fun, primitive = ROWS[row][name]
    explanation, warned = explain(fun)
    products, of_products = explanation.products_in_half()
    if row == "entered":
        assert products == of_products > 0 and not warned
        return
    holder = next(r for r in explanation.equations if r.primitive == primitive)
    if row == "float32, with a warning":
        assert len(warned) == 1 and f"inside {primitive} (" in warned[0]
        assert explanation.unknown == (holder,)
    else:
        assert not warned and explanation.unknown == ()
        assert all(before == after for before, after in (*holder.operands, *holder.results))
        assert holder.rule == ("float32" if row == "float32" else "opaque")


def test_a_root_is_entered_or_warned_of():
    """In jax 0.10 `custom_root` is a custom_jvp, in jax 0.12 a primitive that nothing can enter."""
    explanation, warned = explain(of_a_root)
    if names := [row.primitive for row in explanation.unknown]:
        assert names == ["call_hi_primitive"] and len(warned) == 1
    else:
        assert explanation.products_in_half() == (1, 1) and not warned


def read_guide():
    """The names in each row of the guide's table."""
    section = GUIDE.read_text().split("### Functions inside operations")[1].split("###")[0]
    rows = (line.split(" | ") for line in section.splitlines() if line.startswith("| "))
    return {row[0].strip("| "): set(re.findall(r"`([\w.]+)`", row[1])) for row in rows}


def test_the_guide_has_this_table():
    for row, programs in ROWS.items():
        listed = read_guide()[row]
        missing = {primitive for _, primitive in programs.values()} - {"of_another_package"}
        assert missing <= listed, row
        if row != "entered":
            named = {name for name in listed if name in tables.DEFAULTS}
            assert all(tables.DEFAULTS[name] != "recurse" for name in named), row


def test_every_primitive_that_hides_functions_is_in_the_table():
    assert read_guide()["float32, with a warning"] >= tables.HIDING_FUNCTIONS


# One call, however often autocast plans it: in a loop, in a branch, with other readers.
def called_in_many_ways(w):
    def step(carry, x):
        h = lax.cond(x[0] > 0, vmapped_its_own_way, product, w)
        return carry + jnp.sum(h * h), jnp.tanh(h)

    total, rows = lax.scan(jax.checkpoint(step), jnp.float32(0), w)
    return total + jnp.sum(rows)


def test_one_call_is_warned_of_once():
    explanation, warned = explain(called_in_many_ways)
    assert len(warned) == len(explanation.unknown) == 1
    _, warned = explain(lambda w: vmapped_its_own_way(w) + vmapped_its_own_way(w))
    assert len(warned) == 2


@pytest.mark.parametrize("name", WARNED_OF)
def test_a_rule_says_that_float32_is_meant(name):
    """Who uses a library cannot wrap the library's own calls; the warning names this rule."""
    fun, primitive = WARNED_OF[name]
    _, warned = explain(fun)
    assert f"ampx.DEFAULT_RULES.float32({primitive!r})" in warned[0]
    rules = ampx.DEFAULT_RULES.float32(primitive)
    explanation, warned = explain(fun, rules=rules)
    assert not warned and not explanation.unknown and not explanation.idle_rules


def test_a_rule_for_the_function_around_says_it_too():
    rules = ampx.DEFAULT_RULES.float32(called_in_many_ways)
    explanation, warned = explain(called_in_many_ways, rules=rules)
    assert not warned and not explanation.unknown


@pytest.mark.parametrize("fun", [jnp.linalg.solve, lambda a, b: jnp.linalg.cholesky(a) + b])
def test_linear_algebra_in_a_promoted_region_of_half_operands(fun):
    promoted = ampx.promote_function(fun)
    found = ampx.autocast(lambda w: promoted(w @ w, w @ w))(W)
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(fun(W, W)))

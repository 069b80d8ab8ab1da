"""Many programs under many compositions of autocast with JAX's transformations."""

import autocast_program_calls  # noqa: F401 (registers its programs)
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_programs import PROGRAMS

import ampx

HALF = jnp.dtype(jnp.bfloat16)
X = jax.random.normal(jax.random.key(1), (4, 8))
W = jax.random.normal(jax.random.key(2), (8, 8)) / np.sqrt(8)
XS = jnp.stack([X, X[::-1]])

# Ways to run a program forward: each gives the dtypes of the table.
FORWARD = {
    "autocast": ampx.autocast,
    "jit(autocast)": lambda f: jax.jit(ampx.autocast(f)),
    "autocast(jit)": lambda f: ampx.autocast(jax.jit(f)),
    "autocast(autocast)": lambda f: ampx.autocast(ampx.autocast(f), half_dtype=jnp.float16),
    "autocast(remat)": lambda f: ampx.autocast(jax.checkpoint(f)),
}
FORWARD_OF_A_BATCH = {
    "vmap(autocast)": lambda f: batched(ampx.autocast(f)),
    "autocast(vmap)": lambda f: ampx.autocast(batched(f)),
    "vmap(jit(autocast))": lambda f: batched(jax.jit(ampx.autocast(f))),
}
GRADIENTS = {
    "grad(autocast)": lambda f: gradient(ampx.autocast(f)),
    "jit(grad(autocast))": lambda f: jax.jit(gradient(ampx.autocast(f))),
    "autocast(grad), original": lambda f: ampx.autocast(gradient(f), output="original"),
}


def batched(fun):
    return jax.vmap(fun, (0, None))


def gradient(fun):
    """Gradients for x and w of the squares of all outputs that are not integers."""

    def loss(x, w):
        outputs = [jnp.abs(y) for y in jax.tree.leaves(fun(x, w)) if jnp.issubdtype(y, jnp.inexact)]
        return sum((jnp.sum(y.astype(jnp.float32) ** 2) for y in outputs), jnp.float32(0))

    return jax.grad(loss, (0, 1))


def dtypes_of(fun, *args):
    return [leaf.dtype for leaf in jax.tree.leaves(jax.eval_shape(fun, *args))]


def expected(names):
    return [HALF if name == "half" else jnp.dtype(name) for name in names.split()]


def over(compositions):
    return pytest.mark.parametrize("around", compositions.values(), ids=compositions)


def programs(without=None, sampled=1, mark=pytest.mark.slow):
    """All programs that can be transformed so; all but every `sampled`-th of them are marked."""
    rows = [(name, row) for name, row in PROGRAMS.items() if without not in row.fails]
    return pytest.mark.parametrize(
        "program",
        [
            pytest.param(row, id=name, marks=[mark] if place % sampled else [])
            for place, (name, row) in enumerate(rows)
        ],
    )


def cases_that_fail():
    return [
        pytest.param(program, how, id=f"{how}({name})")
        for name, program in PROGRAMS.items()
        for how in program.fails
    ]


@over(FORWARD)
@programs()
def test_dtypes(program, around):
    assert dtypes_of(around(program.fun), X, W) == expected(program.outputs)


@over(FORWARD_OF_A_BATCH)
@programs(without="vmap")
def test_dtypes_of_a_batch(program, around):
    assert dtypes_of(around(program.fun), XS, W) == expected(program.outputs)


def test_an_output_that_vmap_only_repeats_keeps_its_dtype():
    fun = batched(lambda x, w: w @ w)
    assert dtypes_of(ampx.autocast(fun), XS, W) == [HALF]


def test_an_array_yields_to_half_only_where_it_is_spread_over_a_batch():
    """As a bias does: inside of autocast it is as large as what it is added to, or smaller."""

    def fun(x, w):
        return x @ w + np.ones((4, 8), np.float32)

    assert dtypes_of(batched(ampx.autocast(fun)), XS, W) == [np.float32]
    assert dtypes_of(ampx.autocast(batched(fun)), XS, W) == [HALF]


def test_an_index_search_warns_of_nothing():
    search = ampx.autocast(lambda x, w: jnp.searchsorted(jnp.sort(w[0]), x))
    assert dtypes_of(search, X, W) == [np.int32]


def test_a_function_with_its_own_batching_runs_in_float32_until_it_is_batched():
    twice = jax.custom_batching.custom_vmap(lambda h: 2 * h)
    twice.def_vmap(lambda size, batched, h: (2 * h, batched[0]))

    def fun(x, w):
        return twice(x @ w)

    with pytest.warns(UserWarning, match="custom_vmap_call"):
        assert dtypes_of(ampx.autocast(fun), X, W) == [np.float32]
    assert dtypes_of(ampx.autocast(batched(fun)), XS, W) == [HALF]


@programs()
def test_original_dtypes(program):
    original = ampx.autocast(program.fun, output="original")
    assert jax.eval_shape(original, X, W) == jax.eval_shape(program.fun, X, W)


@over(GRADIENTS)
@programs(without="grad")
def test_gradients_are_float32(program, around):
    assert dtypes_of(around(program.fun), X, W) == [np.float32] * 2


@programs(without="grad")
def test_gradients_inside_of_autocast_as_they_are(program):
    inside = ampx.autocast(gradient(program.fun))
    assert dtypes_of(inside, X, W) == expected(program.gradients)


@pytest.mark.parametrize("program, how", cases_that_fail())
def test_what_is_left_out_fails_in_plain_jax_too(program, how):
    plain = {"grad": gradient, "vmap": batched}[how](program.fun)
    with pytest.raises(Exception):  # noqa: B017 (each in its own way)
        jax.jit(plain).lower(XS if how == "vmap" else X, W)


def assert_close(rounded, exact):
    for a, b in zip(jax.tree.leaves(rounded), jax.tree.leaves(exact), strict=True):
        if not jnp.issubdtype(b.dtype, jnp.inexact):
            continue  # a rounding may move an integer
        a, b = np.asarray(a, np.complex128), np.asarray(b, np.complex128)
        assert np.all(np.isfinite(a))
        # Some ten roundings on the way.
        assert np.linalg.norm(a - b) <= 10 * float(jnp.finfo(HALF).eps) * np.linalg.norm(b)


# Its dtypes and those of its gradients are quick for every program.
@pytest.mark.sampled(2)
@programs(sampled=6)
def test_values_and_gradients(program):
    rounded = ampx.autocast(program.fun)

    @jax.jit
    def run(x, w):
        pairs = [(rounded(x, w), program.fun(x, w))]
        if "grad" not in program.fails:
            pairs.append((gradient(rounded)(x, w), gradient(program.fun)(x, w)))
        return pairs

    pairs = run(X, W)
    assert dtypes_of(lambda: pairs[0][0]) == expected(program.outputs)
    for found, exact in pairs:
        assert_close(found, exact)


@pytest.mark.slow
@programs(sampled=2, mark=pytest.mark.whole)
def test_values_of_one_operation_at_a_time(program):
    outputs = ampx.autocast(program.fun)(X, W)
    assert dtypes_of(lambda: outputs) == expected(program.outputs)
    assert_close(outputs, jax.jit(program.fun)(X, W))

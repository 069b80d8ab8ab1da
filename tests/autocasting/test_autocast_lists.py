"""The op lists of torch.autocast and Apex O1, op by op, and their tests of casts in our words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_op_lists import LISTS, OF_ONE, OF_TWO, OTHERWISE, X
from helpers import assert_bit_equal

import ampx

HALVES = ("bfloat16", "float16")
# The dtypes of a table are the same in both halves: one is enough without `--whole`.
ONE_HALF = ("bfloat16", pytest.param("float16", marks=pytest.mark.whole))
IDENTITY = jnp.eye(4)  # times which X is X in half


def rows(table, mark=None):
    """Every function of a table and the dtypes that it gives; every second one has the mark."""
    listed = [
        (name, fun, dtypes.split())
        for dtypes, functions in table.items()
        for name, fun in functions.items()
    ]
    return [
        pytest.param(
            fun, dtypes, id=name.replace(" ", "_"), marks=[mark] if mark and place % 2 else []
        )
        for place, (name, fun, dtypes) in enumerate(listed)
    ]


def listed_as(name):
    """The class that the lists give an operation: what they do not name follows its operands."""
    return next((kind for kind, names in LISTS.items() if name in names.split()), "widest")


def kind_of(dtypes):
    """The class that a row of the tables amounts to."""
    first, *mixed, last = dtypes
    if len(set(dtypes)) == 1:
        return first
    follows = (first, last) == ("half", "float32") and set(mixed) <= {"float32"}
    return "widest" if follows else "one of its own"


def of(arguments, fun):
    """`fun` of x and w, with each argument made half by a product with the identity, or left."""

    def of_x_and_w(x, w):
        return fun(*(x @ w if kind == "h" else x for kind in arguments))

    return of_x_and_w


def dtype_in(half, dtype):
    return half if dtype == "half" else dtype


def total(tree):
    """A float32 scalar that feels every output."""
    leaves = [jnp.real(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(tree)]
    return sum(jnp.sum(leaf * leaf) for leaf in leaves)


def check_dtypes(fun, cases, half):
    """dtypes inside autocast, with the outputs as they were, and of gradients."""
    for arguments, expected in cases.items():
        plain = of(arguments, fun)
        cast = ampx.autocast(plain, half_dtype=half)
        assert jax.eval_shape(cast, X, IDENTITY).dtype == dtype_in(half, expected), arguments
        original = ampx.autocast(plain, half_dtype=half, output="original")
        before = jax.eval_shape(plain, X, IDENTITY)
        assert jax.eval_shape(original, X, IDENTITY) == before, arguments
        if before.dtype == np.float32:
            gradient = jax.grad(lambda x, w, cast=cast: total(cast(x, w)), (0, 1))
            dtypes = [g.dtype for g in jax.eval_shape(gradient, X, IDENTITY)]
            assert dtypes == [np.float32] * 2, arguments


def check_values(fun, arguments):
    """Values near those of float32. All cases are compiled at once, which is what takes time."""
    plain = [of(kinds, fun) for kinds in arguments]
    if not jnp.issubdtype(jax.eval_shape(plain[0], X, IDENTITY).dtype, np.inexact):
        return  # comparisons and indices may well differ after rounding
    halves = {half: [ampx.autocast(f, half_dtype=half) for f in plain] for half in HALVES}
    functions = {"float32": plain, **halves}
    outputs = jax.jit(lambda x, w: jax.tree.map(lambda f: f(x, w), functions))(X, IDENTITY)
    for half in HALVES:
        for kinds, exact, rounded in zip(arguments, outputs["float32"], outputs[half], strict=True):
            rounded, exact = (np.asarray(a, np.complex128) for a in (rounded, exact))
            # Some ten roundings, or one in front of a badly conditioned function.
            allowed = 10 * float(jnp.finfo(half).eps) * np.linalg.norm(exact)
            assert np.linalg.norm(rounded - exact) <= allowed, (half, kinds)


@pytest.mark.parametrize("half", ONE_HALF)
@pytest.mark.parametrize("fun, dtypes", rows(OF_ONE, pytest.mark.slow))
def test_dtypes_of_one_array(fun, dtypes, half):
    check_dtypes(fun, dict(zip(("h", "x"), dtypes, strict=True)), half)


@pytest.mark.parametrize("half", ONE_HALF)
@pytest.mark.parametrize("fun, dtypes", rows(OF_TWO, pytest.mark.slow))
def test_dtypes_of_two_arrays(fun, dtypes, half):
    check_dtypes(fun, dict(zip(("hh", "hx", "xh", "xx"), dtypes, strict=True)), half)


@pytest.mark.slow
@pytest.mark.parametrize("fun, dtypes", rows(OF_ONE, pytest.mark.whole))
def test_values_of_one_array(fun, dtypes):
    check_values(fun, ["h", "x"])


@pytest.mark.slow
@pytest.mark.parametrize("fun, dtypes", rows(OF_TWO, pytest.mark.whole))
def test_values_of_two_arrays(fun, dtypes):
    check_values(fun, ["hh", "hx", "xh", "xx"])


@pytest.mark.parametrize("table", [OF_ONE, OF_TWO], ids=["one array", "two arrays"])
def test_every_difference_from_the_lists_has_its_reason(table):
    excused = set(" ".join(OTHERWISE.values()).split())
    for row in rows(table):
        dtypes = row.values[1]
        if set(dtypes) <= {"half", "float32"}:  # no autocast touches the others
            assert (kind_of(dtypes) != listed_as(row.id)) == (row.id in excused), row.id


# apex: test_basic_casts. With the dtype inside of autocast.
BASIC = {
    "linear": (lambda a: a @ jnp.ones((4, 3), a.dtype), "half"),
    "convolution": (lambda a: jax.lax.conv(a[None, None], a[None, None], (1, 1), "SAME"), "half"),
    "softmax": (jax.nn.softmax, "float32"),
    "sum": (jnp.sum, "float32"),
    "mean square": (lambda a: jnp.mean(a**2), "float32"),
    "relu": (jax.nn.relu, "float32"),
    "gelu": (jax.nn.gelu, "float32"),
    "concatenate": (lambda a: jnp.concatenate([a, a]), "float32"),
}


@pytest.mark.slow_but(
    "linear-bfloat16",
    "convolution-float16",
    "softmax-float16",
    "sum-bfloat16",
    "mean square-float16",
    "relu-bfloat16",
    "gelu-float16",
    "concatenate-bfloat16",
)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("fun, inside", BASIC.values(), ids=BASIC)
def test_basic_casts(fun, inside, half):
    """Only the function made by autocast casts; gradients have the type of the argument."""
    cast = ampx.autocast(fun, half_dtype=half)
    assert jax.eval_shape(cast, X).dtype == dtype_in(half, inside)
    assert jax.eval_shape(fun, X).dtype == np.float32
    gradient = jax.grad(lambda a: total(cast(a)))
    for given in (X, X.astype(half)):
        assert jax.eval_shape(gradient, given).dtype == given.dtype


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("fun", [row[0] for row in BASIC.values()], ids=BASIC)
def test_arrays_given_in_half_are_computed_with_as_written(fun, half):
    """Unlike Apex: jax.numpy already sums and averages halves in float32, and a cast was asked for.

    What is half in the program itself is not an invention of autocast, which leaves it alone.
    """
    given = X.astype(half)
    assert_bit_equal(jax.jit(ampx.autocast(fun, half_dtype=half))(given), jax.jit(fun)(given))


# apex: test_promotion


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("operator", [jnp.add, jnp.subtract, jnp.multiply, jnp.divide])
def test_mixed_operands_meet_in_float32_in_both_orders(operator, half):
    h = (X @ IDENTITY.astype(half).astype(jnp.float32)).astype(half).astype(jnp.float32)
    cast = ampx.autocast(lambda x, w: (operator(x @ w, x), operator(x, x @ w)), half_dtype=half)
    assert_bit_equal(cast(X, IDENTITY), (operator(h, X), operator(X, h)))


@pytest.mark.parametrize("half", HALVES)
def test_comparisons_of_mixed_operands_see_the_rounding(half):
    rounded = X.astype(half).astype(jnp.float32)
    assert np.any(rounded != X)
    cast = ampx.autocast(lambda x, w: (x @ w == x, x > x @ w), half_dtype=half)
    assert_bit_equal(cast(X, IDENTITY), (rounded == X, X > rounded))


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("kinds", ["hhh", "hxh", "xhh", "hhx", "xxx"])
@pytest.mark.parametrize("join", [jnp.concatenate, jnp.stack])
def test_sequences_are_joined_in_the_widest(join, kinds, half):
    cast = ampx.autocast(of(kinds, lambda *arrays: join(arrays)), half_dtype=half)
    expected = half if kinds == "hhh" else "float32"
    assert jax.eval_shape(cast, X, IDENTITY).dtype == expected
    gradient = jax.jit(jax.grad(lambda x: total(cast(x, IDENTITY))))(X)
    # Each occurrence adds 2x, up to the rounding of the halves.
    np.testing.assert_allclose(gradient, 6 * X, rtol=8 * float(jnp.finfo(half).eps))
    assert gradient.dtype == np.float32


@pytest.mark.parametrize("half", HALVES)
def test_a_running_sum_that_starts_in_half_is_promoted_by_float32(half):
    def running(x, w):
        result = x @ w
        result += x @ w
        before = result
        result += x
        return before, result

    before, after = ampx.autocast(running, half_dtype=half)(X, IDENTITY)
    assert (before.dtype, after.dtype) == (half, np.float32)


# apex: test_cache


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("half", HALVES)
def test_uses_of_a_weight_add_their_gradients_in_float32(half, jit):
    """A cast that two products share would add in half, where 1 + 2**-12 is 1."""
    ones = jnp.ones((1, 4))

    def loss(w):
        return jnp.sum(ones @ w) + jnp.sum((ones * 2.0**-12) @ w)

    gradient = jit(jax.grad(ampx.autocast(loss, half_dtype=half)))(IDENTITY)
    assert_bit_equal(gradient, jnp.full((4, 4), 1 + 2.0**-12))


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("half", HALVES)
def test_train_evaluate_train(half, jit):
    """Each use sees the weight as it is then: as many casts as uses, none of them kept."""

    def evaluate(w):
        return jnp.sum(jnp.square(X @ w))

    cast = jit(ampx.autocast(evaluate, half_dtype=half))
    gradient = jit(jax.grad(ampx.autocast(evaluate, half_dtype=half)))

    def by_hand(w):
        product = X.astype(half) @ w.astype(half)
        return jnp.sum(jnp.square(product.astype(jnp.float32)))

    w = IDENTITY
    rounding = 2 * float(jnp.finfo(half).eps)  # XLA may skip a rounding in one of the programs
    for _ in range(3):
        np.testing.assert_allclose(cast(w), by_hand(w), rtol=rounding)
        grad = gradient(w)
        assert grad.dtype == np.float32
        np.testing.assert_allclose(grad, jax.grad(by_hand)(w), rtol=rounding)
        np.testing.assert_allclose(cast(w), by_hand(w), rtol=rounding)
        w = w - 0.25 * grad


@pytest.mark.parametrize("half", HALVES)
def test_a_weight_updated_inside_of_autocast_is_cast_again(half):
    def steps(w):
        outputs = []
        for _ in range(3):
            outputs.append(X @ w)
            w = w - 0.5 * IDENTITY
        return outputs

    outputs = ampx.autocast(steps, half_dtype=half)(IDENTITY)
    rounded = X.astype(half)
    assert_bit_equal(outputs, [rounded, rounded * 0.5, rounded * 0])


def test_a_function_is_planned_anew_for_each_half_dtype():
    for half in (*HALVES, *HALVES):
        assert ampx.autocast(jnp.matmul, half_dtype=half)(X, IDENTITY).dtype == half


def test_an_array_closed_over_is_read_at_every_call():
    weights = {"w": IDENTITY}
    cast = ampx.autocast(lambda x: x @ weights["w"])
    first = cast(X)
    weights["w"] = 2 * IDENTITY
    assert_bit_equal(cast(X), 2 * first)

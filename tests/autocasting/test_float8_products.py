"""Products in float8: what each recipe computes, beside numpy; infinities, NaN and zeros."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float8_references import half, reference, transposed

import ampx

RECIPES = ("rowwise", "tensorwise", "rowwise_half_dw", "mxfp8")
# A plain layer; the usual one of three axes, whose dw sums over two of them; one whose result has
# four. Rows of very different size, so that a scale of the wrong ones shows. (Behind dw of "tokens"
# XLA's CPU compiler folds a transposition into the product. It cannot run one of half operands with
# a float32 result then.)
EINSUMS = {"dense": "mk,kn->mn", "tokens": "abk,kn->abn", "heads": "abk,khd->abhd"}
SHAPES = {
    "dense": ((32, 64), (64, 96)),
    "tokens": ((1, 32, 64), (64, 96)),
    "heads": ((2, 32, 32), (32, 2, 32)),
}


def draw(shape, seed, spread=3):
    rng = np.random.default_rng(seed)
    exponents = [rng.integers(-spread, spread + 1, size=n) for n in shape]
    sizes = functools.reduce(np.add.outer, exponents)
    return (rng.standard_normal(shape) * 2.0**sizes).astype(np.float32)


def operands(name):
    (x, w), spec = SHAPES[name], EINSUMS[name]
    out = np.einsum(spec, np.zeros(x), np.zeros(w)).shape
    return half(draw(x, 0)), draw(w, 1), half(draw(out, 2))


def with_dense(args):
    """Operands of all layers, with those of "dense" given: one program serves all tests."""
    return {name: operands(name) for name in EINSUMS} | {"dense": args}


@functools.cache
def compiled(recipe, half_dtype="bfloat16"):
    """(y, dx, dw) of all layers, in one program."""

    def run(args):
        results = {}
        for name, (x, w, g) in args.items():
            product = functools.partial(jnp.einsum, EINSUMS[name])
            y, pull = jax.vjp(ampx.autocast(product, dots=recipe, half_dtype=half_dtype), x, w)
            results[name] = y, *pull(g.astype(y.dtype))
        return results

    return jax.jit(run)


@pytest.mark.slow_but("tensorwise")
@pytest.mark.parametrize("recipe", RECIPES)
def test_each_product_is_that_of_its_own_casts_as_numpy_makes_them(recipe):
    args = {name: operands(name) for name in EINSUMS}
    found = compiled(recipe)(args)
    for name, (x, w, g) in args.items():
        to_x, to_w = transposed(EINSUMS[name])
        expected = (
            reference(EINSUMS[name], recipe, x, w, ("x", "w")),
            reference(to_x, recipe, g, w, ("g", "w")),
            reference(to_w, recipe, g, x, ("g", "x")),
        )
        for own, other, dtype in zip(found[name], expected, ("bfloat16", "f4", "f4"), strict=True):
            assert own.dtype == dtype
            # float32 sums of at most 96 terms; a result in bfloat16 is rounded once more, as that
            # of a product in half is.
            is_half = recipe == "mxfp8" or (recipe == "rowwise_half_dw" and own is found[name][2])
            digits = 2.0**-8 if is_half or dtype == "bfloat16" else 0
            error = np.abs(np.asarray(own, np.float64) - other)
            assert np.all(error <= digits * np.abs(other) + 1e-5 * np.max(np.abs(other)))


@pytest.mark.slow_but("rowwise", "tensorwise")
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_error_of_normal_numbers_is_that_of_three_bits(recipe):
    rng = np.random.default_rng(0)
    args = {}
    for name, (of_x, of_w) in SHAPES.items():
        out = np.einsum(EINSUMS[name], np.zeros(of_x), np.zeros(of_w)).shape
        args[name] = tuple(rng.standard_normal(n).astype("f4") for n in (of_x, of_w, out))
    found = compiled(recipe)(args)
    for name, (x, w, g) in args.items():
        to_x, to_w = transposed(EINSUMS[name])
        pairs = ((EINSUMS[name], x, w), (to_x, g, w), (to_w, g, x))
        for own, pair, most in zip(found[name], pairs, (0.045, 0.09, 0.09), strict=True):
            exact = np.einsum(*pair)
            error = np.linalg.norm(np.asarray(own, np.float32) - exact) / np.linalg.norm(exact)
            assert error <= most


@pytest.mark.slow_but("rowwise", "tensorwise")
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_not_finite_comes_out_and_zeros_stay_zeros(recipe):
    for operand, value in itertools.product(range(3), (np.inf, -np.inf, np.nan)):
        args = operands("dense")
        args[operand][3, 5] = value
        y, dx, dw = compiled(recipe)(with_dense(args))["dense"]
        # Row 3 of x and g is row 3 of y and dx; row 3 of w is column 3 of dx.
        touched = {
            0: (y[3], dw[5]),
            1: (y[:, 5], dx[:, 3]),
            2: (dx[3], dw[:, 5]),
        }[operand]
        for part in touched:
            assert not np.any(np.isfinite(np.asarray(part, np.float32))), (operand, value)
    for operand in range(3):
        args = operands("dense")
        args[operand][:] = 0
        results = compiled(recipe)(with_dense(args))["dense"]
        expected_zero = {0: (0, 2), 1: (0, 1), 2: (1, 2)}[operand]
        for index, result in enumerate(results):
            assert np.all(np.isfinite(np.asarray(result, np.float32)))
            assert np.all(result == 0) == (index in expected_zero)


@pytest.mark.slow_but("rowwise", "tensorwise")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_power_of_two_before_the_backward_pass_changes_no_digit(recipe):
    def gradients(factor):
        args = {name: operands(name) for name in EINSUMS}
        scaled = {name: (x, w, g * np.float32(factor)) for name, (x, w, g) in args.items()}
        results = compiled(recipe)(scaled)
        return [np.asarray(g) / np.float32(factor) for _, *gs in results.values() for g in gs]

    plain = gradients(1.0)
    for exponent in (-20, 30):
        for own, other in zip(gradients(2.0**exponent), plain, strict=True):
            np.testing.assert_array_equal(own, other)


@pytest.mark.slow
def test_rows_of_very_different_size_keep_their_digits():
    """Tokens spread over 2**-12 to 2**12: one scale for all would lose whole rows."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((32, 64)) * 2.0 ** rng.integers(-12, 13, size=(32, 1))
    args = with_dense((x.astype("f4"), *operands("dense")[1:]))
    _, w, _ = args["dense"]
    errors = {}
    for recipe in ("rowwise", "tensorwise", "mxfp8"):
        y = np.asarray(compiled(recipe)(args)["dense"][0], np.float32)
        rows = np.linalg.norm(y - x @ w, axis=1) / np.linalg.norm(x @ w, axis=1)
        errors[recipe] = np.max(rows)
    assert errors["rowwise"] < 0.1 and errors["mxfp8"] < 0.1 and errors["tensorwise"] > 0.9


@pytest.mark.slow
def test_float16_is_the_width_of_all_else():
    args = {name: operands(name) for name in EINSUMS}
    wide, narrow = compiled("rowwise")(args), compiled("rowwise", "float16")(args)
    for name in EINSUMS:
        assert [r.dtype.name for r in narrow[name]] == ["float16", "float32", "float32"]
        # Operands are the same: these have eight digits, and the casts leave four of any.
        np.testing.assert_allclose(*(r[name][2] for r in (wide, narrow)), rtol=0, atol=1e-3)

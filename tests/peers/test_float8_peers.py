"""Programs of JAX and of other packages with products in float8, whatever their sizes.

They are small, and no product of theirs has sizes that are multiples of 16. So that rule is lowered
to 1 here. Of JAX's harnesses six programs then have a float8 product. The others that hold products
are traced: theirs are batched, of other dtypes, or ask for a precision.
"""

import functools
import string

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float8_references import half, reference, transposed
from jax.extend import core
from listing import Peer
from programs import make_once, norm
from test_jax_harnesses import GROUPS, forms_of, shapes_of
from test_programs_flax import FLAX

import ampx
from ampx.autocasting import float8

RECIPES = ("rowwise", "tensorwise", "rowwise_half_dw")  # blocks need axes of 32

WITH_PRODUCTS = ("dot_general", "custom_linear_solve")
IN_GRADIENTS = ("cholesky", "qr", "svd", "eigh", "lu", "triangular_solve")
PEERS = (
    Peer(
        source="jax",
        runs="the harnesses of the groups that hold products, under `dots=` with products of any "
        "size: what can be float8 is, dtypes are those of half products, and the six programs of "
        "which every product is float8 give what numpy gives, forward and backward",
        cases=lambda: [
            h.fullname for group in (*WITH_PRODUCTS, *IN_GRADIENTS) for h in GROUPS[group]
        ],
        excluded={},
    ),
    Peer(
        source="flax",
        runs="the models of `test_programs_flax.py`, under `dots=` with products of any size: "
        "gradients in each recipe",
        cases=lambda: list(FLAX.makers),
        excluded={},
        in_suite=lambda: ["linen_scan_over_layers"],
    ),
)


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    monkeypatch.setattr(float8, "MULTIPLE", 1)
    with jax.numpy_dtype_promotion("standard"):  # as the programs were written for
        yield


def arguments_of(harness):
    return harness.dyn_args_maker(np.random.RandomState(0))


def products_of(fun, args):
    """The `dot_general`s of a program, inner ones too."""

    def walk(jaxpr):
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            if eqn.primitive.name == "dot_general":
                yield eqn
            for body in core.jaxprs_in_params(eqn.params):
                yield from walk(body)

    return list(walk(jax.make_jaxpr(fun)(*args)))


def is_float8(eqn):
    return all(atom.aval.dtype.name.startswith("float8") for atom in eqn.invars)


def can_be_float8(eqn):
    """By what the guide says, without ampx: two matrices in float32, of no special precision."""
    lhs, rhs = (atom.aval for atom in eqn.invars)
    _, (batch, _) = eqn.params["dimension_numbers"]
    precision = eqn.params["precision"]
    is_plain = precision in (None, (None, None)) or set(precision) == {jax.lax.Precision.DEFAULT}
    is_float32 = {lhs.dtype, rhs.dtype, eqn.outvars[0].aval.dtype} == {np.dtype("float32")}
    return is_float32 and is_plain and not batch and lhs.size and rhs.size


def of_autocast(fun, recipe):
    return ampx.autocast(fun, dots=recipe)


def spec_of(eqn):
    """A `dot_general` without batch axes in the words of `einsum`."""
    lhs, rhs = (list(range(atom.aval.ndim)) for atom in eqn.invars)
    letters = iter(string.ascii_lowercase)
    lhs = [next(letters) for _ in lhs]
    rhs = [next(letters) for _ in rhs]
    (lhs_sums, rhs_sums), _ = eqn.params["dimension_numbers"]
    for own, other in zip(lhs_sums, rhs_sums, strict=True):
        rhs[other] = lhs[own]
    out = [x for x in lhs if x not in rhs] + [x for x in rhs if x not in lhs]
    return f"{''.join(lhs)},{''.join(rhs)}->{''.join(out)}"


@functools.cache
def programs_in_float8():
    """The harnesses of which every product can be float8: their functions, arguments and specs."""
    found = {}
    for harness in GROUPS["dot_general"]:
        args = arguments_of(harness)
        products = products_of(harness.dyn_fun, args)
        if products and all(map(can_be_float8, products)):
            (eqn,) = products
            found[harness.fullname] = harness.dyn_fun, tuple(map(half, args)), spec_of(eqn)
    return found


@pytest.mark.slow_but("rowwise")
@pytest.mark.parametrize("recipe", RECIPES)
def test_harnesses_give_what_numpy_gives_forward_and_backward(recipe):
    programs = programs_in_float8()
    assert len(programs) == 6
    rng = np.random.default_rng(0)
    cotangents = {
        name: half(np.asarray(rng.standard_normal(np.shape(np.einsum(spec, *args))), "f4"))
        for name, (_, args, spec) in programs.items()
    }

    def run(args, cotangents):
        results = {}
        for name, (fun, _, _) in programs.items():
            y, pull = jax.vjp(of_autocast(fun, recipe), *args[name])
            results[name] = y, *pull(cotangents[name].astype(y.dtype))
        return results

    given = {name: args for name, (_, args, _) in programs.items()}
    is_in_float8 = list(map(is_float8, products_of(run, (given, cotangents))))
    # Of three products each; the gradient of a weight is not, in the recipe that says so.
    assert sum(is_in_float8) == (12 if recipe == "rowwise_half_dw" else 18)
    assert len(is_in_float8) == 18
    found = jax.jit(run)(given, cotangents)
    for name, (_, (x, w), spec) in programs.items():
        to_x, to_w = transposed(spec)
        g = cotangents[name]
        expected = (
            reference(spec, recipe, x, w, ("x", "w")),
            reference(to_x, recipe, g, w, ("g", "w")),
            reference(to_w, recipe, g, x, ("g", "x")),
        )
        exact = (np.einsum(spec, x, w), np.einsum(to_x, g, w), np.einsum(to_w, g, x))
        for place, (own, other) in enumerate(zip(found[name], expected, strict=True)):
            # Half results and half products are rounded once more.
            is_half = place == 0 or (recipe == "rowwise_half_dw" and place == 2)
            digits = 2.0**-8 if is_half else 0
            error = np.abs(np.asarray(own, np.float64) - other)
            limit = digits * np.abs(other) + 1e-5 * np.max(np.abs(other))
            assert np.all(error <= limit), (name, place)
        # What this cannot mistake: the products without casts are further away than the limit.
        assert any(
            np.any(np.abs(other - plain) > 2.0**-6 * np.max(np.abs(plain)))
            for other, plain in zip(expected, exact, strict=True)
        ), name


def check_types(harness, recipe, **forms):
    """Of a program with products: the dtypes that half products give, and float8 where it can be.

    Returns:
      How many products were in float8.
    """
    count = 0
    pairs = zip(
        forms_of(harness, cast=of_autocast, **forms), forms_of(harness, **forms), strict=True
    )
    for (name, form), (_, in_half) in pairs:
        if shapes_of(form) is None or not products_of(form.plain, form.arguments):
            continue
        own, other = form.under_autocast(recipe), in_half.under_autocast("bfloat16")
        found, expected = (jax.eval_shape(fun, *form.arguments) for fun in (own, other))
        assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, expected)
        # What is made of a product afterwards, such as a batch, is made of one in float8.
        of_one = name.endswith("of autocast")
        plain = (harness.dyn_fun, arguments_of(harness)) if of_one else (form.plain, form.arguments)
        possible = any(map(can_be_float8, products_of(*plain)))
        in_float8 = sum(map(is_float8, products_of(own, form.arguments)))
        assert (in_float8 > 0) == possible, (harness.fullname, name)
        count += in_float8
    return count


def test_some_harnesses_have_the_types_that_half_products_give():
    chosen = [harness for group in WITH_PRODUCTS for harness in GROUPS[group][::12]]
    counts = [check_types(h, "float8", gradients=False, batches=False) for h in chosen]
    assert sum(counts) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("group", (*WITH_PRODUCTS, *IN_GRADIENTS))
def test_all_harnesses_with_products_have_the_types_that_half_products_give(request, group):
    """With `--whole` in all forms and recipes; else forward, and of few their gradients."""
    whole = request.config.getoption("--whole")
    count = 0
    for place, harness in enumerate(GROUPS[group]):
        for recipe in RECIPES if whole else ("float8",):
            takes_all = whole or (group in IN_GRADIENTS and place % 6 == 0)
            count += check_types(harness, recipe, gradients=takes_all, batches=whole)
    assert (count > 0) == (group in ("dot_general", "qr"))


@pytest.mark.slow
@pytest.mark.parametrize("name", FLAX.makers)
def test_models_of_flax_have_gradients_of_float8(request, name):
    if not request.config.getoption("--whole") and name != "linen_scan_over_layers":
        pytest.skip("with --whole")
    program = make_once(FLAX.makers[name])

    def compare(params, batch):
        exact = jax.grad(program.loss)(params, batch)
        errors = {}
        for recipe in (None, *RECIPES):
            grads = jax.grad(ampx.autocast(program.loss, dots=recipe))(params, batch)
            difference = jax.tree.map(jnp.subtract, grads, exact)
            errors[str(recipe)] = norm(difference) / norm(exact)
        return errors

    given = program.params, program.batch
    explanation = ampx.explain(program.loss, dots="float8")(*given)
    assert explanation.products_in_float8()[0] > 0
    errors = jax.device_get(jax.jit(compare)(*given))
    for recipe in RECIPES:
        # Three bits in place of seven, and what they make of each other in a few layers.
        assert max(0.02, 2 * errors["None"]) < errors[recipe] < 0.3, errors

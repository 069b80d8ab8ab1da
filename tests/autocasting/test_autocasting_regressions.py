"""Faults that were found in autocast by trying to break it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_probes import bfloat16, dtypes, float16, normal
from helpers import all_finite, assert_bit_equal
from jax import lax

import ampx
from benchmarks.autocast import counted_compilations

A, X = normal(8, 8, seed=1), normal(4, 8, seed=2)
EPS, BIG = jnp.float32(1e-12), jnp.float32(1e6)


# Branches.


def branching(last):
    def fun(w, x, p):
        def shared():
            h = jnp.tanh(x @ w)
            return h, h

        s, out = lax.cond(p, shared, lambda: (x, x @ w))
        return s, last(out)

    return fun


@pytest.mark.parametrize("last", [jnp.mean, jnp.sum, jax.nn.relu, lambda h: h])
def test_branches_agree_where_two_outputs_are_one_value(last):
    fun = branching(last)
    for flag in (True, False):
        result = jax.jit(bfloat16(fun))(A, X, flag)
        np.testing.assert_allclose(result[1].astype(float), fun(A, X, flag)[1], atol=0.1)
    loss = bfloat16(lambda w: jnp.sum(fun(w, X, True)[1].astype(jnp.float32)))
    assert all_finite(jax.grad(loss)(A))


# Numbers that are not known, or that half does not have.


def norm(x):
    h = x @ x
    return h / jnp.maximum(jnp.max(jnp.abs(h), -1, keepdims=True), EPS)


EYE = jnp.eye(2)
OUT_OF_RANGE = {
    "computed array": (lambda x: (x @ x) / (jnp.full((2, 2), 300.0) * 300.0), 10 * EYE),
    "power": (lambda x: (x @ x) / jnp.power(10.0, 6), 10 * EYE),
    "exponential": (lambda x: (x @ x) / jnp.exp(20.0), 10 * EYE),
    "closed over, tiny": (norm, jnp.diag(jnp.array([1.0, 0.0]))),
    "closed over, large": (lambda x: x @ x * BIG / BIG, EYE),
    "numpy": (lambda x: x @ x * np.float32(1e6), EYE),
    "literal": (lambda x: x @ x * 1e6, EYE),
    "bound": (lambda x: jnp.where(x @ x < 1e6, x @ x, 0.0), EYE),
    "tiny literal": (lambda x: (x @ x * 1e-9) / 1e-9, EYE),
    "large mask": (lambda x: jnp.where(EYE > 0, 1e-9, 1.0) * (x @ x) * 1e8, EYE),
    "range": (lambda x: (x @ x) + jnp.arange(2000.0, 2002.0)[:, None] * 1.0, EYE),
    "root": (lambda x: (x @ x) / jnp.sqrt(64.0), EYE),
}


@pytest.mark.parametrize("fun, x", OUT_OF_RANGE.values(), ids=OUT_OF_RANGE)
def test_constants_keep_their_value(fun, x):
    for cast in (float16, bfloat16):
        np.testing.assert_allclose(cast(fun)(x).astype(float), fun(x), rtol=1e-2)


WITH_ARGUMENTS = {
    "integer and weak": (lambda x, n: (x @ x) / (n + 1.0), jnp.int32(200_000)),
    "power of two": (lambda x, n: (x @ x * 2.0**-10) / 2.0**n, jnp.int32(-20)),
    "large scalar": (lambda x, s: (x @ x * s) / 1e6, jnp.float32(1e6)),
    "tiny divisor": (lambda x, s: (x @ x * 1e-4) / s, jnp.float32(1e-7)),
    "per feature": (lambda x, s: (x @ x * 1e-4) / s, jnp.full(2, 1e-7)),
    "scale per feature": (lambda x, s: (x @ x) * s, jnp.full(2, 5e-7)),
}


@pytest.mark.parametrize("fun, s", WITH_ARGUMENTS.values(), ids=WITH_ARGUMENTS)
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_scalars_and_scales_are_not_rounded_before_they_are_used(fun, s, jit):
    with jax.numpy_dtype_promotion("standard"):
        result, expected = jit(float16(fun))(EYE, s), fun(EYE, s)
    np.testing.assert_allclose(result.astype(float), expected, rtol=0.1)


@pytest.mark.parametrize("s", [1e4, 1e-4])
def test_a_python_number_is_the_same_under_jit(s):
    f = float16(lambda x, s: x @ x * s)
    np.testing.assert_allclose(jax.jit(f)(EYE, s).astype(float), s * EYE, rtol=1e-2)
    np.testing.assert_allclose(f(EYE, s).astype(float), s * EYE, rtol=1e-2)


def test_numbers_do_not_promote():
    def f(x, s):
        h = x @ x
        return h * s, h / s, h + s, h / jnp.sqrt(64.0), h + jnp.ones(8), h * 0.5

    assert dtypes(bfloat16(f)(A, jnp.float32(3))) == ("bfloat16",) * 6


# What keeps an operation away from where it ends, at 1, stays on its side of 1.
GUARDS = {
    "clip": lambda h: jnp.clip(jax.nn.sigmoid(h), 1e-7, 1 - 1e-7),
    "clip in a function": jax.jit(lambda h: jnp.clip(jnp.tanh(h), -0.9995, 0.9995)),
    "clamp": lambda h: lax.clamp(-1 + 1e-6, jnp.tanh(h), 1 - 1e-6),
    "minimum of an array": lambda h: jnp.minimum(jnp.tanh(h), jnp.full(h.shape, 1 - 1e-6)),
    "choice": lambda h: jnp.where(h > 4, 1 - 1e-6, jnp.tanh(h)),
}


@pytest.mark.parametrize("guard", GUARDS.values(), ids=GUARDS)
@pytest.mark.parametrize("half", [bfloat16, float16])
def test_guards_at_one_are_not_rounded_to_one(guard, half):
    def loss(x):
        p = guard(x @ x)
        return jnp.mean(jnp.log1p(-p) + jnp.arctanh(p) + jnp.sqrt(1 - p**2)), p

    (value, p), grad = jax.value_and_grad(half(loss), has_aux=True)(4 * jnp.eye(2))
    assert all_finite((value, p, grad))
    assert jnp.max(jnp.abs(p)) < 1


def test_other_bounds_do_not_promote():
    assert bfloat16(lambda x: jnp.clip(x @ x, -1.0, 0.99))(EYE).dtype == jnp.bfloat16


# By einsum and by `*`: the same operation in two notations.
WITHOUT_A_SUM = {
    "angles": (lambda h, p: jnp.einsum("i,j->ij", p, p), lambda h, p: p[:, None] * p, "float32"),
    "scale": (lambda h, p: jnp.einsum("bi,i->bi", h, p), lambda h, p: h * p, "bfloat16"),
    "scale over another axis": (
        lambda h, p: jnp.einsum("bi,j->bij", h, p),
        lambda h, p: h[..., None] * p,
        "bfloat16",
    ),
    "weight of each row": (
        lambda h, p: jnp.einsum("bi,b->bi", h, p),
        lambda h, p: h * p[:, None],
        "float32",
    ),
    "halves": (lambda h, p: jnp.einsum("bi,bi->bi", h, h), lambda h, p: h * h, "bfloat16"),
    "half and float32": (
        lambda h, p: jnp.einsum("bi,bi->bi", h, jnp.exp(h)),
        lambda h, p: h * jnp.exp(h),
        "float32",
    ),
    "lifted": (
        lambda h, p: jnp.einsum("bi,bi->bi", h, h).sum(),
        lambda h, p: (h * h).sum(),
        "float32",
    ),
}


@pytest.mark.parametrize(
    "by_einsum, by_product, dtype", WITHOUT_A_SUM.values(), ids=list(WITHOUT_A_SUM)
)
def test_a_product_without_a_sum_is_a_multiplication(by_einsum, by_product, dtype):
    w, p = A / 8, jnp.linspace(0.1, 999.7, 8)
    found, expected = (
        bfloat16(lambda w, p, fun=fun: fun(w @ w, p)) for fun in (by_einsum, by_product)
    )
    assert found(w, p).dtype.name == expected(w, p).dtype.name == dtype
    np.testing.assert_array_equal(found(w, p), expected(w, p))
    grads, of_product = (
        jax.grad(lambda w, p, fun=fun: fun(w, p).astype(jnp.float32).sum(), argnums=(0, 1))(w, p)
        for fun in (found, expected)
    )
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=2e-2), grads, of_product)
    explained = ampx.explain(lambda w, p: by_einsum(w @ w, p), dots="float8")(w, p)
    assert explained.products_in_half()[1] == explained.products_in_float8()[1] == 1


def test_a_rule_asks_for_half_of_a_product_without_a_sum():
    rules = ampx.DEFAULT_RULES.half("dot_general")
    outer = bfloat16(lambda p: jnp.einsum("i,j->ij", p, p), rules=rules)
    assert outer(jnp.ones(4)).dtype == jnp.bfloat16


def test_a_fill_of_a_gather_stays_finite():
    def rows(x, i):
        return jnp.take(x @ x, i, axis=0, mode="fill", fill_value=-1e9)

    assert all_finite(float16(rows)(EYE, jnp.array([5])))


def test_a_bias_yields_in_a_batch_of_one_too():
    f = bfloat16(lambda w, b, x: x @ w + b)
    for rows in (4, 1):
        assert f(A, jnp.ones(8), X[:rows]).dtype == jnp.bfloat16


# Loops.


def closed_over_by_scan(w):
    h = jnp.ones((4, 8)) @ w
    return lax.scan(lambda c, _: (c + jnp.mean(h), None), 0.0, None, length=3000)[0]


def closed_over_by_fori(w):
    h = jnp.ones((4, 8)) @ w
    return lax.fori_loop(0, 3000, lambda _, c: c + jnp.mean(h), 0.0)


def closed_over_by_map(w):
    h = jnp.ones((4, 8)) @ w
    return jnp.sum(lax.map(lambda q: q * jnp.mean(h), jnp.ones(3000)))


@pytest.mark.parametrize(
    "fun", [closed_over_by_scan, closed_over_by_fori, closed_over_by_map], ids=lambda f: f.__name__
)
def test_cotangents_of_what_every_step_reads_are_summed_in_float32(fun):
    w = jnp.ones((8, 8))
    for cast in (bfloat16, float16):
        np.testing.assert_allclose(jax.grad(cast(fun))(w), jax.grad(fun)(w), rtol=1e-2)


# Custom rules.


@jax.custom_jvp
def times(x, n):
    return x * n


times.defjvp(lambda primals, tangents: (times(*primals), tangents[0] * primals[1]))


# Since jax 0.12 the last two are primitives that hold functions, which are left in float32.
@pytest.mark.filterwarnings("ignore:autocast cannot rewrite .* call_hi_primitive")
@pytest.mark.parametrize(
    "fun",
    [
        lambda x: jnp.sum(times(x @ x, jnp.float32(2))),
        lambda x: jnp.sum(jnp.frexp(x @ x)[0]),
        lambda x: jnp.sum(jnp.ldexp(x @ x, 2)),
    ],
)
def test_custom_rules_with_integers(fun):
    np.testing.assert_allclose(jax.grad(bfloat16(fun))(A), jax.grad(fun)(A), rtol=0.1, atol=0.2)


@jax.custom_jvp
def refusing_jvp(x, q):
    return x @ x * q


def _refusing_rule(primals, tangents):
    if type(tangents[1]) is not jax.custom_derivatives.SymbolicZero:
        raise NotImplementedError("no gradient in q")
    (x, q), t = primals, tangents[0]
    return refusing_jvp(x, q), (x @ t + t @ x) * q


refusing_jvp.defjvp(_refusing_rule, symbolic_zeros=True)


@jax.custom_vjp
def refusing_vjp(x, q):
    return x * q


def _refusing_forward(x, q):
    if q.perturbed:
        raise NotImplementedError("no gradient in q")
    return x.value * q.value, q.value


refusing_vjp.defvjp(_refusing_forward, lambda q, g: (g * q, None), symbolic_zeros=True)


@pytest.mark.parametrize("fun", [refusing_jvp, refusing_vjp])
def test_rules_are_told_what_is_not_differentiated(fun):
    q = jnp.full((8, 8), 2.0)

    def loss(x, q):
        return jnp.sum(fun(x, q))

    expected = jax.grad(loss)(A, q)
    np.testing.assert_allclose(jax.grad(bfloat16(loss))(A, q), expected, rtol=0.1, atol=0.2)
    with pytest.raises(NotImplementedError, match="no gradient in q"):
        jax.grad(bfloat16(loss), argnums=1)(A, q)


# Marks.

WRAPPERS = {
    "float": ampx.float_function,
    "half": ampx.half_function,
    "promote": ampx.promote_function,
    "autocast": ampx.autocast,
    "disabled": functools.partial(ampx.autocast, enabled=False),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_marks_compile_nothing_anew(wrap):
    wrapped = wrap(jnp.sin)
    f = bfloat16(lambda x: wrapped(x @ x))
    f(A)
    with counted_compilations() as compilations:
        f(A)
    assert not compilations


# Names that ampx gives to arguments of its own.
KEYWORDS = dict(fun=jnp.sin, step=jnp.cos, model=2.0, call=3.0)
FORWARDS = {
    **{name: lambda f, x, wrap=wrap: wrap(f)(x, **KEYWORDS) for name, wrap in WRAPPERS.items()},
    **{
        f"{name} in autocast": lambda f, x, wrap=wrap: ampx.autocast(wrap(f))(x, **KEYWORDS)
        for name, wrap in WRAPPERS.items()
    },
    "wrap": lambda f, x: ampx.opt_level("O2").wrap(f)(x, **KEYWORDS),
    "call": lambda f, x: ampx.opt_level("O2").call(f, x, **KEYWORDS),
    "call at O1": lambda f, x: ampx.opt_level("O1").call(f, x, **KEYWORDS),
    "call_part": lambda f, x: ampx.opt_level("O2").call_part(f, x, **KEYWORDS),
    "explain": lambda f, x: ampx.explain(f)(x, **KEYWORDS),
    "lint_step": lambda f, x: ampx.lint_step(f)(x, **KEYWORDS),
    "trace_overflow": lambda f, x: ampx.trace_overflow(f)(x, **KEYWORDS),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_keywords_of_a_function_may_have_any_name(name):
    def called(x, fun, step, model, call):
        return fun(x) + step(x) + model * call

    FORWARDS[name](called, A)


@pytest.mark.parametrize("wrap", [WRAPPERS[name] for name in ("float", "half", "promote")])
def test_marks_give_back_what_is_not_an_array(wrap):
    g = wrap(lambda x: (x, x.shape[0], "name"))

    def f(x):
        y, rows, name = g(x)
        assert name == "name"
        return y.reshape(rows, 2, -1)

    assert ampx.autocast(f)(A).shape == (8, 2, 4)


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("how", ["argument", "module", "method"])
def test_marks_keep_updates_of_nnx_modules(wrap, how):
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self):
            self.norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
            self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.dropout(self.norm(x))

    def loss(model, x):
        if how == "argument":
            return wrap(lambda model, x: model(x))(model, x)
        return wrap(model if how == "module" else model.__call__)(x)

    model = Model()
    with jax.numpy_dtype_promotion("standard"):  # half inputs meet the model's float32
        ampx.autocast(loss)(model, X)
    assert jnp.abs(model.norm.mean[...]).sum() > 0
    assert model.dropout.rngs.count[...] == 1


def test_changes_of_an_nnx_structure_are_refused():
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self):
            self.calls = 0
            self.layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def counts(model, x):
        model.calls += 1
        return model.layer(x)

    def grows(model, x):
        model.extra = nnx.Linear(8, 8, rngs=nnx.Rngs(1))
        return model.layer(x)

    for fun in (counts, grows):
        with pytest.raises(ValueError, match="changes the structure of an nnx module"):
            ampx.autocast(fun)(Model(), X)


# Arguments.


def test_references_are_written_to():
    from flax import nnx  # noqa: F401 (it takes references for nodes of its graphs)

    ref = jax.new_ref(jnp.zeros((4, 8)))

    def store(ref, w):
        ref[...] = X @ w
        return jnp.sum(X @ w)

    jax.jit(bfloat16(store))(ref, A)
    np.testing.assert_allclose(ref[...], X @ A, rtol=2e-2, atol=2e-2)


def test_numpy_numbers_and_words_are_passed_on():
    def f(x, n, words):
        assert words[0] == "a"
        return (x @ x).reshape(n, -1)

    assert bfloat16(f)(A, np.int64(4), np.array(["a"])).shape == (4, 16)


def test_a_custom_vjp_may_close_over_what_is_not_differentiated():
    def loss(x, w):
        @jax.custom_vjp
        def g(x):
            return x @ w

        g.defvjp(lambda x: (x @ w, w), lambda w, c: (c @ w.T,))
        return jnp.sum(g(x))

    constant = functools.partial(loss, w=A)
    expected = jax.grad(constant)(X)
    np.testing.assert_allclose(jax.grad(bfloat16(constant))(X), expected, rtol=0.1, atol=0.1)


def test_half_results_are_bit_equal_where_nothing_changed():
    assert_bit_equal(bfloat16(lambda x: x @ x)(A), (A.astype("bfloat16") @ A.astype("bfloat16")))

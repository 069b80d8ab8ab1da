"""autocast(dots=...): which products become float8, in which transformations; what explain says."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax
from jax.extend import core
from jax.sharding import PartitionSpec as P

import ampx
from ampx.autocasting import float8

E4M3 = "float8_e4m3fn"


def draw(*shape, seed=0, size=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * size).astype(np.float32)


W, X = draw(32, 32, seed=1, size=0.2), draw(64, 32)


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) @ w.T * x)


def equations_of(jaxpr):
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for body in core.jaxprs_in_params(eqn.params):
            yield from equations_of(body)


def float8_products(fun, *args):
    """The operand dtypes of all products in float8 of the program that runs."""
    jaxpr = jax.make_jaxpr(fun)(*args)
    dtypes = [
        tuple(atom.aval.dtype.name for atom in eqn.invars)
        for eqn in equations_of(jaxpr)
        if eqn.primitive.name == "dot_general"
    ]
    return [pair for pair in dtypes if all(name.startswith("float8") for name in pair)]


@jax.custom_vjp
def with_a_rule(w, x):
    return loss(w, x)


with_a_rule.defvjp(lambda w, x: jax.vjp(loss, w, x), lambda pull, cotangent: pull(cotangent))


@jax.custom_jvp
def hidden_layer(w, x):
    return jnp.tanh(x @ w)


@hidden_layer.defjvp
def _hidden_layer_jvp(primals, tangents):
    (w, x), (dw, dx) = primals, tangents
    y = hidden_layer(w, x)
    return y, (1 - y**2) * (dx @ w + x @ dw)


def parts(x):
    return x.reshape(4, 16, 32)


def scanned(fun, w, x):
    return lax.scan(lambda total, part: (total + fun(w, part), None), 0.0, parts(x))[0] / 4


def layers(fun, w, x):
    """A scan over a stack of layers; the sum of their gradients is that of one shared weight."""
    stack = jnp.stack([w, w])
    return lax.scan(lambda total, layer: (total + fun(layer, x), None), 0.0, stack)[0] / 2


def sharded(check_vma, fun, w, x):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def mean(w, x):
        return lax.pmean(fun(w, x), "data")

    return jax.shard_map(
        mean, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma
    )(w, x)


# Each gives the mean of the same 64 rows, as one function of the loss.
FORMS = {
    "remat": lambda fun, w, x: jax.checkpoint(fun)(w, x),
    "saved": lambda fun, w, x: jax.checkpoint(
        fun, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    )(w, x),
    "jit": lambda fun, w, x: jax.jit(fun)(w, x),
    "cond": lambda fun, w, x: lax.cond(x[0, 0] < 9, fun, lambda w, x: 0.0, w, x),
    "switch": lambda fun, w, x: lax.switch(1, [lambda w, x: 0.0, fun], w, x),
    "map": lambda fun, w, x: lax.map(lambda part: fun(w, part), parts(x)).mean(),
    "fori_loop": lambda fun, w, x: lax.fori_loop(0, 2, lambda i, t: t + fun(w, x) / 2, 0.0),
    "vmap": lambda fun, w, x: jax.vmap(fun, in_axes=(None, 0))(w, parts(x)).mean(),
    "scan": scanned,
    "layers": layers,
    "shard_map": functools.partial(sharded, True),
    "shard_map unchecked": functools.partial(sharded, False),
    "custom_vjp": lambda fun, w, x: with_a_rule(w, x),
}


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("remat", "layers", "shard_map"), id="three"),
        pytest.param(tuple(FORMS), id="all", marks=pytest.mark.slow),
    ],
)
def test_gradients_are_the_same_through_every_transformation(names):
    autocast = functools.partial(ampx.autocast, dots="float8")

    @jax.jit
    def run(w, x):
        found = {}
        for name in names:
            form = FORMS[name]
            found[name] = jax.grad(autocast(functools.partial(form, loss)))(w, x)
            if len(names) > 3 and name != "custom_vjp":
                found[f"{name}, inside"] = jax.grad(functools.partial(form, autocast(loss)))(w, x)
        if len(names) > 3:
            of_parts = jax.vmap(jax.grad(autocast(loss)), (None, 0))(w, parts(x))
            found["vmap of grad"] = of_parts.mean(0)
            found["autocast of grad"] = autocast(jax.grad(loss))(w, x)
        return found, jax.grad(autocast(loss))(w, x), jax.grad(loss)(w, x)

    found, plain, exact = jax.device_get(run(W, X))
    size = np.linalg.norm(exact)
    assert 0.01 < np.linalg.norm(plain - exact) / size < 0.09
    for name, gradient in found.items():
        # A number that another program rounds to the other side is off by 1/8 at most; and a sum of
        # fewer rows has scales of its own.
        assert np.linalg.norm(gradient - plain) / size < 0.04, name
        assert np.linalg.norm(gradient - exact) / size > 0.01, f"{name} is not float8"


def test_products_of_a_custom_jvp_stay_half():
    """JAX transposes what its rule does with tangents, which a product in float8 cannot be."""

    def loss(w, x):
        return jnp.mean(hidden_layer(w, x) @ w.T * x)

    fun = ampx.autocast(loss, dots="float8")
    explanation = ampx.explain(loss, dots="float8")(W, X)
    assert explanation.products_in_float8() == (1, 2)
    assert "not: 1 custom_jvp" in str(explanation)
    found, exact = jax.jit(lambda w: (jax.grad(fun)(w, X), jax.grad(loss)(w, X)))(W)
    assert len(float8_products(jax.grad(fun), W, X)) == 3
    assert 0.01 < np.linalg.norm(found - exact) / np.linalg.norm(exact) < 0.09
    # So forward mode goes through it, where no other product is in float8.
    jax.eval_shape(lambda w: jax.jvp(ampx.autocast(hidden_layer, dots="float8"), (w, X), (w, X)), W)


@pytest.mark.slow
def test_second_derivatives_are_float8_products():
    def penalty(fun, w):
        return jnp.sum(jax.grad(fun)(w, X) ** 2)

    found = jax.grad(functools.partial(penalty, ampx.autocast(loss, dots="tensorwise")))
    pairs = float8_products(found, W)
    # Two products forward, three backward, and then those of the derivatives of the three.
    assert len(pairs) > 5 and ("float8_e5m2", E4M3) in pairs
    near, exact = jax.jit(lambda w: (found(w), jax.grad(functools.partial(penalty, loss))(w)))(W)
    assert np.linalg.norm(near - exact) / np.linalg.norm(exact) < 0.15


@pytest.mark.slow_but("jvp", "jacfwd")
@pytest.mark.parametrize("transform", ["jvp", "jacfwd", "hessian", "inside scan"])
def test_forward_mode_is_refused_by_an_error_that_names_dots(transform):
    fun = ampx.autocast(loss, dots="float8")
    derive = {
        "jvp": lambda w: jax.jvp(lambda w: fun(w, X), (w,), (w,)),
        "jacfwd": jax.jacfwd(lambda w: fun(w, X)),
        "hessian": jax.hessian(lambda w: fun(w, X)),
        "inside scan": lambda w: jax.jvp(lambda w: scanned(fun, w, X), (w,), (w,)),
    }[transform]
    with pytest.raises(TypeError, match=r"forward-mode .* dots='rowwise'"):
        jax.jit(derive).lower(W)
    if transform == "hessian":  # of what goes through no such product
        jax.jit(jax.hessian(lambda scale: scale**2 * fun(W, X))).lower(1.0)


def test_weights_are_cast_from_what_is_stored():
    """Also where half products would have the weights of a scan converted before it."""

    def scan(stack, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0].sum()

    for fun, weights in ((loss, W), (scan, np.stack([W, W]))):
        run = jax.grad(ampx.autocast(jax.checkpoint(fun), dots="float8"))
        halves = {
            eqn.outvars[0].aval.shape
            for eqn in equations_of(jax.make_jaxpr(run)(weights, X))
            if eqn.primitive.name == "convert_element_type"
            and eqn.outvars[0].aval.dtype == jnp.bfloat16
        }
        assert halves == {X.shape}


class Net(nn.Module):
    """Three float8 products, a batched one, one of 103 columns, and a convolution."""

    @nn.compact
    def __call__(self, x):  # f32[4, 16, 32]
        x = nn.Dense(32, name="up")(x)
        x = nn.Dense(32, name="down")(x)
        x = jnp.einsum("btd,bsd->bts", x, x) @ x
        x = nn.Conv(32, (3,), name="conv")(x)
        return nn.Dense(103, name="head")(nn.Dense(32, name="last")(x))


RULES = ampx.DEFAULT_RULES


@pytest.mark.parametrize(
    ("rules", "dots", "counts"),
    [
        (RULES, "float8", {"float8": 3, "batched": 2, "no matrix product": 1, "size": 1}),
        (RULES.half("last"), "float8", {"float8": 2, "rule": 1}),
        (RULES.float32("up"), "tensorwise", {"float8": 2, "size": 1}),
        (RULES.half("dot_general").float8("down"), "float8", {"float8": 1, "rule": 5}),
        (RULES.float32("Net").float8("Net"), "float8", {"float8": 3, "batched": 2, "size": 1}),
        (RULES.half("last", result="float32"), "float8", {"float8": 2, "rule": 1}),
        (RULES, "mxfp8", {"float8": 0, "size": 4}),  # 16 tokens are half a block
    ],
)
def test_rules_are_the_filter_and_explain_says_why(rules, dots, counts):
    x = jnp.ones((4, 16, 32))
    params = jax.eval_shape(Net().init, jax.random.key(0), x)
    explanation = ampx.explain(Net().apply, rules=rules, dots=dots)(params, x)
    float8, total = explanation.products_in_float8()
    assert (float8, total) == (counts.pop("float8"), 7)
    for reason, count in counts.items():
        assert sum(row.not_float8 == reason for row in explanation.equations) == count
        assert f"{count} {reason}" in str(explanation)
    pairs = float8_products(ampx.autocast(Net().apply, rules=rules, dots=dots), params, x)
    assert pairs == [(E4M3, E4M3)] * float8
    assert not explanation.idle_rules


def test_explain_shows_casts_and_results():
    rows = ampx.explain(loss, dots="float8")(W, X).equations
    product = next(row for row in rows if row.primitive == "dot_general")
    assert product.operands == (("float32", E4M3),) * 2
    assert product.results == (("float32", "bfloat16"),) and product.rule == "half"
    table = str(ampx.explain(loss, dots=ampx.Float8("tensorwise"))(W, X))
    assert "f32>f8_e4m3fn f32>f8_e4m3fn" in table
    assert table.endswith(
        "0 of 2 matrix products and convolutions in bfloat16\n2 of 2 in float8, tensorwise"
    )
    assert "in float8" not in str(ampx.explain(loss)(W, X))


def test_it_is_said_where_a_device_multiplies_in_half_in_silence():
    def fallback(recipe, **device):
        return float8.find_fallback(ampx.Float8(recipe), types.SimpleNamespace(**device))

    def gpu(capability):
        return dict(platform="gpu", device_kind="A GPU", compute_capability=capability)

    assert "A GPU has compute capability 8.6" in fallback("rowwise", **gpu("8.6"))
    for device in (gpu("8.9"), gpu("9.0"), gpu("12.0"), gpu("gfx942"), dict(platform="cpu")):
        assert fallback("rowwise", **device) == ""
        assert fallback("mxfp8", **device).startswith("mxfp8 multiplies in half")
    told = str(ampx.explain(loss, dots="mxfp8")(W, X)).splitlines()
    assert told[-1].startswith("no faster here: mxfp8 multiplies in half")


def test_products_that_ask_for_something_else_are_left_alone():
    def other(w, x):
        exact = jnp.matmul(x, w, precision="highest")
        whole = jnp.matmul(x, w, preferred_element_type=jnp.bfloat16)
        mixed = lax.dot(x, w.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
        return exact, whole, mixed, x[:0] @ w

    assert not float8_products(ampx.autocast(other, dots="float8"), W, X)


def test_sizes_that_are_not_known_yet_stay_half():
    (rows,) = jax.export.symbolic_shape("rows")
    args = (W, jax.ShapeDtypeStruct((rows, 32), jnp.float32))
    explanation = ampx.explain(lambda w, x: x @ w, dots="float8")(*args)
    assert explanation.equations[-1].not_float8 == "size"


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match="dots must be one of .*did you mean 'float8'"):
        ampx.autocast(loss, dots="flaot8")
    with pytest.raises(TypeError, match="dots must be one of"):
        ampx.autocast(loss, dots=jnp.float8_e4m3fn)
    with pytest.raises(ValueError, match="recipe must be one of"):
        ampx.Float8("row")
    with pytest.raises(ValueError, match="rules name products for float8, but dots is None"):
        ampx.autocast(loss, rules=RULES.float8("head"))
    assert ampx.Float8() == ampx.Float8("rowwise")

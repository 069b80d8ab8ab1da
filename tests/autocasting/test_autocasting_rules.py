"""Rules: every primitive has a precision, and users can change any of them."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax.extend import core

import ampx
from ampx.autocasting import tables

X = jnp.ones((4, 8))
W = jnp.ones((8, 8))


def public_primitives():
    modules = (core.primitives, jax.lax, jax.lax.linalg)
    return {p.name for m in modules for p in vars(m).values() if isinstance(p, core.Primitive)}


def test_every_public_primitive_of_this_jax_is_classified():
    unknown = public_primitives() - set(tables.DEFAULTS)
    assert not unknown, f"give these a list in autocasting/tables.py: {sorted(unknown)}"


def test_there_are_primitives_to_classify():
    assert {"dot_general", "scan", "custom_vjp_call", "exp"} <= public_primitives()


def test_no_primitive_stands_in_two_lists():
    lists = (tables._HALF, tables._FLOAT32, tables._WIDEST, tables._PASS, tables._RECURSE)
    names = " ".join((*lists, tables._OPAQUE)).split()
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "special",
    [
        "WITHOUT_HALF_FORM",
        "HIDING_FUNCTIONS",
        "TAKING_BIAS_OR_SCALE",
        "ACCUMULATING",
        "SELECTING",
        "MOVING",
        "SUMMING_WHEN_TRANSPOSED",
        "ONE_TO_ONE",
    ],
)
def test_the_special_sets_name_primitives_of_the_lists(special):
    assert getattr(tables, special) <= set(tables.DEFAULTS)


def dtype_of(fun, rules, *args):
    return jax.eval_shape(ampx.autocast(fun, rules=rules), *(args or (X,))).dtype.name


def own_norm(h):
    return h / jnp.max(jnp.abs(h), axis=-1, keepdims=True)


class Scale(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x * self.param("scale", nn.initializers.ones, ()) + 1.0


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dense(8, name="inner")(x)
        return nn.Dense(8, name="head")(Scale()(h))


HALF, FLOAT = "bfloat16", "float32"
RULES = ampx.DEFAULT_RULES


@pytest.mark.parametrize(
    ("fun", "rules", "expected"),
    [
        (lambda x: jnp.exp(x @ W), RULES, FLOAT),
        (lambda x: jnp.exp(x @ W), RULES.half("exp"), HALF),
        (lambda x: jnp.exp(x @ W), RULES.widest("exp"), HALF),
        (lambda x: jnp.exp(x), RULES.widest("exp"), FLOAT),
        (lambda x: x @ W, RULES.float32("dot_general"), FLOAT),
        (lambda x: x @ W, RULES.float32("dot_general").half("dot_general"), HALF),
        (lambda x: jnp.concatenate([x @ W, x]), RULES.half("concatenate"), HALF),
        (lambda x: own_norm(x @ W), RULES, HALF),
        (lambda x: own_norm(x @ W), RULES.float32(own_norm), FLOAT),
        (lambda x: own_norm(x @ W) + own_norm(x @ W), RULES.float32(own_norm), FLOAT),
        (lambda x: jax.jit(own_norm)(x @ W), RULES.float32(own_norm), FLOAT),
        (lambda x: jax.nn.silu(x @ W), RULES, HALF),
        (lambda x: jax.nn.silu(x @ W), RULES.float32("silu"), FLOAT),
        (lambda x: jax.nn.silu(x @ W), RULES.float32(jax.nn.silu), FLOAT),
        (
            lambda x: jnp.tanh(x @ W),
            RULES.float32(when=lambda e: e.primitive.name == "tanh"),
            FLOAT,
        ),
    ],
)
def test_a_rule_by_primitive_function_or_predicate(fun, rules, expected):
    assert dtype_of(fun, rules) == expected


def test_a_rule_covers_the_function_it_names_and_not_its_callers():
    def caller(x):
        return own_norm(x @ W), jnp.tanh(x @ W)

    normed, other = jax.eval_shape(ampx.autocast(caller, rules=RULES.float32(own_norm)), X)
    assert (normed.dtype.name, other.dtype.name) == (FLOAT, HALF)


def test_a_function_jitted_elsewhere_is_not_taken_for_its_first_caller():
    shared = jax.jit(lambda h: h * 3.0)

    def first(h):
        return shared(h)

    def f(x):
        return first(x @ W), shared(x @ W)

    named, other = jax.eval_shape(ampx.autocast(f, rules=RULES.float32(first)), X)
    assert (named.dtype.name, other.dtype.name) == (FLOAT, HALF)


@pytest.mark.parametrize(
    ("rules", "head", "inner"),
    [
        (RULES, HALF, HALF),
        (RULES.float32("head"), FLOAT, HALF),
        (RULES.float32("Net/head"), FLOAT, HALF),
        (RULES.float32(Net), FLOAT, FLOAT),
        (RULES.float32("Net"), FLOAT, FLOAT),
        (RULES.float32("Net").half("head"), HALF, FLOAT),
    ],
)
def test_a_rule_by_the_path_of_a_flax_module(rules, head, inner):
    net = Net()
    params = net.init(jax.random.key(0), X)
    rows = ampx.explain(net.apply, rules=rules)(params, X).equations
    products = [row.operands[0][1] for row in rows if row.primitive == "dot_general"]
    assert products == [inner, head]


def test_a_rule_by_class_covers_its_methods():
    net = Net()
    params = net.init(jax.random.key(0), X)
    rows = ampx.explain(net.apply, rules=RULES.float32(Scale))(params, X).equations
    scaled = [row.results[0][1] for row in rows if row.primitive == "mul"]
    assert scaled == [FLOAT]


def test_rules_reach_into_loops_and_branches():
    def f(x):
        def body(c, _):
            return c, jnp.tanh(c @ W)

        return jax.lax.scan(jax.checkpoint(body), x, None, length=2)[1]

    assert dtype_of(f, RULES) == HALF
    assert dtype_of(f, RULES.float32("tanh")) == FLOAT
    assert dtype_of(f, RULES.float32("scan")) == FLOAT


def test_a_ban_names_what_it_found():
    banned = RULES.banned("logistic")
    with pytest.raises(RuntimeError, match=r"banned\('logistic'\) is banned under autocast"):
        ampx.autocast(jax.nn.sigmoid, rules=banned)(X)
    ampx.autocast(jnp.tanh, rules=banned)(X)


def test_rules_are_immutable_and_say_what_they_are():
    more = RULES.half("exp", own_norm).banned("erf_inv")
    assert repr(RULES) == "ampx.DEFAULT_RULES"
    assert repr(more) == "ampx.DEFAULT_RULES.half('exp').half(own_norm).banned('erf_inv')"
    assert more == RULES.half("exp", own_norm).banned("erf_inv")
    assert hash(more) != hash(RULES)
    with pytest.raises(AttributeError):
        more.entries = ()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: RULES.half(), TypeError, "needs a target"),
        (lambda: RULES.half(3), TypeError, "must be a name, a function or a class, got 3"),
        (lambda: RULES.half(""), ValueError, "must not be empty"),
        (lambda: RULES.half(when=3), TypeError, "when must be a function"),
        (lambda: RULES.half(len), TypeError, "has no Python code"),
        (lambda: ampx.autocast(jnp.exp, rules="half"), TypeError, "rules must come from"),
    ],
)
def test_targets_that_cannot_be_recognised_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_what_knows_no_half_stays_float32_whatever_a_rule_says():
    assert dtype_of(lambda x: jnp.linalg.inv(x @ W), RULES.half("lu"), W) == FLOAT


def test_opaque_primitives_refuse_half_with_a_way_out():
    def f(x):
        return jax.pure_callback(lambda a: a, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    with pytest.raises(ValueError, match=r"wrap the call in ampx\.half_function"):
        ampx.autocast(f, rules=RULES.half("pure_callback"))(X)


def twice_p():
    """A primitive of somebody else's."""
    primitive = core.Primitive("twice_for_test")
    primitive.def_impl(lambda x: x + x)
    primitive.def_abstract_eval(lambda aval: aval)
    return primitive


def test_somebody_elses_primitive_is_float32_until_a_rule_says_otherwise():
    primitive = twice_p()
    f = functools.partial(lambda x: primitive.bind(x @ W))
    assert dtype_of(f, RULES) == FLOAT
    assert dtype_of(f, RULES.half("twice_for_test")) == HALF
    assert dtype_of(f, RULES.widest("twice_for_test")) == HALF


def test_functions_that_jax_inlines_are_refused_as_targets():
    with pytest.raises(TypeError, match="matmul is inlined by JAX.*give the name of its primitive"):
        RULES.float32(jnp.matmul)
    assert dtype_of(lambda x: jnp.tensordot(x, W, 1), RULES.float32(jnp.tensordot)) == FLOAT

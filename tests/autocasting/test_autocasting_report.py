"""explain: what it says must be what autocast does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_batching import custom_vmap
from jax.extend import core

import ampx
from ampx.jaxprs import source_info

X = jax.random.normal(jax.random.key(0), (4, 8))
W = jax.random.normal(jax.random.key(1), (8, 8))


def model(w, x):
    def layer(x, _):
        return jax.checkpoint(lambda x: jax.nn.silu(x @ w))(x), None

    x, _ = jax.lax.scan(layer, x, None, length=2)
    return jax.nn.log_softmax(x @ w).mean()


def equations_in(jaxpr, inside=()):
    """(depth, primitive, operand dtypes) of every equation of a jaxpr."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn.primitive.name, tuple(a.aval.dtype.name for a in eqn.invars)
        for body in core.jaxprs_in_params(eqn.params):
            yield from equations_in(body, inside)


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize("fun", [model, jax.grad(model), jax.value_and_grad(model, 1)])
def test_it_tells_the_dtypes_of_the_program_that_runs(fun, half):
    rows = ampx.explain(fun, half_dtype=half)(W, X).equations
    told = [
        (row.primitive, tuple(after for _, after in row.operands))
        for row in rows
        if row.primitive != "convert_element_type"
    ]
    runs = [
        eqn
        for eqn in equations_in(jax.make_jaxpr(ampx.autocast(fun, half_dtype=half))(W, X))
        if eqn[0] != "convert_element_type"
    ]
    spread = [e for e in runs if e not in told]
    assert told == [e for e in runs if e not in spread]
    # What the rewriter adds: repeated biases, and a value narrowed for one more reader.
    again = ("custom_jvp_call", ("float32", half))
    assert all(name == "broadcast_in_dim" or (name, dtypes) == again for name, dtypes in spread)


def test_its_rows_name_the_rule_the_place_and_the_line():
    rows = ampx.explain(model)(W, X).equations
    product = next(row for row in rows if row.primitive == "dot_general")
    assert product.rule == "half"
    assert product.operands == (("float32", "bfloat16"),) * 2
    assert product.results == (("float32", "bfloat16"),)
    assert [name.split(":")[0] for name in product.inside][0] == "scan"
    assert "test_autocasting_report.py" in product.source
    lifted = next(row for row in rows if row.rule == "every reader is float32")
    assert lifted.results[0] == ("float32", "float32")


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.grad, jax.checkpoint])
def test_no_row_names_a_file_of_ampx(wrap):
    def widened(w, x):
        return model(ampx.cast_floating(w, jnp.float32), x)

    rows = ampx.explain(wrap(widened))(W, X).equations
    assert not [row.source for row in rows if source_info.AMPX_FOLDER in row.source]
    if wrap is jax.jit:
        line = widened.__code__.co_firstlineno
        assert rows[0].source == f"{__file__}:{line} (widened)"


def test_a_rule_of_the_users_is_named():
    rules = ampx.DEFAULT_RULES.half("exp")
    rows = ampx.explain(lambda x: jnp.exp(x @ W), rules=rules)(X).equations
    assert [row.rule for row in rows] == ["half", "half('exp')"]


def test_the_tangent_of_an_integer_is_named():
    def fun(x):
        return jax.jit(lambda x, tangent: x)(x, np.zeros((), jax.dtypes.float0))

    (row,) = (row for row in ampx.explain(fun)(jnp.ones(2)).equations if row.primitive == "jit")
    assert row.operands == (("float32", "float32"), ("float0", "float0"))


def test_the_table_is_printed_whole():
    explanation = ampx.explain(model)(W, X)
    lines = str(explanation).splitlines()
    assert len(lines) == len(explanation.equations) + 2
    assert lines[0].split() == ["equation", "rule", "operands", "results", "written", "in"]
    assert lines[-1] == "2 of 2 matrix products and convolutions in bfloat16"
    assert any("f32>bf16" in line for line in lines)


def test_nothing_runs():
    def f(x):
        jax.debug.callback(lambda: pytest.fail("ran"))
        return x @ W

    ampx.explain(f)(X)


@custom_vmap
def vmapped_its_own_way(x):
    return x @ x


@vmapped_its_own_way.def_vmap
def _(size, batched, x):
    return jax.vmap(jnp.matmul)(x, x), batched[0]


def test_a_function_that_cannot_be_rewritten_is_named_and_warned_of():
    with pytest.warns(UserWarning, match="cannot rewrite the function inside custom_vmap_call"):
        explanation = ampx.explain(lambda w: vmapped_its_own_way(w) * 2.0)(W)
    assert [row.primitive for row in explanation.unknown] == ["custom_vmap_call"]
    assert str(explanation).endswith("functions that could not be rewritten: custom_vmap_call")
    with pytest.warns(UserWarning, match="custom_vmap_call"):
        assert ampx.autocast(lambda w: 3 * vmapped_its_own_way(w))(W).dtype == jnp.float32


def test_a_mark_says_that_it_is_meant(recwarn):
    marked = ampx.float_function(vmapped_its_own_way)
    assert ampx.autocast(lambda w: marked(w) * 2.0)(W).dtype == jnp.float32
    in_half = ampx.half_function(vmapped_its_own_way)
    assert ampx.autocast(lambda w: in_half(w) * 2.0)(W).dtype == jnp.bfloat16
    assert not recwarn


def test_an_unknown_higher_order_primitive_is_warned_of():
    primitive = core.Primitive("calls_something")
    primitive.def_abstract_eval(lambda aval, *, jaxpr: aval)
    body = jax.make_jaxpr(lambda x: x @ x)(W)

    def f(w):
        return primitive.bind(w, jaxpr=body)

    with pytest.warns(UserWarning, match="the function inside calls_something"):
        (row,) = ampx.explain(f)(W).unknown
    assert row.results == (("float32", "float32"),)


def test_jax_without_jaxprs_in_view_is_warned_of():
    """The next remat of JAX hides its body in a parameter of another kind."""
    try:
        jax.config.update("jax_remat3", True)
    except AttributeError:
        pytest.skip("this jax has no such switch")
    try:
        with pytest.warns(UserWarning, match="the function inside call_hi_primitive"):
            ampx.explain(jax.checkpoint(lambda x: jnp.sin(x @ W)))(X)
    finally:
        jax.config.update("jax_remat3", False)


def test_rules_that_decide_nothing_are_listed():
    rules = ampx.DEFAULT_RULES.float32("dot_general").half("softmax", "jit_of_nobody")
    explanation = ampx.explain(model, rules=rules)(W, X)
    assert explanation.idle_rules == ("half('softmax')", "half('jit_of_nobody')")
    assert "rules that decided nothing: half('softmax'), half('jit_of_nobody')" in str(explanation)
    assert "decided nothing" not in str(ampx.explain(model)(W, X))


def test_a_function_under_an_autocast_of_its_own_is_told_of():
    """Of two autocasts the inner one decides, so that the report of it shows no product."""
    half = ampx.autocast(model, half_dtype="float16")
    for fun in (half, jax.grad(half), ampx.autocast(model, enabled=False)):
        text = str(ampx.explain(fun)(W, X))
        assert "0 of 0 matrix products" in text
        assert "left as written: an autocast of its own, float_function or half_function" in text
    assert "left as written" not in str(ampx.explain(model)(W, X))

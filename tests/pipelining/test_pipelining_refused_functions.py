"""Functions that JAX refuses inside of a pipeline: what can be done is said, and helps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_mesh
from jax import lax
from jax.sharding import PartitionSpec as P
from pipeline_models import relative_error, run

from ampx.pipelining import one_f_one_b, value_and_grad

X = jnp.asarray(np.random.default_rng(0).standard_normal((4, 4)), jnp.float32)
PARAMS = {"stages": jnp.asarray(np.random.default_rng(1).standard_normal((2, 4, 4)) / 2)}


def scan(zeros, f, x):
    return lax.scan(lambda carry, _: (carry + f(x), None), zeros(x), None, length=2)[0]


def fori_loop(zeros, f, x):
    return lax.fori_loop(0, 2, lambda _, carry: carry + f(x), zeros(x))


def cond(zeros, f, x):
    return lax.cond(jnp.sum(x) > -1e9, lambda: f(x), lambda: zeros(x))


def switch(zeros, f, x):
    number = (jnp.sum(x) > -1e9).astype(jnp.int32)
    return lax.switch(number, [lambda: zeros(x), lambda: f(x)])


def checkpointed(zeros, f, x):
    return jax.checkpoint(lambda x: scan(zeros, f, x))(x)


LOOPS = [scan, fori_loop, cond, switch, checkpointed]


def of_constants(x):
    return jnp.zeros(x.shape)


def make_functions(place, zeros, loop):
    """A model with a loop, or a branch, in one of its three functions."""

    def looped(f, x, here):
        return x + (loop(zeros, f, x) if here == place else f(x))

    return dict(
        first=lambda p, shared, x, key: looped(jnp.sin, x, "first"),
        stage=lambda p, x, key: looped(lambda x: jnp.tanh(x @ p), x, "stage"),
        last=lambda p, shared, x, batch, key: (jnp.sum(looped(jnp.sin, x, "last")), len(x)),
    )


def make_grads_of(functions, data_axes="data", axis="data", kind="Auto", **options):
    return value_and_grad(
        **functions,
        schedule=one_f_one_b(2, 2),
        axis_name="stage",
        data_axes=data_axes,
        mesh=make_mesh((2, 2), (axis, "stage"), kind),
        **options,
    )


def notes_of(caught):
    """What ampx has added to an error; JAX adds a note about its traceback."""
    return [
        note for note in getattr(caught.value, "__notes__", ()) if "JAX has removed" not in note
    ]


def whole(functions, params, x):
    """Loss and gradients on one device."""

    @jax.value_and_grad
    def loss(params):
        out = functions["first"](None, None, x, None)
        for layer in params["stages"]:
            out = functions["stage"](layer, out, None)
        total, weight = functions["last"](None, None, out, x, None)
        return total / weight

    return loss(params)


def assert_as_on_one_device(found, functions):
    expected = whole(functions, PARAMS, X)
    assert relative_error((found.loss, found.grads), expected) < 1e-5


@pytest.mark.parametrize("place", ["first", "stage", "last"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda f: f.__name__)
def test_loops_of_constants_are_refused_with_both_ways_out(loop, place):
    functions = make_functions(place, of_constants, loop)
    with pytest.raises(TypeError, match="manual axis types do not match") as caught:
        jax.eval_shape(make_grads_of(functions), PARAMS, X)
    (note,) = notes_of(caught)
    assert "jnp.zeros_like(x)" in note and "ampx.pipelining.value_and_grad check_vma=False" in note
    # Both are ways out.
    jax.eval_shape(make_grads_of(functions, check_vma=False), PARAMS, X)
    jax.eval_shape(make_grads_of(make_functions(place, jnp.zeros_like, loop)), PARAMS, X)


@pytest.mark.parametrize(
    ("zeros", "check_vma"),
    [(of_constants, False), (jnp.zeros_like, True)],
    ids=["unchecked", "zeros of the input"],
)
def test_gradients_of_loops_are_those_of_one_device(zeros, check_vma):
    functions = make_functions("stage", zeros, scan)
    found = run(make_grads_of(functions, check_vma=check_vma), PARAMS, X)
    assert_as_on_one_device(found, functions)


def test_another_fault_of_a_branch_gets_no_such_note():
    functions = make_functions("stage", lambda x: x.astype(jnp.bfloat16), cond)
    with pytest.raises(TypeError, match="the dtypes do not match") as caught:
        jax.eval_shape(make_grads_of(functions), PARAMS, X)
    assert notes_of(caught) == []


def gathering_layer(gather):
    """A model whose layers are gathered over an axis along which the batch is not divided."""
    functions = make_functions(None, None, None)
    return functions | {"stage": lambda p, x, key: x + jnp.tanh(x @ gather(p))}


def over_model(**options):
    return gathering_layer(lambda p: lax.all_gather(p, "model", tiled=True, **options))


DIVIDED = dict(data_axes=(), axis="model", param_specs={"stages": P("stage", "model")})


def test_a_gather_by_which_the_loss_differs_is_refused_with_the_ways_out():
    with pytest.raises(ValueError, match="out_specs.loss") as caught:
        jax.eval_shape(make_grads_of(over_model(), **DIVIDED), PARAMS, X)
    (note,) = notes_of(caught)
    assert 'to="invarying"' in note and "check_vma=False" in note and "data_axes" in note


@pytest.mark.parametrize(
    ("functions", "options"),
    [
        (over_model(to="invarying"), dict()),
        (over_model(), dict(check_vma=False)),
        (over_model(), dict(data_axes="model")),
    ],
    ids=["invarying", "unchecked", "an axis of the data"],
)
def test_gradients_behind_a_gather_are_those_of_one_device(functions, options):
    found = run(make_grads_of(functions, **DIVIDED | options), PARAMS, X)
    assert_as_on_one_device(found, gathering_layer(lambda p: p))


def test_hand_written_pairs_of_sums_are_not_sent_to_where_they_would_be_wrong():
    """Megatron's f and g: without a check of types their gradients would be too small."""
    f, g = jax.custom_vjp(lambda x: x), jax.custom_vjp(lambda x: lax.psum(x, "model"))
    f.defvjp(lambda x: (x, None), lambda _, ct: (lax.psum(ct, "model"),))
    g.defvjp(lambda x: (g(x), None), lambda _, ct: (ct,))

    def layer(begin, end):
        return make_functions(None, None, None) | {
            "stage": lambda p, x, key: x + end(jnp.tanh(begin(x) @ p) @ p.T)
        }

    divided = DIVIDED | {"param_specs": {"stages": P("stage", None, "model")}}
    with pytest.raises(ValueError, match="Custom VJP bwd rule") as caught:
        jax.eval_shape(make_grads_of(layer(f, g), **divided), PARAMS, X)
    (note,) = notes_of(caught)
    assert "write plain jax.lax.psum" in note and "or give" not in note

    plain = layer(lambda x: x, lambda x: lax.psum(x, "model"))
    found = run(make_grads_of(plain, **divided), PARAMS, X)
    assert_as_on_one_device(found, layer(lambda x: x, lambda x: x))


def test_an_array_on_explicit_axes_is_refused_with_the_ways_out():
    def functions(make_table):
        return gathering_layer(lambda p: make_table()[:, None] * p)

    def table():
        return jnp.cos(jnp.arange(4.0))

    with jax.set_mesh(make_mesh((2, 2), ("data", "stage"), "Explicit")):
        made = table()
        with pytest.raises(NotImplementedError, match="Closing over inputs") as caught:
            jax.eval_shape(make_grads_of(functions(lambda: made), kind="Explicit"), PARAMS, X)
        (note,) = notes_of(caught)
        assert "np.asarray" in note and "inside of the function" in note
        as_numpy = np.asarray(made)
        for make in (lambda: as_numpy, table):
            jax.eval_shape(make_grads_of(functions(make), kind="Explicit"), PARAMS, X)

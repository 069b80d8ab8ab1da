import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import make_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from pipeline_models import first, last, stage

import ampx
from ampx import mesh_axes


@pytest.mark.parametrize(
    ("value", "axes"),
    [
        ("data", ("data",)),
        (("host", "data"), ("host", "data")),
        (["host", "data"], ("host", "data")),
        (iter(("data",)), ("data",)),
    ],
)
def test_one_name_or_several_become_a_tuple(value, axes):
    assert mesh_axes.as_axes(value) == axes


@pytest.mark.parametrize("value", [None, (), []])
def test_no_axis_is_a_choice_only_where_it_may_be(value):
    assert mesh_axes.as_axes(value, may_be_empty=True) == ()
    with pytest.raises((TypeError, ValueError), match="axis_name must"):
        mesh_axes.as_axes(value)


CALLS = {
    "all_reduce": ("axis_name", lambda bad: ampx.all_reduce(bad)),
    "reduce_in_backward": ("axis_name", lambda bad: ampx.reduce_in_backward(jnp.ones(2), bad)),
    "zero1": ("axis_name", lambda bad: ampx.zero1(optax.sgd(0.1), bad)),
    "value_and_grad": ("axis_name", lambda bad: ampx.value_and_grad(jnp.sum, axis_name=bad)),
    "train_step": (
        "axis_name",
        lambda bad: ampx.train_step(jnp.sum, optax.sgd(0.1), axis_name=bad),
    ),
    "dynamic_loss_scale": (
        "axis_names",
        lambda bad: ampx.dynamic_loss_scale(optax.sgd(0.1), axis_names=bad),
    ),
    "multi_steps": ("axis_names", lambda bad: ampx.multi_steps(optax.sgd(0.1), 2, axis_names=bad)),
    "count_nonfinite": (
        "axis_names",
        lambda bad: ampx.count_nonfinite(jnp.ones(2), axis_names=bad),
    ),
    "pipelining.value_and_grad": (
        "data_axes",
        lambda bad: ampx.pipelining.value_and_grad(
            first=first,
            stage=stage,
            last=last,
            schedule=ampx.pipelining.gpipe(2, 2),
            axis_name="stage",
            data_axes=bad,
        ),
    ),
}


@pytest.mark.parametrize("bad", [3, ("data", 3)], ids=repr)
@pytest.mark.parametrize("call", CALLS)
def test_every_axis_argument_refuses_what_is_no_name(call, bad):
    argument, function = CALLS[call]
    with pytest.raises(TypeError) as error:
        function(bad)
    assert str(error.value) == (
        f"{argument} must be the name of a mesh axis, such as 'data', or a sequence of names, "
        f"such as ('host', 'data'), got {bad!r}"
    )


def test_a_name_alone_is_not_taken_for_its_letters():
    def count(x):
        return ampx.count_nonfinite(x, axis_names="data")

    counts = jax.vmap(count, axis_name="data")(jnp.array([1.0, jnp.inf, jnp.nan, jnp.inf]))
    assert counts.tolist() == [[2, 1]] * 4


def test_axes_of_a_spec_are_those_of_its_entries():
    assert mesh_axes.axes_of_spec(P(None, "data", ("host", "stage"))) == ("data", "host", "stage")
    assert mesh_axes.axes_of_spec(P()) == ()


def test_keys_differ_between_devices():
    key = jax.random.key(0)
    folded = jax.vmap(
        jax.vmap(lambda _: mesh_axes.fold_in_device(key, ("a", "b")), axis_name="b"), axis_name="a"
    )(jnp.zeros((2, 3)))
    assert len(set(map(bytes, jax.random.key_data(folded).reshape(6, -1).__array__()))) == 6
    assert mesh_axes.fold_in_device(None, ("a",)) is None


@pytest.mark.slow_but("False")
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_sum_over_axes_takes_values_that_vary_over_some_of_them(check_vma):
    axes = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("host", "data"), axis_types=axes)

    def total(x):
        host = jax.lax.axis_index("host").astype(jnp.float32)
        values = (jnp.ones(()), jnp.sum(x), jnp.sum(x) + host, None)
        axes = ("host", "data")
        return jax.lax.psum(mesh_axes.mark_varying(values, axes), axes)

    sums = jax.shard_map(total, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=check_vma)(
        jnp.arange(4.0)
    )
    assert list(map(float, sums[:3])) == [8.0, 12.0, 16.0] and sums[3] is None


# Everything but `vmap`, which knows no unreduced types.
USES = {
    "jit": lambda f: f,
    "grad": jax.grad,
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (c + f(x), None), 0.0, None, length=1)[0],
    "vmap": lambda f: lambda x: jax.vmap(f, in_axes=(jax.tree.map(lambda _: None, x), 0))(x, EYE),
}
EYE = jnp.eye(2)


@pytest.mark.parametrize("use", ["jit", "grad", "scan", "vmap"])
def test_arrays_that_explicit_axes_divide_are_added_with_one_sum(use):
    mesh = make_mesh((2, 2), ("data", "model"), "Explicit")
    specs = {"a": P("data", "model"), "b": P(None, "data"), "c": P()}
    arrays = {
        key: jax.device_put(jnp.arange(8.0).reshape(2, 4), NamedSharding(mesh, spec))
        for key, spec in specs.items()
    }

    def total(arrays, also=None):
        own = [*jax.tree.leaves(arrays), *([] if also is None else [also])]
        return mesh_axes.add_divided([leaf**2 for leaf in own])

    with jax.set_mesh(mesh):
        compiled = jax.jit(USES[use](total)).lower(arrays).compile()
        found = compiled(arrays)
    expected = {"jit": 420.0, "scan": 420.0, "vmap": [421.0, 421.0]}
    if use == "grad":
        expected[use] = {key: 2 * jnp.arange(8.0).reshape(2, 4) for key in arrays}
    jax.tree.map(np.testing.assert_allclose, found, expected[use])
    if use != "vmap":
        assert compiled.as_text().count(" all-reduce(") == (use != "grad")


@pytest.mark.parametrize(
    ("kind", "spec", "is_divided"),
    [("Explicit", P("data"), True), ("Explicit", P(), False), ("Auto", P("data"), False)],
)
def test_arrays_are_added_at_once_only_where_types_tell_how_they_lie(kind, spec, is_divided):
    mesh = make_mesh((2,), ("data",), kind)
    array = jax.device_put(jnp.ones(4), NamedSharding(mesh, spec))
    found = []

    def ask(x):
        found.append(mesh_axes.can_add_divided([x]))
        return x

    with jax.set_mesh(mesh):
        jax.eval_shape(ask, array)
        jax.eval_shape(jax.shard_map(ask, in_specs=spec, out_specs=spec), array)
    ask(array)  # outside of jit
    assert found == [is_divided, False, False]


def test_nothing_is_added_at_once_where_one_axis_is_mapped_and_types_tell_of_the_other():
    mesh = make_mesh((2, 2), ("data", "model"), "Explicit")
    array = jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, P("data", "model")))
    found = []

    def ask(x):
        found.append((jax.typeof(x).sharding.spec, mesh_axes.can_add_divided([x])))
        return x

    spec = P("data", None)
    with jax.set_mesh(mesh):
        jax.eval_shape(
            jax.shard_map(ask, in_specs=spec, out_specs=spec, axis_names={"data"}), array
        )
    assert found == [(P(None, "model"), False)]

"""Gradients of a pipeline: those of the model that is not divided, whatever the schedule."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bit_equal, make_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from pipeline_models import (
    LAYERS,
    first,
    last_mean,
    last_with_aux,
    make_batch,
    make_params,
    pipeline,
    relative_error,
    run,
    sequential,
    stage_mesh,
    stage_with_loss,
)
from quick_keys import quick_key

import ampx
from ampx.pipelining import (
    Schedule,
    dualpipe_v,
    eager_one_f_one_b,
    gpipe,
    interleaved,
    interleaved_zero_bubble,
    looped_breadth_first,
    one_f_one_b,
    zero_bubble,
    zero_bubble_v,
)

KEY = quick_key(7)
EVERYTHING = dict(stage=stage_with_loss, last=last_with_aux, has_aux=True, has_aux_loss=True)
TOLERANCE = 1e-5

CASES = [
    (gpipe(4, 3), 1),
    (one_f_one_b(4, 8), 1),
    (one_f_one_b(4, 1), 1),
    (one_f_one_b(1, 1), 1),
    (one_f_one_b(2, 5), 2),
    (eager_one_f_one_b(2, 5), 2),
    (interleaved(2, 5, chunks=2), 2),
    (interleaved(4, 3, chunks=2), 1),
    (looped_breadth_first(2, 5, chunks=4), 2),
    (zero_bubble(4, 3), 1),
    (zero_bubble_v(2, 1), 1),
    (zero_bubble_v(2, 5), 2),
    (interleaved_zero_bubble(2, 3, chunks=4), 1),
    (dualpipe_v(2, 5), 2),
]


def name_of(value):
    if not isinstance(value, Schedule):
        return str(value)
    chunks = value.num_stages // value.num_devices
    return f"{value.name} S={value.num_devices} V={chunks} M={value.num_microbatches}"


@functools.cache
def reference(num_microbatches, data=1, layers=LAYERS, **options):
    batch = make_batch(2 * num_microbatches * data)
    return sequential(
        make_params(layers), batch, KEY, num_microbatches, data, **EVERYTHING | options
    )


def pipelined(schedule, data=1, layers=LAYERS, scale=1.0, **options):
    batch = make_batch(2 * schedule.num_microbatches * data)
    grads_of = pipeline(schedule, data, **EVERYTHING | options)
    return run(grads_of, make_params(layers), batch, key=KEY, loss_scale=scale)


def unscaled(result, scale):
    return jax.tree.map(lambda g: g / np.float32(scale), jax.device_get(result.grads))


def assert_equal_to(expected, result, scale=1.0):
    assert relative_error(unscaled(result, scale), expected.grads) < TOLERANCE
    for found, wanted in (
        (result.loss, expected.loss),
        (result.weight, expected.weight),
        (result.aux, expected.aux),
    ):
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
    assert not np.any(np.asarray(result.verdict))


# Dropout and the masks of random keys are in it, so every schedule draws the reference's numbers.
@pytest.mark.sampled(2, "1f1b S=4 V=1 M=1-1", "1f1b S=4 V=1 M=8-1")
@pytest.mark.slow_but("zero-bubble-v S=2 V=2 M=5-2")
@pytest.mark.whole("1f1b S=2 V=1 M=5-2", "interleaved S=2 V=2 M=5-2", "zero-bubble-v S=2 V=2 M=1-1")
@pytest.mark.parametrize(("schedule", "data"), CASES, ids=name_of)
def test_gradients_are_those_of_the_undivided_model(schedule, data):
    number = CASES.index((schedule, data))
    options = dict(check_vma=number % 3 > 0, kind="Explicit" if number % 2 else "Auto")
    scale = 2.0 ** (number % 25)
    result = pipelined(schedule, data, scale=scale, **options)
    assert_equal_to(reference(schedule.num_microbatches, data), result, scale)


@pytest.mark.slow
def test_a_loss_scale_changes_no_bit_but_the_exponent():
    grads_of = pipeline(zero_bubble(2, 3), **EVERYTHING)
    batch = make_batch(6)
    compiled = jax.jit(lambda scale: grads_of(make_params(), batch, key=KEY, loss_scale=scale))
    plain = compiled(1.0)
    for scale in (2.0, 2.0**15, 2.0**24):
        scaled = compiled(scale)
        assert_bit_equal(unscaled(scaled, scale), jax.device_get(plain.grads))
        assert_bit_equal(scaled.loss, plain.loss)


@functools.cache
def compiled_without_key():
    return jax.jit(functools.partial(pipeline(one_f_one_b(4, 3)), make_params()))


def test_infinite_gradients_are_counted_and_agreed_on():
    compiled = functools.partial(compiled_without_key(), make_batch(6))
    assert not np.any(np.asarray(compiled(loss_scale=2.0**24).verdict))
    result = compiled(loss_scale=3e38)
    assert np.sum(np.asarray(result.verdict)) > 0
    assert np.isfinite(result.loss)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "stash"),
    [
        (one_f_one_b(4, 3), "residuals"),
        (interleaved(2, 3), "nothing"),
        (zero_bubble(2, 3), "dots"),
    ],
    ids=name_of,
)
def test_what_is_stashed_changes_no_gradient(schedule, stash):
    policies = jax.checkpoint_policies
    named = {"dots": policies.dots_saveable, "nothing": policies.nothing_saveable}
    result = pipelined(schedule, stash=named.get(stash, stash))
    assert_equal_to(reference(3), result)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "layers_per_stage", "kind"),
    [
        # The chunks of `interleaved`: test_pipelining_regressions.py.
        (zero_bubble_v(2, 3), (3, 1, 2, 2), "Explicit"),
    ],
    ids=name_of,
)
def test_stages_may_have_unequally_many_layers(schedule, layers_per_stage, kind):
    result = pipelined(schedule, layers_per_stage=layers_per_stage, kind=kind)
    assert_equal_to(reference(3), result)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "normalize"),
    [(one_f_one_b(2, 3), "mean"), (zero_bubble_v(2, 3), "sum")],
    ids=name_of,
)
def test_losses_are_averaged_or_summed(schedule, normalize):
    options = dict(last=last_mean, normalize=normalize)
    batch = make_batch(12)
    result = run(pipeline(schedule, 2, **options), make_params(), batch, key=KEY)
    expected = sequential(make_params(), batch, KEY, 3, 2, **options)
    assert relative_error(jax.device_get(result.grads), expected.grads) < TOLERANCE
    np.testing.assert_allclose(result.loss, expected.loss, rtol=1e-6)


def test_rows_of_auxiliary_outputs_are_joined_over_micro_batches_and_data_shards():
    def last(p, shared, x, batch, key):
        aux = {"rows": x, "number": batch["number"], "mean": jnp.mean(x)}
        return (jnp.sum(x), jnp.float32(len(x))), aux

    grads_of = ampx.pipelining.value_and_grad(
        first=lambda p, shared, batch, key: batch["x"],
        stage=lambda p, x, key: x * p,
        last=last,
        schedule=one_f_one_b(2, 2),
        axis_name="stage",
        data_axes=("replica", "data"),
        mesh=make_mesh((2, 2, 2), ("data", "stage", "replica")),
        has_aux=True,
    )
    x = np.arange(24, dtype=np.float32).reshape(12 * 2, 1)
    batch = {"x": x, "number": np.arange(24)}
    result = jax.jit(grads_of)({"stages": jnp.array([2.0, 3.0])}, batch)
    np.testing.assert_array_equal(result.aux["rows"], 6 * x)
    np.testing.assert_array_equal(result.aux["number"], np.arange(24))
    np.testing.assert_allclose(result.aux["mean"], 6 * x.mean(), rtol=1e-6)
    assert jax.eval_shape(grads_of.value, {"stages": jnp.ones(2)}, batch).aux["rows"].shape == (
        24,
        1,
    )


def test_no_weight_at_all_gives_zero():
    batch = make_batch(6) | {"weights": np.zeros((6, 5), np.float32)}
    result = compiled_without_key()(batch, loss_scale=1.0)
    assert result.loss == 0 and result.weight == 0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(jax.device_get(result.grads)))


def at_precision(recipe):
    """Casts of parameters as the recipe does them, and its tolerance."""
    half = recipe.policy.compute_dtype

    def cast(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf if "norm" in jax.tree_util.keystr(path) else leaf.astype(half),
            params,
        )

    return cast, float(jnp.finfo(half).eps)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "half_dtype"),
    [
        (interleaved(2, 3), jnp.bfloat16),
        (zero_bubble(4, 3), jnp.float16),
    ],
    ids=name_of,
)
def test_half_precision_is_that_of_the_undivided_model(schedule, half_dtype):
    recipe = ampx.opt_level("O2", half_dtype=half_dtype)
    cast, epsilon = at_precision(recipe)
    batch, scale = make_batch(6), 2.0**8
    result = run(pipeline(schedule, policy=recipe), make_params(), batch, key=KEY, loss_scale=scale)
    expected = sequential(make_params(), batch, KEY, 3, cast=cast)
    assert {leaf.dtype for leaf in jax.tree.leaves(result.grads)} == {np.dtype("float32")}
    assert relative_error(unscaled(result, scale), expected.grads) < 4 * epsilon
    np.testing.assert_allclose(result.loss, expected.loss, rtol=1e-6)


def test_stages_may_be_autocast():
    half = functools.partial(ampx.autocast, half_dtype=jnp.bfloat16, output="original")
    batch = make_batch(6)
    recipe = ampx.opt_level("O1", half_dtype=jnp.bfloat16)
    result = pipelined(one_f_one_b(2, 3), policy=recipe)
    functions = dict(first=half(first), stage=half(stage_with_loss), last=half(last_with_aux))
    expected = sequential(make_params(), batch, KEY, 3, **EVERYTHING | functions)
    exact = reference(3)
    np.testing.assert_allclose(result.loss, expected.loss, rtol=1e-6)
    assert relative_error(jax.device_get(result.grads), expected.grads) < 0.01
    assert 1e-3 < relative_error(expected.grads, exact.grads) < 0.1


def test_accumulators_may_be_wider_or_as_narrow_as_gradients():
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), make_params())
    batch = make_batch(6)
    grads_of = pipeline(one_f_one_b(2, 3), accumulator_dtype=jnp.bfloat16)
    narrow = jax.eval_shape(grads_of, half, batch).grads
    assert {leaf.dtype for leaf in jax.tree.leaves(narrow)} == {np.dtype(jnp.bfloat16)}
    wide = jax.eval_shape(pipeline(one_f_one_b(2, 3)), half, batch).grads
    assert {leaf.dtype for leaf in jax.tree.leaves(wide)} == {np.dtype("float32")}


@pytest.mark.slow
def test_the_mesh_may_be_set_around_the_call_and_auxiliary_outputs_be_summed():
    schedule, summed = interleaved(2, 3), {"aux_reduction": "sum"}
    batch, params = make_batch(12), make_params()
    grads_of = pipeline(schedule, 2, mesh=None, **EVERYTHING, **summed)
    with jax.set_mesh(stage_mesh(schedule, 2, "Explicit")):
        result = run(grads_of, params, batch, key=KEY)
    assert_equal_to(reference(3, 2, **summed), result)
    assert result.aux["rows"] == 12


@pytest.mark.whole("Explicit")  # which every other schedule above has
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_parameters_may_lie_as_shardings_says(kind):
    schedule = interleaved(2, 3)
    grads_of = pipeline(schedule, 2, kind, **EVERYTHING)
    params = make_params()
    places = grads_of.shardings(params)
    assert places["stages"]["kernel"].spec == P("stage")
    assert places["shared"]["embedding"].spec == P()
    batch = jax.device_put(make_batch(12), NamedSharding(grads_of.mesh, P("data")))
    result = run(grads_of, jax.device_put(params, places), batch, key=KEY)
    assert_equal_to(reference(3, 2), result)
    for leaf, place in zip(jax.tree.leaves(result.grads), jax.tree.leaves(places), strict=True):
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim)


def test_the_value_alone_is_the_loss_of_the_gradients():
    for schedule in (interleaved(2, 3), zero_bubble_v(2, 3)):
        grads_of = pipeline(schedule, 2, **EVERYTHING)
        value = run(grads_of.value, make_params(), make_batch(12), key=KEY)
        assert value.grads is None and value.verdict is None
        np.testing.assert_allclose(value.loss, reference(3, 2).loss, rtol=1e-6)
        np.testing.assert_allclose(value.aux["size"], reference(3, 2).aux["size"], rtol=1e-6)

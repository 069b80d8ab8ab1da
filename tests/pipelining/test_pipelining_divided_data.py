"""Parameters that a data axis divides, against the same model on one device.

All ways in which a device comes by what others hold: an all_gather, as in fully sharded data
parallelism, for a matrix of the layers and for all of the ends; an all_to_all, which brings rows to
the experts and back. `bias` is whole on every device. `probe` is zero, and a row's gains multiply
its gradient: so an overflow can be made in one layer, one row and one shard, and nowhere else.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pipeline_steps
import pytest
from helpers import make_mesh
from jax import lax
from jax.sharding import PartitionSpec as P
from pipeline_models import sequential
from pipeline_steps import LAYERS, LENGTH, WIDTH, assert_close, committed

import ampx
from ampx.pipelining import gpipe, interleaved, one_f_one_b, value_and_grad, zero_bubble

EXPERTS = 4
UNITS = LENGTH * WIDTH // EXPERTS


def make_specs(axis):
    return {
        "first": {"position": P(None, axis)},
        "stages": {
            "kernel": P("stage", axis),
            "bias": P("stage"),
            "probe": P("stage", axis),
            "experts": P("stage", axis),
        },
        "last": {"gain": P(axis)},
        "shared": {"table": P(None, axis)},
    }


def make_params():
    params = pipeline_steps.make_params()
    experts = np.random.default_rng(1).normal(size=(LAYERS, EXPERTS, UNITS, UNITS))
    params["stages"]["experts"] = jnp.asarray(0.4 * experts, jnp.float32)
    return params


def make_batch(step, spoilt=None):
    return pipeline_steps.make_batch(step, units=(WIDTH,), spoilt=spoilt)


def make_functions(axis):
    """`first`, `stage` and `last` for arrays that `axis` divides; None is for whole ones."""
    specs = make_specs(axis)

    def gather(leaf, spec):
        return lax.all_gather(leaf, axis, axis=spec.index(axis), tiled=True) if axis else leaf

    def all_of(part, params):
        return {name: gather(leaf, specs[part][name]) for name, leaf in params.items()}

    def exchange(x, split, concatenated):
        return lax.all_to_all(x, axis, split, concatenated, tiled=True) if axis else x

    def first(params, shared, batch, key):
        return pipeline_steps.first(all_of("first", params), all_of("shared", shared), batch, key)

    def stage(params, carried, key):
        x, gains = carried
        # Behind the layers' own leading axis, which a layer no longer has.
        kernel, probe = (gather(params[name], P(axis)) for name in ("kernel", "probe"))
        x = x + jnp.tanh(x @ kernel + params["bias"]) + gains[:, :1] * probe
        own = exchange(x.reshape(-1, EXPERTS, UNITS), 1, 0)
        own = jnp.tanh(jnp.einsum("bei,eij->bej", own, params["experts"]))
        return x + exchange(own, 0, 1).reshape(x.shape), jnp.roll(gains, -1, axis=1)

    def last(params, shared, *rest):
        return pipeline_steps.last(all_of("last", params), all_of("shared", shared), *rest)

    return dict(first=first, stage=stage, last=last)


def make_grads_of(schedule, axis="data", others=(), kind="Auto", **options):
    axes = ("data", *others)
    shape = (2, schedule.num_devices, *[2] * len(others))
    return value_and_grad(
        **make_functions(axis) | options.pop("functions", {}),
        schedule=schedule,
        axis_name="stage",
        data_axes=axes,
        mesh=make_mesh(shape, ("data", "stage", *others), kind),
        **{"param_specs": make_specs(axis), **options},
    )


def assert_same_gradients(found, expected):
    assert_close(found.loss, expected.loss)
    assert_close(found.weight, expected.weight)
    assert_close(found.grads, expected.grads)


CASES = {
    "checked": (one_f_one_b(2, 4), dict()),
    "unchecked": (one_f_one_b(2, 4), dict(check_vma=False)),
    "gpipe": (gpipe(2, 2), dict(check_vma=False, kind="Explicit", bucket_bytes=300)),
    "chunks": (interleaved(2, 2), dict()),
    "halves": (zero_bubble(2, 2), dict(stash="residuals")),
    "halves, unchecked": (zero_bubble(2, 2), dict(check_vma=False, kind="Explicit")),
    "second of two axes": (one_f_one_b(2, 2), dict(axis="fsdp", others=("fsdp",))),
    "not along the stages": (one_f_one_b(2, 2), dict(layers_per_stage=(3, 1), check_vma=False)),
}


@pytest.mark.slow_but("checked", "halves, unchecked")
@pytest.mark.whole("gpipe", "second of two axes")
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_device(case):
    schedule, options = CASES[case]
    params, batch = make_params(), make_batch(0)
    grads_of = make_grads_of(schedule, **options)
    placed = jax.device_put(params, grads_of.shardings(params))
    found = jax.jit(grads_of)(placed, batch)
    expected = sequential(params, batch, **make_functions(None))
    assert_same_gradients(jax.device_get(found), expected)
    for grad, leaf in zip(jax.tree.leaves(found.grads), jax.tree.leaves(placed), strict=True):
        assert grad.sharding.is_equivalent_to(leaf.sharding, leaf.ndim)


@pytest.mark.slow_but("checked")
@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
def test_stages_that_differ_may_be_divided_too(check_vma):
    """Their parameters are packed into one array, whole ones beside divided ones."""
    params, batch = make_params(), make_batch(0)
    expected = sequential(params, batch, **make_functions(None))

    def unstack(tree):
        return [jax.tree.map(lambda leaf, n=n: leaf[n], tree) for n in range(LAYERS)]

    specs = make_specs("data")
    specs["stages"] = [{name: P(*spec[1:]) for name, spec in specs["stages"].items()}] * LAYERS
    grads_of = make_grads_of(
        interleaved(2, 2),
        functions={"stage": [make_functions("data")["stage"]] * LAYERS},
        param_specs=specs,
        check_vma=check_vma,
    )
    found = jax.device_get(jax.jit(grads_of)(params | {"stages": unstack(params["stages"])}, batch))
    stages = unstack(expected.grads["stages"])
    assert_same_gradients(found, expected._replace(grads=expected.grads | {"stages": stages}))


def alone(params, batch, *, loss_scale, **_):
    """What a pipeline's function returns, on one device and without `shard_map`."""
    whole = sequential(params, batch, None, 4, 2, **make_functions(None))
    grads = optax.tree.scale(loss_scale, whole.grads)
    return ampx.GradResult(whole.loss, grads, whole.weight, None, None, None)


@pytest.mark.slow_but("checked")
@pytest.mark.parametrize("case", ["checked", "unchecked"])
def test_steps_are_those_of_one_device(case):
    """A norm counts each shard once, and an infinity in one shard skips the step on all devices."""
    schedule, options = CASES[case]
    grads_of = make_grads_of(schedule, **options)
    step = ampx.train_step(
        grads_of,
        optax.sgd(0.5, momentum=0.9),  # after one step its state is the clipped gradient
        loss_scale=lambda tx: ampx.dynamic_loss_scale(tx, init_scale=2.0**10, growth_interval=2),
        max_grad_norm=0.5,
        local_norm=True,
    )
    step_alone = ampx.TrainStep(step.tx, alone, None, None, step.group_of)
    params = make_params()
    state = step.init(jax.device_put(params, grads_of.shardings(params)))
    state, expected = committed(state, grads_of.mesh), step_alone.init(params)
    jitted = jax.jit(step)
    for number, spoilt in enumerate([None, (3, 1, 5), None]):
        batch = make_batch(number, spoilt=spoilt)
        state, report = jitted(state, batch)
        expected, report_alone = step_alone(expected, batch)
        assert report.overflow == report_alone.overflow == (number == 1)
        assert report.loss_scale == report_alone.loss_scale
        assert_close(report.loss, report_alone.loss)
        if spoilt is None:
            assert_close(report.global_norm, report_alone.global_norm)
            assert report.global_norm > 0.5
        assert_close(state.params, expected.params)
        assert_close(state.opt_state, expected.opt_state, 1e-4)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ({"shared": {"table": P("stage")}}, r"'shared/table' over the axis 'stage' of the stages"),
        ({"stages": P()}, r"first entry .* must be 'stage' alone, as in .*'stage'"),
        ({"stages": {"bias": P(None, "stage")}}, r"'stages/bias': its first entry"),
        ({"stages": P(("stage", "data"))}, r"must be 'stage' alone"),
        ({"layers": P("stage")}, r"param_specs has \['layers'\]: the parts of params are"),
    ],
    ids=["an end", "none", "second", "together", "no part"],
)
def test_specs_that_cannot_be_are_named(specs, message):
    with pytest.raises(ValueError, match=message):
        make_grads_of(one_f_one_b(2, 4), param_specs=specs)

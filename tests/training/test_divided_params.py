"""Steps of parameters that are divided over devices, held against the undivided step.

The model is a sum of a dense layer and four experts. On a mesh of 2 x 2 the experts are divided
over the second axis, in two ways:

    data x model     devices along "model" see the same rows; each adds its experts' share
    data x expert    the rows are split over both axes; each device's experts see the rows of all
                     devices along "expert", and gradients of experts are summed over "data" alone
"""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import make_mesh, same_everywhere
from jax.sharding import PartitionSpec as P

import ampx

PARAMS = {
    "dense": np.linspace(-1, 2, 3, dtype=np.float32),
    "experts": np.linspace(-2, 3, 12, dtype=np.float32).reshape(4, 3) ** 3,
}
# Each of the norms matters: the clips clip, and the trust ratios are not 1.
OPTIMIZERS = {
    "clip": optax.sgd(0.1, momentum=0.9),
    "lamb": ampx.fused.lamb(0.1, weight_decay=0.1),
    "novograd": ampx.fused.novograd(0.1),
}


def make_batch(step):
    rows = np.random.default_rng(step).normal(size=(8, 4)).astype(np.float32)
    # Times the loss scale this overflows. It is in the gradient of expert 2, of the second shard.
    spike = np.zeros((4, 3), np.float32)
    spike[2, 1] = 1e35 if step == 1 else 0
    return {"rows": rows, "spike": spike}


BATCHES = [make_batch(step) for step in range(3)]


def add_experts(experts, rows):
    return jnp.sum(jnp.tanh(rows @ experts.T), axis=1)


def loss_of(params, batch, outputs, spiked):
    errors = batch["rows"][:, :3] @ params["dense"] + outputs - batch["rows"][:, 3]
    return jnp.mean(errors**2) + spiked


def undivided(params, batch):
    outputs = add_experts(params["experts"], batch["rows"][:, :3])
    return loss_of(params, batch, outputs, jnp.sum(params["experts"] * batch["spike"]))


def own_spike(batch, axis):
    return jax.lax.dynamic_slice_in_dim(batch["spike"], 2 * jax.lax.axis_index(axis), 2)


def over_model(check_vma, params, batch):
    # Unchecked, the transpose of a psum is a psum, which would count each gradient twice.
    def total(own):
        if check_vma:
            return jax.lax.psum(own, "model")
        return own + jax.lax.stop_gradient(jax.lax.psum(own, "model") - own)

    outputs = total(add_experts(params["experts"], batch["rows"][:, :3]))
    spiked = total(jnp.sum(params["experts"] * own_spike(batch, "model")))
    return loss_of(params, batch, outputs, spiked)


def over_expert(check_vma, params, batch):
    del check_vma
    rows = jax.lax.all_gather(batch["rows"][:, :3], "expert", tiled=True)
    outputs = add_experts(params["experts"], rows)
    outputs = jax.lax.psum_scatter(outputs, "expert", tiled=True)
    spiked = 2 * jnp.sum(params["experts"] * own_spike(batch, "expert"))  # the mean is over both
    return loss_of(params, batch, outputs, spiked)


def make_steps(loss_fn, **options):
    return {
        name: ampx.train_step(
            loss_fn,
            tx,
            loss_scale="dynamic",
            max_grad_norm=1.0,
            local_norm=True,
            batch_axes={"rows": 0, "spike": None},
            **options,
        )
        for name, tx in OPTIMIZERS.items()
    }


def take_all(steps, states, batch):
    results = {name: step(states[name], batch) for name, step in steps.items()}
    return {name: r[0] for name, r in results.items()}, {name: r[1] for name, r in results.items()}


def run(take, states):
    """The states and reports after each batch: one good, one with an overflow, one good."""
    history = []
    for batch in BATCHES:
        states, reports = take(states, batch)
        history.append((states, reports))
    return jax.device_get(history)


@pytest.fixture(scope="module")
def expected():
    steps = make_steps(undivided)
    states = {name: step.init(PARAMS) for name, step in steps.items()}
    return run(jax.jit(functools.partial(take_all, steps)), states)


def run_divided(axis, check_vma, model_axes):
    loss_fn, axis_name = {
        "model": (over_model, "data"),
        "expert": (over_expert, ("data", "expert")),
    }[axis]
    loss_fn = functools.partial(loss_fn, check_vma)
    steps = make_steps(loss_fn, axis_name=axis_name, model_axes=model_axes)
    states = {name: step.init(PARAMS) for name, step in steps.items()}

    def spec(path, leaf):
        return P(axis) if "experts" in jax.tree_util.keystr(path) and jnp.ndim(leaf) else P()

    specs = jax.tree_util.tree_map_with_path(spec, states)
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", axis), axis_types=kinds)
    take = jax.shard_map(
        functools.partial(take_all, steps),
        mesh=mesh,
        in_specs=(specs, {"rows": P(axis_name), "spike": P()}),
        out_specs=(specs, P()),
        check_vma=check_vma,
    )
    take = jax.jit(take)
    return run(lambda *args: jax.tree.map(same_everywhere, take(*args)), states)


# What `in_specs` has for the parameters. With check_vma=True types tell.
SPECS = {axis: {"dense": P(), "experts": P(axis)} for axis in ("model", "expert")}
CASES = [
    pytest.param(axis, check_vma, None if check_vma else SPECS[axis], id=f"{axis}-{check_vma}")
    for axis in ("model", "expert")
    for check_vma in (True, False)
]


@pytest.mark.whole_but("model-True", "model-False", "expert-True")
@pytest.mark.slow_but("expert-True")
@pytest.mark.parametrize(("axis", "check_vma", "model_axes"), CASES)
def test_a_step_of_divided_parameters_is_the_undivided_one(axis, check_vma, model_axes, expected):
    history = run_divided(axis, check_vma, model_axes)
    for step, ((states, reports), (whole_states, whole_reports)) in enumerate(
        zip(history, expected, strict=True)
    ):
        for name in OPTIMIZERS:
            ours, theirs = SimpleNamespace(**reports[name]._asdict()), whole_reports[name]
            assert ours.overflow == theirs.overflow == (step == 1)
            assert ours.loss_scale == theirs.loss_scale
            assert ours.size == theirs.size == {"dense": 3, "experts": 12}
            # Sums in another order: some units in the last place of float32.
            close = functools.partial(np.testing.assert_allclose, rtol=1e-5, err_msg=name)
            close(ours.loss, theirs.loss)
            if step != 1:
                close(ours.global_norm, theirs.global_norm)
                jax.tree.map(close, ours.local_norm, theirs.local_norm)
            assert states[name].opt_state.loss_scale == 2.0 ** (16 if step == 0 else 15)
            jax.tree.map(
                functools.partial(close, atol=1e-6), states[name].params, whole_states[name].params
            )


@pytest.mark.parametrize("place", ["inside", "outside"])
def test_seeds_under_vmap_are_steps_of_their_own(place):
    """Types tell what is divided; the buckets wait for each other; one seed overflows."""
    options = dict(loss_scale="dynamic", max_grad_norm=1.0, batch_axes={"rows": 0, "spike": None})
    make = functools.partial(ampx.train_step, tx=OPTIMIZERS["lamb"], **options)
    whole = make(undivided)
    step = make(
        functools.partial(over_model, True), axis_name="data", bucket_bytes=1, tail_overlap=True
    )
    stack = functools.partial(jax.tree.map, lambda *leaves: jnp.stack(leaves))
    seeds = stack(PARAMS, jax.tree.map(lambda leaf: leaf / 2, PARAMS))
    batches = stack(BATCHES[1], BATCHES[0])
    states = jax.vmap(step.init)(seeds)

    def spec(path, leaf):
        return P("model") if "experts" in jax.tree_util.keystr(path) and leaf.ndim > 1 else P()

    of_states = jax.tree_util.tree_map_with_path(spec, states)
    in_specs, out_specs = (of_states, {"rows": P("data"), "spike": P()}), (of_states, P())
    mesh = make_mesh((2, 2), ("data", "model"))
    map_over = functools.partial(jax.shard_map, mesh=mesh)
    if place == "inside":
        in_specs, out_specs = jax.tree.map(
            lambda spec: P(None, *spec), (in_specs, out_specs), is_leaf=lambda x: isinstance(x, P)
        )
        mapped = map_over(jax.vmap(step), in_specs=in_specs, out_specs=out_specs)
    else:
        mapped = jax.vmap(map_over(step, in_specs=in_specs, out_specs=out_specs))
    new, report = jax.jit(mapped)(states, batches)
    expected, of_whole = jax.jit(jax.vmap(whole))(jax.vmap(whole.init)(seeds), batches)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    assert report.overflow.tolist() == of_whole.overflow.tolist() == [True, False]
    close(report.global_norm[1], of_whole.global_norm[1])
    jax.tree.map(close, new.params, expected.params)

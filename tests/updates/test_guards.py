"""Optimizers that write into what they are given, or return another state than they were given."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_bit_equal
from jax.sharding import PartitionSpec as P

import ampx
from ampx import fused

PARAMS = {"w": jnp.arange(8.0), "layers": [jnp.ones(3), jnp.ones(2)]}
GRADS = jax.tree.map(lambda p: 0.5 * p + 1, PARAMS)
BAD = jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), PARAMS)


def writing():
    """Momentum that is kept in a dict, as research code does it: all is changed in place."""

    def init(params):
        return {"count": jnp.zeros([], jnp.int32), "mu": jax.tree.map(jnp.zeros_like, params)}

    def update(updates, state, params=None):
        state["count"] = state["count"] + 1
        state["mu"] = jax.tree.map(lambda m, g: 0.9 * m + g, state["mu"], updates)
        updates["w"] = updates["w"] * 0
        params["layers"].append(None)
        for place, mu in enumerate(state["mu"]["layers"]):
            updates["layers"][place] = -0.1 * mu
        return updates, state

    return optax.GradientTransformation(init, update)


WRAPPERS = {
    "a dynamic scale": lambda tx: ampx.dynamic_loss_scale(tx, init_scale=8.0),
    "a static scale": lambda tx: ampx.static_loss_scale(tx, 8.0),
    "a check of updates": lambda tx: ampx.static_loss_scale(tx, 8.0, nonfinite_updates="skip"),
    "elements held": lambda tx: ampx.static_loss_scale(tx, 8.0, nonfinite_updates="hold"),
    "in a chain": lambda tx: ampx.static_loss_scale(optax.chain(optax.clip(9.0), tx), 8.0),
    "masters": lambda tx: ampx.static_loss_scale(ampx.master_weights(tx), 8.0),
    "several calls": lambda tx: ampx.static_loss_scale(ampx.multi_steps(tx, 1), 8.0),
    "fuse": lambda tx: ampx.static_loss_scale(fused.fuse(tx), 8.0),
    "several calls alone": lambda tx: ampx.multi_steps(tx, 1),
    "masters alone": ampx.master_weights,
}


@pytest.fixture(params=["as on CPUs", "as on GPUs"])
def form(request):
    if request.param == "as on GPUs":
        request.getfixturevalue("traced_as_for_gpus")


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("is_jitted", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_an_optimizer_may_write_into_what_it_is_given(wrapper, is_jitted):
    tx = WRAPPERS[wrapper](writing())
    scale = 1.0 if wrapper.endswith("alone") else 8.0
    copies = [jax.tree.map(lambda leaf: leaf, tree) for tree in (PARAMS, GRADS)]

    def step(params, state, grads):
        updates, state = tx.update(optax.tree.scale(scale, grads), state, params)
        return optax.apply_updates(params, updates), state

    run = jax.jit(step) if is_jitted else step
    params, state = run(*run(PARAMS, tx.init(PARAMS), GRADS), GRADS)
    expected = jax.tree.map(lambda p, g: p - (0.1 + 0.19) * g, PARAMS, GRADS)
    for found, own in zip(params["layers"], expected["layers"], strict=True):
        np.testing.assert_allclose(found, own, rtol=1e-6)
    assert_bit_equal(params["w"], PARAMS["w"])
    if scale != 1:
        after, held = run(params, state, BAD)
        assert_bit_equal((after, held.inner_state), (params, state.inner_state))
    assert_bit_equal([PARAMS, GRADS], copies)


def forgetful():
    """It takes a state with noise, and returns one without."""

    def update(updates, state, params=None):
        return updates, {"noise": None, "count": state["count"] + 1}

    return optax.GradientTransformation(
        lambda params: {"noise": params, "count": jnp.zeros([], jnp.int32)}, update
    )


HOLDERS = ["a dynamic scale", "a check of updates", "elements held", "fuse", "several calls alone"]


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_state_that_changes_its_structure_is_refused_where_it_may_be_held(holder):
    tx = WRAPPERS[holder](forgetful())
    for update in (tx.update, jax.jit(tx.update)):
        with pytest.raises(
            ValueError, match=r"only the old one holds 'noise/layers/0'.*in init|zer"
        ):
            update(GRADS, tx.init(PARAMS), PARAMS)


def monitored(*others):
    """Measures the norm of its gradients, and an average of it."""
    average = optax.measure_with_ema(optax.tree.norm, 0.5, debias=False)
    measures = {"norm": optax.tree.norm, "average": average}
    return optax.chain(optax.monitor(measures), *others)


def measurements(state):
    return {name: float(optax.tree.get(state, name)) for name in ("norm", "average")}


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("holder", ["a static scale", "elements held", "several calls", "fuse"])
def test_a_monitor_of_optax_measures_where_its_state_may_be_held(holder):
    """optax begins without measurements; a skipped step must have some to keep."""
    tx = WRAPPERS[holder](monitored(optax.sgd(0.1)))
    state = tx.init(PARAMS)
    assert measurements(state) == {"norm": 0.0, "average": 0.0}
    update = jax.jit(tx.update)
    for size in (8.0, jnp.inf, 8.0):
        _, state = update(jax.tree.map(lambda g, size=size: g * size, GRADS), state, PARAMS)
    assert update._cache_size() == 1
    norm = float(optax.tree.norm(GRADS))
    assert measurements(state) == pytest.approx({"norm": norm, "average": 0.75 * norm}, rel=1e-6)


def test_a_monitor_beside_what_asks_for_the_loss_measures_or_says_what_is_missing():
    tx = ampx.dynamic_loss_scale(monitored(optax.polyak_sgd(0.1)), init_scale=1.0)
    state = tx.init(PARAMS)
    _, new_state = jax.jit(tx.update)(GRADS, state, PARAMS, value=jnp.ones(()))
    assert measurements(new_state)["norm"] == pytest.approx(float(optax.tree.norm(GRADS)))
    with pytest.raises(TypeError, match="value"):
        tx.update(GRADS, state, PARAMS)
    mapped = ampx.dynamic_loss_scale(monitored(ampx.all_reduce("data")), axis_names="data")
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def step(grads, state):
        state = mapped.init(PARAMS) if state is None else state
        grads = jax.tree.map(lambda g: g * ampx.current_loss_scale(state), grads)
        return optax.tree.get(mapped.update(grads, state, PARAMS)[1], "norm")

    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
    assert float(run(GRADS, None)) == pytest.approx(float(optax.tree.norm(GRADS)))
    outside = mapped.init(PARAMS)  # where the axis is not mapped
    with pytest.raises(ValueError, match=r"optax.monitor has no measurements.*optax.snapshot"):
        run(GRADS, outside)


def test_a_state_that_changes_its_structure_is_taken_where_it_is_not_held():
    tx = ampx.master_weights(forgetful())
    _, state = jax.jit(tx.update)(GRADS, tx.init(PARAMS), PARAMS)
    assert state.inner_state["noise"] is None


def test_an_argument_that_a_result_brings_is_explained_where_it_is_refused():
    """As by an optimizer that says it takes extra arguments, and takes none, inside of a chain."""
    closed = optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(), lambda updates, state, params: (updates, state)
    )
    chain = optax.chain(closed, optax.scale(-0.1))
    result = ampx.value_and_grad(lambda p, x: jnp.sum(p * x))(jnp.ones(2), jnp.ones(2))
    tx = ampx.static_loss_scale(chain, 1.0)
    with pytest.raises(TypeError, match=r"does not take the extra argument .*or that of the whole"):
        tx.update(result, tx.init(jnp.ones(2)), jnp.ones(2))
    whole = optax.GradientTransformation(chain.init, chain.update)
    tx = ampx.static_loss_scale(whole, 1.0)
    updates, _ = tx.update(result, tx.init(jnp.ones(2)), jnp.ones(2))
    assert_bit_equal(updates, jnp.full(2, -0.1))

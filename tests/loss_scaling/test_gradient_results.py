"""A `GradResult` given to an update whole: it knows the scale that it carries."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_bit_equal

import ampx

PARAMS = {"w": jnp.array([1.0, -2.0]), "b": jnp.array(0.5)}
X = jnp.array([3.0, 4.0])


def loss_fn(params, x):
    return jnp.sum(params["w"] * x) ** 2 + params["b"] ** 2


grads_of = ampx.value_and_grad(loss_fn)
dynamic = ampx.dynamic_loss_scale
WRAPPERS = {
    "dynamic": lambda tx: dynamic(tx, init_scale=8.0, growth_interval=1),
    "static": lambda tx: ampx.static_loss_scale(tx, 8.0),
    "unchecked": lambda tx: ampx.static_loss_scale(tx, 8.0, check=False),
    "fused": lambda tx: dynamic(ampx.fused.sgd(0.1, momentum=0.9), init_scale=8.0),
    "windows": lambda tx: dynamic(ampx.multi_steps(tx, 2, normalize="weights"), init_scale=8.0),
    "none": ampx.no_loss_scale,
}
SGD = optax.sgd(0.1, momentum=0.9)


@pytest.mark.slow_but("dynamic", "unchecked", "none")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_result_is_taken_as_its_parts_are(wrapper):
    tx = WRAPPERS[wrapper](SGD)

    @jax.jit
    def step(state):
        result = grads_of(PARAMS, X, loss_scale=ampx.current_loss_scale(state))
        parts = {"value": result.loss, "weight": result.weight}
        return tx.update(result, state, PARAMS), tx.update(result.grads, state, PARAMS, **parts)

    whole, parts = step(tx.init(PARAMS))
    assert_bit_equal(whole, parts)
    assert np.any(np.asarray(whole[0]["w"]) != 0) or wrapper == "windows"


@pytest.mark.slow_but("fused", "none")
@pytest.mark.parametrize("wrapper", sorted(WRAPPERS))
def test_the_gradient_is_right_with_the_scale_that_it_carries(wrapper):
    """Inside of jit nobody can tell that it is another one than that of the state."""
    tx = WRAPPERS[wrapper](SGD)
    state = tx.init(PARAMS)
    run = jax.jit(lambda scale: tx.update(grads_of(PARAMS, X, loss_scale=scale), state, PARAMS))
    jit_state = jax.jit(
        lambda state: tx.update(grads_of(PARAMS, X, loss_scale=32.0), state, PARAMS)
    )
    right = tx.update(grads_of(PARAMS, X, loss_scale=ampx.current_loss_scale(state)), state, PARAMS)
    for found in (run(jnp.float32(32)), jit_state(state)):
        assert_bit_equal(found, right)


def test_several_losses_carry_one_each():
    tx = dynamic(SGD, init_scale=8.0, num_losses=2)
    state = tx.init(PARAMS)
    parts = [grads_of(PARAMS, x, loss_scale=s) for x, s in ((X, 8.0), (2 * X, 8.0))]
    whole = tx.update(tuple(parts), state, PARAMS)
    assert_bit_equal(whole, tx.update(tuple(part.grads for part in parts), state, PARAMS))
    with pytest.raises(
        ValueError, match="loss scale of 4.* is 8: .*current_loss_scale.opt_state, 1"
    ):
        tx.update((parts[0], parts[1].with_scale(4.0)), state, PARAMS)
    one = tx.update((None, parts[1]), state, PARAMS)
    assert_bit_equal(one, tx.update((None, parts[1].grads), state, PARAMS))
    right = jax.jit(
        lambda s: tx.update((None, grads_of(PARAMS, 2 * X, loss_scale=s)), state, PARAMS)
    )
    assert_bit_equal(right(jnp.float32(2.0)), one)


@pytest.mark.parametrize("jit", [False, True], ids=["plain", "jit"])
def test_losses_of_several_results_are_judged_and_given_on_as_their_sum(jit):
    seen = []

    def record(updates, state, params=None, *, value, **extra_args):
        seen.append(value)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), record)
    tx = dynamic(inner, init_scale=8.0, num_losses=2, nonfinite_loss="skip")
    state = tx.init(PARAMS)

    def step(lost):
        part = grads_of(PARAMS, X, loss_scale=8.0)
        parts = (part, part._replace(loss=part.loss + lost))
        updates, new = tx.update(parts, state, PARAMS)
        return updates, new, part.loss, seen.pop()

    step = jax.jit(step) if jit else step
    _, new, loss, value = step(1.0)
    np.testing.assert_allclose(value, 2 * loss + 1)
    assert int(new.nonfinite_loss_total) == 0 and not new.overflow
    updates, new, *_ = step(jnp.inf)
    assert int(new.nonfinite_loss_total) == 1 and new.overflow
    assert not np.any(updates["w"])


def map_rows(kind, body):
    """Maps a function of one row over two devices; results get an axis of these."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def of_rows(x):
        return jax.tree.map(lambda leaf: leaf[None], body(x[0]))

    rows = dict(mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"))
    return {
        "typed": lambda: jax.shard_map(of_rows, **rows),
        "untyped": lambda: jax.shard_map(of_rows, check_vma=False, **rows),
        "pmap": lambda: jax.pmap(body, axis_name="data", devices=jax.devices()[:2]),
        "vmap": lambda: jax.vmap(body, axis_name="data"),
    }[kind]()


@pytest.mark.parametrize("kind", ["typed", "untyped", "pmap", "vmap"])
def test_gradients_of_losses_that_are_one_number_are_added_over_devices(kind):
    """With one result and with several: a mean would divide them by the devices once more."""
    x = jnp.array([[3.0, 4.0], [5.0, -6.0]])
    of_all = ampx.value_and_grad(loss_fn, axis_name="data")

    def run(results, num_losses):
        reduce = ampx.all_reduce("data")
        tx = dynamic(reduce, init_scale=8.0, num_losses=num_losses, axis_names="data")
        return tx.update(results, tx.init(PARAMS), PARAMS)[0]

    def body(x):
        one = of_all(PARAMS, x, loss_scale=8.0)
        return run(one, 1), run((one, one), 2)

    def mixed(x):
        return run((of_all(PARAMS, x, loss_scale=8.0), grads_of(PARAMS, x, loss_scale=8.0)), 2)

    one, two = jax.jit(map_rows(kind, body))(x)
    right = jax.grad(lambda p: (loss_fn(p, x[0]) + loss_fn(p, x[1])) / 2)(PARAMS)
    both = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), right)
    jax.tree.map(np.testing.assert_allclose, one, both)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, 2 * b), two, both)
    with pytest.raises(ValueError, match="over .'data'. one of the losses is the same on all"):
        jax.eval_shape(map_rows(kind, mixed), x)


@pytest.mark.parametrize("kind", ["untyped", "pmap", "vmap"])
@pytest.mark.parametrize("name", ["dynamic", "unchecked", "none", "fused.apply"])
def test_parts_of_a_gradient_that_nobody_adds_are_warned_of(kind, name):
    """Devices would train different parameters. Where types tell, JAX refuses such a step."""
    of_all = ampx.value_and_grad(loss_fn, axis_name="data")
    tx = ampx.fused.sgd(0.1) if name == "fused.apply" else WRAPPERS[name](SGD)

    def step(x, summed=False):
        state = tx.init(PARAMS)
        result = of_all(PARAMS, x, loss_scale=ampx.current_loss_scale(state))
        if summed:
            grads = jax.lax.psum(result.grads, "data")
            result = result._replace(grads=grads, shared_loss_axes=None)
        if name == "fused.apply":
            return ampx.fused.apply(tx, result, state, PARAMS)[0]
        return tx.update(result, state, PARAMS)[0]

    rows = jnp.array([[3.0, 4.0], [5.0, -6.0]])
    with pytest.warns(UserWarning, match=r"all_reduce\('data'\) first in the chain") as found:
        jax.eval_shape(map_rows(kind, step), rows)
    assert [warning.filename for warning in found] == [__file__]
    jax.eval_shape(map_rows(kind, functools.partial(step, summed=True)), rows)


def test_several_optimizers_take_one():
    tx = dynamic({"w": SGD, "b": SGD}, init_scale=8.0, growth_interval=1)
    state = tx.init(PARAMS)
    step = jax.jit(lambda s: tx.update(grads_of(PARAMS, X, loss_scale=s), state, PARAMS))
    updates, new = step(jnp.float32(2.0))
    _, kept = step(jnp.float32(8.0))
    assert_bit_equal(new, kept)
    np.testing.assert_allclose(updates["w"], -0.1 * jax.grad(loss_fn)(PARAMS, X)["w"])
    assert float(new.loss_scale) == 16


@pytest.mark.parametrize("jit", [False, True], ids=["plain", "jit"])
def test_a_forgotten_scale_is_refused(jit):
    tx = WRAPPERS["dynamic"](SGD)

    def step(state):
        return tx.update(grads_of(PARAMS, X), state, PARAMS)

    with pytest.raises(
        ValueError, match="carry no loss scale.* give ampx.value_and_grad loss_scale="
    ):
        (jax.jit(step) if jit else step)(tx.init(PARAMS))
    one = ampx.static_loss_scale(SGD, 1.0)  # skips bad steps, and scales nothing
    updates, _ = one.update(grads_of(PARAMS, X), one.init(PARAMS), PARAMS)
    np.testing.assert_allclose(updates["b"], -0.1)


def test_another_scale_is_refused_where_both_are_known():
    for name, held in (("dynamic", 8), ("none", 1)):
        tx = WRAPPERS[name](SGD)
        with pytest.raises(ValueError, match=f"loss scale of 4, .* state is {held}: give"):
            tx.update(grads_of(PARAMS, X, loss_scale=4.0), tx.init(PARAMS), PARAMS)


def test_a_loss_that_is_not_finite_is_counted():
    tx = WRAPPERS["dynamic"](SGD)
    result = grads_of(PARAMS, X, loss_scale=8.0)._replace(loss=jnp.float32(jnp.inf))
    _, state = tx.update(result, tx.init(PARAMS), PARAMS)
    assert int(state.nonfinite_loss_total) == 1


def test_a_result_that_flax_has_taken_apart_is_named():
    class Fields(dict):  # what nnx.Optimizer.update makes of a NamedTuple: a mapping of its fields
        pass

    tx = dynamic(SGD)
    result = grads_of(PARAMS, X, loss_scale=65536.0)
    with pytest.raises(ValueError, match="the fields of a GradResult: give result.grads"):
        tx.update(Fields(grads=result.grads, loss=result.loss), tx.init(PARAMS), PARAMS)
    named = {"grads": PARAMS["w"]}  # a parameter may have that name
    tx.update(named, tx.init(named), named)


TAKE_GRADIENTS_ALONE = {
    "multi_steps": lambda: ampx.multi_steps(SGD, 2),
    "master_weights": lambda: ampx.master_weights(SGD),
    "split_masters": lambda: ampx.fused.split_masters(SGD),
    "stochastic_rounding": lambda: ampx.fused.stochastic_rounding(SGD),
    "follow_schedule": lambda: ampx.follow_schedule(
        SGD, ampx.precision_schedule("fast1|step|0.5", total_steps=8)
    ),
    "clip_by_bucket_norm": lambda: ampx.clip_by_bucket_norm(1.0),
    "fused": lambda: ampx.fused.sgd(0.1),
    "fuse": lambda: ampx.fused.fuse(SGD),
}


@pytest.mark.parametrize("params", [PARAMS, PARAMS["w"]], ids=["tree", "one array"])
@pytest.mark.parametrize("name", TAKE_GRADIENTS_ALONE)
def test_who_takes_gradients_alone_says_what_to_give(name, params):
    tx = TAKE_GRADIENTS_ALONE[name]()
    result = ampx.value_and_grad(lambda p, x: sum(jnp.sum(a) for a in jax.tree.leaves(p)))(
        params, X
    )
    with pytest.raises(ValueError, match="got a GradResult .*: give the grads of a GradResult"):
        tx.update(result, tx.init(params), params)


FUSED = ampx.fused.sgd(0.1, momentum=0.9)
APPLIED = {
    "dynamic": lambda: dynamic(FUSED, init_scale=8.0),
    "static": lambda: ampx.static_loss_scale(FUSED, 8.0),
    "rated": lambda: dynamic(optax.inject_hyperparams(ampx.fused.sgd)(0.1), init_scale=8.0),
    "fuse": lambda: dynamic(ampx.fused.fuse(SGD), init_scale=8.0),
    "no scale": lambda: FUSED,
}


@pytest.mark.parametrize("jit", [False, True], ids=["plain", "jit"])
@pytest.mark.parametrize("name", APPLIED)
def test_apply_takes_a_result_as_its_gradients(name, jit):
    tx = APPLIED[name]()
    state = tx.init(PARAMS)

    def step(state, whole):
        result = grads_of(PARAMS, X, loss_scale=ampx.current_loss_scale(state))
        return ampx.fused.apply(tx, result if whole else result.grads, state, PARAMS, max_norm=1.0)

    run = jax.jit(step, static_argnums=1) if jit else step
    assert_bit_equal(run(state, True), run(state, False))


def test_apply_refuses_a_result_of_another_scale():
    tx = dynamic(FUSED, init_scale=8.0)
    state = tx.init(PARAMS)
    result = grads_of(PARAMS, X, loss_scale=8.0)
    with pytest.raises(ValueError, match="carry no loss scale, .*give ampx.value_and_grad loss_sc"):
        ampx.fused.apply(tx, grads_of(PARAMS, X), state, PARAMS)
    with pytest.raises(ValueError, match="carry a loss scale of 4, .* is 8: give ampx"):
        ampx.fused.apply(tx, result.with_scale(4.0), state, PARAMS)
    with pytest.raises(ValueError, match="carry a loss scale of 8, .* is 1: give ampx"):
        ampx.fused.apply(FUSED, result, FUSED.init(PARAMS), PARAMS)
    # Inside of jit the numbers are not known: they are divided by what they carry.
    right = ampx.fused.apply(tx, result, state, PARAMS)
    for scaled, its_state in ((tx, state), (FUSED, FUSED.init(PARAMS))):
        run = jax.jit(
            lambda scale, tx=scaled, state=its_state: ampx.fused.apply(
                tx, grads_of(PARAMS, X, loss_scale=scale), state, PARAMS
            )[0]
        )
        assert_bit_equal(run(jnp.float32(32)), right[0])


def test_apply_takes_a_result_of_each_loss():
    tx = dynamic(FUSED, init_scale=8.0, num_losses=2)
    state = tx.init(PARAMS)
    parts = [grads_of(PARAMS, x, loss_scale=8.0) for x in (X, 2 * X)]
    alone = tuple(part.grads for part in parts)
    for whole, grads in ((tuple(parts), alone), ((None, parts[1]), (None, alone[1]))):
        assert_bit_equal(
            ampx.fused.apply(tx, whole, state, PARAMS), ampx.fused.apply(tx, grads, state, PARAMS)
        )


@pytest.mark.parametrize("params", [PARAMS, PARAMS["w"]], ids=["tree", "one array"])
def test_functions_that_take_gradients_alone_say_what_to_give(params):
    result = ampx.value_and_grad(lambda p, x: sum(jnp.sum(a) for a in jax.tree.leaves(p)))(
        params, X
    )
    with pytest.raises(ValueError, match="got a GradResult .*: give the grads of a GradResult"):
        ampx.apply_updates(params, result)


def test_a_state_is_no_loss_scale():
    state = dynamic(SGD).init(PARAMS)
    with pytest.raises(TypeError, match="got LossScaleState: give ampx.current_loss_scale"):
        grads_of(PARAMS, X, loss_scale=state)

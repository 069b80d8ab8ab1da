import functools

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from helpers import assert_bit_equal, optimizer_step, types_of

import ampx

INF, NAN = float("inf"), float("nan")


def dynamic(inner=None, **options):
    return ampx.dynamic_loss_scale(inner or optax.adam(0.1), init_scale=8.0, **options)


NESTED = {
    "bare": dynamic,
    "chain": lambda: optax.chain(optax.identity(), dynamic(), optax.scale(1.0)),
    "optax.MultiSteps": lambda: dynamic(optax.MultiSteps(optax.adam(0.1), 1)),
    "multi_steps": lambda: ampx.multi_steps(dynamic(), 1),
    "inject_hyperparams": lambda: optax.inject_hyperparams(
        lambda learning_rate: dynamic(optax.adam(learning_rate))
    )(learning_rate=0.1),
    "inside": lambda: dynamic(optax.inject_hyperparams(optax.adam)(learning_rate=0.1)),
    "partition": lambda: optax.partition({"a": dynamic(), "b": optax.sgd(0.1)}, {"w": "a"}),
}


@pytest.mark.parametrize("scale", [dynamic(), ampx.static_loss_scale(optax.sgd(0.1), 8.0)])
def test_a_scale_inside_of_optax_s_accumulator_is_refused(scale):
    """It clears its sum by a product with 0, so that after an infinity no step is good again."""
    tx = optax.chain(optax.MultiSteps(scale, 2).gradient_transformation())
    state = tx.init(jnp.ones(2))
    with pytest.raises(ValueError, match=r"stays NaN .* dynamic_loss_scale\(optax.MultiSteps"):
        ampx.current_loss_scale(state)
    for factor in (INF, 8.0, 8.0):
        _, state = tx.update(jnp.full(2, factor), state, jnp.ones(2))
    assert jnp.isnan(optax.tree.get(state, "acc_grads")).all()


@pytest.mark.slow_but("optax.MultiSteps", "partition")
@pytest.mark.parametrize("nesting", NESTED)
def test_the_scale_is_found_used_and_moved_wherever_it_is_nested(nesting):
    tx = NESTED[nesting]()
    params = {"w": jnp.ones(2)}
    state = tx.init(params)

    @jax.jit
    def step(params, state, factor):
        scale = ampx.current_loss_scale(state)
        by_name = optax.tree.get(state, "loss_scale")
        new_params, new_state = optimizer_step(
            tx, params, state, {"w": jnp.ones(2) * scale * factor}
        )
        kept = ampx.select_if_finite(new_state, {"ema": new_params["w"]}, {"ema": jnp.zeros(2)})
        return new_params, new_state, scale, by_name, ampx.is_skipped(new_state), kept

    new_params, state, scale, by_name, skipped, kept = step(params, state, 1.0)
    assert scale == by_name == 8.0 and not skipped
    np.testing.assert_allclose(new_params["w"], 0.9, rtol=1e-6)
    assert_bit_equal(kept["ema"], new_params["w"])
    held, state, _, _, skipped, kept = step(new_params, state, NAN)
    assert skipped
    assert_bit_equal(held, new_params)
    assert_bit_equal(kept["ema"], jnp.zeros(2))
    assert ampx.current_loss_scale(state) == 4.0
    assert ampx.find_loss_scale_state(state).skipped_total == 1


def test_no_loss_scale_reads_as_one_and_never_skipped():
    state = optax.adam(0.1).init(jnp.ones(2))
    assert ampx.find_loss_scale_state(state) is None
    scale = ampx.current_loss_scale(state)
    assert scale == 1.0 and scale.dtype == jnp.float32 and not jax.typeof(scale).weak_type
    assert not ampx.is_skipped(state)
    assert_bit_equal(ampx.select_if_finite(state, jnp.ones(2), jnp.zeros(2)), jnp.ones(2))
    ampx.raise_if_exhausted(state)


def test_two_scales_side_by_side_must_be_told_apart():
    tx = optax.partition({"a": dynamic(), "b": dynamic()}, {"x": "a", "y": "b"})
    state = tx.init({"x": jnp.ones(1), "y": jnp.ones(1)})
    for read in (ampx.current_loss_scale, ampx.is_skipped, ampx.find_loss_scale_state):
        with pytest.raises(ValueError, match="found 2 loss scales.*pass the one meant"):
            read(state)
    assert ampx.current_loss_scale(state.inner_states["a"]) == 8.0


@pytest.mark.parametrize("loss_id", [-1, 2])
def test_unknown_loss_is_refused(loss_id):
    state = dynamic(num_losses=2).init(jnp.ones(1))
    assert ampx.current_loss_scale(state, 1) == 8.0
    with pytest.raises(IndexError, match=rf"\[0, 2\), got {loss_id}"):
        ampx.current_loss_scale(state, loss_id)


def test_select_if_finite_keeps_the_old_types():
    _, state = dynamic().update(jnp.ones(1), dynamic().init(jnp.ones(1)), jnp.ones(1))
    old = {"mean": jnp.zeros(2, jnp.float32), "count": jnp.array(3, jnp.int32)}
    new = {"mean": jnp.ones(2, jnp.bfloat16), "count": 4}
    kept = ampx.select_if_finite(state, new, old)
    assert types_of(kept) == types_of(old)
    assert kept["count"] == 4 and (kept["mean"] == 1).all()


@pytest.mark.parametrize(
    "value, advice",
    [(NAN, "NaN gradients do not come from the scale"), (INF, "overflow even unscaled")],
)
def test_raise_if_exhausted_tells_a_broken_model_from_a_scale_problem(value, advice):
    tx = dynamic(on_floor="raise-flag")
    state = tx.init(jnp.ones(1))
    for _ in range(3):
        _, state = tx.update(jnp.array([value]), state, jnp.ones(1))
        ampx.raise_if_exhausted(state)  # 8 -> 4 -> 2 -> 1: not yet
    _, state = tx.update(jnp.array([value]), state, jnp.ones(1))
    with pytest.raises(FloatingPointError, match=f"scale 1.0: 1 floor hits.*{advice}"):
        ampx.raise_if_exhausted((state,))
    held = dynamic()
    state = held.init(jnp.ones(1))
    for _ in range(9):
        _, state = held.update(jnp.array([value]), state, jnp.ones(1))
    assert state.floor_hits == 6
    ampx.raise_if_exhausted(state)


# --- checkpoints and flax ------------------------------------------------------------------------


def trained(tx, params, steps, state=None):
    state = tx.init(params) if state is None else state
    step = jax.jit(functools.partial(optimizer_step, tx))
    for factor in steps:
        grads = jax.tree.map(lambda p, f=factor: jnp.full(p.shape, 8.0 * f), params)
        params, state = step(params, state, grads)
    return params, state


def test_orbax_round_trip_is_bit_equal_and_training_resumes_identically(tmp_path):
    tx = dynamic(ampx.master_weights(optax.adamw(0.1)), growth_interval=2)
    params = {"w": jnp.ones((2, 3), jnp.bfloat16), "norm": jnp.ones(3)}
    saved = trained(tx, params, [1.0, NAN, 0.5])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved)
        checkpointer.wait_until_finished()
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, (params, tx.init(params)))
        restored = checkpointer.restore(tmp_path / "state", abstract)
    assert_bit_equal(restored, saved)
    assert restored[1].inner_state.master_params["w"].dtype == jnp.float32
    rest = [1.0, 2.0, INF, 1.0]
    resumed = trained(tx, restored[0], rest, restored[1])
    assert_bit_equal(resumed, trained(tx, saved[0], rest, saved[1]))


def test_flax_serialization_round_trip():
    tx = dynamic()
    _, state = trained(tx, jnp.ones(2), [1.0, INF])
    blank = tx.init(jnp.ones(2))
    restored = flax.serialization.from_bytes(blank, flax.serialization.to_bytes(state))
    assert_bit_equal(restored, state)


def test_linen_train_state_takes_the_scale_as_any_optimizer():
    state = TrainState.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=dynamic(optax.sgd(1.0)))

    @jax.jit
    def step(state, factor):
        scale = ampx.current_loss_scale(state.opt_state)
        return state.apply_gradients(grads={"w": jnp.ones(2) * scale * factor})

    state = step(step(state, 1.0), INF)
    np.testing.assert_array_equal(state.params["w"], 0.0)
    assert ampx.is_skipped(state.opt_state) and ampx.current_loss_scale(state.opt_state) == 4.0


def test_nnx_optimizer_takes_the_scale_as_any_optimizer():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, dynamic(optax.sgd(1.0)), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, factor):
        scale = ampx.current_loss_scale(optimizer.opt_state)
        grads = nnx.grad(lambda m: jnp.sum(m(jnp.ones((1, 2)))) * scale * factor)(model)
        optimizer.update(model, grads)
        kept = ampx.select_if_finite(optimizer.opt_state, jnp.ones(1), jnp.zeros(1))
        return ampx.is_skipped(optimizer.opt_state), kept

    before = model.kernel[...]
    skipped, kept = step(model, optimizer, 1.0)
    assert not skipped and kept == 1.0
    np.testing.assert_allclose(model.kernel[...], before - 1.0, rtol=1e-6)
    held = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))
    skipped, kept = step(model, optimizer, NAN)
    assert skipped and kept == 0.0
    assert_bit_equal(nnx.state(model, nnx.Param), held)
    assert ampx.current_loss_scale(optimizer.opt_state) == 4.0

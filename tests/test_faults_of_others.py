"""One regression a fault of other libraries' loss scaling, shown where the library is installed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from helpers import all_finite, assert_bit_equal, make_mesh, optimizer_step, scan_flags
from jax.sharding import PartitionSpec as P

import ampx

INF, NAN = float("inf"), float("nan")


def test_mpx_unscales_by_the_scale_it_has_just_grown():
    """MPX: gradients halve on every growth step, 0.5 instead of 1.0."""
    tx = ampx.dynamic_loss_scale(optax.sgd(1.0), init_scale=4.0, growth_interval=2)
    params = jnp.zeros(1)
    state = tx.init(params)
    scales, steps = [], []
    for _ in range(6):
        scale = ampx.current_loss_scale(state)
        scales.append(float(scale))
        grads = jax.grad(lambda p, s: p[0] * s)(params, scale)
        updates, state = tx.update(grads, state, params)
        steps.append(float(updates[0]))
    assert scales == [4, 4, 8, 8, 16, 16]
    assert steps == [-1.0] * 6


@pytest.mark.parametrize("half_dtype", ["float16", "bfloat16"])
def test_flax_scale_is_weakly_typed_so_that_a_half_loss_overflows(half_dtype):
    """flax: 2**15 times a float16 loss of 3 is computed in float16, and that is infinite."""

    def loss_fn(w, batch=None):
        return (0.5 * w + 2.5).astype(half_dtype)

    w = jnp.ones(())
    theirs = DynamicScale(scale=2.0**15).value_and_grad(loss_fn)(w)
    assert np.isinf(theirs.aux) == (half_dtype == "float16")

    tx = ampx.dynamic_loss_scale(optax.sgd(1.0), init_scale=2.0**15)
    state = tx.init(w)
    assert state.loss_scale.dtype == jnp.float32 and not jax.typeof(state.loss_scale).weak_type
    scale = ampx.current_loss_scale(state)
    result = ampx.value_and_grad(loss_fn)(w, jnp.zeros(1), loss_scale=scale)
    updates, state = tx.update(result.grads, state, w)
    assert result.loss == 3.0 and not state.overflow and updates == -0.5


def test_a_float32_loss_of_a_half_model_takes_the_default_scale_at_once():
    """No first step is lost: 2**16 enters float16 only after the mean has divided it."""
    tx = ampx.dynamic_loss_scale(optax.sgd(1.0))
    w, x = jnp.ones(()), jnp.linspace(-1.0, 1.0, 16)
    grads_of = ampx.value_and_grad(
        lambda w, x: jnp.mean((w * x.astype(w.dtype)).astype(jnp.float32) + 3.0), policy="c=f16"
    )
    state = tx.init(w)
    result = grads_of(w, x, loss_scale=ampx.current_loss_scale(state))
    _, state = tx.update(result.grads, state, w)
    assert state.loss_scale == 2.0**16 and not state.overflow


def test_flax_needs_n_plus_one_steps_for_an_interval_of_n():
    theirs, scales = DynamicScale(growth_interval=3, scale=8.0), []
    for _ in range(4):
        theirs = theirs.value_and_grad(lambda w: w)(jnp.array(1.0)).dynamic_scale
        scales.append(float(theirs.scale))
    assert scales == [8, 8, 8, 16]
    tx = ampx.dynamic_loss_scale(optax.identity(), growth_interval=3, init_scale=8.0)
    assert scan_flags(tx, [False] * 4).loss_scale.tolist() == [8, 8, 16, 16]


def test_flax_traces_twice_because_its_state_starts_as_python_numbers():
    traces = {"flax": 0, "ampx": 0}

    @jax.jit
    def their_step(scale, w):
        traces["flax"] += 1
        return scale.value_and_grad(lambda w: w**2)(w).dynamic_scale

    tx = ampx.dynamic_loss_scale(optax.sgd(0.1))

    @jax.jit
    def our_step(w, state):
        traces["ampx"] += 1
        grads = jax.grad(lambda w: w**2 * ampx.current_loss_scale(state))(w)
        return optimizer_step(tx, w, state, grads)

    scale, w = DynamicScale(), jnp.ones(())
    ours = w, tx.init(w)
    for _ in range(3):
        scale, ours = their_step(scale, w), our_step(*ours)
    assert traces == {"flax": 2, "ampx": 1}


@pytest.mark.parametrize("low", [2.0**-10, 2.0**4])
def test_jmp_forgets_its_minimum_in_any_pytree_round_trip(low):
    """jmp: a minimum of 2**-10 becomes 1.0 after jit."""
    tx = ampx.dynamic_loss_scale(optax.identity(), init_scale=2.0**5, min_scale=low)

    @jax.jit
    def step(state):
        return tx.update(jnp.array([INF]), state)[1]

    state = tx.init(jnp.zeros(1))
    for _ in range(20):
        leaves, treedef = jax.tree.flatten(step(state))
        state = jax.tree.map(jnp.copy, jax.tree.unflatten(treedef, leaves))
    assert state.loss_scale == low


def test_apply_if_finite_accepts_nan_after_k_errors():
    theirs = optax.apply_if_finite(optax.adam(0.1), max_consecutive_errors=2)
    ours = ampx.dynamic_loss_scale(optax.adam(0.1))
    params = jnp.ones(2)
    bad = jnp.array([NAN, 1.0])
    their_params, their_state = params, theirs.init(params)
    our_params, our_state = params, ours.init(params)
    first = our_state.inner_state
    their_step, our_step = (jax.jit(functools.partial(optimizer_step, tx)) for tx in (theirs, ours))
    for _ in range(40):
        their_params, their_state = their_step(their_params, their_state, bad)
        our_params, our_state = our_step(our_params, our_state, bad)
    assert np.isnan(their_params).any()
    assert_bit_equal(our_params, params)
    assert_bit_equal(our_state.inner_state, first)
    assert our_state.skipped_total == 40 and our_state.loss_scale == 1.0


def test_zero_nans_before_adamw_still_moves():
    theirs = optax.chain(optax.zero_nans(), optax.adamw(0.1, weight_decay=0.1))
    ours = ampx.dynamic_loss_scale(optax.adamw(0.1, weight_decay=0.1), init_scale=1.0)
    good, bad = jnp.ones(2), jnp.array([NAN, NAN])
    moved = {}
    for name, tx in dict(theirs=theirs, ours=ours).items():
        params, state = optimizer_step(tx, jnp.ones(2), tx.init(jnp.ones(2)), good)
        after, new_state = optimizer_step(tx, params, state, bad)
        counts = [optax.tree.get(s, "count") for s in (state, new_state)]
        moved[name] = bool((after != params).any()), int(counts[1] - counts[0])
    assert moved == {"theirs": (True, 1), "ours": (False, 0)}


@pytest.mark.parametrize("bad_device", range(4))
def test_pmax_of_floats_can_lose_a_nan(bad_device):
    """jax.lax.pmax(nan, 1.0) was 1.0 on CPU: agreement must be over integers."""
    mesh = make_mesh((4,), ("data",))
    tx = ampx.dynamic_loss_scale(optax.sgd(1.0), init_scale=2.0, axis_names="data")

    def step(grads):
        _, state = tx.update(grads, tx.init(grads))
        return state.overflow[None], state.nan_total[None]

    mapped = jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    overflow, nans = jax.jit(mapped)(jnp.ones(4).at[bad_device].set(NAN))
    assert overflow.all() and (nans == 1).all()
    collectives = [
        eqn
        for eqn in equations(jax.make_jaxpr(mapped)(jnp.ones(4)).jaxpr)
        if eqn.primitive.name.startswith(("psum", "pmax", "pmin", "all_"))
    ]
    assert collectives
    for eqn in collectives:
        assert all(var.aval.dtype == jnp.int32 for var in eqn.invars)


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def test_finite_gradients_whose_norm_is_infinite_are_no_overflow():
    """The step is undone and counted, and the scale stays: it is not to blame."""
    grads = jnp.full(4, 1e20)
    assert np.isfinite(grads).all() and np.isinf(optax.tree.norm(grads))
    tx = ampx.dynamic_loss_scale(optax.sgd(1e-20), init_scale=1.0)
    updates, state = tx.update(grads, tx.init(jnp.zeros(4)))
    assert state.overflow and state.bad_update_total == 1
    assert state.loss_scale == 1.0 and state.inf_total == 0
    np.testing.assert_array_equal(updates, 0.0)


def test_an_overflow_judged_after_clipping_would_look_different():
    """Clipping [inf, 1] by norm gives [nan, 0]: the verdict must come first, and tell inf."""
    clipped, _ = optax.clip_by_global_norm(1.0).update(jnp.array([INF, 1.0]), optax.EmptyState())
    assert np.isnan(clipped[0])
    tx = ampx.dynamic_loss_scale(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)))
    _, state = tx.update(jnp.array([INF, 1.0]), tx.init(jnp.zeros(2)))
    assert (state.inf_total, state.nan_total) == (1, 0)


def test_flax_agrees_over_one_axis_only_so_that_model_shards_part():
    """On a 2x2 mesh one model shard is at 65536, the other at 32768; they never meet again."""
    mesh = make_mesh((2, 2), ("data", "model"))
    spec = P("data", "model")
    run = functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)

    def theirs(x):
        # flax multiplies a weight with the gradient's own infinity; the sum is over "data" alone.
        result = DynamicScale(scale=jnp.float32(65536.0)).value_and_grad(
            lambda w: jnp.sum(w * x), axis_name="data"
        )(jnp.ones(x.shape))
        return result.dynamic_scale.scale.reshape(1, 1)

    tx = ampx.dynamic_loss_scale(optax.sgd(1.0), axis_names=("data", "model"))

    def ours(x):
        _, state = tx.update(x * 65536.0, tx.init(x))
        return state.loss_scale.reshape(1, 1)

    x = jnp.ones((2, 2)).at[0, 1].set(INF)
    parted = jax.jit(run(theirs, check_vma=False))(x)
    np.testing.assert_array_equal(parted, [[65536, 32768]] * 2)
    for check_vma in (True, False):
        agreed = jax.jit(run(ours, check_vma=check_vma))(x)
        np.testing.assert_array_equal(agreed, [[32768, 32768]] * 2)


def test_mpx_caps_the_scale_at_the_largest_float16():
    """The scale is float32 and multiplies a float32 loss: 65504 bounds neither, nor is it exact."""
    tx = ampx.dynamic_loss_scale(optax.identity(), growth_interval=1)
    scales = scan_flags(tx, [False] * 10).loss_scale
    np.testing.assert_array_equal(scales, np.minimum(2.0 ** np.arange(17, 27), 2.0**24))
    with pytest.raises(ValueError, match="65504.0 is not a power of two"):
        ampx.dynamic_loss_scale(optax.identity(), max_scale=65504.0)
    # Gradients too small for float16 by 2**-10 come through a scale beyond it.
    grads_of = ampx.value_and_grad(
        lambda w, x: jnp.mean(w * x, dtype=jnp.float32) * 2.0**-34, policy="c=f16,o=f32"
    )
    x = jnp.ones(1, jnp.float16)
    assert grads_of(jnp.ones(1), x).grads == 0.0
    scaled = grads_of(jnp.ones(1), x, loss_scale=2.0**24).grads
    assert scaled / 2.0**24 == 2.0**-34


@pytest.mark.parametrize("scale", [2.0**127, 2.0**-127])
def test_scales_whose_inverse_is_not_a_normal_float32_are_refused(scale):
    with pytest.raises(ValueError, match=r"between 2\*\*-126 and 2\*\*126"):
        ampx.static_loss_scale(optax.sgd(1.0), scale)


def test_mindspore_clears_by_multiplying_with_zero():
    """An infinity times zero is NaN: holding must choose, never multiply."""
    tx = ampx.dynamic_loss_scale(optax.sgd(1.0, momentum=0.9))
    params = jnp.ones(2)
    params, state = optimizer_step(tx, params, tx.init(params), jnp.array([INF, 1.0]))
    assert all_finite((params, state))
    np.testing.assert_array_equal(params, 1.0)

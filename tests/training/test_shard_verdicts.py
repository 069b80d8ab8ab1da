"""Verdicts and norms where types say nothing: mapped by `vmap`, as under check_vma=False."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ampx


def over(*axes):
    """Maps a function over leading axes of its arguments, one for each of the names."""

    def mapped(fun):
        for axis in reversed(axes):
            fun = jax.vmap(fun, axis_name=axis)
        return jax.jit(fun)

    return mapped


def loss_fn(params, x):
    return jnp.sum(params * x)


# f32[data, model, 1, 1]: a row for each device. On the second shard of the first replica alone
# the scaled gradient overflows.
ROWS = jnp.ones((2, 2, 1, 1)).at[0, 1].set(1e35)


@pytest.mark.parametrize(
    "options",
    [
        {
            "loss_scale": functools.partial(
                ampx.dynamic_loss_scale, axis_names=("data", "model"), init_scale=2.0**16
            )
        },
        {"loss_scale": "dynamic", "model_axes": "model"},
        {
            "loss_scale": functools.partial(ampx.dynamic_loss_scale, model_axes="model"),
            "max_grad_norm": 1.0,
        },
    ],
    ids=["axis_names", "model_axes", "both"],
)
def test_an_overflow_on_one_shard_is_skipped_by_all(options):
    step = ampx.train_step(loss_fn, optax.sgd(0.1), axis_name="data", **options)

    @over("data", "model")
    def update(rows):
        state, report = step(step.init(jnp.ones(1)), rows)
        return state.params, state.opt_state.loss_scale, report.overflow

    params, scales, overflows = update(ROWS)
    assert overflows.all() and (params == 1).all() and (scales == 2.0**15).all()


@pytest.mark.parametrize("tx", [optax.sgd(1.0), ampx.fused.sgd(1.0)], ids=["plain", "fused"])
def test_devices_agree_on_a_verdict_that_nobody_has_taken_before(tx):
    scaled = ampx.dynamic_loss_scale(tx, model_axes="model")

    @over("model")
    def update(grad):
        updates, state = scaled.update(grad, scaled.init(grad), grad)
        return updates, state.overflow

    updates, overflows = update(jnp.array([1.0, jnp.inf]))
    assert overflows.all() and (updates == 0).all()


def test_devices_agree_on_an_update_that_overflows_on_one_shard():
    step = ampx.train_step(
        loss_fn, ampx.fused.sgd(1.0), loss_scale=1, axis_name="data", model_axes="model"
    )

    @over("data", "model")
    def update(params, rows):
        state, _ = step(step.init(params), rows)
        return state.opt_state.bad_update_total

    # -6e4 - 6e3 is beyond float16, and 1 - 6e3 is not.
    params = jnp.ones((2, 2, 1), jnp.float16).at[:, 1].set(-6e4)
    assert (update(params, jnp.full((2, 2, 1, 1), 6e3, jnp.float16)) == 1).all()


def test_fused_apply_clips_by_the_norm_of_the_whole():
    tx = ampx.fused.sgd(1.0)

    @over("model")
    def update(shard, replica):
        grads = {"shard": shard, "replica": replica}
        params = jax.tree.map(jnp.zeros_like, grads)
        axes = {"shard": "model", "replica": None}
        new, _, report = ampx.fused.apply(
            tx, grads, tx.init(params), params, max_norm=6.5, model_axes=axes
        )
        return new["shard"], report.global_norm

    # 3**2 + 4**2 of the shards, and 12**2 once.
    new, norms = update(jnp.array([3.0, 4.0]), jnp.array([12.0, 12.0]))
    assert norms.tolist() == [13, 13] and new.tolist() == [-1.5, -2]


@pytest.mark.parametrize("bucket_bytes", [None, 4])
def test_no_gradient_is_summed_over_an_axis_that_divides_its_parameter(bucket_bytes):
    axes = {"dense": None, "experts": "expert"}
    tx = ampx.all_reduce(
        ("data", "expert"), op="sum", model_axes=axes, bucket_bytes=bucket_bytes, tail_overlap=True
    )

    @over("data", "expert")
    def reduce(dense, experts):
        grads = {"dense": dense, "experts": experts}
        return tx.update(grads, tx.init(grads))[0]

    own = jnp.arange(4.0).reshape(2, 2)
    reduced = reduce(own, own)
    assert reduced["dense"].tolist() == [[6, 6], [6, 6]]
    assert reduced["experts"].tolist() == [[2, 4], [2, 4]]


@pytest.mark.parametrize("at_update", [False, True], ids=["build", "update"])
def test_each_of_several_optimizers_has_its_part_of_the_setting(at_update):
    axes = {"model_axes": {"a": "model", "b": None}}
    tx = ampx.dynamic_loss_scale(
        {"a": ampx.fused.novograd(1.0), "b": ampx.fused.novograd(1.0)},
        init_scale=1.0,
        **({} if at_update else axes),
    )

    @over("model")
    def update(grads):
        params = jax.tree.map(jnp.zeros_like, grads)
        return tx.update(grads, tx.init(params), params, **(axes if at_update else {}))[0]

    updates = update({"a": jnp.array([3.0, 4.0]), "b": jnp.array([5.0, 5.0])})
    np.testing.assert_allclose(updates["a"], [-0.6, -0.8], rtol=1e-6)
    np.testing.assert_allclose(updates["b"], [-1, -1], rtol=1e-6)


def test_a_window_is_dropped_on_all_shards():
    tx = ampx.multi_steps(optax.sgd(1.0), 2)

    @over("model")
    def update(grad):
        _, state = tx.update(grad, tx.init(grad), model_axes="model")
        return state.window_is_bad

    assert update(jnp.array([1.0, jnp.inf])).all()


def test_a_bucket_is_clipped_by_its_norm_over_all_shards():
    tx = ampx.clip_by_bucket_norm(1.0)

    @over("model")
    def update(grad):
        return tx.update(grad, tx.init(grad), model_axes="model")[0]

    np.testing.assert_allclose(update(jnp.array([3.0, 4.0])), [0.6, 0.8], rtol=1e-6)


def test_a_step_under_plain_jit_refuses_axes_of_a_mesh():
    step = ampx.train_step(loss_fn, optax.sgd(0.1), loss_scale="dynamic", model_axes="model")
    with pytest.raises(NameError, match="no axis 'model' is mapped here"):
        jax.eval_shape(step, step.init(jnp.ones(1)), jnp.ones((1, 1)))


def test_a_setting_that_does_not_reach_a_parameter_is_refused():
    step = ampx.train_step(loss_fn, optax.sgd(0.1), model_axes={"other": "model"})
    with pytest.raises(ValueError, match="model_axes names no axes for the parameter"):
        jax.vmap(step, in_axes=(None, 0), axis_name="model")(
            step.init(jnp.ones(1)), jnp.ones((2, 1, 1))
        )

"""Leaves whose gradient is their new value, in loops that call the parts of ampx by hand.

Each public function that takes an optimizer, gradients or parameters either treats them as flax's
own `TrainState` does, to the last bit, or refuses them and names what does.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from helpers import assert_bit_equal, make_mesh
from jax.sharding import PartitionSpec as P
from recorded_layer import LARGEST, OVERWRITE, X, largest_of, make_variables, record_loss

import ampx

SGD = optax.sgd(0.1, momentum=0.9)
BATCHES = (X, X[::-1] / 2, 3 * X)
SCHEDULE = ampx.precision_schedule("fast1|step|0.5", total_steps=4)
RULE = ampx.fused.from_rule(lambda grad, param, slots, numbers, operations: (grad, {}), 0.1)


def flax_loop(tx, batches=BATCHES):
    state = TrainState.create(apply_fn=None, params=make_variables(), tx=tx)
    step = jax.jit(lambda s, x: s.apply_gradients(grads=jax.grad(record_loss)(s.params, x)))
    for x in batches:
        state = step(state, x)
    return state.params, state.opt_state


def loop_by_hand(tx, batches=BATCHES, apply=optax.apply_updates):
    params = make_variables()
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state, x):
        scale = ampx.current_loss_scale(opt_state)
        grads = jax.grad(lambda p, x: scale * record_loss(p, x))(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return apply(params, updates), opt_state

    for x in batches:
        params, opt_state = step(params, opt_state, x)
    return params, opt_state


def loop_of_results(tx):
    """`ampx.value_and_grad` and its whole result, `ampx.apply_updates`."""
    params = make_variables()
    opt_state = tx.init(params)
    for x in BATCHES:
        grads_of = ampx.value_and_grad(record_loss)
        result = grads_of(params, x, loss_scale=ampx.current_loss_scale(opt_state))
        updates, opt_state = tx.update(result, opt_state, params)
        params = ampx.apply_updates(params, updates)
    return params, opt_state


def fused_loop(wrap):
    tx = ampx.fused.sgd(0.1, momentum=0.9)
    params, opt_state = make_variables(), tx.init(make_variables()["params"])
    if wrap is not None:
        tx = wrap(tx)
        opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state, x):
        scale = ampx.current_loss_scale(opt_state)
        grads = jax.grad(lambda p, x: scale * record_loss(p, x))(params, x)
        params, opt_state, report = ampx.fused.apply(
            tx, grads, opt_state, params, half_dtype="bfloat16"
        )
        return params, opt_state, report.half_params

    for x in BATCHES:
        params, opt_state, half = step(params, opt_state, x)
    assert half["params"]["layer"]["w"].dtype == jnp.bfloat16
    assert_bit_equal(half[OVERWRITE], params[OVERWRITE])
    return params, opt_state


def inner_state(opt_state):
    while hasattr(opt_state, "inner_state"):
        opt_state = opt_state.inner_state
    return opt_state


# Name of a public function -> what gives its loop, for the same optimizer as in flax's loop.
RIGHT = {
    "dynamic_loss_scale": lambda: loop_by_hand(ampx.dynamic_loss_scale(SGD)),
    "static_loss_scale": lambda: loop_by_hand(ampx.static_loss_scale(SGD, 8.0)),
    "static_loss_scale unchecked": lambda: loop_by_hand(
        ampx.static_loss_scale(SGD, 8.0, check=False)
    ),
    "loss_scale": lambda: loop_by_hand(ampx.loss_scale(4.0, SGD)),
    "no_loss_scale": lambda: loop_by_hand(ampx.no_loss_scale(SGD), apply=ampx.apply_updates),
    "follow_schedule": lambda: loop_by_hand(
        ampx.follow_schedule(ampx.loss_scale(SCHEDULE.loss_scale, SGD), SCHEDULE)
    ),
    "apply_updates": lambda: loop_of_results(ampx.dynamic_loss_scale(SGD)),
    "apply": lambda: fused_loop(None),
}


@functools.cache
def flax_result():
    return flax_loop(SGD)


@pytest.mark.slow_but("dynamic_loss_scale", "loss_scale", "follow_schedule", "apply")
@pytest.mark.parametrize("name", RIGHT)
def test_loops_by_hand_do_what_flax_does_to_the_last_bit(name):
    params, opt_state = RIGHT[name]()
    expected, expected_state = flax_result()
    assert_bit_equal(params, expected)
    held, wanted = (jax.tree.leaves(s) for s in (inner_state(opt_state), expected_state))
    assert_bit_equal(held, wanted)
    assert largest_of(params) == 3 * LARGEST


def test_fused_apply_with_a_scale_does_so_too():
    (params, _), (expected, _) = fused_loop(ampx.dynamic_loss_scale), flax_result()
    assert_bit_equal(params[OVERWRITE], expected[OVERWRITE])
    # XLA unscales and updates in one loop, and rounds a product and a sum at once.
    own, wanted = (tree["params"]["layer"]["w"] for tree in (params, expected))
    np.testing.assert_allclose(own, wanted, rtol=1e-6)


# What refuses these leaves is inside a loss scale what flax's TrainState makes of it.
INSIDE = {
    "multi_steps": ampx.multi_steps(SGD, 2),
    "master_weights": ampx.master_weights(SGD),
    "clip_by_bucket_norm": optax.chain(ampx.clip_by_bucket_norm(0.1), SGD),
    "densify_rows": optax.chain(ampx.densify_rows(), SGD),
    "split_masters": ampx.fused.split_masters(ampx.fused.adamw(0.1)),
    "stochastic_rounding": ampx.fused.stochastic_rounding(SGD),
    "adadelta": ampx.fused.adadelta(0.1),
    "adagrad": ampx.fused.adagrad(0.1),
    "adam": ampx.fused.adam(0.1),
    "adamw": ampx.fused.adamw(0.1, weight_decay=0.1),
    "lamb": ampx.fused.lamb(0.1),
    "lion": ampx.fused.lion(0.1),
    "novograd": ampx.fused.novograd(0.1),
    "sgd": ampx.fused.sgd(0.1),
    "from_rule": RULE,
    "fuse": ampx.fused.fuse(SGD),
}


@pytest.mark.slow_but("multi_steps", "clip_by_bucket_norm", "adamw")
@pytest.mark.parametrize("name", INSIDE)
def test_inside_a_loss_scale_they_are_hidden(name):
    tx = INSIDE[name]
    params, opt_state = loop_by_hand(ampx.no_loss_scale(tx))
    expected, expected_state = flax_loop(tx)
    assert_bit_equal((params, opt_state), (expected, expected_state))


def update_of(tx):
    def update(variables):
        tx.update(variables, tx.init(variables["params"]), variables)

    return update


# The optimizers that are links of a chain, and functions, by what an error has to name.
LOSS_SCALE = r"ampx\.train_step, .*ampx\.no_loss_scale\(tx\)"
REFUSED = {
    **{
        name: (update_of(tx), LOSS_SCALE)
        for name, tx in INSIDE.items()
        if name != "densify_rows"  # changes nothing but `SparseRows`
    },
    "init of multi_steps": (ampx.multi_steps(SGD, 2).init, LOSS_SCALE),
    "init of adamw": (ampx.fused.adamw(0.1).init, LOSS_SCALE),
    "zero1": (update_of(ampx.zero1(SGD, "data")), LOSS_SCALE),
    "all_reduce": (
        update_of(ampx.all_reduce("data")),
        r"value_and_grad\(axis_name=\.\.\.\), which takes the maximum",
    ),
    "raw updates": (lambda v: ampx.apply_updates(v, v), LOSS_SCALE),
    "flatten": (ampx.fused.flatten, r"Flatten the others alone, such as params\['params'\]"),
    "model_state": (
        lambda v: ampx.value_and_grad(record_loss)(
            v["params"], X, model_state={OVERWRITE: v[OVERWRITE]}
        ),
        "Give it as a part of the parameters",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_may_stand_behind_others_refuses_them_and_names_what_does_it(name):
    refuse, fix = REFUSED[name]
    with pytest.raises(ValueError, match=f"{OVERWRITE}/layer/largest' is no weight.*{fix}"):
        refuse(make_variables())


# What has other tests, or nothing to do with these leaves.
ELSEWHERE = {
    "train_step": "test_overwritten.py",
    "value_and_grad": "test_overwritten.py",
    "numerics_report": "test_overwritten.py",
    "cast_floating": "test_overwritten.py",
    "zero1_specs": "test_overwritten.py, zero1",
    "select_if_finite": "test_overwritten.py, the loop of the guide",
    "reduce_in_backward": "below",
    "master_params": "below",
    "extend_state": "below",
    "read_deepspeed_config": "returns loss scales",
    "count_nonfinite": "counts in any tree",
    "cast": "a mark for autocast",
    "densify": "changes SparseRows alone",
    "bucket_layout": "of any tree, for reading",
    "forward_order": "an order of any leaves",
    "check_state_format": "reads states",
    "state_format": "reads states",
    "upgrade_state": "any arrays by path",
    "metrics": "reads states",
    "current_loss_scale": "reads states",
    "find_loss_scale_state": "reads states",
    "is_skipped": "reads states",
    "precision_phase": "reads states",
    "raise_if_exhausted": "reads states",
    "layer_costs": "counts operations",
    "plan": "makes programs of train_step",
    "stack_layers": "of any leaves; test_overwritten.py trains stacked ones",
}


def test_every_public_function_of_optimizers_and_gradients_is_in_a_list():
    about = {"inner", "tx", "params", "grads", "updates", "tree", "opt_state", "state"}
    listed = {*RIGHT, *INSIDE, *REFUSED, *ELSEWHERE}
    for module in (ampx, ampx.fused, ampx.pipelining):
        for name in module.__all__:
            given = getattr(module, name)
            if inspect.isclass(given) or not inspect.isfunction(given):
                continue
            signature = inspect.signature(given)
            is_transformation = "Transformation" in str(signature.return_annotation)
            if is_transformation or about & set(signature.parameters):
                assert name in listed, f"say what {name} does with leaves that are replaced"


@pytest.mark.parametrize("told", ["the loss scale", "the call", "both"])
@pytest.mark.parametrize("way", ["update", "fused.apply", "fused.apply of a result"])
def test_the_axes_that_a_loss_scale_was_built_with_are_those_of_new_values(way, told):
    """Unchecked: no type says that the devices along "model" measured different parts."""
    specs = {"params": {"layer": {"w": P("model")}}, OVERWRITE: P()}
    built = specs if told != "the call" else None
    called = {"model_axes": specs} if told != "the loss scale" else {}
    tx = ampx.dynamic_loss_scale(ampx.fused.sgd(0.1), model_axes=built)
    opt_state = tx.init(make_variables())

    def step(params, opt_state, x):
        scale = ampx.current_loss_scale(opt_state)
        if way == "fused.apply of a result":
            grads = ampx.value_and_grad(record_loss)(params, x, loss_scale=scale)
        else:
            grads = jax.grad(lambda p: scale * record_loss(p, x))(params)
        if way == "update":
            updates, _ = tx.update(grads, opt_state, params, **called)
            new = ampx.apply_updates(params, updates)
        else:
            new, _, _ = ampx.fused.apply(tx, grads, opt_state, params, **called)
        return new[OVERWRITE]["layer"]["largest"], new["params"]["layer"]["w"]

    mapped = jax.shard_map(
        step,
        mesh=make_mesh((2,), ("model",)),
        in_specs=(specs, P(), P(None, "model")),
        out_specs=(P("model"), P("model")),
        check_vma=False,
    )
    largest, w = jax.jit(mapped)(make_variables(), opt_state, X)
    np.testing.assert_array_equal(largest, [LARGEST] * 2)
    parts = [jax.grad(record_loss)(part(make_variables(), i), X[:, i : i + 2]) for i in (0, 2)]
    grads = np.concatenate([part["params"]["layer"]["w"] for part in parts])
    np.testing.assert_allclose(w, make_variables()["params"]["layer"]["w"] - 0.1 * grads, 1e-6)


def part(variables, start):
    w = variables["params"]["layer"]["w"]
    return variables | {"params": {"layer": {"w": w[start : start + 2]}}}


def test_a_skip_holds_them_and_an_infinity_is_not_taken():
    tx = ampx.dynamic_loss_scale(SGD)
    params, state = make_variables(), tx.init(make_variables())
    grads = jax.tree.map(np.ones_like, params)
    skipped = jax.tree.map(np.copy, grads)
    skipped["params"]["layer"]["w"][0] = np.inf
    updates, new_state = jax.jit(tx.update)(skipped, state, params)
    assert new_state.overflow and largest_of(optax.apply_updates(params, updates)) == -7
    grads[OVERWRITE]["layer"]["largest"][0] = np.inf
    updates, new_state = jax.jit(tx.update)(grads, state, params)
    assert not new_state.overflow and largest_of(optax.apply_updates(params, updates)) == -7
    # Without a loss scale multi_steps tells that a call was lost.
    tx = ampx.no_loss_scale(ampx.multi_steps(SGD, 2))
    updates, _ = tx.update(skipped, tx.init(params), params)
    assert largest_of(optax.apply_updates(params, updates)) == -7


def test_of_several_losses_the_largest_is_taken():
    tx = ampx.dynamic_loss_scale(SGD, num_losses=3)
    params, state = make_variables(), tx.init(make_variables())
    one, two = (jax.tree.map(lambda x, n=n: np.full_like(x, n), params) for n in (1, 2))
    updates, _ = tx.update((two, None, one), state, params, grad=None)
    assert largest_of(ampx.apply_updates(params, updates)) == 2


@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "not scaled"])
def test_of_several_optimizers_each_holds_its_own(scaled):
    wrap = ampx.dynamic_loss_scale if scaled else ampx.no_loss_scale
    tx = wrap({"one": SGD, "two": SGD, "three": SGD})
    params = {name: make_variables() for name in ("one", "two", "three")}
    grads = {name: jax.tree.map(np.ones_like, params[name]) for name in ("one", "two")}
    if scaled:
        grads["two"]["params"]["layer"]["w"] = np.full(4, np.inf, np.float32)
    updates, _ = tx.update(grads, tx.init(params), params)
    for apply in (optax.apply_updates, ampx.apply_updates):
        new = apply(params, updates)
        found = [largest_of(new[name]) for name in params]
        assert found == [1, -7 if scaled else 1, -7]  # the third took no part


CHANGES = {
    "scaled": optax.scale(0.5),
    "by a schedule": optax.scale_by_schedule(lambda count: 0.5),
    "clipped": optax.clip(0.1),
    "by the norm": optax.clip_by_global_norm(0.1),
    "zeros": optax.set_to_zero(),
    "half": optax.GradientTransformation(
        lambda params: optax.EmptyState(),
        lambda updates, state, params=None: (ampx.cast_floating(updates, "bf16"), state),
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_updates_outside_of_the_loss_scale_is_found_out(change):
    """It would scale a scale. Nothing of optax can tell, but the value does not fit its seal."""
    tx = optax.chain(ampx.no_loss_scale(SGD), change)
    params = make_variables()
    grads = jax.tree.map(np.ones_like, params)
    state = (tx.init(params)[0], change.init(params["params"]))
    try:
        with jax.numpy_dtype_promotion("standard"):
            updates, _ = tx.update(grads, state, params)
            new = optax.apply_updates(params, updates)
    except TypeError as error:
        ours, of_jax = "was changed after ampx had made it", "lax.select requires"  # of the seal
        assert ours in str(error) or of_jax in str(error)
    else:
        value = largest_of(new)
        assert np.isnan(value) or value == 1


def test_wrong_arguments_are_refused():
    tx, params = ampx.no_loss_scale(SGD), make_variables()
    state = tx.init(params)
    with pytest.raises(ValueError, match="a skip must hold the old ones: give the parameters"):
        tx.update(params, state)
    with pytest.raises(ValueError, match="new value of a leaf that params lacks"):
        tx.update(params, state, params["params"])
    with pytest.raises(ValueError, match="value_fn is a function of all parameters.*train_step"):
        tx.update(params, state, params, value_fn=record_loss)
    grads = {**params, OVERWRITE: {"layer": {"largest": np.ones(2, np.float32)}}}
    with pytest.raises(ValueError, match=r"the new value at '.*largest' has shape \(2,\)"):
        tx.update(grads, state, params)


def test_masters_and_added_parameters_are_those_of_weights():
    params = make_variables()
    half = ampx.cast_floating(params, "bf16")
    tx = ampx.dynamic_loss_scale(ampx.master_weights(optax.adam(0.1)))
    masters = ampx.master_params(tx.init(half), half)
    assert_bit_equal(masters, jax.tree.map(lambda x: x.astype(jnp.float32), half))
    state = ampx.extend_state(tx, tx.init({"params": {"layer": {}}, OVERWRITE: {}}), half)
    assert_bit_equal(state, tx.init(half))


MESH = make_mesh((2,), ("data",))
REDUCED = {
    "zero1": ampx.zero1(SGD, "data"),
    "all_reduce": optax.chain(ampx.all_reduce("data"), SGD),
}


def update_on_devices(tx, check_vma, reduce=lambda params: params):
    params = make_variables()
    state = tx.init(params)
    mark = functools.partial(jax.lax.pcast, axis_name="data", to="varying")
    specs = P()
    if "Zero1" in str(jax.tree.structure(state)):
        specs = ampx.zero1_specs(tx, params, MESH)

    def step(params, state, x):
        own = jax.tree.map(mark, params) if check_vma and reduce is None else params
        loss = record_loss if reduce is None else lambda p, x: record_loss(reduce(p), x) / 2
        updates, state = tx.update(jax.grad(loss)(own, x), state, params)
        return optax.apply_updates(params, updates)

    mapped = jax.shard_map(
        step, mesh=MESH, in_specs=(P(), specs, P("data")), out_specs=P(), check_vma=check_vma
    )
    return jax.jit(mapped)(params, state, X)


@pytest.mark.slow_but("zero1")
@pytest.mark.parametrize("name", REDUCED)
def test_the_largest_of_the_devices_is_taken_where_types_tell_which(name):
    tx = ampx.no_loss_scale(REDUCED[name])
    new = update_on_devices(tx, True, reduce=None)
    assert largest_of(new) == LARGEST
    expected, _ = flax_loop(SGD, (X,))
    np.testing.assert_allclose(
        new["params"]["layer"]["w"], expected["params"]["layer"]["w"], rtol=1e-6
    )
    with pytest.raises(ValueError, match=r"train_step\(axis_name=...\)"):
        update_on_devices(tx, False, reduce=None)


@pytest.mark.parametrize("check_vma", [True, False])
def test_reduction_in_the_backward_pass_takes_the_largest(check_vma):
    reduce = functools.partial(ampx.reduce_in_backward, axis_name="data")
    new = update_on_devices(ampx.no_loss_scale(SGD), check_vma, reduce)
    assert largest_of(new) == LARGEST
    earlier = jax.tree.map(lambda x: np.full_like(x, 100), make_variables())
    reduce = functools.partial(reduce, accumulator=earlier)
    assert largest_of(update_on_devices(ampx.no_loss_scale(SGD), check_vma, reduce)) == 100

"""Every optimizer of optax trains through `train_step` as in a loop of optax alone."""

import functools
import inspect
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_bit_equal, make_mesh
from jax.sharding import PartitionSpec as P
from optax_optimizers import NAMES, TAKES, make, table

import ampx
from ampx.pipelining import one_f_one_b, value_and_grad
from ampx.training import step_arguments
from ampx.updates.clipping import clipped
from ampx.updates.extra_args import accept_extra_args

pytestmark = pytest.mark.usefixtures("standard_promotion")

STEPS = 4
ROOT = pathlib.Path(__file__).parents[2]


def make_data():
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(3, 4)), "b": rng.normal(size=(4,))}
    batches = {"x": rng.normal(size=(STEPS, 8, 3)), "y": rng.normal(size=(STEPS, 8))}
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (params, batches))


PARAMS, BATCHES = make_data()
FIRST = jax.tree.map(lambda x: x[0], BATCHES)


def loss_fn(params, batch):
    out = jnp.tanh(batch["x"] @ params["w"] + params["b"]).sum(axis=-1)
    return jnp.mean((out - batch["y"]) ** 2)


@functools.lru_cache(maxsize=1)  # an optimizer's cases run one after the other
def optax_run(name):
    """A loop with optax alone; each optimizer gets what it asks for, and nothing else."""
    tx, takes = make(name), TAKES.get(name, ())

    def step(carry, batch):
        params, state = carry
        value, grad = jax.value_and_grad(loss_fn)(params, batch)
        about = {
            "value": value,
            "grad": grad,
            "value_fn": lambda p: loss_fn(p, batch),
            "obj_fn": lambda p: loss_fn(p, batch),
            "grad_fn": lambda p, _: jax.grad(loss_fn)(p, batch),
        }
        about = {name: about[name] for name in takes}
        updates, state = tx.update(grad, state, params, **about)
        return (optax.apply_updates(params, updates), state), value

    carry = (PARAMS, jax.tree.map(jnp.asarray, tx.init(PARAMS)))
    (params, state), losses = jax.jit(lambda carry: jax.lax.scan(step, carry, BATCHES))(carry)
    return params, state, losses


def ampx_run(tx, **options):
    step = ampx.train_step(loss_fn, tx, **options)
    start = jax.tree.map(jnp.asarray, step.init(PARAMS))
    return jax.jit(lambda state: jax.lax.scan(step, state, BATCHES))(start)


def is_key(leaf):
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


# On a step without overflow the scale doubles each time, so that it is never the same twice.
dynamic = functools.partial(ampx.dynamic_loss_scale, init_scale=2.0**10, growth_interval=1)
FORMS = {
    "plain": {},
    "dynamic scale": {"loss_scale": dynamic},
    "micro-batches": {"num_microbatches": 2},
    "scale and micro-batches": {"loss_scale": dynamic, "num_microbatches": 2},
}
QUICK = [
    "adamw-micro-batches",
    *(f"{name}-dynamic scale" for name in ("lbfgs", "contrib.sophia")),
    *(f"contrib.{name}-dynamic scale" for name in ("reduce_on_plateau", "mechanize")),
    *(f"contrib.{name}-scale and micro-batches" for name in ("sam", "prodigy")),
    "contrib.sam, opaque-dynamic scale",
]


# Each optimizer trains below a scale that moves, every second one over micro-batches, too. One that
# is handed more than gradients trains with either by itself, and with `--whole` in the plain form.
PLAIN, SCALE, WINDOW, BOTH = FORMS
CASES = [
    (name, form)
    for place, name in enumerate(NAMES)
    for form in (
        (PLAIN, SCALE, WINDOW) if name in (*TAKES, "adamw") else ((SCALE, BOTH)[place % 2],)
    )
]
SAMPLED = [(name, form) for name, form in CASES if form != PLAIN or name in ("adamw", "lbfgs")]


@pytest.mark.sampled(3)
@pytest.mark.whole_but(*map("-".join, SAMPLED))
@pytest.mark.slow_but("adamw-micro-batches", "contrib.sam-scale and micro-batches")
@pytest.mark.parametrize(("name", "form"), CASES, ids=map("-".join, CASES))
def test_trains_as_with_optax_alone(name, form):
    params, opt_state, losses = optax_run(name)
    state, reports = ampx_run(make(name), **FORMS[form])
    np.testing.assert_allclose(reports.loss, losses, rtol=2e-5)
    inner = state.opt_state.inner_state if "scale" in form else state.opt_state
    for found, expected in ((state.params, params), (inner, opt_state)):
        for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            a, b = (jax.random.key_data(x) if is_key(x) else x for x in (a, b))
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
    assert int(state.step) == STEPS and not reports.overflow.any()


def test_the_guide_lists_what_runs():
    guide = (ROOT / "docs/guides/optax_optimizers.md").read_text()
    _, listed = guide.split("## What runs")
    shown = [line for line in listed.splitlines() if line.startswith("|")]
    assert shown == list(table())


# --- what an optimizer is handed -----------------------------------------------------------------


def probe(**expected):
    """Holds in its state what it was handed, and what the functions say of the parameters."""

    def zeros(params):
        like = jax.tree.map(lambda p: jnp.zeros(p.shape), params)
        numbers = dict.fromkeys(("value", "value_at", "weight", *expected), jnp.zeros(()))
        return {**numbers, "updates": like, "grad": like, "slope": like, "grad_at": like}

    def update(updates, state, params, *, value, grad, value_fn, obj_fn, grad_fn, weight, **rest):
        seen = {
            "value": value,
            "value_at": obj_fn(params),
            "weight": weight,
            "updates": updates,
            "grad": grad,
            "slope": jax.grad(value_fn)(params),
            "grad_at": grad_fn(params, 0),
            **{name: rest[name] for name in expected},
        }
        return updates, seen

    return optax.GradientTransformationExtraArgs(zeros, update)


def seen_by_probe(opt_state):
    def is_seen(node):
        return isinstance(node, dict) and "grad_at" in node

    (seen,) = filter(is_seen, jax.tree.leaves(opt_state, is_leaf=is_seen))
    return seen


def assert_close(found, expected):
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow_but("None-1", "dynamic-2")
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("loss_scale", [None, "dynamic", 2.0**12])
def test_all_is_unscaled_and_of_the_whole_batch(loss_scale, num_microbatches):
    """Also inside a clip: `grad` is what came in, as the slope of the loss that was measured."""
    value, grad = jax.value_and_grad(loss_fn)(PARAMS, FIRST)
    step = ampx.train_step(
        loss_fn,
        probe(temperature=0.0),
        loss_scale=loss_scale,
        max_grad_norm=0.1,
        num_microbatches=num_microbatches,
    )
    state, report = jax.jit(step)(step.init(PARAMS), FIRST, temperature=jnp.array(3.0))
    seen = seen_by_probe(state.opt_state)
    assert_close([seen[k] for k in ("value", "value_at")], [value] * 2)
    assert_close([seen[k] for k in ("grad", "slope", "grad_at")], [grad] * 3)
    clip = 0.1 / optax.tree.norm(grad)
    assert_close(seen["updates"], optax.tree.scale(clip, grad))
    assert float(seen["weight"]) == num_microbatches and float(seen["temperature"]) == 3.0
    np.testing.assert_allclose(report.loss, value, rtol=1e-6)


def test_functions_draw_the_masks_of_the_step():
    def with_dropout(params, batch, key, *, model_state):
        mask = jax.random.bernoulli(key, 0.5, batch["x"].shape)
        batch = {**batch, "x": batch["x"] * mask * model_state}
        return loss_fn(params, batch), model_state + 1

    step = ampx.train_step(with_dropout, probe(), num_microbatches=2, loss_scale="dynamic")
    state = step.init(PARAMS, key=jax.random.key(0), model_state=jnp.array(2.0))
    state, report = jax.jit(step)(state, FIRST)
    seen = seen_by_probe(state.opt_state)
    assert_close(seen["value_at"], report.loss)
    assert_close((seen["slope"], seen["grad_at"]), (seen["grad"], seen["grad"]))
    assert float(state.model_state) == 4.0, "evaluations must not count"


def test_functions_compute_in_the_precision_of_the_step():
    """Gradients at other parameters need the loss scale: without it these vanish in float16."""

    def tiny(params, batch):
        return loss_fn(params, batch).astype(jnp.float32) * 1e-7

    policy = ampx.opt_level("O2", half_dtype=jnp.float16)
    step = ampx.train_step(tiny, probe(), policy=policy, loss_scale=2.0**16)
    params = ampx.cast_floating(PARAMS, jnp.float16)
    state, _ = jax.jit(step)(step.init(params), ampx.cast_floating(FIRST, jnp.float16))
    seen = seen_by_probe(state.opt_state)
    assert_close(*(optax.tree.scale(1e7, seen[name]) for name in ("grad_at", "grad")))
    assert all(jnp.any(leaf != 0) for leaf in jax.tree.leaves(seen["grad_at"]))


class Net(nnx.Module):
    def __init__(self):
        self.dense = nnx.Linear(3, 4, rngs=nnx.Rngs(0))


def nnx_loss(model, batch):
    out = jnp.tanh(model.dense(batch["x"])).sum(axis=-1)
    return jnp.mean((out - batch["y"]) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lbfgs", "contrib.sam, opaque"])
def test_nnx_models_are_evaluated(name):
    step = ampx.train_step(nnx_loss, make(name), loss_scale="dynamic")
    model = Net()
    params = {"w": model.dense.kernel[...], "b": model.dense.bias[...]}  # trained in place below
    pair, _ = nnx.jit(step)((model, nnx.Optimizer(model, step.tx, wrt=nnx.Param)), FIRST)
    plain = ampx.train_step(loss_fn, make(name))
    expected, _ = jax.jit(plain)(plain.init(params), FIRST)
    found = {"w": pair[0].dense.kernel[...], "b": pair[0].dense.bias[...]}
    assert_close(found, expected.params)


@pytest.mark.slow
def test_a_line_search_over_devices_is_that_of_one():
    mesh = make_mesh((4,), ("data",))
    step = ampx.train_step(loss_fn, optax.lbfgs(), axis_name="data", loss_scale="dynamic")
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    alone = ampx.train_step(loss_fn, optax.lbfgs())
    state, expected = step.init(PARAMS), alone.init(PARAMS)
    for _ in range(2):
        state, _ = jax.jit(mapped)(state, FIRST)
        expected, _ = jax.jit(alone)(expected, FIRST)
    assert_close(state.params, expected.params)


def test_windows_hand_on_their_mean_gradient():
    seen = optax.GradientTransformationExtraArgs(
        lambda params: params, lambda u, s, p=None, *, grad, **_: (u, grad)
    )
    tx = ampx.multi_steps(ampx.dynamic_loss_scale(seen, init_scale=4.0), 2)
    state = tx.init(PARAMS)
    for factor in (4.0, 12.0):
        grads = optax.tree.scale(factor, PARAMS)
        _, state = tx.update(grads, state, PARAMS, grad=grads)
    assert_bit_equal(state.inner_state.inner_state, optax.tree.scale(2.0, PARAMS))


def shard_mapped(step, state=None, **options):
    state = P() if state is None else state
    specs = dict(in_specs=(state, P("data")), out_specs=(state, P()))
    return jax.shard_map(step, mesh=make_mesh((2,), ("data",)), **specs, **options)


def stage_step():
    grads_of = value_and_grad(
        first=lambda p, shared, batch, key: batch["x"],
        stage=lambda p, x, key: x * p,
        last=lambda p, shared, x, batch, key: (jnp.sum(x**2), jnp.float32(x.size)),
        schedule=one_f_one_b(1, 2),
        axis_name="stage",
        mesh=make_mesh((1,), ("stage",)),
    )
    return ampx.train_step(grads_of, optax.lbfgs()), {"stages": jnp.array([2.0, 3.0])}


REFUSED = {
    "pipeline": (stage_step, "inside a pipeline"),
    "multi_steps": (
        lambda: (ampx.train_step(loss_fn, ampx.multi_steps(optax.lbfgs(), 2)), PARAMS),
        "earlier batches of the window",
    ),
    "optax.MultiSteps": (
        lambda: (ampx.train_step(loss_fn, optax.MultiSteps(optax.lbfgs(), 2)), PARAMS),
        "earlier batches of the window",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_evaluations_are_refused_where_they_would_be_of_something_else(case):
    build, message = REFUSED[case]
    step, params = build()
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(step, step.init(params), FIRST)


def test_evaluations_over_unchecked_axes_are_refused():
    step = ampx.train_step(loss_fn, optax.lbfgs(), axis_name="data")
    with pytest.raises(ValueError, match="check_vma=False"):
        jax.eval_shape(shard_mapped(step, check_vma=False), step.init(PARAMS), FIRST)
    step = ampx.train_step(loss_fn, make("contrib.sam, opaque"), axis_name="data")
    with pytest.raises(ValueError, match="a grad_fn of your own"):
        jax.eval_shape(shard_mapped(step), step.init(PARAMS), FIRST)
    step = ampx.train_step(loss_fn, ampx.zero1(optax.lbfgs(), "data"), axis_name="data")
    specs = ampx.zero1_specs(step.tx, PARAMS, make_mesh((2,), ("data",)))
    specs = ampx.TrainState(P(), P(), specs, None, None)
    with pytest.raises(ValueError, match="inside zero1"):
        jax.eval_shape(shard_mapped(step, state=specs), step.init(PARAMS), FIRST)


@pytest.mark.parametrize("name", ["grad", "weight", "verdict", "tail"])
def test_what_the_step_hands_over_itself_is_not_given(name):
    step = ampx.train_step(loss_fn, optax.sgd(0.1))
    with pytest.raises(TypeError, match=f"hands '{name}' to the optimizer itself"):
        step(step.init(PARAMS), FIRST, **{name: 1.0})


def test_settings_are_not_taken_for_extra_arguments():
    """optax ignores what it does not know, so a clip that is given to the step would do nothing."""
    step = ampx.train_step(loss_fn, optax.sgd(0.1))
    state = step.init(PARAMS)
    with pytest.raises(TypeError, match="'max_grad_norm' is a setting of ampx.train_step"):
        step(state, FIRST, max_grad_norm=1.0)
    with pytest.raises(TypeError, match="'keys', .* did you mean 'key'"):
        step(state, FIRST, keys=jax.random.key(0))
    settings = {*inspect.signature(ampx.train_step).parameters} - {"learning_rate"}
    assert {*step_arguments._SETTINGS} == settings - {*step_arguments._OWN}


def test_what_is_for_the_loss_is_not_taken_for_extra_arguments():
    """Optax would ignore it: a key of the caller's would change nothing."""
    step = ampx.train_step(lambda p, x, key: loss_fn(p, x), optax.sgd(0.1))
    state = step.init(PARAMS, key=jax.random.key(0))
    for name in ("rng", "rngs", "dropout_rng"):
        with pytest.raises(TypeError, match=f"'{name}' looks .* key of this step is called key"):
            step(state, FIRST, **{name: jax.random.key(1)})
    for name, advice in (
        ("model_state", "step.init"),
        ("batch_stats", "step.init"),
        ("train", "partial"),
    ):
        with pytest.raises(TypeError, match=f"'{name}' looks .*{advice}"):
            step(state, FIRST, **{name: None})
    # Without a key in the state it may be the optimizer's.
    keyless = ampx.train_step(loss_fn, optax.sgd(0.1))
    keyless(keyless.init(PARAMS), FIRST, rng=jax.random.key(1))


@pytest.mark.parametrize("multi_steps", [ampx.multi_steps, optax.MultiSteps])
def test_a_clip_around_steps_that_are_added_up_is_refused(multi_steps):
    """It would clip the gradients of each call; the clip of others is one of their mean."""
    step = ampx.train_step(loss_fn, multi_steps(optax.sgd(0.1), 2), max_grad_norm=1.0)
    with pytest.raises(ValueError, match="max_grad_norm=1.0 around steps .* clip inside"):
        step.init(PARAMS)


def test_a_value_of_ones_own_takes_the_place_of_the_loss():
    """Such as a validation loss, by which a rate is reduced."""
    tx = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, factor=0.5))
    step = jax.jit(ampx.train_step(loss_fn, tx))
    state = ampx.train_step(loss_fn, tx).init(PARAMS)
    for _ in range(3):
        state, _ = step(state, FIRST, value=jnp.float32(7.0))
    assert float(optax.tree.get(state.opt_state, "best_value")) == 7.0
    assert float(optax.tree.get(state.opt_state, "scale")) < 1.0


# --- transformations that take less, or more ----------------------------------------------------

WRAPPERS = {
    "dynamic_loss_scale": ampx.dynamic_loss_scale,
    "static_loss_scale": lambda tx: ampx.static_loss_scale(tx, 8.0),
    "no_loss_scale": ampx.no_loss_scale,
    "master_weights": ampx.master_weights,
    "multi_steps": lambda tx: ampx.multi_steps(tx, 1),
    "clipped": lambda tx: clipped(tx, 1.0),
    "follow_schedule": lambda tx: ampx.follow_schedule(
        tx, ampx.precision_schedule("fast1|step|0.5", total_steps=4)
    ),
    "split_masters": ampx.fused.split_masters,
    "stochastic_rounding": ampx.fused.stochastic_rounding,
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_wrappers_hand_on_no_more_than_is_taken(wrap):
    def update(updates, state, params=None, *, value):
        return optax.tree.scale(value, updates), state

    for takes_value in (
        optax.GradientTransformationExtraArgs(lambda params: (), update),
        optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1)),
        optax.GradientTransformation(*optax.sgd(0.1)),
    ):
        tx = wrap(takes_value)
        tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=jnp.float32(2.0), weight=1.0)


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_eval_params_of_schedule_free_are_found_in_every_state(wrap):
    """B21: optax's function reads two fields of the state that it is given."""
    inner = optax.contrib.schedule_free_sgd(0.1)
    tx = wrap(inner)
    state = tx.init(PARAMS)
    _, state = tx.update(PARAMS, state, PARAMS)
    bare = optax.tree.get(state, "ScheduleFreeState")
    expected = optax.contrib.schedule_free_eval_params(bare, PARAMS)
    assert_bit_equal(optax.contrib.schedule_free_eval_params(state, PARAMS), expected)
    sharded = ampx.zero1(wrap(inner), "data").init(PARAMS)
    found = optax.contrib.schedule_free_eval_params(sharded, PARAMS)
    assert jax.tree.structure(found) == jax.tree.structure(PARAMS)
    without = wrap(optax.sgd(0.1)).init(PARAMS)
    if hasattr(without, "inner_state"):
        with pytest.raises(AttributeError, match="no optax.contrib.schedule_free inside"):
            optax.contrib.schedule_free_eval_params(without, PARAMS)


def test_a_transformation_inside_a_chain_that_takes_nothing():
    """optax hands it every argument; the error says how to stop that."""
    sam = make("contrib.sam")
    step = ampx.train_step(loss_fn, optax.chain(optax.identity(), sam))
    with pytest.raises(TypeError, match=r"give optax.GradientTransformation\(inside.init"):
        jax.eval_shape(step, step.init(PARAMS), FIRST)
    plain = optax.GradientTransformation(sam.init, sam.update)
    step = ampx.train_step(loss_fn, optax.chain(optax.identity(), plain))
    jax.eval_shape(step, step.init(PARAMS), FIRST)


def test_errors_of_the_optimizer_itself_stay():
    def update(updates, state, params=None, **_):
        raise TypeError("got an unexpected keyword argument 'mine'")

    bad = optax.GradientTransformationExtraArgs(lambda params: (), update)
    step = ampx.train_step(loss_fn, bad)
    with pytest.raises(TypeError, match="^got an unexpected keyword argument 'mine'"):
        jax.eval_shape(step, step.init(PARAMS), FIRST)


def test_classes_of_ones_own_get_what_they_name():
    class Own:
        def init(self, params):
            return ()

        def update(self, updates, state, params=None, *, value):
            return optax.tree.scale(value, updates), state

    tx = accept_extra_args(Own())
    updates, _ = tx.update(PARAMS, tx.init(PARAMS), value=2.0, weight=3.0)
    assert_bit_equal(updates, optax.tree.scale(2.0, PARAMS))


@pytest.mark.slow_but("polyak_sgd")
@pytest.mark.parametrize("name", ["adam", "polyak_sgd", "lbfgs"])
def test_an_update_under_jit_takes_the_functions(name):
    """They are pytrees."""
    tx = make(name)
    compiled = optax.GradientTransformationExtraArgs(tx.init, jax.jit(tx.update))
    step, expected = (ampx.train_step(loss_fn, t) for t in (compiled, tx))
    found, _ = jax.jit(step)(step.init(PARAMS), FIRST)
    wanted, _ = jax.jit(expected)(expected.init(PARAMS), FIRST)
    assert_close(found.params, wanted.params)


@pytest.mark.parametrize("name", ["contrib.sam", "contrib.cocob", "contrib.dog"])
def test_states_that_hold_the_parameters_can_be_donated(name):
    traces = []

    def counted(params, batch):
        traces.append(1)
        return loss_fn(params, batch)

    step = ampx.train_step(counted, make(name))
    jitted = jax.jit(step, donate_argnums=0)
    state, _ = jitted(step.init(PARAMS), FIRST)
    once = len(traces)
    state, _ = jitted(state, FIRST)
    assert len(traces) == once


@pytest.mark.parametrize("loss_scale", [None, "dynamic"])
@pytest.mark.parametrize("tx", [optax.adamw(0.1), ampx.fused.adamw(0.1)], ids=["optax", "fused"])
def test_who_asks_for_nothing_pays_nothing(tx, loss_scale):
    """The program is that of a transformation which gets no extra arguments."""
    asking = optax.GradientTransformationExtraArgs(tx.init, tx.update)

    def update(updates, state, params=None, *, tail=None, **_):
        about = {"tail": tail} if tail else {}
        return tx.update(updates, state, params, **about)

    refusing = optax.GradientTransformationExtraArgs(tx.init, update)
    programs = []
    for each in (asking, refusing):
        step = ampx.train_step(loss_fn, each, loss_scale=loss_scale, max_grad_norm=1.0)
        programs.append(str(jax.make_jaxpr(step)(step.init(PARAMS), FIRST)))
    assert programs[0] == programs[1]

"""lint_step: planted faults are found, each by its check, and sound programs give nothing."""

import functools
import pathlib
import re
from typing import Any, NamedTuple

import flax
import flax.linen as nn
import jax
import jax.experimental.sparse
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import optax_optimizers
import pytest
from flax import nnx
from flax.training import dynamic_scale, train_state
from helpers import make_mesh
from jax.sharding import PartitionSpec as P

import ampx
from ampx.diagnostics.lint import lint_step

PARAMS = {"w": jnp.full((4, 3), 0.1), "b": jnp.zeros(3)}
BATCH = {"x": jnp.ones((8, 4)), "y": jnp.ones((8, 3))}
F16, BF16 = jnp.float16, jnp.bfloat16


def loss_of(params, batch, dtype=F16):
    cast = functools.partial(jax.tree.map, lambda leaf: leaf.astype(dtype))
    params = cast(params)
    hidden = jnp.tanh(batch["x"].astype(dtype) @ params["w"] + params["b"])
    return jnp.mean((hidden.astype(jnp.float32) - batch["y"]) ** 2)


def step_of(tx, *, grads_of=None, scaled=True, powers=1, loss=loss_of, after=None):
    """A step as its author writes it: gradients of the loss times a power of the scale."""

    def step(params, opt_state, batch):
        scale = ampx.current_loss_scale(opt_state) ** powers if scaled else 1.0
        grads = jax.grad(lambda p: loss(p, batch) * scale)(params)
        if after is not None:
            grads = after(grads, opt_state)
        updates, opt_state = tx.update(grads, opt_state, params)
        return ampx.apply_updates(params, updates), opt_state

    return step, (PARAMS, tx.init(PARAMS), BATCH)


def with_value_and_grad(tx, *, scaled, num_microbatches=1, **options):
    grads_of = ampx.value_and_grad(loss_of, num_microbatches=num_microbatches, **options)

    def step(params, opt_state, batch):
        scale = {"loss_scale": ampx.current_loss_scale(opt_state)} if scaled else {}
        result = grads_of(params, batch, **scale)
        updates, opt_state = tx.update(result.grads, opt_state, params)
        return ampx.apply_updates(params, updates), opt_state, result.loss

    return step, (PARAMS, tx.init(PARAMS), BATCH)


def in_shard_map(tx, *, scaled):
    inner, (params, opt_state, batch) = with_value_and_grad(tx, scaled=scaled, axis_name="data")
    specs = (P(), P(), P("data"))
    mesh = make_mesh((2,), ("data",))
    step = jax.shard_map(inner, mesh=mesh, in_specs=specs, out_specs=P())
    return jax.jit(step, donate_argnums=(0, 1)), (params, opt_state, batch)


dynamic = ampx.dynamic_loss_scale


AS_MEAN = optax.chain(ampx.all_reduce("data"), optax.sgd(0.1))
PREDIVIDED = optax.chain(ampx.all_reduce("data", gradient_predivide_factor=2), optax.sgd(0.1))
AS_SUM = optax.chain(ampx.all_reduce("data", op="sum"), optax.sgd(0.1))


def by_hand(reduce):
    return optax.chain(optax.stateless(lambda grads, _: reduce(grads, "data")), optax.sgd(0.1))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    ("tx", "divides", "ok"),
    [
        (AS_MEAN, "data", False),
        (PREDIVIDED, "data", False),
        (by_hand(jax.lax.pmean), "data", False),
        (AS_SUM, "data", True),
        (by_hand(jax.lax.psum), "data", True),
        (AS_MEAN, (), True),
        (by_hand(jax.lax.pmean), (), True),
    ],
)
def test_a_mean_of_shares_is_found(tx, divides, ok, check_vma):
    grads_of = ampx.value_and_grad(loss_of, axis_name=divides)

    def step(params, opt_state, batch):
        local = jax.tree.map(lambda p: jax.lax.pcast(p, "data", to="varying"), params)
        grads = grads_of(local if check_vma else params, batch).grads
        updates, opt_state = tx.update(grads, opt_state, params)
        return ampx.apply_updates(params, updates), opt_state

    mesh, specs = make_mesh((4,), ("data",)), (P(), P(), P("data"))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
    report = lint_step(jax.jit(mapped))(PARAMS, tx.init(PARAMS), BATCH)
    checks = [found.check for found in report.findings]
    assert checks == ([] if ok else ["reduction"])
    if not ok:
        assert "test_lint.py" in report.findings[0].source


def clipped_by_hand(grads, _):
    factor = jnp.minimum(1.0, 1.0 / optax.tree.norm(grads))
    return jax.tree.map(lambda g: g * factor, grads)


def normed(guard):
    """Gradients over their norm, whose denominator is guarded, times the loss scale again."""

    def after(grads, opt_state):
        norm, scale = guard(optax.tree.norm(grads)), ampx.current_loss_scale(opt_state)
        return jax.tree.map(lambda g: g / norm * scale, grads)

    return lambda: step_of(dynamic(optax.sgd(0.1)), after=after)


def sharpness_aware(epsilon):
    """Gradients at parameters that were moved along the gradient, as published."""
    tx = dynamic(optax.sgd(0.1))

    def step(params, opt_state, batch):
        grad = jax.grad(lambda p: loss_of(p, batch) * ampx.current_loss_scale(opt_state))
        grads = grad(params)
        norm = optax.tree.norm(grads)
        moved = jax.tree.map(lambda p, g: p + 0.05 * g / (norm + epsilon), params, grads)
        updates, opt_state = tx.update(grad(moved), opt_state, params)
        return ampx.apply_updates(params, updates), opt_state

    return step, (PARAMS, tx.init(PARAMS), BATCH)


def divided_by_hand(grads, opt_state):
    scale = ampx.current_loss_scale(opt_state)
    return jax.tree.map(lambda g: g / scale, grads)


def early(tx):
    return step_of(optax.chain(tx, dynamic(optax.sgd(0.1))))


def in_train_state(scaled):
    def step(state, batch):
        scale = ampx.current_loss_scale(state.opt_state) if scaled else 1.0
        grads = jax.grad(lambda p: loss_of(p, batch) * scale)(state.params)
        return state.apply_gradients(grads=grads)

    state = train_state.TrainState.create(
        apply_fn=None, params=PARAMS, tx=dynamic(optax.adamw(1e-3))
    )
    return jax.jit(step), (state, BATCH)


def summed_in_half(dtype):
    """Gradients of micro-batches that are added up in a half dtype."""
    tx = optax.sgd(0.1)

    def step(params, opt_state, batch):
        split = jax.tree.map(lambda x: x.reshape(4, 2, -1), batch)

        def body(sums, part):
            grads = jax.grad(loss_of)(params, part)
            return jax.tree.map(lambda s, g: s + g.astype(dtype), sums, grads), ()

        zeros = jax.tree.map(lambda p: jnp.zeros_like(p, dtype), params)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), jax.lax.scan(body, zeros, split)[0])
        updates, opt_state = tx.update(grads, opt_state, params)
        return ampx.apply_updates(params, updates), opt_state

    return step, (PARAMS, tx.init(PARAMS), BATCH)


def with_params_in(dtype, tx, **options):
    params = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
    step, (_, _, batch) = step_of(tx, scaled=False, **options)
    return step, (params, tx.init(params), batch)


def narrow_params(wrap, *, nonfinite_updates="accept", calls=None, divided=False):
    """A step of bfloat16 parameters whose updates are looked through, added up or gathered."""
    params = jax.tree.map(lambda p: p.astype(BF16), PARAMS)
    tx, axis_name = wrap(ampx.fused.adamw(RATE)), None
    if calls is not None:
        tx = ampx.multi_steps(tx, calls)
    if divided:
        tx, axis_name = ampx.zero1(tx, "data"), "data"
    scale = functools.partial(ampx.dynamic_loss_scale, nonfinite_updates=nonfinite_updates)
    step = ampx.train_step(loss_of, tx, loss_scale=scale, axis_name=axis_name)
    state = step.init(params)
    if not divided:
        return step, (state, BATCH)
    mesh = make_mesh((2,), ("data",))
    specs = jax.tree.map(lambda _: P(), state)
    specs = specs._replace(opt_state=ampx.zero1_specs(step.tx, params, mesh))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(specs, P("data")), out_specs=(specs, P()))
    return mapped, (state, BATCH)


def averaged(dtype, decay):
    tx = optax.sgd(0.1)
    step, (params, opt_state, batch) = step_of(tx, scaled=False)

    def averaging(params, opt_state, average, batch):
        params, opt_state = step(params, opt_state, batch)
        average = jax.tree.map(
            lambda a, p: decay * a + (1 - decay) * p.astype(dtype), average, params
        )
        return params, opt_state, average

    average = jax.tree.map(lambda p: p.astype(dtype), params)
    return averaging, (params, opt_state, average, batch)


def loss_in_half(params, batch):
    return loss_of(params, batch).astype(F16).astype(jnp.float32)


def loss_with_large_constant(params, batch):
    hidden = batch["x"].astype(F16) @ params["w"].astype(F16)
    return jnp.mean((hidden * 1e6).astype(jnp.float32))


def talking(kind):
    step, (params, opt_state, batch) = step_of(optax.sgd(0.1), scaled=False)

    def told(params, opt_state, batch):
        params, opt_state = step(params, opt_state, batch)
        tell = functools.partial(jax.debug.print, "{}", params["b"])
        if kind == "print":
            tell()
        elif kind == "loop":
            jax.lax.fori_loop(0, 2, lambda *_: tell(), None)
        elif kind == "branch":
            jax.lax.cond(jnp.isnan(params["b"][0]), tell, lambda: None)
        elif kind == "branch in loop":
            jax.lax.fori_loop(
                0, 2, lambda i, _: jax.lax.cond(i > 5, jax.jit(tell), lambda: None), None
            )
        else:
            shape = jax.ShapeDtypeStruct((3,), jnp.float32)
            bias = jax.pure_callback(lambda x: np.asarray(x), shape, params["b"])
            params = {**params, "b": bias}
        return params, opt_state

    return jax.jit(told), (params, opt_state, batch)


def two_networks(swapped, tx=None):
    """Two networks and two optimizers, as of a GAN, each with a scale of its own."""
    tx = tx or dynamic(optax.sgd(0.1))

    def step(networks, states, batch):
        new = []
        for number, (params, state) in enumerate(zip(networks, states, strict=True)):
            scale = ampx.current_loss_scale(states[0] if swapped and number else state)
            grads = jax.grad(lambda p, scale=scale: loss_of(p, batch) * scale)(params)
            updates, state = tx.update(grads, state, params)
            new.append((ampx.apply_updates(params, updates), state))
        return tuple(zip(*new, strict=True))

    return step, ((PARAMS, PARAMS), (tx.init(PARAMS), tx.init(PARAMS)), BATCH)


def two_groups():
    """One loss, whose gradients go to two optimizers: those of the second are scaled anew."""
    first, second = dynamic(optax.adam(0.1)), dynamic(optax.sgd(0.1))

    def step(params, states, batch):
        scales = list(map(ampx.current_loss_scale, states))
        grads = jax.grad(lambda p: loss_of(p, batch) * scales[0])(params)
        w, one = first.update({"w": grads["w"]}, states[0], {"w": params["w"]})
        again = {"b": grads["b"] * (scales[1] / scales[0])}
        b, two = second.update(again, states[1], {"b": params["b"]})
        return ampx.apply_updates(params, w | b), (one, two)

    states = first.init({"w": PARAMS["w"]}), second.init({"b": PARAMS["b"]})
    return step, (PARAMS, states, BATCH)


class WithNorm(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.BatchNorm(use_running_average=False)(x))


def with_batch_stats(frozen, tx=None):
    model = WithNorm()
    variables = jax.eval_shape(model.init, jax.random.key(0), BATCH["x"])
    variables = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), variables)
    tx = tx or dynamic(optax.adam(1e-3))

    def step(params, batch_stats, opt_state, batch):
        def loss_fn(params):
            out, new = model.apply(
                {"params": params, "batch_stats": batch_stats}, batch["x"], mutable=["batch_stats"]
            )
            loss = jnp.mean((out - batch["y"]) ** 2)
            return loss * ampx.current_loss_scale(opt_state), new["batch_stats"]

        grads, new = jax.grad(loss_fn, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        if frozen:
            new = ampx.select_if_finite(opt_state, new, batch_stats)
        return ampx.apply_updates(params, updates), {"batch_stats": new}, opt_state

    def whole(state, opt_state, batch):
        params, stats, opt_state = step(state["params"], state["batch_stats"], opt_state, batch)
        return {"params": params, **stats}, opt_state

    return whole, (variables, tx.init(variables["params"]), BATCH)


def donating_batch():
    step, args = step_of(optax.sgd(0.1), scaled=False)
    return jax.jit(step, donate_argnums=(0, 1, 2)), args


def changing_dtype():
    step, (params, opt_state, batch) = step_of(optax.sgd(0.1), scaled=False)

    def changing(params, opt_state, batch):
        params, opt_state = step(params, opt_state, batch)
        return {**params, "b": params["b"].astype(BF16)}, opt_state

    return changing, (params, opt_state, batch)


def in_float8(head=64, hidden=64, rules=ampx.DEFAULT_RULES, dots="float8"):
    """A scanned layer with attention of its own to its inputs, and a head that a softmax reads."""
    shapes = {"up": (2, 32, hidden), "down": (2, hidden, 32), "head": (32, head)}
    shapes["embed"] = (32, 32)
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}

    def layer(x, w):
        scores = jnp.einsum("bqk,bmk->bqm", x, x)
        x = x + jax.nn.softmax(scores) @ x
        return x + jax.nn.gelu(x @ w[0]) @ w[1], None

    def loss(params, batch):
        x = batch["x"] @ params["embed"]
        x, _ = jax.lax.scan(layer, x, (params["up"], params["down"]))
        with jax.named_scope("lm_head"):
            logits = x @ params["head"]
        return -jnp.mean(jax.nn.log_softmax(30 * jnp.tanh(logits / 30))[..., 0])

    policy = ampx.opt_level("O1", loss_scale=None, dots=dots, rules=rules)
    step = ampx.train_step(loss, optax.sgd(0.1), policy=policy)
    x = jax.ShapeDtypeStruct((2, 16, 32), jnp.float32)
    return jax.jit(step), (jax.eval_shape(step.init, params), {"x": x})


RATE = optax.linear_schedule(0.1, 0.0, 100)


class Statistics(NamedTuple):
    """What one keeps of the data, with the fields of brax."""

    count: Any
    mean: Any


@flax.struct.dataclass
class DataStatistics:
    count: Any
    mean: Any


def with_statistics(make):
    """Inputs are centred by a mean that counts the samples of skipped steps, too."""
    tx = dynamic(optax.adam(0.1))

    def step(params, opt_state, kept, batch):
        count, mean = jax.tree.leaves(kept)
        count = count + 8
        mean = mean + jnp.sum(batch["x"] - mean, 0) / count
        scale = ampx.current_loss_scale(opt_state)
        centred = {**batch, "x": batch["x"] - mean}
        grads = jax.grad(lambda p: loss_of(p, centred) * scale)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return ampx.apply_updates(params, updates), opt_state, make(count=count, mean=mean)

    return step, (PARAMS, tx.init(PARAMS), make(count=jnp.int32(0), mean=jnp.zeros(4)), BATCH)


def own_schedule():
    """A schedule with a state of its own, beside those of optax."""

    def update(updates, state, params=None):
        del params
        rate = RATE(state.count)
        return jax.tree.map(lambda u: rate * u, updates), Statistics(state.count + 1, state.mean)

    return optax.GradientTransformation(lambda _: Statistics(jnp.int32(0), ()), update)


def with_nnx_optimizer(tx):
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def step(model, optimizer, batch):
        def loss(model):
            scale = ampx.current_loss_scale(optimizer.opt_state)
            return jnp.mean((model(batch["x"]) - batch["y"]) ** 2) * scale

        optimizer.update(model, nnx.grad(loss)(model))

    return step, (model, optimizer, BATCH)


SCHEDULED = optax.chain(dynamic(optax.sgd(1.0)), optax.scale_by_schedule(RATE))
FAULTS = {
    "forgotten, SGD": ("loss_scale", lambda: step_of(dynamic(optax.sgd(0.1)), scaled=False)),
    "forgotten, momentum": (
        "loss_scale",
        lambda: step_of(dynamic(optax.sgd(0.1, momentum=0.9)), scaled=False),
    ),
    "forgotten, Adam": ("loss_scale", lambda: step_of(dynamic(optax.adam(0.1)), scaled=False)),
    "forgotten, static": (
        "loss_scale",
        lambda: step_of(ampx.static_loss_scale(optax.sgd(0.1), 128.0), scaled=False),
    ),
    "forgotten, fused": (
        "loss_scale",
        lambda: step_of(dynamic(ampx.fused.adamw(0.1)), scaled=False),
    ),
    "forgotten, value_and_grad": (
        "loss_scale",
        lambda: with_value_and_grad(dynamic(optax.adamw(0.1)), scaled=False),
    ),
    "forgotten, accumulation": (
        "loss_scale",
        lambda: with_value_and_grad(dynamic(optax.sgd(0.1)), scaled=False, num_microbatches=4),
    ),
    "forgotten, TrainState": ("loss_scale", lambda: in_train_state(scaled=False)),
    "forgotten, shard_map": (
        "loss_scale",
        lambda: in_shard_map(
            dynamic(
                optax.chain(ampx.all_reduce("data", op="sum"), optax.sgd(0.1)),
                axis_names=("data",),
            ),
            scaled=False,
        ),
    ),
    "multiplied twice": ("loss_scale", lambda: step_of(dynamic(optax.sgd(0.1)), powers=2)),
    "multiplied twice, Adam": ("loss_scale", lambda: step_of(dynamic(optax.adam(0.1)), powers=2)),
    "divided twice": (
        "loss_scale",
        lambda: step_of(dynamic(optax.sgd(0.1)), after=divided_by_hand),
    ),
    "scale of another network": ("loss_scale", lambda: two_networks(swapped=True)),
    "scale of another network, Adam": (
        "loss_scale",
        lambda: two_networks(swapped=True, tx=dynamic(optax.adam(0.1))),
    ),
    "scale of another loss": ("loss_scale", lambda: two_losses((1, 0))),
    "the first scale for both losses": ("loss_scale", lambda: two_losses((0, 0), optax.adam(0.1))),
    "scale of another loss, jit": ("loss_scale", lambda: two_losses((1, 0), jit=jax.jit)),
    "clip by norm outside": ("unscale_order", lambda: early(optax.clip_by_global_norm(1.0))),
    "clip outside": ("unscale_order", lambda: early(optax.clip(1.0))),
    "clip by hand": (
        "unscale_order",
        lambda: step_of(dynamic(optax.sgd(0.1)), after=clipped_by_hand),
    ),
    "a norm plus 1": ("unscale_order", normed(lambda norm: norm + 1.0)),
    "a norm of at least 0.1": ("unscale_order", normed(lambda norm: jnp.maximum(norm, 0.1))),
    "a norm of at most 1e-7": ("unscale_order", normed(lambda norm: jnp.minimum(norm, 1e-7))),
    "a norm plus the inverse of 1e-8": (
        "unscale_order",
        normed(lambda norm: norm + jax.lax.rsqrt(jax.lax.full_like(norm, 1e-8))),
    ),
    "SAM, a large epsilon": ("unscale_order", lambda: sharpness_aware(0.1)),
    "adaptive clip outside": ("unscale_order", lambda: early(optax.adaptive_grad_clip(0.1))),
    "decay in a loop, outside": ("unscale_order", lambda: by_turns(decay=0.1)),
    "forgotten, in a loop": ("loss_scale", lambda: by_turns(scaled=False)),
    "decay outside": ("unscale_order", lambda: early(optax.add_decayed_weights(0.1))),
    # Its counter, which the noise decays with, counts skipped steps, too.
    "noise outside": (
        "unscale_order schedule",
        lambda: early(optax.add_noise(0.1, 0.5, jax.random.key(0))),
    ),
    "schedule outside": ("schedule", lambda: step_of(SCHEDULED)),
    "schedule outside, nnx": ("schedule", lambda: with_nnx_optimizer(SCHEDULED)),
    "own schedule outside": (
        "schedule",
        lambda: step_of(optax.chain(dynamic(optax.sgd(1.0)), own_schedule())),
    ),
    "inject_hyperparams outside": (
        "schedule",
        lambda: step_of(optax.inject_hyperparams(lambda rate: dynamic(optax.sgd(rate)))(rate=RATE)),
    ),
    "batch statistics": ("batch_stats", lambda: with_batch_stats(frozen=False)),
    "sum in bfloat16": ("half_sum", lambda: summed_in_half(BF16)),
    "sum in float16": ("half_sum", lambda: summed_in_half(F16)),
    "parameters in bfloat16": ("half_state", lambda: with_params_in(BF16, optax.sgd(1e-4))),
    "parameters in float16": ("half_state", lambda: with_params_in(F16, optax.adamw(1e-4))),
    "moments in bfloat16": (
        "half_state",
        lambda: with_params_in(BF16, ampx.master_weights(optax.identity())),
    ),
    "average in bfloat16": ("half_state", lambda: averaged(BF16, 0.999)),
    "loss in float16": (
        "half_constant",
        lambda: step_of(dynamic(optax.sgd(0.1)), loss=loss_in_half),
    ),
    "large constant": (
        "half_constant",
        lambda: step_of(optax.sgd(0.1), scaled=False, loss=loss_with_large_constant),
    ),
    "print": ("callback", lambda: talking("print")),
    "print in a loop": ("callback", lambda: talking("loop")),
    "callback": ("callback", lambda: talking("callback")),
    "head in float8": ("float8_head", in_float8),
    "size beside float8": ("float8_size", lambda: in_float8(head=63, hidden=300)),
    "donated batch": ("donation", donating_batch),
    "changing dtype": ("dtype", changing_dtype),
}
del FAULTS["moments in bfloat16"]


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name):
    checks, make = FAULTS[name]
    with jax.numpy_dtype_promotion("standard"):  # optax's own code needs it in places
        step, args = make()
        report = lint_step(step)(*args)
    assert {found.check for found in report.findings} == set(checks.split()), report
    assert not report.ok


def level_step(level, tx=None, **options):
    tx = optax.adamw(RATE) if tx is None else tx
    step = ampx.train_step(loss_of if level == "O0" else functools.partial(loss_of, dtype=F16), tx,
        policy=ampx.opt_level(level, half_dtype=F16), **options)  # fmt: skip
    return step, (step.init(PARAMS), BATCH)


def with_flax_scale():
    """As flax's own examples: `DynamicScale` unscales, and the step keeps what was not finite."""
    scale = dynamic_scale.DynamicScale()
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(RATE))

    def step(params, opt_state, scale, batch):
        grad_fn = scale.value_and_grad(lambda p: loss_of(p, batch))
        scale, is_fin, loss, grads = grad_fn(params)
        updates, new_state = tx.update(grads, opt_state, params)
        new = (ampx.apply_updates(params, updates), new_state)
        held = jax.tree.map(functools.partial(jnp.where, is_fin), new, (params, opt_state))
        return *held, scale, loss

    return jax.jit(step), (PARAMS, tx.init(PARAMS), scale, BATCH)


def with_dropout():
    """A random key that is made of the step's number, which counts skipped steps too."""
    tx = dynamic(optax.adamw(RATE))

    def step(state, key, batch):
        key = jax.random.fold_in(key, state.step)
        keep = jax.random.bernoulli(key, 0.9, (8, 4))

        def loss(params):
            x = jnp.where(keep, batch["x"] / 0.9, 0.0)
            return loss_of(params, {**batch, "x": x}) * ampx.current_loss_scale(state.opt_state)

        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    state = train_state.TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    return step, (state, jax.random.key(0), BATCH)


def over_calls(around):
    """Gradients times the scale are summed over calls, outside of the loss scale or inside."""
    inner = optax.adam(0.1)
    if around == "optax inside":
        inside = optax.MultiSteps(inner, 4)
        tx = dynamic(optax.GradientTransformation(inside.init, inside.update))
    else:
        tx = ampx.multi_steps(dynamic(inner), 4)
    return step_of(tx)


def two_losses(order=(0, 1), inner=None, jit=lambda step: step):
    """Two losses with scales in one array; `order` says which scale multiplies each."""
    tx = dynamic(optax.sgd(0.1) if inner is None else inner, num_losses=2)

    def step(params, opt_state, batch):
        grads = tuple(
            jax.grad(lambda p, i=i: loss_of(p, batch) * ampx.current_loss_scale(opt_state, i))(
                params
            )
            for i in order
        )
        updates, opt_state = tx.update(grads, opt_state, params)
        return ampx.apply_updates(params, updates), opt_state

    return jit(step), (PARAMS, tx.init(PARAMS), BATCH)


def two_losses_in_a_vector():
    """Losses that are multiplied by all scales at once, and differentiated one by one."""
    tx = dynamic(optax.sgd(0.1), num_losses=2)

    def step(params, opt_state, batch):
        def losses(params):
            pair = jnp.stack([loss_of(params, batch), 0.5 * loss_of(params, batch)])
            return pair * opt_state.loss_scale

        jacobian = jax.jacrev(losses)(params)
        grads = tuple(jax.tree.map(lambda j, i=i: j[i], jacobian) for i in range(2))
        updates, opt_state = tx.update(grads, opt_state, params)
        return ampx.apply_updates(params, updates), opt_state

    return step, (PARAMS, tx.init(PARAMS), BATCH)


def complex_weights():
    def loss(params, batch):
        return jnp.mean(jnp.abs(batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)

    tx = dynamic(optax.sgd(0.1))
    grads_of = ampx.value_and_grad(loss, num_microbatches=2)

    def step(params, opt_state, batch):
        result = grads_of(params, batch, loss_scale=ampx.current_loss_scale(opt_state))
        updates, opt_state = tx.update(result.grads, opt_state, params)
        return ampx.apply_updates(params, updates), opt_state

    params = {"w": jnp.full((4, 3), 0.1 + 0.2j), "b": jnp.zeros(3)}
    return step, (params, tx.init(params), BATCH)


def inner_steps():
    """Each task adapts under a loss scale of its own: the meta gradient goes through its counts."""
    inner, tx = dynamic(optax.sgd(0.1)), dynamic(optax.adam(RATE))

    def loss_of_task(params, batch):
        opt_state = inner.init(params)
        scale = ampx.current_loss_scale(opt_state)
        grads = ampx.value_and_grad(loss_of)(params, batch, loss_scale=scale).grads
        updates, _ = inner.update(grads, opt_state, params)
        return loss_of(ampx.apply_updates(params, updates), batch)

    def loss(params, batches):
        return jnp.mean(jax.vmap(loss_of_task, (None, 0))(params, batches))

    def step(params, opt_state, batches):
        scale = ampx.current_loss_scale(opt_state)
        grads = ampx.value_and_grad(loss)(params, batches, loss_scale=scale).grads
        updates, opt_state = tx.update(grads, opt_state, params)
        return ampx.apply_updates(params, updates), opt_state

    batches = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), BATCH)
    return step, (PARAMS, tx.init(PARAMS), batches)


def scanned_steps():
    step, (params, opt_state, batch) = step_of(dynamic(optax.adam(0.1)))

    def steps(params, opt_state, batches):
        def body(carry, batch):
            return step(*carry, batch), ()

        return jax.lax.scan(body, (params, opt_state), batches)[0]

    return steps, (params, opt_state, jax.tree.map(lambda x: jnp.stack([x] * 3), batch))


def by_turns(decay=0.0, scaled=True):
    """Gradients in a loop whose buffer holds activations and cotangents, as a pipeline's does."""
    tx = dynamic(optax.sgd(0.1))

    def step(w, opt_state, batch):
        scale = ampx.current_loss_scale(opt_state) if scaled else 1.0

        def tick(carry, x):
            buffer, grads = carry
            hidden = jnp.tanh(w * x)
            buffer = jax.lax.dynamic_update_index_in_dim(buffer, hidden, 1, 0)
            cotangent = (hidden - 1) * scale
            grads = grads + buffer[0] * x  # of the tick before
            grads = grads + (cotangent * x + decay * w)
            return (jax.lax.dynamic_update_index_in_dim(buffer, cotangent, 0, 0), grads), ()

        zeros = jnp.zeros((2, *w.shape)), jnp.zeros_like(w)
        (_, grads), _ = jax.lax.scan(tick, zeros, batch)
        updates, opt_state = tx.update(grads, opt_state, w)
        return ampx.apply_updates(w, updates), opt_state

    w = jnp.ones(4)
    return step, (w, tx.init(w), BATCH["x"])


def with_error_kept(kind):
    """Half parameters beside float32 masters, or beside the error of their last rounding."""
    _, (params, _, batch) = with_params_in(BF16, optax.identity())

    def step(params, kept, batch):
        updates = jax.tree.map(lambda g: -0.1 * g, jax.grad(loss_of)(params, batch))
        if kind == "masters":
            kept = jax.tree.map(lambda k, u: k + u.astype(jnp.float32), kept, updates)
            updates = jax.tree.map(lambda k, p: k.astype(BF16) - p, kept, params)
            return jax.tree.map(jnp.add, params, updates), kept
        updates = jax.tree.map(jnp.subtract, updates, kept)
        new = jax.tree.map(jnp.add, params, updates)
        kept = jax.tree.map(lambda n, p, u: (n - p) - u, new, params, updates)
        return new, kept

    dtype = jnp.float32 if kind == "masters" else BF16
    return step, (params, jax.tree.map(lambda p: p.astype(dtype), params), batch)


SOUND = {
    "float8: head in half": lambda: in_float8(rules=ampx.DEFAULT_RULES.half("lm_head")),
    "float8: head of another size": lambda: in_float8(head=1003),
    "float8: small sizes": lambda: in_float8(head=63, hidden=40),
    "float8: none": lambda: in_float8(hidden=300, dots=None),
    "plain optax": lambda: step_of(optax.sgd(0.1), scaled=False),
    "optax: clip, adamw, schedule": lambda: step_of(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(RATE)), scaled=False
    ),
    "optax: apply_if_finite": lambda: step_of(
        optax.apply_if_finite(optax.adam(RATE), 3), scaled=False
    ),
    "optax: lion, ema, inject": lambda: step_of(
        optax.chain(optax.inject_hyperparams(optax.lion)(RATE), optax.ema(0.999)), scaled=False
    ),
    "optax: half first moment": lambda: step_of(optax.adamw(0.1, mu_dtype=BF16), scaled=False),
    "flax: TrainState": lambda: in_train_state(scaled=True),
    "flax: DynamicScale": with_flax_scale,
    "flax: batch statistics": lambda: with_batch_stats(frozen=True),
    "flax: no scale": lambda: with_batch_stats(frozen=False, tx=optax.adam(1e-3)),
    "flax: dropout": with_dropout,
    "dynamic": lambda: step_of(dynamic(optax.adamw(RATE))),
    "dynamic, all inside": lambda: step_of(
        dynamic(
            optax.chain(
                optax.clip_by_global_norm(1.0),
                optax.add_noise(0.1, 0.5, jax.random.key(0)),
                optax.inject_hyperparams(optax.adamw)(RATE),
            )
        )
    ),
    "dynamic, adaptive interval": lambda: step_of(
        dynamic(optax.adafactor(0.1), growth_interval=(2, 4), saturation_dtype=F16)
    ),
    "dynamic, hold": lambda: step_of(dynamic(optax.adam(0.1), nonfinite_updates="hold")),
    "dynamic, skip": lambda: step_of(dynamic(optax.adam(0.1), nonfinite_updates="skip")),
    "static": lambda: step_of(ampx.static_loss_scale(optax.sgd(0.1), 128.0)),
    "static, a number": lambda: step_of(
        ampx.static_loss_scale(optax.sgd(0.1), 128.0),
        loss=lambda p, b: loss_of(p, b) * 128.0,
        scaled=False,
    ),
    "fused": lambda: step_of(dynamic(ampx.fused.adamw(RATE))),
    "fused schedule inside, nnx": lambda: with_nnx_optimizer(dynamic(ampx.fused.adamw(RATE))),
    "a count of samples, NamedTuple": lambda: with_statistics(Statistics),
    "a count of samples, dataclass": lambda: with_statistics(DataStatistics),
    "a count of samples, dict": lambda: with_statistics(dict),
    "a norm plus 1e-12": normed(lambda norm: norm + 1e-12),
    "a norm of at least 1e-6": normed(lambda norm: jnp.maximum(norm, 1e-6)),
    "a norm clipped below": normed(lambda norm: jnp.clip(norm, 1e-6)),
    "a norm or 1e-8": normed(lambda norm: jnp.where(norm == 0, 1e-8, norm)),
    "SAM": lambda: sharpness_aware(1e-12),
    "print in a branch": lambda: talking("branch"),
    "print in a branch of a loop": lambda: talking("branch in loop"),
    "two networks": lambda: two_networks(swapped=False),
    "two groups of one loss": two_groups,
    "two losses": two_losses,
    "two losses, Adam, jit": lambda: two_losses(inner=optax.adamw(RATE), jit=jax.jit),
    "two losses, as one vector": two_losses_in_a_vector,
    "MultiSteps inside": lambda: over_calls("optax inside"),
    "multi_steps": lambda: over_calls("ampx"),
    "accumulation": lambda: with_value_and_grad(
        dynamic(optax.sgd(0.1)), scaled=True, num_microbatches=4
    ),
    "shard_map": lambda: in_shard_map(
        dynamic(
            optax.chain(ampx.all_reduce("data", op="sum"), optax.adam(RATE)),
            axis_names=("data",),
        ),
        scaled=True,
    ),
    "scanned steps": scanned_steps,
    "activations and cotangents by turns": by_turns,
    "complex weights, micro-batches": complex_weights,
    "steps inside of a loss": inner_steps,
    "average": lambda: averaged(jnp.float32, 0.999),
    "short average": lambda: averaged(BF16, 0.9),
    "masters": lambda: with_params_in(BF16, ampx.master_weights(optax.adamw(RATE))),
    "masters by hand": lambda: with_error_kept("masters"),
    "compensated sum": lambda: with_error_kept("errors"),
    "stochastic rounding": lambda: with_params_in(
        BF16, ampx.fused.stochastic_rounding(ampx.fused.adamw(RATE), seed=0)
    ),
    "split masters": lambda: with_params_in(BF16, ampx.fused.split_masters(ampx.fused.adamw(RATE))),
    **{
        f"narrow parameters: {kind}, {where}": functools.partial(narrow_params, wrap, **options)
        for kind, wrap in {
            "masters": ampx.master_weights,
            "split": ampx.fused.split_masters,
            "8 bits": functools.partial(ampx.fused.split_masters, error_bits=8),
            "random": ampx.fused.stochastic_rounding,
        }.items()
        for where, options in {
            "skip": {"nonfinite_updates": "skip"},
            "hold": {"nonfinite_updates": "hold", "calls": 2},
            "zero1": {"divided": True},
        }.items()
    },
    "train_step O0": lambda: level_step("O0"),
    "train_step O1": lambda: level_step("O1"),
    "train_step O2": lambda: level_step("O2"),
    "train_step O2, dynamic, clip": lambda: level_step(
        "O2", loss_scale="dynamic", num_microbatches=2, max_grad_norm=1.0
    ),
    "train_step O2, fused": lambda: level_step(
        "O2", ampx.fused.adamw(RATE), loss_scale="dynamic", max_grad_norm=1.0
    ),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_step_gives_nothing(name):
    with jax.numpy_dtype_promotion("standard"):
        step, args = SOUND[name]()
        report = lint_step(step)(*args)
    assert report.ok, report


def decay_of(params, hidden, batch):
    return 1e-4 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))


def spread_of(params, hidden, batch):
    return 0.1 * jnp.mean(hidden**2)


def bias_alone(params, hidden, batch):
    return jnp.sum(params["c"] ** 2)


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
@pytest.mark.parametrize("grad", [jax.grad, jax.value_and_grad])
@pytest.mark.parametrize("term", [decay_of, spread_of, bias_alone])
def test_a_term_of_the_loss_without_the_scale_is_named(term, grad, jit):
    tx = dynamic(optax.sgd(0.1))
    params = {**PARAMS, "c": jnp.ones(3)}

    def step(params, opt_state, batch):
        @jit
        def loss(params):
            hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"])
            main = jnp.mean((hidden - batch["y"]) ** 2) * ampx.current_loss_scale(opt_state)
            return main + term(params, hidden, batch)

        grads = grad(loss)(params)
        grads = grads if grad is jax.grad else grads[1]
        updates, opt_state = tx.update(grads, opt_state, params)
        return ampx.apply_updates(params, updates), opt_state

    (found,) = lint_step(step)(params, tx.init(params), BATCH).findings
    assert found.check == "unscale_order" and "every term of the loss" in found.fix
    lines = pathlib.Path(__file__).read_text().splitlines()
    assert "return main + term" in lines[int(found.source.split(":")[1].split()[0]) - 1]


def bound_of_each(g, scale):
    return jnp.clip(g, -0.1 * scale, 0.1 * scale)


def bound_of_norm(g, scale):
    return g * jnp.minimum(1.0, 0.1 * scale / jnp.linalg.norm(g))


def noise_on(g, scale):
    return g + 0.1 * scale * jnp.ones_like(g)


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
@pytest.mark.parametrize("of_parameter", [True, False])
@pytest.mark.parametrize("rule", [bound_of_each, bound_of_norm, noise_on])
def test_a_backward_rule_is_told_how_to_get_the_scale(rule, of_parameter, jit):
    """It stands in the model, where no optimizer could take it in."""
    tx = dynamic(optax.sgd(0.1))

    @jax.custom_vjp
    def changed(x, scale):
        return x

    changed.defvjp(lambda x, scale: (x, scale), lambda scale, g: (rule(g, scale), 0.0 * scale))

    def make(knows_scale):
        def step(params, opt_state, batch):
            scale = ampx.current_loss_scale(opt_state)
            given = scale if knows_scale else jnp.ones(())

            @jit
            def loss(params):
                w = changed(params["w"], given) if of_parameter else params["w"]
                hidden = jnp.tanh(batch["x"] @ w + params["b"])
                hidden = hidden if of_parameter else changed(hidden, given)
                return jnp.mean((hidden - batch["y"]) ** 2) * scale

            updates, opt_state = tx.update(jax.grad(loss)(params), opt_state, params)
            return ampx.apply_updates(params, updates), opt_state

        return step

    args = (PARAMS, tx.init(PARAMS), BATCH)
    (found,) = lint_step(make(knows_scale=False))(*args).findings
    assert found.check == "unscale_order" and "give the custom_vjp function" in found.fix
    assert "test_lint.py" in found.source
    assert lint_step(make(knows_scale=True))(*args).ok, "what the advice says is right"


GUARDS = {
    "equal": lambda n: jnp.where(n == 0, jnp.ones_like(n), n),
    "not equal": lambda n: jnp.where(jnp.not_equal(0.0, n), n, 1.0),
    "not": lambda n: jnp.where(~(n == 0), n, 1.0),
    "less": lambda n: jnp.where(n < jnp.sqrt(jnp.finfo(jnp.float32).tiny), 1.0, n),
    "at most": lambda n: jnp.where(n <= 1e-12, 1.0, n),
    "greater": lambda n: jnp.where(n > 0, n, 1.0),
    "on the right": lambda n: jnp.where(jnp.greater(1e-12, n), 1.0, n),
    "at least": lambda n: jnp.where(jnp.less_equal(1e-12, n), n, 1.0),
    "quotient": lambda n: 1.0 / jnp.where(n == 0, 1.0, 1.0 / n),
    "added": lambda n: n + (n == 0).astype(n.dtype),
    "branch": lambda n: jax.lax.cond(n == 0, lambda n: jnp.ones(()), lambda n: n, n),
    "bound": lambda n: jnp.maximum(n, jnp.sqrt(jnp.finfo(jnp.float32).tiny)),
}


def step_with_rule(rule):
    """A step with a dynamic loss scale, and a rule of its own for cotangents of the model."""
    tx = dynamic(optax.sgd(0.1))
    changed = jax.custom_vjp(lambda x: x)
    changed.defvjp(lambda x: (x, None), lambda _, g: (rule(g),))

    def step(params, opt_state, batch):
        def loss(params):
            hidden = changed(jnp.tanh(batch["x"] @ params["w"] + params["b"]))
            return jnp.mean((hidden - batch["y"]) ** 2) * ampx.current_loss_scale(opt_state)

        updates, opt_state = tx.update(jax.grad(loss)(params), opt_state, params)
        return ampx.apply_updates(params, updates), opt_state

    return step, (PARAMS, tx.init(PARAMS), BATCH)


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
@pytest.mark.parametrize("name", GUARDS)
def test_a_number_in_the_place_of_zero_is_no_fault(name, jit):
    """As qwix and AQT divide cotangents by their largest, before they round them."""

    @jit
    def rounded(g):
        width = GUARDS[name](jnp.max(jnp.abs(g)))
        return jnp.round(g / width * 127) / 127 * width

    step, args = step_with_rule(rounded)
    report = lint_step(step)(*args)
    assert report.ok, report


@pytest.mark.parametrize(
    "bound",
    [
        lambda n: jnp.where(n < 1.0, 1.0, n),
        lambda n: jnp.where(n == 0, n, 1.0),
        lambda n: jnp.where(n > 0, 1.0, n),
        lambda n: jnp.where(jnp.greater(1e-12, n), n, 1.0),
        lambda n: n + (n != 0).astype(n.dtype),
        lambda n: n + (n == 1.0).astype(n.dtype),
        lambda n: jnp.maximum(n, jnp.sqrt(1e-6)),
        lambda n: jax.lax.cond(n != 0, lambda n: jnp.ones(()), lambda n: n, n),
    ],
)
def test_a_number_in_the_place_of_others_is_a_fault(bound):
    """A clip by norm among them: it takes 1 in the place of any norm below."""
    step, args = step_with_rule(lambda g: g / bound(jnp.linalg.norm(g)))
    (found,) = lint_step(step)(*args).findings
    assert found.check == "unscale_order"


def test_a_counter_that_is_zero_is_no_zero_of_the_gradients():
    def rule(g):
        return g / jnp.where(jnp.sum(g > 0) == 0, 1.0, jnp.linalg.norm(g))

    step, args = step_with_rule(rule)
    (found,) = lint_step(step)(*args).findings
    assert found.check == "unscale_order"


def accumulated_over_calls():
    """A total of gradients, in bfloat16, that several calls add to."""

    def step(params, total, batch):
        grads = jax.grad(loss_of)(params, batch)
        return params, jax.tree.map(lambda t, g: t + g.astype(BF16), total, grads)

    return step, (PARAMS, jax.tree.map(lambda p: jnp.zeros_like(p, BF16), PARAMS), BATCH)


def moved_in_half():
    """Positions, of which there is no gradient."""

    def step(position, velocity):
        moved, _ = jax.lax.scan(lambda x, _: (x + velocity, None), position, length=3)
        return moved, velocity

    return step, (jnp.zeros(3, BF16), jnp.ones(3, BF16))


def divided_in_half():
    def divided(grads, opt_state):
        scale = ampx.current_loss_scale(opt_state).astype(F16)
        return jax.tree.map(lambda g: (g.astype(F16) / scale).astype(jnp.float32), grads)

    return step_of(dynamic(optax.identity()), after=divided)


def delayed(grads, count):
    """The gradients, through a loop that hands them from place to place."""

    def body(carry, _):
        total, line = carry
        return (jax.tree.map(jnp.add, total, line[-1]), (grads, *line[:-1])), None

    zeros = jax.tree.map(jnp.zeros_like, grads)
    return jax.lax.scan(body, (zeros, (zeros,) * count), None, length=count + 1)[0][0]


SYSTEM = np.eye(4, dtype=np.float32) * 3 + 0.1
PATTERN = jax.experimental.sparse.BCOO.fromdense(SYSTEM)


def sparse_of(params):
    return jax.experimental.sparse.BCOO((params["sparse"], PATTERN.indices), shape=(4, 4))


def by_factor(params, x):
    matrix = params["m"] @ params["m"].T + jnp.eye(4)
    return jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky(matrix), x, lower=True)


def by_diagonals(params, x):
    return jax.lax.linalg.tridiagonal_solve(*params["diagonals"], x)


THROUGH = {
    "triangular": by_factor,
    "tridiagonal": by_diagonals,
    "solve": lambda params, x: jnp.linalg.solve(params["m"], x),
    "inverse": lambda params, x: jnp.linalg.inv(params["m"]) @ x,
    "determinant": lambda params, x: x * jnp.linalg.slogdet(params["m"])[1],
    "conjugate gradients": lambda params, x: jax.scipy.sparse.linalg.cg(
        lambda v: params["m"].T @ (params["m"] @ v), x
    )[0],
    "sparse": lambda params, x: sparse_of(params) @ x,
    "dense": lambda params, x: sparse_of(params).todense() @ x,
    "taken away": lambda params, x: params["m"].at[jnp.arange(3)].subtract(x.T) @ x,
}


@pytest.mark.parametrize("powers", [0, 1, 2])
@pytest.mark.parametrize("name", THROUGH)
def test_the_scale_is_followed_through_solvers_and_sparse_arrays(name, powers):
    diagonals = np.array([[0, 1, 1, 1], [3, 3, 3, 3], [1, 1, 1, 0]], np.float32)
    params = {"m": SYSTEM, "diagonals": diagonals, "sparse": PATTERN.data}

    def loss(params):
        return jnp.mean(THROUGH[name](params, PARAMS["w"]) ** 2)

    tx = dynamic(optax.sgd(0.1))

    def step(params, opt_state):
        scale = ampx.current_loss_scale(opt_state) ** powers
        grads = jax.grad(lambda p: loss(p) * scale)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return ampx.apply_updates(params, updates), opt_state

    # The gradient of what the function does not read is zero, which has every power.
    report = lint_step(step)(params, tx.init(params))
    assert [found.check for found in report.findings] == ["loss_scale"] * (powers != 1), report


def test_a_tangent_of_an_integer_in_the_program_is_no_number():
    tangent = np.zeros((), jax.dtypes.float0)

    def loss(params, batch):
        inner = jax.jit(lambda x, tangent: jnp.sin(x))
        return jnp.mean(inner(batch["x"] @ params["w"], tangent) ** 2)

    step, args = step_of(dynamic(optax.sgd(0.1)), loss=loss)
    assert lint_step(step)(*args).ok


@pytest.mark.parametrize("count", [1, 20])
def test_the_scale_is_followed_through_loops_with_many_places(count):
    tx = ampx.dynamic_loss_scale(optax.adam(0.1))
    for scaled in (True, False):
        step, args = step_of(tx, scaled=scaled, after=lambda grads, state: delayed(grads, count))
        found = [each.check for each in lint_step(step)(*args).findings]
        assert found == ([] if scaled else ["loss_scale"])


@pytest.mark.parametrize(
    ("check", "make", "said"),
    [
        ("half_state", accumulated_over_calls, "keep them in float32"),
        ("half_sum", moved_in_half, "carry the total in float32"),
        ("half_constant", divided_in_half, "or the gradients"),
    ],
)
def test_what_to_do_about_half_fits_what_is_no_parameter_or_loss(check, make, said):
    step, args = make()
    (fix,) = [found.fix for found in lint_step(step)(*args).findings if found.check == check]
    assert said in fix


def test_a_report_is_a_table_of_lines_and_fixes():
    step, args = step_of(dynamic(optax.sgd(0.1)), scaled=False)
    text = str(lint_step(step)(*args))
    assert "test_lint.py" in text and "ampx.current_loss_scale" in text
    step, args = SOUND["shard_map"]()
    report = lint_step(step)(*args)
    assert len(report.reductions) == 3 and str(report).endswith("3, of 76 bytes in all.")


def test_what_to_do_about_float8_names_the_rule_and_the_size():
    (head,) = lint_step((step := in_float8())[0])(*step[1]).findings
    assert head.fix.endswith("rules=ampx.DEFAULT_RULES.half('lm_head')")
    step, args = in_float8(head=63, hidden=300)
    sizes = lint_step(step)(*args).findings  # up and down stand in one line
    assert [found.fix for found in sizes] == ["widen the layer: 300 to 304"]
    lines = pathlib.Path(__file__).read_text().splitlines()
    named = [lines[int(found.source.split(":")[1].split()[0]) - 1] for found in (head, *sizes)]
    assert "params[" in named[0] and "gelu" in named[1]


def test_products_of_no_rows_are_no_size_to_fill():
    loss = ampx.autocast(lambda w, x: jnp.sum(x @ w), dots="float8")
    step = lambda w, x: (w - 0.1 * jax.grad(loss)(w, x), None)  # noqa: E731
    assert lint_step(step)(jnp.ones((256, 256)), jnp.ones((0, 256))).ok


def test_shares_of_products_are_those_counted_by_hand():
    def step(params, batch):
        def layer(x, w):  # 3 times 2 x 4 x 5 x 5 in bfloat16
            return jnp.tanh(x.astype(BF16) @ w.astype(BF16)).astype(jnp.float32), None

        x, _ = jax.lax.scan(layer, batch, params["layers"])
        image = x.reshape(1, 4, 5, 1)
        smooth = jax.lax.conv_general_dilated(  # 2 x 4 x 5 results x 2 channels x 9 in float32
            image, params["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return params, jnp.sum(x @ params["head"]) + jnp.sum(smooth)  # 2 x 4 x 5 x 2 in float32

    params = {
        "layers": np.ones((3, 5, 5)),
        "head": np.ones((5, 2)),
        "kernel": np.ones((3, 3, 1, 2)),
    }
    params = jax.tree.map(np.float32, params)
    report = lint_step(step)(params, np.ones((4, 5), np.float32))
    assert [count[:2] for count in report.products] == [("float32", 720 + 80), ("bfloat16", 600)]
    line = step.__code__.co_firstlineno + 6
    expected = "Operations of matrix products: 57.1% in float32, 42.9% in bfloat16. The largest in "
    assert f"{expected}float32: {__file__}:{line}" in str(report)
    assert str(lint_step(lambda p, x: p @ x)(np.ones((2, 2)), np.ones((2, 2)))) == "Nothing found."


WIDENED = "No matrix product is in half precision"


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "p=f32,c=bf16,o=f32"])
@pytest.mark.parametrize(
    "layer",
    [
        lambda x, w: x @ w,
        lambda x, w: x @ w.astype(jnp.float32),  # a layer with a dtype of its own, as Keras' have
        lambda x, w: jnp.einsum("bi,oi->bo", x, w.T.astype(jnp.float32)),
        lambda x, w: x @ w.astype(jnp.float32).T,
        lambda x, w: jax.jit(jnp.matmul)(x, w),
        lambda x, w: jax.lax.scan(lambda y, w: (y @ w, None), x, w[None])[0],
        lambda x, w: jax.lax.dot_general(x, w, (((1,), (0,)), ((), ()))),
    ],
    ids=[
        "promoted",
        "cast by a layer",
        "transposed",
        "cast, transposed",
        "in a jit",
        "in a scan",
        "of two dtypes",
    ],
)
def test_a_policy_that_no_product_follows_is_told(layer, policy):
    def loss(params, x):
        return jnp.mean((layer(x, params["w"]) - 1.0) ** 2)

    step = ampx.train_step(loss, optax.adam(1e-3), policy=policy, num_microbatches=2)
    state, x = step.init({"w": jnp.ones((4, 4))}), jnp.ones((8, 4))
    with jax.numpy_dtype_promotion("standard"):
        report = lint_step(step)(state, x)
    assert report.ok and WIDENED in str(report) and f"{__file__}:" in report.products[0].widened


def test_a_policy_that_products_follow_is_not_told_so():
    def loss(params, x):
        return jnp.mean((x.astype(params["w"].dtype) @ params["w"]).astype(jnp.float32) ** 2)

    params, x = {"w": jnp.ones((4, 4))}, jnp.ones((8, 4))
    for policy in ("mixed_bfloat16", None):
        step = ampx.train_step(loss, optax.adam(1e-3), policy=policy)
        assert WIDENED not in str(lint_step(step)(step.init(params), x))
    # Sums of half numbers are float32 numbers of their own, and products of those may well be.
    summed = lint_step(lambda p, x: p @ jnp.sum(x, 0, dtype=jnp.float32))
    assert WIDENED not in str(summed(np.ones((2, 4), np.float32), x.astype(BF16)))


def test_products_of_groups_count_as_one_product_of_all_rows():
    def loss(params, batch):
        return jnp.sum(jax.lax.ragged_dot(batch["x"], params, batch["sizes"]))

    params = np.ones((3, 4, 5), np.float32)
    batch = {"x": np.ones((8, 4), np.float32), "sizes": np.array([2, 0, 6], np.int32)}
    both = lint_step(jax.grad(lambda params, x: loss(params, batch | {"x": x}), argnums=(0, 1)))
    (count,) = both(params, batch["x"]).products
    assert count[:2] == ("float32", 3 * 2 * 8 * 4 * 5)  # forward, and the gradients of both
    assert ampx.explain(loss)(params, batch).products_in_half() == (1, 1)


def summed_by_hand(tx, joined=False):
    """Gradients are summed, each or all at once, and judged by the optimizer that gets them."""

    def inner(params, opt_state, batch):
        # Marked as different on each device, so that JAX does not sum them on its own.
        own = jax.lax.pcast(params, "data", to="varying")
        scale = ampx.current_loss_scale(opt_state)
        grads = jax.grad(lambda p: loss_of(p, batch) * scale)(own)
        flat, unravel = jax.flatten_util.ravel_pytree(grads)
        own, restore = (flat, unravel) if joined else (grads, lambda summed: summed)
        grads = restore(jax.tree.map(lambda g: jax.lax.psum(g, "data"), own))
        updates, opt_state = tx.update(grads, opt_state, params)
        return ampx.apply_updates(params, updates), opt_state

    specs = (P(), P(), P("data"))
    mesh = make_mesh((2,), ("data",))
    step = jax.shard_map(inner, mesh=mesh, in_specs=specs, out_specs=P())
    return step, (PARAMS, tx.init(PARAMS), BATCH)


def overlapping(tail_overlap):
    step = ampx.train_step(
        loss_of, optax.sgd(0.1), loss_scale="dynamic", axis_name="data", bucket_bytes=16,
        tail_overlap=tail_overlap,
    )  # fmt: skip
    specs = dict(in_specs=(P(), P("data")), out_specs=P())
    mapped = jax.shard_map(step, mesh=make_mesh((2,), ("data",)), **specs)
    return mapped, (step.init(PARAMS), BATCH)


LATE = {
    "skip of optax": (lambda: summed_by_hand(optax.apply_if_finite(optax.sgd(0.1), 3)), True),
    "loss scale": (lambda: summed_by_hand(dynamic(optax.sgd(0.1))), True),
    "no verdict": (lambda: summed_by_hand(optax.sgd(0.1)), False),
    "train_step": (lambda: overlapping(False), False),
    "tail overlap": (lambda: overlapping(True), False),
    "one reduction": (lambda: summed_by_hand(dynamic(optax.sgd(0.1)), joined=True), False),
}


@pytest.mark.parametrize("case", LATE)
def test_a_verdict_on_reduced_gradients_is_told(case):
    make, is_late = LATE[case]
    step, args = make()
    report = lint_step(step)(*args)
    assert (report.late_verdict is not None) == is_late
    assert ("asked after they were reduced" in str(report)) == is_late


@pytest.mark.filterwarnings("ignore:float16 without a loss scale")
def test_float16_without_a_loss_scale_is_told():
    def halved(scaled):
        tx = dynamic(optax.sgd(0.1)) if scaled else optax.sgd(0.1)
        step = ampx.train_step(
            lambda w, x: jnp.sum(x.astype(w.dtype) @ w), tx, policy=policy_of_step
        )
        params = np.ones((2, 2), np.float32)
        return str(lint_step(step)(step.init(params), params))

    policy_of_step = "p=f32,c=f16,o=f32"
    assert "its state holds no loss scale: gradients below 3e-8 become zero" in halved(False)
    assert "no loss scale" not in halved(True)
    policy_of_step = "p=f32,c=bf16,o=f32"
    assert "no loss scale" not in halved(False)


def test_a_failed_test_shows_checks_and_lines():
    step, args = step_of(dynamic(optax.sgd(0.1)), scaled=False)
    shown = repr(lint_step(step)(*args))
    assert re.fullmatch(r"LintReport\(loss_scale at test_lint.py:\d+ \(step_of.step\)\)", shown)
    assert repr(ampx.LintReport(())) == "LintReport(nothing found)"


def test_checks_can_be_left_out():
    step, args = step_of(dynamic(optax.sgd(0.1)), scaled=False)
    assert lint_step(step, ignore=["loss_scale"])(*args).ok
    assert not lint_step(step, ignore=["half_state"])(*args).ok


def test_shapes_will_do_for_arrays():
    for scaled in (True, False):
        step, args = step_of(dynamic(optax.adam(0.1)), scaled=scaled)
        assert lint_step(step)(*jax.eval_shape(lambda *args: args, *args)).ok is scaled


def test_a_step_can_be_linted_where_its_arguments_are_traced():
    step, args = step_of(dynamic(optax.sgd(0.1)), scaled=True)
    reports = []
    jax.eval_shape(lambda *args: reports.append(lint_step(step)(*args)), *args)
    assert reports[0].ok


# Optimizers that give the same updates with any scale, or take gradients of their own.
UNAFFECTED = {
    "contrib.hutchinson_estimator_diag_hessian",
    "contrib.normalize",
    "contrib.sam, opaque",
    "rprop",
    "sign_sgd",
}


# With and without a scale in turns.
SAMPLED = (f"{name}-{place % 2 == 0}" for place, name in enumerate(optax_optimizers.NAMES))


@pytest.mark.slow
@pytest.mark.whole_but(*SAMPLED)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("name", optax_optimizers.NAMES)
def test_every_optimizer_of_optax_is_judged_rightly(name, scaled):
    takes = optax_optimizers.TAKES.get(name, ())

    def step(params, opt_state, batch):
        def loss(params):
            return loss_of(params, batch, jnp.float32)

        scale = ampx.current_loss_scale(opt_state) if scaled else 1.0
        value, grads = jax.value_and_grad(lambda p: loss(p) * scale)(params)
        known = {
            "value": value / scale,
            "grad": grads,
            "value_fn": loss,
            "obj_fn": loss,
            "grad_fn": lambda p, *_: jax.grad(loss)(p),
        }
        extra_args = {argument: known[argument] for argument in takes}
        updates, opt_state = tx.update(grads, opt_state, params, **extra_args)
        return ampx.apply_updates(params, updates), opt_state

    with jax.numpy_dtype_promotion("standard"):
        tx = dynamic(optax_optimizers.make(name))
        report = lint_step(step)(PARAMS, tx.init(PARAMS), BATCH)
    expected = set() if scaled or name in UNAFFECTED else {"loss_scale"}
    assert {found.check for found in report.findings} == expected, report

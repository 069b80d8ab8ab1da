"""A step that is skipped has the derivatives of what stays, whichever optimizer it runs.

The derivative of a kept array by itself is 1, all others are 0. Whatever is computed beside must
add nothing: at infinite gradients its derivatives are infinite or NaN.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import make_mesh
from optax_optimizers import NAMES, TAKES, make

import ampx
from ampx import fused
from ampx.fused.application import can_apply
from ampx.updates.skipped_derivatives import derive_held, stop_gradient_if

PARAMS = {"w": jnp.linspace(-1, 1, 6).reshape(2, 3), "b": jnp.ones(3)}
FUSED = {
    "sgd": dict(momentum=0.9),
    "adamw": dict(mu_dtype=jnp.bfloat16),
    "lamb": {},
    "lion": {},
    "adagrad": {},
    "adadelta": {},
    "novograd": {},
}
PLAIN = [name for name in NAMES if set(TAKES.get(name, ())) <= {"value"}]
WAYS = {
    "updates": None,  # those of `tx.update`
    "apply": {},  # settings of `fused.apply`
    "clipped": dict(max_norm=1.0),
}
# By name: in the tail, by the branch, by the choice that GPUs get, and outside of `jit`, where
# nothing is a branch.
CASES = {
    **{f"fused.{name}-{way}": ("fused", name, way) for name in FUSED for way in WAYS},
    **{
        f"fuse {name}-{way}": ("fuse", name, way)
        for name in PLAIN
        for way in ("updates", "clipped")
    },
    **{f"{name}-jit": ("jit", name, "updates") for name in PLAIN},
    **{f"{name}-gpu": ("gpu", name, "updates") for name in PLAIN},
    **{f"{name}-eager": ("eager", name, "updates") for name in PLAIN},
}
pytestmark = pytest.mark.usefixtures("standard_promotion")
QUICK = (
    "fused.adamw-clipped",
    "fused.lamb-updates",
    "fused.adagrad-apply",
    "fuse rmsprop-clipped",
    "fuse contrib.cocob-updates",
    "lars-jit",
    "contrib.ademamix-gpu",
    "adadelta-eager",
)


def build(kind, name):
    if kind == "fused":
        return getattr(fused, name)(0.1, **FUSED[name])
    return fused.fuse(make(name)) if kind == "fuse" else make(name)


def is_float(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


@pytest.mark.sampled(8)
@pytest.mark.slow_but(*QUICK)
@pytest.mark.parametrize("case", CASES)
def test_only_what_stays_has_a_derivative(case, request):
    kind, name, way = CASES[case]
    if kind == "gpu":
        request.getfixturevalue("traced_as_for_gpus")
    tx = ampx.static_loss_scale(build(kind, name), 8.0)
    state = tx.init(PARAMS)
    if way != "updates" and not can_apply(state):
        pytest.skip("no rules can be derived from it")
    extra_args = {"value": jnp.float32(1.5)} if TAKES.get(name) else {}
    leaves, structure = jax.tree.flatten(state)
    places = [place for place, leaf in enumerate(leaves) if is_float(leaf)]

    def step(held, grads):
        """From floating arrays of parameters and state to their successors."""
        params, floats = held
        filled = list(leaves)
        for place, leaf in zip(places, floats, strict=True):
            filled[place] = leaf
        given = grads, structure.unflatten(filled), params
        if way == "updates":
            updates, new = tx.update(*given, **extra_args)
            params = jax.tree.map(jnp.add, params, updates)
        else:
            params, new, _ = fused.apply(tx, *given, **WAYS[way], **extra_args)
        return params, [jax.tree.leaves(new)[place] for place in places]

    def differentiate(held, grads, weights):
        _, pull = jax.vjp(step, held, grads)
        return pull(weights), jax.jvp(step, (held, grads), (weights, grads_like(grads)))[1]

    grads_like = functools.partial(jax.tree.map, jnp.ones_like)
    held = PARAMS, [leaves[place] for place in places]
    random = np.random.default_rng(0)
    weights = jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape), x.dtype), held)
    run = differentiate if kind == "eager" else jax.jit(differentiate)
    for bad in (jnp.inf, jnp.nan):
        grads = {"w": jnp.full((2, 3), 8.0).at[0, 1].set(bad), "b": jnp.full(3, 4.0)}
        (of_held, of_grads), tangents = run(held, grads, weights)
        assert not any(map(np.any, jax.tree.leaves(of_grads)))
        for found in (of_held, tangents):
            jax.tree.map(np.testing.assert_array_equal, found, weights)


def test_lanes_of_vmap_are_differentiated_each_by_itself():
    tx = ampx.static_loss_scale(fused.adagrad(0.1), 8.0)

    def total(grads):
        return jnp.sum(fused.apply(tx, grads, tx.init(grads), grads, max_norm=1.0)[0])

    lanes = jnp.arange(1.0, 7.0).reshape(2, 3)
    of_lanes = jax.jit(jax.grad(lambda lanes: jnp.sum(jax.vmap(total)(lanes))))
    found = of_lanes(lanes.at[0, 1].set(jnp.inf))
    np.testing.assert_array_equal(found[0], 1.0)  # they are the parameters, too
    np.testing.assert_allclose(found[1], of_lanes(lanes)[1], rtol=1e-6)


def test_derivatives_of_second_order():
    tx = ampx.static_loss_scale(fused.adagrad(0.1), 8.0)

    def total(params, grads):
        new = fused.apply(tx, grads, tx.init(params), params, max_norm=1.0)[0]
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(new))

    def of_first(params, grads):
        found = jax.grad(total, (0, 1))(params, grads)
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(found))

    of_second = jax.jit(jax.grad(of_first, (0, 1)))
    grads = {"w": jnp.full((2, 3), 8.0).at[0, 1].set(jnp.inf), "b": jnp.full(3, 4.0)}
    of_params, of_grads = of_second(PARAMS, grads)
    assert not any(map(np.any, jax.tree.leaves(of_grads)))
    # The derivative of cos(x)**2.
    expected = jax.tree.map(lambda p: -jnp.sin(2 * p), PARAMS)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), of_params, expected)
    grads["w"] = jnp.full((2, 3), 8.0)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(of_second(PARAMS, grads)))


@pytest.mark.parametrize("max_norm", [None, 1.0, 100.0])
def test_a_step_that_is_taken_has_the_derivatives_of_optax(max_norm):
    """By gradients, parameters, moments and the scale."""
    clip = optax.identity() if max_norm is None else optax.clip_by_global_norm(max_norm)
    ours = ampx.static_loss_scale(fused.adam(0.1), 8.0)
    plain = optax.adam(0.1)
    state, ref_state = ours.init(PARAMS), plain.init(PARAMS)
    random = np.random.default_rng(0)
    nu = jax.tree.map(lambda p: jnp.asarray(random.uniform(1, 2, p.shape), p.dtype), PARAMS)

    def through(params, grads, nu):
        new_state = optax.tree.set(state, nu=nu)
        grads = optax.tree.scale(8.0, grads)
        params, new, _ = fused.apply(ours, grads, new_state, params, max_norm=max_norm)
        return params, optax.tree.get(new, "mu")

    def reference(params, grads, nu):
        grads, _ = clip.update(grads, clip.init(params))
        updates, new = plain.update(grads, optax.tree.set(ref_state, nu=nu), params)
        return optax.apply_updates(params, updates), optax.tree.get(new, "mu")

    grads = jax.tree.map(lambda p: jnp.asarray(random.normal(size=p.shape), p.dtype), PARAMS)
    found, expected = (
        jax.jit(lambda *given, f=f: jax.vjp(f, *given)[1]((grads, PARAMS)))(PARAMS, grads, nu)
        for f in (through, reference)
    )
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_numbers_of_a_skipped_step_have_no_derivative():
    """The loss of a step that overflows is infinite, too, and a rate is computed from it."""

    def update(updates, rate, params=None, *, value):
        return jax.tree.map(lambda g: -g * (rate * value), updates), rate

    inner = optax.GradientTransformationExtraArgs(lambda params: jnp.float32(0.1), update)
    tx = ampx.static_loss_scale(fused.fuse(inner, strict=True), 8.0)
    state = tx.init(PARAMS)

    def total(rate, value, grads):
        inner_state = state.inner_state._replace(inner_state=rate)
        given = state._replace(inner_state=inner_state)
        return jnp.sum(fused.apply(tx, grads, given, PARAMS, value=value)[0]["w"])

    differentiate = jax.jit(jax.grad(total))
    for bad in (jnp.inf, jnp.nan):
        grads = jax.tree.map(lambda p, bad=bad: jnp.full_like(p, bad), PARAMS)
        assert differentiate(jnp.float32(0.1), jnp.float32(bad), grads) == 0
    taken = differentiate(jnp.float32(0.1), jnp.float32(2.0), optax.tree.scale(8.0, PARAMS))
    np.testing.assert_allclose(taken, -2 * jnp.sum(PARAMS["w"]), atol=1e-6)


def test_an_update_of_fuse_without_parameters_has_no_derivative_on_a_skip():
    tx = ampx.static_loss_scale(fused.fuse(optax.adagrad(0.1)), 8.0)

    @jax.jit
    @jax.grad
    def differentiate(grads):
        return jnp.sum(tx.update(grads, tx.init(PARAMS))[0]["w"])

    for bad in (jnp.inf, jnp.nan):
        found = differentiate({"w": jnp.full((2, 3), 8.0).at[0, 1].set(bad), "b": jnp.ones(3)})
        assert not any(map(np.any, jax.tree.leaves(found)))


def test_a_clip_has_a_derivative_by_its_bound_unless_it_is_skipped():
    tx = ampx.static_loss_scale(fused.sgd(0.1), 1.0)

    @jax.jit
    @jax.grad
    def differentiate(max_norm, grads):
        params = jnp.ones(3)
        return jnp.sum(fused.apply(tx, grads, tx.init(params), params, max_norm=max_norm)[0])

    for bad in (jnp.inf, jnp.nan):
        assert differentiate(jnp.float32(1.0), jnp.array([1.0, bad, 2.0])) == 0
    taken = differentiate(jnp.float32(1.0), jnp.array([3.0, 4.0, 0.0]))
    np.testing.assert_allclose(taken, -0.1 * 7 / 5, rtol=1e-6)


def test_devices_with_scales_of_their_own_clip_what_they_share():
    tx = ampx.static_loss_scale(fused.sgd(0.1), 8.0)
    states = jax.tree.map(lambda x: jnp.stack([x, x]), tx.init(PARAMS))

    def total(grads, states):
        def shard(grads, states):
            state = jax.tree.map(lambda x: x[0], states)
            new = fused.apply(tx, grads, state, PARAMS, max_norm=1.0)[0]
            return sum(map(jnp.sum, jax.tree.leaves(new)))[None]

        spec = jax.P("data")
        mapped = jax.shard_map(shard, mesh=mesh, in_specs=(jax.P(), spec), out_specs=spec)
        return jnp.sum(mapped(grads, states))

    def alone(grads):
        new = fused.apply(tx, grads, tx.init(PARAMS), PARAMS, max_norm=1.0)[0]
        return 2 * sum(map(jnp.sum, jax.tree.leaves(new)))

    mesh = make_mesh((2,), ("data",))
    grads = optax.tree.scale(8.0, PARAMS)
    found = jax.jit(jax.grad(total))(grads, states)
    for a, b in zip(*map(jax.tree.leaves, (found, jax.jit(jax.grad(alone))(grads))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_outside_of_jit_no_array_is_copied():
    array = jnp.ones(3)
    assert stop_gradient_if(jnp.array(True), array) is array


AXES = list(itertools.product([None, 0], [None, 0, 1], [None, 0, 1]))[1:]  # of skip, new and old


@pytest.mark.parametrize("inner", AXES[::3])
def test_what_is_held_is_mapped_like_a_choice(inner):
    def choose(skip, new, old):
        return jnp.where(skip, old, new)

    random = np.random.default_rng(0)
    for outer in AXES[1::3]:
        shapes = []
        for shape, *axes in zip([(), (3, 2), (3, 2)], inner, outer, strict=True):
            for axis, size in zip(axes, (4, 5), strict=True):
                if axis is not None:
                    shape = (*shape[:axis], size, *shape[axis:])
            shapes.append(shape)
        skip = jnp.asarray(random.random(shapes[0]) < 0.5)
        arrays = [jnp.ones(shape) for shape in shapes[1:]]  # on a skip both are the same
        tangents = [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes[1:]]
        found, expected = (
            jax.jvp(functools.partial(mapped, skip), arrays, tangents)
            + jax.vjp(functools.partial(mapped, skip), *arrays)[1](jnp.full((5, 4, 3, 2), 0.5))
            for mapped in (jax.vmap(jax.vmap(f, inner), outer) for f in (derive_held, choose))
        )
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, err_msg=f"{outer}")

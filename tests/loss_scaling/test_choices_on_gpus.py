"""On GPUs a skip is a choice behind each number; what is computed is the same as with a branch.

Here programs have that form on CPUs. `test_gpu.py` runs them on a GPU.
"""

import functools
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_bit_equal, make_mesh, optimizer_step
from jax.sharding import PartitionSpec as P
from optax_optimizers import NAMES, TAKES, make

import ampx
from ampx import fused
from ampx.jaxprs.reading import inner_jaxprs, open_jaxpr
from ampx.updates import devices
from ampx.updates.gradient_norms import measure_and_judge
from ampx.updates.tails import Tail

PARAMS = {"w": jnp.linspace(-1, 1, 6).reshape(2, 3), "b": jnp.ones(3)}
PLAIN = [name for name in NAMES if set(TAKES.get(name, ())) <= {"value"}]
CHAIN = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
QUICK = ("lamb", "contrib.muon", "contrib.dadapt_adamw", "rprop")
pytestmark = pytest.mark.usefixtures("standard_promotion")
dynamic = functools.partial(ampx.dynamic_loss_scale, init_scale=8.0)


def grads_of(seed, scale=8.0):
    draw = np.random.default_rng(seed).normal
    return jax.tree.map(lambda p: jnp.asarray(scale * draw(size=p.shape), p.dtype), PARAMS)


def with_bad(value, at="w"):
    grads = grads_of(9)
    return grads | {at: grads[at].at[..., 1].set(value)}


def count_branches(fun, *args):
    def count(jaxpr):
        return sum(
            (eqn.primitive.name == "cond") + sum(map(count, inner_jaxprs(eqn)))
            for eqn in open_jaxpr(jaxpr).eqns
        )

    return count(jax.make_jaxpr(lambda *args: fun(*args))(*args))  # traced anew in each call


def by_update(tx, params, state, grads):
    return tx.update(grads, state, params)


def by_tail(tx, params, state, grads):
    return tx.update(grads, state, params, tail=Tail(new_params=True))


def by_apply(tx, params, state, grads):
    return fused.apply(tx, grads, state, params, max_norm=1.0)[:2]


@pytest.mark.parametrize(
    ("step", "inner"),
    [
        (by_update, CHAIN),
        (by_tail, CHAIN),
        (by_apply, fused.adamw(0.1)),
        (by_update, fused.lamb(1)),
    ],
    ids=["updates", "new parameters", "fused", "fused updates"],
)
def test_nothing_is_a_branch(step, inner, request):
    tx = dynamic(inner)
    args = functools.partial(step, tx), PARAMS, tx.init(PARAMS), grads_of(0)
    assert count_branches(*args) > 0
    request.getfixturevalue("traced_as_for_gpus")
    assert count_branches(*args) == 0


def jitted(direction):
    """A user's transformation that adds a jitted function of each parameter."""
    added = jax.jit(direction)
    return optax.stateless(
        lambda grads, params: jax.tree.map(lambda g, p: g + added(p), grads, params)
    )


@pytest.mark.usefixtures("traced_as_for_gpus")
@pytest.mark.parametrize(
    ("inner", "is_elementwise"),
    [
        (optax.adamw(0.1), True),
        (CHAIN, True),  # its sums are of gradients alone
        (jitted(jnp.tanh), True),
        (optax.lamb(0.1), False),
        (optax.adafactor(0.1), False),
        (jitted(lambda p: p / jnp.sum(p)), False),
    ],
    ids=["adamw", "clip, adamw", "jitted", "lamb", "adafactor", "jitted sum"],
)
def test_only_elementwise_updates_choose_by_an_array(inner, is_elementwise):
    """XLA for GPUs merges loops that share an array, and writes out what a merged one reduces."""
    tx = dynamic(inner)
    jaxpr = jax.make_jaxpr(functools.partial(by_update, tx))(PARAMS, tx.init(PARAMS), grads_of(0))
    barriers = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "optimization_barrier"]
    shared = [a.aval for eqn in barriers for a in eqn.outvars if a.aval.dtype == bool]
    assert [aval.shape for aval in shared] == [(2,)] * is_elementwise


@pytest.mark.usefixtures("traced_as_for_gpus")
@pytest.mark.parametrize(
    "inner", [ampx.multi_steps, optax.MultiSteps], ids=["multi_steps", "optax"]
)
def test_what_holds_a_branch_of_its_own_stays_behind_a_branch(inner):
    """An update that is made once in four calls is not computed in all of them."""
    inner = inner(CHAIN, 4)
    tx = dynamic(getattr(inner, "gradient_transformation", lambda: inner)())
    jaxpr, (_, state) = jax.make_jaxpr(functools.partial(by_update, tx), return_shape=True)(
        PARAMS, tx.init(PARAMS), grads_of(0)
    )
    made_by = {atom: e.primitive.name for e in open_jaxpr(jaxpr).eqns for atom in e.outvars}
    leaves = jax.tree.leaves(state)
    new_state = open_jaxpr(jaxpr).outvars[-len(leaves) :]
    assert {made_by[atom] for atom in new_state if atom.aval.shape} == {"cond"}
    # Adam's powers are taken inside.
    assert not {"pow", "integer_pow"} & {e.primitive.name for e in open_jaxpr(jaxpr).eqns}


def root(square):
    """By Newton's steps, which never end where the square is NaN."""
    return jax.lax.while_loop(
        lambda x: ~(abs(x * x - square) <= 1e-3 * square),
        lambda x: (x + square / x) / 2,
        jnp.float32(1),
    )


def host_root(square):
    return jax.pure_callback(np.sqrt, jax.ShapeDtypeStruct((), jnp.float32), square)


def fetched(square):
    where = jax.memory.Space
    return jax.device_put(jax.device_put(jnp.sqrt(square), where.Host), where.Device)


@pytest.mark.usefixtures("traced_as_for_gpus")
@pytest.mark.parametrize(
    ("function", "count"), [(jnp.sqrt, 0), (root, 1), (host_root, 1), (fetched, 1)]
)
def test_what_must_not_run_in_vain_stays_behind_a_branch(function, count):
    """A loop that waits for a number, a callback, and what would be chosen in the host's memory."""

    def update(updates, params):
        factor = function(optax.tree.norm(updates))
        return jax.tree.map(lambda u: u / (1 + factor), updates)

    tx = dynamic(optax.stateless(update))
    args = functools.partial(by_update, tx), PARAMS, tx.init(PARAMS), grads_of(0)
    assert count_branches(*args) == count


@pytest.mark.usefixtures("traced_as_for_gpus")
def test_what_prints_does_so_in_steps_that_are_taken():
    seen = []

    def update(updates, state, params=None):
        del params
        jax.debug.callback(lambda x: seen.append(float(x)), updates["b"][0])
        return updates, state

    tx = dynamic(optax.GradientTransformation(lambda _: (), update))
    step = jax.jit(functools.partial(by_update, tx))
    state = tx.init(PARAMS)
    for grads in (grads_of(0), with_bad(jnp.nan), grads_of(1)):
        _, state = step(PARAMS, state, grads)
    jax.effects_barrier()
    assert len(seen) == 2 and np.isfinite(seen).all()


@pytest.mark.usefixtures("traced_as_for_gpus")
@pytest.mark.sampled(4)
@pytest.mark.slow_but(*QUICK)
@pytest.mark.parametrize("name", PLAIN)
def test_every_optimizer_of_optax_is_as_without_a_scale_and_a_skip_keeps_every_bit(name):
    plain = make(name)
    tx = dynamic(plain)
    extra_args = {"value": jnp.float32(1.5)} if TAKES.get(name) else {}

    def step(tx, params, state, grads):
        updates, state = tx.update(grads, state, params, **extra_args)
        return optax.apply_updates(params, updates), state

    ours, theirs = (jax.jit(functools.partial(step, own)) for own in (tx, plain))
    params, state = PARAMS, tx.init(PARAMS)
    expected, plain_state = PARAMS, plain.init(PARAMS)
    for seed in range(2):
        params, state = ours(params, state, grads_of(seed))
        expected, plain_state = theirs(expected, plain_state, grads_of(seed, 1.0))
        for bad in (jnp.inf, jnp.nan, 1e30):
            kept, after = ours(params, state, with_bad(bad))
            assert_bit_equal((kept, after.inner_state), (params, state.inner_state))
            assert (after.loss_scale < state.loss_scale) == (not math.isfinite(bad))
    for a, b in zip(*map(jax.tree.leaves, (params, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_to_trace_starts_no_backend():
    """`jax.distributed.initialize` must come before that, and may come after `jax.eval_shape`."""
    program = """
import jax, optax, ampx
from jax._src.xla_bridge import backends_are_initialized
step = ampx.train_step(lambda p, x: (p * x).sum(), optax.adamw(1e-3), loss_scale="dynamic")
x = jax.ShapeDtypeStruct((3,), "float32")
jax.eval_shape(step, jax.eval_shape(step.init, x), x)
jax.eval_shape(ampx.dynamic_loss_scale(ampx.all_reduce("data"), axis_names="data").init, x)
assert not backends_are_initialized()
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("judge", ["plain", "fused"])
@pytest.mark.parametrize(
    "bad", [{}, {"w": jnp.inf}, {"b": jnp.nan}, {"w": jnp.nan, "b": jnp.inf}, {"w": 1e30}]
)
def test_the_verdict_is_that_of_a_second_look(judge, bad, monkeypatch):
    grads = grads_of(0)
    for at, value in bad.items():
        grads |= {at: with_bad(value, at)[at]}
    tx = dynamic(optax.sgd(0.1))

    def find(grads):
        if judge == "fused":
            return measure_and_judge(grads)
        return tx.update(grads, tx.init(PARAMS), PARAMS)[1]

    found = []
    for platform in ("cpu", "gpu"):
        monkeypatch.setattr(devices, "find_device", lambda kind=platform: (kind, ""))
        found.append(jax.jit(lambda grads: find(grads))(grads))
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.usefixtures("traced_as_for_gpus")
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("inner", ["plain", "fused"])
def test_devices_agree_on_a_choice(inner, check_vma):
    """One of two devices has a bad gradient: both keep what they have."""
    mesh = make_mesh((2,), ("data",))
    optimizer = optax.adam(0.1) if inner == "plain" else fused.adam(0.1)
    tx = dynamic(optax.chain(ampx.all_reduce("data"), optimizer), axis_names="data")

    def step(params, state, grads):
        return optimizer_step(tx, params, state, jax.tree.map(lambda g: g[0], grads))

    run = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P(), check_vma=check_vma
        )
    )
    state = tx.init(PARAMS)
    both = jax.tree.map(lambda *g: jnp.stack(g), grads_of(0), grads_of(1))
    params, state = run(PARAMS, state, both)
    mean = jax.tree.map(lambda g: jnp.mean(g, 0) / 8, both)
    expected, _ = optimizer_step(optax.adam(0.1), PARAMS, optax.adam(0.1).init(PARAMS), mean)
    for a, b in zip(*map(jax.tree.leaves, (params, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    bad = jax.tree.map(lambda *g: jnp.stack(g), grads_of(0), with_bad(jnp.inf))
    kept, after = run(params, state, bad)
    assert_bit_equal((kept, after.inner_state), (params, state.inner_state))
    assert after.loss_scale == state.loss_scale / 2

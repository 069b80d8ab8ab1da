"""Where the update stands behind one branch, and where old or new is chosen leaf by leaf."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_bit_equal, make_mesh, optimizer_step
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ampx
from ampx.jaxprs import primitives
from ampx.jaxprs.reading import inner_jaxprs, open_jaxpr
from ampx.updates import devices
from ampx.updates.tails import Tail

PARAMS = {"w": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), "b": np.ones(4, np.float32)}
CHAIN = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
dynamic = functools.partial(ampx.dynamic_loss_scale, init_scale=8.0)


def grads_of(value=1.0):
    return jax.tree.map(lambda p: 8.0 * p * value, PARAMS)


def equations(jaxpr, *, in_branches=True):
    for eqn in open_jaxpr(jaxpr).eqns:
        yield eqn
        if in_branches or eqn.primitive.name != "cond":
            for body in inner_jaxprs(eqn):
                yield from equations(body, in_branches=in_branches)


def outside(fun, *args):
    """Names of the equations on whole arrays that are in no branch."""
    found = equations(jax.make_jaxpr(fun)(*args), in_branches=False)
    arrays = [e for e in found if any(out.aval.shape for out in e.outvars)]
    # A choice between an array and itself is there for derivatives alone.
    return {e.primitive.name for e in arrays if not is_choice_of_itself(e)}


def is_choice_of_itself(eqn):
    return eqn.primitive.name == "select_n" and eqn.invars[1] is eqn.invars[2]


# --- structure -----------------------------------------------------------------------------------


def applied(tx, state, grads, params):
    """One step that asks for new parameters."""
    result, state = tx.update(grads, state, params, tail=Tail(new_params=True))
    return result.params, state


def updated(tx, state, grads, params):
    """One step that asks for updates."""
    return tx.update(grads, state, params)


@pytest.mark.parametrize(
    "wrap",
    [
        dynamic,
        lambda tx: ampx.static_loss_scale(tx, 8.0),
        lambda tx: ampx.follow_schedule(
            dynamic(tx), ampx.precision_schedule("fast1|step|0.9", total_steps=100)
        ),
    ],
    ids=["dynamic", "static", "follow_schedule"],
)
def test_all_but_the_verdict_and_the_norm_is_in_the_branch(wrap):
    tx = wrap(CHAIN)
    names = outside(functools.partial(applied, tx), tx.init(PARAMS), grads_of(), PARAMS)
    assert "cond" in names
    assert not names & {"select_n", "div", "add_any", "where"}, "an update outside of the branch"


def test_only_elementwise_work_on_new_moments_is_behind_the_branch():
    tx = dynamic(CHAIN)
    state = tx.init(PARAMS)
    traced = open_jaxpr(jax.make_jaxpr(functools.partial(updated, tx))(state, grads_of(), PARAMS))
    (branch,) = (e for e in traced.eqns if e.primitive.name == "cond" and len(e.outvars) > 4)
    # Operands of what is computed beside the branch are guarded, by calls with derivatives of their
    # own: in front of the clip's norm, and behind the branch.
    front, behind = (e for e in traced.eqns if e.primitive.name == "custom_jvp_call")
    first, last = traced.eqns.index(front), traced.eqns.index(branch)
    assert first < last < traced.eqns.index(behind)
    between = {out for e in traced.eqns[first:last] for out in e.outvars}
    handed_in = [atom for atom in branch.invars if atom in between]
    assert handed_in and not any(atom.aval.shape for atom in handed_in), "the clip's norm alone"
    # It reads no gradient and no old moment: of each leaf new moments and the parameter.
    operands, outputs = set(traced.invars), set(branch.outvars)
    arrays = [atom for atom in behind.invars if atom.aval.shape]
    assert len(arrays) == 3 * len(PARAMS)
    assert len(outputs.intersection(arrays)) == 2 * len(PARAMS)
    assert len(operands.intersection(arrays)) == len(PARAMS)
    start = traced.eqns.index(behind) + 1
    shapes = {p.shape for p in PARAMS.values()}
    made = [e for e in traced.eqns[start:] if any(o.aval.shape in shapes for o in e.outvars)]
    work = {e.primitive.name for e in made}
    assert work <= primitives.ELEMENTWISE | {"jit", "pjit", "broadcast_in_dim"}
    # Nothing in front has the shape of a parameter and is an update: squares and verdicts alone.
    rest = {e.primitive.name for e in traced.eqns[:start] if any(o.aval.shape for o in e.outvars)}
    assert not rest & {"select_n", "div", "add_any", "where"}


def test_the_norm_of_a_clip_is_computed_in_front_of_the_branch():
    tx = dynamic(CHAIN)
    traced = jax.make_jaxpr(functools.partial(applied, tx))(tx.init(PARAMS), grads_of(), PARAMS)

    def count_sums(**where):
        found = [e for e in equations(traced, **where) if e.primitive.name == "reduce_sum"]
        return sum(jnp.issubdtype(e.outvars[0].aval.dtype, jnp.floating) for e in found)

    # The verdict's and the clip's; where they are alike, the compiler computes one of them. Inside
    # of a branch stands the second look alone.
    assert count_sums(in_branches=False) == 2 * len(PARAMS)
    assert count_sums() == 3 * len(PARAMS)


def test_temporaries_and_aliases_are_those_of_the_optimizer_alone():
    params = {f"p{k}": jnp.ones(2**16) for k in range(3)}

    def memory(step, tx):
        carried = jax.eval_shape(lambda p: (p, tx.init(p)), params)
        jitted = jax.jit(step, donate_argnums=0)
        return jitted.lower(carried, params).compile().memory_analysis()

    def plain(carry, grads):
        return optimizer_step(CHAIN, *carry, grads)

    def scaled(carry, grads):
        return applied(tx, carry[1], grads, carry[0])

    tx = dynamic(CHAIN)
    ours, theirs = memory(scaled, tx), memory(plain, CHAIN)
    size = 3 * 2**16
    assert ours.temp_size_in_bytes <= theirs.temp_size_in_bytes + 0.1 * size
    assert ours.alias_size_in_bytes >= 3 * 4 * size


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("tail_overlap", [None, False, True])
def test_updates_that_overlap_with_a_reduction_are_in_no_branch(
    tail_overlap, platform, monkeypatch
):
    """By default they overlap where the device can run both at once."""
    monkeypatch.setattr(devices, "find_device", lambda: (platform, ""))
    expected = platform == "tpu" if tail_overlap is None else tail_overlap
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    inside = ampx.all_reduce("data", tail_overlap=tail_overlap)
    tx = dynamic(optax.chain(inside, optax.sgd(0.1, momentum=0.9)), axis_names="data")
    around = ampx.train_step(
        lambda p, x: jnp.sum(p["w"]) * jnp.mean(x),
        optax.sgd(0.1, momentum=0.9),
        loss_scale=dynamic,
        axis_name="data",
        tail_overlap=tail_overlap,
    )

    def update(state, grads):
        return tx.update(grads, state, PARAMS)

    for step, state, data in (
        (update, tx.init(PARAMS), grads_of()),
        (around, around.init(PARAMS), jnp.ones(4)),
    ):
        data_specs = P("data") if step is around else P()
        mapped = jax.shard_map(
            step, mesh=mesh, in_specs=(P(), data_specs), out_specs=P(), check_vma=False
        )
        names = outside(mapped, state, data)
        # Updates that the caller is to add are chosen behind the branch.
        assert ("select_n" in names) == (expected or step is update)
        every = equations(jax.make_jaxpr(mapped)(state, data))
        branches = [e for e in every if e.primitive.name == "cond"]
        outputs = [sum(bool(out.aval.shape) for out in e.outvars) for e in branches]
        assert (max(outputs) >= len(PARAMS)) != expected


# --- the same numbers everywhere -----------------------------------------------------------------


def run_mapped(tx, check_vma):
    """Two steps on four devices: all finite, and with a NaN on the third device in the second."""
    mesh = make_mesh((4,), ("data",))
    everywhere = P()
    mapped = jax.jit(
        jax.shard_map(
            functools.partial(optimizer_step, tx),
            mesh=mesh,
            in_specs=(everywhere, everywhere, P("data")),
            out_specs=everywhere,
            check_vma=check_vma,
        )
    )
    stacked = jax.tree.map(lambda g: np.concatenate([g * k for k in (1, 2, 3, 4)]), grads_of())
    carry = mapped(PARAMS, tx.init(PARAMS), stacked)
    # A copy: the first call, which may still run, reads this array in place.
    poisoned = jax.tree.map(np.copy, stacked)
    poisoned["w"][2 * len(PARAMS["w"])] = np.nan
    return carry, mapped(*carry, stacked), mapped(*carry, poisoned)


@pytest.mark.slow_but("True")
@pytest.mark.parametrize("check_vma", [True, False])
def test_collectives_inside_the_branch_are_those_of_the_select(check_vma):
    steps = []
    for overlap in (False, True):
        reduction = ampx.all_reduce("data", tail_overlap=overlap)
        tx = dynamic(optax.chain(reduction, CHAIN), axis_names="data")
        before, good, bad = run_mapped(tx, check_vma)
        assert not good[1].overflow
        params, state = bad
        assert_bit_equal(params, before[0])
        assert state.overflow and int(state.nan_total) == 1
        steps.append([(params, state.inner_state[1]) for params, state in (good, bad)])
    for a, b in zip(*map(jax.tree.leaves, steps), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6)


@pytest.mark.slow_but("True")
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_that_only_their_sum_makes_too_large_are_undone(check_vma):
    """Each device's squares are finite, and those of the sum of all devices are not."""
    reduction = ampx.all_reduce("data", op="sum", tail_overlap=False)
    tx = ampx.static_loss_scale(optax.chain(reduction, CHAIN), 1.0, axis_names="data")
    mesh = make_mesh((4,), ("data",))
    mapped = jax.shard_map(
        functools.partial(optimizer_step, tx),
        mesh=mesh,
        in_specs=(P(), P(), P("data")),
        out_specs=P(),
        check_vma=check_vma,
    )
    params = jnp.ones(1)
    state = tx.init(params)
    new, after = jax.jit(mapped)(params, state, jnp.full(4, 1e19))
    assert after.overflow and int(after.bad_update_total) == 1 and int(after.inf_total) == 0
    assert_bit_equal((new, after.inner_state), (params, state.inner_state))


def multi(tx):
    return ampx.multi_steps(tx, 1)


MOMENTUM = optax.chain(optax.add_decayed_weights(0.1), optax.trace(0.9), optax.scale(-0.1))


@pytest.mark.parametrize("wrap", [dynamic, multi], ids=["dynamic", "multi"])
@pytest.mark.parametrize("inner", [MOMENTUM, optax.lamb(0.1)], ids=["momentum", "lamb"])
def test_what_varies_over_devices_stays_so_in_both_branches(inner, wrap):
    """Replicated parameters with gradients of one's own: a state that varies from then on.

    LAMB's ratio is a number that varies, and its updates are made of it behind the branch.
    """
    tx = wrap(inner)
    mesh = make_mesh((4,), ("data",))

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return updates, jax.tree.map(lambda x: jnp.atleast_1d(x).astype(float), state.inner_state)

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P("data"))
    params = jnp.ones(2)
    updates, _ = jax.jit(mapped)(params, tx.init(params), jnp.arange(8.0))
    alone = [tx.update(g, tx.init(params), params)[0] for g in jnp.arange(8.0).reshape(4, 2)]
    np.testing.assert_allclose(updates, np.concatenate(alone), rtol=1e-6)


@pytest.mark.parametrize("inner", [MOMENTUM, optax.lamb(0.1)], ids=["momentum", "lamb"])
def test_a_mesh_of_which_some_axes_are_mapped(inner):
    """JAX has no full type for the shape of an array there."""
    mesh = make_mesh((2, 2), ("data", "model"))

    def on_mesh(tx):
        def step(grads, params):
            return tx.update(grads, tx.init(params), params)[0]

        specs = {"in_specs": P("data"), "out_specs": P("data"), "axis_names": {"data"}}
        mapped = jax.shard_map(step, mesh=mesh, **specs)

        def total(grads):
            return jnp.sum(mapped(grads, jnp.ones(8)))

        return jax.jit(mapped)(jnp.arange(8.0), jnp.ones(8)), jax.jit(jax.grad(total))(jnp.ones(8))

    found, expected = map(on_mesh, (ampx.static_loss_scale(inner, 1.0), inner))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected
    )


def test_on_an_explicit_mesh_a_skip_keeps_layouts():
    mesh = make_mesh((4,), ("data",), "Explicit")
    rows = NamedSharding(mesh, P("data"))
    tx = dynamic(optax.adam(0.1))
    with jax.set_mesh(mesh):
        params = jax.device_put(jnp.ones((8, 2)), rows)
        state = jax.jit(tx.init)(params)
        step = jax.jit(tx.update)
        for value in (1.0, np.nan):
            updates, state = step(jax.device_put(jnp.full((8, 2), value), rows), state, params)
            assert updates.sharding.is_equivalent_to(rows, 2)
    assert state.overflow and not np.any(updates)


def test_a_branch_in_a_scan_equals_calls_one_by_one():
    """Outside of `jit` old or new is chosen leaf by leaf."""
    tx = dynamic(CHAIN)
    sequence = [grads_of(), grads_of(np.nan), grads_of(-2.0)]
    params, state = PARAMS, tx.init(PARAMS)
    for grads in sequence:
        params, state = optimizer_step(tx, params, state, grads)

    def body(carry, grads):
        return optimizer_step(tx, *carry, grads), None

    stacked = jax.tree.map(lambda *g: np.stack(g), *sequence)
    start = jax.tree.map(jnp.asarray, (PARAMS, tx.init(PARAMS)))
    scanned, _ = jax.jit(lambda c, g: jax.lax.scan(body, c, g))(start, stacked)
    for a, b in zip(*map(jax.tree.leaves, (scanned, (params, state))), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6)


@pytest.mark.parametrize(
    "inner",
    [CHAIN, optax.lars(0.1), ampx.fused.fuse(optax.rmsprop(0.1))],
    ids=["clip", "lars", "fuse"],
)
@pytest.mark.parametrize("step", [applied, updated])
def test_programs_that_were_taken_apart_stand_the_checks_of_jax(step, inner):
    with jax.enable_checks(True):
        tx = dynamic(inner)
        jax.make_jaxpr(functools.partial(step, tx))(tx.init(PARAMS), grads_of(), PARAMS)

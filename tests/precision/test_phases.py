"""ampx.precision schedules: precision switches once, exact to the step, and carries all over."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training import train_state
from helpers import make_mesh
from jax.sharding import PartitionSpec as P

import ampx
from ampx.fused.application import can_apply

STEPS = 8
LOW = ampx.opt_level("O2", half_dtype=jnp.float16)
FULL = ampx.as_recipe("float32")


def data():
    rng = np.random.default_rng(0)
    params = {"kernel": rng.normal(size=(6, 5)), "head": rng.normal(size=(5,))}
    batches = {"x": rng.normal(size=(STEPS, 8, 6)), "y": rng.normal(size=(STEPS, 8))}
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (params, batches))


def loss_fn(params, batch):
    kernel = params["kernel"]
    hidden = jnp.tanh(batch["x"].astype(kernel.dtype) @ kernel)
    return jnp.mean(((hidden @ params["head"]).astype(jnp.float32) - batch["y"]) ** 2)


def rows(batches, i):
    return jax.tree.map(lambda x: x[i], batches)


def run(step, state, batches, numbers=range(STEPS)):
    jitted, reports = jax.jit(step), []
    for i in numbers:
        state, report = jitted(state, rows(batches, i))
        reports.append(report)
    return state, jax.tree.map(lambda *leaves: np.stack(leaves), *reports)


dynamic = functools.partial(ampx.dynamic_loss_scale, init_scale=2.0**10, growth_interval=3)


def scheduled(spec="fast|step|0.6", tx=None, loss_scale=dynamic, **options):
    schedule = ampx.precision_schedule(spec, total_steps=STEPS)
    tx = optax.adamw(0.01) if tx is None else tx
    return ampx.train_step(loss_fn, tx, policy=schedule, loss_scale=loss_scale, **options)


# --- equality with two steps, one after the other ------------------------------------------------


def two_steps(params, batches, switch, tx=None):
    """Half steps by one train step, the others by another, which takes the optimizer over."""
    tx = optax.adamw(0.01) if tx is None else tx
    low = ampx.train_step(loss_fn, tx, policy=LOW, loss_scale=dynamic)
    full = ampx.train_step(loss_fn, tx, policy=FULL)
    state, before = run(low, low.init(params), batches, range(switch))
    state = state._replace(opt_state=state.opt_state.inner_state)
    state, after = run(full, state, batches, range(switch, STEPS))
    return state, np.concatenate([before.loss, after.loss]), before.loss_scale


def test_a_schedule_by_steps_equals_two_train_steps():
    params, batches = data()
    step = scheduled()  # 0.6 * 8 = 4.8: steps 0 to 4 are in half
    state, reports = run(step, step.init(params), batches)
    expected, losses, scales = two_steps(params, batches, 5)
    chex.assert_trees_all_close(state.params, expected.params, rtol=1e-6)
    inner = state.opt_state.inner_state.inner_state
    chex.assert_trees_all_close(inner, expected.opt_state, rtol=1e-6)
    np.testing.assert_allclose(reports.loss, losses, rtol=1e-6)
    assert reports.phase.tolist() == [0] * 5 + [1] * 3
    assert reports.loss_scale.tolist() == [*scales, 1, 1, 1]
    assert scales.tolist() == [2.0**10] * 3 + [2.0**11] * 2
    # In half the losses differ from float32's, or nothing would be shown.
    plain = ampx.train_step(loss_fn, optax.adamw(0.01))
    _, exact = run(plain, plain.init(params), batches)
    assert exact.loss[0] != reports.loss[0]
    np.testing.assert_allclose(exact.loss, reports.loss, rtol=2e-2)


@pytest.mark.slow_but("4")
@pytest.mark.parametrize("length", [2, 4])
def test_the_switch_is_exact_inside_a_scan_of_steps(length):
    params, batches = data()
    step = scheduled()
    state = step.init(params)
    _, expected = run(step, state, batches)
    scanned = jax.jit(lambda state, batches: jax.lax.scan(step, state, batches))
    phases, losses = [], []
    for start in range(0, STEPS, length):
        part = rows(batches, slice(start, start + length))
        state, reports = scanned(state, part)
        phases += reports.phase.tolist()
        losses += reports.loss.tolist()
    assert phases == [0] * 5 + [1] * 3
    np.testing.assert_allclose(losses, expected.loss, rtol=1e-5)


def test_levels_of_both_phases():
    params, batches = data()
    schedule = ampx.precision_schedule("fast|step|0.6", total_steps=STEPS, policy="O1")
    assert str(schedule) == "O2 float16 until step 5, then O1 float16"
    step = ampx.train_step(loss_fn, optax.adamw(0.01), policy=schedule, loss_scale=dynamic)
    state, reports = run(step, step.init(params), batches)
    texts = [
        str(jax.make_jaxpr(step.in_phase(number))(state, rows(batches, 0))) for number in range(2)
    ]
    assert all("f16[" in text and "bf16[" not in text for text in texts)
    # O1's own recipe has a dynamic scale, too, which goes on from where it was.
    assert reports.loss_scale.tolist() == [2.0**10] * 3 + [2.0**11] * 3 + [2.0**12] * 2


@pytest.mark.slow
def test_a_step_for_each_phase_gives_the_same():
    params, batches = data()
    step = scheduled()
    expected, _ = run(step, step.init(params), batches)
    steps = [jax.jit(step.in_phase(number)) for number in range(2)]
    state = step.init(params)
    for i in range(STEPS):
        number = step.schedule.phase_at(i)
        text = str(steps[number].trace(state, rows(batches, i)).jaxpr)
        assert ("f16[" in text) == (number == 0)
        state, report = steps[number](state, rows(batches, i))
        assert int(report.phase) == number
    chex.assert_trees_all_close(state, expected, rtol=1e-6)
    with pytest.raises(IndexError, match="one of 2 phases, got 2"):
        step.in_phase(2)
    with pytest.raises(IndexError, match="one of 0 phases"):
        ampx.train_step(loss_fn, optax.sgd(0.1)).in_phase(0)
    with pytest.raises(ValueError, match="depends on losses"):
        ampx.precision_schedule("fast|loss", final_loss=1.0).phase_at(0)


def test_only_the_half_phase_computes_in_half():
    params, batches = data()
    seen = []

    def spying(params, batch):
        seen.append(params["kernel"].dtype.name)
        return loss_fn(params, batch)

    schedule = ampx.precision_schedule("fast1|step|0.6", total_steps=STEPS)
    step = ampx.train_step(spying, optax.sgd(0.1), policy=schedule)
    jaxpr = jax.make_jaxpr(step)(step.init(params), rows(batches, 0))
    assert set(seen) == {"bfloat16", "float32"}
    branches = [
        str(e) for e in jaxpr.eqns if e.primitive.name == "cond" and "dot_general" in str(e)
    ]
    assert len(branches) == 1 and "bf16" in branches[0]


# --- by the loss ---------------------------------------------------------------------------------


def phases_for(losses, schedule, scale=None):
    tx = ampx.follow_schedule(ampx.loss_scale(schedule.loss_scale, optax.sgd(0.0)), schedule)

    def one(state, loss):
        phase = ampx.precision_phase(state)
        _, state = tx.update(jnp.ones(1), state, jnp.ones(1), value=loss)
        return state, phase

    _, phases = jax.lax.scan(one, tx.init(jnp.ones(1)), jnp.asarray(losses, jnp.float32))
    return phases.tolist()


def test_the_first_step_with_the_loss_is_the_last_in_half():
    schedule = ampx.precision_schedule("fast|loss|1.05", final_loss=2.0)
    assert phases_for([4, 3, 2.11, 2.1, 5, 6], schedule) == [0, 0, 0, 0, 1, 1]


def test_a_loss_that_is_not_finite_ends_nothing():
    schedule = ampx.precision_schedule("fast1|loss", final_loss=2.0)
    assert phases_for([np.nan, -np.inf, np.inf, 3, 2, np.nan], schedule) == [0, 0, 0, 0, 0, 1]


def phases_by_numpy(losses, limit, smoothing):
    """The phase of each step, and of the one after the last, from the definition."""
    seen, phases = [], [0]
    for loss in losses:
        if np.isfinite(loss):
            seen.append(loss)
        full = np.isfinite(loss) and len(seen) >= smoothing
        ended = phases[-1] or (full and np.mean(seen[-smoothing:]) <= limit)
        phases.append(int(ended))
    return phases


@pytest.mark.parametrize("smoothing", [1, 4])
def test_the_mean_loss_of_the_last_steps_decides(smoothing):
    rng = np.random.default_rng(smoothing)
    losses = np.linspace(4, 1, 60) + rng.normal(size=60)
    losses[rng.integers(0, 60, 12)] = np.nan
    losses[[5, 30]] = np.inf, -np.inf
    schedule = ampx.precision_schedule(
        "fast1|loss|1.05", final_loss=1.7 / 1.05, smoothing=smoothing
    )
    expected = phases_by_numpy(losses, 1.7, smoothing)[:-1]
    assert 0 < np.sum(expected) < 60
    assert phases_for(losses, schedule) == expected


def test_one_lucky_batch_does_not_end_the_half_phase():
    losses = [0.1] + [4.0] * 10 + [0.1] + [4.0] * 10
    make = functools.partial(ampx.precision_schedule, "fast|loss", final_loss=1.0)
    assert phases_for(losses, make()) == [0] + [1] * 21
    schedule = make(smoothing=4)
    assert str(schedule).startswith("O2 float16 until mean loss of 4 steps 1.05, then")
    assert phases_for(losses, schedule) == [0] * 22
    assert phases_for([4.0] * 3 + [1.0] * 5, schedule) == [0] * 7 + [1]


def test_each_phase_has_its_own_smoothing_and_the_losses_are_kept_in_the_state():
    phases = (
        ampx.Phase("O2", until_loss=2.0, smoothing=3),
        ampx.Phase("O1", until_loss=1.0),
        ampx.Phase("O0"),
    )
    schedule = ampx.PrecisionSchedule(phases)
    assert phases_for([3, 1, 3, 2, 2, 3, 1, 3], schedule) == [0, 0, 0, 0, 1, 1, 1, 2]
    tx = ampx.follow_schedule(ampx.dynamic_loss_scale(optax.sgd(0.0)), schedule)
    state = tx.init(jnp.ones(1))
    for loss in (3.0, np.nan, 1.0):
        _, state = tx.update(jnp.ones(1), state, jnp.ones(1), value=jnp.float32(loss))
    assert state.recent_losses.tolist() == [1, 3, np.inf]


def test_train_step_switches_by_its_own_loss():
    params, batches = data()
    plain = ampx.train_step(loss_fn, optax.adamw(0.05))
    same = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape), batches)
    _, reports = run(plain, plain.init(params), same)
    target = float(reports.loss[4])
    schedule = ampx.precision_schedule("fast1|loss|1.01", final_loss=target / 1.005)
    step = ampx.train_step(loss_fn, optax.adamw(0.05), policy=schedule)
    _, reports = run(step, step.init(params), same)
    limit = schedule.phases[0].until_loss
    first = int(np.argmax(reports.loss <= limit))
    assert 2 < first < STEPS - 1
    assert reports.phase.tolist() == [0] * (first + 1) + [1] * (STEPS - first - 1)


def test_more_phases_with_ends_of_both_kinds():
    schedule = ampx.PrecisionSchedule(
        (
            ampx.Phase("O2", until_loss=1.0),
            ampx.Phase("O1", until_step=3),
            ampx.Phase("O1", until_loss=0.5),
            ampx.Phase("O0"),
        )
    )
    # Phase 1 is over before phase 0 ends, so it is left out.
    assert phases_for([3, 3, 3, 1, 0.5, 3], schedule) == [0, 0, 0, 0, 2, 3]
    assert phases_for([1, 3, 3, 1, 0.7, 0.1], schedule) == [0, 1, 1, 2, 2, 2]
    written_out = ampx.PrecisionSchedule((ampx.Phase("O2", until_step=3), ampx.Phase("O0")))
    for last in ((None, "O0"), "O0", ampx.opt_level("O0")):
        assert ampx.PrecisionSchedule(((3, "O2"), last)) == written_out
    either = ampx.PrecisionSchedule(
        (ampx.Phase("O2", until_step=3, until_loss=1.0), ampx.Phase("O0"))
    )
    assert phases_for([3, 1, 3, 3], either) == [0, 0, 1, 1]
    assert phases_for([3, 3, 3, 3], either) == [0, 0, 0, 1]


# --- the loss scale ------------------------------------------------------------------------------


def scales_of(schedule, grads, **options):
    wrapped = ampx.dynamic_loss_scale(optax.sgd(0.1), **options)
    tx = ampx.follow_schedule(wrapped, schedule)

    def one(state, grad):
        scale = ampx.current_loss_scale(state)
        _, state = tx.update(scale * grad, state, jnp.ones(()))
        return state, scale

    state, scales = jax.lax.scan(one, tx.init(jnp.ones(())), jnp.asarray(grads, jnp.float32))
    return scales.tolist(), state


def test_a_float32_phase_neither_scales_nor_moves_the_scale_but_skips():
    schedule = ampx.PrecisionSchedule((ampx.Phase(LOW, until_step=3), ampx.Phase("O0")))
    scales, state = scales_of(
        schedule, [1, 1, np.inf, 1, np.inf, 1, 1, 1], init_scale=8.0, growth_interval=2
    )
    assert scales == [8, 8, 16, 1, 1, 1, 1, 1]
    scaled = ampx.find_loss_scale_state(state)
    assert int(scaled.skipped_total) == 2 and int(scaled.growth_tracker) == 0
    assert int(state.steps_seen) == 8


def test_the_other_way_round_and_back_the_dynamic_scale_is_taken_up_again():
    schedule = ampx.PrecisionSchedule(
        (
            ampx.Phase("O0", until_step=2),
            ampx.Phase(LOW, until_step=4),
            ampx.Phase(dataclasses.replace(LOW, loss_scale=128.0), until_step=6),
            ampx.Phase(LOW),
        )
    )
    scales, _ = scales_of(schedule, [1, 1, 1, np.inf, 1, 1, 1, 1], init_scale=8.0)
    assert scales == [1, 1, 8, 8, 128, 128, 4, 4]


def test_a_scale_that_stands_still_in_float32_is_not_at_its_floor_or_ceiling():
    schedule = ampx.precision_schedule("fast|step|0.5", total_steps=2)
    bounds = dict(init_scale=1.0, max_scale=1.0, growth_interval=1, on_floor="raise-flag")
    tx = ampx.follow_schedule(ampx.dynamic_loss_scale(optax.sgd(0.1), **bounds), schedule)
    state = tx.init(jnp.ones(2))
    for bad in (0.0, 0.0, np.inf):
        _, state = tx.update(jnp.array([bad, 1.0]), state)
    hits = state.inner_state.floor_hits, state.inner_state.ceiling_hits
    assert bool(ampx.is_skipped(state)) and hits == (0, 1)  # the first step was in half
    ampx.raise_if_exhausted(state)


@pytest.mark.parametrize("jit", [False, True], ids=["plain", "jit"])
def test_several_losses_and_several_optimizers_switch_together(jit):
    """Each loss parks the scale of its own, and optimizers may take turns."""
    schedule = ampx.precision_schedule("fast|step|0.5", total_steps=6)
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    sgd = optax.sgd(0.25)
    losses = ampx.follow_schedule(dynamic(sgd, init_scale=8.0, num_losses=2), schedule)
    turns = ampx.follow_schedule(dynamic({"a": sgd, "b": sgd}, init_scale=8.0), schedule)
    of_losses = jax.jit(losses.update) if jit else losses.update
    of_turns = jax.jit(turns.update) if jit else turns.update
    state, other = losses.init(params), turns.init(params)
    bad = {**params, "a": jnp.full(2, jnp.inf)}
    for scale, grads in (((8, 8), bad), ((8, 4), params), ((8, 4), params), ((1, 1), params)):
        np.testing.assert_array_equal(state.inner_state.loss_scale, scale)
        updates, state = of_losses((params, grads), state, params)
        given = {name: grads[name] for name in (["a"] if grads is bad else ["a", "b"])}
        own, other = of_turns(given, other, params)
        assert bool(ampx.is_skipped(state)) == bool(ampx.is_skipped(other)) == (grads is bad)
        assert not np.any(own["b"]) == (grads is bad)
    np.testing.assert_allclose(updates["a"], -0.5)
    np.testing.assert_array_equal(state.parked_scale, (16, 4))
    assert float(other.parked_scale) == 4


def test_a_whole_result_is_taken_as_by_the_loss_scale_inside():
    schedule = ampx.precision_schedule("fast|loss|1.5", final_loss=2.0)
    tx = ampx.follow_schedule(dynamic(optax.sgd(0.1), init_scale=8.0), schedule)
    grads_of = ampx.value_and_grad(lambda p, x: jnp.sum(p * x.astype(p.dtype)), policy=schedule)
    params, phases = jnp.ones(2), []
    state = tx.init(params)
    for x in (2.0, 1.0, 1.0):
        scale, phase = ampx.current_loss_scale(state), ampx.precision_phase(state)
        result = grads_of(params, x * jnp.ones(2), phase=phase, loss_scale=scale)
        whole = tx.update(result, state, params)
        parts = tx.update(result.grads, state, params, value=result.loss, weight=result.weight)
        jax.tree.map(np.testing.assert_array_equal, whole, parts)
        state = whole[1]
        phases.append(int(ampx.precision_phase(state)))
    assert phases == [0, 1, 1]


def test_a_loss_scale_that_no_phase_uses_is_refused():
    bfloat16 = ampx.precision_schedule("fast1|step", total_steps=9)
    for choice in ("dynamic", 512.0, dynamic):
        with pytest.raises(ValueError, match="would be used in no phase of the schedule 'O2 bf"):
            ampx.train_step(loss_fn, optax.sgd(0.1), policy=bfloat16, loss_scale=choice)


def test_a_skipped_step_counts_as_a_step_of_training():
    schedule = ampx.PrecisionSchedule((ampx.Phase(LOW, until_step=2), ampx.Phase("O0")))
    scales, state = scales_of(schedule, [np.inf, np.inf, 1], init_scale=8.0)
    assert scales == [8, 4, 1]
    assert int(optax.tree.get(state, "precision_phase")) == 1


def test_no_loss_scale_is_needed_in_bfloat16():
    params, batches = data()
    step = scheduled("fast1|step|0.6", loss_scale="policy")
    state, reports = run(step, step.init(params), batches)
    assert ampx.find_loss_scale_state(state.opt_state) is None
    assert reports.loss_scale.tolist() == [1] * STEPS


def test_the_default_loss_scale_of_float16_is_dynamic():
    params, _ = data()
    state = scheduled(loss_scale="policy").init(params)
    assert float(ampx.current_loss_scale(state.opt_state)) == 2.0**16


# --- composition ---------------------------------------------------------------------------------


def test_it_is_saved_and_resumed_in_the_middle_of_the_half_phase_and_after_it(tmp_path):
    params, batches = data()
    step = scheduled()
    state = step.init(params)
    expected, _ = run(step, state, batches)
    done = 0
    with ocp.StandardCheckpointer() as checkpointer:
        for stop in (3, 6, STEPS):
            state, _ = run(step, state, batches, range(done, stop))
            checkpointer.save(tmp_path / str(stop), state._asdict())
            checkpointer.wait_until_finished()
            blank = jax.tree.map(jnp.zeros_like, state)
            state = ampx.TrainState(**checkpointer.restore(tmp_path / str(stop), blank._asdict()))
            done = stop
    chex.assert_trees_all_equal(state, expected)


def test_one_trace_and_donation():
    params, batches = data()
    step, traces = scheduled(), []

    def counted(state, batch):
        traces.append(1)
        return step(state, batch)

    jitted = jax.jit(counted, donate_argnums=0)
    state = step.init(params)
    types = jax.tree.map(jax.typeof, state)
    for i in range(STEPS):
        state, _ = jitted(state, rows(batches, i))
    assert len(traces) == 1
    assert jax.tree.map(jax.typeof, state) == types


def test_a_fused_optimizer_still_works_in_one_pass():
    params, batches = data()
    step = scheduled(tx=ampx.fused.adamw(0.01), max_grad_norm=1.0)
    assert can_apply(step.init(params).opt_state)
    state, reports = run(step, step.init(params), batches)
    plain = scheduled(tx=optax.adamw(0.01), max_grad_norm=1.0)
    expected, theirs = run(plain, plain.init(params), batches)
    chex.assert_trees_all_close(state.params, expected.params, rtol=1e-5)
    np.testing.assert_allclose(reports.global_norm, theirs.global_norm, rtol=1e-6)
    assert reports.phase.tolist() == theirs.phase.tolist()


def test_fused_without_a_loss_scale():
    params, batches = data()
    step = scheduled("fast1|step|0.6", tx=ampx.fused.adamw(0.01), loss_scale="policy")
    state, _ = run(step, step.init(params), batches)
    plain = scheduled("fast1|step|0.6", loss_scale="policy")
    expected, _ = run(plain, plain.init(params), batches)
    chex.assert_trees_all_close(state.params, expected.params, rtol=1e-5)


def test_windows_of_micro_steps_count_calls():
    params, batches = data()
    step = scheduled(tx=ampx.multi_steps(optax.adamw(0.01), 2))
    state, reports = run(step, step.init(params), batches)
    assert reports.phase.tolist() == [0] * 5 + [1] * 3
    assert int(state.step) == STEPS // 2


def test_a_scale_inside_a_window_would_change_under_its_sums():
    schedule = ampx.precision_schedule("fast|step", total_steps=9)
    tx = ampx.follow_schedule(ampx.multi_steps(dynamic(optax.sgd(0.1)), 2), schedule)
    with pytest.raises(ValueError, match="inside MultiStepsState, which may hold sums"):
        tx.init(jnp.ones(2))


def test_a_scale_inside_a_chain_is_told_to_come_out():
    """Even where the chain has no other link."""
    step = scheduled(tx=optax.chain(dynamic(optax.sgd(0.1))), loss_scale=None)
    with pytest.raises(ValueError, match=r"inside optax\.chain.*dynamic_loss_scale\(optax\.chain"):
        step.init(data()[0])


def test_each_phase_is_traced_once():
    traced = []

    def counted(w, x):
        traced.append(w.dtype)
        return jnp.mean(w * x.astype(w.dtype))

    grads_of = ampx.value_and_grad(
        counted, policy=ampx.PrecisionSchedule(((3, "O2"), ampx.Phase(FULL)))
    )
    jax.make_jaxpr(lambda phase: grads_of(jnp.ones(()), jnp.ones(4), phase=phase).grads)(0)
    assert traced == [jnp.bfloat16, jnp.float32]


@pytest.mark.slow
def test_micro_batches_and_auxiliary_output_of_two_dtypes():
    params, batches = data()

    def with_aux(params, batch):
        return loss_fn(params, batch), params["kernel"][0, 0]

    schedule = ampx.precision_schedule("fast1|step|0.6", total_steps=STEPS)
    step = ampx.train_step(
        with_aux,
        optax.sgd(0.1),
        policy=schedule,
        num_microbatches=2,
        has_aux=True,
        aux_reduction="last",
    )
    state, reports = run(step, step.init(params), batches)
    plain = scheduled("fast1|step|0.6", tx=optax.sgd(0.1), loss_scale="policy")
    expected, _ = run(plain, plain.init(params), batches)
    chex.assert_trees_all_close(state.params, expected.params, rtol=1e-2)
    assert reports.aux.dtype == np.float32
    rounded = reports.aux.astype(jnp.bfloat16).astype(np.float32)
    assert (rounded == reports.aux).tolist()[:5] == [True] * 5
    assert not (rounded == reports.aux)[5:].all()


@pytest.mark.slow
def test_over_devices_all_switch_at_once():
    params, batches = data()
    mesh = make_mesh((4,), ("data",))
    schedule = ampx.precision_schedule("fast|loss|1.05", final_loss=1.0)
    make = functools.partial(ampx.train_step, loss_fn, optax.adamw(0.05), policy=schedule)
    step = make(loss_scale=dynamic, axis_name="data")
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()))
    state, reports = run(mapped, step.init(params), batches)
    alone = make(loss_scale=dynamic)
    expected, theirs = run(alone, alone.init(params), batches)
    assert reports.phase.tolist() == theirs.phase.tolist()
    assert 0 < np.sum(reports.phase) < STEPS
    chex.assert_trees_all_close(state.params, expected.params, rtol=2e-2, atol=1e-3)


@pytest.mark.slow
def test_flax_train_states_and_nnx():
    params, batches = data()
    step = scheduled()
    expected, reports = run(step, step.init(params), batches)
    linen = train_state.TrainState.create(apply_fn=None, params=params, tx=step.tx)
    linen, theirs = run(step, linen, batches)
    chex.assert_trees_all_close(linen.params, expected.params, rtol=1e-6)
    assert theirs.phase.tolist() == reports.phase.tolist()

    class Net(nnx.Module):
        def __init__(self):
            self.kernel, self.head = (nnx.Param(params[name]) for name in ("kernel", "head"))

    def loss_of(model, batch):
        return loss_fn({"kernel": model.kernel[...], "head": model.head[...]}, batch)

    schedule = ampx.precision_schedule("fast|step|0.6", total_steps=STEPS)
    step = ampx.train_step(loss_of, optax.adamw(0.01), policy=schedule, loss_scale=dynamic)
    pair = (model := Net(), nnx.Optimizer(model, step.tx, wrt=nnx.Param))
    jitted = nnx.jit(step)
    for i in range(STEPS):
        pair, report = jitted(pair, rows(batches, i))
        assert int(report.phase) == reports.phase[i]
    chex.assert_trees_all_close(pair[0].kernel[...], expected.params["kernel"], rtol=1e-5)
    assert int(ampx.precision_phase(pair[1].opt_state)) == 1


def test_a_loop_of_ones_own():
    params, batches = data()
    schedule = ampx.precision_schedule("fast|step|0.6", total_steps=STEPS)
    tx = ampx.follow_schedule(dynamic(optax.adamw(0.01)), schedule)
    grads_of = ampx.value_and_grad(loss_fn, policy=schedule)

    @jax.jit
    def one(params, opt_state, batch):
        phase, scale = ampx.precision_phase(opt_state), ampx.current_loss_scale(opt_state)
        result = grads_of(params, batch, loss_scale=scale, phase=phase)
        updates, opt_state = tx.update(result.grads, opt_state, params, value=result.loss)
        return optax.apply_updates(params, updates), opt_state

    step = scheduled()
    expected, _ = run(step, step.init(params), batches)
    opt_state = tx.init(params)
    for i in range(STEPS):
        params, opt_state = one(params, opt_state, rows(batches, i))
    chex.assert_trees_all_close(params, expected.params, rtol=1e-6)


# --- strings, settings and refusals --------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "half", "options", "end"),
    [
        ("fast|step|0.9", "float16", {"total_steps": 1000}, (900, None)),
        ("fast1 | step | 0.2", "bfloat16", {"total_steps": 10}, (2, None)),
        ("fast|step", "float16", {"total_steps": 10}, (9, None)),
        ("fast1|loss", "bfloat16", {"final_loss": 2.0}, (None, 2.1)),
        ("fast|loss|1.5", "float16", {"final_loss": 2}, (None, 3.0)),
        # In floating point 0.29 * 100 is below 29, 0.28 * 100 and 0.55 * 100 above 28 and 55.
        ("fast|step|0.29", "float16", {"total_steps": 100}, (29, None)),
        ("fast|step|0.28", "float16", {"total_steps": 100}, (28, None)),
        ("fast|step|0.55", "float16", {"total_steps": 100}, (55, None)),
        ("fast|step|0.35", "float16", {"total_steps": 10}, (4, None)),
    ],
)
def test_strings(spec, half, options, end):
    first, last = ampx.precision_schedule(spec, **options).phases
    assert first.recipe.policy.compute_dtype == half
    assert first.recipe.loss_scale == ("dynamic" if half == "float16" else None)
    assert (first.until_step, first.until_loss) == end
    assert last == ampx.Phase("float32")


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("fast", {}, "three fields.*got 1 in 'fast'"),
        ("fast|step|0.9|1", {}, "got 4"),
        ("slow|step|0.9", {}, "field 1 .*'fast' .*'fast1'.*got 'slow'"),
        ("fast|epoch|0.9", {}, "field 2 .*'step' or 'loss', got 'epoch'"),
        ("fast|step|0.95", {"total_steps": 9}, "field 3 .*0.2 to 0.9 .*got '0.95'"),
        ("fast|step|0.1", {"total_steps": 9}, "field 3 .*0.2 to 0.9"),
        ("fast|loss|1.0", {"final_loss": 9}, "field 3 .*1.01 to 1.5"),
        ("fast|loss|1.6", {"final_loss": 9}, "field 3 .*1.01 to 1.5"),
        ("fast|loss|nan", {"final_loss": 9}, "got 'nan'"),
        ("fast|step|most", {"total_steps": 9}, "got 'most'"),
        ("fast|step|0.9", {}, "needs total_steps"),
        ("fast|loss", {}, "needs final_loss"),
        ("fast|step", {"total_steps": 9, "final_loss": 1.0}, "final_loss=1.0 has no meaning"),
        ("fast|loss", {"total_steps": 9, "final_loss": 1.0}, "total_steps=9 has no meaning"),
        ("fast|step", {"total_steps": 0}, "total_steps must be a positive int, got 0"),
        ("fast|loss", {"final_loss": -1.0}, "final_loss must be positive, got -1.0"),
        ("fast|loss", {"final_loss": np.inf}, "final_loss must be finite, got inf"),
        ("fast|step", {"total_steps": 9, "policy": "O2"}, "computes in bfloat16 and contradicts"),
        ("fast|step", {"total_steps": 9, "policy": "c=f16"}, "computes in float16 and contra"),
        ("fast|step", {"total_steps": 9, "policy": "p=f16,c=f32"}, "stores parameters in float16"),
        ("fast|step", {"total_steps": 9, "level": "O3"}, "level must be one of"),
        ("fast|step", {"total_steps": 9, "smoothing": 5}, "smoothing=5 has no loss to smooth"),
        ("fast|loss", {"final_loss": 9, "smoothing": 0}, "smoothing must be a positive int, got 0"),
        (
            "fast|step",
            {"total_steps": 9, "policy": ampx.opt_level("O1")},
            "policy=O1 bfloat16 is less precise than the float16 of 'fast.step', .* take 'float32'",
        ),
        (
            "fast1|step",
            {"total_steps": 9, "level": "O1", "policy": "O1"},
            "policy=O1 bfloat16 is what the half phase .* nothing would ever change",
        ),
    ],
)
def test_wrong_strings_are_refused_with_field_value_and_bounds(spec, options, message):
    with pytest.raises(ValueError, match=message):
        ampx.precision_schedule(spec, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ampx.precision_schedule(0.9, total_steps=9), "spec must be a string"),
        (lambda: ampx.precision_schedule("fast|step", total_steps=9.0), "total_steps must be"),
        (lambda: ampx.precision_schedule("fast|loss", final_loss="2"), "final_loss must be a num"),
        (lambda: ampx.precision_schedule("fast|step", total_steps=9, policy=None), "policy must"),
        (lambda: ampx.Phase(None), "policy must be"),
        (lambda: ampx.Phase("O2", until_step=1.5), "until_step must be a positive int"),
        (lambda: ampx.Phase("O2", until_step=np.True_), "until_step must be a positive int"),
        (lambda: ampx.Phase("O2", until_step=np.float64(3)), "until_step must be a positive int"),
        (lambda: ampx.Phase("O2", until_loss=True), "until_loss must be a number"),
        (lambda: ampx.PrecisionSchedule((3, "O2")), "phases must be a tuple of .*, got 3 among"),
        (lambda: ampx.follow_schedule(optax.sgd(0.1), "fast|step"), "schedule must be"),
    ],
)
def test_wrong_types_are_refused(call, message):
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize(
    ("each", "message"),
    [
        ((), "phases is empty"),
        ((ampx.Phase("O2", until_step=3),), "last phase has an end"),
        ((ampx.Phase("O2"), ampx.Phase("O0")), r"phase 0 \(O2 bfloat16\) has no end"),
        (("O2", "O0"), r"phase 0 \(O2 bfloat16\) has no end"),
        (
            (ampx.Phase("O2", until_step=3), ampx.Phase("O1", until_step=3), ampx.Phase("O0")),
            "phase 1 ends at until_step=3, but one before it ends at 3",
        ),
        ((ampx.Phase("O3", until_step=3), ampx.Phase("O0")), "in one dtype.*O3 bfloat16 in bfloat"),
    ],
)
def test_phases_that_do_not_fit_are_refused(each, message):
    with pytest.raises(ValueError, match=message):
        ampx.PrecisionSchedule(each)


@pytest.mark.parametrize(
    ("spec", "policy", "last"),
    [
        ("fast", "O1", "O1 float16"),
        ("fast1", "O1", "O1 bfloat16"),
        ("fast1", ampx.opt_level("O1", half_dtype=jnp.float16), "O1 float16"),
        ("fast", "O0", "O0"),
        ("fast1", ampx.Policy(), "p=f32,c=f32,o=f32"),
    ],
)
def test_the_original_precision_is_at_least_as_precise_as_the_half_phase(spec, policy, last):
    schedule = ampx.precision_schedule(f"{spec}|step", total_steps=9, policy=policy)
    assert str(schedule).endswith(f", then {last}")
    if policy == "O1":
        assert schedule.recipes[1].loss_scale == schedule.recipes[0].loss_scale


def test_steps_may_be_counted_by_numpy():
    phase = ampx.Phase("O2", until_step=np.int64(3))
    assert phase == ampx.Phase("O2", until_step=3) and type(phase.until_step) is int
    with pytest.raises(ValueError, match="until_step must be a positive int, got 0"):
        ampx.Phase("O2", until_step=np.uint8(0))


def test_what_is_missing_at_run_time_is_named():
    by_loss = ampx.precision_schedule("fast1|loss", final_loss=2.0)
    tx = ampx.follow_schedule(optax.sgd(0.1), by_loss)
    with pytest.raises(ValueError, match="waits for a loss.*value=loss"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
    by_step = ampx.precision_schedule("fast|step", total_steps=9)
    with pytest.raises(ValueError, match="phases with a loss scale.*wrap it"):
        ampx.follow_schedule(optax.sgd(0.1), by_step).init(jnp.ones(2))
    with pytest.raises(TypeError, match="phase="):
        ampx.value_and_grad(loss_fn, policy=by_step)({}, {})
    with pytest.raises(ValueError, match=r"phase must be in \[0, 2\), got 2"):
        ampx.value_and_grad(loss_fn, policy=by_step)({}, {}, phase=2)
    with pytest.raises(ValueError, match="is a precision schedule.*ampx.precision_schedule"):
        ampx.train_step(loss_fn, optax.sgd(0.1), policy="fast|step|0.9")
    with pytest.raises(ValueError, match="a number >= 1, got 0.25"):
        ampx.Phase(dataclasses.replace(LOW, loss_scale=0.25))
    with pytest.raises(ValueError, match="phases with a loss scale"):
        ampx.train_step(loss_fn, optax.sgd(0.1), policy=by_step, loss_scale=None).init(data()[0])
    uneven = ampx.train_step(
        lambda params, batch: (0.0 * params, {"a": params} if params.dtype == "f" else params),
        optax.sgd(0.1),
        policy=ampx.precision_schedule("fast1|step", total_steps=9),
        has_aux=True,
    )
    with pytest.raises(
        ValueError,
        match="in phase 1: return one structure at every precision, only dtypes may differ",
    ):
        uneven(uneven.init(jnp.ones(())), jnp.ones(2))

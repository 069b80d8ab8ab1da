"""A precision schedule inside a pipeline: it switches in the step in which one device would."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pipeline_steps import (
    assert_close,
    loss_fn,
    make_batch,
    make_grads_of,
    make_params,
    placed,
)

import ampx
from ampx.pipelining import one_f_one_b, plan, zero_bubble

STEPS = 6
dynamic = functools.partial(ampx.dynamic_loss_scale, init_scale=2.0**10, growth_interval=2)
by_step = functools.partial(ampx.precision_schedule, total_steps=STEPS)


def rows_by_microbatch(batch, microbatches):
    """The rows in an order in which one device splits them as the pipeline does."""
    return jax.tree.map(
        lambda leaf: np.moveaxis(leaf.reshape(-1, microbatches, *leaf.shape[1:]), 1, 0).reshape(
            leaf.shape
        ),
        batch,
    )


def make_batches():
    batches = [make_batch(number) for number in range(STEPS)]
    batches[1] = make_batch(1, spoilt=(3, 1))  # infinite in one layer: skipped
    return batches


def stack(batches):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *batches)


@functools.cache
def both_steps(schedule, pipeline, **options):
    """The step over a pipeline, and that of one device."""
    tx = optax.sgd(0.05, momentum=0.9)
    grads_of = make_grads_of(pipeline, data=1, policy=schedule)
    return (
        ampx.train_step(grads_of, tx, **options),
        ampx.train_step(
            loss_fn, tx, policy=schedule, normalize="weights", num_microbatches=4, **options
        ),
    )


CASES = {
    "fast": (by_step("fast|step|0.5"), one_f_one_b(2, 4), 2e-3),
    "fast to O1": (by_step("fast|step|0.5", policy="O1"), zero_bubble(2, 4), 3e-3),
    "fast1": (by_step("fast1|step|0.5"), one_f_one_b(2, 4), 2e-2),
    "loss": (
        ampx.precision_schedule("fast|loss|1.01", final_loss=2.9, smoothing=2),
        one_f_one_b(2, 4),
        2e-3,
    ),
}  # fmt: skip


# Tolerances are those of sums in half precision, which a fusion more or less rounds otherwise.
@pytest.mark.slow
@pytest.mark.whole("fast", "fast1")  # a part of "fast to O1", and another half type
@pytest.mark.parametrize("case", CASES)
def test_a_scan_of_steps_equals_that_of_one_device(case):
    schedule, pipeline, rtol = CASES[case]
    options = dict(loss_scale=dynamic) if schedule.loss_scale == "dynamic" else {}
    step, alone = both_steps(schedule, pipeline, **options)
    batches = make_batches()
    quick = dict(compiler_options={"xla_backend_optimization_level": 0})
    state, reports = jax.jit(functools.partial(jax.lax.scan, step), **quick)(
        placed(step, make_params()), stack(batches)
    )
    expected, wanted = jax.jit(functools.partial(jax.lax.scan, alone), **quick)(
        alone.init(make_params()), stack([rows_by_microbatch(batch, 4) for batch in batches])
    )
    assert reports.phase.tolist() == wanted.phase.tolist()
    assert reports.loss_scale.tolist() == wanted.loss_scale.tolist()
    assert reports.overflow.tolist() == wanted.overflow.tolist()
    np.testing.assert_allclose(reports.loss, wanted.loss, rtol=rtol)
    assert_close(state.params, expected.params, rtol)
    assert_close(state.opt_state, expected.opt_state, 10 * rtol)
    switch = 3 if "loss" not in case else int(np.sum(reports.phase == 0))
    assert 1 < switch < STEPS
    assert reports.phase.tolist() == [0] * switch + [1] * (STEPS - switch)
    if case == "fast":
        assert reports.loss_scale.tolist() == [2.0**10, 2.0**10, 2.0**9, 1, 1, 1]
        assert reports.overflow.tolist() == [False, True, False, False, False, False]


def half_types_in(function, *args, **kwargs):
    text = str(jax.make_jaxpr(functools.partial(function, **kwargs))(*args))
    return set(re.findall(r"\bb?f16(?=\[)", text))


def test_each_phase_alone_computes_at_its_own_precision():
    schedule = by_step("fast|step|0.5")
    grads_of = make_grads_of(one_f_one_b(2, 4), data=1, policy=schedule)
    args = make_params(), make_batch(0)
    assert (
        half_types_in(grads_of, *args, phase=0)
        == half_types_in(grads_of.in_phase(0), *args)
        == {"f16"}
    )
    assert (
        half_types_in(grads_of, *args, phase=1)
        == half_types_in(grads_of.in_phase(1), *args)
        == set()
    )
    assert half_types_in(grads_of.value, *args, phase=jnp.int32(0)) == {"f16"}
    step, _ = both_steps(schedule, one_f_one_b(2, 4), loss_scale=dynamic)
    state = step.init(make_params())
    assert half_types_in(step.in_phase(1), state, make_batch(0)) == set()


def test_what_is_missing_or_impossible_is_named():
    schedule = by_step("fast|step|0.5")
    grads_of = make_grads_of(one_f_one_b(2, 4), data=1, policy=schedule)
    args = make_params(), make_batch(0)
    with pytest.raises(TypeError, match="needs to know the phase: call it with phase=ampx"):
        grads_of(*args)
    with pytest.raises(TypeError, match="needs to know the phase"):
        grads_of.value(*args)
    with pytest.raises(IndexError, match="one of 2 phases, got 2"):
        grads_of.in_phase(2)
    plain = make_grads_of(one_f_one_b(2, 4), data=1)
    with pytest.raises(IndexError, match="one of 0 phases"):
        plain.in_phase(0)
    with pytest.raises(TypeError, match="phase belongs to a precision schedule"):
        plain(*args, phase=0)
    with pytest.raises(ValueError, match=r"a program for each phase: .*plan\(grads_of.in_phase"):
        plan(grads_of, *args)
    # The schedule is the pipeline's, and the error shows it in one line.
    with pytest.raises(ValueError) as error:
        ampx.train_step(plain, optax.sgd(1.0), policy=schedule)
    assert "policy=PrecisionSchedule('O2 float16 until step 3, then p=f32" in str(error.value)
    assert len(str(error.value)) < 250

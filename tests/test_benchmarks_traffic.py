"""The counter of memory traffic, on programs whose traffic is known by hand."""

import jax
import jax.numpy as jnp
import optax
import pytest

import ampx
from ampx import fused
from benchmarks.aot import Counts, counted
from benchmarks.fused_traffic import (
    FLOORS,
    LEAF,
    LEAVES,
    Traffic,
    by_apply,
    by_update,
    compiled_traffic,
    traffic,
)
from benchmarks.optax_updates import build_steps, count, find_names

# A fusion with two outputs (one gradient given twice, one number), a copy, a call, a conditional.
BY_HAND = """\
HloModule by_hand, is_scheduled=true

%inside (p: f32[4096]) -> f32[4096] {
  %p = f32[4096]{0} parameter(0)
  ROOT %twice = f32[4096]{0} multiply(%p, %p)
}

%cheap (c: (f32[], f32[4096])) -> f32[] {
  %c = (f32[], f32[4096]{0}) parameter(0)
  ROOT %first = f32[] get-tuple-element(%c), index=0
}

%dear (d: (f32[], f32[4096])) -> f32[] {
  %d = (f32[], f32[4096]{0}) parameter(0)
  %second = f32[4096]{0} get-tuple-element(%d), index=1
  ROOT %norm = f32[] fusion(%second), kind=kInput, calls=%inside
}

%called (e: bf16[4096]) -> s8[4096] {
  %e = bf16[4096]{0:T(256)} parameter(0)
  ROOT %small = s8[4096]{0} fusion(%e), kind=kLoop, calls=%inside
}

ENTRY %main (g: f32[4096], h: f32[], b: bf16[4096]) -> (f32[4096], pred[4096], s8[4096], f32[]) {
  %g = f32[4096]{0} parameter(0)
  %h = f32[] parameter(1)
  %b = bf16[4096]{0:T(256)} parameter(2)
  %both = (f32[4096]{0}, pred[4096]{0}) fusion(%g, %g, %h), kind=kLoop, calls=%inside
  %one = f32[4096]{0} get-tuple-element(%both), index=0
  %two = pred[4096]{0} get-tuple-element(%both), index=1
  %copied = f32[4096]{0} copy(%one), metadata={op_name="a(b)"}
  %third = s8[4096]{0} call(%b), to_apply=%called
  %pair = (f32[], f32[4096]{0}) tuple(%h, %one)
  %last = f32[] conditional(%h, %pair, %pair), branch_computations={%cheap, %dear}
  ROOT %all = (f32[4096], pred[4096], s8[4096], /*i=3*/f32[]) tuple(%copied, %two, %third, %last)
}
"""


def test_a_program_counted_by_hand():
    fusion, copy, call, norm = 4096 * (4 + 4 + 1) + 4, 4096 * 8, 4096 * 3, 4096 * 4 + 4
    assert traffic(BY_HAND) == Traffic(fusion + copy + call, 3, 3)
    assert traffic(BY_HAND, max) == Traffic(fusion + copy + call + norm, 4, 4)


def test_the_same_program_as_compiled_ahead_of_time_counts_it():
    fusion = 4096 * (4 + 1) + 2 * 4096 * 4 + 4  # an operand that is given twice counts twice
    copy, call, conditional = 4096 * 8, 4096 * 3, 4  # of a conditional, its result alone
    assert counted(BY_HAND) == Counts(4, 0, fusion + copy + call + conditional)
    norm = 4096 * 4 + 4  # of more than 8 bytes a parameter it would be an update
    assert counted(BY_HAND, elements=2049) == counted(BY_HAND)
    assert counted(BY_HAND, elements=2048) == Counts(4, 0, fusion + copy + call + norm)


def _compiled(fun, *args):
    return jax.jit(fun, donate_argnums=0).lower(*args).compile().as_text()


def test_an_update_in_place_reads_and_writes():
    x = jnp.ones(5000)
    assert traffic(_compiled(lambda p, g: p - 0.1 * g, x, x)) == Traffic(3 * 4 * 5000, 1, 1)


def test_small_kernels_are_no_passes():
    found = traffic(_compiled(lambda x: x + 1, jnp.ones(10)))
    assert (found.kernels, found.passes) == (1, 0)


def test_a_loop_is_refused():
    def looping(x):
        return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + c[1]), (0, x))

    with pytest.raises(ValueError, match="loop"):
        traffic(_compiled(looping, jnp.ones(5000)))


@pytest.mark.parametrize(
    ("tx", "expected"), [(optax.sgd(0.1), 12), (optax.sgd(0.1, momentum=0.9), 24)]
)
def test_optax_on_a_cpu_with_one_output_a_kernel(tx, expected):
    if jax.default_backend() != "cpu":
        expected = {12: 12, 24: 20}[expected]
    found = compiled_traffic(by_update(tx), tx)
    assert found.moved / (LEAVES * LEAF) == pytest.approx(expected, rel=1e-4)


def test_a_scaled_update_reads_each_array_as_often_as_it_must():
    """It took the gradient a third time, to ask for each element whether its square is finite."""
    if jax.default_backend() != "cpu":
        pytest.skip("the count is that of XLA's CPU backend")
    tx = ampx.dynamic_loss_scale(fused.adamw(1e-3))
    found = compiled_traffic(by_apply(tx, max_norm=1.0), tx)
    _, floor = FLOORS["AdamW, scaled, clipped, skipping"]
    assert found.moved / (LEAVES * LEAF) == pytest.approx(floor, rel=1e-3)


def test_a_skip_around_a_clip_moves_no_more_than_the_fused_update():
    if jax.default_backend() != "cpu":
        pytest.skip("the count is that of XLA's CPU backend")
    steps = build_steps("clip, adamw")
    moved, temporary = count(*steps["skipping"])
    # 44: see `FLOORS`. One byte is what the search for infinities may need, and rarely does.
    assert moved == pytest.approx(44, rel=1e-3)
    assert temporary < 1.01


@pytest.mark.parametrize(
    ("name", "expected"), [("lars", 32), ("fromage", 20), ("lamb", 60), ("adafactor", 48)]
)
def test_norms_inside_of_a_branch_are_taken_once(name, expected):
    """By itself optax writes out what it chooses between, for a derivative at a norm of zero."""
    if jax.default_backend() != "cpu":
        pytest.skip("the count is that of XLA's CPU backend")
    steps = build_steps(name)
    with jax.numpy_dtype_promotion("standard"):
        alone, skipping = (count(*steps[form])[0] for form in ("optax", "skipping"))
    assert skipping == pytest.approx(expected, abs=0.5)
    assert alone > skipping + 7


@pytest.mark.sampled(5)
@pytest.mark.slow_but("adabelief", "adan")
@pytest.mark.parametrize("name", find_names())
def test_fuse_moves_no_more_than_a_branch_around_the_optimizer(name):
    """By its own rules, or because it takes the branch."""
    if jax.default_backend() != "cpu":
        pytest.skip("the count is that of XLA's CPU backend")
    steps = build_steps(name)
    with jax.numpy_dtype_promotion("standard"):
        (moved, temporary), (by_rules, temporary_of_rules) = (
            count(*steps[form]) for form in ("skipping", "derived")
        )
    assert temporary_of_rules < temporary + 0.1
    if moved is not None:  # a loop hides it
        assert by_rules < 1.001 * moved

"""The switches of a tick run in one order on all devices, whatever they read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collective_order import find_needed
from jax import lax
from pipeline_models import find_inner_copies, make_batch, make_params, pipeline

from ampx.diagnostics.hlo import parse_computations
from ampx.jaxprs import reading
from ampx.pipelining import gpipe, interleaved, one_f_one_b, zero_bubble, zero_bubble_v
from ampx.pipelining.runtime import turns
from ampx.pipelining.runtime.turns import first_turn, switch_in_place, switch_in_turn

BRANCHES = [jnp.sin, jnp.cos, jnp.tanh]


def two_switches(in_turn):
    """Two switches, neither of which reads what the other returns."""

    def switches(index, other, x):
        if not in_turn:
            return lax.switch(index, BRANCHES, x), lax.switch(other, BRANCHES, x + 1)
        turn, a = switch_in_turn(first_turn("stage"), index, BRANCHES, x)
        turn, b = switch_in_turn(turn, other, BRANCHES, x + 1)
        return a, b, turn

    return jax.jit(switches)


ARGUMENTS = jnp.int32(1), jnp.int32(2), jnp.linspace(-1.0, 1.0, 4)


def test_each_switch_runs_the_branch_asked_for():
    for first in range(3):
        for second in range(3):
            expected = two_switches(False)(first, second, ARGUMENTS[2])
            *found, turn = two_switches(True)(first, second, ARGUMENTS[2])
            np.testing.assert_array_equal(found, expected)
            assert turn == second and turn.dtype == jnp.int32


@pytest.mark.parametrize("in_turn", [True, False])
def test_in_the_compiled_program_a_switch_reads_a_result_of_the_one_before(in_turn):
    text = two_switches(in_turn).lower(*ARGUMENTS).compile().as_text()
    computations, entry = parse_computations(text)
    first, second = [i.name for i in computations[entry] if i.opcode == "conditional"]
    assert (first in find_needed(computations[entry])[second]) == in_turn


def write_rows(chosen, table):
    """A loop that writes row after row: what each branch makes of it, or nothing."""

    def step(carry, row):
        turn, table = carry

        def writing(compute):
            return lambda table: (jnp.float32(row), table.at[row].set(compute(table[row])))

        turn, result, table = switch_in_place(
            turn,
            chosen,
            lambda numbers: jnp.asarray(numbers)[row],
            lambda: jnp.float32(-1),
            list(map(writing, BRANCHES)),
            table,
        )
        return (turn, table), result

    (turn, table), results = lax.scan(step, (first_turn("stage"), table), jnp.arange(len(chosen)))
    return turn, results, table


@pytest.mark.parametrize("in_place", [True, False])
def test_a_branch_writes_its_part_of_a_buffer(in_place, monkeypatch):
    """Also in the form for the other versions of jax."""
    monkeypatch.setattr(turns, "_WRITES_IN_PLACE", in_place)
    chosen = np.array([0, 2, 1, 3, 0], np.int32)
    table = np.linspace(-1, 1, 35, dtype=np.float32).reshape(5, 7)
    turn, results, found = jax.jit(lambda *args: write_rows(*args))(chosen, table)
    made = [lambda x: x, *BRANCHES]
    expected = np.stack([made[n](row) for n, row in zip(chosen, table, strict=True)])
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_array_equal(results, np.where(chosen, np.arange(5), -1))
    assert turn == 0


def test_the_rest_of_the_buffer_is_not_copied():
    compiled = jax.jit(write_rows).lower(jnp.zeros(5, jnp.int32), jnp.ones((5, 7, 11))).compile()
    assert not [copy for copy in find_inner_copies(compiled.as_text()) if "5,7,11" in copy]


@pytest.mark.parametrize(
    "schedule",
    [gpipe(2, 2), one_f_one_b(2, 3), interleaved(2, 4), zero_bubble(2, 3), zero_bubble_v(2, 3)],
    ids=lambda schedule: schedule.name,
)
def test_all_switches_of_a_tick_wait_for_each_other(schedule):
    batch = make_batch(2 * schedule.num_microbatches)
    jaxpr = jax.make_jaxpr(pipeline(schedule))(make_params(), batch)
    (tick,) = find_ticks(jaxpr)
    switches = [number for number, eqn in enumerate(tick.eqns) if eqn.primitive.name == "cond"]
    # Forward, backward, perhaps weight gradient, and an exchange or two each way.
    assert len(switches) >= 4
    for before, after in zip(switches, switches[1:], strict=False):
        index = tick.eqns[after].invars[0]
        assert before in reading.find_equations_for(tick, [index])


def find_ticks(jaxpr):
    """The bodies of loops that have switches around exchanges."""
    found = []
    for eqn in reading.open_jaxpr(jaxpr).eqns:
        for body in map(reading.open_jaxpr, reading.inner_jaxprs(eqn)):
            names = {inner.primitive.name for inner in body.eqns}
            if eqn.primitive.name == "scan" and "cond" in names:
                found.append(body)
            else:
                found += find_ticks(body)
    return found

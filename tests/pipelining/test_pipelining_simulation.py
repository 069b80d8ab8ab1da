"""How long schedules take and what they keep, against closed forms and naive computations."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_orders import as_schedule, random_orders

from ampx.pipelining.runtime.lowering import lower
from ampx.pipelining.schedules.actions import Action, needs_of, result_of
from ampx.pipelining.schedules.generators import (
    eager_one_f_one_b,
    forward_only,
    gpipe,
    interleaved,
    looped_breadth_first,
    make_schedule,
    one_f_one_b,
)
from ampx.pipelining.schedules.schedule import Schedule
from ampx.pipelining.schedules.zero_bubbles import (
    dualpipe_v,
    interleaved_zero_bubble,
    zero_bubble,
    zero_bubble_v,
)

SIZES = [(1, 1), (1, 4), (2, 1), (2, 5), (3, 2), (4, 4), (4, 8), (5, 13)]
WHOLE = ["gpipe", "1f1b", "eager-1f1b", "interleaved", "looped-bfs"]
HALVED = ["zero-bubble", "interleaved-zero-bubble", "zero-bubble-v", "dualpipe-v"]
NAMES = [*WHOLE, *HALVED, "forward-only"]


@pytest.mark.parametrize("mode", ["async", "lockstep"])
@pytest.mark.parametrize(
    ("name", "chunks", "expected"),
    [
        ("gpipe", None, (0.727, 0.914, 0.821)),
        ("1f1b", None, (0.727, 0.914, 0.821)),
        ("interleaved", 2, (0.842, 0.955, 0.901)),
        ("interleaved", 4, (0.914, 0.977, 0.948)),
        ("looped-bfs", 2, (0.842, 0.955, 0.901)),
    ],
)
def test_efficiency_in_step_is_that_of_independent_devices(mode, name, chunks, expected):
    """One program for all devices costs no time, if a tick has a forward and a backward."""
    found = [
        make_schedule(name, *size, chunks=chunks).simulate(mode=mode, backward=2).efficiency
        for size in [(4, 8), (4, 32), (8, 32)]
    ]
    assert found == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("schedule", [zero_bubble, interleaved_zero_bubble])
@pytest.mark.parametrize("size", [(1, 1), (2, 2), (3, 4), (4, 6), (4, 13), (8, 32)])
@pytest.mark.parametrize("costs", [(1, 1, 1), (2, 1, 1), (1, 2, 0.5), (1.5, 1.25, 1)])
def test_in_step_weight_gradients_fill_as_much_as_on_independent_devices(schedule, size, costs):
    """With at least 2 (S - 1) micro-batches, where `W` is no longer than `F` and `I`."""
    times = dict(zip(("forward", "input_grad", "weight_grad"), costs, strict=True))
    schedule = schedule(*size)
    alone = schedule.simulate(**times).makespan
    assert schedule.simulate(mode="lockstep", **times).makespan == pytest.approx(alone)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("zero-bubble", (1, 1, 1)),
        ("interleaved-zero-bubble", (1, 1, 1)),
        ("zero-bubble-v", (1, 1, 1)),
        ("dualpipe-v", (1.06, 1.02, 1.04)),
    ],
)
def test_what_lockstep_costs_schedules_with_halved_backwards(name, most):
    for size, bound in zip([(4, 8), (4, 32), (8, 32)], most, strict=True):
        schedule = make_schedule(name, *size)
        alone = schedule.simulate().makespan
        assert schedule.simulate(mode="lockstep").makespan <= bound * alone


@pytest.mark.parametrize("size", [(3, 3), (4, 2), (4, 5), (6, 7), (8, 8), (8, 9)])
@pytest.mark.parametrize("name", ["zero-bubble", "interleaved-zero-bubble", "zero-bubble-v"])
def test_few_microbatches_lose_nothing_in_step_where_all_actions_are_equally_long(name, size):
    """There full ticks take up to 1.19 of it: too few devices have a gap for a weight gradient."""
    schedule = make_schedule(name, *size)
    lockstep = schedule.simulate(mode="lockstep", stash="residuals")
    assert lockstep.makespan <= schedule.simulate().makespan


def time_on_grid(schedule, costs):
    """How long a schedule takes if each column of its grid lasts as long as its longest action."""
    return sum(
        max((costs[row[tick].kind] for row in schedule.rows if row[tick]), default=0)
        for tick in range(schedule.num_ticks)
    )


@pytest.mark.parametrize("input_grad", [1.0, 1.5, 2.0])
def test_no_order_takes_longer_in_step_than_tick_by_tick_on_its_grid(input_grad):
    costs = {"F": 1.0, "I": input_grad, "W": 1.0, "B": input_grad + 1}
    equal = 0
    for seed in range(80):
        num_devices, num_microbatches = 2 + seed % 3, 2 + seed % 5
        rows, device_of = random_orders(seed, num_devices + seed % 2, num_devices, num_microbatches)
        schedule = as_schedule(rows, device_of, num_microbatches).aligned()
        lockstep = schedule.simulate(mode="lockstep", input_grad=input_grad, weight_grad=1.0)
        on_grid = time_on_grid(schedule, costs)
        assert lockstep.makespan <= on_grid + 1e-6
        equal += lockstep.makespan == pytest.approx(on_grid)
    assert 0 < equal < 80, "orders of which each kind of ticks is the better one"


def test_what_stages_keep_decides_which_ticks_a_program_has():
    schedule, recomputing = zero_bubble(4, 4), {"input_grad": 2, "weight_grad": 1}
    single, full = (schedule.simulate(mode="lockstep", stash=s) for s in ("residuals", "inputs"))
    assert single.makespan == schedule.num_ticks < full.makespan
    single, full = (
        schedule.simulate(mode="lockstep", stash=s, **recomputing) for s in ("residuals", "inputs")
    )
    assert full.makespan < single.makespan
    assert schedule.simulate(mode="lockstep", **recomputing).makespan == full.makespan
    for call in (schedule.simulate, schedule.liveness):
        with pytest.raises(ValueError, match=r"stash must be one of .*'inputs'.*got 'all'"):
            call(mode="lockstep", stash="all")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("backward", [1, 2, 3.5])
def test_whole_backwards_lose_nothing_in_step(name, size, backward):
    schedule = make_schedule(name, *size)
    lockstep = schedule.simulate(mode="lockstep", backward=backward)
    assert lockstep.makespan == pytest.approx(schedule.simulate(backward=backward).makespan)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("costs", [(1, 2), (2, 1), (1.5, 1.5)])
def test_idle_time_has_its_closed_form(size, costs):
    (stages, microbatches), (forward, backward) = size, costs
    waiting = (stages - 1) * (forward + backward)
    for schedule in (gpipe, one_f_one_b, eager_one_f_one_b):
        result = schedule(*size).simulate(forward=forward, backward=backward)
        assert result.idle == pytest.approx([waiting] * stages)
    result = forward_only(*size).simulate(forward=forward)
    assert result.idle == pytest.approx([(stages - 1) * forward] * stages)
    assert gpipe(*size).simulate().bubble_fraction == pytest.approx(
        (stages - 1) / (microbatches + stages - 1)
    )


@pytest.mark.parametrize("size", [size for size in SIZES if size[1] >= size[0]])
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_chunks_divide_the_idle_time(size, chunks):
    """Also where the micro-batches are no multiple of the devices. A chunk costs its share."""
    for schedule in (interleaved, looped_breadth_first):
        result = schedule(*size, chunks).simulate(forward=1 / chunks, backward=2 / chunks)
        assert result.idle == pytest.approx([(size[0] - 1) * 3 / chunks] * size[0])


@pytest.mark.parametrize("size", [size for size in SIZES if size[1] >= size[0]])
@pytest.mark.parametrize("costs", [(1, 1, 1), (1, 2, 1), (2, 1, 0.5), (1, 1.5, 0.5), (1, 1, 3)])
def test_zero_bubble_waits_for_what_weight_gradients_cannot_fill(size, costs):
    """(S-1)(F+I-W), as long as W is no longer than I."""
    forward, inputs, weights = costs
    expected = (size[0] - 1) * (forward + max(0, inputs - weights))
    for schedule in (zero_bubble, interleaved_zero_bubble):
        result = schedule(*size).simulate(forward=forward, input_grad=inputs, weight_grad=weights)
        assert result.idle == pytest.approx([expected] * size[0])


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5, 8])
def test_zero_bubble_v_never_waits_between_its_first_and_last_action(num_stages):
    for num_microbatches in (2 * num_stages - 1, 2 * num_stages + 3):
        schedule = zero_bubble_v(num_stages, num_microbatches)
        for device, row in enumerate(schedule.rows):
            assert None not in row[device : device + 6 * num_microbatches]
        assert schedule.num_ticks == 6 * num_microbatches + num_stages - 1


def play_in_pairs(schedule: Schedule, costs: dict[str, float], pair: float) -> list[float]:
    """The idle time of each device where a forward and a backward beside it are one action.

    A pair is a forward and a whole backward of the device's other stage, right after it.
    """
    orders: list[list[tuple[Action, ...]]] = []
    for row in schedule.rows:
        left, order = [action for action in row if action is not None], []
        while left:
            paired = [a.kind for a in left[:2]] == ["F", "B"] and left[0].stage != left[1].stage
            order.append(tuple(left[: 1 + paired]))
            left = left[1 + paired :]
        orders.append(order)
    ends: dict[Action, float] = {}
    clocks, busy = [0.0] * len(orders), [0.0] * len(orders)
    while any(orders):
        for device, order in enumerate(orders):
            while order:
                needs = {n for action in order[0] for n in needs_of(action, schedule.num_stages)}
                if not needs <= ends.keys():
                    break
                actions = order.pop(0)
                length = pair if len(actions) == 2 else costs[actions[0].kind]
                clocks[device] = max([clocks[device], *(ends[need] for need in needs)]) + length
                ends |= {result_of(action): clocks[device] for action in actions}
                busy[device] += length
    return [max(clocks) - own for own in busy]


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 2), (2, 4), (2, 7), (4, 8), (4, 11)])
@pytest.mark.parametrize(("costs", "pair"), [((1, 1, 1), 3), ((1, 1, 1), 2.5), ((1, 1.5, 1), 3.5)])
def test_dualpipe_v_waits_as_its_authors_say(stages, microbatches, costs, pair):
    """(P-1) (F&B + B - 3W) on the device that waits longest, where the two of a pair end together.

    Where they do not, it waits no longer.
    """
    forward, inputs, weights = costs
    schedule = dualpipe_v(stages, microbatches)
    lengths = {"F": forward, "B": inputs + weights, "I": inputs, "W": weights}
    most = (stages - 1) * (pair + inputs - 2 * weights)
    assert max(play_in_pairs(schedule, lengths, pair)) == pytest.approx(most)
    if pair == lengths["F"] + lengths["B"]:
        alone = schedule.simulate(forward=forward, input_grad=inputs, weight_grad=weights)
        assert max(alone.idle) <= most + 1e-9


def relaxed(schedule: Schedule, costs: dict[str, float], delay: float) -> dict[Action, float]:
    """The ends of all actions, by raising them until nothing changes."""
    ends: dict[Action, float] = {a: 0.0 for row in schedule.rows for a in row if a is not None}
    before = dict(
        pair[::-1]
        for row in schedule.rows
        for pair in itertools.pairwise(action for action in row if action is not None)
    )

    def start(action: Action) -> float:
        stage, kind, microbatch = action
        own = {"F": [], "B": ["F"], "I": ["F"], "W": ["I"]}[kind]
        there = {"F": (-1, "F"), "B": (1, "BI"), "I": (1, "BI"), "W": (0, "")}[kind]
        times = [ends[Action(stage, k, microbatch)] for k in own]
        for k in there[1]:
            other = stage + there[0]
            if Action(other, k, microbatch) in ends:
                away = schedule.device_of[other] != schedule.device_of[stage]
                times.append(ends[Action(other, k, microbatch)] + delay * away)
        return max([0.0, *times, *([ends[before[action]]] if action in before else [])])

    while True:
        later = {action: start(action) + costs[action.kind] for action in ends}
        if later == ends:
            return ends
        ends = later


@given(
    st.sampled_from(NAMES),
    st.integers(1, 4),
    st.integers(1, 5),
    st.tuples(*[st.sampled_from([0.25, 0.5, 1.0, 1.75]) for _ in range(3)]),
    st.sampled_from([0.0, 0.5]),
)
def test_independent_devices_go_as_soon_as_they_can(name, stages, microbatches, costs, delay):
    schedule = make_schedule(name, stages, microbatches)
    forward, inputs, weights = costs
    result = schedule.simulate(
        forward=forward, input_grad=inputs, weight_grad=weights, communication=delay
    )
    expected = relaxed(
        schedule, {"F": forward, "I": inputs, "W": weights, "B": inputs + weights}, delay
    )
    assert {action: end for action, (_, end) in result.times.items()} == expected
    assert result.makespan == max(expected.values())


@pytest.mark.parametrize("name", NAMES)
def test_with_equal_costs_the_ticks_of_the_grid_are_the_times(name):
    schedule = make_schedule(name, 3, 5)
    # So that all actions of the schedule take one unit; dualpipe-v has whole backwards and halves.
    schedule = schedule.split() if name == "dualpipe-v" else schedule
    result = schedule.simulate(backward=2 if name in HALVED else 1)
    ticks = {a: tick for row in schedule.rows for tick, a in enumerate(row) if a is not None}
    assert result.times == {action: (tick, tick + 1) for action, tick in ticks.items()}
    assert result.makespan == schedule.num_ticks


def test_the_slowest_stage_sets_the_pace():
    result = one_f_one_b(3, 100).simulate(forward=[1, 3, 1], backward=[2, 6, 2])
    assert result.busy == (300, 900, 300)
    assert result.makespan == 1 + 900 + 2, "it waits for its first input, and never again"
    lockstep = one_f_one_b(3, 100).simulate(
        forward=np.array([1, 3, 1]), backward=(2, 6, 2), mode="lockstep"
    )
    assert lockstep.makespan == pytest.approx(result.makespan, abs=9)


def test_communication_is_hidden_from_independent_devices_that_have_enough_ahead():
    plain, eager = one_f_one_b(4, 16), eager_one_f_one_b(4, 16)
    without = plain.simulate().makespan
    assert eager.simulate(communication=0.5).makespan < plain.simulate(communication=0.5).makespan
    lockstep = plain.simulate(communication=0.5, mode="lockstep")
    ticks = 16 + 2 * (4 - 1)
    assert lockstep.makespan == without + 0.5 * (ticks - 1)
    for alone in (one_f_one_b(1, 4), interleaved(1, 4, chunks=2)):
        assert alone.simulate(communication=9.0).makespan == alone.simulate().makespan


def test_halves_of_a_backward_follow_from_what_is_given():
    def times(**costs):
        spans = zero_bubble(1, 1).simulate(**costs).times
        return [end - start for start, end in spans.values()]

    assert times() == [1, 1, 1]
    assert times(forward=2, backward=6) == [2, 3, 3]
    assert times(backward=6, input_grad=4) == [1, 4, 2]
    assert times(backward=6, weight_grad=4) == [1, 2, 4]
    assert times(input_grad=5, weight_grad=4) == [1, 5, 4]
    assert times(input_grad=0.5) == [1, 0.5, 1.5]
    assert one_f_one_b(1, 1).simulate(input_grad=5, weight_grad=4).makespan == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "mpmd"}, "mode must be one of .*'async', 'lockstep'.*'mpmd'"),
        ({"forward": -1}, "forward must be finite and at least 0, got -1"),
        ({"backward": float("nan")}, "backward must be finite"),
        ({"forward": [1, 2, 3]}, r"forward .*each of the 2 stages .*shape \(3,\)"),
        ({"backward": 1, "input_grad": 2}, "input_grad must be at most backward, got 2"),
        ({"weight_grad": 3}, "weight_grad must be at most backward, got 3"),
        (
            {"backward": [4, 2], "weight_grad": [1, 3]},
            "weight_grad must be at most backward, got 3.0 of 2.0 for stage 1",
        ),
        ({"backward": 3, "input_grad": 1, "weight_grad": 1}, "backward must be input_grad"),
        ({"communication": -0.1}, "communication must be finite and at least 0, got -0.1"),
        ({"forward": 0, "backward": 0}, "takes no time"),
    ],
)
def test_costs_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        one_f_one_b(2, 2).simulate(**arguments)


@pytest.mark.parametrize("mode", ["async", "lockstep"])
@pytest.mark.parametrize("name", NAMES)
def test_no_two_actions_of_a_device_overlap(name, mode):
    schedule = make_schedule(name, 4, 6)
    result = schedule.simulate(mode=mode, backward=3)
    for row in schedule.rows:
        spans = sorted(result.times[action] for action in row if action is not None)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert result.makespan == max(end for _, end in result.times.values())
    assert result.efficiency + result.bubble_fraction == 1


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_activations_have_their_closed_form(stages, microbatches):
    devices = range(stages)
    size = stages, microbatches
    assert gpipe(*size).liveness(mode="async").peak == (microbatches,) * stages
    assert one_f_one_b(*size).liveness(mode="async").peak == tuple(
        min(microbatches, stages - s) for s in devices
    )
    assert eager_one_f_one_b(*size).liveness(mode="async").peak == tuple(
        min(microbatches, 2 * (stages - 1 - s) + 1) for s in devices
    )
    assert zero_bubble(*size).liveness(mode="async").peak == (min(microbatches, stages),) * stages
    if microbatches % stages == 0:
        peak = interleaved_zero_bubble(*size, 3).liveness(mode="async").peak
        assert peak == (3 * stages,) * stages
    assert max(zero_bubble_v(*size).liveness(mode="async").peak) <= 2 * stages
    kept = dualpipe_v(*size).liveness(mode="async").peak
    assert max(kept) <= 2 * stages + 1
    assert kept == (2 * stages + 1,) * stages or microbatches < 2 * stages
    assert forward_only(*size).liveness(mode="async").peak == (1,) * stages
    assert (
        looped_breadth_first(*size, 3).liveness(mode="async").peak == (3 * microbatches,) * stages
    )


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_interleaved_keeps_what_megatron_warms_up(chunks):
    peak = interleaved(4, 16, chunks).liveness(mode="async").peak
    assert peak == tuple(2 * (3 - device) + (chunks - 1) * 4 + 1 for device in range(4))


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_activations_in_lockstep_have_their_closed_form(stages, microbatches):
    kept = one_f_one_b(stages, microbatches).liveness().peak
    assert kept == tuple(min(microbatches, 2 * (stages - 1 - s) + 1) for s in range(stages))
    kept = gpipe(stages, microbatches).liveness().peak
    assert kept == (microbatches,) * stages


@pytest.mark.parametrize("name", NAMES)
def test_liveness_in_lockstep_is_that_of_the_program(name):
    schedule = make_schedule(name, 4, 8)
    edges = [(stage, stage + 1) for stage in range(schedule.num_stages - 1)]
    tables = lower(schedule, [edges])
    liveness = schedule.liveness()
    assert tables.residuals.used == liveness.peak
    assert liveness.live.shape == (4, tables.num_ticks)
    with pytest.raises(ValueError, match=r"mode must be"):
        schedule.liveness(mode="program")


@pytest.mark.parametrize("name", NAMES)
def test_no_two_messages_of_an_exchange_leave_or_reach_one_device(name):
    schedule = make_schedule(name, 4, 5)
    edges = [(stage, stage + 1) for stage in range(schedule.num_stages - 1)]
    tables = lower(schedule, [edges])
    devices = [(schedule.device_of[s], schedule.device_of[t]) for s, t in edges]
    for (route,), pairs in (
        (tables.activations, devices),
        (tables.cotangents, [pair[::-1] for pair in devices]),
    ):
        for exchange in route.links:
            for ends in zip(*exchange, strict=True):
                assert len(set(ends)) == len(ends)
        assert set(itertools.chain(*route.links)) == {(s, t) for s, t in pairs if s != t}


@pytest.mark.parametrize("mode", ["async", "lockstep"])
@pytest.mark.parametrize("merge_chunks", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_slots_are_never_shared_and_as_few_as_can_be(name, merge_chunks, mode):
    schedule = make_schedule(name, 3, 7)
    liveness = schedule.liveness(merge_chunks=merge_chunks, mode=mode)
    ticks = schedule.num_ticks if mode == "async" else liveness.live.shape[1]
    assert liveness.live.shape == (3, ticks)
    for device in range(3):
        keys = [key for key in liveness.slots if key[0] in schedule.stages_on(device)]
        assert {liveness.slots[key] for key in keys} == set(range(liveness.peak[device]))
        for tick in range(ticks):
            alive = {
                (key[1] if merge_chunks else key, liveness.slots[key])
                for key in keys
                if liveness.lifetimes[key][0] <= tick <= liveness.lifetimes[key][1]
            }
            assert len(alive) == len({slot for _, slot in alive}) == liveness.live[device, tick]


def test_each_stage_knows_its_own_peak():
    liveness = zero_bubble_v(3, 9).liveness(mode="async")
    assert liveness.peak == (6, 6, 6)
    for device, stages in enumerate([(0, 5), (1, 4), (2, 3)]):
        assert sum(liveness.peak_of_stage[stage] for stage in stages) >= liveness.peak[device]
    assert one_f_one_b(3, 9).liveness(mode="async").peak_of_stage == (3, 2, 1)
    assert one_f_one_b(3, 9).liveness().peak_of_stage == (5, 3, 1)


def test_activations_that_nobody_frees_or_makes_are_refused():
    with pytest.raises(ValueError, match=r"stage 0, micro-batch 0 has neither B nor W"):
        Schedule.from_csv("0F0,0I0").liveness()
    with pytest.raises(ValueError, match=r"stage 0, micro-batch 1 has a backward at tick 1"):
        Schedule.from_csv("0F0,0B1,0B0").liveness()

"""validate() raises if and only if something is wrong, and says what, where and when."""

import dataclasses
import itertools
import random
from collections.abc import Iterator

import pytest

from ampx.pipelining.schedules.actions import Action, parse_action
from ampx.pipelining.schedules.generators import interleaved, make_schedule, one_f_one_b
from ampx.pipelining.schedules.schedule import Schedule
from ampx.pipelining.schedules.zero_bubbles import zero_bubble, zero_bubble_v

SCHEDULES = [
    make_schedule(name, *size, chunks=chunks)
    for name, chunks in [
        ("gpipe", None),
        ("1f1b", None),
        ("eager-1f1b", None),
        ("interleaved", 2),
        ("interleaved", 3),
        ("looped-bfs", 2),
        ("zero-bubble", None),
        ("interleaved-zero-bubble", 2),
        ("zero-bubble-v", None),
        ("dualpipe-v", None),
        ("forward-only", 2),
    ]
    for size in [(1, 1), (1, 3), (2, 3), (3, 2), (3, 5)]
]


def is_valid(schedule: Schedule) -> bool:
    """The oracle: lists what each stage has done, and plays the grid one tick after the other."""
    stages, microbatches = range(schedule.num_stages), schedule.num_microbatches
    forwards, backwards = [set() for _ in stages], [set() for _ in stages]
    halves = [set() for _ in stages]
    if len({len(row) for row in schedule.rows}) != 1:
        return False
    for column in zip(*schedule.rows, strict=True):
        sent, returned = [set(done) for done in forwards], [set(done) for done in backwards]
        for device, action in enumerate(column):
            if action is None:
                continue
            stage, kind, microbatch = action
            if stage not in stages or schedule.device_of[stage] != device:
                return False
            if microbatch not in range(microbatches):
                return False
            if kind == "F":
                if microbatch in forwards[stage] or stage and microbatch not in sent[stage - 1]:
                    return False
                forwards[stage].add(microbatch)
            elif kind in "BI":
                if microbatch in backwards[stage] or microbatch not in sent[stage]:
                    return False
                if stage < stages[-1] and microbatch not in returned[stage + 1]:
                    return False
                backwards[stage].add(microbatch)
                if kind == "I":
                    halves[stage].add(microbatch)
            elif microbatch not in halves[stage]:
                return False
            else:
                halves[stage].remove(microbatch)
    everything = set(range(microbatches))
    wanted = everything if schedule.has_backward else set()
    done = all(f == everything and b == wanted for f, b in zip(forwards, backwards, strict=True))
    return done and not any(halves)


def is_accepted(schedule: Schedule) -> bool:
    try:
        return schedule.validate() is schedule
    except ValueError:
        return False


def places(schedule: Schedule) -> list[tuple[int, int]]:
    return [
        (device, tick)
        for device, row in enumerate(schedule.rows)
        for tick, action in enumerate(row)
        if action is not None
    ]


def changed(schedule: Schedule, *changes: tuple[int, int, Action | None]) -> Schedule:
    rows = [list(row) for row in schedule.rows]
    for device, tick, action in changes:
        rows[device][tick] = action
    return dataclasses.replace(schedule, rows=rows)


def drops(schedule: Schedule) -> Iterator[Schedule]:
    for device, tick in places(schedule):
        yield changed(schedule, (device, tick, None))


def duplicates(schedule: Schedule) -> Iterator[Schedule]:
    """A second time at the end, and in every idle place of the device."""
    longer = dataclasses.replace(schedule, rows=[[*row, None] for row in schedule.rows])
    for device, tick in places(schedule):
        for other, action in enumerate(longer.rows[device]):
            if action is None:
                yield changed(longer, (device, other, longer.rows[device][tick]))


def swaps(schedule: Schedule) -> Iterator[Schedule]:
    """Two places of one device exchanged, idle ones included."""
    for device, row in enumerate(schedule.rows):
        for a, b in itertools.combinations(range(len(row)), 2):
            if row[a] != row[b]:
                yield changed(schedule, (device, a, row[b]), (device, b, row[a]))


def moves(schedule: Schedule) -> Iterator[Schedule]:
    """An action taken out and put in elsewhere; what lies between moves by one tick."""
    for device, tick in places(schedule):
        for target in range(len(schedule.rows[device])):
            rows = [list(row) for row in schedule.rows]
            rows[device].insert(target, rows[device].pop(tick))
            yield dataclasses.replace(schedule, rows=rows)


def renames(schedule: Schedule) -> Iterator[Schedule]:
    """Another stage, kind or micro-batch at a place."""
    for device, tick in places(schedule):
        action = schedule.rows[device][tick]
        assert action is not None
        for stage in range(-1, schedule.num_stages + 1):
            yield changed(schedule, (device, tick, action._replace(stage=stage)))
        for kind in "FBIW":
            yield changed(schedule, (device, tick, action._replace(kind=kind)))
        for microbatch in range(-1, schedule.num_microbatches + 1):
            yield changed(schedule, (device, tick, action._replace(microbatch=microbatch)))


def sample(mutants: Iterator[Schedule], number: int) -> list[Schedule]:
    mutants = list(mutants)
    return random.Random(0).sample(mutants, min(number, len(mutants)))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.name}-{s.num_ticks}")
def test_every_generated_schedule_is_valid(schedule):
    assert is_valid(schedule)
    assert schedule.validate() is schedule


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.name}-{s.num_ticks}")
def test_every_drop_and_every_duplicate_is_found(schedule):
    for mutant in itertools.chain(drops(schedule), duplicates(schedule)):
        with pytest.raises(ValueError, match="schedule"):
            mutant.validate()


@pytest.mark.parametrize("mutate", [swaps, moves, renames])
def test_mutants_are_refused_if_and_only_if_the_oracle_refuses_them(mutate):
    verdicts = []
    for schedule in SCHEDULES:
        for mutant in sample(mutate(schedule), 100):
            verdicts.append(is_valid(mutant))
            assert is_accepted(mutant) == verdicts[-1], mutant.render()
    assert len(verdicts) > 2500
    assert any(verdicts) and not all(verdicts)


def test_two_mutations_do_not_hide_each_other():
    verdicts = []
    for schedule in SCHEDULES[::2]:
        for once in sample(swaps(schedule), 6):
            for twice in sample(swaps(once), 6):
                verdicts.append(is_valid(twice))
                assert is_accepted(twice) == verdicts[-1], twice.render()
    assert any(verdicts) and not all(verdicts)


def put(schedule: Schedule, device: int, tick: int, text: str) -> Schedule:
    return changed(schedule, (device, tick, parse_action(text) if text else None))


ONE = one_f_one_b(2, 3)
ZERO = zero_bubble(2, 2)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (put(ONE, 0, 7, ""), r"0B2 \(backward of stage 0, micro-batch 2\) is missing from all 8"),
        (put(ONE, 1, 1, ""), r"1B0 .*at tick 2 on device 1 .*forward of stage 1.*which is missing"),
        (put(ONE, 0, 2, "0F1"), r"0F1 .*micro-batch 1\) at tick 2 on device 0 .*second time"),
        (put(ONE, 0, 2, "1F1"), r"1F1 .* at tick 2 on device 0 .*wrong device: stage 1 is on dev"),
        (put(ONE, 0, 2, "2F1"), r"2F1 .* at tick 2 .*unknown stage: the stages are 0 to 1"),
        (put(ONE, 0, 2, "0F3"), r"0F3 .* at tick 2 .*unknown micro-batch: .* 0 to 2"),
        (put(ONE, 1, 0, "1F0"), r"1F0 .* at tick 0 .*forward of stage 0, micro-batch 0, which is"),
        (
            changed(ONE, (0, 0, Action(0, "B", 0)), (0, 3, Action(0, "F", 0))),
            r"0B0 \(backward of stage 0, micro-batch 0\) at tick 0 .*forward of stage 0.*at tick 3",
        ),
        (put(ONE, 0, 0, "0F1"), r"0F1 .* at tick 1 on device 0 .*second time"),
        (
            Schedule("x", [[Action(0, k, 0) for k in "FWI"]], (0,), 1),
            r"0W0 \(weight gradient of stage 0, micro-batch 0\) at tick 1 .* at tick 2",
        ),
        (
            Schedule("x", [[Action(0, k, 0) for k in "FIWB"]], (0,), 1),
            r"0B0 .* at tick 3 .* besides 0I0: a backward is either B, or I and W",
        ),
        (
            Schedule("x", [[Action(0, k, 0) for k in "FBW"]], (0,), 1),
            r"0W0 .* at tick 2 .* besides 0B0",
        ),
        (put(ZERO, 0, ZERO.num_ticks - 1, ""), r"0W1 \(weight gradient .* is missing"),
        (
            dataclasses.replace(ONE, has_backward=False),
            r"1B0 .* at tick 2 .* without backward: has_backward is False",
        ),
        (
            changed(ONE, (0, 0, Action(0, "X", 0))),  # type: ignore[arg-type]
            r"0X0 .* at tick 0 .* of kind 'X': use one of F, B, I, W",
        ),
    ],
)
def test_the_message_names_the_first_fault_and_shows_the_grid(schedule, message):
    with pytest.raises(ValueError, match=message) as error:
        schedule.validate()
    headline, *grid = str(error.value).split("\n")
    assert headline.startswith(f"schedule {schedule.name!r}: ")
    assert grid == schedule.render().split("\n")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_microbatches": 0}, "num_microbatches must be a positive int, got 0"),
        ({"num_microbatches": True}, "num_microbatches must be a positive int, got True"),
        ({"rows": []}, "needs devices and stages, got 0 rows"),
        ({"device_of": ()}, "needs devices and stages, got 2 rows and 0 stages"),
        ({"device_of": (0, 2)}, "stage 1 is on device 2, but there are rows for 2"),
        ({"device_of": (0, 0)}, "device 1 has no stage"),
        ({"rows": [[None], []]}, "one length, got 0 ticks for device 1 and 1 for device 0"),
        ({"rows": [["0F0"], [None]]}, "device 0 has '0F0' at tick 0: .*parse_action"),
    ],
)
def test_rows_that_are_no_grid_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(ONE, **changes).validate()


def test_the_grid_of_a_long_schedule_is_cut_around_the_fault():
    schedule = one_f_one_b(4, 200)
    with pytest.raises(ValueError, match="is missing") as error:
        put(schedule, 0, schedule.num_ticks - 1, "").validate()
    assert all(len(line) < 150 for line in str(error.value).split("\n")[2:])
    with pytest.raises(ValueError, match="second time") as error:
        put(schedule, 0, 100, "0F1").validate()
    ticks = str(error.value).split("\n")[2].split()
    assert ticks == ["tick", *map(str, range(90, 111))]


def test_lists_that_wait_for_each_other_are_found_however_they_are_looked_at():
    """Device 0 wants its first backward before its second forward, device 1 the other way round."""
    schedule = Schedule.from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1")
    with pytest.raises(ValueError, match="device 0 for the inputs of 0B0, device 1 .* of 1F1"):
        schedule.aligned()
    with pytest.raises(ValueError, match="wait for each other at 0B0, 1F1"):
        schedule.simulate()
    with pytest.raises(ValueError, match="1F0"):
        schedule.validate()
    apart = Schedule.from_csv("0F0,,,,0B0,0F1,,0B1\n,1F0,1F1,1B0,,,1B1,")
    with pytest.raises(ValueError, match="1F1 .*forward of stage 0, micro-batch 1"):
        apart.validate()


def test_a_stage_may_go_back_whole_with_one_micro_batch_and_in_halves_with_another():
    Schedule.from_csv("0F0,0F1,0I0,0W0,0B1").validate()


@pytest.mark.parametrize("schedule", [interleaved(4, 8), zero_bubble_v(4, 9)])
def test_merging_and_splitting_keep_a_schedule_valid(schedule):
    assert schedule.merged().validate().split().validate().num_microbatches

"""torch's pipeline schedules, read, checked, run and compared with those of the same name here.

`torch.distributed.pipelining` makes a table of actions for every schedule, without a process or a
device. Each table is read by `Schedule.from_csv`, validated, and compared with what ampx makes; the
tables of ampx are checked by torch's own functions, which also find devices that would wait for
each other. At the end each schedule's table is run, and must give the gradients of the model.
"""

import contextlib
import csv
import functools
import io
import types
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import jax
import pipeline_steps
import pytest
from hypothesis import given, settings
from listing import Peer

import ampx
from ampx.pipelining.schedules.actions import Action
from ampx.pipelining.schedules.generators import make_schedule
from ampx.pipelining.schedules.schedule import Schedule

torch = pytest.importorskip("torch")
theirs = pytest.importorskip("torch.distributed.pipelining.schedules")

# torch's class, and the name that ampx has for it.
NAMES = {
    "ScheduleGPipe": "gpipe",
    "Schedule1F1B": "1f1b",
    "ScheduleLoopedBFS": "looped-bfs",
    "ScheduleInterleaved1F1B": "interleaved",
    "ScheduleInterleavedZeroBubble": "interleaved-zero-bubble",
    "ScheduleZBVZeroBubble": "zero-bubble-v",
    "ScheduleDualPipeV": "dualpipe-v",
}
SINGLE = ("ScheduleGPipe", "Schedule1F1B")
# (stages a device, micro-batches, devices)
SIZES = [(c, m, d) for c in (1, 2, 3) for m in (1, 2, 3, 4, 6, 8, 13) for d in (1, 2, 3, 4)]
OF_V_SHAPE = ("zero-bubble-v", "dualpipe-v")
FORMS = ("read", "order", "run")
# In which order torch's class goes, where ampx's own does not: the case, and why.
EXCLUDED = {
    "ScheduleLoopedBFS order": "its backwards take micro-batches in descending order; ampx's "
    "looped-bfs takes them in ascending order, as the paper does, and runs torch's table as it is",
    "Schedule1F1B read": "torch's own check refuses its table, whose last device begins with "
    "micro-batch 1; the calls that the class makes are compared instead",
}
PEERS = (
    Peer(
        source="torch",
        runs="the schedules of `torch.distributed.pipelining`: each table of actions is read from "
        "torch's CSV and validated (read), goes in the order of ampx's schedule of that name "
        "(order), and gives the gradients of the model (run)",
        cases=lambda: [f"{name} {form}" for name in NAMES for form in FORMS],
        excluded=EXCLUDED,
    ),
)


def make_stages(chunks: int, devices: int) -> list[Any]:
    """What torch's constructors look at in the stages of a device."""
    return [
        types.SimpleNamespace(
            num_stages=chunks * devices,
            group_size=devices,
            group_rank=0,
            group=None,
            stage_index=chunk * devices,
            submod=None,
        )
        for chunk in range(chunks)
    ]


def make_theirs(name: str, chunks: int, microbatches: int, devices: int) -> Any:
    """torch's schedule, or None for sizes that it refuses."""
    stages = make_stages(chunks, devices)
    try:
        return getattr(theirs, name)(
            stages[0] if name in SINGLE else stages, microbatches, loss_fn=lambda *_: 0
        )
    except ValueError:
        return None


@functools.cache
def schedules_of(name: str) -> dict[tuple[int, int, int], Any]:
    """torch's schedules of all sizes that it takes."""
    sizes = [size for size in SIZES if (size[0] == 1) == (name in SINGLE)]
    made = {size: make_theirs(name, *size) for size in sizes}
    return {size: schedule for size, schedule in made.items() if schedule is not None}


def text_of(rows: Any) -> str:
    """A table as torch writes it."""
    file = io.StringIO()
    csv.writer(file).writerows(rows)
    return file.getvalue()


def make_ours(name: str, size: tuple[int, int, int]) -> Schedule:
    chunks, microbatches, devices = size
    has_chunks = chunks > 1 and NAMES[name] not in OF_V_SHAPE
    return make_schedule(NAMES[name], devices, microbatches, chunks=chunks if has_chunks else None)


def orders_of(rows: Any) -> list[list[str]]:
    return [[str(action) for action in row if action is not None] for row in rows]


def calls_of(name: str, microbatches: int, devices: int) -> list[list[str]]:
    """The order in which a class of one stage a device calls its stage, device by device."""
    orders = []
    for device in range(devices):
        (stage,) = make_stages(1, devices)
        stage.stage_index, stage.is_first, stage.is_last = device, device == 0, False
        order: list[str] = []
        orders.append(order)

        def record(kind: str, order: list = order, device: int = device) -> Callable:
            return lambda microbatch, *_, **__: order.append(f"{device}{kind}{microbatch}")

        stage.forward_one_chunk, stage.backward_one_chunk = record("F"), record("B")
        for what in ("fwd_recv", "fwd_send", "bwd_recv", "bwd_send"):
            setattr(stage, f"get_{what}_ops", lambda _: [])
        stage.perform_reduce_grad = lambda _: None
        schedule = getattr(theirs, name)(stage, microbatches, loss_fn=lambda *_: 0)
        schedule._initialize_stage = lambda *_: None
        schedule._step_microbatches([()] * microbatches, [{}] * microbatches)
    return orders


def as_theirs(schedule: Schedule) -> dict[int, list[Any]]:
    return {
        device: [None if a is None else theirs._Action.from_str(str(a)) for a in row]
        for device, row in enumerate(schedule.rows)
    }


def check_by_theirs(schedule: Schedule) -> None:
    """torch's own look at a table: which actions there are, and whether messages arrive."""
    rows = as_theirs(schedule)
    stages = schedule.num_stages
    devices = theirs._validate_schedule(
        rows, schedule.num_devices, stages, schedule.num_microbatches
    )
    assert tuple(devices[stage] for stage in range(stages)) == schedule.device_of
    actions = {device: [a for a in row if a is not None] for device, row in rows.items()}
    sent = theirs._add_send_recv(actions, schedule.device_of.__getitem__, stages)
    theirs._simulate_comms_compute(sent, schedule.device_of.__getitem__, stages)


def check_read(name: str) -> None:
    for size, schedule in schedules_of(name).items():
        chunks, microbatches, devices = size
        read = Schedule.from_csv(text_of(schedule.pipeline_order.values())).aligned().validate()
        assert (read.num_stages, read.num_microbatches) == (chunks * devices, microbatches)
        if name not in SINGLE:
            found = schedule.stage_index_to_group_rank
            assert read.device_of == tuple(found[stage] for stage in range(read.num_stages))
            # With torch's messages in it, and without.
            lowered = Schedule.from_csv(text_of(schedule.pipeline_order_with_comms.values()))
            assert lowered.aligned().rows == read.rows
        check_by_theirs(read)


def check_order(name: str) -> None:
    """The same actions in the same order on every device."""
    for size, schedule in schedules_of(name).items():
        _, microbatches, devices = size
        if name in SINGLE:
            expected = calls_of(name, microbatches, devices)
        else:
            rows = Schedule.from_csv(text_of(schedule.pipeline_order.values())).rows
            expected = orders_of(rows)
        assert orders_of(make_ours(name, size).rows) == expected, size


def check_run(name: str) -> None:
    """The gradients of a model that torch's table is run on."""
    size = (1 if name in SINGLE else 2, 4, 2)
    expected_of = jax.jit(ampx.value_and_grad(pipeline_steps.loss_fn, normalize="weights"))
    rows = calls_of(name, *size[1:]) if name in SINGLE else None
    rows = rows or schedules_of(name)[size].pipeline_order.values()
    schedule = Schedule.from_csv(text_of(rows)).aligned().validate()
    params, batch = pipeline_steps.make_params(), pipeline_steps.make_batch(0)
    grads_of = pipeline_steps.make_grads_of(schedule, data=1, normalize="weights")
    found, expected = jax.jit(grads_of)(params, batch), expected_of(params, batch)
    pipeline_steps.assert_close((found.loss, found.grads), (expected.loss, expected.grads))


CHECKS = {"read": check_read, "order": check_order, "run": check_run}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_torch_schedules(name, form):
    context = contextlib.nullcontext()
    if f"{name} {form}" in EXCLUDED:
        context = pytest.raises((AssertionError, ValueError))
    with context:
        CHECKS[form](name)


def test_torch_has_no_other_schedule_class():
    known = {*NAMES, "ScheduleClass"}
    found = {name for name in theirs.__dict__ if name.startswith("Schedule")}
    assert found <= known, "compare it, too"


def test_torch_refuses_its_own_table_of_1f1b():
    """The reason why that is excluded: the last device never runs micro-batch 0."""
    schedule = schedules_of("Schedule1F1B")[1, 4, 2]
    with pytest.raises(AssertionError, match="without first running Forward"):
        theirs._validate_schedule(without_messages(schedule), 2, 2, 4)
    with pytest.raises(ValueError, match="which is missing|wait for each other"):
        Schedule.from_csv(text_of(without_messages(schedule).values())).aligned().validate()


def without_messages(schedule: Any) -> dict[int, list[Any]]:
    return {
        device: [a if a is None or a.is_compute_op else None for a in row]
        for device, row in schedule.pipeline_order.items()
    }


GENERATED = [
    *(
        (name, c)
        for name in ("interleaved", "looped-bfs", "interleaved-zero-bubble")
        for c in (2, 3)
    ),
    *((name, None) for name in ("gpipe", "1f1b", "eager-1f1b", "zero-bubble", *OF_V_SHAPE)),
]


@pytest.mark.parametrize(("name", "chunks"), GENERATED)
def test_torch_takes_the_schedules_of_ampx(name, chunks):
    for devices in (1, 2, 3, 4):
        for microbatches in (1, 2, 3, 4, 7, 8):
            check_by_theirs(make_schedule(name, devices, microbatches, chunks=chunks))


def mutate(rows: list[list[Action]], draw: Callable) -> None:
    """Moves, drops, repeats or renames an action."""
    row = rows[draw(st.integers(0, len(rows) - 1))]
    place, other = (draw(st.integers(0, len(row) - 1)) for _ in range(2))
    match draw(st.sampled_from(["move", "drop", "kind", "stage", "swap"])):
        case "move":
            row.insert(other, row.pop(place))
        case "drop":
            del row[place]
        case "kind":
            row[place] = row[place]._replace(kind=draw(st.sampled_from("FBIW")))
        case "stage":
            row[place] = row[place]._replace(stage=draw(st.integers(0, 3)))
        case "swap":
            row[place], row[other] = row[other], row[place]


def is_accepted(check: Callable[[], Any]) -> bool:
    try:
        check()
    except (AssertionError, ValueError, KeyError):
        return False
    return True


@given(st.data())
@settings(max_examples=150)
def test_torch_refuses_what_ampx_refuses(data):
    """Tables with one or two faults. torch counts in sets, so it does not see a repeated action."""
    name, chunks = data.draw(st.sampled_from(GENERATED[::2]))
    made = make_schedule(name, 2, 3, chunks=chunks)
    rows = [[action for action in row if action is not None] for row in made.rows]
    for _ in range(data.draw(st.integers(1, 2))):
        mutate(rows, data.draw)
    spoilt = Schedule("spoilt", tuple(map(tuple, rows)), made.device_of, 3)
    ours = is_accepted(lambda: spoilt.aligned().validate())
    repeated = any(len(set(row)) < len(row) for row in rows)
    if not repeated:
        assert ours == is_accepted(lambda: check_by_theirs(spoilt)), spoilt.rows
    assert not (repeated and ours)

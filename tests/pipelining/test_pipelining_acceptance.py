"""Cases that other systems hold their schedules to, each named after where it comes from."""

import dataclasses
import itertools
import re

import pytest

from ampx.pipelining.schedules.actions import Action, merge_backwards, parse_action
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
from ampx.pipelining.schedules.zero_bubbles import dualpipe_v, zero_bubble, zero_bubble_v

# torch: test/distributed/pipelining/test_schedule.py, (stages a device, micro-batches, devices).
TORCH_SIZES = [
    (2, 2, 2),
    (2, 4, 4),
    (2, 8, 2),
    (2, 8, 4),
    (2, 8, 8),
    (4, 4, 4),
    (4, 8, 4),
    (4, 8, 8),
    (4, 16, 4),
    (4, 32, 4),
    (4, 16, 16),
    (3, 2, 2),
    (3, 8, 2),
    (3, 12, 4),
    (4, 6, 3),
    (4, 10, 5),
    (2, 3, 4),
    (2, 10, 4),
    (2, 15, 4),
]


def parsed(text: str) -> list[Action]:
    return [parse_action(word) for word in text.split()]


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("1F0", Action(1, "F", 0)),
        ("2I1", Action(2, "I", 1)),
        ("0W3", Action(0, "W", 3)),
        ("0B3", Action(0, "B", 3)),
    ],
)
def test_torch_action_parse(text, action):
    assert parse_action(text) == action
    assert str(action) == text


@pytest.mark.parametrize("text", ["1UNSHARD", "3RESHARD", "2SEND_B2", "1RECV_F1", "0REDUCE_GRAD"])
def test_torch_messages_are_no_actions_here(text):
    """In one compiled program they follow from the schedule."""
    with pytest.raises(ValueError, match=f"got '{text}'"):
        parse_action(text)


def test_torch_merge_bw():
    actions = parsed("0F0 0F1 0F2 0I0 0I1 0W0 0I2 0W2 0W1")
    assert merge_backwards(actions) == parsed("0F0 0F1 0F2 0I0 0I1 0W0 0B2 0W1")


@pytest.mark.parametrize(("chunks", "microbatches", "devices"), TORCH_SIZES)
def test_torch_pipeline_order(chunks, microbatches, devices):
    """Also sizes that torch's own interleaved schedule refuses, such as 15 on 4 devices."""
    for generator in (interleaved, looped_breadth_first):
        schedule = generator(devices, microbatches, chunks).validate()
        assert schedule.num_stages == chunks * devices


@pytest.mark.parametrize(("chunks", "microbatches", "devices"), TORCH_SIZES)
def test_torch_pipeline_order_for_v_schedules(chunks, microbatches, devices):
    """A V has two stages a device, so ours lets nobody ask for another number."""
    assert zero_bubble_v(devices, microbatches).validate().num_stages == 2 * devices
    with pytest.raises(ValueError, match="chunks is for"):
        make_schedule("zero-bubble-v", devices, microbatches, chunks=chunks)


def sends(schedule: Schedule, action: Action) -> tuple[int, str] | None:
    """The stage that waits for the result of an action, and what it receives, as `F0` or `B0`."""
    stage, kind, microbatch = action
    to = stage + 1 if kind == "F" else stage - 1
    if kind == "W" or to not in range(schedule.num_stages):
        return None
    return to, f"{'F' if kind == 'F' else 'B'}{microbatch}"


def with_messages(schedule: Schedule) -> list[list[str]]:
    """Torch's lists: a send after what another device needs, a receive as early as that is known.

    Devices take turns, each with its next place if all that it needs is listed; idle places count.
    """
    orders = [list(row) for row in schedule.rows]
    lists: list[list[str]] = [[] for _ in orders]
    known: set[tuple[int, str]] = set()
    for stage, microbatch in itertools.product(
        range(schedule.num_stages), range(schedule.num_microbatches)
    ):
        known |= {(0, f"F{microbatch}"), (schedule.num_stages - 1, f"B{microbatch}")}
        known.add((stage, f"W{microbatch}"))
    while any(orders):
        for device, order in enumerate(orders):
            action = order[0] if order else None
            if action is None:
                del order[:1]
                continue
            kind = "B" if action.kind == "I" else action.kind
            if (action.stage, f"{kind}{action.microbatch}") not in known:
                continue
            lists[device].append(str(order.pop(0)))
            message = sends(schedule, action)
            if message is not None:
                known.add(message)
                to, what = message
                if schedule.device_of[to] != device:
                    lists[device].append(f"{action.stage}SEND_{what}")
                    lists[schedule.device_of[to]].append(f"{to}RECV_{what}")
    return lists


def steps(lists: list[list[str]]) -> int:
    """Steps of lists with messages, if a receive may share the step of its send."""
    lists, sent, count = [list(words) for words in lists], set(), 0
    while any(lists):
        count += 1
        heads = [words[0] for words in lists if words]
        for stage, what in (head.split("SEND_") for head in heads if "SEND" in head):
            sent.add(f"{int(stage) + (1 if what[0] == 'F' else -1)}RECV_{what}")
        for words in lists:
            if words and ("RECV" not in words[0] or words[0] in sent):
                words.pop(0)
    return count


@pytest.mark.parametrize(
    ("text", "devices", "expected"),
    [
        ("0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,", (0, 1), 11),
        (
            "0F0,0F1,,3F0,3I0,3F1,3I1,0I0,3W0,0I1,3W1,0W0,0W1\n"
            ",1F0,2F0,1F1,2F1,2I0,1I0,2I1,1I1,2W0,2W1,1W0,1W1",
            (0, 1, 1, 0),
            24,
        ),
    ],
)
def test_torch_send_recv(text, devices, expected):
    schedule = Schedule.from_csv(text).validate()
    assert schedule.device_of == devices
    assert steps(with_messages(schedule)) == expected


def test_torch_pipeline_activation_liveness_reuses_completed_slots():
    text = "0F0,0F1,0I0,0F2,0W0,0F3,0I1,0W1,0I2,0W2,0I3,0W3"
    liveness = Schedule.from_csv(text).validate().liveness(mode="async")
    assert liveness.peak == (3,)
    assert liveness.slots == {(0, 0): 0, (0, 1): 1, (0, 2): 2, (0, 3): 0}
    assert liveness.lifetimes[0, 0] == (0, 4)
    assert liveness.lifetimes[0, 2] == (3, 9)


def test_torch_pipeline_activation_liveness_granularity():
    """Torch's stages 0 and 2 are 0 and 1 here: there is no other device."""
    text = "0F0,1F0,0F1,1B0,0B0,1F1,1B1,0B1,0F2,1F2,1B2,0B2"
    schedule = Schedule.from_csv(text).validate()
    stages, merged = (
        schedule.liveness(mode="async"),
        schedule.liveness(merge_chunks=True, mode="async"),
    )
    order = [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert stages.peak == (3,)
    assert [stages.slots[key] for key in order] == [0, 1, 2, 0, 0, 1]
    assert [stages.lifetimes[key] for key in order[:4]] == [(0, 4), (1, 3), (2, 7), (5, 6)]
    assert merged.peak == (2,)
    assert [merged.slots[key] for key in order] == [0, 0, 1, 1, 0, 0]
    assert [merged.lifetimes[key] for key in order[:4]] == [(0, 4), (0, 4), (2, 7), (2, 7)]


@pytest.mark.parametrize(
    "text",
    ["0F0,0B0", "0F0", "0F0,0I0", "0F0,0F0", "0F0,0I0,0I0", "0F0,0B0,0W0", "0B0", "0B0,0F0"],
)
def test_torch_validate_schedule_and_liveness_validation(text):
    """The first is missing a device; the others are one device's torch refuses."""
    schedule = Schedule.from_csv(text)
    schedule = Schedule("torch", schedule.rows, (0,), 1 if text != "0F0,0B0" else 2)
    with pytest.raises(ValueError, match="stage 0, micro-batch"):
        schedule.validate()


def test_torch_csv_of_v_and_dual_pipe_rows():
    """Two devices of a small DualPipeV: torch writes an overlapped pair as one action."""
    text = (
        "0F0,0F1,0F2,3F0,3I0,3W0,3F1,(0F3;3B1)OVERLAP_F_B,(3F2;0B0)OVERLAP_F_B,3B2,"
        "(3F3;0B1)OVERLAP_F_B,3B3,0I2,0W2,0I3,0W3\n"
        "1F0,2F0,1F1,2F1,1F2,2B0,(2F2;1B0)OVERLAP_F_B,(1F3;2B1)OVERLAP_F_B,"
        "(2F3;1B1)OVERLAP_F_B,2B2,1B2,2I3,1I3,2W3,1W3"
    )
    schedule = Schedule.from_csv(text).aligned().validate()
    assert schedule.device_of == (0, 1, 1, 0)
    assert schedule.num_microbatches == 4
    assert Schedule.from_csv(schedule.to_csv()) == schedule
    assert schedule.rows == dualpipe_v(2, 4).rows


@pytest.mark.parametrize(
    ("stages", "microbatches", "expected"),
    [
        (1, 1, [{(0, 0)}]),
        (1, 3, [{(0, 0)}, {(1, 0)}, {(2, 0)}]),
        (3, 1, [{(0, 0)}, {(0, 1)}, {(0, 2)}]),
        (
            3,
            3,
            [{(0, 0)}, {(1, 0), (0, 1)}, {(2, 0), (1, 1), (0, 2)}, {(2, 1), (1, 2)}, {(2, 2)}],
        ),
        (2, 4, [{(0, 0)}, {(1, 0), (0, 1)}, {(2, 0), (1, 1)}, {(3, 0), (2, 1)}, {(3, 1)}]),
    ],
)
def test_torchgpipe_clock_cycles(stages, microbatches, expected):
    """Pairs are (micro-batch, stage); torchgpipe's clock_cycles takes micro-batches first."""
    for schedule in (gpipe(stages, microbatches), forward_only(stages, microbatches)):
        columns = list(zip(*schedule.rows, strict=True))[: len(expected)]
        found = [
            {(action.microbatch, action.stage) for action in column if action is not None}
            for column in columns
        ]
        assert found == expected


@pytest.mark.parametrize("microbatches", [1, 3, 8, 10])
@pytest.mark.parametrize("stages", [1, 3])
def test_deepspeed_inference_schedule(stages, microbatches):
    schedule = forward_only(stages, microbatches).validate()
    assert schedule.num_ticks == microbatches + stages - 1
    for stage, row in enumerate(schedule.rows):
        forwards = [Action(stage, "F", m) for m in range(microbatches)]
        assert list(row[stage : stage + microbatches]) == forwards


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 4), (3, 4), (3, 8)])
def test_deepspeed_train_schedule(stages, microbatches):
    schedule = one_f_one_b(stages, microbatches).validate()
    assert schedule.num_ticks == 2 * (microbatches + stages - 1)
    liveness = schedule.liveness(mode="async")
    for stage in range(stages):
        buffers = max(2, min(stages - stage, microbatches))
        assert liveness.peak[stage] <= buffers
        assert all(slot < buffers for (s, _), slot in liveness.slots.items() if s == stage)


def test_deepspeed_first_stage_sends_no_gradient():
    first, middle, last = map(" ".join, with_messages(one_f_one_b(3, 8)))
    assert "SEND_B" not in first and "RECV_F" not in first
    assert "SEND_F" not in last and "RECV_B" not in last
    assert all(word in middle for word in ("SEND_B7", "SEND_F7", "RECV_B7", "RECV_F7"))


@pytest.mark.parametrize(
    "generator", [one_f_one_b, eager_one_f_one_b, interleaved, zero_bubble, gpipe]
)
def test_jaxpp_correct_schedule_and_negative_num_stages(generator):
    schedule = generator(2, 4).validate()
    assert len(schedule.rows) == 2
    with pytest.raises(ValueError, match="num_stages must be a positive int, got -1"):
        generator(-1, 4)


def test_jaxpp_interleaved_takes_less_than_one_round():
    """JaxPP raises for one micro-batch on four devices; it is a schedule, if a slow one."""
    assert interleaved(4, 1).validate().num_ticks == 16


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (3, 3), (4, 8), (4, 16), (8, 8)])
def test_jaxpp_zero_bubble_length_and_activations(stages, microbatches):
    schedule = zero_bubble(stages, microbatches)
    assert schedule.num_ticks == 3 * microbatches + stages - 1
    assert schedule.liveness(mode="async").peak == (stages,) * stages


def test_jaxpp_zero_bubble_of_four_stages_and_eight_micro_batches():
    assert zero_bubble(4, 8).num_ticks == 27
    assert zero_bubble(4, 8).liveness(mode="async").peak == (4, 4, 4, 4)


@pytest.mark.parametrize(
    "name", ["gpipe", "1f1b", "eager-1f1b", "interleaved", "looped-bfs", "zero-bubble"]
)
def test_jaxpp_interleaved_gpipe_every_backward_is_there_once(name):
    """JaxPP's InterleavedGPipe had one backward of eight, again and again: an index slipped."""
    schedule = make_schedule(name, 2, 4)
    for stage in range(schedule.num_stages):
        row = schedule.rows[schedule.device_of[stage]]
        own = [action for action in row if action is not None and action.stage == stage]
        assert [a.microbatch for a in own if a.kind in "BI"] == [0, 1, 2, 3]


def test_jaxpp_interleaved_gpipe_slipped_index_is_found():
    schedule = gpipe(2, 4)
    text = re.sub(r"B\d", "B0", schedule.to_csv())
    slipped = dataclasses.replace(schedule, rows=Schedule.from_csv(text).rows)
    with pytest.raises(ValueError, match="1B0 .* is there for the second time"):
        slipped.validate()

"""Pipeline schedules in any order, and their tables played without arrays."""

import random

from ampx.pipelining import Action, Schedule
from ampx.pipelining.runtime.lowering import IDLE, lower


def _needs(action, num_stages):
    """All that is done before an action, by definition; any one of a tuple will do."""
    stage, kind, microbatch = action
    if kind == "F":
        return [((stage - 1, "F", microbatch),)] if stage else []
    if kind == "W":
        return [((stage, "I", microbatch),)]
    behind = ((stage + 1, "B", microbatch), (stage + 1, "I", microbatch))
    return [((stage, "F", microbatch),), *([behind] if stage + 1 < num_stages else [])]


def _is_ready(action, done, num_stages):
    return all(done.intersection(some) for some in _needs(action, num_stages))


def random_orders(seed, num_stages, num_devices, num_microbatches):
    """Lists of actions in a random order that devices can run, each in its own: (rows, device_of).

    Stages are on any devices, and each backward is whole or in halves.
    """
    rng = random.Random(seed)
    device_of = [*range(num_devices), *rng.choices(range(num_devices), k=num_stages - num_devices)]
    rng.shuffle(device_of)
    left = set()
    for stage in range(num_stages):
        for microbatch in range(num_microbatches):
            kinds = rng.choice(["FB", "FIW"])
            left |= {Action(stage, kind, microbatch) for kind in kinds}
    rows, done = [[] for _ in range(num_devices)], set()
    while left:
        ready = sorted(action for action in left if _is_ready(action, done, num_stages))
        action = rng.choice(ready)
        left.remove(action)
        done.add(action)
        rows[device_of[action.stage]].append(action)
    return rows, tuple(device_of)


def can_run(rows, num_stages):
    """Whether devices that do their actions one after the other come to an end."""
    left, done = [list(row) for row in rows], set()
    progress = True
    while progress:
        progress = False
        for row in left:
            while row and _is_ready(row[0], done, num_stages):
                done.add(row.pop(0))
                progress = True
    return not any(left)


def as_schedule(rows, device_of, num_microbatches):
    """A schedule of such lists, not aligned."""
    return Schedule("random", rows, device_of, num_microbatches)


# --- tables --------------------------------------------------------------------------------------


def _work(table, tick, device):
    """(stage, micro-batch) of an action; None where a device is idle."""
    stage, microbatch = int(table.stage[tick, device]), int(table.microbatch[tick, device])
    return None if stage == IDLE else (stage, microbatch)


def _empty(storage, num_devices):
    return [[None] * (storage.num_slots + 1) for _ in range(num_devices)]


def _exchange(buffers, route, tick, sent, target_of):
    """Puts what each device has made where the tables say, under the name of its receiver."""

    def put(row, source, target):
        value = sent[source] and target_of(sent[source])
        buffers[target][route.arrivals[row, tick, target]] = value

    for row, pairs in enumerate(route.links):
        for source, target in pairs:
            put(row, source, target)
    for device in range(len(buffers)):
        if route.arrivals[-1, tick, device] < route.storage.num_slots:
            put(-1, device, device)


def assert_tables_are_right(schedule, rereads, stash="inputs"):
    """Plays the tables of a schedule: every reader finds what was written for it."""
    count, devices = schedule.num_stages, range(schedule.num_devices)
    wires = [[(s, s + 1) for s in range(count - 1)]]
    tables = lower(schedule, wires, stash=stash, keeps_inputs=rereads)
    (activations,), (cotangents,) = tables.activations, tables.cotangents
    received = _empty(activations.storage, len(devices))
    returned = _empty(cotangents.storage, len(devices))
    residuals, deferred = (_empty(s, len(devices)) for s in (tables.residuals, tables.deferred))
    done = []
    for tick in range(tables.num_ticks):
        forward_of, backward_of = {}, {}
        for device in devices:
            forward = forward_of[device] = _work(tables.forward, tick, device)
            half = _work(tables.halved, tick, device)
            whole = _work(tables.backward, tick, device)
            backward = backward_of[device] = whole or half
            weight = _work(tables.weight, tick, device)

            def read(buffer, table, tick=tick, device=device):
                return buffer[device][table[tick, device]]

            if forward:
                if forward[0]:
                    assert read(received, activations.storage.forward) == forward
                residuals[device][tables.residuals.forward[tick, device]] = forward
            for value, table in ((backward, "backward"), (weight, "weight")):
                if value:
                    assert read(residuals, getattr(tables.residuals, table)) == value
                    if rereads and value[0]:
                        assert read(received, getattr(activations.storage, table)) == value
            if backward and backward[0] < count - 1:
                assert read(returned, cotangents.storage.backward) == backward
            if half:
                deferred[device][tables.deferred.backward[tick, device]] = half
            if weight:
                assert read(deferred, tables.deferred.weight) == weight
            done += [
                (kind, *value)
                for kind, value in (("F", forward), ("B", whole), ("I", half), ("W", weight))
                if value
            ]
        _exchange(received, activations, tick, forward_of, lambda v: (v[0] + 1, v[1]))
        _exchange(returned, cotangents, tick, backward_of, lambda v: (v[0] - 1, v[1]))
    actions = [action for row in schedule.rows for action in row if action is not None]
    assert sorted(done) == sorted((kind, stage, m) for stage, kind, m in actions)

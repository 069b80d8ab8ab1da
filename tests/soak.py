"""A soak test: faults without number are put into training, and training must not notice.

    make soak                                     100,000 faults, all steps of `soak_rigs`
    make soak ARGS="--faults 5000 --seed 3 zero1"     fewer, in the steps whose name holds a word

Infinities, NaNs and the largest finite number go into single elements of gradients, into losses and
into rows of a batch, on any micro-batch, device and stage. What must hold for each step of
`soak_rigs.RIGS`:

    with faults       s0 -> s1 -> X  -> s2 -> X  -> X  -> s3      X: skipped
    without           s0 -> s1 ------> s2 ------------> s3        the same batches but those of X

Parameters and the optimizer's state at the end are equal bit for bit. The scale makes no exception:
before each step of the second run it is set to what the first run had there, since skips lower it.
That the first run's scale and counters are right is held against a model of them in plain Python.
A fault that is no finite number must be skipped; the largest finite number may be accepted, but
what is accepted is finite.

Other faults go into single elements of parameters and moments themselves. No step can mend those. A
step on parameters with a NaN must leave the state as it was, bit for bit, and count one skipped
step; so must one on moments that are not finite, where the loss scale judges updates too
(`nonfinite_updates="skip"`).

Nothing that was accepted may spoil what follows: in float32 no step without a fault is skipped.

Each step is compiled once, and no call of it moves data between host and devices.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import conftest  # noqa: F401 (virtual devices and the compilation cache)
import jax
import numpy as np
from helpers import assert_bit_equal
from pipeline_steps import LAYERS, ROWS
from soak_rigs import ELEMENTS, RIGS, Dynamics, Rig, clean_batch, make_rig

import ampx

LARGEST = float(np.finfo(np.float32).max)
VALUES = {"inf": np.inf, "-inf": -np.inf, "nan": np.nan, "largest": LARGEST, "-largest": -LARGEST}
UNUSABLE = (np.nan, np.inf, -np.inf)
BLOCK = 50  # steps between two looks at what happened
MOVING = ("loss_scale", "growth_tracker", "hysteresis_tracker")  # what a skip changes in a scale

# A schedule changes the scale when its phase ends, by rules of its own.
UNMODELLED = {name for name, choice in RIGS.items() if choice[2] == "switches"}
# In half a scale that has grown too far overflows by itself: that is how it is found.
IN_HALF = {name for name, choice in RIGS.items() if choice[2] != "f32"}


@dataclasses.dataclass
class ScaleModel:
    """What a loss scale and its counters should be, by the rules of `ampx.dynamic_loss_scale`."""

    dynamics: Dynamics
    scale: float = 0.0
    good: int = 0
    tolerance: int = 0

    def __post_init__(self) -> None:
        self.scale, self.tolerance = self.dynamics.init, self.dynamics.hysteresis

    def advance(self, overflowed: bool) -> None:
        rules = self.dynamics
        if not rules.interval:
            return
        if not overflowed:
            self.good += 1
            if self.good >= rules.interval:
                self.scale, self.good = 2 * self.scale, 0
                self.tolerance = rules.hysteresis
            if rules.refill == "finite":
                self.tolerance = rules.hysteresis
            return
        self.good = 0
        self.tolerance = max(self.tolerance - 1, 0)
        if self.tolerance == 0:
            self.scale = max(self.scale / 2, rules.floor)
            if rules.refill == "change":
                self.tolerance = rules.hysteresis


@dataclasses.dataclass
class Count:
    """What was tried on one rig, and what became of it."""

    faults: int = 0
    steps: int = 0
    overflows: int = 0
    bad_updates: int = 0
    accepted: int = 0
    states: int = 0


def spoil(batch: dict[str, np.ndarray], generator: np.random.Generator, rig: Rig) -> bool:
    """Puts one fault into a batch; whether the step must be skipped."""
    value = VALUES[generator.choice(list(VALUES))]
    row = generator.integers(ROWS)
    kinds = ["loss", "rows"] + ["gradient"] * (2 if rig.takes_gradient_faults else 0)
    kind = generator.choice(kinds)
    batch["mask"][row] = 1  # a row without tokens has no part in the loss
    if kind == "loss":
        batch["mask"][row, generator.integers(batch["mask"].shape[1])] = value
    elif kind == "rows":
        batch["gains"][row, generator.integers(LAYERS)] = value
    else:
        batch["faults"][row, generator.integers(ELEMENTS)] = value
    return not np.isfinite(value)


def soak(name: str, faults: int, seed: int) -> Count:
    """Runs one rig until it has seen so many faults, and checks all that must hold."""
    generator = np.random.default_rng([seed, *name.encode()])
    rig, count = make_rig(name), Count()
    pool = [clean_batch(number, rig) for number in range(8)]
    good_batches = [rig.place(batch) for batch in pool]
    with_faults = without = rig.state
    model = ScaleModel(rig.dynamics)
    skipped_total = bad_update_total = 0
    while count.faults < faults:
        history, states = [], []
        for _ in range(BLOCK):
            number, must_skip = generator.integers(len(pool)), False
            batch = good_batches[number]
            # About as many runs of faults as of good steps; runs are short.
            is_fault = count.faults < faults and generator.random() < 0.5
            if is_fault:
                spoilt = {key: leaf.copy() for key, leaf in pool[number].items()}
                must_skip = spoil(spoilt, generator, rig)
                batch = rig.place(spoilt)
                count.faults += 1
            states.append((with_faults, batch))
            before = find_scale(with_faults)
            with jax.transfer_guard("disallow"):
                with_faults, report = rig.step(with_faults, batch)
            after = find_scale(with_faults)
            history.append((is_fault, must_skip, before, after, report.overflow))
        for (faulty, batch), seen in zip(states, jax.device_get(history), strict=True):
            is_fault, must_skip, before, after, overflow = seen
            count.steps += 1
            bad_update = int(after.bad_update_total) - bad_update_total
            counted = int(after.skipped_total) - skipped_total
            skipped_total, bad_update_total = skipped_total + counted, bad_update_total + bad_update
            overflowed = bool(overflow) and not bad_update
            assert counted == bool(overflow), f"{name}: {counted} counted for {overflow}"
            assert overflow or not must_skip, f"{name}: accepted what is not finite"
            assert is_fault or not overflow or name in IN_HALF, f"{name}: no fault, skipped"
            if name not in UNMODELLED:
                found = [float(getattr(before, field)) for field in MOVING]
                assert found == [model.scale, model.good, model.tolerance], (name, found, model)
                model.advance(overflowed)
            count.overflows += overflowed
            count.bad_updates += bool(bad_update)
            count.accepted += is_fault and not overflow
            if not overflow:
                without, _ = rig.step(with_scale(without, faulty), batch)
        assert_bit_equal(trained(with_faults), trained(without))
        assert all(np.all(np.isfinite(leaf)) for leaf in floats(trained(with_faults))), name
        count.states += spoil_states(name, rig, with_faults, good_batches[0], generator)
    assert rig.step._cache_size() == 1, f"{name} was compiled {rig.step._cache_size()} times"
    return count


# --- states --------------------------------------------------------------------------------------


def find_scale(state: Any) -> Any:
    """The state of the loss scale, without that of the optimizer inside."""
    found = ampx.find_loss_scale_state(state.opt_state)
    assert found is not None
    return found._replace(inner_state=())


def map_scale(state: Any, replace: Callable[[Any], Any]) -> Any:
    """The state with the state of its loss scale replaced by a function of it."""
    kind = ampx.LossScaleState
    opt_state = jax.tree.map(
        lambda node: replace(node) if isinstance(node, kind) else node,
        state.opt_state,
        is_leaf=lambda node: isinstance(node, kind),
    )
    return state._replace(opt_state=opt_state)


def with_scale(state: Any, other: Any) -> Any:
    """The same parameters and optimizer, with the loss scale, and what is around it, of another."""
    inner = find_inner(state)
    moved = map_scale(other, lambda scale: scale._replace(inner_state=inner))
    return moved._replace(step=state.step, params=state.params)


def find_inner(state: Any) -> Any:
    return ampx.find_loss_scale_state(state.opt_state).inner_state


def trained(state: Any) -> Any:
    """What training makes: all but the loss scale and its counters, with each device's own copy."""
    return jax.tree.map(shards, (state.step, state.params, find_inner(state)))


def shards(leaf: jax.Array) -> list[np.ndarray]:
    return [np.asarray(shard.data) for shard in leaf.addressable_shards]


def floats(tree: Any) -> Iterator[np.ndarray]:
    for leaf in jax.tree.leaves(tree):
        if jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating):
            yield leaf.astype(np.float32)


def spoil_states(
    name: str, rig: Rig, state: Any, batch: Any, generator: np.random.Generator
) -> int:
    """Steps from states with one bad element; the number of them."""
    # A NaN in a parameter reaches the gradients.
    spoilt = with_bad_element(state, generator, np.nan, of_params=True)
    check_is_held(name, rig, spoilt, batch)
    if not rig.dynamics.strict:
        return 1  # an optimizer is trusted with its own state
    spoilt = with_bad_element(state, generator, generator.choice(UNUSABLE), of_params=False)
    result, report = rig.step(spoilt, batch)
    if report.overflow:
        check_is_held(name, rig, spoilt, batch)
    # An infinite second moment makes updates of zero: then there is nothing to undo.
    assert all(np.all(np.isfinite(leaf)) for leaf in floats(result.params)), name
    return 2


def check_is_held(name: str, rig: Rig, state: Any, batch: Any) -> None:
    """A step from this state leaves every bit of it, and counts one skipped step."""
    result, report = rig.step(state, batch)
    assert report.overflow, f"{name}: a step from a state that is not finite was accepted"
    assert_bit_equal(trained(result), trained(state))
    assert find_scale(result).skipped_total - find_scale(state).skipped_total == 1, name


def with_bad_element(
    state: Any, generator: np.random.Generator, value: float, *, of_params: bool
) -> Any:
    """The state with one element of its parameters, or of the optimizer's state, replaced."""
    leaves, structure = jax.tree.flatten(state.params if of_params else find_inner(state))
    is_float = [leaf.size and jax.numpy.issubdtype(leaf.dtype, np.inexact) for leaf in leaves]
    place = generator.choice(np.flatnonzero(is_float))
    leaf = np.array(leaves[place])
    leaf.flat[generator.integers(leaf.size)] = value
    leaves[place] = jax.device_put(leaf, leaves[place].sharding)
    spoilt = jax.tree.unflatten(structure, leaves)
    if of_params:
        return state._replace(params=spoilt)
    return map_scale(state, lambda scale: scale._replace(inner_state=spoilt))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only the steps whose name holds one of these")
    parser.add_argument("--faults", type=int, default=100_000, help="in all steps together")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    names = [n for n in RIGS if not options.words or any(w in n for w in options.words)]
    if not names:
        parser.error(f"no step has one of {options.words} in its name: {list(RIGS)}")
    total, failed = Count(), []
    for name in names:
        start = time.perf_counter()
        try:
            count = soak(name, -(-options.faults // len(names)), options.seed)
        except AssertionError as error:
            failed.append(name)
            print(f"{name:45} FAILED: {error}"[:2000], flush=True)
            continue
        for field in dataclasses.fields(Count):
            value = getattr(total, field.name) + getattr(count, field.name)
            setattr(total, field.name, value)
        seconds = time.perf_counter() - start
        print(f"{name:45} {count} in {seconds:.0f} s", flush=True)
    print(f"{'all':45} {total}, {len(failed)} of {len(names)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

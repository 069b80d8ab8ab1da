"""`torch.amp.GradScaler` beside `ampx.dynamic_loss_scale`, over the same random histories.

Both get the same losses step by step. After each step they must agree on the scale, on the growth
tracker, on whether the step was skipped, and, bit for bit, on the parameters and the momentum: all
factors are powers of two, so nothing is rounded on the way that the other does not round.
"""

import collections
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import scan_flags
from hypothesis import given
from listing import Peer

import ampx

torch = pytest.importorskip("torch")

# Where ampx departs from torch on purpose. `test_torch_departs_where_it_is_said_to` shows each.
EXCLUDED = {
    "a tracker beyond the interval": "torch compares with ==, so a run that is resumed with a "
    "shorter interval never grows its scale again; ampx grows it at the next finite step",
    "a scale below 1 or above 2**24": "torch has no bounds; ampx has min_scale and max_scale",
    "a growth factor of 1": "torch refuses it; in ampx it is a scale that only falls",
    "float16 gradients": "torch refuses to unscale them; ampx unscales them in float32",
    "a fused SGD that begins with a bad step": "torch makes its momentum and writes nothing into "
    "it, so the next step adds what was in that memory; in ampx momentum begins at zero",
    "squares that overflow": "torch takes a step with any finite gradients; ampx undoes one whose "
    "squares do not add up to a finite number, counts it, and leaves the scale",
}
FORMS = ("optax", "fused", "micro-batches", "multi_steps")
DUELS = ("two optimizers", "two optimizers in turns")
PEERS = (
    Peer(
        source="torch",
        runs="`torch.amp.GradScaler`, over random histories of finite and other gradients: "
        "scale, growth tracker, skips, parameters and momenta as of `ampx.dynamic_loss_scale`",
        cases=lambda: [
            *FORMS,
            *DUELS,
            "saved state",
            "factors that are no powers of two",
            *EXCLUDED,
        ],
        excluded=EXCLUDED,
    ),
)

# Multiples of these stay normal float32 numbers under all scales below, or become infinite: 2**60
# times a scale of 2**68. Squares of their sums are finite, so ampx undoes what torch skips.
NUMBERS = (1.0, -0.5, 3.0, 0.0, 2.0**-60, -(2.0**60), math.inf, -math.inf, math.nan)
GOOD, BAD = NUMBERS[:5], NUMBERS[5:]
UNBOUNDED = {"min_scale": 2.0**-126, "max_scale": 2.0**126}
RATE, MOMENTUM = 0.5, 0.5
START = (np.array([1.0, -2.0], np.float32), np.array([[0.25]], np.float32))

gradient = st.tuples(*[st.sampled_from(GOOD * 4 + BAD)] * 3)
windows = st.lists(gradient, min_size=2, max_size=2)
histories = st.lists(windows, min_size=1, max_size=12)
scales = st.sampled_from([2.0**-4, 1.0, 8.0, 2.0**16, 2.0**67])
# Each is compiled once: growth_factor, backoff_factor, growth_interval.
DYNAMICS = [(2.0, 0.5, 1), (2.0, 0.5, 3), (4.0, 0.5, 2), (2.0, 0.25, 4), (4.0, 0.125, 1)]
dynamics = st.sampled_from(DYNAMICS)


def settings_of(dynamics: tuple) -> dict[str, Any]:
    return dict(zip(("growth_factor", "backoff_factor", "growth_interval"), dynamics, strict=True))


class Step(NamedTuple):
    """What both are compared by after a step."""

    scale: float
    growth_tracker: int
    skipped: bool
    params: list[np.ndarray]
    momenta: list[np.ndarray]


def factors_of(numbers: Any) -> tuple[np.ndarray, np.ndarray]:
    """Of the loss `sum(factors * params)`: so its gradients are these."""
    flat = np.asarray(numbers, np.float32)
    return flat[:2], flat[2:].reshape(1, 1)


class TorchRun:
    """torch's scaler and its SGD."""

    def __init__(self, *, fused: bool = False, **settings: Any) -> None:
        self.params = [torch.nn.Parameter(torch.tensor(array)) for array in START]
        groups = [{"params": [param]} for param in self.params]
        self.optimizer = torch.optim.SGD(groups, lr=RATE, momentum=MOMENTUM, fused=fused)
        self.scaler = torch.amp.GradScaler("cpu", **settings)

    def step(self, window: list) -> Step:
        """Adds up the gradients of a window of losses, then makes a step."""
        self.optimizer.zero_grad()
        for numbers in window:
            pairs = zip(self.params, map(torch.tensor, factors_of(numbers)), strict=True)
            loss = sum((param * factors).sum() for param, factors in pairs)
            self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        skipped = any(self.scaler._found_inf_per_device(self.optimizer).values())
        self.scaler.update()
        traces = [self.optimizer.state[param].get("momentum_buffer") for param in self.params]
        return Step(
            self.scaler.get_scale(),
            self.scaler._get_growth_tracker(),
            skipped,
            [param.detach().numpy().copy() for param in self.params],
            [
                np.zeros_like(start) if trace is None else trace.numpy().copy()
                for start, trace in zip(START, traces, strict=True)
            ],
        )


def loss_fn(params: list, batch: list) -> Any:
    return sum(jnp.sum(param * factors[0]) for param, factors in zip(params, batch, strict=True))


def make(form: str, dynamics: tuple, init_scale: float) -> optax.GradientTransformation:
    sgd = ampx.fused.sgd if form == "fused" else optax.sgd
    settings = {**settings_of(dynamics), **UNBOUNDED, "init_scale": init_scale}
    tx = ampx.dynamic_loss_scale(sgd(RATE, MOMENTUM), **settings)
    return ampx.multi_steps(tx, 2, normalize="sum") if form == "multi_steps" else tx


@functools.cache
def step_of(form: str, dynamics: tuple, num_microbatches: int) -> Callable:
    """The compiled step, which is the same for every first scale."""
    tx = make(form, dynamics, 1.0)
    grads_of = ampx.value_and_grad(loss_fn, num_microbatches=num_microbatches, normalize="sum")

    @jax.jit
    def step(params, state, batch):
        result = grads_of(params, batch, loss_scale=ampx.current_loss_scale(state))
        updates, state = tx.update(result.grads, state, params)
        return ampx.apply_updates(params, updates), state

    return step


class AmpxRun:
    """ampx's scale. A window of losses is one call with micro-batches, or as many calls."""

    def __init__(self, form: str, dynamics: tuple, init_scale: float) -> None:
        self.params = [jnp.asarray(array) for array in START]
        self.state = make(form, dynamics, init_scale).init(self.params)
        self.form, self.dynamics = form, dynamics

    def step(self, window: list) -> Step:
        factors = [np.stack(arrays) for arrays in zip(*map(factors_of, window), strict=True)]
        calls = len(window) if self.form == "multi_steps" else 1
        call = step_of(self.form, self.dynamics, len(window) // calls)
        for number in range(calls):
            batch = [array[number::calls] for array in factors]
            self.params, self.state = call(self.params, self.state, batch)
        scale = ampx.find_loss_scale_state(self.state)
        return Step(
            float(scale.loss_scale),
            int(scale.growth_tracker),
            bool(scale.overflow),
            [np.asarray(param) for param in self.params],
            [np.asarray(trace) for trace in optax.tree.get(self.state, "trace")],
        )


def check_histories(
    form: str, dynamics: tuple, init_scale: float, history: list, *, fused: bool = False
) -> None:
    theirs = TorchRun(fused=fused, init_scale=init_scale, **settings_of(dynamics))
    ours = AmpxRun(form, dynamics, init_scale)
    for number, window in enumerate(history):
        found, expected = ours.step(window), theirs.step(window)
        assert found[:3] == expected[:3], (number, window)
        for own, other in zip(found[3] + found[4], expected[3] + expected[4], strict=True):
            np.testing.assert_array_equal(own, other, err_msg=f"{number}: {window}")


@pytest.mark.parametrize("form", FORMS[:2])
@given(dynamics=dynamics, init_scale=scales, history=histories)
def test_torch_grad_scaler_over_histories(form, dynamics, init_scale, history):
    check_histories(form, dynamics, init_scale, [window[:1] for window in history])


@given(dynamics=dynamics, init_scale=scales, history=histories)
def test_torch_grad_scaler_inside_a_fused_optimizer(dynamics, init_scale, history):
    """torch's fused SGD unscales and skips by itself, as those of ampx do."""
    steps = [[(1.0, 1.0, 1.0)], *(window[:1] for window in history)]  # it must not begin badly
    check_histories("fused", dynamics, init_scale, steps, fused=True)


@pytest.mark.parametrize("form", FORMS[2:])
@given(dynamics=dynamics, init_scale=scales, history=histories)
def test_torch_grad_scaler_over_windows(form, dynamics, init_scale, history):
    """The scale stays the same within a window, and one bad loss in it skips the whole of it."""
    check_histories(form, dynamics, init_scale, history)


# Two networks with an optimizer each: a loss of the first, a loss of the second, and one of both;
# and whose turn it is.
duels = st.lists(
    st.tuples(*[st.sampled_from(GOOD * 4 + BAD)] * 4, st.sampled_from(["ab", "ab", "a", "b"])),
    min_size=1,
    max_size=12,
)
NETWORKS = {"a": np.array([1.0, -2.0], np.float32), "b": np.array([0.25], np.float32)}


@functools.cache
def duel_step_of(dynamics: tuple, who: str, in_turns: bool) -> Callable:
    tx = make_duel(dynamics, 1.0)

    @jax.jit
    def step(params, state, factors):
        scale = ampx.current_loss_scale(state)
        grads = {name: factors[name][0] * scale + factors[name][1] * scale for name in who}
        calls = [{name: grads[name]} for name in who] if in_turns else [grads]
        for number, own_grads in enumerate(calls):
            is_last = number == len(calls) - 1
            own = {name: params[name] for name in own_grads}
            updates, state = tx.update(own_grads, state, own, move_scale=is_last)
            params = {**params, **ampx.apply_updates(own, updates)}
        return params, state

    return step


def make_duel(dynamics: tuple, init_scale: float) -> optax.GradientTransformationExtraArgs:
    optimizers = {"a": optax.sgd(RATE, MOMENTUM), "b": ampx.fused.sgd(RATE, MOMENTUM)}
    settings = {**settings_of(dynamics), **UNBOUNDED, "init_scale": init_scale}
    return ampx.dynamic_loss_scale(optimizers, **settings)


@pytest.mark.parametrize("in_turns", [False, True], ids=DUELS)
@given(dynamics=st.sampled_from(DYNAMICS[1:3]), init_scale=scales, duel=duels)
def test_torch_grad_scaler_of_two_optimizers(in_turns, dynamics, init_scale, duel):
    """Only the optimizer with bad gradients skips; the scale falls once for both."""
    params = {name: torch.nn.Parameter(torch.tensor(start)) for name, start in NETWORKS.items()}
    optimizers = {
        name: torch.optim.SGD([param], lr=RATE, momentum=MOMENTUM) for name, param in params.items()
    }
    calls = collections.Counter()
    for name, optimizer in optimizers.items():
        optimizer.register_step_pre_hook(lambda *_, name=name: calls.update(name))
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, **settings_of(dynamics))
    tx = make_duel(dynamics, init_scale)
    found = {name: jnp.asarray(start) for name, start in NETWORKS.items()}
    state = tx.init(found)
    for number, (*numbers, of_both, who) in enumerate(duel):
        first, second, third = np.float32(numbers)
        factors = {
            "a": np.array([[first, second], [of_both, 1]], np.float32),
            "b": np.array([[third], [of_both]], np.float32),
        }
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        own = [(params[name] * torch.tensor(factors[name][0])).sum() for name in who]
        both = sum((params[name] * torch.tensor(factors[name][1])).sum() for name in who)
        for loss in (*own, both):
            scaler.scale(loss).backward()
        before = calls.copy()
        for name in who:
            scaler.step(optimizers[name])
        scaler.update()
        step = duel_step_of(dynamics, who, in_turns)
        found, state = step(found, state, factors)
        where = (number, duel[number])
        assert float(state.loss_scale) == scaler.get_scale(), where
        assert int(state.growth_tracker) == scaler._get_growth_tracker(), where
        for name in who:
            skipped = state.inner_state.optimizer_skipped[name]
            assert bool(skipped) == (calls[name] == before[name]), where
        for name, param in params.items():
            expected = param.detach().numpy()
            np.testing.assert_array_equal(found[name], expected, err_msg=str(where))


def test_torch_grad_scaler_goes_on_from_its_saved_state():
    """A scale and a tracker are all that both keep; ampx takes them over from torch's dict."""
    theirs = TorchRun(init_scale=8.0, growth_interval=3)
    theirs.step([(1.0, 1.0, math.inf)])
    theirs.step([(1.0, 1.0, 1.0)])
    saved = theirs.scaler.state_dict()
    ours = AmpxRun("optax", (2.0, 0.5, 3), 1.0)
    ours.state = ours.state._replace(
        loss_scale=jnp.float32(saved["scale"]),
        growth_tracker=jnp.int32(saved["_growth_tracker"]),
    )
    for _ in range(4):
        expected, found = theirs.step([(1.0, 1.0, 1.0)]), ours.step([(1.0, 1.0, 1.0)])
        assert found[:3] == expected[:3]


@given(
    factors=st.tuples(st.floats(1.01, 3.0), st.floats(0.1, 0.99)),
    flags=st.lists(st.booleans(), min_size=1, max_size=30),
)
def test_torch_grad_scaler_with_factors_that_are_no_powers_of_two(factors, flags):
    """torch multiplies in float64 and rounds, ampx in float32: 2**-22 a step, for two roundings."""
    growth, backoff = factors
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=1.0, growth_factor=growth, backoff_factor=backoff, growth_interval=1
    )
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=1.0)
    tx = ampx.dynamic_loss_scale(
        optax.sgd(1.0),
        init_scale=1.0,
        growth_factor=growth,
        backoff_factor=backoff,
        growth_interval=1,
        powers_of_two=False,
        **UNBOUNDED,
    )
    states = scan_flags(tx, flags)
    for number, bad in enumerate(flags):
        scaler.scale(torch.zeros(1))
        param.grad = torch.full((1,), math.inf if bad else 1.0)
        scaler.step(optimizer)
        scaler.update()
        found, expected = states.loss_scale[number], scaler.get_scale()
        np.testing.assert_allclose(found, expected, rtol=(number + 1) * 2.0**-22)


def depart_beyond_the_interval() -> None:
    theirs = TorchRun(init_scale=8.0, growth_interval=2)
    saved = {**theirs.scaler.state_dict(), "_growth_tracker": 5}
    theirs.scaler.load_state_dict(saved)
    ours = AmpxRun("optax", (4.0, 0.5, 2), 8.0)
    ours.state = ours.state._replace(growth_tracker=jnp.int32(5))
    assert theirs.step([(1.0, 1.0, 1.0)])[:2] == (8.0, 6)
    assert ours.step([(1.0, 1.0, 1.0)])[:2] == (32.0, 0)


def depart_at_the_bounds() -> None:
    for init_scale, number, moved in ((1.0, math.inf, 0.5), (2.0**24, 1.0, 2.0**25)):
        theirs = TorchRun(init_scale=init_scale, growth_interval=1)
        assert theirs.step([(1.0, 1.0, number)]).scale == moved
        tx = ampx.dynamic_loss_scale(optax.sgd(1.0), init_scale=init_scale, growth_interval=1)
        states = scan_flags(tx, [math.isinf(number)])
        assert states.loss_scale == init_scale


def depart_at_float16() -> None:
    theirs = TorchRun(init_scale=8.0)
    theirs.params[0].data = theirs.params[0].data.half()
    with pytest.raises(ValueError, match="unscale FP16"):
        theirs.step([(1.0, 1.0, 1.0)])
    tx = ampx.dynamic_loss_scale(optax.sgd(1.0), init_scale=8.0)
    param = jnp.ones(1, jnp.float16)
    updates, _ = tx.update(jnp.full(1, 8.0, jnp.float16), tx.init(param), param)
    assert updates == -1


def depart_at_growth_of_one() -> None:
    with pytest.raises(AssertionError, match="growth factor"):
        torch.amp.GradScaler("cpu", growth_factor=1.0)
    tx = ampx.dynamic_loss_scale(optax.sgd(1.0), growth_factor=1.0, growth_interval=1)
    assert scan_flags(tx, [False]).loss_scale == 2.0**16


def depart_at_squares() -> None:
    window = [(1.0, 1.0, 2.0**100)]
    theirs, before = TorchRun(init_scale=1.0), START[1]
    assert np.all(theirs.step(window).params[1] != before)
    for form in ("fused", "optax"):
        ours = AmpxRun(form, (2.0, 0.5, 3), 1.0)
        step = ours.step(window)
        assert np.all(step.params[1] == before) and step.skipped and step.scale == 1.0
        assert ampx.find_loss_scale_state(ours.state).bad_update_total == 1


def depart_at_a_bad_beginning() -> None:
    window = [(1.0, 1.0, math.inf)]
    for fused in (False, True):
        theirs = TorchRun(fused=fused, init_scale=8.0)
        assert theirs.step(window).skipped
        assert ("momentum_buffer" in theirs.optimizer.state[theirs.params[0]]) == fused
    check_histories("fused", (2.0, 0.5, 3), 8.0, [window, [(1.0, 1.0, 1.0)]])


DEPARTURES = {
    "a tracker beyond the interval": depart_beyond_the_interval,
    "a scale below 1 or above 2**24": depart_at_the_bounds,
    "a growth factor of 1": depart_at_growth_of_one,
    "float16 gradients": depart_at_float16,
    "a fused SGD that begins with a bad step": depart_at_a_bad_beginning,
    "squares that overflow": depart_at_squares,
}


def test_every_departure_is_shown():
    assert DEPARTURES.keys() == EXCLUDED.keys()


@pytest.mark.parametrize("name", DEPARTURES)
def test_torch_departs_where_it_is_said_to(name):
    DEPARTURES[name]()

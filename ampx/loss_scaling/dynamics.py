"""Where a loss scale goes after a good or a bad step: a pure state machine and its settings.

Two counters drive the scale S. `growth_tracker` g counts finite steps in a row, and S grows when g
reaches N = `growth_interval`. The tolerance `hysteresis_tracker` h says how many overflows it still
takes until S falls; it begins full, at H = `hysteresis`. Every overflow skips its step, whether S
falls or not. With the default factors, 2 and 1/2:

    step                   S                        g        h
    finite, g + 1 < N      stays                    g + 1    stays, or H with "finite"
    finite, g + 1 >= N     min(2 S, max_scale)      0        H
    overflow, h > 1        stays                    0        h - 1
    overflow, h <= 1       max(S / 2, min_scale)    0        0, or H with "change"

Systems differ in what refills the tolerance, and `refill` chooses. With H = 3 and an overflow X:

    h = 3 ---X---> h = 2 ---X---> h = 1 ---X: S / 2---> h = 0 ---X: S / 2---+
      ^              |              |                   |   ^               |
      |              |              |                   |   +---------------+
      +----refill----+----refill----+------refill-------+

    "finite"    any finite step refills: only H overflows in a row lower S (Apex's kernel)
    "growth"    only growth refills: H overflows lower S however far apart they are, and until S
                has grown again each further one lowers it at once (Megatron-LM)
    "change"    growth refills, and so does each fall of S, which leads to h = H instead of h = 0:
                every H overflows since the last move lower S (Ascend)

For H = 2, N = 3, S = 8 and finite steps "o":

    step               o   X   o   X   X   o   o   o
    "finite"     S     8   8   8   8   4   4   4   8
                 h     2   1   2   1   0   2   2   2
    "growth"     S     8   8   8   4   2   2   2   4
                 h     2   1   1   0   0   0   0   2
    "change"     S     8   8   8   4   4   4   4   8
                 h     2   1   1   2   1   1   1   2

N may adapt, too, between levels N_1 < N_2 < ...: short while S is on its way, long once it has
arrived, where each growth that is too much costs a step. It starts at N_1. The third growth at a
level leads to the next one. The third fall in a row, with no growth between, leads to N = 1, and
from there the third growth to N_1; at N_1 falls change nothing. (MindFormers)
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from ampx.checking import as_bool, as_number, as_positive_int, check_choice, suggest
from ampx.loss_scaling.state import GrowthIntervalState, LossScaleState
from ampx.trees import count_up

Refill = Literal["growth", "finite", "change"]
OnFloor = Literal["hold", "raise-flag"]
# Growths at one interval, or falls in a row, after which an interval that adapts moves.
_ENOUGH = 3
# The largest and smallest powers of two whose inverse is a normal float32 too. Beyond, 1/scale is
# subnormal, which accelerators flush to zero, or infinite.
_SMALLEST_SCALE, _LARGEST_SCALE = 2.0**-126, 2.0**126


@dataclasses.dataclass(frozen=True)
class ScaleDynamics:
    """The settings of `ampx.dynamic_loss_scale`, checked, and the rule by which a scale moves.

    The fields are the arguments of that function.
    """

    init_scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int | Sequence[int]
    hysteresis: int
    refill: Refill
    min_scale: float
    max_scale: float
    on_floor: OnFloor
    powers_of_two: bool

    def __post_init__(self) -> None:
        """Refuses settings that contradict each other or cannot be exact."""
        convert = functools.partial(object.__setattr__, self)  # the class is frozen
        convert("hysteresis", as_positive_int("hysteresis", self.hysteresis, is_counted=True))
        convert("growth_interval", _as_interval(self.growth_interval))
        convert("powers_of_two", as_bool("powers_of_two", self.powers_of_two))
        check_choice("refill", self.refill, get_args(Refill))
        check_choice("on_floor", self.on_floor, get_args(OnFloor))
        for name in ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale"):
            convert(name, as_scale_number(name, getattr(self, name), self.powers_of_two))
        if self.growth_factor < 1 or self.backoff_factor >= 1:
            raise ValueError(
                f"growth_factor must be >= 1 and backoff_factor < 1, got {self.growth_factor} and "
                f"{self.backoff_factor}"
            )
        if not self.min_scale <= self.init_scale <= self.max_scale:
            raise ValueError(
                f"init_scale={self.init_scale} is outside [min_scale={self.min_scale}, "
                f"max_scale={self.max_scale}]"
            )

    def init_interval(self, shape: tuple[int, ...]) -> GrowthIntervalState | tuple[()]:
        """The first state of the growth interval; empty if it does not adapt.

        Args:
          shape: (), or (n,) for n losses.
        """
        if isinstance(self.growth_interval, int):
            return ()
        first = jnp.full(shape, self.growth_interval[0], jnp.int32)
        return GrowthIntervalState(first, jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.int32))

    def advance(self, state: LossScaleState, bad: jax.Array) -> LossScaleState:
        """Moves the scale and its counters after a step, as in the table above.

        Args:
          state: before the step. With several losses its fields are vectors, and each loss moves
            by itself.
          bad: bool[*losses], whether the gradients of a loss held an infinity or a NaN.
        """
        finite_steps = count_up(state.growth_tracker)
        # ">=" and not "==": a run that was resumed with a shorter interval may have counted past it
        # already, and with "==" its scale would never grow again.
        adaptive = isinstance(state.interval, GrowthIntervalState)
        interval: Any = state.interval.growth_interval if adaptive else self.growth_interval
        grow = ~bad & (finite_steps >= interval)
        tolerance = state.hysteresis_tracker - bad.astype(jnp.int32)
        back_off = bad & (tolerance <= 0)

        scale = state.loss_scale
        grown = jnp.minimum(scale * self.growth_factor, self.max_scale)
        reduced = jnp.maximum(scale * self.backoff_factor, self.min_scale)
        at_floor = back_off & (scale <= self.min_scale)
        at_ceiling = grow & (scale >= self.max_scale)

        # After a fall h stays at 0 unless it is refilled, so the next overflow lowers S again: once
        # the tolerance is used up, Apex's kernel and Megatron-LM lower it at every overflow.
        refilled = {"finite": ~bad, "growth": grow, "change": grow | back_off}[self.refill]
        floor_flag = state.floor_flag
        if self.on_floor == "raise-flag":
            floor_flag |= jnp.any(at_floor)  # sticky: never cleared on the device
        return state._replace(
            loss_scale=jnp.where(grow, grown, jnp.where(back_off, reduced, scale)),
            growth_tracker=jnp.where(bad | grow, 0, finite_steps),
            hysteresis_tracker=jnp.where(refilled, self.hysteresis, jnp.maximum(tolerance, 0)),
            floor_hits=count_up(state.floor_hits, at_floor),
            ceiling_hits=count_up(state.ceiling_hits, at_ceiling),
            floor_flag=floor_flag,
            interval=self._adapt(state.interval, grow, back_off) if adaptive else state.interval,
        )

    def _adapt(
        self, state: GrowthIntervalState, grows: jax.Array, falls: jax.Array
    ) -> GrowthIntervalState:
        """Moves the growth interval after the scale has grown, fallen or stayed; bool[*losses]."""
        levels = jnp.array(self.growth_interval, jnp.int32)
        # The number of levels up to here, less one: -1 at the interval of 1 below the first level.
        level = jnp.sum(levels <= state.growth_interval[..., None], axis=-1, dtype=jnp.int32) - 1
        growths = jnp.minimum(state.growths_at_interval + grows.astype(jnp.int32), _ENOUGH)
        falls_in_a_row = jnp.minimum(state.falls_in_a_row + falls.astype(jnp.int32), _ENOUGH)
        falls_in_a_row = jnp.where(grows, 0, falls_in_a_row)
        climbs = grows & (growths == _ENOUGH) & (level < len(levels) - 1)
        drops = falls & (falls_in_a_row == _ENOUGH) & (level > 0)
        above = levels[jnp.minimum(level + 1, len(levels) - 1)]
        return GrowthIntervalState(
            jnp.where(climbs, above, jnp.where(drops, 1, state.growth_interval)),
            jnp.where(climbs | drops, 0, growths),
            jnp.where(drops, 0, falls_in_a_row),
        )


def _as_interval(value: Any) -> int | tuple[int, ...]:
    """One interval, or the levels of one that adapts."""
    name = "growth_interval"
    if isinstance(value, str) or not isinstance(value, Sequence):
        return as_positive_int(name, value, is_counted=True)
    levels = tuple(as_positive_int(name, level, is_counted=True) for level in value)
    if len(levels) < 2 or any(b <= a for a, b in itertools.pairwise(levels)):
        raise ValueError(
            f"{name} must be a positive int, or at least two of them in ascending order, between "
            f"which it adapts, got {value!r}"
        )
    return levels


def _choice_as_number(choice: Any) -> float:
    """Converts a word or number for a loss scale to a number: -1 off, 0 dynamic, NaN if neither."""
    if choice is None:
        return -1.0
    if isinstance(choice, str):
        named = {"none": -1.0, "dynamic": 0.0}
        try:
            return named[choice] if choice in named else float(choice)
        except ValueError:
            return math.nan
    # True would pass as the number 1, and "loss_scale=True" surely does not mean a scale of 1.
    is_bool = isinstance(choice, bool) or str(getattr(choice, "dtype", "")) == "bool"
    if is_bool or not hasattr(choice, "__float__"):
        raise TypeError(
            f"loss scale must be None, a string or a number, got {choice!r} of type "
            f"{type(choice).__name__}: write 'dynamic' or the number, or with settings a function "
            "such as functools.partial(ampx.dynamic_loss_scale, growth_interval=500)"
        )
    if getattr(choice, "shape", ()) not in ((), (1,)):
        raise ValueError(f"loss scale must have shape () or (1,), got {choice.shape}")
    return float(choice if getattr(choice, "shape", ()) == () else choice[0])


def parse_choice(choice: Any) -> float:
    """Converts what a user wrote for a loss scale to a number: -1 off, 0 dynamic, or the scale.

    Raises:
      TypeError: for what is neither None, string nor number, True and False included.
      ValueError: for any other word, or a number below 1.
    """
    number = _choice_as_number(choice)
    if number not in (-1, 0) and not number >= 1:
        raise ValueError(
            f"loss scale must be None, -1 or 'none' (off), 0 or 'dynamic', or a number >= 1, got "
            f"{choice!r}{suggest(choice, ('none', 'dynamic'))}"
        )
    return number


def as_scale_number(name: str, value: Any, powers_of_two: bool) -> float:
    """Converts a number that float32 can hold together with its inverse; refuses all others.

    With `powers_of_two`, 1/value must be exact too. A power of two is the only number with an exact
    inverse in binary floating point, and multiplying by it changes nothing but the exponent.
    """
    try:
        number = as_number(name, value)
    except ValueError:  # not finite
        number = math.nan
    if not _SMALLEST_SCALE <= number <= _LARGEST_SCALE:
        raise ValueError(f"{name} must be between 2**-126 and 2**126, got {value!r}")
    # frexp splits a number into m * 2**e with 0.5 <= m < 1: m is 0.5 for powers of two alone.
    if powers_of_two and math.frexp(number)[0] != 0.5:
        below = 2.0 ** math.floor(math.log2(number))
        raise ValueError(
            f"{name}={value!r} is not a power of two, so unscaling would round every gradient: use "
            f"{below:g} or {2 * below:g}, or pass powers_of_two=False"
        )
    return number

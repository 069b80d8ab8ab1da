"""Where a loss scale goes after a good or a bad step: a pure state machine and its settings."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from ampx.checking import check_choice, check_positive_int
from ampx.loss_scaling.state import LossScaleState

Refill = Literal["growth", "finite", "change"]
OnFloor = Literal["hold", "raise-flag"]
# Outside this range 1/scale is infinite or subnormal, which accelerators flush to zero.
_SMALLEST_SCALE, _LARGEST_SCALE = 2.0**-126, 2.0**126


@dataclasses.dataclass(frozen=True)
class ScaleDynamics:
    """The settings of `ampx.dynamic_loss_scale`, checked, and the rule by which a scale moves."""

    init_scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    hysteresis: int
    refill: Refill
    min_scale: float
    max_scale: float
    on_floor: OnFloor
    powers_of_two: bool

    def __post_init__(self) -> None:
        """Refuses settings that contradict each other or cannot be exact."""
        check_positive_int("growth_interval", self.growth_interval)
        check_positive_int("hysteresis", self.hysteresis)
        check_choice("refill", self.refill, get_args(Refill))
        check_choice("on_floor", self.on_floor, get_args(OnFloor))
        for name in ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale"):
            check_scale(name, getattr(self, name), self.powers_of_two)
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

    def advance(self, state: LossScaleState, bad: jax.Array) -> LossScaleState:
        """The state machine: where the scale goes after a good or a bad step."""
        finite_steps = state.growth_tracker + 1
        # Not "equal": a resumed run may have counted beyond a shorter interval already.
        grow = ~bad & (finite_steps >= self.growth_interval)
        tolerance = state.hysteresis_tracker - bad.astype(jnp.int32)
        back_off = bad & (tolerance <= 0)

        scale = state.loss_scale
        grown = jnp.minimum(scale * self.growth_factor, self.max_scale)
        reduced = jnp.maximum(scale * self.backoff_factor, self.min_scale)
        at_floor = back_off & (scale <= self.min_scale)

        # Apex's kernel and Megatron go on backing off once the tolerance is used up.
        refilled = {"finite": ~bad, "growth": grow, "change": grow | back_off}[self.refill]
        floor_flag = state.floor_flag
        if self.on_floor == "raise-flag":
            floor_flag |= jnp.any(at_floor)
        return state._replace(
            loss_scale=jnp.where(grow, grown, jnp.where(back_off, reduced, scale)),
            growth_tracker=jnp.where(bad | grow, 0, finite_steps),
            hysteresis_tracker=jnp.where(refilled, self.hysteresis, jnp.maximum(tolerance, 0)),
            floor_hits=state.floor_hits + at_floor.astype(jnp.int32),
            floor_flag=floor_flag,
        )


def _choice_as_number(choice: Any) -> float:
    """A word or number for a loss scale as one number: -1 off, 0 dynamic, NaN for other words."""
    if choice is None:
        return -1.0
    if isinstance(choice, str):
        named = {"none": -1.0, "dynamic": 0.0}
        try:
            return named[choice] if choice in named else float(choice)
        except ValueError:
            return math.nan
    is_bool = isinstance(choice, bool) or str(getattr(choice, "dtype", "")) == "bool"
    if is_bool or not hasattr(choice, "__float__"):
        raise TypeError(
            f"loss scale must be None, a string or a number, got {choice!r} of type "
            f"{type(choice).__name__}: write 'dynamic' or the number"
        )
    if getattr(choice, "shape", ()) not in ((), (1,)):
        raise ValueError(f"loss scale must have shape () or (1,), got {choice.shape}")
    return float(choice if getattr(choice, "shape", ()) == () else choice[0])


def parse_choice(choice: Any) -> float:
    """A word or number for a loss scale as one number: -1 off, 0 dynamic, or a fixed scale."""
    number = _choice_as_number(choice)
    if number not in (-1, 0) and not number >= 1:
        raise ValueError(
            f"loss scale must be None, -1 or 'none' (off), 0 or 'dynamic', or a number >= 1, got "
            f"{choice!r}"
        )
    return number


def check_scale(name: str, value: Any, powers_of_two: bool) -> None:
    """Refuses what is not a number that float32 can hold together with its inverse."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    number = float(value)
    if not _SMALLEST_SCALE <= number <= _LARGEST_SCALE:
        raise ValueError(f"{name} must be between 2**-126 and 2**126, got {value!r}")
    if powers_of_two and math.frexp(number)[0] != 0.5:
        below = 2.0 ** math.floor(math.log2(number))
        raise ValueError(
            f"{name}={value!r} is not a power of two, so unscaling would round every gradient: use "
            f"{below:g} or {2 * below:g}, or pass powers_of_two=False"
        )

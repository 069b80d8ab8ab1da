"""Precision schedules as data: phases of training, each at its own precision, and what ends them.

    PrecisionSchedule((Phase("O2", until_step=100), Phase("O1", until_loss=1.2), Phase("float32")))

    step   0 ........ 100 ........ first loss <= 1.2 ........
           |    O2    |      O1                     | float32

Phases follow each other and never go back. A phase ends by a number of steps, by a loss, or by
whichever comes first. `precision_schedule` makes the usual schedule of two phases from a string.

The loss of one batch is noisy: the luckiest of many batches lies far below the mean. So a phase may
wait for the mean loss of its last n steps (`smoothing`), which one batch moves by 1/n.

Who does the rest: `follow_schedule` keeps the phase in the optimizer's state, and `phase_switch`
calls the gradient function of that phase.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np

from ampx.checking import as_int, as_number, as_positive_int, check_choice
from ampx.loss_scaling.dynamics import parse_choice
from ampx.precision.opt_levels import Recipe, opt_level
from ampx.precision.policies import Policy
from ampx.precision.recipe_names import as_recipe
from ampx.summaries import show_fields

# The fields of "fast|step|0.9": the half type by its first, and by its second (least, most,
# default) of its third, which is a share of all steps or a ratio of losses.
_HALVES = {"fast": "float16", "fast1": "bfloat16"}
_RATIOS = {"step": (0.2, 0.9, 0.9), "loss": (1.01, 1.5, 1.05)}
_WANTED = "phases must be a tuple of ampx.Phase, such as (Phase('O2', until_step=9), Phase('O0'))"


@dataclasses.dataclass(frozen=True)
class Phase:
    """A stretch of training at one precision.

    Attributes:
      policy: a `Recipe`, a `Policy` or a string such as `"O2"`; kept as a `Recipe`.
      until_step: the phase ends when this many steps of training are done, counted from the very
        first step of training, skipped steps included; None for no such end.
      until_loss: the phase ends after the first step with a loss of at most this; None for no such
        end. With both, the one that comes first ends it.
      smoothing: for `until_loss`, the number n of steps whose mean loss is compared: the last n
        steps of training with a finite loss. Before there are n of them the loss ends nothing. 1
        compares the loss of each batch by itself.

    Raises:
      TypeError: for a policy, step or loss of the wrong kind.
      ValueError: for a step below 1, a loss that is not finite, a smoothing below 1 or without a
        loss, or an impossible loss scale.

    Examples:
      >>> import ampx
      >>> print(ampx.Phase("O2", until_step=900).policy.policy)
      p=f32,c=bf16,o=f32
    """

    policy: Recipe | Policy | str
    until_step: int | None = None
    until_loss: float | None = None
    smoothing: int = 1
    __repr__ = show_fields

    def __post_init__(self) -> None:
        recipe = as_recipe(self.policy)
        if recipe is None:
            raise TypeError("policy must be a Policy, a Recipe or a string, got None")
        parse_choice(recipe.loss_scale)
        object.__setattr__(self, "policy", recipe)
        if self.until_step is not None:
            step = as_positive_int("until_step", self.until_step, is_counted=True)
            object.__setattr__(self, "until_step", step)
        if self.until_loss is not None:
            loss = as_number("until_loss", self.until_loss)
            object.__setattr__(self, "until_loss", loss)
        object.__setattr__(self, "smoothing", as_positive_int("smoothing", self.smoothing))
        if self.smoothing > 1 and self.until_loss is None:
            raise ValueError(
                f"smoothing={self.smoothing} has no loss to smooth: give until_loss, or leave "
                "smoothing out"
            )

    @property
    def recipe(self) -> Recipe:
        """The policy as a `Recipe`; the same object, with the type that checkers can see."""
        return cast(Recipe, self.policy)


@dataclasses.dataclass(frozen=True)
class PrecisionSchedule:
    """Phases of training, one after the other and never back.

    Give it to `ampx.train_step(policy=...)`. The phase is a part of the optimizer's state, so it is
    saved and resumed with it. It is decided on the device, exact to the step, also inside a
    `lax.scan` over steps. Parameters and moments are the same arrays in all phases. In a phase
    whose recipe has a dynamic loss scale the optimizer's own scale moves. In the others the scale
    is the recipe's number, or 1 if it has none, and does not move.

    Attributes:
      phases: at least one; all but the last have an end, the last has none. A pair
        (step, policy) stands for `Phase(policy, until_step=step)`, a policy for `Phase(policy)`.

    Raises:
      TypeError: for an entry that is neither a `Phase`, nor a pair, nor a policy.
      ValueError: for a phase before the last without an end, a phase that ends before it begins, an
        end of the last phase, or phases that store parameters in different dtypes.

    Examples:
      >>> import ampx
      >>> schedule = ampx.PrecisionSchedule(
      ...     (
      ...         ampx.Phase("O2", until_step=100),
      ...         ampx.Phase("O1", until_step=900, until_loss=1.2),
      ...         ampx.Phase("float32"),
      ...     )
      ... )
      >>> print(schedule)
      O2 bfloat16 until step 100, O1 bfloat16 until step 900 or loss 1.2, then p=f32,c=f32,o=f32
    """

    phases: tuple[Phase, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.phases, tuple | list):
            raise TypeError(f"{_WANTED}, got {self.phases!r}")
        phases = tuple(map(_as_phase, self.phases))
        object.__setattr__(self, "phases", phases)
        if not phases:
            raise ValueError("phases is empty: give at least one, the precision to train in")
        _check_ends(phases)
        if len({p.recipe.policy.param_dtype for p in phases}) > 1:
            names = ", ".join(f"{_name(p.recipe)} in {p.recipe.policy.param_dtype}" for p in phases)
            raise ValueError(
                f"phases must store parameters in one dtype, since they share them, got {names}: "
                "take O0, O1 and O2, which all store float32, or policies with the same p="
            )

    def __repr__(self) -> str:
        return f"PrecisionSchedule({str(self)!r})"

    def __str__(self) -> str:
        parts = []
        for phase in self.phases[:-1]:
            ends = [f"step {phase.until_step}"] if phase.until_step is not None else []
            if phase.until_loss is not None:
                mean = f"mean loss of {phase.smoothing} steps" if phase.smoothing > 1 else "loss"
                ends.append(f"{mean} {phase.until_loss:g}")
            parts.append(f"{_name(phase.recipe)} until {' or '.join(ends)}")
        last = _name(self.phases[-1].recipe)
        return ", ".join([*parts, f"then {last}"]) if parts else last

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """The recipe of each phase."""
        return tuple(phase.recipe for phase in self.phases)

    @property
    def needs_loss(self) -> bool:
        """Whether a loss ends any phase."""
        return any(phase.until_loss is not None for phase in self.phases)

    @property
    def loss_scale(self) -> Any:
        """What to wrap the optimizer in: `"dynamic"` if a phase needs it, 1.0, or None."""
        # One wrapper serves all phases, so it must be the one that can do most: a dynamic scale can
        # be set to a number and held there, a static one cannot move.
        scales = [parse_choice(recipe.loss_scale) for recipe in self.recipes]
        if 0 in scales:
            return "dynamic"
        return None if set(scales) == {-1} else 1.0

    def phase_at(self, step: int) -> int:
        """The phase of a step of training, for a loop that compiles a step for each phase.

        Args:
          step: counted from 0, the skipped ones included.

        Returns:
          The number of the phase, from 0.

        Raises:
          TypeError: if `step` is no int.
          ValueError: if it is negative, or if a loss ends a phase, of which only the state knows.
        """
        if self.needs_loss:
            raise ValueError(
                f"when '{self}' switches depends on losses: read ampx.precision_phase(opt_state)"
            )
        step = as_int("step", step)
        if step < 0:
            raise ValueError(f"step must be at least 0, the first step of training, got {step}")
        # Ends by step increase from phase to phase, so the phase is the number of ends behind us.
        return sum(step >= phase.until_step for phase in self.phases[:-1] if phase.until_step)

    def no_losses(self) -> jax.Array:
        """Makes the losses that are remembered before the first step.

        Returns:
          float32, infinities: as many as the longest `smoothing` asks for.
        """
        # The mean of any of these with finite losses is infinite, and ends nothing: a window that
        # is not full yet needs no counter.
        return jnp.full((max(phase.smoothing for phase in self.phases),), jnp.inf, jnp.float32)

    def remember(self, losses: jax.Array, loss: jax.Array) -> jax.Array:
        """Puts the loss of a step in front of those before it, and drops the oldest.

        Args:
          losses: float32 vector, from `no_losses` or this function.
          loss: float scalar, of the step just done. One that is not finite is not remembered.

        Returns:
          float32 vector of the same length.
        """
        newest = jnp.asarray(loss, jnp.float32)
        return jnp.where(jnp.isfinite(newest), jnp.concatenate([newest[None], losses[:-1]]), losses)

    def next_phase(
        self,
        phase: jax.Array,
        steps_seen: jax.Array,
        loss: jax.Array | None,
        losses: jax.Array,
    ) -> jax.Array:
        """Computes the phase of the step to come.

        Args:
          phase: int32 scalar, of the step just done.
          steps_seen: int32 scalar, steps done, that one included.
          loss: float scalar, of the step just done; not needed if no loss ends a phase.
          losses: float32 vector of the last losses, from `remember`, that one included.

        Returns:
          int32 scalar, at least `phase`. A phase whose end has come already is left out.
        """
        # In the order of phases, each tested against the phase as it has become: if phase 0 ends
        # and the end of phase 1 has come too, both are passed in one step. A NaN is not <=
        # anything, but -inf is: a loss that is not finite ends nothing.
        for number, current in enumerate(self.phases[:-1]):
            ended = jnp.zeros((), bool)
            if current.until_step is not None:
                ended |= steps_seen >= current.until_step
            if current.until_loss is not None and loss is not None:
                mean = jnp.mean(losses[: current.smoothing])
                ended |= jnp.isfinite(loss) & (mean <= current.until_loss)
            phase = phase + ((phase == number) & ended).astype(jnp.int32)
        return phase


def precision_schedule(
    spec: str,
    *,
    total_steps: int | None = None,
    final_loss: float | None = None,
    smoothing: int = 1,
    policy: Recipe | Policy | str = "float32",
    level: Literal["O1", "O2"] = "O2",
) -> PrecisionSchedule:
    """Makes a schedule of two phases: half precision for most of training, then the original one.

    Args:
      spec: three fields, as in `"fast|step|0.9"`. The first is the half type, `fast` for float16 or
        `fast1` for bfloat16. The second is what ends the half phase: `step`, a share of all steps,
        or `loss`, the ratio of the loss to the one that training is to reach. The third is that
        share, 0.2 to 0.9, or that ratio, 1.01 to 1.5; 0.9 and 1.05 if it is left out.
      total_steps: how many steps training has; for `step`. Step t, counted from 0, is in half
        if t < share * total_steps.
      final_loss: the loss that training is to reach; for `loss`. The first step with a loss of at
        most ratio * final_loss is the last one in half.
      smoothing: for `loss`, how many steps' mean loss is compared, see `ampx.Phase`. With 1 the
        loss of one lucky batch is enough.
      policy: the original precision, in which training ends. It stores float32 parameters and
        computes in float32 (`"float32"`, `"O0"`), or casts per operation to a half type as precise
        as the half phase's: `"O1"` is O1 with the half type of `spec`, which never computes matrix
        products in float32.
      level: how the half phase computes, `"O2"` or `"O1"`.

    Returns:
      A `PrecisionSchedule` of two phases. float16 gets a dynamic loss scale, bfloat16 none.

    Raises:
      TypeError: if `spec` is not a string, or `total_steps` or `final_loss` not a number.
      ValueError: for a field outside its choices or bounds, a missing `total_steps` or
        `final_loss`, or a `policy` that contradicts the switch to the original precision.

    References:
      `accelerate_train_mode` of Ascend's TensorFlow adapter.

    Examples:
      >>> import ampx
      >>> print(ampx.precision_schedule("fast|step|0.9", total_steps=1000))
      O2 float16 until step 900, then p=f32,c=f32,o=f32
      >>> print(ampx.precision_schedule("fast1|loss", final_loss=2.0))
      O2 bfloat16 until loss 2.1, then p=f32,c=f32,o=f32
    """
    half, trigger, ratio = _parse_fields(spec)
    check_choice("level", level, ("O1", "O2"))
    low = _half_recipe(level, half)
    original = Phase(_half_recipe("O1", half) if policy == "O1" else policy)
    _check_original(spec, original.recipe, low)
    needed, useless = ("total_steps", "final_loss")
    if trigger == "loss":
        needed, useless = useless, needed
    given = {"total_steps": total_steps, "final_loss": final_loss}
    if given[needed] is None:
        raise ValueError(f"{spec!r} needs {needed}: {_WHAT_FOR[needed]}")
    if given[useless] is not None:
        raise ValueError(f"{useless}={given[useless]} has no meaning for {spec!r}: leave it out")
    if total_steps is not None:
        total_steps = as_positive_int("total_steps", total_steps, is_counted=True)
        # The share as the decimal that was written, not as the float nearest to it: in floats 0.55
        # of 100 steps is 55.00000000000001, whose ceiling is one step too many.
        # `smoothing` is handed on to be refused, where there is no loss to smooth.
        until_step = math.ceil(Fraction(str(ratio)) * total_steps)
        first = Phase(low, until_step=until_step, smoothing=smoothing)
    else:
        until_loss = ratio * float(as_number("final_loss", final_loss))
        if not until_loss > 0:
            raise ValueError(
                f"final_loss must be positive, got {final_loss}: the loss that ends the half phase "
                "is a ratio of it"
            )
        first = Phase(low, until_loss=until_loss, smoothing=smoothing)
    return PrecisionSchedule((first, original))


_WHAT_FOR = {
    "total_steps": "the share is one of all steps of training",
    "final_loss": "the ratio is to the loss that training is to reach",
}


def _parse_fields(spec: Any) -> tuple[str, str, float]:
    """Reads half type, trigger and ratio from a specification such as `"fast|step|0.9"`."""
    if not isinstance(spec, str):
        raise TypeError(f"spec must be a string such as 'fast|step|0.9', got {spec!r}")
    fields = [field.strip() for field in spec.split("|")]
    if len(fields) not in (2, 3):
        raise ValueError(
            f"spec must have three fields, as in 'fast|step|0.9', got {len(fields)} in {spec!r}"
        )
    half, trigger = fields[:2]
    if half not in _HALVES:
        raise ValueError(
            f"field 1 of {spec!r} must be 'fast' (float16) or 'fast1' (bfloat16), got {half!r}"
        )
    if trigger not in _RATIOS:
        raise ValueError(f"field 2 of {spec!r} must be 'step' or 'loss', got {trigger!r}")
    least, most, default = _RATIOS[trigger]
    if len(fields) == 2:
        return _HALVES[half], trigger, default
    try:
        ratio = float(fields[2])
    except ValueError:
        ratio = math.nan  # within no bounds, so the check below reports it
    if not least <= ratio <= most:
        raise ValueError(
            f"field 3 of {spec!r} must be a number from {least} to {most} for {trigger!r}, got "
            f"{fields[2]!r}"
        )
    return _HALVES[half], trigger, ratio


def _half_recipe(level: str, half: str) -> Recipe:
    """A level with this half type: float16 has a dynamic loss scale, bfloat16 needs none."""
    return opt_level(level, half_dtype=half, loss_scale="dynamic" if half == "float16" else None)


def _check_original(spec: str, original: Recipe, low: Recipe) -> None:
    """Refuses an original precision that is itself a low one."""
    if original.policy.compute_dtype != jnp.float32:
        raise ValueError(
            f"policy={_name(original)} computes in {original.policy.compute_dtype} and contradicts "
            f"{spec!r}, which returns to it from half: take 'float32', 'O0' or 'O1', or list the "
            "phases in an ampx.PrecisionSchedule"
        )
    if original.policy.param_dtype != jnp.float32:
        raise ValueError(
            f"policy={_name(original)} stores parameters in {original.policy.param_dtype} and "
            f"contradicts {spec!r}: the half phase needs them in float32, as p=f32"
        )
    if original.autocast_dtype is None:
        return
    # Of the half types float16 is the more precise one, with 11 significant bits to bfloat16's 8.
    half = low.autocast_dtype or low.policy.compute_dtype
    if original.dots or (original.autocast_dtype == jnp.bfloat16 and half == jnp.float16):
        raise ValueError(
            f"policy={_name(original)} is less precise than the {half} of {spec!r}, which returns "
            f"to it: take 'float32', or 'O1', which is O1 {half} here"
        )
    if (original.autocast_dtype, original.rules) == (low.autocast_dtype, low.rules):
        raise ValueError(
            f"policy={_name(original)} is what the half phase of {spec!r} with level='O1' computes "
            "in, so nothing would ever change: take policy='float32', or level='O2'"
        )


def _as_phase(phase: Any) -> Phase:
    match phase:
        case Phase():
            return phase
        case str() | Policy() | Recipe():
            return Phase(phase)
        case (step, policy):
            return Phase(policy, until_step=step)
    raise TypeError(f"{_WANTED}, got {phase!r} among them")


def _check_ends(phases: Sequence[Phase]) -> None:
    """Refuses phases that would never begin or never end."""
    *earlier, last = phases
    if (last.until_step, last.until_loss) != (None, None):
        raise ValueError(
            "the last phase has an end, but nothing follows it: leave out its until_step and "
            "until_loss, or add a phase"
        )
    begin = 0
    for number, phase in enumerate(earlier):
        if phase.until_step is None and phase.until_loss is None:
            raise ValueError(
                f"phase {number} ({_name(phase.recipe)}) has no end, so the phases after it would "
                "never begin: give it until_step or until_loss"
            )
        if phase.until_step is not None:
            if phase.until_step <= begin:
                raise ValueError(
                    f"phase {number} ends at until_step={phase.until_step}, but one before it ends "
                    f"at {begin}: count steps from the beginning of training, not of the phase"
                )
            begin = phase.until_step


def _name(recipe: Recipe) -> str:
    """What a message calls a precision: its opt level with the half dtype, or its three dtypes."""
    if recipe.level in (None, "O0"):
        return recipe.level or str(recipe.policy)
    dots = "" if recipe.dots is None else f", float8 {recipe.dots.recipe}"
    return f"{recipe.level} {np.dtype(recipe.autocast_dtype or recipe.policy.compute_dtype)}{dots}"

"""What the parts of a loss-scaled update hand to each other: see `loss_scaling.scaled_update`.

ScaleSettings, Call ---> judging ---> Judgement ---> transitions ---> Transition
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import numpy as np
import optax
from jax.typing import DTypeLike

from ampx.checking import as_dtype, as_positive_int, check_choice
from ampx.loss_scaling.nonfinite import Verdict
from ampx.loss_scaling.state import LossScaleState
from ampx.mesh_axes import as_axes
from ampx.model_axes import ModelAxes, as_model_axes
from ampx.updates.clipping import find_clip
from ampx.updates.tails import Tail

NonfiniteUpdates = Literal["accept", "hold", "skip"]
NonfiniteLoss = Literal["count", "skip"]
# From the state and bool[*losses], which losses were bad, to the state with its scale moved.
Advance = Callable[[LossScaleState, jax.Array], LossScaleState]


@dataclasses.dataclass(frozen=True)
class ScaleSettings:
    """What stays the same in all updates of one loss scale; see `ampx.dynamic_loss_scale`."""

    num_losses: int
    axis_names: Sequence[str]
    model_axes: Any
    saturation_dtype: DTypeLike | None
    nonfinite_updates: NonfiniteUpdates
    nonfinite_loss: NonfiniteLoss

    def __post_init__(self) -> None:
        convert = functools.partial(object.__setattr__, self)  # the class is frozen
        convert("axis_names", as_axes(self.axis_names, "axis_names", may_be_empty=True))
        convert("model_axes", as_model_axes(self.model_axes))
        convert("num_losses", as_positive_int("num_losses", self.num_losses))
        if self.saturation_dtype is not None:
            dtype = as_dtype("saturation_dtype", self.saturation_dtype, "floating")
            convert("saturation_dtype", dtype)
        check_choice("nonfinite_updates", self.nonfinite_updates, get_args(NonfiniteUpdates))
        check_choice("nonfinite_loss", self.nonfinite_loss, get_args(NonfiniteLoss))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what each loss has its own of: a scalar for one loss, else a vector."""
        return () if self.num_losses == 1 else (self.num_losses,)

    @property
    def can_fuse(self) -> bool:
        """Whether the fused form can do what these settings ask for.

        It takes one factor for all gradients, so there must be one loss. Its verdict comes from a
        sum of squares, which does not see saturated numbers. And it writes parameters before all
        updates are known, so it can hold single elements, but not undo the step because of one.
        """
        needs_all_updates = self.nonfinite_updates == "skip"
        return self.num_losses == 1 and self.saturation_dtype is None and not needs_all_updates


class Call(NamedTuple):
    """The arguments of one update.

    Attributes:
      grads: gradients times the loss scale; a tuple of such trees where there are several losses.
      state: the state that the last update left. Its scale is the one that `grads` were made with.
      params: the parameters, or None if nobody gave them.
      verdict: a judgement that somebody else has made, or None.
      tail: what the caller asks for besides updates, or None.
      model_axes: over which axes parameters are divided.
      extra_args: further arguments, handed to the inner transformation. If the gradients are among
        them as `grad`, the inner transformation gets them unscaled.
    """

    grads: Any
    state: LossScaleState
    params: Any
    verdict: Verdict | None
    tail: Tail | None
    model_axes: ModelAxes
    extra_args: dict[str, Any]

    @property
    def scales(self) -> list[jax.Array]:
        """The scale of each loss, float32 scalars."""
        # One scale is a scalar already. To cut it out of a vector would hide from `hoist_sums`
        # that gradients, multiplied by a number, are all that there is.
        scales = self.state.loss_scale
        return list(scales) if scales.ndim else [scales]

    @property
    def is_clipped(self) -> bool:
        """Whether gradients are clipped by a global norm that the loss scale can know."""
        asked_for = self.tail is not None and self.tail.max_norm is not None
        return asked_for or find_clip(self.state.inner_state) is not None


def split_by_loss(grads: Any, num_losses: int) -> list[Any]:
    """The gradient tree of each loss; None for one that was left out.

    Raises:
      ValueError: if there are not as many trees as losses, or none at all.
    """
    if num_losses == 1:
        return [grads]
    if not isinstance(grads, tuple | list) or len(grads) != num_losses:
        length = f" of length {len(grads)}" if isinstance(grads, tuple | list) else ""
        raise ValueError(
            f"num_losses={num_losses}: update() takes a tuple of {num_losses} gradient trees, one "
            f"per loss (None for a loss left out), got {type(grads).__name__}{length}"
        )
    if all(own is None for own in grads):
        raise ValueError("every loss was left out: at least one gradient tree is needed")
    return list(grads)


class Judgement(NamedTuple):
    """What is known of the gradients before anything is computed with them.

    Attributes:
      counts: int32[*losses, 2], arrays with an infinity and arrays with a NaN, the same on all
        devices that must agree.
      is_too_large: bool scalar, whether finite gradients have a norm whose square overflows; the
        same on all these devices. It may be true beside an overflow.
      seen: bool[*losses], which losses took part; numpy's where that is known while tracing.
      axes: the mapped axes whose devices must agree.
      norm: float32 scalar, global norm of the unscaled gradients; None if nobody measured it.
      is_bad_loss: bool scalar, whether a loss was given and is not finite.
      skips_loss: whether that undoes the step. Static.
    """

    counts: jax.Array
    is_too_large: jax.Array
    seen: np.ndarray | jax.Array
    axes: tuple[str, ...]
    norm: jax.Array | None = None
    is_bad_loss: jax.Array | bool = False
    skips_loss: bool = False

    @property
    def overflow(self) -> jax.Array:
        """Whether an element is not finite, or the loss undoes the step; bool scalar."""
        # Each count for itself, see `measure_and_judge`.
        overflow = ((self.counts[..., 0] > 0) | (self.counts[..., 1] > 0)).any()
        return overflow | self.is_bad_loss if self.skips_loss else overflow

    @property
    def undoes(self) -> jax.Array:
        """Whether the step is skipped because of its gradients; bool scalar."""
        return self.overflow | self.is_too_large


class Transition(NamedTuple):
    """What a step changes besides the scale, already undone if the step is skipped.

    Attributes:
      updates: like the parameters; or an `Applied`, if the tail asks for new parameters.
      inner_state: the wrapped transformation's.
      skip: bool scalar, whether the step was undone.
      is_bad_update: bool scalar, whether finite gradients gave something that is not finite.
    """

    updates: Any
    inner_state: optax.OptState
    skip: jax.Array
    is_bad_update: jax.Array

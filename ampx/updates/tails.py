"""How the parts of a step's tail agree to do their work in one pass over memory.

A loss scale, a clip and an optimizer would each read and write every gradient. Where the optimizer
at the bottom is a fused one, they hand down what they know instead, as a `Tail` in the extra
argument `tail`: a factor for the gradients, and whether the step is to be skipped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import optax

from ampx.trees import hold

Backend = Literal["auto", "xla", "pallas", "mosaic_gpu", "mosaic_tpu", "interpret"]


@dataclasses.dataclass(frozen=True)
class Tail:
    """What is still to be done with gradients, besides the optimizer's own update.

    Attributes:
      factor: scalar by which gradients are multiplied; None is 1.
      skip: bool scalar. Where it is true, parameters and state keep every bit. None: never.
      max_norm: clip the gradients, `factor` applied, by this global norm. Whoever measures the norm
        folds this into `factor`; optimizers never see it.
      norm: global norm of the gradients, `factor` applied, if somebody has measured it.
      new_params: return new parameters in the place of updates.
      backend: what runs the update.
      squares: a function from arrays to the sum of squares of each, if something faster than XLA
        measures the norm.
    """

    factor: jax.Array | None = None
    skip: jax.Array | None = None
    max_norm: float | jax.Array | None = None
    norm: jax.Array | None = None
    new_params: bool = False
    backend: Backend = "auto"
    squares: Callable[[Sequence[jax.Array]], list[jax.Array]] | None = None

    @property
    def in_kernels(self) -> bool:
        """Whether kernels are to run the update where they can."""
        return self.new_params and self.backend not in ("auto", "xla")


class TailResult:
    """What stands for a parameter's update in answer to a `Tail`. To compute with it is an error.

    Attributes:
      value: the update, or the new parameter if the tail asks for that.
      bad: bool scalar, whether a number that is not finite was refused on the way. Parameters may
        share it.
    """

    def __init__(self, value: jax.Array, bad: jax.Array) -> None:
        self.value = value
        self.bad = bad

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError(
            "a transformation around a fused optimizer computes with its updates, which are not "
            "there while the whole tail runs in one pass: leave it out (to clip, give "
            "fused.apply a max_norm), or chain it, so that the loss scale sees no fused optimizer"
        )

    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __neg__ = _refuse
    __truediv__ = __rtruediv__ = __pow__ = __abs__ = __jax_array__ = __array__ = _refuse
    __getitem__ = __len__ = __lt__ = __gt__ = __bool__ = __float__ = _refuse


class Applied(NamedTuple):
    """What a loss scale returns in the place of updates when a tail asks for new parameters.

    Attributes:
      params: the new parameters.
      norm: global norm of the unscaled gradients, before any clip.
    """

    params: Any
    norm: jax.Array | None


def unwrap_results(results: Any) -> tuple[Any, jax.Array]:
    """The values of a tree of `TailResult`, and whether any is bad.

    Raises:
      TypeError: if some transformation did not answer the tail.
    """
    leaves, structure = jax.tree.flatten(results)
    for leaf in leaves:
        if not isinstance(leaf, TailResult):
            raise TypeError(
                f"a fused tail met an update of type {type(leaf).__name__}: every parameter needs "
                "a fused optimizer; with optax.masked or optax.partition give the others, too, one "
                "of ampx.fused, such as ampx.fused.sgd(0.0)"
            )
    flags = list({id(leaf.bad): leaf.bad for leaf in leaves}.values())
    bad = jnp.any(jnp.stack(flags)) if flags else jnp.zeros((), bool)
    return structure.unflatten([leaf.value for leaf in leaves]), bad


class TakesTail:
    """A mark on the state of an optimizer that answers the extra argument `tail`."""


def takes_tail(state: Any) -> bool:
    """Whether the transformation with this state does what a `Tail` asks for.

    The state tells, since it shows through optax's wrappers, which the transformation does not. A
    fused optimizer has optax's own state, a tuple of which one part is marked. A wrapper of ours
    that hands a tail on says so by `hands_on_tail` in the class of its state.
    """
    hands_on = getattr(type(state), "hands_on_tail", False)
    if hands_on or isinstance(state, optax.InjectStatefulHyperparamsState):
        return takes_tail(state.inner_state)
    if isinstance(state, optax.transforms.PartitionState):
        groups: Any = state.inner_states.values()  # each of them masked
        return all(takes_tail(group.inner_state) for group in groups)
    return type(state) is tuple and any(isinstance(part, TakesTail) for part in state)


def hold_wrappers(skip: jax.Array, new: Any, old: Any) -> Any:
    """The state `new`, in which optax's own wrappers around fused optimizers stand still on a skip.

    They know nothing of a tail. Fused optimizers and wrappers of ours have held their parts.
    """
    if isinstance(new, optax.InjectStatefulHyperparamsState):
        inner = hold_wrappers(skip, new.inner_state, old.inner_state)
        own, own_old = (state._replace(inner_state=()) for state in (new, old))
        return hold(skip, own, own_old)._replace(inner_state=inner)
    if isinstance(new, optax.transforms.PartitionState):
        pairs = {name: (state, old.inner_states[name]) for name, state in new.inner_states.items()}
        inner = {name: hold_wrappers(skip, *pair) for name, pair in pairs.items()}
        return new._replace(inner_states=inner)
    if hasattr(new, "inner_state"):
        return new._replace(inner_state=hold_wrappers(skip, new.inner_state, old.inner_state))
    return new

"""The tail of a step: how a loss scale, a clip and an optimizer work in one pass over memory.

The tail of a step is all that happens between gradients and new parameters: judge, unscale, clip,
update, and keep or skip. Each part is memory-bound, and as separate optax transformations each
reads and writes every gradient. If the optimizer at the bottom is one of `ampx.fused`, the parts
above compute only scalars, and hand them down as a `Tail` in the extra argument `tail`. The
optimizer applies them to each number while it has it in registers:

    fused.apply            Tail(max_norm, new_params=True, backend)
        |                                 |
    dynamic_loss_scale     measures the norm and takes the verdict in one pass, and fills in
        |                  factor = 1/scale * clip and skip = overflow
        |                                 |
    inject_hyperparams,    optax's wrappers: they hand extra arguments on and know nothing of them
    partition                             |
        |                                 |
    master_weights         asks for new_params in any case: its parameters are the masters
        |                                 |
    fused.adamw            g * factor, the update, `where(skip, old, new)`, in one pass

    and back up:           a `TailResult` for each parameter: value, and whether a number was bad
                           `hold_wrappers` undoes what optax's wrappers changed on a skip
                           `Applied`: new parameters and the norm, in the place of updates

Any part may be missing. A loss scale recognises by the state alone (`takes_tail`) whether there is
a fused optimizer below, and uses the ordinary path if not.

"Tail" means the tail of a step only. The bucket of gradients that is reduced last, which
`ampx.all_reduce(tail_overlap=...)` is about, is called the last bucket.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import optax

from ampx.trees import has_mark, hold, is_marked

Backend = Literal["auto", "xla", "pallas", "mosaic_gpu", "mosaic_tpu", "interpret"]


class KernelPlan(NamedTuple):
    """What kernels are to do, and how; the numbers are for GPUs.

    Attributes:
      elements: of one thread block, a power of two from 256 on.
      vector: how many neighbours a thread loads at once, a power of two. Four float32 are 16 bytes,
        the widest load.
      leaves: how many parameters share a kernel, at most.
      work: the kinds of work for kernels, see `kernels.pallas_updates.find_kind_of_work`; XLA does
        the rest. None: all that they can do.
    """

    elements: int = 1024
    vector: int = 4
    leaves: int = 16
    work: tuple[str, ...] | None = None


DEFAULT_PLAN = KernelPlan()


@dataclasses.dataclass(frozen=True)
class Tail:
    """What is still to be done with gradients, besides the optimizer's own update.

    Attributes:
      factor: float32 scalar by which every gradient is multiplied; None is 1.
      skip: bool scalar. If it is true, parameters and state keep every bit. None is never.
      max_norm: global norm to which the gradients, times `factor`, are clipped. `fold_clip` turns
        it into a part of `factor` on the way down, so optimizers never see it. None: they are not
        clipped.
      norm: float32 scalar, global norm of the gradients times `factor`; None if nobody has
        measured it yet.
      new_params: whether to return new parameters in the place of updates.
      backend: what runs the update: XLA or a kind of Pallas kernels.
      plan: what kernels do, and how.
      squares: a function from arrays to the sum of squares of each, if something faster than XLA
        measures the norm.
    """

    factor: jax.Array | None = None
    skip: jax.Array | None = None
    max_norm: float | jax.Array | None = None
    norm: jax.Array | None = None
    new_params: bool = False
    backend: Backend = "auto"
    plan: KernelPlan = DEFAULT_PLAN
    squares: Callable[[Sequence[jax.Array]], list[jax.Array]] | None = None

    @property
    def in_kernels(self) -> bool:
        """Whether kernels are to run the update where they can."""
        return self.new_params and self.backend not in ("auto", "xla")


class TailResult:
    """What a fused optimizer returns for each parameter in answer to a `Tail`.

    It is not an array, so that a transformation which would compute with it fails while tracing.
    Were it an array, `optax.scale(0.1)` around the optimizer would multiply new parameters by 0.1.

    Attributes:
      value: the update, or the new parameter if the tail asks for that; of the parameter's shape.
      bad: bool scalar, whether a number that is not finite was refused on the way. Several
        parameters may share the same array.
    """

    def __init__(self, value: jax.Array, bad: jax.Array) -> None:
        self.value = value
        self.bad = bad

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError(
            "a transformation around a fused optimizer computes with its updates, which do not "
            "exist when the loss scale, clip and update run in one pass: leave it out (to clip, "
            "give fused.apply a max_norm), or put it beside the optimizer in optax.chain, which "
            "turns the single pass off"
        )

    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __neg__ = _refuse
    __truediv__ = __rtruediv__ = __pow__ = __abs__ = __jax_array__ = __array__ = _refuse
    __getitem__ = __len__ = __lt__ = __gt__ = __bool__ = __float__ = _refuse


class Applied(NamedTuple):
    """What a loss scale returns in the place of updates when a tail asks for new parameters.

    Attributes:
      params: the new parameters, in the dtypes of the old.
      norm: float32 scalar, global norm of the unscaled gradients before any clip; None if nobody
        measured it.
    """

    params: Any
    norm: jax.Array | None


def unwrap_results(results: Any) -> tuple[Any, jax.Array]:
    """Splits a tree of `TailResult` into the tree of values and a bool scalar, whether any is bad.

    Raises:
      TypeError: if some transformation did not answer the tail.
    """
    leaves, structure = jax.tree.flatten(results)
    for leaf in leaves:
        if not isinstance(leaf, TailResult):
            raise TypeError(
                "an update that runs in one pass needs a fused optimizer for every parameter, and "
                f"got an update of type {type(leaf).__name__}: with optax.masked or "
                "optax.partition give the other parameters an optimizer of ampx.fused too, such as "
                "ampx.fused.sgd(0.0)"
            )
    # Most parameters share one flag, that of the optimizer's coefficients. It is the same object,
    # so it is taken once instead of being stacked a thousand times.
    flags = list({id(leaf.bad): leaf.bad for leaf in leaves}.values())
    bad = jnp.any(jnp.stack(flags)) if flags else jnp.zeros((), bool)
    return structure.unflatten([leaf.value for leaf in leaves]), bad


class TakesTail:
    """A mark on the state of an optimizer that answers the extra argument `tail`.

    Fused optimizers have states of optax's own types, so that checkpoints go both ways; the mark is
    a second base class: `class FusedAdamState(optax.ScaleByAdamState, TakesTail)`. Any class that
    sets `tail_levels` is marked.

    Attributes:
      tail_levels: how many tuples around the marked part belong to the same optimizer.
    """

    tail_levels = 1  # the parts of an optimizer of optax's stand in one tuple


def find_tail_mark(state: Any, level: int = 0) -> Any:
    """The part of an optimizer's state that marks the whole of it as one that answers a `Tail`.

    Tuples are looked into, as chains make them. In a longer chain the optimizer's state stands in
    one tuple more than its mark tells: the chain takes no tail. That is right, since the parts
    before and after the optimizer would compute with gradients.

    Returns:
      The part, or None.
    """
    if getattr(type(state), "tail_levels", None) == level:
        return state
    inside = (find_tail_mark(part, level + 1) for part in state) if type(state) is tuple else ()
    return next((part for part in inside if part is not None), None)


def takes_tail(state: Any) -> bool:
    """Whether the transformation with this state does what a `Tail` asks for.

    An optax transformation is a pair of closures and tells nothing about itself. Its state does,
    and can be looked into through wrappers:

    - the state of a fused optimizer, or of one in `fused.fuse`, has a mark: see `find_tail_mark`;
    - a wrapper of ampx sets `hands_on_tail` in the class of its state if it hands a tail on;
    - of optax's wrappers, `inject_hyperparams` and `partition` hand on extra arguments, and do
      nothing else with updates.
    """
    if find_tail_mark(state) is not None:
        return True
    hands_on = is_marked(state, "hands_on_tail")
    if hands_on or isinstance(state, optax.InjectStatefulHyperparamsState):
        return takes_tail(state.inner_state)
    if isinstance(state, optax.transforms.PartitionState):
        groups: Any = state.inner_states.values()  # each is an optax.MaskedState around its own
        return all(takes_tail(group.inner_state) for group in groups)
    return False


def prefers_tail(state: Any, tail: Tail | None) -> bool:
    """Whether the transformation with this state is better off with a tail than in a branch.

    It takes one, and if it bears the mark `prefers_branch`, kernels are to run it.
    """
    in_kernels = tail is not None and tail.in_kernels
    return takes_tail(state) and (in_kernels or not has_mark(state, "prefers_branch"))


def hold_wrappers(skip: jax.Array, new: Any, old: Any) -> Any:
    """Undoes on a skip what optax's own wrappers around fused optimizers changed in their states.

    They know nothing of a tail, so they have counted the step and moved their schedules. Fused
    optimizers and wrappers of ampx have already kept their own parts of the state; to choose again
    between old and new moments here would cost a pass over all of them.
    """
    if find_tail_mark(new) is not None:
        return new
    if isinstance(new, optax.InjectStatefulHyperparamsState):
        # Counts and hyperparameters are scalars of the wrapper; all below it is left to itself.
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

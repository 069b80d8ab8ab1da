"""The train states that `ampx.train_step` takes: ampx's own, flax linen's and flax nnx's.

A step reads any of them as a `TrainState` and gives back the kind that it was given:

    as_train_state    the caller's state  ─►  TrainState
    make_next_state   TrainState          ─►  the next one; a skip holds what must not change
    write_back        the next one        ─►  the caller's kind
    apply_to_nnx      the last two for an nnx model, whose parameters are not a plain pytree

Whether a call was skipped, applied an update or did neither, inside a window of `ampx.multi_steps`,
is read off the optimizer states before and after it: `ampx.loss_scaling.outcomes`.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from ampx import flax_modules, trees
from ampx.accumulation.multi_steps import MultiStepsState
from ampx.loss_scaling.outcomes import compare_states
from ampx.loss_scaling.state import LossScaleState, find_scale
from ampx.overwritten import replace_overwritten, split_optimized, split_overwritten
from ampx.precision.follow_schedule import PrecisionScheduleState
from ampx.summaries import show_fields
from ampx.tree_checks import check_key, check_memory, check_trainable
from ampx.trees import is_largest
from ampx.updates.guards import check_made_by


class TrainState(NamedTuple):
    """All that changes in training, as one pytree to donate and to checkpoint.

    Attributes:
      step: int32 scalar, updates applied; a skipped one does not count, nor a call inside a window
        of `ampx.multi_steps`.
      params: a pytree of parameters in the dtypes in which the policy stores them, or
        `ampx.fused.FlatParams`.
      opt_state: the optimizer state, with the loss scale in it.
      key: a scalar random key that advances on every call, or None.
      model_state: a pytree of what the model changes by itself, such as batch statistics, or None.

    Examples:
      >>> import ampx, jax.numpy as jnp, optax
      >>> step = ampx.train_step(lambda w, x: jnp.mean(w * x), optax.sgd(0.1))
      >>> int(step.init(jnp.ones(())).step)
      0
    """

    step: jax.Array
    params: Any
    opt_state: optax.OptState
    key: jax.Array | None = None
    model_state: Any = None

    __repr__ = show_fields


def place_beside(params: Any, state: Any) -> Any:
    """Puts counts and the like of a first state on all devices of the mesh that parameters lie on.

    They are made on one device. Left there, the first step would return them on the mesh, and the
    second call, with arguments placed differently from those of the first, would be compiled anew.
    Arrays that somebody has placed (`committed` in JAX's words) stay where they are.
    """
    meshes = {
        leaf.sharding.mesh
        for leaf in jax.tree.leaves(params)
        if isinstance(leaf, jax.Array)
        and not isinstance(leaf, jax.core.Tracer)
        and isinstance(leaf.sharding, NamedSharding)
    }
    if len(meshes) != 1:
        return state
    everywhere = NamedSharding(meshes.pop(), PartitionSpec())

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
            return leaf  # in a program that makes the state, its compiler places it
        return leaf if leaf.committed else jax.device_put(leaf, everywhere)

    return jax.tree.map(place, state)


def separate_buffers(state: Any) -> Any:
    """Copies arrays that stand at several places of a first state, so that it can be donated.

    Some of optax's transformations put the parameters themselves into their state: `contrib.sam`,
    `contrib.cocob`, `contrib.dog`. A buffer that is donated twice is an error.
    """
    seen: set[int] = set()

    def separate(leaf: Any) -> Any:
        if id(leaf) in seen and isinstance(leaf, jax.Array):
            return jnp.copy(leaf)
        seen.add(id(leaf))
        return leaf

    return jax.tree.map(separate, state)


def is_nnx_pair(state: Any) -> bool:
    """Whether a state is the pair (nnx model, nnx optimizer)."""
    return (
        isinstance(state, tuple)
        and len(state) == 2
        and flax_modules.is_nnx_module(state[0])
        and hasattr(state[1], "opt_state")
    )


def as_train_state(state: Any, tx: optax.GradientTransformation) -> TrainState:
    """Reads any supported state as a `TrainState`; an nnx model is its own `params`.

    Raises:
      TypeError: for a state of another kind.
      ValueError: for a state that was made with another optimizer than `tx`.
    """
    if isinstance(state, TrainState):
        _check_fields(state)
        _check_same_structure(state, tx)
        return state
    # The classes of flax are told by what they have, since flax may not be installed.
    if is_nnx_pair(state):
        if hasattr(state[1], "model"):
            raise TypeError(
                "state has an nnx.ModelAndOptimizer, which holds a model of its own: give the pair "
                "(model, nnx.Optimizer(model, step.tx, wrt=nnx.Param))"
            )
        model, optimizer = state
        _check_same_tx(optimizer.tx, tx, "nnx.Optimizer(model, step.tx, wrt=nnx.Param)")
        nnx = sys.modules["flax.nnx"]
        return TrainState(optimizer.step[...], model, nnx.as_pure(optimizer.opt_state))
    if all(hasattr(state, name) for name in ("params", "opt_state", "step", "replace")):
        _check_same_tx(state.tx, tx, "TrainState.create(..., tx=step.tx)")
        if trees.split_trainable(state.params)[1] is not None:
            raise TypeError(
                "the params of a flax TrainState hold leaves that are no floating arrays, and its "
                "optimizer was made for all of them: keep these outside of params, or make the "
                "state with step.init(params)"
            )
        # flax documents `batch_stats` as the name by which users add statistics to their state.
        model_state = getattr(state, "batch_stats", None)
        return TrainState(jnp.asarray(state.step), state.params, state.opt_state, None, model_state)
    found = type(state).__name__
    if type(state) is tuple:
        found += f" ({', '.join(type(part).__name__ for part in state)})"
    raise TypeError(
        f"state must be an ampx.TrainState (from step.init), a flax TrainState or a pair (nnx "
        f"model, nnx.Optimizer), got {found}"
    )


def write_back(state: Any, new: TrainState) -> Any:
    """Converts `new` to the kind of the caller's `state`."""
    if isinstance(state, TrainState):
        return new
    changes = {"batch_stats": new.model_state} if hasattr(state, "batch_stats") else {}
    return state.replace(step=new.step, params=new.params, opt_state=new.opt_state, **changes)


def check_loss_scale_is_outermost(opt_state: optax.OptState) -> None:
    """Refuses a loss scale that only a part of the gradients would pass through.

    From the outside in, only wrappers that hand on all gradients as they are may stand before it.

    Raises:
      ValueError: if something else does.
    """
    scale = find_scale(opt_state)
    node: Any = opt_state
    # Invariant: everything from `opt_state` down to `node` hands on all gradients as they are.
    while scale is not None and not isinstance(node, LossScaleState):
        if isinstance(node, MultiStepsState | PrecisionScheduleState):
            node = node.inner_state
        elif isinstance(node, tuple) and len(node) == 1:  # a chain of one
            node = node[0]
        else:
            holder = "optax.chain" if type(node) is tuple else type(node).__name__
            raise ValueError(
                f"the loss scale is inside {holder}, where other transformations see "
                "gradients that are still scaled: put it around the whole optimizer, as in "
                "dynamic_loss_scale(optax.chain(...))"
            )


def check_has_one_loss(opt_state: optax.OptState) -> None:
    """Refuses a loss scale for several losses, since a step computes one.

    Raises:
      ValueError: if the state has more than one scale.
    """
    state = find_scale(opt_state)
    if state is not None and state.loss_scale.shape:
        number = state.loss_scale.shape[0]
        raise ValueError(
            f"train_step computes one loss, and the loss scale was made with num_losses={number}: "
            "leave num_losses out, or write the step with an ampx.value_and_grad for each loss and "
            "tx.update, as in 'Several losses, several optimizers' of the guide on loss scaling"
        )


def apply_to_nnx(
    state: Any, grads: Any, new_rest: Any, extra_args: dict[str, Any]
) -> tuple[Any, Any]:
    """Updates an nnx model and its optimizer in place, and gives both back.

    In place as `nnx.Optimizer.update` does it: whoever holds these objects sees them trained, and
    whoever takes what is given back gets the same objects. A skip holds statistics and step.
    Random counters go on: only what the model learnt from the bad batch is undone.
    """
    # Whoever holds an nnx model has imported flax; ampx itself never does.
    nnx = sys.modules["flax.nnx"]
    model, optimizer = state
    # What is needed of the old state is read before anything is written.
    old_opt_state, old_step = nnx.as_pure(optimizer.opt_state), optimizer.step[...]
    old_rest = flax_modules.select_nnx_rest(nnx.clone(model), optimizer.wrt)
    optimizer.update(model, grads, **extra_args)
    # float32 gradients must not widen the half moments that half parameters came with.
    opt_state = trees.cast_like(nnx.as_pure(optimizer.opt_state), old_opt_state)
    nnx.update(optimizer.opt_state, nnx.state(opt_state))
    skipped, applied = compare_states(old_opt_state, opt_state)
    # `nnx.Optimizer.update` counts every call; here a step counts only if it was applied.
    # At its largest number the count stays, where nnx's own would begin again.
    stays = ~applied | is_largest(old_step)
    optimizer.step[...] = trees.hold(stays, optimizer.step[...], old_step)
    # The rest is what is not differentiated: random counters, which go on as keys do, and
    # statistics, of which a skip keeps the old.
    random, learnt = nnx.split_state(new_rest, nnx.RngState, ...)
    _, old_learnt = nnx.split_state(old_rest, nnx.RngState, ...)
    nnx.update(model, random, trees.hold(skipped, learnt, old_learnt))
    return model, optimizer


def make_next_state(
    state: TrainState,
    params: Any,
    opt_state: optax.OptState,
    key: Any,
    new_model_state: Any,
    overwritten: Any,
) -> TrainState:
    """Makes the next state: on a skip the step count and the model's state stand still.

    So do overwritten leaves, for which `overwritten` has the new values: see `ampx.overwritten`.
    """
    # A weakly typed increment keeps the type of flax's step, a Python int: one trace, not two.
    skipped, applied = compare_states(state.opt_state, opt_state)
    step = state.step + jnp.where(applied & ~is_largest(state.step), 1, 0)
    if state.model_state is not None:
        new_model_state = trees.hold(skipped, new_model_state, state.model_state)
    if overwritten is not None:
        old = split_overwritten(state.params)[1]
        params = replace_overwritten(params, trees.hold(skipped, overwritten, old))
    return TrainState(step, params, opt_state, key, new_model_state)


def _check_fields(state: TrainState) -> None:
    """Refuses a state with a field that `init` would not make.

    Raises:
      TypeError: for a step that is no int, a key that is none, and for what are no arrays.
      ValueError: for arrays that were donated.
    """
    step = state.step
    dtype = step.dtype if hasattr(step, "dtype") else type(step)
    if dtype is not int and not jnp.issubdtype(dtype, jnp.integer) or jnp.shape(step):
        raise TypeError(f"state.step must be an int32 scalar, got {step!r}")
    check_key("state.key", state.key)
    check_trainable("state.params", state.params)
    check_memory("state.opt_state", state.opt_state)


def _check_same_structure(state: TrainState, tx: optax.GradientTransformation) -> None:
    """Refuses a state whose optimizer state is not of the structure that `tx` makes.

    Nothing is computed: `tx.init` is traced, once for each trace of the step. Where it cannot be
    traced, as one that looks at values cannot, nothing is known and nothing is refused.
    """
    try:
        due = jax.eval_shape(tx.init, split_optimized(state.params)[0])
    except Exception:  # of a user's transformation, and of any kind
        return
    maker = (
        "step.init(params) of this step (jax.jit turns the numbers inside an Equinox module into "
        "arrays, which are parameters: use equinox.filter_jit)"
    )
    check_made_by("this train step", maker, due, state.opt_state)


def _check_same_tx(found: Any, expected: Any, fix: str) -> None:
    if found is not expected:
        raise ValueError(
            "the state holds another optimizer than this train step, so their states differ: make "
            f"it with {fix}"
        )

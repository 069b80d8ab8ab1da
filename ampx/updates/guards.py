"""What the `update` of each transformation is asked before and after it computes.

A wrapper of ampx calls `check_update` with what it was given, and calls the transformation inside
it through `guard`. Together they refuse gradients, parameters and states that do not belong
together, by an error that names both, where JAX and optax would say that some class lacks an
attribute, or would broadcast one array to another and go on.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ampx.checking import check_state
from ampx.overwritten import refuse_overwritten
from ampx.tree_checks import check_arrays, check_gradients, check_memory
from ampx.trees import find_nodes, has_mark, leave_untrained_out, path_name

_OF_MONITOR = (
    "optax.monitor has no measurements before its first update, and what it will have could not be "
    "told from init: take optax.snapshot, or put monitor around this, as in optax.chain(tx, "
    "optax.monitor(...))"
)


def check_update(
    owner: str,
    kind: type | None,
    updates: Any,
    state: Any,
    params: Any,
    *,
    may_be_many: bool = False,
) -> None:
    """Refuses wrong arguments of the `update` of a transformation.

    Args:
      owner: its public name, for the errors.
      kind: the class of its states; None if it has none.
      updates: gradients.
      state: its state.
      params: parameters, or None.
      may_be_many: whether gradients may be those of single examples, which the transformation
        inside sums, as `optax.contrib.dpsgd` does. If it does not, `guard` refuses them.

    Raises:
      TypeError: for a state of another class, and for what are no arrays.
      ValueError: for gradients whose structure or shapes are not those of the parameters, and for
        arrays that were donated.
    """
    if kind is not None:
        check_state(owner, state, kind)
        check_memory("state", state)
    _check_gradients(updates, state, params, may_be_many=may_be_many)


def _check_gradients(updates: Any, state: Any, params: Any, *, may_be_many: bool = False) -> None:
    # flax's `nnx.Optimizer.update` takes a NamedTuple apart into a mapping of its fields.
    are_mappings = isinstance(updates, Mapping) and isinstance(params, Mapping)
    if are_mappings and "grads" in updates and "grads" not in params:
        raise ValueError(
            "updates must be gradients alone, got the fields of a GradResult: give result.grads"
        )
    is_sharded = has_mark(state, "takes_gradient_shards")  # a zero1 is inside
    many = {"may_be_many": may_be_many}
    check_gradients("updates", updates, _trained(params), may_be_shards=is_sharded, **many)


def _trained(params: Any) -> Any:
    """Of the two sets of parameters that `optax.lookahead` takes, those that have gradients."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def guard(
    owner: str, inner: optax.GradientTransformationExtraArgs, *, holds_state: bool = False
) -> optax.GradientTransformationExtraArgs:
    """The transformation inside another one, which blames a state that is not its own.

    What `inner` keeps is known from its `init` alone, and to trace that in every update would cost
    too much. So it is done only after `inner` has failed. Where it has not, what it returns must
    have the shapes of what it was given: if gradients were broadcast to moments of another shape,
    or these to gradients, one of the two has others.

    Args:
      owner: the public name of the transformation around it.
      inner: an optax transformation that takes extra arguments.
      holds_state: whether `owner` may keep the old state, so that the new one must have its
        structure.
    """

    def init(params: Any) -> Any:
        check_arrays("params", params, may_be_shapes=True)
        refuse_overwritten("params", params)
        with explain_choices_of_flat():
            state = inner.init(params)
        return _with_measurements(inner, state, params) if holds_state else state

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        params = leave_untrained_out(params, updates)
        try:
            # It may write into dicts and lists, which under jit are its own. So they must be here:
            # what it writes inside of a branch is no value outside.
            own = _copy_containers((updates, state, params))
            results, new_state = inner.update(*own, **extra_args)
        except Exception as error:
            _check_gradients(updates, state, params)
            _blame(owner, init, updates, params, state, error)
            raise
        if params is not None and _same_but_for_shapes(results, params):
            _check_gradients(updates, state, params)
        is_wrong = _same_but_for_shapes(new_state, state)
        if is_wrong or _same_but_for_shapes(results, updates, may_be_summed=True):
            _blame(owner, init, updates, params, state, None)
        if holds_state:
            _check_structure_is_kept(owner, state, new_state)
        return results, new_state

    return optax.GradientTransformationExtraArgs(init, update)


@contextlib.contextmanager
def explain_choices_of_flat() -> Iterator[None]:
    """Adds the way out to an error about a mask, or labels, that is for a tree and not for buffers.

    `optax.masked` and `optax.partition` show it flat parameters, whose leaves are buffers.

    Raises:
      ValueError: in the place of the error of JAX or Python.
    """
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if "FlatParams" not in str(error):
            raise
        raise ValueError(
            "a mask or labels inside the optimizer are for a tree of parameters, and these are "
            "flat: wrap it in ampx.fused.per_buffer, as optax.partition(optimizers, "
            "per_buffer(labels)), and give flatten(params, mask=labels) the same one"
        ) from error


def _copy_containers(tree: Any) -> Any:
    """The same leaves in other containers."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(leaves)


def _check_structure_is_kept(owner: str, state: Any, new_state: Any) -> None:
    if jax.tree.structure(state) == jax.tree.structure(new_state):
        return
    old, new = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (state, new_state))
    only_old, only_new = (
        [path for path in a if path not in b] for a, b in ((old, new), (new, old))
    )
    differing = "its classes differ"
    if one_sided := only_new or only_old:
        which = "new" if only_new else "old"
        differing = f"only the {which} one holds {path_name(one_sided[0])!r}"
    raise ValueError(
        f"ampx.{owner}: the optimizer inside was given a state and returned one of another "
        f"structure: {differing}. A skipped step keeps the old state, and a compiled program can "
        "choose between states of one structure alone: let init and update return all that the "
        "state ever holds, such as zeros in the place of None"
        + ("; " + _OF_MONITOR if find_nodes(state, optax.MonitorState) else "")
    )


def _with_measurements(inner: Any, state: Any, params: Any) -> Any:
    """The first state, with zeros for what `optax.monitor` keeps from its first update on only."""
    if not find_nodes(state, optax.MonitorState):
        return state
    # Gradients have the shapes of parameters, which are at hand.
    for extra_args in ({}, {"value": jnp.zeros(()), "grad": params}):
        with contextlib.suppress(Exception):  # of what asks for more, such as a mapped axis
            run = functools.partial(inner.update, params, state, params, **extra_args)
            _, following = jax.eval_shape(run)
            break
    else:
        return state
    old, new = (
        dict(jax.tree_util.tree_leaves_with_path(state)),
        jax.tree_util.tree_leaves_with_path(following),
    )
    leaves = [old[path] if path in old else jnp.zeros(x.shape, x.dtype) for path, x in new]
    return jax.tree.unflatten(jax.tree.structure(following), leaves)


def _same_but_for_shapes(new: Any, old: Any, *, may_be_summed: bool = False) -> bool:
    """Whether only shapes differ; not if a first axis is gone and `may_be_summed`.

    `optax.contrib.dpsgd` sums the gradients of single examples. No broadcast makes an axis fewer.
    """
    same = jax.tree.structure(new) == jax.tree.structure(old)
    return same and any(
        None not in (own, other) and own != other and not (may_be_summed and own == other[1:])
        for own, other in zip(_shapes(new, None), _shapes(old, None), strict=True)
    )


def _shapes(tree: Any, otherwise: Any = ()) -> list[Any]:
    return [getattr(leaf, "shape", otherwise) for leaf in jax.tree.leaves(tree)]


def _blame(
    owner: str, init: Any, updates: Any, params: Any, state: Any, error: Exception | None
) -> None:
    """Raises if a state is not the one that `init` makes for these parameters."""
    # Without parameters, gradients have their structure and shapes.
    name, like = ("updates", updates) if params is None else ("params", params)
    try:
        due = jax.eval_shape(init, like)
    except Exception:  # of a user's transformation, and of any kind
        return
    maker = "init(params) of the same transformation"
    check_made_by(f"ampx.{owner}", maker, due, state, like_name=name, error=error)


def check_made_by(
    owner: str,
    maker: str,
    due: Any,
    state: Any,
    *,
    like_name: str = "params",
    shapes: bool = True,
    error: Exception | None = None,
) -> None:
    """Refuses an optimizer state of another structure, or of other shapes, than the one due.

    Args:
      owner: who takes the state, for the error.
      maker: what makes it, for the error.
      due: the state that is expected, or its shapes.
      state: what was given.
      shapes: whether shapes are compared; those of a state that is divided inside `shard_map` are
        not, wherever it tells.
      like_name: the argument whose structure and shapes the state should have.
      error: what the wrong state has led to, or None.

    Raises:
      ValueError: naming both.
    """
    found, wanted = outline(state), outline(due)
    if found == wanted:  # of two libraries, perhaps, which call their states alike
        found, wanted = (outline(tree, _name_with_library) for tree in (state, due))
    if found != wanted:
        held = found or "without any class"
        asked_for = wanted or "one without any class"
        raise ValueError(
            f"{owner}: the state holds the optimizer state {held}, and this optimizer makes and "
            f"takes {asked_for}: give the state that {maker} made. To go on with the moments of "
            "another, use ampx.extend_state(tx, opt_state, params)"
        ) from error
    same = jax.tree.structure(due) == jax.tree.structure(state)
    if same and (not shapes or has_mark(state, "holds_shards") or _shapes(due) == _shapes(state)):
        return
    pairs = zip(jax.tree_util.tree_leaves_with_path(due), jax.tree.leaves(state), strict=same)
    differing = (
        f": {path_name(path)!r} has shape {jnp.shape(leaf)}, expected {own.shape}"
        for (path, own), leaf in pairs
        if same and own.shape != jnp.shape(leaf)
    )
    raise ValueError(
        f"{owner}: the state is that of {found or 'an optimizer'}, made for other parameters than "
        f"{like_name}{next(differing, '')}. Make both together, with {maker}"
    ) from error


def _name_with_library(kind: type) -> str:
    return f"{kind.__module__.split('.')[0]}.{kind.__name__}"


def outline(node: Any, name_of: Callable[[type], str] = lambda kind: kind.__name__) -> str:
    """The classes of an optimizer state, nested as in it, without arrays and parameters.

    As in `LossScaleState((ScaleByAdamState, EmptyState))`.
    """
    if isinstance(node, tuple):
        # Of a plain tuple, as of a chain, each part has its place; of a class only what has parts.
        parts = [outline(part, name_of) for part in node]
        if hasattr(node, "_fields"):
            inside = ", ".join(part for part in parts if part)
            name = name_of(type(node))
            return f"{name}({inside})" if inside else name
        return f"({', '.join(part or '...' for part in parts)})" if parts else ""
    if isinstance(node, dict):  # groups of optax.partition
        named = {key: outline(part, name_of) for key, part in node.items()}
        inside = ", ".join(f"{key!r}: {part}" for key, part in named.items() if part)
        return f"{{{inside}}}" if inside else ""
    return ""

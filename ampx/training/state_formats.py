"""What a saved state looks like, written down beside it and compared before it is read.

States are plain pytrees, so orbax, flax.serialization and numpy save them without knowing ampx.
What they save are arrays by path: no classes, and no version. If a later ampx has one field more,
or the optimizer is another one, they say that some key is missing, or put arrays in wrong places.

A version inside a state would be a leaf of each, which every step would carry and every optax
function that counts leaves would meet. So it stands beside the state, as a small dict of strings
and numbers that goes into any JSON file:

    {"format": 2,                                   the fields of ampx's states, all together
     "optimizer": "LossScaleState((ScaleByAdamState, EmptyState))",
     "leaves": {"opt_state/loss_scale": "float32[]", ...}}

Fields that a later format has added are counters, which a fresh state begins at 0. So a state of an
earlier format is upgraded by its paths: what it lacks is taken from a fresh state.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ampx.loss_scaling.state import LossScaleState
from ampx.trees import path_name, without_marks
from ampx.updates.guards import outline

# Goes up whenever a class of state gains, loses or renames a field, or a field changes its meaning.
FORMAT = 2
# From a format to the first release that writes it.
_RELEASES = {1: "before 0.1.0", 2: "0.1.0"}
# The fields that formats after the first have added to a class, which earlier states lack.
_ADDED_FIELDS = {LossScaleState: ("ceiling_hits",)}


def state_format(state: Any) -> dict[str, Any]:
    """What `ampx.check_state_format` needs to know of a state; save it beside the state.

    Args:
      state: an `ampx.TrainState`, an optimizer state, or any tree that holds some; also of tracers
        or of `jax.ShapeDtypeStruct`. Nothing is read from the device.

    Returns:
      A dict of strings, numbers and dicts of these, which `json.dumps` takes: `"format"`, the
      number of the format of ampx's states; `"optimizer"`, the nested classes of the optimizer's
      state; `"leaves"`, from the path of each leaf to its dtype and shape.

    Examples:
      >>> import ampx, jax.numpy as jnp, optax
      >>> found = ampx.state_format(ampx.static_loss_scale(optax.adam(0.1), 8.0).init(jnp.ones(2)))
      >>> found["format"], found["optimizer"], found["leaves"]["inner_state/0/mu"]
      (2, 'LossScaleState((ScaleByAdamState, EmptyState))', 'float32[2]')
    """
    leaves = _describe_leaves(_leaves_by_path(state))
    # Of a class and one that adds marks to it, each reads what the other has saved.
    optimizer = outline(_optimizer_of(state), lambda kind: without_marks(kind).__name__)
    return {"format": FORMAT, "optimizer": optimizer, "leaves": leaves}


def check_state_format(saved: Mapping[str, Any], state: Any) -> None:
    """Refuses to restore a state of another format, optimizer or model than the one at hand.

    Call it before a checkpoint is read, with what `ampx.state_format` wrote when it was saved and
    the state, or its shapes, that it is to be read into.

    Args:
      saved: what `ampx.state_format` returned, perhaps by way of a JSON file.
      state: a fresh state, as `step.init(params)` makes it, or its shapes.

    Raises:
      TypeError: if `saved` is something else.
      ValueError: if the formats, the optimizers or the leaves differ; it names both.

    Examples:
      >>> import ampx, jax.numpy as jnp, optax
      >>> saved = ampx.state_format(optax.adam(0.1).init(jnp.ones(2)))
      >>> ampx.check_state_format(saved, optax.adam(0.5).init(jnp.ones(2)))
      >>> ampx.check_state_format(saved, optax.sgd(0.1).init(jnp.ones(2)))
      Traceback (most recent call last):
      ...
      ValueError: saved is the state of an optimizer (ScaleByAdamState, EmptyState), ...
    """
    if not isinstance(saved, Mapping) or set(saved) != {"format", "optimizer", "leaves"}:
        raise TypeError(
            f"saved must be what ampx.state_format returned, got {type(saved).__name__}: save it "
            "beside the state, as in json.dumps(ampx.state_format(state))"
        )
    own = state_format(state)
    if saved["format"] != FORMAT:
        written, known = (_name_format(number) for number in (saved["format"], FORMAT))
        remedy = (
            "restore it as plain nested dicts, and pass these with a fresh state to "
            "ampx.upgrade_state"
            if saved["format"] in _RELEASES
            else "restore it with the ampx that saved it, and save what is to go on (parameters, "
            "optax's own states) as plain trees"
        )
        raise ValueError(
            f"saved is a state of {written}, and this ampx reads and writes {known}: {remedy}"
        )
    # Of optax's classes marked ones were saved by their own names once.
    if re.sub(r"\b(Fused|Overlapped)(?=\w+State\b)", "", saved["optimizer"]) != own["optimizer"]:
        raise ValueError(
            f"saved is the state of an optimizer {saved['optimizer'] or 'without any class'}, and "
            f"state is that of {own['optimizer'] or 'one without any class'}: make the optimizer "
            "with the arguments that it had, or take over the parameters alone"
        )
    _check_leaves(saved["leaves"], own["leaves"])


def upgrade_state(saved: Any, state: Any) -> Any:
    """Takes over a state that an earlier ampx saved, whose states had fewer fields.

    A library that saves arrays by path gives them back as nested dicts if it is not told of any
    class: `checkpointer.restore(path)` of Orbax, `msgpack_restore(data)` of `flax.serialization`.

    Args:
      saved: what was restored: nested dicts, lists or tuples with the keys and field names of the
        state as they were, down to arrays.
      state: a fresh state, as `step.init(params)` makes it, whose classes, and whose values of
        fields that `saved` lacks, are taken.

    Returns:
      A state like `state` with the arrays of `saved`. Only counters that a later format has added
      are those of `state`: they begin at 0.

    Raises:
      ValueError: if a leaf has another dtype or shape, if any other is missing, or if `saved` has
        one that `state` lacks.

    Examples:
      >>> import ampx, jax.numpy as jnp, optax
      >>> fresh = ampx.dynamic_loss_scale(optax.sgd(0.1)).init(jnp.ones(2))
      >>> saved = fresh._asdict() | {"skipped_total": jnp.int32(3)}
      >>> del saved["ceiling_hits"]
      >>> state = ampx.upgrade_state(saved, fresh)
      >>> int(state.skipped_total), int(state.ceiling_hits)
      (3, 0)
    """
    fresh = _leaves_by_path(state)
    found = {path: fresh[path] for path in _find_added(state)} | _leaves_by_path(saved)
    _check_leaves(_describe_leaves(found), _describe_leaves(fresh))
    return jax.tree.structure(state).unflatten([found[path] for path in fresh])


def _find_added(state: Any) -> list[str]:
    """The paths of all fields in a state that its classes lacked in an earlier format."""

    def has_gained(node: Any) -> bool:
        return type(node) in _ADDED_FIELDS

    nodes = jax.tree_util.tree_leaves_with_path(state, is_leaf=has_gained)
    return [
        path_name((*path, jax.tree_util.GetAttrKey(name)))
        for path, node in nodes
        for name in _ADDED_FIELDS.get(type(node), ())
    ]


def _check_leaves(saved: Mapping[str, str], own: Mapping[str, str]) -> None:
    if saved != own:
        raise ValueError(
            f"saved and state differ in their leaves: {_list_differences(saved, own)}: restore "
            "into a state that was made for the same model and optimizer"
        )


def _optimizer_of(state: Any) -> Any:
    """The optimizer's part of a training state, ampx's or flax's; any other tree is its own."""
    return getattr(state, "opt_state", state)


def _leaves_by_path(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(path): leaf for path, leaf in leaves}


def _describe_leaves(leaves: Mapping[str, Any]) -> dict[str, str]:
    return {path: _describe_leaf(leaf) for path, leaf in leaves.items()}


def _describe_leaf(leaf: Any) -> str:
    if not hasattr(leaf, "dtype") and not isinstance(leaf, bool | int | float | complex):
        return type(leaf).__name__  # a function in an Equinox module, say
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return f"{dtype}[{','.join(map(str, jnp.shape(leaf)))}]"


def _name_format(number: Any) -> str:
    release = _RELEASES.get(number)
    return f"format {number} (ampx {release or 'of another release'})"


def _list_differences(saved: Mapping[str, str], own: Mapping[str, str]) -> str:
    """The first few paths at which two tables of leaves differ, with what both have there."""
    differing = [
        f"{path!r} is {saved.get(path, 'not there')} and {own.get(path, 'not there')}"
        for path in dict.fromkeys((*saved, *own))
        if saved.get(path) != own.get(path)
    ]
    more = f", and {len(differing) - 4} more" if len(differing) > 4 else ""
    return ", ".join(differing[:4]) + more

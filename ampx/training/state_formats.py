"""What a saved state looks like, written down beside it and compared before it is read.

States are plain pytrees, so orbax, flax.serialization and numpy save them without knowing ampx.
What they save are arrays by path: no classes, and no version. If a later ampx has one field more,
or the optimizer is another one, they say that some key is missing, or put arrays in wrong places.

A version inside a state would be a leaf of each, which every step would carry and every optax
function that counts leaves would meet. So it stands beside the state, as a small dict of strings
and numbers that goes into any JSON file:

    {"format": 1,                                   the fields of ampx's states, all together
     "optimizer": "LossScaleState((ScaleByAdamState, EmptyState))",
     "leaves": {"opt_state/loss_scale": "float32[]", ...}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ampx.trees import path_name
from ampx.updates.guards import outline

# Goes up whenever a class of state gains, loses or renames a field, or a field changes its meaning.
FORMAT = 1
# From a format to the first release that writes it.
_RELEASES = {1: "0.1.0"}


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
      (1, 'LossScaleState((ScaleByAdamState, EmptyState))', 'float32[2]')
    """
    paths = jax.tree_util.tree_leaves_with_path(state)
    leaves = {path_name(path): _describe_leaf(leaf) for path, leaf in paths}
    return {"format": FORMAT, "optimizer": outline(_optimizer_of(state)), "leaves": leaves}


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
        raise ValueError(
            f"saved is a state of {written}, and this ampx reads and writes {known}: restore it "
            "with the ampx that saved it, and save what is to go on (parameters, optax's own "
            "states) as plain trees"
        )
    if saved["optimizer"] != own["optimizer"]:
        raise ValueError(
            f"saved is the state of an optimizer {saved['optimizer'] or 'without any class'}, and "
            f"state is that of {own['optimizer'] or 'one without any class'}: make the optimizer "
            "with the arguments that it had, or take over the parameters alone"
        )
    if saved["leaves"] != own["leaves"]:
        raise ValueError(
            f"saved and state differ in their leaves: {_list_differences(saved['leaves'], own)}: "
            "restore into a state that was made for the same model"
        )


def _optimizer_of(state: Any) -> Any:
    """The optimizer's part of a training state, ampx's or flax's; any other tree is its own."""
    return getattr(state, "opt_state", state)


def _describe_leaf(leaf: Any) -> str:
    if not hasattr(leaf, "dtype") and not isinstance(leaf, bool | int | float | complex):
        return type(leaf).__name__  # a function in an Equinox module, say
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return f"{dtype}[{','.join(map(str, jnp.shape(leaf)))}]"


def _name_format(number: Any) -> str:
    release = _RELEASES.get(number)
    return f"format {number} (ampx {release or 'of another release'})"


def _list_differences(saved: Mapping[str, str], own: Mapping[str, Any]) -> str:
    """The first few paths at which two tables of leaves differ, with what both have there."""
    here = own["leaves"]
    differing = [
        f"{path!r} is {saved.get(path, 'not there')} and {here.get(path, 'not there')}"
        for path in dict.fromkeys((*saved, *here))
        if saved.get(path) != here.get(path)
    ]
    more = f", and {len(differing) - 4} more" if len(differing) > 4 else ""
    return ", ".join(differing[:4]) + more

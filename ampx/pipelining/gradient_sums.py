"""Which gradients of a pipeline are summed over which devices.

Every device along a data axis has a loss of its own, for its rows. What it finds for a parameter is
a part of the gradient, and how these parts come together depends on who holds the parameter:

  held by                          along the axis                          sum over it
  every device along a data axis   each has the part of its own rows       yes
  one device each (FSDP, experts)  what brought it to the others' rows,    no: other parameters
                                   an all_gather or all_to_all, has        are at these places
                                   brought their parts back and added them
  the devices of the stages        layers: all of it on one device         no
                                   ends: zeros on all devices but one      yes
                                   or two
  an axis of `param_specs`,        see `join_replicas`                     unchecked
  the same rows on each
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from ampx.data_parallel.reduction import Reduction
from ampx.mesh_axes import add_over_devices, axes_of_spec, is_spec
from ampx.overwritten import split_overwritten, take_largest
from ampx.pipelining.runtime.layouts import Layout
from ampx.trees import merge_trainable


def sum_gradients(
    grads: dict[str, Any],
    specs: dict[str, Any],
    layout: Layout,
    axis_name: str,
    reductions: tuple[Reduction, Reduction],
    first: jax.Array,
) -> dict[str, Any]:
    """Sums the gradients of all devices along the axes of the stages and the data.

    Args:
      grads: gradients of a device by part; those of the stages in the view of the layout. In the
        places of overwritten leaves (`ampx.overwritten`) are new values, of which it takes the
        largest.
      specs: `PartitionSpec`s by part, or finer, of parameters as they are stored.
      layout: of the stages.
      axis_name: the axis of the stages.
      reductions: over the data axes, and over that of the stages, too.
      first: what is to be known before gradients are sent.

    Returns:
      Gradients as parameters are stored.
    """
    over_data, over_all = reductions
    # Gradients of layers only lack the sum over the data axes. Those of the ends are zeros on all
    # devices along the stage axis but one or two: one sum over all axes completes them, ties
    # (`"shared"`) included.
    rest = {part: tree for part, tree in grads.items() if part != "stages"}
    rest = _sum_parts(rest, {part: specs[part] for part in rest}, over_all, first)
    stages = grads["stages"]
    if _all_axes(specs["stages"]).isdisjoint(over_data.axes):
        # All are summed alike, so a device sums those of its own layers, and sends them then.
        stages = layout.as_stored(_sum_parts(stages, P(), over_data, first), axis_name)
    else:
        # The view of stages that differ is packed: only behind it are there leaves to tell apart.
        stages = layout.as_stored(stages, axis_name)
        stages = _sum_parts(stages, specs["stages"], over_data, first)
    return rest | {"stages": stages}


def _sum_parts(grads: Any, specs: Any, over: Reduction, first: jax.Array) -> Any:
    """Sums each leaf over those axes of a reduction that do not divide it."""
    if not over.axes:
        return grads
    own, new = split_overwritten(grads)
    own, _ = over.reduce(own, first, _axes_of_leaves(specs, own))
    return merge_trainable(own, new and _join(new, specs, over.axes, take_largest))


def join_replicas(grads: Any, specs: Any, axes: tuple[str, ...]) -> Any:
    """Joins what the devices along some axes found for parameters that are not divided over them.

    Args:
      grads: gradients, which are summed; of overwritten leaves (`ampx.overwritten`) the largest new
        value is taken.
      specs: `PartitionSpec`s by part, or finer.
      axes: the axes.
    """
    if grads is None or not axes:
        return grads
    others, new = split_overwritten(grads)
    summed = _join(others, specs, axes, add_over_devices)
    return merge_trainable(summed, new and _join(new, specs, axes, take_largest))


def _join(
    tree: Any, specs: Any, axes: tuple[str, ...], join: Callable[[Any, tuple[str, ...]], Any]
) -> Any:
    """Joins each leaf over those of the axes that do not divide it."""

    # Specs are a prefix of the gradients' tree: one for each part, or finer.
    def join_part(spec: P, part: Any) -> Any:
        divided = axes_of_spec(spec)
        return join(part, tuple(axis for axis in axes if axis not in divided))

    return jax.tree.map(join_part, specs, tree, is_leaf=is_spec)


def _axes_of_leaves(specs: Any, tree: Any) -> list[tuple[str, ...]]:
    """The axes that divide each leaf of a tree of which the specs are a prefix."""
    found: list[tuple[str, ...]] = []

    def add(spec: P, part: Any) -> None:
        found.extend([axes_of_spec(spec)] * len(jax.tree.leaves(part)))

    jax.tree.map(add, specs, tree, is_leaf=is_spec)
    return found


def _all_axes(specs: Any) -> set[str]:
    return {axis for s in jax.tree.leaves(specs, is_leaf=is_spec) for axis in axes_of_spec(s)}

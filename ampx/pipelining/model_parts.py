"""The parts of a pipeline's parameters: what comes before the layers, they, what comes after.

  part        read by                    stored
  "first"     the first stage            on every device
  "stages"    all stages                 divided over the devices of the stages
  "last"      the last stage             on every device
  "shared"    the first and the last     on every device

A caller may leave out all but `"stages"`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from ampx import flax_modules
from ampx.mesh_axes import axes_of_spec, is_spec
from ampx.trees import is_floating, path_name

PARTS = ("first", "stages", "last", "shared")
NO_STATE = (
    "a pipeline has no model_state: batch statistics would depend on the order of micro-batches. "
    "Use LayerNorm, RMSNorm or GroupNorm, or close over frozen statistics"
)


def make_specs(axis_name: str, param_specs: Any, is_divided: bool) -> dict[str, Any]:
    """Says for each part over which mesh axes it is divided.

    Args:
      axis_name: the axis of the stages.
      param_specs: the caller's `PartitionSpec`s by part, or None.
      is_divided: whether the devices of the stages divide the layers.
    """
    # Whole arrays for the ends, a part of the layers for each device. Layers that the devices do
    # not divide are whole, too; axes behind the first keep what `param_specs` says.
    specs: dict[str, Any] = dict.fromkeys(PARTS, P()) | {"stages": P(axis_name)}
    specs |= dict(param_specs or {})
    if not is_divided:
        specs["stages"] = jax.tree.map(
            lambda spec: P(None, *spec[1:]) if spec[1:] else P(),
            specs["stages"],
            is_leaf=is_spec,
        )
    return specs


def sum_over_replicas(grads: Any, specs: Any, axes: tuple[str, ...]) -> Any:
    """Sums gradients over those of the axes along which their parameters are not divided."""
    if grads is None or not axes:
        return grads

    # Specs are a prefix of the gradients' tree: one for each part, or finer.
    def add_up(spec: P, part: Any) -> Any:
        divided = axes_of_spec(spec)
        return lax.psum(part, tuple(axis for axis in axes if axis not in divided))

    return jax.tree.map(add_up, specs, grads, is_leaf=is_spec)


def check_params(params: Any) -> None:
    """Raises unless these are parts of a model, and all of their leaves have gradients."""
    if not isinstance(params, Mapping) or "stages" not in params or set(params) - set(PARTS):
        found = list(params) if isinstance(params, Mapping) else type(params).__name__
        raise TypeError(
            f"params must be a dict with 'stages' and any of 'first', 'last', 'shared', got {found}"
        )
    statistics = flax_modules.find_batch_statistics(dict(params))
    if statistics is not None:
        raise ValueError(f"{statistics} is no parameter, and {NO_STATE}")
    # Stage programs count on it: of their inputs the first ones, all parameters, are
    # differentiated.
    for path, leaf in jax.tree_util.tree_leaves_with_path(dict(params)):
        if not is_floating(leaf):
            raise TypeError(
                f"the parameter {path_name(path)} has dtype {leaf.dtype}, which has no gradient: "
                "keep it in the batch, or close over it"
            )

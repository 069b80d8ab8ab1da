"""How the state of an `ampx.zero1` lies on a mesh: a `PartitionSpec` for each of its arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ampx.checking import check_transformation
from ampx.data_parallel.shard_layouts import WHOLE, ShardLayout, layout_of_spec, match_parameters
from ampx.data_parallel.zero1 import Zero1State, record_axes
from ampx.mesh_axes import as_axes, check_axes_of_mesh
from ampx.model_axes import ModelAxes, as_model_axes
from ampx.overwritten import axes_of_optimized, split_optimized
from ampx.tree_checks import check_arrays
from ampx.trees import at_path, find_nodes, path_name


def zero1_specs(
    tx: optax.GradientTransformation,
    params: Any,
    mesh: Any,
    axis_name: str | Sequence[str] | None = None,
    *,
    model_axes: Any = None,
) -> Any:
    """The partition specs of an optimizer state that holds an `ampx.zero1`.

    Args:
      tx: the whole transformation, whatever is around `zero1` in it.
      params: parameters, or their shapes and dtypes.
      mesh: the mesh of the step.
      axis_name: the axes that `zero1` was given. None finds them in `tx`.
      model_axes: `PartitionSpec`s of the parameters if they are divided over further axes, as a
        tree prefix of them: what in_specs of `shard_map` has for the parameters.

    Returns:
      A tree like `tx.init(params)` of `PartitionSpec`: for the in_specs and out_specs of
      `shard_map`, and with the mesh for the shardings of `jax.jit(tx.init, out_shardings=...)`.

    Raises:
      TypeError: if `tx` is not a gradient transformation or `mesh` no mesh.
      ValueError: if there is no `zero1` in `tx`, if it has other axes than `axis_name`, if the mesh
        has no such axis, or if `model_axes` does not tell how a parameter is divided.

    Examples:
      >>> import ampx, jax, jax.numpy as jnp, optax
      >>> auto = (jax.sharding.AxisType.Auto,)
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=auto)
      >>> specs = ampx.zero1_specs(ampx.zero1(optax.adam(0.1), "data"), jnp.ones((4, 8)), mesh)
      >>> tuple(specs.inner_state[0].mu), tuple(specs.inner_state[0].count)
      ((None, 'data'), ())
      >>> mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=auto * 2)
      >>> tx = ampx.zero1(optax.adam(0.1), "data")
      >>> specs = ampx.zero1_specs(tx, jnp.ones((4, 8)), mesh, model_axes=jax.P("model"))
      >>> tuple(specs.inner_state[0].mu)
      ('model', 'data')
    """
    check_transformation("tx", tx)
    setting = as_model_axes(model_axes)
    check_axes_of_mesh("model_axes", setting.names, mesh)
    check_arrays("params", params, may_be_shapes=True)
    setting = axes_of_optimized(setting, params)
    params = split_optimized(params)[0]
    with record_axes() as found:
        # A function of its own: JAX would remember what `tx.init` gave, and not run it again.
        state = jax.eval_shape(lambda params: tx.init(params), params)
    if not find_nodes(state, Zero1State):
        raise ValueError("there is no ampx.zero1 in this transformation: its state is not divided")
    axes = _choose_axes(axis_name, found)
    check_axes_of_mesh("axis_name", axes, mesh)
    model_layouts = [
        _layout_on_mesh(path_name(path), jnp.shape(leaf), setting, mesh.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    ]
    layouts = [
        layout.divided_further(jnp.shape(leaf), axes, mesh.shape)
        for leaf, layout in zip(jax.tree.leaves(params), model_layouts, strict=True)
    ]
    of_shard, of_part = (match_parameters(params, each) for each in (layouts, model_layouts))

    def specs_of(path: Any, node: Any) -> Any:
        if not isinstance(node, Zero1State):  # around zero1: loss scales, counts, sums of gradients
            return of_part(path, node.shape).spec
        inner = jax.tree_util.tree_map_with_path(
            lambda path, leaf: of_shard(path, leaf.shape).spec, node.inner_state
        )
        everywhere: Any = WHOLE.spec
        reduction = jax.tree.map(lambda _: everywhere, node.reduction)
        return Zero1State(reduction, inner, everywhere)

    return jax.tree_util.tree_map_with_path(
        specs_of, state, is_leaf=lambda node: isinstance(node, Zero1State)
    )


def _choose_axes(
    axis_name: str | Sequence[str] | None, found: Sequence[tuple[str, ...]]
) -> tuple[str, ...]:
    """The axes of the `zero1`s in a transformation, in their order.

    Raises:
      ValueError: if they differ from each other, or from what was given.
    """
    kinds = {*found} if axis_name is None else {as_axes(axis_name), *found}
    if len(kinds) > 1:
        given = "" if axis_name is None else f", and axis_name is {axis_name!r}"
        raise ValueError(
            f"zero1 in tx has axis_name={' and '.join(map(str, dict.fromkeys(found)))}{given}: the "
            "specs are those of one order of axes. Leave axis_name out, and give all zero1 the same"
        )
    # Where `init` is jitted it may not have run again.
    return kinds.pop() if kinds else ("data",)


def _layout_on_mesh(
    name: str,
    shape: Sequence[int],
    setting: ModelAxes,
    sizes: Mapping[str, int],
) -> ShardLayout:
    """How a whole parameter is divided over the axes of the setting.

    Raises:
      ValueError: if that is not known, or cannot be.
    """
    spec, of_leaf = setting.spec_of_path(name), setting.of_path(name)
    if of_leaf and spec is None:
        raise ValueError(
            f"model_axes names {of_leaf} for the parameter{at_path(name)} and not which "
            "axis of the array they divide: give zero1_specs a tree of PartitionSpecs, those that "
            "in_specs of shard_map has for the parameters"
        )
    layout = layout_of_spec(spec, of_leaf, len(shape))
    if layout.whole_shape(layout.part_shape(shape, sizes), sizes) != tuple(shape):
        raise ValueError(
            f"model_axes divides the parameter{at_path(name)} as {spec}, and its shape "
            f"{tuple(shape)} cannot be divided so on a mesh of {dict(sizes)}"
        )
    return layout

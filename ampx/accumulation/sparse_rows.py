"""Gradients of lookup tables as (indices, rows), which accumulate without becoming dense.

The gradient of an embedding table of n rows is zero except in the rows that a batch reads. As a
dense array it costs n rows in every micro-batch. As (indices, rows) it costs what was read:

    table f32[n, d]  --take-->  rows f32[m, d]  --loss_fn-->  loss
                                 |
              gradient of the rows, f32[m, d], beside the indices int32[m]: a `SparseRows`

`loss_fn` is differentiated with respect to the rows and not to the table. The table's own gradient
is the transpose of the `take`: a scatter-add of the rows, which `to_dense` does once, after the
last micro-batch. A row that was read twice adds up there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ampx.checking import as_positive_int, describe
from ampx.function_checks import check_callable
from ampx.summaries import show_fields
from ampx.tree_checks import check_memory
from ampx.trees import map_by_path, wider_dtype


class SparseRows(NamedTuple):
    """Some rows of a table; a row index may occur several times, and then its rows add up.

    Attributes:
      indices: int32[m] or int64[m], not negative.
      rows: floating, of shape (m, ...) with the shape of a row behind.
      like: int8[0, number of rows of the table]. It holds nothing; a number would become a traced
        value under `jit`, while a shape stays known.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> grads = ampx.SparseRows.of(jnp.array([2, 0, 2]), jnp.ones((3, 2)), num_rows=4)
      >>> grads.to_dense()[:, 0]
      Array([1., 0., 2., 0.], dtype=float32)
    """

    indices: jax.Array
    rows: jax.Array
    like: jax.Array

    __repr__ = show_fields

    @classmethod
    def of(cls, indices: jax.Array, rows: jax.Array, *, num_rows: int) -> SparseRows:
        """Makes flat lists of indices of any shape, and of rows of that shape plus the row's own.

        Args:
          indices: int of any shape; negative ones count from the end.
          rows: floating, of the shape of the indices followed by that of a row.
          num_rows: the number of rows of the table.

        Raises:
          TypeError: for indices that are no integers, rows that are no array, or a number of rows
            that is no int.
          ValueError: if the shapes do not fit together, or the number of rows is not positive.
        """
        num_rows = as_positive_int("num_rows", num_rows)
        for name, value, kind in (("indices", indices, np.integer), ("rows", rows, np.number)):
            if not jnp.issubdtype(getattr(value, "dtype", np.void), kind):
                raise TypeError(f"{name} must be an array of numbers, {describe(value)}")
            check_memory(name, value)
        row_shape = rows.shape[indices.ndim :]
        if rows.shape[: indices.ndim] != indices.shape:
            raise ValueError(
                f"rows of shape {rows.shape} do not begin with the shape of the indices, "
                f"{indices.shape}"
            )
        # Indices may come as int8 or uint8, in which an index plus the number of rows would wrap.
        indices = indices.astype(wider_dtype(indices.dtype, jnp.int32))
        # A negative index counts from the end when a table is read, so it must here too.
        positive = jnp.where(indices < 0, indices + num_rows, indices)
        return cls(
            positive.reshape(-1),
            rows.reshape(-1, *row_shape),
            jnp.zeros((0, num_rows), jnp.int8),
        )

    @property
    def num_rows(self) -> int:
        """Number of rows of the table."""
        return self.like.shape[1]

    def to_dense(self) -> jax.Array:
        """The table's gradient: zero except in these rows, repeated ones summed."""
        return jax.ops.segment_sum(self.rows, self.indices, num_segments=self.num_rows)


def is_sparse_rows(node: Any) -> bool:
    """Whether a node of a tree is a `SparseRows`."""
    return isinstance(node, SparseRows)


def densify(tree: Any) -> Any:
    """Replaces every `SparseRows` in a tree by the dense array it stands for.

    Args:
      tree: gradients.

    Returns:
      The same tree with arrays only.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> rows = ampx.SparseRows.of(jnp.array([1]), jnp.ones((1, 2)), num_rows=2)
      >>> ampx.densify({"table": rows})["table"].shape
      (2, 2)
    """

    def dense(node: Any) -> Any:
        return node.to_dense() if is_sparse_rows(node) else node

    return jax.tree.map(dense, tree, is_leaf=is_sparse_rows)


def densify_rows() -> optax.GradientTransformationExtraArgs:
    """An optax transformation that makes sparse gradients dense, once, before an optimizer.

    Put it inside the loss scale, which then looks at the rows only and unscales the rows only:
    `dynamic_loss_scale(optax.chain(ampx.densify_rows(), optax.adam(1e-3)))`.

    Returns:
      A stateless transformation.

    Examples:
      >>> import ampx, jax.numpy as jnp, optax
      >>> tx = optax.chain(ampx.densify_rows(), optax.sgd(1.0))
      >>> table = jnp.zeros((3, 1))
      >>> rows = ampx.SparseRows.of(jnp.array([1, 1]), jnp.ones((2, 1)), num_rows=3)
      >>> tx.update(rows, tx.init(table), table)[0].ravel()
      Array([-0., -2., -0.], dtype=float32)
    """
    transformation = optax.stateless(lambda updates, params: densify(updates))
    return optax.with_extra_args_support(transformation)


def as_tables(sparse_rows: Any) -> dict[str, Callable[[Any], jax.Array]]:
    """Converts the argument `sparse_rows` of `ampx.value_and_grad` to a dict; None is empty.

    Raises:
      TypeError: if it is no mapping from paths to functions.
    """
    if sparse_rows is None:
        return {}
    is_mapping = isinstance(sparse_rows, Mapping)
    if not is_mapping or not all(isinstance(path, str) for path in sparse_rows):
        raise TypeError(
            "sparse_rows must be a mapping from the path of a table to a function of the batch, "
            f"such as {{'embed/table': lambda batch: batch['tokens']}}, got {sparse_rows!r}"
        )
    for path, indices_of in sparse_rows.items():
        check_callable(f"sparse_rows[{path!r}]", indices_of, "indices_of(batch)")
    return dict(sparse_rows)


def read_tables(
    params: Any, microbatch: Any, tables: Mapping[str, Callable[[Any], jax.Array]]
) -> tuple[Any, Callable[[Any], Any]]:
    """Replaces tables by the rows that a micro-batch reads.

    Args:
      params: the parameters, with whole tables.
      microbatch: what the functions in `tables` are called with.
      tables: from a parameter's path to the function that gives the indices.

    Returns:
      The parameters with rows in the place of tables, and a function that turns the gradients of
      those into gradients with a `SparseRows` for each table.

    Raises:
      ValueError: if a path is not among the parameters.
    """
    if not tables:
        return params, lambda grads: grads
    indices: dict[str, jax.Array] = {}
    num_rows: dict[str, int] = {}

    def read(name: str, leaf: jax.Array) -> jax.Array:
        if name not in tables:
            return leaf
        found = tables[name](microbatch)
        if not jnp.issubdtype(getattr(found, "dtype", np.void), np.integer):
            raise TypeError(
                f"sparse_rows[{name!r}] must return an array of integers, {describe(found)}"
            )
        indices[name], num_rows[name] = found, leaf.shape[0]
        # Out of range this reads NaN, where plain indexing would take the last row silently.
        return jnp.take(leaf, indices[name], axis=0)

    rows = map_by_path(params, read)
    if missing := set(tables) - set(indices):
        raise ValueError(
            f"sparse_rows names {sorted(missing)}, which are not among the parameters: give paths "
            "with names joined by '/'"
        )

    def collect(grads: Any) -> Any:
        def wrap(name: str, grad: jax.Array) -> Any:
            if name not in tables:
                return grad
            return SparseRows.of(indices[name], grad, num_rows=num_rows[name])

        return map_by_path(grads, wrap)

    return rows, collect


def split_sparse(grads: Any) -> tuple[Any, Any]:
    """Splits gradients into (dense ones, sparse ones), each None where the other has the leaf."""
    # Two trees of one structure, since a scan wants to carry one part and to stack the other.
    dense = jax.tree.map(lambda g: None if is_sparse_rows(g) else g, grads, is_leaf=is_sparse_rows)
    sparse = jax.tree.map(lambda g: g if is_sparse_rows(g) else None, grads, is_leaf=is_sparse_rows)
    return dense, sparse


def merge_sparse(dense: Any, sparse: Any) -> Any:
    """Merges what `split_sparse` parted, the rows of all k micro-batches in one list.

    Args:
      dense: summed gradients.
      sparse: `SparseRows` with a leading axis of k on every array, from a scan.
    """

    def merge(array: Any, rows: Any) -> Any:
        if rows is None:
            return array
        # int[k, m] -> int[k * m], f[k, m, ...] -> f[k * m, ...]; all k of `like` are the same.
        return SparseRows(
            rows.indices.reshape(-1), rows.rows.reshape(-1, *rows.rows.shape[2:]), rows.like[0]
        )

    return jax.tree.map(merge, dense, sparse, is_leaf=lambda n: n is None or is_sparse_rows(n))

"""Gradients of lookup tables as (indices, rows), which accumulate without becoming dense."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ampx.trees import map_by_path, wider_dtype


class SparseRows(NamedTuple):
    """Some rows of a table; a row index may occur several times, and then its rows add up.

    Attributes:
      indices: int of shape (n,).
      rows: floating of shape (n, ...row shape).
      like: a zero-size array of shape (0, number of rows), so that the shape survives `jit`.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> grads = ampx.SparseRows.of(jnp.array([2, 0, 2]), jnp.ones((3, 2)), num_rows=4)
      >>> grads.to_dense()[:, 0]
      Array([1., 0., 2., 0.], dtype=float32)
    """

    indices: jax.Array
    rows: jax.Array
    like: jax.Array

    @classmethod
    def of(cls, indices: jax.Array, rows: jax.Array, *, num_rows: int) -> SparseRows:
        """Flattens indices of any shape, and rows of that shape plus the row's, to a list."""
        row_shape = rows.shape[indices.ndim :]
        if rows.shape[: indices.ndim] != indices.shape:
            raise ValueError(
                f"rows of shape {rows.shape} do not begin with the shape of the indices, "
                f"{indices.shape}"
            )
        # Bytes could not hold an index plus the number of rows.
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
        """The table's gradient: zero but for these rows, repeated ones summed."""
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

    Inside a loss scale, so that verdict and unscaling touch the rows only:
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


def read_tables(
    params: Any, microbatch: Any, tables: Mapping[str, Callable[[Any], jax.Array]]
) -> tuple[Any, Callable[[Any], Any]]:
    """Parameters with tables replaced by the rows that are read, and the way back for gradients."""
    if not tables:
        return params, lambda grads: grads
    indices: dict[str, jax.Array] = {}
    num_rows: dict[str, int] = {}

    def read(name: str, leaf: jax.Array) -> jax.Array:
        if name not in tables:
            return leaf
        indices[name], num_rows[name] = tables[name](microbatch), leaf.shape[0]
        # Out of range this reads NaN, where plain indexing would take the last row silently.
        return jnp.take(leaf, indices[name], axis=0)

    rows = map_by_path(params, read)
    if missing := set(tables) - set(indices):
        raise ValueError(f"sparse_rows names {sorted(missing)}, which are not among the parameters")

    def collect(grads: Any) -> Any:
        def wrap(name: str, grad: jax.Array) -> Any:
            if name not in tables:
                return grad
            return SparseRows.of(indices[name], grad, num_rows=num_rows[name])

        return map_by_path(grads, wrap)

    return rows, collect


def split_sparse(grads: Any) -> tuple[Any, Any]:
    """Gradients as (dense ones, sparse ones), None where the other has the leaf."""
    dense = jax.tree.map(lambda g: None if is_sparse_rows(g) else g, grads, is_leaf=is_sparse_rows)
    sparse = jax.tree.map(lambda g: g if is_sparse_rows(g) else None, grads, is_leaf=is_sparse_rows)
    return dense, sparse


def merge_sparse(dense: Any, sparse: Any) -> Any:
    """Puts the parts together again, the rows of all micro-batches in one list."""

    def merge(array: Any, rows: Any) -> Any:
        if rows is None:
            return array
        return SparseRows(
            rows.indices.reshape(-1), rows.rows.reshape(-1, *rows.rows.shape[2:]), rows.like[0]
        )

    return jax.tree.map(merge, dense, sparse, is_leaf=lambda n: n is None or is_sparse_rows(n))

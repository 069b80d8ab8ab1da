"""What the kernels of every platform share: the rule they map, and the same map in plain JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ampx.mapped_axes import varying_over

Rule = Callable[..., tuple[Sequence[jax.Array], Sequence[jax.Array]]]
"""`rule(scalars, read, written, sqrt) -> (new_written, terms)`, elementwise.

`scalars` is a tuple of float32 scalars; `read` and `written` are lists of equally shaped blocks in
the types of their arrays. The rule casts: to float32 to compute, back to the type of each written
array. `sqrt` is a square root that the platform can lower. `terms` are float32 blocks, one for each
sum: the map adds up all their elements.

What lowers everywhere: arithmetic, `sqrt`, `lax.rsqrt`, `exp`, `abs`, `sign`, `round`, `clip`,
`maximum`, comparisons, casts, bit operations, and `where`, also with a scalar predicate. What does
not on GPUs: `isfinite` (compare `abs(x) < inf`), `pow`, `cbrt` and captured arrays.
"""


def checked(
    scalars: jax.Array, read: Sequence[jax.Array], written: Sequence[jax.Array]
) -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
    """The arguments of a map, all marked as varying over the mesh axes over which any of them does.

    A kernel is opaque to `shard_map`: with `check_vma` its results vary over what its operands do.

    Raises:
      ValueError: if the scalars are not a float32 vector, or the arrays have unlike shapes.
    """
    if scalars.ndim != 1 or scalars.dtype != jnp.float32:
        raise ValueError(f"scalars must be a float32 vector, not {jax.typeof(scalars)}")
    arrays = [*read, *written]
    if len({array.shape for array in arrays}) != 1:
        raise ValueError(f"one map needs arrays of one shape, not {[a.shape for a in arrays]}")
    axes = frozenset().union(*map(varying_over, (scalars, *arrays)))

    def vary(array: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - varying_over(array)))
        return lax.pcast(array, missing, to="varying") if missing else array

    return vary(scalars), [vary(array) for array in read], [vary(array) for array in written]


def applied(
    fun: Rule,
    scalars: Any,
    read: Sequence[jax.Array],
    written: Sequence[jax.Array],
    sqrt: Callable[[jax.Array], jax.Array],
    num_sums: int,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """What the rule makes of one block; `scalars` is a vector, or a reference to one.

    Raises:
      ValueError: if the rule returns too few or too many arrays, or arrays of other types.
    """
    values = tuple(scalars[k] for k in range(scalars.shape[0]))
    new, terms = map(list, fun(values, list(read), list(written), sqrt))
    if len(terms) != num_sums:
        raise ValueError(f"the rule gave {len(terms)} terms to sum; num_sums is {num_sums}")
    types = [(array.shape, array.dtype.name) for array in new]
    if types != (due := [(array.shape, array.dtype.name) for array in written]):
        raise ValueError(f"the rule gave {types} for the written arrays {due}")
    return new, terms


def map_whole(
    fun: Rule,
    scalars: jax.Array,
    read: Sequence[jax.Array],
    written: Sequence[jax.Array],
    *,
    num_sums: int = 0,
) -> tuple[list[jax.Array], jax.Array]:
    """The map as plain JAX: what the kernels must equal, and what serves leaves too small for one.

    Returns:
      The new written arrays, and the `num_sums` sums as a float32 vector.
    """
    new, terms = applied(fun, scalars, read, written, jnp.sqrt, num_sums)
    return new, stacked([jnp.sum(term) for term in terms])


def stacked(sums: Sequence[jax.Array]) -> jax.Array:
    """Scalar sums as one float32 vector, which may be empty."""
    return jnp.stack(sums) if sums else jnp.zeros((0,), jnp.float32)

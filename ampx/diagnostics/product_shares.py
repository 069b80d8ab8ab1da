"""In which dtypes a program multiplies matrices, by floating-point operations.

A policy that says half gains as much as it makes half of the matrix products. One product that is
still float32, since an input was not cast or a layer has a dtype of its own, shows in no figure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from ampx.diagnostics.step_programs import source_of
from ampx.jaxprs import folds, reading
from ampx.jaxprs.reading import Equation, Jaxpr


class ProductCount(NamedTuple):
    """The matrix products and convolutions of a program in one dtype.

    Attributes:
      dtype: of their operands; of two different ones the wider.
      flops: floating-point operations of all of them on one device: two for each product of
        numbers, since it is added up. A scan counts as often as it runs, a `while_loop` once, of a
        cond each branch.
      source: file, line and function of the one with the most of them.
    """

    dtype: str
    flops: int
    source: str


def count_products(jaxpr: Jaxpr) -> tuple[ProductCount, ...]:
    """Counts matrix products and convolutions by dtype, outside of Pallas kernels; most first."""
    totals: dict[str, int] = {}
    largest: dict[str, tuple[int, str]] = {}
    for eqn, around in folds.equations_inside(jaxpr):
        flops = _count_flops(eqn)
        if not flops or any(outer.primitive.name == "pallas_call" for outer in around):
            continue
        scans = [outer for outer in around if outer.primitive.name == "scan"]
        flops *= math.prod(reading.scan_steps(outer)[0] for outer in scans)
        operands: Sequence[Any] = eqn.invars[:2]
        widest = max((atom.aval.dtype for atom in operands), key=lambda dtype: dtype.itemsize)
        if not jnp.issubdtype(widest, jnp.floating):
            continue
        dtype = str(widest)
        totals[dtype] = totals.get(dtype, 0) + flops
        if flops > largest.get(dtype, (0, ""))[0]:
            largest[dtype] = flops, source_of((eqn, *reversed(around)), jaxpr)
    ordered = sorted(totals, key=lambda dtype: -totals[dtype])
    return tuple(ProductCount(dtype, totals[dtype], largest[dtype][1]) for dtype in ordered)


def describe_shares(counts: Sequence[ProductCount]) -> str:
    """The shares in a sentence; empty where all products are float32 or wider."""
    if all(jnp.dtype(count.dtype).itemsize > 2 for count in counts):
        return ""
    total = sum(count.flops for count in counts)
    shares = ", ".join(f"{count.flops / total:.1%} in {count.dtype}" for count in counts)
    wide = [count for count in counts if jnp.dtype(count.dtype).itemsize > 2]
    where = f" The largest in {wide[0].dtype}: {wide[0].source}." if wide else ""
    return f"Operations of matrix products: {shares}.{where}"


def _count_flops(eqn: Equation) -> int:
    """The floating-point operations of one matrix product or convolution; 0 for all else."""
    name = eqn.primitive.name
    operands: Sequence[Any] = eqn.invars
    results: Sequence[Any] = eqn.outvars
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        summed = math.prod(operands[0].aval.shape[axis] for axis in contracted)
        return 2 * math.prod(results[0].aval.shape) * summed
    if name == "ragged_dot_general":
        # All groups together have the rows of one product. A gradient of the weights sums over
        # rows: a result for each group, of which each row enters one.
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        (contracted, _), _ = numbers.dot_dimension_numbers
        summed = math.prod(operands[0].aval.shape[axis] for axis in contracted)
        is_by_group = set(contracted) & set(numbers.lhs_ragged_dimensions)
        groups = operands[2].aval.shape[-1] if is_by_group else 1
        return 2 * math.prod(results[0].aval.shape) * summed // max(groups, 1)
    if name == "conv_general_dilated":
        kernel = operands[1].aval.shape
        features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2 * math.prod(results[0].aval.shape) * math.prod(kernel) // max(features, 1)
    return 0

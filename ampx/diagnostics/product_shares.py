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
from ampx.jaxprs.reading import Atom, Equation, Jaxpr

# What stands between a conversion and the product that promotion made it for.
_SAME_PRODUCT = frozenset({"convert_element_type", "transpose", "reshape", "broadcast_in_dim"})


class ProductCount(NamedTuple):
    """The matrix products and convolutions of a program in one dtype.

    Attributes:
      dtype: of their operands; of two different ones the wider.
      flops: floating-point operations of all of them on one device: two for each product of
        numbers, since it is added up. A scan counts as often as it runs, a `while_loop` once, of a
        cond each branch.
      source: file, line and function of the one with the most of them.
      widened: the same of the first one with an operand in half precision, which counts as this
        wider dtype all the same; `""` where there is none.
    """

    dtype: str
    flops: int
    source: str
    widened: str = ""


def count_products(jaxpr: Jaxpr) -> tuple[ProductCount, ...]:
    """Counts matrix products and convolutions by dtype, outside of Pallas kernels; most first."""
    totals: dict[str, int] = {}
    largest: dict[str, tuple[int, str]] = {}
    widened: dict[str, str] = {}
    makers: dict[Atom, Equation] = {}
    for eqn, around in folds.equations_inside(jaxpr):
        makers.update(dict.fromkeys(eqn.outvars, eqn))
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
        is_widened = widest.itemsize > 2 and any(_was_half(atom, makers) for atom in operands)
        if is_widened and dtype not in widened:
            widened[dtype] = source_of((eqn, *reversed(around)), jaxpr)
    ordered = sorted(totals, key=lambda dtype: -totals[dtype])
    return tuple(
        ProductCount(dtype, totals[dtype], largest[dtype][1], widened.get(dtype, ""))
        for dtype in ordered
    )


def describe_shares(counts: Sequence[ProductCount]) -> str:
    """The shares in a sentence; empty where neither products nor their operands were in half."""
    if all(jnp.dtype(count.dtype).itemsize > 2 for count in counts):
        return next((_describe_widened(count) for count in counts if count.widened), "")
    total = sum(count.flops for count in counts)
    shares = ", ".join(f"{count.flops / total:.1%} in {count.dtype}" for count in counts)
    wide = [count for count in counts if jnp.dtype(count.dtype).itemsize > 2]
    where = f" The largest in {wide[0].dtype}: {wide[0].source}." if wide else ""
    return f"Operations of matrix products: {shares}.{where}"


def _describe_widened(count: ProductCount) -> str:
    return (
        f"No matrix product is in half precision: an operand of this one was half and the other "
        f"{count.dtype}, so both were multiplied in {count.dtype}: {count.widened}. Cast the other "
        f"one, too; where a layer makes its inputs {count.dtype} by itself, give the layer a half "
        "dtype, or take O1, which casts both."
    )


def _was_half(atom: Atom, makers: dict[Atom, Equation]) -> bool:
    """Whether an operand is half, or was until it was converted, transposed and reshaped."""
    while not reading.is_literal(atom) and not _is_half(atom) and atom in makers:
        eqn = makers[atom]
        if eqn.primitive.name not in _SAME_PRODUCT:
            return False
        atom = eqn.invars[0]
    return _is_half(atom)


def _is_half(atom: Atom) -> bool:
    dtype = atom.aval.dtype
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 2


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

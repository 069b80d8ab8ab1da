"""What float8 leaves of the operands of matrix products, by what shares a scale.

With float8, an operand is divided by a scale that brings its largest number to the end of the
format. What lies far below the largest number that has the same scale becomes zero. So the share
that is lost depends on which numbers those are:

    x = [[448, 2**-11],          by tensor   the scale is 1, and 2**-11 becomes zero
         [2**-12, 2**-11]]       by row      the second row is divided by 2**-19: 2**-11 is 2**8

A count of exponents cannot tell, as the numbers of an array lie in it without their places. So the
operands themselves are cast, as the recipes of `ampx.Float8` cast them.

Such a share tells nothing of the harm. What is lost beside a large number of the same sum would
have changed that sum by little; where a whole row is lost, so is its result. So the casts are
multiplied, too, and recipes are chosen by the errors of the products.
"""

from __future__ import annotations

import collections
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from ampx.autocasting.float8 import MX_BLOCK, Float8, RecipeName, Sharing, casts_of, find_obstacle
from ampx.jaxprs.reading import Equation
from ampx.summaries import show_fields

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
# From the fewest casts to the most room for small numbers.
RECIPE_LADDER: tuple[RecipeName, ...] = ("tensorwise", "rowwise", "rowwise_half_dw", "mxfp8")
Role = Literal["input", "parameter", "cotangent"]
# The error of a product of normal numbers is 0.04, and 0.06 with e5m2. Where the best recipe has
# more than this, the terms of its sums cancel, and what is left are roundings.
_LARGEST_ERROR = 0.25
# In a row or column that a recipe loses, the error is near 1.
_LOST = 4


class Float8Shares(NamedTuple):
    """What a cast to float8 does to the numbers of an operand, as shares of those not zero.

    Attributes:
      flushed: share that becomes zero.
      saturated: share that becomes the largest number of the format. Nothing is clipped: these are
        the numbers next to the largest one.

    Examples:
      >>> from ampx import Float8Shares
      >>> Float8Shares(0.1, 0.0) | Float8Shares(0.0, 0.2)  # the worse of both
      Float8Shares(flushed=0.1, saturated=0.2)
    """

    flushed: float = 0.0
    saturated: float = 0.0
    __repr__ = show_fields

    def __or__(self, other: Float8Shares) -> Float8Shares:
        return Float8Shares(max(self.flushed, other.flushed), max(self.saturated, other.saturated))


# Of one operand, or the worst of several, by format and by which numbers share a scale.
Shares = Mapping[tuple[str, Sharing], Float8Shares]


class Float8Row(NamedTuple):
    """What a format of eight bits leaves of the operands of a module's matrix products.

    Attributes:
      scope: name scopes joined by "/", as in `NumericsRow`.
      direction: `"forward"` for inputs and weights, `"backward"` for cotangents.
      by_tensor: with one scale for an array; of the worst operand, as all shares here.
      by_row: with a scale for each row, which is what one sum of the product runs over.
      by_block: with a scale for 32 neighbours of a row; None where rows do not divide into such.

    Examples:
      >>> import jax.numpy as jnp
      >>> from ampx import numerics_report
      >>> x = jnp.ones((16, 16)).at[3].set(1e-6)  # a row of small numbers
      >>> report = numerics_report(lambda w: jnp.sum(x @ w))(jnp.ones((16, 16)))
      >>> row = report.float8_table("float8_e4m3fn")[0]
      >>> row.direction, row.by_tensor
      ('forward', Float8Shares(flushed=0.0625, saturated=0.0))
      >>> report.float8_recipes[""]  # else that row of the result would be lost
      'rowwise'
    """

    scope: str
    direction: str
    by_tensor: Float8Shares
    by_row: Float8Shares
    by_block: Float8Shares | None

    __repr__ = show_fields


class JudgedProduct(NamedTuple):
    """What casts to float8 make of a product.

    Attributes:
      shares: of each operand.
      recipes: those that leave enough of the result.
    """

    shares: tuple[Shares, ...]
    recipes: frozenset[RecipeName]


def judge_product(
    eqn: Equation, operands: Sequence[Any], roles: Sequence[Role]
) -> JudgedProduct | None:
    """Casts the operands of a `dot_general` and multiplies them; None if it cannot be float8."""
    is_real = all(jnp.issubdtype(jnp.result_type(array), np.floating) for array in operands)
    if not is_real or find_obstacle(Float8(), eqn):
        return None
    sums, _ = eqn.params["dimension_numbers"]
    pairs = [
        (_zero_nonfinite(array), tuple(axes)) for array, axes in zip(operands, sums, strict=True)
    ]
    casts = [_cast_all(*pair) for pair in pairs]

    def multiply(arrays: Iterable[np.ndarray]) -> np.ndarray:
        product = np.tensordot(*arrays, axes=sums)
        return product.reshape(-1, np.prod(product.shape[pairs[0][0].ndim - len(sums[0]) :]))

    exact = multiply(array for array, _ in pairs)
    errors: dict[RecipeName, tuple[float, float]] = {}
    fitting: set[RecipeName] = set()
    for recipe in RECIPE_LADDER:
        keys = [_find_cast(recipe, role, roles) for role in roles]
        if None in keys:  # this product is left in half
            fitting.add(recipe)
        elif all(key in own for key, own in zip(keys, casts, strict=True)):
            arrays = (own[key][0] for key, own in zip(keys, casts, strict=True) if key)
            errors[recipe] = _find_errors(multiply(arrays), exact)
    if min(error for error, _ in errors.values()) <= _LARGEST_ERROR:
        least = min(worst for _, worst in errors.values())
        fitting |= {recipe for recipe, (_, worst) in errors.items() if worst <= _LOST * least}
    shares = tuple({key: found for key, (_, found) in own.items()} for own in casts)
    return JudgedProduct(shares, frozenset(fitting))


def _find_cast(recipe: RecipeName, role: Role, roles: Sequence[Role]) -> tuple[str, Sharing] | None:
    """How a recipe casts an operand in its role, beside the other's; None leaves it in half."""
    casts = casts_of(Float8(recipe))
    if "cotangent" not in roles:
        found = casts.forward[0]
    else:
        of_cotangent, of_other = casts.dx if "parameter" in roles else casts.dw
        found = of_cotangent if role == "cotangent" else of_other
    return None if found is None else (str(found.dtype), found.per)


def _zero_nonfinite(array: Any) -> np.ndarray:
    numbers = np.asarray(array, np.float32)
    return np.where(np.isfinite(numbers), numbers, 0)


def _cast_all(
    x: np.ndarray, sums: tuple[int, ...]
) -> dict[tuple[str, Sharing], tuple[np.ndarray, Float8Shares]]:
    """What each format and sharing leaves of an operand, and the shares of what it does not."""
    sharings: tuple[Sharing, ...] = ("tensor", "row")
    if x.shape[sums[-1]] % MX_BLOCK == 0:
        sharings = (*sharings, "block")
    return {(name, per): _cast(x, sums, name, per) for per in sharings for name in (E4M3, E5M2)}


def _cast(
    x: np.ndarray, sums: tuple[int, ...], name: str, per: Sharing
) -> tuple[np.ndarray, Float8Shares]:
    numbers, axes = x, None if per == "tensor" else sums
    if per == "block":
        last = sums[-1]
        numbers = x.reshape(*x.shape[:last], -1, MX_BLOCK, *x.shape[last + 1 :])
        axes = (last + 1,)
    limit = np.float32(jnp.finfo(name).max)
    # The least power of two that brings the largest number into the format.
    mantissa, exponent = np.frexp(np.max(np.abs(numbers), axis=axes, keepdims=True) / limit)
    exponent = np.maximum(exponent - (mantissa == 0.5), -126)
    cast = np.ldexp(numbers, -exponent).astype(jnp.dtype(name)).astype(np.float32)
    nonzero = max(1, np.count_nonzero(x))
    shares = Float8Shares(
        float(np.count_nonzero((cast == 0) & (numbers != 0)) / nonzero),
        float(np.count_nonzero(np.abs(cast) == limit) / nonzero),
    )
    return np.ldexp(cast, exponent).reshape(x.shape), shares


def _find_errors(found: np.ndarray, exact: np.ndarray) -> tuple[float, float]:
    """The relative error of a product, and that of its worst row or column."""
    wrong, right = np.square(found - exact), np.square(exact)
    parts = [(wrong.sum(axis), right.sum(axis)) for axis in (None, 0, 1)]
    ratios = [np.sqrt(w / np.where(r == 0, 1, r)) * (r != 0) for w, r in parts]
    return float(ratios[0]), float(max(ratio.max(initial=0) for ratio in ratios[1:]))


def merge_shares(first: Shares, second: Shares) -> Shares:
    """The worse of two operands."""
    keys = dict.fromkeys((*first, *second))
    return {key: first.get(key, Float8Shares()) | second.get(key, Float8Shares()) for key in keys}


def make_rows(found: Mapping[tuple[str, str], Shares], name: str) -> tuple[Float8Row, ...]:
    """A row for each scope and direction, for a format."""
    if name not in (E4M3, E5M2):
        raise ValueError(f"float8_dtype must be {E4M3!r} or {E5M2!r}, got {name!r}")
    return tuple(
        Float8Row(*key, shares[name, "tensor"], shares[name, "row"], shares.get((name, "block")))
        for key, shares in found.items()
    )


def choose_recipe(fitting: Container[RecipeName]) -> RecipeName | None:
    """The recipe with the fewest casts among some; None of none."""
    return next((recipe for recipe in RECIPE_LADDER if recipe in fitting), None)


def choose_for_all(fitting: Iterable[frozenset[RecipeName]]) -> RecipeName | None:
    """The recipe that serves the most scopes, and of those the one with the fewest casts."""
    counts = collections.Counter(recipe for recipes in fitting for recipe in recipes)
    return max(RECIPE_LADDER, key=counts.__getitem__) if counts else None

"""What a float8 product is asked for by: recipes, and which products can be float8 at all.

Two formats of eight bits share the work. `e4m3` has three bits of fraction and ends at 448; `e5m2`
has two and ends at 57344, so it has more range where `e4m3` has more digits:

             exponent  fraction  largest  smallest normal  smallest   next after 1
    e4m3       4 bits    3 bits      448          2**-6      2**-9        1.125
    e5m2       5 bits    2 bits    57344          2**-14     2**-16       1.25

Neither holds the numbers of a training step as they are. So an array becomes two: its numbers
divided by a *scale* that brings the largest one to the end of the format, and that scale. A scale
may serve the whole array, or each row alone, where a row is all that one sum of the product runs
over. Scales here are powers of two: dividing by one rounds nothing.

A linear layer has three products: its result, and two in the backward pass, the gradient of its
input (`dx`) and that of its weight (`dw`). Each casts its own operands, since its sums run over
another axis. A recipe says how.
"""

from __future__ import annotations

import dataclasses
import math
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, cast, get_args

import jax.numpy as jnp

from ampx.checking import check_choice, suggest
from ampx.summaries import show_fields

Sharing = Literal["tensor", "row", "block"]
RecipeName = Literal["rowwise", "tensorwise", "rowwise_half_dw", "mxfp8"]
Dots = Literal["float8"] | RecipeName
# Matrix units take float8 in tiles of 16. Where a size is no multiple of it, XLA widens the
# operands without a word, so that the casts would cost time and digits and bring nothing.
MULTIPLE = 16
SCOPE = "ampx.float8"  # the name scope around all that a product in float8 computes
_FIRST_CAPABILITY = (8, 9)  # of NVIDIA's GPUs with products in float8: Ada, then Hopper
MX_BLOCK = 32  # numbers that share a scale in the mx formats


class Cast(NamedTuple):
    """How one operand of a product becomes float8.

    Attributes:
      dtype: `float8_e4m3fn` or `float8_e5m2`.
      per: which numbers share a scale: all of the array; a row, which is what one sum runs over; or
        a block of 32 neighbours of a row.
    """

    dtype: Any
    per: Sharing


Casts = tuple[Cast | None, Cast | None]  # of a product's two operands; None leaves one in half


class Products(NamedTuple):
    """The casts of the three products of a linear layer.

    Attributes:
      forward: of the input and the weight, in any order.
      dx: of the cotangent and the weight, for the gradient of the input.
      dw: of the cotangent and the input, for the gradient of the weight.
    """

    forward: tuple[Cast, Cast]
    dx: Casts
    dw: Casts


def _by(per: Sharing, dtype: Any = jnp.float8_e4m3fn) -> Cast:
    return Cast(jnp.dtype(dtype), per)


_ROWS, _TENSOR = (_by("row"), _by("row")), (_by("tensor"), _by("tensor"))
_BLOCKS = (_by("block"), _by("block"))
# One scale must span all rows of a cotangent, so tensorwise gives these the format of more range.
_COTANGENT = (_by("tensor", jnp.float8_e5m2), _by("tensor"))
_RECIPES: MappingProxyType[str, Products] = MappingProxyType(
    {
        "rowwise": Products(_ROWS, _ROWS, _ROWS),
        "tensorwise": Products(_TENSOR, _COTANGENT, _COTANGENT),
        # The weight of dx is cast as a whole, so that it need not be read along its other axis.
        "rowwise_half_dw": Products(_ROWS, (_by("row"), _by("tensor")), (None, None)),
        "mxfp8": Products(_BLOCKS, _BLOCKS, _BLOCKS),
    }
)


@dataclasses.dataclass(frozen=True)
class Float8:
    """How matrix products run in float8: the setting `dots` of `ampx.autocast`.

    All recipes take their scales from the numbers at hand, as powers of two, and keep no state.

    ===================  ==========================  ======  ==========================
    recipe               numbers that share a scale  format  cotangents
    ===================  ==========================  ======  ==========================
    `"rowwise"`          a row of each sum           e4m3    the same
    `"tensorwise"`       an array                    e4m3    e5m2
    `"rowwise_half_dw"`  a row of each sum           e4m3    the same; half for weights
    `"mxfp8"`            32 neighbours in a sum      e4m3    the same
    ===================  ==========================  ======  ==========================

    Attributes:
      recipe: which numbers share a scale, and in which formats.

    Raises:
      ValueError: for an unknown recipe.

    References:
      Micikevicius et al., FP8 Formats for Deep Learning, 2022 (https://arxiv.org/abs/2209.05433).
      `torchao.float8` has recipes of the first three names; mxfp8 is of the Open Compute Project's
      Microscaling Formats specification, 2023.

    Examples:
      >>> import ampx
      >>> ampx.Float8("tensorwise")
      Float8(recipe='tensorwise')
    """

    recipe: RecipeName = "rowwise"

    __repr__ = show_fields

    def __post_init__(self) -> None:
        """Refuses unknown recipes."""
        check_choice("recipe", self.recipe, get_args(RecipeName))


def casts_of(dots: Float8) -> Products:
    """The casts that a recipe gives the three products."""
    return _RECIPES[dots.recipe]


def find_obstacle(dots: Float8, eqn: Any) -> str:
    """Finds why a `dot_general` cannot be float8, in a word for reports; `""` if it can."""
    _, (batch, _) = eqn.params["dimension_numbers"]
    if batch:
        return "batched"
    in_blocks = casts_of(dots).forward[0].per == "block"
    return "" if all(_fits(sizes, in_blocks) for sizes in _kinds_of_axes(eqn)) else "size"


def find_sizes(eqn: Any) -> tuple[int, int, int]:
    """The three sizes of a product as one of matrices: of its sums, its rows and its columns."""
    summed, rows, columns = (math.prod(sizes) for sizes in _kinds_of_axes(eqn))
    return summed, rows, columns


def _kinds_of_axes(eqn: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """The sizes of a product's axes by kind: each of its three products sums over one kind."""
    (lhs_sum, rhs_sum), _ = eqn.params["dimension_numbers"]
    lhs, rhs = (atom.aval.shape for atom in eqn.invars)
    return (
        [lhs[axis] for axis in lhs_sum],
        [size for axis, size in enumerate(lhs) if axis not in lhs_sum],
        [size for axis, size in enumerate(rhs) if axis not in rhs_sum],
    )


def _fits(sizes: list[Any], in_blocks: bool) -> bool:
    """Whether axes of these sizes can be summed over in float8, or lie beside such a sum."""
    # A size that is known only by name, as in `jax.export`, is no int.
    if not all(isinstance(size, int) for size in sizes):
        return False
    if in_blocks and (not sizes or sizes[-1] % MX_BLOCK):
        return False  # blocks are runs of a last axis
    return math.prod(sizes) > 0 and math.prod(sizes) % MULTIPLE == 0


def find_fallback(dots: Float8, device: Any) -> str:
    """Finds why a device multiplies in half what is cast to float8; `""` if no reason is known.

    XLA widens the operands in silence where it has no float8 product, so that casts only cost.
    """
    if casts_of(dots).forward[0].per == "block":
        return f"{dots.recipe} multiplies in half what float8 leaves of its operands"
    capability = str(getattr(device, "compute_capability", ""))
    # CPUs are for trying things out. Of other vendors' GPUs the capability is no number.
    if device.platform == "gpu" and capability.replace(".", "").isdigit():
        if tuple(map(int, capability.split("."))) < _FIRST_CAPABILITY:
            return (
                f"{device.device_kind} has compute capability {capability}, and products in float8 "
                "begin with 8.9"
            )
    return ""


def as_float8(dots: Float8 | str | None) -> Float8 | None:
    """Converts what `dots` may be to the setting itself; None stays.

    Raises:
      TypeError: for anything but words and `Float8`.
      ValueError: for an unknown word.
    """
    if dots is None or isinstance(dots, Float8):
        return dots
    words = ("float8", *_RECIPES)
    if not isinstance(dots, str):
        raise TypeError(f"dots must be one of {words}, ampx.Float8(recipe) or None, got {dots!r}")
    if dots not in words:
        raise ValueError(
            f"dots must be one of {words}, ampx.Float8(recipe) or None, got {dots!r}"
            f"{suggest(dots, words)}"
        )
    return Float8() if dots == "float8" else Float8(cast(RecipeName, dots))

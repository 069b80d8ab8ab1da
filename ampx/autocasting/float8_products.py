"""A `dot_general` in float8, with its two gradients as float8 products of their own.

    cast         q = float8(x / s), s = power of two >= max |x| / largest float8, for each row
    direct       (qa . qb) * sa * sb       float8 operands, a float32 sum, scales behind it
    dequantized  (qa * sa) . (qb * sb)     where scales differ along the sum: a product in half

The first form is what XLA gives to a matrix unit of eight bits. The second rounds in the same way
but multiplies in half; only mxfp8 needs it. Nothing is clipped. An infinity makes its scale
infinite and a NaN makes it NaN, so what they touch is NaN, and a loss scale skips the step.

Each product is a `custom_vjp` whose two gradients are products of the same kind. So derivatives of
derivatives are float8 products as well, and no cast is ever differentiated: the derivative of a
cast would be a cast of the tangent, without a scale.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ampx.autocasting.float8 import MX_BLOCK, SCOPE, Cast, Casts, Float8, casts_of
from ampx.jaxprs import reading
from ampx.jaxprs.reverse_only import reverse_only
from ampx.mesh_axes import mark_varying, varying_axes

_NO_FORWARD_MODE = (
    "forward-mode differentiation (jvp, jacfwd, hessian) of a product in float8, by dots={!r}: "
    "there are rules for reverse mode alone (grad, vjp). Leave dots out of ampx.autocast here"
)


@dataclasses.dataclass(frozen=True)
class Float8Product:
    """One product, all but its operands. Equal ones share a function, which JAX traces once.

    Attributes:
      dots: the setting.
      casts: of the two operands.
      dims: `dimension_numbers` of the `dot_general`, without batch axes.
      out_sharding: as of `dot_general`.
      weight: which operand is the weight, 0 or 1: its gradient is `dw`, the other's `dx`.
      half: the dtype that stands in where there is no float8.
      result: the dtype of the result.
    """

    dots: Float8
    casts: Casts
    dims: Any
    out_sharding: Any
    weight: int
    half: Any
    result: Any

    def __call__(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        """The product of two arrays, each half or float32."""
        message = _NO_FORWARD_MODE.format(self.dots.recipe)
        # A gradient summed over devices is summed by the transpose of this mark: in float32.
        both = mark_varying((lhs, rhs), sorted(varying_axes((lhs, rhs))))
        with jax.named_scope(SCOPE):
            types = map(jax.typeof, both)
            return _differentiable(self, *types)(*(reverse_only(x, message) for x in both))


def quantize(x: jax.Array, cast: Cast, sums: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Casts to float8 with scales of its own.

    Args:
      x: half or float32.
      cast: how.
      sums: the axes that the product sums over, in order.

    Returns:
      The numbers in float8, in the shape of `x`, and the float32 powers of two to multiply them by,
      in a shape that broadcasts to that of `x`; of a block, its numbers have one axis more.
    """
    if cast.per == "block":
        x = _in_blocks(x, sums[-1])
        sums = (sums[-1] + 1,)
    axes = tuple(range(x.ndim)) if cast.per == "tensor" else tuple(sums)
    largest = jnp.max(jnp.abs(x), axis=axes, keepdims=True).astype(jnp.float32)
    scale = _make_scale(largest, cast.dtype)
    return (x.astype(jnp.float32) / scale).astype(cast.dtype), scale


def _in_blocks(x: jax.Array, axis: int) -> jax.Array:
    """Splits an axis of n*32 numbers into two, of n and 32."""
    return x.reshape((*x.shape[:axis], -1, MX_BLOCK, *x.shape[axis + 1 :]))


def _make_scale(largest: jax.Array, dtype: Any) -> jax.Array:
    """The smallest power of two that brings `largest` into a format's range; 1 for zeros.

    What is not finite stays so.
    """
    scale = largest / np.float32(jnp.finfo(dtype).max)
    # No subnormal scale: XLA may take one for zero.
    scale = jnp.maximum(scale, np.float32(jnp.finfo(np.float32).smallest_normal))
    # A float32 is sign, 8 bits of exponent, 23 of fraction. Adding a fraction of all ones carries
    # into the exponent unless the fraction is zero: rounded up. Then the fraction is cut off.
    bits = lax.bitcast_convert_type(scale, np.uint32)
    rounded = lax.bitcast_convert_type(
        (bits + np.uint32(0x7FFFFF)) & np.uint32(0xFF800000), np.float32
    )
    scale = jnp.where(jnp.isfinite(scale), rounded, scale)
    return jnp.where(largest == 0, np.float32(1), scale)


def _multiply(how: Float8Product, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """Casts two operands and multiplies them."""
    multiply = functools.partial(
        lax.dot_general, dimension_numbers=how.dims, out_sharding=how.out_sharding
    )
    (of_lhs, of_rhs), (lhs_sums, rhs_sums) = how.casts, how.dims[0]
    if of_lhs is None or of_rhs is None or "block" in (of_lhs.per, of_rhs.per):
        lhs = _round_trip(lhs, of_lhs, lhs_sums, how.half)
        rhs = _round_trip(rhs, of_rhs, rhs_sums, how.half)
        # In half as other products of autocast are. Asked for a float32 result, XLA's CPU compiler
        # makes a program that cannot run where a transposition follows, as behind most gradients.
        return multiply(lhs, rhs, preferred_element_type=how.half).astype(how.result)
    lhs8, lhs_scale = quantize(lhs, of_lhs, lhs_sums)
    rhs8, rhs_scale = quantize(rhs, of_rhs, rhs_sums)
    result = multiply(lhs8, rhs8, preferred_element_type=np.float32)
    # One after the other: the product of two small scales may be zero where the result is not.
    for scale in _lay_beside(result.ndim, lhs_scale, rhs_scale, how.dims[0]):
        result = result * scale
    return result.astype(how.result)


def _round_trip(x: jax.Array, cast: Cast | None, sums: Sequence[int], half: Any) -> jax.Array:
    """What float8 leaves of an operand, in half."""
    if cast is None:
        return x.astype(half)
    numbers, scale = quantize(x, cast, sums)
    return (numbers.astype(np.float32) * scale).reshape(x.shape).astype(half)


def _lay_beside(
    ndim: int, lhs_scale: jax.Array, rhs_scale: jax.Array, sums: Any
) -> tuple[jax.Array, jax.Array]:
    """Scales of operands, in shapes that broadcast to the product: [axes of lhs, axes of rhs]."""
    lhs_scale = jnp.squeeze(lhs_scale, tuple(sums[0]))
    rhs_scale = jnp.squeeze(rhs_scale, tuple(sums[1]))
    after, before = range(lhs_scale.ndim, ndim), range(ndim - rhs_scale.ndim)
    return jnp.expand_dims(lhs_scale, tuple(after)), jnp.expand_dims(rhs_scale, tuple(before))


# One function for a product of these types: JAX finds what it has traced by a function's identity.
@functools.lru_cache(maxsize=1024)
def _differentiable(how: Float8Product, lhs_type: Any, rhs_type: Any) -> Callable[..., Any]:
    """The product as a function of its operands, with a rule for its gradients."""

    @jax.custom_vjp
    def product(lhs: Any, rhs: Any) -> jax.Array:
        return _multiply(how, lhs, rhs)

    # Both are kept, also where one operand is frozen: see `custom_rules`, on what may depend on
    # what is differentiated. XLA drops what only the gradient of a frozen operand reads.
    def forward(lhs: Any, rhs: Any) -> tuple[jax.Array, Any]:
        return product(lhs, rhs), (rhs, lhs)

    def backward(kept: Any, cotangent: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(
            _make_gradient(how, lhs_type, rhs_type, operand)(cotangent, other)
            for operand, other in enumerate(kept)
        )

    product.defvjp(forward, backward)
    return product


@functools.lru_cache(maxsize=1024)
def _make_gradient(
    how: Float8Product, lhs_type: Any, rhs_type: Any, operand: int
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Makes the gradient of one operand, as a function of the cotangent and the other operand."""

    # JAX knows along which axes a product is transposed, and how the result is sharded. So its own
    # rule is traced, in float32, and its one product is exchanged.
    def differentiate(*operands: jax.Array) -> Any:
        def product(x: jax.Array) -> jax.Array:
            both = (x, operands[1]) if operand == 0 else (operands[0], x)
            return lax.dot_general(*both, how.dims, out_sharding=how.out_sharding)

        result, pull_back = jax.vjp(product, operands[operand])
        return pull_back(result)

    types = [reading.with_dtype(aval, np.float32) for aval in (lhs_type, rhs_type)]
    jaxpr = reading.open_jaxpr(reading.trace(differentiate, *types)[0])
    _, transposed, *permutations = jaxpr.eqns
    gradient = dataclasses.replace(
        how,
        casts=casts_of(how.dots).dw if operand == how.weight else casts_of(how.dots).dx,
        dims=transposed.params["dimension_numbers"],
        out_sharding=transposed.params["out_sharding"],
        weight=1,
        result=(lhs_type, rhs_type)[operand].dtype,
    )

    def run(cotangent: jax.Array, other: jax.Array) -> jax.Array:
        result = gradient(cotangent, other)
        for eqn in permutations:
            (result,) = reading.bind(eqn, [result])
        return result

    return run

"""One parameter's step: a gradient in, everything that changes out, each number read once.

`update_leaf` is the way by XLA: plain JAX operations, which XLA fuses to one loop over the
parameter's elements. For AdamW with float32 everywhere that loop reads gradient, parameter, `mu`
and `nu` and writes the last three: 16 + 12 = 28 bytes a parameter, the least possible.

    widen slots ──► rule.direction ──► keep or hold ──► narrow slots
                         │
                         └──► times trust ratio ──► times step size ──► new parameter, or update

`compute_direction` is also what a kernel does to a block of a parameter.

What is held is held together: `skip`, one bool for the whole step, decides for all slots and for
the parameter. Were each number to decide by itself, a gradient of 1e20 would enter Adam's `mu` and
not its `nu`, where its square is infinite; and mu / sqrt(nu) would throw the parameter to -1e17. A
step that is not skipped has gradients whose squares are finite, as the loss scale has seen, and
behind finite squares all slots stay finite, see `UpdateRule`. Gradients are not asked again: on
CPUs, where a loop has one output, the parameter's loop would read them for nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ampx.fused.coefficients import PackedCoefficients
from ampx.fused.moments.formats import narrow_slot, widen_slot
from ampx.fused.moments.int8_blocks import Int8Blocks
from ampx.fused.segments import Segments
from ampx.fused.update_rules import Operations, UpdateRule
from ampx.mesh_axes import sum_over_shards
from ampx.param_storage.wide_updates import overflows
from ampx.trees import is_floating, wider_dtype
from ampx.updates.skipped_derivatives import derive_held, stop_gradient_if
from ampx.updates.tails import Tail, TailResult


class Leaf(NamedTuple):
    """What belongs to one parameter, or to one flat buffer of several.

    Attributes:
      grad: of the parameter's shape, any floating dtype.
      param: an array, a `NarrowParam` in its place, or None where nobody gave it.
      slots: as the rule names them: arrays of the parameter's shape in the dtype in which they are
        stored, `Int8Blocks`, or one number, of shape () or in a flat buffer (parameters,).
      place: the parameter's number among all of the optimizer, from 0 on.
      step: int32 scalar, how many steps the optimizer has done.
      segments: the parameters, if it is a flat buffer of several.
      untracked: mapped axes over which it is divided and of which types tell nothing.
    """

    grad: Any
    param: Any
    slots: tuple[Any, ...]
    place: int = 0
    step: Any = 0
    segments: Segments | None = None
    untracked: tuple[str, ...] = ()

    @property
    def has_blocks(self) -> bool:
        """Whether it has slots in 8 bits, of which a block of elements shares a scale."""
        return any(isinstance(slot, Int8Blocks) for slot in self.slots)


def compute_dtype(leaf: Leaf) -> np.dtype:
    """The dtype of a parameter's arithmetic: float32, or float64 for a float64 parameter.

    Integers are computed with in float32 as well, unless their gradient is float64.

    Raises:
      TypeError: for complex numbers, and for what is no number.
    """
    like = leaf.grad if leaf.param is None else leaf.param
    if any(not _is_real(x) for x in (like, leaf.grad)):
        raise TypeError(
            f"a fused update of a parameter of dtype {like.dtype} with a gradient of dtype "
            f"{leaf.grad.dtype}: it takes real numbers; leave other parameters to optax with "
            "optax.partition"
        )
    decides = like if is_floating(like) else leaf.grad
    return wider_dtype(decides.dtype if is_floating(decides) else jnp.float32, jnp.float32)


def _is_real(x: Any) -> bool:
    is_integer = jnp.issubdtype(x.dtype, jnp.integer)
    return is_integer or (is_floating(x) and not jnp.iscomplexobj(x))


def update_leaf(
    rule: UpdateRule, coefficients: PackedCoefficients, leaf: Leaf, tail: Tail
) -> tuple[TailResult, tuple[Any, ...]]:
    """The update of a parameter, or its new value, and its new slots."""
    # Flat buffers are few and gain nothing by a `jit` that is traced once. Moments in blocks are
    # not put behind it, since XLA fuses them less well for GPUs where they come out of a call.
    update = _update if leaf.has_blocks or leaf.segments is not None else _update_traced_once
    # Names are no arrays: they go beside the leaf, as what `jit` takes for static.
    axes, leaf = leaf.untracked, leaf._replace(untracked=())
    value, lost, slots = update(rule, tail.new_params, axes, coefficients.numbers, leaf, tail.skip)
    # Where nothing was lost the flag is the same object for all parameters, and is counted once.
    bad = coefficients.is_bad if lost is None else coefficients.is_bad | lost
    return TailResult(value, bad), slots


def _update(
    rule: UpdateRule,
    new_params: bool,
    untracked: tuple[str, ...],
    h: Any,
    leaf: Leaf,
    skip: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None, tuple[Any, ...]]:
    held = leaf
    if skip is not None:
        leaf = stop_gradient_if(skip, leaf)
    wide = compute_dtype(leaf)
    # `param` may be None, an empty tree, and stays so.
    g, p = jax.tree.map(lambda x: x.astype(wide), (leaf.grad, leaf.param))
    slots = tuple(widen_slot(slot, wide) for slot in leaf.slots)
    if not is_floating(leaf.grad):
        # No loss scale has multiplied integers, so none divides them: see `nonfinite.unscale`.
        h = h._replace(factor=None)
    if rule.needs_squares:
        # NovoGrad: |factor * g|**2, whole, before anything else is done with the gradient.
        scaled = _zero_if(skip, g if h.factor is None else g * h.factor)
        h = h._replace(squares=sum_parameter(scaled * scaled, leaf.segments, untracked))
    wide_leaf = leaf._replace(grad=g, param=p, slots=slots)
    step, new_slots = compute_direction(rule, h, wide_leaf, skip)
    if rule.direction_again is not None:
        # LAMB. XLA is free to write the direction out or to compute it twice; kernels compute it
        # twice.
        ratio = compute_trust_ratio(_zero_if(skip, p), step, leaf.segments, untracked)
        step = step * ratio
    step = step if h.step_size is None else h.step_size * step
    # Without a skip a float16 moment overflows, as optax's does.
    saturates = skip is not None and rule.is_guarded
    kept = tuple(
        narrow_slot(new, old, leaf.step, leaf.place, saturates=saturates)
        for new, old in zip(new_slots, leaf.slots, strict=True)
    )
    value, lost = _answer_tail(p, step, leaf, skip, new_params)
    if skip is not None:
        stays = held.param if new_params else jnp.zeros_like(value)
        value, kept = derive_held(skip, (value, kept), (stays, held.slots))
    return value, lost, kept


# `jit` inside the caller's `jit` is a cache here: parameters of one shape, dtype and rule are
# traced and lowered once, and XLA inlines the calls. For 400 parameters: 0.4 s instead of 1.5.
_update_traced_once = jax.jit(_update, static_argnums=(0, 1, 2))


def compute_direction(
    rule: UpdateRule,
    h: Any,
    leaf: Leaf,
    skip: jax.Array | None,
    sqrt: Callable[[jax.Array], jax.Array] = jnp.sqrt,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """All that kernels share with XLA, of numbers in the compute dtype.

    Args:
      rule: the optimizer.
      h: its coefficients, scalars.
      leaf: gradient, parameter and slots, all widened; or one block of each, in a kernel.
      skip: bool scalar, see `Tail`.
      sqrt: the platform's square root.

    Returns:
      The direction, and the new slots; on a skip, the old ones.
    """
    # 1 / loss scale and the clip, in the wide dtype: float16 gradients lose nothing here.
    g = leaf.grad if h.factor is None else leaf.grad * h.factor
    operations = Operations(sqrt)
    if leaf.segments is not None:
        operations = operations._replace(spread=leaf.segments.spread)
    if skip is not None:
        # A select, and no arithmetic such as `old + keep * (new - old)`: 0 times infinity is NaN,
        # and -0.0 would lose its sign. It costs nothing in a loop that has both numbers at hand.
        operations = operations._replace(keep=lambda new, old: _select(skip, old, new))
    return rule.direction(g, leaf.param, leaf.slots, h, operations)


def _select(condition: jax.Array, a: Any, b: Any) -> jax.Array:
    """`jnp.where`, without the call of a function, of which XLA makes a copy for each parameter."""
    # A rule of the user's may return a number, or one for all elements.
    types = [(x.shape, x.dtype) for x in (a, b) if isinstance(x, jax.Array)]
    alike = len(types) == 2 and types[0] == types[1]
    return lax.select(condition, a, b) if alike else jnp.where(condition, a, b)


def _zero_if(skip: jax.Array | None, x: jax.Array) -> jax.Array:
    """What a norm is taken of, so that it needs the verdict; on a skip nothing reads the norm.

    A sum over devices must come behind those of the verdict on all of them. A verdict may look a
    second time, in a branch, and on CPUs what does not need the branch can overtake it: then
    devices may wait for each other for ever.
    """
    return x if skip is None else _select(skip, jnp.zeros_like(x), x)


def keep_leaf(leaf: Leaf, tail: Tail) -> TailResult:
    """The result for an integer parameter, whose gradient is empty."""
    return TailResult(leaf.param if tail.new_params else leaf.grad, jnp.zeros((), bool))


def _answer_tail(
    p: Any, step: jax.Array, leaf: Leaf, skip: Any, new_params: bool
) -> tuple[jax.Array, jax.Array | None]:
    """The update or the new parameter, and whether it lost a number; None where none can be lost.

    Two causes are counted: a coefficient that is not finite, which is seen for free in the packed
    vector, and a float16 parameter that overflows. Anything else that is not finite (0 / 0 without
    epsilon) is held but not counted: that would be one more pass over every parameter.
    """
    # The sum in the wide dtype, rounded once.
    new = step if p is None else (p + step).astype(leaf.param.dtype)
    # Nobody judges the gradients: infinities go through, as they do in optax.
    if skip is None:
        return new if new_params else step.astype(_update_dtype(leaf)), None
    lost = overflows(new, leaf.param) if p is not None and new.dtype == jnp.float16 else None
    # What is not finite becomes a step of -0.0, which changes nothing that it is added to (but for
    # subnormal numbers, which CPUs flush to zero in every sum). Where the sum would not be finite,
    # this is asked of the sum. To choose the old parameter behind the addition would mean the same,
    # but a compiler for x86 makes a masked store of a choice between a new number and the one
    # already in its place, and AMD's processors are slow at these: AdamW took 1.25 times as long.
    is_sound = lax.is_finite(new if is_floating(new) else step)  # an integer is always finite
    nothing = jnp.full_like(step, -0.0)
    step = _select(is_sound, step, nothing)
    if not new_params:
        # In the wide dtype: a half update might overflow where its sum does not.
        return _select(skip, nothing, step), lost
    new = (p + step).astype(leaf.param.dtype)
    if not is_floating(new):
        # Not every integer comes through a sum of floats.
        new = _select(is_sound, new, leaf.param)
    return _select(skip, leaf.param, new), lost


def compute_trust_ratio(
    p: jax.Array,
    direction: jax.Array,
    segments: Segments | None = None,
    untracked: Sequence[str] = (),
) -> jax.Array:
    """LAMB's: the norm of the parameter over that of the direction, 1 where one of them is 0.

    For a flat buffer of several parameters it is spread: one number for each element.
    """
    squares = (sum_parameter(x * x, segments, untracked) for x in (p, direction))
    ratio = divide_norms(*map(jnp.sqrt, squares))
    return ratio if segments is None else segments.spread(ratio)


def divide_norms(p_norm: jax.Array, norm: jax.Array) -> jax.Array:
    """The trust ratio from both norms, scalars or of shape (parameters,)."""
    # A parameter that begins at 0 would never move with a ratio of 0.
    is_zero = (p_norm == 0) | (norm == 0)
    return jnp.where(is_zero, jnp.ones_like(norm), p_norm / norm)


def sum_parameter(
    x: jax.Array, segments: Segments | None = None, untracked: Sequence[str] = ()
) -> jax.Array:
    """The sum over a parameter; along mapped axes over which it is divided, over its shards.

    For a flat buffer: one sum for each of its parameters.
    """
    return sum_over_shards(jnp.sum(x) if segments is None else segments.sums(x), untracked)


def _update_dtype(leaf: Leaf) -> np.dtype:
    """The dtype that optax's update has: that of the widest number that goes into it."""
    if leaf.param is not None and not is_floating(leaf.param):
        # Not the parameter's: optax adds floats, and rounds the sum towards zero.
        return compute_dtype(leaf)
    dtype = leaf.grad.dtype if leaf.param is None else leaf.param.dtype
    for other in (leaf.grad, *leaf.slots):
        # float8 is narrower than any update, and JAX has no common dtype for it and another.
        if isinstance(other, jax.Array) and other.dtype.itemsize > 1:
            dtype = wider_dtype(dtype, other.dtype)
    return dtype

"""The forms in which a bfloat16 parameter may be stored, and how a wrapper hands one on.

A form knows two things: `widen` gives the float32 numbers that it stands for, and `narrow` stores
new float32 numbers in the same form. They work element by element, so XLA runs them on whole
arrays and a kernel on blocks, in registers.

    split_masters          SplitParam(half, error)    4 or 3 bytes   see split_floats
    stochastic_rounding    RoundedParam(half)         2 bytes        narrow takes random bits

XLA fuses `widen`, the optimizer's update and `narrow` into one loop. A kernel is opaque to XLA: the
float32 parameter would be written to memory for it, and its result read back. So where kernels run
the update, a wrapper hands down the form itself, inside a `NarrowParam`:

    wrapper ── NarrowParam(form) ──► optax's wrappers ──► fused optimizer ──► kernel: widen,
    wrapper ◄─ NarrowParam(new form) ──────────────────────────────────────── update, narrow

Where a kernel does not take this parameter, the fused optimizer widens it and returns float32.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ampx.param_storage.rounding import element_bits, element_index, stochastic_round
from ampx.param_storage.split_floats import join, split
from ampx.updates.tails import Tail, takes_tail


class SplitParam(NamedTuple):
    """A float32 master as a bfloat16 and the bits that it leaves out, see `split_floats`.

    Attributes:
      half: bfloat16, what the model computes with.
      error: int16 or int8 of the same shape.
    """

    half: jax.Array
    error: jax.Array

    def widen(self) -> jax.Array:
        """The master: float32."""
        return join(self.half, self.error)

    def narrow(self, value: jax.Array, bits: Any = None) -> SplitParam:
        """Stores new float32 numbers with as many error bits; it uses no random `bits`."""
        del bits
        return SplitParam(*split(value, 8 * self.error.dtype.itemsize))


class RoundedParam(NamedTuple):
    """A bfloat16 that is rounded stochastically.

    Attributes:
      half: bfloat16, all there is.
    """

    half: jax.Array

    def widen(self) -> jax.Array:
        """The same numbers in float32."""
        return self.half.astype(jnp.float32)

    def narrow(self, value: jax.Array, bits: Any) -> RoundedParam:
        """Stores new float32 numbers, rounded by `bits`, uniform uint32 of their shape."""
        return RoundedParam(stochastic_round(value, bits))


ParamForm = SplitParam | RoundedParam


@dataclasses.dataclass(frozen=True, eq=False)
class NarrowParam:
    """Stands for a float32 parameter that is stored in a form.

    It is not registered as a pytree, so it is one leaf: optax's wrappers pass it on like an array.

    Attributes:
      form: how the parameter is stored.
      words: two uint32 scalars that the random bits for rounding depend on, see
        `rounding.draw_words`; None where nothing is drawn.
      dtype: float32, that of the parameter it stands for.
    """

    form: ParamForm
    words: tuple[jax.Array, jax.Array] | None = None
    dtype = np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter."""
        return self.form.half.shape

    @property
    def ndim(self) -> int:
        """The number of axes of the parameter."""
        return len(self.shape)

    def widen(self) -> jax.Array:
        """The float32 numbers."""
        return self.form.widen()

    def narrow(self, value: jax.Array) -> ParamForm:
        """Stores new float32 numbers of the whole parameter in its form."""
        if self.words is None:
            return self.form.narrow(value, None)
        bits = element_bits(*element_index(value.shape), self.words)
        return self.form.narrow(value, bits)

    def __jax_array__(self) -> jax.Array:  # for code on its way that computes with it
        return self.widen()


def as_arrays(params: Any) -> Any:
    """Widens every `NarrowParam` in a tree, for a function that needs arrays."""
    return jax.tree.map(lambda p: p.widen() if isinstance(p, NarrowParam) else p, params)


def runs_kernels(tail: Tail | None, inner_state: Any) -> bool:
    """Whether kernels are to run the updates of the transformation with this state."""
    return tail is not None and tail.in_kernels and takes_tail(inner_state)

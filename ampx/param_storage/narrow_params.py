"""Parameters in narrow forms, which a kernel widens as it reads them and narrows as it writes them.

XLA fuses what wrappers do around an optimizer with the optimizer itself. A kernel is opaque: there
a wrapper hands down the parameter as it is stored.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ampx.param_storage.split_floats import join
from ampx.updates.tails import Tail, takes_tail


class SplitParam(NamedTuple):
    """A bfloat16 and the bits that it leaves out, see `split_floats`."""

    half: jax.Array
    error: jax.Array

    def widened(self) -> jax.Array:
        """The float32 numbers."""
        return join(self.half, self.error)


class RoundedParam(NamedTuple):
    """A bfloat16 that is rounded stochastically."""

    half: jax.Array

    def widened(self) -> jax.Array:
        """The float32 numbers."""
        return self.half.astype(jnp.float32)


@dataclasses.dataclass(frozen=True, eq=False)
class NarrowParam:
    """Stands for a float32 parameter: one leaf to optax's wrappers, which pass it on.

    Attributes:
      parts: how it is stored, a `SplitParam` or a `RoundedParam`.
      words: of the random bits for rounding, see `rounding.draw_words`; None where there are none.
      dtype: float32.
    """

    parts: Any
    words: tuple[jax.Array, jax.Array] | None = None
    dtype = np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the parameter."""
        return self.parts.half.shape

    @property
    def ndim(self) -> int:
        """That of the parameter."""
        return len(self.shape)

    def __jax_array__(self) -> jax.Array:  # to whoever looks at it on its way
        return self.parts.widened()


def as_arrays(params: Any) -> Any:
    """Parameters as arrays, for a function that looks at them."""
    return jax.tree.map(lambda p: p.parts.widened() if isinstance(p, NarrowParam) else p, params)


def runs_kernels(tail: Tail | None, inner_state: Any) -> bool:
    """Whether kernels are to run the updates of the transformation with this state."""
    return tail is not None and tail.in_kernels and takes_tail(inner_state)

"""What a fused optimizer is: the arithmetic of one parameter, as a pure function.

Every optimizer in `ampx.fused.optimizers` is an `UpdateRule` around one function

    direction(gradient, parameter, slots, coefficients, operations) -> (direction, new slots)

of arrays in one wide dtype (float32, or float64 for float64 parameters). A *slot* is what optax's
state holds for the parameter: `mu` and `nu` in Adam. The *coefficients* are the scalars of this
step: betas, bias corrections, learning rate. The step is `step_size * direction`.

    optimizers/adam.py ...  the rules, each beside the formulas of its paper
      │
      ├─ leaf_updates.py            runs a rule on a whole array; XLA fuses it to one loop
      └─ kernels/kernel_steps.py    runs the same rule on one block of a Pallas kernel
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ampx.jaxprs import primitives

Slots = tuple[jax.Array, ...]
# What kernels for GPUs and for TPUs can both be compiled of, element by element.
KERNEL_PRIMITIVES = (
    primitives.COMPARING
    | primitives.ADDING
    | primitives.CHOOSING
    | frozenset("abs neg sign round mul div square rsqrt exp log tanh".split())
    | frozenset("and or not convert_element_type".split())
)


class Operations(NamedTuple):
    """What a rule cannot say in the same way everywhere.

    Attributes:
      sqrt: a square root; not every kernel language has one.
      keep: a function of (new slot, old slot) that returns the one that stays: the old one on a
        skipped step. A rule must go on with what it returns. If it went on with the new slot, new
        and old would both be needed at once, and XLA would copy every moment.
      spread: from numbers of which there is one a parameter to what the parameter's elements are
        combined with. For one array that is the number itself, of shape (); for a flat buffer it
        is from shape (parameters,) to the buffer's.
    """

    sqrt: Callable[[jax.Array], jax.Array] = jnp.sqrt
    keep: Callable[[jax.Array, jax.Array], jax.Array] = lambda new, old: new
    spread: Callable[[jax.Array], jax.Array] = lambda numbers: numbers


# (gradient, parameter or None, slots, coefficients, operations) -> (direction, new slots)
Direction = Callable[..., tuple[jax.Array, Slots]]


@dataclasses.dataclass(frozen=True)
class UpdateRule:
    """The arithmetic of an optimizer for one parameter; XLA and the Pallas kernels both run it.

    Attributes:
      direction: a function of (gradient, parameter, slots, coefficients, operations), all in one
        wide dtype, to what the step is a multiple of and the new slots. It works element by
        element, except on slots that are one number a parameter. The parameter may be None if
        nothing decays. Finite slots, coefficients and a finite square of the gradient must give
        finite slots: a loss scale asks whether squares are finite, and nothing else is asked.
      slots: names of the fields of optax's state that a parameter has, such as `("mu", "nu")`; of a
        derived rule, which finds its slots by their places, empty ones.
      direction_again: a function of (parameter, new slots, coefficients, operations) to the same
        direction. A rule that has one multiplies its direction by the trust ratio, the norm of the
        parameter over that of the direction. Both norms are known only after everything else is
        written. To work the direction out a second time costs no more memory traffic than to
        write it and to read it back.
      is_guarded: whether numbers that are not finite are kept out: such a coefficient holds all
        parameters that it is for, as on a skip, and float16 slots end at the largest number. A
        derived rule does what optax does, which may have such a number and never choose it.
      primitives: the names of the JAX primitives that `direction` runs, if it was not written for
        kernels: these have the `KERNEL_PRIMITIVES` alone.
      needs_squares: give `direction` the sum of the parameter's squared gradients, as the
        coefficient `squares`.
    """

    direction: Direction
    slots: tuple[str, ...] = ()
    direction_again: Callable[..., jax.Array] | None = None
    is_guarded: bool = True
    primitives: frozenset[str] = frozenset()
    needs_squares: bool = False

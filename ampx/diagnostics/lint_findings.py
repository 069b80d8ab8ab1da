"""What a check of a step finds: a fault, the line it is in, and what to do about it."""

from __future__ import annotations

from typing import Literal, NamedTuple

from ampx.summaries import show_fields

CheckName = Literal[
    "loss_scale",
    "unscale_order",
    "reduction",
    "out_specs",
    "schedule",
    "batch_stats",
    "lost_state",
    "random_key",
    "half_sum",
    "half_state",
    "half_constant",
    "float8_head",
    "float8_size",
    "callback",
    "donation",
    "dtype",
]


class LintFinding(NamedTuple):
    """A fault of a training step.

    Attributes:
      check: the name of the check that found it, as `ampx.lint_step` lists them.
      message: what is wrong.
      source: the line of the program, as `"/home/me/train.py:12 (step)"`; `""` where there is none.
      fix: what to do.

    Examples:
      >>> import ampx, jax, jax.numpy as jnp
      >>> def step(params, batch):
      ...     jax.debug.print("{}", params)
      ...     return params - 0.1 * batch
      >>> [found.check for found in ampx.lint_step(step)(jnp.ones(2), jnp.ones(2)).findings]
      ['callback']
    """

    check: CheckName
    message: str
    source: str
    fix: str

    __repr__ = show_fields

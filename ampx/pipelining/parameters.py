"""A device's parameters, as the stages of a schedule read them and as gradients are summed up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ampx.pipelining.assembly import StageKind
from ampx.pipelining.executor import Parameters
from ampx.pipelining.layouts import Layout
from ampx.precision import wider_dtype


def stage_parameters(
    view: Any, layout: Layout, kinds: Sequence[StageKind], accumulator_dtype: DTypeLike
) -> Parameters:
    """The parameters of a device.

    Args:
      view: a dict of parts; `"stages"` as `layout` shows them.
      layout: of the stages.
      kinds: which parts the programs read.
      accumulator_dtype: of the sums, at least.
    """

    def select(program: int, chunk: Any) -> Any:
        kind = kinds[program]
        own = layout.select(view["stages"], kind.stages[0], chunk)
        return {part: own if part == "stages" else view[part] for part in kind.uses}

    def zeros() -> Any:
        return jax.tree.map(
            lambda leaf: jnp.zeros_like(leaf, dtype=wider_dtype(leaf.dtype, accumulator_dtype)),
            view,
        )

    def add(total: Any, program: int, chunk: Any, gradients: Sequence[Any]) -> Any:
        own = jax.tree.unflatten(jax.tree.structure(select(program, chunk)), gradients)
        stages = layout.add(total["stages"], kinds[program].stages[0], chunk, own.pop("stages"))
        rest = {
            part: jax.tree.map(lambda sums, g: sums + g.astype(sums.dtype), total[part], gradient)
            for part, gradient in own.items()
        }
        return total | rest | {"stages": stages}

    return Parameters(select, zeros, add)

"""Makes exchanges of a stage's own devices run where other devices run other stages.

XLA lets all devices of a mesh take part in a `ppermute`, also those that neither send nor receive.
But a tick of a pipeline is a branch: the devices of other stages are in other branches, or in none.

  stage 0    ppermute over "model"     with 4 devices, waits for ever, or for the next one
  stage 1    idle                      of another stage, which it then takes for its own

An `all_to_all` is run by groups of devices, here those of one stage. So each `ppermute` in a stage
becomes one, of which a device reads the part of its source. In a ring of n devices it sends n - 1
times as much, as an `all_gather` does: no more than the permutes of ring attention with two.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ampx.jaxprs import building, folds, reading
from ampx.jaxprs.reading import Atom, Jaxpr
from ampx.pipelining.runtime.stage_programs import Halves, StageProgram


def exchange_in_groups(program: StageProgram) -> StageProgram:
    """Replaces each `ppermute` in the jaxprs of a stage."""
    halves = program.halves
    return dataclasses.replace(
        program,
        forward=_rewrite(program.forward),
        remake=program.remake and _rewrite(program.remake),
        backward=program.backward and _rewrite(program.backward),
        halves=halves and Halves(_rewrite(halves.inputs), _rewrite(halves.weights), halves.reads),
    )


def _permutes(jaxpr: Jaxpr) -> bool:
    return any(eqn.primitive.name == "ppermute" for eqn, _ in folds.equations_inside(jaxpr))


def _rewrite(jaxpr: Jaxpr, bound: Mapping[str, int] = MappingProxyType({})) -> Jaxpr:
    """Replaces each `ppermute` in a jaxpr; `bound` are axes that a shard_map in it maps."""
    if not _permutes(jaxpr):
        return jaxpr
    opened, eqns = reading.open_jaxpr(jaxpr), []
    names: dict[Any, Atom] = {}
    for eqn in opened.eqns:
        eqn = eqn.replace(invars=[reading.rename(names, atom) for atom in eqn.invars])
        if eqn.primitive.name == "ppermute":
            exchange = functools.partial(
                _exchange, axes=reading.collective_axes(eqn), perm=eqn.params["perm"]
            )
            spliced, outs = building.splice_function(exchange, eqn.invars, eqn, bound)
            eqns += spliced
            names.update(zip(eqn.outvars, outs, strict=True))
            continue
        if any(map(_permutes, reading.inner_jaxprs(eqn))):
            inside = {**bound, **reading.mesh_sizes(eqn)}
            bodies = [_rewrite(body, inside) for body in reading.bodies_of(eqn)]
            eqn = eqn.replace(params=reading.with_bodies(eqn, bodies))
        eqns.append(eqn)
    outvars = [reading.rename(names, atom) for atom in opened.outvars]
    return building.rebuild(jaxpr, opened.invars, outvars, eqns)


def _exchange(x: jax.Array, axes: Sequence[str], perm: Sequence[tuple[int, int]]) -> jax.Array:
    """What `lax.ppermute(x, axes, perm)` computes: zeros where nothing is sent to."""
    size, place = math.prod(map(lax.axis_size, axes)), lax.axis_index(tuple(axes))
    # No table: an equation of a loop's body can read numbers that are written into it, not arrays.
    source, is_target = jnp.zeros_like(place), place < 0
    for number, target in perm:
        source = jnp.where(place == target, number, source)
        is_target |= place == target
    copies = lax.broadcast(x, (size,))
    parts = lax.all_to_all(copies, tuple(axes), 0, 0, tiled=True)
    part = lax.dynamic_index_in_dim(parts, source, keepdims=False)
    return jnp.where(is_target, part, jnp.zeros_like(part))

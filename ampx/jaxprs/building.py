"""New equations and new jaxprs, made of old ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from ampx.jaxprs.primitives import CALLS
from ampx.jaxprs.reading import (
    Atom,
    Equation,
    Jaxpr,
    called_body,
    has_constants,
    is_dropped,
    is_explicit,
    is_literal,
    new_variable,
    open_jaxpr,
    trace,
    with_dtype,
)


def wrap_in_shard_map(eqn: Equation, body: Callable[..., Any]) -> Callable[..., Any]:
    """`body` under the mesh and the specs of a shard_map equation."""
    params = eqn.params
    return jax.shard_map(
        body,
        mesh=params["mesh"],
        in_specs=params["in_specs"],
        out_specs=params["out_specs"],
        axis_names=params["newly_manual_axes"],
        check_vma=params["check_vma"],
    )


@functools.cache
def _conversion_params(dtype: Any) -> dict[str, Any]:
    convert = functools.partial(lax.convert_element_type, new_dtype=dtype)
    other = jnp.float32 if dtype != jnp.float32 else jnp.float16
    traced, _ = trace(convert, jax.ShapeDtypeStruct((), other))
    return dict(traced.eqns[0].params)


def make_conversion(atom: Atom, dtype: Any, near: Equation) -> Equation:
    """An equation that converts `atom`, with the scope, line and context of the one nearby."""
    return core.new_jaxpr_eqn(
        [atom],
        [new_variable(with_dtype(atom.aval, dtype))],
        primitives.convert_element_type_p,
        _conversion_params(np.dtype(dtype)),
        core.no_effects,
        near.source_info,
        near.ctx,
    )


def make_broadcast(atom: Atom, like: Any, near: Equation) -> Equation:
    """An equation that broadcasts `atom`, of as many axes as `like` or none, to its shape."""
    sharding = like.sharding if is_explicit(like) else None
    with near.ctx.manager:
        params, aval = _spread_template(atom.aval, tuple(like.shape), sharding)
    return core.new_jaxpr_eqn(
        [atom],
        [new_variable(aval)],
        primitives.broadcast_in_dim_p,
        params,
        core.no_effects,
        near.source_info,
        near.ctx,
    )


@functools.lru_cache(maxsize=1024)
def _spread_template(aval: Any, shape: tuple[Any, ...], sharding: Any) -> tuple[Any, Any]:
    def broadcast(x: Any) -> Any:
        return lax.broadcast_in_dim(x, shape, range(x.ndim), out_sharding=sharding)

    traced, _ = trace(broadcast, aval)
    (eqn,) = open_jaxpr(traced).eqns
    return dict(eqn.params), eqn.outvars[0].aval


def splice_function(
    fun: Callable[..., Any], operands: Sequence[Atom], near: Equation
) -> tuple[list[Equation], list[Atom]]:
    """The equations of `fun(*operands)`, ready to stand in another jaxpr, and its outputs."""
    with near.ctx.manager:
        traced, _ = trace(fun, *(atom.aval for atom in operands))
    return splice_jaxpr(traced, operands, near)


def splice_jaxpr(
    jaxpr: Jaxpr, operands: Sequence[Atom], near: Equation
) -> tuple[list[Equation], list[Atom]]:
    """The equations of a jaxpr for these operands, ready to stand in another, and its outputs."""
    body = open_jaxpr(jaxpr)
    if has_constants(jaxpr):
        raise NotImplementedError(
            f"a rule of {near.primitive.name} closes over arrays that are not arguments of it"
        )
    names: dict[Any, Atom] = dict(zip(body.invars, operands, strict=True))

    def renamed(atom: Atom) -> Atom:
        return atom if is_literal(atom) else names[atom]

    def named(out: Any) -> Any:
        names[out] = out if is_dropped(out) else new_variable(out.aval)
        return names[out]

    eqns = [
        eqn.replace(
            invars=[renamed(atom) for atom in eqn.invars],
            outvars=[named(out) for out in eqn.outvars],
            source_info=near.source_info.replace(
                name_stack=near.source_info.name_stack + eqn.source_info.name_stack
            ),
        )
        for eqn in body.eqns
    ]
    return eqns, [renamed(atom) for atom in body.outvars]


def inline_calls(jaxpr: Jaxpr) -> Jaxpr:
    """A jaxpr in which calls, also those that recompute, are replaced by what they call."""
    opened = open_jaxpr(jaxpr)
    names: dict[Any, Atom] = {}

    def renamed(atom: Atom) -> Atom:
        return atom if is_literal(atom) else names.get(atom, atom)

    eqns: list[Equation] = []
    for eqn in opened.eqns:
        eqn = eqn.replace(invars=[renamed(atom) for atom in eqn.invars])
        body = called_body(eqn) if eqn.primitive.name in CALLS else None
        if body is None or has_constants(body):
            eqns.append(eqn)
            continue
        called, outs = splice_jaxpr(inline_calls(body), eqn.invars, eqn)
        eqns.extend(called)
        names.update(zip(eqn.outvars, outs, strict=True))
    return rebuild(jaxpr, opened.invars, [renamed(atom) for atom in opened.outvars], eqns)


def rebuild(
    jaxpr: Jaxpr, invars: Sequence[Any], outvars: Sequence[Atom], eqns: Sequence[Equation]
) -> Jaxpr:
    """`jaxpr` with other equations, its constants, effects and names kept."""
    opened = open_jaxpr(jaxpr)
    body = opened.replace(
        invars=list(invars), outvars=list(outvars), eqns=list(eqns), debug_info=opened.debug_info
    )
    return body if jaxpr is opened else core.ClosedJaxpr(body, jaxpr.consts)


def as_function(eqn: Equation, parent: Jaxpr) -> Callable[..., list[Any]]:
    """One equation as a function of all its operands, differentiable by the equation's own rule."""
    opened = open_jaxpr(parent)
    invars = [new_variable(atom.aval) for atom in eqn.invars]
    outvars = [new_variable(out.aval) for out in eqn.outvars]
    debug_info = opened.debug_info._replace(arg_names=None, result_paths=None)
    single = core.Jaxpr(
        [],
        invars,
        outvars,
        [eqn.replace(invars=invars, outvars=outvars)],
        eqn.effects,
        debug_info,
    )
    return core.jaxpr_as_fun(core.ClosedJaxpr(single, []))


def infer_output_dtypes(eqn: Equation, dtypes: Sequence[Any]) -> list[Any]:
    """The dtypes that an equation gives if its operands had these (None: as they are)."""
    avals = [
        atom.aval if dtype is None else with_dtype(atom.aval, dtype)
        for atom, dtype in zip(eqn.invars, dtypes, strict=True)
    ]

    def bind(*operands: Any) -> Any:
        return eqn.primitive.bind(*operands, **eqn.params)

    traced, _ = trace(bind, *avals)
    return [aval.dtype for aval in traced.out_avals]

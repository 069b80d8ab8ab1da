"""Makes new equations and new jaxprs of old ones.

A jaxpr is immutable here: a change makes new equations over new variables and puts them into a copy
that keeps the constants, the effects and the names of arguments. Two ways lead to new equations:

    make_*     one equation, built from its primitive and parameters
    splice_*   a function is traced, or a jaxpr taken, and its equations are renamed so that they
               read the operands of the place where they are to stand

Every new equation takes over the source line, name scope and context (mesh, precision settings) of
an old one nearby, so that profiles and error messages still point to the user's program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.extend.core import primitives as jax_primitives

from ampx.jaxprs import source_info
from ampx.jaxprs.primitives import CALLS
from ampx.jaxprs.reading import (
    Atom,
    Equation,
    Jaxpr,
    bind,
    called_body,
    constants_of,
    has_constants,
    is_dropped,
    is_explicit,
    is_literal,
    new_variable,
    open_jaxpr,
    rename,
    trace,
    with_dtype,
)


def wrap_in_shard_map(eqn: Equation, body: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `body` in a shard_map with the mesh and the specs of an equation."""
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
    # Traced once, since the names of the parameters are JAX's own affair. The traced operand has
    # another dtype: a conversion to the same one leaves no equation.
    convert = functools.partial(lax.convert_element_type, new_dtype=dtype)
    other = jnp.float32 if dtype != jnp.float32 else jnp.float16
    traced, _ = trace(convert, jax.ShapeDtypeStruct((), other))
    return dict(traced.eqns[0].params)


def make_conversion(atom: Atom, dtype: Any, near: Equation) -> Equation:
    """Makes an equation that converts `atom`, in the scope, line and context of the one nearby."""
    params = _conversion_params(np.dtype(dtype))
    aval = with_dtype(atom.aval, dtype)
    return _make_equation(jax_primitives.convert_element_type_p, params, atom, aval, near)


def make_broadcast(atom: Atom, like: Any, near: Equation) -> Equation:
    """Makes an equation that broadcasts `atom` to the shape of `like`.

    Args:
      atom: a scalar, or of as many axes as `like`, each of the same size or of size 1.
      like: the abstract value whose shape is wanted, and whose sharding if that is part of types.
      near: an equation whose scope, line and context the new one gets.
    """
    # Explicit axes: the type of an operation's result must say how it is sharded, and its operands
    # must agree in that.
    sharding = like.sharding if is_explicit(like) else None
    with near.ctx.manager:
        params, aval = _broadcast_template(atom.aval, tuple(like.shape), sharding)
    return _make_equation(jax_primitives.broadcast_in_dim_p, params, atom, aval, near)


def _make_equation(
    primitive: Any, params: dict[str, Any], atom: Atom, aval: Any, near: Equation
) -> Equation:
    """Makes an equation of one operand and one result, of the type `aval`."""
    return core.new_jaxpr_eqn(
        [atom], [new_variable(aval)], primitive, params, core.no_effects, near.source_info, near.ctx
    )


@functools.lru_cache(maxsize=1024)
def _broadcast_template(aval: Any, shape: tuple[Any, ...], sharding: Any) -> tuple[Any, Any]:
    def broadcast(x: Any) -> Any:
        return lax.broadcast_in_dim(x, shape, range(x.ndim), out_sharding=sharding)

    # One equation: an axis of size 1 is stretched by broadcast_in_dim itself.
    traced, _ = trace(broadcast, aval)
    (eqn,) = open_jaxpr(traced).eqns
    return dict(eqn.params), eqn.outvars[0].aval


def splice_function(
    fun: Callable[..., Any],
    operands: Sequence[Atom],
    near: Equation,
    mapped: Mapping[str, int] | None = None,
) -> tuple[list[Equation], list[Atom]]:
    """Traces `fun(*operands)` into equations for another jaxpr; `mapped` is for `trace`.

    Returns:
      The equations, over variables of their own beside the operands, and the atoms of the outputs.
    """
    with near.ctx.manager:
        traced, _ = trace(fun, *(atom.aval for atom in operands), mapped=mapped)
    return splice_jaxpr(traced, operands, near)


def splice_jaxpr(
    jaxpr: Jaxpr, operands: Sequence[Atom], near: Equation, *, keep_lines: bool = False
) -> tuple[list[Equation], list[Atom]]:
    """Renames the equations of a jaxpr to read these operands, to stand in another jaxpr.

    Args:
      jaxpr: without constants.
      operands: in the place of its arguments.
      near: an equation whose scope and line the others get.
      keep_lines: whether they keep their own line, being a part of the user's program. Those of
        JAX's own functions get that of `near`, since JAX does not say who calls them.

    Returns:
      The equations and the atoms of the outputs, as `splice_function`.

    Raises:
      NotImplementedError: if constants are attached to the jaxpr: an equation could not read them.
    """
    body = open_jaxpr(jaxpr)
    if has_constants(jaxpr):
        raise NotImplementedError(
            f"a rule of {near.primitive.name} closes over arrays that are not arguments of it"
        )
    names: dict[Any, Atom] = dict(zip(body.invars, operands, strict=True))
    keep_lines = keep_lines and not source_info.is_of_jax(body)

    def renamed(atom: Atom) -> Atom:
        return atom if is_literal(atom) else names[atom]

    def named(out: Any) -> Any:
        names[out] = out if is_dropped(out) else new_variable(out.aval)
        return names[out]

    # The variables are new although the body's own would do once: the same body may be spliced
    # several times, and JAX shares one traced jaxpr among all calls of a jitted function.
    eqns = [
        eqn.replace(
            invars=[renamed(atom) for atom in eqn.invars],
            outvars=[named(out) for out in eqn.outvars],
            source_info=(eqn if keep_lines else near).source_info.replace(
                name_stack=near.source_info.name_stack + eqn.source_info.name_stack
            ),
        )
        for eqn in body.eqns
    ]
    return eqns, [renamed(atom) for atom in body.outvars]


def inline_calls(jaxpr: Jaxpr) -> Jaxpr:
    """Replaces calls by the equations that they run.

    Arrays that a called function closes over become constants of the result, each of them once.
    Calls of `jax.jit` stay that say how operands or results lie on a mesh. Calls of remat are
    replaced. What they say about recomputation is lost.
    """
    opened = open_jaxpr(jaxpr)
    names: dict[Any, Atom] = {}
    # By identity: an array that many layers read, such as a mask, is one constant.
    constants = {
        id(array): (variable, array)
        for variable, array in zip(opened.constvars, constants_of(jaxpr), strict=True)
    }

    # JAX shares one traced body among all calls of a jitted function.
    inlined = functools.cache(inline_calls)
    eqns: list[Equation] = []
    for eqn in opened.eqns:
        operands = [rename(names, atom) for atom in eqn.invars]
        body = called_body(eqn) if eqn.primitive.name in CALLS else None
        if body is None or _has_shardings(eqn):
            eqns.append(eqn if operands == eqn.invars else eqn.replace(invars=operands))
            continue
        whole = inlined(body)
        within = open_jaxpr(whole)
        for variable, array in zip(within.constvars, constants_of(whole), strict=True):
            constants.setdefault(id(array), (new_variable(variable.aval), array))
        read = [constants[id(array)][0] for array in constants_of(whole)]
        arguments = within.replace(constvars=[], invars=[*within.constvars, *within.invars])
        called, outs = splice_jaxpr(arguments, [*read, *operands], eqn, keep_lines=True)
        eqns.extend(called)
        names.update(zip(eqn.outvars, outs, strict=True))
    outvars = [rename(names, atom) for atom in opened.outvars]
    inlined_body = rebuild(opened, opened.invars, outvars, eqns)
    variables, arrays = zip(*constants.values(), strict=True) if constants else ((), ())
    if not hasattr(jaxpr, "consts") and not constants:
        return inlined_body
    return core.ClosedJaxpr(inlined_body.replace(constvars=list(variables)), list(arrays))


def _has_shardings(eqn: Equation) -> bool:
    given = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return any(isinstance(sharding, jax.sharding.Sharding) for sharding in given)


def rebuild(
    jaxpr: Jaxpr, invars: Sequence[Any], outvars: Sequence[Atom], eqns: Sequence[Equation]
) -> Jaxpr:
    """Puts other equations into a copy of `jaxpr`, which keeps constants, effects and names."""
    opened = open_jaxpr(jaxpr)
    names = opened.debug_info
    # There may be more or fewer arguments and results than names, which JAX_ENABLE_CHECKS refuses.
    if len(invars) != len(opened.invars):
        names = names._replace(arg_names=None)
    if len(outvars) != len(opened.outvars):
        names = names._replace(result_paths=None)
    body = opened.replace(
        invars=list(invars), outvars=list(outvars), eqns=list(eqns), debug_info=names
    )
    return body if jaxpr is opened else core.ClosedJaxpr(body, jaxpr.consts)


def extract(
    jaxpr: Jaxpr, invars: Sequence[Any], outvars: Sequence[Atom], eqns: Sequence[Equation]
) -> Jaxpr:
    """Puts some equations of `jaxpr` into a jaxpr of their own, without constants."""
    # The names are those of the parent's arguments and results, of which there may be others.
    debug_info = open_jaxpr(jaxpr).debug_info._replace(arg_names=None, result_paths=None)
    effects = frozenset(effect for eqn in eqns for effect in eqn.effects)
    body = core.Jaxpr([], list(invars), list(outvars), list(eqns), effects, debug_info)
    return core.ClosedJaxpr(body, [])


def as_function(eqn: Equation, parent: Jaxpr) -> Callable[..., list[Any]]:
    """One equation as a function of all its operands, differentiable by the equation's own rule.

    The function evaluates a jaxpr of this single equation. That keeps its scope, line and context,
    which a bare bind of its primitive would not.
    """
    invars = [new_variable(atom.aval) for atom in eqn.invars]
    outvars = [new_variable(out.aval) for out in eqn.outvars]
    single = eqn.replace(invars=invars, outvars=outvars)
    return core.jaxpr_as_fun(extract(parent, invars, outvars, [single]))


def infer_output_dtypes(eqn: Equation, dtypes: Sequence[Any]) -> list[Any]:
    """Infers the dtypes that an equation gives if its operands had these (None: as they are)."""
    avals = [
        atom.aval if dtype is None else with_dtype(atom.aval, dtype)
        for atom, dtype in zip(eqn.invars, dtypes, strict=True)
    ]
    traced, _ = trace(lambda *operands: bind(eqn, operands), *avals)
    return [aval.dtype for aval in traced.out_avals]

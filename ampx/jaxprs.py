"""The only place that knows how JAX's equations and their parameters look in each version.

JAX offers jaxprs for reading and building under `jax.extend.core`, but the parameters of an
equation are nobody's public interface: they are read and written here and nowhere else.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core, source_info_util
from jax.extend.core import primitives

Jaxpr = Any  # jax.extend.core.Jaxpr or ClosedJaxpr: two classes in jax 0.10, one since 0.11
Equation = core.JaxprEqn
Atom = Any  # jax.extend.core.Var or Literal

# Primitives whose bodies can be exchanged, and the parameters that hold them.
_BODIES = {
    **dict.fromkeys(("jit", "pjit", "remat2", "checkpoint", "scan", "shard_map"), ("jaxpr",)),
    **dict.fromkeys(("closed_call", "call", "core_call", "eval_jaxpr"), ("call_jaxpr",)),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), ("call_jaxpr",)),
    "while": ("cond_jaxpr", "body_jaxpr"),
}
_REPEATED = ("scan", "while")
_CALLS = ("jit", "pjit", "remat2", "checkpoint", "closed_call", "call", "core_call")
_AXES_OF_REDUCTIONS = {
    **dict.fromkeys(("psum", "psum_invariant", "unreduced_psum", "pmax", "pmin"), "axes"),
    **dict.fromkeys(("reduce_scatter", "unreduced_reduce_scatter", "all_to_all"), "axis_name"),
}
# These name mapped axes, too, but each device runs them alone.
_LOCAL = (
    *("axis_index", "pvary", "pcast", "preduced"),
    *("reduced_vary_cast", "reduced_vary_cast_p", "vary_unreduced_cast", "vary_unreduced_cast_p"),
)
_RECOMPUTED = "rematted_computation"  # a scope that remat puts around what it runs again
_JAX_FOLDER = os.path.join(os.path.dirname(jax.__file__), "")


class Frame(NamedTuple):
    """A line of the traceback of an equation, innermost first."""

    file_name: str
    function_name: str
    function_start_line: int
    line: int


def is_literal(atom: Atom) -> bool:
    """Whether an operand is a constant written into the equation."""
    return isinstance(atom, core.Literal)


def is_dropped(variable: Atom) -> bool:
    """Whether nobody reads an output."""
    return isinstance(variable, core.DropVar)


def open_jaxpr(jaxpr: Jaxpr) -> Jaxpr:
    """The equations of a jaxpr, whether or not constants are attached to it."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def trace(fun: Callable[..., Any], *args: Any) -> tuple[Jaxpr, Any]:
    """The jaxpr of `fun(*args)`, with constants attached, and its output as shapes.

    `args` may be arrays, abstract values, or pytrees of them.
    """
    return jax.make_jaxpr(fun, return_shape=True)(*args)


def evaluate(jaxpr: Jaxpr, *operands: Any) -> list[Any]:
    """Runs a jaxpr with constants attached, keeping name scopes and source lines."""
    return core.jaxpr_as_fun(jaxpr)(*operands)


def bound(eqn: Equation, values: Sequence[Any]) -> list[Any]:
    """The results of an equation for other operands, which may have other shapes."""
    results = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(results) if eqn.primitive.multiple_results else [results]


def bodies_of(eqn: Equation) -> tuple[Jaxpr, ...]:
    """The jaxprs that a call, a loop or a branch runs."""
    if eqn.primitive.name == "cond":
        return tuple(eqn.params["branches"])
    return tuple(eqn.params[name] for name in _BODIES[eqn.primitive.name])


def with_bodies(eqn: Equation, bodies: Sequence[Jaxpr]) -> dict[str, Any]:
    """The parameters of a call, a loop or a branch with other bodies."""
    if eqn.primitive.name == "cond":
        return {**eqn.params, "branches": tuple(bodies)}
    return {**eqn.params, **dict(zip(_BODIES[eqn.primitive.name], bodies, strict=True))}


def call_name(eqn: Equation) -> str | None:
    """The name of a jitted function, or None."""
    return eqn.params.get("name") if eqn.primitive.name in ("jit", "pjit") else None


def constants_of(jaxpr: Jaxpr) -> Sequence[Any]:
    """The arrays that are attached to a jaxpr, in the order of its `constvars`."""
    return closed(jaxpr).consts


def has_constants(jaxpr: Jaxpr) -> bool:
    """Whether arrays are attached to a jaxpr that are no arguments of it."""
    return bool(open_jaxpr(jaxpr).constvars)


def is_inlined(fun: Any) -> bool:
    """Whether JAX puts the equations of a jitted function among those of its callers."""
    inline = getattr(getattr(fun, "_jit_info", None), "inline", None)
    return inline is True or getattr(inline, "name", None) == "JAX_EARLY"


def has_bodies(eqn: Equation) -> bool:
    """Whether any parameter of an equation, known or not, holds a jaxpr."""
    return next(iter(core.jaxprs_in_params(eqn.params)), None) is not None


def inner_jaxprs(eqn: Equation) -> tuple[Jaxpr, ...]:
    """The jaxprs among the parameters of any equation, known or not."""
    return tuple(core.jaxprs_in_params(eqn.params))


def called_body(eqn: Equation) -> Jaxpr | None:
    """The body of an equation that runs it once, on its own operands in their order; or None."""
    name = eqn.primitive.name
    if name not in _BODIES or name in _REPEATED:
        return None
    (body,) = bodies_of(eqn)
    fits = len(open_jaxpr(body).invars) == len(eqn.invars)
    return body if fits else None


def mesh_sizes(eqn: Equation) -> dict[Any, int]:
    """The devices along each axis that a shard_map binds; empty for other equations."""
    return dict(eqn.params["mesh"].shape) if eqn.primitive.name == "shard_map" else {}


def reduced_axes(eqn: Equation) -> tuple[Any, ...] | None:
    """The mapped axes that a sum, a maximum or an exchange of parts runs over; or None."""
    name = _AXES_OF_REDUCTIONS.get(eqn.primitive.name)
    if name is None:
        return None
    axes = eqn.params[name]
    return tuple(axes) if isinstance(axes, tuple | list) else (axes,)


def collective_axes(eqn: Equation) -> tuple[str, ...]:
    """The mapped axes along which devices must run an equation together."""
    if eqn.primitive.name in _LOCAL:
        return ()
    names = (eqn.params.get(name, ()) for name in ("axes", "axis_name"))
    flat = [n if isinstance(n, tuple | list) else (n,) for n in names]
    return tuple(axis for group in flat for axis in group if isinstance(axis, str))


def collectives(jaxpr: Jaxpr) -> Iterator[Equation]:
    """All equations, also inside others, that devices must run together."""
    for eqn in open_jaxpr(jaxpr).eqns:
        if collective_axes(eqn):
            yield eqn
        for inner in inner_jaxprs(eqn):
            yield from collectives(inner)


def scan_sizes(eqn: Equation) -> tuple[int, int]:
    """How many operands of a scan are constants and how many are its carry."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].update(eqn.invars).unpack()
    return len(list(consts)), len(list(carry))


def scan_steps(eqn: Equation) -> tuple[int, bool]:
    """How many iterations a scan has, and whether it runs from the last one to the first."""
    return eqn.params["length"], eqn.params["reverse"]


def while_sizes(eqn: Equation) -> tuple[int, int]:
    """How many operands of a while loop are constants of its condition and of its body."""
    return eqn.params["cond_nconsts"], eqn.params["body_nconsts"]


def shard_mapped(eqn: Equation, body: Callable[..., Any]) -> Callable[..., Any]:
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


def is_differentiable(aval: Any) -> bool:
    """Whether a value of this type has a cotangent of its own type."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def with_dtype(aval: Any, dtype: Any) -> Any:
    """The same abstract value (shape, sharding, varying axes) in another, strong dtype."""
    return aval.update(dtype=np.dtype(dtype), weak_type=False)


def variable(aval: Any) -> Any:
    """A new variable."""
    return core.Var(aval)


def dropped(aval: Any) -> Any:
    """A new output that nobody reads."""
    return core.DropVar(aval)


def literal(value: Any, aval: Any) -> Any:
    """A constant of a scalar type."""
    return core.Literal(value, aval)


@functools.cache
def _conversion_params(dtype: Any) -> dict[str, Any]:
    convert = functools.partial(lax.convert_element_type, new_dtype=dtype)
    other = jnp.float32 if dtype != jnp.float32 else jnp.float16
    traced, _ = trace(convert, jax.ShapeDtypeStruct((), other))
    return dict(traced.eqns[0].params)


def conversion(atom: Atom, dtype: Any, near: Equation) -> Equation:
    """An equation that converts `atom`, with the scope, line and context of the one nearby."""
    return core.new_jaxpr_eqn(
        [atom],
        [variable(with_dtype(atom.aval, dtype))],
        primitives.convert_element_type_p,
        _conversion_params(np.dtype(dtype)),
        core.no_effects,
        near.source_info,
        near.ctx,
    )


def spread(atom: Atom, like: Any, near: Equation) -> Equation:
    """An equation that broadcasts `atom`, of as many axes as `like` or none, to its shape."""
    sharding = like.sharding if is_explicit(like) else None
    with near.ctx.manager:
        params, aval = _spread_template(atom.aval, tuple(like.shape), sharding)
    return core.new_jaxpr_eqn(
        [atom],
        [variable(aval)],
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


def spliced(
    fun: Callable[..., Any], operands: Sequence[Atom], near: Equation
) -> tuple[list[Equation], list[Atom]]:
    """The equations of `fun(*operands)`, ready to stand in another jaxpr, and its outputs."""
    with near.ctx.manager:
        traced, _ = trace(fun, *(atom.aval for atom in operands))
    return opened_call(traced, operands, near)


def opened_call(
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
        names[out] = out if is_dropped(out) else variable(out.aval)
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


def inlined(jaxpr: Jaxpr) -> Jaxpr:
    """A jaxpr in which calls, also those that recompute, are replaced by what they call."""
    opened = open_jaxpr(jaxpr)
    names: dict[Any, Atom] = {}

    def renamed(atom: Atom) -> Atom:
        return atom if is_literal(atom) else names.get(atom, atom)

    eqns: list[Equation] = []
    for eqn in opened.eqns:
        eqn = eqn.replace(invars=[renamed(atom) for atom in eqn.invars])
        body = called_body(eqn) if eqn.primitive.name in _CALLS else None
        if body is None or has_constants(body):
            eqns.append(eqn)
            continue
        called, outs = opened_call(inlined(body), eqn.invars, eqn)
        eqns.extend(called)
        names.update(zip(eqn.outvars, outs, strict=True))
    return rebuilt(jaxpr, opened.invars, [renamed(atom) for atom in opened.outvars], eqns)


def equations_for(jaxpr: Jaxpr, outputs: Sequence[Atom]) -> list[int]:
    """The equations, by number, that some of a jaxpr's values are computed by."""
    needed = {atom for atom in outputs if not is_literal(atom)}
    chosen = []
    for number, eqn in reversed(list(enumerate(open_jaxpr(jaxpr).eqns))):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            chosen.append(number)
            needed.update(atom for atom in eqn.invars if not is_literal(atom))
    return chosen[::-1]


def rebuilt(
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
    invars = [variable(atom.aval) for atom in eqn.invars]
    outvars = [variable(out.aval) for out in eqn.outvars]
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


def function_of(jaxpr: Jaxpr) -> tuple[str, int] | None:
    """File and line of the function that a jaxpr was traced from, where JAX knows them."""
    info = open_jaxpr(jaxpr).debug_info
    match = re.fullmatch(r".* at (.*):(\d+)", getattr(info, "func_src_info", None) or "")
    return (match[1], int(match[2])) if match else None


def scope_of(eqn: Equation) -> tuple[str, ...]:
    """The name scopes around an equation, without the marks that jvp, vmap and others leave."""
    # remat names its place twice: as a part of the backward pass, and as what it recomputes.
    stack = re.sub(r"transpose\(.*/(?=jvp\()", "", str(eqn.source_info.name_stack))
    names = (re.sub(r"\w+\(|\)", "", part) for part in stack.split("/"))
    return tuple(name for name in names if name)


def is_transposed(eqn: Equation) -> bool | None:
    """Whether an equation is of a backward pass; None where only the call around it can tell."""
    stack = str(eqn.source_info.name_stack)
    recomputed, transposed = stack.rfind(_RECOMPUTED), stack.rfind("transpose(")
    return None if recomputed == transposed else transposed > recomputed


def frames_of(eqn: Equation) -> list[Frame]:
    """The traceback of an equation, innermost call first."""
    traceback = eqn.source_info.traceback
    return [
        Frame(f.file_name, f.function_name, f.function_start_line, f.line_num)
        for f in (traceback.frames if traceback else ())
    ]


def user_frames_of(eqn: Equation) -> list[Frame]:
    """The frames of an equation that are not JAX's own, innermost call first."""
    return [f for f in frames_of(eqn) if not f.file_name.startswith(_JAX_FOLDER)]


def line_of(eqn: Equation) -> str:
    """Where in the program an equation comes from: `"model.py:12:8 (forward)"`."""
    return source_info_util.summarize(eqn.source_info)


def closed(jaxpr: Jaxpr) -> Jaxpr:
    """A jaxpr that can be evaluated: without constants, where none were attached."""
    return jaxpr if hasattr(jaxpr, "consts") else core.ClosedJaxpr(jaxpr, ())


def is_explicit(aval: Any) -> bool:
    """Whether the sharding of a value is part of its type."""
    return any(
        kind == jax.sharding.AxisType.Explicit for kind in aval.sharding.mesh.axis_types or ()
    )


def output_dtypes(eqn: Equation, dtypes: Sequence[Any]) -> list[Any]:
    """The dtypes that an equation gives if its operands had these (None: as they are)."""
    avals = [
        atom.aval if dtype is None else with_dtype(atom.aval, dtype)
        for atom, dtype in zip(eqn.invars, dtypes, strict=True)
    ]

    def bind(*operands: Any) -> Any:
        return eqn.primitive.bind(*operands, **eqn.params)

    traced, _ = trace(bind, *avals)
    return [aval.dtype for aval in traced.out_avals]

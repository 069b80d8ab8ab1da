"""custom_jvp and custom_vjp under autocast: the rule is kept, and is autocast itself.

A function with a derivative rule of its own cannot be rewritten like other calls. Its equation
holds the body as a jaxpr, but the rule as Python functions, which JAX calls only when somebody
differentiates. To rewrite the body alone would leave a rule that expects float32 operands beside a
body that has half ones. So a new function with a new rule takes the place of the equation:

    equation                        new function
    body (jaxpr)              ->    body, rewritten as planned
    jvp, or fwd and bwd       ->    traces the original rule when it is called, plans the jaxpr of
                                    it, and runs that

The original rule is reached through the original equation: `building.as_function(eqn)` is a
function of the equation's operands that JAX differentiates by the equation's own rule. So a trace
of `jax.jvp` or `jax.vjp` of it holds what the rule computes, and is rewritten like any other jaxpr.

Types cross the border in three places, and in each the new rule must give what JAX checks for:
results and tangents of results have the dtypes of the rewritten body's outputs, cotangents of
operands have the dtypes of its operands, and integer operands have tangents of dtype float0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ampx.jaxprs import building, reading
from ampx.jaxprs.reading import Jaxpr
from ampx.trees import is_floating

# Runs a function under autocast: (function, types it is traced at, operands) to flat results. The
# operands may be half where the types say float32.
RunAutocast = Callable[[Callable[..., Any], Sequence[Any], Sequence[Any]], list[Any]]


def make_function(eqn: Any, parent: Any, body: Jaxpr, run_autocast: RunAutocast) -> Any:
    """The function of a custom_jvp or custom_vjp equation, its body and its rule under autocast.

    Args:
      eqn: the equation as it was traced.
      parent: the jaxpr that holds it.
      body: the jaxpr of the function, rewritten; its types are those the new function works on.
      run_autocast: runs a function under the same autocast.
    """
    call = _describe_call(eqn, parent, body, run_autocast)
    if eqn.primitive.name == "custom_jvp_call":
        return _make_with_jvp(call)
    return _make_with_vjp(call, eqn.params["num_consts"], eqn.params["symbolic_zeros"])


def make_differentiable(eqn: Any, parent: Any, body: Jaxpr, run_autocast: RunAutocast) -> Any:
    """The function of any equation as a custom_vjp, whose rule is that of JAX under autocast.

    Args:
      eqn: the equation as it was traced.
      parent: the jaxpr that holds it.
      body: what takes its place where nobody differentiates it.
      run_autocast: runs a function under the same autocast.
    """
    call = _describe_call(eqn, parent, body, run_autocast)
    return _make_with_vjp(call, num_consts=0, asks_what_is_differentiated=False)


def _describe_call(eqn: Any, parent: Any, body: Jaxpr, run_autocast: RunAutocast) -> _CustomCall:
    return _CustomCall(
        building.as_function(eqn, parent),
        [atom.aval for atom in eqn.invars],
        [out.aval for out in eqn.outvars],
        body,
        run_autocast,
    )


@dataclasses.dataclass(frozen=True, eq=False)  # hashed by identity: JAX hashes functions
class _CustomCall:
    """A function with a derivative rule of its own, as it was traced and as it was rewritten.

    Attributes:
      original: the equation as a function of flat operands; JAX differentiates it by its rule.
      in_avals: types of the operands as traced: float32 even where `body` has half.
      out_avals: types of the results as traced.
      body: the rewritten jaxpr.
      run_autocast: runs a function under the same autocast.
    """

    original: Callable[..., Any]
    in_avals: Sequence[Any]
    out_avals: Sequence[Any]
    body: Jaxpr
    run_autocast: RunAutocast

    def run_body(self, *operands: Any) -> tuple[Any, ...]:
        """The function itself, when nobody differentiates it."""
        return tuple(reading.evaluate(self.body, *operands))

    def bind(self, indices: Sequence[int], operands: Sequence[Any]) -> Callable[..., Any]:
        """`original` as a function of the operands at `indices`, all others held fixed.

        `jax.jvp` and `jax.vjp` of it then see only what is differentiated, so that the rule gets
        symbolic zeros for all others, as it would without autocast.
        """

        def of_indexed(*values: Any) -> Any:
            return self.original(*_put(values, indices, operands))

        return of_indexed


def _differentiable_indices(avals: Sequence[Any]) -> list[int]:
    return [i for i, aval in enumerate(avals) if is_floating(aval)]


def _put(values: Sequence[Any], indices: Sequence[int], into: Sequence[Any]) -> list[Any]:
    """A copy of `into` with `values` at `indices`."""
    result = list(into)
    for index, value in zip(indices, values, strict=True):
        result[index] = value
    return result


def _cast_like(values: Sequence[Any], models: Sequence[Any]) -> list[Any]:
    """The results of a rule in the dtypes of `models`; a rule may give Python numbers."""
    return [
        value
        if getattr(value, "dtype", None) == model.dtype
        else lax.convert_element_type(value, model.dtype)
        for value, model in zip(values, models, strict=True)
    ]


def _make_float0_zeros(avals: Sequence[Any]) -> list[np.ndarray]:
    """Tangents of integers: float0 has no bytes and is what JAX expects there."""
    return [np.zeros(aval.shape, jax.dtypes.float0) for aval in avals]


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, jax.custom_derivatives.SymbolicZero)


def _materialize(cotangent: Any) -> Any:
    """A cotangent as an array, also where it is only known to be zero."""
    if _is_zero(cotangent):
        aval: Any = cotangent.aval  # with its sharding and the axes that it varies over
        return jnp.zeros_like(aval)
    return cotangent


def _make_with_jvp(call: _CustomCall) -> Callable[..., Any]:
    differentiable = _differentiable_indices(call.in_avals)
    has_tangent = _differentiable_indices(call.out_avals)
    num_in, num_out = len(call.in_avals), len(call.out_avals)
    run = jax.custom_jvp(call.run_body)

    def jvp(operands: Any, tangents: Any) -> Any:
        given = [i for i in differentiable if not _is_zero(tangents[i])]

        # Flat, for run_autocast: operands and given tangents in, outputs and their tangents out.
        def rule(*operands_and_tangents: Any) -> Any:
            operands = operands_and_tangents[:num_in]
            primals = tuple(operands[i] for i in given)
            outputs, out_tangents = jax.jvp(
                call.bind(given, operands), primals, operands_and_tangents[num_in:]
            )
            return *outputs, *(out_tangents[i] for i in has_tangent)

        types = [*call.in_avals, *(call.in_avals[i] for i in given)]
        results = call.run_autocast(rule, types, [*operands, *(tangents[i] for i in given)])
        out_avals = call.body.out_avals
        outputs = _cast_like(results[:num_out], out_avals)
        out_tangents = _cast_like(results[num_out:], [out_avals[i] for i in has_tangent])
        zeros = _make_float0_zeros(call.out_avals)
        return tuple(outputs), tuple(_put(out_tangents, has_tangent, zeros))

    # With symbolic zeros, a rule that asks which operands are differentiated gets a true answer.
    run.defjvp(jvp, symbolic_zeros=True)
    return run


class _Pullback:
    """What the backward rule needs besides arrays; compared by identity, as static data.

    Attributes:
      structure: tree structure of the function that `jax.vjp` gave; its leaves are residuals.
      residual_types: types of the residuals as traced, so float32 where they may be half.
      given: indices of the operands that are differentiated.
    """

    def __init__(
        self, structure: Any, residual_types: tuple[Any, ...], given: Sequence[int]
    ) -> None:
        self.structure = structure
        self.residual_types = residual_types
        self.given = given

    def __call__(self, *residuals: Any) -> Any:
        raise NotImplementedError("only carries its fields")


def _make_with_vjp(
    call: _CustomCall, num_consts: int, asks_what_is_differentiated: bool
) -> Callable[..., Any]:
    # Operands before num_consts are arrays that the function closed over when it was traced.
    differentiable = [i for i in _differentiable_indices(call.in_avals) if i >= num_consts]
    closed_over = [i for i in _differentiable_indices(call.in_avals) if i < num_consts]
    has_cotangent = _differentiable_indices(call.out_avals)
    num_out = len(call.out_avals)
    run = jax.custom_vjp(call.run_body)

    # A function that is jitted and called twice has one equation for both calls, and JAX reads the
    # residuals of either by the tree of the one that it differentiated last. So what is kept
    # depends on what is differentiated only where the rule itself asks for that.
    is_told = asks_what_is_differentiated or bool(closed_over)

    def forward(*primals: Any) -> Any:
        operands, given = primals, differentiable
        if is_told:
            operands = tuple(primal.value for primal in primals)
            _check_closed_over(primals[i] for i in closed_over)
        if asks_what_is_differentiated:
            given = [i for i in differentiable if primals[i].perturbed]
        residual_types: list[Any] = []
        structure: Any = None

        # `jax.vjp` runs the rule's forward half and gives a pytree whose leaves are the residuals.
        # They leave the traced function as further results; the tree's structure leaves it by
        # assignment, while it is traced.
        def rule(*operands: Any) -> Any:
            nonlocal structure, residual_types
            outputs, pull = jax.vjp(call.bind(given, operands), *(operands[i] for i in given))
            residuals, structure = jax.tree.flatten(pull)
            residual_types = [jax.typeof(residual) for residual in residuals]
            return *outputs, *residuals

        results = call.run_autocast(rule, call.in_avals, operands)
        outputs, residuals = results[:num_out], results[num_out:]
        # Partial is a pytree whose function is static, so residuals pass through JAX as arrays.
        back = jax.tree_util.Partial(_Pullback(structure, tuple(residual_types), given), *residuals)
        return tuple(_cast_like(outputs, call.body.out_avals)), back

    def backward(back: Any, cotangents: Any) -> Any:
        pull = back.func
        count = len(pull.residual_types)

        def rule(*residuals_and_cotangents: Any) -> Any:
            pull_back = jax.tree.unflatten(pull.structure, residuals_and_cotangents[:count])
            zeros = _make_float0_zeros(call.out_avals)
            return pull_back(_put(residuals_and_cotangents[count:], has_cotangent, zeros))

        types = [*pull.residual_types, *(call.out_avals[i] for i in has_cotangent)]
        inputs = [*back.args, *(_materialize(cotangents[i]) for i in has_cotangent)]
        results = call.run_autocast(rule, types, inputs)
        in_avals = [call.body.in_avals[i] for i in pull.given]
        return tuple(_put(_cast_like(results, in_avals), pull.given, [None] * len(call.in_avals)))

    run.defvjp(forward, backward, symbolic_zeros=is_told)
    return run


def _check_closed_over(arrays: Iterable[Any]) -> None:
    if any(array.perturbed for array in arrays):
        raise TypeError(
            "a custom_vjp function was differentiated with respect to an array that it closes "
            "over, for which its rule says nothing: pass the array as an argument"
        )

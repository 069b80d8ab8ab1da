"""custom_jvp and custom_vjp under autocast: the rule is kept, and is itself autocast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ampx.autocasting.marks import tracing_for
from ampx.autocasting.values import Demand
from ampx.jaxprs import building, reading
from ampx.jaxprs.reading import Jaxpr


class Transforms(Protocol):
    """What this module needs of the rewriter."""

    settings: Any

    def transformed(
        self,
        fun: Callable[..., Any],
        avals: Sequence[Any],
        operands: Sequence[Any],
        demands: Callable[[Sequence[Any]], Sequence[Demand]],
    ) -> list[Any]:
        """Traces `fun` at `avals`, and runs it as planned on operands in their actual dtypes."""


def transformed(eqn: Any, parent: Any, body: Jaxpr, rewriter: Transforms) -> Any:
    """The function of a custom_jvp or custom_vjp equation with its body and its rule autocast."""
    original = building.as_function(eqn, parent)
    avals = [atom.aval for atom in eqn.invars]
    out_avals = [out.aval for out in eqn.outvars]
    if eqn.primitive.name == "custom_jvp_call":
        return _with_jvp(original, avals, out_avals, body, rewriter)
    return _with_vjp(original, avals, out_avals, body, rewriter, eqn.params["num_consts"])


def _keep(outvars: Sequence[Any]) -> list[Demand]:
    return [Demand.KEEP] * len(outvars)


def _like(values: Sequence[Any], models: Sequence[Any]) -> list[Any]:
    return [
        value if value.dtype == model.dtype else lax.convert_element_type(value, model.dtype)
        for value, model in zip(values, models, strict=True)
    ]


def _no_tangent(shape: Any) -> np.ndarray:
    return np.zeros(shape, jax.dtypes.float0)


def _places(avals: Sequence[Any]) -> list[int]:
    return [i for i, aval in enumerate(avals) if reading.is_differentiable(aval)]


def _filled(places: Sequence[int], values: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    filled = list(others)
    for place, value in zip(places, values, strict=True):
        filled[place] = value
    return filled


def _with_jvp(
    original: Callable[..., Any],
    avals: Sequence[Any],
    out_avals: Sequence[Any],
    body: Jaxpr,
    rewriter: Transforms,
) -> Callable[..., Any]:
    moving, moved = _places(avals), _places(out_avals)

    @jax.custom_jvp
    def run(*operands: Any) -> Any:
        return tuple(reading.evaluate(body, *operands))

    def jvp(operands: Any, tangents: Any) -> Any:
        given = [i for i in moving if not _is_zero(tangents[i])]

        def rule(*operands_and_tangents: Any) -> Any:
            operands = operands_and_tangents[: len(avals)]

            def of_given(*values: Any) -> Any:
                return original(*_filled(given, values, operands))

            primals = tuple(operands[i] for i in given)
            outputs, out_tangents = jax.jvp(of_given, primals, operands_and_tangents[len(avals) :])
            return *outputs, *(out_tangents[i] for i in moved)

        inputs = [*operands, *(tangents[i] for i in given)]
        types = [*avals, *(avals[i] for i in given)]
        with tracing_for(rewriter.settings.half_dtype):
            results = rewriter.transformed(rule, types, inputs, _keep)
        dtypes = body.out_avals
        outputs = _like(results[: len(out_avals)], dtypes)
        out_tangents = _like(results[len(out_avals) :], [dtypes[i] for i in moved])
        still = [_no_tangent(aval.shape) for aval in out_avals]
        return tuple(outputs), tuple(_filled(moved, out_tangents, still))

    # A rule may ask what is not differentiated.
    run.defjvp(jvp, symbolic_zeros=True)
    return run


def _with_vjp(
    original: Callable[..., Any],
    avals: Sequence[Any],
    out_avals: Sequence[Any],
    body: Jaxpr,
    rewriter: Transforms,
    num_consts: int,
) -> Callable[..., Any]:
    moving = [i for i in _places(avals) if i >= num_consts]
    moved = _places(out_avals)

    @jax.custom_vjp
    def run(*operands: Any) -> Any:
        return tuple(reading.evaluate(body, *operands))

    def forward(*primals: Any) -> Any:
        if any(primals[i].perturbed for i in _places(avals) if i < num_consts):
            raise TypeError(
                "a custom_vjp function was differentiated with respect to an array that it closes "
                "over, for which its rule says nothing: pass the array as an argument"
            )
        operands = [primal.value for primal in primals]
        given = [i for i in moving if primals[i].perturbed]
        residual_types: list[Any] = []
        structure: Any = None

        def rule(*operands: Any) -> Any:
            nonlocal structure, residual_types

            def of_given(*values: Any) -> Any:
                return original(*_filled(given, values, operands))

            outputs, pull = jax.vjp(of_given, *(operands[i] for i in given))
            residuals, structure = jax.tree.flatten(pull)
            residual_types = [jax.typeof(residual) for residual in residuals]
            return *outputs, *residuals

        with tracing_for(rewriter.settings.half_dtype):
            results = rewriter.transformed(rule, avals, operands, _keep)
        outputs, residuals = results[: len(out_avals)], results[len(out_avals) :]
        back = jax.tree_util.Partial(_Pull(structure, tuple(residual_types), given), *residuals)
        return tuple(_like(outputs, body.out_avals)), back

    def backward(back: Any, cotangents: Any) -> Any:
        pull = back.func
        count = len(pull.residual_types)

        def rule(*residuals_and_cotangents: Any) -> Any:
            pull_back = jax.tree.unflatten(pull.structure, residuals_and_cotangents[:count])
            still = [_no_tangent(aval.shape) for aval in out_avals]
            return pull_back(_filled(moved, residuals_and_cotangents[count:], still))

        types = [*pull.residual_types, *(out_avals[i] for i in moved)]
        inputs = [*back.args, *(_instantiated(cotangents[i]) for i in moved)]
        with tracing_for(rewriter.settings.half_dtype):
            results = rewriter.transformed(rule, types, inputs, _keep)
        return tuple(
            _filled(
                pull.given,
                _like(results, [body.in_avals[i] for i in pull.given]),
                [None] * len(avals),
            )
        )

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, jax.custom_derivatives.SymbolicZero)


def _instantiated(cotangent: Any) -> Any:
    if _is_zero(cotangent):
        aval: Any = cotangent.aval  # with its sharding and the axes that it varies over
        return jnp.zeros_like(aval)
    return cotangent


class _Pull:
    """What the backward rule needs besides arrays."""

    def __init__(
        self, structure: Any, residual_types: tuple[Any, ...], given: Sequence[int]
    ) -> None:
        self.structure = structure
        self.residual_types = residual_types
        self.given = given

    def __call__(self, *residuals: Any) -> Any:
        raise NotImplementedError("only carries its fields")

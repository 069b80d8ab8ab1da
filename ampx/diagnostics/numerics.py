"""numerics_report: which exponents a model's values and gradients have, and what would hold them.

The loss and its gradient are run in the precision that they are written in, equation by equation,
and every number is counted by its binary exponent. What becomes of the numbers in float16, in
bfloat16 or in eight bits, at any loss scale, follows from the counts: nothing is guessed from a
run in half, whose overflows hide what comes after them.

    loss and gradient --trace--> jaxpr --CountingWalk--> histograms --> NumericsReport

The walk counts each result once, where it is made. With each value goes its `Origin`, since a count
alone would mislead: gradients have to be told from values, since a loss scale moves only gradients;
the large number of a mask does not overflow; and a large sum may never exist in half.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ampx import flax_modules
from ampx.autocasting.float8 import RecipeName
from ampx.autocasting.tables import HALF_BY_DEFAULT, MOVING, PICKING
from ampx.checking import as_bool, as_number, shorten
from ampx.diagnostics import float8_shares
from ampx.diagnostics.exponents import (
    FORMATS,
    NO_FILLS,
    Fills,
    Histogram,
    count_exponents,
    find_fills,
)
from ampx.diagnostics.numerics_reports import NumericsReport
from ampx.diagnostics.overflow_notes import is_inexact
from ampx.diagnostics.recommendations import BACKWARD, FORWARD, PARAMETER, Key
from ampx.function_checks import check_callable, takes_function_alone
from ampx.jaxprs import reading
from ampx.jaxprs.interpreter import Place, Value, Walk, is_opaque
from ampx.jaxprs.pure_calls import split_arrays
from ampx.jaxprs.reading import Equation
from ampx.overwritten import merge_optimized, split_optimized
from ampx.trees import path_name

Counts = collections.defaultdict[Key, Histogram]
# Opaque, too, though they hold no jaxpr that would show it.
_KERNELS = ("ffi_call", "pure_callback", "io_callback", "cudnn_fusion")


class Origin(NamedTuple):
    """What a value is made of.

    Attributes:
      is_scaled: whether it depends on the cotangent of the loss. A gradient is linear in that, so
        this is what a loss scale multiplies. What remat computes again does not depend on it.
      is_constant: whether it is made of numbers of the program alone.
      is_parameter: whether it is a parameter, moved at most.
      fills: which of its numbers mask something.
      sums: keys, in `CountingWalk.sums`, of the large sums that it is, moved at most.
    """

    is_scaled: bool = False
    is_constant: bool = False
    is_parameter: bool = False
    fills: Fills = NO_FILLS
    sums: frozenset[int] = frozenset()


class CountingWalk(Walk):
    """A walk that counts the numbers of every value; its remarks are origins.

    Attributes:
      histograms: of all values, by scope and direction.
      products: of operands and results of matrix products and convolutions.
      float8: what casts to float8 leave of operands of matrix products, the worst of each key.
      recipes: those that leave enough of all products, by scope.
      sums: large sums of the forward pass, each with its key in `histograms`. One leaves when
        something reads it that would get it in half, so that those stay that are spared.
      opaque: names of primitives that could not be looked into.
    """

    def __init__(self) -> None:
        self.histograms: Counts = collections.defaultdict(Histogram)
        self.products: Counts = collections.defaultdict(Histogram)
        self.float8: dict[Key, float8_shares.Shares] = {}
        self.recipes: dict[str, frozenset[RecipeName]] = {}
        self.sums: dict[int, tuple[Key, Histogram]] = {}
        self.opaque: set[str] = set()
        self._numbers = itertools.count()

    def remark_constant(self, array: Any, here: Place) -> Origin:
        """A large number that is written into the program may be a fill; an array is data."""
        # No equation makes what a function closes over: it is counted here.
        if np.ndim(array):
            _count_value(self.histograms, here.scope, Value(array, Origin()))
            return Origin()
        is_real = is_inexact(array) and not np.iscomplexobj(array)
        return Origin(is_constant=True, fills=find_fills(array) if is_real else NO_FILLS)

    def remark_results(
        self, eqn: Equation, operands: Sequence[Value], arrays: Sequence[Any], here: Place
    ) -> list[Origin]:
        """The origins of the results of an equation, which are counted."""
        name, scope = eqn.primitive.name, here.scope
        # A scan only comes here without iterations: there is nothing inside to count.
        if name in _KERNELS or (is_opaque(eqn) and name != "scan"):
            self.opaque.add(name)
        made = self._find_origin(name, operands)
        if name in HALF_BY_DEFAULT and not reading.multiplies_without_sum(eqn):
            for value in (*operands, *(Value(array, made) for array in arrays)):
                _count_value(self.products, scope, value)
        if name == "dot_general":
            self._judge_float8(eqn, operands, scope)
        results = []
        for array in arrays:
            found = _count_value(self.histograms, scope, Value(array, made))
            # A part without fills, as a slice of the unmasked places is, passes none on.
            own = made if found.fills else made._replace(fills=NO_FILLS)
            # A sum that float16 could hold needs no indulgence; one of a backward pass gets none.
            if name == "reduce_sum" and not made.is_scaled and found.overflows(FORMATS["float16"]):
                number = next(self._numbers)
                self.sums[number] = (scope, FORWARD), found
                own = own._replace(sums=frozenset((number,)))
            results.append(own)
        return results

    def _judge_float8(self, eqn: Equation, operands: Sequence[Value], scope: str) -> None:
        roles = [_find_role(value.remark) for value in operands]
        judged = float8_shares.judge_product(eqn, [v.array for v in operands], roles)
        if judged is None:
            return
        self.recipes[scope] = judged.recipes & self.recipes.get(scope, judged.recipes)
        for role, shares in zip(roles, judged.shares, strict=True):
            key = scope, BACKWARD if role == "cotangent" else FORWARD
            self.float8[key] = float8_shares.merge_shares(self.float8.get(key, {}), shares)

    def _find_origin(self, name: str, operands: Sequence[Value]) -> Origin:
        made = self.remark_joined(operands)
        if name not in MOVING:
            made = made._replace(is_parameter=False)
        # Fills stay fills where numbers are only picked or moved. In a sum masks do, too: -1e9 plus
        # a score is still a mask. Anything else computes on them.
        if name in ("add", "sub"):
            made = made._replace(fills=made.fills._replace(picked=frozenset()))
        elif name not in PICKING | MOVING:
            made = made._replace(fills=NO_FILLS)
        if name in MOVING:
            return made
        # mean = sum / n: jnp.mean divides its float32 sum before it rounds to half. Any other
        # reader, such as a root of the sum, gets it in half, where it would be infinite.
        factors = operands[1:] if name == "div" else operands if name == "mul" else ()
        if not any(value.remark.is_constant for value in factors):
            self.count_sums_of(made)
        return made._replace(sums=frozenset())

    def count_sums_of(self, origin: Origin) -> None:
        """Takes the sums of a value off those that are spared, since something reads it in half."""
        for number in origin.sums:
            self.sums.pop(number, None)

    def remark_joined(self, values: Sequence[Value]) -> Origin:
        """The origin of several values together."""
        remarks = [value.remark for value in values]
        return Origin(
            any(remark.is_scaled for remark in remarks),
            bool(remarks) and all(remark.is_constant for remark in remarks),
            bool(remarks) and all(remark.is_parameter for remark in remarks),
            functools.reduce(operator.or_, (remark.fills for remark in remarks), NO_FILLS),
            frozenset().union(*(remark.sums for remark in remarks)),
        )


def _find_role(origin: Origin) -> float8_shares.Role:
    if origin.is_scaled:
        return "cotangent"
    return "parameter" if origin.is_parameter else "input"


def _count_value(histograms: Counts, scope: str, value: Value) -> Histogram:
    """Adds the numbers of a value to the histograms; gives its own."""
    if not is_inexact(value.array):
        return Histogram()
    _check_width(value.array)
    found = count_exponents(value.array, value.remark.fills)
    histograms[scope, BACKWARD if value.remark.is_scaled else FORWARD] += found
    return found


def _check_width(array: Any) -> None:
    # A Python number has no dtype of its own, and is weak: it is float32 in a float32 program.
    dtype = jnp.result_type(array) if hasattr(array, "dtype") else None
    if dtype in (np.float64, np.complex128):
        raise TypeError(f"numerics_report counts float32, got {dtype}: give the float32 program")


@takes_function_alone
def numerics_report(
    fun: Callable[..., Any], *, loss_scale: float = 1.0, has_aux: bool = False
) -> Callable[..., NumericsReport]:
    """Counts the binary exponents of all values of a loss and of its gradient.

    `fun` and its gradient are run once, equation by equation, in the precision that they are
    written in: give the float32 program. Each result of each equation counts, calls and loops by
    what runs inside, and so do the parameters and the arrays that `fun` closes over. From the
    counts follow, exactly, the shares of the values that a narrower format turns into zero, a
    subnormal number or infinity, and the loss scales that fit. They also tell what to try first:
    O2 with a scale of 128, O1 with 128, O1 with a dynamic scale, bfloat16 or float32. Operands of
    matrix products that could be float8 are cast as the recipes of `ampx.Float8` cast them, which
    tells what scales of arrays, rows or blocks lose and which recipe to try.

    It is exact for a cast of each value, not for what a program in half would make of rounded
    operands, and it knows no sums that overflow only in half before they cancel. Inside a
    shard_map, a kernel or a callback it sees nothing: the report names them as `opaque`. A large
    sum that is only scaled by a constant number speaks against no rung, as `jnp.mean` adds up half
    in float32; a `jnp.sum(x) / n` looks the same, but gives its sum in half before it divides.

    Args:
      fun: a scalar loss, `fun(params, *args)`. `params` may be an nnx module, which gets scopes
        only from `jax.named_scope`.
      loss_scale: what gradients are multiplied by in the table: a power of two.
      has_aux: whether `fun` gives a pair of the loss and something else.

    Returns:
      A function of the arguments of `fun` that gives a `NumericsReport`; print it. It runs the
      program: call it outside of jit.

    Raises:
      ValueError: if `loss_scale` is not a power of two.
      TypeError: if the loss is not a floating scalar, an argument has no value, or there are
        float64 numbers.

    References:
      Micikevicius et al., Mixed Precision Training, https://arxiv.org/abs/1710.03740, section 3.2
      and figure 3: histograms of the exponents of gradients.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from ampx import numerics_report
      >>> def loss(w, x):
      ...     with jax.named_scope("head"):
      ...         return jnp.mean(jnp.exp(x @ w))
      >>> report = numerics_report(loss)(jnp.full((4, 2), 2.0), jnp.full((8, 4), 2.0))
      >>> row = report.table("float16")[0]
      >>> row.scope, row.direction, row.largest_exponent, row.overflow > 0.5
      ('head', 'forward', 27, True)
      >>> print(report.recommended.level, report.recommended.half_dtype)
      O2 bfloat16
    """
    check_callable("fun", fun, "fun(*args)")
    has_aux = as_bool("has_aux", has_aux)
    given, loss_scale = loss_scale, as_number("loss_scale", loss_scale, may_be_infinite=True)
    if not loss_scale > 0 or math.frexp(loss_scale)[0] != 0.5:
        raise ValueError(f"loss_scale must be a power of two, got {shorten(given)}")

    @functools.wraps(fun)
    def reported(params: Any, *args: Any) -> NumericsReport:
        with jax.debug_nans(False), jax.debug_infs(False):
            walk, loss, params, gradients = _run_loss_and_gradient(fun, has_aux, params, args)
        histograms, sums = walk.histograms, collections.defaultdict(Histogram)
        for key, found in walk.sums.values():
            sums[key] += found
        # Parameters are operands, and gradients are counted in the scope that made them. Both get
        # rows of their own, by path.
        is_finite = bool(np.isfinite(loss))
        leaves, treedef = jax.tree_util.tree_flatten_with_path(gradients)
        for (path, gradient), array in zip(leaves, treedef.flatten_up_to(params), strict=True):
            if is_inexact(gradient):
                found = count_exponents(gradient)
                histograms[path_name(path), FORWARD] += count_exponents(array)
                histograms[path_name(path), PARAMETER] += found
                is_finite = is_finite and not found.non_finite
        return NumericsReport(
            MappingProxyType(dict(histograms)),
            MappingProxyType(dict(walk.products)),
            MappingProxyType(dict(sums)),
            MappingProxyType(walk.float8),
            MappingProxyType(walk.recipes),
            tuple(sorted(walk.opaque)),
            is_finite,
            float(loss_scale),
        )

    return reported


def _run_loss_and_gradient(
    fun: Any, has_aux: bool, params: Any, args: Any
) -> tuple[CountingWalk, Any, Any, Any]:
    """Runs a loss and its gradient by a counting walk.

    Returns:
      The walk, the loss, the parameters as a pytree of arrays, and their gradient.
    """
    if flax_modules.is_nnx_module(params):
        graphdef, params, rest = flax_modules.split_nnx(params)

        def loss_of(params: Any, rest: Any, *args: Any) -> Any:
            return fun(flax_modules.merge_nnx(graphdef, params, rest), *args)

        args = (rest, *args)
    else:
        params, others = split_optimized(params)  # new values of scales are no gradients

        def loss_of(params: Any, *args: Any) -> Any:
            return fun(merge_optimized(params, others), *args)

    arrays, merge = split_arrays((params, args))
    for array in arrays:
        if isinstance(array, jax.core.Tracer | jax.ShapeDtypeStruct):
            raise TypeError(
                "numerics_report runs the program, so it needs the values of its arguments, got a "
                f"{type(array).__name__}: call it outside of jit, with arrays"
            )

    # The cotangent of the loss is an operand of the program, so that the walk can tell what depends
    # on it. `jax.grad` would write it into the program as a 1.0 like any other.
    def both(cotangent: Any, *arrays: Any) -> Any:
        params, args = merge(arrays)
        loss, pull, *_ = jax.vjp(lambda params: loss_of(params, *args), params, has_aux=has_aux)
        return loss, pull(cotangent)[0]

    def value(*arrays: Any) -> Any:
        params, args = merge(arrays)
        return loss_of(params, *args)[0] if has_aux else loss_of(params, *args)

    loss = jax.eval_shape(value, *arrays)
    if getattr(loss, "shape", None) != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(
            f"fun must give a floating scalar, got {shorten(loss)}: give the loss, whose gradient "
            "is taken here, and not its gradient or a step; see has_aux for a pair"
        )
    seed = jnp.ones((), loss.dtype)
    jaxpr, shapes = reading.trace(both, seed, *arrays)
    of_params = Origin(is_parameter=True)
    count, walk = len(split_arrays(params)[0]), CountingWalk()
    operands = [Value(a, of_params if i < count else Origin()) for i, a in enumerate(arrays)]
    values = walk.run(jaxpr, [Value(seed, Origin(True)), *operands], Place())
    walk.count_sums_of(values[0].remark)  # a loss that is a sum itself comes out in half
    loss, gradients = jax.tree.unflatten(jax.tree.structure(shapes), [v.array for v in values])
    return walk, loss, params, gradients

"""numerics_report: which exponents a model's values and gradients have, and what would hold them.

The loss and its gradient are run in the precision that they are written in, equation by equation,
and every number is counted by its binary exponent. What becomes of the numbers in float16, in
bfloat16 or in eight bits, at any loss scale, follows from the counts: nothing is guessed from a
run in half, whose overflows hide what comes after them.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ampx import flax_modules
from ampx.autocasting.tables import HALF_BY_DEFAULT, MOVING, PICKING
from ampx.diagnostics.exponents import (
    EXPONENTS,
    FORMATS,
    NO_FILLS,
    Fills,
    Histogram,
    fills_of,
    histogram_of,
)
from ampx.diagnostics.recommendations import (
    BACKWARD,
    FORWARD,
    PARAMETER,
    Findings,
    Key,
    Recommendation,
    evidence_of,
    recommendation,
    scale_range,
    total,
)
from ampx.jaxprs import reading
from ampx.jaxprs.interpreter import Place, Value, Walk, is_opaque
from ampx.jaxprs.pure_calls import split_arrays
from ampx.jaxprs.reading import Equation
from ampx.text_tables import format_rows
from ampx.trees import path_name

Counts = collections.defaultdict[Key, Histogram]
_KERNELS = ("ffi_call", "pure_callback", "io_callback", "cudnn_fusion")  # without a jaxpr


class NumericsRow(NamedTuple):
    """What becomes of the values of a scope in a format.

    Attributes:
      scope: name scopes joined by "/": with flax linen the path of the module; "" is the rest. For
        a parameter (`"forward"`) and its gradient (`"parameter"`), its path.
      direction: `"forward"`, `"backward"` for values that depend on the cotangent of the loss, or
        `"parameter"` for the gradient of a parameter.
      largest_exponent: the binary exponent of the largest finite value; None if there is none. Of
        gradients, without the loss scale.
      values: how many finite nonzero values there are, of which the shares are.
      zeros: how many values are zero.
      fills: how many are large numbers that are written into the program to mask something, as
        `jnp.finfo(x.dtype).min` is. They count nowhere else: half has such a number, too. A number
        that is picked, as by `jnp.where`, is one; one that is added only from -1e9 down.
      non_finite: how many values are infinite or NaN.
      underflow: share that becomes zero.
      subnormal: share that becomes subnormal, and so loses digits.
      overflow: share that becomes infinite, or NaN in a format without infinity.

    Examples:
      >>> import jax.numpy as jnp
      >>> from ampx.diagnostics.numerics import numerics_report
      >>> report = numerics_report(lambda w: jnp.sum(w * w))(jnp.array([2.0**-13, 2.0**9, 0.0]))
      >>> row = report.table("float16")[0]
      >>> row.direction, row.values, row.zeros, row.underflow, row.overflow
      ('forward', 5, 2, 0.2, 0.4)
    """

    scope: str
    direction: str
    largest_exponent: int | None
    values: int
    zeros: int
    fills: int
    non_finite: int
    underflow: float
    subnormal: float
    overflow: float


@dataclasses.dataclass(frozen=True, eq=False)
class NumericsReport:
    """Binary exponents of the values of a loss and of its gradient; print it for a table.

    Attributes:
      histograms: by (scope, direction), in the order of the program; see `NumericsRow`.
      products: the same of the operands and results of matrix products and convolutions alone,
        which is what O1 has in half.
      sums: of the forward values, sums that are only scaled by a constant number, as in a mean.
        `jnp.sum` and `jnp.mean` add up half in float32, so the advice leaves them out.
      opaque: names of primitives, such as shard_map and kernels, inside of which nothing counts.
      is_finite: whether the loss and the gradients of the parameters are.
      loss_scale: what gradients are multiplied by, in `table`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from ampx.diagnostics.numerics import numerics_report
      >>> def loss(w, x):
      ...     return jnp.mean((x @ w) ** 2)
      >>> report = numerics_report(loss)(jnp.full((4, 4), 1e-3), jnp.full((8, 4), 1e-3))
      >>> report.loss_scales("float16")  # powers of two
      (16.0, 1048576.0)
      >>> report.recommended.level, report.recommended.loss_scale
      ('O2', 128.0)
    """

    histograms: Mapping[Key, Histogram]
    products: Mapping[Key, Histogram]
    sums: Mapping[Key, Histogram]
    opaque: tuple[str, ...]
    is_finite: bool
    loss_scale: float

    @property
    def exponents(self) -> np.ndarray:
        """The binary exponents that `counts` are of, ``floor(log2(|value|))``."""
        return EXPONENTS.copy()

    @property
    def counts(self) -> Mapping[Key, np.ndarray]:
        """Finite nonzero values by exponent, for each (scope, direction)."""
        return MappingProxyType({key: h.counts for key, h in self.histograms.items()})

    def counts_of(self, direction: str) -> np.ndarray:
        """The sum of `counts` over the scopes of a direction."""
        found = [h for (_, own), h in self.histograms.items() if own == direction]
        return sum(found, Histogram()).counts

    def table(self, half_dtype: str) -> tuple[NumericsRow, ...]:
        """What a format would make of the values of each scope, gradients times `loss_scale`."""
        form, rows = FORMATS[_checked_format(half_dtype)], []
        for (scope, direction), found in self.histograms.items():
            shift = 0 if direction == FORWARD else round(math.log2(self.loss_scale))
            shares = (found.underflows, found.subnormals, found.overflows)
            rows.append(
                NumericsRow(
                    scope,
                    direction,
                    found.largest_exponent,
                    found.nonzero,
                    found.zeros,
                    found.fills,
                    found.non_finite,
                    *(found.share(count(form, shift)) for count in shares),
                )
            )
        return tuple(rows)

    def loss_scales(self, half_dtype: str) -> tuple[float, float]:
        """The least and the largest loss scale for gradients in a format, both powers of two.

        At the largest no finite gradient overflows, without headroom; at the least, at most 0.1
        percentage points more of the nonzero ones become zero than at the largest.
        """
        evidence = evidence_of(self.histograms, self.sums)
        low, high = scale_range(total(evidence.gradients), _checked_format(half_dtype))
        return 2.0**low, 2.0**high

    @property
    def recommended(self) -> Recommendation:
        """The opt level, half dtype and loss scale to try first."""
        everything, products = (
            evidence_of(self.histograms, self.sums),
            evidence_of(self.products, {}),
        )
        return recommendation(Findings(everything, products, self.is_finite, self.opaque))

    def __str__(self) -> str:
        tables = [self.table(form) for form in FORMATS]
        rows = [("scope", "direction", "values", "exponent", *FORMATS)]
        for same in zip(*tables, strict=True):
            row = same[0]
            exponent = "none" if row.largest_exponent is None else str(row.largest_exponent)
            shares = (
                "/".join(_percent(share) for share in (r.underflow, r.subnormal, r.overflow))
                for r in same
            )
            count = f"{row.values}" + (f" +{row.non_finite} bad" if row.non_finite else "")
            rows.append((row.scope or "(rest)", row.direction, count, exponent, *shares))
        lines = [
            *format_rows(rows),
            "",
            f"% of nonzero values that become zero/subnormal/infinite, gradients times "
            f"{self.loss_scale:g}; exponent: the largest, unscaled",
            "loss scales that fit: "
            + ", ".join("{} {:g} to {:g}".format(f, *self.loss_scales(f)) for f in FORMATS),
            *([f"nothing counted inside: {', '.join(self.opaque)}"] if self.opaque else []),
            f"try first: {self.recommended}",
        ]
        return "\n".join(lines)

    __repr__ = __str__


def _percent(share: float) -> str:
    return "0" if not share else "<.1" if share < 0.001 else f"{100 * share:.1f}"


def _checked_format(name: str) -> str:
    if name not in FORMATS:
        raise ValueError(f"half_dtype must be one of {', '.join(FORMATS)}, got {name!r}")
    return name


class Origin(NamedTuple):
    """What a value is made of.

    Attributes:
      is_scaled: whether it depends on the cotangent of the loss. A gradient is linear in that, so
        this is what a loss scale multiplies. What remat computes again does not depend on it.
      is_constant: whether it is made of numbers of the program alone.
      fills: which of its numbers mask something.
      sums: numbers of the large sums that it is, moved at most; see `CountingWalk.sums`.
    """

    is_scaled: bool = False
    is_constant: bool = False
    fills: Fills = NO_FILLS
    sums: frozenset[int] = frozenset()


class CountingWalk(Walk):
    """A walk that counts the numbers of every value; its remarks are origins.

    `sums` are large ones of the forward pass that nothing has read but a product with a constant
    number. The other attributes are those of a `NumericsReport`.
    """

    def __init__(self) -> None:
        self.histograms: Counts = collections.defaultdict(Histogram)
        self.products: Counts = collections.defaultdict(Histogram)
        self.sums: dict[int, tuple[Key, Histogram]] = {}
        self.opaque: set[str] = set()
        self._numbers = itertools.count()

    def remark_constant(self, array: Any, here: Place) -> Origin:
        """A large number that is written into the program may be a fill; an array is data."""
        if np.ndim(array):
            _count(self.histograms, here.scope, Value(array, Origin()))
            return Origin()
        is_real = _is_counted(array) and not np.iscomplexobj(array)
        return Origin(is_constant=True, fills=fills_of(array) if is_real else NO_FILLS)

    def remark_results(
        self, eqn: Equation, operands: Sequence[Value], arrays: Sequence[Any], here: Place
    ) -> list[Origin]:
        """The origins of the results of an equation, which are counted."""
        name, scope = eqn.primitive.name, here.scope
        if name in _KERNELS or (is_opaque(eqn) and name != "scan"):
            self.opaque.add(name)
        made = self._made(name, operands)
        if name in HALF_BY_DEFAULT:
            for value in (*operands, *(Value(array, made) for array in arrays)):
                _count(self.products, scope, value)
        results = []
        for array in arrays:
            found = _count(self.histograms, scope, Value(array, made))
            own = made if found.fills else made._replace(fills=NO_FILLS)
            if name == "reduce_sum" and not made.is_scaled and found.overflows(FORMATS["float16"]):
                number = next(self._numbers)
                self.sums[number] = (scope, FORWARD), found
                own = own._replace(sums=frozenset((number,)))
            results.append(own)
        return results

    def _made(self, name: str, operands: Sequence[Value]) -> Origin:
        made = self.remark_joined(operands)
        if name in ("add", "sub"):
            made = made._replace(fills=made.fills._replace(picked=frozenset()))
        elif name not in PICKING | MOVING:
            made = made._replace(fills=NO_FILLS)
        if name in MOVING:
            return made
        factors = operands[1:] if name == "div" else operands if name == "mul" else ()
        if not any(value.remark.is_constant for value in factors):
            self.read(made)
        return made._replace(sums=frozenset())

    def read(self, origin: Origin) -> None:
        """What else reads a sum gets it in half."""
        for number in origin.sums:
            self.sums.pop(number, None)

    def remark_joined(self, values: Sequence[Value]) -> Origin:
        """The origin of several values together."""
        remarks = [value.remark for value in values]
        return Origin(
            any(remark.is_scaled for remark in remarks),
            bool(remarks) and all(remark.is_constant for remark in remarks),
            functools.reduce(operator.or_, (remark.fills for remark in remarks), NO_FILLS),
            frozenset().union(*(remark.sums for remark in remarks)),
        )


def _count(histograms: Counts, scope: str, value: Value) -> Histogram:
    if not _is_counted(value.array):
        return Histogram()
    _check_width(value.array)
    found = histogram_of(value.array, value.remark.fills)
    histograms[scope, BACKWARD if value.remark.is_scaled else FORWARD] += found
    return found


def _check_width(array: Any) -> None:
    # A number of Python has no dtype of its own.
    dtype = jnp.result_type(array) if hasattr(array, "dtype") else None
    if dtype in (np.float64, np.complex128):
        raise TypeError(f"numerics_report counts float32, got {dtype}: give the float32 program")


def _is_counted(array: Any) -> bool:
    if np.isscalar(array):
        return isinstance(array, float | complex | np.inexact)
    return jnp.issubdtype(array.dtype, jnp.inexact) and not isinstance(array, jax.Ref)


def numerics_report(
    fun: Callable[..., Any], *, loss_scale: float = 1.0, has_aux: bool = False
) -> Callable[..., NumericsReport]:
    """Counts the binary exponents of all values of a loss and of its gradient.

    `fun` and its gradient are run once, equation by equation, in the precision that they are
    written in: give the float32 program. Each result of each equation counts, calls and loops by
    what runs inside, and so do the parameters and the arrays that `fun` closes over. From the
    counts follow, exactly, the shares of the values that a narrower format turns into zero, a
    subnormal number or infinity, the loss scales that fit, and which rung of the ladder O2 with
    128, O1 with 128, O1 with a dynamic scale, bfloat16, float32 to try.

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
      ValueError: if `loss_scale` is no power of two.
      TypeError: if the loss is not a floating scalar, an argument has no value, or there are
        float64 numbers.

    References:
      Micikevicius et al., Mixed Precision Training, https://arxiv.org/abs/1710.03740, section 3.2
      and figure 3: histograms of the exponents of gradients.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from ampx.diagnostics.numerics import numerics_report
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
    if not loss_scale > 0 or math.frexp(loss_scale)[0] != 0.5:
        raise ValueError(f"loss_scale must be a power of two, got {loss_scale}")

    @functools.wraps(fun)
    def reported(params: Any, *args: Any) -> NumericsReport:
        with jax.debug_nans(False), jax.debug_infs(False):
            walk, loss, params, gradients = _walked(fun, has_aux, params, args)
        histograms, sums = walk.histograms, collections.defaultdict(Histogram)
        for key, found in walk.sums.values():
            sums[key] += found
        is_finite = bool(np.isfinite(loss))
        leaves, treedef = jax.tree_util.tree_flatten_with_path(gradients)
        for (path, gradient), array in zip(leaves, treedef.flatten_up_to(params), strict=True):
            if _is_counted(gradient):
                found = histogram_of(gradient)
                histograms[path_name(path), FORWARD] += histogram_of(array)
                histograms[path_name(path), PARAMETER] += found
                is_finite = is_finite and not found.non_finite
        return NumericsReport(
            MappingProxyType(dict(histograms)),
            MappingProxyType(dict(walk.products)),
            MappingProxyType(dict(sums)),
            tuple(sorted(walk.opaque)),
            is_finite,
            float(loss_scale),
        )

    return reported


def _walked(fun: Any, has_aux: bool, params: Any, args: Any) -> tuple[CountingWalk, Any, Any, Any]:
    """A walk that ran a loss and its gradient, the loss, the parameters and their gradient."""
    if flax_modules.is_nnx_module(params):
        graphdef, params, rest = flax_modules.split_nnx(params)

        def loss_of(params: Any, rest: Any, *args: Any) -> Any:
            return fun(flax_modules.merge_nnx(graphdef, params, rest), *args)

        args = (rest, *args)
    else:
        loss_of = fun
    arrays, merge = split_arrays((params, args))
    for array in arrays:
        if isinstance(array, jax.core.Tracer | jax.ShapeDtypeStruct):
            raise TypeError(
                "numerics_report runs the program, so it needs the values of its arguments, got a "
                f"{type(array).__name__}: call it outside of jit, with arrays"
            )

    def both(cotangent: Any, *arrays: Any) -> Any:
        params, args = merge(arrays)
        loss, pull, *_ = jax.vjp(lambda params: loss_of(params, *args), params, has_aux=has_aux)
        return loss, pull(cotangent)[0]

    def value(*arrays: Any) -> Any:
        params, args = merge(arrays)
        return loss_of(params, *args)[0] if has_aux else loss_of(params, *args)

    loss = jax.eval_shape(value, *arrays)
    if getattr(loss, "shape", None) != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(f"fun must give a floating scalar, got {loss}: see has_aux for a pair")
    seed = jnp.ones((), loss.dtype)
    jaxpr, shapes = reading.trace(both, seed, *arrays)
    walk, operands = CountingWalk(), [Value(array, Origin()) for array in arrays]
    values = walk.run(jaxpr, [Value(seed, Origin(True)), *operands], Place())
    walk.read(values[0].remark)
    loss, gradients = jax.tree.unflatten(jax.tree.structure(shapes), [v.array for v in values])
    return walk, loss, params, gradients

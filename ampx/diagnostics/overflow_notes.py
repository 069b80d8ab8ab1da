"""What a record of an overflow says of arrays: types, sizes, and why they turned bad."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ampx.diagnostics.overflow_reports import POLE
from ampx.jaxprs.interpreter import Value
from ampx.jaxprs.reading import Equation
from ampx.trees import is_floating

# Functions that are infinite at numbers that are not large. An infinity of an operand below these
# sizes is one of those: above 1 a power may be too large for its dtype, too.
_POLES = {
    **dict.fromkeys(("pow", "integer_pow", "atanh", "erf_inv"), 1.0),
    **dict.fromkeys(("lgamma", "digamma"), 1e3),
}


def is_inexact(array: Any) -> bool:
    """Whether an array or a number is of floats, real or complex."""
    return is_floating(array) and not isinstance(array, jax.Ref)


def describe_conversion(eqn: Equation, operands: Sequence[Value], array: Any) -> str:
    """Where the dtype that numbers are converted to ends, or ""."""
    if eqn.primitive.name != "convert_element_type" or not is_inexact(operands[0].array):
        return ""
    return describe_end(array.dtype, " ")


def describe_pole(eqn: Equation, operands: Sequence[Value], array: Any) -> str:
    """Where a function has become infinite of a number that is not large, or ""."""
    limit = _POLES.get(eqn.primitive.name)
    if limit is None or not is_inexact(array):
        return ""
    numbers = np.asarray(operands[0].array)
    bad = np.broadcast_to(~np.isfinite(np.asarray(array)), np.shape(array))
    met = np.broadcast_to(numbers, np.shape(array))[bad]
    near = met[np.abs(met.astype(complex)) <= limit]
    return f"{POLE} {complex(near[0]).real:.6g}" if near.size else ""


def describe_end(dtype: Any, joint: str = ", which ") -> str:
    """The largest number of a dtype."""
    return f"{dtype}{joint}ends at {float(jnp.finfo(dtype).max):.6g}"


def describe_type(array: Any) -> str:
    """Dtype and shape of an array: `"float16[4,8]"`."""
    dtype = getattr(array, "dtype", type(array).__name__)
    return f"{dtype}[{','.join(map(str, np.shape(array)))}]"


def find_largest(array: Any) -> float | None:
    """Finds the largest finite absolute value; None if there is none."""
    if isinstance(array, jax.Ref) or not (np.isscalar(array) or _is_numeric(array.dtype)):
        return None
    numbers = np.asarray(array)
    sizes = np.abs(numbers.astype(complex if np.iscomplexobj(numbers) else float))
    sizes = sizes[np.isfinite(sizes)]
    return float(sizes.max()) if sizes.size else None


def _is_numeric(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)

"""Products in float8 as numpy makes them, from the words of each recipe alone."""

import ml_dtypes
import numpy as np

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def half(x):
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def rounded(x, dtype, axes, block=None):
    """What a format of eight bits leaves of numbers that share scales along `axes`."""
    x = x.astype(np.float64)
    shape = x.shape
    if block:
        (*_, last) = axes
        x = x.reshape(*shape[:last], -1, block, *shape[last + 1 :])
        axes = (last + 1,)
    largest = np.max(np.abs(x), axis=tuple(axes), keepdims=True)
    scale = 2.0 ** np.ceil(np.log2(largest / float(ml_dtypes.finfo(dtype).max)))
    return ((x / scale).astype(dtype).astype(np.float64) * scale).reshape(shape)


def reference(spec, recipe, first, second, roles):
    """`einsum` of two operands after the casts of a recipe; roles are among "x", "w" and "g"."""
    inputs, out = spec.split("->")
    arrays = []
    for array, letters, role in zip((first, second), inputs.split(","), roles, strict=True):
        sums = [i for i, letter in enumerate(letters) if letter not in out]
        everything = range(array.ndim)
        if recipe == "tensorwise":
            arrays.append(rounded(array, E5M2 if role == "g" else E4M3, everything))
        elif recipe == "rowwise_half_dw" and roles == ("g", "x"):
            arrays.append(half(array).astype(np.float64))
        elif recipe == "rowwise_half_dw" and roles == ("g", "w"):
            arrays.append(rounded(array, E4M3, everything if role == "w" else sums))
        else:
            arrays.append(rounded(array, E4M3, sums, 32 if recipe == "mxfp8" else None))
    return np.einsum(spec, *arrays)


def transposed(spec):
    x, w, y = spec.replace("->", ",").split(",")
    return f"{y},{w}->{x}", f"{y},{x}->{w}"

"""Checks of settings: each kind of argument has one function, which all of ampx shares.

A setting is what a caller chooses once, before anything is traced: a factor, an interval, a dtype,
an axis. A wrong one is refused where it is given, by an error that names the argument, the value,
what is expected and, if it looks like a slip of the pen, what was probably meant.

    kind                   function               accepts                            refuses
    int of at least 1      as_positive_int        4, np.int64(4), jnp.array(4)       True, 4.0, "4"
    number in a range      as_number              0.5, np.float32(0.5)               True, "1", NaN
    number of an optimizer check_hyperparameter   numbers, traced values, schedules  True, "1", NaN
    bool                   as_bool                True, np.bool_(True)               1, "False"
    dtype                  as_dtype               jnp.bfloat16, "bf16"               "bf61", int32
    choice                 check_choice           "mean"                             "maen"
    string                 check_word             "loss"                             3, b"loss"
    optax transformation   check_transformation   optax.sgd(0.1)                     0.1
    state of a wrapper     check_state            what its init made                 another's

`as_x` returns the setting as Python's own type, so that nothing of numpy gets into a traced
program, where `np.float64(2.0)` has a dtype and 2.0 has none. TypeError is for values of the wrong
kind, ValueError for values outside of a range or a set; all that is wrong with a dtype is a
ValueError.
"""

from __future__ import annotations

import difflib
import math
import numbers
import operator
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Short names of the dtypes that policies are written with, as in "p=f32,c=bf16".
SHORT_NAMES: Mapping[str, str] = MappingProxyType(
    {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}
)
# What else configuration files call them: torch, jmp and Hugging Face each have their own words.
_WORDS = {
    **SHORT_NAMES,
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "full": "float32",  # jmp's
    "single": "float32",
    "f64": "float64",
    "fp64": "float64",
    "double": "float64",
}
DTypeKind = Literal["half", "castable", "sum", "floating", "moment"]


class _DTypes(NamedTuple):
    """What a dtype setting may be.

    Attributes:
      names: of the dtypes.
      expected: the same in words, for the error.
      others: "floating" if every other floating dtype, such as float8, is allowed too.
    """

    names: tuple[str, ...]
    expected: str
    others: Literal["none", "floating"] = "none"


# How dtypes of 8 bits are called.
_EIGHT_BITS = re.compile(r"(float|fp|f|e4m3|e5m2)_?8|float8|e4m3|e5m2", re.IGNORECASE)
_WIDE_NAMES = ("float16", "bfloat16", "float32", "float64")
_DTYPE_KINDS: dict[DTypeKind, _DTypes] = {
    "half": _DTypes(("float16", "bfloat16"), "float16 or bfloat16"),
    "castable": _DTypes(
        ("float16", "bfloat16", "float32"),
        "float16, bfloat16 or float32 (or f16, bf16, f32)",
    ),
    # A sum in int32 would drop every fraction, one in bool all but the first term. float8 and
    # another dtype have no common wider one in JAX.
    "sum": _DTypes(
        _WIDE_NAMES, "a floating dtype of at least 16 bits, such as float32 or 'bf16', to sum in"
    ),
    "floating": _DTypes(_WIDE_NAMES, "a floating dtype, such as float32 or 'bf16'", "floating"),
    # int8 is no integer here: it stands for codes with a scale for each block.
    "moment": _DTypes(
        ("int8", *_WIDE_NAMES),
        "a floating dtype, such as float32 or 'bf16', or 'int8' for blocks of 8 bits",
        "floating",
    ),
}


def suggest(word: Any, known: Iterable[str]) -> str:
    """Words the question that ends an error: ": did you mean 'mean'?", or "" if nothing is close.

    Examples:
      >>> from ampx.checking import suggest
      >>> suggest("maen", ("mean", "sum")), suggest("foo", ("mean", "sum"))
      (": did you mean 'mean'?", '')
    """
    if not isinstance(word, str):
        return ""
    close = difflib.get_close_matches(word.strip().lower(), list(known), n=1)
    return f": did you mean {close[0]!r}?" if close else ""


def join_first(words: Iterable[Any], most: int = 4) -> str:
    """Joins words for an error that stays short, however many there are.

    Examples:
      >>> from ampx.checking import join_first
      >>> join_first(range(3)), join_first(range(300))
      ('0, 1, 2', '0, 1, 2, 3 and 296 more')
    """
    words = [str(word) for word in words]
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Refuses a word that is not among the choices.

    Args:
      name: of the argument, for the error.
      value: what was given for it.
      choices: what is allowed, as from `typing.get_args` of a `Literal`.
    """
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}{suggest(value, choices)}")


def as_positive_int(name: str, value: Any, *, is_counted: bool = False) -> int:
    """Converts an int of at least 1, also one of numpy or of a known array, to Python's.

    What `is_counted` must be one that a counter in a state, an int32, reaches.

    Raises:
      TypeError: for anything that is no int; True is not an int here, and 4.0 neither.
      ValueError: for 0 and negative numbers, and for what no counter reaches.
    """
    found = _as_int(value)
    if found is None:
        raise TypeError(f"{name} must be a positive int, {describe(value)}")
    if found < 1:
        raise ValueError(f"{name} must be a positive int, got {value}")
    if is_counted and found > 2**31 - 1:
        raise ValueError(f"{name} must be at most {2**31 - 1}, the largest count, got {value}")
    return found


def as_int(name: str, value: Any) -> int:
    """Converts an int of any sign, also one of numpy or of a known array, to Python's.

    Raises:
      TypeError: for anything that is no int.
    """
    found = _as_int(value)
    if found is None:
        raise TypeError(f"{name} must be an int, {describe(value)}")
    return found


def as_number(
    name: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    may_be_infinite: bool = False,
    unit: str = "",
    fix: str = "",
) -> float:
    """Converts a real number, also one of numpy or of a known array, to Python's int or float.

    Args:
      name: of the argument, for the error.
      value: what was given for it.
      least: the smallest number that is allowed.
      above: what it must be larger than.
      most: the largest number that is allowed.
      below: what it must be smaller than.
      may_be_infinite: whether infinity is a number here; NaN never is.
      unit: of the number, for the error.
      fix: what else to give, as in "None is off"; ends the error about a wrong number.

    Raises:
      TypeError: for words, bools, traced values and all else that is no number.
      ValueError: for NaN, infinity, and numbers outside of the range.

    Examples:
      >>> import numpy as np
      >>> from ampx.checking import as_number
      >>> as_number("eps", np.float32(0.5), least=0)
      0.5
      >>> as_number("eps", float("nan"), least=0)
      Traceback (most recent call last):
      ...
      ValueError: eps must be finite and at least 0, got nan
    """
    found = _as_real(value)
    if found is None:
        raise TypeError(f"{name} must be a number, {describe(value)}")
    if isinstance(found, int) and found.bit_length() > 1023:  # no float is as large
        found = math.inf if found > 0 else -math.inf
    # Written so that NaN, which compares to nothing, fails each of them.
    is_inside = (
        (math.isfinite(found) or (may_be_infinite and not math.isnan(found)))
        and (least is None or found >= least)
        and (above is None or found > above)
        and (most is None or found <= most)
        and (below is None or found < below)
    )
    if not is_inside:
        bounds = [
            f"{words} {bound:g}"
            for words, bound in (
                ("at least", least),
                ("above", above if above != 0 else None),
                ("at most", most),
                ("below", below),
            )
            if bound is not None
        ]
        parts = [] if may_be_infinite else ["finite"]
        parts += ["positive"] if above == 0 else []
        expected = " and ".join([*parts, *bounds]) or "a number"
        in_unit = f", in {unit}" if unit else ""
        ending = f": {fix}" if fix else ""
        raise ValueError(f"{name} must be {expected}{in_unit}, got {shorten(value)}{ending}")
    return found


def as_number_array(name: str, value: Any) -> np.ndarray:
    """Converts numbers, or one, to a float64 array.

    Raises:
      TypeError: for words, bools, and lists that hold anything but numbers.
    """
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):  # lists of unequal lengths, traced values
        array = np.array(None)
    if array.dtype.kind not in "iuf":
        raise TypeError(f"{name} must be a number, or a sequence of numbers, {describe(value)}")
    return array.astype(float)


def check_hyperparameter(
    name: str, value: Any, *, may_be_schedule: bool = False, **bounds: Any
) -> None:
    """Refuses what is no number of an optimizer, such as a rate or a decay.

    Under `optax.inject_hyperparams` these are arrays, traced or not. What is in an array is not
    looked at: that would wait for the device, in every step of a loop without `jit`.

    Args:
      name: of the argument, for the error.
      value: what was given for it.
      may_be_schedule: whether a function of the step is allowed.
      **bounds: of a plain number, see `as_number`.

    Raises:
      TypeError: for words, bools, and arrays of bools, of complex numbers, or with axes.
      ValueError: for a plain number outside of the bounds.
    """
    if may_be_schedule and callable(value):
        return
    if isinstance(value, jax.Array) or hasattr(value, "__jax_array__"):
        dtype, shape = jnp.result_type(value), jnp.shape(value)
        is_real = jnp.issubdtype(dtype, np.integer) or jnp.issubdtype(dtype, np.floating)
        if is_real and not shape:
            return
        of = f"shape {shape}" if is_real else f"dtype {dtype}"
        raise TypeError(f"{name} must be a number, got an array of {of}")
    try:
        as_number(name, value, **bounds)
    except TypeError as error:
        if not may_be_schedule:
            raise
        raise TypeError(f"{error}; a schedule is a function of the step") from None


def as_bool(name: str, value: Any) -> bool:
    """Converts True or False, also numpy's and that of a known array, to Python's.

    Raises:
      TypeError: for anything else: the word "False" is true to Python.
    """
    if isinstance(value, bool):
        return value
    is_scalar = getattr(value, "dtype", None) == np.bool_ and getattr(value, "shape", None) == ()
    if is_scalar and not isinstance(value, jax.core.Tracer):
        return bool(value)
    raise TypeError(f"{name} must be True or False, {describe(value)}")


def as_dtype(name: str, value: Any, kind: DTypeKind) -> np.dtype:
    """Converts whatever names a dtype to the dtype: `jnp.bfloat16`, "bfloat16", "bf16".

    Args:
      name: of the argument, for the error.
      value: what was given for it.
      kind: what it may be: `"half"`; `"castable"`, what policies cast between; `"sum"`, what terms
        can be added in; `"floating"`; `"moment"`, which is floating or int8.

    Raises:
      ValueError: for everything else.

    Examples:
      >>> from ampx.checking import as_dtype
      >>> as_dtype("half_dtype", "bf16", "half").name
      'bfloat16'
      >>> as_dtype("half_dtype", "bfloat61", "half")
      Traceback (most recent call last):
      ...
      ValueError: half_dtype must be ... got 'bfloat61': did you mean 'bfloat16'?
    """
    allowed = _DTYPE_KINDS[kind]
    dtype = _find_dtype(value)
    if dtype is not None and dtype.name in allowed.names:
        return dtype
    if dtype is not None and allowed.others == "floating" and jnp.issubdtype(dtype, jnp.floating):
        return dtype
    given = repr(value) if dtype is None or isinstance(value, str) else dtype.name
    words = [word for word in (*_WORDS, *allowed.names) if _WORDS.get(word, word) in allowed.names]
    # A dtype that exists was meant, even if its name is close to another's.
    meant = suggest(value, words) if dtype is None else ""
    if kind in ("half", "castable") and _EIGHT_BITS.match(str(given).strip("'")):
        meant = ": matrix products in eight bits are asked for by dots='float8'"
    raise ValueError(f"{name} must be {allowed.expected}, got {given}{meant}")


def check_word(name: str, value: Any) -> None:
    """Refuses what is no string."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, {describe(value)}")


def check_transformation(name: str, value: Any) -> None:
    """Refuses what is not an optax gradient transformation."""
    # By its two functions, not by its class: users write transformations as classes of their own.
    if not (callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))):
        raise TypeError(
            f"{name} must be an optax gradient transformation, got {type(value).__name__}: "
            "give the optimizer, such as optax.adamw(3e-4)"
        )


def check_state(owner: str, state: Any, kind: type) -> None:
    """Refuses a state that another transformation has made.

    Args:
      owner: the public name of the transformation.
      state: what its `update` was given.
      kind: the class of its own states.
    """
    if not isinstance(state, kind):
        raise TypeError(
            f"ampx.{owner} got a state of type {type(state).__name__}, and its own are of type "
            f"{kind.__name__}: give update the state that init(params) of the same transformation "
            "made"
        )


def _find_dtype(value: Any) -> np.dtype | None:
    """The dtype that a value names, or None. None itself names float64 to numpy, and nothing here.

    Casing and surrounding blanks of words do not matter.
    """
    if value is None:
        return None
    if isinstance(value, str):
        word = value.strip().lower()
        value = _WORDS.get(word, word)
    try:
        dtype = jnp.dtype(value)
    except (TypeError, ValueError):
        return None
    # An empty dict or list names void, and `np.longdouble` what JAX has no arrays of.
    is_known = dtype.type is not np.void and (dtype.kind != "f" or dtype.itemsize <= 8)
    return dtype.newbyteorder("=") if is_known else None


def _as_int(value: Any) -> int | None:
    """Python's int of an int, or None; `operator.index` takes no floats and no words."""
    if _is_known_scalar(value):
        try:
            return operator.index(value)
        except TypeError:
            return None
    return None


def _as_real(value: Any) -> float | None:
    """Python's int or float of a real number, or None. What is Python's stays as it is."""
    if type(value) in (int, float):
        return value
    if not _is_known_scalar(value):
        return None
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    dtype = getattr(value, "dtype", None)
    if dtype is None or getattr(value, "shape", None) != ():
        return None
    if jnp.issubdtype(dtype, np.integer):
        return int(value)
    return float(value) if jnp.issubdtype(dtype, np.floating) else None


def _is_known_scalar(value: Any) -> bool:
    """Whether a value can be read now as one number that is no bool."""
    if isinstance(value, bool | np.bool_ | jax.core.Tracer):
        return False
    return getattr(value, "shape", ()) == () and getattr(value, "dtype", None) != np.bool_


def describe(value: Any) -> str:
    """The second half of an error about a value of the wrong kind."""
    if isinstance(value, jax.core.Tracer):
        return (
            f"got a traced value of type {jax.typeof(value)}: it has no value before the program "
            "runs. Give a number, or make it a static argument of jax.jit"
        )
    return f"got {shorten(value)} of type {type(value).__name__}"


def shorten(value: Any) -> str:
    """The repr of a value, cut off where it fills more than two lines."""
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:157]}..."

"""How objects of ampx show themselves: in one line for `repr`, as a table in notebooks.

States hold the arrays of a whole model, and reports hundreds of rows. Both turn up in error
messages, logs and failed assertions, where one line is wanted that says what is there:

    TrainState(step=1200, params=<148 arrays, 124,439,808 numbers>, opt_state=LossScaleState(...))

A single number is shown, an array by its dtype and shape. Whoever wants the numbers of an array
takes the field; `print` of a report shows its table.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Collection
from typing import Any

import jax
import numpy as np

LONGEST = 60  # characters that one field may take


def show_fields(self: Any) -> str:
    """Shows a NamedTuple or dataclass in one line: its `__repr__`. Fields without use are left out.

    Examples:
      >>> import jax.numpy as jnp
      >>> from typing import NamedTuple
      >>> from ampx.summaries import show_fields
      >>> class State(NamedTuple):
      ...     count: int
      ...     momentum: dict
      ...     note: str | None = None
      ...     __repr__ = show_fields
      >>> State(3, {"w": jnp.ones((2, 3)), "b": jnp.ones(3)})
      State(count=3, momentum=<2 arrays, 9 numbers>)
    """
    if dataclasses.is_dataclass(self):
        names = [field.name for field in dataclasses.fields(self) if field.repr]
    else:
        names = self._fields
    fields = ((name, getattr(self, name)) for name in names)
    shown = [f"{name}={summarize(value)}" for name, value in fields if not _is_nothing(value)]
    return f"{type(self).__name__}({', '.join(shown)})"


def show_table(self: Any) -> str:
    """What a notebook shows of an object: its `str`, in columns. It is the `_repr_html_`.

    Examples:
      >>> from ampx.summaries import show_table
      >>> show_table("a  <b>")
      '<pre>a  &lt;b&gt;</pre>'
    """
    return f"<pre>{html.escape(str(self))}</pre>"


def summarize(value: Any) -> str:
    """A value in one line, and about `LONGEST` characters at most.

    Examples:
      >>> import jax.numpy as jnp
      >>> from ampx.summaries import summarize
      >>> summarize(jnp.float32(8)), summarize(jnp.ones((2, 3))), summarize(summarize)
      ('8.0', 'float32[2,3]', 'summarize')
    """
    if type(value).__repr__ is show_fields:
        shown = repr(value)
        return shown if len(shown) <= LONGEST else f"{type(value).__name__}(...)"
    if callable(value) and hasattr(value, "__qualname__"):
        return value.__qualname__
    if isinstance(value, np.dtype):
        return value.name
    if _is_array(value):
        return _summarize_array(value)
    if isinstance(value, str):
        return repr(value if len(value) < LONGEST else f"{value[: LONGEST - 5]}...")
    arrays = [leaf for leaf in jax.tree.leaves(value) if _is_array(leaf)]
    if arrays:
        numbers = sum(math.prod(array.shape) for array in arrays)
        return f"<{_count_items(arrays, 'array')}, {_count_items(range(numbers), 'number')}>"
    shown = repr(value)
    if len(shown) <= LONGEST and "\n" not in shown and " at 0x" not in shown:
        return shown
    if isinstance(value, Collection) and not hasattr(value, "_fields"):
        return f"<{_count_items(value, 'item')}>"
    return f"<{type(value).__name__}>"


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, tuple) and value == ())


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _summarize_array(array: Any) -> str:
    """The number, where there is one and it is at hand; else dtype and shape, as `float32[2,3]`."""
    (array,) = jax.tree.leaves(array)  # flax nnx keeps each array of a state in a variable
    is_number = not array.shape and isinstance(array, np.ndarray | np.generic | jax.Array)
    if is_number and isinstance(array, jax.Array):
        is_number = not (
            isinstance(array, jax.core.Tracer)
            or array.is_deleted()
            or not array.is_fully_addressable
            or jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended)
        )
    if is_number:
        return str(np.asarray(array)[()])
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def _count_items(items: Collection[Any], name: str) -> str:
    return f"{len(items):,} {name}{'s' if len(items) != 1 else ''}"

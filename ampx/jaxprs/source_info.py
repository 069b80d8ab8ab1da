"""Where in the user's program an equation comes from.

JAX keeps two things with each equation. The traceback holds the Python frames at the time of
tracing. The name stack holds the scopes of `jax.named_scope` (of flax modules, too), wrapped in the
transformations that the equation went through:

    jvp(encoder)/attention                    the forward pass of a differentiated function
    transpose(jvp(encoder))/attention         its backward pass
    rematted_computation/encoder/attention    what remat computes again during a backward pass

Inside a body, stacks begin at the equation that holds the body; what is around it stands in the
stack of that equation.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import NamedTuple

import jax
from jax.extend import source_info_util

from ampx.jaxprs.reading import Equation, Jaxpr, open_jaxpr

_RECOMPUTED = "rematted_computation"  # the scope that remat puts around what it runs again
JAX_FOLDER = os.path.join(os.path.dirname(jax.__file__), "")
AMPX_FOLDER = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_DIFFERENTIATION = os.path.join(JAX_FOLDER, "_src", "interpreters", "ad.py")
_TRACING = "process_primitive"  # the method of JAX's traces that applies a rule
# The programs in ampx/examples are read as a user's own.
_EXAMPLES = os.path.join(AMPX_FOLDER, "examples", "")


class Frame(NamedTuple):
    """One call on the traceback of an equation.

    Attributes:
      file_name: the path of the file, as Python knows it.
      function_name: qualified, as `clip_by_global_norm.<locals>.update_fn`.
      function_start_line: where the function begins.
      line: the line that was running.
    """

    file_name: str
    function_name: str
    function_start_line: int
    line: int


def function_of(jaxpr: Jaxpr) -> tuple[str, int] | None:
    """File and line of the function that a jaxpr was traced from, where JAX knows them."""
    # It reads "loss at /home/me/model.py:12".
    info = open_jaxpr(jaxpr).debug_info
    match = re.fullmatch(r".* at (.*):(\d+)", getattr(info, "func_src_info", None) or "")
    return (match[1], int(match[2])) if match else None


def is_of_ampx(file: str) -> bool:
    """Whether a path, or a line that begins with one, is of ampx itself."""
    return file.startswith(AMPX_FOLDER) and not file.startswith(_EXAMPLES)


def is_of_jax(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr was traced from a function of JAX itself, as that of `jnp.where` is."""
    function = function_of(jaxpr)
    return function is not None and function[0].startswith(JAX_FOLDER)


def scope_of(eqn: Equation) -> tuple[str, ...]:
    """The name scopes around an equation, without the marks that jvp, vmap and others leave."""
    # remat names its place twice: as a part of the backward pass, and as what it recomputes.
    stack = re.sub(r"transpose\(.*/(?=jvp\()", "", str(eqn.source_info.name_stack))
    names = (re.sub(r"\w+\(|\)", "", part) for part in stack.split("/"))
    return tuple(name for name in names if name)


def is_backward(eqns: Iterable[Equation]) -> bool:
    """Whether an equation is of a backward pass; what remat runs again is not.

    Args:
      eqns: the equation and those around it, innermost first. The first that tells decides: a whole
        call may be recomputed.
    """
    told = map(is_transposed, eqns)
    return next((answer for answer in told if answer is not None), False)


def is_differentiated(eqns: Iterable[Equation]) -> bool:
    """Whether an equation is of a function that is differentiated: of its value, or a derivative.

    Args:
      eqns: the equation and those around it.
    """
    return any("jvp(" in str(eqn.source_info.name_stack) for eqn in eqns)


def is_transposed(eqn: Equation) -> bool | None:
    """Whether an equation is of a backward pass; None where only the call around it can tell."""
    # The innermost mark decides: what is recomputed is a forward pass inside a backward pass. The
    # two can only be equal where neither is found, as inside a jitted function.
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


def origin_of(eqn: Equation) -> list[Frame]:
    """The traceback of an equation, without what JAX does to differentiate it.

    The rule of a derivative computes several equations of one: all of them come from that.
    """
    frames = frames_of(eqn)
    for place, frame in enumerate(frames):
        if frame.file_name == _DIFFERENTIATION and frame.function_name.endswith(_TRACING):
            return frames[place + 1 :]
    return frames


def user_frames_of(eqn: Equation) -> list[Frame]:
    """The frames of an equation that are not JAX's own, innermost call first."""
    return [f for f in frames_of(eqn) if not f.file_name.startswith(JAX_FOLDER)]


def line_of(eqn: Equation) -> str:
    """Where in the program an equation comes from: `"model.py:12:8 (forward)"`."""
    return source_info_util.summarize(eqn.source_info)

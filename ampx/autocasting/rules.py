"""What a user says about precision: immutable rules by primitive, function, scope or predicate.

An equation of a jaxpr has a primitive, parameters, and a record of where it was traced: a stack of
name scopes and a stack of Python frames. A rule recognises an equation by one of these.

    target                  compared with
    "exp"                   the primitive's name, or the name of a jitted function
    "encoder/head"          a run of name scopes (modules, jax.named_scope) and jitted functions
    my_norm, MyModule       (file, first line) of the frames that the equation was traced in
    when=predicate          the equation, given to the predicate

Rules are a tuple, searched from the end: the last that matches decides. The index of the match is
handed down into the bodies of calls and loops (`Surroundings.inherited`), where only rules after it
can decide otherwise. Rules are hashable, and part of the key by which plans are found again.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.special
from jax.typing import DTypeLike

from ampx.autocasting.tables import DEFAULTS, Precision
from ampx.checking import as_bool, as_dtype, shorten
from ampx.function_checks import refuse_lazy
from ampx.jaxprs import reading, source_info
from ampx.jaxprs.reading import Equation


class Surroundings(NamedTuple):
    """Where an equation stands: what its own fields do not say.

    Attributes:
      scopes: names around it, outermost first: scopes (flax module paths) and jitted functions.
      function: file and line of the function that the enclosing jaxpr came from, if known.
      inherited: index of the last rule that matched an enclosing equation, or -1.
      inherited_by_products: the same for matrix products and convolutions, which rules about their
        results are for as well.
      forced: the precision that a mark around gives to everything inside, if there is one.
      in_custom_jvp: whether this is a custom_jvp function or its rule, of whose products JAX must
        be able to transpose each: none gets a rule of its own. Known where rules or float8 ask.
    """

    scopes: tuple[str, ...] = ()
    function: tuple[str, int] | None = None
    inherited: int = -1
    inherited_by_products: int = -1
    forced: Precision | None = None
    in_custom_jvp: bool = False


NOWHERE = Surroundings()


@dataclasses.dataclass(frozen=True)
class _Entry:
    """One rule: a precision and one way to recognise what it is for.

    Attributes:
      precision: what it gives.
      name: of a primitive, a jitted function, or a run of scopes.
      codes: (file, first line) of Python functions.
      predicate: of an equation.
      label: the target as the user wrote it, for reports.
    """

    precision: Precision
    name: str | None = None
    codes: frozenset[tuple[str, int]] = frozenset()
    predicate: Callable[[Any], bool] | None = None
    label: str = ""

    @property
    def for_products_alone(self) -> bool:
        """Whether it is for matrix products and convolutions only, wherever they stand inside."""
        return self.precision in ("half_to_float32", "float8")

    @property
    def description(self) -> str:
        """The rule as it was written, e.g. `"float32('head')"`."""
        if self.precision == "half_to_float32":
            return f"half({self.label}, result=float32)"
        return f"{self.precision}({self.label})"

    def matches(self, eqn: Equation, around: Surroundings) -> bool:
        """Whether the rule is for this equation."""
        if self.predicate is not None:
            return as_bool("what when returns", self.predicate(eqn))
        if self.name is not None:
            if eqn.primitive.name == self.name or reading.call_name(eqn) == self.name:
                return True
            return _contains_path(
                (*around.scopes, *source_info.scope_of(eqn)), tuple(self.name.split("/"))
            )
        return any(code in self.codes for code in _list_own_frames(eqn, around.function))


def _contains_path(path: tuple[str, ...], run: tuple[str, ...]) -> bool:
    """Whether the scopes of a rule stand next to each other, in order, in those of an equation."""
    # linen writes the path of a nested module as one scope per level or as "Model.block". Scopes
    # that start with "ampx." are for profilers; no module of the user's is meant by them.
    named = (name for name in path if not name.startswith("ampx."))
    parts = tuple(part for name in named for part in name.split("."))
    return any(parts[i : i + len(run)] == run for i in range(len(parts) - len(run) + 1))


def _list_own_frames(eqn: Equation, function: tuple[str, int] | None) -> Iterator[tuple[str, int]]:
    """Lists the functions an equation was traced in, not further out than its own jaxpr.

    A jitted function is traced once and called from many places. The frames of its equations go on
    into the first caller, which says nothing about the others, so they are cut off where the
    jaxpr's own function was entered.
    """
    for frame in source_info.frames_of(eqn):
        yield frame.file_name, frame.function_start_line
        if (frame.file_name, frame.function_start_line) == function:
            return


def _find_codes(target: Callable[..., Any]) -> frozenset[tuple[str, int]]:
    """Finds where a function, or each method of a class, is defined: what frames record of it."""
    functions = [target]
    if inspect.isclass(target):
        functions = [f for f in vars(target).values() if callable(f)]
    codes = set()
    for function in functions:
        code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
        if isinstance(code, CodeType):
            codes.add((code.co_filename, code.co_firstlineno))
    if not codes:
        raise TypeError(
            f"{shorten(target)} has no Python code to recognise its operations by: give the name "
            "of its primitive, for an object its class, or wrap the call in ampx.half_function or "
            "ampx.float_function"
        )
    return frozenset(codes)


@dataclasses.dataclass(frozen=True)
class Rules:
    """Which precision each operation runs in. Immutable: every method gives new rules.

    A target is one of:

    - a name: of a primitive (`"dot_general"`), of a jitted function (`"silu"`), or of a scope such
      as a linen module's path (`"encoder/head"`: any run of scope names). Any name may come to
      exist, with a library that is imported later, so an unknown one is taken. Refused is what is
      one slip of the pen away from a primitive that autocast knows, such as `"dot_genral"`;
    - a Python function or a class such as a flax module: the operations traced inside it;
    - `when=predicate`, a function from a `jax.extend.core.JaxprEqn` to bool.

    The last rule that matches decides. A rule that matches a call or a loop covers its body. Rules
    that decided nothing are listed by `ampx.explain`.

    Examples:
      >>> import ampx
      >>> def my_norm(x):
      ...     return x / abs(x).max()
      >>> rules = ampx.DEFAULT_RULES.float32(my_norm).widest("logistic")
      >>> rules
      ampx.DEFAULT_RULES.float32(my_norm).widest('logistic')
    """

    entries: tuple[_Entry, ...] = ()

    def half(
        self,
        *targets: Any,
        when: Callable[[Any], bool] | None = None,
        result: DTypeLike | None = None,
    ) -> Rules:
        """Runs the targets in half.

        With `result=jnp.float32` their matrix products and convolutions take half operands and
        give float32 results, as `preferred_element_type=jnp.float32` does for half operands in
        JAX; in the backward pass, too. The rule then says nothing of other operations inside.

        Args:
          *targets: what the rule is for.
          when: the same as a predicate.
          result: float32, or None for results in half.

        Returns:
          New rules.

        Raises:
          TypeError: without any target.
          ValueError: if `result` is another dtype.

        Examples:
          >>> import ampx, jax.numpy as jnp
          >>> rules = ampx.DEFAULT_RULES.half("dot_general", result=jnp.float32)
          >>> half_product = ampx.autocast(jnp.matmul, rules=rules)
          >>> half_product(jnp.ones((8, 8)), jnp.ones(8)).dtype.name
          'float32'
        """
        if result is None:
            return self._with("half", targets, when)
        if as_dtype("result", result, "floating") != jnp.float32:
            raise ValueError(
                f"result must be float32, or be left out for results in half, got {result!r}"
            )
        return self._with("half_to_float32", targets, when)

    def float8(self, *targets: Any, when: Callable[[Any], bool] | None = None) -> Rules:
        """Runs the matrix products of the targets in float8, as the setting `dots` says.

        With `dots`, all products that are half by default are float8 already. This rule takes some
        back from an earlier one, and says nothing of other operations inside. Products that cannot
        be float8 stay half, and `ampx.explain` says why.

        Examples:
          >>> import ampx, jax, jax.numpy as jnp
          >>> def f(w, x):
          ...     with jax.named_scope("mlp"):
          ...         h = x @ w
          ...     return h @ w
          >>> rules = ampx.DEFAULT_RULES.half("dot_general").float8("mlp")
          >>> x = jnp.ones((16, 16))
          >>> ampx.explain(f, dots="float8", rules=rules)(x, x).products_in_float8()
          (1, 2)
        """
        return self._with("float8", targets, when)

    def float32(self, *targets: Any, when: Callable[[Any], bool] | None = None) -> Rules:
        """Runs the targets in float32."""
        return self._with("float32", targets, when)

    def widest(self, *targets: Any, when: Callable[[Any], bool] | None = None) -> Rules:
        """Runs the targets in half where all their inputs are half, else in float32."""
        return self._with("widest", targets, when)

    def banned(self, *targets: Any, when: Callable[[Any], bool] | None = None) -> Rules:
        """Refuses to transform a function in which a target appears."""
        return self._with("banned", targets, when)

    def match(self, eqn: Equation, around: Surroundings, *, for_products: bool) -> int:
        """The index of the last rule that covers an equation, or -1 if none does.

        Args:
          eqn: the equation.
          around: where it stands.
          for_products: whether to ask for products: for the equation, if it is one, or for those
            in its body. Some rules are for products alone.
        """
        inherited = around.inherited_by_products if for_products else around.inherited
        for index in range(len(self.entries) - 1, inherited, -1):
            entry = self.entries[index]
            if (for_products or not entry.for_products_alone) and entry.matches(eqn, around):
                return index
        return inherited

    def _with(self, precision: Precision, targets: tuple[Any, ...], when: Any) -> Rules:
        if not targets and when is None:
            method = "half" if precision == "half_to_float32" else precision
            raise TypeError(f"{method}() needs a target: a name, a function, or when=predicate")
        entries = [_make_entry(precision, target) for target in targets]
        if when is not None:
            if not callable(when):
                raise TypeError(f"when must be a function of an equation, got {when!r}")
            refuse_lazy("when", when)
            entries.append(_Entry(precision, predicate=when, label=_describe_target(when)))
        return Rules((*self.entries, *entries))

    def descriptions(self) -> tuple[str, ...]:
        """Each rule as it was written, e.g. `"float32('head')"`."""
        return tuple(entry.description for entry in self.entries)

    def __repr__(self) -> str:
        return ".".join(("ampx.DEFAULT_RULES", *self.descriptions()))


def _describe_target(target: Any) -> str:
    return getattr(target, "__qualname__", None) or repr(target)


# Jitted functions of JAX bear the names of public ones, some of them close to a primitive's:
# `isfinite` to "is_finite", `erfinv` to "erf_inv".
_FUNCTIONS_OF_JAX = (jax, jnp, jnp.fft, jnp.linalg, jax.lax, jax.nn, jax.random, jax.scipy.special)
_LEAST_LENGTH = 6  # of a name that is checked: "lgo" may be anything, "dot_genral" hardly


def _check_spelling(name: str) -> None:
    """Refuses a name that nothing has and that is one slip away from a known primitive's.

    A rule of that name would be idle without a word. Names of functions and modules are free, and
    so are those of primitives to come: a path, a capital letter, a digit or an ending (`squared`)
    is no slip.

    Raises:
      ValueError: naming the primitive that was probably meant.
    """
    if (written := name.replace("_", "-")) in DEFAULTS and name not in DEFAULTS:
        raise ValueError(f"no primitive is called {name!r}: did you mean {written!r}?")
    is_plain = "/" not in name and name == name.lower() and len(name) >= _LEAST_LENGTH
    if not is_plain or name in DEFAULTS or any(hasattr(m, name) for m in _FUNCTIONS_OF_JAX):
        return
    # A slip changes at most two letters of either name, so nothing below this ratio is one.
    close = difflib.get_close_matches(name, DEFAULTS, n=5, cutoff=0.8)
    meant = [known for known in close if len(known) >= _LEAST_LENGTH and _is_slip(name, known)]
    if meant:
        raise ValueError(
            f"no primitive is called {name!r}: did you mean {meant[0]!r}? For a function or module "
            "of this name give the function or class itself, or when=predicate"
        )


def _is_slip(name: str, known: str) -> bool:
    """Whether a letter is missing, wrong, too many (not at the end), or has changed places."""
    same = [a == b for a, b in zip(name, known, strict=False)]
    start = same.index(False) if False in same else len(same)  # of what differs
    rest, known_rest = name[start:], known[start:]
    if len(rest) != len(known_rest):
        longer, shorter = sorted((rest, known_rest), key=len, reverse=True)
        return longer[1:] == shorter and not longer[:1].isdigit() and known_rest != ""
    if rest[1:] == known_rest[1:]:
        return not (rest[:1].isdigit() or known_rest[:1].isdigit())
    return rest[:2] == known_rest[1::-1] and rest[2:] == known_rest[2:]


def _make_entry(precision: Precision, target: Any) -> _Entry:
    """Makes a rule of a target, or raises if nothing could ever match it."""
    if isinstance(target, str):
        if not target:
            raise ValueError("the name of a rule's target must not be empty")
        _check_spelling(target)
        return _Entry(precision, name=target, label=repr(target))
    if reading.is_inlined(target):
        raise TypeError(
            f"{_describe_target(target)} is inlined by JAX, which leaves nothing to recognise it "
            'by: give the name of its primitive, such as "dot_general", or wrap the call in '
            "ampx.half_function or ampx.float_function"
        )
    if callable(target):
        return _Entry(precision, codes=_find_codes(target), label=_describe_target(target))
    raise TypeError(
        f"a rule's target must be a name, a function or a class, got {shorten(target)}: give "
        "several one after the other, and a predicate by when="
    )


DEFAULT_RULES = Rules()


def check_rules(rules: Any) -> Rules:
    """Checks that rules are rules, and returns them.

    Raises:
      TypeError: if they are anything else.
    """
    if not isinstance(rules, Rules):
        raise TypeError(
            "rules must come from ampx.DEFAULT_RULES, e.g. ampx.DEFAULT_RULES.half('my_kernel'), "
            f"got {rules!r}"
        )
    return rules

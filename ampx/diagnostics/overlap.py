"""Which parameters can be updated while the last gradients are still on their way.

A reduction hides behind updates only where the program lets them run first:

    reductions   r0  r1  r2  r3                 r0  r1  r2  r3
    updates          u0  u1  u2  u3                             u0  u1  u2  u3
                 overlap                        none: each update waits for r3

Nothing enforces that: one norm over all gradients, and every update waits for every reduction. What
a step does is read here from its jaxpr (`dataflow`) and, if asked, from what the compiler made of
it (`hlo`).
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import jax

from ampx.checking import as_bool, join_first
from ampx.diagnostics.dataflow import Culprit, Flow, ReductionRecord
from ampx.diagnostics.hlo import CompiledReduction, find_waits_of_outputs
from ampx.function_checks import check_callable
from ampx.jaxprs import pure_calls
from ampx.summaries import show_fields, show_table
from ampx.text_tables import SOURCE, Block, Table, show_blocks, show_rich, spread
from ampx.trees import path_name, size_in_bytes

_LOOP = "A loop gives all of its results at once: reduce and update after it."
# From a word to advice. The first word that occurs in the culprit's name, in the functions around
# it or in its primitive decides; the empty word always occurs.
_ADVICE = {
    "finite": "Take the verdict from the local gradients before they are reduced, as "
    "ampx.dynamic_loss_scale with axis_names does.",
    "norm": "A norm of all gradients needs all of them: clip each leaf or bucket by its own norm, "
    "or accept the wait.",
    "cond": "Choose leaf by leaf with jnp.where, or have one cond for each bucket.",
    "scan": _LOOP,
    "while": _LOOP,
    "": "Do it for each bucket on its own, or with what is known before the reductions.",
}
# On a CPU nothing hides behind communication, and one branch around all updates is the fastest.
_CHOICE_OF_AMPX = (
    "ampx updates in one branch where reductions hide behind nothing, as on a CPU: "
    "ampx.all_reduce(tail_overlap=True), or train_step(tail_overlap=True), shows what an "
    "accelerator does."
)


class OutputRecord(NamedTuple):
    """An array that the step gives.

    Attributes:
      path: its names in the step's result, joined by "/".
      shape: the shape of the whole array.
      bytes: the size of the whole array.
      waits_for: the gradient reductions that it waits for, by place in `OverlapReport.reductions`.
      compiled_waits_for: the same in `OverlapReport.compiled`; None without `compiled=True`.
    """

    path: str
    shape: tuple[int, ...]
    bytes: int
    waits_for: tuple[int, ...]
    compiled_waits_for: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class OverlapReport:
    """What the outputs of a step wait for; print it for tables and a verdict.

    Attributes:
      reductions: all reductions over devices, in the order of the program, verdicts included. (A
        verdict is a small value on which the step decides, such as whether gradients are finite.)
      outputs: results of the step with at least one dimension, such as parameters.
      scalars: the other results: losses, norms and counters, which may wait for everything.
      culprits: equations that make outputs wait for the last gradient reduction although that does
        not hold their own gradient; none if there are none. Other outputs may still be early: then
        `overlaps` is true.
      compiled: the reductions of the compiled program; None without `compiled=True`.

    Examples:
      >>> import jax
      >>> from ampx import check_overlap
      >>> auto = (jax.sharding.AxisType.Auto,)
      >>> mesh = jax.sharding.AbstractMesh((4,), ("data",), axis_types=auto)
      >>> @jax.shard_map(mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P())
      ... def step(grads):
      ...     return [jax.lax.psum(grad, "data") for grad in grads]
      >>> report = check_overlap(step, [jax.ShapeDtypeStruct((16,), "float32")] * 2)
      >>> [(output.path, output.waits_for) for output in report.outputs]
      [('0', (0,)), ('1', (1,))]
    """

    reductions: tuple[ReductionRecord, ...]
    outputs: tuple[OutputRecord, ...]
    scalars: tuple[OutputRecord, ...]
    culprits: tuple[Culprit, ...] = ()
    compiled: tuple[CompiledReduction, ...] | None = None

    __repr__ = show_fields
    __str__ = show_blocks
    _repr_html_ = show_table
    __rich_console__ = show_rich

    @property
    def gradient_reductions(self) -> tuple[ReductionRecord, ...]:
        """Reductions, verdicts left out, that an array of at least one dimension waits for."""
        wanted = {place for output in self.outputs for place in output.waits_for}
        return tuple(self.reductions[place] for place in sorted(wanted))

    @property
    def overlaps(self) -> bool:
        """Whether the program lets some arrays be updated before the last gradient reduction."""
        return bool(self._find_early())

    @property
    def merged(self) -> tuple[CompiledReduction, ...]:
        """Compiled reductions that hold several of the program's gradient reductions."""
        return tuple(reduction for reduction in self.compiled or () if reduction.gradients > 1)

    @property
    def compiled_overlaps(self) -> bool | None:
        """`overlaps` of the compiled program; None if it was not asked for."""
        if self.compiled is None:
            return None
        waits = [set(output.compiled_waits_for or ()) for output in self.outputs]
        wanted = {place for each in waits for place in each}
        return len(wanted) > 1 and any(each and max(wanted) not in each for each in waits)

    def _find_early(self) -> list[OutputRecord]:
        """The arrays that wait for gradient reductions, but not for the last of them."""
        last = self.gradient_reductions[-1].place
        return [out for out in self.outputs if out.waits_for and last not in out.waits_for]

    def _advise(self) -> str:
        """What helps against the culprits, each advice once."""
        return " ".join(dict.fromkeys(map(_advise_on, self.culprits)))

    def _summarize(self) -> str:
        count, waiting = len(self.gradient_reductions), [o for o in self.outputs if o.waits_for]
        named = " and ".join(map(str, self.culprits)) + (
            " join them" if len(self.culprits) > 1 else " joins them"
        )
        if count == 1:
            return (
                "One reduction holds all gradients, and everything waits for it. Divide them into "
                "several buckets."
            )
        if not self.overlaps:
            joined = f": {named}. {self._advise()}" if self.culprits else "."
            return (
                f"No overlap: all {len(waiting)} arrays wait for the last of {count} gradient "
                f"reductions{joined}"
            )
        early = self._find_early()
        share = sum(out.bytes for out in early) / max(1, sum(out.bytes for out in waiting))
        told = (
            f"Overlap: {len(early)} of {len(waiting)} arrays ({share:.0%} of the bytes) do not "
            f"wait for the last of {count} gradient reductions."
        )
        if self.culprits:
            told += f" Others do, since {named}. {self._advise()}"
        if self.compiled_overlaps is False:
            merged = ", ".join(f"{r.gradients} into {r.name}" for r in self.merged)
            told += (
                f" But the compiler leaves none of it{f' and merged {merged}' if merged else ''}: "
                "only a true dependence of each bucket on the one before it keeps reductions apart "
                "(ampx.all_reduce with tail_overlap=True)."
            )
        return told

    def _blocks(self) -> list[Block]:
        rows = [("reduction", "primitive", "axes", "elements", "kind", SOURCE)]
        for r in self.reductions:
            kind = "verdict" if r.is_verdict else "gradient"
            axes = ", ".join(map(str, r.axes))
            source = PurePath(r.source).name
            rows.append((str(r.place), r.primitive, axes, f"{r.dtype}[{r.elements}]", kind, source))
        tables = [Table(rows)]
        if self.compiled is not None:
            tables.append(
                Table(
                    [("compiled", "instruction", "opcode", "gradients merged")]
                    + [(str(r.place), r.name, r.opcode, str(r.gradients)) for r in self.compiled]
                )
            )
        # Outputs that wait for the same share a row: a model has thousands of parameters.
        groups: dict[tuple[str, ...], list[str]] = {}
        for output in (*self.outputs, *self.scalars):
            waits = (_list_places(output.waits_for),)
            if self.compiled is not None:
                waits += (_list_places(output.compiled_waits_for or ()),)
            kind = "array" if output.shape else "scalar"
            groups.setdefault((kind, *waits), []).append(output.path)
        head = ("output", "waits for") + ("compiled",) * (self.compiled is not None)
        rows = [(*key, _list_some(paths)) for key, paths in groups.items()]
        tables.append(Table([(*head, "paths"), *rows]))
        return spread((*tables, self._summarize()))


def _advise_on(culprit: Culprit) -> str:
    if culprit.primitive == "cond" and culprit.place.startswith("ampx/"):
        return _CHOICE_OF_AMPX
    words = " ".join((culprit.name, *culprit.functions, culprit.primitive))
    return next(_ADVICE[key] for key in _ADVICE if key in words)


def _list_places(places: Iterable[int]) -> str:
    return ", ".join(map(str, places)) or "nothing"


def _list_some(paths: Sequence[str]) -> str:
    return join_first((path or "(root)" for path in paths), most=3)


def check_overlap(
    step: Callable[..., Any], *args: Any, compiled: bool = False, **kwargs: Any
) -> OverlapReport:
    """Tells which reductions each result of a step waits for, and what makes it wait.

    Nothing is executed. The step is traced and followed equation by equation, through jit,
    shard_map, remat and custom derivatives. A loop, a `cond` or a kernel runs as one: all of its
    results wait for all of its operands, and for the reductions inside. What the program allows
    is not yet what happens: the compiler may merge reductions, which `compiled=True` shows, and
    the hardware must be able to compute while it communicates.

    Args:
      step: a function, jitted or not, that gives new parameters and optimizer state, with its
        reductions inside `shard_map`. Sums that XLA's partitioner adds for sharded arrays are not
        in the traced program, and are not seen.
      *args: the arguments of the step: arrays, or `jax.ShapeDtypeStruct` in their places, and
        anything else.
      compiled: also compile the step, for the devices of its mesh, and read the result.
      **kwargs: the keyword arguments of the step.

    Returns:
      An `OverlapReport`; print it.

    Raises:
      TypeError: if `step` is no function or `compiled` no bool, or if the step cannot be called
        with these arguments.
      ValueError: if no array that the step gives waits for a gradient reduction.

    References:
      Li et al., PyTorch Distributed, https://arxiv.org/abs/2006.15704, on overlap and buckets.

    Examples:
      >>> import jax, optax
      >>> from ampx import check_overlap
      >>> auto = (jax.sharding.AxisType.Auto,)
      >>> mesh = jax.sharding.AbstractMesh((4,), ("data",), axis_types=auto)
      >>> tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
      >>> @jax.shard_map(mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P())
      ... def step(grads):
      ...     grads = [jax.lax.psum(grad, "data") for grad in grads]
      ...     return tx.update(grads, tx.init(grads))[0]
      >>> report = check_overlap(step, [jax.ShapeDtypeStruct((16,), "float32")] * 4)
      >>> report.overlaps, report.culprits[0].name
      (False, 'clip_by_global_norm')
    """
    check_callable("step", step, "step(*args)")
    compiled = as_bool("compiled", compiled)
    _check_arguments(step, args, kwargs)
    call = pure_calls.as_pure_call(step, args, kwargs)
    run, arrays = pure_calls.as_function_of_arrays(call)

    # State of nnx objects that the step changes is an output like others: `1/...` in paths.
    def of_arrays(*arrays: Any) -> Any:
        result, state = run(*arrays)
        return (result, state) if jax.tree.leaves(state) else result

    # A jitted step is traced by its own jit: that has static arguments and options of its own.
    trace = getattr(step, "trace", None) if call.operands[0] is args else None
    traced = trace(*args, **kwargs) if trace else jax.jit(of_arrays).trace(*arrays)
    # Inputs wait for nothing: node 0.
    flow = Flow()
    nodes = flow.follow(traced.jaxpr, [0] * len(traced.jaxpr.in_avals), {})
    leaves = jax.tree_util.tree_leaves_with_path(traced.out_info)
    gradients = sum(1 << r.place for r in flow.reductions if not r.is_verdict)
    outputs = [
        OutputRecord(
            path_name(path),
            tuple(leaf.shape),
            size_in_bytes(leaf),
            flow.find_waits(node, gradients),
        )
        for (path, leaf), node in zip(leaves, nodes, strict=True)
    ]
    waiting = [o for o in outputs if o.shape and o.waits_for]
    if not waiting:
        raise ValueError(
            f"nothing to overlap: no array that {getattr(step, '__name__', 'the step')} gives "
            "waits for the reduction of a gradient; call it on a step that has ampx.all_reduce, "
            "or psum inside shard_map, and an axis of more than one device"
        )
    # The places of compiled reductions are their own: none of the program's need be left.
    left = None
    if compiled:
        left, waits = find_waits_of_outputs(traced.lower().compile().as_text() or "", len(outputs))
        pairs = zip(outputs, waits, strict=True)
        outputs = [output._replace(compiled_waits_for=places) for output, places in pairs]
    arrays_of, scalars = (
        tuple(o for o in outputs if bool(o.shape) == is_array) for is_array in (True, False)
    )
    report = OverlapReport(tuple(flow.reductions), arrays_of, scalars, (), left)
    wanted = sum(1 << r.place for r in report.gradient_reductions)
    # Scalars, such as a reported norm, may join all reductions: what leads to them is not a
    # culprit.
    above = [node for node, output in zip(nodes, outputs, strict=True) if output.shape]
    return dataclasses.replace(report, culprits=flow.find_culprits(above, wanted))


def _check_arguments(step: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Checks that arguments of the step are there: `lint_step(step)(...)` takes them afterwards."""
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):
        return  # a builtin has none
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"{error}: check_overlap takes the arguments of the step after the step, as in "
            "check_overlap(step, state, batch)"
        ) from None

"""lint_step: what is wrong with a training step, found in its traced program.

Some faults of a step show in no figure that it reports. A loss scale that was forgotten leaves a
loss that falls, slowly; a float16 moment that stands still is a finite number. But they can be read
in the program, without running it. Each check asks for one thing that can be decided there, and is
silent where it cannot:

    scale_checks    the loss scale: once, unscaled before all else, and skips that undo all
    state_checks    what is handed on: an optimizer's state, random keys, batch statistics
    reduction_checks, device_checks
                    one gradient of those of all devices, and results that differ on them
    half_checks     what is kept, added up or written in half precision
    float8_checks   heads in float8, and products that only a size keeps out of it
    here            callbacks to the host, donated arrays, dtypes that change
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath
from typing import Any, ParamSpec, get_args

from ampx.checking import check_choice, join_first
from ampx.diagnostics import (
    device_checks,
    float8_checks,
    half_checks,
    reduction_checks,
    scale_checks,
    state_checks,
)
from ampx.diagnostics.dataflow import Flow, ReductionRecord
from ampx.diagnostics.lint_findings import CheckName, LintFinding
from ampx.diagnostics.product_shares import ProductCount, count_products, describe_shares
from ampx.diagnostics.step_programs import (
    StepProgram,
    source_of,
    source_of_output,
    trace_step,
)
from ampx.function_checks import check_callable, takes_function_alone
from ampx.jaxprs import folds, reading, source_info
from ampx.summaries import show_table
from ampx.text_tables import SOURCE, Block, Table, show_blocks, show_rich, spread

P = ParamSpec("P")

_CALLBACKS = (
    "pure_callback",
    "io_callback",
    "debug_callback",
    "debug_print",
    "outside_call",
    "infeed",
    "outfeed",
)


@dataclasses.dataclass(frozen=True)
class LintReport:
    """What `lint_step` found in a step; print it for a table.

    Attributes:
      findings: the faults, in the order of the checks.
      reductions: the sums over devices of one step, in the order of the program.
      products: for each dtype the floating-point operations of its matrix products, and the line of
        the largest one.
      has_loss_scale: whether the state of the step holds a loss scale.
      late_verdict: the line that asks whether gradients are finite when they have been reduced over
        devices, in several reductions; None if there is none.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> print(
      ...     ampx.lint_step(lambda params, batch: params - 0.1 * batch)(jnp.ones(2), jnp.ones(2))
      ... )
      Nothing found.
    """

    findings: tuple[LintFinding, ...]
    reductions: tuple[ReductionRecord, ...] = ()
    products: tuple[ProductCount, ...] = ()
    has_loss_scale: bool = True
    late_verdict: str | None = None

    __str__ = show_blocks
    _repr_html_ = show_table
    __rich_console__ = show_rich

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def __repr__(self) -> str:
        """Names checks and lines: a test that fails on `ok` shows this."""
        found = [f"{found.check} at {PurePath(found.source).name}" for found in self.findings]
        return f"LintReport({join_first(found) or 'nothing found'})"

    def _blocks(self) -> list[Block]:
        parts: list[Block] = ["Nothing found."]
        if self.findings:
            rows = [
                (found.check, PurePath(found.source).name, found.message) for found in self.findings
            ]
            fixes = dict.fromkeys((found.check, found.fix) for found in self.findings)
            parts = [
                Table([("check", SOURCE, "what is wrong"), *rows]),
                Table([("check", "what to do"), *fixes]),
            ]
        if shares := describe_shares(self.products):
            parts.append(shares)
        if not self.has_loss_scale and any(each.dtype == "float16" for each in self.products):
            parts.append(
                "It multiplies in float16, and its state holds no loss scale: gradients below 3e-8 "
                "become zero. ampx.dynamic_loss_scale keeps them; bfloat16 needs none."
            )
        if self.reductions:
            total = sum(record.bytes for record in self.reductions)
            count = len(self.reductions)
            parts.append(f"Reductions over devices in a step: {count}, of {total:,} bytes in all.")
        if self.late_verdict:
            parts.append(
                "Whether gradients are finite is asked after they were reduced, at "
                f"{PurePath(self.late_verdict).name}: no update can begin before the last "
                "reduction has ended. ampx.dynamic_loss_scale with axis_names asks before it; "
                "ampx.check_overlap tells what waits for what."
            )
        return spread(parts)


@takes_function_alone
def lint_step(
    step: Callable[P, Any], *, ignore: Sequence[CheckName] = ()
) -> Callable[P, LintReport]:
    """Looks for faults in a training step that no figure of it shows.

    The step is traced and never run, so arrays may be `jax.ShapeDtypeStruct`. It may be any
    function, jitted or not, of plain optax, of flax or of ampx, that takes its state among its
    arguments and returns the next one in the same structure. The checks:

    - `"loss_scale"`: the scale in the state does not reach the gradients, or reaches them twice, or
      divides them twice, or divides what another scale has multiplied. Scales of ampx, flax's
      `DynamicScale` and jmp's are known by their fields;
    - `"unscale_order"`: scaled gradients meet numbers that are not scaled: a clip, a decay or a
      noise outside of the loss scale, or in a backward rule of the function's own; or a term of
      the loss is not multiplied by it;
    - `"reduction"`: gradients of `ampx.value_and_grad(axis_name=...)`, which are divided by the
      weight of all devices, are averaged over devices, and so divided twice; or gradients that
      JAX or the step has summed over devices are summed or averaged again;
    - `"out_specs"`: what differs on the devices comes out of a `shard_map(..., check_vma=False)` as
      if it were equal on all;
    - `"schedule"`: a rate is computed from a counter of optax that counts skipped steps;
    - `"batch_stats"`: a skipped step changes batch statistics of flax linen; or they are among the
      parameters of an optimizer, which moves them; or a step that trains neither changes nor reads
      them;
    - `"lost_state"`: parameters are updated with an optimizer's state that comes back as it came
      in, or with counters and moments of it that do; or parameters come back so, and an optimizer
      moves its moments of them; or nnx modules are changed under `jax.jit`, which works on copies;
    - `"random_key"`: random numbers that reach the state are drawn from a key of it that comes back
      unchanged, or is written in the program, with nothing folded in that changes;
    - `"half_sum"`: a loop adds up in half precision, as gradients of micro-batches;
    - `"half_state"`: arrays in half that each step adds to, without a wider copy or rounding at
      random; averages that decay by less than half precision resolves;
    - `"half_constant"`: a number that is infinite in half precision is multiplied or added, or a
      loss scale is converted to float16 that is (for this its value must be given);
    - `"float8_head"`: a softmax reads a product in float8, as that of a head or a router;
    - `"float8_size"`: beside products in float8 a large one stays in half, since a size of it is no
      multiple of 16;
    - `"callback"`: a callback or a print, for which the device talks to the host in every step; one
      in a branch of a cond is left out;
    - `"donation"`: a donated array that no result can take the place of;
    - `"dtype"`: an array of the state comes back in another dtype, or weakly typed as a Python
      number is, so the next call compiles anew.

    The printed report also has the bytes that are reduced over devices, and the share of matrix
    products in each dtype, with the line of the largest that is float32 in a step that is half, or
    of one whose weight was half where all are float32. It says where a step in float16 has no loss
    scale, and where one asks only after several reductions over devices whether gradients are
    finite.

    A check says nothing where the program leaves it open: what a kernel does, how large a rate is.
    A step without findings may have faults that are none of these.

    Args:
      step: the step; one that holds nnx modules or takes them will do.
      ignore: names of checks to leave out, where it is meant to be so.

    Returns:
      A function with the signature of `step` that gives a `LintReport`. In a test:
      `assert ampx.lint_step(step)(state, batch).ok`.

    Raises:
      TypeError: if `step` is no function, or `ignore` is a string.
      ValueError: if `ignore` holds what is no check.

    Examples:
      >>> import ampx, jax, jax.numpy as jnp, optax
      >>> tx = ampx.dynamic_loss_scale(optax.sgd(0.1))
      >>> params, x = jnp.ones(2), jnp.ones(2)
      >>> def step(params, opt_state, x):  # the loss scale is forgotten
      ...     grads = jax.grad(lambda w: jnp.sum((w * x - 2.0) ** 2))(params)
      ...     updates, opt_state = tx.update(grads, opt_state, params)
      ...     return optax.apply_updates(params, updates), opt_state
      >>> report = ampx.lint_step(step)(params, tx.init(params), x)
      >>> report.ok, [found.check for found in report.findings]
      (False, ['loss_scale'])
    """
    check_callable("step", step, "step(*args)")
    if isinstance(ignore, str) or not isinstance(ignore, Sequence):
        raise TypeError(f"ignore must be a sequence of names of checks, got {ignore!r}")
    for name in ignore:
        check_choice("ignore", name, get_args(CheckName))

    @functools.wraps(step)
    def linted(*args: Any, **kwargs: Any) -> LintReport:
        program = trace_step(step, args, kwargs)
        found = [*_find_all(program), *state_checks.find_lost_changes(step, args, kwargs, program)]
        found = [finding for finding in found if finding.check not in ignore]
        flow = Flow()
        flow.follow(program.jaxpr, [0] * len(program.inputs), {})
        products = count_products(program.jaxpr)
        return LintReport(
            findings=tuple(dict.fromkeys(found)),
            reductions=tuple(flow.reductions),
            products=products,
            has_loss_scale=bool(program.scales),
            late_verdict=_find_late_verdict(flow),
        )

    return linted


def _find_all(program: StepProgram) -> Iterator[LintFinding]:
    if program.scales:
        flow = scale_checks.follow_scale(program)
        yield from scale_checks.find_scale_faults(program, flow)
        yield from scale_checks.find_counting_schedules(program, flow)
        yield from scale_checks.find_unfrozen_statistics(program, flow)
    yield from state_checks.find_state_faults(program)
    yield from reduction_checks.find_means_of_shares(program)
    yield from device_checks.find_device_faults(program)
    yield from half_checks.find_half_sums(program)
    yield from half_checks.find_half_states(program)
    yield from float8_checks.find_float8_faults(program)
    yield from _find_callbacks(program)
    yield from _find_useless_donations(program)
    yield from _find_changing_dtypes(program)


def _find_late_verdict(flow: Flow) -> str | None:
    """The line of the first `isfinite` of what comes out of reductions, if there are several."""
    gradients = [record for record in flow.reductions if not record.is_verdict]
    bits = sum(1 << record.place for record in gradients)
    for node in flow.nodes:
        asks = node.eqns and node.eqns[0].primitive.name == "is_finite"
        if len(gradients) > 1 and asks and node.waits & bits:
            return source_info.line_of(node.eqns[0])
    return None


def _find_callbacks(program: StepProgram) -> Iterator[LintFinding]:
    for eqn, around in folds.equations_inside(program.jaxpr):
        # A branch is taken where a check has failed, or in each hundredth step.
        is_optional = any(outer.primitive.name == "cond" for outer in around)
        if eqn.primitive.name in _CALLBACKS and not is_optional:
            yield LintFinding(
                "callback",
                f"every step talks to the host: {eqn.primitive.name}",
                source_of((eqn, *reversed(around)), program.jaxpr),
                "return the value from the step and read it later, outside of jit",
            )


def _find_useless_donations(program: StepProgram) -> Iterator[LintFinding]:
    """Finds donated arrays beyond those that results of the same shape and dtype can replace."""
    for eqn in reading.open_jaxpr(program.jaxpr).eqns:
        donated = eqn.params.get("donated_invars", ())
        free = collections.Counter(map(_type_of, eqn.outvars))
        useless = []
        for atom, is_donated in zip(eqn.invars, donated, strict=False):
            if is_donated:
                free[_type_of(atom)] -= 1
                if free[_type_of(atom)] < 0:
                    useless.append("{}{}".format(*_type_of(atom)))
        if useless:
            yield LintFinding(
                "donation",
                f"donated arrays are not used again: {join_first(useless)}",
                source_of((eqn,), program.jaxpr),
                "donate what the step returns in the same shape and dtype: the state, not the "
                "batch",
            )


def _type_of(atom: Any) -> tuple[str, tuple[int, ...]]:
    return str(atom.aval.dtype), tuple(atom.aval.shape)


def _find_changing_dtypes(program: StepProgram) -> Iterator[LintFinding]:
    changed: dict[tuple[str, str], list[int]] = {}
    for number, i in program.carried.items():
        before, after = str(program.inputs[i].aval.dtype), str(program.outputs[number].aval.dtype)
        # jit tells arrays whose dtype is weak, as that of a Python number, from others. What begins
        # so, as jnp.full does, is strong from the first step on.
        if program.outputs[number].aval.weak_type and not program.inputs[i].aval.weak_type:
            after = f"weakly typed {after}"
        if before != after and len(program.inputs[i].path) > 1:
            changed.setdefault((before, after), []).append(number)
    for (before, after), numbers in changed.items():
        yield LintFinding(
            "dtype",
            f"{before} comes back as {after}: {program.carried_names(numbers)}",
            source_of_output(program, numbers[0]),
            f"cast the result back to {before}, so that the next call need not compile anew: "
            f"x.astype({before!r})",
        )

"""How many reductions does a data-parallel step run, and which of them does each update wait for?

`counts` counts all-reduces twice: as the program asks for them, with XLA's combiner switched off,
and as XLA leaves them. `waits` asks `ampx.check_overlap` about several designs of the same step.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

import ampx
from ampx.diagnostics.hlo import parse_computations
from ampx.diagnostics.overlap import check_overlap
from benchmarks.distributed_steps import (
    AXIS,
    SPLIT,
    Apply,
    Step,
    applied,
    loss_fn,
    make_batch,
    make_params,
    make_step,
    on_devices,
    placed,
    reduced_by_ampx,
    start,
    summed_leaf_by_leaf,
)

# XLA:CPU merges independent all-reduces in one pass. Without it the compiled program still has each
# all-reduce that the program asked for.
_NO_COMBINER = {"xla_disable_hlo_passes": "cpu-all-reduce-combiner"}


def executed_all_reduces(text: str) -> int:
    """How many all-reduces one run of a compiled program executes: those in loops once a round."""
    computations, entry = parse_computations(text)

    def count(name: str) -> int:
        total = 0
        for instruction in computations[name]:
            if instruction.opcode == "all-reduce":
                total += 1
            elif instruction.opcode == "while":
                # XLA notes how often a loop runs where it could find out, as it can for a scan.
                trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.attributes)
                total += int(trips[1]) * sum(map(count, instruction.called))
            elif instruction.opcode in ("call", "fusion"):
                total += sum(map(count, instruction.called))
        return total

    return count(entry)


def _summed_in_each_microbatch(num_microbatches: int) -> Step:
    """The step that sums gradients over devices in each micro-batch, as soon as there are any."""

    def step(state: Any, x: jax.Array) -> Any:
        params, opt_state, _ = state
        # Parameters are replicated, and JAX sums the gradient of a replicated value over devices by
        # itself. Marked as varying, each device gets the gradient of its own rows.
        local = lax.pcast(params, AXIS, to="varying")

        def one(x: jax.Array) -> tuple[Any, jax.Array]:
            loss, grads = jax.value_and_grad(loss_fn)(local, x)
            return jax.tree.map(lambda g: lax.psum(g, AXIS), grads), loss

        def body(sums: Any, x: jax.Array) -> tuple[Any, jax.Array]:
            grads, loss = one(x)
            return jax.tree.map(jnp.add, sums, grads), loss

        if num_microbatches == 1:
            grads, losses = one(x)
        else:
            zeros = jax.tree.map(jnp.zeros_like, params)
            grads, losses = lax.scan(body, zeros, ampx.split_microbatches(x, num_microbatches))
        number = num_microbatches * lax.axis_size(AXIS)
        loss = lax.psum(jnp.sum(losses), AXIS) / number
        grads = optax.tree.scale(1 / number, grads)
        return (*applied(optax.sgd(0.1))(grads, opt_state, params), loss)

    return step


def counts(leaves: int, num_microbatches: int) -> dict[str, list[int]]:
    """All-reduces of each design: as the program asks for them, and as XLA leaves them."""
    width = 32
    sgd = optax.sgd(0.1)
    params = make_params(leaves, width)
    quarter = leaves // 4 * width * width * 4  # bytes of a quarter of the leaves: 4 buckets
    batch = placed(make_batch(width, 16 * jax.device_count()), SPLIT)
    steps = {"in each micro-batch": _summed_in_each_microbatch(num_microbatches)}
    for name, reduction in {
        "after accumulation": summed_leaf_by_leaf(),
        "all_reduce": reduced_by_ampx(),
        "all_reduce, 4 buckets": reduced_by_ampx(bucket_bytes=quarter, tail_overlap=True),
    }.items():
        apply = applied(optax.chain(reduction, sgd))
        steps[name] = make_step(apply, num_microbatches=num_microbatches)
    found = {}
    for name, step in steps.items():
        # The reductions have no state, so all chains begin with the same one.
        tx = sgd if name == "in each micro-batch" else optax.chain(summed_leaf_by_leaf(), sgd)
        lowered = jax.jit(on_devices(step)).lower(start(tx, params), batch)
        found[name] = [
            executed_all_reduces(lowered.compile(compiler_options=options).as_text() or "")
            for options in (_NO_COMBINER, None)
        ]
    return found


def _with_one_cond(reduction: Any, inner: optax.GradientTransformation) -> Apply:
    """Checks gradients before the reductions, but updates all of them in one branch."""

    def apply(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        is_good = jnp.all(ampx.count_nonfinite(grads, axis_names=(AXIS,)) == 0)
        grads, _ = reduction.update(grads, reduction.init(params))
        return lax.cond(
            is_good, lambda: applied(inner)(grads, state, params), lambda: (params, state)
        )

    return apply


def _with_verdict_after(reduction: Any, inner: optax.GradientTransformation) -> Apply:
    """Checks the reduced gradients, and chooses between old and new by `where`."""

    def apply(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        grads, _ = reduction.update(grads, reduction.init(params))
        new = applied(inner)(grads, state, params)
        is_good = jnp.all(ampx.count_nonfinite(grads) == 0)
        return jax.tree.map(lambda n, o: jnp.where(is_good, n, o), new, (params, state))

    return apply


def waits() -> dict[str, list[list[int]]]:
    """For each design and bucket: how many reductions it waits for, in the program and compiled."""
    layers, width = 12, 32
    params = make_params(layers, width)
    batch = placed(make_batch(width, 16 * jax.device_count()), SPLIT)
    size = 3 * width * width * 4  # bytes of three of the twelve float32 layers: 4 buckets
    layout = ampx.bucket_layout(params, bucket_bytes=size)
    adamw = optax.adamw(1e-3)
    chained, loose = (
        reduced_by_ampx(bucket_bytes=size, tail_overlap=overlap) for overlap in (True, False)
    )

    def scaled(reduction: Any) -> optax.GradientTransformation:
        return ampx.dynamic_loss_scale(optax.chain(reduction, adamw), axis_names=AXIS)

    transformations = {
        "clip_by_global_norm": optax.chain(chained, optax.clip_by_global_norm(1.0), adamw),
        "apply_if_finite": optax.chain(chained, optax.apply_if_finite(adamw, 5)),
        "clip_by_bucket_norm": optax.chain(
            chained, ampx.clip_by_bucket_norm(1.0, bucket_bytes=size), adamw
        ),
        "loss scale": scaled(chained),
        "loss scale, no tail overlap": scaled(loose),
    }
    designs = {
        "verdict after": (_with_verdict_after(chained, adamw), adamw),
        "one cond": (_with_one_cond(chained, adamw), adamw),
        **{name: (applied(tx), tx) for name, tx in transformations.items()},
    }
    found = {}
    for name, (apply, tx) in designs.items():
        report = check_overlap(
            on_devices(make_step(apply)), start(tx, params), batch, compiled=True
        )
        of_params = report.outputs[:layers]
        found[name] = [
            [
                max(_numbers(of_params[i], report)[column] for i in bucket.leaves)
                for column in (0, 1)
            ]
            for bucket in layout.buckets
        ]
    return found


def _numbers(output: Any, report: Any) -> tuple[int, int]:
    """How many gradient reductions an output waits for; one merged of four counts as four."""
    # XLA may have merged reductions: who waits for one of them then waits for all.
    merged = sum(report.compiled[place].gradients for place in output.compiled_waits_for)
    return len(output.waits_for), merged

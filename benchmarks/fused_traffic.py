"""How many bytes does a compiled update move through memory? Read out of its HLO, so exact.

What is counted: every kernel that the program launches (a fusion, a copy, a reduction, a custom
call) reads each of its operands once and writes all of its outputs once. An output that reuses an
operand's buffer counts as well. What happens inside a fusion is free, however often it looks at an
operand; so are tuples, bitcasts and parameters. Caches are not modelled: an array that two kernels
read counts twice. Of a conditional one branch counts, the cheapest or the dearest, whichever an
ordinary step takes.

Devices differ in what they fuse. XLA:CPU gives every fusion one output, so AdamW has to read the
gradient and the moments twice there: 40 bytes a parameter, where one kernel with three outputs
moves 28 (see `FLOORS`).

Run `python -m benchmarks.fused_traffic`; `make bench ARGS=fused` includes it. An update is as good
as it can be where its column equals a floor.
"""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ampx import dynamic_loss_scale, fused
from ampx.diagnostics.hlo import Instruction, parse_computations
from ampx.updates.tails import Tail
from benchmarks.measuring import print_table

_ARRAY = re.compile(r"\b(pred|[a-z]+?(\d+)\w*)\[([\d,]*)\]")
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "opt-barrier"),
    *("after-all", "partition-id", "replica-id", "copy-done", "async-done"),
}
SMALL = 1024  # elements; what touches nothing larger is no pass over parameters

LEAVES, LEAF = 4, 2**19


class Traffic(NamedTuple):
    """What a program moves.

    Attributes:
      moved: bytes read and written.
      kernels: how many are launched.
      passes: those of them that touch an array of more than `SMALL` elements.
    """

    moved: float
    kernels: int
    passes: int

    def plus(self, other: "Traffic") -> "Traffic":
        return Traffic(*(a + b for a, b in zip(self, other, strict=True)))


Branch = Callable[[list[Traffic]], Traffic]


def traffic(text: str, branch: Branch = min) -> Traffic:
    """Counts the traffic of a compiled program.

    Args:
      text: the program's optimized HLO.
      branch: `min` or `max`, which branch of a conditional counts.

    Raises:
      ValueError: for a loop, since the text does not say how often it runs.
    """
    computations, entry = parse_computations(text)
    return _of_computation(computations, entry, branch)


def _of_computation(
    computations: dict[str, list[Instruction]], name: str, branch: Branch
) -> Traffic:
    total = Traffic(0, 0, 0)
    for instruction in computations[name]:
        opcode = instruction.opcode
        if opcode in _FREE:
            continue
        if opcode == "while":
            raise ValueError("this program has a loop: the HLO does not say how often it runs")
        if opcode in ("call", "conditional"):
            inside = [_of_computation(computations, each, branch) for each in instruction.called]
            total = total.plus(branch(inside))
        else:
            # A kernel reads an operand that it is given twice only once.
            operands = dict(zip(instruction.operands, instruction.operand_types, strict=True))
            total = total.plus(_of_kernel(instruction.result, *operands.values()))
    return total


def _of_kernel(*types: str) -> Traffic:
    arrays = [array for kind in types for array in sizes_of_arrays(kind)]
    is_pass = any(elements > SMALL for elements, _ in arrays)
    return Traffic(sum(size for _, size in arrays), 1, int(is_pass))


def sizes_of_arrays(kind: str) -> Iterator[tuple[int, float]]:
    """Elements and bytes of each array of a type: `(f32[8], s4[2,3])` gives (8, 32), (6, 3)."""
    for dtype, bits, dims in _ARRAY.findall(kind):
        elements = math.prod(int(dim) for dim in dims.split(",") if dim)
        yield elements, elements * (1 if dtype == "pred" else int(bits) / 8)


# --- the table -----------------------------------------------------------------------------------

Step = Callable[[Any, Any], Any]


def by_update(tx: optax.GradientTransformationExtraArgs, **extra_args: Any) -> Step:
    """A step by `tx.update` and `optax.apply_updates`."""

    def step(state, grads):
        params, opt_state = state
        updates, opt_state = tx.update(grads, opt_state, params, **extra_args)
        return optax.apply_updates(params, updates), opt_state

    return step


def by_params(scaled: optax.GradientTransformationExtraArgs, **extra_args: Any) -> Step:
    """A step by a loss scale that makes the new parameters itself, as in `ampx.train_step`."""

    def step(state, grads):
        params, opt_state = state
        tail = Tail(new_params=True)
        applied, opt_state = scaled.update(grads, opt_state, params, tail=tail, **extra_args)
        return applied.params, opt_state

    return step


def by_apply(tx: Any, max_norm: float | None = None, backend: Any = "auto") -> Step:
    """A step by `ampx.fused.apply`."""

    def step(state, grads):
        params, opt_state = state
        applied = fused.apply(tx, grads, opt_state, params, max_norm=max_norm, backend=backend)
        return applied[:2]

    return step


def compiled_traffic(step: Step, tx: Any, branch: Branch = min) -> Traffic:
    """Compiles a step with donated float32 state and counts its traffic; runs nothing."""
    params = [jax.ShapeDtypeStruct((LEAF,), jnp.float32) for _ in range(LEAVES)]
    state = params, jax.eval_shape(tx.init, params)
    compiled = jax.jit(step, donate_argnums=0).lower(state, params).compile()
    return traffic(compiled.as_text(), branch)


def _clipped(tx: Any) -> Any:
    return optax.chain(optax.clip_by_global_norm(1.0), tx)


# Bytes a parameter that have to be read and written, all in float32: by kernels with any number of
# outputs, and by kernels with one output each. For Adam (parameter p, gradient g, moments m and v):
#
#   one kernel:  reads p g m v, writes p m v                                 7 arrays, 28 bytes
#   one output:  m from g m (3 arrays), v from g v (3), p from p m v (4)    10 arrays, 40 bytes
#
# A clip reads g once more for its norm, before anything else: 4 bytes. LAMB needs two passes, since
# its trust ratio is known only after the norms of p and of the direction: first p g m v in and m v
# out, then p m v in and p out, 10 arrays.
FLOORS = {
    "SGD": (12, 12),
    "SGD, momentum": (20, 24),
    "Adagrad": (20, 28),
    "Lion": (20, 28),
    "Adam": (28, 40),
    "AdamW": (28, 40),
    "Adadelta": (28, 48),
    "NovoGrad": (24, 28),
    "LAMB": (40, 52),
    "AdamW, clipped": (32, 44),
    "AdamW, scaled, clipped, skipping": (32, 44),
}
OPTIMIZERS = {
    "SGD": lambda kind: kind.sgd(1e-3),
    "SGD, momentum": lambda kind: kind.sgd(1e-3, momentum=0.9),
    "Adagrad": lambda kind: kind.adagrad(1e-3),
    "Lion": lambda kind: kind.lion(1e-3),
    "Adam": lambda kind: kind.adam(1e-3),
    "AdamW": lambda kind: kind.adamw(1e-3),
    "Adadelta": lambda kind: kind.adadelta(1e-3),
    "NovoGrad": lambda kind: kind.novograd(1e-3),
    "LAMB": lambda kind: kind.lamb(1e-3),
}
# Optimizers that only optax has, for `fused.fuse`. Adan keeps the last gradient.
DERIVED = {
    "RMSprop, derived": optax.rmsprop(1e-3, momentum=0.9),
    "AdaBelief, derived": optax.adabelief(1e-3),
    "Adan, derived": optax.adan(1e-3),
}


def _variants() -> dict[str, dict[str, tuple[Any, ...]]]:
    """Arguments of `compiled_traffic`, by row and column."""
    rows: dict[str, dict[str, tuple[Any, ...]]] = {}
    for name, make in OPTIMIZERS.items():
        theirs, ours = make(optax), make(fused)
        rows[name] = {
            "optax": (by_update(theirs), theirs),
            "update": (by_update(ours), ours),
            "apply": (by_apply(ours), ours),
        }
    theirs, ours = _clipped(optax.adamw(1e-3)), fused.adamw(1e-3)
    rows["AdamW, clipped"] = {
        "optax": (by_update(theirs), theirs),
        "apply": (by_apply(ours, 1.0), ours),
    }
    guarded, scaled = optax.apply_if_finite(theirs, 5), dynamic_loss_scale(ours)
    rows["AdamW, scaled, clipped, skipping"] = {
        "optax": (by_update(guarded), guarded, max),  # the cheap branch is the skip
        "apply": (by_apply(scaled, 1.0), scaled),
    }
    return rows


def traffic_table() -> None:
    """Prints bytes a parameter and kernels, for optax and for `ampx.fused`."""
    rows = []
    for name, variants in _variants().items():
        cells = []
        for column in ("optax", "update", "apply"):
            found = compiled_traffic(*variants[column]) if column in variants else None
            cells.append(
                f"{found.moved / (LEAVES * LEAF):.1f} ({found.passes / LEAVES:g})" if found else "–"
            )
        one_kernel, one_output = FLOORS[name]
        rows.append([name, *cells, str(one_output), str(one_kernel)])
    print_table(
        f"Bytes moved a parameter, and kernels a leaf that touch one ({LEAVES} leaves, "
        f"{jax.default_backend()})",
        [
            "optimizer",
            "optax",
            "`ampx.fused`, update",
            "`ampx.fused.apply`",
            "floor, one output a kernel",
            "floor",
        ],
        rows,
    )


if __name__ == "__main__":
    print(f"jax {jax.__version__}, optax {optax.__version__}, {jax.devices()[0].device_kind}")
    traffic_table()

"""The tail of a step: unscale, check, clip, AdamW with decay, keep or skip.

`python -m benchmarks fused` makes the tables; `python -m benchmarks.fused --help` tells how to run
one size, with everything, or on a GPU.
"""

import argparse
import dataclasses
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ampx
from ampx.updates.clipping import clipped
from benchmarks.flat import flat_tail
from benchmarks.fused_traffic import FLOORS, by_apply, by_update, traffic_table
from benchmarks.measuring import Candidate, print_table, ratio, take_turns

try:
    import torch
except ImportError:
    torch = None

SCALE, RATE, DECAY, MAX_NORM = 1024.0, 1e-3, 0.1, 1.0
NAIVE, BASELINE, COPY = "naive AMP", "optax, clip + AdamW", "in-place scale of the parameters"
# XLA:CPU takes minutes to compile them with hundreds of leaves.
SLOW_TO_COMPILE = (NAIVE, "`dynamic_loss_scale` of optax, clip + AdamW")
ENOUGH_LEAVES = 100


@dataclasses.dataclass(frozen=True)
class Size:
    """Parameters and gradients of a table."""

    leaves: int
    leaf: int
    grad_dtype: Any = jnp.float32

    @property
    def elements(self) -> int:
        return self.leaves * self.leaf

    @property
    def title(self) -> str:
        return f"{self.leaves:,} x {self.leaf:,}, gradients in {np.dtype(self.grad_dtype).name}"

    def params(self) -> list[jax.Array]:
        return [jnp.full(self.leaf, 0.1) for _ in range(self.leaves)]

    def grads(self) -> list[jax.Array]:
        return [jnp.full(self.leaf, 1e-3 * SCALE, self.grad_dtype) for _ in range(self.leaves)]


SIZES = (
    Size(1, 50_000_000),
    Size(100, 500_000),
    Size(400, 125_000),
    Size(2000, 5000),
    Size(1, 50_000_000, jnp.bfloat16),
)
SIZE_OF_OPTIMIZERS = Size(16, 1_000_000)


# --- candidates ----------------------------------------------------------------------------------


def _scaled(tx: Any) -> Any:
    return ampx.dynamic_loss_scale(tx, init_scale=SCALE)


def _in_float32(step: Callable[..., Any]) -> Callable[..., Any]:
    """For what takes no half gradients."""
    return lambda state, grads: step(state, [g.astype(jnp.float32) for g in grads])


def _naive(tx: Any) -> Callable[..., Any]:
    """What is written by hand: everything twice, and a choice between old and new at the end."""

    def step(state, grads):
        params, opt_state = state
        grads = [g.astype(jnp.float32) / SCALE for g in grads]
        is_finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in grads]))
        updates, new_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_state
        return jax.tree.map(lambda a, b: jnp.where(is_finite, a, b), new, state)

    return step


def _scale_in_place(state, grads):
    params, opt_state = state
    return [0.999 * p for p in params], opt_state


def _steps() -> dict[str, tuple[Callable[..., Any], Any]]:
    """The candidates: steps and their optimizers."""
    adamw = optax.adamw(RATE, weight_decay=DECAY)
    chain = optax.chain(optax.clip_by_global_norm(MAX_NORM), adamw)
    ours = ampx.fused.adamw(RATE, weight_decay=DECAY)
    by_face = _scaled(clipped(ours, MAX_NORM))
    guarded, wrapped = optax.apply_if_finite(chain, 5), _scaled(chain)
    steps = {
        "`fused.apply`, scale + clip + AdamW": (by_apply(_scaled(ours), MAX_NORM), _scaled(ours)),
        "the same by `update`": (by_update(by_face), by_face),
        "`fused.apply`, AdamW alone": (by_apply(ours), ours),
        BASELINE: (_in_float32(by_update(chain)), chain),
        "optax, AdamW alone": (_in_float32(by_update(adamw)), adamw),
        "`optax.apply_if_finite`": (_in_float32(by_update(guarded)), guarded),
        SLOW_TO_COMPILE[1]: (by_update(wrapped), wrapped),
        NAIVE: (_naive(chain), chain),
        COPY: (_scale_in_place, optax.identity()),
    }
    if jax.default_backend() == "gpu":
        kernels = by_apply(_scaled(ours), MAX_NORM, "pallas")
        steps['`fused.apply`, `backend="pallas"`'] = (kernels, _scaled(ours))
    return steps


def _compiled(size: Size, steps: dict[str, Any]) -> tuple[list[Candidate], dict[str, str]]:
    """The candidates that compile, and why the others do not."""
    candidates, failures, grads = [], {}, size.grads()
    for name, (step, tx) in steps.items():
        params = size.params()
        try:
            candidates.append(Candidate.compiled(name, step, (params, tx.init(params)), grads))
        except Exception as error:  # a kernel that this device has not
            if "pallas" not in name:
                raise
            failures[name] = f"not measured: {type(error).__name__}"
    return candidates, failures


# --- torch ---------------------------------------------------------------------------------------


def _torch_candidates(size: Size) -> Iterator[Candidate]:
    """Fused AdamW of torch: alone, clipped, and clipped with GradScaler's check."""
    for name, has_clip, has_check in (
        ("torch, fused AdamW alone", False, False),
        ("torch, clip + fused AdamW", True, False),
        ("torch, check + clip + fused AdamW", True, True),
    ):
        yield Candidate(name, _torch_step(size, has_clip, has_check), None, ())


def _torch_step(size: Size, has_clip: bool, has_check: bool) -> Callable[[None], None]:
    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    make = {"device": device, "dtype": torch.float32}
    params = [torch.nn.Parameter(torch.full((size.leaf,), 0.1, **make)) for _ in range(size.leaves)]
    for param in params:
        param.grad = torch.full((size.leaf,), 1e-3, **make)
    grads = [param.grad for param in params]
    optimizer = torch.optim.AdamW(params, lr=RATE, weight_decay=DECAY, fused=True)
    one, found = torch.ones((), **make), torch.zeros((), **make)
    if has_check:
        optimizer.grad_scale, optimizer.found_inf = None, found

    def step(_: None) -> None:
        if has_check:
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found, one)
        if has_clip:
            torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    return step


# --- tables --------------------------------------------------------------------------------------


def tail(size: Size, rounds: int, everything: bool = False) -> None:
    """All candidates on parameters of one size.

    Args:
      size: of parameters and gradients.
      rounds: of side-by-side timing.
      everything: also those that take minutes to compile.
    """
    steps = _steps()
    if size.leaves > ENOUGH_LEAVES and not everything:
        steps = {name: step for name, step in steps.items() if name not in SLOW_TO_COMPILE}
    candidates, failures = _compiled(size, steps)
    has_torch = torch is not None and size.grad_dtype == jnp.float32
    candidates += _torch_candidates(size) if has_torch else []
    take_turns(candidates, rounds)
    by_name = {candidate.name: candidate for candidate in candidates}
    rows = [_row(candidate, by_name, size) for candidate in candidates]
    rows += [[name, why, *["–"] * 6] for name, why in failures.items()]
    if torch is None:
        rows.append(["torch, fused AdamW", "not measured", *["–"] * 6])
    header = ["step", "ms, best / median", "ratio to naive AMP", "ratio to clip + AdamW"]
    header += ["ratio to AdamW", "of copy bandwidth", "temporary B a parameter", "compile, s"]
    print_table(f"Tail of a step, {size.title}", header, rows)


def _row(candidate: Candidate, by_name: dict[str, Candidate], size: Size) -> list[str]:
    def against(name: str) -> str:
        return ratio(candidate, by_name[name]) if name in by_name else "–"

    is_jax = candidate.data != ()
    return [
        candidate.name,
        f"{1e3 * min(candidate.seconds):.1f} / {candidate.median_ms:.1f}",
        against(NAIVE),
        against(BASELINE),
        against("optax, AdamW alone"),
        f"{_bandwidth_share(candidate, by_name[COPY], size):.2f}",
        f"{candidate.temp_bytes / size.elements:.2f}" if is_jax else "–",
        f"{candidate.compile_seconds:.1f}" if is_jax else "–",
    ]


def _bandwidth_share(candidate: Candidate, copy: Candidate, size: Size) -> float:
    """Bytes that the work needs at least, over the time it takes at the bandwidth of a copy."""
    floor, _ = FLOORS["AdamW" if "alone" in candidate.name else "AdamW, clipped"]
    halves = np.dtype(size.grad_dtype).itemsize == 2
    passes = 1 if "alone" in candidate.name else 2  # over gradients
    floor = 8 if candidate is copy else floor - 2 * passes * halves
    pairs = zip(candidate.seconds, copy.seconds, strict=True)
    return statistics.median(floor / 8 * theirs / ours for ours, theirs in pairs)


def optimizers(rounds: int) -> None:
    """`fused.apply` with a loss scale and a clip beside optax's chain without the scale."""
    makes = {
        "SGD, momentum": lambda kind: kind.sgd(RATE, momentum=0.9),
        "Lion": lambda kind: kind.lion(RATE),
        "Adadelta": lambda kind: kind.adadelta(RATE),
        "AdamW": lambda kind: kind.adamw(RATE),
        "LAMB": lambda kind: kind.lamb(RATE),
    }
    rows = []
    for name, make in makes.items():
        ours = _scaled(make(ampx.fused))
        theirs = optax.chain(optax.clip_by_global_norm(MAX_NORM), make(optax))
        steps = {"ours": (by_apply(ours, MAX_NORM), ours), "theirs": (by_update(theirs), theirs)}
        (mine, other), _ = _compiled(SIZE_OF_OPTIMIZERS, steps)
        take_turns([mine, other], rounds)
        times = [f"{1e3 * min(c.seconds):.1f} / {c.median_ms:.1f}" for c in (mine, other)]
        temporaries = [f"{c.temp_bytes / SIZE_OF_OPTIMIZERS.elements:.2f}" for c in (mine, other)]
        rows.append([name, *times, ratio(mine, other), " / ".join(temporaries)])
    print_table(
        f"Other optimizers, {SIZE_OF_OPTIMIZERS.title}",
        [
            "optimizer",
            "`fused.apply`, scale + clip: ms, best / median",
            "optax, clip: ms, best / median",
            "ratio",
            "temporary B a parameter: ours / optax",
        ],
        rows,
    )


def fused(rounds: int) -> None:
    """All tables."""
    traffic_table()
    for size in SIZES:
        tail(size, rounds)
    optimizers(rounds)
    flat_tail(rounds=rounds)


def _is_on_gpu() -> bool:
    try:
        return jax.default_backend() == "gpu"
    except RuntimeError:  # a platform is asked for that is not there
        return False


def main() -> None:
    """One size, or everything on a GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fused")
    parser.add_argument("--gpu", action="store_true", help="all tables, if there is a GPU")
    parser.add_argument("--rounds", type=int, default=12, help="rounds of side-by-side timing")
    parser.add_argument("--leaves", type=int, default=1)
    parser.add_argument("--leaf", type=int, default=50_000_000, help="elements of each")
    parser.add_argument("--half", action="store_true", help="gradients in bfloat16")
    parser.add_argument(
        "--everything", action="store_true", help="also what takes minutes to compile"
    )
    arguments = parser.parse_args()
    if arguments.gpu and not _is_on_gpu():
        sys.exit(
            "bench-gpu needs a GPU and a jax that sees it, and found none: install ampx with its "
            "extra [cuda], and set JAX_PLATFORMS=cuda,cpu"
        )
    device = jax.devices()[0].device_kind
    versions = f"jax {jax.__version__}, optax {optax.__version__}"
    versions += f", torch {torch.__version__}" if torch else ""
    print(f"{versions}, Python {platform.python_version()}, {device}, {os.cpu_count()} cores")
    if arguments.gpu:
        fused(arguments.rounds)
        return
    dtype = jnp.bfloat16 if arguments.half else jnp.float32
    tail(Size(arguments.leaves, arguments.leaf, dtype), arguments.rounds, arguments.everything)


if __name__ == "__main__":
    main()

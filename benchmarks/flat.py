"""What do flat buffers save when a model has thousands of small parameters?

With 2000 arrays of 5000 elements an optimizer spends its time on starting small loops. Flat
parameters hold all of them in one long buffer, and so do their gradients and moments: then one
long loop does the work.

Run `python -m benchmarks.flat`; `make bench ARGS=fused` includes it. The ratio is to optax on the
tree.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ampx
from benchmarks.fused_traffic import by_apply, by_update
from benchmarks.measuring import Candidate, print_table, ratio, take_turns


def flat_tail(leaves: int = 2000, size: int = 5000, rounds: int = 15) -> None:
    """Times AdamW for `leaves` parameters of `size` elements each, as a tree and as one buffer.

    The gradients of flat parameters are flat from the start, as a backward pass makes them, so that
    packing them is not part of the time.
    """
    rng = np.random.default_rng(0)

    def tree():
        return {f"w{i:04d}": jnp.asarray(rng.normal(size=size), jnp.float32) for i in range(leaves)}

    params, grads = tree(), tree()
    flat_params = ampx.fused.flatten(params)
    flat_grads = flat_params.like(grads)  # the same leaves at the same places of the buffer
    optaxs, ours = optax.adamw(1e-3), ampx.fused.adamw(1e-3)
    by_optax, by_ours = by_update(optaxs), by_apply(ours)

    candidates = [
        Candidate.compiled("optax, tree", by_optax, (params, optaxs.init(params)), grads),
        Candidate.compiled("fused.apply, tree", by_ours, (params, ours.init(params)), grads),
        Candidate.compiled(
            "fused.apply, flat", by_ours, (flat_params, ours.init(flat_params)), flat_grads
        ),
        Candidate.compiled(
            "optax, flat", by_optax, (flat_params, optaxs.init(flat_params)), flat_grads
        ),
    ]
    take_turns(candidates, rounds)
    rows = [
        [
            candidate.name,
            f"{candidate.median_ms:.1f}",
            f"{1e3 * min(candidate.seconds):.1f}",
            ratio(candidate, candidates[0]),
            f"{candidate.compile_seconds:.1f}",
        ]
        for candidate in candidates
    ]
    print_table(
        f"Flat parameters: AdamW, {leaves} of {size} elements, {jax.default_backend()}",
        ["", "median ms", "best ms", "of optax, tree", "compile s"],
        rows,
    )


if __name__ == "__main__":
    flat_tail()

"""Which of optax's transformations are bit-equal to optax under a loss scale, compiled?

    python tests/bit_equality.py                all of them
    python tests/bit_equality.py adam radam     some; a star stands for all that add up no elements

Scales are powers of two, so that scaling and unscaling are exact, and the same operations run. But
a step with a scale is another program, and compilers choose anew in each program: where to contract
a product and a sum to one rounding (FMA), and in which order a reduction adds. The first choice can
be taken away: `XLA_FLAGS=--xla_cpu_max_isa=AVX` compiles for an x86 without FMA. The second one
concerns only transformations that add up elements.
"""

import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

sys.path.append(str(pathlib.Path(__file__).parent.parent))
from benchmarks.optax_updates import build_steps, find_names

SCALE, STEPS = 1024.0, 4  # of `build_steps`
SHAPES = [(48, 32), (32,)]


def find_equal_forms(name: str) -> list[str]:
    """Those of "skipping" (as `train_step` runs it) and "derived" (`fuse`) that equal optax."""
    random = np.random.default_rng(0)

    def draw() -> list[jax.Array]:
        return [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in SHAPES]

    params, all_grads, results = draw(), [draw() for _ in range(STEPS)], {}
    for form, (step, tx) in build_steps(name).items():
        run, state = jax.jit(step), (params, tx.init(params))
        for grads in all_grads:
            state = run(state, grads if form == "optax" else [g * SCALE for g in grads])
        results[form] = state[0]
    expected = results.pop("optax")
    assert not any(map(np.array_equal, expected, params))
    return [form for form, found in results.items() if all(map(np.array_equal, found, expected))]


def adds_elements(name: str) -> bool:
    """Whether a step without a scale has a sum of elements, such as a norm, or a product."""
    step, tx = build_steps(name)["optax"]
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in SHAPES]
    program = str(jax.make_jaxpr(step)((params, jax.eval_shape(tx.init, params)), params))
    return any(f"{primitive}[" in program for primitive in ("reduce_sum", "dot_general"))


if __name__ == "__main__":
    print("XLA_FLAGS:", os.environ.get("XLA_FLAGS", ""))
    names = sys.argv[1:] or find_names()
    if names == ["*"]:
        names = [one for one in find_names() if not adds_elements(one)]
    for one in names:
        print(f"{one}:", *find_equal_forms(one), flush=True)

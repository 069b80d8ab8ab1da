"""Fused updates on a GPU: kernels equal XLA, update in place and repeat bit for bit.

Without a GPU all are skipped; `test_fused_pallas.py` runs the same steps in an interpreter.
"""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import assert_bit_equal, make_mesh
from test_fused_low_bit_kernels import CASES as LOW_BIT
from test_fused_low_bit_kernels import SHAPES as LOW_BIT_SHAPES
from test_fused_low_bit_kernels import same_but_for_last_bits
from test_fused_pallas import CASES, apply_step, by, by_optax, dynamic, near, normal

from ampx import fused

pytestmark = pytest.mark.gpu
SHAPES = {"w": (300, 130), "v": (278011,), "b": (7,), "s": (), "e": (0, 3), "m": (512, 512)}
SHAPES |= {f"u{k}": (1000 + k,) for k in range(20)}  # more than one launch
KERNELS = [case for case in CASES if case not in ("novograd", "groups")]


@pytest.fixture(autouse=True)
def on_one_of_several_gpus():
    with jax.set_mesh(make_mesh((1,), ("one",))):
        yield


def steps_of(dtype=jnp.float32):
    return [normal(i, dtype, SHAPES) for i in (1, 2, 3)]


@pytest.mark.parametrize("case", KERNELS)
def test_kernels_equal_xla_and_optax_on_a_gpu(case):
    args = normal(0, shapes=SHAPES), steps_of()
    actual = by("pallas", CASES[case](fused), *args)
    near(actual, by("xla", CASES[case](fused), *args))
    near(actual, by_optax(CASES[case], *args))


@pytest.mark.parametrize("name", ["adabelief", "adan", "cocob", "lamb", "rmsprop"])
def test_derived_rules_equal_optax_on_a_gpu(name):
    make = getattr(optax, name, None) or functools.partial(optax.contrib.cocob, alpha=100)
    tx = make() if name == "cocob" else make(0.1)
    args = normal(0, shapes=SHAPES), steps_of()
    # COCOB divides by sums of a few gradients, where last bits grow.
    tolerance = 2e-5 if name == "cocob" else 2e-6
    with jax.numpy_dtype_promotion("standard"):
        ours = by("pallas", fused.fuse(tx, strict=True), *args)
        near(ours, by_optax(lambda _: tx, *args), tolerance)


@pytest.mark.parametrize("param", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", ["adamw", "lamb"])
def test_half_types_on_a_gpu(case, param):
    args = dynamic(CASES[case](fused)), normal(0, param, SHAPES), steps_of(jnp.bfloat16)
    near(by("pallas", *args), by("xla", *args), 2e-6 if param == "float32" else 2.0**-7)


@pytest.mark.parametrize("case", LOW_BIT)
def test_low_bit_kernels_equal_xla_on_a_gpu(case):
    make, dtype, _ = LOW_BIT[case]
    steps = [normal(i, jnp.bfloat16, LOW_BIT_SHAPES) for i in (1, 2, 3)]
    args = make(), normal(0, dtype, LOW_BIT_SHAPES), steps
    same_but_for_last_bits(by("pallas", *args), by("xla", *args))


@pytest.mark.parametrize("case", ["adamw", "lamb"])
def test_a_skip_on_a_gpu_leaves_every_bit(case):
    tx = dynamic(CASES[case](fused))
    step = jax.jit(functools.partial(apply_step, tx, "pallas"))
    params = normal(0, shapes=SHAPES)
    params, state = step(params, tx.init(params), normal(1, shapes=SHAPES))
    bad = normal(2, shapes=SHAPES)
    bad["v"] = bad["v"].at[-1].set(jnp.nan)
    after, next_state = step(params, state, bad)
    assert_bit_equal((after, next_state.inner_state), (params, state.inner_state))


@pytest.mark.parametrize("case", ["adamw", "lamb"])
def test_steps_on_a_gpu_are_in_place_and_repeatable(case):
    tx, params, grads = CASES[case](fused), normal(0, shapes=SHAPES), steps_of()[0]
    state = tx.init(params)
    step = jax.jit(functools.partial(apply_step, tx, "pallas"), donate_argnums=(0, 1))
    memory = step.lower(params, state, grads).compile().memory_analysis()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert memory.temp_size_in_bytes < 0.05 * size
    assert memory.alias_size_in_bytes >= 3 * size
    twice = [step(*jax.tree.map(jnp.copy, (params, state)), grads) for _ in range(2)]
    assert_bit_equal(*twice)


@pytest.mark.parametrize("case", ["lamb", "int8"])
def test_xla_on_a_gpu_reduces_one_parameter_after_the_other(case):
    """It merged the loops of all, and wrote out what they were to reduce."""
    int8 = {"mu_dtype": "int8", "nu_dtype": "int8"}
    tx = fused.lamb(0.1) if case == "lamb" else fused.adamw(0.1, **int8)
    params = [jax.ShapeDtypeStruct((1024, 1024), jnp.float32)] * 8
    step = jax.jit(functools.partial(apply_step, tx, "xla"), donate_argnums=(0, 1))
    memory = step.lower(params, jax.eval_shape(tx.init, params), params).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2.5 * 4 * 1024**2

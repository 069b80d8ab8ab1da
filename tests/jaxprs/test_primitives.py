"""Families of primitives hold what has their property, and nothing else that can be tried."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from ampx.autocasting import tables
from ampx.jaxprs import primitives

# The parameters of primitives.
PARAMETERS = {
    None: ({}, {"accuracy": None}),  # most
    "convert_element_type": {"new_dtype": jnp.float16, "weak_type": False, "sharding": None},
    "integer_pow": {"y": 3},
    "name": {"name": "a"},
    "reduce_precision": {"exponent_bits": 5, "mantissa_bits": 10},
    "round": {"rounding_method": jax.lax.RoundingMethod.TO_NEAREST_EVEN},
}
NUMBERS = 0.1 + 0.8 * np.random.default_rng(0).random((3, 4, 4))  # where most functions have values
SHAPE = NUMBERS[0].shape
OPERANDS = [
    [jnp.asarray(array.astype(dtype)) for array in scale * NUMBERS]
    for dtype, scale in (("float32", 1), ("int32", 10), ("complex64", 1))
]
OPERANDS.append([array > 0.5 for array in OPERANDS[0]])
OPERANDS.append([jnp.ones_like(OPERANDS[0][0]), *OPERANDS[0][1:]])  # for polygamma
OPERANDS.append([1 + array for array in OPERANDS[0]])  # for zeta
OPERANDS.append([OPERANDS[0][0] > 0.5, *OPERANDS[0][1:]])  # for select_n
# Others whose results are their operands.
TRANSPARENT = primitives.PLACEMENTS | primitives.AXIS_TYPE_CASTS | {"optimization_barrier", "stage"}
# Elementwise on operands of one shape, but it also takes operands that it repeats along axes of
# size 1: such an operand must not be cut as the others are.
BROADCASTING = {"polynomial"}


def public_primitives():
    modules = (core.primitives, jax.lax, jax.lax.linalg)
    return {p.name: p for m in modules for p in vars(m).values() if isinstance(p, core.Primitive)}


PUBLIC = public_primitives()


def commutes_with_slicing(primitive):
    """Whether a primitive does, on the first operands of one shape that it takes; None: on none."""
    part = (slice(1, 3), slice(2, None))
    guesses = [PARAMETERS[primitive.name]] if primitive.name in PARAMETERS else PARAMETERS[None]
    for params, arrays, arity in itertools.product(guesses, OPERANDS, (1, 2, 3)):
        apply, operands = functools.partial(primitive.bind, **params), arrays[:arity]
        try:
            # Much faster than `eval_shape`, and most of what is tried is refused.
            if primitive.abstract_eval(*map(jax.typeof, operands), **params)[0].shape != SHAPE:
                continue
            whole, sliced = jax.jit(lambda *x, f=apply: (f(*x), f(*(a[part] for a in x))))(
                *operands
            )
        except Exception:
            continue  # it takes other operands or parameters
        if np.isfinite(whole).all():
            return np.allclose(whole[part], sliced, rtol=1e-4, atol=0)  # where it stops may differ
    return None


@pytest.mark.slow_but("add", "select_n", "integer_pow", "clamp", "polygamma")
@pytest.mark.parametrize("name", sorted(primitives.ELEMENTWISE & set(PUBLIC)))
def test_what_is_elementwise_commutes_with_slicing(name):
    assert commutes_with_slicing(PUBLIC[name]) is True


@pytest.mark.slow
def test_no_other_primitive_commutes_with_slicing():
    others = set(PUBLIC) - primitives.ELEMENTWISE - TRANSPARENT - BROADCASTING
    assert not [name for name in sorted(others) if commutes_with_slicing(PUBLIC[name])]


def test_what_chooses_gives_a_number_of_its_operands():
    where, x, y = OPERANDS[-1]
    for name in primitives.CHOOSING:
        operands = {"select_n": (where, x, y), "clamp": (x, y, x)}.get(name, (x, y))
        result = PUBLIC[name].bind(*operands)
        assert jnp.all((result == x) | (result == y)), name


def test_what_rearranges_gives_numbers_of_its_operand():
    x = OPERANDS[0][0]
    functions = {
        "broadcast_in_dim": lambda: jax.lax.broadcast(x, (2,)),
        "tile": lambda: jax.lax.tile(x, (2, 1)),
        "reshape": lambda: x.reshape(2, 8),
        "transpose": lambda: x.T,
        "squeeze": lambda: jax.lax.squeeze(x[:1], (0,)),
        "rev": lambda: jax.lax.rev(x, (0,)),
        "slice": lambda: jax.lax.slice(x, (1, 1), (3, 3)),
        "dynamic_slice": lambda: jax.lax.dynamic_slice(x, (5, 1), (2, 2)),  # out of bounds: clamped
        "split": lambda: jnp.stack(jnp.split(x, 2)),
        "unstack": lambda: jnp.stack(jnp.unstack(x)),
    }
    assert set(functions) == primitives.REARRANGING & set(PUBLIC)
    for name, function in functions.items():
        assert name in str(jax.make_jaxpr(function)()), name
        assert np.isin(function(), x).all(), name


def test_families_name_primitives_that_autocast_knows():
    families = [f for f in vars(primitives).values() if isinstance(f, frozenset)]
    assert len(families) > 10
    assert frozenset().union(*families) <= set(tables.DEFAULTS)

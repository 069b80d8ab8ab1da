"""Random keys of a generator that compiles fast, for tests of many programs with dropout.

JAX's own generator, threefry, is twenty rounds of additions, rotations and exclusive ors. A
pipeline folds numbers into its key for every micro-batch and layer, and draws in every branch of
its program, so that a third of the compiler's time goes into these rounds. Which numbers are drawn
does not matter to such a test: it compares with a reference that is given the same key. It does
matter that any two keys draw other numbers, and a hash of 32 bits is good enough for that.
"""

import math

import jax
import jax.numpy as jnp
from jax.extend import random as jax_random


def _mix(x):
    """A permutation of the 32-bit numbers in which each bit depends on each (`lowbias32`)."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> jnp.uint32(15))) * jnp.uint32(0x846CA68B)
    return x ^ (x >> jnp.uint32(16))


def _draw(key, shape):
    number = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    return _mix(_mix(number + jnp.uint32(1)) ^ key[0])


def _seed(seed):
    return _mix(jnp.asarray(seed).astype(jnp.uint32)).reshape(1)


def _split(key, shape):
    return _draw(key, tuple(shape))[..., None]


def _fold_in(key, data):
    return _mix(_mix(key) + jnp.asarray(data).astype(jnp.uint32) + jnp.uint32(1))


def _random_bits(key, bit_width, shape):
    return _mix(_draw(key, shape)).astype(jnp.dtype(f"uint{bit_width}"))


_HASH = jax_random.define_prng_impl(
    key_shape=(1,),
    seed=_seed,
    split=_split,
    random_bits=_random_bits,
    fold_in=_fold_in,
    name="hash",
)


def quick_key(seed):
    """A typed key, for all functions of `jax.random` that draw at most 32 bits a number."""
    return jax.random.key(seed, impl=_HASH)

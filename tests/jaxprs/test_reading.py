"""What is read out of constants."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ampx.jaxprs import reading

NUMBERS = [2, 2.0, True, np.float32(2), np.int8(2), np.bool_(True), jnp.bfloat16(2), np.array(2)]
OTHERS = [2j, np.complex64(2), np.zeros(2), np.zeros((), jax.dtypes.float0), None]


@pytest.mark.parametrize("value", [*NUMBERS, jnp.float16(2)], ids=lambda value: str(type(value)))
def test_a_scalar_constant_is_a_number(value):
    number = reading.number_of_constant(value)
    assert type(number) is float and number in (1.0, 2.0)


@pytest.mark.parametrize("value", OTHERS, ids=repr)
def test_what_has_no_real_number_is_none(value):
    assert reading.number_of_constant(value) is None


def test_a_number_beyond_a_dtype_is_infinite_without_a_warning():
    assert reading.round_number(-1e6, jnp.float16) == -np.inf
    assert reading.round_number(1e39, jnp.bfloat16) == np.inf
    assert reading.round_number(1.0 + 2**-9, jnp.bfloat16) == 1.0


def test_a_random_key_is_no_number():
    assert reading.number_of_constant(jax.random.key(0)) is None

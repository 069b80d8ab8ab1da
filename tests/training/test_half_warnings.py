"""Half precision that is legal, seldom meant, and worse than it need be is warned of."""

import warnings

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ampx

PARAMS = {"w": np.ones((2, 2), np.float32)}
SCALE, MASTERS = "float16 without a loss scale", "without masters"
# The policy, what is around the optimizer, the loss scale, and what is warned of.
CASES = {
    "no policy": (None, None, "policy", []),
    "float32": ("float32", None, "policy", []),
    "O1 in bfloat16": (ampx.opt_level("O1"), None, "policy", []),
    "O1 in float16": (ampx.opt_level("O1", half_dtype="float16"), None, "policy", []),
    "O1 without its scale": (ampx.opt_level("O1", half_dtype="float16"), None, None, [SCALE]),
    "O2 in float16": (ampx.opt_level("O2", half_dtype="float16"), None, "policy", []),
    "O2 without its scale": (ampx.opt_level("O2", half_dtype="float16"), None, None, [SCALE]),
    "O3": (ampx.opt_level("O3"), None, "policy", [MASTERS]),
    "casts to float16": ("p=f32,c=f16,o=f32", None, "policy", [SCALE]),
    "casts to float16, scaled": ("p=f32,c=f16,o=f32", None, "dynamic", []),
    "scaled inside": ("p=f32,c=f16,o=f32", ampx.dynamic_loss_scale, "policy", []),
    "stored in float16": ("p=f16", None, "policy", [SCALE, MASTERS]),
    "stored in bfloat16": ("p=bf16", None, "policy", [MASTERS]),
    "masters": ("p=bf16", ampx.master_weights, "policy", []),
    "split masters": ("p=bf16", ampx.fused.split_masters, "policy", []),
    "stochastic rounding": ("p=bf16", ampx.fused.stochastic_rounding, "policy", []),
    "16-true": ("16-true", None, "policy", [SCALE, MASTERS]),
    "a schedule": (ampx.precision_schedule("fast|step|0.5", total_steps=4), None, "policy", []),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_warned_of(case):
    policy, wrap, loss_scale, expected = CASES[case]
    tx = ampx.fused.sgd(0.1, momentum=0.9)
    if wrap is not None:
        tx = wrap(tx)
    step = ampx.train_step(lambda w, x: jnp.sum(x), tx, policy=policy, loss_scale=loss_scale)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step.init(PARAMS)
    assert [e for e in expected if any(e in str(w.message) for w in caught)] == expected
    assert len(caught) == len(expected)
    assert all(warning.filename == __file__ for warning in caught)


def test_the_warning_names_updates_that_are_lost():
    step = ampx.train_step(lambda w, x: jnp.sum(x), optax.sgd(0.1), policy="p=bf16")
    with pytest.warns(UserWarning, match="below 1/512 of its parameter"):
        step.init(PARAMS)
    params = np.linspace(1, 2, 129, dtype=np.float32).astype(jnp.bfloat16)[:-1]
    update = params.astype(np.float32) / 512 * 0.999
    assert np.array_equal((params + update).astype(jnp.bfloat16), params)
    assert (params[-1] + update[-1] * 1.01).astype(jnp.bfloat16) != params[-1]

"""A program as a user writes it, for type checkers alone: `make lint` reads it, nothing runs it.

`assert_type` holds what a checker must infer. A line with `pyrefly: ignore` must be an error: an
ignore that hides none is an error itself.
"""

from typing import assert_type

import jax
import jax.numpy as jnp
import optax

import ampx


def loss_fn(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
    return jnp.mean((batch @ params["w"]) ** 2)


# --- a step, its state and its report


step = ampx.train_step(loss_fn, optax.adam(1e-3), policy="O2", loss_scale="dynamic")
assert_type(step, ampx.TrainStep)
params = {"w": jnp.ones((3, 2))}
state = step.init(params)
assert_type(state, ampx.TrainState)
state, report = step(state, jnp.ones((8, 3)))
assert_type(state, ampx.TrainState)
assert_type(report, ampx.StepReport)
assert_type(state.step, jax.Array)
assert_type(report.loss, jax.Array)
assert_type(report.learning_rate, jax.Array | dict[str, jax.Array] | None)

# --- decorators keep the signature of what they wrap


@ampx.autocast(half_dtype=jnp.bfloat16)
def forward(x: jax.Array, *, train: bool) -> tuple[jax.Array, int]:
    return jnp.tanh(x), 1


assert_type(forward(jnp.ones(2), train=True), tuple[jax.Array, int])
forward(jnp.ones(2))  # pyrefly: ignore
forward("x", train=True)  # pyrefly: ignore
assert_type(ampx.autocast(loss_fn)(params, jnp.ones((8, 3))), jax.Array)
ampx.autocast(loss_fn)(params)  # pyrefly: ignore
assert_type(ampx.float_function(loss_fn)(params, jnp.ones((8, 3))), jax.Array)

# --- words are checked

ampx.train_step(loss_fn, optax.adam(1e-3), loss_scale="dynamical")  # pyrefly: ignore
ampx.opt_level("O5")  # pyrefly: ignore
ampx.opt_level("O1", half_dtype="float16")
ampx.all_reduce("data", op="average")  # pyrefly: ignore
ampx.dynamic_loss_scale(optax.adam(1e-3), on_floor="raise")  # pyrefly: ignore

# --- the pieces of a step by hand

tx = ampx.dynamic_loss_scale(optax.adam(1e-3))
opt_state = tx.init(params)
result = ampx.value_and_grad(loss_fn)(params, jnp.ones((8, 3)))
assert_type(result, ampx.GradResult)
assert_type(ampx.current_loss_scale(opt_state), jax.Array)
assert_type(ampx.find_loss_scale_state(opt_state), ampx.LossScaleState | None)
assert_type(ampx.metrics(opt_state), dict[str, jax.Array])
assert_type(ampx.lint_step(step)(state, jnp.ones((8, 3))).ok, bool)

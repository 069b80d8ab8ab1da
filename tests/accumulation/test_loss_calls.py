"""A loss that does not take what it is called with: the error tells what was left out above."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import ampx

PARAMS = {"w": jnp.ones(2)}
BATCH = {"x": jnp.ones((4, 2))}
KEY = jax.random.key(0)


def plain(params, batch):
    return jnp.mean(batch["x"] @ params["w"])


def with_key(params, batch, key):
    return plain(params, batch) + 0 * jax.random.normal(key)


def in_two_steps(params, batch):
    return plain(params, batch, 3)


class WithKey:
    def __call__(self, params, batch, key):
        return with_key(params, batch, key)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(2, 1, rngs=rngs)
        self.dropout = nnx.Dropout(0.5)

    def __call__(self, x, rngs):
        return self.dropout(self.layer(x), rngs=rngs)


def of_model(model, batch):
    return jnp.mean(model(batch["x"], batch["rngs"]))


def with_rngs():
    return {**BATCH, "rngs": nnx.Rngs(1)}


def by_train_step(params, batch):
    step = ampx.train_step(with_key, optax.sgd(0.1), loss_scale="dynamic")
    return step(step.init(params), batch)


grad_of = ampx.value_and_grad
CASES = {
    "no key": (lambda: grad_of(with_key)(PARAMS, BATCH), "missing .*'key'.*give it a key"),
    "no key, micro-batches": (
        lambda: grad_of(with_key, num_microbatches=2)(PARAMS, BATCH),
        "missing .*'key'.*give it a key",
    ),
    "no key, an object": (lambda: grad_of(WithKey())(PARAMS, BATCH), "missing .*'key'.*give it a"),
    "no key, a step": (lambda: by_train_step(PARAMS, BATCH), "init of a train step"),
    "a key too many": (
        lambda: grad_of(plain)(PARAMS, BATCH, key=KEY),
        r"loss_fn\(params, batch, key\).*leave key= out",
    ),
    "a state": (
        lambda: grad_of(plain)(PARAMS, BATCH, model_state={"mean": jnp.ones(1)}),
        r"loss_fn\(params, batch, model_state=model_state\)",
    ),
    "parts of a tuple": (
        lambda: grad_of(lambda params, x, y: 0.0)(PARAMS, (jnp.ones(2), jnp.ones(2))),
        "missing .*'y'.*the batch is one argument.*x, y = batch",
    ),
    "parts of a dict": (
        lambda: grad_of(lambda params, x, y: 0.0)(PARAMS, {"x": jnp.ones(2), "y": jnp.ones(2)}),
        r"the batch is one argument.*x = batch\['x'\]",
    ),
    "a tuple and no key": (
        lambda: grad_of(with_key)(PARAMS, (jnp.ones(2), jnp.ones(2))),
        "missing .*'key'.*give it a key",
    ),
    "parts of a tuple, with a key": (
        lambda: grad_of(lambda params, x, y, key: 0.0)(PARAMS, (jnp.ones(2), jnp.ones(2)), key=KEY),
        "the batch is one argument",
    ),
    "an nnx model with a key": (
        lambda: grad_of(lambda model, batch, key: 0.0)(Model(nnx.Rngs(0)), BATCH),
        "give it a key",
    ),
    "random numbers of nnx in the batch": (
        lambda: grad_of(of_model)(Model(nnx.Rngs(0)), with_rngs()),
        "nnx object in the batch",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_error_names_what_the_loss_is_called_with(case):
    call, words = CASES[case]
    with pytest.raises(TypeError, match=words):
        call()


def test_an_error_inside_of_a_loss_stays_what_it_is():
    with pytest.raises(
        TypeError, match=r"^plain\(\) takes 2 positional arguments but 3 were given"
    ):
        grad_of(in_two_steps)(PARAMS, BATCH)
    with pytest.raises(TypeError, match="unsupported operand"):
        grad_of(lambda params, batch: params + batch)(PARAMS, BATCH)


def test_an_nnx_model_in_the_batch_may_be_read():
    model, teacher = nnx.Linear(2, 1, rngs=nnx.Rngs(0)), nnx.Linear(2, 1, rngs=nnx.Rngs(1))

    def loss_fn(model, batch):
        return jnp.mean((model(batch["x"]) - batch["teacher"](batch["x"])) ** 2)

    result = grad_of(loss_fn)(model, {**BATCH, "teacher": teacher})
    expected, _ = nnx.value_and_grad(loss_fn)(model, {**BATCH, "teacher": teacher})
    assert result.loss == expected


@pytest.mark.parametrize("taker", ["value_and_grad", "init"])
def test_a_whole_training_state_is_no_parameters(taker):
    step = ampx.train_step(plain, optax.sgd(0.1), loss_scale="dynamic")
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=step.tx)
    for whole in (state, step.init(PARAMS)):
        take = step.init if taker == "init" else functools.partial(grad_of(plain), batch=BATCH)
        with pytest.raises(TypeError, match=r"whole training state, a TrainState: .*state\.params"):
            take(whole)

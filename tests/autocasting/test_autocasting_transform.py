"""autocast as a transformation: its options, what it passes on, flax models, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from helpers import assert_bit_equal

import ampx

X = jax.random.normal(jax.random.key(0), (16, 8))
W = jax.random.normal(jax.random.key(1), (8, 8)) / 4
HALVES = [jnp.bfloat16, jnp.float16]


def loss(w, x):
    return jnp.mean(jnp.square(jnp.tanh(x @ w)))


@pytest.mark.parametrize("half", HALVES)
def test_gradients_have_the_parameters_dtype_and_nearly_the_float32_value(half):
    grads = jax.grad(ampx.autocast(loss, half_dtype=half))(W, X)
    expected = jax.grad(loss)(W, X)
    assert grads.dtype == jnp.float32
    error = optax.tree.norm(grads - expected) / optax.tree.norm(expected)
    assert 0 < error < (0.01 if half == jnp.bfloat16 else 0.002)


def test_output_is_as_computed_or_as_traced():
    def product(x):
        return {"y": x @ W, "n": 3}

    assert ampx.autocast(product)(X)["y"].dtype == jnp.bfloat16
    original = ampx.autocast(product, output="original")(X)
    assert original["y"].dtype == jnp.float32
    assert_bit_equal(original["y"], ampx.autocast(product)(X)["y"].astype(jnp.float32))


def test_disabled_it_is_the_function_itself_even_inside():
    off = ampx.autocast(loss, enabled=False)
    assert_bit_equal(off(W, X), loss(W, X))

    def mixed(w, x):
        return ampx.autocast(lambda a, b: a @ b, enabled=False)(x, w), x @ w

    inside, around = jax.eval_shape(ampx.autocast(mixed), W, X)
    assert (inside.dtype, around.dtype) == (jnp.float32, jnp.bfloat16)


def test_what_is_no_array_is_passed_on():
    @ampx.autocast
    def f(x, how, *, times, axis=None, flag=True):
        assert isinstance(times, int) and isinstance(flag, bool)
        return getattr(jnp, how["name"])(x @ W, axis=axis) * times if flag else x

    assert f(X, {"name": "sum"}, times=2, axis=0).shape == (8,)
    assert f(X, {"name": "sum"}, times=2, flag=False).shape == (16, 8)


def test_python_numbers_stay_weak():
    assert ampx.autocast(lambda x, s: (x @ W) * s)(X, 2.5).dtype == jnp.bfloat16


@pytest.mark.parametrize("array", [np.asarray(X), np.float32(2.0), X.astype(jnp.bfloat16)])
def test_numpy_and_half_arguments(array):
    assert ampx.autocast(lambda x: jnp.sin(x * x))(array).dtype == array.dtype


def test_a_prng_key_gives_the_same_numbers():
    def draw(key):
        return jax.random.normal(key, (8,)), jax.random.bernoulli(key, 0.3, (8,))

    for key in (jax.random.key(3), jax.random.PRNGKey(3)):
        assert_bit_equal(ampx.autocast(draw)(key), draw(key))


def test_closures_are_read_anew_at_every_call():
    held = {"w": W}
    f = ampx.autocast(lambda x: x @ held["w"])
    before = f(X)
    held["w"] = 2 * W
    np.testing.assert_array_equal(f(X), 2 * before)


def test_it_decorates_methods_and_keeps_names():
    class Model:
        @ampx.autocast
        def forward(self, x):
            """Doc."""
            return x @ W

    assert Model().forward(X).dtype == jnp.bfloat16
    assert (Model.forward.__name__, Model.forward.__doc__) == ("forward", "Doc.")


def test_an_error_inside_leaves_no_autocast_behind():
    def broken(x):
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        ampx.autocast(broken)(X)
    marked = ampx.half_function(lambda x: x * 2)
    assert marked(X).dtype == jnp.float32


def test_a_function_jitted_before_is_traced_anew_inside():
    inner = jax.jit(ampx.half_function(lambda x: x * 2))
    assert inner(X).dtype == jnp.float32
    assert ampx.autocast(lambda x: inner(x))(X).dtype == jnp.bfloat16
    assert inner(X).dtype == jnp.float32


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(half_dtype=jnp.float32), ValueError, "must be float16 or bfloat16, got float32"),
        (dict(half_dtype=jnp.int8), ValueError, "must be float16 or bfloat16, got int8"),
        (dict(output="half"), ValueError, "output must be .*as_is.*original.*'half'"),
        (dict(custom_vjp="orig"), ValueError, "custom_vjp must be .*transform.*opaque.*'orig'"),
        (dict(rules=None), TypeError, "rules must come from"),
    ],
)
@pytest.mark.parametrize("of", [ampx.autocast, ampx.explain])
def test_bad_options_are_refused_before_any_call(of, options, error, message):
    with pytest.raises(error, match=message):
        of(loss, **options)


def test_branching_on_values_fails_as_under_jit():
    with pytest.raises(jax.errors.TracerBoolConversionError):
        ampx.autocast(lambda x: x if x.sum() > 0 else -x)(X)


class Cnn(nn.Module):
    @nn.compact
    def __call__(self, x, *, train):
        x = nn.Conv(4, (3, 3))(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(3)(nn.LayerNorm()(x.reshape(x.shape[0], -1)))


@pytest.mark.slow
def test_linen_statistics_dropout_and_gradients():
    model, images = Cnn(), jax.random.normal(jax.random.key(2), (4, 8, 8, 3))
    variables = model.init(jax.random.key(0), images, train=False)

    def loss(params, images):
        rest = {"batch_stats": variables["batch_stats"]}
        logits, new = model.apply(
            {"params": params, **rest},
            images,
            train=True,
            mutable=["batch_stats"],
            rngs={"dropout": jax.random.key(1)},
        )
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1)), new["batch_stats"]

    of = functools.partial(jax.value_and_grad, has_aux=True)
    (half_loss, half_stats), half_grads = of(ampx.autocast(loss))(variables["params"], images)
    (full_loss, full_stats), full_grads = of(loss)(variables["params"], images)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((half_stats, half_grads)))
    np.testing.assert_allclose(half_loss, full_loss, rtol=2e-3)
    for half, full in zip(*map(jax.tree.leaves, (half_stats, full_stats)), strict=True):
        np.testing.assert_allclose(half, full, rtol=5e-3, atol=1e-4)
    explained = ampx.explain(loss)(variables["params"], images)
    assert explained.products_in_half() == (2, 2)


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.dense(x)))

    def embed(self, x):
        return self.dense(x)


def make_net():
    return NnxNet(nnx.Rngs(0))


NNX_CALLS = {
    "as an argument": lambda net: ampx.autocast(lambda net, x: net(x))(net, X),
    "in a pytree": lambda net: ampx.autocast(lambda tree, x: tree["net"](x))({"net": net}, X),
    "as a keyword": lambda net: ampx.autocast(lambda x, net: net(x))(X, net=net),
    "twice, still one": lambda net: ampx.autocast(lambda a, b, x: b(x))(net, net, X),
    "itself": lambda net: ampx.autocast(net)(X),
    "bound method": lambda net: ampx.autocast(net.__call__)(X),
    "under nnx.jit": lambda net: nnx.jit(ampx.autocast(lambda net, x: net(x)))(net, X),
    "around nnx.jit": lambda net: ampx.autocast(nnx.jit(lambda net, x: net(x)))(net, X),
    "under nnx.grad": lambda net: nnx.grad(ampx.autocast(lambda net, x: net(x).sum()))(net, X),
    "around nnx.grad": lambda net: ampx.autocast(nnx.grad(lambda net, x: net(x).sum()))(net, X),
}


@pytest.mark.parametrize("call", NNX_CALLS.values(), ids=NNX_CALLS)
def test_an_nnx_module_keeps_what_the_call_changed(call):
    reference, net = make_net(), make_net()
    reference(X)
    call(net)
    assert net.norm.mean[...].dtype == jnp.float32
    assert np.any(net.norm.mean[...] != 0)
    np.testing.assert_allclose(net.norm.mean[...], reference.norm.mean[...], atol=1e-3)
    assert net.dropout.rngs.count[...] == reference.dropout.rngs.count[...] == 1
    assert net.dense.kernel[...].dtype == jnp.float32


def test_nnx_gradients_are_float32_and_products_half():
    net = make_net()
    grads = nnx.grad(ampx.autocast(lambda net, x: jnp.mean(net(x) ** 2)))(net, X)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(grads))
    assert ampx.explain(net)(X).products_in_half() == (1, 1)


def test_a_whole_nnx_step_under_autocast_trains():
    net = make_net()
    optimizer = nnx.Optimizer(net, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    @ampx.autocast
    def step(net, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda net: jnp.mean(net(x) ** 2))(net)
        optimizer.update(net, grads)
        return loss

    before = net.dense.kernel[...]
    losses = [step(net, optimizer, X) for _ in range(3)]
    assert np.all(np.isfinite(losses))
    assert optimizer.step[...] == 3
    assert np.any(before != net.dense.kernel[...])


def test_an_nnx_module_of_an_outer_trace_may_be_read():
    net = make_net()

    @jax.jit
    def f(x):
        return ampx.autocast(lambda dense, x: dense(x))(net.dense, x)

    assert f(X).dtype == jnp.bfloat16


def test_an_nnx_module_that_is_closed_over_is_refused_by_flax():
    net = make_net()
    with pytest.raises(Exception, match="Cannot mutate BatchStat from a different trace level"):
        ampx.autocast(lambda x: net(x))(X)


def test_explaining_changes_no_nnx_module():
    net = make_net()
    ampx.explain(net)(X)
    assert net.dropout.rngs.count[...] == 0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16], ids=["jax", "numpy"])
def test_a_dtype_is_no_function(dtype):
    with pytest.raises(
        TypeError, match="fun must be a function.* got the dtype .*float16.*half_dtype="
    ):
        ampx.autocast(dtype)

import functools

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from helpers import assert_bit_equal

import ampx

HALVES = ("float16", "bfloat16")
# Norms by type, so that the names in these small models do not matter.
EVERYTHING = dict(keep_norm_float32=lambda path: True)


def o2(half="float16", **options):
    return ampx.opt_level("O2", half_dtype=half, **options)


def spread(shape, seed=0):
    """Numbers whose mean and variance float16 gets wrong."""
    return 30.0 + 100.0 * jax.random.normal(jax.random.key(seed), shape)


SEEN: list[str] = []  # flax would take a list in a module for a part of the model


@pytest.fixture(autouse=True)
def _forget():
    SEEN.clear()


def note(x):
    SEEN.append(x.dtype.name)
    return x


LINEN_NORMS = {
    "BatchNorm": functools.partial(nn.BatchNorm, use_running_average=False),
    "LayerNorm": nn.LayerNorm,
    "GroupNorm": functools.partial(nn.GroupNorm, num_groups=2),
    "RMSNorm": nn.RMSNorm,
}
NNX_NORMS = {
    "BatchNorm": nnx.BatchNorm,
    "LayerNorm": nnx.LayerNorm,
    "GroupNorm": functools.partial(nnx.GroupNorm, num_groups=2),
    "RMSNorm": nnx.RMSNorm,
}


# --- linen ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_name", [False, True], ids=["by place", "by name"])
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("kind", LINEN_NORMS)
def test_linen_norm_computes_as_in_float32_and_returns_the_dtype_it_was_given(kind, half, by_name):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            norm = LINEN_NORMS[kind]()
            return note(norm(x=x) if by_name else norm(x))

    x = spread((4, 8)).astype(half)
    variables = Model().init(jax.random.key(0), x.astype(jnp.float32))
    apply = functools.partial(Model().apply, mutable=["batch_stats"])
    expected, stats = apply(variables, x.astype(jnp.float32))
    SEEN.clear()
    out, half_stats = o2(half, **EVERYTHING).call(apply, variables, x)
    assert SEEN == [half]
    assert out.dtype == jnp.float32
    assert_bit_equal(out, expected.astype(half).astype(jnp.float32))
    assert_bit_equal(half_stats, stats)


@pytest.mark.parametrize("norm_dtype", [None, "float16", "float32"])
def test_explicit_dtype_on_a_linen_layer_is_respected(norm_dtype):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = note(nn.LayerNorm(dtype=norm_dtype)(x))
            return note(nn.Dense(2, dtype=jnp.float32)(x))

    x = jnp.ones((2, 4))
    with jax.numpy_dtype_promotion("standard"):  # flax's norms promote implicitly in half
        variables = Model().init(jax.random.key(0), x)
        SEEN.clear()
        o2().call(Model().apply, variables, x)
    assert SEEN == [norm_dtype or "float16", "float32"]


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = note(nn.LayerNorm()(x))
        y = note(nn.Dense(4)(y))
        return x + y


def block_models():
    class Plain(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Block()(Block()(x))

    class Remat(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.remat(Block)()(x)

    class Scan(nn.Module):
        @nn.compact
        def __call__(self, x):
            scan = nn.scan(
                lambda block, carry, _: (block(carry), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=3,
            )
            return scan(Block(name="blocks"), x, None)[0]

    class Setup(nn.Module):
        def setup(self):
            self.blocks = [Block() for _ in range(2)]

        def __call__(self, x):
            return self.tail(self.blocks[0](x))

        def tail(self, x):
            return self.blocks[1](x)

    return {
        "plain": Plain(),
        "remat": Remat(),
        "scan": Scan(),
        "setup": Setup(),
        "remat outside": nn.remat(Plain)(),
    }


@pytest.mark.whole_but(
    "bfloat16-setup", "float16-scan", "float16-plain", "float16-remat", "bfloat16-remat outside"
)
@pytest.mark.slow_but("bfloat16-setup")
@pytest.mark.parametrize("kind", block_models())
@pytest.mark.parametrize("half", HALVES)
def test_blocks_compute_in_half_with_float32_norms_however_they_are_nested(kind, half):
    model, x = block_models()[kind], spread((2, 4))
    params = model.init(jax.random.key(0), x)["params"]
    recipe = o2(half)
    names = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.dtype.name
        for path, leaf in jax.tree_util.tree_leaves_with_path(recipe.half_params(params))
    }
    assert set(names.values()) == {half, "float32"}
    assert all((dtype == "float32") == ("LayerNorm" in name) for name, dtype in names.items())

    def loss(params, x):
        out = model.apply({"params": params}, x)
        assert out.dtype == jnp.float32
        return jnp.mean(out**2)

    SEEN.clear()
    value, grads = jax.jit(jax.value_and_grad(functools.partial(recipe.call, loss)))(params, x)
    assert set(SEEN) == {half}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(grads)} == {"float32"}
    rough = 2.0**-8 if half == "float16" else 2.0**-5  # a few roundings to half
    np.testing.assert_allclose(value, loss(params, x), rtol=rough)


def test_only_the_outermost_linen_call_casts_inputs_and_outputs():
    class Inner(nn.Module):
        @nn.compact
        def __call__(self, x):
            return note(x.astype(jnp.float32))

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x, *, ids):
            x = Inner()(note(x))
            note(ids)
            return x, x.astype(jnp.float16), ids

    x, ids = jnp.ones((2, 4)), jnp.arange(2)
    out = o2().call(lambda params: Outer().apply(params, x, ids=ids), {})
    assert SEEN == ["float16", "float32", "int32"]
    assert [leaf.dtype.name for leaf in out] == ["float32", "float32", "int32"]


def test_other_methods_and_bound_modules_are_models_too():
    class Model(nn.Module):
        def setup(self):
            self.norm, self.head = nn.LayerNorm(), nn.Dense(2)

        def __call__(self, x):
            return self.head(self.encode(x))

        def encode(self, x):
            note(x)
            return self.norm(x)

    model, x = Model(), jnp.ones((2, 4))
    variables = model.init(jax.random.key(0), x)
    SEEN.clear()
    ways = [
        lambda v: model.apply(v, x, method="encode"),
        lambda v: model.bind(v).encode(x),
        lambda v: model.bind(v)(x),
    ]
    for way in ways:
        assert o2().call(way, variables).dtype == jnp.float32
    assert SEEN == ["float16"] * 3


def test_method_of_an_unbound_module_that_applies_itself():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(note(x))

        def loss(self, params, x):
            return jnp.mean(self.apply({"params": params}, x))

    model, x = Model(), jnp.ones((2, 4))
    params = model.init(jax.random.key(0), x)["params"]
    SEEN.clear()
    assert o2().call(model.loss, params, x).dtype == jnp.float32
    assert SEEN == ["float16"]


def test_a_model_that_raises_does_not_switch_casting_off_for_the_next():
    model, x = nn.Dense(2), jnp.ones((2, 4))
    params = model.init(jax.random.key(0), x)

    def first_fails(params):
        with pytest.raises(flax.errors.ScopeParamShapeError):
            model.apply(params, x[:, :1])
        return model.apply(params, x.astype(jnp.float16))

    assert o2().call(first_fails, params).dtype == jnp.float32


def test_nothing_is_left_behind_outside_the_call():
    model, x = nn.Dense(2), jnp.ones((2, 4), jnp.float16)
    params = model.init(jax.random.key(0), x.astype(jnp.float32))
    params = ampx.cast_floating(params, jnp.float16)
    o2().call(model.apply, params, x)
    assert model.apply(params, x).dtype == jnp.float16


@pytest.mark.parametrize("level, options", [("O3", {}), ("O2", dict(keep_norm_float32=False))])
def test_norms_are_half_where_the_level_says_so(level, options):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return note(nn.LayerNorm()(x))

    x = spread((2, 8))
    variables = Model().init(jax.random.key(0), x)
    SEEN.clear()
    recipe = ampx.opt_level(level, half_dtype="float16", **options)
    with jax.numpy_dtype_promotion("standard"):
        out = recipe.call(Model().apply, variables, x)
    assert SEEN == ["float16"] and out.dtype == jnp.float32


@pytest.mark.parametrize("is_nnx", [False, True])
def test_a_norm_that_the_rule_leaves_half_is_left_alone(is_nnx):
    recipe = o2(keep_norm_float32=lambda path: False)
    with jax.numpy_dtype_promotion("standard"):
        if is_nnx:
            model = nnx.LayerNorm(4, rngs=nnx.Rngs(0))
            out = recipe.wrap(lambda m, x: m(x))(model, spread((2, 4)))
            half = nnx.LayerNorm(4, dtype=jnp.float16, param_dtype=jnp.float16, rngs=nnx.Rngs(0))
            expected = half(spread((2, 4)).astype(jnp.float16))
        else:
            model, x = nn.LayerNorm(), spread((2, 4))
            variables = model.init(jax.random.key(0), x)
            out = recipe.call(model.apply, variables, x)
            half_variables = recipe.half_params(variables)
            expected = model.apply(half_variables, x.astype(jnp.float16))
    assert_bit_equal(out, expected.astype(jnp.float32))


# --- nnx -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_name", [False, True], ids=["by place", "by name"])
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("kind", NNX_NORMS)
def test_nnx_norm_computes_as_in_float32_and_returns_the_dtype_it_was_given(kind, half, by_name):
    class Model(nnx.Module):
        def __init__(self):
            self.layer = NNX_NORMS[kind](8, rngs=nnx.Rngs(0))

        def __call__(self, x):
            x = self.layer(x=x) if by_name else self.layer(x)
            note(x)
            return x

    x = spread((4, 8)).astype(half)
    reference, model = Model(), Model()
    expected = reference(x.astype(jnp.float32))
    SEEN.clear()
    out = o2(half, **EVERYTHING).wrap(lambda m, x: m(x))(model, x)
    assert SEEN == [half] and out.dtype == jnp.float32
    assert_bit_equal(out, expected.astype(half).astype(jnp.float32))
    assert_bit_equal(nnx.state(model), nnx.state(reference))


class NNXModel(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(4, 8, rngs=rngs)
        self.norm1 = nnx.BatchNorm(8, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs), nnx.LayerNorm(8, rngs=rngs)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        note(x)
        x = self.norm1(self.dense(x))
        note(x)
        x = self.blocks[0](x)
        note(x)
        return self.dropout(x)


@pytest.mark.parametrize("transform", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_wrap_changes_nothing_of_an_nnx_model_but_its_statistics_and_random_counters(transform):
    model = NNXModel(nnx.Rngs(0))
    before = jax.tree.map(jnp.copy, nnx.state(model))
    graphdef = nnx.graphdef(model)
    SEEN.clear()
    forward = transform(o2().wrap(lambda m, x: m(x)))
    out = forward(model, spread((4, 4)))
    assert SEEN == ["float16"] * 3 and out.dtype == jnp.float32
    assert type(model) is NNXModel and type(model.norm1) is nnx.BatchNorm
    assert nnx.graphdef(model) == graphdef
    after = nnx.state(model)
    assert_bit_equal(nnx.filter_state(after, nnx.Param), nnx.filter_state(before, nnx.Param))
    stats, old_stats = (
        nnx.filter_state(after, nnx.BatchStat),
        nnx.filter_state(before, nnx.BatchStat),
    )
    for new, old in zip(*map(jax.tree.leaves, (stats, old_stats)), strict=True):
        assert new.dtype == jnp.float32 and (new != old).any()
    counts = nnx.filter_state(after, nnx.RngCount), nnx.filter_state(before, nnx.RngCount)
    assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, counts), strict=True))
    assert not jnp.array_equal(forward(model, spread((4, 4))), out), "dropout must go on"


def test_nnx_loss_is_traced_once_by_its_caller():
    traces = []

    @nnx.jit
    def forward(model, x):
        traces.append(1)
        return o2().wrap(lambda m, x: m(x))(model, x)

    model = NNXModel(nnx.Rngs(0))
    for seed in range(3):
        forward(model, spread((4, 4), seed))
    assert len(traces) == 1


def test_explicit_dtype_on_an_nnx_norm_is_respected():
    class Model(nnx.Module):
        def __init__(self):
            self.norm = nnx.LayerNorm(4, dtype=jnp.float32, rngs=nnx.Rngs(0))

        def __call__(self, x):
            x = self.norm(x)
            note(x)
            return x

    with jax.numpy_dtype_promotion("standard"):
        o2().wrap(lambda m, x: m(x))(Model(), jnp.ones((2, 4)))
    assert SEEN == ["float32"]


def test_an_nnx_model_that_is_itself_a_norm():
    norm, x = nnx.RMSNorm(4, rngs=nnx.Rngs(0)), spread((2, 4)).astype(jnp.float16)
    out = o2(**EVERYTHING).wrap(lambda m, x: m(x))(norm, x)
    assert_bit_equal(out, norm(x.astype(jnp.float32)).astype(jnp.float16).astype(jnp.float32))
    assert type(norm) is nnx.RMSNorm


def test_nnx_modules_shared_in_two_places_stay_shared():
    class Tied(nnx.Module):
        def __init__(self):
            self.a = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
            self.b = self.a

        def __call__(self, x):
            return self.b(self.a(x))

    model, reference = Tied(), Tied()
    x = spread((4, 4)).astype(jnp.float16)
    out = o2(**EVERYTHING).wrap(lambda m, x: m(x))(model, x)
    middle = reference.a(x.astype(jnp.float32)).astype(jnp.float16)
    expected = reference.b(middle.astype(jnp.float32)).astype(jnp.float16)
    assert_bit_equal(out, expected.astype(jnp.float32))
    assert_bit_equal(nnx.state(model), nnx.state(reference))
    assert model.a is model.b


# --- what stays half when something else stays float32 -------------------------------------------


class OwnNorm(nn.Module):
    """A norm that somebody wrote: no flax type, only a name."""

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.InstanceNorm, OwnNorm])
def test_linen_layers_after_any_norm_compute_in_half(norm):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = norm(name="first_norm")(nn.Dense(4)(x))
            seen.append(h.dtype.name)
            return nn.Dense(2)(h)

    seen, net = [], Net()
    params = net.init(jax.random.key(0), jnp.ones((2, 5, 3)))
    seen.clear()
    recipe = ampx.opt_level("O2")
    jaxpr = jax.make_jaxpr(lambda p, x: recipe.call(net.apply, p, x))(params, jnp.ones((2, 5, 3)))
    assert seen == ["bfloat16"]
    assert dot_dtypes(jaxpr) == {"bfloat16"}


class TokenModel(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(11, 8, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.out = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, tokens):
        return self.out(self.norm(self.embed(tokens)))


def dot_dtypes(jaxpr):
    dots = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "dot_general"]
    assert dots
    return {v.aval.dtype.name for e in dots for v in e.invars}


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_nnx_embedding_does_not_widen_the_model(level):
    model, tokens = TokenModel(nnx.Rngs(0)), jnp.arange(6).reshape(2, 3)
    recipe = ampx.opt_level(level)

    def logits(model):
        return recipe.call(lambda m, t: m(t), model, tokens)

    graphdef, state = nnx.split(model)
    # flax's norms in half mix dtypes themselves.
    with jax.numpy_dtype_promotion("standard" if level == "O3" else "strict"):
        jaxpr = jax.make_jaxpr(lambda s: logits(nnx.merge(graphdef, s)))(state)
    assert dot_dtypes(jaxpr) == {"bfloat16"}
    assert model.embed.dtype == jnp.float32, "the caller's model was changed"


@pytest.mark.parametrize("how", ["call", "lambda", "bind"])
def test_the_outermost_linen_module_is_the_model(how):
    class Net(nn.Module):
        def setup(self):
            self.embed, self.out = nn.Embed(7, 4), nn.Dense(3)

        def __call__(self, tokens):
            return self.out(self.embed(tokens))

    net, tokens = Net(), jnp.arange(4)
    params = net.init(jax.random.key(0), tokens)

    def logits(params):
        if how == "call":
            return net.apply(params, tokens)
        if how == "lambda":
            return net.apply(params, tokens, method=lambda m, t: m.out(m.embed(t)))
        bound = net.bind(params)
        return bound.out(bound.embed(tokens))

    out = ampx.opt_level("O2").call(logits, params)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, logits(params), atol=2e-2)

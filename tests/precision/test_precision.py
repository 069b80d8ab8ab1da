import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from helpers import assert_bit_equal
from hypothesis import given
from hypothesis import strategies as st

import ampx

NAMES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}
CASTS = ("cast_to_param", "cast_to_compute", "cast_to_output")


# --- casts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", NAMES.values())
@pytest.mark.parametrize("target", NAMES.values())
def test_castable_leaves_are_cast(source, target):
    tree = {"a": jnp.array([1.0, -0.5], source), "b": [np.ones(2, source)]}
    cast = ampx.cast_floating(tree, target)
    assert [leaf.dtype for leaf in jax.tree.leaves(cast)] == [target] * 2
    np.testing.assert_array_equal(cast["a"], [1.0, -0.5])
    if source == target:
        assert cast["a"] is tree["a"]


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize(
    "leaf",
    [
        jnp.arange(2),
        jnp.ones(2, bool),
        jnp.ones(2, jnp.uint8),
        jax.random.key(0),
        jnp.ones(2, jnp.complex64),
        jnp.ones(2, jnp.float8_e4m3fn),
        np.zeros(2, jax.dtypes.float0),
        1.5,
        "text",
        object(),
    ],
    ids=lambda leaf: str(getattr(leaf, "dtype", type(leaf).__name__)),
)
def test_other_leaves_are_not_touched(cast, leaf):
    policy = ampx.get_policy("p=f16,c=bf16,o=f16")
    assert getattr(policy, cast)([leaf])[0] is leaf


def test_float64_parameters_stay_under_x64():
    with jax.enable_x64(True):
        for leaf in (jnp.ones(2, jnp.float64), np.ones(2), np.float64(1)):
            assert ampx.opt_level("O3").half_params({"w": leaf})["w"] is leaf


@pytest.mark.parametrize("leaf", [np.ones(2), np.float64(1)])
def test_numpy_float64_is_the_float32_that_jax_makes_of_it(leaf):
    """jmp's `test_policy_cast_to_compute`: else a batch of NumPy's would widen all that follows."""
    for dtype in ("bfloat16", "float16", "float32"):
        assert ampx.cast_floating([leaf], dtype)[0].dtype == dtype


def test_each_cast_uses_its_own_dtype():
    policy = ampx.get_policy("p=f32,c=bf16,o=f16")
    dtypes = [getattr(policy, cast)(jnp.ones(1)).dtype for cast in CASTS]
    assert dtypes == ["float32", "bfloat16", "float16"]


# --- policies ------------------------------------------------------------------------------------


@given(st.tuples(*[st.sampled_from(list(NAMES))] * 3))
def test_policy_string_round_trip(names):
    policy = ampx.Policy(*names)
    assert str(policy) == "p={},c={},o={}".format(*names)
    assert ampx.get_policy(str(policy)) == policy
    assert ampx.Policy(*(jnp.dtype(NAMES[name]) for name in names)) == policy
    assert hash(policy) == hash(ampx.get_policy(str(policy)))


@pytest.mark.parametrize(
    "name, expected",
    [
        ("f16", "p=f16,c=f16,o=f16"),
        ("bfloat16", "p=bf16,c=bf16,o=bf16"),
        ("c=bf16", "p=f32,c=bf16,o=bf16"),
        ("p=f16", "p=f16,c=f16,o=f16"),
        ("o=f32", "p=f32,c=f32,o=f32"),
        ("p=f32, c=float16 , o=f32", "p=f32,c=f16,o=f32"),
        ("params=float32,compute=bfloat16,output=float16", "p=f32,c=bf16,o=f16"),
        ("o=f16,p=bf16", "p=bf16,c=bf16,o=f16"),
    ],
)
def test_get_policy_reads(name, expected):
    assert str(ampx.get_policy(name)) == expected


@pytest.mark.parametrize(
    "name, message",
    [
        ("float64", "param_dtype must be float16.*got 'float64'"),
        ("p=f32,c=int8", "compute_dtype must be .*got 'int8'"),
        ("c=half!", "compute_dtype must be .*'half!'"),
        ("", "got ''"),
        ("x=f32", "unknown key 'x'.*expected one of"),
        ("p=f32,p=f16", "'p' is given twice"),
        ("p=f32,params=f16", "'params' is given twice"),
        ("p=f32,", "unknown key ''"),
    ],
)
def test_get_policy_refuses(name, message):
    with pytest.raises(ValueError, match=message):
        ampx.get_policy(name)


@pytest.mark.parametrize("dtype", [None, jnp.int32, "float8_e4m3fn", jnp.complex64, 16])
def test_policy_refuses_dtypes_it_would_not_cast(dtype):
    with pytest.raises(ValueError, match="output_dtype must be float16, bfloat16 or float32"):
        ampx.Policy(output_dtype=dtype)


def test_policy_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ampx.Policy().param_dtype = "f16"


# --- which parameters belong to a norm ------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "LayerNorm_0/scale",
        "params/block_0/BatchNorm_12/bias",
        "GroupNorm_0/scale",
        "RMSNorm_0/scale",
        "final_norm/scale/value",
        "input_layernorm/weight",
        "encoder/layer_norm/bias",
        "norm1/scale",
        "ln_f/scale",
        "ln1/bias",
        "block/post_ln/scale",
        "bn/mean",
        "bn_3/scale",
        "gn2/scale",
        "proj_norm/scale",
        "norm_attn/bias",
        "batch_normalization_1/gamma",
        "LayerNormalisation_0/scale",
    ],
)
def test_norm_paths_are_found_by_name(path):
    assert ampx.is_norm_path(path)


@pytest.mark.parametrize(
    "path",
    [
        "Dense_0/kernel",
        "normal/kernel",
        "normalizer/w",
        "linear/kernel",
        "abnormal/b",
        "gnn/w",
        "PreNorm_0/Dense_0/bias",
        "norm_mlp/Dense_0/kernel",
        "Norm_Block_3/attention/query/bias",
        "norm_mlp/kernel",
        "weight_norm_dense/kernel",
        "norm_dense/bias",
        "NormConv_0/bias",
        "ln_embed/embedding",
        "normalization_dense/bias",
        "normalizations/w",
        "norm/weight/array",
    ],
)
def test_other_paths_are_not(path):
    assert not ampx.is_norm_path(path)


@pytest.mark.parametrize("casts_back", [False, True])
def test_norms_of_named_arrays_stay_float32_where_a_model_casts_back(casts_back):
    """haliax's norms end in a product with the weight: a float32 one widens what follows."""
    names = {"norm/weight/array": (3,), "proj/weight/array": (3, 3)}
    params = {name: jnp.ones(shape) for name, shape in names.items()}

    def model(params, x):
        hidden = params["norm/weight/array"] * (x - jnp.mean(x)).astype(x.dtype)
        hidden = hidden.astype(x.dtype) if casts_back else hidden
        return hidden @ params["proj/weight/array"]

    found = {}
    for name, rule in {
        "default": True,
        "the guide's": lambda path: ampx.is_norm_path(path.removesuffix("/array")),
    }.items():
        half = ampx.opt_level("O2", keep_norm_float32=rule).half_params(params)
        with jax.numpy_dtype_promotion("standard"):  # as such libraries need it
            result = model(half, jnp.ones((2, 3), jnp.bfloat16))
        found[name] = (half["norm/weight/array"].dtype.name, result.dtype.name)
    assert found["default"] == ("bfloat16", "bfloat16")
    assert found["the guide's"] == ("float32", "bfloat16" if casts_back else "float32")


class OddlyNamed(nn.Module):
    """Names that mislead the rule by path in both directions."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.LayerNorm(name="whiten")(nn.Dense(4, name="norm_dense")(x))
        x = nn.BatchNorm(use_running_average=not train, name="a")(x)
        x = nn.GroupNorm(num_groups=2, name="b")(x)
        return nn.RMSNorm(name="c")(x)


class OddlyNamedNNX(nnx.Module):
    def __init__(self, rngs):
        self.norm_dense = nnx.Linear(3, 4, rngs=rngs)
        self.whiten = nnx.LayerNorm(4, rngs=rngs)
        self.blocks = nnx.List(
            [nnx.BatchNorm(4, rngs=rngs), nnx.GroupNorm(4, num_groups=2, rngs=rngs)]
        )
        self.c = nnx.RMSNorm(4, rngs=rngs)


def linen_rule_and_params():
    x = jnp.ones((2, 3))
    variables = OddlyNamed().init(jax.random.key(0), x)
    return ampx.norm_rule(OddlyNamed(), x, train=True), variables["params"]


def nnx_rule_and_params():
    model = OddlyNamedNNX(nnx.Rngs(0))
    return ampx.norm_rule(model), nnx.state(model, nnx.Param)


@pytest.mark.parametrize("made", [linen_rule_and_params, nnx_rule_and_params])
def test_norm_rule_finds_all_four_kinds_by_type_whatever_their_names(made):
    rule, params = made()
    recipe = ampx.opt_level("O2", half_dtype="float16", keep_norm_float32=rule)
    half = recipe.half_params(params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(half):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        expected = jnp.float16 if name.startswith("norm_dense/") else jnp.float32
        assert leaf.dtype == expected, name
    by_path = ampx.opt_level("O2", half_dtype="float16").half_params(params)
    assert {leaf.dtype for leaf in jax.tree.leaves(by_path["whiten"])} == {jnp.dtype("float16")}
    assert {leaf.dtype for leaf in jax.tree.leaves(by_path["norm_dense"])} == {jnp.dtype("float16")}


def test_norm_rule_ignores_the_collection_name_and_does_not_match_prefixes():
    rule, _ = linen_rule_and_params()
    assert rule("params/whiten/scale") and rule("whiten")
    assert not rule("whitening/scale") and not rule("params/norm_dense/kernel")


@pytest.mark.parametrize("model", [None, 3, nn.Dense, lambda x: x])
def test_norm_rule_refuses_what_is_not_a_flax_module(model):
    with pytest.raises(TypeError, match="expected a flax linen or nnx module.*rule by path"):
        ampx.norm_rule(model)


def test_the_rule_is_replaceable():
    params = {"head": jnp.ones(2), "LayerNorm_0": jnp.ones(2)}
    recipe = dataclasses.replace(ampx.opt_level("O2"), stays_float32=lambda path: path == "head")
    half = recipe.half_params(params)
    assert_bit_equal(half, {"head": jnp.ones(2), "LayerNorm_0": jnp.ones(2, jnp.bfloat16)})

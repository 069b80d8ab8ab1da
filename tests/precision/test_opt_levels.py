import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ampx

PARAMS = {
    "dense": {"kernel": jnp.ones((2, 2)), "steps": jnp.arange(2)},
    "ln_f": {"scale": jnp.ones(2)},
}


def dtypes(params):
    return params["dense"]["kernel"].dtype, params["ln_f"]["scale"].dtype


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "level, stored, computed, norms, masters, loss_scale",
    [
        ("O0", "f32", "f32", "f32", False, 1.0),
        ("O1", "f32", "f32", "f32", False, "dynamic"),
        ("O2", "f32", "half", "f32", True, "dynamic"),
        ("O3", "half", "half", "half", False, 1.0),
    ],
)
def test_apex_opt_level_table(level, stored, computed, norms, masters, loss_scale, half):
    dtype = {"f32": jnp.dtype("float32"), "half": jnp.dtype(half)}
    recipe = ampx.opt_level(level, half_dtype=half)
    policy = recipe.policy
    assert policy.param_dtype == dtype[stored]
    assert policy.compute_dtype == dtype[computed]
    assert policy.output_dtype == jnp.float32
    assert recipe.level == level
    assert recipe.master_weights is masters
    assert recipe.loss_scale == loss_scale
    assert dtypes(recipe.half_params(PARAMS)) == (dtype[computed], dtype[norms])
    assert dtypes(recipe.cast_params(PARAMS)) == (dtype[stored], dtype[norms])
    assert recipe.half_params(PARAMS)["dense"]["steps"] is PARAMS["dense"]["steps"]


def test_default_half_is_bfloat16():
    assert ampx.opt_level("O2").policy.compute_dtype == jnp.bfloat16


@pytest.mark.parametrize("choice", [None, "none", "dynamic", 128.0])
def test_loss_scale_override(choice):
    recipe = ampx.opt_level("O2", loss_scale=choice)
    assert recipe.loss_scale == choice
    state = ampx.loss_scale(recipe.loss_scale, optax.sgd(0.1)).init(jnp.ones(1))
    expected = {None: 1.0, "none": 1.0, "dynamic": 2.0**16, 128.0: 128.0}[choice]
    assert ampx.current_loss_scale(state) == expected


@pytest.mark.parametrize(
    "level, options, norm_dtype, param_dtype",
    [
        ("O0", dict(keep_norm_float32=True), "float32", "float32"),
        ("O0", dict(master_weights=False), "float32", "float32"),
        ("O2", dict(keep_norm_float32=False), "bfloat16", "float32"),
        ("O2", dict(master_weights=False), "float32", "bfloat16"),
        ("O3", dict(keep_norm_float32=True), "float32", "bfloat16"),
        ("O3", dict(keep_norm_float32=lambda path: "scale" in path), "float32", "bfloat16"),
        ("O3", dict(master_weights=False, keep_norm_float32=False), "bfloat16", "bfloat16"),
    ],
)
def test_overrides_that_make_sense(level, options, norm_dtype, param_dtype):
    recipe = ampx.opt_level(level, **options)
    assert recipe.half_params(PARAMS)["ln_f"]["scale"].dtype == norm_dtype
    assert recipe.policy.param_dtype == param_dtype


@pytest.mark.parametrize(
    "level, options, reason",
    [
        ("O0", dict(keep_norm_float32=False), "norms in half, but O0 is float32 throughout"),
        ("O0", dict(keep_norm_float32=lambda path: True), "O0 is float32 throughout"),
        ("O0", dict(master_weights=True), "float32 copies of weights that O0 keeps in float32"),
        ("O1", dict(keep_norm_float32=True), "decided by the rules of autocast"),
        ("O1", dict(keep_norm_float32=False), "decided by the rules of autocast"),
        ("O1", dict(master_weights=True), "weights that O1 keeps in float32"),
        ("O3", dict(master_weights=True), "makes this level O2.*keep_norm_float32=False"),
    ],
)
def test_contradictory_overrides_are_refused_with_the_reason(level, options, reason):
    with pytest.raises(ValueError, match=f"{level} contradicts an override: .*{reason}"):
        ampx.opt_level(level, **options)


@pytest.mark.parametrize("level", ["o2", "02", "O4", 2, None, ""])
def test_unknown_levels_are_refused(level):
    with pytest.raises(ValueError, match="letter O, not zero"):
        ampx.opt_level(level)


@pytest.mark.parametrize(
    "half_dtype, message",
    [
        ("float32", "use level 'O0'"),
        ("float64", "half_dtype must be float16"),
        (jnp.int8, "half_dtype must be float16"),
    ],
)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_unknown_halves_are_refused(level, half_dtype, message):
    with pytest.raises(ValueError, match=message):
        ampx.opt_level(level, half_dtype=half_dtype)


@pytest.mark.parametrize("name", ["keep_norm_float32", "master_weights"])
@pytest.mark.parametrize("value", ["False", "True", 1, None])
def test_words_and_numbers_are_not_taken_for_truth_values(name, value):
    """Apex takes the string "False"; here any string would have been true."""
    with pytest.raises(TypeError, match=f"{name} must be True or False, got {value!r}"):
        ampx.opt_level("O2", **{name: value})


@pytest.mark.parametrize("half", [jnp.bfloat16, jnp.float16])
def test_o1_casts_operations_and_not_trees(half):
    recipe = ampx.opt_level("O1", half_dtype=half)
    assert (str(recipe.policy), recipe.loss_scale) == ("p=f32,c=f32,o=f32", "dynamic")
    assert not recipe.master_weights and recipe.level == "O1"

    def loss(params, x):
        seen.append({leaf.dtype.name for leaf in jax.tree.leaves(params)})
        return jnp.mean((x @ params["dense"]["kernel"]) ** 2)

    seen = []
    x = jnp.ones((4, PARAMS["dense"]["kernel"].shape[0]))
    for run in (recipe.call, lambda fun, *args: recipe.wrap(fun)(*args)):
        jaxpr = jax.make_jaxpr(lambda params, run=run: run(loss, params, x))(PARAMS)
        (product,) = (e for e in jaxpr.jaxpr.eqns if e.primitive.name == "dot_general")
        assert {atom.aval.dtype for atom in product.invars} == {jnp.dtype(half)}
        assert jaxpr.out_avals[0].dtype == jnp.float32
    assert seen == [{"float32", "int32"}] * 2


def test_o1_takes_rules_and_others_refuse_them():
    rules = ampx.DEFAULT_RULES.float32("dot_general")
    recipe = ampx.opt_level("O1", rules=rules)
    product = ampx.opt_level("O1").call(lambda w, x: x @ w, jnp.ones((2, 2)), jnp.ones((2, 2)))
    assert product.dtype == jnp.float32  # outputs keep the dtype they have without autocast
    jaxpr = jax.make_jaxpr(lambda w: recipe.call(lambda w: w @ w, w))(jnp.ones((2, 2)))
    assert "bf16" not in str(jaxpr)
    with pytest.raises(ValueError, match="O2 contradicts an override: rules are those of autocast"):
        ampx.opt_level("O2", rules=rules)
    with pytest.raises(TypeError, match="rules must come from"):
        ampx.opt_level("O1", rules="half")


@pytest.mark.parametrize(
    "given, expected",
    [
        ("O2", "p=f32,c=bf16,o=f32"),
        ("c=f16,o=f32", "p=f32,c=f16,o=f32"),
        ("p=f16", "p=f16,c=f16,o=f16"),
        (ampx.Policy("f16", "f16", "f32"), "p=f16,c=f16,o=f32"),
        (ampx.opt_level("O3", half_dtype="float16"), "p=f16,c=f16,o=f32"),
    ],
)
def test_as_recipe_takes_whatever_names_a_precision(given, expected):
    assert str(ampx.as_recipe(given).policy) == expected


def test_as_recipe_keeps_none_and_refuses_the_rest():
    assert ampx.as_recipe(None) is None
    for wrong in (16, True, {}):
        with pytest.raises(TypeError, match="policy must be a Policy, a Recipe, a string"):
            ampx.as_recipe(wrong)
    with pytest.raises(ValueError, match="letter O"):
        ampx.as_recipe("O9")


# --- functions at a precision, without flax -------------------------------------------------------


def dtype_spy(seen):
    def model(params, ids, x, *, bias):
        seen.append([leaf.dtype.name for leaf in jax.tree.leaves((params, ids, x, bias))])
        y = x @ params["dense"]["kernel"] + bias
        return {"y": y, "ids": ids}

    return model


def test_wrap_casts_parameters_inputs_and_outputs():
    seen = []
    recipe = ampx.opt_level("O2", half_dtype="float16")
    ids, x, bias = jnp.arange(2), jnp.ones((2, 2)), jnp.ones(2)
    out = recipe.wrap(dtype_spy(seen))(PARAMS, ids, x, bias=bias)
    assert seen == [["float16", "int32", "float32", "int32", "float16", "float16"]]
    assert out["y"].dtype == jnp.float32 and out["ids"].dtype == jnp.int32


def test_call_casts_parameters_only():
    seen = []
    recipe = ampx.opt_level("O3", half_dtype="float16")
    x = jnp.ones((2, 2), jnp.float16)
    args = (jnp.arange(2), x)
    out = recipe.call(dtype_spy(seen), PARAMS, *args, bias=jnp.ones(2, jnp.float16))
    assert seen[0][:3] == ["float16", "int32", "float16"]
    assert out["y"].dtype == jnp.float16


def test_wrap_keeps_name_and_docstring():
    def model(params):
        """What it does."""

    wrapped = ampx.opt_level("O2").wrap(model)
    assert wrapped.__name__ == "model" and wrapped.__doc__ == "What it does."


def test_gradients_through_wrap_have_the_dtype_of_the_stored_parameters():
    recipe = ampx.opt_level("O2", half_dtype="float16")
    model = recipe.wrap(lambda w, x: w * x)
    grads = jax.grad(lambda w: jnp.sum(model(w, jnp.full(3, 1 / 3))))(jnp.ones(3))
    assert grads.dtype == jnp.float32
    np.testing.assert_array_equal(grads, jnp.float16(1 / 3).astype(jnp.float32))

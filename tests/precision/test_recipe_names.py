"""Words for a precision: those of other libraries mean here what they mean there."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ampx

# Word: dtype of parameters as stored and as a loss sees them, of a product of matrices, loss scale.
# By the manuals of Keras (`keras.mixed_precision`), Lightning (`Trainer(precision=...)`) and
# Accelerate. Autocast leaves parameters alone and casts the operands of products.
WORDS = {
    "mixed_float16": ("float32", "float16", "float16", "dynamic"),
    "mixed_bfloat16": ("float32", "bfloat16", "bfloat16", None),
    "16-mixed": ("float32", "float32", "float16", "dynamic"),
    "bf16-mixed": ("float32", "float32", "bfloat16", None),
    "16-true": ("float16", "float16", "float16", None),
    "bf16-true": ("bfloat16", "bfloat16", "bfloat16", None),
    "32-true": ("float32", "float32", "float32", None),
    "no": ("float32", "float32", "float32", None),
}


@pytest.mark.filterwarnings("ignore:float16 without a loss scale", "ignore:parameters are stored")
@pytest.mark.parametrize("word", WORDS)
def test_a_step_stores_computes_and_scales_as_the_word_says(word):
    stored, given, computing, loss_scale = WORDS[word]
    seen = set()

    def loss_fn(params, x):
        seen.add(params["w"].dtype.name)
        product = x.astype(params["w"].dtype) @ params["w"]
        return jnp.mean(product.astype(jnp.float32) ** 2)

    step = ampx.train_step(loss_fn, optax.sgd(0.1), policy=word)
    state = step.init({"w": jnp.ones((4, 4))})
    assert state.params["w"].dtype == stored
    written = str(jax.make_jaxpr(step)(state, jnp.ones((2, 4))))
    assert seen == {given}
    products = re.findall(r"(\w+)\[[\d,]*\] = dot_general", written)
    short = computing.replace("bfloat", "bf").replace("float", "f")
    assert products and set(products) == {short}
    scale = ampx.find_loss_scale_state(state.opt_state)
    assert (scale is None) == (loss_scale is None)
    assert scale is None or scale.loss_scale == 2.0**16


@pytest.mark.parametrize("word", ["bf16", "bfloat16", "fp16", "float16", "half", "f16"])
def test_a_half_type_alone_is_refused_with_both_readings(word):
    with pytest.raises(ValueError, match=f"{word}.*two meanings.*-mixed.*jmp: write 'p=") as error:
        ampx.train_step(lambda w, x: w, optax.sgd(0.1), policy=word)
    half = "bfloat16" if word.startswith("b") else "float16"
    assert f"'mixed_{half}'" in str(error.value)
    assert ampx.as_recipe(f"p={half}").policy == ampx.get_policy(word)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("fp8", "write 'bf16-mixed,dots=float8'"),
        ("O1,dots=flaot8", "did you mean 'float8'"),
        ("O2,dots=float8", "has no autocast: write 'O1,dots=float8'"),
        ("mixed_bf16", "did you mean 'mixed_bfloat16'"),
        ("bf16_mixed", "did you mean 'bf16-mixed'"),
        ("p=bf17", "did you mean 'bf16'"),
        ("fast|step", "precision_schedule"),
    ],
)
def test_other_words_are_refused(word, message):
    with pytest.raises(ValueError, match=message):
        ampx.as_recipe(word)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.dtype(jnp.bfloat16)])
def test_a_dtype_is_read_as_its_name(dtype):
    with pytest.raises(ValueError, match="policy='bfloat16' has two meanings"):
        ampx.as_recipe(dtype)
    assert ampx.as_recipe(jnp.float32) == ampx.as_recipe("float32")
    for value in (ampx.Policy, jnp.ones(2), float):
        with pytest.raises(TypeError, match="policy must be a Policy"):
            ampx.as_recipe(value)


@pytest.mark.parametrize(
    ("word", "recipe", "loss_scale"),
    [
        ("O1,dots=float8", "rowwise", "dynamic"),
        ("bf16-mixed,dots=tensorwise", "tensorwise", None),
        ("16-mixed,dots=mxfp8", "mxfp8", "dynamic"),
    ],
)
def test_a_word_for_o1_takes_a_recipe_of_float8(word, recipe, loss_scale):
    found = ampx.as_recipe(word)
    assert (found.level, found.dots, found.loss_scale) == ("O1", ampx.Float8(recipe), loss_scale)
    assert ampx.opt_level("O1", dots=recipe).dots == found.dots


def test_only_o1_takes_float8_and_no_schedule_returns_to_it():
    with pytest.raises(ValueError, match="O2 contradicts an override: dots"):
        ampx.opt_level("O2", dots="float8")
    with pytest.raises(ValueError, match=r"O1 bfloat16, float8 rowwise is less precise than"):
        ampx.precision_schedule("fast1|step", total_steps=9, policy="O1,dots=float8")
    phases = (ampx.Phase("O1,dots=float8", until_step=2), ampx.Phase("O1"))
    assert str(ampx.PrecisionSchedule(phases)) == (
        "O1 bfloat16, float8 rowwise until step 2, then O1 bfloat16"
    )

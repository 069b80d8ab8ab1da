"""The words that name a precision: ours, and those of other libraries.

Whatever takes a policy in ampx reads it by `as_recipe`. The words below mean something in a library
that people come from. Each is taken as that library means it:

    word                library                    here
    mixed_float16       Keras                      O2 in float16, dynamic loss scale
    mixed_bfloat16      Keras                      O2 in bfloat16, no loss scale
    16-mixed            Lightning                  O1 in float16, dynamic loss scale
    bf16-mixed          Lightning                  O1 in bfloat16, no loss scale
    16-true, bf16-true  Lightning                  half throughout, parameters too
    32-true, no         Lightning, Accelerate      float32 throughout

Keras computes whole layers in half and keeps variables in float32, which is O2. Lightning and
Accelerate switch on torch's autocast, which is O1.

"bf16" and "fp16" alone mean two things: mixed precision in Accelerate and its kin, and half
parameters in jmp and in Keras ("float16"). A run of the wrong one trains, and trains worse: a
parameter of 1 in bfloat16 does not move by less than 0.004. So these are refused.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from ampx.autocasting.float8 import as_float8
from ampx.checking import suggest
from ampx.precision.opt_levels import Recipe, opt_level
from ampx.precision.policies import Policy, get_policy

_WORDS: dict[str, Callable[[], Recipe]] = {
    "mixed_float16": lambda: opt_level("O2", half_dtype="float16"),
    "mixed_bfloat16": lambda: opt_level("O2", half_dtype="bfloat16", loss_scale=None),
    "16-mixed": lambda: opt_level("O1", half_dtype="float16"),
    "bf16-mixed": lambda: opt_level("O1", half_dtype="bfloat16", loss_scale=None),
    "16-true": lambda: Recipe(get_policy("float16")),
    "bf16-true": lambda: Recipe(get_policy("bfloat16")),
    "32-true": lambda: Recipe(Policy()),
    "no": lambda: Recipe(Policy()),
}
_FLOAT8 = ("fp8", "float8", "transformer-engine", "transformer-engine-float16")
_DOTS = ",dots="  # stands behind a word for a recipe with autocast, as in "O1,dots=float8"


def as_recipe(policy: Policy | Recipe | str | None) -> Recipe | None:
    """Converts whatever names a precision to a recipe.

    Args:
      policy: an opt level such as `"O2"`, a string that `ampx.get_policy` reads, such as
        `"p=f32,c=bf16"`, a `Policy`, a `Recipe`, or None. Also the words of other libraries:
        `"mixed_float16"` and `"mixed_bfloat16"` (Keras), `"16-mixed"`, `"bf16-mixed"`, `"16-true"`,
        `"bf16-true"` and `"32-true"` (Lightning), `"no"` (Accelerate). A word for O1 may go on with
        what `ampx.autocast` takes for `dots`, as in `"O1,dots=float8"`. A dtype is read as its
        name.

    Returns:
      A `Recipe`; None for None.

    Raises:
      TypeError: for anything else.
      ValueError: for an unknown string, the string of a precision schedule, or a word with two
        meanings: `"bf16"` and `"fp16"` are mixed precision in some libraries and half parameters
        in others.

    Examples:
      >>> import ampx
      >>> print(ampx.as_recipe("c=bf16,o=f32").policy)
      p=f32,c=bf16,o=f32
      >>> print(ampx.as_recipe("bf16-mixed").level)
      O1
      >>> ampx.as_recipe("bf16-mixed,dots=tensorwise").dots
      Float8(recipe='tensorwise')
    """
    if isinstance(policy, str) and "|" in policy:
        raise ValueError(
            f"{policy!r} is a precision schedule, which needs more than a string: "
            f"give ampx.precision_schedule({policy!r}, total_steps=...) or final_loss=..., where "
            "a schedule is taken"
        )
    # A dtype means as little, or as much, as its name.
    if isinstance(policy, np.dtype) or (isinstance(policy, type) and hasattr(policy, "dtype")):
        policy = jnp.dtype(policy).name
    if isinstance(policy, str):
        return _read_word(policy)
    if isinstance(policy, Policy):
        return Recipe(policy)
    if policy is None or isinstance(policy, Recipe):
        return policy
    raise TypeError(
        f"policy must be a Policy, a Recipe, a string such as 'O2' or 'c=bf16', or None, got "
        f"{policy!r}"
    )


def _read_word(name: str) -> Recipe:
    """Reads a string that is no precision schedule."""
    name, is_float8, dots = name.partition(_DOTS)
    if is_float8:
        recipe = _read_word(name)
        if recipe.autocast_dtype is None:
            raise ValueError(
                f"policy={name + _DOTS + dots!r}: dots says how autocast runs matrix products, and "
                f"{name!r} has no autocast: write 'O1{_DOTS}{dots}' or 'bf16-mixed{_DOTS}{dots}'"
            )
        return dataclasses.replace(recipe, dots=as_float8(dots))
    # "00" and "o2" are taken for levels, so that `opt_level` can say what is wrong with them.
    if re.fullmatch(r"[oO0]\d", name):
        return opt_level(name)
    if name in _WORDS:
        return _WORDS[name]()
    if name.lower() in _FLOAT8:
        raise ValueError(
            f"policy={name!r} does not say what is to be float8: write 'bf16-mixed,dots=float8' "
            "for matrix products in float8 and all else by autocast in bfloat16"
        )
    try:
        policy = get_policy(name)
    except ValueError:
        if "=" in name:
            raise
        words = ["O0", "O1", "O2", "O3", *_WORDS]
        # Never one of the other half type, which may be nearer in letters.
        alike = [word for word in words if ("bf" in word) == ("bf" in name.lower())]
        raise ValueError(
            f"policy={name!r} is no precision: expected dtypes, as in 'p=f32,c=bf16,o=f32', or one "
            f"of {words}{suggest(name, alike)}"
        ) from None
    if "=" not in name and policy != Policy():
        half = jnp.dtype(policy.param_dtype).name
        mixed = "16-mixed" if half == "float16" else "bf16-mixed"
        raise ValueError(
            f"policy={name!r} has two meanings. Mixed precision, with float32 parameters, as in "
            f"Accelerate: write {mixed!r} (operation by operation) or 'mixed_{half}' (the whole "
            f"model). Half throughout, parameters too, as in jmp: write 'p={half}'"
        )
    return Recipe(policy)

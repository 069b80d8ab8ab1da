"""Precision policies: which dtype is stored, which computes, which comes out.

The three formats that a policy chooses from, with what tells them apart:

                exponent  fraction   largest   smallest normal   smallest   next after 1
    float32       8 bits   23 bits    3.4e38           1.2e-38    1.4e-45    1 + 1.2e-7
    bfloat16      8 bits    7 bits    3.4e38           1.2e-38    9.2e-41    1 + 7.8e-3
    float16       5 bits   10 bits     65504           6.1e-5     6.0e-8     1 + 9.8e-4

Products of matrices need few digits and are most of the cost: they compute in half. A weight of 1
needs many: an update of 1e-3 added to it in bfloat16 is lost. So parameters are stored in float32.
bfloat16 has float32's range, float16 does not, and that is why only float16 needs a loss scale.

    params f32 --cast--> half --fun--> half --cast--> output f32       Policy(f32, bf16, f32)
    param_dtype          compute_dtype              output_dtype

A `Policy` carries no state. Only float16, bfloat16 and float32 arrays are ever cast: integers,
booleans, random keys, complex numbers, float8 and float64 are left as they are. (A float64 of NumPy
is a float32, unless `jax_enable_x64` is set.)
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ampx import flax_modules
from ampx.checking import SHORT_NAMES, as_bool, as_dtype, check_word, suggest
from ampx.summaries import show_fields
from ampx.tree_checks import check_memory
from ampx.trees import cast_castable, cast_leaf, is_overwritten, path_name

PathRule = Callable[[str], bool]
# A name counts if it has one of these as a whole word (`ln_f`, `bn1`, `block_gn`), where "_", a
# digit or an end of the name bounds a word, or if a word ends in "norm" (`LayerNorm_0`,
# `final_norm`, `input_layernorm`) or in "normalization" (`batch_normalization_1`). "normal_dense"
# does not, its word goes on; nor does "norm_dense", a dense layer after a norm: its bias in float32
# beside a half kernel would widen all that follows.
_NORM_COMPONENT = re.compile(
    r"(?:^|_)(?:ln|bn|gn)(?:$|[_\d])"
    r"|norm(?:ali[sz]ation)?(?:$|[_\d])(?!.*(?:dense|linear|conv|proj|embed))",
    re.IGNORECASE,
)


def cast_floating(tree: Any, dtype: DTypeLike) -> Any:
    """Casts the float16, bfloat16 and float32 leaves of `tree` to `dtype`; the rest stays.

    Args:
      tree: any pytree.
      dtype: float16, bfloat16 or float32, or a word for one of them, such as "bf16".

    Returns:
      A tree of the same structure and shapes.

    Raises:
      ValueError: for another dtype: in int32 fractions would be lost; for a donated array.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> tree = {"w": jnp.ones(2), "ids": jnp.arange(2)}
      >>> {name: x.dtype.name for name, x in ampx.cast_floating(tree, jnp.bfloat16).items()}
      {'ids': 'int32', 'w': 'bfloat16'}
    """
    dtype = as_dtype("dtype", dtype, "castable")
    check_memory("tree", tree)
    return cast_castable(tree, dtype)


def cast_by_path(tree: Any, dtype: DTypeLike, stays_float32: PathRule | None) -> Any:
    """Casts as `cast_floating` does, but to float32 where `stays_float32(path)` is True."""
    if stays_float32 is None:
        return cast_castable(tree, dtype)

    def cast(path: Any, leaf: Any) -> Any:
        if is_overwritten(path):
            return leaf
        name = path_name(path)
        stays = as_bool(f"what keep_norm_float32 returns for {name!r}", stays_float32(name))
        return cast_leaf(leaf, jnp.float32 if stays else dtype)

    return jax.tree_util.tree_map_with_path(cast, tree)


def is_norm_path(path: str) -> bool:
    """Whether a parameter's path looks like a normalisation layer: the default rule of O2.

    Args:
      path: names joined by "/", as in `"block_0/LayerNorm_1/scale"`. Only the last two are looked
        at, the layer and the parameter. Kernels and embeddings are never a norm's.

    Returns:
      True for components such as `LayerNorm_0`, `final_norm`, `input_layernorm`, `ln_f`, `bn1`.

    Raises:
      TypeError: if `path` is no string.

    Examples:
      >>> import ampx
      >>> ampx.is_norm_path("block_0/ln_1/scale"), ampx.is_norm_path("normal_dense/kernel")
      (True, False)
    """
    check_word("path", path)
    # Paths of flax nnx end in "value", which is the content of a variable and no name of ours.
    *_, owner, leaf = ("", *path.removesuffix("/value").split("/"))
    if leaf in ("kernel", "embedding"):
        return False
    return any(_NORM_COMPONENT.search(name) for name in (owner, leaf))


def norm_rule(model: Any, /, *args: Any, **kwargs: Any) -> PathRule:
    """Makes a rule that finds norm layers by their flax type, for models whose names do not tell.

    Args:
      model: a linen module, with the arguments of its `__call__` after it, or an nnx module.
      *args: example inputs of a linen module; only shapes and dtypes matter.
      **kwargs: keyword inputs of a linen module.

    Returns:
      A function from a parameter's path to bool, for `opt_level(keep_norm_float32=...)`. Leading
      collection names such as `"params/"` are ignored.

    Raises:
      TypeError: if `model` is not a flax module.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> class Net(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         return nn.LayerNorm(name="whiten")(nn.Dense(4, name="project")(x))
      >>> rule = ampx.norm_rule(Net(), jnp.ones((1, 3)))
      >>> rule("whiten/scale"), rule("project/kernel")
      (True, False)
    """
    paths = flax_modules.find_norm_paths(model, *args, **kwargs)

    def is_norm(path: str) -> bool:
        # Linen's variables are {"params": {...}}; people cast either the whole or the inner part.
        inside = path.removeprefix("params/")
        return any(inside == norm or inside.startswith(f"{norm}/") for norm in paths)

    return is_norm


@dataclasses.dataclass(frozen=True)
class Policy:
    """Three dtypes: how parameters are stored, what computes, what comes out.

    Attributes:
      param_dtype: dtype of stored parameters.
      compute_dtype: dtype of parameters and inputs inside the function.
      output_dtype: dtype of results.

    Raises:
      ValueError: for a dtype that is not float16, bfloat16 or float32.

    References:
      The three-dtype policy is jmp's: https://github.com/google-deepmind/jmp

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> policy = ampx.Policy(jnp.float32, jnp.bfloat16, jnp.float32)
      >>> print(policy)
      p=f32,c=bf16,o=f32
      >>> policy.cast_to_compute({"w": jnp.ones(2)})["w"].dtype.name
      'bfloat16'
    """

    param_dtype: DTypeLike = jnp.float32
    compute_dtype: DTypeLike = jnp.float32
    output_dtype: DTypeLike = jnp.float32

    __repr__ = show_fields

    def __post_init__(self) -> None:
        """Resolves names to dtypes."""
        # Every spelling of a dtype becomes the same np.dtype, so that equal policies compare and
        # hash as equal. A frozen dataclass lets only `object.__setattr__` through.
        for field in dataclasses.fields(self):
            dtype = as_dtype(field.name, getattr(self, field.name), "castable")
            object.__setattr__(self, field.name, dtype)

    def __str__(self) -> str:
        """The string that `get_policy` reads back."""
        short = {jnp.dtype(name): alias for alias, name in SHORT_NAMES.items()}
        dtypes = (self.param_dtype, self.compute_dtype, self.output_dtype)
        return ",".join(
            f"{key}={short[jnp.dtype(d)]}" for key, d in zip("pco", dtypes, strict=True)
        )

    def cast_to_param(self, tree: Any) -> Any:
        """Casts floating leaves to the storage dtype."""
        return cast_castable(tree, self.param_dtype)

    def cast_to_compute(self, tree: Any) -> Any:
        """Casts floating leaves to the computing dtype."""
        return cast_castable(tree, self.compute_dtype)

    def cast_to_output(self, tree: Any) -> Any:
        """Casts floating leaves to the result dtype."""
        return cast_castable(tree, self.output_dtype)


def get_policy(name: str) -> Policy:
    """Reads a policy from a string, for command lines and configuration files.

    Args:
      name: `"p=f32,c=bf16,o=f32"` (also `params=`, `compute=`, `output=` and full dtype names), or
        one dtype for all three. A missing `c` is `p`, a missing `o` is `c`, a missing `p` is f32.

    Returns:
      A `Policy`; `str(policy)` gives the string back.

    Raises:
      TypeError: if `name` is no string.
      ValueError: for an unknown key or dtype, or a key given twice.

    Examples:
      >>> import ampx
      >>> print(ampx.get_policy("c=float16,o=f32"))
      p=f32,c=f16,o=f32
      >>> print(ampx.get_policy("bf16"))
      p=bf16,c=bf16,o=bf16
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, such as 'p=f32,c=bf16', got {name!r}")
    if re.fullmatch(r"[oO]\d|\S*(mixed|true)\S*", name):
        raise ValueError(
            f"name={name!r} is more than three dtypes: ampx.as_recipe({name!r}) reads such words, "
            "and policy= of ampx.train_step and ampx.value_and_grad takes them as they are"
        )
    if "=" not in name:
        return Policy(name, name, name)
    keys = {"p": "p", "params": "p", "c": "c", "compute": "c", "o": "o", "output": "o"}
    given: dict[str, str] = {}
    for part in name.split(","):
        key, _, dtype = (text.strip() for text in part.partition("="))
        if key not in keys:
            raise ValueError(
                f"unknown key {key!r} in policy {name!r}: expected one of {list(keys)}"
                f"{suggest(key, keys)}"
            )
        if keys[key] in given:
            raise ValueError(f"key {key!r} is given twice in policy {name!r}")
        given[keys[key]] = dtype
    # Missing ones follow the one before: what is stored computes, and what computes comes out.
    param = given.get("p", "f32")
    compute = given.get("c", param)
    return Policy(param, compute, given.get("o", compute))

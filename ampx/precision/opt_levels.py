"""Opt levels O0 to O3 as recipes: a policy, what stays float32, and the loss scale to use.

The levels are Apex's, and name four ways to train in half precision:

    O0  float32 throughout: the baseline.
    O1  autocast: each operation of the loss runs in half or in float32, by a table of rules.
    O2  the whole model computes in half, except its norm layers; weights are kept in float32.
    O3  half throughout, weights too: the fastest, a bound for the speed of the others.

A `Recipe` is a level made concrete. It does not train; it answers three questions of those who do:
how a function is called at this precision (`call`, `wrap`), in which dtype parameters are stored
(`cast_params`, `half_params`), and which loss scale goes around the optimizer (`loss_scale`).
Whatever takes a policy in ampx turns it into a recipe by `as_recipe`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ampx import flax_modules
from ampx.autocasting.float8 import Dots, Float8
from ampx.autocasting.rules import DEFAULT_RULES, Rules
from ampx.autocasting.transform import autocast, make_settings
from ampx.checking import as_bool, as_dtype, as_number
from ampx.flat_buffers.flattening import on_tree
from ampx.function_checks import check_callable, refuse_lazy
from ampx.loss_scaling.dynamics import parse_choice
from ampx.precision.policies import PathRule, Policy, cast_by_path, is_norm_path
from ampx.summaries import show_fields

LossScaleChoice = float | Literal["dynamic", "none"] | None


@dataclasses.dataclass(frozen=True)
class Recipe:
    """An opt level made concrete: a policy, what stays float32, and the loss scale to use with it.

    Attributes:
      policy: the three dtypes. O2 stores float32 (the master weights) and casts in each step.
      stays_float32: rule from a parameter's path to bool, True for those that are not cast to
        half; None if all are. Replace it with `dataclasses.replace(recipe, stays_float32=...)`.
      loss_scale: what `ampx.loss_scale` takes: None, `"dynamic"` or a number.
      master_weights: whether the level keeps float32 weights beside half ones.
      level: the name it came from, or None.
      autocast_dtype: the half dtype of `ampx.autocast`, or None for a level without it. The policy
        of a level with autocast is float32 throughout: operations are cast, not trees.
      rules: the rules of autocast.
      dots: how matrix products of autocast run in float8; None if they do not.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> recipe = ampx.opt_level("O2", half_dtype=jnp.float16)
      >>> params = {"dense": {"kernel": jnp.ones((2, 2))}, "ln_f": {"scale": jnp.ones(2)}}
      >>> half = recipe.half_params(params)
      >>> half["dense"]["kernel"].dtype.name, half["ln_f"]["scale"].dtype.name
      ('float16', 'float32')
    """

    policy: Policy
    stays_float32: PathRule | None = None
    loss_scale: LossScaleChoice = None
    master_weights: bool = False
    level: str | None = None
    autocast_dtype: Any = None
    rules: Rules = DEFAULT_RULES
    dots: Float8 | None = None

    __repr__ = show_fields

    def cast_params(self, params: Any) -> Any:
        """Casts parameters to the dtypes in which they are stored, norms in float32 at O2."""
        return self._cast(params, self.policy.param_dtype)

    def half_params(self, params: Any) -> Any:
        """Casts parameters to the dtypes in which they compute: half, norms in float32 at O2.

        `call` does it in each step. By hand it is for models that store half weights, with
        `ampx.master_weights` in the optimizer.
        """
        return self._cast(params, self.policy.compute_dtype)

    def _cast(self, params: Any, dtype: Any) -> Any:
        # A flat buffer has no paths for the rule to look at: `on_tree` shows it the tree instead.
        return on_tree(lambda tree: cast_by_path(tree, dtype, self.stays_float32), params)

    def wrap(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """Makes a model function `fun(params, *args, **kwargs)` compute at this precision.

        Parameters and floating inputs are cast to the computing dtype, and results to the output
        dtype, so that a loss computed from them is float32, as in Apex. At O1 the function is
        autocast instead.

        Args:
          fun: a function whose first argument is a pytree of parameters or an nnx module.

        Returns:
          A function with the same signature. What a call changes in an nnx module (batch
          statistics, random counters) is written back to it; its parameters are not touched.

        Examples:
          >>> import ampx, jax.numpy as jnp
          >>> recipe = ampx.opt_level("O2", half_dtype=jnp.float16)
          >>> def model(w, x):
          ...     print("computes in", (w * x).dtype)
          ...     return w * x
          >>> recipe.wrap(model)(jnp.ones(2), jnp.ones(2)).dtype.name
          computes in float16
          'float32'
        """
        check_callable("fun", fun, "fun(params, *args)")

        @functools.wraps(fun)
        def at_precision(params: Any, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = self.policy.cast_to_compute((args, kwargs))
            return self.policy.cast_to_output(self.call(fun, params, *args, **kwargs))

        return at_precision

    def call(self, fun: Callable[..., Any], /, params: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls `fun` with parameters cast for computing, and casts nothing else.

        It is for loss functions: casting a batch would round targets and token weights. Flax models
        called inside cast their own inputs and outputs. In plain JAX code cast the inputs with
        `policy.cast_to_compute`, or wrap the model function with `wrap`. Norm layers that stay
        float32 compute in float32 and return the dtype that they were given. At O1 all of `fun` is
        autocast, and what it returns keeps its dtypes.

        Args:
          fun: a function whose first argument is a pytree of parameters or an nnx module.
          params: the parameters.
          *args: passed on.
          **kwargs: passed on.

        Returns:
          What `fun` returns.

        Examples:
          >>> import ampx, jax.numpy as jnp
          >>> recipe = ampx.opt_level("O2", half_dtype=jnp.float16)
          >>> recipe.call(lambda w, x: (w.dtype.name, x.dtype.name), jnp.ones(2), jnp.ones(2))
          ('float16', 'float32')
        """
        return self._call(self.policy.cast_to_output, fun, params, *args, **kwargs)

    def call_part(self, fun: Callable[..., Any], /, params: Any, *args: Any, **kwargs: Any) -> Any:
        """`call` for a part of a model, such as a stage of a pipeline: it casts no results.

        What one part passes to the next is not an output of the model, so flax models in it return
        what they have computed, in half.

        Args:
          fun: see `call`.
          params: see `call`.
          *args: passed on.
          **kwargs: passed on.

        Returns:
          What `fun` returns.

        Examples:
          >>> import ampx, jax.numpy as jnp
          >>> recipe = ampx.opt_level("O2", half_dtype=jnp.float16)
          >>> recipe.call_part(lambda w, x: (w * x).dtype.name, jnp.ones(2), jnp.float16(2))
          'float16'
        """
        return self._call(lambda result: result, fun, params, *args, **kwargs)

    def _call(
        self,
        cast_output: Callable[[Any], Any],
        fun: Callable[..., Any],
        /,
        params: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if self.autocast_dtype is not None:
            # "original": results keep the dtypes that `fun` has without autocast.
            cast_operations = autocast(
                fun,
                half_dtype=self.autocast_dtype,
                rules=self.rules,
                output="original",
                dots=self.dots,
            )
            return cast_operations(params, *args, **kwargs)
        casts: dict[str, Any] = dict(
            norms_in_float32=self.stays_float32 is not None,
            cast_input=self.policy.cast_to_compute,
            cast_output=cast_output,
        )
        # Flax modules promote an input with their parameters: a float32 input would make half
        # kernels compute in float32, and one float32 norm all layers after it. So inputs are cast
        # where the model is called, and norms return the dtype that they were given. A linen module
        # is called inside `fun`, and an interceptor, active while `fun` is traced, catches the
        # call. An nnx module is an argument, and a copy of it gets methods that cast.
        with flax_modules.linen_casts(**casts):
            if not flax_modules.is_nnx_module(params):
                return fun(self.half_params(params), *args, **kwargs)
            model = flax_modules.nnx_with_casts(params, self.half_params, **casts)
            result = fun(model, *args, **kwargs)
            # Batch statistics and random counters changed in the copy. Parameters did not, so the
            # caller's stay float32.
            flax_modules.write_back(params, model)
            return result


# Stands for an argument that was not given. None cannot, since loss_scale=None means no scaling.
_LEVEL_DEFAULT: Any = type("LevelDefault", (), {"__repr__": lambda self: "<level's default>"})()


def opt_level(
    level: str,
    *,
    half_dtype: DTypeLike = jnp.bfloat16,
    loss_scale: LossScaleChoice = _LEVEL_DEFAULT,
    keep_norm_float32: bool | PathRule = _LEVEL_DEFAULT,
    master_weights: bool = _LEVEL_DEFAULT,
    rules: Rules = _LEVEL_DEFAULT,
    dots: Float8 | Dots | None = None,
) -> Recipe:
    """Makes a recipe of one of Apex's opt levels.

    ======================  =======  ============  =========  =======
    .                       O0       O1            O2         O3
    ======================  =======  ============  =========  =======
    parameters compute in   float32  float32       half       half
    casts per operation     no       yes           no         no
    norm layers in float32  yes      by the rules  yes        no
    float32 master weights  no       no            yes        no
    loss scale              1.0      "dynamic"     "dynamic"  1.0
    ======================  =======  ============  =========  =======

    Args:
      level: `"O0"`, `"O1"`, `"O2"` or `"O3"`.
      half_dtype: float16 or bfloat16. bfloat16 has float32's range and needs no loss scale:
        `loss_scale=None` saves the check of the gradients, and then bad steps are not skipped.
      loss_scale: overrides the level's loss scale; takes what `ampx.loss_scale` takes.
      keep_norm_float32: overrides whether norm layers stay float32. A function from a parameter's
        path to bool replaces the rule that finds them (`ampx.is_norm_path`).
      master_weights: overrides whether weights are kept in float32.
      rules: which operations O1 runs in half and in float32; `ampx.DEFAULT_RULES` by default.
      dots: `"float8"` or an `ampx.Float8` runs matrix products of O1 in float8, see
        `ampx.autocast`. float8 itself needs no loss scale; float16 beside it does.

    Returns:
      A `Recipe`.

    Raises:
      ValueError: for an unknown level, dtype or recipe of float8, or an override that contradicts
        the level.
      TypeError: for an override of another type.

    References:
      `apex/amp/frontend.py` in NVIDIA/apex.

    Examples:
      >>> import ampx, jax.numpy as jnp
      >>> recipe = ampx.opt_level("O2", half_dtype=jnp.float16, loss_scale=128.0)
      >>> print(recipe.policy, recipe.loss_scale, recipe.master_weights)
      p=f32,c=f16,o=f32 128.0 True
    """
    if not isinstance(level, str) or level not in ("O0", "O1", "O2", "O3"):
        raise ValueError(
            f"level must be 'O0', 'O1', 'O2' or 'O3' (letter O, not zero), got {level!r}"
        )
    half = as_dtype("half_dtype", half_dtype, "castable")
    if half == jnp.float32:
        raise ValueError("half_dtype must be float16 or bfloat16, got float32: use level 'O0'")
    if callable(keep_norm_float32):
        refuse_lazy("keep_norm_float32", keep_norm_float32)
    elif keep_norm_float32 is not _LEVEL_DEFAULT:
        keep_norm_float32 = as_bool("keep_norm_float32", keep_norm_float32)
    if master_weights is not _LEVEL_DEFAULT:
        master_weights = as_bool("master_weights", master_weights)
    if loss_scale is not _LEVEL_DEFAULT and not callable(loss_scale):
        parse_choice(loss_scale)
        if isinstance(loss_scale, jax.Array | np.ndarray):  # a recipe can be hashed
            loss_scale = as_number("loss_scale", loss_scale)
    _refuse_contradictions(level, keep_norm_float32, master_weights, rules, dots)
    # O1 is a matter of operations, so its policy is float32 and the half dtype goes to autocast.
    # The other levels are a matter of trees.
    if level == "O1":
        rules = DEFAULT_RULES if rules is _LEVEL_DEFAULT else rules
        checked = make_settings(half, rules, "original", "transform", dots)
        return Recipe(
            Policy(jnp.float32, jnp.float32, jnp.float32),
            loss_scale="dynamic" if loss_scale is _LEVEL_DEFAULT else loss_scale,
            level=level,
            autocast_dtype=half,
            rules=checked.rules,
            dots=checked.dots,
        )
    masters = level == "O2" if master_weights is _LEVEL_DEFAULT else master_weights
    keep = level == "O2" if keep_norm_float32 is _LEVEL_DEFAULT else keep_norm_float32
    compute = jnp.float32 if level == "O0" else half
    if loss_scale is _LEVEL_DEFAULT:
        # As in Apex. A static scale of 1 changes no number, but it skips steps with bad gradients.
        loss_scale = "dynamic" if level == "O2" else 1.0
    if level == "O0" or keep is False:
        stays_float32 = None
    else:
        stays_float32 = is_norm_path if keep is True else keep
    return Recipe(
        Policy(jnp.float32 if masters or level == "O0" else half, compute, jnp.float32),
        stays_float32=stays_float32,
        loss_scale=loss_scale,
        master_weights=masters,
        level=level,
    )


def _refuse_contradictions(level: str, keep_norm: Any, masters: Any, rules: Any, dots: Any) -> None:
    """Raises for an override that would make the level another one, or that it has no use for."""
    reason = None
    if level == "O0":
        if keep_norm is not _LEVEL_DEFAULT and keep_norm is not True:
            reason = "keep_norm_float32 asks for norms in half, but O0 is float32 throughout"
        elif masters is True:
            reason = "master_weights asks for float32 copies of weights that O0 keeps in float32"
    elif level == "O1":
        if keep_norm is not _LEVEL_DEFAULT:
            reason = "keep_norm_float32 is decided by the rules of autocast, operation by operation"
        elif masters is True:
            reason = "master_weights asks for copies of weights that O1 keeps in float32"
    elif level == "O3" and masters is True:
        reason = (
            "master_weights makes this level O2; for its norms in half add keep_norm_float32=False"
        )
    if reason is None and level != "O1":
        if dots is not None:
            reason = "dots says how autocast runs matrix products, and only O1 uses autocast"
        elif rules is not _LEVEL_DEFAULT:
            reason = "rules are those of autocast, which only O1 uses"
    if reason:
        raise ValueError(f"{level} contradicts an override: {reason}")

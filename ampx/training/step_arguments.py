"""The extra arguments of optax that a training step hands to its optimizer.

Some of optax's transformations need more than gradients. They get, by these names,

    value       f32[], the loss of the step, unscaled            momo, polyak_sgd, reduce_on_plateau
    grad        unscaled gradients, before any clip              line searches: lbfgs
    value_fn    params -> f32[], the loss of this batch          line searches: lbfgs
    obj_fn      the same                                         sophia
    grad_fn     (params, i) -> unscaled gradients of this batch  sam(opaque_mode=True)
    weight      f32[], of all micro-batches                      ampx.multi_steps

and whatever the caller gives the step by name. Functions cost nothing unless somebody calls them.

The functions see the whole batch of the step, all its micro-batches, with the step's own random
key, model state and precision: at the step's parameters `value_fn` is `value`. They exist only
where one batch makes one update on one whole gradient; elsewhere they raise when they are called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax

from ampx import flax_modules
from ampx.accumulation.gradients import value_and_grad
from ampx.accumulation.multi_steps import MultiStepsState
from ampx.accumulation.results import GradResult
from ampx.accumulation.sparse_rows import densify
from ampx.data_parallel.reduction import Reduction
from ampx.data_parallel.zero1 import Zero1State
from ampx.loss_scaling.nonfinite import unscale
from ampx.mesh_axes import tracks_varying
from ampx.overwritten import merge_optimized, split_optimized
from ampx.pipelining.shard_map_program import PipelineGradients
from ampx.trees import find_nodes
from ampx.updates.extra_args import check_spelling

# What the step computes itself, or what its parts tell each other.
_OWN = (
    *("grad", "weight", "verdict", "reduce_op", "reduce_axes", "shared_loss_axes"),
    *("overflow", "tail", "model_axes"),
)


# The arguments of `ampx.train_step`: those of `value_and_grad`, and what is added to them.
# `learning_rate` is not among them: an optimizer of the user's own may be given its rate with each
# step.
_ADDED = ("tx", "loss_scale", "max_grad_norm", "local_norm", "tail_overlap")
_SETTINGS = {*inspect.signature(value_and_grad).parameters, *_ADDED}.difference(_OWN)

# What losses are often given by name, and no optimizer takes. An optimizer may have a use for a
# random key by any name; so these are refused only where the state has the key of the loss.
_NAMES_OF_KEY = ("rng", "rngs", "dropout_rng", "dropout_key", "prng_key", "seed")
_NAMES_OF_STATE = ("model_state", "batch_stats", "mutable")
_NAMES_OF_MODE = ("train", "training", "is_training", "deterministic", "use_running_average")


class Inputs(NamedTuple):
    """What a loss is computed from besides parameters.

    Attributes:
      batch: the batch of the step.
      scale: float32 scalar, the loss scale of the step.
      about: the other arguments of `grads_of`: key, model state, phase.
    """

    batch: Any
    scale: jax.Array
    about: dict[str, Any]


class Evaluation(NamedTuple):
    """What evaluates the loss of a step at other parameters.

    Attributes:
      grads_of: see `ampx.training.step_execution.TrainStep`.
      model: the nnx model whose parameters are evaluated; None for a pytree of parameters.
      wrt: the nnx filter of the parameters, or None.
      rest: what is not trained, with which the optimizer's parameters make the whole tree; or None.
    """

    grads_of: Callable[..., GradResult]
    model: Any = None
    wrt: Any = None
    rest: Any = None

    def compute_value(self, inputs: Inputs, params: Any) -> jax.Array:
        """The unscaled loss at other parameters; float32 scalar."""
        return self._call(inputs, params, differentiate=False).loss

    def compute_grads(self, inputs: Inputs, params: Any) -> Any:
        """The unscaled gradients at other parameters, float32.

        They are computed with the loss scale of the step, since half gradients need it.
        """
        grads = densify(self._call(inputs, params, loss_scale=inputs.scale).grads)
        if self.model is not None:
            grads = flax_modules.as_pure(grads)
        else:
            grads = split_optimized(grads)[0]
        return unscale(grads, inputs.scale)

    def _call(self, inputs: Inputs, params: Any, **options: Any) -> GradResult:
        if self.model is not None:
            params = flax_modules.replace_params(self.model, params, self.wrt)
        params = merge_optimized(params, self.rest)
        return self.grads_of(params, inputs.batch, wrt=self.wrt, **inputs.about, **options)


def check_given(state: Any, more: Sequence[Any], given: Mapping[str, Any]) -> None:
    """Refuses what a step hands to its optimizer itself, and what is not for an optimizer.

    Args:
      state: the first argument of the call, for the error alone.
      more: its arguments from the third on that have no name.
      given: its arguments by name.

    Raises:
      TypeError: if there are `more`; if `given` has what the step hands on itself, or a setting of
        the step, a misspelled `key`, or what is for the loss.
    """
    if more:
        is_model = flax_modules.is_nnx_module(state)
        pair = "step((model, optimizer), batch)" if is_model else "step(step.init(params), batch)"
        raise TypeError(
            f"the step takes a state and a batch, got {2 + len(more)} arguments without a name. "
            f"Parameters and optimizer state are one state: {pair}. A random key is key=..., and "
            "what else is given by name goes to the optimizer"
        )
    check_spelling(given, ("key",))
    names_of_key = () if getattr(state, "key", None) is None else _NAMES_OF_KEY
    for names, advice in (
        (names_of_key, "the key of this step is called key"),
        (_NAMES_OF_STATE, "the state brings it: step.init(params, model_state=...)"),
        (_NAMES_OF_MODE, "bind it before, as in functools.partial(loss_fn, train=True)"),
    ):
        if found := [name for name in given if name in names]:
            raise TypeError(
                f"{found[0]!r} looks as if it were for the loss, and what is given to the step by "
                f"name is for the optimizer: {advice}"
            )
    if settings := [name for name in given if name in _SETTINGS]:
        raise TypeError(
            f"{settings[0]!r} is a setting of ampx.train_step: give it where the step is made. "
            "What is given to the step by name is for the optimizer"
        )
    if taken := [name for name in given if name in _OWN]:
        raise TypeError(
            f"the step hands {taken[0]!r} to the optimizer itself: leave it out. What is given by "
            f"name is for the optimizer, and all names but {_OWN} are free"
        )


def make_functions(
    evaluation: Evaluation,
    inputs: Inputs,
    opt_state: Any,
    reduction: Reduction | None,
    names: Iterable[str],
) -> dict[str, Callable[..., Any]]:
    """Makes `value_fn`, `obj_fn` and `grad_fn` for one step.

    Args:
      evaluation: what they evaluate.
      inputs: at what batch and key.
      opt_state: the optimizer's state, which tells what is around the transformation that calls.
      reduction: of the gradients over mapped axes, if the step does one.
      names: of all other extra arguments. optax's line searches call `value_fn` with those that its
        signature names, and refuse to run if one is left over.

    Returns:
      From name to function. They are pytrees of their inputs, so that an `update` which somebody
      has put under `jax.jit` takes them as it takes arrays.
    """

    def value_fn(inputs: Inputs, params: Any, **ignored: Any) -> jax.Array:
        del ignored
        _check_can_evaluate(evaluation, opt_state, reduction)
        return evaluation.compute_value(inputs, params)

    def obj_fn(inputs: Inputs, params: Any) -> jax.Array:
        return value_fn(inputs, params)

    def grad_fn(inputs: Inputs, params: Any, step: Any = 0) -> Any:
        del step  # of sam's inner loop, all of whose steps see one batch
        if reduction is not None:
            raise ValueError(
                f"grad_fn is not there with axis_name={reduction.axes}: the gradients of other "
                "parameters would have to be reduced too. Hand a grad_fn of your own to the step"
            )
        _check_can_evaluate(evaluation, opt_state, reduction)
        return evaluation.compute_grads(inputs, params)

    functions = {"value_fn": value_fn, "obj_fn": obj_fn, "grad_fn": grad_fn}
    # `value`, `grad` and `value_fn` are the line searches' own, and never left over.
    ignored = {*names, *functions} - {"value", "grad", "value_fn"}
    by_name = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, by_name) for name in ("inputs", "params")]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
        for name in sorted(ignored)
    ]
    value_fn.__dict__["__signature__"] = inspect.Signature(parameters)
    return {name: jax.tree_util.Partial(fun, inputs) for name, fun in functions.items()}


def _check_can_evaluate(
    evaluation: Evaluation, opt_state: Any, reduction: Reduction | None
) -> None:
    """Raises a ValueError where the result would not be the loss that the update is for."""
    if isinstance(evaluation.grads_of, PipelineGradients):
        where = "inside a pipeline, which computes loss and gradients together"
    elif find_nodes(opt_state, MultiStepsState) or find_nodes(opt_state, optax.MultiStepsState):
        where = "with multi_steps: the earlier batches of the window are gone"
    elif find_nodes(opt_state, Zero1State):
        where = "inside zero1, where each device has a share of the parameters"
    elif reduction is not None and not all(map(tracks_varying, reduction.axes)):
        where = (
            f"with axis_name={reduction.axes} under check_vma=False, where JAX does not sum its "
            "gradient over the devices"
        )
    else:
        return
    raise ValueError(
        "the optimizer evaluates the loss at other parameters (by value_fn, obj_fn or grad_fn), "
        f"which cannot be done {where}: use an optimizer without a line search, or hand the "
        "function to the step by its name"
    )

"""A `GradResult` in the place of gradients: whoever takes it knows the scale that it carries.

Gradients alone do not tell by what their loss was multiplied. An update divides them by the scale
in its state, and if the loss was never multiplied, a model trains at 1/65536 of its rate while
every figure looks healthy. So a loss scale takes the whole result of `ampx.value_and_grad`, too:

    carries                       outside of jit             inside of jit
    no scale                      refused, unless the optimizer has none either, or 1
    the scale of the state        taken                      taken
    another scale                 refused                    taken, and divided by what it carries

Inside of jit the two numbers are not known. But the gradients are right with the scale that they
carry, whichever the state holds.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax

from ampx.loss_scaling.nonfinite import unscale
from ampx.loss_scaling.state import LossScaleState
from ampx.mesh_axes import varying_axes
from ampx.trees import has_mark, is_marked
from ampx.updates.extra_args import explain_refused


def accept_results(
    tx: optax.GradientTransformationExtraArgs, init_scale: float
) -> optax.GradientTransformationExtraArgs:
    """The transformation, which also takes a `GradResult`, or one for each loss.

    Args:
      tx: a loss scale that takes `gradient_scale`, or an optimizer without one.
      init_scale: the first scale; 1.0 where there is none.
    """

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        if isinstance(params, LossScaleState):
            raise TypeError(
                "params is an optimizer state: the order is tx.update(grads, opt_state, params)"
            )
        if _is_result(updates):
            _warn_of_parts([updates], state, stacklevel=2)
            extra_args = _tell_optimizer(updates, state, extra_args)
            scale = _read_scale(updates, state, init_scale, None)
            updates = updates.grads
        elif isinstance(updates, tuple | list) and any(map(_is_result, updates)):
            found = list(enumerate(updates))
            results = [own for own in updates if _is_result(own)]
            _warn_of_parts(results, state, stacklevel=2)
            # Their gradients are added, so what is trained is the sum of the losses.
            extra_args = {"value": sum(own.loss for own in results), **extra_args}
            extra_args["shared_loss_axes"] = _find_shared_axes(results, state)
            scale = [
                _read_scale(own, state, init_scale, i) if _is_result(own) else None
                for i, own in found
            ]
            updates = take_grads(updates)
        else:
            return tx.update(updates, state, params, **extra_args)
        if isinstance(state, LossScaleState):
            extra_args["gradient_scale"] = scale
        elif isinstance(scale, jax.Array):
            updates = unscale(updates, scale)
        with explain_refused(extra_args):
            return tx.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def take_grads(given: Any) -> Any:
    """The gradients of a whole result, or of one for each loss; gradients as they are."""
    if _is_result(given):
        return given.grads
    if isinstance(given, tuple | list) and any(map(_is_result, given)):
        return tuple(take_grads(own) for own in given)
    return given


def put_grads(given: Any, grads: Any) -> Any:
    """What `take_grads` was given, with other gradients in the place of its own."""
    if _is_result(given):
        return given._replace(grads=grads)
    if isinstance(given, tuple | list) and any(map(_is_result, given)):
        return tuple(put_grads(*pair) for pair in zip(given, grads, strict=True))
    return grads


def _tell_optimizer(result: Any, state: Any, extra_args: dict[str, Any]) -> dict[str, Any]:
    """The extra arguments and what a result tells an optimizer, as `train_step` does, too."""
    told = {"value": result.loss, "weight": result.weight, **extra_args}
    return {**told, "shared_loss_axes": _find_shared_axes([result], state)}


def unscale_result(
    given: Any, grads: Any, state: Any, extra_args: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """What an optimizer without a loss scale gets of a result, as through `accept_results`.

    Returns:
      The gradients divided by what they carry, and the extra arguments with what the result tells.

    Raises:
      ValueError: if its loss was multiplied; inside of jit, where that is not known, never.
    """
    if not _is_result(given):
        return grads, extra_args
    _warn_of_parts([given], state, stacklevel=3)
    scale = _read_scale(given, state, 1.0, None)
    unscaled = grads if scale is None else unscale(grads, scale)
    return unscaled, _tell_optimizer(given, state, extra_args)


def replace_scale(state: LossScaleState, gradient_scale: Any) -> LossScaleState:
    """The state with the scale that gradients carry: a scalar, None, or a list of these."""
    if gradient_scale is None:
        return state
    if not isinstance(gradient_scale, list):
        return state._replace(loss_scale=gradient_scale)
    own = zip(gradient_scale, state.loss_scale, strict=True)
    scales = [kept if carried is None else carried for carried, kept in own]
    return state._replace(loss_scale=jax.numpy.stack(scales))


def _is_result(updates: Any) -> bool:
    # The mark of `accumulation.results.GradResult`: that package stands above this one.
    return is_marked(updates, "holds_scaled_gradients")


def _find_shared_axes(results: Sequence[Any], state: Any) -> tuple[str, ...]:
    """The mapped axes over which a loss is one number, and each device has its own gradients.

    Over these the gradients are parts of one sum: a mean of them would divide them once more. Types
    tell it, and under `check_vma=False` the result.

    Raises:
      ValueError: if a reduction inside would have to add gradients of one loss, and to average
        those of another.
    """
    shared = [
        (varying_axes(own.grads) - varying_axes(own.loss)).union(_told_axes(own)) for own in results
    ]
    differ = frozenset.union(*shared) - frozenset.intersection(*shared)
    if differ and has_mark(state, "reduces_gradients"):
        raise ValueError(
            f"over {sorted(differ)} one of the losses is the same on all devices, and another is "
            "each device's own: gradients of the first are added, those of the second averaged. "
            "Give all of them axis_name=, or none"
        )
    return tuple(sorted(frozenset.intersection(*shared)))


def _told_axes(result: Any) -> tuple[str, ...]:
    return result.shared_loss_axes.names if result.shared_loss_axes else ()


def _warn_of_parts(results: Sequence[Any], state: Any, stacklevel: int) -> None:
    """Warns if nobody adds up the parts of gradients that devices hold, and no type tells it.

    Each device would train other parameters. An error would refuse optimizers of others that add
    up by themselves.
    """
    axes = tuple(dict.fromkeys(itertools.chain.from_iterable(map(_told_axes, results))))
    if not axes or has_mark(state, "reduces_gradients"):
        return
    name = repr(axes[0] if len(axes) == 1 else axes)
    warnings.warn(
        f"ampx.value_and_grad(axis_name={name}) gives each device its part of the gradients, and "
        "nothing here sums the parts, so that devices train different parameters: put "
        f"ampx.all_reduce({name}) first in the chain inside of the loss scale. If you have summed "
        "them, or an optimizer of yours does, say so: result._replace(shared_loss_axes=None)",
        stacklevel=stacklevel + 1,
    )


def _read_scale(result: Any, state: Any, init_scale: float, loss_id: int | None) -> Any:
    """The scale of a result, None for none.

    Raises:
      ValueError: if the loss was not multiplied, or by another scale than that of the state.
    """
    has_scale = isinstance(state, LossScaleState)
    which = "" if loss_id is None else f", {loss_id}"
    advice = f"give ampx.value_and_grad loss_scale=ampx.current_loss_scale(opt_state{which})"
    if result.loss_scale is None:
        if has_scale and init_scale != 1:
            raise ValueError(
                "these gradients carry no loss scale, and the optimizer has one, by which it would "
                f"divide them: {advice}"
            )
        return None
    if not has_scale:
        held: Any = np.float32(1)
    else:
        held = state.loss_scale if loss_id is None else state.loss_scale[loss_id]
    if isinstance(held, jax.core.Tracer) or isinstance(result.loss_scale, jax.core.Tracer):
        return result.loss_scale
    if float(held) != float(result.loss_scale):
        raise ValueError(
            f"these gradients carry a loss scale of {float(result.loss_scale):g}, and that of the "
            f"optimizer's state is {float(held):g}: {advice}, of the state that update is given"
        )
    return result.loss_scale if has_scale else None

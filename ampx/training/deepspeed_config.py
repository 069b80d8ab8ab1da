"""`ampx.read_deepspeed_config`: what a DeepSpeed config says of precision, as arguments of ours.

Each key of a config has one of four fates, and none is passed over in silence:

    translated   fp16, bf16, gradient_accumulation_steps, gradient_clipping and
                 zero_optimization.stage, each to the arguments that mean the same here
    as it is     keys of `_ONE_VALUE`, whose one value says what ampx does anyway
    without      keys of `_NO_EFFECT` and `_NO_EFFECT_IN_ZERO`: logging, buffers, order of
    effect       messages. They change no number.
    refused      all else, by an error that names the key, the reason and the remedy

DeepSpeed's scale is `ampx.dynamic_loss_scale` with other settings. After an overflow it counts down
a tolerance, `hysteresis`, and falls only when that is used up. It is full again when the scale has
grown, or, with `consecutive_hysteresis`, after any good step: `refill="growth"` and `"finite"`.
It has no upper bound, so `max_scale` is the largest that float32 can undo. Where an overflow finds
it at `min_loss_scale` the run ends; here it raises a flag, for `ampx.raise_if_exhausted`, since a
compiled step cannot raise.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import optax

from ampx.checking import (
    as_bool,
    as_int,
    as_number,
    as_positive_int,
    check_transformation,
    describe,
    suggest,
)
from ampx.data_parallel.zero1 import zero1
from ampx.loss_scaling.dynamics import Refill
from ampx.loss_scaling.wrappers import dynamic_loss_scale
from ampx.mesh_axes import as_axes
from ampx.precision.opt_levels import Recipe, opt_level

_TRANSLATED = (
    "fp16",
    "bf16",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_optimization",
)
# Sizes of the batch are those of the batch that the step is given.
_NO_EFFECT = frozenset(
    "comms_logger csv_monitor dataloader_drop_last dump_state flops_profiler memory_breakdown "
    "steps_per_print tensorboard train_batch_size train_micro_batch_size_per_gpu "
    "wall_clock_breakdown wandb zero_allow_untested_optimizer".split()
)
_NO_EFFECT_IN_ZERO = frozenset(
    "allgather_bucket_size allgather_partitions contiguous_gradients overlap_comm "
    "reduce_bucket_size reduce_scatter round_robin_gradients".split()
)
# Key: the value that says what ampx does, and what it does.
_ONE_VALUE: Mapping[str, tuple[Any, str]] = {
    "fp32_allreduce": (True, "gradients are summed over devices in float32"),
    "communication_data_type": ("fp32", "gradients travel in float32"),
    "prescale_gradients": (False, "a mean divides before the sum, by the whole number of devices"),
    "gradient_predivide_factor": (1.0, "ampx.all_reduce has a gradient_predivide_factor"),
    "sparse_gradients": (False, "ampx.train_step takes sparse_rows for lookup tables"),
}
_REFUSED = {
    "optimizer": "build it with optax, give it as tx, and take the key out of the config",
    "scheduler": "optax's optimizers take a schedule as learning_rate; take the key out",
    "amp": "it hands its settings to Apex: give policy=ampx.opt_level(...) to ampx.train_step",
    "bfloat16": "it is the old name of 'bf16': write that",
    "data_types": "gradients are summed in float32, whatever their dtype; take the key out",
    "activation_checkpointing": "put jax.checkpoint around a layer of the model; take the key out",
    "pipeline": "its schedules are in ampx.pipelining; take the key out",
}
_LARGEST_SCALE = 2.0**126  # that `ampx.dynamic_loss_scale` allows


def read_deepspeed_config(
    config: Mapping[str, Any],
    tx: optax.GradientTransformation,
    *,
    axis_name: str | Sequence[str] | None = None,
) -> tuple[optax.GradientTransformation, dict[str, Any]]:
    """Translates a DeepSpeed config to an optimizer and arguments of `ampx.train_step`.

    ==================================  ===========================================================
    there                               here
    ==================================  ===========================================================
    `fp16.enabled`                      O2 in float16, norm layers in half too
    `fp16.loss_scale` (0)               0 is dynamic, another number a fixed scale
    `fp16.initial_scale_power` (16)     `init_scale`, the power of two
    `fp16.loss_scale_window` (1000)     `growth_interval`
    `fp16.hysteresis` (2)               `hysteresis`
    `fp16.consecutive_hysteresis`       False: `refill="growth"`; True: `refill="finite"`
    `fp16.min_loss_scale` (1)           `min_scale`, with `on_floor="raise-flag"`
    `bf16.enabled`                      O2 in bfloat16, norm layers in half too, no loss scale
    `gradient_accumulation_steps` (1)   `num_microbatches`
    `gradient_clipping`                 `max_grad_norm`; 0 is off
    `zero_optimization.stage` (0)       1: `ampx.zero1` around the optimizer, and the clip inside;
                                        2: the same, and `scatter_gradients`
    ==================================  ===========================================================

    The numbers in brackets are the defaults. Two things stay ampx's own: gradients of micro-batches
    are summed in float32, and a clip divides by the norm and not by the norm plus 1e-6.

    Args:
      config: a DeepSpeed config, such as `json.load` reads it.
      tx: the optimizer, without a clip, a loss scale or a reduction.
      axis_name: the mapped axes that the batch is split over, for a step inside `shard_map`; ZeRO
        needs it. None under plain `jit`.

    Returns:
      A pair: the optimizer to give to `ampx.train_step`, and a dict of its other arguments.

    Raises:
      TypeError: if `config` is no mapping, `tx` no gradient transformation, or a value of the wrong
        kind.
      ValueError: for a key or a value that ampx cannot translate exactly. It names the key, the
        reason and what to do.

    References:
      DeepSpeed Configuration JSON, https://www.deepspeed.ai/docs/config-json/.

    Examples:
      >>> import ampx, optax
      >>> config = {"bf16": {"enabled": True}, "gradient_clipping": 1.0, "steps_per_print": 10}
      >>> tx, settings = ampx.read_deepspeed_config(config, optax.adamw(1e-3))
      >>> print(settings["policy"].policy, settings["loss_scale"], settings["max_grad_norm"])
      p=f32,c=bf16,o=f32 None 1.0
    """
    check_transformation("tx", tx)
    axes = as_axes(axis_name, may_be_empty=True)
    config = _read_mapping("config", config)
    _refuse_others("", config, (*_TRANSLATED, *_NO_EFFECT, *_ONE_VALUE), _REFUSED)
    for key, (value, what) in _ONE_VALUE.items():
        if key in config and config[key] != value:
            raise ValueError(
                f"config[{key!r}]={config[key]!r} is not translated, only {value!r} is: {what}"
            )
    policy, loss_scale = _read_precision(config)
    settings = {
        "policy": policy,
        "loss_scale": loss_scale,
        "max_grad_norm": _read_clip(config),
        "num_microbatches": _read_accumulation(config),
        "axis_name": axes or None,
    }
    stage = _read_zero_stage(config)
    if stage == 0:
        return tx, settings
    if not axes:
        raise ValueError(
            f"config['zero_optimization']['stage']={stage} needs axis_name, the mapped axes of "
            "shard_map that the batch is split over, as in axis_name='data'"
        )
    if stage == 2:
        settings["scatter_gradients"] = True
    # Outside of `zero1` gradients are each device's own, so the clip moves inside.
    clip = settings.pop("max_grad_norm")
    inner = tx if clip is None else optax.chain(optax.clip_by_global_norm(clip), tx)
    return zero1(inner, axes), settings


def _read_precision(config: Mapping[str, Any]) -> tuple[Recipe | None, Any]:
    """The policy and the loss scale of a config; (None, None) for float32."""
    fp16, bf16 = (
        _read_mapping(f"config[{key!r}]", config.get(key, {})) for key in ("fp16", "bf16")
    )
    _refuse_others(
        "fp16",
        fp16,
        "enabled loss_scale initial_scale_power loss_scale_window hysteresis "
        "consecutive_hysteresis min_loss_scale".split(),
        {
            "auto_cast": "no batch is cast here: flax models cast what they are called with, and "
            "Recipe.wrap does it for other functions; take the key out",
            "fp16_master_weights_and_grads": "master weights are float32 here",
        },
    )
    _refuse_others(
        "bf16", bf16, ["enabled"], {"bf16_master_weights_and_grads": "master weights are float32"}
    )
    enabled = {
        key: as_bool(f"config[{key!r}]['enabled']", section.get("enabled", False))
        for key, section in (("fp16", fp16), ("bf16", bf16))
    }
    if all(enabled.values()):
        raise ValueError("config enables both 'fp16' and 'bf16': leave one")
    if enabled["bf16"]:
        return opt_level("O2", half_dtype="bfloat16", keep_norm_float32=False), None
    # A section that is off is read all the same: what is wrong in it would be wrong when it is on.
    scale = _read_loss_scale(fp16)
    if enabled["fp16"]:
        return opt_level("O2", half_dtype="float16", keep_norm_float32=False), scale
    return None, None


def _read_loss_scale(fp16: Mapping[str, Any]) -> Any:
    """A number for `ampx.loss_scale`, or a function that wraps an optimizer in a dynamic scale."""
    where = "config['fp16'][{!r}]".format
    fixed = as_number(where("loss_scale"), fp16.get("loss_scale", 0))
    power = as_int(where("initial_scale_power"), fp16.get("initial_scale_power", 16))
    lowest = as_number(where("min_loss_scale"), fp16.get("min_loss_scale", 1))
    interval = as_positive_int(where("loss_scale_window"), fp16.get("loss_scale_window", 1000))
    hysteresis = as_positive_int(where("hysteresis"), fp16.get("hysteresis", 2))
    in_a_row = as_bool(where("consecutive_hysteresis"), fp16.get("consecutive_hysteresis", False))
    if fixed:
        if fixed < 1:
            raise ValueError(f"{where('loss_scale')} must be 0 (dynamic) or >= 1, got {fixed}")
        return fixed
    # frexp splits a number into m * 2**e with 0.5 <= m < 1: m is 0.5 for powers of two alone.
    if lowest <= 0 or math.frexp(lowest)[0] != 0.5:
        raise ValueError(
            f"{where('min_loss_scale')}={lowest:g} is no power of two: a scale that stops there "
            "would round every gradient; write a power of two, such as 1"
        )
    if not math.log2(lowest) <= power <= math.log2(_LARGEST_SCALE):
        raise ValueError(
            f"{where('initial_scale_power')}={power} is outside [{math.log2(lowest):g}, 126]: the "
            "scale begins at min_loss_scale or above, and float32 holds no larger one"
        )
    refill: Refill = "finite" if in_a_row else "growth"
    return functools.partial(
        dynamic_loss_scale,
        init_scale=2.0**power,
        growth_interval=interval,
        hysteresis=hysteresis,
        refill=refill,
        min_scale=lowest,
        max_scale=_LARGEST_SCALE,
        on_floor="raise-flag",
    )


def _read_clip(config: Mapping[str, Any]) -> float | None:
    key = "config['gradient_clipping']"
    if "gradient_clipping" not in config:
        raise ValueError(
            f"{key} is missing: DeepSpeed's manual has 1.0 then, and copies of its code have 0: "
            "write the number"
        )
    norm = as_number(key, config["gradient_clipping"])
    if norm < 0:
        raise ValueError(f"{key} must be 0 (off) or a positive norm, got {norm}")
    return norm or None


def _read_accumulation(config: Mapping[str, Any]) -> int:
    key = "gradient_accumulation_steps"
    sizes = {"train_batch_size", "train_micro_batch_size_per_gpu"}
    if key not in config and sizes <= set(config):
        raise ValueError(
            f"config[{key!r}] is missing: DeepSpeed infers it from {sorted(sizes)} and the number "
            "of its processes; write it"
        )
    return as_positive_int(f"config[{key!r}]", config.get(key, 1))


def _read_zero_stage(config: Mapping[str, Any]) -> int:
    where = "config['zero_optimization']"
    section = _read_mapping(where, config.get("zero_optimization", {}))
    _refuse_others(
        "zero_optimization",
        section,
        ("stage", *_NO_EFFECT_IN_ZERO),
        {
            "offload_optimizer": "the optimizer's state stays on the devices",
            "offload_param": "parameters stay on the devices",
        },
    )
    stage = as_int(f"{where}['stage']", section.get("stage", 0))
    if stage in (0, 1, 2):
        return stage
    what = {
        3: "under plain jit parameters are divided by their shardings: write 0, and shard them",
    }
    raise ValueError(
        f"{where}['stage']={stage} is not translated: "
        + what.get(stage, "stages are 0, 1, 2 and 3, and ampx has the first three")
    )


def _read_mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict, as json.load reads it, {describe(value)}")
    return value


def _refuse_others(
    section: str, given: Mapping[str, Any], known: Sequence[str], reasons: Mapping[str, str]
) -> None:
    """Refuses every key that is not known, and the value "auto"."""
    for key, value in given.items():
        name = f"config[{section!r}][{key!r}]" if section else f"config[{key!r}]"
        if key in reasons:
            raise ValueError(f"{name} is not translated: {reasons[key]}")
        if key not in known:
            raise ValueError(
                f"{name} is not translated, and ampx does not know whether it matters: take it out "
                f"if it does not{suggest(key, known)}"
            )
        has_effect = key not in _NO_EFFECT | _NO_EFFECT_IN_ZERO
        if has_effect and isinstance(value, str) and value == "auto":
            raise ValueError(
                f"{name}='auto' is filled in by the Hugging Face trainer: write the value"
            )

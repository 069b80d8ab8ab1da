"""What a run of the language model is to be, checked before anything starts."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import optax

import ampx
from ampx import pipelining
from ampx.examples import meshes, pipelined

# Optimizers by the name that `--optimizer` takes; each is a function of a learning rate.
OPTIMIZERS: dict[str, Any] = {
    "adamw": optax.adamw,
    "fused-adamw": ampx.fused.adamw,
    # Both moments as int8, with a scale for each block: 2 bytes a parameter in the place of 8.
    "fused-adamw-int8": functools.partial(ampx.fused.adamw, mu_dtype="int8", nu_dtype="int8"),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """One training run.

    Attributes:
      precision: `"O0"` to `"O3"`, a policy such as `"float32"` or `"p=f32,c=bf16,o=f32"`, or a
        schedule such as `"fast|step|0.9"`.
      half: float16 or bfloat16, for O1, O2 and O3.
      loss_scale: `"dynamic"`, `"none"`, a number, or `"policy"` for the precision's own.
      init_scale: first dynamic scale.
      growth_interval: finite steps before a dynamic scale grows. The default of ampx is 2000, more
        than this whole run has.
      microbatches: slices of what one device has of a batch, one after the other; None is 1, and 2
        for each stage in a pipeline.
      steps: number of batches.
      batch_size: windows of `CONTEXT` characters in a batch.
      optimizer: one of `OPTIMIZERS`.
      learning_rate: its peak, after a tenth of the steps.
      max_grad_norm: gradients are clipped to this global norm.
      seed: of the first parameters and of the batches.
      mesh: `"data=N"` splits each batch over N devices, `"stage=N"` the layers; `"data=2,stage=2"`
        both; None is one device.
      zero1: divide the optimizer's state over the mesh.
      layers: of the model that `train` makes.
      schedule: who computes what when in a mesh with stages, one of `pipelined.SCHEDULES`; None is
        `"1f1b"`.
      final_loss: what the ratio is to in a precision such as `"fast|loss|1.05"`.
      dots: how matrix products of O1 run in float8: `"float8"`, a recipe of `ampx.Float8`, or None.

    Examples:
      >>> from ampx.examples.configs import Config
      >>> Config(precision="O2", half="float16", loss_scale="128").label
      'O2 float16, scale 128'
      >>> print(Config(mesh="stage=2", microbatches=2).pipeline)
      1f1b: 2 stages on 2 devices, 2 micro-batches, 6 ticks, 33.3% idle
      tick      0  1  2  3  4  5
      device 0  F0 F1 .  B0 .  B1
      device 1  .  F0 B0 F1 B1 .
    """

    precision: str = "float32"
    half: str = "bfloat16"
    loss_scale: Any = "policy"
    init_scale: float = 2.0**16
    growth_interval: int = 100
    microbatches: int | None = None
    steps: int = 1000
    batch_size: int = 16
    optimizer: str = "adamw"
    learning_rate: float = 5e-3
    max_grad_norm: float = 1.0
    seed: int = 0
    mesh: str | None = None
    zero1: bool = False
    layers: int = 2
    schedule: str | None = None
    final_loss: float | None = None
    dots: Any = None

    # Everything that can be wrong is refused here, before a device has been touched.
    def __post_init__(self) -> None:
        positive = ("steps", "batch_size", "layers", "learning_rate", "max_grad_norm")
        for name in (*positive, "microbatches"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        if self.optimizer not in OPTIMIZERS:
            names = ", ".join(OPTIMIZERS)
            raise ValueError(f"optimizer must be one of {names}, got {self.optimizer!r}")
        if self.zero1 and self.optimizer.endswith("int8"):
            raise ValueError(f"zero1 divides arrays, not the int8 blocks of {self.optimizer}")
        if self.schedule not in (None, *pipelined.SCHEDULES):
            names = ", ".join(pipelined.SCHEDULES)
            raise ValueError(f"schedule must be one of {names}, got {self.schedule!r}")
        if self.schedule is not None and self.pipeline is None:
            raise ValueError(
                f"schedule {self.schedule} needs a mesh with {meshes.STAGE}=N, such as "
                f"{meshes.DATA}=2,{meshes.STAGE}=2"
            )
        if self.final_loss is not None and "|" not in self.precision:
            raise ValueError(f"final_loss is for a schedule, not for precision {self.precision}")
        if self.phases is not None and self.loss_scale != "policy":
            raise ValueError(
                f"loss_scale={self.loss_scale}: each phase of {self.precision} has its own"
            )
        if self.dots is not None and self.precision != "O1":
            raise ValueError(f"dots={self.dots} is for precision O1, not for {self.precision}")
        meshes.check(self.mesh, self.batch_size, self.num_microbatches, self.zero1)

    @property
    def num_microbatches(self) -> int:
        """How many slices a device makes of its part of a batch."""
        if self.microbatches is not None:
            return self.microbatches
        # A pipeline of p stages with m micro-batches idles for (p - 1)/(m + p - 1) of its time: at
        # most a third with m = 2 p.
        return 2 * meshes.axis_sizes(self.mesh).get(meshes.STAGE, 0) or 1

    @property
    def pipeline(self) -> pipelining.Schedule | None:
        """The schedule of a mesh with stages, None without."""
        stages = meshes.axis_sizes(self.mesh).get(meshes.STAGE)
        if stages is None:
            return None
        return pipelining.make_schedule(self.schedule or "1f1b", stages, self.num_microbatches)

    @property
    def label(self) -> str:
        """What the run is called in tables and pictures."""
        # A policy names its dtypes itself; of an opt level the half dtype has to be told.
        has_half = self.precision in ("O1", "O2", "O3")
        name = f"{self.precision} {self.half}" if has_half else self.precision
        name += "" if self.dots is None else f" and {self.dots}"
        scales = {"policy": "", "none": "", "dynamic": ", dynamic scale"}
        scale = scales.get(self.loss_scale, f", scale {self.loss_scale}")
        return name + scale + ("" if self.optimizer == "adamw" else f", {self.optimizer}")

    @property
    def policy(self) -> ampx.Recipe | ampx.PrecisionSchedule:
        """What to give to `ampx.train_step(policy=...)`."""
        return self.phases or self.recipe

    @property
    def phases(self) -> ampx.PrecisionSchedule | None:
        """The precision as a schedule, None for one that does not change."""
        if "|" not in self.precision:
            return None
        # Only a schedule in shares of a run, such as "fast|step|0.9", needs to know its length.
        total_steps = self.steps if "|step" in self.precision else None
        return ampx.precision_schedule(
            self.precision, total_steps=total_steps, final_loss=self.final_loss
        )

    @property
    def recipe(self) -> ampx.Recipe:
        """The opt level with the run's half dtype and loss scale, or the policy as a recipe.

        For a schedule it is the last phase's: the precision that the trained model is judged at.
        """
        if self.phases is not None:
            return self.phases.recipes[-1]
        if self.precision.startswith("O"):
            recipe = ampx.opt_level(self.precision, half_dtype=self.half, dots=self.dots)
        else:
            recipe = ampx.Recipe(ampx.get_policy(self.precision))
        if self.loss_scale == "policy":
            return recipe
        return dataclasses.replace(recipe, loss_scale=self.loss_scale)


def compared_configs(config: Config) -> list[Config]:
    """The six runs of the comparison, alike in all but precision.

    Args:
      config: gives everything else.

    Returns:
      float32, O1 and O2 with bfloat16 and with float16 (under a dynamic scale, which starts too
      high at O2), O3 float16.

    Examples:
      >>> from ampx.examples.configs import Config, compared_configs
      >>> [config.label for config in compared_configs(Config())]  # doctest: +NORMALIZE_WHITESPACE
      ['float32', 'O1 bfloat16', 'O1 float16, dynamic scale',
       'O2 bfloat16', 'O2 float16, dynamic scale', 'O3 float16']
    """
    bfloat16 = dict(half="bfloat16", loss_scale="none")  # it has float32's range
    float16 = dict(half="float16", loss_scale="dynamic")  # gradients below 2**-25 would be zero
    differences: list[dict[str, Any]] = [
        dict(precision="float32"),
        dict(precision="O1", **bfloat16),
        dict(precision="O1", **float16),
        dict(precision="O2", **bfloat16),
        dict(precision="O2", **float16, init_scale=2.0**24),
        # Float16 alone, Apex's baseline of speed: master weights are what it lacks.
        dict(precision="O3", half="float16", loss_scale="policy"),
    ]
    return [dataclasses.replace(config, **difference) for difference in differences]

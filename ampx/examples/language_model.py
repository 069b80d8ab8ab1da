"""Trains a small language model at any precision: run it with `python -m`, or call its functions.

Without flags it trains six times through the same `ampx.train_step` (float32; O2 with bfloat16; O2
with float16 and a loss scale that starts too high on purpose; O3 with float16) and compares what
each run cost and reached.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import linen as nn

import ampx
from ampx import plotting
from ampx.examples import meshes, reporting, text
from ampx.examples.transformer import CONTEXT, make_loss, make_model

EVALUATION_BATCH = 64


@dataclasses.dataclass(frozen=True)
class Config:
    """One training run.

    Attributes:
      precision: `"O0"` to `"O3"`, or a policy such as `"float32"` or `"p=f32,c=bf16,o=f32"`.
      half: float16 or bfloat16, for O1, O2 and O3.
      loss_scale: `"dynamic"`, `"none"`, a number, or `"policy"` for the precision's own.
      init_scale: first dynamic scale.
      growth_interval: finite steps before a dynamic scale grows. The library's default is 2000,
        longer than this whole run.
      microbatches: slices of a batch, one after the other.
      steps: number of batches.
      batch_size: windows of `CONTEXT` characters in a batch.
      learning_rate: its peak, after a tenth of the steps.
      max_grad_norm: gradients are clipped to this global norm.
      seed: of the first parameters and of the batches.
      mesh: `"data=N"` splits each batch over N devices; None is one device.
      zero1: divide the optimizer's state over the mesh.

    Examples:
      >>> from ampx.examples.language_model import Config
      >>> Config(precision="O2", half="float16", loss_scale="128").label
      'O2 float16, scale 128'
    """

    precision: str = "float32"
    half: str = "bfloat16"
    loss_scale: Any = "policy"
    init_scale: float = 2.0**16
    growth_interval: int = 100
    microbatches: int = 1
    steps: int = 1000
    batch_size: int = 16
    learning_rate: float = 5e-3
    max_grad_norm: float = 1.0
    seed: int = 0
    mesh: str | None = None
    zero1: bool = False

    def __post_init__(self) -> None:
        for name in ("microbatches", "steps", "batch_size", "learning_rate", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        meshes.check(self.mesh, self.batch_size, self.microbatches, self.zero1)

    @property
    def label(self) -> str:
        """What the run is called in tables and pictures."""
        has_half = self.precision in ("O1", "O2", "O3")
        name = f"{self.precision} {self.half}" if has_half else self.precision
        scales = {"policy": "", "none": "", "dynamic": ", dynamic scale"}
        return name + scales.get(self.loss_scale, f", scale {self.loss_scale}")

    @property
    def recipe(self) -> ampx.Recipe:
        """The opt level with the run's half dtype and loss scale, or the policy as a recipe."""
        if self.precision.startswith("O"):
            recipe = ampx.opt_level(self.precision, half_dtype=self.half)
        else:
            recipe = ampx.Recipe(ampx.get_policy(self.precision))
        if self.loss_scale == "policy":
            return recipe
        return dataclasses.replace(recipe, loss_scale=self.loss_scale)


class Run(NamedTuple):
    """What came out of one run.

    Attributes:
      label: the run's name.
      history: the reports of all steps as one `StepReport` of numpy arrays.
      held_out_loss: nats per character of held-out text, computed at the run's own precision.
      milliseconds: mean time of a step, without compilation.
      compile_seconds: time to trace and compile the step.
      temporary_bytes: memory of the compiled step beyond its inputs and outputs.
      state: the last `ampx.TrainState`; whole arrays, also after training over a mesh.
      devices: how many there were.

    Examples:
      >>> from ampx.examples import language_model, text
      >>> corpus = text.load_corpus()
      >>> model = language_model.make_model(corpus, layers=1, width=8, heads=1)
      >>> config = language_model.Config(precision="O2", steps=3, batch_size=2)
      >>> run = language_model.train(config, corpus=corpus, model=model)
      >>> run.history.loss.shape, run.skipped
      ((3,), 0)
    """

    label: str
    history: ampx.StepReport
    held_out_loss: float
    milliseconds: float
    compile_seconds: float
    temporary_bytes: int
    state: ampx.TrainState
    devices: int = 1

    @property
    def skipped(self) -> int:
        """Steps that were undone."""
        return int(np.sum(self.history.overflow))

    @property
    def final_scale(self) -> float:
        """The loss scale after the last step."""
        return float(ampx.current_loss_scale(self.state.opt_state))


def make_step(config: Config, loss_fn: Callable[[Any, jax.Array], jax.Array]) -> ampx.TrainStep:
    """The training step that a configuration asks for.

    Args:
      config: the run.
      loss_fn: from parameters and windows to a scalar.

    Returns:
      An `ampx.TrainStep`, not yet jitted.

    Raises:
      ValueError: for settings that ampx refuses, such as a scale that is not a power of two.

    Examples:
      >>> from ampx.examples.language_model import Config, make_step
      >>> print(make_step(Config(precision="O2"), lambda params, windows: 0.0).recipe.policy)
      p=f32,c=bf16,o=f32
    """
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.steps // 10,
        decay_steps=config.steps,
        end_value=config.learning_rate / 20,
    )
    recipe = config.recipe
    loss_scale: Any = recipe.loss_scale
    if loss_scale == "dynamic":
        loss_scale = functools.partial(
            ampx.dynamic_loss_scale,
            init_scale=config.init_scale,
            growth_interval=config.growth_interval,
            max_scale=max(2.0**24, config.init_scale),
        )
    optimizer, max_grad_norm = optax.adamw(schedule), config.max_grad_norm
    if config.zero1:  # gradients are summed over devices in it, and clipped after that
        clip = optax.clip_by_global_norm(config.max_grad_norm)
        optimizer, max_grad_norm = ampx.zero1(optax.chain(clip, optimizer), meshes.AXIS), None
    return ampx.train_step(
        loss_fn,
        optimizer,
        policy=recipe,
        loss_scale=loss_scale,
        max_grad_norm=max_grad_norm,
        num_microbatches=config.microbatches,
        learning_rate=schedule,
        axis_name=meshes.AXIS if config.mesh else None,
    )


def train(
    config: Config,
    *,
    corpus: text.Corpus | None = None,
    model: nn.Module | None = None,
    on_step: Callable[[ampx.StepReport], None] | None = None,
) -> Run:
    """Trains a model and judges it on held-out text.

    Args:
      config: the run.
      corpus: the text; Python's reference by default.
      model: a linen module from characters to logits; two layers of 64 by default.
      on_step: is given each step's report. Reading one waits for its step; it comes a step late,
        so that the device already has the next to work on.

    Returns:
      A `Run`.

    Raises:
      ValueError: for settings that ampx refuses, and for a mesh without enough devices.

    Examples:
      >>> from ampx.examples import language_model, text
      >>> corpus = text.load_corpus()
      >>> model = language_model.make_model(corpus, layers=1, width=8, heads=1)
      >>> config = language_model.Config(steps=2, batch_size=4, microbatches=2)
      >>> language_model.train(config, corpus=corpus, model=model).label
      'float32'
    """
    corpus = text.load_corpus() if corpus is None else corpus
    model = make_model(corpus) if model is None else model
    loss_fn = make_loss(model)
    mesh = meshes.make_mesh(config.mesh)

    rng = np.random.default_rng(config.seed)
    draw = functools.partial(text.random_windows, corpus.train, rng, config.batch_size, CONTEXT + 1)
    params = jax.jit(model.init)(jax.random.key(config.seed), draw()[:, :-1])["params"]
    step, state = meshes.spread(make_step(config, loss_fn), params, mesh)

    started = time.perf_counter()
    jitted = jax.jit(step, donate_argnums=0)
    compiled = jitted.lower(state, meshes.split(draw(), mesh)).compile()
    compile_seconds = time.perf_counter() - started
    memory = compiled.memory_analysis()

    reports = []
    started = time.perf_counter()
    for _ in range(config.steps):
        state, report = compiled(state, meshes.split(draw(), mesh))
        if on_step and reports:
            on_step(reports[-1])
        reports.append(report)
    jax.block_until_ready(state)
    milliseconds = 1e3 * (time.perf_counter() - started) / config.steps
    if on_step:
        on_step(reports[-1])

    state = meshes.gather(state, mesh)
    return Run(
        label=config.label,
        history=jax.tree.map(lambda *values: np.stack(values), *jax.device_get(reports)),
        held_out_loss=evaluate(
            functools.partial(config.recipe.call, loss_fn), state.params, corpus
        ),
        milliseconds=milliseconds,
        compile_seconds=compile_seconds,
        temporary_bytes=memory.temp_size_in_bytes if memory else 0,
        state=state,
        devices=meshes.device_count(config.mesh),
    )


def evaluate(
    loss_fn: Callable[[Any, jax.Array], jax.Array], params: Any, corpus: text.Corpus
) -> float:
    """The mean loss over the held-out text.

    Args:
      loss_fn: from parameters and windows to a scalar. `recipe.call` around it makes it compute at
        the precision of training.
      params: the parameters.
      corpus: the text; windows that do not fill a batch at its end are left out.

    Returns:
      Nats per character.

    Examples:
      >>> from ampx.examples import language_model, text
      >>> language_model.evaluate(lambda params, windows: params, 1.5, text.load_corpus())
      1.5
    """
    windows = text.all_windows(corpus.held_out, CONTEXT + 1)
    size = min(EVALUATION_BATCH, len(windows))
    starts = range(0, len(windows) - size + 1, size)
    jitted = jax.jit(loss_fn)
    losses = [jitted(params, windows[start : start + size]) for start in starts]
    return float(np.mean(jax.device_get(losses)))


def compared_configs(config: Config) -> list[Config]:
    """The six runs of the comparison, alike in all but precision.

    Args:
      config: gives everything else.

    Returns:
      float32, O1 and O2 with bfloat16 and with float16 (under a dynamic scale, which starts too
      high at O2), O3 float16.

    Examples:
      >>> from ampx.examples.language_model import Config, compared_configs
      >>> [config.label for config in compared_configs(Config())]  # doctest: +NORMALIZE_WHITESPACE
      ['float32', 'O1 bfloat16', 'O1 float16, dynamic scale',
       'O2 bfloat16', 'O2 float16, dynamic scale', 'O3 float16']
    """
    bfloat16 = dict(half="bfloat16", loss_scale="none")  # it has float32's range
    float16 = dict(half="float16", loss_scale="dynamic")
    differences: list[dict[str, Any]] = [
        dict(precision="float32"),
        dict(precision="O1", **bfloat16),
        dict(precision="O1", **float16),
        dict(precision="O2", **bfloat16),
        dict(precision="O2", **float16, init_scale=2.0**24),
        dict(precision="O3", half="float16", loss_scale="policy"),
    ]
    return [dataclasses.replace(config, **difference) for difference in differences]


def compare(
    configs: Sequence[Config],
    *,
    corpus: text.Corpus | None = None,
    model: nn.Module | None = None,
    output: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> list[Run]:
    """Trains each configuration, prints a table and saves a picture; of several processes, one.

    Args:
      configs: the runs; the first is the one that the others are compared with.
      corpus: see `train`.
      model: see `train`.
      output: file for the picture; None saves none.
      progress: whether to show progress bars.

    Returns:
      The runs.

    Raises:
      ValueError: for settings that ampx refuses.

    Examples:
      >>> from ampx.examples import language_model as lm
      >>> runs = lm.compare(lm.compared_configs(lm.Config()), output="demo.png")  # doctest: +SKIP
    """
    corpus = text.load_corpus() if corpus is None else corpus
    runs, is_first = [], jax.process_index() == 0
    for config in configs:
        tokens = config.batch_size * CONTEXT
        bar = reporting.progress_bar(
            config.label, config.steps, tokens, disable=not (progress and is_first)
        )
        with bar as on_step:
            runs.append(train(config, corpus=corpus, model=model, on_step=on_step))
    if not is_first:
        return runs
    print(reporting.format_table(runs, text.unigram_entropy(corpus)))
    if output is not None:
        axes, _ = plotting.plot_training({run.label: run.history for run in runs})
        axes.set_ylabel("training loss (nats per character)")
        plt.savefig(output, dpi=120)
        plt.close()
        print(f"Picture: {output}")
    return runs


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; `--help` lists the flags.

    Args:
      argv: arguments, `sys.argv` by default.

    Raises:
      SystemExit: for flags that are wrong or contradict each other.

    Examples:
      >>> from ampx.examples import language_model
      >>> language_model.main(["--precision", "O2", "--steps", "100"])  # doctest: +SKIP
    """
    parser = _parser()
    flags = vars(parser.parse_args(argv))
    output, progress = flags.pop("output"), not flags.pop("no_progress")
    processes = {name: flags.pop(name) for name in meshes.PROCESS_FLAGS}
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        configs = _configs(given)
        if output.suffix != ".png" or not output.parent.is_dir():
            raise ValueError(f"--output must be a .png file in a folder that exists, got {output}")
        meshes.start(configs[0].mesh, **processes)
        for config in configs:
            make_step(config, lambda params, windows: jnp.zeros(()))
    except (NotImplementedError, TypeError, ValueError) as error:
        parser.error(str(error))
    compare(configs, output=output, progress=progress)


def _configs(given: dict[str, Any]) -> list[Config]:
    if "precision" in given:
        config = Config(**given)
        if "init_scale" in given and config.recipe.loss_scale != "dynamic":
            raise ValueError(
                f"--init-scale needs a dynamic loss scale, not {config.recipe.loss_scale}"
            )
        return [config]
    alone = [name for name in ("half", "loss_scale", "init_scale") if name in given]
    if alone:
        flag = "--" + alone[0].replace("_", "-")
        raise ValueError(f"{flag} needs --precision: without it, six precisions are compared")
    return compared_configs(Config(**given))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ampx.examples.language_model",
        usage="%(prog)s [flags]",
        description="Train a small language model at one precision, or compare six (no flags).",
    )
    flag = parser.add_argument
    flag("--precision", help="O0, O1, O2, O3, float32, or a policy such as p=f32,c=bf16,o=f32")
    flag("--half", choices=("float16", "bfloat16"), help="half type of O1, O2 and O3 (bfloat16)")
    flag("--loss-scale", metavar="SCALE", help="dynamic, none or a number (the precision's own)")
    flag("--init-scale", type=float, metavar="SCALE", help="first dynamic loss scale (65536)")
    flag("--microbatches", type=int, metavar="N", help="slices of each batch (1)")
    flag("--steps", type=int, metavar="N", help=f"training steps ({Config.steps})")
    flag("--batch-size", type=int, metavar="N", help=f"windows in a batch ({Config.batch_size})")
    flag("--learning-rate", type=float, metavar="X", help=f"its peak ({Config.learning_rate})")
    flag("--max-grad-norm", type=float, metavar="X", help=f"clip to ({Config.max_grad_norm})")
    flag("--seed", type=int, metavar="N", help=f"of parameters and batches ({Config.seed})")
    meshes.add_flags(parser)
    flag(
        "--output",
        type=Path,
        metavar="FILE.png",
        default=Path("language_model.png"),
        help="picture",
    )
    flag("--no-progress", action="store_true", help="show no progress bars")
    return parser


if __name__ == "__main__":
    main()

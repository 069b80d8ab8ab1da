"""Trains a small language model at any precision: run it with `python -m`, or call its functions.

Without flags it trains six times through the same `ampx.train_step` (float32; O1 and O2, each with
bfloat16 and with float16; O3 with float16) and compares what each run cost and reached. At O2 with
float16 the loss scale starts too high on purpose, so that the first steps are skipped.

    text ─► windows i32[batch, CONTEXT + 1] ─► loss ─► train_step ─► Run ─► table, picture

The modules beside this one: `text` (data), `transformer` (model and loss), `configs` (what a run
is to be), `meshes` and `pipelined` (several devices), `runs` and `reporting` (results),
`command_line`.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import linen as nn

import ampx
from ampx import pipelining, plotting
from ampx.examples import command_line, meshes, pipelined, reporting, text
from ampx.examples.configs import OPTIMIZERS, Config
from ampx.examples.runs import Run
from ampx.examples.transformer import CONTEXT, make_loss, make_model

EVALUATION_BATCH = 64
# Steps given to the devices ahead of time. With virtual CPU devices, dozens of steps with
# collectives in flight can wait for each other for ever (XLA ends the program after 40 seconds).
AHEAD = 8


def make_step(
    config: Config,
    loss_fn: Callable[[Any, jax.Array], jax.Array] | pipelining.PipelineGradients,
) -> ampx.TrainStep:
    """The training step that a configuration asks for.

    Args:
      config: the run.
      loss_fn: from parameters and windows to a scalar; for a pipeline what
        `pipelined.make_gradients` returns.

    Returns:
      An `ampx.TrainStep`, not yet jitted.

    Raises:
      ValueError: for settings that ampx refuses, such as a scale that is not a power of two.

    Examples:
      >>> from ampx.examples.configs import Config
      >>> from ampx.examples.language_model import make_step
      >>> print(make_step(Config(precision="O2"), lambda params, windows: 0.0).recipe.policy)
      p=f32,c=bf16,o=f32
    """
    # Adam's second moments are estimates from few steps at first: the rate grows from zero.
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.steps // 10,
        decay_steps=config.steps,
        end_value=config.learning_rate / 20,
    )
    # The opt level says "dynamic"; the settings of this short run differ from ampx's defaults.
    loss_scale: Any = config.policy.loss_scale
    if loss_scale == "dynamic":
        loss_scale = functools.partial(
            ampx.dynamic_loss_scale,
            init_scale=config.init_scale,
            growth_interval=config.growth_interval,
            max_scale=max(2.0**24, config.init_scale),
        )
    # A clip belongs between the reduction of gradients and the optimizer. `train_step` puts it
    # there, but not into `zero1`, which reduces by itself.
    optimizer, max_grad_norm = OPTIMIZERS[config.optimizer](schedule), config.max_grad_norm
    if config.zero1:
        clip = optax.clip_by_global_norm(config.max_grad_norm)
        optimizer, max_grad_norm = ampx.zero1(optax.chain(clip, optimizer), meshes.DATA), None
    # A pipeline has its policy and micro-batches already, from `pipelined.make_gradients`.
    about_gradients: dict[str, Any] = {}
    if not isinstance(loss_fn, pipelining.PipelineGradients):
        about_gradients = dict(
            policy=config.policy,
            num_microbatches=config.num_microbatches,
            axis_name=meshes.DATA if config.mesh else None,
        )
    return ampx.train_step(
        loss_fn,
        optimizer,
        loss_scale=loss_scale,
        max_grad_norm=max_grad_norm,
        learning_rate=schedule,
        **about_gradients,
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
      model: a linen module from characters to logits; by default a `LanguageModel` of width 64 with
        the layers of the configuration. A pipeline needs a `LanguageModel`.
      on_step: is given each step's report. Reading one waits for its step; it comes a step late,
        so that the device already has the next to work on.

    Returns:
      A `Run`.

    Raises:
      TypeError: for a pipeline of another model.
      ValueError: for settings that ampx refuses, for a mesh without enough devices, and for stages
        that cannot have equally many layers.

    Examples:
      >>> from ampx.examples import language_model, text
      >>> corpus = text.load_corpus()
      >>> model = language_model.make_model(corpus, layers=1, width=8, heads=1)
      >>> config = language_model.Config(steps=2, batch_size=4, microbatches=2)
      >>> language_model.train(config, corpus=corpus, model=model).label
      'float32'
    """
    corpus = text.load_corpus() if corpus is None else corpus
    model = make_model(corpus, layers=config.layers) if model is None else model
    loss_fn = make_loss(model)
    mesh = meshes.make_mesh(config.mesh)

    # All runs of a comparison start from the same parameters and see the same batches; so do all
    # processes of one run, each of which then keeps the rows of its own devices.
    rng = np.random.default_rng(config.seed)
    draw = functools.partial(text.random_windows, corpus.train, rng, config.batch_size, CONTEXT + 1)
    params = jax.jit(model.init)(jax.random.key(config.seed), draw()[:, :-1])["params"]
    if mesh is None or config.pipeline is None:
        step, state = meshes.spread(make_step(config, loss_fn), params, mesh)
    else:
        grads_of = pipelined.make_gradients(model, config.pipeline, mesh, config.policy)
        step = make_step(config, grads_of)
        step, state = pipelined.spread(step, pipelined.divide_params(params), mesh)

    # Compiled by hand, to time it and to ask for its memory. Donated, so that the new state takes
    # the place of the old.
    started = time.perf_counter()
    jitted = jax.jit(step, donate_argnums=0)
    compiled = jitted.lower(state, meshes.split(draw(), mesh)).compile()
    compile_seconds = time.perf_counter() - started
    memory = compiled.memory_analysis()

    reports = []
    started = time.perf_counter()
    for _ in range(config.steps):
        state, report = compiled(state, meshes.split(draw(), mesh))
        if on_step and reports:  # the report of the step before, while this one runs
            on_step(reports[-1])
        reports.append(report)
        jax.block_until_ready(reports[-AHEAD:][0])  # the report of AHEAD steps ago
    jax.block_until_ready(state)
    milliseconds = 1e3 * (time.perf_counter() - started) / config.steps
    if on_step:
        on_step(reports[-1])

    # Whatever the mesh was, the parameters are judged on one device, in the model's own layout.
    state = pipelined.join_params(meshes.gather(state, mesh))
    return Run(
        label=config.label,
        # From one report for each step to one report of arrays, each of shape (steps,).
        history=jax.tree.map(lambda *values: np.stack(values), *jax.device_get(reports)),
        # `recipe.call` casts parameters as in training: the loss is that of what was trained.
        held_out_loss=evaluate(
            functools.partial(config.recipe.call, loss_fn), state.params, corpus
        ),
        milliseconds=milliseconds,
        compile_seconds=compile_seconds,
        temporary_bytes=memory.temp_size_in_bytes if memory else 0,
        state=state,
        devices=meshes.device_count(config.mesh),
        schedule=config.pipeline,
        characters=config.batch_size * CONTEXT,
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
    # All batches have one shape, so the loss is compiled once.
    windows = text.all_windows(corpus.held_out, CONTEXT + 1)
    size = min(EVALUATION_BATCH, len(windows))
    starts = range(0, len(windows) - size + 1, size)
    jitted = jax.jit(loss_fn)
    losses = [jitted(params, windows[start : start + size]) for start in starts]
    return float(np.mean(jax.device_get(losses)))


def compare(
    configs: Sequence[Config],
    *,
    corpus: text.Corpus | None = None,
    model: nn.Module | None = None,
    seeds: Sequence[int] | None = None,
    output: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> list[Run]:
    """Trains each configuration, prints a table and saves a picture; of several processes, one.

    Args:
      configs: the runs; the first is the one that the others are compared with.
      corpus: see `train`.
      model: see `train`.
      seeds: each configuration is trained once with each of them, and the table has ranges; None
        leaves each configuration its own.
      output: file for the picture, which shows the first seed; None saves none.
      progress: whether to show progress bars.

    Returns:
      The runs, configuration by configuration for the first seed, then for the next.

    Raises:
      ValueError: for settings that ampx refuses.

    Examples:
      >>> from ampx.examples.configs import Config, compared_configs
      >>> from ampx.examples.language_model import compare
      >>> runs = compare(compared_configs(Config()), output="demo.png")  # doctest: +SKIP
    """
    corpus = text.load_corpus() if corpus is None else corpus
    runs, is_first = [], jax.process_index() == 0
    of_seeds = [replace(config, seed=seed) for seed in seeds or () for config in configs]
    for config in of_seeds or configs:
        bar = ampx.progress_bar(
            config.steps,
            label=config.label if seeds is None else f"{config.label}, seed {config.seed}",
            tokens_per_step=config.batch_size * CONTEXT,
            disable=not (progress and is_first),
        )
        with bar as on_step:
            runs.append(train(config, corpus=corpus, model=model, on_step=on_step))
    if not is_first:
        return runs
    rows = [runs[number :: len(configs)] for number in range(len(configs))]
    print(reporting.format_table(rows, text.unigram_entropy(corpus)))
    if seeds is not None:
        print(f"Seeds {', '.join(map(str, seeds))}: a figure is its range over them.")
    if output is not None:
        histories = {row[0].label: row[0].history for row in rows}
        reference = runs[0].label if len(histories) > 1 else None
        axes, *_ = plotting.plot_training(histories, reference=reference)
        axes.set_ylabel("training loss\n(nats per character)")
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
    parser = command_line.make_parser()
    flags = parser.parse_args(argv)
    try:
        command = command_line.read(flags)
        meshes.start(command.configs[0].mesh, **command.processes)
        # Every step is built once before the first run starts: settings that ampx refuses are then
        # errors of the command line, and not the end of the fifth of six runs.
        for config in command.configs:
            make_step(config, lambda params, windows: jnp.zeros(()))
    except (NotImplementedError, TypeError, ValueError) as error:
        parser.error(str(error))
    compare(command.configs, seeds=command.seeds, output=command.output, progress=command.progress)


if __name__ == "__main__":
    main()

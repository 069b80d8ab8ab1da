"""What a running training shows: figures by name out of any optimizer state, and a progress bar.

Every wrapper of ampx keeps its figures as fields of its own state, wherever that is nested in the
optimizer state. `metrics` walks the whole state and collects them:

    LossScaleState                        loss_scale, skipped_total, ...
      └ chain                             (a tuple: walked through)
          ├ ReductionState                num_buckets, reduced_bytes
          └ InjectStatefulHyperparamsState   learning_rate

tqdm is imported when a bar is shown, so that ampx itself does without it.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import optax

from ampx.accumulation.multi_steps import MultiStepsState
from ampx.checking import as_bool, as_positive_int, check_word
from ampx.data_parallel.reduction_states import ReductionState
from ampx.data_parallel.zero1 import Zero1State
from ampx.drawing import format_scale
from ampx.loss_scaling.state import GrowthIntervalState, LossScaleState, OptimizersState
from ampx.precision.follow_schedule import PrecisionScheduleState
from ampx.tree_checks import check_opt_state
from ampx.trees import without_marks
from ampx.updates.clipping import ClippedState

if TYPE_CHECKING:
    from ampx.training.step_reports import StepReport

# The fields of each state that are figures. One that holds a mapping stands for what is in it.
_FIGURES: dict[type, tuple[str, ...]] = {
    LossScaleState: (
        "loss_scale",
        "growth_tracker",
        "hysteresis_tracker",
        "overflow",
        "skipped_total",
        "inf_total",
        "nan_total",
        "floor_hits",
        "ceiling_hits",
        "bad_update_total",
        "nonfinite_loss_total",
    ),
    GrowthIntervalState: ("growth_interval",),
    OptimizersState: ("optimizer_skipped", "optimizer_skipped_total"),
    MultiStepsState: (
        "micro_step",
        "gradient_step",
        "weight_sum",
        "window_is_bad",
        "dropped_total",
    ),
    ReductionState: ("num_buckets", "reduced_bytes"),
    Zero1State: ("gradient_norm",),
    ClippedState: ("gradient_norm",),
    PrecisionScheduleState: ("precision_phase", "steps_seen"),
    optax.InjectStatefulHyperparamsState: ("hyperparams",),
}
_LOGGED_AS = {
    "gradient_norm": "global_norm",  # as in a `StepReport`
    "optimizer_skipped": "overflow",  # what they are for all optimizers together
    "optimizer_skipped_total": "skipped_total",
}
Names = tuple[str, ...]


def metrics(opt_state: optax.OptState) -> dict[str, jax.Array]:
    """Collects every figure that ampx keeps in an optimizer state, by name, ready to be logged.

    Nothing is computed and nothing is read from the device: inside `jit` the figures may be part of
    what a step returns, outside they are the state's own arrays.

    - of a loss scale: `loss_scale`, `growth_tracker`, `hysteresis_tracker`, `overflow`,
      `skipped_total`, `inf_total`, `nan_total`, `floor_hits`, `ceiling_hits`, `bad_update_total`
      and `nonfinite_loss_total`, see `ampx.LossScaleState`; the first three and the counts of inf,
      NaN and of hits of a bound are vectors where there are several losses; of several optimizers
      that share it, also `overflow` and `skipped_total` of each, as `"generator/overflow"`; and
      `growth_interval` where it adapts;
    - of `ampx.multi_steps`: `micro_step`, `gradient_step`, `weight_sum`, `window_is_bad` and
      `dropped_total`, see `ampx.MultiStepsState`;
    - of `ampx.all_reduce` and `ampx.zero1`: `num_buckets` and `reduced_bytes`, what the last
      update handed over to be reduced, see `ampx.ReductionState`;
    - of `ampx.zero1` and of `ampx.train_step(max_grad_norm=...)`: `global_norm`, that of the
      unscaled, reduced gradients of the last update, before the clip;
    - of `ampx.follow_schedule`: `precision_phase` and `steps_seen`;
    - of `optax.inject_hyperparams`: `learning_rate` and the other numbers, as the last update used
      them.

    Args:
      opt_state: an optimizer state, however nested; flax's `nnx.Optimizer.opt_state` too.

    Returns:
      A dict from name to array; empty where there is nothing of the kind. A name that occurs more
      than once is preceded by as much of its path in the state as tells it from the others, such
      as `"decay/loss_scale"` for the group `"decay"` of `optax.partition`.

    Raises:
      TypeError: for what is no optimizer state, such as parameters or an `ampx.StepReport`.

    Examples:
      >>> import ampx, jax.numpy as jnp, optax
      >>> adamw = optax.inject_hyperparams(optax.adamw)(learning_rate=0.5)
      >>> tx = ampx.dynamic_loss_scale(optax.chain(optax.clip_by_global_norm(1.0), adamw))
      >>> figures = ampx.metrics(tx.init(jnp.ones(2)))
      >>> {name: figures[name].item() for name in ("loss_scale", "skipped_total", "learning_rate")}
      {'loss_scale': 65536.0, 'skipped_total': 0, 'learning_rate': 0.5}
    """
    check_opt_state(opt_state)
    if "global_norm" in getattr(opt_state, "_fields", ()):  # a `StepReport`, which imports this
        raise TypeError(
            "opt_state must be an optimizer state, got a StepReport, whose figures are its own "
            "fields: report.loss, or report._asdict() for all of them"
        )
    return find_figures(opt_state)


def find_figures(opt_state: optax.OptState) -> dict[str, jax.Array]:
    """`metrics` of what is known to be an optimizer state, whatever it consists of."""
    found: dict[str, dict[Names, jax.Array]] = {}
    for path, name, value in _figures(opt_state, ()):
        found.setdefault(name, {})[path] = value
    return {
        "/".join((*_distinct(path, tuple(values)), name)): value
        for name, values in found.items()
        for path, value in values.items()
    }


def _figures(node: Any, path: Names) -> Iterator[tuple[Names, str, jax.Array]]:
    """Path, name and value of each figure, those of outer states first."""
    for field in _FIGURES.get(without_marks(type(node)), ()):
        value, name = getattr(node, field), _LOGGED_AS.get(field, field)
        if isinstance(node, OptimizersState):
            # As if the optimizer's name stood in the place of the field that holds this state.
            named = [((*path[:-1], one), name, figure) for one, figure in value.items()]
        elif isinstance(value, Mapping):
            named = [(path, own, figure) for own, figure in value.items()]
        else:
            named = [(path, name, value)]
        for where, name, figure in named:
            yield where, name, jax.tree.leaves(figure)[0]  # flax nnx keeps it in a variable

    def has_figures(part: Any) -> bool:
        return part is not node and without_marks(type(part)) in _FIGURES

    # The walk stops at the next states that have figures, and goes on inside each of them; without
    # `part is not node` it would stop at once, at the state that it has come from.
    for step, part in jax.tree_util.tree_leaves_with_path(node, is_leaf=has_figures):
        if without_marks(type(part)) in _FIGURES:
            names = (jax.tree_util.keystr((key,), simple=True) for key in step)
            yield from _figures(part, (*path, *names))


def _distinct(path: Names, all_paths: Sequence[Names]) -> Names:
    """The parts of a path at which another one leaves it, or ends.

    Of `("outer", "0", "decay")` and `("outer", "0", "rest")` these are `("decay",)` and
    `("rest",)`: the shortest names that differ.
    """
    return tuple(
        part
        for i, part in enumerate(path)
        if any(other[:i] == path[:i] and other[i : i + 1] != (part,) for other in all_paths)
    )


@contextlib.contextmanager
def progress_bar(
    total_steps: int,
    *,
    label: str = "",
    tokens_per_step: int | None = None,
    refresh_every: int = 10,
    disable: bool = False,
) -> Iterator[Callable[[StepReport], None]]:
    """A progress bar with loss, loss scale, skipped steps, speed and the time that is left.

    For any training loop. In notebooks it is tqdm's widget, if ipywidgets is installed.

    Args:
      total_steps: number of steps to come.
      label: what to write before the bar.
      tokens_per_step: for a speed in tokens per second; without it, it is in steps.
      refresh_every: how many reports to read from the device at once. Reading waits for the step,
        and a wait at every step would keep the device from running ahead.
      disable: show nothing, read nothing; for all processes but one.

    Yields:
      A function to call with each step's `ampx.StepReport`.

    Raises:
      ImportError: if tqdm is missing.
      TypeError: if a number is not an int.
      ValueError: if it is not positive.

    Examples:
      >>> import ampx, jax, jax.numpy as jnp, optax
      >>> step = ampx.train_step(lambda w, x: jnp.mean((w * x) ** 2), optax.sgd(0.25))
      >>> state = step.init(jnp.array(2.0))
      >>> with ampx.progress_bar(3, label="O0", disable=True) as on_step:
      ...     for _ in range(3):
      ...         state, report = step(state, jnp.ones(4))
      ...         on_step(report)
      >>> float(report.loss)
      0.25
    """
    total_steps = as_positive_int("total_steps", total_steps)
    check_word("label", label)
    refresh_every = as_positive_int("refresh_every", refresh_every)
    if tokens_per_step is not None:
        tokens_per_step = as_positive_int("tokens_per_step", tokens_per_step)
    if as_bool("disable", disable):
        yield lambda report: None
        return
    tqdm = _tqdm()
    # No rate and no estimate of tqdm's own: they would count compilation, and the reports that are
    # still unread. A widget has a bar of its own length.
    is_widget = any(base.__module__ == "tqdm.notebook" for base in tqdm.__mro__)
    drawn = "{bar}" if is_widget else "{bar:20}"
    layout = "{desc:<26}{percentage:3.0f}%|" + drawn + "| {n_fmt}/{total_fmt} {elapsed}{postfix}"
    bar = tqdm(desc=label, total=total_steps, bar_format=layout)
    # Reports wait here unread: `float(report.loss)` blocks until the device has taken the step, and
    # the device would then stand still while Python prepares the next.
    unread: list[StepReport] = []
    skipped = 0
    started = time.perf_counter()

    def refresh() -> None:
        """Reads all unread reports, of which only the last is shown, and updates the bar."""
        nonlocal skipped
        report = unread[-1]
        skipped += sum(bool(each.overflow) for each in unread)
        loss, scale = float(report.loss), format_scale(float(report.loss_scale))
        bar.update(len(unread))
        unread.clear()
        speed = bar.n / (time.perf_counter() - started)
        pace = (
            f"{speed:,.1f} steps/s"
            if tokens_per_step is None
            else f"{speed * tokens_per_step:,.0f} tokens/s"
        )
        left = bar.format_interval((total_steps - bar.n) / speed)
        bar.set_postfix_str(
            f"loss {loss:.3f}, scale {scale}, {skipped} skipped, {pace}, {left} left"
        )

    def on_step(report: StepReport) -> None:
        nonlocal started
        if not bar.n and not unread:  # the first step is on its way, and has been compiled
            started = time.perf_counter()
        unread.append(report)
        if len(unread) >= refresh_every or bar.n + len(unread) >= total_steps:
            refresh()

    with bar:
        yield on_step
        if unread:  # the loop has ended early
            refresh()


def _tqdm() -> Any:
    try:
        with warnings.catch_warnings():
            # In a notebook without ipywidgets it warns, and is a bar of text then.
            warnings.simplefilter("ignore")
            from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError(
            "a progress bar needs tqdm, which comes with the extra ampx-jax[examples]; or give "
            "progress_bar(disable=True)"
        ) from error
    return tqdm

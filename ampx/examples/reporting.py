"""How runs are shown when they are done: a row of a table for each."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax

import ampx
from ampx import drawing
from ampx.text_tables import format_rows

if TYPE_CHECKING:
    from ampx.examples.runs import Run


def format_table(rows: Sequence[Sequence[Run]], unigram_entropy: float) -> str:
    """What each run cost and reached, as plain text.

    Args:
      rows: the runs of a configuration, one for each seed, which is the same for all rows. A figure
        of several runs is written as its range. The other rows are compared with the first, seed by
        seed.
      unigram_entropy: the loss that a model of mere letter frequencies has on the same text.

    Returns:
      Lines to print.

    Examples:
      >>> from ampx.examples import reporting
      >>> print(reporting.format_table([], 3.25).splitlines()[0])
      run  held-out loss  difference  ms/step  GFLOP/s  temp MiB  saved  skipped  final scale
    """
    header = ("run", "held-out loss", "difference", "ms/step", "GFLOP/s", "temp MiB", "saved")
    header = (*header, "skipped", "final scale")
    cells, notes = [header], []
    for runs in rows:
        # What needs a sentence goes below the table, and is marked by a number.
        mark = ""
        if note := _note(runs):
            notes.append(note)
            mark = f" [{len(notes)}]"
        differences, saved = [], []
        if runs is not rows[0]:
            pairs = list(zip(runs, rows[0], strict=True))
            differences = [run.held_out_loss / first.held_out_loss - 1 for run, first in pairs]
            saved = [
                1 - run.temporary_bytes / first.temporary_bytes
                for run, first in pairs
                if first.temporary_bytes
            ]
        cells.append(
            (
                runs[0].label,
                _range("{:.4f}".format, [run.held_out_loss for run in runs]) + mark,
                # The loss of a run that failed is NaN.
                _range("{:+.2%}".format, [d for d in differences if np.isfinite(d)]),
                _range("{:.1f}".format, [run.milliseconds for run in runs]),
                _range("{:.1f}".format, [run.gigaflops for run in runs]),
                _range("{:.1f}".format, [run.temporary_bytes / 2**20 for run in runs]),
                _range("{:.0%}".format, saved),
                _range(str, [run.skipped for run in runs]),
                _range(drawing.format_scale, [run.final_scale for run in runs]),
            )
        )
    lines = format_rows(cells)
    lines.insert(1, "-" * len(lines[0]))
    for number, note in enumerate(notes, 1):
        lines += textwrap.wrap(f"[{number}] {note}", 100, subsequent_indent="    ")
    lines += [
        "",
        "held-out loss: nats per character, computed at the run's own precision; letter "
        f"frequencies alone give {unigram_entropy:.2f}.",
        f"ms/step: without compilation. jax {jax.__version__}, {os.cpu_count()} CPUs, "
        f"backend {jax.default_backend()}.",
        "GFLOP/s: 6 operations for each parameter and character; saved: share of temporary memory.",
    ]
    first = rows[0][0] if rows else None
    if first is not None and first.devices > 1:
        lines.append(
            f"Trained over {first.devices} devices in {jax.process_count()} process"
            f"{'es' if jax.process_count() > 1 else ''}; temp MiB: of one device."
        )
    if first is not None and first.schedule is not None:
        lines.append(f"Pipeline {str(first.schedule).splitlines()[0]}.")
    if jax.default_backend() == "cpu":
        lines.append("Most CPUs have no half arithmetic: its speed shows on accelerators only.")
    return "\n".join(lines)


def _range(form: Callable[[Any], str], values: Sequence[Any]) -> str:
    """The least and the greatest of some numbers, as `form` writes them; "-" for no numbers."""
    texts = [form(value) for value in np.sort(np.asarray(values))]  # NaN comes last
    return " to ".join(dict.fromkeys((texts[0], texts[-1]))) if texts else "-"


def _note(runs: Sequence[Run]) -> str:
    """What a loss alone does not tell about runs; empty for runs without surprises."""
    parts = []
    steps = runs[0].history.loss.size
    finite = [int(np.isfinite(run.history.loss).sum()) for run in runs]
    if min(finite) < steps:
        parts.append(f"the loss is finite in {_range(str, finite)} of {steps} steps")
    # A sum or a square that overflows though every gradient is finite: counted apart from skips.
    scaled = [ampx.find_loss_scale_state(run.state.opt_state) for run in runs]
    held = [int(state.bad_update_total) for state in scaled if state is not None]
    if any(held):
        parts.append(f"{_range(str, held)} updates held back because not finite")
    lost = [_share_of_lost_moments(run.state.opt_state) for run in runs]
    if max(lost) > 0.01:
        parts.append(
            f"{_range('{:.0%}'.format, lost)} of Adam's second moments have rounded to zero, so "
            "that updates are divided by its epsilon alone"
        )
    return f"{runs[0].label}: {'; '.join(parts)}." if parts else ""


def _share_of_lost_moments(opt_state: optax.OptState) -> float:
    """Share of Adam's second moments that are zero where the first moment is not.

    nu gathers (1 - b2) g**2, which float16 rounds to zero below 2**-25: with b2 = 0.999 for every
    gradient below 0.005. The update mu / (sqrt(nu) + eps) is then mu / eps.
    """
    first, second = optax.tree.get(opt_state, "mu"), optax.tree.get(opt_state, "nu")
    pairs = list(zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True))
    lost = sum(int(np.sum((np.asarray(nu) == 0) & (np.asarray(mu) != 0))) for mu, nu in pairs)
    return lost / sum(mu.size for mu, _ in pairs)

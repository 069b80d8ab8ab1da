"""How runs are shown when they are done: a row of a table for each."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
import optax

import ampx
from ampx import drawing
from ampx.text_tables import format_rows

if TYPE_CHECKING:
    from ampx.examples.runs import Run


def format_table(runs: Sequence[Run], unigram_entropy: float) -> str:
    """What each run cost and reached, as plain text.

    Args:
      runs: the first is the one that the others are compared with.
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
    rows, notes = [header], []
    for run in runs:
        # What needs a sentence goes below the table, and is marked by a number.
        mark = ""
        if note := _note(run):
            notes.append(note)
            mark = f" [{len(notes)}]"
        is_other, before = run is not runs[0], runs[0].temporary_bytes
        difference = run.held_out_loss / runs[0].held_out_loss - 1  # NaN for a run that failed
        rows.append(
            (
                run.label,
                f"{run.held_out_loss:.4f}{mark}",
                f"{difference:+.2%}" if np.isfinite(difference) and is_other else "-",
                f"{run.milliseconds:.1f}",
                f"{run.gigaflops:.1f}",
                f"{run.temporary_bytes / 2**20:.1f}",
                f"{1 - run.temporary_bytes / before:.0%}" if is_other and before else "-",
                str(run.skipped),
                drawing.format_scale(run.final_scale),
            )
        )
    lines = format_rows(rows)
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
    if runs and runs[0].devices > 1:
        lines.append(
            f"Trained over {runs[0].devices} devices in {jax.process_count()} process"
            f"{'es' if jax.process_count() > 1 else ''}; temp MiB: of one device."
        )
    if runs and runs[0].schedule is not None:
        lines.append(f"Pipeline {str(runs[0].schedule).splitlines()[0]}.")
    if jax.default_backend() == "cpu":
        lines.append("Most CPUs have no half arithmetic: its speed shows on accelerators only.")
    return "\n".join(lines)


def _note(run: Run) -> str:
    """What a loss alone does not tell about a run; empty for one without surprises."""
    parts = []
    finite = np.flatnonzero(np.isfinite(run.history.loss))
    if finite.size < run.history.loss.size:
        parts.append(f"the loss is finite in {finite.size} of {run.history.loss.size} steps")
    # A sum or a square that overflows though every gradient is finite: counted apart from skips.
    scaled = ampx.find_loss_scale_state(run.state.opt_state)
    if scaled is not None and int(scaled.bad_update_total):
        parts.append(f"{int(scaled.bad_update_total)} updates held back because not finite")
    lost = _share_of_lost_moments(run.state.opt_state)
    if lost > 0.01:
        parts.append(
            f"{lost:.0%} of Adam's second moments have rounded to zero, so that updates are "
            "divided by its epsilon alone"
        )
    return f"{run.label}: {'; '.join(parts)}." if parts else ""


def _share_of_lost_moments(opt_state: optax.OptState) -> float:
    """Share of Adam's second moments that are zero where the first moment is not.

    nu gathers (1 - b2) g**2, which float16 rounds to zero below 2**-25: with b2 = 0.999 for every
    gradient below 0.005. The update mu / (sqrt(nu) + eps) is then mu / eps.
    """
    first, second = optax.tree.get(opt_state, "mu"), optax.tree.get(opt_state, "nu")
    pairs = list(zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True))
    lost = sum(int(np.sum((np.asarray(nu) == 0) & (np.asarray(mu) != 0))) for mu, nu in pairs)
    return lost / sum(mu.size for mu, _ in pairs)

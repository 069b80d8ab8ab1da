"""The goals that only a GPU can tell, and how far the rows of a run are from them."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import NamedTuple

from benchmarks.gpu import gpt2, tails
from benchmarks.gpu.rows import Row

OURS = (tails.XLA, tails.KERNELS)
TORCH = "torch, check + clip + fused AdamW"


class Goal(NamedTuple):
    """A goal and what was measured.

    Attributes:
      what: is measured.
      limit: what it is to be, with its sign.
      worst: the worst figure of all cases; None if none was measured.
      case: the case that it is of.
      is_met: whether it is within the limit.
    """

    what: str
    limit: str
    worst: float | None
    case: str
    is_met: bool


def judge(rows: Iterable[Row]) -> list[Goal]:
    """Each goal with its worst case."""
    times: dict[str, dict[str, Row]] = collections.defaultdict(dict)
    for row in rows:
        if row.milliseconds is not None:
            times[row.case][row.candidate] = row
    shares, torchs, skips, levels = {}, {}, {}, {}
    for case, own in times.items():
        if "skipped" in case:  # such a step has nothing to do
            continue
        ours = [own[name] for name in OURS if name in own]
        if ours and (share := max(row.of_copy or 0.0 for row in ours)):
            shares[case] = share
        if ours and TORCH in own:
            torchs[case] = min(_ms(row) for row in ours) / _ms(own[TORCH])
        if tails.BRANCH in own and tails.SELECT in own:
            skips[case] = _ms(own[tails.BRANCH]) / _ms(own[tails.SELECT])
        if gpt2.OPT_1 in own and gpt2.BY_HAND in own:
            levels[case] = _ms(own[gpt2.OPT_1]) / _ms(own[gpt2.BY_HAND])
    return [
        _goal("copy bandwidth that fused.apply reaches, XLA or kernels", 0.9, shares, least=True),
        _goal(f"fused.apply, XLA or kernels / {TORCH}", 1.0, torchs),
        _goal("one branch around optax's update / a select for each array", 1.0, skips),
        _goal("GPT-2 small, O1 / casts by hand", 1.02, levels),
    ]


def _ms(row: Row) -> float:
    assert row.milliseconds is not None
    return row.milliseconds


def _goal(what: str, limit: float, figures: dict[str, float], least: bool = False) -> Goal:
    sign = "≥" if least else "≤"
    if not figures:
        return Goal(what, f"{sign} {limit}", None, "not measured", False)
    case = (min if least else max)(figures, key=lambda name: figures[name])
    worst = figures[case]
    is_met = worst >= limit if least else worst <= limit
    return Goal(what, f"{sign} {limit}", worst, case, is_met)

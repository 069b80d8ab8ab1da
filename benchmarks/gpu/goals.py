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
    shares, torchs, scales, branches = {}, {}, {}, {}
    levels: dict[str, dict[str, float]] = {"": {}, gpt2.CUDNN: {}}  # by what attention is
    scaled: dict[str, float] = {}
    for case, own in times.items():
        if "skipped" in case:  # such a step has nothing to do
            continue
        ours = [own[name] for name in OURS if name in own]
        if ours and (share := max(row.of_copy or 0.0 for row in ours)):
            shares[case] = share
        if ours and TORCH in own:
            torchs[case] = min(_ms(row) for row in ours) / _ms(own[TORCH])
        if tails.SCALED in own and tails.BRANCH in own:
            branches[case] = _ms(own[tails.SCALED]) / _ms(own[tails.BRANCH])
            if tails.OPTAX in own:
                scales[case] = _ms(own[tails.SCALED]) / _ms(own[tails.OPTAX])
        for attention, ratios in levels.items():
            level, by_hand = gpt2.OPT_1 + attention, gpt2.BY_HAND + attention
            if level in own and by_hand in own:
                ratios[case] = _ms(own[level]) / _ms(own[by_hand])
            if level in own and (scale := gpt2.OPT_1_SCALED + attention) in own:
                scaled[case + attention] = _ms(own[scale]) / _ms(own[level])
    return [
        _goal("copy bandwidth that fused.apply reaches, XLA or kernels", 0.9, shares, least=True),
        _goal(f"fused.apply, XLA or kernels / {TORCH}", 1.0, torchs),
        _goal("dynamic_loss_scale of optax's AdamW / optax's, clipped", 1.05, scales),
        _goal("dynamic_loss_scale of optax's AdamW / the same behind a branch", 1.0, branches),
        *(
            _goal(f"GPT-2 small, O1 / casts by hand{attention}", 1.02, ratios)
            for attention, ratios in levels.items()
        ),
        _goal("GPT-2 small, O1 with a dynamic loss scale / without", 1.02, scaled),
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

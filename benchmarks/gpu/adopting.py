"""By which rule measured rows become defaults: settings of kernels, and what `auto` takes.

- **Settings.** The elements of a thread block and the bytes of a load are chosen together, the
  number of arrays a launch for itself. A setting wins if in the geometric mean of all cases that
  measured it it takes at most 0.98 of the default's time, if no case takes more than 1.02, and if
  no other has a lower mean. Otherwise the default stays.
- **Kinds of work.** `auto` takes kernels for a kind (see `find_kind_of_work`) if they take at most
  0.98 of XLA's time in the geometric mean of the cases of that kind, and in none more than 1.02.

2% is what such times differ by from run to run.
"""

from __future__ import annotations

import collections
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ampx.fused.kernels
from ampx.fused.kernels.measured import FILE
from ampx.updates.tails import DEFAULT_PLAN
from benchmarks.gpu import kernels, tails
from benchmarks.gpu.rows import Row

WINS, LOSES = 0.98, 1.02
_KINDS = {
    **dict.fromkeys(tails.NARROW, "blocks"),
    "AdamW, split masters": "narrow",
    **dict.fromkeys(tails.OPTIMIZERS, "elementwise"),
    "LAMB": "norms",
}


def choose_plan(rows: Iterable[Row]) -> dict[str, int]:
    """The settings that won, by their names in `KernelPlan`."""
    ratios: dict[tuple[str, int, int], list[float]] = collections.defaultdict(list)
    for row in rows:
        plan = kernels.plan_of(row.candidate)
        if plan is None or row.ratio is None or row.beside != kernels.DEFAULT:
            continue
        if row.candidate in kernels.BLOCKS:
            ratios["blocks", plan.elements, plan.vector].append(row.ratio)
        elif row.candidate in kernels.LAUNCHES:
            ratios["leaves", plan.leaves, 0].append(row.ratio)
    chosen = DEFAULT_PLAN._asdict()
    for (what, first, second), _ in sorted(_winners(ratios), key=lambda pair: -pair[1]):
        own = {"leaves": first} if what == "leaves" else {"elements": first, "vector": second}
        chosen |= own  # the best comes last
    del chosen["work"]
    return chosen


def choose_work(rows: Iterable[Row]) -> list[str]:
    """The kinds of work in which kernels won."""
    times: dict[tuple[str, str], dict[str, float]] = collections.defaultdict(dict)
    for row in rows:
        if row.milliseconds is not None:
            times[row.part, row.case][row.candidate] = row.milliseconds
    ratios: dict[str, list[float]] = collections.defaultdict(list)
    for (_, case), own in times.items():
        if case.startswith(kernels.NORM):
            kind, xla, ours = "squares", kernels.XLA, kernels.KERNELS
        else:
            kind = _KINDS.get(case.rpartition(", ")[0], "")
            xla, ours = tails.XLA, tails.KERNELS
        if kind and xla in own and ours in own:
            ratios[kind].append(own[ours] / own[xla])
    return sorted(kind for kind, _ in _winners(ratios))


def _winners(ratios: dict[Any, list[float]]) -> list[tuple[Any, float]]:
    """What won, with its mean ratio."""
    means = {key: math.exp(sum(map(math.log, own)) / len(own)) for key, own in ratios.items()}
    return [(k, mean) for k, mean in means.items() if mean <= WINS and max(ratios[k]) <= LOSES]


def adopt(device: str, versions: str, rows: list[Row], path: Path | None = None) -> Path:
    """Writes what won on a device into the file that the library reads; returns its path."""
    path = path or Path(ampx.fused.kernels.__path__[0], FILE)
    known = json.loads(path.read_text())
    known[device] = choose_plan(rows) | {"work": choose_work(rows), "versions": versions}
    path.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")
    return path

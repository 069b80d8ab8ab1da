"""By which rule measured rows become defaults: settings of kernels, and what `auto` takes.

- **Settings.** The elements of a thread block and the bytes of a load are chosen together, the
  number of arrays a launch for itself. A setting wins if in the geometric mean of all cases that
  measured it it takes at most 0.98 of the default's time, if no case takes more than 1.02, and if
  no other has a lower mean. Otherwise the default stays. Loads of other widths are measured in one
  case alone; in the others the same elements with the default's loads must not lose. A setting of
  which a case is missing does not win.
- **Kinds of work.** `auto` takes kernels for a kind (see `find_kind_of_work`) if they take at most
  0.98 of XLA's time in the geometric mean of the cases of that kind, and in none more than 1.02. It
  takes two cases, and none in which a kernel failed.

2% is what such times differ by from run to run. Where a test of kernels failed nothing is adopted.
"""

from __future__ import annotations

import collections
import json
import math
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import ampx.fused.kernels
from ampx.fused.kernels.measured import FILE
from ampx.updates.tails import DEFAULT_PLAN, KernelPlan
from benchmarks.gpu import kernels, tails
from benchmarks.gpu.rows import Row

WINS, LOSES = 0.98, 1.02
_KINDS = {
    **dict.fromkeys(tails.NARROW, "blocks"),
    "AdamW, split masters": "narrow",
    **dict.fromkeys([*tails.OPTIMIZERS, *tails.DERIVED], "elementwise"),
    "LAMB": "norms",
}


def choose_plan(rows: Iterable[Row]) -> dict[str, int]:
    """The settings that won, by their names in `KernelPlan`."""
    ratios: dict[KernelPlan, dict[str, float]] = collections.defaultdict(dict)
    for row in rows:
        plan = kernels.plan_of(row.candidate)
        if plan is not None and row.ratio is not None and row.beside == kernels.DEFAULT:
            ratios[plan][row.case] = row.ratio
    blocks = _find_best(kernels.BLOCKS.values(), ratios)
    launches = _find_best(kernels.LAUNCHES.values(), ratios)
    return {"elements": blocks.elements, "vector": blocks.vector, "leaves": launches.leaves}


def _find_best(
    plans: Iterable[KernelPlan], ratios: dict[KernelPlan, dict[str, float]]
) -> KernelPlan:
    """The settings with the lowest mean of those that win; else the default."""
    means: dict[KernelPlan, float] = {}
    for plan in plans:
        usual = plan._replace(vector=DEFAULT_PLAN.vector)
        own = ratios.get(plan, {})
        all_cases = ratios.get(usual, {}) | own
        if own and all_cases.keys() >= set(kernels.cases_of(usual)):
            if _mean(own.values()) <= WINS and max(all_cases.values()) <= LOSES:
                means[plan] = _mean(own.values())
    return min(means, key=lambda plan: means[plan], default=DEFAULT_PLAN)


def choose_work(rows: Sequence[Row]) -> list[str]:
    """The kinds of work in which kernels won."""
    times: dict[tuple[str, str], dict[str, float]] = collections.defaultdict(dict)
    for row in rows:
        if row.milliseconds is not None:
            times[row.part, row.case][row.candidate] = row.milliseconds
    ratios: dict[str, list[float]] = collections.defaultdict(list)
    for (_, case), own in times.items():
        xla, ours = (kernels.XLA, kernels.KERNELS) if _is_norm(case) else (tails.XLA, tails.KERNELS)
        if (kind := _kind_of(case)) and xla in own and ours in own:
            ratios[kind].append(own[ours] / own[xla])
    broken = {_kind_of(row.case) for row in rows if _is_broken_kernel(row)}
    return sorted(
        kind
        for kind, own in ratios.items()
        if kind not in broken and len(own) > 1 and _mean(own) <= WINS and max(own) <= LOSES
    )


def _is_norm(case: str) -> bool:
    return case.startswith(kernels.NORM)


def _kind_of(case: str) -> str:
    """The kind of work of a case; "" if it decides about none."""
    return "squares" if _is_norm(case) else _KINDS.get(case.rpartition(", ")[0], "")


def _is_broken_kernel(row: Row) -> bool:
    return row.candidate in (tails.KERNELS, kernels.KERNELS) and row.note.startswith("failed")


def _mean(ratios: Collection[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def adopt(device: str, versions: str, rows: list[Row], path: Path | None = None) -> Path:
    """Writes what won on a device into the file that the library reads; returns its path."""
    path = path or Path(ampx.fused.kernels.__path__[0], FILE)
    known = json.loads(path.read_text())
    known[device] = choose_plan(rows) | {"work": choose_work(rows), "versions": versions}
    path.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")
    return path

"""Every transformation on Auto, Explicit and Manual meshes of 1, 2 and 3 axes is the undivided one.

The quick cases have each kind of mesh, and each number of axes. The slow ones are a sample of the
rest, in which a transformation runs on Auto axes and with checked types, or on Explicit axes and
without. With `--whole` every two of transformation, kind and axes meet.
"""

import functools
import pathlib

import pytest
from mesh_cells import AXES, KINDS, NAMES, as_row, run

GUIDE = pathlib.Path(__file__).parents[1] / "docs" / "guides" / "meshes.md"
# By themselves, since the place of a name among all names chooses its axes below.
QUICK = [
    ("fused.apply", "Auto", AXES[1]),
    ("fused.apply", "Explicit", AXES[2]),
    ("fused.apply", "Manual", AXES[0]),
    ("fused.apply", "Manual, unchecked", AXES[1]),
    ("train_step, max_grad_norm", "Auto", AXES[2]),
    ("train_step, max_grad_norm", "Manual, unchecked", AXES[2]),
    ("zero1", "Manual", AXES[2]),
]
PAIRS = {
    (name, kind, AXES[(number + place) % len(AXES)]): number % 2 == place % 2
    for number, name in enumerate(NAMES)
    for place, kind in enumerate(KINDS)
}
# Beside whose turn it is, those that found a fault that others do not.
DUE = [
    ("densify_rows", "Auto", AXES[2]),
    ("fused.novograd", "Explicit", AXES[1]),
    ("multi_steps", "Auto", AXES[1]),
    ("multi_steps, scale inside", "Explicit", AXES[1]),
]
CASES = list(dict.fromkeys([*QUICK, *DUE, *PAIRS]))
IN_SUITE = [*QUICK, *DUE]
FOR_WHOLE = [case for case, is_due in PAIRS.items() if not is_due and case not in IN_SUITE]


@functools.cache
def rows_of_guide():
    """The cells of each row of the guide's table, by its title."""
    lines = [line for line in GUIDE.read_text().splitlines() if line.startswith("| `")]
    rows = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines]
    return {title: cells for title, *cells in rows}


def title(name):
    return as_row(name, []).split(" | ")[0].removeprefix("| ")


def test_the_guide_has_a_row_for_every_transformation():
    titles = set(map(title, NAMES))
    assert titles | {"`optax.adamw`", "`optax.lamb`"} == set(rows_of_guide())


@pytest.mark.sampled(3, *map("-".join, DUE))
@pytest.mark.slow_but(*map("-".join, QUICK))
@pytest.mark.whole(*map("-".join, FOR_WHOLE))
@pytest.mark.parametrize(("name", "kind", "axes"), CASES, ids=lambda word: word)
def test_a_cell_is_the_undivided_step_and_exchanges_what_plain_optax_does(name, kind, axes):
    """Beside as many single numbers, of verdicts and norms, as the guide tells."""
    exchange = run(name, kind, axes)
    told = rows_of_guide()[title(name)][KINDS.index(kind)]
    if exchange is None:
        assert told == "for `shard_map`"
    else:
        assert exchange.numbers == int(told.split(", ")[AXES.index(axes)])

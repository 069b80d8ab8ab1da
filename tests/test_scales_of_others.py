"""A loss scale that another library has saved goes on in ours, as the table in the recipes says.

Each library's rule is written down here by itself, in Python's numbers. It moves over a random
history, is saved as that library saves it, and moves on; ours starts from what was saved and must
move alike. `tests/peers` has torch's own scaler.
"""

import types

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from code_blocks import ROOT, run_page
from helpers import scan_flags

import ampx

NO_BOUNDS = {"min_scale": 2.0**-126, "max_scale": 2.0**126}


class Torch:
    """`torch.amp.GradScaler`."""

    settings = dict(growth_interval=3, growth_factor=4.0, backoff_factor=0.5, **NO_BOUNDS)

    def __init__(self):
        self.scale, self.tracker = 256.0, 0

    def move(self, bad):
        if bad:
            self.scale, self.tracker = self.scale * 0.5, 0
            return
        self.tracker += 1
        if self.tracker == 3:
            self.scale, self.tracker = self.scale * 4.0, 0

    def save(self):
        return {"scale": self.scale, "growth_interval": 3, "_growth_tracker": self.tracker}


class Apex(Torch):
    """`apex.amp`'s `LossScaler`, whose window is 2000 and bound 2**24, with smaller numbers."""

    settings = dict(growth_interval=3, min_scale=2.0**-126, max_scale=512.0)

    def move(self, bad):
        self.scale, self.tracker = (self.scale / 2, 0) if bad else (self.scale, self.tracker + 1)
        if self.tracker == 3:
            self.scale, self.tracker = min(self.scale * 2, 512.0), 0

    def save(self):
        return {"loss_scale": self.scale, "unskipped": self.tracker}


class Megatron(Torch):
    """`DynamicGradScaler`. Its tolerance falls below zero."""

    settings = dict(growth_interval=3, hysteresis=2, min_scale=1.0, max_scale=2.0**126)

    def __init__(self):
        super().__init__()
        self.tolerance = 2

    def move(self, bad):
        if bad:
            self.tracker, self.tolerance = 0, self.tolerance - 1
            if self.tolerance <= 0:
                self.scale = max(self.scale * 0.5, 1.0)
            return
        self.tracker += 1
        if self.tracker == 3:
            self.tracker, self.tolerance, self.scale = 0, 2, self.scale * 2.0

    def save(self):
        return {
            "scale": np.array([self.scale], np.float32),
            "growth_tracker": self.tracker,
            "hysteresis_tracker": self.tolerance,
        }


class DeepSpeed:
    """`DynamicLossScaler`, which is saved as an object. It counts steps, and not good ones."""

    settings = dict(growth_interval=3, hysteresis=2, min_scale=1.0, max_scale=2.0**126)

    def __init__(self):
        self.saved = types.SimpleNamespace(
            cur_scale=256.0, cur_iter=0, last_overflow_iter=-1, scale_window=3, cur_hysteresis=2
        )

    @property
    def scale(self):
        return self.saved.cur_scale

    def move(self, bad):
        own = self.saved
        if bad:
            if own.cur_hysteresis == 1:
                own.cur_scale = max(own.cur_scale / 2, 1.0)
            else:
                own.cur_hysteresis -= 1
            own.last_overflow_iter = own.cur_iter
        elif (own.cur_iter - own.last_overflow_iter) % 3 == 0:
            own.cur_hysteresis, own.cur_scale = 2, own.cur_scale * 2
        own.cur_iter += 1

    def save(self):
        return self.saved


OF = {"torch": Torch, "Apex": Apex, "Megatron": Megatron, "DeepSpeed": DeepSpeed}


def cells_of(library: str) -> dict[str, str]:
    """What the recipe says of a library: the code by the field of our state."""
    lines = (ROOT / "docs/recipes.md").read_text().splitlines()
    (head,) = (line for line in lines if line.startswith("| saved by |"))
    (row,) = (line for line in lines if line.startswith(f"| {library}"))
    cells = [[cell.strip(" `") for cell in line.split("|")[2:-1]] for line in (head, row)]
    return {field: code for field, code in zip(*cells, strict=True) if code}


@pytest.mark.parametrize("library", OF)
@pytest.mark.parametrize("seed", range(3))
def test_a_saved_scale_goes_on_as_it_would_have_there(library, seed):
    rng = np.random.default_rng(seed)
    bads = rng.random(60) < 0.3
    for saved_after in (0, 1, 7, 20, 21, 22):
        theirs = OF[library]()
        for bad in bads[:saved_after]:
            theirs.move(bad)
        numbers = {
            field: jnp.asarray(eval(code, {"saved": theirs.save()}), dtype)
            for (field, code), dtype in zip(
                cells_of(library).items(), (jnp.float32, jnp.int32, jnp.int32), strict=False
            )
        }
        tx = ampx.dynamic_loss_scale(optax.sgd(0.1), **{"init_scale": 1.0, **OF[library].settings})

        def init(params, tx=tx, numbers=numbers):
            return optax.tree.set(tx.init(params), **numbers)

        expected = []
        for bad in bads[saved_after:]:
            theirs.move(bad)
            expected.append(theirs.scale)
        found = scan_flags(tx._replace(init=init), bads[saved_after:]).loss_scale
        np.testing.assert_array_equal(found, expected)
        assert len(set(expected)) > 3


@pytest.mark.slow
def test_the_recipe_sets_what_was_saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_page("docs/recipes.md")
    saved, state = names["saved"], names["opt_state"]
    assert state.loss_scale == saved["scale"] and state.growth_tracker == saved["_growth_tracker"]

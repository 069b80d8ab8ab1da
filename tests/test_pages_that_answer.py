"""Pages for those who come from another library, or whose training goes wrong.

`test_code_blocks.py` runs the blocks of these pages. Here are the tables: our calls, the cells of
the columns headed "ampx", run after the blocks. And what the pages claim, such as how flax's scale
differs. Rows of the troubleshooting page have a file of their own.
"""

import re
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from code_blocks import ROOT, blocks_of, run_block, run_page
from helpers import scan_flags

import ampx

FAMILIES = sorted(path.stem for path in (ROOT / "docs/migrating").glob("*.md"))
SGD = optax.sgd(0.1)


def cells_of_ours(page: str) -> list[str]:
    """The code in the columns headed "ampx"; a cell may have several calls."""
    found, ours = [], False
    for line in (ROOT / page).read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) < 2 or set(cells[1]) <= {"-", " "}:
            ours = ours and bool(cells)
        elif cells[1] == "ampx":
            ours = True
        elif ours:
            found += [code.replace("\\|", "|") for code in re.findall("`([^`]+)`", cells[1])]
    return found


@pytest.mark.slow_but("deepspeed")
@pytest.mark.parametrize("family", FAMILIES)
def test_our_side_of_each_table_runs(family, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = f"docs/migrating/{family}.md"
    with jax.numpy_dtype_promotion("standard"):
        names = run_page(page if family != "index" else "docs/migrating/torch.md")
        cells = cells_of_ours(page)
        assert len(cells) >= 9
        for cell in cells:
            eval(cell, dict(names))


def test_a_cell_that_fails_is_found() -> None:
    cells = cells_of_ours("docs/migrating/ascend.md")
    assert 'ampx.precision_schedule("fast|step|0.9", total_steps=1000)' in cells
    assert "NPUOptimizer" not in " ".join(cells)
    with pytest.raises(NameError):
        eval(cells[0], {})


def test_words_of_others_are_no_arguments_here() -> None:
    """The index says so of `ampx.train_step`: each of them is Python's own TypeError."""
    section = (ROOT / "docs/migrating/index.md").read_text().split("## Their words")[1]
    words = {
        re.match(r"\w+", word)[0]
        for row in re.findall(r"^\| (`.*?) \| `", section.split("## What differs")[0], re.M)
        for word in re.findall("`([^`]+)`", row)
    }
    assert len(words) == 18
    for word in sorted(words):
        with pytest.raises(TypeError, match=word):
            ampx.train_step(lambda params, batch: 0.0, SGD, **{word: 1})


def test_moments_of_torch_go_on() -> None:
    """One more step of Adam in float64, as torch's manual has it, from what was saved."""
    names: dict[str, Any] = {}
    for block in blocks_of("docs/migrating/torch.md"):
        if not names or "exp_avg" in block.source:
            run_block(block, "docs/migrating/torch.md", names)
    adam, params, own = names["adam"], names["params"], names["saved"]["w"]
    grad = np.linspace(-1, 1, 6).reshape(3, 2)
    mu = 0.9 * np.asarray(own["exp_avg"], np.float64) + 0.1 * grad
    nu = 0.999 * np.asarray(own["exp_avg_sq"], np.float64) + 0.001 * grad**2
    steps = own["step"] + 1
    expected = -1e-3 * mu / (1 - 0.9**steps) / (np.sqrt(nu / (1 - 0.999**steps)) + 1e-8)
    for tx in (adam, ampx.fused.adam(1e-3)):
        state = ampx.extend_state(tx, names["adam_state"], params)
        updates, _ = tx.update({"w": jnp.asarray(grad, jnp.float32)}, state, params)
        np.testing.assert_allclose(updates["w"], expected, rtol=1e-5)


def test_every_family_is_in_the_table_of_the_index() -> None:
    text = (ROOT / "docs/migrating/index.md").read_text()
    assert sorted({*re.findall(r"\((\w+)\.md\)", text), "index"}) == FAMILIES


def test_counts_in_the_troubleshooting_page_are_those_of_metrics() -> None:
    text = (ROOT / "docs/troubleshooting.md").read_text()
    counts = set(re.findall(r"`(\w+_(?:total|hits))`", text))
    assert len(counts) == 7
    assert counts <= set(ampx.metrics(ampx.dynamic_loss_scale(SGD).init(jnp.ones(1))))


def test_flax_grows_one_step_later() -> None:
    dynamic_scale = pytest.importorskip("flax.training.dynamic_scale")
    bads = np.random.default_rng(0).random(60) < 0.1
    scale, theirs = dynamic_scale.DynamicScale(growth_interval=3, scale=jnp.float32(64)), []
    gradient = jax.jit(lambda scale, x: scale.value_and_grad(lambda w: w * x)(1.0)[0])
    for bad in bads:
        scale = gradient(scale, jnp.float32(np.inf if bad else 1))
        theirs.append(float(scale.scale))
    tx = ampx.dynamic_loss_scale(
        SGD, init_scale=64.0, growth_interval=4, min_scale=2.0**-126, max_scale=2.0**126
    )
    np.testing.assert_array_equal(scan_flags(tx, bads).loss_scale, theirs)
    assert len(set(theirs)) > 3


@pytest.mark.slow
def test_rows_of_figures_go_to_tensorboard_and_wandb(tmp_path, monkeypatch) -> None:
    """Both are asked for what their own manuals offer; neither is installed here."""
    said: list[Any] = []

    class Open:
        def __init__(self, *args, **kwargs):
            said.append((args, kwargs))

        def __enter__(self):
            return self

        def __exit__(self, *error):
            said.append("closed")

        def add_scalar(self, tag, scalar_value, global_step=None):
            said.append((tag, scalar_value, global_step))

        def log(self, data, step=None):
            said.append((data, step))

    monkeypatch.chdir(tmp_path)
    modules = {"tensorboardX": {"SummaryWriter": Open}, "wandb": {"init": Open}}
    for name, members in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    names = run_page("docs/recipes.md")
    rows = [{"loss": 2.0}, {"loss": 1.0}]
    names["log_to_tensorboard"](rows)
    assert said == [(("runs",), {}), ("loss", 2.0, 0), ("loss", 1.0, 1), "closed"]
    said.clear()
    names["log_to_wandb"](rows)
    assert said == [((), {"project": "training"}), ({"loss": 2.0}, 0), ({"loss": 1.0}, 1), "closed"]
    assert (tmp_path / "figures.csv").read_text().count("\n") == 4
    assert {"loss", "grad_norm", "loss_scale", "skipped_total"} <= set(names["figures"][0])
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))

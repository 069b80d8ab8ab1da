"""Every block of code in the README and in `docs` runs as pasted, from the top of its page."""

import importlib.util
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from code_blocks import PROGRAMS, ROOT, Block, blocks_of, run_block, run_page, side_of_diff

FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
BLOCKS = {name: blocks_of(name) for name in sorted(str(p.relative_to(ROOT)) for p in FILES)}
PAGES = [page for page, blocks in BLOCKS.items() if PROGRAMS & {b.language for b in blocks}]


@pytest.fixture
def as_a_reader(tmp_path, monkeypatch):
    """A folder of one's own, a command line without arguments, JAX's own promotion of dtypes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["page"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which a page may replace
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.slow_but(
    "README.md",
    "docs/getting_started.md",
    "docs/guides/precision.md",
    "docs/guides/precision_schedule.md",
    "docs/guides/optax_optimizers.md",
    "CONTRIBUTING.md",
)
@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run_from_its_top(page, as_a_reader, capsys) -> None:
    names = run_page(page)
    if page == "docs/guides/pipeline.md":
        losses = [float(line) for line in re.findall(r"^\d\.\d+$", capsys.readouterr().out, re.M)]
        assert len(losses) == 3 and losses == sorted(losses, reverse=True)
        assert names["params"]["stages"]["up"].sharding.spec == jax.P("stage")


def test_the_main_block_of_the_readme_runs_alone_and_trains(as_a_reader) -> None:
    main, diff = (
        next(block for block in BLOCKS["README.md"] if block.language == language)
        for language in ("python", "diff")
    )
    names: dict = {}
    run_block(main, "README.md", names)
    assert names["loss"] < 0.1 * jnp.mean(names["batch"]["y"] ** 2)  # that of the first step

    # The diff below it tells the same program from one that computes in float32.
    assert len([line for line in diff.source.splitlines() if line[:1] in "+-"]) <= 12
    losses = {}
    for sign in "-+":
        own = dict(names)
        exec(side_of_diff(diff.source, sign), own)
        params = names["params"]
        opt_state = own["tx"].init(params)
        losses[sign] = []
        for _ in range(10):
            params, opt_state, loss = own["step"](params, opt_state, names["batch"])
            losses[sign].append(float(loss))
        assert params["up"].dtype == jnp.float32
    # float16 rounds an output by 2**-11; its distance from y, which is squared, is a tenth of it.
    np.testing.assert_allclose(losses["+"], losses["-"], rtol=20 * 2**-11)
    assert losses["+"] != losses["-"], "the second should have computed in float16"


@pytest.mark.parametrize(
    ("language", "source", "error"),
    [
        ("python", "fine = 1\nundefined\n", NameError),
        ("pycon", ">>> fine = 1\n>>> fine + 1\n3\n", AssertionError),
        ("diff", " fine = 1\n-undefined\n+fine\n", NameError),
        ("diff", " fine = 1\n-fine\n+undefined\n", NameError),
    ],
)
def test_a_block_that_fails_is_found_at_its_line(language, source, error) -> None:
    names: dict = {}
    with pytest.raises(error) as caught:
        run_block(Block(language, source, line=40), "README.md", names)
    if error is NameError:
        assert caught.traceback[-1].lineno + 1 in (41, 42)
    else:
        assert "line 41" in str(caught.value)


def test_what_a_block_defines_is_there_for_the_next() -> None:
    names: dict = {}
    for language, source in (
        ("python", "a = 1\n"),
        ("pycon", ">>> b = a + 1\n>>> print(f'file.py:{b}:1')\nmodel.py:7:7\n"),
        ("diff", "-old = c = 0\n+c = b + 1\n"),
        ("text", "not Python\n"),
    ):
        run_block(Block(language, source, line=1), "README.md", names)
    assert [names[name] for name in "abc"] == [1, 2, 3] and "old" not in names


def test_no_block_hides_from_these_tests() -> None:
    """Every fence begins at its line and says what is in it."""
    for page, blocks in BLOCKS.items():
        text = (ROOT / page).read_text()
        assert len(re.findall("```", text)) == 2 * len(blocks), page
        for block in blocks:
            known = PROGRAMS | {"bash", "shell", "text", "yaml"}
            assert block.language in known or block.language.startswith("{"), (page, block.line)


def test_commands_in_the_pages_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in BLOCKS:
        text = (ROOT / page).read_text()
        commands = re.findall(r"`make ([\w-]+)|^make ([\w-]+)(?=$| *#)", text, re.MULTILINE)
        assert {name for pair in commands for name in pair if name} <= targets, page
        for module in re.findall(r"python -m ((?:ampx|benchmarks)[\w.]*)", text):
            assert importlib.util.find_spec(module), (page, module)

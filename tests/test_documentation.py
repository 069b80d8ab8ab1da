"""What the README and the guides show must run as it stands there."""

import importlib
import pathlib
import re

import jax
import jax.numpy as jnp
import nbclient
import nbformat
import numpy as np
import optax
import pytest

import ampx
import ampx.plotting

ROOT = pathlib.Path(__file__).parents[1]


def blocks(file: str, language: str) -> list[str]:
    text = (ROOT / file).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def side_of_diff(diff: str, sign: str) -> str:
    kept = [line[1:] for line in diff.splitlines() if line[:1] in (sign, " ", "")]
    return "\n".join(kept)


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"].astype(params["w"].dtype) @ params["w"])
    return jnp.mean((hidden.astype(jnp.float32) - batch["y"]) ** 2)


def run(source: str, steps: int = 5) -> tuple[dict, list[float]]:
    names = {"ampx": ampx, "jax": jax, "optax": optax, "loss_fn": loss_fn, "schedule": 1e-2}
    exec(source, names)
    params = {"w": jnp.ones((3, 2))}
    batch = {"x": jnp.linspace(-1, 1, 24).reshape(8, 3), "y": jnp.zeros((8, 2))}
    opt_state = names["tx"].init(params)
    losses = []
    for _ in range(steps):
        params, opt_state, loss = names["step"](params, opt_state, batch)
        losses.append(float(loss))
    return params, losses


def test_readme_diff_runs_and_trains_alike() -> None:
    (diff,) = blocks("README.md", "diff")
    assert len([line for line in diff.splitlines() if line[:1] in "+-"]) <= 12
    before, after = (run(side_of_diff(diff, sign)) for sign in "-+")
    np.testing.assert_allclose(after[1], before[1], rtol=5e-3)
    assert after[1] != before[1], "the second should have computed in float16"
    assert after[0]["w"].dtype == jnp.float32


def test_schedule_guide_switches_in_a_loop_of_ones_own() -> None:
    (source,) = (
        b for b in blocks("docs/guides/precision_schedule.md", "python") if "def step" in b
    )
    schedule = ampx.precision_schedule("fast|step|0.6", total_steps=5)
    names = {"ampx": ampx, "jax": jax, "optax": optax, "loss_fn": loss_fn, "rates": 1e-2}
    names["schedule"] = schedule
    exec(source, names)
    params = {"w": jnp.ones((3, 2))}
    batch = {"x": jnp.linspace(-1, 1, 24).reshape(8, 3), "y": jnp.zeros((8, 2))}
    opt_state, phases, losses = names["tx"].init(params), [], []
    for _ in range(5):
        phases.append(int(ampx.precision_phase(opt_state)))
        params, opt_state, loss = names["step"](params, opt_state, batch)
        losses.append(float(loss))
    assert phases == [0, 0, 0, 1, 1]
    assert losses[-1] < losses[0]


def test_getting_started_step_runs() -> None:
    (source,) = (b for b in blocks("docs/getting_started.md", "python") if "def step" in b)
    params, losses = run(source)
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_pipeline_guide_trains() -> None:
    source = blocks("docs/guides/pipeline.md", "python")[0]
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "first": {"position": jnp.zeros((6, 8))},
        "stages": {
            "up": 0.1 * jax.random.normal(keys[0], (4, 8, 16)),
            "down": 0.1 * jax.random.normal(keys[1], (4, 16, 8)),
        },
        "last": {"scale": jnp.ones(8)},
        "shared": {"embedding": jax.random.normal(keys[2], (11, 8))},
    }
    names = {"ampx": ampx, "jax": jax, "jnp": jnp, "optax": optax, "params": params}
    exec(source, names)
    tokens = jax.random.randint(keys[3], (32, 6), 0, 11)
    batch = {"tokens": tokens, "labels": jnp.flip(tokens), "mask": jnp.ones((32, 6))}
    params, opt_state = names["params"], names["tx"].init(names["params"])
    losses = []
    for number in range(3):
        params, opt_state, loss = names["step"](params, opt_state, batch, jax.random.key(number))
        losses.append(float(loss))
    assert losses[2] < losses[1] < losses[0]
    assert params["stages"]["up"].sharding.spec == jax.P("stage")


def test_the_design_page_names_modules_that_exist() -> None:
    table = (ROOT / "docs/design.md").read_text().split("| where is", 1)[1].split("\n\n", 1)[0]
    named = re.findall(r"`([a-z0-9_/]+(?:\.py|/))`", table)
    assert len(named) > 15
    for path in named:
        assert (ROOT / "ampx" / path).exists(), path


def test_the_api_pages_list_every_public_name_once() -> None:
    pages = (path.read_text() for path in (ROOT / "docs/api").glob("*.md"))
    listed = re.findall(r"^\.\. (?:auto\w+|py:data):: (\S+)", "\n".join(pages), re.MULTILINE)
    assert len(listed) == len(set(listed))
    faces = (ampx, ampx.fused, ampx.pipelining, ampx.plotting)
    public = {f"{face.__name__}.{name}" for face in faces for name in face.__all__}
    assert public - set(listed) == {"ampx.fused", "ampx.pipelining"}
    for path in listed:
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(module), name), path


def test_lines_printed_in_the_data_parallel_guide_are_those_of_the_code() -> None:
    text = (ROOT / "docs/guides/data_parallel.md").read_text()
    printed = set(re.findall(r"(\w+\.py):(\d+):(\d+) \(", text))
    assert len(printed) == 2
    for name, line, column in printed:
        (path,) = (ROOT / "ampx").rglob(name)
        code = path.read_text().splitlines()[int(line) - 1]
        assert re.match(r"(jax\.)?lax\.psum", code[int(column) :]), (path, code)


def test_readme_links_exist() -> None:
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("http") or (ROOT / target).exists(), target


@pytest.mark.slow_but("03_data_parallel")
@pytest.mark.parametrize(
    "notebook", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem
)
def test_notebook_runs(notebook: pathlib.Path) -> None:
    content = nbformat.read(notebook, as_version=4)
    client = nbclient.NotebookClient(
        content, timeout=300, resources={"metadata": {"path": str(notebook.parent)}}
    )
    client.execute()
    size = notebook.stat().st_size
    assert size < 300_000, f"{notebook.name} holds {size} bytes: keep outputs small"


def test_there_are_notebooks() -> None:
    assert list((ROOT / "notebooks").glob("*.ipynb"))

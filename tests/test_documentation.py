"""What the documentation names exists, and notebooks run. Code blocks: test_code_blocks.py."""

import ast
import importlib.util
import inspect
import os
import pathlib
import re
import tomllib
import urllib.request
from collections.abc import Iterator

import nbformat
import pytest
from notebook_runs import run_notebook

import ampx
import ampx.plotting

ROOT = pathlib.Path(__file__).parents[1]


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
    assert set(listed) <= public, "a path that is not public is on a page"


def resolves(path: str) -> bool:
    """Whether a path such as `ampx.Policy.cast` leads through public names alone."""
    first, *rest = path.split(".")
    found: object = ampx
    for name in rest:
        if inspect.ismodule(found) and name not in (*found.__all__, "plotting"):
            return False
        fields = getattr(found, "__annotations__", {})  # of a dataclass, those without a default
        if not hasattr(found, name) and name not in fields:
            return False
        found = getattr(found, name, None)
    return first == "ampx"


def docstrings_on_pages() -> Iterator[tuple[str, str]]:
    for face in (ampx, ampx.fused, ampx.pipelining, ampx.plotting):
        for name in face.__all__:
            value = getattr(face, name)
            yield name, inspect.getdoc(value) or ""
            for member, own in vars(value).items() if inspect.isclass(value) else ():
                if not member.startswith("_") or member == "__call__":
                    yield f"{name}.{member}", inspect.getdoc(own) or ""


def test_pages_and_docstrings_use_public_names() -> None:
    """`docs/conf.py` makes links of them, which fails for a name that is on no page."""
    (scopes,) = re.findall(r"^SCOPES = .+", (ROOT / "docs/conf.py").read_text(), re.MULTILINE)
    texts = {str(path): path.read_text() for path in (ROOT / "docs").rglob("*.md")}
    texts |= {name: (ROOT / name).read_text() for name in ("README.md", "CHANGELOG.md")}
    texts |= dict(docstrings_on_pages())
    found = 0
    for where, text in texts.items():
        for path in re.findall(r"(?<![\w./-])ampx(?:\.[A-Za-z_]\w*)+(?!\w*\.py|[\w/])", text):
            if path.startswith("ampx.examples") or path in scopes:
                continue
            found += 1
            assert resolves(path), f"{where}: {path} is not public"
    assert found > 200


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


def words_of(text: str) -> str:
    """A text without its numbers, which differ between processors."""
    words = re.sub(r"[-+]?\d[\w.,^*+-]*%?", "#", text)
    words = re.sub(r"#(, #)*", "#", words)
    return re.sub(r"[\s-]+", " ", words)  # columns are as wide as their numbers


def stored_text(cell: nbformat.NotebookNode) -> str:
    """What a code cell of a notebook printed when the notebook was stored."""
    return "".join(
        out.get("text") or out.get("data", {}).get("text/plain", "")
        for out in cell.outputs
        if out.get("name") != "stderr" and "image/png" not in out.get("data", {})
    )


# Those left out till the night show what other tests check more closely.
@pytest.mark.whole(
    *("02_autocast", "04_pipeline", "05_fused_updates", "07_images_with_batch_norm"),
    *("08_lora", "09_gan", "11_float8"),
)
@pytest.mark.slow_but("03_data_parallel")
@pytest.mark.parametrize(
    "notebook", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem
)
def test_notebook_runs(notebook: pathlib.Path) -> None:
    # Convolutions that LLVM has not optimized take twice as long.
    level = "optimization_level=1" if "images" in notebook.stem else "optimization_level=0"
    flags = os.environ["XLA_FLAGS"].replace("optimization_level=0", level)
    printed = run_notebook(notebook, XLA_FLAGS=flags)
    cells = nbformat.read(notebook, as_version=4).cells
    stored = [stored_text(cell) for cell in cells if cell.cell_type == "code"]
    for cell, (before, now) in enumerate(zip(stored, printed, strict=True)):
        assert words_of(before) == words_of(now), (
            f"{notebook.name}, code cell {cell}: run it and store what it prints"
        )
    size = notebook.stat().st_size
    assert size < 300_000, f"{notebook.name} holds {size} bytes: keep outputs small"


def test_a_notebook_begins_by_installing_what_it_needs() -> None:
    notebooks = list((ROOT / "notebooks").glob("*.ipynb"))
    assert notebooks
    for path in notebooks:
        cells = nbformat.read(path, as_version=4).cells
        first = next(cell.source for cell in cells if cell.cell_type == "code")
        assert 'find_spec("ampx") is None' in first and '%pip install -q "{source}[ex' in first, (
            path
        )


def test_a_release_has_absolute_links() -> None:
    spec = importlib.util.spec_from_file_location("links", ROOT / "docs/absolute_links.py")
    assert spec is not None and spec.loader is not None
    links = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(links)
    readme = (ROOT / "README.md").read_text()
    written = links.link_absolutely(readme, "https://host.example/a/b", "v1")
    targets = re.findall(r"\]\(([^)]+)\)", readme)
    assert re.findall(r"\]\(([^)]+)\)", written) == [
        target
        if target.startswith("http")
        else f"https://host.example/a/b/{'raw' if target.endswith('.png') else 'blob'}/v1/{target}"
        for target in targets
    ]
    hosted = links.link_absolutely("[one](notebooks/a.ipynb)", "https://github.com/a/b", "v1")
    colab = "https://colab.research.google.com/github/a/b/blob/v1/notebooks/a.ipynb"
    assert hosted == f"[one]({colab})"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    if "urls" not in project:  # a released source distribution has them
        text = links.name_urls((ROOT / "pyproject.toml").read_text(), "https://host.example/a/b")
        told = tomllib.loads(text)["project"]
        assert told.pop("urls")["Issues"] == "https://host.example/a/b/issues"
        assert told == project


def test_the_source_distribution_holds_what_its_tests_read() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    held = {*build["targets"]["sdist"]["only-include"], "README.md", "pyproject.toml"}
    texts = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]
    read = set(re.findall(r'(?:ROOT|parents\[1\]) / "([\w-][\w.-]*)', "\n".join(texts)))
    assert read - held == set() and len(read) > 6


def test_indices_of_libraries_are_taken_where_they_answer(tmp_path) -> None:
    """Without a network the docs have no links to JAX, and no warnings, which would be errors."""
    tree = ast.parse((ROOT / "docs/conf.py").read_text())
    (function,) = [node for node in tree.body if getattr(node, "name", "") == "fetch_indices"]
    names = {"urllib": urllib}
    exec(compile(ast.Module([function], []), "conf.py", "exec"), names)
    fetch, site = names["fetch_indices"], tmp_path / "site"
    site.mkdir()
    (site / "objects.inv").write_bytes(b"index")
    url, dead = site.as_uri(), (tmp_path / "nowhere").as_uri()
    assert fetch({"jax": dead, "optax": url}, tmp_path / "kept") == {}, "the first failure ends it"
    found = fetch({"optax": url, "jax": dead}, tmp_path / "kept")
    assert found == {"optax": (url, str(tmp_path / "kept/optax"))}
    assert (tmp_path / "kept/optax").read_bytes() == b"index"
    assert fetch({"optax": dead}, tmp_path / "kept") == {
        "optax": (dead, str(tmp_path / "kept/optax"))
    }

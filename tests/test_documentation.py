"""What the documentation names exists, and notebooks run. Code blocks: test_code_blocks.py."""

import inspect
import pathlib
import re
from collections.abc import Iterator

import nbclient
import nbformat
import pytest

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

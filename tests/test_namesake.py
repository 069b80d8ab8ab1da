"""`pip install ampx` gets another project's: ours is `ampx-jax`."""

import pathlib
import re
import shlex
import subprocess
import sys
import tomllib
import warnings

import pytest

import ampx
from ampx.namesake import warn_of_namesake

ROOT = pathlib.Path(__file__).parents[1]


def install(folder: pathlib.Path, name: str) -> None:
    info = folder / f"{name.replace('-', '_')}-0.0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.0.1\n")


@pytest.mark.parametrize("name", ["ampx", "ampx-jax", "ampxx"])
def test_a_distribution_of_our_import_name_is_warned_of(name, tmp_path, monkeypatch) -> None:
    install(tmp_path, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_namesake()
    assert [warning.category for warning in caught] == [UserWarning] * (name == "ampx")
    assert all("pip uninstall ampx" in str(warning.message) for warning in caught)


@pytest.mark.slow
def test_the_import_warns_at_the_line_that_imports(tmp_path) -> None:
    install(tmp_path, "ampx")
    program = tmp_path / "program.py"
    program.write_text("import sys\n\nimport ampx\n")
    environment = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "PATH": "", "JAX_PLATFORMS": "cpu"}
    run = [sys.executable, "-W", "always", str(program)]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    assert f"{program}:3: UserWarning: the distribution 'ampx'" in done.stderr


def test_files_that_name_the_distribution_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "ampx-jax"
    citation = (ROOT / "CITATION.cff").read_text().splitlines()
    assert f"version: {ampx.__version__}" in citation
    assert f"license: {project['license']}" in citation


def test_install_lines_name_this_library() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    lines = re.findall(r"python -m pip install (.+?)[`\n]", "".join(p.read_text() for p in pages))
    assert len(lines) >= 4
    for line in lines:
        for what in shlex.split(line):
            assert re.fullmatch(r"-e|\.\[\w+\]|ampx-jax(\[\w+\])?|--[a-z-]+", what), line

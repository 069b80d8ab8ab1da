"""Writes the address of the repository into a checkout that is about to be released.

    python docs/absolute_links.py https://host/owner/name v0.1.0

On the page of a package index there is nothing beside the README, so its links need a host. The
sources name none: the workflow that releases knows where it runs. README.md gets absolute links to
that tag, and pyproject.toml its `[project.urls]`. If the host is GitHub, links to notebooks open
them in Colab, where they run; their first cell installs the release.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[1]
GITHUB, COLAB = "https://github.com/", "https://colab.research.google.com/github/"


def link_absolutely(readme: str, address: str, tag: str) -> str:
    """The README with links to files of the repository as they lie at a tag."""

    def absolute(match: re.Match[str]) -> str:
        # A page shows a file, and only the raw file is a picture.
        kind = "raw" if match[1] else "blob"
        runs = match[3].endswith(".ipynb") and address.startswith(GITHUB)
        place = address.replace(GITHUB, COLAB) if runs else address
        return f"{match[1]}[{match[2]}]({place}/{kind}/{tag}/{match[3]})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)", absolute, readme)


def name_urls(pyproject: str, address: str) -> str:
    """The project file with the addresses that a package index shows."""
    urls = {"Repository": address, "Issues": f"{address}/issues"}
    urls["Changelog"] = f"{address}/blob/main/CHANGELOG.md"
    table = "".join(f'{name} = "{url}"\n' for name, url in urls.items())
    before, found, after = pyproject.partition("[project.optional-dependencies]\n")
    if not found or "[project.urls]" in pyproject:
        raise ValueError("pyproject.toml needs [project.optional-dependencies] and no urls yet")
    return f"{before}[project.urls]\n{table}\n{found}{after}"


if __name__ == "__main__":
    address, tag = sys.argv[1:]
    for name, write in {
        "README.md": lambda text: link_absolutely(text, address, tag),
        "pyproject.toml": lambda text: name_urls(text, address),
    }.items():
        (ROOT / name).write_text(write((ROOT / name).read_text()))

"""The documentation as a site: every public name and every link is there, and what is missing fails the build."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

import pytest

if find_spec("mkdocs") is None:
    pytest.skip("run: make test-integrations ONLY=docs_site", allow_module_level=True)

ROOT = Path(__file__).parents[2]
MODULES = re.findall(r"^\| `(asyncmoe[\w.]*)` \|", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)


def build(tree: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=300, check=False)


class Page(HTMLParser):
    """Anchors and links of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.anchors |= {value for value in (named.get("id"), named.get("name")) if value}
        self.links += [value for value in (named.get("href"), named.get("src")) if value]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    out = tmp_path_factory.mktemp("site")
    done = build(ROOT, out)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "WARNING" not in done.stderr
    return {path.relative_to(out): Page(path.read_text()) for path in out.rglob("*.html")}


def exported(module: str) -> list[str]:
    """`__all__` of a package, and the classes and functions of a module."""
    path = ROOT / module.replace(".", "/")
    if path.is_dir():
        tree = ast.parse((path / "__init__.py").read_text())
        (names,) = [ast.literal_eval(one.value) for one in tree.body if isinstance(one, ast.Assign) and one.targets[0].id == "__all__"]  # type: ignore[attr-defined]
        return list(names)
    tree = ast.parse(path.with_suffix(".py").read_text())
    return [one.name for one in tree.body if isinstance(one, (ast.ClassDef, ast.FunctionDef)) and not one.name.startswith("_")]


@pytest.mark.parametrize("module", MODULES)
def test_a_module_has_a_page_with_its_names(module: str, site: dict[Path, Page]) -> None:
    anchors = {anchor.rpartition(".")[2] for anchor in site[Path("api", f"{module}.html")].anchors}
    assert [name for name in exported(module) if name not in anchors] == []


def links(site: dict[Path, Page]) -> Iterator[tuple[Path, str, Path, str]]:
    """(page, link, page it leads to, anchor) of each link within the site."""
    for path, page in site.items():
        for link in page.links:
            target, _, anchor = unquote(link).partition("#")
            if path.name != "404.html" and not re.match(r"[a-z]+:|//", link):
                there = Path(os.path.normpath(path.parent / target)) if target else path
                yield path, link, there / "index.html" if target.endswith("/") or there == Path() else there, anchor


def test_links_lead_somewhere(site: dict[Path, Page]) -> None:
    found = list(links(site))
    pages = [(path, link, there, anchor) for path, link, there, anchor in found if there.suffix in (".html", "")]
    assert len(pages) > 1000
    there = {(page, anchor) for page, content in site.items() for anchor in ("", *content.anchors)}
    assert [(str(path), link) for path, link, *place in pages if tuple(place) not in there] == []
    assert {Path("files/CONTRIBUTING.html"), Path("files/examples/cluster.html")} <= set(site)


def test_nothing_is_fetched_from_another_host(site: dict[Path, Page]) -> None:
    """A link may lead there; scripts, styles and pictures may not come from there."""
    elsewhere = {link for page in site.values() for link in page.links if link.startswith("http")}
    assert [link for link in elsewhere if link.endswith((".js", ".css", ".png", ".svg"))] == []


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what the site is built from."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    for name in names.stdout.splitlines():
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize(
    ("page", "text", "told"),
    [
        ("docs/glossary.md", "[gone](guides/gone.md)\n", "guides/gone.md"),
        ("docs/glossary.md", "[gone](config.md#no-such-heading)\n", "no-such-heading"),
        ("docs/glossary.md", "[gone](../examples/gone.yaml)\n", "gone.yaml"),
        ("docs/api.md", "| `asyncmoe.no_such` | x |\n", "asyncmoe.no_such"),
        ("docs/unlisted.md", "# A page without a place\n", "unlisted.md"),
    ],
)
def test_what_is_missing_fails_the_build(tree: Path, page: str, text: str, told: str) -> None:
    file = tree / page
    file.write_text((file.read_text() if file.exists() else "") + "\n" + text)
    done = build(tree, tree / "out")
    assert done.returncode != 0
    assert told in done.stdout + done.stderr

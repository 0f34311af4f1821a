"""Adds to the site (mkdocs.yml) what docs/ does not have: a page for each public module, and for each file elsewhere that a page links to.

Pages are written for GitHub, where links lead to files of the repository. On the site, a link out of docs/ leads to a page with that file's
text, so the site is complete without the repository's address.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
API = "api.md"
_LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")
_MODULE = re.compile(r"^\| `(asyncmoe[\w.]*)` \|", re.MULTILINE)
_MOST_BYTES = 1 << 20


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of modules to the files and to the navigation, and the pages of files outside of docs/ to the files."""
    modules = _MODULE.findall((ROOT / "docs" / API).read_text())
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    for module in modules:
        files.append(File.generated(config, _of_module(module), content=_api(module)))
    section = next(pages for entry in config.nav or () for pages in entry.values() if API in pages)
    section += [{module.removeprefix("asyncmoe."): _of_module(module)} for module in modules]
    seen = set(waiting)
    while waiting:
        source = waiting.pop()
        links = _LINK.findall(_text(source)) if source.endswith(".md") else []
        for path in {target for link, _ in links if (target := _target(source, link)) is not None} - seen:
            seen.add(path)
            if not path.startswith("docs/"):
                waiting.append(path)
                files.append(File.generated(config, _uri(path), content=_text(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to pages of the site, and the names of modules to theirs."""
    here = page.file.src_uri
    if here == API:
        return _MODULE.sub(lambda match: f"| [`{match[1]}`]({_of_module(match[1])}) |", markdown)
    source = here.removeprefix("files/") if here.startswith("files/") else f"docs/{here}"
    if here.startswith("files/") and not (ROOT / source).is_file():
        return markdown  # of a folder, or of a file that is no page: shown as code

    def led(match: re.Match[str]) -> str:
        path = _target(source, match[1])
        return match[0] if path is None else f"]({posixpath.relpath(_uri(path), posixpath.dirname(here) or '.')}{match[2] or ''})"

    return _LINK.sub(led, markdown)


def _target(source: str, link: str) -> str | None:
    """Return the file or folder that a link of a page leads to, by its path in the repository; None: elsewhere, or to nothing."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    inside = not path.startswith("../") and not re.match(r"[a-z]+:", link)
    return path if inside and (ROOT / path).exists() else None


def _of_module(module: str) -> str:
    return f"api/{module}.md"


def _api(module: str) -> str:
    """Return the page of a module. A function that a package exports under the name of its own module is added: the module hides it."""
    folder = ROOT / module.replace(".", "/")
    tree = ast.parse((folder / "__init__.py").read_text()) if folder.is_dir() else ast.Module([], [])
    imports = [(node.module, alias.name) for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    hidden = [f"{source}.{name}" for source, name in imports if source == f"{module}.{name}"]
    headed = "\n    options: {show_root_heading: true, show_root_toc_entry: true, show_root_full_path: false}"
    return "\n\n".join([f"# {module}", f"::: {module}", *(f"::: {name}{headed}" for name in hidden)]) + "\n"


def _uri(path: str) -> str:
    """Return the place of a page among those of the site, by the path of its file in the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"files/{path}" if path.endswith(".md") else f"files/{path}.md"


def _text(path: str) -> str:
    """Return the page for a file of the repository: a page as it is, any other file as code, of a folder all its files."""
    file = ROOT / path
    if path.endswith(".md"):
        # A list's own blocks have three blanks before them on GitHub, and need four here.
        return file.read_text() if path.startswith("docs/") else re.sub(r"^   (?=\S)", "    ", file.read_text(), flags=re.MULTILINE)
    shown = sorted(one for one in file.iterdir() if one.is_file()) if file.is_dir() else [file]
    return "\n\n".join([f"# {path}", *map(_shown, shown)]) + "\n"


def _shown(file: Path) -> str:
    if file.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{file}: got {file.stat().st_size} bytes, expected at most {_MOST_BYTES} of a file that a page links to")
    return f"`{file.relative_to(ROOT)}`\n\n````{file.suffix.removeprefix('.')}\n{file.read_text().rstrip()}\n````"

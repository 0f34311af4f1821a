"""Checks of the site (mkdocs.yml) without building it; `make docs-site` builds it, strictly."""

from __future__ import annotations

import ast
import re
from typing import Any

import yaml

from tests.unit.doc_pages import PAGES, ROOT, files, read

MODULES = re.findall(r"^\| `(asyncmoe[\w.]*)` \|", read("api.md"), re.MULTILINE)


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tag names a function of another environment."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def leaves(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [leaf for entry in (nav.values() if isinstance(nav, dict) else nav) for leaf in leaves(entry)]


def test_every_page_has_one_place_in_the_navigation() -> None:
    nav = leaves(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"])
    assert sorted(nav) == sorted(str(path.relative_to(ROOT / "docs")) for path in PAGES if path.is_relative_to(ROOT / "docs"))


def programs() -> list[tuple[str, str]]:
    """(where, program) of the files on pages, and of examples."""
    found = [(name, program) for page in PAGES for name, program in files(page.read_text()).items() if re.fullmatch(r"[\w/]+\.py", name)]
    return found + [(path.name, path.read_text()) for path in (ROOT / "examples").rglob("*.py")]


def test_what_users_are_told_to_import_is_public() -> None:
    imported = set()
    for where, program in programs():
        for node in ast.walk(ast.parse(program)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "asyncmoe":
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                imported |= {(where, name if name in MODULES else node.module) for name in inner}
    assert len(imported) > 10
    assert sorted((where, module) for where, module in imported if module not in MODULES) == []

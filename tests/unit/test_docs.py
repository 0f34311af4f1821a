"""Generated pages are up to date, and the files and links on pages exist."""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.unit.doc_pages import PAGES, ROOT, blocks, prose, read, spans

pages = pytest.mark.parametrize("page", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])


@functools.cache
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code(page: Path, *words: str) -> str:
    """All code on a page: spans, and blocks with the given info words."""
    text = page.read_text()
    return "\n".join([*spans(text), *(block.text for block in blocks(text) if block.word in words)])


def test_the_reference_is_what_the_schema_says() -> None:
    assert read("config.md") == generator().generate(), "run: make docs"
    assert read("simulate.md") == generator().generate_plant(), "run: make docs"


@pages
def test_files_that_are_named_exist(page: Path) -> None:
    folders = "asyncmoe|benchmarks|docs|examples|tests|slurm|csrc|requirements"
    for name in re.findall(rf"(?<![\w:./*-])((?:{folders})/[\w./*-]*)", code(page, "", "sh")):
        assert list(ROOT.glob(name.rstrip("./"))), name


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text())):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", prose(file.read_text()), re.MULTILINE)
            assert anchor in map(generator().anchor, headings), target

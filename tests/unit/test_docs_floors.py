"""Imports point from a higher floor of docs/architecture.md to a lower one, or stay on theirs."""

from __future__ import annotations

import re
from graphlib import TopologicalSorter
from pathlib import Path

from tests.unit.doc_pages import ROOT, read, tables
from tests.unit.source_imports import imported

APART = ("asyncmoe.rollout", "asyncmoe.trainer")
"""On one floor, and yet they do not know each other."""


def floors() -> dict[str, int]:
    """Module prefix -> floor."""
    rows = next(table for table in tables(read("architecture.md")) if table[0][0] == "1")
    return {
        name.rstrip("/").removesuffix(".py").replace("/", "."): int(floor)
        for floor, folders in rows
        for name in re.findall(r"`(asyncmoe/[\w./]+)`", folders)
    }


def where(module: str, known: dict[str, int]) -> str | None:
    """The page's entry that a module belongs to."""
    parts = module.split(".")
    return next((name for n in range(len(parts), 0, -1) if (name := ".".join(parts[:n])) in known), None)


def modules() -> dict[str, Path]:
    """Dotted name -> file of every module of the package."""
    files = [*(ROOT / "asyncmoe").rglob("*.py"), *(ROOT / "asyncmoe").rglob("*.pyi")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


def test_imports_point_down() -> None:
    known = floors()
    assert set(known.values()) == {1, 2, 3, 4, 5, 6, 7}
    seen, wrong = set(), []
    for path in (ROOT / "asyncmoe").rglob("*.py"):
        here = where(".".join(path.relative_to(ROOT).with_suffix("").parts), known)
        if here is None:
            continue
        for module in imported(path):
            there = where(module, known)
            seen.add((here, there))
            if there is not None and (known[there] > known[here] or {here, there} == set(APART)):
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong
    assert ("asyncmoe.cli", "asyncmoe.errors") in seen, "imports are found"


def test_every_folder_has_a_floor() -> None:
    known = floors()
    folders = {path.name for path in (ROOT / "asyncmoe").iterdir() if (path / "__init__.py").is_file()}
    assert {f"asyncmoe.{name}" for name in folders} <= set(known)


def test_no_modules_import_each_other_in_a_circle() -> None:
    known = modules()

    def module_of(name: str) -> str:
        while name and name not in known:
            name = name.rpartition(".")[0]
        return name

    arrows = {name: {module_of(one) for one in imported(path)} - {name, ""} for name, path in known.items() if path.suffix == ".py"}
    assert arrows["asyncmoe.cli"], "imports are found"
    TopologicalSorter(arrows).prepare()  # raises CycleError, which names the circle

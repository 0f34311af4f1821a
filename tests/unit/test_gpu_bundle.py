"""The bundle for GPU machines without a network: its calls carry what runs there, keep their limits, and continue where they ended."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.bundle import manifest
from tests.gpu.bundle.parts import CALLS, LIMIT_S, Part
from tests.unit.source_imports import statements

ROOT = Path(__file__).parents[2]
BUNDLE = ROOT / "tests" / "gpu" / "bundle"


def imported(file: Path) -> Iterator[str]:
    """Dotted names of modules that a file imports anywhere; what it may do without, because it catches that it is missing, or imports for
    types only, is left out."""
    lines = [
        line for line in ast.parse(file.read_text()).body if not (isinstance(line, ast.If) and ast.unparse(line.test) == "TYPE_CHECKING")
    ]
    for node in statements(lines, tried=False):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def local_file(module: str) -> Path | None:
    """The file of a module of this tree; tests/unit and tests/native are on the path of tests/gpu."""
    for base in (ROOT, ROOT / "tests" / "unit", ROOT / "tests" / "native"):
        place = base.joinpath(*module.split("."))
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.exists():
                return file
    return None


def reached(starts: list[Path]) -> dict[str, Path]:
    """Top-level names outside this tree and the standard library that files import, or files they import -> who does."""
    found: dict[str, Path] = {}
    waiting, seen = list(starts), set()
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        for module in imported(file):
            top = module.split(".")[0]
            for depth in range(1, module.count(".") + 2):
                if inside := local_file(".".join(module.split(".")[:depth])):
                    waiting.append(inside)
            if top not in sys.stdlib_module_names and top not in ("asyncmoe", "tests") and not local_file(top):
                found.setdefault(top, file)
    return found


def files_of(part: Part) -> list[Path]:
    """The files that a part starts with."""
    if part.module != "pytest":
        found = local_file(part.module)
        assert found, part.module
        return [found]
    return [ROOT / word for word in part.arguments if word.endswith(".py")]  # of tests/conftest.py they use no fixture


STARTED = {
    "offload": ("asyncmoe/trainer/model/optimizer.py",),
    "tiny-run": ("asyncmoe/trainer/__main__.py", "asyncmoe/rollout/controller.py"),
}
"""What parts run in processes of their own."""


@pytest.mark.parametrize("call", CALLS)
def test_every_import_of_a_calls_parts_is_carried_or_the_machines(call: str) -> None:
    starts = [ROOT / "setup.py", *(file for part in CALLS[call] for file in files_of(part))]
    starts += [ROOT / name for part in CALLS[call] for name in STARTED.get(part.name, ())]
    there = manifest.ASSUMED | manifest.OPTIONAL
    # Reached through functions that the bundle does not call: the report, TensorBoard, sessions with MCP servers, a log in Redis, a sandbox
    # that is a server; where there is no server of SGLang, what asks one.
    reports = {"matplotlib", "plotly", "tensorboard", "mcp", "mcp_types", "httpx2", "anyio", "redis", "tenacity"}
    reports |= set() if "sglang" in manifest.CARRIED[call] else {"sglang"}
    found = reached(starts)
    missing = {name: str(file.relative_to(ROOT)) for name, file in found.items() if name not in there | reports}
    missing = {name: file for name, file in missing.items() if manifest.distribution(name) not in manifest.CARRIED[call]}
    assert missing == {}
    assert {"pybind11", "numpy"} <= set(found), "the walk sees what is imported through asyncmoe"


def test_the_five_calls_are_under_eleven_minutes_and_every_part_is_there() -> None:
    assert sum(part.limit_s for parts in CALLS.values() for part in parts if not part.asked) <= LIMIT_S
    page = (BUNDLE / "README.md").read_text()
    assert CALLS.keys() == manifest.CARRIED.keys()
    for parts in CALLS.values():
        names = [part.name for part in parts]
        assert names[:2] == ["facts", "build"]
        for part in parts:
            assert set(part.needs) <= set(names[: names.index(part.name)])
            assert f"`{part.name}`" in page
    own = [part.name for parts in CALLS.values() for part in parts if not part.again]
    assert len(own) == len(set(own)), "a summary has the parts of all calls"

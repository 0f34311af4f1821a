"""The bundle for GPU machines without a network: its manifest covers what runs there, its driver keeps time, its summary its schema."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.gpu.bundle import manifest
from tests.gpu.bundle.parts import LIMIT_S, PARTS
from tests.unit.source_imports import statements

ROOT = Path(__file__).parents[2]
BUNDLE = ROOT / "tests" / "gpu" / "bundle"


def imported(file: Path) -> Iterator[str]:
    """Dotted names of modules that a file imports anywhere; what it may do without, because it catches that it is missing, is left out."""
    for node in statements(ast.parse(file.read_text()).body, tried=False):
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


def test_every_import_of_the_gpu_tests_is_carried_or_the_machines() -> None:
    starts = [*sorted((ROOT / "tests" / "gpu").rglob("*.py")), ROOT / "tests" / "conftest.py", ROOT / "setup.py"]
    starts += [
        ROOT / name
        for name in ("benchmarks/gpu.py", "benchmarks/replay.py", "asyncmoe/trainer/__main__.py", "asyncmoe/rollout/controller.py")
    ]
    there = manifest.ASSUMED | manifest.OPTIONAL
    # Reached through functions that the bundle does not call: the report, TensorBoard, sessions with MCP servers, a log in Redis, a sandbox
    # that is a server.
    reports = {"matplotlib", "plotly", "tensorboard", "mcp", "mcp_types", "httpx2", "anyio", "redis", "tenacity"}
    found = reached(starts)
    missing = {name: str(file.relative_to(ROOT)) for name, file in found.items() if name not in there | reports}
    missing = {name: file for name, file in missing.items() if manifest.distribution(name) not in manifest.WHEELS}
    assert missing == {}
    assert {"pydantic", "msgspec", "megatron", "zmq"} <= set(found), "the walk sees what is imported through asyncmoe"


def test_the_whole_is_under_eleven_minutes_and_every_part_is_there() -> None:
    assert sum(part.limit_s for part in PARTS) < LIMIT_S < 660
    names = [part.name for part in PARTS]
    assert len(names) == len(set(names))
    for part in PARTS:
        assert set(part.needs) <= set(names[: names.index(part.name)])
        assert part.module == "pytest" or local_file(part.module), part.module
    page = (BUNDLE / "README.md").read_text()
    assert all(f"`{name}`" in page for name in names)

"""The statements of a file's syntax tree, for what looks at its imports: most of a tree are expressions, which hold none."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path


def statements(lines: Iterable[ast.stmt], tried: bool = True) -> Iterator[ast.stmt]:
    """Yield `lines` and all statements within them; with tried=False not those that a `try` catches errors of."""
    for line in lines:
        yield line
        for name in ("body", "orelse", "finalbody"):
            if tried or name != "body" or not (isinstance(line, ast.Try) and line.handlers):
                yield from statements(getattr(line, name, ()), tried)
        for part in (*getattr(line, "handlers", ()), *getattr(line, "cases", ())):
            yield from statements(part.body, tried)


def imported(path: Path) -> Iterator[str]:
    """Yield what a file imports, as module.name: when it is imported, inside functions, and for types only."""
    for node in statements(ast.parse(path.read_text()).body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)

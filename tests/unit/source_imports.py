"""The statements of a file's syntax tree, for what looks at its imports: most of a tree are expressions, which hold none."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator


def statements(lines: Iterable[ast.stmt], tried: bool = True) -> Iterator[ast.stmt]:
    """Yield `lines` and all statements within them; with tried=False not those that a `try` catches errors of."""
    for line in lines:
        yield line
        for name in ("body", "orelse", "finalbody"):
            if tried or name != "body" or not (isinstance(line, ast.Try) and line.handlers):
                yield from statements(getattr(line, name, ()), tried)
        for part in (*getattr(line, "handlers", ()), *getattr(line, "cases", ())):
            yield from statements(part.body, tried)

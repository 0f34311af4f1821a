"""What a name in a package's sources stands for, read from syntax trees alone: nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property

Function = ast.FunctionDef | ast.AsyncFunctionDef
Seen = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Found:
    """A definition, or a module where `node` is None; module "": sources do not tell.

    Attributes:
        instance: an object of the class `node`.
        bound: the way to the function gives its first argument.
    """

    module: str = ""
    node: ast.AST | None = None
    instance: bool = False
    bound: bool = False


Binding = ast.AST | tuple[str, str] | Found
"""What binds a name: a definition, an expression, or (module, name) of an import, whose name is "" for the module itself."""
Names = dict[str, list[Binding]]


@dataclass
class Module:
    name: str
    package: bool
    tree: ast.Module

    @cached_property
    def names(self) -> Names:
        return self.bindings(self.tree.body)

    def source_of(self, line: ast.ImportFrom) -> str:
        """The absolute name of the module that a `from` names."""
        parts = self.name.split(".")
        above = parts[: len(parts) - line.level + self.package] if line.level else []
        return ".".join([*above, *([line.module] if line.module else [])])

    def bindings(self, lines: Iterable[ast.AST]) -> Names:
        names: Names = {}
        for line in inside(lines):
            if isinstance(line, Function | ast.ClassDef):
                names.setdefault(line.name, []).append(line)
            elif isinstance(line, ast.Import):
                for one in line.names:
                    whole = one.name if one.asname else one.name.split(".")[0]
                    names.setdefault(one.asname or whole, []).append((whole, ""))
            elif isinstance(line, ast.ImportFrom):
                for one in line.names:
                    names.setdefault(one.asname or one.name, []).append((self.source_of(line), one.name))
            elif isinstance(line, ast.Assign):
                for target in line.targets:
                    if isinstance(target, ast.Name):
                        names.setdefault(target.id, []).append(line.value)
        return names


def inside(lines: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Nodes of statements, without those inside the functions and classes that they define."""
    for line in lines:
        yield line
        if not isinstance(line, Function | ast.ClassDef | ast.Lambda):
            yield from inside(ast.iter_child_nodes(line))


@cache
def _mentioned(of: ast.AST) -> frozenset[str]:
    """Names that a class and its objects have: what its statements set, and strings in it, such as of parameters that it registers."""
    stored = {getattr(one, "attr", getattr(one, "id", "")) for one in ast.walk(of) if isinstance(getattr(one, "ctx", None), ast.Store)}
    return frozenset(stored | {one.value for one in ast.walk(of) if isinstance(one, ast.Constant) and isinstance(one.value, str)})


class Sources:
    """Modules by their files' paths and texts, such as "package/module.py". A package without a file here may have any name."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts, self._packages = texts, {path.split("/")[0].removesuffix(".py") for path in texts}
        self._modules: dict[str, Module | None] = {}
        self._lines: dict[Found, tuple[Found | None, ...]] = {}

    def module(self, name: str) -> Module | None:
        if name not in self._modules:
            base = name.replace(".", "/")
            file = next((one for one in (f"{base}/__init__.py", f"{base}.py") if one in self._texts), "")
            self._modules[name] = Module(name, file.endswith("__init__.py"), ast.parse(self._texts[file])) if file else None
        return self._modules[name]

    def named(self, module: str, name: str, seen: Seen = frozenset()) -> list[Found]:
        """What `from module import name` may give; [] where it fails."""
        if module.split(".")[0] not in self._packages:
            return [Found()]
        known = self.module(module)
        if known is None or (module, name) in seen:
            return []
        if not name:
            return [Found(module)]
        seen |= {(module, name)}
        found = [one for binding in known.names.get(name, ()) for one in self._bound(module, binding, {}, seen)]
        if not found:
            stars = [one[0] for one in known.names.get("*", ()) if isinstance(one, tuple)]
            found = [one for star in stars for one in self.named(star, name, seen)]
        return found or ([Found(f"{module}.{name}")] if self.module(f"{module}.{name}") else [])

    def _bound(self, module: str, binding: Binding, local: Names, seen: Seen) -> list[Found]:
        if isinstance(binding, Found):
            return [binding]
        if isinstance(binding, tuple):
            return self.named(*binding, seen)
        return [Found(module, binding)] if isinstance(binding, Function | ast.ClassDef) else self.of(module, binding, local, seen)

    def of(self, module: str, at: ast.AST, local: Names, seen: Seen = frozenset()) -> list[Found]:
        """What an expression may stand for, with the names of its function in `local`; [] where what it names is missing."""
        if isinstance(at, ast.Name) and at.id in local and (module, at.id) not in seen:
            return [one for binding in local[at.id] for one in self._bound(module, binding, local, seen | {(module, at.id)})]
        if isinstance(at, ast.Name):
            return self.named(module, at.id, seen) or [Found()]
        if isinstance(at, ast.Attribute):
            return [one for value in self.of(module, at.value, local, seen) for one in self.attribute(value, at.attr)]
        if isinstance(at, ast.Call):
            made = [one for one in self.of(module, at.func, local, seen) if isinstance(one.node, ast.ClassDef) and not one.instance]
            return [Found(one.module, one.node, instance=True) for one in made] or [Found()]
        return [Found()]

    def attribute(self, value: Found, name: str) -> list[Found]:
        if value.node is None:
            return self.named(value.module, name)
        if not isinstance(value.node, ast.ClassDef):
            return [Found()]
        line = self.line_of(value)
        for one in line:
            if one is None:
                return [Found()]
            for found in one.node.body if isinstance(one.node, ast.ClassDef) else ():
                if isinstance(found, Function) and found.name == name:
                    kinds = {kind.id for kind in found.decorator_list if isinstance(kind, ast.Name)}
                    return [Found(one.module, found, bound="classmethod" in kinds or (value.instance and "staticmethod" not in kinds))]
        return [Found()] if any(one and one.node and name in _mentioned(one.node) for one in line) else []

    def line_of(self, of: Found) -> tuple[Found | None, ...]:
        """A class and those that it derives from, the nearest first; None for one that sources do not tell."""
        if of not in self._lines:
            line: list[Found | None] = [of]
            for base in of.node.bases if isinstance(of.node, ast.ClassDef) else ():
                for one in self.of(of.module, base, {}) or [Found()]:
                    line += self.line_of(one) if isinstance(one.node, ast.ClassDef) else [None]
            self._lines[of] = tuple(line)
        return self._lines[of]

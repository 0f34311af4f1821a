"""Whether one package's calls fit what another package's sources define.

A branch that a version guard of Megatron's rules out is dead, as is the body of a `try` whose imports fail, or its handler.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from packaging.version import Version

from tests.unit.source_names import Found, Function, Module, Names, Sources, inside

Keys = tuple[set[str], bool]
"""Keys that a dictionary may have, and whether those are all."""


@dataclass
class Report:
    """What of the package `called` is used.

    Attributes:
        wrong: "module:line: what does not fit".
        guarded: (module, where from, name) that is missing where the module is ready for that.
        opaque: (module, call with `**`) some of whose keys sources do not tell.
        checked: functions and classes that calls were held against, with their modules.
    """

    called: str
    wrong: list[str] = field(default_factory=list)
    guarded: set[tuple[str, str, str]] = field(default_factory=set)
    opaque: set[tuple[str, str]] = field(default_factory=set)
    checked: set[str] = field(default_factory=set)

    def concerns(self, module: str) -> bool:
        return module.split(".")[0] == self.called


def check(sources: Sources, modules: Iterable[str], called: str, version: str) -> Report:
    """Hold imports from, attributes of and calls into the package `called` against its sources."""
    report = Report(called)
    users = [one for name in modules if (one := sources.module(name))]
    for module in users:
        module.tree = _Live(sources, module, Version(version), report).visit(module.tree)
        del module.names
    for module in users:
        _Checker(sources, module, report).visit(module.tree)
    return report


_ALL = ast.Name("Exception")
"""What an `except` without a type catches."""


class _Live(ast.NodeTransformer):
    """Takes out what does not run."""

    def __init__(self, sources: Sources, module: Module, version: Version, report: Report) -> None:
        self._sources, self._module, self._version, self._report = sources, module, version, report
        self._names = module.names

    def visit_If(self, at: ast.If) -> list[ast.stmt] | ast.AST:
        truth = self._truth(at.test)
        if truth is None:
            return self.generic_visit(at)
        kept = ast.Module(at.body if truth else at.orelse, [])
        self.generic_visit(kept)
        return kept.body or [ast.Pass()]

    def visit_Try(self, at: ast.Try) -> list[ast.stmt] | ast.AST:
        self.generic_visit(at)
        caught = {one.id for handler in at.handlers for one in ast.walk(handler.type or _ALL) if isinstance(one, ast.Name)}
        lines = [(self._module.source_of(line), line) for line in inside(at.body) if isinstance(line, ast.ImportFrom)]
        imported = [(source, one.name) for source, line in lines if self._report.concerns(source) for one in line.names]
        if not imported or not caught & {"ImportError", "ModuleNotFoundError", "Exception"}:
            return at
        missing = {(self._module.name, *one) for one in imported if not self._sources.named(*one)}
        self._report.guarded |= missing
        return [line for handler in at.handlers for line in handler.body] if missing else at.body + at.orelse

    def _truth(self, test: ast.expr) -> bool | None:
        text = ast.unparse(test)
        if isinstance(test, ast.BoolOp):
            parts, decisive = [self._truth(one) for one in test.values], isinstance(test.op, ast.Or)
            return decisive if decisive in parts else None if None in parts else not decisive
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            truth = self._truth(test.operand)
            return None if truth is None else not truth
        if isinstance(test, ast.Name) and text in ("HAVE_TE", "TYPE_CHECKING"):
            return text == "HAVE_TE"
        if isinstance(test, ast.Name):
            return next((self._truth(one) for one in self._names.get(text, ()) if isinstance(one, ast.Call)), None)
        if text.startswith("is_te_min_version('"):
            least = Version(text.split("'")[1])
            return self._version > least if "check_equality=False" in text else self._version >= least
        if text.startswith("get_te_version() < PkgVersion('"):
            return self._version < Version(text.split("'")[1])
        return None


@dataclass
class _Checker(ast.NodeVisitor):
    sources: Sources
    module: Module
    report: Report
    local: Names = field(default_factory=dict)
    body: Sequence[ast.stmt] = ()
    owner: ast.ClassDef | None = None

    def visit_ClassDef(self, at: ast.ClassDef) -> None:
        before, self.owner = self.owner, at
        self.generic_visit(at)
        self.owner = before

    def visit_FunctionDef(self, at: ast.FunctionDef) -> None:
        before, body = self.local, self.body
        given = [one.arg for one in (*at.args.posonlyargs, *at.args.args, *at.args.kwonlyargs, at.args.vararg, at.args.kwarg) if one]
        arguments: Names = {name: [Found()] for name in given}
        if self.owner and at in self.owner.body and given[:1] == ["self"]:
            arguments["self"] = [Found(self.module.name, self.owner, instance=True)]
        self.local, self.body = before | arguments | self.module.bindings(at.body), at.body
        self.generic_visit(at)
        self.local, self.body = before, body

    def visit_ImportFrom(self, at: ast.ImportFrom) -> None:
        source = self.module.source_of(at)
        for one in at.names if self.report.concerns(source) else ():
            if not self.sources.named(source, one.name.strip("*")):
                self._wrong(at, f"{source} has no {one.name}")

    def visit_Attribute(self, at: ast.Attribute) -> None:
        self.generic_visit(at)
        for value in self.sources.of(self.module.name, at.value, self.local) if isinstance(at.ctx, ast.Load) else ():
            if self._derives(value) and not self.sources.attribute(value, at.attr):
                self._wrong(at, f"there is no {ast.unparse(at)}")

    def _derives(self, value: Found) -> bool:
        return any(one and self.report.concerns(one.module) for one in self.sources.line_of(value))

    def visit_Call(self, at: ast.Call) -> None:
        self.generic_visit(at)
        for callee in self._callees(at.func):
            made = callee
            if isinstance(callee.node, ast.ClassDef):
                method = "__call__" if callee.instance else "__init__"
                made = next(iter(self.sources.attribute(Found(callee.module, callee.node, instance=True), method)), Found())
            if self.report.concerns(made.module) and isinstance(made.node, Function):
                name = f"{callee.module}.{getattr(callee.node, 'name', '')}"
                self.report.checked.add(name)
                for problem in self._misfits(at, made.node.args, made.bound):
                    self._wrong(at, f"{name}: {problem}")

    def _callees(self, at: ast.expr) -> list[Found]:
        if not (isinstance(at, ast.Attribute) and ast.unparse(at.value) == "super()" and self.owner):
            return self.sources.of(self.module.name, at, self.local)
        own = Found(self.module.name, self.owner, instance=True)
        for base in self.sources.line_of(own)[1:]:
            found = self.sources.attribute(Found(base.module, base.node, instance=True), at.attr) if base else [Found()]
            if found:
                return found
        if self._derives(own) and at.attr != "__init__":
            self._wrong(at, f"the classes that {self.owner.name} derives from have no {at.attr}")
        return []

    def _misfits(self, at: ast.Call, arguments: ast.arguments, bound: bool) -> Iterator[str]:
        places = [one.arg for one in (*arguments.posonlyargs, *arguments.args)][bound:]
        optional = places[len(places) - len(arguments.defaults) :] if arguments.defaults else []
        named = {one.arg: value for one, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)}
        by_place = [one for one in at.args if not isinstance(one, ast.Starred)]
        keywords, whole = _union(self._keyword(at, one) for one in at.keywords)
        if len(by_place) > len(places) and not arguments.vararg:
            yield f"got {len(by_place)} arguments by place, expected {len(places)} at most"
        if not arguments.kwarg:
            yield from (f"there is no argument {name}" for name in sorted(keywords - {*places, *named}))
        taken = set(places[: len(by_place)])
        yield from (f"argument {name} is given twice" for name in sorted(keywords & taken))
        if whole and len(by_place) == len(at.args):
            required = set(places) - set(optional) | {name for name, value in named.items() if value is None}
            yield from (f"argument {name} is not given" for name in sorted(required - taken - keywords))

    def _keyword(self, call: ast.Call, at: ast.keyword) -> Keys:
        if at.arg:
            return {at.arg}, True
        keys, whole = self._keys(at.value, self.module, self.body)
        if not whole:
            self.report.opaque.add((self.module.name, f"{ast.unparse(call.func)}(**{ast.unparse(at.value)})"))
        return keys, whole

    def _keys(self, at: ast.expr, module: Module, body: Sequence[ast.stmt]) -> Keys:
        """Keys of a dictionary in a function's body."""
        if isinstance(at, ast.Dict):
            pairs = zip(at.keys, at.values, strict=True)
            return _union(_constant(key) if key else self._keys(value, module, body) for key, value in pairs)
        if isinstance(at, ast.IfExp):
            return _union(self._keys(one, module, body) for one in (at.body, at.orelse))
        if isinstance(at, ast.Name):
            return _union(list(self._put(at.id, module, body)) or [(set(), False)])
        if isinstance(at, ast.Call) and ast.unparse(at.func) == "dict":
            return _union(({one.arg}, True) if one.arg else self._keys(one.value, module, body) for one in at.keywords)
        if isinstance(at, ast.Call):
            ends: list[Keys] = []
            for one in self.sources.of(module.name, at.func, {}):
                if isinstance(one.node, Function) and (of := self.sources.module(one.module)):
                    lines = [line for line in inside(one.node.body) if isinstance(line, ast.Return)]
                    ends += [self._keys(line.value, of, one.node.body) for line in lines if line.value]
            return _union(ends or [(set(), False)])
        return set(), False

    def _put(self, name: str, module: Module, body: Sequence[ast.stmt]) -> Iterator[Keys]:
        """What statements put into the dictionary `name`."""
        for line in inside(body):
            target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
            if isinstance(target, ast.Name) and target.id == name and isinstance(line, ast.Assign | ast.AnnAssign) and line.value:
                yield self._keys(line.value, module, body)
            elif isinstance(target, ast.Subscript) and ast.unparse(target.value) == name:
                yield _constant(target.slice)
            elif isinstance(line, ast.Call) and ast.unparse(line.func) == f"{name}.update":
                yield from (self._keys(one, module, body) for one in line.args)

    def _wrong(self, at: ast.AST, what: str) -> None:
        self.report.wrong.append(f"{self.module.name}:{getattr(at, 'lineno', 0)}: {what}")


def _constant(key: ast.expr) -> Keys:
    return ({str(key.value)}, True) if isinstance(key, ast.Constant) else (set(), False)


def _union(parts: Iterable[Keys]) -> Keys:
    whole = list(parts)
    return set().union(*(keys for keys, _ in whole)), all(complete for _, complete in whole)

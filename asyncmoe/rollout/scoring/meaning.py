"""The meaning of an expression: its value at a point, the members of a list, the value of a name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import count, islice, product
from math import prod
from random import Random

from asyncmoe.rollout.scoring import units
from asyncmoe.rollout.scoring.bounded import FUNCTIONS, TURNS, Number, TooLarge, Undefined, mp, need
from asyncmoe.rollout.scoring.expressions import NO_BASE, SETS, Term, negative

CONSTANTS: Mapping[str, Number] = {"pi": +mp.pi, "e": +mp.e, "i": mp.j, "infty": mp.inf, NO_BASE: mp.e * mp.sqrt(mp.pi)}
_RANGES = ((0.0, 1.0), (1.0, 4.0), (-1.0, 0.0), (-5.0, -1.0), (0.0, 1.0), (1.0, 4.0))
"""Ranges of the variables, one for each point. At as many more points, variables are natural numbers."""
POINTS = range(2 * len(_RANGES))
_WORK, MOST = 40_000, 100
"""Bounds on operations, and on the members of a list."""
_SKIPPED = {"number": 0, "variable": 0, "+": 0, "*": 0}
"""Operations, beyond the first, as which a node of this kind counts; a node of any other kind counts as 40 in all."""


@dataclass(frozen=True)
class At:
    """Where expressions are evaluated.

    Attributes:
        number: index of the point.
        given: values of variables.
        ignored: ops ("unit", "factor") with the value 1, except in arguments of functions.
        work: counter of operations.
    """

    number: int = 0
    given: Mapping[str, Number] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    work: Iterator[int] = field(default_factory=count)


def value(node: Term, at: At) -> Number:
    """Evaluate an expression.

    Raises:
        Undefined: it has no value.
        TooLarge: it exceeds the bounds.
    """
    need(next(islice(at.work, _SKIPPED.get(node.op, 39), None)) < _WORK, TooLarge)
    if node.op in at.ignored:
        return mp.one
    if node.op == "number":
        return mp.mpf(node.text)
    if node.op == "factor":
        return mp.mpf(units.FACTORS[node.text])
    if node.op == "unit":
        return units.known(node.text) or _any_number(units.unknown(node.text), 0)
    if node.op == "variable":
        need(node.text not in SETS, Undefined)
        return at.given[node.text] if node.text in at.given else CONSTANTS.get(node.text, _any_number(node.text, at.number))
    need(node.op in FUNCTIONS and not (node.op == "brackets" and len(node.args) > 1), Undefined)
    values = [value(one, replace(at, ignored=frozenset()) if node.op in TURNS else at) for one in node.args]
    try:
        found = reduce(FUNCTIONS[node.op], values) if node.op in "+*" else FUNCTIONS[node.op](*values)
    except (ArithmeticError, ValueError) as error:
        raise Undefined from error
    need(not mp.isnan(found), Undefined)
    return found


def _any_number(name: str, point: int) -> Number:
    random = Random(f"{name} {point}")
    return mp.mpf(random.uniform(*_RANGES[point]) if point < len(_RANGES) else random.randint(2, 8))


def defined(node: Term, at: At) -> Number | None:
    with suppress(Undefined):
        return value(node, at)
    return None


def walk(node: Term) -> Sequence[Term]:
    return [node, *(inner for one in node.args for inner in walk(one))]


def variables(*nodes: Term) -> set[str]:
    return {one.text for node in nodes for one in walk(node) if one.op == "variable"} - {"pi", "e", "infty", NO_BASE, *SETS}


def has_units(node: Term) -> bool:
    return any(one.op == "unit" and units.known(one.text) != 1 for one in walk(node))


def plain(node: Term) -> Term:
    """Strip brackets around one expression; reduce "x = 1, y = 2" to the values in the order of their names."""
    while len(node.args) == 1 and ((node.op == "list" and node.text != "where" and node.args[0].text != "set") or node.text == "()"):
        node = node.args[0]
    values = dict(map(named, node.args)) if node.op == "list" and node.text not in ("set", "where") else {"": node}
    if "" in values or len(values) < len(node.args):
        return node
    return Term("solution", tuple(values[name] for name in sorted(values)), " ".join(sorted(values)))


def members(node: Term) -> Sequence[Term]:
    """Return the members of a list, the values of an expression with ±, or the expression alone."""
    if node.text == "∅":
        return ()
    parts = [members(one) for one in node.args]
    need((sum if node.op == "list" else prod)(map(len, parts)) <= MOST, TooLarge)
    if node.op == "list":
        inner = node.text == "set"
        return [one for arg, part in zip(node.args, parts, strict=True) for one in ([arg] if inner and arg.text == "set" else part)]
    if node.op == "±":
        return [*parts[0], *map(negative, parts[0])]
    return [replace(node, args=args) for args in product(*parts)]


def named(node: Term) -> tuple[str, Term]:
    """Return the name and value of "x = 5", "f(x) = 5" or "x in S"; without a name, "" and the expression, or the last side of "2 + 3 =
    5"."""
    node = plain(node)
    if node.op != "relation" or node.text not in ("=", "==", "===", "∈"):
        return "", node
    left, right = node.args[0], node.args[-1]
    if left.op in ("variable", "brackets") or (left.op == "*" and all(one.op in ("variable", "brackets") for one in left.args)):
        return left.text.split("_")[0] or str(left), right
    return "", node if variables(node) else right

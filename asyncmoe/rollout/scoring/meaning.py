"""What an expression stands for: its value at a point, the members of a list, the value behind a name."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import count, product

from asyncmoe.rollout.scoring import units
from asyncmoe.rollout.scoring.bounded import FUNCTIONS, TURNS, Number, TooLarge, Undefined, mp, need
from asyncmoe.rollout.scoring.expressions import FACTORS, SETS, Term, negative

CONSTANTS: Mapping[str, Number] = {"pi": +mp.pi, "e": +mp.e, "i": mp.j, "infty": mp.inf}
RANGES = ((0, 1), (1, 4), (-1, 0), (-5, -1), (0, 1), (1, 4))
"""Where variables are, point after point; at as many later points they are natural numbers."""
_WORK, MOST, _ALTERNATIVES = 40_000, 100, 5
"""Bounds of operations, of the members of a list, and of signs ± in an expression."""


@dataclass(frozen=True)
class At:
    """Where expressions are evaluated.

    Attributes:
        number: that of the point.
        given: values of variables.
        units: whether units count, rather than being 1.
        factors: whether percent signs and the like count.
        real: whether a complex number is no value.
        base: of logarithms without one.
        work: counts the operations.
    """

    number: int = 0
    given: Mapping[str, Number] = field(default_factory=dict)
    units: bool = True
    factors: bool = True
    real: bool = True
    base: Number = mp.e
    work: Iterator[int] = field(default_factory=count)


def value(node: Term, at: At) -> Number:
    """Evaluate an expression.

    Raises:
        Undefined: it has no value.
        TooLarge: it takes more than the bounds allow.
    """
    need(max(next(at.work) for _ in range(1 if node.op in ("number", "variable", "+", "*") else 40)) < _WORK, TooLarge)
    if node.op == "number":
        return mp.mpf(node.text)
    if node.op == "unit":
        return units.value(node.text) if at.units else mp.one
    if node.op == "factor":
        return mp.mpf(10) ** (FACTORS[node.text] if at.factors else 0)
    if node.op == "variable":
        return _variable(node.text, at)
    inside = replace(at, units=True) if node.op in TURNS else at
    values = [value(one, inside) for one in node.args]
    if node.op == "apply":
        return _chance(f"{node.text} {[mp.nstr(one, 30) for one in values]}") * mp.one
    need(node.op in FUNCTIONS and not (node.op == "brackets" and len(values) > 1), Undefined)
    if node.op == "log" and len(values) == 1:
        values.append(at.base)
    try:
        found = reduce(FUNCTIONS[node.op], values) if node.op in "+*" else FUNCTIONS[node.op](*values)
    except (ArithmeticError, ValueError) as error:
        raise Undefined from error
    need(not mp.isnan(found) and not (at.real and mp.im(found)), Undefined)
    return found


def _variable(name: str, at: At) -> Number:
    need(name not in SETS, Undefined)
    chance = _chance(f"{name} {at.number}")
    low, high = RANGES[at.number % len(RANGES)]
    any_number = low + (high - low) * mp.mpf(chance) / 9974 if at.number < len(RANGES) else mp.mpf(chance % 7 + 2)
    return at.given.get(name, CONSTANTS.get(name, any_number))


def _chance(name: str) -> int:
    return zlib.crc32(name.encode()) % 9973 + 1


def defined(node: Term, at: At) -> Number | None:
    try:
        return value(node, at)
    except Undefined:
        return None


def walk(node: Term) -> Iterator[Term]:
    yield node
    for one in node.args:
        yield from walk(one)


def variables(*nodes: Term) -> set[str]:
    return {one.text for node in nodes for one in walk(node) if one.op == "variable"} - {"pi", "e", "infty", *SETS}


def units_of(node: Term) -> list[str]:
    return [one.text for one in walk(node) if one.op == "unit" and units.value(one.text) != 1]


def plain(node: Term) -> Term:
    """Without brackets around one expression; a sum of quantities instead of "2 hours and 30 minutes"."""
    while len(node.args) == 1 and (node.op == "list" or node.text == "()"):
        node = node.args[0]
    if node.op == "list" and node.text == "and" and len(set(units_of(node))) == len(units_of(node)) == len(node.args):
        return Term("+", node.args)
    return node


def distributed(node: Term) -> Sequence[Term]:
    """The members of a list; "x = 1, 2" as "x = 1, x = 2"."""
    first = node.args[0]
    return [
        Term("relation", (first.args[0], one), first.text) if first.text in ("=", "≠") and one.op != "relation" else one
        for one in node.args
    ]


def members(node: Term) -> Sequence[Term]:
    """What a list has, or an expression with ± means, or the expression alone."""
    node = plain(node)
    if node.text == "∅":
        return ()
    if node.op == "list":
        found = [member for one in distributed(node) for member in members(one)]
    else:
        number = sum(one.op == "±" for one in walk(node))
        need(number <= _ALTERNATIVES, TooLarge)
        found = [_signed(node, iter(signs)) for signs in product((True, False), repeat=number)]
    need(len(found) <= MOST, TooLarge)
    return found


def _signed(node: Term, signs: Iterator[bool]) -> Term:
    positive = node.op != "±" or next(signs)
    args = tuple(_signed(one, signs) for one in node.args)
    return replace(node, args=args) if node.op != "±" else args[0] if positive else negative(args[0])


def named(node: Term) -> tuple[str, Term]:
    """The name and the value of "x = 5", "f(x) = 5" or "x in S"; without a name the expression, or the last side of "2 + 3 = 5"."""
    node = plain(node)
    if node.op != "relation" or node.text not in ("=", "==", "===", "∈"):
        return "", node
    left, right = node.args[0], node.args[-1]
    if right.op == "variable" != left.op and node.text == "=" and right.text not in CONSTANTS:
        left, right = right, left
    if left.op in ("variable", "apply") or (left.op in ("*", "brackets") and all(one.op in ("variable", "brackets") for one in left.args)):
        return (left.text.split("_")[0] if left.op == "variable" else str(left)), right
    return "", node if variables(node) else right

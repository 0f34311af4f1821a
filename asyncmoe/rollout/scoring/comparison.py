"""Compare the meanings of two expressions: functions at points, sets of real numbers where membership may change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

from asyncmoe.rollout.scoring.bounded import Number, TooLarge, Undefined, equal, integer, mp, need
from asyncmoe.rollout.scoring.expressions import NO_BASE, SETS, Term, negative
from asyncmoe.rollout.scoring.meaning import MOST, POINTS, At, defined, has_units, members, named, plain, value, variables, walk

_NEAR = mp.mpf(10) ** -30
"""Tolerance of a tie in rounding; also how far beside an edge a set is tested, as a fraction of the distance to the next edge."""


def same(gold: Term, given: Term, at: At | None = None) -> bool:
    """Return whether an answer means what the reference does.

    Both sides are treated alike, with two exceptions: a reference with two or more decimals equals an answer that rounds to it, unless the
    answer is a decimal number, too; and the reference's percent sign may be left out.

    Raises:
        TooLarge: the comparison would exceed the bounds.
    """
    at, gold, given = at or At(), plain(gold), plain(given)
    if gold.op == given.op == "relation" and gold.text == given.text and _same_relation(gold, given, at):
        return True
    (name, gold), (other, given) = named(gold), named(given)
    if name and other and name != other:
        return False
    if _is_set(gold) or _is_set(given):
        return _same_sets(gold, given, at)
    if "solution" in (gold.op, given.op) and gold.op != given.op:
        gold, given = (replace(one, op="brackets", text="()") if one.op in ("solution", "list") else one for one in (gold, given))
    ours, theirs = members(gold), members(given)
    if gold.text == given.text == "set" and len(ours) != len(theirs):
        return all(any(same(a, b, at) for b in theirs) for a in ours) and all(any(same(a, b, at) for a in ours) for b in theirs)
    if len(ours) != 1 or len(theirs) != 1 or ours[0].op == "list":
        return _same_lists(ours, theirs, at)
    gold, given = plain(ours[0]), plain(theirs[0])
    if {gold.op, given.op} & {"brackets", "solution"}:
        return gold.op == given.op and (len(gold.args) != 2 or gold.text == given.text) and _alike(gold, given, at)
    return _same_values(gold, given, at)


def _alike(gold: Term, given: Term, at: At) -> bool:
    return len(gold.args) == len(given.args) and all(same(a, b, at) for a, b in zip(gold.args, given.args, strict=True))


def _same_lists(ours: Sequence[Term], theirs: Sequence[Term], at: At) -> bool:
    """Compare lists without order."""
    left = list(theirs)
    for one in ours:
        found = next((item for item in left if same(one, item, at)), None)
        if found is None:
            return False
        left.remove(found)
    return not left


def _at_points(gold: Term, given: Term, at: At) -> Iterator[tuple[Number | None, Number | None]]:
    """Yield the values of two expressions, at all points if they have variables."""
    whole = any(one.op in ("!", "binom", "perm") for node in (gold, given) for one in walk(node))
    for number in (POINTS[len(POINTS) // 2 :] if whole else POINTS) if variables(gold, given) - {"i"} else POINTS[:1]:
        place = replace(at, number=number)
        yield defined(gold, place), defined(given, place)


def _same_relation(gold: Term, given: Term, at: At) -> bool:
    """Compare two equations or inequalities: equal if their sides' differences are multiples of each other; chains side by side."""
    if len(gold.text) > 1:
        return _alike(gold, given, at)
    ours, theirs = (Term("+", (one.args[0], negative(one.args[1]))) for one in (gold, given))
    ratios = [a / b for a, b in _at_points(ours, theirs, at) if a and b]
    return len(ratios) > 1 and all(equal(ratios[0], other) for other in ratios) and (gold.text in "=≠" or mp.re(ratios[0]) > 0)


def _same_values(gold: Term, given: Term, at: At) -> bool:
    """Compare numbers or functions. Units are ignored if only one side has them, except that degrees may be radians."""
    factors, others = ({one.text for one in walk(node) if one.op == "factor"} for node in (gold, given))
    one_sided = {"unit"} if has_units(gold) != has_units(given) else set()
    left_out = {"factor"} if factors == {"%"} and not others else set()
    return any(_same_at(gold, given, replace(at, ignored=ignored)) for ignored in {frozenset[str](), frozenset(one_sided | left_out)})


def _same_at(gold: Term, given: Term, at: At) -> bool:
    compared, rounds = 0, not variables(gold, given)
    for a, b in _at_points(gold, given, at):
        if (a is None) != (b is None) or not (a is None or equal(a, b) or (rounds and _rounds(a, gold, b, given))):
            return False
        compared += a is not None
    return compared > 0


def _rounds(a: Number, gold: Term, b: Number, given: Term) -> bool:
    """Return whether the reference is a decimal number to which the exact answer rounds."""
    decimals = [one.text for one in walk(gold) if "." in one.text]
    inexact = any("." in one.text or one.text == NO_BASE for one in walk(given))
    exact = not inexact and {one.op for one in walk(given)} - {"*", "number", "unit", "factor"}
    if gold.op not in ("number", "*") or len(decimals) != 1 or not exact or mp.im(b) != 0 or a * b <= 0:
        return False
    places = len(decimals[0].partition(".")[2])
    beyond = (b / a - 1) * mp.mpf(decimals[0]) * 10**places * 2
    return places > 1 and -1 - _NEAR <= beyond < 1 - _NEAR


def _is_set(node: Term) -> bool:
    own = node.op == "sets" or node.text in (*SETS, "where") or (node.op == "relation" and node.text.strip("=") != "")
    return own or (node.op == "list" and any(map(_is_set, node.args)))


def _same_sets(gold: Term, given: Term, at: At) -> bool:
    """Compare sets of real numbers at their edges, between and beyond them, and at integers if they matter."""
    if max(len(variables(one)) for one in (gold, given)) > 1 or (gold.op == given.op == "relation" and len(gold.args) == len(given.args)):
        return False
    edges = sorted({edge for one in (gold, given) for edge in _edges(one, at)} | {mp.zero})
    pieces = pairwise([mp.mpf(-1e20), edges[0] - 2, *edges, edges[-1] + 2, mp.mpf(1e20) + 0.5])
    points = [*edges, *(a + (b - a) * share for a, b in pieces for share in (_NEAR, 0.5, 1 - _NEAR))]
    if any(one.text in (r"\Z", r"\N") for node in (gold, given) for one in walk(node)):
        need(edges[-1] - edges[0] < MOST, TooLarge)
        points += map(mp.mpf, range(int(edges[0]) - 2, int(edges[-1]) + 3))
    with suppress(Undefined):
        return all(_contains(gold, point, at) == _contains(given, point, at) for point in points)
    return False


def _edges(node: Term, at: At) -> Iterator[Number]:
    """Yield where membership of a set may change: at the numbers in it and their square roots, with either sign."""
    for one in walk(node):
        edge = None if variables(one) else defined(one, at)
        if edge is not None and mp.isfinite(edge) and mp.im(edge) == 0:
            yield from (sign * size for size in (edge, mp.sqrt(abs(edge))) for sign in (1, -1))


def _contains(node: Term, t: Number, at: At) -> bool:
    """Return whether a set contains a number. Raises Undefined if the expression is not a set."""
    node = plain(named(node)[1])
    if node.text in SETS:
        return node.text != "∅" and (node.text == r"\R" or integer(t) is not None) and (node.text != r"\N" or t >= 1)
    if node.op == "list":
        return (any if node.text in ("or", "set") else all)(_contains(one, t, at) for one in node.args)
    if node.op == "sets":
        found, *others = (_contains(one, t, at) for one in node.args)
        for sign, also in zip(node.text, others, strict=True):
            found = found or also if sign == "∪" else found and also == (sign == "∩")
        return found
    need((node.op == "relation") == bool(variables(node)), Undefined)
    if node.op == "brackets" and len(node.args) == 2:
        signs = "<≤"[node.text[0] == "["] + "<≤"[node.text[1] == "]"]
        node = Term("relation", (node.args[0], Term("variable", text="t"), node.args[1]), signs)
    if node.op != "relation":
        return any(equal(t, value(one, at)) for one in members(node))
    values: list[Number] = [defined(one, replace(at, given=dict.fromkeys(variables(node), t))) for one in node.args]
    if any(one is None or mp.im(one) for one in values):
        return False
    orders = ["=≤≥" if equal(a, b) else "≠<≤" if a < b else "≠>≥" for a, b in pairwise(values)]
    return all(sign in order for sign, order in zip(node.text, orders, strict=True))

"""Whether two expressions mean the same: functions are compared at points, sets of real numbers where their members may change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from asyncmoe.rollout.scoring.bounded import Number, TooLarge, Undefined, equal, integer, mp, need
from asyncmoe.rollout.scoring.expressions import MINUS, SETS, Term, negative
from asyncmoe.rollout.scoring.meaning import MOST, RANGES, At, defined, distributed, members, named, plain, units_of, value, variables, walk

_GRID = sorted(mp.mpf(sign * step) / 4 for sign in (-1, 1) for step in [*range(81), *(2**power for power in range(7, 60))])
_TURNED = str.maketrans("<>≤≥", "><≥≤")


def same(gold: Term, given: Term, at: At | None = None) -> bool:
    """Return whether an answer means what the reference does.

    Both sides are treated alike, with two exceptions: a reference with two or more decimals equals what rounds to it, unless that is a
    decimal number too; and its percent sign may be left out.

    Raises:
        TooLarge: to find out takes more than the bounds allow.
    """
    at, gold, given = at or At(), plain(gold), plain(given)
    if gold.op == given.op == "relation" and _proportional(gold, given, at):
        return True
    (name, gold), (other, given) = named(gold), named(given)
    if name and other and name != other:
        return False
    if _is_set(gold) or _is_set(given):
        return _same_chain(gold, given, at) or _same_sets(gold, given, at)
    ours, theirs = members(gold), members(given)
    if len(ours) != 1 or len(theirs) != 1:
        return _same_lists(ours, theirs, at) or (
            len(ours) != len(theirs) and any(_same_comma(*pair, at) for pair in ((gold, given), (given, gold)))
        )
    gold, given = (plain(one) if one.op != "matrix" else _vector(one) for one in (gold, given))
    if {gold.op, given.op} & {"brackets", "matrix", "row", "ratio"}:
        ends = [one.text.replace("⟨⟩", "()") for one in (gold, given) if len(one.args) == 2]
        alike = gold.op == given.op and len(gold.args) == len(given.args) and len(set(ends)) < 2
        return alike and all(same(a, b, at) for a, b in zip(gold.args, given.args, strict=True))
    return _same_values(gold, given, at)


def _vector(node: Term) -> Term:
    """A matrix of one column as a tuple."""
    return Term("brackets", tuple(row.args[0] for row in node.args), "()") if {len(row.args) for row in node.args} == {1} else node


def _same_lists(ours: Sequence[Term], theirs: Sequence[Term], at: At) -> bool:
    """Compare lists without order, or "x = 1, y = 2" with a tuple of the values in the order of their names."""
    sides = [[named(one) for one in items] for items in (ours, theirs)]
    ordered = [len({name for name, _ in items} - {""}) == len(items) > 1 for items in sides]
    if any(ordered) and not all(ordered):
        tuples = [[one for _, one in sorted(items, key=lambda item: item[0])] for items in sides]
        a, b = (items[0] if len(items) == 1 else Term("brackets", tuple(items), "()") for items in tuples)
        return same(a, b, at)
    left = list(sides[1])
    for name, one in sides[0]:
        found = next((item for item in left if (not all(ordered) or item[0] == name) and same(one, item[1], at)), None)
        if found is None:
            return False
        left.remove(found)
    return not left


def _same_comma(numbers: Term, other: Term, at: At) -> bool:
    """Read 1,5 as 1.5."""
    if numbers.op != "list" or numbers.text != "," or [one.op for one in numbers.args] != ["number"] * 2 or "." in numbers.args[0].text:
        return False
    return same(Term("number", text=".".join(one.text for one in numbers.args)), other, at)


def _same_values(gold: Term, given: Term, at: At) -> bool:
    """Compare numbers or functions. A unit that only one side has does not count; but degrees may be radians."""
    nodes = [*walk(gold), *walk(given)]
    lenient = any(one.text in ("%", "$") for one in walk(gold)) and not any(one.op == "factor" for one in walk(given))
    names = variables(gold, given)
    places = [
        replace(at, units=with_units, factors=factors, base=base, real=bool(names) and "i" not in names)
        for with_units in {True, bool(units_of(gold)) == bool(units_of(given))}
        for factors in {True, not lenient}
        for base in ([mp.e, mp.mpf(10)] if any(one.op == "log" and len(one.args) == 1 for one in nodes) else [mp.e])
    ]
    return any(_same_at(gold, given, place, bool(names - {"i"})) for place in places)


def _same_at(gold: Term, given: Term, at: At, variable: bool) -> bool:
    compared = 0
    for number in range(2 * len(RANGES) if variable else 1):
        if number == len(RANGES) and compared:
            break
        a, b = (defined(one, replace(at, number=number)) for one in (gold, given))
        if (a is None) != (b is None) or not (a is None or equal(a, b) or (not variable and _rounds(a, gold, b, given))):
            return False
        compared += a is not None
    return compared > 0


def _rounds(a: Number, gold: Term, b: Number, given: Term) -> bool:
    whole, _, decimals = _mantissa(gold).partition(".")
    if len(decimals) < 2 or a == 0 or _mantissa(given) or mp.im(b) != 0:
        return False
    half = abs(a / mp.mpf(f"{whole}.{decimals}")) / mp.mpf(10) ** len(decimals) / 2
    return bool(a * b > 0 and (-half <= abs(b) - abs(a) < half or equal(abs(a) - abs(b), half)))


def _mantissa(node: Term) -> str:
    """The digits of a number that is written as a decimal, with a unit and a power of ten; else ""."""
    if node.op == "number":
        return node.text
    factors = [
        one for one in node.args if one != MINUS and one.op not in ("unit", "factor") and not (one.op == "^" and one.args[0].text == "10")
    ]
    return _mantissa(factors[0]) if node.op == "*" and len(factors) == 1 else ""


def _proportional(gold: Term, given: Term, at: At) -> bool:
    """Compare the differences of both sides of two equations or inequalities: one is a multiple of the other."""
    ours, theirs = (Term("+", (one.args[0], negative(one.args[1]))) for one in (gold, given))
    ratios = list[Number]()
    for number in range(len(RANGES)):
        a, b = (defined(one, replace(at, number=number, units=False)) for one in (ours, theirs))
        if a and b:
            ratios.append(a / b)
    if not ratios or not variables(gold, given) or not all(equal(ratios[0], other) for other in ratios):
        return False
    return len(gold.text) == 1 and gold.text == (given.text if mp.re(ratios[0]) > 0 or given.text == "=" else given.text.translate(_TURNED))


def _same_chain(gold: Term, given: Term, at: At) -> bool:
    """Compare chains such as a < b < c side by side."""
    if gold.op != "relation" or given.op != "relation" or len(gold.args) != len(given.args):
        return False
    turned = given.text[::-1].translate(_TURNED), given.args[::-1]
    return any(
        gold.text == text and all(map(lambda a, b: same(a, b, at), gold.args, args)) for text, args in ((given.text, given.args), turned)
    )


def _is_set(node: Term) -> bool:
    if node.op == "list":
        return any(map(_is_set, distributed(node)))
    return node.op in ("sets", "described") or node.text in SETS or (node.op == "relation" and not set(node.text) <= {"="})


def _same_sets(gold: Term, given: Term, at: At) -> bool:
    """Compare sets of real numbers at their edges, between and beyond them, and at integers if they matter."""
    names = variables(gold), variables(given)
    if max(map(len, names)) > 1 or (all(names) and names[0] != names[1] and gold.op == given.op == "relation"):
        return False
    edges = {edge for one in (gold, given) for edge in _edges(one, at)} | {mp.zero}
    ordered = [min(edges) - 1, *sorted(edges), max(edges) + 1]
    points = [*ordered, *((a + b) / 2 for a, b in pairwise(ordered)), mp.mpf(-(10**20)) - 0.5, mp.mpf(10**20) + 0.5]
    if any(one.text in (r"\Z", r"\N") for node in (gold, given) for one in walk(node)):
        need(ordered[-1] - ordered[0] < MOST, TooLarge)
        points += [mp.mpf(whole) for whole in range(int(ordered[0]) - 1, int(ordered[-1]) + 2)]
    try:
        return all(_contains(gold, point, at) == _contains(given, point, at) for point in points)
    except Undefined:
        return False


def _edges(node: Term, at: At) -> Iterator[Number]:
    """Where a set may change: at the numbers in it, and where two sides of a relation are equal."""
    for one in walk(node):
        found = None if variables(one) else defined(one, at)
        if found is not None and mp.isfinite(found) and mp.im(found) == 0:
            yield found
    for one in walk(node):
        if one.op != "relation" or "∈" in one.text:
            continue
        for sides in pairwise(one.args):
            yield from _crossings(Term("+", (sides[0], negative(sides[1]))), at)


def _crossings(difference: Term, at: At) -> Iterator[Number]:
    def height(t: Number) -> Number:
        found = defined(difference, replace(at, given=dict.fromkeys(variables(difference), t)))
        return mp.nan if found is None else found

    heights = [(t, height(t)) for t in _GRID]
    yield from (t for t, found in heights if found == 0)
    for (left, below), (right, above) in pairwise(heights):
        if mp.isfinite(below) and mp.isfinite(above) and below * above < 0:
            root = mp.findroot(height, (left, right), solver="anderson", verify=False, maxsteps=50)
            yield root if abs(root) > 1e-100 else mp.zero


def _contains(node: Term, t: Number, at: At) -> bool:
    """Return whether a set has a number. Raises Undefined if the expression is no set."""
    node = plain(node)
    if node.text in SETS:
        return node.text != "∅" and (node.text == r"\R" or integer(t) is not None) and (node.text != r"\N" or t >= 1)
    if node.op == "described":
        domain, condition = node.args
        need(domain.op == "variable" or domain.text == "∈", Undefined)
        return _contains(condition, t, at) and (domain.op == "variable" or _contains(domain, t, at))
    if node.op == "sets":
        found = _contains(node.args[0], t, at)
        for sign, other in zip(node.text, node.args[1:], strict=True):
            also = _contains(other, t, at)
            found = found or also if sign == "∪" else found and also == (sign == "∩")
        return found
    if node.text == "∈":
        return _contains(node.args[1], t, at)
    if node.op == "list":
        return (any if node.text in ("or", "set") else all)(_contains(one, t, at) for one in distributed(node))
    need(node.op == "relation" or not variables(node), Undefined)
    if node.op == "brackets" and len(node.args) == 2:
        signs = "<≤"[node.text[0] == "["] + "<≤"[node.text[1] == "]"]
        node = Term("relation", (node.args[0], Term("variable", text="t"), node.args[1]), signs)
    if node.op != "relation":
        return any(equal(t, value(one, at)) for one in members(node))
    need(variables(node), Undefined)
    values = [defined(one, replace(at, given=dict.fromkeys(variables(node), t))) for one in node.args]
    return None not in values and all(_holds(sign, a, b) for sign, (a, b) in zip(node.text, pairwise(values), strict=True))


def _holds(sign: str, a: Number, b: Number) -> bool:
    if equal(a, b):
        return sign in "=≤≥"
    return sign == "≠" if sign in "=≠" else bool(a < b) == (sign in "<≤")

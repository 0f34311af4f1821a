"""Expressions of mathematics, read from a text to its last character: a text of which something is not read is no expression."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from asyncmoe.rollout.scoring import units
from asyncmoe.rollout.scoring.bounded import TURNS, TooLarge, need

_TOKENS, _NESTED, _DIGITS = 2000, 40, 800
_ARGUMENTS = {"frac": 2, "binom": 2, "perm": 2, "root": 2, "sqrt": 1}
_GREEK = "pi alpha beta gamma delta epsilon varepsilon zeta eta theta kappa lambda mu nu xi rho sigma tau phi varphi chi psi omega ell"
_NAMES = {*_GREEK.split(), *_GREEK.title().split(), *TURNS, *_ARGUMENTS, "infty"}
SETS = ("∅", r"\R", r"\Z", r"\N")
FACTORS = {"%": -2, "hundred": 2, "thousand": 3, "million": 6, "billion": 9, "百": 2, "千": 3, "万": 4, "亿": 8}
"""With their powers of ten."""
_CLOSED_BY = {"{": "}", "(": ")]", "[": ")]", "⦃": "⦄", "⟨": "⟩", "⌊": "⌋", "⌈": "⌉", "|": "|", "⟦": "⟧"}
_LEVELS = {"list": {",", "and", "or"}, "relation": set("=<>≤≥≠∈"), "ratio": {":"}, "sets": set("∪∩∖")}
"""What separates the parts of an expression, the loosest first."""
_TURNED = str.maketrans(">≥", "<≤")
_SIGNS = ("+", "-", "±")
_OPEN = {*_SIGNS, *"*/^_&¦¶", *TURNS, *_CLOSED_BY}.union(*_LEVELS.values())
"""After these a factor begins."""
_TOKEN = re.compile(r"(\s*)(?:(\d+(?:\.\d*)?|\.\d+)|(\"[^\"]*\"|[A-Za-z]+|(?:(?![A-Za-z])[^\W\d_])+)|(\\[A-Za-z]+|[^\w\s\\]|_))")


class Unread(Exception):
    """A text that is no expression."""


@dataclass(frozen=True)
class Term:
    """A part of an expression.

    Attributes:
        op: a name in `asyncmoe.rollout.scoring.bounded.FUNCTIONS`, or "±"; "number", "variable", "unit" or "factor", with `text`; or
            "brackets" (also of a matrix, its rows and a ratio), "relation" (from small to large), "list" or "sets", with the signs in
            `text`; or "described" (a set by a property).
    """

    op: str
    args: tuple[Term, ...] = ()
    text: str = ""


Part = Term | str
MINUS = Term("number", text="-1")


def negative(node: Term) -> Term:
    return Term("*", (MINUS, node))


def read(text: str) -> Term:
    """Read a text as `asyncmoe.rollout.scoring.notation.tidy` returns it.

    Raises:
        Unread: it is no expression.
        TooLarge: it is too long, too nested, or has a number with too many digits.
    """
    stack: list[tuple[str, list[Part]]] = [("", [])]
    for token in _tokens(text):
        opening, parts = stack[-1]
        behind = bool(parts) and parts[-1] not in _OPEN
        if token in ")]}⦄⟩⌋⌉⟧" or (token == opening == "|" and behind):
            need(token in _CLOSED_BY.get(opening, ""), Unread)
            stack.pop()
            stack[-1][1].append(_group(opening, token, parts))
        elif token in "|:" and behind and opening == "⦃":
            parts.append("¦")
        elif token in _CLOSED_BY:
            stack.append((token, []))
        else:
            parts.append(token)
        need(len(stack) <= _NESTED, TooLarge)
    need(len(stack) == 1, Unread)
    return _flat(stack[0][1])


def _tokens(text: str) -> Iterator[str]:
    """Signs and names, numbers, letters, and units behind a quotation mark."""
    at, before, last = 0, "", ","
    for count, found in enumerate(_TOKEN.finditer(text)):
        need(found.start() == at, Unread)
        need(count < _TOKENS, TooLarge)
        at, (space, number, word, sign) = found.end(), found.groups()
        spaced = bool(space) and before != "^" and not re.match(r"\s*[\w+*-]", text[at : at + 9])
        for token in _word(word, spaced, text[at : at + 2], last) if word else [number or sign]:
            before, last = last, token[1:] if token[1:] in _NAMES else token
            yield last
        need(len(last) <= _DIGITS, TooLarge)
    need(not text[at:].strip(), Unread)


def _word(quoted: str, spaced: bool, follows: str, last: str) -> Iterator[str]:
    """The tokens of a word: a name, a unit, or letters.

    Args:
        spaced: it stands apart, as a unit of one letter does.
        follows: the two characters behind it.
        last: the token before it.
    """
    word, behind = quoted.strip('" '), last not in _OPEN
    single, text = len(word) == 1, word != quoted
    letters = single or (len(word) < 4 and not text and not re.match(r" \w", follows))
    alone = spaced or text or not single or not word.isascii() or last[0] in '"/'
    if word in _NAMES or word in ("and", "or") or (word in FACTORS and behind):
        yield word
    elif ((behind or last == "/") and alone and units.known(word) is not None) or (
        behind and text and single and word not in "ei" and follows[:1] != "_"
    ):
        yield f'"{word}'
    elif letters and word < "Ͽ":
        yield from word
    else:
        need(behind and word.isalpha() and not last.isalpha(), Unread)
        yield f'"{word}'


def _split(parts: list[Part], signs: set[str]) -> tuple[list[list[Part]], list[str]]:
    pieces, used = [list[Part]()], list[str]()
    for part in parts:
        if isinstance(part, str) and part in signs:
            used.append(part)
            pieces.append([])
        else:
            pieces[-1].append(part)
    return pieces, used


def _group(opening: str, closing: str, parts: list[Part]) -> Term:
    """Read what was between brackets."""
    if opening in "⦃{" and not parts:
        return Term("variable", text="∅")
    if opening == "⟦":
        rows = [Term("brackets", tuple(map(_flat, _split(row, {"&"})[0])), "row") for row in _split(parts, {"¶"})[0]]
        column = all(len(row.args) == 1 for row in rows)
        return Term("brackets", tuple(row.args[0] for row in rows), "()") if column else Term("brackets", tuple(rows), "matrix")
    found, *conditions = map(_flat, _split(parts, {"¦"})[0])
    if conditions:
        return Term("described", (found, *conditions))
    if opening in "|⌊⌈":
        return Term(opening, (found,))
    if opening == "{":
        return found
    members = found.args if found.op == "list" else (found,)
    return Term("list", members, "set") if opening == "⦃" else Term("brackets", members, (opening + closing).replace("⟨⟩", "()"))


def _flat(parts: list[Part]) -> Term:
    """Read what has no open brackets."""
    for op, signs in _LEVELS.items():
        pieces, used = _split(parts, signs)
        if used:
            args, text = tuple(map(_flat, pieces)), "or" if "or" in used else "".join(used)
            if set(text) <= {*">≥"}:
                args, text = args[::-1], text[::-1].translate(_TURNED)
            return Term("brackets", args, ":") if op == "ratio" else Term(op, args, text)
    terms, rest = list[Term](), [*parts]
    while rest or not terms:
        before = list[Part]()
        while rest and rest[0] in _SIGNS:
            before.append(rest.pop(0))
        term = _product(rest)
        term = negative(term) if before.count("-") % 2 else term
        terms.append(Term("±", (term,)) if "±" in before else term)
    return terms[0] if len(terms) == 1 else Term("+", tuple(terms))


def _product(rest: list[Part]) -> Term:
    """Take factors from the front, up to a sign between terms."""
    factors = list[Term]()
    while rest and (rest[0] not in _SIGNS or not factors):
        sign = rest.pop(0) if rest[0] in ("*", "/") and factors else ""
        last = factors[-1] if factors else MINUS
        need(last.op != "unit" or units.known(last.text) is not None or (rest and str(rest[0])[0] == '"'), Unread)
        if not sign and isinstance(rest[0], str) and re.match(r"\.?\d", rest[0]) and factors:
            if last.op in ("unit", "factor") and last.text.isalpha():  # 2 ft 6 in, 3 hundred 5
                return Term("+", (Term("*", tuple(factors)), _product(rest)))
            need(last.op != "number", Unread)
        factor = _operand(rest)
        factors.append(Term("^", (factor, MINUS)) if sign == "/" else factor)
    need(factors, Unread)
    return factors[0] if len(factors) == 1 else Term("*", tuple(factors))


def _operand(rest: list[Part]) -> Term:
    """Take a factor from the front."""
    part = rest.pop(0) if rest else ""
    if part in ("+", "-"):
        return negative(_operand(rest)) if part == "-" else _operand(rest)
    if part in TURNS:
        return _function(str(part), rest)
    if part in _ARGUMENTS:
        taken, rest[:] = rest[: _ARGUMENTS[part]], rest[_ARGUMENTS[part] :]
        node = Term(part, tuple(one for one in taken if isinstance(one, Term)))
        need(len(node.args) == _ARGUMENTS[part], Unread)
    else:
        node = part if isinstance(part, Term) else _atom(part, rest)
    while rest and rest[0] in ("^", "!"):
        node = Term("!", (node,)) if rest.pop(0) == "!" else Term("^", (node, _operand(rest)))
    return node


def _atom(part: str, rest: list[Part]) -> Term:
    if rest and rest[0] == "_":  # x_1, 101_2
        index, rest[:2] = _operand(rest[1:2]), []
        return Term("variable", text=f"{part}_{index}")
    if re.match(r"\.?\d", part):
        return Term("number", text=part)
    if part in FACTORS:
        return Term("factor", text=part)
    if part[:1] in ('"', "$", "€", "£", "¥"):
        return Term("unit", text=part.removeprefix('"'))
    need(part.isalpha() or part in SETS, Unread)
    return Term("variable", text=part)


def _function(name: str, rest: list[Part]) -> Term:
    """Take the argument of a function: one in brackets, else the factors up to the next function or sign."""
    marks = dict[Part, Term]()
    while rest and rest[0] in ("^", "_"):
        sign = rest.pop(0)
        marks[sign] = _operand(rest)
    taken = rest[:1]
    del rest[:1]
    while rest and rest[0] not in ("*", "/", *_SIGNS, *TURNS) and not (isinstance(taken[0], Term) and taken[0].op == "brackets"):
        taken.append(rest.pop(0))
    node = Term(name, (_product(taken), *([marks["_"]] if "_" in marks else [])))
    if rest and rest[0] == "^":
        rest.pop(0)
        marks["^"] = _operand(rest)
    return Term("^", (node, marks["^"])) if "^" in marks else node

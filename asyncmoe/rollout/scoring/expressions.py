"""Expressions of mathematics, read from a text to its last character: a text of which something is not read is no expression."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from asyncmoe.rollout.scoring import units
from asyncmoe.rollout.scoring.bounded import TURNS, TooLarge, need

_TOKENS, _NESTED, _DIGITS = 2000, 40, 800
_ARGUMENTS = {"frac": 2, "binom": 2, "sqrt": 1}
_GREEK = (
    "pi alpha beta gamma delta epsilon varepsilon zeta eta theta kappa lambda mu nu xi rho sigma tau phi varphi chi psi omega ell infty"
)
_NAMES = {*_GREEK.split(), *_GREEK.title().split(), *TURNS, *_ARGUMENTS}
SETS = ("∅", r"\R", r"\Z", r"\N")
FACTORS = {"%": -2, "hundred": 2, "thousand": 3, "million": 6, "billion": 9, "百": 2, "千": 3, "万": 4, "亿": 8}
"""With their powers of ten."""
_CLOSED_BY = {"{": "}", "(": ")]", "[": ")]", "⦃": "⦄", "⟨": "⟩", "⌊": "⌋", "⌈": "⌉", "|": "|", "⟦": "⟧"}
_LEVELS = {"list": {",", "and", "or"}, "relation": set("=<>≤≥≠∈"), "ratio": {":"}, "sets": set("∪∩∖")}
"""What separates the parts of an expression, the loosest first."""
_OPEN = {*"+-±*/^_&¦¶", *TURNS}.union(*_LEVELS.values())
"""After these a factor begins."""
_TOKEN = re.compile(r"(\s*)(?:(\d+(?:\.\d*)?|\.\d+)|(\"[^\"]*\"|[A-Za-z]+|(?:(?![A-Za-z])[^\W\d_])+)|(\\[A-Za-z]+|[^\w\s\\]|_))")


class Unread(Exception):
    """A text that is no expression."""


@dataclass(frozen=True)
class Term:
    """A part of an expression.

    Attributes:
        op: a name in `asyncmoe.rollout.scoring.bounded.FUNCTIONS`, or "±"; "number", "variable", "unit" or "factor", with `text`; or
            "brackets", "relation", "list" or "sets", with the signs in `text`; or "ratio", "matrix", "row", "described" (a set by a
            property), "apply" (a function without a definition).
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
    word, behind = quoted.strip('" '), last not in _OPEN and last not in _CLOSED_BY
    if word in _NAMES or word in ("and", "or") or (word in FACTORS and behind):
        yield word
    elif (
        (behind or last == "/")
        and units.known(word) is not None
        and (spaced or len(word) > 1 or word != quoted or last[0] in '"/' or word > "Ͽ")
    ):
        yield f'"{word}'
    elif len(word) == 1 and word != quoted and behind and word not in "ei" and follows[:1] != "_":
        yield quoted[:-1]
    elif word[:1] in FACTORS and behind:
        yield from (word[0], f'"{word[1:]}')
    elif (len(word) == 1 and word < "Ͽ") or (len(word) < 4 and word == quoted and word.isascii() and not re.match(r" \w", follows)):
        yield from word
    elif behind and word.isalpha() and not last.isalpha():
        yield f'"{word}'
    else:
        raise Unread


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
    if opening == "⟦":
        rows = _split(parts, {"¶"})[0]
        return Term("matrix", tuple(Term("row", tuple(_flat(cell) for cell in _split(row, {"&"})[0])) for row in rows))
    if opening in "⦃{" and not parts:
        return Term("variable", text="∅")
    found, *conditions = [_flat(piece) for piece in _split(parts, {"¦"})[0]]
    if conditions:
        return Term("described", (found, *conditions))
    if opening in "|⌊⌈":
        return Term(opening, (found,))
    members = found.args if found.op == "list" else (found,)
    if opening == "⦃":
        return Term("list", members, "set")
    return found if opening == "{" else Term("brackets", members, opening + closing)


def _flat(parts: list[Part]) -> Term:
    """Read what has no open brackets."""
    for op, signs in _LEVELS.items():
        pieces, used = _split(parts, signs)
        if used:
            return Term(op, tuple(map(_flat, pieces)), "or" if "or" in used else "".join(used))
    terms, sign, term = list[Term](), "+", list[Part]()
    for part in [*parts, "+"]:
        if isinstance(part, str) and part in "+-±" and (not term or term[-1] not in ("*", "/", "^")):
            if term:
                terms.append(_signed(sign, _product(term)))
                sign, term = part, []
            else:
                sign = "+" if sign == part == "-" else sign if part == "+" else part
        else:
            term.append(part)
    need(terms and sign == "+", Unread)
    return terms[0] if len(terms) == 1 else Term("+", tuple(terms))


def _signed(sign: str, term: Term) -> Term:
    return {"+": term, "-": negative(term), "±": Term("±", (term,))}[sign]


def _product(rest: list[Part]) -> Term:
    factors = list[Term]()
    while rest:
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
    if isinstance(part, Term):
        node = part
    elif part in ("+", "-"):
        return _signed(part, _operand(rest))
    elif part in TURNS:
        return _function(part, rest)
    elif part in _ARGUMENTS:
        index = [rest.pop(0)] if part == "sqrt" and rest and isinstance(rest[0], Term) and rest[0].text == "[]" else []
        taken = [one for one in [*rest[: _ARGUMENTS[part]], *index] if isinstance(one, Term)]
        need(len(taken) == _ARGUMENTS[part] + len(index), Unread)
        del rest[: _ARGUMENTS[part]]
        node = Term(part, tuple(taken))
    else:
        node = _atom(part, rest)
    while rest and rest[0] in ("^", "!"):
        node = Term("!", (node,)) if rest.pop(0) == "!" else Term("^", (node, _operand(rest)))
    return node


def _atom(part: str, rest: list[Part]) -> Term:
    index = None
    if rest and rest[0] == "_":
        index = _operand(rest[1:2])
        del rest[:2]
    if re.match(r"\.?\d", part):
        try:
            return Term("number", text=part.replace(".", "0.", part[0] == ".") if index is None else str(int(part, int(index.text))))
        except ValueError as error:
            raise Unread from error
    if part in ("C", "A", "P") and index and rest and rest[0] == "^" and (part == "C" or index.op == "number"):
        del rest[0]
        return Term("binom" if part == "C" else "perm", (index, _operand(rest)))
    if part in FACTORS:
        return Term("factor", text=part)
    if part[:1] in ('"', "$", "€", "£", "¥"):
        return Term("unit", text=part.removeprefix('"'))
    if part in ("f", "g", "h") and rest and isinstance(rest[0], Term) and rest[0].text == "()":
        return Term("apply", (rest.pop(0),), part)  # type: ignore[arg-type]
    need(part.isalpha() or part in SETS, Unread)
    return Term("variable", text=part if index is None else f"{part}_{index}")


def _function(name: str, rest: list[Part]) -> Term:
    """Take the argument of a function: one in brackets, else the factors up to the next function or sign."""
    marks = dict[str, Term]()
    while rest and rest[0] in ("^", "_"):
        marks[str(rest[0])] = _operand(rest[1:2]) if rest[1:2] != ["-"] else negative(_operand(rest[2:3]))
        del rest[: 2 if rest[1:2] != ["-"] else 3]
    taken = list[Part]()
    while (
        rest
        and rest[0] not in ("*", "/")
        and not (taken and (rest[0] in TURNS or (isinstance(taken[0], Term) and taken[0].op == "brackets")))
    ):
        taken.append(rest.pop(0))
    power = marks.get("^")
    inverse = power in (MINUS, negative(Term("number", text="1")))
    node = Term("arc" * inverse + name, (_product(taken), *([marks["_"]] if "_" in marks else [])))
    if power is None and rest and rest[0] == "^":
        del rest[0]
        power = _operand(rest)
    return Term("^", (node, power)) if power and not inverse else node

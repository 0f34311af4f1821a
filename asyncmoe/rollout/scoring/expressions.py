"""Parse mathematical expressions: a text is an expression only if it can be parsed to its last character."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from asyncmoe.rollout.scoring import units
from asyncmoe.rollout.scoring.bounded import TURNS, TooLarge, need
from asyncmoe.rollout.scoring.notation import PATTERNS

_TOKENS, _NESTED, _DIGITS = 2000, 40, 800
_ARGUMENTS = {"frac": 2, "binom": 2, "perm": 2, "root": 2, "sqrt": 1}
_GREEK = "pi alpha beta gamma delta epsilon varepsilon zeta eta theta kappa lambda mu nu xi rho sigma tau phi varphi chi psi omega ell"
_NAMES = {*_GREEK.split(), *_GREEK.title().split(), *TURNS, *_ARGUMENTS, "infty"}
NO_BASE = r"\log"
"""The base of logarithms that are written without a base: an unknown constant."""
SETS = ("∅", r"\R", r"\Z", r"\N")
_CLOSED_BY = {"{": "}", "(": ")]", "[": ")]", "⦃": "⦄", "⟨": "⟩", "⌊": "⌋", "⌈": "⌉", "|": "|", "⟦": "⟧"}
_PARTS = {"matrix": "¶", "row": "&", "described": "¦", "list": (",", "and", "or"), "relation": "=<>≤≥≠∈", ":": ":", "sets": "∪∩∖"}
"""Separators of the parts of an expression, loosest first."""
_LEVELS = [*_PARTS.items()]
_TURNED = str.maketrans(">≥", "<≤")
_SIGNS = ("+", "-", "±")
_BETWEEN = {*_SIGNS}.union(*_PARTS.values())
_OPEN = {*"*/^_", *_BETWEEN, *TURNS, *_CLOSED_BY} - {"|"}
"""Tokens after which a factor begins."""
_ENDS = {"", *_BETWEEN, *")]}⦄⟩⌋⌉⟧"}
"""Tokens before which a product ends."""


class Unread(Exception):
    """A text that is not an expression."""


@dataclass(frozen=True)
class Term:
    """A part of an expression.

    Attributes:
        op: a name in `asyncmoe.rollout.scoring.bounded.FUNCTIONS`, or "±"; "number", "variable", "unit" or "factor", with `text`; or
            "brackets" (also of a matrix, its rows and a ratio), "relation" (from small to large), "list" (also of the conditions of a set
            by a property) or "sets", with the signs in `text`.
    """

    op: str
    args: tuple[Term, ...] = ()
    text: str = ""


MINUS = Term("number", text="-1")


def negative(node: Term) -> Term:
    return Term("*", (MINUS, node))


def read(text: str) -> Term:
    """Read a text as `asyncmoe.rollout.scoring.notation.tidy` returns it.

    Raises:
        Unread: it is not an expression.
        TooLarge: it is too long, too nested, or has a number with too many digits.
    """
    reader = _Reader([*_tokens(text)])
    node = reader.level()
    need(reader.rest == [""], Unread)
    return node


def _tokens(text: str) -> Iterator[str]:
    """Yield signs, names, numbers, letters, and units prefixed with a quotation mark."""
    need(not PATTERNS["token"].sub("", text).strip(), Unread)
    last = ","
    for count, found in enumerate(PATTERNS["token"].finditer(text)):
        at, (space, number, word, sign) = found.end(), found.groups()
        need(count < _TOKENS and len(number or "") <= _DIGITS, TooLarge)
        spaced = bool(space) and not (
            PATTERNS["exponent"].search(text[: found.start()][-20:]) or re.match(r"\s*[\w+*-]", text[at : at + 9])
        )
        for token in _word(word, spaced, text[at : at + 2], last) if word else [number or sign]:
            last = token[1:] if token[1:] in _NAMES else token
            yield last


def _word(quoted: str, spaced: bool, follows: str, last: str) -> Iterator[str]:
    """Yield the tokens of a word: a name, a unit, or letters.

    Args:
        spaced: white space precedes it, as it does a unit of one letter.
        follows: the two characters after it.
        last: the token before it.
    """
    word, behind = quoted.strip('" '), last not in _OPEN
    single, text = len(word) == 1, word != quoted
    letters = single or (len(word) < 4 and not text and not re.match(r" \w", follows))
    alone = spaced or text or not single or not word.isascii() or last[0] in '"/'
    if word in _NAMES or word in ("and", "or") or (word in units.FACTORS and behind):
        yield word
    elif (behind or last == "/") and alone and units.known(word) is not None:
        yield f'"{word}'
    elif letters and word < "Ͽ":
        yield from word
    else:
        need(behind and word.isalpha() and not last.isalpha(), Unread)
        yield f'"{word}'


class _Reader:
    """Takes tokens from the front, one function for each kind of part."""

    def __init__(self, tokens: list[str]) -> None:
        self.rest = ["", *reversed(tokens)]
        self._open = [""]
        self._nested = 0

    def _take(self, *signs: str) -> str:
        """Consume and return the next token if it is one of these, else return ""."""
        return self.rest.pop() if self.rest[-1] in signs else ""

    def level(self, number: int = 0) -> Term:
        if number == len(_PARTS):
            return self._sum()
        op, signs = _LEVELS[number]
        args, used = [self.level(number + 1)], list[str]()
        while sign := self._take(*signs):
            used.append(sign)
            args.append(self.level(number + 1))
        if not used:
            return args[0]
        if set(used) <= {">", "≥"}:
            args, used = args[::-1], [sign.translate(_TURNED) for sign in reversed(used)]
        ordered = op in ("matrix", "row", ":")
        return Term("brackets" if ordered else op, tuple(args), op if ordered else "or" if "or" in used else "".join(used))

    def _sum(self) -> Term:
        terms = list[Term]()
        while not terms or self.rest[-1] in _SIGNS:
            sign, term = self._take(*_SIGNS), self._product()
            terms.append(Term("±", (term,)) if sign == "±" else negative(term) if sign == "-" else term)
        return terms[0] if len(terms) == 1 else Term("+", tuple(terms))

    def _product(self, ends: Sequence[str] = ()) -> Term:
        factors = [self._factor()]
        while not (self.rest[-1] in _ENDS or self.rest[-1] in ends or self.rest[-1] == self._open[-1] == "|"):
            sign = self._take("*", "/")
            need(sign or factors[-1].op != "number" or not re.match(r"\.?\d", self.rest[-1]), Unread)
            factor = self._factor()
            factors.append(Term("^", (factor, MINUS)) if sign == "/" else factor)
        return factors[0] if len(factors) == 1 else Term("*", tuple(factors))

    def _factor(self, alone: bool = False) -> Term:
        """Read a factor; with `alone`, without its factorial sign and exponent."""
        self._nested += 1
        need(self._nested <= _NESTED, TooLarge)
        part = self.rest.pop()
        need(part, Unread)
        if part in ("+", "-"):
            node = negative(self._factor()) if part == "-" else self._factor()
        elif part in _CLOSED_BY:
            node = self._group(part)
        elif part in TURNS:
            node = self._function(part)
        elif part in _ARGUMENTS:
            node = Term(part, tuple(self._factor(alone=True) for _ in range(_ARGUMENTS[part])))
        else:
            node = self._atom(part)
        if not alone:
            node = Term("!", (node,)) if self._take("!") else node
            node = Term("^", (node, self._factor())) if self._take("^") else node
        self._nested -= 1
        return node

    def _group(self, opening: str) -> Term:
        if opening in "⦃{" and self._take(_CLOSED_BY[opening]):
            return Term("variable", text="∅")
        self._open.append(opening)
        found = self.level()
        closing = self._take(*_CLOSED_BY[opening])
        need(closing, Unread)
        self._open.pop()
        if opening in "|⌊⌈":
            return Term(opening, (found,))
        if opening in "{⟦":
            return found
        if found.op == "described":
            conditions = tuple(one for one in found.args if one.op != "variable")
            return conditions[0] if len(conditions) == 1 and conditions[0].text != "=" else Term("list", conditions, "where")
        members = found.args if found.op == "list" and found.text != "set" else (found,)
        return Term("list", members, "set") if opening == "⦃" else Term("brackets", members, (opening + closing).replace("⟨⟩", "()"))

    def _function(self, name: str) -> Term:
        """Read a function: its argument is in brackets, else the factors up to the next function or sign."""
        index = [self._factor(alone=True)] if self._take("_") else [Term("variable", text=NO_BASE)] * (name == "log")
        power = [self._factor(alone=True)] if self._take("^") else []
        argument = self._factor(alone=True) if self.rest[-1] == "(" else self._product(("*", "/", *TURNS))
        node = Term(name, (argument, *index))
        return Term("^", (node, *power)) if power else node

    def _atom(self, part: str) -> Term:
        if self._take("_"):  # x_1, 101_2
            return Term("variable", text=f"{part}_{self._factor(alone=True)}")
        op = "number" if re.match(r"\.?\d", part) else "factor" if part in units.FACTORS else "unit" if part[0] in '"$€£¥' else "variable"
        need(op != "variable" or part.isalpha() or part in SETS, Unread)
        return Term(op, text=part.removeprefix('"'))

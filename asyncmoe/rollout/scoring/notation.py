"""Normalise the notation of answers by the rules of `words.txt`, then of `notation.txt`."""

from __future__ import annotations

import re
from importlib.resources import files

from asyncmoe.rollout.scoring.types import MARK
from asyncmoe.rollout.scoring.units import FACTORS, UNITS

_BRACES = 9
"""Maximum nesting of braces in the content of a box."""


def _rows(name: str) -> list[list[str]]:
    text = files(__package__).joinpath(name).read_text("utf-8")
    for kind, names in (("<UNIT>", UNITS), ("<FACTOR>", FACTORS), ("<MARK>", [MARK])):
        text = text.replace(kind, f"(?:{'|'.join(sorted(map(re.escape, names), key=len, reverse=True))})")
    for _ in range(_BRACES):
        text = text.replace("<BRACED>", r"(?:[^{}\\]|\\.|\{<BRACED>\})*+")
    return [line.split("\t") for line in text.splitlines() if line and not line.startswith("# ")]


PATTERNS = {name: re.compile(pattern) for name, pattern in _rows("patterns.txt")}
_WORDS, _RULES = ([(re.compile(pattern), sign) for pattern, sign in _rows(name)] for name in ("words.txt", "notation.txt"))
_NARROW = {code + 0xFEE0: chr(code) for code in range(ord("!"), ord("~") + 1)}
_REPEATED_DIGITS = 790
"""Digits to which a repeating decimal is expanded, so that it equals its value at the precision of comparisons."""


def plain(text: str) -> str:
    """Return an answer without the delimiters of LaTeX and Markdown, and without punctuation at its end."""
    text = PATTERNS["delimiter"].sub(" ", text.translate(_NARROW))
    if len(re.findall(r"(?<!\\)\$", text)) % 2 == 0:
        text = re.sub(r"(?<!\\)\$", " ", text)
    return re.sub(r"(?<![.,\sm\\])\s*[.,;:。?]$", "", text.strip())


def unwrapped(text: str, word: str = r"\g<0>") -> str:
    """Return a text without LaTeX's text commands; `word` replaces each word in their arguments."""
    for _ in range(3):
        text = PATTERNS["wrapped"].sub(lambda found: re.sub(r"(?<![\\A-Za-z\"])[^\W\d_]+", word, found[1]), text)
    return text.strip()


def bare(text: str) -> str:
    """Return a plain text without markup, the case of words, and spaces other than those between digits."""
    spaced = PATTERNS["space"].sub(" ", unwrapped(text)).replace("$", "").strip()
    joined = re.sub(r"(?<!\d) | (?!\d)", "", re.sub(r"\{(\w)\}(?!\w)", r"\1", spaced.removesuffix(".")))
    return PATTERNS["symbol"].sub(lambda found: found[1] or found[0].casefold(), joined)


def choices(text: str) -> str:
    """Return the letters of an answer to a multiple-choice question: B of "B", "(B)" and "B. 12 apples", "AC" of "C and A".

    Adjacent letters keep their order: "FACE" may be a word.
    """
    text = unwrapped(text).replace("\\ ", " ")
    if len(text) < 200 and PATTERNS["choices"].fullmatch(text):
        letters = re.sub(r"and|or|[^A-Ja-j]", "", text).upper()
        return letters if text.isalpha() else in_order(letters)
    found = PATTERNS["choice"].fullmatch(text)
    return found[1] or found[2] if found else ""


def in_order(letters: str) -> str:
    return "".join(sorted({*letters}))


def tidy(text: str) -> str:
    """Return a plain text in the notation that `asyncmoe.rollout.scoring.expressions` reads, with words in quotation marks."""
    for pattern, sign in _WORDS:
        text = pattern.sub(sign, text)
    text = unwrapped(text, r'"\g<0>"')
    for pattern, sign in _RULES:
        text = pattern.sub(sign, text)
    text = PATTERNS["repeating"].sub(_fraction, text)
    others = PATTERNS["thousands"].sub("", text)
    if re.search(r"[⦃(\[,]", others) or (re.search(r"\d", others) and " " in "".join(PATTERNS["thousands"].findall(text))):
        return text
    return PATTERNS["thousands"].sub(lambda found: re.sub("[, ]", "", found[0]), text)


def _fraction(repeating: re.Match[str]) -> str:
    """Return a repeating decimal, such as "0.1\\overline{6}", as a fraction."""
    whole, _, places = (repeating[1] + repeating[2] * _REPEATED_DIGITS)[:_REPEATED_DIGITS].partition(".")
    return rf"\frac{{{whole}{places}}}{{10^{{{len(places)}}}}}"

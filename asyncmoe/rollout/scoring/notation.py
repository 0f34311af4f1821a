"""How answers are written: one notation for texts that mean the same, by the rules of `notation.txt`."""

from __future__ import annotations

import re
from importlib.resources import files

_WRAPPED = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it|sf)|mbox|operatorname\*?|bold(?:symbol)?)\s*\{([^{}]*)\}")
_DELIMITERS = re.compile(r"(?<!\\)\\[()\[\]]|\$\$|\*\*|`|\"|<\|[^|<>]*\|>")
_NARROW = {code + 0xFEE0: chr(code) for code in range(ord("!"), ord("~") + 1)}
_WORDS, _RULES = (
    [(re.compile(pattern), sign) for pattern, _, sign in (line.partition("\t") for line in part.splitlines() if line[:2] != "# ")]
    for part in files(__package__).joinpath("notation.txt").read_text("utf-8").split("\n--\n")
)
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])|(?<![\d.,] )(?<![\d.,])\d{1,3}(?: \d{3})+(?! ?\d)")
_REPEATING = re.compile(r"(?<!\d)(\d*\.\d*)\\(?:overline|dot)\s*\{?\s*(\d+)\s*\}?")
_REPEATED_DIGITS = 790
"""Of a decimal fraction with a period, which is then equal to its value at the precision of comparisons."""
_LETTER = r"\(?([A-Ja-j])\)?"
_CHOICES = re.compile(rf"{_LETTER}(?:[\s,、&/]*(?:and|or|和|或)?[\s,]*{_LETTER}){{0,9}}")
_CHOICE = re.compile(r"(?:\(([A-J])\)|([A-J])(?=[).:,]))[).:,]?(?:\s.*)?", re.DOTALL)


def plain(text: str) -> str:
    """Return an answer without the delimiters of LaTeX and Markdown, and without a sign at its end."""
    text = _DELIMITERS.sub(" ", text.translate(_NARROW))
    if len(re.findall(r"(?<!\\)\$", text)) % 2 == 0:
        text = re.sub(r"(?<!\\)\$", " ", text)
    return re.sub(r"(?<![.,\sm\\])\s*[.,;:。]$", "", text.strip())


def unwrapped(text: str, around: str = "", drop: bool = False) -> str:
    """Return a text without the commands that set text in LaTeX, or also without such a text, or with a sign around each of its words."""
    words = rf"{around}\g<0>{around}"
    for _ in range(3):
        text = _WRAPPED.sub(
            lambda found: "" if drop else re.sub(r"(?<![\\A-Za-z\"])[^\W\d_]+", words, f" {found[1]} " if around else found[1]), text
        )
    return text.strip()


def bare(text: str) -> str:
    """Return a plain text without markup, case, and spaces other than those between digits."""
    spaced = re.sub(r"\s+|\\[,;:! ]|~|\\(?:left|right)(?![A-Za-z])", " ", unwrapped(text)).replace("$", "").strip()
    return re.sub(r"(?<!\d) | (?!\d)", "", re.sub(r"\{(\w)\}(?!\w)", r"\1", spaced.removesuffix("."))).casefold()


def choices(text: str) -> frozenset[str]:
    """Return the letters of an answer to a multiple-choice question: B of "B", "(B)" and "B. 12 apples", A and C of "A and C"."""
    text = unwrapped(text).replace("\\ ", " ")
    if len(text) < 200 and _CHOICES.fullmatch(text):
        return frozenset(re.sub(r"and|or|[^A-Ja-j]", "", text).upper())
    found = _CHOICE.fullmatch(text)
    return frozenset(found[1] or found[2]) if found else frozenset()


def tidy(text: str) -> str:
    """Return a plain text in the notation that `asyncmoe.rollout.scoring.expressions` reads, with words in quotation marks."""
    for pattern, sign in _WORDS:
        text = pattern.sub(sign, text)
    text = unwrapped(text, '"')
    for pattern, sign in _RULES:
        text = pattern.sub(sign, text)
    text = _REPEATING.sub(_fraction, text)
    others = _THOUSANDS.sub("", text)
    if re.search(r"[⦃(\[,]", others) or (re.search(r"\d", others) and " " in "".join(_THOUSANDS.findall(text))):
        return text
    return _THOUSANDS.sub(lambda found: re.sub("[, ]", "", found[0]), text)


def _fraction(repeating: re.Match[str]) -> str:
    """Return a decimal fraction with a period, such as "0.1\\overline{6}", as a fraction."""
    whole, _, places = (repeating[1] + repeating[2] * _REPEATED_DIGITS)[:_REPEATED_DIGITS].partition(".")
    return rf"\frac{{{whole}{places}}}{{10^{{{len(places)}}}}}"

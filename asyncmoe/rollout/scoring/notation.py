"""How answers are written: what math-verify misreads is put right, without changing any meaning.

Each rule stands for an answer that math-verify 0.9.0 reads wrongly: "1\\,234" as 235, "2 1/2" as 3/2, "1e5" as 5e, "45°" not at all,
"18 dollars" and "sin x" as products of variables, the i of "4i" as another than that of "4 i", the h of "\\pi r^2 h" as a unit, which it
drops.
"""

from __future__ import annotations

import re

_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")
_LATEX = re.compile(r"\\f?box(?:ed)?\s*\{|(?<!\\)\$[^$\n]*[^$\\\n]\$|(?<!\\)\$\$|\\\(|(?<!\\)\\\[")
"""The start of a LaTeX environment. A single dollar sign is a currency."""
_WRAPPED = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it)|mbox|operatorname)\s*\{([^{}]*)\}")
_FUNCTIONS = "sin|cos|tan|cot|sec|csc|log|ln|exp|infinity|inf"
_GREEK = "pi|alpha|beta|gamma|delta|epsilon|theta|lambda|mu|sigma|omega|phi|psi|rho|tau"
_NAMES = rf"(?:{_FUNCTIONS}|{_GREEK})"
_BARE_NAME = re.compile(rf"(?<![\\A-Za-z]){_NAMES}(?![A-Za-z])")
_WORD = r"[^\W\d_]"
_WORDS = re.compile(rf"(?=.*{_WORD}{{4}}){_WORD}[\w\s,.'’/-]*", re.DOTALL)
"""Words have a run of four letters; a shorter one may be a product of variables."""
_PROSE = re.compile(rf"(?i)\banswer\b|(?<![\\\w]){_WORD}{{3,}}\b.*?(?<![\\\w]){_WORD}{{3,}}\b", re.DOTALL)
_BEGINS_WITH_A_WORD = re.compile(rf"(?!(?:arc)?{_NAMES}\b|sqrt\b)(?:I|{_WORD}{{2,}})\s+[^=<>]*\d[^=<>]*")
"""Of a response only: "I think 5", "It is 5"."""
_BOLD = re.compile(r"(?<![\w)}])\*\*(?=\S)(.+?)(?<=\S)\*\*(?![\w({\\])")
_SIGNS = str.maketrans(
    {"°": r"^\circ", "−": "-", "\u00a0": " ", "\u202f": " ", "∞": r"\infty ", "²": "^2", "³": "^3", "⁄": "/"}
    | {"½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}"}
    | {chr(ord("０") + digit): str(digit) for digit in range(10)}
)
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|(\d+|[A-Za-z]))")
_CHOICE = re.compile(r"\(?([A-J])(?:[).:](?:\s.*)?)?", re.DOTALL)

_SEPARATOR = r"(?:\\[,;:! ]|\{,\}|,(?:\\!|\\,)?| )"
_THOUSANDS = re.compile(rf"(?<=\d){_SEPARATOR}(?=\d{{3}}(?!\d))")
_NUMBER = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+ +\d+/\d+|\d+/\d+|\d*\.?\d+(?:[eE][+-]?\d+)?|\d+\."
_SHORT_UNITS = (
    "cm|mm|km|dm|kg|mg|ml|ft|in|lb|lbs|oz|yd|mi|hr|hrs|min|mins|sec|secs|ms|mph|kph|kmh|sq|cu|am|pm|day|ton|men|way|bag|box|cup|egg|pen|car"
    "|cat|dog|pie|per|and|of|a|the|th|st|nd|rd"
)
_UNIT = rf"\s+(?!(?:{_NAMES}|sqrt)\b)(?:{_WORD}{{4,}}|(?:{_SHORT_UNITS})\b)"
_QUANTITY = re.compile(
    rf"(?P<sign>[-+]?)\s*(?:\\?[$€£¥₹])?\s*(?P<number>{_NUMBER})(?:\s*(?P<percent>\\?%|percent\b|pct\b))?(?:{_UNIT})*\.?"
)
_MIXED = re.compile(r"(?<![\d.])(\d+)\s*\\[dt]?frac\s*\{(\d+)\}\s*\{(\d+)\}(?=\s*\\?%)|(?<![\d.])(\d+) +(\d+)/(\d+)")
_REPEATING = re.compile(r"(?<!\d)(\d*)\.(\d*)\\overline\s*\{\s*(\d+)\s*\}")
_LAST_LETTER = re.compile(r"(.*[\d}\s])\s*([a-z])", re.DOTALL)


def in_box(text: str) -> bool:
    """Return whether a text contains `\\boxed{` or `\\fbox{`."""
    return _BOX.search(text) is not None


def in_latex(text: str) -> bool:
    """Return whether a text contains a LaTeX environment that math-verify knows."""
    return _LATEX.search(text) is not None


def is_prose(text: str) -> bool:
    """Return whether a text is a sentence: it has two words of three letters, the word "answer", or a word before a number.

    A quantity or a choice is none.
    """
    sentence = _PROSE.search(text) is not None or _BEGINS_WITH_A_WORD.fullmatch(text) is not None
    return sentence and not (_QUANTITY.fullmatch(tidy(text)) or choice(text))


def plain(text: str) -> str:
    """Return a text without Markdown's signs for bold."""
    return _BOLD.sub(r"\1", text)


def is_words(text: str) -> bool:
    """Return whether an answer consists of words, such as "\\text{no solution}", "June 20" or "Paris, France"."""
    bare_text = _unwrapped(text)
    return _WORDS.fullmatch(bare_text) is not None and _BARE_NAME.search(bare_text) is None


def choice(text: str) -> str:
    """Return the letter of an answer to a multiple-choice question, else "": B of "B", "(B)", "\\textbf{(B)}" and "B. 12 apples"."""
    found = _CHOICE.fullmatch(_unwrapped(text).replace("\\ ", " "))
    return found[1] if found else ""


def bare(text: str) -> str:
    """Return a text without markup, case, a final period, and spaces other than those between digits."""
    spaced = re.sub(r"\s+|\\[,;:! ]|~", " ", _unwrapped(text)).replace("$", "").strip()
    return re.sub(r"(?<!\d) | (?!\d)", "", spaced.removesuffix(".")).casefold()


def tidy(text: str) -> str:
    """Return an answer with LaTeX for signs, without separators of thousands that math-verify takes for something else."""
    text = _ROOT.sub(lambda root: rf"\sqrt{{{root[1] or root[2]}}}", text.strip().translate(_SIGNS))
    joined = _THOUSANDS.sub(",", text)
    return joined if _QUANTITY.fullmatch(joined) else _THOUSANDS.sub(_in_a_list, text)


def unambiguous(text: str) -> str:
    """Return a tidy answer in LaTeX: the number of a quantity alone, functions by their commands, a last variable in braces."""
    quantity = _QUANTITY.fullmatch(text)
    if quantity:
        return quantity["sign"] + _number(quantity["number"]) + (r"\%" if quantity["percent"] else "")
    text = _MIXED.sub(_improper, text)
    text = _REPEATING.sub(_periodic, text)
    # To the library, i is a complex number only where a word begins, and real elsewhere.
    text = re.sub(r"(?<=\d)i(?![A-Za-z])", " i", text)
    if not _WRAPPED.search(text):
        text = _BARE_NAME.sub(r"\\\g<0>", text).replace(r"\infinity", r"\infty")
    last = _LAST_LETTER.fullmatch(text)
    # With no other variable, the letter is a unit: "10 m".
    if last and re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", _WRAPPED.sub("", last[1]))):
        return f"{last[1]}{{{last[2]}}}"
    return text


def _number(text: str) -> str:
    """Return a number in LaTeX: "1,234" as 1234, "2 1/2" as \\frac{5}{2}, "1e5" as 1 \\times 10^{5}."""
    text = text.replace(",", "")
    if " " in text:
        return _MIXED.sub(_improper, text)
    mantissa, _, exponent = text.lower().partition("e")
    return rf"{mantissa} \times 10^{{{int(exponent)}}}" if exponent else mantissa


def _improper(mixed: re.Match[str]) -> str:
    whole, part, parts = (int(digits) for digits in mixed.groups() if digits)
    return rf"\frac{{{whole * parts + part}}}{{{parts}}}"


def _periodic(repeating: re.Match[str]) -> str:
    """Return a decimal fraction with a period, such as "0.1\\overline{6}", as a fraction."""
    whole, first, period = repeating.groups()
    below = int("0" + whole + first)
    return rf"\frac{{{int(whole + first + period) - below}}}{{{10 ** len(first) * (10 ** len(period) - 1)}}}"


def _in_a_list(separator: re.Match[str]) -> str:
    """Keep a separator that may stand between the members of a list, or between factors."""
    return separator[0] if separator[0] in (",", " ") else ""


def _unwrapped(text: str) -> str:
    return _WRAPPED.sub(r"\1", text).strip()

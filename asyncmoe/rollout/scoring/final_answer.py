"""Where the final answer of a response stands: the last of the marks that `docs/guides/reward.md` lists."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from asyncmoe.rollout.answer_mark import MARK
from asyncmoe.rollout.scoring import notation, units
from asyncmoe.rollout.scoring.expressions import FACTORS

ANSWER_CHARS = 8000
"""A longer text is not one answer."""
_THOUGHT = re.compile(r"</think(?:ing)?>|<\|end_of_thought\|>|◁/think▷")
_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")
_LATEX = re.compile(
    r"(?<!\\)\$\$[^$]{1,4000}\$\$|(?<!\\)\$(?=\s?[^\s$])[^$\n]{1,2000}(?<!\\)\$|\\\((?:(?!\\[()]).){1,2000}\\\)|(?<!\\)\\\[(?:(?!\\[\[\]]).){1,4000}\\\]",
    re.DOTALL,
)
_PHRASE = re.compile(
    r"(?i)(?:final answer\b|\banswer(?=[ *]*(?:is\b|are\b|[:：=]))|\b(?:option|choice)(?=[ *]*(?:is\b|[:：]))"
    r"|答案?(?=[ *】]*[是为：:]|】)|(?<!不)选(?=[：: ]*[A-J(]))"
    r"(?:[ *]*(?:is\b|are\b|be\b|[:：=是为选】\n]))*"
)
_MARKED = re.compile(
    rf"<answer>(?P<tag>(?:(?!</?answer>).)*)|{MARK}(?P<line>[^\n]*)|\*\*(?P<bold>[^*\n]{{1,300}})\*\*(?!\s*:)|`(?P<code>[^`\n]{{1,300}})`"
    r"|\b(?:[Oo]ption|[Cc]hoice)\s+\(?(?P<letter>[A-J])\)?(?![A-Za-z])",
    re.DOTALL,
)
_WORD = r"(?:(?![A-Za-z])[^\W\d_]|[A-Za-z]){1,12}(?:/[A-Za-z]{1,6})?[²³]?"
_NUMBER = re.compile(
    r"(?<![A-Za-z\d.,^_])(?:(?<![\d)])[-+−])?(?:\\?[$€£¥] ?)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?: \d+/\d+|/\d+|[eE][-+]?\d+)?"
    rf"(?: ?(\\?%|{_WORD}))?"
)
_JOINED = re.compile(r"[\s,;，、.]*(?:and|or|to|和|或|与|及|至|到|[,;，、-])[\s,]*")
_CLAUSE = re.compile(
    r"\s+\((?=[A-Za-z]{3})|,?\s+(?:because|since|as|so|which|where|when|is|are|for|but)\b|[.!?;](?=\s|$)|[。；！？]|，(?=[^\d（(\[-])"
)
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}+[^\\]*?(?<![\\A-Za-z])[A-Za-z]{3,}")
Span = tuple[int, int, str]
"""Where a text begins and ends, and what it says."""


def find(response: str, reference: bool = False) -> Sequence[str]:
    """Return the final answer of a response; behind it, if it is a sentence, shorter texts in it that may be meant.

    Args:
        reference: it is a reference, which is an answer, or a whole solution with marks.
    """
    *_, text = _THOUGHT.split(response)
    text = re.sub(r"[^\S\n]+", " ", text).strip()
    if "<think>" in text:
        return []
    spans = [(*found.span(), next(filter(None, found.groups()), "")) for found in _MARKED.finditer(text) if _is_mark(found, text)]
    marks: list[tuple[int, Sequence[str]]] = [(spans[-1][0], [_joined(text, spans)[2]])] if spans else []
    if _BOX.search(text):
        start, _, content = _last_box(text)
        marks.append((start, [content]))
    for phrase in list(_PHRASE.finditer(text))[-1:]:
        rest = text[phrase.end() : phrase.end() + ANSWER_CHARS].lstrip(" *\n")
        latex = _LATEX.match(rest)
        marks.append((phrase.start(), _sentence(rest if latex and "\n" in latex[0] else rest.partition("\n")[0], marked=True)))
    words = [[found[1] or found[2]] for found in re.finditer(r"\*\*([^*\n]{1,300})\*\*|`([^`\n]{1,300})`", text)]
    return max(marks)[1] if marks else words[-1] if words else _sentence(text, False, not reference)


def _is_mark(found: re.Match[str], text: str) -> bool:
    """The signs of GSM8K, bold and code are also those of Markdown for headings and stress."""
    content = found["line"] or found["bold"] or found["code"] or ""
    valued = (found["line"] is not None and not text[found.end() :].strip()) or re.search(r"^[^A-Za-z]*\d|\\|\$", content)
    own = found["tag"] is not None or found["letter"]
    return bool(own or (not _PROSE.search(content[:1000]) and (valued or notation.choices(content.strip()))))


def _sentence(text: str, marked: bool, with_numbers: bool = True) -> Sequence[str]:
    """Return a text, its first clause if it is marked, and its last expression in LaTeX, or in prose its last number with a unit."""
    if re.match(r"\W*(?:not\b|不)", text):
        return []
    whole = [text, *_CLAUSE.split(text, maxsplit=1)[:marked]] if len(text) <= ANSWER_CHARS else []
    spans = list(_latex(text))
    if not spans and with_numbers and re.search(r"[^\W\d_]{2}", text) and not re.search(r"\\[A-Za-z]", text):
        spans = list(map(_quantity, _NUMBER.finditer(text)))
    return [*whole, _joined(text, spans)[2]] if spans else whole


def _quantity(found: re.Match[str]) -> Span:
    unit = found[1] or ""
    name = re.sub(r"^[万亿千百平立]方?|[/²³].*", "", unit)
    number = found[0].removesuffix(unit)
    if name not in ("", "%", "\\%", *FACTORS) and units.known(name) is None:
        unit = ""
    return found.start(), found.start() + len(number + unit), f"{number} {unit}"


def _latex(text: str) -> Iterator[Span]:
    return (
        (found.start(), found.end(), found[0])
        for found in _LATEX.finditer(text)
        if not _PROSE.search(notation.unwrapped(found[0], "", drop=True))
    )


def _last_box(text: str) -> Span:
    spans: list[Span] = []
    for found in list(_BOX.finditer(text))[:-10:-1]:
        depth, end = 1, found.end()
        for brace in re.finditer(r"\\.|[{}]", text[end:]):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if depth == 0:
                spans.insert(0, (found.start(), end + brace.end(), text[end : end + brace.start()]))
                break
        if depth:
            break
    return _joined(text, spans) if spans else (len(text), len(text), "")


def _joined(text: str, spans: Sequence[Span]) -> Span:
    """Return the last span, with those before that only a comma or a word such as "and" separates from it."""
    start, end, content = spans[-1]
    for first, last, before in spans[-2:-20:-1]:
        between = re.sub(r"\\text\s*\{([^{}]*)\}|\\q?quad|\\[,;:! ()\[\]]|\$", r" \1 ", text[last:start][:80]) if last <= start else ""
        if not _JOINED.fullmatch(between):
            break
        start, content = first, f"{before} {between} {content}"
    return start, end, content

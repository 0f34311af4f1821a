"""Find the final answer of a response: at the last mark of the highest rank in it (`docs/guides/reward.md` ranks the marks)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from asyncmoe.rollout.scoring import notation
from asyncmoe.rollout.scoring.notation import PATTERNS

ANSWER_CHARS = 8000
"""Maximum length of an answer."""


def find(response: str, reference: bool = False) -> Sequence[str]:
    """Return the final answer of a response, followed, if it is a sentence, by shorter texts in it that may be meant.

    Args:
        reference: the text is a reference: an answer, or a whole solution with marks.
    """
    text = re.sub(r"[^\S\n]+", " ", PATTERNS["thought"].split(PATTERNS["unseen"].sub("", response))[-1]).strip()
    if PATTERNS["thinking"].search(text):
        return []
    explicit, weak = _marks(text, "box", "line", "tag", "phrase"), _marks(text, "letter", "bold", "code")
    sure, likely = ([found for found in marks if _is_sure(found, text)] for marks in (explicit, weak))
    if sure and sure[-1].re == PATTERNS["phrase"]:
        first = (line := sure[-1][1]).partition(". ")[0]
        return [*_sentence(first, marked=True), *(found[1] for found in _marks(first, "letter")[:1]), *_sentence(line, marked=True)]
    return [_joined(text, sure or likely)] if sure or likely else [found[1] for found in weak[-1:]] or _sentence(text, False, not reference)


def _marks(text: str, *names: str) -> list[re.Match[str]]:
    """Return the marks of these kinds in a text, except those that the text itself says are not the answer."""
    found = sorted((one for name in names for one in PATTERNS[name].finditer(text)), key=re.Match.start)
    return [one for one in found if not _beside("denied", text, one.start(), one.end(one.re.groups))]


def _beside(name: str, text: str, start: int, end: int) -> bool:
    """Return whether a pattern matches the surroundings of a part of a text, with "⋯" in place of that part."""
    return bool(PATTERNS[name].search(f"{text[max(0, start - 40) : start]}⋯{text[end : end + 40]}"))


def _is_sure(mark: re.Match[str], text: str) -> bool:
    """Return whether a mark is sure: in Markdown, GSM8K's sign, bold and code may be mere headings and emphasis."""
    content, sign = mark[1] or "", mark[0][0]
    if sign not in "*`#":
        return True
    valued = (sign == "#" and mark.end() == len(text)) or PATTERNS["valued"].search(content) or notation.choices(content.strip())
    return bool(valued and not PATTERNS["prose"].search(content[:1000]))


def _sentence(text: str, marked: bool, with_numbers: bool = True) -> Sequence[str]:
    """Return a text, its first clause if it is marked, and its last expression in LaTeX or bold, or in prose its last number."""
    clauses = PATTERNS["clause"].split(text, maxsplit=1)[:marked]
    whole = [text, *(one for one in clauses if not _beside("denied", text, 0, len(one)))] if len(text) <= ANSWER_CHARS else []
    latex = [one for one in _marks(text, "latex") if not PATTERNS["prose"].search(PATTERNS["wrapped"].sub("", one[0]))]
    parts = latex or [one for one in _marks(text, "bold") if _is_sure(one, text)]
    if not parts and with_numbers and re.search(r"[^\W\d_]{2}", text) and not re.search(r"\\[A-Za-z]", text):
        text = re.sub(r"(?<=\d)(?!e[-+\d])(?=[A-Za-z])", " ", text)  # a unit stands apart
        parts = _marks(text, "number")
    meant = parts and not _beside("changed", text, parts[-1].start(), parts[-1].end())
    return [*whole, _joined(text, parts)] if meant else whole


def _joined(text: str, parts: Sequence[re.Match[str]]) -> str:
    """Return the content of the last part, with earlier ones separated from it only by a comma or a word such as "and"."""
    last = parts[-1]
    content = last[last.re.groups] or ""
    for one in parts[-2:-20:-1]:
        between = PATTERNS["between"].sub(r" \1 ", text[one.end(one.re.groups) : last.start()][:80])
        if not PATTERNS["joined"].fullmatch(between):
            break
        last, content = one, f"{one[one.re.groups]} {between} {content}".replace(" - ", "-")
    return content

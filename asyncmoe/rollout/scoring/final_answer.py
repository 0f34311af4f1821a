"""Where the final answer of a response stands: the last of the marks that `docs/guides/reward.md` lists."""

from __future__ import annotations

import re
from collections.abc import Sequence

from asyncmoe.rollout.scoring import notation
from asyncmoe.rollout.scoring.notation import PATTERNS

ANSWER_CHARS = 8000
"""A longer text is not one answer."""
_MARKS = [PATTERNS[name] for name in ("box", "line", "tag", "letter", "bold", "code")]


def find(response: str, reference: bool = False) -> Sequence[str]:
    """Return the final answer of a response; behind it, if it is a sentence, shorter texts in it that may be meant.

    Args:
        reference: it is a reference, which is an answer, or a whole solution with marks.
    """
    text = re.sub(r"[^\S\n]+", " ", PATTERNS["thought"].split(response)[-1]).strip()
    if "<think>" in text:
        return []
    marks = sorted((found for pattern in _MARKS for found in pattern.finditer(text)), key=re.Match.start)
    sure = [found for found in marks if _is_sure(found, text)]
    *_, phrase = None, *PATTERNS["phrase"].finditer(text)
    if phrase and (not sure or phrase.start() > sure[-1].start()):
        rest = text[phrase.end() : phrase.end() + ANSWER_CHARS]
        latex = PATTERNS["latex"].match(rest)
        return _sentence(rest if latex and "\n" in latex[0] else rest.partition("\n")[0], marked=True)
    unsure = [found[1] for found in marks if found[0][0] != "#"]
    return [_joined(text, sure)] if sure else unsure[-1:] or _sentence(text, False, not reference)


def _is_sure(mark: re.Match[str], text: str) -> bool:
    """The signs of GSM8K, bold and code are also those of Markdown for headings and stress."""
    content, sign = mark[1] or "", mark[0][0]
    valued = re.search(r"^[^A-Za-z]*\d|\\|\$", content) or (sign == "#" and not text[mark.end() :].strip())
    return sign not in "*`#" or bool((valued or notation.choices(content.strip())) and not PATTERNS["prose"].search(content[:1000]))


def _sentence(text: str, marked: bool, with_numbers: bool = True) -> Sequence[str]:
    """Return a text, its first clause if it is marked, and its last expression in LaTeX, or in prose its last number with a unit."""
    whole = [text, *PATTERNS["clause"].split(text, maxsplit=1)[:marked]] if len(text) <= ANSWER_CHARS else []
    parts = [found for found in PATTERNS["latex"].finditer(text) if not PATTERNS["prose"].search(PATTERNS["wrapped"].sub("", found[0]))]
    if not parts and with_numbers and re.search(r"[^\W\d_]{2}", text) and not re.search(r"\\[A-Za-z]", text):
        text = re.sub(r"(?<=\d)(?!e[-+\d])(?=[A-Za-z])", " ", text)  # a unit stands apart
        parts = [*PATTERNS["number"].finditer(text)]
    if parts and PATTERNS["changed"].search(f"{text[: parts[-1].start()][-40:]}⋯{text[parts[-1].end() :][:40]}"):
        return [text]
    return [*whole, _joined(text, parts)] if parts else whole


def _joined(text: str, parts: Sequence[re.Match[str]]) -> str:
    """Return the content of the last part, with those before that only a comma or a word such as "and" separates from it."""
    last = parts[-1]
    content = last[last.re.groups] or ""
    for one in parts[-2:-20:-1]:
        between = PATTERNS["between"].sub(r" \1 ", text[one.end(one.re.groups) : last.start()][:80])
        if not PATTERNS["joined"].fullmatch(between):
            break
        last, content = one, f"{one[one.re.groups]} {between} {content}".replace(" - ", "-")
    return content

"""Mathematical equality by the math-verify library. Runs in its own process, because parsing model output may never return.

Reference and answer are read alike. math-verify finds LaTeX only inside an environment (its README, "Why is the latex extraction not
working?"), and a reference such as `(3, 4)` has none, so a text that is one answer is put into one: `\\boxed{(3, 4)}`. What the library
would misread is put right before (`asyncmoe.rollout.scoring.notation`). Then its `parse` and `verify` decide; words and letters of choices
are compared as texts, because as expressions they are products of variables.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from functools import lru_cache

from latex2sympy2_extended.math_normalization import extract_boxed_content
from math_verify import ExprExtractionConfig, LatexExtractionConfig, StringExtractionConfig, parse, verify
from sympy import Basic, MatrixBase

from asyncmoe.rollout.answer_mark import MARK
from asyncmoe.rollout.scoring import notation

# The library warns that its time limits are off. They are signals of the main thread; the caller enforces a limit.
for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).setLevel(logging.ERROR)

_TARGETS = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
"""As the README recommends for answers of models: a box precedes everything else."""
_CHOICES = [StringExtractionConfig(strings=tuple("ABCDEFGHIJ"), try_extract_without_anchor=False)]
_ANSWER_CHARS = 1000
"""A longer text is not one answer."""


@dataclass(frozen=True)
class ParsedAnswer:
    """What a text means as an answer.

    Attributes:
        found: what math-verify's `parse` returns: expressions and texts, each of which counts; empty if it finds nothing.
        text: the text without markup, spaces and case; "" if it has no content.
        choice: the letter of a multiple choice, or "".
        words: the text consists of words.
    """

    found: tuple[object, ...] = ()
    text: str = ""
    choice: str = ""
    words: bool = False

    @property
    def comparable(self) -> bool:
        """False if only the same text equals it, though it is neither words nor a choice."""
        return self.words or bool(self.choice) or any(isinstance(one, Basic | MatrixBase) for one in self.found)


def score(prompt: str, response: str, answer: str) -> float:
    """Return 1 if the final answer of the response equals the reference, else 0.

    The final answer is the text after the last "####", else the last box, else the last expression in a LaTeX environment, else the whole
    response if it is a single answer, else the last number. As the library documents, what it cannot compare is not equal.

    Raises:
        ValueError: the reference has no content.
    """
    gold = _gold(answer)
    given = _final(response)
    if gold.choice:
        return float((given.choice or _chosen(response)) == gold.choice)
    if gold.text == given.text:
        return 1.0
    # Unlike the library's own limits, which turn a slow comparison into False, the caller's limit rejects the sample.
    return float(not gold.words and bool(verify(list(gold.found), list(given.found), timeout_seconds=None)))


def self_score(prompt: str, response: str, answer: str) -> float:
    """Score a reference against itself, in a box: 1, or 0; 0.5 if only the same text would equal it, in no other notation.

    Raises:
        ValueError: as `score`.
    """
    return score(prompt, rf"\boxed{{{answer}}}", answer) * (1.0 if _gold(answer).comparable else 0.5)


@lru_cache(maxsize=4096)
def _gold(answer: str) -> ParsedAnswer:
    found = _read(answer, prose=False)
    if not found.text:
        raise ValueError(f"the reference {answer[:100]!r} has no content to compare")
    return found


def _final(response: str) -> ParsedAnswer:
    _, marked, rest = notation.plain(response).rpartition(MARK)
    first = rest.strip().partition("\n")[0]
    # The mark is also that of a heading in Markdown.
    heading = notation.in_latex(rest) or notation.is_prose(first) or not re.search(r"[\d\\]", first)
    return _read(first if marked and not heading else rest, prose=True)


def _read(text: str, prose: bool) -> ParsedAnswer:
    """Read a text that is an answer or ends in one. `prose`: a sentence holds an answer, rather than being one."""
    text = text.strip()
    if notation.in_box(text):
        return _read_answer(extract_boxed_content(text, "last"))
    sentence = "\n" in text or len(text) > _ANSWER_CHARS or (prose and notation.is_prose(text))
    if sentence or notation.in_latex(text):
        return ParsedAnswer(_parse(text), notation.bare(text), words=False)
    return _read_answer(text)


def _read_answer(text: str) -> ParsedAnswer:
    """Read a text that is one answer, without an environment."""
    text = notation.tidy(text)
    bare = notation.bare(text)
    choice, words = notation.choice(text), notation.is_words(text)
    found = () if choice or words or not text else _parse(rf"\boxed{{{notation.unambiguous(text)}}}")
    return ParsedAnswer(found, bare, choice, words)


def _parse(text: str) -> tuple[object, ...]:
    return tuple(parse(text, _TARGETS, parsing_timeout=None))


def _chosen(response: str) -> str:
    """Return the letter in a sentence such as "the answer is (B)", or ""."""
    found = parse(re.sub(r"\(([A-J])\)", r" \1 ", response.rpartition(MARK)[2]), _CHOICES, parsing_timeout=None)
    return str(found[-1]).upper() if found else ""

"""Mathematical equality of answers: a reference and the final answer of a response are parsed and compared by value.

A text is parsed to its last character, or compared as text; all work is bounded in advance. A response that exceeds the bounds is wrong,
and a reference that does is refused, so that no answer delays its group.
"""

from __future__ import annotations

import re
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

from asyncmoe.rollout.scoring import comparison, final_answer, notation
from asyncmoe.rollout.scoring.bounded import TooLarge, need
from asyncmoe.rollout.scoring.expressions import Term, Unread, read


class ReadAnswer(NamedTuple):
    """The meaning of a text: the text without markup and case, the letters of choices, and its expression, if it is one."""

    text: str
    choices: str
    node: Term | None


def score(prompt: str, response: str, answer: str) -> float:
    """Return 1 if the final answer of the response equals the reference, else 0.

    Raises:
        ValueError: as `reference`.
    """
    gold = reference(answer)
    with suppress(TooLarge):
        for given in map(_read, final_answer.find(response)):
            if gold.choices and given.choices:
                both = gold.choices, given.choices
                return float(both[0] == both[1] or (sorted(both[0]) == sorted(both[1]) and notation.in_order(both[0]) in both))
            if not gold.choices and (given.text == gold.text or given.node):
                return float(given.text == gold.text or _same(gold, given))
    return 0.0


@lru_cache(maxsize=4096)
def reference(answer: str) -> ReadAnswer:
    """Return the meaning of a reference.

    Raises:
        ValueError: it has no content, or exceeds the bounds: no answer can equal it.
    """
    try:
        found = [_read(text) for text in final_answer.find(answer, reference=True)] or [_read("")]
        gold = next((one for one in found if one.node or one.choices), found[0])
        _same(gold, gold)
    except TooLarge as error:
        raise ValueError(f"the reference {answer[:100]!r} is too long, too nested or too large to be evaluated") from error
    if not gold.text:
        raise ValueError(f"the reference {answer[:100]!r} has no content to compare")
    return gold if re.search("[A-J]", answer) else gold._replace(choices="")


def _same(gold: ReadAnswer, given: ReadAnswer) -> bool:
    if all(notation.PATTERNS["letters"].fullmatch(one.text) for one in (gold, given)):
        return gold.text == given.text
    return gold.node is not None and given.node is not None and comparison.same(gold.node, given.node)


def _read(text: str) -> ReadAnswer:
    need(len(text) <= final_answer.ANSWER_CHARS, TooLarge)
    text = notation.plain(text)
    node = None
    with suppress(Unread):
        need(not notation.PATTERNS["changing"].search(tidied := notation.tidy(text)), Unread)
        node = Term("variable", text=text) if notation.PATTERNS["apart"].fullmatch(text) else read(tidied)
    return ReadAnswer(notation.bare(text), notation.choices(text), node)

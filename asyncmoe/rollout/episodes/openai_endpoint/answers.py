"""What the policy says as clients get it: text without tool calls and stop texts, whole or while it is sampled."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from asyncmoe.rollout.episodes.openai_endpoint.request import AnswerCall
from asyncmoe.rollout.episodes.tools.calls import OPEN, Call, find


def split(text: str, calls: bool) -> tuple[str, tuple[AnswerCall, ...]]:
    """Return a response's text and its "hermes" tool calls, which are taken out of the text if `calls` is true."""
    found = [call for call in find(text, "hermes") if isinstance(call, Call) and call.name is not None] if calls else []
    if not found:
        return text, ()
    starts, ends = [call.start for call in found], [call.end for call in found]
    rest = "".join(text[a:b] for a, b in zip([0, *ends], [*starts, len(text)], strict=True)).rstrip()
    return rest, tuple(AnswerCall(f"call_{secrets.token_hex(12)}", str(call.name), call.arguments) for call in found)


def before(text: str, stop: str | None) -> str:
    """Return the text before a stop text."""
    return text if stop is None else text.partition(stop)[0]


class Speech:
    """Passes a response's text on while it is sampled, but nothing that may turn out to be part of a tool call or a stop text.

    Attributes:
        said: the text passed on so far: a beginning of what `split` and `before` return.
    """

    def __init__(self, told: Callable[[str], None], calls: bool, stops: Sequence[str]) -> None:
        self.said = ""
        self._told, self._calls = told, calls
        self._ends = (*stops, OPEN) if calls else tuple(stops)
        self._held = ""
        self._over = False

    def hear(self, piece: str) -> None:
        """Take the next piece of text."""
        if self._over:
            return
        self._held += piece
        ends = [at for end in self._ends if (at := self._held.find(end)) >= 0]
        self._over = bool(ends)
        sure = min(ends) if ends else min((_without_start(self._held, end) for end in self._ends), default=len(self._held))
        if self._calls:
            # White space before a call is taken out with it.
            sure = len(self._held[:sure].rstrip())
        self.say(self._held[:sure])
        self._held = self._held[sure:]

    def say(self, text: str) -> None:
        """Pass text on."""
        if text:
            self.said += text
            self._told(text)


def _without_start(text: str, end: str) -> int:
    """Return the length of `text` without its longest ending that begins `end`."""
    return next((len(text) - n for n in range(min(len(end) - 1, len(text)), 0, -1) if text.endswith(end[:n])), len(text))

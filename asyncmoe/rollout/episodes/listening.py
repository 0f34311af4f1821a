"""Stop texts: they end a response while it is sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncmoe.rollout.tokenizer import Tokenizer

MAX_STOPS, MAX_STOP_CHARACTERS = 32, 1000
_EVERY = 4
"""Tokens between two searches for a stop text: a quarter of the cost of searching after each; at most this many are sampled in vain."""
_WINDOW = 64
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Listening:
    """Follows a response: a `Listener`.

    Args:
        stops: stop texts; the first to appear ends the response. The token that completes it is the response's last.
        ends: called with the response up to the end of a stop text; returns whether the response ends there. None: always.

    Attributes:
        stopped_by: the text that ended the response, or None.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], ends: Callable[[str], bool] | None = None) -> None:
        self.every = _EVERY
        self.kept: int | None = None
        self.live = True
        self.stopped_by: str | None = None
        self._tokenizer, self._stops, self._asked = tokenizer, tuple(stops), ends
        self._longest = max(map(len, self._stops))
        self.forget()

    def hear(self, tokens: Sequence[int]) -> bool:
        """See `Listener`."""
        for token in tokens:  # a stop text can end inside any of them
            self._tokens.append(token)
            if (piece := self._piece()) and self._ends(piece):
                self.kept = len(self._tokens)
                return True
        return False

    def forget(self) -> None:
        """See `Listener`."""
        self._tokens: list[int] = []
        self._begin = self._read = 0
        self._tail = ""
        self._said: list[str] = []

    def _piece(self) -> str:
        """Return the text that the last tokens add. A character whose bytes are not complete waits for the next token.

        Some tokenizers decode a token differently after other tokens, so the text is decoded from a few tokens back.
        """
        before = self._tokenizer.decode(self._tokens[self._begin : self._read])
        text = self._tokenizer.decode(self._tokens[self._begin :])
        if text.endswith(_INCOMPLETE) and len(self._tokens) - self._read < _WINDOW:
            return ""
        self._begin, self._read = self._read, len(self._tokens)
        return text[len(before) :]

    def _ends(self, piece: str) -> bool:
        text = self._tail + piece
        self._tail = text[-(self._longest - 1) :] if self._longest > 1 else ""
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        self._said.append(piece)
        if self._asked is not None:
            found = [(at, stop) for at, stop in found if self._asked("".join(self._said)[: at + len(stop) - len(text) or None])]
        if found:
            self.stopped_by = min(found)[1]
        return bool(found)


def wrong_stop(stop: object, vocabulary: int) -> str | None:
    """Return what is wrong with the stops of a response, or None; valid stops are token ids and texts."""
    if not isinstance(stop, list | tuple) or len(stop) > MAX_STOPS:
        return f"{stop!r:.100}, expected at most {MAX_STOPS} token ids and texts"
    for one in stop:
        if not (0 < len(one) <= MAX_STOP_CHARACTERS if isinstance(one, str) else type(one) is int and 0 <= one < vocabulary):
            return f"{one!r:.100}, expected a token id below {vocabulary} or a text of 1 to {MAX_STOP_CHARACTERS} characters"
    return None

"""The text of single tokens, so that a reader needs no tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import islice
from typing import Protocol

BROKEN = "\ufffd"
"""What decoders write for bytes that are no whole character."""
_LONGEST = 4
"""Tokens over which a character can be spread: one for each of its bytes in UTF-8."""
_AT_ONCE = 64
"""Decodings between which the event loop may do other things."""

_REMEMBERED = 1 << 16
"""Cached texts of several tokens."""


class Decoder(Protocol):
    """The part of a tokenizer used here."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text."""
        ...

    def decode_all(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        ...


class Pieces:
    """Splits the text of tokens by token. Texts are cached: a token is decoded once in a run."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        # Some decoders drop white space at the beginning, so each token is decoded after another one.
        self._before = decoder.encode("a")[-1:]
        self._skip = decoder.decode_all(self._before)
        self._known: dict[tuple[int, ...], str] = {}
        self._single: dict[int, str] = {}

    async def of(self, tokens: Sequence[int]) -> list[str]:
        """Return a piece for each token; together they are the text.

        A character that is spread over several tokens belongs to its last token. Yields to the event loop between decodings, which are not
        made in a thread, because tokenizers are not safe to use in two threads at once.
        """
        new = iter({token for token in tokens if token not in self._single})
        while batch := list(islice(new, _AT_ONCE)):
            self._single |= {token: self._decode((token,)) for token in batch}
            await asyncio.sleep(0)
        found = [self._single[token] for token in tokens]
        if BROKEN in "".join(found):
            await self._mend(tokens, found)
        return found

    async def _mend(self, tokens: Sequence[int], found: list[str]) -> None:
        at, done = 0, 0
        while at < len(found):
            if BROKEN not in found[at]:
                at += 1
                continue
            at = self._mend_at(tokens, found, at)
            done += 1
            if done % _AT_ONCE == 0:
                await asyncio.sleep(0)

    def _mend_at(self, tokens: Sequence[int], found: list[str], at: int) -> int:
        """Join the tokens of the character that begins at `at`, if they make one; return the next token."""
        for end in range(at + 2, min(at + _LONGEST, len(tokens)) + 1):
            part = tuple(tokens[at:end])
            if part not in self._known:
                if len(self._known) >= _REMEMBERED:
                    self._known.clear()
                self._known[part] = self._decode(part)
            if BROKEN not in self._known[part]:
                found[at:end] = [""] * (end - at - 1) + [self._known[part]]
                return end
        return at + 1

    def _decode(self, tokens: tuple[int, ...]) -> str:
        text = self._decoder.decode_all((*self._before, *tokens))
        return text[len(self._skip) :] if text.startswith(self._skip) else self._decoder.decode_all(tokens)

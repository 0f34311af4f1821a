"""The text of each token, so that a reader needs no tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache

from asyncmoe.rollout.tokenizer import Tokenizer

BROKEN = "\ufffd"
"""What decoders write for bytes of an incomplete character."""
_LONGEST = 4
"""Most tokens of one character: one for each of its bytes in UTF-8."""
_AT_ONCE = 64
"""Number of decodings between yields to the event loop."""

_REMEMBERED = 1 << 18
"""Cached texts, of single tokens and of several."""


class Pieces:
    """Splits the text of tokens by token. Texts are cached: a token is decoded once in a run."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Some decoders drop white space at the beginning, so each token is decoded after another one.
        self._before = tokenizer.encode("a")[-1:]
        self._skip = tokenizer.decode_all(self._before)
        self._text = lru_cache(_REMEMBERED)(self._decode)

    async def of(self, tokens: Sequence[int]) -> list[str]:
        """Return a piece for each token; together they are the text.

        A character that is spread over several tokens belongs to its last token. Yields to the event loop between decodings; they do not
        run in a thread, because tokenizers are not thread-safe.
        """
        found: list[str] = []
        while len(found) < len(tokens):
            found += self._next(tokens, len(found))
            if len(found) % _AT_ONCE == 0:
                await asyncio.sleep(0)
        return found

    def _next(self, tokens: Sequence[int], at: int) -> list[str]:
        """Return the pieces of the character that begins at token `at`, or of that token alone."""
        alone = self._text((tokens[at],))
        for end in range(at + 2, min(at + _LONGEST, len(tokens)) + 1) if BROKEN in alone else ():
            if BROKEN not in (text := self._text(tuple(tokens[at:end]))):
                return [""] * (end - at - 1) + [text]
        return [alone]

    def _decode(self, tokens: tuple[int, ...]) -> str:
        text = self._tokenizer.decode_all((*self._before, *tokens))
        return text[len(self._skip) :] if text.startswith(self._skip) else self._tokenizer.decode_all(tokens)

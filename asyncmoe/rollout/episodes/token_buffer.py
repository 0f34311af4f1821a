"""Token ids of a conversation that grows, as one array: what a turn adds costs the same however long the conversation is."""

from __future__ import annotations

import numpy as np

from asyncmoe.engines.types import Tokens

_LEAST, _GROWTH = 256, 1.25


class TokenBuffer:
    """int32 token ids, appended to in amortised constant time each."""

    def __init__(self, tokens: Tokens = ()) -> None:
        self._data, self._size = np.array(tokens, np.int32), len(tokens)

    def __len__(self) -> int:
        return self._size

    def extend(self, tokens: Tokens) -> None:
        """Append tokens. Raises OverflowError for one of more than 32 bits."""
        end = self._size + len(tokens)
        if end > len(self._data):
            room = np.empty(max(int(end * _GROWTH), _LEAST), np.int32)
            room[: self._size] = self._data[: self._size]
            self._data = room
        self._data[self._size : end] = tokens
        self._size = end

    @property
    def array(self) -> np.ndarray:
        """int32[n], read-only: all tokens now. Later ones do not change it."""
        view = self._data[: self._size]
        view.flags.writeable = False
        return view

"""Output layers that are certain of one token, a different one in each version, so that a token identifies the version that sampled it."""

from __future__ import annotations

import torch

FIRST = 10
"""Tokens before it are special."""


def token_of(version: int, vocabulary: int) -> int:
    return FIRST + version % (vocabulary - FIRST)


def head(version: int, vocabulary: int, hidden: int) -> torch.Tensor:
    """A layer [vocabulary, hidden] that is certain of a version's token: entry 0 of every hidden state is about the root of `hidden`."""
    weight = 0.02 * torch.randn((vocabulary, hidden), generator=torch.Generator().manual_seed(version))
    weight[:, 0] = 0.0
    weight[token_of(version, vocabulary), 0] = 60.0 / hidden**0.5
    return weight

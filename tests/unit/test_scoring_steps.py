"""Which token ends a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncmoe.rollout.episodes.trajectory_builder import step_rewards
from asyncmoe.rollout.scoring.parse_score import ends

WORDS = ["a", "b", "\n", "\n\n", "", " ", "ab\n"]
"""Texts of the tokens 0 to 6. The fifth is the end of the sequence."""


def decode(tokens: Sequence[int]) -> str:
    return "".join(WORDS[token] for token in tokens)


def test_each_response_is_a_step() -> None:
    sampled = (False, True, True, False, False, True)
    assert ends(range(6), sampled, None, decode) == (2, 5)
    assert ends((), (), None, decode) == ()
    assert ends((0,), (False,), "\n\n", decode) == ()


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ((0, 3, 1), (1, 2)),
        ((0, 2, 2, 1), (2, 3)),
        ((0, 3, 1, 4), (1, 3)),
        ((0, 3, 4), (2,)),
        ((0, 3, 3, 4), (3,)),
        ((3, 0, 3, 3, 1), (2, 4)),
        ((0, 3, 3, 1), (1, 3)),
        ((3, 4), (1,)),
        ((0,) * 100 + (3,) + (1,) * 40, (100, 140)),
    ],
)
def test_a_separator_ends_a_step(tokens: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert ends(tokens, (True,) * len(tokens), "\n\n", decode) == expected


@given(st.lists(st.tuples(st.integers(0, len(WORDS) - 1), st.booleans()), max_size=60))
@example([(0, True)] * 20)
def test_steps_are_the_pieces_that_are_not_blank(conversation: list[tuple[int, bool]]) -> None:
    tokens, sampled = [t for t, _ in conversation], [s for _, s in conversation]
    found = ends(tokens, sampled, "\n\n", decode)
    assert list(found) == sorted(set(found))
    begin, expected = 0, 0
    for place in range(len(tokens) + 1):
        if place < len(tokens) and sampled[place] == (sampled[begin] if begin < len(tokens) else None):
            continue
        if begin < place and sampled[begin]:
            text = decode(tokens[begin:place])
            expected += max(1, sum(bool(piece.strip()) for piece in text.split("\n\n")))
            assert place - 1 in found, "the token that ends a response is a step's last"
        begin = place
    assert len(found) == expected
    assert all(sampled[i] for i in found)


def test_scores_lie_at_the_last_tokens() -> None:
    rewards = step_rewards({1: 0.5, 3: -1.0}, 5)
    np.testing.assert_array_equal(rewards, np.array([np.nan, 0.5, np.nan, -1, np.nan], np.float32))
    assert (rewards.dtype, step_rewards({}, 0).shape) == ("float32", (0,))

"""How far a trainer that trains again has drifted, and when that ends the run."""

from __future__ import annotations

import math

import numpy as np
import pytest

from asyncmoe.errors import Disagreement
from asyncmoe.trainer.replay_drift import Drift, judge, measure
from tests.unit.test_queue_model import make_group


def test_it_is_the_mean_difference_on_tokens_of_the_version() -> None:
    made = [*make_group(0, 2, [2, 3]), *make_group(1, 2, [2, 2])]  # the first trajectory has one token of version 2 and one of 3
    off = [np.where(t.versions == 3, t.logprobs + by, 9.0) for t, by in zip(made, (0.4, -0.1, 0.0, 0.0), strict=True)]
    parts = [measure(made[:2], off[:2], 3), measure(made[2:], off[2:], 3), measure([], [], 3)]
    assert [part.tokens for part in parts] == [3, 0, 0]
    assert judge(parts, 3, 0.5) == pytest.approx(0.2)
    with pytest.raises(Disagreement, match=r"step 3 is trained again, .* differ by 2\.000e-01 .* verify\.max_replay_drift is 0\.1\."):
        judge(parts, 3, 0.1)


def test_without_such_tokens_there_is_none_and_what_is_no_number_ends_the_run() -> None:
    assert judge([Drift(), Drift()], 3, 0.5) is None
    with pytest.raises(Disagreement):
        judge([Drift(4, math.nan)], 3, 0.5)

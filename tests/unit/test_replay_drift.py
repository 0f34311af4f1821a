"""How far a trainer that trains again has drifted, and when that ends the run."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from asyncmoe.errors import Disagreement
from asyncmoe.trainer.logprob_mismatch import Agreement, compare
from asyncmoe.trainer.replay_drift import drift
from tests.unit.test_queue_model import make_group


def test_it_is_the_mean_difference_on_trajectories_of_the_version_alone() -> None:
    made = [replace(t, prefix_version=t.oldest_version) for t in (*make_group(0, 2, [3, 3]), *make_group(1, 2, [2, 2]))]
    off = [np.where(t.loss_mask, t.logprobs + by, t.logprobs) for t, by in zip(made, (0.1, -0.3, 9.0, 9.0), strict=True)]
    found = compare(made, off, 3, 1)
    assert drift(found, 3, 0.5) == pytest.approx(0.2)
    with pytest.raises(Disagreement, match=r"step 3 is trained again, .* differ by 2\.000e-01 .* verify\.max_replay_drift is 0\.1\."):
        drift(found, 3, 0.1)


def test_without_such_trajectories_there_is_none_and_what_is_no_number_ends_the_run() -> None:
    assert drift(compare(make_group(0, 2, [1, 2]), [np.zeros(9)] * 2, 3, 1), 3, 0.5) is None
    with pytest.raises(Disagreement):
        drift(Agreement(4, math.nan, math.nan, math.nan, ()), 3, 0.5)

"""Which tokens each rule rejects, and how rejections are counted; losses and denominators are in test_objective.py."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncmoe.config.objective import ObjectiveSection
from asyncmoe.trainer.objective import Rows, metrics, policy_loss, segments, token_weights
from asyncmoe.trainer.objective.correction import RULES, _outside
from asyncmoe.trainer.objective.surrogate import loglinear
from tests.unit.test_objective import rows


def batch(log_rho: list[list[float]], versions: list[list[int]] | None = None) -> Rows:
    """Sequences whose proximal policy is 0 and whose engine is minus the given log-ratios."""
    lengths = [len(s) for s in log_rho]
    flat = rows(
        weights=np.repeat(token_weights(lengths, "token_mean"), lengths).tolist(),
        behaviour=[-x for s in log_rho for x in s],
    )
    of = torch.tensor([v for s in versions for v in s], dtype=torch.int32) if versions else flat.versions
    return replace(flat, versions=of, segments=segments(lengths, sum(lengths)), sequences=len(lengths))


def test_a_band_includes_its_ends() -> None:
    ends = torch.tensor([math.log(0.5), math.log(2.0)], dtype=torch.float64)
    assert not _outside(ends, (0.5, 2.0)).any()
    assert _outside(torch.tensor([-math.inf, 0.0, math.inf]), (0.0, 1e8)).tolist() == [False, False, True]


def test_rules_are_counted_each_on_its_own() -> None:
    rules = {"weight": "none", "token_band": [0.5, 2.0], "geometric_band": [0.5, 2.0], "max_age": 1}
    section = ObjectiveSection(correction=rules)  # type: ignore[arg-type]
    _, sums = policy_loss(torch.zeros(4), batch([[3.0, 0.0], [0.0, 0.0]], versions=[[0, 0], [-3, 0]]), section, 0)
    counted = dict(zip(RULES, sums["rejected"].tolist(), strict=True))
    assert counted == {"token_band": 1, "sequence_band": 0, "geometric_band": 2, "veto": 0, "opsm": 0, "max_age": 1}
    said = metrics(sums)
    assert said["rejected_fraction"] == 0.75
    assert said["rejected_by_rule"] == {"token_band": 0.25, "geometric_band": 0.5, "max_age": 0.25}
    assert said["rejected_by_age"] == {0: pytest.approx(2 / 3), 3: 1.0}


def test_a_token_from_the_future_stays_finite() -> None:
    """The step refuses it; until then nothing may break."""
    rows = batch([[1.0]], versions=[[6]])
    for progress in (0.0, 0.5):
        assert loglinear(torch.tensor([-2.0]), rows, 5, progress).isfinite().all()
    _, sums = policy_loss(torch.tensor([-2.0]), rows, ObjectiveSection(), 5)
    assert (int(sums["future"]), sums["ages"][0].item()) == (1, 1.0)

"""Which tokens each rule rejects, and how rejections are counted; losses and denominators are in test_objective.py."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from asyncmoe.config.objective import ObjectiveSection
from asyncmoe.trainer.objective import Rows, metrics, policy_loss, segments, token_weights
from asyncmoe.trainer.objective.correction import RULES, Fates, _outside, correct
from asyncmoe.trainer.objective.surrogate import loglinear


def batch(log_rho: list[list[float]], advantages: list[float] | None = None, versions: list[list[int]] | None = None) -> Rows:
    """Sequences whose proximal policy is 0 and whose engine is minus the given log-ratios."""
    lengths = [len(s) for s in log_rho]
    count = sum(lengths)
    return Rows(
        mask=torch.ones(count, dtype=torch.bool),
        weights=torch.tensor(np.repeat(token_weights(lengths, "token_mean"), lengths), dtype=torch.float32),
        advantages=torch.tensor(np.repeat(advantages or [1.0] * len(lengths), lengths), dtype=torch.float32),
        behaviour=-torch.tensor([x for s in log_rho for x in s], dtype=torch.float32),
        versions=torch.tensor([v for s in versions for v in s] if versions else [0] * count, dtype=torch.int32),
        pure=torch.ones(count, dtype=torch.bool),
        segments=segments(lengths, count),
        sequences=len(lengths),
        proximal=torch.zeros(count),
    )


def judged(log_rho: list[list[float]], version: int = 0, new: list[float] | None = None, **rule: Any) -> Fates:
    rows, proximal = batch(log_rho, rule.pop("advantages", None), rule.pop("versions", None)).clamped(), rule.pop("proximal", "recompute")
    section = ObjectiveSection(proximal=proximal, correction={"weight": "none"} | rule)  # type: ignore[arg-type]
    old, cut = torch.zeros(len(rows.mask)), torch.zeros_like(rows.mask)
    before = rows.behaviour if proximal == "behaviour" else old
    return correct(old if new is None else torch.tensor(new), before, rows, section, version, cut)


LOG2 = math.log(2.0)
PAIR = [[LOG2 / 2] * 4, [LOG2 / 2]]
"""Products 4 and 1.41, geometric means both 1.41."""
LEFT = {"new": [-0.2, 0.0, -0.1, -0.1, 0.1, 0.1], "advantages": [-1.0, 1.0, -1.0]}
"""mean(log engine - log trainer) is 0.1, 0.1 and -0.1."""
YES, NO = True, False


@pytest.mark.parametrize(
    ("log_rho", "rule", "rejected"),
    [
        # Not the inverses: comparing -log(ratio) with [log 0.6, log 1.4] would keep 1.6.
        ([[math.log(r) for r in (0.59, 0.61, 1.0, 1.39, 1.41, 1.6)]], {"token_band": [0.6, 1.4]}, [YES, NO, NO, NO, YES, YES]),
        ([[math.inf, -math.inf, 0.0]], {"token_band": [0.0, 1e8]}, [YES, NO, NO]),
        ([[1.0, 0.0]], {"token_band": [0.5, 2.0], "new": [1.0, 0.0], "proximal": "behaviour"}, [YES, NO]),
        ([[0.0, 0.0]], {"token_band": [0.5, 2.0], "new": [1.0, 0.0]}, [NO, NO]),
        (PAIR, {"sequence_band": [0.5, 2.0]}, [YES] * 4 + [NO]),
        (PAIR, {"geometric_band": [0.5, 1.5]}, [NO] * 5),
        (PAIR, {"geometric_band": [0.5, 1.4]}, [YES] * 5),
        # The length and the product are those of what was sampled, rejected or not.
        ([[3.0, -1.5, -1.5, 0.0]], {"token_band": [0.5, 2.0], "sequence_band": [0.9, 1.1]}, [YES, YES, YES, NO]),
        ([[0.0, -10.0, 0.0], [0.0, 3.0], [5.0]], {"veto": [1e-4, 100.0]}, [YES] * 3 + [NO] * 2 + [YES]),
        ([[0.0, 0.0]] * 3, {"opsm_delta": 0.05, **LEFT}, [YES, YES] + [NO] * 4),
        ([[0.0, 0.0]] * 3, {"opsm_delta": 0.05, **LEFT, "proximal": "behaviour"}, [YES, YES] + [NO] * 4),
        ([[0.0, 0.0]] * 3, {"opsm_delta": 0.11, **LEFT}, [NO] * 6),
        ([[0.0] * 3, [0.0]], {"version": 7, "versions": [[4, 5, 7], [1]], "max_age": 2}, [YES, NO, NO, YES]),
    ],
)
def test_what_each_rule_rejects(log_rho: list[list[float]], rule: dict[str, Any], rejected: list[bool]) -> None:
    assert judged(log_rho, **rule).rejected.any(dim=0).tolist() == rejected


def test_a_band_includes_its_ends() -> None:
    ends = torch.tensor([math.log(0.5), math.log(2.0)], dtype=torch.float64)
    assert not _outside(ends, (0.5, 2.0)).any()


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

"""Rules for anomalous values."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest

from asyncmoe.config.objective import ObjectiveSection
from asyncmoe.config.verify import VerifySection
from asyncmoe.errors import AnomalyFound, InvariantBroken
from asyncmoe.trainer.checks import BatchGuard, finite, judge
from asyncmoe.trainer.losses import PolicyLoss

HEALTHY = {"loss": 0.1, "kl_engine": 0.03, "logprob_diff": 1e-5, "grad_norm": 1e4}
ATTACKED = {"loss": 0.1, "kl_engine": 3.24}
"""Figures of the step after another user replaced the weights of an engine."""
EVERY: dict[str, Any] = {"max_logprob_diff": 0.5, "anomalies": {"grad_norm": {"above": 10.0, "action": "skip"}}}


def section(given: dict[str, Any] | None = None) -> VerifySection:
    return VerifySection.model_validate(given or {})


@pytest.mark.parametrize(
    ("given", "values", "rules"),
    [
        ({}, HEALTHY, {}),
        ({}, ATTACKED, {"kl_engine": "skip"}),
        (EVERY, {"logprob_diff": 0.5, "grad_norm": 10.0}, {}),
        (EVERY, {"logprob_diff": 0.51, "grad_norm": 10.1}, {"max_logprob_diff": "stop", "grad_norm": "skip"}),
        ({"anomalies": {"kl_engine": {"above": None}}}, ATTACKED, {}),
        *(({}, {name: value}, {"not_finite": "stop"}) for name in ("loss", "kl_engine", "grad_norm") for value in (math.nan, -math.inf)),
    ],
)
def test_rules_and_what_follows(given: dict[str, Any], values: dict[str, float], rules: dict[str, str]) -> None:
    assert {one.rule: one.action for one in judge(section(given), values)} == rules


def test_a_guard_that_refused_refuses_the_rest_of_the_batch(caplog: pytest.LogCaptureFixture) -> None:
    guard = BatchGuard(section({"anomalies": {"grad_norm": {"above": 5.0}}}), step=7)
    assert guard({"loss": 0.5, "kl_engine": 0.001})
    assert guard({"grad_norm": 6.0})  # warned of only
    assert not guard({"loss": 0.5, "kl_engine": 5.0})
    assert not guard({"loss": 0.5, "kl_engine": 0.001})
    assert (guard.refused, guard.skipped, set(guard.found)) == (True, "kl_engine", {"kl_engine", "grad_norm"})
    assert len([one for one in caplog.records if one.levelno == logging.WARNING]) == 2


@pytest.mark.parametrize("skips", [0, 1, 2, 3])
def test_one_skipped_batch_more_than_allowed_stops_the_run(skips: int) -> None:
    guard = BatchGuard(section({"anomalies": {"skips": 2}}), step=7, skips=skips)
    if skips < 2:
        assert not guard(ATTACKED)
    else:
        with pytest.raises(AnomalyFound, match=rf"step 7: kl_engine is 3\.24.* after {skips} skipped batches"):
            guard(ATTACKED)


def test_a_rule_may_stop_the_run_and_the_warm_up_wants_finite_values() -> None:
    with pytest.raises(AnomalyFound, match=r"step 2: max_logprob_diff is 0\.6, above 0\.5"):
        BatchGuard(section(EVERY), step=2)({"loss": 0.1, "kl_engine": 0.0, "logprob_diff": 0.6})
    assert finite({"loss": 1e9})
    with pytest.raises(InvariantBroken):
        finite({"grad_norm": math.nan})


@pytest.mark.parametrize(("progress", "apart", "checked"), [(0.0, 0.5, {"logprob_diff": 0.5}), (0.5, 0.5, {}), (0.0, None, {})])
def test_only_a_first_update_has_tokens_of_its_version(progress: float, apart: float | None, checked: dict[str, float]) -> None:
    loss = PolicyLoss(ObjectiveSection(), 1.0, 3, progress=progress)
    assert loss.checked({"logprob_diff_max_same_version": apart, "train_infer_kl": 0.25}) == {"kl_engine": 0.25, **checked}

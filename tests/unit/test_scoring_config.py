"""Scoring settings that a configuration may have."""

from __future__ import annotations

from typing import Any

import pytest

from asyncmoe import config
from asyncmoe.errors import ConfigError
from asyncmoe.rollout.scoring import loading
from asyncmoe.rollout.scoring.exact import Exact, Unscored
from tests.configs import minimal

TEACHER = {"url": "http://127.0.0.1:30000"}


def parsed(**section: Any) -> config.Config:
    return minimal(scoring=section)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"scorer": "none"}, r"scoring\.scorer: got none, expected a scorer.*name a scorer or a teacher"),
        ({"scorer": "http:///"}, r"scoring\.scorer: got 'http:///', expected an address like http://host:port"),
        ({"teacher": {"url": "localhost:30000"}}, r"scoring\.teacher\.url: got 'localhost:30000', expected an address"),
        ({"options": {"a": 1}}, r"scoring\.options: .*because scoring\.scorer is auto; leave them out"),
        ({"scorer": "http://judge", "options": {"a": 1}}, r"scoring\.options: .*is an endpoint"),
        ({"scorer": "a:B", "step_separator": ""}, r"scoring\.step_separator: got '', expected "),
        ({"scorer": "exact", "step_separator": "\n"}, r"scoring\.step_separator: got '\\n', expected null because scoring\.scorer exact"),
        ({"timeout_s": 20, "deadline_s": 10}, r"scoring\.deadline_s: got 10, expected at least scoring\.timeout_s = 20.*raise it"),
        ({"teacher": TEACHER, "deadline_s": 50}, r"scoring\.deadline_s: got 50, expected at least scoring\.teacher\.timeout_s = 60"),
    ],
)
def test_what_cannot_be_is_refused_with_its_hint(section: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parsed(**section)


def test_failures_start_a_group_over_only_when_they_are_to() -> None:
    assert parsed().scoring.start_over == frozenset()
    reasons = {"scorer_error", "scorer_nan", "scorer_timeout", "scorer_garbage", "scorer_unavailable"}
    assert parsed(on_failure="requeue").scoring.start_over == reasons


def test_a_run_scores_as_its_task_does_by_default() -> None:
    for made, kind in ((parsed(), Exact), (parsed(scorer="none", teacher=TEACHER), Unscored)):
        assert isinstance(loading.load(made.scoring, made.task, str), kind)
        assert (loading.load_teacher(made.scoring) is None) == (kind is Exact)


def test_the_key_of_a_teacher_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    made = parsed(scorer="none", teacher={**TEACHER, "key_variable": "KEY_OF_THE_TEACHER"})
    with pytest.raises(ConfigError, match=r"scoring\.teacher\.key_variable: got KEY_OF_THE_TEACHER, which is not set, expected"):
        loading.load_teacher(made.scoring)
    monkeypatch.setenv("KEY_OF_THE_TEACHER", " ")
    with pytest.raises(ConfigError, match="which is empty"):
        loading.load_teacher(made.scoring)

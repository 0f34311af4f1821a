"""The breaker, under every schedule of calls: what its docstring promises."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncmoe.rollout.scoring.limits import Breaker, Outcome

COOLDOWN = 10.0
OUTCOMES: tuple[Outcome, ...] = ("answered", "failed", "abandoned")


def failed(breaker: Breaker, times: int, now: float) -> Breaker:
    for _ in range(times):
        breaker, period = breaker.begin(now)
        assert period is not None
        breaker = breaker.end(period, "failed", now)
    return breaker


def test_it_opens_after_so_many_failures_in_a_row_and_not_before() -> None:
    closed = failed(Breaker(3, COOLDOWN), 2, 0.0)
    assert closed.state == "closed"
    assert failed(closed.end(closed.period, "answered", 0.0), 2, 0.0).state == "closed"
    opened = failed(closed, 1, 5.0)
    assert (opened.state, opened.until, opened.wait_s(7.0)) == ("open", 15.0, 8.0)
    assert opened.begin(14.9)[1] is None


def test_one_probe_closes_it_or_opens_it_again() -> None:
    probing, period = failed(Breaker(1, COOLDOWN), 1, 0.0).begin(10.0)
    assert period is not None
    assert (probing.state, probing.wait_s(10.0), probing.begin(99.0)[1]) == ("probing", None, None)
    assert probing.end(period, "answered", 11.0).state == "closed"
    again = probing.end(period, "failed", 11.0)
    assert (again.state, again.until) == ("open", 21.0)
    left = probing.end(period, "abandoned", 11.0)
    assert left.begin(11.0)[1] is not None


def test_what_is_late_changes_nothing() -> None:
    closed, late = Breaker(1, COOLDOWN).begin(0.0)
    assert late is not None
    opened = failed(closed, 1, 0.0)
    for outcome in OUTCOMES:
        assert opened.end(late, outcome, 1.0) == opened


STEPS = st.lists(st.tuples(st.floats(0, 7), st.sampled_from(["begin", *OUTCOMES]), st.integers(0, 20)), max_size=200)


@given(st.integers(1, 4), STEPS)
def test_no_schedule_breaks_its_promises(failures: int, steps: list[tuple[float, str, int]]) -> None:
    breaker, now, under_way = Breaker(failures, COOLDOWN), 0.0, []
    opened_at, in_a_row = None, 0
    for passed, what, which in steps:
        now += passed
        before = breaker
        if what == "begin":
            wait_s = breaker.wait_s(now)
            breaker, period = breaker.begin(now)
            assert (period is not None) == (wait_s == 0.0)
            if period is not None:
                assert opened_at is None or now >= opened_at + COOLDOWN
                assert before.state != "probing"
                under_way.append(period)
            continue
        if not under_way:
            continue
        period = under_way.pop(which % len(under_way))
        breaker = breaker.end(period, what, now)  # type: ignore[arg-type]
        if period == before.period and before.state == "closed":
            in_a_row = {"failed": in_a_row + 1, "answered": 0, "abandoned": in_a_row}[what]
            assert (breaker.state == "open") == (in_a_row == failures)
        if breaker.state == "open" and before.state != "open":
            opened_at, in_a_row = (now if what == "failed" else now - COOLDOWN), 0
        if breaker.state == "closed":
            opened_at = None
        assert breaker.state != "probing" or breaker.period in under_way, "a probe that nobody makes: it would never close"

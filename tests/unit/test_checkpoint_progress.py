"""What a save is at, by the reports of its ranks."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from asyncmoe.trainer.model.checkpoint_progress import Patience, PlacedShard, SaveOutcome, Written, failure_of, state_of

WORLD = 4
reports = st.dictionaries(
    st.integers(0, WORLD - 1),
    st.builds(Written, file=st.just("__0_0.distcp"), failure=st.sampled_from(["", "", "no room", "a bug"]), storage=st.booleans()),
)


@given(reports)
def test_a_save_is_whole_only_if_every_rank_has_written(found: dict[int, Written]) -> None:
    state = state_of(found, WORLD)
    failed = [rank for rank, report in found.items() if report.failure]
    assert (state == "failed") == bool(failed)
    assert (state == "whole") == (len(found) == WORLD and not failed)
    verdict = failure_of(found)
    assert bool(verdict.failure) == bool(failed)
    if failed:
        assert found[verdict.rank].failure == verdict.failure
        assert verdict.storage == any(found[rank].storage for rank in failed)


class Saving(RuleBasedStateMachine):
    """Ranks report in any order, each once; no report takes back what was decided."""

    def __init__(self) -> None:
        super().__init__()
        self.reports: dict[int, Written] = {}
        self.seen = ["writing"]

    @rule(rank=st.integers(0, WORLD - 1), failure=st.sampled_from(["", "", "", "no room"]))
    def report(self, rank: int, failure: str) -> None:
        if rank not in self.reports:
            self.reports[rank] = Written(failure=failure, storage=bool(failure))
            self.seen.append(state_of(self.reports, WORLD))

    @invariant()
    def it_ends_once(self) -> None:
        changes = [state for state, before in zip(self.seen[1:], self.seen, strict=False) if state != before]
        assert changes in ([], ["whole"], ["failed"])
        assert self.seen[-1] != "writing" or len(self.reports) < WORLD


TestSaving = Saving.TestCase


def test_of_several_failures_storages_is_told_first() -> None:
    found = {2: Written(failure="no room", storage=True), 0: Written(failure="a bug"), 3: Written(failure="full", storage=True)}
    assert failure_of(found) == SaveOutcome("no room", True, 2)
    assert failure_of({0: Written()}) == SaveOutcome()


def test_reports_cross_the_store_as_they_are() -> None:
    sent = Written(
        "__1_0.distcp", 12, 7, (PlacedShard("weight", (0, 3), 0, 8), PlacedShard("extra", None, 8, 4), PlacedShard("s", (), 12, 0))
    )
    assert msgspec.json.decode(msgspec.json.encode(sent), type=Written) == sent


@pytest.mark.parametrize("moves", [[], [3.0], [3.0, 6.0]])
def test_patience_lasts_while_something_moves(moves: list[float]) -> None:
    patience = Patience(5.0, 0.0)
    assert not patience.over(0, 0.0)
    for number, now in enumerate(moves):
        assert not patience.over(number + 1, now)
    last = max(moves, default=0.0)
    assert not patience.over(len(moves), last + 4.9)
    assert patience.over(len(moves), last + 5.0)
    assert patience.changes == len(moves) + 1, "the first sight of anything counts"

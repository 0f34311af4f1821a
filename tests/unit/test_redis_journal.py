"""The tests of a journal in a folder, on one in a real Redis server."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.redis_server import LocalRedis, LossyLink, needed, server
from tests.unit import test_journal, test_journal_recovery, test_journal_reopen
from tests.unit.redis_journals import RedisJournals
from tests.unit.test_journal import (  # noqa: F401  collected here again
    in_loop,
    test_a_full_journal_is_one_line_and_loses_nothing,
    test_a_journal_without_groups_belongs_to_anything,
    test_a_run_goes_back_to_an_older_checkpoint_and_no_further,
    test_a_skipped_batch_stays_so_before_the_checkpoint_and_is_decided_anew_after_it,
    test_everything_of_a_killed_run_goes_on,
    test_no_decision_depends_on_a_clock_that_jumps,
    test_what_starts_again_comes_before_new_groups_and_in_order,
    test_what_was_too_old_stays_so,
)
from tests.unit.test_journal_recovery import Program, test_recovery_agrees_with_a_model_of_it  # noqa: F401
from tests.unit.test_journal_reopen import (  # noqa: F401
    test_a_batch_that_is_read_for_a_trainer_that_is_lost_is_read_again_for_the_next,
    test_a_checkpoint_that_the_journal_does_not_reach_changes_nothing,
    test_demonstrations_begin_again_at_the_checkpoint,
    test_it_gets_the_same_batches_while_groups_go_on_to_be_queued,
    test_what_the_lost_trainer_waits_for_is_refused_and_takes_nothing_from_the_next_one,
)

pytestmark = needed()
__all__ = ["server"]


@pytest.fixture(scope="module", autouse=True)
def journals(server: LocalRedis) -> Iterator[RedisJournals]:
    from asyncmoe.journal.in_redis import hold

    made = RedisJournals(server)
    with pytest.MonkeyPatch.context() as patch:
        for module in (test_journal, test_journal_recovery, test_journal_reopen):
            for name in ("opened", "kill"):
                if hasattr(module, name):
                    patch.setattr(module, name, getattr(made, name))
        patch.setattr(hold, "_BEAT_S", 0.2)
        yield made


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 12))])
def test_recovery_agrees_with_its_model_while_the_server_is_killed_and_answers_are_lost(
    server: LocalRedis, journals: RedisJournals, tmp_path: Path, seed: int
) -> None:
    over = threading.Event()
    journals.link = link = LossyLink(server, tmp_path, 0.03, seed)
    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(journals.killed_and_restarted, random.Random(seed), over)
        try:
            for number in range(3):
                in_loop(Program(random.Random(100 * seed + number), tmp_path / str(number)).run(40), 60)
        finally:
            over.set()
            journals.link = None
            link.close()
    assert killing.result() > 1
    assert link.lost > 3

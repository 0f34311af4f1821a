"""The controller's records equal its parts' counts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from asyncmoe.queue.accounts import Accounts
from asyncmoe.queue.admission import Ledger
from asyncmoe.rollout.recorder import Recorder
from asyncmoe.rollout.workers.fleet import added
from asyncmoe.rpc.codec import decode_reply, encode
from asyncmoe.rpc.worker_messages import Figures, WorkerNews
from asyncmoe.telemetry.records import Tail
from asyncmoe.telemetry.rollout_schema import Calls, Rollout, Scoring
from asyncmoe.telemetry.schema import ROLLOUT


def figures() -> Figures:
    """What one process counts."""
    scorer = Scoring(in_flight=1, waiting=2, scored=3, retried=4, failed={"scorer_timeout": 5}, seconds=6.0)
    return Figures({"scorer": scorer}, {"python": Calls(calls=7, seconds=1.5, failures={"tool_timeout": 2, "tool_crash": 1})})


def test_counts_by_reason_survive(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    accounts = Accounts(Ledger(started=9, running=2, queued=1, trained=4, rejected=2), rejected={"engine_died": 2})
    pool = SimpleNamespace(generated_tokens=50, lost_tokens=1, recomputed_tokens=2, recalled_tokens=3)
    counted = figures()
    recorder.write(3, accounts, ["engine.0"], pool, scoring=counted.scoring, tools=counted.tools)
    recorder.close()
    (record,) = Tail(tmp_path / ROLLOUT).poll_as(Rollout)
    assert (record.version, record.queue_depth, record.generated_tokens) == (3, 1, 50)
    assert record.rejected == {"engine_died": 2}
    assert record.scoring["scorer"].failed == {"scorer_timeout": 5}
    assert (record.tools["python"].calls, record.tools["python"].failures) == (7, {"tool_timeout": 2, "tool_crash": 1})


def test_figures_of_several_processes_add_up() -> None:
    sent = [decode_reply(encode(WorkerNews((), (), {}, one))) for one in (figures(), figures(), Figures())]
    whole = added(one.figures for one in sent if isinstance(one, WorkerNews))
    assert whole.scoring["scorer"] == Scoring(in_flight=2, waiting=4, scored=6, retried=8, failed={"scorer_timeout": 10}, seconds=12.0)
    assert whole.tools["python"] == Calls(calls=14, seconds=3.0, failures={"tool_timeout": 4, "tool_crash": 2})
    assert added([]) == Figures()

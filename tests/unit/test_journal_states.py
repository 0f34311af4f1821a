"""The thread that owns a journal's tables, and waits that end before it answers."""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from asyncmoe.errors import WaitTimeout
from asyncmoe.journal import states as module
from asyncmoe.journal.states import States


def test_a_wait_that_is_cancelled_is_not_answered_and_harms_no_other(tmp_path: Path) -> None:
    """Before the thread takes the question, while it answers, and all at once as it goes on."""
    held = threading.Event()

    def slow(connection: Any) -> str:
        held.wait(10)
        return "answered"

    async def main(states: States) -> tuple[list[Any], int]:
        first = asyncio.ensure_future(states.ask(slow))
        await asyncio.sleep(0.05)
        later = [asyncio.ensure_future(states.ask(lambda connection: "later")) for _ in range(50)]
        await asyncio.sleep(0.05)
        for task in (first, *later[::2]):
            task.cancel()
        held.set()
        ended = await asyncio.gather(first, *later, return_exceptions=True)
        return ended, await states.ask(lambda connection: connection.execute("SELECT 41 + 1").fetchone()[0])

    with closing(States.open(tmp_path / "journal", {})) as states:
        ended, answer = asyncio.run(main(states))
    assert [isinstance(one, asyncio.CancelledError) for one in ended] == [True, *(index % 2 == 0 for index in range(50))]
    assert {one for one in ended if isinstance(one, str)} == {"later"}
    assert answer == 42


def test_a_store_that_answers_too_late_is_named_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STORE_S", 0.2)
    go_on = threading.Event()

    async def main(states: States) -> int:
        with pytest.raises(WaitTimeout, match="the journal to be written"):
            await states.ask(lambda connection: go_on.wait(10))
        go_on.set()
        monkeypatch.setattr(module, "_STORE_S", 30.0)
        return await states.ask(lambda connection: 1)

    with closing(States.open(tmp_path / "journal", {})) as states:
        assert asyncio.run(main(states)) == 1

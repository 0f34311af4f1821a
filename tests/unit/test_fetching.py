"""Fetching of a rank's trajectories, and sharing within its group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncmoe.errors import WaitTimeout
from asyncmoe.log.log import Place
from asyncmoe.rpc.messages import Fetched, WorkerFound
from asyncmoe.trainer.data import held
from asyncmoe.trainer.data.shared_fetch import ALIGNED, joined
from asyncmoe.trajectory import frames_in


def test_a_rank_waits_for_a_worker_that_is_lost_and_asks_again_one_that_breaks_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "_AGAIN_S", 0.0)
    there, gone = Mock(), Mock()
    gone.ask.side_effect = WaitTimeout("rollout worker 1", "the connection was lost", 0.0)
    there.ask.return_value = (Fetched(), [b""] * frames_in(1))
    for places, fine in ((("", None, "", "again"), True), (("",) * 3, False)):
        client: Any = Mock()
        client.ask.side_effect = [(WorkerFound(place), []) for place in places]
        client.beside.side_effect = lambda place, _: there if place else gone
        items: list[Any] = [SimpleNamespace(place=Place(1, 0), key="g0.e0")]
        if fine:
            assert held.fetch(client, items, None, True) == [b""] * frames_in(1)
        else:
            with pytest.raises(WaitTimeout, match="the connection was lost"):
                held.fetch(client, items, None, True)


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_joined_buffers_lie_apart_and_aligned(buffers: list[bytes]) -> None:
    sizes = [len(one) for one in buffers]
    whole, made = joined(sizes, buffers)
    assert [bytes(one) for one in made] == buffers
    assert all(one.readonly for one in made)
    first = whole.__array_interface__["data"][0]
    assert all((np.asarray(one).__array_interface__["data"][0] - first) % ALIGNED == 0 for one in made if len(one))
    assert [len(one) for one in joined(sizes)[1]] == sizes

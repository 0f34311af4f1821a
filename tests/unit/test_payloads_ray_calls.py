"""What is asked of Ray, with a stand-in for it."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from asyncmoe.config.queue import QueueSection
from asyncmoe.payloads import in_ray, opening, packed
from asyncmoe.payloads.packed import Asked
from asyncmoe.trajectory import encode
from tests.unit.test_packed import trajectory


def test_each_trajectory_in_ray_has_the_time_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster that takes a part of that for each is slow, not lost."""
    now, names = 0.0, [f"ray:run:1:w.{number}" for number in range(10)]

    class Slow:
        exceptions = SimpleNamespace(RayError=RuntimeError, GetTimeoutError=TimeoutError)

        def get(self, one: Any, timeout: float) -> Any:
            nonlocal now
            now += (took := in_ray._ANSWER_S / 2)
            if took > timeout:
                raise TimeoutError
            return one

        def get_actor(self, name: str, namespace: str) -> Any:
            held = {name: [packed.packed(name, "g0.e0", frames)] for name in names}
            return SimpleNamespace(get=SimpleNamespace(remote=lambda asked: [held[stored] for stored, _ in asked]))

    frames = encode(trajectory(20, 0, True, True))
    monkeypatch.setattr(in_ray, "time", SimpleNamespace(monotonic=lambda: now))
    found = in_ray.RayGroups(Slow(), 1 << 30, 1.0).get([Asked(name, "g0.e0") for name in names])
    assert [list(map(bytes, one)) for one in found if isinstance(one, list)] == [list(map(bytes, frames))] * len(names)


class Cluster:
    """Counts the connections of this process."""

    __spec__ = "of a module"

    def __init__(self, connected: bool) -> None:
        self.connected, self.inits = connected, 0

    def is_initialized(self) -> bool:
        return self.connected

    def init(self, **_: Any) -> None:
        self.connected, self.inits = True, self.inits + 1

    def shutdown(self) -> None:
        self.connected = False


@pytest.mark.parametrize("connected", [False, True])
def test_a_check_before_a_run_leaves_the_process_as_connected_as_it_was(monkeypatch: pytest.MonkeyPatch, connected: bool) -> None:
    cluster = Cluster(connected)
    monkeypatch.setitem(sys.modules, "ray", cluster)
    opening.check(QueueSection(payloads="ray"))
    assert (cluster.connected, cluster.inits) == (connected, int(not connected))

"""Two slots of an engine, and what is sent there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe.engines.adapter_slots import ServedBy, StillInUse, TwoSlots, attributed
from asyncmoe.engines.engine import AdapterHost, EngineHandle
from asyncmoe.engines.member import Member
from asyncmoe.engines.types import Generation, VersionSpan
from asyncmoe.errors import EngineError, WeightSyncError
from tests.unit.example_counts import examples

ADAPTER = Path("adapter")


class Fake:
    """A server that refuses what SGLang refuses, and a third adapter."""

    name = "engine.0"

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.using: dict[str, int] = {}
        self.refusing = False

    async def load_adapter(self, name: str, folder: Path, timeout_s: float) -> None:
        await asyncio.sleep(0)
        assert name not in self.loaded
        assert len(self.loaded) < 2
        if self.refusing:
            raise EngineError("no room")
        self.loaded.append(name)

    async def unload_adapter(self, name: str, timeout_s: float) -> None:
        await asyncio.sleep(0)
        assert not self.using.get(name)
        self.loaded.remove(name)


def engine(server: Fake, timeout_s: float = 5.0) -> Member:
    """An engine of which no other process is a user."""

    async def in_use(adapter: str | None) -> bool:
        await asyncio.sleep(0)
        return made.users[adapter] > 0

    made = Member(cast(EngineHandle, SimpleNamespace(client=server)))
    made.slots = TwoSlots(cast(AdapterHost, server), timeout_s, in_use)
    return made


async def publish(member: Member, version: int, folder: Path, lineage: int = 0) -> None:
    assert member.slots is not None
    await member.slots.publish(version, folder, lineage)


async def respond(slots: Member, server: Fake, steps: int) -> ServedBy:
    """A request that takes so many turns of the loop."""
    with slots.serving() as serving:
        if serving.adapter is not None:
            assert serving.adapter in server.loaded
            server.using[serving.adapter] = server.using.get(serving.adapter, 0) + 1
        for _ in range(steps):
            await asyncio.sleep(0)
            assert serving.adapter is None or serving.adapter in server.loaded
        if serving.adapter is not None:
            server.using[serving.adapter] -= 1
        return serving


@mock.patch("asyncmoe.engines.adapter_slots._LOOK_S", 0.0)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=30), st.integers(1, 8))
@settings(max_examples=examples(60), deadline=None)
def test_no_request_is_without_its_adapter_while_versions_come(requests: list[tuple[int, int]], versions: int) -> None:
    async def run() -> list[ServedBy]:
        server = Fake()
        slots = engine(server)

        async def later(wait: int, steps: int) -> ServedBy:
            for _ in range(wait):
                await asyncio.sleep(0)
            return await respond(slots, server, steps)

        async def publish_all() -> None:
            for version in range(1, versions + 1):
                await publish(slots, version, ADAPTER)
                assert slots.served == ServedBy(version, f"v{version}")

        found = await asyncio.gather(publish_all(), *(later(*request) for request in requests))
        assert server.loaded == ([f"v{versions - 1}"] if versions > 1 else []) + [f"v{versions}"]
        return found[1:]

    assert all(serving.adapter == (f"v{serving.version}" if serving.version else None) for serving in asyncio.run(run()))


def test_a_version_of_the_next_lineage_comes_beside_the_same_version_of_this_one() -> None:
    async def run() -> None:
        server = Fake()
        slots = engine(server)
        await publish(slots, 4, ADAPTER)
        with pytest.raises(WeightSyncError, match="got adapter version 4, expected above 4"):
            await publish(slots, 4, ADAPTER)
        await publish(slots, 4, ADAPTER, 1)
        assert (slots.served, server.loaded) == (ServedBy(4, "v4.1", 1), ["v4", "v4.1"])
        assert (slots.served.salt, ServedBy(4, None).salt) == ("4.1", "4")
        await publish(slots, 5, ADAPTER, 1)
        assert server.loaded == ["v4.1", "v5.1"]

    asyncio.run(run())


def test_who_is_waited_for_is_said() -> None:
    async def run() -> None:
        slots = engine(Fake(), 0.05)
        await publish(slots, 1, ADAPTER)
        with slots.serving():
            await publish(slots, 2, ADAPTER)
            with pytest.raises(StillInUse, match=r"0\.1 s for engine\.0: the end of all responses of version 1"):
                await publish(slots, 3, ADAPTER)
            assert slots.served.version == 2
        await publish(slots, 3, ADAPTER)
        assert slots.served.version == 3

    asyncio.run(run())


def test_a_version_that_cannot_be_loaded_leaves_the_one_before() -> None:
    async def run() -> None:
        server = Fake()
        slots = engine(server, 1.0)
        with pytest.raises(WeightSyncError, match=r"engine\.0: got adapter version -1, expected at least 0"):
            await publish(slots, -1, ADAPTER)
        await publish(slots, 0, ADAPTER)
        await publish(slots, 3, ADAPTER)
        server.refusing = True
        with pytest.raises(EngineError, match="no room"):
            await publish(slots, 4, ADAPTER)
        assert (slots.served, server.loaded) == (ServedBy(3, "v3"), ["v3"])
        for version in (3, 0, -1):
            with pytest.raises(WeightSyncError, match=rf"engine\.0: got adapter version {version}, expected above 3"):
                await publish(slots, version, ADAPTER)
        server.refusing = False
        await publish(slots, 4, ADAPTER)
        assert server.loaded == ["v3", "v4"]

    asyncio.run(run())


def test_a_response_is_of_its_adapters_version() -> None:
    made = Generation.of((5, 6, 7), (-1.0, -1.0, -1.0), (VersionSpan("0", 0, 1), VersionSpan("0", 1, 3)), "length", 0)
    assert attributed(made, ServedBy(4, "v4")).spans == (VersionSpan("4", 0, 3),)
    changed = Generation.of((5,), (-1.0,), (VersionSpan("1", 0, 1),), "length", 0)
    with pytest.raises(EngineError, match="got base weights of version 1 under an adapter"):
        attributed(changed, ServedBy(4, "v4"))

"""An engine that is not SGLang, and refuses invalid calls; mypy checks it against the protocol."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from asyncmoe.engines import types
from asyncmoe.engines.engine import EngineHandle
from asyncmoe.engines.pool import Pool
from asyncmoe.errors import EngineError, WaitTimeout
from asyncmoe.platform.sglang.receiver_command import Command, CommitCommand
from asyncmoe.rpc.messages import WeightsBucket, WeightsJoin
from asyncmoe.weights.coordinator.coordinator import WeightUpdateCoordinator
from asyncmoe.weights.coordinator.driver import UpdateDriver
from tests.unit.generations import generation_of


class FakeEngine:
    """Samples one token per turn of the event loop: the length of the text so far, with the log-probability -1.

    Attributes:
        version: version of its weights.
        partial: True while it holds part of another.
        hangs: True if it runs but samples nothing.
        failures: the results of its next calls, in turn: None succeeds. When they are used up, every call does.
        wrong: its invalid calls.
    """

    def __init__(self, name: str) -> None:
        self.name, self.url, self.key, self.version, self.partial = name, f"at {name}", "", 0, False
        self.paused, self.updating, self.dead, self.hangs = False, False, False, False
        self.failures: deque[type[EngineError] | None] = deque()
        self.wrong: list[str] = []
        self._aborting = 0

    async def ready(self) -> bool:
        return not self.dead

    async def alive(self, timeout_s: float) -> bool:
        if self.hangs:
            await asyncio.sleep(timeout_s)
        return not (self.dead or self.hangs)

    async def close(self) -> None:
        pass

    async def generate(
        self,
        tokens: types.Tokens,
        sampling: types.Sampling,
        salt: str,
        timeout_s: float,
        routed: int = 0,
        adapter: str | None = None,
        listener: types.Listener | None = None,
        dp_rank: int | None = None,
    ) -> types.Generation:
        self._check(salt.split(".")[0] == str(self.version), f"began under version {self.version} with the salt {salt}")
        versions: list[int] = []
        aborting, until = self._aborting, time.monotonic() + timeout_s
        while len(versions) < sampling.max_new_tokens and aborting == self._aborting:
            await asyncio.sleep(0)
            if self.dead:
                raise types.EngineLost(f"{self.name} is gone")
            if time.monotonic() > until:
                raise WaitTimeout(self.name, "/generate", timeout_s)
            if not self.paused and not self.hangs:
                self._check(not self.partial, "sampled with part of a version")
                versions.append(self.version)
                if listener is not None and listener.kept is None:
                    listener.hear([len(tokens) + len(versions) - 1])
        made = tuple(range(len(tokens), len(tokens) + len(versions)))
        finish = "length" if len(versions) == sampling.max_new_tokens else types.ABORTED
        return generation_of(made, (-1.0,) * len(made), _spans(versions), finish, 0)

    async def prompt_logprobs(self, tokens: Sequence[int], timeout_s: float) -> tuple[float, ...]:
        await self._called()
        return (0.0, *(-float(token) for token in tokens[1:]))

    async def parse_calls(self, text: str, parser: str, tools: Sequence[Mapping[str, Any]]) -> tuple[types.ParsedCall, ...]:
        await self._called()
        return ()

    async def abort(self) -> None:
        await self._called()
        self._aborting += 1

    async def pause(self, retract: bool = False) -> None:
        await self._called()
        self.paused = True

    async def flush(self) -> None:
        await self._called()

    async def resume(self) -> None:
        await self._called()
        self._check(not self.updating, "resumed in an update")
        self._check(not self.partial, "resumed with part of a version")
        self.paused = False

    async def begin_update(self) -> None:
        await self._called()
        self._check(self.paused, "updated while it samples")
        self.updating = True

    async def end_update(self) -> None:
        await self._called()
        self.updating = False

    async def join_group(self, join: WeightsJoin, rank_offset: int, world: int, timeout_s: float) -> None:
        await self._called()

    async def load_files(self, folder: str, timeout_s: float) -> None:
        self._check(self.paused and not self.updating, "loaded files outside a pause, or in an update")
        self.partial = True
        await self._called()
        self.partial = False

    async def load_bucket(self, bucket: WeightsBucket, group: str, timeout_s: float) -> None:
        self._check(self.updating, "took weights outside an update")
        self.partial = True
        await self._called()

    async def command_receivers(self, commands: Sequence[Command], timeout_s: float, version: int | None = None) -> None:
        self._check(self.updating or not self.paused, "took a command in a pause outside an update")
        self.partial = self.partial or (self.updating and any(isinstance(one, CommitCommand) for one in commands))
        await self._called()
        if version is not None:
            self.version, self.partial = version, False
        await asyncio.sleep(0)  # the answer is on its way

    async def release_memory(self, tags: Sequence[types.MemoryTag], timeout_s: float) -> None:
        await self._called()

    async def resume_memory(self, tags: Sequence[types.MemoryTag], timeout_s: float) -> None:
        await self._called()

    async def poisoned(self, timeout_s: float) -> tuple[dict[str, str], ...]:
        await self._called()
        return ()

    async def weights_version(self) -> int:
        await self._called()
        return self.version

    async def set_version(self, version: int) -> None:
        await self._called()
        self.version, self.partial = version, False

    async def checksums(self, timeout_s: float) -> tuple[dict[str, str], ...]:
        await self._called()
        return ({"weight": str(self.version)},)

    def _check(self, right: bool, wrong: str) -> None:
        if not right:
            self.wrong.append(wrong)

    async def _called(self) -> None:
        await asyncio.sleep(0)
        failure = self.failures.popleft() if self.failures else None
        if self.dead:
            raise types.EngineLost(f"{self.name} is gone")
        if failure is not None:
            raise failure(f"{self.name} refuses")


class FakeHandle:
    """A fake engine and its process, which ends when it is killed."""

    tp = ep = 1
    host = ""
    pid = 0

    def __init__(self, name: str) -> None:
        self.name, self.client = name, FakeEngine(name)

    @property
    def died(self) -> str | None:
        return "killed" if self.client.dead else None

    def kill(self, why: str = "") -> None:
        self.client.dead = True


def handles(count: int) -> list[EngineHandle]:
    """Engines for a pool."""
    return [FakeHandle(f"engine.{number}") for number in range(count)]


def fake(handle: EngineHandle) -> FakeEngine:
    """The engine of one of `handles`."""
    assert isinstance(handle.client, FakeEngine)
    return handle.client


def coordinator_of(pool: Pool, published: list[int] | None = None, timeout_s: float = 5.0, **how: Any) -> WeightUpdateCoordinator:
    """A coordinator of engines that have started.

    Args:
        published: gets the versions that every engine serves.
        how: as for `UpdateDriver`.
    """

    async def publish(version: int) -> None:
        if published is not None:
            published.append(version)

    made = WeightUpdateCoordinator(UpdateDriver(pool, timeout_s, lambda *_: None, **how), publish)
    made.engines_started()
    return made


def _spans(versions: Sequence[int]) -> tuple[types.VersionSpan, ...]:
    starts = [at for at, version in enumerate(versions) if not at or versions[at - 1] != version]
    return tuple(types.VersionSpan(str(versions[a]), a, b) for a, b in zip(starts, [*starts[1:], len(versions)], strict=True))

"""Real Megatron ranks publish through a version store, with deltas, to real receivers without a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncmoe.config.model import MadeModel
from asyncmoe.models import load_hf_config
from asyncmoe.models.make import make_model
from asyncmoe.receiver import handshake, worker
from asyncmoe.rpc import keys
from asyncmoe.rpc.messages import Reply, Request, WeightsCommit, WeightsStage
from asyncmoe.rpc.server import Server
from asyncmoe.version_store import Folder, VersionId, VersionStore, of_run
from tests.engine.oracle import Oracle, perturbed
from tests.ranks import launch
from tests.unit.test_receiver_store import Controller, Worker, config_of

pytestmark = pytest.mark.ranks


class Stage:
    """Two ranks of an engine, and what they held when each version was committed."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        hf = load_hf_config(model)
        self.workers = [Worker(0, hf), Worker(1, hf)]
        self.controller = Controller(self.workers)
        values = config_of(folder).model_dump(mode="json") | {"model": {"path": str(model)}}
        sync = {"method": "store", "delta": "auto", "timeout_s": 30.0, "store": {"url": str(folder / "versions"), "full_every": 100}}
        self.values = values | {"sync": sync}
        self.held: dict[int, list[dict[str, torch.Tensor]]] = {}
        self.spoil = 0
        """Version of which all deltas are cut off before engines hear of it."""

    @property
    def store(self) -> VersionStore:
        return VersionStore(Folder(self.folder / "versions"), of_run.run_of(self.folder / "run"))

    async def publish(self, publications: dict[str, list[tuple[Path, int]]]) -> list[dict[str, Any]]:
        """Publish checkpoints under trainers' layouts in turn; return what came of each, on rank 0."""
        out = self.folder / "out"
        out.mkdir()
        listed = {layout: [(str(path), version) for path, version in several] for layout, several in publications.items()}
        (out / "job.json").write_text(json.dumps({"config": self.values, "layouts": list(listed), "publications": listed}))
        run = self.folder / "run"
        run.mkdir(exist_ok=True)
        async with Server(self.answer) as server:
            rendezvous = await server.start()
            keys.write(run, rendezvous)
            serving = asyncio.create_task(server.serve())
            try:
                found: list[dict[str, Any]] = await asyncio.to_thread(launch.run, "publish", 2, out, str(out / "job.json"), timeout_s=300.0)
                return found
            finally:
                serving.cancel()
                keys.remove(run, rendezvous)

    async def answer(self, request: Request) -> Reply:
        if isinstance(request, WeightsStage) and request.version == self.spoil:
            manifest = self.store.manifest(VersionId(3, self.spoil))
            assert manifest is not None
            for name in {one.deltas[-1].name for rank in manifest.ranks for one in rank if one.deltas}:
                self.store.files.write(name, b"short")
        reply = self.controller.ask(request, 0.0)[0]
        if isinstance(request, WeightsCommit):
            self.held[request.version] = [{name: value.data.clone() for name, value in one.named_parameters()} for one in self.workers]
        return reply

    def same(self, one: int, other: int) -> bool:
        """Whether two versions were the same, bit for bit."""
        pairs = zip(self.held[one], self.held[other], strict=True)
        return all(torch.equal(a[name], b[name]) for a, b in pairs for name in a)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    model = tmp_path / "model"
    make_model(model, MadeModel(layers=2), seed=0)
    ranks = iter(range(100))
    monkeypatch.setattr(handshake, "places", lambda: {"tp_rank": next(ranks) % 2, "moe_ep_rank": 0})
    monkeypatch.setattr(handshake, "obstacles", lambda _: [])
    monkeypatch.setattr(worker, "_LOOK_S", 0.3)
    made = Stage(tmp_path, model)
    yield made
    for one in made.workers:
        with suppress(KeyError):
            worker._receivers[one].leave()


def test_after_a_version_that_engines_could_not_read_the_next_is_whole(stage: Stage, tmp_path: Path) -> None:
    """A chain with a delta that nobody can read is no base for the next version, on no rank."""
    a = Oracle(tmp_path / "model")
    b = perturbed(a, tmp_path / "b", 3, share=0.01)
    c = perturbed(b, tmp_path / "c", 4, share=0.01)
    stage.spoil = 3
    several = [(a.path, 1), (b.path, 2), (c.path, 3), (c.path, 4), (b.path, 5), (b.path, 6)]
    found = asyncio.run(stage.publish({"tp=2": several[:5], "pp=2": several[5:]}))
    said = [one["error"] for one in found]
    assert [one is None for one in said] == [True, True, False, True, True, True], said
    assert "of version 3 of lineage 3: got " in said[2]
    assert sorted(stage.held) == [1, 2, 4, 5, 6]
    assert stage.same(2, 5)
    assert stage.same(5, 6), "what another trainer wrote whole"
    assert not stage.same(2, 4)
    assert not stage.same(1, 2)
    (whole, none), (nbytes, share), _, again, (back, _), other = [one.get("traffic") for one in found]
    assert none is None
    assert 0.008 < share < 0.012
    assert max(nbytes, back) < whole / 8
    assert again == other == [whole, None]

"""Versions in a store reach workers: announced by the trainer's rank 0, read, verified and committed, without a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from asyncmoe.config import Config, parse
from asyncmoe.errors import AsyncmoeError, WeightSyncError
from asyncmoe.models import EngineParallel, MegatronParallel
from asyncmoe.models.payload import Payload
from asyncmoe.receiver import command, handshake, worker
from asyncmoe.rpc.messages import (
    Committed,
    Done,
    EngineInfo,
    Engines,
    EnginesAsk,
    Reply,
    Request,
    WeightsAbort,
    WeightsCommit,
    WeightsJoin,
    WeightsStage,
)
from asyncmoe.trainer.weight_sync.announcer import Announcer
from asyncmoe.trainer.weight_sync.publisher import unverified
from asyncmoe.version_store import Folder, Geometry, ShareWriter, VersionId, VersionStore, divide, of_run, publish
from tests.unit.test_receiver import HF

PARALLEL = MegatronParallel(tp=2)
ENGINE = EngineParallel(2, 1)


class Worker(torch.nn.Module):
    """A module with the parameters of one rank of an engine."""

    def __init__(self, rank: int, hf: dict[str, Any] = HF) -> None:
        super().__init__()
        for name, storage in Payload(hf).weights_of_engine(ENGINE, rank, "float32").storages.items():
            *path, last = name.split(".")
            inner: torch.nn.Module = self
            for part in path:
                if not hasattr(inner, part):
                    inner.add_module(part, torch.nn.Module())
                inner = getattr(inner, part)
            inner.register_parameter(last, torch.nn.Parameter(torch.zeros(storage.shape), requires_grad=False))

    @property
    def norm(self) -> float:
        return float(self.get_parameter("model.norm.weight").mean())


class Controller:
    """A client whose controller drives the workers in this process."""

    def __init__(self, workers: list[Worker]) -> None:
        self.workers, self.asked, self.roster, self.lost = workers, list[Request](), 1, ()

    def ask(self, request: Request, timeout_s: float) -> tuple[Reply, list[Any]]:
        self.asked.append(request)
        match request:
            case EnginesAsk():
                info = EngineInfo("engine.0", len(self.workers), 1, 1, 0, device="cpu")
                return Engines((info,), 1 + len(self.workers), self.roster, self.lost, lineage=3), []
            case WeightsJoin():
                assert "://" in request.host
                for rank, one in enumerate(self.workers):
                    self.obey(one, command.JoinCommand(request.host, request.port, request.group, request.senders + rank))
            case WeightsCommit():
                for one in self.workers:
                    self.obey(one, command.CommitCommand(request.version, request.update))
                return Committed(request.version, (1.5,)), []
        return Done(), []

    def obey(self, model: Worker, said: command.Command) -> None:
        worker.obey(model, msgspec.json.encode(said).decode())

    def kinds(self) -> list[type]:
        return [type(one) for one in self.asked if not isinstance(one, EnginesAsk)]


class Scene:
    """Trainer ranks that write, and the announcer of their rank 0."""

    def __init__(self, config: Config, controller: Controller) -> None:
        self.controller, self.config = controller, config
        self.store = of_run.opened(config, 10.0)
        self.store.claim()
        payload = Payload(HF)
        self.sources = payload.trainer(PARALLEL, "float32")
        self.sharing = divide(payload.tensors(), self.sources, payload.engines(ENGINE, "float32"), slab_bytes=8192, object_bytes=16384)
        model: Any = SimpleNamespace(hf=HF, parallel=PARALLEL, dtype=torch.float32)
        client: Any = controller
        self.announcer = Announcer(config, model, client, self.store)
        self.reads = list[tuple[str, int]]()
        self.writers = dict[int, ShareWriter]()
        self.start_again(1)
        plain = Folder.read

        def noted(folder: Folder, name: str, begin: int = 0, nbytes: int | None = None) -> bytes | None:
            found = plain(folder, name, begin, nbytes)
            if name.startswith("objects/") and found is not None:
                self.reads.append((name, len(found)))
            return found

        self.noted = noted

    def start_again(self, full_every: int) -> None:
        """Writers that have written nothing so far."""
        for layout in self.sources:
            share, store = self.sharing.shares[layout.rank], VersionStore(self.store.files, "")
            self.writers[layout.rank] = ShareWriter(self.sharing.tensors, share, store, full_every=full_every)

    def write(self, step: int, value: float, *, norms: float | None = None) -> str:
        """Write a version of which all elements have a value, and those of the norms another one, if it is given."""
        parts = []
        for layout in self.sources:
            arrays = {
                name: torch.full(storage.shape, value if norms is None or "norm" not in name else norms)
                for name, storage in layout.storages.items()
            }
            parts.append(self.writers[layout.rank].write(arrays))
        geometry = Geometry(self.sharing.tensors, tuple(share.slabs for share in self.sharing.shares.values()))
        return publish(self.store, VersionId(3, step), geometry, parts)

    def announce(self, step: int, manifest: str) -> float:
        return self.announcer.announce(step, manifest, 3, unverified)

    @property
    def norms(self) -> list[float]:
        return [one.norm for one in self.controller.workers]


def config_of(folder: Path, **sync: Any) -> Config:
    values = {"run": {"dir": str(folder / "run"), "steps": 1}, "model": {"path": "m"}, "task": {"kind": "arithmetic"}}
    given = {"method": "store", "store": {"url": str(folder / "versions")}, "timeout_s": 10.0} | sync
    return parse({**values, "engines": {"tp": 2, "dtype": "float32"}, "sync": given})


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    ranks = iter(range(100))
    monkeypatch.setattr(handshake, "places", lambda: {"tp_rank": next(ranks) % 2, "moe_ep_rank": 0})
    monkeypatch.setattr(handshake, "obstacles", lambda _: [])
    monkeypatch.setattr(worker, "_LOOK_S", 0.3)
    made = Scene(config_of(tmp_path), Controller([Worker(0), Worker(1)]))
    monkeypatch.setattr(Folder, "read", made.noted)
    yield made
    for one in made.controller.workers:
        with suppress(KeyError):
            worker._receivers[one].leave()


def test_versions_are_announced_read_and_committed(scene: Scene) -> None:
    for step, value in ((1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)):
        assert scene.announce(step, scene.write(step, value)) == 1.5
        assert scene.norms == [value, value]
    assert scene.controller.kinds() == [WeightsJoin, *[WeightsStage, WeightsCommit] * 4]
    assert scene.announcer.lineage() == 3
    name = "model.layers.1.mlp.experts.w13_weight"
    assert all((one.get_parameter(name) == 4.0).all() for one in scene.controller.workers)


def test_a_version_that_is_damaged_is_given_up_and_the_next_arrives(scene: Scene) -> None:
    scene.announce(1, scene.write(1, 1.0))
    manifest = scene.write(2, 2.0)
    found = scene.store.manifest(VersionId(3, 2), manifest)
    assert found is not None
    for name in found.objects - {f"objects/{found.geometry[:2]}/{found.geometry}"}:
        scene.store.files.write(name, b"short")
    with pytest.raises(WeightSyncError, match=r"objects/.* of version 2 of lineage 3: got .* \(engine\.0 rank [01] on .*, cpu\)$"):
        scene.announce(2, manifest)
    assert scene.controller.kinds()[-1] is WeightsAbort
    assert scene.norms == [1.0, 1.0], "nothing is half applied"
    assert scene.announce(3, scene.write(3, 3.0)) == 1.5
    assert scene.norms == [3.0, 3.0]


def test_a_manifest_that_was_written_again_is_not_the_one_that_was_announced(scene: Scene) -> None:
    first = scene.write(1, 1.0)
    scene.write(1, 2.0)
    with pytest.raises(WeightSyncError, match="as the trainer announced it"):
        scene.announce(1, first)
    assert scene.norms == [0.0, 0.0]


def test_new_engines_are_met_and_get_the_version_that_is_there(scene: Scene) -> None:
    """An engine that starts from nothing reaches the newest version, and nobody writes anything for it."""
    manifest = scene.write(1, 1.0)
    scene.announce(1, manifest)
    objects = scene.store.files.names("objects")
    scene.controller.workers, scene.controller.roster = [Worker(0), Worker(1)], 2
    assert scene.norms == [0.0, 0.0]
    assert scene.announcer.changed()
    scene.announce(1, manifest)
    assert scene.norms == [1.0, 1.0]
    assert scene.store.files.names("objects") == objects
    scene.announcer.part()
    assert scene.store.files.names("meetings") == []


def test_a_meeting_keeps_as_many_files_and_folders_however_many_versions_it_announces(scene: Scene) -> None:
    folder = Path(scene.store.files.shown) / "meetings"
    kept = []
    for step in range(1, 8):
        scene.announce(step, scene.write(step, float(step)))
        kept.append(sorted("folder" if one.is_dir() else "file" for one in folder.rglob("*")))
    assert kept[2] == kept[-1]
    assert scene.norms == [7.0, 7.0]
    assert scene.controller.kinds().count(WeightsJoin) == 1


def test_files_that_cannot_be_deleted_fail_no_version(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Folder, name: str) -> None:
        raise AsyncmoeError(f"{name}: no permission to delete")

    monkeypatch.setattr(Folder, "delete", refuse)
    for step in range(1, 5):
        assert scene.announce(step, scene.write(step, float(step))) == 1.5
    assert scene.norms == [4.0, 4.0]


def test_a_version_that_the_controller_refused_is_announced_in_a_new_meeting(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Receivers of the former one wait for the header that was never set."""
    scene.announce(1, scene.write(1, 1.0))
    real = Controller.ask

    def refuse(self: Controller, request: Request, timeout_s: float) -> tuple[Reply, list[Any]]:
        if isinstance(request, WeightsStage):
            raise WeightSyncError("another version is under way")
        return real(self, request, timeout_s)

    manifest = scene.write(2, 2.0)
    with monkeypatch.context() as patch:
        patch.setattr(Controller, "ask", refuse)
        with pytest.raises(WeightSyncError, match="under way"):
            scene.announce(2, manifest)
    assert scene.announce(2, manifest) == 1.5
    assert scene.norms == [2.0, 2.0]


def whole(scene: Scene) -> int:
    return sum(int(share.slabs.object_bytes.sum()) for share in scene.sharing.shares.values())


def test_engines_read_what_changed_since_the_version_they_serve(scene: Scene) -> None:
    """Swap for swap, although the memory for the next version has the one before: none is written before its commit."""
    scene.start_again(100)
    scene.announce(1, scene.write(1, 1.0))
    for step in range(2, 7):
        scene.reads.clear()
        assert scene.announce(step, scene.write(step, 1.0, norms=float(step))) == 1.5
        assert scene.norms == [step, step]
        assert 0 < sum(nbytes for _, nbytes in scene.reads) < whole(scene) / 10
        assert all((one.get_parameter("model.layers.1.mlp.experts.w13_weight") == 1.0).all() for one in scene.controller.workers)


def test_engines_that_met_before_go_on_and_new_ones_read_from_the_beginning(scene: Scene) -> None:
    """A meeting with other engines does not make the former ones read everything again."""
    scene.start_again(100)
    scene.announce(1, scene.write(1, 1.0))
    scene.announce(2, scene.write(2, 1.0, norms=2.0))
    scene.controller.roster = 2
    scene.reads.clear()
    scene.announce(3, scene.write(3, 1.0, norms=3.0))
    assert 0 < sum(nbytes for _, nbytes in scene.reads) < whole(scene) / 4, "the geometry, and what changed"
    scene.controller.workers, scene.controller.roster = [Worker(0), Worker(1)], 3
    scene.reads.clear()
    manifest = scene.write(4, 1.0, norms=4.0)
    scene.announce(4, manifest)
    assert scene.norms == [4.0, 4.0]
    assert sum(nbytes for _, nbytes in scene.reads) > whole(scene)


def test_a_delta_that_is_damaged_changes_nothing_and_a_whole_version_helps(scene: Scene) -> None:
    scene.start_again(100)
    scene.announce(1, scene.write(1, 1.0))
    manifest = scene.write(2, 1.0, norms=2.0)
    found = scene.store.manifest(VersionId(3, 2), manifest)
    assert found is not None
    deltas = {delta.name for rank in found.ranks for one in rank for delta in one.deltas}
    assert deltas
    for name in deltas:
        scene.store.files.write(name, b"short")
    with pytest.raises(WeightSyncError, match=r"objects/.* of version 2 of lineage 3: got .* \(engine\.0 rank [01] on .*, cpu\)$"):
        scene.announce(2, manifest)
    assert scene.controller.kinds()[-1] is WeightsAbort
    assert scene.norms == [1.0, 1.0], "nothing is half applied"
    for writer in scene.writers.values():
        writer.forget()
    assert scene.announce(3, scene.write(3, 1.0, norms=3.0)) == 1.5
    assert scene.norms == [3.0, 3.0]


def test_parameters_that_somebody_wrote_are_read_from_the_beginning(scene: Scene) -> None:
    scene.start_again(100)
    scene.announce(1, scene.write(1, 1.0))
    scene.controller.workers[0].get_parameter("model.norm.weight").data[3] = 9.0
    assert scene.announce(2, scene.write(2, 1.0, norms=2.0)) == 1.5
    assert scene.norms == [2.0, 2.0]
    scene.controller.workers[0].get_parameter("model.layers.1.mlp.experts.w13_weight").data[0, 0, 0] = 9.0
    assert scene.announce(3, scene.write(3, 1.0, norms=3.0)) == 1.5
    assert all((one.get_parameter("model.layers.1.mlp.experts.w13_weight") == 1.0).all() for one in scene.controller.workers)


def test_an_engine_that_is_lost_ends_the_wait(scene: Scene) -> None:
    manifest = scene.write(1, 1.0)
    scene.announce(1, manifest)
    for one in scene.controller.workers:
        worker._receivers[one].leave()
        worker._receivers[one].join(10.0)
    scene.controller.lost = ("engine.0",)
    with pytest.raises(WeightSyncError, match=r"engine\.0 is gone"):
        scene.announce(2, scene.write(2, 2.0))
    assert scene.norms == [1.0, 1.0]


def test_a_worker_with_other_parameters_is_named(scene: Scene) -> None:
    scene.controller.workers[1].register_parameter("extra", torch.nn.Parameter(torch.zeros(2)))
    with pytest.raises(WeightSyncError, match=r"engine\.0 rank 1: extra: got float32\[2\], expected no such parameter"):
        scene.announce(1, scene.write(1, 1.0))
    assert WeightsStage not in scene.controller.kinds()


# ---------------------------------------------------------------- the run's store


def test_a_run_keeps_its_identity_and_another_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    of_run.check(config, gpu=False)
    assert not (tmp_path / "versions").exists()
    of_run.claim(config)
    of_run.claim(config)
    other = parse(config.model_dump(mode="json") | {"run": {"dir": str(tmp_path / "other"), "steps": 1}})
    with pytest.raises(AsyncmoeError, match=r"got versions of run [0-9a-f]{32}, expected of run [0-9a-f]{32}; give every"):
        of_run.claim(other)


def test_what_does_not_go_with_a_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AsyncmoeError, match=r"sync\.staging: got none, expected full because sync\.method is store"):
        config_of(tmp_path, staging=False)
    with pytest.raises(AsyncmoeError, match=r"sync\.store\.url: got nothing, expected a directory or a URL"):
        config_of(tmp_path, store={})
    with pytest.raises(AsyncmoeError, match=r"sync\.store\.url: got a value, expected nothing because sync\.method is reshard"):
        config_of(tmp_path, method="reshard")
    with pytest.raises(AsyncmoeError, match=r"sync\.store\.full_every: got 0, expected"):
        config_of(tmp_path, store={"url": str(tmp_path), "full_every": 0})
    with pytest.raises(AsyncmoeError, match=r"sync\.staging: got delta, expected full because sync\.method is store"):
        config_of(tmp_path, delta="auto", staging="delta")
    values = config_of(tmp_path).model_dump(mode="json")
    with pytest.raises(AsyncmoeError, match=r"sync\.method: got store, expected reshard or broadcast because train is lora"):
        parse(values | {"train": "lora"})
    with pytest.raises(AsyncmoeError, match=r"sync\.method: got store, and this machine has GPUs, expected reshard or broadcast"):
        of_run.check(config_of(tmp_path), gpu=True)


def test_a_store_that_cannot_be_written_is_said_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "versions").write_text("a file")
    with pytest.raises(AsyncmoeError, match=r"^sync\.store\.url: got .*versions.*, expected a place that can be read and written$"):
        of_run.claim(config_of(tmp_path))

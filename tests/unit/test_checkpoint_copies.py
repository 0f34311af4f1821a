"""Copies of checkpoints in a second place: fsspec's own file systems, local and in memory."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from typer.testing import CliRunner

from asyncmoe import checkpoints, cli
from asyncmoe.checkpoints import copier, copies, directories, intact
from asyncmoe.checkpoints.copier import Copier
from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError, DataError, Interrupted, UserError
from asyncmoe.launch import local
from tests.configs import minimal
from tests.unit.test_checkpoints import FILES, flip, saved


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    yield "memory://asyncmoe-copies/a" if request.param == "memory" else f"file://{tmp_path}/second place"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def config(run: Path, url: str | None, **more: Any) -> Config:
    return minimal(run, steps=9, trainer={"checkpoint_copy": url, **more})


def contents(path: Path) -> dict[str, bytes]:
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_a_copy_comes_back_as_it_was(url: str, tmp_path: Path) -> None:
    run = tmp_path / "run ä"
    path = saved(run, 7, files={**FILES, "part/of a folder": b"x" * 9, "empty": b""})
    before = contents(path)
    place = copies.place_of(url, run)
    copies.send(path, place)
    assert copies.complete(place) == [7]
    path.rename(tmp_path / "lost")
    assert copies.restore(url, run) == path
    assert contents(path) == before
    assert intact.fault(path) is None
    with pytest.raises(DataError, match="got a checkpoint without damage"):
        copies.restore(url, run)
    flip(path / "common.pt")
    assert copies.restore(url, run, 7) == path
    assert contents(path) == before
    assert (path.parent / "step-00000007.damaged").is_dir()


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("manifest.json", None, "no complete copy"),
        ("common.pt", None, "common.pt|No such file"),
        ("common.pt", b"d" * 900, r"common\.pt: got 900 bytes with CRC-32C"),
        ("common.pt", b"d" * 10**6, "got 1000000 bytes"),
    ],
)
def test_a_copy_that_is_not_whole_is_never_brought_back(file: str, content: bytes | None, said: str, url: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    path, place = saved(run, 3), copies.place_of(url, run)
    copies.send(path, place)
    place.files.rm_file(f"{place.folder(3)}/{file}")
    if content is not None:
        place.files.pipe_file(f"{place.folder(3)}/{file}", content)
    path.rename(tmp_path / "lost")
    with pytest.raises(AsyncmoeError, match=said):
        copies.restore(url, run)
    assert checkpoints.newest(run) is None


def test_a_damaged_checkpoint_is_not_copied(url: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "run", 3)
    flip(path / "__0_0.distcp")
    place = copies.place_of(url, tmp_path / "run")
    with pytest.raises(DataError, match=r"__0_0\.distcp has other content"):
        copies.send(path, place)
    assert copies.complete(place) == []


def test_the_run_copies_what_it_saves_and_keeps_as_many(url: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    place = copies.place_of(url, run)
    settings = config(run, url, keep_checkpoints=2, keep_every=100)
    settings = settings.model_copy(update={"log": settings.log.model_copy(update={"keep": 30})})  # the log is not copied
    for last in (100, 120, 140, 160):
        with Copier(settings):  # whose end waits for the copy
            saved(run, last, keep=2, keep_every=100)
    assert copies.complete(place) == [100, 140, 160]
    assert [directories.step_of(path.name) for path in directories.complete(run)] == [100, 140, 160]


class Failing(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Fails to write one file a given number of times."""

    protocol = "failing"
    cachable = False
    left = 0

    def _open(self, path: str, mode: str = "rb", **more: Any) -> Any:
        if "w" in mode and path.endswith("common.pt") and Failing.left:
            Failing.left -= 1
            raise PermissionError(f"403 for https://user:secret@store/{path}")
        return super()._open(path, mode, **more)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(copier, "_POLL_S", 0.05)
    fsspec.register_implementation("failing", Failing, clobber=True)
    yield "failing://place"
    MemoryFileSystem.store.clear()


def test_a_failure_that_lasts_is_said_once_and_the_run_goes_on(failing: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    Failing.left = 2
    with Copier(config(run, failing)):
        for step in (1, 2, 3):
            saved(run, step)
            until = time.monotonic() + 10
            while Failing.left > max(0, 2 - step) and time.monotonic() < until:
                time.sleep(0.01)
    assert copies.complete(copies.place_of(failing, run)) == [3]
    first, last = capfd.readouterr().err.splitlines()
    assert first.startswith("trainer.checkpoint_copy: step-00000001 was not copied to failing://place/run: PermissionError: 403 for ")
    assert "secret" not in first
    assert last.startswith("trainer.checkpoint_copy: step-00000003 is copied to failing://place/run")


def test_a_copy_that_is_written_again_is_absent_until_it_is_whole(failing: str, tmp_path: Path) -> None:
    path, place = saved(tmp_path / "run", 1), copies.place_of(failing, tmp_path / "run")
    Failing.left = 0
    copies.send(path, place)
    Failing.left = 1
    with pytest.raises(PermissionError):
        copies.send(path, place)
    assert copies.complete(place) == []


@pytest.mark.parametrize("at_once", [True, False])
def test_the_wait_for_the_last_copy_ends_with_the_user_s_patience(at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "send", lambda *_: time.sleep(20))
    monkeypatch.setattr(copier, "_POLL_S", 0.1)
    saved(tmp_path / "run", 1)
    begin, asked = time.monotonic(), iter([1, 1])
    with suppress(Interrupted), Copier(config(tmp_path / "run", "memory://asyncmoe-copies/b"), lambda: next(asked, 2)):
        if at_once:
            raise Interrupted("ended at once")
    assert time.monotonic() - begin < 10


def test_a_place_that_cannot_be_opened_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"trainer\.checkpoint_copy: got .*, expected a URL that fsspec can open"):
        copier.check(config(tmp_path / "run", "nosuchkind://x"))


def test_a_place_where_nothing_can_be_written_is_refused_before_the_run(tmp_path: Path, url: str) -> None:
    asked = config(tmp_path / "run", url)
    copier.try_to_write(asked)
    assert copies.place_of(url, tmp_path / "run").files.ls(copies.place_of(url, tmp_path / "run").root) == []
    (tmp_path / "a file").write_text("")
    with pytest.raises(UserError, match=r"^trainer\.checkpoint_copy: got file://.*/run: \w+Error"):
        copier.try_to_write(config(tmp_path / "run", f"file://{tmp_path}/a file"))


def test_a_new_run_does_not_mix_its_copies_with_those_of_another(url: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    path = saved(run, 3)
    copier.check(config(run, url))
    copies.send(path, copies.place_of(url, run))
    copier.check(config(run, url))
    copier.check(config(run, None))
    path.rename(tmp_path / "lost")
    with pytest.raises(UserError, match=r"a copy of step 3, expected no copies, .*; restore it by asyncmoe checkpoints .*run --restore"):
        copier.check(config(run, url))


def test_the_command_brings_a_copy_back_and_lists_it(tmp_path: Path) -> None:
    run, url = tmp_path / "run", f"file://{tmp_path}/place"
    path = saved(run, 3)
    copies.send(path, copies.place_of(url, run))
    path.rename(tmp_path / "lost")
    asked = CliRunner().invoke(cli.app, ["checkpoints", str(run), "--restore", url, "--verify"])
    assert (asked.exit_code, asked.output.splitlines()[0]) == (0, f"brought back {path}")
    flip(path / "common.pt")
    asked = CliRunner().invoke(cli.app, ["checkpoints", str(run), "--verify", "--json"])
    told = json.loads(asked.output)
    assert (asked.exit_code, told["step"], told["state"]) == (1, 3, "damaged")
    with local.claim(run), pytest.raises(UserError, match="in use by another run"):
        CliRunner().invoke(cli.app, ["checkpoints", str(run), "--restore", url], catch_exceptions=False)

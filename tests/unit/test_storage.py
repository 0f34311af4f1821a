"""Files that cannot be written: the one line, on real disks that are full."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from asyncmoe import storage
from asyncmoe.config.model import MadeModel
from asyncmoe.errors import AsyncmoeError, DataError, StorageError, UserError
from asyncmoe.launch import export, failures
from asyncmoe.models.make import make_model
from asyncmoe.process import Child, named, say
from asyncmoe.rpc import keys
from asyncmoe.telemetry.records import JsonLines, Tail
from tests.disks import mounted

NODE = socket.gethostname()
BIG = np.zeros(1 << 20, np.float32)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    with mounted(tmp_path / "disk", "1m") as place:
        yield place


def fill(disk: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        (disk / "filler").write_bytes(bytes(2 << 20))


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "No space left on device (ENOSPC)"),
        (errno.EDQUOT, "(EDQUOT)"),
        (errno.EROFS, "Read-only file system (EROFS)"),
        (errno.EIO, "Input/output error (EIO)"),
        (errno.ESTALE, "(ESTALE)"),
        (errno.EACCES, "Permission denied (EACCES)"),
    ],
)
def test_the_line_names_what_where_node_reason_free_space_and_hint(tmp_path: Path, number: int, words: str) -> None:
    path = tmp_path / "not yet" / "there"
    with pytest.raises(StorageError) as caught, storage.writing("model", path, "start again"):
        raise OSError(number, os.strerror(number))
    line = str(caught.value)
    assert line.startswith(f"model: cannot write {path} on {NODE}: ")
    assert words in line
    assert " GiB free; " in line
    assert line.endswith("; start again")
    assert "\n" not in line
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "x"), ConnectionResetError(errno.ECONNRESET, "x"), KeyError("x")])
def test_other_errors_pass_as_they_are(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)) as caught, storage.writing("model", tmp_path):
        raise error
    assert caught.value is error


def test_an_error_of_ours_passes_even_if_storage_was_its_cause(tmp_path: Path) -> None:
    ours = UserError("x", got="a file of another user", expected="ours")
    with pytest.raises(UserError, match="a file of another user"), storage.writing("model", tmp_path):
        raise ours from PermissionError(errno.EACCES, "denied")


@pytest.mark.parametrize(
    "write",
    [
        lambda place: (place / "a").write_bytes(bytes(2 << 20)),
        lambda place: torch.save(torch.from_numpy(BIG), place / "a"),
        lambda place: torch.save(torch.from_numpy(BIG), (place / "a").open("wb")),
        lambda place: save_file({"a": BIG}, place / "a"),
        lambda place: make_model(place / "a", MadeModel(hidden=256), seed=0),
    ],
    ids=["python", "torch by path", "torch by file", "safetensors", "make_model"],
)
def test_every_way_of_writing_says_that_the_disk_is_full(disk: Path, write: Callable[[Path], object]) -> None:
    full = r"No space left on device \(ENOSPC\), .* of 0\.001 GiB free; make room there"
    with pytest.raises(StorageError, match=full), storage.writing("model", disk):
        write(disk)
    assert not [path for path in disk.iterdir() if path.is_dir()]


def test_torchs_errors_on_a_disk_with_room_are_not_explained_by_it(tmp_path: Path) -> None:
    assert storage.explain(RuntimeError("[enforce fail at inline_container.cc:1] unexpected pos 1 vs 2"), "model", tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_record_is_written_whole_or_not_at_all_and_closing_is_quiet(disk: Path) -> None:
    lines = JsonLines(disk / "x.jsonl")
    lines.write({"a": 1})
    fill(disk)
    for _ in range(2):
        with pytest.raises(StorageError, match=r"records of the run: cannot write .*x\.jsonl on "):
            lines.write({"b": "x" * 8192})
    assert (disk / "x.jsonl").read_bytes() == b'{"a":1}\n'
    (disk / "filler").unlink()
    lines.write({"c": 3})
    lines.close()
    assert Tail(disk / "x.jsonl").poll() == [{"a": 1}, {"c": 3}]


def test_the_rendezvous_file_is_whole_or_not_there(disk: Path) -> None:
    fill(disk)
    with pytest.raises(StorageError, match="the controller's address: cannot write"):
        keys.write(disk, keys.rendezvous("tcp://127.0.0.1:1", keys.generate()))
    assert [path.name for path in disk.iterdir()] == ["filler"]


def test_a_process_whose_log_takes_no_reason_is_explained_by_the_disk(disk: Path) -> None:
    program = "import sys; print('error: ' + 'x' * 9000, file=sys.stderr); sys.exit(1)"
    (disk / "logs").mkdir()
    fill(disk)
    child = Child("trainer", [sys.executable, "-c", program], disk / "logs" / "trainer.log")
    assert child.wait(30)
    error = failures.failure([child])
    assert isinstance(error, StorageError)
    assert str(error).startswith(
        f"log of trainer, which ended with status {child.returncode}: cannot write {child.log} on {NODE}: No space"
    )


@pytest.mark.parametrize("said", ["while the disk is full", "after a line that was cut off"])
def test_a_process_whose_disk_was_full_for_a_moment_is_explained_by_its_own_words(disk: Path, said: str) -> None:
    """A rank says the error here: a process that the child has started."""
    rank = "from asyncmoe import process, errors; process.say(errors.WeightSyncError('three ranks are late'))"
    written = "" if said.startswith("while") else "sys.stdout.write('half a li'); sys.stdout.flush(); "
    program = f"import subprocess, sys; {written}subprocess.run([sys.executable, '-c', sys.argv[1]]); sys.exit(1)"
    (disk / "logs").mkdir()
    if not written:
        fill(disk)
    child = Child("trainer", [sys.executable, "-c", program, rank], disk / "logs" / "trainer.log")
    assert child.wait(30)
    (disk / "filler").unlink(missing_ok=True)
    assert child.why() == "three ranks are late"
    assert str(failures.failure([child])) == "three ranks are late"


def test_an_error_says_which_role_of_which_node_met_it_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AsyncmoeError) as caught, named("controller"), named("trainer.3"):
        raise UserError("key", got=1, expected=2)
    say(caught.value)
    say(UserError("key", got=1, expected=2))
    assert capsys.readouterr().err == f"error: trainer.3 on {NODE}: key: got 1, expected 2\nerror: key: got 1, expected 2\n"


def test_a_new_directory_deletes_what_killed_processes_left_for_it_and_nothing_else(tmp_path: Path) -> None:
    others = [tmp_path / name for name in (".out-abcdefgh", ".out", f".other.{NODE}-abcdefgh", ".out.elsewhere-abcdefgh")]
    for left in (*others, tmp_path / f".out.{NODE}-abcdefgh"):
        left.mkdir()
    with storage.new_directory("model", tmp_path / "out") as first:
        (first / "file").write_text("of a living process")
        with pytest.raises(KeyError), storage.new_directory("model", tmp_path / "out"):
            raise KeyError
        assert set(tmp_path.iterdir()) == {*others, first}
    assert set(tmp_path.iterdir()) == {*others, tmp_path / "out"}
    assert (tmp_path / "out" / "file").read_text() == "of a living process"


def test_places_where_nothing_can_be_made_are_one_line_for_every_command_that_writes_a_model(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    (tmp_path / "file").touch()
    for out, line in (
        (
            Path("/proc/nope/out"),
            "/proc/nope/out: got a path where in /proc nothing can be made (No such file or directory), expected a path",
        ),
        (tmp_path / "link/out", f"got a path where in {tmp_path / 'link'} nothing can be made"),
        (tmp_path / "file/out", "choose a path with no file among its parts"),
    ):
        for make in (partial(make_model, out, MadeModel(), seed=0), partial(storage.check_new, "model", out)):
            with pytest.raises(AsyncmoeError) as caught:
                make()
            assert line in str(caught.value)
            assert "\n" not in str(caught.value)
    storage.check_new("model", tmp_path / "new/out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_an_export_refuses_its_place_before_it_starts_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export.intact, "chosen", lambda run_dir, step: tmp_path / "checkpoint")
    with pytest.raises(DataError, match="/proc/nope/out: got a path where in /proc nothing can be made"):
        export.export(tmp_path, Path("/proc/nope/out"))
    with pytest.raises(DataError, match="got an existing path, expected a new path"):
        export.export(tmp_path, tmp_path)


def test_a_signal_deletes_an_unfinished_directory_even_in_a_destructor(tmp_path: Path) -> None:
    """Where an exception of its handler would be lost."""
    script = """
import signal, sys
from pathlib import Path
from asyncmoe.storage import new_directory

class Last:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)

with new_directory("model", Path(sys.argv[1]), (signal.SIGTERM,)) as scratch:
    assert scratch.is_dir()
    Last()
"""
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path / "out")], timeout=60, check=False)
    assert ended.returncode == -signal.SIGTERM
    assert not list(tmp_path.iterdir())

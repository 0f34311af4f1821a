"""Files that cannot be written: the one line, on real disks that are full."""

from __future__ import annotations

import errno
import os
import socket
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
from asyncmoe.errors import AsyncmoeError, StorageError, UserError
from asyncmoe.launch import run_processes
from asyncmoe.models.make import make_model
from asyncmoe.process import Child, named, say
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


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES])
def test_the_line_names_what_where_node_reason_free_space_and_hint(tmp_path: Path, number: int) -> None:
    path = tmp_path / "not yet" / "there"
    with pytest.raises(StorageError) as caught, storage.writing("model", path, "start again"):
        raise OSError(number, os.strerror(number))
    line = str(caught.value)
    assert line.startswith(f"model: cannot write {path} on {NODE}: ")
    assert f"{os.strerror(number)} ({errno.errorcode[number]})" in line
    assert " GiB free; " in line
    assert line.endswith("; start again")
    assert "\n" not in line
    assert caught.value.exit_code == 2


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


def test_a_process_whose_log_takes_no_reason_is_explained_by_the_disk(disk: Path) -> None:
    program = "import sys; print('error: ' + 'x' * 9000, file=sys.stderr); sys.exit(1)"
    (disk / "logs").mkdir()
    fill(disk)
    child = Child("trainer", [sys.executable, "-c", program], disk / "logs" / "trainer.log")
    assert child.wait(30)
    error = run_processes.root_cause([child])
    assert isinstance(error, StorageError)
    assert str(error).startswith(
        f"log of trainer, which ended with status {child.returncode}: cannot write {child.log} on {NODE}: No space"
    )


def test_an_error_says_which_role_of_which_node_met_it_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AsyncmoeError) as caught, named("controller"), named("trainer.3"):
        raise UserError("key", got=1, expected=2)
    say(caught.value)
    say(UserError("key", got=1, expected=2))
    assert capsys.readouterr().err == f"error: trainer.3 on {NODE}: key: got 1, expected 2\nerror: key: got 1, expected 2\n"


def test_a_new_directory_appears_whole_beside_those_of_other_processes_or_not_at_all(tmp_path: Path) -> None:
    with storage.new_directory("model", tmp_path / "out") as first:
        (first / "file").write_text("of a living process")
        with pytest.raises(KeyError), storage.new_directory("model", tmp_path / "out"):
            raise KeyError
        assert set(tmp_path.iterdir()) == {first}
    assert set(tmp_path.iterdir()) == {tmp_path / "out"}
    assert (tmp_path / "out" / "file").read_text() == "of a living process"


def test_places_where_nothing_can_be_made_are_one_line_for_every_command_that_writes_a_model(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    (tmp_path / "file").touch()
    for out, said in (
        (Path("/proc/nope/out"), "nothing can be created in /proc"),
        (tmp_path / "link/out", f"nothing can be created in {tmp_path / 'link'}"),
        (tmp_path / "file/out", "choose a path with no file among its parts"),
    ):
        for make in (partial(make_model, out, MadeModel(), seed=0), partial(storage.check_new, "model", out)):
            with pytest.raises(AsyncmoeError, match=said):
                make()
    storage.check_new("model", tmp_path / "new/out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]

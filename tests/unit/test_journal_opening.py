"""Who may open a payload store: one writer, of one run, and its owner alone."""

from __future__ import annotations

import os
import shutil
import stat
import struct
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from asyncmoe import config as configuration
from asyncmoe import models
from asyncmoe.config import Config
from asyncmoe.config.model import MadeModel
from asyncmoe.errors import AsyncmoeError, ConfigError, DataError, StorageError, UserError
from asyncmoe.journal.belonging import Belonging
from asyncmoe.journal.states import States
from asyncmoe.journal.states_file import FILE
from asyncmoe.launch import local
from asyncmoe.models.make import make_model
from asyncmoe.rollout import journaling
from tests.unit.doc_pages import ROOT
from tests.unit.journal_stores import crc, everything, opened, payload, stored


def test_a_second_writer_is_refused_with_the_number_of_the_first(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from asyncmoe.journal.segments import Segments\n"
        "store = Segments.open(Path(sys.argv[1]), 'x', max_bytes=1 << 20); print('open', flush=True); sys.stdin.read()"
    )
    command, environment = [sys.executable, "-c", script, str(tmp_path / "store")], {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "open\n"
        with pytest.raises(UserError, match=rf"^journal: got .*store, which process {first.pid} on .* writes, expected one writer; "):
            opened(tmp_path / "store", identity="x")
        opened(tmp_path / "store", identity="x", writer=1).close()
        first.kill()
    with closing(opened(tmp_path / "store", identity="x")), pytest.raises(UserError, match=f"process {os.getpid()} on"):
        opened(tmp_path / "store", identity="x")
    opened(tmp_path / "store", identity="x").close()


def test_the_segments_of_another_run_or_format_are_refused_and_left_as_they_are(tmp_path: Path) -> None:
    stored(tmp_path / "store", [5])
    file = tmp_path / "store" / "0000-00000000.segment"
    before = file.read_bytes()
    with pytest.raises(DataError, match=r"0000-00000000.segment: identity: got [0-9a-f]{16}, expected [0-9a-f]{16} as this run has; "):
        opened(tmp_path / "store", identity="run 2")
    shutil.copy(file, tmp_path / "store" / "0000-00000007.segment")
    with pytest.raises(DataError, match=r"0000-00000007.segment: got the segment 0 of writer 0, expected the segment of its name"):
        opened(tmp_path / "store")
    (tmp_path / "store" / "0000-00000007.segment").unlink()
    newer = struct.pack("<8sI", b"AMOEsegm", 2) + before[12:60]
    file.write_bytes(newer + struct.pack("<I", crc(newer)) + before[64:])
    with pytest.raises(DataError, match="format: got 2, expected 1; use the version of asyncmoe that wrote it"):
        opened(tmp_path / "store")
    file.write_bytes(before)
    assert everything(tmp_path / "store") == [payload(0, 5)]


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(DataError, match=r"mode 0755, expected a folder of user \d+ with mode 0700; chmod 700 "):
        opened(tmp_path / "open")
    (tmp_path / "file").write_text("")
    with pytest.raises((DataError, StorageError)):
        opened(tmp_path / "file")
    before = os.umask(0)
    try:
        stored(tmp_path / "deep" / "store")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "deep" / "store").stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "deep" / "store").iterdir()} == {0o600}


def test_nothing_is_left_behind_by_a_store_that_cannot_be_opened(tmp_path: Path) -> None:
    stored(tmp_path / "store", [5])
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(AsyncmoeError):
            opened(tmp_path / "store", identity="another")
    opened(tmp_path / "store").close()
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_folder_that_others_may_enter_or_that_cannot_be_made_keeps_no_journal(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    with pytest.raises(DataError, match=r"^journal: got .*shared of user \d+ with mode 1777, expected a folder of user \d+ "):
        States.open(tmp_path / "shared", {})
    assert list((tmp_path / "shared").iterdir()) == []
    with pytest.raises(UserError, match=r"^journal.folder: got /proc/x, which cannot be made \(No such file or directory\), "):
        States.open(Path("/proc/x"), {})


def test_what_a_journal_does_not_belong_to_is_refused_without_opening_it(tmp_path: Path) -> None:
    folder, ours = tmp_path / "journal", {"run.seed": "3", "rollout.group_size": "8"}
    first = Belonging.of_run(tmp_path, ours)
    first.check("journal.folder", folder)
    States.open(folder, first.identity).close()
    first.note(begun=True)
    first.note()
    again = Belonging.of_run(tmp_path, ours)
    assert again.begun
    again.check("journal.folder", folder)
    file = (folder / FILE).read_bytes()
    with pytest.raises(DataError, match=r"^rollout.group_size: got 4, expected 8, as the journal .* has it; set it back, or delete .*"):
        Belonging.of_run(tmp_path, {**ours, "rollout.group_size": "4"}).check("journal.folder", folder)
    with pytest.raises(ConfigError, match=r"^journal.redis: got a server, and the run's journal is in a folder, expected the journal in "):
        Belonging.of_run(tmp_path, ours, redis=True).check("journal.folder", folder)
    assert (folder / FILE).read_bytes() == file
    (folder / FILE).unlink()
    Belonging.of_run(tmp_path, {**ours, "run.seed": "4"}).check("journal.folder", folder)  # it was deleted: all is sampled again
    (tmp_path / "journal.json").write_text('{"journal": "ab", "begun": true}')  # of an earlier version
    Belonging.of_run(tmp_path, {}, redis=True).check("journal.folder", folder)


def test_a_command_that_is_refused_changes_nothing(tmp_path: Path) -> None:
    make_model(tmp_path / "model", MadeModel(), seed=0)

    def config(group_size: int) -> Config:
        settings = [f"run.dir={tmp_path / 'run'}", f"model.path={tmp_path / 'model'}", f"rollout.group_size={group_size}"]
        return configuration.load(ROOT / "examples" / "demo.yaml", settings)

    file = local.prepare(config(8))
    hf = models.hf_config_of(config(8))
    ours = journaling.belonging_of(config(8), hf, models.recording(config(8), hf))
    States.open(tmp_path / "run" / "journal", ours.identity).close()
    ours.note(begun=True)
    before = file.read_bytes()
    with pytest.raises(DataError, match=r"^rollout.group_size: got 4, expected 8, as the journal .* has it; "):
        local.prepare(config(4))
    assert file.read_bytes() == before
    local.prepare(config(8))

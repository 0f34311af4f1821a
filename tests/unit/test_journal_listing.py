"""`asyncmoe journal RUN`: what lies in the segments, and what of it is damaged."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from asyncmoe.cli import app
from asyncmoe.errors import DataError
from asyncmoe.journal.belonging import Belonging
from asyncmoe.journal.segment_listing import examine, folder_of
from tests.unit.journal_stores import opened, stored


def test_the_command_counts_and_verifies_what_another_process_writes(tmp_path: Path) -> None:
    store = tmp_path / "run" / "journal" / "segments"
    places = stored(store, [100, 5, 300, 70], segment_bytes=300)
    before = {file.name: file.read_bytes() for file in store.iterdir()}
    with closing(opened(store)) as writing:
        writing.append([b"under way"])
        done = CliRunner().invoke(app, ["journal", str(tmp_path / "run")])
        assert done.exit_code == 0, done.output
    first, *_, last = done.output.splitlines()[1:]
    assert first.split() == ["0000-00000000.segment", "2", "0.00", "MiB", "whole"]
    assert last.split()[:2] == ["4", "4"] or last.split()[:2] == ["4", "5"]
    assert last.endswith("   whole")
    assert {name: (store / name).read_bytes() for name in before if name.endswith(".segment")} == {
        name: data for name, data in before.items() if name.endswith(".segment")
    }
    data = bytearray(before["0000-00000000.segment"])
    data[places[0].offset + 30] ^= 1
    data[places[1].offset] ^= 1
    (store / "0000-00000000.segment").write_bytes(data)
    done = CliRunner().invoke(app, ["journal", str(store)])
    assert done.exit_code == 1
    assert "offset 64: a damaged payload of 100 bytes; offset 192: 32 damaged bytes" in done.output
    assert done.output.splitlines()[-1].endswith("1 damaged")


def test_a_torn_end_is_damage_only_where_a_kill_cannot_leave_it(tmp_path: Path) -> None:
    stored(tmp_path / "store", [100])
    stored(tmp_path / "store", [100])
    for file in (tmp_path / "store").glob("*.segment"):
        file.write_bytes(file.read_bytes() + b"torn end")
    old, new = examine(tmp_path / "store")
    assert (old.whole, len(old.damaged), old.unfinished) == (False, 1, 0)
    assert (new.whole, len(new.damaged), new.unfinished) == (True, 0, 8)


@pytest.mark.parametrize(("name", "problem"), [("0000-00000003.segment", "the segment 0 of writer 0"), ("0000-00000000.segment", "header")])
def test_files_that_cannot_be_verified_are_named(tmp_path: Path, name: str, problem: str) -> None:
    stored(tmp_path / "store", [100])
    data = bytearray((tmp_path / "store" / "0000-00000000.segment").read_bytes())
    data[20] ^= 1 if problem == "header" else 0
    (tmp_path / "store" / name).write_bytes(data)
    last = list(examine(tmp_path / "store"))[-1]
    assert not last.whole
    assert problem in last.problem


def test_a_folder_without_segments_is_refused(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "absent"):
        with pytest.raises(DataError, match="without segments, expected a folder with segments of a journal; name the run directory"):
            folder_of(place)


def test_a_run_with_its_journal_in_redis_is_told_where_to_look(tmp_path: Path) -> None:
    address = "redis://redis.site:6379/2"
    (tmp_path / "config.yaml").write_text(f"journal: {{redis: '{address}'}}")
    refused = CliRunner().invoke(app, ["journal", str(tmp_path)])
    assert str(refused.exception).startswith(
        f"journal: got {tmp_path}, whose journal is in {address}, expected a run whose journal is in a folder"
    )
    assert "--pattern 'asyncmoe:*:*'" in str(refused.exception)
    ours = Belonging.of_run(tmp_path, {})
    ours.note()
    refused = CliRunner().invoke(app, ["journal", str(tmp_path)])
    assert isinstance(refused.exception, DataError)
    assert f"redis-cli --scan --pattern 'asyncmoe:{ours.run}:*' lists its keys" in str(refused.exception)

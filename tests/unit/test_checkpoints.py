"""Directories, manifests and retention of checkpoints, on files of any content."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncmoe import checkpoints
from asyncmoe.checkpoints import Retention, directories, intact, manifest
from asyncmoe.errors import DataError, UserError
from asyncmoe.trajectory import _C

FILES = {"__0_0.distcp": bytes(range(256)) * 40, "__1_0.distcp": b"\x07" * 5000, ".metadata": b"m" * 300, "common.pt": b"c" * 900}


def saved(
    run: Path, step: int, keep: int = 9, keep_every: int = 0, files: dict[str, bytes] | None = None, asked: Retention | None = None
) -> Path:
    checkpoints.start(run, step)
    for name, content in (FILES if files is None else files).items():
        path = checkpoints.temporary(run, step) / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    return checkpoints.finish(run, step, {"step": step}, asked or Retention(keep, keep_every))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (lambda at: flip(at / "__0_0.distcp"), "__0_0.distcp has other content (CRC-32C "),
    "cut": (lambda at: os.truncate(at / "__1_0.distcp", 4999), "__1_0.distcp has 4999 bytes, expected 5000"),
    "missing": (lambda at: (at / "__1_0.distcp").unlink(), "__1_0.distcp cannot be read (No such file or directory)"),
    "empty facts": (lambda at: os.truncate(at / "asyncmoe.json", 0), "asyncmoe.json has 0 bytes, expected "),
    "no manifest": (lambda at: (at / "manifest.json").unlink(), "manifest.json: got No such file"),
    "manifest flipped": (lambda at: flip(at / "manifest.json"), "manifest.json: got "),
    "a folder in place of a part": (lambda at: ((at / "common.pt").unlink(), (at / "common.pt").mkdir()), "common.pt "),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_the_checkpoint_before_is_taken(damage: str, tmp_path: Path) -> None:
    before, newest = saved(tmp_path, 8), saved(tmp_path, 12)
    assert checkpoints.survey(tmp_path).newest == newest
    change, said = DAMAGES[damage]
    change(newest)
    found = checkpoints.survey(tmp_path)
    assert found.newest == before
    (line,) = found.lines
    assert line.startswith(f"checkpoint step-00000012 is damaged: {said}")
    assert line.endswith("; the run resumes from step-00000008")
    shares = [intact.fault(newest, rank=rank, world=3) for rank in range(3)]
    assert any(share is not None and share.startswith(said) for share in shares)


def test_nothing_is_taken_if_every_checkpoint_is_damaged(tmp_path: Path) -> None:
    flip(saved(tmp_path, 3) / "common.pt")
    (saved(tmp_path, 4) / ".metadata").unlink()
    with pytest.raises(DataError) as refused:
        checkpoints.survey(tmp_path)
    assert "step-00000004 is damaged: .metadata cannot be read" in str(refused.value)
    assert "step-00000003 is damaged: common.pt has other content" in str(refused.value)
    assert [path.name for path in directories.complete(tmp_path)] == ["step-00000003", "step-00000004"]


def test_a_later_format_is_refused_and_not_taken_for_damage(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    newest = saved(tmp_path, 2)
    path = newest / "manifest.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(UserError, match="got format 2, expected format 1; a later asyncmoe wrote it"):
        checkpoints.survey(tmp_path)


def test_a_file_that_this_machine_cannot_read_is_refused_and_not_taken_for_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = saved(tmp_path, 2)

    def stale(path: Path, *, sync: bool = False) -> manifest.Sealed:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(manifest, "seal", stale)
    with pytest.raises(UserError, match="got Stale file handle, expected a readable file"):
        intact.fault(newest)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../b", ""])
def test_names_that_lead_out_of_the_checkpoint_are_refused(name: str, tmp_path: Path) -> None:
    manifest.write(tmp_path, {name: manifest.Sealed(1, 2)})
    with pytest.raises(DataError, match="a file named"):
        manifest.read(tmp_path)


def test_only_small_files_are_read_before_a_run_starts(tmp_path: Path) -> None:
    path = saved(tmp_path, 2)
    flip(path / "__0_0.distcp")
    assert intact.fault(path, most_bytes=6000 + 900) is None
    assert intact.fault(path) is not None
    os.truncate(path / "__0_0.distcp", 3)
    assert intact.fault(path, most_bytes=0) == "__0_0.distcp has 3 bytes, expected 10240"


@given(
    st.dictionaries(st.text(st.characters(codec="utf-8", exclude_characters="/\0."), min_size=1), st.integers(0, 1 << 40)),
    st.integers(1, 9),
)
def test_ranks_share_all_files(sizes: dict[str, int], world: int) -> None:
    files = {name: manifest.Sealed(size, 0) for name, size in sizes.items()}
    shares = [manifest.share(files, rank, world) for rank in range(world)]
    assert sorted(name for share in shares for name in share) == sorted(files)
    loads = [sum(sizes[name] for name in share) for share in shares]
    assert max(loads) <= sum(sizes.values()) / world + max(sizes.values(), default=0)


@given(st.binary(max_size=1000), st.integers(0, 2**32 - 1))
def test_a_manifest_comes_back(content: bytes, digest: int) -> None:
    files = {"ä/b 1.distcp": manifest.Sealed(1 << 45, digest), "x": manifest.Sealed(len(content), _C.crc32c_by_table(content))}
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "x").write_bytes(content)
        manifest.write(Path(place), files)
        assert manifest.read(Path(place)) == files
        assert manifest.seal(Path(place, "x"), sync=True) == files["x"]


@given(st.lists(st.integers(0, 400), unique=True), st.integers(1, 4), st.integers(0, 60))
def test_what_is_kept_does_not_depend_on_when_it_is_asked(steps: list[int], keep: int, every: int) -> None:
    """A checkpoint deleted by a save would not be kept by a later save."""
    left, asked = set[int](), Retention(keep, every)
    for step in sorted(steps):
        left = asked.kept(left | {step})
    assert left == asked.kept(steps)
    assert set(sorted(steps)[-keep:]) <= left
    assert not every or {step // every for step in left} >= {step // every for step in steps if step >= every}


WINDOWS = st.one_of(st.integers(1, 60), st.just("all"))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 4), WINDOWS, st.integers(0, 20))
def test_a_recorded_window_has_its_checkpoint_and_length(gaps: list[int], keep: int, recorded: Any, warmup: int) -> None:
    """Whichever steps are saved: the controller moves the window after each save, as it does here."""
    asked, steps = Retention(keep, recorded=recorded, warmup=warmup), [warmup, *(warmup + sum(gaps[: n + 1]) for n in range(len(gaps)))]
    left, since, most = set[int](), warmup, max(gaps)
    for step in steps if warmup else steps[1:]:
        left = asked.kept(left | {step}, since)
        begin = asked.begins(left, since)
        assert begin is not None
        assert begin >= since
        assert begin in left or begin == warmup == 0
        assert begin <= asked.oldest(left), "a resume is part of it"
        if recorded == "all":
            assert (begin, len(left)) <= (warmup, keep + bool(warmup))
        else:
            assert min(recorded, step - warmup) <= step - begin
            assert step - begin < 2 * recorded + most or begin == asked.oldest(left)
            assert len(left) <= keep + 3
        since = begin


def test_a_window_whose_checkpoint_is_deleted_begins_with_the_next_one() -> None:
    asked = Retention(2, recorded="all", warmup=4)
    assert asked.kept({2, 4, 8, 12, 16}) == {4, 12, 16}
    assert asked.begins({4, 12, 16}, 0) == 4
    assert asked.begins({12, 16}, 0) == 12
    assert asked.begins({4, 12, 16}, 8) == 12, "its batches are deleted"
    assert asked.begins({2}, 0) is None, "the warm-up is not recorded"
    assert (Retention(2).begins({8, 12, 16}, 0), Retention(2).begins({16}, 0)) == (12, 16)


def test_what_is_not_a_complete_checkpoint_is_none(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    for name in ("step-00000009.writing", "step-00000009.deleting", "step-00000009.damaged", "step-9", "step-0000001x", "notes"):
        (place / name).mkdir(parents=True)
    (place / "step-00000003").write_text("a file")
    assert checkpoints.newest(tmp_path) is None
    assert checkpoints.newest(tmp_path / "none") is None
    path = saved(tmp_path, 123456789)
    assert checkpoints.newest(tmp_path) == path
    assert {one.name for one in place.iterdir() if one.is_dir()} == {"notes", "step-0000001x", "step-00000009.damaged", path.name, "step-9"}


def test_everything_is_on_its_disk_before_it_is_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of system calls, which a power cut may interrupt anywhere."""
    run = tmp_path / "run"
    saved(run, 1)
    calls: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def traced_fsync(handle: int) -> None:
        calls.append(("fsync", Path(os.readlink(f"/proc/self/fd/{handle}")).name))
        fsync(handle)

    def traced_rename(source: Path, target: Path) -> None:
        calls.append(("rename", Path(target).name))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(os, "rename", traced_rename)
    saved(run, 2, keep=1)
    visible = calls.index(("rename", "step-00000002"))
    assert {name for call, name in calls[:visible] if call == "fsync"} == {
        *FILES,
        "asyncmoe.json",
        f".manifest.json.{os.getpid()}",  # renamed once it is synced
        "step-00000002.writing",
    }
    assert calls[visible - 1] == ("fsync", "step-00000002.writing")
    assert calls[visible + 1] == ("fsync", "checkpoints")
    assert calls.index(("rename", "step-00000001.deleting")) > visible + 1


class Killed(BaseException):
    """The process ends here."""


def test_a_kill_at_any_moment_leaves_an_intact_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is killed at every call that changes names on the disk, in a save that also replaces and deletes."""
    moments, newest = 0, set()
    for last in range(1, 1000):
        run = tmp_path / str(last)
        for step in (1, 2):
            saved(run, step, keep=2)
        left = last

        def killing(call: Callable[..., Any]) -> Callable[..., Any]:
            def killed(*arguments: Any, **options: Any) -> Any:
                nonlocal left
                left -= 1
                if left == 0:
                    raise Killed
                return call(*arguments, **options)

            return killed

        with monkeypatch.context() as patched, contextlib.suppress(Killed):
            for name in ("fsync", "rename", "unlink", "rmdir", "mkdir"):
                patched.setattr(os, name, killing(getattr(os, name)))
            saved(run, 2, keep=1, files={"x": b"again"})
        found = checkpoints.survey(run)
        assert not found.damaged
        newest.add(found.newest.name)
        assert intact.fault(saved(run, 3, keep=1)) is None
        assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000003"]
        if left > 0:
            break
        moments += 1
    assert moments > 20
    assert newest == {"step-00000001", "step-00000002"}, "step 1 alone is left while step 2 is replaced"

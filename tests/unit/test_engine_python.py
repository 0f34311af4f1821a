"""Interpreters allowed for engines, checked before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from asyncmoe.doctor import pythons
from asyncmoe.doctor.pythons import check_engine_python
from asyncmoe.errors import UserError

SGLANG = {"sglang-0.5.23.dist-info/METADATA": "Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n"}
ASYNCMOE = {"asyncmoe/__init__.py": "", "asyncmoe/reshard/_C.py": "CUDA = False", "asyncmoe/trajectory/_C.py": ""}


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def python(folder: Path, files: dict[str, str]) -> Path:
    """This interpreter without its packages, but with these files."""
    for name, text in files.items():
        (folder / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "site" / name).write_text(text)
    return script(folder / "python", f'cd /; PYTHONPATH={folder / "site"} exec {sys.executable} -S "$@"')


def refused(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        check_engine_python(path)
    text = str(caught.value)
    assert text.startswith(f"engines.python: got {path}: ")
    assert "\n" not in text
    return text.removeprefix(f"engines.python: got {path}: ")


def test_a_python_with_both_packages_is_accepted(tmp_path: Path) -> None:
    check_engine_python(python(tmp_path, SGLANG | ASYNCMOE))


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({}, "SGLang is not installed; asyncmoe is not found, expected a Python that has SGLang and asyncmoe; run: make setup"),
        (SGLANG, "asyncmoe is not found,"),
        (ASYNCMOE, "SGLang is not installed,"),
        (SGLANG | {"asyncmoe/__init__.py": ""}, "No module named 'asyncmoe.trajectory'"),
    ],
)
def test_what_a_python_lacks_is_named(tmp_path: Path, files: dict[str, str], told: str) -> None:
    assert refused(python(tmp_path, files)).startswith(told)


def test_what_is_no_python_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").write_text("hello")
    (tmp_path / "elf").write_bytes(b"\x7fELF garbage")
    (tmp_path / "elf").chmod(0o755)
    assert refused(tmp_path / "none").startswith("there is no ")
    for name, why in (("text", "Permission denied"), ("elf", "Exec format error")):
        assert refused(tmp_path / name).startswith(f"{tmp_path / name} cannot be run: {why}, expected")
    assert refused(script(tmp_path / "silent", "exit 0")).startswith("no answer of a Python, expected")
    assert "ended with status 3: bad library, expected" in refused(script(tmp_path / "fails", "echo 'bad library' >&2; exit 3"))
    monkeypatch.setattr(pythons, "_WITHOUT_TORCH_S", 0.3)
    assert "did not end within 0 s, expected" in refused(script(tmp_path / "hangs", "exec sleep 20"))

"""Which interpreters an engine may have, asked before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from asyncmoe.engines import engine_python
from asyncmoe.engines.engine_python import check_engine_python
from asyncmoe.errors import UserError


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def python(folder: Path, *packages: str) -> Path:
    """This interpreter without its packages, but with empty ones of the given names."""
    for name in packages:
        (folder / "site" / name).mkdir(parents=True)
        (folder / "site" / name / "__init__.py").touch()
    return script(folder / "python", f'cd /; PYTHONPATH={folder / "site"} exec {sys.executable} -S "$@"')


def refused(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        check_engine_python(path)
    text = str(caught.value)
    assert text.startswith(f"engines.python: got {path}")
    assert "\n" not in text
    return text.removeprefix(f"engines.python: got {path}")


def test_a_python_with_both_packages_is_accepted(tmp_path: Path) -> None:
    path = python(tmp_path, "sglang", "asyncmoe", "asyncmoe/reshard")
    assert check_engine_python(path) == path


@pytest.mark.parametrize(
    ("packages", "told"),
    [
        ((), " without asyncmoe and sglang, expected a Python that has SGLang and asyncmoe; run: make setup"),
        (("sglang",), " without asyncmoe,"),
        (("asyncmoe",), " without sglang,"),
        (("asyncmoe", "sglang"), " which cannot import asyncmoe.reshard (No module named 'asyncmoe.reshard')"),
    ],
)
def test_what_a_python_lacks_is_named(tmp_path: Path, packages: tuple[str, ...], told: str) -> None:
    assert refused(python(tmp_path, *packages)).startswith(told)


def test_what_is_no_python_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").write_text("hello")
    (tmp_path / "elf").write_bytes(b"\x7fELF garbage")
    (tmp_path / "elf").chmod(0o755)
    assert refused(tmp_path / "none").startswith(": No such file or directory, expected a Python")
    assert refused(tmp_path / "text").startswith(": Permission denied, expected")
    assert "Exec format error" in refused(tmp_path / "elf")
    assert refused(script(tmp_path / "silent", "exit 0")).startswith(": no answer of a Python, expected")
    assert refused(script(tmp_path / "fails", "echo 'bad library' >&2; exit 3")).startswith(": bad library, expected")
    monkeypatch.setattr(engine_python, "_ANSWER_S", 0.3)
    assert refused(script(tmp_path / "hangs", "exec sleep 20")).startswith(": no answer in 0 s, expected")

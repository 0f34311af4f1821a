"""What `asyncmoe doctor --compare` says of the reports of several nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from doctor_machines import NODE, SOURCES, but

from asyncmoe.doctor import command, finding
from asyncmoe.doctor.compare import Report, differences, versions_of
from asyncmoe.doctor.facts import Machine
from asyncmoe.errors import ConfigError, DataError


def report(machine: Machine, digest: str | None = "d1" * 32) -> Report:
    return Report(machine.host, versions_of(machine, digest), {"torch": finding.ok("2.9.0")})


def told(**changed: Report) -> list[str]:
    """How four nodes differ, which are equal but for those given."""
    return differences({f"node{number:02}": report(NODE) for number in range(1, 5)} | changed)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("asyncmoe", "0.1.0 (ba9876543210)", "asyncmoe: node02: got 0.1.0 (ba9876543210)"),
        ("trainer__version", "3.12.1", "version of the trainer's Python"),
        ("trainer__packages", {"transformer-engine": None}, "transformer-engine of the trainer's Python: node02: got none"),
        ("trainer__torch__cuda", "13.0", "CUDA of torch of the trainer's Python: node02: got 13.0"),
        ("trainer__extension__built_from", ("0" * 64, SOURCES[1]), "sources of asyncmoe's extension of the trainer's Python"),
        ("engine__nccl__version", 22809, "NCCL of the engines' Python: node02: got 2.28.9"),
        ("nvidia__driver", "570.9.1", "NVIDIA's driver: node02: got 570.9.1"),
    ],
)
def test_everything_that_must_agree_is_compared(path: str, value: Any, expected: str) -> None:
    (line,) = told(node02=report(but(NODE, **{path: value})))
    assert line.startswith(expected)
    (line,) = told(node02=report(NODE, "ee" * 32))
    assert line.startswith("configuration: node02: got eeeeeeeeeeee")


def write(folder: Path, name: str, found: Report) -> Path:
    file = folder / f"{name}.json"
    file.write_bytes(msgspec.json.encode(found))
    return file


def test_the_command_compares_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, again = write(tmp_path, "one", report(NODE)), write(tmp_path, "again", report(but(NODE, trainer__packages={"torch": "2.8.0"})))
    two = write(tmp_path, "two", replace(report(NODE), host="node02"))
    assert command.compared([one, two]) == 0
    assert capsys.readouterr().out == "2 nodes have the same versions\n"
    assert command.compared([one, two, again]) == 1
    said = f"torch of the trainer's Python: node01 ({again}): got 2.8.0, expected 2.9.0+cu128, as on 2 of 3 nodes"
    assert capsys.readouterr().out.startswith(said), "two reports of a node are told apart"
    with pytest.raises(ConfigError, match="at least two"):
        command.compared([one])


@pytest.mark.parametrize("text", [None, "", "error: no such node", '{"host": "a", "versions": 3, "checks": {}}', "[]"])
def test_what_is_no_report_is_named(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "node07.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(DataError, match=r"node07\.json"):
        command.compared([write(tmp_path, "one", report(NODE)), file])

"""What `asyncmoe doctor --compare` says of the reports of several nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from doctor_machines import LAPTOP, NODE, SOURCES, but

from asyncmoe.doctor import command, report
from asyncmoe.doctor.examination import examine
from asyncmoe.doctor.facts import Machine
from asyncmoe.doctor.report import Report, differences
from asyncmoe.errors import ConfigError, DataError


def nodes(**changed: Machine) -> dict[str, Report]:
    """Four equal nodes, but for those given."""
    names = [f"node{number:02}" for number in range(1, 5)]
    return {name: Report(but(changed.get(name, NODE), host=name), ()) for name in names}


def told(**changed: Machine) -> list[str]:
    return [str(difference) for difference in differences(nodes(**changed))]


def test_equal_nodes_do_not_differ() -> None:
    assert told() == []


def test_a_version_is_one_line_with_node_and_hint() -> None:
    older = but(NODE, trainer__packages={"megatron-core": "0.16.0"})
    (line,) = told(node03=older)
    assert line == ("megatron-core of the trainer's Python: node03 has 0.16.0, 3 others 0.16.1; install megatron-core 0.16.1 on node03")


def test_nodes_that_deviate_alike_share_a_line_and_others_do_not() -> None:
    older, oldest = but(NODE, engine__packages={"sglang": "0.5.22"}), but(NODE, engine__packages={"sglang": "0.5.9"})
    lines = told(node01=older, node02=older, node04=oldest)
    assert lines == [
        "sglang of the engines' Python: node03 has 0.5.23, 2 others 0.5.22; install sglang 0.5.22 on node03",
        "sglang of the engines' Python: node04 has 0.5.9, 2 others 0.5.22; install sglang 0.5.22 on node04",
    ]


def test_of_equally_many_the_newer_is_expected() -> None:
    older = but(NODE, nvidia__driver="570.9.1")
    assert told(node01=older, node02=older) == [
        "NVIDIA's driver: node01, node02 have 570.9.1, 2 others 570.86.15; install 570.86.15 on node01, node02"
    ]


def test_everything_that_must_agree_is_compared() -> None:
    changes = {
        "asyncmoe": ("0.1.0 (ba9876543210)", "asyncmoe: node02 has 0.1.0 (ba9876543210)"),
        "trainer__version": ("3.12.1", "the trainer's Python"),
        "trainer__packages": ({"transformer-engine": None}, "transformer-engine of the trainer's Python: node02 has none"),
        "trainer__torch__cuda": ("13.0", "build of torch in the trainer's Python: node02 has one for CUDA 13.0"),
        "trainer__extension__built_from": (("0" * 64, SOURCES[1]), "asyncmoe's extension in the trainer's Python"),
        "trainer__nccl__version": (22809, "NCCL of the trainer's Python: node02 has 2.28.9"),
        "engine__nccl__version": (22809, "NCCL of the engines' Python: node02 has 2.28.9"),
        "engine__version": ("3.12.1", "the engines' Python"),
        "run__digest": ("ee" * 32, "configuration: node02 has eeeeeeeeeeee"),
    }
    for path, (value, expected) in changes.items():
        lines = told(node02=but(NODE, **{path: value}))
        assert len(lines) == 1, (path, lines)
        assert lines[0].startswith(expected)
        assert lines[0].endswith("on node02")


def test_what_only_one_node_has_is_to_be_removed_there() -> None:
    more = but(NODE, engine__packages={"transformer-engine": "2.8.0"})
    assert told(node02=more) == [
        "transformer-engine of the engines' Python: node02 has 2.8.0, 3 others none; uninstall transformer-engine on node02"
    ]


def test_a_node_without_gpus_or_configuration_may_have_another_role() -> None:
    without = but(NODE, nvidia=LAPTOP.nvidia, trainer__nccl=LAPTOP.trainer.nccl, engine__nccl=None, run=None)
    assert told(node04=without) == []


def test_a_node_whose_python_does_not_start_differs() -> None:
    broken = but(NODE, engine__version=None, engine__packages={"sglang": None, "torch": None}, engine__torch=None)
    lines = told(node04=broken)
    assert "the engines' Python: node04 has none, 3 others 3.11.7; install Python 3.11.7 on node04" in lines
    assert any(line.startswith("sglang of the engines' Python: node04 has none") for line in lines)


def write(folder: Path, name: str, machine: Machine) -> str:
    file = folder / f"{name}.json"
    file.write_text(report.encode(Report(machine, examine(machine))))
    return str(file)


def test_a_report_survives_its_file(tmp_path: Path) -> None:
    for machine in (NODE, LAPTOP):
        assert report.read(Path(write(tmp_path, machine.host, machine))) == Report(machine, examine(machine))


def test_the_command_compares_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = write(tmp_path, "one", NODE), write(tmp_path, "two", but(NODE, host="node02"))
    assert command.run([one, two], as_json=False, compare=True) == 0
    assert capsys.readouterr().out == "2 nodes have the same versions\n"
    three = write(tmp_path, "three", but(NODE, host="node03", trainer__packages={"torch": "2.8.0"}))
    assert command.run([one, two, three], as_json=False, compare=True) == 1
    assert "torch of the trainer's Python: node03 has 2.8.0, 2 others 2.9.0+cu128" in capsys.readouterr().out
    assert command.run([one, two, three], as_json=True, compare=True) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["nodes"] == ["node01", "node02", "node03"]
    assert [(entry["nodes"], entry["found"]) for entry in printed["differences"]] == [(["node03"], "2.8.0")]


def test_two_reports_of_one_node_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = write(tmp_path, "before", NODE), write(tmp_path, "after", but(NODE, trainer__packages={"torch": "2.10.0"}))
    assert command.run([before, after], as_json=False, compare=True) == 1
    assert "node01 has 2.9.0+cu128, 1 other 2.10.0" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "error: no such node", '{"machine": {}, "checks": []}', '{"machine": 3}', "[]"])
def test_what_is_no_report_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "node07.json"
    file.write_text(text)
    with pytest.raises(DataError, match=r"node07\.json"):
        command.run([write(tmp_path, "one", NODE), str(file)], as_json=False, compare=True)


def test_nothing_to_compare_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least two"):
        command.run([write(tmp_path, "one", NODE)], as_json=False, compare=True)
    with pytest.raises(DataError, match=r"nosuch\.json"):
        command.run([str(tmp_path / "nosuch.json"), str(tmp_path / "nosuch.json")], as_json=False, compare=True)

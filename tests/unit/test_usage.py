"""Unknown arguments are reported in one line, like every other mistake."""

from __future__ import annotations

import sys
import tomllib
from errno import EACCES
from pathlib import Path

import pytest
import typer

from asyncmoe import cli, usage
from asyncmoe.errors import AsyncmoeError, UserError
from asyncmoe.launch import part

ROOT = Path(__file__).parents[2]


def invoke(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["asyncmoe", *arguments])
    usage.invoke(cli.app)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["run", "a.yaml", "--run.steps=3"], "got an unknown option --run.steps, expected KEY=VALUE or --help; did you mean run.steps="),
        (["export", "a", "b", "--adaptor"], "expected one of --adapter, --float8, --dtype, --step, --help; did you mean --adapter?"),
        (["plan", "examples/demo.yaml"], "asyncmoe plan: got neither, expected one of --config FILE and --nodes"),
        (["stacks", "a", "b"], "asyncmoe stacks: got unexpected extra argument"),
        (["run"], "asyncmoe run: got no CONFIG, expected YAML file that describes the run, or the directory of a run"),
        (["rum", "a.yaml"], "asyncmoe: got an unknown command rum, expected one of run, rollout, "),
        (["show", "x", "--limit", "0"], "asyncmoe show: --limit: got '0', expected greater than or equal to 1"),
        (["run", "a.yaml", "--group-size", "8"], "did you mean rollout.group_size=VALUE?"),
        (["run", "run.steps=3"], "run.steps=3: got no such file, expected a YAML configuration; the file comes first"),
        (["export", "a", "b", "--dtype", "int8"], "--dtype: got 'int8', expected one of 'float32', 'bfloat16'"),
    ],
)
def test_a_mistake_is_one_line(monkeypatch: pytest.MonkeyPatch, arguments: list[str], line: str) -> None:
    with pytest.raises(UserError) as caught:
        invoke(monkeypatch, *arguments)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_help_has_a_line_for_each_command_and_no_type_of_flags(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")  # the narrowest terminal that people have
    invoke(monkeypatch, "--help")
    shown = capsys.readouterr().out
    rows = [line[2:13].strip() for line in shown.splitlines() if line.startswith("\u2502 ")]
    options = ["--version", "--help"]
    assert sorted(rows) == sorted([*options, *typer.main.get_command(cli.app).commands])  # type: ignore[attr-defined]
    assert "bool" not in shown


def test_the_version_is_the_packages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    invoke(monkeypatch, "--version")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert capsys.readouterr().out == f"asyncmoe {declared}\n"


def test_a_command_chooses_its_status_and_ctrl_c_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    app = typer.Typer()

    @app.command()
    def work(status: int) -> None:
        if status < 0:
            raise KeyboardInterrupt
        raise typer.Exit(status)

    monkeypatch.setattr(sys, "argv", ["x", "0"])
    usage.invoke(app)
    monkeypatch.setattr(sys, "argv", ["x", "3"])
    with pytest.raises(SystemExit) as ended:
        usage.invoke(app)
    assert ended.value.code == 3
    monkeypatch.setattr(sys, "argv", ["x", "--", "-1"])
    with pytest.raises(AsyncmoeError, match=r"^interrupted$") as caught:
        usage.invoke(app)
    assert caught.value.exit_code == 130


def test_a_file_of_another_user_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def read() -> None:
        raise PermissionError(EACCES, "Permission denied", "runs/theirs/trained.jsonl")

    monkeypatch.setattr(part, "leave", sys.exit)
    with pytest.raises(SystemExit) as left:
        part.main(read)
    error = capsys.readouterr().err
    assert (left.value.code, error.count("\n"), "runs/theirs/trained.jsonl" in error) == (2, 1, True)

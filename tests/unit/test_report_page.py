"""The report's file: what it holds, who can read it, and that nothing of a run can break out of it."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import stat
from pathlib import Path

import pytest
import yaml
from report_pages import NASTY, data_of, groups_of, packed, write_samples
from telemetry_runs import write_run

from asyncmoe.errors import UserError
from asyncmoe.telemetry import versions
from asyncmoe.telemetry.advice import NO_STEP
from asyncmoe.telemetry.records import JsonLines
from asyncmoe.telemetry.report import command, page, run_page
from asyncmoe.telemetry.report.settings import settings
from asyncmoe.telemetry.samples.records import FOLDER, ROLLOUT_SAMPLES
from asyncmoe.telemetry.schema import CONTROLLER_SPANS, EVALUATION, METRICS, ROLLOUT, TRAINER_SPANS
from tests.unit.command_line import run_command

LIBRARY = "/* a plot library */ const Plotly = {};"


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "_library", lambda: LIBRARY)


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_page_is_one_file_whose_policy_allows_its_own_scripts_only(tmp_path: Path) -> None:
    write_run(tmp_path / "a <run>&", warmup=2, rl=3)
    path = command.report(tmp_path / "a <run>&")
    text = path.read_text()
    assert (path.name, path.parent.name) == ("report.html", "a <run>&")
    assert "<title>a &lt;run&gt;&amp; · asyncmoe</title>" in text
    assert not re.findall(r"""(?:src|href)="(?!#)|@import|url\(""", re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL))
    (own,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    policy = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)[0]
    hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(one.encode()).digest()).decode()}'" for one in (own, LIBRARY)}
    assert hashes == set(re.findall(r"'sha256-[^']*'", policy))
    assert "connect-src 'none'" in policy
    assert packed(text, "library").decode() == LIBRARY
    assert command.report(tmp_path / "a <run>&").read_text() == text, "the same run gives the same page"
    assert data_of(path)[0]["name"] == "a <run>&"


def test_only_a_page_with_samples_is_private(tmp_path: Path) -> None:
    write_run(tmp_path, warmup=2, rl=3)
    path = command.report(tmp_path)
    assert _mode(path) == _mode(tmp_path / "metrics.jsonl")
    assert data_of(path)[0]["samples"][0].startswith(f"samples of {tmp_path}: got no run")
    path.chmod(0o666)
    write_samples(tmp_path)
    assert _mode(command.report(tmp_path)) == 0o600
    assert [group["outcome"] for group in groups_of(path)] == ["queued", "trained"]
    path.chmod(0o640)
    command.report(tmp_path, samples=False)
    assert _mode(path) == _mode(tmp_path / "metrics.jsonl")
    assert groups_of(path) == []
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".")] == []


def test_samples_are_what_show_prints_as_json(tmp_path: Path) -> None:
    write_run(tmp_path, warmup=2, rl=3)
    write_samples(tmp_path)
    path = command.report(tmp_path)
    before = path.read_text().partition("<script>")[0]
    assert not any(piece in before for piece in ("onerror", "\x1b", "\u202e"))
    printed = run_command(["show", str(tmp_path), "--json", "--limit", "9", "--best"]).stdout.splitlines()
    group, waiting = map(json.loads, printed)
    assert groups_of(path) == [waiting, group]
    first, second = group["members"]
    tokens = first["tokens"]
    assert tokens["role"] == ["prompt"] * 2 + ["response"] * len(NASTY) + ["observation"]
    assert tokens["piece"][2:-1] == NASTY
    assert tokens["state"] == ["", "", *"bcw......", ""]
    assert (first["why"], second["failure"], second["reward"]) == ("the answer is <i>right</i>", "scorer_error: 1/0 </script>", None)


def test_samples_in_a_file_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, warmup=2, rl=3)
    write_samples(tmp_path, 40, [f"word {n} " for n in range(5000)])
    monkeypatch.setattr(run_page, "MOST_BYTES", 2_000_000)
    path = command.report(tmp_path)
    groups = groups_of(path)
    assert 1 < len(groups) < 20
    assert [group["group"] for group in groups] == list(range(40))[::-1][: len(groups)], "the newest"
    assert data_of(path)[0]["samples"][-1].startswith(f"{len(groups)} of 40 kept groups")
    member = groups[-1]["members"][0]
    assert len(member["tokens"]["piece"]) == 2 + run_page.MOST_TOKENS
    assert [gap["count"] for gap in member["gaps"]] == [3501]


def test_older_groups_of_a_page_are_of_the_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, warmup=2, rl=3)
    write_samples(tmp_path, 200)
    monkeypatch.setattr(run_page, "MOST_GROUPS", 40)
    found = [group["group"] for group in groups_of(command.report(tmp_path))]
    assert found[:20] == list(range(199, 179, -1))
    assert found == sorted(set(found), reverse=True)
    assert len([number for number in found[20:] if number < 90]) > 3


def test_a_torn_or_changed_sample_does_not_stop_the_page(tmp_path: Path) -> None:
    write_run(tmp_path, warmup=2, rl=3)
    write_samples(tmp_path)
    file = tmp_path / FOLDER / ROLLOUT_SAMPLES
    lines = file.read_bytes().splitlines(keepends=True)
    broken = lines[1].replace(b'"pieces":["What is ', b'"pieces":[7,"What is ')
    assert broken != lines[1]
    file.write_bytes(b"".join([lines[0], broken, lines[2], b'{"record":"gro']))
    path = command.report(tmp_path)
    assert [group["group"] for group in groups_of(path)] == [1]
    samples = data_of(path)[0]["samples"]
    assert "ends within line 4" in samples[0]
    assert samples[1].startswith("a group is left out: ")


def test_several_runs_are_one_page(tmp_path: Path) -> None:
    for name in ("a/run", "b/run"):
        write_run(tmp_path / name, warmup=1, rl=2)
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump({"run": {"seed": len(name), "dir": name}, "list": [1, {"x": None}]}))
    write_samples(tmp_path / "b/run")
    done = run_command(["report", str(tmp_path / "a/run"), str(tmp_path / "b/run")])
    assert done.exit_code == 0, done.output
    path = tmp_path / "a/run" / "comparison.html"
    assert done.stdout.strip().replace("\n", "") == str(path)
    runs = data_of(path)
    assert [run["name"] for run in runs] == ["a/run", "b/run"]
    assert runs[1]["settings"] == {"run.seed": "5", "run.dir": "b/run", "list[0]": "1", "list[1].x": "null"}
    assert [len(groups_of(path, run)) for run in (0, 1)] == [0, 2]
    assert not (tmp_path / "a/run" / "report.html").exists()


def test_a_run_may_have_any_name(tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff\x1b[31m<b>")
    write_run(tmp_path / name, warmup=1, rl=1)
    assert data_of(command.report(tmp_path / name))[0]["name"] == "⟨DCFF⟩␛[31m<b>"


@pytest.mark.parametrize("more", [[], ["--no-samples"]])
def test_a_run_that_is_no_directory_is_refused_in_one_line(tmp_path: Path, more: list[str]) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    for given in (tmp_path / "config.yaml", tmp_path / "nowhere"):
        refused = run_command(["report", str(given), *more])
        assert isinstance(refused.exception, UserError), refused.exception
        assert str(refused.exception) == f"asyncmoe report RUN: got {given}, which is no directory, expected the run.dir of a run"


def test_runs_that_one_page_cannot_show_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "run", warmup=1, rl=1)
    (tmp_path / "link").symlink_to("run")
    with pytest.raises(UserError, match="which are the same run"):
        command.write([tmp_path / "run", tmp_path / "link"], tmp_path / "out.html")
    for out in (tmp_path, tmp_path / "no" / "x.html"):
        with pytest.raises(UserError, match=r"asyncmoe report --out: got "):
            command.write([tmp_path / "run"], out)


def test_versions_are_those_of_the_start_not_of_the_reader(tmp_path: Path) -> None:
    write_run(tmp_path, warmup=1, rl=1)
    with JsonLines(tmp_path / versions.VERSIONS) as lines:
        lines.write({"time": 1.0, "versions": {"torch": "2.6", "python": "3.11.1"}})
        lines.write({"time": 2.0, "versions": {"torch": "2.7", "python": "3.11.1", "commit": "abc"}})
    run = data_of(command.report(tmp_path))[0]
    assert run["versions"] == {"torch": "2.7", "python": "3.11.1", "commit": "abc"}
    assert run["changed"] == "torch 2.6"
    versions.record(tmp_path, None)
    found = versions.read(tmp_path, [])[-1].versions
    assert {"python", "torch", "megatron-core", "numpy"} <= set(found)
    assert re.fullmatch(r"[0-9a-f]{40}(, with changes)?", found.get("commit", "0" * 40))


def test_secrets_of_the_configuration_are_hidden(tmp_path: Path) -> None:
    secret = "hush-hush"
    config = {
        "scoring": {
            "options": {"api_key": secret, "headers": {"Authorization": f"Bearer {secret}", "X-Auth": f"bearer {secret}"}, "keys": 3},
            "teacher": {"url": f"http://me:{secret}@host:80/x?token={secret}"},
        },
        "task": {
            "options": {"tokens": ["hf_" + secret.replace("-", ""), "plain"], "OPENAI_API_KEY": secret, "broken": f"http://[{secret}"}
        },
        "rollout": {"max_new_tokens": 7},
        "telemetry": {"samples": {"max_tokens": 8192}},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    found = settings(tmp_path)
    assert secret not in json.dumps(found)
    assert secret.replace("-", "") not in json.dumps(found)
    assert found["scoring.teacher.url"] == "http://(hidden)@host:80/x?(hidden)"
    assert (found["rollout.max_new_tokens"], found["telemetry.samples.max_tokens"], found["scoring.options.keys"]) == ("7", "8192", "3")
    (tmp_path / "config.yaml").write_text('a: "\\ud83d\\e[31m"\n"b\\0": [{}, []]\n')
    assert json.dumps(settings(tmp_path), ensure_ascii=False).encode()
    assert settings(tmp_path)["a"] == "⟨D83D⟩␛[31m"
    assert found["task.options.tokens"] == "[(hidden), plain]"


def _reported(*arguments: object) -> tuple[int, str]:
    result = run_command(["report", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, UserError | SystemExit), result.exception
    return result.exit_code, result.stderr if result.exception is None else str(result.exception)


def test_a_folder_of_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    _, said = _reported(tmp_path)
    assert said.startswith(f"asyncmoe report RUN: got {tmp_path}, which has neither config.yaml nor metrics.jsonl nor")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "note: the run has no config.yaml"),
        ("run: [", "note: the configuration of the run cannot be read"),
        ("", "note: the configuration of the run cannot be read"),
        ("[]", "note: the configuration of the run cannot be read"),
    ],
)
def test_a_damaged_configuration_costs_its_tab_alone(tmp_path: Path, text: str | None, said: str) -> None:
    write_run(tmp_path, warmup=1, rl=1)
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    code, told = _reported(tmp_path)
    assert (code, told.count("\n")) == (0, 1)
    assert told.startswith(said)
    run = data_of(tmp_path / command.REPORT)[0]
    assert run["settings"] == {}
    assert run["advice"][-1] == told.removeprefix("note: ").strip()


DAMAGES = ('{"step": ', "[]", '{"time": "x", "who": 3, "step": []}', "\x00\xff")


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        pytest.param(name, broken, marks=[] if broken == DAMAGES[0] or name == METRICS else pytest.mark.thorough)
        for name in (METRICS, ROLLOUT, EVALUATION, TRAINER_SPANS, CONTROLLER_SPANS, versions.VERSIONS)
        for broken in DAMAGES
    ],
)
def test_a_damaged_line_is_left_out_with_a_note(tmp_path: Path, name: str, broken: str) -> None:
    write_run(tmp_path, warmup=2, rl=3)
    versions.record(tmp_path, None)
    whole = data_of(command.report(tmp_path))[0]
    first, *others = (tmp_path / name).read_bytes().splitlines(keepends=True)
    (tmp_path / name).write_bytes(b"".join([first, broken.encode("latin-1") + b"\n", *others]))
    code, told = _reported(tmp_path)
    assert code == 0
    assert f"note: {tmp_path / name}: a damaged line is left out: line 2, " in told
    run = data_of(tmp_path / command.REPORT)[0]
    (note,) = run.pop("notes")
    assert note.startswith(f"{name}: a damaged line is left out: line 2, ")
    assert note in run.pop("advice")
    assert {key: value for key, value in run.items() if key != "samples"} == {key: whole[key] for key in run if key != "samples"}
    assert ("summary.json is not written" in told) == (name != versions.VERSIONS), "its numbers are of whole records"


def test_a_run_whose_groups_were_all_rejected_has_a_page(tmp_path: Path) -> None:
    write_run(tmp_path / "whole", warmup=1, rl=1)
    write_run(tmp_path / "run", warmup=1, rl=2)
    write_samples(tmp_path / "run")
    (tmp_path / "run" / METRICS).unlink()
    code, told = _reported(tmp_path / "run")
    assert (code, "summary.json is not written" in told) == (0, True)
    run = data_of(tmp_path / "run" / command.REPORT)[0]
    assert run["advice"][0] == NO_STEP
    assert groups_of(tmp_path / "run" / command.REPORT)
    assert any(row[0] == "rejected" for row in run["summary"])
    both = command.write([tmp_path / "whole", tmp_path / "run"], tmp_path / "both.html")
    assert [one["advice"][0] == NO_STEP for one in data_of(both)] == [False, True]


@pytest.mark.parametrize("name", [METRICS, ROLLOUT, EVALUATION, TRAINER_SPANS, versions.VERSIONS])
def test_records_that_are_no_file_are_named(tmp_path: Path, name: str) -> None:
    for make, said in ((os.mkdir, "a directory"), (os.mkfifo, "a pipe or a device")):
        run_dir = tmp_path / said.split()[1]
        write_run(run_dir, warmup=1, rl=1)
        (run_dir / name).unlink(missing_ok=True)
        make(run_dir / name)
        code, told = _reported(run_dir)
        assert (code, told) == (1, f"{run_dir / name}: got {said}, expected a file of records")

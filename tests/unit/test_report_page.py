"""The report's file: its contents, its permissions, and safe escaping of a run's data."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import stat
from pathlib import Path

import pytest
import yaml
from report_pages import NASTY, data_of, groups_of, packed, write_samples
from telemetry_runs import write_run

from asyncmoe.errors import DataError, UserError
from asyncmoe.telemetry import heartbeats, versions
from asyncmoe.telemetry.advice import NO_STEP
from asyncmoe.telemetry.records import JsonLines
from asyncmoe.telemetry.report import command, page, run_page
from asyncmoe.telemetry.schema import EVALUATION, METRICS
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
    assert data_of(path)[0]["samples"].startswith(f"samples of {tmp_path}: got none")
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
    assert data_of(path)[0]["samples"].startswith(f"the newest {len(groups)} of 40 kept groups")
    member = groups[-1]["members"][0]
    assert len(member["tokens"]["piece"]) == 2 + run_page.MOST_TOKENS
    assert [gap["count"] for gap in member["gaps"]] == [3501]


def test_several_runs_are_one_page(tmp_path: Path) -> None:
    options = {"api_key": "hush", "url": "http://me:hush@host", "n": 3}
    for name in ("a/run", "b/run"):
        write_run(tmp_path / name, warmup=1, rl=2)
        config = {"run": {"seed": len(name), "dir": name}, "list": [1, {"x": None}], "options": options}
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump(config))
    write_samples(tmp_path / "b/run")
    done = run_command(["report", str(tmp_path / "a/run"), str(tmp_path / "b/run")])
    assert done.exit_code == 0, done.output
    path = tmp_path / "a/run" / "comparison.html"
    assert done.stdout.strip().replace("\n", "") == str(path)
    runs = data_of(path)
    assert [run["name"] for run in runs] == [str(tmp_path / name) for name in ("a/run", "b/run")]
    hidden = {"options.api_key": "(hidden)", "options.url": "http://(hidden)@host", "options.n": "3"}
    assert runs[1]["settings"] == {"run.seed": "5", "run.dir": "b/run", "list": '[1,{"x":null}]', **hidden}
    assert [len(groups_of(path, run)) for run in (0, 1)] == [0, 2]
    assert not (tmp_path / "a/run" / "report.html").exists()


def test_what_cannot_be_shown_or_written_is_refused(tmp_path: Path) -> None:
    for given in (tmp_path / "config.yaml", tmp_path / "nowhere"):
        with pytest.raises(UserError, match="which is no directory"):
            command.report(given)
    write_run(tmp_path / "run", warmup=1, rl=1)
    for out in (tmp_path, tmp_path / "no" / "x.html"):
        with pytest.raises(UserError, match=r"asyncmoe report --out: got "):
            command.report(tmp_path / "run", out=out)
    with (tmp_path / "run" / EVALUATION).open("a") as file:
        file.write("[]\n")
    with pytest.raises(DataError, match=rf"{EVALUATION} line \d+: got "):
        command.report(tmp_path / "run")


def test_a_page_says_that_a_run_ended_only_if_every_process_it_needs_did(tmp_path: Path) -> None:
    end = write_run(tmp_path, warmup=1, rl=2)
    found = [data_of(command.report(tmp_path))[0]]
    for role, does in (("controller", heartbeats.ENDED), ("engine.0", "serve"), ("trainer.0", "train"), ("trainer.0", heartbeats.ENDED)):
        heartbeats.Heart(tmp_path, role, 0.0).beat(does)
        found.append(data_of(command.report(tmp_path))[0])
    assert [run["ended"] for run in found] == [False, True, True, False, True]
    assert found[0]["newest"] == end


def test_the_page_has_the_versions_of_the_newest_start(tmp_path: Path) -> None:
    write_run(tmp_path, warmup=1, rl=1)
    with JsonLines(tmp_path / versions.VERSIONS) as lines:
        lines.write({"time": 1.0, "versions": {"torch": "2.6"}})
    versions.record(tmp_path, None)
    found = data_of(command.report(tmp_path))[0]["versions"]
    assert {"python", "torch", "megatron-core", "numpy"} <= set(found)
    assert found["torch"] != "2.6"
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", found.get("commit", "0" * 40))


def test_a_run_whose_groups_were_all_rejected_has_a_page(tmp_path: Path) -> None:
    write_run(tmp_path / "whole", warmup=1, rl=1)
    write_run(tmp_path / "run", warmup=1, rl=2)
    write_samples(tmp_path / "run")
    (tmp_path / "run" / METRICS).unlink()
    assert run_command(["report", str(tmp_path / "run")]).exit_code == 0
    run = data_of(tmp_path / "run" / command.REPORT)[0]
    assert json.loads(packed((tmp_path / "run" / command.REPORT).read_text(), "data"))["advice"] == [[NO_STEP, [], False]]
    assert groups_of(tmp_path / "run" / command.REPORT)
    assert any(row[0] == "rejected" for row in run["summary"])
    both = command.report(tmp_path / "whole", tmp_path / "run", out=tmp_path / "both.html")
    assert [NO_STEP, ["run"], False] in json.loads(packed(both.read_text(), "data"))["advice"]

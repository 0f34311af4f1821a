"""Loggers: records become points, each sent once, whatever happens to the logger; tests/integrations has the real packages."""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from telemetry_runs import START, evaluation, write_run

from asyncmoe.config import Config, parse
from asyncmoe.errors import ConfigError, DataError, UserError
from asyncmoe.platform import collectives
from asyncmoe.telemetry.live import LiveView
from asyncmoe.telemetry.loggers import checks, parameters, sender, state
from asyncmoe.telemetry.loggers.backend import Opened, flat
from asyncmoe.telemetry.loggers.mlflow_backend import metric_name
from asyncmoe.telemetry.loggers.points import LoggedPoint, Points, Sent, batches
from asyncmoe.telemetry.loggers.sender import LoggerFailed, RecordSender
from asyncmoe.telemetry.records import read_steps
from asyncmoe.telemetry.rollout_schema import Rollout
from asyncmoe.telemetry.samples.index import index, load
from asyncmoe.telemetry.schema import METRICS, Resume, Step
from asyncmoe.telemetry.summary import summarise
from tests.unit.sampled_run import SampledRun


def config_of(run_dir: Path, **telemetry: Any) -> Config:
    made = parse(
        {
            "run": {"dir": str(run_dir), "steps": 8},
            "model": {"path": "unused"},
            "task": {"kind": "arithmetic"},
            "warmup": {"steps": 2},
            "telemetry": {"tensorboard": False, **telemetry},
        }
    )
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(yaml.safe_dump(made.model_dump(mode="json")))
    return made


class Fake:
    """A logger that keeps what it gets, and raises where `fails` says so."""

    target, most, later = "there", 60, ""

    def __init__(self, fails: Sequence[str] = ()) -> None:
        self.fails = list(fails)
        self.points: list[LoggedPoint] = []
        self.opened: list[tuple[str | None, int]] = []
        self.parameters: Mapping[str, Any] = {}
        self.closed: list[bool] = []
        self.tables: list[tuple[int, list[dict[str, Any]]]] = []

    def _fail(self, where: str) -> None:
        if where in self.fails:
            self.fails.remove(where)
            raise ConnectionError(f"{where}: refused\nby the server")

    def open(self, id: str | None, points: int, parameters: Mapping[str, Any]) -> Opened:
        self._fail("open")
        self.opened.append((id, points))
        self.parameters = parameters
        return Opened(id or "id-1", "http://there/id-1")

    def log(self, points: Sequence[LoggedPoint]) -> str | None:
        self._fail("log")
        self.points += points
        return None

    def table(self, name: str, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.tables.append((step, [dict(zip(columns, row, strict=True)) for row in rows]))

    def close(self, complete: bool) -> str | None:
        self._fail("close")
        self.closed.append(complete)
        return None


def _stopped() -> threading.Event:
    stop = threading.Event()
    stop.set()
    return stop


def _steps(points: Sequence[LoggedPoint]) -> list[int]:
    return [point.step for point in points if point.evaluation is None]


# ---------------------------------------------------------------- points


def test_a_point_has_the_figures_of_its_records_under_their_names() -> None:
    step = Step(step=3, phase="rl", time=10.0, loss=0.5, ages={0: 7, 2: 1}, plugin_metrics={"loss/mine": 2.0, "loss/none": None})
    early, newest, late = (Rollout(time=when, started=n, rejected={"slow": n}) for when, n in ((8.0, 1), (9.5, 2), (10.5, 3)))
    found = Points(Sent()).take([step, early, newest, late, evaluation(2, None)])
    assert [(point.step, point.evaluation) for point in found] == [(3, None), (2, "")]
    values = found[0].values
    assert {name: value for name, value in values.items() if not name.startswith("rollout/")} == {
        "loss": 0.5,
        "ages/0": 7.0,
        "ages/2": 1.0,
        "plugin_metrics/loss/mine": 2.0,
    }
    assert (values["rollout/started"], values["rollout/rejected/slow"]) == (2.0, 2.0)
    assert found[1].values["evaluation/failed/scorer_timeout"] == 16.0
    assert "evaluation/reward_mean" not in found[1].values


def test_repeated_steps_and_evaluations_are_points_once() -> None:
    points = Points(Sent())
    first = [Step(step=n, phase="rl", time=float(n), loss=1.0) for n in (1, 2, 3)]
    assert _steps(points.take([*first, evaluation(1, 0.1)])) == [1, 2, 3]
    again = [Resume(1, 4.0), *(Step(step=n, phase="rl", time=n + 4.0, loss=2.0) for n in (2, 3, 4))]
    assert [(one.step, one.time) for one in points.take([*again, evaluation(1, 0.2)])] == [(4, 8.0)]


def test_of_steps_read_together_only_the_valid_ones_are_points() -> None:
    old = [Step(step=n, phase="rl", time=float(n), loss=1.0) for n in (1, 2, 3)]
    new = [Resume(1, 4.0), Step(step=2, phase="rl", time=6.0, loss=2.0)]
    assert [(one.step, one.values["loss"]) for one in Points(Sent()).take([*old, *new])] == [(1, 1.0), (2, 2.0)]


def test_batches_are_bounded_and_keep_points_whole() -> None:
    made = [LoggedPoint(n, 0.0, {str(i): 0.0 for i in range(size)}) for n, size in enumerate((3, 3, 9, 1, 2))]
    assert [[one.step for one in batch] for batch in batches(made, 6)] == [[0, 1], [2], [3, 4]]


def test_names_that_mlflow_takes() -> None:
    names = ("ages/0", "plugin_metrics/loss/λ", "a%b(c)", "/x//y/../z", "..", "x" * 300)
    assert [metric_name(name) for name in names[:3]] == ["ages/0", "plugin_metrics/loss/λ", "a_b_c_"]
    assert [metric_name(name) for name in names[3:]] == ["x/z", "_", "x" * 250]


# ---------------------------------------------------------------- sender


def test_every_step_is_sent_once_with_configuration_and_versions(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run")
    write_run(config.run.dir, warmup=2, rl=8)
    fake = Fake()
    RecordSender(config, "mlflow", lambda: fake, _stopped()).run()
    assert _steps(fake.points) == list(range(1, 11))
    recorded = read_steps(config.run.dir / METRICS)
    assert [point.values["loss"] for point in fake.points if point.evaluation is None] == [step.loss for step in recorded]
    assert fake.closed == [True]
    assert fake.parameters["run"]["steps"] == 8
    assert fake.parameters["versions"]["torch"]
    assert flat(fake.parameters)["run.steps"] == 8
    again = Fake()
    RecordSender(config, "mlflow", lambda: again, _stopped()).run()
    assert (again.opened, again.points) == ([("id-1", len(fake.points))], [])


def test_a_logger_that_was_down_gets_what_it_missed_and_nothing_twice(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run")
    write_run(config.run.dir, warmup=2, rl=3)
    fake, stop = Fake(["open", "open", "log"]), threading.Event()
    thread = threading.Thread(target=RecordSender(config, "mlflow", lambda: fake, stop, retry_s=0.01).run, daemon=True)
    thread.start()
    _until(lambda: len(_steps(fake.points)) == 5)
    assert state.read(config.run.dir, "mlflow").problem is None
    fake.fails.append("log")
    write_run(config.run.dir, warmup=2, rl=8, first=6, start=START + 100)
    stop.set()
    thread.join(10)
    assert not thread.is_alive()
    assert _steps(fake.points) == list(range(1, 11))
    assert fake.closed == [True]


def test_once_the_run_has_ended_a_logger_that_is_down_is_given_up(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run")
    write_run(config.run.dir, warmup=2, rl=3)
    with pytest.raises(LoggerFailed, match=r"^mlflow: open: refused by the server$"):
        RecordSender(config, "mlflow", lambda: Fake(["open"]), _stopped(), retry_s=0.01).run()
    assert state.read(config.run.dir, "mlflow").problem == "mlflow: open: refused by the server"


@pytest.fixture
def sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Records of ten steps, and samples that the real writers wrote: three steps of one group each, and a group that waits."""
    monkeypatch.setattr(collectives, "total", lambda tensor: tensor)
    made = SampledRun(tmp_path / "run")
    for n, texts in enumerate((["19", "x"], ["1", "2"], ["19", "19"])):
        made.train(made.group(n, texts), 4 + n)
    made.group(3, ["waits", "too"])
    write_run(tmp_path / "run", warmup=2, rl=8)
    return tmp_path / "run"


def test_samples_are_sent_only_on_request_and_once(sampled: Path) -> None:
    found = index(sampled)
    trained = [load(found, entry) for entry in found.entries if entry.outcome == "trained"]
    assert trained
    silent, asked = config_of(sampled, trackio={}), config_of(sampled, mlflow={"uri": "http://h:1"}, loggers={"samples": True})
    fake = Fake()
    RecordSender(silent, "trackio", lambda: fake, _stopped()).run()
    assert fake.tables == []
    RecordSender(asked, "mlflow", lambda: fake, _stopped()).run()
    rows = [row for _, table in fake.tables for row in table]
    assert sorted((row["step"], row["group"], row["question"], row["reward"]) for row in rows) == sorted(
        (one.entry.step, one.group.group, one.group.question, member.reward)
        for one in trained
        for member in one.group.members
        if member.key in one.trained
    )
    assert all(isinstance(row["response"], str) and row["tokens"] > 0 for row in rows)
    again = Fake()
    RecordSender(asked, "mlflow", lambda: again, _stopped()).run()
    assert again.tables == []


def test_samples_that_are_not_kept_cannot_be_sent(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"telemetry\.loggers\.samples: got true, expected false because"):
        config_of(tmp_path, loggers={"samples": True}, samples={"groups": 0})


def test_another_server_gets_a_run_of_its_own(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run")
    write_run(config.run.dir, warmup=2, rl=3)
    state.write(config.run.dir, "mlflow", state.State(id="old", target="elsewhere", sent=Sent(5, {}, 5)))
    fake = Fake()
    RecordSender(config, "mlflow", lambda: fake, _stopped()).run()
    assert (fake.opened, len(_steps(fake.points)), fake.closed) == ([(None, 0)], 5, [False])


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    state.folder(tmp_path).mkdir()
    (state.folder(tmp_path) / "wandb.json").write_text("{")
    with pytest.raises(DataError, match=r"wandb\.json: .*delete it"):
        state.read(tmp_path, "wandb")


def test_one_process_sends_to_a_logger(tmp_path: Path) -> None:
    with state.claim(tmp_path, "wandb"), pytest.raises(UserError, match="another process sends"):
        state.claim(tmp_path, "wandb")
    state.claim(tmp_path, "wandb").close()


# ---------------------------------------------------------------- what is refused, and a run whose logger is down


@pytest.mark.parametrize(
    ("telemetry", "said"),
    [
        ({"mlflow": {"uri": "http://u:secret@host:1"}}, "with a secret in it"),
        ({"mlflow": {"uri": "localhost:5000"}}, "expected an address"),
        ({"trackio": {"server_url": "http://h:1?write_token=x"}}, "with a secret in it"),
        ({"trackio": {"space_id": "a/b", "server_url": "http://h:1"}}, "expected one of them"),
        ({"wandb": {"api_key": "x"}}, "an unknown key"),
    ],
)
def test_secrets_and_contradictions_are_refused(tmp_path: Path, telemetry: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        config_of(tmp_path, **telemetry)
    assert "secret@" not in str(refused.value)


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_missing_package_is_one_line_that_names_the_extra(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=rf"telemetry\.{name}: got no package {name} .*run: \S+ -m pip install \"{name}"):
        checks.check(config_of(tmp_path, **{name: {}}).telemetry)


def test_missing_credentials_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda _: object())
    for variable in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "MLFLOW_TRACKING_URI", "TRACKIO_WRITE_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    for telemetry, said in (
        ({"wandb": {}}, "WANDB_API_KEY"),
        ({"mlflow": {}}, "MLFLOW_TRACKING_URI"),
        ({"trackio": {"server_url": "http://h:1"}}, "TOKEN"),
    ):
        with pytest.raises(ConfigError, match=said):
            checks.check(config_of(tmp_path, **telemetry).telemetry)
    checks.check(config_of(tmp_path, wandb={"mode": "offline"}).telemetry)
    monkeypatch.setenv("WANDB_MODE", "offline")
    checks.check(config_of(tmp_path, wandb={}).telemetry)


def test_a_run_goes_on_without_its_logger_and_says_so_once(tmp_path: Path) -> None:
    """The real process, with a logger that fails: in this environment its package is missing, or its server is."""
    config = config_of(tmp_path / "run", mlflow={"uri": "http://127.0.0.1:9"}, loggers={"finish_timeout_s": 0.5})
    out = io.StringIO()
    with LiveView(config, Console(file=out, width=300)) as view:
        view.refresh()
        write_run(config.run.dir, warmup=2, rl=8)
        _until(lambda: view.refresh() or "the run goes on" in out.getvalue())
        for _ in range(3):
            view.refresh()
    lines = [line for line in out.getvalue().splitlines() if line.startswith("mlflow: ")]
    assert ["the run goes on" in line for line in lines] == [True, False]
    assert lines[1].endswith(f"to send what is missing: asyncmoe resend {config.run.dir}")
    assert "step 8/8" in out.getvalue()
    logged = summarise(config.run.dir)["loggers"]
    assert isinstance(logged, dict)
    assert (logged["mlflow"]["steps"], str(logged["mlflow"]["problem"])[:8]) == (0, "mlflow: ")


def test_asyncmoe_log_names_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.yaml"):
        sender.send(tmp_path / "none", [])
    config_of(tmp_path / "run")
    with pytest.raises(UserError, match="a run without loggers"):
        sender.send(tmp_path / "run", [])
    with pytest.raises(UserError, match="none is configured"):
        sender.send(tmp_path / "run", ["wandb"])


def test_versions_of_the_engines_environment_are_found(tmp_path: Path) -> None:
    info = tmp_path / "lib" / "python3.11" / "site-packages" / "sglang-9.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 9.9\n")
    found = parameters.versions(tmp_path / "bin" / "python")
    assert (found["sglang"], found["python"]) == ("9.9", ".".join(map(str, sys.version_info[:3])))


def _until(done: Any, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)

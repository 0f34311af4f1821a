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
from rich.console import Console
from telemetry_runs import config_of, evaluation, write_run

from asyncmoe import installed
from asyncmoe.config import Config
from asyncmoe.errors import ConfigError
from asyncmoe.telemetry.live import LiveView
from asyncmoe.telemetry.loggers import checks, sink
from asyncmoe.telemetry.loggers.mlflow_client import metric_name
from asyncmoe.telemetry.loggers.points import LoggedPoint, Points, Sent, flat
from asyncmoe.telemetry.loggers.sink import LoggerSink
from asyncmoe.telemetry.records import Follower, read_steps
from asyncmoe.telemetry.rollout_schema import Rollout
from asyncmoe.telemetry.schema import METRICS, Resume, Step
from asyncmoe.telemetry.versions import versions


class Fake:
    """A logger that keeps its input, and raises as `fails` says, or waits if `holds` is given."""

    def __init__(self, fails: str = "", holds: threading.Event | None = None) -> None:
        self.fails, self.holds = fails, holds
        self.points: list[LoggedPoint] = []
        self.opened: list[tuple[str | None, int]] = []
        self.parameters: Mapping[str, Any] = {}
        self.closed: list[bool] = []

    def _fail(self, where: str) -> None:
        if self.fails == where:
            raise ConnectionError(f"{where}: refused\nby the server")

    def open(self, id: str | None, points: int, parameters: Mapping[str, Any]) -> tuple[str, str]:
        self._fail("open")
        self.opened.append((id, points))
        self.parameters = parameters
        return id or "id-1", "http://there/id-1"

    def log(self, point: LoggedPoint) -> None:
        if self.holds is not None:
            self.holds.wait(60)
        if point.step == 3:
            self._fail("log")
        self.points.append(point)

    def close(self, complete: bool) -> None:
        self.closed.append(complete)


def _sent(config: Config, fake: Fake, before: bool = False) -> list[str]:
    """Feed a logger the records of the run, as those of earlier starts or as new ones, and close it; return what was said."""
    said: list[str] = []
    records = Follower(config.run.dir).poll()
    sent = LoggerSink(config, "mlflow", fake, records if before else (), said.append)
    sent.feed([] if before else records)
    sent.close()
    return said


def _steps(points: Sequence[LoggedPoint]) -> list[int]:
    return [point.step for point in points if not point.evaluation]


# ---------------------------------------------------------------- points


def test_a_point_has_the_figures_of_its_records_under_their_names() -> None:
    own = {"plugin_metrics": {"loss/mine": 2.0, "loss/none": None}, "metrics": {"format": 0.25}}
    step = Step(step=3, phase="rl", time=10.0, loss=0.5, ages={0: 7, 2: 1}, **own)
    early, newest, late = (Rollout(time=when, started=n, rejected={"slow": n}) for when, n in ((8.0, 1), (9.5, 2), (10.5, 3)))
    found = Points().take([step, early, newest, late, evaluation(2, None), evaluation(2, None, name="math", metrics={"format": 0.75})])
    assert [(point.step, point.evaluation) for point in found] == [(3, False), (2, True), (2, True)]
    values = found[0].values
    assert {name: value for name, value in values.items() if not name.startswith("rollout/")} == {
        "loss": 0.5,
        "ages/0": 7.0,
        "ages/2": 1.0,
        "plugin_metrics/loss/mine": 2.0,
        "metrics/format": 0.25,
    }
    assert (values["rollout/started"], values["rollout/rejected/slow"]) == (2.0, 2.0)
    assert found[1].values["evaluation/failed/scorer_timeout"] == 16.0
    assert "evaluation/reward_mean" not in found[1].values
    assert found[2].values["evaluation/math/metrics/format"] == 0.75


def test_repeated_steps_and_evaluations_are_points_once() -> None:
    points, sent = Points(), Sent()
    first = [Step(step=n, phase="rl", time=float(n), loss=1.0) for n in (1, 2, 3)]
    for point in points.take([*first, evaluation(1, 0.1)]):
        assert not sent.has(point)
        sent = sent.plus(point)
    again = [Resume(1, 4.0), *(Step(step=n, phase="rl", time=n + 4.0, loss=2.0) for n in (2, 3, 4))]
    assert [(one.step, one.time) for one in points.take([*again, evaluation(1, 0.2)]) if not sent.has(one)] == [(4, 8.0)]
    assert [(one.step, one.values["loss"]) for one in Points().take([*first, *again[:2]])] == [(1, 1.0), (2, 2.0)], "valid ones only"


def test_names_that_mlflow_takes() -> None:
    names = ("ages/0", "plugin_metrics/loss/λ", "a%b(c)", "/x//y/../z", "..", "x" * 300)
    assert [metric_name(name) for name in names[:3]] == ["ages/0", "plugin_metrics/loss/λ", "a_b_c_"]
    assert [metric_name(name) for name in names[3:]] == ["x/z", "_", "x" * 250]


# ---------------------------------------------------------------- the thread


def test_every_step_is_sent_once_with_configuration_and_versions(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run", 8)
    write_run(config.run.dir, warmup=2, rl=8)
    fake = Fake()
    assert _sent(config, fake) == ["mlflow: http://there/id-1"]
    assert _steps(fake.points) == list(range(1, 11))
    recorded = read_steps(config.run.dir / METRICS)
    assert [point.values["loss"] for point in fake.points if not point.evaluation] == [step.loss for step in recorded]
    assert fake.closed == [True]
    assert fake.parameters["run"]["steps"] == 8
    assert fake.parameters["versions"]["torch"]
    assert flat(fake.parameters)["run.steps"] == 8
    again = Fake()
    _sent(config, again, before=True)
    assert (again.opened, again.points) == ([("id-1", len(fake.points))], [])


def test_a_logger_that_fails_is_said_once_and_gets_the_rest_at_the_next_start(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run", 8)
    write_run(config.run.dir, warmup=2, rl=8)
    (said,) = _sent(config, Fake("open"))
    assert said.startswith("mlflow: open: refused by the server; the run goes on without it: it has the steps up to 0, and the next start")
    torn = Fake("log")
    assert "it has the steps up to 2" in _sent(config, torn)[-1]
    whole = Fake()
    _sent(config, whole, before=True)
    assert _steps(torn.points) + _steps(whole.points) == list(range(1, 11))
    assert (whole.opened, whole.closed) == ([("id-1", len(torn.points))], [True])


def _scalars(directory: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return [(event.step, round(event.value, 3)) for event in events.Scalars(tag)]


def test_tensorboard_has_every_step_once_over_all_starts(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run", 8, tensorboard="on")
    end = write_run(config.run.dir, warmup=2, rl=1)
    for _ in range(2):
        with LiveView(config, Console(file=io.StringIO())) as view:
            view.refresh()
        write_run(config.run.dir, warmup=2, rl=4, first=3, start=end + 10)  # a resume that repeats a step
    folder = config.run.dir / "tensorboard"
    assert [step for step, _ in _scalars(folder, "step/loss")] == [1, 2, 3, 4, 5, 6]
    assert _scalars(folder, "evaluation/reward_mean") == [(2, 0.2)]
    assert _scalars(folder, "rollout/queue_depth")


def test_a_slow_logger_holds_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink, "FINISH_S", 0.2)
    config, holds = config_of(tmp_path / "run", 8), threading.Event()
    write_run(config.run.dir, warmup=2, rl=3)
    begin = time.monotonic()
    said = _sent(config, Fake(holds=holds))
    assert time.monotonic() - begin < 20
    assert said[-1].startswith("mlflow: not everything was delivered within 0 s; it has the steps up to 0")
    holds.set()


# ---------------------------------------------------------------- what is refused, and a run whose logger is down


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_missing_package_is_one_line_that_names_the_extra(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "has", lambda _: False)
    with pytest.raises(ConfigError, match=rf"telemetry\.{name}: got no package {name}\b.*run: \S+ -m pip install \"{name}"):
        checks.check(config_of(tmp_path, 8, **{name: {}}).telemetry)


def test_missing_credentials_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "has", lambda _: True)
    for variable in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    for telemetry, said in (
        ({"wandb": {}}, "WANDB_API_KEY"),
        ({"mlflow": {}}, "MLFLOW_TRACKING_URI"),
    ):
        with pytest.raises(ConfigError, match=said):
            checks.check(config_of(tmp_path, 8, **telemetry).telemetry)
    monkeypatch.setenv("WANDB_MODE", "offline")
    checks.check(config_of(tmp_path, 8, wandb={}).telemetry)


def test_versions_of_the_engines_environment_are_found(tmp_path: Path) -> None:
    info = tmp_path / "lib" / "python3.11" / "site-packages" / "sglang-9.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 9.9\n")
    found = versions(tmp_path / "bin" / "python")
    assert (found["sglang"], found["python"]) == ("9.9", ".".join(map(str, sys.version_info[:3])))

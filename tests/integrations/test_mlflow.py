"""MLflow: a real server on loopback, read back by MLflow's client."""

from __future__ import annotations

import io
import sys
import time
from collections import Counter
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest
from rich.console import Console

mlflow = pytest.importorskip("mlflow", reason="run: make test-integrations ONLY=mlflow")

from asyncmoe.launch.torchrun import free_port  # noqa: E402
from asyncmoe.telemetry.live import LiveView  # noqa: E402
from asyncmoe.telemetry.loggers.mlflow_client import metric_name  # noqa: E402
from asyncmoe.telemetry.loggers.sink import FOLDER, read  # noqa: E402
from tests.integrations.logged_run import config_of, figures, sent, write_run  # noqa: E402
from tests.integrations.servers import serving  # noqa: E402


def _server(folder: Path, port: int) -> AbstractContextManager[None]:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/store.db", "--artifacts-destination", str(folder / "artifacts")]
    return serving(command, f"http://127.0.0.1:{port}/health", 240, folder)


def _read(uri: str, id: str) -> tuple[dict[tuple[str, int], float], Counter[tuple[str, int]], mlflow.entities.Run]:
    client = mlflow.MlflowClient(uri)
    run = client.get_run(id)
    points = [point for name in run.data.metrics for point in client.get_metric_history(run.info.run_id, name)]
    return {(p.key, p.step): p.value for p in points}, Counter((p.key, p.step) for p in points), run


def test_a_server_that_comes_late_and_goes_away_ends_up_with_the_figures_of_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, out, port = tmp_path / "run", io.StringIO(), free_port("127.0.0.1")
    uri = f"http://127.0.0.1:{port}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    config = config_of(run_dir, mlflow={"experiment": "e"}, tensorboard=False)
    write_run(run_dir, warmup=2, rl=8)
    total = max(step for _, step in figures(run_dir))
    with ExitStack() as servers, LiveView(config, Console(file=out, width=300)) as view:
        view.refresh()
        servers.enter_context(_server(tmp_path / "server", port))  # the client repeats its request until then
        until = time.monotonic() + 240
        while read(run_dir / FOLDER / "mlflow.json").sent.step < total:
            assert time.monotonic() < until
            time.sleep(0.2)
    state = read(run_dir / FOLDER / "mlflow.json")
    assert state.id is not None
    assert f"/runs/{state.id}" in out.getvalue()

    with _server(tmp_path / "server", port):
        values, counts, run = _read(uri, state.id)
        recorded = {(metric_name(name), step): value for (name, step), value in figures(run_dir).items()}
        assert {key: value for key, value in values.items() if not key[0].startswith("rollout/")} == pytest.approx(recorded)
        assert set(counts.values()) == {1}, "each figure once"
        assert any(name.startswith("rollout/") for name, _ in values)
        assert (run.data.params["run.steps"], run.data.params["versions.python"]) == ("8", ".".join(map(str, sys.version_info[:3])))
        assert (run.info.run_name, run.info.status) == ("run", "FINISHED")

        write_run(run_dir, warmup=2, rl=total + 4, first=total - 2, start=1_900_000_000.0)  # a resume that repeats three steps
        before = values
        sent(config, "mlflow")
        values, counts, run = _read(uri, state.id)
        assert before.items() <= values.items()
        assert sorted(step for name, step in values if name == "loss") == list(range(1, total + 7))
        assert set(counts.values()) == {1}, "each figure once"
        assert len(mlflow.MlflowClient(uri).search_runs([run.info.experiment_id])) == 1

"""MLflow, through its client for the tracking server."""

from __future__ import annotations

import math
import os
import posixpath
import re
from collections.abc import Mapping
from typing import Any

from asyncmoe.telemetry.loggers.points import LoggedPoint, flat

_MOST_METRICS, _MOST_PARAMS = 1000, 100
"""Largest batches that the server accepts (mlflow/utils/validation.py)."""
_MOST_NAME, _MOST_PARAM = 250, 6000


class Mlflow:
    """A run of MLflow; implements `LoggerClient`. A request is repeated for minutes while the server is down
    (MLFLOW_HTTP_REQUEST_MAX_RETRIES).

    Args:
        experiment: name of the experiment, created if it does not exist.
        name: the run's name.
    """

    def __init__(self, experiment: str, name: str) -> None:
        self._experiment, self._name = experiment, name
        self._client: Any = None
        self._id = ""

    def open(self, id: str | None, points: int, parameters: Mapping[str, Any]) -> tuple[str, str]:
        """See `LoggerClient`. MLflow keeps the first parameters of a run, so those of a resumed one are not sent."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        if id is not None:
            self._id = id
            self._client.update_run(id, status="RUNNING")
        else:
            self._id = self._client.create_run(experiment, run_name=self._name).info.run_id
            params = [Param(key, str(value)[:_MOST_PARAM]) for key, value in flat(parameters).items()]
            for i in range(0, len(params), _MOST_PARAMS):
                self._client.log_batch(self._id, params=params[i : i + _MOST_PARAMS])
        base = os.environ.get("MLFLOW_TRACKING_URI", "").rstrip("/")
        shown = base.startswith("http") and "@" not in base  # an address with an @ contains a password
        return self._id, f"{base}/#/experiments/{experiment}/runs/{self._id}" if shown else ""

    def log(self, point: LoggedPoint) -> None:
        """See `LoggerClient`. The server's SQL store keeps equal values with the same time only once, so a repeated request adds none."""
        from mlflow.entities import Metric

        time = math.floor(point.time * 1000)
        figures = [Metric(metric_name(name), value, time, point.step) for name, value in point.values.items()]
        for i in range(0, len(figures), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=figures[i : i + _MOST_METRICS])

    def close(self, complete: bool) -> None:
        """See `LoggerClient`."""
        self._client.set_terminated(self._id, "FINISHED" if complete else "KILLED")


def metric_name(name: str) -> str:
    """Return a name that MLflow accepts: made of letters, digits and `/_-.: `, and normalised as a path."""
    legal = posixpath.normpath(re.sub(r"[^/\w.\- :]", "_", name)).lstrip("/")
    return legal.replace("..", "_")[:_MOST_NAME]

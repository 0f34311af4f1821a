"""Export records as Prometheus gauges over HTTP, with the server of prometheus_client."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from asyncmoe.errors import ConfigError
from asyncmoe.telemetry.metric import numbers
from asyncmoe.telemetry.records import Followed
from asyncmoe.telemetry.schema import Resume, Step


class Prometheus:
    """Serves http://127.0.0.1:port/metrics with `asyncmoe_step`, `asyncmoe_step_<field>`, `asyncmoe_rollout_<field>` and
    `asyncmoe_evaluation_<field>`.

    A mapping field is one gauge with a label (age, reason, engine); keys that a newer record lacks disappear.

    Args:
        port: 0: any free port; the attribute `port` has its number.

    Raises:
        ConfigError: the port is not available.
    """

    def __init__(self, port: int) -> None:
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        try:
            self._server, self._thread = start_http_server(port, "127.0.0.1", self._registry)
        except OSError as error:
            raise ConfigError("telemetry.prometheus_port", got=f"{port} ({error.strerror})", expected="a free port") from error
        self.port = self._server.server_port

    def feed(self, records: list[Followed]) -> None:
        for record in records:
            if isinstance(record, Step | Resume):
                self._gauge("asyncmoe_step", "Steps taken.").set(record.step if isinstance(record, Step) else record.resumed_at)
            source, cleared = type(record).__name__.lower(), set[str]()
            for name, label, key, value, metric in numbers(record):
                gauge = self._gauge(f"asyncmoe_{source}_{name}", metric.help, label)
                if key is None:
                    gauge.set(value)
                    continue
                if name not in cleared:
                    gauge.clear()
                    cleared.add(name)
                gauge.labels(key).set(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _gauge(self, name: str, help: str, label: str | None = None) -> Gauge:
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, help, () if label is None else (label,), registry=self._registry)
        return self._gauges[name]

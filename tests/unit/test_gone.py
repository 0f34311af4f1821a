"""Removed keys and commands: ignored if they have no effect, else refused with all applicable hints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncmoe import config as configuration
from asyncmoe.cli import app
from asyncmoe.config import gone
from asyncmoe.config.refusals import _keys
from asyncmoe.config.schema import Config
from asyncmoe.errors import ConfigError, UserError
from asyncmoe.usage import invoke

NEEDED: dict[str, Any] = {"run": {"dir": "runs/x", "steps": 1}, "model": {"path": "m"}, "task": {"kind": "arithmetic"}}
"""What the last version that had these keys wrote into a run's config.yaml."""


SECTIONS = {key for key in gone.KEYS if any(other.startswith(f"{key}.") for other in gone.KEYS)} | {"telemetry.logs"}
IDLE = {key: "x" if one.idle is None else one.idle[0] for key, one in gone.KEYS.items() if one.idle != () and key not in SECTIONS}
"""A value of each removed key that asks for nothing."""
IDLE |= {"queue.mooncake.protocol": "x", "sync.store.keep": 3, "telemetry.logs.keep": 3, "verify.anomalies.age.action": "x"}


def written(folder: Path, values: dict[str, Any]) -> Path:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(NEEDED | values))
    return file


def test_values_that_ask_for_nothing_are_passed_over(tmp_path: Path) -> None:
    """As in the configuration of an older run, which has every key; an optional section that loses keys stays."""
    telemetry = {"wandb": {}, "mlflow": {}, "trackio": {}, "profile": {"steps": [1]}}
    optional = {"telemetry": telemetry, "environment": {"tools": {"options": {"python": {}}}}}
    given = [f"{key}={json.dumps(value)}" for key, value in IDLE.items() if not key.startswith(("task.sources.", "evaluation.sets."))]
    assert configuration.load(written(tmp_path, optional), given) == configuration.parse(NEEDED | optional)


def test_all_that_an_older_configuration_asks_for_is_answered_at_once(tmp_path: Path) -> None:
    sync = {"method": "store", "store": {"url": "/x"}, "staging": False, "relay": "off"}
    file = written(tmp_path, {"sync": sync, "queue": {"payloads": "ray", "capacity": -1}})
    with pytest.raises(ConfigError) as caught:
        configuration.load(file)
    told = [line.partition("config.yaml:")[2].split(": ")[1] for line in str(caught.value).splitlines()]
    assert told == ["queue.payloads", "sync.method", "sync.staging", "sync.store.url", "queue.capacity"]
    assert gone.LAST in str(caught.value)


def test_keys_of_a_mixture_and_of_evaluation_sets_are_found(tmp_path: Path) -> None:
    def given(streaming: object) -> dict[str, Any]:
        source = {"path": "a", "streaming": streaming}
        return {"task": {"kind": "dataset", "sources": [source, source]}, "evaluation": {"sets": {"x": source}}}

    assert len(configuration.load(written(tmp_path, given(None))).task.sources) == 2
    with pytest.raises(ConfigError) as caught:
        configuration.load(written(tmp_path, given(True)))
    for key in ("task.sources.0.streaming", "task.sources.1.streaming", "evaluation.sets.x.streaming"):
        assert f"{key}: got true, which was removed" in str(caught.value)


def test_what_starts_nothing_reads_it_all_the_same(tmp_path: Path) -> None:
    written(tmp_path, {"run": {"dir": str(tmp_path), "steps": 1}, "sync": {"method": "store", "store": {"url": "/x"}}})
    assert configuration.of_run(tmp_path).sync.method == "reshard"
    with pytest.raises(ConfigError, match=r"sync\.method"):
        configuration.of_run(tmp_path, idle=False)


def test_no_key_in_the_table_is_there() -> None:
    assert not set(_keys(Config)) & gone.KEYS.keys()


@pytest.mark.parametrize(("key", "value"), gone.VALUES)
def test_a_removed_value_is_refused_except_where_nothing_starts(key: str, value: str | int, tmp_path: Path) -> None:
    *sections, name = key.split(".")
    values: dict[str, Any] = {name: value}
    for section in reversed(sections):
        values = {section: values}
    with pytest.raises(ConfigError):
        configuration.parse(NEEDED | values)
    needed = NEEDED | {"run": {"dir": str(tmp_path), "steps": 1}}
    written(tmp_path, needed | values)
    assert configuration.of_run(tmp_path) == configuration.parse(needed)
    with pytest.raises(ConfigError) as caught:
        configuration.of_run(tmp_path, idle=False)
    assert gone.VALUES[key, value] in str(caught.value)


@pytest.mark.parametrize("command", gone.COMMANDS)
def test_a_removed_command_or_option_says_what_to_do_instead(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["asyncmoe", *command.split(), "x"])
    with pytest.raises(UserError, match="which was removed") as caught:
        invoke(app)
    assert gone.COMMANDS[command] in str(caught.value)

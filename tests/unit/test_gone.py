"""Removed keys: ignored if they have no effect, else refused with all applicable hints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncmoe import config as configuration
from asyncmoe.config import gone
from asyncmoe.config.refusals import _keys
from asyncmoe.config.schema import Config
from asyncmoe.errors import ConfigError

NEEDED: dict[str, Any] = {"run": {"dir": "runs/x", "steps": 1}, "model": {"path": "m"}, "task": {"kind": "arithmetic"}}
"""What the last version that had these keys wrote into a run's config.yaml."""


IDLE = {key: "x" if one.idle is None else one.idle[0] for key, one in gone.KEYS.items()}
"""A value of each removed key that asks for nothing."""


def written(folder: Path, values: dict[str, Any]) -> Path:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(NEEDED | values))
    return file


def test_values_that_ask_for_nothing_are_passed_over(tmp_path: Path) -> None:
    """As in the configuration of an older run, which has every key; an optional section that loses keys stays."""
    optional = {"telemetry": {"mlflow": {}}}
    given = [f"{key}={json.dumps(value)}" for key, value in IDLE.items()]
    assert configuration.load(written(tmp_path, optional), given) == configuration.parse(NEEDED | optional)


def test_all_that_an_older_configuration_asks_for_is_answered_at_once(tmp_path: Path) -> None:
    values = {"queue": {"admission": "sample", "capacity": -1}, "sync": {"method": "store", "staging": False}, "rollout": {"oversample": 0}}
    with pytest.raises(ConfigError) as caught:
        configuration.load(written(tmp_path, values))
    told = [line.partition("config.yaml:")[2].split(": ")[1] for line in str(caught.value).splitlines()]
    assert told == ["queue.admission", "sync.staging", "sync.method", "queue.capacity"]
    assert gone.LAST in str(caught.value)


def test_what_starts_nothing_reads_it_all_the_same(tmp_path: Path) -> None:
    """Also keys that no release had; an override is never passed over."""
    values = {"run": {"dir": str(tmp_path), "steps": 1}, "sync": {"method": "store", "staging": False}, "journal": {"turns": True}}
    written(tmp_path, values)
    assert configuration.of_run(tmp_path).sync.method == "reshard"
    with pytest.raises(ConfigError) as caught:
        configuration.of_run(tmp_path, idle=False)
    for key in ("sync.method", "sync.staging", "journal"):
        assert f"{key}: got" in str(caught.value)
    with pytest.raises(ConfigError, match=r"queue\.unheard"):
        configuration.of_run(tmp_path, ["queue.unheard=1"])


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

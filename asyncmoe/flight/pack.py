"""A pack: a folder that is a run's directory with only what it takes to train some recorded steps again, for example for a bug report.

It has no absolute path, and no secret that can be recognised (`asyncmoe.telemetry.secrets`). It has the trajectories, and so the texts.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import yaml

from asyncmoe import checkpoints, plugins, storage
from asyncmoe.checkpoints import directories, intact, manifest
from asyncmoe.checkpoints.facts_file import FACTS
from asyncmoe.config import Config, moved
from asyncmoe.errors import DataError
from asyncmoe.flight import records
from asyncmoe.flight.batches import Batches
from asyncmoe.flight.records import StepRecords
from asyncmoe.flight.source import RecordedRun
from asyncmoe.log import belonging
from asyncmoe.log.files import FileLog
from asyncmoe.log.log import Place
from asyncmoe.models import hub, load_hf_config, origin
from asyncmoe.queue.queue_log import CONTROLLER, OWN
from asyncmoe.queue.records import Change, LogEntry, StepCommitted, encode
from asyncmoe.telemetry.secrets import HIDDEN, is_secret, without_users

PLUGINS = "plugins"
"""Folder from which the user's own code can be imported."""
_RUN = "packed"
"""`run.dir` in a pack: `asyncmoe.config.moved.of_run` replaces it by the pack's path."""
_ABSOLUTE = re.compile(r"(?:file://|(?<![\w./~-]))/(?=[^\s/])(?:[^\s/:,;'\"]+/)*")
"""An absolute path up to its last name; not a path of a URL."""
_PRIVATE = ("task", "evaluation", "lora.start")
"""Beginnings of keys whose texts in a run's origin may have names of files; a pack does not have these files."""


def pack(run_dir: Path, first: int, last: int, out: Path) -> list[str]:
    """Write to a new folder what it takes to train the steps from `first` to `last` again, and the steps before them since a checkpoint.

    Args:
        first, last: numbers of steps as users count them.

    Returns:
        A line for each part: its name and bytes.

    Raises:
        DataError: the run lacks one of the steps, or a part of it is damaged; or `out` exists.
        ConfigError: the user's own code cannot be imported.
        StorageError: it cannot be written.
    """
    source = RecordedRun.of(run_dir)
    config, start = hub.with_local_model(source.config, download=False), source.base(first - 1)
    starts = [one.start for one in source.stretches(start, last)]
    with storage.new_directory("the pack", out) as folder, storage.writing("the pack", out):
        kept = {key: text for key, text in origin.read(run_dir).items() if not key.startswith(_PRIVATE)}
        (folder / origin.FILE).write_text(json.dumps(kept, indent=1))
        (folder / moved.FILE).write_text(yaml.safe_dump(cleaned(config.model_dump(mode="json"), start), sort_keys=False))
        (folder / records.TRAINED).write_bytes(b"".join(_lines(source.recorded, start, last)))
        if (checkpoint := source.checkpoint(start)) is not None:
            _copy(checkpoint, folder / directories.FOLDER / checkpoint.name, kept)
        _model(config, [one.config for one in starts], folder, start)
        for name, file in _own_modules(config):
            place = folder / PLUGINS / Path(*name.split("."), *(["__init__"] if file.stem == "__init__" else [])).with_suffix(".py")
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, place)
        known = belonging.read(run_dir)
        assert known is not None  # `Batches` has read it
        packed = belonging.Belonging(belonging.FORM, known.of, begun=True)
        belonging.write(folder, packed)
        asyncio.run(_log(folder / belonging.FOLDER, packed.run, source.batches, range(start, last)))
        sealed = {name: manifest.seal(folder / name, sync=True) for name in manifest.names_in(folder)}
        manifest.write(folder, sealed)
    parts = Counter[str]()
    for name, one in sealed.items():
        parts[name.partition("/")[0]] += one.nbytes
    return [f"{part}: {storage.size(nbytes)}" for part, nbytes in parts.items()]


def _own_modules(config: Config) -> list[tuple[str, Path]]:
    """Import the user's own code that training needs; return name and file of each module that this imports, without installed packages.

    Raises:
        ConfigError: it cannot be imported.
    """
    before = {*sys.modules}
    for target in [target for target, _ in config.objective.own.values()] + [*filter(plugins.is_name, [config.model.family])]:
        plugins.load(target, "objective", forms=plugins.FORM, wanted="the run's own code")
    found = [(name, Path(getattr(sys.modules[name], "__file__", None) or "")) for name in sys.modules.keys() - before]
    return [(name, file) for name, file in found if file.suffix == ".py" and not str(file).startswith(plugins.LIBRARIES)]


def verify(out: Path) -> None:
    """Read every file of a pack. Raises DataError: names the file that is not as it was packed."""
    listed = manifest.read(out)
    if fault := manifest.missing_or_cut(out, listed) or manifest.changed(out, listed, sorted(listed)):
        raise DataError(str(out), got=fault, expected="every file as it was packed")


def cleaned(values: Mapping[str, Any], start: int) -> dict[str, Any]:
    """Return a configuration, as `Config.model_dump(mode="json")` returns it, for a pack that begins with the state after `start` steps."""
    made: dict[str, Any] = _public(values)
    made["run"]["dir"] = _RUN
    made["model"] |= {"path": f"{_RUN}/model", "make": None}
    made["lora"]["start"] = f"{_RUN}/adapter" if made["lora"]["start"] and not start else None
    made["log"] |= {"folder": None, "redis": None}
    made["trainer"]["checkpoint_copy"] = None
    made["telemetry"] |= {"tensorboard": "off", **dict.fromkeys(("prometheus_port", "wandb", "mlflow", "trackio", "profile"))}
    return made


def _public(value: Any, key: str = "") -> Any:
    """Return nested values without secrets, and with absolute paths reduced to names."""
    if isinstance(value, Mapping):
        return {name: _public(part, key if is_secret(key) else str(name)) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_public(part, key) for part in value]
    if not isinstance(value, str):
        return value
    return HIDDEN if is_secret(key) and value else _ABSOLUTE.sub("", without_users(value))


def _lines(recorded: StepRecords, start: int, last: int) -> Iterator[bytes]:
    """Yield the records of the steps after `start`, each start of the trainer before its first step."""
    former = None
    for step in range(start + 1, last + 1):
        if (now := recorded.starts[step]) is not former:
            yield msgspec.json.encode(msgspec.structs.replace(now, config=cleaned(now.config, start))) + b"\n"
        yield msgspec.json.encode(recorded.steps[step]) + b"\n"
        former = now


def _copy(checkpoint: Path, copy: Path, kept: Mapping[str, str]) -> None:
    """Copy a checkpoint, with only the `kept` part of its origin."""
    for name in (manifest.MANIFEST, *manifest.names_in(checkpoint)):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(checkpoint / name, copy / name)
    if fault := intact.fault(copy):
        raise intact.refused(checkpoint, fault)
    facts = checkpoints.facts(copy)
    (copy / FACTS).write_text(json.dumps({**facts, "origin": dict(kept)}, indent=1))
    manifest.write(copy, {**manifest.read(copy), FACTS: manifest.seal(copy / FACTS)})


def _model(config: Config, starts: Iterable[Mapping[str, Any]], folder: Path, start: int) -> None:
    """Copy config.json, and the weights if training reads them: to start from, below adapters, or as the reference policy."""
    (folder / "model").mkdir()
    hf = {key: value for key, value in load_hf_config(config.model.path).items() if key != "_name_or_path"}
    (folder / "model" / "config.json").write_text(json.dumps(hf, indent=2))
    if not start or config.adapter is not None or any(one["objective"]["kl"]["coefficient"] for one in starts):
        for path in sorted(config.model.path.glob("*.safetensors*")):
            shutil.copyfile(path, folder / "model" / path.name)
    if not start and config.lora.start is not None:
        shutil.copytree(config.lora.start, folder / "adapter")


async def _log(folder: Path, run: str, batches: Batches, numbers: Iterable[int]) -> None:
    """Write a log with only the batches of these leases."""
    changes, payloads = (FileLog(folder, run, writer) for writer in (CONTROLLER, str(OWN)))
    with closing(changes), closing(payloads):
        for number in numbers:
            groups = []
            for group in batches.leases[number].groups:
                position = payloads.append([batches.payload(number, group)])
                await payloads.durable(position)
                groups.append(msgspec.structs.replace(group, place=Place(OWN, position)))
            made: list[Change] = [msgspec.structs.replace(batches.leases[number], groups=tuple(groups))]
            if number in batches.ended:
                made.append(StepCommitted(number, batches.ended[number], tuple(one.number for one in groups)))
            for change in made:
                changes.append([encode(LogEntry(change))])
    for lock in folder.glob("*/lock"):  # it names this host
        lock.unlink()

"""The version store of a run: `sync.store`, and the identity under which the run's versions lie there."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

from asyncmoe import storage
from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError, ConfigError, DataError, UserError
from asyncmoe.version_store.files import StoreFiles
from asyncmoe.version_store.remote import open_files
from asyncmoe.version_store.store import VersionStore

MARKER = "version_store.json"
"""In the run's directory: the random name of its versions."""
KEY = "sync.store.url"
_ANSWER_S = 60.0


def run_of(run_dir: Path) -> str:
    """Return the identity of a run's versions; make one if there is none.

    Raises:
        DataError: the run's file is damaged.
        StorageError: it cannot be written.
    """
    path = run_dir / MARKER
    try:
        return str(json.loads(path.read_text())["run"])
    except FileNotFoundError:
        name = uuid.uuid4().hex
    except (ValueError, KeyError, TypeError) as error:
        hint = f"delete it, and what is in {KEY}"
        raise DataError(str(path), got="a damaged file", expected="the name of the run's weight versions", hint=hint) from error
    with storage.writing("the name of the run's weight versions", path):
        storage.make_private(run_dir)
        written = path.with_suffix(".writing")
        written.write_text(json.dumps({"run": name}))
        written.rename(path)
    return name


def opened(config: Config, timeout_s: float) -> VersionStore:
    """Return the store of a run. Only one process of the run does this first (see `run_of`). No connection is made.

    Raises:
        UserError: the URL cannot be opened, or `run_of` fails.
    """
    assert config.sync.store.url is not None
    return VersionStore(open_files(config.sync.store.url, KEY, timeout_s), run_of(config.run.dir))


def files_of(config: Config) -> StoreFiles:
    """Return the files of a run's store, for ranks that only write objects."""
    assert config.sync.store.url is not None
    return open_files(config.sync.store.url, KEY, config.sync.timeout_s)


def check(config: Config, *, gpu: bool) -> None:
    """Refuse a store that cannot be opened here, or that weights do not reach; nothing is written, and no connection is made.

    Args:
        gpu: weights are in GPU memory.

    Raises:
        UserError: see `open_files`.
    """
    if config.sync.store.url is None:
        return
    open_files(config.sync.store.url, KEY)
    if gpu:
        hint = "versions are written from and read into host memory so far"
        raise ConfigError("sync.method", got="store, and this machine has GPUs", expected="reshard or broadcast", hint=hint)


def claim(config: Config) -> None:
    """Refuse a store that does not answer, cannot be written to, or is another run's; make it this run's if it is nobody's.

    Raises:
        UserError: it is one of these.
    """
    if config.sync.store.url is None:
        return
    store = opened(config, min(_ANSWER_S, config.sync.timeout_s))
    try:
        store.claim()
        store.files.write(".probe", b"asyncmoe tried to write here\n")
        store.files.delete(".probe")
    except UserError:
        raise
    except AsyncmoeError as error:
        raise ConfigError(KEY, got=str(error), expected="a place that can be read and written") from error

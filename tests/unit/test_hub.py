"""Ids on the Hugging Face hub: recognised, asked for within seconds, and refused in one line without a network or a repository."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from asyncmoe import models
from asyncmoe.config import Config, parse
from asyncmoe.errors import DataError
from asyncmoe.models import hub


def config(path: str) -> Config:
    return parse({"run": {"dir": "run", "steps": 1}, "model": {"path": path}, "task": {"kind": "arithmetic"}})


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory and cache; the hub is a port where nothing listens."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        yield tmp_path


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("Qwen/Qwen3-0.6B", True),
        ("models/tiny", False),  # the directory models exists
        ("/data/model", False),
        ("./a/b", True),  # pathlib drops the leading dot
        ("../a/b", False),
        ("a/b/c", False),
        ("model", False),
        (".cache/x", False),
        ("ä/b", False),
    ],
)
def test_an_id_is_an_organisation_and_a_name_that_are_no_path_here(empty: Path, path: str, expected: bool) -> None:
    (empty / "models").mkdir()
    assert hub.is_id(Path(path)) is expected


def test_without_a_network_a_model_is_refused_at_once(empty: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(DataError) as caught:
        hub.with_local_model(config("org/name"))
    assert time.monotonic() - begin < 15
    line = str(caught.value)
    assert line.startswith("model.path: got org/name: no such path here, and http://127.0.0.1:")
    assert "cannot be reached" in line
    assert "HF_HUB_OFFLINE=1" in line
    assert "\n" not in line


@pytest.fixture
def refusing(empty: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A hub without any repository; the paths it was asked for."""
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(401)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    yield asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_repository_that_is_not_there_is_named(refusing: list[str]) -> None:
    with pytest.raises(
        DataError,
        match=r"task\.path: got org/data: no such path here, and as an id the hub answered .*a dataset that you may read; check the name",
    ) as caught:
        hub.check_reachable("dataset", "org/data", "task.path")
    assert refusing == ["/api/datasets/org/data"]
    assert "\n" not in str(caught.value)


def test_a_model_in_the_cache_is_found_without_asking(empty: Path) -> None:
    commit = "0" * 40
    kept = empty / "cache" / "models--org--name"
    for folder in (kept / "refs", kept / "snapshots" / commit):
        folder.mkdir(parents=True)
    (kept / "refs" / "main").write_text(commit)
    (kept / "snapshots" / commit / "config.json").write_text("{}")
    found = hub.with_local_model(config("org/name"), download=False)
    assert found.model.path == kept / "snapshots" / commit
    assert models.load_hf_config(found.model.path) == {}
    with pytest.raises(DataError, match=r"model\.path: got org/other: LocalEntryNotFoundError"):
        hub.with_local_model(config("org/other"), download=False)


def test_a_directory_is_never_looked_for_on_the_hub(empty: Path) -> None:
    (empty / "org" / "name").mkdir(parents=True)
    assert hub.with_local_model(config("org/name")) == config("org/name")
    made = config("other/name").model_copy(update={"model": config("other/name").model.model_copy(update={"make": models})})
    assert hub.with_local_model(made) is made


def test_commands_that_only_read_say_what_an_id_is(empty: Path) -> None:
    with pytest.raises(DataError, match=r"org/name: got no such directory, expected .*; asyncmoe run downloads a model of this id"):
        models.load_hf_config(Path("org/name"))

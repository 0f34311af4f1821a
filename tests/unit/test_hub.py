"""Ids on the Hugging Face hub: recognised, looked up within seconds, and refused in one line without a network or a repository."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from asyncmoe import models, storage
from asyncmoe.config.model import MadeModel
from asyncmoe.errors import DataError
from asyncmoe.launch import local
from asyncmoe.launch.validate import validate
from asyncmoe.models import hub, make
from tests.configs import demo, minimal


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
        *((path, True) for path in ("Qwen/Qwen3-0.6B", "./a/b")),  # pathlib drops the leading dot
        *((path, False) for path in ("mine/tiny", "models/Qwen3-30B-A3B", "datasets/x", "/data/model", "../a/b", "a/b/c", "model")),
    ],
)
def test_an_id_is_an_organisation_and_a_name_that_are_no_path_here(empty: Path, path: str, expected: bool) -> None:
    (empty / "mine").mkdir()
    assert hub.is_id(Path(path)) is expected


def test_a_folder_of_models_that_is_not_there_is_not_asked_of_the_hub(empty: Path) -> None:
    at_models = minimal(model="models/Qwen3-30B-A3B")
    assert hub.with_local_model(at_models) == at_models
    for refuse in (lambda: models.hf_config_of(at_models), lambda: validate(at_models)):
        with pytest.raises(DataError, match=r"^models/Qwen3-30B-A3B: got no such directory"):
            refuse()


def test_without_a_network_a_model_is_refused(empty: Path) -> None:
    with pytest.raises(DataError, match=r"^model\.path: got org/name: .*http://127\.0\.0\.1:\d+ cannot be reached"):
        hub.with_local_model(minimal(model="org/name"))


def test_a_model_in_the_cache_is_found_without_asking(empty: Path) -> None:
    commit = "0" * 40
    kept = empty / "cache" / "models--org--name"
    for folder in (kept / "refs", kept / "snapshots" / commit):
        folder.mkdir(parents=True)
    (kept / "refs" / "main").write_text(commit)
    (kept / "snapshots" / commit / "config.json").write_text("{}")
    found = hub.with_local_model(minimal(model="org/name"), download=False)
    assert found.model.path == kept / "snapshots" / commit
    assert models.load_hf_config(found.model.path) == {}
    with pytest.raises(DataError, match=r"model\.path: got org/other: LocalEntryNotFoundError"):
        hub.with_local_model(minimal(model="org/other"), download=False)


@contextmanager
def serving(model: Path, names: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A hub that has these files of `model` as org/name and nothing else; the names of the files that were sent."""
    sent: list[str] = []
    commit = "1" * 40

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            body, kind = b"", {}
            if path.startswith("/api/models/org/name"):
                files = [{"type": "file", "oid": "2" * 40, "size": (model / name).stat().st_size, "path": name} for name in names]
                siblings = [{"rfilename": file["path"], "size": file["size"]} for file in files]
                body = json.dumps(files if "/tree/" in path else {"id": "org/name", "sha": commit, "siblings": siblings}).encode()
                kind = {"Content-Type": "application/json"}
            elif "/resolve/" in path:
                name = path.rpartition("/")[2]
                body, kind = (model / name).read_bytes(), {"ETag": f'"{name}"', "X-Repo-Commit": commit}
                if self.command == "GET":
                    sent.append(name)
            known = path.startswith(("/api/models/org/name", "/org/name"))
            self.send_response(200 if known else 401)
            for key, value in {**kind, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
        yield sent
        server.shutdown()


def test_a_run_of_an_id_is_checked_without_its_weights(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "check_engine_python", lambda configured: Path("python"))
    model = empty / "made"
    make.make_model(model, MadeModel(), seed=0)
    config, names = demo("model.path=org/name", "model.make=null"), sorted(path.name for path in model.iterdir())
    (model / "pytorch_model.bin").write_bytes(b"no run needs it")
    size = sum(path.stat().st_size for path in model.iterdir() if path.name in names)
    with serving(model, [*names, "pytorch_model.bin"], monkeypatch) as sent:
        told = validate(config)
        assert told.endswith(f"1 engine of 1 rank(s); a run first downloads {len(names)} files of org/name, {storage.size(size)}")
        assert sorted(sent) == [name for name in names if "safetensors" not in name]
        assert not list((empty / "cache").rglob("*.json")), "a run begins with the cache as it was"
        local_model = hub.with_local_model(config).model.path
        assert {path.name for path in local_model.iterdir()} == set(names), "what a run downloads is what was counted"
        sent.clear()
        assert validate(config).endswith("1 engine of 1 rank(s)")
        (local_model / "model.safetensors").unlink()
        assert "a run first downloads 1 file of org/name, " in validate(config)
        assert "model.safetensors" not in sent
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"model\.path: got org/name: .* incomplete: 1 file\(s\) are missing \(model\.safetensors\)"):
        validate(config)


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["README.md", "model.gguf"], "got org/name without config.json"),
        (["config.json", "pytorch_model.bin"], "got org/name without *.safetensors"),
    ],
)
def test_a_repository_without_a_model_is_refused_before_it_is_fetched(
    empty: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], told: str
) -> None:
    for name in names:
        (empty / name).write_bytes(b"{}")
    with serving(empty, names, monkeypatch) as sent:
        with pytest.raises(DataError) as caught:
            hub.described(minimal(model="org/name"), empty / "scratch")
        assert told in str(caught.value)
        assert sent == []
        with pytest.raises(DataError, match=r"^task\.path: got org/data: .*the hub answered"):
            hub.check_reachable("dataset", "org/data", "task.path")

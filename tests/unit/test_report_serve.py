"""The live page's server: who gets an answer, and that the data is new."""

from __future__ import annotations

import gzip
import json
import shutil
import socket
import threading
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from report_pages import write_samples
from telemetry_runs import write_run

from asyncmoe.errors import UserError
from asyncmoe.telemetry.report import page, serve, watched
from asyncmoe.telemetry.report.serve import ReportServer


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "_library", lambda: ("", page.pack(b"")))
    monkeypatch.setattr(watched, "_LEAST_S", 0.0)
    monkeypatch.setattr(watched, "_REST", 0.0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ReportServer]:
    (tmp_path / "run").mkdir()
    with ReportServer([tmp_path / "run"]) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.02,))
        thread.start()
        yield made
        made.shutdown()
        thread.join(10)


def _get(server: ReportServer, path: str, token: str | None = None, **headers: str) -> tuple[HTTPResponse, bytes]:
    connection = HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    connection.request("GET", f"/{server.token if token is None else token}/{path}", headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


def _data(server: ReportServer, **headers: str) -> tuple[HTTPResponse, Any]:
    answer, body = _get(server, "data.json", **headers)
    return answer, json.loads(gzip.decompress(body)) if answer.status == 200 else None


def test_a_page_follows_its_run(server: ReportServer, tmp_path: Path) -> None:
    answer, body = _get(server, "")
    assert (answer.status, answer.headers["Cache-Control"], answer.headers["Referrer-Policy"]) == (200, "no-store", "no-referrer")
    assert b'data-live="yes"' in body
    assert b"connect-src 'self'" in body
    assert "got no step" in _data(server)[1][0]["waiting"]
    end = write_run(tmp_path / "run", warmup=1, rl=2)
    first, (run,) = _data(server)
    assert (run["waiting"], run["what"].split(" in ")[0]) == ("", "2 RL steps")
    again, nothing = _data(server, **{"If-None-Match": first.headers["ETag"]})
    assert (again.status, nothing) == (304, None)
    write_run(tmp_path / "run", warmup=1, rl=4, first=4, start=end)
    write_samples(tmp_path / "run", 3)
    newer, (run,) = _data(server, **{"If-None-Match": first.headers["ETag"]})
    assert (newer.status, run["what"].split(" in ")[0], len(run["samples"]["heads"])) == (200, "4 RL steps", 3)
    answer, body = _get(server, "group/0/2")
    assert json.loads(body)["head"] == run["samples"]["heads"][2]


def test_nobody_else_gets_an_answer(server: ReportServer, tmp_path: Path) -> None:
    write_run(tmp_path / "run", warmup=1, rl=1)
    write_samples(tmp_path / "run")
    port = server.server_address[1]
    assert server.server_address[0] == "127.0.0.1"
    for token in ("", "x", server.token[:-1], server.token + "x", "ä"):
        answer, body = _get(server, "data.json", token if token.isascii() else "%C3%A4")
        assert (answer.status, b"RL steps" in body) == (403, False)
    for host in ("evil.example", f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", "127.0.0.1:x", ""):
        assert _get(server, "", Host=host)[0].status == 403, host
    for host in ("localhost:8080", f"127.0.0.1:{port}", "LOCALHOST"):
        assert _get(server, "", Host=host)[0].status == 200, host
    for path in ("group/0/99", "group/9/0", "group/0/-1", "../x", "x", "group/0/1e3"):
        assert _get(server, path)[0].status == 404, path


@pytest.mark.parametrize(
    "sent",
    [b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n", b"\xff\x00\r\n\r\n", b"GET /\r\n\r\n", b""],
)
def test_broken_requests_do_not_end_the_server(server: ReportServer, sent: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_connection(("127.0.0.1", server.server_address[1]), 10) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        got = connection.recv(100)
        assert (
            got.startswith((b"HTTP/1.1 403", b"HTTP/1.1 400", b"HTTP/1.0 400"))
            or b"Error" in got
            or got.startswith(b"this server answers to 127.0.0.1 and localhost only")
            or (not sent and not got)
        ), got
    assert _get(server, "")[0].status == 200
    assert capsys.readouterr().err == ""


def test_connections_are_bounded(server: ReportServer, monkeypatch: pytest.MonkeyPatch) -> None:
    idle = [socket.create_connection(("127.0.0.1", server.server_address[1]), 10) for _ in range(serve._MOST_CONNECTIONS)]
    try:
        with socket.create_connection(("127.0.0.1", server.server_address[1]), 10) as refused:
            refused.settimeout(10)
            assert refused.recv(1) == b""
    finally:
        for one in idle:
            one.close()


def test_what_cannot_be_served_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"asyncmoe report RUN: got .*/none, which is no directory, expected the run\.dir of a run"):
        ReportServer([tmp_path / "none"])
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UserError, match=r"--port: got \d+: Address already in use"):
        ReportServer([tmp_path], taken.getsockname()[1])


def test_a_run_that_is_deleted_while_it_is_served_is_gone(server: ReportServer, tmp_path: Path) -> None:
    assert "got no step" in _data(server)[1][0]["waiting"]
    for write in (False, True):
        if write:
            write_run(tmp_path / "run", warmup=1, rl=1)
            assert _data(server)[1][0]["waiting"] == ""
        shutil.rmtree(tmp_path / "run")
        assert _data(server)[1][0]["waiting"] == f"{tmp_path / 'run'} is gone: it was deleted or moved"


def test_a_damaged_line_does_not_blank_the_page(server: ReportServer, tmp_path: Path) -> None:
    write_run(tmp_path / "run", warmup=1, rl=1)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write("garbage\n")
    run = _data(server)[1][0]
    assert (run["waiting"], run["notes"][0].split(":")[0]) == ("", "metrics.jsonl")
    assert run["sections"]


def test_a_page_without_samples_has_none(tmp_path: Path) -> None:
    write_run(tmp_path, warmup=1, rl=1)
    write_samples(tmp_path)
    with ReportServer([tmp_path], samples=False) as server:
        assert b'"heads":[]' in gzip.decompress(server.watched.data().body)
        assert server.watched.group(0, 0) is None


def test_address_is_on_loopback_and_has_the_token(tmp_path: Path) -> None:
    with ReportServer([tmp_path]) as server:
        parts = urlsplit(server.address)
        assert (parts.hostname, parts.path) == ("127.0.0.1", f"/{server.token}/")
        assert len(server.token) >= 32

"""Meeting by the environment alone, and one controller for each run: real servers in other processes, real clients here."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from asyncmoe.errors import UserError, WaitTimeout
from asyncmoe.launch.torchrun import free_port
from asyncmoe.rpc import environment, keys
from asyncmoe.rpc.client import Client
from asyncmoe.rpc.environment import CONTROLLER, KEYS, RendezvousVariables
from asyncmoe.rpc.messages import Commit, Done, Reply, Request
from asyncmoe.rpc.rendezvous import Rendezvous
from asyncmoe.rpc.server import Server

SECRET, OTHER = "0123456789abcdef" * 4, "ab" * 32
CONTROLLER_PROGRAM = """
import asyncio, sys
from pathlib import Path
from asyncmoe.errors import AsyncmoeError
from asyncmoe.rpc import keys
from asyncmoe.rpc.environment import given
from asyncmoe.rpc.messages import Done
from asyncmoe.rpc.server import Server

async def answer(request):
    return Done()

async def main(run_dir):
    keys.refuse_another(run_dir)
    async with Server(answer, given=given()) as server:
        keys.write(run_dir, await server.start())
        print("listens", flush=True)
        await server.serve()

try:
    asyncio.run(main(Path(sys.argv[1])))
except AsyncmoeError as error:
    print(f"error: {error}", flush=True)
"""


async def _done(request: Request) -> Reply:
    return Done()


@contextmanager
def controller(run_dir: Path, **variables: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A controller in a process of its own, and the first line it says."""
    known = {name: value for name, value in os.environ.items() if name not in (CONTROLLER, KEYS)}
    command = [sys.executable, "-c", CONTROLLER_PROGRAM, str(run_dir)]
    with subprocess.Popen(command, env=known | variables, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Set both variables, for this process too."""
    values = {CONTROLLER: f"tcp://127.0.0.1:{free_port('127.0.0.1')}", KEYS: SECRET}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return values


def test_server_and_client_meet_through_the_environment_alone(tmp_path: Path, here: dict[str, str]) -> None:
    with controller(tmp_path / "controllers", **here) as (_, said):
        assert said == "listens"
        found = keys.read(tmp_path / "nothing is here", 20)
        assert found.address == here[CONTROLLER]
        with Client(found, "t") as client:
            assert client.ask(Commit(0), 20)[0] == Done()
    assert not (tmp_path / "nothing is here").exists()


def test_a_client_may_come_first(tmp_path: Path, here: dict[str, str]) -> None:
    script = "import sys; from pathlib import Path; from asyncmoe.rpc import keys; print(keys.read(Path(sys.argv[1]), 60).address)"
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "x")], stdout=subprocess.PIPE, text=True) as client:
        with pytest.raises(subprocess.TimeoutExpired):
            client.wait(1.0)
        with controller(tmp_path, **here):
            assert client.communicate(timeout=60)[0].strip() == here[CONTROLLER]


def test_another_secret_is_not_let_in(tmp_path: Path, here: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with controller(tmp_path, **here):
        monkeypatch.setenv(KEYS, OTHER)
        with pytest.raises(WaitTimeout, match=rf"{here[CONTROLLER]}, and the listener there does not have the keys of {KEYS}") as caught:
            keys.read(tmp_path, 1)
        wrong = environment.given()
        assert wrong is not None
        with Client(keys.of(wrong), "t") as client, pytest.raises(WaitTimeout):
            client.ask(Commit(0), 1)
        monkeypatch.setenv(KEYS, SECRET)
        with Client(keys.read(tmp_path, 20), "t") as client:
            assert client.ask(Commit(0), 20)[0] == Done()
    assert OTHER not in str(caught.value)


def test_where_nobody_listens_the_address_and_this_machine_are_named(tmp_path: Path, here: dict[str, str]) -> None:
    with pytest.raises(WaitTimeout, match=rf"{CONTROLLER} is {here[CONTROLLER]}, .*{socket.gethostname()}.*refused"):
        keys.read(tmp_path, 0.2)


def test_keys_derive_from_the_secret_alone_and_are_pairs() -> None:
    made, again, other = (keys.derive(bytes.fromhex(secret)) for secret in (SECRET, SECRET, OTHER))
    assert made == again
    assert zmq.curve_public(made.server_secret) == made.server_public
    assert zmq.curve_public(made.client_secret) == made.client_public
    all_of_them = [value for keyring in (made, other) for value in vars(keyring).values()]
    assert len(set(all_of_them)) == 10
    assert SECRET not in repr(made) + repr(RendezvousVariables("h", 1, bytes.fromhex(SECRET)))


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({KEYS: SECRET}, [CONTROLLER, "got nothing", "tcp://HOST:PORT"]),
        ({CONTROLLER: "tcp://h:1"}, [KEYS, "got nothing", "openssl rand -hex 32"]),
        ({CONTROLLER: "tcp://h:1", KEYS: SECRET[1:]}, [KEYS, "got 63 characters", "64 hexadecimal digits"]),
        ({CONTROLLER: "tcp://h:1", KEYS: SECRET[2:] + "xy"}, [KEYS, "2 of them no hexadecimal digits"]),
        *(
            ({CONTROLLER: wrong, KEYS: SECRET}, [CONTROLLER, repr(wrong), "tcp://HOST:PORT"])
            for wrong in (
                "h:1",
                "tcp://h",
                "tcp://h:0",
                "tcp://h:65536",
                "tcp://:1",
                "tcp://*:1",
                "tcp://[::1]:1",
                "ipc://h:1",
                "tcp://h:1/",
            )
        ),
    ],
)
def test_half_or_malformed_is_refused_and_the_secret_is_not_shown(variables: dict[str, str], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        environment.given(variables)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert SECRET[2:10] not in str(caught.value)


def test_nothing_or_empty_is_none() -> None:
    assert environment.given({}) is environment.given({CONTROLLER: "", KEYS: ""}) is None


def test_an_address_of_another_machine_is_refused_and_both_are_named() -> None:
    async def start() -> None:
        async with Server(_done, given=RendezvousVariables("192.0.2.1", 41234, bytes(32))) as server:
            await server.start()

    with pytest.raises(UserError, match=rf"{CONTROLLER}: got tcp://192.0.2.1:41234 .*{socket.gethostname()}.*start the controller on"):
        asyncio.run(start())


def test_a_name_that_nobody_knows_is_refused() -> None:
    with pytest.raises(UserError, match=rf"{CONTROLLER}: got no-such-host.invalid"):
        environment.listen_on("no-such-host.invalid")


@pytest.mark.parametrize(
    ("host", "resolved", "expected"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("localhost", "127.0.0.1", "127.0.0.1"),
        ("node1", "127.0.1.1", "0.0.0.0"),
        ("node1", "10.1.2.3", "10.1.2.3"),
    ],
)
def test_what_is_listened_on(host: str, resolved: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.socket, "getaddrinfo", lambda *_: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (resolved, 0))])
    assert environment.listen_on(host) == expected


def test_a_second_controller_by_the_same_environment_is_refused(tmp_path: Path, here: dict[str, str]) -> None:
    with controller(tmp_path / "one", **here), controller(tmp_path / "two", **here) as (_, said):
        assert said.startswith(f"error: {CONTROLLER}: got {here[CONTROLLER]}")
        assert "in use" in said
        assert "the other controller of this run" in said


def test_a_second_controller_of_a_run_directory_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    with controller(tmp_path) as (first, _), controller(tmp_path) as (second, said):
        assert said.startswith(f"error: {tmp_path}: got a second controller, process {second.pid} on {socket.gethostname()}")
        assert f"process {first.pid} on {socket.gethostname()}" in said
        found = keys.read(tmp_path, 20)
        assert found.pid == first.pid
        with Client(found, "t") as client:
            assert client.ask(Commit(0), 20)[0] == Done()


def test_a_controller_that_was_killed_is_followed_by_another_with_its_address(tmp_path: Path, here: dict[str, str]) -> None:
    with controller(tmp_path, **here) as (first, _):
        first.kill()
        first.wait(10)
        with controller(tmp_path, **here) as (second, said):
            assert said == "listens"
            assert json.loads((tmp_path / keys.FILE_NAME).read_text())["pid"] == second.pid


def test_one_that_was_first_meanwhile_is_found_before_its_file_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the file of a controller that has ended is asked about, another writes its own."""
    old, ours = (keys.rendezvous(f"tcp://127.0.0.1:{port}", keys.generate()) for port in (1, 2))
    keys.write(tmp_path, old)
    with controller(tmp_path / "other"):
        theirs = (tmp_path / "other" / keys.FILE_NAME).read_bytes()
        asked, answers = [], keys.answers

        def slow(to: Rendezvous, timeout_s: float) -> bool:
            asked.append(to.address)
            (tmp_path / keys.FILE_NAME).write_bytes(theirs)
            return answers(to, timeout_s)

        monkeypatch.setattr(keys, "answers", slow)
        with pytest.raises(UserError, match="second controller"):
            keys.write(tmp_path, ours)
    assert asked[0] == old.address
    assert (tmp_path / keys.FILE_NAME).read_bytes() == theirs
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [keys.FILE_NAME]

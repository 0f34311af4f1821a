"""Frames to a controller's sockets, as a member of the run with its key and as a stranger without it."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import zmq

from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError
from asyncmoe.rpc import keys, local, messages
from asyncmoe.rpc.client import Client
from asyncmoe.rpc.codec import decode_reply, decode_request, encode
from asyncmoe.rpc.node_messages import EngineNode, EngineNodeEnd
from asyncmoe.rpc.rendezvous import Rendezvous
from asyncmoe.trainer.data import held
from asyncmoe.trajectory import decode, frames_in
from tests.fuzz import mutate, target

WINDOW = 64
"""Requests without an answer, of one connection."""
_ANSWER_S = 180.0
_MAX_WAIT_S = 0.02
"""Longer waits of a message are shortened, in most cases: a member that waits is no attack, and would only take time."""
_RARE = 0.02
"""Share of messages that end a run, of those drawn: each costs seconds in which the next run starts."""
_GREETING = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00CURVE" + b"\x00" * 15 + b"\x00" + b"\x00" * 31
"""A client's first 64 bytes (ZMTP 3.0, rfc.zeromq.org/spec/23)."""


def session(made: Config) -> list[bytes]:
    """Return one message of every kind, as the ranks of a run and its engines send them."""
    digest = made.digest
    sent: list[messages.Message] = [
        messages.Hello(0, 1, digest, 0),
        messages.Lease(0, "warmup", 4, 0, 0.02),
        messages.Lease(2, "rl", 4, 0, 0.02),
        messages.FindWorker(1, 0.02),
        messages.Commit(0),
        messages.Commit(2),
        messages.Saved(2),
        messages.Evaluations(2, 0.02),
        messages.Goodbye(0, False),
        messages.EnginesAsk(0.02),
        messages.WeightsJoin("127.0.0.1", 29500, "weights", "gloo", "reshard", 1),
        messages.WeightsJoin("127.0.0.1", 29500, "weights", "gloo", "broadcast", 1),
        messages.WeightsStage(1, False),
        messages.WeightsBegin(1),
        messages.WeightsBucket(1, ("model.embed_tokens.weight",), ("float32",), ((280, 64),)),
        messages.WeightsCommit(1, ({"weight": "1"},), 1),
        messages.WeightsFiles(1, "/tmp/version_1", ({"model.norm.weight": "0" * 16},)),
        messages.WeightsAbort(1, "the sender failed"),
        messages.EngineJoin("engine.7", "http://127.0.0.1:9", "key", "host", 1, 1, digest),
        messages.EngineAlive("engine.0", 0.02),
        messages.EngineLeave("engine.0", ""),
        EngineNode("engine.8", 1, 2, "start", "host", "name", "", "", 0.02, digest),
        EngineNodeEnd("engine.8", 1, "start", "its server is lost"),
    ]
    return [encode(one) for one in sent]


class Attacked:
    """A running target; `folder` holds its run and what is measured."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.config = folder, target.config(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._log = (folder / "log").open("w")
        self.process = subprocess.Popen([sys.executable, "-m", "tests.fuzz.target", str(folder)], stdout=self._log, stderr=self._log)
        self.rendezvous()

    def rendezvous(self) -> Rendezvous:
        """Return how the present run is reached; a run that has ended is soon followed by another."""
        until = time.monotonic() + _ANSWER_S
        while time.monotonic() < until:
            self.check()
            try:
                return keys.read(self.config.run.dir, 5.0)
            except AsyncmoeError:
                time.sleep(0.1)
        raise AssertionError(f"no run within {_ANSWER_S} s\n{self.log()}")

    def check(self) -> None:
        """Fail if the process has ended."""
        assert self.process.poll() is None, f"the controller ended with {self.process.returncode}\n{self.log()}"

    def log(self) -> str:
        """Return the end of its output."""
        return (self.folder / "log").read_text()[-6000:]

    def vitals(self) -> list[dict[str, Any]]:
        """Return what it measured, a record a second."""
        file = self.folder / "vitals.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def close(self) -> None:
        """End it at once; SIGTERM would end one run only."""
        self.process.kill()
        self.process.wait(10)
        self._log.close()


class Member:
    """Sends requests with the run's key and reads their answers, `WINDOW` at a time."""

    def __init__(self, attacked: Attacked) -> None:
        self._attacked, self._context = attacked, zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self.sent = self.answered = self.lost = 0
        self._open = 0

    def send(self, frames: Sequence[bytes]) -> None:
        """Send one request of any number of frames."""
        if self._socket is None:
            self._socket, self._open = self._connect(), 0
        while self._open >= WINDOW:
            self._receive()
            if self._socket is None:
                return self.send(frames)
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self._again()
            return self.send(frames)
        self.sent, self._open = self.sent + 1, self._open + 1

    def close(self) -> None:
        """Read the answers that are still to come, and leave."""
        while self._socket is not None and self._open:
            self._receive()
        self._again()
        self._context.term()

    def _receive(self) -> None:
        """Read one answer; after a second without one, look whether the run has ended, which loses those that are open."""
        assert self._socket is not None
        began, run = time.monotonic(), self._run
        while not self._socket.poll(1000):
            self._attacked.check()
            if target.key_of(self._attacked.config.run.dir) != run:
                return self._again()
            assert time.monotonic() - began < _ANSWER_S, (
                f"{self._open} requests without an answer for {_ANSWER_S} s\n{self._attacked.log()}"
            )
        parts = self._socket.recv_multipart()
        decode_reply(parts[1])
        self.answered, self._open = self.answered + 1, self._open - 1

    def _again(self) -> None:
        if self._socket is not None:
            self._socket.close(0)
        self._socket, self.lost, self._open = None, self.lost + self._open, 0

    def _connect(self) -> zmq.Socket[bytes]:
        to = self._attacked.rendezvous()
        self._run = to.server_public
        made: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        made.plain_username, made.plain_password = local.USER.encode(), to.local_secret.encode()
        made.setsockopt(zmq.LINGER, 0)
        made.connect(local.address(Path(to.local_dir)))
        return made


def member(attacked: Attacked, random: Random, count: int) -> dict[str, int]:
    """Send `count` mutated requests as a member; return what became of them."""
    corpus, sender = session(attacked.config), Member(attacked)
    for number in range(count):
        payload = mutate.msgpack(random, corpus)
        while (payload := _tame(random, payload)) is None:
            payload = mutate.msgpack(random, corpus)
        frames: list[bytes] = [struct.pack(">Q", number), payload]
        if random.random() < 0.02:
            frames = random.choice(([], [b""], [payload], [*frames, payload], [b"", payload], frames * 20))
        sender.send(frames or [b""])
    sender.close()
    return {"sent": sender.sent, "answered": sender.answered, "lost_with_their_run": sender.lost}


def _tame(random: Random, payload: bytes) -> bytes | None:
    """Shorten what waits; drop most of what ends a run, by None."""
    try:
        request = decode_request(payload)
    except AsyncmoeError:
        return payload
    if isinstance(request, messages.Goodbye | messages.WeightsAbort) and random.random() > _RARE:
        return None
    if getattr(request, "wait_s", 0.0) > _MAX_WAIT_S and random.random() < 0.999:
        request = msgspec.structs.replace(request, wait_s=_MAX_WAIT_S)
        return encode(request)
    return payload


def stranger(attacked: Attacked, random: Random, count: int) -> dict[str, int]:
    """Send `count` mutated frames of the transport itself to the TCP port, without a key; return what became of them."""
    recorded = [_GREETING, *map(_framed, session(attacked.config)), *map(_command, (b"HELLO", b"INITIATE", b"READY", b"PING"))]
    sent = connections = answers = 0
    while sent < count:
        host, port = attacked.rendezvous().address.removeprefix("tcp://").rsplit(":", 1)
        try:
            with socket.create_connection((host, int(port)), 5.0) as plug:
                plug.settimeout(0.0)
                connections += 1
                texts = [_GREETING if random.random() < 0.7 else mutate.octets(random, _GREETING, random.randbytes(64))]
                texts += [mutate.octets(random, random.choice(recorded), random.choice(recorded)) for _ in range(random.randint(10, 200))]
                for text in texts:
                    plug.send(text)
                    sent += 1
                answers += _secret(plug)
        except BlockingIOError:
            time.sleep(0.001)
        except OSError:
            attacked.check()
    return {"sent": sent, "connections": connections, "answers_of_the_run": answers}


def _secret(plug: socket.socket) -> int:
    """Return 1 if what came back holds a reply of the run; the server's own greeting and commands are none."""
    try:
        return int(any(name in plug.recv(1 << 16) for name in (b"Welcome", b"Leased", b"Engines", b"Done", b"Refused")))
    except OSError:
        return 0


def _framed(payload: bytes) -> bytes:
    return b"\x02" + struct.pack(">Q", len(payload)) + payload


def _command(name: bytes) -> bytes:
    return b"\x04" + bytes([1 + len(name) + 190]) + bytes([len(name)]) + name + b"\x00" * 190


def works(attacked: Attacked) -> None:
    """End the present run, and train on a batch of the next one in the same process: it answers as if nothing had been."""
    digest, run_dir, asked = attacked.config.digest, attacked.config.run.dir, attacked.folder / target.END
    until = time.monotonic() + _ANSWER_S
    while not (before := target.key_of(run_dir)):
        attacked.check()
        assert time.monotonic() < until, "no run began"
        time.sleep(0.05)
    asked.with_suffix(".new").write_text(before)
    asked.with_suffix(".new").rename(asked)  # not by goodbyes: a mutated Hello may have said that the trainer has 2^53 ranks
    while asked.exists() or target.key_of(run_dir) in ("", before):
        attacked.check()
        assert time.monotonic() < until, "the run did not end"
        time.sleep(0.05)
    with closing(Client(attacked.rendezvous(), "trainer.0")) as client:
        welcome, _ = client.ask(messages.Hello(0, 1, digest, 0), 30.0)
        assert isinstance(welcome, messages.Welcome)
        leased, _ = client.ask(messages.Lease(0, "warmup", 4, 0, 20.0), 30.0)
        assert isinstance(leased, messages.Leased)
        assert len(leased.items) == 4
        frames, each = held.fetch(client, leased.items, None, True), frames_in(1)
        assert [decode(frames[at : at + each]).key for at in range(0, len(frames), each)] == [item.key for item in leased.items]
        client.ask(messages.Commit(0), 30.0)
